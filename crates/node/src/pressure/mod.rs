//! The node is short of memory, disk or processes: it says so in its conditions, takes no more pods that would make it
//! worse, removes what nobody needs (containers that have ended, then images), and at last ends pods, one at a time.

mod image_gc;
mod notify;
mod rank;
mod signals;
mod thresholds;

pub use image_gc::{ImageHistory, ImageLimits};
pub use thresholds::{Condition, Signal, ThresholdFlags, Thresholds};

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Pod, PodCondition, Taint};
use k8s_openapi::jiff::Timestamp;
use skiff_pods::taints;

use crate::admission::Refusal;
use crate::eviction;
use crate::kubelet::Kubelet;
use crate::node_status::node_reference;
use crate::pod_state::PodState;
use crate::pods;
use crate::preemption::is_critical;
use crate::resources::{QosClass, qos_class};
use crate::status::whole_seconds;
use rank::Usage;
use signals::PodMemory;
use thresholds::{History, Observations, Threshold};

/// How often the node looks at what it has.
const LOOK: Duration = Duration::from_secs(10);
/// How often images are looked at when nothing presses.
const IMAGES: Duration = Duration::from_secs(300);
/// How long an evicted pod is waited for before the next look.
const CLEAN_UP: Duration = Duration::from_secs(30);
const CLEAN_UP_POLL: Duration = Duration::from_millis(100);

/// Whether a node in these conditions takes the pod.
pub fn admit(conditions: &[Condition], pod: &Pod) -> Result<(), Refusal> {
    if conditions.is_empty() || is_critical(pod) {
        return Ok(());
    }
    if conditions == [Condition::Memory] {
        let taint = Taint {
            key: "node.kubernetes.io/memory-pressure".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Default::default()
        };
        let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref());
        let tolerates =
            taints::find_untolerated(&[taint], tolerations.unwrap_or_default(), |_| true).is_none();
        // One that has asked for some memory was counted.
        if qos_class(pod) != QosClass::BestEffort || tolerates {
            return Ok(());
        }
    }
    let names: Vec<&str> = conditions.iter().map(|one| one.name()).collect();
    Err(Refusal::new(
        eviction::REASON,
        format!("The node had condition: [{}]. ", names.join(" ")),
    ))
}

