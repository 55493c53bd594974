//! The field manager: keeps `metadata.managedFields` on every write, and applies configurations. It works on
//! objects in the version of the request. Names no kind; the rules of ownership are `skiff_schema::apply`.

mod last_applied;
mod versions;

use std::sync::OnceLock;

use serde_json::Value;
use skiff_api::facts;
use skiff_meta::{GroupVersionKind, Status};
use skiff_schema::apply::{
    ApplyError, Conflict, Duplicates, Managed, ManagerId, Operation, Set, Updater, Versions, validate,
};
use skiff_schema::{LeftOut, TypeId};

pub use versions::OneVersion;

use crate::{Context, Registry, Resource, object};

/// More updaters than this are merged, the oldest first.
const MAX_UPDATERS: usize = 10;
const OLD_UPDATES: &str = "ancient-changes";
const BEFORE_FIRST_APPLY: &str = "before-first-apply";
/// The one applier whose client-side past is honoured.
const KUBECTL: &str = "kubectl";

/// Who a write is tracked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tracking {
    /// The write brings its managed fields along, or changes none.
    #[default]
    Off,
    Update {
        manager: String,
        subresource: String,
    },
}

impl Tracking {
    /// The server's own writes.
    pub fn server() -> Tracking {
        Tracking::Update {
            manager: "kube-apiserver".to_string(),
            subresource: String::new(),
        }
    }

    /// The statuses that the server keeps.
    pub fn server_status() -> Tracking {
        Tracking::Update {
            manager: "kube-apiserver".to_string(),
            subresource: "status".to_string(),
        }
    }
}

/// The field manager of one sort of request.
pub struct FieldManager<'a> {
    pub versions: &'a dyn Versions,
    pub api_version: &'a str,
    pub kind: &'a str,
    pub subresource: &'a str,
    /// An object of the kind that nobody has set anything of.
    pub empty: &'a Value,
    /// What this sort of request never owns, see [`unowned`].
    pub ignored: &'a Set,
    pub now: String,
}

/// What an apply came to.
pub struct Outcome {
    /// In the version of the request; `None`: the object stays as it is.
    pub object: Option<Value>,
    /// The new `managedFields`.
    pub managed: Value,
}

/// Fields that are never owned. All but `metadata` itself are left out with what is below them.
const UNOWNED: [&[&str]; 10] = [
    &["apiVersion"],
    &["kind"],
    &["metadata", "name"],
    &["metadata", "namespace"],
    &["metadata", "creationTimestamp"],
    &["metadata", "selfLink"],
    &["metadata", "uid"],
    &["metadata", "generation"],
    &["metadata", "managedFields"],
    &["metadata", "resourceVersion"],
];

/// What a write never owns: the fields it resets, and the identity of the object.
pub fn unowned(resets: &Set) -> Set {
    resets.union(&Set::of_fields(&UNOWNED))
}

fn strip(set: &mut Set) {
    static STRIPPED: OnceLock<Set> = OnceLock::new();
    set.remove(STRIPPED.get_or_init(|| unowned(&Set::of_fields(&[&["metadata"]]))));
}

/// Takes `managedFields` out of an object.
pub fn take(object: &mut Value) -> Option<Value> {
    object
        .get_mut("metadata")?
        .as_object_mut()?
        .remove("managedFields")
}

pub fn put(object: &mut Value, managed: Value) {
    object::set(object, "managedFields", managed);
}

