//! Resources: a pod fits if what is left covers its requests (`NodeResourcesFit`); its strategies score nodes by how
//! full they are; `NodeResourcesBalancedAllocation` prefers nodes whose resources are used evenly.

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{Code, CycleState, MAX_SCORE, Plugin, Rejection, Scope, Verdict};
use crate::listers::Listers;
use crate::node::{NodeInfo, NodeMeta};
use crate::plugins::extended_resources::resources;
use crate::pod::PodInfo;
use skiff_pods::requests::Resources;
use std::borrow::Cow;
use std::sync::Arc;

/// How NodeResourcesFit scores.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Strategy {
    LeastAllocated,
    MostAllocated,
    /// Points of (utilisation in percent, score times ten), by rising utilisation.
    RequestedToCapacityRatio(Vec<(i64, i64)>),
}

pub(crate) struct Fit {
    pub(crate) strategy: Strategy,
    /// Resources with their weights.
    pub(crate) resources: Vec<(String, i64)>,
    pub(crate) ignored_resources: Vec<String>,
    pub(crate) ignored_groups: Vec<String>,
    /// For the classes that back extended resources.
    pub(crate) listers: Arc<Listers>,
}

impl Default for Fit {
    fn default() -> Self {
        Self {
            strategy: Strategy::LeastAllocated,
            resources: vec![("cpu".to_owned(), 1), ("memory".to_owned(), 1)],
            ignored_resources: Vec::new(),
            ignored_groups: Vec::new(),
            listers: Arc::default(),
        }
    }
}

/// Extended resources are those of a domain of their own.
pub(crate) fn is_extended(name: &str) -> bool {
    let native = !name.contains('/')
        || name
            .split('/')
            .next()
            .is_some_and(|domain| domain.ends_with("kubernetes.io"));
    !native && !name.starts_with("requests.")
}

impl Fit {
    fn is_ignored(&self, name: &str) -> bool {
        if self.ignored_resources.is_empty() && self.ignored_groups.is_empty() {
            return false;
        }
        let group = name.split('/').next().unwrap_or_default();
        is_extended(name)
            && (self.ignored_resources.iter().any(|one| one == name)
                || self.ignored_groups.iter().any(|one| one == group))
    }

    /// The resources that a node with this use lacks; the flag tells that even the empty node has too little.
    fn lacking(
        &self,
        want: &Resources,
        (have, max_pods): (&Resources, i64),
        (used, pods): (&Resources, usize),
    ) -> (Vec<Cow<'static, str>>, bool) {
        let (mut reasons, mut never) = (Vec::new(), false);
        if i64::try_from(pods).unwrap_or(i64::MAX) >= max_pods {
            reasons.push(Cow::Borrowed("Too many pods"));
        }
        let mut check = |want: i64, have: i64, used: i64, reason: &dyn Fn() -> Cow<'static, str>| {
            if want > 0 && want > have - used {
                reasons.push(reason());
                never |= want > have;
            }
        };
        check(want.milli_cpu, have.milli_cpu, used.milli_cpu, &|| {
            "Insufficient cpu".into()
        });
        check(want.memory, have.memory, used.memory, &|| {
            "Insufficient memory".into()
        });
        let (wanted, had) = (want.ephemeral_storage, have.ephemeral_storage);
        check(wanted, had, used.ephemeral_storage, &|| {
            "Insufficient ephemeral-storage".into()
        });
        for (name, amount) in want.others.iter().filter(|(name, _)| !self.is_ignored(name)) {
            // What the node does not offer itself, DynamicResources may allocate.
            if have.get(name) == 0 && self.listers.class_backing(name).is_some() {
                continue;
            }
            check(*amount, have.get(name), used.get(name), &|| {
                format!("Insufficient {name}").into()
            });
        }
        (reasons, never)
    }

    /// Whether a class backs an extended resource of the pod now.
    fn is_backed(&self, pod: &PodInfo) -> bool {
        resources(pod).any(|name| self.listers.class_backing(name).is_some())
    }

    fn fits_empty(&self, pod: &PodInfo, node: &NodeMeta) -> bool {
        let nothing = Resources::default();
        let have = (&node.allocatable, node.max_pods);
        self.lacking(&pod.shape.requests, have, (&nothing, 0))
            .0
            .is_empty()
    }
}

