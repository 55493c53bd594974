//! The static policy for memory: containers of Guaranteed pods get their memory and huge pages from one NUMA node, or from a
//! group of nodes that then serves nobody but such containers. Pure: `memory_manager.rs` keeps the state.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::checkpoint::{Block, ByContainer, MachineMemory, MemoryTable, NodeMemory};
use super::hints::{Hint, Mask, ProviderHints, each_mask};
use super::machine::Topology;
use super::options::Reserved;
use super::requests::{containers, is_pinned, memory, pod_memory};
use crate::machine::huge_page_name;
use crate::pods;

const MEMORY: &str = "memory";

#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    #[error("[memorymanager] you should specify the system reserved memory")]
    NothingReserved,
    #[error(
        "the reserved memory configuration references a NUMA node {0} that does not exist on this machine"
    )]
    UnknownNode(u32),
    #[error(
        "the total amount {reserved:?} of type {resource:?} is not equal to the value {allocatable:?} determined by Node Allocatable feature"
    )]
    Total {
        resource: String,
        reserved: String,
        allocatable: String,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("[memorymanager] machine state can not be empty when it has memory assignments")]
    Empty,
    #[error(
        "[memorymanager] (pod: {0}, container: {1}) the memory assignment uses the NUMA that does not exist"
    )]
    UnknownNode(String, String),
    #[error(
        "[memorymanager] (pod: {0}, container: {1}) the memory assignment uses memory resource that does not exist"
    )]
    UnknownResource(String, String),
    #[error("[memorymanager] the expected machine state is different from the real one")]
    Differs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    #[error(
        "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available"
    )]
    NotEnough,
    #[error("[memorymanager] failed to find the default preferred hint")]
    NotPreferred,
    #[error("[memorymanager] failed to find NUMA nodes to extend the current topology hint")]
    NotExtended,
    #[error("[memorymanager] failed to find the extended preferred hint")]
    ExtendedNotPreferred,
    #[error("[memorymanager] preferred hint violates NUMA node allocation")]
    Mixed,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub machine: MachineMemory,
    pub entries: ByContainer<Vec<Block>>,
}

impl State {
    pub fn of(&self, uid: &str, container: &str) -> Option<&Vec<Block>> {
        self.entries.get(uid)?.get(container)
    }

    /// Whether a container after this one has its memory: this one had some, too, and has ended.
    fn has_later(&self, pod: &Pod, container: &Container) -> bool {
        let later = containers(pod).skip_while(|(other, _)| other.name != container.name);
        later
            .skip(1)
            .any(|(later, _)| self.of(pods::uid(pod), &later.name).is_some())
    }

    /// The container's memory is free. Returns whether it had any.
    pub fn release(&mut self, uid: &str, container: &str) -> bool {
        let Some(of_pod) = self.entries.get_mut(uid) else {
            return false;
        };
        let blocks = of_pod.remove(container);
        if of_pod.is_empty() {
            self.entries.remove(uid);
        }
        for block in blocks.iter().flatten() {
            free_block(&mut self.machine, block);
        }
        blocks.is_some()
    }
}

/// What containers of the pod had that end before the next one starts: by nodes and resource.
#[derive(Clone, Debug, Default)]
pub struct Reusable(BTreeMap<(Vec<u32>, String), u64>);

impl Reusable {
    fn of(&self, nodes: &[u32], resource: &str) -> u64 {
        let key = (nodes.to_vec(), resource.to_owned());
        self.0.get(&key).copied().unwrap_or(0)
    }

    fn update(&mut self, blocks: &[Block], ends_early: bool) {
        for block in blocks {
            let key = (block.numa_affinity.clone(), block.resource.clone());
            let amount = self.0.entry(key).or_default();
            *amount = match ends_early {
                true => (*amount).max(block.size),
                false => amount.saturating_sub(block.size),
            };
        }
    }
}

/// Takes `size` from these nodes, from the first one that has some left on.
fn use_block(machine: &mut MachineMemory, nodes: &[u32], resource: &str, size: u64) {
    let mut left = size;
    for id in nodes {
        let Some(node) = machine.get_mut(id) else { continue };
        node.number_of_assignments += 1;
        node.cells = nodes.to_vec();
        if let Some(table) = node.memory_map.get_mut(resource) {
            let part = left.min(table.free);
            table.reserved += part;
            table.free -= part;
            left -= part;
        }
    }
}

fn free_block(machine: &mut MachineMemory, block: &Block) {
    let mut left = block.size;
    for id in &block.numa_affinity {
        let Some(node) = machine.get_mut(id) else { continue };
        node.number_of_assignments -= 1;
        if node.number_of_assignments == 0 {
            node.cells = vec![*id];
        }
        if let Some(table) = node.memory_map.get_mut(&block.resource) {
            let part = left.min(table.reserved);
            table.free += part;
            table.reserved -= part;
            left -= part;
        }
    }
}

