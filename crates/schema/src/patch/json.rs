//! JSON patch (RFC 6902), with the leniencies and the messages of upstream's library: negative indices
//! count from the end, `replace` of a missing key adds it, and an unset value is null.

use serde_json::Value;

use super::PatchError;
use crate::decode::{MAX_DEPTH, Node, depth, duplicates_below, go_quote};

pub const MAX_JSON_PATCH_OPERATIONS: usize = 10_000;

/// What `copy` operations may make in all; without a bound each one could double the document.
const MAX_COPIED_BYTES: usize = 3 << 20;

/// Upstream stops counting here.
const MAX_STRICT_ERRORS: usize = 100;

const MISSING: &str = "missing value";

pub fn json_patch(current: &Value, patch: &Value) -> Result<Value, PatchError> {
    let Value::Array(operations) = patch else {
        let text = "json: cannot unmarshal object into Go value of type jsonpatch.Patch";
        return Err(PatchError::BadRequest(text.to_string()));
    };
    if operations.len() > MAX_JSON_PATCH_OPERATIONS {
        return Err(PatchError::TooLarge(format!(
            "The allowed maximum operations in a JSON patch is {MAX_JSON_PATCH_OPERATIONS}, got {}",
            operations.len()
        )));
    }
    if let Some(other) = operations
        .iter()
        .find(|operation| !operation.is_object() && !operation.is_null())
    {
        let found = match other {
            Value::Array(_) => "array",
            Value::String(_) => "string",
            Value::Number(_) => "number",
            _ => "bool",
        };
        let text = format!("json: cannot unmarshal {found} into Go value of type jsonpatch.Operation");
        return Err(PatchError::BadRequest(text));
    }
    let mut document = current.clone();
    let mut copied = 0;
    for operation in operations {
        apply(&mut document, operation, &mut copied).map_err(PatchError::Unprocessable)?;
    }
    Ok(document)
}

fn apply(document: &mut Value, operation: &Value, copied: &mut usize) -> Result<(), String> {
    let kind = operation["op"].as_str().unwrap_or("unknown");
    let text = |key: &str| operation[key].as_str();
    let value = || operation["value"].clone();
    match kind {
        "add" => {
            let path = text("path").ok_or(format!("add operation failed to decode path: {MISSING}"))?;
            let (container, key) = find(document, path).ok_or(format!(
                "add operation does not apply: doc is missing path: \"{path}\": {MISSING}"
            ))?;
            let value = value();
            fits(path, &value)
                .and_then(|()| add(container, &key, value))
                .map_err(|e| format!("error in add for path: '{path}': {e}"))
        }
        "remove" => {
            let path = text("path").ok_or(format!("remove operation failed to decode path: {MISSING}"))?;
            let (container, key) = find(document, path).ok_or(format!(
                "remove operation does not apply: doc is missing path: \"{path}\": {MISSING}"
            ))?;
            remove(container, &key)
                .map(drop)
                .map_err(|e| format!("error in remove for path: '{path}': {e}"))
        }
        "replace" => {
            let path = text("path").ok_or(format!(
                "replace operation failed to decode path: operation missing path field: {MISSING}"
            ))?;
            if path.is_empty() {
                let value = value();
                if !value.is_object() && !value.is_array() {
                    return Err("replace operation value must be object or array: %!w(<nil>)".to_string());
                }
                *document = value;
                return Ok(());
            }
            let (container, key) = find(document, path).ok_or(format!(
                "replace operation does not apply: doc is missing path: {path}: {MISSING}"
            ))?;
            fits(path, &operation["value"])
                .map_err(|e| format!("error in replace for path: '{path}': {e}"))?;
            match container {
                Value::Object(map) => drop(map.insert(key, value())),
                Value::Array(values) => {
                    let index = index(&key, values.len()).map_err(|_| {
                        format!("replace operation does not apply: doc is missing key: {path}: {MISSING}")
                    })?;
                    values[index] = value();
                }
                _ => {}
            }
            Ok(())
        }
        "move" => {
            let from = text("from").ok_or(format!(
                "move operation failed to decode from: operation, missing from field: {MISSING}"
            ))?;
            let (container, key) = find(document, from).ok_or(format!(
                "move operation does not apply: doc is missing from path: {from}: {MISSING}"
            ))?;
            let value =
                remove(container, &key).map_err(|e| format!("error in move for path: '{key}': {e}"))?;
            let path = text("path").ok_or(format!(
                "move operation failed to decode path: operation missing path field: {MISSING}"
            ))?;
            let (container, key) = find(document, path).ok_or(format!(
                "move operation does not apply: doc is missing destination path: {path}: {MISSING}"
            ))?;
            fits(path, &value)
                .and_then(|()| add(container, &key, value))
                .map_err(|e| format!("error in move for path: '{path}': {e}"))
        }
        "copy" => {
            let from = text("from").ok_or(format!(
                "copy operation failed to decode from: operation, missing from field: {MISSING}"
            ))?;
            let (container, key) = find(document, from).ok_or(format!(
                "copy operation does not apply: doc is missing from path: {from}: {MISSING}"
            ))?;
            let value = get(container, &key).map_err(|e| format!("error in copy for from: '{from}': {e}"))?;
            let value = value.cloned().unwrap_or(Value::Null);
            let path = text("path").ok_or(format!("copy operation failed to decode path: {MISSING}"))?;
            let (container, key) = find(document, path).ok_or(format!(
                "copy operation does not apply: doc is missing destination path: {path}: {MISSING}"
            ))?;
            *copied += value.to_string().len();
            if *copied > MAX_COPIED_BYTES {
                return Err(format!(
                    "Unable to complete the copy, the accumulated size increase of copy is {copied}, exceeding the limit {MAX_COPIED_BYTES}"
                ));
            }
            fits(path, &value)
                .and_then(|()| add(container, &key, value))
                .map_err(|e| format!("error while adding value during copy: {e}"))
        }
        "test" => {
            let path = text("path").ok_or(format!(
                "test operation failed to decode path: operation missing path field: {MISSING}"
            ))?;
            let failed = Err(format!("testing value {path} failed: test failed"));
            if path.is_empty() {
                return if *document == operation["value"] {
                    Ok(())
                } else {
                    failed
                };
            }
            let (container, key) = find(document, path).ok_or(format!(
                "test operation does not apply: is missing path: {path}: {MISSING}"
            ))?;
            let found = get(container, &key).map_err(|e| format!("error in test for path: '{path}': {e}"))?;
            if found.unwrap_or(&Value::Null) == &operation["value"] {
                Ok(())
            } else {
                failed
            }
        }
        other => Err(format!("Unexpected kind: {other}")),
    }
}

