//! Values as text: `string()`, and how messages show keys and elements.

use std::fmt::Write as _;

use super::{Eval, Value};
use crate::error::EvalError;
use crate::time::format_seconds;

impl Value<'_> {
    /// `string(value)`.
    pub(crate) fn to_text(&self) -> Eval<String> {
        Ok(match self {
            Self::Bool(value) => value.to_string(),
            Self::Int(value) => value.to_string(),
            Self::Uint(value) => value.to_string(),
            Self::Double(value) => format_double(*value),
            Self::String(text) => text.to_string(),
            Self::Bytes(bytes) => String::from_utf8(bytes.to_vec())
                .map_err(|_| EvalError::new("invalid UTF-8 in bytes, cannot convert to string"))?,
            Self::Duration(nanos) => format_seconds(*nanos),
            Self::Timestamp(at) => at.to_string(),
            Self::Type(name) => (*name).to_owned(),
            Self::Ip(ip) => ip.to_string(),
            Self::Cidr(cidr) => cidr.to_string(),
            _ => return Err(EvalError::no_such_overload()),
        })
    }

    /// As messages show a value.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Null => "NULL_VALUE".to_owned(),
            Self::Bytes(bytes) => format!("{bytes:?}").replace(',', ""),
            Self::List(list) => {
                let mut text = "[".to_owned();
                for (position, item) in list.iter().take(100).enumerate() {
                    let separator = if position > 0 { ", " } else { "" };
                    let _ = write!(
                        text,
                        "{separator}{}",
                        item.map(|item| item.shown()).unwrap_or_default()
                    );
                }
                text.push(']');
                text
            }
            Self::Map(_) => "map".to_owned(),
            other => other.to_text().unwrap_or_else(|_| other.type_name().to_owned()),
        }
    }
}

/// Go's shortest `%g`: plain between 1e-4 and 1e6, otherwise with an exponent of two digits.
pub(crate) fn format_double(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned();
    }
    if value == 0.0 {
        return if value.is_sign_negative() { "-0" } else { "0" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..6).contains(&exponent) {
        return value.to_string();
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}