fn free_on(machine: &MachineMemory, nodes: &[u32], resource: &str) -> u64 {
    let tables = nodes
        .iter()
        .filter_map(|id| machine.get(id)?.memory_map.get(resource));
    tables.map(|table| table.free).sum()
}

pub struct StaticPolicy {
    topology: Arc<Topology>,
    /// By NUMA node.
    reserved: BTreeMap<u32, Reserved>,
}

impl StaticPolicy {
    /// `reserved` says on which nodes the memory is that is kept back; `kept` is how much that is.
    pub fn new(
        topology: Arc<Topology>,
        reserved: &BTreeMap<u32, Reserved>,
        kept: u64,
    ) -> Result<Self, SetUpError> {
        let mut totals: BTreeMap<&str, u64> = [(MEMORY, 0)].into();
        for (node, limits) in reserved {
            if !topology.nodes.contains_key(node) {
                return Err(SetUpError::UnknownNode(*node));
            }
            for (resource, bytes) in limits {
                *totals.entry(resource).or_default() += bytes;
            }
        }
        for (resource, total) in &totals {
            // Of huge pages nothing is kept back.
            let wanted = if *resource == MEMORY { kept } else { 0 };
            if *total != wanted {
                return Err(SetUpError::Total {
                    resource: (*resource).to_owned(),
                    reserved: amount(*total),
                    allocatable: amount(wanted),
                });
            }
        }
        if totals[MEMORY] == 0 {
            return Err(SetUpError::NothingReserved);
        }
        Ok(StaticPolicy {
            topology,
            reserved: reserved.clone(),
        })
    }

    /// Nothing is assigned.
    pub fn empty_machine(&self) -> MachineMemory {
        let table = |node: u32, resource: &str, total: u64, less: u64| {
            let of_node = self.reserved.get(&node);
            let kept = of_node
                .and_then(|of_node| of_node.get(resource))
                .copied()
                .unwrap_or(0);
            let allocatable = total.saturating_sub(kept).saturating_sub(less);
            let table = MemoryTable {
                total,
                system_reserved: kept,
                allocatable,
                reserved: 0,
                free: allocatable,
            };
            (resource.to_owned(), table)
        };
        let nodes = self.topology.nodes.iter();
        nodes
            .map(|(id, node)| {
                let huge: u64 = node.huge_pages.values().sum();
                let pages = node.huge_pages.iter();
                let pages = pages.map(|(kib, bytes)| {
                    table(*id, &format!("hugepages-{}", huge_page_name(*kib)), *bytes, 0)
                });
                let memory = table(*id, MEMORY, node.memory, huge);
                let state = NodeMemory {
                    number_of_assignments: 0,
                    memory_map: pages.chain([memory]).collect(),
                    cells: vec![*id],
                };
                (*id, state)
            })
            .collect()
    }

    /// Whether the state is one of this machine and these flags; an empty one becomes one.
    pub fn check(&self, state: &mut State) -> Result<(), StateError> {
        let mut expected = self.empty_machine();
        if state.machine.is_empty() {
            if !state.entries.is_empty() {
                return Err(StateError::Empty);
            }
            state.machine = expected;
            return Ok(());
        }
        for (uid, of_pod) in &state.entries {
            for (container, block) in of_pod
                .iter()
                .flat_map(|(c, blocks)| blocks.iter().map(move |b| (c, b)))
            {
                for id in &block.numa_affinity {
                    let known = expected.get(id);
                    let known =
                        known.ok_or_else(|| StateError::UnknownNode(uid.clone(), container.clone()))?;
                    if !known.memory_map.contains_key(&block.resource) {
                        return Err(StateError::UnknownResource(uid.clone(), container.clone()));
                    }
                }
                use_block(&mut expected, &block.numa_affinity, &block.resource, block.size);
            }
        }
        match is_same_machine(&state.machine, &expected) {
            true => Ok(()),
            false => Err(StateError::Differs),
        }
    }

    pub fn allocatable(&self, state: &State) -> Vec<Block> {
        let nodes = state.machine.iter().flat_map(|(id, node)| {
            let tables = node.memory_map.iter().filter(|(_, table)| table.allocatable > 0);
            tables.map(|(resource, table)| Block {
                numa_affinity: vec![*id],
                resource: resource.clone(),
                size: table.allocatable,
            })
        });
        nodes.collect()
    }

