//! The EndpointSlice controller: follows the readiness of a Service's pods into discovery/v1
//! EndpointSlices.
//!
//! Services without a selector are not its business; slices that others manage neither.

mod hints;
pub(crate) mod plan;
pub(crate) mod pod;
pub(crate) mod selectors;
pub(crate) mod trigger;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use parking_lot::Mutex;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Parts, Reconcile, reference, stage};

use crate::metrics::SliceMetrics;
use crate::node::{BY_NODE, by_node};
use crate::selector::matches_map;
use crate::{Context, Error, error_message, is_namespace_terminating};
use hints::{Capacity, ZoneCounts};
use plan::{CONTROLLER, MANAGED_BY, Observed, SERVICE_NAME};
use pod::{EndpointNode, EndpointPod};
use selectors::{Selectors, selects_pods};
use trigger::TriggerTimes;

const BY_SERVICE: &str = "service";

struct EndpointSlices {
    context: Context,
    services: Informer<Service>,
    pods: Informer<Pod>,
    endpoint_pods: Parts<Pod, EndpointPod>,
    nodes: Informer<Node>,
    endpoint_nodes: Parts<Node, EndpointNode>,
    slices: Informer<EndpointSlice>,
    selectors: Selectors,
    capacity: Mutex<Capacity>,
    /// The Services whose endpoints are shared out among zones, by address family.
    zone_counts: Mutex<HashMap<Key, BTreeMap<&'static str, ZoneCounts>>>,
    triggers: TriggerTimes,
    metrics: SliceMetrics,
}

fn by_service(slice: &EndpointSlice) -> Vec<String> {
    service_of(slice).map(|key| key.to_string()).into_iter().collect()
}

/// The Service of a slice that is ours to manage.
fn service_of(slice: &EndpointSlice) -> Option<Key> {
    let labels = slice.metadata.labels.as_ref()?;
    if labels.get(MANAGED_BY).map(String::as_str) != Some(CONTROLLER) {
        return None;
    }
    let name = labels.get(SERVICE_NAME)?;
    Some(Key::new(
        slice.metadata.namespace.clone().unwrap_or_default(),
        name.clone(),
    ))
}

pub(crate) async fn run(context: Context) {
    let pods: Informer<Pod> = context.informers.informer();
    let nodes: Informer<Node> = context.informers.informer();
    let reconciler = Arc::new(EndpointSlices {
        services: context.informers.informer(),
        endpoint_pods: pods.parts(EndpointPod::of),
        endpoint_nodes: nodes.parts(EndpointNode::of),
        pods,
        nodes,
        slices: context.informers.informer(),
        selectors: Selectors::default(),
        capacity: Mutex::default(),
        zone_counts: Mutex::default(),
        triggers: TriggerTimes::default(),
        metrics: SliceMetrics::new(context.metrics()),
        context: context.clone(),
    });
    reconciler.slices.add_index(BY_SERVICE, by_service);
    reconciler.pods.add_index(BY_NODE, by_node);
    context
        .controller("endpoint_slice", reconciler)
        .workers(context.workers())
        .watches(|r| &r.services, |r, change| r.selectors.follow(change))
        .watches(|r| &r.pods, |r, change| r.selectors.woken_by_pod(change))
        .watches(|r| &r.nodes, EndpointSlices::woken_by_node)
        .watches_own(|r| &r.slices, |_, change| woken_by_slice(change))
        .run()
        .await;
}

/// The Service of a slice, and the one that it was taken from.
fn woken_by_slice(change: &Change<EndpointSlice>) -> BTreeSet<Key> {
    let mut keys: BTreeSet<Key> = service_of(change.object()).into_iter().collect();
    if let Change::Applied { old: Some(old), .. } = change {
        keys.extend(service_of(old));
    }
    keys
}

impl EndpointSlices {
    /// A node that appears, or moves to another zone, changes the endpoints of the pods on it; its CPUs change what is
    /// meant for which zone.
    fn woken_by_node(&self, change: &Change<Node>) -> BTreeSet<Key> {
        let name = change.object().metadata.name.as_deref().unwrap_or_default();
        let node = match change {
            Change::Applied { new, .. } => Some(&**new),
            Change::Deleted { .. } => None,
        };
        let mut woken = BTreeSet::new();
        if self.capacity.lock().set(name, node) {
            woken.extend(self.overloaded());
        }
        let zone = |node: &Node| {
            let labels = node.metadata.labels.as_ref();
            labels.and_then(|labels| labels.get(plan::ZONE)).cloned()
        };
        if let Change::Applied { old, new } = change
            && old.as_ref().is_none_or(|old| zone(old) != zone(new))
        {
            let pods = self.pods.by_index(BY_NODE, name);
            woken.extend(pods.iter().flat_map(|pod| self.selectors.services_of(pod)));
        }
        woken
    }

