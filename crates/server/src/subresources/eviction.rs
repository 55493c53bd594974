//! `pods/eviction`: a delete that asks the pod's disruption budget first.

use std::sync::Arc;

use http::StatusCode;
use serde_json::json;
use skiff_meta::{GroupVersionKind, Status};
use skiff_registry::{DeleteOptions, Resource, object};

use super::read_body_as;
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
    let gvk = GroupVersionKind::new("policy", "v1", "Eviction");
    // COMPAT: an eviction of the older version is still one; both have the same fields.
    let older = GroupVersionKind::new("policy", "v1beta1", "Eviction");
    let (mut eviction, given_options) = read_body_as(exchange, &gvk, Some(&older), body).await?;
    let name = exchange.info.name.clone();
    if object::name(&eviction) != name {
        return Err(Status::bad_request(
            "name in URL does not match name in Eviction object",
        ));
    }
    let value = eviction
        .get("deleteOptions")
        .cloned()
        .unwrap_or_else(|| json!({}));
    let options = DeleteOptions::from_value(&value)?;
    exchange.context.dry_run |= options.dry_run;
    let namespace = exchange.info.namespace.clone();
    Admission::new(inner, exchange, resource, Some(&given_options.value))
        .action(&mut eviction)
        .await?;
    let deleted = inner
        .registry
        .evict(&exchange.context, resource, &namespace, &name, &options)
        .await?;
    exchange.made(&deleted.object);
    respond::raw(
        exchange,
        &exchange.output(false)?,
        StatusCode::CREATED,
        &respond::success(201),
    )
}
