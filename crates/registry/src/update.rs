//! Update: a compare-and-swap loop around one attempt. The first attempt starts from the cached
//! object; if it fails, it is repeated on the state read from the store before an error is
//! returned.

use serde_json::Value;
use skiff_meta::{Status, field};
use skiff_store::{Expect, Op, Write as KeyWrite};

use crate::commit::Committed;
use crate::create::{By, dedup_owner_references, ensure_namespace};
use crate::hooks::{Asked, Change};
use crate::{Context, Gate, Registry, Resource, encode, fields, object};

/// A write that keeps losing the race this often gives up with a conflict.
const ATTEMPTS: usize = 64;

/// Makes the new object out of the stored one (`None`: there is none yet). Runs once an attempt.
pub type Transform<'a> = dyn FnMut(Option<&Value>) -> Result<Value, Status> + Send + 'a;

/// Which rules a write follows: what it may touch and how it is checked.
#[derive(Clone, Copy)]
pub enum WriteScope {
    Main,
    Status,
    /// A subresource with rules of its own.
    Other {
        prepare: fn(new: &mut Value, old: &Value),
        validate: fn(new: &Value, old: &Value) -> Vec<field::Error>,
    },
}

/// The write of one object, or of several: on whose behalf, of what, and past whom.
#[derive(Clone, Copy)]
pub struct Write<'a> {
    pub context: &'a Context,
    pub resource: &'a Resource,
    /// Empty for cluster scope.
    pub namespace: &'a str,
    /// Admission.
    pub gate: &'a dyn Gate,
}

/// The result of a write.
pub struct Updated {
    pub object: Value,
    pub created: bool,
    /// The last finalizer of a deleted object went away, and the object with it.
    pub deleted: bool,
}

/// The object as an attempt starts from it.
struct Current {
    object: Value,
    revision: i64,
    /// It is stored in another form than it is written now.
    outdated: bool,
}

enum Attempt {
    Done(Updated),
    /// Someone else wrote in between; here is what they wrote.
    Raced(Option<Current>),
    /// Someone else changed what goes with the object.
    Overtaken,
    /// The cache has no such object: only the store can confirm that.
    Unsure,
    /// The store did not take the write, or did not say what became of it: nobody may try again in the client's place, because
    /// a second attempt that finds the first one's result would call that a conflict.
    Failed(Status),
    /// Nothing to write, if what the attempt started from is what the store has.
    Unchanged(Updated),
}

impl Registry {
    /// Changes the object `name`. With `allow_create` a missing one is created.
    pub async fn update(
        &self,
        write: &Write<'_>,
        name: &str,
        part: WriteScope,
        allow_create: bool,
        transform: &mut Transform<'_>,
    ) -> Result<Updated, Status> {
        let Write {
            context,
            resource,
            namespace,
            ..
        } = *write;
        let key = resource.key(namespace, name);
        // A dry run writes nothing, so no failed compare-and-swap would show that the cache is stale.
        let mut fresh = context.dry_run;
        let mut current = match fresh {
            true => self.stored_current(resource, &key).await?,
            false => self.cached_current(resource, &key).await?,
        };
        // Whether the stored form is to be written again although nothing changes in the object.
        let mut rewrite = false;
        for _ in 0..ATTEMPTS {
            let tried = current.as_ref().map(|current| current.revision);
            let mut outdated = current.as_ref().is_some_and(|current| current.outdated);
            let attempt = match current.take() {
                Some(old) => {
                    // For this attempt only: who wins a race against it may have stored the current form.
                    let attempt = (std::mem::take(&mut rewrite), fresh, part);
                    self.update_once(write, name, attempt, old, transform).await
                }
                None if !fresh => Ok(Attempt::Unsure),
                None if !allow_create => return Err(Status::not_found(&resource.group_resource, name)),
                None => {
                    let object = transform(None)?;
                    if context.uid_is_precondition {
                        check_uid(resource, context.dry_run, &object, (namespace, name, ""))?;
                    }
                    check_number(object::resource_version(&object))?;
                    let object = self.create_by(write, object, By::Update).await?;
                    return Ok(Updated {
                        object,
                        created: true,
                        deleted: false,
                    });
                }
            };
            match attempt {
                Ok(Attempt::Done(updated)) => return Ok(updated),
                Ok(Attempt::Failed(status)) => return Err(status),
                Ok(Attempt::Raced(found)) => current = found,
                Ok(Attempt::Unsure | Attempt::Overtaken) => {
                    current = self.stored_current(resource, &key).await?;
                }
                Ok(Attempt::Unchanged(updated)) => {
                    if !fresh {
                        current = self.stored_current(resource, &key).await?;
                    }
                    if fresh || current.as_ref().map(|current| current.revision) == tried {
                        outdated |= current.as_ref().is_some_and(|current| current.outdated);
                        let stale = async { self.store.is_stale(&key).await.map_err(crate::errors::store) };
                        if context.dry_run || !(outdated || stale.await?) {
                            return Ok(updated);
                        }
                        rewrite = true;
                        current = self.stored_current(resource, &key).await?;
                    }
                }
                Err(status) if fresh => return Err(status),
                Err(status) => {
                    current = self.stored_current(resource, &key).await?;
                    // The cached object was current: there is nothing to read again.
                    if current.as_ref().map(|current| current.revision) == tried {
                        return Err(status);
                    }
                }
            }
            fresh = true;
        }
        Err(Status::modified(&resource.group_resource, name))
    }

