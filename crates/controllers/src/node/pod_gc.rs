//! The pod garbage collector: removes pods that no kubelet will ever remove, and old finished ones beyond
//! the threshold.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use parking_lot::Mutex;
use serde_json::json;
use skiff_client::{Action, ErrorExt, Informer, Reconcile};
use tokio::time::Instant;

use super::{BY_NODE, by_node, condition};
use crate::metrics::PodRemovals;
use crate::{Context, Error, pods};

const PERIOD: Duration = Duration::from_secs(20);
/// A node that has just gone may come back with its pods.
const QUARANTINE: Duration = Duration::from_secs(40);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    Finished,
    /// It is being deleted, and its node is known to be out of service.
    OutOfService,
    NodeGone,
    NeverScheduled,
}

impl Why {
    /// As metrics name it.
    fn reason(self) -> &'static str {
        match self {
            Why::Finished => "terminated",
            Why::OutOfService => "out-of-service",
            Why::NodeGone => "orphaned",
            Why::NeverScheduled => "unscheduled",
        }
    }
}

const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// A node that is not ready and of which somebody said that it will not come back by itself.
fn is_out_of_service(node: &Node) -> bool {
    let ready = condition(node, "Ready").is_some_and(|ready| ready.status == "True");
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    !ready
        && taints
            .into_iter()
            .flatten()
            .any(|taint| taint.key == OUT_OF_SERVICE)
}

/// Index of the pods that may have to go whatever becomes of their nodes: finding them takes no look at the others.
const BY_END: &str = "end";
const ENDED: &str = "ended";
const LEAVING: &str = "leaving";

fn by_end(pod: &Pod) -> Vec<String> {
    let mut ends = Vec::new();
    if pods::is_terminal(pod) {
        ends.push(ENDED.to_owned());
    }
    if pod.metadata.deletion_timestamp.is_some() {
        ends.push(LEAVING.to_owned());
    }
    ends
}

/// The pods that [`plan`] has to look at, each once.
fn candidates(all: &Informer<Pod>, gone: &HashSet<String>) -> Vec<Arc<Pod>> {
    let ends = [ENDED, LEAVING]
        .into_iter()
        .flat_map(|end| all.by_index(BY_END, end));
    let lost = gone.iter().flat_map(|node| all.by_index(BY_NODE, node));
    let by_uid: BTreeMap<Option<String>, Arc<Pod>> = ends
        .chain(lost)
        .map(|pod| (pod.metadata.uid.clone(), pod))
        .collect();
    by_uid.into_values().collect()
}

/// The nodes that cannot end their pods.
#[derive(Default)]
struct Lost {
    /// Known not to exist.
    gone: HashSet<String>,
    out_of_service: HashSet<String>,
}

/// Which pods to remove, each once.
fn plan(all: &[Arc<Pod>], lost: &Lost, threshold: usize) -> Vec<(Arc<Pod>, Why)> {
    let mut removals = Vec::new();
    let mut finished: Vec<&Arc<Pod>> = all.iter().filter(|pod| pods::is_terminal(pod)).collect();
    if threshold > 0 && finished.len() > threshold {
        // Evicted ones tell least, so they go first, then the oldest.
        finished.sort_by_key(|pod| {
            let evicted = pod.status.as_ref().and_then(|status| status.reason.as_deref()) == Some("Evicted");
            (
                !evicted,
                pod.metadata.creation_timestamp.as_ref().map(|time| time.0),
                pod.metadata.name.clone(),
            )
        });
        let surplus = finished.len() - threshold;
        removals.extend(
            finished
                .into_iter()
                .take(surplus)
                .map(|pod| (pod.clone(), Why::Finished)),
        );
    }
    let chosen: HashSet<Option<String>> = removals.iter().map(|(pod, _)| pod.metadata.uid.clone()).collect();
    for pod in all {
        let node = pods::node_name(pod);
        let deleting = pod.metadata.deletion_timestamp.is_some();
        let why = if deleting && lost.out_of_service.contains(node) {
            Some(Why::OutOfService)
        } else if lost.gone.contains(node) {
            Some(Why::NodeGone)
        } else {
            (deleting && node.is_empty()).then_some(Why::NeverScheduled)
        };
        if let Some(why) = why
            && !chosen.contains(&pod.metadata.uid)
        {
            removals.push((pod.clone(), why));
        }
    }
    removals
}

