//! The group `admissionregistration.k8s.io`: webhooks and policies of admission.

use serde_json::{Value, json};

use crate::errors::Errors;
use crate::kind::{AGE, BASE, Kind, NAME, integer, text as column};
use crate::node::{Node, at, list, text};
use crate::{row, strategy, walk};

const GROUP: &str = "admissionregistration.k8s.io";

fn webhook_defaults(object: &mut Value, mutating: bool) {
    walk::each(object, "webhooks[]", &mut |hook| {
        walk::pointer(hook, "failurePolicy", "Fail");
        walk::pointer(hook, "matchPolicy", "Equivalent");
        walk::pointer(hook, "namespaceSelector", json!({}));
        walk::pointer(hook, "objectSelector", json!({}));
        walk::pointer(hook, "timeoutSeconds", 10);
        if mutating {
            walk::pointer(hook, "reinvocationPolicy", "Never");
        }
        walk::each(hook, "rules[]", &mut |rule| walk::pointer(rule, "scope", "*"));
        walk::each(hook, "clientConfig.service", &mut |service| {
            walk::pointer(service, "port", 443)
        });
    });
}

fn match_resources(constraints: &mut Value) {
    walk::pointer(constraints, "matchPolicy", "Equivalent");
    walk::pointer(constraints, "namespaceSelector", json!({}));
    walk::pointer(constraints, "objectSelector", json!({}));
    for name in ["resourceRules[]", "excludeResourceRules[]"] {
        walk::each(constraints, name, &mut |rule| walk::pointer(rule, "scope", "*"));
    }
}

fn webhooks(object: &Value) -> Vec<skiff_meta::field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(object);
    let hooks = root.field("webhooks");
    let mut seen = Vec::new();
    for hook in hooks.items() {
        let name = hook.field("name");
        if errors.require(&name) {
            if name.str().split('.').count() < 3 {
                errors.invalid(
                    &name,
                    "should be a domain with at least three segments separated by dots",
                );
            }
            errors.rule(&name, skiff_meta::names::dns1123_subdomain(name.str()));
        }
        if seen.contains(&name.str()) {
            errors.duplicate(&name);
        }
        seen.push(name.str());
        errors.one_of_if_set(&hook.field("failurePolicy"), &["Fail", "Ignore"]);
        errors.one_of_if_set(&hook.field("matchPolicy"), &["Equivalent", "Exact"]);
        errors.one_of_if_set(&hook.field("reinvocationPolicy"), &["IfNeeded", "Never"]);
        let effects = hook.field("sideEffects");
        if effects.is_set() {
            errors.one_of(&effects, &["None", "NoneOnDryRun"]);
        } else {
            errors.required(&effects, "must specify one of None, NoneOnDryRun");
        }
        let seconds = hook.field("timeoutSeconds");
        if seconds.int().is_some_and(|n| !(1..=30).contains(&n)) {
            errors.invalid(&seconds, "the timeout value must be between 1 and 30 seconds");
        }
        let versions = hook.field("admissionReviewVersions");
        if versions.is_empty() {
            errors.required(&versions, "must specify one of v1, v1beta1");
        }
        let client = hook.field("clientConfig");
        if client.field("url").is_set() == client.field("service").is_set() {
            errors.required(&client, "exactly one of url or service is required");
        }
    }
    errors.into_vec()
}

fn webhook_row(object: &Value, now: i64) -> Vec<Value> {
    vec![
        row::name(object),
        json!(list(object, "webhooks").len()),
        row::age(object, now),
    ]
}

pub static MUTATING_WEBHOOK_CONFIGURATION: Kind = Kind {
    group: GROUP,
    kind: "MutatingWebhookConfiguration",
    default: |_, object| webhook_defaults(object, true),
    prepare_create: strategy::create_generation_only,
    prepare_update: |new, old| strategy::bump_generation_if(new, old, &["webhooks"]),
    validate: webhooks,
    validate_update: |new, _| webhooks(new),
    columns: &[NAME, integer("Webhooks"), AGE],
    row: webhook_row,
    allow_unconditional_update: false,
    ..BASE
};

