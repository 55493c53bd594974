//! Removes what a schema does not specify. The root of an object, and of an object within an object,
//! keeps its `apiVersion`, `kind` and `metadata`.

use serde_json::{Map, Value};

use super::{Additional, Structural};

const META_FIELDS: [&str; 3] = ["apiVersion", "kind", "metadata"];

/// Prunes a whole object; returns the paths of what was removed, sorted, if they are wanted.
pub fn prune(value: &mut Value, schema: &Structural, wanted: bool) -> Vec<String> {
    let mut pruner = Pruner {
        found: wanted.then(Vec::new),
        path: String::new(),
    };
    match value {
        Value::Object(map) => pruner.map(map, schema, true, schema.preserve_unknown_fields),
        other => pruner.value(other, Some(schema)),
    }
    let mut found = pruner.found.unwrap_or_default();
    found.sort_unstable();
    found
}

/// Prunes a part of an object, such as a default.
pub fn prune_value(value: &mut Value, schema: &Structural) -> Vec<String> {
    let mut pruner = Pruner {
        found: Some(Vec::new()),
        path: String::new(),
    };
    pruner.value(value, Some(schema));
    let mut found = pruner.found.unwrap_or_default();
    found.sort_unstable();
    found
}

struct Pruner {
    found: Option<Vec<String>>,
    path: String,
}

impl Pruner {
    fn within(&mut self, key: &str, work: impl FnOnce(&mut Pruner)) {
        let length = self.path.len();
        if self.found.is_some() {
            if length > 0 && !key.starts_with('[') {
                self.path.push('.');
            }
            self.path.push_str(key);
        }
        work(self);
        self.path.truncate(length);
    }

    fn item(&mut self, index: usize, work: impl FnOnce(&mut Pruner)) {
        if self.found.is_some() {
            self.within(&format!("[{index}]"), work);
        } else {
            work(self);
        }
    }

    fn removed(&mut self, key: &str) {
        if let Some(found) = &mut self.found {
            found.push(if self.path.is_empty() {
                key.to_owned()
            } else {
                format!("{}.{key}", self.path)
            });
        }
    }

    fn value(&mut self, value: &mut Value, schema: Option<&Structural>) {
        let preserve = schema.is_some_and(|schema| schema.preserve_unknown_fields);
        match value {
            Value::Object(map) => match schema {
                None => {
                    for key in map.keys() {
                        self.removed(key);
                    }
                    map.clear();
                }
                Some(schema) => self.map(map, schema, schema.embedded_resource, preserve),
            },
            Value::Array(values) => {
                let items = schema.and_then(|schema| schema.items.as_deref());
                for (index, value) in values.iter_mut().enumerate() {
                    self.item(index, |pruner| {
                        if preserve {
                            pruner.kept(value, items);
                        } else {
                            pruner.value(value, items);
                        }
                    });
                }
            }
            _ => {}
        }
    }

    /// A value below one that keeps unknown fields: what has a schema of its own is still pruned.
    fn kept(&mut self, value: &mut Value, schema: Option<&Structural>) {
        let Some(schema) = schema else { return };
        match value {
            Value::Object(map) => self.map(map, schema, schema.embedded_resource, true),
            Value::Array(values) => {
                for (index, value) in values.iter_mut().enumerate() {
                    self.item(index, |pruner| pruner.kept(value, schema.items.as_deref()));
                }
            }
            _ => {}
        }
    }

    fn map(&mut self, map: &mut Map<String, Value>, schema: &Structural, embedded: bool, preserve: bool) {
        map.retain(|key, value| {
            if embedded && META_FIELDS.contains(&key.as_str()) {
                return true;
            }
            if let Some(property) = schema.properties.get(key) {
                self.within(key, |pruner| pruner.value(value, Some(property)));
                return true;
            }
            match &schema.additional {
                Additional::Schema(additional) => {
                    self.within(key, |pruner| pruner.value(value, Some(additional)));
                    true
                }
                Additional::Allowed => {
                    self.within(key, |pruner| pruner.value(value, None));
                    true
                }
                Additional::Unset | Additional::Forbidden if preserve => true,
                Additional::Unset | Additional::Forbidden => {
                    self.removed(key);
                    false
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unknown_fields_go_and_are_named() {
        let check = |schema: Value, object: Value, expected: Value, unknown: &[&str]| {
            let mut value = object;
            let found = prune(&mut value, &Structural::parse(&schema), true);
            assert_eq!(
                (value, found),
                (expected, unknown.iter().map(|s| s.to_string()).collect())
            );
        };
        let spec = json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {
            "a": {"type": "string"},
            "list": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "integer"}}}},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true,
                "properties": {"known": {"type": "object"}}},
            "map": {"type": "object", "additionalProperties": {"type": "object"}},
            "pod": {"type": "object", "x-kubernetes-embedded-resource": true}}}}});
        check(
            spec.clone(),
            json!({"apiVersion": "g/v1", "kind": "A", "metadata": {"any": 1}, "extra": 1,
                "spec": {"a": "1", "b": 2, "list": [{"x": 1, "y": 2}],
                    "free": {"more": {"deep": 1}, "known": {"gone": 1}},
                    "map": {"k": {"gone": 1}}, "pod": {"kind": "Pod", "metadata": {"name": "x"}, "spec": {}}}}),
            json!({"apiVersion": "g/v1", "kind": "A", "metadata": {"any": 1},
                "spec": {"a": "1", "list": [{"x": 1}], "free": {"more": {"deep": 1}, "known": {}},
                    "map": {"k": {}}, "pod": {"kind": "Pod", "metadata": {"name": "x"}}}}),
            &[
                "extra",
                "spec.b",
                "spec.free.known.gone",
                "spec.list[0].y",
                "spec.map.k.gone",
                "spec.pod.spec",
            ],
        );
        check(
            json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true}),
            json!({"spec": {"a": 1}}),
            json!({"spec": {"a": 1}}),
            &[],
        );
    }
}
