//! The whole path with the real kubectl, step by step. It runs on the embedded parts, on a real etcd and on
//! containerd: what differs is how the cluster was started.

use crate::{BUSYBOX, Cluster, Kubectl, eventually, expect_eq};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

pub const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/web.yaml");
pub const PATIENCE: Duration = Duration::from_secs(90);

/// From `kubectl apply` of the example to its removal.
pub fn walk(cluster: &Cluster) -> Result<()> {
    let kubectl = cluster.kubectl();
    apply_the_example(&kubectl)?;
    start_client(&kubectl)?;
    traffic_spreads(&kubectl, 3)?;
    names_resolve(&kubectl)?;
    the_api_answers_pods(&kubectl)?;
    logs_and_exec(&kubectl)?;
    scale(&kubectl)?;
    a_deleted_pod_comes_back(&kubectl)?;
    rolling_update_loses_no_request(&kubectl)?;
    rollback(&kubectl)?;
    delete_removes_everything(&kubectl)
}

pub fn apply_the_example(kubectl: &Kubectl) -> Result<()> {
    kubectl.run(&["apply", "-f", EXAMPLE])?;
    kubectl.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    let pods = pods(kubectl, "app=web")?;
    expect_eq(pods.len(), 3)?;
    let addresses: BTreeSet<&str> = pods
        .iter()
        .filter_map(|p| p["status"]["podIP"].as_str())
        .collect();
    expect_eq(addresses.len(), 3)
}

/// Pods with a label that are not on their way out.
pub fn pods(kubectl: &Kubectl, selector: &str) -> Result<Vec<Value>> {
    let list = kubectl.json(&["get", "pods", "-l", selector])?;
    let pods = list["items"].as_array().context("a list")?.iter();
    Ok(pods
        .filter(|p| p["metadata"]["deletionTimestamp"].is_null())
        .cloned()
        .collect())
}

/// A pod to ask from.
pub fn start_client(kubectl: &Kubectl) -> Result<()> {
    kubectl.apply(&format!(
        r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"client"}},"spec":{{"terminationGracePeriodSeconds":0,
            "containers":[{{"name":"c","image":"{BUSYBOX}","command":["sleep","3600"]}}]}}}}"#
    ))?;
    kubectl
        .run(&["wait", "--for=condition=Ready", "pod/client", "--timeout=90s"])
        .map(|_| ())
}

pub fn exec(kubectl: &Kubectl, command: &[&str]) -> Result<String> {
    let args: Vec<&str> = ["exec", "client", "--"].iter().chain(command).copied().collect();
    kubectl.run(&args)
}

fn answering_pods(kubectl: &Kubectl, url: &str, asks: usize) -> Result<BTreeSet<String>> {
    let ask = format!("for i in $(busybox seq {asks}); do wget -q -O - {url} || exit 1; done");
    let answers = exec(kubectl, &["sh", "-c", &ask])?;
    let names = answers
        .lines()
        .filter_map(|l| l.strip_prefix("Hello from ")?.split(',').next());
    Ok(names.map(str::to_owned).collect())
}

/// The service's address answers from inside a pod, and so does its name; both reach every replica.
fn traffic_spreads(kubectl: &Kubectl, replicas: usize) -> Result<()> {
    let service = kubectl.json(&["get", "service", "web"])?;
    let address = service["spec"]["clusterIP"]
        .as_str()
        .context("clusterIP")?
        .to_owned();
    for host in [address.as_str(), "web", "web.default.svc.cluster.local"] {
        let url = format!("http://{host}/");
        eventually(&format!("{url} reaches every replica"), PATIENCE, || {
            expect_eq(answering_pods(kubectl, &url, 30)?.len(), replicas)
        })?;
    }
    Ok(())
}

fn names_resolve(kubectl: &Kubectl) -> Result<()> {
    let resolved = exec(kubectl, &["nslookup", "kubernetes.default.svc.cluster.local"])?;
    ensure!(resolved.contains("Address"), "{resolved}");
    let (code, shown) = kubectl.try_run(&[
        "exec",
        "client",
        "--",
        "nslookup",
        "nope.default.svc.cluster.local",
    ])?;
    ensure!(code != 0 && shown.contains("NXDOMAIN"), "{code} {shown}");
    Ok(())
}

/// The `kubernetes` service works from inside with the mounted token: the demo server asks it who it is.
fn the_api_answers_pods(kubectl: &Kubectl) -> Result<()> {
    let answer = exec(kubectl, &["wget", "-q", "-O", "-", "http://web/whoami"])?;
    ensure!(
        answer.contains("knows me as system:serviceaccount:default:default"),
        "{answer}"
    );
    let folder = "/var/run/secrets/kubernetes.io/serviceaccount";
    expect_eq(
        exec(kubectl, &["cat", &format!("{folder}/namespace")])?.as_str(),
        "default",
    )?;
    let token = exec(kubectl, &["cat", &format!("{folder}/token")])?;
    let review = serde_json::json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token},
    });
    let reviewed: Value = serde_json::from_str(&kubectl.create(&review.to_string())?)?;
    expect_eq(
        reviewed["status"]["user"]["username"].as_str(),
        Some("system:serviceaccount:default:default"),
    )
}

