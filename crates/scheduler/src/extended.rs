//! The cycle of a pod that extenders have a say in: the steps of the plain algorithm, with calls between them. The cache is
//! not held while an extender is asked, so what was found is looked at again afterwards. The class cache has no part in it.

use crate::cycle::{Cycle, Diagnosis, best, error};
use crate::extender::{Extender, ExtenderError, NodesArg, VictimsArg};
use crate::framework::{Code, EXTENDERS, Points, PostFilter, Profile, Rejection};
use crate::node::NodeId;
use crate::plugins::default_preemption::{Candidate, DefaultPreemption};
use crate::pod::PodInfo;
use crate::run::{Decided, Scheduler};
use futures::future::join_all;
use k8s_openapi::api::core::v1::{Node, Pod};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Fitting nodes by id and name.
type Named = Vec<(NodeId, Arc<str>)>;

/// A pod, with those who have a say in it.
struct Asking<'a> {
    scheduler: &'a Scheduler,
    profile: &'a Profile,
    pod: &'a Arc<PodInfo>,
    object: Arc<Pod>,
    extenders: &'a [Arc<Extender>],
}

impl Scheduler {
    /// The extenders that are interested in the pod.
    pub(crate) fn extenders_of(&self, pod: &PodInfo) -> Vec<Arc<Extender>> {
        let all = self.extenders.iter();
        all.filter(|one| one.is_interested(pod)).cloned().collect()
    }

    /// As `decide`. `None`: there is nothing to do.
    pub(crate) async fn decide_with_extenders(
        &self,
        profile: &Profile,
        pod: &Arc<PodInfo>,
        extenders: &[Arc<Extender>],
    ) -> Option<Decided> {
        let (pods, _) = self.objects.get()?;
        let object = pods.get(&pod.key.namespace, &pod.key.name)?;
        if object.metadata.uid.as_deref() != Some(&pod.uid) {
            return None;
        }
        let asking = Asking {
            scheduler: self,
            profile,
            pod,
            object,
            extenders,
        };
        asking.decide().await
    }

