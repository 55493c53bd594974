//! Gives an object the outward shape that Go's encoder gives it: zero values that have `omitempty` vanish,
//! and fields that Go always prints are there. It neither checks types nor drops unknown fields.

use serde_json::{Map, Value};

use crate::decode::{json_schema_props, zero};
use crate::types::{Field, Scalar, Schema, Shape, Special, TypeId};

/// Normalises an object of the type, in place, as it comes out of storage.
pub fn normalise(schema: &Schema, id: TypeId, value: &mut Value) {
    shape_up(schema, id, value, &mut Pass::new(Empty::Nil));
}

/// The same for an object that was just sent: a list that somebody left empty is not one that nobody set. Gives what
/// the outward shape leaves out, but Go's structs still tell from nothing: see [`put_back`].
pub fn normalise_sent(schema: &Schema, id: TypeId, value: &mut Value) -> Vec<LeftOut> {
    let mut pass = Pass::new(Empty::Kept);
    shape_up(schema, id, value, &mut pass);
    pass.left_out
}

/// Puts empty lists and maps back where they were, as far as the object still has that place.
pub fn put_back(object: &mut Value, left_out: &[LeftOut]) {
    for LeftOut { way, name, empty } in left_out {
        let holder = way.iter().rev().try_fold(&mut *object, |value, step| match step {
            Step::Name(name) => value.get_mut(name),
            Step::Index(index) => value.get_mut(*index),
        });
        if let Some(Value::Object(holder)) = holder {
            holder.entry(name.as_str()).or_insert_with(|| empty.clone());
        }
    }
}

/// A list or map that was sent empty.
#[derive(Debug)]
pub struct LeftOut {
    /// From what holds it to the top.
    way: Vec<Step>,
    name: String,
    empty: Value,
}

#[derive(Debug, Clone)]
enum Step {
    Name(String),
    Index(usize),
}

/// Only messages show what was left out: of an object that has more, the rest is as good as unset.
const MOST_LEFT_OUT: usize = 1000;

/// What becomes of empty lists and maps that Go prints always.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Empty {
    Nil,
    Kept,
}

struct Pass {
    empty: Empty,
    left_out: Vec<LeftOut>,
}

impl Pass {
    fn new(empty: Empty) -> Pass {
        Pass {
            empty,
            left_out: Vec::new(),
        }
    }

    fn leave_out(&mut self, name: &str, empty: Option<Value>) {
        let Some(empty @ (Value::Array(_) | Value::Object(_))) = empty else {
            return;
        };
        if self.empty == Empty::Kept && self.left_out.len() < MOST_LEFT_OUT {
            self.left_out.push(LeftOut {
                way: Vec::new(),
                name: name.to_owned(),
                empty,
            });
        }
    }

    /// Says on the way up where the ones since `before` stand.
    fn went(&mut self, before: usize, step: impl Fn() -> Step) {
        for left_out in &mut self.left_out[before..] {
            left_out.way.push(step());
        }
    }
}

fn shape_up(schema: &Schema, id: TypeId, value: &mut Value, pass: &mut Pass) {
    if let Value::Object(map) = value {
        normalise_struct(schema, id, map, pass);
    }
}

fn normalise_struct(schema: &Schema, id: TypeId, map: &mut Map<String, Value>, pass: &mut Pass) {
    for field in &schema.get(id).fields {
        match map.get_mut(field.name.as_ref()) {
            Some(value) if !value.is_null() => {
                let before = pass.left_out.len();
                normalise_shape(schema, &field.shape, value, pass);
                pass.went(before, || Step::Name(field.name.to_string()));
                if !field.pointer && is_empty(&field.shape, value) {
                    if field.omitempty {
                        let gone = map.remove(field.name.as_ref());
                        pass.leave_out(&field.name, gone);
                    } else if pass.empty == Empty::Nil
                        && matches!(field.shape, Shape::List(_) | Shape::Map(_))
                    {
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
            normalise_struct(schema, *id, &mut map, &mut Pass::new(Empty::Nil));
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

fn normalise_shape(schema: &Schema, shape: &Shape, value: &mut Value, pass: &mut Pass) {
    match (shape, value) {
        (Shape::Struct(id), Value::Object(map)) => normalise_struct(schema, *id, map, pass),
        (Shape::List(list), Value::Array(values)) if has_structs(&list.of) => {
            for (index, value) in values.iter_mut().enumerate() {
                let before = pass.left_out.len();
                normalise_element(schema, &list.of, value, pass);
                pass.went(before, || Step::Index(index));
            }
        }
        (Shape::Map(of), Value::Object(values)) if has_structs(&of.of) => {
            for (key, value) in values {
                let before = pass.left_out.len();
                normalise_element(schema, &of.of, value, pass);
                pass.went(before, || Step::Name(key.clone()));
            }
        }
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
                Value::Object(map) => normalise_struct(schema, id, map, pass),
                Value::Array(values) => {
                    for (index, value) in values.iter_mut().enumerate() {
                        let before = pass.left_out.len();
                        shape_up(schema, id, value, pass);
                        pass.went(before, || Step::Index(index));
                    }
                }
                _ => {}
            }
        }
        _ => {}
    }
}

fn normalise_element(schema: &Schema, shape: &Shape, value: &mut Value, pass: &mut Pass) {
    if value.is_null() {
        *value = zero(shape);
    }
    normalise_shape(schema, shape, value, pass);
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
