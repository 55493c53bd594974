//! Objects within custom objects (`x-kubernetes-embedded-resource`): they say what they are, and their
//! metadata follows the rules of all metadata.

use serde_json::Value;
use skiff_meta::field::{Error, Path};
use skiff_meta::names;
use skiff_schema::structural::{Additional, Structural};

use crate::object_meta;

/// The findings about all objects within an object.
pub fn validate(object: &Value, schema: &Structural) -> Vec<Error> {
    validate_at(&Path::root(), object, schema)
}

/// The same for a value at a place.
pub fn validate_at(path: &Path, value: &Value, schema: &Structural) -> Vec<Error> {
    let mut errors = Vec::new();
    if schema.any(&|node| node.embedded_resource) {
        walk(path, value, schema, &mut errors);
    }
    errors
}

fn walk(path: &Path, value: &Value, schema: &Structural, errors: &mut Vec<Error>) {
    match value {
        Value::Object(map) => {
            if schema.embedded_resource {
                one(path, value, errors);
            }
            for (key, value) in map {
                if let Some(property) = schema.properties.get(key) {
                    walk(&path.child(key), value, property, errors);
                } else if let Additional::Schema(additional) = &schema.additional {
                    walk(&path.key(key), value, additional, errors);
                }
            }
        }
        Value::Array(values) => {
            if let Some(items) = &schema.items {
                for (index, value) in values.iter().enumerate() {
                    walk(&path.index(index), value, items, errors);
                }
            }
        }
        _ => {}
    }
}

fn one(path: &Path, value: &Value, errors: &mut Vec<Error>) {
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or("");
    for key in ["apiVersion", "kind"] {
        if text(key).is_empty() {
            errors.push(Error::required(&path.child(key), ""));
        }
    }
    let (kind, api_version) = (text("kind"), text("apiVersion"));
    if !api_version.is_empty()
        && let Err(message) = skiff_meta::GroupVersion::parse(api_version)
    {
        errors.push(Error::invalid(&path.child("apiVersion"), api_version, message));
    }
    if !kind.is_empty() {
        for message in names::dns1035_label(&kind.to_lowercase()) {
            errors.push(Error::invalid(
                &path.child("kind"),
                kind,
                format!("may have mixed case, but should otherwise match: {message}"),
            ));
        }
    }
    if value.get("metadata").is_some() {
        // An object within another has no server that named it: only what is there is checked.
        for error in object_meta::validate(value, true, names::path_segment) {
            let absent = matches!(error.path.as_str(), "metadata.name" | "metadata.namespace")
                && error.kind == skiff_meta::field::ErrorType::Required;
            if !absent {
                let below = path.child(&error.path);
                errors.push(Error {
                    path: below.to_string(),
                    ..error
                });
            }
        }
    }
}
