//! The extension points. A plugin implements those it needs; the rest pass.
//!
//! Order of a pod's way: PreEnqueue · QueueSort · PreFilter · Filter · PostFilter (only when nothing fits) · PreScore ·
//! Score · NormalizeScore · Reserve · Permit (these in one cycle, without I/O) · PreBind · Bind · PostBind (in a task of
//! the pod's own).

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::node::NodeInfo;
use crate::pod::PodInfo;
use async_trait::async_trait;
use std::any::Any;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

/// Stands among the plugins that rejected a pod for the extenders: nobody knows what would help them, so everything may.
pub(crate) const EXTENDERS: u64 = 1 << 63;

/// Scores of a plugin after normalisation lie in `0..=MAX_SCORE`.
pub(crate) const MAX_SCORE: i64 = 100;

/// What kind of a no it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Code {
    /// Removing pods from the node may help.
    Unschedulable,
    /// Nothing that preemption does helps.
    Unresolvable,
    /// Something went wrong, for no fault of the pod.
    Error,
}

/// Why a node, or the whole cluster, is not for a pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Rejection {
    pub(crate) code: Code,
    pub(crate) reasons: Vec<Cow<'static, str>>,
    /// Filled in by the framework.
    pub(crate) plugin: &'static str,
}

impl Rejection {
    pub(crate) fn new(code: Code, reason: impl Into<Cow<'static, str>>) -> Self {
        Self {
            code,
            reasons: vec![reason.into()],
            plugin: "",
        }
    }

    pub(crate) fn unschedulable(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::Unschedulable, reason)
    }

    pub(crate) fn unresolvable(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::Unresolvable, reason)
    }

    pub(crate) fn error(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::Error, reason)
    }

    pub(crate) fn message(&self) -> String {
        self.reasons.join(", ")
    }

    pub(crate) fn by(mut self, plugin: &'static str) -> Self {
        self.plugin = plugin;
        self
    }
}

pub(crate) type Verdict = Result<(), Rejection>;

/// What a PreFilter plugin says of a pod that it does not reject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PreFilter {
    /// The plugin's Filter has nothing to say of this pod.
    Skip,
    AllNodes,
    /// Only these can fit.
    Nodes(Vec<String>),
}

/// What a Permit plugin says.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(dead_code, reason = "no default plugin waits; a profile of one's own may")]
pub(crate) enum Permit {
    Allow,
    /// The pod keeps its room until somebody allows it, at most this long.
    Wait(Duration),
    Reject(Rejection),
}

/// How the class cache may use a plugin for a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The plugin has nothing to say.
    None,
    /// Filter and score depend on the pod's shape and on the one node only.
    Local,
    /// They depend on the pod itself too: its volumes, its claims. Asked for the nodes that are about to be chosen.
    PerPod,
    /// They depend on counts over topology domains; [`Plugin::topology`] keeps these.
    Topology,
    /// Unknown: the cache leaves such pods to the plain algorithm.
    Opaque,
}

