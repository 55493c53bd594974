//! Pods that are being deleted, as the official suite looks at them: through the kubelet, at its default port.

use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client};
use serde_json::json;
use skiff_testkit::{BUSYBOX, Cluster, busybox_archive};
use std::time::Duration;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

fn pod(name: &str, script: &str, more: serde_json::Value) -> Result<Pod> {
    let mut container = json!({"name": "c", "image": BUSYBOX, "command": ["sh", "-c", script]});
    if let (Some(container), serde_json::Value::Object(more)) = (container.as_object_mut(), more) {
        container.extend(more);
    }
    let spec = json!({"restartPolicy": "Never", "containers": [container]});
    Ok(serde_json::from_value(
        json!({"metadata": {"name": name}, "spec": spec}),
    )?)
}

async fn connected() -> Result<(Cluster, Client, tempfile::TempDir)> {
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(SKIFF, &[])?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let client = skiff_client::remote(cluster.kubeconfig(), None).await?;
    Ok((cluster, client, dir))
}

/// What the kubelet says of a pod, asked for at the port that every client takes for granted.
async fn of_kubelet(client: &Client, node: &str, pod: &str) -> Result<Option<Pod>> {
    let path = format!("/api/v1/nodes/{node}:10250/proxy/pods");
    let list: kube::core::ObjectList<Pod> =
        client.request(http::Request::get(path).body(Vec::new())?).await?;
    Ok(list
        .items
        .into_iter()
        .find(|found| found.metadata.name.as_deref() == Some(pod)))
}

async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    for _ in 0..900 {
        if let Some(answer) = ask().await? {
            return Ok(answer);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    bail!("never happened: {what}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_runs_until_its_hook_has_ended() -> Result<()> {
    let (_cluster, client, _dir) = connected().await?;
    let nodes: Api<Node> = Api::all(client.clone());
    let nodes = nodes.list(&ListParams::default()).await?;
    let node = nodes.items.first().and_then(|node| node.metadata.name.as_deref());
    let node = node.context("a node")?;
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let hook = json!({"preStop": {"exec": {"command": ["sh", "-c", "while true; do sleep 1; done"]}}});
    let made = pod("hook", "sleep 1000", json!({"lifecycle": hook}))?;
    pods.create(&PostParams::default(), &made).await?;
    let phase = |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.clone());
    eventually("the pod runs", async || {
        let pod = pods.get("hook").await?;
        Ok((phase(&pod).as_deref() == Some("Running")).then_some(()))
    })
    .await?;

    let answer = pods
        .delete("hook", &DeleteParams::default().grace_period(60))
        .await?;
    let answered = answer.left().context("the pod is answered, not a status")?;
    ensure!(answered.metadata.deletion_timestamp.is_some(), "{answered:?}");
    eventually("the kubelet has seen the deletion", async || {
        let seen = of_kubelet(&client, node, "hook").await?.context("the pod")?;
        Ok(seen.metadata.deletion_timestamp.as_ref().map(|_| ()))
    })
    .await?;
    // Longer than the container would take without its hook.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let seen = of_kubelet(&client, node, "hook").await?.context("the pod")?;
    ensure!(phase(&seen).as_deref() == Some("Running"), "{:?}", seen.status);

    pods.delete("hook", &DeleteParams::default().grace_period(0))
        .await?;
    eventually("the kubelet has forgotten the pod", async || {
        let seen = of_kubelet(&client, node, "hook").await?;
        Ok(seen.is_none().then_some(()))
    })
    .await
}

/// A pod that is deleted while it starts never ran or was ended; it did not fail to start.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_is_no_failure_to_start() -> Result<()> {
    let (_cluster, client, _dir) = connected().await?;
    let pods: Api<Pod> = Api::default_namespaced(client);
    let version = pods.list(&ListParams::default()).await?.metadata.resource_version;
    let version = version.context("a version")?;
    let total = 24;
    let churn = futures::stream::iter(0..total).for_each_concurrent(4, async |number: u64| {
        let name = format!("brief-{number}");
        let made = pod(&name, "sleep 1000", json!({})).expect("a pod");
        pods.create(&PostParams::default(), &made).await.expect("created");
        tokio::time::sleep(Duration::from_millis(number * 8 + 10)).await;
        let at_once = DeleteParams::default().grace_period(1);
        pods.delete(&name, &at_once).await.expect("deleted");
    });
    let watch = async {
        let mut events = pods.watch(&WatchParams::default(), &version).await?.boxed();
        let mut gone = 0;
        while gone < total {
            let pod = match events.try_next().await?.context("the watch ended")? {
                WatchEvent::Deleted(pod) => {
                    gone += 1;
                    pod
                }
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => pod,
                WatchEvent::Error(status) => bail!("{status:?}"),
                WatchEvent::Bookmark(_) => continue,
            };
            let statuses = pod.status.and_then(|status| status.container_statuses);
            for status in statuses.into_iter().flatten() {
                let ended = status.state.and_then(|state| state.terminated);
                ensure!(
                    ended.as_ref().is_none_or(|ended| ended.exit_code != 128),
                    "{ended:?}"
                );
            }
        }
        Ok(())
    };
    let limited = tokio::time::timeout(Duration::from_secs(120), watch);
    let (watched, ()) = tokio::join!(limited, churn);
    watched.context("the pods are not gone in time")?
}
