//! Nodes.

use serde_json::{Value, json};

use super::resources::resource_quantity;
use super::scheduling;
use crate::errors::Errors;
use crate::kind::{AGE, BASE, Kind, NAME, text as column, wide};
use crate::net;
use crate::node::{Node, at, list, text};
use crate::row::{self, or_none};
use crate::{strategy, walk};

pub static NODE: Kind = Kind {
    kind: "Node",
    default: |_, object| {
        pod_cidrs(object);
        walk::each(object, "status", &mut |status| {
            if at(status, "allocatable").is_null() && !at(status, "capacity").is_null() {
                let capacity = at(status, "capacity").clone();
                walk::put(status, "allocatable", capacity);
            }
            walk::each(status, "capacity", &mut super::pod_defaults::resource_list);
            walk::each(status, "allocatable", &mut super::pod_defaults::resource_list);
        });
    },
    // A node registers itself with its status, so a create keeps it.
    prepare_update: strategy::update_keep_status,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        taints(&root, &mut errors);
        resources(&root, &mut errors);
        let cidrs = root.field("spec.podCIDRs");
        let mut families = Vec::new();
        for cidr in cidrs.items() {
            families.extend(net::cidr(&cidr, &mut errors).map(|(address, _)| address.is_ipv4()));
        }
        if cidrs.len() > 2 || (families.len() == 2 && families[0] == families[1]) {
            errors.invalid(&cidrs, "may specify no more than one CIDR for each IP family");
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
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
    has_status: true,
    ..BASE
};

/// COMPAT: `podCIDR` is the first of `podCIDRs`; upstream writes both.
fn pod_cidrs(object: &mut Value) {
    let Some(spec) = object.get_mut("spec") else {
        return;
    };
    let single = text(spec, "podCIDR").to_owned();
    match list(spec, "podCIDRs").first().cloned() {
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

fn update(root: &Node, old: &Value, errors: &mut Errors) {
    resources(root, errors);
    let addresses = root.field("status.addresses");
    let mut seen: Vec<&Value> = Vec::new();
    for address in addresses.items() {
        if seen.contains(&address.value) {
            // COMPAT: upstream prints its inner type here.
            let shown =
                json!({"Type": text(address.value, "type"), "Address": text(address.value, "address")});
            errors.duplicate_value(&address, shown);
        }
        seen.extend(
            list(root.value, "status.addresses")
                .iter()
                .find(|a| *a == address.value),
        );
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
    vec![
        row::name(node),
        json!(status),
        or_none(&roles.join(",")),
        row::age(node, now),
        json!(info("kubeletVersion")),
        address(node, "InternalIP"),
        address(node, "ExternalIP"),
        unknown(&info("osImage")),
        unknown(&info("kernelVersion")),
        unknown(&info("containerRuntimeVersion")),
    ]
}
