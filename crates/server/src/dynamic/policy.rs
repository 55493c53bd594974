//! A ValidatingAdmissionPolicy, compiled: what it is for, its conditions and variables, and the expressions that must
//! hold.

use serde_json::Value;
use skiff_cel::Type;
use skiff_cel::admission::{Environment, Evaluated, Expression, Input, Inputs, MatchConditions, MatchResult};
use skiff_cel::limits::MAX_MESSAGE_SIZE;
use skiff_cel::rules::Budget;
use skiff_meta::GroupVersionKind;
use skiff_registry::object;

use super::matching::Matching;
use super::webhooks::conditions;

pub struct Policy {
    pub name: String,
    pub matching: Matching,
    pub ignores_failure: bool,
    pub param_kind: Option<GroupVersionKind>,
    conditions: Option<MatchConditions>,
    /// What validations and audit annotations see.
    rules: Environment,
    /// What messages see: the same without the authorizer.
    messages: Environment,
    validations: Vec<Validation>,
    annotations: Vec<Annotation>,
}

struct Validation {
    written: String,
    expression: Result<Expression, String>,
    message: String,
    reason: String,
    message_expression: Option<Expression>,
}

/// What the audit log should know.
struct Annotation {
    key: String,
    expression: Result<Expression, String>,
}

/// Why a request is not admitted.
#[derive(Debug, PartialEq, Eq)]
pub struct Violation {
    /// The place of the validation in the policy.
    pub index: usize,
    pub message: String,
    /// Empty if nothing was said.
    pub reason: String,
}

impl Policy {
    pub fn read(value: &Value) -> Policy {
        let spec = value.get("spec").unwrap_or(&Value::Null);
        let text = |value: &Value, key: &str| object::at_str(value, &[key]).to_owned();
        let items = |key: &str| spec.get(key).and_then(Value::as_array).into_iter().flatten();
        let param_kind = param_kind(spec);
        let has_params = param_kind.is_some();
        let mut rules = Environment::new(has_params, true).with_variables();
        let mut messages = Environment::new(has_params, false).with_variables();
        for variable in items("variables") {
            let (name, expression) = (text(variable, "name"), text(variable, "expression"));
            // What does not compile fails when it is read.
            let _ = rules.add_variable(&name, &expression);
            let _ = messages.add_variable(&name, &expression);
        }
        let validations = items("validations")
            .map(|validation| {
                let written = text(validation, "expression");
                let message_expression = text(validation, "messageExpression");
                Validation {
                    expression: rules.compile(&written, &[Type::Bool]),
                    written,
                    message: text(validation, "message"),
                    reason: text(validation, "reason"),
                    message_expression: (!message_expression.is_empty())
                        .then(|| messages.compile(&message_expression, &[Type::String]).ok())
                        .flatten(),
                }
            })
            .collect();
        let annotations = items("auditAnnotations")
            .map(|annotation| Annotation {
                key: text(annotation, "key"),
                expression: rules.compile(&text(annotation, "valueExpression"), &[]),
            })
            .collect();
        Policy {
            name: object::name(value).to_owned(),
            matching: Matching::read(spec.get("matchConstraints").unwrap_or(&Value::Null)),
            ignores_failure: text(spec, "failurePolicy") == "Ignore",
            conditions: conditions(spec, has_params),
            param_kind,
            rules,
            messages,
            validations,
            annotations,
        }
    }

