//! Objects against compiled rules.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map as JsonMap, Value as Json};
use skiff_meta::field::{Error, ErrorType, Path};

use super::compile::{Compiled, CompiledRule, OLD_SELF, SELF, compile};
use super::correlate::{Correlation, by_key, list_key};
use super::{Budget, Outcome};
use crate::decl::DeclType;
use crate::error::EvalError;
use crate::escape::escape;
use crate::limits::{MAX_MESSAGE_SIZE, PER_CALL_LIMIT};
use crate::program::{Limits, Program};
use crate::schema::{Rule, Schema};
use crate::value::Value;

/// The compiled rules of a schema.
#[derive(Debug)]
pub struct Validator {
    root: Node,
    schema: Arc<Schema>,
}

/// The rules of one schema node and of those below it.
#[derive(Debug)]
struct Node {
    schema: Arc<Schema>,
    is_resource_root: bool,
    /// `None` where CEL cannot see the values although there are rules.
    rules: Option<Vec<CompiledRule>>,
    items: Option<Box<Node>>,
    properties: BTreeMap<String, Node>,
    additional_properties: Option<Box<Node>>,
    all_of: Vec<Node>,
}

impl Node {
    /// `rules_of` is where the rules are written: the schema itself, or a part of its `allOf`.
    fn build(rules_of: &Schema, schema: &Arc<Schema>, is_resource_root: bool) -> Option<Self> {
        if !has_any_rules(rules_of) {
            return None;
        }
        let rules = if rules_of.rules.is_empty() {
            Some(Vec::new())
        } else {
            compile(&rules_of.rules, schema, is_resource_root).map(|Compiled { rules, .. }| rules)
        };
        let child = |rules_of: &Schema, schema: &Arc<Schema>| {
            Self::build(rules_of, schema, schema.embedded_resource).map(Box::new)
        };
        let items = rules_of.items.as_ref().zip(schema.items.as_ref());
        let additional = rules_of.additional_schema().zip(schema.additional_schema());
        let mut properties = BTreeMap::new();
        for (name, rules_of) in rules_of.properties.iter().flatten() {
            let Some(property) = schema.property(name) else {
                continue;
            };
            // A map has no fields of its own, and what CEL cannot see has no rules that could be evaluated.
            let inside_map = schema.additional_schema().is_some() && escape(name).is_some();
            if inside_map || !has_any_rules(rules_of) {
                continue;
            }
            let visible = DeclType::of(property, property.embedded_resource, "").is_some();
            if let Some(node) = child(rules_of, property).filter(|_| visible) {
                properties.insert(name.clone(), *node);
            }
        }
        Some(Self {
            schema: schema.clone(),
            is_resource_root,
            rules,
            items: items.and_then(|(rules_of, schema)| child(rules_of, schema)),
            additional_properties: additional.and_then(|(rules_of, schema)| child(rules_of, schema)),
            properties,
            all_of: rules_of
                .all_of
                .iter()
                .filter_map(|part| Self::build(part, schema, is_resource_root))
                .collect(),
        })
    }
}

fn has_any_rules(schema: &Schema) -> bool {
    !schema.rules.is_empty()
        || schema.items.as_ref().is_some_and(|schema| has_any_rules(schema))
        || schema
            .additional_schema()
            .is_some_and(|schema| has_any_rules(schema))
        || schema
            .properties
            .iter()
            .flat_map(BTreeMap::values)
            .any(|schema| has_any_rules(schema))
        || schema.all_of.iter().any(|schema| has_any_rules(schema))
}

impl Validator {
    /// Compiles the rules of the schema of a custom resource, or `None` if it has none. Rules that do not compile
    /// become findings when an object is validated: `check_rules` should have refused them.
    pub fn new(schema: &Schema) -> Option<Self> {
        Self::of_part(schema, true)
    }

    /// The same for a part of such a schema; where a resource begins, its metadata can be seen.
    pub fn of_part(schema: &Schema, is_resource_root: bool) -> Option<Self> {
        if !schema.has_rules() {
            return None;
        }
        let schema = Arc::new(schema.clone());
        let root = Node::build(&schema, &schema, is_resource_root)?;
        Some(Self { root, schema })
    }

    /// Evaluates the rules. `old` is the object before the change: it gives `oldSelf`, and findings in parts that
    /// did not change become warnings. Once the budget is spent, no further rule is evaluated.
    pub fn validate(&self, path: &Path, object: &Json, old: Option<&Json>, budget: &mut Budget) -> Outcome {
        self.validate_interruptible(path, object, old, budget, None)
    }

    /// As `validate`, for callers that may want to stop: `interrupted` is asked now and then.
    pub fn validate_interruptible(
        &self,
        path: &Path,
        object: &Json,
        old: Option<&Json>,
        budget: &mut Budget,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Outcome {
        let mut run = Run {
            budget,
            outcome: Outcome::default(),
            interrupted,
        };
        let correlation = Correlation::root(object, old, &self.schema);
        // Nothing is left to do when the rules end early.
        let _ = run.node(&self.root, path, object, old, &correlation);
        run.outcome
    }
}

/// No further rule is to be evaluated.
struct Stop;

struct Run<'r> {
    budget: &'r mut Budget,
    outcome: Outcome,
    interrupted: Option<&'r dyn Fn() -> bool>,
}

