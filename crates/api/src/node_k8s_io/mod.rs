//! The group `node.k8s.io`: RuntimeClasses.

use serde_json::json;
use skiff_meta::names;

use crate::core::{pod_defaults, resources, scheduling};
use crate::errors::Errors;
use crate::kind::{AGE, BASE, Kind, NAME, text as column};
use crate::node::{Node, at, text};
use crate::{object_meta, row, walk};

pub static RUNTIME_CLASS: Kind = Kind {
    group: "node.k8s.io",
    kind: "RuntimeClass",
    default: |_, object| walk::each(object, "overhead.podFixed", &mut pod_defaults::resource_list),
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let handler = root.field("handler");
        errors.rule(&handler, names::dns1123_label(handler.str()));
        resources::overhead(&root.field("overhead.podFixed"), &mut errors);
        object_meta::labels(&root.field("scheduling.nodeSelector"), &mut errors);
        scheduling::tolerations(&root.field("scheduling.tolerations"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.extend((RUNTIME_CLASS.validate)(new));
        errors.immutable(&root.field("handler"), at(old, "handler"));
        errors.into_vec()
    },
    columns: &[NAME, column("Handler"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(text(object, "handler")),
            row::age(object, now),
        ]
    },
    allow_create_on_update: true,
    allow_unconditional_update: false,
    qualified_finalizers: false,
    ..BASE
};
