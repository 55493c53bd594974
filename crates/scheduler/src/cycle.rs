//! One scheduling cycle by the plain algorithm, as a function of a pod and the cache: every node is filtered (or as many
//! as are enough), those that fit are scored, the best is taken. The class cache must come to the same answers.

use crate::cache::Cache;
use crate::framework::{Code, CycleState, MAX_SCORE, Points, PostFilter, PreFilter, Profile, Rejection};
use crate::node::{NodeId, NodeInfo};
use crate::pod::PodInfo;
use rand::RngExt;
use std::collections::BTreeMap;
use std::sync::Arc;

/// COMPAT: upstream's shares: among many nodes a good one is as good as the best one.
const MIN_FEASIBLE: usize = 100;
const MIN_PERCENT: usize = 5;

/// How many fitting nodes are enough to choose from. 0 percent is upstream's adaptive share.
pub(crate) fn enough(nodes: usize, percentage: usize) -> usize {
    if nodes < MIN_FEASIBLE {
        return nodes;
    }
    let percent = match percentage {
        0 => 50_usize.saturating_sub(nodes / 125).max(MIN_PERCENT),
        percent => percent,
    };
    (nodes * percent / 100).max(MIN_FEASIBLE)
}

/// Why a pod fits nowhere.
#[derive(Debug, Clone, Default)]
pub(crate) struct Diagnosis {
    pub(crate) message: String,
    /// The plugins that turned the pod away somewhere, by their numbers in the profile.
    pub(crate) rejected_by: u64,
    /// What PostFilter decided.
    pub(crate) post_filter: PostFilter,
    /// Something went wrong: the pod is not to blame.
    pub(crate) is_error: bool,
}

/// Where a pod goes, or why nowhere.
pub(crate) enum Outcome {
    Node { id: NodeId, state: CycleState },
    Nowhere(Diagnosis),
}

/// Statuses of the nodes on which a pod does not fit.
#[derive(Debug, Default)]
pub(crate) struct Statuses {
    pub(crate) nodes: Vec<(NodeId, Rejection)>,
    /// Of all nodes that are not listed.
    pub(crate) absent: Option<Rejection>,
}

impl Statuses {
    pub(crate) fn of(&self, id: NodeId) -> Option<&Rejection> {
        let listed = self.nodes.iter().find(|(one, _)| *one == id);
        listed.map(|(_, rejection)| rejection).or(self.absent.as_ref())
    }
}

/// A cycle in which nothing fit, for PostFilter plugins.
pub(crate) struct Failed<'a> {
    pub(crate) profile: &'a Profile,
    pub(crate) cache: &'a Cache,
    pub(crate) state: &'a CycleState,
    pub(crate) pod: &'a Arc<PodInfo>,
    pub(crate) statuses: &'a Statuses,
}

/// How often each reason was given.
pub(crate) fn count_reasons(nodes: usize, statuses: &Statuses) -> BTreeMap<&str, usize> {
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for reason in statuses
        .nodes
        .iter()
        .flat_map(|(_, rejection)| &rejection.reasons)
    {
        *reasons.entry(reason).or_default() += 1;
    }
    if statuses.nodes.len() < nodes {
        for reason in statuses.absent.iter().flat_map(|rejection| &rejection.reasons) {
            *reasons.entry(reason).or_default() += nodes - statuses.nodes.len();
        }
    }
    reasons
}

/// `0/3 nodes are available: 1 Insufficient cpu, 2 node(s) were unschedulable.`
pub(crate) fn fit_error(nodes: usize, reasons: &BTreeMap<&str, usize>, pre_filter: Option<&str>) -> String {
    let available = format!("0/{nodes} nodes are available:");
    if let Some(pre_filter) = pre_filter.filter(|text| !text.is_empty()) {
        return format!("{available} {pre_filter}.");
    }
    let mut counted: Vec<String> = reasons
        .iter()
        .map(|(reason, count)| format!("{count} {reason}"))
        .collect();
    counted.sort();
    if counted.is_empty() {
        return available;
    }
    format!("{available} {}.", counted.join(", "))
}

