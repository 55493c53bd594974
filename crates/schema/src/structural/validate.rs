//! Checks values against a schema, in the words of upstream's validator. An update tolerates what was
//! wrong before and did not change.

mod finding;

use std::collections::{HashMap, HashSet};

use finding::{Finding, Outcome, Sort};
use serde_json::Value;
use skiff_meta::field::{self, Path};

use super::{Additional, ListKind, Structural, formats};

/// Checks a value; `root` is where it is in its object.
pub fn validate(value: &Value, schema: &Structural, root: &Path) -> Vec<field::Error> {
    run(value, None, schema, root)
}

/// Checks a value that takes the place of `old`.
pub fn validate_update(
    value: &Value,
    old: Option<&Value>,
    schema: &Structural,
    root: &Path,
) -> Vec<field::Error> {
    run(value, old, schema, root)
}

fn run(value: &Value, old: Option<&Value>, schema: &Structural, root: &Path) -> Vec<field::Error> {
    let outcome = Checker.node(value, old, schema, "");
    outcome
        .findings
        .into_iter()
        .map(|finding| finding.into_error(root))
        .collect()
}

struct Checker;

/// What JSON type a value has.
fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn whole(value: f64) -> bool {
    value.is_finite() && value.fract() == 0.0 && value.abs() < 9_007_199_254_740_992.0
}

impl Checker {
    fn node(&self, value: &Value, old: Option<&Value>, schema: &Structural, path: &str) -> Outcome {
        let outcome = self.checks(value, old, schema, path);
        if !outcome.findings.is_empty() && old == Some(value) {
            return outcome.forgiven();
        }
        outcome
    }

    fn checks(&self, value: &Value, old: Option<&Value>, schema: &Structural, path: &str) -> Outcome {
        let mut outcome = Outcome::default();
        if value.is_null() {
            self.kind(value, schema, path, &mut outcome);
            self.enumeration(value, schema, path, &mut outcome);
            return outcome;
        }
        if !schema.kind.is_empty() || schema.int_or_string || !schema.format.is_empty() {
            self.kind(value, schema, path, &mut outcome);
            outcome.matches += 1;
        }
        self.alternatives(value, old, schema, path, &mut outcome);
        match value {
            Value::String(text) => self.text(text, schema, path, &mut outcome),
            Value::Number(_) => self.number(value, schema, path, &mut outcome),
            Value::Array(values) => self.list(values, old, schema, path, &mut outcome),
            _ => {}
        }
        self.enumeration(value, schema, path, &mut outcome);
        if let Value::Object(map) = value {
            self.object(map, old, schema, path, &mut outcome);
        }
        outcome.matches += 2;
        outcome
    }

    fn kind(&self, value: &Value, schema: &Structural, path: &str, outcome: &mut Outcome) {
        // A schema has one type, or the two of int-or-string.
        let single = [schema.kind.as_str()];
        let wanted: &[&str] = match (schema.int_or_string, schema.kind.is_empty()) {
            (true, _) => &["integer", "string"],
            (false, true) => &[],
            (false, false) => &single,
        };
        let found = kind_of(value);
        let mismatch = |expected: &str, found: &str| Finding {
            kind: Sort::Type,
            name: Some(path.to_owned()),
            value: Some(Value::String(found.to_owned())),
            message: format!(
                "{path} in body must be of type {expected}: {}",
                field::quote(found)
            ),
        };
        if value.is_null() {
            if !wanted.is_empty() && !schema.nullable {
                outcome.add(mismatch(&wanted.join(","), "null"));
            }
            return;
        }
        let float_is_integer = value
            .as_f64()
            .is_some_and(|n| found == "number" && whole(n) && wanted.contains(&"integer"));
        let integer_is_float = found == "integer" && wanted.contains(&"number");
        let numeric = wanted.contains(&"number") || wanted.contains(&"integer");
        let format = &schema.format;
        let fits = wanted.contains(&found) || float_is_integer || integer_is_float;
        if !matches!(found, "string" | "array") && !format.is_empty() && !fits {
            let found_format = match found {
                "integer" => "int64",
                "number" => "float64",
                _ => "",
            };
            outcome.add(mismatch(format, found_format));
            return;
        }
        if !numeric && !format.is_empty() && matches!(found, "string" | "array") {
            return;
        }
        if !fits {
            outcome.add(mismatch(&wanted.join(","), found));
        }
    }

