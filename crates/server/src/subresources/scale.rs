//! `scale` of workloads: read, write and patch the replica count as an autoscaling/v1 Scale.

use std::sync::Arc;

use http::StatusCode;
use serde_json::Value;
use skiff_meta::{GroupVersionKind, Status};
use skiff_registry::subresources::scale::{apply_scale, scale_of};
use skiff_registry::{Part, ReadAt, Resource};

use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::decode;
use crate::gate::Admission;
use crate::query::WriteOptions;
use crate::respond;
use crate::server::Inner;
use crate::verbs::patch::{Patch, patch_type};
use crate::verbs::write::check_name;

fn gvk() -> GroupVersionKind {
    GroupVersionKind::new("autoscaling", "v1", "Scale")
}

pub async fn get(inner: &Arc<Inner>, exchange: &Exchange, resource: &Resource) -> Result<Answer, Status> {
    let output = exchange.output(false)?;
    let info = &exchange.info;
    let found = inner
        .registry
        .get(resource, &info.namespace, &info.name, ReadAt::Latest)
        .await?;
    let workload = found.ok_or_else(|| Status::not_found(&resource.group_resource, &info.name))?;
    respond::raw(exchange, &output, StatusCode::OK, &scale_of(&workload))
}

pub async fn update(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    exchange.output(false)?;
    decode::format_of(exchange)?;
    let bytes = body::read(body).await?;
    let options = WriteOptions::read(&exchange.query, "UpdateOptions")?;
    let scale = decode::typed(exchange, &gvk(), options.field_validation, &bytes)?;
    check_name(exchange, &scale)?;
    write(inner, exchange, resource, &options, &mut |workload| {
        apply_scale(workload, &scale)
    })
    .await
}

pub async fn patch(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    exchange.output(false)?;
    let kind = patch_type(exchange)?;
    let bytes = body::read(body).await?;
    let options = WriteOptions::read(&exchange.query, "PatchOptions")?;
    let patch = Patch::parse(kind, &bytes, options.field_validation)?;
    let Some(id) = skiff_api::facts::schema().by_gvk("autoscaling", "v1", "Scale") else {
        return Err(Status::internal("no type Scale"));
    };
    let mut apply = |workload: &Value| {
        let scale = patch.apply(id, &scale_of(workload))?;
        let scale = decode::check_type(id, scale)?;
        apply_scale(workload, &scale)
    };
    write(inner, exchange, resource, &options, &mut apply).await
}

async fn write(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    options: &WriteOptions,
    apply: &mut (dyn FnMut(&Value) -> Result<Value, Status> + Send),
) -> Result<Answer, Status> {
    exchange.context.dry_run = options.dry_run;
    let gate = Admission::new(inner, exchange, resource, Some(&options.value));
    let info = &exchange.info;
    let mut transform = |current: Option<&Value>| match current {
        Some(workload) => apply(workload),
        None => Err(Status::not_found(&resource.group_resource, &info.name)),
    };
    let updated = inner
        .registry
        .update(
            &exchange.context,
            resource,
            &info.namespace,
            &info.name,
            Part::Main,
            false,
            &mut transform,
            &gate,
        )
        .await?;
    exchange.made(&updated.object);
    respond::raw(
        exchange,
        &exchange.output(false)?,
        StatusCode::OK,
        &scale_of(&updated.object),
    )
}
