//! What the registry does specially for certain kinds: where they are stored, what a write of them
//! allocates, how they are deleted and converted. Only this folder and `subresources` name kinds.

pub mod bootstrap;
mod change;
pub mod cidr;
mod convert;
mod definitions;
mod devices;
mod facts;
mod namespaces;
mod pods;
mod reset_fields;
pub mod services;
mod volumes;

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use skiff_cache::Field;
use skiff_meta::{Status, field};

use crate::update::WriteScope;
use crate::{Context, Registry, Resource, object};

pub use change::Change;
pub use convert::{Converter, converter};
pub use facts::{StorageFacts, storage_facts};
pub use namespaces::Namespaces;
pub use reset_fields::reset_fields;

/// What an object of a kind says of which nothing was ever written: the object of a bookmark.
///
/// COMPAT: upstream makes it of its internal types, where some fields are no pointers.
pub fn never_written(resource: &Resource) -> Value {
    let mut object = resource.empty().clone();
    match (resource.facts.group, resource.facts.kind) {
        ("apps", "Deployment" | "ReplicaSet" | "StatefulSet") => {
            object::put(&mut object, &["spec", "replicas"], Value::from(0));
        }
        ("apps", "DaemonSet") => {
            let at = [
                "metadata",
                "annotations",
                "deprecated.daemonset.template.generation",
            ];
            object::put(&mut object, &at, Value::from("0"));
        }
        _ => {}
    }
    object
}

/// How a delete goes on after a hook had its say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marking {
    /// The kind has no way of its own.
    Usual,
    /// The mark is written, with the garbage collector's finalizers if the options ask for them.
    WithFinalizers,
    /// The mark is written as it is.
    Alone,
}

/// A label that the namespace of an object must have.
pub struct Needed {
    pub label: &'static str,
    pub value: &'static str,
    pub otherwise: field::Error,
}

/// The write that a hook is asked about.
pub struct Asked<'a> {
    pub registry: &'a Registry,
    pub context: &'a Context,
    /// Another's write came in between the last time: what the caches say may be old, and the store must be asked.
    pub again: bool,
}

/// The special points in the life of an object.
#[async_trait]
pub trait Hook: Send + Sync {
    /// Whether others may take what a create asks for, so that it is to be tried again.
    fn allocates(&self) -> bool {
        false
    }

    /// Runs before validation of a create; may fill in fields.
    async fn begin_create(&self, _object: &mut Value, _asked: &Asked<'_>) -> Result<Change, Status> {
        Ok(Change::default())
    }

    /// Runs before the strategy and the validation of an update of the main resource.
    async fn begin_update(
        &self,
        _new: &mut Value,
        _old: &Value,
        _asked: &Asked<'_>,
    ) -> Result<Change, Status> {
        Ok(Change::default())
    }

    /// Runs after the strategy of an update, for what it needs the clock for.
    fn stamp(&self, _new: &mut Value, _old: &Value, _part: WriteScope, _now: &dyn Fn() -> String) {}

    /// What a write asks of its namespace; `old` is absent when the object is new.
    fn needs(&self, _new: &Value, _old: Option<&Value>, _part: WriteScope) -> Option<Needed> {
        None
    }

    /// Runs before an object is removed from the store; what it frees is free when that is done.
    async fn begin_delete(&self, _object: &Value, _asked: &Asked<'_>) -> Result<Change, Status> {
        Ok(Change::default())
    }

    /// Marks an object as being deleted in the kind's own way, if it has one now.
    fn mark_deleting(&self, _object: &mut Value, _now: &str) -> Marking {
        Marking::Usual
    }

    /// Whether an update that leaves a deleted object without finalizers may remove it.
    fn may_delete_on_update(&self, _new: &Value) -> bool {
        true
    }
}

/// The hook of kinds that need none.
pub struct NoHook;

impl Hook for NoHook {}

/// The hook of a resource.
pub fn hook_of(facts: &skiff_api::facts::Resource, services: &Arc<services::Services>) -> Arc<dyn Hook> {
    match (facts.group, facts.plural) {
        ("", "namespaces") => Arc::new(Namespaces),
        ("", "services") => services.clone(),
        ("", "pods") => Arc::new(pods::Pods),
        ("apiextensions.k8s.io", "customresourcedefinitions") => Arc::new(definitions::Definitions),
        ("", "persistentvolumes") => Arc::new(volumes::Volumes),
        ("resource.k8s.io", "resourceclaims" | "resourceclaimtemplates") => Arc::new(devices::Claims),
        ("resource.k8s.io", "resourceslices") => Arc::new(devices::Slices),
        _ => Arc::new(NoHook),
    }
}

/// The selectable fields of a resource as the cache wants them: by name, with the value that an object
/// without the field has. The names are the kind's own; most are also the paths.
pub fn cache_fields(resource: &Resource) -> Vec<Field> {
    let empty = Value::Object(serde_json::Map::new());
    let fields = (resource.rules.selectable)(&empty)
        .into_iter()
        .map(|(name, default)| {
            let field = Field::new(name).default(default);
            match (resource.rules.kind, name) {
                // A node asks for its own pods only, and all the time.
                ("Pod", "spec.nodeName") => field.indexed(),
                ("Event", "source") => Field {
                    paths: vec!["source.component".into(), "reportingComponent".into()],
                    ..field
                },
                ("Event", "involvedObject.name" | "involvedObject.uid") => field.indexed(),
                _ => field,
            }
        });
    fields.collect()
}

/// Whether objects can be selected by a field where they are stored, but not where they are served.
pub fn hidden_field(resource: &Resource, name: &str) -> bool {
    match (resource.facts.group, resource.facts.plural) {
        ("events.k8s.io", "events") => {
            name.starts_with("involvedObject.") || matches!(name, "reportingComponent" | "source")
        }
        ("resource.k8s.io", "resourceslices") => name == "metadata.namespace",
        _ => false,
    }
}

/// Field selectors of another served version, by the name that the stored version has for them.
pub fn stored_field(resource: &Resource, name: &str) -> Option<&'static str> {
    if (resource.facts.group, resource.facts.plural) != ("events.k8s.io", "events") {
        return None;
    }
    Some(match name {
        "regarding.kind" => "involvedObject.kind",
        "regarding.namespace" => "involvedObject.namespace",
        "regarding.name" => "involvedObject.name",
        "regarding.uid" => "involvedObject.uid",
        "regarding.apiVersion" => "involvedObject.apiVersion",
        "regarding.resourceVersion" => "involvedObject.resourceVersion",
        "regarding.fieldPath" => "involvedObject.fieldPath",
        "reportingController" => "reportingComponent",
        _ => return None,
    })
}
