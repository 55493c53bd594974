//! Definitions that kube-apiserver v1.36.4 was asked to take, each with one change to a good one, and what it
//! said of them (`definitions.jsonl`: the path and value of the change, and the findings, sorted).

use serde_json::{Value, json};

use super::CUSTOM_RESOURCE_DEFINITION;

fn definition() -> Value {
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "foos.val.example.com"},
        "spec": {"group": "val.example.com", "scope": "Namespaced", "names": {"plural": "foos", "kind": "Foo"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object",
                "properties": {
                    "spec": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
                    "status": {"type": "object"}}}}}]}})
}

/// Sets, or removes, what is at a path of keys and indexes.
fn change(object: &mut Value, path: &[Value], value: &Value) {
    let (last, parents) = path.split_last().expect("a path");
    let mut here = object;
    for step in parents {
        here = match step.as_u64() {
            Some(index) => &mut here[usize::try_from(index).expect("an index")],
            None => &mut here[step.as_str().expect("a key")],
        };
    }
    let map = here.as_object_mut().expect("an object");
    let key = last.as_str().expect("a key");
    if value.is_null() {
        map.remove(key);
    } else {
        map.insert(key.to_owned(), value.clone());
    }
}

#[test]
fn definitions_are_judged_as_upstream_judges_them() {
    for line in include_str!("definitions.jsonl").lines() {
        let case: Value = serde_json::from_str(line).expect("JSON");
        let mut object = definition();
        change(
            &mut object,
            case["path"].as_array().expect("a path"),
            &case["value"],
        );
        // What the decoder drops does not come this far.
        let schema = crate::facts::schema();
        let id = schema
            .by_gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition")
            .expect("a type");
        let mut object = skiff_schema::decode::check(schema, id, object)
            .expect("decodes")
            .value;
        object["status"] = json!({});
        (CUSTOM_RESOURCE_DEFINITION.default)("v1", &mut object);
        CUSTOM_RESOURCE_DEFINITION.begin_create(&mut object);
        let found = CUSTOM_RESOURCE_DEFINITION.check_create(&object, false);
        let mut found: Vec<String> = found.iter().map(ToString::to_string).collect();
        found.sort();
        let expected: Vec<&str> = case["errors"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(Value::as_str)
            .collect();
        assert_eq!(found, expected, "{line}");
    }
}

#[test]
fn certificates_of_a_served_definition_can_be_read() {
    const READABLE: &str = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCkFBPT0KLS0tLS1FTkQgQ0VSVElGSUNBVEUtLS0tLQo=";
    let with = |bundle: &str, established: &str| {
        let mut object = definition();
        object["spec"]["conversion"] = json!({"strategy": "Webhook", "webhook": {"conversionReviewVersions": ["v1"],
            "clientConfig": {"url": "https://example.com/", "caBundle": bundle}}});
        object["status"] = json!({"conditions": [{"type": "Established", "status": established}]});
        (CUSTOM_RESOURCE_DEFINITION.default)("v1", &mut object);
        object
    };
    let check = |old: &str, established: &str, new: &str, fine: bool| {
        let (old, new) = (with(old, established), with(new, established));
        let found = (CUSTOM_RESOURCE_DEFINITION.validate_update)(&new, &old);
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        let expected = "spec.conversion.webhookClientConfig.caBundle: Invalid value: \"Yg==\": unable to load root certificates: unable to parse bytes as PEM block";
        let expected: &[&str] = if fine { &[] } else { &[expected] };
        assert_eq!(found, expected);
    };
    check("", "True", "Yg==", false);
    check(READABLE, "True", "Yg==", false);
    check("QUJD", "True", "Yg==", true);
    check("", "False", "Yg==", true);
    check("", "True", READABLE, true);
    check(READABLE, "True", "", true);
}

#[test]
fn the_status_of_another_definition_is_not_taken_over() {
    let check = |storage: &str, expected: Value| {
        let mut object = definition();
        object["spec"]["versions"][0]["name"] = json!(storage);
        object["status"] = json!({"storedVersions": ["v1"], "conditions": [], "acceptedNames": {"plural": "foos", "kind": "Foo"}});
        (CUSTOM_RESOURCE_DEFINITION.default)("v1", &mut object);
        CUSTOM_RESOURCE_DEFINITION.begin_create(&mut object);
        assert_eq!(object["status"]["storedVersions"], expected);
        assert_eq!(object["status"]["acceptedNames"]["plural"], "");
        let found = CUSTOM_RESOURCE_DEFINITION.check_create(&object, false);
        assert!(found.is_empty(), "{found:?}");
    };
    check("v1", json!(["v1"]));
    check("v1alpha1", json!(["v1alpha1"]));
}
