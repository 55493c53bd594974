//! JSONPath as Kubernetes writes it: `.spec.x`, `.items[0]`, `['a.b']`, `[*]`, `[1:3]`,
//! `[?(@.type=="Ready")].status`, `..name`. Finding is bounded by the size of the object.

use serde_json::Value;

#[derive(Debug, Clone, PartialEq)]
pub struct JsonPath(Vec<Step>);

#[derive(Debug, Clone, PartialEq)]
enum Step {
    Field(String),
    All,
    Slice {
        from: Option<i64>,
        to: Option<i64>,
    },
    Index(i64),
    Filter {
        left: Operand,
        test: Option<(Test, Operand)>,
    },
    Deep(String),
}

#[derive(Debug, Clone, PartialEq)]
enum Operand {
    Path(Vec<Step>),
    Literal(Value),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Test {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

impl JsonPath {
    /// Reads a path without the braces around it.
    pub fn parse(text: &str) -> Result<JsonPath, String> {
        let mut parser = Parser { rest: text.trim() };
        let steps = parser.steps()?;
        if parser.rest.is_empty() {
            Ok(JsonPath(steps))
        } else {
            Err(format!("unexpected {:?} in a path", parser.rest))
        }
    }

    pub fn find<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        follow(&self.0, value)
    }
}

struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    fn eat(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn steps(&mut self) -> Result<Vec<Step>, String> {
        let mut steps = Vec::new();
        self.eat("$");
        loop {
            if self.eat("..") {
                steps.push(Step::Deep(self.name()?));
            } else if self.eat(".") {
                if self.rest.starts_with('[') || self.rest.is_empty() {
                    continue;
                }
                steps.push(if self.eat("*") {
                    Step::All
                } else {
                    Step::Field(self.name()?)
                });
            } else if self.eat("[") {
                steps.push(self.bracket()?);
            } else {
                return Ok(steps);
            }
        }
    }

    /// A plain name; a backslash keeps the next character.
    fn name(&mut self) -> Result<String, String> {
        let mut name = String::new();
        let mut chars = self.rest.char_indices();
        let mut end = self.rest.len();
        while let Some((at, char)) = chars.next() {
            match char {
                '\\' => name.extend(chars.next().map(|(_, next)| next)),
                '.' | '[' | ']' | ')' | ' ' | '=' | '!' | '<' | '>' | '@' | '{' | '}' => {
                    end = at;
                    break;
                }
                char => name.push(char),
            }
        }
        self.rest = &self.rest[end..];
        if name.is_empty() {
            return Err(format!("a name is missing before {:?}", self.rest));
        }
        Ok(name)
    }

    fn bracket(&mut self) -> Result<Step, String> {
        if self.eat("?(") {
            let step = self.filter()?;
            return if self.eat(")]") {
                Ok(step)
            } else {
                Err("unterminated filter".to_owned())
            };
        }
        let end = self.closing()?;
        let inside = self.rest[..end].trim();
        self.rest = &self.rest[end + 1..];
        if inside == "*" {
            return Ok(Step::All);
        }
        for quote in ['\'', '"'] {
            if let Some(name) = inside
                .strip_prefix(quote)
                .and_then(|rest| rest.strip_suffix(quote))
            {
                return Ok(Step::Field(name.replace('\\', "")));
            }
        }
        let number = |text: &str| -> Result<Option<i64>, String> {
            if text.is_empty() {
                return Ok(None);
            }
            text.parse()
                .map(Some)
                .map_err(|_| format!("invalid array index {text}"))
        };
        if let Some((from, rest)) = inside.split_once(':') {
            let to = rest.split(':').next().unwrap_or("");
            return Ok(Step::Slice {
                from: number(from)?,
                to: number(to)?,
            });
        }
        number(inside)?
            .map(Step::Index)
            .ok_or_else(|| "an empty index".to_owned())
    }

    /// Where the bracket ends, quotes respected.
    fn closing(&self) -> Result<usize, String> {
        let mut quote = None;
        for (at, char) in self.rest.char_indices() {
            match (quote, char) {
                (None, ']') => return Ok(at),
                (None, '\'' | '"') => quote = Some(char),
                (Some(open), char) if open == char => quote = None,
                _ => {}
            }
        }
        Err("unterminated array".to_owned())
    }

    fn filter(&mut self) -> Result<Step, String> {
        let left = self.operand()?;
        self.rest = self.rest.trim_start();
        const TESTS: [(&str, Test); 6] = [
            ("==", Test::Equal),
            ("!=", Test::NotEqual),
            ("<=", Test::LessOrEqual),
            (">=", Test::GreaterOrEqual),
            ("<", Test::Less),
            (">", Test::Greater),
        ];
        for (token, test) in TESTS {
            if self.eat(token) {
                let right = self.operand()?;
                self.rest = self.rest.trim_start();
                return Ok(Step::Filter {
                    left,
                    test: Some((test, right)),
                });
            }
        }
        Ok(Step::Filter { left, test: None })
    }

    fn operand(&mut self) -> Result<Operand, String> {
        self.rest = self.rest.trim_start();
        if self.eat("@") {
            return Ok(Operand::Path(self.steps()?));
        }
        for quote in ['\'', '"'] {
            if let Some(rest) = self.rest.strip_prefix(quote) {
                let end = rest.find(quote).ok_or("unterminated quoted string")?;
                self.rest = &rest[end + 1..];
                return Ok(Operand::Literal(Value::String(rest[..end].to_owned())));
            }
        }
        let end = self
            .rest
            .find([')', ' ', '=', '!', '<', '>'])
            .unwrap_or(self.rest.len());
        let word = &self.rest[..end];
        let value = serde_json::from_str(word).map_err(|_| format!("unrecognized {word:?} in a filter"))?;
        self.rest = &self.rest[end..];
        Ok(Operand::Literal(value))
    }
}

fn follow<'a>(steps: &[Step], value: &'a Value) -> Vec<&'a Value> {
    let mut found = vec![value];
    for step in steps {
        found = found.into_iter().flat_map(|value| take(step, value)).collect();
    }
    found
}

