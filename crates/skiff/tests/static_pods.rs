//! Static pods, restart rules and the kubelet's configuration, with real containers: what a node does by its files,
//! over a `kill -9`.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Cluster, Kubectl, busybox_archive, eventually, expect_eq};
use std::process::Command;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

/// The mirror of the static pod, with the id of its container.
fn mirror(kubectl: &Kubectl) -> Result<(Value, String)> {
    let pods = kubectl.json(&["get", "pods", "-l", "from=manifest"])?;
    let pod = pods["items"][0].clone();
    let status = &pod["status"]["containerStatuses"][0];
    expect_eq(status["ready"].as_bool(), Some(true))?;
    let id = status["containerID"].as_str().context("no container")?.to_owned();
    Ok((pod, id))
}

fn restarts(kubectl: &Kubectl, name: &str) -> Result<Vec<(bool, i64)>> {
    let pod = kubectl.json(&["get", "pod", name])?;
    let statuses = pod["status"]["containerStatuses"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let one = |status: &Value| {
        let is_ready = status["ready"].as_bool().unwrap_or(false);
        (is_ready, status["restartCount"].as_i64().unwrap_or(-1))
    };
    Ok(statuses.iter().map(one).collect())
}

#[test]
fn a_node_follows_its_files() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let manifests = dir.path().join("manifests");
    std::fs::create_dir(&manifests)?;
    let config = dir.path().join("kubelet.yaml");
    // However full the disk of the machine is: that is another test's subject.
    let text = format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 33\n\
         kubeReserved: {{memory: 64Mi}}\nstaticPodPath: {}\nevictionHard: {{memory.available: 1Mi}}\n\
         imageGCHighThresholdPercent: 100\nimageGCLowThresholdPercent: 99\n",
        manifests.display()
    );
    std::fs::write(&config, &text)?;
    let config = config.display().to_string();
    let cluster = Cluster::start(SKIFF, &["--kubelet-config", &config])?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    let file = manifests.join("web.yaml");
    let manifest = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "labels": {"from": "manifest"}},
        "spec": {"terminationGracePeriodSeconds": 1,
            "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"]}]}});
    std::fs::write(&file, manifest.to_string())?;
    let mut found = None;
    eventually("the static pod is mirrored", PATIENCE, || {
        found = Some(mirror(&kubectl)?);
        Ok(())
    })?;
    let (pod, container) = found.context("no mirror")?;
    let node = kubectl.json(&["get", "nodes"])?["items"][0].clone();
    let node_name = node["metadata"]["name"].as_str().context("no node")?;
    expect_eq(
        pod["metadata"]["name"].as_str(),
        Some(format!("web-{node_name}").as_str()),
    )?;
    expect_eq(node["status"]["allocatable"]["pods"].as_str(), Some("33"))?;
    let page = kubectl.run(&[
        "get",
        "--raw",
        &format!("/api/v1/nodes/{node_name}/proxy/configz"),
    ])?;
    let shown: Value = serde_json::from_str(&page)?;
    expect_eq(shown["kubeletconfig"]["maxPods"].as_i64(), Some(33))?;

    // A container that ends with 42 has all of its pod start again, in the same sandbox.
    let script = "if [ -e /v/once ]; then exec sleep 3600; fi; touch /v/once; exit 42";
    let rules = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let mounts = json!([{"name": "v", "mountPath": "/v"}]);
    let all = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "all"}, "spec": {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "volumes": [{"name": "v", "emptyDir": {}}],
        "containers": [
            {"name": "main", "image": BUSYBOX, "command": ["sleep", "3600"]},
            {"name": "watch", "image": BUSYBOX, "command": ["sh", "-c", script], "volumeMounts": mounts,
                "restartPolicy": "Never", "restartPolicyRules": rules}]}});
    kubectl.create(&all.to_string())?;
    eventually("all containers restarted", PATIENCE, || {
        expect_eq(restarts(&kubectl, "all")?, vec![(true, 1), (true, 1)])
    })?;

    let killed = Command::new("kill")
        .args(["-9", &cluster.pid()?.to_string()])
        .status()?;
    ensure!(killed.success());
    cluster.up()?;
    let (same, again) = mirror(&kubectl)?;
    expect_eq(again.as_str(), container.as_str())?;
    expect_eq(&same["metadata"]["uid"], &pod["metadata"]["uid"])?;
    expect_eq(restarts(&kubectl, "all")?, vec![(true, 1), (true, 1)])?;

    std::fs::remove_file(&file)?;
    eventually("the static pod ends with its manifest", PATIENCE, || {
        let pods = kubectl.json(&["get", "pods", "-l", "from=manifest"])?;
        expect_eq(pods["items"].as_array().map(Vec::len), Some(0))
    })?;

    // What the file says wrong is said at once.
    std::fs::write(
        dir.path().join("kubelet.yaml"),
        text.replace("maxPods", "maxCats"),
    )?;
    cluster.skiff(&["down"])?;
    let refused = cluster.up();
    let error = refused.err().context("an unknown field is taken")?.to_string();
    ensure!(error.contains("unknown field \"maxCats\""), "{error}");
    Ok(())
}
