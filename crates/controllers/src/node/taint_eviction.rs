//! The taint eviction controller: a pod that does not tolerate a NoExecute taint of its node is deleted,
//! at once or when the time of its toleration is over.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use parking_lot::Mutex;
use serde_json::json;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile, reference};

use super::{BY_NODE, by_node};
use crate::{Context, Error, pods, seconds_until};

#[derive(Debug, PartialEq)]
enum Evict {
    Never,
    At(Timestamp),
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    if !effect.is_empty() && effect != taint.effect {
        return false;
    }
    let key = toleration.key.as_deref().unwrap_or_default();
    if !key.is_empty() && key != taint.key {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or("Equal") {
        "Exists" => true,
        "" | "Equal" => {
            !key.is_empty()
                && toleration.value.as_deref().unwrap_or_default()
                    == taint.value.as_deref().unwrap_or_default()
        }
        _ => false,
    }
}

/// When the pod has to go. The clock of a toleration starts when the taint was added, or if nobody wrote that
/// down, when it was `noticed`.
fn plan(taints: &[Taint], tolerations: &[Toleration], noticed: Timestamp, now: Timestamp) -> Evict {
    let mut earliest: Option<Timestamp> = None;
    for taint in taints.iter().filter(|taint| taint.effect == "NoExecute") {
        let matching: Vec<&Toleration> = tolerations
            .iter()
            .filter(|toleration| tolerates(toleration, taint))
            .collect();
        if matching.is_empty() {
            return Evict::At(now);
        }
        let since = taint.time_added.as_ref().map_or(noticed, |time| time.0);
        if let Some(seconds) = matching
            .iter()
            .filter_map(|toleration| toleration.toleration_seconds)
            .min()
        {
            let at = since
                .checked_add(SignedDuration::from_secs(seconds.max(0)))
                .unwrap_or(Timestamp::MAX);
            earliest = Some(earliest.map_or(at, |earliest| earliest.min(at)));
        }
    }
    earliest.map_or(Evict::Never, Evict::At)
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
    noticed: Noticed,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(TaintedPods {
        nodes: context.informers.informer(),
        pods: context.informers.informer(),
        tainted: Mutex::default(),
        noticed: Noticed::default(),
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
            return self.noticed.forget(&key).then_some(key);
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

/// Since when pods are known to stand on a tainted node, with their uids.
#[derive(Default)]
struct Noticed {
    since: Mutex<HashMap<Key, (Option<String>, Timestamp)>>,
}

impl Noticed {
    fn since(&self, key: &Key, uid: Option<&String>, now: Timestamp) -> Timestamp {
        let mut all = self.since.lock();
        let known = all.entry(key.clone()).or_insert_with(|| (uid.cloned(), now));
        if known.0.as_ref() != uid {
            *known = (uid.cloned(), now);
        }
        known.1
    }

    /// True if the pod was waiting for its end.
    fn forget(&self, key: &Key) -> bool {
        self.since.lock().remove(key).is_some()
    }
}

impl Reconcile for TaintedPods {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let pod = self.pods.get(&key.namespace, &key.name);
        let Some(pod) = pod.filter(|pod| pod.metadata.deletion_timestamp.is_none()) else {
            self.noticed.forget(&key);
            return Ok(Action::Done);
        };
        let Some(node) = self.nodes.get("", pods::node_name(&pod)) else {
            self.noticed.forget(&key);
            return Ok(Action::Done);
        };
        let tolerations = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.tolerations.clone())
            .unwrap_or_default();
        let now = Timestamp::now();
        let since = self.noticed.since(&key, pod.metadata.uid.as_ref(), now);
        match plan(&no_execute(&node), &tolerations, since, now) {
            Evict::Never => {
                if self.noticed.forget(&key) && since != now {
                    let message = format!("Cancelling deletion of Pod {key}");
                    let about = reference(&*pod);
                    self.context
                        .events
                        .event(&about, "Normal", "TaintManagerEviction", message);
                }
                Ok(Action::Done)
            }
            // Looked at anew then: the taint may be gone.
            Evict::At(at) if at > now => Ok(Action::RequeueAfter(seconds_until(at, now))),
            Evict::At(_) => evict(&self.context, &pod, &key, now).await,
        }
    }
}

async fn evict(context: &Context, pod: &Pod, key: &Key, now: Timestamp) -> Result<Action, Error> {
    let message = format!("Marking for deletion Pod {key}");
    context
        .events
        .event(&reference(pod), "Normal", "TaintManagerEviction", message);
    let api: Api<Pod> = Api::namespaced(context.client.clone(), &key.namespace);
    let patch = json!({"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [{
        "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager",
        "message": "Taint manager: deleting due to NoExecute taint", "lastTransitionTime": Time(now)}]}});
    match api
        .patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch))
        .await
    {
        Ok(_) => {}
        Err(error) if error.is_not_found() || error.is_conflict() => return Ok(Action::Done),
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
        Ok(_) => Ok(Action::Done),
        Err(error) if error.is_not_found() || error.is_conflict() => Ok(Action::Done),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tolerations_give_time() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().unwrap();
        let noticed: Timestamp = "2026-01-01T00:00:40Z".parse().unwrap();
        let taint = |key: &str, effect: &str| -> Taint {
            serde_json::from_value(json!({"key": key, "effect": effect, "timeAdded": "2026-01-01T00:00:00Z"}))
                .unwrap()
        };
        let check = |taints: &[Taint], tolerations: serde_json::Value, expected: Evict| {
            let parsed: Vec<Toleration> = serde_json::from_value(tolerations.clone()).unwrap();
            assert_eq!(plan(taints, &parsed, noticed, now), expected, "{tolerations}");
        };
        let unreachable = [taint("u", "NoExecute")];
        let at = |text: &str| Evict::At(text.parse().unwrap());
        check(&[], json!([]), Evict::Never);
        check(&[taint("u", "NoSchedule")], json!([]), Evict::Never);
        check(&unreachable, json!([]), Evict::At(now));
        check(
            &unreachable,
            json!([{"key": "u", "operator": "Exists"}]),
            Evict::Never,
        );
        check(
            &unreachable,
            json!([{"operator": "Exists", "effect": "NoSchedule"}]),
            Evict::At(now),
        );
        check(&unreachable, json!([{"key": "u", "value": "x"}]), Evict::At(now));
        check(
            &unreachable,
            json!([{"key": "u", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}]),
            at("2026-01-01T00:05:00Z"),
        );
        check(
            &[taint("u", "NoExecute"), taint("v", "NoExecute")],
            json!([{"operator": "Exists", "tolerationSeconds": 30}, {"key": "u", "operator": "Exists"}]),
            at("2026-01-01T00:00:30Z"),
        );
        // A taint by hand says not when it came.
        let by_hand = Taint {
            time_added: None,
            ..taint("u", "NoExecute")
        };
        check(
            &[by_hand],
            json!([{"operator": "Exists", "tolerationSeconds": 15}]),
            at("2026-01-01T00:00:55Z"),
        );
    }

    #[test]
    fn the_clock_starts_once_a_pod() {
        let noticed = Noticed::default();
        let (key, at) = (Key::new("a", "b"), |second| {
            Timestamp::from_second(second).unwrap()
        });
        let (one, two) = ("one".to_owned(), "two".to_owned());
        assert_eq!(noticed.since(&key, Some(&one), at(1)), at(1));
        assert_eq!(noticed.since(&key, Some(&one), at(9)), at(1));
        assert_eq!(noticed.since(&key, Some(&two), at(9)), at(9));
        assert!(noticed.forget(&key) && !noticed.forget(&key));
    }
}
