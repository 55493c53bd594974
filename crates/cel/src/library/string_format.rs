//! `'%s has %d'.format([…])`.

use std::fmt::Write as _;

use skiff_meta::field::quote;

use crate::error::EvalError;
use crate::limits::MAX_BUILT_SIZE;
use crate::meter::spend;
use crate::value::{Eval, List, Value};

/// What a clause of a format string asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clause {
    String,
    Decimal,
    Fixed(usize),
    Scientific,
    Binary,
    Hex { upper: bool },
    Octal,
}

/// One part of a format string: text, or a clause for the next argument.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FormatSegment<'f> {
    Text(&'f str),
    Clause(Clause),
}

const DEFAULT_PRECISION: usize = 6;
/// More digits than a double has are zeros.
const MAX_PRECISION: usize = 1_000;

/// Reads the next part and returns the rest.
pub(crate) fn next_part(format: &str) -> Result<(FormatSegment<'_>, &str), String> {
    let Some(rest) = format.strip_prefix('%') else {
        let end = format.find('%').unwrap_or(format.len());
        let (text, rest) = format.split_at(end);
        return Ok((FormatSegment::Text(text), rest));
    };
    if let Some(rest) = rest.strip_prefix('%') {
        return Ok((FormatSegment::Text("%"), rest));
    }
    let (clause, rest) = parse_clause(rest).map_err(|problem| match problem.as_str() {
        "unexpected end of string" => problem,
        _ => format!("could not parse formatting clause: {problem}"),
    })?;
    Ok((FormatSegment::Clause(clause), rest))
}

fn parse_clause(text: &str) -> Result<(Clause, &str), String> {
    if text.is_empty() {
        return Err("unexpected end of string".to_owned());
    }
    let (precision, rest) = match text.strip_prefix('.') {
        None => (DEFAULT_PRECISION, text),
        Some(digits) => {
            let Some(end) = digits.find(|c: char| !c.is_ascii_digit()) else {
                return Err(
                    "error while parsing precision: could not find end of precision specifier".to_owned(),
                );
            };
            let number = &digits[..end];
            let precision = number.parse::<usize>().map_err(|_| {
                format!(
                    "error while parsing precision: error while converting precision to integer: strconv.Atoi: \
                     parsing {}: invalid syntax",
                    quote(number)
                )
            })?;
            (precision.min(MAX_PRECISION), &digits[end..])
        }
    };
    let c = rest.chars().next().unwrap_or('%');
    let clause = match c {
        's' => Clause::String,
        'd' => Clause::Decimal,
        'f' => Clause::Fixed(precision),
        'e' => Clause::Scientific,
        'b' => Clause::Binary,
        'x' => Clause::Hex { upper: false },
        'X' => Clause::Hex { upper: true },
        'o' => Clause::Octal,
        other => return Err(format!("unrecognized formatting clause \"{other}\"")),
    };
    Ok((clause, &rest[1..]))
}

impl Clause {
    /// The complaint about an argument of the wrong type.
    pub(crate) fn refuse(self, kind: &str) -> String {
        let rule = match self {
            Self::String => {
                "string clause can only be used on strings, bools, bytes, ints, doubles, maps, lists, types, \
                 durations, and timestamps"
            }
            Self::Decimal => "decimal clause can only be used on integers",
            Self::Fixed(_) => "fixed-point clause can only be used on doubles",
            Self::Scientific => "scientific clause can only be used on doubles",
            Self::Binary => "only integers and bools can be formatted as binary",
            Self::Hex { .. } => "only integers, byte buffers, and strings can be formatted as hex",
            Self::Octal => "octal clause can only be used on integers",
        };
        format!("{rule}, was given {kind}")
    }
}

pub(super) fn format(format: &str, args: &List<'_>) -> Eval<String> {
    let mut built = String::with_capacity(format.len());
    let mut rest = format;
    let mut next = 0;
    while !rest.is_empty() {
        if rest.starts_with('%') && !rest.starts_with("%%") && next >= args.len() {
            return Err(EvalError::new(format!("index {next} out of range")));
        }
        let (part, tail) = next_part(rest).map_err(EvalError::new)?;
        rest = tail;
        match part {
            FormatSegment::Text(text) => built.push_str(text),
            FormatSegment::Clause(clause) => {
                let value = args.get(next)?;
                next += 1;
                let text = apply(clause, &value)
                    .map_err(|problem| EvalError::new(format!("error during formatting: {problem}")))?;
                built.push_str(&text);
            }
        }
        if built.len() > MAX_BUILT_SIZE {
            return Err(EvalError::new("string is too large"));
        }
    }
    spend(built.len() / 4)?;
    Ok(built)
}

