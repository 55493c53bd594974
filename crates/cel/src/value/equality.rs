//! Equality and order. Numbers compare across their types; values of different types are not equal, but data under a
//! schema refuses to be compared with what it cannot equal.

use std::cmp::Ordering;
use std::collections::HashSet;

use serde_json::Value as Json;

use super::list::{Identity, identity, keys_of, positions};
use super::map::property_schema;
use super::{Eval, List, ListKind, Map, Value};
use crate::error::EvalError;
use crate::meter::spend;

impl<'a> Value<'a> {
    pub(crate) fn equals(&self, other: &Value<'a>) -> Eval<bool> {
        Ok(match (self, other) {
            (Self::Null, Self::Null) => true,
            (Self::Null, _) | (_, Self::Null) => false,
            (Self::Bool(left), Self::Bool(right)) => left == right,
            (
                Self::Int(_) | Self::Uint(_) | Self::Double(_),
                Self::Int(_) | Self::Uint(_) | Self::Double(_),
            ) => compare_numbers(self, other) == Some(Ordering::Equal),
            (Self::String(left), Self::String(right)) => {
                spend(left.len().min(right.len()) / 256)?;
                **left == **right
            }
            (Self::Bytes(left), Self::Bytes(right)) => left == right,
            (Self::Duration(left), Self::Duration(right)) => left == right,
            (Self::Timestamp(left), Self::Timestamp(right)) => left.same_instant(right),
            (Self::List(left), Self::List(right)) => return lists(left, right),
            (Self::Map(left), Self::Map(right)) => return maps(left, right),
            (Self::Type(left), Self::Type(right)) => left == right,
            (Self::Optional(left), Self::Optional(right)) => match (left, right) {
                (Some(left), Some(right)) => return left.equals(right),
                (None, None) => true,
                _ => false,
            },
            (Self::Quantity(left), Self::Quantity(right)) => left.cmp(right) == Ordering::Equal,
            (Self::Url(left), Self::Url(right)) => left.text == right.text,
            (Self::Ip(left), Self::Ip(right)) => left == right,
            (Self::Cidr(left), Self::Cidr(right)) => left == right,
            (Self::Semver(left), Self::Semver(right)) => left.precedence(right) == Ordering::Equal,
            (Self::Format(left), Self::Format(right)) => left.name == right.name,
            (Self::Authorizer(left), Self::Authorizer(right)) => left.same(right),
            (Self::Preserved(left), right) => match raw(right) {
                Some(right) => return same_json(left, right),
                None => false,
            },
            (Self::List(list), _) if !list.is_built() => return Err(EvalError::no_such_overload()),
            (Self::Map(map), _) if !map.is_built() => return Err(EvalError::no_such_overload()),
            (
                Self::Quantity(_)
                | Self::Url(_)
                | Self::Ip(_)
                | Self::Cidr(_)
                | Self::Semver(_)
                | Self::Format(_),
                _,
            ) => {
                return Err(EvalError::no_such_overload());
            }
            _ => false,
        })
    }

    /// The order of two values, where they have one.
    pub(crate) fn order(&self, other: &Value<'a>) -> Eval<Ordering> {
        Ok(match (self, other) {
            (Self::Bool(left), Self::Bool(right)) => left.cmp(right),
            (
                Self::Int(_) | Self::Uint(_) | Self::Double(_),
                Self::Int(_) | Self::Uint(_) | Self::Double(_),
            ) => match compare_numbers(self, other) {
                Some(order) => order,
                None => return Err(EvalError::new("NaN values cannot be ordered")),
            },
            (Self::String(left), Self::String(right)) => (**left).cmp(&**right),
            (Self::Bytes(left), Self::Bytes(right)) => left.cmp(right),
            (Self::Duration(left), Self::Duration(right)) => left.cmp(right),
            (Self::Timestamp(left), Self::Timestamp(right)) => left.instant().cmp(&right.instant()),
            _ => return Err(EvalError::no_such_overload()),
        })
    }
}

