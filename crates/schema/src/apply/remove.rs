//! Takes fields out of a value.

use serde_json::{Map, Value};

use super::set::Set;
use super::types::{Atom, TypeRef};

/// The value without the items of the set. A container that loses all it had becomes null.
pub fn remove_items(of: TypeRef<'_>, value: &Value, items: &Set) -> Value {
    match (of.atom(Some(value)), value) {
        (Atom::Scalar(_), value) => value.clone(),
        (Atom::List(list), Value::Array(values)) if !list.is_atomic() => {
            let mut kept = Vec::with_capacity(values.len());
            for value in values {
                let node = list
                    .element_of(value)
                    .ok()
                    .and_then(|element| items.node(&element));
                match node {
                    Some(node) if node.member => {}
                    Some(node) => kept.push(remove_items(list.element, value, &node.children)),
                    None => kept.push(value.clone()),
                }
            }
            if kept.is_empty() {
                Value::Null
            } else {
                Value::Array(kept)
            }
        }
        (Atom::Map(map), Value::Object(entries)) if !map.atomic => {
            let mut kept = Map::new();
            for (name, value) in entries {
                match items.field(name) {
                    Some(node) if node.member => {}
                    Some(node) => {
                        let of = map.at(name).unwrap_or(TypeRef::Deduced);
                        kept.insert(name.clone(), remove_items(of, value, &node.children));
                    }
                    None => drop(kept.insert(name.clone(), value.clone())),
                }
            }
            if kept.is_empty() {
                Value::Null
            } else {
                Value::Object(kept)
            }
        }
        _ => Value::Null,
    }
}
