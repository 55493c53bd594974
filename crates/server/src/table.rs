//! The Table form of objects, which `kubectl get` prints, and the metadata-only form.

use bytes::Bytes;
use serde_json::{Map, Value, json};
use skiff_meta::{Status, field};
use skiff_registry::{Resource, object};

use crate::query::Query;

/// How much of each object a row carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IncludeObject {
    None,
    Metadata,
    Object,
}

impl IncludeObject {
    pub fn read(query: &Query) -> Result<IncludeObject, Status> {
        match query.text("includeObject") {
            "" | "Metadata" => Ok(IncludeObject::Metadata),
            "None" => Ok(IncludeObject::None),
            "Object" => Ok(IncludeObject::Object),
            other => {
                let path = field::Path::new("includeObject");
                let error =
                    field::Error::invalid(&path, other, "must be 'Metadata', 'Object', 'None', or empty");
                Err(Status::bad_request(format!(
                    "Unable to convert to Table as requested: {error}"
                )))
            }
        }
    }
}

/// One row. `stored` is in the stored version, or as someone else has converted it.
pub fn row(resource: &Resource, stored: &Value, version: &str, include: IncludeObject, now: i64) -> Value {
    let cells = resource.strategy.row(stored, now);
    let object = match include {
        IncludeObject::None => Value::Null,
        IncludeObject::Metadata => partial(
            stored,
            &format!("meta.k8s.io/{version}"),
            resource.served_annotation,
        ),
        IncludeObject::Object => {
            let mut value = stored.clone();
            resource.from_stored(&mut value);
            value
        }
    };
    json!({"cells": cells, "object": object})
}

pub fn of_object(resource: &Resource, stored: &Value, version: &str, include: IncludeObject) -> Value {
    let now = jiff::Timestamp::now().as_second();
    let metadata = match object::resource_version(stored) {
        "" => json!({}),
        version => json!({"resourceVersion": version}),
    };
    table(
        version,
        metadata,
        resource.strategy.columns(),
        vec![row(resource, stored, version, include, now)],
    )
}

pub fn of_list(resource: &Resource, version: &str, metadata: Value, rows: Vec<Value>) -> Value {
    let none = resource.strategy.wire().null_rows && rows.is_empty();
    let mut table = table(version, metadata, resource.strategy.columns(), rows);
    if none {
        table["rows"] = Value::Null;
    }
    table
}

pub fn table(version: &str, metadata: Value, columns: Value, rows: Vec<Value>) -> Value {
    json!({"kind": "Table", "apiVersion": format!("meta.k8s.io/{version}"),
        "metadata": metadata, "columnDefinitions": columns, "rows": rows})
}

/// The metadata alone, of an object that stays encoded, between what goes before and after it.
pub fn partial_bytes(before: &str, metadata: &[u8], version: &str, after: &str) -> Bytes {
    let opening = format!(
        "{{\"kind\":\"PartialObjectMetadata\",\"apiVersion\":\"meta.k8s.io/{version}\",\"metadata\":"
    );
    let room = before.len() + opening.len() + metadata.len() + 1 + after.len();
    let mut out = Vec::with_capacity(room);
    for part in [
        before.as_bytes(),
        opening.as_bytes(),
        metadata,
        b"}",
        after.as_bytes(),
    ] {
        out.extend_from_slice(part);
    }
    Bytes::from(out)
}

/// The object's metadata alone.
pub fn partial(stored: &Value, api_version: &str, hidden_annotation: Option<&str>) -> Value {
    let mut out = Map::new();
    out.insert("kind".into(), json!("PartialObjectMetadata"));
    out.insert("apiVersion".into(), json!(api_version));
    let mut metadata = stored.get("metadata").cloned().unwrap_or_else(|| json!({}));
    // COMPAT: upstream adds such an annotation when it turns a whole object into its served version, and only then.
    if let Some(hidden) = hidden_annotation
        && let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut)
        && annotations.remove(hidden).is_some()
        && annotations.is_empty()
        && let Some(metadata) = metadata.as_object_mut()
    {
        metadata.remove("annotations");
    }
    out.insert("metadata".into(), metadata);
    Value::Object(out)
}
