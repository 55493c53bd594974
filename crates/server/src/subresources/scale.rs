//! `scale` of workloads: read, write and patch the replica count as an autoscaling/v1 Scale.

use std::sync::Arc;

use http::StatusCode;
use serde_json::{Value, json};
use skiff_meta::{GroupVersionKind, Status};
use skiff_registry::subresources::scale::{apply_scale, scale_of};
use skiff_registry::{Part, ReadAt, Resource, object};

use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::crd;
use crate::decode;
use crate::gate::Admission;
use crate::negotiate::Transform;
use crate::query::WriteOptions;
use crate::respond;
use crate::server::Inner;
use crate::table::{self, IncludeObject};
use crate::verbs::patch::{Patch, patch_type};
use crate::verbs::write::check_name;

fn gvk() -> GroupVersionKind {
    GroupVersionKind::new("autoscaling", "v1", "Scale")
}

fn scale_in(resource: &Resource, workload: &Value) -> Result<Value, Status> {
    match crd::version_of(resource) {
        Some(custom) => crd::scale::of(custom, workload),
        None => Ok(scale_of(workload)),
    }
}

fn apply_in(resource: &Resource, workload: &Value, scale: &Value) -> Result<Value, Status> {
    match crd::version_of(resource) {
        Some(custom) => crd::scale::apply(custom, workload, scale),
        None => apply_scale(workload, scale),
    }
}

pub async fn get(inner: &Arc<Inner>, exchange: &Exchange, resource: &Resource) -> Result<Answer, Status> {
    let output = exchange.output(false)?;
    let info = &exchange.info;
    let found = inner
        .registry
        .get(resource, &info.namespace, &info.name, ReadAt::Latest)
        .await?;
    let mut workload = found.ok_or_else(|| Status::not_found(&resource.group_resource, &info.name))?;
    resource.serve_one(&mut workload).await?;
    let scale = scale_in(resource, &workload)?;
    if let Transform::Table(version) = &output.transform {
        let include = IncludeObject::read(&exchange.query)?;
        let table = table_of(resource, &scale, version, include);
        return respond::raw(exchange, &output, StatusCode::OK, &table);
    }
    respond::raw(exchange, &output, StatusCode::OK, &scale)
}

/// What `kubectl get --subresource=scale` prints.
fn table_of(resource: &Resource, scale: &Value, version: &str, include: IncludeObject) -> Value {
    let column = |name: &str, kind: &str| json!({"name": name, "type": kind, "format": "", "description": "", "priority": 0});
    let columns = match crd::version_of(resource) {
        Some(custom) => crd::scale::columns(custom),
        None => json!([
            column("Name", "string"),
            column("Desired", "integer"),
            column("Available", "integer"),
            column("Age", "string")
        ]),
    };
    let now = jiff::Timestamp::now().as_second();
    let count = |part: &str| scale[part]["replicas"].as_i64().unwrap_or(0);
    let cells = json!([
        object::name(scale),
        count("spec"),
        count("status"),
        skiff_api::row::age(scale, now)
    ]);
    let shown = match include {
        IncludeObject::None => Value::Null,
        IncludeObject::Metadata => table::partial(scale, &format!("meta.k8s.io/{version}")),
        IncludeObject::Object => scale.clone(),
    };
    let metadata = json!({"resourceVersion": object::resource_version(scale)});
    table::table(
        version,
        metadata,
        columns,
        vec![json!({"cells": cells, "object": shown})],
    )
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
        apply_in(resource, workload, &scale)
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
        let scale = patch.apply(id, &scale_in(resource, workload)?)?;
        let scale = decode::check_type(id, scale)?;
        apply_in(resource, workload, &scale)
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
        &scale_in(resource, &updated.object)?,
    )
}
