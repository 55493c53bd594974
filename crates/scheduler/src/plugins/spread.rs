//! What topology spread constraints count for pods of one shape: pods in each domain, on the nodes that each constraint
//! includes.

use crate::cache::Cache;
use crate::framework::{MAX_SCORE, Rejection, Topology, Verdict};
use crate::node::{NodeId, NodeInfo, NodeMeta};
use crate::plugins::domains::{Domains, HOSTNAME, MISSING, ShapeMemo};
use crate::plugins::node_affinity::selects;
use crate::pod::{Parts, PodInfo, Shape, merge_keys};
use k8s_openapi::api::core::v1::TopologySpreadConstraint;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use skiff_pods::{labels, taints};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

#[derive(Clone)]
pub(crate) struct Constraint {
    pub(crate) max_skew: i64,
    min_domains: usize,
    pub(crate) selector: Option<LabelSelector>,
    honours_affinity: bool,
    pub(crate) honours_taints: bool,
    is_hostname: bool,
    matches_itself: bool,
}

impl Constraint {
    pub(crate) fn new(
        read: &TopologySpreadConstraint,
        shape: &Parts,
        default_selector: Option<&LabelSelector>,
    ) -> Self {
        let mut selector = default_selector.or(read.label_selector.as_ref()).cloned();
        if let Some(selector) = &mut selector {
            merge_keys(selector, read.match_label_keys.as_deref(), &shape.labels, "In");
        }
        Self {
            max_skew: read.max_skew.into(),
            min_domains: usize::try_from(read.min_domains.unwrap_or(1)).unwrap_or(1),
            honours_affinity: read.node_affinity_policy.as_deref() != Some("Ignore"),
            honours_taints: read.node_taints_policy.as_deref() == Some("Honor"),
            is_hostname: read.topology_key == HOSTNAME,
            matches_itself: selector
                .as_ref()
                .is_some_and(|selector| labels::matches(selector, Some(&shape.labels))),
            selector,
        }
    }

    /// COMPAT: an empty selector counts no pods.
    pub(crate) fn counts(&self, shape: &Parts) -> bool {
        self.selector
            .as_ref()
            .is_some_and(|one| !labels::is_empty(one) && labels::matches(one, Some(&shape.labels)))
    }

    /// Whether pods on the node are counted at all.
    pub(crate) fn includes(&self, shape: &Parts, node: &NodeMeta) -> bool {
        (!self.honours_affinity || selects(shape, node))
            && (!self.honours_taints
                || taints::find_untolerated(node.taints(), &shape.tolerations, taints::forbids_scheduling)
                    .is_none())
    }
}

/// A constraint with the pods it counts in each domain.
#[derive(Clone)]
pub(crate) struct Counted {
    pub(crate) constraint: Constraint,
    pub(crate) domains: Domains,
    /// How many included nodes each domain has.
    members: Vec<usize>,
    /// How many domains with included nodes have each count.
    pub(crate) histogram: BTreeMap<i64, usize>,
}

impl Counted {
    fn new(read: &TopologySpreadConstraint, shape: &Parts, default: Option<&LabelSelector>) -> Self {
        Self {
            constraint: Constraint::new(read, shape, default),
            domains: Domains::new(read.topology_key.as_str().into()),
            members: Vec::new(),
            histogram: BTreeMap::new(),
        }
    }

    fn forget(&mut self, count: i64) {
        if let Some(domains) = self.histogram.get_mut(&count) {
            *domains -= 1;
            if *domains == 0 {
                self.histogram.remove(&count);
            }
        }
    }

    /// Adds a node with its pods to its domain, or takes it away (`sign` -1).
    fn change(&mut self, domain: u32, pods: i64, sign: i64, affected: &mut Vec<NodeId>) {
        let at = domain as usize;
        if self.members.len() <= at {
            self.members.resize(at + 1, 0);
        }
        if self.members[at] > 0 {
            self.forget(self.domains.counts[at]);
        }
        self.domains.add(domain, sign * pods, affected);
        self.members[at] = self.members[at].saturating_add_signed(sign as isize);
        if self.members[at] > 0 {
            *self.histogram.entry(self.domains.counts[at]).or_default() += 1;
        }
    }

    fn domain_count(&self) -> usize {
        self.histogram.values().sum()
    }

    pub(crate) fn is_included(&self, domain: u32) -> bool {
        self.members
            .get(domain as usize)
            .is_some_and(|members| *members > 0)
    }
}

/// What one node adds to one constraint: its domain, and the pods counted there.
#[derive(Clone, Copy)]
struct Share {
    domain: u32,
    pods: i64,
}

