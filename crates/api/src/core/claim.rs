//! PersistentVolumeClaims, and the claim spec that templates share.

use serde_json::{Value, json};
use skiff_meta::{field, names};

use super::pod_defaults;
use super::resources::{quantity, resource_quantity};
use crate::errors::Errors;
use crate::kind::{AGE, BASE, Kind, NAME, text as column, wide};
use crate::node::{Node, at, same, text};
use crate::object_meta::{self, label_selector};
use crate::{row, strategy, walk};

pub const ACCESS_MODES: [&str; 4] = [
    "ReadOnlyMany",
    "ReadWriteMany",
    "ReadWriteOnce",
    "ReadWriteOncePod",
];

pub static PERSISTENT_VOLUME_CLAIM: Kind = Kind {
    kind: "PersistentVolumeClaim",
    default: |_, object| {
        if let Some(spec) = walk::object(object, "spec") {
            pod_defaults::claim_spec(spec);
        }
        if let Some(status) = walk::object(object, "status") {
            walk::string(status, "phase", "Pending");
            walk::each(status, "capacity", &mut pod_defaults::resource_list);
        }
    },
    prepare_create: |object| {
        walk::put(object, "status", json!({"phase": "Pending"}));
        walk::each(object, "spec", &mut data_source);
    },
    prepare_update: |new, old| {
        strategy::update_keep_status(new, old);
        walk::each(new, "spec", &mut data_source);
    },
    validate: |object| {
        let mut errors = Errors::new();
        spec(&Node::root(object).field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update,
    selectable: |object| vec![("name", text(object, "metadata.name").to_owned())],
    columns: &[
        NAME,
        column("Status"),
        column("Volume"),
        column("Capacity"),
        column("Access Modes"),
        column("StorageClass"),
        column("VolumeAttributesClass"),
        AGE,
        wide("VolumeMode"),
    ],
    row: |object, now| {
        let bound = !text(object, "spec.volumeName").is_empty();
        vec![
            row::name(object),
            json!(phase(object)),
            json!(text(object, "spec.volumeName")),
            json!(if bound {
                amount(at(object, "status.capacity.storage"))
            } else {
                String::new()
            }),
            json!(if bound {
                access_modes(at(object, "status.accessModes"))
            } else {
                String::new()
            }),
            json!(class(object, "spec.storageClassName")),
            json!(unset(text(object, "spec.volumeAttributesClassName"))),
            row::age(object, now),
            json!(unset(text(object, "spec.volumeMode"))),
        ]
    },
    has_status: true,
    ..BASE
};

/// COMPAT: `dataSource` and `dataSourceRef` say the same; a claim that has one gets both.
fn data_source(spec: &mut Value) {
    let (old, new) = (at(spec, "dataSource").clone(), at(spec, "dataSourceRef").clone());
    if !old.is_null() && new.is_null() {
        walk::put(spec, "dataSourceRef", old);
    } else if old.is_null() && !new.is_null() && text(&new, "namespace").is_empty() {
        let (group, kind) = (text(&new, "apiGroup"), text(&new, "kind"));
        let known = (group.is_empty() && kind == "PersistentVolumeClaim")
            || (group == "snapshot.storage.k8s.io" && kind == "VolumeSnapshot");
        if known {
            walk::put(spec, "dataSource", new);
        }
    }
}

pub(super) fn phase(object: &Value) -> &str {
    if at(object, "metadata.deletionTimestamp").is_null() {
        text(object, "status.phase")
    } else {
        "Terminating"
    }
}

pub(super) fn unset(text: &str) -> &str {
    if text.is_empty() { "<unset>" } else { text }
}

pub(super) fn amount(value: &Value) -> String {
    quantity(value).map_or_else(|| "0".to_owned(), |q| q.to_string())
}

/// COMPAT: an annotation named the class before the field did.
pub(super) fn class<'a>(object: &'a Value, path: &str) -> &'a str {
    let annotation = at(object, "metadata.annotations").get("volume.beta.kubernetes.io/storage-class");
    annotation
        .and_then(Value::as_str)
        .unwrap_or_else(|| text(object, path))
}

pub(super) fn access_modes(modes: &Value) -> String {
    let has = |mode: &str| modes.as_array().is_some_and(|m| m.iter().any(|v| v == mode));
    [
        ("ReadWriteOnce", "RWO"),
        ("ReadOnlyMany", "ROX"),
        ("ReadWriteMany", "RWX"),
        ("ReadWriteOncePod", "RWOP"),
    ]
    .iter()
    .filter(|(mode, _)| has(mode))
    .map(|(_, short)| *short)
    .collect::<Vec<_>>()
    .join(",")
}

