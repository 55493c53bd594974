//! The node lifecycle controller: a node that falls silent becomes Unknown, its conditions become taints,
//! and its pods are no longer ready.
//!
//! Silence is measured by our own clock, from the moment a heartbeat was seen; the node's clock only tells
//! that there was a new one. How fast nodes get the taints that evict pods depends on their zone (see `zones`).

mod plan;
mod zones;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use kube::Api;
use kube::api::{Patch, PatchParams};
use parking_lot::Mutex;
use serde_json::json;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile, reference};
use skiff_prometheus::{Counter, Family};
use tokio::time::Instant;

use super::{BY_NODE, by_node, condition, node_reference};
use crate::metrics::node_evictions;
use crate::{Context, Error, pods};
use plan::NoExecute;
use zones::{ZoneCount, Zones};

pub use zones::EvictionRates;

/// What was last heard of a node.
#[derive(Default)]
struct Heard {
    at: Option<Instant>,
    heartbeat: Option<Timestamp>,
    renewed: Option<MicroTime>,
    /// Its pods have yet to be marked as not ready.
    marking: bool,
}

/// Lock order: `heard` before `zones`.
struct Nodes {
    context: Context,
    nodes: Informer<Node>,
    pods: Informer<Pod>,
    leases: Informer<Lease>,
    heard: Mutex<HashMap<String, Heard>>,
    zones: Mutex<Zones>,
    /// Whether all zones were disrupted when nodes were last woken for it.
    halted: Mutex<bool>,
    evictions: Arc<Family<Counter>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Work {
    Node(String),
    /// A pod that was bound to a node that is not ready.
    Pod(Key),
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Nodes {
        nodes: context.informers.informer(),
        pods: context.informers.informer(),
        leases: context.informers.namespaced("kube-node-lease", None),
        heard: Mutex::default(),
        zones: Mutex::new(Zones::new(context.config.eviction_rates)),
        halted: Mutex::new(false),
        evictions: node_evictions(context.metrics()),
        context: context.clone(),
    });
    reconciler.pods.add_index(BY_NODE, by_node);
    reconciler.show_zones();
    context
        .controller("node_lifecycle_controller", reconciler)
        .workers(8)
        .watches(|r| &r.leases, Nodes::woken_by_lease)
        .watches(|r| &r.nodes, Nodes::woken_by_node)
        .watches(|r| &r.pods, Nodes::woken_by_pod)
        .run()
        .await;
}

impl Nodes {
    /// The gauges of the zones, read from what is known of them for as long as this controller runs.
    fn show_zones(self: &Arc<Self>) {
        let show = |name: &'static str, help: &'static str, value: fn(&ZoneCount) -> f64| {
            let nodes = Arc::downgrade(self);
            let read = move || {
                let counts = nodes.upgrade().map(|nodes| nodes.zones.lock().counts());
                let counts = counts.into_iter().flatten();
                counts.map(|(zone, count)| (vec![zone], value(&count))).collect()
            };
            self.context.metrics().read_gauges(name, help, &["zone"], read);
        };
        show(
            "node_collector_zone_health",
            "Percentage of healthy nodes, by zone.",
            ZoneCount::health,
        );
        show(
            "node_collector_zone_size",
            "Number of registered nodes, by zone.",
            |count| count.nodes as f64,
        );
        show(
            "node_collector_unhealthy_nodes_in_zone",
            "Number of nodes that are not ready, by zone.",
            |count| count.not_ready as f64,
        );
    }

    /// A renewed lease is a sign of life; what follows from silence is seen when the grace is over.
    fn woken_by_lease(&self, change: &Change<Lease>) -> Option<Work> {
        let Change::Applied { new: lease, .. } = change else {
            return None;
        };
        let name = lease.metadata.name.clone()?;
        let renewed = lease.spec.as_ref().and_then(|spec| spec.renew_time.clone());
        let mut all = self.heard.lock();
        let heard = all.entry(name).or_default();
        if heard.renewed != renewed {
            heard.renewed = renewed;
            heard.at = Some(Instant::now());
        }
        None
    }

