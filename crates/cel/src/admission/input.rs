//! One request as expressions see it. Variables are computed when first read, and once.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value as Json;

use super::{Environment, Expression, VARIABLES};
use crate::error::EvalError;
use crate::eval::Activation;
use crate::library::authorizer::{AccessReview, Authorizer, AuthorizerObject};
use crate::limits::PER_CALL_LIMIT;
use crate::program::{Limits, Program};
use crate::rules::Budget;
use crate::value::Value;

/// How deep variables may need one another: what keeps their evaluation inside its stack.
const MAX_VARIABLE_DEPTH: usize = 64;

/// What a request brings. What is absent is `null` to expressions.
#[derive(Clone, Default)]
pub struct Input<'a> {
    pub object: Option<&'a Json>,
    pub old_object: Option<&'a Json>,
    /// The admission request, without its objects.
    pub request: Option<&'a Json>,
    pub params: Option<&'a Json>,
    pub namespace_object: Option<&'a Json>,
    /// Who decides on access, and the resource of the request, for `authorizer` and `authorizer.requestResource`.
    pub authorizer: Option<(Arc<dyn Authorizer>, AccessReview)>,
}

/// A request together with the variables that its expressions share.
pub struct Inputs<'a> {
    input: Input<'a>,
    environment: &'a Environment,
    known: RefCell<HashMap<String, Result<Value<'a>, EvalError>>>,
    /// What variables cost since it was last asked.
    cost: Cell<u64>,
    /// What variables may cost before the budget is spent.
    allowance: Cell<u64>,
    depth: Cell<usize>,
}

/// What came of one expression.
#[derive(Debug)]
pub enum Evaluated<'a> {
    Value(Value<'a>),
    /// The expression failed; others may still be evaluated.
    Failed(String),
    /// The budget is spent, and nothing more is to be evaluated.
    OutOfBudget(String),
}

impl<'a> Inputs<'a> {
    pub fn new(environment: &'a Environment, input: Input<'a>) -> Self {
        Self {
            input,
            environment,
            known: RefCell::default(),
            cost: Cell::new(0),
            allowance: Cell::new(0),
            depth: Cell::new(0),
        }
    }

    /// Evaluates an expression and takes what it costs from the budget.
    pub fn evaluate(&self, expression: &'a Expression, budget: &mut Budget) -> Evaluated<'a> {
        self.allowance.set(u64::try_from(budget.remaining).unwrap_or(0));
        let evaluated = expression.program.evaluate(self, &Limits::default());
        let cost = evaluated.cost.saturating_add(self.cost.take());
        if budget.remaining < 0 || cost > budget.remaining as u64 {
            budget.remaining = -1;
            return Evaluated::OutOfBudget(
                "validation failed due to running out of cost budget, no further validation rules will be run".to_owned(),
            );
        }
        budget.remaining -= cost as i64;
        match evaluated.result {
            Ok(value) => Evaluated::Value(value),
            Err(error) => Evaluated::Failed(format!(
                "expression '{}' resulted in error: {error}",
                expression.source
            )),
        }
    }

    fn variable(&self, name: &str) -> Option<Result<Value<'a>, EvalError>> {
        if let Some(value) = self.known.borrow().get(name) {
            return Some(value.clone());
        }
        let value = match &self.environment.variables.get(name)?.program {
            Err(problem) => Err(EvalError::new(format!(
                "composited variable {} fails to compile: {problem}",
                skiff_meta::field::quote(name)
            ))),
            Ok(program) => self.compute(name, program),
        };
        self.known.borrow_mut().insert(name.to_owned(), value.clone());
        Some(value)
    }

    fn compute(&self, name: &str, program: &'a Program) -> Result<Value<'a>, EvalError> {
        if self.depth.get() >= MAX_VARIABLE_DEPTH {
            return Err(EvalError::new("variables depend on one another too deeply"));
        }
        self.depth.set(self.depth.get() + 1);
        let limits = Limits {
            cost: PER_CALL_LIMIT.min(self.allowance.get().saturating_sub(self.cost.get())),
            interrupted: None,
        };
        let evaluated = program.evaluate(self, &limits);
        self.depth.set(self.depth.get() - 1);
        self.cost.set(self.cost.get().saturating_add(evaluated.cost));
        evaluated.result.map_err(|error| match error {
            EvalError::Interrupted => error,
            error => EvalError::new(format!(
                "composited variable {} fails to evaluate: {error}",
                skiff_meta::field::quote(name)
            )),
        })
    }
}

impl<'a> Activation<'a> for Inputs<'a> {
    fn resolve(&self, name: &str) -> Option<Result<Value<'a>, EvalError>> {
        let plain = |json: Option<&'a Json>| Some(Ok(json.map_or(Value::Null, Value::plain)));
        match name {
            "object" => plain(self.input.object),
            "oldObject" => plain(self.input.old_object),
            "request" => plain(self.input.request),
            "params" => plain(self.input.params),
            "namespaceObject" => plain(self.input.namespace_object),
            "authorizer" => {
                let (authorizer, _) = self.input.authorizer.as_ref()?;
                Some(Ok(Value::Authorizer(AuthorizerObject::new(authorizer.clone()))))
            }
            "authorizer.requestResource" => {
                let (authorizer, review) = self.input.authorizer.as_ref()?;
                let check = AuthorizerObject::resource_check(authorizer.clone(), review.clone());
                Some(Ok(Value::Authorizer(check)))
            }
            name => self.variable(name.strip_prefix(VARIABLES)?.strip_prefix('.')?),
        }
    }
}
