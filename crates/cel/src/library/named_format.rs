//! Named formats: `format.dns1123Label().validate(name)`.

use std::sync::LazyLock;

use base64::Engine as _;
use skiff_meta::names;

use super::Native;
use super::url::Url;
use crate::error::EvalError;
use crate::time::Timestamp;
use crate::value::{Eval, Value};

/// A format with the check that it stands for.
pub struct NamedFormat {
    pub(crate) name: &'static str,
    check: fn(&str) -> Vec<String>,
    /// The length of the pattern that the check is costed as.
    pub(crate) max_regex_size: u64,
}

impl std::fmt::Debug for NamedFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

const UUID: &str = "(?i)^[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}$";
const DATE_TIME: &str = "^([0-9]{2}):([0-9]{2}):([0-9]{2})(.[0-9]+)?(z|([+-][0-9]{2}:[0-9]{2}))$";

static UUID_PATTERN: LazyLock<regex::Regex> =
    LazyLock::new(|| regex::Regex::new(UUID).expect("the pattern is a constant that parses"));
static DATE_TIME_PATTERN: LazyLock<regex::Regex> =
    LazyLock::new(|| regex::Regex::new(DATE_TIME).expect("the pattern is a constant that parses"));

const fn format(name: &'static str, max_regex_size: usize, check: fn(&str) -> Vec<String>) -> NamedFormat {
    NamedFormat {
        name,
        check,
        max_regex_size: max_regex_size as u64,
    }
}

fn unless(valid: bool, problem: &str) -> Vec<String> {
    if valid {
        Vec::new()
    } else {
        vec![problem.to_owned()]
    }
}

/// A name that something will be appended to may end in a dash.
fn prefix(text: &str, check: fn(&str) -> Vec<String>) -> Vec<String> {
    check(&names::mask_trailing_dash(text))
}

static FORMATS: &[NamedFormat] = &[
    format("dns1123Label", 30, names::dns1123_label),
    format("dns1123Subdomain", 60, names::dns1123_subdomain),
    format("dns1035Label", 30, names::dns1035_label),
    format("qualifiedName", 60, names::qualified_name),
    format("dns1123LabelPrefix", 30, |text| {
        prefix(text, names::dns1123_label)
    }),
    format("dns1123SubdomainPrefix", 60, |text| {
        prefix(text, names::dns1123_subdomain)
    }),
    format("dns1035LabelPrefix", 30, |text| {
        prefix(text, names::dns1035_label)
    }),
    format("labelValue", 40, names::label_value),
    format("uri", 1103, |text| Url::parse(text).err().into_iter().collect()),
    format("uuid", UUID.len(), |text| {
        unless(UUID_PATTERN.is_match(text), "does not match the UUID format")
    }),
    format("byte", 84, |text| {
        let decoded = base64::engine::general_purpose::STANDARD.decode(text);
        unless(decoded.is_ok() && !text.is_empty(), "invalid base64")
    }),
    format("date", DATE_TIME.len(), |text| {
        unless(Timestamp::parse_date(text).is_ok(), "invalid date")
    }),
    format("datetime", DATE_TIME.len(), |text| {
        unless(is_date_time(text), "invalid datetime")
    }),
];

/// A date, `t`, and a time within the day.
fn is_date_time(text: &str) -> bool {
    let lower = text.to_lowercase();
    let mut parts = lower.split('t');
    let (Some(date), Some(time)) = (parts.next(), parts.next()) else {
        return false;
    };
    let Some(time) = DATE_TIME_PATTERN.captures(time) else {
        return false;
    };
    Timestamp::parse_date(date).is_ok() && &time[1] <= "23" && &time[2] <= "59" && &time[3] <= "59"
}

fn named(name: &str) -> Option<&'static NamedFormat> {
    FORMATS.iter().find(|format| format.name == name)
}

pub(super) fn native(name: &str) -> Option<Native> {
    fn constant<'a>(name: &str) -> Eval<Value<'a>> {
        named(name)
            .map(Value::Format)
            .ok_or_else(EvalError::no_such_overload)
    }
    Some(match name {
        "validate" => |_, args| match args {
            [Value::Format(format), Value::String(text)] => {
                let problems = (format.check)(text);
                if problems.is_empty() {
                    return Ok(Value::Optional(None));
                }
                Ok(Value::some(Value::list(
                    problems.into_iter().map(Value::string).collect(),
                )))
            }
            _ => Err(EvalError::no_such_overload()),
        },
        "format.named" => |_, args| match args {
            [Value::String(name)] => {
                Ok(named(name).map_or(Value::Optional(None), |format| Value::some(Value::Format(format))))
            }
            _ => Err(EvalError::no_such_overload()),
        },
        "format.dns1123Label" => |_, _| constant("dns1123Label"),
        "format.dns1123Subdomain" => |_, _| constant("dns1123Subdomain"),
        "format.dns1035Label" => |_, _| constant("dns1035Label"),
        "format.qualifiedName" => |_, _| constant("qualifiedName"),
        "format.dns1123LabelPrefix" => |_, _| constant("dns1123LabelPrefix"),
        "format.dns1123SubdomainPrefix" => |_, _| constant("dns1123SubdomainPrefix"),
        "format.dns1035LabelPrefix" => |_, _| constant("dns1035LabelPrefix"),
        "format.labelValue" => |_, _| constant("labelValue"),
        "format.uri" => |_, _| constant("uri"),
        "format.uuid" => |_, _| constant("uuid"),
        "format.byte" => |_, _| constant("byte"),
        "format.date" => |_, _| constant("date"),
        "format.datetime" => |_, _| constant("datetime"),
        _ => return None,
    })
}
