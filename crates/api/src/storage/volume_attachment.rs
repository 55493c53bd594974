//! VolumeAttachments: that a volume is to be, or is, attached to a node.

use serde_json::json;
use skiff_meta::names;

use super::GROUP;
use crate::core::persistent_volume::{self, Role};
use crate::core::pod_defaults;
use crate::core::volume_sources::csi_driver_name;
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Column, Kind, NAME, STATUS_ALONE, boolean, text as column};
use crate::node::{Node, at, text};
use crate::{row, strategy, walk};

const METADATA_MAX: usize = 256 * 1024;
const MESSAGE_MAX: usize = 1024;
const ONE_SOURCE: &str = "must specify exactly one of inlineVolumeSpec and persistentVolumeName";

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
        csi_driver_name(&root.field("spec.attacher"), &mut errors);
        let source = root.field("spec.source");
        let inline = source.field("inlineVolumeSpec");
        let name = source.field("persistentVolumeName");
        match (inline.is_set(), name.is_set()) {
            (false, false) => errors.required(&source, ONE_SOURCE),
            (true, true) => errors.forbidden(&source, ONE_SOURCE),
            (false, true) => {
                if name.is_empty() {
                    errors.required(&name, "must specify non empty persistentVolumeName");
                }
            }
            (true, false) => persistent_volume::spec(&inline, Role::Inline, false, &mut errors),
        }
        let node = root.field("spec.nodeName");
        errors.rule(&node, names::dns1123_subdomain(node.str()));
        let metadata = root.field("status.attachmentMetadata");
        let size: usize = metadata
            .entries()
            .map(|(key, value)| key.len() + value.len())
            .sum();
        if size > METADATA_MAX {
            errors.too_long(&metadata, METADATA_MAX);
        }
        for name in ["status.attachError", "status.detachError"] {
            let error = root.field(name);
            if error.field("message").len() > MESSAGE_MAX {
                // COMPAT: upstream names the other limit.
                errors.too_long(&error.field("message"), METADATA_MAX);
            }
            let code = error.field("errorCode");
            if code.int().is_some_and(|code| code < 0) {
                errors.invalid(&code, "must be between 0 and 2147483647, inclusive");
            }
        }
        if name.is_set() {
            errors.rule(&name, names::dns1123_subdomain(name.str()));
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.extend((VOLUME_ATTACHMENT.validate)(new));
        errors.immutable_as(
            "storage.VolumeAttachmentSpec",
            &root.field("spec"),
            at(old, "spec"),
        );
        errors.into_vec()
    },
    validate_status_update: |new, old| (VOLUME_ATTACHMENT.validate_update)(new, old),
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
    update_again: Again::Object,
    status_again: Again::Object,
    allow_unconditional_update: false,
    reset_fields: STATUS_ALONE,
    ..BASE
};
