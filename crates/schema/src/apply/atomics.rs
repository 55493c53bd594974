//! Finds what a configuration would replace as a whole.

use serde_json::Value;

use super::types::{Atom, TypeRef};

/// The paths of all atomic lists, maps and structs in a value.
pub fn atomics(of: TypeRef<'_>, value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    visit(of, value, "", &mut found);
    found
}

fn visit(of: TypeRef<'_>, value: &Value, path: &str, found: &mut Vec<String>) {
    match (of.atom(Some(value)), value) {
        (Atom::Map(map), Value::Object(fields)) => {
            if map.atomic {
                found.push(path.to_owned());
            }
            for (name, value) in fields {
                if let Some(of) = map.field(name) {
                    visit(of, value, &format!("{path}.{name}"), found);
                }
            }
        }
        (Atom::List(list), Value::Array(items)) => {
            if list.is_atomic() {
                found.push(path.to_owned());
            }
            for (at, item) in items.iter().enumerate() {
                visit(list.element, item, &format!("{path}[{at}]"), found);
            }
        }
        _ => {}
    }
}
