//! `x-kubernetes-validations`: the rules of a structural schema, compiled once and evaluated for every write.
//!
//! `check_rules` is for whoever accepts a CustomResourceDefinition; `Validator` is for whoever accepts its objects.

mod check;
mod compile;
mod correlate;
mod field_path;
mod validate;

use skiff_meta::field::Error;

pub use check::check_rules;
pub use validate::Validator;

use crate::limits::RUNTIME_COST_BUDGET;

/// The cost that is left for the rules of one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Negative once it was exceeded.
    pub remaining: i64,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            remaining: RUNTIME_COST_BUDGET,
        }
    }
}

/// What the rules say of an object.
#[derive(Debug, Default, PartialEq)]
pub struct Outcome {
    pub errors: Vec<Error>,
    /// Findings that were there before and are let through: the value did not change. For `Warning` headers.
    pub warnings: Vec<String>,
}
