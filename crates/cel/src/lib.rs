//! CEL as Kubernetes v1.36 speaks it: parser, type checker, cost estimates, evaluator and libraries, and the rules of
//! `x-kubernetes-validations` on top. It does no I/O and reads no clock; every evaluation is bounded.

pub mod admission;
mod ast;
mod checker;
#[cfg(test)]
mod conformance;
mod cost;
mod decl;
pub mod device;
mod env;
mod error;
pub mod escape;
mod eval;
mod functions;
mod lexer;
mod library;
pub mod limits;
mod macros;
mod meter;
mod parser;
mod plan;
mod program;
pub mod rules;
mod schema;
mod source;
mod time;
mod types;
mod unify;
mod validators;
mod value;

pub use cost::Range;
pub use decl::DeclType;
pub use env::Env;
pub use error::EvalError;
pub use eval::Activation;
pub use library::authorizer::{AccessReview, Authorizer, AuthorizerObject, Decision};
pub use program::{Ast, Evaluation, Limits, Program};
pub use schema::{AdditionalProperties, Rule, Schema};
pub use source::CompileErrors;
pub use types::Type;
pub use value::{List, Map, Str, Value};
