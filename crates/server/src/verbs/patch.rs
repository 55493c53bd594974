//! Patch: JSON patch, merge patch and strategic merge patch (server-side apply is in `apply.rs`), applied to the served version of the
//! stored object inside the update loop, so that a concurrent write only makes it run again.

use std::sync::Arc;

use bytes::Bytes;
use http::header;
use serde_json::Value;
use skiff_api::facts;
use skiff_meta::{GroupKind, Status, field};
use skiff_registry::body::{Patched, restore_error};
use skiff_registry::{Resource, Write, WriteScope};
use skiff_schema::TypeId;
use skiff_schema::patch::{self, DecodedPatch, PatchError, PatchType};

use super::write::check_name;
use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::gate::Admission;
use crate::negotiate;
use crate::query::{FieldValidation, WriteOptions};
use crate::respond;
use crate::server::Inner;

/// Whether the request is a server-side apply.
pub fn is_apply(exchange: &Exchange) -> bool {
    negotiate::media_type(exchange.header(header::CONTENT_TYPE)) == "application/apply-patch+yaml"
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
        let (shown, error) = if self.is_strategic() {
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

    /// Whether the patch was merged into the type itself.
    pub fn is_strategic(&self) -> bool {
        self.kind == PatchType::StrategicMerge
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
    let media_type = negotiate::media_type(exchange.header(header::CONTENT_TYPE));
    let kind = resource.strategy.patch_type(media_type)?;
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
            &Write {
                context,
                resource,
                namespace: &info.namespace,
                gate: &gate,
            },
            &info.name,
            part,
            false,
            &mut transform,
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
    let mut current = stored.clone();
    resource.from_stored(&mut current);
    let id = resource.facts.type_id;
    let value = resource.strategy.patched(Patched {
        context: &exchange.context,
        value: patch.apply(id, &current)?,
        strict: patch.strict_errors(),
        validation,
        strategic: patch.is_strategic(),
        status: exchange.info.subresource == "status",
        refuse: &|error| patch.refuse(id, &current, error),
    })?;
    check_name(exchange, &value)?;
    Ok(value)
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
}
