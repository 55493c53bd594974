//! The DaemonSet controller: one pod on every node that the template selects and tolerates.
//!
//! `placement` says which nodes those are, `plan` which pods come and go, `revisions` keeps the history. The
//! scheduler binds the pods; this controller only says for which node each is.

mod backoff;
mod daemon;
mod placement;
mod plan;
mod revisions;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, DaemonSetSpec, DaemonSetStatus};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use skiff_client::{
    Action, COMPLETE, Change, ErrorExt, Informer, Key, Parts, Reconcile, WorkQueue, cause_of, note,
    reference, stage,
};

use crate::node::{BY_NODE, by_node};
use crate::ownership::{self, BY_CONTROLLER};
use crate::{Context, Error, error_message, is_namespace_terminating, replicas, seconds_until, selector};
use backoff::FailedPods;
use daemon::{Daemon, placement_part};
use placement::{DaemonPod, Placement};
use plan::{Observed, Plan};

/// How often the back-offs of failed pods are cleaned up.
const FORGET_PERIOD: Duration = Duration::from_secs(60);

struct DaemonSets {
    context: Context,
    sets: Informer<DaemonSet>,
    pods: Informer<Pod>,
    daemons: Parts<Pod, Daemon>,
    nodes: Informer<Node>,
    node_parts: Parts<Node, Node>,
    revisions: Informer<ControllerRevision>,
    failed: FailedPods,
}

/// Wakes the DaemonSets that a change of a node concerns: only those whose pods come or go.
struct NodeUpdates {
    sets: Informer<DaemonSet>,
    pods: Informer<Pod>,
    nodes: Informer<Node>,
    queue: Arc<WorkQueue<Key>>,
}

pub(crate) async fn run(context: Context) {
    let pods: Informer<Pod> = context.informers.informer();
    let nodes: Informer<Node> = context.informers.informer();
    let reconciler = Arc::new(DaemonSets {
        sets: context.informers.informer(),
        daemons: pods.parts(Daemon::of),
        pods,
        node_parts: nodes.parts(placement_part),
        nodes,
        revisions: context.informers.informer(),
        failed: FailedPods::default(),
        context: context.clone(),
    });
    reconciler.pods.add_index(BY_CONTROLLER, ownership::by_controller);
    reconciler.pods.add_index(BY_NODE, by_node);
    reconciler
        .revisions
        .add_index(BY_CONTROLLER, ownership::by_controller);
    let queue = context.queue("daemonset");
    let updates = Arc::new(NodeUpdates {
        sets: reconciler.sets.clone(),
        pods: reconciler.pods.clone(),
        nodes: reconciler.nodes.clone(),
        queue: queue.clone(),
    });
    let sets = context
        .controller_over(queue, reconciler)
        .workers(context.workers())
        .owns(|r| &r.sets)
        .watches(|r| &r.pods, DaemonSets::woken_by_pod)
        .watches(|r| &r.revisions, DaemonSets::woken_by_revision)
        .reads(|r| &r.nodes)
        .every(FORGET_PERIOD, |r| {
            r.failed.forget(Timestamp::now());
            Vec::new()
        });
    let updates = context
        .controller("daemonset-node-updates", updates)
        .workers(context.workers())
        .watches(|r| &r.nodes, |_, change| concerning(change))
        .reads(|r| &r.sets)
        .reads(|r| &r.pods);
    tokio::join!(sets.run(), updates.run());
}

/// The node, if something changed that decides over daemons: heartbeats do not.
fn concerning(change: &Change<Node>) -> Option<String> {
    let taints = |node: &Node| node.spec.as_ref().and_then(|spec| spec.taints.clone());
    if let Change::Applied { old: Some(old), new } = change
        && old.metadata.labels == new.metadata.labels
        && taints(old) == taints(new)
    {
        return None;
    }
    change.object().metadata.name.clone()
}

impl Reconcile for NodeUpdates {
    type Key = String;
    type Error = Error;

