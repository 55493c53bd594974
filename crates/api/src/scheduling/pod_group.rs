//! PodGroups: pods that are scheduled together, and what the scheduler says of them.

use serde_json::{Value, json};
use skiff_meta::{field, names};

use super::policy::{OFF, drop_disabled, scheduling_policy, unchanged};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, STATUS_ALONE, text as column};
use crate::node::{Node, at, is_empty, list, same, text};
use crate::object_meta::conditions;
use crate::{row, strategy, walk};

pub static POD_GROUP: Kind = Kind {
    group: "scheduling.k8s.io",
    kind: "PodGroup",
    version: "v1alpha2",
    default: |_, object| default_mode(object),
    prepare_create: |object| {
        strategy::create_without_status(object);
        drop_from_spec(object, &Value::Null);
    },
    prepare_update: |new, old| {
        strategy::update_keep_status(new, old);
        drop_from_spec(new, old);
    },
    prepare_status_update: |new, old| {
        strategy::status_only_keep_metadata(new, old);
        if list(old, "spec.resourceClaims").is_empty() {
            walk::each(new, "status", &mut |status| {
                walk::remove(status, "resourceClaimStatuses");
            });
        }
    },
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        template_ref(&root.field("spec.podGroupTemplateRef"), &mut errors);
        scheduling_policy(&root.field("spec.schedulingPolicy"), &mut errors);
        errors.into_vec()
    },
    validate_update,
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        conditions(&root.field("status.conditions"), &mut errors);
        claim_statuses(&root, &mut errors);
        errors.into_vec()
    },
    columns: &[NAME, column("Policy"), column("Workload"), column("Status"), AGE],
    row: |object, now| {
        let gang = at(object, "spec.schedulingPolicy.gang");
        let policy = if gang.is_null() { "Basic" } else { "Gang" };
        let workload = text(object, "spec.podGroupTemplateRef.workload.workloadName");
        vec![
            row::name(object),
            json!(policy),
            row::or_none(workload),
            json!(shown_status(object)),
            row::age(object, now),
        ]
    },
    has_status: true,
    update_again: Again::Change,
    reset_fields: STATUS_ALONE,
    ..BASE
};

/// COMPAT: the mode is dropped where the feature is off, and upstream's default comes back with each read.
fn default_mode(object: &mut Value) {
    walk::each(object, "spec", &mut |spec| {
        walk::pointer(spec, "disruptionMode", "Pod");
    });
}

fn drop_from_spec(object: &mut Value, old: &Value) {
    walk::each(object, "spec", &mut |spec| drop_disabled(spec, at(old, "spec")));
    default_mode(object);
}

/// The template that the group was made from.
fn template_ref(reference: &Node, errors: &mut Errors) {
    if !reference.is_set() {
        return;
    }
    let workload = reference.field("workload");
    if !workload.is_set() {
        errors.invalid_value(reference, "", "must specify one of: `workload`");
        return;
    }
    let (name, template) = (
        workload.field("workloadName"),
        workload.field("podGroupTemplateName"),
    );
    if errors.require(&name) {
        errors.rule(&name, names::dns1123_subdomain(name.str()));
    }
    if errors.require(&template) {
        errors.rule(&template, names::dns1123_label(template.str()));
    }
}

fn validate_update(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(new);
    for name in ["podGroupTemplateRef", "schedulingPolicy"] {
        let path = format!("spec.{name}");
        unchanged(&root.field(&path), at(old, &path), &mut errors);
    }
    for name in OFF {
        let path = format!("spec.{name}");
        let (field, before) = (root.field(&path), at(old, &path));
        if name == "resourceClaims" {
            unchanged(&field, before, &mut errors);
        } else if !same(field.value, before) && !is_empty(field.value) {
            errors.forbidden(&field, "");
        }
    }
    errors.into_vec()
}

fn claim_statuses(root: &Node, errors: &mut Errors) {
    let (statuses, claims) = (
        root.field("status.resourceClaimStatuses"),
        root.field("spec.resourceClaims"),
    );
    for status in statuses.items() {
        let name = status.field("name");
        if !claims
            .items()
            .any(|claim| claim.field("name").str() == name.str())
        {
            errors.invalid(&name, "must match the name of an entry in `spec.resourceClaims`");
        }
    }
    for status in statuses.items() {
        let claim = status.field("resourceClaimName");
        if claim.is_set() {
            errors.rule(&claim, names::dns1123_subdomain(claim.str()));
        }
    }
}

