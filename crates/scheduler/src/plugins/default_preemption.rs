//! Preemption: if removing pods of lower priority from a node would make room, the pod is nominated to the node where
//! that costs least, and those pods are its victims.
//!
//! It decides only. The victims are deleted by `preempt`, beside the cycles.

use crate::cycle::{Failed, Statuses, count_reasons, fit_error};
use crate::events::ClusterEvent;
use crate::framework::{Code, Plugin, PostFilter, Rejection, Scope, Verdict};
use crate::listers::Listers;
use crate::node::NodeInfo;
use crate::pod::PodInfo;
use crate::preempt::Preempting;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use rand::RngExt;
use skiff_pods::labels;
use std::cmp::Reverse;
use std::sync::Arc;

pub(crate) struct DefaultPreemption {
    pub(crate) listers: Arc<Listers>,
    pub(crate) preempting: Arc<Preempting>,
    pub(crate) min_candidate_percentage: usize,
    pub(crate) min_candidates: usize,
}

/// A node on which room can be made.
pub(crate) struct Candidate {
    pub(crate) node: Arc<str>,
    /// The most important one first.
    pub(crate) victims: Vec<Arc<PodInfo>>,
    pub(crate) violations: usize,
}

/// What a candidate costs; the least is chosen.
pub(crate) type Cost = (usize, i32, i64, usize, Reverse<i64>);

impl Candidate {
    pub(crate) fn cost(&self) -> Cost {
        let highest = self.victims.first().map_or(i32::MIN, |pod| pod.priority());
        // COMPAT: shifted so that each victim costs, also one of negative priority.
        let shifted = |pod: &Arc<PodInfo>| i64::from(pod.priority()) + i64::from(i32::MAX) + 1;
        let sum = self.victims.iter().map(shifted).sum();
        let of_highest = self.victims.iter().filter(|pod| pod.priority() == highest);
        let earliest = of_highest.map(|pod| pod.started).min().unwrap_or(i64::MAX);
        (
            self.violations,
            highest,
            sum,
            self.victims.len(),
            Reverse(earliest),
        )
    }
}

/// The pods whose eviction would break a disruption budget, and the others, each in the order given.
fn by_violation(
    pods: &[Arc<PodInfo>],
    budgets: &[Arc<PodDisruptionBudget>],
) -> (Vec<Arc<PodInfo>>, Vec<Arc<PodInfo>>) {
    let allowed = |budget: &Arc<PodDisruptionBudget>| {
        budget
            .status
            .as_ref()
            .and_then(|s| s.disruptions_allowed)
            .unwrap_or(0)
    };
    let mut left: Vec<i32> = budgets.iter().map(allowed).collect();
    let (mut violating, mut others) = (Vec::new(), Vec::new());
    for pod in pods {
        let mut violates = false;
        for (budget, left) in budgets.iter().zip(&mut left) {
            let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
            let concerns = !pod.shape.labels.is_empty()
                && budget.metadata.namespace.as_deref() == Some(&pod.key.namespace)
                && selector.is_some_and(|one| {
                    !labels::is_empty(one) && labels::matches(one, Some(&pod.shape.labels))
                });
            let disrupted = budget
                .status
                .as_ref()
                .and_then(|status| status.disrupted_pods.as_ref());
            if !concerns || disrupted.is_some_and(|pods| pods.contains_key(&pod.key.name)) {
                continue;
            }
            *left -= 1;
            violates |= *left < 0;
        }
        if violates {
            violating.push(Arc::clone(pod));
        } else {
            others.push(Arc::clone(pod));
        }
    }
    (violating, others)
}