    async fn reconcile(&self, name: String) -> Result<Action, Error> {
        let Some(node) = self.nodes.get("", &name) else {
            // Every set wants one pod less, and some may have pods that wait for the node.
            for set in self.sets.list() {
                self.queue.add(Key::of(&*set), None);
            }
            return Ok(Action::Done);
        };
        let on_node = self.pods.by_index(BY_NODE, &name);
        let scheduled: HashSet<Key> = on_node
            .iter()
            .filter_map(|pod| ownership::controlled_by::<DaemonSet>(&pod.metadata))
            .collect();
        for set in self.sets.list() {
            let Some(spec) = &set.spec else { continue };
            let key = Key::of(&*set);
            let misscheduled = set.status.as_ref().map_or(0, |status| status.number_misscheduled);
            let placement = DaemonPod::new(spec).placement(&node);
            let concerns = match (placement, scheduled.contains(&key)) {
                (Placement::Run, false) | (Placement::Leave, true) => true,
                (_, true) => misscheduled > 0,
                (_, false) => false,
            };
            if concerns {
                self.queue.add(key, Some(cause_of(&*node)));
            }
        }
        Ok(Action::Done)
    }
}

impl Reconcile for DaemonSets {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(set) = self.sets.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let Some(spec) = &set.spec else {
            return Ok(Action::Done);
        };
        if selector::is_empty(&spec.selector) {
            let message = "This daemon set is selecting all pods. A non-empty selector is required.";
            let events = &self.context.events;
            events.event(&reference(&*set), "Warning", "SelectingAll", message.to_owned());
            return Ok(Action::Done);
        }
        // Its history may be gone already, and without that nothing can be said about its pods.
        if set.metadata.deletion_timestamp.is_some() {
            return Ok(Action::Done);
        }
        let pods = self.claim_pods(&set, spec).await?;
        let history = self.construct_history(&set, spec, &pods).await?;
        let nodes = self.node_parts.list();
        let now = Timestamp::now();
        let seen = Observed::new(&set, spec, &nodes, &pods, &history.hash, now);
        let managed = self.manage(&seen).await;
        let cleaned = match &managed {
            Ok(_) => self.clean_history(&set, spec, &pods, &history).await,
            Err(_) => Ok(()),
        };
        let before = set.status.as_ref().and_then(|status| status.collision_count);
        let count = Some(history.collision_count)
            .filter(|count| *count > 0)
            .or(before);
        let written = self.write_status(&set, seen.status(count)).await;
        let wait = managed?;
        cleaned?;
        written?;
        let available = seen.next_availability().map(|at| seconds_until(at, now));
        let next = wait.into_iter().chain(available).min();
        // A little later, so that the clock has surely passed the moment.
        Ok(next.map_or(Action::Done, |after| {
            Action::RequeueAfter(after + Duration::from_millis(10))
        }))
    }
}

impl DaemonSets {
    fn woken_by_pod(&self, change: &Change<Pod>) -> Vec<Key> {
        ownership::owners_of_change::<DaemonSet, Pod>(change, |pod| {
            self.selecting(pod.metadata.namespace.as_deref(), pod.metadata.labels.as_ref())
        })
    }

    /// COMPAT: a new revision that the set controls already wakes nobody, as upstream: whoever creates a second one
    /// of the present template finds both until something else happens.
    fn woken_by_revision(&self, change: &Change<ControllerRevision>) -> Vec<Key> {
        if let Change::Applied { old: None, new } = change
            && ownership::controller_of(&new.metadata).is_some()
        {
            return Vec::new();
        }
        ownership::owners_of_change::<DaemonSet, ControllerRevision>(change, |revision| {
            let meta = &revision.metadata;
            self.selecting(meta.namespace.as_deref(), meta.labels.as_ref())
        })
    }

    /// The sets that might adopt an object with these labels.
    fn selecting(&self, namespace: Option<&str>, labels: Option<&selector::Labels>) -> Vec<Key> {
        let sets = self.sets.list_namespaced(namespace.unwrap_or_default());
        let selecting = sets.iter().filter(|set| {
            let selector = set.spec.as_ref().map(|spec| &spec.selector);
            selector.is_some_and(|one| !selector::is_empty(one) && selector::matches(one, labels))
        });
        selecting.map(|set| Key::of(&**set)).collect()
    }

