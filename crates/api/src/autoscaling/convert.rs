//! HorizontalPodAutoscalers between autoscaling/v1 and v2. Version 1 knows one metric; the others, the
//! behavior and the details of the status travel in annotations, in the form that upstream gives them.

use serde_json::{Map, Value, json};

use crate::walk;

const METRICS: &str = "autoscaling.alpha.kubernetes.io/metrics";
const BEHAVIOR: &str = "autoscaling.alpha.kubernetes.io/behavior";
const CONDITIONS: &str = "autoscaling.alpha.kubernetes.io/conditions";
const CURRENT: &str = "autoscaling.alpha.kubernetes.io/current-metrics";
/// The CPU utilization that is meant when nothing is said.
const DEFAULT_UTILIZATION: i64 = 80;

/// The order in which upstream's types write their fields; one order serves them all.
const ORDER: [&str; 36] = [
    "type",
    "status",
    "lastTransitionTime",
    "reason",
    "message",
    "object",
    "pods",
    "resource",
    "containerResource",
    "external",
    "target",
    "kind",
    "name",
    "apiVersion",
    "metricName",
    "metricSelector",
    "targetValue",
    "currentValue",
    "targetAverageUtilization",
    "currentAverageUtilization",
    "targetAverageValue",
    "currentAverageValue",
    "container",
    "selector",
    "averageValue",
    "ScaleUp",
    "ScaleDown",
    "StabilizationWindowSeconds",
    "SelectPolicy",
    "Policies",
    "Tolerance",
    "Type",
    "Value",
    "PeriodSeconds",
    "matchLabels",
    "matchExpressions",
];

fn annotations(object: &mut Value) -> &mut Map<String, Value> {
    let metadata = walk::metadata_mut(object);
    let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
    if !annotations.is_object() {
        *annotations = json!({});
    }
    annotations.as_object_mut().expect("made an object above")
}

fn take(object: &mut Value, key: &str) -> Option<Value> {
    let text = annotations(object).remove(key)?;
    serde_json::from_str(text.as_str()?).ok()
}

fn take_list(object: &mut Value, key: &str) -> Option<Vec<Value>> {
    match take(object, key) {
        Some(Value::Array(list)) => Some(list),
        _ => None,
    }
}

fn write(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort_by_key(|key| ORDER.iter().position(|known| known == key).unwrap_or(ORDER.len()));
            let fields: Vec<String> = keys
                .into_iter()
                .map(|key| format!("{}:{}", json!(key), write(&map[key])))
                .collect();
            format!("{{{}}}", fields.join(","))
        }
        Value::Array(list) => {
            let items: Vec<String> = list.iter().map(write).collect();
            format!("[{}]", items.join(","))
        }
        value => value.to_string(),
    }
}

fn put(object: &mut Value, key: &str, value: &Value) {
    let text = write(value);
    annotations(object).insert(key.to_string(), Value::String(text));
}

fn drop_empty_annotations(object: &mut Value) {
    if annotations(object).is_empty() {
        walk::metadata_mut(object).remove("annotations");
    }
}

/// The field of a metric that holds its source.
fn source_field(metric: &Value) -> &'static str {
    match metric["type"].as_str().unwrap_or("") {
        "Object" => "object",
        "Pods" => "pods",
        "Resource" => "resource",
        "ContainerResource" => "containerResource",
        "External" => "external",
        _ => "",
    }
}

fn set(value: &mut Value, field: &str, part: &Value) {
    if !part.is_null() {
        value[field] = part.clone();
    }
}

