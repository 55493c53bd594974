//! A MutatingAdmissionPolicy, compiled: what it is for, and the expressions that make configurations to apply or JSON
//! patches.

use serde_json::{Value, json};
use skiff_cel::Type;
use skiff_cel::admission::{Environment, Evaluated, Expression, Input, Inputs, MatchConditions, MatchResult};
use skiff_cel::rules::Budget;
use skiff_meta::GroupVersionKind;
use skiff_registry::{Resource, object};
use skiff_schema::apply::{self, TypeRef};
use skiff_schema::patch::{self, PatchError};

use super::matching::Matching;
use super::policy::param_kind;
use super::webhooks::conditions;

pub struct Policy {
    pub name: String,
    pub matching: Matching,
    pub ignores_failure: bool,
    pub param_kind: Option<GroupVersionKind>,
    pub reinvocable: bool,
    conditions: Option<MatchConditions>,
    environment: Environment,
    pub mutations: Vec<Mutation>,
}

pub struct Mutation {
    is_json_patch: bool,
    expression: Result<Expression, String>,
}

impl Policy {
    pub fn read(value: &Value) -> Policy {
        let spec = value.get("spec").unwrap_or(&Value::Null);
        let text = |value: &Value, key: &str| object::at_str(value, &[key]).to_owned();
        let items = |key: &str| spec.get(key).and_then(Value::as_array).into_iter().flatten();
        let param_kind = param_kind(spec);
        let mut environment = Environment::new(param_kind.is_some(), true)
            .with_patch_types()
            .with_variables();
        for variable in items("variables") {
            // What does not compile fails when it is read.
            let _ = environment.add_variable(&text(variable, "name"), &text(variable, "expression"));
        }
        let mutations = items("mutations")
            .map(|mutation| {
                let is_json_patch = text(mutation, "patchType") == "JSONPatch";
                let (key, makes) = if is_json_patch {
                    ("jsonPatch", Type::list(Type::Struct("JSONPatch".into())))
                } else {
                    ("applyConfiguration", Type::Struct("Object".into()))
                };
                let written = object::at_str(mutation, &[key, "expression"]).trim();
                Mutation {
                    is_json_patch,
                    expression: environment.compile(written, &[makes]),
                }
            })
            .collect();
        Policy {
            name: object::name(value).to_owned(),
            matching: Matching::read(spec.get("matchConstraints").unwrap_or(&Value::Null)),
            ignores_failure: text(spec, "failurePolicy") == "Ignore",
            conditions: conditions(spec, param_kind.is_some()),
            reinvocable: text(spec, "reinvocationPolicy") == "IfNeeded",
            param_kind,
            environment,
            mutations,
        }
    }

    /// Whether the conditions hold for a request.
    pub fn wants(&self, input: Input<'_>) -> Result<bool, String> {
        match self
            .conditions
            .as_ref()
            .map(|conditions| conditions.matches(input))
        {
            None | Some(MatchResult::Matches) => Ok(true),
            Some(MatchResult::DoesNotMatch(_)) => Ok(false),
            Some(MatchResult::Failed(why)) => Err(why),
        }
    }

    /// The object of the request after one of the mutations, in the version of `resource`.
    pub fn mutated(
        &self,
        mutation: &Mutation,
        resource: &Resource,
        input: Input<'_>,
    ) -> Result<Value, String> {
        let Some(current) = input.object else {
            return Err("there is no object to change".to_owned());
        };
        let expression = mutation.expression.as_ref().map_err(Clone::clone)?;
        let inputs = Inputs::new(&self.environment, input.clone());
        let made = match inputs.evaluate(expression, &mut Budget::default()) {
            Evaluated::Value(value) => value.to_json().map_err(|error| error.to_string())?,
            Evaluated::Failed(why) | Evaluated::OutOfBudget(why) => return Err(why),
        };
        if mutation.is_json_patch {
            return patched(current, &made);
        }
        let problem = |why: String| format!("error applying patch: {why}");
        merged(resource, current, made).map_err(problem)
    }
}

fn patched(current: &Value, operations: &Value) -> Result<Value, String> {
    match patch::json_patch(current, operations) {
        Ok(patched) => Ok(patched),
        Err(
            PatchError::BadRequest(why)
            | PatchError::TooLarge(why)
            | PatchError::Unprocessable(why)
            | PatchError::Internal(why),
        ) => {
            // A test that fails leaves everything as it is.
            if why.ends_with("test failed") {
                Ok(current.clone())
            } else {
                Err(format!("JSON Patch: {why}"))
            }
        }
    }
}

fn merged(resource: &Resource, current: &Value, mut configuration: Value) -> Result<Value, String> {
    for key in ["apiVersion", "kind"] {
        object::put(&mut configuration, &[key], json!(object::at_str(current, &[key])));
    }
    let of = resource
        .strategy
        .type_of(&resource.api_version)
        .unwrap_or(TypeRef::Deduced);
    apply::validate(of, &configuration, apply::Duplicates::Refused)
        .map_err(|why| format!("failed to convert patch object to typed object: {why}"))?;
    let atomics = apply::atomics(of, &configuration);
    if !atomics.is_empty() {
        return Err(format!(
            "invalid ApplyConfiguration: may not mutate atomic arrays, maps or structs: {}",
            atomics.join(", ")
        ));
    }
    apply::merge(of, current, &configuration).map_err(|why| format!("failed to merge patch: {why}"))
}
