//! As few sockets, NUMA nodes and cores as possible: whole ones first, of those that are left the fullest.

use std::collections::{BTreeMap, BTreeSet};

use super::super::cpu_set::CpuSet;
use super::super::machine::{Cpu, Topology};
use super::Error;

/// What CPUs are grouped by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Numa,
    Socket,
    Uncore,
    Core,
}

impl Level {
    fn of(self, cpu: &Cpu) -> u32 {
        match self {
            Level::Numa => cpu.numa,
            Level::Socket => cpu.socket,
            Level::Uncore => cpu.uncore,
            Level::Core => cpu.core,
        }
    }
}

/// Collects CPUs until it has enough.
pub struct Accumulator<'a> {
    topology: &'a Topology,
    /// Not taken yet.
    free: BTreeMap<u32, Cpu>,
    needed: usize,
    taken: CpuSet,
}

impl<'a> Accumulator<'a> {
    pub fn new(topology: &'a Topology, available: &CpuSet, needed: usize) -> Result<Self, Error> {
        let all = topology.cpus.iter();
        let free: BTreeMap<u32, Cpu> = all
            .filter(|(id, _)| available.contains(**id))
            .map(|(id, cpu)| (*id, *cpu))
            .collect();
        if free.len() < needed {
            return Err(Error::NotEnough {
                wanted: needed,
                available: available.len(),
            });
        }
        Ok(Accumulator {
            topology,
            free,
            needed,
            taken: CpuSet::default(),
        })
    }

    pub fn is_done(&self) -> bool {
        self.needed == 0
    }

    pub fn needed(&self) -> usize {
        self.needed
    }

    pub fn into_taken(self) -> CpuSet {
        self.taken
    }

    pub fn take(&mut self, cpus: &CpuSet) {
        for cpu in cpus.iter() {
            self.free.remove(&cpu);
        }
        self.taken.extend(cpus.iter());
        self.needed = self.needed.saturating_sub(cpus.len());
    }

    fn free_in(&self, level: Level, id: u32) -> CpuSet {
        let inside = self.free.iter().filter(|(_, cpu)| level.of(cpu) == id);
        inside.map(|(id, _)| *id).collect()
    }

    pub fn free_in_node(&self, node: u32) -> CpuSet {
        self.free_in(Level::Numa, node)
    }

    fn all_in(&self, level: Level, id: u32) -> CpuSet {
        self.topology.cpus_where(|cpu| level.of(cpu) == id)
    }

    /// The groups with free CPUs, inside of another one if that is given: those with few free CPUs first, then by id.
    fn sorted(&self, level: Level, within: Option<(Level, u32)>) -> Vec<u32> {
        let inside = |cpu: &&Cpu| within.is_none_or(|(outer, id)| outer.of(cpu) == id);
        let ids: BTreeSet<u32> = { self.free.values() }
            .filter(inside)
            .map(|cpu| level.of(cpu))
            .collect();
        let mut ids: Vec<u32> = ids.into_iter().collect();
        ids.sort_by_cached_key(|id| (self.free_in(level, *id).len(), *id));
        ids
    }

    /// The larger of socket and NUMA node, and the one inside of it.
    fn levels(&self) -> (Level, Level) {
        let sockets = self.topology.count(|cpu| cpu.socket);
        if sockets >= self.topology.count(|cpu| cpu.numa) {
            (Level::Numa, Level::Socket)
        } else {
            (Level::Socket, Level::Numa)
        }
    }

    /// All groups with free CPUs in the order in which they are used up, from the outside in.
    fn order(&self, level: Level) -> Vec<u32> {
        let (outer, inner) = self.levels();
        let within = |level: Level, parent: Level, parents: Vec<u32>| -> Vec<u32> {
            let parents = parents.into_iter();
            parents
                .flat_map(|id| self.sorted(level, Some((parent, id))))
                .collect()
        };
        if level == outer {
            return self.sorted(outer, None);
        }
        match level {
            Level::Core => within(Level::Core, inner, self.order(inner)),
            Level::Uncore => within(Level::Uncore, Level::Numa, self.order(Level::Numa)),
            _ => within(inner, outer, self.order(outer)),
        }
    }

    /// The nodes with free CPUs.
    pub fn nodes(&self) -> Vec<u32> {
        self.order(Level::Numa)
    }

    /// Takes whole groups, as long as one is not more than is needed.
    fn take_full(&mut self, level: Level) {
        let groups = self.order(level).into_iter();
        let whole: Vec<CpuSet> = groups
            .map(|id| (self.free_in(level, id), self.all_in(level, id)))
            .filter(|(free, all)| free == all)
            .map(|(_, all)| all)
            .collect();
        for cpus in whole {
            if self.needed >= cpus.len() {
                self.take(&cpus);
            }
        }
    }

    /// All that is needed from one last-level cache, in whole cores but for the last one.
    fn take_part_of_uncore(&mut self, id: u32) {
        let per_core = self.topology.cpus_per_core().max(1);
        let cores: BTreeSet<u32> = { self.free.values() }
            .filter(|cpu| cpu.uncore == id)
            .map(|cpu| cpu.core)
            .collect();
        let cores: BTreeSet<u32> = cores.into_iter().take(self.needed.div_ceil(per_core)).collect();
        let inside = self.free.iter().filter(|(_, cpu)| cores.contains(&cpu.core));
        let mut cpus: Vec<u32> = inside.map(|(id, _)| *id).collect();
        if !self.needed.is_multiple_of(2) && per_core > 1 && cpus.len() > self.needed {
            cpus.pop();
        }
        if cpus.len() == self.needed {
            self.take(&cpus.into_iter().collect());
        }
    }

    fn take_uncore(&mut self) {
        for id in self.order(Level::Uncore) {
            if self.needed >= self.topology.cpus_per_uncore() {
                self.take_full(Level::Uncore);
            }
            if !self.is_done() {
                self.take_part_of_uncore(id);
            }
            if self.is_done() {
                return;
            }
        }
    }

    /// Single threads.
    fn take_rest(&mut self) {
        let cores = self.order(Level::Core).into_iter();
        let cpus: Vec<u32> = cores
            .flat_map(|id| self.free_in(Level::Core, id).iter().collect::<Vec<_>>())
            .take(self.needed)
            .collect();
        self.take(&cpus.into_iter().collect());
    }
}

pub fn take(
    topology: &Topology,
    available: &CpuSet,
    wanted: usize,
    prefer_uncore: bool,
) -> Result<CpuSet, Error> {
    let mut all = Accumulator::new(topology, available, wanted)?;
    let (outer, inner) = all.levels();
    all.take_full(outer);
    all.take_full(inner);
    if prefer_uncore && !all.is_done() {
        all.take_uncore();
    }
    all.take_full(Level::Core);
    if !all.is_done() {
        all.take_rest();
    }
    match all.is_done() {
        true => Ok(all.into_taken()),
        false => Err(Error::Failed),
    }
}
