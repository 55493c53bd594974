//! Delete: grace periods, finalizers and propagation first, the removal itself last. An object with
//! finalizers is only marked; whoever removes the last finalizer removes the object (see `update`).

use serde_json::Value;
use skiff_api::kind::{Graceful, Orphan};
use skiff_meta::{GroupKind, GroupResource, Status, field, time};
use skiff_store::{Expect, Op, Outcome, Write};

use crate::commit::Committed;
use crate::hooks::{Asked, Marking};
use crate::{Context, Gate, Registry, Resource, errors, object};

const ORPHAN_FINALIZER: &str = "orphan";
const FOREGROUND_FINALIZER: &str = "foregroundDeletion";
const ATTEMPTS: usize = 64;

/// What happens to the dependents of a deleted object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    Orphan,
    Background,
    Foreground,
}

/// metav1.DeleteOptions, read and checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeleteOptions {
    pub grace_period_seconds: Option<i64>,
    pub uid: Option<String>,
    pub resource_version: Option<String>,
    pub orphan_dependents: Option<bool>,
    pub propagation: Option<Propagation>,
    pub dry_run: bool,
    /// `ignoreStoreReadErrorWithClusterBreakingPotential`: for [`Registry::delete_unreadable`] alone, which needs a
    /// permission of its own. [`Registry::delete`] does not look at it.
    pub ignore_read_errors: bool,
}

const IGNORE_READ_ERRORS: &str = "ignoreStoreReadErrorWithClusterBreakingPotential";

impl DeleteOptions {
    /// Reads the options out of their JSON form, with upstream's checks.
    pub fn from_value(value: &Value) -> Result<DeleteOptions, Status> {
        let kind = GroupKind::new("meta.k8s.io", "DeleteOptions");
        let mut found = Vec::new();
        let text = |field: &str| value.get(field).and_then(Value::as_str);
        let orphan_dependents = value.get("orphanDependents").and_then(Value::as_bool);
        let policy = text("propagationPolicy");
        let path = field::Path::new("propagationPolicy");
        if let (Some(_), Some(policy)) = (orphan_dependents, policy) {
            found.push(field::Error::invalid(
                &path,
                policy,
                "orphanDependents and deletionPropagation cannot be both set",
            ));
        }
        let propagation = match policy {
            None => None,
            Some("Orphan") => Some(Propagation::Orphan),
            Some("Background") => Some(Propagation::Background),
            Some("Foreground") => Some(Propagation::Foreground),
            Some(other) => {
                let supported = ["Foreground", "Background", "Orphan", "nil"];
                found.push(field::Error::not_supported(&path, other, &supported));
                None
            }
        };
        let dry_run: Vec<&Value> = value
            .get("dryRun")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .collect();
        if dry_run.iter().any(|value| value.as_str() != Some("All")) {
            let given = Value::Array(dry_run.iter().map(|value| (*value).clone()).collect());
            found.push(field::Error::not_supported(
                &field::Path::new("dryRun"),
                given,
                &["All"],
            ));
        }
        let ignore_read_errors = value.get(IGNORE_READ_ERRORS).and_then(Value::as_bool) == Some(true);
        if ignore_read_errors {
            let path = field::Path::new(IGNORE_READ_ERRORS);
            let given = |field: &str| value.get(field).is_some_and(|value| !value.is_null());
            for (other, given) in [
                ("dryRun", !dry_run.is_empty()),
                ("propagationPolicy", given("propagationPolicy")),
                ("orphanDependents", given("orphanDependents")),
                ("gracePeriodSeconds", given("gracePeriodSeconds")),
                ("preconditions", given("preconditions")),
            ] {
                if given {
                    let why = format!("cannot be set together with .{other}");
                    found.push(field::Error::invalid(&path, true, why));
                }
            }
        }
        if !found.is_empty() {
            return Err(Status::invalid(&kind, "", &found));
        }
        let precondition = |field: &str| {
            object::at(value, &["preconditions", field])
                .and_then(Value::as_str)
                .map(str::to_string)
        };
        Ok(DeleteOptions {
            grace_period_seconds: value.get("gracePeriodSeconds").and_then(Value::as_i64),
            uid: precondition("uid"),
            resource_version: precondition("resourceVersion"),
            orphan_dependents,
            propagation,
            dry_run: !dry_run.is_empty(),
            ignore_read_errors,
        })
    }

