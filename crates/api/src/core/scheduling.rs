//! Rules of where a pod may run: node selectors, affinity, tolerations, topology spread.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use skiff_meta::names;

use super::label_keys;
use crate::errors::Errors;
use crate::node::Node;
use crate::object_meta::{self, label_selector};

pub const TAINT_EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

pub fn affinity(affinity: &Node, errors: &mut Errors) {
    let node = affinity.field("nodeAffinity");
    let required = node.field("requiredDuringSchedulingIgnoredDuringExecution");
    if required.is_set() {
        node_selector(&required, errors);
    }
    let preferred = node.field("preferredDuringSchedulingIgnoredDuringExecution");
    for term in preferred.items() {
        weight(&term, errors);
        node_selector_term(&term.field("preference"), false, errors);
    }
    for name in ["podAffinity", "podAntiAffinity"] {
        let pod = affinity.field(name);
        let required = pod.field("requiredDuringSchedulingIgnoredDuringExecution");
        for term in required.items() {
            pod_affinity_term(&term, errors);
        }
        let preferred = pod.field("preferredDuringSchedulingIgnoredDuringExecution");
        for term in preferred.items() {
            weight(&term, errors);
            pod_affinity_term(&term.field("podAffinityTerm"), errors);
        }
    }
}

fn weight(term: &Node, errors: &mut Errors) {
    let weight = term.field("weight");
    let value = weight.int().unwrap_or(0);
    if !(1..=100).contains(&value) {
        errors.invalid_value(&weight, value, "must be in the range 1-100");
    }
}

/// A required node selector, in pods and in persistent volumes.
pub fn node_selector(selector: &Node, errors: &mut Errors) {
    node_selector_with(selector, false, errors);
}

/// The same, where an object that has bad label values already may keep them.
pub fn node_selector_with(selector: &Node, any_value: bool, errors: &mut Errors) {
    let terms = selector.field("nodeSelectorTerms");
    if terms.is_empty() {
        errors.required(&terms, "must have at least one node selector term");
    }
    for term in terms.items() {
        node_selector_term(&term, !any_value, errors);
    }
}

