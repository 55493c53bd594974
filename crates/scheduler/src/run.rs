//! The loop: informers feed cache and queue, cycles run one after another, bindings run beside them.

use crate::cycle::{Outcome, schedule};
use crate::framework::{ClusterEvent, Plugin, Rejection};
use crate::metrics::{AttemptResult, SchedulerMetrics};
use crate::plugins::default_profile;
use crate::queue::{Queued, SchedulingQueue};
use crate::snapshot::{Cache, PodInfo};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, Patch, PatchParams};
use parking_lot::Mutex;
use serde_json::json;
use skiff_client::{
    Change, Client, ComponentMetrics, ErrorExt, EventRecorder, InformerFactory, LeaderElector, cause_of,
    reference,
};
use skiff_trace::Work;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;
use tokio_util::sync::CancellationToken;

const DEFAULT_SCHEDULER: &str = "default-scheduler";

#[derive(Clone)]
pub struct SchedulerConfig {
    /// Pods that name this scheduler are ours.
    pub scheduler_name: String,
    /// With it, the lease `kube-scheduler` decides which of several schedulers works; the value is our identity.
    pub leader_elect: Option<String>,
    /// What is measured of it.
    pub metrics: Arc<ComponentMetrics>,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            scheduler_name: DEFAULT_SCHEDULER.to_owned(),
            leader_elect: None,
            metrics: Arc::default(),
        }
    }
}

struct Scheduler {
    client: Client,
    recorder: EventRecorder,
    plugins: Vec<Arc<dyn Plugin>>,
    queue: Arc<SchedulingQueue>,
    /// A leaf lock.
    cache: Mutex<Cache>,
    metrics: SchedulerMetrics,
}

struct BindFailure {
    message: String,
    /// Nobody is left to be told.
    pod_is_gone: bool,
}

/// A binding under way. Unless it is done, its end, be it by a panic, gives the room back and lets the pod be
/// tried again.
struct Binding<'a> {
    scheduler: &'a Scheduler,
    pod: &'a PodInfo,
    done: bool,
}

impl Drop for Binding<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let freed = self.scheduler.cache.lock().forget_assumed(&self.pod.uid);
        self.scheduler.queue.back_off(&self.pod.uid);
        if freed {
            self.scheduler.queue.on_event(ClusterEvent::PodRemoved);
        }
    }
}

/// Schedules until `shutdown`.
pub async fn run(config: SchedulerConfig, client: Client, shutdown: CancellationToken) {
    match config.leader_elect.clone() {
        None => lead(config, client, shutdown).await,
        Some(identity) => {
            let elector = LeaderElector::new("kube-system", "kube-scheduler", &identity)
                .measured(config.metrics.clone());
            let work_client = client.clone();
            elector
                .run(client, move |stop| lead(config, work_client, stop), shutdown)
                .await;
        }
    }
}

async fn lead(config: SchedulerConfig, client: Client, shutdown: CancellationToken) {
    let plugins = default_profile(client.clone());
    let registry = &config.metrics.registry;
    let scheduler = Arc::new(Scheduler {
        recorder: EventRecorder::new(client.clone(), &config.scheduler_name, ""),
        queue: Arc::new(SchedulingQueue::new(plugins.clone())),
        plugins,
        client: client.clone(),
        cache: Mutex::default(),
        metrics: SchedulerMetrics::new(registry, &config.scheduler_name),
    });
    SchedulerMetrics::show_queue(registry, Arc::downgrade(&scheduler.queue));
    let factory = InformerFactory::new(client, shutdown.clone());
    let nodes = factory.informer::<Node>();
    let pods = factory.informer::<Pod>();
    let follower = Arc::clone(&scheduler);
    nodes.subscribe(move |change| follower.on_node(change));
    let (follower, name) = (Arc::clone(&scheduler), config.scheduler_name);
    pods.subscribe(move |change| follower.on_pod(change, &name));
    tokio::select! {
        () = shutdown.cancelled() => return,
        () = async { nodes.synced().await; pods.synced().await } => {}
    }
    loop {
        let queued = tokio::select! {
            () = shutdown.cancelled() => break,
            queued = scheduler.queue.next() => queued,
        };
        let Some(queued) = queued else { break };
        scheduler.attempt(queued);
    }
    scheduler.queue.close();
}

/// The parts of a node that decide whether pods fit. Heartbeats change none of them.
fn fits_differ(old: &Node, new: &Node) -> bool {
    let allocatable = |n: &Node| n.status.as_ref().and_then(|s| s.allocatable.clone());
    old.metadata.labels != new.metadata.labels || old.spec != new.spec || allocatable(old) != allocatable(new)
}

impl Scheduler {
    fn on_node(&self, change: &Change<Node>) {
        match change {
            Change::Applied { old, new } => {
                self.cache.lock().set_node(Arc::clone(new));
                match old {
                    None => self.queue.on_event(ClusterEvent::NodeAdded),
                    Some(old) if fits_differ(old, new) => self.queue.on_event(ClusterEvent::NodeChanged),
                    Some(_) => {}
                }
            }
            Change::Deleted { last } => {
                self.cache
                    .lock()
                    .remove_node(last.metadata.name.as_deref().unwrap_or_default());
            }
        }
    }