    /// Many objects cannot be deleted without reading them.
    pub fn refuse_ignoring_read_errors(&self) -> Result<(), Status> {
        if !self.ignore_read_errors {
            return Ok(());
        }
        let why = "is not allowed with DELETECOLLECTION, try again after removing the option";
        let error = field::Error::invalid(&field::Path::new(IGNORE_READ_ERRORS), true, why);
        let kind = GroupKind::new("meta.k8s.io", "DeleteOptions");
        Err(Status::invalid(&kind, "", &[error]))
    }
}

/// The outcome of a delete.
pub struct Deleted {
    /// Its last state.
    pub object: Value,
    /// False while a grace period or finalizers still hold it.
    pub gone: bool,
    /// The delete changed nothing: it was already under way.
    pub pending: bool,
}

enum Step {
    /// Nothing to do: a graceful deletion is under way.
    Pending,
    /// Write the changed object; then remove it if `remove`.
    Mark {
        remove: bool,
    },
    Remove,
}

impl Registry {
    pub async fn delete(
        &self,
        context: &Context,
        resource: &Resource,
        namespace: &str,
        name: &str,
        options: &DeleteOptions,
        gate: &dyn Gate,
    ) -> Result<Deleted, Status> {
        let key = resource.key(namespace, name);
        let mut options = options.clone();
        let mut found = self.read_stored(&key).await?;
        let mut admitted = false;
        let mut marked = false;
        for attempt in 0..ATTEMPTS {
            let asked = Asked {
                registry: self,
                context,
                again: attempt > 0,
            };
            let Some(current) = found.take() else {
                return Err(Status::not_found(&resource.group_resource, name));
            };
            let stored = resource.decode(&current)?;
            if resource.converts_elsewhere() {
                // An object that cannot be returned to the client is not deleted either.
                resource.strategy.serve(vec![stored.clone()]).await?;
            }
            let mut object = stored.clone();
            let step = if marked {
                Step::Remove
            } else {
                self.plan_delete(resource, &mut object, &mut options)?
            };
            if let Step::Pending = step {
                return Ok(Deleted {
                    object,
                    gone: false,
                    pending: true,
                });
            }
            if !admitted {
                let _stage = context.stage("validating-admission");
                gate.admit(None, Some(&stored)).await?;
                gate.validate(None, Some(&stored)).await?;
                admitted = true;
            }
            let _stage = context.stage("store");
            if context.dry_run || options.dry_run {
                let gone = matches!(step, Step::Remove | Step::Mark { remove: true });
                return Ok(Deleted {
                    object: if let Step::Remove = step { stored } else { object },
                    gone,
                    pending: false,
                });
            }
            let (removed, object) = match step {
                Step::Pending => continue,
                Step::Mark { remove } => {
                    let bytes = resource.codec.encode(&object)?;
                    let (revision, removed) = if bytes == current.value {
                        (current.mod_revision, None)
                    } else {
                        let mark = Write {
                            key: key.as_str().into(),
                            expect: Expect::Revision(current.mod_revision),
                            op: Op::Put(bytes),
                            lease_seconds: resource.ttl_seconds,
                        };
                        let removal = match remove {
                            true => Some(resource.hook.begin_delete(&object, &asked).await?),
                            false => None,
                        };
                        let committed = self.commits.mark_and_remove(mark, removal).await;
                        match committed.map_err(errors::store)? {
                            (Committed::Done { revision }, removed) => (revision, removed),
                            (Committed::Conflict { current }, _) => {
                                found = current;
                                continue;
                            }
                            (Committed::Overtaken, _) => {
                                found = self.read_stored(&key).await?;
                                continue;
                            }
                        }
                    };
                    object::set(&mut object, "resourceVersion", revision.to_string());
                    if !remove {
                        return Ok(Deleted {
                            object,
                            gone: false,
                            pending: false,
                        });
                    }
                    marked = true;
                    options.resource_version = None;
                    match removed {
                        Some(removed) => (removed, object),
                        None => (
                            self.remove(resource, &key, revision, &object, &asked).await?,
                            object,
                        ),
                    }
                }
                // COMPAT: finalizers that went with this very request are still shown.
                Step::Remove => {
                    let revision = current.mod_revision;
                    let removed = self.remove(resource, &key, revision, &stored, &asked).await?;
                    (removed, stored)
                }
            };
            let mut object = object;
            match removed {
                Committed::Done { revision } => {
                    object::set(&mut object, "resourceVersion", revision.to_string());
                }
                // Somebody else removed the marked object meanwhile: the delete is done.
                Committed::Conflict { current: None } if marked => {}
                Committed::Conflict { current } => {
                    found = current;
                    continue;
                }
                Committed::Overtaken => {
                    found = self.read_stored(&key).await?;
                    continue;
                }
            }
            return Ok(Deleted {
                object,
                gone: true,
                pending: false,
            });
        }
        Err(Status::modified(&resource.group_resource, name))
    }

