//! Cases of `plan`: each names a pod, what the runtime has, and what shall be done.

use std::collections::HashMap;

use serde_json::json;

use super::*;
use crate::observed::{ObservedContainer, ObservedSandbox};

#[derive(Default)]
struct Verdicts {
    startup: HashMap<String, bool>,
    liveness: HashMap<String, bool>,
}

impl ProbeVerdicts for Verdicts {
    fn startup(&self, id: &str) -> Option<bool> {
        self.startup.get(id).copied()
    }
    fn liveness(&self, id: &str) -> Option<bool> {
        self.liveness.get(id).copied()
    }
}

fn pod(restart_policy: &str, init: serde_json::Value, containers: serde_json::Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p"},
        "spec": {"restartPolicy": restart_policy, "initContainers": init, "containers": containers}}))
    .unwrap()
}

fn two() -> serde_json::Value {
    json!([{"name": "a", "image": "i"}, {"name": "b", "image": "i"}])
}

fn sandbox(ready: bool) -> ObservedSandbox {
    ObservedSandbox {
        id: "s0".into(),
        ready,
        ips: vec!["10.0.0.2".into()],
        ..Default::default()
    }
}

/// `a:running`, `b:exited:1`: the newest first.
fn observed(sandboxes: Vec<ObservedSandbox>, containers: &[&str]) -> ObservedPod {
    let containers = containers
        .iter()
        .map(|text| {
            let mut parts = text.split(':');
            let name = parts.next().unwrap();
            let state = match parts.next().unwrap() {
                "running" => ContainerState::Running,
                "created" => ContainerState::Created,
                "exited" => ContainerState::Exited,
                _ => ContainerState::Unknown,
            };
            ObservedContainer {
                id: format!("{name}-id"),
                name: name.into(),
                state,
                exit_code: parts.next().map_or(0, |code| code.parse().unwrap()),
                hash: container_hash(name, "i"),
                ..Default::default()
            }
        })
        .collect();
    ObservedPod {
        sandboxes,
        containers,
    }
}

/// The actions as one line: `sandbox#1 kill-pod init[0] start[0,1] kill[a: message]`.
fn summary(actions: &PodActions) -> String {
    let mut words = Vec::new();
    if actions.create_sandbox {
        words.push(format!("sandbox#{}", actions.attempt));
    }
    if actions.kill_pod {
        words.push("kill-pod".to_owned());
    }
    let list = |name: &str, indexes: &[usize]| {
        let indexes: Vec<String> = indexes.iter().map(usize::to_string).collect();
        format!("{name}[{}]", indexes.join(","))
    };
    for (name, indexes) in [
        ("init", &actions.init_containers_to_start),
        ("start", &actions.containers_to_start),
        ("ephemeral", &actions.ephemeral_containers_to_start),
    ] {
        if !indexes.is_empty() {
            words.push(list(name, indexes));
        }
    }
    for kill in &actions.containers_to_kill {
        words.push(format!("kill[{}: {}]", kill.name, kill.message));
    }
    words.join(" ")
}

fn check(pod: &Pod, observed: &ObservedPod, verdicts: &Verdicts, expected: &str) {
    assert_eq!(summary(&plan(pod, observed, verdicts, None, false)), expected);
}

#[test]
fn a_new_pod() {
    let none = Verdicts::default();
    check(
        &pod("Always", json!([]), two()),
        &observed(vec![], &[]),
        &none,
        "sandbox#0 kill-pod start[0,1]",
    );
    check(
        &pod("Always", json!([{"name": "i"}]), two()),
        &observed(vec![], &[]),
        &none,
        "sandbox#0 kill-pod init[0]",
    );
    check(
        &pod("Always", json!([]), two()),
        &observed(vec![sandbox(true)], &[]),
        &none,
        "start[0,1]",
    );
}

#[test]
fn restart_policies() {
    let none = Verdicts::default();
    let with = |containers: &[&str]| observed(vec![sandbox(true)], containers);
    check(
        &pod("Always", json!([]), two()),
        &with(&["a:running", "b:running"]),
        &none,
        "",
    );
    check(
        &pod("Always", json!([]), two()),
        &with(&["a:running", "b:exited:0"]),
        &none,
        "start[1]",
    );
    check(
        &pod("OnFailure", json!([]), two()),
        &with(&["a:running", "b:exited:0"]),
        &none,
        "",
    );
    check(
        &pod("OnFailure", json!([]), two()),
        &with(&["a:exited:0", "b:exited:3"]),
        &none,
        "start[1]",
    );
    check(
        &pod("OnFailure", json!([]), two()),
        &with(&["a:exited:0", "b:exited:0"]),
        &none,
        "kill-pod",
    );
    check(
        &pod("Never", json!([]), two()),
        &with(&["a:exited:0", "b:exited:1"]),
        &none,
        "kill-pod",
    );
    check(
        &pod("Never", json!([]), two()),
        &with(&["a:running", "b:exited:1"]),
        &none,
        "",
    );
    let rules = json!([{"name": "a", "image": "i", "restartPolicy": "Never", "restartPolicyRules":
        [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]}]);
    check(
        &pod("Never", json!([]), rules.clone()),
        &with(&["a:exited:42"]),
        &none,
        "start[0]",
    );
    check(
        &pod("Never", json!([]), rules),
        &with(&["a:exited:41"]),
        &none,
        "kill-pod",
    );
}

