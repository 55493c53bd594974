//! PersistentVolumeClaims, and the claim spec that templates share.

use serde_json::{Value, json};
use skiff_meta::{field, names};

use super::pod_defaults;
use super::resources::{is_native, quantity, resource_quantity};
use crate::errors::Errors;
use crate::internal;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column, wide};
use crate::node::{Node, at, text};
use crate::object_meta::label_selector;
use crate::{row, strategy, walk};

pub const ACCESS_MODES: [&str; 4] = [
    "ReadOnlyMany",
    "ReadWriteMany",
    "ReadWriteOnce",
    "ReadWriteOncePod",
];

const RESIZE_STATUSES: [&str; 5] = [
    "ControllerResizeInProgress",
    "ControllerResizeInfeasible",
    "NodeResizeInProgress",
    "NodeResizeInfeasible",
    "NodeResizePending",
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
            walk::each(status, "allocatedResources", &mut pod_defaults::resource_list);
        }
    },
    prepare_create: |object| {
        walk::put(object, "status", json!({"phase": "Pending"}));
        walk::each(object, "spec", &mut |spec| data_source(spec, &Value::Null));
    },
    prepare_update: |new, old| {
        strategy::update_keep_status(new, old);
        walk::each(new, "spec", &mut |spec| data_source(spec, at(old, "spec")));
    },
    validate: |object| {
        let mut errors = Errors::new();
        spec(&Node::root(object).field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update,
    validate_status_update,
    warnings,
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
    update_again: Again::ChangeObject,
    ..BASE
};

/// COMPAT: `dataSource` and `dataSourceRef` say the same; a claim that has one gets both. Data of other
/// namespaces is not served, so a new reference there is dropped, and so are sources that old servers ignored.
fn data_source(spec: &mut Value, old: &Value) {
    let in_use = |name| !at(old, name).is_null();
    if !text(spec, "dataSourceRef.namespace").is_empty() && !in_use("dataSourceRef") {
        walk::remove(spec, "dataSourceRef");
    }
    let source = at(spec, "dataSource");
    let (group, kind) = (text(source, "apiGroup"), text(source, "kind"));
    let claim = group.is_empty() && kind == "PersistentVolumeClaim";
    let snapshot = group == "snapshot.storage.k8s.io" && kind == "VolumeSnapshot";
    if !in_use("dataSource") && at(spec, "dataSourceRef").is_null() && !claim && !snapshot {
        walk::remove(spec, "dataSource");
    }
    let (old, new) = (at(spec, "dataSource").clone(), at(spec, "dataSourceRef").clone());
    if !old.is_null() && new.is_null() {
        walk::put(spec, "dataSourceRef", old);
    } else if old.is_null() && !new.is_null() && text(&new, "namespace").is_empty() {
        let mut new = new;
        walk::remove(&mut new, "namespace");
        walk::put(spec, "dataSource", new);
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
    spec_over(spec, &Value::Null, errors);
}

/// The same on update: what was wrong before (a selector's values, a group's name) may stay.
fn spec_over(spec: &Node, old: &Value, errors: &mut Errors) {
    let modes = spec.field("accessModes");
    if modes.is_empty() {
        errors.required(&modes, "at least 1 access mode is required");
    }
    label_selector(&spec.field("selector"), errors);
    check_access_modes(spec, errors);
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
    let (source, reference) = (spec.field("dataSource"), spec.field("dataSourceRef"));
    let any_group = ["dataSource", "dataSourceRef"]
        .iter()
        .any(|name| !at(at(old, name), "apiGroup").is_null());
    for source in [&source, &reference] {
        if source.is_set() {
            check_data_source(source, any_group, errors);
        }
    }
    // COMPAT: upstream shows a path, which prints as an empty object, where the value should be.
    if !reference.field("namespace").is_empty() {
        if source.is_set() {
            errors.invalid_text(
                spec,
                "{}",
                "may not be specified when dataSourceRef.namespace is specified",
            );
        }
    } else if source.is_set() && reference.is_set() {
        let same = ["apiGroup", "kind", "name"]
            .iter()
            .all(|name| source.field(name).value == reference.field(name).value);
        if !same {
            errors.invalid_text(spec, "{}", "must match dataSourceRef");
        }
    }
    let attributes = spec.field("volumeAttributesClassName");
    if !attributes.is_empty() {
        errors.rule(&attributes, names::dns1123_subdomain(attributes.str()));
    }
}

fn check_data_source(source: &Node, any_group: bool, errors: &mut Errors) {
    errors.require(&source.field("name"));
    errors.require(&source.field("kind"));
    let (group, kind) = (source.field("apiGroup"), source.field("kind").str());
    if group.is_empty() && kind != "PersistentVolumeClaim" {
        errors.invalid_value(
            source,
            kind,
            "must be 'PersistentVolumeClaim' when referencing the default apiGroup",
        );
    }
    if !group.is_empty() && !any_group {
        errors.rule(&group, names::dns1123_subdomain(group.str()));
    }
    let namespace = source.field("namespace");
    if !namespace.is_empty() {
        errors.rule(&namespace, names::dns1123_label(namespace.str()));
    }
}

/// Keys of the maps that a resize keeps in the status.
fn status_key(map: &Node, key: &str, errors: &mut Errors) -> bool {
    let complaints = names::qualified_name(key);
    let mut good = complaints.is_empty();
    for complaint in complaints {
        errors.invalid_value(map, key, complaint);
    }
    if good && is_native(key) && key != "storage" {
        errors.not_supported(&map.with(&json!(key)), &["storage"]);
        good = false;
    }
    good
}

fn validate_status_update(new: &Value, _old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(new);
    let capacity = root.field("status.capacity");
    for (_, amount) in capacity.entries() {
        super::resources::basic_quantity(&amount, &mut errors);
    }
    let statuses = root.field("status.allocatedResourceStatuses");
    for (key, status) in statuses.entries() {
        status_key(&statuses, key, &mut errors);
        if !RESIZE_STATUSES.contains(&status.str()) {
            // COMPAT: upstream shows the key, not the value.
            errors.not_supported(&statuses.with(&json!(key)), &RESIZE_STATUSES);
        }
    }
    let allocated = root.field("status.allocatedResources");
    for (key, amount) in allocated.entries() {
        if status_key(&allocated, key, &mut errors) && super::resources::basic_quantity(&amount, &mut errors)
        {
            resource_quantity(&amount, "storage", &mut errors);
        }
    }
    errors.into_vec()
}

/// A claim's warnings: an annotation of old, amounts that are no whole bytes.
fn warnings(new: &Value, _old: Option<&Value>) -> Vec<String> {
    let mut warnings = Vec::new();
    let beta = "volume.beta.kubernetes.io/storage-class";
    if at(new, "metadata.annotations").get(beta).is_some() {
        warnings.push(format!(
            "metadata.annotations[{beta}]: deprecated since v1.8; use \"storageClassName\" attribute instead"
        ));
    }
    fractions(at(new, "spec"), "spec", &mut warnings);
    warnings
}

/// Storage that is no whole number of bytes, in the spec of a claim that stands at this path.
pub fn fractions(spec: &Value, path: &str, warnings: &mut Vec<String>) {
    for name in ["requests", "limits"] {
        let amount = quantity(at(at(at(spec, "resources"), name), "storage"));
        if let Some(amount) = amount.filter(|amount| amount.milli_value() % 1000 != 0) {
            warnings.push(format!(
                "{path}.resources.{name}[storage]: fractional byte value \"{amount}\" is invalid, must be an integer"
            ));
        }
    }
}

fn validate_update(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(new);
    spec_over(&root.field("spec"), at(old, "spec"), &mut errors);
    let mut after = at(new, "spec").clone();
    let mut before = at(old, "spec").clone();
    if text(&before, "volumeName").is_empty() {
        walk::copy(&mut before, &after.clone(), "volumeName");
    }
    let bound = text(new, "status.phase") == "Bound";
    let annotation = |object: &Value| -> Value {
        at(object, "metadata.annotations")
            .get("volume.beta.kubernetes.io/storage-class")
            .cloned()
            .unwrap_or_default()
    };
    let (class, class_before) = (at(new, "spec.storageClassName"), at(old, "spec.storageClassName"));
    let moved_from_annotation = class_before.is_null()
        && !class.is_null()
        && annotation(old) == *class
        && (annotation(new) == annotation(old) || annotation(new).is_null());
    if moved_from_annotation {
        walk::remove(&mut after, "storageClassName");
    } else {
        if annotation(new) != annotation(old) {
            errors.invalid_value(
                // COMPAT: the key stands in the path like a field.
                &root
                    .field("metadata.annotations")
                    .field("volume.beta.kubernetes.io/storage-class"),
                annotation(new).as_str().unwrap_or(""),
                crate::errors::IMMUTABLE,
            );
        }
        if class_before.is_null() && !class.is_null() && annotation(old).is_null() {
            walk::remove(&mut after, "storageClassName");
        }
    }
    if bound {
        if let Some(requests) = after.pointer_mut("/resources/requests") {
            walk::copy(requests, at(&before, "resources.requests"), "storage");
        }
        walk::copy(&mut after, &before, "volumeAttributesClassName");
    }
    let spec = root.field("spec");
    if !internal::equal("core.PersistentVolumeClaimSpec", &after, &before) {
        let difference = internal::difference("core.PersistentVolumeClaimSpec", &before, &after);
        errors.forbidden(
            &spec,
            format!("spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims\n{difference}"),
        );
    }
    let size = |v: &Value, path: &str| quantity(at(v, path));
    let zero = || quantity(&json!("0"));
    if let (Some(now), Some(then)) = (
        size(new, "spec.resources.requests.storage").or_else(zero),
        size(old, "spec.resources.requests.storage"),
    ) && now < then
        && size(old, "status.capacity.storage")
            .or_else(zero)
            .is_some_and(|capacity| now <= capacity)
    {
        errors.forbidden(
            &spec.field("resources.requests.storage"),
            "field can not be less than status.capacity",
        );
    }
    // COMPAT: upstream's path is without `spec`.
    let mode = root.field("volumeMode");
    errors.immutable(&mode.with(at(new, "spec.volumeMode")), at(old, "spec.volumeMode"));
    let attributes = root.field("spec.volumeAttributesClassName");
    let applied = !at(old, "status.currentVolumeAttributesClassName").is_null();
    if applied && !at(old, "spec.volumeAttributesClassName").is_null() && attributes.is_empty() {
        let to = if attributes.is_set() {
            "empty string"
        } else {
            "nil"
        };
        errors.forbidden(
            &attributes,
            format!("update to {to} is forbidden when status.currentVolumeAttributesClassName is not nil"),
        );
    }
    errors.into_vec()
}
