//! Turns objects into answers: JSON, YAML or protobuf, as they are, as a Table, or as metadata only.

use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_registry::{Resource, Updated, encode};
use skiff_schema::{declared_order, indented};

use crate::body::{self, Answer};
use crate::chain::Exchange;
use crate::compress;
use crate::negotiate::{Format, Output, Transform};
use crate::protobuf;
use crate::table::{self, IncludeObject};

/// An object on its way out, in the stored version.
pub enum Stored {
    /// As the cache holds it.
    Bytes(Bytes),
    Value(Value),
}

/// Answers a write with what it made or changed.
pub fn updated(exchange: &mut Exchange, resource: &Resource, updated: Updated) -> Result<Answer, Status> {
    exchange.made(&updated.object);
    let code = if updated.created {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    object(exchange, resource, code, Stored::Value(updated.object))
}

/// Answers with one object of a resource.
pub fn object(
    exchange: &Exchange,
    resource: &Resource,
    code: StatusCode,
    stored: Stored,
) -> Result<Answer, Status> {
    let output = exchange.output(false)?;
    if output.transform == Transform::None
        && output.format == Format::Json
        && !output.pretty
        && resource.served_as_stored()
        && let Stored::Bytes(bytes) = &stored
    {
        return Ok(json_bytes(exchange, code, bytes));
    }
    if let (Transform::None, Format::Protobuf, Stored::Bytes(bytes)) =
        (&output.transform, output.format, &stored)
    {
        let bytes = protobuf::cached(resource, bytes)?;
        return Ok(protobuf::answer(exchange, code, bytes));
    }
    let mut value = match stored {
        Stored::Bytes(bytes) => encode::decode(&bytes)?,
        Stored::Value(value) => value,
    };
    let opening = encode::opening(&resource.api_version, &resource.kind);
    match &output.transform {
        Transform::None => {
            resource.from_stored(&mut value);
            if output.format == Format::Protobuf {
                let bytes = protobuf::object(resource, &value)?;
                return Ok(protobuf::answer(exchange, code, bytes));
            }
            if output.format == Format::Json && !output.pretty {
                return Ok(json_bytes(exchange, code, &encode::wire(&value, &opening)?));
            }
            raw(exchange, &output, code, &value)
        }
        Transform::Table(version) => {
            let include = IncludeObject::read(&exchange.query)?;
            let table = table::of_object(resource, &value, version, include);
            raw(exchange, &output, code, &table)
        }
        Transform::PartialObjectMetadata(version) => raw(
            exchange,
            &output,
            code,
            &table::partial(
                &value,
                &format!("meta.k8s.io/{version}"),
                resource.served_annotation,
            ),
        ),
        Transform::PartialObjectMetadataList(_) => Err(Status::not_acceptable(format!(
            "you requested PartialObjectMetadataList, but the requested object is not a list ({})",
            resource.strategy.go_type()
        ))),
    }
}

/// Answers with a value that is no stored object: discovery, reviews, Status.
pub fn raw(exchange: &Exchange, output: &Output, code: StatusCode, value: &Value) -> Result<Answer, Status> {
    match output.format {
        Format::Json if output.pretty => {
            let bytes = indented(&declared_order(skiff_api::facts::schema(), value));
            Ok(compress::answer(
                exchange,
                code,
                "application/json",
                Bytes::from(bytes),
            ))
        }
        Format::Protobuf => Ok(protobuf::answer(exchange, code, protobuf::document(value)?)),
        Format::Json => Ok(json_bytes(
            exchange,
            code,
            &declared_order(skiff_api::facts::schema(), value),
        )),
        Format::Yaml => {
            let bytes = Bytes::from(yaml(value)?);
            Ok(compress::answer(exchange, code, "application/yaml", bytes))
        }
    }
}

pub fn yaml(value: &Value) -> Result<String, Status> {
    serde_saphyr::to_string(value).map_err(Status::internal)
}

fn json_bytes(exchange: &Exchange, code: StatusCode, bytes: &[u8]) -> Answer {
    let mut out = Vec::with_capacity(bytes.len() + 1);
    out.extend_from_slice(bytes);
    // COMPAT: upstream's encoder ends every document with a newline.
    out.push(b'\n');
    compress::answer(exchange, code, "application/json", Bytes::from(out))
}

/// A `Status` in the form that the client asked for. An Accept that cannot be met gets JSON.
pub fn status(exchange: &Exchange, status: &Status) -> Answer {
    let json = || body::status(status);
    // COMPAT: an answer that cannot take the form asked for is refused by another of upstream's writers.
    let transform = [
        "Unable to convert to Table",
        "you requested PartialObjectMetadata",
    ];
    if transform
        .iter()
        .any(|opening| status.message.starts_with(opening))
    {
        let bytes = pretty(status);
        let code = StatusCode::from_u16(status.http_code()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        return body::answer(code, "application/json", bytes);
    }
    let Some(output) = exchange.status_output() else {
        // COMPAT: who can take no form of it gets it for people to read.
        let code = StatusCode::from_u16(status.http_code()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        return body::answer(code, "application/json", pretty(status));
    };
    if output.format == Format::Json && !output.pretty {
        return json();
    }
    let code = StatusCode::from_u16(status.http_code()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut answer = raw(exchange, &output, code, &status.to_value()).unwrap_or_else(|_| json());
    let seconds = status
        .details
        .as_ref()
        .map_or(0, |details| details.retry_after_seconds);
    if seconds > 0 {
        answer
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    answer
}

fn pretty(status: &Status) -> Vec<u8> {
    indented(&declared_order(skiff_api::facts::schema(), &status.to_value()))
}

/// A Status of success, as some subresources answer.
pub fn success(code: u16) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code})
}
