//! The body of a write: decoded, checked against the type table, defaulted, and in the stored version.

use bytes::Bytes;
use http::header;
use serde_json::Value;
use skiff_api::facts;
use skiff_meta::{GroupVersionKind, Status};
use skiff_registry::Resource;
use skiff_registry::body::{self, Sent};
use skiff_schema::{decode, protobuf};

use crate::chain::Exchange;
use crate::negotiate::{self, Format};
use crate::query::FieldValidation;

pub fn format_of(exchange: &Exchange) -> Result<Format, Status> {
    negotiate::input(exchange.header(header::CONTENT_TYPE)).map_err(Status::unsupported_media_type)
}

/// Decodes an object of the resource, defaulted, as it goes through a write.
pub fn object(
    exchange: &Exchange,
    resource: &Resource,
    validation: FieldValidation,
    body: &Bytes,
) -> Result<Value, Status> {
    let value = resource.strategy.decode(&sent(exchange, validation, body)?)?;
    // The audit log sees the object in the version that the client speaks.
    match &exchange.trail {
        Some(trail) if trail.records_requests() => {
            trail.request_object(&resource.strategy.presented(&value));
        }
        Some(trail) => trail.request_object(&value),
        None => {}
    }
    Ok(value)
}

fn sent<'a>(
    exchange: &'a Exchange,
    validation: FieldValidation,
    body: &'a Bytes,
) -> Result<Sent<'a>, Status> {
    Ok(Sent {
        context: &exchange.context,
        body,
        format: format_of(exchange)?,
        validation,
    })
}

/// The same for what is of another kind than the resource.
pub fn record_as(exchange: &Exchange, gvk: &GroupVersionKind, value: &Value) {
    let Some(trail) = &exchange.trail else { return };
    let mut shown = value.clone();
    if trail.records_requests()
        && let Some(id) = facts::schema().by_gvk(&gvk.group, &gvk.version, &gvk.kind)
    {
        skiff_schema::normalise(facts::schema(), id, &mut shown);
    }
    trail.request_object(&shown);
}

/// Decodes a body of the given kind.
pub fn typed(
    exchange: &Exchange,
    expected: &GroupVersionKind,
    validation: FieldValidation,
    body: &Bytes,
) -> Result<Value, Status> {
    body::typed(&sent(exchange, validation, body)?, expected)
}

/// DeleteOptions, which clients may send in any group's version or in none.
pub fn delete_options(exchange: &Exchange, body: &[u8]) -> Result<Value, Status> {
    let schema = facts::schema();
    let Some(id) = schema.by_name("io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions") else {
        return Err(Status::internal("no type DeleteOptions"));
    };
    let parse = |format| {
        let document = decode::Document::parse(body, format).map_err(|error| {
            Status::bad_request(format!("couldn't get version/kind; json parse error: {error}"))
        })?;
        decode::type_meta(&document.node).map_err(Status::bad_request)?;
        document
            .check(schema, id)
            .map_err(|error| Status::bad_request(error.to_string()))
    };
    let checked = match format_of(exchange)? {
        Format::Json => parse(decode::Format::Json)?,
        Format::Yaml => parse(decode::Format::Yaml)?,
        Format::Protobuf => {
            let bad = |error: protobuf::ProtobufError| Status::bad_request(error.to_string());
            let envelope = protobuf::envelope(body).map_err(bad)?;
            check_delete_options(envelope.api_version, envelope.kind)?;
            let value = protobuf::decode(schema, id, envelope.raw).map_err(bad)?;
            decode::Checked {
                value,
                strict_errors: Vec::new(),
            }
        }
    };
    let text = |key: &str| checked.value.get(key).and_then(Value::as_str).unwrap_or("");
    check_delete_options(text("apiVersion"), text("kind"))?;
    Ok(checked.value)
}

/// COMPAT: the options are read by a scheme of their own, which knows few kinds.
fn check_delete_options(version: &str, kind: &str) -> Result<(), Status> {
    let version = if version.is_empty() {
        "meta.k8s.io/v1"
    } else {
        version
    };
    let of_requests = matches!(
        kind,
        "CreateOptions" | "UpdateOptions" | "PatchOptions" | "Status"
    );
    let known = match version {
        "v1" => of_requests,
        "meta.k8s.io/v1" => of_requests || matches!(kind, "ListOptions" | "GetOptions"),
        _ => false,
    };
    match kind {
        "" | "DeleteOptions" => Ok(()),
        _ if known => Err(Status::bad_request(format!(
            "converting (v1.{kind}) to (v1.DeleteOptions): unknown conversion"
        ))),
        _ => Err(Status::bad_request(format!(
            "no kind {kind:?} is registered for version {version:?} in scheme \"pkg/runtime/scheme.go:111\""
        ))),
    }
}