/// What a plugin remembers of a pod for the time of a cycle.
pub(crate) trait StateData: Any + Send + Sync {
    fn clone_boxed(&self) -> Box<dyn StateData>;
    fn as_any(&self) -> &dyn Any;
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

impl<T: Any + Send + Sync + Clone> StateData for T {
    fn clone_boxed(&self) -> Box<dyn StateData> {
        Box::new(self.clone())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// The memory of one cycle: per plugin one value for Filter and one for Score.
#[derive(Default)]
pub(crate) struct CycleState {
    entries: Vec<(&'static str, Box<dyn StateData>)>,
    /// By number of the plugin in its profile: PreFilter said that Filter has nothing to say.
    pub(crate) skip_filter: u64,
    /// Likewise of PreScore.
    pub(crate) skip_score: u64,
}

impl Clone for CycleState {
    fn clone(&self) -> Self {
        let entries = self
            .entries
            .iter()
            .map(|(key, data)| (*key, (**data).clone_boxed()));
        Self {
            entries: entries.collect(),
            ..*self
        }
    }
}

impl CycleState {
    pub(crate) fn write<T: StateData>(&mut self, key: &'static str, data: T) {
        self.entries.retain(|(known, _)| *known != key);
        self.entries.push((key, Box::new(data)));
    }

    pub(crate) fn read<T: 'static>(&self, key: &'static str) -> Option<&T> {
        let (_, data) = self.entries.iter().find(|(known, _)| *known == key)?;
        (**data).as_any().downcast_ref()
    }

    pub(crate) fn read_mut<T: 'static>(&mut self, key: &'static str) -> Option<&mut T> {
        let (_, data) = self.entries.iter_mut().find(|(known, _)| *known == key)?;
        (**data).as_any_mut().downcast_mut()
    }
}

/// What PostFilter found: a node on which room can be made.
#[derive(Debug, Clone, Default)]
pub(crate) struct PostFilter {
    /// `Some("")` takes an earlier nomination back.
    pub(crate) nominate: Option<String>,
    pub(crate) victims: Vec<Arc<PodInfo>>,
    pub(crate) message: String,
}

/// Counts over topology domains that a plugin keeps for pods of one shape. Nodes with equal keys get equal answers.
pub(crate) trait Topology: Send {
    /// The node changed, or is gone. Other nodes whose key changed with it are pushed to `affected`.
    fn update(&mut self, id: u32, node: Option<&NodeInfo>, affected: &mut Vec<u32>);
    /// All nodes were shown once: from now on keys are kept.
    fn seal(&mut self) {}
    /// True if what the key is made of has changed since: everything must be read anew.
    fn is_stale(&self) -> bool;
    /// Adds this plugin's part of the node's key.
    fn key(&self, node: &NodeInfo, key: &mut Vec<i64>);
    /// How many numbers `key` adds.
    fn width(&self) -> usize;
    /// False if `filter` lets every node pass.
    fn filters(&self) -> bool;
    fn filter(&self, key: &[i64]) -> Verdict;
    /// Called once a cycle before `score`, with the keys of all feasible nodes and how many nodes have each.
    fn begin_score(&mut self, keys: &[(&[i64], usize)]) -> bool;
    fn score(&self, key: &[i64]) -> i64;
    fn normalize(&self, keys: &[(&[i64], usize)], scores: &mut [i64]);
}

#[async_trait]
pub(crate) trait Plugin: Send + Sync {
    /// Upstream's name of the plugin.
    fn name(&self) -> &'static str;

    /// The queueing hint: may this event make a pod fit that the plugin rejected?
    fn hint(&self, _pod: &PodInfo, _event: &ClusterEvent) -> bool {
        false
    }

    /// May the pod enter the queue at all?
    fn pre_enqueue(&self, _pod: &PodInfo) -> Verdict {
        Ok(())
    }

    /// The pod's place in the queue, smallest first, if this plugin orders it.
    fn queue_sort(&self, _pod: &PodInfo) -> Option<i64> {
        None
    }

    fn pre_filter(
        &self,
        _state: &mut CycleState,
        _pod: &PodInfo,
        _cache: &Cache,
    ) -> Result<PreFilter, Rejection> {
        Ok(PreFilter::AllNodes)
    }

    /// `node` has just got `_added`: what PreFilter remembers must follow.
    fn add_pod(&self, _state: &mut CycleState, _pod: &PodInfo, _added: &PodInfo, _node: &NodeInfo) {}

    /// `node` has just lost `_removed`.
    fn remove_pod(&self, _state: &mut CycleState, _pod: &PodInfo, _removed: &PodInfo, _node: &NodeInfo) {}

    fn filter(&self, _state: &CycleState, _pod: &PodInfo, _node: &NodeInfo) -> Verdict {
        Ok(())
    }

    /// Called when nothing fits. `None`: this plugin has no say.
    fn post_filter(&self, _run: &crate::cycle::Failed) -> Option<PostFilter> {
        None
    }