struct PodGarbage {
    context: Context,
    nodes: Informer<Node>,
    pods: Informer<Pod>,
    missing_since: Mutex<HashMap<String, Instant>>,
    removals: PodRemovals,
}

/// The one item of the queue: a pass over all pods that may have to go.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Pass;

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(PodGarbage {
        nodes: context.informers.informer(),
        pods: context.informers.informer(),
        missing_since: Mutex::default(),
        removals: PodRemovals::new(context.metrics()),
        context: context.clone(),
    });
    reconciler.pods.add_index(BY_NODE, by_node);
    reconciler.pods.add_index(BY_END, by_end);
    context
        .controller("orphaned_pods_nodes", reconciler)
        .reads(|r| &r.nodes)
        .reads(|r| &r.pods)
        .every(PERIOD, |_| vec![Pass])
        .run()
        .await;
}

impl Reconcile for PodGarbage {
    type Key = Pass;
    type Error = Error;

    async fn reconcile(&self, _: Pass) -> Result<Action, Error> {
        let named = self.pods.index_values(BY_NODE);
        let gone = self.nodes_gone(&named).await;
        let all = candidates(&self.pods, &gone);
        let lost = Lost {
            out_of_service: self.nodes_out_of_service(&all),
            gone,
        };
        for (pod, why) in plan(&all, &lost, self.context.config.terminated_pod_gc_threshold) {
            // One pod that cannot be removed does not keep the others; the next pass tries again.
            let removed = remove(&self.context, &pod, why).await;
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            self.removals.removed(namespace, why.reason(), removed.is_ok());
            if let Err(error) = removed {
                tracing::debug!(%error, pod = ?pod.metadata.name, "cannot remove the pod");
            }
        }
        Ok(Action::Done)
    }
}

impl PodGarbage {
    /// Of the nodes that pods being deleted are on.
    fn nodes_out_of_service(&self, pods: &[Arc<Pod>]) -> HashSet<String> {
        let deleting = pods
            .iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_some());
        let names: HashSet<&str> = deleting.map(|pod| pods::node_name(pod)).collect();
        let lost = names.into_iter().filter(|name| {
            let node = self.nodes.get("", name);
            node.is_some_and(|node| is_out_of_service(&node))
        });
        lost.map(str::to_owned).collect()
    }

    /// Nodes that pods name, that were missing long enough, and that the server does not know either.
    async fn nodes_gone(&self, named: &[String]) -> HashSet<String> {
        let missing: HashSet<&str> = named
            .iter()
            .map(String::as_str)
            .filter(|name| !name.is_empty() && !self.nodes.contains("", name))
            .collect();
        let overdue: Vec<&str> = {
            let mut since = self.missing_since.lock();
            since.retain(|name, _| missing.contains(name.as_str()));
            let mut overdue = Vec::new();
            for name in missing {
                let first = *since.entry(name.to_owned()).or_insert_with(Instant::now);
                if first.elapsed() >= QUARANTINE {
                    overdue.push(name);
                }
            }
            overdue
        };
        let api: Api<Node> = Api::all(self.context.client.clone());
        let mut gone = HashSet::new();
        for name in overdue {
            if matches!(api.get_opt(name).await, Ok(None)) {
                gone.insert(name.to_owned());
            }
        }
        gone
    }
}

