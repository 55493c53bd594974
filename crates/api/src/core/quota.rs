//! LimitRanges and ResourceQuotas.

use serde_json::{Value, json};
use skiff_meta::names;

use super::pod_defaults::resource_list;
use super::resources::{
    container_resource_name, overcommit_allowed, quantity, resource_name, resource_quantity,
};
use super::scopes;
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Column, Kind, NAME, text as column};
use crate::node::{Node, at};
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
    // COMPAT: one without a name gets one that nobody else has.
    prepare_create: |object| {
        if crate::node::text(object, "metadata.name").is_empty() {
            let uid = crate::node::text(object, "metadata.uid").to_owned();
            walk::each(object, "metadata", &mut |metadata| {
                walk::string(metadata, "name", &uid);
            });
        }
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
    update_again: Again::Object,
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
    let mut seen = std::collections::BTreeSet::new();
    for item in limits.items() {
        let kind = item.field("type");
        errors.rule(&kind, names::qualified_name(kind.str()));
        if names::qualified_name(kind.str()).is_empty()
            && !kind.str().contains('/')
            && !["Pod", "Container", "PersistentVolumeClaim"].contains(&kind.str())
        {
            errors.invalid(&kind, "must be a standard limit type or fully qualified");
        }
        if !seen.insert(kind.str()) {
            errors.duplicate(&kind);
        }
        let pod = kind.str() == "Pod";
        for name in ["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"] {
            let amounts = item.field(name);
            if pod && name.starts_with("default") {
                if !amounts.is_empty() {
                    errors.forbidden(&amounts, "may not be specified when `type` is 'Pod'");
                }
                continue;
            }
            let storage = |name: &str| item.field(name).key("storage").is_set();
            if name == "maxLimitRequestRatio"
                && kind.str() == "PersistentVolumeClaim"
                && !storage("min")
                && !storage("max")
            {
                errors.required(
                    &item.field("limits"),
                    "either minimum or maximum storage value is required, but neither was provided",
                );
            }
            for (resource, amount) in amounts.entries() {
                if pod || kind.str() == "Container" {
                    container_resource_name(&amount, resource, errors);
                } else {
                    resource_name(&amount, resource, errors);
                }
            }
        }
        relations(&item, pod, errors);
    }
}

/// min ≤ defaultRequest ≤ default ≤ max, wherever both are given, and the ratio between min and max.
fn relations(item: &Node, pod: bool, errors: &mut Errors) {
    let lists = ["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"];
    let mut names = std::collections::BTreeSet::new();
    for list in lists.iter().filter(|name| !(pod && name.starts_with("default"))) {
        names.extend(
            at(item.value, list)
                .as_object()
                .into_iter()
                .flatten()
                .map(|(name, _)| name),
        );
    }
    for name in names {
        let amount = |list: &str| {
            if pod && list.starts_with("default") {
                return None;
            }
            quantity(at(item.value, list).get(name)?)
        };
        // Lower, upper, where it is reported, the value that is shown, and upstream's words for the two.
        for (lower, upper, place, shown, words) in [
            ("min", "max", "min", "min", ["min", "max"]),
            (
                "min",
                "defaultRequest",
                "defaultRequest",
                "defaultRequest",
                ["min", "default request"],
            ),
            (
                "defaultRequest",
                "max",
                "defaultRequest",
                "defaultRequest",
                ["default request", "max"],
            ),
            (
                "defaultRequest",
                "default",
                "defaultRequest",
                "defaultRequest",
                ["default request", "default limit"],
            ),
            ("min", "default", "default", "min", ["min", "default"]),
            ("default", "max", "default", "max", ["default", "max"]),
        ] {
            if let (Some(low), Some(high)) = (amount(lower), amount(upper))
                && low > high
            {
                let value = if shown == lower { &low } else { &high };
                errors.invalid_value(
                    &item.field(place).key(name),
                    value.to_string(),
                    format!(
                        "{} value {low} is greater than {} value {high}",
                        words[0], words[1]
                    ),
                );
            }
        }
        let place = item.field("maxLimitRequestRatio");
        let place = place.key(name);
        if let Some(ratio) = amount("maxLimitRequestRatio") {
            if ratio.milli_value() < 1000 {
                errors.invalid_value(&place, ratio.to_string(), format!("ratio {ratio} is less than 1"));
            }
            if let (Some(low), Some(high)) = (amount("min"), amount("max")) {
                // Far beyond 2^53 the comparison is inexact, as it is upstream.
                #[allow(clippy::cast_precision_loss)]
                let (limit, wanted) = (
                    high.milli_value() as f64 / low.milli_value() as f64,
                    ratio.milli_value() as f64 / 1000.0,
                );
                if wanted > limit {
                    errors.invalid_value(
                        &place,
                        ratio.to_string(),
                        format!("ratio {ratio} is greater than max/min = {limit:.6}"),
                    );
                }
            }
        }
        if let (Some(default), Some(request)) = (amount("default"), amount("defaultRequest"))
            && !overcommit_allowed(name)
            && default != request
        {
            errors.invalid_value(
                &item.field("defaultRequest").key(name),
                request.to_string(),
                format!("default value {default} must equal to defaultRequest value {request} in {name}"),
            );
        }
    }
}

