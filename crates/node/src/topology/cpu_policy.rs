//! The static policy for CPUs: exclusive ones for containers of Guaranteed pods that ask for whole CPUs, all others in the
//! shared pool. Pure: `cpu_manager.rs` keeps the state.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::checkpoint::ByContainer;
use super::cpu_set::CpuSet;
use super::cpus::{self, Choice};
use super::hints::{Hint, Mask, ProviderHints, each_mask};
use super::machine::Topology;
use super::options::CpuOptions;
use super::requests::{containers, exclusive_cpus, pod_exclusive_cpus};
use crate::pods;

const CPU: &str = "cpu";

/// Why the machine and the flags do not go together.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    #[error(
        "[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero"
    )]
    NothingReserved,
    #[error(
        "[cpumanager] unable to reserve the required amount of CPUs (size of {found} did not equal {wanted})"
    )]
    Reserve { found: CpuSet, wanted: usize },
    #[error("reserved-cpus: {reserved} is not a subset of online-cpus: {online}")]
    NotOnline { reserved: CpuSet, online: CpuSet },
}

/// Why a state does not fit the machine.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("default cpuset cannot be empty")]
    NoPool,
    #[error("some of strictly reserved cpus: {reserved:?} are present in defaultCpuSet: {pool:?}")]
    StrictlyReserved { reserved: String, pool: String },
    #[error("not all reserved cpus: {reserved:?} are present in defaultCpuSet: {pool:?}")]
    Reserved { reserved: String, pool: String },
    #[error("pod: {uid}, container: {container} cpuset: {cpus:?} overlaps with default cpuset {pool:?}")]
    Overlap {
        uid: String,
        container: String,
        cpus: String,
        pool: String,
    },
    #[error("current set of available CPUs {found:?} doesn't match with CPUs in state {known:?}")]
    OtherCpus { found: String, known: String },
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    #[error("SMT Alignment Error: requested {wanted} cpus not multiple cpus per core = {per_core}")]
    PartOfCore { wanted: usize, per_core: usize },
    #[error(
        "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = {available}, requested CPUs = {wanted}, CPUs per core = {per_core}"
    )]
    TooFewCores {
        available: usize,
        wanted: usize,
        per_core: usize,
    },
    #[error(transparent)]
    Cpus(#[from] cpus::Error),
}

/// Who has which CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Whatever is not exclusive.
    pub pool: CpuSet,
    pub entries: ByContainer<CpuSet>,
}

impl State {
    pub fn of(&self, uid: &str, container: &str) -> Option<&CpuSet> {
        self.entries.get(uid)?.get(container)
    }

    /// All CPUs that are exclusive.
    pub fn exclusive(&self) -> CpuSet {
        let sets = self.entries.values().flat_map(|containers| containers.values());
        sets.fold(CpuSet::default(), |all, cpus| all.union(cpus))
    }

    /// The pod's CPUs go back to the pool. Returns whether it had any.
    pub fn release(&mut self, uid: &str) -> bool {
        let Some(containers) = self.entries.remove(uid) else {
            return false;
        };
        for cpus in containers.values() {
            self.pool = self.pool.union(cpus);
        }
        true
    }
}

pub struct StaticPolicy {
    topology: Arc<Topology>,
    options: CpuOptions,
    reserved: CpuSet,
    /// With the other threads of their cores.
    reserved_cores: CpuSet,
}

