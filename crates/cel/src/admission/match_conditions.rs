//! `matchConditions`: all must hold for a webhook or policy to be asked.

use super::input::{Evaluated, Input, Inputs};
use super::{Environment, Expression};
use crate::limits::MATCH_CONDITIONS_COST_BUDGET;
use crate::rules::Budget;
use crate::types::Type;
use crate::value::Value;

/// A condition as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatchCondition {
    pub name: String,
    pub expression: String,
}

/// Compiled conditions.
#[derive(Debug)]
pub struct MatchConditions {
    environment: Environment,
    conditions: Vec<(String, Result<Expression, String>)>,
}

/// What the conditions say of a request. What an error means, the failure policy decides.
#[derive(Debug, PartialEq, Eq)]
pub enum MatchResult {
    Matches,
    /// The name of the first condition that does not hold.
    DoesNotMatch(String),
    Failed(String),
}

impl MatchConditions {
    /// Compiles conditions; those that do not compile fail when they are evaluated.
    pub fn new(conditions: &[MatchCondition], has_params: bool) -> Self {
        let environment = Environment::new(has_params, true);
        let conditions = conditions
            .iter()
            .map(|condition| {
                let compiled = environment.compile(&condition.expression, &[Type::Bool]);
                (condition.name.clone(), compiled)
            })
            .collect();
        Self {
            environment,
            conditions,
        }
    }

    /// The names of conditions that do not compile, with the reason.
    #[cfg(test)]
    fn compile_errors(&self) -> impl Iterator<Item = (&str, &str)> {
        self.conditions.iter().filter_map(|(name, compiled)| {
            let problem = compiled.as_ref().err()?;
            Some((name.as_str(), problem.as_str()))
        })
    }

