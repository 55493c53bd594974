//! The load balancer of clusters without a cloud: Services of type LoadBalancer are reached at the nodes' own addresses, or at
//! addresses of a pool, which `announce` makes known on the nodes' link. It writes their status, and the service proxy of
//! every node does the rest.
//!
//! Of several servers one leads and writes: addresses of a pool are given out once.

mod plan;
mod pool;

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Resource};
use serde_json::{Value, json};
use skiff_client::{
    Client, ErrorExt, EventRecorder, Informer, InformerFactory, Key, LeaderElector, reference,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

pub(crate) use plan::BalancerNode;
pub use plan::{NODE_CLASS, Reserved};
use plan::{Planned, Source, plan};
pub(crate) use pool::pool_addresses;
pub use pool::{POOL_CLASS, POOL_CONDITION, Range, RangeError};

const COMPONENT: &str = "skiff-load-balancer";
const SERVICE_NAME: &str = "kubernetes.io/service-name";
const SERVICE_INDEX: &str = "service";
/// Changes that come together are planned together.
const SETTLE: Duration = Duration::from_millis(20);
const MAX_RETRY: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, Default)]
pub struct BalancerConfig {
    pub reserved: Reserved,
    /// Addresses for Services; none: they get those of the nodes.
    pub pool: Vec<Range>,
    /// Who this server is among those that want to lead.
    pub identity: String,
}

/// Runs until `stop`.
pub async fn run(config: BalancerConfig, client: Client, stop: CancellationToken) {
    while !stop.is_cancelled() {
        let elector = LeaderElector::new("kube-system", COMPONENT, &config.identity);
        let lead = |leading| write_statuses(&config, client.clone(), leading);
        elector.run(client.clone(), lead, stop.clone()).await;
    }
}

async fn write_statuses(config: &BalancerConfig, client: Client, stop: CancellationToken) {
    // Informers end when another server leads.
    let ended = stop.child_token();
    let _end = ended.clone().drop_guard();
    let factory = InformerFactory::new(client.clone(), ended);
    let (services, nodes, slices) = (
        factory.informer::<Service>(),
        factory.informer::<Node>(),
        factory.informer::<EndpointSlice>(),
    );
    index_by_service(&slices);
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
        let all = nodes.list();
        let addresses = all.iter().flat_map(|node| {
            node.status
                .iter()
                .flat_map(|status| status.addresses.iter().flatten())
        });
        let addresses = addresses.filter_map(|entry| entry.address.parse().ok()).collect();
        let planned = plan(
            services.list(),
            &ready,
            &addresses,
            &config.reserved,
            &config.pool,
            |service| local_nodes(service, &slices),
        );
        match balancer.write(&planned).await {
            Ok(written) => {
                retry = Duration::ZERO;
                // An address that is given twice would be taken from one of the two again.
                let _ = tokio::time::timeout(MAX_RETRY, seen(&services, &changed, written)).await;
            }
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

pub(crate) fn wake<K: Resource + 'static>(informer: &Informer<K>, changed: &Arc<Notify>) {
    let changed = changed.clone();
    informer.subscribe(move |_| changed.notify_one());
}

pub(crate) fn index_by_service(slices: &Informer<EndpointSlice>) {
    slices.add_index(SERVICE_INDEX, |slice| service_of(slice).into_iter().collect());
}

fn service_of(slice: &EndpointSlice) -> Option<String> {
    let name = slice.metadata.labels.as_ref()?.get(SERVICE_NAME)?;
    Some(Key::new(slice.metadata.namespace.clone()?, name).to_string())
}

/// The nodes that have a ready endpoint of the Service, by the index of [`index_by_service`].
pub(crate) fn local_nodes(service: &Service, slices: &Informer<EndpointSlice>) -> BTreeSet<String> {
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
    /// Answers the versions that it wrote.
    async fn write(&mut self, planned: &[Planned]) -> Result<Vec<(Key, u64)>, kube::Error> {
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
        let mut written = Vec::new();
        for planned in planned {
            let condition = wanted_condition(planned);
            if shown(&planned.service) != planned.addresses
                || !has_condition(&planned.service, condition.as_ref())
            {
                written.extend(write_status(&self.client, planned, condition).await?);
            }
        }
        Ok(written)
    }
}

/// How nodes know that the addresses are the pool's.
fn wanted_condition(planned: &Planned) -> Option<(&'static str, &'static str, &str)> {
    match (planned.source, &planned.refusal) {
        (Source::Nodes, _) => None,
        (Source::Pool, None) => Some(("True", "Allocated", "")),
        (Source::Pool, Some(refusal)) => Some(("False", "Pending", refusal)),
    }
}

fn conditions_of(service: &Service) -> &[Condition] {
    let status = service.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_deref());
    conditions.unwrap_or_default()
}

fn has_condition(service: &Service, wanted: Option<&(&'static str, &'static str, &str)>) -> bool {
    let mut all = conditions_of(service).iter();
    let present = all.find(|condition| condition.type_ == POOL_CONDITION);
    let present = present.map(|condition| (&*condition.status, &*condition.reason, &*condition.message));
    present == wanted.copied()
}

async fn write_status(
    client: &Client,
    planned: &Planned,
    condition: Option<(&str, &str, &str)>,
) -> Result<Option<(Key, u64)>, kube::Error> {
    let (service, addresses) = (&*planned.service, &planned.addresses);
    let Key { namespace, name } = Key::of(service);
    let mut conditions: Vec<Condition> = conditions_of(service).to_vec();
    conditions.retain(|condition| condition.type_ != POOL_CONDITION);
    conditions.extend(condition.map(|(status, reason, message)| Condition {
        type_: POOL_CONDITION.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: Time(Timestamp::now()),
        observed_generation: service.metadata.generation,
    }));
    let list: Vec<Value> = addresses
        .iter()
        .map(|address| json!({"ip": address, "ipMode": "VIP"}))
        .collect();
    let list = if list.is_empty() { Value::Null } else { list.into() };
    // Not over what somebody else wrote meanwhile: conditions are a list.
    let patch = json!({"metadata": {"resourceVersion": service.metadata.resource_version},
        "status": {"loadBalancer": {"ingress": list}, "conditions": conditions}});
    let api: Api<Service> = Api::namespaced(client.clone(), &namespace);
    let written = api
        .patch_status(&name, &PatchParams::default(), &Patch::Merge(patch))
        .await;
    match written {
        Err(error) if !error.is_not_found() && !error.is_conflict() => Err(error),
        Err(_) => Ok(None),
        Ok(written) => Ok(version_of(&written).map(|version| (Key::of(service), version))),
    }
}

fn version_of(service: &Service) -> Option<u64> {
    service.metadata.resource_version.as_ref()?.parse().ok()
}

/// Returns when the informer shows what was written.
async fn seen(services: &Informer<Service>, changed: &Notify, written: Vec<(Key, u64)>) {
    if written.is_empty() {
        return;
    }
    for (key, version) in written {
        let is_old = || {
            let service = services.get(&key.namespace, &key.name);
            service.is_some_and(|service| version_of(&service).is_some_and(|shown| shown < version))
        };
        while is_old() {
            changed.notified().await;
        }
    }
    // Others may have changed meanwhile.
    changed.notify_one();
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