impl StaticPolicy {
    /// `reserved` are CPUs by name; without them, as many as the reservation says, from the first core on.
    pub fn new(
        topology: Arc<Topology>,
        options: CpuOptions,
        reserved_milli: i64,
        reserved: &CpuSet,
    ) -> Result<Self, SetUpError> {
        let online = topology.all_cpus();
        if !reserved.is_subset(&online) {
            return Err(SetUpError::NotOnline {
                reserved: reserved.clone(),
                online,
            });
        }
        let wanted = match reserved.len() {
            0 => usize::try_from(reserved_milli.max(0))
                .unwrap_or(usize::MAX)
                .div_ceil(1000),
            listed => listed,
        };
        if wanted == 0 {
            return Err(SetUpError::NothingReserved);
        }
        let mut policy = StaticPolicy {
            topology,
            options,
            reserved: reserved.clone(),
            reserved_cores: CpuSet::default(),
        };
        if reserved.is_empty() {
            policy.reserved = policy.take(&online, wanted).map_err(|_| SetUpError::Reserve {
                found: CpuSet::default(),
                wanted,
            })?;
        }
        let topology = &policy.topology;
        let cores: CpuSet = { policy.reserved.iter() }
            .filter_map(|id| topology.cpus.get(&id))
            .map(|cpu| cpu.core)
            .collect();
        policy.reserved_cores = topology.cpus_where(|cpu| cores.contains(cpu.core));
        Ok(policy)
    }

    /// CPUs that can be exclusive.
    pub fn allocatable(&self) -> CpuSet {
        self.topology.all_cpus().difference(&self.reserved)
    }

    /// CPUs of each NUMA node in this set.
    pub fn by_node(&self, cpus: &CpuSet) -> Vec<(u32, usize)> {
        let on = |node: &u32| self.topology.cpus_where(|cpu| cpu.numa == *node);
        let nodes = self.topology.nodes_with_cpus().into_iter();
        nodes
            .map(|node| (node, on(&node).intersection(cpus).len()))
            .collect()
    }

    pub fn available(&self, state: &State) -> CpuSet {
        state.pool.difference(&self.reserved)
    }

    /// The CPUs that pods run on.
    fn usable(&self) -> CpuSet {
        match self.options.strict_reservation {
            true => self.allocatable(),
            false => self.topology.all_cpus(),
        }
    }

    /// Whether the state is one of this machine and these flags; an empty one becomes one.
    pub fn check(&self, state: &mut State) -> Result<(), StateError> {
        let State { pool, entries } = &*state;
        let all = self.usable();
        if pool.is_empty() {
            if !entries.is_empty() {
                return Err(StateError::NoPool);
            }
            state.pool = all;
            return Ok(());
        }
        let in_pool = self.reserved.intersection(pool);
        if self.options.strict_reservation {
            if !in_pool.is_empty() {
                return Err(StateError::StrictlyReserved {
                    reserved: in_pool.to_string(),
                    pool: pool.to_string(),
                });
            }
        } else if in_pool != self.reserved {
            return Err(StateError::Reserved {
                reserved: self.reserved.to_string(),
                pool: pool.to_string(),
            });
        }
        for (uid, containers) in entries {
            for (container, cpus) in containers {
                if !cpus.intersection(pool).is_empty() {
                    return Err(StateError::Overlap {
                        uid: uid.clone(),
                        container: container.clone(),
                        cpus: cpus.to_string(),
                        pool: pool.to_string(),
                    });
                }
            }
        }
        let known = pool.union(&state.exclusive());
        if known != all {
            return Err(StateError::OtherCpus {
                found: all.to_string(),
                known: known.to_string(),
            });
        }
        Ok(())
    }

    fn take(&self, available: &CpuSet, wanted: usize) -> Result<CpuSet, cpus::Error> {
        let group = match self.options.full_cores {
            true => self.topology.cpus_per_core(),
            false => 1,
        };
        let choice = Choice {
            prefer_uncore: self.options.prefer_uncore,
            distribute_in_groups_of: self.options.distribute.then_some(group),
        };
        cpus::take(&self.topology, available, wanted, choice)
    }

    fn check_cores(&self, free: &CpuSet, wanted: usize) -> Result<(), AllocateError> {
        if !self.options.full_cores {
            return Ok(());
        }
        let per_core = self.topology.cpus_per_core().max(1);
        if !wanted.is_multiple_of(per_core) {
            return Err(AllocateError::PartOfCore { wanted, per_core });
        }
        let available = free.difference(&self.reserved_cores).len();
        if wanted > available {
            return Err(AllocateError::TooFewCores {
                available,
                wanted,
                per_core,
            });
        }
        Ok(())
    }