/// The least that must go from the node so that the pod fits.
pub(crate) fn select_victims(
    failed: &Failed,
    node: &NodeInfo,
    budgets: &[Arc<PodDisruptionBudget>],
) -> Result<Candidate, Rejection> {
    let (profile, pod, cache) = (failed.profile, failed.pod, failed.cache);
    let mut possible: Vec<Arc<PodInfo>> = Vec::new();
    possible.extend(
        node.pods
            .iter()
            .filter(|one| one.priority() < pod.priority())
            .cloned(),
    );
    if possible.is_empty() {
        return Err(Rejection::unresolvable(
            "No preemption victims found for incoming pod",
        ));
    }
    let (mut node, mut state) = (node.clone(), failed.state.clone());
    for victim in &possible {
        node.remove_pod(&victim.uid);
        profile.run_remove_pod(&mut state, pod, victim, &node);
    }
    profile.run_filters_with_nominated(&state, pod, &node, cache)?;
    possible.sort_by_key(|pod| pod.importance());
    let (violating, others) = by_violation(&possible, budgets);
    let (mut victims, mut violations) = (Vec::new(), 0);
    let reprieved = [&violating, &others];
    for (which, pods) in reprieved.into_iter().enumerate() {
        for candidate in pods {
            node.add_pod(Arc::clone(candidate));
            profile.run_add_pod(&mut state, pod, candidate, &node);
            if profile
                .run_filters_with_nominated(&state, pod, &node, cache)
                .is_ok()
            {
                continue;
            }
            node.remove_pod(&candidate.uid);
            profile.run_remove_pod(&mut state, pod, candidate, &node);
            victims.push(Arc::clone(candidate));
            violations += usize::from(which == 0);
        }
    }
    victims.sort_by_key(|pod| pod.importance());
    if victims.is_empty() {
        let message = format!("expected at least one victim pod on node {:?}", &*node.name);
        return Err(Rejection::error(message));
    }
    Ok(Candidate {
        node: Arc::clone(&node.name),
        victims,
        violations,
    })
}

impl DefaultPreemption {
    pub(crate) fn budgets(&self) -> Vec<Arc<PodDisruptionBudget>> {
        self.listers.budgets.find(|(_, budget)| Some(Arc::clone(budget)))
    }

    /// Why the pod must not preempt now, if so.
    pub(crate) fn not_eligible(&self, failed: &Failed) -> Option<&'static str> {
        let pod = failed.pod;
        if pod.shape.never_preempts {
            return Some("not eligible due to preemptionPolicy=Never.");
        }
        let nominated = failed.cache.nomination(&pod.uid).unwrap_or(&pod.nominated);
        let node = failed.cache.by_name(nominated)?;
        let unresolvable = failed
            .statuses
            .of(node.id)
            .is_some_and(|one| one.code == Code::Unresolvable);
        let going = |one: &Arc<PodInfo>| one.preempted && one.priority() < pod.priority();
        (!unresolvable && node.pods.iter().any(going))
            .then_some("not eligible due to a terminating pod on the nominated node.")
    }

    /// The nodes on which room can be made, or why there is none.
    pub(crate) fn candidates(&self, failed: &Failed) -> Result<Vec<Candidate>, PostFilter> {
        if let Some(reason) = self.not_eligible(failed) {
            return Err(PostFilter {
                message: format!("preemption: {reason}"),
                ..PostFilter::default()
            });
        }
        let cache = failed.cache;
        let helpful = |rejection: &Rejection| rejection.code == Code::Unschedulable;
        let mut potential: Vec<&NodeInfo> = Vec::new();
        if failed.statuses.absent.as_ref().is_some_and(helpful) {
            potential.extend(cache.nodes());
        } else {
            let listed = failed
                .statuses
                .nodes
                .iter()
                .filter(|(_, rejection)| helpful(rejection));
            potential.extend(listed.filter_map(|(id, _)| cache.get(*id)));
        }
        let mut statuses = Statuses::default();
        let mut candidates: Vec<Candidate> = Vec::new();
        if cache.any_below(failed.pod.priority()) && !potential.is_empty() {
            let budgets = self.budgets();
            let percent = potential.len() * self.min_candidate_percentage / 100;
            let wanted = percent.max(self.min_candidates).min(potential.len());
            let offset = rand::rng().random_range(0..potential.len());
            let ordered = potential[offset..].iter().chain(&potential[..offset]);
            for node in ordered {
                match select_victims(failed, node, &budgets) {
                    Ok(candidate) => candidates.push(candidate),
                    Err(rejection) => statuses.nodes.push((node.id, rejection)),
                }
                if candidates.len() >= wanted && candidates.iter().any(|one| one.violations == 0) {
                    break;
                }
            }
        } else {
            let none = || Rejection::unresolvable("No preemption victims found for incoming pod");
            statuses
                .nodes
                .extend(potential.iter().map(|node| (node.id, none())));
        }
        if !candidates.is_empty() {
            return Ok(candidates);
        }
        statuses.absent = Some(Rejection::unresolvable(
            "Preemption is not helpful for scheduling",
        ));
        let reasons = count_reasons(cache.len(), &statuses);
        Err(PostFilter {
            nominate: Some(String::new()),
            victims: Vec::new(),
            message: format!("preemption: {}", fit_error(cache.len(), &reasons, None)),
        })
    }

    /// The candidate that costs least.
    pub(crate) fn choose(candidates: Vec<Candidate>) -> Option<PostFilter> {
        let best = candidates.into_iter().min_by_key(Candidate::cost)?;
        Some(PostFilter {
            nominate: Some(best.node.to_string()),
            victims: best.victims,
            message: String::new(),
        })
    }
}

