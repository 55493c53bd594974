//! Custom resources. A CustomResourceDefinition that is accepted becomes resources of the registry, one a
//! served version, which then go through the same verbs as built-in kinds.
//!
//! ```text
//! controller  follows the definitions, settles their names, makes and unmakes their resources
//! definition  a definition, read: versions, schemas, columns, paths
//! custom      the rules of one version, as the registry asks for them
//! decode      bodies and patches: pruned, defaulted, checked for unknown fields
//! columns     tables by JSONPath      scale  the scale subresource
//! convert     other versions, by a webhook
//! ```

mod api_services;
mod columns;
mod controller;
mod convert;
mod custom;
pub mod decode;
mod definition;
mod facts;
mod names;
pub mod openapi;
mod retire;
pub mod scale;
pub mod select;

pub use controller::start;
pub use custom::CustomVersion;

use skiff_meta::Status;
use skiff_registry::Resource;

use crate::chain::Exchange;
use crate::request_info::RequestInfo;

pub const GROUP: &str = "apiextensions.k8s.io";
pub const PLURAL: &str = "customresourcedefinitions";
/// Holds a definition until its objects are gone.
pub const CLEANUP_FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";

/// The version behind a resource, if it is a custom one.
pub fn version_of(resource: &Resource) -> Option<&CustomVersion> {
    resource.custom.as_ref()?.as_any().downcast_ref()
}

/// Whether a path of a custom resource exists at all.
pub fn routed(resource: &Resource, info: &RequestInfo) -> bool {
    match (resource.namespaced, info.namespace.is_empty()) {
        (false, false) => false,
        (true, true) => matches!(info.verb.as_str(), "list" | "watch"),
        _ => true,
    }
}

/// Refuses what custom resources do not do, in the words that they have for it.
pub fn check_verb(resource: &Resource, exchange: &Exchange) -> Result<(), Status> {
    let info = &exchange.info;
    let verbs: &[&str] = match info.subresource.as_str() {
        "" => &resource.facts.verbs,
        name => match resource.facts.subresource(name) {
            Some(subresource) => &subresource.verbs,
            None => return Err(Status::not_found(&resource.group_resource, &info.name)),
        },
    };
    if !verbs.contains(&info.verb.as_str()) {
        return Err(Status::method_not_supported(&resource.group_resource, &info.verb));
    }
    Ok(())
}

/// A definition that is on its way out takes no new objects.
pub fn check_create(resource: &Resource, name: &str) -> Result<(), Status> {
    match version_of(resource) {
        Some(custom) if custom.definition.terminating => Err(Status::forbidden(
            &resource.group_resource,
            name,
            "create not allowed while custom resource definition is terminating",
        )),
        _ => Ok(()),
    }
}
