//! What `/stats/summary` tells of cgroups beside pods: all pods together, the kubelet, and the shims of the embedded runtime;
//! and how long processes waited for CPU, memory and disks.

use serde_json::{Map, Value, json};
use skiff_cri::v1;

use super::stats::{ContainerUsage, now_nanos};
use crate::cgroup_stats::{CgroupFiles, Pressure, PressureLine};
use crate::kubelet::Kubelet;

/// Their ids, which no container of a pod has.
const PODS: &str = "/pods";
const KUBELET: &str = "/kubelet";
const RUNTIME: &str = "/runtime";

/// A system container, with what its processes waited for.
pub struct SystemContainer {
    pub usage: ContainerUsage,
    pub files: Option<CgroupFiles>,
}

pub fn read(kubelet: &Kubelet) -> Vec<SystemContainer> {
    let started = i64::try_from(kubelet.started.elapsed().as_nanos()).unwrap_or(0);
    let started = now_nanos().saturating_sub(started);
    let own = own_process().map(|(cpu, memory)| SystemContainer {
        usage: ContainerUsage {
            id: KUBELET.to_owned(),
            name: "kubelet".to_owned(),
            started_at: started,
            cpu: Some(cpu),
            memory: Some(memory),
            ..ContainerUsage::default()
        },
        files: None,
    });
    let cgroups = [
        ("pods", PODS, kubelet.cgroups.files_of_pods()),
        ("runtime", RUNTIME, kubelet.cgroups.files_of_shims()),
    ];
    let cgroups = cgroups.into_iter().filter_map(|(name, id, files)| {
        let files = files?;
        Some(SystemContainer {
            usage: of_cgroup(name, id, &files)?,
            files: Some(files),
        })
    });
    own.into_iter().chain(cgroups).collect()
}

fn value(value: u64) -> Option<v1::UInt64Value> {
    Some(v1::UInt64Value { value })
}

fn of_cgroup(name: &str, id: &str, files: &CgroupFiles) -> Option<ContainerUsage> {
    let timestamp = now_nanos();
    let (cpu, memory) = (files.cpu(), files.memory());
    if cpu.is_none() && memory.is_none() {
        return None;
    }
    Some(ContainerUsage {
        id: id.to_owned(),
        name: name.to_owned(),
        started_at: files.made_at().unwrap_or(0),
        cpu: cpu.map(|cpu| v1::CpuUsage {
            timestamp,
            usage_core_nano_seconds: value(cpu.usage_nanos),
            ..Default::default()
        }),
        memory: memory.map(|memory| v1::MemoryUsage {
            timestamp,
            working_set_bytes: value(memory.working_set),
            available_bytes: memory.limit.map(|limit| v1::UInt64Value {
                value: limit.saturating_sub(memory.working_set),
            }),
            usage_bytes: value(memory.usage),
            rss_bytes: value(memory.rss),
            page_faults: value(memory.page_faults),
            major_page_faults: value(memory.major_page_faults),
            psi: None,
        }),
        ..ContainerUsage::default()
    })
}

/// This process. Its cgroup may hold others, or be that of the whole machine.
fn own_process() -> Option<(v1::CpuUsage, v1::MemoryUsage)> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    // The name of the process, in parentheses, may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    let bytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
        Some(kib * 1024)
    };
    let timestamp = now_nanos();
    let resident = bytes("VmRSS:")?;
    let cpu = v1::CpuUsage {
        timestamp,
        // User and system time, a hundred ticks a second.
        usage_core_nano_seconds: value((number(11)? + number(12)?).saturating_mul(10_000_000)),
        ..Default::default()
    };
    let memory = v1::MemoryUsage {
        timestamp,
        usage_bytes: value(resident),
        working_set_bytes: value(resident),
        rss_bytes: value(bytes("RssAnon:")?),
        page_faults: value(number(7)?),
        major_page_faults: value(number(9)?),
        ..Default::default()
    };
    Some((cpu, memory))
}

/// Adds what processes waited for to the sections of `shown`. `io` has nothing else.
pub fn add_pressure(shown: &mut Value, time: &Value, of: impl Fn(&str) -> Option<Pressure>) {
    for what in ["cpu", "memory", "io"] {
        let Some(pressure) = of(what) else { continue };
        if what == "io" && shown[what].is_null() {
            shown[what] = json!({"time": time});
        }
        if let Some(section) = shown[what].as_object_mut() {
            section.entry("psi").or_insert_with(|| shown_pressure(&pressure));
        }
    }
}

fn shown_pressure(pressure: &Pressure) -> Value {
    let line = |line: &PressureLine| {
        let [avg10, avg60, avg300] = line.averages;
        // COMPAT: the kernel's microseconds, as upstream passes them on.
        json!({"total": line.total_micros, "avg10": avg10, "avg60": avg60, "avg300": avg300})
    };
    json!({"full": line(&pressure.full), "some": line(&pressure.some)})
}

/// What the runtime told of it.
pub fn add_told(section: &mut Map<String, Value>, psi: Option<&v1::PsiStats>) {
    let line = |data: &Option<v1::PsiData>| {
        let data = data.unwrap_or_default();
        PressureLine {
            total_micros: data.total,
            averages: [data.avg10, data.avg60, data.avg300],
        }
    };
    if let Some(psi) = psi {
        let pressure = Pressure {
            some: line(&psi.some),
            full: line(&psi.full),
        };
        section.insert("psi".to_owned(), shown_pressure(&pressure));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_something() {
        let (cpu, memory) = own_process().unwrap();
        assert!(cpu.usage_core_nano_seconds.is_some());
        assert!(memory.working_set_bytes.unwrap().value > 1 << 20);
    }

    #[test]
    fn pressure_goes_into_its_sections() {
        let mut shown = json!({"cpu": {"time": "t"}});
        let told = Pressure {
            some: PressureLine {
                total_micros: 5,
                averages: [1.5, 0.0, 0.0],
            },
            ..Pressure::default()
        };
        add_pressure(&mut shown, &json!("t"), |what| (what != "memory").then_some(told));
        assert_eq!(
            shown["cpu"]["psi"]["some"],
            json!({"total": 5, "avg10": 1.5, "avg60": 0.0, "avg300": 0.0})
        );
        assert_eq!(shown["io"]["time"], "t");
        assert_eq!(shown.get("memory"), None, "there is no section of the memory");
    }
}
