//! Whether upstream, which compares Go structs, takes two values of a field for equal: `Some(empty)` differs from `None`,
//! as `*T` pointing at a zero value differs from nil. Whether an empty list equals an absent one depends on the caller.

use serde_json::{Map, Value};
use skiff_schema::{Field, Schema, Shape, Special};

use crate::core::resources::quantity;
use crate::facts;
use crate::node::{at, same, text};

static NULL: Value = Value::Null;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Empty {
    /// Upstream's `Semantic.DeepEqual`.
    IsAbsent,
    /// Go's `reflect.DeepEqual`.
    IsThere,
}

/// Compares what two objects of the same kind have at a dotted path.
pub fn same_at(new: &Value, old: &Value, path: &str, empty: Empty) -> bool {
    let (now, before) = (at(new, path), at(old, path));
    if now == before {
        return true;
    }
    match field_at(new, path) {
        Some(field) => same_field(facts::schema(), field, now, before, empty),
        None => same(now, before),
    }
}

/// The field of an object's type at a dotted path.
fn field_at(object: &Value, path: &str) -> Option<&'static Field> {
    let api_version = text(object, "apiVersion");
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let schema = facts::schema();
    let mut id = schema.by_gvk(group, version, text(object, "kind"))?;
    let mut names = path.split('.').peekable();
    while let Some(name) = names.next() {
        let field = schema.get(id).field(name)?;
        if names.peek().is_none() {
            return Some(field);
        }
        let Shape::Struct(inner) = &field.shape else {
            return None;
        };
        id = *inner;
    }
    None
}

fn same_field(schema: &Schema, field: &Field, a: &Value, b: &Value, empty: Empty) -> bool {
    (!field.pointer || a.is_null() == b.is_null()) && same_shape(schema, &field.shape, a, b, empty)
}

fn same_shape(schema: &Schema, shape: &Shape, a: &Value, b: &Value, empty: Empty) -> bool {
    if a == b {
        return true;
    }
    // Both there, or both not.
    let alike = empty == Empty::IsAbsent || a.is_null() == b.is_null();
    match shape {
        Shape::Struct(id) => schema.get(*id).fields.iter().all(|field| {
            let now = a.get(field.name.as_ref()).unwrap_or(&NULL);
            let before = b.get(field.name.as_ref()).unwrap_or(&NULL);
            same_field(schema, field, now, before, empty)
        }),
        Shape::List(list) => {
            let items = |of: &Value| of.as_array().map_or(0, Vec::len);
            alike
                && items(a) == items(b)
                && (0..items(a)).all(|i| same_shape(schema, &list.of, &a[i], &b[i], empty))
        }
        Shape::Map(map) => {
            let size = |of: &Value| of.as_object().map_or(0, Map::len);
            alike
                && size(a) == size(b)
                && a.as_object().into_iter().flatten().all(|(key, a)| {
                    b.get(key)
                        .is_some_and(|b| same_shape(schema, &map.of, a, b, empty))
                })
        }
        Shape::Special(Special::Quantity) => match (quantity(a), quantity(b)) {
            (Some(a), Some(b)) => a == b,
            _ => false,
        },
        Shape::Scalar(..) => is_zero(a) && is_zero(b),
        Shape::Special(_) => same(a, b),
    }
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Number(number) => number.as_f64() == Some(0.0),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(new: Value, old: Value, expected: [bool; 2]) {
        let object = |spec: &Value| json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": spec});
        let found = [Empty::IsAbsent, Empty::IsThere]
            .map(|empty| same_at(&object(&new), &object(&old), "spec", empty));
        assert_eq!(found, expected, "{new} {old}");
    }

    #[test]
    fn empty_and_absent() {
        check(json!({"ingress": []}), json!({}), [true, false]);
        check(json!({"ingress": [{}]}), json!({}), [false, false]);
        // A pointer.
        check(
            json!({"ingress": [{"from": [{"podSelector": {}}]}]}),
            json!({"ingress": [{"from": [{}]}]}),
            [false, false],
        );
        // A struct.
        check(json!({"podSelector": {}}), json!({}), [true, true]);
        check(
            json!({"podSelector": {"matchLabels": {}}}),
            json!({}),
            [true, false],
        );
        check(
            json!({"podSelector": {"matchLabels": {"a": ""}}}),
            json!({"podSelector": {"matchLabels": {"a": "b"}}}),
            [false, false],
        );
    }
}