async fn remove(context: &Context, pod: &Pod, why: Why) -> Result<(), kube::Error> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(context.client.clone(), namespace);
    if !pods::is_terminal(pod) {
        let generation = pod.metadata.generation;
        let mut status = json!({"phase": "Failed", "observedGeneration": generation});
        if why == Why::NodeGone {
            status["conditions"] = json!([{"type": "DisruptionTarget", "status": "True",
                "observedGeneration": generation,
                "reason": "DeletionByPodGC", "message": "PodGC: node no longer exists",
                "lastTransitionTime": Time(Timestamp::now())}]);
        }
        let patch = json!({"metadata": {"uid": pod.metadata.uid}, "status": status});
        match api
            .patch_status(name, &PatchParams::default(), &Patch::Strategic(patch))
            .await
        {
            Ok(_) => {}
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    let same = Preconditions {
        uid: pod.metadata.uid.clone(),
        resource_version: None,
    };
    match api
        .delete(name, &DeleteParams::default().grace_period(0).preconditions(same))
        .await
    {
        Ok(_) => Ok(()),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pods_nobody_else_removes() {
        let pod = |name: &str, node: &str, phase: &str, deleted: bool, second: u32| -> Arc<Pod> {
            let deleted = if deleted {
                json!("2026-01-01T00:00:00Z")
            } else {
                json!(null)
            };
            Arc::new(
                serde_json::from_value(json!({
                    "metadata": {"name": name, "uid": name, "deletionTimestamp": deleted,
                        "creationTimestamp": format!("2026-01-01T00:00:{second:02}Z")},
                    "spec": {"nodeName": node, "containers": []}, "status": {"phase": phase}}))
                .unwrap(),
            )
        };
        let all = [
            pod("running", "here", "Running", false, 0),
            pod("lost", "gone", "Running", false, 0),
            pod("waiting", "", "Pending", false, 0),
            pod("unscheduled", "", "Pending", true, 0),
            pod("leaving", "here", "Running", true, 0),
            pod("done2", "here", "Succeeded", false, 2),
            pod("done1", "here", "Failed", false, 1),
            pod("stuck", "broken", "Running", true, 0),
            pod("stays", "broken", "Running", false, 0),
        ];
        let ends: Vec<String> = all.iter().map(|pod| by_end(pod).join("+")).collect();
        assert_eq!(ends, ["", "", "", LEAVING, LEAVING, ENDED, ENDED, LEAVING, ""]);
        let lost = Lost {
            gone: ["gone".to_owned()].into(),
            out_of_service: ["broken".to_owned()].into(),
        };
        let check = |threshold: usize, expected: &[(&str, Why)]| {
            let got = plan(&all, &lost, threshold);
            let got: Vec<(&str, Why)> = got
                .iter()
                .map(|(pod, why)| (pod.metadata.name.as_deref().unwrap(), *why))
                .collect();
            assert_eq!(got, expected);
        };
        check(
            2,
            &[
                ("lost", Why::NodeGone),
                ("unscheduled", Why::NeverScheduled),
                ("stuck", Why::OutOfService),
            ],
        );
        check(
            1,
            &[
                ("done1", Why::Finished),
                ("lost", Why::NodeGone),
                ("unscheduled", Why::NeverScheduled),
                ("stuck", Why::OutOfService),
            ],
        );
    }

    #[test]
    fn out_of_service_needs_the_taint_and_silence() {
        let check = |ready: &str, key: &str, expected: bool| {
            let node: Node =
                serde_json::from_value(json!({"spec": {"taints": [{"key": key, "effect": "NoExecute"}]},
                "status": {"conditions": [{"type": "Ready", "status": ready}]}}))
                .unwrap();
            assert_eq!(is_out_of_service(&node), expected, "{ready} {key}");
        };
        check("Unknown", OUT_OF_SERVICE, true);
        check("False", OUT_OF_SERVICE, true);
        check("True", OUT_OF_SERVICE, false);
        check("Unknown", "other", false);
    }
}
