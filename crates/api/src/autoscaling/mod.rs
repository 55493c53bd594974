//! The group `autoscaling`: HorizontalPodAutoscalers, stored in version 2.

mod convert;
mod rules;

use serde_json::{Value, json};

use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Converter, Kind, NAME, text as column};
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
            direction(
                behavior,
                "scaleUp",
                json!({"stabilizationWindowSeconds": 0, "selectPolicy": "Max", "policies": [
                {"type": "Pods", "value": 4, "periodSeconds": 15}, {"type": "Percent", "value": 100, "periodSeconds": 15}]}),
            );
            direction(
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
        rules::spec(&Node::root(object).field("spec"), None, &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        rules::spec(&Node::root(new).field("spec"), Some(at(old, "spec")), &mut errors);
        errors.into_vec()
    },
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
    converters: &[Converter {
        version: "v1",
        to_stored: convert::to_v2,
        from_stored: convert::from_v2,
    }],
    ..BASE
};

/// Completes one direction's rules; a client may give any part of them.
fn direction(behavior: &mut Value, name: &str, defaults: Value) {
    let Some(given) = walk::object(behavior, name) else {
        return;
    };
    for (field, value) in defaults.as_object().into_iter().flatten() {
        walk::pointer(given, field, value.clone());
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
