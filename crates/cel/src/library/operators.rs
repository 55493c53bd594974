//! Arithmetic, comparison, membership and size. Integers never wrap.

use std::cmp::Ordering;

use super::Native;
use crate::error::EvalError;
use crate::limits::MAX_BUILT_SIZE;
use crate::value::{Eval, Value};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "_+_" => |_, args| binary(args, add),
        "_-_" => |_, args| binary(args, subtract),
        "_*_" => |_, args| binary(args, multiply),
        "_/_" => |_, args| binary(args, divide),
        "_%_" => |_, args| binary(args, modulo),
        "-_" => |_, args| match args {
            [Value::Int(value)] => value.checked_neg().map(Value::Int).ok_or_else(int_overflow),
            [Value::Double(value)] => Ok(Value::Double(-value)),
            _ => Err(EvalError::no_such_overload()),
        },
        "!_" => |_, args| match args {
            [Value::Bool(value)] => Ok(Value::Bool(!value)),
            _ => Err(EvalError::no_such_overload()),
        },
        "_==_" => |_, args| binary(args, |left, right| left.equals(right).map(Value::Bool)),
        // What cannot be compared is not equal.
        "_!=_" => |_, args| {
            binary(args, |left, right| {
                Ok(Value::Bool(!left.equals(right).unwrap_or(false)))
            })
        },
        "_<_" => |_, args| ordered(args, Ordering::is_lt),
        "_<=_" => |_, args| ordered(args, Ordering::is_le),
        "_>_" => |_, args| ordered(args, Ordering::is_gt),
        "_>=_" => |_, args| ordered(args, Ordering::is_ge),
        "@in" => |_, args| match args {
            [wanted, Value::List(list)] => list.contains(wanted).map(Value::Bool),
            [wanted, Value::Map(map)] => Ok(Value::Bool(map.find(wanted)?.is_some())),
            _ => Err(EvalError::no_such_overload()),
        },
        "size" => |_, args| match args {
            [value @ (Value::String(_) | Value::Bytes(_) | Value::List(_) | Value::Map(_))] => {
                Ok(Value::Int(value.size() as i64))
            }
            [Value::Ip(_) | Value::Cidr(_)] => Ok(Value::Int(args[0].size() as i64)),
            _ => Err(EvalError::no_such_overload()),
        },
        "cel.@mapInsert" => |_, args| {
            let mut grown = match &args[0] {
                Value::Map(map) => map.to_built()?,
                _ => return Err(EvalError::no_such_overload()),
            };
            let add = |key: &Value<'_>, fresh: bool| match fresh {
                true => Ok(()),
                false => Err(EvalError::new(format!(
                    "insert failed: key {} already exists",
                    key.shown()
                ))),
            };
            match args {
                [_, key, value] => {
                    let fresh = grown.insert(key.clone(), value.clone())?;
                    add(key, fresh)?;
                }
                [_, Value::Map(more)] => {
                    for key in more.keys() {
                        if let Some(value) = more.find(&key)? {
                            let fresh = grown.insert(key.clone(), value)?;
                            add(&key, fresh)?;
                        }
                    }
                }
                _ => return Err(EvalError::no_such_overload()),
            }
            Ok(Value::Map(grown))
        },
        _ => return None,
    })
}

fn binary<'a>(
    args: &[Value<'a>],
    apply: impl FnOnce(&Value<'a>, &Value<'a>) -> Eval<Value<'a>>,
) -> Eval<Value<'a>> {
    match args {
        [left, right] => apply(left, right),
        _ => Err(EvalError::no_such_overload()),
    }
}

fn ordered<'a>(args: &[Value<'a>], accept: fn(Ordering) -> bool) -> Eval<Value<'a>> {
    binary(args, |left, right| Ok(Value::Bool(accept(left.order(right)?))))
}

fn int_overflow() -> EvalError {
    EvalError::new("integer overflow")
}

fn uint_overflow() -> EvalError {
    EvalError::new("unsigned integer overflow")
}

fn duration_overflow() -> EvalError {
    EvalError::new("integer overflow")
}