    async fn claim_pods(&self, set: &DaemonSet, spec: &DaemonSetSpec) -> Result<Vec<Arc<Daemon>>, Error> {
        let selects = |labels: Option<&selector::Labels>| selector::matches(&spec.selector, labels);
        let client = &self.context.client;
        Ok(ownership::claim_parts(client, set, &self.pods, &self.daemons, selects, |_| true).await?)
    }

    /// Creates and deletes pods; an update goes on only when nothing else is to do. Answers how long the earliest
    /// failed pod must still wait.
    async fn manage(&self, seen: &Observed<'_>) -> Result<Option<Duration>, Error> {
        let set = seen.set;
        let plan = seen.manage(|node| self.failed.remaining(&backoff_key(set, node), seen.now));
        self.tell_ended(set, &plan, seen.now);
        let wait = plan.wait;
        if plan.is_empty() {
            self.carry_out(seen, seen.roll()).await?;
        } else {
            self.carry_out(seen, plan).await?;
        }
        Ok(wait)
    }

    /// Events for the pods that ended, and a longer wait for the next one that fails on the same node.
    fn tell_ended(&self, set: &DaemonSet, plan: &Plan, now: Timestamp) {
        let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
        for ended in &plan.ended {
            let (pod, node) = (&ended.pod, &ended.node);
            let (type_, reason, message) = if ended.failed {
                self.failed.deleted(&backoff_key(set, node), now);
                let message =
                    format!("Found failed daemon pod {namespace}/{pod} on node {node}, will try to kill it");
                ("Warning", "FailedDaemonPod", message)
            } else {
                let message = format!(
                    "Found succeeded daemon pod {namespace}/{pod} on node {node}, will try to delete it"
                );
                ("Normal", "SucceededDaemonPod", message)
            };
            self.context.events.event(&reference(set), type_, reason, message);
        }
    }

    async fn carry_out(&self, seen: &Observed<'_>, plan: Plan) -> Result<(), Error> {
        let created = stage("create pods", self.create(seen, &plan.create)).await;
        let deleted = stage("delete pods", self.delete(seen.set, &plan.delete)).await;
        created.and(deleted)
    }

    /// In batches that double: a quota that is used up costs few requests.
    async fn create(&self, seen: &Observed<'_>, nodes: &[String]) -> Result<(), Error> {
        let set = seen.set;
        let api = self.pods_api(set);
        let about = reference(set);
        let mut nodes = nodes.iter();
        for size in replicas::batches(nodes.len()) {
            let batch: Vec<Pod> = nodes
                .by_ref()
                .take(size)
                .map(|node| placement::new_pod(set, seen.spec, node, seen.hash))
                .collect();
            let params = PostParams::default();
            let create = async |pod: &Pod| {
                let created = api.create(&params, pod).await?;
                let selected = selector::matches(&seen.spec.selector, created.metadata.labels.as_ref());
                ownership::check_created(&api, set, created, selected).await
            };
            let outcomes = join_all(batch.iter().map(create)).await;
            let mut failure = None;
            for outcome in outcomes {
                match outcome {
                    Ok(created) => {
                        let name = created.metadata.name.unwrap_or_default();
                        let message = format!("Created pod: {name}");
                        self.context
                            .events
                            .event(&about, "Normal", "SuccessfulCreate", message);
                    }
                    Err(error) if is_namespace_terminating(&error) => {}
                    Err(error) => {
                        let message = format!("Error creating: {}", error_message(&error));
                        self.context
                            .events
                            .event(&about, "Warning", "FailedCreate", message);
                        failure.get_or_insert(error);
                    }
                }
            }
            if let Some(error) = failure {
                return Err(error.into());
            }
        }
        Ok(())
    }

