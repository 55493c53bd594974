//! The scale of a custom object: its numbers are where the definition's paths say.

use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_registry::object;

use super::CustomVersion;
use super::definition::ScalePaths;

/// The fields of a dotted path.
pub fn keys(path: &str) -> Vec<&str> {
    path.trim_start_matches('.').split('.').collect()
}

/// The value at a dotted path.
pub fn at<'a>(value: &'a Value, path: &str) -> Option<&'a Value> {
    keys(path)
        .into_iter()
        .try_fold(value, |value, key| value.get(key))
}

/// The value at a dotted path. `Err`: something on the way has no fields.
pub fn find<'a>(value: &'a Value, path: &str) -> Result<Option<&'a Value>, &'a Value> {
    let mut at = value;
    for key in keys(path) {
        match at {
            Value::Object(map) => match map.get(key) {
                Some(found) => at = found,
                None => return Ok(None),
            },
            other => return Err(other),
        }
    }
    Ok(Some(at))
}

/// COMPAT: upstream's complaint about a value of another type names Go's types.
pub fn go_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "<nil>",
        Value::Bool(_) => "bool",
        Value::Number(n) if n.is_f64() => "float64",
        Value::Number(_) => "int64",
        Value::String(_) => "string",
        Value::Array(_) => "[]interface {}",
        Value::Object(_) => "map[string]interface {}",
    }
}

pub fn go_value(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "<nil>".to_owned(),
        other => other.to_string(),
    }
}

fn paths(version: &CustomVersion) -> Result<&ScalePaths, Status> {
    version
        .version()
        .scale
        .as_ref()
        .ok_or_else(Status::resource_not_found)
}

/// The Scale of an object.
pub fn of(version: &CustomVersion, custom: &Value) -> Result<Value, Status> {
    let paths = paths(version)?;
    let mut metadata = serde_json::Map::new();
    for field in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
        if let Some(value) = object::metadata(custom, field) {
            metadata.insert(field.to_owned(), value.clone());
        }
    }
    let number = |path: &str| at(custom, path).and_then(Value::as_i64);
    let mut spec = json!({});
    if let Some(wanted) = number(&paths.spec_replicas).filter(|wanted| *wanted != 0) {
        spec["replicas"] = json!(wanted);
    }
    let mut status = json!({"replicas": number(&paths.status_replicas).unwrap_or(0)});
    if let Some(selector) = paths
        .label_selector
        .as_ref()
        .and_then(|path| at(custom, path))
        .and_then(Value::as_str)
        && !selector.is_empty()
    {
        status["selector"] = json!(selector);
    }
    Ok(
        json!({"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status}),
    )
}

/// Puts a Scale into its object.
pub fn apply(version: &CustomVersion, custom: &Value, scale: &Value) -> Result<Value, Status> {
    let paths = paths(version)?;
    let replicas = object::at(scale, &["spec", "replicas"])
        .and_then(Value::as_i64)
        .unwrap_or(0);
    let mut custom = custom.clone();
    object::put(&mut custom, &keys(&paths.spec_replicas), json!(replicas));
    let given = object::resource_version(scale).to_owned();
    if !given.is_empty() {
        object::set(&mut custom, "resourceVersion", given);
    }
    Ok(custom)
}

/// The columns that `kubectl get --subresource=scale` prints.
pub fn columns(version: &CustomVersion) -> Value {
    let own = super::columns::definitions(&version.version().columns);
    let age = super::columns::definitions(&super::columns::Column::all(None));
    let number = |name: &str, description: &str| json!({"name": name, "type": "integer", "format": "", "description": description, "priority": 0});
    json!([
        own[0],
        number("Desired", "Number of desired replicas"),
        number("Available", "Number of actual replicas"),
        age[1]
    ])
}
