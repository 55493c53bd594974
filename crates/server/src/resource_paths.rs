//! From a resource path to the verb that serves it.

use std::sync::Arc;

use skiff_meta::Status;
use skiff_registry::{Resource, Route, Unrouted};

use crate::body::{Answer, Body, not_found};
use crate::chain::{Exchange, not_routed};
use crate::metrics::Served;
use crate::request_info::RequestInfo;
use crate::server::Inner;
use crate::{negotiate, subresources, verbs};

pub async fn route(inner: &Arc<Inner>, exchange: &mut Exchange, body: Body) -> Result<Answer, Status> {
    let info = &exchange.info;
    let resources = &inner.registry.resources;
    // The old way to a proxy is gone, but authorization still knows it.
    if info.verb == "proxy" && resources.has_group(&info.group) {
        return Err(Status::resource_not_found());
    }
    let Some(resource) = resources.find(&info.group, &info.version, &info.resource) else {
        if resources.has_group(&info.group) {
            return Err(Status::resource_not_found());
        }
        return Ok(not_found());
    };
    exchange.untyped = !resource.strategy.wire().typed;
    match resource
        .strategy
        .check_route(&resource, &route_of(&exchange.info))
    {
        Ok(()) => {}
        Err(Unrouted::NoPath) => return Ok(not_found()),
        Err(Unrouted::Refused(status)) => return Err(status),
    }
    exchange.served = Served::of(resource.facts, &exchange.info.subresource);
    // A cluster-scoped resource has no namespace, though its own path may look like one.
    if !resource.namespaced {
        exchange.info.namespace.clear();
    }
    if exchange.info.subresource.is_empty() {
        main_resource(inner, exchange, &resource, body).await
    } else {
        subresources::route(inner, exchange, &resource, body).await
    }
}

fn route_of(info: &RequestInfo) -> Route<'_> {
    Route {
        verb: &info.verb,
        namespace: &info.namespace,
        unnamed_namespace: info.unnamed_namespace,
        name: &info.name,
        subresource: &info.subresource,
        parts: &info.parts,
    }
}

async fn main_resource(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Arc<Resource>,
    body: Body,
) -> Result<Answer, Status> {
    let verb = exchange.info.verb.clone();
    let named = exchange.info.parts.len() >= 2;
    if named
        && !["get", "update", "patch", "delete"]
            .iter()
            .any(|verb| resource.facts.can(verb))
    {
        return Err(Status::resource_not_found());
    }
    let across_namespaces = resource.namespaced && exchange.info.namespace.is_empty();
    let fits = match verb.as_str() {
        // Only reading works across namespaces; and a POST to a name, or a PUT to a collection, is no route.
        "create" => {
            let post_to_name = resource.strategy.wire().post_to_name;
            !across_namespaces && (exchange.info.parts.len() == 1 || post_to_name)
        }
        "update" | "patch" => !exchange.info.name.is_empty(),
        "deletecollection" => !across_namespaces,
        "watch" if exchange.info.watch_prefix => exchange.parts.method == http::Method::GET,
        _ => true,
    };
    let unwatchable = verb == "watch" && !resource.facts.can(&verb) && resource.facts.can("list");
    let head = exchange.parts.method == http::Method::HEAD;
    if !fits || head || !(resource.facts.can(&verb) || unwatchable) {
        return Err(method_not_allowed());
    }
    if named && matches!(verb.as_str(), "get" | "patch" | "delete") {
        check_segment(&exchange.info.name)?;
    }
    if let Some(warning) = resource.strategy.deprecation() {
        // Who gets no answer from the router gets no warning.
        if !exchange.untyped {
            let listing = matches!(verb.as_str(), "list" | "watch");
            negotiate::routed(exchange.header(http::header::ACCEPT), listing).map_err(not_routed)?;
        }
        exchange.context.warn(warning.to_string());
        exchange.context.annotate("k8s.io/deprecated", "true".to_string());
    }
    if unwatchable {
        return Err(Status::method_not_supported(&resource.group_resource, &verb));
    }
    if !resource.is_stored() {
        return subresources::virtual_resource(inner, exchange, resource, body).await;
    }
    match verb.as_str() {
        "get" => verbs::read::get(inner, exchange, resource).await,
        "list" => verbs::read::list(inner, exchange, resource).await,
        "watch" => verbs::watch::watch(inner, exchange, resource).await,
        "create" => verbs::write::create(inner, exchange, resource, body).await,
        "update" => {
            verbs::write::update(inner, exchange, resource, body, skiff_registry::WriteScope::Main).await
        }
        "patch" => {
            verbs::patch::patch(inner, exchange, resource, body, skiff_registry::WriteScope::Main).await
        }
        "delete" => verbs::delete::delete(inner, exchange, resource, body).await,
        "deletecollection" => verbs::delete::delete_collection(inner, exchange, resource, body).await,
        _ => Err(method_not_allowed()),
    }
}

/// A name is a part of a path, here and in the store.
fn check_segment(name: &str) -> Result<(), Status> {
    let why = match name {
        "." | ".." => format!("may not be '{name}'"),
        name => {
            let found: Vec<String> = ['/', '%']
                .iter()
                .filter(|char| name.contains(**char))
                .map(|char| format!("may not contain '{char}'"))
                .collect();
            found.join(";")
        }
    };
    if why.is_empty() {
        return Ok(());
    }
    Err(Status::bad_request(format!(
        "Name parameter invalid: {}: {why}",
        skiff_meta::field::quote(name)
    )))
}

/// 405, as upstream's router says it.
pub fn method_not_allowed() -> Status {
    let mut status = Status::method_not_allowed();
    status.details = Some(Box::default());
    status
}
