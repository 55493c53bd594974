//! `/stats/summary`: the same numbers with more detail, as JSON: file systems, volumes, network, and what processes waited for.
//! What nobody tells is left out rather than made up. A request walks no disk: sizes are those of the last look.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use http::{Response, StatusCode};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};
use skiff_cri::v1;
use skiff_fs::DiskUsage;
use skiff_streaming::Body;

use super::stats::{ContainerUsage, NodeUsage, PodUsage, Rates, now_nanos, number};
use super::system_containers::{self, add_pressure, add_told};
use super::{json as answer, node_stats, text};
use crate::cgroup_stats::{CgroupFiles, Pressure};
use crate::disk_stats::{PodDisk, VolumeUsage};
use crate::kubelet::Kubelet;
use crate::volumes::FsUsage;

const NODE: &str = "";

pub async fn serve(kubelet: &Arc<Kubelet>, rates: &Rates, query: &[(String, String)]) -> Response<Body> {
    let pods = match kubelet.pod_usage().await {
        Ok(pods) => pods,
        Err(error) => return text(StatusCode::INTERNAL_SERVER_ERROR, error),
    };
    let only_cpu_and_memory = query
        .iter()
        .any(|(name, value)| name == "only_cpu_and_memory" && matches!(value.as_str(), "true" | "1"));
    let node = NodeUsage::read(kubelet.machine.memory);
    let system = system_containers::read(kubelet);
    let mut read = readings(&node, &pods);
    read.extend(
        system
            .iter()
            .filter_map(|one| reading(&one.usage.id, &one.usage.cpu)),
    );
    let cores = rates.update(read);
    let mut shown_node = node_summary(&kubelet.config.node_name, &node, &cores);
    let now = time(now_nanos());
    let containers = system.iter().map(|one| {
        let mut shown = container_summary(&one.usage, &cores, true);
        if let Some(files) = one.files.as_ref().filter(|_| !only_cpu_and_memory) {
            add_pressure(&mut shown, &now, |what| files.pressure(what));
        }
        shown
    });
    shown_node["systemContainers"] = containers.collect();
    let mut disks = Disks::default();
    if !only_cpu_and_memory {
        add_pressure(&mut shown_node, &now, Pressure::of_machine);
        disks.node = FsUsage::of(&kubelet.config.data_dir);
        for (section, value) in [
            ("fs", disks.node.as_ref().map(file_system)),
            ("network", node_stats::network(now.clone())),
            ("rlimit", node_stats::rlimit(now.clone())),
            (
                "runtime",
                kubelet
                    .runtime_disks(|path| disks.of(path).as_ref().map(file_system))
                    .await,
            ),
        ] {
            if let Some(value) = value {
                shown_node[section] = value;
            }
        }
    }
    let shown = pods.iter().map(|pod| {
        let mut shown = pod_summary(pod, &cores, only_cpu_and_memory);
        if !only_cpu_and_memory {
            add_disks(
                &mut shown,
                pod,
                kubelet.disk_stats.of(&pod.uid).as_deref(),
                &disks,
            );
            let files = kubelet.state_by_uid(&pod.uid);
            if let Some(files) = files.and_then(|state| kubelet.cgroups.pod_files(&state.pod())) {
                add_pod_pressure(&mut shown, pod, &files, &now);
            }
        }
        shown
    });
    let shown: Vec<Value> = shown.collect();
    answer(&json!({"node": shown_node, "pods": shown}))
}

/// The file systems that were asked for this answer: containers share few.
#[derive(Default)]
struct Disks {
    node: Option<FsUsage>,
    asked: parking_lot::Mutex<HashMap<String, Option<FsUsage>>>,
}

impl Disks {
    fn of(&self, path: &Path) -> Option<FsUsage> {
        let mut asked = self.asked.lock();
        *asked
            .entry(path.display().to_string())
            .or_insert_with(|| FsUsage::of(path))
    }
}