    /// Gives the container its CPUs, if it is to have some of its own: those of these NUMA nodes first. `reusable` are those
    /// of containers of the pod that end before it starts.
    pub fn allocate(
        &self,
        state: &mut State,
        pod: &Pod,
        (container, ends_early): (&Container, bool),
        nodes: Option<Mask>,
        reusable: &mut CpuSet,
    ) -> Result<(), AllocateError> {
        let wanted = exclusive_cpus(pod, container);
        if wanted == 0 {
            return Ok(());
        }
        let uid = pods::uid(pod);
        let cpus = match state.of(uid, &container.name) {
            Some(has) => has.clone(),
            None => {
                let available = self.available(state).union(reusable);
                self.check_cores(&available, wanted)?;
                let mut cpus = CpuSet::default();
                if let Some(nodes) = nodes {
                    let near = self.topology.cpus_where(|cpu| nodes.contains(cpu.numa));
                    let near = near.intersection(&available);
                    cpus = self.take(&near, wanted.min(near.len()))?;
                }
                let rest = self.take(&available.difference(&cpus), wanted - cpus.len())?;
                let cpus = cpus.union(&rest);
                state.pool = state.pool.difference(&cpus);
                let of_pod = state.entries.entry(uid.to_owned()).or_default();
                of_pod.insert(container.name.clone(), cpus.clone());
                cpus
            }
        };
        *reusable = match ends_early {
            true => reusable.union(&cpus),
            false => reusable.difference(&cpus),
        };
        Ok(())
    }

    /// Where the container's CPUs could come from.
    pub fn container_hints(
        &self,
        state: &State,
        pod: &Pod,
        container: &Container,
        reusable: &CpuSet,
    ) -> ProviderHints {
        let wanted = exclusive_cpus(pod, container);
        if wanted == 0 {
            return ProviderHints::new();
        }
        let hints = match state.of(pods::uid(pod), &container.name) {
            Some(has) if has.len() != wanted => Vec::new(),
            Some(has) => self.hints(has, &CpuSet::default(), wanted),
            None => self.hints(&self.available(state), reusable, wanted),
        };
        [(CPU.to_owned(), Some(hints))].into()
    }

    /// Where the CPUs of all of the pod's containers could come from.
    pub fn pod_hints(&self, state: &State, pod: &Pod) -> ProviderHints {
        let wanted = pod_exclusive_cpus(pod);
        if wanted == 0 {
            return ProviderHints::new();
        }
        let mut assigned = CpuSet::default();
        for (container, _) in containers(pod) {
            let Some(has) = state.of(pods::uid(pod), &container.name) else {
                continue;
            };
            if has.len() != exclusive_cpus(pod, container) {
                return [(CPU.to_owned(), Some(Vec::new()))].into();
            }
            assigned = assigned.union(has);
        }
        let hints = match assigned.len() == wanted {
            true => self.hints(&assigned, &CpuSet::default(), wanted),
            false => self.hints(&self.available(state), &assigned, wanted),
        };
        [(CPU.to_owned(), Some(hints))].into()
    }

    /// All sets of NUMA nodes that have so many CPUs left. Those are preferred that are as small as they could be on an
    /// empty machine.
    fn hints(&self, available: &CpuSet, reusable: &CpuSet, wanted: usize) -> Vec<Hint> {
        let node_of = |id: u32| self.topology.cpus.get(&id).map(|cpu| cpu.numa);
        let nodes = self.topology.nodes_with_cpus();
        let mut smallest = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
        let mut found = Vec::new();
        each_mask(&nodes, |mask| {
            let inside = |id: u32| node_of(id).is_some_and(|node| mask.contains(node));
            let all = self.topology.cpus.keys().filter(|id| inside(**id)).count();
            if all >= wanted {
                smallest = smallest.min(mask.count());
            }
            let free = available.iter().filter(|id| inside(*id)).count();
            if reusable.iter().all(inside) && free + reusable.len() >= wanted {
                found.push(mask);
            }
        });
        let hint = |mask: Mask| Hint::new(mask, mask.count() == smallest);
        found.into_iter().map(hint).collect()
    }
}

#[cfg(test)]
#[path = "cpu_policy_tests.rs"]
mod tests;
