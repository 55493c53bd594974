//! CEL as Kubernetes v1.36 speaks it: parser, type checker, cost estimates, evaluator and libraries, and the rules of
//! `x-kubernetes-validations` on top. It does no I/O and reads no clock; every evaluation is bounded.

// Parts are landed before what uses them.
#![allow(dead_code)]

mod ast;
mod checker;
mod decl;
mod env;
pub mod escape;
mod functions;
mod lexer;
pub mod limits;
mod macros;
mod parser;
pub mod rules;
mod schema;
mod source;
mod types;
mod unify;

pub use decl::DeclType;
pub use env::Env;
pub use schema::{AdditionalProperties, Rule, Schema};
pub use source::CompileErrors;
pub use types::Type;
