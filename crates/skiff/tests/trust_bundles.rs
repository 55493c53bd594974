//! ClusterTrustBundles with a real container, as docs/certificates.md shows them: it reads the API server's authority as it is
//! published, and sees a bundle change.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Cluster, busybox_archive, eventually, expect_eq};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

/// The certificate of an authority that nobody knows yet.
fn authority() -> Result<String> {
    let dir = tempfile::tempdir()?;
    Ok(skiff_pki::Pki::open(dir.path())?.ca_certificate().to_owned())
}

fn bundle(pem: &str) -> String {
    json!({"apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle",
        "metadata": {"name": "example.com:roots:2026", "labels": {"tier": "live"}},
        "spec": {"signerName": "example.com/roots", "trustBundle": pem}})
    .to_string()
}

#[test]
fn a_container_reads_trust_bundles() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let flags = [
        "--runtime-config",
        "certificates.k8s.io/v1beta1/clustertrustbundles=true",
    ];
    let cluster = Cluster::start(SKIFF, &flags)?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    let (first, second) = (authority()?, authority()?);
    kubectl.apply(&bundle(&first))?;
    let live = json!({"matchLabels": {"tier": "live"}});
    let sources = json!([
        {"clusterTrustBundle": {"signerName": "example.com/roots", "labelSelector": live, "path": "roots.pem"}},
        {"clusterTrustBundle": {"signerName": "kubernetes.io/kube-apiserver-serving", "labelSelector": {}, "path": "server.pem"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}]);
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "reader"}, "spec": {
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"],
            "volumeMounts": [{"name": "roots", "mountPath": "/roots"}]}],
        "volumes": [{"name": "roots", "projected": {"sources": sources}}]}});
    eventually("the service account", PATIENCE, || {
        kubectl.run(&["get", "serviceaccount", "default"])
    })?;
    kubectl.create(&pod.to_string())?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/reader", "--timeout=90s"])?;
    let read = |file: &str| kubectl.run(&["exec", "reader", "--", "cat", &format!("/roots/{file}")]);
    expect_eq(read("roots.pem")?.trim(), first.trim())?;
    expect_eq(read("server.pem")?.trim(), read("ca.crt")?.trim())?;
    kubectl.apply(&bundle(&second))?;
    eventually("the container sees the new authority", PATIENCE, || {
        expect_eq(read("roots.pem")?.trim(), second.trim())
    })?;

    let names = kubectl.run(&["get", "clustertrustbundles", "-o", "name"])?;
    let published = names
        .lines()
        .find(|name| name.contains("kubernetes.io:kube-apiserver-serving:"))
        .context("the API server's authority is not published")?;
    ensure!(
        published.len() > "kubernetes.io:kube-apiserver-serving:".len() + 24,
        "{published}"
    );
    Ok(())
}
