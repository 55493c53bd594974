//! Quantities: `quantity('1Gi').isGreaterThan(quantity('500M'))`. Some of their functions are shared with versions.

use std::cmp::Ordering;

use skiff_meta::quantity::Quantity;

use super::Native;
use crate::error::EvalError;
use crate::value::{Eval, Value};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "quantity" => |_, args| match &args[0] {
            Value::String(text) => Quantity::parse(text).map(Value::Quantity).map_err(EvalError::new),
            _ => Err(EvalError::no_such_overload()),
        },
        "isQuantity" => |_, args| match &args[0] {
            Value::String(text) => Ok(Value::Bool(Quantity::parse(text).is_ok())),
            _ => Err(EvalError::no_such_overload()),
        },
        "sign" => |_, args| match &args[0] {
            Value::Quantity(quantity) => Ok(Value::Int(if quantity.is_zero() {
                0
            } else if quantity.is_negative() {
                -1
            } else {
                1
            })),
            _ => Err(EvalError::no_such_overload()),
        },
        "isInteger" => |_, args| match &args[0] {
            Value::Quantity(quantity) => Ok(Value::Bool(quantity.is_whole())),
            _ => Err(EvalError::no_such_overload()),
        },
        "asInteger" => |_, args| match &args[0] {
            Value::Quantity(quantity) if quantity.is_whole() => Ok(Value::Int(quantity.value())),
            Value::Quantity(_) => Err(EvalError::new("cannot convert value to integer")),
            _ => Err(EvalError::no_such_overload()),
        },
        "asApproximateFloat" => |_, args| match &args[0] {
            Value::Quantity(quantity) => Ok(Value::Double(approximate(quantity))),
            _ => Err(EvalError::no_such_overload()),
        },
        "add" => |_, args| combine(args, |left, right| left.plus(&right)),
        "sub" => |_, args| combine(args, |left, right| left.minus(&right)),
        "isGreaterThan" => |_, args| Ok(Value::Bool(compare(args)?.is_gt())),
        "isLessThan" => |_, args| Ok(Value::Bool(compare(args)?.is_lt())),
        "compareTo" => |_, args| Ok(Value::Int(compare(args)? as i64)),
        _ => return None,
    })
}

fn compare(args: &[Value<'_>]) -> Eval<Ordering> {
    match args {
        [Value::Quantity(left), Value::Quantity(right)] => Ok(left.cmp(right)),
        [Value::Semver(left), Value::Semver(right)] => Ok(left.precedence(right)),
        _ => Err(EvalError::no_such_overload()),
    }
}

fn combine<'a>(args: &[Value<'a>], apply: fn(Quantity, Quantity) -> Quantity) -> Eval<Value<'a>> {
    match args {
        [Value::Quantity(left), Value::Quantity(right)] => Ok(Value::Quantity(apply(*left, *right))),
        [Value::Quantity(left), Value::Int(right)] => {
            Ok(Value::Quantity(apply(*left, Quantity::from_units(*right))))
        }
        _ => Err(EvalError::no_such_overload()),
    }
}

/// The canonical text read as a double.
fn approximate(quantity: &Quantity) -> f64 {
    let text = quantity.to_string();
    let end = text
        .find(|c: char| !c.is_ascii_digit() && !matches!(c, '-' | '.'))
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let number: f64 = number.parse().unwrap_or(0.0);
    let power = |base: f64, suffixes: &str, c: char| {
        let position = suffixes.find(c).map_or(0, |position| position + 1);
        base.powi(position as i32)
    };
    let mut letters = suffix.chars();
    match (letters.next(), letters.next()) {
        (None, _) => number,
        (Some('n'), _) => number * 1e-9,
        (Some('u'), _) => number * 1e-6,
        (Some('m'), _) => number * 1e-3,
        (Some(c), Some('i')) => number * power(1024.0, "KMGTPE", c),
        (Some('e'), _) => number * 10f64.powi(suffix[1..].parse().unwrap_or(0)),
        (Some(c), _) => number * power(1000.0, "kMGTPE", c),
    }
}
