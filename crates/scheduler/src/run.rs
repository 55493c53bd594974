//! The loop: informers feed cache and queue, cycles run one after another, bindings run beside them.

use crate::binding::WaitingPods;
use crate::cache::Cache;
use crate::class::Classes;
use crate::config::Configuration;
use crate::cycle::{Diagnosis, Outcome, schedule};
use crate::extender::Extender;
use crate::framework::{Code, CycleState, Permit, Points, Profile, Rejection};
use crate::handlers;
use crate::listers::Listers;
use crate::metrics::{AttemptResult, SchedulerMetrics, VolumeMetrics};
use crate::node::NodeId;
use crate::plugins::Handle;
use crate::pod::PodInfo;
use crate::pod_group::GroupConditions;
use crate::preempt::Preempting;
use crate::queue::{Queued, SchedulingQueue};
use futures::FutureExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use parking_lot::Mutex;
use skiff_client::{Client, ComponentMetrics, EventRecorder, Informer, InformerFactory};
use skiff_trace::Work;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

#[derive(Clone, Default)]
pub struct SchedulerConfig {
    /// Profiles, plugins and times.
    pub configuration: Configuration,
    /// With it, a lease decides which of several schedulers works, unless the configuration says otherwise; the value is
    /// our identity.
    pub leader_elect: Option<String>,
    /// PodGroups are served, which they are not by default.
    pub pod_groups: bool,
    /// What is measured of it.
    pub metrics: Arc<ComponentMetrics>,
}

/// What a cycle reads and changes.
#[derive(Default)]
pub(crate) struct Core {
    pub(crate) cache: Cache,
    pub(crate) classes: Classes,
}

pub(crate) struct Scheduler {
    pub(crate) client: Client,
    /// By scheduler name: events name their profile as their source.
    pub(crate) recorders: HashMap<String, EventRecorder>,
    pub(crate) profiles: Arc<HashMap<String, Arc<Profile>>>,
    pub(crate) queue: Arc<SchedulingQueue>,
    pub(crate) listers: Arc<Listers>,
    pub(crate) preempting: Arc<Preempting>,
    pub(crate) waiting: WaitingPods,
    pub(crate) group_conditions: GroupConditions,
    pub(crate) extenders: Vec<Arc<Extender>>,
    /// Whole objects, which extenders are shown.
    pub(crate) objects: OnceLock<(Informer<Pod>, Informer<Node>)>,
    /// Bindings and reports under way. They end where they stand when this scheduler no longer leads.
    tasks: TaskTracker,
    stopped: CancellationToken,
    /// Lock order: before the queue's.
    pub(crate) core: Mutex<Core>,
    pub(crate) metrics: SchedulerMetrics,
}

/// Schedules until `shutdown`.
pub async fn run(config: SchedulerConfig, client: Client, shutdown: CancellationToken) {
    let election = &config.configuration.election;
    match config.leader_elect.clone().filter(|_| election.elects) {
        None => lead(config, client, shutdown).await,
        Some(identity) => {
            let elector = election.elector(&identity).measured(config.metrics.clone());
            let work_client = client.clone();
            elector
                .run(client, move |stop| lead(config, work_client, stop), shutdown)
                .await;
        }
    }
}

async fn lead(config: SchedulerConfig, client: Client, shutdown: CancellationToken) {
    let scheduler = match Scheduler::new(&config, client.clone()) {
        Ok(scheduler) => Arc::new(scheduler),
        Err(error) => {
            // `Configuration::parse` checks all but the plugins' arguments.
            tracing::error!(%error, "the scheduler's configuration is invalid");
            shutdown.cancelled().await;
            return;
        }
    };
    // Also if this future is dropped.
    let _stops = scheduler.stopped.clone().drop_guard();
    SchedulerMetrics::show_queue(&config.metrics.registry, Arc::downgrade(&scheduler.queue));
    let factory = InformerFactory::new(client, shutdown.clone());
    tokio::select! {
        () = shutdown.cancelled() => return,
        () = handlers::follow(&scheduler, &factory) => {}
    }
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    loop {
        let queued = tokio::select! {
            () = shutdown.cancelled() => break,
            _ = tick.tick() => {
                scheduler.expire_assumed();
                continue;
            }
            queued = scheduler.queue.next() => queued,
        };
        let Some(queued) = queued else { break };
        tokio::select! {
            biased;
            () = scheduler.attempt(queued) => {}
            // An extender takes its time.
            () = shutdown.cancelled() => break,
        }
        // Bindings that wait for this thread get their turn.
        tokio::task::consume_budget().await;
    }
    scheduler.queue.close();
    // Whoever leads next must see everything that this one wrote: nothing is written once the lease is given back.
    scheduler.stopped.cancel();
    scheduler.tasks.close();
    scheduler.tasks.wait().await;
}

