//! PersistentVolumes.

use serde_json::{Value, json};
use skiff_meta::field::ErrorType;
use skiff_meta::names;

use super::claim::{access_modes, amount, check_access_modes, class, phase, unset};
use super::resources::{basic_quantity, quantity};
use super::volume_sources::{self, VolumeOwner};
use super::{pod_defaults, scheduling};
use crate::errors::Errors;
use crate::internal;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column, wide};
use crate::node::{Node, at, list, same, text};
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
        let root = Node::root(object);
        let name = Role::Volume(text(object, "metadata.name"));
        spec(&root.field("spec"), name, false, &mut errors);
        errors.into_vec()
    },
    validate_status_update: |_, _| Vec::new(),
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let role = Role::Volume(text(new, "metadata.name"));
        let any_affinity = affinity_is_bad(old);
        // COMPAT: upstream checks it twice, so every complaint comes twice.
        spec(&root.field("spec"), role, any_affinity, &mut errors);
        spec(&root.field("spec"), role, any_affinity, &mut errors);
        let before = at(old, "spec");
        let mut after = at(new, "spec").clone();
        if !at(before, "csi").is_null() && at(before, "csi.controllerExpandSecretRef").is_null() {
            walk::each(&mut after, "csi", &mut |csi| {
                walk::remove(csi, "controllerExpandSecretRef")
            });
        }
        let changed = !internal::equal("core.PersistentVolumeSource", &after, before);
        if changed {
            let difference = internal::difference("core.PersistentVolumeSource", before, &after);
            errors.forbidden(
                &root.field("spec.persistentvolumesource"),
                format!("spec.persistentvolumesource is immutable after creation\n{difference}"),
            );
        }
        // COMPAT: upstream's path is without `spec`.
        let mode = root.field("volumeMode");
        errors.immutable(&mode.with(at(new, "spec.volumeMode")), at(old, "spec.volumeMode"));
        let affinity = at(new, "spec.nodeAffinity");
        let affinity_before = at(old, "spec.nodeAffinity");
        if !affinity_before.is_null() && !affinity_stays(affinity, affinity_before) {
            // COMPAT: upstream's path is without `spec`.
            let at = root.field("nodeAffinity");
            errors.invalid_value(
                &at,
                affinity.clone(),
                "field is immutable, except for updating from beta label to GA",
            );
        }
        if !at(old, "spec.volumeAttributesClassName").is_null()
            && at(new, "spec.volumeAttributesClassName").is_null()
        {
            errors.forbidden(
                &root.field("spec.volumeAttributesClassName"),
                "update from non-nil value to nil is forbidden",
            );
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
    update_again: Again::Twice,
    ..BASE
};

/// Whether affinity is as it was, but for labels that have their final names now.
fn affinity_stays(now: &Value, before: &Value) -> bool {
    const RENAMED: [(&str, &str); 5] = [
        (
            "failure-domain.beta.kubernetes.io/zone",
            "topology.kubernetes.io/zone",
        ),
        (
            "failure-domain.beta.kubernetes.io/region",
            "topology.kubernetes.io/region",
        ),
        ("beta.kubernetes.io/os", "kubernetes.io/os"),
        ("beta.kubernetes.io/arch", "kubernetes.io/arch"),
        (
            "beta.kubernetes.io/instance-type",
            "node.kubernetes.io/instance-type",
        ),
    ];
    let mut before = before.clone();
    let terms = list(now, "required.nodeSelectorTerms");
    let Some(Value::Array(old_terms)) = before.pointer_mut("/required/nodeSelectorTerms") else {
        return same(now, &before);
    };
    for (term, old_term) in terms.iter().zip(old_terms.iter_mut()) {
        for name in ["matchExpressions", "matchFields"] {
            let Some(Value::Array(requirements)) = old_term.get_mut(name) else {
                continue;
            };
            for (requirement, old) in list(term, name).iter().zip(requirements.iter_mut()) {
                let key = text(old, "key");
                // COMPAT: to upstream the final name of a label that it does not know is the empty one.
                let renamed = RENAMED
                    .iter()
                    .find(|(beta, _)| *beta == key)
                    .map_or("", |pair| pair.1);
                if text(requirement, "key") == renamed {
                    walk::copy(old, requirement, "key");
                }
            }
        }
    }
    same(now, &before)
}

/// Whether a volume has node affinity that no new volume could have.
fn affinity_is_bad(volume: &Value) -> bool {
    let root = Node::root(volume);
    let required = root.field("spec.nodeAffinity.required");
    let mut errors = Errors::new();
    if required.is_set() {
        scheduling::node_selector(&required, &mut errors);
    }
    !errors.is_empty()
}

/// What a spec is the spec of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Role<'a> {
    /// A volume of its own, with its name.
    Volume(&'a str),
    /// The inline spec of an attachment, which may say much less.
    Inline,
}

const NOT_INLINE: &str = "may not be specified in the context of inline volumes";

