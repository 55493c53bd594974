//! From a resource path to the verb that serves it.

use std::sync::Arc;

use skiff_meta::Status;
use skiff_registry::Resource;

use crate::body::{Answer, Body, not_found};
use crate::chain::{Exchange, not_routed};
use crate::metrics::Served;
use crate::server::Inner;
use crate::{crd, negotiate, subresources, verbs};

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
    exchange.untyped = resource.custom.is_some();
    if exchange.untyped {
        if !crd::routed(&resource, &exchange.info) {
            return Ok(not_found());
        }
        crd::check_verb(&resource, exchange)?;
    } else if resource.namespaced && unnamed_namespace(exchange) {
        return Err(Status::bad_request("Namespace parameter required."));
    } else if !fits_scope(&resource, exchange) {
        return Err(Status::resource_not_found());
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

/// Whether `/namespaces//` stands before something that is looked for in one namespace.
fn unnamed_namespace(exchange: &Exchange) -> bool {
    let info = &exchange.info;
    info.unnamed_namespace && !matches!(info.verb.as_str(), "create" | "list" | "watch" | "")
}

/// Whether such a path exists at all.
fn fits_scope(resource: &Resource, exchange: &Exchange) -> bool {
    let info = &exchange.info;
    let named_by_path = info.parts.len() >= 2;
    if !resource.namespaced {
        // `/namespaces/x/nodes` is no path; `/namespaces/x` is.
        return info.namespace.is_empty() || (named_by_path && info.parts[0] == "namespaces");
    }
    // What can only be made has no path across namespaces.
    let listed = ["list", "watch", "deletecollection"]
        .iter()
        .any(|verb| resource.facts.can(verb));
    !info.namespace.is_empty() || (!named_by_path && listed)
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
        "create" => !across_namespaces && (exchange.info.parts.len() == 1 || resource.custom.is_some()),
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
    let facts = resource.facts;
    if let Some(warning) = resource.custom.as_ref().and_then(|custom| custom.deprecation()) {
        exchange.context.warn(warning);
        exchange.context.annotate("k8s.io/deprecated", "true".to_string());
    }
    if let Some(warning) = skiff_api::kind::deprecation(facts.group, facts.version, facts.kind) {
        // Who gets no answer gets no warning.
        let listing = matches!(verb.as_str(), "list" | "watch");
        negotiate::routed(exchange.header(http::header::ACCEPT), listing).map_err(not_routed)?;
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