fn shown_status(object: &Value) -> &str {
    let condition = |kind: &str| {
        let mut all = list(object, "status.conditions").iter().rev();
        all.find(|condition| text(condition, "type") == kind)
    };
    if let Some(disrupted) = condition("DisruptionTarget") {
        return text(disrupted, "reason");
    }
    match condition("PodGroupScheduled") {
        None => "Pending",
        Some(scheduled) if text(scheduled, "status") == "True" => "Scheduled",
        Some(_) => "Unschedulable",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(spec: Value, status: Value) -> Value {
        json!({"apiVersion": "scheduling.k8s.io/v1alpha2", "kind": "PodGroup",
            "metadata": {"name": "g", "namespace": "ns", "uid": "u", "resourceVersion": "1",
                "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": spec, "status": status})
    }

    fn gang(count: i64) -> Value {
        json!({"schedulingPolicy": {"gang": {"minCount": count}}, "disruptionMode": "Pod"})
    }

    fn check(found: &[field::Error], expected: &[&str]) {
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{found}");
        }
    }

    #[test]
    fn the_spec_of_a_group() {
        let created = |spec: Value, expected: &[&str]| {
            check(&POD_GROUP.check_create(&group(spec, json!({})), true), expected);
        };
        created(gang(3), &[]);
        created(json!({"schedulingPolicy": {"basic": {}}}), &[]);
        created(
            json!({"schedulingPolicy": {}}),
            &["spec.schedulingPolicy: Invalid value: \"\": must specify one of: `basic`, `gang`"],
        );
        created(gang(0), &["spec.schedulingPolicy.gang.minCount: Required value"]);
        created(
            json!({"schedulingPolicy": {"basic": {}}, "podGroupTemplateRef": {}}),
            &["spec.podGroupTemplateRef: Invalid value: \"\": must specify one of: `workload`"],
        );
        created(
            json!({"schedulingPolicy": {"basic": {}}, "podGroupTemplateRef": {"workload": {"podGroupTemplateName": "a/b"}}}),
            &[
                "spec.podGroupTemplateRef.workload.workloadName: Required value",
                "spec.podGroupTemplateRef.workload.podGroupTemplateName: Invalid value: \"a/b\": a lowercase RFC 1123 label must",
            ],
        );
    }

    #[test]
    fn what_is_off_is_dropped_and_the_spec_does_not_change() {
        let mut object = group(
            json!({"schedulingPolicy": {"basic": {}}, "disruptionMode": "PodGroup", "priority": 7,
                "priorityClassName": "high", "resourceClaims": [{"name": "c"}],
                "schedulingConstraints": {"topology": [{"key": "rack"}]}}),
            json!({"conditions": []}),
        );
        POD_GROUP.begin_create(&mut object);
        assert_eq!(
            (object["spec"].clone(), object.get("status")),
            (
                json!({"schedulingPolicy": {"basic": {}}, "disruptionMode": "Pod"}),
                None
            )
        );
        let old = group(gang(3), json!({}));
        check(&POD_GROUP.check_update(&old, &old, true), &[]);
        let mut new = group(gang(2), json!({}));
        new["spec"]["disruptionMode"] = json!("PodGroup");
        new["spec"]["podGroupTemplateRef"] =
            json!({"workload": {"workloadName": "w", "podGroupTemplateName": "t"}});
        POD_GROUP.begin_update(&mut new, &old);
        check(
            &POD_GROUP.check_update(&new, &old, true),
            &[
                "spec.podGroupTemplateRef: Invalid value: null: field is immutable",
                "spec.schedulingPolicy: Invalid value: null: field is immutable",
                "spec.disruptionMode: Forbidden",
            ],
        );
    }

    #[test]
    fn the_status_and_its_table() {
        let condition = |kind: &str, status: &str, reason: &str| {
            json!({"type": kind, "status": status, "reason": reason, "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        let old = group(gang(3), json!({}));
        for (conditions, expected) in [
            (vec![], "Pending"),
            (
                vec![condition("PodGroupScheduled", "False", "Unschedulable")],
                "Unschedulable",
            ),
            (
                vec![condition("PodGroupScheduled", "True", "Scheduled")],
                "Scheduled",
            ),
            (
                vec![
                    condition("DisruptionTarget", "True", "PreemptionByScheduler"),
                    condition("PodGroupScheduled", "True", "Scheduled"),
                ],
                "PreemptionByScheduler",
            ),
        ] {
            let mut new = group(
                gang(3),
                json!({"conditions": conditions, "resourceClaimStatuses": [{"name": "c"}]}),
            );
            POD_GROUP.begin_status_update(&mut new, &old);
            assert!(new["status"].get("resourceClaimStatuses").is_none());
            check(&POD_GROUP.check_status_update(&new, &old, true), &[]);
            let row = (POD_GROUP.row)(&new, 0);
            assert_eq!(
                row[..4],
                [json!("g"), json!("Gang"), json!("<none>"), json!(expected)]
            );
        }
        let claimed = |statuses: Value| {
            let mut spec = gang(3);
            spec["resourceClaims"] = json!([{"name": "c", "resourceClaimName": "x"}]);
            group(spec, json!({"resourceClaimStatuses": statuses}))
        };
        let new = claimed(json!([{"name": "c", "resourceClaimName": "A"}, {"name": "d"}]));
        check(
            &POD_GROUP.check_status_update(&new, &claimed(json!([])), true),
            &[
                "status.resourceClaimStatuses[1].name: Invalid value: \"d\": must match",
                "status.resourceClaimStatuses[0].resourceClaimName: Invalid value: \"A\": a lowercase",
            ],
        );
    }
}
