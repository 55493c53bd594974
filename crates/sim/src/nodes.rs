//! The Node objects of a simulation: created from their shapes, kept alive by leases and statuses, removed at the end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use skiff_client::ErrorExt;
use tokio_util::sync::CancellationToken;

use crate::profile::NodeShape;
use crate::{Error, LABEL, SimConfig};

const LEASE_NAMESPACE: &str = "kube-node-lease";
/// A kubelet's, which the node lifecycle controller is made for.
const LEASE_SECONDS: i32 = 40;
/// How often a kubelet reports a status in which nothing has changed.
const STATUS_INTERVAL: Duration = Duration::from_secs(300);
/// Requests in flight at a time.
const CONCURRENCY: usize = 32;

fn node(shape: &NodeShape, index: usize) -> Value {
    let name = format!("{}{index}", shape.prefix);
    let mut labels = shape.labels.clone();
    let mut label = |key: &str, value: &str| labels.insert(key.to_owned(), value.to_owned());
    label(LABEL, "true");
    label("kubernetes.io/hostname", &name);
    label("kubernetes.io/os", "linux");
    label("kubernetes.io/arch", "amd64");
    if let Some(zone) = shape.zones.get(index.checked_rem(shape.zones.len()).unwrap_or(0)) {
        label("topology.kubernetes.io/zone", zone);
    }
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
        "spec": {"taints": shape.taints}})
}

