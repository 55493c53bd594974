//! `autoscaling/v1` Scale: the replica count of a workload, by itself.

use serde_json::{Value, json};
use skiff_meta::selector::LabelSelector;
use skiff_meta::{GroupKind, Status, field};

use crate::object;

/// The Scale of a workload.
pub fn scale_of(workload: &Value) -> Value {
    let mut metadata = serde_json::Map::new();
    for field in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
        if let Some(value) = object::metadata(workload, field) {
            metadata.insert(field.to_string(), value.clone());
        }
    }
    let replicas = |path: [&str; 2]| object::at(workload, &path).and_then(Value::as_i64).unwrap_or(0);
    let mut spec = json!({});
    let wanted = replicas(["spec", "replicas"]);
    if wanted != 0 {
        spec["replicas"] = json!(wanted);
    }
    let mut status = json!({"replicas": replicas(["status", "replicas"])});
    let selector = selector_text(object::at(workload, &["spec", "selector"]));
    if !selector.is_empty() {
        status["selector"] = json!(selector);
    }
    json!({"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status})
}

/// Puts a Scale into its workload.
pub fn apply_scale(workload: &Value, scale: &Value) -> Result<Value, Status> {
    let replicas = object::at(scale, &["spec", "replicas"])
        .and_then(Value::as_i64)
        .unwrap_or(0);
    if replicas < 0 {
        let path = field::Path::new("spec.replicas");
        let error = field::Error::invalid(&path, replicas, "must be greater than or equal to 0");
        return Err(Status::invalid(
            &GroupKind::new("autoscaling", "Scale"),
            object::name(workload),
            &[error],
        ));
    }
    let mut workload = workload.clone();
    object::put(&mut workload, &["spec", "replicas"], json!(replicas));
    for field in ["resourceVersion", "uid"] {
        match object::text(scale, field) {
            "" if field == "resourceVersion" => object::set(&mut workload, field, ""),
            "" => {}
            text => object::set(&mut workload, field, text),
        }
    }
    Ok(workload)
}

/// A selector in its query form; a plain map is a ReplicationController's.
fn selector_text(selector: Option<&Value>) -> String {
    let Some(selector) = selector.and_then(Value::as_object) else {
        return String::new();
    };
    let is_map = !selector.is_empty() && selector.values().all(Value::is_string);
    let mut terms = Vec::new();
    let labels = if is_map {
        Some(selector)
    } else {
        selector.get("matchLabels").and_then(Value::as_object)
    };
    for (key, value) in labels.into_iter().flatten() {
        terms.push((key.clone(), format!("{key}={}", value.as_str().unwrap_or(""))));
    }
    for expression in selector
        .get("matchExpressions")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        let key = expression
            .get("key")
            .and_then(Value::as_str)
            .unwrap_or("")
            .to_string();
        let mut values: Vec<&str> = expression
            .get("values")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        values.sort_unstable();
        let text = match expression.get("operator").and_then(Value::as_str).unwrap_or("") {
            "In" => format!("{key} in ({})", values.join(",")),
            "NotIn" => format!("{key} notin ({})", values.join(",")),
            "Exists" => key.clone(),
            "DoesNotExist" => format!("!{key}"),
            _ => continue,
        };
        terms.push((key, text));
    }
    terms.sort_by(|a, b| a.0.cmp(&b.0));
    let text = terms
        .into_iter()
        .map(|(_, text)| text)
        .collect::<Vec<_>>()
        .join(",");
    debug_assert!(LabelSelector::parse(&text).is_ok(), "{text}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales() {
        let workload = json!({"metadata": {"name": "web", "uid": "u", "resourceVersion": "5", "labels": {"a": "b"}},
            "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": "In", "values": ["b", "a"]}]}},
            "status": {"replicas": 2}});
        let scale = scale_of(&workload);
        assert_eq!(scale["spec"]["replicas"], 3);
        assert_eq!(
            scale["status"],
            json!({"replicas": 2, "selector": "app=web,tier in (a,b)"})
        );
        assert!(scale["metadata"].get("labels").is_none());
        let changed = apply_scale(
            &workload,
            &json!({"metadata": {"resourceVersion": "4"}, "spec": {"replicas": 7}}),
        )
        .expect("applies");
        assert_eq!(
            (
                changed["spec"]["replicas"].as_i64(),
                object::resource_version(&changed)
            ),
            (Some(7), "4")
        );
        assert!(apply_scale(&workload, &json!({"spec": {"replicas": -1}})).is_err());
    }
}
