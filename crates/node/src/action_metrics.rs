//! What the node counts of what it does to pods and for them: evictions, preemptions, cgroups, devices and resizes, under the
//! kubelet's names.

use std::sync::Arc;
use std::time::Duration;

use skiff_prometheus::{Counter, Family, Histogram, Registry};

use crate::kubelet::Kubelet;

/// Signals and operations come from the node itself.
const MAX_SERIES: usize = 50;
/// Of families by resource, whose names plugins choose.
const MAX_RESOURCES: usize = 200;
/// Prometheus' own.
const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Why a resize cannot be done.
pub enum Infeasible {
    CpuManager,
    MemoryManager,
    Swap,
}

pub struct ActionMetrics {
    evictions: Arc<Family<Counter>>,
    preemptions: Arc<Family<Counter>>,
    cgroups: Arc<Family<Histogram>>,
    registrations: Arc<Family<Counter>>,
    allocations: Arc<Family<Histogram>>,
    infeasible_resizes: Arc<Family<Counter>>,
}

impl ActionMetrics {
    pub fn new(registry: &Registry) -> Self {
        ActionMetrics {
            evictions: registry.counters(
                "kubelet_evictions",
                "Pods that were evicted, by what was short or over its limit.",
                &["eviction_signal"],
                MAX_SERIES,
            ),
            preemptions: registry.counters(
                "kubelet_preemptions",
                "Pods that were ended for a critical one, by what that lacked.",
                &["preemption_signal"],
                MAX_RESOURCES,
            ),
            cgroups: registry.histograms(
                "kubelet_cgroup_manager_duration_seconds",
                "How long changes of the cgroups of pods took, by operation.",
                &["operation_type"],
                MAX_SERIES,
                &BUCKETS,
            ),
            registrations: registry.counters(
                "kubelet_device_plugin_registration_total",
                "Registrations of device plugins, by resource.",
                &["resource_name"],
                MAX_RESOURCES,
            ),
            allocations: registry.histograms(
                "kubelet_device_plugin_alloc_duration_seconds",
                "How long device plugins took to allocate devices, by resource.",
                &["resource_name"],
                MAX_RESOURCES,
                &BUCKETS,
            ),
            infeasible_resizes: registry.counters(
                "kubelet_pod_infeasible_resizes_total",
                "Resizes that this node cannot do.",
                &["reason_detail"],
                MAX_SERIES,
            ),
        }
    }

    pub fn evicted(&self, signal: &str) {
        self.evictions.with(&[signal]).inc();
    }

    pub fn preempted(&self, resource: &str) {
        self.preemptions.with(&[resource]).inc();
    }

    /// Something was done to the cgroup of a pod: `create`, `update` or `destroy`.
    pub fn cgroup_changed(&self, operation: &str, took: Duration) {
        self.cgroups.with(&[operation]).observe_duration(took);
    }

    pub fn plugin_registered(&self, resource: &str) {
        self.registrations.with(&[resource]).inc();
    }

    pub fn devices_allocated(&self, resource: &str, took: Duration) {
        self.allocations.with(&[resource]).observe_duration(took);
    }

    /// A resize that this node will not do.
    pub fn resize_infeasible(&self, why: Infeasible) {
        let detail = match why {
            Infeasible::Swap => "swap_limitation",
            Infeasible::CpuManager => "guaranteed_pod_cpu_manager_static_policy",
            Infeasible::MemoryManager => "guaranteed_pod_memory_manager_static_policy",
        };
        self.infeasible_resizes.with(&[detail]).inc();
    }
}

/// The gauges of resizes and of pods that are to run, which are counted when somebody asks.
pub fn count_pods(kubelet: &Arc<Kubelet>) {
    let registry = &kubelet.metrics.registry;
    let weak = Arc::downgrade(kubelet);
    registry.read_gauges(
        "kubelet_pod_pending_resizes",
        "Pods whose resize waits, by reason.",
        &["reason"],
        move || {
            let mut counts = [("deferred", 0.0), ("infeasible", 0.0)];
            for state in weak.upgrade().map(|kubelet| kubelet.states()).unwrap_or_default() {
                let reason = state
                    .resize
                    .lock()
                    .pending
                    .as_ref()
                    .and_then(|one| one.reason.clone());
                let reason = reason.unwrap_or_default().to_lowercase();
                if let Some((_, count)) = counts.iter_mut().find(|(name, _)| *name == reason) {
                    *count += 1.0;
                }
            }
            let row = |(name, count): (&str, f64)| (vec![name.to_owned()], count);
            counts.into_iter().map(row).collect()
        },
    );
    let weak = Arc::downgrade(kubelet);
    registry.read_gauges(
        "kubelet_pod_in_progress_resizes",
        "Pods whose resize is being done.",
        &[],
        move || {
            let states = weak.upgrade().map(|kubelet| kubelet.states()).unwrap_or_default();
            let busy = states
                .iter()
                .filter(|state| state.resize.lock().in_progress.is_some());
            vec![(vec![], busy.count() as f64)]
        },
    );
}
