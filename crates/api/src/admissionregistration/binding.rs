//! ValidatingAdmissionPolicyBindings and MutatingAdmissionPolicyBindings: a policy in force, perhaps with parameters.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::{field, names};

use super::GROUP;
use super::matching::{match_resources, match_resources_defaults, mutating_operations};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column};
use crate::node::{Node, at, text};
use crate::object_meta::label_selector;
use crate::{row, strategy, walk};

const EXCLUSIVE: &str = "name and selector are mutually exclusive";

const BINDING: Kind = Kind {
    group: GROUP,
    default: |_, object| walk::each(object, "spec.matchResources", &mut match_resources_defaults),
    prepare_create: strategy::create_generation_only,
    prepare_update: strategy::update_generation,
    columns: &[NAME, column("PolicyName"), column("ParamRef"), AGE],
    row: |object, now| {
        let reference = at(object, "spec.paramRef");
        let shown = match (text(reference, "name"), text(reference, "namespace")) {
            ("", _) => "<unset>".to_owned(),
            (name, "") => format!("*/{name}"),
            (name, namespace) => format!("{namespace}/{name}"),
        };
        vec![
            row::name(object),
            json!(text(object, "spec.policyName")),
            json!(shown),
            row::age(object, now),
        ]
    },
    allow_unconditional_update: false,
    update_again: Again::Object,
    qualified_finalizers: false,
    ..BASE
};

pub static VALIDATING_ADMISSION_POLICY_BINDING: Kind = Kind {
    kind: "ValidatingAdmissionPolicyBinding",
    validate: |object| binding(object, false),
    validate_update: |new, _| binding(new, false),
    ..BINDING
};

pub static MUTATING_ADMISSION_POLICY_BINDING: Kind = Kind {
    kind: "MutatingAdmissionPolicyBinding",
    validate: |object| binding(object, true),
    validate_update: |new, _| binding(new, true),
    ..BINDING
};

fn binding(object: &Value, mutates: bool) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(object);
    let spec = root.field("spec");
    let policy = spec.field("policyName");
    if errors.require(&policy) {
        errors.rule(&policy, names::dns1123_subdomain(policy.str()));
    }
    param_ref(&spec.field("paramRef"), &mut errors);
    let resources = spec.field("matchResources");
    if resources.is_set() {
        match_resources(&resources, &mut errors);
        if mutates {
            mutating_operations(&resources, &mut errors);
        }
    }
    if !mutates {
        actions(&spec.field("validationActions"), &mut errors);
    }
    errors.into_vec()
}

fn param_ref(reference: &Node, errors: &mut Errors) {
    if !reference.is_set() {
        return;
    }
    let (name, selector) = (reference.field("name"), reference.field("selector"));
    let both = !name.is_empty() && selector.is_set();
    if !name.is_empty() {
        errors.rule(&name, names::path_segment(name.str(), false));
        if both {
            errors.forbidden(&name, EXCLUSIVE);
        }
    }
    if selector.is_set() {
        label_selector(&selector, errors);
        if both {
            errors.forbidden(&selector, EXCLUSIVE);
        }
    }
    if name.is_empty() && !selector.is_set() {
        errors.required(reference, "one of name or selector must be specified");
    }
    errors.required_one_of(&reference.field("parameterNotFoundAction"), &["Deny", "Allow"]);
}

fn actions(actions: &Node, errors: &mut Errors) {
    let mut seen = BTreeSet::new();
    for action in actions.items() {
        errors.one_of(&action, &["Audit", "Deny", "Warn"]);
        if !seen.insert(action.str()) {
            errors.duplicate(&action);
        }
    }
    if seen.contains("Deny") && seen.contains("Warn") {
        errors.invalid(
            actions,
            "must not contain both Deny and Warn (repeating the same validation failure information in the API response and headers serves no purpose)",
        );
    }
    if seen.is_empty() {
        errors.required(actions, "at least one validation action is required");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(spec: Value, expected: &[&str]) {
        let object = json!({ "spec": spec });
        let found: Vec<String> = binding(&object, false).iter().map(ToString::to_string).collect();
        assert_eq!(found, expected, "{object}");
    }

    #[test]
    fn bindings() {
        check(json!({"policyName": "p", "validationActions": ["Deny"]}), &[]);
        check(
            json!({"validationActions": []}),
            &[
                "spec.policyName: Required value",
                "spec.validationActions: Required value: at least one validation action is required",
            ],
        );
        check(
            json!({"policyName": "p", "validationActions": ["Deny", "Warn"], "paramRef": {}}),
            &[
                "spec.paramRef: Required value: one of name or selector must be specified",
                "spec.paramRef.parameterNotFoundAction: Required value",
                "spec.validationActions: Invalid value: [\"Deny\",\"Warn\"]: must not contain both Deny and Warn (repeating the same validation failure information in the API response and headers serves no purpose)",
            ],
        );
    }
}
