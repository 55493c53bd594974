//! `pods/binding` and the older `bindings`: the scheduler's write.

use std::sync::Arc;

use http::StatusCode;
use serde_json::Value;
use skiff_meta::{GroupVersionKind, Status, field, time};
use skiff_registry::subresources::binding::{bind, target};
use skiff_registry::{Open, Resource, Write, WriteScope, object};

use super::read_body;
use crate::body::{Answer, Body};
use crate::chain::Exchange;
use crate::gate::Admission;
use crate::respond;
use crate::server::Inner;

pub async fn create(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    let (mut binding, options) =
        read_body(exchange, &GroupVersionKind::new("", "v1", "Binding"), body).await?;
    let name = object::name(&binding).to_string();
    if !exchange.info.name.is_empty() && name != exchange.info.name {
        return Err(Status::bad_request(
            "name in URL does not match name in Binding object",
        ));
    }
    let node = target(&binding)?;
    let pods: Arc<Resource> = inner
        .registry
        .resources
        .get("", "v1", "pods")
        .cloned()
        .ok_or_else(|| Status::internal("no resource pods"))?;
    let namespace = exchange.info.namespace.clone();
    let given = object::namespace(&binding);
    if !given.is_empty() && given != namespace {
        return Err(Status::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    let now = time::format_seconds(inner.registry.now());
    let version = object::resource_version(&binding).to_string();
    Admission::new(inner, exchange, resource, Some(&options.value))
        .action(&mut binding)
        .await?;
    let mut transform = |pod: Option<&Value>| {
        let pod = pod.ok_or_else(|| Status::not_found(&pods.group_resource, &name))?;
        let mut bound = bind(pod, &binding, &node, &now)?;
        object::set(&mut bound, "resourceVersion", version.as_str());
        Ok(bound)
    };
    let part = WriteScope::Other {
        prepare: |_, _| {},
        validate: no_errors,
    };
    let updated = inner
        .registry
        .update(
            &Write {
                context: &exchange.context,
                resource: &pods,
                namespace: &namespace,
                gate: &Open,
            },
            &name,
            part,
            false,
            &mut transform,
        )
        .await?;
    exchange.made(&updated.object);
    respond::raw(
        exchange,
        &exchange.output(false)?,
        StatusCode::CREATED,
        &respond::success(201),
    )
}

fn no_errors(_: &Value, _: &Value) -> Vec<field::Error> {
    Vec::new()
}
