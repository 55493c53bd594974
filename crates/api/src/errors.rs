//! Collects what validation finds. Every method names a place and speaks upstream's words.

use serde_json::Value;
use skiff_meta::field::{Error, ErrorType, quote};

use crate::node::Node;

pub const IMMUTABLE: &str = "field is immutable";
pub const NOT_NEGATIVE: &str = "must be greater than or equal to 0";
pub const POSITIVE: &str = "must be greater than zero";

/// What findings may take together. Each may quote a large part of the object; nobody reads more of them.
const MOST_BYTES: usize = 8 << 20;

#[derive(Default)]
pub struct Errors {
    found: Vec<Error>,
    bytes: usize,
}

impl Errors {
    pub fn new() -> Self {
        Errors::default()
    }

    pub fn into_vec(self) -> Vec<Error> {
        self.found
    }

    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    pub fn extend(&mut self, more: Vec<Error>) {
        self.found.extend(more);
    }

    /// Whether further findings are left out.
    pub fn is_full(&self) -> bool {
        self.bytes > MOST_BYTES
    }

    pub fn push(&mut self, kind: ErrorType, at: &Node, value: Option<Value>, detail: impl Into<String>) {
        if self.is_full() {
            return;
        }
        let (path, detail) = (at.path(), detail.into());
        self.bytes += 100 + path.len() + detail.len() + value.as_ref().map_or(0, weight);
        // COMPAT: upstream prints an empty path so.
        let path = if path.is_empty() { "<nil>".to_owned() } else { path };
        self.found.push(Error {
            kind,
            path,
            value,
            shown: None,
            detail,
        });
    }

    pub fn required(&mut self, at: &Node, detail: impl Into<String>) {
        self.push(ErrorType::Required, at, None, detail);
    }

    pub fn forbidden(&mut self, at: &Node, detail: impl Into<String>) {
        self.push(ErrorType::Forbidden, at, None, detail);
    }

    /// Complains about the value at this place; an absent string shows as empty.
    pub fn invalid(&mut self, at: &Node, detail: impl Into<String>) {
        self.push(ErrorType::Invalid, at, Some(shown(at)), detail);
    }

    pub fn invalid_value(&mut self, at: &Node, value: impl Into<Value>, detail: impl Into<String>) {
        self.push(ErrorType::Invalid, at, Some(value.into()), detail);
    }

    /// Complains about a value of which this text is shown.
    pub fn invalid_text(&mut self, at: &Node, shown: &str, detail: impl Into<String>) {
        if self.is_full() {
            return;
        }
        self.bytes += shown.len();
        self.push(ErrorType::Invalid, at, Some(Value::Null), detail);
        if let Some(last) = self.found.last_mut() {
            last.shown = Some(shown.to_owned());
        }
    }

    pub fn duplicate(&mut self, at: &Node) {
        self.push(ErrorType::Duplicate, at, Some(shown(at)), "");
    }

    /// A double of which this text is shown.
    pub fn duplicate_text(&mut self, at: &Node, shown: &str) {
        self.push(ErrorType::Duplicate, at, Some(Value::Null), "");
        if let Some(last) = self.found.last_mut() {
            last.shown = Some(shown.to_owned());
        }
    }

    /// Gives the last finding a reason.
    pub fn because(&mut self, detail: &str) {
        if let Some(last) = self.found.last_mut() {
            last.detail = detail.to_owned();
        }
    }

    pub fn duplicate_value(&mut self, at: &Node, value: impl Into<Value>) {
        self.push(ErrorType::Duplicate, at, Some(value.into()), "");
    }

    pub fn not_found(&mut self, at: &Node) {
        self.push(ErrorType::NotFound, at, Some(shown(at)), "");
    }

    pub fn not_supported(&mut self, at: &Node, supported: &[&str]) {
        let quoted: Vec<String> = supported.iter().map(|v| quote(v)).collect();
        let detail = format!("supported values: {}", quoted.join(", "));
        self.push(ErrorType::NotSupported, at, Some(shown(at)), detail);
    }

    pub fn too_long(&mut self, at: &Node, max: usize) {
        self.push(
            ErrorType::TooLong,
            at,
            None,
            format!("may not be more than {max} bytes"),
        );
    }

    pub fn too_many(&mut self, at: &Node, max: usize) {
        let items = if max == 1 { "item" } else { "items" };
        let actual = at.len();
        self.push(
            ErrorType::TooMany,
            at,
            Some(actual.into()),
            format!("must have at most {max} {items}"),
        );
    }

    /// One of the values, which must be there.
    pub fn one_of(&mut self, at: &Node, supported: &[&str]) {
        if !supported.contains(&at.str()) {
            self.not_supported(at, supported);
        }
    }

    /// One of the values, or unset.
    pub fn one_of_if_set(&mut self, at: &Node, supported: &[&str]) {
        if at.is_set() {
            self.one_of(at, supported);
        }
    }

    /// One of the values; absent or empty is a missing value.
    pub fn required_one_of(&mut self, at: &Node, supported: &[&str]) {
        if at.str().is_empty() {
            self.required(at, "");
        } else {
            self.one_of(at, supported);
        }
    }

    /// A string that must not be empty.
    pub fn require(&mut self, at: &Node) -> bool {
        let empty = at.is_empty();
        if empty {
            self.required(at, "");
        }
        !empty
    }

    pub fn non_negative(&mut self, at: &Node) {
        if at.int().is_some_and(|n| n < 0) {
            self.invalid(at, NOT_NEGATIVE);
        }
    }

    pub fn positive(&mut self, at: &Node) {
        if at.int().is_some_and(|n| n <= 0) {
            self.invalid(at, POSITIVE);
        }
    }

    /// A name rule on the string at this place.
    pub fn rule(&mut self, at: &Node, complaints: Vec<String>) {
        for complaint in complaints {
            self.invalid(at, complaint);
        }
    }

    /// As `immutable`, for a struct of this internal type: there a pointer to nothing is not the same as none.
    pub fn immutable_as(&mut self, internal: &str, new: &Node, old: &Value) {
        let there = new.value.is_null() == old.is_null();
        if !there || !crate::internal::equal(internal, new.value, old) {
            self.push(ErrorType::Invalid, new, Some(new.value.clone()), IMMUTABLE);
        }
    }

    pub fn immutable(&mut self, new: &Node, old: &Value) {
        if !crate::node::same(new.value, old) {
            let shown = match (new.value, old) {
                (Value::Null, Value::String(_)) => Value::String(String::new()),
                (value, _) => value.clone(),
            };
            self.push(ErrorType::Invalid, new, Some(shown), IMMUTABLE);
        }
    }
}

/// What a value takes, roughly.
fn weight(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(|value| 32 + weight(value)).sum(),
        Value::Object(map) => map
            .iter()
            .map(|(key, value)| 100 + key.len() + weight(value))
            .sum(),
        _ => 0,
    }
}

fn shown(at: &Node) -> Value {
    if at.is_set() {
        at.value.clone()
    } else {
        Value::String(String::new())
    }
}
