//! A machine that shuts down, with real containers and a real bus: pods end by priority, none of them takes longer than
//! its group has, and what was written of it is there after the next start.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Cluster, Kubectl, Logind, busybox_archive, eventually, expect_eq};
use std::path::Path;
use std::time::Duration;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

fn pod(name: &str, script: &str, class: &str, out: &Path) -> String {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "terminationGracePeriodSeconds": 3600, "priorityClassName": class,
        "volumes": [{"name": "out", "hostPath": {"path": out}}],
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "out", "mountPath": "/out"}]}]}})
    .to_string()
}

fn ready(kubectl: &Kubectl) -> Result<(String, String, String)> {
    let node = kubectl.json(&["get", "nodes"])?["items"][0].clone();
    let conditions = node["status"]["conditions"].as_array().context("no conditions")?;
    let ready = conditions
        .iter()
        .find(|one| one["type"] == "Ready")
        .context("no Ready")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok((
        text(&ready["status"]),
        text(&ready["reason"]),
        text(&ready["message"]),
    ))
}

#[test]
fn pods_end_before_the_machine() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let logind = Logind::start(Duration::from_secs(600))?;
    let config = dir.path().join("kubelet.yaml");
    std::fs::write(
        &config,
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
         shutdownGracePeriodByPodPriority:\n- {priority: 1000, shutdownGracePeriodSeconds: 120}\n\
         - {priority: 0, shutdownGracePeriodSeconds: 5}\n",
    )?;
    let flags = ["--kubelet-config", &config.display().to_string()];
    let bus = [("DBUS_SYSTEM_BUS_ADDRESS", &*logind.address())];
    let cluster = Cluster::start_in(SKIFF, Cluster::new_name(), &flags, &bus)?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    let locked = |count: usize| expect_eq(logind.locks().len(), count);
    eventually("skiff has a lock", PATIENCE, || locked(1))?;

    let out = dir.path().join("out");
    std::fs::create_dir(&out)?;
    let polite =
        |name: &str| format!("trap 'echo {name} >> /out/order; exit 3' TERM; sleep 3600 & wait; wait");
    kubectl.apply(&pod("low", &polite("low"), "", &out))?;
    kubectl.apply(&pod("high", &polite("high"), "system-node-critical", &out))?;
    kubectl.apply(&pod(
        "deaf",
        "trap '' TERM; while true; do sleep 1; done",
        "",
        &out,
    ))?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod", "--all", "--timeout=90s"])?;

    logind.shut_down(true)?;
    // Containers of the pods are no holders of the lock: it goes when skiff lets go of it.
    eventually("the lock is given back", PATIENCE, || locked(0))?;
    for (name, code) in [("low", 3), ("high", 3), ("deaf", 137)] {
        // What takes all of its group's time is killed when that is over: its status may come last.
        eventually("the pod has ended", PATIENCE, || {
            let status = kubectl.json(&["get", "pod", name])?["status"].clone();
            expect_eq(
                (status["phase"].as_str(), status["reason"].as_str()),
                (Some("Failed"), Some("Terminated")),
            )?;
            let ended = &status["containerStatuses"][0]["state"]["terminated"];
            expect_eq(ended["exitCode"].as_i64(), Some(code))
        })?;
    }
    expect_eq(
        std::fs::read_to_string(out.join("order"))?.as_str(),
        "low\nhigh\n",
    )?;
    eventually("the node is not ready", PATIENCE, || {
        let (status, reason, message) = ready(&kubectl)?;
        expect_eq(
            (status.as_str(), reason.as_str(), message.as_str()),
            ("False", "KubeletNotReady", "node is shutting down"),
        )
    })?;

    // The next boot: the node is ready, holds up the next shutdown, and knows of the last one.
    cluster.skiff(&["down"])?;
    logind.shut_down(false)?;
    cluster.up()?;
    eventually("skiff has a lock", PATIENCE, || locked(1))?;
    eventually("the node is ready", PATIENCE, || {
        expect_eq(ready(&kubectl)?.0.as_str(), "True")
    })?;
    kubectl.apply(&pod("next", &polite("next"), "", &out))?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/next", "--timeout=90s"])?;
    let node = kubectl.json(&["get", "nodes"])?["items"][0]["metadata"]["name"].clone();
    let path = format!(
        "/api/v1/nodes/{}/proxy/metrics",
        node.as_str().context("no name")?
    );
    let metrics = kubectl.run(&["get", "--raw", &path])?;
    for name in ["start", "end"] {
        let family = format!("kubelet_graceful_shutdown_{name}_time_seconds ");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&family));
        let time: f64 = line.context(family)?.parse()?;
        ensure!(time > 1e9, "{name}: {time}");
    }
    Ok(())
}