    fn woken_by_node(&self, change: &Change<Node>) -> Vec<Work> {
        let node = change.object();
        let name = node.metadata.name.clone().unwrap_or_default();
        match change {
            Change::Deleted { .. } => {
                self.heard.lock().remove(&name);
                self.zones.lock().remove(&name);
                let message = format!("Node {name} event: Removing Node {name} from Controller");
                self.context
                    .events
                    .event(&node_reference(node), "Normal", "RemovingNode", message);
            }
            Change::Applied { old, .. } => {
                if old.is_none() {
                    let message = format!("Node {name} event: Registered Node {name} in Controller");
                    self.context
                        .events
                        .event(&node_reference(node), "Normal", "RegisteredNode", message);
                }
                // Shown as zero before the first one.
                self.evictions.with(&[&zones::label(&zones::zone_of(node))]);
                self.hear(&name, node);
                self.zones.lock().set(node);
            }
        }
        if self.halt_changed() {
            return self.zones.lock().names().into_iter().map(Work::Node).collect();
        }
        vec![Work::Node(name)]
    }

    fn hear(&self, name: &str, node: &Node) {
        let ready = condition(node, "Ready");
        let heartbeat = ready
            .and_then(|ready| ready.last_heartbeat_time.as_ref())
            .map(|time| time.0);
        let mut all = self.heard.lock();
        let heard = all.entry(name.to_owned()).or_default();
        // A kubelet that has never reported is silent since its node was made.
        if ready.is_some() && (heard.at.is_none() || heard.heartbeat != heartbeat) {
            heard.heartbeat = heartbeat;
            heard.at = Some(Instant::now());
        }
    }

    /// True if evictions have to stop for all nodes, or may go on.
    fn halt_changed(&self) -> bool {
        let halt = self.zones.lock().all_disrupted();
        let mut halted = self.halted.lock();
        if *halted == halt {
            return false;
        }
        *halted = halt;
        drop(halted);
        if halt {
            tracing::info!("no node is ready: evictions stop");
        } else {
            tracing::info!("nodes are ready again: evictions go on");
            // It may have been us who heard nothing: every node gets its grace again.
            let now = Instant::now();
            self.heard
                .lock()
                .values_mut()
                .for_each(|heard| heard.at = Some(now));
        }
        true
    }

    /// A pod that is bound to a node that is not ready is not ready either, whatever its status says.
    fn woken_by_pod(&self, change: &Change<Pod>) -> Option<Work> {
        let Change::Applied { old, new } = change else {
            return None;
        };
        let node = pods::node_name(new);
        if node.is_empty() || self.zones.lock().is_ready(node) != Some(false) || !pods::is_ready(new) {
            return None;
        }
        let bound_before = old.as_ref().is_some_and(|old| pods::node_name(old) == node);
        (!bound_before).then(|| Work::Pod(Key::of(&**new)))
    }
}

impl Reconcile for Nodes {
    type Key = Work;
    type Error = Error;

    async fn reconcile(&self, work: Work) -> Result<Action, Error> {
        match work {
            Work::Node(name) => self.look_at(&name).await,
            Work::Pod(key) => {
                let pod = self.pods.get(&key.namespace, &key.name);
                if let Some(pod) = pod
                    && self.zones.lock().is_ready(pods::node_name(&pod)) == Some(false)
                {
                    self.mark_not_ready(&pod, Timestamp::now()).await?;
                }
                Ok(Action::Done)
            }
        }
    }
}

impl Nodes {
    async fn look_at(&self, name: &str) -> Result<Action, Error> {
        let Some(node) = self.nodes.get("", name) else {
            return Ok(Action::Done);
        };
        let now = Timestamp::now();
        let config = &self.context.config;
        let grace = match condition(&node, "Ready") {
            Some(_) => config.node_monitor_grace_period,
            None => config.node_startup_grace_period,
        };
        let silent_for = self.silent_for(name, &node, now);
        let mut node = (*node).clone();
        let api: Api<Node> = Api::all(self.context.client.clone());
        if silent_for >= grace {
            let conditions = plan::silent_conditions(&node, now);
            if !conditions.is_empty() {
                let was_ready = condition(&node, "Ready").is_some_and(|ready| ready.status == "True");
                let patch = json!({"status": {"conditions": conditions}});
                match api
                    .patch_status(name, &PatchParams::default(), &Patch::Strategic(patch))
                    .await
                {
                    Ok(patched) => node = patched,
                    Err(error) if error.is_not_found() => return Ok(Action::Done),
                    Err(error) => return Err(error.into()),
                }
                // Known here before the event comes: it may be the last node that was ready.
                self.zones.lock().set(&node);
                if was_ready {
                    let message = format!("Node {name} status is now: NodeNotReady");
                    self.context
                        .events
                        .event(&node_reference(&node), "Normal", "NodeNotReady", message);
                    self.heard.lock().entry(name.to_owned()).or_default().marking = true;
                }
            }
        }
        // Whatever happens, look again when the grace would be over, or soon while it is.
        let mut wait = grace.saturating_sub(silent_for).max(config.node_monitor_period);
        let no_execute = self.eviction(&node, &mut wait);
        let written = self.write(&api, name, &node, no_execute, now).await?;
        if written && no_execute == NoExecute::Add {
            let zone = zones::label(&zones::zone_of(&node));
            self.evictions.with(&[&zone]).inc();
        }
        self.mark_pods(name, now).await?;
        Ok(Action::RequeueAfter(wait))
    }

