//! Preemption for pods of one shape: what it would cost is kept per node, and the cheapest node is the first of a ranking.

use super::Class;
use crate::cache::Cache;
use crate::cycle::{Diagnosis, Failed, Statuses, fit_error};
use crate::framework::{Code, PostFilter, Profile, Rejection};
use crate::node::NodeId;
use crate::plugins::default_preemption::{Cost, DefaultPreemption, select_victims};
use crate::pod::PodInfo;
use rand::RngExt;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// How many nodes were rejected by a plugin with the same code for the same list of reasons.
#[derive(Default)]
pub(super) struct ReasonCounts(HashMap<Rejection, usize>);

impl ReasonCounts {
    pub(super) fn add(&mut self, rejection: &Rejection) {
        match self.0.get_mut(rejection) {
            Some(count) => *count += 1,
            None => {
                self.0.insert(rejection.clone(), 1);
            }
        }
    }

    pub(super) fn remove(&mut self, rejection: &Rejection) {
        if let Some(count) = self.0.get_mut(rejection) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(rejection);
            }
        }
    }

    fn plugins(&self) -> impl Iterator<Item = &'static str> {
        self.0.keys().map(|rejection| rejection.plugin)
    }

    /// `0/3 nodes are available: …`, with `rest` for the nodes that are not counted here.
    fn message(&self, nodes: usize, rest: Option<&str>) -> String {
        let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
        let mut counted = 0;
        for (rejection, count) in &self.0 {
            counted += count;
            for reason in &rejection.reasons {
                *reasons.entry(reason).or_default() += count;
            }
        }
        if let Some(rest) = rest.filter(|_| nodes > counted) {
            *reasons.entry(rest).or_default() += nodes - counted;
        }
        fit_error(nodes, &reasons, None)
    }
}

/// What making room on each node that preemption can help would cost, or why it cannot be made.
#[derive(Default)]
pub(super) struct Preemption {
    budgets_version: u64,
    nodes: HashMap<NodeId, Result<Cost, Rejection>>,
    /// Why room cannot be made on nodes.
    reasons: ReasonCounts,
    ranked: BTreeSet<(Cost, u32, NodeId)>,
    ties: HashMap<NodeId, u32>,
    /// Nodes to look at again.
    pub(super) stale: HashSet<NodeId>,
}

impl Preemption {
    fn forget(&mut self, id: NodeId) {
        let tie = self.ties.remove(&id).unwrap_or(0);
        match self.nodes.remove(&id) {
            Some(Ok(cost)) => {
                self.ranked.remove(&(cost, tie, id));
            }
            Some(Err(rejection)) => self.reasons.remove(&rejection),
            None => {}
        }
    }

    fn set(&mut self, id: NodeId, found: Result<Cost, Rejection>) {
        self.forget(id);
        match &found {
            Ok(cost) => {
                let tie = rand::rng().random();
                self.ties.insert(id, tie);
                self.ranked.insert((*cost, tie, id));
            }
            Err(rejection) => self.reasons.add(rejection),
        }
        self.nodes.insert(id, found);
    }
}

