//! The EndpointSlice controller: follows the readiness of a Service's pods into discovery/v1
//! EndpointSlices.
//!
//! Services without a selector are not its business; slices that others manage neither.

pub(crate) mod plan;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use parking_lot::Mutex;
use skiff_client::{
    Action, Cause, Change, ErrorExt, Informer, Key, WorkQueue, cause_of, reference, run_workers, stage,
};

use tokio::time::Instant;

use crate::node::{BY_NODE, by_node};
use crate::selector::matches_map;
use crate::{Context, Error, Written, error_message, is_namespace_terminating, wait_for_copy};
use plan::{CONTROLLER, MANAGED_BY, SERVICE_NAME};

const BY_SERVICE: &str = "service";
/// A slice that was deleted before its creation was seen never comes; after this long it is given up.
const NEVER_SEEN: Duration = Duration::from_secs(10);

struct Controller {
    context: Context,
    services: Informer<Service>,
    pods: Informer<Pod>,
    nodes: Informer<Node>,
    slices: Informer<EndpointSlice>,
    queue: Arc<WorkQueue>,
    written: Written,
    /// Slices that were made but are not in the copy yet, by Service, and when they were made.
    created: Mutex<HashMap<Key, HashMap<Key, Instant>>>,
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

/// True if the Service's endpoints are made from pods.
pub(crate) fn selects_pods(service: &Service) -> bool {
    let spec = service.spec.as_ref();
    spec.is_some_and(|spec| {
        spec.type_.as_deref() != Some("ExternalName")
            && spec
                .selector
                .as_ref()
                .is_some_and(|selector| !selector.is_empty())
    })
}

/// The Services whose selector takes the pod.
pub(crate) fn services_of(services: &Informer<Service>, pod: &Pod) -> BTreeSet<Key> {
    let all = services.list_namespaced(pod.metadata.namespace.as_deref().unwrap_or_default());
    let selecting = all.iter().filter(|service| {
        selects_pods(service)
            && service
                .spec
                .as_ref()
                .and_then(|spec| spec.selector.as_ref())
                .is_some_and(|selector| matches_map(selector, pod.metadata.labels.as_ref()))
    });
    selecting.map(|service| Key::of(&**service)).collect()
}

/// True if something changed that an endpoint shows.
pub(crate) fn endpoint_changed(old: &Pod, new: &Pod) -> bool {
    let shown = |pod: &Pod| {
        let status = pod.status.as_ref();
        (
            pod.metadata.deletion_timestamp.is_some(),
            crate::pods::is_ready(pod),
            crate::pods::is_terminal(pod),
            crate::pods::node_name(pod).to_owned(),
            status.and_then(|status| status.pod_ip.clone()),
            status.and_then(|status| status.pod_ips.clone()),
            pod.metadata.labels.clone(),
        )
    };
    shown(old) != shown(new)
        || old.spec.as_ref().map(|spec| (&spec.hostname, &spec.subdomain))
            != new.spec.as_ref().map(|spec| (&spec.hostname, &spec.subdomain))
}

/// Wakes the Services that a change of a pod touches, those it no longer belongs to as well.
pub(crate) fn wake_services(
    services: &Informer<Service>,
    queue: &WorkQueue,
    change: &Change<Pod>,
    cause: Option<Cause>,
) {
    let mut keys = services_of(services, change.object());
    if let Change::Applied { old: Some(old), new } = change {
        if !endpoint_changed(old, new) {
            return;
        }
        keys.extend(services_of(services, old));
    }
    for key in keys {
        queue.add(key, cause.clone());
    }
}

pub(crate) async fn run(context: Context) {
    let controller = Arc::new(Controller {
        services: context.informers.informer(),
        pods: context.informers.informer(),
        nodes: context.informers.informer(),
        slices: context.informers.informer(),
        queue: context.queue("endpoint_slice"),
        written: Written::default(),
        created: Default::default(),
        context: context.clone(),
    });
    controller.slices.add_index(BY_SERVICE, by_service);
    controller.pods.add_index(BY_NODE, by_node);
    let queue = controller.queue.clone();
    controller.services.subscribe(move |change: &Change<Service>| {
        let object = change.object();
        queue.add(Key::of(&**object), Some(cause_of(&**object)));
    });
    // Pods that were there before are found through their Services, once those are in.
    controller.services.synced().await;
    let watcher = controller.clone();
    controller.pods.subscribe(move |change| {
        let cause = Some(cause_of(&**change.object()));
        wake_services(&watcher.services, &watcher.queue, change, cause);
    });
    let watcher = controller.clone();
    controller
        .slices
        .subscribe(move |change| watcher.slice_changed(change));
    let watcher = controller.clone();
    controller.nodes.subscribe(move |change| {
        if let Change::Applied { old, new } = change {
            watcher.node_changed(old.as_deref(), new);
        }
    });
    controller.pods.synced().await;
    controller.nodes.synced().await;
    controller.slices.synced().await;
    let queue = controller.queue.clone();
    run_workers(context.name, 5, queue, context.shutdown.clone(), move |key| {
        let controller = controller.clone();
        async move { controller.reconcile(key).await }
    })
    .await;
}

impl Controller {
    fn slice_changed(&self, change: &Change<EndpointSlice>) {
        let slice = change.object();
        let key = Key::of(&**slice);
        if let Some(service) = service_of(slice) {
            if let Some(waiting) = self.created.lock().get_mut(&service) {
                waiting.remove(&key);
            }
            if matches!(change, Change::Deleted { .. }) {
                self.written.forget(&key);
            }
            // Our own writes come back here too: they end a wait, and cost no more than a look. They are no
            // cause: what is written next is written for the pod that waits.
            self.queue.add(service, None);
        }
        if let Change::Applied { old: Some(old), .. } = change
            && let Some(before) = service_of(old)
            && service_of(slice).as_ref() != Some(&before)
        {
            self.queue.add(before, Some(cause_of(&**slice)));
        }
    }

