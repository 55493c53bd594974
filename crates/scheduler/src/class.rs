//! The class cache: for pods of one shape it keeps which nodes fit and how well, and repairs that at the nodes that have
//! changed, instead of filtering and scoring all nodes for each pod.
//!
//! What depends on one node alone (its resources, labels, taints, images) is kept as one number per node. What depends on
//! others (counts per topology domain, scores that are normalised) is the same for all nodes of a group: nodes with equal
//! keys. A choice looks at each group once and takes the best node of the best group.
//!
//! It must come to the same answer as `cycle::schedule` over all nodes; a property test holds it to that. Whatever it does
//! not know how to keep, it leaves to that one.

mod preemption;
#[cfg(test)]
mod tests;

use self::preemption::{Preemption, ReasonCounts};
use crate::cache::Cache;
use crate::cycle::{Diagnosis, Outcome, Prepared, pre_filter, schedule};
use crate::framework::{CycleState, MAX_SCORE, Points, Profile, Rejection, Scope, Topology, Verdict};
use crate::node::{NodeId, NodeInfo};
use crate::pod::PodInfo;
use rand::RngExt;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, BinaryHeap, HashMap, HashSet};
use std::sync::Arc;

/// Earlier pods of a shape are left to the plain algorithm: reading all nodes pays only for shapes that come again.
const ATTEMPTS_BEFORE: u32 = 2;
/// With more groups than this, going through them costs more than it saves.
const MAX_GROUPS: usize = 2048;
/// Nodes times classes.
const MAX_SLOTS: usize = 400_000;
const NO_GROUP: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Slot {
    group: u32,
    score: i64,
    /// Random, so that among equals any may be the last.
    tie: u32,
}

const EMPTY: Slot = Slot {
    group: NO_GROUP,
    score: 0,
    tie: 0,
};

struct Group {
    key: Box<[i64]>,
    nodes: BTreeSet<(i64, u32, NodeId)>,
}

/// A plugin that counts over domains.
struct Counted {
    /// Of the plugin.
    number: usize,
    weight: i64,
    filters: bool,
    scores: bool,
    topology: Box<dyn Topology>,
}

/// What a plugin's topology was made from, or why it has none.
struct Version {
    number: usize,
    epoch: u64,
    version: u64,
}

/// A choice that came to nothing, good until something changes that could matter.
struct Failure {
    releases: u64,
    placements: u64,
    diagnosis: Diagnosis,
}

struct Class {
    /// Holds the shape, so that its address stays its own.
    example: Arc<PodInfo>,
    state: CycleState,
    /// Numbers of the plugins whose Filter depends on one node alone.
    filters: Vec<usize>,
    /// Plugins whose score does, with their weights.
    scores: Vec<(usize, i64)>,
    /// Likewise, but the score is normalised over all nodes: it is part of the key.
    normalized: Vec<(usize, i64)>,
    counted: Vec<Counted>,
    versions: Vec<Version>,
    slots: Vec<Slot>,
    /// Why nodes do not fit, by id.
    rejections: HashMap<NodeId, Rejection>,
    /// How many nodes do not fit for each of these reasons.
    reasons: ReasonCounts,
    /// What preemption would cost, once it was asked for.
    preemption: Option<Preemption>,
    groups: Vec<Group>,
    by_key: HashMap<Box<[i64]>, u32>,
    seen: u64,
    /// The cache's, as of the last look.
    version: u64,
    membership: u64,
    image_nodes: Vec<usize>,
    failure: Option<Failure>,
    /// A pod of this class without volumes and claims was here: such pods have no plugins that ask for the pod itself.
    plain: bool,
    used: u64,
}

/// All classes that are kept.
#[derive(Default)]
pub(crate) struct Classes {
    classes: HashMap<(usize, usize), Box<Class>>,
    clock: u64,
}

impl Classes {
    pub(crate) fn clear(&mut self) {
        self.classes.clear();
    }