const OUT_OF_BUDGET: &str =
    "validation failed due to running out of cost budget, no further validation rules will be run";

impl Run<'_> {
    fn stop(&mut self, error: Error) -> Stop {
        self.outcome.errors.push(error);
        self.budget.remaining = -1;
        Stop
    }

    fn node(
        &mut self,
        node: &Node,
        path: &Path,
        object: &Json,
        old: Option<&Json>,
        correlation: &Correlation<'_>,
    ) -> Result<(), Stop> {
        if object.is_null() {
            return Ok(());
        }
        let old = old.filter(|old| !old.is_null());
        self.rules(node, path, object, old, correlation)?;
        for part in &node.all_of {
            self.node(part, path, object, old, &correlation.all_of())?;
        }
        match object {
            Json::Array(items) => {
                if let Some(rules) = &node.items {
                    self.array(node, rules, path, items, old, correlation)?;
                }
            }
            Json::Object(fields) => self.object(node, path, fields, old, correlation)?,
            _ => {}
        }
        Ok(())
    }

    fn array(
        &mut self,
        node: &Node,
        rules: &Node,
        path: &Path,
        items: &[Json],
        old: Option<&Json>,
        correlation: &Correlation<'_>,
    ) -> Result<(), Stop> {
        let old = old
            .and_then(Json::as_array)
            .and_then(|old| by_key(&node.schema, old));
        for (index, item) in items.iter().enumerate() {
            let before = old
                .as_ref()
                .and_then(|old| old.get(&list_key(item, &node.schema.list_map_keys)?).copied());
            self.node(rules, &path.index(index), item, before, &correlation.index(index))?;
        }
        Ok(())
    }

    fn object(
        &mut self,
        node: &Node,
        path: &Path,
        fields: &JsonMap<String, Json>,
        old: Option<&Json>,
        correlation: &Correlation<'_>,
    ) -> Result<(), Stop> {
        let correlatable = matches!(
            node.schema.map_type.as_deref(),
            None | Some("granular" | "atomic")
        );
        let old = old.filter(|_| correlatable).and_then(Json::as_object);
        let before = |name: &str| old.and_then(|old| old.get(name));
        if let Some(rules) = &node.additional_properties {
            for (name, value) in fields {
                self.node(
                    rules,
                    &path.key(name),
                    value,
                    before(name),
                    &correlation.key(name),
                )?;
            }
        }
        if node.properties.is_empty() {
            return Ok(());
        }
        for (name, value) in fields {
            if let Some(rules) = node.properties.get(name) {
                self.node(
                    rules,
                    &path.child(name),
                    value,
                    before(name),
                    &correlation.key(name),
                )?;
            }
        }
        Ok(())
    }

    fn rules(
        &mut self,
        node: &Node,
        path: &Path,
        object: &Json,
        old: Option<&Json>,
        correlation: &Correlation<'_>,
    ) -> Result<(), Stop> {
        let kind = node.schema.kind.as_str();
        let Some(rules) = &node.rules else {
            self.outcome.errors.push(Error::invalid(
                path,
                kind,
                "rule compiler initialization error: failed to convert to declType for CEL validation rules",
            ));
            return Ok(());
        };
        if rules.is_empty() {
            return Ok(());
        }
        if self.budget.remaining <= 0 {
            return Err(self.stop(Error::invalid(path, kind, OUT_OF_BUDGET)));
        }
        let schema = if node.is_resource_root {
            node.schema.as_resource()
        } else {
            &node.schema
        };
        for rule in rules {
            self.rule(rule, schema, path, object, old, correlation)?;
        }
        Ok(())
    }

    fn rule(
        &mut self,
        compiled: &CompiledRule,
        schema: &Schema,
        path: &Path,
        object: &Json,
        old: Option<&Json>,
        correlation: &Correlation<'_>,
    ) -> Result<(), Stop> {
        let kind = schema.kind.as_str();
        let program = match &compiled.program {
            Ok(Some(program)) => program,
            Ok(None) => return Ok(()),
            Err(problem) => {
                let detail = format!("rule compile error: {problem}");
                self.outcome.errors.push(Error::invalid(path, kind, detail));
                return Ok(());
            }
        };
        let optional = compiled.rule.optional_old_self == Some(true);
        // Transition rules need something to compare with, unless they say that they do not.
        if compiled.uses_old_self && old.is_none() && !optional {
            return Ok(());
        }
        let variables = Variables {
            object,
            old,
            schema,
            optional,
        };
        let evaluated = self.evaluate(program, &variables);
        if evaluated.cost > self.budget.remaining as u64 {
            return Err(self.stop(Error::invalid(path, kind, OUT_OF_BUDGET)));
        }
        self.budget.remaining -= evaluated.cost as i64;
        let shown = shown(&compiled.rule);
        match evaluated.result {
            Ok(Value::Bool(true)) => return Ok(()),
            Ok(_) => {}
            Err(EvalError::CostLimit) => {
                let detail = format!(
                    "'{}': no further validation rules will be run due to call cost exceeds limit for rule: {shown}",
                    EvalError::CostLimit
                );
                return Err(self.stop(Error::invalid(path, kind, detail)));
            }
            Err(error) => {
                let error = error.to_string();
                let detail = if error.starts_with("no such overload") {
                    format!(
                        "'{error}': call arguments did not match a supported operator, function or macro signature \
                         for rule: {shown}"
                    )
                } else {
                    format!("{error} evaluating rule: {shown}")
                };
                self.outcome.errors.push(Error::invalid(path, kind, detail));
                return Ok(());
            }
        }
        let path = if compiled.field_path.is_empty() {
            path.clone()
        } else {
            path.child(&compiled.field_path)
        };
        let mut message = None;
        if let Ok(Some(expression)) = &compiled.message {
            match self.message(expression, &compiled.rule, &variables) {
                Ok(text) => message = text,
                Err(problem) => {
                    let error = Error::invalid(&path, kind, problem);
                    self.report(compiled, correlation, error);
                    self.budget.remaining = -1;
                    return Err(Stop);
                }
            }
        }
        let detail = message.unwrap_or_else(|| match compiled.rule.message.is_empty() {
            true => format!("failed rule: {shown}"),
            false => compiled.rule.message.trim().to_owned(),
        });
        let value = (!matches!(kind, "object" | "array")).then(|| object.clone());
        let error = finding(&path, value, detail, compiled.rule.reason.as_deref());
        self.report(compiled, correlation, error);
        Ok(())
    }

    /// A finding, or a warning where nothing changed. Transition rules are about the change and never let off.
    fn report(&mut self, compiled: &CompiledRule, correlation: &Correlation<'_>, error: Error) {
        if !compiled.uses_old_self && correlation.is_unchanged() {
            self.outcome.warnings.push(error.to_string());
        } else {
            self.outcome.errors.push(error);
        }
    }

    fn evaluate<'a>(
        &self,
        program: &'a Program,
        variables: &Variables<'a>,
    ) -> crate::program::Evaluation<'a> {
        let limits = Limits {
            cost: PER_CALL_LIMIT,
            interrupted: self.interrupted,
        };
        program.evaluate(&|name: &str| variables.resolve(name), &limits)
    }

    /// The message of an expression; `None` where it gives none that can be used. An error ends validation.
    fn message(
        &mut self,
        program: &Program,
        rule: &Rule,
        variables: &Variables<'_>,
    ) -> Result<Option<String>, String> {
        let evaluated = self.evaluate(program, variables);
        if evaluated.cost > self.budget.remaining as u64 {
            return Err("messageExpression evaluation failed due to running out of cost budget, no further validation \
                        rules will be run"
                .to_owned());
        }
        let text = match evaluated.result {
            Err(EvalError::CostLimit) => {
                return Err(format!(
                    "no further validation rules will be run due to call cost exceeds limit for messageExpression: {}",
                    skiff_meta::field::quote(&rule.message_expression)
                ));
            }
            Ok(Value::String(text)) => Some(text.trim().to_owned()),
            _ => None,
        };
        self.budget.remaining -= evaluated.cost as i64;
        Ok(text.filter(|text| !text.is_empty() && text.len() <= MAX_MESSAGE_SIZE && !text.contains('\n')))
    }
}