    /// The plugin itself, if it is the one that preempts: the class cache keeps what it would cost.
    fn preemption(&self) -> Option<&crate::plugins::default_preemption::DefaultPreemption> {
        None
    }

    /// True if the plugin scores, which is when its weight counts.
    fn scores(&self) -> bool {
        false
    }

    /// False if scoring this pod would tell no nodes apart.
    fn pre_score(
        &self,
        _state: &mut CycleState,
        _pod: &PodInfo,
        _nodes: &[&NodeInfo],
        _cache: &Cache,
    ) -> bool {
        true
    }

    fn score(&self, _state: &CycleState, _pod: &PodInfo, _node: &NodeInfo) -> i64 {
        0
    }

    /// True if `normalize` does something: then scores of one node depend on those of others.
    fn normalizes(&self) -> bool {
        false
    }

    /// Brings raw scores into `0..=MAX_SCORE`. May depend on which scores there are, not on how often.
    fn normalize(&self, _state: &CycleState, _nodes: &[&NodeInfo], _scores: &mut [i64]) {}

    /// May depend on the pod's shape, its volumes and claims, and whether it names a node; not on anything else of it.
    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::Opaque
    }

    /// For [`Scope::Topology`]: the counts for pods like this one, empty. `None` if the plugin has nothing to say.
    fn topology(&self, _pod: &PodInfo, _cache: &Cache) -> Option<Box<dyn Topology>> {
        None
    }

    /// Changes at least as often as `topology_version`, and is cheap to ask for.
    fn topology_epoch(&self, _pod: &PodInfo) -> u64 {
        0
    }

    /// Changes when topologies made earlier for pods like this one no longer hold.
    fn topology_version(&self, _pod: &PodInfo) -> u64 {
        0
    }

    fn reserve(&self, _state: &mut CycleState, _pod: &PodInfo, _node: &NodeInfo) -> Verdict {
        Ok(())
    }

    fn unreserve(&self, _state: &CycleState, _pod: &PodInfo, _node: &str) {}

    fn permit(&self, _state: &CycleState, _pod: &PodInfo, _node: &str) -> Permit {
        Permit::Allow
    }

    /// True if PreBind will take long enough that the pod's node should be shown as nominated meanwhile.
    fn pre_bind_waits(&self, _state: &CycleState, _pod: &PodInfo, _node: &str) -> bool {
        false
    }

    async fn pre_bind(&self, _state: &CycleState, _pod: &PodInfo, _node: &str) -> Verdict {
        Ok(())
    }

    /// `None`: not mine. The first plugin with an answer binds.
    async fn bind(
        &self,
        _state: &CycleState,
        _pod: &PodInfo,
        _node: &str,
    ) -> Option<Result<(), kube::Error>> {
        None
    }

    fn post_bind(&self, _state: &CycleState, _pod: &PodInfo, _node: &str) {}
}

/// Scales so that the best raw score becomes [`MAX_SCORE`]; `reverse` when fewer is better.
pub(crate) fn scale_to_max(scores: &mut [i64], reverse: bool) {
    let best = scores.iter().copied().max().unwrap_or(0);
    for score in scores {
        let scaled = if best == 0 { 0 } else { *score * MAX_SCORE / best };
        *score = if reverse { MAX_SCORE - scaled } else { scaled };
    }
}

/// A plugin in a profile.
pub(crate) struct Enabled {
    pub(crate) plugin: Arc<dyn Plugin>,
    pub(crate) weight: i64,
    /// The extension points that it is enabled for.
    pub(crate) points: Points,
}

/// A set of extension points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Points(pub(crate) u32);

impl Points {
    pub(crate) const ALL: Points = Points(u32::MAX);
    pub(crate) const NONE: Points = Points(0);
    pub(crate) const PRE_ENQUEUE: Points = Points(1);
    pub(crate) const QUEUE_SORT: Points = Points(1 << 1);
    pub(crate) const PRE_FILTER: Points = Points(1 << 2);
    pub(crate) const FILTER: Points = Points(1 << 3);
    pub(crate) const POST_FILTER: Points = Points(1 << 4);
    pub(crate) const PRE_SCORE: Points = Points(1 << 5);
    pub(crate) const SCORE: Points = Points(1 << 6);
    pub(crate) const RESERVE: Points = Points(1 << 7);
    pub(crate) const PERMIT: Points = Points(1 << 8);
    pub(crate) const PRE_BIND: Points = Points(1 << 9);
    pub(crate) const BIND: Points = Points(1 << 10);
    pub(crate) const POST_BIND: Points = Points(1 << 11);

