//! `/metrics/resource`: what metrics-server and the Metrics API read, under upstream's names.

use http::Response;
use skiff_cri::v1;
use skiff_streaming::Body;

use super::page::{self, Page, Reading, Sample, float, seconds};
use super::stats::{ContainerUsage, NodeUsage, PodUsage, number};
use crate::kubelet::Kubelet;

pub async fn serve(kubelet: &Kubelet) -> Response<Body> {
    let usage = kubelet.pod_usage().await;
    if let Err(error) = &usage {
        tracing::error!(error, "cannot read what containers use");
    }
    let node = NodeUsage::read(kubelet.machine.memory);
    page::answer(format(usage.as_deref().ok(), &node))
}

fn cpu_of(cpu: &Option<v1::CpuUsage>) -> Option<(f64, i64)> {
    let cpu = cpu.as_ref()?;
    Some((seconds(number(&cpu.usage_core_nano_seconds)?), cpu.timestamp))
}

fn memory_of(memory: &Option<v1::MemoryUsage>) -> Option<(f64, i64)> {
    let memory = memory.as_ref()?;
    Some((float(number(&memory.working_set_bytes)?), memory.timestamp))
}

fn swap_of(container: &ContainerUsage) -> Option<(f64, i64)> {
    let swap = container.swap.as_ref()?;
    Some((float(number(&swap.swap_usage_bytes)?), swap.timestamp))
}

fn swap_limit_of(container: &ContainerUsage) -> Option<(f64, i64)> {
    let swap = container.swap.as_ref()?;
    let limit = number(&swap.swap_available_bytes)? + number(&swap.swap_usage_bytes).unwrap_or(0);
    Some((float(limit), swap.timestamp))
}

/// Without pods, because they could not be read, there is the error alone.
fn format(pods: Option<&[PodUsage]>, node: &NodeUsage) -> String {
    let mut page = Page::default();
    let Some(pods) = pods else {
        scrape_error(&mut page, 1.0);
        return page.into_text();
    };
    let containers = |value: &dyn Fn(&ContainerUsage) -> Option<Reading>| -> Vec<Sample> {
        let one = |pod: &PodUsage, container: &ContainerUsage| {
            let (number, time) = value(container)?;
            let labels = format!(
                "{{container=\"{}\",namespace=\"{}\",pod=\"{}\"}}",
                container.name, pod.namespace, pod.name
            );
            Some((labels, number, time))
        };
        pods.iter()
            .flat_map(|pod| pod.containers.iter().filter_map(move |c| one(pod, c)))
            .collect()
    };
    let by_pod = |value: &dyn Fn(&PodUsage) -> Option<(f64, i64)>| -> Vec<Sample> {
        pods.iter()
            .filter_map(|pod| {
                let (number, time) = value(pod)?;
                let labels = format!("{{namespace=\"{}\",pod=\"{}\"}}", pod.namespace, pod.name);
                Some((labels, number, Some(time)))
            })
            .collect()
    };
    let timed = |found: Option<(f64, i64)>| found.map(|(value, time)| (value, Some(time)));
    let of_node = |value: f64| vec![(String::new(), value, Some(node.time))];
    page.family(
        "container_cpu_usage_seconds_total",
        "counter",
        "[STABLE] Cumulative cpu time consumed by the container in core-seconds",
        containers(&|c| timed(cpu_of(&c.cpu))),
    );
    page.family(
        "container_memory_working_set_bytes",
        "gauge",
        "[STABLE] Current working set of the container in bytes",
        containers(&|c| timed(memory_of(&c.memory))),
    );
    page.family(
        "container_start_time_seconds",
        "gauge",
        "[STABLE] Start time of the container since unix epoch in seconds",
        containers(&|c| {
            let nanos = u64::try_from(c.started_at)
                .ok()
                .filter(|at| *at >= 1_000_000_000)?;
            Some((seconds(nanos), None))
        }),
    );
    page.family(
        "container_swap_limit_bytes",
        "gauge",
        "[ALPHA] Current amount of the container swap limit in bytes. Reported only on non-windows systems",
        containers(&|c| timed(swap_limit_of(c))),
    );
    page.family(
        "container_swap_usage_bytes",
        "gauge",
        "[ALPHA] Current amount of the container swap usage in bytes. Reported only on non-windows systems",
        containers(&|c| timed(swap_of(c))),
    );
    page.family(
        "node_cpu_usage_seconds_total",
        "counter",
        "[STABLE] Cumulative cpu time consumed by the node in core-seconds",
        of_node(seconds(node.cpu_nanos)),
    );
    page.family(
        "node_memory_working_set_bytes",
        "gauge",
        "[STABLE] Current working set of the node in bytes",
        of_node(float(node.working_set())),
    );
    page.family(
        "node_swap_usage_bytes",
        "gauge",
        "[ALPHA] Current swap usage of the node in bytes. Reported only on non-windows systems",
        of_node(float(node.swap_total.saturating_sub(node.swap_free))),
    );
    page.family(
        "pod_cpu_usage_seconds_total",
        "counter",
        "[STABLE] Cumulative cpu time consumed by the pod in core-seconds",
        by_pod(&|pod| cpu_of(&pod.cpu)),
    );
    page.family(
        "pod_memory_working_set_bytes",
        "gauge",
        "[STABLE] Current working set of the pod in bytes",
        by_pod(&|pod| memory_of(&pod.memory)),
    );
    page.family(
        "pod_swap_usage_bytes",
        "gauge",
        "[ALPHA] Current amount of the pod swap usage in bytes. Reported only on non-windows systems",
        by_pod(&|pod| pod.swap().map(|(time, bytes)| (float(bytes), time))),
    );
    scrape_error(&mut page, 0.0);
    page.into_text()
}

