//! What the ReplicaSet controller needs of a pod, and which of several should go first. A set may have thousands of pods,
//! and each change of one looks at all of them: this part is kept, so that they are not decoded each time.

use std::cmp::Ordering;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;

use crate::pods;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Pending,
    Unknown,
    Running,
    Ended,
}

/// A pod of a ReplicaSet or ReplicationController.
#[derive(Debug, PartialEq)]
pub(crate) struct ReplicaPod {
    pub(crate) name: String,
    uid: Option<String>,
    /// Empty until it is bound.
    pub(crate) node: String,
    phase: Phase,
    is_deleting: bool,
    pub(crate) is_ready: bool,
    ready_since: Option<Timestamp>,
    created: Option<Timestamp>,
    deletion_cost: i32,
    restarts: i32,
}

fn deletion_cost(pod: &Pod) -> i32 {
    let annotations = pod.metadata.annotations.as_ref();
    let text = annotations.and_then(|all| all.get("controller.kubernetes.io/pod-deletion-cost"));
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn max_restarts(pod: &Pod) -> i32 {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref());
    statuses
        .into_iter()
        .flatten()
        .map(|status| status.restart_count)
        .max()
        .unwrap_or(0)
}

impl ReplicaPod {
    pub(crate) fn of(pod: &Pod) -> Self {
        ReplicaPod {
            name: pod.metadata.name.clone().unwrap_or_default(),
            uid: pod.metadata.uid.clone(),
            node: pods::node_name(pod).to_owned(),
            phase: match pods::phase(pod) {
                "Unknown" => Phase::Unknown,
                "Running" => Phase::Running,
                "Succeeded" | "Failed" => Phase::Ended,
                _ => Phase::Pending,
            },
            is_deleting: pod.metadata.deletion_timestamp.is_some(),
            is_ready: pods::is_ready(pod),
            ready_since: pods::ready_since(pod),
            created: pod.metadata.creation_timestamp.as_ref().map(|time| time.0),
            deletion_cost: deletion_cost(pod),
            restarts: max_restarts(pod),
        }
    }

    /// It neither ended nor is being deleted.
    pub(crate) fn is_active(&self) -> bool {
        self.phase != Phase::Ended && !self.is_deleting
    }

    /// It is being deleted and has not ended yet.
    pub(crate) fn is_terminating(&self) -> bool {
        self.phase != Phase::Ended && self.is_deleting
    }

    /// When it will have been ready for `min_ready_seconds`; `None` if it is not ready.
    pub(crate) fn available_at(&self, min_ready_seconds: i32) -> Option<Timestamp> {
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

/// The order of magnitude of an age: among pods of about the same age any may go.
fn age_bucket(time: Option<Timestamp>, now: Timestamp) -> i32 {
    match time {
        None => -1,
        Some(time) => {
            let seconds = now.duration_since(time).as_secs();
            if seconds < 1 { -1 } else { seconds.ilog2() as i32 }
        }
    }
}

/// Orders pods by how gladly they are given up, first to go first. `rank` says how many related pods share
/// the pod's node.
pub(crate) fn deletion_order(
    (left, left_rank): (&ReplicaPod, usize),
    (right, right_rank): (&ReplicaPod, usize),
    now: Timestamp,
) -> Ordering {
    let phase_order = |pod: &ReplicaPod| match pod.phase {
        Phase::Pending | Phase::Ended => 0,
        Phase::Unknown => 1,
        Phase::Running => 2,
    };
    let both_ready = left.is_ready && right.is_ready;
    let age = |left: Option<Timestamp>, right: Option<Timestamp>| {
        age_bucket(left, now).cmp(&age_bucket(right, now))
    };
    (!left.node.is_empty())
        .cmp(&!right.node.is_empty())
        .then_with(|| phase_order(left).cmp(&phase_order(right)))
        .then_with(|| left.is_ready.cmp(&right.is_ready))
        .then_with(|| left.deletion_cost.cmp(&right.deletion_cost))
        .then_with(|| right_rank.cmp(&left_rank))
        .then_with(|| {
            if both_ready {
                age(left.ready_since, right.ready_since)
            } else {
                Ordering::Equal
            }
        })
        .then_with(|| right.restarts.cmp(&left.restarts))
        .then_with(|| age(left.created, right.created))
        .then_with(|| left.uid.cmp(&right.uid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, patch: serde_json::Value) -> ReplicaPod {
        let mut value = json!({
            "metadata": {"name": name, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"nodeName": "n", "containers": []},
            "status": {"phase": "Running", "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:10Z"}]}});
        for (pointer, change) in patch.as_object().unwrap() {
            *value.pointer_mut(pointer).unwrap() = change.clone();
        }
        ReplicaPod::of(&serde_json::from_value(value).unwrap())
    }

    #[test]
    fn the_least_useful_pod_goes_first() {
        let now: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
        let annotation = |cost: &str| {
            json!({"name": "x", "uid": "x", "creationTimestamp": "2026-01-01T00:00:00Z",
            "annotations": {"controller.kubernetes.io/pod-deletion-cost": cost}})
        };
        // Each entry goes before all that follow it.
        let order: Vec<(ReplicaPod, usize)> = vec![
            (pod("unassigned", json!({"/spec/nodeName": ""})), 0),
            (pod("pending", json!({"/status/phase": "Pending"})), 0),
            (pod("unready", json!({"/status/conditions/0/status": "False"})), 0),
            (pod("cheap", json!({"/metadata": annotation("-5")})), 0),
            (pod("crowded", json!({})), 3),
            (
                pod(
                    "young",
                    json!({"/status/conditions/0/lastTransitionTime": "2026-01-01T23:59:00Z"}),
                ),
                1,
            ),
            (pod("plain", json!({})), 1),
            (pod("dear", json!({"/metadata": annotation("9")})), 4),
        ];
        for (index, left) in order.iter().enumerate() {
            for right in &order[index + 1..] {
                let got = deletion_order((&left.0, left.1), (&right.0, right.1), now);
                assert_eq!(got, Ordering::Less, "{:?} {:?}", left.0.uid, right.0.uid);
            }
        }
    }
}
