//! How much there is of what a node can be short of.

use std::path::Path;

use super::thresholds::{Observation, Observations, Signal};
use crate::cgroup_usage::CgroupMemory;
use crate::machine;

/// The memory that pods may have together, and where the kernel tells what they use.
#[derive(Clone, Debug)]
pub struct PodMemory {
    pub allocatable: i64,
    pub cgroup: CgroupMemory,
}

/// Reads all signals that can be read. `images` is where the runtime keeps images, if it said so.
pub fn observe(
    memory_total: i64,
    pods: Option<&PodMemory>,
    node_fs: &Path,
    images: Option<&Path>,
) -> Observations {
    let mut observed = Observations::new();
    if let Some(pods) = pods
        && let Some(used) = pods.cgroup.working_set()
    {
        let memory = Observation {
            available: pods
                .allocatable
                .saturating_sub(i64::try_from(used).unwrap_or(i64::MAX)),
            capacity: pods.allocatable,
        };
        observed.insert(Signal::AllocatableMemory, memory);
    }
    let available = machine::memory_available();
    if available > 0 && memory_total > 0 {
        let memory = Observation {
            available,
            capacity: memory_total,
        };
        observed.insert(Signal::Memory, memory);
    }
    let disks = [
        (Some(node_fs), Signal::NodeFs, Signal::NodeFsInodes),
        (images, Signal::ImageFs, Signal::ImageFsInodes),
    ];
    for (path, bytes, inodes) in disks {
        let Some(disk) = path.and_then(|path| rustix::fs::statvfs(path).ok()) else {
            continue;
        };
        let size = |blocks: u64| i64::try_from(blocks.saturating_mul(disk.f_frsize)).unwrap_or(i64::MAX);
        let amount = Observation {
            available: size(disk.f_bavail),
            capacity: size(disk.f_blocks),
        };
        observed.insert(bytes, amount);
        // Filesystems that make inodes as they are needed tell none.
        if disk.f_files > 0 {
            let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
            let amount = Observation {
                available: count(disk.f_favail),
                capacity: count(disk.f_files),
            };
            observed.insert(inodes, amount);
        }
    }
    observed.extend(pids().map(|pids| (Signal::Pids, pids)));
    observed
}

fn pids() -> Option<Observation> {
    let number = |path: &str| -> Option<i64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    let capacity = number("/proc/sys/kernel/pid_max")?.min(number("/proc/sys/kernel/threads-max")?);
    let used = tasks(&std::fs::read_to_string("/proc/loadavg").ok()?)?;
    Some(Observation {
        available: capacity - used,
        capacity,
    })
}

/// `0.1 0.2 0.3 2/345 6789` are 345 tasks.
fn tasks(loadavg: &str) -> Option<i64> {
    loadavg.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_some_of_everything() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("memory.current"), "300\n").unwrap();
        std::fs::write(dir.path().join("memory.stat"), "inactive_file 100\n").unwrap();
        let pods = PodMemory {
            allocatable: 1000,
            cgroup: CgroupMemory {
                is_v2: true,
                folder: dir.path().to_owned(),
            },
        };
        let observed = observe(1 << 40, Some(&pods), Path::new("/"), Some(Path::new("/")));
        let expected = Observation {
            available: 800,
            capacity: 1000,
        };
        assert_eq!(observed[&Signal::AllocatableMemory], expected);
        for signal in [Signal::Memory, Signal::NodeFs, Signal::ImageFs, Signal::Pids] {
            let one = observed[&signal];
            assert!(
                one.available > 0 && one.capacity >= one.available,
                "{signal:?} {one:?}"
            );
        }
        assert!(!observe(0, None, Path::new("/"), None).contains_key(&Signal::ImageFs));
        assert_eq!(tasks("0.1 0.2 0.3 2/345 6789\n"), Some(345));
    }
}
