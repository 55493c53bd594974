//! nodeSelector and node affinity.

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, PreFilter, Rejection, Scope, Verdict, scale_to_max};
use crate::node::{NodeInfo, NodeMeta};
use crate::pod::{Parts, PodInfo};
use k8s_openapi::api::core::v1::PreferredSchedulingTerm;
use skiff_pods::affinity;
use std::collections::BTreeSet;

/// `added` is node affinity that the profile adds to each pod (`addedAffinity`).
#[derive(Default)]
pub(crate) struct NodeAffinity {
    pub(crate) added_required: Option<k8s_openapi::api::core::v1::NodeSelector>,
    pub(crate) added_preferred: Vec<PreferredSchedulingTerm>,
}

/// The pod's own selector and required affinity.
pub(crate) fn selects(shape: &Parts, node: &NodeMeta) -> bool {
    let selected = shape
        .node_selector
        .iter()
        .all(|(key, value)| node.label(key) == Some(value.as_str()));
    let required = shape.required_nodes.as_ref();
    selected && required.is_none_or(|selector| affinity::node_selector_matches(selector, &node.node))
}

impl NodeAffinity {
    fn added_allows(&self, node: &NodeMeta) -> bool {
        let added = self.added_required.as_ref();
        added.is_none_or(|selector| affinity::node_selector_matches(selector, &node.node))
    }

    fn allows(&self, pod: &PodInfo, node: &NodeMeta) -> bool {
        self.added_allows(node) && selects(&pod.shape, node)
    }
}

impl Plugin for NodeAffinity {
    fn name(&self) -> &'static str {
        "NodeAffinity"
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(new) => self.allows(pod, new),
            ClusterEvent::NodeUpdated { old, new } => !self.allows(pod, old) && self.allows(pod, new),
            _ => false,
        }
    }

    /// Pods of a DaemonSet name their node in each term: then only these nodes are looked at.
    fn pre_filter(
        &self,
        _state: &mut CycleState,
        pod: &PodInfo,
        _cache: &Cache,
    ) -> Result<PreFilter, Rejection> {
        let shape = &pod.shape;
        let Some(required) = &shape.required_nodes else {
            let nothing = shape.node_selector.is_empty() && self.added_required.is_none();
            return Ok(if nothing {
                PreFilter::Skip
            } else {
                PreFilter::AllNodes
            });
        };
        let mut names = BTreeSet::new();
        for term in &required.node_selector_terms {
            match affinity::names_of_term(term) {
                None => return Ok(PreFilter::AllNodes),
                Some(of_term) => names.extend(of_term.into_iter().map(str::to_owned)),
            }
        }
        if names.is_empty() {
            if required.node_selector_terms.is_empty() {
                return Ok(PreFilter::AllNodes);
            }
            return Err(Rejection::unresolvable("pod affinity terms conflict"));
        }
        Ok(PreFilter::Nodes(names.into_iter().collect()))
    }

    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        if !self.added_allows(&node.meta) {
            return Err(Rejection::unresolvable(
                "node(s) didn't match scheduler-enforced node affinity",
            ));
        }
        if !selects(&pod.shape, &node.meta) {
            return Err(Rejection::unresolvable(
                "node(s) didn't match Pod's node affinity/selector",
            ));
        }
        Ok(())
    }

    fn scores(&self) -> bool {
        true
    }

    fn pre_score(
        &self,
        _state: &mut CycleState,
        pod: &PodInfo,
        _nodes: &[&NodeInfo],
        _cache: &Cache,
    ) -> bool {
        !pod.shape.preferred_nodes.is_empty() || !self.added_preferred.is_empty()
    }

    fn score(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        affinity::preferred_weight(&pod.shape.preferred_nodes, &node.meta.node)
            + affinity::preferred_weight(&self.added_preferred, &node.meta.node)
    }

    fn normalizes(&self) -> bool {
        true
    }

    fn normalize(&self, _state: &CycleState, _nodes: &[&NodeInfo], scores: &mut [i64]) {
        scale_to_max(scores, false);
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::Local
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node, pod};
    use serde_json::{Value, json};

    fn required(terms: Value) -> Value {
        json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}})
    }

    #[test]
    fn names_narrow_the_nodes() {
        let check = |terms: Value, expected: Result<PreFilter, ()>| {
            let plugin = NodeAffinity::default();
            let pod = pod("p", required(terms.clone()));
            let got = plugin.pre_filter(&mut CycleState::default(), &pod, &Cache::default());
            assert_eq!(got.map_err(|_| ()), expected, "{terms}");
        };
        let name = |names: &[&str]| json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": names}]});
        let label = json!({"matchExpressions": [{"key": "a", "operator": "Exists"}]});
        check(json!([name(&["x"])]), Ok(PreFilter::Nodes(vec!["x".into()])));
        check(
            json!([name(&["x"]), name(&["y"])]),
            Ok(PreFilter::Nodes(vec!["x".into(), "y".into()])),
        );
        check(json!([name(&["x"]), label]), Ok(PreFilter::AllNodes));
        let mut both = name(&["x"]);
        both["matchFields"]
            .as_array_mut()
            .unwrap()
            .push(name(&["y"])["matchFields"][0].clone());
        check(json!([both]), Err(()));
    }

    #[test]
    fn preferred_terms_score_and_added_affinity_rejects() {
        let spec = json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 10, "preference": {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}}]}}});
        let (fast, slow) = (
            node("a", json!({}), json!({"disk": "ssd"}), json!({})),
            node("b", json!({}), json!({}), json!({})),
        );
        let (pod, state) = (pod("p", spec), CycleState::default());
        let mut plugin = NodeAffinity::default();
        assert_eq!(
            (
                plugin.score(&state, &pod, &fast),
                plugin.score(&state, &pod, &slow)
            ),
            (10, 0)
        );
        plugin.added_required = serde_json::from_value(json!({"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}]}))
        .unwrap();
        assert!(plugin.filter(&state, &pod, &fast).is_ok());
        assert_eq!(
            plugin.filter(&state, &pod, &slow).unwrap_err().message(),
            "node(s) didn't match scheduler-enforced node affinity"
        );
    }
}