/// What PreFilter came to.
pub(crate) enum Prepared {
    /// The nodes to look at (`None`: all), and the plugins that narrowed them.
    Ready {
        names: Option<Vec<String>>,
        narrowed_by: u64,
    },
    Rejected(Rejection, usize),
}

/// Runs the PreFilter plugins that `wanted` selects.
pub(crate) fn pre_filter(
    profile: &Profile,
    cache: &Cache,
    pod: &PodInfo,
    state: &mut CycleState,
    wanted: impl Fn(usize) -> bool,
) -> Prepared {
    let mut names: Option<Vec<String>> = None;
    let mut narrowed_by = 0;
    for (number, enabled) in profile.at(Points::PRE_FILTER) {
        if !wanted(number) {
            continue;
        }
        match enabled.plugin.pre_filter(state, pod, cache) {
            Err(rejection) => return Prepared::Rejected(rejection.by(enabled.plugin.name()), number),
            Ok(PreFilter::Skip) => state.skip_filter |= 1 << number,
            Ok(PreFilter::AllNodes) => {}
            Ok(PreFilter::Nodes(of_plugin)) => {
                narrowed_by |= 1 << number;
                names = Some(match names {
                    None => of_plugin,
                    Some(before) => before
                        .into_iter()
                        .filter(|name| of_plugin.contains(name))
                        .collect(),
                });
                if names.as_ref().is_some_and(Vec::is_empty) {
                    let plugins = profile.names(narrowed_by).join(" ");
                    let message = format!("node(s) didn't satisfy plugin(s) [{plugins}] simultaneously");
                    return Prepared::Rejected(
                        Rejection::unresolvable(message).by(enabled.plugin.name()),
                        number,
                    );
                }
            }
        }
    }
    Prepared::Ready { names, narrowed_by }
}

/// A cycle between its steps: extenders are asked after [`Cycle::filter`] and after [`Cycle::scores`].
pub(crate) struct Cycle {
    pub(crate) state: CycleState,
    /// The nodes that passed the filters.
    pub(crate) fitting: Vec<NodeId>,
    pub(crate) statuses: Statuses,
    /// The plugins that turned the pod away somewhere, by their numbers in the profile.
    pub(crate) rejected_by: u64,
    /// The nodes to look at; `None`: all.
    names: Option<Vec<String>>,
    /// Why PreFilter rejected the pod everywhere.
    pre_filter: Option<String>,
}

impl Cycle {
    /// Runs PreFilter. An error is one that the pod is not to blame for, or that there are no nodes.
    pub(crate) fn begin(profile: &Profile, cache: &Cache, pod: &PodInfo) -> Result<Self, Diagnosis> {
        if cache.len() == 0 {
            // COMPAT: upstream's words for a cluster without nodes; a new node is what would help.
            return Err(Diagnosis {
                message: "no nodes available to schedule pods".to_owned(),
                post_filter: PostFilter {
                    nominate: Some(String::new()),
                    ..PostFilter::default()
                },
                ..Diagnosis::default()
            });
        }
        let mut cycle = Self {
            state: CycleState::default(),
            fitting: Vec::new(),
            statuses: Statuses::default(),
            rejected_by: 0,
            names: None,
            pre_filter: None,
        };
        match pre_filter(profile, cache, pod, &mut cycle.state, |_| true) {
            Prepared::Ready { names, narrowed_by } => {
                cycle.names = names;
                cycle.rejected_by = narrowed_by;
            }
            Prepared::Rejected(rejection, _) if rejection.code == Code::Error => {
                return Err(error(rejection.message()));
            }
            Prepared::Rejected(rejection, number) => {
                cycle.pre_filter = Some(rejection.message());
                cycle.statuses.absent = Some(rejection);
                cycle.rejected_by = 1 << number;
            }
        }
        Ok(cycle)
    }

