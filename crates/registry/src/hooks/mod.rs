//! What the registry does specially for certain kinds because it needs the clock, the store or other objects: what a
//! write of them allocates and stamps, how they are deleted. What needs none of these is in the kind's own file in
//! `skiff-api`. Only this folder and `subresources` name kinds.

pub mod bootstrap;
mod change;
pub mod cidr;
mod definitions;
mod devices;
mod namespaces;
mod pods;
mod requests;
pub mod services;
mod volumes;

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use skiff_meta::{Status, field};

use crate::update::WriteScope;
use crate::{Context, Registry};

pub use change::Change;
pub use namespaces::Namespaces;

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

    /// The rules of an update that need the clock, where the kind's other rules are kept; `now` is Unix seconds.
    fn check_update(&self, _new: &Value, _old: &Value, _part: WriteScope, _now: i64) -> Vec<field::Error> {
        Vec::new()
    }

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
        ("certificates.k8s.io", "certificatesigningrequests") => Arc::new(requests::Requests),
        ("certificates.k8s.io", "podcertificaterequests") => Arc::new(requests::PodRequests),
        ("resource.k8s.io", "resourceclaims" | "resourceclaimtemplates") => Arc::new(devices::Claims),
        ("resource.k8s.io", "resourceslices") => Arc::new(devices::Slices),
        _ => Arc::new(NoHook),
    }
}