/// More may be asked for than used.
fn request_warnings(quota: &Value) -> Vec<String> {
    let hard = at(quota, "spec.hard");
    let amount = |name: &str| hard.get(name).and_then(quantity);
    let warning = |name: &str| {
        let (mut asked_name, limit_name) = (format!("requests.{name}"), format!("limits.{name}"));
        if hard.get(&asked_name).is_none() && matches!(name, "cpu" | "memory") {
            asked_name = name.to_owned();
        }
        let (asked, limit) = (amount(&asked_name)?, amount(&limit_name)?);
        (asked > limit).then(|| {
            format!("ResourceQuota {asked_name} ({asked}) should be less than {limit_name} ({limit})")
        })
    };
    ["cpu", "memory", "storage", "ephemeral-storage"]
        .into_iter()
        .filter_map(warning)
        .collect()
}

pub static RESOURCE_QUOTA: Kind = Kind {
    kind: "ResourceQuota",
    warnings: |new, old| match old {
        None => request_warnings(new),
        Some(_) => Vec::new(),
    },
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
        scopes::scopes(&root.field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        errors.extend((RESOURCE_QUOTA.validate)(new));
        let root = Node::root(new);
        let scopes = root.field("spec.scopes");
        let set = |value: &Value| -> std::collections::BTreeSet<String> {
            let list = value.as_array().into_iter().flatten();
            list.filter_map(Value::as_str).map(str::to_owned).collect()
        };
        if set(scopes.value) != set(at(old, "spec.scopes")) {
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
        resource_name(&amount, name, errors);
        if !name.contains('/') && !scopes::QUOTA_RESOURCES.contains(&name) && !scopes::is_huge(name) {
            errors.invalid_value(&amount, name, "must be a standard resource for quota");
        }
        resource_quantity(&amount, name, errors);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_asked_for_than_used() {
        let check = |hard: Value, expected: &[&str]| {
            let quota = json!({"spec": {"hard": hard}});
            assert_eq!((RESOURCE_QUOTA.warnings)(&quota, None), expected, "{quota}");
            assert!((RESOURCE_QUOTA.warnings)(&quota, Some(&quota)).is_empty());
        };
        check(
            json!({"requests.cpu": "64Mi", "limits.cpu": "1", "memory": "3Gi", "limits.memory": "2Gi"}),
            &[
                "ResourceQuota requests.cpu (64Mi) should be less than limits.cpu (1)",
                "ResourceQuota memory (3Gi) should be less than limits.memory (2Gi)",
            ],
        );
        check(
            json!({"requests.cpu": "1", "cpu": "5", "limits.cpu": "1", "storage": "9", "limits.storage": "1"}),
            &[],
        );
        check(
            json!({"requests.ephemeral-storage": "3", "limits.ephemeral-storage": "2500m"}),
            &[
                "ResourceQuota requests.ephemeral-storage (3) should be less than limits.ephemeral-storage (2500m)",
            ],
        );
    }
}
