//! The rules of one schema node, compiled.

use std::sync::Arc;

use super::field_path::valid_field_path;
use crate::decl::DeclType;
use crate::env::Env;
use crate::limits::MAX_REQUEST_SIZE;
use crate::program::{Ast, Program};
use crate::schema::{Rule, Schema};
use crate::types::Type;

/// The variable of the value that a rule is about.
pub const SELF: &str = "self";
/// The variable of that value before the change.
pub const OLD_SELF: &str = "oldSelf";

/// The name of the type of `self`; nothing may rely on it.
const SELF_TYPE: &str = "selfType";

/// One rule, ready or with the reason why not.
#[derive(Debug)]
pub(crate) struct CompiledRule {
    pub rule: Rule,
    /// `None` for an empty rule.
    pub program: Result<Option<Program>, String>,
    pub uses_old_self: bool,
    /// The most that one evaluation can cost.
    pub max_cost: u64,
    pub message: Result<Option<Program>, String>,
    pub message_max_cost: u64,
    /// `fieldPath` in the form that errors use; empty for none.
    pub field_path: String,
}

/// The rules of a node, and how often the node can occur in one object.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub rules: Vec<CompiledRule>,
    pub max_cardinality: u64,
}

/// Compiles rules for values of a schema, or `None` if CEL cannot see such values.
pub(crate) fn compile(rules: &[Rule], schema: &Schema, is_resource_root: bool) -> Option<Compiled> {
    let decl = Arc::new(DeclType::of(schema, is_resource_root, SELF_TYPE)?);
    let plain = Env::new()
        .declared(SELF, &decl)
        .declared(OLD_SELF, &decl)
        .sized_by(&decl);
    let optional = Env::new()
        .declared(SELF, &decl)
        .variable(OLD_SELF, Type::optional(decl.cel.clone()))
        .sized_by(&decl);
    let compile = |rule: &Rule| {
        let env = if rule.optional_old_self == Some(true) {
            &optional
        } else {
            &plain
        };
        compile_rule(rule, env, schema)
    };
    Some(Compiled {
        rules: rules.iter().map(compile).collect(),
        max_cardinality: (MAX_REQUEST_SIZE / (decl.min_serialized_size + 1)) as u64,
    })
}

fn compile_rule(rule: &Rule, env: &Env, schema: &Schema) -> CompiledRule {
    let mut compiled = CompiledRule {
        rule: rule.clone(),
        program: Ok(None),
        uses_old_self: false,
        max_cost: 0,
        message: Ok(None),
        message_max_cost: 0,
        field_path: String::new(),
    };
    if rule.rule.trim().is_empty() {
        return compiled;
    }
    let ast = match Ast::compile(env, &rule.rule) {
        Ok(ast) => ast,
        Err(errors) => {
            compiled.program = Err(format!("compilation failed: {errors}"));
            return compiled;
        }
    };
    if *ast.output_type() != Type::Bool {
        compiled.program = Err("cel expression must evaluate to a bool".to_owned());
        return compiled;
    }
    compiled.uses_old_self = ast.refers_to(OLD_SELF);
    match Program::new(&ast) {
        Ok(program) => compiled.program = Ok(Some(program)),
        Err(problem) => {
            compiled.program = Err(format!("program instantiation failed: {problem}"));
            return compiled;
        }
    }
    compiled.max_cost = ast.estimate(env).max;
    if !rule.message_expression.is_empty() {
        compiled.message = compile_message(rule, env, &mut compiled.message_max_cost).map(Some);
        if compiled.message.is_err() {
            return compiled;
        }
    }
    if !rule.field_path.is_empty()
        && let Ok(path) = valid_field_path(&rule.field_path, schema)
    {
        compiled.field_path = path;
    }
    compiled
}

fn compile_message(rule: &Rule, env: &Env, max_cost: &mut u64) -> Result<Program, String> {
    let ast = Ast::compile(env, &rule.message_expression)
        .map_err(|errors| format!("messageExpression compilation failed: {errors}"))?;
    if *ast.output_type() != Type::String {
        return Err("messageExpression must evaluate to a string".to_owned());
    }
    let program =
        Program::new(&ast).map_err(|problem| format!("messageExpression instantiation failed: {problem}"))?;
    *max_cost = ast.estimate(env).max;
    Ok(program)
}
