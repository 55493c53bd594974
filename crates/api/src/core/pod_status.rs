//! Rules of what a kubelet says about the devices of a pod's containers.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use skiff_meta::names;

use crate::errors::Errors;
use crate::node::{Node, at, by_text, list, text};

const MESSAGE_MAX: usize = 1024;
const NOT_A_REQUEST: &str = "must match one of the container's resource requests";
const NOT_A_CLAIM: &str = "must match one of the container's resource claims in a format 'claim:<claimName>/<request>' or 'claim:<claimName>' if request is empty";

/// The health of resources that were allocated to the containers of this list.
pub fn allocated(statuses: &Node, containers: &[Value], errors: &mut Errors) {
    // The first of a name counts.
    let containers: BTreeMap<&str, &Value> = containers.iter().rev().map(|c| (text(c, "name"), c)).collect();
    for status in statuses.items() {
        let container = containers.get(status.field("name").str()).copied();
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

/// Who the processes of the containers of this list run as.
pub fn users(statuses: &Node, windows: bool, errors: &mut Errors) {
    const RANGE: &str = "must be between 0 and 2147483647, inclusive";
    for status in statuses.items() {
        let linux = status.field("user.linux");
        if !linux.is_set() {
            continue;
        }
        if windows {
            errors.forbidden(&linux, "cannot be set for a windows pod");
            continue;
        }
        let groups = linux.field("supplementalGroups");
        for id in [linux.field("uid"), linux.field("gid")]
            .into_iter()
            .chain(groups.items())
        {
            if id.int().is_some_and(|n| !(0..=i64::from(i32::MAX)).contains(&n)) {
                errors.invalid(&id, RANGE);
            }
        }
    }
}

/// Which claims were made for the pod.
pub fn claims(statuses: &Node, spec: &Value, errors: &mut Errors) {
    let known: BTreeSet<&str> = list(spec, "resourceClaims")
        .iter()
        .map(|claim| text(claim, "name"))
        .collect();
    let mut seen = BTreeSet::new();
    for status in statuses.items() {
        let name = status.field("name");
        if !known.contains(name.str()) {
            errors.invalid_value(
                &name,
                name.str(),
                "must match the name of an entry in `spec.resourceClaims`",
            );
        }
        if !seen.insert(name.str()) {
            errors.duplicate_value(&name, name.str());
        }
        let claim = status.field("resourceClaimName");
        if claim.is_set() {
            errors.rule(&claim, names::dns1123_subdomain(claim.str()));
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
    let containers = ["containers", "initContainers"].map(|name| list(spec, name));
    let containers = by_text(containers.into_iter().flatten(), "name");
    for mapping in mappings.items() {
        let [container, resource, request] =
            ["containerName", "resourceName", "requestName"].map(|name| mapping.field(name).str());
        match containers.get(container) {
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