impl Kubelet {
    pub async fn run_pressure(self: Arc<Self>) {
        self.pods.synced().await;
        let images = self.image_folder().await;
        let mut history = History::default();
        let thresholds = self.config.thresholds.with_allocatable();
        let mut memory_pressure = notify::MemoryPressure::watch();
        let mut images_at: Option<Instant> = None;
        loop {
            let observed = self.observe_signals(images.clone()).await;
            let due = history.look(&thresholds, &observed, Instant::now());
            let conditions = history.conditions();
            self.pressure.send_if_modified(|before| {
                let news = *before != conditions;
                before.clone_from(&conditions);
                news
            });
            if images_at.is_none_or(|at| at.elapsed() >= IMAGES) {
                let disk = observed.get(&Signal::ImageFs).copied();
                self.collect_images(disk, images_at.is_none()).await;
                images_at = Some(Instant::now());
            }
            if let Some(threshold) = due.first()
                && self.relieve(threshold, &observed, images.clone()).await
            {
                // The next look is at once: what this brought is seen.
                continue;
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = memory_pressure.rises() => {}
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    /// Where the runtime keeps images.
    async fn image_folder(&self) -> Option<PathBuf> {
        match self.runtime.image_folder().await {
            Ok(folder) => folder,
            Err(status) => {
                tracing::debug!(
                    error = status.message(),
                    "the runtime does not say where its images are"
                );
                None
            }
        }
    }

    async fn observe_signals(&self, images: Option<PathBuf>) -> Observations {
        let (memory, node_fs) = (self.machine.memory, self.config.data_dir.clone());
        let pods = self.cgroups.memory_of_pods().map(|cgroup| PodMemory {
            allocatable: (memory - self.config.reserved.memory).max(0),
            cgroup,
        });
        // A filesystem that does not answer must not hold up the runtime's threads.
        tokio::task::spawn_blocking(move || {
            signals::observe(memory, pods.as_ref(), &node_fs, images.as_deref())
        })
        .await
        .unwrap_or_default()
    }

    /// Does something about the shortage; whether a pod was ended.
    async fn relieve(
        self: &Arc<Self>,
        threshold: &Threshold,
        observed: &Observations,
        images: Option<PathBuf>,
    ) -> bool {
        let signal = threshold.signal;
        let node = node_reference(&self.config.node_name);
        let message = format!("Attempting to reclaim {}", signal.resource());
        self.recorder
            .event(&node, "Warning", "EvictionThresholdMet", message);
        if signal.condition() == Condition::Disk {
            let is_enough = |now: Observations| {
                now.get(&signal)
                    .is_some_and(|one| one.available >= threshold.amount.of(one.capacity))
            };
            self.collect_containers(true).await;
            if is_enough(self.observe_signals(images.clone()).await) {
                return false;
            }
            self.remove_unused_images().await;
            if is_enough(self.observe_signals(images).await) {
                return false;
            }
        }
        let mut candidates = self.usages(signal).await;
        rank::rank(signal, &mut candidates, |state: &Arc<PodState>| {
            state.allocated_pod()
        });
        let chosen = candidates.iter().find(|(state, _)| !is_critical(&state.pod()));
        let Some((state, usage)) = chosen else {
            tracing::warn!(
                resource = signal.resource(),
                "the node is short of it, but there is no pod to end"
            );
            return false;
        };
        let why = rank::message(threshold, observed.get(&signal).copied(), &state.pod(), usage);
        let own = pods::grace_period(&state.pod());
        let grace = match threshold.grace {
            None => eviction::GRACE,
            Some(_) => self.config.thresholds.max_pod_grace.min(own).max(eviction::GRACE),
        };
        self.evict(state, why, grace);
        self.metrics.actions.evicted(signal.as_str());
        let deadline = Instant::now() + CLEAN_UP + Duration::from_secs(grace.unsigned_abs());
        while !state.is_terminal() && Instant::now() < deadline && !self.shutdown.is_cancelled() {
            tokio::time::sleep(CLEAN_UP_POLL).await;
        }
        true
    }

    fn evict(&self, state: &PodState, why: String, grace: i64) {
        let pod = state.pod();
        self.recorder
            .event(&pods::reference(&pod), "Warning", eviction::REASON, why.clone());
        state.mark_disrupted(PodCondition {
            type_: "DisruptionTarget".to_owned(),
            status: "True".to_owned(),
            reason: Some("TerminationByKubelet".to_owned()),
            message: Some(why.clone()),
            last_transition_time: Some(whole_seconds(Timestamp::now())),
            observed_generation: pod.metadata.generation,
            last_probe_time: None,
        });
        state.limit_end_grace(grace);
        state.fail(eviction::REASON, why);
        state.terminate.cancel();
        state.wake.notify_one();
    }

    /// The pods that run, with what they use of that.
    async fn usages(self: &Arc<Self>, signal: Signal) -> Vec<(Arc<PodState>, Usage)> {
        let states: Vec<Arc<PodState>> = self
            .states()
            .into_iter()
            .filter(|state| !(state.is_deleted() || state.failed().is_some() || state.is_terminal()))
            .filter(|state| state.observed().is_anything_running())
            .collect();
        let mut usages: Vec<(Arc<PodState>, Usage)> = match self.pod_usage().await {
            Ok(measured) => states
                .into_iter()
                .map(|state| {
                    let usage = measured.iter().find(|one| one.uid == state.uid);
                    let usage = usage.map(Usage::from).unwrap_or_default();
                    (state, usage)
                })
                .collect(),
            Err(error) => {
                tracing::warn!(error, "cannot measure what pods use");
                states
                    .into_iter()
                    .map(|state| (state, Usage::default()))
                    .collect()
            }
        };
        if signal.condition() == Condition::Disk {
            for (state, usage) in &mut usages {
                let layers = usage
                    .containers
                    .iter()
                    .filter_map(|(name, _, layer)| Some((name.clone(), u64::try_from((*layer)?).ok()?)));
                let (kubelet, pod) = (self.clone(), state.pod());
                let layers = layers.collect();
                let walked = tokio::task::spawn_blocking(move || kubelet.measure(&pod, layers));
                if let Ok(measured) = walked.await {
                    usage.inodes = Some(amount(measured.inodes).saturating_add(usage.inodes.unwrap_or(0)));
                    usage.disk = Some(amount(measured.total()));
                    for (name, _, disk) in &mut usage.containers {
                        *disk = measured.containers.get(name).map(|used| amount(*used));
                    }
                }
            }
        }
        usages
    }
}

fn amount(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn who_is_taken_under_pressure() {
        let pod = |spec: Value| -> Pod { serde_json::from_value(json!({ "spec": spec })).unwrap() };
        let asks = json!([{"name": "c", "resources": {"requests": {"memory": "1Mi"}}}]);
        let best_effort = json!([{"name": "c"}]);
        let tolerates = json!([{"key": "node.kubernetes.io/memory-pressure", "operator": "Exists"}]);
        let refused = |conditions: &[Condition], spec: Value| {
            let refusal = admit(conditions, &pod(spec)).err()?;
            assert_eq!(refusal.reason, "Evicted");
            Some(refusal.message)
        };
        let memory = [Condition::Memory];
        assert_eq!(refused(&[], json!({"containers": best_effort})), None);
        assert_eq!(refused(&memory, json!({"containers": asks})), None);
        assert_eq!(
            refused(&memory, json!({"containers": best_effort})).as_deref(),
            Some("The node had condition: [MemoryPressure]. ")
        );
        assert_eq!(
            refused(
                &memory,
                json!({"containers": best_effort, "tolerations": tolerates})
            ),
            None
        );
        let both = [Condition::Memory, Condition::Disk];
        assert_eq!(
            refused(&both, json!({"containers": asks, "tolerations": tolerates})).as_deref(),
            Some("The node had condition: [MemoryPressure DiskPressure]. ")
        );
        assert_eq!(
            refused(&both, json!({"containers": asks, "priority": 2_000_001_000})),
            None,
            "critical"
        );
    }
}
