//! One step of a path into an object: a field, an element of a keyed list, an element of a set, or an index.
//! The order is that of stored field sets; the text forms are those of `FieldsV1` and of messages.

use std::cmp::Ordering;
use std::fmt;

use serde_json::{Number, Value};

use super::go_print;

#[derive(Debug, Clone)]
pub enum PathElement {
    Field(String),
    /// The key fields of a list's element, by name in order.
    Key(Vec<(String, Value)>),
    /// An element of a set.
    Value(Value),
    Index(i64),
}

/// The way to a field, from the root of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Path(pub Vec<PathElement>);

impl PathElement {
    /// Reads a key of `FieldsV1`. `None` is a sort that nobody knows yet, which readers skip.
    pub fn parse(text: &str) -> Result<Option<PathElement>, String> {
        let Some((sort, rest)) = text.split_at_checked(2) else {
            return Err("key must be 2 characters long:".to_string());
        };
        let json = |rest: &str| serde_json::from_str::<Value>(rest).map_err(|error| error.to_string());
        Ok(Some(match sort {
            "f:" => PathElement::Field(rest.to_string()),
            "v:" => PathElement::Value(json(rest)?),
            "k:" => match json(rest)? {
                // The map is sorted by name already.
                Value::Object(fields) => PathElement::Key(fields.into_iter().collect()),
                _ => return Err(format!("not an object: {rest}")),
            },
            "i:" => PathElement::Index(rest.parse().map_err(|_| format!("not a number: {rest}"))?),
            _ if sort.ends_with(':') => return Ok(None),
            _ => return Err(format!("missing colon: {text}")),
        }))
    }

    /// The key of `FieldsV1`.
    pub fn encode(&self) -> String {
        match self {
            PathElement::Field(name) => {
                let mut text = String::with_capacity(name.len() + 2);
                text.push_str("f:");
                text.push_str(name);
                text
            }
            PathElement::Key(fields) => {
                let mut text = String::from("k:{");
                for (at, (name, value)) in fields.iter().enumerate() {
                    if at > 0 {
                        text.push(',');
                    }
                    text.push_str(&json_text(&Value::String(name.clone())));
                    text.push(':');
                    text.push_str(&json_text(value));
                }
                text.push('}');
                text
            }
            PathElement::Value(value) => format!("v:{}", json_text(value)),
            PathElement::Index(index) => format!("i:{index}"),
        }
    }

    fn rank(&self) -> u8 {
        match self {
            PathElement::Field(_) => 0,
            PathElement::Key(_) => 1,
            PathElement::Value(_) => 2,
            PathElement::Index(_) => 3,
        }
    }
}