fn node_selector_term(term: &Node, check_values: bool, errors: &mut Errors) {
    let expressions = term.field("matchExpressions");
    for requirement in expressions.items() {
        let values = requirement.field("values");
        match requirement.field("operator").str() {
            "In" | "NotIn" if values.is_empty() => {
                errors.required(&values, "must be specified when `operator` is 'In' or 'NotIn'");
            }
            "Exists" | "DoesNotExist" if !values.is_empty() => {
                errors.forbidden(
                    &values,
                    "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
                );
            }
            "Gt" | "Lt" if values.len() != 1 => {
                errors.required(
                    &values,
                    "must be specified single value when `operator` is 'Lt' or 'Gt'",
                );
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt" => {}
            _ => errors.invalid(&requirement.field("operator"), "not a valid selector operator"),
        }
        let key = requirement.field("key");
        errors.rule(&key, names::qualified_name(key.str()));
        if check_values {
            for value in values.items() {
                errors.rule(&value, names::label_value(value.str()));
            }
        }
    }
    let fields = term.field("matchFields");
    for requirement in fields.items() {
        let values = requirement.field("values");
        match requirement.field("operator").str() {
            "In" | "NotIn" => {
                if values.len() != 1 {
                    errors.required(
                        &values,
                        "must be only one value when `operator` is 'In' or 'NotIn' for node field selector",
                    );
                }
            }
            _ => errors.invalid(&requirement.field("operator"), "not a valid selector operator"),
        }
        let key = requirement.field("key");
        if key.str() == "metadata.name" {
            for value in values.items() {
                errors.rule(&value, names::dns1123_subdomain(value.str()));
            }
        } else {
            errors.invalid(&key, "not a valid field selector key");
        }
    }
}

fn pod_affinity_term(term: &Node, errors: &mut Errors) {
    label_selector(&term.field("labelSelector"), errors);
    label_selector(&term.field("namespaceSelector"), errors);
    let namespaces = term.field("namespaces");
    for name in namespaces.items() {
        let at = term.field("namespace");
        errors.rule(&at.with(name.value), names::dns1123_label(name.str()));
    }
    label_keys::validate(term, errors);
    let topology = term.field("topologyKey");
    if topology.str().is_empty() {
        errors.required(&topology, "can not be empty");
    }
    errors.rule(&topology, names::qualified_name(topology.str()));
}

pub fn tolerations(tolerations: &Node, errors: &mut Errors) {
    for toleration in tolerations.items() {
        let (key, operator, effect) = (
            toleration.field("key"),
            toleration.field("operator"),
            toleration.field("effect"),
        );
        let value = toleration.field("value");
        if !key.str().is_empty() {
            errors.rule(&key, names::qualified_name(key.str()));
        }
        if key.str().is_empty() && operator.str() != "Exists" {
            errors.invalid(
                &operator,
                "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
            );
        }
        if toleration.field("tolerationSeconds").is_set() && effect.str() != "NoExecute" {
            errors.invalid(
                &effect,
                "effect must be 'NoExecute' when `tolerationSeconds` is set",
            );
        }
        match operator.str() {
            "Equal" | "" => {
                let complaints = names::label_value(value.str());
                if !complaints.is_empty() {
                    errors.invalid_value(&operator, value.str(), complaints.join(";"));
                }
            }
            "Exists" => {
                if !value.str().is_empty() {
                    errors.invalid_value(
                        &operator,
                        value.str(),
                        "value must be empty when `operator` is 'Exists'",
                    );
                }
            }
            "Lt" | "Gt" => errors.not_supported(&operator, &["Equal", "Exists", "Lt", "Gt"]),
            _ => errors.not_supported(&operator, &["Equal", "Exists"]),
        }
        if !effect.str().is_empty() {
            errors.one_of(&effect, &TAINT_EFFECTS);
        }
    }
}

pub fn topology_spread(constraints: &Node, errors: &mut Errors) {
    let pair_of = |constraint: &'_ Value| {
        let text = |name: &str| {
            constraint
                .get(name)
                .and_then(Value::as_str)
                .unwrap_or("")
                .to_owned()
        };
        (text("topologyKey"), text("whenUnsatisfiable"))
    };
    let all = constraints.value.as_array().map_or(&[][..], Vec::as_slice);
    // Where each pair stands last.
    let last: BTreeMap<_, usize> = all.iter().map(pair_of).zip(0..).collect();
    for (i, constraint) in constraints.items().enumerate() {
        let skew = constraint.field("maxSkew");
        if skew.int().unwrap_or(0) <= 0 {
            errors.invalid_value(&skew, skew.int().unwrap_or(0), crate::errors::POSITIVE);
        }
        let topology = constraint.field("topologyKey");
        if topology.str().is_empty() {
            errors.required(&topology, "can not be empty");
        }
        let action = constraint.field("whenUnsatisfiable");
        errors.one_of(&action, &["DoNotSchedule", "ScheduleAnyway"]);
        if last.get(&pair_of(constraint.value)).is_some_and(|last| *last > i) {
            let pair = format!("{{{}, {}}}", topology.str(), action.str());
            errors.duplicate_value(&constraint.field("{topologyKey, whenUnsatisfiable}"), pair);
        }
        let domains = constraint.field("minDomains");
        if domains.is_set() {
            errors.positive(&domains);
            if action.str() != "DoNotSchedule" {
                let detail = format!(
                    "can only use minDomains if whenUnsatisfiable=DoNotSchedule, not {}",
                    action.str()
                );
                errors.invalid(&domains, detail);
            }
        }
        for name in ["nodeAffinityPolicy", "nodeTaintsPolicy"] {
            errors.one_of_if_set(&constraint.field(name), &["Honor", "Ignore"]);
        }
        label_keys::validate(&constraint, errors);
        label_selector(&constraint.field("labelSelector"), errors);
    }
}

/// Taints of a node.
pub fn taints(taints: &Node, errors: &mut Errors) {
    let mut seen: BTreeSet<(&str, &str)> = BTreeSet::new();
    for taint in taints.items() {
        let (key, value, effect) = (taint.field("key"), taint.field("value"), taint.field("effect"));
        errors.rule(&key, names::qualified_name(key.str()));
        let complaints = names::label_value(value.str());
        if !complaints.is_empty() {
            errors.invalid(&value, complaints.join(";"));
        }
        errors.required_one_of(&effect, &TAINT_EFFECTS);
        let pair = (key.str(), effect.str());
        if seen.contains(&pair) {
            // COMPAT: upstream prints its inner type here.
            let [key, value, effect] = ["key", "value", "effect"].map(|name| json!(taint.field(name).str()));
            let shown = match taint.field("timeAdded").value {
                Value::Null => Value::Null,
                time => time.clone(),
            };
            errors.duplicate_text(
                &taint,
                &format!(r#"{{"Key":{key},"Value":{value},"Effect":{effect},"TimeAdded":{shown}}}"#),
            );
            errors.because("taints must be unique by key and effect pair");
        }
        seen.insert(pair);
    }
}

/// A node selector map: labels.
pub fn node_selector_map(selector: &Node, errors: &mut Errors) {
    object_meta::labels(selector, errors);
}
