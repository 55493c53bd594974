//! The group `storage.k8s.io`.

use serde_json::{Value, json};
use skiff_meta::names;

use crate::core::pod_defaults;
use crate::errors::Errors;
use crate::kind::{AGE, BASE, Column, Kind, NAME, boolean, integer, text as column};
use crate::node::{Node, at, list, same, text};
use crate::{row, strategy, walk};

const GROUP: &str = "storage.k8s.io";
const UNSAFE_TOKENS: &str = "spec.serviceAccountTokenInSecrets is unset; if supported by this CSI driver, set to true to prevent possible logging of tokens in volume attributes";

pub static STORAGE_CLASS: Kind = Kind {
    group: GROUP,
    kind: "StorageClass",
    default: |_, object| {
        walk::pointer(object, "reclaimPolicy", "Delete");
        walk::pointer(object, "volumeBindingMode", "Immediate");
    },
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let provisioner = root.field("provisioner");
        if errors.require(&provisioner) {
            errors.rule(
                &provisioner,
                names::qualified_name(&provisioner.str().to_lowercase()),
            );
        }
        let policy = root.field("reclaimPolicy");
        if !policy.is_empty() {
            errors.one_of(&policy, &["Delete", "Retain"]);
        }
        let mode = root.field("volumeBindingMode");
        if mode.is_set() {
            errors.one_of(&mode, &["Immediate", "WaitForFirstConsumer"]);
        } else {
            errors.required(&mode, "");
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        for name in ["parameters", "provisioner", "reclaimPolicy"] {
            if !same(at(new, name), at(old, name)) {
                errors.forbidden(&root.field(name), format!("updates to {name} are forbidden."));
            }
        }
        errors.immutable(&root.field("volumeBindingMode"), at(old, "volumeBindingMode"));
        errors.into_vec()
    },
    columns: &[
        NAME,
        column("Provisioner"),
        column("ReclaimPolicy"),
        column("VolumeBindingMode"),
        column("AllowVolumeExpansion"),
        AGE,
    ],
    row: |object, now| {
        let mut name = text(object, "metadata.name").to_owned();
        let annotations = at(object, "metadata.annotations");
        let marks = [
            "storageclass.kubernetes.io/is-default-class",
            "storageclass.beta.kubernetes.io/is-default-class",
        ];
        if marks
            .iter()
            .any(|m| annotations.get(m).and_then(Value::as_str) == Some("true"))
        {
            name.push_str(" (default)");
        }
        let or = |path: &str, default: &str| match text(object, path) {
            "" => json!(default),
            value => json!(value),
        };
        vec![
            json!(name),
            json!(text(object, "provisioner")),
            or("reclaimPolicy", "Delete"),
            or("volumeBindingMode", "Immediate"),
            json!(at(object, "allowVolumeExpansion").as_bool().unwrap_or(false)),
            row::age(object, now),
        ]
    },
    ..BASE
};

pub static VOLUME_ATTACHMENT: Kind = Kind {
    group: GROUP,
    kind: "VolumeAttachment",
    default: |_, object| {
        walk::each(object, "spec.source.inlineVolumeSpec", &mut |spec| {
            walk::each(spec, "capacity", &mut pod_defaults::resource_list);
            walk::each(spec, "hostPath", &mut |source| walk::pointer(source, "type", ""));
            pod_defaults::old_volume_sources(spec);
        });
    },
    prepare_create: strategy::create_without_status,
    prepare_update: strategy::update_keep_status,
    prepare_status_update: strategy::status_only_keep_metadata,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let attacher = root.field("spec.attacher");
        if errors.require(&attacher) {
            errors.rule(&attacher, names::qualified_name(&attacher.str().to_lowercase()));
        }
        let source = root.field("spec.source");
        let inline = source.field("inlineVolumeSpec");
        let name = source.field("persistentVolumeName");
        match (inline.is_set(), name.is_set()) {
            (false, false) => errors.required(
                &source,
                "must specify exactly one of inlineVolumeSpec and persistentVolumeName",
            ),
            (true, true) => errors.forbidden(
                &source,
                "must specify exactly one of inlineVolumeSpec and persistentVolumeName",
            ),
            _ => {}
        }
        let node = root.field("spec.nodeName");
        errors.rule(&node, names::dns1123_subdomain(node.str()));
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.immutable(&root.field("spec"), at(old, "spec"));
        errors.into_vec()
    },
    columns: &[
        NAME,
        Column {
            format: "name",
            ..column("Attacher")
        },
        column("PV"),
        column("Node"),
        boolean("Attached"),
        AGE,
    ],
    row: |object, now| {
        vec![
            row::name(object),
            json!(text(object, "spec.attacher")),
            json!(text(object, "spec.source.persistentVolumeName")),
            json!(text(object, "spec.nodeName")),
            json!(at(object, "status.attached").as_bool().unwrap_or(false)),
            row::age(object, now),
        ]
    },
    has_status: true,
    allow_unconditional_update: false,
    ..BASE
};

