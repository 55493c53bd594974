//! Rules of an autoscaler's spec: replicas, target, metrics, behaviour.

use serde_json::Value;
use skiff_meta::names;

use crate::core::resources::{container_resource_name, quantity};
use crate::errors::Errors;
use crate::node::{Node, at, list, text};

const SOURCES: [(&str, &str); 5] = [
    ("ContainerResource", "containerResource"),
    ("External", "external"),
    ("Object", "object"),
    ("Pods", "pods"),
    ("Resource", "resource"),
];
const PERIOD_MAX: i64 = 1800;
const WINDOW_MAX: i64 = 3600;

/// `old` is there on update: what was allowed before stays allowed.
pub fn spec(spec: &Node, old: Option<&Value>, errors: &mut Errors) {
    let (least, most) = (spec.field("minReplicas"), spec.field("maxReplicas"));
    let lowest = i64::from(old.is_none_or(|old| at(old, "minReplicas").as_i64() != Some(0)));
    if least.int().is_some_and(|n| n < lowest) {
        errors.invalid(&least, format!("must be greater than or equal to {lowest}"));
    }
    let maximum = most.int().unwrap_or(0);
    if maximum == 0 {
        errors.required(&most, "must be set and greater than 0");
    } else if maximum < 0 {
        errors.invalid(&most, "must be greater than or equal to 1");
    }
    if least.int().is_some_and(|n| maximum < n) {
        errors.invalid_value(&most, maximum, "must be greater than or equal to `minReplicas`");
    }
    let target = spec.field("scaleTargetRef");
    let unchanged = old.is_some_and(|old| {
        ["apiVersion", "kind"]
            .iter()
            .all(|name| text(at(old, "scaleTargetRef"), name) == target.field(name).str())
    });
    // The only thing of the core group that scales.
    let group_needed = target.field("kind").str() != "ReplicationController";
    reference(&target, group_needed, unchanged, errors);
    let lenient = old.is_some_and(|old| {
        list(old, "metrics").iter().any(|metric| {
            let object = at(metric, "object");
            text(metric, "type") == "Object"
                && !object.is_null()
                && version_complaint(text(object, "describedObject.apiVersion"), false).is_some()
        })
    });
    let metrics = spec.field("metrics");
    for one in metrics.items() {
        metric(&one, lenient, errors);
    }
    let unbounded = metrics
        .items()
        .any(|metric| ["Object", "External"].contains(&metric.field("type").str()));
    if least.int() == Some(0) && !unbounded {
        errors.forbidden(
            &metrics,
            "must specify at least one Object or External metric to support scaling to zero replicas",
        );
    }
    for name in ["behavior.scaleUp", "behavior.scaleDown"] {
        let rules = spec.field(name);
        if rules.is_set() {
            scaling_rules(&rules, errors);
        }
    }
}

/// What is wrong with an apiVersion of a reference.
fn version_complaint(version: &str, group_needed: bool) -> Option<String> {
    match version.split('/').count() {
        1 if group_needed => Some("apiVersion must specify API group".to_owned()),
        1 | 2 => None,
        _ => Some(format!("unexpected GroupVersion string: {version}")),
    }
}

fn reference(reference: &Node, group_needed: bool, lenient: bool, errors: &mut Errors) {
    for name in ["kind", "name"] {
        let at = reference.field(name);
        if errors.require(&at) {
            errors.rule(&at, names::path_segment(at.str(), false));
        }
    }
    let version = reference.field("apiVersion");
    if !lenient && let Some(complaint) = version_complaint(version.str(), group_needed) {
        errors.invalid(&version, complaint);
    }
}

fn metric(metric: &Node, lenient: bool, errors: &mut Errors) {
    let kind = metric.field("type");
    let supported = SOURCES.map(|(kind, _)| kind);
    if kind.is_empty() {
        errors.required(&kind, "must specify a metric source type");
    }
    errors.one_of(&kind, &supported);
    let present: Vec<&str> = ["object", "external", "pods", "resource", "containerResource"]
        .into_iter()
        .filter(|name| metric.field(name).is_set())
        .collect();
    if let Some(first) = present.first() {
        source(first, &metric.field(first), lenient, errors);
    }
    let expected = SOURCES
        .iter()
        .find(|(k, _)| *k == kind.str())
        .map(|(_, field)| *field);
    match expected {
        Some(field) if !present.contains(&field) => {
            errors.required(
                &metric.field(field),
                "must populate information for the given metric source",
            );
        }
        Some(_) => {}
        None => errors.not_supported(&kind, &supported),
    }
    if present.len() != 1 {
        for name in present.iter().filter(|name| Some(**name) != expected) {
            errors.forbidden(&metric.field(name), "must populate the given metric source only");
        }
    }
}

