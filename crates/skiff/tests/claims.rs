//! A claim on a fresh cluster: it gets a volume of the default class, keeps its data over the life of a pod, and its
//! directory goes with it.

use anyhow::{Context, Result, ensure};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Cluster, Kubectl, busybox_archive, eventually, expect_eq};
use std::path::PathBuf;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

/// A pod that runs a script over the claim and ends. Not by root: the volume must be open to others.
fn run(kubectl: &Kubectl, name: &str, volume: &str, script: &str) -> Result<String> {
    kubectl.apply(&format!(
        r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{name}"}},"spec":{{"restartPolicy":"Never","terminationGracePeriodSeconds":0,
            "securityContext":{{"runAsUser":1000,"fsGroup":2000}},
            "containers":[{{"name":"c","image":"{BUSYBOX}","command":["sh","-c","{script}"],"volumeMounts":[{{"name":"data","mountPath":"/data"}}]}}],
            "volumes":[{{"name":"data",{volume}}}]}}}}"#
    ))?;
    let phase = "--for=jsonpath={.status.phase}=Succeeded";
    let waited = kubectl.run(&["wait", phase, &format!("pod/{name}"), "--timeout=90s"]);
    if waited.is_err() {
        let pod = kubectl.try_run(&["describe", "pod,pvc,pv"])?.1;
        waited.with_context(|| pod)?;
    }
    kubectl.run(&["logs", name])
}

/// The directory behind a claim.
fn directory(kubectl: &Kubectl, claim: &str) -> Result<PathBuf> {
    let claim = kubectl.json(&["get", "pvc", claim])?;
    let volume = claim["spec"]["volumeName"].as_str().context("volumeName")?;
    let volume = kubectl.json(&["get", "pv", volume])?;
    Ok(volume["spec"]["local"]["path"].as_str().context("path")?.into())
}

#[test]
fn a_claim_just_works() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(SKIFF, &[])?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    let class = kubectl.json(&["get", "storageclass", "local"])?;
    expect_eq(class["volumeBindingMode"].as_str(), Some("WaitForFirstConsumer"))?;

    kubectl.apply(
        r#"{"apiVersion":"v1","kind":"PersistentVolumeClaim","metadata":{"name":"data"},
            "spec":{"accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"10Mi"}}}}"#,
    )?;
    let mounted = r#""persistentVolumeClaim":{"claimName":"data"}"#;
    run(&kubectl, "writer", mounted, "echo kept > /data/file && id -G")?;
    let bound = kubectl.json(&["get", "pvc", "data"])?;
    expect_eq(bound["status"]["phase"].as_str(), Some("Bound"))?;
    expect_eq(bound["spec"]["storageClassName"].as_str(), Some("local"))?;
    let path = directory(&kubectl, "data")?;
    ensure!(
        path.starts_with(Cluster::data_dir(cluster.name())),
        "{}",
        path.display()
    );
    expect_eq(std::fs::read_to_string(path.join("file"))?.as_str(), "kept\n")?;

    // Another pod, later: the data is there.
    kubectl.run(&["delete", "pod", "writer"])?;
    let read = run(&kubectl, "reader", mounted, "cat /data/file")?;
    expect_eq(read.trim(), "kept")?;

    // In use, so it stays; then it goes, and what was in it.
    kubectl.run(&["delete", "pod", "reader"])?;
    kubectl.run(&["delete", "pvc", "data", "--timeout=60s"])?;
    eventually("the volume and its directory are gone", PATIENCE, || {
        ensure!(!path.exists(), "{} is there", path.display());
        expect_eq(kubectl.run(&["get", "pv", "-o", "name"])?.trim(), "")
    })?;

    // A pod's own claim lives as long as the pod.
    let ephemeral = r#""ephemeral":{"volumeClaimTemplate":{"spec":{"accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Mi"}}}}}"#;
    run(&kubectl, "scratch", ephemeral, "touch /data/x")?;
    let path = directory(&kubectl, "scratch-data")?;
    ensure!(path.join("x").exists());
    kubectl.run(&["delete", "pod", "scratch"])?;
    eventually("the ephemeral volume is gone", PATIENCE, || {
        ensure!(!path.exists(), "{} is there", path.display());
        expect_eq(kubectl.run(&["get", "pvc,pv", "-o", "name"])?.trim(), "")
    })?;

    // More than the disk has is refused with a reason.
    kubectl.apply(
        r#"{"apiVersion":"v1","kind":"PersistentVolumeClaim","metadata":{"name":"large","annotations":{"volume.kubernetes.io/selected-node":"NODE"}},
            "spec":{"accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Ei"}}}}"#
            .replace("NODE", &node(&kubectl)?)
            .as_str(),
    )?;
    eventually("the claim is refused", PATIENCE, || {
        let events = kubectl.run(&["get", "events", "--field-selector=reason=ProvisioningFailed"])?;
        ensure!(events.contains("are requested, but the disk of node"), "{events}");
        Ok(())
    })?;

    // A directory that was made for a claim that is gone goes too, unless somebody has put something there.
    let volumes = Cluster::data_dir(cluster.name()).join("volumes");
    let (stray, full) = (volumes.join("pvc-stray"), volumes.join("pvc-full"));
    std::fs::create_dir_all(&stray)?;
    std::fs::create_dir_all(full.join("x"))?;
    kubectl.run(&["delete", "pvc", "large"])?;
    eventually("the directory without a volume is gone", PATIENCE, || {
        ensure!(!stray.exists(), "{} is there", stray.display());
        Ok(())
    })?;
    ensure!(full.exists());

    // A class that was deleted stays deleted, also over a restart.
    kubectl.run(&["delete", "storageclass", "local"])?;
    cluster.skiff(&["down"])?;
    cluster.up()?;
    expect_eq(kubectl.run(&["get", "storageclass", "-o", "name"])?.trim(), "")
}

fn node(kubectl: &Kubectl) -> Result<String> {
    let nodes = kubectl.json(&["get", "nodes"])?;
    let name = nodes["items"][0]["metadata"]["name"].as_str();
    Ok(name.context("a node")?.to_owned())
}
