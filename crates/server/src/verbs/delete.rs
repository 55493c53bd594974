//! Delete and deletecollection.

use std::sync::Arc;

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use http::StatusCode;
use serde_json::Value;
use skiff_meta::Status;
use skiff_registry::{
    Context, DeleteOptions, Deleted, Entry, Resource, encode, is_not_found, list_error, object,
};

use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::decode;
use crate::gate::Admission;
use crate::query;
use crate::respond::{self, Stored};
use crate::server::Inner;
use crate::verbs::read;

pub async fn delete(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    exchange.output(false)?;
    let (value, options) = options(exchange, body).await?;
    exchange.context.dry_run = options.dry_run;
    if let Some(warning) = resource.orphan_warning
        && ["propagationPolicy", "orphanDependents"]
            .iter()
            .all(|field| value.get(field).is_none_or(Value::is_null))
    {
        exchange.context.warn(warning.to_string());
    }
    if options.ignore_read_errors {
        return delete_unreadable(inner, exchange, resource, &value).await;
    }
    let mut deleted = {
        let gate = Admission::new(inner, exchange, resource, Some(&value));
        let info = &exchange.info;
        inner
            .registry
            .delete(
                &exchange.context,
                resource,
                &info.namespace,
                &info.name,
                &options,
                &gate,
            )
            .await?
    };
    exchange.made(&deleted.object);
    resource.strategy.serve_one(&mut deleted.object).await?;
    answer(exchange, resource, deleted, &options)
}

/// Deletes an object that cannot be read, for those who may. It answers with a `Status`: there is no object to show.
async fn delete_unreadable(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    value: &Value,
) -> Result<Answer, Status> {
    exchange
        .context
        .annotate("apiserver.k8s.io/unsafe-delete-ignore-read-error", String::new());
    let info = &exchange.info;
    let verb = "unsafe-delete-ignore-read-errors";
    let decision = inner.decide_verb(exchange, verb).await;
    if !decision.allowed {
        let why = format!("not permitted to do {verb:?}, reason: {}", decision.reason);
        return Err(Status::forbidden(&resource.group_resource, &info.name, why));
    }
    let gate = Admission::new(inner, exchange, resource, Some(value));
    let deletion =
        inner
            .registry
            .delete_unreadable(&exchange.context, resource, &info.namespace, &info.name, &gate);
    deletion.await?;
    let mut status = Status::deleted(&resource.group_resource, &info.name, "");
    if let Some(details) = status.details.as_mut() {
        // COMPAT: where there is no object upstream names the kind, and no group.
        details.group.clear();
        details.kind.clone_from(&resource.kind);
    }
    respond::raw(
        exchange,
        &exchange.output(false)?,
        StatusCode::OK,
        &status.to_value(),
    )
}

fn answer(
    exchange: &Exchange,
    resource: &Resource,
    deleted: Deleted,
    options: &DeleteOptions,
) -> Result<Answer, Status> {
    let accepted = !deleted.gone && options.orphan_dependents == Some(false);
    let code = if accepted {
        StatusCode::ACCEPTED
    } else {
        StatusCode::OK
    };
    if resource.returns_deleted || !(deleted.gone || deleted.pending) {
        return respond::object(exchange, resource, code, Stored::Value(deleted.object));
    }
    let object = &deleted.object;
    let status = Status::deleted(
        &resource.group_resource,
        object::name(object),
        object::uid(object),
    );
    respond::raw(exchange, &exchange.output(false)?, code, &status.to_value())
}

/// DeleteOptions from the body, or from the query where there is no body.
async fn options(exchange: &Exchange, body: Body) -> Result<(Value, DeleteOptions), Status> {
    let bytes = body::read(body).await?;
    let value = if bytes.is_empty() {
        query::delete_options(&exchange.query)?
    } else {
        let value = decode::delete_options(exchange, &bytes)?;
        if let Some(trail) = &exchange.trail {
            let mut shown = value.clone();
            object::put(&mut shown, &["kind"], "DeleteOptions".into());
            // COMPAT: upstream records the options as it holds them, in no version that a client could speak.
            object::put(&mut shown, &["apiVersion"], "meta.k8s.io/__internal".into());
            trail.request_object(&shown);
        }
        value
    };
    let options = DeleteOptions::from_value(&value)?;
    Ok((value, options))
}

/// Deletes an object of a list, if it is still there.
async fn delete_listed(
    inner: &Inner,
    context: &Context,
    resource: &Resource,
    entry: Arc<Entry>,
    options: &DeleteOptions,
    gate: &Admission<'_>,
) -> Result<(), Status> {
    let (namespace, name) = (&*entry.head.namespace, &*entry.head.name);
    let deleted = inner
        .registry
        .delete(context, resource, namespace, name, options, gate)
        .await;
    match deleted {
        Err(status) if !is_not_found(&status) => Err(status),
        _ => Ok(()),
    }
}

/// Deletions under way at a time.
const AT_ONCE: usize = 128;

/// Deletes what a list would return, each for itself. Not atomic, as upstream.
pub async fn delete_collection(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    let output = exchange.output(false)?;
    let list = read::list_options(exchange, resource, false)?;
    let (value, options) = options(exchange, body).await?;
    exchange.context.dry_run = options.dry_run;
    if let Some(warning) = resource.orphan_warning
        && ["propagationPolicy", "orphanDependents"]
            .iter()
            .all(|field| value.get(field).is_none_or(Value::is_null))
    {
        exchange.context.warn(warning.to_string());
    }
    options.refuse_ignoring_read_errors()?;
    let (listed, served) = read::listed(inner, resource, read::cache_list(exchange, &list)?).await?;
    let listed = listed.map_err(|error| list_error(&resource.group_resource, error))?;
    {
        let gate = Admission::new(inner, exchange, resource, Some(&value));
        // Many at a time, so that the store commits them together.
        let mut waiting = 0;
        let mut running = FuturesUnordered::new();
        loop {
            while running.len() < AT_ONCE
                && let Some(entry) = listed.items.get(waiting)
            {
                waiting += 1;
                let deletion =
                    delete_listed(inner, &exchange.context, resource, entry.clone(), &options, &gate);
                running.push(deletion.boxed());
            }
            match skiff_registry::together(running.next()).await {
                Some(Ok(())) => {}
                Some(Err(status)) => return Err(status),
                None => break,
            }
        }
    }
    if let Some(last) = listed.items.last() {
        exchange.made(&encode::decode(&last.bytes)?);
    }
    read::answer_list(exchange, resource, &output, listed, served).await
}
