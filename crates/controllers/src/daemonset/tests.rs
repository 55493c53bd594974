//! Plans of a DaemonSet over made-up nodes and pods.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};

use super::daemon::{Daemon, placement_part};
use super::plan::{Observed, Plan};

/// `a` must have a pod; `a!` is tainted so that a pod may stay; `a-` is one that the set does not select.
fn node(text: &str) -> Arc<Node> {
    let name = text.trim_end_matches(['!', '-']);
    let taints = if text.ends_with('!') {
        json!([{"key": "x", "effect": "NoSchedule"}])
    } else {
        json!([])
    };
    let labels = if text.ends_with('-') {
        json!({})
    } else {
        json!({"daemon": "yes"})
    };
    let node = json!({"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}});
    let node: Node = serde_json::from_value(node).unwrap();
    Arc::new(placement_part(&node))
}

/// `NAME@NODE REVISION STATE`: the revision is `new` or `old`; states are `ready`, `fresh` (since a second),
/// `unready`, `failed`, `succeeded`, `waiting` (no node yet), and with `-` in front being deleted.
fn pod(text: &str) -> Arc<Daemon> {
    let mut words = text.split(' ');
    let (name, node) = words.next().unwrap().split_once('@').unwrap();
    let (revision, state) = (words.next().unwrap(), words.next().unwrap());
    let deleted = if state.starts_with('-') {
        json!("2026-01-01T00:00:00Z")
    } else {
        Value::Null
    };
    let state = state.trim_start_matches('-');
    let (phase, ready, since) = match state {
        "ready" => ("Running", "True", "2026-01-01T00:00:00Z"),
        "fresh" => ("Running", "True", "2026-01-01T00:59:59Z"),
        "unready" => ("Running", "False", "2026-01-01T00:00:00Z"),
        "waiting" => ("Pending", "False", "2026-01-01T00:00:00Z"),
        "failed" => ("Failed", "False", "2026-01-01T00:00:00Z"),
        "succeeded" => ("Succeeded", "False", "2026-01-01T00:00:00Z"),
        other => panic!("{other}"),
    };
    let mut pod = json!({
        "metadata": {"name": name, "namespace": "d", "uid": name, "deletionTimestamp": deleted,
            "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"controller-revision-hash": revision}},
        "spec": {"containers": [], "nodeName": node},
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": since}]}});
    if state == "waiting" {
        pod["spec"] = json!({"containers": [], "affinity": {"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [
                {"key": "metadata.name", "operator": "In", "values": [node]}]}]}}}});
    }
    let pod: Pod = serde_json::from_value(pod).unwrap();
    Arc::new(Daemon::of(&pod))
}

fn set(rolling: Value, min_ready_seconds: i32) -> DaemonSet {
    let strategy = match rolling {
        Value::Null => json!({"type": "OnDelete"}),
        rolling => json!({"type": "RollingUpdate", "rollingUpdate": rolling}),
    };
    serde_json::from_value(
        json!({"metadata": {"name": "agent", "namespace": "d", "uid": "u", "generation": 2},
        "spec": {"selector": {}, "updateStrategy": strategy, "minReadySeconds": min_ready_seconds,
            "template": {"spec": {"containers": [], "nodeSelector": {"daemon": "yes"}}}}}),
    )
    .unwrap()
}