    fn enumeration(&self, value: &Value, schema: &Structural, path: &str, outcome: &mut Outcome) {
        let same = |known: &Value| {
            known == value
                || matches!((known.as_f64(), value.as_f64()), (Some(a), Some(b)) if (a - b).abs() == 0.0)
        };
        if schema.enumeration.is_empty() || schema.enumeration.iter().any(same) {
            return;
        }
        let values = schema.enumeration.iter().map(|known| match known {
            Value::String(text) => text.clone(),
            Value::Number(number) => field::number_text(number),
            other => other.to_string(),
        });
        outcome.add(Finding {
            kind: Sort::NotSupported(values.collect()),
            name: Some(path.to_owned()),
            value: Some(value.clone()),
            message: String::new(),
        });
    }

    fn text(&self, text: &str, schema: &Structural, path: &str, outcome: &mut Outcome) {
        let bounds = &schema.bounds;
        let length = text.chars().count() as i64;
        // The first that fails is told.
        if let Some(max) = bounds.max_length.filter(|max| length > *max) {
            outcome.add(Finding {
                kind: Sort::TooLong(max),
                name: Some(path.to_owned()),
                value: None,
                message: String::new(),
            });
        } else if let Some(min) = bounds.min_length.filter(|min| length < *min) {
            outcome.invalid(
                path,
                text,
                format!("{path} in body should be at least {min} chars long"),
            );
        } else if let Some(pattern) = &schema.pattern {
            match pattern.matches(text) {
                Ok(true) => {}
                Ok(false) => outcome.invalid(
                    path,
                    text,
                    format!("{path} in body should match '{}'", pattern.text),
                ),
                Err(error) => outcome.invalid(
                    path,
                    text,
                    format!(
                        "{path} in body should match '{}, but pattern is invalid: {error}'",
                        pattern.text
                    ),
                ),
            }
        }
        outcome.matches += 1;
        if !schema.format.is_empty() {
            outcome.matches += 1;
            let numeric = matches!(schema.kind.as_str(), "integer" | "number");
            if !numeric && !formats::matches(&schema.format, text) {
                outcome.add(Finding {
                    kind: Sort::Type,
                    name: Some(path.to_owned()),
                    value: Some(Value::String(text.to_owned())),
                    message: format!(
                        "{path} in body must be of type {}: {}",
                        schema.format,
                        field::quote(text)
                    ),
                });
            }
        }
    }

    fn number(&self, value: &Value, schema: &Structural, path: &str, outcome: &mut Outcome) {
        let bounds = &schema.bounds;
        let integer = value.as_i64();
        let float = value.as_f64().unwrap_or(0.0);
        if let Some(message) = range(value, schema, path) {
            outcome.general(message);
        }
        let shown = |bound: f64| {
            if integer.is_some() {
                (bound as i64).to_string()
            } else {
                field::float_text(bound)
            }
        };
        if let Some(factor) = bounds.multiple_of {
            let fits = match integer {
                Some(n) => (factor as i64) > 0 && n % (factor as i64) == 0,
                None if factor < 1.0 => whole(1.0 / factor * float),
                None => whole(float / factor),
            };
            if !fits {
                outcome.invalid(
                    path,
                    value.clone(),
                    format!("{path} in body should be a multiple of {}", shown(factor)),
                );
            }
        }
        if let Some(min) = bounds.minimum {
            let (below, words) = if bounds.exclusive_minimum {
                (
                    compare(integer, float, min) != std::cmp::Ordering::Greater,
                    "greater than",
                )
            } else {
                (
                    compare(integer, float, min) == std::cmp::Ordering::Less,
                    "greater than or equal to",
                )
            };
            if below {
                outcome.invalid(
                    path,
                    value.clone(),
                    format!("{path} in body should be {words} {}", shown(min)),
                );
            }
        }
        if let Some(max) = bounds.maximum {
            let (above, words) = if bounds.exclusive_maximum {
                (
                    compare(integer, float, max) != std::cmp::Ordering::Less,
                    "less than",
                )
            } else {
                (
                    compare(integer, float, max) == std::cmp::Ordering::Greater,
                    "less than or equal to",
                )
            };
            if above {
                outcome.invalid(
                    path,
                    value.clone(),
                    format!("{path} in body should be {words} {}", shown(max)),
                );
            }
        }
        outcome.matches += 2;
    }