    /// The Services with too few endpoints for some zone.
    fn overloaded(&self) -> Vec<Key> {
        let zone_counts = self.zone_counts.lock();
        if zone_counts.is_empty() {
            return Vec::new();
        }
        let ratios = self.capacity.lock().ratios();
        let overloaded = zone_counts.iter().filter(|(_, counts)| {
            let mut counts = counts.values();
            counts.any(|counts| hints::is_overloaded(counts, ratios.as_deref()))
        });
        overloaded.map(|(key, _)| key.clone()).collect()
    }

    /// A slice that is not found again by its Service would be made anew at each look, without end: it is deleted, and
    /// the next try comes with back-off.
    async fn check_is_ours(
        &self,
        api: &Api<EndpointSlice>,
        key: &Key,
        written: &EndpointSlice,
    ) -> Result<(), Error> {
        if service_of(written).as_ref() == Some(key) {
            return Ok(());
        }
        let name = written.metadata.name.as_deref().unwrap_or_default();
        match api.delete(name, &DeleteParams::default()).await {
            Err(error) if !error.is_not_found() => return Err(error.into()),
            _ => {}
        }
        Err(Error::Other(format!(
            "admission changes the labels of EndpointSlice {name}"
        )))
    }

    async fn write(&self, key: &Key, plan: &plan::Plan) -> Result<(), Error> {
        let api: Api<EndpointSlice> = Api::namespaced(self.context.client.clone(), &key.namespace);
        for slice in &plan.create {
            match api.create(&PostParams::default(), slice).await {
                Ok(created) => {
                    self.metrics.changed("create");
                    self.check_is_ours(&api, key, &created).await?;
                }
                Err(error) if is_namespace_terminating(&error) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        for slice in &plan.update {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            let replaced = api.replace(name, &PostParams::default(), slice).await?;
            self.metrics.changed("update");
            self.check_is_ours(&api, key, &replaced).await?;
        }
        for name in &plan.delete {
            match api.delete(name, &DeleteParams::default()).await {
                Ok(_) => self.metrics.changed("delete"),
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl Reconcile for EndpointSlices {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let synced = self.sync(key).await;
        self.metrics.synced(synced.is_ok());
        synced
    }
}

impl EndpointSlices {
    async fn sync(&self, key: Key) -> Result<Action, Error> {
        let Some(service) = self.services.get(&key.namespace, &key.name) else {
            // The garbage collector removes the slices.
            self.zone_counts.lock().remove(&key);
            self.triggers.forget(&key);
            return Ok(Action::Done);
        };
        if !selects_pods(&service) {
            return Ok(Action::Done);
        }
        let existing = self.slices.by_index(BY_SERVICE, &key.to_string());
        let selector = service
            .spec
            .as_ref()
            .and_then(|spec| spec.selector.clone())
            .unwrap_or_default();
        let selected = self
            .endpoint_pods
            .list_labelled(&key.namespace, |labels| matches_map(&selector, labels));
        // A slice that is being deleted by someone else must not be counted on.
        let existing: Vec<Arc<EndpointSlice>> = existing
            .into_iter()
            .filter(|slice| slice.metadata.deletion_timestamp.is_none())
            .collect();
        let ratios = self.capacity.lock().ratios();
        let had_hints = self.zone_counts.lock().contains_key(&key);
        let plan = plan::plan(&Observed {
            service: &service,
            pods: &selected,
            node: &|name| self.endpoint_nodes.get("", name),
            existing: &existing,
            ratios: ratios.as_deref(),
            had_hints,
            trigger: self.triggers.observe(&key, &service, &selected),
        });
        if plan.zone_counts.is_empty() {
            self.zone_counts.lock().remove(&key);
        } else {
            self.zone_counts
                .lock()
                .insert(key.clone(), plan.zone_counts.clone());
        }
        let outcome = stage("write slices", self.write(&key, &plan)).await;
        let about = reference(&*service);
        for (is_warning, reason, message) in &plan.events {
            let kind = if *is_warning { "Warning" } else { "Normal" };
            self.context.events.event(&about, kind, reason, message.clone());
        }
        let mut failures: Vec<String> = plan
            .skipped
            .iter()
            .map(|(pod, node)| format!("skipping Pod {pod} for Service {key}: Node {node} Not Found"))
            .collect();
        match &outcome {
            Err(Error::Api(error)) if is_namespace_terminating(error) || error.is_conflict() => {}
            Err(Error::Api(error)) => failures.push(error_message(error)),
            Err(error) => failures.push(error.to_string()),
            Ok(()) => {}
        }
        if !failures.is_empty() {
            let failures = failures.join(", ");
            let message = format!("Error updating Endpoint Slices for Service {key}: {failures}");
            let reason = "FailedToUpdateEndpointSlices";
            self.context.events.event(&about, "Warning", reason, message);
        }
        // A pod whose node is not known comes in when the node does.
        outcome.map(|()| Action::Done)
    }
}