    /// True if an extender has bound the pod.
    pub(crate) async fn bind_by_extender(&self, pod: &PodInfo, node: &str) -> Result<bool, ExtenderError> {
        let mut binders = self
            .extenders
            .iter()
            .filter(|one| one.binds() && one.is_interested(pod));
        let Some(binder) = binders.next() else {
            return Ok(false);
        };
        match binder.bind(pod, node).await {
            Ok(()) => Ok(true),
            Err(error) if binder.ignorable => {
                tracing::info!(extender = binder.name(), %error, "skipping an ignorable extender that failed to bind");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

impl Asking<'_> {
    async fn decide(&self) -> Option<Decided> {
        let (mut cycle, nominated) = {
            let core = self.scheduler.core.lock();
            if core.cache.is_placed(&self.pod.uid) || self.pod.deleting {
                return None;
            }
            match Cycle::begin(self.profile, &core.cache, self.pod) {
                Ok(cycle) => {
                    let nominated = cycle.nominated(self.profile, &core.cache, self.pod);
                    (cycle, nominated)
                }
                Err(diagnosis) => return Some(Decided::Nowhere(diagnosis)),
            }
        };
        if let Some(id) = nominated {
            cycle.fitting = vec![id];
            // An extender that is against it, or does not answer, is asked about all nodes.
            if self.filter(&mut cycle).await.is_ok() && cycle.fitting == [id] {
                return self.take(id, cycle);
            }
            cycle.fitting.clear();
            cycle.statuses.nodes.clear();
            cycle.rejected_by &= !EXTENDERS;
        }
        let filtered = {
            let mut core = self.scheduler.core.lock();
            let mut start = core.cache.next_start;
            let filtered = cycle.filter(self.profile, &core.cache, self.pod, &mut start, true);
            core.cache.next_start = start;
            filtered
        };
        if let Err(diagnosis) = filtered {
            return Some(Decided::Nowhere(diagnosis));
        }
        if let Err(failure) = self.filter(&mut cycle).await {
            return Some(Decided::Nowhere(error(failure.to_string())));
        }
        if cycle.fitting.is_empty() {
            return Some(Decided::Nowhere(self.nowhere(&cycle).await));
        }
        let chosen = self.best(&mut cycle).await?;
        self.take(chosen, cycle)
    }

    /// Takes the room, unless the node has changed meanwhile so that the pod no longer fits.
    fn take(&self, id: NodeId, cycle: Cycle) -> Option<Decided> {
        let mut core = self.scheduler.core.lock();
        let cache = &mut core.cache;
        if cache.is_placed(&self.pod.uid) {
            return None;
        }
        let still = cache.get(id).map(|node| {
            self.profile
                .run_filters_with_nominated(&cycle.state, self.pod, node, cache)
        });
        Some(match still {
            Some(Ok(())) => self
                .scheduler
                .take(self.profile, cache, self.pod, id, cycle.state),
            _ => Decided::Nowhere(error("the node changed while extenders were asked".to_owned())),
        })
    }

    fn named(&self, ids: &[NodeId]) -> Named {
        let core = self.scheduler.core.lock();
        let nodes = ids.iter().filter_map(|id| core.cache.get(*id));
        nodes.map(|node| (node.id, Arc::clone(&node.name))).collect()
    }

    /// The objects of nodes, for an extender that keeps none.
    fn node_objects(&self, names: &[Arc<str>]) -> Vec<Arc<Node>> {
        let Some((_, nodes)) = self.scheduler.objects.get() else {
            return Vec::new();
        };
        names.iter().filter_map(|name| nodes.get("", name)).collect()
    }

    /// Leaves the fitting nodes that every extender lets pass, one after another.
    async fn filter(&self, cycle: &mut Cycle) -> Result<(), ExtenderError> {
        let mut rejections: HashMap<NodeId, Rejection> = HashMap::new();
        let before = cycle.fitting.len();
        for extender in self.extenders.iter().filter(|one| one.filters()) {
            if cycle.fitting.is_empty() {
                break;
            }
            let named = self.named(&cycle.fitting);
            let names: Vec<Arc<str>> = named.iter().map(|(_, name)| Arc::clone(name)).collect();
            let known: HashSet<&str> = names.iter().map(|name| &**name).collect();
            let objects;
            let nodes = if extender.node_cache_capable {
                NodesArg::Names(&names)
            } else {
                objects = self.node_objects(&names);
                NodesArg::Objects(&objects)
            };
            let answer = match extender.filter(&self.object, &nodes, &known).await {
                Ok(answer) => answer,
                Err(error) if extender.ignorable => {
                    tracing::info!(extender = extender.name(), %error, "skipping an ignorable extender that failed to filter");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let passed: HashSet<&str> = answer.passed.iter().map(String::as_str).collect();
            for (id, name) in &named {
                // What is in both is unresolvable.
                let (code, reason) = match (answer.unresolvable.get(&**name), answer.failed.get(&**name)) {
                    (Some(reason), _) => (Code::Unresolvable, reason),
                    (None, Some(reason)) => (Code::Unschedulable, reason),
                    (None, None) => continue,
                };
                rejections.insert(*id, Rejection::new(code, reason.clone()));
            }
            cycle.fitting = named
                .iter()
                .filter(|(_, name)| passed.contains(&**name))
                .map(|(id, _)| *id)
                .collect();
        }
        if cycle.fitting.len() != before {
            cycle.rejected_by |= EXTENDERS;
        }
        // A node that an extender names as failed and lets pass all the same, passes.
        rejections.retain(|id, _| !cycle.fitting.contains(id));
        cycle.statuses.nodes.extend(rejections);
        Ok(())
    }

    /// The best node by the scores of plugins and extenders together.
    async fn best(&self, cycle: &mut Cycle) -> Option<NodeId> {
        let mut scores = {
            let core = self.scheduler.core.lock();
            cycle.scores(self.profile, &core.cache, self.pod)
        };
        if scores.len() > 1 {
            let ids: Vec<NodeId> = scores.iter().map(|(id, _)| *id).collect();
            let named = self.named(&ids);
            let names: Vec<Arc<str>> = named.iter().map(|(_, name)| Arc::clone(name)).collect();
            let asked = self.extenders.iter().filter(|one| one.prioritizes());
            let asked = asked.map(|extender| self.prioritize(extender, &names));
            let mut more: HashMap<String, i64> = HashMap::new();
            for (name, score) in join_all(asked).await.into_iter().flatten() {
                let sum = more.entry(name).or_default();
                *sum = sum.saturating_add(score);
            }
            let by_id: HashMap<NodeId, i64> = named
                .iter()
                .filter_map(|(id, name)| Some((*id, *more.get(&**name)?)))
                .collect();
            for (id, score) in &mut scores {
                *score = score.saturating_add(by_id.get(id).copied().unwrap_or(0));
            }
        }
        (!scores.is_empty()).then(|| best(&scores))
    }

    /// COMPAT: an extender that fails gives no scores; the others decide.
    async fn prioritize(&self, extender: &Extender, names: &[Arc<str>]) -> Vec<(String, i64)> {
        let objects;
        let nodes = if extender.node_cache_capable {
            NodesArg::Names(names)
        } else {
            objects = self.node_objects(names);
            NodesArg::Objects(&objects)
        };
        match extender.prioritize(&self.object, &nodes).await {
            Ok(scores) => scores,
            Err(error) => {
                tracing::debug!(extender = extender.name(), %error, "an extender gives no scores");
                Vec::new()
            }
        }
    }

    async fn nowhere(&self, cycle: &Cycle) -> Diagnosis {
        let preempting: Vec<&Arc<Extender>> = self.extenders.iter().filter(|one| one.preempts()).collect();
        let (candidates, nodes) = {
            let core = self.scheduler.core.lock();
            let mut plugins = self.profile.at(Points::POST_FILTER);
            let plugin = plugins.find_map(|(_, enabled)| enabled.plugin.preemption());
            let Some(plugin) = plugin.filter(|_| !preempting.is_empty()) else {
                let post_filter = cycle.post_filter(self.profile, &core.cache, self.pod);
                return cycle.nowhere(core.cache.len(), post_filter);
            };
            let failed = cycle.failed(self.profile, &core.cache, self.pod);
            (plugin.candidates(&failed), core.cache.len())
        };
        let post_filter = match candidates {
            Err(none) => none,
            Ok(candidates) => match self.preempt(&preempting, candidates).await {
                Ok(candidates) => DefaultPreemption::choose(candidates).unwrap_or_else(|| PostFilter {
                    message: "preemption: no candidate node for preemption".to_owned(),
                    ..PostFilter::default()
                }),
                Err(error) => PostFilter {
                    message: format!("preemption: {error}"),
                    ..PostFilter::default()
                },
            },
        };
        cycle.nowhere(nodes, post_filter)
    }

    /// Hands the candidates from one extender to the next.
    async fn preempt(
        &self,
        extenders: &[&Arc<Extender>],
        mut candidates: Vec<Candidate>,
    ) -> Result<Vec<Candidate>, ExtenderError> {
        for extender in extenders {
            if candidates.is_empty() {
                break;
            }
            let shown = candidates.iter().map(|candidate| {
                let victims = self.victims(extender, candidate);
                (candidate.node.to_string(), (victims, candidate.violations))
            });
            let shown: BTreeMap<_, _> = shown.collect();
            let answer = extender.preempt(&self.object, &shown).await;
            let kept = answer.and_then(|answer| {
                let kept = answer.into_iter();
                let kept =
                    kept.map(|(node, (uids, violations))| self.candidate(extender, node, &uids, violations));
                kept.filter_map(Result::transpose).collect::<Result<Vec<_>, _>>()
            });
            match kept {
                Ok(kept) => candidates = kept,
                Err(error) if extender.ignorable => {
                    tracing::info!(extender = extender.name(), %error, "skipping an ignorable extender that failed to preempt");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(candidates)
    }

    fn victims(&self, extender: &Extender, candidate: &Candidate) -> VictimsArg {
        if extender.node_cache_capable {
            return VictimsArg::Uids(candidate.victims.iter().map(|pod| pod.uid.to_string()).collect());
        }
        let pods = self.scheduler.objects.get().map(|(pods, _)| pods);
        let victims = candidate.victims.iter();
        VictimsArg::Pods(
            victims
                .filter_map(|pod| pods?.get(&pod.key.namespace, &pod.key.name))
                .collect(),
        )
    }

    /// What an extender leaves of a node. `None`: it named no victims, and may be ignored.
    fn candidate(
        &self,
        extender: &Extender,
        node: String,
        uids: &[String],
        violations: usize,
    ) -> Result<Option<Candidate>, ExtenderError> {
        if uids.is_empty() {
            if extender.ignorable {
                return Ok(None);
            }
            let message = format!("expected at least one victim pod on node {node:?}");
            return Err(ExtenderError::Refused(message));
        }
        let core = self.scheduler.core.lock();
        let Some(info) = core.cache.by_name(&node) else {
            return Err(ExtenderError::Refused(format!(
                "nodeinfo not found for node name {node:?}"
            )));
        };
        let mut victims = Vec::new();
        for uid in uids {
            let Some(pod) = info.pods.iter().find(|pod| *pod.uid == **uid) else {
                return Err(ExtenderError::Refused(format!(
                    "extender: {} claims to preempt pod (UID: {uid}) on node: {node}, but the pod is not found on that node",
                    extender.name()
                )));
            };
            victims.push(Arc::clone(pod));
        }
        victims.sort_by_key(|pod| pod.importance());
        Ok(Some(Candidate {
            node: Arc::clone(&info.name),
            victims,
            violations,
        }))
    }
}