#[derive(Clone)]
struct NodeShares {
    /// Hard constraints first, then soft ones.
    shares: Box<[Option<Share>]>,
    /// Of soft constraints by hostname: pods on the node, included or not.
    on_node: Box<[i64]>,
}

/// All that is counted for pods of one shape.
#[derive(Clone)]
pub(crate) struct Spread {
    pub(crate) shape: Arc<Shape>,
    pub(crate) hard: Vec<Counted>,
    soft: Vec<Counted>,
    requires_all_labels: bool,
    nodes: Vec<Option<NodeShares>>,
    /// By shape: one bit for each constraint that counts its pods.
    counted: ShapeMemo<u64>,
    weights: Vec<f64>,
}

impl Spread {
    /// `default` is the selector of the defaults, for pods that have no constraints of their own.
    pub(crate) fn new(
        shape: &Arc<Shape>,
        defaults: &[TopologySpreadConstraint],
        default: Option<&LabelSelector>,
        system_defaulted: bool,
    ) -> Option<Self> {
        let own = &shape.spread;
        let constraints = if !own.is_empty() {
            own.iter()
        } else if default.is_some() {
            defaults.iter()
        } else {
            return None;
        };
        let (mut hard, mut soft) = (Vec::new(), Vec::new());
        for read in constraints.take(32) {
            let counted = Counted::new(read, shape, default);
            if read.when_unsatisfiable == "DoNotSchedule" {
                hard.push(counted);
            } else {
                soft.push(counted);
            }
        }
        (!hard.is_empty() || !soft.is_empty()).then(|| Self {
            shape: Arc::clone(shape),
            hard,
            soft,
            requires_all_labels: !own.is_empty() || !system_defaulted,
            nodes: Vec::new(),
            counted: ShapeMemo::default(),
            weights: Vec::new(),
        })
    }

    pub(crate) fn over(mut self, cache: &Cache) -> Self {
        let mut affected = Vec::new();
        for node in cache.nodes() {
            self.update(node.id, Some(node), &mut affected);
            affected.clear();
        }
        self
    }

    pub(crate) fn has_all(counted: &[Counted], node: &NodeInfo) -> bool {
        counted
            .iter()
            .all(|one| node.label(&one.domains.topology_key).is_some())
    }

    /// One bit for each constraint, hard ones first, that counts the pod.
    fn counted_by(&mut self, pod: &PodInfo) -> u64 {
        if pod.deleting || pod.shape.namespace != self.shape.namespace {
            return 0;
        }
        let constraints = || self.hard.iter().chain(&self.soft).map(|one| &one.constraint);
        self.counted.get(&pod.shape, |shape| {
            let bits = constraints().enumerate();
            bits.fold(0, |set, (bit, one)| set | u64::from(one.counts(shape)) << bit)
        })
    }

    fn read(&mut self, node: &NodeInfo) -> NodeShares {
        let (hard, soft) = (self.hard.len(), self.soft.len());
        let mut pods = vec![0_i64; hard + soft];
        for pod in &node.pods {
            let mut set = self.counted_by(pod);
            while set != 0 {
                pods[set.trailing_zeros() as usize] += 1;
                set &= set - 1;
            }
        }
        let all_hard = Self::has_all(&self.hard, node);
        let all_soft = !self.requires_all_labels || Self::has_all(&self.soft, node);
        let mut shares = Vec::with_capacity(hard + soft);
        for (index, pods) in pods.iter().enumerate() {
            let (one, eligible) = if index < hard {
                (&mut self.hard[index], all_hard)
            } else {
                (&mut self.soft[index - hard], all_soft)
            };
            let domain = one.domains.number(node);
            let included = eligible && one.constraint.includes(&self.shape, &node.meta);
            shares.push(
                domain
                    .filter(|_| included)
                    .map(|domain| Share { domain, pods: *pods }),
            );
        }
        NodeShares {
            shares: shares.into(),
            on_node: pods[hard..].into(),
        }
    }

    fn counted_mut(&mut self, index: usize) -> &mut Counted {
        let hard = self.hard.len();
        if index < hard {
            &mut self.hard[index]
        } else {
            &mut self.soft[index - hard]
        }
    }

    /// `counts` gives the count of a hard constraint's domain and the least of all domains.
    pub(crate) fn filter_by(&self, key: &[i64], counts: impl Fn(usize, i64) -> (i64, i64)) -> Verdict {
        for (index, (one, part)) in self.hard.iter().zip(key).enumerate() {
            if *part == MISSING {
                return Err(Rejection::unresolvable(
                    "node(s) didn't match pod topology spread constraints (missing required label)",
                ));
            }
            let (count, mut least) = counts(index, *part);
            if one.domain_count() < one.constraint.min_domains {
                least = 0;
            }
            let own = i64::from(one.constraint.matches_itself);
            if count + own - least > one.constraint.max_skew {
                return Err(Rejection::unschedulable(
                    "node(s) didn't match pod topology spread constraints",
                ));
            }
        }
        Ok(())
    }
}