    async fn update_once(
        &self,
        write: &Write<'_>,
        name: &str,
        (rewrite, again, part): (bool, bool, WriteScope),
        current: Current,
        transform: &mut Transform<'_>,
    ) -> Result<Attempt, Status> {
        let Write {
            context,
            resource,
            namespace,
            gate,
        } = *write;
        let Current {
            object: mut old,
            revision,
            ..
        } = current;
        resource.strategy.serve_one(&mut old).await?;
        let mut new = transform(Some(&old))?;
        ensure_namespace(resource, namespace, &mut new)?;
        dedup_owner_references(context, &mut new, false);
        if context.uid_is_precondition {
            let of = (object::namespace(&old), object::name(&old), object::uid(&old));
            check_uid(resource, context.dry_run, &new, of)?;
        }
        let left_out = self.track_fields(context, resource, Some(&old), &mut new);
        {
            let _stage = context.stage("mutating-admission");
            gate.admit(Some(&mut new), Some(&old)).await?;
        }
        skiff_schema::put_back(&mut new, &left_out);
        ensure_namespace(resource, namespace, &mut new)?;
        check_version(resource, &mut new, &old)?;
        let asked = Asked {
            registry: self,
            context,
            again,
        };
        let change;
        {
            let _stage = context.stage("prepare");
            // Fields that a strategy resets do not appear in managedFields.
            let managed = fields::take(&mut new);
            change = match part {
                WriteScope::Main => resource.hook.begin_update(&mut new, &old, &asked).await?,
                _ => Change::default(),
            };
            match part {
                WriteScope::Main => resource.strategy.begin_update(&mut new, &old),
                WriteScope::Status => resource.strategy.begin_status_update(&mut new, &old),
                WriteScope::Other { prepare, .. } => {
                    keep_system_fields(&mut new, &old);
                    prepare(&mut new, &old);
                }
            }
            resource.hook.stamp(&mut new, &old, part, &|| self.now_text());
            fields::put(&mut new, managed.unwrap_or_default());
        }
        {
            let _stage = context.stage("validate");
            let mut found = resource.strategy.check_update(&new, &old, &part);
            if found.errors.is_empty() {
                let now = self.now().as_second();
                found.errors = resource.hook.check_update(&new, &old, part, now);
            }
            let missing_dependency = self
                .missing_dependency(resource, namespace, &new, Some(&old), part)
                .await?;
            found.errors.splice(0..0, missing_dependency);
            for warning in found.warnings {
                context.warn(warning);
            }
            if !found.errors.is_empty() {
                return Err(Status::invalid(&resource.group_kind, name, &found.errors));
            }
            if matches!(part, WriteScope::Main) {
                for warning in resource.strategy.warnings(&new, Some(&old)) {
                    context.warn(warning);
                }
            }
        }
        if !left_out.is_empty() {
            resource.strategy.normalise_sent(&mut new);
        }
        {
            let _stage = context.stage("validating-admission");
            gate.validate(Some(&mut new), Some(&old)).await?;
        }
        resource.strategy.normalise(&mut new);
        fields::keep_times(&mut new, &mut old);

        let key = resource.key(namespace, name);
        if self.emptied(resource, &new, &old) {
            let _stage = context.stage("store");
            if context.dry_run {
                return Ok(Attempt::Done(Updated {
                    object: new,
                    created: false,
                    deleted: true,
                }));
            }
            // The object is removed in its stored form; what the update would have allocated for it is not written.
            drop(change);
            let change = resource.hook.begin_delete(&old, &asked).await?;
            let write = KeyWrite::new(key, Expect::Revision(revision), Op::Delete);
            return match self.commits.write(write, change).await {
                Ok(Committed::Done { revision }) => {
                    object::set(&mut new, "resourceVersion", revision.to_string());
                    Ok(Attempt::Done(Updated {
                        object: new,
                        created: false,
                        deleted: true,
                    }))
                }
                Ok(Committed::Conflict { current }) => Ok(Attempt::Raced(current_of(resource, current)?)),
                Ok(Committed::Overtaken) => Ok(Attempt::Overtaken),
                Err(failed) => Ok(Attempt::Failed(crate::errors::store(failed.error))),
            };
        }
        if new == old && !rewrite {
            return Ok(Attempt::Unchanged(Updated {
                object: old,
                created: false,
                deleted: false,
            }));
        }
        if context.dry_run {
            let kept = resource.strategy.keep(&mut new).await?;
            return Ok(Attempt::Done(Updated {
                object: resource.strategy.answered(kept.as_ref(), new)?,
                created: false,
                deleted: false,
            }));
        }
        let expect = Expect::Revision(revision);
        match self.put(context, resource, &key, expect, &mut new, change).await {
            Ok(Committed::Done { revision }) => {
                object::set(&mut new, "resourceVersion", revision.to_string());
                Ok(Attempt::Done(Updated {
                    object: new,
                    created: false,
                    deleted: false,
                }))
            }
            Ok(Committed::Conflict { current }) => Ok(Attempt::Raced(current_of(resource, current)?)),
            Ok(Committed::Overtaken) => Ok(Attempt::Overtaken),
            Err(status) => Ok(Attempt::Failed(status)),
        }
    }

