//! The environment of admission: match conditions of webhooks, and the expressions of admission policies. Library code
//! only: who asks, and what follows from the answers, is the caller's business.

mod input;
mod match_conditions;
mod types;

pub use input::{Evaluated, Input, Inputs};
pub use match_conditions::{MatchCondition, MatchConditions, MatchResult};

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::decl::DeclType;
use crate::env::Env;
use crate::program::{Ast, Program};
use crate::types::Type;

const VARIABLES: &str = "variables";
const VARIABLES_TYPE: &str = "kubernetes.variables";

/// What the expressions of one policy or webhook are compiled against: the request, the objects, and the policy's own
/// variables, each of which may use those before it.
#[derive(Debug)]
pub struct Environment {
    base: Env,
    variables: BTreeMap<String, Variable>,
}

#[derive(Debug)]
struct Variable {
    program: Result<Program, String>,
}

/// An expression ready to be evaluated for requests.
#[derive(Debug)]
pub struct Expression {
    source: String,
    program: Program,
}

impl Expression {
    pub fn source(&self) -> &str {
        &self.source
    }

    pub fn output_type(&self) -> &Type {
        self.program.output_type()
    }
}

impl Environment {
    /// `object`, `oldObject`, `request` and `namespaceObject`, and where wanted `params` and `authorizer`.
    pub fn new(has_params: bool, has_authorizer: bool) -> Self {
        let mut base = Env::new()
            .variable("object", Type::Dyn)
            .variable("oldObject", Type::Dyn)
            .declared("request", &types::request())
            .declared("namespaceObject", &types::namespace());
        if has_params {
            base = base.variable("params", Type::Dyn);
        }
        if has_authorizer {
            base = base
                .variable("authorizer", types::authorizer("Authorizer"))
                .variable("authorizer.requestResource", types::authorizer("ResourceCheck"));
        }
        Self {
            base,
            variables: BTreeMap::new(),
        }
    }

    /// The environment of type checking: `object`, `oldObject` and `params` have the types given. What is not known
    /// may be anything; `params` is there only if a policy has some.
    pub fn typed(object: Option<&Arc<DeclType>>, params: Option<Option<&Arc<DeclType>>>) -> Self {
        let declared = |env: Env, name: &str, kind: Option<&Arc<DeclType>>| match kind {
            Some(kind) => env.declared(name, kind),
            None => env.variable(name, Type::Dyn),
        };
        let mut base = Env::new()
            .declared("request", &types::request())
            .declared("namespaceObject", &types::namespace());
        base = declared(base, "object", object);
        base = declared(base, "oldObject", object);
        if let Some(params) = params {
            base = declared(base, "params", params);
        }
        // COMPAT: `authorizer.requestResource` is not known here.
        base = base.variable("authorizer", types::authorizer("Authorizer"));
        Self {
            base,
            variables: BTreeMap::new(),
        }
    }

    /// Whether an expression's types fit, whatever it evaluates to; if not, all that is wrong.
    pub fn check(&self, expression: &str) -> Result<(), String> {
        match Ast::compile(&self.base, expression) {
            Ok(_) => Ok(()),
            Err(errors) => Err(errors.to_string()),
        }
    }

    /// Allows the types that mutations are made of.
    #[must_use]
    pub fn with_patch_types(mut self) -> Self {
        self.base = self.base.patch_types();
        self
    }

    /// Allows `variables`, even before any is added.
    #[must_use]
    pub fn with_variables(mut self) -> Self {
        self.base = self
            .base
            .declared(VARIABLES, &Arc::new(types::object(VARIABLES_TYPE, &[])));
        self
    }

    /// Adds a variable that later expressions can read as `variables.name`. One that does not compile is kept: reading
    /// it fails.
    pub fn add_variable(&mut self, name: &str, expression: &str) -> Result<(), String> {
        let compiled = self.compile_any(expression);
        let kind = match &compiled {
            Ok((ast, _)) => ast.output_type().clone(),
            Err(_) => Type::Dyn,
        };
        let mut fields: Vec<(&str, DeclType)> = Vec::new();
        let known: Vec<(String, Type)> = self
            .variables
            .keys()
            .filter_map(|known| {
                let kind = self.base.find(&format!("{VARIABLES}.{known}"))?;
                Some((known.clone(), kind.clone()))
            })
            .chain([(name.to_owned(), kind.clone())])
            .collect();
        for (name, kind) in &known {
            fields.push((name, DeclType::simple(kind.clone(), 1, 0)));
        }
        // Variables are read by their whole name, so that each is computed only when it is needed; the object type
        // is there for messages about those that do not exist.
        self.base = std::mem::take(&mut self.base)
            .declared(VARIABLES, &Arc::new(types::object(VARIABLES_TYPE, &fields)))
            .variable(&format!("{VARIABLES}.{name}"), kind);
        let (program, outcome) = match compiled {
            Ok((_, program)) => (Ok(program), Ok(())),
            Err(problem) => (Err(problem.clone()), Err(problem)),
        };
        self.variables.insert(name.to_owned(), Variable { program });
        outcome
    }

    fn compile_any(&self, expression: &str) -> Result<(Ast, Program), String> {
        let ast =
            Ast::compile(&self.base, expression).map_err(|errors| format!("compilation failed: {errors}"))?;
        let program =
            Program::new(&ast).map_err(|problem| format!("program instantiation failed: {problem}"))?;
        Ok((ast, program))
    }

    /// Compiles an expression that must evaluate to one of the types given; any type if none is.
    pub fn compile(&self, expression: &str, wanted: &[Type]) -> Result<Expression, String> {
        let ast =
            Ast::compile(&self.base, expression).map_err(|errors| format!("compilation failed: {errors}"))?;
        let found = ast.output_type();
        if !wanted.is_empty() && !wanted.contains(found) {
            let names: Vec<String> = wanted.iter().map(Type::declared_name).collect();
            let got = found.declared_name();
            return Err(match &names[..] {
                [only] => format!("must evaluate to {only} but got {got}"),
                several => format!("must evaluate to one of [{}] but got {got}", several.join(" ")),
            });
        }
        let program =
            Program::new(&ast).map_err(|problem| format!("program instantiation failed: {problem}"))?;
        Ok(Expression {
            source: expression.to_owned(),
            program,
        })
    }
}