/// What a cycle came to.
pub(crate) enum Decided {
    Placed {
        node: Arc<str>,
        state: CycleState,
        wait: Option<Duration>,
    },
    Nowhere(Diagnosis),
}

impl Scheduler {
    pub(crate) fn new(config: &SchedulerConfig, client: Client) -> Result<Self, crate::ConfigError> {
        let handle = Handle {
            client: client.clone(),
            listers: Arc::default(),
            preempting: Arc::default(),
            volume_metrics: VolumeMetrics::new(&config.metrics.registry),
            pod_groups: config.pod_groups,
        };
        let profiles = config.configuration.profiles(&handle)?;
        let recorders = profiles.iter().map(|profile| {
            let name = profile.scheduler_name.clone();
            let recorder = EventRecorder::new(client.clone(), &name, "");
            (name, recorder)
        });
        let recorders = recorders.collect();
        let profiles = profiles.into_iter();
        let profiles: HashMap<String, Arc<Profile>> = profiles
            .map(|profile| (profile.scheduler_name.clone(), Arc::new(profile)))
            .collect();
        let profiles = Arc::new(profiles);
        let queue = SchedulingQueue::new(Arc::clone(&profiles), config.configuration.backoff);
        let mut core = Core::default();
        core.cache.pod_groups = config.pod_groups;
        Ok(Self {
            client,
            recorders,
            queue: Arc::new(queue),
            profiles,
            listers: handle.listers,
            preempting: handle.preempting,
            waiting: WaitingPods::default(),
            group_conditions: GroupConditions::default(),
            extenders: config.configuration.extenders()?,
            objects: OnceLock::new(),
            tasks: TaskTracker::new(),
            stopped: CancellationToken::new(),
            core: Mutex::new(core),
            metrics: SchedulerMetrics::new(&config.metrics.registry),
        })
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stopped = self.stopped.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = stopped.cancelled() => {}
                () = task => {}
            }
        });
    }

    /// One cycle. The decision is made here, at once unless extenders have a say; what needs the network goes on in a task
    /// of its own.
    async fn attempt(self: &Arc<Self>, queued: Queued) {
        let pod = Arc::clone(&queued.pod);
        if let Some(group) = pod.group_key() {
            return self.attempt_group(queued, group).await;
        }
        let Some(profile) = self.queue.profile(&pod).cloned() else {
            return;
        };
        let work = Work::new(Some((*queued.cause).clone()));
        work.push(
            "queue",
            queued.entered_us,
            skiff_trace::now_us() - queued.entered_us,
        );
        let (began, started) = (skiff_trace::now_us(), Instant::now());
        let decided = self.decide_one(&profile, &pod).await;
        self.metrics.algorithm(started);
        let decided = match decided {
            Ok(Some(decided)) => decided,
            Ok(None) => return,
            Err(_) => {
                self.metrics
                    .attempt(&profile.scheduler_name, AttemptResult::Error, started);
                self.recover_from_panic(&pod);
                self.queue.back_off(&pod.uid);
                return;
            }
        };
        work.push("schedule", began, skiff_trace::now_us() - began);
        let scheduler = Arc::clone(self);
        match decided {
            Decided::Placed { node, state, wait } => {
                self.spawn(skiff_trace::scope(work, async move {
                    scheduler
                        .bind(&profile, queued, &node, &state, wait, started)
                        .await;
                }));
            }
            Decided::Nowhere(diagnosis) => {
                let running = self.failed(&profile, &pod, &diagnosis, started);
                self.spawn(skiff_trace::scope(work, async move {
                    scheduler.report_failure(&profile, &pod, diagnosis, running).await;
                }));
            }
        }
    }

    /// Finds a node and takes its room. `None`: there is nothing to do. A plugin that trips over one pod must not keep all
    /// others waiting.
    pub(crate) async fn decide_one(
        &self,
        profile: &Profile,
        pod: &Arc<PodInfo>,
    ) -> std::thread::Result<Option<Decided>> {
        let extenders = self.extenders_of(pod);
        if extenders.is_empty() {
            catch_unwind(AssertUnwindSafe(|| self.decide(profile, pod)))
        } else {
            let deciding = self.decide_with_extenders(profile, pod, &extenders);
            AssertUnwindSafe(deciding).catch_unwind().await
        }
    }

    /// Forgets what a cycle that panicked may have left.
    pub(crate) fn recover_from_panic(&self, pod: &PodInfo) {
        tracing::error!(pod = %pod.key, "scheduling the pod panicked");
        let mut core = self.core.lock();
        core.cache.forget_assumed(&pod.uid);
        core.classes.clear();
    }

    /// As `decide_one`, without extenders.
    fn decide(&self, profile: &Profile, pod: &Arc<PodInfo>) -> Option<Decided> {
        let mut core = self.core.lock();
        let Core { cache, classes } = &mut *core;
        if cache.is_placed(&pod.uid) || pod.deleting {
            return None;
        }
        let outcome = classes.schedule(profile, cache, pod).unwrap_or_else(|| {
            let mut start = cache.next_start;
            let outcome = schedule(profile, cache, pod, &mut start);
            cache.next_start = start;
            outcome
        });
        Some(match outcome {
            Outcome::Nowhere(diagnosis) => Decided::Nowhere(diagnosis),
            Outcome::Node { id, state } => self.take(profile, cache, pod, id, state),
        })
    }

    /// Assumed at once: the next cycle must not give the same room away again.
    pub(crate) fn take(
        &self,
        profile: &Profile,
        cache: &mut Cache,
        pod: &Arc<PodInfo>,
        id: NodeId,
        mut state: CycleState,
    ) -> Decided {
        let Some(name) = cache.get(id).map(|node| Arc::clone(&node.name)) else {
            return Decided::Nowhere(Diagnosis::default());
        };
        cache.assume(Arc::clone(pod), &name);
        match reserve_and_permit(profile, cache, pod, id, &name, &mut state) {
            Ok(wait) => Decided::Placed {
                node: name,
                state,
                wait,
            },
            Err((rejection, number)) => {
                for (_, enabled) in profile.at(Points::RESERVE) {
                    enabled.plugin.unreserve(&state, pod, &name);
                }
                cache.forget_assumed(&pod.uid);
                Decided::Nowhere(rejected(&rejection, number))
            }
        }
    }

    fn expire_assumed(&self) {
        let expired = self.core.lock().cache.expire(Instant::now());
        for pod in expired {
            tracing::warn!(pod = %pod.key, "the API has not shown the pod on its node in time");
            self.queue.on_event(crate::events::ClusterEvent::PodRemoved(pod));
        }
    }
}

