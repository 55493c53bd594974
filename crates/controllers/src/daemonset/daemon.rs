//! What the DaemonSet controller needs of its pods and of nodes. A set has a pod on every node, and each change of one
//! looks at all of them: these parts are kept, so that thousands of nodes and pods are not decoded each time.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, NodeSpec, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::placement::{TEMPLATE_GENERATION_LABEL, target_node};
use crate::history::REVISION_LABEL;
use crate::pods;

/// A pod of a DaemonSet.
#[derive(Debug)]
pub(super) struct Daemon {
    pub(super) name: String,
    /// The node that it runs on or waits for.
    pub(super) node: Option<String>,
    pub(super) is_bound: bool,
    pub(super) is_deleting: bool,
    /// True if it failed, false if it succeeded; `None` while it has not ended.
    pub(super) failed: Option<bool>,
    pub(super) is_ready: bool,
    ready_since: Option<Timestamp>,
    created: Option<Timestamp>,
    pub(super) revision: Option<String>,
    pub(super) template_generation: Option<String>,
}

impl Daemon {
    pub(super) fn of(pod: &Pod) -> Self {
        let label = |key: &str| pod.metadata.labels.as_ref()?.get(key).cloned();
        Daemon {
            name: pod.metadata.name.clone().unwrap_or_default(),
            node: target_node(pod).map(str::to_owned),
            is_bound: !pods::node_name(pod).is_empty(),
            is_deleting: pod.metadata.deletion_timestamp.is_some(),
            failed: pods::is_terminal(pod).then(|| pods::phase(pod) == "Failed"),
            is_ready: pods::is_ready(pod),
            ready_since: pods::ready_since(pod),
            created: pod.metadata.creation_timestamp.as_ref().map(|time| time.0),
            revision: label(REVISION_LABEL),
            template_generation: label(TEMPLATE_GENERATION_LABEL),
        }
    }

    /// When it will have been ready for `min_ready_seconds`; `None` if it is not ready.
    pub(super) fn available_at(&self, min_ready_seconds: i32) -> Option<Timestamp> {
        if !self.is_ready {
            return None;
        }
        if min_ready_seconds <= 0 {
            return Some(Timestamp::MIN);
        }
        let wait = SignedDuration::from_secs(min_ready_seconds.into());
        self.ready_since?.checked_add(wait).ok()
    }
}

/// Pods that are bound come first, then the oldest.
pub(super) fn sort_oldest_first(pods: &mut [&Arc<Daemon>]) {
    pods.sort_by(|left, right| {
        let order = |pod: &Daemon| (!pod.is_bound, pod.created);
        order(left)
            .cmp(&order(right))
            .then_with(|| left.name.cmp(&right.name))
    });
}

/// A node without all that does not decide where daemons run.
pub(super) fn placement_part(node: &Node) -> Node {
    Node {
        metadata: ObjectMeta {
            name: node.metadata.name.clone(),
            labels: node.metadata.labels.clone(),
            ..Default::default()
        },
        spec: node.spec.as_ref().map(|spec| NodeSpec {
            taints: spec.taints.clone(),
            ..Default::default()
        }),
        status: None,
    }
}
