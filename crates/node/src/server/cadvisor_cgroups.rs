//! The families of `/metrics/cadvisor` that the runtime does not tell and the kernel does, by the cgroups of pods and their
//! containers. Nothing here where pods have no cgroups of ours.

use std::collections::HashMap;

use super::page::{Page, Sample, float, seconds};
use super::stats::{PodUsage, now_nanos};
use crate::cgroup_stats::{CgroupFiles, CpuCounters, DeviceIo, MemoryCounters, Pressure};
use crate::kubelet::Kubelet;

/// What was read of one cgroup.
struct Group {
    /// All labels but those that a family adds.
    labels: String,
    cpu: Option<CpuCounters>,
    memory: Option<MemoryCounters>,
    io: Vec<DeviceIo>,
    threads: Option<u64>,
    max_threads: Option<u64>,
    limits: Option<(u64, Option<(u64, u64)>)>,
    pressure: [Option<Pressure>; 3],
}

impl Group {
    fn read(files: &CgroupFiles, labels: String) -> Group {
        Group {
            labels,
            cpu: files.cpu(),
            memory: files.memory(),
            io: files.io(),
            threads: files.threads(),
            max_threads: files.max_threads(),
            limits: files.cpu_limits(),
            pressure: ["cpu", "memory", "io"].map(|what| files.pressure(what)),
        }
    }
}

/// The value of a family with the labels that it adds, each followed by a comma.
type Value = (String, f64);

/// Reads many files of the kernel: blocking, if only shortly.
pub fn add(page: &mut Page, kubelet: &Kubelet, pods: &[PodUsage], images: &HashMap<String, String>) {
    let mut groups = Vec::new();
    for pod in pods {
        let Some(state) = kubelet.state_by_uid(&pod.uid) else {
            continue;
        };
        let object = state.pod();
        let Some(files) = kubelet.cgroups.pod_files(&object) else {
            continue;
        };
        let path = kubelet.cgroups.pod_path(&object);
        let (namespace, name) = (&pod.namespace, &pod.name);
        for container in &pod.containers {
            let Some(files) = files.below(&container.id) else {
                continue;
            };
            let image = images.get(&container.id).map_or("", String::as_str);
            let labels = format!(
                "id=\"{path}/{0}\",image=\"{image}\",name=\"{0}\",namespace=\"{namespace}\",pod=\"{name}\"}}",
                container.id
            );
            let labels = format!("container=\"{}\",{labels}", container.name);
            groups.push(Group::read(&files, labels));
        }
        let labels = format!(
            "container=\"\",id=\"{path}\",image=\"\",name=\"\",namespace=\"{namespace}\",pod=\"{name}\"}}"
        );
        groups.push(Group::read(&files, labels));
    }
    show(page, &groups, now_nanos());
}

fn plain(value: Option<u64>) -> Vec<Value> {
    value
        .map(|value| (String::new(), float(value)))
        .into_iter()
        .collect()
}

fn in_seconds(nanos: Option<u64>) -> Vec<Value> {
    nanos
        .map(|nanos| (String::new(), seconds(nanos)))
        .into_iter()
        .collect()
}