    /// `None`: not for the class cache.
    pub(crate) fn schedule(
        &mut self,
        profile: &Profile,
        cache: &mut Cache,
        pod: &Arc<PodInfo>,
    ) -> Option<Outcome> {
        let key = (
            Arc::as_ptr(&pod.shape) as usize,
            std::ptr::from_ref(profile) as usize,
        );
        let known = self.classes.get(&key);
        if pod.shape.count_attempt() < ATTEMPTS_BEFORE && known.is_none() {
            return None;
        }
        // Whether a class backs extended resources is asked each time: it changes.
        let plain = !pod.is_special() && pod.node_name.is_empty() && pod.shape.extended.is_empty();
        let per_pod = match known {
            Some(class) if plain && class.plain => Vec::new(),
            _ => per_pod_plugins(profile, pod)?,
        };
        let mut state = CycleState::default();
        if !per_pod.is_empty() {
            let wanted = |number: usize| per_pod.contains(&number);
            match pre_filter(profile, cache, pod, &mut state, wanted) {
                Prepared::Ready { names: None, .. } => {}
                _ => return None,
            }
        }
        self.clock += 1;
        let class = match self.classes.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(Box::new(Class::new(profile, cache, pod)?)),
        };
        if !class.sync(profile, cache) {
            match Class::new(profile, cache, pod) {
                Some(anew) => **class = anew,
                None => {
                    self.classes.remove(&key);
                    return None;
                }
            }
        }
        let is_new = class.used == 0;
        class.used = self.clock;
        class.plain |= plain && per_pod.is_empty();
        let outcome = class.decide(profile, cache, pod, &per_pod, state);
        if is_new {
            self.make_room(cache.slots());
        }
        outcome
    }

    /// Drops the classes that were not used for longest.
    fn make_room(&mut self, nodes: usize) {
        let limit = (MAX_SLOTS / nodes.max(1)).max(4);
        while self.classes.len() > limit {
            let oldest = self.classes.iter().min_by_key(|(_, class)| class.used);
            let Some(oldest) = oldest.map(|(key, _)| *key) else {
                return;
            };
            self.classes.remove(&oldest);
        }
    }
}

/// The Filter plugins that must be asked for the pod itself; `None` if one is not known to the cache.
fn per_pod_plugins(profile: &Profile, pod: &PodInfo) -> Option<Vec<usize>> {
    let mut found = Vec::new();
    for (number, enabled) in profile.plugins.iter().enumerate() {
        match enabled.plugin.scope(pod) {
            Scope::Opaque => return None,
            Scope::PerPod if enabled.points.has(Points::FILTER) => found.push(number),
            _ => {}
        }
    }
    Some(found)
}

enum Chosen {
    Node(NodeId),
    Nowhere,
    /// The plain algorithm must decide.
    Unsuitable,
}

fn image_nodes(cache: &Cache, pod: &PodInfo) -> Vec<usize> {
    let images = pod.shape.images.iter();
    images
        .map(|name| cache.image_nodes.get(name).copied().unwrap_or(0))
        .collect()
}

impl Class {
    fn new(profile: &Profile, cache: &Cache, pod: &Arc<PodInfo>) -> Option<Self> {
        let mut state = CycleState::default();
        let local = |number: usize| profile.plugins[number].plugin.scope(pod) == Scope::Local;
        match pre_filter(profile, cache, pod, &mut state, local) {
            Prepared::Ready { names: None, .. } => {}
            _ => return None,
        }
        for (number, enabled) in profile.at(Points::PRE_SCORE).filter(|(number, _)| local(*number)) {
            if enabled.plugin.scores() && !enabled.plugin.pre_score(&mut state, pod, &[], cache) {
                state.skip_score |= 1 << number;
            }
        }
        let (skip_filter, skip_score) = (state.skip_filter, state.skip_score);
        let filters = profile.at(Points::FILTER).map(|(number, _)| number);
        let filters = filters.filter(|number| local(*number) && skip_filter & (1 << number) == 0);
        let scoring = || {
            let scoring = profile.at(Points::SCORE).filter(|(number, enabled)| {
                local(*number) && enabled.plugin.scores() && skip_score & (1 << number) == 0
            });
            scoring.map(|(number, enabled)| (number, enabled.weight))
        };
        let normalizes = |number: usize| profile.plugins[number].plugin.normalizes();
        let mut class = Self {
            filters: filters.collect(),
            scores: scoring().filter(|(number, _)| !normalizes(*number)).collect(),
            normalized: scoring().filter(|(number, _)| normalizes(*number)).collect(),
            counted: Vec::new(),
            versions: Vec::new(),
            slots: vec![EMPTY; cache.slots()],
            rejections: HashMap::new(),
            reasons: ReasonCounts::default(),
            preemption: None,
            groups: Vec::new(),
            by_key: HashMap::new(),
            seen: cache.log_end(),
            version: cache.version,
            membership: cache.membership,
            image_nodes: image_nodes(cache, pod),
            failure: None,
            plain: false,
            used: 0,
            example: Arc::clone(pod),
            state,
        };
        for (number, enabled) in profile.plugins.iter().enumerate() {
            let (filters, scores) = (
                enabled.points.has(Points::FILTER),
                enabled.points.has(Points::SCORE),
            );
            if enabled.plugin.scope(pod) != Scope::Topology || !(filters || scores) {
                continue;
            }
            class.versions.push(Version {
                number,
                epoch: enabled.plugin.topology_epoch(pod),
                version: enabled.plugin.topology_version(pod),
            });
            if let Some(topology) = enabled.plugin.topology(pod, cache) {
                class.counted.push(Counted {
                    number,
                    weight: enabled.weight,
                    filters,
                    scores,
                    topology,
                });
            }
        }
        let mut affected = Vec::new();
        for counted in &mut class.counted {
            for node in cache.nodes() {
                counted.topology.update(node.id, Some(node), &mut affected);
                affected.clear();
            }
            counted.topology.seal();
        }
        for node in cache.nodes() {
            class.refresh(profile, cache, node.id);
        }
        Some(class)
    }

