//! Reading and writing the metadata of an object that is a plain JSON value. Knows no kind.

use serde_json::{Map, Value};

/// The metadata as a map; made when absent or of the wrong type, so that callers need no error path.
pub fn metadata_mut(object: &mut Value) -> &mut Map<String, Value> {
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    let map = object.as_object_mut().expect("made an object above");
    let metadata = map.entry("metadata").or_insert_with(|| Value::Object(Map::new()));
    if !metadata.is_object() {
        *metadata = Value::Object(Map::new());
    }
    metadata.as_object_mut().expect("made an object above")
}

pub fn metadata<'a>(object: &'a Value, field: &str) -> Option<&'a Value> {
    object
        .get("metadata")?
        .get(field)
        .filter(|value| !value.is_null())
}

pub fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    metadata(object, field).and_then(Value::as_str).unwrap_or("")
}

pub fn name(object: &Value) -> &str {
    text(object, "name")
}

pub fn namespace(object: &Value) -> &str {
    text(object, "namespace")
}

pub fn uid(object: &Value) -> &str {
    text(object, "uid")
}

pub fn resource_version(object: &Value) -> &str {
    text(object, "resourceVersion")
}

pub fn deleting(object: &Value) -> bool {
    metadata(object, "deletionTimestamp").is_some()
}

pub fn grace_period(object: &Value) -> Option<i64> {
    metadata(object, "deletionGracePeriodSeconds").and_then(Value::as_i64)
}

pub fn generation(object: &Value) -> i64 {
    metadata(object, "generation")
        .and_then(Value::as_i64)
        .unwrap_or(0)
}

pub fn finalizers(object: &Value) -> Vec<String> {
    metadata(object, "finalizers")
        .and_then(Value::as_array)
        .map(|list| {
            list.iter()
                .filter_map(|value| value.as_str().map(str::to_string))
                .collect()
        })
        .unwrap_or_default()
}

/// Sets a field; an empty string, empty list or null removes it, as Go's omitempty does.
pub fn set(object: &mut Value, field: &str, value: impl Into<Value>) {
    let value = value.into();
    let metadata = metadata_mut(object);
    let empty = match &value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    };
    if empty {
        metadata.remove(field);
    } else {
        metadata.insert(field.to_string(), value);
    }
}

/// Follows map keys; `None` where the path ends early.
pub fn at<'a>(object: &'a Value, path: &[&str]) -> Option<&'a Value> {
    path.iter()
        .try_fold(object, |value, key| value.get(key))
        .filter(|value| !value.is_null())
}

pub fn at_str<'a>(object: &'a Value, path: &[&str]) -> &'a str {
    at(object, path).and_then(Value::as_str).unwrap_or("")
}

/// Sets a value at a path of map keys, making the maps on the way.
pub fn put(object: &mut Value, path: &[&str], value: Value) {
    let Some((last, parents)) = path.split_last() else {
        return;
    };
    let mut here = object;
    for key in parents {
        if !here.is_object() {
            *here = Value::Object(Map::new());
        }
        here = here
            .as_object_mut()
            .expect("made an object above")
            .entry(*key)
            .or_insert_with(|| Value::Object(Map::new()));
    }
    if !here.is_object() {
        *here = Value::Object(Map::new());
    }
    here.as_object_mut()
        .expect("made an object above")
        .insert((*last).to_string(), value);
}
/// Writes numbers without a fraction as integers, as Go's encoder does: clients read such fields into integers.
pub fn whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            if let Some(float) = number.as_f64().filter(|_| number.is_f64())
                && float.fract() == 0.0
                && float.abs() < i64::MAX as f64
            {
                *value = Value::from(float as i64);
            }
        }
        Value::Array(values) => values.iter_mut().for_each(whole_numbers),
        Value::Object(map) => map.values_mut().for_each(whole_numbers),
        _ => {}
    }
}