/// Volumes, writable layers and logs.
fn add_disks(shown: &mut Value, pod: &PodUsage, disk: Option<&PodDisk>, disks: &Disks) {
    let mut total = DiskUsage::default();
    for (container, shown) in pod
        .containers
        .iter()
        .zip(shown["containers"].as_array_mut().into_iter().flatten())
    {
        if let Some(layer) = &container.writable_layer {
            let usage = DiskUsage {
                bytes: number(&layer.used_bytes).unwrap_or(0),
                inodes: number(&layer.inodes_used).unwrap_or(0),
            };
            total += usage;
            let found = layer
                .fs_id
                .as_ref()
                .and_then(|id| disks.of(Path::new(&id.mountpoint)));
            let mut section = file_system(&found.unwrap_or_default().using(usage));
            section["time"] = time(layer.timestamp);
            shown["rootfs"] = section;
        }
        if let (Some(disk), Some(node)) = (disk, disks.node)
            && let Some(logs) = disk.files.logs.get(&container.name)
        {
            total += *logs;
            let mut section = file_system(&node.using(*logs));
            section["time"] = time(disk.time);
            shown["logs"] = section;
        }
    }
    let Some(disk) = disk else { return };
    let volumes: Vec<Value> = disk
        .volumes
        .iter()
        .map(|one| volume(&pod.namespace, one))
        .collect();
    if !volumes.is_empty() {
        shown["volume"] = json!(volumes);
    }
    for (_, usage) in disk.files.ephemeral_volumes() {
        total += usage;
    }
    total += disk.files.rest;
    if let Some(node) = disks.node {
        let mut section = file_system(&node.using(total));
        section["time"] = time(disk.time);
        shown["ephemeral-storage"] = section;
    }
}

fn volume(namespace: &str, volume: &VolumeUsage) -> Value {
    let mut shown = file_system(&volume.usage);
    shown["name"] = json!(volume.name);
    if let Some(claim) = &volume.claim {
        shown["pvcRef"] = json!({"name": claim, "namespace": namespace});
    }
    shown
}

/// Where the runtime does not tell it, the kernel does.
fn add_pod_pressure(shown: &mut Value, pod: &PodUsage, files: &CgroupFiles, now: &Value) {
    add_pressure(shown, now, |what| files.pressure(what));
    for (container, shown) in pod
        .containers
        .iter()
        .zip(shown["containers"].as_array_mut().into_iter().flatten())
    {
        if let Some(files) = files.below(&container.id) {
            add_pressure(shown, now, |what| files.pressure(what));
        }
    }
}

fn reading(id: &str, cpu: &Option<v1::CpuUsage>) -> Option<(String, i64, u64)> {
    let cpu = cpu.as_ref()?;
    let nanos = number(&cpu.usage_core_nano_seconds)?;
    Some((id.to_owned(), cpu.timestamp, nanos))
}

/// Everything whose cores are shown: the node, pods by uid and containers by id.
fn readings(node: &NodeUsage, pods: &[PodUsage]) -> Vec<(String, i64, u64)> {
    let mut readings = vec![(NODE.to_owned(), node.time, node.cpu_nanos)];
    for pod in pods {
        readings.extend(reading(&pod.uid, &pod.cpu));
        readings.extend(pod.containers.iter().filter_map(|c| reading(&c.id, &c.cpu)));
    }
    readings
}

fn time(nanos: i64) -> Value {
    match Timestamp::from_nanosecond(i128::from(nanos)) {
        Ok(time) => json!(skiff_meta::time::format_seconds(time)),
        Err(_) => Value::Null,
    }
}

