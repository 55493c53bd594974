//! Server-side apply: the configuration is merged into the stored object inside the update loop; a missing object
//! is created.

use std::sync::Arc;

use serde_json::Value;
use skiff_meta::Status;
use skiff_registry::fields::Tracking;
use skiff_registry::{Context, Resource, Write, WriteScope, fields, object};
use skiff_schema::decode::{Document, Format};

use super::write::check_name;
use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
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
            (Some(object), _) => resource.strategy.applied(&config.value, object)?,
            (None, Some(current)) => current.clone(),
            (None, None) => resource
                .strategy
                .applied(&config.value, resource.empty().clone())?,
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
            resource.strategy.check_new(&info.name)?;
            requester::fill(resource, &exchange.user, &mut value);
        }
        skiff_registry::ensure_namespace(resource, &info.namespace, &mut value)?;
        check_name(exchange, &value)?;
        Ok(value)
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
            allow_create,
            &mut transform,
        )
        .await?;
    respond::updated(exchange, resource, updated)
}
