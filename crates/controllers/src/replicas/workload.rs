//! The two kinds that keep a number of pods: what ReplicaSet and ReplicationController have in common.

use std::fmt::Debug;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{ReplicaSet, ReplicaSetCondition, ReplicaSetStatus};
use k8s_openapi::api::core::v1::{
    PodTemplateSpec, ReplicationController, ReplicationControllerCondition, ReplicationControllerStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Serialize;
use serde::de::DeserializeOwned;
use skiff_client::Informer;

use crate::ownership::controller_of;
use crate::selector::{self, Labels};

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Condition {
    pub type_: String,
    pub status: String,
    pub reason: Option<String>,
    pub message: Option<String>,
    pub last_transition_time: Option<Time>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Status {
    pub replicas: i32,
    pub fully_labeled: i32,
    pub ready: i32,
    pub available: i32,
    /// Only ReplicaSets report it.
    pub terminating: Option<i32>,
    pub observed_generation: i64,
    pub conditions: Vec<Condition>,
}

pub(crate) trait Workload:
    kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
    + Send
    + Sync
    + 'static
{
    /// The name of its queue in metrics.
    const QUEUE: &'static str;

    fn replicas(&self) -> i32;
    fn min_ready_seconds(&self) -> i32;
    fn template(&self) -> Option<&PodTemplateSpec>;
    fn selects(&self, labels: Option<&Labels>) -> bool;
    fn status(&self) -> Status;
    fn set_status(&mut self, status: Status);
    /// The uids of the workloads whose pods should be spread together with these.
    fn related(&self, all: &Informer<Self>) -> Vec<String>;
}

/// Counts of zero are left out on the wire, except `replicas`.
fn nonzero(count: i32) -> Option<i32> {
    (count != 0).then_some(count)
}

macro_rules! conditions {
    (from $conditions:expr) => {
        $conditions
            .iter()
            .flatten()
            .map(|condition| Condition {
                type_: condition.type_.clone(),
                status: condition.status.clone(),
                reason: condition.reason.clone(),
                message: condition.message.clone(),
                last_transition_time: condition.last_transition_time.clone(),
            })
            .collect()
    };
    (to $kind:ident, $conditions:expr) => {{
        let all: Vec<$kind> = $conditions
            .into_iter()
            .map(|condition| $kind {
                type_: condition.type_,
                status: condition.status,
                reason: condition.reason,
                message: condition.message,
                last_transition_time: condition.last_transition_time,
            })
            .collect();
        (!all.is_empty()).then_some(all)
    }};
}

impl Workload for ReplicaSet {
    const QUEUE: &'static str = "replicaset";

    fn replicas(&self) -> i32 {
        self.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
    }
    fn min_ready_seconds(&self) -> i32 {
        self.spec
            .as_ref()
            .and_then(|spec| spec.min_ready_seconds)
            .unwrap_or(0)
    }
    fn template(&self) -> Option<&PodTemplateSpec> {
        self.spec.as_ref()?.template.as_ref()
    }
    fn selects(&self, labels: Option<&Labels>) -> bool {
        self.spec.as_ref().is_some_and(|spec| {
            !selector::is_empty(&spec.selector) && selector::matches(&spec.selector, labels)
        })
    }
    fn status(&self) -> Status {
        let status = self.status.clone().unwrap_or_default();
        Status {
            replicas: status.replicas,
            fully_labeled: status.fully_labeled_replicas.unwrap_or(0),
            ready: status.ready_replicas.unwrap_or(0),
            available: status.available_replicas.unwrap_or(0),
            terminating: status.terminating_replicas,
            observed_generation: status.observed_generation.unwrap_or(0),
            conditions: conditions!(from status.conditions),
        }
    }
    fn set_status(&mut self, status: Status) {
        self.status = Some(ReplicaSetStatus {
            replicas: status.replicas,
            fully_labeled_replicas: nonzero(status.fully_labeled),
            ready_replicas: nonzero(status.ready),
            available_replicas: nonzero(status.available),
            terminating_replicas: status.terminating,
            observed_generation: Some(status.observed_generation),
            conditions: conditions!(to ReplicaSetCondition, status.conditions),
        });
    }
    fn related(&self, all: &Informer<Self>) -> Vec<String> {
        let own = self.metadata.uid.clone().unwrap_or_default();
        let Some(owner) = controller_of(&self.metadata) else {
            return vec![own];
        };
        all.list_namespaced(self.metadata.namespace.as_deref().unwrap_or_default())
            .iter()
            .filter(|other| {
                controller_of(&other.metadata).is_some_and(|reference| reference.uid == owner.uid)
            })
            .filter_map(|other| other.metadata.uid.clone())
            .collect()
    }
}

impl Workload for ReplicationController {
    const QUEUE: &'static str = "replicationmanager";

    fn replicas(&self) -> i32 {
        self.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
    }
    fn min_ready_seconds(&self) -> i32 {
        self.spec
            .as_ref()
            .and_then(|spec| spec.min_ready_seconds)
            .unwrap_or(0)
    }
    fn template(&self) -> Option<&PodTemplateSpec> {
        self.spec.as_ref()?.template.as_ref()
    }
    fn selects(&self, labels: Option<&Labels>) -> bool {
        let wanted = self.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        wanted.is_some_and(|wanted| !wanted.is_empty() && selector::matches_map(wanted, labels))
    }
    fn status(&self) -> Status {
        let status = self.status.clone().unwrap_or_default();
        Status {
            replicas: status.replicas,
            fully_labeled: status.fully_labeled_replicas.unwrap_or(0),
            ready: status.ready_replicas.unwrap_or(0),
            available: status.available_replicas.unwrap_or(0),
            terminating: None,
            observed_generation: status.observed_generation.unwrap_or(0),
            conditions: conditions!(from status.conditions),
        }
    }
    fn set_status(&mut self, status: Status) {
        self.status = Some(ReplicationControllerStatus {
            replicas: status.replicas,
            fully_labeled_replicas: nonzero(status.fully_labeled),
            ready_replicas: nonzero(status.ready),
            available_replicas: nonzero(status.available),
            observed_generation: Some(status.observed_generation),
            conditions: conditions!(to ReplicationControllerCondition, status.conditions),
        });
    }
    fn related(&self, _all: &Informer<Self>) -> Vec<String> {
        vec![self.metadata.uid.clone().unwrap_or_default()]
    }
}