fn show(page: &mut Page, groups: &[Group], now: i64) {
    let mut family = |name: &str, kind: &str, help: &str, values: &dyn Fn(&Group) -> Vec<Value>| {
        let mut samples: Vec<Sample> = Vec::new();
        for group in groups {
            for (more, value) in values(group) {
                samples.push((format!("{{{more}{}", group.labels), value, Some(now)));
            }
        }
        page.family(name, kind, help, samples);
    };
    let cpu = |part: fn(&CpuCounters) -> Option<u64>| {
        move |group: &Group| in_seconds(group.cpu.as_ref().and_then(part))
    };
    family(
        "container_cpu_user_seconds_total",
        "counter",
        "CPU time in user mode.",
        &cpu(|cpu| cpu.user_nanos),
    );
    family(
        "container_cpu_system_seconds_total",
        "counter",
        "CPU time in the kernel.",
        &cpu(|cpu| cpu.system_nanos),
    );
    family(
        "container_cpu_cfs_throttled_seconds_total",
        "counter",
        "How long the CPU limit held the processes up.",
        &cpu(|cpu| Some(cpu.throttling?.2)),
    );
    family(
        "container_cpu_cfs_periods_total",
        "counter",
        "Periods in which the CPU limit was enforced.",
        &|group| plain(group.cpu.and_then(|cpu| Some(cpu.throttling?.0))),
    );
    family(
        "container_cpu_cfs_throttled_periods_total",
        "counter",
        "Periods in which the CPU limit held the processes up.",
        &|group| plain(group.cpu.and_then(|cpu| Some(cpu.throttling?.1))),
    );
    type Part = fn(&MemoryCounters) -> Option<u64>;
    let of_memory: [(&str, &str, &str, Part); 6] = [
        ("container_memory_cache", "gauge", "Page cache.", |m| {
            Some(m.cache)
        }),
        (
            "container_memory_mapped_file",
            "gauge",
            "Files that are mapped into memory.",
            |m| Some(m.mapped_file),
        ),
        (
            "container_memory_max_usage_bytes",
            "gauge",
            "The most memory that was in use.",
            |m| m.max_usage,
        ),
        (
            "container_memory_failcnt",
            "counter",
            "How often the memory limit was hit.",
            |m| m.limit_hits,
        ),
        (
            "container_oom_events_total",
            "counter",
            "Processes that the kernel killed for want of memory.",
            |m| m.oom_kills,
        ),
        (
            "container_spec_memory_limit_bytes",
            "gauge",
            "The memory limit; 0 is none.",
            |m| Some(m.limit.unwrap_or(0)),
        ),
    ];
    for (name, kind, help, part) in of_memory {
        family(name, kind, help, &|group| {
            plain(group.memory.as_ref().and_then(part))
        });
    }
    family(
        "container_memory_failures_total",
        "counter",
        "Page faults, with what is below the cgroup.",
        &|group| {
            let faults = group.memory.iter().flat_map(|memory| {
                [
                    ("pgfault", memory.page_faults),
                    ("pgmajfault", memory.major_page_faults),
                ]
            });
            let row = |(kind, count): (&str, u64)| {
                let more = format!("failure_type=\"{kind}\",scope=\"hierarchy\",");
                (more, float(count))
            };
            faults.map(row).collect()
        },
    );
    type IoPart = fn(&DeviceIo) -> u64;
    let of_io: [(&str, &str, IoPart); 4] = [
        (
            "container_fs_reads_bytes_total",
            "Bytes read from devices.",
            |io| io.read_bytes,
        ),
        ("container_fs_reads_total", "Reads from devices.", |io| io.reads),
        (
            "container_fs_writes_bytes_total",
            "Bytes written to devices.",
            |io| io.written_bytes,
        ),
        ("container_fs_writes_total", "Writes to devices.", |io| io.writes),
    ];
    for (name, help, part) in of_io {
        family(name, "counter", help, &|group| {
            let row = |io: &DeviceIo| (format!("device=\"{}\",", io.device), float(part(io)));
            group.io.iter().map(row).collect()
        });
    }
    family(
        "container_threads",
        "gauge",
        "Threads of all processes.",
        &|group| plain(group.threads),
    );
    family(
        "container_threads_max",
        "gauge",
        "How many threads there may be; 0 is no limit.",
        &|group| plain(group.threads.map(|_| group.max_threads.unwrap_or(0))),
    );
    family(
        "container_spec_cpu_shares",
        "gauge",
        "The share of the CPU.",
        &|group| plain(group.limits.map(|(shares, _)| shares)),
    );
    family(
        "container_spec_cpu_quota",
        "gauge",
        "CPU time in a period, in microseconds.",
        &|group| plain(group.limits.and_then(|(_, quota)| Some(quota?.0))),
    );
    family(
        "container_spec_cpu_period",
        "gauge",
        "The period of the CPU limit, in microseconds.",
        &|group| plain(group.limits.and_then(|(_, quota)| Some(quota?.1))),
    );
    for (at, what) in ["cpu", "memory", "io"].into_iter().enumerate() {
        let total = |group: &Group, all: bool| {
            let micros = group.pressure[at].map(|pressure| match all {
                true => pressure.full.total_micros,
                false => pressure.some.total_micros,
            });
            in_seconds(micros.map(|micros| micros.saturating_mul(1000)))
        };
        family(
            &format!("container_pressure_{what}_stalled_seconds_total"),
            "counter",
            "How long no process could go on for want of it.",
            &|group| total(group, true),
        );
        family(
            &format!("container_pressure_{what}_waiting_seconds_total"),
            "counter",
            "How long some process waited for it.",
            &|group| total(group, false),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_families() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            (
                "cpu.stat",
                "usage_usec 9\nuser_usec 5000000\nsystem_usec 2\nnr_periods 4\nnr_throttled 3\nthrottled_usec 500000\n",
            ),
            ("cpu.max", "50000 100000\n"),
            ("cpu.weight", "1\n"),
            ("memory.current", "1000\n"),
            ("memory.max", "max\n"),
            ("memory.stat", "file 600\npgfault 8\n"),
            ("memory.events", "oom_kill 1\n"),
            ("pids.current", "5\n"),
            ("io.stat", "0:0 rbytes=10 wbytes=20 rios=1 wios=2\n"),
            (
                "memory.pressure",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n",
            ),
        ] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let files = CgroupFiles::V2(dir.path().to_owned());
        let mut page = Page::default();
        show(
            &mut page,
            &[Group::read(&files, "pod=\"p\"}".to_owned())],
            7_000_000,
        );
        let text = page.into_text();
        for line in [
            "container_cpu_user_seconds_total{pod=\"p\"} 5 7",
            "container_cpu_cfs_throttled_periods_total{pod=\"p\"} 3 7",
            "container_cpu_cfs_throttled_seconds_total{pod=\"p\"} 0.5 7",
            "container_memory_cache{pod=\"p\"} 600 7",
            "container_oom_events_total{pod=\"p\"} 1 7",
            "container_spec_memory_limit_bytes{pod=\"p\"} 0 7",
            "container_memory_failures_total{failure_type=\"pgfault\",scope=\"hierarchy\",pod=\"p\"} 8 7",
            "container_fs_writes_bytes_total{device=\"0:0\",pod=\"p\"} 20 7",
            "container_threads{pod=\"p\"} 5 7",
            "container_spec_cpu_quota{pod=\"p\"} 50000 7",
            "container_pressure_memory_waiting_seconds_total{pod=\"p\"} 1.5 7",
        ] {
            assert!(text.lines().any(|one| one == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("container_pressure_io"), "the kernel did not tell");
    }
}