fn take<'a>(step: &Step, value: &'a Value) -> Vec<&'a Value> {
    match (step, value) {
        (Step::Field(name), value) => value.get(name).into_iter().collect(),
        (Step::All, Value::Array(values)) => values.iter().collect(),
        (Step::All, Value::Object(map)) => map.values().collect(),
        (Step::Index(index), Value::Array(values)) => place(*index, values.len())
            .and_then(|at| values.get(at))
            .into_iter()
            .collect(),
        (Step::Slice { from, to }, Value::Array(values)) => {
            let from = place(from.unwrap_or(0), values.len()).unwrap_or(0);
            let to = to
                .map_or(Some(values.len()), |to| place(to, values.len()))
                .unwrap_or(0);
            values.iter().take(to).skip(from).collect()
        }
        (Step::Filter { left, test }, Value::Array(values)) => values
            .iter()
            .filter(|value| passes(left, test.as_ref(), value))
            .collect(),
        (Step::Deep(name), value) => {
            let mut found = Vec::new();
            deep(name, value, &mut found);
            found
        }
        _ => Vec::new(),
    }
}

/// Negative places count from the end.
fn place(index: i64, length: usize) -> Option<usize> {
    usize::try_from(if index < 0 { index + length as i64 } else { index }).ok()
}

fn deep<'a>(name: &str, value: &'a Value, found: &mut Vec<&'a Value>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get(name));
            map.values().for_each(|value| deep(name, value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| deep(name, value, found)),
        _ => {}
    }
}

fn passes(left: &Operand, test: Option<&(Test, Operand)>, value: &Value) -> bool {
    let operand = |operand: &Operand| match operand {
        Operand::Literal(value) => Some(value.clone()),
        Operand::Path(steps) => follow(steps, value).first().map(|value| (*value).clone()),
    };
    let Some(left) = operand(left) else { return false };
    let Some((test, right)) = test else { return true };
    let Some(right) = operand(right) else { return false };
    let order = match (left.as_f64(), right.as_f64(), left.as_str(), right.as_str()) {
        (Some(a), Some(b), ..) => a.partial_cmp(&b),
        (_, _, Some(a), Some(b)) => Some(a.cmp(b)),
        _ if left == right => Some(std::cmp::Ordering::Equal),
        _ => None,
    };
    match test {
        Test::Equal => order.is_some_and(|o| o.is_eq()),
        Test::NotEqual => !order.is_some_and(|o| o.is_eq()),
        Test::Less => order.is_some_and(|o| o.is_lt()),
        Test::LessOrEqual => order.is_some_and(|o| o.is_le()),
        Test::Greater => order.is_some_and(|o| o.is_gt()),
        Test::GreaterOrEqual => order.is_some_and(|o| o.is_ge()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn paths() {
        let object = json!({"spec": {"a": 1, "list": [{"n": "x", "v": 1}, {"n": "y", "v": 2}]},
            "metadata": {"annotations": {"a.b/c": "d"}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other", "status": "False"}]}});
        let check = |path: &str, expected: Value| {
            let found = JsonPath::parse(path).expect(path);
            let found: Vec<Value> = found.find(&object).into_iter().cloned().collect();
            assert_eq!(Value::Array(found), expected, "{path}");
        };
        check(".spec.a", json!([1]));
        check(".spec.missing.deeper", json!([]));
        check(".spec.list[0].n", json!(["x"]));
        check(".spec.list[-1].n", json!(["y"]));
        check(".spec.list[*].v", json!([1, 2]));
        check(".spec.list[0:1].v", json!([1]));
        check(".metadata.annotations.a\\.b/c", json!(["d"]));
        check(".metadata.annotations['a\\.b/c']", json!(["d"]));
        check(".status.conditions[?(@.type==\"Ready\")].status", json!(["True"]));
        check(
            ".status.conditions[?(@.type != 'Ready')].status",
            json!(["False"]),
        );
        check(".spec.list[?(@.v > 1)].n", json!(["y"]));
        check("..n", json!(["x", "y"]));
        for bad in [".spec[", ".spec[?(@.a", ".spec.list[x]", "spec..["] {
            assert!(JsonPath::parse(bad).is_err(), "{bad}");
        }
    }
}
