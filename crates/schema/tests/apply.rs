//! Server-side apply over small types: comparing, merging, removing, and schemas that change.

use std::borrow::Cow;

use serde_json::{Value, json};
use skiff_schema::Schema;
use skiff_schema::apply::{
    ApplyError, Definition, Duplicates, Managed, ManagerId, Operation, Set, TypeRef, Updater, Versions,
    compare, field_set, validate,
};

const TABLE: &str = "P t/v1 t.v1\nT ObjectMeta\n name s 1 o\n labels {}s 2 o\n finalizers []s 3 o ls\n\
T Kind gvk=t/v1\n kind s 1 o\n apiVersion s 2 o\n metadata @t/v1.ObjectMeta 3 o\n items []@t/v1.Item 4 o lm=name,protocol\n\
\x20words []s 5 o la\n selector @t/v1.Selector 6 o\n count *i 7 o\n port I 8 o\nT Item\n name s 1 r\n protocol s 2 o d=\"TCP\"\n value s 3 o\nT Selector atomic\n a s 1 o\n b s 2 o\n";

fn schema() -> &'static Schema {
    Box::leak(Box::new(Schema::parse(TABLE).expect("parses")))
}

fn of(schema: &Schema) -> TypeRef<'_> {
    TypeRef::Object(schema, schema.by_gvk("t", "v1", "Kind").expect("known"))
}

#[test]
fn comparisons() {
    let schema = schema();
    let check = |old: Value, new: Value, removed: Value, modified: Value, added: Value| {
        let found = compare(of(schema), &old, &new).expect("compares");
        let got = (
            found.removed.to_value(),
            found.modified.to_value(),
            found.added.to_value(),
        );
        assert_eq!(got, (removed, modified, added), "{old} {new}");
    };
    let none = || json!({});
    check(json!({"count": 1}), json!({"count": 1.0}), none(), none(), none());
    check(
        json!({"words": ["a"]}),
        json!({"words": ["b"]}),
        none(),
        json!({"f:words": {}}),
        none(),
    );
    check(
        json!({"selector": {"a": "1"}}),
        json!({"selector": {"b": "1"}}),
        none(),
        json!({"f:selector": {}}),
        none(),
    );
    check(
        json!({"metadata": {}}),
        json!({"metadata": {"labels": {"a": "b"}, "finalizers": ["x"]}}),
        none(),
        none(),
        json!({"f:metadata": {"f:labels": {".": {}, "f:a": {}}, "f:finalizers": {".": {}, "v:\"x\"": {}}}}),
    );
    let key = r#"k:{"name":"a","protocol":"TCP"}"#;
    check(
        json!({"items": [{"name": "a", "value": "1"}]}),
        json!({"items": [{"name": "a", "protocol": "TCP", "value": "2"}]}),
        none(),
        json!({"f:items": {key: {"f:value": {}}}}),
        json!({"f:items": {key: {"f:protocol": {}}}}),
    );
    // What is there twice is owned as one thing.
    check(
        json!({"items": [{"name": "a"}]}),
        json!({"items": [{"name": "a"}, {"name": "a", "value": "x"}]}),
        json!({"f:items": {key: {".": {}, "f:name": {}}}}),
        none(),
        json!({"f:items": {key: {}}}),
    );
    check(
        json!({"port": 80}),
        json!({"port": "http"}),
        none(),
        json!({"f:port": {}}),
        none(),
    );
}

#[test]
fn values_are_checked() {
    let schema = schema();
    let check = |value: Value, expected: &str| {
        let found = validate(of(schema), &value, Duplicates::Refused)
            .err()
            .unwrap_or_default();
        assert_eq!(found, expected, "{value}");
    };
    check(json!({"metadata": null, "count": null}), "");
    check(json!({"foo": 1}), ".foo: field not declared in schema");
    check(
        json!({"count": "1"}),
        ".count: expected numeric (int or float), got string",
    );
    check(
        json!({"items": [{"value": 1}]}),
        r#".items[name="",protocol="TCP"].value: expected string, got &value.valueUnstructured{Value:1}"#,
    );
    check(
        json!({"items": [null]}),
        ".items: element 0: associative list with keys may not have a null element",
    );
    check(
        json!({"words": [1]}),
        ".words[0]: expected string, got &value.valueUnstructured{Value:1}",
    );
    check(
        json!({"count": "x", "words": "y"}),
        "errors:\n  .count: expected numeric (int or float), got string\n  .words: expected list, got &{y}",
    );
}

struct One(&'static Schema);

impl Versions for One {
    fn type_of(&self, version: &str) -> Option<TypeRef<'_>> {
        (version == "t/v1").then(|| of(self.0))
    }

    fn convert<'v>(&self, object: &'v Value, version: &str) -> Option<Cow<'v, Value>> {
        (version == "t/v1").then_some(Cow::Borrowed(object))
    }
}

