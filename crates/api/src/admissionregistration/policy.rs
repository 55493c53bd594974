//! ValidatingAdmissionPolicies and MutatingAdmissionPolicies.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_cel::Type;
use skiff_cel::admission::Environment;
use skiff_meta::{field, names};

use super::GROUP;
use super::matching::{
    compiles, match_conditions, match_resources, match_resources_defaults, mutating_operations,
};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, STATUS_ALONE, integer, text as column};
use crate::node::{Node, at, list, same, text};
use crate::object_meta::conditions;
use crate::{row, strategy, walk};

const AUDIT_ANNOTATIONS_MAX: usize = 20;
const VALUE_EXPRESSION_MAX: usize = 5 * 1024;
const ONE_NEEDED: &str = "validations or auditAnnotations must contain at least one item";

const POLICY: Kind = Kind {
    group: GROUP,
    default: |_, object| {
        let Some(spec) = walk::object(object, "spec") else {
            return;
        };
        walk::pointer(spec, "failurePolicy", "Fail");
        walk::each(spec, "matchConstraints", &mut match_resources_defaults);
    },
    allow_unconditional_update: false,
    update_again: Again::Object,
    qualified_finalizers: false,
    ..BASE
};

/// Why a text cannot begin a JSONPath.
fn no_path(text: &str) -> Option<String> {
    let first = text.chars().next()?;
    if first.is_ascii_digit() || "+-".contains(first) {
        let digits = text[1..].find(|c: char| !c.is_ascii_digit() && c != '.');
        let number = &text[..digits.map_or(text.len(), |end| end + 1)];
        return number
            .parse::<f64>()
            .is_err()
            .then(|| format!("cannot parse number {number}"));
    }
    let known = first.is_alphanumeric() || "_@$[\"'. }".contains(first);
    (!known).then(|| {
        format!(
            "unrecognized character in action: U+{:04X} '{first}'",
            u32::from(first)
        )
    })
}

pub static VALIDATING_ADMISSION_POLICY: Kind = Kind {
    kind: "ValidatingAdmissionPolicy",
    prepare_create: strategy::create_with_generation,
    prepare_update: strategy::update_spec,
    prepare_status_update: strategy::status_only_keep_metadata,
    validate: |object| validating(object, None),
    validate_update: |new, old| validating(new, Some(old)),
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let warnings = root.field("status.typeChecking.expressionWarnings");
        for warning in warnings.items() {
            errors.require(&warning.field("warning"));
            let reference = warning.field("fieldRef");
            let path = reference.str().trim();
            if path.is_empty() {
                errors.required(&reference, "");
            } else if let Some(why) = no_path(path) {
                errors.invalid_value(&reference, path, format!("invalid JSONPath: {why}"));
            }
        }
        conditions(&root.field("status.conditions"), &mut errors);
        errors.into_vec()
    },
    status_again: Again::None,
    columns: &[NAME, integer("Validations"), column("ParamKind"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(list(object, "spec.validations").len()),
            param_kind_cell(object),
            row::age(object, now),
        ]
    },
    has_status: true,
    reset_fields: STATUS_ALONE,
    ..POLICY
};

pub static MUTATING_ADMISSION_POLICY: Kind = Kind {
    kind: "MutatingAdmissionPolicy",
    prepare_create: strategy::create_generation_only,
    prepare_update: strategy::update_generation,
    validate: |object| mutating(object, None),
    validate_update: |new, old| mutating(new, Some(old)),
    columns: &[NAME, integer("Mutations"), column("ParamKind"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(list(object, "spec.mutations").len()),
            param_kind_cell(object),
            row::age(object, now),
        ]
    },
    ..POLICY
};

fn param_kind_cell(object: &Value) -> Value {
    match at(object, "spec.paramKind") {
        Value::Null => json!("<unset>"),
        kind => json!(format!("{}/{}", text(kind, "apiVersion"), text(kind, "kind"))),
    }
}