fn scrape_error(page: &mut Page, errors: f64) {
    page.family(
        "resource_scrape_error",
        "gauge",
        "[STABLE] 1 if there was an error while getting container metrics, 0 otherwise",
        vec![(String::new(), errors, None)],
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(value: u64) -> Option<v1::UInt64Value> {
        Some(v1::UInt64Value { value })
    }

    fn cpu(nanos: u64) -> Option<v1::CpuUsage> {
        Some(v1::CpuUsage {
            timestamp: 7_000_000,
            usage_core_nano_seconds: value(nanos),
            ..Default::default()
        })
    }

    fn memory(bytes: u64) -> Option<v1::MemoryUsage> {
        Some(v1::MemoryUsage {
            timestamp: 8_000_000,
            working_set_bytes: value(bytes),
            ..Default::default()
        })
    }

    #[test]
    fn the_page() {
        let container = ContainerUsage {
            name: "c".into(),
            started_at: 1_500_000_000,
            cpu: cpu(1_500_000_000),
            memory: memory(4096),
            swap: Some(v1::SwapUsage {
                timestamp: 9_000_000,
                swap_usage_bytes: value(1),
                swap_available_bytes: value(2),
            }),
            ..Default::default()
        };
        let unread = ContainerUsage {
            name: "unread".into(),
            ..Default::default()
        };
        let pod = PodUsage {
            namespace: "ns".into(),
            name: "p".into(),
            cpu: cpu(2_000_000_000),
            memory: memory(8192),
            containers: vec![container, unread],
            ..Default::default()
        };
        let node = NodeUsage {
            time: 6_000_000,
            cpu_nanos: 1_000_000_000,
            memory_total: 10,
            memory_available: 4,
            swap_total: 5,
            swap_free: 3,
            ..NodeUsage::default()
        };
        let text = format(Some(&[pod]), &node);
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            samples,
            [
                "container_cpu_usage_seconds_total{container=\"c\",namespace=\"ns\",pod=\"p\"} 1.5 7",
                "container_memory_working_set_bytes{container=\"c\",namespace=\"ns\",pod=\"p\"} 4096 8",
                "container_start_time_seconds{container=\"c\",namespace=\"ns\",pod=\"p\"} 1.5",
                "container_swap_limit_bytes{container=\"c\",namespace=\"ns\",pod=\"p\"} 3 9",
                "container_swap_usage_bytes{container=\"c\",namespace=\"ns\",pod=\"p\"} 1 9",
                "node_cpu_usage_seconds_total 1 6",
                "node_memory_working_set_bytes 6 6",
                "node_swap_usage_bytes 2 6",
                "pod_cpu_usage_seconds_total{namespace=\"ns\",pod=\"p\"} 2 7",
                "pod_memory_working_set_bytes{namespace=\"ns\",pod=\"p\"} 8192 8",
                "pod_swap_usage_bytes{namespace=\"ns\",pod=\"p\"} 1 9",
                "resource_scrape_error 0",
            ]
        );
        assert!(text.contains("# TYPE container_start_time_seconds gauge\n"));
        let failed = format(None, &node);
        assert!(failed.ends_with("resource_scrape_error 1\n") && !failed.contains("node_cpu"));
    }
}