/// Applies as `manager`; the object and the managers after it.
fn apply(
    live: &Value,
    managed: &Managed,
    config: Value,
    manager: &str,
    force: bool,
) -> Result<(Value, Managed), String> {
    let (versions, ignored) = (One(schema()), Set::default());
    let updater = Updater {
        versions: &versions,
        ignored: &ignored,
    };
    let id = ManagerId::new(manager, Operation::Apply, "t/v1", "");
    match updater.apply(live, &config, "t/v1", managed.clone(), &id, force) {
        Ok(applied) => Ok((applied.object.unwrap_or_else(|| live.clone()), applied.managed)),
        Err(ApplyError::Conflicts(found)) => {
            let lines: Vec<String> = found
                .iter()
                .map(|c| format!("{} {}", c.manager, c.path))
                .collect();
            Err(lines.join("; "))
        }
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn lists_keep_the_order_of_who_applies() {
    let names = |value: &Value| -> Vec<String> {
        let items = value["items"].as_array().cloned().unwrap_or_default();
        items
            .iter()
            .map(|i| i["name"].as_str().unwrap_or("").to_string())
            .collect()
    };
    let list =
        |names: &[&str]| json!({"items": names.iter().map(|n| json!({"name": n})).collect::<Vec<_>>()});
    let check = |live: &[&str], applied: &[&str], expected: &[&str]| {
        let (object, _) = apply(&list(live), &Managed::default(), list(applied), "m", true).expect("applies");
        assert_eq!(names(&object), expected, "{live:?} {applied:?}");
    };
    check(&["a", "b", "c"], &["c", "a"], &["b", "c", "a"]);
    check(&["a", "b"], &["x"], &["a", "b", "x"]);
    check(&["a", "b", "c"], &["x", "b"], &["a", "x", "b", "c"]);
    check(&[], &["b", "a"], &["b", "a"]);
}

#[test]
fn ownership_decides_what_goes() {
    let none = Managed::default();
    let live = json!({"apiVersion": "t/v1"});
    let config =
        json!({"apiVersion": "t/v1", "items": [{"name": "a", "value": "1"}, {"name": "b"}], "count": 3});
    let (live, managed) = apply(&live, &none, config, "one", false).expect("applies");
    let both = json!({"apiVersion": "t/v1", "items": [{"name": "b"}]});
    let (live, managed) = apply(&live, &managed, both, "two", false).expect("applies");
    let other = json!({"apiVersion": "t/v1", "items": [{"name": "a", "value": "2"}]});
    assert_eq!(
        apply(&live, &managed, other.clone(), "two", false),
        Err(r#""one" .items[name="a",protocol="TCP"].value"#.to_string())
    );
    let (live, managed) =
        apply(&live, &managed, json!({"apiVersion": "t/v1"}), "one", false).expect("applies");
    assert_eq!(live, json!({"apiVersion": "t/v1", "items": [{"name": "b"}]}));
    assert_eq!(managed.0.len(), 2);
    let (live, _) = apply(&live, &managed, json!({"apiVersion": "t/v1"}), "two", false).expect("applies");
    assert_eq!(live, json!({"apiVersion": "t/v1"}));
}

#[test]
fn sets_follow_a_schema_that_became_atomic() {
    let entries = json!([{"manager": "old", "operation": "Apply", "apiVersion": "t/v1", "fieldsType": "FieldsV1",
        "fieldsV1": {"f:selector": {".": {}, "f:a": {}}, "f:words": {"v:\"x\"": {}}}}]);
    let managed = Managed::decode(Some(&entries)).expect("decodes");
    let live = json!({"selector": {"a": "1"}, "words": ["x"]});
    let (_, managed) = apply(&live, &managed, json!({"count": 1}), "new", false).expect("applies");
    let old = ManagerId::new("old", Operation::Apply, "", "");
    assert_eq!(
        managed.0[&old].set.to_value(),
        json!({"f:selector": {}, "f:words": {}})
    );
}

#[test]
fn custom_types() {
    let schema = schema();
    let metadata = schema.by_name("t.v1.ObjectMeta").expect("known");
    let openapi = json!({"type": "object", "properties": {
        "spec": {"type": "object", "properties": {
            "list": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["id"],
                "items": {"type": "object", "properties": {"id": {"type": "string", "default": "d"}, "v": {"x-kubernetes-int-or-string": true}}}},
            "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            "plain": {"type": "array", "items": {"type": "string"}},
            "whole": {"type": "object", "x-kubernetes-map-type": "atomic", "additionalProperties": {"type": "string"}},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}}});
    let custom = Definition::of_custom_resource(Some(&openapi), (schema, metadata));
    let value = json!({"metadata": {"finalizers": ["f"]}, "spec": {"list": [{"v": 1}], "set": ["a"], "plain": ["a"],
        "whole": {"a": "b"}, "free": {"a": {"b": [1]}}}});
    assert_eq!(validate(custom.as_type(), &value, Duplicates::Refused), Ok(()));
    assert_eq!(
        field_set(custom.as_type(), &value).to_value(),
        json!({"f:metadata": {"f:finalizers": {"v:\"f\"": {}}}, "f:spec": {
            "f:list": {"k:{\"id\":\"d\"}": {".": {}, "f:v": {}}}, "f:set": {"v:\"a\"": {}}, "f:plain": {}, "f:whole": {},
            "f:free": {"f:a": {".": {}, "f:b": {}}}}})
    );
    assert!(
        validate(
            custom.as_type(),
            &json!({"spec": {"foo": 1}}),
            Duplicates::Refused
        )
        .is_err()
    );
    let unknown = Definition::of_custom_resource(None, (schema, metadata));
    assert_eq!(
        field_set(unknown.as_type(), &json!({"spec": {"a": [1], "b": {"c": 1}}})).to_value(),
        json!({"f:spec": {".": {}, "f:a": {}, "f:b": {".": {}, "f:c": {}}}})
    );
}
