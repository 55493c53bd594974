//! The group `storagemigration.k8s.io`: StorageVersionMigrations. It is off by default.

use serde_json::{Value, json};
use skiff_meta::names;

use crate::errors::{Errors, IMMUTABLE};
use crate::kind::{Again, BASE, Kind, STATUS_ALONE, text as column};
use crate::node::{Node, at, list, text};
use crate::object_meta::conditions;
use crate::{row, strategy};

pub static STORAGE_VERSION_MIGRATION: Kind = Kind {
    group: "storagemigration.k8s.io",
    kind: "StorageVersionMigration",
    version: "v1beta1",
    prepare_create: strategy::create_without_status,
    prepare_update: strategy::update_keep_status,
    prepare_status_update: strategy::status_only_keep_metadata,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let (resource, group) = (
            root.field("spec.resource.resource"),
            root.field("spec.resource.group"),
        );
        if resource.is_empty() {
            errors.required(&resource, "resource is required to be set");
        } else {
            joined(&resource, names::dns1035_label(resource.str()), &mut errors);
        }
        if !group.is_empty() {
            joined(&group, names::dns1123_subdomain(group.str()), &mut errors);
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        errors.extend((STORAGE_VERSION_MIGRATION.validate)(new));
        errors.immutable(&Node::root(new).field("spec"), at(old, "spec"));
        errors.into_vec()
    },
    validate_status_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let (version, all) = (
            root.field("status.resourceVersion"),
            root.field("status.conditions"),
        );
        if !version.is_empty() && !is_resource_version(version.str()) {
            let detail = format!("resource version is not well formed: {}", version.str());
            errors.invalid(&version, detail);
        }
        conditions(&all, &mut errors);
        let before = text(old, "status.resourceVersion");
        if !before.is_empty() && before != version.str() {
            errors.invalid(&version, IMMUTABLE);
        }
        let mut refuse = |detail: &str| errors.invalid_value(&all, all.value.clone(), detail);
        let (succeeded, failed) = (is_true(new, "Succeeded"), is_true(new, "Failed"));
        if succeeded && failed {
            refuse("Both success and failed conditions cannot be true at the same time");
        }
        if is_true(old, "Succeeded") && !succeeded {
            refuse("Success condition cannot be set to false once it is true");
        }
        if is_true(old, "Failed") && !failed {
            refuse("Failed condition cannot be set to false once it is true");
        }
        errors.into_vec()
    },
    columns: &[column("Name"), column("Resource"), column("Status")],
    row: |object, _| {
        let (resource, group) = (
            text(object, "spec.resource.resource"),
            text(object, "spec.resource.group"),
        );
        let resource = match group {
            "" => resource.to_owned(),
            group => format!("{resource}.{group}"),
        };
        let status = list(object, "status.conditions")
            .iter()
            .filter(|condition| text(condition, "status") == "True")
            .map(|condition| text(condition, "type"))
            .rfind(|kind| ["Running", "Succeeded", "Failed"].contains(kind));
        vec![
            row::name(object),
            json!(resource),
            json!(status.unwrap_or("Unknown")),
        ]
    },
    has_status: true,
    allow_unconditional_update: false,
    update_again: Again::ObjectFirst,
    reset_fields: STATUS_ALONE,
    ..BASE
};

/// COMPAT: all complaints about a name are one.
fn joined(at: &Node, complaints: Vec<String>, errors: &mut Errors) {
    if !complaints.is_empty() {
        errors.invalid(at, complaints.join(","));
    }
}

/// A number above zero without leading zeros.
fn is_resource_version(text: &str) -> bool {
    !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_true(object: &Value, kind: &str) -> bool {
    let found = list(object, "status.conditions")
        .iter()
        .find(|condition| text(condition, "type") == kind);
    found.is_some_and(|condition| text(condition, "status") == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn migration(resource: Value, status: Value) -> Value {
        json!({"apiVersion": "storagemigration.k8s.io/v1beta1", "kind": "StorageVersionMigration",
            "metadata": {"name": "m", "uid": "u", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"resource": resource}, "status": status})
    }

    fn condition(kind: &str, status: &str) -> Value {
        json!({"type": kind, "status": status, "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"})
    }

    fn messages(errors: Vec<skiff_meta::field::Error>) -> Vec<String> {
        errors
            .iter()
            .map(|error| format!("{}: {}", error.path, error.detail))
            .collect()
    }

    #[test]
    fn the_resource_is_a_name() {
        let check = |resource: Value, expected: &[&str]| {
            let found =
                messages(STORAGE_VERSION_MIGRATION.check_create(&migration(resource, json!({})), false));
            assert_eq!(found.len(), expected.len(), "{found:?}");
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.starts_with(expected), "{found}");
            }
        };
        check(json!({"resource": "secrets"}), &[]);
        check(json!({"resource": "deployments", "group": "apps"}), &[]);
        check(
            json!({}),
            &["spec.resource.resource: resource is required to be set"],
        );
        check(
            json!({"resource": "Se crets", "group": "a_b"}),
            &[
                "spec.resource.resource: a DNS-1035 label must",
                "spec.resource.group: a lowercase RFC 1123 subdomain must",
            ],
        );
    }

    #[test]
    fn the_spec_does_not_change() {
        let (old, new) = (
            migration(json!({"resource": "secrets"}), json!({})),
            migration(json!({"resource": "pods"}), json!({})),
        );
        let found = messages(STORAGE_VERSION_MIGRATION.check_update(&new, &old, false));
        assert_eq!(found, ["spec: field is immutable"]);
        assert!(
            STORAGE_VERSION_MIGRATION
                .check_update(&old, &old, false)
                .is_empty()
        );
    }

    #[test]
    fn an_end_is_an_end() {
        let check = |old: Value, new: Value, expected: &[&str]| {
            let of = |status: Value| migration(json!({"resource": "secrets"}), status);
            let found = messages(STORAGE_VERSION_MIGRATION.check_status_update(&of(new), &of(old), false));
            assert_eq!(found, expected);
        };
        let done = json!({"resourceVersion": "7", "conditions": [condition("Succeeded", "True")]});
        check(json!({}), done.clone(), &[]);
        check(done.clone(), done.clone(), &[]);
        check(
            done.clone(),
            json!({"resourceVersion": "8", "conditions": [condition("Succeeded", "False")]}),
            &[
                "status.resourceVersion: field is immutable",
                "status.conditions: Success condition cannot be set to false once it is true",
            ],
        );
        check(
            json!({}),
            json!({"resourceVersion": "07",
                "conditions": [condition("Succeeded", "True"), condition("Failed", "True")]}),
            &[
                "status.resourceVersion: resource version is not well formed: 07",
                "status.conditions: Both success and failed conditions cannot be true at the same time",
            ],
        );
        check(
            json!({"conditions": [condition("Failed", "True")]}),
            json!({}),
            &["status.conditions: Failed condition cannot be set to false once it is true"],
        );
    }

    #[test]
    fn the_table_shows_the_last_condition() {
        let row = |resource, status| (STORAGE_VERSION_MIGRATION.row)(&migration(resource, status), 0);
        assert_eq!(
            row(json!({"resource": "secrets"}), json!({})),
            [json!("m"), json!("secrets"), json!("Unknown")]
        );
        let status = json!({"conditions": [condition("Running", "False"), condition("Succeeded", "True")]});
        assert_eq!(
            row(json!({"resource": "deployments", "group": "apps"}), status),
            [json!("m"), json!("deployments.apps"), json!("Succeeded")]
        );
    }
}