fn apply(clause: Clause, value: &Value<'_>) -> Result<String, String> {
    let refuse = || Err(clause.refuse(value.type_name()));
    match (clause, value) {
        (Clause::String, value) => string(value).map_or_else(refuse, Ok),
        (Clause::Decimal, Value::Int(number)) => Ok(number.to_string()),
        (Clause::Decimal, Value::Uint(number)) => Ok(number.to_string()),
        (Clause::Fixed(precision), value) => match as_double(value) {
            Some(number) if number.is_finite() => Ok(grouped(&format!("{number:.precision$}"))),
            Some(number) => Ok(special(number)),
            None => refuse(),
        },
        (Clause::Scientific, value) => match as_double(value) {
            Some(number) if number.is_finite() => Ok(scientific(number)),
            Some(number) => Ok(special(number)),
            None => refuse(),
        },
        (Clause::Binary, Value::Int(number)) => Ok(signed(*number, |n| format!("{n:b}"))),
        (Clause::Binary, Value::Uint(number)) => Ok(format!("{number:b}")),
        (Clause::Binary, Value::Bool(value)) => Ok(if *value { "1" } else { "0" }.to_owned()),
        (Clause::Hex { upper }, value) => {
            let hex = match value {
                Value::Int(number) => signed(*number, |n| format!("{n:x}")),
                Value::Uint(number) => format!("{number:x}"),
                Value::String(text) => hex_bytes(text.as_bytes()),
                Value::Bytes(bytes) => hex_bytes(bytes),
                _ => return refuse(),
            };
            Ok(if upper { hex.to_uppercase() } else { hex })
        }
        (Clause::Octal, Value::Int(number)) => Ok(signed(*number, |n| format!("{n:o}"))),
        (Clause::Octal, Value::Uint(number)) => Ok(format!("{number:o}")),
        _ => refuse(),
    }
}

fn signed(number: i64, write: fn(u64) -> String) -> String {
    let magnitude = write(number.unsigned_abs());
    if number < 0 {
        format!("-{magnitude}")
    } else {
        magnitude
    }
}

fn hex_bytes(bytes: &[u8]) -> String {
    let mut hex = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        let _ = write!(hex, "{byte:02x}");
    }
    hex
}

fn as_double(value: &Value<'_>) -> Option<f64> {
    match value {
        Value::Double(number) => Some(*number),
        Value::String(text) => match &**text {
            "NaN" => Some(f64::NAN),
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            _ => None,
        },
        _ => None,
    }
}

fn special(number: f64) -> String {
    if number.is_nan() {
        "NaN"
    } else if number > 0.0 {
        "\u{221e}"
    } else {
        "-\u{221e}"
    }
    .to_owned()
}

/// COMPAT: this version of the library formats for the locale en_US, with a comma every three digits.
fn grouped(text: &str) -> String {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let mut grouped = sign.to_owned();
    for (position, digit) in whole.chars().enumerate() {
        if position > 0 && (whole.len() - position) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    if !fraction.is_empty() {
        grouped.push('.');
        grouped.push_str(fraction);
    }
    grouped
}

/// COMPAT: the locale writes exponents as superscripts, and a precision is taken for a width.
fn scientific(number: f64) -> String {
    let text = format!("{number:.DEFAULT_PRECISION$e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let digits: String = format!("{:02}", exponent.abs())
        .chars()
        .map(|digit| match digit {
            '1' => '\u{b9}',
            '2' => '\u{b2}',
            '3' => '\u{b3}',
            other => char::from_u32(0x2070 + other as u32 - '0' as u32).unwrap_or(other),
        })
        .collect();
    let sign = if exponent < 0 { "\u{207b}" } else { "" };
    format!("{mantissa}\u{d7}10{sign}{digits}")
}

/// The text of `%s`, or `None` for what has none.
fn string(value: &Value<'_>) -> Option<String> {
    match value {
        Value::Null => Some("null".to_owned()),
        Value::List(list) => {
            let items: Option<Vec<String>> = list.iter().map(|item| member(&item.ok()?)).collect();
            Some(format!("[{}]", items?.join(", ")))
        }
        Value::Map(map) => {
            let mut pairs = Vec::with_capacity(map.len());
            for key in map.keys() {
                if !matches!(
                    key,
                    Value::String(_) | Value::Bool(_) | Value::Int(_) | Value::Uint(_)
                ) {
                    return None;
                }
                let value = map.find(&key).ok().flatten()?;
                pairs.push((member(&key)?, member(&value)?));
            }
            pairs.sort();
            let pairs: Vec<String> = pairs
                .iter()
                .map(|(key, value)| format!("{key}:{value}"))
                .collect();
            Some(format!("{{{}}}", pairs.join(", ")))
        }
        Value::Int(_)
        | Value::Uint(_)
        | Value::Double(_)
        | Value::Bool(_)
        | Value::String(_)
        | Value::Timestamp(_)
        | Value::Bytes(_)
        | Value::Duration(_)
        | Value::Type(_) => value.to_text().ok(),
        _ => None,
    }
}

/// A value inside a list or map.
fn member(value: &Value<'_>) -> Option<String> {
    Some(match value {
        Value::String(text) => quote(text),
        Value::Bytes(_) => format!("b{}", quote(&string(value)?)),
        Value::Timestamp(at) => format!("timestamp({})", quote(&at.to_string())),
        Value::Duration(_) => format!("duration({})", quote(&string(value)?)),
        Value::Double(number) if number.is_finite() => format!("{number:.6}"),
        Value::Double(number) => quote(if number.is_nan() {
            "NaN"
        } else if *number > 0.0 {
            "+Inf"
        } else {
            "-Inf"
        }),
        other => string(other)?,
    })
}
