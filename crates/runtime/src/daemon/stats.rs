//! Usage of containers and pods, from cgroups, the network namespace and the writable layer.

use super::Daemon;
use super::record::{Container, LayerUsage, Sandbox, now_nanos};
use super::status::matches;
use crate::cgroup::Cgroup;
use skiff_cri::v1 as cri;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn value(value: u64) -> Option<cri::UInt64Value> {
    Some(cri::UInt64Value { value })
}

fn cpu(cgroup: &Cgroup, timestamp: i64) -> Option<cri::CpuUsage> {
    let stats = cgroup.cpu()?;
    Some(cri::CpuUsage {
        timestamp,
        usage_core_nano_seconds: value(stats.usage_nanos),
        usage_nano_cores: None,
        psi: None,
    })
}

fn memory(cgroup: &Cgroup, timestamp: i64) -> Option<cri::MemoryUsage> {
    let stats = cgroup.memory()?;
    Some(cri::MemoryUsage {
        timestamp,
        working_set_bytes: value(stats.working_set),
        available_bytes: value(stats.available),
        usage_bytes: value(stats.usage),
        rss_bytes: value(stats.rss),
        page_faults: value(stats.page_faults),
        major_page_faults: value(stats.major_page_faults),
        psi: None,
    })
}

fn interfaces(netns_of: i32) -> Vec<cri::NetworkInterfaceUsage> {
    let text = std::fs::read_to_string(format!("/proc/{netns_of}/net/dev")).unwrap_or_default();
    parse_interfaces(&text)
}

fn parse_interfaces(text: &str) -> Vec<cri::NetworkInterfaceUsage> {
    text.lines()
        .skip(2)
        .filter_map(|line| {
            let (name, counters) = line.split_once(':')?;
            let counters: Vec<u64> = counters
                .split_whitespace()
                .filter_map(|text| text.parse().ok())
                .collect();
            let [rx_bytes, _, rx_errors, _, _, _, _, _, tx_bytes, _, tx_errors, ..] = counters.as_slice()
            else {
                return None;
            };
            Some(cri::NetworkInterfaceUsage {
                name: name.trim().to_owned(),
                rx_bytes: value(*rx_bytes),
                rx_errors: value(*rx_errors),
                tx_bytes: value(*tx_bytes),
                tx_errors: value(*tx_errors),
            })
        })
        .filter(|interface| interface.name != "lo")
        .collect()
}

/// How old the size of a writable layer may be in a list: lists are asked for every few seconds, for CPU and memory.
const LAYER_AGE: Duration = Duration::from_secs(60);
/// A layer that takes long to measure is measured so seldom that it takes one part of this many of the time.
const LAYER_SHARE: u32 = 50;

/// Blocking: walks the writable layer, unless what was found the last time is young enough.
fn layer_usage(container: &Container, age: Duration) -> LayerUsage {
    let known = *container.layer.lock();
    if let Some(known) = known
        && known.measured.elapsed() < age.max(known.cost * LAYER_SHARE)
        && !age.is_zero()
    {
        return known;
    }
    let began = Instant::now();
    let usage = skiff_fs::disk_usage(&container.directory.join("upper"));
    let found = LayerUsage {
        bytes: usage.bytes,
        inodes: usage.inodes,
        measured: Instant::now(),
        cost: began.elapsed(),
    };
    *container.layer.lock() = Some(found);
    found
}

impl Daemon {
    /// Blocking: measures the writable layer.
    pub(super) fn container_stats(&self, container: &Container) -> cri::ContainerStats {
        self.stats_of(container, Duration::ZERO)
    }