    /// Gives the container its memory, from these nodes if the hint names some.
    pub fn allocate(
        &self,
        state: &mut State,
        pod: &Pod,
        (container, ends_early): (&Container, bool),
        hint: Hint,
        reusable: &mut Reusable,
    ) -> Result<(), AllocateError> {
        if !is_pinned(pod) {
            return Ok(());
        }
        let uid = pods::uid(pod);
        if let Some(blocks) = state.of(uid, &container.name) {
            reusable.update(blocks, ends_early);
            return Ok(());
        }
        if ends_early && state.has_later(pod, container) {
            return Ok(());
        }
        let wanted = memory(container);
        let nodes = self.choose(&state.machine, &wanted, hint, reusable)?.nodes();
        let mut blocks = Vec::new();
        for (resource, size) in &wanted {
            let reused = reusable.of(&nodes, resource);
            use_block(&mut state.machine, &nodes, resource, size.saturating_sub(reused));
            blocks.push(Block {
                numa_affinity: nodes.clone(),
                resource: resource.clone(),
                size: *size,
            });
        }
        reusable.update(&blocks, ends_early);
        let of_pod = state.entries.entry(uid.to_owned()).or_default();
        lend(of_pod, pod, &container.name, &blocks);
        of_pod.insert(container.name.clone(), blocks);
        Ok(())
    }

    fn choose(
        &self,
        machine: &MachineMemory,
        wanted: &BTreeMap<String, u64>,
        hint: Hint,
        reusable: &Reusable,
    ) -> Result<Mask, AllocateError> {
        let candidates = || best(self.hints(machine, wanted, reusable).remove(MEMORY).flatten());
        let mut chosen = match hint.nodes {
            Some(nodes) => (nodes, hint.preferred),
            None => {
                let best = candidates().ok_or(AllocateError::NotEnough)?;
                if hint.preferred && !best.1 {
                    return Err(AllocateError::NotPreferred);
                }
                best
            }
        };
        let has_enough = |nodes: Mask| {
            let nodes = nodes.nodes();
            let mut all = wanted.iter();
            all.all(|(resource, size)| {
                free_on(machine, &nodes, resource) + reusable.of(&nodes, resource) >= *size
            })
        };
        // A node of a group serves no container alone: the group does.
        let is_grouped = chosen.0.count() == 1 && mixes(machine, &chosen.0.nodes());
        if is_grouped || !has_enough(chosen.0) {
            let wider = self.hints(machine, wanted, reusable).remove(MEMORY).flatten();
            let wider = wider.map(|hints| {
                let around = hints
                    .into_iter()
                    .filter(|hint| hint.nodes.is_some_and(|nodes| nodes.is_superset(chosen.0)));
                around.collect()
            });
            let extended = best(wider).ok_or(AllocateError::NotExtended)?;
            if chosen.1 && !extended.1 {
                return Err(AllocateError::ExtendedNotPreferred);
            }
            chosen = extended;
        }
        match mixes(machine, &chosen.0.nodes()) {
            true => Err(AllocateError::Mixed),
            false => Ok(chosen.0),
        }
    }

    pub fn container_hints(
        &self,
        state: &State,
        pod: &Pod,
        container: &Container,
        reusable: &Reusable,
    ) -> ProviderHints {
        if !is_pinned(pod) {
            return ProviderHints::new();
        }
        let wanted = memory(container);
        match state.of(pods::uid(pod), &container.name) {
            Some(blocks) => again(blocks, &wanted),
            None if state.has_later(pod, container) => ProviderHints::new(),
            None => self.hints(&state.machine, &wanted, reusable),
        }
    }

    pub fn pod_hints(&self, state: &State, pod: &Pod) -> ProviderHints {
        if !is_pinned(pod) {
            return ProviderHints::new();
        }
        let wanted = pod_memory(pod);
        let mut known = containers(pod).filter_map(|(c, _)| state.of(pods::uid(pod), &c.name));
        match known.next() {
            Some(blocks) => again(blocks, &wanted),
            None => self.hints(&state.machine, &wanted, &Reusable::default()),
        }
    }