    /// Removes an object whose stored value cannot be read: no preconditions, no finalizers, no grace, nothing that the
    /// kind does after a deletion. Admission is asked, with an object that has a name only.
    pub async fn delete_unreadable(
        &self,
        context: &Context,
        resource: &Resource,
        namespace: &str,
        name: &str,
        gate: &dyn Gate,
    ) -> Result<(), Status> {
        let key = resource.key(namespace, name);
        let mut admitted = false;
        for _ in 0..ATTEMPTS {
            let found = self.read_stored(&key).await?;
            let Some((found, unreadable)) =
                found.and_then(|found| resource.read(&found).err().map(|why| (found, why)))
            else {
                if admitted {
                    // Somebody else deleted or repaired it meanwhile.
                    return Err(Status::modified(&resource.group_resource, name));
                }
                // COMPAT: also where nothing is stored.
                let why =
                    "is exclusively used to delete corrupt object(s), try again by removing this option";
                let error = field::Error::invalid(&field::Path::new(IGNORE_READ_ERRORS), true, why);
                let GroupResource { group, resource } = &resource.group_resource;
                let kind = GroupKind::new(group.as_str(), resource.as_str());
                return Err(Status::invalid(&kind, name, &[error]));
            };
            if !admitted {
                let _stage = context.stage("validating-admission");
                let mut shown =
                    serde_json::json!({"kind": resource.kind, "apiVersion": resource.api_version});
                object::set(&mut shown, "name", name);
                if !namespace.is_empty() {
                    object::set(&mut shown, "namespace", namespace);
                }
                gate.admit(None, Some(&shown)).await?;
                gate.validate(None, Some(&shown)).await?;
                admitted = true;
            }
            let _stage = context.stage("store");
            let expect = Expect::Revision(found.mod_revision);
            let outcome = self.store.write(&key, expect, Op::Delete, None).await;
            if let Outcome::Done { .. } = outcome.map_err(errors::store)? {
                tracing::warn!(%unreadable, "an object that cannot be read was deleted on request");
                return Ok(());
            }
        }
        Err(Status::modified(&resource.group_resource, name))
    }

    /// Removes the object if it still is as of `revision`.
    async fn remove(
        &self,
        resource: &Resource,
        key: &str,
        revision: i64,
        object: &Value,
        asked: &Asked<'_>,
    ) -> Result<Committed, Status> {
        let write = Write::new(key, Expect::Revision(revision), Op::Delete);
        let change = resource.hook.begin_delete(object, asked).await?;
        let removed = self.commits.write(write, change);
        removed.await.map_err(|failed| errors::store(failed.error))
    }

    /// Decides what a delete does to this state of the object, and marks it.
    fn plan_delete(
        &self,
        resource: &Resource,
        object: &mut Value,
        options: &mut DeleteOptions,
    ) -> Result<Step, Status> {
        check_preconditions(resource, object, options)?;
        let now = self.now();
        let marking = resource.hook.mark_deleting(object, &time::format_seconds(now));
        if marking != Marking::Usual {
            if marking == Marking::WithFinalizers {
                apply_finalizers(resource, object, options, true);
            }
            return Ok(Step::Mark { remove: false });
        }
        if options.grace_period_seconds.is_some_and(|seconds| seconds < 0) {
            options.grace_period_seconds = Some(1);
        }
        let graceful = match resource.strategy.graceful(object, options.grace_period_seconds) {
            Graceful::Immediate => None,
            Graceful::After(seconds) => match shorten(object, options, seconds, now) {
                Shortened::Pending => return Ok(Step::Pending),
                Shortened::Now => None,
                Shortened::To(seconds) => Some(seconds),
            },
        };
        apply_finalizers(resource, object, options, false);
        let held = !object::finalizers(object).is_empty();
        Ok(match graceful {
            Some(seconds) => Step::Mark {
                remove: !held && seconds == 0,
            },
            None if held => {
                mark_as_deleting(object, now);
                Step::Mark { remove: false }
            }
            None => Step::Remove,
        })
    }
}

