//! `/stats/summary` and `/metrics/resource`: what containers use, as the runtime counts it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use skiff_cri::v1;

use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::machine;
use crate::observed::labels;

/// One container's use.
struct Usage {
    namespace: String,
    pod: String,
    pod_uid: String,
    container: String,
    cpu_nanos: u64,
    cpu_nano_cores: u64,
    working_set: u64,
    usage: u64,
    rss: u64,
}

fn usages(stats: Vec<v1::ContainerStats>) -> Vec<Usage> {
    let number = |value: Option<v1::UInt64Value>| value.map_or(0, |v| v.value);
    stats
        .into_iter()
        .filter_map(|one| {
            let attributes = one.attributes?;
            let label = |name: &str| attributes.labels.get(name).cloned().unwrap_or_default();
            let cpu = one.cpu.unwrap_or_default();
            let memory = one.memory.unwrap_or_default();
            Some(Usage {
                namespace: label(labels::POD_NAMESPACE),
                pod: label(labels::POD_NAME),
                pod_uid: label(labels::POD_UID),
                container: label(labels::CONTAINER_NAME),
                cpu_nanos: number(cpu.usage_core_nano_seconds),
                cpu_nano_cores: number(cpu.usage_nano_cores),
                working_set: number(memory.working_set_bytes),
                usage: number(memory.usage_bytes),
                rss: number(memory.rss_bytes),
            })
        })
        .filter(|usage| !usage.pod_uid.is_empty())
        .collect()
}

/// CPU time of the whole machine in nanoseconds, idle time left out.
fn node_cpu_nanos() -> u64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let Some(line) = stat.lines().next() else { return 0 };
    let ticks: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .filter_map(|t| t.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal, at 100 ticks a second.
    let busy: u64 = ticks
        .iter()
        .enumerate()
        .filter(|(i, _)| !matches!(i, 3 | 4) && *i < 8)
        .map(|(_, t)| t)
        .sum();
    busy * 10_000_000
}

impl Kubelet {
    pub async fn stats_summary(&self) -> Result<Value, String> {
        let usages = usages(self.runtime.container_stats().await.map_err(|s| describe(&s))?);
        let time = Timestamp::now().to_string();
        let mut pods: BTreeMap<String, Value> = BTreeMap::new();
        for usage in &usages {
            let pod = pods.entry(usage.pod_uid.clone()).or_insert_with(|| {
                json!({"podRef": {"name": usage.pod, "namespace": usage.namespace, "uid": usage.pod_uid}, "containers": []})
            });
            if let Some(containers) = pod["containers"].as_array_mut() {
                containers.push(json!({
                    "name": usage.container,
                    "cpu": {"time": time, "usageNanoCores": usage.cpu_nano_cores, "usageCoreNanoSeconds": usage.cpu_nanos},
                    "memory": {"time": time, "usageBytes": usage.usage, "workingSetBytes": usage.working_set, "rssBytes": usage.rss},
                }));
            }
        }
        let available = machine::memory_available();
        Ok(json!({
            "node": {
                "nodeName": self.config.node_name,
                "cpu": {"time": time, "usageCoreNanoSeconds": node_cpu_nanos()},
                "memory": {"time": time, "availableBytes": available, "workingSetBytes": self.machine.memory - available},
            },
            "pods": pods.into_values().collect::<Vec<_>>(),
        }))
    }

    pub async fn resource_metrics(&self) -> Result<String, String> {
        let usages = usages(self.runtime.container_stats().await.map_err(|s| describe(&s))?);
        let working_set = self.machine.memory - machine::memory_available();
        Ok(format_metrics(
            &usages,
            node_cpu_nanos(),
            working_set,
            Timestamp::now().as_millisecond(),
        ))
    }
}

fn seconds(nanos: u64) -> f64 {
    std::time::Duration::from_nanos(nanos).as_secs_f64()
}

fn format_metrics(usages: &[Usage], node_cpu: u64, node_memory: i64, now_millis: i64) -> String {
    let mut text = String::new();
    let mut family = |name: &str, kind: &str, help: &str, samples: Vec<(String, f64)>| {
        let _ = writeln!(text, "# HELP {name} [STABLE] {help}\n# TYPE {name} {kind}");
        for (labels, value) in samples {
            let _ = writeln!(text, "{name}{labels} {value} {now_millis}");
        }
    };
    let container = |u: &Usage| {
        format!(
            "{{container=\"{}\",namespace=\"{}\",pod=\"{}\"}}",
            u.container, u.namespace, u.pod
        )
    };
    family(
        "container_cpu_usage_seconds_total",
        "counter",
        "Cumulative cpu time consumed by the container in core-seconds",
        usages
            .iter()
            .map(|u| (container(u), seconds(u.cpu_nanos)))
            .collect(),
    );
    #[allow(clippy::cast_precision_loss)]
    family(
        "container_memory_working_set_bytes",
        "gauge",
        "Current working set of the container in bytes",
        usages
            .iter()
            .map(|u| (container(u), u.working_set as f64))
            .collect(),
    );
    family(
        "node_cpu_usage_seconds_total",
        "counter",
        "Cumulative cpu time consumed by the node in core-seconds",
        vec![(String::new(), seconds(node_cpu))],
    );
    #[allow(clippy::cast_precision_loss)]
    family(
        "node_memory_working_set_bytes",
        "gauge",
        "Current working set of the node in bytes",
        vec![(String::new(), node_memory as f64)],
    );
    let mut pods: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
    for usage in usages {
        let total = pods
            .entry((usage.namespace.clone(), usage.pod.clone()))
            .or_default();
        total.0 += usage.cpu_nanos;
        total.1 += usage.working_set;
    }
    let pod = |(namespace, name): &(String, String)| format!("{{namespace=\"{namespace}\",pod=\"{name}\"}}");
    family(
        "pod_cpu_usage_seconds_total",
        "counter",
        "Cumulative cpu time consumed by the pod in core-seconds",
        pods.iter()
            .map(|(key, total)| (pod(key), seconds(total.0)))
            .collect(),
    );
    #[allow(clippy::cast_precision_loss)]
    family(
        "pod_memory_working_set_bytes",
        "gauge",
        "Current working set of the pod in bytes",
        pods.iter()
            .map(|(key, total)| (pod(key), total.1 as f64))
            .collect(),
    );
    family(
        "resource_scrape_error",
        "gauge",
        "1 if there was an error while getting container metrics, 0 otherwise",
        vec![(String::new(), 0.0)],
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_text() {
        let usage = Usage {
            namespace: "ns".into(),
            pod: "p".into(),
            pod_uid: "u".into(),
            container: "c".into(),
            cpu_nanos: 1_500_000_000,
            cpu_nano_cores: 0,
            working_set: 4096,
            usage: 0,
            rss: 0,
        };
        let text = format_metrics(&[usage], 0, 0, 7);
        assert!(text.contains(
            "container_cpu_usage_seconds_total{container=\"c\",namespace=\"ns\",pod=\"p\"} 1.5 7\n"
        ));
        assert!(text.contains("pod_memory_working_set_bytes{namespace=\"ns\",pod=\"p\"} 4096 7\n"));
    }
}
