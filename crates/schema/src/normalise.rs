//! Gives an object the outward shape that Go's encoder gives it: zero values that have `omitempty` vanish,
//! and fields that Go always prints are there. It neither checks types nor drops unknown fields.

use serde_json::{Map, Value};

use crate::decode::{json_schema_props, zero};
use crate::types::{Field, Scalar, Schema, Shape, Special, TypeId};

/// Normalises an object of the type, in place, as it comes out of storage.
pub fn normalise(schema: &Schema, id: TypeId, value: &mut Value) {
    shape_up(schema, id, value, Empty::Nil);
}

/// The same for an object that was just sent: a list that somebody left empty is not one that nobody set.
pub fn normalise_sent(schema: &Schema, id: TypeId, value: &mut Value) {
    shape_up(schema, id, value, Empty::Kept);
}

/// What becomes of empty lists and maps that Go prints always.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Empty {
    Nil,
    Kept,
}

fn shape_up(schema: &Schema, id: TypeId, value: &mut Value, empty: Empty) {
    if let Value::Object(map) = value {
        normalise_struct(schema, id, map, empty);
    }
}

fn normalise_struct(schema: &Schema, id: TypeId, map: &mut Map<String, Value>, empty: Empty) {
    for field in &schema.get(id).fields {
        match map.get_mut(field.name.as_ref()) {
            Some(value) if !value.is_null() => {
                normalise_shape(schema, &field.shape, value, empty);
                if !field.pointer && is_empty(&field.shape, value) {
                    if field.omitempty {
                        map.remove(field.name.as_ref());
                    } else if empty == Empty::Nil && matches!(field.shape, Shape::List(_) | Shape::Map(_)) {
                        // COMPAT: what goes through upstream's storage comes back as nil, not as empty.
                        *value = Value::Null;
                    }
                }
            }
            present => match when_unset(schema, field) {
                None => {
                    if present.is_some() {
                        map.remove(field.name.as_ref());
                    }
                }
                Some(unset) => drop(map.insert(field.name.to_string(), unset)),
            },
        }
    }
}

/// What Go prints for a field that nobody set, if it prints it at all.
fn when_unset(schema: &Schema, field: &Field) -> Option<Value> {
    if field.pointer {
        return (!field.omitempty).then_some(Value::Null);
    }
    match &field.shape {
        // Structs are never empty in Go's eyes; only omitzero hides them.
        Shape::Struct(_) | Shape::Special(_) if field.omitzero => None,
        Shape::Struct(id) => {
            let mut map = Map::new();
            normalise_struct(schema, *id, &mut map, Empty::Nil);
            Some(Value::Object(map))
        }
        Shape::Special(Special::Any) if field.omitempty => None,
        Shape::Special(_) => Some(zero(&field.shape)),
        _ if field.omitempty => None,
        shape => Some(zero(shape)),
    }
}

fn is_empty(shape: &Shape, value: &Value) -> bool {
    match shape {
        Shape::Scalar(Scalar::Bool, _) => value == &Value::Bool(false),
        Shape::Scalar(Scalar::String | Scalar::Bytes, _) => value.as_str() == Some(""),
        Shape::Scalar(..) => value.as_f64() == Some(0.0),
        Shape::List(_) => value.as_array().is_some_and(Vec::is_empty),
        Shape::Map(_) => value.as_object().is_some_and(Map::is_empty),
        Shape::Struct(_) | Shape::Special(_) => false,
    }
}

fn normalise_shape(schema: &Schema, shape: &Shape, value: &mut Value, empty: Empty) {
    match (shape, value) {
        (Shape::Struct(id), Value::Object(map)) => normalise_struct(schema, *id, map, empty),
        (Shape::List(list), Value::Array(values)) if has_structs(&list.of) => values
            .iter_mut()
            .for_each(|value| normalise_element(schema, &list.of, value, empty)),
        (Shape::Map(of), Value::Object(values)) if has_structs(&of.of) => values
            .values_mut()
            .for_each(|value| normalise_element(schema, &of.of, value, empty)),
        (
            Shape::Special(
                Special::JsonSchemaPropsOrArray
                | Special::JsonSchemaPropsOrBool
                | Special::JsonSchemaPropsOrStringArray,
            ),
            value,
        ) => {
            let Some(id) = json_schema_props(schema) else {
                return;
            };
            match value {
                Value::Object(map) => normalise_struct(schema, id, map, empty),
                Value::Array(values) => values
                    .iter_mut()
                    .for_each(|value| shape_up(schema, id, value, empty)),
                _ => {}
            }
        }
        _ => {}
    }
}

fn normalise_element(schema: &Schema, shape: &Shape, value: &mut Value, empty: Empty) {
    if value.is_null() {
        *value = zero(shape);
    }
    normalise_shape(schema, shape, value, empty);
}

fn has_structs(shape: &Shape) -> bool {
    match shape {
        Shape::Scalar(..) => false,
        Shape::Special(special) => matches!(
            special,
            Special::JsonSchemaPropsOrArray
                | Special::JsonSchemaPropsOrBool
                | Special::JsonSchemaPropsOrStringArray
        ),
        Shape::Struct(_) => true,
        Shape::List(list) => has_structs(&list.of),
        Shape::Map(map) => has_structs(&map.of),
    }
}