/// What a rejection after the choice of a node means for the pod.
pub(crate) fn rejected(rejection: &Rejection, number: usize) -> Diagnosis {
    let message = rejection.message();
    let is_error = rejection.code == Code::Error;
    Diagnosis {
        message: if is_error {
            message
        } else {
            format!("0/1 nodes are available: 1 {message}.")
        },
        rejected_by: 1 << number,
        post_filter: crate::framework::PostFilter {
            nominate: Some(String::new()),
            ..Default::default()
        },
        is_error,
    }
}

fn reserve_and_permit(
    profile: &Profile,
    cache: &Cache,
    pod: &Arc<PodInfo>,
    id: NodeId,
    name: &str,
    state: &mut CycleState,
) -> Result<Option<Duration>, (Rejection, usize)> {
    let Some(node) = cache.get(id) else {
        return Err((Rejection::error("the node is gone"), 0));
    };
    for (number, enabled) in profile.at(Points::RESERVE) {
        let plugin = &enabled.plugin;
        let reserved = plugin.reserve(state, pod, node);
        reserved.map_err(|rejection| (rejection.by(plugin.name()), number))?;
    }
    let mut wait = None;
    for (number, enabled) in profile.at(Points::PERMIT) {
        match enabled.plugin.permit(state, pod, name) {
            Permit::Allow => {}
            Permit::Wait(time) => wait = Some(wait.map_or(time, |other: Duration| other.min(time))),
            Permit::Reject(rejection) => return Err((rejection.by(enabled.plugin.name()), number)),
        }
    }
    Ok(wait)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::object;
    use crate::framework::{Enabled, Plugin, Scope, Verdict};
    use crate::node::NodeInfo;
    use crate::plugins::testing::unreachable_client;
    use serde_json::json;
    use skiff_client::Change;
    use tokio::time::timeout;

    /// Trips over the pod "bad"; lets "patient" wait.
    struct Clumsy;

    impl Plugin for Clumsy {
        fn name(&self) -> &'static str {
            "Clumsy"
        }
        fn filter(&self, _state: &CycleState, pod: &PodInfo, _node: &NodeInfo) -> Verdict {
            assert!(&*pod.uid != "bad", "tripped");
            Ok(())
        }
        fn permit(&self, _state: &CycleState, pod: &PodInfo, _node: &str) -> Permit {
            match &*pod.uid {
                "patient" => Permit::Wait(Duration::from_secs(20)),
                "unwanted" => Permit::Reject(Rejection::unschedulable("not today")),
                _ => Permit::Allow,
            }
        }
        fn scope(&self, _pod: &PodInfo) -> Scope {
            Scope::Opaque
        }
    }

    fn applied<K>(new: K) -> Change<K> {
        Change::Applied {
            old: None,
            new: Arc::new(new),
        }
    }

    fn node(name: &str) -> Node {
        let status = json!({"allocatable": {"cpu": "2", "memory": "4Gi", "pods": "110"}});
        serde_json::from_value(json!({"metadata": {"name": name}, "status": status})).unwrap()
    }

    /// A scheduler with one node and a server that nobody can reach.
    fn scheduler() -> Arc<Scheduler> {
        let mut scheduler = Scheduler::new(&SchedulerConfig::default(), unreachable_client()).unwrap();
        let handle = Handle {
            client: unreachable_client(),
            listers: Arc::clone(&scheduler.listers),
            preempting: Arc::clone(&scheduler.preempting),
            volume_metrics: VolumeMetrics::new(&skiff_prometheus::Registry::default()),
            pod_groups: true,
        };
        let mut profile = Configuration::default().profiles(&handle).unwrap().remove(0);
        profile.plugins.push(Enabled {
            plugin: Arc::new(Clumsy),
            weight: 1,
            points: Points::ALL,
        });
        let profiles = Arc::new(HashMap::from([(
            profile.scheduler_name.clone(),
            Arc::new(profile),
        )]));
        scheduler.queue = Arc::new(SchedulingQueue::new(Arc::clone(&profiles), Default::default()));
        scheduler.profiles = profiles;
        scheduler.on_node(&applied(node("a")));
        Arc::new(scheduler)
    }

    fn waiting(name: &str) -> Pod {
        object(name, json!({}), json!({}))
    }

    async fn try_once(scheduler: &Arc<Scheduler>, name: &str) {
        scheduler.on_pod(&applied(waiting(name)));
        let queued = scheduler.queue.next().await.unwrap();
        scheduler.attempt(queued).await;
    }

    fn is_placed(scheduler: &Scheduler, name: &str) -> bool {
        scheduler.core.lock().cache.is_placed(name)
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_binding_gives_the_room_back_and_a_panic_costs_one_try() {
        for name in ["good", "bad"] {
            let scheduler = scheduler();
            try_once(&scheduler, name).await;
            assert_eq!(is_placed(&scheduler, name), name == "good", "assumed");
            let again = timeout(Duration::from_secs(300), scheduler.queue.next()).await;
            assert_eq!(again.unwrap().unwrap().attempts, 2, "{name}");
            assert!(!is_placed(&scheduler, name));
            let core = scheduler.core.lock();
            assert!(core.cache.by_name("a").unwrap().pods.is_empty(), "{name}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn permit_waits_and_rejects() {
        let scheduler = scheduler();
        try_once(&scheduler, "unwanted").await;
        assert!(!is_placed(&scheduler, "unwanted"));
        assert_eq!(scheduler.queue.pending().unschedulable, 1);
        scheduler.queue.remove("unwanted");
        try_once(&scheduler, "patient").await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(
            is_placed(&scheduler, "patient"),
            "it keeps its room while it waits"
        );
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert!(!is_placed(&scheduler, "patient"), "not for ever");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_is_bound_or_gone_while_it_is_being_bound_leaves_nothing() {
        let scheduler = scheduler();
        let bound = || object("p", json!({}), json!({"nodeName": "a"}));
        try_once(&scheduler, "p").await;
        // The answer to the binding is lost, but the API shows the pod on its node.
        scheduler.on_pod(&applied(bound()));
        let quiet = timeout(Duration::from_secs(60), scheduler.queue.next()).await;
        assert!(quiet.is_err(), "nothing is left to do");
        assert!(is_placed(&scheduler, "p"), "it still takes its room");
        scheduler.on_pod(&Change::Deleted {
            last: Arc::new(bound()),
        });
        assert!(!is_placed(&scheduler, "p"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_group_waits_while_victims_of_one_of_its_pods_are_deleted() {
        let scheduler = scheduler();
        scheduler.core.lock().cache.pod_groups = true;
        let group = json!({"metadata": {"name": "g", "namespace": "default"},
            "spec": {"schedulingPolicy": {"gang": {"minCount": 2}}}});
        let key = skiff_client::Key::new("default", "g");
        let group = serde_json::from_value(group).unwrap();
        scheduler.listers.pod_groups.set(key, Arc::new(group));
        for name in ["one", "two"] {
            let grouped = json!({"schedulingGroup": {"podGroupName": "g"}});
            scheduler.on_pod(&applied(object(name, json!({}), grouped)));
        }
        let two = scheduler.queue.next().await.unwrap();
        let running = scheduler.preempting.begin(&two.pod);
        let uid = Arc::clone(&two.pod.uid);
        scheduler.attempt(two).await;
        let pending = scheduler.queue.pending();
        assert_eq!((pending.unschedulable, pending.gated), (1, 1));
        drop(running);
        scheduler.queue.release(&uid);
        let queued = scheduler.queue.next().await.unwrap();
        scheduler.attempt(queued).await;
        assert!(is_placed(&scheduler, "one") && is_placed(&scheduler, "two"));
    }

    #[tokio::test(start_paused = true)]
    async fn heartbeats_wake_nobody_and_room_does() {
        let scheduler = scheduler();
        let big = |name: &str, node: &str| {
            let container = json!({"name": "c", "resources": {"requests": {"cpu": "2"}}});
            object(
                name,
                json!({}),
                json!({"nodeName": node, "containers": [container]}),
            )
        };
        scheduler.on_pod(&applied(big("there", "a")));
        scheduler.on_pod(&applied(big("p", "")));
        let queued = scheduler.queue.next().await.unwrap();
        scheduler.attempt(queued).await;
        assert_eq!(scheduler.queue.pending().unschedulable, 1);
        assert!(
            scheduler.on_node(&applied(node("a"))).is_none(),
            "nothing has changed"
        );
        let event = scheduler.on_pod(&Change::Deleted {
            last: Arc::new(big("there", "a")),
        });
        scheduler.queue.on_event(event.unwrap());
        let next = timeout(Duration::from_secs(2), scheduler.queue.next()).await;
        assert_eq!(&*next.unwrap().unwrap().pod.uid, "p");
    }
}
