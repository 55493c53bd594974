//! Field paths and field errors: what validation returns, in the words that clients of Kubernetes see.

use serde_json::{Number, Value};
use std::fmt;

/// A path to a field, such as `spec.containers[0].name` or `metadata.annotations[a/b]`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Path(String);

impl Path {
    /// The path of the object itself; its children print without a leading dot.
    pub fn root() -> Self {
        Self::default()
    }

    /// A path from its text; dots in `text` separate fields.
    pub fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    #[must_use]
    pub fn child(&self, name: &str) -> Self {
        if self.0.is_empty() {
            return Self(name.to_owned());
        }
        let mut text = String::with_capacity(self.0.len() + 1 + name.len());
        text.push_str(&self.0);
        text.push('.');
        text.push_str(name);
        Self(text)
    }

    #[must_use]
    pub fn index(&self, index: usize) -> Self {
        Self(format!("{}[{index}]", self.0))
    }

    #[must_use]
    pub fn key(&self, key: &str) -> Self {
        Self(format!("{}[{key}]", self.0))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // COMPAT: upstream prints an empty path as `<nil>`.
        f.write_str(if self.0.is_empty() { "<nil>" } else { &self.0 })
    }
}

/// The sort of a field error. The words and the cause reasons are upstream's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorType {
    NotFound,
    Required,
    Duplicate,
    Invalid,
    NotSupported,
    Forbidden,
    TooLong,
    TooShort,
    TooMany,
    TooFew,
    Internal,
    TypeInvalid,
}

impl ErrorType {
    fn words(self) -> &'static str {
        match self {
            Self::NotFound => "Not found",
            Self::Required => "Required value",
            Self::Duplicate => "Duplicate value",
            Self::Invalid | Self::TypeInvalid => "Invalid value",
            Self::NotSupported => "Unsupported value",
            Self::Forbidden => "Forbidden",
            Self::TooLong => "Too long",
            Self::TooShort => "Too short",
            Self::TooMany => "Too many",
            Self::TooFew => "Too few",
            Self::Internal => "Internal error",
        }
    }

    /// The `reason` of the cause in a `Status`.
    pub fn reason(self) -> &'static str {
        match self {
            Self::NotFound => "FieldValueNotFound",
            Self::Required => "FieldValueRequired",
            Self::Duplicate => "FieldValueDuplicate",
            Self::Invalid => "FieldValueInvalid",
            Self::NotSupported => "FieldValueNotSupported",
            Self::Forbidden => "FieldValueForbidden",
            Self::TooLong => "FieldValueTooLong",
            Self::TooShort => "FieldValueTooShort",
            Self::TooMany => "FieldValueTooMany",
            Self::TooFew => "FieldValueTooFew",
            Self::Internal => "InternalError",
            Self::TypeInvalid => "FieldValueTypeInvalid",
        }
    }
}

/// One finding of validation.
#[derive(Debug, Clone, PartialEq)]
pub struct Error {
    pub kind: ErrorType,
    pub path: String,
    /// The value complained about; `None` prints no value.
    pub value: Option<Value>,
    /// How the value prints, where that is not its JSON.
    pub shown: Option<String>,
    pub detail: String,
}

impl Error {
    fn make(kind: ErrorType, path: &Path, value: Option<Value>, detail: impl Into<String>) -> Self {
        Self {
            kind,
            path: path.to_string(),
            value,
            shown: None,
            detail: detail.into(),
        }
    }

    pub fn required(path: &Path, detail: impl Into<String>) -> Self {
        Self::make(ErrorType::Required, path, None, detail)
    }

    pub fn invalid(path: &Path, value: impl Into<Value>, detail: impl Into<String>) -> Self {
        Self::make(ErrorType::Invalid, path, Some(value.into()), detail)
    }

    pub fn type_invalid(path: &Path, value: impl Into<Value>, detail: impl Into<String>) -> Self {
        Self::make(ErrorType::TypeInvalid, path, Some(value.into()), detail)
    }

    pub fn duplicate(path: &Path, value: impl Into<Value>) -> Self {
        Self::make(ErrorType::Duplicate, path, Some(value.into()), "")
    }

    pub fn not_found(path: &Path, value: impl Into<Value>) -> Self {
        Self::make(ErrorType::NotFound, path, Some(value.into()), "")
    }

    pub fn forbidden(path: &Path, detail: impl Into<String>) -> Self {
        Self::make(ErrorType::Forbidden, path, None, detail)
    }

