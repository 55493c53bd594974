//! Pod affinity and anti-affinity, of the pod towards those that are placed and of these towards it.

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, MAX_SCORE, Plugin, PreFilter, Rejection, Scope, Topology, Verdict};
use crate::listers::Listers;
use crate::node::{NodeId, NodeInfo, NodeMeta};
use crate::plugins::domains::{Domains, MISSING, ShapeMemo};
use crate::plugins::pod_topology_spread::{borrowed, keys_of};
use crate::pod::{AffinityTerm, Parts, PodInfo, Shape};
use std::collections::BTreeMap;
use std::sync::Arc;

const NAME: &str = "InterPodAffinity";

pub(crate) struct InterPodAffinity {
    pub(crate) listers: Arc<Listers>,
    /// What a required affinity of a placed pod towards the pod counts as when scoring.
    pub(crate) hard_weight: i64,
    pub(crate) ignores_existing_preferred: bool,
}

/// What a table counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Pods that match all of the pod's required affinity terms.
    Affinity,
    /// Pods that match a required anti-affinity term of the pod.
    Anti,
    /// Pods that have a required anti-affinity term that matches the pod.
    ExistingAnti,
    /// Weights of preferred terms, of either side.
    Score,
}

/// One kind over the domains of one topology key.
#[derive(Clone)]
struct Table {
    kind: Kind,
    domains: Domains,
}

/// What pods of one shape add: to which table, how much.
type Additions = Arc<[(u16, i64)]>;

/// All that is counted for pods of one shape.
#[derive(Clone)]
pub(crate) struct Counts {
    shape: Arc<Shape>,
    listers: Arc<Listers>,
    hard_weight: i64,
    reads_all_pods: bool,
    reads_preferred: bool,
    tables: Vec<Table>,
    /// Placed pods that match all required affinity terms and whose node has a label for some of them.
    affinity_total: i64,
    matches_itself: bool,
    /// By node: table, domain, amount.
    nodes: Vec<Vec<(u16, u32, i64)>>,
    additions: ShapeMemo<Additions>,
    /// How many tables there were when keys began to be kept.
    width_sealed: Option<usize>,
}

impl Counts {
    fn new(plugin: &InterPodAffinity, shape: &Arc<Shape>) -> Self {
        let own = &shape.affinity;
        let has_preferred = !own.preferred.is_empty() || !own.preferred_anti.is_empty();
        let mut counts = Self {
            shape: Arc::clone(shape),
            listers: Arc::clone(&plugin.listers),
            hard_weight: plugin.hard_weight,
            reads_all_pods: !own.is_empty(),
            reads_preferred: has_preferred || !plugin.ignores_existing_preferred,
            tables: Vec::new(),
            affinity_total: 0,
            matches_itself: false,
            nodes: Vec::new(),
            additions: ShapeMemo::default(),
            width_sealed: None,
        };
        counts.matches_itself = counts.matches_all_required(shape);
        for term in &own.required {
            counts.table(Kind::Affinity, &term.topology_key);
        }
        for term in &own.required_anti {
            counts.table(Kind::Anti, &term.topology_key);
        }
        counts
    }

    fn over(mut self, cache: &Cache) -> Self {
        let mut affected = Vec::new();
        if self.reads_all_pods {
            for node in cache.nodes() {
                self.update(node.id, Some(node), &mut affected);
                affected.clear();
            }
        } else {
            for node in cache.affinity_nodes.iter().filter_map(|id| cache.get(*id)) {
                self.update(node.id, Some(node), &mut affected);
                affected.clear();
            }
        }
        self
    }

    fn table(&mut self, kind: Kind, topology_key: &Arc<str>) -> u16 {
        let known = |table: &Table| table.kind == kind && table.domains.topology_key == *topology_key;
        let place = self.tables.iter().position(known).unwrap_or_else(|| {
            self.tables.push(Table {
                kind,
                domains: Domains::new(Arc::clone(topology_key)),
            });
            self.tables.len() - 1
        });
        place as u16
    }

    fn term_matches(&self, term: &AffinityTerm, other: &Parts) -> bool {
        let labels = self.listers.namespace_labels(&other.namespace);
        term.matches(&other.namespace, &labels, &other.labels)
    }

    fn matches_all_required(&self, other: &Parts) -> bool {
        let required = &self.shape.affinity.required;
        !required.is_empty() && required.iter().all(|term| self.term_matches(term, other))
    }