/// What both sorts of policy check first, up to the variables.
fn policy(object: &Value, old: Option<&Value>, mutates: bool, errors: &mut Errors) -> Environments {
    let root = Node::root(object);
    let spec = root.field("spec");
    let failure = spec.field("failurePolicy");
    if failure.is_set() {
        errors.one_of(&failure, &["Fail", "Ignore"]);
    } else {
        errors.required(&failure, "");
    }
    let kind = spec.field("paramKind");
    if kind.is_set() {
        param_kind(&kind, errors);
    }
    let constraints = spec.field("matchConstraints");
    if constraints.is_set() {
        match_resources(&constraints, errors);
        if constraints.field("resourceRules").is_empty() {
            errors.required(&constraints.field("resourceRules"), "");
        }
        if mutates {
            mutating_operations(&constraints, errors);
        }
    } else {
        errors.required(&constraints, "");
    }
    let unchanged =
        |name| old.is_some_and(|old| same(at(at(object, "spec"), name), at(at(old, "spec"), name)));
    if !(unchanged("paramKind") && unchanged("matchConditions")) {
        match_conditions(&spec.field("matchConditions"), kind.is_set(), errors);
    }
    let mut environments = Environments::new(kind.is_set(), !spec.field("variables").is_empty());
    if mutates {
        environments.rules = environments.rules.with_patch_types();
    }
    let variables = spec.field("variables");
    for variable in variables.items() {
        let name = variable.field("name");
        if name.str().trim().is_empty() {
            errors.required(&name, "name is not specified");
        } else if !is_cel_identifier(name.str()) {
            errors.invalid(&name, "must be a valid CEL identifier");
        }
        let expression = variable.field("expression");
        if expression.str().trim().is_empty() {
            errors.required(&expression, "expression is not specified");
        } else if let Err(complaint) = environments.add_variable(name.str(), expression.str()) {
            errors.invalid(&expression, complaint);
        }
    }
    environments
}

/// What the expressions of one policy are compiled against. Messages may not ask the authorizer.
struct Environments {
    rules: Environment,
    messages: Environment,
}

impl Environments {
    /// `variables` is only there where the policy has some.
    fn new(has_params: bool, has_variables: bool) -> Environments {
        let environment = |has_authorizer| {
            let environment = Environment::new(has_params, has_authorizer);
            if has_variables {
                environment.with_variables()
            } else {
                environment
            }
        };
        Environments {
            rules: environment(true),
            messages: environment(false),
        }
    }

    fn add_variable(&mut self, name: &str, expression: &str) -> Result<(), String> {
        // A variable that asks the authorizer fails in a message when it is read there.
        let _ = self.messages.add_variable(name, expression);
        self.rules.add_variable(name, expression)
    }
}

fn param_kind(param: &Node, errors: &mut Errors) {
    let version = param.field("apiVersion");
    if errors.require(&version) {
        let (group, number) = match version.str().split('/').collect::<Vec<_>>()[..] {
            [number] => ("", Some(number)),
            [group, number] => (group, Some(number)),
            _ => ("", None),
        };
        match number {
            None => {
                let detail = format!("unexpected GroupVersion string: {}", version.str());
                errors.invalid(&version, detail);
            }
            Some(number) => {
                let joined = |complaints: Vec<String>| complaints.join(",");
                if !group.is_empty() && !names::dns1123_subdomain(group).is_empty() {
                    errors.invalid_value(&version, group, joined(names::dns1123_subdomain(group)));
                }
                if number.is_empty() {
                    errors.invalid(&version, "version must be specified");
                } else if !names::dns1035_label(number).is_empty() {
                    errors.invalid_value(&version, number, joined(names::dns1035_label(number)));
                }
            }
        }
    }
    let kind = param.field("kind");
    if errors.require(&kind) {
        let complaints = names::dns1035_label(&kind.str().to_lowercase());
        if !complaints.is_empty() {
            let detail = format!(
                "may have mixed case, but should otherwise match: {}",
                complaints.join(",")
            );
            errors.invalid(&kind, detail);
        }
    }
}

fn is_cel_identifier(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        && !skiff_cel::escape::RESERVED.contains(&name)
}

