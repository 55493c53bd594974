//! Static policies of the CPU, memory and topology managers with real containers: who runs on which CPUs, over a `kill -9`,
//! and what does not fit is refused.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Cluster, Kubectl, busybox_archive, eventually, expect_eq};
use std::collections::BTreeSet;
use std::process::Command;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

fn cpus(list: &str) -> Result<BTreeSet<u32>> {
    let mut all = BTreeSet::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        all.extend(first.parse::<u32>()?..=last.parse()?);
    }
    Ok(all)
}

/// The CPUs that the kernel lets the pod's first process run on.
fn allowed(kubectl: &Kubectl, pod: &str) -> Result<BTreeSet<u32>> {
    of_process(kubectl, pod, "Cpus_allowed_list:")
}

fn of_process(kubectl: &Kubectl, pod: &str, field: &str) -> Result<BTreeSet<u32>> {
    let status = kubectl.run(&["exec", pod, "--", "cat", "/proc/1/status"])?;
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    cpus(line.context("the kernel does not tell")?)
}

fn pod(name: &str, node: &str, resources: &Value) -> String {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "nodeName": node, "terminationGracePeriodSeconds": 0, "restartPolicy": "Never",
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"], "resources": resources}]}})
    .to_string()
}

#[test]
fn cpus_of_their_own() -> Result<()> {
    let all = cpus(&std::fs::read_to_string("/sys/devices/system/cpu/online")?)?;
    if all.len() < 2 || !all.contains(&0) {
        println!("skipped: there is one CPU, which is the system's");
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let flags = [
        "--cpu-manager-policy",
        "static",
        "--reserved-cpus",
        "0",
        "--memory-manager-policy",
        "Static",
        "--kube-reserved",
        "memory=60Mi",
        "--eviction-hard",
        "memory.available<4Mi",
        "--reserved-memory",
        "0:memory=64Mi",
        "--topology-manager-policy",
        "single-numa-node",
    ];
    let cluster = Cluster::start(SKIFF, &flags)?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    let node = kubectl.json(&["get", "nodes"])?["items"][0].clone();
    let name = node["metadata"]["name"].as_str().context("no node")?;
    let left = all.len() - 1;
    expect_eq(
        node["status"]["allocatable"]["cpu"].as_str(),
        Some(left.to_string().as_str()),
    )?;
    let guaranteed = |cpu: usize| {
        let amounts = json!({"cpu": cpu.to_string(), "memory": "16Mi"});
        json!({"requests": amounts, "limits": amounts})
    };
    kubectl.create(&pod("shared", name, &json!({"requests": {"memory": "16Mi"}})))?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/shared", "--timeout=90s"])?;
    expect_eq(&allowed(&kubectl, "shared")?, &all)?;
    kubectl.create(&pod("own", name, &guaranteed(1)))?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/own", "--timeout=90s"])?;
    let own = allowed(&kubectl, "own")?;
    ensure!(own.len() == 1 && !own.contains(&0), "{own:?}");
    expect_eq(of_process(&kubectl, "own", "Mems_allowed_list:")?.len(), 1)?;
    let rest = &all - &own;
    eventually("the others leave its CPU", PATIENCE, || {
        expect_eq(&allowed(&kubectl, "shared")?, &rest)
    })?;
    // Nobody throttles it there.
    let quota = kubectl.run(&[
        "exec",
        "own",
        "--",
        "sh",
        "-c",
        "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null || cut -d' ' -f1 /sys/fs/cgroup/cpu.max",
    ])?;
    ensure!(["-1", "max"].contains(&quota.trim()), "{quota}");

    // What is left is too little for as much again.
    kubectl.create(&pod("too-many", name, &guaranteed(left)))?;
    eventually("the second pod is refused", PATIENCE, || {
        let status = kubectl.json(&["get", "pod", "too-many"])?["status"].clone();
        expect_eq(
            (status["phase"].as_str(), status["reason"].as_str()),
            (Some("Failed"), Some("OutOfcpu")),
        )?;
        let events = kubectl.run(&["get", "events", "--field-selector", "reason=OutOfcpu"])?;
        ensure!(events.contains("pod/too-many"), "{events}");
        Ok(())
    })?;

    let killed = Command::new("kill")
        .args(["-9", &cluster.pid()?.to_string()])
        .status()?;
    ensure!(killed.success());
    cluster.up()?;
    // The node is Ready by what the API remembers; its server may still start.
    eventually("both are where they were", PATIENCE, || {
        expect_eq(&allowed(&kubectl, "own")?, &own)?;
        expect_eq(&allowed(&kubectl, "shared")?, &rest)
    })?;
    // One that comes now finds the pool as it is.
    kubectl.create(&pod("late", name, &json!({})))?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/late", "--timeout=90s"])?;
    expect_eq(&allowed(&kubectl, "late")?, &rest)?;

    kubectl.run(&["delete", "pod", "own", "--wait=true"])?;
    eventually("the CPU is everybody's again", PATIENCE, || {
        expect_eq(&allowed(&kubectl, "shared")?, &all)?;
        expect_eq(&allowed(&kubectl, "late")?, &all)
    })
}
