//! The example on the embedded parts: everything that the README's first five minutes promise.

use anyhow::{Result, ensure};
use skiff_testkit::{Cluster, busybox_archive, whole_path};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

#[test]
fn the_whole_path() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(SKIFF, &[])?;
    cluster.import(&busybox_archive(dir.path())?)?;
    whole_path::walk(&cluster)
}

#[test]
fn the_trace_of_an_apply_adds_up() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &[])?;
    whole_path::apply_the_example(&cluster.kubectl())?;
    let trace: serde_json::Value =
        serde_json::from_str(&cluster.skiff(&["trace", "deployment/web", "-o", "json"])?)?;
    let steps = trace["steps"].as_array().cloned().unwrap_or_default();
    let sum: i64 = steps.iter().filter_map(|s| s["durUs"].as_i64()).sum();
    ensure!(Some(sum) == trace["totalUs"].as_i64(), "{trace:#}");
    let path: Vec<&str> = steps.iter().filter_map(|s| s["what"].as_str()).collect();
    for hop in [
        "deployments.apps web",
        "replicasets.apps web-",
        "pods web-",
        "pods/binding web-",
        "pods/status web-",
        "endpointslices",
    ] {
        ensure!(
            path.iter().any(|what| what.contains(hop)),
            "no hop {hop:?} in {path:#?}"
        );
    }
    let drawn = cluster.skiff(&["trace", "deploy/web"])?;
    ensure!(drawn.contains("total"), "{drawn}");
    Ok(())
}