    /// What a placed pod adds, by topology key.
    fn additions_of(&self, other: &Parts) -> Vec<(Kind, Arc<str>, i64)> {
        let own = &self.shape.affinity;
        let mut found = Vec::new();
        let mut add =
            |kind, term: &AffinityTerm, amount| found.push((kind, Arc::clone(&term.topology_key), amount));
        if self.matches_all_required(other) {
            for term in &own.required {
                add(Kind::Affinity, term, 1);
            }
        }
        for term in own
            .required_anti
            .iter()
            .filter(|term| self.term_matches(term, other))
        {
            add(Kind::Anti, term, 1);
        }
        for one in own
            .preferred
            .iter()
            .filter(|one| self.term_matches(&one.term, other))
        {
            add(Kind::Score, &one.term, one.weight);
        }
        for one in own
            .preferred_anti
            .iter()
            .filter(|one| self.term_matches(&one.term, other))
        {
            add(Kind::Score, &one.term, -one.weight);
        }
        let theirs = &other.affinity;
        for term in theirs
            .required_anti
            .iter()
            .filter(|term| self.term_matches(term, &self.shape))
        {
            add(Kind::ExistingAnti, term, 1);
        }
        if !self.reads_preferred {
            return found;
        }
        for term in theirs
            .required
            .iter()
            .filter(|term| self.term_matches(term, &self.shape))
        {
            if self.hard_weight > 0 {
                add(Kind::Score, term, self.hard_weight);
            }
        }
        for one in theirs
            .preferred
            .iter()
            .filter(|one| self.term_matches(&one.term, &self.shape))
        {
            add(Kind::Score, &one.term, one.weight);
        }
        for one in theirs
            .preferred_anti
            .iter()
            .filter(|one| self.term_matches(&one.term, &self.shape))
        {
            add(Kind::Score, &one.term, -one.weight);
        }
        found
    }

    fn additions(&mut self, shape: &Arc<Shape>) -> Additions {
        let mut additions = std::mem::take(&mut self.additions);
        let found = additions.get(shape, |shape| {
            let found = self.additions_of(shape);
            let tabled = found
                .into_iter()
                .map(|(kind, key, amount)| (self.table(kind, &key), amount));
            tabled.collect()
        });
        self.additions = additions;
        found
    }

    fn change(&mut self, table: u16, domain: u32, amount: i64, affected: &mut Vec<NodeId>) {
        let table = &mut self.tables[table as usize];
        if table.kind == Kind::Affinity {
            self.affinity_total += amount;
        }
        table.domains.add(domain, amount, affected);
    }

    fn count(&self, kind: Kind, topology_key: &str, key: &[i64]) -> Option<(usize, i64)> {
        let mut tables = self.tables.iter().enumerate();
        let (place, _) =
            tables.find(|(_, table)| table.kind == kind && *table.domains.topology_key == *topology_key)?;
        Some((place, key[place]))
    }

    /// `changed` tells by how much a table's count at this node differs from what is kept.
    fn filter_by(&self, key: &[i64], changed: impl Fn(usize) -> i64, affinity_total: i64) -> Verdict {
        let own = &self.shape.affinity;
        let amount = |place: usize| self.tables[place].domains.count(key[place]) + changed(place);
        let mut satisfied = true;
        for term in &own.required {
            match self.count(Kind::Affinity, &term.topology_key, key) {
                Some((place, part)) if part != MISSING => satisfied &= amount(place) > 0,
                _ => return Err(Rejection::unresolvable("node(s) didn't match pod affinity rules")),
            }
        }
        // The first of a group of pods that want to be together may go anywhere.
        let is_first = affinity_total == 0 && self.matches_itself;
        if !satisfied && !is_first {
            return Err(Rejection::unresolvable("node(s) didn't match pod affinity rules"));
        }
        let forbidden = |kind: Kind| {
            let tables = self
                .tables
                .iter()
                .enumerate()
                .filter(|(_, table)| table.kind == kind);
            tables
                .into_iter()
                .any(|(place, _)| key[place] != MISSING && amount(place) > 0)
        };
        if forbidden(Kind::Anti) {
            return Err(Rejection::unschedulable(
                "node(s) didn't match pod anti-affinity rules",
            ));
        }
        if forbidden(Kind::ExistingAnti) {
            return Err(Rejection::unschedulable(
                "node(s) didn't satisfy existing pods anti-affinity rules",
            ));
        }
        Ok(())
    }

    fn scores(&self) -> bool {
        self.tables.iter().any(|table| table.kind == Kind::Score)
    }

    fn has_filters(&self) -> bool {
        let own = &self.shape.affinity;
        let existing = self
            .tables
            .iter()
            .filter(|table| table.kind == Kind::ExistingAnti);
        !own.required.is_empty()
            || !own.required_anti.is_empty()
            || existing
                .into_iter()
                .any(|table| table.domains.counts.iter().any(|count| *count > 0))
    }
}

