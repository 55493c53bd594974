//! Label and field selectors: parsing (with upstream's complaints), printing, matching.

use crate::names;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
    GreaterThan,
    LessThan,
}

/// One condition on one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    pub key: String,
    pub operator: Operator,
    pub values: BTreeSet<String>,
}

impl Requirement {
    pub fn matches(&self, value: Option<&str>) -> bool {
        match (&self.operator, value) {
            (Operator::In, Some(value)) => self.values.contains(value),
            (Operator::NotIn, Some(value)) => !self.values.contains(value),
            (Operator::NotIn | Operator::DoesNotExist, None) | (Operator::Exists, Some(_)) => true,
            (Operator::GreaterThan | Operator::LessThan, Some(value)) => {
                let bound = self.values.first().and_then(|v| v.parse::<i64>().ok());
                match (value.parse::<i64>(), bound) {
                    (Ok(value), Some(bound)) if self.operator == Operator::GreaterThan => value > bound,
                    (Ok(value), Some(bound)) => value < bound,
                    _ => false,
                }
            }
            (Operator::In | Operator::Exists | Operator::GreaterThan | Operator::LessThan, None)
            | (Operator::DoesNotExist, Some(_)) => false,
        }
    }
}

/// All requirements must hold; none means everything matches.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LabelSelector {
    pub requirements: Vec<Requirement>,
    /// A missing selector in a spec selects nothing, an empty one everything.
    nothing: bool,
}

impl LabelSelector {
    pub fn everything() -> Self {
        Self::default()
    }

    pub fn nothing() -> Self {
        Self {
            requirements: Vec::new(),
            nothing: true,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty() && !self.nothing
    }

    pub fn matches<'a>(&self, get: impl Fn(&str) -> Option<&'a str>) -> bool {
        !self.nothing && self.requirements.iter().all(|r| r.matches(get(&r.key)))
    }

    /// The labels that everything selected has, with their values: what an index can answer.
    pub fn required(&self) -> impl Iterator<Item = (&str, &str)> {
        self.requirements.iter().filter_map(|requirement| {
            let mut values = requirement.values.iter();
            match (&requirement.operator, values.next(), values.next()) {
                (Operator::In, Some(value), None) => Some((requirement.key.as_str(), value.as_str())),
                _ => None,
            }
        })
    }

    /// Matches against the `labels` object of some metadata; `Null` has no labels.
    pub fn matches_value(&self, labels: &Value) -> bool {
        self.matches(|key| labels.get(key).and_then(Value::as_str))
    }

    /// The query-string form, such as `a=b,c!=d,e in (x,y),!f,g>1`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let requirements = Parser::new(text).requirements()?;
        Ok(Self {
            requirements,
            nothing: false,
        })
    }

    /// Reads a `metav1.LabelSelector` (`matchLabels`, `matchExpressions`). `Null` selects nothing.
    pub fn from_value(selector: &Value) -> Result<Self, String> {
        if selector.is_null() {
            return Ok(Self::nothing());
        }
        let mut requirements = Vec::new();
        for (key, value) in selector
            .get("matchLabels")
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
        {
            let value = value.as_str().unwrap_or_default().to_owned();
            requirements.push(Requirement {
                key: key.clone(),
                operator: Operator::In,
                values: BTreeSet::from([value]),
            });
        }
        for expression in selector
            .get("matchExpressions")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let operator = match expression
                .get("operator")
                .and_then(Value::as_str)
                .unwrap_or_default()
            {
                "In" => Operator::In,
                "NotIn" => Operator::NotIn,
                "Exists" => Operator::Exists,
                "DoesNotExist" => Operator::DoesNotExist,
                other => {
                    return Err(format!(
                        "{} is not a valid label selector operator",
                        crate::field::quote(other)
                    ));
                }
            };
            let values = expression
                .get("values")
                .and_then(Value::as_array)
                .into_iter()
                .flatten();
            requirements.push(Requirement {
                key: expression
                    .get("key")
                    .and_then(Value::as_str)
                    .unwrap_or_default()
                    .to_owned(),
                operator,
                values: values.filter_map(Value::as_str).map(str::to_owned).collect(),
            });
        }
        Ok(Self {
            requirements,
            nothing: false,
        })
    }
}

