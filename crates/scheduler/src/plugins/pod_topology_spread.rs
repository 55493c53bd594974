//! Topology spread constraints: those that must hold filter, those that should hold score. Pods without constraints get
//! the profile's defaults, if a service or a controller selects them.

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, PreFilter, Rejection, Scope, Topology, Verdict};
use crate::listers::Listers;
use crate::node::{NodeInfo, NodeMeta};
use crate::plugins::domains::HOSTNAME;
use crate::plugins::spread::{Constraint, Spread, least};
use crate::pod::{Parts, PodInfo};
use k8s_openapi::api::core::v1::TopologySpreadConstraint;
use skiff_pods::labels;
use std::collections::BTreeMap;
use std::sync::Arc;

const NAME: &str = "PodTopologySpread";
const ZONE: &str = "topology.kubernetes.io/zone";

pub(crate) struct PodTopologySpread {
    pub(crate) listers: Arc<Listers>,
    pub(crate) defaults: Vec<TopologySpreadConstraint>,
    /// The defaults are upstream's own: a node without their labels is not left out.
    pub(crate) system_defaulted: bool,
}

/// Upstream's `defaultingType: System`.
pub(crate) fn system_defaults() -> Vec<TopologySpreadConstraint> {
    let soft = |key: &str, max_skew| TopologySpreadConstraint {
        topology_key: key.to_owned(),
        when_unsatisfiable: "ScheduleAnyway".to_owned(),
        max_skew,
        ..TopologySpreadConstraint::default()
    };
    vec![soft(HOSTNAME, 3), soft(ZONE, 5)]
}

/// What is counted at the start of the cycle, and what pods that preemption removes and adds change in it.
#[derive(Clone)]
struct SpreadState {
    base: Arc<Spread>,
    /// By hard constraint and domain.
    changes: BTreeMap<(usize, u32), i64>,
}

impl SpreadState {
    fn change(&mut self, pod: &PodInfo, node: &NodeInfo, by: i64) {
        let base = Arc::clone(&self.base);
        if pod.deleting || pod.shape.namespace != base.shape.namespace || !Spread::has_all(&base.hard, node) {
            return;
        }
        for (index, one) in base.hard.iter().enumerate() {
            if one.constraint.counts(&pod.shape)
                && one.constraint.includes(&base.shape, &node.meta)
                && let Some(domain) = one.domains.find(node)
            {
                *self.changes.entry((index, domain)).or_default() += by;
            }
        }
    }

    fn filter(&self, node: &NodeInfo) -> Verdict {
        let mut key = Vec::with_capacity(self.base.width());
        self.base.key(node, &mut key);
        if self.changes.is_empty() {
            return self.base.filter(&key);
        }
        self.base.filter_by(&key, |index, part| {
            let one = &self.base.hard[index];
            let changed = |domain: u32| self.changes.get(&(index, domain)).copied().unwrap_or(0);
            let count = one.domains.count(part) + one.domains.find(node).map_or(0, changed);
            let mut histogram = one.histogram.clone();
            for ((_, domain), by) in self.changes.range((index, 0)..=(index, u32::MAX)) {
                if one.is_included(*domain) {
                    let before = one.domains.counts[*domain as usize];
                    if let Some(domains) = histogram.get_mut(&before) {
                        *domains -= 1;
                        if *domains == 0 {
                            histogram.remove(&before);
                        }
                    }
                    *histogram.entry(before + by).or_default() += 1;
                }
            }
            (count, least(&histogram))
        })
    }
}

impl PodTopologySpread {
    fn spread(&self, pod: &PodInfo) -> Option<Spread> {
        let shape = &pod.shape;
        let default = shape
            .spread
            .is_empty()
            .then(|| self.listers.default_selector(shape))
            .flatten();
        Spread::new(shape, &self.defaults, default.as_ref(), self.system_defaulted)
    }

    fn hard_constraints(&self, pod: &PodInfo) -> Vec<(String, Constraint)> {
        let shape = &pod.shape;
        let default = shape
            .spread
            .is_empty()
            .then(|| self.listers.default_selector(shape))
            .flatten();
        let read = match (&default, shape.spread.is_empty()) {
            (None, true) => return Vec::new(),
            (_, true) => &self.defaults,
            (_, false) => &shape.spread,
        };
        let hard = read
            .iter()
            .filter(|one| one.when_unsatisfiable == "DoNotSchedule");
        hard.map(|one| {
            (
                one.topology_key.clone(),
                Constraint::new(one, shape, default.as_ref()),
            )
        })
        .collect()
    }
}