fn validating(object: &Value, old: Option<&Value>) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let environments = policy(object, old, false, &mut errors);
    let root = Node::root(object);
    let spec = root.field("spec");
    let (validations, annotations) = (spec.field("validations"), spec.field("auditAnnotations"));
    if validations.is_empty() && annotations.is_empty() {
        errors.required(&validations, ONE_NEEDED);
        errors.required(&annotations, ONE_NEEDED);
        return errors.into_vec();
    }
    for validation in validations.items() {
        one_validation(&validation, &environments, &mut errors);
    }
    if annotations.len() > AUDIT_ANNOTATIONS_MAX {
        errors.invalid(
            &annotations,
            format!("must not have more than {AUDIT_ANNOTATIONS_MAX} auditAnnotations"),
        );
    }
    let mut keys = BTreeSet::new();
    for annotation in annotations.items() {
        audit_annotation(
            &annotation,
            text(object, "metadata.name"),
            &environments,
            &mut errors,
        );
        let key = annotation.field("key");
        if !keys.insert(key.str()) {
            errors.duplicate(&key);
        }
    }
    errors.into_vec()
}

fn one_validation(validation: &Node, environments: &Environments, errors: &mut Errors) {
    let expression = validation.field("expression");
    if expression.str().trim().is_empty() {
        errors.required(&expression, "expression is not specified");
    } else {
        compiles(&environments.rules, &expression, &[Type::Bool], errors);
    }
    let dynamic = validation.field("messageExpression");
    if !dynamic.is_empty() && dynamic.str().trim().is_empty() {
        errors.invalid(&dynamic, "must be non-empty if specified");
    } else if !dynamic.is_empty() {
        compiles(&environments.messages, &dynamic, &[Type::String], errors);
    }
    let message = validation.field("message");
    let trimmed = message.str().trim();
    if !message.is_empty() && trimmed.is_empty() {
        errors.invalid(&message, "must be non-empty if specified");
    } else if trimmed.contains(['\n', '\r']) {
        errors.invalid(&message, "must not contain line breaks");
    }
    errors.one_of_if_set(
        &validation.field("reason"),
        &["Forbidden", "Invalid", "RequestEntityTooLarge"],
    );
}

fn audit_annotation(annotation: &Node, policy: &str, environments: &Environments, errors: &mut Errors) {
    let key = annotation.field("key");
    if policy.is_empty() {
        errors.invalid(&key, "requires metadata.name be non-empty");
    } else {
        let whole = format!("{policy}/{}", key.str());
        for complaint in names::qualified_name(&whole) {
            errors.invalid_value(&key, whole.as_str(), complaint);
        }
    }
    let value = annotation.field("valueExpression");
    let length = value.str().trim().len();
    if length == 0 {
        errors.required(&value, "valueExpression is not specified");
    } else if length > VALUE_EXPRESSION_MAX {
        errors.required(
            &value,
            format!("must not exceed {VALUE_EXPRESSION_MAX} bytes in length"),
        );
    } else {
        compiles(&environments.rules, &value, &[Type::String, Type::Null], errors);
    }
}

fn mutating(object: &Value, old: Option<&Value>) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let environments = policy(object, old, true, &mut errors);
    let root = Node::root(object);
    let spec = root.field("spec");
    let mutations = spec.field("mutations");
    if mutations.is_empty() {
        errors.required(&mutations, "mutations must contain at least one item");
    }
    for mutation in mutations.items() {
        one_mutation(&mutation, &environments.rules, &mut errors);
    }
    errors.required_one_of(&spec.field("reinvocationPolicy"), &["IfNeeded", "Never"]);
    errors.into_vec()
}

