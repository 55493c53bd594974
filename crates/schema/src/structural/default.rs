//! Defaults of a schema, and nulls where the schema knows none.

use serde_json::Value;

use super::{Additional, Structural};

fn unwanted_null(value: &Value, schema: &Structural) -> bool {
    value.is_null() && !schema.nullable
}

/// Fills in the defaults of what is absent, or null and not nullable.
pub fn default(value: &mut Value, schema: &Structural) {
    match value {
        Value::Object(map) => {
            for (name, property) in &schema.properties {
                if let Some(default) = &property.default
                    && map.get(name).is_none_or(|value| unwanted_null(value, property))
                {
                    map.insert(name.clone(), default.clone());
                }
            }
            for (name, value) in map.iter_mut() {
                if let Some(property) = schema.properties.get(name) {
                    default(value, property);
                } else if let Additional::Schema(additional) = &schema.additional {
                    replace_null(value, additional);
                    default(value, additional);
                }
            }
        }
        Value::Array(values) => {
            let Some(items) = &schema.items else { return };
            for value in values {
                replace_null(value, items);
                default(value, items);
            }
        }
        _ => {}
    }
}

fn replace_null(value: &mut Value, schema: &Structural) {
    if unwanted_null(value, schema)
        && let Some(default) = &schema.default
    {
        *value = default.clone();
    }
}

/// Removes nulls that are neither allowed nor replaced by a default.
pub fn prune_nulls(value: &mut Value, schema: &Structural) {
    match value {
        Value::Object(map) => map.retain(|name, value| match schema.field(name) {
            Some(field) if unwanted_null(value, field) && field.default.is_none() => false,
            Some(field) => {
                prune_nulls(value, field);
                true
            }
            None => true,
        }),
        Value::Array(values) => {
            if let Some(items) = &schema.items {
                values.iter_mut().for_each(|value| prune_nulls(value, items));
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn defaults_and_nulls() {
        let schema = Structural::parse(&json!({"type": "object", "properties": {
            "a": {"type": "string", "default": "x"},
            "b": {"type": "object", "properties": {"c": {"type": "integer", "default": 5}}},
            "d": {"type": "object", "default": {}, "properties": {"e": {"type": "boolean", "default": true}}},
            "n": {"type": "string", "nullable": true, "default": "y"},
            "p": {"type": "string"},
            "l": {"type": "array", "items": {"type": "object", "properties": {"f": {"type": "string", "default": "z"}}}}}}));
        let check = |given: Value, expected: Value| {
            let mut value = given;
            prune_nulls(&mut value, &schema);
            default(&mut value, &schema);
            assert_eq!(value, expected);
        };
        check(json!({}), json!({"a": "x", "d": {"e": true}, "n": "y"}));
        check(
            json!({"a": null, "b": {}, "d": {"e": false}, "n": null, "p": null, "l": [{}, {"f": "g"}]}),
            json!({"a": "x", "b": {"c": 5}, "d": {"e": false}, "n": null, "l": [{"f": "z"}, {"f": "g"}]}),
        );
    }
}
