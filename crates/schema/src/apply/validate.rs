//! Whether a value fits its type, with the errors that a client who applies it sees.

use std::fmt;

use serde_json::Value;

use super::element::PathElement;
use super::go_print;
use super::types::{Atom, Kind, TypeRef};

/// Whether a set or keyed list may hold the same element twice. Stored objects may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Duplicates {
    Allowed,
    Refused,
}

/// All that is wrong, in the order in which it stands.
#[derive(Debug, Default)]
struct Errors(Vec<(String, String)>);

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let one = |(path, message): &(String, String)| {
            if path.is_empty() {
                message.clone()
            } else {
                format!("{path}: {message}")
            }
        };
        if let [only] = self.0.as_slice() {
            return f.write_str(&one(only));
        }
        f.write_str("errors:")?;
        self.0
            .iter()
            .try_for_each(|error| write!(f, "\n  {}", one(error)))
    }
}

struct Walk<'p> {
    errors: Errors,
    path: Vec<Step<'p>>,
    duplicates: Duplicates,
}

enum Step<'p> {
    Field(&'p str),
    Element(PathElement),
}

pub fn validate(of: TypeRef<'_>, value: &Value, duplicates: Duplicates) -> Result<(), String> {
    let mut walk = Walk {
        errors: Errors::default(),
        path: Vec::new(),
        duplicates,
    };
    walk.value(of, value);
    if walk.errors.0.is_empty() {
        Ok(())
    } else {
        Err(walk.errors.to_string())
    }
}

impl<'p> Walk<'p> {
    fn fail(&mut self, message: impl Into<String>) {
        let path = self
            .path
            .iter()
            .map(|step| match step {
                Step::Field(name) => format!(".{name}"),
                Step::Element(element) => element.to_string(),
            })
            .collect();
        self.errors.0.push((path, message.into()));
    }

    fn value(&mut self, of: TypeRef<'_>, value: &'p Value) {
        match (of.atom(Some(value)), value) {
            (_, Value::Null) => {}
            (Atom::Scalar(kind), value) => self.scalar(kind, value),
            (Atom::Map(map), Value::Object(entries)) => {
                for (name, value) in entries {
                    self.path.push(Step::Field(name));
                    let below = map.at(name);
                    match below {
                        Some(of) => self.value(of, value),
                        None => self.fail("field not declared in schema"),
                    }
                    self.path.pop();
                    if below.is_none() {
                        break;
                    }
                }
            }
            (Atom::Map(_), value) => {
                self.fail(format!(
                    "expected map, got &{{{}}}",
                    crate::patch::go_print(value)
                ));
            }
            (Atom::List(list), Value::Array(items)) => {
                let mut seen = std::collections::BTreeSet::new();
                for (at, item) in items.iter().enumerate() {
                    let element = if list.is_atomic() {
                        PathElement::Index(at as i64)
                    } else {
                        match list.element_of(item) {
                            Ok(element) => {
                                if !seen.insert(element.clone()) && self.duplicates == Duplicates::Refused {
                                    self.fail(format!("duplicate entries for key {element}"));
                                }
                                element
                            }
                            Err(error) => {
                                self.fail(format!("element {at}: {error}"));
                                return;
                            }
                        }
                    };
                    self.path.push(Step::Element(element));
                    self.value(list.element, item);
                    self.path.pop();
                }
            }
            (Atom::List(_), value) => {
                self.fail(format!(
                    "expected list, got &{{{}}}",
                    crate::patch::go_print(value)
                ));
            }
        }
    }

    fn scalar(&mut self, kind: Kind, value: &Value) {
        match (kind, value) {
            (Kind::Numeric, Value::Number(_))
            | (Kind::String, Value::String(_))
            | (Kind::Boolean, Value::Bool(_))
            | (Kind::Untyped, Value::Number(_) | Value::String(_) | Value::Bool(_)) => {}
            (Kind::Numeric, value) => self.fail(format!(
                "expected numeric (int or float), got {}",
                go_print::type_name(value)
            )),
            (Kind::String, value) => self.fail(format!(
                "expected string, got &value.valueUnstructured{{Value:{}}}",
                go_print::syntax(value)
            )),
            (Kind::Boolean, value) => {
                self.fail(format!(
                    "expected boolean, got &{{{}}}",
                    crate::patch::go_print(value)
                ));
            }
            (Kind::Untyped, value) => {
                self.fail(format!(
                    "expected any scalar, got &{{{}}}",
                    crate::patch::go_print(value)
                ));
            }
        }
    }
}