/// One metric of version 1 as version 2 has it: `prefix` is `target` in specs, `current` in statuses.
fn metric_to_v2(metric: &Value, prefix: &str) -> Value {
    let field = source_field(metric);
    if field.is_empty() {
        return metric.clone();
    }
    let old = &metric[field];
    let key = |name: &str| format!("{prefix}{name}");
    let mut amount = json!({});
    let mut source = json!({});
    let (value, average, utilization) = match field {
        "object" => (&old[key("Value")], &old["averageValue"], &Value::Null),
        _ => (
            &old[key("Value")],
            &old[key("AverageValue")],
            &old[key("AverageUtilization")],
        ),
    };
    set(&mut amount, "value", value);
    set(&mut amount, "averageValue", average);
    set(&mut amount, "averageUtilization", utilization);
    if prefix == "target" {
        amount["type"] = json!(match field {
            "object" if average.is_null() => "Value",
            "external" if !value.is_null() => "Value",
            "resource" | "containerResource" if !utilization.is_null() => "Utilization",
            _ => "AverageValue",
        });
        // Version 1 always has a value; the zero of a metric by average means nothing.
        if field == "object"
            && !average.is_null()
            && value == "0"
            && let Some(map) = amount.as_object_mut()
        {
            map.remove("value");
        }
    }
    match field {
        "resource" | "containerResource" => {
            set(&mut source, "name", &old["name"]);
            set(&mut source, "container", &old["container"]);
        }
        _ => {
            let mut identifier = json!({"name": old["metricName"]});
            let selector = if field == "external" {
                &old["metricSelector"]
            } else {
                &old["selector"]
            };
            set(&mut identifier, "selector", selector);
            source["metric"] = identifier;
        }
    }
    if field == "object" {
        source["describedObject"] = old["target"].clone();
    }
    source[prefix] = amount;
    json!({"type": metric["type"], field: source})
}

/// One metric of version 2 as version 1 has it.
fn metric_to_v1(metric: &Value, prefix: &str) -> Value {
    let field = source_field(metric);
    if field.is_empty() {
        return metric.clone();
    }
    let new = &metric[field];
    let amount = &new[prefix];
    let key = |name: &str| format!("{prefix}{name}");
    let mut source = json!({});
    let or_zero = |value: &Value| {
        if value.is_null() {
            json!("0")
        } else {
            value.clone()
        }
    };
    match field {
        "resource" | "containerResource" => {
            set(&mut source, "name", &new["name"]);
            set(&mut source, "container", &new["container"]);
            set(
                &mut source,
                &key("AverageUtilization"),
                &amount["averageUtilization"],
            );
            if prefix == "current" {
                source[key("AverageValue")] = or_zero(&amount["averageValue"]);
            } else {
                set(&mut source, &key("AverageValue"), &amount["averageValue"]);
            }
        }
        "pods" => {
            source["metricName"] = new["metric"]["name"].clone();
            set(&mut source, "selector", &new["metric"]["selector"]);
            source[key("AverageValue")] = or_zero(&amount["averageValue"]);
        }
        "object" => {
            source["target"] = new["describedObject"].clone();
            source["metricName"] = new["metric"]["name"].clone();
            set(&mut source, "selector", &new["metric"]["selector"]);
            source[key("Value")] = or_zero(&amount["value"]);
            set(&mut source, "averageValue", &amount["averageValue"]);
        }
        _ => {
            source["metricName"] = new["metric"]["name"].clone();
            set(&mut source, "metricSelector", &new["metric"]["selector"]);
            if prefix == "current" {
                source[key("Value")] = or_zero(&amount["value"]);
            } else {
                set(&mut source, &key("Value"), &amount["value"]);
            }
            set(&mut source, &key("AverageValue"), &amount["averageValue"]);
        }
    }
    json!({"type": metric["type"], field: source})
}

/// COMPAT: the behavior is written as upstream's internal type, whose fields begin with capitals.
fn behavior_case(behavior: &Value, capital: bool) -> Value {
    match behavior {
        Value::Object(map) => {
            let fields = map.iter().map(|(key, value)| {
                let mut name = key.clone();
                if capital {
                    name[..1].make_ascii_uppercase();
                } else {
                    name[..1].make_ascii_lowercase();
                }
                (name, behavior_case(value, capital))
            });
            Value::Object(fields.filter(|(_, value)| capital || !value.is_null()).collect())
        }
        Value::Array(list) => list.iter().map(|item| behavior_case(item, capital)).collect(),
        value => value.clone(),
    }
}

fn cpu_metric(target: &Value) -> Value {
    json!({"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": target}}})
}

fn is_cpu(metric: &Value, prefix: &str) -> bool {
    metric["type"] == "Resource"
        && metric["resource"]["name"] == "cpu"
        && metric["resource"][prefix]["averageUtilization"].is_number()
}

