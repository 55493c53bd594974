//! `scale` of workloads: read, write and patch the replica count as an autoscaling/v1 Scale.

use std::sync::Arc;

use async_trait::async_trait;
use http::{StatusCode, header};
use serde_json::{Value, json};
use skiff_meta::{GroupVersionKind, Status};
use skiff_registry::body::{Patched, check_kind, patch_type, patched_type};
use skiff_registry::fields::Tracking;
use skiff_registry::subresources::scale::{ScaleWrite, check_uid, owned_scale, scale_type};
use skiff_registry::{Context, Gate, ReadAt, Resource, Write, WriteScope, object};

use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::decode;
use crate::gate::Admission;
use crate::negotiate::{self, Transform};
use crate::query::WriteOptions;
use crate::respond;
use crate::server::Inner;
use crate::table::{self, IncludeObject};
use crate::verbs::apply::Config;
use crate::verbs::patch::{Patch, is_apply};
use crate::verbs::write::{check_name, check_path};

fn gvk() -> GroupVersionKind {
    GroupVersionKind::new("autoscaling", "v1", "Scale")
}

/// COMPAT: upstream still knows the versions that Scale had in other groups, though nothing is served in them.
fn check_older(bytes: &[u8]) -> Result<(), Status> {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else {
        return Ok(());
    };
    match (value["kind"].as_str(), value["apiVersion"].as_str()) {
        (Some("Scale"), Some(older @ ("extensions/v1beta1" | "apps/v1beta1" | "apps/v1beta2"))) => {
            Err(Status::bad_request(format!(
                "the API version in the data ({older}) does not match the expected API version (autoscaling/v1)"
            )))
        }
        _ => Ok(()),
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
    resource.strategy.serve_one(&mut workload).await?;
    let scale = resource.strategy.scale(&workload)?;
    if let Transform::Table(version) = &output.transform {
        let include = IncludeObject::read(&exchange.query)?;
        let table = table_of(resource, &scale, version, include);
        return respond::raw(exchange, &output, StatusCode::OK, &table);
    }
    if let Transform::PartialObjectMetadata(version) = &output.transform {
        let partial = table::partial(&scale, &format!("meta.k8s.io/{version}"), None);
        return respond::raw(exchange, &output, StatusCode::OK, &partial);
    }
    respond::raw(exchange, &output, StatusCode::OK, &scale)
}

/// What `kubectl get --subresource=scale` prints.
fn table_of(resource: &Resource, scale: &Value, version: &str, include: IncludeObject) -> Value {
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
        IncludeObject::Metadata => table::partial(scale, &format!("meta.k8s.io/{version}"), None),
        IncludeObject::Object => scale.clone(),
    };
    let metadata = json!({"resourceVersion": object::resource_version(scale)});
    table::table(
        version,
        metadata,
        resource.strategy.scale_columns(),
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
    check_older(&bytes)?;
    let scale = decode::typed(exchange, &gvk(), options.field_validation, &bytes)?;
    decode::record_as(exchange, &gvk(), &scale);
    check_name(exchange, &scale)?;
    let (registry, manager) = (&inner.registry, exchange.manager(&options));
    write(inner, exchange, resource, &options, &mut |_, workload| {
        let write = ScaleWrite::Update {
            scale: scale.clone(),
            manager: &manager,
        };
        registry.write_scale(resource, workload, write)
    })
    .await
}

pub async fn patch(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    if is_apply(exchange) {
        return apply(inner, exchange, resource, body).await;
    }
    exchange.output(false)?;
    let kind = patch_type(negotiate::media_type(exchange.header(header::CONTENT_TYPE)))?;
    let bytes = body::read(body).await?;
    if let Some(trail) = &exchange.trail {
        trail.request_patch(&bytes);
    }
    let options = WriteOptions::read(&exchange.query, "PatchOptions")?;
    let patch = Patch::parse(kind, &bytes, options.field_validation)?;
    let id = scale_type()?;
    let (registry, manager) = (&inner.registry, exchange.manager(&options));
    let info = exchange.info.clone();
    let mut change = |context: &Context, workload: &Value| {
        let current = owned_scale(resource, workload)?;
        let scale = patch.apply(id, &current)?;
        let refuse = |error: String| patch.refuse(id, &current, error);
        if !patch.is_strategic() {
            check_kind(&gvk(), &scale).map_err(refuse)?;
        }
        let patched = Patched {
            context,
            value: scale,
            strict: patch.strict_errors(),
            validation: options.field_validation,
            strategic: patch.is_strategic(),
            status: false,
            refuse: &refuse,
        };
        let scale = patched_type(id, patched)?;
        check_path(&info, &scale)?;
        check_uid(resource, workload, &scale)?;
        let write = ScaleWrite::Update {
            scale,
            manager: &manager,
        };
        registry.write_scale(resource, workload, write)
    };
    write(inner, exchange, resource, &options, &mut change).await
}

async fn apply(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    exchange.output(false)?;
    let bytes = body::read(body).await?;
    if let Some(trail) = &exchange.trail {
        trail.request_patch(&bytes);
    }
    let options = WriteOptions::of_apply(&exchange.query)?;
    let config = Config::parse(&bytes)?;
    if !object::name(&config.value).is_empty() {
        check_name(exchange, &config.value)?;
    }
    let registry = &inner.registry;
    let mut change = |_: &Context, workload: &Value| {
        check_uid(resource, workload, &config.value)?;
        let write = ScaleWrite::Apply {
            config: &config.value,
            manager: &options.field_manager,
            force: options.force,
        };
        registry.write_scale(resource, workload, write)
    };
    write(inner, exchange, resource, &options, &mut change).await
}

/// Admission sees the Scale, of which only the replicas can change.
struct ScaleGate<'a> {
    admission: Admission<'a>,
    resource: &'a Resource,
}

