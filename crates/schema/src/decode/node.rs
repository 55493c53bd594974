//! A parsed document that keeps what `serde_json::Value` forgets and upstream's messages need: the order
//! of keys, duplicates, and numbers as they were written.

use serde_json::{Map, Number, Value};

#[derive(Debug, Clone, PartialEq)]
pub enum Node {
    Null,
    Bool(bool),
    /// The text of a JSON number.
    Number(String),
    String(String),
    Array(Vec<Node>),
    Object(Vec<(String, Node)>),
}

impl Node {
    /// The last value of a key wins, as in Go.
    pub fn get(&self, key: &str) -> Option<&Node> {
        match self {
            Node::Object(entries) => entries.iter().rev().find(|(k, _)| k == key).map(|(_, node)| node),
            _ => None,
        }
    }

    /// Without a type: integers stay integers when they fit 64 bits, as upstream decodes into maps.
    pub fn into_value(self) -> Value {
        match self {
            Node::Null => Value::Null,
            Node::Bool(b) => Value::Bool(b),
            Node::Number(text) => number(&text).map_or(Value::Null, Value::Number),
            Node::String(text) => Value::String(text),
            Node::Array(nodes) => Value::Array(nodes.into_iter().map(Node::into_value).collect()),
            Node::Object(entries) => Value::Object(
                entries
                    .into_iter()
                    .map(|(key, node)| (key, node.into_value()))
                    .collect::<Map<_, _>>(),
            ),
        }
    }
}

impl From<Value> for Node {
    fn from(value: Value) -> Node {
        match value {
            Value::Null => Node::Null,
            Value::Bool(b) => Node::Bool(b),
            Value::Number(n) => Node::Number(n.to_string()),
            Value::String(text) => Node::String(text),
            Value::Array(values) => Node::Array(values.into_iter().map(Node::from).collect()),
            Value::Object(map) => {
                Node::Object(map.into_iter().map(|(key, v)| (key, Node::from(v))).collect())
            }
        }
    }
}

/// `None` when not even a 64-bit float holds the number.
pub(crate) fn number(text: &str) -> Option<Number> {
    if !text.contains('.')
        && let Ok(n) = text.parse::<i64>()
    {
        return Some(n.into());
    }
    Number::from_f64(text.parse::<f64>().ok()?)
}