impl Plugin for DefaultPreemption {
    fn name(&self) -> &'static str {
        "DefaultPreemption"
    }

    /// A pod whose victims are being deleted is not tried until that is done.
    fn pre_enqueue(&self, pod: &PodInfo) -> Verdict {
        if self.preempting.contains(&pod.uid) {
            return Err(Rejection::unresolvable(
                "waiting for the preemption for this pod to be finished",
            ));
        }
        Ok(())
    }

    fn hint(&self, _pod: &PodInfo, event: &ClusterEvent) -> bool {
        matches!(event, ClusterEvent::PodRemoved(_)) && !self.preempting.is_empty()
    }

    fn post_filter(&self, run: &Failed) -> Option<PostFilter> {
        match self.candidates(run) {
            Ok(candidates) => Self::choose(candidates),
            Err(none) => Some(none),
        }
    }

    fn preemption(&self) -> Option<&DefaultPreemption> {
        Some(self)
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::cycle::{Outcome, schedule};
    use crate::fixtures::{info, object, plain_meta};
    use crate::plugins::testing::{profile, profile_with};
    use serde_json::json;

    fn pod(name: &str, priority: i32, cpu: &str, started: &str) -> Arc<PodInfo> {
        let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
        let mut object = object(
            name,
            json!({"app": name}),
            json!({"priority": priority, "containers": [container]}),
        );
        object.status = serde_json::from_value(json!({"startTime": started})).unwrap();
        info(&object)
    }

    fn preempts(
        cache: &Cache,
        pod: &Arc<PodInfo>,
        listers: Option<Arc<Listers>>,
    ) -> (Option<String>, Vec<String>, String) {
        let profile = listers.map_or_else(profile, profile_with);
        match schedule(&profile, cache, pod, &mut 0) {
            Outcome::Node { .. } => panic!("it fits"),
            Outcome::Nowhere(diagnosis) => {
                let found = diagnosis.post_filter;
                let victims = found.victims.iter().map(|one| one.uid.to_string()).collect();
                (found.nominate, victims, found.message)
            }
        }
    }

    const EARLY: &str = "2026-01-01T00:00:00Z";
    const LATE: &str = "2026-01-02T00:00:00Z";

    fn cluster() -> Cache {
        let mut cache = Cache::default();
        for name in ["a", "b"] {
            cache.set_node(name, plain_meta(name));
        }
        cache
    }

    #[tokio::test]
    async fn the_node_that_costs_least_is_chosen_with_the_fewest_victims() {
        let mut cache = cluster();
        cache.place(pod("a1", 5, "1", EARLY), "a");
        cache.place(pod("a2", 1, "1", EARLY), "a");
        cache.place(pod("b1", 3, "1500m", EARLY), "b");
        cache.place(pod("b2", 9, "500m", EARLY), "b");
        // One CPU more: on a the pod of priority 1 goes, on b that of priority 3.
        assert_eq!(
            preempts(&cache, &pod("p", 7, "1", EARLY), None),
            (Some("a".into()), vec!["a2".into()], String::new())
        );
        let (node, victims, message) = preempts(&cache, &pod("p", 1, "1", EARLY), None);
        assert_eq!((node.as_deref(), victims.len()), (Some(""), 0));
        assert_eq!(
            message,
            "preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod."
        );
        // Two CPUs: only a can give them to a pod of priority 7.
        let (node, victims, _) = preempts(&cache, &pod("p", 7, "2", EARLY), None);
        assert_eq!(
            (node.as_deref(), victims),
            (Some("a"), vec!["a1".into(), "a2".into()])
        );
    }

    #[tokio::test]
    async fn among_equals_the_pods_that_started_last_go() {
        let mut cache = cluster();
        cache.place(pod("a1", 1, "2", EARLY), "a");
        cache.place(pod("b1", 1, "2", LATE), "b");
        for _ in 0..5 {
            let (node, ..) = preempts(&cache, &pod("p", 7, "1", EARLY), None);
            assert_eq!(node.as_deref(), Some("b"));
        }
    }

    #[tokio::test]
    async fn budgets_are_respected_while_there_is_another_way() {
        let mut cache = cluster();
        cache.place(pod("a1", 1, "2", EARLY), "a");
        cache.place(pod("b1", 3, "2", LATE), "b");
        let listers = Arc::new(Listers::default());
        let budget: PodDisruptionBudget = serde_json::from_value(json!({
            "metadata": {"name": "x", "namespace": "default"}, "spec": {"selector": {"matchLabels": {"app": "a1"}}},
            "status": {"disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1}}))
        .unwrap();
        listers
            .budgets
            .set(skiff_client::Key::of(&budget), Arc::new(budget));
        let (node, victims, _) = preempts(&cache, &pod("p", 7, "1", EARLY), Some(Arc::clone(&listers)));
        assert_eq!((node.as_deref(), victims), (Some("b"), vec!["b1".to_owned()]));
        cache.remove_node("b");
        let (node, ..) = preempts(&cache, &pod("p", 7, "1", EARLY), Some(listers));
        assert_eq!(
            node.as_deref(),
            Some("a"),
            "a budget yields if nothing else helps"
        );
    }

    #[tokio::test]
    async fn who_may_not_preempt() {
        let mut cache = cluster();
        cache.place(pod("a1", 1, "2", EARLY), "a");
        cache.place(pod("b1", 1, "2", EARLY), "b");
        let container = json!({"name": "c", "resources": {"requests": {"cpu": "1"}}});
        let never = json!({"priority": 9, "preemptionPolicy": "Never", "containers": [container]});
        let (node, _, message) = preempts(&cache, &crate::fixtures::pod("p", never), None);
        assert_eq!(
            (node, message.as_str()),
            (None, "preemption: not eligible due to preemptionPolicy=Never.")
        );
        // A victim is on its way out: the pod waits for it.
        let mut going = object("a1", json!({}), json!({"priority": 1, "containers": [container]}));
        going.metadata.deletion_timestamp = serde_json::from_value(json!(LATE)).unwrap();
        going.status = serde_json::from_value(json!({"conditions": [
            {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]}))
        .unwrap();
        cache.place(info(&going), "a");
        cache.place(pod("a2", 8, "1", EARLY), "a");
        let waiting = pod("p", 7, "1", EARLY);
        cache.nominate(&waiting, "a");
        let (_, _, message) = preempts(&cache, &waiting, None);
        assert_eq!(
            message,
            "preemption: not eligible due to a terminating pod on the nominated node."
        );
    }
}