impl fmt::Display for LabelSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, requirement) in self.requirements.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            let key = &requirement.key;
            let values: Vec<&str> = requirement.values.iter().map(String::as_str).collect();
            match (&requirement.operator, values.as_slice()) {
                (Operator::Exists, _) => write!(f, "{key}")?,
                (Operator::DoesNotExist, _) => write!(f, "!{key}")?,
                (Operator::In, [one]) => write!(f, "{key}={one}")?,
                (Operator::NotIn, [one]) => write!(f, "{key}!={one}")?,
                (Operator::In, many) => write!(f, "{key} in ({})", many.join(","))?,
                (Operator::NotIn, many) => write!(f, "{key} notin ({})", many.join(","))?,
                (Operator::GreaterThan, many) => write!(f, "{key}>{}", many.join(","))?,
                (Operator::LessThan, many) => write!(f, "{key}<{}", many.join(","))?,
            }
        }
        Ok(())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token<'a> {
    End,
    Word(&'a str),
    Symbol(&'static str),
}

impl Token<'_> {
    fn text(&self) -> &str {
        match self {
            Token::End => "",
            Token::Word(text) => text,
            Token::Symbol(text) => text,
        }
    }
}

struct Parser<'a> {
    tokens: Vec<Token<'a>>,
    at: usize,
}

