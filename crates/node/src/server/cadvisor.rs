//! `/metrics/cadvisor`: what containers use, by cAdvisor's names and labels: here as far as the runtime tells, in
//! `cadvisor_cgroups.rs` what the kernel counts. What neither tells is left out, not made up.

use std::collections::HashMap;

use http::{Response, StatusCode};
use skiff_cri::v1;
use skiff_streaming::Body;

use super::page::{self, Page, Sample, float, seconds};
use super::stats::{ContainerUsage, PodUsage, number};
use super::{cadvisor_cgroups, text};
use crate::kubelet::Kubelet;

pub async fn serve(kubelet: &Kubelet) -> Response<Body> {
    let pods = match kubelet.pod_usage().await {
        Ok(pods) => pods,
        Err(error) => return text(StatusCode::INTERNAL_SERVER_ERROR, error),
    };
    let images = kubelet
        .states()
        .iter()
        .flat_map(|state| state.observed().containers.clone())
        .map(|container| (container.id, container.image))
        .collect();
    let path = |pod: &PodUsage| {
        let state = kubelet.state_by_uid(&pod.uid)?;
        let path = kubelet.cgroups.pod_path(&state.pod());
        (!path.is_empty()).then(|| (pod.uid.clone(), path))
    };
    let paths = pods.iter().filter_map(path).collect();
    let mut page = format(&pods, &images, &paths);
    cadvisor_cgroups::add(&mut page, kubelet, &pods, &images);
    page.family(
        "machine_cpu_cores",
        "gauge",
        "Logical CPU cores of the machine.",
        vec![(
            String::new(),
            float(u64::try_from(kubelet.machine.cpus).unwrap_or(0)),
            None,
        )],
    );
    page.family(
        "machine_memory_bytes",
        "gauge",
        "Memory of the machine.",
        vec![(
            String::new(),
            float(u64::try_from(kubelet.machine.memory).unwrap_or(0)),
            None,
        )],
    );
    page::answer(page.into_text())
}

type Timed = (f64, i64);

fn memory(
    memory: &Option<v1::MemoryUsage>,
    part: fn(&v1::MemoryUsage) -> &Option<v1::UInt64Value>,
) -> Option<Timed> {
    let memory = memory.as_ref()?;
    Some((float(number(part(memory))?), memory.timestamp))
}

/// `images` are those of containers, by id, and `paths` the cgroups of pods, by uid.
fn format(pods: &[PodUsage], images: &HashMap<String, String>, paths: &HashMap<String, String>) -> Page {
    let mut page = Page::default();
    let of_containers = |more: &str, value: &dyn Fn(&ContainerUsage) -> Option<Timed>| -> Vec<Sample> {
        let mut samples = Vec::new();
        for pod in pods {
            for container in &pod.containers {
                let Some((value, time)) = value(container) else {
                    continue;
                };
                let image = images.get(&container.id).map_or("", String::as_str);
                let path = paths
                    .get(&pod.uid)
                    .map_or_else(String::new, |path| format!("{path}/"));
                let labels = format!(
                    "{{container=\"{}\",{more}id=\"{path}{}\",image=\"{image}\",name=\"{}\",namespace=\"{}\",pod=\"{}\"}}",
                    container.name, container.id, container.id, pod.namespace, pod.name
                );
                samples.push((labels, value, Some(time)));
            }
        }
        samples
    };
    page.family(
        "container_cpu_usage_seconds_total",
        "counter",
        "CPU time that the container used.",
        of_containers("cpu=\"total\",", &|container| {
            let cpu = container.cpu.as_ref()?;
            Some((seconds(number(&cpu.usage_core_nano_seconds)?), cpu.timestamp))
        }),
    );
    type Part = fn(&v1::MemoryUsage) -> &Option<v1::UInt64Value>;
    let parts: [(&str, &str, Part); 3] = [
        (
            "container_memory_rss",
            "Anonymous memory of the container.",
            |m| &m.rss_bytes,
        ),
        (
            "container_memory_usage_bytes",
            "Memory of the container, caches included.",
            |m| &m.usage_bytes,
        ),
        (
            "container_memory_working_set_bytes",
            "Memory of the container that cannot be taken back easily.",
            |m| &m.working_set_bytes,
        ),
    ];
    for (name, help, part) in parts {
        page.family(
            name,
            "gauge",
            help,
            of_containers("", &|c| memory(&c.memory, part)),
        );
    }
    page.family(
        "container_memory_swap",
        "gauge",
        "Swap that the container uses.",
        of_containers("", &|container| {
            let swap = container.swap.as_ref()?;
            Some((float(number(&swap.swap_usage_bytes)?), swap.timestamp))
        }),
    );
    page.family(
        "container_fs_usage_bytes",
        "gauge",
        "What the container wrote to its own file system.",
        of_containers("", &|container| {
            let layer = container.writable_layer.as_ref()?;
            Some((float(number(&layer.used_bytes)?), layer.timestamp))
        }),
    );
    page.family(
        "container_start_time_seconds",
        "gauge",
        "When the container was started, in seconds since the Unix epoch.",
        of_containers("", &|container| {
            let nanos = u64::try_from(container.started_at).ok().filter(|at| *at > 0)?;
            Some((seconds(nanos), container.cpu.as_ref()?.timestamp))
        }),
    );
    network(&mut page, pods, paths);
    page.family(
        "container_processes",
        "gauge",
        "Processes of the pod.",
        of_pods(pods, paths, |pod| {
            let time = pod.cpu.as_ref()?.timestamp;
            Some(vec![(String::new(), float(pod.process_count?), time)])
        }),
    );
    page
}

