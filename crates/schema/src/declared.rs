//! JSON in the order in which Go writes it: the fields of a type as they are declared, the keys of maps sorted, and
//! what HTML would take for a tag escaped. For documents and messages; stored objects are kept in an order of their own.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::types::{Schema, Shape, Special, TypeId};

/// What a patch did to a place.
pub(crate) enum Mark {
    /// It went through here.
    Opened(BTreeMap<String, Mark>),
    /// What is here comes from the patch.
    Foreign,
}

/// A document that says which kind it is. One of no known kind keeps its order.
pub fn declared_order(schema: &Schema, document: &Value) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    let shape = type_of(schema, document).map(Shape::Struct);
    write(schema, shape.as_ref(), document, None, &mut out);
    out
}

/// JSON without spaces, for people to read.
pub fn indented(compact: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(compact.len() * 2);
    let (mut depth, mut inside, mut escaped) = (0, false, false);
    let line = |out: &mut Vec<u8>, depth: usize| {
        out.push(b'\n');
        out.extend(std::iter::repeat_n(b' ', 2 * depth));
    };
    for (at, &byte) in compact.iter().enumerate() {
        if inside {
            out.push(byte);
            inside = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
            continue;
        }
        match byte {
            b'{' | b'[' => {
                out.push(byte);
                depth += 1;
                if !matches!(compact.get(at + 1), Some(b'}' | b']')) {
                    line(&mut out, depth);
                }
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                if !matches!(out.last(), Some(b'{' | b'[')) {
                    line(&mut out, depth);
                }
                out.push(byte);
            }
            b',' => {
                out.push(byte);
                line(&mut out, depth);
            }
            b':' => out.extend_from_slice(b": "),
            byte => {
                inside = byte == b'"';
                out.push(byte);
            }
        }
    }
    out
}

fn type_of(schema: &Schema, document: &Value) -> Option<TypeId> {
    let kind = document.get("kind")?.as_str()?;
    let version = document.get("apiVersion").and_then(Value::as_str).unwrap_or("v1");
    let (group, version) = version.rsplit_once('/').unwrap_or(("", version));
    schema.by_gvk(group, version, kind)
}

pub(crate) fn write(
    schema: &Schema,
    shape: Option<&Shape>,
    value: &Value,
    mark: Option<&Mark>,
    out: &mut Vec<u8>,
) {
    // What the patch brought has no type.
    let shape = shape.filter(|_| !matches!(mark, Some(Mark::Foreign)));
    let below = |key: &str| match mark {
        Some(Mark::Opened(children)) => children.get(key),
        Some(Mark::Foreign) => mark,
        None => None,
    };
    match value {
        Value::Object(map) => object(schema, shape, map, mark, &below, out),
        Value::Array(items) => {
            let of = match shape {
                Some(Shape::List(list)) => Some(&list.of),
                _ => None,
            };
            out.push(b'[');
            for (at, item) in items.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                write(schema, of, item, below(&at.to_string()), out);
            }
            out.push(b']');
        }
        Value::String(text) => string(text, out),
        other => out.extend_from_slice(other.to_string().as_bytes()),
    }
}

fn object<'m>(
    schema: &Schema,
    shape: Option<&Shape>,
    map: &Map<String, Value>,
    mark: Option<&Mark>,
    below: &dyn Fn(&str) -> Option<&'m Mark>,
    out: &mut Vec<u8>,
) {
    if let (Some(Shape::Special(Special::FieldsV1)), None) = (shape, mark) {
        let mut text = Vec::new();
        if crate::apply::write_fields(&mut text, &Value::Object(map.clone())).is_ok() {
            out.extend_from_slice(&text);
            return;
        }
    }
    let inner = match (shape, mark) {
        (Some(Shape::Special(Special::RawExtension)), None) => {
            type_of(schema, &Value::Object(map.clone())).map(Shape::Struct)
        }
        _ => None,
    };
    let shape = inner.as_ref().or(shape);
    let fields = match shape {
        Some(Shape::Struct(id)) => schema.get(*id).fields.as_ref(),
        _ => &[],
    };
    let of = match shape {
        Some(Shape::Map(map)) => Some(&map.of),
        _ => None,
    };
    out.push(b'{');
    let mut first = true;
    let mut put = |key: &str, value: &Value, shape: Option<&Shape>| {
        if !std::mem::replace(&mut first, false) {
            out.push(b',');
        }
        string(key, out);
        out.push(b':');
        write(schema, shape, value, below(key), out);
    };
    let known = |key: &str| fields.iter().find(|field| field.name == key);
    if mark.is_some() {
        for (key, value) in map {
            put(key, value, known(key).map(|field| &field.shape).or(of));
        }
    } else {
        for field in fields {
            if let Some(value) = map.get(field.name.as_ref()) {
                put(&field.name, value, Some(&field.shape));
            }
        }
        for (key, value) in map.iter().filter(|(key, _)| known(key).is_none()) {
            put(key, value, of);
        }
    }
    out.push(b'}');
}

/// A string as Go writes it: what HTML would take for a tag is escaped.
fn string(text: &str, out: &mut Vec<u8>) {
    for char in Value::String(text.to_string()).to_string().chars() {
        match char {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                out.extend_from_slice(format!("\\u{:04x}", char as u32).as_bytes());
            }
            char => out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_as_declared() {
        let schema = Schema::parse(
            "P x/v1 io.k8s.x.v1\nT Outer gvk=x/v1\n kind s TypeMeta=0/0 o\n apiVersion s TypeMeta=0/0 o\n name s 1 o\n by {}s 5 o\n any R 6 o\n",
        )
        .expect("a table");
        let check = |text: &str| {
            let value: Value = serde_json::from_str(text).expect("JSON");
            assert_eq!(String::from_utf8_lossy(&declared_order(&schema, &value)), text);
        };
        check(
            r#"{"kind":"Outer","apiVersion":"x/v1","name":"\u003cn\u003e","by":{"a":"1","b":"2"},"any":{"kind":"Outer","apiVersion":"x/v1","name":"i"}}"#,
        );
        let value = serde_json::json!({"a": [], "b": {"c": [1, {"d": "x:\\\",{}"}], "e": {}}, "f": null});
        let pretty = serde_json::to_string_pretty(&value).expect("JSON");
        assert_eq!(
            String::from_utf8_lossy(&indented(value.to_string().as_bytes())),
            pretty
        );
        check(r#"{"apiVersion":"y/v1","kind":"Outer","name":"n"}"#);
    }
}