    /// A node that appears, or moves to another zone, changes the endpoints of the pods on it.
    fn node_changed(&self, old: Option<&Node>, new: &Node) {
        let zone = |node: &Node| {
            node.metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get("topology.kubernetes.io/zone"))
                .cloned()
        };
        if old.is_some_and(|old| zone(old) == zone(new)) {
            return;
        }
        let name = new.metadata.name.as_deref().unwrap_or_default();
        for pod in self.pods.by_index(BY_NODE, name) {
            for key in services_of(&self.services, &pod) {
                self.queue.add(key, Some(cause_of(new)));
            }
        }
    }

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(service) = self.services.get(&key.namespace, &key.name) else {
            // The garbage collector removes the slices.
            self.created.lock().remove(&key);
            return Ok(Action::Done);
        };
        if !selects_pods(&service) {
            return Ok(Action::Done);
        }
        // Asked before the slices are read: what arrives in between only makes the copy fresher.
        if self.awaits_created(&key) {
            return wait_for_copy();
        }
        let existing = self.slices.by_index(BY_SERVICE, &key.to_string());
        for slice in &existing {
            if !self
                .written
                .is_seen(&Key::of(&**slice), slice.metadata.resource_version.as_deref())
            {
                return wait_for_copy();
            }
        }
        let selector = service
            .spec
            .as_ref()
            .and_then(|spec| spec.selector.clone())
            .unwrap_or_default();
        let selected: Vec<Arc<Pod>> = self
            .pods
            .list_labelled(&key.namespace, |labels| matches_map(&selector, labels));
        // A slice that is being deleted by someone else must not be counted on.
        let existing: Vec<Arc<EndpointSlice>> = existing
            .into_iter()
            .filter(|slice| slice.metadata.deletion_timestamp.is_none())
            .collect();
        let plan = plan::plan(&service, &selected, &|name| self.nodes.get("", name), &existing);
        let outcome = stage("write slices", self.write(&key, &plan)).await;
        if let Err(Error::Api(error)) = &outcome {
            let message = format!(
                "Error updating Endpoint Slices for Service {key}: {}",
                error_message(error)
            );
            if !is_namespace_terminating(error) && !error.is_conflict() {
                self.context.events.event(
                    &reference(&*service),
                    "Warning",
                    "FailedToUpdateEndpointSlices",
                    message,
                );
            }
        }
        outcome?;
        if plan.skipped.is_empty() {
            return Ok(Action::Done);
        }
        // Woken by the node when it appears.
        tracing::debug!(service = %key, pods = ?plan.skipped, "endpoints left out: their node is not known");
        Ok(Action::Done)
    }

    fn awaits_created(&self, service: &Key) -> bool {
        let mut created = self.created.lock();
        let Some(waiting) = created.get_mut(service) else {
            return false;
        };
        waiting.retain(|_, made| made.elapsed() < NEVER_SEEN);
        !waiting.is_empty()
    }

    async fn write(&self, key: &Key, plan: &plan::Plan) -> Result<(), Error> {
        let api: Api<EndpointSlice> = Api::namespaced(self.context.client.clone(), &key.namespace);
        for slice in &plan.create {
            match api.create(&PostParams::default(), slice).await {
                Ok(created) => {
                    let slice_key = Key::of(&created);
                    // The event may have come before the answer.
                    if self.slices.get(&slice_key.namespace, &slice_key.name).is_none() {
                        self.created
                            .lock()
                            .entry(key.clone())
                            .or_default()
                            .insert(slice_key.clone(), Instant::now());
                        if self.slices.get(&slice_key.namespace, &slice_key.name).is_some()
                            && let Some(waiting) = self.created.lock().get_mut(key)
                        {
                            waiting.remove(&slice_key);
                        }
                    }
                }
                Err(error) if is_namespace_terminating(&error) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        for slice in &plan.update {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            let updated = api.replace(name, &PostParams::default(), slice).await?;
            self.written
                .note(&Key::of(&updated), updated.metadata.resource_version.as_deref());
        }
        for name in &plan.delete {
            match api.delete(name, &DeleteParams::default()).await {
                Ok(_) => {}
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}
