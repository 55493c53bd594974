//! All fields that a value says something about: its leaves, and the elements of its lists.

use serde_json::Value;

use super::element::PathElement;
use super::set::Set;
use super::types::{Atom, TypeRef};

pub fn field_set(of: TypeRef<'_>, value: &Value) -> Set {
    place(of, value).1
}

/// Whether the place itself is a leaf, and the set below it.
fn place(of: TypeRef<'_>, value: &Value) -> (bool, Set) {
    let mut set = Set::default();
    match of.atom(Some(value)) {
        Atom::Scalar(_) => return (true, set),
        Atom::List(list) => {
            if list.is_atomic() {
                return (true, set);
            }
            let items = value.as_array().map_or(&[][..], Vec::as_slice);
            let mut keyed: Vec<(PathElement, &Value)> = items
                .iter()
                .filter_map(|item| Some((list.element_of(item).ok()?, item)))
                .collect();
            keyed.sort_by(|a, b| a.0.cmp(&b.0));
            let mut rest = keyed.as_slice();
            while let Some((element, item)) = rest.first() {
                let same = rest.iter().take_while(|(e, _)| e == element).count();
                let below = if same > 1 {
                    Set::default()
                } else {
                    place(list.element, item).1
                };
                set.push(element.clone(), true, below);
                rest = &rest[same..];
            }
        }
        Atom::Map(map) => {
            if map.atomic {
                return (true, set);
            }
            for (name, value) in value.as_object().into_iter().flatten() {
                let field = map.field(name);
                let of = field.or(map.element).unwrap_or(TypeRef::Deduced);
                let (own, below) = place(of, value);
                let empty = match value {
                    Value::Null => true,
                    Value::Object(map) => map.is_empty(),
                    _ => false,
                };
                set.push(
                    PathElement::Field(name.clone()),
                    own || empty || field.is_none(),
                    below,
                );
            }
        }
    }
    (false, set)
}