const SYMBOLS: [&str; 9] = ["==", "!=", "=", "!", "(", ")", ",", "<", ">"];

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Self {
        let mut tokens = Vec::new();
        let mut rest = text;
        loop {
            rest = rest.trim_start_matches([' ', '\t', '\r', '\n']);
            if rest.is_empty() {
                break;
            }
            if let Some(symbol) = SYMBOLS.iter().find(|s| rest.starts_with(**s)) {
                tokens.push(Token::Symbol(symbol));
                rest = &rest[symbol.len()..];
                continue;
            }
            let end = rest
                .find(|c: char| {
                    matches!(
                        c,
                        '=' | '!' | '(' | ')' | ',' | '<' | '>' | ' ' | '\t' | '\r' | '\n'
                    )
                })
                .unwrap_or(rest.len());
            tokens.push(Token::Word(&rest[..end]));
            rest = &rest[end..];
        }
        Self { tokens, at: 0 }
    }

    fn peek(&self) -> Token<'a> {
        self.tokens.get(self.at).cloned().unwrap_or(Token::End)
    }

    fn next(&mut self) -> Token<'a> {
        let token = self.peek();
        self.at += 1;
        token
    }

    fn requirements(mut self) -> Result<Vec<Requirement>, String> {
        let mut found = Vec::new();
        loop {
            match self.peek() {
                Token::End => return Ok(found),
                Token::Word(_) | Token::Symbol("!") => {
                    let requirement = self
                        .requirement()
                        .map_err(|e| format!("unable to parse requirement: {e}"))?;
                    found.push(requirement);
                    match self.next() {
                        Token::End => return Ok(found),
                        Token::Symbol(",") => match self.peek() {
                            Token::Word(_) | Token::Symbol("!") => {}
                            other => {
                                return Err(format!(
                                    "found '{}', expected: identifier after ','",
                                    other.text()
                                ));
                            }
                        },
                        other => {
                            return Err(format!(
                                "found '{}', expected: ',' or 'end of string'",
                                other.text()
                            ));
                        }
                    }
                }
                other => {
                    return Err(format!(
                        "found '{}', expected: !, identifier, or 'end of string'",
                        other.text()
                    ));
                }
            }
        }
    }

    fn requirement(&mut self) -> Result<Requirement, String> {
        let negated = self.peek() == Token::Symbol("!");
        if negated {
            self.next();
        }
        let key = match self.next() {
            Token::Word(word) => word.to_owned(),
            other => return Err(format!("found '{}', expected: identifier", other.text())),
        };
        let complaints = names::qualified_name(&key);
        if !complaints.is_empty() {
            return Err(format!(
                "<nil>: Invalid value: {}: {}",
                crate::field::quote(&key),
                complaints.join("; ")
            ));
        }
        let plain = |operator| Requirement {
            key: key.clone(),
            operator,
            values: BTreeSet::new(),
        };
        if negated {
            return Ok(plain(Operator::DoesNotExist));
        }
        match self.peek() {
            Token::End | Token::Symbol(",") => return Ok(plain(Operator::Exists)),
            _ => {}
        }
        let (operator, set) = match self.next() {
            Token::Word("in") => (Operator::In, true),
            Token::Word("notin") => (Operator::NotIn, true),
            Token::Symbol("=" | "==") => (Operator::In, false),
            Token::Symbol("!=") => (Operator::NotIn, false),
            Token::Symbol(">") => (Operator::GreaterThan, false),
            Token::Symbol("<") => (Operator::LessThan, false),
            other => {
                return Err(format!(
                    "found '{}', expected: in, notin, =, ==, !=, gt, lt",
                    other.text()
                ));
            }
        };
        let values = if set {
            self.set()?
        } else {
            BTreeSet::from([self.exact_value()?])
        };
        if matches!(operator, Operator::GreaterThan | Operator::LessThan) {
            if let Some(value) = values.iter().find(|v| v.parse::<i64>().is_err()) {
                return Err(format!(
                    "values[0]: Invalid value: {}: for 'Gt', 'Lt' operators, the value must be an integer",
                    crate::field::quote(value)
                ));
            }
        } else {
            for (index, value) in values.iter().enumerate() {
                if let Some(complaint) = names::label_value(value).first() {
                    return Err(format!(
                        "values[{index}][{key}]: Invalid value: {}: {complaint}",
                        crate::field::quote(value)
                    ));
                }
            }
        }
        Ok(Requirement {
            key,
            operator,
            values,
        })
    }

    fn exact_value(&mut self) -> Result<String, String> {
        match self.peek() {
            Token::End | Token::Symbol(",") => Ok(String::new()),
            Token::Word(word) => {
                self.next();
                Ok(word.to_owned())
            }
            other @ Token::Symbol(_) => Err(format!("found '{}', expected: identifier", other.text())),
        }
    }

    fn set(&mut self) -> Result<BTreeSet<String>, String> {
        match self.next() {
            Token::Symbol("(") => {}
            other => return Err(format!("found '{}' expected: '('", other.text())),
        }
        let mut values = BTreeSet::new();
        // An empty element, as in `(a,)` or `()`, is the empty string, as upstream reads it.
        loop {
            match self.next() {
                Token::Word(word) => {
                    values.insert(word.to_owned());
                    match self.next() {
                        Token::Symbol(",") => {
                            if self.peek() == Token::Symbol(")") {
                                values.insert(String::new());
                            }
                        }
                        Token::Symbol(")") => return Ok(values),
                        other => return Err(format!("found '{}', expected: ',' or ')'", other.text())),
                    }
                }
                Token::Symbol(",") => {
                    values.insert(String::new());
                }
                Token::Symbol(")") => {
                    if values.is_empty() {
                        values.insert(String::new());
                    }
                    return Ok(values);
                }
                other => {
                    return Err(format!(
                        "found '{}', expected: ',', ')' or identifier",
                        other.text()
                    ));
                }
            }
        }
    }
}

/// A conjunction of `field=value` and `field!=value`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FieldSelector {
    pub terms: Vec<FieldTerm>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldTerm {
    pub field: String,
    pub equal: bool,
    pub value: String,
}

impl FieldSelector {
    pub fn everything() -> Self {
        Self::default()
    }

