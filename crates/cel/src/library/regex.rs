//! Regular expressions: `matches`, `find`, `findAll`. The syntax is RE2's.

use std::sync::Arc;

use super::Native;
use crate::error::EvalError;
use crate::meter::spend;
use crate::value::{Eval, Value};

/// A compiled pattern.
#[derive(Debug, Clone)]
pub(crate) struct Pattern(Arc<regex::Regex>);

impl Pattern {
    pub fn compile(pattern: &str) -> Result<Self, String> {
        skiff_meta::regexp::compile(pattern).map(|regex| Self(Arc::new(regex)))
    }
}

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "matches" => |compiled, args| match args {
            [Value::String(text), Value::String(pattern)] => {
                let regex = compile(compiled, pattern, |error| error)?;
                Ok(Value::Bool(regex.0.is_match(text)))
            }
            _ => Err(EvalError::no_such_overload()),
        },
        "find" => |compiled, args| match args {
            [Value::String(text), Value::String(pattern)] => {
                let regex = compile(compiled, pattern, illegal)?;
                let found = regex.0.find(text).map_or("", |found| found.as_str());
                Ok(Value::string(found))
            }
            _ => Err(EvalError::no_such_overload()),
        },
        "findAll" => |compiled, args| match args {
            [Value::String(text), Value::String(pattern), rest @ ..] => {
                let most = match rest {
                    [] => usize::MAX,
                    [Value::Int(most)] => usize::try_from(*most).unwrap_or(usize::MAX),
                    _ => return Err(EvalError::no_such_overload()),
                };
                let regex = compile(compiled, pattern, illegal)?;
                let found = regex.0.find_iter(text).take(most);
                Ok(Value::list(
                    found.map(|found| Value::string(found.as_str())).collect(),
                ))
            }
            _ => Err(EvalError::no_such_overload()),
        },
        _ => return None,
    })
}

fn illegal(error: String) -> String {
    format!("Illegal regex: {error}")
}

fn compile(compiled: Option<&Pattern>, pattern: &str, message: fn(String) -> String) -> Eval<Pattern> {
    match compiled {
        Some(pattern) => Ok(pattern.clone()),
        None => {
            // About a millisecond for those that just fit.
            spend(10_000 + pattern.len() * 64)?;
            Pattern::compile(pattern).map_err(|error| EvalError::new(message(error)))
        }
    }
}
