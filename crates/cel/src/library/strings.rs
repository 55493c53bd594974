//! Functions of strings. Positions count code points.

use super::Native;
use super::string_format::format;
use crate::error::EvalError;
use crate::limits::MAX_BUILT_SIZE;
use crate::meter::spend;
use crate::value::{Eval, List, Value};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "contains" => |_, args| two(args, |text, part| text.contains(part)),
        "startsWith" => |_, args| two(args, |text, part| text.starts_with(part)),
        "endsWith" => |_, args| two(args, |text, part| text.ends_with(part)),
        "jsonpatch.escapeKey" => |_, args| match args {
            [Value::String(text)] => Ok(Value::string(text.replace('~', "~0").replace('/', "~1"))),
            _ => Err(EvalError::no_such_overload()),
        },
        "charAt" => |_, args| match args {
            [Value::String(text), Value::Int(index)] => char_at(text, *index).map(Value::string),
            _ => Err(EvalError::no_such_overload()),
        },
        "indexOf" => |_, args| match args {
            [Value::List(list), wanted] => position(list, wanted, false),
            [Value::String(text), Value::String(part)] => index_of(text, part, 0),
            [Value::String(text), Value::String(part), Value::Int(from)] => index_of(text, part, *from),
            _ => Err(EvalError::no_such_overload()),
        },
        "lastIndexOf" => |_, args| match args {
            [Value::List(list), wanted] => position(list, wanted, true),
            [Value::String(text), Value::String(part)] => {
                let length = text.chars().count() as i64;
                if part.is_empty() {
                    return Ok(Value::Int(length));
                }
                if text.len() < part.len() {
                    return Ok(Value::Int(-1));
                }
                last_index_of(text, part, length - 1)
            }
            [Value::String(text), Value::String(part), Value::Int(from)] => last_index_of(text, part, *from),
            _ => Err(EvalError::no_such_overload()),
        },
        "lowerAscii" => |_, args| one(args, |text| text.to_ascii_lowercase()),
        "upperAscii" => |_, args| one(args, |text| text.to_ascii_uppercase()),
        "trim" => |_, args| one(args, |text| text.trim_matches(is_space).to_owned()),
        "strings.quote" => |_, args| one(args, quoted),
        "replace" => |_, args| match args {
            [Value::String(text), Value::String(from), Value::String(to)] => replace(text, from, to, -1),
            [
                Value::String(text),
                Value::String(from),
                Value::String(to),
                Value::Int(limit),
            ] => replace(text, from, to, *limit),
            _ => Err(EvalError::no_such_overload()),
        },
        "split" => |_, args| match args {
            [Value::String(text), Value::String(separator)] => Ok(split(text, separator, -1)),
            [Value::String(text), Value::String(separator), Value::Int(limit)] => {
                Ok(split(text, separator, *limit))
            }
            _ => Err(EvalError::no_such_overload()),
        },
        "substring" => |_, args| match args {
            [Value::String(text), Value::Int(start)] => substring(text, *start, None),
            [Value::String(text), Value::Int(start), Value::Int(end)] => substring(text, *start, Some(*end)),
            _ => Err(EvalError::no_such_overload()),
        },
        "join" => |_, args| match args {
            [Value::List(list)] => join(list, ""),
            [Value::List(list), Value::String(separator)] => join(list, separator),
            _ => Err(EvalError::no_such_overload()),
        },
        "format" => |_, args| match args {
            [Value::String(text), Value::List(values)] => format(text, values).map(Value::string),
            _ => Err(EvalError::no_such_overload()),
        },
        _ => return None,
    })
}

fn one<'a>(args: &[Value<'a>], apply: fn(&str) -> String) -> Eval<Value<'a>> {
    match args {
        [Value::String(text)] => Ok(Value::string(apply(text))),
        _ => Err(EvalError::no_such_overload()),
    }
}

fn two<'a>(args: &[Value<'a>], apply: fn(&str, &str) -> bool) -> Eval<Value<'a>> {
    match args {
        [Value::String(text), Value::String(part)] => Ok(Value::Bool(apply(text, part))),
        _ => Err(EvalError::no_such_overload()),
    }
}

/// Unicode's white space as Go has it.
fn is_space(c: char) -> bool {
    c.is_whitespace()
}

fn out_of_range(index: i64) -> EvalError {
    EvalError::new(format!("index out of range: {index}"))
}

fn char_at(text: &str, index: i64) -> Eval<String> {
    let position = usize::try_from(index).map_err(|_| out_of_range(index))?;
    match text.chars().nth(position) {
        Some(c) => Ok(c.to_string()),
        None if position == text.chars().count() => Ok(String::new()),
        None => Err(out_of_range(index)),
    }
}

/// The byte at which a code point starts; the end of the text for one past the last.
fn offset(text: &str, position: usize) -> Option<usize> {
    text.char_indices()
        .map(|(offset, _)| offset)
        .chain([text.len()])
        .nth(position)
}