    pub fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// A field that the object does not have counts as the empty string, as upstream does.
    pub fn matches<'a>(&self, get: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.terms
            .iter()
            .all(|t| (get(&t.field).unwrap_or_default() == t.value) == t.equal)
    }

    /// The value that `field` must equal, if the selector pins one.
    pub fn required_value(&self, field: &str) -> Option<&str> {
        self.terms
            .iter()
            .find(|t| t.equal && t.field == field)
            .map(|t| t.value.as_str())
    }

    pub fn parse(text: &str) -> Result<Self, String> {
        let mut terms = Vec::new();
        for part in split_unescaped(text) {
            if part.is_empty() {
                continue;
            }
            let invalid = || format!("invalid selector: '{text}'; can't understand '{part}'");
            let at = part.find(['=', '!']).ok_or_else(invalid)?;
            let (field, rest) = part.split_at(at);
            let (equal, value) = if let Some(value) = rest.strip_prefix("!=") {
                (false, value)
            } else if let Some(value) = rest.strip_prefix("==").or_else(|| rest.strip_prefix('=')) {
                (true, value)
            } else {
                return Err(invalid());
            };
            terms.push(FieldTerm {
                field: field.to_owned(),
                equal,
                value: unescape(value)?,
            });
        }
        Ok(Self { terms })
    }
}

/// A value as a field selector has it.
pub fn escape(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace(',', "\\,")
        .replace('=', "\\=")
}

impl fmt::Display for FieldSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, term) in self.terms.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            let sign = if term.equal { "=" } else { "!=" };
            write!(f, "{comma}{}{sign}{}", term.field, escape(&term.value))?;
        }
        Ok(())
    }
}

fn split_unescaped(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut escaped) = (Vec::new(), 0, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b',' => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn unescape(value: &str) -> Result<String, String> {
    let mut plain = String::with_capacity(value.len());
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some(c @ ('\\' | ',' | '=')) => plain.push(c),
                Some(c) => return Err(format!("invalid field selector: invalid escape sequence: \\{c}")),
                None => return Err("invalid field selector: invalid escape sequence: \\".to_owned()),
            },
            ',' | '=' => {
                return Err(format!(
                    "invalid field selector: unescaped character in value: {}",
                    c as u32
                ));
            }
            c => plain.push(c),
        }
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_selectors_match() {
        let labels = serde_json::json!({"app": "web", "tier": "front", "n": "5"});
        for (text, expected) in [
            ("", true),
            ("app=web", true),
            ("app==web,tier!=back", true),
            ("app in (web, api)", true),
            ("app notin (web)", false),
            ("missing", false),
            ("!missing", true),
            ("missing!=x", true),
            ("n>4,n<6", true),
            ("n>5", false),
            ("app=", false),
        ] {
            assert_eq!(
                LabelSelector::parse(text).unwrap().matches_value(&labels),
                expected,
                "{text}"
            );
        }
    }

    #[test]
    fn label_selectors_complain_as_upstream() {
        for (text, expected) in [
            ("a=b,", "found '', expected: identifier after ','"),
            (
                "a b",
                "unable to parse requirement: found 'b', expected: in, notin, =, ==, !=, gt, lt",
            ),
            ("=", "found '=', expected: !, identifier, or 'end of string'"),
            ("a in b", "unable to parse requirement: found 'b' expected: '('"),
        ] {
            assert_eq!(LabelSelector::parse(text).unwrap_err(), expected, "{text}");
        }
    }

    #[test]
    fn selectors_print_what_they_parse() {
        for text in ["a=b", "a!=b", "a in (b,c)", "!a", "a", "a>1"] {
            assert_eq!(LabelSelector::parse(text).unwrap().to_string(), text);
        }
        let text = "a=b\\,c,d!=e";
        assert_eq!(FieldSelector::parse(text).unwrap().to_string(), text);
    }

    #[test]
    fn a_missing_selector_selects_nothing() {
        assert!(!LabelSelector::from_value(&Value::Null).unwrap().matches(|_| None));
        assert!(
            LabelSelector::from_value(&serde_json::json!({}))
                .unwrap()
                .matches(|_| None)
        );
    }

    #[test]
    fn field_selectors() {
        let selector = FieldSelector::parse("spec.nodeName=n1,status.phase!=Failed").unwrap();
        assert!(selector.matches(|f| (f == "spec.nodeName").then_some("n1")));
        assert!(!selector.matches(|_| None));
        assert_eq!(selector.required_value("spec.nodeName"), Some("n1"));
        assert_eq!(
            FieldSelector::parse("abc").unwrap_err(),
            "invalid selector: 'abc'; can't understand 'abc'"
        );
    }
}