    fn on_pod(&self, change: &Change<Pod>, scheduler_name: &str) {
        let (pod, gone) = match change {
            Change::Applied { new, .. } => (PodInfo::new(Arc::clone(new)), false),
            Change::Deleted { last } => (PodInfo::new(Arc::clone(last)), true),
        };
        let pod = Arc::new(pod);
        if gone || pod.has_ended() {
            self.queue.remove(&pod.uid);
            let was_placed = {
                let mut cache = self.cache.lock();
                let was_placed = cache.is_placed(&pod.uid);
                cache.remove_pod(&pod.uid);
                was_placed
            };
            if was_placed {
                self.queue.on_event(ClusterEvent::PodRemoved);
            }
        } else if let Some(node) = pod.node_name().map(str::to_owned) {
            self.queue.remove(&pod.uid);
            self.cache.lock().place(&pod, &node);
        } else if pod.pod.metadata.deletion_timestamp.is_some() {
            self.queue.remove(&pod.uid);
        } else {
            let wanted = pod.pod.spec.as_ref().and_then(|s| s.scheduler_name.as_deref());
            if wanted.unwrap_or(DEFAULT_SCHEDULER) == scheduler_name {
                let cause = cause_of(&*pod.pod);
                self.queue.add(pod, Some(cause));
            }
        }
    }

    /// One cycle. The decision is made here and now; what needs the network goes on in a task of its own.
    fn attempt(self: &Arc<Self>, queued: Queued) {
        let pod = Arc::clone(&queued.pod);
        let work = Work::new(queued.cause.clone());
        work.push(
            "queue",
            queued.entered_us,
            skiff_trace::now_us() - queued.entered_us,
        );
        let began = skiff_trace::now_us();
        let started = Instant::now();
        let outcome = {
            let mut cache = self.cache.lock();
            if cache.is_placed(&pod.uid) {
                return;
            }
            // A plugin that trips over one pod must not keep all others waiting.
            let mut start = cache.next_start;
            let decided = catch_unwind(AssertUnwindSafe(|| {
                schedule(&pod, cache.nodes(), &self.plugins, &mut start)
            }));
            cache.next_start = start;
            self.metrics.algorithm(started);
            // Assumed at once: the next cycle must not give the same room away again.
            if let Ok(Outcome::Node(node)) = &decided {
                cache.assume(&pod, node);
            }
            decided
        };
        let Ok(outcome) = outcome else {
            tracing::error!(pod = %pod.key, "scheduling the pod panicked");
            self.metrics.attempt(AttemptResult::Error, started);
            self.queue.back_off(&pod.uid);
            return;
        };
        work.push("schedule", began, skiff_trace::now_us() - began);
        let scheduler = Arc::clone(self);
        tokio::spawn(skiff_trace::scope(work, async move {
            match outcome {
                Outcome::Node(node) => {
                    let mut binding = Binding {
                        scheduler: &scheduler,
                        pod: &pod,
                        done: false,
                    };
                    let result = scheduler.bind(&pod, &node).await;
                    binding.done = result.is_ok();
                    let Err(failure) = result else {
                        scheduler.metrics.attempt(AttemptResult::Scheduled, started);
                        scheduler.metrics.scheduled(&queued);
                        return;
                    };
                    scheduler.metrics.attempt(AttemptResult::Error, started);
                    tracing::warn!(pod = %pod.key, node, why = failure.message, "binding failed");
                    for plugin in &scheduler.plugins {
                        plugin.unreserve(&pod, &node);
                    }
                    drop(binding);
                    if !failure.pod_is_gone {
                        scheduler.report(&pod, "SchedulerError", &failure.message).await;
                    }
                }
                Outcome::Nowhere(diagnosis) => {
                    scheduler.metrics.attempt(AttemptResult::Unschedulable, started);
                    // Parked first: what happens while the report is written must find it parked.
                    scheduler.queue.park(&pod.uid, diagnosis.rejected_by);
                    scheduler.report(&pod, "Unschedulable", &diagnosis.message).await;
                }
            }
        }));
    }

    async fn bind(&self, pod: &Arc<PodInfo>, node: &str) -> Result<(), BindFailure> {
        let refused = |r: Rejection| BindFailure {
            message: r.reasons.join(", "),
            pod_is_gone: false,
        };
        for plugin in &self.plugins {
            plugin.reserve(pod, node).map_err(refused)?;
        }
        for plugin in &self.plugins {
            plugin.permit(pod, node).map_err(refused)?;
        }
        for plugin in &self.plugins {
            plugin.pre_bind(pod, node).await.map_err(refused)?;
        }
        let mut bound = false;
        for plugin in &self.plugins {
            if let Some(result) = plugin.bind(pod, node).await {
                result.map_err(|error| BindFailure {
                    message: format!(
                        "binding rejected: running Bind plugin \"{}\": {error}",
                        plugin.name()
                    ),
                    pod_is_gone: error.is_not_found(),
                })?;
                bound = true;
                break;
            }
        }
        if !bound {
            return Err(refused(Rejection::new("no plugin binds")));
        }
        let message = format!("Successfully assigned {} to {node}", pod.key);
        self.recorder
            .event(&reference(&*pod.pod), "Normal", "Scheduled", message);
        for plugin in &self.plugins {
            plugin.post_bind(pod, node);
        }
        Ok(())
    }