/// The rules of a volume's spec. `any_affinity`: a volume that has bad label values already may keep them.
pub fn spec(spec: &Node, role: Role, any_affinity: bool, errors: &mut Errors) {
    let inline = role == Role::Inline;
    let capacity = spec.field("capacity");
    if inline {
        for name in ["claimRef", "capacity"] {
            let field = spec.field(name);
            if field.is_set() && (name != "capacity" || !field.is_empty()) {
                errors.forbidden(&field, NOT_INLINE);
            }
        }
        if !spec.field("csi").is_set() {
            errors.required(
                &spec.field("csi"),
                "has to be specified in the context of inline volumes",
            );
        }
    }
    let modes = spec.field("accessModes");
    if modes.is_empty() {
        errors.required(&modes, "");
    }
    check_access_modes(spec, errors);
    if !inline {
        check_capacity(&capacity, errors);
    }
    let policy = spec.field("persistentVolumeReclaimPolicy");
    if !policy.is_empty() && inline {
        if policy.str() != "Retain" {
            errors.forbidden(&policy, "may only be Retain in the context of inline volumes");
        }
    } else if !policy.is_empty() {
        errors.one_of(&policy, &["Delete", "Recycle", "Retain"]);
    }
    let affinity = spec.field("nodeAffinity");
    if affinity.is_set() && inline {
        errors.forbidden(&affinity, NOT_INLINE);
    } else if affinity.is_set() {
        let required = affinity.field("required");
        if required.is_set() {
            scheduling::node_selector_with(&required, any_affinity, errors);
        } else {
            errors.required(&required, "must specify required node constraints");
        }
    }
    check_sources(spec, role, affinity.is_set() && !inline, errors);
    if is_root(spec.field("hostPath.path").str()) && policy.str() == "Recycle" {
        errors.forbidden(&policy, "may not be 'recycle' for a hostPath mount of '/'");
    }
    let class = spec.field("storageClassName");
    if !class.is_empty() && inline {
        errors.forbidden(&class, NOT_INLINE);
    } else if !class.is_empty() {
        errors.rule(&class, names::dns1123_subdomain(class.str()));
    }
    let mode = spec.field("volumeMode");
    if inline {
        if mode.is_set() && mode.str() != "Filesystem" {
            errors.forbidden(
                &mode,
                "may not specify volumeMode other than Filesystem in the context of inline volumes",
            );
        }
    } else {
        errors.one_of_if_set(&mode, &["Block", "Filesystem"]);
    }
    let attributes = spec.field("volumeAttributesClassName");
    if attributes.is_set() && !inline {
        if attributes.is_empty() {
            errors.required(&attributes, "an empty string is disallowed");
        } else {
            errors.rule(&attributes, names::dns1123_subdomain(attributes.str()));
        }
        if !spec.field("csi").is_set() {
            errors.required(
                &spec.field("csi"),
                "has to be specified when using volumeAttributesClassName",
            );
        }
    }
}

fn check_capacity(capacity: &Node, errors: &mut Errors) {
    if capacity.is_empty() {
        errors.required(capacity, "");
    }
    if !capacity.key("storage").is_set() || capacity.len() > 1 {
        let shown = if capacity.is_set() {
            capacity.value.clone()
        } else {
            Value::Null
        };
        errors.push(
            ErrorType::NotSupported,
            capacity,
            Some(shown),
            "supported values: \"storage\"",
        );
    }
    for (_, amount) in capacity.entries() {
        basic_quantity(&amount, errors);
        if let Some(quantity) = quantity(amount.value)
            && (quantity.is_zero() || quantity.is_negative())
        {
            errors.invalid_value(&amount, quantity.to_string(), crate::errors::POSITIVE);
        }
    }
}

fn check_sources(spec: &Node, role: Role, affinity: bool, errors: &mut Errors) {
    let place = VolumeOwner::PersistentVolume(match role {
        Role::Volume(name) => name,
        Role::Inline => "",
    });
    let mut found = false;
    for name in SOURCES {
        let source = spec.field(name);
        if !source.is_set() {
            continue;
        }
        // COMPAT: a flex volume does not mind others before it.
        if found && name != "flexVolume" {
            // COMPAT: upstream's name of this one.
            let shown = if name == "cephfs" { "cephFS" } else { name };
            errors.forbidden(&spec.field(shown), "may not specify more than 1 volume type");
            continue;
        }
        found = true;
        volume_sources::source(spec, name, place, errors);
        if name == "local" && !affinity {
            errors.required(&spec.field("nodeAffinity"), "Local volume requires node affinity");
        }
    }
    if !found {
        errors.required(spec, "must specify a volume type");
    }
}

fn is_root(path: &str) -> bool {
    path.starts_with('/') && path.split('/').all(|part| part.is_empty() || part == ".")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(spec: Value, expected: &[&str]) {
        let object = json!({"metadata": {"name": "pv"}, "spec": spec});
        let found: Vec<String> = (PERSISTENT_VOLUME.validate)(&object)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found, expected, "{object}");
    }

    #[test]
    fn specs() {
        let good = json!({"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/x"}});
        check(good.clone(), &[]);
        let with = |name: &str, value: Value| {
            let mut spec = good.clone();
            walk::put(&mut spec, name, value);
            spec
        };
        check(
            with("capacity", json!({"cpu": "1"})),
            &["spec.capacity: Unsupported value: {\"cpu\":\"1\"}: supported values: \"storage\""],
        );
        check(
            with("capacity", json!({"storage": "-1"})),
            &[
                "spec.capacity[storage]: Invalid value: -1: must be a valid resource quantity",
                "spec.capacity[storage]: Invalid value: \"-1\": must be greater than zero",
            ],
        );
        check(
            with("nfs", json!({"server": "s", "path": "/x"})),
            &["spec.nfs: Forbidden: may not specify more than 1 volume type"],
        );
        check(
            with("accessModes", json!([])),
            &["spec.accessModes: Required value"],
        );
        check(
            with("volumeAttributesClassName", json!("")),
            &[
                "spec.volumeAttributesClassName: Required value: an empty string is disallowed",
                "spec.csi: Required value: has to be specified when using volumeAttributesClassName",
            ],
        );
    }
}