/// Exact, also between large integers and doubles. `None` for NaN and for what is no number.
fn compare_numbers(left: &Value<'_>, right: &Value<'_>) -> Option<Ordering> {
    enum Number {
        Whole(i128),
        Double(f64),
    }
    let number = |value: &Value<'_>| match value {
        Value::Int(value) => Some(Number::Whole(i128::from(*value))),
        Value::Uint(value) => Some(Number::Whole(i128::from(*value))),
        Value::Double(value) => Some(Number::Double(*value)),
        _ => None,
    };
    let whole_to_double = |whole: i128, double: f64| {
        if double.is_nan() {
            return None;
        }
        if double.abs() >= 1e30 {
            return Some(if double > 0.0 {
                Ordering::Less
            } else {
                Ordering::Greater
            });
        }
        let floor = double.floor();
        Some(whole.cmp(&(floor as i128)).then(if double > floor {
            Ordering::Less
        } else {
            Ordering::Equal
        }))
    };
    match (number(left)?, number(right)?) {
        (Number::Whole(left), Number::Whole(right)) => Some(left.cmp(&right)),
        (Number::Double(left), Number::Double(right)) => left.partial_cmp(&right),
        (Number::Whole(left), Number::Double(right)) => whole_to_double(left, right),
        (Number::Double(left), Number::Whole(right)) => whole_to_double(right, left).map(Ordering::reverse),
    }
}

fn lists<'a>(left: &List<'a>, right: &List<'a>) -> Eval<bool> {
    if left.len() != right.len() {
        return Ok(false);
    }
    match left.kind() {
        ListKind::Set => {
            spend(left.len() * 16)?;
            // Every element of the other list is looked for; order does not matter.
            let known: HashSet<Identity> = left
                .iter()
                .map(|item| Ok(identity(&item?)))
                .collect::<Eval<_>>()?;
            for wanted in right.iter() {
                if !known.contains(&identity(&wanted?)) {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        ListKind::Map(keys) => {
            spend(left.len() * 16)?;
            let items: Vec<Value<'a>> = left.iter().collect::<Eval<_>>()?;
            let places = positions(&items, keys)?;
            for wanted in right.iter() {
                let wanted = wanted?;
                match places.get(&keys_of(&wanted, keys)?) {
                    Some(place) if items[*place].equals(&wanted)? => {}
                    _ => return Ok(false),
                }
            }
            Ok(true)
        }
        ListKind::Built | ListKind::Atomic => {
            for (left, right) in left.iter().zip(right.iter()) {
                spend(2)?;
                if !left?.equals(&right?)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
    }
}

fn maps<'a>(left: &Map<'a>, right: &Map<'a>) -> Eval<bool> {
    if left.len() != right.len() {
        return Ok(false);
    }
    let Some((object, schema)) = left.raw() else {
        for key in left.keys() {
            spend(8)?;
            match (left.find(&key)?, right.find(&key)?) {
                (Some(left), Some(right)) if left.equals(&right)? => {}
                _ => return Ok(false),
            }
        }
        return Ok(true);
    };
    for (name, value) in object {
        spend(8)?;
        if property_schema(schema, name).is_some() {
            match (left.property(name)?, right.property(name)?) {
                (Some(left), Some(right)) => {
                    if !left.equals(&right)? {
                        return Ok(false);
                    }
                }
                (None, None) => {}
                _ => return Ok(false),
            }
            continue;
        }
        // Fields that the schema does not know are compared as they are.
        let Some((other, _)) = right.raw() else {
            return Err(EvalError::no_such_overload());
        };
        if let Some(other) = other.get(name)
            && !same_json(value, other)?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

fn raw<'a>(value: &Value<'a>) -> Option<&'a Json> {
    match value {
        Value::Preserved(json) => Some(json),
        _ => None,
    }
}

/// Deep equality of data that no schema describes.
fn same_json(left: &Json, right: &Json) -> Eval<bool> {
    spend(2)?;
    match (left, right) {
        (Json::Array(left), Json::Array(right)) => {
            if left.len() != right.len() {
                return Ok(false);
            }
            for (left, right) in left.iter().zip(right) {
                if !same_json(left, right)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        (Json::Object(left), Json::Object(right)) => {
            if left.len() != right.len() {
                return Ok(false);
            }
            for (name, value) in left {
                match right.get(name) {
                    Some(other) if same_json(value, other)? => {}
                    _ => return Ok(false),
                }
            }
            Ok(true)
        }
        (Json::String(left), Json::String(right)) => {
            spend(left.len().min(right.len()) / 256)?;
            Ok(left == right)
        }
        _ => Ok(left == right),
    }
}