    /// All sets of NUMA nodes that have so much left. COMPAT: where there is none, that is no wish at all, and the
    /// allocation fails.
    fn hints(
        &self,
        machine: &MachineMemory,
        wanted: &BTreeMap<String, u64>,
        reusable: &Reusable,
    ) -> ProviderHints {
        let ids: Vec<u32> = machine.keys().copied().collect();
        let mut smallest = u32::try_from(ids.len()).unwrap_or(u32::MAX);
        let mut found = Vec::new();
        each_mask(&ids, |mask| {
            let nodes = mask.nodes();
            let allocatable = |resource: &String| -> u64 {
                let tables = nodes
                    .iter()
                    .filter_map(|id| machine.get(id)?.memory_map.get(resource));
                tables.map(|table| table.allocatable).sum()
            };
            if wanted
                .iter()
                .any(|(resource, size)| allocatable(resource) < *size)
            {
                return;
            }
            smallest = smallest.min(mask.count());
            let enough = wanted.iter().all(|(resource, size)| {
                free_on(machine, &nodes, resource) + reusable.of(&nodes, resource) >= *size
            });
            if enough && !mixes(machine, &nodes) {
                found.push(mask);
            }
        });
        if found.is_empty() {
            return ProviderHints::new();
        }
        let hint = |mask: &Mask| Hint::new(*mask, mask.count() == smallest);
        let hints: Vec<Hint> = found.iter().map(hint).collect();
        wanted
            .keys()
            .map(|resource| (resource.clone(), Some(hints.clone())))
            .collect()
    }
}

/// Whether nodes would serve both containers that are on one node and some that are on several, or different groups.
fn mixes(machine: &MachineMemory, nodes: &[u32]) -> bool {
    let known = nodes.iter().filter_map(|id| machine.get(id));
    let alone = nodes.len() == 1;
    known.into_iter().any(|node| match alone {
        true => node.cells.len() > 1,
        false => node.number_of_assignments > 0 && node.cells != nodes,
    })
}

/// The container has its memory: the hints that lead there again.
fn again(blocks: &[Block], wanted: &BTreeMap<String, u64>) -> ProviderHints {
    let same = blocks.len() == wanted.len()
        && blocks
            .iter()
            .all(|block| wanted.get(&block.resource) == Some(&block.size));
    if !same {
        return ProviderHints::new();
    }
    let hint = |block: &Block| Hint::new(block.numa_affinity.iter().copied().collect(), true);
    blocks
        .iter()
        .map(|block| (block.resource.clone(), Some(vec![hint(block)])))
        .collect()
}

fn best(hints: Option<Vec<Hint>>) -> Option<(Mask, bool)> {
    let hints = hints.into_iter().flatten();
    let mut all = hints.filter_map(|hint| Some((hint.nodes?, hint.preferred)));
    let first = all.next()?;
    Some(all.fold(first, |best, hint| {
        let better = match (best.1, hint.1) {
            (false, true) => true,
            (true, false) => false,
            _ => hint.0.is_narrower_than(best.0),
        };
        if better { hint } else { best }
    }))
}

/// Init containers that have ended by then lend their memory: what is lent is not theirs any more, or it would be given back
/// twice.
fn lend(of_pod: &mut BTreeMap<String, Vec<Block>>, pod: &Pod, borrower: &str, blocks: &[Block]) {
    for block in blocks {
        let mut left = block.size;
        let earlier = containers(pod).take_while(|(container, _)| container.name != borrower);
        for (lender, _) in earlier.filter(|(_, ends_early)| *ends_early) {
            let lent = of_pod.get_mut(&lender.name).into_iter().flatten();
            for lent in lent
                .filter(|lent| lent.resource == block.resource && lent.numa_affinity == block.numa_affinity)
            {
                let part = left.min(lent.size);
                lent.size -= part;
                left -= part;
            }
        }
    }
}

/// COMPAT: of nodes that are used together, only the sum is compared: how a block is spread over them depends on the order
/// in which containers came.
fn is_same_machine(found: &MachineMemory, expected: &MachineMemory) -> bool {
    let sum = |machine: &MachineMemory, cells: &[u32], resource: &str| {
        let tables = cells
            .iter()
            .filter_map(|id| machine.get(id)?.memory_map.get(resource));
        tables.fold((0, 0), |(free, reserved), table| {
            (free + table.free, reserved + table.reserved)
        })
    };
    found.keys().eq(expected.keys())
        && found
            .iter()
            .zip(expected.values())
            .all(|((_, found_node), node)| {
                let tables = found_node.memory_map.iter();
                found_node.number_of_assignments == node.number_of_assignments
                    && found_node.cells == node.cells
                    && found_node.memory_map.keys().eq(node.memory_map.keys())
                    && tables.zip(node.memory_map.values()).all(|((resource, a), b)| {
                        (a.total, a.system_reserved, a.allocatable)
                            == (b.total, b.system_reserved, b.allocatable)
                            && sum(found, &node.cells, resource) == sum(expected, &node.cells, resource)
                    })
            })
}

fn amount(bytes: u64) -> String {
    skiff_meta::quantity::Quantity::from_bytes(i64::try_from(bytes).unwrap_or(i64::MAX)).to_string()
}

#[cfg(test)]
#[path = "memory_policy_tests.rs"]
mod tests;