    fn stats_of(&self, container: &Container, layer_age: Duration) -> cri::ContainerStats {
        let record = container.get();
        let timestamp = now_nanos();
        let cgroup = Cgroup::new(&record.cgroup)
            .ok()
            .filter(|_| container.is_running());
        let layer = layer_usage(container, layer_age);
        let swap = cgroup
            .as_ref()
            .and_then(Cgroup::memory)
            .map(|stats| cri::SwapUsage {
                timestamp,
                swap_available_bytes: None,
                swap_usage_bytes: value(stats.swap),
            });
        let config = record.config.0;
        cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes {
                id: record.id,
                metadata: config.metadata,
                labels: config.labels,
                annotations: config.annotations,
            }),
            cpu: cgroup.as_ref().and_then(|cgroup| cpu(cgroup, timestamp)),
            memory: cgroup.as_ref().and_then(|cgroup| memory(cgroup, timestamp)),
            writable_layer: Some(cri::FilesystemUsage {
                timestamp,
                fs_id: Some(cri::FilesystemIdentifier {
                    mountpoint: self.config.root.to_string_lossy().into_owned(),
                }),
                used_bytes: value(layer.bytes),
                inodes_used: value(layer.inodes),
            }),
            swap,
            io: None,
        }
    }

    pub(super) fn list_container_stats(
        &self,
        filter: Option<cri::ContainerStatsFilter>,
    ) -> Vec<cri::ContainerStats> {
        let filter = filter.unwrap_or_default();
        let containers: Vec<Arc<Container>> = self.containers.read().values().cloned().collect();
        containers
            .iter()
            .filter(|container| {
                let record = container.record.read();
                container.is_running()
                    && record.id.starts_with(&filter.id)
                    && record.sandbox_id.starts_with(&filter.pod_sandbox_id)
                    && matches(&filter.label_selector, &record.config.0.labels)
            })
            .map(|container| self.stats_of(container, LAYER_AGE))
            .collect()
    }

    pub(super) fn sandbox_stats(&self, sandbox: &Sandbox) -> cri::PodSandboxStats {
        let record = sandbox.get();
        let timestamp = now_nanos();
        let containers: Vec<Arc<Container>> = self
            .containers_of(&record.id)
            .into_iter()
            .filter(|container| container.is_running())
            .collect();
        let cgroup = Cgroup::new(&record.cgroup_parent).ok().filter(|_| record.ready);
        let network = containers
            .first()
            .filter(|_| !record.host_network)
            .map(|container| {
                let interfaces = interfaces(container.current().pid);
                cri::NetworkUsage {
                    timestamp,
                    default_interface: interfaces.first().cloned(),
                    interfaces,
                }
            });
        cri::PodSandboxStats {
            attributes: Some(cri::PodSandboxAttributes {
                id: record.id,
                metadata: record.config.0.metadata,
                labels: record.config.0.labels,
                annotations: record.config.0.annotations,
            }),
            linux: Some(cri::LinuxPodSandboxStats {
                cpu: cgroup.as_ref().and_then(|cgroup| cpu(cgroup, timestamp)),
                memory: cgroup.as_ref().and_then(|cgroup| memory(cgroup, timestamp)),
                network,
                process: cgroup.as_ref().map(|cgroup| cri::ProcessUsage {
                    timestamp,
                    process_count: value(cgroup.process_count()),
                }),
                containers: containers
                    .iter()
                    .map(|container| self.stats_of(container, LAYER_AGE))
                    .collect(),
                io: None,
            }),
            windows: None,
        }
    }

    pub(super) fn list_sandbox_stats(
        &self,
        filter: Option<cri::PodSandboxStatsFilter>,
    ) -> Vec<cri::PodSandboxStats> {
        let filter = filter.unwrap_or_default();
        let sandboxes: Vec<Arc<Sandbox>> = self.sandboxes.read().values().cloned().collect();
        sandboxes
            .iter()
            .filter(|sandbox| {
                let record = sandbox.record.read();
                record.ready
                    && record.id.starts_with(&filter.id)
                    && matches(&filter.label_selector, &record.config.0.labels)
            })
            .map(|sandbox| self.sandbox_stats(sandbox))
            .collect()
    }

    /// The metrics of `metric_descriptors`, a value each.
    pub(super) fn sandbox_metrics(&self) -> Vec<cri::PodSandboxMetrics> {
        let sandboxes: Vec<Arc<Sandbox>> = self.sandboxes.read().values().cloned().collect();
        sandboxes
            .iter()
            .filter(|sandbox| sandbox.record.read().ready)
            .map(|sandbox| {
                let record = sandbox.get();
                let container_metrics = self
                    .containers_of(&record.id)
                    .iter()
                    .filter(|container| container.is_running())
                    .map(|container| cri::ContainerMetrics {
                        container_id: container.get().id,
                        metrics: container_metrics(container),
                    })
                    .collect();
                cri::PodSandboxMetrics {
                    pod_sandbox_id: record.id,
                    metrics: Vec::new(),
                    container_metrics,
                }
            })
            .collect()
    }
}

const CPU_SECONDS: &str = "container_cpu_usage_seconds_total";
const WORKING_SET: &str = "container_memory_working_set_bytes";
const USAGE: &str = "container_memory_usage_bytes";
const PROCESSES: &str = "container_processes";

fn container_metrics(container: &Container) -> Vec<cri::Metric> {
    let record = container.get();
    let timestamp = now_nanos();
    let metric = |name: &str, kind: cri::MetricType, number: u64| cri::Metric {
        name: name.into(),
        timestamp,
        metric_type: kind as i32,
        label_values: vec![
            record.id.clone(),
            record.config.0.metadata.clone().unwrap_or_default().name,
        ],
        value: value(number),
    };
    let Ok(cgroup) = Cgroup::new(&record.cgroup) else {
        return Vec::new();
    };
    let mut metrics = Vec::new();
    if let Some(stats) = cgroup.cpu() {
        metrics.push(metric(
            CPU_SECONDS,
            cri::MetricType::Counter,
            stats.usage_nanos / 1_000_000_000,
        ));
    }
    if let Some(stats) = cgroup.memory() {
        metrics.push(metric(WORKING_SET, cri::MetricType::Gauge, stats.working_set));
        metrics.push(metric(USAGE, cri::MetricType::Gauge, stats.usage));
    }
    metrics.push(metric(PROCESSES, cri::MetricType::Gauge, cgroup.process_count()));
    metrics
}

pub(super) fn metric_descriptors() -> Vec<cri::MetricDescriptor> {
    [
        (CPU_SECONDS, "CPU time used, in whole seconds."),
        (WORKING_SET, "Memory in use that cannot be dropped at once."),
        (USAGE, "Memory in use, with file cache."),
        (PROCESSES, "Processes in the container."),
    ]
    .into_iter()
    .map(|(name, help)| cri::MetricDescriptor {
        name: name.into(),
        help: help.into(),
        label_keys: vec!["id".into(), "name".into()],
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_counters() {
        let text = "Inter-|   Receive                    |  Transmit\n face |bytes packets errs ...\n\
                    \u{20}   lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n  eth0: 10 2 3 0 0 0 0 0 20 4 5 0 0 0 0 0\n";
        let got = parse_interfaces(text);
        assert_eq!(got.len(), 1);
        assert_eq!(
            (got[0].name.as_str(), &got[0].rx_bytes, &got[0].tx_errors),
            ("eth0", &value(10), &value(5))
        );
    }
}
