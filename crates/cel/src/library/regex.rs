//! Regular expressions: `matches`, `find`, `findAll`. The syntax is RE2's.

use std::sync::Arc;

use skiff_meta::regexp::{self, Regex};

use super::Native;
use crate::error::EvalError;
use crate::meter::spend;
use crate::value::{Eval, Value};

/// A constant pattern that was read. It is compiled when first needed, and kept as long as there is room: a definition
/// may have thousands.
#[derive(Debug, Clone)]
pub(crate) struct Pattern(Arc<str>);

impl Pattern {
    pub fn new(pattern: &str) -> Result<Self, String> {
        regexp::check(pattern).map(|()| Self(pattern.into()))
    }
}

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "matches" => |compiled, args| match args {
            [Value::String(text), Value::String(pattern)] => {
                let regex = compile(compiled, pattern, |error| error)?;
                Ok(Value::Bool(regex.is_match(text)))
            }
            _ => Err(EvalError::no_such_overload()),
        },
        "find" => |compiled, args| match args {
            [Value::String(text), Value::String(pattern)] => {
                let regex = compile(compiled, pattern, illegal)?;
                Ok(Value::string(regex.find(text).unwrap_or("")))
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
                let found = regex.find_all(text).take(most);
                Ok(Value::list(found.map(Value::string).collect()))
            }
            _ => Err(EvalError::no_such_overload()),
        },
        _ => return None,
    })
}

fn illegal(error: String) -> String {
    format!("Illegal regex: {error}")
}

fn compile(constant: Option<&Pattern>, pattern: &str, message: fn(String) -> String) -> Eval<Arc<Regex>> {
    let told = |error| EvalError::new(message(error));
    match constant {
        Some(Pattern(constant)) => match regexp::kept(constant) {
            Some(regex) => Ok(regex),
            None => {
                spend(2_000 + constant.len() * 64)?;
                regexp::compiled(constant).map_err(told)
            }
        },
        None => {
            // About a millisecond for those that just fit.
            spend(10_000 + pattern.len() * 64)?;
            regexp::compile(pattern).map(Arc::new).map_err(told)
        }
    }
}