    fn list(
        &self,
        values: &[Value],
        old: Option<&Value>,
        schema: &Structural,
        path: &str,
        outcome: &mut Outcome,
    ) {
        if let Some(items) = &schema.items {
            let before = old.and_then(|old| Before::of(old, schema));
            for (index, value) in values.iter().enumerate() {
                let before = before.as_ref().and_then(|before| before.find(value));
                outcome.merge(self.node(value, before, items, &format!("{path}[{index}]")));
            }
        }
        let size = values.len() as i64;
        if let Some(min) = schema.bounds.min_items.filter(|min| size < *min) {
            outcome.invalid(
                path,
                size,
                format!("{path} in body should have at least {min} items"),
            );
        }
        if let Some(max) = schema.bounds.max_items.filter(|max| size > *max) {
            outcome.add(Finding {
                kind: Sort::TooMany { actual: size, max },
                name: Some(path.to_owned()),
                value: None,
                message: String::new(),
            });
        }
        if schema.unique_items && has_doubles(values) {
            outcome.invalid(path, "", format!("{path} in body shouldn't contain duplicates"));
        }
        outcome.matches += 2;
    }

    fn object(
        &self,
        map: &serde_json::Map<String, Value>,
        old: Option<&Value>,
        schema: &Structural,
        path: &str,
        outcome: &mut Outcome,
    ) {
        let size = map.len() as i64;
        if let Some(min) = schema.bounds.min_properties.filter(|min| size < *min) {
            outcome.invalid(
                path,
                size,
                format!("{path} in body should have at least {min} properties"),
            );
        }
        if let Some(max) = schema.bounds.max_properties.filter(|max| size > *max) {
            outcome.add(Finding {
                kind: Sort::TooMany { actual: size, max },
                name: Some(path.to_owned()),
                value: None,
                message: String::new(),
            });
        }
        // What the version and kind were cannot be seen in the old object: it was converted.
        let before = |key: &str| {
            let type_meta = path.is_empty() && matches!(key, "kind" | "apiVersion");
            old.filter(|_| !type_meta).and_then(|old| old.get(key))
        };
        for (key, value) in map {
            if schema.properties.contains_key(key) {
                continue;
            }
            match &schema.additional {
                Additional::Forbidden => {
                    outcome.invalid(
                        path,
                        key.as_str(),
                        format!("{path}.{key} in body is a forbidden property"),
                    );
                }
                Additional::Schema(additional) => {
                    outcome.merge(self.node(value, before(key), additional, &format!("{path}.{key}")));
                }
                Additional::Unset | Additional::Allowed => {}
            }
        }
        for (key, property) in &schema.properties {
            if let Some(value) = map.get(key) {
                let at = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                outcome.merge(self.node(value, before(key), property, &at));
            }
        }
        for key in schema.required.iter().filter(|key| !map.contains_key(*key)) {
            outcome.add(Finding {
                kind: Sort::Required,
                name: Some(format!("{path}.{key}")),
                value: None,
                message: String::new(),
            });
        }
        outcome.matches += 1;
    }