/// What rules can read.
struct Variables<'a> {
    object: &'a Json,
    old: Option<&'a Json>,
    schema: &'a Schema,
    optional: bool,
}

impl<'a> Variables<'a> {
    fn resolve(&self, name: &str) -> Option<Result<Value<'a>, EvalError>> {
        match (name, self.old, self.optional) {
            (SELF, _, _) => Some(Value::typed(self.object, self.schema)),
            (OLD_SELF, Some(old), false) => Some(Value::typed(old, self.schema)),
            (OLD_SELF, Some(old), true) => Some(Value::typed(old, self.schema).map(Value::some)),
            (OLD_SELF, None, true) => Some(Ok(Value::Optional(None))),
            _ => None,
        }
    }
}

/// How messages call a rule: by its message if it has one.
fn shown(rule: &Rule) -> &str {
    if rule.message.is_empty() {
        rule.rule.trim()
    } else {
        rule.message.trim()
    }
}

fn finding(path: &Path, value: Option<Json>, detail: String, reason: Option<&str>) -> Error {
    let (kind, value, detail) = match reason {
        Some("FieldValueForbidden") => (ErrorType::Forbidden, None, detail),
        Some("FieldValueRequired") => (ErrorType::Required, None, detail),
        Some("FieldValueDuplicate") => (ErrorType::Duplicate, value, String::new()),
        _ => (ErrorType::Invalid, value, detail),
    };
    Error {
        kind,
        path: path.to_string(),
        value,
        shown: None,
        detail,
    }
}