    /// Catches up with what has changed; false if the class must be made anew.
    fn sync(&mut self, profile: &Profile, cache: &Cache) -> bool {
        for known in &mut self.versions {
            let plugin = &profile.plugins[known.number].plugin;
            let epoch = plugin.topology_epoch(&self.example);
            if epoch != known.epoch {
                known.epoch = epoch;
                if plugin.topology_version(&self.example) != known.version {
                    return false;
                }
            }
        }
        if self.version == cache.version {
            return true;
        }
        let images = image_nodes(cache, &self.example);
        let weighed = images.iter().any(|count| *count > 0);
        if images != self.image_nodes || (weighed && self.membership != cache.membership) {
            return false;
        }
        let Some(changes) = cache.changes_since(self.seen) else {
            return false;
        };
        let changed: HashSet<NodeId> = changes.collect();
        if self.slots.len() < cache.slots() {
            self.slots.resize(cache.slots(), EMPTY);
        }
        let mut affected: Vec<NodeId> = Vec::new();
        for counted in &mut self.counted {
            for id in &changed {
                counted.topology.update(*id, cache.get(*id), &mut affected);
            }
            if counted.topology.is_stale() {
                return false;
            }
        }
        let others: HashSet<NodeId> = affected.into_iter().filter(|id| !changed.contains(id)).collect();
        for id in changed.iter().chain(&others) {
            self.refresh(profile, cache, *id);
        }
        self.seen = cache.log_end();
        self.version = cache.version;
        self.membership = cache.membership;
        true
    }

    /// Whether the plugins that look at one node alone let the pod on it, also with the pods that are nominated to it.
    fn fits(&self, profile: &Profile, cache: &Cache, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let passes = |node: &NodeInfo| {
            for number in &self.filters {
                let plugin = &profile.plugins[*number].plugin;
                let verdict = plugin.filter(&self.state, pod, node);
                verdict.map_err(|rejection| rejection.by(plugin.name()))?;
            }
            Ok(())
        };
        let nominated = cache.nominated_on(&node.name).iter();
        let counts = |one: &&Arc<PodInfo>| one.priority() >= pod.priority() && one.uid != pod.uid;
        let nominated: Vec<&Arc<PodInfo>> = nominated.filter(counts).collect();
        if !nominated.is_empty() {
            let mut with = node.clone();
            for one in nominated {
                with.add_pod(Arc::clone(one));
            }
            passes(&with)?;
        }
        passes(node)
    }

    fn refresh(&mut self, profile: &Profile, cache: &Cache, id: NodeId) {
        let before = std::mem::replace(&mut self.slots[id as usize], EMPTY);
        if before.group != NO_GROUP {
            let nodes = &mut self.groups[before.group as usize].nodes;
            nodes.remove(&(before.score, before.tie, id));
        }
        if let Some(rejection) = self.rejections.remove(&id) {
            self.reasons.remove(&rejection);
        }
        if let Some(preemption) = &mut self.preemption {
            preemption.stale.insert(id);
        }
        let Some(node) = cache.get(id) else { return };
        let pod = Arc::clone(&self.example);
        let fits = if cache.nominated_on(&node.name).is_empty() {
            self.fits(profile, cache, &pod, node)
        } else {
            // The example may be nominated here itself; others of its shape are not.
            let stranger = PodInfo {
                uid: Arc::from(""),
                ..(*pod).clone()
            };
            self.fits(profile, cache, &stranger, node)
        };
        if let Err(rejection) = fits {
            self.reasons.add(&rejection);
            self.rejections.insert(id, rejection);
            return;
        }
        let mut score = 0;
        for (number, weight) in &self.scores {
            let plugin = &profile.plugins[*number].plugin;
            score += plugin.score(&self.state, &pod, node).clamp(0, MAX_SCORE) * weight;
        }
        let key = self.key(profile, &pod, node);
        let group = match self.by_key.get(&*key) {
            Some(group) => *group,
            None => self.new_group(key),
        };
        let tie = rand::rng().random();
        self.slots[id as usize] = Slot { group, score, tie };
        self.groups[group as usize].nodes.insert((score, tie, id));
    }