/// Operations may put values into each other, one deeper than the last: what every walk over the outcome recurses
/// into stays as deep as what could have been sent.
fn fits(path: &str, value: &Value) -> Result<(), String> {
    if path.matches('/').count() + depth(value) > MAX_DEPTH {
        return Err("exceeded max depth".to_string());
    }
    Ok(())
}

/// The container that a path ends in, and the last key.
fn find<'a>(document: &'a mut Value, path: &str) -> Option<(&'a mut Value, String)> {
    let (parents, key) = path.rsplit_once('/')?;
    let mut container = document;
    // What stands before the first slash is ignored.
    for part in parents.split('/').skip(1) {
        let part = unescape(part);
        container = match container {
            Value::Object(map) => map.get_mut(&part)?,
            Value::Array(values) => {
                let index = index(&part, values.len()).ok()?;
                &mut values[index]
            }
            _ => return None,
        };
    }
    matches!(container, Value::Object(_) | Value::Array(_)).then(|| (container, unescape(key)))
}

fn unescape(key: &str) -> String {
    if !key.contains('~') {
        return key.to_string();
    }
    let mut out = String::with_capacity(key.len());
    let mut rest = key;
    while let Some(at) = rest.find('~') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let (plain, taken) = match rest.as_bytes().get(1) {
            Some(b'1') => ('/', 2),
            Some(b'0') => ('~', 2),
            _ => ('~', 1),
        };
        out.push(plain);
        rest = &rest[taken..];
    }
    out.push_str(rest);
    out
}

fn parse_index(key: &str) -> Result<i64, String> {
    key.parse()
        .map_err(|_| format!("strconv.Atoi: parsing {}: invalid syntax", go_quote(key)))
}

/// An index into a list of this length.
fn index(key: &str, length: usize) -> Result<usize, String> {
    let asked = parse_index(key)?;
    let at = if asked < 0 { asked + length as i64 } else { asked };
    usize::try_from(at).ok().filter(|at| *at < length).ok_or(format!(
        "Unable to access invalid index: {asked}: invalid index referenced"
    ))
}

fn get<'a>(container: &'a Value, key: &str) -> Result<Option<&'a Value>, String> {
    match container {
        Value::Object(map) => Ok(map.get(key)),
        Value::Array(values) => Ok(Some(&values[index(key, values.len())?])),
        _ => Ok(None),
    }
}

fn add(container: &mut Value, key: &str, value: Value) -> Result<(), String> {
    match container {
        Value::Object(map) => drop(map.insert(key.to_string(), value)),
        Value::Array(values) if key == "-" => values.push(value),
        Value::Array(values) => {
            parse_index(key).map_err(|e| format!("value was not a proper array index: '{key}': {e}"))?;
            // One more place than there are elements: the end.
            let at = index(key, values.len() + 1)?;
            values.insert(at, value);
        }
        _ => {}
    }
    Ok(())
}

