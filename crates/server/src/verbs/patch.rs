//! Patch: JSON patch, merge patch and strategic merge patch, applied to the served version of the
//! stored object inside the update loop, so that a concurrent write only makes it run again.

use std::sync::Arc;

use bytes::Bytes;
use http::{StatusCode, header};
use serde_json::Value;
use skiff_api::facts;
use skiff_meta::Status;
use skiff_registry::{Context, Part, Resource, object};
use skiff_schema::TypeId;
use skiff_schema::patch::{self, DecodedPatch, PatchError, PatchType};

use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::decode;
use crate::gate::Admission;
use crate::negotiate;
use crate::query::{FieldValidation, WriteOptions};
use crate::respond::{self, Stored};
use crate::server::Inner;

/// The sort of patch that the Content-Type says.
pub fn patch_type(exchange: &Exchange) -> Result<PatchType, Status> {
    match negotiate::media_type(exchange.header(header::CONTENT_TYPE)) {
        "application/json-patch+json" => Ok(PatchType::Json),
        "application/merge-patch+json" => Ok(PatchType::Merge),
        "application/strategic-merge-patch+json" => Ok(PatchType::StrategicMerge),
        "application/apply-patch+yaml" => Err(Status::unsupported_media_type(
            "skiff does not support server-side apply (application/apply-patch+yaml) yet; use client-side apply",
        )),
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
}

impl Patch {
    pub fn parse(kind: PatchType, bytes: &Bytes, validation: FieldValidation) -> Result<Patch, Status> {
        let strict = validation != FieldValidation::Ignore;
        let decoded = patch::decode_patch(kind, bytes, strict).map_err(patch_error)?;
        Ok(Patch { kind, decoded })
    }

    /// Applies the patch to an object of type `id`.
    pub fn apply(&self, id: TypeId, current: &Value) -> Result<Value, Status> {
        let value = &self.decoded.value;
        let result = match self.kind {
            PatchType::Json => patch::json_patch(current, value),
            PatchType::Merge => patch::merge_patch(current, value),
            PatchType::StrategicMerge => patch::strategic_merge(facts::schema(), id, current, value),
        };
        result.map_err(patch_error)
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
    part: Part,
) -> Result<Answer, Status> {
    exchange.output(false)?;
    let kind = match patch_type(exchange) {
        // Custom resources take fewer sorts of patches, and say which.
        Err(_) | Ok(PatchType::StrategicMerge) if resource.custom.is_some() => {
            return Err(Status::unsupported_media_type(CUSTOM_PATCHES));
        }
        kind => kind?,
    };
    let bytes = body::read(body).await?;
    let options = WriteOptions::read(&exchange.query, "PatchOptions")?;
    exchange.context.dry_run = options.dry_run;
    let patch = {
        let _stage = exchange.context.stage("decode");
        Patch::parse(kind, &bytes, options.field_validation)?
    };
    let gate = Admission::new(inner, exchange, resource, Some(&options.value));
    let (info, context) = (&exchange.info, &exchange.context);
    let mut transform = |current: Option<&Value>| {
        let current = current.ok_or_else(|| Status::not_found(&resource.group_resource, &info.name))?;
        let _stage = context.stage("patch");
        apply(context, resource, &patch, options.field_validation, current)
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
    exchange.made(&updated.object);
    respond::object(exchange, resource, StatusCode::OK, Stored::Value(updated.object))
}

/// The stored object after the patch, again in the stored version.
fn apply(
    context: &Context,
    resource: &Resource,
    patch: &Patch,
    validation: FieldValidation,
    stored: &Value,
) -> Result<Value, Status> {
    let mut current = stored.clone();
    resource.from_stored(&mut current);
    let patched = patch.apply(resource.facts.type_id, &current)?;
    let value = decode::patched(
        context,
        resource,
        validation,
        patched,
        patch.decoded.strict_errors.clone(),
    )?;
    let (old, new) = (object::name(stored), object::name(&value));
    if old != new {
        return Err(Status::bad_request(format!(
            "the name of the object ({new}) does not match the name on the URL ({old})"
        )));
    }
    Ok(value)
}
