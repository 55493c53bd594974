//! From a node to the taints, conditions and labels it should have. No I/O.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::node::condition;
use crate::selector::Labels;

pub(super) const NOT_READY: &str = "node.kubernetes.io/not-ready";
pub(super) const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

/// Condition, the status that is bad, and the taint that says so.
const CONDITION_TAINTS: &[(&str, &str, &str)] = &[
    ("Ready", "False", NOT_READY),
    ("Ready", "Unknown", UNREACHABLE),
    ("MemoryPressure", "True", "node.kubernetes.io/memory-pressure"),
    ("DiskPressure", "True", "node.kubernetes.io/disk-pressure"),
    ("PIDPressure", "True", "node.kubernetes.io/pid-pressure"),
    (
        "NetworkUnavailable",
        "True",
        "node.kubernetes.io/network-unavailable",
    ),
];

/// What may happen to the NoExecute taint that tells of a node that is not ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoExecute {
    /// Put it there, or turn it into the one that fits.
    Add,
    /// Not yet: one that is there is turned into the one that fits, none is added.
    Hold,
    /// Nothing is evicted: take it away.
    Remove,
}

/// The NoExecute taint that the node's Ready condition asks for.
pub(super) fn eviction_taint(node: &Node) -> Option<&'static str> {
    match condition(node, "Ready")?.status.as_str() {
        "False" => Some(NOT_READY),
        "Unknown" => Some(UNREACHABLE),
        _ => None,
    }
}

fn is_eviction_taint(taint: &Taint) -> bool {
    taint.effect == "NoExecute" && (taint.key == NOT_READY || taint.key == UNREACHABLE)
}

/// True if one of our NoExecute taints is there.
pub(super) fn is_evicted(node: &Node) -> bool {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    taints.into_iter().any(is_eviction_taint)
}

/// The taints a node should have: those of others as they are, ours by its conditions.
pub(super) fn plan_taints(node: &Node, no_execute: NoExecute, now: Timestamp) -> Vec<Taint> {
    let present = node
        .spec
        .as_ref()
        .and_then(|spec| spec.taints.clone())
        .unwrap_or_default();
    let status_of = |type_: &str| condition(node, type_).map(|condition| condition.status.clone());
    let mut wanted: Vec<(&str, &str)> = Vec::new();
    for (type_, bad, key) in CONDITION_TAINTS {
        if status_of(type_).as_deref() == Some(*bad) {
            wanted.push((key, "NoSchedule"));
        }
    }
    // It has not reported yet: nothing may be scheduled there, but nothing needs to leave.
    if condition(node, "Ready").is_none() {
        wanted.push((NOT_READY, "NoSchedule"));
    }
    let may_have = match no_execute {
        NoExecute::Add => true,
        NoExecute::Hold => is_evicted(node),
        NoExecute::Remove => false,
    };
    wanted.extend(
        eviction_taint(node)
            .filter(|_| may_have)
            .map(|key| (key, "NoExecute")),
    );
    if node
        .spec
        .as_ref()
        .and_then(|spec| spec.unschedulable)
        .unwrap_or(false)
    {
        wanted.push((UNSCHEDULABLE, "NoSchedule"));
    }
    let is_ours = |taint: &Taint| {
        let by_condition = CONDITION_TAINTS.iter().any(|(_, _, key)| *key == taint.key);
        match taint.effect.as_str() {
            "NoSchedule" => by_condition || taint.key == UNSCHEDULABLE,
            "NoExecute" => is_eviction_taint(taint),
            _ => false,
        }
    };
    let is_wanted = |taint: &Taint| wanted.contains(&(taint.key.as_str(), taint.effect.as_str()));
    let mut taints: Vec<Taint> = present
        .iter()
        .filter(|taint| !is_ours(taint) || is_wanted(taint))
        .cloned()
        .collect();
    for (key, effect) in wanted {
        if !taints
            .iter()
            .any(|taint| taint.key == key && taint.effect == effect)
        {
            taints.push(Taint {
                key: key.into(),
                effect: effect.into(),
                time_added: Some(Time(now)),
                value: None,
            });
        }
    }
    taints
}

/// The conditions of a node that has fallen silent; empty if it shows them already.
pub(super) fn silent_conditions(node: &Node, now: Timestamp) -> Vec<NodeCondition> {
    let mut changed = Vec::new();
    for type_ in ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"] {
        match condition(node, type_) {
            None => changed.push(NodeCondition {
                type_: type_.into(),
                status: "Unknown".into(),
                reason: Some("NodeStatusNeverUpdated".into()),
                message: Some("Kubelet never posted node status.".into()),
                last_heartbeat_time: node.metadata.creation_timestamp.clone(),
                last_transition_time: Some(Time(now)),
            }),
            Some(present) if present.status != "Unknown" => changed.push(NodeCondition {
                status: "Unknown".into(),
                reason: Some("NodeStatusUnknown".into()),
                message: Some("Kubelet stopped posting node status.".into()),
                last_transition_time: Some(Time(now)),
                ..present.clone()
            }),
            Some(_) => {}
        }
    }
    changed
}

