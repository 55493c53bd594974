//! The OpenAPI documents of custom resources: version 3 a group version at a time, version 2 as an
//! addition to the one document of all kinds. What custom resources share with built-in ones (metadata,
//! parameters) is taken from the document of a built-in group that has it all.

mod operations;

use std::collections::BTreeSet;

use operations::Operations;
use serde_json::{Map, Value, json};

const API_VERSION: &str = "APIVersion defines the versioned schema of this representation of an object. Servers should convert recognized schemas to the latest internal value, and may reject unrecognized values. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#resources";
const KIND: &str = "Kind is a string value representing the REST resource this object represents. Servers may infer this from the endpoint the client submits requests to. Cannot be updated. In CamelCase. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds";
const METADATA: &str = "Standard object's metadata. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata";
const LIST_METADATA: &str = "Standard list metadata. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds";
const INNER_API_VERSION: &str = "apiVersion defines the versioned schema of this representation of an object. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#resources";
const INNER_KIND: &str = "kind is a string value representing the type of this object. In CamelCase. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds";
const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

/// A served version of a custom resource.
#[derive(Debug, Clone)]
pub struct Published<'a> {
    pub group: &'a str,
    pub version: &'a str,
    pub plural: &'a str,
    pub kind: &'a str,
    pub list_kind: &'a str,
    pub namespaced: bool,
    pub status: bool,
    pub scale: bool,
    pub selectable: &'a [String],
    /// The schema as the definition has it.
    pub schema: &'a Value,
}

/// The form of a document.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    V2,
    V3,
}

impl Form {
    fn reference(self, name: &str) -> Value {
        let prefix = match self {
            Form::V2 => "#/definitions/",
            Form::V3 => "#/components/schemas/",
        };
        json!({ "$ref": format!("{prefix}{name}") })
    }

    /// A reference with words of its own.
    fn described(self, name: &str, description: &str) -> Value {
        match self {
            Form::V2 => {
                let mut value = self.reference(name);
                value["description"] = json!(description);
                value
            }
            Form::V3 => json!({"allOf": [self.reference(name)], "description": description}),
        }
    }
}