    fn key(&self, profile: &Profile, pod: &PodInfo, node: &NodeInfo) -> Box<[i64]> {
        let mut key = Vec::with_capacity(self.normalized.len() + 8);
        for (number, _) in &self.normalized {
            key.push(profile.plugins[*number].plugin.score(&self.state, pod, node));
        }
        for counted in &self.counted {
            counted.topology.key(node, &mut key);
        }
        key.into()
    }

    fn new_group(&mut self, key: Box<[i64]>) -> u32 {
        // Groups that nobody is in any more make room.
        let empty =
            (self.groups.len() > MAX_GROUPS).then(|| self.groups.iter().position(|g| g.nodes.is_empty()));
        let place = match empty.flatten() {
            Some(place) => {
                self.by_key.remove(&self.groups[place].key);
                self.groups[place].key = key.clone();
                place as u32
            }
            None => {
                self.groups.push(Group {
                    key: key.clone(),
                    nodes: BTreeSet::new(),
                });
                (self.groups.len() - 1) as u32
            }
        };
        self.by_key.insert(key, place);
        place
    }

    fn group_passes(&self, key: &[i64]) -> bool {
        self.group_rejection(key).is_none()
    }

    /// Why counts over domains rule the nodes of a group out, and by which plugin.
    fn group_rejection(&self, key: &[i64]) -> Option<(usize, Rejection)> {
        let mut at = self.normalized.len();
        for counted in &self.counted {
            let part = &key[at..at + counted.topology.width()];
            at += part.len();
            if counted.filters
                && let Err(rejection) = counted.topology.filter(part)
            {
                return Some((counted.number, rejection));
            }
        }
        None
    }

    fn choose(
        &mut self,
        profile: &Profile,
        cache: &Cache,
        pod: &Arc<PodInfo>,
        per_pod: &[usize],
        state: &CycleState,
    ) -> Chosen {
        // Pods that are nominated may count in domains; that is left to the plain algorithm.
        if cache.has_nominations()
            && self
                .counted
                .iter()
                .any(|one| one.filters && one.topology.filters())
        {
            return Chosen::Unsuitable;
        }
        if self.groups.len() > 2 * MAX_GROUPS {
            return Chosen::Unsuitable;
        }
        let passes_per_pod = |node: &NodeInfo| {
            let mut filters = per_pod
                .iter()
                .filter(|number| state.skip_filter & (1 << **number) == 0);
            filters.all(|number| profile.plugins[*number].plugin.filter(state, pod, node).is_ok())
        };
        let nominated = cache.nomination(&pod.uid).unwrap_or(&pod.nominated);
        if !nominated.is_empty()
            && let Some(node) = cache.by_name(nominated)
            && self.fits(profile, cache, pod, node).is_ok()
            && self.group_passes(&self.key(profile, pod, node))
            && passes_per_pod(node)
        {
            return Chosen::Node(node.id);
        }
        let live = self
            .groups
            .iter()
            .enumerate()
            .filter(|(_, group)| !group.nodes.is_empty());
        let feasible: Vec<usize> = live
            .filter(|(_, group)| self.group_passes(&group.key))
            .map(|(place, _)| place)
            .collect();
        if feasible.is_empty() {
            return Chosen::Nowhere;
        }
        let totals = self.group_scores(profile, &feasible);
        // Groups by the best of their nodes; a group comes again with its next node if that one is not for the pod.
        let mut heap = BinaryHeap::new();
        let mut walks: Vec<_> = Vec::with_capacity(feasible.len());
        for (walk, (place, total)) in feasible.iter().zip(&totals).enumerate() {
            let mut nodes = self.groups[*place].nodes.iter().rev();
            if let Some((score, _, id)) = nodes.next() {
                heap.push((total + score, rand::rng().random::<u32>(), walk, *id));
            }
            walks.push(nodes);
        }
        while let Some((_, _, walk, id)) = heap.pop() {
            let Some(node) = cache.get(id) else { continue };
            if per_pod.is_empty() || passes_per_pod(node) {
                return Chosen::Node(id);
            }
            if let Some((score, _, id)) = walks[walk].next() {
                heap.push((totals[walk] + score, rand::rng().random::<u32>(), walk, *id));
            }
        }
        Chosen::Nowhere
    }

