//! kubectl's client-side apply left its configuration in an annotation. When kubectl applies the same object
//! on the server, what that configuration says is its own, and the annotation is kept up to date.

use serde_json::Value;
use skiff_schema::apply::{Duplicates, Set, TypeRef, compare, field_set, validate};

use crate::object;

const ANNOTATION: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// All annotations of an object together.
const ANNOTATIONS_MAX: usize = 256 * 1024;

fn annotation(object: &Value) -> Option<&str> {
    object::metadata(object, "annotations")?
        .get(ANNOTATION)?
        .as_str()
        .filter(|text| !text.is_empty())
}

/// The fields that the annotation sets to what they are.
pub fn allowed(of: TypeRef<'_>, live: &Value, api_version: &str) -> Option<Set> {
    let config: Value = serde_json::from_str(annotation(live)?).ok()?;
    if config.get("apiVersion").and_then(Value::as_str) != Some(api_version) {
        return None;
    }
    for value in [live, &config] {
        validate(of, value, Duplicates::Refused).ok()?;
    }
    let changes = compare(of, &config, live).ok()?;
    Some(
        field_set(of, &config)
            .difference(&changes.modified)
            .difference(&changes.added)
            .difference(&changes.removed),
    )
}

/// Writes the applied configuration into the annotation, where the object has one.
pub fn refresh(object: &mut Option<Value>, live: &Value, config: &Value) {
    let Some(found) = annotation(object.as_ref().unwrap_or(live)) else {
        return;
    };
    let mut config = config.clone();
    if let Some(annotations) = config
        .get_mut("metadata")
        .and_then(|metadata| metadata.get_mut("annotations"))
        .and_then(Value::as_object_mut)
    {
        annotations.remove(ANNOTATION);
        if annotations.is_empty() {
            object::metadata_mut(&mut config).remove("annotations");
        }
    }
    let text = format!("{config}\n");
    if found == text {
        return;
    }
    let object = object.get_or_insert_with(|| live.clone());
    let metadata = object::metadata_mut(object);
    let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) else {
        return;
    };
    annotations.insert(ANNOTATION.to_string(), Value::String(text));
    let size: usize = annotations
        .iter()
        .map(|(key, value)| key.len() + value.as_str().map_or(0, str::len))
        .sum();
    if size > ANNOTATIONS_MAX {
        annotations.remove(ANNOTATION);
    }
}