impl ScaleGate<'_> {
    fn scales(&self, new: Option<&Value>, old: Option<&Value>) -> Result<[Option<Value>; 2], Status> {
        let scale = |workload: &Value| self.resource.strategy.scale(workload);
        Ok([new.map(scale).transpose()?, old.map(scale).transpose()?])
    }
}

#[async_trait]
impl Gate for ScaleGate<'_> {
    async fn admit(&self, object: Option<&mut Value>, old: Option<&Value>) -> Result<(), Status> {
        let [mut new, old] = self.scales(object.as_deref(), old)?;
        let before = new.clone();
        self.admission.admit(new.as_mut(), old.as_ref()).await?;
        if let (Some(workload), Some(scale)) = (object, new.filter(|new| before.as_ref() != Some(new))) {
            *workload = self.resource.strategy.put_scale(workload, &scale)?;
        }
        Ok(())
    }

    async fn validate(&self, object: Option<&mut Value>, old: Option<&Value>) -> Result<(), Status> {
        let [mut new, old] = self.scales(object.as_deref(), old)?;
        self.admission.validate(new.as_mut(), old.as_ref()).await
    }
}

async fn write(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    options: &WriteOptions,
    apply: &mut (dyn FnMut(&Context, &Value) -> Result<Value, Status> + Send),
) -> Result<Answer, Status> {
    exchange.context.dry_run = options.dry_run;
    // The owners come with the scale.
    exchange.context.tracking = Tracking::Off;
    exchange.context.uid_is_precondition = true;
    let gate = ScaleGate {
        admission: Admission::new(inner, exchange, resource, Some(&options.value)),
        resource,
    };
    let info = &exchange.info;
    let mut transform = |current: Option<&Value>| match current {
        Some(workload) => apply(&exchange.context, workload),
        None => Err(Status::not_found(&resource.group_resource, &info.name)),
    };
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
            WriteScope::Main,
            false,
            &mut transform,
        )
        .await?;
    exchange.made(&updated.object);
    respond::raw(
        exchange,
        &exchange.output(false)?,
        StatusCode::OK,
        &resource.strategy.scale(&updated.object)?,
    )
}
