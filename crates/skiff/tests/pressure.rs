//! A node that is short of something says so, takes no pods, and ends those that it has; when the shortage is over, it
//! takes pods again.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Cluster, Kubectl, busybox_archive, eventually, expect_eq};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

fn condition(kubectl: &Kubectl, type_: &str) -> Result<String> {
    let nodes = kubectl.json(&["get", "nodes"])?;
    let conditions = nodes["items"][0]["status"]["conditions"].as_array().cloned();
    let found = conditions.into_iter().flatten().find(|one| one["type"] == type_);
    Ok(found.map_or_else(String::new, |one| {
        one["status"].as_str().unwrap_or_default().to_owned()
    }))
}

fn pod(name: &str, spec: Value) -> String {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"]}]}});
    if let (Some(all), Some(more)) = (pod["spec"].as_object_mut(), spec.as_object()) {
        all.extend(more.clone());
    }
    pod.to_string()
}

#[test]
fn pods_are_evicted_when_the_node_runs_short() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(SKIFF, &[])?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    expect_eq(condition(&kubectl, "MemoryPressure")?.as_str(), "False")?;
    kubectl.apply(&pod("idle", json!({})))?;
    kubectl.apply(&pod(
        "needed",
        json!({"priorityClassName": "system-node-critical"}),
    ))?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod", "--all", "--timeout=90s"])?;

    // No machine has so much memory left.
    cluster.skiff(&["down"])?;
    let mut up = vec![
        "up",
        "--no-kubeconfig-merge",
        "--eviction-hard",
        "memory.available<1Pi",
    ];
    up.extend(["--eviction-pressure-transition-period", "1s"]);
    cluster.skiff(&up)?;
    eventually("the pod is evicted", PATIENCE, || {
        let idle = kubectl.json(&["get", "pod", "idle"])?;
        let status = &idle["status"];
        expect_eq(
            (status["phase"].as_str(), status["reason"].as_str()),
            (Some("Failed"), Some("Evicted")),
        )?;
        let message = status["message"].as_str().unwrap_or_default();
        ensure!(
            message.starts_with("The node was low on resource: memory. Threshold quantity: 1Pi, available: "),
            "{message}"
        );
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        ensure!(
            conditions
                .any(|one| one["type"] == "DisruptionTarget" && one["reason"] == "TerminationByKubelet"),
            "{status}"
        );
        Ok(())
    })?;
    expect_eq(condition(&kubectl, "MemoryPressure")?.as_str(), "True")?;
    let needed = kubectl.json(&["get", "pod", "needed"])?;
    expect_eq(needed["status"]["phase"].as_str(), Some("Running"))?;
    let events = kubectl.run(&["get", "events", "-A", "-o", "custom-columns=R:.reason"])?;
    for reason in ["EvictionThresholdMet", "Evicted", "NodeHasInsufficientMemory"] {
        ensure!(events.contains(reason), "no event {reason}:\n{events}");
    }

    // One that comes past the scheduler is refused.
    let node = kubectl.json(&["get", "nodes"])?["items"][0]["metadata"]["name"].clone();
    kubectl.apply(&pod("late", json!({"nodeName": node})))?;
    eventually("the pod is refused", PATIENCE, || {
        let late = kubectl.json(&["get", "pod", "late"])?;
        expect_eq(late["status"]["reason"].as_str(), Some("Evicted"))?;
        let message = late["status"]["message"].as_str().unwrap_or_default();
        ensure!(
            message.contains("The node had condition: [MemoryPressure]"),
            "{message}"
        );
        Ok(())
    })?;

    cluster.skiff(&["down"])?;
    cluster.up()?;
    eventually("the shortage is over", PATIENCE, || {
        expect_eq(condition(&kubectl, "MemoryPressure")?.as_str(), "False")
    })?;
    kubectl.apply(&pod("next", json!({})))?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/next", "--timeout=90s"])?;
    Ok(())
}