impl Topology for Counts {
    fn update(&mut self, id: u32, node: Option<&NodeInfo>, affected: &mut Vec<u32>) {
        if self.nodes.len() <= id as usize {
            self.nodes.resize(id as usize + 1, Vec::new());
        }
        let mut shares = std::mem::take(&mut self.nodes[id as usize]);
        for (table, domain, amount) in shares.drain(..) {
            self.change(table, domain, -amount, affected);
        }
        let Some(node) = node else { return };
        let pods = if self.reads_all_pods {
            &node.pods
        } else {
            &node.affinity_pods
        };
        for pod in pods {
            for (table, amount) in self.additions(&pod.shape).iter() {
                if let Some(domain) = self.tables[*table as usize].domains.number(node) {
                    shares.push((*table, domain, *amount));
                }
            }
        }
        // Own terms need the node's domain even if nothing is counted there: the count of a singular key is its part.
        for table in &mut self.tables {
            table.domains.number(node);
        }
        for (table, domain, amount) in &shares {
            self.change(*table, *domain, *amount, affected);
        }
        self.nodes[id as usize] = shares;
    }

    fn is_stale(&self) -> bool {
        self.width_sealed.is_some_and(|width| width != self.tables.len())
    }

    fn seal(&mut self) {
        self.width_sealed = Some(self.tables.len());
    }

    fn key(&self, node: &NodeInfo, key: &mut Vec<i64>) {
        key.extend(self.tables.iter().map(|table| table.domains.part(node)));
    }

    fn width(&self) -> usize {
        self.tables.len()
    }

    fn filters(&self) -> bool {
        self.has_filters()
    }

    fn filter(&self, key: &[i64]) -> Verdict {
        self.filter_by(key, |_| 0, self.affinity_total)
    }

    fn begin_score(&mut self, _keys: &[(&[i64], usize)]) -> bool {
        self.scores()
    }

    fn score(&self, key: &[i64]) -> i64 {
        let tables = self.tables.iter().zip(key);
        tables
            .filter(|(table, part)| table.kind == Kind::Score && **part != MISSING)
            .map(|(table, part)| table.domains.count(*part))
            .sum()
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "a share between 0 and 1"
    )]
    fn normalize(&self, _keys: &[(&[i64], usize)], scores: &mut [i64]) {
        let (min, max) = (
            scores.iter().copied().min().unwrap_or(0),
            scores.iter().copied().max().unwrap_or(0),
        );
        for score in scores {
            let share = if max > min {
                MAX_SCORE as f64 * ((*score - min) as f64 / (max - min) as f64)
            } else {
                0.0
            };
            *score = share as i64;
        }
    }
}

/// What is counted at the start of the cycle, and what pods that preemption removes and adds change in it.
#[derive(Clone)]
struct AffinityState {
    base: Arc<Counts>,
    /// By kind of table, as its place, and domain.
    changes: BTreeMap<(usize, u32), i64>,
    /// Anti-affinity of added pods towards the pod that no placed pod has: topology key and value.
    new_anti: BTreeMap<(Arc<str>, String), i64>,
    affinity_total: i64,
}

impl AffinityState {
    fn change(&mut self, pod: &PodInfo, node: &NodeInfo, by: i64) {
        let counts = Arc::clone(&self.base);
        for (kind, key, amount) in counts.additions_of(&pod.shape) {
            let mut tables = counts.tables.iter().enumerate();
            let table = tables.find(|(_, table)| table.kind == kind && table.domains.topology_key == key);
            let known = table.and_then(|(place, table)| Some((place, table.domains.find(node)?)));
            let Some((place, domain)) = known else {
                if kind == Kind::ExistingAnti
                    && let Some(value) = node.label(&key)
                {
                    *self.new_anti.entry((key.clone(), value.to_owned())).or_default() += by;
                }
                continue;
            };
            if kind == Kind::Affinity {
                self.affinity_total += by * amount;
            }
            *self.changes.entry((place, domain)).or_default() += by * amount;
        }
    }

    fn filter(&self, node: &NodeInfo) -> Verdict {
        let mut new_anti = self.new_anti.iter();
        if new_anti.any(|((key, value), count)| *count > 0 && node.label(key) == Some(value)) {
            return Err(Rejection::unschedulable(
                "node(s) didn't satisfy existing pods anti-affinity rules",
            ));
        }
        let counts = &self.base;
        let mut key = Vec::with_capacity(counts.width());
        counts.key(node, &mut key);
        let changed = |place: usize| {
            if self.changes.is_empty() {
                return 0;
            }
            let domain = counts.tables[place].domains.find(node);
            domain
                .and_then(|domain| self.changes.get(&(place, domain)))
                .copied()
                .unwrap_or(0)
        };
        counts.filter_by(&key, changed, self.affinity_total)
    }
}

