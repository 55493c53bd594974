//! Field sets outlive schemas: where a list or map that was owned part by part is now owned as a whole, who
//! owned parts owns the whole.

use super::element::PathElement;
use super::set::Set;
use super::types::{Atom, TypeRef};

pub fn reconcile(set: &mut Set, of: TypeRef<'_>) {
    let atom = of.atom(None);
    for node in set.nodes_mut() {
        let below = match (&atom, &node.element) {
            (Atom::Map(map), PathElement::Field(name)) => map.at(name),
            (Atom::Map(map), _) => map.element,
            (Atom::List(list), _) => Some(list.element),
            (Atom::Scalar(_), _) => None,
        };
        let Some(below) = below else { continue };
        if node.children.is_empty() {
            continue;
        }
        let whole = match below.atom(None) {
            Atom::Scalar(_) => continue,
            Atom::List(list) => list.is_atomic(),
            Atom::Map(map) if map.is_deduced() => continue,
            Atom::Map(map) => map.atomic,
        };
        if whole {
            node.member = true;
            node.children = Set::default();
        } else {
            reconcile(&mut node.children, below);
        }
    }
}