pub(super) fn add<'a>(left: &Value<'a>, right: &Value<'a>) -> Eval<Value<'a>> {
    match (left, right) {
        (Value::Int(left), Value::Int(right)) => {
            left.checked_add(*right).map(Value::Int).ok_or_else(int_overflow)
        }
        (Value::Uint(left), Value::Uint(right)) => left
            .checked_add(*right)
            .map(Value::Uint)
            .ok_or_else(uint_overflow),
        (Value::Double(left), Value::Double(right)) => Ok(Value::Double(left + right)),
        (Value::String(left), Value::String(right)) => {
            if left.len() + right.len() > MAX_BUILT_SIZE {
                return Err(EvalError::new("string is too large"));
            }
            let mut text = String::with_capacity(left.len() + right.len());
            text.push_str(left);
            text.push_str(right);
            Ok(Value::string(text))
        }
        (Value::Bytes(left), Value::Bytes(right)) => {
            if left.len() + right.len() > MAX_BUILT_SIZE {
                return Err(EvalError::new("bytes are too large"));
            }
            Ok(Value::Bytes([&left[..], &right[..]].concat().into()))
        }
        (Value::List(left), Value::List(right)) => left.joined(right).map(Value::List),
        (Value::Duration(left), Value::Duration(right)) => left
            .checked_add(*right)
            .map(Value::Duration)
            .ok_or_else(duration_overflow),
        (Value::Timestamp(at), Value::Duration(nanos)) | (Value::Duration(nanos), Value::Timestamp(at)) => {
            at.plus(*nanos).map(Value::Timestamp)
        }
        _ => Err(EvalError::no_such_overload()),
    }
}

fn subtract<'a>(left: &Value<'a>, right: &Value<'a>) -> Eval<Value<'a>> {
    match (left, right) {
        (Value::Int(left), Value::Int(right)) => {
            left.checked_sub(*right).map(Value::Int).ok_or_else(int_overflow)
        }
        (Value::Uint(left), Value::Uint(right)) => left
            .checked_sub(*right)
            .map(Value::Uint)
            .ok_or_else(uint_overflow),
        (Value::Double(left), Value::Double(right)) => Ok(Value::Double(left - right)),
        (Value::Duration(left), Value::Duration(right)) => left
            .checked_sub(*right)
            .map(Value::Duration)
            .ok_or_else(duration_overflow),
        (Value::Timestamp(at), Value::Duration(nanos)) => {
            let nanos = nanos.checked_neg().ok_or_else(duration_overflow)?;
            at.plus(nanos).map(Value::Timestamp)
        }
        (Value::Timestamp(left), Value::Timestamp(right)) => left.since(right).map(Value::Duration),
        _ => Err(EvalError::no_such_overload()),
    }
}

fn multiply<'a>(left: &Value<'a>, right: &Value<'a>) -> Eval<Value<'a>> {
    match (left, right) {
        (Value::Int(left), Value::Int(right)) => {
            left.checked_mul(*right).map(Value::Int).ok_or_else(int_overflow)
        }
        (Value::Uint(left), Value::Uint(right)) => left
            .checked_mul(*right)
            .map(Value::Uint)
            .ok_or_else(uint_overflow),
        (Value::Double(left), Value::Double(right)) => Ok(Value::Double(left * right)),
        _ => Err(EvalError::no_such_overload()),
    }
}

fn divide<'a>(left: &Value<'a>, right: &Value<'a>) -> Eval<Value<'a>> {
    match (left, right) {
        (Value::Int(_), Value::Int(0)) | (Value::Uint(_), Value::Uint(0)) => {
            Err(EvalError::new("division by zero"))
        }
        (Value::Int(left), Value::Int(right)) => {
            left.checked_div(*right).map(Value::Int).ok_or_else(int_overflow)
        }
        (Value::Uint(left), Value::Uint(right)) => Ok(Value::Uint(left / right)),
        (Value::Double(left), Value::Double(right)) => Ok(Value::Double(left / right)),
        _ => Err(EvalError::no_such_overload()),
    }
}

fn modulo<'a>(left: &Value<'a>, right: &Value<'a>) -> Eval<Value<'a>> {
    match (left, right) {
        (Value::Int(_), Value::Int(0)) | (Value::Uint(_), Value::Uint(0)) => {
            Err(EvalError::new("modulus by zero"))
        }
        (Value::Int(left), Value::Int(right)) => {
            left.checked_rem(*right).map(Value::Int).ok_or_else(int_overflow)
        }
        (Value::Uint(left), Value::Uint(right)) => Ok(Value::Uint(left % right)),
        _ => Err(EvalError::no_such_overload()),
    }
}
