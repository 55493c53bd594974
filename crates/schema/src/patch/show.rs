//! A patched document as upstream's messages quote it. Its library opens only what a patch touches, and writes that
//! with sorted keys; all else stays as the object's type has it, in the order of its declaration.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::declared::{Mark, write};
use crate::types::{Schema, Shape, TypeId};

/// The text of `patched`, which a JSON patch or a merge patch made of `current`.
pub fn show_patched(schema: &Schema, id: TypeId, current: &Value, patch: &Value, patched: &Value) -> String {
    let mark = match patch {
        Value::Array(operations) => of_operations(operations),
        patch => of_merge(Some(current), patch),
    };
    let mut out = Vec::with_capacity(1024);
    write(schema, Some(&Shape::Struct(id)), patched, Some(&mark), &mut out);
    String::from_utf8(out).unwrap_or_default()
}

fn of_merge(current: Option<&Value>, patch: &Value) -> Mark {
    match (current, patch) {
        (Some(Value::Object(current)), Value::Object(patch)) => Mark::Opened(
            patch
                .iter()
                .map(|(key, patch)| (key.clone(), of_merge(current.get(key), patch)))
                .collect(),
        ),
        _ => Mark::Foreign,
    }
}

fn of_operations(operations: &[Value]) -> Mark {
    let mut root = BTreeMap::new();
    for operation in operations {
        let sets = matches!(operation["op"].as_str(), Some("add" | "replace"));
        for (key, sets) in [("path", sets), ("from", false)] {
            let Some((parents, last)) = operation[key].as_str().and_then(|path| path.rsplit_once('/')) else {
                continue;
            };
            let unescape = |part: &str| part.replace("~1", "/").replace("~0", "~");
            let opened = open(&mut root, &mut parents.split('/').skip(1).map(unescape));
            if let (Some(children), true) = (opened, sets) {
                children.insert(unescape(last), Mark::Foreign);
            }
        }
    }
    Mark::Opened(root)
}

/// Opens the way to a place, unless it leads through what a patch brought.
fn open<'m>(
    at: &'m mut BTreeMap<String, Mark>,
    way: &mut dyn Iterator<Item = String>,
) -> Option<&'m mut BTreeMap<String, Mark>> {
    let Some(part) = way.next() else { return Some(at) };
    match at.entry(part).or_insert_with(|| Mark::Opened(BTreeMap::new())) {
        Mark::Opened(children) => open(children, way),
        Mark::Foreign => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const TABLE: &str = "P x/v1 io.k8s.x.v1
T Inner
 z s 1 o
 a s 2 o
T Outer gvk=x/v1
 name s 1 o
 inner @x/v1.Inner 2 o
 also @x/v1.Inner 3 o
 items []@x/v1.Inner 4 o
 by {}s 5 o
";

    fn check(patch: Value, patched: Value, expected: &str) {
        let schema = Schema::parse(TABLE).expect("a table");
        let id = schema.by_name("io.k8s.x.v1.Outer").expect("a type");
        let current = json!({"name": "n", "inner": {"z": "1", "a": "2"}, "also": {"z": "3", "a": "<"},
            "items": [{"z": "1", "a": "2"}], "by": {"b": "1", "a": "2"}});
        assert_eq!(show_patched(&schema, id, &current, &patch, &patched), expected);
    }

    #[test]
    fn what_was_touched_is_sorted() {
        let patched = json!({"name": "n", "inner": {"z": 5, "a": "2"}, "also": {"z": "3", "a": "<"},
            "items": [{"z": "1", "a": "2"}], "by": {"b": "1", "a": "2"}});
        let expected = r#"{"also":{"z":"3","a":"\u003c"},"by":{"a":"2","b":"1"},"inner":{"a":"2","z":5},"items":[{"z":"1","a":"2"}],"name":"n"}"#;
        check(json!({"inner": {"z": 5}}), patched.clone(), expected);
        check(
            json!([{"op": "replace", "path": "/inner/z", "value": 5}]),
            patched.clone(),
            expected,
        );
        let expected = r#"{"also":{"z":"3","a":"\u003c"},"by":{"a":"2","b":"1"},"inner":{"a":"2","z":5},"items":[{"a":"2","z":"1"}],"name":"n"}"#;
        check(
            json!([{"op": "remove", "path": "/items/0/q"}, {"op": "add", "path": "/inner", "value": {"z": 5, "a": "2"}}]),
            patched,
            expected,
        );
    }
}