    /// `supported values:` lists the values in the order given.
    pub fn not_supported(path: &Path, value: impl Into<Value>, supported: &[&str]) -> Self {
        let quoted: Vec<String> = supported.iter().map(|v| quote(v)).collect();
        let detail = if quoted.is_empty() {
            String::new()
        } else {
            format!("supported values: {}", quoted.join(", "))
        };
        Self::make(ErrorType::NotSupported, path, Some(value.into()), detail)
    }

    /// COMPAT: the value itself is not echoed, it is too long.
    pub fn too_long(path: &Path, max_bytes: usize) -> Self {
        Self::make(
            ErrorType::TooLong,
            path,
            None,
            format!("may not be more than {max_bytes} bytes"),
        )
    }

    pub fn too_many(path: &Path, actual: usize, max: usize) -> Self {
        let items = if max == 1 { "item" } else { "items" };
        Self::make(
            ErrorType::TooMany,
            path,
            Some(actual.into()),
            format!("must have at most {max} {items}"),
        )
    }

    pub fn internal(path: &Path, detail: impl Into<String>) -> Self {
        Self::make(ErrorType::Internal, path, None, detail)
    }

    /// The message without the path: the `message` of a cause.
    pub fn body(&self) -> String {
        let mut text = self.kind.words().to_owned();
        if let Some(value) = &self.value {
            text.push_str(": ");
            match value {
                _ if self.shown.is_some() => text.push_str(self.shown.as_deref().unwrap_or_default()),
                Value::String(string) => text.push_str(&quote(string)),
                Value::Number(number) => text.push_str(&number_text(number)),
                other => text.push_str(&other.to_string()),
            }
        }
        if !self.detail.is_empty() {
            text.push_str(": ");
            text.push_str(&self.detail);
        }
        text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.body())
    }
}

/// A number as Go's `%v` prints it.
pub fn number_text(number: &Number) -> String {
    match number.as_f64() {
        Some(float) if number.is_f64() => float_text(float),
        _ => number.to_string(),
    }
}

/// A float as Go's `%v` prints it.
pub fn float_text(value: f64) -> String {
    let text = format!("{value:e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let power: i32 = exponent.parse().unwrap_or(0);
    if (-4..6).contains(&power) || value == 0.0 {
        return value.to_string();
    }
    let sign = if power < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", power.abs())
}

/// Quotes as Go's `%q` does for the strings that occur in messages.
pub fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\u{7}' => quoted.push_str("\\a"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{b}' => quoted.push_str("\\v"),
            '\u{c}' => quoted.push_str("\\f"),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => quoted.push_str(&format!("\\x{:02x}", c as u32)),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_read_as_in_go() {
        for (float, expected) in [
            (150.0, "150"),
            (150.25, "150.25"),
            (123_456.5, "123456.5"),
            (1e6, "1e+06"),
            (12_345_678.5, "1.23456785e+07"),
            (1e21, "1e+21"),
            (0.0001, "0.0001"),
            (0.000_01, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
            (0.0, "0"),
        ] {
            let error = Error::invalid(&Path::new("a"), float, "");
            assert_eq!(error.body(), format!("Invalid value: {expected}"));
        }
        assert_eq!(
            Error::invalid(&Path::new("a"), 10_000_001, "").body(),
            "Invalid value: 10000001"
        );
    }

    #[test]
    fn errors_print_as_upstream() {
        let path = Path::new("spec").child("containers").index(0).child("name");
        let check = |error: Error, expected: &str| assert_eq!(error.to_string(), expected);
        check(
            Error::required(&path, ""),
            "spec.containers[0].name: Required value",
        );
        check(
            Error::invalid(&path, "A", "bad"),
            "spec.containers[0].name: Invalid value: \"A\": bad",
        );
        check(
            Error::invalid(&path, -1, "bad"),
            "spec.containers[0].name: Invalid value: -1: bad",
        );
        check(
            Error::not_supported(&path, "x", &["A", "B"]),
            "spec.containers[0].name: Unsupported value: \"x\": supported values: \"A\", \"B\"",
        );
        check(
            Error::too_long(&path, 63),
            "spec.containers[0].name: Too long: may not be more than 63 bytes",
        );
        check(
            Error::duplicate(&Path::root().child("a").key("k"), "v"),
            "a[k]: Duplicate value: \"v\"",
        );
    }
}