/// Samples of pods: more labels, a value and its time for each.
fn of_pods(
    pods: &[PodUsage],
    paths: &HashMap<String, String>,
    value: impl Fn(&PodUsage) -> Option<Vec<(String, f64, i64)>>,
) -> Vec<Sample> {
    let mut samples = Vec::new();
    for pod in pods {
        for (more, value, time) in value(pod).unwrap_or_default() {
            // A pod's own samples have no container, as those of cAdvisor have.
            let known = paths.get(&pod.uid).cloned();
            let path = known.unwrap_or_else(|| format!("/kubepods/pod{}", pod.uid));
            let labels = format!(
                "{{container=\"\",id=\"{path}\",image=\"\",{more}name=\"\",namespace=\"{}\",pod=\"{}\"}}",
                pod.namespace, pod.name
            );
            samples.push((labels, value, Some(time)));
        }
    }
    samples
}

fn network(page: &mut Page, pods: &[PodUsage], paths: &HashMap<String, String>) {
    type Part = fn(&v1::NetworkInterfaceUsage) -> &Option<v1::UInt64Value>;
    let parts: [(&str, &str, Part); 4] = [
        (
            "container_network_receive_bytes_total",
            "Bytes that the pod received.",
            |i| &i.rx_bytes,
        ),
        (
            "container_network_receive_errors_total",
            "Errors while receiving.",
            |i| &i.rx_errors,
        ),
        (
            "container_network_transmit_bytes_total",
            "Bytes that the pod sent.",
            |i| &i.tx_bytes,
        ),
        (
            "container_network_transmit_errors_total",
            "Errors while sending.",
            |i| &i.tx_errors,
        ),
    ];
    for (name, help, part) in parts {
        let samples = of_pods(pods, paths, |pod| {
            let network = pod.network.as_ref()?;
            let default = network.default_interface.as_ref();
            // Some runtimes list the default one among the others too.
            let is_other = |one: &&v1::NetworkInterfaceUsage| default.is_none_or(|it| it.name != one.name);
            let interfaces = default
                .into_iter()
                .chain(network.interfaces.iter().filter(is_other));
            let row = |one: &v1::NetworkInterfaceUsage| {
                // A pod may call an interface nearly anything.
                let name = one.name.replace('\\', "\\\\").replace('"', "\\\"");
                let label = format!("interface=\"{name}\",");
                Some((label, float(number(part(one))?), network.timestamp))
            };
            Some(interfaces.filter_map(row).collect())
        });
        page.family(name, "counter", help, samples);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(value: u64) -> Option<v1::UInt64Value> {
        Some(v1::UInt64Value { value })
    }

    #[test]
    fn the_page() {
        let container = ContainerUsage {
            id: "c1".into(),
            name: "c".into(),
            cpu: Some(v1::CpuUsage {
                timestamp: 7_000_000,
                usage_core_nano_seconds: value(1_500_000_000),
                ..Default::default()
            }),
            memory: Some(v1::MemoryUsage {
                timestamp: 8_000_000,
                working_set_bytes: value(4096),
                rss_bytes: value(1024),
                ..Default::default()
            }),
            ..Default::default()
        };
        let eth0 = v1::NetworkInterfaceUsage {
            name: "eth0".into(),
            rx_bytes: value(10),
            ..Default::default()
        };
        let pod = PodUsage {
            namespace: "ns".into(),
            name: "p".into(),
            uid: "u".into(),
            network: Some(v1::NetworkUsage {
                timestamp: 9_000_000,
                default_interface: Some(eth0.clone()),
                interfaces: vec![eth0],
            }),
            containers: vec![container],
            ..Default::default()
        };
        let images = HashMap::from([("c1".to_owned(), "example.com/a:1".to_owned())]);
        let text = format(&[pod], &images, &HashMap::new()).into_text();
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let labels = "id=\"c1\",image=\"example.com/a:1\",name=\"c1\",namespace=\"ns\",pod=\"p\"}";
        assert_eq!(
            samples,
            [
                format!("container_cpu_usage_seconds_total{{container=\"c\",cpu=\"total\",{labels} 1.5 7"),
                format!("container_memory_rss{{container=\"c\",{labels} 1024 8"),
                format!("container_memory_working_set_bytes{{container=\"c\",{labels} 4096 8"),
                "container_network_receive_bytes_total{container=\"\",id=\"/kubepods/podu\",image=\"\",interface=\"eth0\",name=\"\",namespace=\"ns\",pod=\"p\"} 10 9".to_owned(),
            ]
        );
    }
}