/// The version 3 document of one group version. `model` is that of `apis/apps/v1`; `kinds` tells the
/// group versions in which a type is a kind.
pub fn v3(resources: &[Published<'_>], model: &Value, kinds: &dyn Fn(&str) -> Vec<Value>) -> Value {
    let mut schemas = Map::new();
    let mut paths = Map::new();
    for resource in resources {
        resource.definitions(Form::V3, &mut schemas);
        resource.paths(Form::V3, model, &mut paths);
    }
    let mut wanted = BTreeSet::new();
    references(&Value::Object(schemas.clone()), &mut wanted);
    references(&Value::Object(paths.clone()), &mut wanted);
    let known = &model["components"]["schemas"];
    while let Some(name) = wanted.pop_first() {
        if let Some(schema) = known.get(&name).filter(|_| !schemas.contains_key(&name)) {
            references(schema, &mut wanted);
            let mut schema = schema.clone();
            // The model tells of its own group only; here all groups are told.
            if let Some(told) = schema.get_mut("x-kubernetes-group-version-kind") {
                *told = Value::Array(kinds(&name));
            }
            schemas.insert(name, schema);
        }
    }
    json!({"openapi": "3.0.0", "info": {"title": "Kubernetes CRD Swagger", "version": "v0.1.0"},
        "paths": paths, "components": {"schemas": schemas}})
}

/// Adds custom resources to the version 2 document of the built-in kinds.
pub fn add_to_v2(resources: &[Published<'_>], document: &mut Value) {
    let mut definitions = Map::new();
    let mut paths = Map::new();
    for resource in resources {
        resource.definitions(Form::V2, &mut definitions);
        resource.paths(Form::V2, document, &mut paths);
    }
    for (key, added) in [("definitions", definitions), ("paths", paths)] {
        if let Some(map) = document[key].as_object_mut() {
            map.extend(added);
        }
    }
}

/// The names of the schemas that a value refers to.
fn references(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            if let Some(name) = map
                .get("$ref")
                .and_then(Value::as_str)
                .and_then(|text| text.rsplit('/').next())
            {
                found.insert(name.to_owned());
            }
            map.values().for_each(|value| references(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

impl Published<'_> {
    fn model_name(&self, kind: &str) -> String {
        let group: Vec<&str> = self.group.split('.').rev().collect();
        format!("{}.{}.{kind}", group.join("."), self.version)
    }

    fn definitions(&self, form: Form, out: &mut Map<String, Value>) {
        let fields: Vec<Value> = self
            .selectable
            .iter()
            .map(|path| json!({ "fieldPath": path }))
            .collect();
        let mut own = self.definition(form);
        let mut list = json!({"type": "object", "description": format!("{} is a list of {}", self.list_kind, self.kind),
            "required": ["items"],
            "properties": {
                "apiVersion": {"type": "string", "description": API_VERSION},
                "kind": {"type": "string", "description": KIND},
                "metadata": form.described(&format!("{META}.ListMeta"), LIST_METADATA),
                "items": {"type": "array", "items": form.reference(&self.model_name(self.kind)),
                    "description": format!("List of {}. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md", self.plural)}}});
        for (value, kind) in [(&mut own, self.kind), (&mut list, self.list_kind)] {
            value["x-kubernetes-group-version-kind"] =
                json!([{"group": self.group, "kind": kind, "version": self.version}]);
            if !fields.is_empty() {
                value["x-kubernetes-selectable-fields"] = json!(fields);
            }
        }
        out.insert(self.model_name(self.kind), own);
        out.insert(self.model_name(self.list_kind), list);
    }

    fn definition(&self, form: Form) -> Value {
        let preserves = self.schema.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(true));
        if form == Form::V2 && preserves {
            return json!({"type": "object"});
        }
        let mut value = node(self.schema, form);
        let properties = object_at(&mut value, "properties");
        properties.insert(
            "metadata".into(),
            form.described(&format!("{META}.ObjectMeta"), METADATA),
        );
        properties.insert(
            "apiVersion".into(),
            json!({"type": "string", "description": API_VERSION}),
        );
        properties.insert("kind".into(), json!({"type": "string", "description": KIND}));
        value
    }

    fn paths(&self, form: Form, model: &Value, out: &mut Map<String, Value>) {
        let root = format!("/apis/{}/{}", self.group, self.version);
        let operations = Operations {
            resource: self,
            form,
            model,
        };
        let mut collection = format!("{root}/{}", self.plural);
        if self.namespaced {
            let mut everywhere = json!({"get": operations.one("get", "list", "list", "")});
            everywhere["get"]["operationId"] = json!(operations.id("list", "", "ForAllNamespaces", false));
            operations.hoist(&mut everywhere);
            out.insert(collection, everywhere);
            collection = format!("{root}/namespaces/{{namespace}}/{}", self.plural);
        }
        let item = json!({
            "get": operations.one("get", "list", "list", ""),
            "post": operations.one("post", "post", "create", ""),
            "delete": operations.one("delete", "deletecollection", "deletecollection", "")});
        out.insert(collection.clone(), operations.with_shared(item, false));
        let named = format!("{collection}/{{name}}");
        let item = json!({
            "get": operations.one("get", "get", "read", ""),
            "put": operations.one("put", "put", "replace", ""),
            "delete": operations.one("delete", "delete", "delete", ""),
            "patch": operations.one("patch", "patch", "patch", "")});
        out.insert(named.clone(), operations.with_shared(item, true));
        for (served, sub) in [(self.status, "status"), (self.scale, "scale")] {
            if served {
                let item = json!({
                    "get": operations.one("get", "get", "read", sub),
                    "put": operations.one("put", "put", "replace", sub),
                    "patch": operations.one("patch", "patch", "patch", sub)});
                out.insert(format!("{named}/{sub}"), operations.with_shared(item, true));
            }
        }
    }
}

fn object_at<'a>(value: &'a mut Value, key: &str) -> &'a mut Map<String, Value> {
    if !value[key].is_object() {
        value[key] = Value::Object(Map::new());
    }
    value[key].as_object_mut().expect("made an object above")
}

/// A node of the schema, as it is published.
fn node(schema: &Value, form: Form) -> Value {
    let Some(given) = schema.as_object() else {
        return json!({});
    };
    let flag = |key: &str| given.get(key) == Some(&Value::Bool(true));
    let (preserves, embedded) = (
        flag("x-kubernetes-preserve-unknown-fields"),
        flag("x-kubernetes-embedded-resource"),
    );
    let nullable = flag("nullable");
    let mut out = Map::new();
    for (key, value) in given {
        if value.is_null() {
            continue;
        }
        let children = match key.as_str() {
            "properties" => value
                .as_object()
                .into_iter()
                .flatten()
                .map(|(name, schema)| (name.clone(), node(schema, form)))
                .collect::<Map<_, _>>()
                .into(),
            "items" | "additionalProperties" | "not" if value.is_object() => node(value, form),
            "allOf" | "anyOf" | "oneOf" => value
                .as_array()
                .into_iter()
                .flatten()
                .map(|v| node(v, form))
                .collect(),
            _ => value.clone(),
        };
        out.insert(key.clone(), children);
    }
    if form == Form::V2 {
        for key in ["allOf", "anyOf", "oneOf", "not", "default", "nullable"] {
            out.remove(key);
        }
        if nullable {
            for key in ["type", "items", "properties"] {
                out.remove(key);
            }
        }
        if preserves {
            out.remove("items");
            out.remove("properties");
            if out.get("type") == Some(&json!("object")) {
                out.remove("type");
            }
        }
        if out.get("type") == Some(&json!("array")) && !out.contains_key("items") {
            out.remove("type");
        }
        drop_nullable_from_required(given, &mut out);
    }
    if form == Form::V3 && flag("x-kubernetes-int-or-string") && !out.contains_key("anyOf") {
        let pair = json!([{"type": "integer"}, {"type": "string"}]);
        out.insert("anyOf".into(), pair);
    }
    let mut out = Value::Object(out);
    if embedded && !(form == Form::V2 && preserves) {
        let properties = object_at(&mut out, "properties");
        properties.insert(
            "apiVersion".into(),
            json!({"type": "string", "description": INNER_API_VERSION}),
        );
        properties.insert(
            "kind".into(),
            json!({"type": "string", "description": INNER_KIND}),
        );
        properties.insert(
            "metadata".into(),
            form.described(&format!("{META}.ObjectMeta"), METADATA),
        );
        let mut required = out["required"].as_array().cloned().unwrap_or_default();
        for name in ["kind", "apiVersion"] {
            if !required.contains(&json!(name)) {
                required.push(json!(name));
            }
        }
        out["required"] = Value::Array(required);
    }
    out
}

/// Version 2 knows no null: a field that may be null may also be missing.
fn drop_nullable_from_required(given: &Map<String, Value>, out: &mut Map<String, Value>) {
    let nullable = |schema: &Value| schema.get("nullable") == Some(&Value::Bool(true));
    let every = given.get("additionalProperties").is_some_and(nullable);
    let properties = given.get("properties").and_then(Value::as_object);
    let one = |name: &Value| {
        let property = name.as_str().and_then(|name| properties?.get(name));
        property.is_some_and(nullable)
    };
    if let Some(required) = out.get_mut("required").and_then(Value::as_array_mut) {
        required.retain(|name| !every && !one(name));
        if required.is_empty() {
            out.remove("required");
        }
    }
}
