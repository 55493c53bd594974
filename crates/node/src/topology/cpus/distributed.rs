//! Evenly over NUMA nodes where one node is not enough (KEP-2902): the smallest number of nodes that can give the same
//! each, and among those the choice that leaves the machine most balanced.

use std::collections::BTreeMap;

use super::super::cpu_set::CpuSet;
use super::super::machine::Topology;
use super::{Accumulator, Error, packed};

/// Calls `each` with every choice of `size` ids, in order, until it returns false.
fn combinations(ids: &[u32], size: usize, each: &mut dyn FnMut(&[u32]) -> bool) {
    fn go(ids: &[u32], size: usize, chosen: &mut Vec<u32>, each: &mut dyn FnMut(&[u32]) -> bool) -> bool {
        if size == 0 {
            return each(chosen);
        }
        for (place, id) in ids.iter().enumerate() {
            if ids.len() - place < size {
                break;
            }
            chosen.push(*id);
            let goes_on = go(&ids[place + 1..], size - 1, chosen, each);
            chosen.pop();
            if !goes_on {
                return false;
            }
        }
        true
    }
    if size > 0 {
        go(ids, size, &mut Vec::new(), each);
    }
}

/// How uneven the numbers are, to three places: the standard deviation, or no balance at all for none.
fn deviation(numbers: &BTreeMap<u32, usize>) -> f64 {
    let rounded = |number: f64| (number * 1000.0).round() / 1000.0;
    let count = numbers.len() as f64;
    let mean = rounded(numbers.values().map(|n| *n as f64).sum::<f64>() / count);
    let squares: f64 = numbers.values().map(|n| (*n as f64 - mean).powi(2)).sum();
    rounded((squares / count).sqrt())
}

/// Nodes that give the same each, those that give one group more, and how balanced the machine is then.
struct Plan {
    nodes: Vec<u32>,
    extra: Vec<u32>,
    balance: f64,
}

/// What each of these nodes gives at least.
fn share(wanted: usize, nodes: usize, group: usize) -> usize {
    wanted / nodes / group * group
}

/// `None` if these nodes cannot give the same each.
fn plan(free: &BTreeMap<u32, usize>, nodes: &[u32], wanted: usize, group: usize) -> Option<Plan> {
    let on = |node: &u32| free.get(node).copied().unwrap_or(0);
    let groups: usize = nodes.iter().map(|node| on(node) / group).sum();
    let share = share(wanted, nodes.len(), group);
    if groups * group < wanted || nodes.iter().any(|node| on(node) < share) {
        return None;
    }
    let mut left = free.clone();
    for node in nodes {
        if let Some(left) = left.get_mut(node) {
            *left -= share;
        }
    }
    let rest = wanted - share * nodes.len();
    if rest == 0 {
        return Some(Plan {
            nodes: nodes.to_vec(),
            extra: Vec::new(),
            balance: deviation(&left),
        });
    }
    let have_more: Vec<u32> = { nodes.iter() }
        .filter(|node| left.get(node).is_some_and(|left| *left >= group))
        .copied()
        .collect();
    let mut best: Option<Plan> = None;
    for size in (1..=have_more.len()).rev() {
        combinations(&have_more, size, &mut |extra| {
            let mut left = left.clone();
            let groups: usize = extra.iter().map(|node| left[node] / group).sum();
            if groups * group < rest {
                return true;
            }
            let mut rest = rest;
            while rest > 0 {
                for node in extra {
                    let Some(left) = left.get_mut(node).filter(|left| rest > 0 && **left >= group) else {
                        continue;
                    };
                    *left -= group;
                    rest -= group;
                }
            }
            let balance = deviation(&left);
            if best.as_ref().is_none_or(|best| balance < best.balance) {
                best = Some(Plan {
                    nodes: nodes.to_vec(),
                    extra: extra.to_vec(),
                    balance,
                });
            }
            true
        });
    }
    best
}

pub fn take(topology: &Topology, available: &CpuSet, wanted: usize, group: usize) -> Result<CpuSet, Error> {
    if !wanted.is_multiple_of(group) {
        return packed::take(topology, available, wanted, false);
    }
    let mut all = Accumulator::new(topology, available, wanted)?;
    if all.is_done() {
        return Ok(all.into_taken());
    }
    let nodes = all.nodes();
    let free: BTreeMap<u32, usize> = nodes
        .iter()
        .map(|id| (*id, all.free_in_node(*id).len()))
        .collect();
    let groups_per_node = topology
        .cpus
        .len()
        .div_ceil(group)
        .div_ceil(topology.nodes_with_cpus().len().max(1));
    let groups = wanted / group;
    let least = groups.div_ceil(groups_per_node.max(1));
    let most = groups.min(nodes.len());
    for size in least..=most {
        let mut best: Option<Plan> = None;
        combinations(&nodes, size, &mut |nodes| {
            if let Some(plan) = plan(&free, nodes, wanted, group)
                && best.as_ref().is_none_or(|best| plan.balance < best.balance)
            {
                best = Some(plan);
            }
            best.as_ref().is_none_or(|best| best.balance > 0.0)
        });
        let Some(best) = best else { continue };
        let share = share(wanted, best.nodes.len(), group);
        for node in &best.nodes {
            let cpus = packed::take(topology, &all.free_in_node(*node), share, false)?;
            all.take(&cpus);
        }
        while !all.is_done() {
            let before = all.needed();
            for node in &best.extra {
                let free = all.free_in_node(*node);
                if !all.is_done() && free.len() >= group {
                    all.take(&packed::take(topology, &free, group, false)?);
                }
            }
            if all.needed() == before {
                return Err(Error::Failed);
            }
        }
        return Ok(all.into_taken());
    }
    packed::take(topology, available, wanted, false)
}
