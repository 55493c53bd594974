//! Cells of the Table answer that many kinds share. The caller gives the time.

use serde_json::{Value, json};
use skiff_meta::selector::LabelSelector;
use skiff_meta::time;

use crate::node::{at, list, text};

/// What stands in a cell that has nothing to show.
pub const NONE: &str = "<none>";
pub const UNKNOWN: &str = "<unknown>";

/// Name and creation time: kinds without a printer of their own.
pub fn default(object: &Value, _now: i64) -> Vec<Value> {
    vec![name(object), json!(text(object, "metadata.creationTimestamp"))]
}

/// Name and age.
pub fn name_and_age(object: &Value, now: i64) -> Vec<Value> {
    vec![name(object), age(object, now)]
}

pub fn name(object: &Value) -> Value {
    json!(text(object, "metadata.name"))
}

/// How long ago the object was made.
pub fn age(object: &Value, now: i64) -> Value {
    json!(since(text(object, "metadata.creationTimestamp"), now))
}

/// How long ago an RFC 3339 time was.
pub fn since(timestamp: &str, now: i64) -> String {
    match time::parse(timestamp) {
        Some(then) => time::human_duration(now - then.as_second()),
        None => UNKNOWN.to_owned(),
    }
}

/// Text, or `<none>` for nothing.
pub fn or_none(text: &str) -> Value {
    json!(if text.is_empty() { NONE } else { text })
}

/// A label selector as one line.
pub fn selector(object: &Value, path: &str) -> Value {
    let text = match LabelSelector::from_value(at(object, path)) {
        Ok(selector) if at(object, path).is_null() || selector.requirements.is_empty() => NONE.to_owned(),
        Ok(mut selector) => {
            selector.requirements.sort_by(|a, b| a.key.cmp(&b.key));
            selector.to_string()
        }
        Err(_) => "<error>".to_owned(),
    };
    json!(text)
}

/// A map of labels as `a=b,c=d`.
pub fn label_map(object: &Value, path: &str) -> Value {
    let pairs: Vec<String> = at(object, path)
        .as_object()
        .into_iter()
        .flatten()
        .map(|(k, v)| format!("{k}={}", v.as_str().unwrap_or("")))
        .collect();
    or_none(&pairs.join(","))
}

/// Names and images of a pod template's containers: two cells.
pub fn containers(object: &Value, pod_spec: &str) -> [Value; 2] {
    let containers = list(at(object, pod_spec), "containers");
    let join = |field| {
        containers
            .iter()
            .map(|c| text(c, field))
            .collect::<Vec<_>>()
            .join(",")
    };
    [json!(join("name")), json!(join("image"))]
}
