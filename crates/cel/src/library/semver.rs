//! Semantic versions. Their comparisons are with those of quantities.

use std::cmp::Ordering;
use std::sync::Arc;

use skiff_meta::field::quote;

use super::Native;
use crate::error::EvalError;
use crate::value::{Eval, Value};

/// A parsed version. What follows `+` has no rank and is not kept.
#[derive(Debug)]
pub struct Semver {
    major: u64,
    minor: u64,
    patch: u64,
    pre: Vec<Identifier>,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Identifier {
    // Numbers rank below words.
    Number(u64),
    Word(String),
}

impl Semver {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("Version string empty".to_owned());
        }
        let parts: Vec<&str> = text.splitn(3, '.').collect();
        let [major, minor, rest] = parts[..] else {
            return Err("No Major.Minor.Patch elements found".to_owned());
        };
        let (rest, build) = match rest.split_once('+') {
            Some((rest, build)) => (rest, Some(build)),
            None => (rest, None),
        };
        let (patch, pre) = match rest.split_once('-') {
            Some((patch, pre)) => (patch, Some(pre)),
            None => (rest, None),
        };
        let number = |name: &str, text: &str| -> Result<u64, String> {
            if !text.bytes().all(|c| c.is_ascii_digit()) {
                return Err(format!(
                    "Invalid character(s) found in {} number {}",
                    name.to_lowercase(),
                    quote(text)
                ));
            }
            if text.len() > 1 && text.starts_with('0') {
                return Err(format!(
                    "{name} number must not contain leading zeroes {}",
                    quote(text)
                ));
            }
            text.parse().map_err(|_| {
                let problem = if text.is_empty() {
                    "invalid syntax"
                } else {
                    "value out of range"
                };
                format!("strconv.ParseUint: parsing {}: {problem}", quote(text))
            })
        };
        let (major, minor, patch) = (
            number("Major", major)?,
            number("Minor", minor)?,
            number("Patch", patch)?,
        );
        let pre = pre.map_or(Ok(Vec::new()), |pre| {
            pre.split('.').map(identifier).collect::<Result<_, _>>()
        })?;
        for part in build.into_iter().flat_map(|build| build.split('.')) {
            if part.is_empty() {
                return Err("Build meta data is empty".to_owned());
            }
            if !is_word(part) {
                return Err(format!(
                    "Invalid character(s) found in build meta data {}",
                    quote(part)
                ));
            }
        }
        Ok(Self {
            major,
            minor,
            patch,
            pre,
        })
    }

    /// Accepts `v1.2` for `1.2.0`.
    fn parse_normalized(text: &str) -> Result<Self, String> {
        let text = text.strip_prefix('v').unwrap_or(text);
        let mut parts: Vec<String> = text.splitn(3, '.').map(without_leading_zeros).collect();
        if parts.len() < 3 {
            if parts.last().is_some_and(|part| part.contains(['+', '-'])) {
                return Err("short version cannot contain PreRelease/Build meta data".to_owned());
            }
            parts.resize(3, "0".to_owned());
        }
        Self::parse(&parts.join("."))
    }

    pub(crate) fn precedence(&self, other: &Self) -> Ordering {
        let numbers = (self.major, self.minor, self.patch).cmp(&(other.major, other.minor, other.patch));
        numbers.then_with(|| match (self.pre.is_empty(), other.pre.is_empty()) {
            (true, true) => Ordering::Equal,
            // A version before its release is lower.
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
            (false, false) => self.pre.cmp(&other.pre),
        })
    }
}

fn is_word(text: &str) -> bool {
    text.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'-')
}

fn identifier(text: &str) -> Result<Identifier, String> {
    if text.is_empty() {
        return Err("Prerelease is empty".to_owned());
    }
    if text.bytes().all(|c| c.is_ascii_digit()) {
        if text.len() > 1 && text.starts_with('0') {
            return Err(format!(
                "Numeric PreRelease version must not contain leading zeroes {}",
                quote(text)
            ));
        }
        let number = text.parse().map_err(|_| "value out of range".to_owned())?;
        return Ok(Identifier::Number(number));
    }
    if !is_word(text) {
        return Err(format!(
            "Invalid character(s) found in prerelease {}",
            quote(text)
        ));
    }
    Ok(Identifier::Word(text.to_owned()))
}

fn without_leading_zeros(part: &str) -> String {
    if part.len() < 2 {
        return part.to_owned();
    }
    let trimmed = part.trim_start_matches('0');
    if trimmed.starts_with(|c: char| c.is_ascii_digit()) {
        trimmed.to_owned()
    } else {
        format!("0{trimmed}")
    }
}

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "semver" => |_, args| match parse(args)? {
            Ok(version) => Ok(Value::Semver(Arc::new(version))),
            Err(problem) => Err(EvalError::new(problem)),
        },
        "isSemver" => |_, args| Ok(Value::Bool(parse(args)?.is_ok())),
        "major" => |_, args| number(args, |version| version.major),
        "minor" => |_, args| number(args, |version| version.minor),
        "patch" => |_, args| number(args, |version| version.patch),
        _ => return None,
    })
}

fn parse(args: &[Value<'_>]) -> Eval<Result<Semver, String>> {
    match args {
        [Value::String(text)] | [Value::String(text), Value::Bool(false)] => Ok(Semver::parse(text)),
        [Value::String(text), Value::Bool(true)] => Ok(Semver::parse_normalized(text)),
        _ => Err(EvalError::no_such_overload()),
    }
}

fn number<'a>(args: &[Value<'a>], of: fn(&Semver) -> u64) -> Eval<Value<'a>> {
    match args {
        [Value::Semver(version)] => Ok(Value::Int(of(version) as i64)),
        _ => Err(EvalError::no_such_overload()),
    }
}