pub fn to_v2(object: &mut Value) {
    let others = take_list(object, METRICS).unwrap_or_default();
    let behavior = take(object, BEHAVIOR);
    let conditions = take_list(object, CONDITIONS);
    let current = take_list(object, CURRENT);
    drop_empty_annotations(object);
    let mut metrics: Vec<Value> = others
        .iter()
        .map(|metric| metric_to_v2(metric, "target"))
        .collect();
    if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
        if let Some(target) = spec.remove("targetCPUUtilizationPercentage") {
            metrics.push(cpu_metric(&target));
        } else if metrics.is_empty() {
            metrics.push(cpu_metric(&json!(DEFAULT_UTILIZATION)));
        }
        spec.insert("metrics".to_string(), Value::Array(metrics));
        if let Some(behavior) = behavior {
            spec.insert("behavior".to_string(), behavior_case(&behavior, false));
        }
    }
    if current.is_some() || conditions.is_some() {
        // What the annotations say is status, also where the object has none else.
        let status = object.as_object_mut().map(|map| map.entry("status"));
        status.map(|status| status.or_insert_with(|| json!({})));
    }
    if let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) {
        let used = status.remove("currentCPUUtilizationPercentage");
        let list: Option<Vec<Value>> = match (current, used) {
            // The annotation has more to say than the one number.
            (Some(list), _) => Some(
                list.iter()
                    .map(|metric| metric_to_v2(metric, "current"))
                    .collect(),
            ),
            (None, Some(used)) => Some(vec![
                json!({"type": "Resource", "resource": {"name": "cpu", "current": {"averageUtilization": used}}}),
            ]),
            (None, None) => None,
        };
        if let Some(list) = list {
            status.insert("currentMetrics".to_string(), Value::Array(list));
        }
        if let Some(conditions) = conditions {
            status.insert("conditions".to_string(), Value::Array(conditions));
        }
    }
}

pub fn from_v2(object: &mut Value) {
    for key in [METRICS, BEHAVIOR, CONDITIONS, CURRENT] {
        annotations(object).remove(key);
    }
    let mut others = Vec::new();
    let mut behavior = None;
    if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
        if let Some(Value::Array(metrics)) = spec.remove("metrics") {
            for metric in metrics {
                if is_cpu(&metric, "target") {
                    let target = metric["resource"]["target"]["averageUtilization"].clone();
                    spec.entry("targetCPUUtilizationPercentage").or_insert(target);
                } else {
                    others.push(metric_to_v1(&metric, "target"));
                }
            }
        }
        behavior = spec.remove("behavior");
    }
    let (mut current, mut conditions) = (Vec::new(), None);
    if object.get("status").is_none() {
        object["status"] = json!({});
    }
    if let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) {
        for count in ["currentReplicas", "desiredReplicas"] {
            status.entry(count).or_insert(json!(0));
        }
        if let Some(Value::Array(metrics)) = status.remove("currentMetrics") {
            for metric in &metrics {
                if is_cpu(metric, "current") {
                    let used = metric["resource"]["current"]["averageUtilization"].clone();
                    status.insert("currentCPUUtilizationPercentage".to_string(), used);
                }
            }
            current = metrics
                .iter()
                .map(|metric| metric_to_v1(metric, "current"))
                .collect();
        }
        conditions = status.remove("conditions");
    }
    if !others.is_empty() {
        put(object, METRICS, &Value::Array(others));
    }
    if !current.is_empty() {
        put(object, CURRENT, &Value::Array(current));
    }
    if let Some(behavior) = behavior {
        put(object, BEHAVIOR, &behavior_case(&behavior, true));
    }
    if let Some(Value::Array(list)) = conditions
        && !list.is_empty()
    {
        put(object, CONDITIONS, &Value::Array(list));
    }
    drop_empty_annotations(object);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let check = |spec: Value, annotation: Option<&str>| {
            let mut scaler = json!({"metadata": {"name": "h"}, "spec": spec,
                "status": {"currentReplicas": 0, "desiredReplicas": 0}});
            if let Some(text) = annotation {
                scaler["metadata"]["annotations"] = json!({METRICS: text});
            }
            let mut other = scaler.clone();
            to_v2(&mut other);
            assert!(other["metadata"].get("annotations").is_none());
            from_v2(&mut other);
            assert_eq!(other, scaler);
        };
        check(
            json!({"maxReplicas": 3, "targetCPUUtilizationPercentage": 50}),
            None,
        );
        check(
            json!({"maxReplicas": 3}),
            Some(
                r#"[{"type":"Resource","resource":{"name":"memory","targetAverageUtilization":70}},{"type":"External","external":{"metricName":"queue","targetValue":"5"}}]"#,
            ),
        );
        let mut plain = json!({"metadata": {"name": "h"}, "spec": {"maxReplicas": 1}});
        to_v2(&mut plain);
        assert_eq!(plain["spec"]["metrics"], json!([cpu_metric(&json!(80))]));
    }
}