    fn alternatives(
        &self,
        value: &Value,
        old: Option<&Value>,
        schema: &Structural,
        path: &str,
        outcome: &mut Outcome,
    ) {
        let quoted = || field::quote(path);
        if !schema.any_of.is_empty() {
            let mut best: Option<Outcome> = None;
            let mut passed = None;
            for alternative in &schema.any_of {
                let result = self.checks(value, old, alternative, path);
                if result.findings.is_empty() {
                    passed = Some(result);
                    break;
                }
                if best.as_ref().is_none_or(|best| result.matches > best.matches) {
                    best = Some(result);
                }
            }
            match passed {
                Some(passed) => outcome.merge(passed),
                None => {
                    outcome.general(format!("{} must validate at least one schema (anyOf)", quoted()));
                    outcome.merge(best.unwrap_or_default());
                }
            }
        }
        if !schema.one_of.is_empty() {
            let mut best: Option<Outcome> = None;
            let mut passed: Vec<Outcome> = Vec::new();
            for alternative in &schema.one_of {
                let result = self.checks(value, old, alternative, path);
                if result.findings.is_empty() {
                    passed.push(result);
                } else if best.as_ref().is_none_or(|best| result.matches > best.matches) {
                    best = Some(result);
                }
            }
            match passed.len() {
                1 => outcome.merge(passed.remove(0)),
                0 => {
                    outcome.general(format!(
                        "{} must validate one and only one schema (oneOf). Found none valid",
                        quoted()
                    ));
                    outcome.merge(best.unwrap_or_default());
                }
                count => outcome.general(format!(
                    "{} must validate one and only one schema (oneOf). Found {count} valid alternatives",
                    quoted()
                )),
            }
        }
        if !schema.all_of.is_empty() {
            let mut passed = 0;
            for part in &schema.all_of {
                let result = self.checks(value, old, part, path);
                passed += usize::from(result.findings.is_empty());
                outcome.merge(result);
            }
            if passed != schema.all_of.len() {
                let none = if passed == 0 { ". None validated" } else { "" };
                outcome.general(format!(
                    "{} must validate all the schemas (allOf){none}",
                    quoted()
                ));
            }
        }
        if let Some(not) = &schema.not
            && self.checks(value, old, not, path).findings.is_empty()
        {
            outcome.general(format!("{} must not validate the schema (not)", quoted()));
        }
        outcome.matches += 1;
    }
}

fn compare(integer: Option<i64>, float: f64, bound: f64) -> std::cmp::Ordering {
    match integer {
        Some(n) => n.cmp(&(bound as i64)),
        None => float.partial_cmp(&bound).unwrap_or(std::cmp::Ordering::Equal),
    }
}

/// Whether a number fits its type and format.
fn range(value: &Value, schema: &Structural, path: &str) -> Option<String> {
    if schema.int_or_string {
        return None;
    }
    let kind = schema.kind.as_str();
    let fits = match (kind, schema.format.as_str()) {
        ("integer", "int32") => {
            let integer = value
                .as_i64()
                .or_else(|| value.as_f64().filter(|n| whole(*n)).map(|n| n as i64));
            integer.is_some_and(|n| i32::try_from(n).is_ok())
        }
        ("integer", _) => value.as_i64().is_some() || value.as_f64().is_some_and(whole),
        ("number", "float") => value.as_f64().is_some_and(|n| n.abs() <= f64::from(f32::MAX)),
        _ => true,
    };
    if fits {
        return None;
    }
    Some(if schema.format.is_empty() {
        format!("Checked value must be of type {kind} (default format) in {path}")
    } else {
        format!(
            "Checked value must be of type {kind} with format {} in {path}",
            schema.format
        )
    })
}

/// The elements of an old list that is a map, by their keys.
struct Before<'a> {
    elements: HashMap<String, &'a Value>,
    schema: &'a Structural,
}

impl<'a> Before<'a> {
    /// `None` where elements cannot be told apart.
    fn of(old: &'a Value, schema: &'a Structural) -> Option<Before<'a>> {
        if schema.list_type != ListKind::Map || schema.list_map_keys.is_empty() {
            return None;
        }
        let old = old.as_array()?;
        let mut elements = HashMap::with_capacity(old.len());
        for element in old {
            // Of two with the same keys, the first counts.
            elements.entry(keys_of(element, schema)).or_insert(element);
        }
        Some(Before { elements, schema })
    }

    /// The element that stood for the same thing.
    fn find(&self, new: &Value) -> Option<&'a Value> {
        self.elements.get(&keys_of(new, self.schema)).copied()
    }
}

/// The keys of an element as one text, with the defaults that keys may have.
fn keys_of(element: &Value, schema: &Structural) -> String {
    let default_of = |key: &str| schema.items.as_ref()?.properties.get(key)?.default.as_ref();
    let mut text = String::new();
    for key in &schema.list_map_keys {
        if let Some(value) = element.get(key).or_else(|| default_of(key)) {
            text.push_str(&value.to_string());
        }
        text.push(',');
    }
    text
}

fn has_doubles(values: &[Value]) -> bool {
    let mut seen = HashSet::with_capacity(values.len());
    !values.iter().all(|value| seen.insert(value.to_string()))
}

#[cfg(test)]
mod tests;