enum Shortened {
    Pending,
    Now,
    To(i64),
}

/// Sets deletionTimestamp and grace period, or shortens those of a deletion under way.
fn shorten(object: &mut Value, options: &mut DeleteOptions, seconds: i64, now: jiff::Timestamp) -> Shortened {
    let span = |seconds: i64| jiff::SignedDuration::from_secs(seconds);
    if !object::deleting(object) {
        options.grace_period_seconds = Some(seconds);
        let at = now.checked_add(span(seconds)).unwrap_or(jiff::Timestamp::MAX);
        object::set(object, "deletionTimestamp", time::format_seconds(at));
        object::set(object, "deletionGracePeriodSeconds", seconds);
        let generation = object::generation(object);
        if generation > 0 {
            object::set(object, "generation", generation + 1);
        }
        return Shortened::To(seconds);
    }
    let present = match object::grace_period(object) {
        None | Some(0) => return Shortened::Now,
        Some(present) => present,
    };
    let Some(mut wanted) = options.grace_period_seconds.filter(|wanted| *wanted < present) else {
        return Shortened::Pending;
    };
    let at = time::parse(object::text(object, "deletionTimestamp")).unwrap_or(now);
    let mut at = at
        .checked_sub(span(present))
        .and_then(|at| at.checked_add(span(wanted)))
        .unwrap_or(now);
    if at < now {
        at = now;
        if wanted != 0 {
            wanted = 1;
        }
    }
    object::set(object, "deletionTimestamp", time::format_seconds(at));
    object::set(object, "deletionGracePeriodSeconds", wanted);
    Shortened::To(wanted)
}

fn mark_as_deleting(object: &mut Value, now: jiff::Timestamp) {
    let generation = object::generation(object);
    if !object::deleting(object) && generation > 0 {
        object::set(object, "generation", generation + 1);
    }
    let later = time::parse(object::text(object, "deletionTimestamp")).is_none_or(|at| at > now);
    if later {
        object::set(object, "deletionTimestamp", time::format_seconds(now));
    }
    object::set(object, "deletionGracePeriodSeconds", 0);
}

fn check_preconditions(resource: &Resource, object: &Value, options: &DeleteOptions) -> Result<(), Status> {
    if resource.own_delete {
        return check_preconditions_first(resource, object, options);
    }
    // COMPAT: upstream names the kind where the resource belongs, and the group that stores it.
    let (group, _) = resource.stored_api_version.rsplit_once('/').unwrap_or(("", ""));
    let group_resource = GroupResource::new(group, resource.kind.as_str());
    let name = object::name(object);
    if let Some(uid) = options.uid.as_deref().filter(|uid| *uid != object::uid(object)) {
        let found = object::uid(object);
        return Err(Status::conflict(
            &group_resource,
            name,
            format_args!(
                "the UID in the precondition ({uid}) does not match the UID in record ({found}). The object might have been deleted and then recreated"
            ),
        ));
    }
    if let Some(version) = options
        .resource_version
        .as_deref()
        .filter(|v| *v != object::resource_version(object))
    {
        let found = object::resource_version(object);
        return Err(Status::conflict(
            &group_resource,
            name,
            format_args!(
                "the ResourceVersion in the precondition ({version}) does not match the ResourceVersion in record ({found}). The object might have been modified"
            ),
        ));
    }
    Ok(())
}

/// The same, as kinds say it whose deletion upstream writes by hand.
fn check_preconditions_first(
    resource: &Resource,
    object: &Value,
    options: &DeleteOptions,
) -> Result<(), Status> {
    for (asked, found, what) in [
        (&options.uid, object::uid(object), "UID"),
        (
            &options.resource_version,
            object::resource_version(object),
            "ResourceVersion",
        ),
    ] {
        if let Some(asked) = asked.as_deref().filter(|asked| *asked != found) {
            return Err(Status::conflict(
                &resource.group_resource,
                object::name(object),
                format_args!(
                    "Precondition failed: {what} in precondition: {asked}, {what} in object meta: {found}"
                ),
            ));
        }
    }
    Ok(())
}

