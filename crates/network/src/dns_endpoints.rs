//! The endpoints of cluster DNS: every node that runs it gets an EndpointSlice of its own, for as long as its Node object
//! is there, which answers for as long as the node is not known to be dead. Its hint makes service proxies prefer the
//! instance of their own node.
//!
//! It may run beside every API server: what it writes follows from the Nodes alone.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use parking_lot::Mutex;
use serde_json::{Value, json};
use skiff_client::{Change, Client, ErrorExt, InformerFactory};
use skiff_meta::net::Cidr;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::pods::DNS_ANNOTATION;

pub const NAMESPACE: &str = "kube-system";
pub const SERVICE: &str = "kube-dns";
pub const PORT: u16 = 53;
const SERVICE_NAME: &str = "kubernetes.io/service-name";
const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
const MANAGER: &str = "cluster-dns.skiff.io";
const SETTLE: Duration = Duration::from_millis(5);
const MAX_RETRY: Duration = Duration::from_secs(10);
/// The longest name of an object.
const LONGEST_NAME: usize = 253;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Api(#[from] kube::Error),
    #[error("{0}")]
    Json(#[from] serde_json::Error),
}

/// What matters of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DnsNode {
    uid: String,
    addresses: Vec<IpAddr>,
    alive: bool,
}

impl DnsNode {
    /// `None` for a node without cluster DNS. Where it answers follows from the node's networks: the annotation only
    /// says that it does.
    fn of(node: &Node) -> Option<DnsNode> {
        let annotations = node.metadata.annotations.as_ref()?;
        annotations.get(DNS_ANNOTATION)?;
        let cidrs = node.spec.as_ref()?.pod_cidrs.as_ref()?;
        let conditions = node
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten());
        let silent = conditions
            .into_iter()
            .any(|c| c.type_ == "Ready" && c.status == "Unknown");
        Some(DnsNode {
            uid: node.metadata.uid.clone()?,
            addresses: cidrs
                .iter()
                .filter_map(|cidr| cidr.parse::<Cidr>().ok()?.nth(1))
                .collect(),
            alive: !silent,
        })
    }

    /// Its slices by name, one for each family.
    fn slices(&self, node: &str) -> Vec<(String, Value)> {
        let slice = |address: &IpAddr| {
            let (family, suffix) = if address.is_ipv4() {
                ("IPv4", "")
            } else {
                ("IPv6", "-ipv6")
            };
            let name = slice_name(node, suffix);
            let ports = [("dns", "UDP"), ("dns-tcp", "TCP")]
                .map(|(name, protocol)| json!({"name": name, "port": PORT, "protocol": protocol}));
            let object = json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                "metadata": {
                    "name": name, "namespace": NAMESPACE,
                    "labels": {SERVICE_NAME: SERVICE, MANAGED_BY: MANAGER},
                    "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": self.uid}],
                },
                "addressType": family,
                "endpoints": [{
                    "addresses": [address],
                    "nodeName": node,
                    "conditions": {"ready": self.alive, "serving": self.alive, "terminating": false},
                    "hints": {"forNodes": [{"name": node}]},
                }],
                "ports": ports,
            });
            (name, object)
        };
        self.addresses.iter().map(slice).collect()
    }
}

fn slice_name(node: &str, suffix: &str) -> String {
    let name = format!("{SERVICE}-{node}{suffix}");
    if name.len() <= LONGEST_NAME {
        return name;
    }
    // FNV-1a keeps names apart that are cut off to be equal.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let kept = name[..LONGEST_NAME - 17].trim_end_matches(['.', '-']);
    format!("{kept}-{hash:016x}")
}