fn logs_and_exec(kubectl: &Kubectl) -> Result<()> {
    let pod = pods(kubectl, "app=web")?[0]["metadata"]["name"]
        .as_str()
        .context("name")?
        .to_owned();
    let logs = kubectl.run(&["logs", &pod])?;
    ensure!(logs.contains("listens on port 8080"), "{logs}");
    let (code, _) = kubectl.try_run(&["exec", "client", "--", "sh", "-c", "exit 7"])?;
    expect_eq(code, 7)
}

fn scale(kubectl: &Kubectl) -> Result<()> {
    kubectl.run(&["scale", "deployment/web", "--replicas=5"])?;
    kubectl.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    traffic_spreads(kubectl, 5)?;
    kubectl.run(&["scale", "deployment/web", "--replicas=3"])?;
    eventually("three pods are left", PATIENCE, || {
        expect_eq(
            kubectl.json(&["get", "pods", "-l", "app=web"])?["items"]
                .as_array()
                .map(Vec::len),
            Some(3),
        )
    })
}

fn a_deleted_pod_comes_back(kubectl: &Kubectl) -> Result<()> {
    let names = |pods: &[Value]| -> BTreeSet<String> {
        pods.iter()
            .filter_map(|p| p["metadata"]["name"].as_str())
            .map(str::to_owned)
            .collect()
    };
    let before = names(&pods(kubectl, "app=web")?);
    let victim = before.first().context("a pod")?.clone();
    kubectl.run(&["delete", "pod", &victim, "--wait=true", "--timeout=60s"])?;
    kubectl.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    let after = names(&pods(kubectl, "app=web")?);
    expect_eq(after.len(), 3)?;
    ensure!(!after.contains(&victim), "{victim} is back under its own name");
    Ok(())
}

/// Asks all the time while the pods are replaced one by one.
fn rolling_update_loses_no_request(kubectl: &Kubectl) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let (asked, failed) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let asker = {
        let (kubectl, stop, asked, failed) = (kubectl.clone(), stop.clone(), asked.clone(), failed.clone());
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let ask = "n=0; for i in $(busybox seq 50); do wget -q -O /dev/null http://web/ && n=$((n+1)); done; echo $n";
                match exec(&kubectl, &["sh", "-c", ask])
                    .ok()
                    .and_then(|s| s.trim().parse::<u32>().ok())
                {
                    Some(good) => {
                        asked.fetch_add(50, Ordering::Relaxed);
                        failed.fetch_add(50 - good, Ordering::Relaxed);
                    }
                    None => {
                        failed.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        })
    };
    let updated = kubectl
        .run(&["set", "env", "deployment/web", "VERSION=2"])
        .and_then(|_| kubectl.run(&["rollout", "status", "deployment/web", "--timeout=120s"]));
    stop.store(true, Ordering::Relaxed);
    asker.join().map_err(|_| anyhow::anyhow!("the asker panicked"))?;
    updated?;
    ensure!(
        asked.load(Ordering::Relaxed) >= 50,
        "nothing was asked during the update"
    );
    expect_eq(failed.load(Ordering::Relaxed), 0).context("requests failed during the rolling update")?;
    version_is(kubectl, 2)
}

fn version_is(kubectl: &Kubectl, version: u32) -> Result<()> {
    eventually(&format!("version {version} answers"), PATIENCE, || {
        let answer = exec(kubectl, &["wget", "-q", "-O", "-", "http://web/"])?;
        ensure!(answer.contains(&format!("version {version}")), "{answer}");
        Ok(())
    })
}

fn rollback(kubectl: &Kubectl) -> Result<()> {
    let history = kubectl.run(&["rollout", "history", "deployment/web"])?;
    ensure!(
        history
            .lines()
            .filter(|l| l.starts_with(|c: char| c.is_ascii_digit()))
            .count()
            == 2,
        "{history}"
    );
    kubectl.run(&["rollout", "undo", "deployment/web"])?;
    kubectl.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    version_is(kubectl, 1)
}

fn delete_removes_everything(kubectl: &Kubectl) -> Result<()> {
    kubectl.run(&["delete", "-f", EXAMPLE, "--timeout=60s"])?;
    for kind in ["replicasets", "pods", "endpointslices"] {
        let selector = if kind == "endpointslices" {
            "kubernetes.io/service-name=web"
        } else {
            "app=web"
        };
        eventually(&format!("no {kind} are left"), PATIENCE, || {
            expect_eq(
                kubectl.json(&["get", kind, "-l", selector])?["items"]
                    .as_array()
                    .map(Vec::len),
                Some(0),
            )
        })?;
    }
    Ok(())
}
