//! Tests over data: expressions and rules with what the reference implementation (Kubernetes v1.36.4) makes of them,
//! to the letter of its messages and to the unit of its costs. And tests that nothing breaks the evaluator.

use std::sync::Arc;

use serde_json::Value as Json;
use skiff_meta::field::Path;

use crate::rules::{Budget, Validator, check_rules};
use crate::{Ast, DeclType, Env, Limits, Program, Schema, Value};

const EXPRESSIONS: &str = include_str!("../tests/data/expressions.jsonl");
const RULES: &str = include_str!("../tests/data/rules.jsonl");

/// Values with their types, as the data writes them.
fn show(value: &Value<'_>) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Int(value) => value.to_string(),
        Value::Uint(value) => format!("{value}u"),
        Value::Double(_) => format!("d{}", value.to_text().expect("a double has a text")),
        Value::String(text) => skiff_meta::field::quote(text),
        Value::Bytes(bytes) => bytes
            .iter()
            .fold("b".to_owned(), |text, byte| format!("{text}{byte:02x}")),
        Value::Duration(nanos) => format!("dur{nanos}"),
        Value::Timestamp(at) => format!("ts{at}"),
        Value::Optional(None) => "none".to_owned(),
        Value::Optional(Some(value)) => format!("some({})", show(value)),
        Value::List(list) => {
            let items: Vec<String> = list.iter().map(|item| show(&item.expect("element"))).collect();
            format!("[{}]", items.join(","))
        }
        Value::Map(map) => {
            let mut entries: Vec<String> = map
                .keys()
                .iter()
                .map(|key| {
                    let value = map.find(key).expect("value").expect("value");
                    format!("{}:{}", show(key), show(&value))
                })
                .collect();
            entries.sort();
            format!("{{{}}}", entries.join(","))
        }
        other => format!("?{}", other.type_name()),
    }
}

struct Fixture {
    schema: Schema,
    object: Json,
    env: Env,
}

impl Fixture {
    fn new() -> Self {
        let head: Json = serde_json::from_str(EXPRESSIONS.lines().next().expect("head")).expect("head");
        let schema = Schema::parse(&head["schema"]);
        let decl = Arc::new(DeclType::of(&schema, false, "selfType").expect("a type"));
        Self {
            env: Env::new()
                .declared("self", &decl)
                .declared("oldSelf", &decl)
                .sized_by(&decl),
            object: head["self"].clone(),
            schema,
        }
    }

    fn evaluate(&self, text: &str) -> Json {
        let mut outcome = serde_json::Map::new();
        let mut note = |name: &str, value: Json| outcome.insert(name.to_owned(), value);
        match Ast::compile(&self.env, text) {
            Err(errors) => {
                note("compile", errors.to_string().into());
            }
            Ok(ast) => {
                note("type", ast.output_type().to_string().into());
                match Program::new(&ast) {
                    Err(problem) => {
                        note("program", problem.into());
                    }
                    Ok(program) => {
                        let estimate = ast.estimate(&self.env);
                        note("est", format!("{}-{}", estimate.min, estimate.max).into());
                        let variables = |name: &str| {
                            (name == "self").then(|| Value::from_json(&self.object, &self.schema))
                        };
                        let evaluated = program.evaluate(&variables, &Limits::default());
                        if evaluated.cost > 0 {
                            note("cost", evaluated.cost.into());
                        }
                        match evaluated.result {
                            Ok(value) => note("result", show(&value).into()),
                            Err(error) => note("err", error.to_string().into()),
                        };
                    }
                }
            }
        }
        Json::Object(outcome)
    }
}

#[test]
fn expressions_are_as_upstream() {
    let fixture = Fixture::new();
    let mut count = 0;
    for line in EXPRESSIONS.lines().skip(1) {
        let mut expected: Json = serde_json::from_str(line).expect("a case");
        let text = expected["expr"].as_str().expect("an expression").to_owned();
        expected.as_object_mut().expect("a case").remove("expr");
        assert_eq!(fixture.evaluate(&text), expected, "{text}");
        count += 1;
    }
    assert!(count > 700, "{count}");
}

#[test]
fn rules_are_as_upstream() {
    for line in RULES.lines() {
        let case: Json = serde_json::from_str(line).expect("a case");
        let schema = Arc::new(Schema::parse(&case["schema"]));
        let sorted = |mut texts: Vec<String>| {
            texts.sort();
            Json::from(texts)
        };
        let path = Path::new("spec.validation.openAPIV3Schema");
        let findings = check_rules(&schema, &path, false);
        let findings = sorted(findings.iter().map(ToString::to_string).collect());
        assert_eq!(findings, case["check"], "{}", case["name"]);
        let Some(object) = case.get("obj") else {
            continue;
        };
        let mut budget = Budget::default();
        if let Some(limit) = case["budget"].as_i64() {
            budget.remaining = limit;
        }
        let outcome = Validator::new(&schema)
            .map(|validator| validator.validate(&Path::root(), object, case.get("old"), &mut budget))
            .unwrap_or_default();
        let errors = sorted(outcome.errors.iter().map(ToString::to_string).collect());
        assert_eq!(errors, case["errors"], "{}", case["name"]);
        assert_eq!(sorted(outcome.warnings), case["warnings"], "{}", case["name"]);
        assert_eq!(
            budget.remaining,
            case["remaining"].as_i64().expect("a number"),
            "{}",
            case["name"]
        );
    }
}

