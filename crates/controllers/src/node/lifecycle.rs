//! The node lifecycle controller: a node that falls silent becomes Unknown, its conditions become taints,
//! and its pods are no longer ready.
//!
//! Silence is measured by our own clock, from the moment a heartbeat was seen; the node's clock only tells
//! that there was a new one. Nodes are judged one by one: there is no slowing down when a zone fails.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use kube::Api;
use kube::api::{Patch, PatchParams};
use parking_lot::Mutex;
use serde_json::json;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile, reference};
use tokio::time::Instant;

use super::{BY_NODE, by_node, condition, node_reference};
use crate::{Context, Error, pods};

const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

/// Condition, the status that is bad, and the taint that says so.
const CONDITION_TAINTS: &[(&str, &str, &str)] = &[
    ("Ready", "False", NOT_READY),
    ("Ready", "Unknown", UNREACHABLE),
    ("MemoryPressure", "True", "node.kubernetes.io/memory-pressure"),
    ("DiskPressure", "True", "node.kubernetes.io/disk-pressure"),
    ("PIDPressure", "True", "node.kubernetes.io/pid-pressure"),
    (
        "NetworkUnavailable",
        "True",
        "node.kubernetes.io/network-unavailable",
    ),
];

/// What was last heard of a node.
#[derive(Default)]
struct Heard {
    at: Option<Instant>,
    heartbeat: Option<Timestamp>,
    renewed: Option<MicroTime>,
    was_ready: bool,
}

struct Nodes {
    context: Context,
    nodes: Informer<Node>,
    pods: Informer<Pod>,
    leases: Informer<Lease>,
    heard: Mutex<HashMap<String, Heard>>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Nodes {
        nodes: context.informers.informer(),
        pods: context.informers.informer(),
        leases: context.informers.namespaced("kube-node-lease", None),
        heard: Mutex::default(),
        context: context.clone(),
    });
    reconciler.pods.add_index(BY_NODE, by_node);
    context
        .controller("node_lifecycle_controller", reconciler)
        .workers(8)
        .watches(|r| &r.leases, Nodes::woken_by_lease)
        .watches(|r| &r.nodes, Nodes::woken_by_node)
        .reads(|r| &r.pods)
        .run()
        .await;
}

/// The taints a node should have: those of others as they are, ours by its conditions.
pub(crate) fn plan_taints(node: &Node, now: Timestamp) -> Vec<Taint> {
    let present = node
        .spec
        .as_ref()
        .and_then(|spec| spec.taints.clone())
        .unwrap_or_default();
    let status_of = |type_: &str| condition(node, type_).map(|condition| condition.status.clone());
    let ready = status_of("Ready");
    let mut wanted: Vec<(&str, &str)> = Vec::new();
    for (type_, bad, key) in CONDITION_TAINTS {
        if status_of(type_).as_deref() == Some(*bad) {
            wanted.push((key, "NoSchedule"));
        }
    }
    match ready.as_deref() {
        Some("False") => wanted.push((NOT_READY, "NoExecute")),
        Some("Unknown") => wanted.push((UNREACHABLE, "NoExecute")),
        Some(_) => {}
        // It has not reported yet: nothing may be scheduled there, but nothing needs to leave.
        None => wanted.push((NOT_READY, "NoSchedule")),
    }
    if node
        .spec
        .as_ref()
        .and_then(|spec| spec.unschedulable)
        .unwrap_or(false)
    {
        wanted.push((UNSCHEDULABLE, "NoSchedule"));
    }
    let is_ours = |taint: &Taint| {
        let by_condition = CONDITION_TAINTS.iter().any(|(_, _, key)| *key == taint.key);
        match taint.effect.as_str() {
            "NoSchedule" => by_condition || taint.key == UNSCHEDULABLE,
            "NoExecute" => taint.key == NOT_READY || taint.key == UNREACHABLE,
            _ => false,
        }
    };
    let is_wanted = |taint: &Taint| wanted.contains(&(taint.key.as_str(), taint.effect.as_str()));
    let mut taints: Vec<Taint> = present
        .iter()
        .filter(|taint| !is_ours(taint) || is_wanted(taint))
        .cloned()
        .collect();
    for (key, effect) in wanted {
        if !taints
            .iter()
            .any(|taint| taint.key == key && taint.effect == effect)
        {
            taints.push(Taint {
                key: key.into(),
                effect: effect.into(),
                time_added: Some(Time(now)),
                value: None,
            });
        }
    }
    taints
}