fn one_mutation(mutation: &Node, environment: &Environment, errors: &mut Errors) {
    let kind = mutation.field("patchType");
    if kind.is_empty() {
        errors.required(&kind, "");
        return;
    }
    let (wanted, other) = match kind.str() {
        "JSONPatch" => ("jsonPatch", "applyConfiguration"),
        "ApplyConfiguration" => ("applyConfiguration", "jsonPatch"),
        _ => {
            errors.not_supported(&kind, &["ApplyConfiguration", "JSONPatch"]);
            return;
        }
    };
    let patch = mutation.field(wanted);
    if !patch.is_set() {
        errors.required(
            &patch,
            format!("must be specified when patchType is {}", kind.str()),
        );
    } else if patch.field("expression").str().trim().is_empty() {
        errors.required(&patch.field("expression"), "");
    } else {
        let expression = patch.field("expression");
        let trimmed = expression.str().trim();
        let makes = match wanted {
            "jsonPatch" => Type::list(Type::Struct("JSONPatch".into())),
            _ => Type::Struct("Object".into()),
        };
        if let Err(complaint) = environment.compile(trimmed, &[makes]) {
            errors.invalid_value(&expression, trimmed, complaint);
        }
    }
    if mutation.field(other).is_set() {
        errors.invalid_value(
            &mutation.field(other),
            format!("{{{other}}}"),
            format!("must not be specified when patchType is {}", kind.str()),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: fn(&Value, Option<&Value>) -> Vec<field::Error>, spec: Value, expected: &[&str]) {
        let mut whole = json!({"failurePolicy": "Fail", "matchConstraints": {"matchPolicy": "Exact",
            "namespaceSelector": {}, "objectSelector": {}, "resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]}});
        for (name, value) in spec.as_object().into_iter().flatten() {
            walk::put(&mut whole, name, value.clone());
        }
        let object = json!({"metadata": {"name": "p"}, "spec": whole});
        let found: Vec<String> = rule(&object, None).iter().map(ToString::to_string).collect();
        assert_eq!(found, expected, "{spec}");
    }

    #[test]
    fn policies() {
        check(validating, json!({"validations": [{"expression": "true"}]}), &[]);
        check(
            validating,
            json!({}),
            &[
                "spec.validations: Required value: validations or auditAnnotations must contain at least one item",
                "spec.auditAnnotations: Required value: validations or auditAnnotations must contain at least one item",
            ],
        );
        check(
            validating,
            json!({"validations": [{"expression": " ", "message": "a\nb", "reason": "No"}], "variables": [{"name": "if", "expression": "1"}]}),
            &[
                "spec.variables[0].name: Invalid value: \"if\": must be a valid CEL identifier",
                "spec.validations[0].expression: Required value: expression is not specified",
                "spec.validations[0].message: Invalid value: \"a\\nb\": must not contain line breaks",
                "spec.validations[0].reason: Unsupported value: \"No\": supported values: \"Forbidden\", \"Invalid\", \"RequestEntityTooLarge\"",
            ],
        );
        check(
            mutating,
            json!({"reinvocationPolicy": "Never", "mutations": [{"patchType": "JSONPatch", "applyConfiguration": {}}]}),
            &[
                "spec.mutations[0].jsonPatch: Required value: must be specified when patchType is JSONPatch",
                "spec.mutations[0].applyConfiguration: Invalid value: \"{applyConfiguration}\": must not be specified when patchType is JSONPatch",
            ],
        );
        check(
            validating,
            json!({"validations": [{"expression": "true"}], "paramKind": {"apiVersion": "a/b/c"}}),
            &[
                "spec.paramKind.apiVersion: Invalid value: \"a/b/c\": unexpected GroupVersion string: a/b/c",
                "spec.paramKind.kind: Required value",
            ],
        );
        check(
            validating,
            json!({"variables": [{"name": "size", "expression": "object.spec.replicas"}, {"name": "bad", "expression": "1 +"}],
                "validations": [{"expression": "variables.size < 5 && size(params) > 1", "messageExpression": "1"}],
                "matchConditions": [{"name": "m", "expression": "request.operation"}]}),
            &[
                "spec.matchConditions[0].expression: Invalid value: \"request.operation\": must evaluate to bool but got string",
                "spec.variables[1].expression: Invalid value: \"1 +\": compilation failed: ERROR: <input>:1:4: Syntax error: mismatched input '<EOF>' expecting {'[', '{', '(', '.', '-', '!', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, NUM_UINT, STRING, BYTES, IDENTIFIER}\n | 1 +\n | ...^",
                "spec.validations[0].expression: Invalid value: \"variables.size < 5 && size(params) > 1\": compilation failed: ERROR: <input>:1:28: undeclared reference to 'params' (in container '')\n | variables.size < 5 && size(params) > 1\n | ...........................^",
                "spec.validations[0].messageExpression: Invalid value: \"1\": must evaluate to string but got int",
            ],
        );
    }

    #[test]
    fn where_a_warning_points() {
        let check =
            |text: &str, expected: Option<&str>| assert_eq!(no_path(text).as_deref(), expected, "{text}");
        check("spec.validations[0].expression", None);
        check("$.a", None);
        check("12", None);
        check("-1.5x", None);
        check("1.2.3.4", Some("cannot parse number 1.2.3.4"));
        check("-", Some("cannot parse number -"));
        check("/abs/path", Some("unrecognized character in action: U+002F '/'"));
    }
}