impl Class {
    /// What the plain algorithm says of a pod that nobody can make room for, because no pod is less important. It is put
    /// together from counts; `None` if they do not tell.
    pub(super) fn without_victims(&self, profile: &Profile, cache: &Cache) -> Option<Diagnosis> {
        let mut counts: Vec<(usize, Cow<'_, Rejection>, usize)> = Vec::new();
        for (rejection, count) in &self.reasons.0 {
            counts.push((
                profile.number(rejection.plugin)?,
                Cow::Borrowed(rejection),
                *count,
            ));
        }
        let counting = || {
            self.counted
                .iter()
                .filter(|one| one.filters && one.topology.filters())
        };
        // A plugin that comes later would not have been asked about a node that counts rule out.
        let first = counting().map(|one| one.number).min().unwrap_or(usize::MAX);
        if counts.iter().any(|(number, ..)| *number > first) {
            return None;
        }
        for group in self.groups.iter().filter(|group| !group.nodes.is_empty()) {
            let (number, rejection) = self.group_rejection(&group.key)?;
            counts.push((number, Cow::Owned(rejection), group.nodes.len()));
        }
        let (mut rejected_by, mut helpful) = (0, 0);
        let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
        for (number, rejection, count) in &counts {
            rejected_by |= 1_u64 << *number;
            match rejection.code {
                Code::Unschedulable => helpful += count,
                Code::Unresolvable => {}
                Code::Error => return None,
            }
            for reason in &rejection.reasons {
                *reasons.entry(reason).or_default() += count;
            }
        }
        let nodes = cache.len();
        let message = fit_error(nodes, &reasons, None);
        let post_filter = if self.example.shape.never_preempts {
            PostFilter {
                message: "preemption: not eligible due to preemptionPolicy=Never.".to_owned(),
                ..PostFilter::default()
            }
        } else {
            let mut reasons = BTreeMap::from([
                ("No preemption victims found for incoming pod", helpful),
                ("Preemption is not helpful for scheduling", nodes - helpful),
            ]);
            reasons.retain(|_, count| *count > 0);
            PostFilter {
                nominate: Some(String::new()),
                victims: Vec::new(),
                message: format!("preemption: {}", fit_error(nodes, &reasons, None)),
            }
        };
        Some(Diagnosis {
            message: format!("{message} {}", post_filter.message),
            rejected_by,
            post_filter,
            is_error: false,
        })
    }

    /// What the plain algorithm's diagnosis and preemption come to, from what is kept per node.
    pub(super) fn preempt(
        &mut self,
        profile: &Profile,
        cache: &Cache,
        pod: &Arc<PodInfo>,
        plugin: &DefaultPreemption,
    ) -> Diagnosis {
        let mut rejected_by = 0;
        for plugin in self.reasons.plugins() {
            rejected_by |= profile.number(plugin).map_or(0, |number| 1 << number);
        }
        let message = self.reasons.message(cache.len(), None);
        let finish = |post_filter: PostFilter| {
            let message = if post_filter.message.is_empty() {
                message.clone()
            } else {
                format!("{message} {}", post_filter.message)
            };
            Diagnosis {
                message,
                rejected_by,
                post_filter,
                is_error: false,
            }
        };
        let own = cache.nomination(&pod.uid).unwrap_or(&pod.nominated);
        let mut statuses = Statuses::default();
        if let Some(node) = cache.by_name(own)
            && let Some(rejection) = self.rejections.get(&node.id)
        {
            statuses.nodes.push((node.id, rejection.clone()));
        }
        let failed = Failed {
            profile,
            cache,
            state: &self.state,
            pod,
            statuses: &statuses,
        };
        if let Some(reason) = plugin.not_eligible(&failed) {
            return finish(PostFilter {
                message: format!("preemption: {reason}"),
                ..PostFilter::default()
            });
        }
        let budgets = plugin.budgets();
        let version = plugin.listers.budgets_version();
        let mut ranking = self
            .preemption
            .take()
            .filter(|known| known.budgets_version == version);
        let ranking_now = ranking.get_or_insert_with(|| Preemption {
            budgets_version: version,
            stale: self.rejections.keys().copied().collect(),
            ..Preemption::default()
        });
        // A node that this pod itself is nominated to looks different to the pod than to others of its shape.
        let own_id = cache.by_name(own).map(|node| node.id);
        for id in std::mem::take(&mut ranking_now.stale).into_iter().chain(own_id) {
            let helpful = self
                .rejections
                .get(&id)
                .is_some_and(|one| one.code == Code::Unschedulable);
            match cache.get(id).filter(|_| helpful) {
                Some(node) => {
                    let found = select_victims(&failed, node, &budgets);
                    ranking_now.set(id, found.map(|candidate| candidate.cost()));
                }
                None => ranking_now.forget(id),
            }
        }
        if let Some(id) = own_id {
            ranking_now.stale.insert(id);
        }
        let best = ranking_now.ranked.first().map(|(_, _, id)| *id);
        let best = best.and_then(|id| select_victims(&failed, cache.get(id)?, &budgets).ok());
        let post_filter = match best {
            Some(best) => PostFilter {
                nominate: Some(best.node.to_string()),
                victims: best.victims,
                message: String::new(),
            },
            None => {
                let rest = Some("Preemption is not helpful for scheduling");
                PostFilter {
                    nominate: Some(String::new()),
                    victims: Vec::new(),
                    message: format!("preemption: {}", ranking_now.reasons.message(cache.len(), rest)),
                }
            }
        };
        self.preemption = ranking;
        finish(post_filter)
    }
}