    async fn delete(&self, set: &DaemonSet, names: &[String]) -> Result<(), Error> {
        let api = self.pods_api(set);
        let about = reference(set);
        let params = DeleteParams::default();
        let outcomes = join_all(names.iter().map(|name| api.delete(name, &params))).await;
        let mut failure = None;
        for (name, outcome) in names.iter().zip(outcomes) {
            match outcome {
                Ok(_) => {
                    let message = format!("Deleted pod: {name}");
                    self.context
                        .events
                        .event(&about, "Normal", "SuccessfulDelete", message);
                }
                Err(error) if error.is_not_found() => {}
                Err(error) => {
                    let message = format!("Error deleting: {}", error_message(&error));
                    self.context
                        .events
                        .event(&about, "Warning", "FailedDelete", message);
                    failure.get_or_insert(error);
                }
            }
        }
        failure.map_or(Ok(()), |error| Err(error.into()))
    }

    fn pods_api(&self, set: &DaemonSet) -> Api<Pod> {
        let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
        Api::namespaced(self.context.client.clone(), namespace)
    }

    async fn write_status(&self, set: &DaemonSet, status: DaemonSetStatus) -> Result<(), Error> {
        let present = set.status.clone().unwrap_or_default();
        if comparable(&status) == comparable(&present) {
            return Ok(());
        }
        let desired = status.desired_number_scheduled;
        let (updated, available) = (status.updated_number_scheduled, status.number_available);
        if (updated.unwrap_or(0), available.unwrap_or(0)) == (desired, desired) {
            note(COMPLETE);
        }
        let name = set.metadata.name.as_deref().unwrap_or_default();
        let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<DaemonSet> = Api::namespaced(self.context.client.clone(), namespace);
        let mut updated = set.clone();
        updated.status = Some(status.clone());
        match api.replace_status(name, &PostParams::default(), &updated).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) if error.is_conflict() => {
                // Only the spec moved, most often: the counts are still the newest we know.
                let live = api.get_opt(name).await?;
                let Some(mut live) = live.filter(|live| live.metadata.uid == set.metadata.uid) else {
                    return Ok(());
                };
                live.status = Some(status);
                api.replace_status(name, &PostParams::default(), &live).await?;
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// A status with its zeros written down.
fn comparable(status: &DaemonSetStatus) -> DaemonSetStatus {
    let zero = |count: Option<i32>| Some(count.unwrap_or(0));
    DaemonSetStatus {
        updated_number_scheduled: zero(status.updated_number_scheduled),
        number_available: zero(status.number_available),
        number_unavailable: zero(status.number_unavailable),
        observed_generation: Some(status.observed_generation.unwrap_or(0)),
        ..status.clone()
    }
}

/// A new template starts without the back-off of the one before.
fn backoff_key(set: &DaemonSet, node: &str) -> String {
    let uid = set.metadata.uid.as_deref().unwrap_or_default();
    let observed = set.status.as_ref().and_then(|status| status.observed_generation);
    format!("{uid}/{}/{node}", observed.unwrap_or(0))
}

#[cfg(test)]
mod node_tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn heartbeats_concern_nobody() {
        let node = |labels: serde_json::Value, taints: serde_json::Value, beat: &str| -> Arc<Node> {
            let node = json!({"metadata": {"name": "a", "labels": labels}, "spec": {"taints": taints},
                "status": {"conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": beat}]}});
            Arc::new(serde_json::from_value(node).unwrap())
        };
        let taint = || json!([{"key": "x", "effect": "NoSchedule"}]);
        let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z");
        let check = |old: Option<Arc<Node>>, new: Arc<Node>, expected: bool| {
            assert_eq!(
                concerning(&Change::Applied {
                    old: old.map(Into::into),
                    new
                })
                .is_some(),
                expected
            );
        };
        let plain = |beat: &str| node(json!({"a": "b"}), taint(), beat);
        check(None, plain(early), true);
        check(Some(plain(early)), plain(late), false);
        check(Some(plain(early)), node(json!({}), taint(), early), true);
        check(
            Some(plain(early)),
            node(json!({"a": "b"}), json!([]), early),
            true,
        );
        assert!(concerning(&Change::Deleted { last: plain(early) }).is_some());
    }
}
