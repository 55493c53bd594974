//! The body of a write on its way to an object: what both sorts of strategies need to read it, and how it is read
//! where the type tables know the kind.

mod restore;

use bytes::Bytes;
use serde_json::Value;
use skiff_api::facts;
use skiff_meta::{GroupVersionKind, Status, field};
use skiff_schema::TypeId;
use skiff_schema::decode;
use skiff_schema::patch::PatchType;

pub use restore::restore_error;

use crate::{Context, object};

/// The encoding of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Json,
    Yaml,
    Protobuf,
}

/// How unknown and duplicate fields are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldValidation {
    Ignore,
    Warn,
    Strict,
}

/// The body of a create or an update.
pub struct Sent<'a> {
    pub context: &'a Context,
    pub body: &'a Bytes,
    pub format: Format,
    pub validation: FieldValidation,
}

/// The outcome of a patch.
pub struct Patched<'a> {
    pub context: &'a Context,
    /// In the served version.
    pub value: Value,
    /// What a strict reader found in the patch itself.
    pub strict: Vec<String>,
    pub validation: FieldValidation,
    /// The patch was merged into the type itself.
    pub strategic: bool,
    /// Only the status counts.
    pub status: bool,
    /// Refuses the document that the patch made.
    pub refuse: &'a dyn Fn(String) -> Status,
}

/// The sort of patch that a media type says, apply aside.
pub fn patch_type(media_type: &str) -> Result<PatchType, Status> {
    match media_type {
        "application/json-patch+json" => Ok(PatchType::Json),
        "application/merge-patch+json" => Ok(PatchType::Merge),
        "application/strategic-merge-patch+json" => Ok(PatchType::StrategicMerge),
        // COMPAT: upstream's router refuses it, in words of its own.
        _ => {
            let mut status = Status::unsupported_media_type("415: Unsupported Media Type");
            status.details = Some(Box::default());
            Err(status)
        }
    }
}

/// Decodes a body of the given kind.
pub fn typed(sent: &Sent<'_>, expected: &GroupVersionKind) -> Result<Value, Status> {
    let _stage = sent.context.stage("decode");
    let decoded = match sent.format {
        Format::Json => decode::decode_object(facts::schema(), sent.body, decode::Format::Json, expected),
        Format::Yaml => decode::decode_object(facts::schema(), sent.body, decode::Format::Yaml, expected),
        Format::Protobuf => decode::decode_protobuf_object(facts::schema(), sent.body, expected),
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
    report_strict(sent.context, sent.validation, &strict, |message| {
        Status::bad_request(decode::not_handled_message(&decoded.gvk, &expected.kind, message))
    })?;
    let mut value = decoded.checked.value;
    object::put(&mut value, &["kind"], Value::String(expected.kind.clone()));
    object::put(&mut value, &["apiVersion"], Value::String(expected.api_version()));
    Ok(value)
}

/// Checks the outcome of a patch against a built-in type.
pub fn patched_type(id: TypeId, patched: Patched<'_>) -> Result<Value, Status> {
    let Patched {
        context,
        value,
        mut strict,
        validation,
        refuse,
        ..
    } = patched;
    let checked = decode::check(facts::schema(), id, value).map_err(|error| refuse(error.to_string()))?;
    strict.extend(checked.strict_errors);
    report_strict(context, validation, &strict, |message| {
        refuse(message.to_string())
    })?;
    Ok(checked.value)
}

/// A patched document must still be of its kind.
pub fn check_kind(expected: &GroupVersionKind, patched: &Value) -> Result<(), String> {
    let text = |key: &str, unset: &str| match patched.get(key).and_then(Value::as_str) {
        None | Some("") => unset.to_string(),
        Some(text) => text.to_string(),
    };
    let api_version = expected.api_version();
    let (kind, version) = (text("kind", &expected.kind), text("apiVersion", &api_version));
    if kind == expected.kind && version == api_version {
        return Ok(());
    }
    let (group, in_group) = version.rsplit_once('/').unwrap_or(("", &version));
    if facts::schema().by_gvk(group, in_group, &kind).is_none() {
        return Err(format!(
            "no kind {} is registered for version {} in scheme \"pkg/runtime/scheme.go:111\"",
            field::quote(&kind),
            field::quote(&version)
        ));
    }
    let internal = match expected.group.split('.').next() {
        None | Some("") => "core",
        Some(name) => name,
    };
    Err(format!(
        "converting ({in_group}.{kind}) to ({internal}.{}): unknown conversion",
        expected.kind
    ))
}

/// Treats what a strict reader would refuse as the client wishes.
pub fn report_strict(
    context: &Context,
    validation: FieldValidation,
    found: &[String],
    refuse: impl Fn(&str) -> Status,
) -> Result<(), Status> {
    match validation {
        _ if found.is_empty() => Ok(()),
        FieldValidation::Ignore => Ok(()),
        FieldValidation::Warn => {
            warn_strict(context, found);
            Ok(())
        }
        FieldValidation::Strict => Err(refuse(&decode::strict_decoding_message(found))),
    }
}

/// Warns of each thing that a strict reader would refuse. A YAML reader tells them all at once, a line each.
fn warn_strict(context: &Context, found: &[String]) {
    for text in found {
        match text.strip_prefix("yaml: unmarshal errors:\n") {
            Some(lines) => lines
                .lines()
                .for_each(|line| context.warn(line.trim().to_string())),
            None => context.warn(text.clone()),
        }
    }
}
