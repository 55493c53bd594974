//! `kubectl top` on a fresh cluster, with nothing installed; and what happens to our Metrics API when somebody installs
//! metrics-server, and removes it.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::{BUSYBOX, Cluster, Containerd, Kubectl, busybox_archive, eventually, expect_eq};
use std::time::{Duration, Instant};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
/// What a user is ready to wait for the first numbers.
const SOON: Duration = Duration::from_secs(30);
const PATIENCE: Duration = Duration::from_secs(90);
const API: &str = "/apis/metrics.k8s.io/v1beta1";

/// A pod that uses a fifth of a core.
fn start_pod(kubectl: &Kubectl) -> Result<()> {
    let container = json!({"name": "c", "image": BUSYBOX, "command": ["sh", "-c", "while true; do :; done"],
        "resources": {"limits": {"cpu": "200m"}}});
    kubectl.apply(
        &json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "labels": {"app": "web"}},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]}})
        .to_string(),
    )?;
    Ok(())
}

/// The words of the line that begins with this one.
fn row(table: &str, first: &str) -> Result<Vec<String>> {
    let line = table
        .lines()
        .find(|line| line.split_whitespace().next() == Some(first));
    let line = line.with_context(|| format!("no {first} in\n{table}"))?;
    Ok(line.split_whitespace().map(str::to_owned).collect())
}

fn shows_usage(kubectl: &Kubectl, node: &str, began: Instant) -> Result<()> {
    let nodes = eventually("kubectl top nodes", SOON, || {
        row(&kubectl.run(&["top", "nodes"])?, node)
    })?;
    ensure!(
        began.elapsed() < SOON,
        "the first numbers took {:?}",
        began.elapsed()
    );
    // NAME CPU(cores) CPU(%) MEMORY(bytes) MEMORY(%)
    ensure!(nodes[1].ends_with('m') && nodes[3].ends_with("Mi"), "{nodes:?}");
    ensure!(nodes[3] != "0Mi", "{nodes:?}");
    let pods = eventually("kubectl top pods", PATIENCE, || {
        row(&kubectl.run(&["top", "pods"])?, "web")
    })?;
    ensure!(pods[1].ends_with('m') && pods[2].ends_with("Mi"), "{pods:?}");
    // Of what the first window shows, a part may be the start; the limit holds in the next one.
    eventually("the pod uses what it may", PATIENCE, || {
        let pods = row(&kubectl.run(&["top", "pods"])?, "web")?;
        let cores: u32 = pods[1].trim_end_matches('m').parse()?;
        ensure!((50..=260).contains(&cores), "{pods:?}");
        Ok(())
    })?;
    let containers = kubectl.run(&["top", "pods", "--containers"])?;
    expect_eq(row(&containers, "web")?[1].as_str(), "c")
}

fn node_name(kubectl: &Kubectl) -> Result<String> {
    let nodes = kubectl.json(&["get", "nodes"])?;
    let name = nodes["items"][0]["metadata"]["name"].as_str();
    Ok(name.context("a node")?.to_owned())
}