/// A small generator of numbers, the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below as u64) as usize
    }

    fn pick<'t>(&mut self, from: &[&'t str]) -> &'t str {
        from[self.next(from.len())]
    }

    /// An expression that is likely to compile, of a limited depth.
    fn expression(&mut self, depth: usize) -> String {
        let leaf = depth == 0;
        match self.next(if leaf { 6 } else { 16 }) {
            0 => self
                .pick(&[
                    "self.n",
                    "self.m",
                    "self.list",
                    "self.free",
                    "self.map",
                    "self.objs",
                    "x",
                ])
                .to_owned(),
            1 => self
                .pick(&[
                    "1",
                    "0",
                    "-9223372036854775808",
                    "2.5",
                    "1u",
                    "'a'",
                    "''",
                    "b'x'",
                    "null",
                ])
                .to_owned(),
            2 => self
                .pick(&[
                    "[]",
                    "{}",
                    "[1, 2]",
                    "{'a': 1}",
                    "optional.none()",
                    "self.ts",
                    "self.dur",
                ])
                .to_owned(),
            3 => self
                .pick(&[
                    "self.ios",
                    "self.unk",
                    "self.nested",
                    "dyn(1)",
                    "self.by",
                    "self.strs",
                ])
                .to_owned(),
            4 | 5 => self
                .pick(&["true", "self.b", "self.name", "self.d", "self.set", "self.lol"])
                .to_owned(),
            6..=8 => {
                let operator = self.pick(&[
                    "+", "-", "*", "/", "%", "==", "!=", "<", "<=", ">", ">=", "in", "&&", "||",
                ]);
                format!(
                    "({} {operator} {})",
                    self.expression(depth - 1),
                    self.expression(depth - 1)
                )
            }
            9 | 10 => {
                let call = self.pick(&[
                    "size()",
                    "all(x, x == 1)",
                    "exists(x, x > 1)",
                    "map(x, x)",
                    "filter(x, x != 1)",
                    "sum()",
                    "sort()",
                    "join(',')",
                    "split('')",
                    "distinct()",
                    "reverse()",
                    "trim()",
                    "first()",
                    "isSorted()",
                    "flatten()",
                    "transformMap(x, v, v)",
                    "optMap(x, x)",
                    "hasValue()",
                    "getHours()",
                    "charAt(1)",
                    "substring(1)",
                    "replace('', 'ab')",
                    "format([1])",
                    "matches('a*')",
                    "sortBy(x, x)",
                    "slice(0, 1)",
                    "indexOf('a')",
                ]);
                format!("dyn({}).{call}", self.expression(depth - 1))
            }
            11 => {
                let function = self.pick(&[
                    "int",
                    "string",
                    "double",
                    "uint",
                    "type",
                    "size",
                    "duration",
                    "timestamp",
                    "bool",
                    "bytes",
                    "dyn",
                    "quantity",
                    "ip",
                    "cidr",
                    "url",
                    "semver",
                    "isIP",
                    "lists.range",
                    "optional.of",
                    "!",
                    "-",
                ]);
                format!("{function}(dyn({}))", self.expression(depth - 1))
            }
            12 => format!("[{}, {}]", self.expression(depth - 1), self.expression(depth - 1)),
            13 => format!(
                "{}[dyn({})]",
                self.expression(depth - 1),
                self.expression(depth - 1)
            ),
            14 => format!(
                "(dyn({}) ? {} : {})",
                self.expression(depth - 1),
                self.expression(depth - 1),
                self.expression(depth - 1)
            ),
            _ => format!(
                "dyn({}).map(x, dyn({}))",
                self.expression(depth - 1),
                self.expression(depth - 1)
            ),
        }
    }
}

#[test]
fn random_expressions_end_within_their_limits() {
    let fixture = Fixture::new();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut compiled = 0;
    for _ in 0..3_000 {
        let text = random.expression(4);
        let outcome = fixture.evaluate(&text);
        compiled += usize::from(outcome.get("type").is_some());
        let cost = outcome["cost"].as_u64().unwrap_or(0);
        // One step may go over the limit, and then it is the last.
        assert!(
            cost <= crate::limits::PER_CALL_LIMIT || outcome.get("err").is_some(),
            "{text}"
        );
    }
    assert!(compiled > 300, "{compiled}");
}

#[test]
fn random_text_never_breaks_the_parser() {
    let fixture = Fixture::new();
    let mut random = Random(42);
    let tokens = [
        "self", ".", "?", "[", "]", "(", ")", "{", "}", ",", ":", "+", "-", "!", "==", "&&", "||", "in",
        "'a'", "1", "1u", "0x", "1e", ".5", "\"", "'''", "r'", "b'\\x", "\\", "\n", "//", "`a`", "has",
        "all", "map", "true", "null", " ", "é", "\u{0}", "_", "x", "optMap", "sortBy", "format", "%", "=",
        "&",
    ];
    for _ in 0..20_000 {
        let length = random.next(14);
        let text: String = (0..length).map(|_| random.pick(&tokens)).collect();
        // Whatever it says, it says something.
        let _ = Ast::compile(&fixture.env, &text);
    }
}

