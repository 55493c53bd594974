//! LimitRanges and ResourceQuotas.

use serde_json::{Value, json};
use skiff_meta::names;

use super::pod_defaults::resource_list;
use super::resources::{quantity, resource_name, resource_quantity};
use crate::errors::Errors;
use crate::kind::{Again, AGE, BASE, Column, Kind, NAME, text as column};
use crate::node::{Node, at, same};
use crate::{row, strategy, walk};

pub static LIMIT_RANGE: Kind = Kind {
    kind: "LimitRange",
    default: |_, object| {
        walk::each(object, "spec.limits[]", &mut |item| {
            for name in ["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"] {
                walk::each(item, name, &mut resource_list);
            }
            if crate::node::text(item, "type") != "Container" {
                return;
            }
            fill(item, "default", "max");
            fill(item, "defaultRequest", "default");
            fill(item, "defaultRequest", "min");
        });
    },
    validate: |object| {
        let mut errors = Errors::new();
        limits(&Node::root(object).field("spec.limits"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, _| (LIMIT_RANGE.validate)(new),
    columns: &[
        NAME,
        Column {
            kind: "date",
            ..column("Created At")
        },
    ],
    allow_create_on_update: true,
    update_again: Again::Change,
    ..BASE
};

/// Takes over amounts that `to` lacks.
fn fill(item: &mut Value, to: &str, from: &str) {
    let Some(amounts) = at(item, from).as_object().filter(|m| !m.is_empty()).cloned() else {
        return;
    };
    if let Some(target) = walk::object(item, to) {
        for (name, amount) in amounts {
            walk::pointer(target, &name, amount);
        }
    }
}

fn limits(limits: &Node, errors: &mut Errors) {
    let mut seen: Vec<String> = Vec::new();
    for item in limits.items() {
        let kind = item.field("type");
        errors.rule(&kind, names::qualified_name(kind.str()));
        if names::qualified_name(kind.str()).is_empty()
            && !kind.str().contains('/')
            && !["Pod", "Container", "PersistentVolumeClaim"].contains(&kind.str())
        {
            errors.invalid(&kind, "must be a standard limit type or fully qualified");
        }
        if seen.contains(&kind.str().to_owned()) {
            errors.duplicate(&kind);
        }
        seen.push(kind.str().to_owned());
        if kind.str() == "Pod" {
            for name in ["default", "defaultRequest"] {
                let at = item.field(name);
                if !at.is_empty() {
                    errors.forbidden(&at, "may not be specified when `type` is 'Pod'");
                }
            }
        }
        for name in ["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"] {
            let amounts = item.field(name);
            for (resource, amount) in amounts.entries() {
                resource_name(&amount, resource, errors);
                resource_quantity(&amount, resource, errors);
            }
        }
        ordered(&item, errors);
    }
}

/// min ≤ defaultRequest ≤ default ≤ max, wherever both are given.
fn ordered(item: &Node, errors: &mut Errors) {
    for (lower, upper) in [
        ("min", "max"),
        ("min", "defaultRequest"),
        ("defaultRequest", "max"),
        ("defaultRequest", "default"),
        ("min", "default"),
        ("default", "max"),
    ] {
        let (low, high) = (item.field(lower), item.field(upper));
        for (name, amount) in low.entries() {
            if let (Some(a), Some(b)) = (quantity(amount.value), quantity(high.key(name).value))
                && a > b
            {
                let says = |f: &str| match f {
                    "default" => "default",
                    "defaultRequest" => "default request",
                    other => {
                        if other == "min" {
                            "min"
                        } else {
                            "max"
                        }
                    }
                };
                let at = if lower == "min" && upper != "max" {
                    high.key(name)
                } else {
                    low.key(name)
                };
                let (first, second) = (says(lower), says(upper));
                errors.invalid_value(
                    &at,
                    a.to_string(),
                    format!("{first} value {a} is greater than {second} value {b}"),
                );
            }
        }
    }
}

pub static RESOURCE_QUOTA: Kind = Kind {
    kind: "ResourceQuota",
    default: |_, object| {
        walk::each(object, "spec.hard", &mut resource_list);
        walk::each(object, "status.hard", &mut resource_list);
        walk::each(object, "status.used", &mut resource_list);
    },
    prepare_create: strategy::create_without_status,
    prepare_update: strategy::update_keep_status,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        amounts(&root.field("spec.hard"), &mut errors);
        let scopes = root.field("spec.scopes");
        for scope in scopes.items() {
            let known = [
                "BestEffort",
                "CrossNamespacePodAffinity",
                "NotBestEffort",
                "NotTerminating",
                "PriorityClass",
                "Terminating",
                "VolumeAttributesClass",
            ];
            if !known.contains(&scope.str()) {
                errors.invalid_value(&scopes, scopes.value.clone(), "unsupported scope");
            }
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        errors.extend((RESOURCE_QUOTA.validate)(new));
        let root = Node::root(new);
        let scopes = root.field("spec.scopes");
        if !same(scopes.value, at(old, "spec.scopes")) {
            let shown = scopes.value.clone();
            errors.invalid_value(&scopes, shown, crate::errors::IMMUTABLE);
        }
        errors.into_vec()
    },
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        amounts(&root.field("status.hard"), &mut errors);
        amounts(&root.field("status.used"), &mut errors);
        errors.into_vec()
    },
    columns: &[NAME, column("Request"), column("Limit"), AGE],
    row: |object, now| {
        let (mut requests, mut limits) = (Vec::new(), Vec::new());
        for (name, hard) in at(object, "status.hard").as_object().into_iter().flatten() {
            let used = at(object, "status.used")
                .get(name)
                .and_then(Value::as_str)
                .unwrap_or("0");
            let line = format!("{name}: {used}/{}", hard.as_str().unwrap_or(""));
            if name.starts_with("limits.") {
                limits.push(line)
            } else {
                requests.push(line)
            }
        }
        vec![
            row::name(object),
            json!(requests.join(", ")),
            json!(limits.join(", ")),
            row::age(object, now),
        ]
    },
    has_status: true,
    update_again: Again::Change,
    ..BASE
};

fn amounts(amounts: &Node, errors: &mut Errors) {
    for (name, amount) in amounts.entries() {
        let complaints = names::qualified_name(name);
        let bad = !complaints.is_empty();
        for complaint in complaints {
            errors.invalid_value(&amount, name, complaint);
        }
        let standard = [
            "cpu",
            "memory",
            "ephemeral-storage",
            "requests.cpu",
            "requests.memory",
            "requests.storage",
            "requests.ephemeral-storage",
            "limits.cpu",
            "limits.memory",
            "limits.ephemeral-storage",
            "pods",
            "resourcequotas",
            "services",
            "replicationcontrollers",
            "secrets",
            "persistentvolumeclaims",
            "configmaps",
            "services.nodeports",
            "services.loadbalancers",
        ];
        let huge = name.starts_with("hugepages-") || name.starts_with("requests.hugepages-");
        if !bad && !name.contains('/') && !standard.contains(&name) && !huge {
            errors.invalid_value(&amount, name, "must be a standard resource for quota");
        }
        resource_quantity(&amount, name, errors);
    }
}
