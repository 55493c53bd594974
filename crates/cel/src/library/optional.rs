//! Optional values. `or` and `orValue` are part of the evaluator, because they need not evaluate both sides.

use super::Native;
use crate::error::EvalError;
use crate::meter::spend;
use crate::value::{Eval, List, Value};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "optional.of" => |_, args| Ok(Value::some(args[0].clone())),
        "optional.ofNonZeroValue" => |_, args| {
            Ok(if args[0].is_zero() {
                Value::Optional(None)
            } else {
                Value::some(args[0].clone())
            })
        },
        "optional.none" => |_, _| Ok(Value::Optional(None)),
        "hasValue" => |_, args| match args {
            [Value::Optional(value)] => Ok(Value::Bool(value.is_some())),
            _ => Err(EvalError::no_such_overload()),
        },
        "value" => |_, args| match args {
            [Value::Optional(Some(value))] => Ok((**value).clone()),
            [Value::Optional(None)] => Err(EvalError::new("optional.none() dereference")),
            _ => Err(EvalError::no_such_overload()),
        },
        "optional.unwrap" | "unwrapOpt" => |_, args| match args {
            [Value::List(list)] => {
                spend(list.len() * 2)?;
                let mut present = Vec::new();
                for item in list.iter() {
                    match item? {
                        Value::Optional(Some(value)) => present.push((*value).clone()),
                        Value::Optional(None) => {}
                        other => {
                            return Err(EvalError::new(format!("value {} is not optional", other.shown())));
                        }
                    }
                }
                Ok(Value::list(present))
            }
            _ => Err(EvalError::no_such_overload()),
        },
        "first" => |_, args| end_of(args, |_| 0),
        "last" => |_, args| end_of(args, |list| list.len() - 1),
        _ => return None,
    })
}

fn end_of<'a>(args: &[Value<'a>], index: fn(&List<'a>) -> usize) -> Eval<Value<'a>> {
    match args {
        [Value::List(list)] if list.is_empty() => Ok(Value::Optional(None)),
        [Value::List(list)] => list.get(index(list)).map(Value::some),
        _ => Err(EvalError::no_such_overload()),
    }
}