    /// The node that a preemption made room on for the pod, if the pod fits there.
    pub(crate) fn nominated(&self, profile: &Profile, cache: &Cache, pod: &PodInfo) -> Option<NodeId> {
        let nominated = cache.nomination(&pod.uid).unwrap_or(&pod.nominated);
        if nominated.is_empty() || self.pre_filter.is_some() {
            return None;
        }
        let node = cache.by_name(nominated)?;
        let verdict = profile.run_filters_with_nominated(&self.state, pod, node, cache);
        verdict.is_ok().then_some(node.id)
    }

    /// Looks for `enough` nodes that fit, or for one if nobody compares them. `start` is where to begin with the nodes; it
    /// moves on, so that all get their turn.
    pub(crate) fn filter(
        &mut self,
        profile: &Profile,
        cache: &Cache,
        pod: &PodInfo,
        start: &mut usize,
        compared: bool,
    ) -> Result<(), Diagnosis> {
        if self.pre_filter.is_some() {
            return Ok(());
        }
        let candidates: Vec<&NodeInfo> = match &self.names {
            None => {
                let all: Vec<&NodeInfo> = cache.nodes().collect();
                let first = *start % all.len();
                all[first..].iter().chain(&all[..first]).copied().collect()
            }
            Some(names) => {
                let plugins = profile.names(self.rejected_by).join(" ");
                let reason = format!("node(s) didn't satisfy plugin(s) [{plugins}]");
                self.statuses.absent = Some(Rejection::unresolvable(reason));
                names.iter().filter_map(|name| cache.by_name(name)).collect()
            }
        };
        let wanted = if compared {
            enough(candidates.len(), profile.percentage_of_nodes_to_score)
        } else {
            1
        };
        for node in &candidates {
            if self.fitting.len() >= wanted {
                break;
            }
            match profile.run_filters_with_nominated(&self.state, pod, node, cache) {
                Ok(()) => self.fitting.push(node.id),
                Err(rejection) if rejection.code == Code::Error => return Err(error(rejection.message())),
                Err(rejection) => {
                    if let Some(number) = profile.number(rejection.plugin) {
                        self.rejected_by |= 1 << number;
                    }
                    self.statuses.nodes.push((node.id, rejection));
                }
            }
        }
        *start = (*start + self.fitting.len() + self.statuses.nodes.len()) % cache.len();
        Ok(())
    }

    /// The fitting nodes that still exist, with their scores.
    pub(crate) fn scores(&mut self, profile: &Profile, cache: &Cache, pod: &PodInfo) -> Vec<(NodeId, i64)> {
        let nodes: Vec<&NodeInfo> = self.fitting.iter().filter_map(|id| cache.get(*id)).collect();
        let scores = total_scores(profile, cache, pod, &mut self.state, &nodes);
        nodes.iter().map(|node| node.id).zip(scores).collect()
    }

    pub(crate) fn failed<'a>(
        &'a self,
        profile: &'a Profile,
        cache: &'a Cache,
        pod: &'a Arc<PodInfo>,
    ) -> Failed<'a> {
        Failed {
            profile,
            cache,
            state: &self.state,
            pod,
            statuses: &self.statuses,
        }
    }

    /// Asks the PostFilter plugins.
    pub(crate) fn post_filter(&self, profile: &Profile, cache: &Cache, pod: &Arc<PodInfo>) -> PostFilter {
        let failed = self.failed(profile, cache, pod);
        let mut plugins = profile.at(Points::POST_FILTER);
        let found = plugins.find_map(|(_, enabled)| enabled.plugin.post_filter(&failed));
        found.unwrap_or_default()
    }

    /// Why nothing fits among so many nodes.
    pub(crate) fn nowhere(&self, nodes: usize, post_filter: PostFilter) -> Diagnosis {
        let reasons = count_reasons(nodes, &self.statuses);
        let mut message = fit_error(nodes, &reasons, self.pre_filter.as_deref());
        if !post_filter.message.is_empty() {
            message = format!("{message} {}", post_filter.message);
        }
        Diagnosis {
            message,
            rejected_by: self.rejected_by,
            post_filter,
            is_error: false,
        }
    }
}