impl Plugin for PodTopologySpread {
    fn name(&self) -> &'static str {
        NAME
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        let constraints = self.hard_constraints(pod);
        let has_all = |node: &NodeMeta| constraints.iter().all(|(key, _)| node.label(key).is_some());
        let matches = |shape: &Parts| {
            let selects = |one: &Constraint| {
                let selector = one.selector.as_ref();
                selector.is_some_and(|selector| labels::matches(selector, Some(&shape.labels)))
            };
            constraints
                .iter()
                .map(|(_, one)| selects(one))
                .collect::<Vec<bool>>()
        };
        match event {
            ClusterEvent::NodeAdded(node) | ClusterEvent::NodeDeleted(node) => has_all(node),
            ClusterEvent::NodeUpdated { old, new } => {
                let (before, now) = (has_all(old), has_all(new));
                let moved = || {
                    constraints
                        .iter()
                        .any(|(key, _)| old.label(key) != new.label(key))
                };
                before != now || (now && (moved() || old.taints() != new.taints()))
            }
            ClusterEvent::PodPlaced(other) | ClusterEvent::PodRemoved(other) => {
                other.shape.namespace == pod.shape.namespace && matches(&other.shape).contains(&true)
            }
            ClusterEvent::PodUpdated { old, new } => {
                new.shape.namespace == pod.shape.namespace && matches(&old.shape) != matches(&new.shape)
            }
            ClusterEvent::OwnPodUpdated { old, new } => {
                let honours = constraints.iter().any(|(_, one)| one.honours_taints);
                (honours && old.shape.tolerations != new.shape.tolerations)
                    || (old.shape.labels != new.shape.labels && matches(&old.shape) != matches(&new.shape))
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
        let Some(spread) = self.spread(pod) else {
            return Ok(PreFilter::Skip);
        };
        let hard = !spread.hard.is_empty();
        let base = Arc::new(spread.over(cache));
        state.write(
            NAME,
            SpreadState {
                base,
                changes: BTreeMap::new(),
            },
        );
        Ok(if hard {
            PreFilter::AllNodes
        } else {
            PreFilter::Skip
        })
    }

    fn add_pod(&self, state: &mut CycleState, _pod: &PodInfo, added: &PodInfo, node: &NodeInfo) {
        if let Some(spread) = state.read_mut::<SpreadState>(NAME) {
            spread.change(added, node, 1);
        }
    }

    fn remove_pod(&self, state: &mut CycleState, _pod: &PodInfo, removed: &PodInfo, node: &NodeInfo) {
        if let Some(spread) = state.read_mut::<SpreadState>(NAME) {
            spread.change(removed, node, -1);
        }
    }

    fn filter(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> Verdict {
        state
            .read::<SpreadState>(NAME)
            .map_or(Ok(()), |spread| spread.filter(node))
    }

    fn scores(&self) -> bool {
        true
    }

    fn pre_score(&self, state: &mut CycleState, _pod: &PodInfo, nodes: &[&NodeInfo], _cache: &Cache) -> bool {
        let Some(spread) = state.read_mut::<SpreadState>(NAME) else {
            return false;
        };
        let base = Arc::make_mut(&mut spread.base);
        let keys = keys_of(base, nodes);
        base.begin_score(&borrowed(&keys))
    }

    fn score(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> i64 {
        let Some(spread) = state.read::<SpreadState>(NAME) else {
            return 0;
        };
        let mut key = Vec::new();
        spread.base.key(node, &mut key);
        spread.base.score(&key)
    }

    fn normalizes(&self) -> bool {
        true
    }

    fn normalize(&self, state: &CycleState, nodes: &[&NodeInfo], scores: &mut [i64]) {
        if let Some(spread) = state.read::<SpreadState>(NAME) {
            let keys = keys_of(&*spread.base, nodes);
            spread.base.normalize(&borrowed(&keys), scores);
        }
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::Topology
    }

    fn topology(&self, pod: &PodInfo, _cache: &Cache) -> Option<Box<dyn Topology>> {
        self.spread(pod)
            .map(|spread| Box::new(spread) as Box<dyn Topology>)
    }

    fn topology_epoch(&self, pod: &PodInfo) -> u64 {
        self.listers.selectors_version(&pod.shape.namespace)
    }

    fn topology_version(&self, pod: &PodInfo) -> u64 {
        if pod.shape.spread.is_empty() && !self.defaults.is_empty() {
            self.listers.default_selector_version(&pod.shape)
        } else {
            0
        }
    }
}

pub(crate) fn keys_of(topology: &dyn Topology, nodes: &[&NodeInfo]) -> Vec<Vec<i64>> {
    let keys = nodes.iter().map(|node| {
        let mut key = Vec::with_capacity(topology.width());
        topology.key(node, &mut key);
        key
    });
    keys.collect()
}

pub(crate) fn borrowed(keys: &[Vec<i64>]) -> Vec<(&[i64], usize)> {
    keys.iter().map(|key| (key.as_slice(), 1)).collect()
}