fn remove(container: &mut Value, key: &str) -> Result<Value, String> {
    match container {
        Value::Object(map) => map
            .remove(key)
            .ok_or(format!("Unable to remove nonexistent key: {key}: {MISSING}")),
        Value::Array(values) => {
            let at = index(key, values.len())?;
            Ok(values.remove(at))
        }
        _ => Ok(Value::Null),
    }
}

/// Findings in the operations themselves, and the refusal of what is no operation at all.
pub(super) fn strict_errors(node: &Node) -> Result<Vec<String>, String> {
    let Node::Array(operations) = node else {
        return Ok(Vec::new());
    };
    let mut errors = Vec::new();
    for (at, operation) in operations.iter().enumerate() {
        let entries = match operation {
            Node::Object(entries) => entries,
            Node::Null => continue,
            other => {
                let found = match other {
                    Node::Array(_) => "array",
                    Node::String(_) => "string",
                    Node::Number(_) => "number",
                    _ => "bool",
                };
                return Err(format!(
                    "json: cannot unmarshal {found} into Go value of type handlers.jsonPatchOp"
                ));
            }
        };
        let mut seen: Vec<&str> = Vec::new();
        for (key, value) in entries {
            let found = match value {
                Node::Bool(_) => "bool",
                Node::Number(_) => "number",
                Node::Array(_) => "array",
                Node::Object(_) => "object",
                Node::Null | Node::String(_) => "",
            };
            if !found.is_empty() && ["op", "path", "from"].contains(&key.as_str()) {
                return Err(format!(
                    "json: cannot unmarshal {found} into Go struct field jsonPatchOp.{key} of type string"
                ));
            }
            if errors.len() >= MAX_STRICT_ERRORS {
                return Ok(errors);
            }
            let path = go_quote(&format!("[{at}].{key}"));
            if !["op", "path", "from", "value"].contains(&key.as_str()) {
                errors.push(format!("json patch unknown field {path}"));
            } else if seen.contains(&key.as_str()) {
                errors.push(format!("json patch duplicate field {path}"));
            } else {
                seen.push(key);
            }
            if key == "value" {
                let path = format!("[{at}].value");
                let found = duplicates_below(path, value);
                errors.extend(found.into_iter().map(|error| format!("json patch {error}")));
            }
        }
    }
    for operation in operations {
        errors.extend(put_twice(operation));
    }
    errors.truncate(MAX_STRICT_ERRORS);
    Ok(errors)
}

