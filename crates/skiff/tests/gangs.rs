//! Gang scheduling with real containers, as docs/operations.md shows it: the flag reaches API server, scheduler and controllers.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Cluster, busybox_archive, eventually, expect_eq};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

/// A pod of the group that ends at once.
fn member() -> Value {
    json!({"schedulingGroup": {"podGroupName": "training"}, "restartPolicy": "Never",
        "containers": [{"name": "worker", "image": BUSYBOX, "command": ["true"]}]})
}

#[test]
fn a_gang_runs_when_all_of_it_is_there() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let flags = ["--runtime-config", "scheduling.k8s.io/v1alpha2=true"];
    let cluster = Cluster::start(SKIFF, &flags)?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    eventually("the service account", PATIENCE, || {
        kubectl.run(&["get", "serviceaccount", "default"])
    })?;
    let group = json!({"apiVersion": "scheduling.k8s.io/v1alpha2", "kind": "PodGroup",
        "metadata": {"name": "training"}, "spec": {"schedulingPolicy": {"gang": {"minCount": 3}}}});
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "training"},
        "spec": {"parallelism": 2, "completions": 2, "template": {"spec": member()}}});
    kubectl.apply(&group.to_string())?;
    kubectl.apply(&job.to_string())?;
    let nodes = || {
        kubectl.run(&[
            "get",
            "pods",
            "-l",
            "job-name=training",
            "-o",
            "jsonpath={range .items[*]}[{.spec.nodeName}]{end}",
        ])
    };
    eventually("the pods of the job", PATIENCE, || {
        expect_eq(nodes()?.trim(), "[][]")
    })?;
    let other = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": BUSYBOX, "command": ["true"]}]}});
    kubectl.create(&other.to_string())?;
    kubectl.run(&[
        "wait",
        "--for=jsonpath={.status.phase}=Succeeded",
        "pod/other",
        "--timeout=90s",
    ])?;
    expect_eq(nodes()?.trim(), "[][]")?;
    let third = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "third"}, "spec": member()});
    kubectl.create(&third.to_string())?;
    kubectl.run(&[
        "wait",
        "--for=condition=Complete",
        "job/training",
        "--timeout=90s",
    ])?;
    let shown = kubectl.run(&["get", "podgroup", "training", "--no-headers"])?;
    let cells: Vec<&str> = shown.split_whitespace().take(4).collect();
    ensure!(cells == ["training", "Gang", "<none>", "Scheduled"], "{shown}");
    // Its pods have ended, so nothing keeps it.
    kubectl.run(&[
        "wait",
        "--for=jsonpath={.status.phase}=Succeeded",
        "pod/third",
        "--timeout=90s",
    ])?;
    kubectl.run(&["delete", "podgroup", "training", "--timeout=60s"])?;
    Ok(())
}