    pub(crate) fn has(self, point: Points) -> bool {
        self.0 & point.0 != 0
    }

    pub(crate) fn with(self, point: Points) -> Points {
        Points(self.0 | point.0)
    }

    pub(crate) fn without(self, point: Points) -> Points {
        Points(self.0 & !point.0)
    }
}

/// A profile: the plugins for pods of one scheduler name. At most 63, so that a set of them is one number, with
/// [`EXTENDERS`].
pub(crate) struct Profile {
    pub(crate) scheduler_name: String,
    pub(crate) plugins: Vec<Enabled>,
    /// 0 is upstream's adaptive share.
    pub(crate) percentage_of_nodes_to_score: usize,
}

impl Profile {
    /// The plugins of one extension point, with their numbers.
    pub(crate) fn at(&self, point: Points) -> impl Iterator<Item = (usize, &Enabled)> {
        let all = self.plugins.iter().enumerate();
        all.filter(move |(_, enabled)| enabled.points.has(point))
    }

    pub(crate) fn number(&self, name: &str) -> Option<usize> {
        self.plugins
            .iter()
            .position(|enabled| enabled.plugin.name() == name)
    }

    pub(crate) fn names(&self, set: u64) -> Vec<&'static str> {
        let numbered = self.plugins.iter().enumerate();
        numbered
            .filter(|(number, _)| set & (1 << number) != 0)
            .map(|(_, enabled)| enabled.plugin.name())
            .collect()
    }

    /// Runs the Filter plugins on a node as it stands.
    pub(crate) fn run_filters(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        for (number, enabled) in self.at(Points::FILTER) {
            if state.skip_filter & (1 << number) != 0 {
                continue;
            }
            let verdict = enabled.plugin.filter(state, pod, node);
            verdict.map_err(|rejection| rejection.by(enabled.plugin.name()))?;
        }
        Ok(())
    }

    /// Runs the Filter plugins on a node as it will be with the pods that are nominated to it and are at least as
    /// important, and then as it is: the pod must fit both ways, for these may come or not.
    pub(crate) fn run_filters_with_nominated(
        &self,
        state: &CycleState,
        pod: &PodInfo,
        node: &NodeInfo,
        cache: &Cache,
    ) -> Verdict {
        let nominated = cache.nominated_on(&node.name);
        let counts = |one: &&Arc<PodInfo>| one.priority() >= pod.priority() && one.uid != pod.uid;
        if nominated.iter().any(|one| counts(&one)) {
            let (mut state, mut with) = (state.clone(), node.clone());
            for one in nominated.iter().filter(counts) {
                with.add_pod(Arc::clone(one));
                self.run_add_pod(&mut state, pod, one, &with);
            }
            self.run_filters(&state, pod, &with)?;
        }
        self.run_filters(state, pod, node)
    }

    pub(crate) fn run_add_pod(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        added: &PodInfo,
        node: &NodeInfo,
    ) {
        for (number, enabled) in self.at(Points::PRE_FILTER) {
            if state.skip_filter & (1 << number) == 0 {
                enabled.plugin.add_pod(state, pod, added, node);
            }
        }
    }

    pub(crate) fn run_remove_pod(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        removed: &PodInfo,
        node: &NodeInfo,
    ) {
        for (number, enabled) in self.at(Points::PRE_FILTER) {
            if state.skip_filter & (1 << number) == 0 {
                enabled.plugin.remove_pod(state, pod, removed, node);
            }
        }
    }
}
