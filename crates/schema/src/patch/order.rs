//! The order of merged lists: what the patch names comes in the patch's order, what only the server has
//! keeps its place between, as far as both can be had.

use std::collections::{BTreeSet, HashMap, HashSet};

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

/// Where elements are by their keys, read as far as it was asked for. The list may grow meanwhile, but no element
/// changes its key. Lists are long and patches hostile: each element is looked at once.
pub(super) struct Index<'k> {
    merge_key: &'k str,
    found: HashMap<String, usize>,
    looked_at: usize,
}

impl<'k> Index<'k> {
    pub fn new(merge_key: &'k str) -> Index<'k> {
        Index {
            merge_key,
            found: HashMap::new(),
            looked_at: 0,
        }
    }

    /// Where the first element with this key is.
    pub fn position(&mut self, list: &[Value], key: &Value) -> Result<Option<usize>> {
        let wanted = key.to_string();
        if let Some(at) = self.found.get(&wanted) {
            return Ok(Some(*at));
        }
        while let Some(value) = list.get(self.looked_at) {
            let index = self.looked_at;
            let map = value
                .as_object()
                .ok_or_else(|| internal(format!("value for key {index} is not a map")))?;
            self.looked_at += 1;
            let Some(key) = map.get(self.merge_key) else {
                continue;
            };
            let key = key.to_string();
            let same = key == wanted;
            self.found.entry(key).or_insert(index);
            if same {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }
}

/// The first place of each value.
fn places(values: &[&Value]) -> HashMap<String, usize> {
    let mut places = HashMap::with_capacity(values.len());
    for (place, value) in values.iter().enumerate() {
        places.entry(value.to_string()).or_insert(place);
    }
    places
}

/// Without duplicates. COMPAT: the last element takes the place of a duplicate, as upstream does it.
pub(super) fn deduplicate(mut values: Vec<Value>) -> Vec<Value> {
    let mut texts: Vec<String> = values.iter().map(Value::to_string).collect();
    let mut places: HashMap<String, BTreeSet<usize>> = HashMap::new();
    for (at, text) in texts.iter().enumerate() {
        places.entry(text.clone()).or_default().insert(at);
    }
    let mut first = 0;
    while first < values.len() {
        while let Some(second) = places[&texts[first]].range(first + 1..).next().copied() {
            let last = values.len() - 1;
            let mut take = |text: &str, gone: usize, new: Option<usize>| {
                if let Some(places) = places.get_mut(text) {
                    places.remove(&gone);
                    places.extend(new);
                }
            };
            take(&texts[second], second, None);
            if second != last {
                take(&texts[last], last, Some(second));
            }
            values.swap_remove(second);
            texts.swap_remove(second);
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
        let mut index = Index::new(self.merge_key);
        let all = if self.maps {
            HashMap::new()
        } else {
            places(&by.iter().collect::<Vec<_>>())
        };
        for value in values {
            let found = if self.maps {
                index.position(by, self.key(&value)?)?.is_some()
            } else {
                all.contains_key(&value.to_string())
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
        let patch_keys = places(&self.keys(patch_order)?);
        let server_keys = places(&self.keys(server_order)?);
        let sort = |values: Vec<Value>, order: &HashMap<String, usize>| -> Result<Vec<Value>> {
            let mut places = Vec::with_capacity(values.len());
            for value in values {
                let key = self.key(&value)?;
                let place = order.get(&key.to_string()).copied().unwrap_or(usize::MAX);
                places.push((place, value));
            }
            places.sort_by_key(|(place, _)| *place);
            Ok(places.into_iter().map(|(_, value)| value).collect())
        };
        let in_patch = sort(in_patch, &patch_keys)?;
        let server_only = sort(server_only, &server_keys)?;
        let place = |value: &Value| {
            let key = self.key(value).ok()?;
            server_keys.get(&key.to_string()).copied()
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
    let directive = |value: &Value, name: &str| value.get("$patch").and_then(Value::as_str) == Some(name);
    let key = |value: &Value| value.get(merge_key).map(Value::to_string);
    let mut by_key: HashMap<String, Vec<usize>> = HashMap::new();
    for (at, value) in live.iter().enumerate() {
        if let Some(key) = key(value) {
            by_key.entry(key).or_default().push(at);
        }
    }
    let mut there = vec![true; live.len()];
    let (mut length, mut last) = (live.len(), live.len());
    // Behind what is left: where the last one moved away from, it is still to be seen.
    let mut behind: Vec<&Value> = Vec::new();
    for gone in patch.iter().filter(|element| directive(element, "delete")) {
        let gone = key(gone).and_then(|key| by_key.remove(&key));
        for at in gone.into_iter().flatten() {
            there[at] = false;
            length -= 1;
            while last > 0 && !there[last - 1] {
                last -= 1;
            }
            behind.push(if last > 0 { &live[last - 1] } else { &live[at] });
        }
    }
    let left = live.iter().zip(&there).filter(|(_, there)| **there);
    let left = left.map(|(value, _)| value).chain(behind.into_iter().rev());
    let mut places: Vec<Value> = left.cloned().collect();
    if patch.iter().any(|element| directive(element, "replace")) {
        return places;
    }
    let mut present: HashSet<String> = places[..length].iter().filter_map(key).collect();
    for new in patch.iter().filter(|element| element.get("$patch").is_none()) {
        let key = key(new);
        if length < places.len() && key.as_ref().is_none_or(|key| !present.contains(key)) {
            places[length] = new.clone();
            length += 1;
            present.extend(key);
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// All lists of up to `length` of the choices.
    fn lists(choices: &[Value], length: usize) -> Vec<Vec<Value>> {
        let mut all = vec![Vec::new()];
        let mut from = 0;
        for _ in 0..length {
            let end = all.len();
            for at in from..end {
                for choice in choices {
                    let mut longer = all[at].clone();
                    longer.push(choice.clone());
                    all.push(longer);
                }
            }
            from = end;
        }
        all
    }

    #[test]
    fn duplicates_go_as_if_all_were_compared() {
        for list in lists(&[json!(1), json!("1"), json!("b")], 6) {
            let mut expected = list.clone();
            let mut first = 0;
            while first < expected.len() {
                let mut second = first + 1;
                while second < expected.len() {
                    if expected[first] == expected[second] {
                        expected.swap_remove(second);
                    } else {
                        second += 1;
                    }
                }
                first += 1;
            }
            assert_eq!(deduplicate(list.clone()), expected, "{list:?}");
        }
    }

    /// Step by step, in place, as upstream does it.
    fn in_place(live: &[Value], patch: &[Value]) -> Vec<Value> {
        let mut places = live.to_vec();
        let mut length = places.len();
        let same = |a: &Value, b: &Value| a.get("k").is_some() && a.get("k") == b.get("k");
        for gone in patch.iter().filter(|element| element.get("$patch").is_some()) {
            while let Some(at) = places[..length].iter().position(|place| same(place, gone)) {
                places[at..length].rotate_left(1);
                length -= 1;
                if length > 0 {
                    places[length] = places[length - 1].clone();
                }
            }
        }
        for new in patch.iter().filter(|element| element.get("$patch").is_none()) {
            if length < places.len() && !places[..length].iter().any(|place| same(place, new)) {
                places[length] = new.clone();
                length += 1;
            }
        }
        places
    }

    #[test]
    fn the_order_after_a_merge_is_that_of_merging_in_place() {
        let live = lists(
            &[
                json!({"k": 1, "v": 1}),
                json!({"k": 2}),
                json!({"k": 3}),
                json!({}),
            ],
            4,
        );
        let patches = lists(
            &[
                json!({"k": 1, "$patch": "delete"}),
                json!({"k": 2, "$patch": "delete"}),
                json!({"k": 1, "n": 1}),
                json!({"k": 4}),
                json!({"n": 1}),
            ],
            3,
        );
        for live in &live {
            for patch in &patches {
                assert_eq!(
                    order_after_merge(live, patch, "k"),
                    in_place(live, patch),
                    "{live:?} {patch:?}"
                );
            }
        }
    }

    #[test]
    fn an_index_is_what_looking_finds() {
        let mut list = vec![json!({"k": "a"}), json!({}), json!({"k": "b"}), json!({"k": "a"})];
        let mut index = Index::new("k");
        let mut check = |list: &[Value], key: &str, expected: Option<usize>| {
            assert_eq!(index.position(list, &json!(key)).ok(), Some(expected), "{key}");
        };
        check(&list, "b", Some(2));
        check(&list, "a", Some(0));
        check(&list, "c", None);
        list.push(json!({"k": "c"}));
        check(&list, "c", Some(4));
        list.push(json!(1));
        assert!(index.position(&list, &json!("d")).is_err());
    }
}
