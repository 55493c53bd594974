//! Filling in defaults: small moves over a mutable object. What "unset" means depends on the Go type behind
//! the field: a pointer is unset when absent, a string also when empty, a number also when zero.

use serde_json::{Map, Value};

/// Runs `f` at every place of a dotted path; `name[]` goes into every element of a list.
pub fn each(value: &mut Value, path: &str, f: &mut dyn FnMut(&mut Value)) {
    let (head, rest) = path.split_once('.').map_or((path, None), |(h, r)| (h, Some(r)));
    let (name, elements) = head.strip_suffix("[]").map_or((head, false), |n| (n, true));
    let Some(next) = value.get_mut(name) else { return };
    let mut go = |v: &mut Value| match rest {
        Some(rest) => each(v, rest, f),
        None => f(v),
    };
    match next {
        Value::Null => {}
        Value::Array(list) if elements => list.iter_mut().for_each(&mut go),
        other if !elements => go(other),
        _ => {}
    }
}

/// The object at a field, made if it is absent. `None` if something else stands there.
pub fn object<'a>(value: &'a mut Value, name: &str) -> Option<&'a mut Value> {
    let map = value.as_object_mut()?;
    let entry = map.entry(name).or_insert(Value::Null);
    if entry.is_null() {
        *entry = Value::Object(Map::new());
    }
    entry.is_object().then_some(entry)
}

/// Runs `f` at a dotted path of objects, made where they are absent: upstream fills in defaults there too.
pub fn made(value: &mut Value, path: &str, f: &mut dyn FnMut(&mut Value)) {
    let mut at = value;
    for name in path.split('.') {
        let Some(next) = object(at, name) else { return };
        at = next;
    }
    f(at);
}

/// Sets a field that is absent or null.
pub fn pointer(value: &mut Value, name: &str, default: impl Into<Value>) {
    if let Some(map) = value.as_object_mut()
        && map.get(name).is_none_or(Value::is_null)
    {
        let default = default.into();
        if !default.is_null() {
            map.insert(name.to_owned(), default);
        }
    }
}

/// Sets a string field that is absent or empty.
pub fn string(value: &mut Value, name: &str, default: &str) {
    if let Some(map) = value.as_object_mut()
        && map
            .get(name)
            .is_none_or(|v| v.is_null() || v.as_str() == Some(""))
    {
        map.insert(name.to_owned(), default.into());
    }
}

/// Sets a number field that is absent or zero.
pub fn number(value: &mut Value, name: &str, default: i64) {
    if let Some(map) = value.as_object_mut()
        && map.get(name).is_none_or(|v| v.is_null() || v.as_i64() == Some(0))
    {
        map.insert(name.to_owned(), default.into());
    }
}

/// Writes a field whatever stood there; null removes it.
pub fn put(value: &mut Value, name: &str, new: Value) {
    if let Some(map) = value.as_object_mut() {
        if new.is_null() {
            map.remove(name);
        } else {
            map.insert(name.to_owned(), new);
        }
    }
}

/// Takes a field over from another object, absent included.
pub fn copy(to: &mut Value, from: &Value, name: &str) {
    put(to, name, from.get(name).cloned().unwrap_or(Value::Null));
}

/// The metadata as a map; made when absent or of the wrong type.
pub fn metadata_mut(object: &mut Value) -> &mut Map<String, Value> {
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    let metadata = &mut object["metadata"];
    if !metadata.is_object() {
        *metadata = Value::Object(Map::new());
    }
    metadata.as_object_mut().expect("made an object above")
}

/// Gives a field another name.
pub fn rename(map: &mut Map<String, Value>, from: &str, to: &str) {
    if let Some(value) = map.remove(from) {
        map.insert(to.to_string(), value);
    }
}

pub fn remove(value: &mut Value, name: &str) {
    put(value, name, Value::Null);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_reaches_every_element() {
        let mut v = json!({"a": [{"b": {"c": 1}}, {"b": {}}, {}]});
        each(&mut v, "a[].b", &mut |b| number(b, "c", 7));
        assert_eq!(v, json!({"a": [{"b": {"c": 1}}, {"b": {"c": 7}}, {}]}));
    }

    #[test]
    fn unset_depends_on_the_type() {
        let mut v = json!({"s": "", "n": 0, "p": 0});
        string(&mut v, "s", "x");
        number(&mut v, "n", 1);
        pointer(&mut v, "p", 1);
        pointer(&mut v, "q", true);
        assert_eq!(v, json!({"s": "x", "n": 1, "p": 0, "q": true}));
    }
}