pub static VALIDATING_WEBHOOK_CONFIGURATION: Kind = Kind {
    group: GROUP,
    kind: "ValidatingWebhookConfiguration",
    default: |_, object| webhook_defaults(object, false),
    prepare_create: strategy::create_generation_only,
    prepare_update: |new, old| strategy::bump_generation_if(new, old, &["webhooks"]),
    validate: webhooks,
    validate_update: |new, _| webhooks(new),
    columns: &[NAME, integer("Webhooks"), AGE],
    row: webhook_row,
    allow_unconditional_update: false,
    ..BASE
};

fn policy_defaults(object: &mut Value) {
    let Some(spec) = walk::object(object, "spec") else {
        return;
    };
    walk::pointer(spec, "failurePolicy", "Fail");
    walk::each(spec, "matchConstraints", &mut match_resources);
}

fn param_kind(object: &Value) -> Value {
    match at(object, "spec.paramKind") {
        Value::Null => json!("<unset>"),
        kind => json!(format!("{}/{}", text(kind, "apiVersion"), text(kind, "kind"))),
    }
}

fn policy(object: &Value) -> Vec<skiff_meta::field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(object);
    let spec = root.field("spec");
    errors.one_of_if_set(&spec.field("failurePolicy"), &["Fail", "Ignore"]);
    let constraints = spec.field("matchConstraints");
    if !constraints.is_set() {
        errors.required(&constraints, "");
    } else if constraints.field("resourceRules").is_empty() {
        errors.required(&constraints.field("resourceRules"), "");
    }
    errors.into_vec()
}

pub static VALIDATING_ADMISSION_POLICY: Kind = Kind {
    group: GROUP,
    kind: "ValidatingAdmissionPolicy",
    default: |_, object| policy_defaults(object),
    prepare_create: strategy::create_with_generation,
    prepare_update: strategy::update_spec,
    prepare_status_update: strategy::status_only_keep_metadata,
    validate: |object| {
        let mut errors = Errors::new();
        errors.extend(policy(object));
        let root = Node::root(object);
        let spec = root.field("spec");
        let validations = spec.field("validations");
        if validations.is_empty() && spec.field("auditAnnotations").is_empty() {
            let detail = "validations or auditAnnotations must be non-empty; at least one entry is required";
            errors.required(&validations, detail);
        }
        errors.into_vec()
    },
    validate_update: |new, _| (VALIDATING_ADMISSION_POLICY.validate)(new),
    columns: &[NAME, integer("Validations"), column("ParamKind"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(list(object, "spec.validations").len()),
            param_kind(object),
            row::age(object, now),
        ]
    },
    has_status: true,
    allow_unconditional_update: false,
    ..BASE
};

pub static MUTATING_ADMISSION_POLICY: Kind = Kind {
    group: GROUP,
    kind: "MutatingAdmissionPolicy",
    default: |_, object| policy_defaults(object),
    prepare_create: strategy::create_generation_only,
    prepare_update: strategy::update_generation,
    validate: policy,
    validate_update: |new, _| policy(new),
    columns: &[NAME, integer("Mutations"), column("ParamKind"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(list(object, "spec.mutations").len()),
            param_kind(object),
            row::age(object, now),
        ]
    },
    allow_unconditional_update: false,
    ..BASE
};

const BINDING: Kind = Kind {
    group: GROUP,
    default: |_, object| walk::each(object, "spec.matchResources", &mut match_resources),
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
    ..BASE
};

fn binding(object: &Value, actions: bool) -> Vec<skiff_meta::field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(object);
    let spec = root.field("spec");
    errors.require(&spec.field("policyName"));
    let wanted = spec.field("validationActions");
    if actions && wanted.is_empty() {
        errors.required(&wanted, "");
    }
    for action in wanted.items() {
        errors.one_of(&action, &["Audit", "Deny", "Warn"]);
    }
    errors.into_vec()
}

pub static VALIDATING_ADMISSION_POLICY_BINDING: Kind = Kind {
    kind: "ValidatingAdmissionPolicyBinding",
    validate: |object| binding(object, true),
    validate_update: |new, _| binding(new, true),
    ..BINDING
};

pub static MUTATING_ADMISSION_POLICY_BINDING: Kind = Kind {
    kind: "MutatingAdmissionPolicyBinding",
    validate: |object| binding(object, false),
    validate_update: |new, _| binding(new, false),
    ..BINDING
};
