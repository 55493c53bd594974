//! `skiff sim` as a user starts it: nodes without machines, pods that live as the file says, a simulation that is killed
//! and started again, and nothing left after `skiff sim remove`.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::{Cluster, Kubectl, eventually, expect_eq};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const PATIENCE: Duration = Duration::from_secs(120);
const PROFILE: &str = r#"
nodes:
- count: 18
  zones: [a, b, c]
- count: 2
  prefix: gpu-
  capacity: {cpu: "64", memory: 512Gi, pods: "250", example.com/gpu: "8"}
  taints: [{key: gpu, effect: NoSchedule}]
pods:
- labels: {app: batch}
  succeedAfter: 100ms
- namespace: flaky
  failAfter: 100ms
  exitCode: 137
"#;

/// The running simulation; its end is the test's.
struct Simulation(Child);

impl Simulation {
    fn start(cluster: &Cluster, file: &Path) -> Result<Simulation> {
        let child = Command::new(SKIFF)
            .args(["sim", "nodes", "--name", cluster.name(), "-f"])
            .arg(file)
            .stdout(Stdio::null())
            .spawn()?;
        Ok(Simulation(child))
    }

    fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

fn count(kubectl: &Kubectl, args: &[&str], is: impl Fn(&Value) -> bool) -> Result<usize> {
    let list = kubectl.json(args)?;
    let items = list["items"].as_array().context("items")?;
    Ok(items.iter().filter(|item| is(item)).count())
}

fn deployment(replicas: u32) -> String {
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {
        "replicas": replicas, "selector": {"matchLabels": {"app": "web"}}, "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "c", "image": "example.com/web:v1"}]}}}})
    .to_string()
}

fn ready_replicas(kubectl: &Kubectl, wanted: u64) -> Result<()> {
    eventually("the pods are ready", PATIENCE, || {
        let found = kubectl.json(&["get", "deployment", "web"])?;
        expect_eq(found["status"]["readyReplicas"].as_u64(), Some(wanted))
    })
}

#[test]
fn a_simulation_runs_pods_is_restarted_and_leaves_nothing() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("profile.yaml");
    std::fs::write(&file, PROFILE)?;
    let cluster = Cluster::start(SKIFF, &["--components", "api,controllers,scheduler"])?;
    let kubectl = cluster.kubectl();
    let mut simulation = Simulation::start(&cluster, &file)?;
    eventually("20 nodes are Ready", PATIENCE, || {
        let ready = count(&kubectl, &["get", "nodes"], |node| {
            let conditions = node["status"]["conditions"].as_array();
            conditions
                .into_iter()
                .flatten()
                .any(|one| one["type"] == "Ready" && one["status"] == "True")
        })?;
        expect_eq(ready, 20)
    })?;

    kubectl.apply(&deployment(60))?;
    ready_replicas(&kubectl, 60)?;
    let on_gpu = count(&kubectl, &["get", "pods"], |pod| {
        pod["spec"]["nodeName"]
            .as_str()
            .is_some_and(|name| name.starts_with("gpu-"))
    })?;
    expect_eq(on_gpu, 0)?;

    // Pods end as the file says: one kind completes, another fails with its exit code.
    kubectl.apply(
        &json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "batch"}, "spec": {
            "completions": 10, "parallelism": 5, "template": {
                "metadata": {"labels": {"app": "batch"}},
                "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "example.com/batch:v1"}]}}}})
        .to_string(),
    )?;
    eventually("the Job is complete", PATIENCE, || {
        let job = kubectl.json(&["get", "job", "batch"])?;
        expect_eq(job["status"]["succeeded"].as_u64(), Some(10))
    })?;
    kubectl.run(&["create", "namespace", "flaky"])?;
    kubectl.run(&[
        "-n",
        "flaky",
        "run",
        "one",
        "--image=example.com/flaky:v1",
        "--restart=Never",
    ])?;
    eventually("the pod has failed", PATIENCE, || {
        let pod = kubectl.json(&["-n", "flaky", "get", "pod", "one"])?;
        expect_eq(pod["status"]["phase"].as_str(), Some("Failed"))?;
        let terminated = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
        expect_eq(terminated["exitCode"].as_u64(), Some(137))
    })?;

    // A simulation that was killed goes on where it was.
    simulation.kill()?;
    kubectl.apply(&deployment(80))?;
    let simulation = Simulation::start(&cluster, &file)?;
    ready_replicas(&kubectl, 80)?;
    kubectl.apply(&deployment(0))?;
    eventually("the pods are gone", PATIENCE, || {
        let left = count(&kubectl, &["get", "pods", "-l", "app=web"], |_| true)?;
        expect_eq(left, 0)
    })?;
    drop(simulation);

    let told = cluster.skiff(&["sim", "remove"])?;
    ensure!(told.contains("removed 20 simulated nodes"), "{told}");
    let nodes = count(&kubectl, &["get", "nodes"], |_| true)?;
    expect_eq(nodes, 0)?;
    let leases = count(&kubectl, &["-n", "kube-node-lease", "get", "leases"], |_| true)?;
    expect_eq(leases, 0)
}