impl Plugin for Fit {
    fn name(&self) -> &'static str {
        "NodeResourcesFit"
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        let want = &pod.shape.requests;
        let wants = |name: &str| want.get(name) > 0;
        let grew = |old: &Resources, new: &Resources| {
            let mut names = ["cpu", "memory", "ephemeral-storage"]
                .into_iter()
                .chain(want.others.keys().map(String::as_str));
            names.any(|name| wants(name) && new.get(name) > old.get(name))
        };
        match event {
            ClusterEvent::NodeAdded(new) => self.fits_empty(pod, new),
            ClusterEvent::NodeUpdated { old, new } => {
                self.fits_empty(pod, new)
                    && (new.max_pods > old.max_pods || grew(&old.allocatable, &new.allocatable))
            }
            // COMPAT: upstream wakes for every pod that frees its room, for it may have been one too many.
            ClusterEvent::PodRemoved(_) => true,
            ClusterEvent::PodUpdated { old, new } => grew(&new.shape.requests, &old.shape.requests),
            ClusterEvent::OwnPodUpdated { old, new } => old.shape.requests != new.shape.requests,
            ClusterEvent::DevicesChanged => self.is_backed(pod),
            _ => false,
        }
    }

    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let have = (&node.meta.allocatable, node.meta.max_pods);
        let (reasons, never) = self.lacking(&pod.shape.requests, have, (&node.requested, node.pods.len()));
        if reasons.is_empty() {
            return Ok(());
        }
        Err(Rejection {
            code: if never {
                Code::Unresolvable
            } else {
                Code::Unschedulable
            },
            reasons,
            plugin: "",
        })
    }

    fn scores(&self) -> bool {
        true
    }

    fn score(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let (mut total, mut weights) = (0, 0);
        for (name, weight) in &self.resources {
            let (want, used) = match name.as_str() {
                "cpu" => (pod.shape.scoring.0, node.scoring.0),
                "memory" => (pod.shape.scoring.1, node.scoring.1),
                name => (pod.shape.requests.get(name), node.requested.get(name)),
            };
            if want == 0 && is_scalar(name) {
                continue;
            }
            let have = node.meta.allocatable.get(name);
            if have == 0 {
                continue;
            }
            let used = used + want;
            let score = match &self.strategy {
                Strategy::LeastAllocated if used > have => 0,
                Strategy::LeastAllocated => (have - used) * MAX_SCORE / have,
                Strategy::MostAllocated => used.min(have) * MAX_SCORE / have,
                Strategy::RequestedToCapacityRatio(shape) => {
                    let percent = if used > have { 100 } else { used * 100 / have };
                    let score = on_shape(shape, percent);
                    // COMPAT: what scores nothing does not count in the mean.
                    if score <= 0 {
                        continue;
                    }
                    score
                }
            };
            total += score * weight;
            weights += weight;
        }
        match (weights, &self.strategy) {
            (0, _) => 0,
            (weights, Strategy::RequestedToCapacityRatio(_)) => rounded(total, weights),
            (weights, _) => total / weights,
        }
    }

    /// Classes come and go: the class cache cannot keep what depends on them.
    fn scope(&self, pod: &PodInfo) -> Scope {
        if self.is_backed(pod) {
            Scope::Opaque
        } else {
            Scope::Local
        }
    }
}

/// Resources that count only if the pod asks for them.
fn is_scalar(name: &str) -> bool {
    !matches!(name, "cpu" | "memory" | "ephemeral-storage")
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "small numbers"
)]
fn rounded(total: i64, by: i64) -> i64 {
    (total as f64 / by as f64).round() as i64
}

/// Linear between the points, level outside of them.
fn on_shape(shape: &[(i64, i64)], at: i64) -> i64 {
    let mut before: Option<(i64, i64)> = None;
    for &(utilisation, score) in shape {
        if at <= utilisation {
            return match before {
                None => score,
                Some((left, from)) => from + (score - from) * (at - left) / (utilisation - left),
            };
        }
        before = Some((utilisation, score));
    }
    before.map_or(0, |(_, score)| score)
}

pub(crate) struct BalancedAllocation {
    pub(crate) resources: Vec<String>,
}

impl Default for BalancedAllocation {
    fn default() -> Self {
        Self {
            resources: vec!["cpu".to_owned(), "memory".to_owned()],
        }
    }
}

