//! The messages are those that kube-apiserver v1.36.4 gives for schemas and objects of these shapes.

use serde_json::{Value, json};
use skiff_meta::field::Path;

use super::*;

fn messages(schema: Value, old: Option<Value>, value: Value) -> Vec<String> {
    let schema = Structural::parse(&schema);
    validate_update(&value, old.as_ref(), &schema, &Path::root())
        .iter()
        .map(ToString::to_string)
        .collect()
}

fn property(schema: Value) -> Value {
    json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {"a": schema}}}})
}

#[test]
fn keywords() {
    let check = |schema: Value, value: Value, expected: &[&str]| {
        assert_eq!(
            messages(property(schema.clone()), None, json!({"spec": {"a": value}})),
            expected,
            "{schema}"
        );
    };
    check(
        json!({"type": "integer"}),
        json!("x"),
        &["spec.a: Invalid value: \"string\": spec.a in body must be of type integer: \"string\""],
    );
    check(json!({"type": "integer"}), json!(1.0), &[]);
    check(json!({"type": "number"}), json!(1), &[]);
    check(
        json!({"type": "string"}),
        json!(null),
        &["spec.a: Invalid value: \"null\": spec.a in body must be of type string: \"null\""],
    );
    check(json!({"type": "string", "nullable": true}), json!(null), &[]);
    check(json!({"x-kubernetes-int-or-string": true}), json!("x"), &[]);
    check(
        json!({"x-kubernetes-int-or-string": true}),
        json!(true),
        &["spec.a: Invalid value: \"boolean\": spec.a in body must be of type integer,string: \"boolean\""],
    );
    check(
        json!({"type": "string", "maxLength": 2}),
        json!("abc"),
        &["spec.a: Too long: may not be more than 2 bytes"],
    );
    check(
        json!({"type": "string", "minLength": 4}),
        json!("abc"),
        &["spec.a: Invalid value: \"abc\": spec.a in body should be at least 4 chars long"],
    );
    check(
        json!({"type": "string", "pattern": "^x"}),
        json!("abc"),
        &["spec.a: Invalid value: \"abc\": spec.a in body should match '^x'"],
    );
    check(
        json!({"type": "string", "enum": ["x", "y"]}),
        json!("abc"),
        &["spec.a: Unsupported value: \"abc\": supported values: \"x\", \"y\""],
    );
    check(
        json!({"type": "string", "format": "date-time"}),
        json!("abc"),
        &["spec.a: Invalid value: \"abc\": spec.a in body must be of type date-time: \"abc\""],
    );
    check(
        json!({"type": "integer", "minimum": 3, "maximum": 5}),
        json!(2),
        &["spec.a: Invalid value: 2: spec.a in body should be greater than or equal to 3"],
    );
    check(
        json!({"type": "number", "maximum": 1.5, "exclusiveMaximum": true}),
        json!(1.5),
        &["spec.a: Invalid value: 1.5: spec.a in body should be less than 1.5"],
    );
    check(
        json!({"type": "integer", "multipleOf": 3}),
        json!(4),
        &["spec.a: Invalid value: 4: spec.a in body should be a multiple of 3"],
    );
    check(
        json!({"type": "array", "items": {"type": "string"}, "maxItems": 1}),
        json!(["a", "b"]),
        &["spec.a: Too many: 2: must have at most 1 item"],
    );
    check(
        json!({"type": "array", "items": {"type": "string"}, "minItems": 3}),
        json!(["a", 1]),
        &[
            "spec.a[1]: Invalid value: \"integer\": spec.a[1] in body must be of type string: \"integer\"",
            "spec.a: Invalid value: 2: spec.a in body should have at least 3 items",
        ],
    );
    check(
        json!({"type": "object", "required": ["b"], "minProperties": 1}),
        json!({}),
        &[
            "spec.a: Invalid value: 0: spec.a in body should have at least 1 properties",
            "spec.a.b: Required value",
        ],
    );
    check(
        json!({"type": "object", "additionalProperties": {"type": "integer"}}),
        json!({"k": "v"}),
        &["spec.a.k: Invalid value: \"string\": spec.a.k in body must be of type integer: \"string\""],
    );
    check(
        json!({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]}),
        json!(3),
        &[
            "<nil>: Invalid value: \"\": \"spec.a\" must validate at least one schema (anyOf)",
            "spec.a: Invalid value: 3: spec.a in body should be greater than or equal to 5",
        ],
    );
    check(
        json!({"type": "integer", "oneOf": [{"minimum": 1}, {"maximum": 5}]}),
        json!(3),
        &[
            "<nil>: Invalid value: \"\": \"spec.a\" must validate one and only one schema (oneOf). Found 2 valid alternatives",
        ],
    );
    check(
        json!({"type": "integer", "not": {"minimum": 1}}),
        json!(3),
        &["<nil>: Invalid value: \"\": \"spec.a\" must not validate the schema (not)"],
    );
    check(
        json!({"type": "integer", "format": "int32"}),
        json!(3_000_000_000_i64),
        &["<nil>: Invalid value: \"\": Checked value must be of type integer with format int32 in spec.a"],
    );
}