/// The whole cycle. `start` is where to begin with the nodes; it moves on, so that all get their turn.
pub(crate) fn schedule(profile: &Profile, cache: &Cache, pod: &Arc<PodInfo>, start: &mut usize) -> Outcome {
    let mut cycle = match Cycle::begin(profile, cache, pod) {
        Ok(cycle) => cycle,
        Err(diagnosis) => return Outcome::Nowhere(diagnosis),
    };
    if let Some(id) = cycle.nominated(profile, cache, pod) {
        let state = cycle.state;
        return Outcome::Node { id, state };
    }
    let compared = profile.at(Points::SCORE).next().is_some();
    if let Err(diagnosis) = cycle.filter(profile, cache, pod, start, compared) {
        return Outcome::Nowhere(diagnosis);
    }
    if cycle.fitting.is_empty() {
        let post_filter = cycle.post_filter(profile, cache, pod);
        return Outcome::Nowhere(cycle.nowhere(cache.len(), post_filter));
    }
    let scores = cycle.scores(profile, cache, pod);
    Outcome::Node {
        id: best(&scores),
        state: cycle.state,
    }
}

pub(crate) fn error(message: String) -> Diagnosis {
    Diagnosis {
        message,
        is_error: true,
        ..Diagnosis::default()
    }
}

/// The sum of weighted scores of each node.
pub(crate) fn total_scores(
    profile: &Profile,
    cache: &Cache,
    pod: &PodInfo,
    state: &mut CycleState,
    fitting: &[&NodeInfo],
) -> Vec<i64> {
    let mut totals = vec![0_i64; fitting.len()];
    if fitting.len() == 1 {
        return totals;
    }
    for (number, enabled) in profile.at(Points::PRE_SCORE) {
        if enabled.plugin.scores() && !enabled.plugin.pre_score(state, pod, fitting, cache) {
            state.skip_score |= 1 << number;
        }
    }
    for (number, enabled) in profile.at(Points::SCORE) {
        let plugin = &enabled.plugin;
        if !plugin.scores() || state.skip_score & (1 << number) != 0 {
            continue;
        }
        let mut scores: Vec<i64> = fitting
            .iter()
            .map(|node| plugin.score(state, pod, node))
            .collect();
        plugin.normalize(state, fitting, &mut scores);
        for (total, score) in totals.iter_mut().zip(scores) {
            *total += score.clamp(0, MAX_SCORE) * enabled.weight;
        }
    }
    totals
}

