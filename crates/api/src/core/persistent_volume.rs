//! PersistentVolumes.

use serde_json::{Value, json};
use skiff_meta::names;

use super::claim::{access_modes, amount, check_access_modes, class, phase, unset};
use super::resources::quantity;
use super::{pod_defaults, scheduling, volume};
use crate::errors::Errors;
use crate::kind::{AGE, BASE, Kind, NAME, text as column, wide};
use crate::node::{Node, at, same, text};
use crate::{row, strategy, walk};

const SOURCES: [&str; 22] = [
    "hostPath",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "glusterfs",
    "flocker",
    "nfs",
    "rbd",
    "quobyte",
    "cephfs",
    "iscsi",
    "cinder",
    "fc",
    "flexVolume",
    "azureFile",
    "vsphereVolume",
    "photonPersistentDisk",
    "portworxVolume",
    "azureDisk",
    "scaleIO",
    "local",
    "storageos",
    "csi",
];

pub static PERSISTENT_VOLUME: Kind = Kind {
    kind: "PersistentVolume",
    default: |_, object| {
        if let Some(status) = walk::object(object, "status") {
            walk::string(status, "phase", "Pending");
        }
        if let Some(spec) = walk::object(object, "spec") {
            walk::string(spec, "persistentVolumeReclaimPolicy", "Retain");
            walk::pointer(spec, "volumeMode", "Filesystem");
            walk::each(spec, "capacity", &mut pod_defaults::resource_list);
            walk::each(spec, "hostPath", &mut |source| walk::pointer(source, "type", ""));
            pod_defaults::old_volume_sources(spec);
        }
    },
    prepare_create: |object| {
        let mut status = json!({"phase": "Pending"});
        // The moment of creation is the moment of the first phase.
        let created = text(object, "metadata.creationTimestamp").to_owned();
        if !created.is_empty() {
            walk::put(&mut status, "lastPhaseTransitionTime", json!(created));
        }
        walk::put(object, "status", status);
    },
    prepare_status_update: |new, old| {
        strategy::status_only(new, old);
        let same_phase = text(new, "status.phase") == text(old, "status.phase");
        if same_phase && let Some(status) = walk::object(new, "status") {
            walk::pointer(
                status,
                "lastPhaseTransitionTime",
                at(old, "status.lastPhaseTransitionTime").clone(),
            );
        }
    },
    prepare_update: strategy::update_keep_status,
    validate: |object| {
        let mut errors = Errors::new();
        spec(&Node::root(object), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        spec(&root, &mut errors);
        let changed = SOURCES
            .iter()
            .any(|s| !same(at(at(new, "spec"), s), at(at(old, "spec"), s)));
        if changed {
            errors.forbidden(
                &root.field("spec.persistentvolumesource"),
                "spec.persistentvolumesource is immutable after creation",
            );
        }
        // COMPAT: upstream's path is without `spec`.
        let mode = root.field("volumeMode");
        errors.immutable(&mode.with(at(new, "spec.volumeMode")), at(old, "spec.volumeMode"));
        if !at(old, "spec.nodeAffinity").is_null() {
            errors.immutable(&root.field("spec.nodeAffinity"), at(old, "spec.nodeAffinity"));
        }
        errors.into_vec()
    },
    selectable: |object| vec![("name", text(object, "metadata.name").to_owned())],
    columns: &[
        NAME,
        column("Capacity"),
        column("Access Modes"),
        column("Reclaim Policy"),
        column("Status"),
        column("Claim"),
        column("StorageClass"),
        column("VolumeAttributesClass"),
        column("Reason"),
        AGE,
        wide("VolumeMode"),
    ],
    row: |object, now| {
        let claim = match at(object, "spec.claimRef") {
            Value::Null => String::new(),
            claim => format!("{}/{}", text(claim, "namespace"), text(claim, "name")),
        };
        vec![
            row::name(object),
            json!(amount(at(object, "spec.capacity.storage"))),
            json!(access_modes(at(object, "spec.accessModes"))),
            json!(text(object, "spec.persistentVolumeReclaimPolicy")),
            json!(phase(object)),
            json!(claim),
            json!(class(object, "spec.storageClassName")),
            json!(unset(text(object, "spec.volumeAttributesClassName"))),
            json!(text(object, "status.reason")),
            row::age(object, now),
            json!(unset(text(object, "spec.volumeMode"))),
        ]
    },
    has_status: true,
    warnings: |new, _| {
        let mut warnings = Vec::new();
        for (key, why) in [
            (
                "volume.beta.kubernetes.io/storage-class",
                "deprecated since v1.8; use \"storageClassName\" attribute instead",
            ),
            (
                "volume.beta.kubernetes.io/mount-options",
                "deprecated since v1.31; use \"mountOptions\" attribute instead",
            ),
        ] {
            if at(new, "metadata.annotations").get(key).is_some() {
                warnings.push(format!("metadata.annotations[{key}]: {why}"));
            }
        }
        if text(new, "spec.persistentVolumeReclaimPolicy") == "Recycle" {
            warnings.push("spec.persistentVolumeReclaimPolicy: The Recycle reclaim policy is deprecated. Instead, the recommended approach is to use dynamic provisioning.".to_owned());
        }
        for (field, shown, why) in [
            (
                "cephfs",
                "cephfs",
                "deprecated in v1.28, non-functional in v1.31+",
            ),
            (
                "photonPersistentDisk",
                "photonPersistentDisk",
                "deprecated in v1.11, non-functional in v1.16+",
            ),
            (
                "scaleIO",
                "scaleIO",
                "deprecated in v1.16, non-functional in v1.22+",
            ),
            (
                "storageos",
                "storageOS",
                "deprecated in v1.22, non-functional in v1.25+",
            ),
            (
                "glusterfs",
                "glusterfs",
                "deprecated in v1.25, non-functional in v1.26+",
            ),
            ("rbd", "rbd", "deprecated in v1.28, non-functional in v1.31+"),
        ] {
            if !at(at(new, "spec"), field).is_null() {
                warnings.push(format!("spec.{shown}: {why}"));
            }
        }
        warnings
    },
    ..BASE
};

fn spec(root: &Node, errors: &mut Errors) {
    let spec = root.field("spec");
    check_access_modes(&spec, errors);
    let capacity = spec.field("capacity");
    if capacity.is_empty() {
        errors.required(&capacity, "");
    }
    let storage = capacity.key("storage");
    if !capacity.is_empty() && (!storage.is_set() || capacity.len() > 1) {
        // COMPAT: upstream names the type of the list here.
        errors.not_supported(&capacity, &["storage"]);
    }
    if let Some(amount) = quantity(storage.value)
        && (amount.is_zero() || amount.is_negative())
    {
        errors.invalid_value(&storage, amount.to_string(), crate::errors::POSITIVE);
    }
    let policy = spec.field("persistentVolumeReclaimPolicy");
    if !policy.is_empty() {
        errors.one_of(&policy, &["Delete", "Recycle", "Retain"]);
    }
    let affinity = spec.field("nodeAffinity");
    if affinity.is_set() {
        let required = affinity.field("required");
        if required.is_set() {
            scheduling::node_selector(&required, errors);
        } else {
            errors.required(&required, "must specify required node constraints");
        }
    }
    let mut found = false;
    for name in SOURCES {
        let source = spec.field(name);
        if !source.is_set() {
            continue;
        }
        if found {
            errors.forbidden(&source, "may not specify more than 1 volume type");
            continue;
        }
        found = true;
        match name {
            "hostPath" => volume::host_path(&source, errors),
            "local" => {
                let path = source.field("path");
                if errors.require(&path) && path.str().split('/').any(|p| p == "..") {
                    errors.invalid(&path, "must not contain '..'");
                }
                if !affinity.is_set() {
                    errors.required(
                        &root.field("metadata.annotations"),
                        "Local volume requires node affinity",
                    );
                }
            }
            "csi" => {
                let driver = source.field("driver");
                if errors.require(&driver) {
                    errors.rule(&driver, names::dns1123_subdomain(&driver.str().to_lowercase()));
                }
                errors.require(&source.field("volumeHandle"));
            }
            _ => volume::older_source(name, &source, errors),
        }
    }
    if !found {
        errors.required(&spec, "must specify a volume type");
    }
    if spec.field("hostPath.path").str() == "/" && policy.str() == "Recycle" {
        errors.forbidden(&policy, "may not be 'recycle' for a hostPath mount of '/'");
    }
    let class = spec.field("storageClassName");
    if !class.is_empty() {
        errors.rule(&class, names::dns1123_subdomain(class.str()));
    }
    errors.one_of_if_set(&spec.field("volumeMode"), &["Block", "Filesystem"]);
}
