//! How much there is of what a node can be short of.

use std::path::Path;

use super::thresholds::{Observation, Observations, Signal};
use crate::machine;

/// Reads all signals that can be read. `images` is where the runtime keeps images, if it said so.
pub fn observe(memory_total: i64, node_fs: &Path, images: Option<&Path>) -> Observations {
    let mut observed = Observations::new();
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
        let observed = observe(1 << 40, Path::new("/"), Some(Path::new("/")));
        for signal in [Signal::Memory, Signal::NodeFs, Signal::ImageFs, Signal::Pids] {
            let one = observed[&signal];
            assert!(
                one.available > 0 && one.capacity >= one.available,
                "{signal:?} {one:?}"
            );
        }
        assert!(!observe(0, Path::new("/"), None).contains_key(&Signal::ImageFs));
        assert_eq!(tasks("0.1 0.2 0.3 2/345 6789\n"), Some(345));
    }
}
