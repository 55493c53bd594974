//! Merges an applied configuration into an object: it adds and changes, and never removes.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::element::PathElement;
use super::types::{Atom, List, MapOf, TypeRef};

/// The merged value; the applied one wins.
pub fn merge(of: TypeRef<'_>, live: &Value, applied: &Value) -> Result<Value, String> {
    Ok(place(of, Some(live), Some(applied))?.unwrap_or(Value::Null))
}

fn place(of: TypeRef<'_>, live: Option<&Value>, applied: Option<&Value>) -> Result<Option<Value>, String> {
    let decides = match (live, applied) {
        (live, None | Some(Value::Null)) if live.is_some_and(|v| !v.is_null()) => live,
        (_, applied) => applied,
    };
    match of.atom(decides) {
        Atom::Scalar(_) => Ok(leaf(live, applied)),
        Atom::List(list) => {
            let items = |value: Option<&Value>| value.and_then(Value::as_array).cloned().unwrap_or_default();
            let (old, new) = (items(live), items(applied));
            if list.is_atomic() || (old.is_empty() && new.is_empty()) {
                return Ok(leaf(live, applied));
            }
            let merged = merge_items(&list, &old, &new)?;
            Ok((!merged.is_empty()).then_some(Value::Array(merged)))
        }
        Atom::Map(map) => {
            let (old, new) = (
                live.and_then(Value::as_object),
                applied.and_then(Value::as_object),
            );
            let empty = |map: Option<&Map<String, Value>>| map.is_none_or(Map::is_empty);
            if map.atomic || (empty(old) && empty(new)) {
                return Ok(leaf(live, applied));
            }
            let merged = merge_maps(&map, old, new)?;
            Ok((!merged.is_empty()).then_some(Value::Object(merged)))
        }
    }
}

fn leaf(live: Option<&Value>, applied: Option<&Value>) -> Option<Value> {
    applied.or(live).cloned()
}

fn merge_maps(
    map: &MapOf<'_>,
    old: Option<&Map<String, Value>>,
    new: Option<&Map<String, Value>>,
) -> Result<Map<String, Value>, String> {
    let mut out = Map::new();
    let mut put = |name: &String, before: Option<&Value>, after: Option<&Value>| {
        let of = map.at(name).unwrap_or(TypeRef::Deduced);
        if let Some(value) = place(of, before, after)? {
            out.insert(name.clone(), value);
        }
        Ok::<(), String>(())
    };
    for (name, value) in old.into_iter().flatten() {
        put(name, Some(value), new.and_then(|new| new.get(name)))?;
    }
    for (name, value) in new.into_iter().flatten() {
        if old.is_none_or(|old| !old.contains_key(name)) {
            put(name, None, Some(value))?;
        }
    }
    Ok(out)
}

struct Indexed {
    order: Vec<PathElement>,
    /// The item of an element; `None` for one that stands there twice.
    items: BTreeMap<PathElement, Option<usize>>,
}

fn index(list: &List<'_>, items: &[Value], duplicates: bool) -> Result<Indexed, String> {
    let mut out = Indexed {
        order: Vec::with_capacity(items.len()),
        items: BTreeMap::new(),
    };
    for (at, item) in items.iter().enumerate() {
        let element = list
            .element_of(item)
            .map_err(|error| format!("element {at}: {error}"))?;
        match out.items.get_mut(&element) {
            Some(_) if !duplicates => return Err(format!("duplicate entries for key {element}")),
            Some(found) => *found = None,
            None => drop(out.items.insert(element.clone(), Some(at))),
        }
        out.order.push(element);
    }
    Ok(out)
}

/// The items of both lists. What both have comes in the order of the applied one; what only the live list
/// has keeps its place among its neighbours.
fn merge_items(list: &List<'_>, old: &[Value], new: &[Value]) -> Result<Vec<Value>, String> {
    let after = index(list, new, false)?;
    let before = index(list, old, true)?;
    let mut shared = after
        .order
        .iter()
        .filter(|element| before.items.contains_key(*element));
    let mut next_shared = shared.next();
    let mut merged: std::collections::BTreeSet<&PathElement> = std::collections::BTreeSet::new();
    let mut out = Vec::with_capacity(old.len().max(new.len()));
    let both = |element: &PathElement| {
        // An element that is there twice is a null to merge with.
        let live = before
            .items
            .get(element)
            .map(|at| at.map_or(&Value::Null, |at| &old[at]));
        let applied = after.items.get(element).and_then(|at| at.map(|at| &new[at]));
        place(list.element, live, applied)
    };
    let (mut l, mut r) = (0, 0);
    while l < before.order.len() || r < after.order.len() {
        if let (Some(left), Some(right)) = (before.order.get(l), after.order.get(r)) {
            if left == right {
                merged.insert(right);
                out.extend(both(right)?);
                l += 1;
                r += 1;
                next_shared = shared.next();
                continue;
            }
            if after.items.contains_key(left) && next_shared.is_some_and(|next| next != left) {
                // Shared, but its turn comes later.
                l += 1;
                continue;
            }
        }
        if let Some(left) = before.order.get(l) {
            if !after.items.contains_key(left) {
                out.extend(place(list.element, Some(&old[l]), None)?);
                l += 1;
                continue;
            }
            if merged.contains(left) {
                l += 1;
            }
        }
        if let Some(right) = after.order.get(r) {
            merged.insert(right);
            out.extend(both(right)?);
            r += 1;
            if next_shared == Some(right) {
                next_shared = shared.next();
            }
        }
    }
    Ok(out)
}
