//! `nodeSelector` and node affinity: required terms filter, preferred terms score.

use crate::framework::{ClusterEvent, Plugin, Rejection, scale_to_max};
use crate::snapshot::{NodeInfo, PodInfo};
use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm};

pub struct NodeAffinity;

impl Plugin for NodeAffinity {
    fn name(&self) -> &'static str {
        "NodeAffinity"
    }

    fn events(&self) -> &'static [ClusterEvent] {
        &[
            ClusterEvent::NodeAdded,
            ClusterEvent::NodeChanged,
            ClusterEvent::PodChanged,
        ]
    }

    fn filter(&self, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let spec = pod.pod.spec.as_ref();
        let selected = spec
            .and_then(|s| s.node_selector.as_ref())
            .is_none_or(|selector| {
                selector
                    .iter()
                    .all(|(key, value)| node.labels().and_then(|l| l.get(key)) == Some(value))
            });
        let required = spec
            .and_then(|s| s.affinity.as_ref())
            .and_then(|a| a.node_affinity.as_ref())
            .and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
        // Terms are alternatives; a selector without terms matches nothing.
        let affine =
            required.is_none_or(|r| r.node_selector_terms.iter().any(|term| term_matches(term, node)));
        if selected && affine {
            return Ok(());
        }
        Err(Rejection::new(
            "node(s) didn't match Pod's node affinity/selector",
        ))
    }

    fn weight(&self) -> i64 {
        2
    }

    fn pre_score(&self, pod: &PodInfo) -> bool {
        !preferred(pod).is_empty()
    }

    fn score(&self, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let matching = preferred(pod)
            .iter()
            .filter(|term| term_matches(&term.preference, node));
        matching.map(|term| i64::from(term.weight)).sum()
    }

    fn normalize_scores(&self, scores: &mut [i64]) {
        scale_to_max(scores, false);
    }
}

fn preferred(pod: &PodInfo) -> &[k8s_openapi::api::core::v1::PreferredSchedulingTerm] {
    let affinity = pod
        .pod
        .spec
        .as_ref()
        .and_then(|s| s.affinity.as_ref())
        .and_then(|a| a.node_affinity.as_ref());
    affinity
        .and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_deref())
        .unwrap_or_default()
}

fn term_matches(term: &NodeSelectorTerm, node: &NodeInfo) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    let label = |key: &str| node.labels().and_then(|l| l.get(key)).map(String::as_str);
    let field = |key: &str| (key == "metadata.name").then_some(&*node.name);
    expressions.iter().all(|r| holds(r, label(&r.key))) && fields.iter().all(|r| holds(r, field(&r.key)))
}

fn holds(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = value.is_some_and(|v| values.iter().any(|w| w == v));
    let numbers = || Some((value?.parse::<i64>().ok()?, values.first()?.parse::<i64>().ok()?));
    match requirement.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => numbers().is_some_and(|(have, bound)| have > bound),
        "Lt" => numbers().is_some_and(|(have, bound)| have < bound),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::fixtures::{node, pod};
    use serde_json::json;

    #[test]
    fn required_terms_filter() {
        let node = node("a", json!({}), json!({"disk": "ssd", "n": "5"}), json!({}));
        let term = |key: &str, operator: &str, values: &[&str]| {
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]}}}})
        };
        for (spec, fits) in [
            (json!({}), true),
            (json!({"nodeSelector": {"disk": "ssd"}}), true),
            (json!({"nodeSelector": {"disk": "hdd"}}), false),
            (term("disk", "In", &["ssd", "nvme"]), true),
            (term("disk", "NotIn", &["ssd"]), false),
            (term("gpu", "NotIn", &["x"]), true),
            (term("gpu", "Exists", &[]), false),
            (term("gpu", "DoesNotExist", &[]), true),
            (term("n", "Gt", &["4"]), true),
            (term("n", "Lt", &["5"]), false),
        ] {
            assert_eq!(
                NodeAffinity.filter(&pod("p", spec.clone()), &node).is_ok(),
                fits,
                "{spec}"
            );
        }
    }

    #[test]
    fn preferred_terms_score() {
        let spec = json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 10, "preference": {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}}]}}});
        let (fast, slow) = (
            node("a", json!({}), json!({"disk": "ssd"}), json!({})),
            node("b", json!({}), json!({}), json!({})),
        );
        let pod = pod("p", spec);
        assert_eq!(
            (NodeAffinity.score(&pod, &fast), NodeAffinity.score(&pod, &slow)),
            (10, 0)
        );
    }
}