/// An object of what is known.
fn object(fields: impl IntoIterator<Item = (&'static str, Option<u64>)>) -> Map<String, Value> {
    let known = |(name, value): (&str, Option<u64>)| Some((name.to_owned(), json!(value?)));
    fields.into_iter().filter_map(known).collect()
}

fn node_summary(name: &str, node: &NodeUsage, cores: &HashMap<String, u64>) -> Value {
    let mut cpu = object([
        ("usageNanoCores", cores.get(NODE).copied()),
        ("usageCoreNanoSeconds", Some(node.cpu_nanos)),
    ]);
    let mut memory = object([
        ("availableBytes", Some(node.memory_available)),
        ("usageBytes", Some(node.memory_used)),
        ("workingSetBytes", Some(node.working_set())),
        ("rssBytes", Some(node.memory_rss)),
        ("pageFaults", Some(node.page_faults)),
        ("majorPageFaults", Some(node.major_page_faults)),
    ]);
    let mut swap = object([
        ("swapAvailableBytes", Some(node.swap_free)),
        (
            "swapUsageBytes",
            Some(node.swap_total.saturating_sub(node.swap_free)),
        ),
    ]);
    for section in [&mut cpu, &mut memory, &mut swap] {
        section.insert("time".to_owned(), time(node.time));
    }
    json!({"nodeName": name, "startTime": boot_time(), "cpu": cpu, "memory": memory, "swap": swap})
}

fn boot_time() -> Value {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let seconds = stat.lines().find_map(|line| line.strip_prefix("btime "));
    let seconds = seconds.and_then(|text| text.trim().parse::<i64>().ok());
    seconds.map_or(Value::Null, |at| time(at.saturating_mul(1_000_000_000)))
}

fn file_system(usage: &FsUsage) -> Value {
    let mut shown = object([
        ("availableBytes", usage.available),
        ("capacityBytes", usage.capacity),
        ("usedBytes", usage.used),
        ("inodesFree", usage.inodes_free),
        ("inodes", usage.inodes),
        ("inodesUsed", usage.inodes_used),
    ]);
    shown.insert("time".to_owned(), time(usage.time));
    shown.into()
}

fn cpu_section(cpu: &v1::CpuUsage, cores: Option<u64>) -> Value {
    let mut section = object([
        ("usageNanoCores", number(&cpu.usage_nano_cores).or(cores)),
        ("usageCoreNanoSeconds", number(&cpu.usage_core_nano_seconds)),
    ]);
    section.insert("time".to_owned(), time(cpu.timestamp));
    add_told(&mut section, cpu.psi.as_ref());
    section.into()
}

fn memory_section(memory: &v1::MemoryUsage) -> Value {
    let mut section = object([
        ("availableBytes", number(&memory.available_bytes)),
        ("usageBytes", number(&memory.usage_bytes)),
        ("workingSetBytes", number(&memory.working_set_bytes)),
        ("rssBytes", number(&memory.rss_bytes)),
        ("pageFaults", number(&memory.page_faults)),
        ("majorPageFaults", number(&memory.major_page_faults)),
    ]);
    section.insert("time".to_owned(), time(memory.timestamp));
    add_told(&mut section, memory.psi.as_ref());
    section.into()
}

fn interface(interface: &v1::NetworkInterfaceUsage) -> Map<String, Value> {
    let mut shown = object([
        ("rxBytes", number(&interface.rx_bytes)),
        ("rxErrors", number(&interface.rx_errors)),
        ("txBytes", number(&interface.tx_bytes)),
        ("txErrors", number(&interface.tx_errors)),
    ]);
    shown.insert("name".to_owned(), json!(interface.name));
    shown
}

fn network_section(network: &v1::NetworkUsage) -> Value {
    let mut section = network
        .default_interface
        .as_ref()
        .map(interface)
        .unwrap_or_default();
    section.insert("time".to_owned(), time(network.timestamp));
    let all: Vec<_> = network.interfaces.iter().map(interface).collect();
    section.insert("interfaces".to_owned(), json!(all));
    section.into()
}

fn container_summary(
    container: &ContainerUsage,
    cores: &HashMap<String, u64>,
    only_cpu_and_memory: bool,
) -> Value {
    let mut shown = json!({"name": container.name, "startTime": time(container.started_at)});
    if let Some(cpu) = &container.cpu {
        shown["cpu"] = cpu_section(cpu, cores.get(&container.id).copied());
    }
    if let Some(memory) = &container.memory {
        shown["memory"] = memory_section(memory);
    }
    if only_cpu_and_memory {
        return shown;
    }
    if let Some(swap) = &container.swap {
        let mut section = object([
            ("swapAvailableBytes", number(&swap.swap_available_bytes)),
            ("swapUsageBytes", number(&swap.swap_usage_bytes)),
        ]);
        section.insert("time".to_owned(), time(swap.timestamp));
        shown["swap"] = section.into();
    }
    shown
}

fn pod_summary(pod: &PodUsage, cores: &HashMap<String, u64>, only_cpu_and_memory: bool) -> Value {
    let containers: Vec<Value> = pod
        .containers
        .iter()
        .map(|container| container_summary(container, cores, only_cpu_and_memory))
        .collect();
    let mut shown = json!({
        "podRef": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid},
        "startTime": time(pod.started_at),
        "containers": containers,
    });
    if let Some(cpu) = &pod.cpu {
        shown["cpu"] = cpu_section(cpu, cores.get(&pod.uid).copied());
    }
    if let Some(memory) = &pod.memory {
        shown["memory"] = memory_section(memory);
    }
    if only_cpu_and_memory {
        return shown;
    }
    if let Some(network) = &pod.network {
        shown["network"] = network_section(network);
    }
    if let Some(processes) = pod.process_count {
        shown["process_stats"] = json!({"process_count": processes});
    }
    if let Some((at, bytes)) = pod.swap() {
        shown["swap"] = json!({"time": time(at), "swapUsageBytes": bytes});
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    /// COMPAT: clients read every number of the node's memory without a look whether it is there.
    #[test]
    fn the_memory_of_the_node_is_whole() {
        let node = NodeUsage::read(1 << 30);
        let shown = node_summary("n", &node, &HashMap::new());
        for field in ["usageBytes", "rssBytes", "pageFaults"] {
            assert!(
                shown["memory"][field].as_u64().is_some_and(|n| n > 0),
                "{field}: {shown}"
            );
        }
        assert!(shown["memory"]["majorPageFaults"].is_u64(), "{shown}");
    }

    #[test]
    fn a_pod() {
        let value = |value| Some(v1::UInt64Value { value });
        let cpu = |nanos| {
            Some(v1::CpuUsage {
                timestamp: 1_000_000_000,
                usage_core_nano_seconds: value(nanos),
                ..Default::default()
            })
        };
        let pod = PodUsage {
            namespace: "ns".into(),
            name: "p".into(),
            uid: "u".into(),
            cpu: cpu(9),
            process_count: Some(3),
            containers: vec![ContainerUsage {
                id: "c1".into(),
                name: "c".into(),
                started_at: 2_000_000_000,
                cpu: cpu(7),
                ..Default::default()
            }],
            ..Default::default()
        };
        let cores = HashMap::from([("c1".to_owned(), 5)]);
        assert_eq!(
            pod_summary(&pod, &cores, false),
            json!({
                "podRef": {"name": "p", "namespace": "ns", "uid": "u"},
                "startTime": "1970-01-01T00:00:00Z",
                "containers": [{"name": "c", "startTime": "1970-01-01T00:00:02Z",
                    "cpu": {"time": "1970-01-01T00:00:01Z", "usageNanoCores": 5, "usageCoreNanoSeconds": 7}}],
                "cpu": {"time": "1970-01-01T00:00:01Z", "usageCoreNanoSeconds": 9},
                "process_stats": {"process_count": 3},
            })
        );
        assert_eq!(readings(&NodeUsage::default(), &[pod]).len(), 3);
    }
}