    /// Everything that is wrong with a request, in the order of the validations. What the audit log should know is told
    /// to `annotate`.
    pub fn violations(
        &self,
        input: &Input<'_>,
        annotate: &mut (dyn FnMut(&str, &str) + Send),
    ) -> Vec<Violation> {
        let mut found = Vec::new();
        let mut fail = |index: usize, message: String| {
            if !self.ignores_failure {
                found.push(Violation {
                    index,
                    message,
                    reason: String::new(),
                });
            }
        };
        if let Some(conditions) = &self.conditions {
            match conditions.matches(input.clone()) {
                MatchResult::Matches => {}
                MatchResult::DoesNotMatch(_) => return found,
                MatchResult::Failed(why) => {
                    fail(0, why);
                    return found;
                }
            }
        }
        let rules = Inputs::new(&self.rules, input.clone());
        let mut budget = Budget::default();
        let mut violated = Vec::new();
        for (index, validation) in self.validations.iter().enumerate() {
            let expression = match &validation.expression {
                Ok(expression) => expression,
                Err(why) => {
                    fail(index, format!("compilation error: {why}"));
                    continue;
                }
            };
            match rules.evaluate(expression, &mut budget) {
                Evaluated::Value(skiff_cel::Value::Bool(true)) => {}
                Evaluated::Value(_) => violated.push((index, validation)),
                Evaluated::Failed(why) => fail(index, why),
                Evaluated::OutOfBudget(why) => {
                    fail(index, why);
                    return found;
                }
            }
        }
        let messages = Input {
            authorizer: None,
            ..input.clone()
        };
        let messages = Inputs::new(&self.messages, messages);
        for (index, validation) in violated {
            found.push(Violation {
                index,
                message: validation.told(&messages, &mut budget),
                reason: match validation.reason.as_str() {
                    "" => "Invalid".to_owned(),
                    reason => reason.to_owned(),
                },
            });
        }
        // Audit annotations are made even if nobody reads them, for the errors that they may be.
        for annotation in &self.annotations {
            let why = match &annotation.expression {
                Err(why) => format!("compilation error: {why}"),
                Ok(expression) => match rules.evaluate(expression, &mut budget) {
                    Evaluated::Value(skiff_cel::Value::String(text)) => {
                        let text = text.trim();
                        if !text.is_empty() {
                            annotate(&annotation.key, text);
                        }
                        continue;
                    }
                    Evaluated::Value(_) => continue,
                    Evaluated::Failed(why) | Evaluated::OutOfBudget(why) => why,
                },
            };
            if !self.ignores_failure {
                found.push(Violation {
                    index: 0,
                    message: why,
                    reason: String::new(),
                });
            }
        }
        found
    }
}

/// The kind of the objects that parametrise a policy.
pub fn param_kind(spec: &Value) -> Option<GroupVersionKind> {
    let kind = object::at(spec, &["paramKind"])?;
    let api_version = object::at_str(kind, &["apiVersion"]);
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    Some(GroupVersionKind::new(
        group,
        version,
        object::at_str(kind, &["kind"]),
    ))
}

impl Validation {
    fn told<'a>(&'a self, inputs: &Inputs<'a>, budget: &mut Budget) -> String {
        if let Some(expression) = &self.message_expression
            && let Evaluated::Value(skiff_cel::Value::String(text)) = inputs.evaluate(expression, budget)
        {
            let text = text.trim();
            if !text.is_empty() && text.len() <= MAX_MESSAGE_SIZE && !text.contains('\n') {
                return text.to_owned();
            }
        }
        match self.message.trim() {
            "" => format!("failed expression: {}", self.written.trim()),
            message => message.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn violations_and_their_messages() {
        let policy = |more: Value| {
            let mut spec = json!({"variables": [{"name": "replicas", "expression": "object.spec.replicas"}]});
            for (key, value) in more.as_object().expect("an object") {
                spec[key] = value.clone();
            }
            Policy::read(&json!({"metadata": {"name": "p"}, "spec": spec}))
        };
        let check = |more: Value, expected: &[(&str, &str)]| {
            let object = json!({"spec": {"replicas": 3}});
            let input = Input {
                object: Some(&object),
                ..Input::default()
            };
            let found = policy(more).violations(&input, &mut |_, _| ());
            let found: Vec<(&str, &str)> = found
                .iter()
                .map(|v| (v.message.as_str(), v.reason.as_str()))
                .collect();
            assert_eq!(found, expected);
        };
        check(
            json!({"validations": [{"expression": "variables.replicas == 3"}]}),
            &[],
        );
        check(
            json!({"validations": [{"expression": " variables.replicas < 2 "}, {"expression": "false", "message": " no ", "reason": "Forbidden"},
                {"expression": "false", "messageExpression": "'has ' + string(variables.replicas)"}]}),
            &[
                ("failed expression: variables.replicas < 2", "Invalid"),
                ("no", "Forbidden"),
                ("has 3", "Invalid"),
            ],
        );
        let missing = json!([{"expression": "object.nope == 1"}]);
        let error = "expression 'object.nope == 1' resulted in error: no such key: nope";
        check(json!({"validations": missing}), &[(error, "")]);
        check(json!({"validations": missing, "failurePolicy": "Ignore"}), &[]);
        let conditions = json!([{"name": "c", "expression": "object.spec.replicas > 5"}]);
        check(
            json!({"validations": [{"expression": "false"}], "matchConditions": conditions}),
            &[],
        );
    }
}
