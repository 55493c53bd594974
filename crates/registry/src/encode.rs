//! The JSON form of an object, as the cache keeps it: in the storage version, without `resourceVersion`,
//! and always opening with `{"kind":…,"apiVersion":…,`. Because the opening is known, a list can cut it
//! off (items of a list carry no kind, as upstream) without decoding anything.

use bytes::Bytes;
use serde_json::{Map, Value};
use skiff_meta::Status;

use crate::object;

/// The fixed first bytes of every stored object of one kind.
pub fn opening(api_version: &str, kind: &str) -> String {
    format!("{{\"kind\":\"{kind}\",\"apiVersion\":\"{api_version}\",")
}

/// Encodes an object for the store. `opening` is that of its kind.
pub fn stored(object: &Value, opening: &str) -> Result<Bytes, Status> {
    encode(object, opening, false)
}

/// Encodes an object for an answer: the same form with the resourceVersion it has.
pub fn wire(object: &Value, opening: &str) -> Result<Bytes, Status> {
    encode(object, opening, true)
}

fn encode(object: &Value, opening: &str, with_version: bool) -> Result<Bytes, Status> {
    let Some(map) = object.as_object() else {
        return Err(Status::internal("an object is not a JSON object"));
    };
    let mut out = Vec::with_capacity(1024);
    out.extend_from_slice(opening.as_bytes());
    let mut first = true;
    for (key, value) in map {
        if key == "kind" || key == "apiVersion" {
            continue;
        }
        if !first {
            out.push(b',');
        }
        first = false;
        write(&mut out, key)?;
        out.push(b':');
        match value.as_object() {
            Some(metadata) if key == "metadata" => write_metadata(&mut out, metadata, with_version)?,
            _ => write(&mut out, value)?,
        }
    }
    if first {
        return Err(Status::internal("an object has no metadata"));
    }
    out.push(b'}');
    Ok(Bytes::from(out))
}

fn write_metadata(
    out: &mut Vec<u8>,
    metadata: &Map<String, Value>,
    with_version: bool,
) -> Result<(), Status> {
    out.push(b'{');
    let mut first = true;
    for (key, value) in metadata {
        if key == "resourceVersion" && !with_version {
            continue;
        }
        if !std::mem::replace(&mut first, false) {
            out.push(b',');
        }
        write(out, key)?;
        out.push(b':');
        match value {
            Value::Array(managers) if key == "managedFields" => write_managers(out, managers)?,
            value => write(out, value)?,
        }
    }
    out.push(b'}');
    Ok(())
}

/// The fields of managers have an order of their own.
fn write_managers(out: &mut Vec<u8>, managers: &[Value]) -> Result<(), Status> {
    out.push(b'[');
    for (at, manager) in managers.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        let Value::Object(manager) = manager else {
            write(out, manager)?;
            continue;
        };
        out.push(b'{');
        for (at, (key, value)) in manager.iter().enumerate() {
            if at > 0 {
                out.push(b',');
            }
            write(out, key)?;
            out.push(b':');
            if key == "fieldsV1" {
                skiff_schema::apply::write_fields(out, value).map_err(Status::internal)?;
            } else {
                write(out, value)?;
            }
        }
        out.push(b'}');
    }
    out.push(b']');
    Ok(())
}

fn write<T: serde::Serialize + ?Sized>(out: &mut Vec<u8>, value: &T) -> Result<(), Status> {
    serde_json::to_writer(out, value)
        .map_err(|error| Status::internal(format_args!("cannot encode an object: {error}")))
}

/// Decodes what the store or the cache holds.
pub fn decode(bytes: &[u8]) -> Result<Value, Status> {
    serde_json::from_slice(bytes)
        .map_err(|error| Status::internal(format_args!("a stored object cannot be read: {error}")))
}

/// Decodes a value that has no resourceVersion and sets its revision.
pub fn decode_at(bytes: &[u8], revision: i64) -> Result<Value, Status> {
    let mut value = decode(bytes)?;
    object::set(&mut value, "resourceVersion", revision.to_string());
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_opening_comes_first_and_the_version_stays_out() {
        let object = json!({"apiVersion": "v1", "data": {"a": "b"}, "kind": "ConfigMap",
            "metadata": {"name": "x", "resourceVersion": "7", "uid": "u"}});
        let bytes = stored(&object, &opening("v1", "ConfigMap")).expect("encodes");
        assert_eq!(
            std::str::from_utf8(&bytes).expect("utf-8"),
            r#"{"kind":"ConfigMap","apiVersion":"v1","data":{"a":"b"},"metadata":{"name":"x","uid":"u"}}"#
        );
        let managed = json!({"kind": "A", "apiVersion": "v1", "metadata": {"managedFields": [{"fieldsV1": {"v:10": {}, "v:9": {}}, "manager": "m"}]}});
        let bytes = stored(&managed, &opening("v1", "A")).expect("encodes");
        assert!(bytes.ends_with(br#""managedFields":[{"fieldsV1":{"v:9":{},"v:10":{}},"manager":"m"}]}}"#));
        let bytes = wire(&object, &opening("v1", "ConfigMap")).expect("encodes");
        assert!(
            std::str::from_utf8(&bytes)
                .expect("utf-8")
                .contains(r#""resourceVersion":"7""#)
        );
    }
}