/// The node of the highest score; a random one among equals. There must be one.
pub(crate) fn best(scores: &[(NodeId, i64)]) -> NodeId {
    let top = scores.iter().map(|(_, score)| *score).max().unwrap_or(0);
    let equals: Vec<NodeId> = scores
        .iter()
        .filter(|(_, score)| *score == top)
        .map(|(id, _)| *id)
        .collect();
    equals[rand::rng().random_range(0..equals.len())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node_meta, plain_meta, pod};
    use crate::plugins::testing::profile;
    use serde_json::{Value, json};

    fn run(cache: &Cache, pod: &Arc<PodInfo>, start: &mut usize) -> Result<String, Diagnosis> {
        match schedule(&profile(), cache, pod, start) {
            Outcome::Node { id, .. } => Ok(cache.get(id).unwrap().name.to_string()),
            Outcome::Nowhere(diagnosis) => Err(diagnosis),
        }
    }

    fn wanting(name: &str, cpu: &str) -> Arc<PodInfo> {
        pod(
            name,
            json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}),
        )
    }

    #[tokio::test]
    async fn reasons_are_counted_by_node() {
        let mut cache = Cache::default();
        let status = |cpu: &str| json!({"allocatable": {"cpu": cpu, "memory": "1Gi", "pods": "10"}});
        cache.set_node(
            "a",
            node_meta("a", json!({"unschedulable": true}), json!({}), status("2")),
        );
        for name in ["b", "c"] {
            cache.set_node(name, node_meta(name, json!({}), json!({}), status("1")));
        }
        let diagnosis = run(&cache, &wanting("p", "1500m"), &mut 0).unwrap_err();
        assert_eq!(
            diagnosis.message,
            "0/3 nodes are available: 1 node(s) were unschedulable, 2 Insufficient cpu. preemption: 0/3 nodes are \
             available: 3 Preemption is not helpful for scheduling."
        );
        assert_eq!(
            profile().names(diagnosis.rejected_by),
            ["NodeUnschedulable", "NodeResourcesFit"]
        );
        assert_ne!(run(&cache, &wanting("p", "500m"), &mut 0).unwrap(), "a");
        let diagnosis = run(&Cache::default(), &wanting("p", "1"), &mut 0).unwrap_err();
        assert_eq!(diagnosis.message, "no nodes available to schedule pods");
    }

    #[tokio::test]
    async fn the_emptier_node_wins() {
        let mut cache = Cache::default();
        for name in ["full", "empty"] {
            cache.set_node(name, plain_meta(name));
        }
        let big =
            json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "1", "memory": "2Gi"}}}]});
        cache.place(pod("there", big), "full");
        for _ in 0..10 {
            assert_eq!(run(&cache, &pod("p", json!({})), &mut 0).unwrap(), "empty");
        }
    }

    #[tokio::test]
    async fn among_many_nodes_some_are_enough_and_all_get_their_turn() {
        let check = |nodes, expected| assert_eq!(enough(nodes, 0), expected, "{nodes}");
        check(3, 3);
        check(1000, 420);
        check(5000, 500);
        check(20_000, 1000);
        assert_eq!(enough(1000, 30), 300);
        let mut cache = Cache::default();
        for n in 0..250 {
            cache.set_node(&n.to_string(), plain_meta(&n.to_string()));
        }
        let mut start = 0;
        let mut starts = Vec::new();
        for _ in 0..3 {
            run(&cache, &pod("p", json!({})), &mut start).unwrap();
            starts.push(start);
        }
        assert_eq!(starts, [120, 240, 110]);
        let diagnosis = run(&cache, &wanting("p", "9"), &mut start).unwrap_err();
        assert!(
            diagnosis
                .message
                .starts_with("0/250 nodes are available: 250 Insufficient cpu. preemption:"),
            "{}",
            diagnosis.message
        );
        assert_eq!(start, 110);
    }

    #[tokio::test]
    async fn a_nominated_pod_keeps_its_room_and_gets_it() {
        let mut cache = Cache::default();
        cache.set_node("a", plain_meta("a"));
        let important = |name: &str, priority: i32| {
            let container = json!({"name": "c", "resources": {"requests": {"cpu": "2"}}});
            pod(name, json!({"priority": priority, "containers": [container]}))
        };
        cache.nominate(&important("first", 10), "a");
        assert!(
            run(&cache, &important("second", 5), &mut 0).is_err(),
            "the room is promised"
        );
        assert!(
            run(&cache, &important("third", 20), &mut 0).is_ok(),
            "the more important one may have it"
        );
        assert!(run(&cache, &important("first", 10), &mut 0).is_ok());
    }

    #[tokio::test]
    async fn names_narrow_the_nodes_and_the_message_says_so() {
        let mut cache = Cache::default();
        for name in ["a", "b", "c"] {
            cache.set_node(name, plain_meta(name));
        }
        let on = |name: &str, cpu: &str| -> Value {
            json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}],
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}]}}}})
        };
        assert_eq!(run(&cache, &pod("p", on("b", "1")), &mut 0).unwrap(), "b");
        let diagnosis = run(&cache, &pod("p", on("b", "5")), &mut 0).unwrap_err();
        assert!(
            diagnosis.message.starts_with(
                "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) didn't satisfy plugin(s) [NodeAffinity]."
            ),
            "{}",
            diagnosis.message
        );
    }
}