pub(crate) fn least(histogram: &BTreeMap<i64, usize>) -> i64 {
    // COMPAT: without any domain upstream's least is the largest number there is.
    histogram.keys().next().copied().unwrap_or(i64::from(i32::MAX))
}

impl Topology for Spread {
    fn update(&mut self, id: u32, node: Option<&NodeInfo>, affected: &mut Vec<u32>) {
        if self.nodes.len() <= id as usize {
            self.nodes.resize(id as usize + 1, None);
        }
        let before = self.nodes[id as usize].take();
        for (index, share) in before.iter().flat_map(|b| b.shares.iter().enumerate()) {
            if let Some(Share { domain, pods }) = share {
                self.counted_mut(index).change(*domain, *pods, -1, affected);
            }
        }
        let Some(node) = node else { return };
        let now = self.read(node);
        for (index, share) in now.shares.iter().enumerate() {
            if let Some(Share { domain, pods }) = share {
                self.counted_mut(index).change(*domain, *pods, 1, affected);
            }
        }
        self.nodes[id as usize] = Some(now);
    }

    fn is_stale(&self) -> bool {
        false
    }

    fn key(&self, node: &NodeInfo, key: &mut Vec<i64>) {
        key.extend(self.hard.iter().map(|one| one.domains.part(node)));
        let known = self.nodes.get(node.id as usize).and_then(Option::as_ref);
        for (index, one) in self.soft.iter().enumerate() {
            key.push(if one.constraint.is_hostname {
                let on_node = known.map_or(0, |known| known.on_node[index]);
                node.label(HOSTNAME).map_or(MISSING, |_| on_node)
            } else {
                one.domains.part(node)
            });
        }
        let ignored = self.requires_all_labels && !Self::has_all(&self.soft, node);
        key.push(i64::from(ignored));
    }

    fn width(&self) -> usize {
        self.hard.len() + self.soft.len() + 1
    }

    fn filters(&self) -> bool {
        !self.hard.is_empty()
    }

    fn filter(&self, key: &[i64]) -> Verdict {
        self.filter_by(key, |index, part| {
            let one = &self.hard[index];
            (one.domains.count(part), least(&one.histogram))
        })
    }

    #[expect(clippy::cast_precision_loss, reason = "numbers of domains")]
    fn begin_score(&mut self, keys: &[(&[i64], usize)]) -> bool {
        if self.soft.is_empty() {
            return false;
        }
        let (hard, soft) = (self.hard.len(), self.soft.len());
        let counted = || keys.iter().filter(|(key, _)| key[hard + soft] == 0);
        let weights = self.soft.iter().enumerate().map(|(index, one)| {
            let size = if one.constraint.is_hostname {
                counted().map(|(_, nodes)| nodes).sum()
            } else {
                counted()
                    .map(|(key, _)| key[hard + index])
                    .collect::<HashSet<_>>()
                    .len()
            };
            ((size + 2) as f64).ln()
        });
        self.weights = weights.collect();
        true
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "numbers of pods"
    )]
    fn score(&self, key: &[i64]) -> i64 {
        let (hard, soft) = (self.hard.len(), self.soft.len());
        if key[hard + soft] != 0 {
            return 0;
        }
        let mut score = 0.0;
        for ((one, part), weight) in self.soft.iter().zip(&key[hard..]).zip(&self.weights) {
            if *part == MISSING {
                continue;
            }
            let count = if one.constraint.is_hostname {
                *part
            } else {
                one.domains.count(*part)
            };
            score += count as f64 * weight + (one.constraint.max_skew - 1) as f64;
        }
        score.round() as i64
    }

    fn normalize(&self, keys: &[(&[i64], usize)], scores: &mut [i64]) {
        let flag = self.hard.len() + self.soft.len();
        let ignored = |at: usize| keys[at].0[flag] != 0;
        let counted = || {
            scores
                .iter()
                .enumerate()
                .filter(|(at, _)| !ignored(*at))
                .map(|(_, s)| *s)
        };
        let (min, max) = (counted().min().unwrap_or(0), counted().max().unwrap_or(0).max(0));
        for (at, score) in scores.iter_mut().enumerate() {
            *score = if ignored(at) {
                0
            } else if max == 0 {
                MAX_SCORE
            } else {
                MAX_SCORE * (max + min - *score) / max
            };
        }
    }
}