    /// Whether this update removes the last finalizer of an object that is being deleted.
    fn emptied(&self, resource: &Resource, new: &Value, old: &Value) -> bool {
        object::finalizers(new).is_empty()
            && object::deleting(old)
            && object::grace_period(old).unwrap_or(0) == 0
            && resource.hook.may_delete_on_update(new)
    }

    /// What the object refers to and its namespace does not have.
    pub(crate) async fn missing_dependency(
        &self,
        resource: &Resource,
        namespace: &str,
        new: &Value,
        old: Option<&Value>,
        part: WriteScope,
    ) -> Result<Option<field::Error>, Status> {
        let Some(needed) = resource.hook.needs(new, old, part) else {
            return Ok(None);
        };
        let labels = match self.resources.get("", "v1", "namespaces") {
            Some(namespaces) => {
                let found = self
                    .cached_current(namespaces, &namespaces.key("", namespace))
                    .await?;
                found.and_then(|found| object::metadata(&found.object, "labels").cloned())
            }
            None => None,
        };
        let has = labels
            .as_ref()
            .and_then(|labels| labels.get(needed.label))
            .and_then(Value::as_str)
            == Some(needed.value);
        Ok((!has).then_some(needed.otherwise))
    }

    async fn cached_current(&self, resource: &Resource, key: &str) -> Result<Option<Current>, Status> {
        let Some(entry) = self.cached(resource, key).await? else {
            return Ok(None);
        };
        Ok(Some(Current {
            object: encode::decode(&entry.bytes)?,
            revision: entry.revision,
            // The cache does not know; nothing is left unwritten by its word alone.
            outdated: false,
        }))
    }

    async fn stored_current(&self, resource: &Resource, key: &str) -> Result<Option<Current>, Status> {
        current_of(resource, self.read_stored(key).await?)
    }
}

fn current_of(resource: &Resource, found: Option<skiff_store::KeyValue>) -> Result<Option<Current>, Status> {
    let Some(found) = found else { return Ok(None) };
    let revision = found.mod_revision;
    Ok(Some(Current {
        object: resource.decode(&found)?,
        outdated: !resource.codec.is_current(&found.value),
        revision,
    }))
}

/// A uid in the body is a precondition. The old object is known by namespace, name and uid.
fn check_uid(
    resource: &Resource,
    dry_run: bool,
    new: &Value,
    (namespace, name, found): (&str, &str, &str),
) -> Result<(), Status> {
    let given = object::uid(new);
    if given.is_empty() || given == found {
        return Ok(());
    }
    let mut key = resource.key(namespace, name);
    // COMPAT: the message of a dry run has the key without the store's prefix.
    if dry_run {
        key = key.trim_start_matches("/registry").to_string();
    }
    Err(Status::conflict(
        &resource.group_resource,
        name,
        format_args!(
            "StorageError: invalid object, Code: 4, Key: {key}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: {given}, UID in object meta: {found}"
        ),
    ))
}

/// A resourceVersion in the body must be the stored one; without one the write is unconditional
/// where the kind allows that.
fn check_version(resource: &Resource, new: &mut Value, old: &Value) -> Result<(), Status> {
    let found = object::resource_version(old).to_string();
    let given = object::resource_version(new);
    let name = object::name(old);
    if given.is_empty() || given == "0" {
        if !resource.strategy.allows_unconditional_update() {
            let path = field::Path::new("metadata").child("resourceVersion");
            let error = field::Error::invalid(&path, 0, "must be specified for an update");
            // COMPAT: upstream names the resource where the kind belongs.
            let kind =
                skiff_meta::GroupKind::new(resource.group_resource.group.as_str(), resource.plural.as_str());
            return Err(Status::invalid(&kind, name, &[error]));
        }
        object::set(new, "resourceVersion", found);
        return Ok(());
    }
    check_number(given)?;
    if given == found {
        Ok(())
    } else {
        Err(Status::modified(&resource.group_resource, name))
    }
}

/// COMPAT: upstream lets its number parser's error out as it is.
fn check_number(version: &str) -> Result<(), Status> {
    if version.is_empty() || version.parse::<u64>().is_ok() {
        return Ok(());
    }
    let text = format!("strconv.ParseUint: parsing \"{version}\": invalid syntax");
    Err(Status::failure(500, "", text))
}

/// What no update of a subresource can change.
fn keep_system_fields(new: &mut Value, old: &Value) {
    let metadata = object::metadata_mut(new);
    for field in [
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
    ] {
        match object::metadata(old, field) {
            Some(value) => metadata.insert(field.to_string(), value.clone()),
            None => metadata.remove(field),
        };
    }
}