/// Adds or removes the garbage collector's finalizers as the options and the kind's habit say. `by_hand`: as kinds do
/// whose deletion upstream writes by hand; there, no orphans means to wait for the dependents.
fn apply_finalizers(resource: &Resource, object: &mut Value, options: &DeleteOptions, by_hand: bool) {
    let before = object::finalizers(object);
    let has = |name: &str| before.iter().any(|finalizer| finalizer == name);
    let (orphan, foreground) = if resource.orphan == Orphan::Unsupported {
        (false, false)
    } else if let Some(orphan) = options.orphan_dependents {
        (orphan, by_hand && !orphan)
    } else if let Some(propagation) = options.propagation {
        (
            propagation == Propagation::Orphan,
            propagation == Propagation::Foreground,
        )
    } else if has(ORPHAN_FINALIZER) || has(FOREGROUND_FINALIZER) {
        (has(ORPHAN_FINALIZER), has(FOREGROUND_FINALIZER))
    } else {
        (resource.orphan == Orphan::ByDefault, false)
    };
    if orphan == has(ORPHAN_FINALIZER) && foreground == has(FOREGROUND_FINALIZER) {
        return;
    }
    let mut after: Vec<String> = before
        .into_iter()
        .filter(|name| name != ORPHAN_FINALIZER && name != FOREGROUND_FINALIZER)
        .collect();
    if orphan {
        after.push(ORPHAN_FINALIZER.to_string());
    }
    if foreground {
        after.push(FOREGROUND_FINALIZER.to_string());
    }
    object::set(object, "finalizers", after);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn options_are_checked() {
        let check = |value: Value, expected: &str| match DeleteOptions::from_value(&value) {
            Ok(_) => assert_eq!("", expected, "{value}"),
            Err(status) => assert_eq!(status.message, expected, "{value}"),
        };
        check(json!({"propagationPolicy": "Orphan"}), "");
        check(
            json!({"propagationPolicy": "Never"}),
            "DeleteOptions.meta.k8s.io \"\" is invalid: propagationPolicy: Unsupported value: \"Never\": supported values: \"Foreground\", \"Background\", \"Orphan\", \"nil\"",
        );
        check(
            json!({"dryRun": ["x"]}),
            "DeleteOptions.meta.k8s.io \"\" is invalid: dryRun: Unsupported value: [\"x\"]: supported values: \"All\"",
        );
        check(json!({IGNORE_READ_ERRORS: true, "gracePeriodSeconds": null}), "");
        check(json!({IGNORE_READ_ERRORS: false, "gracePeriodSeconds": 0}), "");
        check(
            json!({IGNORE_READ_ERRORS: true, "gracePeriodSeconds": 0, "preconditions": {}}),
            "DeleteOptions.meta.k8s.io \"\" is invalid: [ignoreStoreReadErrorWithClusterBreakingPotential: Invalid value: true: cannot be set together with .gracePeriodSeconds, ignoreStoreReadErrorWithClusterBreakingPotential: Invalid value: true: cannot be set together with .preconditions]",
        );
    }

    #[test]
    fn a_grace_period_only_gets_shorter() {
        let now = time::parse("2026-01-01T00:00:00Z").expect("a time");
        let mut object = json!({"metadata": {"generation": 1}});
        let mut options = DeleteOptions::default();
        assert!(matches!(
            shorten(&mut object, &mut options, 30, now),
            Shortened::To(30)
        ));
        assert_eq!(
            object["metadata"],
            json!({"generation": 2, "deletionGracePeriodSeconds": 30, "deletionTimestamp": "2026-01-01T00:00:30Z"})
        );
        options.grace_period_seconds = Some(60);
        assert!(matches!(
            shorten(&mut object, &mut options, 60, now),
            Shortened::Pending
        ));
        options.grace_period_seconds = Some(5);
        assert!(matches!(
            shorten(&mut object, &mut options, 5, now),
            Shortened::To(5)
        ));
        assert_eq!(object::text(&object, "deletionTimestamp"), "2026-01-01T00:00:05Z");
        options.grace_period_seconds = None;
        assert!(matches!(
            shorten(&mut object, &mut options, 30, now),
            Shortened::Pending
        ));
    }
}