    fn silent_for(&self, name: &str, node: &Node, now: Timestamp) -> Duration {
        if let Some(at) = self.heard.lock().get(name).and_then(|heard| heard.at) {
            return at.elapsed();
        }
        let created = node.metadata.creation_timestamp.as_ref();
        let age = created.map(|created| now.duration_since(created.0));
        age.and_then(|age| Duration::try_from(age).ok())
            .unwrap_or_default()
    }

    /// Whether the node may be given the taint that evicts its pods; `wait` becomes shorter if that has to wait.
    fn eviction(&self, node: &Node, wait: &mut Duration) -> NoExecute {
        let mut zones = self.zones.lock();
        if zones.all_disrupted() {
            return NoExecute::Remove;
        }
        if plan::eviction_taint(node).is_none() || plan::is_evicted(node) {
            return NoExecute::Hold;
        }
        match zones.may_taint(&zones::zone_of(node), Instant::now()) {
            Ok(()) => NoExecute::Add,
            Err(delay) => {
                *wait = (*wait).min(delay.unwrap_or(self.context.config.node_monitor_period));
                NoExecute::Hold
            }
        }
    }

    /// Brings taints and labels to what they should be. False if there was nothing to write.
    async fn write(
        &self,
        api: &Api<Node>,
        name: &str,
        node: &Node,
        no_execute: NoExecute,
        now: Timestamp,
    ) -> Result<bool, Error> {
        let present = node
            .spec
            .as_ref()
            .and_then(|spec| spec.taints.clone())
            .unwrap_or_default();
        let wanted = plan::plan_taints(node, no_execute, now);
        let labels = plan::label_repairs(node);
        if wanted == present && labels.is_empty() {
            return Ok(false);
        }
        // The list is replaced whole, so it must be the list we know.
        let version = node.metadata.resource_version.clone();
        let mut patch = json!({"metadata": {"resourceVersion": version, "labels": labels}});
        if wanted != present {
            let taints = (!wanted.is_empty()).then_some(wanted);
            patch["spec"] = json!({"taints": taints});
        }
        match api
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
        {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Pods of a node that has fallen silent must not get traffic.
    async fn mark_pods(&self, name: &str, now: Timestamp) -> Result<(), Error> {
        let marking = self.heard.lock().get(name).is_some_and(|heard| heard.marking);
        if !marking {
            return Ok(());
        }
        for pod in self.pods.by_index(BY_NODE, name) {
            self.mark_not_ready(&pod, now).await?;
        }
        if let Some(heard) = self.heard.lock().get_mut(name) {
            heard.marking = false;
        }
        Ok(())
    }

    async fn mark_not_ready(&self, pod: &Pod, now: Timestamp) -> Result<(), Error> {
        if !pods::is_ready(pod) {
            return Ok(());
        }
        let (namespace, name) = (
            pod.metadata.namespace.as_deref().unwrap_or_default(),
            pod.metadata.name.as_deref().unwrap_or_default(),
        );
        let patch = json!({"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [
            {"type": "Ready", "status": "False", "lastTransitionTime": Time(now)}]}});
        let api: Api<Pod> = Api::namespaced(self.context.client.clone(), namespace);
        match api
            .patch_status(name, &PatchParams::default(), &Patch::Strategic(patch))
            .await
        {
            Ok(_) => {
                let about = reference(pod);
                self.context
                    .events
                    .event(&about, "Warning", "NodeNotReady", "Node is not ready".into());
                Ok(())
            }
            // It was replaced by another pod of its name.
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