/// What a value that is added has twice, the patched object has twice.
fn put_twice(operation: &Node) -> Vec<String> {
    let text = |key: &str| match operation.get(key) {
        Some(Node::String(text)) => text.as_str(),
        _ => "",
    };
    let (Some(value), "add" | "replace") = (operation.get("value"), text("op")) else {
        return Vec::new();
    };
    let mut path = String::new();
    for part in text("path").split('/').skip(1) {
        match part.parse::<usize>() {
            Ok(index) => path.push_str(&format!("[{index}]")),
            Err(_) if path.is_empty() => path.push_str(&unescape(part)),
            Err(_) => path.push_str(&format!(".{}", unescape(part))),
        }
    }
    duplicates_below(path, value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(patch: Value, expected: Result<Value, &str>) {
        let current = json!({"a":{"b":1},"l":[1,2,3],"x/y":"slash"});
        match (json_patch(&current, &patch), expected) {
            (Ok(value), Ok(expected)) => assert_eq!(value, expected, "{patch}"),
            (Err(error), Err(expected)) => assert_eq!(error.to_string(), expected, "{patch}"),
            (got, expected) => panic!("{patch}: {got:?}, not {expected:?}"),
        }
    }

    #[test]
    fn operations() {
        let with = |key: &str, value: Value| {
            let mut document = json!({"a":{"b":1},"l":[1,2,3],"x/y":"slash"});
            document[key] = value;
            Ok(document)
        };
        check(
            json!([{"op":"add","path":"/a/c","value":2}]),
            with("a", json!({"b":1,"c":2})),
        );
        check(
            json!([{"op":"add","path":"/l/-","value":4}]),
            with("l", json!([1, 2, 3, 4])),
        );
        check(
            json!([{"op":"add","path":"/l/1","value":9}]),
            with("l", json!([1, 9, 2, 3])),
        );
        check(
            json!([{"op":"add","path":"/l/3","value":9}]),
            with("l", json!([1, 2, 3, 9])),
        );
        check(json!([{"op":"remove","path":"/l/-1"}]), with("l", json!([1, 2])));
        check(
            json!([{"op":"replace","path":"/x~1y","value":1}]),
            with("x/y", json!(1)),
        );
        check(
            json!([{"op":"replace","path":"/a/new","value":1}]),
            with("a", json!({"b":1,"new":1})),
        );
        check(
            json!([{"op":"move","from":"/a/b","path":"/a/c"}]),
            with("a", json!({"c":1})),
        );
        check(
            json!([{"op":"copy","from":"/a/b","path":"/l/0"}]),
            with("l", json!([1, 1, 2, 3])),
        );
        check(
            json!([{"op":"test","path":"/a/b","value":1}]),
            with("a", json!({"b":1})),
        );
    }

    #[test]
    fn refusals_are_upstreams() {
        check(
            json!([{"op":"test","path":"/a/b","value":2}]),
            Err("testing value /a/b failed: test failed"),
        );
        check(
            json!([{"op":"remove","path":"/nope"}]),
            Err("error in remove for path: '/nope': Unable to remove nonexistent key: nope: missing value"),
        );
        check(
            json!([{"op":"add","path":"/p/q","value":1}]),
            Err("add operation does not apply: doc is missing path: \"/p/q\": missing value"),
        );
        check(
            json!([{"op":"add","path":"/l/9","value":1}]),
            Err("error in add for path: '/l/9': Unable to access invalid index: 9: invalid index referenced"),
        );
        check(
            json!([{"op":"replace","path":"/l/9","value":1}]),
            Err("replace operation does not apply: doc is missing key: /l/9: missing value"),
        );
        check(json!([{"op":"frob","path":"/a"}]), Err("Unexpected kind: frob"));
        check(
            json!([{"op":"add","value":1}]),
            Err("add operation failed to decode path: missing value"),
        );
        let many = vec![json!({"op":"test","path":"/a/b","value":1}); 10_001];
        check(
            Value::Array(many),
            Err("The allowed maximum operations in a JSON patch is 10000, got 10001"),
        );
    }

    #[test]
    fn strict_readers_find_what_is_there_twice() {
        let check = |patch: &str, expected: &[&str]| {
            let node = crate::decode::parse_json(patch.as_bytes()).expect("JSON");
            assert_eq!(strict_errors(&node).expect("operations"), expected, "{patch}");
        };
        check(r#"[{"op":"add","path":"/a","value":{"b":1}}]"#, &[]);
        check(
            r#"[{"op":"test","op":"add","path":"/a","x":1}]"#,
            &[
                r#"json patch duplicate field "[0].op""#,
                r#"json patch unknown field "[0].x""#,
            ],
        );
        check(
            r#"[{"op":"add","path":"/a/0/b~1c","value":{"d":[{"e":1,"e":2}]}}]"#,
            &[
                r#"json patch duplicate field "[0].value.d[0].e""#,
                r#"duplicate field "a[0].b/c.d[0].e""#,
            ],
        );
        check(
            r#"[{"op":"test","path":"/a","value":{"e":1,"e":2}}]"#,
            &[r#"json patch duplicate field "[0].value.e""#],
        );
    }

    #[test]
    fn copies_stay_bounded() {
        let twice = |n: usize| {
            let grow = [
                json!({"op":"copy","from":"/l","path":"/a/l"}),
                json!({"op":"copy","from":"/a","path":"/l/-"}),
            ];
            Value::Array(grow.iter().cycle().take(2 * n).cloned().collect())
        };
        assert!(json_patch(&json!({"a":{},"l":[1]}), &twice(4)).is_ok());
        let error = json_patch(&json!({"a":{},"l":[1]}), &twice(5000)).expect_err("too much");
        let text = error.to_string();
        assert!(
            text.starts_with("Unable to complete the copy, the accumulated size increase of copy is "),
            "{text}"
        );
        assert!(text.ends_with(", exceeding the limit 3145728"), "{text}");
    }

    #[test]
    fn nothing_gets_deeper_than_a_body_may_be() {
        // Each copy goes to the end of the last one: the depth doubles.
        let doubling: Vec<Value> = (0..18)
            .map(|n| json!({"op":"copy","from":"/a","path":"/a".repeat((1 << n) + 1)}))
            .collect();
        let error = json_patch(&json!({"a":{}}), &Value::Array(doubling)).expect_err("too deep");
        assert_eq!(
            error.to_string(),
            "error while adding value during copy: exceeded max depth"
        );
        let moving: Vec<Value> = (0..1000)
            .flat_map(|_| {
                [
                    json!({"op":"move","from":"/a","path":"/b/a"}),
                    json!({"op":"move","from":"/b","path":"/a"}),
                    json!({"op":"add","path":"/b","value":{}}),
                ]
            })
            .collect();
        let error = json_patch(&json!({"a":{},"b":{}}), &Value::Array(moving)).expect_err("too deep");
        assert_eq!(
            error.to_string(),
            "error in move for path: '/b/a': exceeded max depth"
        );
    }
}
