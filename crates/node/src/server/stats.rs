//! What the node, its pods and their containers use, as the kernel and the runtime count it. How it is shown is in
//! `resource_metrics.rs` and `summary.rs`.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;
use skiff_cri::{Code, v1};

use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::machine;
use crate::observed::labels;

/// Two readings that are nearer to each other than this give no rate.
const SHORTEST_WINDOW_NANOS: i64 = 1_000_000_000;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerUsage {
    pub id: String,
    pub name: String,
    /// Unix nanoseconds; 0 if it is not known.
    pub started_at: i64,
    pub cpu: Option<v1::CpuUsage>,
    pub memory: Option<v1::MemoryUsage>,
    pub swap: Option<v1::SwapUsage>,
    pub writable_layer: Option<v1::FilesystemUsage>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodUsage {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub started_at: i64,
    pub cpu: Option<v1::CpuUsage>,
    pub memory: Option<v1::MemoryUsage>,
    pub network: Option<v1::NetworkUsage>,
    pub process_count: Option<u64>,
    pub containers: Vec<ContainerUsage>,
}

impl PodUsage {
    /// The sum over the containers; `None` if none of them has it.
    pub fn swap(&self) -> Option<(i64, u64)> {
        let known = |c: &ContainerUsage| {
            let swap = c.swap.as_ref()?;
            Some((swap.timestamp, number(&swap.swap_usage_bytes)?))
        };
        self.containers
            .iter()
            .filter_map(known)
            .reduce(|a, b| (a.0.max(b.0), a.1 + b.1))
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeUsage {
    /// Unix nanoseconds.
    pub time: i64,
    pub cpu_nanos: u64,
    pub memory_total: u64,
    pub memory_available: u64,
    /// All that is not free, caches included.
    pub memory_used: u64,
    /// Anonymous memory.
    pub memory_rss: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    pub swap_total: u64,
    pub swap_free: u64,
}

impl NodeUsage {
    pub fn working_set(&self) -> u64 {
        self.memory_total.saturating_sub(self.memory_available)
    }

    pub fn read(memory_total: i64) -> NodeUsage {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let bytes = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
                .map_or(0, |kib| kib * 1024)
        };
        let vmstat = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
        let count = |name: &str| {
            let line = vmstat.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.trim().parse().ok()).unwrap_or(0)
        };
        NodeUsage {
            time: now_nanos(),
            cpu_nanos: busy_nanos(&std::fs::read_to_string("/proc/stat").unwrap_or_default()),
            memory_total: u64::try_from(memory_total).unwrap_or(0),
            memory_available: u64::try_from(machine::memory_available()).unwrap_or(0),
            memory_used: bytes("MemTotal:").saturating_sub(bytes("MemFree:")),
            memory_rss: bytes("AnonPages:"),
            page_faults: count("pgfault "),
            major_page_faults: count("pgmajfault "),
            swap_total: bytes("SwapTotal:"),
            swap_free: bytes("SwapFree:"),
        }
    }
}

pub fn now_nanos() -> i64 {
    i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

pub fn number(value: &Option<v1::UInt64Value>) -> Option<u64> {
    value.as_ref().map(|v| v.value)
}

/// CPU time of the whole machine in nanoseconds, idle time left out.
fn busy_nanos(stat: &str) -> u64 {
    let Some(line) = stat.lines().next() else { return 0 };
    let ticks: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .filter_map(|t| t.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal, at 100 ticks a second. Guests are part of user and nice.
    let busy: u64 = ticks
        .iter()
        .enumerate()
        .filter(|(i, _)| !matches!(i, 3 | 4) && *i < 8)
        .map(|(_, t)| t)
        .sum();
    busy * 10_000_000
}

/// What the runtime tells, by pod and container; `known` has the uids of this node's pods, with their start, and
/// `started` the starts of running containers. Of several sandboxes or containers of one name the newest counts.
fn pods_of(
    sandboxes: Vec<v1::PodSandboxStats>,
    known: &HashMap<String, i64>,
    started: &HashMap<String, i64>,
) -> Vec<PodUsage> {
    let mut pods: BTreeMap<(String, String), (u32, PodUsage)> = BTreeMap::new();
    for sandbox in sandboxes {
        let (attributes, linux) = (
            sandbox.attributes.unwrap_or_default(),
            sandbox.linux.unwrap_or_default(),
        );
        let label = |name: &str| attributes.labels.get(name).cloned().unwrap_or_default();
        let uid = label(labels::POD_UID);
        let Some(started_at) = known.get(&uid) else {
            continue;
        };
        let attempt = attributes.metadata.as_ref().map_or(0, |m| m.attempt);
        let pod = PodUsage {
            namespace: label(labels::POD_NAMESPACE),
            name: label(labels::POD_NAME),
            uid,
            started_at: *started_at,
            cpu: linux.cpu,
            memory: linux.memory,
            network: linux.network,
            process_count: linux.process.as_ref().and_then(|p| number(&p.process_count)),
            containers: containers_of(linux.containers, started),
        };
        let key = (pod.namespace.clone(), pod.name.clone());
        match pods.get(&key) {
            Some((newer, _)) if *newer > attempt => {}
            _ => {
                pods.insert(key, (attempt, pod));
            }
        }
    }
    pods.into_values().map(|(_, pod)| pod).collect()
}

fn containers_of(stats: Vec<v1::ContainerStats>, started: &HashMap<String, i64>) -> Vec<ContainerUsage> {
    let mut found: BTreeMap<String, (u32, ContainerUsage)> = BTreeMap::new();
    for one in stats {
        let attributes = one.attributes.unwrap_or_default();
        // A container that has ended uses nothing; its last numbers would be taken for new ones.
        let Some(started_at) = started.get(&attributes.id) else {
            continue;
        };
        let name = attributes.labels.get(labels::CONTAINER_NAME);
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            continue;
        };
        let attempt = attributes.metadata.as_ref().map_or(0, |m| m.attempt);
        if found.get(name).is_some_and(|(newer, _)| *newer > attempt) {
            continue;
        }
        let usage = ContainerUsage {
            id: attributes.id,
            name: name.clone(),
            started_at: *started_at,
            cpu: one.cpu,
            memory: one.memory,
            swap: one.swap,
            writable_layer: one.writable_layer,
        };
        found.insert(name.clone(), (attempt, usage));
    }
    found.into_values().map(|(_, usage)| usage).collect()
}

/// Sandboxes as a runtime that knows containers only would tell of them: a pod uses what its containers use.
fn sandboxes_of(stats: Vec<v1::ContainerStats>) -> Vec<v1::PodSandboxStats> {
    let mut pods: BTreeMap<String, v1::PodSandboxStats> = BTreeMap::new();
    let plus = |sum: &mut Option<v1::UInt64Value>, more: &Option<v1::UInt64Value>| {
        if let Some(more) = more {
            let before = sum.as_ref().map_or(0, |v| v.value);
            *sum = Some(v1::UInt64Value {
                value: before + more.value,
            });
        }
    };
    for one in stats {
        let attributes = one.attributes.clone().unwrap_or_default();
        let Some(uid) = attributes.labels.get(labels::POD_UID).cloned() else {
            continue;
        };
        let pod = pods.entry(uid).or_insert_with(|| v1::PodSandboxStats {
            attributes: Some(v1::PodSandboxAttributes {
                labels: attributes.labels.clone(),
                ..Default::default()
            }),
            ..Default::default()
        });
        let linux = pod.linux.get_or_insert_default();
        if let Some(cpu) = &one.cpu {
            let sum = linux.cpu.get_or_insert_default();
            sum.timestamp = sum.timestamp.max(cpu.timestamp);
            plus(&mut sum.usage_core_nano_seconds, &cpu.usage_core_nano_seconds);
        }
        if let Some(memory) = &one.memory {
            let sum = linux.memory.get_or_insert_default();
            sum.timestamp = sum.timestamp.max(memory.timestamp);
            plus(&mut sum.working_set_bytes, &memory.working_set_bytes);
            plus(&mut sum.usage_bytes, &memory.usage_bytes);
            plus(&mut sum.rss_bytes, &memory.rss_bytes);
            plus(&mut sum.page_faults, &memory.page_faults);
            plus(&mut sum.major_page_faults, &memory.major_page_faults);
        }
        linux.containers.push(one);
    }
    pods.into_values().collect()
}

impl Kubelet {
    /// What the pods of this node use; other clusters may share the runtime.
    pub async fn pod_usage(&self) -> Result<Vec<PodUsage>, String> {
        let sandboxes = match self.runtime.sandbox_stats().await {
            Err(status) if status.code() == Code::Unimplemented => {
                self.runtime.container_stats().await.map(sandboxes_of)
            }
            other => other,
        };
        let sandboxes = sandboxes.map_err(|status| describe(&status))?;
        let (mut known, mut started) = (HashMap::new(), HashMap::new());
        for state in self.states() {
            let observed = state.observed();
            let created = observed.sandboxes.first().map_or(0, |s| s.created_at);
            known.insert(state.uid.clone(), created);
            started.extend(observed.running().map(|c| (c.id.clone(), c.started_at)));
        }
        Ok(pods_of(sandboxes, &known, &started))
    }
}

/// The readings before, for the cores in use now. Holds what the last summary showed, and nothing else.
#[derive(Default)]
pub struct Rates(Mutex<HashMap<String, Rate>>);

#[derive(Clone, Copy)]
struct Rate {
    time: i64,
    nanos: u64,
    nano_cores: Option<u64>,
}

impl Rates {
    /// The cores that each of these uses, by id, where an earlier reading tells; `readings` are times and totals.
    pub fn update(&self, readings: Vec<(String, i64, u64)>) -> HashMap<String, u64> {
        let mut rates = self.0.lock();
        let mut next = HashMap::with_capacity(readings.len());
        for (id, time, nanos) in readings {
            let fresh = Rate {
                time,
                nanos,
                nano_cores: None,
            };
            let rate = match rates.get(&id) {
                Some(last) if time.saturating_sub(last.time) < SHORTEST_WINDOW_NANOS => *last,
                Some(last) => Rate {
                    nano_cores: cores(last, &fresh),
                    ..fresh
                },
                None => fresh,
            };
            next.insert(id, rate);
        }
        *rates = next;
        rates
            .iter()
            .filter_map(|(id, rate)| Some((id.clone(), rate.nano_cores?)))
            .collect()
    }
}

fn cores(last: &Rate, now: &Rate) -> Option<u64> {
    let used = u128::from(now.nanos.checked_sub(last.nanos)?);
    let window = u128::try_from(now.time - last.time).ok()?;
    u64::try_from((used * 1_000_000_000).checked_div(window)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(id: &str, name: &str, attempt: u32, nanos: u64) -> v1::ContainerStats {
        v1::ContainerStats {
            attributes: Some(v1::ContainerAttributes {
                id: id.into(),
                metadata: Some(v1::ContainerMetadata {
                    name: name.into(),
                    attempt,
                }),
                labels: HashMap::from([
                    (labels::CONTAINER_NAME.to_owned(), name.to_owned()),
                    (labels::POD_UID.to_owned(), "u1".to_owned()),
                    (labels::POD_NAME.to_owned(), "p".to_owned()),
                    (labels::POD_NAMESPACE.to_owned(), "ns".to_owned()),
                ]),
                ..Default::default()
            }),
            cpu: Some(v1::CpuUsage {
                timestamp: 5,
                usage_core_nano_seconds: Some(v1::UInt64Value { value: nanos }),
                ..Default::default()
            }),
            swap: Some(v1::SwapUsage {
                timestamp: 5,
                swap_usage_bytes: Some(v1::UInt64Value { value: nanos * 2 }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn running_containers_of_own_pods() {
        let stats = vec![
            container("c1", "app", 0, 1),
            container("c2", "app", 1, 10),
            container("c3", "side", 0, 100),
            container("c4", "ended", 0, 1000),
        ];
        let started = HashMap::from([("c1", 1), ("c2", 2), ("c3", 3)]);
        let started = started.into_iter().map(|(id, at)| (id.to_owned(), at)).collect();
        let known = HashMap::from([("u1".to_owned(), 7)]);
        let pods = pods_of(sandboxes_of(stats.clone()), &known, &started);
        assert_eq!(pods.len(), 1);
        let pod = &pods[0];
        assert_eq!(
            (pod.namespace.as_str(), pod.name.as_str(), pod.started_at),
            ("ns", "p", 7)
        );
        let found: Vec<(&str, i64)> = pod
            .containers
            .iter()
            .map(|c| (c.id.as_str(), c.started_at))
            .collect();
        assert_eq!(found, [("c2", 2), ("c3", 3)]);
        let cpu = pod
            .cpu
            .as_ref()
            .and_then(|cpu| number(&cpu.usage_core_nano_seconds));
        assert_eq!(cpu, Some(1111), "without sandboxes, the sum of all");
        assert_eq!(pod.swap(), Some((5, 220)));
        assert!(pods_of(sandboxes_of(stats), &HashMap::new(), &started).is_empty());
    }

    #[test]
    fn cores_in_use() {
        const SECOND: i64 = 1_000_000_000;
        let rates = Rates::default();
        let at = |time: i64, nanos: u64| rates.update(vec![("c".into(), time, nanos)]).get("c").copied();
        assert_eq!(at(0, 0), None);
        assert_eq!(at(2 * SECOND, 1_000_000_000), Some(500_000_000));
        assert_eq!(at(2 * SECOND + 1, 1_000_000_001), Some(500_000_000), "too soon");
        assert_eq!(at(4 * SECOND, 0), None, "counted from the start again");
        rates.update(Vec::new());
        assert_eq!(rates.0.lock().len(), 0, "what is gone is forgotten");
    }

    #[test]
    fn busy_time() {
        let stat = "cpu  100 10 50 9999 77 1 2 3 55 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(busy_nanos(stat), 166 * 10_000_000);
        assert_eq!(busy_nanos(""), 0);
    }
}
