//! Bodies of custom objects: decoded without a type, then brought into the shape of their schema. What a
//! schema does not know is dropped, and told as the client wishes.

use serde_json::Value;
use skiff_api::facts;
use skiff_meta::{GroupKind, GroupVersion, Status, field};
use skiff_registry::body::{Format, Patched, Sent, report_strict};
use skiff_registry::object;
use skiff_schema::decode::{self, Document};
use skiff_schema::structural;

use super::CustomVersion;

/// Decodes the body of a create or update.
pub fn object(custom: &CustomVersion, sent: &Sent<'_>) -> Result<Value, Status> {
    let body = sent.body;
    let own_kind = &custom.definition.names.kind;
    let format = match sent.format {
        Format::Json => decode::Format::Json,
        Format::Yaml => decode::Format::Yaml,
        Format::Protobuf => {
            return Err(Status::unsupported_media_type(
                "the body of the request was in an unknown format - accepted media types include: application/json, application/yaml",
            ));
        }
    };
    let _stage = sent.context.stage("decode");
    let unrecognized = |error: String| {
        Status::bad_request(format!(
            "the object provided is unrecognized (must be of type {}): {error} ({})",
            own_kind,
            decode::summary(body)
        ))
    };
    let document = Document::parse(body, format).map_err(|error| {
        unrecognized(match format {
            decode::Format::Json => format!("couldn't get version/kind; json parse error: {error}"),
            decode::Format::Yaml => error.to_string(),
        })
    })?;
    let gvk = decode::type_meta(&document.node).map_err(unrecognized)?;
    if gvk.kind.is_empty() {
        let shown = match format {
            decode::Format::Json => String::from_utf8_lossy(body).into_owned(),
            decode::Format::Yaml => document.untyped().value.to_string(),
        };
        return Err(unrecognized(format!("Object 'Kind' is missing in '{shown}'")));
    }
    let decoded = document.untyped();
    let (mut value, mut strict) = (decoded.value, decoded.duplicate_fields);
    let refused = |error: String| {
        Status::bad_request(format!(
            "{} in version {:?} cannot be handled as a {}: {error}",
            gvk.kind, gvk.version, own_kind
        ))
    };
    shape(custom, &mut value, &mut strict).map_err(&refused)?;
    if gvk.group != custom.definition.group || gvk.version != custom.version().name {
        let given = if gvk.version.is_empty() {
            String::new()
        } else {
            GroupVersion::new(gvk.group.as_str(), gvk.version.as_str()).to_string()
        };
        return Err(Status::bad_request(format!(
            "the API version in the data ({given}) does not match the expected API version ({})",
            custom.api_version
        )));
    }
    report_strict(sent.context, sent.validation, &strict, |message| {
        refused(message.to_owned())
    })?;
    check_kind(custom, &value)?;
    Ok(value)
}

/// COMPAT: the complaint about another kind is about that kind.
fn check_kind(custom: &CustomVersion, value: &Value) -> Result<(), Status> {
    let (kind, own) = (object::at_str(value, &["kind"]), &custom.definition.names.kind);
    if kind == own {
        return Ok(());
    }
    let error = field::Error::invalid(&field::Path::new("kind"), kind, format!("must be {own}"));
    Err(Status::invalid(
        &GroupKind::new(custom.definition.group.as_str(), kind),
        object::name(value),
        &[error],
    ))
}

/// The outcome of a patch.
pub fn patched(custom: &CustomVersion, patched: Patched<'_>) -> Result<Value, Status> {
    let Patched {
        mut value,
        mut strict,
        status,
        ..
    } = patched;
    let shown = value.to_string();
    let refused = |error: &str| {
        let error = field::Error::invalid(&field::Path::new("patch"), shown.as_str(), error);
        Status::invalid(&GroupKind::new("", ""), "", &[error])
    };
    shape(custom, &mut value, &mut strict).map_err(|error| refused(&error))?;
    report_strict(patched.context, patched.validation, &strict, refused)?;
    // Of a status nothing else counts.
    if status || object::at_str(&value, &["kind"]).is_empty() {
        object::put(
            &mut value,
            &["kind"],
            custom.definition.names.kind.as_str().into(),
        );
    }
    if status {
        object::put(&mut value, &["apiVersion"], custom.api_version.as_str().into());
    }
    check_type(custom, &value)?;
    Ok(value)
}

/// The outcome of an apply. COMPAT: a null is not dropped where the schema knows none, so the schema refuses it.
pub fn applied(custom: &CustomVersion, mut value: Value) -> Result<Value, Status> {
    let shown = value.to_string();
    let schema = custom.version().schema();
    structural::coerce_metadata(facts::schema(), &mut value, schema, false).map_err(|error| {
        let error = field::Error::invalid(&field::Path::new("patch"), shown.as_str(), error);
        Status::invalid(&GroupKind::new("", ""), "", &[error])
    })?;
    structural::prune(&mut value, schema, false);
    structural::default(&mut value, schema);
    check_type(custom, &value)?;
    Ok(value)
}

/// Brings an object that something inside the server has changed back into the shape of its schema.
pub fn reshape(custom: &CustomVersion, value: &mut Value) -> Result<(), String> {
    shape(custom, value, &mut Vec::new())
}

/// COMPAT: the complaint about another type is about that type.
fn check_type(custom: &CustomVersion, value: &Value) -> Result<(), Status> {
    let mut errors = Vec::new();
    let mut expect = |field: &str, wanted: &str| {
        let given = object::at_str(value, &[field]);
        if given != wanted {
            let why = format!("must be {wanted}");
            errors.push(field::Error::invalid(&field::Path::new(field), given, why));
        }
        given.to_owned()
    };
    let kind = expect("kind", &custom.definition.names.kind);
    let version = expect("apiVersion", &custom.api_version);
    if errors.is_empty() {
        return Ok(());
    }
    let (group, _) = version.split_once('/').unwrap_or(("", &version));
    let kind = GroupKind::new(group, kind.as_str());
    Err(Status::invalid(&kind, object::name(value), &errors))
}

/// Prunes, coerces and defaults. What was unknown is added to `strict`.
fn shape(custom: &CustomVersion, value: &mut Value, strict: &mut Vec<String>) -> Result<(), String> {
    let schema = custom.version().schema();
    let coerced = structural::coerce_metadata(facts::schema(), value, schema, false)?;
    let (of_metadata, of_embedded): (Vec<String>, Vec<String>) = coerced
        .unknown
        .into_iter()
        .partition(|path| path.starts_with("metadata."));
    let pruned = structural::prune(value, schema, true);
    structural::prune_nulls(value, schema);
    let unknown = of_metadata.into_iter().chain(pruned).chain(of_embedded);
    strict.extend(unknown.map(|path| format!("unknown field \"{path}\"")));
    structural::default(value, schema);
    Ok(())
}
