//! Nodes.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::field::ErrorType;

use super::resources::resource_quantity;
use super::scheduling;
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column, unsupported_field, wide};
use crate::net;
use crate::node::{Node, at, is_empty, list, text};
use crate::row::{self, or_none};
use crate::{strategy, walk};

pub static NODE: Kind = Kind {
    kind: "Node",
    default: |_, object| {
        pod_cidrs(object);
        walk::each(object, "status", &mut |status| {
            if is_empty(at(status, "allocatable")) && !at(status, "capacity").is_null() {
                let capacity = at(status, "capacity").clone();
                walk::put(status, "allocatable", capacity);
            }
            walk::each(status, "capacity", &mut super::pod_defaults::resource_list);
            walk::each(status, "allocatable", &mut super::pod_defaults::resource_list);
        });
    },
    // A node registers itself with its status, so a create keeps it.
    prepare_create: |object| {
        pod_cidrs(object);
        // The configuration of kubelets through the API is gone.
        for part in ["spec", "status"] {
            let name = if part == "spec" { "configSource" } else { "config" };
            if let Some(value) = object.get_mut(part) {
                walk::remove(value, name);
            }
        }
    },
    prepare_update: |new, old| {
        strategy::update_keep_status(new, old);
        pod_cidrs(new);
        if at(old, "spec.configSource").is_null()
            && let Some(spec) = new.get_mut("spec")
        {
            walk::remove(spec, "configSource");
        }
    },
    prepare_status_update: |new, old| {
        strategy::status_only(new, old);
        if at(old, "status.config").is_null()
            && let Some(status) = new.get_mut("status")
        {
            walk::remove(status, "config");
        }
    },
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        taints(&root, &mut errors);
        resources(&root, &mut errors);
        declared_features(&root.field("status.declaredFeatures"), &mut errors);
        let cidrs = root.field("spec.podCIDRs");
        for cidr in cidrs.items() {
            net::cidr(&cidr, &mut errors);
        }
        if cidrs.len() > 1 {
            pod_cidr_pair(&cidrs, &mut errors);
        }
        errors.into_vec()
    },
    // COMPAT: an update is checked as an object and as a change.
    validate_update: |new, old| {
        let mut errors = Errors::new();
        errors.extend((NODE.validate)(new));
        let root = Node::root(new);
        update(&root, old, &mut errors);
        errors.into_vec()
    },
    validate_status_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        update(&root, old, &mut errors);
        errors.into_vec()
    },
    selectable: |object| {
        vec![(
            "spec.unschedulable",
            at(object, "spec.unschedulable")
                .as_bool()
                .unwrap_or(false)
                .to_string(),
        )]
    },
    columns: &[
        NAME,
        column("Status"),
        column("Roles"),
        AGE,
        column("Version"),
        wide("Internal-IP"),
        wide("External-IP"),
        wide("OS-Image"),
        wide("Kernel-Version"),
        wide("Container-Runtime"),
    ],
    row: node_row,
    warnings: |new, _| {
        let mut warnings = Vec::new();
        if !at(new, "spec.configSource").is_null() {
            warnings.push("spec.configSource: the feature is removed".to_owned());
        }
        if !text(new, "spec.externalID").is_empty() {
            warnings
                .push("spec.externalID: this field is deprecated, and is unused by Kubernetes".to_owned());
        }
        let root = Node::root(new);
        let cidrs = root.field("spec.podCIDRs");
        warnings.extend(cidrs.items().flat_map(|at| net::cidr_warnings(&at)));
        warnings
    },
    has_status: true,
    update_again: Again::ObjectFirst,
    unknown_field: unsupported_field,
    ..BASE
};

/// COMPAT: `podCIDR` is the first of `podCIDRs`; upstream writes both.
fn pod_cidrs(object: &mut Value) {
    let Some(spec) = object.get_mut("spec") else {
        return;
    };
    let single = text(spec, "podCIDR").to_owned();
    match list(spec, "podCIDRs").first().cloned() {
        // The older field wins where the two differ.
        Some(first) if !single.is_empty() && first.as_str() != Some(single.as_str()) => {
            walk::put(spec, "podCIDRs", json!([single]));
        }
        Some(first) => walk::put(spec, "podCIDR", first),
        None if !single.is_empty() => walk::put(spec, "podCIDRs", json!([single])),
        None => {}
    }
}

fn taints(root: &Node, errors: &mut Errors) {
    // COMPAT: upstream's path is under `metadata`.
    let at = root.field("metadata.taints");
    scheduling::taints(&at.with(root.field("spec.taints").value), errors);
}

fn resources(root: &Node, errors: &mut Errors) {
    for name in ["status.capacity", "status.allocatable"] {
        let amounts = root.field(name);
        for (resource, _) in amounts.entries() {
            resource_quantity(
                &amounts.field(resource).with(amounts.key(resource).value),
                resource,
                errors,
            );
        }
    }
}

