//! Workloads: what groups of pods a controller will make, as templates of PodGroups.

use std::collections::BTreeSet;

use serde_json::Value;
use skiff_meta::{field, names};

use super::policy::{drop_disabled, scheduling_policy, unchanged};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME};
use crate::node::{Node, at, list};
use crate::{row, walk};

const TEMPLATES_MAX: usize = 8;

pub static WORKLOAD: Kind = Kind {
    group: "scheduling.k8s.io",
    kind: "Workload",
    version: "v1alpha2",
    prepare_create: |object| drop_from_templates(object, &Value::Null),
    prepare_update: drop_from_templates,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        controller_ref(&root.field("spec.controllerRef"), &mut errors);
        templates(&root.field("spec.podGroupTemplates"), &mut errors);
        errors.into_vec()
    },
    validate_update,
    columns: &[NAME, AGE],
    row: row::name_and_age,
    update_again: Again::Change,
    ..BASE
};

fn drop_from_templates(object: &mut Value, old: &Value) {
    let before = list(old, "spec.podGroupTemplates");
    let mut index = 0;
    walk::each(object, "spec.podGroupTemplates[]", &mut |template| {
        drop_disabled(template, before.get(index).unwrap_or(&Value::Null));
        index += 1;
    });
}

/// The kind and the name of an object in the namespace.
fn controller_ref(reference: &Node, errors: &mut Errors) {
    if !reference.is_set() {
        return;
    }
    let group = reference.field("apiGroup");
    if !group.is_empty() {
        errors.rule(&group, names::dns1123_subdomain(group.str()));
    }
    for name in ["kind", "name"] {
        let value = reference.field(name);
        if errors.require(&value) {
            errors.rule(&value, names::path_segment(value.str(), false));
        }
    }
}

fn templates(templates: &Node, errors: &mut Errors) {
    if !count(templates, errors) {
        return;
    }
    let mut seen = BTreeSet::new();
    for template in templates.items() {
        if !seen.insert(template.field("name").str()) {
            errors.duplicate(&template);
        }
    }
    for template in templates.items() {
        let name = template.field("name");
        if errors.require(&name) {
            errors.rule(&name, names::dns1123_label(name.str()));
        }
        scheduling_policy(&template.field("schedulingPolicy"), errors);
    }
}

fn count(templates: &Node, errors: &mut Errors) -> bool {
    match templates.len() {
        0 => errors.required(templates, ""),
        1..=TEMPLATES_MAX => return true,
        _ => errors.too_many(templates, TEMPLATES_MAX),
    }
    false
}

fn validate_update(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(new);
    unchanged(
        &root.field("spec.controllerRef"),
        at(old, "spec.controllerRef"),
        &mut errors,
    );
    let all = root.field("spec.podGroupTemplates");
    if !unchanged(&all, at(old, "spec.podGroupTemplates"), &mut errors) {
        count(&all, &mut errors);
    }
    errors.into_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn workload(spec: Value) -> Value {
        json!({"apiVersion": "scheduling.k8s.io/v1alpha2", "kind": "Workload",
            "metadata": {"name": "w", "namespace": "ns", "uid": "u", "resourceVersion": "1",
                "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": spec})
    }

    fn gang(name: &str) -> Value {
        json!({"name": name, "schedulingPolicy": {"gang": {"minCount": 2}}})
    }

    fn check(found: &[field::Error], expected: &[&str]) {
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{found}");
        }
    }

    #[test]
    fn templates_are_named_groups() {
        let created = |templates: Value, expected: &[&str]| {
            let object = workload(json!({"podGroupTemplates": templates}));
            check(&WORKLOAD.check_create(&object, true), expected);
        };
        created(
            json!([gang("a"), {"name": "b", "schedulingPolicy": {"basic": {}}}]),
            &[],
        );
        created(json!([]), &["spec.podGroupTemplates: Required value"]);
        created(
            json!([gang("a"), gang("a")]),
            &["spec.podGroupTemplates[1]: Duplicate value"],
        );
        created(
            (0..9)
                .map(|number| gang(&format!("t{number}")))
                .collect::<Vec<_>>()
                .into(),
            &["spec.podGroupTemplates: Too many: 9: must have at most 8 items"],
        );
        created(
            json!([{"name": "", "schedulingPolicy": {}}, {"name": "A_b", "schedulingPolicy": {"basic": {}, "gang": {"minCount": -1}}}]),
            &[
                "spec.podGroupTemplates[0].name: Required value",
                "spec.podGroupTemplates[0].schedulingPolicy: Invalid value: \"\": must specify one of: `basic`, `gang`",
                "spec.podGroupTemplates[1].name: Invalid value: \"A_b\": a lowercase RFC 1123 label must",
                "spec.podGroupTemplates[1].schedulingPolicy: Invalid value: \"{basic, gang}\": must specify exactly one of: `basic`, `gang`",
                "spec.podGroupTemplates[1].schedulingPolicy.gang.minCount: Invalid value: -1: must be greater than or equal to 1",
            ],
        );
        created(
            json!([{"name": "a", "schedulingPolicy": {"gang": {"minCount": 0}}}]),
            &["spec.podGroupTemplates[0].schedulingPolicy.gang.minCount: Required value"],
        );
    }

    #[test]
    fn the_controller_is_an_object() {
        let created = |reference: Value, expected: &[&str]| {
            let object = workload(json!({"controllerRef": reference, "podGroupTemplates": [gang("a")]}));
            check(&WORKLOAD.check_create(&object, true), expected);
        };
        created(json!({"apiGroup": "batch", "kind": "Job", "name": "j"}), &[]);
        created(json!({"kind": "Pod", "name": "p"}), &[]);
        created(
            json!({"apiGroup": "a_b", "name": "a/b"}),
            &[
                "spec.controllerRef.apiGroup: Invalid value: \"a_b\": a lowercase RFC 1123 subdomain must",
                "spec.controllerRef.kind: Required value",
                "spec.controllerRef.name: Invalid value: \"a/b\": may not contain '/'",
            ],
        );
    }

    #[test]
    fn what_is_off_is_dropped_and_the_spec_does_not_change() {
        let mut template = gang("a");
        template["priority"] = json!(7);
        template["disruptionMode"] = json!("PodGroup");
        let mut object = workload(json!({"podGroupTemplates": [template.clone()]}));
        WORKLOAD.begin_create(&mut object);
        assert_eq!(object["spec"]["podGroupTemplates"], json!([gang("a")]));
        let old = workload(json!({"podGroupTemplates": [template.clone()]}));
        let mut kept = old.clone();
        WORKLOAD.begin_update(&mut kept, &old);
        assert_eq!(kept["spec"], old["spec"], "what was there before stays");
        check(&WORKLOAD.check_update(&old, &old, true), &[]);
        let new = workload(json!({"podGroupTemplates": [], "controllerRef": {"kind": "Pod", "name": "p"}}));
        check(
            &WORKLOAD.check_update(&new, &old, true),
            &[
                "spec.controllerRef: Invalid value: null: field is immutable",
                "spec.podGroupTemplates: Invalid value: null: field is immutable",
                "spec.podGroupTemplates: Required value",
            ],
        );
    }
}
