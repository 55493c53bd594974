//! Label keys of a pod's affinity and spreading: a new pod's own labels under these keys become requirements of the
//! selector beside them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use skiff_meta::names;

use crate::errors::Errors;
use crate::node::{Node, at, list, text};
use crate::walk;

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution[]";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm";

/// Writes the labels of a new pod into its selectors.
pub fn merge(pod: &mut Value) {
    if list(pod, "spec.topologySpreadConstraints").is_empty() && at(pod, "spec.affinity").is_null() {
        return;
    }
    let labels = at(pod, "metadata.labels").clone();
    for affinity in ["podAffinity", "podAntiAffinity"] {
        for terms in [PREFERRED, REQUIRED] {
            walk::each(pod, &format!("spec.affinity.{affinity}.{terms}"), &mut |term| {
                apply(term, "matchLabelKeys", "In", &labels);
                apply(term, "mismatchLabelKeys", "NotIn", &labels);
            });
        }
    }
    walk::each(pod, "spec.topologySpreadConstraints[]", &mut |constraint| {
        apply(constraint, "matchLabelKeys", "In", &labels);
    });
}

fn apply(term: &mut Value, keys: &str, operator: &str, labels: &Value) {
    let more: Vec<Value> = strings(at(term, keys))
        .filter_map(|key| {
            let value = labels.get(key)?;
            Some(json!({"key": key, "operator": operator, "values": [value]}))
        })
        .collect();
    let selector = term
        .get_mut("labelSelector")
        .filter(|selector| selector.is_object());
    if let Some(selector) = selector.filter(|_| !more.is_empty()) {
        let all = [list(selector, "matchExpressions"), &more].concat();
        walk::put(selector, "matchExpressions", Value::Array(all));
    }
}

/// The rules of the keys of a term.
pub fn validate(term: &Node, errors: &mut Errors) {
    let (matched, mismatched) = (term.field("matchLabelKeys"), term.field("mismatchLabelKeys"));
    label_names(term, &matched, errors);
    label_names(term, &mismatched, errors);
    // What was merged is there once; a key that is there before that was given twice.
    let places: BTreeMap<&str, usize> = strings(matched.value).zip(0..).collect();
    let selector = term.field("labelSelector");
    let mut seen: BTreeSet<&str> = at(selector.value, "matchLabels")
        .as_object()
        .into_iter()
        .flat_map(|labels| labels.keys().map(String::as_str))
        .collect();
    for expression in list(selector.value, "matchExpressions") {
        let key = text(expression, "key");
        if let Some(place) = places.get(key).filter(|_| seen.contains(key)) {
            // COMPAT: the index stands behind the term, not behind its keys.
            errors.invalid_value(
                &term.index(*place),
                key,
                "exists in both matchLabelKeys and labelSelector",
            );
        }
        seen.insert(key);
    }
    let refused: BTreeSet<&str> = strings(mismatched.value).collect();
    for key in matched.items() {
        if refused.contains(key.str()) {
            errors.invalid(&key, "exists in both matchLabelKeys and mismatchLabelKeys");
        }
    }
}

fn label_names(term: &Node, keys: &Node, errors: &mut Errors) {
    if !keys.is_empty() && !term.field("labelSelector").is_set() {
        return errors.forbidden(keys, "must not be specified when labelSelector is not set");
    }
    for key in keys.items() {
        errors.rule(&key, names::qualified_name(key.str()));
    }
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_labels_join_the_selectors() {
        let selector = json!({"matchLabels": {"x": "y"}});
        let mut pod = json!({
            "metadata": {"labels": {"a": "1", "b": "2"}},
            "spec": {
                "affinity": {"podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {"labelSelector": selector, "matchLabelKeys": ["a", "none"], "mismatchLabelKeys": ["b"]}
                    ],
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {"weight": 1, "podAffinityTerm": {"matchLabelKeys": ["a"]}}
                    ]
                }},
                "topologySpreadConstraints": [{"labelSelector": {}, "matchLabelKeys": ["b"]}]
            }
        });
        merge(&mut pod);
        let affinity = &pod["spec"]["affinity"]["podAntiAffinity"];
        let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"][0]["labelSelector"];
        assert_eq!(
            *required,
            json!({"matchLabels": {"x": "y"}, "matchExpressions": [
                {"key": "a", "operator": "In", "values": ["1"]},
                {"key": "b", "operator": "NotIn", "values": ["2"]}
            ]})
        );
        assert_eq!(
            affinity["preferredDuringSchedulingIgnoredDuringExecution"][0]["podAffinityTerm"],
            json!({"matchLabelKeys": ["a"]})
        );
        assert_eq!(
            pod["spec"]["topologySpreadConstraints"][0]["labelSelector"],
            json!({"matchExpressions": [{"key": "b", "operator": "In", "values": ["2"]}]})
        );
    }

    #[test]
    fn a_key_may_not_be_given_twice() {
        let check = |selector: Value, expected: &[&str]| {
            let pod = json!({"labelSelector": selector, "matchLabelKeys": ["b", "a"]});
            let mut errors = Errors::new();
            validate(&Node::root(&json!({ "t": pod })).field("t"), &mut errors);
            let found: Vec<String> = errors.into_vec().iter().map(ToString::to_string).collect();
            assert_eq!(found, expected);
        };
        let merged = json!({"key": "a", "operator": "In", "values": ["1"]});
        check(json!({"matchExpressions": [merged]}), &[]);
        check(
            json!({"matchLabels": {"a": "1"}, "matchExpressions": [merged]}),
            &["t[1]: Invalid value: \"a\": exists in both matchLabelKeys and labelSelector"],
        );
    }
}
