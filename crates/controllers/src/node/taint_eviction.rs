//! The taint eviction controller: a pod that does not tolerate a NoExecute taint of its node is deleted,
//! at once or when the time of its toleration is over. That time begins when the controller sees pod and taint together,
//! as upstream's does: `timeAdded` is not looked at.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use parking_lot::Mutex;
use serde_json::json;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile};
use skiff_pods::taints::tolerates;

use super::{BY_NODE, by_node};
use crate::metrics::TaintEvictions;
use crate::{Context, Error, pods, seconds_until};

/// What the taints of a node mean for a pod.
#[derive(Debug, PartialEq)]
enum Verdict {
    /// It may stay for good.
    Stay,
    /// It may stay for so long, from when its taints were noticed.
    StayFor(SignedDuration),
    Leave,
}

/// COMPAT: of several tolerations that match a taint the first one counts, and over all taints the shortest.
fn judge(taints: &[Taint], tolerations: &[Toleration]) -> Verdict {
    let mut shortest: Option<i64> = None;
    for taint in taints {
        let mut matching = tolerations
            .iter()
            .filter(|toleration| tolerates(toleration, taint));
        let Some(toleration) = matching.next() else {
            return Verdict::Leave;
        };
        if let Some(seconds) = toleration.toleration_seconds {
            shortest = Some(shortest.map_or(seconds, |shortest| shortest.min(seconds)));
        }
    }
    match shortest {
        None => Verdict::Stay,
        Some(seconds) => Verdict::StayFor(SignedDuration::from_secs(seconds.max(0))),
    }
}

fn no_execute(node: &Node) -> Vec<Taint> {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    taints
        .into_iter()
        .flatten()
        .filter(|taint| taint.effect == "NoExecute")
        .cloned()
        .collect()
}

struct TaintedPods {
    context: Context,
    nodes: Informer<Node>,
    pods: Informer<Pod>,
    /// The nodes that have a NoExecute taint: an event of a pod elsewhere costs nothing.
    tainted: Mutex<HashSet<String>>,
    scheduled: Scheduled,
    metrics: TaintEvictions,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(TaintedPods {
        nodes: context.informers.informer(),
        pods: context.informers.informer(),
        tainted: Mutex::default(),
        scheduled: Scheduled::default(),
        metrics: TaintEvictions::new(context.metrics()),
        context: context.clone(),
    });
    reconciler.pods.add_index(BY_NODE, by_node);
    context
        .controller("noexec_taint_pod", reconciler)
        .workers(8)
        .watches(|r| &r.nodes, TaintedPods::woken_by_node)
        .watches(|r| &r.pods, TaintedPods::woken_by_pod)
        .run()
        .await;
}

impl TaintedPods {
    fn woken_by_pod(&self, change: &Change<Pod>) -> Option<Key> {
        let pod = change.object();
        let key = Key::of(&**pod);
        let Change::Applied { old, new } = change else {
            return Some(key).filter(|key| self.scheduled.contains(key));
        };
        if !self.tainted.lock().contains(pods::node_name(new)) {
            return None;
        }
        let tolerations = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.tolerations.clone());
        let unchanged = old.as_ref().is_some_and(|old| {
            pods::node_name(old) == pods::node_name(new) && tolerations(old) == tolerations(new)
        });
        (!unchanged).then_some(key)
    }

    fn woken_by_node(&self, change: &Change<Node>) -> Vec<Key> {
        let name = change.object().metadata.name.clone().unwrap_or_default();
        let Change::Applied { old, new } = change else {
            self.tainted.lock().remove(&name);
            return Vec::new();
        };
        let taints = no_execute(new);
        let was_tainted = if taints.is_empty() {
            self.tainted.lock().remove(&name)
        } else {
            !self.tainted.lock().insert(name.clone())
        };
        if taints.is_empty() && !was_tainted {
            return Vec::new();
        }
        if was_tainted && old.as_ref().is_some_and(|old| no_execute(old) == taints) {
            return Vec::new();
        }
        let pods = self.pods.by_index(BY_NODE, &name);
        pods.iter().map(|pod| Key::of(&**pod)).collect()
    }
}

/// The pods that have to go, and when: uid and time.
#[derive(Default)]
struct Scheduled {
    pods: Mutex<HashMap<Key, (Option<String>, Timestamp)>>,
}

impl Scheduled {
    /// When the pod has to go. COMPAT: the time stands once it is set, whatever taints come and go meanwhile, until
    /// the eviction is cancelled.
    fn at(&self, key: &Key, uid: Option<&String>, at: Timestamp) -> Timestamp {
        let mut pods = self.pods.lock();
        let known = pods.entry(key.clone()).or_insert_with(|| (uid.cloned(), at));
        if known.0.as_ref() != uid {
            *known = (uid.cloned(), at);
        }
        known.1
    }

    fn contains(&self, key: &Key) -> bool {
        self.pods.lock().contains_key(key)
    }

    /// True if the pod was waiting for its end.
    fn cancel(&self, key: &Key) -> bool {
        self.pods.lock().remove(key).is_some()
    }
}

