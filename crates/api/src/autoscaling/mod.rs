//! The group `autoscaling`: HorizontalPodAutoscalers, stored in version 2.

use serde_json::{Value, json};
use skiff_meta::names;

use crate::errors::Errors;
use crate::kind::{Again, AGE, BASE, Kind, NAME, text as column};
use crate::node::{Node, at, list, number, text};
use crate::{row, strategy, walk};

pub static HORIZONTAL_POD_AUTOSCALER: Kind = Kind {
    group: "autoscaling",
    kind: "HorizontalPodAutoscaler",
    version: "v2",
    default: |version, object| {
        let Some(spec) = walk::object(object, "spec") else {
            return;
        };
        walk::pointer(spec, "minReplicas", 1);
        // The older version has no metrics in its spec.
        if version == "v1" {
            return;
        }
        if list(spec, "metrics").is_empty() {
            walk::put(
                spec,
                "metrics",
                json!([{"type": "Resource", "resource": {"name": "cpu",
                    "target": {"type": "Utilization", "averageUtilization": 80}}}]),
            );
        }
        walk::each(spec, "behavior", &mut |behavior| {
            rules(
                behavior,
                "scaleUp",
                json!({"stabilizationWindowSeconds": 0, "selectPolicy": "Max", "policies": [
                {"type": "Pods", "value": 4, "periodSeconds": 15}, {"type": "Percent", "value": 100, "periodSeconds": 15}]}),
            );
            rules(
                behavior,
                "scaleDown",
                json!({"selectPolicy": "Max", "policies": [
                {"type": "Percent", "value": 100, "periodSeconds": 15}]}),
            );
        });
    },
    prepare_create: strategy::create_without_status,
    prepare_update: strategy::update_keep_status,
    validate: |object| {
        let mut errors = Errors::new();
        spec(&Node::root(object).field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, _| (HORIZONTAL_POD_AUTOSCALER.validate)(new),
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.non_negative(&root.field("status.currentReplicas"));
        errors.non_negative(&root.field("status.desiredReplicas"));
        errors.into_vec()
    },
    columns: &[
        NAME,
        column("Reference"),
        column("Targets"),
        column("MinPods"),
        column("MaxPods"),
        column("Replicas"),
        AGE,
    ],
    row: |object, now| {
        let least = at(object, "spec.minReplicas")
            .as_i64()
            .map_or_else(|| "<unset>".to_owned(), |n| n.to_string());
        vec![
            row::name(object),
            json!(format!(
                "{}/{}",
                text(object, "spec.scaleTargetRef.kind"),
                text(object, "spec.scaleTargetRef.name")
            )),
            json!(metrics(object)),
            json!(least),
            json!(number(object, "spec.maxReplicas")),
            json!(number(object, "status.currentReplicas")),
            row::age(object, now),
        ]
    },
    has_status: true,
    update_again: Again::Change,
    ..BASE
};

/// Completes one direction's rules; a client may give any part of them.
fn rules(behavior: &mut Value, name: &str, defaults: Value) {
    let Some(given) = walk::object(behavior, name) else {
        return;
    };
    for (field, value) in defaults.as_object().into_iter().flatten() {
        walk::pointer(given, field, value.clone());
    }
}

fn spec(spec: &Node, errors: &mut Errors) {
    let (least, most) = (spec.field("minReplicas"), spec.field("maxReplicas"));
    if least.int().is_some_and(|n| n < 1) {
        errors.invalid(&least, "must be greater than or equal to 1");
    }
    let maximum = most.int().unwrap_or(0);
    if maximum < 1 {
        errors.invalid_value(&most, maximum, "must be greater than 0");
    }
    if least.int().is_some_and(|n| maximum < n) {
        errors.invalid_value(&most, maximum, "must be greater than or equal to `minReplicas`");
    }
    let target = spec.field("scaleTargetRef");
    for name in ["kind", "name"] {
        let at = target.field(name);
        if errors.require(&at) {
            errors.rule(&at, names::path_segment(at.str(), false));
        }
    }
    let metrics = spec.field("metrics");
    for metric in metrics.items() {
        let kind = metric.field("type");
        if kind.is_empty() {
            errors.required(&kind, "must specify a metric source type");
            continue;
        }
        let sources = ["ContainerResource", "External", "Object", "Pods", "Resource"];
        errors.one_of(&kind, &sources);
        let mut field = kind.str().to_owned();
        field[..1].make_ascii_lowercase();
        let source = metric.field(&field);
        if sources.contains(&kind.str()) && !source.is_set() {
            errors.required(&source, "must populate information for the given metric source");
        } else if ["Resource", "ContainerResource"].contains(&kind.str()) {
            if source.field("name").is_empty() {
                errors.required(&source.field("name"), "must specify a resource name");
            }
            let target = source.field("target");
            if target.field("type").is_empty() {
                errors.required(&target.field("type"), "must specify a metric target type");
            }
            let utilization = target.field("averageUtilization");
            if utilization.int().is_some_and(|n| n < 1) {
                errors.invalid(&utilization, "must be greater than 0");
            }
            if !utilization.is_set() && !target.field("averageValue").is_set() {
                errors.required(
                    &utilization,
                    "must set either a target raw value or a target utilization",
                );
            }
        }
    }
}

fn metrics(object: &Value) -> String {
    let specs = list(object, "spec.metrics");
    if specs.is_empty() {
        return row::NONE.to_owned();
    }
    let statuses = list(object, "status.currentMetrics");
    let shown: Vec<String> = specs
        .iter()
        .enumerate()
        .map(|(i, spec)| metric(spec, statuses.get(i)))
        .collect();
    if shown.len() > 2 {
        format!("{} + {} more...", shown[..2].join(", "), shown.len() - 2)
    } else {
        shown.join(", ")
    }
}

fn metric(spec: &Value, status: Option<&Value>) -> String {
    let kind = text(spec, "type");
    let field = match kind {
        "External" => "external",
        "Pods" => "pods",
        "Object" => "object",
        "Resource" => "resource",
        "ContainerResource" => "containerResource",
        _ => return "<unknown type>".to_owned(),
    };
    let source = at(spec, field);
    let current = |name: &str| {
        let value = status.map_or(&Value::Null, |s| at(at(s, field), "current"));
        match at(value, name) {
            Value::Null => row::UNKNOWN.to_owned(),
            Value::String(text) => text.clone(),
            other => format!("{other}%"),
        }
    };
    let average = text(source, "target.averageValue");
    match field {
        "pods" => format!("{}/{average}", current("averageValue")),
        "external" | "object" if !average.is_empty() => {
            format!("{}/{average} (avg)", current("averageValue"))
        }
        "external" | "object" => format!("{}/{}", current("value"), text(source, "target.value")),
        _ => {
            let name = text(source, "name");
            if average.is_empty() {
                let target = at(source, "target.averageUtilization")
                    .as_i64()
                    .map_or_else(|| "<auto>".to_owned(), |n| format!("{n}%"));
                format!("{name}: {}/{target}", current("averageUtilization"))
            } else {
                format!("{name}: {}/{average}", current("averageValue"))
            }
        }
    }
}
