//! The body of a write: decoded, checked against the type table, defaulted, and in the stored version.

use bytes::Bytes;
use http::header;
use serde_json::Value;
use skiff_api::facts;
use skiff_meta::{GroupVersionKind, Status};
use skiff_registry::{Context, Resource, object};
use skiff_schema::TypeId;
use skiff_schema::{decode, protobuf};

use crate::chain::Exchange;
use crate::negotiate::{self, Format};
use crate::query::FieldValidation;

pub fn format_of(exchange: &Exchange) -> Result<Format, Status> {
    negotiate::input(exchange.header(header::CONTENT_TYPE)).map_err(Status::unsupported_media_type)
}

/// Decodes an object of the resource, in the served version, defaulted and then converted.
pub fn object(
    exchange: &Exchange,
    resource: &Resource,
    validation: FieldValidation,
    body: &Bytes,
) -> Result<Value, Status> {
    if let Some(custom) = crate::crd::version_of(resource) {
        let mut value = crate::crd::decode::object(exchange, resource, custom, validation, body)?;
        default_and_convert(resource, &mut value);
        record(exchange, resource, &value);
        return Ok(value);
    }
    let expected = GroupVersionKind::new(resource.facts.group, resource.facts.version, resource.facts.kind);
    let mut value = typed(exchange, &expected, validation, body)?;
    default_and_convert(resource, &mut value);
    record(exchange, resource, &value);
    Ok(value)
}

/// Shows the object of a request to the audit log, in the version that the client speaks.
fn record(exchange: &Exchange, resource: &Resource, value: &Value) {
    let Some(trail) = &exchange.trail else { return };
    if resource.custom.is_some() {
        trail.request_object(value);
        return;
    }
    let mut served = value.clone();
    if !resource.served_as_stored() {
        resource.from_stored(&mut served);
    }
    if trail.records_requests() {
        resource.normalise_served(&mut served);
    }
    trail.request_object(&served);
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
    let format = format_of(exchange)?;
    let _stage = exchange.context.stage("decode");
    let decoded = match format {
        Format::Json => decode::decode_object(facts::schema(), body, decode::Format::Json, expected),
        Format::Yaml => decode::decode_object(facts::schema(), body, decode::Format::Yaml, expected),
        Format::Protobuf => decode::decode_protobuf_object(facts::schema(), body, expected),
    };
    let decoded = decoded.map_err(Status::bad_request)?;
    if decoded.gvk.group != expected.group || decoded.gvk.version != expected.version {
        return Err(Status::bad_request(format!(
            "the API version in the data ({}) does not match the expected API version ({})",
            decoded.gvk.api_version(),
            expected.api_version()
        )));
    }
    let strict = decoded.checked.strict_errors;
    report_strict(&exchange.context, validation, &strict, |message| {
        decode::not_handled_message(&decoded.gvk, &expected.kind, message)
    })?;
    let mut value = decoded.checked.value;
    object::put(&mut value, &["kind"], Value::String(expected.kind.clone()));
    object::put(&mut value, &["apiVersion"], Value::String(expected.api_version()));
    Ok(value)
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

/// Checks the outcome of a patch as if it had been sent. What is wrong with it is told by `refuse`.
pub fn patched(
    context: &Context,
    resource: &Resource,
    status: bool,
    validation: FieldValidation,
    value: Value,
    strict: Vec<String>,
    refuse: impl Fn(String) -> Status,
) -> Result<Value, Status> {
    if let Some(custom) = crate::crd::version_of(resource) {
        let mut value =
            crate::crd::decode::patched(context, resource, custom, validation, value, strict, status)?;
        default_and_convert(resource, &mut value);
        return Ok(value);
    }
    let mut value = patched_type(context, resource.facts.type_id, validation, value, strict, refuse)?;
    object::put(&mut value, &["kind"], Value::String(resource.kind.clone()));
    object::put(
        &mut value,
        &["apiVersion"],
        Value::String(resource.api_version.clone()),
    );
    default_and_convert(resource, &mut value);
    Ok(value)
}

/// Checks the outcome of a patch against a built-in type.
pub fn patched_type(
    context: &Context,
    id: TypeId,
    validation: FieldValidation,
    value: Value,
    mut strict: Vec<String>,
    refuse: impl Fn(String) -> Status,
) -> Result<Value, Status> {
    let checked = decode::check(facts::schema(), id, value).map_err(|error| refuse(error.to_string()))?;
    strict.extend(checked.strict_errors);
    match validation {
        FieldValidation::Strict if !strict.is_empty() => {
            return Err(refuse(decode::strict_decoding_message(&strict)));
        }
        FieldValidation::Warn => warn_strict(context, &strict),
        FieldValidation::Strict | FieldValidation::Ignore => {}
    }
    Ok(checked.value)
}

/// Warns of each thing that a strict reader would refuse. A YAML reader tells them all at once, a line each.
pub fn warn_strict(context: &Context, found: &[String]) {
    for text in found {
        match text.strip_prefix("yaml: unmarshal errors:\n") {
            Some(lines) => lines
                .lines()
                .for_each(|line| context.warn(line.trim().to_string())),
            None => context.warn(text.clone()),
        }
    }
}

fn report_strict(
    context: &Context,
    validation: FieldValidation,
    found: &[String],
    message: impl Fn(&str) -> String,
) -> Result<(), Status> {
    if found.is_empty() {
        return Ok(());
    }
    match validation {
        FieldValidation::Ignore => {}
        FieldValidation::Warn => warn_strict(context, found),
        FieldValidation::Strict => {
            return Err(Status::bad_request(message(&decode::strict_decoding_message(
                found,
            ))));
        }
    }
    Ok(())
}

pub fn default_and_convert(resource: &Resource, value: &mut Value) {
    (resource.rules.default)(resource.facts.version, value);
    resource.to_stored(value);
}
