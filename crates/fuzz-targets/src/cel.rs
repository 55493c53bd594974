//! CEL: expressions compiled and evaluated, and the rules of a schema on objects. Every evaluation has a bound.

use std::sync::{Arc, LazyLock};

use serde_json::{Value as Json, json};
use skiff_cel::rules::{Budget, Validator, check_rules};
use skiff_cel::{Ast, DeclType, Env, Limits, Program, Schema, Value};
use skiff_meta::field::Path;

use crate::input;

/// Small, so that a run is short and the limit is met often.
const COST_LIMIT: u64 = 50_000;

struct Fixture {
    env: Env,
    schema: Schema,
    object: Json,
}

static FIXTURE: LazyLock<Fixture> = LazyLock::new(|| {
    let text = json!({"type": "string", "maxLength": 64});
    let schema = json!({"type": "object", "properties": {
        "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"}, "s": text,
        "t": {"type": "string", "format": "date-time"}, "d": {"type": "string", "format": "duration"},
        "y": {"type": "string", "format": "byte"}, "io": {"x-kubernetes-int-or-string": true},
        "list": {"type": "array", "maxItems": 8, "items": text},
        "ints": {"type": "array", "items": {"type": "integer"}},
        "set": {"type": "array", "x-kubernetes-list-type": "set", "items": text},
        "keyed": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
            "items": {"type": "object", "properties": {"k": text, "v": {"type": "integer"}}}},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "o": {"type": "object", "properties": {"p": text, "missing": text}},
        "nil": {"type": "string", "nullable": true},
    }});
    let schema = Schema::parse(&schema);
    let declared = Arc::new(DeclType::of(&schema, false, "selfType").expect("the schema has a type"));
    Fixture {
        env: Env::new()
            .declared("self", &declared)
            .declared("oldSelf", &declared)
            .sized_by(&declared),
        object: json!({"i": 7, "n": 1.5, "b": true, "s": "abc", "t": "2024-01-02T03:04:05Z", "d": "90s", "y": "aGk=",
            "io": "80%", "list": ["a", "b", "c"], "ints": [3, 1, 2], "set": ["x", "y"],
            "keyed": [{"k": "a", "v": 1}, {"k": "b", "v": 2}], "map": {"one": 1, "two": 2}, "o": {"p": "q"}, "nil": null}),
        schema,
    }
});

pub fn expression(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let fixture = &*FIXTURE;
    let ast = match Ast::compile(&fixture.env, text) {
        Ok(ast) => ast,
        Err(errors) => {
            let _ = errors.to_string();
            return;
        }
    };
    let estimate = ast.estimate(&fixture.env);
    assert!(estimate.min <= estimate.max, "{} {}", estimate.min, estimate.max);
    let _ = ast.output_type().to_string();
    let Ok(program) = Program::new(&ast) else {
        return;
    };
    let run = || {
        let variables = |name: &str| {
            matches!(name, "self" | "oldSelf").then(|| Value::from_json(&fixture.object, &fixture.schema))
        };
        let limits = Limits {
            cost: COST_LIMIT,
            interrupted: None,
        };
        let evaluated = program.evaluate(&variables, &limits);
        if evaluated.result.is_ok() {
            assert!(
                evaluated.cost <= COST_LIMIT,
                "a result at a cost of {}",
                evaluated.cost
            );
        }
        (
            evaluated.cost,
            evaluated.result.map(drop).map_err(|error| error.to_string()),
        )
    };
    assert_eq!(run(), run(), "evaluating is a function");
}

pub fn rules(data: &[u8]) {
    let Some([schema, object, old]) = input::documents::<3>(data) else {
        return;
    };
    let (Some(schema), Some(object)) = (input::json(schema), input::json(object)) else {
        return;
    };
    let old = input::json(old);
    let schema = Schema::parse(&schema);
    let _ = check_rules(&schema, &Path::new("spec.validation.openAPIV3Schema"), false);
    let Some(validator) = Validator::new(&schema) else {
        return;
    };
    let mut budget = Budget { remaining: 200_000 };
    let _ = validator.validate(&Path::root(), &object, old.as_ref(), &mut budget);
}
