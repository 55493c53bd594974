//! Namespaces: the label with the own name, the finalizer, the two phases.

use serde_json::{Value, json};
use skiff_meta::names;

use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, Part, text as column, unsupported_field};
use crate::node::{Node, at, list, text};
use crate::{object_meta, row, strategy, walk};

pub static NAMESPACE: Kind = Kind {
    kind: "Namespace",
    default: |_, object| {
        name_label(object);
        if let Some(status) = walk::object(object, "status") {
            walk::string(status, "phase", "Active");
        }
    },
    prepare_create: |object| {
        walk::put(object, "status", json!({"phase": "Active"}));
        name_label(object);
        if let Some(spec) = walk::object(object, "spec") {
            let mut finalizers = list(spec, "finalizers").to_vec();
            if !finalizers.contains(&json!("kubernetes")) {
                finalizers.push(json!("kubernetes"));
            }
            walk::put(spec, "finalizers", Value::Array(finalizers));
        }
    },
    prepare_update: |new, old| {
        // Finalizers change through their own subresource only.
        if let Some(spec) = walk::object(new, "spec") {
            walk::copy(spec, at(old, "spec"), "finalizers");
        }
        strategy::update_keep_status(new, old);
        name_label(new);
    },
    prepare_status_update: |new, old| {
        strategy::status_only(new, old);
        name_label(new);
    },
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        finalizers(&root.field("spec.finalizers"), &mut errors);
        errors.into_vec()
    },
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        // COMPAT: upstream's path has a capital letter.
        let at = root.field("status.Phase");
        let phase = root.field("status.phase");
        let (wanted, when) = if root.field("metadata.deletionTimestamp").is_set() {
            ("Terminating", "`deletionTimestamp` is not empty")
        } else {
            ("Active", "`deletionTimestamp` is empty")
        };
        if phase.str() != wanted {
            errors.invalid_value(&at, phase.str(), format!("may only be '{wanted}' if {when}"));
        }
        errors.into_vec()
    },
    selectable: |object| vec![("status.phase", text(object, "status.phase").to_owned())],
    columns: &[NAME, column("Status"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(text(object, "status.phase")),
            row::age(object, now),
        ]
    },
    has_status: true,
    name_rule: object_meta::dns_label,
    update_again: Again::ObjectFirst,
    own_delete: true,
    reset_fields: &[("finalize", &[&["status"]])],
    parts: &[Part {
        name: "finalize",
        prepare: prepare_finalize_update,
        validate: validate_finalize_update,
    }],
    unknown_field: unsupported_field,
    ..BASE
};

/// Every namespace is labelled with its name, so that selectors can choose it.
fn name_label(object: &mut Value) {
    let name = text(object, "metadata.name").to_owned();
    if name.is_empty() {
        return;
    }
    if let Some(labels) = object.get_mut("metadata").and_then(|m| walk::object(m, "labels")) {
        walk::put(labels, "kubernetes.io/metadata.name", json!(name));
    }
}

/// The namespace controller's last word: all but the status may change.
fn prepare_finalize_update(new: &mut Value, old: &Value) {
    walk::copy(new, old, "status");
}

fn validate_finalize_update(new: &Value, _: &Value) -> Vec<skiff_meta::field::Error> {
    let mut errors = Errors::new();
    for finalizer in Node::root(new).field("spec.finalizers").items() {
        finalizer_name(finalizer.str(), &finalizer, &mut errors);
    }
    errors.into_vec()
}

/// The rules of `spec.finalizers`.
pub fn finalizers(finalizers: &Node, errors: &mut Errors) {
    for finalizer in finalizers.items() {
        finalizer_name(finalizer.str(), finalizers, errors);
    }
}

/// COMPAT: the main resource complains of the list, the subresource of its element.
fn finalizer_name(name: &str, at: &Node, errors: &mut Errors) {
    for complaint in names::qualified_name(name) {
        errors.invalid_value(at, name, complaint);
    }
    if !name.contains('/') && !["kubernetes", "orphan", "foregroundDeletion"].contains(&name) {
        errors.invalid_value(
            at,
            name,
            "name is neither a standard finalizer name nor is it fully qualified",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_namespace() {
        let mut namespace = json!({"metadata": {"name": "n"}});
        (NAMESPACE.default)("v1", &mut namespace);
        NAMESPACE.begin_create(&mut namespace);
        assert_eq!(
            namespace,
            json!({"metadata": {"name": "n", "labels": {"kubernetes.io/metadata.name": "n"}},
                "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}})
        );
        assert_eq!(NAMESPACE.check_create(&namespace, false), vec![]);
    }

    #[test]
    fn the_status_stays() {
        let old = json!({"metadata": {"name": "n"}, "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Terminating"}});
        let mut new = json!({"metadata": {"name": "n", "labels": {"a": "b"}}, "spec": {}, "status": {"phase": "Active"}});
        prepare_finalize_update(&mut new, &old);
        assert_eq!(
            new,
            json!({"metadata": {"name": "n", "labels": {"a": "b"}}, "spec": {}, "status": {"phase": "Terminating"}})
        );
    }
}
