//! Create: mutating admission, prepare, validate, validating admission, store. The object comes
//! decoded, defaulted and in the storage version.

use std::collections::HashSet;

use serde_json::Value;
use skiff_meta::Status;
use skiff_schema::{LeftOut, put_back};
use skiff_store::{Expect, Op, Write as KeyWrite};

use crate::commit::Committed;
use crate::fields::{self, Tracking};
use crate::hooks::{Asked, Change};
use crate::update::{Write, WriteScope};
use crate::{Context, Registry, Resource, errors, object};

/// A create whose addresses or ports keep being taken by others in between gives up.
const ATTEMPTS: usize = 64;
/// How often a generated name is drawn again when it is taken.
const GENERATE_NAME_ATTEMPTS: usize = 8;
/// Upstream's alphabet: no vowels, so that no words appear, and nothing that is easily misread.
const NAME_ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
const RANDOM_LENGTH: usize = 5;
const GENERATED_NAME_MAX: usize = 63;

/// The verb that makes an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Create,
    /// A PUT or an apply of what is not there yet.
    Update,
}

/// COMPAT: what upstream takes out of the body of a POST only.
fn system_fields(object: &Value) -> Vec<(String, Value)> {
    let of = |field: &str| Some((field.to_string(), object::metadata(object, field)?.clone()));
    ["deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"]
        .into_iter()
        .filter_map(of)
        .collect()
}

impl Registry {
    /// Creates an object and returns it as stored.
    pub async fn create(&self, write: &Write<'_>, object: Value) -> Result<Value, Status> {
        self.create_by(write, object, By::Create).await
    }

