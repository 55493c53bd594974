//! The example on the embedded parts: everything that the README's first five minutes promise.

use anyhow::{Result, ensure};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{Cluster, busybox_archive, eventually, whole_path};

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
    let read = || -> Result<serde_json::Value> {
        Ok(serde_json::from_str(&cluster.skiff(&[
            "trace",
            "deployment/web",
            "-o",
            "json",
        ])?)?)
    };
    // The proxy reports its rules after they are in the kernel.
    eventually("the path ends in the kernel", PATIENCE, || {
        let trace = read()?;
        let last = trace["steps"].as_array().and_then(|steps| steps.last().cloned());
        let last = last.unwrap_or_default();
        ensure!(
            last["what"] == "service rule in the kernel (web)" && last["actor"] == "system:kube-proxy",
            "{trace:#}"
        );
        Ok(())
    })?;
    let trace = read()?;
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
    ensure!(
        drawn.starts_with("Ready in ") && drawn.contains("total"),
        "{drawn}"
    );

    // A label does not hide the rollout, and a pod's path goes back to what it was made for.
    let kubectl = cluster.kubectl();
    kubectl.run(&["label", "deployment", "web", "a=b"])?;
    let drawn = cluster.skiff(&["trace", "deploy/web"])?;
    ensure!(
        drawn.contains("create deployments.apps web") && drawn.contains("--last 1"),
        "{drawn}"
    );
    let pod = kubectl.run(&["get", "pods", "-o", "name"])?;
    let pod = pod.lines().next().unwrap_or_default();
    let drawn = cluster.skiff(&["trace", pod])?;
    ensure!(drawn.contains("from \"create deployments.apps web\""), "{drawn}");
    Ok(())
}

#[test]
fn the_trace_names_waits_and_says_what_is_not_ready() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &[])?;
    let kubectl = cluster.kubectl();
    let pod = |name: &str, more: &str| {
        format!(
            r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{name}"}},"spec":{{"terminationGracePeriodSeconds":0,
                "containers":[{{"name":"c","image":"skiff.local/demo:v1"{more}}}]}}}}"#
        )
    };
    kubectl.apply(&pod(
        "slow",
        r#","readinessProbe":{"httpGet":{"port":8080,"path":"/healthz"},"initialDelaySeconds":2}"#,
    ))?;
    kubectl.apply(&pod("broken", r#","command":["/nope"]"#))?;
    kubectl.apply(&pod("imageless", "").replace("skiff.local/demo:v1", "127.0.0.1:1/nope:1"))?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/slow", "--timeout=90s"])?;
    let drawn = cluster.skiff(&["trace", "pod/slow"])?;
    ensure!(
        drawn.starts_with("Ready in ") && drawn.contains("waiting for readiness (initialDelaySeconds 2)"),
        "{drawn}"
    );
    eventually("the trace says that the pod fails", PATIENCE, || {
        let drawn = cluster.skiff(&["trace", "pod/broken"])?;
        ensure!(
            drawn.starts_with("NOT READY: container c CrashLoopBackOff after exit code 128, next try in "),
            "{drawn}"
        );
        Ok(())
    })?;
    eventually("the trace says when the image is pulled again", PATIENCE, || {
        let drawn = cluster.skiff(&["trace", "pod/imageless"])?;
        ensure!(
            drawn.starts_with("NOT READY: container c ImagePullBackOff, next try in "),
            "{drawn}"
        );
        Ok(())
    })
}
