//! What the workloads share: numbers or percentages of a rolling update, selectors, counters in a status.

use serde_json::Value;
use skiff_meta::names;

use crate::errors::Errors;
use crate::node::{Node, at};
use crate::object_meta::{label_selector, selector_is_empty};

/// Digits and a percent sign.
fn percent(text: &str) -> Option<i64> {
    let digits = text.strip_suffix('%')?;
    (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
        .then(|| digits.parse().unwrap_or(i64::MAX))
}

/// The number, whether it is a count or a percentage.
pub fn amount(value: &Value) -> i64 {
    value
        .as_i64()
        .or_else(|| {
            let text = value.as_str()?;
            percent(text).or_else(|| text.parse().ok())
        })
        .unwrap_or(0)
}

/// A count or a percentage, not negative.
pub fn int_or_percent(at: &Node, errors: &mut Errors) {
    match at.value {
        Value::String(text) if percent(text).is_none() => {
            let rule = "a valid percent string must be a numeric string followed by an ending '%'";
            errors.invalid(at, names::regex_error(rule, "[0-9]+%", &["1%", "93%"]));
        }
        _ => errors.non_negative(at),
    }
}

pub fn at_most_100_percent(at: &Node, errors: &mut Errors) {
    if at.value.as_str().and_then(percent).is_some_and(|p| p > 100) {
        errors.invalid(at, "must not be greater than 100%");
    }
}

/// A selector that must be there and must choose something. `kind` is the word in the message.
pub fn required_selector(selector: &Node, kind: &str, errors: &mut Errors) {
    if !selector.is_set() {
        return errors.required(selector, "");
    }
    label_selector(selector, errors);
    if selector_is_empty(selector.value) {
        errors.invalid(selector, format!("empty selector is invalid for {kind}"));
    }
}

pub fn not_decremented(status: &Node, old: &Value, name: &'static str, errors: &mut Errors) {
    let at = status.field(name);
    let Some(then) = self::at(old, &format!("status.{name}")).as_i64() else {
        return;
    };
    if at.int().is_none_or(|now| now < then) {
        errors.invalid_value(&at, at.int().unwrap_or(0), "cannot be decremented");
    }
}

/// Each of these counters is at most the other.
pub fn at_most(
    status: &Node,
    fields: &[&'static str],
    limit: &'static str,
    words: &str,
    errors: &mut Errors,
) {
    let count = |name| status.field(name).int().unwrap_or(0);
    for name in fields {
        if count(name) > count(limit) {
            let detail = format!("cannot be greater than {words}");
            errors.invalid_value(&status.field(name), count(name), detail);
        }
    }
}
