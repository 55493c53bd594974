//! Subresources, and resources that are answered but never stored. Only this folder and `hooks` name kinds.

mod access_review;
mod binding;
mod component_status;
pub mod connect;
mod eviction;
mod kubelet;
mod logs;
mod proxy;
mod scale;
mod token;
mod token_review;

use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use http::header;
use serde_json::Value;
use skiff_meta::{GroupVersionKind, Status};
use skiff_registry::{Resource, WriteScope};

pub use kubelet::KubeletClient;

use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::negotiate::{self, Transform};
use crate::query::WriteOptions;
use crate::resource_paths::method_not_allowed;
use crate::server::Inner;
use crate::{decode, verbs};

pub async fn route(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Arc<Resource>,
    body: Body,
) -> Result<Answer, Status> {
    let name = exchange.info.subresource.clone();
    let Some(facts) = resource.facts.subresource(&name) else {
        return Err(Status::resource_not_found());
    };
    if exchange.info.parts.len() > 3 && name != "proxy" {
        return Err(Status::resource_not_found());
    }
    let mut verb = exchange.info.verb.clone();
    if exchange.info.name.is_empty() {
        verb = match verb.as_str() {
            "list" | "watch" => "get".to_string(),
            "deletecollection" => "delete".to_string(),
            _ => verb,
        };
        if facts.verbs.iter().any(|known| *known == verb) {
            return Err(Status::bad_request("name must be provided"));
        }
    }
    // A proxy passes on methods that have no verb of ours.
    let passed_on = name == "proxy" && exchange.parts.method == http::Method::OPTIONS;
    if !passed_on && !facts.verbs.iter().any(|known| *known == verb) {
        return Err(method_not_allowed());
    }
    if let Some(part) = resource.strategy.part(&name) {
        return match verb.as_str() {
            "get" => verbs::read::get(inner, exchange, resource).await,
            "update" => verbs::write::update(inner, exchange, resource, body, part).await,
            _ => verbs::patch::patch(inner, exchange, resource, body, part).await,
        };
    }
    match (name.as_str(), verb.as_str()) {
        ("status", "get") => {
            let table = matches!(exchange.output(false)?.transform, Transform::Table(_));
            if table && !resource.strategy.has_status_table() {
                return Err(Status::not_acceptable(negotiate::not_accepted()));
            }
            verbs::read::get(inner, exchange, resource).await
        }
        ("status", "update") => {
            verbs::write::update(inner, exchange, resource, body, WriteScope::Status).await
        }
        ("status", "patch") => verbs::patch::patch(inner, exchange, resource, body, WriteScope::Status).await,
        ("scale", "get") => scale::get(inner, exchange, resource).await,
        ("scale", "update") => scale::update(inner, exchange, resource, body).await,
        ("scale", "patch") => scale::patch(inner, exchange, resource, body).await,
        ("binding", "create") => binding::create(inner, exchange, resource, body).await,
        ("eviction", "create") => eviction::create(inner, exchange, resource, body).await,
        ("token", "create") => token::create(inner, exchange, resource, body).await,
        ("log", "get") => logs::get(inner, exchange, resource).await,
        ("exec" | "attach" | "portforward", _) => connect::pod_stream(inner, exchange, resource, body).await,
        ("proxy", _) => proxy::proxy(inner, exchange, resource, body).boxed().await,
        _ => Err(Status::not_built(format_args!(
            "{} of {}/{name}",
            verb, resource.plural
        ))),
    }
}

/// Resources without storage: reviews, bindings, component statuses.
pub async fn virtual_resource(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Arc<Resource>,
    body: Body,
) -> Result<Answer, Status> {
    match (resource.facts.group, resource.facts.plural) {
        ("", "bindings") => binding::create(inner, exchange, resource, body).await,
        ("", "componentstatuses") => component_status::read(inner, exchange, resource).await,
        ("authentication.k8s.io", "tokenreviews") => {
            token_review::review(inner, exchange, resource, body).await
        }
        ("authentication.k8s.io", "selfsubjectreviews") => {
            token_review::self_review(inner, exchange, resource, body).await
        }
        ("authorization.k8s.io", _) => access_review::create(inner, exchange, resource, body).await,
        _ => Err(Status::not_built(&resource.group_resource)),
    }
}

/// Reads the body of a create of some kind.
pub async fn read_body(
    exchange: &mut Exchange,
    expected: &GroupVersionKind,
    body: Body,
) -> Result<(Value, WriteOptions), Status> {
    read_body_as(exchange, expected, None, body).await
}

/// The same, also of an older version with the same fields.
pub async fn read_body_as(
    exchange: &mut Exchange,
    expected: &GroupVersionKind,
    older: Option<&GroupVersionKind>,
    body: Body,
) -> Result<(Value, WriteOptions), Status> {
    let output = exchange.output(false)?;
    let accept = exchange.header(header::ACCEPT);
    // What is not stored has no columns; who would also take the object gets that.
    if matches!(output.transform, Transform::Table(_))
        && accept.split(',').all(|clause| clause.contains("as=Table"))
    {
        return Err(Status::not_acceptable(negotiate::not_accepted()));
    }
    decode::format_of(exchange)?;
    let mut bytes: Bytes = body::read(body).await?;
    if let Some(older) = older
        && let Ok(mut value) = serde_json::from_slice::<Value>(&bytes)
        && value["apiVersion"] == older.api_version()
        && value["kind"] == older.kind.as_str()
    {
        value["apiVersion"] = Value::String(expected.api_version());
        bytes = value.to_string().into();
    }
    let options = WriteOptions::read(&exchange.query, "CreateOptions")?;
    exchange.context.dry_run = options.dry_run;
    let value = decode::typed(exchange, expected, options.field_validation, &bytes)?;
    decode::record_as(exchange, expected, &value);
    Ok((value, options))
}

/// COMPAT: also what is answered and never stored says who set what.
pub fn attribute(
    inner: &Inner,
    exchange: &Exchange,
    resource: &Resource,
    options: &WriteOptions,
    object: &mut Value,
) {
    let (id, manager) = (resource.facts.type_id, exchange.manager(options));
    inner
        .registry
        .attribute(&gvk_of(resource), id, "", &manager, object);
}

/// COMPAT: a review that is answered has metadata, though there is nothing in it.
pub fn show_metadata(review: &mut Value) {
    if let Some(review) = review.as_object_mut()
        && !review.get("metadata").is_some_and(Value::is_object)
    {
        review.insert("metadata".to_string(), serde_json::json!({}));
    }
}

pub fn gvk_of(resource: &Resource) -> GroupVersionKind {
    GroupVersionKind::new(resource.facts.group, resource.facts.version, resource.facts.kind)
}