#[test]
fn what_was_wrong_before_may_stay() {
    let schema = json!({"type": "object", "properties": {
        "spec": {"type": "object", "properties": {
            "a": {"type": "integer", "maximum": 5}, "b": {"type": "string"},
            "l": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
                "items": {"type": "object", "properties": {"k": {"type": "string"}, "v": {"type": "integer", "maximum": 1}}}}}}}});
    let old = json!({"spec": {"a": 9, "b": "x", "l": [{"k": "one", "v": 2}]}});
    let check = |new: Value, expected: &[&str]| {
        assert_eq!(
            messages(schema.clone(), Some(old.clone()), new.clone()),
            expected,
            "{new}"
        );
    };
    check(
        json!({"spec": {"a": 9, "b": "y", "l": [{"k": "zero"}, {"k": "one", "v": 2}]}}),
        &[],
    );
    check(
        json!({"spec": {"a": 10}}),
        &["spec.a: Invalid value: 10: spec.a in body should be less than or equal to 5"],
    );
    check(
        json!({"spec": {"l": [{"k": "one", "v": 3}]}}),
        &["spec.l[0].v: Invalid value: 3: spec.l[0].v in body should be less than or equal to 1"],
    );
}

/// Each is told once, however many there are; with a scan for each, this would take minutes.
#[test]
fn thousands_of_findings() {
    let bounded = json!({"type": "integer", "maximum": 1});
    let schema = json!({"type": "object", "properties": {
        "l": {"type": "array", "items": {"allOf": [bounded, bounded], "type": "integer"}},
        "m": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k", "p"],
            "items": {"type": "object", "properties": {
                "k": {"type": "string"}, "p": {"type": "string", "default": "TCP"}, "v": bounded}}}}});
    let list: Vec<i64> = (2..20_002).collect();
    let found = messages(schema.clone(), None, json!({"l": list}));
    // One of the value, though two parts complain of it, and one of the parts as a whole.
    assert_eq!(found.len(), 40_000);
    assert_eq!(
        found[39_998],
        "l[19999]: Invalid value: 20001: l[19999] in body should be less than or equal to 1"
    );
    let elements = |value: i64, protocol: Option<&str>| -> Value {
        let all = (0..20_000).map(|k| match protocol {
            Some(protocol) => json!({"k": format!("k{k}"), "p": protocol, "v": value}),
            None => json!({"k": format!("k{k}"), "v": value}),
        });
        json!({"m": all.collect::<Vec<Value>>()})
    };
    let old = elements(5, None);
    // A key that is not given has its default.
    assert!(messages(schema.clone(), Some(old.clone()), elements(5, Some("TCP"))).is_empty());
    assert_eq!(
        messages(schema.clone(), Some(old.clone()), elements(6, None)).len(),
        20_000
    );
    assert_eq!(
        messages(schema, Some(old), elements(5, Some("UDP"))).len(),
        20_000
    );
}