impl Reconcile for TaintedPods {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let pod = self.pods.get(&key.namespace, &key.name);
        let Some(pod) = pod.filter(|pod| pod.metadata.deletion_timestamp.is_none()) else {
            self.cancel(&key);
            return Ok(Action::Done);
        };
        let Some(node) = self.nodes.get("", pods::node_name(&pod)) else {
            return Ok(Action::Done);
        };
        let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref());
        let now = Timestamp::now();
        let mut due = now;
        match judge(&no_execute(&node), tolerations.unwrap_or_default()) {
            Verdict::Stay => {
                self.cancel(&key);
                return Ok(Action::Done);
            }
            Verdict::StayFor(duration) => {
                let at = now.checked_add(duration).unwrap_or(Timestamp::MAX);
                let at = self.scheduled.at(&key, pod.metadata.uid.as_ref(), at);
                // Looked at anew then: the taint may be gone.
                if at > now {
                    return Ok(Action::RequeueAfter(seconds_until(at, now)));
                }
                due = at;
            }
            Verdict::Leave => {}
        }
        if evict(&self.context, &pod, &key, now).await? {
            self.metrics.deleted(due);
        }
        self.scheduled.cancel(&key);
        Ok(Action::Done)
    }
}

impl TaintedPods {
    fn cancel(&self, key: &Key) {
        if self.scheduled.cancel(key) {
            let message = format!("Cancelling deletion of Pod {key}");
            self.context
                .events
                .event(&pod_reference(key), "Normal", "TaintManagerEviction", message);
        }
    }
}

/// COMPAT: these events name no uid.
fn pod_reference(key: &Key) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: Some(key.namespace.clone()),
        name: Some(key.name.clone()),
        ..Default::default()
    }
}

/// Whether the pod was there to be deleted.
async fn evict(context: &Context, pod: &Pod, key: &Key, now: Timestamp) -> Result<bool, Error> {
    let message = format!("Marking for deletion Pod {key}");
    context
        .events
        .event(&pod_reference(key), "Normal", "TaintManagerEviction", message);
    let api: Api<Pod> = Api::namespaced(context.client.clone(), &key.namespace);
    let patch = json!({"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [{
        "type": "DisruptionTarget", "status": "True", "observedGeneration": pod.metadata.generation, "reason": "DeletionByTaintManager",
        "message": "Taint manager: deleting due to NoExecute taint", "lastTransitionTime": Time(now)}]}});
    match api
        .patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch))
        .await
    {
        Ok(_) => {}
        Err(error) if error.is_not_found() || error.is_conflict() => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    let same = Preconditions {
        uid: pod.metadata.uid.clone(),
        resource_version: None,
    };
    match api
        .delete(&key.name, &DeleteParams::default().preconditions(same))
        .await
    {
        Ok(_) => Ok(true),
        Err(error) if error.is_not_found() || error.is_conflict() => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tolerations_give_time() {
        let taint = |key: &str| -> Taint {
            serde_json::from_value(
                json!({"key": key, "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}),
            )
            .unwrap()
        };
        let check = |taints: &[Taint], tolerations: serde_json::Value, expected: Verdict| {
            let parsed: Vec<Toleration> = serde_json::from_value(tolerations.clone()).unwrap();
            assert_eq!(judge(taints, &parsed), expected, "{tolerations}");
        };
        let seconds = |seconds| Verdict::StayFor(SignedDuration::from_secs(seconds));
        let one = [taint("u")];
        let two = [taint("u"), taint("v")];
        check(&[], json!([]), Verdict::Stay);
        check(&one, json!([]), Verdict::Leave);
        check(&one, json!([{"key": "u", "operator": "Exists"}]), Verdict::Stay);
        check(
            &one,
            json!([{"operator": "Exists", "effect": "NoSchedule"}]),
            Verdict::Leave,
        );
        check(&one, json!([{"key": "u", "value": "x"}]), Verdict::Leave);
        check(
            &one,
            json!([{"key": "u", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}]),
            seconds(300),
        );
        check(
            &one,
            json!([{"operator": "Exists", "tolerationSeconds": -5}]),
            seconds(0),
        );
        // The first that matches a taint counts, over all taints the shortest.
        let first =
            json!([{"operator": "Exists", "tolerationSeconds": 30}, {"key": "u", "operator": "Exists"}]);
        check(&one, first, seconds(30));
        let first =
            json!([{"key": "u", "operator": "Exists"}, {"operator": "Exists", "tolerationSeconds": 30}]);
        check(&one, first.clone(), Verdict::Stay);
        check(&two, first, seconds(30));
        let each = json!([{"key": "u", "operator": "Exists", "tolerationSeconds": 50},
            {"key": "v", "operator": "Exists", "tolerationSeconds": 20}]);
        check(&two, each.clone(), seconds(20));
        check(&one, each.clone(), seconds(50));
        check(&[taint("u"), taint("w")], each, Verdict::Leave);
    }

    #[test]
    fn the_time_stands_until_it_is_cancelled() {
        let scheduled = Scheduled::default();
        let (key, at) = (Key::new("a", "b"), |second| {
            Timestamp::from_second(second).unwrap()
        });
        let (one, two) = ("one".to_owned(), "two".to_owned());
        assert_eq!(scheduled.at(&key, Some(&one), at(1)), at(1));
        assert_eq!(scheduled.at(&key, Some(&one), at(9)), at(1));
        assert_eq!(scheduled.at(&key, Some(&two), at(9)), at(9));
        assert!(scheduled.cancel(&key) && !scheduled.cancel(&key));
        assert_eq!(scheduled.at(&key, Some(&two), at(20)), at(20));
    }
}
