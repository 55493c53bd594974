//! What the node counts about itself, under the kubelet's names and with its labels and buckets.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod, PodStatus};
use skiff_prometheus::{Counter, Family, Gauge, Histogram, Registry, exponential_buckets};

use crate::action_metrics::ActionMetrics;
use crate::kubelet::Kubelet;
use crate::node_shutdown::ShutdownRecord;
use crate::pod_state::PodState;
use crate::pods::{self, ContainerType};
use crate::probes::ProbeKind;

/// What a probe can come to, by the kubelet's words.
pub const PROBE_RESULTS: [&str; 3] = ["successful", "failed", "unknown"];
/// Of families whose labels come from the node itself.
const MAX_SERIES: usize = 200;
/// Of probes: three results of each.
const MAX_PROBES: usize = 5000;
/// Of families with exit codes, which containers choose.
const MAX_ENDS: usize = 1000;
/// Prometheus' own, which most histograms of upstream have.
const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
/// From half a second to an hour: how long a pod takes to start.
const START_BUCKETS: [f64; 25] = [
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0,
    480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];

pub struct Metrics {
    pub registry: Arc<Registry>,
    /// Of `/metrics/probes`.
    pub probes: Arc<Registry>,
    pub(crate) actions: ActionMetrics,
    probe_results: Arc<Family<Counter>>,
    operations: Arc<Family<Counter>>,
    operation_errors: Arc<Family<Counter>>,
    operation_seconds: Arc<Family<Histogram>>,
    relist: Arc<Family<Histogram>>,
    relist_interval: Arc<Family<Histogram>>,
    pod_worker: Arc<Family<Histogram>>,
    pod_start: Arc<Family<Histogram>>,
    started: Arc<Family<Counter>>,
    terminated: Arc<Family<Counter>>,
    shutdown_start: Arc<Family<Gauge>>,
    shutdown_end: Arc<Family<Gauge>>,
}

impl Metrics {
    pub fn new(git_version: &str, node_name: &str) -> Arc<Metrics> {
        let registry = Registry::new();
        skiff_prometheus::process::register(&registry);
        skiff_prometheus::build_info(&registry, git_version);
        let name = node_name.to_owned();
        registry.read_gauges(
            "kubelet_node_name",
            "The name of the node; always 1.",
            &["node"],
            move || vec![(vec![name.clone()], 1.0)],
        );
        let probes = Registry::new();
        let of_operations = exponential_buckets(0.005, 2.5, 14);
        Arc::new(Metrics {
            actions: ActionMetrics::new(&registry),
            probe_results: probes.counters(
                "prober_probe_total",
                "Probes of containers, by result.",
                &["container", "namespace", "pod", "pod_uid", "probe_type", "result"],
                MAX_PROBES,
            ),
            probes,
            operations: registry.counters(
                "kubelet_runtime_operations_total",
                "Calls of the container runtime, by operation.",
                &["operation_type"],
                MAX_SERIES,
            ),
            operation_errors: registry.counters(
                "kubelet_runtime_operations_errors_total",
                "Calls of the container runtime that failed, by operation.",
                &["operation_type"],
                MAX_SERIES,
            ),
            operation_seconds: registry.histograms(
                "kubelet_runtime_operations_duration_seconds",
                "How long calls of the container runtime took, by operation.",
                &["operation_type"],
                MAX_SERIES,
                &of_operations,
            ),
            relist: registry.histograms(
                "kubelet_pleg_relist_duration_seconds",
                "How long it took to list the pods of the runtime.",
                &[],
                1,
                &BUCKETS,
            ),
            relist_interval: registry.histograms(
                "kubelet_pleg_relist_interval_seconds",
                "The time between two listings; rare where the runtime sends events.",
                &[],
                1,
                &BUCKETS,
            ),
            pod_worker: registry.histograms(
                "kubelet_pod_worker_duration_seconds",
                "How long one pass over one pod took, by what happens to the pod.",
                &["operation_type"],
                MAX_SERIES,
                &BUCKETS,
            ),
            pod_start: registry.histograms(
                "kubelet_pod_start_duration_seconds",
                "From the first sight of a pod to its first status with the phase Running.",
                &[],
                1,
                &START_BUCKETS,
            ),
            started: registry.counters(
                "kubelet_started_containers_total",
                "Containers that were started, by type.",
                &["container_type"],
                MAX_SERIES,
            ),
            terminated: registry.counters(
                "kubelet_terminated_containers_total",
                "Containers that ended, by type, exit code and reason.",
                &["container_type", "exit_code", "reason"],
                MAX_ENDS,
            ),
            shutdown_start: registry.gauges(
                "kubelet_graceful_shutdown_start_time_seconds",
                "When the last graceful shutdown of the node began, in seconds since 1970.",
                &[],
                1,
            ),
            shutdown_end: registry.gauges(
                "kubelet_graceful_shutdown_end_time_seconds",
                "When the last graceful shutdown of the node ended; 0 while it lasts.",
                &[],
                1,
            ),
            registry,
        })
    }

    /// A call of the runtime that took so long.
    pub fn operation(&self, operation: &str, took: Duration, failed: bool) {
        self.operations.with(&[operation]).inc();
        self.operation_seconds.with(&[operation]).observe_duration(took);
        if failed {
            self.operation_errors.with(&[operation]).inc();
        }
    }

    pub(crate) fn graceful_shutdown(&self, record: Option<&ShutdownRecord>) {
        let (start, end) = record.map_or((0.0, 0.0), ShutdownRecord::seconds);
        self.shutdown_start.with(&[]).set(start);
        self.shutdown_end.with(&[]).set(end);
    }

