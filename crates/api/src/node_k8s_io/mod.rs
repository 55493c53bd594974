//! The group `node.k8s.io`: RuntimeClasses.

use serde_json::json;
use skiff_meta::names;

use crate::core::{resources, scheduling};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column};
use crate::node::{Node, at, text};
use crate::{object_meta, row};

pub static RUNTIME_CLASS: Kind = Kind {
    group: "node.k8s.io",
    kind: "RuntimeClass",
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let handler = root.field("handler");
        if errors.require(&handler) {
            errors.rule(&handler, names::dns1123_label(handler.str()));
        }
        let overhead = root.field("overhead");
        resources::overhead(&overhead, at(object, "overhead.podFixed"), &mut errors);
        object_meta::labels(&root.field("scheduling.nodeSelector"), &mut errors);
        let tolerations = root.field("scheduling.tolerations");
        scheduling::tolerations(&tolerations, &mut errors);
        for (position, toleration) in tolerations.items().enumerate() {
            if tolerations
                .items()
                .take(position)
                .any(|before| before.value == toleration.value)
            {
                errors.duplicate(&toleration);
            }
        }
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
    update_again: Again::ObjectFirst,
    ..BASE
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules() {
        let check = |object: serde_json::Value, expected: &[&str]| {
            let found = (RUNTIME_CLASS.validate)(&object);
            let found: Vec<String> = RUNTIME_CLASS
                .shown(found)
                .iter()
                .map(ToString::to_string)
                .collect();
            assert_eq!(found, expected);
        };
        check(json!({"handler": "h"}), &[]);
        check(json!({}), &["handler: Required value"]);
        check(
            json!({"handler": "h", "overhead": {"podFixed": {"hugepages-2Mi": "1"}}}),
            &[
                "overhead.limits[hugepages-2Mi]: Invalid value: \"1\": 1 is not positive integer multiple of hugepages-2Mi",
                "overhead: Forbidden: HugePages require cpu or memory",
            ],
        );
        let toleration = json!({"key": "k", "operator": "Exists"});
        check(
            json!({"handler": "h", "scheduling": {"tolerations": [toleration, toleration]}}),
            &[
                "scheduling.tolerations[1]: Duplicate value: {\"Key\":\"k\",\"Operator\":\"Exists\",\"Value\":\"\",\"Effect\":\"\",\"TolerationSeconds\":null}",
            ],
        );
    }
}