/// Runs until `shutdown`.
pub async fn run(client: Client, shutdown: CancellationToken) -> Result<(), Error> {
    let factory = InformerFactory::new(client.clone(), shutdown.clone());
    let nodes = factory.informer::<Node>();
    let slices = factory.namespaced::<EndpointSlice>(NAMESPACE, Some(&format!("{MANAGED_BY}={MANAGER}")));
    let known: Arc<Mutex<BTreeMap<String, DnsNode>>> = Arc::default();
    let changed = Arc::new(Notify::new());
    let (seen, news) = (known.clone(), changed.clone());
    nodes.subscribe(move |change| {
        let node = change.object();
        let name = node.metadata.name.clone().unwrap_or_default();
        let now = DnsNode::of(node).filter(|_| !matches!(change, Change::Deleted { .. }));
        let mut seen = seen.lock();
        if seen.get(&name) == now.as_ref() {
            return;
        }
        match now {
            Some(now) => seen.insert(name, now),
            None => seen.remove(&name),
        };
        news.notify_one();
    });
    let news = changed.clone();
    slices.subscribe(move |_| news.notify_one());
    tokio::select! {
        () = async { tokio::join!(nodes.synced(), slices.synced()); } => {}
        () = shutdown.cancelled() => return Ok(()),
    }
    let api: Api<EndpointSlice> = Api::namespaced(client, NAMESPACE);
    let mut retry = Duration::ZERO;
    loop {
        let wanted: BTreeMap<String, Value> = known
            .lock()
            .iter()
            .flat_map(|(name, node)| node.slices(name))
            .collect();
        match sync(&api, &slices.list(), wanted).await {
            Ok(()) => retry = Duration::ZERO,
            Err(error) => {
                retry = (retry * 2).clamp(Duration::from_millis(100), MAX_RETRY);
                tracing::warn!(%error, again_in = ?retry, "cannot write the endpoints of cluster DNS");
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            () = changed.notified() => tokio::time::sleep(SETTLE).await,
            () = tokio::time::sleep(retry), if !retry.is_zero() => {}
        }
    }
}

/// Makes the slices those that are wanted; the informer may show some later than they are written.
async fn sync(
    api: &Api<EndpointSlice>,
    present: &[Arc<EndpointSlice>],
    wanted: BTreeMap<String, Value>,
) -> Result<(), Error> {
    let mut left: BTreeMap<&str, &EndpointSlice> = present
        .iter()
        .filter_map(|slice| Some((slice.metadata.name.as_deref()?, slice.as_ref())))
        .collect();
    for (name, object) in wanted {
        let slice: EndpointSlice = serde_json::from_value(object.clone())?;
        match left.remove(name.as_str()) {
            Some(present) if is_same(present, &slice) => {}
            Some(_) => {
                let patched = api
                    .patch(&name, &PatchParams::default(), &Patch::Merge(object))
                    .await;
                ignore_missing(patched.map(drop))?;
            }
            None => match api.create(&PostParams::default(), &slice).await {
                Err(error) if !error.is_already_exists() => return Err(error.into()),
                _ => {}
            },
        }
    }
    for name in left.into_keys() {
        ignore_missing(api.delete(name, &DeleteParams::default()).await.map(drop))?;
    }
    Ok(())
}

/// Another server's instance was faster, or its Node is gone.
fn ignore_missing(result: Result<(), kube::Error>) -> Result<(), kube::Error> {
    match result {
        Err(error) if error.is_not_found() => Ok(()),
        result => result,
    }
}

fn is_same(a: &EndpointSlice, b: &EndpointSlice) -> bool {
    let owner = |slice: &EndpointSlice| {
        let owners = slice.metadata.owner_references.iter().flatten();
        owners.map(|owner| owner.uid.clone()).collect::<Vec<_>>()
    };
    a.endpoints == b.endpoints && a.ports == b.ports && owner(a) == owner(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(annotated: bool, ready: &str) -> Node {
        let mut node = json!({
            "metadata": {"name": "n", "uid": "u", "annotations": {}},
            "spec": {"podCIDRs": ["10.244.3.0/24", "fd00:3::/64"]},
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        });
        if annotated {
            node["metadata"]["annotations"][DNS_ANNOTATION] = "6.6.6.6".into();
        }
        serde_json::from_value(node).unwrap()
    }

    #[test]
    fn one_slice_of_each_family_at_the_gateways() {
        assert_eq!(DnsNode::of(&node(false, "True")), None);
        let slices = DnsNode::of(&node(true, "True")).unwrap().slices("n");
        let names: Vec<&str> = slices.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["kube-dns-n", "kube-dns-n-ipv6"]);
        // Not where the annotation says, which the node writes itself.
        assert_eq!(slices[0].1["endpoints"][0]["addresses"], json!(["10.244.3.1"]));
        assert_eq!(slices[1].1["endpoints"][0]["addresses"], json!(["fd00:3::1"]));
        assert_eq!(slices[1].1["addressType"], "IPv6");
        for (_, slice) in slices {
            assert!(serde_json::from_value::<EndpointSlice>(slice).is_ok());
        }
    }

    #[test]
    fn a_dead_node_answers_nothing() {
        for (ready, alive) in [("True", true), ("False", true), ("Unknown", false)] {
            let slices = DnsNode::of(&node(true, ready)).unwrap().slices("n");
            let conditions = &slices[0].1["endpoints"][0]["conditions"];
            assert_eq!(conditions["ready"], alive, "{ready}");
        }
    }

    #[test]
    fn long_names_fit_and_differ() {
        let long = "n".repeat(253);
        let (a, b) = (slice_name(&long, ""), slice_name(&long, "-ipv6"));
        assert!(a.len() <= LONGEST_NAME && b.len() <= LONGEST_NAME && a != b);
    }
}