    pub fn relisted(&self, took: Duration, since_last: Option<Duration>) {
        self.relist.with(&[]).observe_duration(took);
        if let Some(since_last) = since_last {
            self.relist_interval.with(&[]).observe_duration(since_last);
        }
    }

    pub fn pod_pass(&self, what: &'static str, took: Duration) {
        self.pod_worker.with(&[what]).observe_duration(took);
    }

    /// A probe of a container of this pod came to `result`.
    pub fn probed(&self, pod: &Pod, container: &str, kind: ProbeKind, result: &'static str) {
        self.probe_results
            .with(&probe_labels(pod, container, kind, result))
            .inc();
    }

    /// Forgets the probe: its pod is gone.
    pub fn forget_probe(&self, pod: &Pod, container: &str, kind: ProbeKind) {
        for result in PROBE_RESULTS {
            self.probe_results
                .remove(&probe_labels(pod, container, kind, result));
        }
    }

    /// The gauges of pods and containers, which are counted when somebody asks.
    pub fn count_running(&self, kubelet: &Arc<Kubelet>) {
        let weak = Arc::downgrade(kubelet);
        self.registry.read_gauges(
            "kubelet_running_pods",
            "Pods that have a running sandbox.",
            &[],
            move || {
                let states = weak.upgrade().map(|kubelet| kubelet.states()).unwrap_or_default();
                let is_running = |state: &&Arc<PodState>| state.observed().sandboxes.iter().any(|s| s.ready);
                vec![(vec![], states.iter().filter(is_running).count() as f64)]
            },
        );
        let weak = Arc::downgrade(kubelet);
        self.registry.read_gauges(
            "kubelet_running_containers",
            "Containers that the runtime has, by state.",
            &["container_state"],
            move || {
                let states = weak.upgrade().map(|kubelet| kubelet.states()).unwrap_or_default();
                let mut counts: BTreeMap<&'static str, f64> = BTreeMap::new();
                for state in states {
                    for container in &state.observed().containers {
                        *counts.entry(container.state.as_str()).or_default() += 1.0;
                    }
                }
                let row = |(state, count): (&str, f64)| (vec![state.to_owned()], count);
                counts.into_iter().map(row).collect()
            },
        );
    }

    /// A pod whose status says Running for the first time, so long after the node saw it.
    pub fn pod_started(&self, took: Duration) {
        self.pod_start.with(&[]).observe_duration(took);
    }

    pub fn container_started(&self, container_type: ContainerType) {
        self.started.with(&[container_type.as_str()]).inc();
    }

    /// Counts the containers that `status` shows as ended and `before` did not.
    pub fn count_ends(&self, before: &PodStatus, status: &PodStatus) {
        for (container_type, old, new) in [
            (
                ContainerType::Container,
                &before.container_statuses,
                &status.container_statuses,
            ),
            (
                ContainerType::Init,
                &before.init_container_statuses,
                &status.init_container_statuses,
            ),
            (
                ContainerType::Ephemeral,
                &before.ephemeral_container_statuses,
                &status.ephemeral_container_statuses,
            ),
        ] {
            let known: Vec<_> = old
                .iter()
                .flatten()
                .flat_map(ends)
                .map(|end| &end.container_id)
                .collect();
            for end in new.iter().flatten().flat_map(ends) {
                if !known.contains(&&end.container_id) {
                    let reason = end.reason.as_deref().unwrap_or_default();
                    let code = end.exit_code.to_string();
                    self.terminated
                        .with(&[container_type.as_str(), &code, reason])
                        .inc();
                }
            }
        }
    }
}

fn probe_labels<'a>(pod: &'a Pod, container: &'a str, kind: ProbeKind, result: &'a str) -> [&'a str; 6] {
    [
        container,
        pods::namespace(pod),
        pods::name(pod),
        pods::uid(pod),
        kind.as_str(),
        result,
    ]
}

/// How a container ended, and the one before it.
fn ends(status: &ContainerStatus) -> impl Iterator<Item = &ContainerStateTerminated> {
    [&status.state, &status.last_state]
        .into_iter()
        .filter_map(|state| state.as_ref()?.terminated.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ContainerState;

    fn ended(id: &str, code: i32) -> Option<ContainerState> {
        Some(ContainerState {
            terminated: Some(ContainerStateTerminated {
                container_id: Some(id.to_owned()),
                exit_code: code,
                reason: Some("Error".to_owned()),
                ..Default::default()
            }),
            ..Default::default()
        })
    }

    fn status(state: Option<ContainerState>, last_state: Option<ContainerState>) -> PodStatus {
        PodStatus {
            container_statuses: Some(vec![ContainerStatus {
                name: "c".to_owned(),
                state,
                last_state,
                ..Default::default()
            }]),
            ..Default::default()
        }
    }

    #[test]
    fn every_end_is_counted_once() {
        let metrics = Metrics::new("v1.36.4", "n");
        let (running, first) = (status(None, None), status(ended("a", 139), None));
        metrics.count_ends(&running, &first);
        // The same again, then as the state before the next, which ends before anybody saw it run.
        metrics.count_ends(&first, &first);
        metrics.count_ends(&first, &status(ended("b", 1), ended("a", 139)));
        let text = metrics.registry.text();
        for line in [
            "kubelet_terminated_containers_total{container_type=\"container\",exit_code=\"139\",reason=\"Error\"} 1",
            "kubelet_terminated_containers_total{container_type=\"container\",exit_code=\"1\",reason=\"Error\"} 1",
            "kubelet_node_name{node=\"n\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