    /// Says why the pod waits: as an event, and as its condition.
    async fn report(&self, pod: &PodInfo, reason: &str, message: &str) {
        self.recorder.event(
            &reference(&*pod.pod),
            "Warning",
            "FailedScheduling",
            message.to_owned(),
        );
        let conditions = pod
            .pod
            .status
            .as_ref()
            .and_then(|s| s.conditions.as_deref())
            .unwrap_or_default();
        let same = |c: &k8s_openapi::api::core::v1::PodCondition| {
            c.type_ == "PodScheduled"
                && c.status == "False"
                && c.reason.as_deref() == Some(reason)
                && c.message.as_deref() == Some(message)
        };
        if conditions.iter().any(same) {
            return;
        }
        let now = k8s_openapi::jiff::Timestamp::now();
        let was_false = conditions
            .iter()
            .find(|c| c.type_ == "PodScheduled" && c.status == "False");
        let since = was_false
            .and_then(|c| c.last_transition_time.as_ref())
            .map_or(now, |t| t.0);
        let condition = json!({
            "type": "PodScheduled", "status": "False", "reason": reason, "message": message,
            "lastTransitionTime": skiff_meta::time::format_seconds(since),
            "observedGeneration": pod.pod.metadata.generation,
        });
        let patch = json!({"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}});
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.key.namespace);
        let written = api
            .patch_status(&pod.key.name, &PatchParams::default(), &Patch::Strategic(patch))
            .await;
        if let Err(error) = written {
            tracing::debug!(pod = %pod.key, %error, "cannot write the PodScheduled condition");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framework::Rejection;
    use crate::snapshot::NodeInfo;
    use crate::snapshot::fixtures::{plain_node, pod};
    use tokio::time::{Duration, timeout};

    /// Trips over the pod "bad".
    struct Clumsy;

    impl Plugin for Clumsy {
        fn name(&self) -> &'static str {
            "Clumsy"
        }

        fn filter(&self, pod: &PodInfo, _node: &NodeInfo) -> Result<(), Rejection> {
            assert!(pod.uid != "bad", "tripped");
            Ok(())
        }
    }

    /// A scheduler with one node and a server that nobody can reach.
    fn scheduler() -> Arc<Scheduler> {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let client = Client::try_from(config).unwrap();
        let mut plugins = default_profile(client.clone());
        plugins.push(Arc::new(Clumsy));
        let scheduler = Scheduler {
            recorder: EventRecorder::new(client.clone(), "test", ""),
            queue: Arc::new(SchedulingQueue::new(plugins.clone())),
            plugins,
            client,
            cache: Mutex::default(),
            metrics: SchedulerMetrics::new(&skiff_prometheus::Registry::default(), "test"),
        };
        let node = plain_node("a").node.unwrap();
        scheduler.cache.lock().set_node(node);
        Arc::new(scheduler)
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_binding_gives_the_room_back_and_a_panic_costs_one_try() {
        for name in ["good", "bad"] {
            let scheduler = scheduler();
            scheduler.queue.add(Arc::new(pod(name, json!({}))), None);
            let queued = scheduler.queue.next().await.unwrap();
            scheduler.attempt(queued);
            assert_eq!(scheduler.cache.lock().is_placed(name), name == "good", "assumed");
            let again = timeout(Duration::from_secs(300), scheduler.queue.next()).await;
            assert_eq!(again.unwrap().unwrap().attempts, 2, "{name}");
            let cache = scheduler.cache.lock();
            assert!(
                !cache.is_placed(name) && cache.nodes()[0].pods.is_empty(),
                "{name}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_is_bound_or_gone_while_it_is_being_bound_leaves_nothing() {
        let scheduler = scheduler();
        let waiting = pod("p", json!({}));
        let bound = pod("p", json!({"nodeName": "a"}));
        let applied = |pod: &PodInfo| Change::Applied {
            old: None,
            new: Arc::clone(&pod.pod),
        };
        scheduler.on_pod(&applied(&waiting), DEFAULT_SCHEDULER);
        let queued = scheduler.queue.next().await.unwrap();
        scheduler.attempt(queued);
        // The answer to the binding is lost, but the API shows the pod on its node.
        scheduler.on_pod(&applied(&bound), DEFAULT_SCHEDULER);
        let quiet = timeout(Duration::from_secs(60), scheduler.queue.next()).await;
        assert!(quiet.is_err(), "nothing is left to do");
        assert!(scheduler.cache.lock().is_placed("p"), "it still takes its room");
        scheduler.on_pod(&Change::Deleted { last: bound.pod }, DEFAULT_SCHEDULER);
        assert!(!scheduler.cache.lock().is_placed("p"));
    }
}