fn source(name: &str, source: &Node, lenient: bool, errors: &mut Errors) {
    let target = source.field("target");
    let (value, average, utilization) = (
        target.field("value"),
        target.field("averageValue"),
        target.field("averageUtilization"),
    );
    match name {
        "resource" | "containerResource" => {
            let resource = source.field("name");
            if resource.is_empty() {
                errors.required(&resource, "must specify a resource name");
            } else if name == "containerResource" {
                container_resource_name(&resource, resource.str(), errors);
            }
            if name == "containerResource" {
                let container = source.field("container");
                if container.is_empty() {
                    errors.required(&container, "must specify a container");
                } else {
                    errors.rule(&container, names::dns1123_label(container.str()));
                }
            }
            metric_target(&target, errors);
            if !utilization.is_set() && !average.is_set() {
                errors.required(
                    &utilization,
                    "must set either a target raw value or a target utilization",
                );
            }
            if utilization.is_set() && average.is_set() {
                errors.forbidden(
                    &average,
                    "may not set both a target raw value and a target utilization",
                );
            }
        }
        _ => {
            if name == "object" {
                reference(&source.field("describedObject"), false, lenient, errors);
            }
            let metric = source.field("metric.name");
            if metric.is_empty() {
                errors.required(&metric, "must specify a metric name");
            } else {
                errors.rule(&metric, names::path_segment(metric.str(), false));
            }
            metric_target(&target, errors);
            let neither = !value.is_set() && !average.is_set();
            match name {
                "object" if neither => {
                    errors.required(&average, "must set either a target value or averageValue");
                }
                "external" if neither => errors.required(
                    &average,
                    "must set either a target value for metric or a per-pod target",
                ),
                "external" if value.is_set() && average.is_set() => errors.forbidden(
                    &value,
                    "may not set both a target value for metric and a per-pod target",
                ),
                "pods" if !average.is_set() => {
                    errors.required(&average, "must specify a positive target averageValue");
                }
                _ => {}
            }
        }
    }
}

fn metric_target(target: &Node, errors: &mut Errors) {
    let kind = target.field("type");
    if kind.is_empty() {
        errors.required(&kind, "must specify a metric target type");
    }
    if !["Utilization", "Value", "AverageValue"].contains(&kind.str()) {
        errors.invalid(&kind, "must be either Utilization, Value, or AverageValue");
    }
    for name in ["value", "averageValue"] {
        let amount = target.field(name);
        if let Some(found) = quantity(amount.value).filter(|q| q.is_zero() || q.is_negative()) {
            errors.invalid_value(&amount, found.to_string(), "must be positive");
        }
    }
    let utilization = target.field("averageUtilization");
    if utilization.int().is_some_and(|n| n < 1) {
        errors.invalid(&utilization, "must be greater than 0");
    }
}

fn scaling_rules(rules: &Node, errors: &mut Errors) {
    let window = rules.field("stabilizationWindowSeconds");
    if window.int().is_some_and(|n| n < 0) {
        errors.invalid(&window, "must be greater than or equal to zero");
    }
    if window.int().is_some_and(|n| n > WINDOW_MAX) {
        errors.invalid(&window, format!("must be less than or equal to {WINDOW_MAX}"));
    }
    errors.one_of_if_set(&rules.field("selectPolicy"), &["Disabled", "Max", "Min"]);
    let policies = rules.field("policies");
    if policies.is_empty() {
        errors.required(&policies, "must specify at least one Policy");
    }
    for policy in policies.items() {
        errors.one_of(&policy.field("type"), &["Percent", "Pods"]);
        for name in ["value", "periodSeconds"] {
            let at = policy.field(name);
            let value = at.int().unwrap_or(0);
            if value <= 0 {
                errors.invalid_value(&at, value, crate::errors::POSITIVE);
            }
            if name == "periodSeconds" && value > PERIOD_MAX {
                errors.invalid(&at, format!("must be less than or equal to {PERIOD_MAX}"));
            }
        }
    }
    let tolerance = rules.field("tolerance");
    if let Some(found) = quantity(tolerance.value).filter(|q| q.is_negative()) {
        errors.invalid_value(&tolerance, found.to_string(), crate::errors::NOT_NEGATIVE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(changes: Value, expected: &[&str]) {
        let mut object = json!({"scaleTargetRef": {"kind": "Deployment", "name": "d", "apiVersion": "apps/v1"}, "minReplicas": 1, "maxReplicas": 3});
        for (name, value) in changes.as_object().into_iter().flatten() {
            crate::walk::put(&mut object, name, value.clone());
        }
        let mut errors = Errors::new();
        spec(&Node::root(&object), None, &mut errors);
        let found: Vec<String> = errors.into_vec().iter().map(ToString::to_string).collect();
        assert_eq!(found, expected, "{changes}");
    }

    #[test]
    fn specs() {
        check(json!({}), &[]);
        check(
            json!({"maxReplicas": 0}),
            &[
                "maxReplicas: Required value: must be set and greater than 0",
                "maxReplicas: Invalid value: 0: must be greater than or equal to `minReplicas`",
            ],
        );
        check(
            json!({"metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization"}}, "pods": {}}]}),
            &[
                "metrics[0].pods.metric.name: Required value: must specify a metric name",
                "metrics[0].pods.target.type: Required value: must specify a metric target type",
                "metrics[0].pods.target.type: Invalid value: \"\": must be either Utilization, Value, or AverageValue",
                "metrics[0].pods.target.averageValue: Required value: must specify a positive target averageValue",
                "metrics[0].pods: Forbidden: must populate the given metric source only",
            ],
        );
        check(
            json!({"behavior": {"scaleUp": {"policies": [{"type": "X", "value": 0, "periodSeconds": 1801}]}}}),
            &[
                "behavior.scaleUp.policies[0].type: Unsupported value: \"X\": supported values: \"Percent\", \"Pods\"",
                "behavior.scaleUp.policies[0].value: Invalid value: 0: must be greater than zero",
                "behavior.scaleUp.policies[0].periodSeconds: Invalid value: 1801: must be less than or equal to 1800",
            ],
        );
    }
}
