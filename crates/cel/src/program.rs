//! Compiling and running expressions: text to `Ast`, `Ast` to `Program`, and a program to a value.

use crate::checker::{Checked, Reference, check};
use crate::cost::{Range, estimate};
use crate::decl::DeclType;
use crate::env::Env;
use crate::error::EvalError;
use crate::eval::{Activation, Evaluator};
use crate::limits::PER_CALL_LIMIT;
use crate::meter::Scope;
use crate::parser::parse;
use crate::plan::{Plan, plan};
use crate::source::{CompileErrors, Source};
use crate::types::Type;
use crate::validators::validate;
use crate::value::Value;

/// A checked expression.
#[derive(Debug)]
pub struct Ast {
    checked: Checked,
}

impl Ast {
    /// Parses and checks an expression.
    pub fn compile(env: &Env, text: &str) -> Result<Self, CompileErrors> {
        let source = Source::new(text);
        let parsed =
            parse(&source, env.bindings()).map_err(|mistakes| CompileErrors::new(&source, mistakes))?;
        let checked = check(parsed, env).map_err(|mistakes| CompileErrors::new(&source, mistakes))?;
        let mistakes = validate(&checked);
        if !mistakes.is_empty() {
            return Err(CompileErrors::new(&source, mistakes));
        }
        Ok(Self { checked })
    }

    /// The type of what the expression evaluates to.
    pub fn output_type(&self) -> &Type {
        self.checked.kind_of(&self.checked.root)
    }

    /// Whether the expression reads a variable.
    pub fn refers_to(&self, name: &str) -> bool {
        fn reads(checked: &Checked, expr: &crate::ast::Expr, name: &str) -> bool {
            if let crate::ast::Kind::Ident(read) = &expr.kind
                && &**read == name
                && matches!(checked.references[expr.id as usize], Reference::Variable)
            {
                return true;
            }
            let mut found = false;
            expr.children(&mut |child| found = found || reads(checked, child, name));
            found
        }
        reads(&self.checked, &self.checked.root, name)
    }

    /// What an evaluation can cost, with sizes from the environment's root type.
    pub fn estimate(&self, env: &Env) -> Range {
        estimate(&self.checked, env.root().map(|root| -> &DeclType { root }))
    }
}

/// An expression ready to run, any number of times.
#[derive(Debug)]
pub struct Program {
    node: crate::plan::Node,
    slots: usize,
    output: Type,
}

/// What came of an evaluation.
#[derive(Debug)]
pub struct Evaluation<'a> {
    pub result: Result<Value<'a>, EvalError>,
    pub cost: u64,
}

/// Bounds of one evaluation.
pub struct Limits<'v> {
    /// The cost at which the evaluation is stopped.
    pub cost: u64,
    /// Asked now and then whether to stop.
    pub interrupted: Option<&'v dyn Fn() -> bool>,
}

impl Default for Limits<'_> {
    fn default() -> Self {
        Self {
            cost: PER_CALL_LIMIT,
            interrupted: None,
        }
    }
}

impl Program {
    /// Makes an expression ready. Constants are computed here, which can fail.
    pub fn new(ast: &Ast) -> Result<Self, String> {
        let Plan { node, slots } = plan(&ast.checked)?;
        Ok(Self {
            node,
            slots,
            output: ast.output_type().clone(),
        })
    }

    /// Compiles an expression in one go.
    pub fn compile(env: &Env, text: &str) -> Result<Self, CompileErrors> {
        let ast = Ast::compile(env, text)?;
        Self::new(&ast).map_err(CompileErrors::plain)
    }

    pub fn output_type(&self) -> &Type {
        &self.output
    }

    /// Evaluates the expression. Values borrow from the program and from what the variables refer to.
    pub fn evaluate<'a>(&'a self, variables: &dyn Activation<'a>, limits: &Limits<'_>) -> Evaluation<'a> {
        let scope = Scope::new();
        let mut evaluator = Evaluator::new(variables, self.slots, limits.cost, limits.interrupted);
        let mut result = evaluator.eval(&self.node);
        if scope.is_exhausted() {
            result = Err(EvalError::CostLimit);
        }
        Evaluation {
            result,
            cost: evaluator.cost,
        }
    }
}
