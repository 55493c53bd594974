//! What is measured of the scheduler, by upstream's names, labels and buckets.

use std::sync::{Arc, Weak};
use std::time::Instant;

use skiff_prometheus::{Counter, Family, Histogram, Registry, exponential_buckets};

use crate::framework::{Code, Rejection};
use crate::queue::{Queued, SchedulingQueue};

/// Profiles with three results each, and attempts up to `15+`.
const MAX_SERIES: usize = 64;

pub(crate) struct SchedulerMetrics {
    attempts: Arc<Family<Counter>>,
    attempt_durations: Arc<Family<Histogram>>,
    algorithm_durations: Arc<Family<Histogram>>,
    sli_durations: Arc<Family<Histogram>>,
    attempts_of_pods: Arc<Family<Histogram>>,
    preemptions: Arc<Family<Counter>>,
    victims: Arc<Family<Histogram>>,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttemptResult {
    Scheduled,
    Unschedulable,
    Error,
}

impl AttemptResult {
    fn as_str(self) -> &'static str {
        match self {
            AttemptResult::Scheduled => "scheduled",
            AttemptResult::Unschedulable => "unschedulable",
            AttemptResult::Error => "error",
        }
    }
}

impl SchedulerMetrics {
    pub(crate) fn new(registry: &Registry) -> SchedulerMetrics {
        let of_attempts = exponential_buckets(0.001, 2.0, 15);
        SchedulerMetrics {
            attempts: registry.counters(
                "scheduler_schedule_attempts_total",
                "Number of attempts to schedule pods, by the result. 'unschedulable' means a pod could not be scheduled, while 'error' means an internal scheduler problem.",
                &["profile", "result"],
                MAX_SERIES,
            ),
            attempt_durations: registry.histograms(
                "scheduler_scheduling_attempt_duration_seconds",
                "Scheduling attempt latency in seconds (scheduling algorithm + binding)",
                &["profile", "result"],
                MAX_SERIES,
                &of_attempts,
            ),
            algorithm_durations: registry.histograms(
                "scheduler_scheduling_algorithm_duration_seconds",
                "Scheduling algorithm latency in seconds",
                &[],
                1,
                &of_attempts,
            ),
            sli_durations: registry.histograms(
                "scheduler_pod_scheduling_sli_duration_seconds",
                "E2e latency for a pod being scheduled, from the time the pod enters the scheduling queue and might involve multiple scheduling attempts.",
                &["attempts"],
                MAX_SERIES,
                &exponential_buckets(0.01, 2.0, 20),
            ),
            attempts_of_pods: registry.histograms(
                "scheduler_pod_scheduling_attempts",
                "Number of attempts to successfully schedule a pod.",
                &[],
                1,
                &exponential_buckets(1.0, 2.0, 5),
            ),
            preemptions: registry.counters(
                "scheduler_preemption_attempts_total",
                "Total preemption attempts in the cluster till now",
                &[],
                1,
            ),
            victims: registry.histograms(
                "scheduler_preemption_victims",
                "Number of selected preemption victims",
                &[],
                1,
                &exponential_buckets(1.0, 2.0, 7),
            ),
        }
    }

    /// Shows how many pods wait, for as long as the queue lives.
    pub(crate) fn show_queue(registry: &Registry, queue: Weak<SchedulingQueue>) {
        registry.read_gauges(
            "scheduler_pending_pods",
            "Number of pending pods, by the queue type. 'active' means number of pods in activeQ; 'backoff' means number of pods in backoffQ; 'unschedulable' means number of pods in unschedulablePods that the scheduler attempted to schedule and failed; 'gated' is the number of unschedulable pods that the scheduler never attempted to schedule because they are gated.",
            &["queue"],
            move || {
                let pending = queue.upgrade().map(|queue| queue.pending()).unwrap_or_default();
                let row = |name: &str, count: usize| (vec![name.to_owned()], count as f64);
                vec![
                    row("active", pending.active),
                    row("backoff", pending.backoff),
                    row("unschedulable", pending.unschedulable),
                    row("gated", pending.gated),
                ]
            },
        );
    }

    pub(crate) fn algorithm(&self, began: Instant) {
        self.algorithm_durations
            .with(&[])
            .observe_duration(began.elapsed());
    }

    /// A preemption with so many victims.
    pub(crate) fn preemption(&self, victims: usize) {
        self.preemptions.with(&[]).inc();
        self.victims.with(&[]).observe(victims as f64);
    }

    pub(crate) fn attempt(&self, profile: &str, result: AttemptResult, began: Instant) {
        let labels = [profile, result.as_str()];
        self.attempts.with(&labels).inc();
        self.attempt_durations
            .with(&labels)
            .observe_duration(began.elapsed());
    }

