//! Create and update.

use std::sync::Arc;

use http::StatusCode;
use serde_json::Value;
use skiff_meta::Status;
use skiff_registry::{Resource, Write, WriteScope, object};

use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::decode;
use crate::gate::Admission;
use crate::hooks::requester;
use crate::query::WriteOptions;
use crate::request_info::RequestInfo;
use crate::respond::{self, Stored};
use crate::server::Inner;

pub async fn create(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    exchange.output(false)?;
    decode::format_of(exchange)?;
    let bytes = body::read(body).await?;
    let options = WriteOptions::read(&exchange.query, "CreateOptions")?;
    exchange.write_as(&options);
    let mut value = decode::object(exchange, resource, options.field_validation, &bytes)?;
    // A new object has no system metadata, whatever the client sends.
    let metadata = object::metadata_mut(&mut value);
    for field in [
        "creationTimestamp",
        "uid",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "selfLink",
    ] {
        metadata.remove(field);
    }
    resource.strategy.check_new(object::name(&value))?;
    requester::fill(resource, &exchange.user, &mut value);
    let namespace = exchange.info.namespace.clone();
    let gate = Admission::new(inner, exchange, resource, Some(&options.value));
    let stored = inner
        .registry
        .create(
            &Write {
                context: &exchange.context,
                resource,
                namespace: &namespace,
                gate: &gate,
            },
            value,
        )
        .await?;
    exchange.made(&stored);
    respond::object(exchange, resource, StatusCode::CREATED, Stored::Value(stored))
}

pub async fn update(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
    part: WriteScope,
) -> Result<Answer, Status> {
    exchange.output(false)?;
    decode::format_of(exchange)?;
    let bytes = body::read(body).await?;
    let options = WriteOptions::read(&exchange.query, "UpdateOptions")?;
    exchange.write_as(&options);
    exchange.context.uid_is_precondition = true;
    let value = decode::object(exchange, resource, options.field_validation, &bytes)?;
    check_name(exchange, &value)?;
    let info = &exchange.info;
    let gate = Admission::new(inner, exchange, resource, Some(&options.value));
    let mut transform = |current: Option<&Value>| {
        if current.is_none() {
            inner.authorize_verb(exchange, "create")?;
        }
        Ok(value.clone())
    };
    // COMPAT: the status of what a PUT may create may be put before there is anything.
    let allow_create =
        resource.strategy.allows_create_on_update() && matches!(part, WriteScope::Main | WriteScope::Status);
    let updated = inner
        .registry
        .update(
            &Write {
                context: &exchange.context,
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

/// The body must be about the object that the path names.
pub fn check_name(exchange: &Exchange, value: &Value) -> Result<(), Status> {
    check_path(&exchange.info, value)
}

pub fn check_path(info: &RequestInfo, value: &Value) -> Result<(), Status> {
    let (name, namespace) = (object::name(value), object::namespace(value));
    if !info.namespace.is_empty() && !namespace.is_empty() && namespace != info.namespace {
        return Err(Status::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    if name.is_empty() {
        return Err(Status::bad_request(format!(
            "the name of the object ({} based on URL) was undeterminable: name must be provided",
            info.name
        )));
    }
    if name != info.name {
        return Err(Status::bad_request(format!(
            "the name of the object ({name}) does not match the name on the URL ({})",
            info.name
        )));
    }
    Ok(())
}