impl Plugin for BalancedAllocation {
    fn name(&self) -> &'static str {
        "NodeResourcesBalancedAllocation"
    }

    fn scores(&self) -> bool {
        true
    }

    /// Pods that ask for nothing are not scored: the emptiest node would attract them all.
    fn pre_score(
        &self,
        _state: &mut CycleState,
        pod: &PodInfo,
        _nodes: &[&NodeInfo],
        _cache: &Cache,
    ) -> bool {
        self.resources
            .iter()
            .any(|name| pod.shape.requests.get(name) != 0)
    }

    /// COMPAT: what counts is whether the pod brings the shares of the resources in use closer together.
    fn score(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let (mut with, mut without) = ([0.0; 8], [0.0; 8]);
        let mut count = 0;
        for name in self.resources.iter() {
            let want = pod.shape.requests.get(name);
            let have = node.meta.allocatable.get(name);
            if (want == 0 && is_scalar(name)) || have == 0 || count == with.len() {
                continue;
            }
            let used = node.requested.get(name);
            with[count] = share(used + want, have);
            without[count] = share(used, have);
            count += 1;
        }
        let gain = balance(&with[..count]) - balance(&without[..count]);
        MAX_SCORE / 2 + (MAX_SCORE / 2 + gain) / 2
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::Local
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share between 0 and 1")]
fn share(used: i64, have: i64) -> f64 {
    (used as f64 / have as f64).min(1.0)
}

/// How close the shares in use are to each other.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "shares between 0 and 1"
)]
fn balance(shares: &[f64]) -> i64 {
    let deviation = match shares {
        [a, b] => ((a - b) / 2.0).abs(),
        [] | [_] => 0.0,
        many => {
            let mean = many.iter().sum::<f64>() / many.len() as f64;
            let squares: f64 = many.iter().map(|one| (one - mean) * (one - mean)).sum();
            (squares / many.len() as f64).sqrt()
        }
    };
    ((1.0 - deviation) * MAX_SCORE as f64) as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{plain_node, pod};
    use serde_json::json;

    fn asking(name: &str, cpu: &str, memory: &str) -> Arc<PodInfo> {
        let requests = json!({"cpu": cpu, "memory": memory});
        pod(
            name,
            json!({"containers": [{"name": "c", "resources": {"requests": requests}}]}),
        )
    }

    #[test]
    fn what_is_left_must_cover_the_requests() {
        let (fit, state) = (Fit::default(), CycleState::default());
        let mut node = plain_node("a");
        node.add_pod(asking("there", "1500m", "1Gi"));
        let check = |pod: &PodInfo, node: &NodeInfo, reasons: &[&str], code: Code| {
            let rejection = fit.filter(&state, pod, node).unwrap_err();
            assert_eq!(
                (rejection.reasons, rejection.code),
                (reasons.iter().map(|r| (*r).to_owned().into()).collect(), code)
            );
        };
        assert!(fit.filter(&state, &asking("p", "500m", "3Gi"), &node).is_ok());
        check(
            &asking("p", "501m", "4Gi"),
            &node,
            &["Insufficient cpu", "Insufficient memory"],
            Code::Unschedulable,
        );
        check(
            &asking("p", "3", "0"),
            &node,
            &["Insufficient cpu"],
            Code::Unresolvable,
        );
        let gpu = json!({"containers": [{"name": "c", "resources": {"requests": {"example.com/gpu": "1"}}}]});
        check(
            &pod("p", gpu.clone()),
            &node,
            &["Insufficient example.com/gpu"],
            Code::Unresolvable,
        );
        let ignoring = Fit {
            ignored_groups: vec!["example.com".into()],
            ..Fit::default()
        };
        assert!(ignoring.filter(&state, &pod("p", gpu), &node).is_ok());
        let meta = Arc::make_mut(&mut node.meta);
        meta.max_pods = 1;
        check(
            &asking("p", "0", "0"),
            &node,
            &["Too many pods"],
            Code::Unschedulable,
        );
    }

    #[test]
    fn strategies() {
        let check = |strategy: Strategy, expected: i64| {
            let mut node = plain_node("a");
            node.add_pod(asking("there", "500m", "1Gi"));
            let fit = Fit {
                strategy,
                ..Fit::default()
            };
            // With the pod half of the CPU and three quarters of the memory are used.
            assert_eq!(
                fit.score(&CycleState::default(), &asking("p", "500m", "2Gi"), &node),
                expected
            );
        };
        check(Strategy::LeastAllocated, (50 + 25) / 2);
        check(Strategy::MostAllocated, (50 + 75) / 2);
        check(Strategy::RequestedToCapacityRatio(vec![(0, 0), (100, 100)]), 63);
        check(
            Strategy::RequestedToCapacityRatio(vec![(0, 100), (50, 100), (100, 0)]),
            75,
        );
    }

    #[test]
    fn balanced_nodes_score_better() {
        let mut full = plain_node("b");
        full.add_pod(asking("there", "1500m", "1Gi"));
        let balanced = BalancedAllocation::default();
        // The node is used 75% and 25%: memory brings it into balance, CPU out of it.
        let score = |pod: &PodInfo| balanced.score(&CycleState::default(), pod, &full);
        assert_eq!(
            (score(&asking("p", "0", "2Gi")), score(&asking("p", "500m", "0"))),
            (87, 68)
        );
    }

    #[test]
    fn only_what_helps_wakes_a_pod() {
        let fit = Fit::default();
        let pod = asking("p", "1", "1Gi");
        let meta = |cpu: &str| {
            let allocatable = json!({"cpu": cpu, "memory": "4Gi", "pods": "10"});
            crate::fixtures::node("a", json!({}), json!({}), allocatable).meta
        };
        let update = |old: &str, new: &str| ClusterEvent::NodeUpdated {
            old: meta(old),
            new: meta(new),
        };
        let check =
            |event: ClusterEvent, expected: bool| assert_eq!(fit.hint(&pod, &event), expected, "{event:?}");
        check(ClusterEvent::NodeAdded(meta("2")), true);
        check(ClusterEvent::NodeAdded(meta("500m")), false);
        check(update("1", "2"), true);
        check(update("2", "1"), false);
        check(update("100m", "500m"), false);
        check(ClusterEvent::PodRemoved(asking("q", "0", "0")), true);
        check(
            ClusterEvent::PodUpdated {
                old: asking("q", "2", "0"),
                new: asking("q", "1", "0"),
            },
            true,
        );
        check(
            ClusterEvent::PodUpdated {
                old: asking("q", "1", "0"),
                new: asking("q", "2", "0"),
            },
            false,
        );
    }
}
