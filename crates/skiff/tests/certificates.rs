//! Certificates of a real cluster: a wrong clock at the first start is healed, and renewal reaches a running server
//! without dropping a connection.

use anyhow::{Context, Result, ensure};
use skiff_pki::Pki;
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{Cluster, eventually, expect_eq};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

/// Ends the process with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn certificates_are_healed_and_renewed() -> Result<()> {
    let name = Cluster::new_name();
    let folder = Cluster::data_dir(&name).join("pki");
    // A machine without a clock: its first start was in 1970.
    let long_ago = Arc::new(|| SystemTime::UNIX_EPOCH + Duration::from_secs(1000));
    Pki::open_at(&folder, long_ago.clone())?.client("admin", "kubernetes-admin", Some("system:masters"))?;
    Pki::open_at(&folder, long_ago)?.front_proxy()?;
    let first_ca = fs::read_to_string(folder.join("ca.crt"))?;
    let cluster = Cluster::start_named(SKIFF, name, &["--components", "api,controllers"])?;
    let kubectl = cluster.kubectl();
    kubectl.run(&["get", "namespaces"])?;
    let shown: Vec<serde_json::Value> = serde_json::from_str(&cluster.skiff(&["certs", "-o", "json"])?)?;
    expect_eq(shown.len(), 7)?;
    for certificate in &shown {
        expect_eq(certificate["state"].as_str(), Some("valid"))?;
    }
    let table = cluster.skiff(&["certs"])?;
    ensure!(
        table.contains("front-proxy-ca") && table.contains("RENEWED FROM"),
        "{table}"
    );
    let healed_ca = fs::read_to_string(folder.join("ca.crt"))?;
    ensure!(healed_ca != first_ca, "the authority was not renewed");

    // A connection from before the renewal.
    let mut watch = kubectl.command(&[
        "get",
        "configmaps",
        "--watch-only",
        "--request-timeout=180s",
        "-o",
        "name",
    ]);
    let mut watch = Ended(watch.stdout(Stdio::piped()).spawn()?);
    let mut lines = BufReader::new(watch.0.stdout.take().context("its output")?).lines();
    eventually("the watch is there", PATIENCE, || {
        let created = kubectl.run(&["create", "configmap", "warm-up"]).is_ok();
        let _ = kubectl.run(&["delete", "configmap", "warm-up"]);
        ensure!(created, "not made");
        Ok(())
    })?;
    let old_config = fs::read_to_string(cluster.kubeconfig())?;
    let said = cluster.skiff(&["certs", "renew", "ca", "apiserver", "admin"])?;
    ensure!(
        said.contains("renewed ca\n") && said.contains("renewed admin\n"),
        "{said}"
    );
    let new_ca = fs::read_to_string(folder.join("ca.crt"))?;
    eventually("the admin's kubeconfig is written again", PATIENCE, || {
        ensure!(
            fs::read_to_string(cluster.kubeconfig())? != old_config,
            "it is the old one"
        );
        Ok(())
    })?;
    kubectl.run(&["get", "namespaces"])?;
    // Who has the old kubeconfig, and with it the old certificate of the authority, is let in as well.
    let kept = tempfile::NamedTempFile::new()?;
    fs::write(kept.path(), &old_config)?;
    let path = kept.path().display().to_string();
    let old = kubectl
        .command(&["get", "namespaces", "--kubeconfig", &path])
        .output()?;
    ensure!(old.status.success(), "{}", String::from_utf8_lossy(&old.stderr));
    eventually(
        "the cluster knows the new certificate of its authority",
        PATIENCE,
        || {
            for (namespace, name, key) in [
                ("default", "kube-root-ca.crt", "ca.crt"),
                (
                    "kube-system",
                    "extension-apiserver-authentication",
                    "client-ca-file",
                ),
            ] {
                let map = kubectl.json(&["get", "configmap", "-n", namespace, name])?;
                ensure!(
                    map["data"][key].as_str() == Some(new_ca.as_str()),
                    "{name} has the old one"
                );
            }
            Ok(())
        },
    )?;
    // The old connection still gets what happens.
    kubectl.run(&["create", "configmap", "after"])?;
    let seen = lines
        .by_ref()
        .map_while(Result::ok)
        .any(|line| line == "configmap/after");
    ensure!(seen, "the watch ended");
    Ok(())
}