/// Two networks are one of each family.
fn pod_cidr_pair(cidrs: &Node, errors: &mut Errors) {
    let found: Vec<_> = cidrs.items().map(|cidr| net::sloppy_cidr(cidr.str())).collect();
    if let Some(bad) = found.iter().position(Option::is_none) {
        let text = cidrs.index(bad).str();
        errors.push(
            ErrorType::Internal,
            cidrs,
            None,
            format!("invalid PodCIDRs. failed to check with dual stack with error:invalid CIDR[{bad}]: <nil> (invalid CIDR address: {text})"),
        );
    }
    let family = |v4: bool| found.iter().flatten().any(|(address, _)| address.is_ipv4() == v4);
    let dual = found.iter().all(Option::is_some) && family(true) && family(false);
    if !dual || found.len() > 2 {
        errors.invalid(cidrs, "may specify no more than one CIDR for each IP family");
    }
}

/// Names of features in the order of the alphabet.
fn declared_features(features: &Node, errors: &mut Errors) {
    let list: Vec<Node> = features.items().collect();
    for (i, feature) in list.iter().enumerate() {
        let name = feature.str();
        let good = name.starts_with(|c: char| c.is_ascii_uppercase())
            && name
                .split('/')
                .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric()));
        if name.len() > 253 {
            let quoted = skiff_meta::field::quote(name);
            errors.invalid(
                feature,
                format!("invalid feature name {quoted}: must be no more than 253 characters"),
            );
        } else if !good {
            let quoted = skiff_meta::field::quote(name);
            errors.invalid(
                feature,
                format!("invalid feature name {quoted}: must start with an UpperCamelCase segment, with subsequent segments separated by '/' (e.g., MyFeature or MyFeature/mySubFeature), and contain only alphanumeric characters and slashes"),
            );
        }
        if let Some(next) = list.get(i + 1) {
            if name == next.str() {
                errors.duplicate(next);
            } else if name > next.str() {
                errors.invalid(next, "list must be sorted alphabetically");
            }
        }
    }
}

fn update(root: &Node, old: &Value, errors: &mut Errors) {
    resources(root, errors);
    declared_features(&root.field("status.declaredFeatures"), errors);
    let addresses = root.field("status.addresses");
    let mut seen = BTreeSet::new();
    for address in addresses.items() {
        if !seen.insert((text(address.value, "type"), text(address.value, "address"))) {
            // COMPAT: upstream prints its inner type here.
            let shown =
                json!({"Type": text(address.value, "type"), "Address": text(address.value, "address")});
            errors.duplicate_value(&address, shown);
        }
    }
    let before = list(old, "spec.podCIDRs");
    if !before.is_empty() && before != list(root.value, "spec.podCIDRs") {
        errors.forbidden(
            &root.field("spec.podCIDRs"),
            "node updates may not change podCIDR except from \"\" to valid",
        );
    }
    let provider = text(old, "spec.providerID");
    if !provider.is_empty() && provider != text(root.value, "spec.providerID") {
        errors.forbidden(
            &root.field("spec.providerID"),
            "node updates may not change providerID except from \"\" to valid",
        );
    }
    taints(root, errors);
    if text(root.value, "spec.externalID") != text(old, "spec.externalID") {
        errors.forbidden(&root.field("spec.externalID"), "may not be updated");
    }
}

fn address(node: &Value, kind: &str) -> Value {
    or_none(
        list(node, "status.addresses")
            .iter()
            .find(|a| text(a, "type") == kind)
            .map_or("", |a| text(a, "address")),
    )
}

fn unknown(text: &str) -> Value {
    json!(if text.is_empty() { row::UNKNOWN } else { text })
}

fn node_row(node: &Value, now: i64) -> Vec<Value> {
    let ready = list(node, "status.conditions")
        .iter()
        .find(|c| text(c, "type") == "Ready");
    let mut status = match ready.map(|c| text(c, "status")) {
        Some("True") => "Ready".to_owned(),
        Some(_) => "NotReady".to_owned(),
        None => "Unknown".to_owned(),
    };
    if at(node, "spec.unschedulable").as_bool() == Some(true) {
        status.push_str(",SchedulingDisabled");
    }
    let mut roles: Vec<&str> = at(node, "metadata.labels")
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(
            |(key, value)| match key.strip_prefix("node-role.kubernetes.io/") {
                Some(role) if !role.is_empty() => Some(role),
                _ if key == "kubernetes.io/role" => value.as_str().filter(|v| !v.is_empty()),
                _ => None,
            },
        )
        .collect();
    roles.sort_unstable();
    roles.dedup();
    let info = |field: &str| text(node, &format!("status.nodeInfo.{field}")).to_owned();
    let mut kernel = unknown(&info("kernelVersion")).as_str().unwrap_or("").to_owned();
    let architecture = info("architecture");
    if !architecture.is_empty() {
        kernel.push_str(&format!(" ({architecture})"));
    }
    vec![
        row::name(node),
        json!(status),
        or_none(&roles.join(",")),
        row::age(node, now),
        json!(info("kubeletVersion")),
        address(node, "InternalIP"),
        address(node, "ExternalIP"),
        unknown(&info("osImage")),
        json!(kernel),
        unknown(&info("containerRuntimeVersion")),
    ]
}