fn entries(object: &Value) -> &[Value] {
    object::metadata(object, "managedFields")
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// What an entry says, but for when.
fn timeless(entry: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let fields = entry.as_object().into_iter().flatten();
    fields.filter(|(key, _)| *key != "time")
}

/// A write that changes nothing but the time of its manager's entry changes nothing.
pub fn keep_times(new: &mut Value, old: &mut Value) {
    let same_but_for_time = match (entries(new), entries(old)) {
        (now @ [_, ..], before) => {
            now.len() == before.len()
                && now != before
                && now
                    .iter()
                    .zip(before)
                    .all(|(now, before)| timeless(now).eq(timeless(before)))
        }
        _ => false,
    };
    if !same_but_for_time {
        return;
    }
    let (mine, theirs) = (take(new), take(old));
    let same = new == old;
    put(old, theirs.clone().unwrap_or_default());
    put(new, if same { theirs } else { mine }.unwrap_or_default());
}

impl Registry {
    /// Keeps the managed fields of a write in the stored version. `live` is absent when the object is new. Gives the
    /// empty lists and maps that were sent: only validation looks at them.
    pub(crate) fn track_fields(
        &self,
        context: &Context,
        resource: &Resource,
        live: Option<&Value>,
        new: &mut Value,
    ) -> Vec<LeftOut> {
        let Tracking::Update { manager, subresource } = &context.tracking else {
            return Vec::new();
        };
        let _stage = context.stage("managed-fields");
        let claimed = take(new);
        let left_out = resource.strategy.normalise_sent(new);
        let live = live.map(|live| resource.served(live));
        let managed = {
            let filled = match live {
                None => resource.strategy.tracked(new),
                Some(_) => None,
            };
            let served = resource.served(filled.as_ref().unwrap_or(new));
            self.with_fields(resource, subresource, |fields| {
                fields.update(live.as_deref(), &served, claimed, manager)
            })
        };
        put(new, managed);
        left_out
    }

    /// Runs `with` on the field manager of a resource or subresource.
    fn with_fields<T>(
        &self,
        resource: &Resource,
        subresource: &str,
        with: impl FnOnce(&FieldManager<'_>) -> T,
    ) -> T {
        with(&FieldManager {
            versions: &*resource.strategy,
            api_version: &resource.api_version,
            kind: &resource.kind,
            subresource,
            empty: resource.empty(),
            ignored: resource.unowned(subresource),
            now: self.now_text(),
        })
    }

    /// Attributes a new object that is answered and never stored.
    pub fn attribute(
        &self,
        gvk: &GroupVersionKind,
        id: TypeId,
        subresource: &str,
        manager: &str,
        object: &mut Value,
    ) {
        let api_version = gvk.api_version();
        let mut empty = serde_json::json!({"kind": gvk.kind, "apiVersion": api_version});
        skiff_schema::normalise(facts::schema(), id, &mut empty);
        let claimed = take(object);
        skiff_schema::normalise_sent(facts::schema(), id, object);
        let fields = FieldManager {
            versions: &OneVersion {
                api_version: &api_version,
                id,
            },
            api_version: &api_version,
            kind: &gvk.kind,
            subresource,
            empty: &empty,
            ignored: &unowned(&Set::default()),
            now: self.now_text(),
        };
        let managed = fields.update(None, object, claimed, manager);
        put(object, managed);
    }

    /// Applies a configuration to a stored object, or to none. The outcome is in the served version.
    pub fn apply_fields(
        &self,
        resource: &Resource,
        subresource: &str,
        live: Option<&Value>,
        config: &Value,
        manager: &str,
        force: bool,
    ) -> Result<Outcome, Status> {
        let live = live.map(|live| resource.served(live));
        self.with_fields(resource, subresource, |fields| {
            fields.apply(live.as_deref(), config, manager, force)
        })
    }
}

impl FieldManager<'_> {
    fn updater(&self) -> Updater<'_> {
        Updater {
            versions: self.versions,
            ignored: self.ignored,
        }
    }

    /// The `managedFields` after a write that is no apply. `claimed` is what the request says of them;
    /// `live` is absent when the object is new.
    pub fn update(&self, live: Option<&Value>, new: &Value, claimed: Option<Value>, manager: &str) -> Value {
        let kept = live.and_then(|live| object::metadata(live, "managedFields"));
        let claimed = if self.subresource.is_empty() {
            claimed.filter(|claimed| Some(claimed) != kept)
        } else {
            None
        };
        let claimed = match claimed {
            Some(claimed) if is_reset(&claimed) => Some(Managed::default()),
            // Clients that do not understand managed fields shall not remove them.
            Some(claimed) => Managed::decode(Some(&claimed)).ok().filter(|m| !m.is_empty()),
            None => None,
        };
        if live.is_some() && claimed.as_ref().map_or(kept.is_none(), Managed::is_empty) {
            return Value::Null;
        }
        let base = live.unwrap_or(self.empty);
        let changes = match self.updater().changes(base, new, self.api_version) {
            Ok(changes) => changes,
            Err(error) => return self.failed(new, &error),
        };
        if changes.is_same() && claimed.is_none() {
            return kept.cloned().unwrap_or(Value::Null);
        }
        let mut managed = match claimed {
            Some(claimed) => claimed,
            None => match Managed::decode(kept) {
                Ok(managed) => managed,
                Err(_) if live.is_some() => return Value::Null,
                Err(_) => Managed::default(),
            },
        };
        if let Err(error) = self.track(&mut managed, base, new, changes, manager) {
            return self.failed(new, &error.to_string());
        }
        managed.encode()
    }

    fn track(
        &self,
        managed: &mut Managed,
        base: &Value,
        new: &Value,
        changes: skiff_schema::apply::Comparison,
        manager: &str,
    ) -> Result<(), ApplyError> {
        let mut set = self
            .updater()
            .update(base, new, self.api_version, changes, managed)?;
        strip(&mut set);
        if !set.is_empty() {
            let id = ManagerId::new(manager, Operation::Update, self.api_version, self.subresource);
            managed.give(id, set, self.api_version, &self.now);
        }
        managed.cap_updaters(MAX_UPDATERS, OLD_UPDATES);
        Ok(())
    }

    /// What cannot be tracked is written without managed fields rather than refused.
    fn failed(&self, new: &Value, error: &str) -> Value {
        tracing::warn!(
            error,
            name = object::name(new),
            kind = self.kind,
            "fields cannot be tracked"
        );
        Value::Null
    }

    /// Applies a configuration. `live` is absent when the object is new.
    pub fn apply(
        &self,
        live: Option<&Value>,
        config: &Value,
        manager: &str,
        force: bool,
    ) -> Result<Outcome, Status> {
        let kept = live.and_then(|live| object::metadata(live, "managedFields"));
        let mut managed = Managed::decode(kept)
            .map_err(|error| failure(format!("failed to decode managed fields: {error}")))?;
        self.check_type(config)?;
        let base = live.unwrap_or(self.empty);
        if managed.is_empty() && live.is_some() {
            let changes = self.updater().changes(self.empty, base, self.api_version);
            changes
                .map_err(ApplyError::from)
                .and_then(|changes| self.track(&mut managed, self.empty, base, changes, BEFORE_FIRST_APPLY))
                .map_err(|error| failure(format!("failed to create manager for existing fields: {error}")))?;
        }
        if config
            .get("metadata")
            .and_then(|metadata| metadata.get("managedFields"))
            .is_some_and(Value::is_array)
        {
            return Err(Status::bad_request("metadata.managedFields must be nil"));
        }
        let of = self
            .versions
            .type_of(self.api_version)
            .ok_or_else(|| failure(format!("no corresponding type for {}", self.gvk(config))))?;
        validate(of, config, Duplicates::Refused).map_err(|error| {
            failure(format!(
                "failed to create typed patch object ({}/{}; {}): {error}",
                object::namespace(config),
                object::name(config),
                self.gvk(config)
            ))
        })?;
        let id = ManagerId::new(manager, Operation::Apply, self.api_version, self.subresource);
        let updater = self.updater();
        let attempt = |force| updater.apply(base, config, self.api_version, managed.clone(), &id, force);
        let applied = match attempt(force) {
            Err(ApplyError::Conflicts(conflicts)) if manager == KUBECTL => {
                match last_applied::allowed(of, base, self.api_version) {
                    Some(allowed) => {
                        let left: Vec<Conflict> = conflicts
                            .into_iter()
                            .filter(|conflict| !allowed.has(&conflict.path.0))
                            .collect();
                        if left.is_empty() {
                            attempt(true)
                        } else {
                            Err(ApplyError::Conflicts(left))
                        }
                    }
                    None => Err(ApplyError::Conflicts(conflicts)),
                }
            }
            other => other,
        };
        let mut applied = applied.map_err(apply_error)?;
        let emptied = match applied.managed.0.get_mut(&id) {
            Some(entry) => {
                strip(&mut entry.set);
                if applied.object.is_some() {
                    entry.time = Some(self.now.clone());
                }
                entry.set.is_empty()
            }
            None => false,
        };
        if emptied {
            applied.managed.0.remove(&id);
        }
        let mut object = applied.object;
        if manager == KUBECTL {
            last_applied::refresh(&mut object, base, config);
        }
        Ok(Outcome {
            object,
            managed: applied.managed.encode(),
        })
    }

    fn check_type(&self, config: &Value) -> Result<(), Status> {
        let text = |key: &str| config.get(key).and_then(Value::as_str).unwrap_or("");
        if text("apiVersion") == self.api_version && text("kind") == self.kind {
            return Ok(());
        }
        Err(Status::bad_request(format!(
            "invalid object type: {}",
            self.gvk(config)
        )))
    }

    /// As Go prints a group, version and kind.
    fn gvk(&self, config: &Value) -> String {
        let text = |key: &str| config.get(key).and_then(Value::as_str).unwrap_or("");
        let version = text("apiVersion");
        match version.matches('/').count() {
            0 => format!("/{version}, Kind={}", text("kind")),
            1 => format!("{version}, Kind={}", text("kind")),
            // What cannot be parsed is empty.
            _ => "/, Kind=".to_string(),
        }
    }
}