/// The conditions of a node that has fallen silent; empty if it shows them already.
fn silent_conditions(node: &Node, now: Timestamp) -> Vec<NodeCondition> {
    let mut changed = Vec::new();
    for type_ in ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"] {
        match condition(node, type_) {
            None => changed.push(NodeCondition {
                type_: type_.into(),
                status: "Unknown".into(),
                reason: Some("NodeStatusNeverUpdated".into()),
                message: Some("Kubelet never posted node status.".into()),
                last_heartbeat_time: node.metadata.creation_timestamp.clone(),
                last_transition_time: Some(Time(now)),
            }),
            Some(present) if present.status != "Unknown" => changed.push(NodeCondition {
                status: "Unknown".into(),
                reason: Some("NodeStatusUnknown".into()),
                message: Some("Kubelet stopped posting node status.".into()),
                last_transition_time: Some(Time(now)),
                ..present.clone()
            }),
            Some(_) => {}
        }
    }
    changed
}

impl Nodes {
    /// A renewed lease is a sign of life; what follows from silence is seen when the grace is over.
    fn woken_by_lease(&self, change: &Change<Lease>) -> Option<Key> {
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

    fn woken_by_node(&self, change: &Change<Node>) -> [Key; 1] {
        self.node_seen(change);
        [Key::of(&**change.object())]
    }

    fn node_seen(&self, change: &Change<Node>) {
        let node = change.object();
        let name = node.metadata.name.clone().unwrap_or_default();
        let mut all = self.heard.lock();
        if matches!(change, Change::Deleted { .. }) {
            all.remove(&name);
            let message = format!("Node {name} event: Removing Node {name} from Controller");
            self.context
                .events
                .event(&node_reference(&name), "Normal", "RemovingNode", message);
            return;
        }
        if matches!(change, Change::Applied { old: None, .. }) {
            let message = format!("Node {name} event: Registered Node {name} in Controller");
            self.context
                .events
                .event(&node_reference(&name), "Normal", "RegisteredNode", message);
        }
        let heartbeat = condition(node, "Ready")
            .and_then(|ready| ready.last_heartbeat_time.as_ref())
            .map(|time| time.0);
        let heard = all.entry(name).or_default();
        if heard.at.is_none() || heard.heartbeat != heartbeat {
            heard.heartbeat = heartbeat;
            heard.at = Some(Instant::now());
        }
    }
}

impl Reconcile for Nodes {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let name = key.name.as_str();
        let Some(node) = self.nodes.get("", name) else {
            return Ok(Action::Done);
        };
        let now = Timestamp::now();
        let config = &self.context.config;
        let grace = match condition(&node, "Ready") {
            Some(_) => config.node_monitor_grace_period,
            None => config.node_startup_grace_period,
        };
        let silent_for = {
            let all = self.heard.lock();
            all.get(name)
                .and_then(|heard| heard.at)
                .map_or(Duration::ZERO, |at| at.elapsed())
        };
        let mut node = (*node).clone();
        let api: Api<Node> = Api::all(self.context.client.clone());
        if silent_for >= grace {
            let conditions = silent_conditions(&node, now);
            if !conditions.is_empty() {
                let patch = json!({"status": {"conditions": conditions}});
                match api
                    .patch_status(name, &PatchParams::default(), &Patch::Strategic(patch))
                    .await
                {
                    Ok(patched) => node = patched,
                    Err(error) if error.is_not_found() => return Ok(Action::Done),
                    Err(error) => return Err(error.into()),
                }
            }
        }
        self.write_taints(&api, name, &node, now).await?;
        self.follow_readiness(name, &node, now).await?;
        // Whatever happens, look again when the grace would be over, or soon while it is.
        let wait = grace.saturating_sub(silent_for).max(config.node_monitor_period);
        Ok(Action::RequeueAfter(wait))
    }
}

