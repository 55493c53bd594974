//! Answers in protobuf: objects, lists, events and documents that the type tables know. What they do not
//! know has no protobuf form and is refused with 406.

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};
use skiff_api::facts;
use skiff_meta::{GroupVersion, Status};
use skiff_registry::{ListResult, Resource, encode};
use skiff_schema::TypeId;
use skiff_schema::protobuf::{self, Header, ProtobufError};

use crate::body::Answer;
use crate::chain::Exchange;
use crate::compress;

pub use skiff_schema::protobuf::MEDIA_TYPE;
pub const STREAM_MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf;stream=watch";

pub fn answer(exchange: &Exchange, code: StatusCode, bytes: Vec<u8>) -> Answer {
    compress::answer(exchange, code, MEDIA_TYPE, Bytes::from(bytes))
}

fn unencodable(error: ProtobufError) -> Status {
    match error {
        ProtobufError::NotEncodable(_) => Status::not_acceptable(error.to_string()),
        error => Status::internal(format_args!("cannot encode an object: {error}")),
    }
}

fn header(resource: &Resource) -> Header<'_> {
    Header {
        api_version: &resource.api_version,
        kind: &resource.kind,
        unversioned: false,
    }
}

/// An object of the resource as the cache holds it, in the version that is served.
pub fn cached(resource: &Resource, json: &[u8]) -> Result<Vec<u8>, Status> {
    if resource.served_as_stored() {
        return protobuf::encode_json(facts::schema(), resource.facts.type_id, header(resource), json)
            .map_err(unencodable);
    }
    let mut value = encode::decode(json)?;
    resource.from_stored(&mut value);
    object(resource, &value)
}

/// An object of the resource in the version that is served.
pub fn object(resource: &Resource, value: &Value) -> Result<Vec<u8>, Status> {
    protobuf::encode(facts::schema(), resource.facts.type_id, header(resource), value).map_err(unencodable)
}

/// A list of the resource. Messages say their length first, so it is made whole.
pub fn list(resource: &Resource, metadata: &Value, listed: &ListResult) -> Result<Vec<u8>, Status> {
    let schema = facts::schema();
    let kind = format!("{}List", resource.kind);
    let id = schema
        .by_gvk(resource.facts.group, resource.facts.version, &kind)
        .ok_or_else(|| Status::internal(format_args!("no type {kind}")))?;
    let mut message =
        protobuf::encode_message(schema, id, &json!({"metadata": metadata})).map_err(unencodable)?;
    message.reserve(listed.items.iter().map(|entry| entry.bytes.len()).sum());
    for entry in &listed.items {
        let item = if resource.served_as_stored() {
            protobuf::encode_json_message(schema, resource.facts.type_id, &entry.bytes)
        } else {
            let mut value = encode::decode(&entry.bytes)?;
            resource.from_stored(&mut value);
            protobuf::encode_message(schema, resource.facts.type_id, &value)
        };
        protobuf::put_item(&mut message, &item.map_err(unencodable)?);
    }
    let header = Header {
        kind: &kind,
        ..header(resource)
    };
    let (mut out, end) = protobuf::envelope_around(header, message.len());
    out.reserve_exact(message.len() + end.len());
    out.extend_from_slice(&message);
    out.extend_from_slice(end);
    Ok(out)
}

/// A document that says itself what it is.
pub fn document(value: &Value) -> Result<Vec<u8>, Status> {
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or("");
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    let id = type_of(api_version, kind).ok_or_else(|| {
        Status::not_acceptable(
            "only the following media types are accepted: application/json, application/yaml",
        )
    })?;
    let header = Header {
        api_version,
        kind,
        unversioned: false,
    };
    protobuf::encode(facts::schema(), id, header, value).map_err(unencodable)
}

fn type_of(api_version: &str, kind: &str) -> Option<TypeId> {
    let schema = facts::schema();
    let gv = GroupVersion::parse(api_version).unwrap_or_default();
    schema.by_gvk(&gv.group, &gv.version, kind).or_else(|| {
        // Documents of the machinery itself: one of them has no version, some have an older one.
        matches!(gv.group.as_str(), "" | "meta.k8s.io")
            .then(|| schema.by_name(&format!("io.k8s.apimachinery.pkg.apis.meta.v1.{kind}")))
            .flatten()
    })
}

/// The frame of an event around an enveloped object.
pub fn frame(kind: &str, object: &[u8]) -> Bytes {
    Bytes::from(protobuf::watch_frame(kind, object))
}