/// Access modes of a claim or a volume.
pub(super) fn check_access_modes(spec: &Node, errors: &mut Errors) {
    let modes = spec.field("accessModes");
    if modes.is_empty() {
        errors.required(&modes, "at least 1 access mode is required");
    }
    let (mut alone, mut shared) = (false, false);
    for mode in modes.items() {
        errors.one_of(&modes.with(mode.value), &ACCESS_MODES);
        alone |= mode.str() == "ReadWriteOncePod";
        shared |= mode.str() != "ReadWriteOncePod" && ACCESS_MODES.contains(&mode.str());
    }
    if alone && shared {
        errors.forbidden(&modes, "may not use ReadWriteOncePod with other access modes");
    }
}

/// The rules of a claim spec, in claims and in templates.
pub fn spec(spec: &Node, errors: &mut Errors) {
    let modes = spec.field("accessModes");
    if modes.is_empty() {
        errors.required(&modes, "at least 1 access mode is required");
    }
    label_selector(&spec.field("selector"), errors);
    if !modes.is_empty() {
        check_access_modes(spec, errors);
    }
    let resources = spec.field("resources");
    let storage = resources.key("storage");
    let requested = spec.field("resources.requests.storage");
    match quantity(requested.value) {
        None => errors.required(&storage, ""),
        Some(amount) if amount.is_zero() || amount.is_negative() => {
            errors.invalid_value(&storage, amount.to_string(), crate::errors::POSITIVE);
        }
        Some(_) => resource_quantity(&storage.with(requested.value), "storage", errors),
    }
    let class = spec.field("storageClassName");
    if !class.is_empty() {
        errors.rule(&class, names::dns1123_subdomain(class.str()));
    }
    errors.one_of_if_set(&spec.field("volumeMode"), &["Block", "Filesystem"]);
    for name in ["dataSource", "dataSourceRef"] {
        let source = spec.field(name);
        if !source.is_set() {
            continue;
        }
        errors.require(&source.field("name"));
        errors.require(&source.field("kind"));
        let group = source.field("apiGroup");
        let kind = source.field("kind").str();
        if group.is_empty() && kind != "PersistentVolumeClaim" {
            errors.invalid_value(
                &source,
                kind,
                "must be 'PersistentVolumeClaim' when referencing the default apiGroup",
            );
        }
        if !group.is_empty() {
            errors.rule(&group, names::dns1123_subdomain(group.str()));
        }
    }
    let attributes = spec.field("volumeAttributesClassName");
    if !attributes.is_empty() {
        errors.rule(&attributes, names::dns1123_subdomain(attributes.str()));
    }
}

fn validate_update(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    errors.extend(object_meta::validate(new, true, object_meta::dns_subdomain));
    let root = Node::root(new);
    spec(&root.field("spec"), &mut errors);
    let mut after = at(new, "spec").clone();
    let mut before = at(old, "spec").clone();
    if text(&before, "volumeName").is_empty() {
        walk::copy(&mut before, &after.clone(), "volumeName");
    }
    let bound = text(new, "status.phase") == "Bound";
    if at(old, "spec.storageClassName").is_null() {
        walk::remove(&mut after, "storageClassName");
    }
    if bound {
        if let Some(requests) = after.pointer_mut("/resources/requests") {
            walk::copy(requests, at(&before, "resources.requests"), "storage");
        }
        walk::copy(&mut after, &before, "volumeAttributesClassName");
    }
    let spec = root.field("spec");
    if !same(&after, &before) {
        errors.forbidden(
            &spec,
            "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims",
        );
    }
    let size = |v: &Value, path: &str| quantity(at(v, path));
    if let (Some(now), Some(then)) = (
        size(new, "spec.resources.requests.storage"),
        size(old, "spec.resources.requests.storage"),
    ) && now < then
        && size(old, "status.capacity.storage").is_some_and(|capacity| now <= capacity)
    {
        errors.forbidden(
            &spec.field("resources.requests.storage"),
            "field can not be less than status.capacity",
        );
    }
    // COMPAT: upstream's path is without `spec`.
    let mode = root.field("volumeMode");
    errors.immutable(&mode.with(at(new, "spec.volumeMode")), at(old, "spec.volumeMode"));
    errors.into_vec()
}
