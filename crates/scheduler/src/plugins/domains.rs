//! Counts per domain of a topology key, and what plugins that count pods in domains share.

use crate::node::{NodeId, NodeInfo};
use crate::pod::Shape;
use std::collections::HashMap;
use std::sync::Arc;

pub(crate) const HOSTNAME: &str = "kubernetes.io/hostname";
/// The part of a key for a node that lacks the topology label.
pub(crate) const MISSING: i64 = i64::MIN;

/// The domains of one topology key, numbered, and a count for each.
#[derive(Debug, Clone)]
pub(crate) struct Domains {
    pub(crate) topology_key: Arc<str>,
    /// Mostly one node a domain: nodes are then told apart by the count, not by the domain.
    singular: bool,
    ids: HashMap<String, u32>,
    pub(crate) counts: Vec<i64>,
    /// The nodes of each domain; kept for singular keys only.
    members: Vec<Vec<NodeId>>,
}

impl Domains {
    pub(crate) fn new(topology_key: Arc<str>) -> Self {
        Self {
            singular: &*topology_key == HOSTNAME,
            topology_key,
            ids: HashMap::new(),
            counts: Vec::new(),
            members: Vec::new(),
        }
    }

    /// The number of the node's domain; it gets one if it is new.
    pub(crate) fn number(&mut self, node: &NodeInfo) -> Option<u32> {
        let value = node.label(&self.topology_key)?;
        let id = match self.ids.get(value) {
            Some(id) => *id,
            None => {
                let id = self.counts.len() as u32;
                self.ids.insert(value.to_owned(), id);
                self.counts.push(0);
                self.members.push(Vec::new());
                id
            }
        };
        if self.singular && !self.members[id as usize].contains(&node.id) {
            self.members[id as usize].push(node.id);
        }
        Some(id)
    }

    pub(crate) fn find(&self, node: &NodeInfo) -> Option<u32> {
        self.ids.get(node.label(&self.topology_key)?).copied()
    }

    /// Adds to the count of a domain; nodes whose key changes with it are pushed.
    pub(crate) fn add(&mut self, domain: u32, amount: i64, affected: &mut Vec<NodeId>) {
        if amount == 0 {
            return;
        }
        self.counts[domain as usize] += amount;
        if self.singular {
            affected.extend(&self.members[domain as usize]);
        }
    }

    /// This node's part of a key.
    pub(crate) fn part(&self, node: &NodeInfo) -> i64 {
        match (node.label(&self.topology_key), self.find(node)) {
            (None, _) => MISSING,
            (Some(_), Some(domain)) if self.singular => self.counts[domain as usize],
            (Some(_), Some(domain)) => i64::from(domain),
            // A domain that no node has brought yet counts as empty.
            (Some(_), None) if self.singular => 0,
            (Some(_), None) => -1,
        }
    }

    /// The count that a part of a key stands for.
    pub(crate) fn count(&self, part: i64) -> i64 {
        if self.singular {
            return part;
        }
        usize::try_from(part)
            .ok()
            .and_then(|id| self.counts.get(id))
            .copied()
            .unwrap_or(0)
    }
}

/// Remembers something per shape of the pods that are counted. It holds the shapes, so that their addresses stay theirs.
#[derive(Clone)]
pub(crate) struct ShapeMemo<T>(HashMap<usize, (Arc<Shape>, T)>);

const MAX_REMEMBERED: usize = 8192;

impl<T> Default for ShapeMemo<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T: Clone> ShapeMemo<T> {
    pub(crate) fn get(&mut self, shape: &Arc<Shape>, compute: impl FnOnce(&Shape) -> T) -> T {
        let address = Arc::as_ptr(shape) as usize;
        if let Some((_, known)) = self.0.get(&address) {
            return known.clone();
        }
        if self.0.len() >= MAX_REMEMBERED {
            self.0.clear();
        }
        let computed = compute(shape);
        self.0.insert(address, (Arc::clone(shape), computed.clone()));
        computed
    }
}