/// A client that wants no managed fields says so by an empty list, or by one with an empty entry.
fn is_reset(claimed: &Value) -> bool {
    match claimed.as_array().map(Vec::as_slice) {
        Some([]) => true,
        Some([only]) => only.as_object().is_some_and(serde_json::Map::is_empty),
        _ => false,
    }
}

fn failure(message: String) -> Status {
    Status::failure(500, "", message)
}

fn apply_error(error: ApplyError) -> Status {
    let conflicts = match error {
        ApplyError::Conflicts(conflicts) => conflicts,
        ApplyError::Failed(text) => return failure(text),
    };
    let message = match conflicts.as_slice() {
        [only] => format!(
            "Apply failed with 1 conflict: conflict with {}: {}",
            only.manager, only.path
        ),
        all => {
            let mut lines = Vec::with_capacity(all.len() + 1);
            let mut last = None;
            // They come by manager.
            for conflict in all {
                if last != Some(&conflict.manager) {
                    lines.push(format!("conflicts with {}:", conflict.manager));
                    last = Some(&conflict.manager);
                }
                lines.push(format!("- {}", conflict.path));
            }
            format!("Apply failed with {} conflicts: {}", all.len(), lines.join("\n"))
        }
    };
    let causes = conflicts.iter().map(|conflict| {
        (
            "FieldManagerConflict",
            format!("conflict with {}", conflict.manager),
            conflict.path.to_string(),
        )
    });
    Status::apply_conflict(message, causes)
}
