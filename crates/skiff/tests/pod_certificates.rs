//! Pod certificates with a real container, as docs/certificates.md shows them: a signer answers the node's request, and the container
//! reads key and certificate.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Cluster, PodSigner, busybox_archive, eventually};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

#[test]
fn a_container_reads_its_certificate() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let flags = [
        "--runtime-config",
        "certificates.k8s.io/v1beta1/podcertificaterequests=true",
    ];
    let cluster = Cluster::start(SKIFF, &flags)?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    let sources = json!([{"podCertificate": {"signerName": "example.com/pods", "keyType": "ED25519",
        "credentialBundlePath": "bundle.pem", "certificateChainPath": "chain.pem"}}]);
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "server"}, "spec": {
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"],
            "volumeMounts": [{"name": "tls", "mountPath": "/tls"}]}],
        "volumes": [{"name": "tls", "projected": {"sources": sources}}]}});
    eventually("the service account", PATIENCE, || {
        kubectl.run(&["get", "serviceaccount", "default"])
    })?;
    kubectl.create(&pod.to_string())?;
    let request = eventually("the node asks for a certificate", PATIENCE, || {
        let all: Value =
            serde_json::from_str(&kubectl.run(&["get", "podcertificaterequests", "-o", "json"])?)?;
        all["items"].get(0).cloned().context("no request")
    })?;
    let status = PodSigner::new()?.issued(&request, Duration::from_secs(1800))?;
    let name = request["metadata"]["name"].as_str().context("no name")?;
    let patch = json!({ "status": status }).to_string();
    let arguments = ["--subresource=status", "--type=merge", "-p", &patch];
    kubectl.run(&[&["patch", "podcertificaterequest", name][..], &arguments].concat())?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/server", "--timeout=90s"])?;
    let read = |file: &str| kubectl.run(&["exec", "server", "--", "cat", &format!("/tls/{file}")]);
    let (bundle, chain) = (read("bundle.pem")?, read("chain.pem")?);
    ensure!(bundle.starts_with("-----BEGIN PRIVATE KEY-----"), "{bundle}");
    ensure!(bundle.trim().ends_with(chain.trim()), "{bundle}\n{chain}");
    // Keys are not on the disk.
    let mounts = kubectl.run(&["exec", "server", "--", "grep", " /tls ", "/proc/mounts"])?;
    ensure!(mounts.starts_with("tmpfs "), "{mounts}");
    let table = kubectl.run(&["get", "podcertificaterequests"])?;
    ensure!(table.contains("Issued"), "{table}");
    Ok(())
}