fn observe<T>(set: &DaemonSet, nodes: &[&str], pods: &[&str], what: impl Fn(&Observed<'_>) -> T) -> T {
    let nodes: Vec<_> = nodes.iter().map(|text| node(text)).collect();
    let pods: Vec<_> = pods.iter().map(|text| pod(text)).collect();
    let now: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
    what(&Observed::new(
        set,
        set.spec.as_ref().unwrap(),
        &nodes,
        &pods,
        "new",
        now,
    ))
}

fn shown(plan: &Plan) -> String {
    let create = plan.create.iter().map(|node| format!("+{node}"));
    let delete = plan.delete.iter().map(|pod| format!("-{pod}"));
    create.chain(delete).collect::<Vec<_>>().join(" ")
}

fn unavailable(count: i64) -> Value {
    json!({"maxUnavailable": count, "maxSurge": 0})
}

fn surge(count: i64) -> Value {
    json!({"maxUnavailable": 0, "maxSurge": count})
}

#[test]
fn every_node_has_its_pod() {
    let check = |rolling: Value, nodes: &[&str], pods: &[&str], expected: &str| {
        let plan = observe(&set(rolling, 0), nodes, pods, |seen| {
            seen.manage(|node| (node == "slow").then_some(Duration::from_secs(7)))
        });
        assert_eq!(shown(&plan), expected, "{nodes:?} {pods:?}");
    };
    let none = || unavailable(1);
    check(none(), &["a", "b", "c!", "d-"], &["p@b new ready"], "+a");
    check(none(), &["a"], &["p@a new waiting"], "");
    check(none(), &["a!", "b-"], &["p@a new ready", "q@b new ready"], "-q");
    check(none(), &["b-"], &["q@b new -ready"], "");
    check(none(), &["a"], &["p@a old ready", "q@a new ready"], "-q");
    check(none(), &["a"], &["p@a old waiting", "q@a new ready"], "-p");
    // A pod that is going holds its place until it is gone.
    check(none(), &["a"], &["p@a new -ready"], "");
    check(none(), &["a"], &["p@a new -failed"], "+a");
    check(none(), &["a"], &["p@a new failed"], "-p");
    check(none(), &["a"], &["p@a new succeeded"], "-p");
    check(none(), &["slow"], &["p@slow new failed"], "");
    check(none(), &["slow"], &["p@slow new succeeded"], "-p");
    // Pods for nodes that are gone, if they were never bound.
    check(none(), &[], &["p@gone new waiting", "q@gone new ready"], "-p");
    // With surge a new pod comes while the old one goes, and two may be there at a time.
    check(surge(1), &["a"], &["p@a old -ready"], "+a");
    check(surge(1), &["a"], &["p@a new failed"], "+a -p");
    check(surge(1), &["slow"], &["p@slow new failed"], "");
    check(surge(1), &["a"], &["p@a old ready", "q@a new unready"], "");
    check(surge(1), &["a"], &["p@a old ready", "q@a new ready"], "-p");
    check(surge(1), &["a"], &["p@a old unready", "q@a new unready"], "-p");
    check(
        surge(1),
        &["a"],
        &["p@a old ready", "q@a new unready", "r@a new unready"],
        "-r",
    );
    let plan = observe(
        &set(none(), 0),
        &["slow", "a"],
        &["p@slow new failed", "q@a new failed"],
        |seen| seen.manage(|node| (node == "slow").then_some(Duration::from_secs(7))),
    );
    assert_eq!(plan.wait, Some(Duration::from_secs(7)));
    let ended: Vec<_> = plan
        .ended
        .iter()
        .map(|one| (one.pod.as_str(), one.failed))
        .collect();
    assert_eq!(ended, [("q", true)]);
}

#[test]
fn a_burst_is_limited() {
    let names: Vec<String> = (0..600).map(|number| format!("n{number}")).collect();
    let nodes: Vec<&str> = names.iter().map(String::as_str).collect();
    let plan = observe(&set(unavailable(1), 0), &nodes, &[], |seen| seen.manage(|_| None));
    assert_eq!(plan.create.len(), 250);
}

#[test]
fn updates_roll() {
    let check = |rolling: Value, nodes: &[&str], pods: &[&str], expected: &str| {
        let plan = observe(&set(rolling.clone(), 0), nodes, pods, |seen| seen.roll());
        assert_eq!(shown(&plan), expected, "{rolling} {pods:?}");
    };
    let abc = ["a", "b", "c"];
    let old = ["p@a old ready", "q@b old ready", "r@c old ready"];
    check(Value::Null, &abc, &old, "");
    check(unavailable(1), &abc, &old, "-p");
    check(unavailable(2), &abc, &old, "-p -q");
    check(
        json!({"maxUnavailable": "67%", "maxSurge": 0}),
        &abc,
        &old,
        "-p -q -r",
    );
    check(unavailable(0), &abc, &old, "-p");
    // A new pod that is not available yet counts, and so does a node without any.
    check(
        unavailable(1),
        &abc,
        &["p@a new unready", "q@b old ready", "r@c old ready"],
        "",
    );
    check(unavailable(1), &abc, &["q@b old ready", "r@c old ready"], "");
    check(
        unavailable(1),
        &abc,
        &["p@a new ready", "q@b old ready", "r@c new ready"],
        "-q",
    );
    // An old pod that does not serve is replaced at once.
    check(
        unavailable(1),
        &abc,
        &["p@a old unready", "q@b old unready", "r@c old ready"],
        "-p -q",
    );
    check(
        unavailable(1),
        &abc,
        &["p@a new ready", "q@b new ready", "r@c new ready"],
        "",
    );

    check(surge(1), &abc, &old, "+a");
    check(surge(2), &abc, &old, "+a +b");
    check(
        surge(1),
        &abc,
        &[
            "p@a old ready",
            "n@a new unready",
            "q@b old ready",
            "r@c old ready",
        ],
        "",
    );
    check(
        surge(1),
        &abc,
        &["p@a old ready", "n@a new ready", "q@b old ready", "r@c old ready"],
        "+b -p",
    );
    check(
        surge(1),
        &abc,
        &["p@a old unready", "q@b old unready", "r@c old ready"],
        "+a +b +c",
    );
    // Where the set no longer runs, an available pod stays until another one took over.
    check(surge(1), &["a!", "b"], &["p@a old ready", "n@b new unready"], "");
    check(surge(1), &["a!", "b"], &["p@a old ready", "n@b new ready"], "-p");
    check(
        surge(1),
        &["a!", "b"],
        &["p@a old unready", "n@b new unready"],
        "-p",
    );
}

#[test]
fn the_status_counts_the_oldest_pod_of_a_node() {
    let check = |nodes: &[&str], pods: &[&str], expected: Value| {
        let status = observe(&set(unavailable(1), 60), nodes, pods, |seen| seen.status(None));
        assert_eq!(json!(status), expected, "{pods:?}");
    };
    check(
        &[],
        &[],
        json!({"desiredNumberScheduled": 0, "currentNumberScheduled": 0, "numberMisscheduled": 0,
            "numberReady": 0, "observedGeneration": 2}),
    );
    check(
        &["a", "b", "c", "d", "e!", "f-"],
        &[
            "p@a new ready",
            "q@b new fresh",
            "r@c old ready",
            "s@e new ready",
            "t@f new ready",
        ],
        json!({"desiredNumberScheduled": 4, "currentNumberScheduled": 3, "numberMisscheduled": 2,
            "numberReady": 3, "updatedNumberScheduled": 2, "numberAvailable": 2, "numberUnavailable": 2,
            "observedGeneration": 2}),
    );
    let next = observe(&set(unavailable(1), 60), &["a"], &["p@a new fresh"], |seen| {
        seen.next_availability()
    });
    assert_eq!(next, Some("2026-01-01T01:00:59Z".parse().unwrap()));
}
