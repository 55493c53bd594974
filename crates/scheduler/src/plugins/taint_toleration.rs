//! Taints keep pods away unless tolerated; fewer untolerated PreferNoSchedule taints score better.

use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, Rejection, Scope, Verdict, scale_to_max};
use crate::node::{NodeInfo, NodeMeta};
use crate::pod::PodInfo;
use skiff_pods::taints;

pub(crate) struct TaintToleration;

fn allows(pod: &PodInfo, node: &NodeMeta) -> bool {
    taints::find_untolerated(node.taints(), &pod.shape.tolerations, taints::forbids_scheduling).is_none()
}

impl Plugin for TaintToleration {
    fn name(&self) -> &'static str {
        "TaintToleration"
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(new) => allows(pod, new),
            ClusterEvent::NodeUpdated { old, new } => !allows(pod, old) && allows(pod, new),
            ClusterEvent::OwnPodUpdated { old, new } => old.shape.tolerations != new.shape.tolerations,
            _ => false,
        }
    }

    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        if allows(pod, &node.meta) {
            Ok(())
        } else {
            Err(Rejection::unresolvable("node(s) had untolerated taint(s)"))
        }
    }

    fn scores(&self) -> bool {
        true
    }

    fn score(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        // COMPAT: only tolerations of this effect, or of all effects, count here.
        let tolerated = |taint| {
            let tolerations = pod.shape.tolerations.iter();
            tolerations
                .filter(|t| matches!(t.effect.as_deref(), None | Some("" | "PreferNoSchedule")))
                .any(|toleration| taints::tolerates(toleration, taint))
        };
        let soft = node.taints().iter().filter(|t| t.effect == "PreferNoSchedule");
        i64::try_from(soft.filter(|taint| !tolerated(taint)).count()).unwrap_or(i64::MAX)
    }

    fn normalizes(&self) -> bool {
        true
    }

    fn normalize(&self, _state: &CycleState, _nodes: &[&NodeInfo], scores: &mut [i64]) {
        scale_to_max(scores, true);
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::Local
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node, pod};
    use serde_json::json;

    #[test]
    fn hard_taints_reject_and_soft_ones_count() {
        let taints = json!([{"key": "k", "value": "v", "effect": "NoSchedule"},
            {"key": "s", "effect": "PreferNoSchedule"}, {"key": "t", "effect": "PreferNoSchedule"}]);
        let tainted = node("a", json!({"taints": taints}), json!({}), json!({}));
        let state = CycleState::default();
        let check = |tolerations: serde_json::Value, fits: bool, score: i64| {
            let pod = pod("p", json!({"tolerations": tolerations}));
            assert_eq!(
                TaintToleration.filter(&state, &pod, &tainted).is_ok(),
                fits,
                "{tolerations}"
            );
            assert_eq!(
                TaintToleration.score(&state, &pod, &tainted),
                score,
                "{tolerations}"
            );
        };
        check(json!([]), false, 2);
        check(json!([{"key": "k", "value": "v"}]), true, 2);
        check(json!([{"operator": "Exists"}]), true, 0);
        check(
            json!([{"key": "s", "operator": "Exists", "effect": "PreferNoSchedule"}]),
            false,
            1,
        );
    }

    #[test]
    fn only_a_taint_that_went_away_wakes_the_pod() {
        let meta =
            |taints: serde_json::Value| node("a", json!({"taints": taints}), json!({}), json!({})).meta;
        let tainted = || meta(json!([{"key": "k", "effect": "NoSchedule"}]));
        let (pod, free) = (pod("p", json!({})), meta(json!([])));
        let update = |old, new| TaintToleration.hint(&pod, &ClusterEvent::NodeUpdated { old, new });
        assert!(update(tainted(), free.clone()));
        assert!(!update(free.clone(), tainted()) && !update(free.clone(), free.clone()));
        assert!(TaintToleration.hint(&pod, &ClusterEvent::NodeAdded(free)));
        assert!(!TaintToleration.hint(&pod, &ClusterEvent::NodeAdded(tainted())));
    }
}
