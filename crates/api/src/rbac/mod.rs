//! Kinds of the group `rbac.authorization.k8s.io`: roles and their bindings.

use serde_json::{Value, json};
use skiff_meta::field::ErrorType;

use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column, wide};
use crate::node::{Node, at, list, same, text};
use crate::object_meta::{self, label_selector, selector_is_bad};
use crate::{row, walk};

const GROUP: &str = "rbac.authorization.k8s.io";

pub static ROLE: Kind = Kind {
    group: GROUP,
    kind: "Role",
    validate: |object| rules(object, true),
    validate_update: |new, _| rules(new, true),
    name_rule: object_meta::path_segment,
    allow_create_on_update: true,
    update_again: Again::ObjectFirst,
    ..BASE
};

pub static CLUSTER_ROLE: Kind = Kind {
    group: GROUP,
    kind: "ClusterRole",
    validate: |object| rules(object, false),
    validate_update: |new, _| rules(new, false),
    name_rule: object_meta::path_segment,
    allow_create_on_update: true,
    update_again: Again::ObjectFirst,
    ..BASE
};

pub static ROLE_BINDING: Kind = Kind {
    kind: "RoleBinding",
    validate: |o| binding(o, true),
    validate_update: |new, old| binding_update(new, old, true),
    ..BINDING
};

pub static CLUSTER_ROLE_BINDING: Kind = Kind {
    kind: "ClusterRoleBinding",
    validate: |o| binding(o, false),
    validate_update: |new, old| binding_update(new, old, false),
    ..BINDING
};

const BINDING: Kind = Kind {
    group: GROUP,
    default: |_, object| {
        if let Some(role) = walk::object(object, "roleRef") {
            walk::string(role, "apiGroup", GROUP);
        }
        walk::each(object, "subjects[]", &mut |subject| {
            if ["User", "Group"].contains(&text(subject, "kind")) {
                walk::string(subject, "apiGroup", GROUP);
            }
        });
    },
    columns: &[
        NAME,
        column("Role"),
        AGE,
        wide("Users"),
        wide("Groups"),
        wide("ServiceAccounts"),
    ],
    row: |object, now| {
        let of = |kind: &str| -> String {
            let subjects = list(object, "subjects")
                .iter()
                .filter(|s| text(s, "kind") == kind);
            let names: Vec<String> = subjects
                .map(|s| match kind {
                    "ServiceAccount" => format!("{}/{}", text(s, "namespace"), text(s, "name")),
                    _ => text(s, "name").to_owned(),
                })
                .collect();
            names.join(", ")
        };
        let role = format!(
            "{}/{}",
            text(object, "roleRef.kind"),
            text(object, "roleRef.name")
        );
        vec![
            row::name(object),
            json!(role),
            row::age(object, now),
            json!(of("User")),
            json!(of("Group")),
            json!(of("ServiceAccount")),
        ]
    },
    name_rule: object_meta::path_segment,
    allow_create_on_update: true,
    update_again: Again::ObjectFirst,
    ..BASE
};

fn rules(object: &Value, namespaced: bool) -> Vec<skiff_meta::field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(object);
    let rules = root.field("rules");
    for rule in rules.items() {
        let verbs = rule.field("verbs");
        if verbs.is_empty() {
            errors.required(&verbs, "verbs must contain at least one value");
        }
        let urls = rule.field("nonResourceURLs");
        let (groups, resources) = (rule.field("apiGroups"), rule.field("resources"));
        if !urls.is_empty() {
            if namespaced {
                errors.invalid(&urls, "namespaced rules cannot apply to non-resource URLs");
            }
            if !groups.is_empty() || !resources.is_empty() || !rule.field("resourceNames").is_empty() {
                errors.invalid(
                    &urls,
                    "rules cannot apply to both regular resources and non-resource URLs",
                );
            }
            continue;
        }
        if groups.is_empty() {
            errors.required(&groups, "resource rules must supply at least one api group");
        }
        if resources.is_empty() {
            errors.required(&resources, "resource rules must supply at least one resource");
        }
    }
    let aggregation = root.field("aggregationRule");
    if !namespaced && aggregation.is_set() {
        let selectors = aggregation.field("clusterRoleSelectors");
        if selectors.is_empty() {
            errors.required(
                &selectors,
                "at least one clusterRoleSelector required if aggregationRule is non-nil",
            );
        }
        for selector in selectors.items() {
            label_selector(&selector, &mut errors);
            if selector_is_bad(selector.value) {
                // COMPAT: upstream shows the selector that it could not make.
                errors.push(
                    ErrorType::Invalid,
                    &selector,
                    Some(Value::Null),
                    "invalid label selector.",
                );
            }
        }
    }
    errors.into_vec()
}

fn binding(object: &Value, namespaced: bool) -> Vec<skiff_meta::field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(object);
    let role = root.field("roleRef");
    errors.one_of(&role.field("apiGroup"), &[GROUP]);
    if namespaced {
        errors.one_of(&role.field("kind"), &["Role", "ClusterRole"]);
    } else {
        errors.one_of(&role.field("kind"), &["ClusterRole"]);
    }
    let name = role.field("name");
    if errors.require(&name) {
        errors.rule(&name, object_meta::path_segment(name.str(), false));
    }
    let subjects = root.field("subjects");
    for subject in subjects.items() {
        let name = subject.field("name");
        errors.require(&name);
        let (group, kind) = (subject.field("apiGroup"), subject.field("kind"));
        match kind.str() {
            "ServiceAccount" => {
                if !name.is_empty() {
                    errors.rule(&name, object_meta::dns_subdomain(name.str(), false));
                }
                if !group.is_empty() {
                    errors.one_of(&group, &[""]);
                }
                let namespace = subject.field("namespace");
                if !namespaced && namespace.is_empty() {
                    errors.required(&namespace, "");
                }
            }
            "User" | "Group" => errors.one_of(&group, &[GROUP]),
            _ => errors.not_supported(&kind, &["ServiceAccount", "User", "Group"]),
        }
    }
    errors.into_vec()
}

fn binding_update(new: &Value, old: &Value, namespaced: bool) -> Vec<skiff_meta::field::Error> {
    let mut errors = Errors::new();
    errors.extend(binding(new, namespaced));
    let root = Node::root(new);
    if !same(at(new, "roleRef"), at(old, "roleRef")) {
        // COMPAT: upstream prints its inner type here.
        let field = |name: &str| text(at(new, "roleRef"), name).to_owned();
        let shown = json!({"APIGroup": field("apiGroup"), "Kind": field("kind"), "Name": field("name")});
        errors.invalid_value(&root.field("roleRef"), shown, "cannot change roleRef");
    }
    errors.into_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bindings() {
        let mut binding = json!({"metadata": {"name": "b:x", "namespace": "d", "resourceVersion": "1"},
            "roleRef": {"kind": "Role", "name": "r"}, "subjects": [{"kind": "User", "name": "u"}]});
        (ROLE_BINDING.default)("v1", &mut binding);
        assert_eq!(binding["subjects"][0]["apiGroup"], GROUP);
        assert_eq!(ROLE_BINDING.check_create(&binding, true), vec![]);
        let mut other = binding.clone();
        other["roleRef"]["name"] = json!("q");
        let found: Vec<String> = ROLE_BINDING
            .check_update(&other, &binding, true)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found.len(), 1);
        assert!(found[0].ends_with("cannot change roleRef"), "{}", found[0]);
    }
}
