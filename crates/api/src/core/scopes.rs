//! Scopes of a quota: which of a namespace's objects it counts.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::field::ErrorType;

use crate::errors::Errors;
use crate::node::{Node, at};

const SCOPES: [&str; 7] = [
    "BestEffort",
    "CrossNamespacePodAffinity",
    "NotBestEffort",
    "NotTerminating",
    "PriorityClass",
    "Terminating",
    "VolumeAttributesClass",
];
const PODS: [&str; 7] = [
    "cpu",
    "memory",
    "requests.cpu",
    "requests.memory",
    "limits.cpu",
    "limits.memory",
    "pods",
];
/// What a quota may limit without a prefix.
pub const QUOTA_RESOURCES: [&str; 19] = [
    "cpu",
    "memory",
    "ephemeral-storage",
    "requests.cpu",
    "requests.memory",
    "requests.storage",
    "requests.ephemeral-storage",
    "limits.cpu",
    "limits.memory",
    "limits.ephemeral-storage",
    "pods",
    "resourcequotas",
    "services",
    "replicationcontrollers",
    "secrets",
    "persistentvolumeclaims",
    "configmaps",
    "services.nodeports",
    "services.loadbalancers",
];
const EXISTS_ONLY: &str = "must be 'Exists' when scope is any of ResourceQuotaScopeTerminating, ResourceQuotaScopeNotTerminating, ResourceQuotaScopeBestEffort, ResourceQuotaScopeNotBestEffort or ResourceQuotaScopeCrossNamespacePodAffinity";

pub fn is_huge(name: &str) -> bool {
    name.starts_with("hugepages-") || name.starts_with("requests.hugepages-")
}

/// Whether a scope can say anything about what is limited.
fn fits(scope: &str, resource: &str) -> bool {
    let about_pods = PODS.contains(&resource);
    match scope {
        "BestEffort" => resource == "pods",
        "VolumeAttributesClass" => ["persistentvolumeclaims", "requests.storage"].contains(&resource),
        "Terminating"
        | "NotTerminating"
        | "NotBestEffort"
        | "PriorityClass"
        | "CrossNamespacePodAffinity" => about_pods,
        _ => true,
    }
}

fn misfits(spec: &Node, scope: &str) -> usize {
    at(spec.value, "hard")
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(name, _)| (QUOTA_RESOURCES.contains(&name.as_str()) || is_huge(name)) && !fits(scope, name))
        .count()
}

fn conflicts(at: &Node, scopes: &BTreeSet<&str>, shown: &Value, errors: &mut Errors) {
    for pair in [["BestEffort", "NotBestEffort"], ["NotTerminating", "Terminating"]] {
        if pair.iter().all(|scope| scopes.contains(scope)) {
            errors.push(ErrorType::Invalid, at, Some(shown.clone()), "conflicting scopes");
        }
    }
}

/// `scopes` and `scopeSelector` of a quota's spec.
pub fn scopes(spec: &Node, errors: &mut Errors) {
    let scopes = spec.field("scopes");
    let mut seen = BTreeSet::new();
    for scope in scopes.items() {
        if !SCOPES.contains(&scope.str()) {
            errors.invalid(&scopes, "unsupported scope");
        }
        for _ in 0..misfits(spec, scope.str()) {
            errors.invalid(&scopes, "unsupported scope applied to resource");
        }
        seen.insert(scope.str());
    }
    conflicts(&scopes, &seen, scopes.value, errors);
    selector(spec, errors);
}

fn selector(spec: &Node, errors: &mut Errors) {
    // COMPAT: no path names the index of the expression.
    let expressions = spec.field("scopeSelector.matchExpressions");
    let mut seen = BTreeSet::new();
    for expression in expressions.items() {
        let (scope, operator) = (expression.field("scopeName"), expression.field("operator"));
        let name = expressions.field("scopeName");
        if !SCOPES.contains(&scope.str()) {
            errors.invalid(&name.with(scope.value), "unsupported scope");
        }
        for _ in 0..misfits(spec, scope.str()) {
            errors.invalid_value(
                &expressions,
                go_selector(expressions.value),
                "unsupported scope applied to resource",
            );
        }
        let at = expressions.field("operator");
        let shown = at.with(operator.value);
        let valued = ["PriorityClass", "VolumeAttributesClass"].contains(&scope.str());
        if SCOPES.contains(&scope.str()) && !valued && operator.str() != "Exists" {
            errors.invalid(&shown, EXISTS_ONLY);
        }
        let at = expressions.field("values");
        let values = at.with(expression.field("values").value);
        match operator.str() {
            "In" | "NotIn" if values.is_empty() => errors.required(
                &values,
                "must be at least one value when `operator` is 'In' or 'NotIn' for scope selector",
            ),
            "Exists" | "DoesNotExist" if !values.is_empty() => errors.invalid(
                &values,
                "must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector",
            ),
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            _ => errors.invalid(&shown, "not a valid selector operator"),
        }
        seen.insert(scope.str());
    }
    conflicts(&expressions, &seen, at(spec.value, "scopes"), errors);
}

/// COMPAT: upstream prints its inner type.
fn go_selector(expressions: &Value) -> Value {
    let inner: Vec<Value> = expressions
        .as_array()
        .into_iter()
        .flatten()
        .map(|e| json!({"ScopeName": at(e, "scopeName"), "Operator": at(e, "operator"), "Values": at(e, "values")}))
        .collect();
    json!({ "MatchExpressions": inner })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(spec: Value, expected: &[&str]) {
        let mut errors = Errors::new();
        scopes(&Node::root(&spec), &mut errors);
        let found: Vec<String> = errors.into_vec().iter().map(ToString::to_string).collect();
        assert_eq!(found, expected, "{spec}");
    }

    #[test]
    fn quota_scopes() {
        check(json!({"hard": {"pods": "1"}, "scopes": ["BestEffort"]}), &[]);
        check(
            json!({"hard": {"cpu": "1"}, "scopes": ["BestEffort"]}),
            &["scopes: Invalid value: [\"BestEffort\"]: unsupported scope applied to resource"],
        );
        check(
            json!({"scopes": ["BestEffort", "NotBestEffort"]}),
            &["scopes: Invalid value: [\"BestEffort\",\"NotBestEffort\"]: conflicting scopes"],
        );
        check(
            json!({"scopeSelector": {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In"}]}}),
            &[
                "scopeSelector.matchExpressions.values: Required value: must be at least one value when `operator` is 'In' or 'NotIn' for scope selector",
            ],
        );
        check(
            json!({"scopeSelector": {"matchExpressions": [{"scopeName": "Terminating", "operator": "DoesNotExist"}]}}),
            &[
                "scopeSelector.matchExpressions.operator: Invalid value: \"DoesNotExist\": must be 'Exists' when scope is any of ResourceQuotaScopeTerminating, ResourceQuotaScopeNotTerminating, ResourceQuotaScopeBestEffort, ResourceQuotaScopeNotBestEffort or ResourceQuotaScopeCrossNamespacePodAffinity",
            ],
        );
    }
}
