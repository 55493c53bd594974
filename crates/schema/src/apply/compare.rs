//! What one object changes of another, as sets of fields. One pass; what is equal costs no allocation but for
//! the keys of lists that differ.

use serde_json::{Map, Value};

use super::element::{PathElement, equal};
use super::set::Set;
use super::types::{Atom, List, MapOf, TypeRef};

/// No field is in more than one of the sets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Comparison {
    pub removed: Set,
    pub modified: Set,
    pub added: Set,
}

impl Comparison {
    pub fn is_same(&self) -> bool {
        self.removed.is_empty() && self.modified.is_empty() && self.added.is_empty()
    }

    /// Without the fields and what is below them.
    pub fn without(mut self, fields: &Set) -> Comparison {
        for set in [&mut self.removed, &mut self.modified, &mut self.added] {
            set.remove_recursively(fields);
        }
        self
    }

    fn attach(&mut self, element: impl Fn() -> PathElement, own: Own, below: Comparison) {
        let put = |set: &mut Set, member: bool, children: Set| {
            if member || !children.is_empty() {
                set.push(element(), member, children);
            }
        };
        put(&mut self.removed, own == Own::Removed, below.removed);
        put(&mut self.modified, own == Own::Modified, below.modified);
        put(&mut self.added, own == Own::Added, below.added);
    }

    fn merge(mut self, other: Comparison) -> Comparison {
        self.removed.absorb(other.removed);
        self.modified.absorb(other.modified);
        self.added.absorb(other.added);
        self
    }
}

/// What became of a place itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Own {
    Same,
    Removed,
    Modified,
    Added,
}

/// Compares two objects of one type.
pub fn compare(of: TypeRef<'_>, old: &Value, new: &Value) -> Result<Comparison, String> {
    Ok(place(of, Some(old), Some(new))?.1)
}

fn place(of: TypeRef<'_>, old: Option<&Value>, new: Option<&Value>) -> Result<(Own, Comparison), String> {
    match (old, new) {
        (Some(o), Some(n)) => {
            let (a, b) = (of.atom(old), of.atom(new));
            if std::mem::discriminant(&a) == std::mem::discriminant(&b) || o.is_null() || n.is_null() {
                let atom = if n.is_null() { a } else { b };
                return atom_of(&atom, old, new);
            }
            // What may be anything changed from one sort to another.
            let (_, first) = atom_of(&a, old, new)?;
            let (own, second) = atom_of(&b, old, new)?;
            let own = if matches!(a, Atom::Scalar(_)) {
                Own::Modified
            } else {
                own
            };
            Ok((own, first.merge(second)))
        }
        (Some(_), None) => atom_of(&of.atom(old), old, new),
        (None, Some(_)) => atom_of(&of.atom(new), old, new),
        (None, None) => Ok((Own::Same, Comparison::default())),
    }
}

fn atom_of(atom: &Atom<'_>, old: Option<&Value>, new: Option<&Value>) -> Result<(Own, Comparison), String> {
    let below = match atom {
        Atom::Scalar(_) => return Ok((leaf(old, new), Comparison::default())),
        Atom::List(list) => {
            let (old_items, new_items) = (as_items(old), as_items(new));
            if list.is_atomic() || (old_items.is_empty() && new_items.is_empty()) {
                return Ok((leaf(old, new), Comparison::default()));
            }
            compare_items(list, old_items, new_items)?
        }
        Atom::Map(map) => {
            let (old_map, new_map) = (old.and_then(Value::as_object), new.and_then(Value::as_object));
            let empty = |map: Option<&Map<String, Value>>| map.is_none_or(Map::is_empty);
            if map.atomic || (empty(old_map) && empty(new_map)) {
                return Ok((leaf(old, new), Comparison::default()));
            }
            compare_maps(map, old_map, new_map)?
        }
    };
    let own = match (old, new) {
        (None, _) => Own::Added,
        (_, None) => Own::Removed,
        _ => Own::Same,
    };
    Ok((own, below))
}

