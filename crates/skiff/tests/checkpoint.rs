//! A checkpoint of a running pod's container through the kubelet's endpoint, by the CRIU that is in PATH. One that is too old for the
//! kernel must be said to be so; the container runs on in any case.

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{ListParams, LogParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use skiff_testkit::{BUSYBOX, Cluster, busybox_archive};
use std::time::Duration;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

async fn lines(pods: &Api<Pod>) -> Result<usize> {
    Ok(pods.logs("counter", &LogParams::default()).await?.lines().count())
}

async fn counts_beyond(pods: &Api<Pod>, before: usize) -> Result<()> {
    for _ in 0..900 {
        if lines(pods).await.is_ok_and(|lines| lines > before) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    bail!("the container does not count")
}

async fn post(client: &Client, node: &str, path: &str) -> Result<String, kube::Error> {
    let path = format!("/api/v1/nodes/{node}:10250/proxy/checkpoint/{path}");
    let request = http::Request::post(path).body(Vec::new());
    client
        .request_text(request.map_err(kube::Error::HttpError)?)
        .await
}

/// The API server's own identity, as which the proxy comes to the kubelet, may take none by itself.
async fn grant(client: &Client) -> Result<()> {
    let group = "rbac.authorization.k8s.io";
    let rule = json!({"apiGroups": [""], "resources": ["nodes/checkpoint"], "verbs": ["create"]});
    let role = json!({"metadata": {"name": "checkpoints"}, "rules": [rule]});
    let binding = json!({
        "metadata": {"name": "checkpoints"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "checkpoints"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "kube-apiserver-kubelet-client"}],
    });
    let roles: Api<ClusterRole> = Api::all(client.clone());
    roles
        .create(&PostParams::default(), &serde_json::from_value(role)?)
        .await?;
    let bindings: Api<ClusterRoleBinding> = Api::all(client.clone());
    bindings
        .create(&PostParams::default(), &serde_json::from_value(binding)?)
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kubelet_takes_a_checkpoint() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(SKIFF, &[])?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let client = skiff_client::remote(cluster.kubeconfig(), None).await?;
    let nodes: Api<Node> = Api::all(client.clone());
    let nodes = nodes.list(&ListParams::default()).await?;
    let node = nodes.items.first().and_then(|node| node.metadata.name.as_deref());
    let node = node.context("a node")?;
    grant(&client).await?;
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let script = "i=0; while true; do i=$((i+1)); echo $i; usleep 50000; done";
    let spec = json!({"containers": [{"name": "c", "image": BUSYBOX, "command": ["sh", "-c", script]}]});
    let made = serde_json::from_value(json!({"metadata": {"name": "counter"}, "spec": spec}))?;
    pods.create(&PostParams::default(), &made).await?;
    counts_beyond(&pods, 3).await?;

    let taken = post(&client, node, "default/counter/c").await;
    let works = std::process::Command::new("criu").arg("check").output()?;
    match (works.status.success(), taken) {
        (true, Ok(answer)) => {
            let answer: Value = serde_json::from_str(&answer)?;
            let file = answer["items"][0].as_str().context("a file")?;
            ensure!(
                file.contains("/checkpoints/checkpoint-counter_default-c-"),
                "{file}"
            );
            let mut archive = tar::Archive::new(std::fs::File::open(file)?);
            let mut names = Vec::new();
            for entry in archive.entries()? {
                names.push(entry?.path()?.display().to_string());
            }
            for name in [
                "checkpoint/pstree.img",
                "config.dump",
                "spec.dump",
                "rootfs-diff.tar",
            ] {
                ensure!(names.iter().any(|found| found == name), "{name}: {names:?}");
            }
        }
        (false, Err(refused)) => {
            let message = refused.to_string();
            ensure!(message.contains("this criu is too old"), "{message}");
        }
        (works, taken) => bail!("criu works: {works}, {taken:?}"),
    }
    let before = lines(&pods).await?;
    counts_beyond(&pods, before + 3).await?;
    let pod = pods.get("counter").await?;
    let statuses = pod.status.and_then(|status| status.container_statuses);
    let restarts = statuses
        .context("statuses")?
        .first()
        .map(|status| status.restart_count);
    ensure!(restarts == Some(0), "{restarts:?}");

    for path in ["default/counter/other", "default/nobody/c"] {
        match post(&client, node, path).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            other => bail!("{path}: {other:?}"),
        }
    }
    Ok(())
}
