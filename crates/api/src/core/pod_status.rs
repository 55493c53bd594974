//! Rules of what a kubelet says about the devices of a pod's containers.

use std::collections::BTreeSet;

use serde_json::Value;
use skiff_meta::names;

use crate::errors::Errors;
use crate::node::{Node, at, list, text};

const MESSAGE_MAX: usize = 65_536;
const NOT_A_REQUEST: &str = "must match one of the container's resource requests";
const NOT_A_CLAIM: &str = "must match one of the container's resource claims in a format 'claim:<claimName>/<request>' or 'claim:<claimName>' if request is empty";

/// The health of resources that were allocated to the containers of this list.
pub fn allocated(statuses: &Node, containers: &[Value], errors: &mut Errors) {
    for status in statuses.items() {
        let container = containers
            .iter()
            .find(|c| text(c, "name") == status.field("name").str());
        let allocated = status.field("allocatedResourcesStatus");
        for resource in allocated.items() {
            let name = resource.field("name");
            if let Some(container) = container {
                known_resource(&name, container, errors);
            }
            let mut seen = BTreeSet::new();
            let devices = resource.field("resources");
            for device in devices.items() {
                errors.one_of(&device.field("health"), &["Healthy", "Unhealthy", "Unknown"]);
                let message = device.field("message");
                if message.is_set() && message.str().is_empty() {
                    errors.required(&message, "must be non-empty if specified");
                } else if message.len() > MESSAGE_MAX {
                    errors.too_long(&message, MESSAGE_MAX);
                }
                let id = device.field("resourceID");
                if !seen.insert(id.str()) {
                    errors.duplicate(&id);
                }
            }
        }
    }
}

fn known_resource(name: &Node, container: &Value, errors: &mut Errors) {
    if name.str().starts_with("claim:") {
        let known = list(container, "resources.claims").iter().any(|claim| {
            let request = match text(claim, "request") {
                "" => String::new(),
                request => format!("/{request}"),
            };
            name.str() == format!("claim:{}{request}", text(claim, "name"))
        });
        if !known {
            errors.invalid(name, NOT_A_CLAIM);
        }
    } else if at(container, "resources.requests").get(name.str()).is_none() {
        errors.invalid(name, NOT_A_REQUEST);
    }
}

/// Which request of a claim stands for which resource of which container.
pub fn extended_resources(status: &Node, spec: &Value, errors: &mut Errors) {
    if !status.is_set() {
        return;
    }
    let mappings = status.field("requestMappings");
    if mappings.is_empty() {
        errors.required(&mappings, "at least one request mapping is required");
    }
    let mut seen = BTreeSet::new();
    for mapping in mappings.items() {
        let [container, resource, request] =
            ["containerName", "resourceName", "requestName"].map(|name| mapping.field(name).str());
        let found = ["containers", "initContainers"]
            .iter()
            .flat_map(|name| list(spec, name))
            .find(|c| text(c, "name") == container);
        match found {
            None => errors.invalid_value(
                &mapping.field("containerName"),
                container,
                "must match the name of an entry in spec.initContainers.name or spec.containers.name",
            ),
            Some(found) if at(found, "resources.requests").get(resource).is_none() => errors.invalid_value(
                &mapping.field("resourceName"),
                resource,
                "must match the extended resource name of an entry in spec.initContainers.resources.requests or spec.containers.resources.requests",
            ),
            Some(_) => {}
        }
        // COMPAT: upstream's path is that of the whole status.
        for complaint in names::dns1123_label(request) {
            errors.invalid_value(&status.field("requestName"), request, complaint);
        }
        if !seen.insert((container, resource, request)) {
            for name in ["containerName", "resourceName", "requestName"] {
                errors.duplicate(&mapping.field(name));
            }
        }
    }
    let name = status.field("resourceClaimName");
    if errors.require(&name) {
        errors.rule(&name, names::dns1123_subdomain(name.str()));
    }
}
