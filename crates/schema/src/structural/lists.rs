//! Lists that are sets or maps hold nothing twice.

use serde_json::Value;
use skiff_meta::field::{Error, Path};

use super::{ListKind, Structural};

/// Checks all lists of an object.
pub fn validate_lists(value: &Value, schema: &Structural) -> Vec<Error> {
    let mut errors = Vec::new();
    walk(&Path::root(), value, schema, &mut errors);
    errors
}

fn walk(path: &Path, value: &Value, schema: &Structural, errors: &mut Vec<Error>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                if let Some(property) = schema.properties.get(name) {
                    walk(&path.child(name), value, property, errors);
                } else if let super::Additional::Schema(additional) = &schema.additional {
                    walk(&path.key(name), value, additional, errors);
                }
            }
        }
        Value::Array(values) => {
            match schema.list_type {
                ListKind::Set => duplicates(path, values, errors),
                ListKind::Map => {
                    let keys: Vec<Value> = values.iter().map(|value| key_of(value, schema)).collect();
                    duplicates(path, &keys, errors);
                }
                ListKind::Unset | ListKind::Atomic => {}
            }
            if let Some(items) = &schema.items {
                for (index, value) in values.iter().enumerate() {
                    walk(&path.index(index), value, items, errors);
                }
            }
        }
        _ => {}
    }
}

/// The values of the list's keys in an element.
fn key_of(value: &Value, schema: &Structural) -> Value {
    let keys = schema.list_map_keys.iter().filter_map(|key| {
        let found = value.get(key)?;
        Some((key.clone(), found.clone()))
    });
    Value::Object(keys.collect())
}

/// Each value that was there before is reported once a value.
fn duplicates(path: &Path, values: &[Value], errors: &mut Vec<Error>) {
    let mut seen = std::collections::HashMap::new();
    for (index, value) in values.iter().enumerate() {
        let count = seen.entry(value.to_string()).or_insert(0usize);
        *count += 1;
        if *count == 2 {
            errors.push(Error::duplicate(&path.index(index), value.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn doubles_are_told() {
        let schema = Structural::parse(&json!({"type": "object", "properties": {
            "s": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            "m": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
                "items": {"type": "object", "properties": {"k": {"type": "string"}}}}}}));
        let found = validate_lists(
            &json!({"s": ["a", "b", "a", "a"], "m": [{"k": "x"}, {"k": "y"}, {"k": "x", "v": 1}]}),
            &schema,
        );
        let text: Vec<String> = found.iter().map(Error::to_string).collect();
        assert_eq!(
            text,
            [
                "m[2]: Duplicate value: {\"k\":\"x\"}",
                "s[2]: Duplicate value: \"a\""
            ]
        );
    }
}
