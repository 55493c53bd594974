//! Conversions between types: `int('3')`, `string(1.5)`, `timestamp('…')`.

use super::Native;
use crate::error::EvalError;
use crate::time::Timestamp;
use crate::value::{Eval, Value};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "bool" => |_, args| match &args[0] {
            Value::Bool(value) => Ok(Value::Bool(*value)),
            Value::String(text) => match &**text {
                "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(Value::Bool(true)),
                "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(Value::Bool(false)),
                _ => Err(unconvertible("bool")),
            },
            _ => Err(EvalError::no_such_overload()),
        },
        "bytes" => |_, args| match &args[0] {
            bytes @ Value::Bytes(_) => Ok(bytes.clone()),
            Value::String(text) => Ok(Value::Bytes(text.as_bytes().into())),
            _ => Err(EvalError::no_such_overload()),
        },
        "double" => |_, args| match &args[0] {
            Value::Double(value) => Ok(Value::Double(*value)),
            Value::Int(value) => Ok(Value::Double(*value as f64)),
            Value::Uint(value) => Ok(Value::Double(*value as f64)),
            Value::String(text) => parse_double(text).map(Value::Double),
            _ => Err(EvalError::no_such_overload()),
        },
        "duration" => |_, args| match &args[0] {
            Value::Duration(nanos) => Ok(Value::Duration(*nanos)),
            // COMPAT: the overload is declared, but nothing converts so.
            Value::Int(_) => Err(EvalError::new(
                "type conversion error from 'int' to 'google.protobuf.Duration'",
            )),
            Value::String(text) => skiff_meta::duration::parse(text)
                .map(Value::Duration)
                .map_err(|_| unconvertible("google.protobuf.Duration")),
            _ => Err(EvalError::no_such_overload()),
        },
        "dyn" => |_, args| Ok(args[0].clone()),
        "int" => |_, args| to_int(&args[0]).map(Value::Int),
        "uint" => |_, args| to_uint(&args[0]).map(Value::Uint),
        "string" => |_, args| match &args[0] {
            text @ Value::String(_) => Ok(text.clone()),
            Value::Type(_) => Err(EvalError::no_such_overload()),
            other => other.to_text().map(Value::string),
        },
        "timestamp" => |_, args| match &args[0] {
            Value::Timestamp(at) => Ok(Value::Timestamp(*at)),
            Value::Int(seconds) => Timestamp::from_seconds(*seconds).map(Value::Timestamp),
            Value::String(text) => Timestamp::parse(text)
                .map(Value::Timestamp)
                .map_err(|_| unconvertible("google.protobuf.Timestamp")),
            _ => Err(EvalError::no_such_overload()),
        },
        "type" => |_, args| Ok(Value::Type(args[0].type_name())),
        _ => return None,
    })
}

/// A text that does not say what it should.
fn unconvertible(to: &str) -> EvalError {
    EvalError::new(format!("type conversion error from 'string' to '{to}'"))
}

/// Go's numbers: no whitespace, `Inf` and `NaN` in any case.
fn parse_double(text: &str) -> Eval<f64> {
    let plausible = text
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.' | '_'));
    match text.parse::<f64>() {
        Ok(value) if plausible => {
            let named = text
                .trim_start_matches(['+', '-'])
                .starts_with(['i', 'I', 'n', 'N']);
            if value.is_infinite() && !named {
                return Err(unconvertible("double"));
            }
            Ok(value)
        }
        _ => Err(unconvertible("double")),
    }
}

fn to_int(value: &Value<'_>) -> Eval<i64> {
    let overflow = || EvalError::new("integer overflow");
    match value {
        Value::Int(value) => Ok(*value),
        Value::Uint(value) => i64::try_from(*value).map_err(|_| overflow()),
        Value::Double(value) => {
            if !value.is_finite()
                || *value <= -9_223_372_036_854_775_808.0
                || *value >= 9_223_372_036_854_775_808.0
            {
                return Err(overflow());
            }
            Ok(*value as i64)
        }
        Value::Duration(nanos) => Ok(*nanos),
        Value::Timestamp(at) => Ok(at.seconds()),
        Value::String(text) => text.parse::<i64>().map_err(|_| unconvertible("int")),
        _ => Err(EvalError::no_such_overload()),
    }
}

fn to_uint(value: &Value<'_>) -> Eval<u64> {
    let overflow = || EvalError::new("unsigned integer overflow");
    match value {
        Value::Uint(value) => Ok(*value),
        Value::Int(value) => u64::try_from(*value).map_err(|_| overflow()),
        Value::Double(value) => {
            if !value.is_finite() || *value < 0.0 || *value >= 18_446_744_073_709_551_616.0 {
                return Err(overflow());
            }
            Ok(*value as u64)
        }
        Value::String(text) => match text.parse::<u64>() {
            // Go's unsigned numbers have no sign.
            Ok(value) if !text.starts_with('+') => Ok(value),
            _ => Err(unconvertible("uint")),
        },
        _ => Err(EvalError::no_such_overload()),
    }
}