    pub fn matches(&self, input: Input<'_>) -> MatchResult {
        let inputs = Inputs::new(&self.environment, input);
        let mut budget = Budget {
            remaining: MATCH_CONDITIONS_COST_BUDGET,
        };
        let (mut unmatched, mut errors) = (None, Vec::new());
        for (name, compiled) in &self.conditions {
            let expression = match compiled {
                Ok(expression) => expression,
                Err(problem) => {
                    errors.push(format!("compilation error: {problem}"));
                    continue;
                }
            };
            match inputs.evaluate(expression, &mut budget) {
                Evaluated::Value(Value::Bool(false)) => {
                    unmatched.get_or_insert_with(|| name.clone());
                }
                Evaluated::Value(_) => {}
                Evaluated::Failed(problem) => errors.push(problem),
                // All conditions are evaluated before any is looked at, so this ends the matter.
                Evaluated::OutOfBudget(problem) => return MatchResult::Failed(problem),
            }
        }
        // One condition that does not hold decides, whatever went wrong with others.
        if let Some(name) = unmatched {
            return MatchResult::DoesNotMatch(name);
        }
        let mut distinct: Vec<String> = Vec::new();
        for error in errors {
            if !distinct.contains(&error) {
                distinct.push(error);
            }
        }
        match &mut distinct[..] {
            [] => MatchResult::Matches,
            [only] => MatchResult::Failed(std::mem::take(only)),
            several => MatchResult::Failed(format!("[{}]", several.join(", "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AccessReview, Authorizer, Decision};
    use serde_json::{Value as Json, json};
    use std::sync::Arc;

    fn conditions(expressions: &[&str]) -> MatchConditions {
        let written: Vec<MatchCondition> = expressions
            .iter()
            .enumerate()
            .map(|(index, expression)| MatchCondition {
                name: format!("c{index}"),
                expression: (*expression).to_owned(),
            })
            .collect();
        MatchConditions::new(&written, false)
    }

    struct OnlyPods;

    impl Authorizer for OnlyPods {
        fn authorize(&self, review: &AccessReview) -> Decision {
            Decision {
                allowed: review.resource == "pods" && review.verb == "get",
                reason: format!("{:?}", review.service_account),
                error: None,
            }
        }
    }

    fn check(expressions: &[&str], expected: MatchResult) {
        let object = json!({"metadata": {"name": "web", "labels": {"a.b": "c"}}, "spec": {"replicas": 3}});
        let request = json!({
            "operation": "CREATE", "namespace": "ns", "resource": {"group": "apps", "resource": "deployments"},
            "userInfo": {"username": "me", "groups": ["g1", "g2"]}, "options": {}, "dryRun": false,
        });
        let namespace: Json = json!({"metadata": {"name": "ns", "labels": {"env": "prod"}}});
        let review = AccessReview {
            resource: "pods".to_owned(),
            ..AccessReview::default()
        };
        let input = Input {
            object: Some(&object),
            request: Some(&request),
            namespace_object: Some(&namespace),
            authorizer: Some((Arc::new(OnlyPods), review)),
            ..Input::default()
        };
        assert_eq!(
            conditions(expressions).matches(input),
            expected,
            "{expressions:?}"
        );
    }

    #[test]
    fn all_must_hold() {
        let unmatched = |name: &str| MatchResult::DoesNotMatch(name.to_owned());
        check(&[], MatchResult::Matches);
        check(
            &[
                "request.operation == 'CREATE' && request.userInfo.groups.exists(g, g == 'g2')",
                "object.spec.replicas > 2 && object.metadata.labels['a.b'] == 'c'",
                "oldObject == null",
                "!has(object.spec.paused)",
                "namespaceObject.metadata.labels.env == 'prod'",
            ],
            MatchResult::Matches,
        );
        check(
            &["true", "object.metadata.name == 'db'", "false"],
            unmatched("c1"),
        );
        // A condition that does not hold outweighs one that fails.
        check(&["object.nope == 1", "false"], unmatched("c1"));
        check(
            &["object.nope == 1"],
            MatchResult::Failed(
                "expression 'object.nope == 1' resulted in error: no such key: nope".to_owned(),
            ),
        );
    }

    #[test]
    fn access_can_be_asked_for() {
        check(
            &["authorizer.group('').resource('pods').check('get').allowed()"],
            MatchResult::Matches,
        );
        check(
            &["authorizer.requestResource.check('get').allowed()"],
            MatchResult::Matches,
        );
        check(
            &["authorizer.serviceAccount('ns', 'sa').group('').resource('secrets').check('get').allowed()"],
            MatchResult::DoesNotMatch("c0".to_owned()),
        );
        check(
            &["authorizer.serviceAccount('ns', 'sa').path('/x').check('get').reason().contains('sa')"],
            MatchResult::Matches,
        );
        check(
            &["authorizer.group('').resource(' ').check('get').allowed()"],
            MatchResult::Failed(
                "expression 'authorizer.group('').resource(' ').check('get').allowed()' resulted in error: resource \
                 must not be empty"
                    .to_owned(),
            ),
        );
    }

    #[test]
    fn what_does_not_compile_is_told() {
        let compiled = conditions(&["request.nope == 1", "1", "params.x == 1"]);
        let problems: Vec<(&str, String)> = compiled
            .compile_errors()
            .map(|(name, problem)| (name, problem.lines().next().unwrap_or_default().to_owned()))
            .collect();
        let expected = [
            (
                "c0",
                "compilation failed: ERROR: <input>:1:8: undefined field 'nope'",
            ),
            ("c1", "must evaluate to bool but got int"),
            (
                "c2",
                "compilation failed: ERROR: <input>:1:1: undeclared reference to 'params' (in container '')",
            ),
        ];
        assert_eq!(
            problems,
            expected.map(|(name, problem)| (name, problem.to_owned()))
        );
    }

    #[test]
    fn variables_build_on_one_another() {
        let mut environment = Environment::new(true, false).with_variables();
        environment
            .add_variable("replicas", "object.spec.replicas")
            .expect("compiles");
        environment
            .add_variable("many", "variables.replicas > params.most")
            .expect("compiles");
        environment.add_variable("bad", "object.zz").expect("compiles");
        assert!(environment.add_variable("broken", "variables.nope").is_err());
        let object = json!({"spec": {"replicas": 3}});
        let params = json!({"most": 2});
        let check = |expression: &str, expected: Result<bool, &str>| {
            let compiled = environment.compile(expression, &[]).expect("compiles");
            let input = Input {
                object: Some(&object),
                params: Some(&params),
                ..Input::default()
            };
            let mut budget = Budget::default();
            let inputs = Inputs::new(&environment, input);
            match (inputs.evaluate(&compiled, &mut budget), expected) {
                (Evaluated::Value(Value::Bool(found)), Ok(expected)) => {
                    assert_eq!(found, expected, "{expression}")
                }
                (Evaluated::Failed(problem), Err(expected)) => {
                    assert!(problem.ends_with(expected), "{problem}")
                }
                (other, _) => panic!("{expression}: {other:?}"),
            }
        };
        check("variables.many && variables.many", Ok(true));
        check("variables.replicas == 4", Ok(false));
        check(
            "variables.bad == 1",
            Err("composited variable \"bad\" fails to evaluate: no such key: zz"),
        );
        check("true || variables.bad == 1", Ok(true));
    }
}
