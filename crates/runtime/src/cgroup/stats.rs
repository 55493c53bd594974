//! What a group used, read from its files.

use super::{Cgroup, Hierarchy, hierarchy};
use std::collections::HashMap;
use std::path::Path;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuStats {
    pub usage_nanos: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryStats {
    pub usage: u64,
    /// Usage without the file cache the kernel can drop at once.
    pub working_set: u64,
    /// Limit minus working set; 0 without a limit.
    pub available: u64,
    pub rss: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    pub swap: u64,
}

impl Cgroup {
    pub fn cpu(&self) -> Option<CpuStats> {
        let usage_nanos = match hierarchy() {
            Hierarchy::V1(_) => number(&self.controller("cpuacct")?.join("cpuacct.usage"))?,
            Hierarchy::V2(_) => table(&self.controller("cpu")?.join("cpu.stat"))
                .get("usage_usec")
                .copied()?
                .saturating_mul(1000),
        };
        Some(CpuStats { usage_nanos })
    }

    pub fn memory(&self) -> Option<MemoryStats> {
        let directory = self.controller("memory")?;
        let stat = table(&directory.join("memory.stat"));
        let field = |name: &str| stat.get(name).copied().unwrap_or(0);
        let (usage, limit, inactive, rss, faults, major, swap) = match hierarchy() {
            Hierarchy::V1(_) => (
                number(&directory.join("memory.usage_in_bytes"))?,
                number(&directory.join("memory.limit_in_bytes")),
                field("total_inactive_file"),
                field("total_rss"),
                field("total_pgfault"),
                field("total_pgmajfault"),
                field("total_swap"),
            ),
            Hierarchy::V2(_) => (
                number(&directory.join("memory.current"))?,
                number(&directory.join("memory.max")),
                field("inactive_file"),
                field("anon"),
                field("pgfault"),
                field("pgmajfault"),
                number(&directory.join("memory.swap.current")).unwrap_or(0),
            ),
        };
        let working_set = usage.saturating_sub(inactive);
        // v1 says "no limit" with a number near the largest.
        let limit = limit.filter(|limit| *limit < 1 << 62);
        Some(MemoryStats {
            usage,
            working_set,
            available: limit.map_or(0, |limit| limit.saturating_sub(working_set)),
            rss,
            page_faults: faults,
            major_page_faults: major,
            swap,
        })
    }

    pub fn process_count(&self) -> u64 {
        self.processes().len() as u64
    }
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn table(path: &Path) -> HashMap<String, u64> {
    std::fs::read_to_string(path)
        .unwrap_or_default()
        .lines()
        .filter_map(|line| {
            let (key, value) = line.split_once(' ')?;
            Some((key.to_owned(), value.trim().parse().ok()?))
        })
        .collect()
}
