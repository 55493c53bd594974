//! The kubelets of a simulation: each pod that is bound to a simulated node becomes Running, completes or fails, and is
//! gone after its deletion, at the times that its stage says.
//!
//! Every step is read from the pod's own state and times, so a simulation that is started again goes on where it was.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, Resource};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use skiff_client::{Action, Controller, ErrorExt, Informer, InformerFactory, Key, Reconcile, WorkQueue};
use tokio_util::sync::CancellationToken;

use crate::{LABEL, SimConfig, Stage};

/// Addresses of simulated pods: shared address space (RFC 6598), which no cluster routes.
const FIRST_ADDRESS: u32 = u32::from_be_bytes([100, 64, 0, 0]);
const ADDRESSES: u32 = 1 << 22;

/// The parts of the metadata that are looked at. Managed fields and annotations are most of the rest.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SimMeta {
    #[serde(default)]
    namespace: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    uid: Option<String>,
    #[serde(default)]
    resource_version: Option<String>,
    #[serde(default)]
    labels: Option<BTreeMap<String, String>>,
    #[serde(default)]
    deletion_timestamp: Option<Time>,
    #[serde(default)]
    deletion_grace_period_seconds: Option<i64>,
}

fn sim_meta<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let meta = SimMeta::deserialize(deserializer)?;
    Ok(ObjectMeta {
        namespace: meta.namespace,
        name: meta.name,
        uid: meta.uid,
        resource_version: meta.resource_version,
        labels: meta.labels,
        deletion_timestamp: meta.deletion_timestamp,
        deletion_grace_period_seconds: meta.deletion_grace_period_seconds,
        ..ObjectMeta::default()
    })
}

/// The parts of a pod that are looked at. With 100,000 pods the rest would be most of the memory.
#[derive(Clone, Debug, Default, Deserialize)]
struct SimPod {
    #[serde(deserialize_with = "sim_meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: SimPodSpec,
    #[serde(default)]
    status: SimPodStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SimPodSpec {
    #[serde(default)]
    node_name: String,
    #[serde(default)]
    containers: Vec<SimContainer>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct SimContainer {
    name: String,
    #[serde(default)]
    image: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SimPodStatus {
    #[serde(default)]
    phase: String,
    #[serde(default)]
    start_time: Option<Time>,
    #[serde(default)]
    conditions: Vec<SimCondition>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SimCondition {
    #[serde(rename = "type")]
    type_: String,
    #[serde(default)]
    last_transition_time: Option<Time>,
}

impl Resource for SimPod {
    type DynamicType = ();
    type Scope = k8s_openapi::NamespaceResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        Pod::kind(&())
    }
    fn group(_: &()) -> Cow<'_, str> {
        Pod::group(&())
    }
    fn version(_: &()) -> Cow<'_, str> {
        Pod::version(&())
    }
    fn plural(_: &()) -> Cow<'_, str> {
        Pod::plural(&())
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// That it exists is all that is asked of a node.
#[derive(Clone, Debug, Default, Deserialize)]
struct SimNode {
    #[serde(deserialize_with = "sim_meta")]
    metadata: ObjectMeta,
}

impl Resource for SimNode {
    type DynamicType = ();
    type Scope = k8s_openapi::ClusterResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        Node::kind(&())
    }
    fn group(_: &()) -> Cow<'_, str> {
        Node::group(&())
    }
    fn version(_: &()) -> Cow<'_, str> {
        Node::version(&())
    }
    fn plural(_: &()) -> Cow<'_, str> {
        Node::plural(&())
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

struct Kubelets {
    client: Client,
    config: Arc<SimConfig>,
    pods: Informer<SimPod>,
    nodes: Informer<SimNode>,
    /// The nodes of this simulation; there may be others beside it.
    own: HashSet<String>,
    next_address: AtomicU32,
}

/// Plays the kubelets until `stop`.
pub(crate) async fn run(
    client: Client,
    config: Arc<SimConfig>,
    own: HashSet<String>,
    stop: CancellationToken,
) {
    let informers = InformerFactory::new(client.clone(), stop.clone());
    let workers = config.workers;
    let kubelets = Arc::new(Kubelets {
        client,
        config,
        // Pods that no scheduler has bound yet are nobody's.
        pods: informers.partial(None, Some("spec.nodeName!=")),
        nodes: informers.partial(Some(LABEL), None),
        own,
        next_address: AtomicU32::new(1),
    });
    Controller::new("sim", WorkQueue::new(), stop, kubelets)
        .workers(workers)
        .watches(
            |r| &r.pods,
            |_, change| {
                let pod = change.object();
                (!pod.spec.node_name.is_empty()).then(|| Key::of(&**pod))
            },
        )
        .reads(|r| &r.nodes)
        .run()
        .await;
}

