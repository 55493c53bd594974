//! Server-side apply: the configuration is merged into the stored object inside the update loop; a missing object
//! is created.

use std::sync::Arc;

use serde_json::Value;
use skiff_meta::Status;
use skiff_registry::fields::Tracking;
use skiff_registry::{Context, Resource, WriteScope, fields, object};
use skiff_schema::decode::{self, Document, Format};

use super::write::check_name;
use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::crd;
use crate::gate::Admission;
use crate::hooks::requester;
use crate::query::{FieldValidation, WriteOptions};
use crate::respond;
use crate::server::Inner;

/// An applied configuration, and what a strict reader says about it.
pub struct Config {
    pub value: Value,
    duplicates: Option<String>,
}

impl Config {
    /// Reads YAML, of which JSON is a part.
    pub fn parse(bytes: &[u8]) -> Result<Config, Status> {
        let refuse = |error: String| Status::bad_request(format!("error decoding YAML: {error}"));
        let document = Document::parse(bytes, Format::Yaml)
            .map_err(|error| refuse(format!("error converting YAML to JSON: {error}")))?;
        let mut duplicates = None;
        let value = document.untyped_with(|found| duplicates = found);
        let value = match value {
            Value::Object(_) => value,
            Value::Null => Value::Object(serde_json::Map::new()),
            other => {
                let found = match other {
                    Value::Array(_) => "array",
                    Value::String(_) => "string",
                    Value::Bool(_) => "bool",
                    _ => "number",
                };
                return Err(refuse(format!(
                    "error unmarshaling JSON: while decoding JSON: json: cannot unmarshal {found} into Go value of type map[string]interface {{}}"
                )));
            }
        };
        Ok(Config { value, duplicates })
    }

    /// Says what is set twice, once the apply itself went well.
    pub fn report_duplicates(&self, context: &Context, validation: FieldValidation) -> Result<(), Status> {
        let Some(found) = &self.duplicates else {
            return Ok(());
        };
        let text = format!("error converting YAML to JSON: {found}");
        match validation {
            FieldValidation::Ignore => {}
            // The first line says only where it was found.
            FieldValidation::Warn => text
                .lines()
                .skip(1)
                .for_each(|line| context.warn(line.trim().to_string())),
            FieldValidation::Strict => {
                return Err(Status::bad_request(format!("error strict decoding YAML: {text}")));
            }
        }
        Ok(())
    }
}

pub async fn apply(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
    part: WriteScope,
) -> Result<Answer, Status> {
    exchange.output(false)?;
    let bytes = body::read(body).await?;
    if let Some(trail) = &exchange.trail {
        trail.request_patch(&bytes);
    }
    let options = WriteOptions::of_apply(&exchange.query)?;
    exchange.context.dry_run = options.dry_run;
    // The apply itself says whose fields are whose.
    exchange.context.tracking = Tracking::Off;
    let config = {
        let _stage = exchange.context.stage("decode");
        Config::parse(&bytes)?
    };
    let gate = Admission::new(inner, exchange, resource, Some(&options.value));
    let (info, context) = (&exchange.info, &exchange.context);
    let allow_create = matches!(part, WriteScope::Main);
    let mut transform = |current: Option<&Value>| {
        let _stage = context.stage("patch");
        let outcome = inner.registry.apply_fields(
            resource,
            &info.subresource,
            current,
            &config.value,
            &options.field_manager,
            options.force,
        )?;
        let mut value = match (outcome.object, current) {
            (Some(object), _) => checked(resource, &config.value, object)?,
            (None, Some(current)) => current.clone(),
            (None, None) => checked(resource, &config.value, resource.empty().clone())?,
        };
        fields::put(&mut value, outcome.managed);
        config.report_duplicates(context, options.field_validation)?;
        if current.is_none() {
            let uid = object::uid(&value);
            if !uid.is_empty() {
                return Err(Status::conflict(
                    &resource.group_resource,
                    &info.name,
                    format_args!(
                        "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                    ),
                ));
            }
            inner.authorize_verb(exchange, "create")?;
            crd::check_create(resource, &info.name)?;
            requester::fill(resource, &exchange.user, &mut value);
        }
        skiff_registry::ensure_namespace(resource, &info.namespace, &mut value)?;
        check_name(exchange, &value)?;
        Ok(value)
    };
    let updated = inner
        .registry
        .update(
            context,
            resource,
            &info.namespace,
            &info.name,
            part,
            allow_create,
            &mut transform,
            &gate,
        )
        .await?;
    respond::updated(exchange, resource, updated)
}

/// The outcome of an apply as an object of its type: defaulted, and in the stored version.
fn checked(resource: &Resource, config: &Value, object: Value) -> Result<Value, Status> {
    if let Some(custom) = crd::version_of(resource) {
        let mut value = crd::decode::applied(resource, custom, object)?;
        crate::decode::default_and_convert(resource, &mut value);
        return Ok(value);
    }
    let checked = decode::check(skiff_api::facts::schema(), resource.facts.type_id, object);
    let mut value = checked
        .map_err(|error| {
            let facts = resource.facts;
            let kind = format!("{}/{}, Kind={}", facts.group, facts.version, facts.kind);
            let error = super::patch::restore_error(&error.to_string());
            Status::failure(
                500,
                "",
                format!(
                    "failed to convert new object ({}/{}; {kind}) to proper version: unable to convert unstructured object to {kind}: {error}",
                    object::namespace(config),
                    object::name(config),
                ),
            )
        })?
        .value;
    object::put(&mut value, &["kind"], Value::String(resource.kind.clone()));
    object::put(
        &mut value,
        &["apiVersion"],
        Value::String(resource.api_version.clone()),
    );
    crate::decode::default_and_convert(resource, &mut value);
    Ok(value)
}
