//! Patch: JSON patch, merge patch and strategic merge patch (server-side apply is in `apply.rs`), applied to the served version of the
//! stored object inside the update loop, so that a concurrent write only makes it run again.

use std::sync::Arc;

use bytes::Bytes;
use http::header;
use serde_json::Value;
use skiff_api::facts;
use skiff_meta::{GroupKind, GroupVersionKind, Status, field};
use skiff_registry::{Resource, WriteScope};
use skiff_schema::patch::{self, DecodedPatch, PatchError, PatchType};
use skiff_schema::{Scalar, Shape, TypeId};

use super::write::check_name;
use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::decode;
use crate::gate::Admission;
use crate::negotiate;
use crate::query::{FieldValidation, WriteOptions};
use crate::respond;
use crate::server::Inner;

/// Whether the request is a server-side apply.
pub fn is_apply(exchange: &Exchange) -> bool {
    negotiate::media_type(exchange.header(header::CONTENT_TYPE)) == "application/apply-patch+yaml"
}

/// The sort of patch that the Content-Type says.
pub fn patch_type(exchange: &Exchange) -> Result<PatchType, Status> {
    match negotiate::media_type(exchange.header(header::CONTENT_TYPE)) {
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

/// A patch that was read: ready to be applied, once an attempt.
pub struct Patch {
    kind: PatchType,
    decoded: DecodedPatch,
    /// It has numbers that Go converts.
    odd_numbers: bool,
}

impl Patch {
    pub fn parse(kind: PatchType, bytes: &Bytes, validation: FieldValidation) -> Result<Patch, Status> {
        let strict = validation != FieldValidation::Ignore;
        let decoded = patch::decode_patch(kind, bytes, strict).map_err(patch_error)?;
        let odd_numbers = kind == PatchType::StrategicMerge && patch::brings_odd_numbers(&decoded.value);
        Ok(Patch {
            kind,
            decoded,
            odd_numbers,
        })
    }

    /// Applies the patch to an object of type `id`.
    pub fn apply(&self, id: TypeId, current: &Value) -> Result<Value, Status> {
        let value = &self.decoded.value;
        let result = match self.kind {
            PatchType::Json => patch::json_patch(current, value),
            PatchType::Merge => patch::merge_patch(current, value),
            PatchType::StrategicMerge => patch::strategic_merge(facts::schema(), id, current, value),
        };
        let mut result = result.map_err(patch_error)?;
        if self.odd_numbers {
            patch::convert_integers(facts::schema(), id, &mut result);
        }
        Ok(result)
    }

    /// Refuses a document that the patch made unreadable. Only who fails pays for the text.
    pub fn refuse(&self, id: TypeId, current: &Value, error: String) -> Status {
        let (shown, error) = if self.kind == PatchType::StrategicMerge {
            (patch::go_print(&self.decoded.value), restore_error(&error))
        } else {
            let again = self.apply(id, current).unwrap_or_default();
            let patch = &self.decoded.value;
            let shown = patch::show_patched(facts::schema(), id, current, patch, &again);
            let spelled = &self.decoded.spelled;
            (spelled.in_document(shown), spelled.in_error(&error))
        };
        let path = field::Path::new("patch");
        Status::invalid(
            &GroupKind::new("", ""),
            "",
            &[field::Error::invalid(&path, shown.as_str(), error)],
        )
    }

    /// A patched document must still be of its kind. A strategic patch is merged into the type itself.
    pub fn check_kind(&self, expected: &GroupVersionKind, patched: &Value) -> Result<(), String> {
        match self.kind {
            PatchType::StrategicMerge => Ok(()),
            _ => check_kind(expected, patched),
        }
    }

    /// COMPAT: a document without a version is read as upstream's internal type, which knows none of its fields by these
    /// names: not even the object's name is found.
    fn check_version(
        &self,
        exchange: &Exchange,
        validation: FieldValidation,
        patched: &Value,
        refuse: impl Fn(String) -> Status,
    ) -> Result<(), Status> {
        let version = patched.get("apiVersion").and_then(Value::as_str).unwrap_or("");
        let kind = patched.get("kind").and_then(Value::as_str).unwrap_or("");
        if self.kind == PatchType::StrategicMerge || !version.is_empty() || kind.is_empty() {
            return Ok(());
        }
        let mut found = self.strict_errors();
        let fields = patched.as_object().into_iter().flat_map(|object| object.keys());
        found.extend(
            fields
                .filter(|key| !matches!(key.as_str(), "kind" | "apiVersion"))
                .map(|key| format!("unknown field {}", field::quote(key))),
        );
        match validation {
            FieldValidation::Strict => {
                return Err(refuse(skiff_schema::decode::strict_decoding_message(&found)));
            }
            FieldValidation::Warn => decode::warn_strict(&exchange.context, &found),
            FieldValidation::Ignore => {}
        }
        check_name(exchange, &Value::Null)
    }

    /// What a strict reader found in the patch.
    pub fn strict_errors(&self) -> Vec<String> {
        self.decoded.strict_errors.clone()
    }
}

fn patch_error(error: PatchError) -> Status {
    match error {
        PatchError::BadRequest(text) => Status::bad_request(text),
        PatchError::TooLarge(text) => {
            Status::too_large(text.trim_start_matches("Request entity too large: "))
        }
        PatchError::Unprocessable(text) => {
            // COMPAT: upstream's generic response does not tell what was wrong; the log does.
            tracing::debug!(text, "a patch cannot be applied");
            let mut status = Status::failure(
                422,
                "Invalid",
                "the server rejected our request due to an error in our request",
            );
            status.details = Some(Box::default());
            status
        }
        PatchError::Internal(text) => Status::failure(500, "", text),
    }
}

const CUSTOM_PATCHES: &str = "the body of the request was in an unknown format - accepted media types include: application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";

pub async fn patch(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
    part: WriteScope,
) -> Result<Answer, Status> {
    if is_apply(exchange) {
        return super::apply::apply(inner, exchange, resource, body, part).await;
    }
    exchange.output(false)?;
    let kind = match patch_type(exchange) {
        // Custom resources take fewer sorts of patches, and say which.
        Err(_) | Ok(PatchType::StrategicMerge) if resource.custom.is_some() => {
            return Err(Status::unsupported_media_type(CUSTOM_PATCHES));
        }
        kind => kind?,
    };
    let bytes = body::read(body).await?;
    if let Some(trail) = &exchange.trail {
        trail.request_patch(&bytes);
    }
    let options = WriteOptions::read(&exchange.query, "PatchOptions")?;
    exchange.write_as(&options);
    let patch = {
        let _stage = exchange.context.stage("decode");
        Patch::parse(kind, &bytes, options.field_validation)?
    };
    let gate = Admission::new(inner, exchange, resource, Some(&options.value));
    let (info, context) = (&exchange.info, &exchange.context);
    let mut transform = |current: Option<&Value>| {
        let current = current.ok_or_else(|| Status::not_found(&resource.group_resource, &info.name))?;
        let _stage = context.stage("patch");
        apply(exchange, resource, &patch, options.field_validation, current)
    };
    let updated = inner
        .registry
        .update(
            context,
            resource,
            &info.namespace,
            &info.name,
            part,
            false,
            &mut transform,
            &gate,
        )
        .await?;
    respond::updated(exchange, resource, updated)
}

/// The stored object after the patch, again in the stored version.
fn apply(
    exchange: &Exchange,
    resource: &Resource,
    patch: &Patch,
    validation: FieldValidation,
    stored: &Value,
) -> Result<Value, Status> {
    let context = &exchange.context;
    let mut current = stored.clone();
    resource.from_stored(&mut current);
    let patched = patch.apply(resource.facts.type_id, &current)?;
    let refuse = |error: String| patch.refuse(resource.facts.type_id, &current, error);
    if resource.custom.is_none() {
        let facts = resource.facts;
        let expected = GroupVersionKind::new(facts.group, facts.version, facts.kind);
        patch.check_kind(&expected, &patched).map_err(&refuse)?;
        patch.check_version(exchange, validation, &patched, refuse)?;
    }
    let mut value = decode::patched(
        context,
        resource,
        exchange.info.subresource == "status",
        validation,
        patched,
        patch.strict_errors(),
        refuse,
    )?;
    if resource.custom.is_some() {
        skiff_registry::ensure_namespace(resource, &exchange.info.namespace, &mut value)?;
    }
    check_name(exchange, &value)?;
    Ok(value)
}

/// A patched document must still be of its kind.
fn check_kind(expected: &GroupVersionKind, patched: &Value) -> Result<(), String> {
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

/// A decoding error in the words of the converter that upstream uses after a strategic merge.
pub(super) fn restore_error(error: &str) -> String {
    // What reads itself keeps its own words.
    if error.contains(" into Go value of type ") {
        return error.to_string();
    }
    if let Some(told) = told_by_itself(error) {
        return told;
    }
    if error.starts_with("illegal base64") {
        return format!("error decoding from json: {error}");
    }
    let Some((found, wanted)) = error
        .strip_prefix("json: cannot unmarshal ")
        .and_then(|rest| Some((rest.split(" into Go ").next()?, rest.rsplit(" of type ").next()?)))
    else {
        return error.to_string();
    };
    let kind = match found {
        "object" => "map",
        "array" => "slice",
        number if number.starts_with("number") && number.contains('.') => "float64",
        number if number.starts_with("number") => "int64",
        other => other,
    };
    match (go_kind(wanted), kind) {
        // COMPAT: Go makes a letter of a number.
        (Some("string"), "int64") | (Some("int" | "int32" | "int64"), "float64") => {
            format!("cannot convert {kind} to {wanted}")
        }
        (Some(scalar), _) => format!("unrecognized type: {scalar}"),
        _ if wanted.starts_with("map[") || wanted == "v1.ResourceList" => {
            format!("cannot restore map from {kind}")
        }
        _ if wanted.starts_with("[]") => format!("cannot restore slice from {kind}"),
        _ => format!("cannot restore struct from: {kind}"),
    }
}

/// The complaint about a field of a type that reads itself, such as a time: it knows no field.
fn told_by_itself(error: &str) -> Option<String> {
    let (found, rest) = error.split_once(" into Go struct field ")?;
    let (place, wanted) = rest.rsplit_once(" of type ")?;
    let (name, path) = place.split_once('.')?;
    let field = path.rsplit('.').next()?;
    let special = facts::schema().types().any(|(_, of)| {
        let mut fields = of.fields.iter();
        of.name.rsplit('.').next() == Some(name)
            && fields.any(|one| one.name == field && matches!(one.shape, Shape::Special(_)))
    });
    special.then(|| format!("{found} into Go value of type {wanted}"))
}

/// Go's kind of a scalar type, also of one that has a name of its own.
fn go_kind(wanted: &str) -> Option<&'static str> {
    let kind_of = |scalar: Scalar| match scalar {
        Scalar::Bool => "bool",
        Scalar::Int32 => "int32",
        Scalar::Int64 => "int64",
        Scalar::Int => "int",
        Scalar::Float64 => "float64",
        Scalar::String => "string",
        Scalar::Bytes => "[]uint8",
    };
    let plain = [
        Scalar::Bool,
        Scalar::Int32,
        Scalar::Int64,
        Scalar::Int,
        Scalar::Float64,
        Scalar::String,
    ];
    if let Some(scalar) = plain.into_iter().find(|scalar| kind_of(*scalar) == wanted) {
        return Some(kind_of(scalar));
    }
    fn named(shape: &Shape, wanted: &str) -> Option<Scalar> {
        match shape {
            Shape::Scalar(scalar, Some(name)) if name == wanted => Some(*scalar),
            Shape::List(list) => named(&list.of, wanted),
            Shape::Map(map) => named(&map.of, wanted),
            _ => None,
        }
    }
    facts::schema()
        .types()
        .flat_map(|(_, of)| of.fields.iter())
        .find_map(|field| named(&field.shape, wanted))
        .filter(|scalar| *scalar != Scalar::Bytes)
        .map(kind_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strategic_merge_takes_numbers_as_go_does() {
        let id = facts::schema()
            .by_gvk("apps", "v1", "Deployment")
            .expect("a type");
        let check = |replicas: &str, expected: Value| {
            let body = format!(r#"{{"spec":{{"replicas":{replicas}}}}}"#);
            let patch = Patch::parse(
                PatchType::StrategicMerge,
                &Bytes::from(body),
                FieldValidation::Warn,
            );
            let current = serde_json::json!({"spec": {"replicas": 1}});
            let patched = patch.and_then(|patch| patch.apply(id, &current));
            assert_eq!(
                patched.expect("applies")["spec"]["replicas"],
                expected,
                "{replicas}"
            );
        };
        check("7", 7.into());
        check("2147483648", (-2_147_483_648_i64).into());
        check("4294967297", 1.into());
        check("3.0", 3.into());
        check("99999999999999999999", 0.into());
        check("1.5", 1.5.into());
    }

    #[test]
    fn conversions_are_refused_as_by_upstream() {
        let check = |found: &str, wanted: &str, expected: &str| {
            let error = format!("json: cannot unmarshal {found} into Go struct field A.b of type {wanted}");
            assert_eq!(restore_error(&error), expected, "{error}");
        };
        check("string", "int32", "unrecognized type: int32");
        check("bool", "string", "unrecognized type: string");
        check("number", "string", "cannot convert int64 to string");
        check("number", "v1.PodPhase", "cannot convert int64 to v1.PodPhase");
        check("number", "bool", "unrecognized type: bool");
        check("number 1.5", "int32", "cannot convert float64 to int32");
        check("object", "v1.PodPhase", "unrecognized type: string");
        check("object", "[]v1.Container", "cannot restore slice from map");
        check("string", "map[string]string", "cannot restore map from string");
        check("array", "v1.PodSpec", "cannot restore struct from: slice");
        check("string", "v1.ResourceList", "cannot restore map from string");
        let itself = "json: cannot unmarshal object into Go value of type string";
        assert_eq!(restore_error(itself), itself);
        let in_field =
            "json: cannot unmarshal object into Go struct field LeaseSpec.spec.renewTime of type string";
        assert_eq!(restore_error(in_field), itself);
        assert_eq!(
            restore_error("illegal base64 data at input byte 0"),
            "error decoding from json: illegal base64 data at input byte 0"
        );
    }
}