#[test]
fn top_works_with_no_add_on() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(SKIFF, &[])?;
    let began = Instant::now();
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    start_pod(&kubectl)?;
    let node = node_name(&kubectl)?;
    shows_usage(&kubectl, &node, began)?;

    // The API itself.
    let list = kubectl.run(&[
        "get",
        "--raw",
        &format!("{API}/namespaces/default/pods?labelSelector=app%3Dweb"),
    ])?;
    let list: Value = serde_json::from_str(&list)?;
    let pod = &list["items"][0];
    expect_eq(list["kind"].as_str(), Some("PodMetricsList"))?;
    expect_eq(pod["metadata"]["labels"]["app"].as_str(), Some("web"))?;
    ensure!(
        pod["containers"][0]["usage"]["memory"]
            .as_str()
            .is_some_and(|m| m.ends_with("i")),
        "{pod}"
    );
    let none = kubectl.run(&["get", "--raw", &format!("{API}/pods?labelSelector=app%3Dother")])?;
    expect_eq(serde_json::from_str::<Value>(&none)?["items"].clone(), json!([]))?;
    let table = kubectl.run(&["get", "nodes.metrics.k8s.io"])?;
    expect_eq(
        row(&table, "NAME")?,
        ["NAME", "CPU", "MEMORY", "WINDOW"].map(str::to_owned).to_vec(),
    )?;
    expect_eq(row(&table, &node)?.len(), 4)?;
    let (_, told) = kubectl.try_run(&["get", "pods.metrics.k8s.io", "nobody"])?;
    expect_eq(
        told.trim(),
        "Error from server (NotFound): pods \"nobody\" not found",
    )?;
    let explained = kubectl.run(&[
        "explain",
        "podmetrics.containers.usage",
        "--api-version=metrics.k8s.io/v1beta1",
    ])?;
    ensure!(explained.contains("PodMetrics"), "{explained}");

    // The kubelet's own pages, as a collector reads them.
    let page = |path: &str| kubectl.run(&["get", "--raw", &format!("/api/v1/nodes/{node}/proxy/{path}")]);
    for (path, line) in [
        ("metrics", "kubelet_running_pods 1".to_owned()),
        (
            "metrics",
            "kubelet_running_containers{container_state=\"running\"} 1".to_owned(),
        ),
        ("metrics", format!("kubelet_node_name{{node=\"{node}\"}} 1")),
        (
            "metrics",
            "kubelet_runtime_operations_total{operation_type=\"start_container\"} 1".to_owned(),
        ),
        (
            "metrics/cadvisor",
            "container_cpu_usage_seconds_total{container=\"c\",".to_owned(),
        ),
        (
            "metrics/cadvisor",
            "container_network_receive_bytes_total{container=\"\",".to_owned(),
        ),
    ] {
        let text = page(path)?;
        ensure!(
            text.lines().any(|found| found.starts_with(&line)),
            "{path} lacks {line}:\n{text}"
        );
    }

    // Who may read it, and how it shows in the list of APIs.
    let (code, told) = kubectl.try_run(&["--as=stranger", "get", "nodes.metrics.k8s.io"])?;
    ensure!(
        code != 0 && told.contains("nodes.metrics.k8s.io is forbidden"),
        "{told}"
    );
    let role = "--clusterrole=system:aggregated-metrics-reader";
    kubectl.run(&["create", "clusterrolebinding", "readers", role, "--user=stranger"])?;
    eventually("whoever has the role reads", PATIENCE, || {
        kubectl
            .run(&["--as=stranger", "get", "nodes.metrics.k8s.io"])
            .map(|_| ())
    })?;
    let service = kubectl.run(&["get", "apiservice", "v1beta1.metrics.k8s.io", "--no-headers"])?;
    expect_eq(
        service.split_whitespace().take(3).collect(),
        vec!["v1beta1.metrics.k8s.io", "Local", "True"],
    )?;

    // metrics-server's own manifest takes the API over.
    kubectl.apply(
        &json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": {"name": "v1beta1.metrics.k8s.io"}, "spec": {
                "service": {"name": "metrics-server", "namespace": "kube-system"}, "group": "metrics.k8s.io",
                "version": "v1beta1", "insecureSkipTLSVerify": true, "groupPriorityMinimum": 100,
                "versionPriority": 100}})
        .to_string(),
    )?;
    eventually("theirs is asked", PATIENCE, || {
        let found = kubectl.json(&["get", "apiservice", "v1beta1.metrics.k8s.io"])?;
        let reason = found["status"]["conditions"][0]["reason"].as_str();
        expect_eq(reason, Some("ServiceNotFound"))?;
        let (code, told) = kubectl.try_run(&["get", "--raw", &format!("{API}/nodes")])?;
        ensure!(code != 0, "answered by ours: {told}");
        Ok(())
    })?;
    kubectl.run(&["delete", "apiservice", "v1beta1.metrics.k8s.io"])?;
    eventually("ours comes back", PATIENCE, || {
        row(&kubectl.run(&["top", "nodes"])?, &node)
    })?;

    // And over a restart.
    cluster.skiff(&["down"])?;
    cluster.up()?;
    eventually("numbers after a restart", SOON, || {
        row(&kubectl.run(&["top", "nodes"])?, &node)
    })?;
    Ok(())
}

#[test]
fn top_works_on_containerd() -> Result<()> {
    let containerd = Containerd::with_images(SKIFF)?;
    let flags = ["--container-runtime-endpoint", &containerd.endpoint()];
    let cluster = Cluster::start(SKIFF, &flags)?;
    let began = Instant::now();
    let kubectl = cluster.kubectl();
    start_pod(&kubectl)?;
    let node = node_name(&kubectl)?;
    shows_usage(&kubectl, &node, began)
}
