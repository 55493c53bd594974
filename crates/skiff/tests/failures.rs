//! Failures look as users know them.

use anyhow::{Context, Result, ensure};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Cluster, Kubectl, Registry, busybox_archive, eventually, expect_eq};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

fn pod(name: &str, image: &str, command: &str, more: &str) -> String {
    format!(
        r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{name}"}},"spec":{{"terminationGracePeriodSeconds":0,
            "containers":[{{"name":"c","image":"{image}","command":["sh","-c","{command}"]{more}}}]}}}}"#
    )
}

fn waits_for(kubectl: &Kubectl, pod: &str, reasons: &[&str]) -> Result<()> {
    eventually(&format!("{pod} waits for one of {reasons:?}"), PATIENCE, || {
        let object = kubectl.json(&["get", "pod", pod])?;
        let reason = object["status"]["containerStatuses"][0]["state"]["waiting"]["reason"]
            .as_str()
            .unwrap_or("none")
            .to_owned();
        ensure!(
            reasons.contains(&reason.as_str()),
            "{reason}: {}",
            object["status"]
        );
        Ok(())
    })
}

fn has_event(kubectl: &Kubectl, object: &str, reason: &str, message: &str) -> Result<()> {
    eventually(&format!("{object} has the event {reason}"), PATIENCE, || {
        let events = kubectl.json(&[
            "get",
            "events",
            "--field-selector",
            &format!("involvedObject.name={object},reason={reason}"),
        ])?;
        let found = events["items"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|e| e["message"].as_str().is_some_and(|m| m.contains(message)));
        ensure!(found, "{events:#}");
        Ok(())
    })
}

#[test]
fn pods_fail_as_users_know_it() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(SKIFF, &[])?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();

    kubectl.apply(&pod("crashing", BUSYBOX, "exit 3", ""))?;
    kubectl.apply(&pod("missing", "127.0.0.1:1/nope:1", "true", ""))?;
    kubectl.apply(&pod(
        "greedy",
        BUSYBOX,
        "sleep 1000",
        r#","resources":{"requests":{"cpu":"1000"}}"#,
    ))?;
    kubectl.apply(&pod(
        "unready",
        BUSYBOX,
        "sleep 1000",
        r#","readinessProbe":{"exec":{"command":["false"]},"periodSeconds":1}"#,
    ))?;

    waits_for(&kubectl, "crashing", &["CrashLoopBackOff"])?;
    has_event(
        &kubectl,
        "crashing",
        "BackOff",
        "Back-off restarting failed container c in pod crashing",
    )?;
    let crashed = kubectl.json(&["get", "pod", "crashing"])?;
    let last = &crashed["status"]["containerStatuses"][0];
    expect_eq(
        last["lastState"]["terminated"]["exitCode"]
            .as_i64()
            .or(last["state"]["terminated"]["exitCode"].as_i64()),
        Some(3),
    )?;

    waits_for(&kubectl, "missing", &["ImagePullBackOff"])?;
    has_event(&kubectl, "missing", "Failed", "ErrImagePull")?;
    has_event(
        &kubectl,
        "missing",
        "BackOff",
        "Back-off pulling image \"127.0.0.1:1/nope:1\"",
    )?;

    has_event(
        &kubectl,
        "greedy",
        "FailedScheduling",
        "0/1 nodes are available: 1 Insufficient cpu.",
    )?;
    expect_eq(
        kubectl.json(&["get", "pod", "greedy"])?["status"]["phase"].as_str(),
        Some("Pending"),
    )?;

    has_event(&kubectl, "unready", "Unhealthy", "Readiness probe failed")?;
    let unready = kubectl.json(&["get", "pod", "unready"])?;
    expect_eq(unready["status"]["phase"].as_str(), Some("Running"))?;
    expect_eq(
        unready["status"]["containerStatuses"][0]["ready"].as_bool(),
        Some(false),
    )?;
    for reason in ["Scheduled", "Pulled", "Created", "Started"] {
        has_event(&kubectl, "unready", reason, "")?;
    }
    kubectl
        .run(&[
            "delete",
            "pod",
            "crashing",
            "missing",
            "greedy",
            "unready",
            "--timeout=60s",
        ])
        .map(|_| ())
}

#[test]
fn images_are_pulled_from_a_registry() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let registry = Registry::start()?;
    let image = registry.push(&busybox_archive(dir.path())?, "test/busybox:1")?;
    let cluster = Cluster::start(SKIFF, &[])?;
    let kubectl = cluster.kubectl();
    kubectl.apply(&pod("pulled", &image, "sleep 1000", ""))?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/pulled", "--timeout=90s"])?;
    has_event(
        &kubectl,
        "pulled",
        "Pulling",
        &format!("Pulling image \"{image}\""),
    )?;
    has_event(&kubectl, "pulled", "Pulled", "Successfully pulled image")?;
    let listed = cluster.skiff(&["image", "list"])?;
    ensure!(listed.contains("test/busybox"), "{listed}");
    Ok(())
}

#[test]
fn broken_archives_change_nothing() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(SKIFF, &[])?;
    let before = cluster.skiff(&["image", "list"])?;
    let good = std::fs::read(busybox_archive(dir.path())?)?;
    let mut flipped = good.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0xff;
    for (name, bytes) in [
        ("empty.tar", vec![]),
        ("noise.tar", vec![7; 5000]),
        ("cut.tar", good[..good.len() / 3].to_vec()),
        ("flipped.tar", flipped),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes)?;
        let error = cluster
            .import(&path)
            .err()
            .with_context(|| format!("{name} was imported"))?;
        ensure!(format!("{error:#}").contains("error: "), "{error:#}");
    }
    expect_eq(cluster.skiff(&["image", "list"])?, before)
}
