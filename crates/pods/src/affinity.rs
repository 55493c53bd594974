//! Node selectors: `nodeSelector`, node affinity's required and preferred terms, and the node affinity of volumes.

use k8s_openapi::api::core::v1::{
    Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PodSpec, PreferredSchedulingTerm,
};
use std::collections::BTreeMap;

type Labels = BTreeMap<String, String>;

/// True if one of the selector's terms matches. A term without requirements matches no node.
pub fn node_selector_matches(selector: &NodeSelector, node: &Node) -> bool {
    selector
        .node_selector_terms
        .iter()
        .any(|term| term_matches(term, node))
}

/// True if the pod's nodeSelector and its required node affinity allow the node.
///
/// As upstream: no `requiredDuringScheduling` allows every node, while one without terms allows none.
pub fn required_affinity_matches(spec: &PodSpec, node: &Node) -> bool {
    let labels = node.metadata.labels.as_ref();
    let selected = spec
        .node_selector
        .iter()
        .flatten()
        .all(|(key, value)| label(labels, key) == Some(value.as_str()));
    selected && required(spec).is_none_or(|selector| node_selector_matches(selector, node))
}

/// The pod's required node affinity.
pub fn required(spec: &PodSpec) -> Option<&NodeSelector> {
    spec.affinity
        .as_ref()?
        .node_affinity
        .as_ref()?
        .required_during_scheduling_ignored_during_execution
        .as_ref()
}

/// The pod's preferred node affinity.
pub fn preferred(spec: &PodSpec) -> &[PreferredSchedulingTerm] {
    spec.affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref())
        .and_then(|affinity| {
            affinity
                .preferred_during_scheduling_ignored_during_execution
                .as_deref()
        })
        .unwrap_or_default()
}

/// The sum of the weights of the preferred terms that match. A term without requirements counts nothing.
pub fn preferred_weight(terms: &[PreferredSchedulingTerm], node: &Node) -> i64 {
    terms
        .iter()
        .filter(|term| term.weight != 0 && term_matches(&term.preference, node))
        .map(|term| i64::from(term.weight))
        .sum()
}

pub fn term_matches(term: &NodeSelectorTerm, node: &Node) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    let labels = node.metadata.labels.as_ref();
    let name = node.metadata.name.as_deref().unwrap_or_default();
    expressions
        .iter()
        .all(|one| requirement_matches(one, label(labels, &one.key)))
        && fields.iter().all(|one| field_matches(one, name))
}

/// The node names that the term's matchFields allow; `None` if it does not restrict them.
pub fn names_of_term(term: &NodeSelectorTerm) -> Option<Vec<&str>> {
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let mut allowed: Option<Vec<&str>> = None;
    for field in fields {
        if field.key != "metadata.name" || field.operator != "In" {
            continue;
        }
        let names: Vec<&str> = field.values.iter().flatten().map(String::as_str).collect();
        allowed = Some(match allowed {
            None => names,
            Some(before) => before.into_iter().filter(|name| names.contains(name)).collect(),
        });
    }
    allowed
}

fn label<'a>(labels: Option<&'a Labels>, key: &str) -> Option<&'a str> {
    labels.and_then(|labels| labels.get(key)).map(String::as_str)
}

/// A requirement that the API server would refuse matches nothing.
pub fn requirement_matches(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = || value.is_some_and(|value| values.iter().any(|one| one == value));
    let compared = |wanted: std::cmp::Ordering| {
        let [bound] = values else { return false };
        match (
            value.and_then(|value| value.parse::<i64>().ok()),
            bound.parse::<i64>(),
        ) {
            (Some(value), Ok(bound)) => value.cmp(&bound) == wanted,
            _ => false,
        }
    };
    match requirement.operator.as_str() {
        "In" => listed(),
        "NotIn" => !values.is_empty() && !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared(std::cmp::Ordering::Greater),
        "Lt" => compared(std::cmp::Ordering::Less),
        _ => false,
    }
}

/// `metadata.name` is the only field; In and NotIn with one value are the only operators.
fn field_matches(requirement: &NodeSelectorRequirement, name: &str) -> bool {
    let Some([value]) = requirement.values.as_deref() else {
        return false;
    };
    let actual = if requirement.key == "metadata.name" {
        name
    } else {
        ""
    };
    match requirement.operator.as_str() {
        "In" => actual == value,
        "NotIn" => actual != value,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn node() -> Node {
        serde_json::from_value(json!({"metadata": {"name": "a", "labels": {"disk": "ssd", "cores": "8"}}}))
            .unwrap()
    }

    #[test]
    fn requirements() {
        let check = |expression: Value, expected: bool| {
            let term: NodeSelectorTerm =
                serde_json::from_value(json!({"matchExpressions": [expression]})).unwrap();
            assert_eq!(term_matches(&term, &node()), expected, "{expression}");
        };
        check(
            json!({"key": "disk", "operator": "In", "values": ["hdd", "ssd"]}),
            true,
        );
        check(
            json!({"key": "disk", "operator": "NotIn", "values": ["ssd"]}),
            false,
        );
        check(
            json!({"key": "none", "operator": "NotIn", "values": ["ssd"]}),
            true,
        );
        check(json!({"key": "disk", "operator": "Exists"}), true);
        check(json!({"key": "disk", "operator": "DoesNotExist"}), false);
        check(json!({"key": "cores", "operator": "Gt", "values": ["7"]}), true);
        check(json!({"key": "cores", "operator": "Gt", "values": ["8"]}), false);
        check(json!({"key": "cores", "operator": "Lt", "values": ["9"]}), true);
        check(json!({"key": "disk", "operator": "Lt", "values": ["9"]}), false);
        check(
            json!({"key": "disk", "operator": "Near", "values": ["ssd"]}),
            false,
        );
    }

    #[test]
    fn nil_and_empty_differ() {
        let check = |spec: Value, expected: bool| {
            let mut whole = json!({"containers": []});
            whole
                .as_object_mut()
                .unwrap()
                .extend(spec.as_object().unwrap().clone());
            let parsed: PodSpec = serde_json::from_value(whole).unwrap();
            assert_eq!(required_affinity_matches(&parsed, &node()), expected, "{spec}");
        };
        let required = |terms: Value| json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}});
        check(json!({}), true);
        check(json!({"nodeSelector": {}}), true);
        check(json!({"nodeSelector": {"disk": "ssd"}}), true);
        check(json!({"nodeSelector": {"disk": "hdd"}}), false);
        check(json!({"affinity": {"nodeAffinity": {}}}), true);
        check(required(json!([])), false);
        check(required(json!([{}])), false);
        check(
            required(json!([{}, {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}])),
            true,
        );
        let field = |operator: &str, values: &[&str]| {
            required(
                json!([{"matchFields": [{"key": "metadata.name", "operator": operator, "values": values}]}]),
            )
        };
        check(field("In", &["a"]), true);
        check(field("In", &["b"]), false);
        check(field("NotIn", &["b"]), true);
        check(field("In", &["a", "b"]), false);
    }

    #[test]
    fn preferred_terms_add_up() {
        let terms: Vec<PreferredSchedulingTerm> = serde_json::from_value(json!([
            {"weight": 10, "preference": {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}},
            {"weight": 3, "preference": {"matchExpressions": [{"key": "cores", "operator": "Exists"}]}},
            {"weight": 50, "preference": {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}},
            {"weight": 70, "preference": {}}]))
        .unwrap();
        assert_eq!(preferred_weight(&terms, &node()), 13);
    }
}
