//! What the managers count, under the kubelet's names.

use std::sync::Arc;

use skiff_prometheus::{Counter, Histogram, Registry, exponential_buckets};

use super::Managers;

pub struct ManagerMetrics {
    pub topology_requests: Arc<Counter>,
    pub topology_errors: Arc<Counter>,
    /// In milliseconds.
    pub topology_duration: Arc<Histogram>,
    pub cpu_requests: Arc<Counter>,
    pub cpu_errors: Arc<Counter>,
    pub memory_requests: Arc<Counter>,
    pub memory_errors: Arc<Counter>,
}

impl ManagerMetrics {
    pub fn new(registry: &Registry) -> Self {
        let counter = |name, help| registry.counters(name, help, &[], 1).with(&[]);
        let buckets = exponential_buckets(0.05, 2.0, 15);
        ManagerMetrics {
            topology_requests: counter(
                "kubelet_topology_manager_admission_requests_total",
                "Pods whose resources were to be aligned.",
            ),
            topology_errors: counter(
                "kubelet_topology_manager_admission_errors_total",
                "Pods that were refused because their resources could not be aligned.",
            ),
            topology_duration: registry
                .histograms(
                    "kubelet_topology_manager_admission_duration_ms",
                    "Milliseconds that the admission of a pod took.",
                    &[],
                    1,
                    &buckets,
                )
                .with(&[]),
            cpu_requests: counter(
                "kubelet_cpu_manager_pinning_requests_total",
                "Containers that were to have exclusive CPUs.",
            ),
            cpu_errors: counter(
                "kubelet_cpu_manager_pinning_errors_total",
                "Containers that did not get their exclusive CPUs.",
            ),
            memory_requests: counter(
                "kubelet_memory_manager_pinning_requests_total",
                "Containers that were to have memory of certain NUMA nodes.",
            ),
            memory_errors: counter(
                "kubelet_memory_manager_pinning_errors_total",
                "Containers that did not get memory of certain NUMA nodes.",
            ),
        }
    }
}

/// Label values and a value for each series.
type Series = Vec<(Vec<String>, f64)>;

/// The gauges, which are read when somebody asks.
pub fn register_gauges(managers: &Arc<Managers>, registry: &Registry) {
    let read = |pick: fn(usize, Vec<(u32, usize)>) -> Series| {
        let weak = Arc::downgrade(managers);
        move || {
            let counts = weak.upgrade().and_then(|managers| managers.cpus.counts());
            counts
                .map(|(shared, exclusive)| pick(shared, exclusive))
                .unwrap_or_default()
        }
    };
    registry.read_gauges(
        "kubelet_cpu_manager_shared_pool_size_millicores",
        "CPU that containers without exclusive CPUs share.",
        &[],
        read(|shared, _| vec![(Vec::new(), shared as f64 * 1000.0)]),
    );
    registry.read_gauges(
        "kubelet_cpu_manager_exclusive_cpu_allocation_count",
        "CPUs that belong to single containers.",
        &[],
        read(|_, exclusive| {
            let all: usize = exclusive.iter().map(|(_, count)| count).sum();
            vec![(Vec::new(), all as f64)]
        }),
    );
    registry.read_gauges(
        "kubelet_cpu_manager_allocation_per_numa",
        "CPUs that belong to single containers, by NUMA node.",
        &["numa_node"],
        read(|_, exclusive| {
            let row = |(node, count): (u32, usize)| (vec![node.to_string()], count as f64);
            exclusive.into_iter().map(row).collect()
        }),
    );
}