/// JSON as Go writes it: whole floats without a fraction, and HTML's letters escaped.
fn json_text(value: &Value) -> String {
    let text = match value {
        Value::Number(number) if number.is_f64() => {
            crate::decode::go_float(number.as_f64().unwrap_or_default())
        }
        value => value.to_string(),
    };
    if !text.contains(['<', '>', '&', '\u{2028}', '\u{2029}']) {
        return text;
    }
    text.replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

impl Ord for PathElement {
    fn cmp(&self, other: &PathElement) -> Ordering {
        match (self, other) {
            (PathElement::Field(a), PathElement::Field(b)) => a.cmp(b),
            (PathElement::Key(a), PathElement::Key(b)) => {
                for ((a_name, a_value), (b_name, b_value)) in a.iter().zip(b) {
                    let order = a_name.cmp(b_name).then_with(|| order_values(a_value, b_value));
                    if order.is_ne() {
                        return order;
                    }
                }
                a.len().cmp(&b.len())
            }
            (PathElement::Value(a), PathElement::Value(b)) => order_values(a, b),
            (PathElement::Index(a), PathElement::Index(b)) => a.cmp(b),
            (a, b) => a.rank().cmp(&b.rank()),
        }
    }
}

impl PartialOrd for PathElement {
    fn partial_cmp(&self, other: &PathElement) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for PathElement {
    fn eq(&self, other: &PathElement) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for PathElement {}

fn value_rank(value: &Value) -> u8 {
    match value {
        Value::Number(_) => 0,
        Value::String(_) => 1,
        Value::Bool(_) => 2,
        Value::Array(_) => 3,
        Value::Object(_) => 4,
        Value::Null => 5,
    }
}

fn order_numbers(a: &Number, b: &Number) -> Ordering {
    match (a.as_i64(), b.as_i64()) {
        (Some(a), Some(b)) => a.cmp(&b),
        _ => {
            let float = |n: &Number| n.as_f64().unwrap_or_default();
            float(a).total_cmp(&float(b))
        }
    }
}

fn order_values(a: &Value, b: &Value) -> Ordering {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => order_numbers(a, b),
        (Value::String(a), Value::String(b)) => a.cmp(b),
        (Value::Bool(a), Value::Bool(b)) => a.cmp(b),
        (Value::Array(a), Value::Array(b)) => a
            .iter()
            .zip(b)
            .map(|(a, b)| order_values(a, b))
            .find(|order| order.is_ne())
            .unwrap_or_else(|| a.len().cmp(&b.len())),
        (Value::Object(a), Value::Object(b)) => a
            .iter()
            .zip(b)
            .map(|((a_key, a), (b_key, b))| a_key.cmp(b_key).then_with(|| order_values(a, b)))
            .find(|order| order.is_ne())
            .unwrap_or_else(|| a.len().cmp(&b.len())),
        (a, b) => value_rank(a).cmp(&value_rank(b)),
    }
}

/// Equality where 1 and 1.0 are the same.
pub(super) fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a == b || order_numbers(a, b).is_eq(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter()
                    .zip(b)
                    .all(|((a_key, a), (b_key, b))| a_key == b_key && equal(a, b))
        }
        (a, b) => a == b,
    }
}

impl fmt::Display for PathElement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathElement::Field(name) => write!(f, ".{name}"),
            PathElement::Key(fields) => {
                f.write_str("[")?;
                for (at, (name, value)) in fields.iter().enumerate() {
                    if at > 0 {
                        f.write_str(",")?;
                    }
                    write!(f, "{name}={}", go_print::to_string(value))?;
                }
                f.write_str("]")
            }
            PathElement::Value(value) => write!(f, "[={}]", go_print::to_string(value)),
            PathElement::Index(index) => write!(f, "[{index}]"),
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|element| element.fmt(f))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_read_and_print() {
        let check = |text: &str, shown: &str| {
            let element = PathElement::parse(text).expect("parses").expect("known");
            assert_eq!(element.encode(), text);
            assert_eq!(element.to_string(), shown);
        };
        check("f:spec", ".spec");
        check(
            r#"k:{"containerPort":80,"protocol":"TCP"}"#,
            r#"[containerPort=80,protocol="TCP"]"#,
        );
        check(r#"v:"a\u0026b""#, r#"[="a&b"]"#);
        check("v:1", "[=1]");
        check("i:3", "[3]");
        assert_eq!(PathElement::parse("x:1"), Ok(None));
        for bad in ["", "f", "abc", "k:1", "v:{", "i:x", "é"] {
            assert!(PathElement::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn elements_are_ordered_as_upstream_orders_them() {
        let order = [
            "f:a",
            "f:b",
            r#"k:{"n":80}"#,
            r#"k:{"n":443}"#,
            r#"k:{"n":"a"}"#,
            "v:1",
            "v:2.5",
            "v:10",
            r#"v:"1""#,
            "v:false",
            "i:0",
        ];
        let parsed: Vec<PathElement> = order
            .iter()
            .map(|t| PathElement::parse(t).expect("parses").expect("known"))
            .collect();
        assert!(parsed.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(PathElement::parse("v:1.0"), PathElement::parse("v:1"));
    }
}
