//! The load balancer of clusters without a cloud: Services of type LoadBalancer are reached at the nodes' own addresses.
//! It writes their status, and the service proxy of every node does the rest.
//!
//! It may run beside every API server: what it writes follows from the objects alone.

mod plan;

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Patch, PatchParams};
use kube::{Api, Resource};
use serde_json::{Value, json};
use skiff_client::{Client, ErrorExt, EventRecorder, Informer, InformerFactory, Key, reference};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use plan::{BalancerNode, Planned, plan};
pub use plan::{NODE_CLASS, Reserved};

const COMPONENT: &str = "skiff-load-balancer";
const SERVICE_NAME: &str = "kubernetes.io/service-name";
const SERVICE_INDEX: &str = "service";
/// Changes that come together are planned together.
const SETTLE: Duration = Duration::from_millis(20);
const MAX_RETRY: Duration = Duration::from_secs(10);

/// Runs until `stop`.
pub async fn run(reserved: Reserved, client: Client, stop: CancellationToken) {
    let factory = InformerFactory::new(client.clone(), stop.clone());
    let (services, nodes, slices) = (
        factory.informer::<Service>(),
        factory.informer::<Node>(),
        factory.informer::<EndpointSlice>(),
    );
    slices.add_index(SERVICE_INDEX, |slice| service_of(slice).into_iter().collect());
    let changed = Arc::new(Notify::new());
    wake(&services, &changed);
    wake(&nodes, &changed);
    wake(&slices, &changed);
    tokio::select! {
        () = async { tokio::join!(services.synced(), nodes.synced(), slices.synced()); } => {}
        () = stop.cancelled() => return,
    }
    let mut balancer = Balancer {
        events: EventRecorder::new(client.clone(), COMPONENT, ""),
        client,
        refusals: HashMap::new(),
    };
    let mut retry = Duration::ZERO;
    loop {
        let mut ready: Vec<BalancerNode> = nodes
            .list()
            .iter()
            .filter_map(|node| BalancerNode::of(node))
            .collect();
        ready.sort_by(|a, b| a.name.cmp(&b.name));
        let planned = plan(services.list(), &ready, &reserved, |service| {
            local_nodes(service, &slices)
        });
        match balancer.write(&planned).await {
            Ok(()) => retry = Duration::ZERO,
            Err(error) => {
                retry = (retry * 2).clamp(Duration::from_millis(100), MAX_RETRY);
                tracing::warn!(%error, again_in = ?retry, "cannot write the status of a load balancer");
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = changed.notified() => tokio::time::sleep(SETTLE).await,
            () = tokio::time::sleep(retry), if !retry.is_zero() => {}
        }
    }
}

fn wake<K: Resource + 'static>(informer: &Informer<K>, changed: &Arc<Notify>) {
    let changed = changed.clone();
    informer.subscribe(move |_| changed.notify_one());
}

fn service_of(slice: &EndpointSlice) -> Option<String> {
    let name = slice.metadata.labels.as_ref()?.get(SERVICE_NAME)?;
    Some(Key::new(slice.metadata.namespace.clone()?, name).to_string())
}

/// The nodes that have a ready endpoint of the Service.
fn local_nodes(service: &Service, slices: &Informer<EndpointSlice>) -> BTreeSet<String> {
    let slices = slices.by_index(SERVICE_INDEX, &Key::of(service).to_string());
    let endpoints = slices.iter().flat_map(|slice| slice.endpoints.iter().flatten());
    endpoints
        .filter(|endpoint| endpoint.conditions.as_ref().and_then(|c| c.ready).unwrap_or(true))
        .filter_map(|endpoint| endpoint.node_name.clone())
        .collect()
}

struct Balancer {
    client: Client,
    events: EventRecorder,
    /// What each Service was last told.
    refusals: HashMap<Key, String>,
}

impl Balancer {
    async fn write(&mut self, planned: &[Planned]) -> Result<(), kube::Error> {
        let mut refusals = HashMap::new();
        for planned in planned {
            let key = Key::of(&*planned.service);
            let Some(refusal) = &planned.refusal else { continue };
            if self.refusals.get(&key) != Some(refusal) {
                let object = reference(&*planned.service);
                self.events
                    .event(&object, "Warning", "LoadBalancerPending", refusal.clone());
            }
            refusals.insert(key, refusal.clone());
        }
        self.refusals = refusals;
        for planned in planned {
            if shown(&planned.service) != planned.addresses {
                write_status(&self.client, &planned.service, &planned.addresses).await?;
            }
        }
        Ok(())
    }
}

async fn write_status(client: &Client, service: &Service, addresses: &[IpAddr]) -> Result<(), kube::Error> {
    let Key { namespace, name } = Key::of(service);
    let list: Vec<Value> = addresses
        .iter()
        .map(|address| json!({"ip": address, "ipMode": "VIP"}))
        .collect();
    let list = if list.is_empty() { Value::Null } else { list.into() };
    let patch = json!({"status": {"loadBalancer": {"ingress": list}}});
    let api: Api<Service> = Api::namespaced(client.clone(), &namespace);
    let written = api
        .patch_status(&name, &PatchParams::default(), &Patch::Merge(patch))
        .await;
    match written {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

fn shown(service: &Service) -> Vec<IpAddr> {
    let status = service
        .status
        .as_ref()
        .and_then(|status| status.load_balancer.as_ref());
    let entries = status
        .and_then(|balancer| balancer.ingress.as_ref())
        .into_iter()
        .flatten();
    entries
        .filter_map(|entry| entry.ip.as_deref()?.parse().ok())
        .collect()
}
