//! What webhooks and policies share: which requests they are for.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_cel::Type;
use skiff_cel::admission::Environment;
use skiff_meta::names;

use crate::errors::Errors;
use crate::node::Node;
use crate::object_meta::label_selector;
use crate::walk;

const OPERATIONS: [&str; 5] = ["*", "CONNECT", "CREATE", "DELETE", "UPDATE"];
const MUTATING_OPERATIONS: [&str; 4] = ["*", "CONNECT", "CREATE", "UPDATE"];
const CONDITIONS_MAX: usize = 64;

/// Defaults of a policy's or binding's constraints.
pub fn match_resources_defaults(constraints: &mut Value) {
    walk::pointer(constraints, "matchPolicy", "Equivalent");
    walk::pointer(constraints, "namespaceSelector", json!({}));
    walk::pointer(constraints, "objectSelector", json!({}));
    for name in ["resourceRules[]", "excludeResourceRules[]"] {
        walk::each(constraints, name, &mut |rule| walk::pointer(rule, "scope", "*"));
    }
}

/// The constraints of a policy or binding, which are there.
pub fn match_resources(constraints: &Node, errors: &mut Errors) {
    let policy = constraints.field("matchPolicy");
    if policy.is_set() {
        errors.one_of(&policy, &["Equivalent", "Exact"]);
    } else {
        errors.required(&policy, "");
    }
    for name in ["namespaceSelector", "objectSelector"] {
        let selector = constraints.field(name);
        if selector.is_set() {
            label_selector(&selector, errors);
        } else {
            errors.required(&selector, "");
        }
    }
    for name in ["resourceRules", "excludeResourceRules"] {
        let rules = constraints.field(name);
        for rule in rules.items() {
            named_rule(&rule, errors);
        }
    }
}

/// A policy that changes objects cannot be for deletions.
pub fn mutating_operations(constraints: &Node, errors: &mut Errors) {
    let rules = constraints.field("resourceRules");
    // COMPAT: the path names no rule.
    let at = rules.field("operations");
    for rule in rules.items() {
        let operations = rule.field("operations");
        for operation in operations.items() {
            errors.one_of(&at.with(operation.value), &MUTATING_OPERATIONS);
        }
    }
}

fn named_rule(rule: &Node, errors: &mut Errors) {
    let mut seen = BTreeSet::new();
    let resource_names = rule.field("resourceNames");
    for name in resource_names.items() {
        errors.rule(&name, names::path_segment(name.str(), false));
        if !seen.insert(name.str()) {
            errors.duplicate(&name);
        }
    }
    rule_with_operations(rule, errors);
}

pub fn rule_with_operations(rule: &Node, errors: &mut Errors) {
    let operations = rule.field("operations");
    if operations.is_empty() {
        errors.required(&operations, "");
    }
    alone(&operations, "operations", errors);
    for operation in operations.items() {
        errors.one_of(&operation, &OPERATIONS);
    }
    let groups = rule.field("apiGroups");
    if groups.is_empty() {
        errors.required(&groups, "");
    }
    alone(&groups, "API groups", errors);
    let versions = rule.field("apiVersions");
    if versions.is_empty() {
        errors.required(&versions, "");
    }
    alone(&versions, "API versions", errors);
    for version in versions.items() {
        errors.require(&version);
    }
    resources(&rule.field("resources"), errors);
    errors.one_of_if_set(&rule.field("scope"), &["*", "Cluster", "Namespaced"]);
}

/// A star must be the only entry.
fn alone(entries: &Node, what: &str, errors: &mut Errors) {
    if entries.len() > 1 && entries.items().any(|entry| entry.str() == "*") {
        errors.invalid(
            entries,
            format!("if '*' is present, must not specify other {what}"),
        );
    }
}

fn resources(resources: &Node, errors: &mut Errors) {
    if resources.is_empty() {
        errors.required(resources, "");
    }
    let (mut all_subresources, mut all_resources) = (BTreeSet::new(), BTreeSet::new());
    let (mut everything, mut star, mut plain) = (false, false, false);
    for entry in resources.items() {
        let text = entry.str();
        if text.is_empty() {
            errors.required(&entry, "");
            continue;
        }
        everything |= text == "*/*";
        star |= text == "*";
        let Some((resource, subresource)) = text.split_once('/') else {
            plain = text != "*";
            continue;
        };
        if all_subresources.contains(resource) {
            errors.invalid(
                &entry,
                format!("if '{resource}/*' is present, must not specify {text}"),
            );
        }
        if all_resources.contains(subresource) {
            errors.invalid(
                &entry,
                format!("if '*/{subresource}' is present, must not specify {text}"),
            );
        }
        if subresource == "*" {
            all_subresources.insert(resource);
        }
        if resource == "*" {
            all_resources.insert(subresource);
        }
    }
    if resources.len() > 1 && everything {
        errors.invalid(resources, "if '*/*' is present, must not specify other resources");
    }
    if star && plain {
        errors.invalid(
            resources,
            "if '*' is present, must not specify other resources without subresources",
        );
    }
}

/// Names and expressions of match conditions; `has_params` for a policy with a kind of parameters.
pub fn match_conditions(conditions: &Node, has_params: bool, errors: &mut Errors) {
    if conditions.len() > CONDITIONS_MAX {
        errors.too_many(conditions, CONDITIONS_MAX);
    }
    if conditions.is_empty() {
        return;
    }
    let environment = Environment::new(has_params, true);
    let mut seen = BTreeSet::new();
    for condition in conditions.items() {
        let expression = condition.field("expression");
        if expression.str().trim().is_empty() {
            errors.required(&expression, "");
        } else {
            // COMPAT: upstream compiles and shows what is left without the blanks around it.
            let trimmed = expression.str().trim().into();
            compiles(&environment, &expression.with(&trimmed), &[Type::Bool], errors);
        }
        let name = condition.field("name");
        if errors.require(&name) {
            errors.rule(&name, names::qualified_name(name.str()));
            if !seen.insert(name.str()) {
                errors.duplicate(&name);
            }
        }
    }
}

/// Complains of an expression that does not compile or gives another type.
pub fn compiles(environment: &Environment, expression: &Node, wanted: &[Type], errors: &mut Errors) {
    if let Err(complaint) = environment.compile(expression.str(), wanted) {
        errors.invalid(expression, complaint);
    }
}
