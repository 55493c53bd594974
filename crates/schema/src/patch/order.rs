//! The order of merged lists: what the patch names comes in the patch's order, what only the server has
//! keeps its place between, as far as both can be had.

use serde_json::{Map, Value};

use super::strategic::{go_type, internal};
use super::{PatchError, go_print};

type Result<T> = std::result::Result<T, PatchError>;

/// How the elements of a list are told apart.
#[derive(Clone, Copy)]
pub(super) struct List<'a> {
    pub merge_key: &'a str,
    pub maps: bool,
}

pub(super) fn no_merge_key(map: &Map<String, Value>, merge_key: &str) -> PatchError {
    let map = go_print(&Value::Object(map.clone()));
    internal(format!(
        "map: {map} does not contain declared merge key: {merge_key}"
    ))
}

/// Whether the elements are objects. All must be of one type, and not lists.
pub(super) fn elements_are_maps(first: &[Value], second: &[Value]) -> Result<bool> {
    let mut kind: Option<&Value> = None;
    for value in first.iter().chain(second) {
        match kind {
            None => {
                if value.is_array() {
                    return Err(PatchError::Unprocessable(
                        "lists of lists are not supported".to_string(),
                    ));
                }
                kind = Some(value);
            }
            Some(other) if go_type(other) != go_type(value) => {
                let (first, second) = (Value::Array(first.to_vec()), Value::Array(second.to_vec()));
                let lists = format!("[{} {}]", go_print(&first), go_print(&second));
                return Err(internal(format!("list element types are not identical: {lists}")));
            }
            Some(_) => {}
        }
    }
    kind.map(Value::is_object)
        .ok_or_else(|| internal("no elements in any of the given slices"))
}

/// Where the element with this key is.
pub(super) fn position(list: &[Value], merge_key: &str, key: &Value) -> Result<Option<usize>> {
    for (index, value) in list.iter().enumerate() {
        let map = value
            .as_object()
            .ok_or_else(|| internal(format!("value for key {index} is not a map")))?;
        if map.get(merge_key) == Some(key) {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

/// Without duplicates. COMPAT: the last element takes the place of a duplicate, as upstream does it.
pub(super) fn deduplicate(mut values: Vec<Value>) -> Vec<Value> {
    let mut first = 0;
    while first < values.len() {
        let mut second = first + 1;
        while second < values.len() {
            if values[first] == values[second] {
                values.swap_remove(second);
            } else {
                second += 1;
            }
        }
        first += 1;
    }
    values
}

impl List<'_> {
    fn key<'v>(&self, value: &'v Value) -> Result<&'v Value> {
        if !self.maps {
            return Ok(value);
        }
        let map = value.as_object().ok_or_else(|| {
            internal(format!(
                "expected a map[string]interface {{}}, but received a {}",
                go_type(value)
            ))
        })?;
        map.get(self.merge_key)
            .ok_or_else(|| no_merge_key(map, self.merge_key))
    }

    /// The elements that `by` names, and the others.
    pub fn partition(&self, values: Vec<Value>, by: &[Value]) -> Result<(Vec<Value>, Vec<Value>)> {
        let (mut named, mut others) = (Vec::new(), Vec::new());
        for value in values {
            let found = if self.maps {
                position(by, self.merge_key, self.key(&value)?)?.is_some()
            } else {
                by.contains(&value)
            };
            if found {
                named.push(value)
            } else {
                others.push(value)
            }
        }
        Ok((named, others))
    }

    fn keys<'v>(&self, values: &'v [Value]) -> Result<Vec<&'v Value>> {
        values.iter().map(|value| self.key(value)).collect()
    }

    /// Sorts the patch's elements by the patch and the server's by the server, and lays them together.
    pub fn arrange(
        &self,
        in_patch: Vec<Value>,
        server_only: Vec<Value>,
        patch_order: &[Value],
        server_order: &[Value],
    ) -> Result<Vec<Value>> {
        let patch_keys = self.keys(patch_order)?;
        let server_keys = self.keys(server_order)?;
        let sort = |values: Vec<Value>, order: &[&Value]| -> Result<Vec<Value>> {
            let mut places = Vec::with_capacity(values.len());
            for value in values {
                let key = self.key(&value)?;
                let place = order.iter().position(|other| *other == key).unwrap_or(usize::MAX);
                places.push((place, value));
            }
            places.sort_by_key(|(place, _)| *place);
            Ok(places.into_iter().map(|(_, value)| value).collect())
        };
        let in_patch = sort(in_patch, &patch_keys)?;
        let server_only = sort(server_only, &server_keys)?;
        let place = |value: &Value| {
            let key = self.key(value).ok()?;
            server_keys.iter().position(|other| *other == key)
        };
        let mut arranged = Vec::with_capacity(in_patch.len() + server_only.len());
        let mut ours = in_patch.into_iter().peekable();
        for theirs in server_only {
            let limit = place(&theirs);
            while let Some(next) = ours.peek() {
                if let (Some(limit), Some(next)) = (limit, place(next))
                    && limit < next
                {
                    break;
                }
                arranged.extend(ours.next());
            }
            arranged.push(theirs);
        }
        arranged.extend(ours);
        Ok(arranged)
    }
}

/// The server's order as upstream sees it after a merge.
///
/// COMPAT: upstream merges in place, so that by the time it looks at the live order again, deleted
/// elements have gone from it and new ones stand in their places.
pub(super) fn order_after_merge(live: &[Value], patch: &[Value], merge_key: &str) -> Vec<Value> {
    let mut places = live.to_vec();
    let mut length = places.len();
    let same = |a: &Value, b: &Value| a.get(merge_key).is_some() && a.get(merge_key) == b.get(merge_key);
    let directive = |value: &Value, name: &str| value.get("$patch").and_then(Value::as_str) == Some(name);
    for gone in patch.iter().filter(|element| directive(element, "delete")) {
        while let Some(at) = places[..length].iter().position(|place| same(place, gone)) {
            places[at..length].rotate_left(1);
            length -= 1;
            // Where the last one moved away from, it is still to be seen.
            if length > 0 {
                places[length] = places[length - 1].clone();
            }
        }
    }
    if patch.iter().any(|element| directive(element, "replace")) {
        return places;
    }
    for new in patch.iter().filter(|element| element.get("$patch").is_none()) {
        if length < places.len() && !places[..length].iter().any(|place| same(place, new)) {
            places[length] = new.clone();
            length += 1;
        }
    }
    places
}

/// The patch must name its elements in the order of the directive, and none that the directive lacks.
pub(super) fn validate(patch: &[Value], wanted: &[Value], merge_key: &str) -> Result<()> {
    if patch.is_empty() || wanted.is_empty() {
        return Ok(());
    }
    let list = List {
        merge_key,
        maps: !merge_key.is_empty(),
    };
    let is_directive = |value: &&Value| value.get("$patch").is_some();
    let mut rest = wanted.iter();
    for element in patch.iter().filter(|element| !is_directive(element)) {
        let key = list.key(element)?;
        let mut found = false;
        for candidate in rest.by_ref() {
            if list.key(candidate)? == key {
                found = true;
                break;
            }
        }
        if !found {
            let print = |values: &[Value]| go_print(&Value::Array(values.to_vec()));
            return Err(internal(format!(
                "The order in patch list:\n{}\n doesn't match $setElementOrder list:\n{}\n",
                print(patch),
                print(wanted)
            )));
        }
    }
    Ok(())
}