fn as_items(value: Option<&Value>) -> &[Value] {
    value.and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn leaf(old: Option<&Value>, new: Option<&Value>) -> Own {
    match (old, new) {
        (None, _) => Own::Added,
        (_, None) => Own::Removed,
        (Some(old), Some(new)) if equal(old, new) => Own::Same,
        _ => Own::Modified,
    }
}

fn compare_maps(
    map: &MapOf<'_>,
    old: Option<&Map<String, Value>>,
    new: Option<&Map<String, Value>>,
) -> Result<Comparison, String> {
    let mut out = Comparison::default();
    let mut old = old.into_iter().flatten().peekable();
    let mut new = new.into_iter().flatten().peekable();
    // Both maps are sorted.
    loop {
        let name = match (old.peek(), new.peek()) {
            (Some((a, _)), Some((b, _))) => a.min(b).as_str(),
            (Some((a, _)), None) => a.as_str(),
            (None, Some((b, _))) => b.as_str(),
            (None, None) => return Ok(out),
        };
        let before = old
            .next_if(|(key, _)| key.as_str() == name)
            .map(|(_, value)| value);
        let after = new
            .next_if(|(key, _)| key.as_str() == name)
            .map(|(_, value)| value);
        let of = map.at(name).unwrap_or(TypeRef::Deduced);
        let (own, below) = place(of, before, after)?;
        out.attach(|| PathElement::Field(name.to_string()), own, below);
    }
}

/// Items by their element, in order; the same element may come several times.
fn keyed<'v>(list: &List<'_>, items: &'v [Value]) -> Result<Vec<(PathElement, &'v Value)>, String> {
    let mut out = Vec::with_capacity(items.len());
    for (at, item) in items.iter().enumerate() {
        let element = list
            .element_of(item)
            .map_err(|error| format!("element {at}: {error}"))?;
        out.push((element, item));
    }
    out.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(out)
}

fn compare_items(list: &List<'_>, old: &[Value], new: &[Value]) -> Result<Comparison, String> {
    let mut out = Comparison::default();
    if old == new {
        return Ok(out);
    }
    let (old, new) = (keyed(list, old)?, keyed(list, new)?);
    let (mut old, mut new) = (old.as_slice(), new.as_slice());
    loop {
        let element = match (old.first(), new.first()) {
            (Some((a, _)), Some((b, _))) => a.min(b),
            (Some((a, _)), None) => a,
            (None, Some((b, _))) => b,
            (None, None) => return Ok(out),
        };
        let count = |items: &[(PathElement, &Value)]| items.iter().take_while(|(e, _)| e == element).count();
        let (before, old_rest) = old.split_at(count(old));
        let (after, new_rest) = new.split_at(count(new));
        (old, new) = (old_rest, new_rest);
        let (own, below) = match (before.len(), after.len()) {
            (0 | 1, 0 | 1) => place(
                list.element,
                before.first().map(|(_, value)| *value),
                after.first().map(|(_, value)| *value),
            )?,
            // Doubled elements are owned as one thing.
            (2.., 2..) => {
                let same = before.len() == after.len()
                    && before.iter().zip(after).all(|((_, a), (_, b))| equal(a, b));
                (
                    if same { Own::Same } else { Own::Modified },
                    Comparison::default(),
                )
            }
            // One is left of the doubled ones: it is new, the pair is gone.
            (2.., _) => {
                if let Some((_, value)) = after.first() {
                    let (_, below) = place(list.element, None, Some(value))?;
                    out.attach(|| element.clone(), Own::Added, below);
                }
                (Own::Removed, Comparison::default())
            }
            (_, 2..) => {
                if let Some((_, value)) = before.first() {
                    let (_, below) = place(list.element, Some(value), None)?;
                    out.attach(|| element.clone(), Own::Removed, below);
                }
                (Own::Added, Comparison::default())
            }
        };
        out.attach(|| element.clone(), own, below);
    }
}