impl Nodes {
    async fn write_taints(
        &self,
        api: &Api<Node>,
        name: &str,
        node: &Node,
        now: Timestamp,
    ) -> Result<(), Error> {
        let present = node
            .spec
            .as_ref()
            .and_then(|spec| spec.taints.clone())
            .unwrap_or_default();
        let wanted = plan_taints(node, now);
        if wanted == present {
            return Ok(());
        }
        // The list is replaced whole, so it must be the list we know.
        let version = node.metadata.resource_version.clone();
        let taints = (!wanted.is_empty()).then_some(wanted);
        let patch = json!({"metadata": {"resourceVersion": version}, "spec": {"taints": taints}});
        match api
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
        {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Pods of a node that is not ready must not get traffic.
    async fn follow_readiness(&self, name: &str, node: &Node, now: Timestamp) -> Result<(), Error> {
        let Some(ready) = condition(node, "Ready").map(|ready| ready.status.clone()) else {
            return Ok(());
        };
        let was_ready = {
            let mut all = self.heard.lock();
            let heard = all.entry(name.to_owned()).or_default();
            std::mem::replace(&mut heard.was_ready, ready == "True")
        };
        if ready == "True" {
            return Ok(());
        }
        if was_ready {
            let message = format!("Node {name} status is now: NodeNotReady");
            self.context
                .events
                .event(&node_reference(name), "Normal", "NodeNotReady", message);
        } else if ready != "Unknown" {
            // A kubelet that still reports answers for its pods itself.
            return Ok(());
        }
        for pod in self
            .pods
            .by_index(BY_NODE, name)
            .iter()
            .filter(|pod| pods::is_ready(pod))
        {
            let (namespace, pod_name) = (
                pod.metadata.namespace.as_deref().unwrap_or_default(),
                pod.metadata.name.as_deref().unwrap_or_default(),
            );
            let patch = json!({"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [
                {"type": "Ready", "status": "False", "lastTransitionTime": Time(now)}]}});
            let api: Api<Pod> = Api::namespaced(self.context.client.clone(), namespace);
            match api
                .patch_status(pod_name, &PatchParams::default(), &Patch::Strategic(patch))
                .await
            {
                Ok(_) => {
                    let about = reference(&**pod);
                    self.context
                        .events
                        .event(&about, "Warning", "NodeNotReady", "Node is not ready".into());
                }
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                Err(error) => {
                    // Not done: the next look must try again.
                    if let Some(heard) = self.heard.lock().get_mut(name) {
                        heard.was_ready = was_ready;
                    }
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(conditions: &[(&str, &str)], taints: &[(&str, &str)], unschedulable: bool) -> Node {
        let conditions: Vec<_> = conditions
            .iter()
            .map(|(t, s)| json!({"type": t, "status": s}))
            .collect();
        let taints: Vec<_> = taints
            .iter()
            .map(|(k, e)| json!({"key": k, "effect": e}))
            .collect();
        serde_json::from_value(
            json!({"metadata": {"name": "n"}, "spec": {"taints": taints, "unschedulable": unschedulable},
            "status": {"conditions": conditions}}),
        )
        .unwrap()
    }

    #[test]
    fn conditions_become_taints() {
        let check = |node: Node, expected: &[(&str, &str)]| {
            let got = plan_taints(&node, Timestamp::UNIX_EPOCH);
            let got: Vec<(&str, &str)> = got
                .iter()
                .map(|taint| (taint.key.as_str(), taint.effect.as_str()))
                .collect();
            assert_eq!(got, expected);
        };
        check(node(&[("Ready", "True")], &[], false), &[]);
        check(node(&[], &[], false), &[(NOT_READY, "NoSchedule")]);
        check(
            node(
                &[("Ready", "True")],
                &[(NOT_READY, "NoSchedule"), ("own", "NoExecute")],
                false,
            ),
            &[("own", "NoExecute")],
        );
        check(
            node(&[("Ready", "False")], &[], false),
            &[(NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")],
        );
        check(
            node(&[("Ready", "Unknown")], &[(NOT_READY, "NoExecute")], false),
            &[(UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")],
        );
        check(
            node(&[("Ready", "True"), ("DiskPressure", "True")], &[], true),
            &[
                ("node.kubernetes.io/disk-pressure", "NoSchedule"),
                (UNSCHEDULABLE, "NoSchedule"),
            ],
        );
    }

    #[test]
    fn silence_is_unknown() {
        let got = silent_conditions(
            &node(&[("Ready", "True"), ("DiskPressure", "Unknown")], &[], false),
            Timestamp::UNIX_EPOCH,
        );
        let got: Vec<String> = got
            .iter()
            .map(|c| {
                format!(
                    "{} {} {}",
                    c.type_,
                    c.status,
                    c.reason.clone().unwrap_or_default()
                )
            })
            .collect();
        assert_eq!(
            got,
            vec![
                "Ready Unknown NodeStatusUnknown",
                "MemoryPressure Unknown NodeStatusNeverUpdated",
                "PIDPressure Unknown NodeStatusNeverUpdated"
            ]
        );
    }
}