    pub(crate) async fn create_by(
        &self,
        write: &Write<'_>,
        mut object: Value,
        by: By,
    ) -> Result<Value, Status> {
        let Write {
            context,
            resource,
            namespace,
            gate,
        } = *write;
        ensure_namespace(resource, namespace, &mut object)?;
        dedup_owner_references(context, &mut object, false);
        let left_out = self.track_fields(context, resource, None, &mut object);
        {
            let _stage = context.stage("mutating-admission");
            gate.admit(Some(&mut object), None).await?;
        }
        dedup_owner_references(context, &mut object, true);
        put_back(&mut object, &left_out);
        let prefix = object::text(&object, "generateName");
        if prefix.is_empty() || !object::name(&object).is_empty() {
            return self.create_once(write, object, &left_out, by).await;
        }
        let prefix = prefix.to_string();
        let mut attempt = 1;
        loop {
            let mut named = object.clone();
            object::set(&mut named, "name", generate_name(&prefix));
            match self.create_once(write, named, &left_out, by).await {
                Err(status) if errors::is_already_exists(&status) => {
                    if attempt == GENERATE_NAME_ATTEMPTS {
                        return Err(errors::generate_name_conflict(status));
                    }
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    /// Prepares, checks and writes the object; again, if others took in between what its kind allocated for it.
    async fn create_once(
        &self,
        write: &Write<'_>,
        object: Value,
        left_out: &[LeftOut],
        by: By,
    ) -> Result<Value, Status> {
        let mut object = object;
        if !write.resource.hook.allocates() {
            let created = self.try_create(write, object, left_out, by, false).await?;
            return created.ok_or_else(|| Status::internal("a create was overtaken"));
        }
        for attempt in 0..ATTEMPTS {
            let sent = if attempt + 1 == ATTEMPTS {
                std::mem::take(&mut object)
            } else {
                object.clone()
            };
            let again = attempt > 0;
            let created = self.try_create(write, sent, left_out, by, again).await?;
            if let Some(created) = created {
                return Ok(created);
            }
        }
        Err(Status::internal(
            "others keep taking what is allocated for the object",
        ))
    }

    /// `None`: what the hook of the kind asked to be written beside the object is no longer as it was.
    async fn try_create(
        &self,
        write: &Write<'_>,
        mut object: Value,
        left_out: &[LeftOut],
        by: By,
        again: bool,
    ) -> Result<Option<Value>, Status> {
        let Write {
            context,
            resource,
            namespace,
            gate,
        } = *write;
        let (change, given);
        {
            let _stage = context.stage("prepare");
            // Some kinds build on their uid.
            object::set(&mut object, "uid", uuid::Uuid::new_v4().to_string());
            object::set(&mut object, "creationTimestamp", self.now_text());
            let sent = (by == By::Update).then(|| system_fields(&object));
            resource.strategy.begin_create(&mut object);
            object::metadata_mut(&mut object).extend(sent.unwrap_or_default());
            given = object::metadata_mut(&mut object).remove("resourceVersion");
            ensure_namespace(resource, namespace, &mut object)?;
            let asked = Asked {
                registry: self,
                context,
                again,
            };
            change = resource.hook.begin_create(&mut object, &asked).await?;
        }
        {
            let _stage = context.stage("validate");
            let mut found = resource.strategy.check_create(&object);
            let missing_dependency = self
                .missing_dependency(resource, namespace, &object, None, WriteScope::Main)
                .await?;
            found.splice(0..0, missing_dependency);
            if !found.is_empty() {
                return Err(Status::invalid(
                    &resource.group_kind,
                    object::name(&object),
                    &found,
                ));
            }
            for warning in resource.strategy.warnings(&object, None) {
                context.warn(warning);
            }
        }
        if !left_out.is_empty() {
            resource.strategy.normalise_sent(&mut object);
        }
        {
            let _stage = context.stage("validating-admission");
            gate.validate(Some(&mut object), None).await?;
        }
        resource.strategy.normalise(&mut object);
        let name = object::name(&object).to_string();
        let key = resource.key(namespace, &name);
        if context.dry_run {
            let kept = resource.strategy.keep(&mut object).await?;
            object = resource.strategy.answered(kept.as_ref(), object)?;
            let _stage = context.stage("store");
            if self.read_stored(&key).await?.is_some() {
                return Err(Status::already_exists(&resource.group_resource, &name));
            }
            // COMPAT: only the store checks the resourceVersion of a new object.
            if let Some(version) = given.as_ref().and_then(Value::as_str) {
                object::set(&mut object, "resourceVersion", version);
            }
            return Ok(Some(object));
        }
        // COMPAT: it is the store that refuses a version: admission comes before it, and a dry run does not get there.
        let version = given.as_ref().and_then(Value::as_str).unwrap_or_default();
        if by == By::Create && !matches!(version, "" | "0") {
            return Err(Status::failure(
                500,
                "",
                "resourceVersion should not be set on objects to be created",
            ));
        }
        match self
            .put(context, resource, &key, Expect::Absent, &mut object, change)
            .await?
        {
            Committed::Done { revision } => {
                object::set(&mut object, "resourceVersion", revision.to_string());
                Ok(Some(object))
            }
            Committed::Overtaken => Ok(None),
            Committed::Conflict { current } => {
                let status = Status::already_exists(&resource.group_resource, &name);
                let deleting = current
                    .and_then(|current| resource.read(&current).ok())
                    .is_some_and(|current| object::deleting(&current));
                Err(if deleting {
                    errors::prefixed("object is being deleted: ", status)
                } else {
                    status
                })
            }
        }
    }

    /// Encodes an object and writes it; it is then as it will be read. An object that is too large with its
    /// managedFields is written without them.
    pub(crate) async fn put(
        &self,
        context: &Context,
        resource: &Resource,
        key: &str,
        expect: Expect,
        object: &mut Value,
        mut change: Change,
    ) -> Result<Committed, Status> {
        let mut shed = false;
        loop {
            let kept = resource.strategy.keep(object).await?;
            let bytes = resource.codec.encode(kept.as_ref().unwrap_or(object))?;
            *object = resource
                .strategy
                .answered(kept.as_ref(), std::mem::take(object))?;
            let _stage = context.stage("store");
            let write = KeyWrite {
                key: key.into(),
                expect,
                op: Op::Put(bytes),
                lease_seconds: resource.ttl_seconds,
            };
            let failed = match self.commits.write(write, change).await {
                Ok(outcome) => return Ok(outcome),
                Err(failed) => failed,
            };
            // COMPAT: an apply is refused, its record is the point of it.
            let sheds = !shed && context.tracking != Tracking::Off;
            if !sheds || !matches!(failed.error, skiff_store::Error::TooLarge(_)) {
                return Err(errors::store(failed.error));
            }
            shed = true;
            fields::take(object);
            change = failed.change;
        }
    }
}

/// Puts the request's namespace into the object, or refuses one that differs.
pub fn ensure_namespace(resource: &Resource, namespace: &str, object: &mut Value) -> Result<(), Status> {
    let expected = if resource.namespaced { namespace } else { "" };
    let given = object::namespace(object);
    if given == expected {
        return Ok(());
    }
    if given.is_empty() || !resource.namespaced {
        object::set(object, "namespace", expected);
        return Ok(());
    }
    Err(Status::bad_request(
        "the namespace of the provided object does not match the namespace sent on the request",
    ))
}

pub fn generate_name(prefix: &str) -> String {
    let keep = prefix
        .char_indices()
        .map(|(at, char)| at + char.len_utf8())
        .take_while(|end| *end <= GENERATED_NAME_MAX - RANDOM_LENGTH)
        .last()
        .unwrap_or(0);
    let mut name = prefix[..keep].to_string();
    for _ in 0..RANDOM_LENGTH {
        name.push(NAME_ALPHABET[rand::random_range(0..NAME_ALPHABET.len())] as char);
    }
    name
}

/// Removes duplicate owner references, with a warning to the client.
pub fn dedup_owner_references(context: &Context, object: &mut Value, after_admission: bool) {
    let Some(list) = object
        .get_mut("metadata")
        .and_then(|m| m.get_mut("ownerReferences"))
        .and_then(Value::as_array_mut)
    else {
        return;
    };
    let mut kept: Vec<Value> = Vec::with_capacity(list.len());
    let mut seen = HashSet::with_capacity(list.len());
    let mut twice = Vec::new();
    for reference in list.drain(..) {
        if !seen.insert(reference.to_string()) {
            twice.push(
                reference
                    .get("uid")
                    .and_then(Value::as_str)
                    .unwrap_or("")
                    .to_string(),
            );
        } else {
            kept.push(reference);
        }
    }
    *list = kept;
    if !twice.is_empty() {
        let uids = twice.join(", ");
        context.warn(if after_admission {
            format!(".metadata.ownerReferences contains duplicate entries after mutating admission happens; API server dedups owner references in 1.20+, and may reject such requests as early as 1.24; please fix your requests; duplicate UID(s) observed: {uids}")
        } else {
            format!(".metadata.ownerReferences contains duplicate entries; API server dedups owner references in 1.20+, and may reject such requests as early as 1.24; please fix your requests; duplicate UID(s) observed: {uids}")
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_names_fit_and_use_the_alphabet() {
        for prefix in ["web-", "", &"x".repeat(100), &"é".repeat(40)] {
            let name = generate_name(prefix);
            assert!(name.len() <= 63, "{name}");
            let suffix = &name[name.len() - 5..];
            assert!(suffix.bytes().all(|byte| NAME_ALPHABET.contains(&byte)), "{name}");
        }
    }
}