/// The beta labels that repeat stable ones, where they are missing or differ.
pub(super) fn label_repairs(node: &Node) -> Labels {
    const PAIRS: [(&str, &str); 2] = [
        ("kubernetes.io/os", "beta.kubernetes.io/os"),
        ("kubernetes.io/arch", "beta.kubernetes.io/arch"),
    ];
    let labels = node.metadata.labels.clone().unwrap_or_default();
    let mut repairs = Labels::new();
    for (stable, beta) in PAIRS {
        if let Some(value) = labels.get(stable)
            && labels.get(beta) != Some(value)
        {
            repairs.insert(beta.to_owned(), value.clone());
        }
    }
    repairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn node(conditions: &[(&str, &str)], taints: &[(&str, &str)], unschedulable: bool) -> Node {
        let conditions: Vec<_> = conditions
            .iter()
            .map(|(t, s)| json!({"type": t, "status": s}))
            .collect();
        let taints: Vec<_> = taints
            .iter()
            .map(|(k, e)| json!({"key": k, "effect": e}))
            .collect();
        serde_json::from_value(
            json!({"metadata": {"name": "n"}, "spec": {"taints": taints, "unschedulable": unschedulable},
            "status": {"conditions": conditions}}),
        )
        .unwrap()
    }

    #[test]
    fn conditions_become_taints() {
        let check_with = |node: Node, no_execute: NoExecute, expected: &[(&str, &str)]| {
            let got = plan_taints(&node, no_execute, Timestamp::UNIX_EPOCH);
            let got: Vec<(&str, &str)> = got
                .iter()
                .map(|taint| (taint.key.as_str(), taint.effect.as_str()))
                .collect();
            assert_eq!(got, expected);
        };
        let check = |node: Node, expected: &[(&str, &str)]| check_with(node, NoExecute::Add, expected);
        check(node(&[("Ready", "True")], &[], false), &[]);
        check(node(&[], &[], false), &[(NOT_READY, "NoSchedule")]);
        check(
            node(
                &[("Ready", "True")],
                &[(NOT_READY, "NoSchedule"), ("own", "NoExecute")],
                false,
            ),
            &[("own", "NoExecute")],
        );
        check(
            node(&[("Ready", "False")], &[], false),
            &[(NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")],
        );
        check(
            node(&[("Ready", "Unknown")], &[(NOT_READY, "NoExecute")], false),
            &[(UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")],
        );
        check(
            node(&[("Ready", "True"), ("DiskPressure", "True")], &[], true),
            &[
                ("node.kubernetes.io/disk-pressure", "NoSchedule"),
                (UNSCHEDULABLE, "NoSchedule"),
            ],
        );
    }

    #[test]
    fn evictions_wait_or_stop() {
        let check = |ready: &str, taints: &[(&str, &str)], no_execute: NoExecute, expected: &[&str]| {
            let node = node(&[("Ready", ready)], taints, false);
            let got = plan_taints(&node, no_execute, Timestamp::UNIX_EPOCH);
            let got: Vec<&str> = got
                .iter()
                .filter(|taint| taint.effect == "NoExecute")
                .map(|taint| taint.key.as_str())
                .collect();
            assert_eq!(got, expected, "{ready} {no_execute:?}");
        };
        let old = [(NOT_READY, "NoExecute")];
        check("Unknown", &[], NoExecute::Add, &[UNREACHABLE]);
        check("Unknown", &[], NoExecute::Hold, &[]);
        check("Unknown", &old, NoExecute::Hold, &[UNREACHABLE]);
        check("Unknown", &old, NoExecute::Remove, &[]);
        check("False", &old, NoExecute::Hold, &[NOT_READY]);
        check("True", &old, NoExecute::Hold, &[]);
    }

    #[test]
    fn beta_labels_follow() {
        let check = |labels: serde_json::Value, expected: &[(&str, &str)]| {
            let node: Node = serde_json::from_value(json!({"metadata": {"labels": labels}})).unwrap();
            let got = label_repairs(&node);
            let got: Vec<(&str, &str)> = got.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            assert_eq!(got, expected, "{labels}");
        };
        check(json!({}), &[]);
        check(
            json!({"kubernetes.io/os": "linux"}),
            &[("beta.kubernetes.io/os", "linux")],
        );
        check(
            json!({"kubernetes.io/arch": "arm64", "beta.kubernetes.io/arch": "amd64"}),
            &[("beta.kubernetes.io/arch", "arm64")],
        );
        check(
            json!({"kubernetes.io/os": "linux", "beta.kubernetes.io/os": "linux"}),
            &[],
        );
    }

    #[test]
    fn silence_is_unknown() {
        let got = silent_conditions(
            &node(&[("Ready", "True"), ("DiskPressure", "Unknown")], &[], false),
            Timestamp::UNIX_EPOCH,
        );
        let got: Vec<String> = got
            .iter()
            .map(|c| {
                format!(
                    "{} {} {}",
                    c.type_,
                    c.status,
                    c.reason.clone().unwrap_or_default()
                )
            })
            .collect();
        assert_eq!(
            got,
            vec![
                "Ready Unknown NodeStatusUnknown",
                "MemoryPressure Unknown NodeStatusNeverUpdated",
                "PIDPressure Unknown NodeStatusNeverUpdated"
            ]
        );
    }
}