    /// What a node gets for the group it is in.
    fn group_scores(&mut self, profile: &Profile, feasible: &[usize]) -> Vec<i64> {
        let mut totals = vec![0; feasible.len()];
        let mut add = |scores: Vec<i64>, weight: i64| {
            for (total, score) in totals.iter_mut().zip(scores) {
                *total += score.clamp(0, MAX_SCORE) * weight;
            }
        };
        for (place, (number, weight)) in self.normalized.iter().enumerate() {
            let raw = feasible.iter().map(|group| self.groups[*group].key[place]);
            let mut scores: Vec<i64> = raw.collect();
            profile.plugins[*number]
                .plugin
                .normalize(&self.state, &[], &mut scores);
            add(scores, *weight);
        }
        let mut at = self.normalized.len();
        for counted in &mut self.counted {
            let width = counted.topology.width();
            let parts = at..at + width;
            at += width;
            if !counted.scores {
                continue;
            }
            let keys = feasible.iter().map(|group| {
                let group = &self.groups[*group];
                (&group.key[parts.clone()], group.nodes.len())
            });
            let keys: Vec<(&[i64], usize)> = keys.collect();
            if counted.topology.begin_score(&keys) {
                let mut scores: Vec<i64> = keys.iter().map(|(key, _)| counted.topology.score(key)).collect();
                counted.topology.normalize(&keys, &mut scores);
                add(scores, counted.weight);
            }
        }
        totals
    }

    fn decide(
        &mut self,
        profile: &Profile,
        cache: &mut Cache,
        pod: &Arc<PodInfo>,
        per_pod: &[usize],
        state: CycleState,
    ) -> Option<Outcome> {
        // Of such a pod nothing counts but its class: what was said of the last one holds while nothing changes.
        let is_ordinary = per_pod.is_empty()
            && pod.nominated.is_empty()
            && cache.nomination(&pod.uid).is_none()
            && !cache.any_below(pod.priority());
        if is_ordinary
            && let Some(failure) = &self.failure
            && failure.releases == cache.releases
            && failure.placements == cache.placements
        {
            return Some(Outcome::Nowhere(failure.diagnosis.clone()));
        }
        match self.choose(profile, cache, pod, per_pod, &state) {
            Chosen::Node(id) => Some(Outcome::Node { id, state }),
            Chosen::Unsuitable => None,
            Chosen::Nowhere => Some(self.nowhere(profile, cache, pod, per_pod.is_empty(), is_ordinary)),
        }
    }

    /// Nothing fits. What is kept says why, unless room could be made while domains are counted: then the plain algorithm
    /// says it.
    fn nowhere(
        &mut self,
        profile: &Profile,
        cache: &mut Cache,
        pod: &Arc<PodInfo>,
        is_plain: bool,
        is_ordinary: bool,
    ) -> Outcome {
        let counts = self
            .counted
            .iter()
            .any(|one| one.filters && one.topology.filters());
        let mut plugins = profile.at(Points::POST_FILTER);
        let preemption = plugins.find_map(|(_, enabled)| enabled.plugin.preemption());
        let said = match preemption {
            // Without nodes there is nothing to count.
            _ if cache.len() == 0 => None,
            Some(_) if is_ordinary => self.without_victims(profile, cache),
            Some(preemption) if is_plain && !counts => Some(self.preempt(profile, cache, pod, preemption)),
            _ => None,
        };
        let outcome = match said {
            Some(diagnosis) => Outcome::Nowhere(diagnosis),
            None => {
                let mut start = cache.next_start;
                let outcome = schedule(profile, cache, pod, &mut start);
                cache.next_start = start;
                outcome
            }
        };
        if let Outcome::Nowhere(diagnosis) = &outcome
            && is_ordinary
            && !diagnosis.is_error
        {
            self.failure = Some(Failure {
                releases: cache.releases,
                placements: cache.placements,
                diagnosis: diagnosis.clone(),
            });
        }
        outcome
    }
}
