//! Steps into values, and the words for those that fail.

use crate::error::EvalError;
use crate::plan::Call;
use crate::value::{Eval, Map, Value};

/// Adds a key and value, or the entries of a map; keys must be new.
pub(super) fn grow<'a>(mut map: Map<'a>, entry: &[Value<'a>]) -> Eval<Map<'a>> {
    let mut add = |key: &Value<'a>, value: Value<'a>| -> Eval<()> {
        if map.insert(key.clone(), value)? {
            return Ok(());
        }
        Err(EvalError::new(format!(
            "insert failed: key {} already exists",
            key.shown()
        )))
    };
    match entry {
        [key, value] => add(key, value.clone())?,
        [Value::Map(more)] => {
            for key in more.keys() {
                if let Some(value) = more.find(&key)? {
                    add(&key, value)?;
                }
            }
        }
        _ => return Err(EvalError::no_such_overload()),
    }
    Ok(map)
}

/// The index that a number is, if it is one.
fn list_index(index: &Value<'_>) -> Eval<Option<usize>> {
    let unsupported = || EvalError::new(format!("unsupported index value {} in list", index.shown()));
    Ok(match index {
        Value::Int(index) => usize::try_from(*index).ok(),
        Value::Uint(index) => usize::try_from(*index).ok(),
        Value::Double(double) if double.fract() == 0.0 && double.abs() < 9e15 => {
            usize::try_from(*double as i64).ok()
        }
        Value::Double(_) => return Err(unsupported()),
        other => {
            return Err(EvalError::new(format!(
                "unsupported index type '{}' in list",
                other.type_name()
            )));
        }
    })
}

/// The element, entry or field at an index; `None` where there is none.
pub(super) fn step_into<'a>(value: &Value<'a>, index: &Value<'a>) -> Eval<Option<Value<'a>>> {
    match value {
        Value::Map(map) => map.find(index),
        Value::List(list) => match list_index(index)? {
            Some(position) if position < list.len() => list.get(position).map(Some),
            _ => Ok(None),
        },
        _ => Ok(None),
    }
}

pub(super) fn missing(value: &Value<'_>, index: &Value<'_>) -> EvalError {
    EvalError::new(match value {
        Value::List(_) => format!("index out of bounds: {}", index.shown()),
        _ => format!("no such key: {}", index.shown()),
    })
}

/// Which call had no overload, where the reference implementation says so: it depends on how it dispatches.
pub(super) fn explained(error: EvalError, call: &Call, args: &[Value<'_>]) -> EvalError {
    if error != EvalError::no_such_overload() {
        return error;
    }
    let function = call.function;
    match function {
        "contains" | "startsWith" | "endsWith" | "matches" | "find" | "findAll" | "_==_" | "_!=_" | "@in"
        | "!_" => error,
        "containsIP" if matches!(args, [Value::Cidr(_), Value::String(_)]) => error,
        "flatten" => EvalError::new(format!("no such overload: {}.flatten()", args[0].type_name())),
        "size" | "sort" | "@sortByAssociatedKeys" => EvalError::new(format!("no such overload: {function}")),
        operator if operator.contains('_') => {
            let has_operator = match (operator, &args[0]) {
                // These are asked in another way, and then know nothing.
                (_, Value::String(_) | Value::Duration(_) | Value::Timestamp(_)) => true,
                (_, Value::Int(_) | Value::Uint(_) | Value::Double(_)) => {
                    operator != "_%_" || !matches!(args[0], Value::Double(_))
                }
                ("_+_", Value::Bytes(_) | Value::List(_)) => true,
                ("_<_" | "_<=_" | "_>_" | "_>=_", Value::Bytes(_) | Value::Bool(_)) => true,
                ("-_", Value::Bool(_)) => true,
                _ => false,
            };
            if has_operator {
                error
            } else {
                EvalError::new(format!("no such overload: {operator}"))
            }
        }
        _ => {
            let kinds: Vec<&str> = args.iter().map(Value::type_name).collect();
            EvalError::new(format!("no such overload: {function}({})", kinds.join(", ")))
        }
    }
}