fn index_of<'a>(text: &str, part: &str, from: i64) -> Eval<Value<'a>> {
    if part.is_empty() {
        return Ok(Value::Int(from));
    }
    let start = usize::try_from(from).map_err(|_| out_of_range(from))?;
    let found = offset(text, start).and_then(|offset| {
        text[offset..]
            .find(part)
            .map(|at| text[..offset + at].chars().count() as i64)
    });
    Ok(Value::Int(found.unwrap_or(-1)))
}

fn last_index_of<'a>(text: &str, part: &str, from: i64) -> Eval<Value<'a>> {
    if part.is_empty() {
        return Ok(Value::Int(from));
    }
    let start = usize::try_from(from).map_err(|_| out_of_range(from))?;
    if start >= text.chars().count() {
        return Ok(Value::Int(-1));
    }
    // A match may begin at the position at the latest, so it ends within that many more bytes.
    let end = offset(text, start).map_or(text.len(), |offset| (offset + part.len()).min(text.len()));
    let end = (end..=text.len())
        .find(|end| text.is_char_boundary(*end))
        .unwrap_or(text.len());
    let found = text[..end]
        .rfind(part)
        .map(|at| text[..at].chars().count() as i64);
    Ok(Value::Int(found.filter(|at| *at <= from).unwrap_or(-1)))
}

fn position<'a>(list: &List<'a>, wanted: &Value<'a>, last: bool) -> Eval<Value<'a>> {
    let matches = |index: &usize| {
        let item = list.get(*index);
        item.and_then(|item| item.equals(wanted)).unwrap_or(false)
    };
    let found = if last {
        (0..list.len()).rev().find(matches)
    } else {
        (0..list.len()).find(matches)
    };
    Ok(Value::Int(found.map_or(-1, |index| index as i64)))
}

fn replace<'a>(text: &str, from: &str, to: &str, limit: i64) -> Eval<Value<'a>> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let places = if from.is_empty() {
        text.chars().count() + 1
    } else {
        text.matches(from).count()
    };
    let count = places.min(limit);
    if text.len().saturating_add(count.saturating_mul(to.len())) > MAX_BUILT_SIZE {
        return Err(EvalError::new("string is too large"));
    }
    Ok(Value::string(text.replacen(from, to, limit)))
}

fn split<'a>(text: &str, separator: &str, limit: i64) -> Value<'a> {
    let texts = |parts: Vec<&str>| Value::list(parts.into_iter().map(Value::string).collect());
    let Ok(limit) = usize::try_from(limit) else {
        if separator.is_empty() {
            return Value::list(text.chars().map(|c| Value::string(c.to_string())).collect());
        }
        return texts(text.split(separator).collect());
    };
    if !separator.is_empty() {
        return texts(if limit == 0 {
            Vec::new()
        } else {
            text.splitn(limit, separator).collect()
        });
    }
    // Without a separator, code points; the last element takes what is left.
    let mut parts = Vec::new();
    let mut rest = text;
    while parts.len() + 1 < limit
        && let Some(c) = rest.chars().next()
        && rest.len() > c.len_utf8()
    {
        let (head, tail) = rest.split_at(c.len_utf8());
        parts.push(head);
        rest = tail;
    }
    if limit > 0 && !rest.is_empty() {
        parts.push(rest);
    }
    texts(parts)
}

fn substring<'a>(text: &str, start: i64, end: Option<i64>) -> Eval<Value<'a>> {
    if let Some(end) = end
        && start > end
    {
        return Err(EvalError::new(format!(
            "invalid substring range. start: {start}, end: {end}"
        )));
    }
    let at = |index: i64| {
        let position = usize::try_from(index)
            .ok()
            .and_then(|position| offset(text, position));
        position.ok_or_else(|| out_of_range(index))
    };
    let from = at(start)?;
    let to = end.map(at).transpose()?.unwrap_or(text.len());
    Ok(Value::string(&text[from..to]))
}

fn join<'a>(list: &List<'a>, separator: &str) -> Eval<Value<'a>> {
    spend(list.len() * 4)?;
    let mut joined = String::new();
    for (position, item) in list.iter().enumerate() {
        let item = item?;
        let Value::String(text) = &item else {
            return Err(EvalError::new(format!("join: invalid input: {}", item.shown())));
        };
        if position > 0 {
            joined.push_str(separator);
        }
        joined.push_str(text);
        if joined.len() > MAX_BUILT_SIZE {
            return Err(EvalError::new("string is too large"));
        }
    }
    Ok(Value::string(joined))
}

fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '\u{7}' => quoted.push_str("\\a"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{c}' => quoted.push_str("\\f"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\u{b}' => quoted.push_str("\\v"),
            '\\' => quoted.push_str("\\\\"),
            '"' => quoted.push_str("\\\""),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