impl InterPodAffinity {
    fn matches_all(&self, terms: &[AffinityTerm], other: &Parts) -> bool {
        let labels = self.listers.namespace_labels(&other.namespace);
        let matches = |term: &AffinityTerm| term.matches(&other.namespace, &labels, &other.labels);
        !terms.is_empty() && terms.iter().all(matches)
    }
}

impl Plugin for InterPodAffinity {
    fn name(&self) -> &'static str {
        NAME
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        let (towards, away) = (&pod.shape.affinity.required, &pod.shape.affinity.required_anti);
        match event {
            ClusterEvent::OwnPodUpdated { old, new } => old.shape.labels != new.shape.labels,
            ClusterEvent::PodPlaced(other) => self.matches_all(towards, &other.shape),
            ClusterEvent::PodUpdated { old, new } => {
                (!self.matches_all(towards, &old.shape) && self.matches_all(towards, &new.shape))
                    || (self.matches_all(away, &old.shape) && !self.matches_all(away, &new.shape))
            }
            ClusterEvent::PodRemoved(other) => {
                self.matches_all(away, &other.shape)
                    || self.matches_all(&other.shape.affinity.required_anti, &pod.shape)
            }
            ClusterEvent::NodeAdded(new) => {
                let has_key = |term: &AffinityTerm| new.label(&term.topology_key).is_some();
                !away.is_empty() || towards.iter().any(has_key) || (towards.is_empty() && away.is_empty())
            }
            ClusterEvent::NodeUpdated { old, new } => {
                let label =
                    |node: &NodeMeta, term: &AffinityTerm| node.label(&term.topology_key).map(str::to_owned);
                let came = |term| label(new, term).is_some() && label(old, term) != label(new, term);
                let went = |term| label(old, term).is_some() && label(old, term) != label(new, term);
                towards.iter().any(came) || away.iter().any(went)
            }
            _ => false,
        }
    }

    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cache: &Cache,
    ) -> Result<PreFilter, Rejection> {
        if pod.shape.affinity.is_empty() && cache.affinity_nodes.is_empty() {
            return Ok(PreFilter::Skip);
        }
        let counts = Counts::new(self, &pod.shape).over(cache);
        let (filters, affinity_total) = (counts.has_filters(), counts.affinity_total);
        state.write(
            NAME,
            AffinityState {
                base: Arc::new(counts),
                changes: BTreeMap::new(),
                new_anti: BTreeMap::new(),
                affinity_total,
            },
        );
        Ok(if filters {
            PreFilter::AllNodes
        } else {
            PreFilter::Skip
        })
    }

    fn add_pod(&self, state: &mut CycleState, _pod: &PodInfo, added: &PodInfo, node: &NodeInfo) {
        if let Some(affinity) = state.read_mut::<AffinityState>(NAME) {
            affinity.change(added, node, 1);
        }
    }

    fn remove_pod(&self, state: &mut CycleState, _pod: &PodInfo, removed: &PodInfo, node: &NodeInfo) {
        if let Some(affinity) = state.read_mut::<AffinityState>(NAME) {
            affinity.change(removed, node, -1);
        }
    }

    fn filter(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let affinity = state.read::<AffinityState>(NAME);
        affinity.map_or(Ok(()), |affinity| affinity.filter(node))
    }

    fn scores(&self) -> bool {
        true
    }

    fn pre_score(
        &self,
        state: &mut CycleState,
        _pod: &PodInfo,
        _nodes: &[&NodeInfo],
        _cache: &Cache,
    ) -> bool {
        let affinity = state.read::<AffinityState>(NAME);
        affinity.is_some_and(|affinity| affinity.base.scores())
    }

    fn score(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> i64 {
        let Some(affinity) = state.read::<AffinityState>(NAME) else {
            return 0;
        };
        let counts = &affinity.base;
        let mut key = Vec::with_capacity(counts.width());
        counts.key(node, &mut key);
        counts.score(&key)
    }

    fn normalizes(&self) -> bool {
        true
    }

    fn normalize(&self, state: &CycleState, nodes: &[&NodeInfo], scores: &mut [i64]) {
        if let Some(affinity) = state.read::<AffinityState>(NAME) {
            let counts = &affinity.base;
            counts.normalize(&borrowed(&keys_of(&**counts, nodes)), scores);
        }
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::Topology
    }

    /// Also for pods without terms: those of placed pods may come to matter.
    fn topology(&self, pod: &PodInfo, _cache: &Cache) -> Option<Box<dyn Topology>> {
        Some(Box::new(Counts::new(self, &pod.shape)))
    }

    fn topology_epoch(&self, _pod: &PodInfo) -> u64 {
        self.listers.namespace_version()
    }

    fn topology_version(&self, _pod: &PodInfo) -> u64 {
        self.listers.namespace_version()
    }
}