/// What is next for a pod.
#[derive(Debug, PartialEq)]
enum Step {
    Nothing,
    Wait(Duration),
    Run,
    End { failed: bool },
    Remove,
}

/// The step that is due at `now`. `chance` is the pod's own number between 0 and 1, the same at every look.
fn step(pod: &SimPod, stage: &Stage, chance: f64, now: Timestamp) -> Step {
    let due = |since: Option<Timestamp>, delay: Duration, step: Step| {
        let at = since
            .unwrap_or(now)
            .saturating_add(SignedDuration::try_from(delay).unwrap_or(SignedDuration::MAX));
        match at {
            Ok(at) if at > now => Step::Wait(Duration::try_from(at.duration_since(now)).unwrap_or_default()),
            _ => step,
        }
    };
    let transition = |kind: &str| {
        let found = pod
            .status
            .conditions
            .iter()
            .find(|condition| condition.type_ == kind);
        found
            .and_then(|found| found.last_transition_time.as_ref())
            .map(|time| time.0)
    };
    if let Some(deleted) = &pod.metadata.deletion_timestamp {
        // The timestamp is when the grace period ends.
        let grace = SignedDuration::from_secs(pod.metadata.deletion_grace_period_seconds.unwrap_or(0));
        return due(deleted.0.checked_sub(grace).ok(), stage.gone_after, Step::Remove);
    }
    match pod.status.phase.as_str() {
        "" | "Pending" => due(transition("PodScheduled"), stage.ready_after, Step::Run),
        "Running" => {
            let since = pod.status.start_time.as_ref().map(|time| time.0);
            match (stage.succeed_after, stage.fail_after) {
                (Some(after), _) => due(since, after, Step::End { failed: false }),
                (None, Some(after)) if chance < stage.fail_chance => {
                    due(since, after, Step::End { failed: true })
                }
                _ => Step::Nothing,
            }
        }
        _ => Step::Nothing,
    }
}

fn running(pod: &SimPod, address: Ipv4Addr, now: Timestamp) -> Value {
    let now = skiff_meta::time::format_seconds(now);
    let condition = |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": now, "observedGeneration": pod.metadata.generation});
    let container = |container: &SimContainer| {
        json!({"name": container.name, "image": container.image, "imageID": "", "ready": true, "started": true,
            "restartCount": 0, "state": {"running": {"startedAt": now}}})
    };
    let conditions = [
        "PodReadyToStartContainers",
        "Initialized",
        "ContainersReady",
        "Ready",
    ]
    .map(condition);
    json!({"phase": "Running", "startTime": now, "podIP": address, "podIPs": [{"ip": address}],
        "containerStatuses": pod.spec.containers.iter().map(container).collect::<Vec<_>>(),
        "conditions": conditions})
}

fn ended(pod: &SimPod, exit_code: i32, now: Timestamp) -> Value {
    let now = skiff_meta::time::format_seconds(now);
    let (phase, reason) = if exit_code == 0 {
        ("Succeeded", "Completed")
    } else {
        ("Failed", "Error")
    };
    let not_ready = if exit_code == 0 {
        "PodCompleted"
    } else {
        "PodFailed"
    };
    let condition =
        |kind: &str| json!({"type": kind, "status": "False", "reason": not_ready, "lastTransitionTime": now});
    let started = pod
        .status
        .start_time
        .as_ref()
        .map(|time| skiff_meta::time::format_seconds(time.0));
    let container = |container: &SimContainer| {
        json!({"name": container.name, "image": container.image, "imageID": "", "ready": false, "started": false,
            "restartCount": 0, "state": {"terminated": {"exitCode": exit_code, "reason": reason,
                "startedAt": started, "finishedAt": now}}})
    };
    let conditions = ["ContainersReady", "Ready"].map(condition);
    json!({"phase": phase, "containerStatuses": pod.spec.containers.iter().map(container).collect::<Vec<_>>(),
        "conditions": conditions})
}

impl Reconcile for Kubelets {
    type Key = Key;
    type Error = kube::Error;