#[test]
fn a_lost_sandbox() {
    let none = Verdicts::default();
    check(
        &pod("Always", json!([]), two()),
        &observed(vec![sandbox(false)], &["a:exited:0", "b:exited:0"]),
        &none,
        "sandbox#1 kill-pod start[0,1]",
    );
    check(
        &pod("Never", json!([]), two()),
        &observed(vec![sandbox(false)], &["a:exited:0", "b:exited:0"]),
        &none,
        "kill-pod",
    );
    check(
        &pod("OnFailure", json!([]), two()),
        &observed(vec![sandbox(false)], &["a:exited:0", "b:exited:1"]),
        &none,
        "sandbox#1 kill-pod start[1]",
    );
    check(
        &pod("OnFailure", json!([]), two()),
        &observed(vec![sandbox(false)], &["a:exited:0", "b:exited:0"]),
        &none,
        "kill-pod",
    );
    let no_address = ObservedSandbox {
        ips: vec![],
        ..sandbox(true)
    };
    check(
        &pod("Always", json!([]), two()),
        &observed(vec![no_address], &[]),
        &none,
        "sandbox#1 kill-pod start[0,1]",
    );
}

#[test]
fn init_containers_in_order() {
    let none = Verdicts::default();
    let init = json!([{"name": "x", "image": "i"}, {"name": "y", "image": "i"}]);
    let with = |containers: &[&str]| observed(vec![sandbox(true)], containers);
    check(&pod("Always", init.clone(), two()), &with(&[]), &none, "init[0]");
    check(
        &pod("Always", init.clone(), two()),
        &with(&["x:running"]),
        &none,
        "",
    );
    check(
        &pod("Always", init.clone(), two()),
        &with(&["x:exited:0"]),
        &none,
        "init[1]",
    );
    check(
        &pod("Always", init.clone(), two()),
        &with(&["x:exited:1"]),
        &none,
        "init[0]",
    );
    check(
        &pod("Never", init.clone(), two()),
        &with(&["x:exited:1"]),
        &none,
        "kill-pod",
    );
    check(
        &pod("Always", init.clone(), two()),
        &with(&["y:exited:0", "x:exited:0"]),
        &none,
        "start[0,1]",
    );
    // The runtime has forgotten the init containers, but the pod runs.
    check(
        &pod("Always", init, two()),
        &with(&["a:running", "b:running"]),
        &none,
        "",
    );
}

#[test]
fn sidecars() {
    let none = Verdicts::default();
    let sidecar =
        json!([{"name": "s", "image": "i", "restartPolicy": "Always"}, {"name": "y", "image": "i"}]);
    let with = |containers: &[&str]| observed(vec![sandbox(true)], containers);
    check(
        &pod("Always", sidecar.clone(), two()),
        &with(&["s:running"]),
        &none,
        "init[1]",
    );
    check(
        &pod("Always", sidecar.clone(), two()),
        &with(&["y:exited:0", "s:running"]),
        &none,
        "start[0,1]",
    );
    check(
        &pod("Always", sidecar.clone(), two()),
        &with(&["a:running", "b:running", "y:exited:0", "s:exited:1"]),
        &none,
        "init[0]",
    );
    // Everything else is done: the sidecar does not hold the pod.
    check(
        &pod("Never", sidecar, two()),
        &with(&["a:exited:0", "b:exited:0", "y:exited:0", "s:exited:0"]),
        &none,
        "kill-pod",
    );
    let probed = json!([{"name": "s", "image": "i", "restartPolicy": "Always", "startupProbe": {"tcpSocket": {"port": 1}}}]);
    check(
        &pod("Always", probed.clone(), two()),
        &with(&["s:running"]),
        &none,
        "",
    );
    let started = Verdicts {
        startup: HashMap::from([("s-id".into(), true)]),
        ..Default::default()
    };
    check(
        &pod("Always", probed.clone(), two()),
        &with(&["s:running"]),
        &started,
        "start[0,1]",
    );
    let failed = Verdicts {
        startup: HashMap::from([("s-id".into(), false)]),
        ..Default::default()
    };
    check(
        &pod("Always", probed, two()),
        &with(&["s:running"]),
        &failed,
        "init[0] kill[s: Init container s failed startup probe]",
    );
}

#[test]
fn probes_and_changes() {
    let with = |containers: &[&str]| observed(vec![sandbox(true)], containers);
    let dead = Verdicts {
        liveness: HashMap::from([("a-id".into(), false)]),
        ..Default::default()
    };
    check(
        &pod("Always", json!([]), two()),
        &with(&["a:running", "b:running"]),
        &dead,
        "start[0] kill[a: Container a failed liveness probe, will be restarted]",
    );
    check(
        &pod("Never", json!([]), two()),
        &with(&["a:running", "b:running"]),
        &dead,
        "kill[a: Container a failed liveness probe]",
    );
    let changed = json!([{"name": "a", "image": "other"}, {"name": "b", "image": "i"}]);
    check(
        &pod("Never", json!([]), changed),
        &with(&["a:running", "b:running"]),
        &Verdicts::default(),
        "start[0] kill[a: Container a definition changed, will be restarted]",
    );
    check(
        &pod("Always", json!([]), two()),
        &with(&["a:unknown", "b:running"]),
        &Verdicts::default(),
        "start[0] kill[a: Container is in \"unknown\" state, try killing it before restart]",
    );
}

#[test]
fn a_deleted_pod_starts_nothing() {
    let mut pod = pod("Always", json!([]), two());
    pod.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    check(
        &pod,
        &observed(vec![sandbox(true)], &["a:exited:0", "b:exited:0"]),
        &Verdicts::default(),
        "kill-pod",
    );
}
