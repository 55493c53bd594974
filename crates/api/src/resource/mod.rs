//! The group `resource.k8s.io`: devices, and claims to them.

use serde_json::{Value, json};
use skiff_meta::names;

use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column};
use crate::node::{Node, at, list, text};
use crate::{row, strategy, walk};

const GROUP: &str = "resource.k8s.io";

fn request(request: &mut Value) {
    walk::string(request, "allocationMode", "ExactCount");
    if text(request, "allocationMode") == "ExactCount" {
        walk::number(request, "count", 1);
    }
    walk::each(request, "tolerations[]", &mut |toleration| {
        walk::string(toleration, "operator", "Equal")
    });
}

fn claim_spec(spec: &mut Value) {
    walk::each(spec, "devices.requests[].exactly", &mut request);
    walk::each(spec, "devices.requests[].firstAvailable[]", &mut request);
}

fn claim(spec: &Node, errors: &mut Errors) {
    let requests = spec.field("devices.requests");
    let mut seen = Vec::new();
    for request in requests.items() {
        let name = request.field("name");
        if errors.require(&name) {
            errors.rule(&name, names::dns1123_label(name.str()));
        }
        if seen.contains(&name.str()) {
            errors.duplicate(&name);
        }
        seen.push(name.str());
        let (exactly, first) = (request.field("exactly"), request.field("firstAvailable"));
        match (exactly.is_set(), !first.is_empty()) {
            (false, false) => errors.required(
                &request,
                "exactly one of `exactly` or `firstAvailable` is required",
            ),
            (true, true) => {
                let shown = request.value.clone();
                errors.invalid_value(
                    &request,
                    shown,
                    "exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set",
                );
            }
            (true, false) => drop(errors.require(&exactly.field("deviceClassName"))),
            (false, true) => {
                for sub in first.items() {
                    errors.require(&sub.field("deviceClassName"));
                }
            }
        }
    }
}

pub static RESOURCE_CLAIM: Kind = Kind {
    group: GROUP,
    kind: "ResourceClaim",
    default: |_, object| walk::each(object, "spec", &mut claim_spec),
    prepare_create: strategy::create_without_status,
    prepare_update: strategy::update_keep_status,
    prepare_status_update: strategy::status_only_keep_metadata,
    validate: |object| {
        let mut errors = Errors::new();
        claim(&Node::root(object).field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.immutable(&root.field("spec"), at(old, "spec"));
        errors.into_vec()
    },
    columns: &[NAME, column("State"), AGE],
    row: |object, now| {
        let mut states = Vec::new();
        let deleted = !at(object, "metadata.deletionTimestamp").is_null();
        if deleted {
            states.push("deleted");
        }
        if at(object, "status.allocation").is_null() {
            if !deleted {
                states.push("pending");
            }
        } else {
            states.push("allocated");
            if !list(object, "status.reservedFor").is_empty() {
                states.push("reserved");
            }
        }
        vec![row::name(object), json!(states.join(",")), row::age(object, now)]
    },
    has_status: true,
    ..BASE
};

pub static RESOURCE_CLAIM_TEMPLATE: Kind = Kind {
    group: GROUP,
    kind: "ResourceClaimTemplate",
    default: |_, object| walk::each(object, "spec.spec", &mut claim_spec),
    validate: |object| {
        let mut errors = Errors::new();
        claim(&Node::root(object).field("spec.spec"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.immutable(&root.field("spec"), at(old, "spec"));
        errors.into_vec()
    },
    columns: &[NAME, AGE],
    row: row::name_and_age,
    ..BASE
};

pub static DEVICE_CLASS: Kind = Kind {
    group: GROUP,
    kind: "DeviceClass",
    prepare_create: strategy::create_generation_only,
    prepare_update: strategy::update_generation,
    columns: &[NAME, AGE],
    row: row::name_and_age,
    ..BASE
};

pub static RESOURCE_SLICE: Kind = Kind {
    group: GROUP,
    kind: "ResourceSlice",
    prepare_create: strategy::create_generation_only,
    prepare_update: strategy::update_generation,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let driver = root.field("spec.driver");
        if errors.require(&driver) {
            errors.rule(&driver, names::dns1123_subdomain(driver.str()));
        }
        errors.require(&root.field("spec.pool.name"));
        errors.into_vec()
    },
    validate_update: |new, _| (RESOURCE_SLICE.validate)(new),
    selectable: |object| {
        vec![
            ("spec.nodeName", text(object, "spec.nodeName").to_owned()),
            ("spec.driver", text(object, "spec.driver").to_owned()),
        ]
    },
    columns: &[NAME, column("Node"), column("Driver"), column("Pool"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(text(object, "spec.nodeName")),
            json!(text(object, "spec.driver")),
            json!(text(object, "spec.pool.name")),
            row::age(object, now),
        ]
    },
    update_again: Again::Change,
    ..BASE
};
