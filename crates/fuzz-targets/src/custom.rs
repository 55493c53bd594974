//! Custom resources: schemas that clients bring, objects in them, and the paths of columns.

use std::sync::Arc;

use serde_json::{Value, json};
use skiff_api::facts;
use skiff_meta::field::Path;
use skiff_schema::apply::{Definition, Duplicates, Set, compare, field_set, validate};
use skiff_schema::jsonpath::JsonPath;
use skiff_schema::structural::{self, Structural};

use crate::input::{self, schema};

pub fn jsonpath(data: &[u8]) {
    let (line, rest) = input::line(data);
    let Ok(text) = std::str::from_utf8(line) else {
        return;
    };
    let Ok(path) = JsonPath::parse(text) else {
        return;
    };
    if let Some(value) = input::json(rest) {
        let found = path.find(&value);
        assert!(
            found.len() <= 4 * rest.len() + 4,
            "{} places of {} bytes",
            found.len(),
            rest.len()
        );
    }
}

pub fn structural(data: &[u8]) {
    let Some([definition, object, old]) = input::documents::<3>(data) else {
        return;
    };
    let Some(definition) = input::json(definition) else {
        return;
    };
    let accepted = accepted(&definition);
    let prepared = Structural::parse(&definition);
    let _ = (prepared.has_defaults(), prepared.has_rules());
    let Some(object) = input::json(object) else {
        return;
    };
    let old = input::json(old);
    let mut value = object.clone();
    structural::prune_nulls(&mut value, &prepared);
    structural::prune(&mut value, &prepared, true);
    let mut again = value.clone();
    assert!(
        structural::prune(&mut again, &prepared, true).is_empty(),
        "pruning twice finds nothing"
    );
    assert_eq!(again, value);
    structural::default(&mut value, &prepared);
    if accepted {
        // Only of a schema that was accepted: its defaults fit it.
        let mut again = value.clone();
        structural::default(&mut again, &prepared);
        assert_eq!(again, value, "defaulting twice changes nothing");
    }
    for repair in [false, true] {
        let _ = structural::coerce_metadata(schema(), &mut value.clone(), &prepared, repair);
    }
    let _ = structural::validate(&value, &prepared, &Path::root());
    let _ = structural::validate_lists(&value, &prepared);
    let _ = structural::validate_update(&value, Some(&value), &prepared, &Path::root());
    let _ = structural::validate_update(&value, old.as_ref(), &prepared, &Path::root());
    owned(&definition, &value, old.as_ref());
}

/// Whether a CustomResourceDefinition with the schema is valid.
fn accepted(definition: &Value) -> bool {
    let rules = skiff_api::kind::kind("apiextensions.k8s.io", "CustomResourceDefinition");
    let mut object = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.example.com"},
        "spec": {
            "group": "example.com", "scope": "Namespaced",
            "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": definition}}],
        },
    });
    let kind = input::kind(b"apiextensions.k8s.io/v1 CustomResourceDefinition");
    let Ok(checked) = skiff_schema::decode::check(schema(), kind.id, object) else {
        return false;
    };
    object = checked.value;
    object["apiVersion"] = "apiextensions.k8s.io/v1".into();
    object["kind"] = "CustomResourceDefinition".into();
    (rules.default)("v1", &mut object);
    rules.begin_create(&mut object);
    rules.check_create(&object, false).is_empty()
}

/// Who owns what of an object of the schema.
fn owned(definition: &Value, value: &Value, old: Option<&Value>) {
    let Some(metadata) = facts::schema().by_name("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta") else {
        return;
    };
    let definition = Arc::new(Definition::of_custom_resource(
        Some(definition),
        (facts::schema(), metadata),
    ));
    let of = definition.as_type();
    let set = field_set(of, value);
    assert_eq!(Set::from_value(&set.to_value()).as_ref(), Ok(&set));
    let _ = validate(of, value, Duplicates::Refused);
    if let Ok(same) = compare(of, value, value) {
        assert!(same.is_same(), "a value is as itself");
    }
    if let Some(old) = old {
        let _ = compare(of, old, value);
    }
}
