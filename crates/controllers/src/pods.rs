//! What controllers ask of a pod: its state, and which of several should go first.

use std::cmp::Ordering;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

pub(crate) use skiff_pods::state::*;

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
pub(crate) fn deletion_order(left: (&Pod, usize), right: (&Pod, usize), now: Timestamp) -> Ordering {
    let ((left, left_rank), (right, right_rank)) = (left, right);
    let phase_order = |pod: &Pod| match phase(pod) {
        "Pending" => 0,
        "Unknown" => 1,
        "Running" => 2,
        _ => 0,
    };
    let created = |pod: &Pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let both_ready = is_ready(left) && is_ready(right);
    let age = |left: Option<Timestamp>, right: Option<Timestamp>| {
        age_bucket(left, now).cmp(&age_bucket(right, now))
    };
    (!node_name(left).is_empty())
        .cmp(&!node_name(right).is_empty())
        .then_with(|| phase_order(left).cmp(&phase_order(right)))
        .then_with(|| is_ready(left).cmp(&is_ready(right)))
        .then_with(|| deletion_cost(left).cmp(&deletion_cost(right)))
        .then_with(|| right_rank.cmp(&left_rank))
        .then_with(|| {
            if both_ready {
                age(ready_since(left), ready_since(right))
            } else {
                Ordering::Equal
            }
        })
        .then_with(|| max_restarts(right).cmp(&max_restarts(left)))
        .then_with(|| age(created(left), created(right)))
        .then_with(|| left.metadata.uid.cmp(&right.metadata.uid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, patch: serde_json::Value) -> Pod {
        let mut value = json!({
            "metadata": {"name": name, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"nodeName": "n", "containers": []},
            "status": {"phase": "Running", "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:10Z"}]}});
        for (pointer, change) in patch.as_object().unwrap() {
            *value.pointer_mut(pointer).unwrap() = change.clone();
        }
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn the_least_useful_pod_goes_first() {
        let now: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
        let annotation = |cost: &str| {
            json!({"name": "x", "uid": "x", "creationTimestamp": "2026-01-01T00:00:00Z",
            "annotations": {"controller.kubernetes.io/pod-deletion-cost": cost}})
        };
        // Each entry goes before all that follow it.
        let order: Vec<(Pod, usize)> = vec![
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
                assert_eq!(
                    got,
                    Ordering::Less,
                    "{:?} {:?}",
                    left.0.metadata.uid,
                    right.0.metadata.uid
                );
            }
        }
    }
}
