//! JSON merge patch (RFC 7386).

use serde_json::{Map, Value};

use super::PatchError;

pub fn merge_patch(current: &Value, patch: &Value) -> Result<Value, PatchError> {
    let (Value::Object(current), Value::Object(patch)) = (current, patch) else {
        return Err(PatchError::BadRequest("Invalid JSON Patch".to_string()));
    };
    let mut merged = current.clone();
    merge(&mut merged, patch);
    Ok(Value::Object(merged))
}

fn merge(into: &mut Map<String, Value>, patch: &Map<String, Value>) {
    for (key, value) in patch {
        match (into.get_mut(key), value) {
            (_, Value::Null) => {
                into.remove(key);
            }
            (Some(Value::Object(inner)), Value::Object(patch)) => merge(inner, patch),
            // COMPAT: a list that takes the place of a map keeps its nulls, anywhere else it loses them.
            (Some(Value::Object(_)), value) => drop(into.insert(key.clone(), value.clone())),
            (_, value) => {
                into.insert(key.clone(), pruned(value));
            }
        }
    }
}

/// Without the nulls of objects, also inside lists.
fn pruned(value: &Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(
            map.iter()
                .filter(|(_, value)| !value.is_null())
                .map(|(key, value)| (key.clone(), pruned(value)))
                .collect(),
        ),
        Value::Array(values) => Value::Array(values.iter().map(pruned).collect()),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn merges_as_the_rfc_says() {
        let check = |current: Value, patch: Value, expected: Value| {
            assert_eq!(
                merge_patch(&current, &patch).expect("applies"),
                expected,
                "{patch}"
            );
        };
        check(json!({"a":"b"}), json!({"a":"c"}), json!({"a":"c"}));
        check(json!({"a":"b","b":"c"}), json!({"a":null}), json!({"b":"c"}));
        check(json!({"a":["b"]}), json!({"a":"c"}), json!({"a":"c"}));
        check(
            json!({"a":{"b":"c"}}),
            json!({"a":{"b":"d","c":null}}),
            json!({"a":{"b":"d"}}),
        );
        check(json!({"a":[{"b":"c"}]}), json!({"a":[1]}), json!({"a":[1]}));
        check(
            json!({}),
            json!({"a":{"bb":{"ccc":null}}}),
            json!({"a":{"bb":{}}}),
        );
        assert!(merge_patch(&json!({}), &json!([])).is_err());
    }
}
