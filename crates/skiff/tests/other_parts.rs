//! The same path with a real etcd as the store, and with containerd as the runtime.

use anyhow::{Context, Result, ensure};
use skiff_testkit::{Cluster, Containerd, Etcd, busybox_archive, eventually, expect_eq, whole_path};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

#[test]
fn the_whole_path_on_etcd() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let etcd = Etcd::start()?;
    let cluster = Cluster::start(SKIFF, &["--etcd-servers", etcd.endpoint()])?;
    cluster.import(&busybox_archive(dir.path())?)?;
    whole_path::walk(&cluster)
}

#[test]
fn two_clusters_on_one_etcd_do_not_mix() -> Result<()> {
    let etcd = Etcd::start()?;
    let flags = ["--components", "api", "--etcd-servers", etcd.endpoint()];
    let first = Cluster::start(SKIFF, &flags)?;
    first.kubectl().run(&["create", "configmap", "a"])?;
    let refused = Cluster::start(SKIFF, &flags).err();
    let told = refused.map(|error| format!("{error:#}")).unwrap_or_default();
    let sentence = format!(
        "belong to another cluster ({:?}): use another --etcd-prefix",
        first.name()
    );
    expect_eq(told.contains(&sentence), true).with_context(|| told)?;
    let second = Cluster::start(SKIFF, &[&flags[..], &["--etcd-prefix", "/second"]].concat())?;
    let names = second.kubectl().run(&["get", "configmaps", "-o", "name"])?;
    expect_eq(names.contains("configmap/a"), false).with_context(|| names)?;
    // Its own it gets back.
    first.skiff(&["down"])?;
    first.up()?;
    first.kubectl().run(&["get", "configmap", "a"]).map(|_| ())
}

#[test]
fn a_store_that_is_away_is_503_and_nothing_is_lost() -> Result<()> {
    let mut etcd = Etcd::start()?;
    let cluster = Cluster::start(SKIFF, &["--etcd-servers", etcd.endpoint()])?;
    let kubectl = cluster.kubectl();
    kubectl.run(&["create", "configmap", "before", "--from-literal=a=1"])?;
    etcd.kill();
    let (code, shown) = kubectl.try_run(&["create", "configmap", "during", "--from-literal=a=1"])?;
    expect_eq(code != 0, true).with_context(|| shown)?;
    etcd.restart()?;
    eventually("writes work again", whole_path::PATIENCE, || {
        kubectl
            .run(&[
                "create",
                "configmap",
                "after",
                "--from-literal=a=1",
                "--dry-run=server",
            ])
            .map(|_| ())
    })?;
    kubectl.run(&["get", "configmap", "before"]).map(|_| ())
}

#[test]
fn the_whole_path_on_containerd() -> Result<()> {
    let containerd = Containerd::with_images(SKIFF)?;
    let cluster = Cluster::start(SKIFF, &["--container-runtime-endpoint", &containerd.endpoint()])?;
    let configuration = format!("00-skiff-{}.conflist", cluster.name());
    expect_eq(
        containerd.network_files()?,
        vec![configuration, "skiff-bridge".to_owned()],
    )?;
    // It has one pod network at a time.
    let second = Cluster::start(SKIFF, &["--container-runtime-endpoint", &containerd.endpoint()]);
    let refused = second.err().context("a second cluster on the same containerd")?;
    ensure!(
        format!("{refused:#}").contains("it has one pod network at a time"),
        "{refused:#}"
    );
    whole_path::walk(&cluster).with_context(|| containerd.log())?;
    drop(cluster);
    expect_eq(containerd.network_files()?, Vec::new())?;
    expect_eq(containerd.ctr(&["containers", "list", "--quiet"])?.as_str(), "")
}
