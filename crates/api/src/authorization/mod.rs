//! The group `authorization.k8s.io`: what is asked of a review before it is answered. Reviews are never stored.

use serde_json::{Value, json};
use skiff_meta::{field, names};

use crate::errors::Errors;
use crate::node::{Node, at, list, text};

/// The order in which upstream's types write the fields of metadata, and of its managers.
const METADATA: [&str; 15] = [
    "name",
    "generateName",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
    "managedFields",
    "selfLink",
];
const MANAGER: [&str; 7] = [
    "manager",
    "operation",
    "apiVersion",
    "time",
    "fieldsType",
    "fieldsV1",
    "subresource",
];

fn ordered(object: &Value, order: &[&str], nested: &str) -> String {
    let fields: Vec<String> = order
        .iter()
        .filter_map(|name| {
            let value = object.get(*name)?;
            let shown = match value.as_array() {
                Some(all) if *name == nested => {
                    let all: Vec<String> = all.iter().map(|one| ordered(one, &MANAGER, "")).collect();
                    format!("[{}]", all.join(","))
                }
                _ => value.to_string(),
            };
            Some(format!("{}:{shown}", json!(name)))
        })
        .collect();
    format!("{{{}}}", fields.join(","))
}

/// The rules of a review of some kind in `namespace` (empty where it has none).
pub fn validate(review: &Value, kind: &str, namespace: &str) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(review);
    let spec = root.field("spec");
    let (resource, path) = (
        spec.field("resourceAttributes"),
        spec.field("nonResourceAttributes"),
    );
    // COMPAT: shown by the names of upstream's own type.
    let shown = json!({"Path": text(path.value, "path"), "Verb": text(path.value, "verb")});
    match (resource.is_set(), path.is_set()) {
        (true, true) => errors.invalid_value(
            &path,
            shown.clone(),
            "cannot be specified in combination with resourceAttributes",
        ),
        (false, false) => errors.invalid_value(
            &resource,
            Value::Null,
            "exactly one of nonResourceAttributes or resourceAttributes must be specified",
        ),
        _ => {}
    }
    if kind != "SelfSubjectAccessReview" {
        let user = spec.field("user");
        if user.is_empty() && list(review, "spec.groups").is_empty() {
            errors.invalid_value(&user, "", "at least one of user or group must be specified");
        }
    }
    if resource.is_set() {
        selector(&resource.field("fieldSelector"), false, &mut errors);
        selector(&resource.field("labelSelector"), true, &mut errors);
    }
    let local = kind == "LocalSubjectAccessReview";
    let given = at(review, "metadata").as_object();
    let foreign = given
        .into_iter()
        .flatten()
        .any(|(name, value)| match name.as_str() {
            "managedFields" => false,
            "namespace" if local => false,
            _ => !value.is_null() && *value != json!("") && *value != json!({}) && *value != json!([]),
        });
    if foreign {
        let detail = if local {
            "must be empty except for namespace"
        } else {
            "must be empty"
        };
        let shown = ordered(at(review, "metadata"), &METADATA, "managedFields");
        errors.invalid_text(&root.field("metadata"), &shown, detail);
    }
    if local {
        let given = resource.field("namespace");
        if resource.is_set() && given.str() != namespace {
            errors.invalid_value(&given, given.str(), "must match metadata.namespace");
        }
        if path.is_set() {
            errors.invalid_value(&path, shown, "disallowed on this kind of request");
        }
    }
    errors.into_vec()
}

fn selector(selector: &Node, labels: bool, errors: &mut Errors) {
    if !selector.is_set() {
        return;
    }
    let (raw, requirements) = (selector.field("rawSelector"), selector.field("requirements"));
    match (raw.is_empty(), requirements.is_empty()) {
        (false, false) => errors.invalid(&raw, "may not specified at the same time as requirements"),
        (true, true) => {
            let detail = format!(
                "when {} is specified, requirements or rawSelector is required",
                selector.path()
            );
            errors.required(&requirements, detail);
        }
        _ => {}
    }
    for requirement in requirements.items() {
        let (key, values) = (requirement.field("key"), requirement.field("values"));
        if !labels && key.is_empty() {
            errors.required(&key, "must be specified");
        }
        // An operator that is not known may be that of a newer client.
        match requirement.field("operator").str() {
            "In" | "NotIn" if values.is_empty() => {
                errors.required(&values, "must be specified when `operator` is 'In' or 'NotIn'");
            }
            "Exists" | "DoesNotExist" if !values.is_empty() => {
                errors.forbidden(
                    &values,
                    "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
                );
            }
            _ => {}
        }
        if labels {
            errors.rule(&key, names::qualified_name(key.str()));
            for value in values.items() {
                errors.rule(&value, names::label_value(value.str()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reviews_are_checked() {
        let check = |kind: &str, review: Value, expected: &[&str]| {
            let found: Vec<String> = validate(&review, kind, "n")
                .iter()
                .map(ToString::to_string)
                .collect();
            assert_eq!(found, expected);
        };
        let subject = "SubjectAccessReview";
        check(
            subject,
            json!({"spec": {"user": "b", "resourceAttributes": {}}}),
            &[],
        );
        check(
            subject,
            json!({"metadata": {"labels": {"a": "b"}, "name": "x"}, "spec": {"user": "b", "resourceAttributes": {}}}),
            &["metadata: Invalid value: {\"name\":\"x\",\"labels\":{\"a\":\"b\"}}: must be empty"],
        );
        check(
            subject,
            json!({"spec": {"user": "b", "resourceAttributes": {"fieldSelector": {}, "labelSelector": {"requirements": [
                {"key": "a", "operator": "In"}, {"key": "a", "operator": "Foo"}]}}}}),
            &[
                "spec.resourceAttributes.fieldSelector.requirements: Required value: when spec.resourceAttributes.fieldSelector is specified, requirements or rawSelector is required",
                "spec.resourceAttributes.labelSelector.requirements[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'",
            ],
        );
        check(
            "LocalSubjectAccessReview",
            json!({"metadata": {"namespace": "n"}, "spec": {"user": "b", "nonResourceAttributes": {"path": "/", "verb": "get"}}}),
            &[
                "spec.nonResourceAttributes: Invalid value: {\"Path\":\"/\",\"Verb\":\"get\"}: disallowed on this kind of request",
            ],
        );
        check(
            "LocalSubjectAccessReview",
            json!({"spec": {"user": "b", "resourceAttributes": {"verb": "get"}}}),
            &["spec.resourceAttributes.namespace: Invalid value: \"\": must match metadata.namespace"],
        );
    }
}