pub static CSI_DRIVER: Kind = Kind {
    group: GROUP,
    kind: "CSIDriver",
    default: |_, object| {
        let Some(spec) = walk::object(object, "spec") else {
            return;
        };
        walk::pointer(spec, "attachRequired", true);
        for name in [
            "podInfoOnMount",
            "storageCapacity",
            "requiresRepublish",
            "seLinuxMount",
        ] {
            walk::pointer(spec, name, false);
        }
        walk::pointer(spec, "fsGroupPolicy", "ReadWriteOnceWithFSType");
        if list(spec, "volumeLifecycleModes").is_empty() {
            walk::put(spec, "volumeLifecycleModes", json!(["Persistent"]));
        }
    },
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        errors.one_of_if_set(
            &root.field("spec.fsGroupPolicy"),
            &["File", "None", "ReadWriteOnceWithFSType"],
        );
        let modes = root.field("spec.volumeLifecycleModes");
        for mode in modes.items() {
            errors.one_of(&modes.with(mode.value), &["Ephemeral", "Persistent"]);
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        for name in ["attachRequired", "volumeLifecycleModes"] {
            errors.immutable(&root.field("spec").field(name), at(at(old, "spec"), name));
        }
        errors.extend((CSI_DRIVER.validate)(new));
        errors.into_vec()
    },
    prepare_update: strategy::update_generation,
    warnings: |new, old| {
        let tokens = at(new, "spec.tokenRequests");
        let changed = old.is_none_or(|old| !same(tokens, at(old, "spec.tokenRequests")));
        let unset = at(new, "spec.serviceAccountTokenInSecrets").is_null();
        if changed && unset && !list(new, "spec.tokenRequests").is_empty() {
            return vec![UNSAFE_TOKENS.to_owned()];
        }
        Vec::new()
    },
    columns: &[
        NAME,
        boolean("AttachRequired"),
        boolean("PodInfoOnMount"),
        boolean("StorageCapacity"),
        column("TokenRequests"),
        boolean("RequiresRepublish"),
        column("Modes"),
        AGE,
    ],
    row: |object, now| {
        let flag =
            |name: &str, default: bool| json!(at(at(object, "spec"), name).as_bool().unwrap_or(default));
        let join = |list: &[Value], field: &str| -> String {
            let texts: Vec<&str> = list
                .iter()
                .map(|v| {
                    if field.is_empty() {
                        v.as_str().unwrap_or("")
                    } else {
                        text(v, field)
                    }
                })
                .collect();
            texts.join(",")
        };
        let tokens = match at(object, "spec.tokenRequests") {
            Value::Null => "<unset>".to_owned(),
            _ => join(list(object, "spec.tokenRequests"), "audience"),
        };
        vec![
            row::name(object),
            flag("attachRequired", true),
            flag("podInfoOnMount", false),
            flag("storageCapacity", false),
            json!(tokens),
            flag("requiresRepublish", false),
            row::or_none(&join(list(object, "spec.volumeLifecycleModes"), "")),
            row::age(object, now),
        ]
    },
    allow_unconditional_update: false,
    ..BASE
};

pub static CSI_NODE: Kind = Kind {
    group: GROUP,
    kind: "CSINode",
    columns: &[NAME, integer("Drivers"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(list(object, "spec.drivers").len()),
            row::age(object, now),
        ]
    },
    allow_unconditional_update: false,
    ..BASE
};

pub static CSI_STORAGE_CAPACITY: Kind = Kind {
    group: GROUP,
    kind: "CSIStorageCapacity",
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let class = root.field("storageClassName");
        if errors.require(&class) {
            errors.rule(&class, names::dns1123_subdomain(class.str()));
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        for name in ["nodeTopology", "storageClassName"] {
            errors.immutable(&root.field(name), at(old, name));
        }
        errors.into_vec()
    },
    allow_unconditional_update: false,
    ..BASE
};

pub static VOLUME_ATTRIBUTES_CLASS: Kind = Kind {
    group: GROUP,
    kind: "VolumeAttributesClass",
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let driver = root.field("driverName");
        if errors.require(&driver) {
            errors.rule(&driver, names::dns1123_subdomain(&driver.str().to_lowercase()));
        }
        let parameters = root.field("parameters");
        if parameters.is_empty() {
            errors.required(&parameters, "must contain at least one key/value pair");
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        for name in ["driverName", "parameters"] {
            if !same(at(new, name), at(old, name)) {
                errors.forbidden(
                    &root.field(name),
                    "updates to ".to_owned() + name + " are forbidden.",
                );
            }
        }
        errors.into_vec()
    },
    columns: &[NAME, column("DriverName"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(text(object, "driverName")),
            row::age(object, now),
        ]
    },
    ..BASE
};
