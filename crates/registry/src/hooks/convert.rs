//! Conversion between the served versions of one stored resource. Where two versions have the same
//! shape only apiVersion differs, and nothing here is needed.

use serde_json::{Map, Value, json};

/// How to get from a served version to the stored one and back.
pub struct Converter {
    pub to_stored: fn(&mut Value),
    pub from_stored: fn(&mut Value),
}

/// The converter of `kind` served as `group`/`version`, where its shape differs from the stored one.
pub fn converter(group: &str, version: &str, kind: &str) -> Option<Converter> {
    match (group, version, kind) {
        ("events.k8s.io", "v1", "Event") => Some(Converter {
            to_stored: event_to_core,
            from_stored: event_from_core,
        }),
        ("autoscaling", "v1", "HorizontalPodAutoscaler") => Some(Converter {
            to_stored: autoscaler_to_v2,
            from_stored: autoscaler_from_v2,
        }),
        _ => None,
    }
}

const EVENT_FIELDS: [(&str, &str); 4] = [
    ("regarding", "involvedObject"),
    ("note", "message"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
];

fn event_to_core(event: &mut Value) {
    let Some(map) = event.as_object_mut() else { return };
    for (new, old) in EVENT_FIELDS {
        rename(map, new, old);
    }
    rename(map, "deprecatedSource", "source");
    rename(map, "deprecatedCount", "count");
    rename(map, "reportingController", "reportingComponent");
}

fn event_from_core(event: &mut Value) {
    let Some(map) = event.as_object_mut() else { return };
    for (new, old) in EVENT_FIELDS {
        rename(map, old, new);
    }
    rename(map, "source", "deprecatedSource");
    rename(map, "count", "deprecatedCount");
    rename(map, "reportingComponent", "reportingController");
}

fn rename(map: &mut Map<String, Value>, from: &str, to: &str) {
    if let Some(value) = map.remove(from) {
        map.insert(to.to_string(), value);
    }
}

const METRICS_ANNOTATION: &str = "autoscaling.alpha.kubernetes.io/metrics";
const BEHAVIOR_ANNOTATION: &str = "autoscaling.alpha.kubernetes.io/behavior";
const CONDITIONS_ANNOTATION: &str = "autoscaling.alpha.kubernetes.io/conditions";
const CURRENT_ANNOTATION: &str = "autoscaling.alpha.kubernetes.io/current-metrics";

fn annotations(object: &mut Value) -> &mut Map<String, Value> {
    let metadata = crate::object::metadata_mut(object);
    let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
    if !annotations.is_object() {
        *annotations = json!({});
    }
    annotations.as_object_mut().expect("made an object above")
}

fn take_annotation(object: &mut Value, key: &str) -> Option<Value> {
    let text = annotations(object).remove(key)?;
    serde_json::from_str(text.as_str()?).ok()
}

fn put_annotation(object: &mut Value, key: &str, value: &Value) {
    annotations(object).insert(key.to_string(), Value::String(value.to_string()));
}

fn drop_empty_annotations(object: &mut Value) {
    if annotations(object).is_empty() {
        crate::object::metadata_mut(object).remove("annotations");
    }
}

fn cpu_metric(target: &Value) -> Value {
    json!({"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": target}}})
}

fn is_cpu_utilization(metric: &Value) -> bool {
    metric["type"] == "Resource"
        && metric["resource"]["name"] == "cpu"
        && metric["resource"]["target"]["averageUtilization"].is_number()
}

/// v1 knows one metric; the others travel in annotations, as upstream keeps them.
fn autoscaler_to_v2(object: &mut Value) {
    let mut metrics = match take_annotation(object, METRICS_ANNOTATION) {
        Some(Value::Array(list)) => list,
        _ => Vec::new(),
    };
    let behavior = take_annotation(object, BEHAVIOR_ANNOTATION);
    let conditions = take_annotation(object, CONDITIONS_ANNOTATION);
    let current = take_annotation(object, CURRENT_ANNOTATION);
    drop_empty_annotations(object);
    if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
        if let Some(target) = spec.remove("targetCPUUtilizationPercentage") {
            metrics.insert(0, cpu_metric(&target));
        }
        if !metrics.is_empty() {
            spec.insert("metrics".to_string(), Value::Array(metrics));
        }
        if let Some(behavior) = behavior {
            spec.insert("behavior".to_string(), behavior);
        }
    }
    if let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) {
        let mut list = match current {
            Some(Value::Array(list)) => list,
            _ => Vec::new(),
        };
        if let Some(used) = status.remove("currentCPUUtilizationPercentage") {
            list.insert(0, json!({"type": "Resource", "resource": {"name": "cpu", "current": {"averageUtilization": used}}}));
        }
        if !list.is_empty() {
            status.insert("currentMetrics".to_string(), Value::Array(list));
        }
        if let Some(conditions) = conditions {
            status.insert("conditions".to_string(), conditions);
        }
    }
}

fn autoscaler_from_v2(object: &mut Value) {
    let mut others = Vec::new();
    let mut behavior = None;
    if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
        if let Some(Value::Array(metrics)) = spec.remove("metrics") {
            for metric in metrics {
                if is_cpu_utilization(&metric) && !spec.contains_key("targetCPUUtilizationPercentage") {
                    let target = metric["resource"]["target"]["averageUtilization"].clone();
                    spec.insert("targetCPUUtilizationPercentage".to_string(), target);
                } else {
                    others.push(metric);
                }
            }
        }
        behavior = spec.remove("behavior");
    }
    let mut current = Vec::new();
    let mut conditions = None;
    if let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) {
        if let Some(Value::Array(metrics)) = status.remove("currentMetrics") {
            for metric in metrics {
                let used = &metric["resource"]["current"]["averageUtilization"];
                if metric["resource"]["name"] == "cpu" && used.is_number() {
                    status.insert("currentCPUUtilizationPercentage".to_string(), used.clone());
                } else {
                    current.push(metric);
                }
            }
        }
        conditions = status.remove("conditions");
    }
    if !others.is_empty() {
        put_annotation(object, METRICS_ANNOTATION, &Value::Array(others));
    }
    if let Some(behavior) = behavior {
        put_annotation(object, BEHAVIOR_ANNOTATION, &behavior);
    }
    if !current.is_empty() {
        put_annotation(object, CURRENT_ANNOTATION, &Value::Array(current));
    }
    if let Some(conditions) = conditions {
        put_annotation(object, CONDITIONS_ANNOTATION, &conditions);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let event = json!({"metadata": {"name": "e"}, "regarding": {"kind": "Pod"}, "note": "n", "deprecatedCount": 2, "reportingController": "c"});
        let mut other = event.clone();
        event_to_core(&mut other);
        assert_eq!(
            other,
            json!({"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod"}, "message": "n", "count": 2, "reportingComponent": "c"})
        );
        event_from_core(&mut other);
        assert_eq!(other, event);

        let scaler = json!({"metadata": {"name": "h"}, "spec": {"maxReplicas": 3, "targetCPUUtilizationPercentage": 50}});
        let mut other = scaler.clone();
        autoscaler_to_v2(&mut other);
        assert_eq!(
            other["spec"]["metrics"][0]["resource"]["target"]["averageUtilization"],
            50
        );
        autoscaler_from_v2(&mut other);
        assert_eq!(other, scaler);
    }
}