    /// The pod has a node.
    pub(crate) fn scheduled(&self, queued: &Queued) {
        let attempts = match queued.attempts {
            15.. => "15+".to_owned(),
            attempts => attempts.to_string(),
        };
        let since_us = skiff_trace::now_us().saturating_sub(queued.first_attempt_us);
        self.sli_durations
            .with(&[&attempts])
            .observe(since_us as f64 / 1e6);
        self.attempts_of_pods
            .with(&[])
            .observe(f64::from(queued.attempts));
    }
}

/// The stages in which volumes are found for a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VolumeStage {
    /// Looking for the volumes of a pod on one node.
    Predicate,
    /// Taking those of the node that was chosen.
    Assume,
    /// Writing the bindings, until they are complete.
    Bind,
}

impl VolumeStage {
    fn as_str(self) -> &'static str {
        match self {
            VolumeStage::Predicate => "predicate",
            VolumeStage::Assume => "assume",
            VolumeStage::Bind => "bind",
        }
    }
}

/// What is measured of the plugin VolumeBinding.
#[derive(Clone)]
pub(crate) struct VolumeMetrics {
    durations: Arc<Family<Histogram>>,
    errors: Arc<Family<Counter>>,
}

impl VolumeMetrics {
    pub(crate) fn new(registry: &Registry) -> VolumeMetrics {
        VolumeMetrics {
            // COMPAT: upstream dropped it in v1.23; kube-prometheus' dashboard of the scheduler still reads it.
            durations: registry.histograms(
                "scheduler_volume_scheduling_duration_seconds",
                "Volume scheduling stage latency",
                &["operation"],
                MAX_SERIES,
                &exponential_buckets(0.001, 2.0, 15),
            ),
            errors: registry.counters(
                "scheduler_volume_scheduling_stage_error_total",
                "Volume scheduling stage error count",
                &["operation"],
                MAX_SERIES,
            ),
        }
    }

    /// A stage came to its end. That a node has not the right volumes is no error.
    pub(crate) fn stage<T>(&self, stage: VolumeStage, began: Instant, result: &Result<T, Rejection>) {
        let labels = [stage.as_str()];
        self.durations.with(&labels).observe_duration(began.elapsed());
        if result
            .as_ref()
            .is_err_and(|rejection| rejection.code == Code::Error)
        {
            self.errors.with(&labels).inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DEFAULT_SCHEDULER;
    use crate::fixtures::pod;
    use crate::plugins::testing::profile;
    use crate::queue::Backoff;
    use serde_json::json;
    use std::collections::HashMap;

    #[tokio::test]
    async fn attempts_and_pending_pods_are_shown() {
        let registry = Registry::default();
        let metrics = SchedulerMetrics::new(&registry);
        let profiles = HashMap::from([(DEFAULT_SCHEDULER.to_owned(), Arc::new(profile()))]);
        let queue = Arc::new(SchedulingQueue::new(Arc::new(profiles), Backoff::default()));
        SchedulerMetrics::show_queue(&registry, Arc::downgrade(&queue));
        for name in ["a", "b", "c"] {
            queue.add(pod(name, json!({})));
        }
        let began = Instant::now();
        let (first, second) = (queue.next().await.unwrap(), queue.next().await.unwrap());
        metrics.algorithm(began);
        metrics.attempt(DEFAULT_SCHEDULER, AttemptResult::Scheduled, began);
        metrics.scheduled(&first);
        metrics.attempt(DEFAULT_SCHEDULER, AttemptResult::Unschedulable, began);
        metrics.preemption(2);
        queue.park(&second.pod.uid, 0);
        let text = registry.text();
        for line in [
            "scheduler_pending_pods{queue=\"active\"} 1",
            "scheduler_pending_pods{queue=\"unschedulable\"} 1",
            "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"scheduled\"} 1",
            "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"unschedulable\"} 1",
            "scheduler_scheduling_attempt_duration_seconds_count{profile=\"default-scheduler\",result=\"scheduled\"} 1",
            "scheduler_scheduling_algorithm_duration_seconds_count 1",
            "scheduler_pod_scheduling_sli_duration_seconds_count{attempts=\"1\"} 1",
            "scheduler_pod_scheduling_sli_duration_seconds_bucket{attempts=\"1\",le=\"5242.88\"} 1",
            "scheduler_pod_scheduling_attempts_bucket{le=\"1\"} 1",
            "scheduler_preemption_attempts_total 1",
            "scheduler_preemption_victims_sum 2",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
        }
    }
}
