//! `kill -9` of skiff under write load: no acknowledged write is lost, and no container is restarted.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use skiff_testkit::whole_path::{self, PATIENCE};
use skiff_testkit::{Cluster, Containerd, Etcd, Kubectl, eventually, expect_eq};
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const WRITERS: usize = 3;

/// Container ids and restart counts by pod.
fn containers(kubectl: &Kubectl) -> Result<BTreeMap<String, (String, i64)>> {
    let pods = whole_path::pods(kubectl, "app=web")?;
    let one = |pod: &Value| {
        let status = &pod["status"]["containerStatuses"][0];
        let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        (
            name,
            (
                status["containerID"].as_str().unwrap_or_default().to_owned(),
                status["restartCount"].as_i64().unwrap_or(-1),
            ),
        )
    };
    Ok(pods.iter().map(one).collect())
}

#[test]
fn kill_9_loses_nothing() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &[])?;
    whole_path::apply_the_example(&cluster.kubectl())?;
    let before = shims(&cluster)?;
    ensure!(before.len() == 3, "{before:?}");
    survives_kill_9(&cluster)?;
    expect_eq(shims(&cluster)?, before)?;
    clean_up(&cluster)?;
    eventually("the shims end with their pods", PATIENCE, || {
        expect_eq(shims(&cluster)?, vec![])
    })
}

#[test]
fn kill_9_loses_nothing_on_etcd() -> Result<()> {
    let etcd = Etcd::start()?;
    let cluster = Cluster::start(SKIFF, &["--etcd-servers", etcd.endpoint()])?;
    whole_path::apply_the_example(&cluster.kubectl())?;
    survives_kill_9(&cluster)?;
    clean_up(&cluster)
}

#[test]
fn kill_9_loses_nothing_on_containerd() -> Result<()> {
    let containerd = Containerd::with_images(SKIFF)?;
    let cluster = Cluster::start(SKIFF, &["--container-runtime-endpoint", &containerd.endpoint()])?;
    whole_path::apply_the_example(&cluster.kubectl())?;
    survives_kill_9(&cluster)?;
    clean_up(&cluster)?;
    drop(cluster);
    expect_eq(containerd.ctr(&["containers", "list", "--quiet"])?.as_str(), "")
}

/// The processes that keep pods.
fn shims(cluster: &Cluster) -> Result<Vec<u64>> {
    let status = cluster.status()?;
    let processes = status["processes"].as_array().into_iter().flatten();
    Ok(processes
        .filter(|p| p["role"] == "shim")
        .filter_map(|p| p["pid"].as_u64())
        .collect())
}

/// What was running keeps its logs and can still be ended.
fn clean_up(cluster: &Cluster) -> Result<()> {
    let kubectl = cluster.kubectl();
    let running = containers(&kubectl)?;
    let pod = running.keys().next().context("a pod")?;
    ensure!(kubectl.run(&["logs", pod])?.contains("listens on port"));
    kubectl
        .run(&["delete", "-f", whole_path::EXAMPLE, "--timeout=60s"])
        .map(|_| ())
}

/// Kills skiff while writers are at work, starts it again and compares.
fn survives_kill_9(cluster: &Cluster) -> Result<()> {
    let kubectl = cluster.kubectl();
    let before = containers(&kubectl)?;
    let stop = Arc::new(AtomicBool::new(false));
    let acknowledged = Arc::new(Mutex::new(Vec::<String>::new()));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let (kubectl, stop, acknowledged) = (kubectl.clone(), stop.clone(), acknowledged.clone());
            std::thread::spawn(move || {
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let name = format!("w{writer}-{number}");
                    if kubectl
                        .run(&["create", "configmap", &name, "--from-literal=k=v"])
                        .is_ok()
                    {
                        acknowledged.lock().expect("no writer panics").push(name);
                    }
                }
            })
        })
        .collect();
    eventually("some writes are acknowledged", PATIENCE, || {
        ensure!(acknowledged.lock().expect("no writer panics").len() > 10);
        Ok(())
    })?;
    let pid = cluster.pid()?;
    let killed = Command::new("kill").args(["-9", &pid.to_string()]).status()?;
    ensure!(killed.success());
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.join().map_err(|_| anyhow::anyhow!("a writer panicked"))?;
    }
    cluster.up()?;

    let list = kubectl.json(&["get", "configmaps"])?;
    let found: Vec<&str> = list["items"]
        .as_array()
        .context("items")?
        .iter()
        .filter_map(|c| c["metadata"]["name"].as_str())
        .collect();
    for name in acknowledged.lock().expect("no writer panics").iter() {
        ensure!(
            found.contains(&name.as_str()),
            "{name} was acknowledged and is gone"
        );
    }
    kubectl.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    expect_eq(containers(&kubectl)?, before)
}
