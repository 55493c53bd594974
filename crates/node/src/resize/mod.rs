//! In-place resize of CPU and memory: what a pod asks for, what the node has allocated to it, and what is in effect.
//!
//! The spec is what is asked. `allocate.rs` moves the allocation to it when the node has room; a pod is synced, counted
//! and shown by its allocation. `actuate.rs` brings cgroups to the allocation. The record of a pod is on disk, so that
//! a node that starts again knows what it promised. Nothing here decides about anything but CPU and memory.

mod actuate;
mod allocate;
mod record;
mod status;
mod update;

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::jiff::Timestamp;

pub use record::{Amounts, Assigned, Record};
pub use status::{container_resources, pod_resources};
pub use update::{Updates, container_update};

/// Why a resize waits.
pub const DEFERRED: &str = "Deferred";
pub const INFEASIBLE: &str = "Infeasible";
/// Why one that was begun does not get on.
pub const ERROR: &str = "Error";

const PENDING: &str = "PodResizePending";
const IN_PROGRESS: &str = "PodResizeInProgress";

/// One of the two conditions of a resize, while it is true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub reason: Option<String>,
    pub message: Option<String>,
    /// Of the pod's spec that is waited for or worked on.
    pub generation: i64,
    pub since: Timestamp,
}

impl Condition {
    fn to_api(&self, type_: &str) -> PodCondition {
        PodCondition {
            type_: type_.to_owned(),
            status: "True".to_owned(),
            reason: self.reason.clone(),
            message: self.message.clone(),
            last_probe_time: None,
            last_transition_time: Some(crate::status::whole_seconds(self.since)),
            observed_generation: Some(self.generation),
        }
    }

    fn from_api(pod: &Pod, type_: &str) -> Option<Self> {
        let condition = crate::status::condition(pod.status.as_ref()?, type_)?;
        Some(Condition {
            reason: condition.reason.clone(),
            message: condition.message.clone(),
            generation: condition.observed_generation.unwrap_or(0),
            since: condition
                .last_transition_time
                .as_ref()
                .map_or(Timestamp::UNIX_EPOCH, |t| t.0),
        })
    }
}

/// Where the pod is with its resizes.
#[derive(Clone, Debug, Default)]
pub struct Resize {
    /// `None` until the node has taken the pod.
    pub record: Option<Record>,
    pub pending: Option<Condition>,
    pub in_progress: Option<Condition>,
}

impl Resize {
    /// As the API last showed it, for a node that starts again.
    pub fn restored(pod: &Pod, record: Option<Record>) -> Self {
        Resize {
            record,
            pending: Condition::from_api(pod, PENDING),
            in_progress: Condition::from_api(pod, IN_PROGRESS),
        }
    }

    /// Whether the pod asks for something else than it was given.
    pub fn is_wanted(&self, pod: &Pod) -> bool {
        let spec = pod.spec.as_ref();
        self.record
            .as_ref()
            .zip(spec)
            .is_some_and(|(record, spec)| !record.allocated.is_of(spec))
    }

    /// Whether this version of the pod has been looked at: what it asks for is allocated, or known to wait.
    pub fn is_considered(&self, pod: &Pod) -> bool {
        let waits = self.pending.as_ref().map(|condition| condition.generation);
        !self.is_wanted(pod) || waits == Some(generation(pod))
    }

    pub fn is_infeasible(&self, pod: &Pod) -> bool {
        self.pending.as_ref().is_some_and(|condition| {
            condition.generation == generation(pod) && condition.reason.as_deref() == Some(INFEASIBLE)
        })
    }

    pub fn conditions(&self) -> Vec<PodCondition> {
        let pending = self.pending.iter().map(|condition| condition.to_api(PENDING));
        let in_progress = self
            .in_progress
            .iter()
            .map(|condition| condition.to_api(IN_PROGRESS));
        pending.chain(in_progress).collect()
    }

    /// Marks the resize as being worked on. What was said of it before stays, but for an error that is told now.
    /// Returns whether that was news.
    fn begin(&mut self, generation: i64, error: Option<String>) -> bool {
        let before = self.in_progress.clone();
        let condition = self.in_progress.get_or_insert_with(|| Condition {
            reason: None,
            message: None,
            generation,
            since: Timestamp::now(),
        });
        if let Some(error) = error {
            condition.reason = Some(ERROR.to_owned());
            condition.message = Some(error);
        }
        before != self.in_progress
    }
}

pub fn generation(pod: &Pod) -> i64 {
    pod.metadata.generation.unwrap_or(0)
}

/// The message of an event: what is told, and the resources of each container as JSON.
// COMPAT: tools read the JSON.
fn event_message(told: &str, pod: &Pod, generation: i64, error: &str) -> String {
    use serde::Serialize;

    #[derive(Serialize)]
    struct OfContainer<'a> {
        name: &'a str,
        resources: k8s_openapi::api::core::v1::ResourceRequirements,
    }
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Summary<'a> {
        #[serde(skip_serializing_if = "Vec::is_empty")]
        init_containers: Vec<OfContainer<'a>>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        containers: Vec<OfContainer<'a>>,
        generation: i64,
        #[serde(skip_serializing_if = "str::is_empty")]
        error: &'a str,
    }
    fn of(containers: &[k8s_openapi::api::core::v1::Container]) -> Vec<OfContainer<'_>> {
        let one = |container: &k8s_openapi::api::core::v1::Container| container.resources.clone();
        let list = containers.iter();
        list.map(|container| OfContainer {
            name: &container.name,
            resources: one(container).unwrap_or_default(),
        })
        .collect()
    }
    let spec = pod.spec.as_ref();
    let summary = Summary {
        init_containers: of(spec
            .and_then(|s| s.init_containers.as_deref())
            .unwrap_or_default()),
        containers: of(spec.map(|s| s.containers.as_slice()).unwrap_or_default()),
        generation,
        error,
    };
    match serde_json::to_string(&summary) {
        Ok(summary) => format!("{told}: {summary}"),
        Err(_) => told.to_owned(),
    }
}

#[cfg(test)]
mod tests;
