//! Values inside messages, as Go's formatting verbs print them. Clients see these texts.

use serde_json::Value;

use crate::decode::{go_float, go_quote};

fn number(value: &serde_json::Number) -> String {
    if value.is_f64() {
        go_float(value.as_f64().unwrap_or_default())
    } else {
        value.to_string()
    }
}

/// A value in a path.
pub fn to_string(value: &Value) -> String {
    match value {
        Value::Null => "null".to_string(),
        Value::Number(n) => number(n),
        Value::String(text) => go_quote(text),
        Value::Bool(b) => b.to_string(),
        Value::Array(list) => format!("[{}]", list.iter().map(to_string).collect::<Vec<_>>().join(",")),
        Value::Object(map) => map
            .iter()
            .map(|(key, value)| format!("{key}={}", to_string(value)))
            .collect(),
    }
}

/// `%#v` of a decoded value.
pub fn syntax(value: &Value) -> String {
    match value {
        Value::Null => "interface {}(nil)".to_string(),
        Value::Number(n) => number(n),
        Value::String(text) => go_quote(text),
        Value::Bool(b) => b.to_string(),
        Value::Array(list) => {
            let items: Vec<String> = list.iter().map(syntax).collect();
            format!("[]interface {{}}{{{}}}", items.join(", "))
        }
        Value::Object(map) => {
            let entries: Vec<String> = map
                .iter()
                .map(|(key, value)| format!("{}:{}", go_quote(key), syntax(value)))
                .collect();
            format!("map[string]interface {{}}{{{}}}", entries.join(", "))
        }
    }
}

/// `%T` of a decoded value. Numbers of an applied document are floats in Go.
pub fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "<nil>",
        Value::Number(_) => "float64",
        Value::String(_) => "string",
        Value::Bool(_) => "bool",
        Value::Array(_) => "[]interface {}",
        Value::Object(_) => "map[string]interface {}",
    }
}