fn status(shape: &NodeShape, now: Timestamp) -> Value {
    let now = skiff_meta::time::format_seconds(now);
    let condition = |kind: &str, status: &str, reason: &str, message: &str| {
        json!({"type": kind, "status": status, "reason": reason, "message": message,
            "lastHeartbeatTime": now, "lastTransitionTime": now})
    };
    json!({"capacity": shape.capacity, "allocatable": shape.capacity,
        "nodeInfo": {"kubeletVersion": "v1.36.4", "operatingSystem": "linux", "architecture": "amd64",
            "machineID": "", "systemUUID": "", "bootID": "", "kernelVersion": "", "osImage": "simulated",
            "containerRuntimeVersion": "sim://1", "kubeProxyVersion": ""},
        "conditions": [
        condition("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
        condition("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
        condition("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
        condition("Ready", "True", "KubeletReady", "simulated node is ready")]})
}

/// Creates the nodes of all shapes; one that is there already is taken over. Answers their names.
pub(crate) async fn create(client: &Client, config: &SimConfig) -> Result<Vec<String>, Error> {
    let api: Api<Node> = Api::all(client.clone());
    let mut all = Vec::new();
    for shape in &config.profile.nodes {
        let shape = Arc::new(shape.clone());
        all.extend((0..shape.count).map(|index| (shape.clone(), index)));
    }
    let created = stream::iter(all).map(|(shape, index)| create_one(api.clone(), shape, index));
    created
        .buffer_unordered(CONCURRENCY)
        .try_collect()
        .await
        .map_err(Error::Nodes)
}

async fn create_one(api: Api<Node>, shape: Arc<NodeShape>, index: usize) -> Result<String, kube::Error> {
    let wanted: Node = serde_json::from_value(node(&shape, index)).map_err(kube::Error::SerdeError)?;
    let name = wanted.metadata.name.clone().unwrap_or_default();
    match api.create(&PostParams::default(), &wanted).await {
        Err(error) if !error.is_already_exists() => return Err(error),
        _ => {}
    }
    renew_lease(&api.clone().into_client(), &name).await?;
    let patch = Patch::Merge(json!({"status": status(&shape, Timestamp::now())}));
    api.patch_status(&name, &PatchParams::default(), &patch).await?;
    Ok(name)
}

/// Renews leases and reports statuses, spread evenly over their intervals, until `stop`.
pub(crate) async fn keep_alive(
    client: Client,
    config: Arc<SimConfig>,
    names: Arc<Vec<String>>,
    stop: CancellationToken,
) {
    let leases = spread(&names, config.lease_interval, &stop, |name| {
        let client = client.clone();
        async move {
            if let Err(error) = renew_lease(&client, &name).await {
                tracing::debug!(node = name, %error, "cannot renew the lease of a simulated node");
            }
        }
    });
    let nodes: Api<Node> = Api::all(client.clone());
    let statuses = spread(&names, STATUS_INTERVAL, &stop, |name| {
        let nodes = nodes.clone();
        async move {
            let now = skiff_meta::time::format_seconds(Timestamp::now());
            let heartbeat = |kind: &str| json!({"type": kind, "lastHeartbeatTime": now});
            let conditions = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"].map(heartbeat);
            let patch = Patch::Strategic(json!({"status": {"conditions": conditions}}));
            if let Err(error) = nodes.patch_status(&name, &PatchParams::default(), &patch).await {
                tracing::debug!(node = name, %error, "cannot report the status of a simulated node");
            }
        }
    });
    tokio::join!(leases, statuses);
}

/// Calls `each` for every name once per interval, never all at a time.
async fn spread<F: Future<Output = ()>>(
    names: &[String],
    interval: Duration,
    stop: &CancellationToken,
    each: impl Fn(String) -> F,
) {
    if names.is_empty() {
        return stop.cancelled().await;
    }
    let ticks = 100.min(names.len());
    let mut timer = tokio::time::interval(interval / u32::try_from(ticks).unwrap_or(1));
    timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // The first tick comes at once, and what was just created needs nothing yet.
    timer.tick().await;
    for part in names.chunks(names.len().div_ceil(ticks)).cycle() {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = timer.tick() => {}
        }
        let calls = stream::iter(part.iter().cloned()).map(&each);
        calls.buffer_unordered(CONCURRENCY).collect::<()>().await;
    }
}

async fn renew_lease(client: &Client, name: &str) -> Result<(), kube::Error> {
    let api: Api<Lease> = Api::namespaced(client.clone(), LEASE_NAMESPACE);
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string();
    let spec = json!({"holderIdentity": name, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": now});
    let renewed = api
        .patch(
            name,
            &PatchParams::default(),
            &Patch::Merge(json!({ "spec": spec })),
        )
        .await;
    match renewed {
        Err(error) if error.is_not_found() => {
            let lease = json!({"metadata": {"name": name}, "spec": spec});
            let lease: Lease = serde_json::from_value(lease).map_err(kube::Error::SerdeError)?;
            match api.create(&PostParams::default(), &lease).await {
                Err(error) if !error.is_already_exists() => Err(error),
                _ => Ok(()),
            }
        }
        result => result.map(drop),
    }
}

/// Removes every simulated node with its lease, and by force the pods bound to it: nobody else would end them.
pub(crate) async fn remove(client: &Client) -> Result<usize, Error> {
    let nodes: Api<Node> = Api::all(client.clone());
    let found = nodes
        .list_metadata(&ListParams::default().labels(LABEL))
        .await
        .map_err(Error::Removal)?;
    let names: Vec<String> = found
        .items
        .into_iter()
        .filter_map(|node| node.metadata.name)
        .collect();
    let count = names.len();
    stream::iter(names)
        .map(|name| remove_one(client.clone(), name))
        .buffer_unordered(CONCURRENCY)
        .try_collect::<()>()
        .await
        .map_err(Error::Removal)?;
    Ok(count)
}

async fn remove_one(client: Client, name: String) -> Result<(), kube::Error> {
    remove_pods(&client, &name).await?;
    let nodes: Api<Node> = Api::all(client.clone());
    let leases: Api<Lease> = Api::namespaced(client, LEASE_NAMESPACE);
    gone(nodes.delete(&name, &DeleteParams::default()).await.map(drop))?;
    gone(leases.delete(&name, &DeleteParams::default()).await.map(drop))
}

async fn remove_pods(client: &Client, node: &str) -> Result<(), kube::Error> {
    let all: Api<Pod> = Api::all(client.clone());
    let bound = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let mut by_namespace: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for pod in all.list_metadata(&bound).await?.items {
        let namespace = pod.metadata.namespace.unwrap_or_default();
        by_namespace
            .entry(namespace)
            .or_default()
            .extend(pod.metadata.name);
    }
    let now = DeleteParams::default().grace_period(0);
    for (namespace, names) in by_namespace {
        let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
        for name in names {
            gone(pods.delete(&name, &now).await.map(drop))?;
        }
    }
    Ok(())
}

fn gone(result: Result<(), kube::Error>) -> Result<(), kube::Error> {
    match result {
        Err(error) if error.is_not_found() => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Profile;

    #[test]
    fn nodes_have_their_shape_and_take_zones_in_turns() {
        let profile = Profile::parse(
            "nodes: [{count: 3, prefix: n, zones: [a, b], labels: {x: y}, taints: [{key: k, effect: NoSchedule}]}]",
        );
        let profile = profile.unwrap();
        let made: Vec<Value> = (0..3).map(|index| node(&profile.nodes[0], index)).collect();
        let zones: Vec<&Value> = made
            .iter()
            .map(|node| &node["metadata"]["labels"]["topology.kubernetes.io/zone"])
            .collect();
        assert_eq!(zones, ["a", "b", "a"]);
        assert_eq!(made[2]["metadata"]["name"], "n2");
        assert_eq!(made[2]["metadata"]["labels"]["x"], "y");
        assert_eq!(made[2]["spec"]["taints"][0]["key"], "k");
        let status = status(&profile.nodes[0], Timestamp::UNIX_EPOCH);
        assert_eq!(status["allocatable"]["pods"], "110");
        assert_eq!(status["conditions"][3]["status"], "True");
    }
}
