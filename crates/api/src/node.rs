//! A place in an object while it is being checked: the value and the way to it. The path is a chain of
//! borrowed steps and becomes a string only when an error is reported, so a valid object costs no allocation.

use std::collections::BTreeMap;

use serde_json::Value;

static NULL: Value = Value::Null;

#[derive(Clone, Copy)]
enum Step<'a> {
    Root,
    /// A field name; dots inside go several levels down at once.
    Field(&'a str),
    Index(usize),
    Key(&'a str),
}

/// A value with its path. An absent field is a node whose value is null. The path lives as long as the
/// nodes on the way (`'p`), the value as long as the object (`'v`).
#[derive(Clone, Copy)]
pub struct Node<'p, 'v> {
    pub value: &'v Value,
    parent: Option<&'p Node<'p, 'v>>,
    step: Step<'p>,
}

/// The value at a dotted path, null where something on the way is missing.
pub fn at<'a>(value: &'a Value, path: &str) -> &'a Value {
    path.split('.')
        .try_fold(value, |v, name| v.get(name))
        .unwrap_or(&NULL)
}

/// The string at a dotted path, empty if there is none.
pub fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    at(value, path).as_str().unwrap_or("")
}

/// The number at a dotted path, zero if there is none.
pub fn number(value: &Value, path: &str) -> i64 {
    at(value, path).as_i64().unwrap_or(0)
}

/// The elements of the list at a dotted path.
pub fn list<'a>(value: &'a Value, path: &str) -> &'a [Value] {
    at(value, path).as_array().map_or(&[], Vec::as_slice)
}

/// Elements by the text of a field; of several with the same text, the first.
pub fn by_text<'a>(
    elements: impl IntoIterator<Item = &'a Value>,
    field: &str,
) -> BTreeMap<&'a str, &'a Value> {
    let mut found = BTreeMap::new();
    for element in elements {
        found.entry(text(element, field)).or_insert(element);
    }
    found
}

/// Whether two values are the same to upstream: absent, null and empty are one.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(x), Value::Object(y)) => {
            x.iter().all(|(k, v)| same(v, y.get(k).unwrap_or(&NULL)))
                && y.iter().all(|(k, v)| x.contains_key(k) || is_empty(v))
        }
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(a, b)| same(a, b)),
        _ => a == b || (is_empty(a) && is_empty(b)),
    }
}

/// Null, or an empty list, or an object with nothing in it.
pub fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.values().all(is_empty),
        _ => false,
    }
}

impl<'p, 'v> Node<'p, 'v> {
    /// The whole object.
    pub fn root(value: &'v Value) -> Self {
        Node {
            value,
            parent: None,
            step: Step::Root,
        }
    }

    pub fn field<'q>(&'q self, name: &'q str) -> Node<'q, 'v> {
        Node {
            value: at(self.value, name),
            parent: Some(self),
            step: Step::Field(name),
        }
    }

    /// This place with another value, for checks whose path is not where the value is.
    pub fn with<'q>(&'q self, value: &'q Value) -> Node<'q, 'q> {
        Node {
            value,
            parent: self.parent,
            step: self.step,
        }
    }

    /// Another value under the same path.
    pub fn with_value(&self, value: &'v Value) -> Node<'p, 'v> {
        Node {
            value,
            parent: self.parent,
            step: self.step,
        }
    }

    pub fn items<'q>(&'q self) -> impl Iterator<Item = Node<'q, 'v>> {
        let list = self.value.as_array().map_or(&[][..], Vec::as_slice);
        list.iter().enumerate().map(move |(i, value)| Node {
            value,
            parent: Some(self),
            step: Step::Index(i),
        })
    }

    /// The entries of a map; the path shows the key in brackets.
    pub fn entries<'q>(&'q self) -> impl Iterator<Item = (&'v str, Node<'q, 'v>)> {
        self.value
            .as_object()
            .into_iter()
            .flatten()
            .map(move |(k, value)| {
                (
                    k.as_str(),
                    Node {
                        value,
                        parent: Some(self),
                        step: Step::Key(k),
                    },
                )
            })
    }

    pub fn key<'q>(&'q self, key: &'q str) -> Node<'q, 'v> {
        Node {
            value: self.value.get(key).unwrap_or(&NULL),
            parent: Some(self),
            step: Step::Key(key),
        }
    }

    pub fn index<'q>(&'q self, i: usize) -> Node<'q, 'v> {
        Node {
            value: self.value.get(i).unwrap_or(&NULL),
            parent: Some(self),
            step: Step::Index(i),
        }
    }

    /// The string, empty when absent.
    pub fn str(&self) -> &'v str {
        self.value.as_str().unwrap_or("")
    }

    pub fn int(&self) -> Option<i64> {
        self.value.as_i64()
    }

    pub fn bool(&self) -> bool {
        self.value.as_bool().unwrap_or(false)
    }

    /// Present and not null.
    pub fn is_set(&self) -> bool {
        !self.value.is_null()
    }

    pub fn len(&self) -> usize {
        match self.value {
            Value::Array(list) => list.len(),
            Value::Object(map) => map.len(),
            Value::String(s) => s.len(),
            _ => 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `spec.containers[0].name`
    pub fn path(&self) -> String {
        let mut out = String::new();
        self.write_path(&mut out);
        out
    }

    fn write_path(&self, out: &mut String) {
        use std::fmt::Write;
        if let Some(parent) = self.parent {
            parent.write_path(out);
        }
        match self.step {
            Step::Root => {}
            Step::Field(name) => {
                if !out.is_empty() {
                    out.push('.');
                }
                out.push_str(name);
            }
            // Writing to a string cannot fail.
            Step::Index(i) => drop(write!(out, "[{i}]")),
            Step::Key(key) => drop(write!(out, "[{key}]")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn paths_read_as_upstream_writes_them() {
        let object = json!({"spec": {"containers": [{"name": "a"}], "limits": {"cpu": 1}}});
        let root = Node::root(&object);
        let containers = root.field("spec.containers");
        let first = containers.items().next().expect("one container");
        assert_eq!(first.field("name").path(), "spec.containers[0].name");
        let limits = root.field("spec.limits");
        assert_eq!(
            limits.entries().next().expect("one entry").1.path(),
            "spec.limits[cpu]"
        );
        assert_eq!(root.field("nothing.here").str(), "");
    }

    #[test]
    fn empty_and_absent_are_the_same() {
        assert!(same(&json!({"a": {}, "b": 1}), &json!({"b": 1, "c": []})));
        assert!(!same(&json!({"b": 1}), &json!({"b": 2})));
        assert!(!same(&json!({"b": 0}), &json!({})));
    }
}