    async fn reconcile(&self, key: Key) -> Result<Action, kube::Error> {
        let Some(pod) = self.pods.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let node = &pod.spec.node_name;
        if !self.own.contains(node) || !self.nodes.contains("", node) {
            return Ok(Action::Done);
        }
        let default = Stage::default();
        let mut stages = self.config.profile.pods.iter();
        let stage = stages.find(|stage| stage.selects(&key.namespace, pod.metadata.labels.as_ref()));
        let stage = stage.unwrap_or(&default);
        let now = Timestamp::now();
        let status = match step(&pod, stage, chance_of(&pod.metadata), now) {
            Step::Nothing => return Ok(Action::Done),
            Step::Wait(delay) => return Ok(Action::RequeueAfter(delay)),
            Step::Remove => return self.remove(&key, &pod).await,
            Step::Run => running(&pod, self.address(), now),
            Step::End { failed } => ended(&pod, if failed { stage.exit_code } else { 0 }, now),
        };
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let patch = Patch::Strategic(json!({"metadata": {"uid": pod.metadata.uid}, "status": status}));
        match api.patch_status(&key.name, &PatchParams::default(), &patch).await {
            Ok(_) => Ok(Action::Done),
            // It is gone, or another of its name is there.
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(Action::Done),
            Err(error) => Err(error),
        }
    }
}

impl Kubelets {
    fn address(&self) -> Ipv4Addr {
        let number = self.next_address.fetch_add(1, Ordering::Relaxed) % ADDRESSES;
        Ipv4Addr::from(FIRST_ADDRESS + number)
    }

    async fn remove(&self, key: &Key, pod: &SimPod) -> Result<Action, kube::Error> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: pod.metadata.uid.clone(),
                resource_version: None,
            }),
            ..DeleteParams::default().grace_period(0)
        };
        match api.delete(&key.name, &params).await {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(Action::Done),
            Err(error) => Err(error),
        }
    }
}

/// A number between 0 and 1 that belongs to the pod.
fn chance_of(meta: &ObjectMeta) -> f64 {
    let mut hasher = DefaultHasher::new();
    meta.uid.hash(&mut hasher);
    (hasher.finish() >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(value: Value) -> SimPod {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn each_step_comes_in_its_time() {
        let second = Duration::from_secs(1);
        let stage = Stage {
            ready_after: 2 * second,
            succeed_after: Some(5 * second),
            gone_after: second,
            fail_chance: 1.0,
            ..Stage::default()
        };
        let failing = Stage {
            succeed_after: None,
            fail_after: Some(5 * second),
            fail_chance: 0.5,
            ..stage.clone()
        };
        let scheduled = json!([{"type": "PodScheduled", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
        let pending = pod(json!({"metadata": {}, "status": {"phase": "Pending", "conditions": scheduled}}));
        let running =
            pod(json!({"metadata": {}, "status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}}));
        let done = pod(json!({"metadata": {}, "status": {"phase": "Succeeded"}}));
        let deleted = pod(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:30Z",
            "deletionGracePeriodSeconds": 30}, "status": {"phase": "Running"}}));
        let check = |pod: &SimPod, stage: &Stage, chance: f64, at: u64, expected: Step| {
            let now: Timestamp = format!("2026-01-01T00:00:{at:02}Z").parse().unwrap();
            assert_eq!(
                step(pod, stage, chance, now),
                expected,
                "{:?} at {at}",
                pod.status.phase
            );
        };
        check(&pending, &stage, 0.0, 1, Step::Wait(second));
        check(&pending, &stage, 0.0, 2, Step::Run);
        check(&pending, &Stage::default(), 0.0, 0, Step::Run);
        check(&running, &stage, 0.0, 3, Step::Wait(2 * second));
        check(&running, &stage, 0.0, 5, Step::End { failed: false });
        check(&running, &failing, 0.2, 5, Step::End { failed: true });
        check(&running, &failing, 0.7, 5, Step::Nothing);
        check(&running, &Stage::default(), 0.0, 5, Step::Nothing);
        check(&done, &stage, 0.0, 59, Step::Nothing);
        check(&deleted, &stage, 0.0, 0, Step::Wait(second));
        check(&deleted, &stage, 0.0, 1, Step::Remove);
    }

    #[test]
    fn the_chance_belongs_to_the_pod() {
        let meta = |uid: &str| ObjectMeta {
            uid: Some(uid.to_owned()),
            ..ObjectMeta::default()
        };
        assert_eq!(chance_of(&meta("a")), chance_of(&meta("a")));
        let mean: f64 = (0..1000).map(|n| chance_of(&meta(&n.to_string()))).sum::<f64>() / 1000.0;
        assert!((0.4..0.6).contains(&mean), "{mean}");
    }
}
