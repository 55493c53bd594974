//! Taints keep pods away unless tolerated; fewer intolerable PreferNoSchedule taints score better.

use crate::framework::{ClusterEvent, Plugin, Rejection, scale_to_max};
use crate::snapshot::{NodeInfo, PodInfo};
use k8s_openapi::api::core::v1::{Taint, Toleration};

pub struct TaintToleration;

impl Plugin for TaintToleration {
    fn name(&self) -> &'static str {
        "TaintToleration"
    }

    fn events(&self) -> &'static [ClusterEvent] {
        &[
            ClusterEvent::NodeAdded,
            ClusterEvent::NodeChanged,
            ClusterEvent::PodChanged,
        ]
    }

    fn filter(&self, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let hard = node
            .taints()
            .iter()
            .filter(|t| matches!(t.effect.as_str(), "NoSchedule" | "NoExecute"));
        if hard.into_iter().any(|taint| !tolerates(pod, taint)) {
            return Err(Rejection::new("node(s) had untolerated taint(s)"));
        }
        Ok(())
    }

    fn weight(&self) -> i64 {
        3
    }

    fn score(&self, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let soft = node
            .taints()
            .iter()
            .filter(|t| t.effect == "PreferNoSchedule" && !tolerates(pod, t));
        i64::try_from(soft.count()).unwrap_or(i64::MAX)
    }

    fn normalize_scores(&self, scores: &mut [i64]) {
        scale_to_max(scores, true);
    }
}

pub fn tolerates(pod: &PodInfo, taint: &Taint) -> bool {
    let tolerations = pod
        .pod
        .spec
        .as_ref()
        .and_then(|s| s.tolerations.as_deref())
        .unwrap_or_default();
    tolerations.iter().any(|toleration| matches(toleration, taint))
}

fn matches(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let (effect, key, value) = (
        text(&toleration.effect),
        text(&toleration.key),
        text(&toleration.value),
    );
    if (!effect.is_empty() && effect != taint.effect) || (!key.is_empty() && key != taint.key) {
        return false;
    }
    let taint_value = text(&taint.value);
    match toleration.operator.as_deref().unwrap_or("Equal") {
        "Exists" => true,
        "" | "Equal" => !key.is_empty() && value == taint_value,
        "Gt" | "Lt" => match (taint_value.parse::<i64>(), value.parse::<i64>()) {
            (Ok(have), Ok(bound)) if toleration.operator.as_deref() == Some("Gt") => have > bound,
            (Ok(have), Ok(bound)) => have < bound,
            _ => false,
        },
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::fixtures::{node, pod};
    use serde_json::json;

    #[test]
    fn tolerations_match_as_upstream() {
        let tainted = node(
            "a",
            json!({"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}),
            json!({}),
            json!({}),
        );
        for (tolerations, fits) in [
            (json!([]), false),
            (
                json!([{"key": "k", "operator": "Equal", "value": "v", "effect": "NoSchedule"}]),
                true,
            ),
            (json!([{"key": "k", "value": "v"}]), true),
            (json!([{"key": "k", "value": "other"}]), false),
            (json!([{"key": "k", "operator": "Exists"}]), true),
            (json!([{"operator": "Exists"}]), true),
            (
                json!([{"key": "k", "operator": "Exists", "effect": "NoExecute"}]),
                false,
            ),
        ] {
            let pod = pod("p", json!({"tolerations": tolerations}));
            assert_eq!(
                TaintToleration.filter(&pod, &tainted).is_ok(),
                fits,
                "{tolerations}"
            );
        }
    }
}