#[test]
fn deep_and_long_expressions_are_bounded() {
    let fixture = Fixture::new();
    let refused = |text: &str| {
        let outcome = fixture.evaluate(text);
        assert!(outcome.get("compile").is_some(), "{outcome}");
    };
    let accepted = |text: &str| {
        let outcome = fixture.evaluate(text);
        assert!(outcome.get("type").is_some(), "{outcome}");
    };
    let nested = |open: &str, inner: &str, close: &str, count: usize| {
        format!("{}{inner}{}", open.repeat(count), close.repeat(count))
    };
    accepted(&nested("(", "1", ")", 200));
    accepted(&nested("[", "1", "]", 200));
    accepted(&nested("[1].all(x, ", "true", ")", 100));
    accepted(&nested("dyn(", "1", ")", 200));
    accepted(&format!("1{}", " + 1".repeat(200)));
    accepted(&format!("true{}", " && true".repeat(5_000)));
    accepted(&nested("!", "true", "", 10_001));
    for (open, inner, close) in [
        ("(", "1", ")"),
        ("[", "1", "]"),
        ("{'a': ", "1", "}"),
        ("[1].all(x, ", "true", ")"),
        ("self.list[", "0", "]"),
        ("true ? 1 : ", "1", ""),
        ("-", "x", ""),
    ] {
        refused(&nested(open, inner, close, 20_000 / open.len()));
    }
    refused(&format!("self{}", ".a".repeat(10_000)));
    refused(&format!("1{}", " + 1".repeat(10_000)));
    refused(&format!("optional.of(1){}", ".optMap(x, x)".repeat(40)));
    refused(&" ".repeat(100_001));
}

#[test]
fn expensive_evaluations_are_stopped() {
    let fixture = Fixture::new();
    let check = |text: &str| {
        let outcome = fixture.evaluate(text);
        assert_eq!(
            outcome["err"], "operation cancelled: actual cost limit exceeded",
            "{text}: {outcome}"
        );
    };
    check("lists.range(1000).all(x, lists.range(1000).all(y, lists.range(1000).all(z, x + y + z >= 0)))");
    check("lists.range(900000000000)");
    check("lists.range(2000).map(x, x).distinct().size() > 0");
    check("sets.contains(lists.range(5000), lists.range(5000))");
    check("lists.range(9000).map(x, lists.range(9000)).size() > 0");
}

#[test]
fn work_that_cost_does_not_count_is_stopped() {
    let text = "x".repeat(300_000);
    let object = serde_json::json!({
        "many": (0..2_000).collect::<Vec<_>>(),
        "set": (0..20_000).map(|number| number.to_string()).collect::<Vec<_>>(),
        "map": (0..20_000).map(|number| (number.to_string(), number.into())).collect::<serde_json::Map<_, _>>(),
        "empty": vec![""; 50_000],
        "bytes": "AAAA".repeat(200_000),
        "text": text,
    });
    let schema = Schema::parse(&serde_json::json!({"type": "object", "properties": {
        "many": {"type": "array", "items": {"type": "integer"}},
        "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "empty": {"type": "array", "items": {"type": "string"}},
        "bytes": {"type": "string", "format": "byte"},
        "text": {"type": "string"},
    }}));
    let decl = Arc::new(DeclType::of(&schema, true, "selfType").expect("a type"));
    let env = Env::new().declared("self", &decl);
    let check = |inner: &str| {
        let text = format!("self.many.all(x, self.many.all(y, {inner}))");
        let program = Program::compile(&env, &text).expect("compiles");
        let variables = |_: &str| Some(Value::from_json(&object, &schema));
        let evaluated = program.evaluate(&variables, &Limits::default());
        assert_eq!(
            evaluated.result.map(|_| ()),
            Err(crate::EvalError::CostLimit),
            "{inner}"
        );
        // It was not the cost that ran out.
        assert!(
            evaluated.cost < crate::limits::PER_CALL_LIMIT,
            "{inner}: {}",
            evaluated.cost
        );
    };
    check("self == self");
    check("!(self != self)");
    check("self.set + self.set != ['a']");
    check("self.empty.join() == ''");
    check("self.bytes.size() > 0");
    check("'%s'.format([self.map]) != ''");
    check("''.matches('(a|b){100}' + string(x)) || true");
}

#[test]
fn evaluation_can_be_interrupted() {
    let env = Env::new();
    let program = Program::compile(&env, "lists.range(10000).all(x, x >= 0)").expect("compiles");
    let limits = Limits {
        interrupted: Some(&|| true),
        ..Limits::default()
    };
    let none = |_: &str| None;
    let evaluated = program.evaluate(&none, &limits);
    assert_eq!(evaluated.result.map(|_| ()), Err(crate::EvalError::Interrupted));
}
