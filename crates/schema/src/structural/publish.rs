//! The OpenAPI documents of custom resources: version 3 a group version at a time, version 2 as an
//! addition to the one document of all kinds. What custom resources share with built-in ones (metadata,
//! parameters) is taken from the document of a built-in group that has it all.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

const API_VERSION: &str = "APIVersion defines the versioned schema of this representation of an object. Servers should convert recognized schemas to the latest internal value, and may reject unrecognized values. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#resources";
const KIND: &str = "Kind is a string value representing the REST resource this object represents. Servers may infer this from the endpoint the client submits requests to. Cannot be updated. In CamelCase. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds";
const METADATA: &str = "Standard object's metadata. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata";
const LIST_METADATA: &str = "Standard list metadata. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds";
const INNER_API_VERSION: &str = "apiVersion defines the versioned schema of this representation of an object. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#resources";
const INNER_KIND: &str = "kind is a string value representing the type of this object. In CamelCase. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds";
const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";
const SCALE: &str = "io.k8s.api.autoscaling.v1.Scale";
/// Where the parameters of built-in operations are looked up.
const MODEL: &str = "/apis/apps/v1/namespaces/{namespace}/deployments";

const LIST_OPTIONS: [&str; 11] = [
    "allowWatchBookmarks", "continue", "fieldSelector", "labelSelector", "limit", "resourceVersion",
    "resourceVersionMatch", "sendInitialEvents", "shardSelector", "timeoutSeconds", "watch",
];
const WRITE_OPTIONS: [&str; 3] = ["dryRun", "fieldManager", "fieldValidation"];
const PATCH_OPTIONS: [&str; 4] = ["dryRun", "fieldManager", "fieldValidation", "force"];
const DELETE_OPTIONS: [&str; 5] = [
    "dryRun", "gracePeriodSeconds", "ignoreStoreReadErrorWithClusterBreakingPotential", "orphanDependents",
    "propagationPolicy",
];
const PATCHES: [&str; 3] = [
    "application/json-patch+json", "application/merge-patch+json", "application/apply-patch+yaml",
];

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

/// The version 3 document of one group version. `model` is that of `apis/apps/v1`.
pub fn v3(resources: &[Published<'_>], model: &Value) -> Value {
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
            // The model says in which of its group's versions such options may come; here there is one.
            narrow(&mut schema, resources);
            schemas.insert(name, schema);
        }
    }
    json!({"openapi": "3.0.0", "info": {"title": "Kubernetes CRD Swagger", "version": "v0.1.0"},
        "paths": paths, "components": {"schemas": schemas}})
}

/// COMPAT: types of every group are told with the group versions of the whole server; nothing to change,
/// but for those that the model narrowed to its own.
fn narrow(schema: &mut Value, resources: &[Published<'_>]) {
    let Some(list) = schema.get_mut("x-kubernetes-group-version-kind").and_then(Value::as_array_mut) else {
        return;
    };
    if let ([only], Some(resource)) = (list.as_mut_slice(), resources.first())
        && only["group"] == "apps"
    {
        only["group"] = json!(resource.group);
        only["version"] = json!(resource.version);
    }
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
            if let Some(name) = map.get("$ref").and_then(Value::as_str).and_then(|text| text.rsplit('/').next()) {
                found.insert(name.to_owned());
            }
            map.values().for_each(|value| references(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

/// `pub.example.com` as `PubExampleCom`.
fn camel(text: &str) -> String {
    text.split(|c: char| !c.is_ascii_alphanumeric()).map(capital).collect()
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map_or_else(String::new, |first| first.to_lowercase().chain(chars).collect())
}

/// `a` or `an`, as upstream chooses.
fn article(kind: &str) -> &'static str {
    let vowel = kind.chars().next().is_some_and(|first| "aeiou".contains(first.to_ascii_lowercase()));
    if vowel { "an" } else { "a" }
}

impl Published<'_> {
    fn model_name(&self, kind: &str) -> String {
        let group: Vec<&str> = self.group.split('.').rev().collect();
        format!("{}.{}.{kind}", group.join("."), self.version)
    }

    fn definitions(&self, form: Form, out: &mut Map<String, Value>) {
        let fields: Vec<Value> = self.selectable.iter().map(|path| json!({ "fieldPath": path })).collect();
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
        properties.insert("metadata".into(), form.described(&format!("{META}.ObjectMeta"), METADATA));
        properties.insert("apiVersion".into(), json!({"type": "string", "description": API_VERSION}));
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
            let everywhere = operations.with_shared(
                json!({"get": operations.one("get", "list", "list", "")}),
                &[],
            );
            let mut everywhere = everywhere;
            everywhere["get"]["operationId"] = json!(operations.id("list", "", "ForAllNamespaces", false));
            operations.hoist(&mut everywhere);
            out.insert(collection, everywhere);
            collection = format!("{root}/namespaces/{{namespace}}/{}", self.plural);
        }
        let mut item = json!({
            "get": operations.one("get", "list", "list", ""),
            "post": operations.one("post", "post", "create", ""),
            "delete": operations.one("delete", "deletecollection", "deletecollection", "")});
        item = operations.with_shared(item, &[]);
        out.insert(collection.clone(), item);
        let named = format!("{collection}/{{name}}");
        let item = json!({
            "get": operations.one("get", "get", "read", ""),
            "put": operations.one("put", "put", "replace", ""),
            "delete": operations.one("delete", "delete", "delete", ""),
            "patch": operations.one("patch", "patch", "patch", "")});
        out.insert(named.clone(), operations.with_shared(item, &["name"]));
        for (served, sub) in [(self.status, "status"), (self.scale, "scale")] {
            if served {
                let item = json!({
                    "get": operations.one("get", "get", "read", sub),
                    "put": operations.one("put", "put", "replace", sub),
                    "patch": operations.one("patch", "patch", "patch", sub)});
                out.insert(format!("{named}/{sub}"), operations.with_shared(item, &["name"]));
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
            "allOf" | "anyOf" | "oneOf" => value.as_array().into_iter().flatten().map(|v| node(v, form)).collect(),
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
        properties.insert("apiVersion".into(), json!({"type": "string", "description": INNER_API_VERSION}));
        properties.insert("kind".into(), json!({"type": "string", "description": INNER_KIND}));
        properties.insert("metadata".into(), form.described(&format!("{META}.ObjectMeta"), METADATA));
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

struct Operations<'a> {
    resource: &'a Published<'a>,
    form: Form,
    model: &'a Value,
}

impl Operations<'_> {
    fn id(&self, verb: &str, sub: &str, suffix: &str, namespaced: bool) -> String {
        let (verb, collection) = match verb {
            "deletecollection" => ("delete", "Collection"),
            verb => (verb, ""),
        };
        let resource = self.resource;
        let group = camel(resource.group.trim_end_matches(".k8s.io"));
        let scope = if namespaced && resource.namespaced { "Namespaced" } else { "" };
        format!(
            "{verb}{group}{}{collection}{scope}{}{}{suffix}",
            capital(resource.version),
            resource.kind,
            capital(sub)
        )
    }

    /// A parameter as a built-in operation of the same method has it, or else any other.
    fn parameter(&self, method: &str, name: &str) -> Option<Value> {
        let named = |parameter: &Value| {
            let own = parameter["name"] == name;
            let shared = parameter["$ref"].as_str().and_then(|text| text.strip_prefix("#/parameters/"));
            // The name and a hash of eight characters.
            own || shared.is_some_and(|text| {
                text.len() == name.len() + 9 && text.starts_with(name) && text.as_bytes()[name.len()] == b'-'
            })
        };
        let paths = &self.model["paths"];
        let items: Vec<&Value> = [MODEL.to_owned(), format!("{MODEL}/{{name}}")]
            .iter()
            .filter_map(|path| paths.get(path))
            .collect();
        let lists = |wanted: Option<&str>| -> Vec<&Value> {
            let operations = items.iter().flat_map(|item| item.as_object().into_iter().flatten());
            operations
                .filter(|(key, _)| wanted.is_none_or(|wanted| *key == wanted))
                .map(|(key, value)| if key == "parameters" { value } else { &value["parameters"] })
                .collect()
        };
        let find = |lists: Vec<&Value>| {
            let all = lists.into_iter().flat_map(|list| list.as_array().into_iter().flatten());
            all.into_iter().find(|parameter| named(parameter)).cloned()
        };
        find(lists(Some(method)))
            .or_else(|| find(lists(None)))
            .or_else(|| self.plain(name))
    }

    /// A parameter that built-in operations do not have.
    fn plain(&self, name: &str) -> Option<Value> {
        let kind = match name {
            "body" => return None,
            "limit" | "timeoutSeconds" | "gracePeriodSeconds" => "integer",
            "allowWatchBookmarks" | "sendInitialEvents" | "watch" | "force" | "orphanDependents" => "boolean",
            _ => "string",
        };
        let mut value = json!({"in": "query", "name": name});
        match self.form {
            Form::V2 => {
                value["type"] = json!(kind);
                value["uniqueItems"] = json!(true);
            }
            Form::V3 => value["schema"] = json!({"type": kind, "uniqueItems": true}),
        }
        Some(value)
    }

    fn parameters(&self, method: &str, names: &[&str]) -> Vec<Value> {
        names.iter().filter_map(|name| self.parameter(method, name)).collect()
    }

    fn one(&self, method: &str, action: &str, verb: &str, sub: &str) -> Value {
        let resource = self.resource;
        let (own, list) = (resource.model_name(resource.kind), resource.model_name(resource.list_kind));
        let status = format!("{META}.Status");
        let body = if sub == "scale" { SCALE } else { &own };
        let answer = match action {
            "list" => &list,
            "delete" | "deletecollection" => &status,
            _ => body,
        };
        let codes: &[(&str, &str)] = match action {
            "post" => &[("200", "OK"), ("201", "Created"), ("202", "Accepted")],
            "put" => &[("200", "OK"), ("201", "Created")],
            "delete" => &[("200", "OK"), ("202", "Accepted")],
            _ => &[("200", "OK")],
        };
        let mut responses = Map::new();
        for (code, words) in codes {
            let mut response = json!({ "description": words });
            match self.form {
                Form::V2 => response["schema"] = self.form.reference(answer),
                Form::V3 => response["content"] = self.content(answer, &["application/json", "application/yaml"]),
            }
            responses.insert((*code).into(), response);
        }
        responses.insert("401".into(), json!({"description": "Unauthorized"}));
        let names: &[&str] = match action {
            "list" | "deletecollection" => &LIST_OPTIONS,
            "get" => &["resourceVersion"],
            "patch" => &PATCH_OPTIONS,
            "delete" => &DELETE_OPTIONS,
            _ => &WRITE_OPTIONS,
        };
        let mut parameters = self.parameters(method, names);
        let mut operation = json!({
            "description": self.description(verb, sub),
            "operationId": self.id(verb, sub, "", true),
            "tags": [format!("{}_{}", lower_first(&camel(resource.group.trim_end_matches(".k8s.io"))), lower_first(&camel(resource.version)))],
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": {"group": resource.group, "kind": resource.kind, "version": resource.version},
            "responses": responses});
        let (patch, options) = (format!("{META}.Patch"), format!("{META}.DeleteOptions"));
        let request: Option<(&str, bool)> = match action {
            "post" | "put" => Some((body, true)),
            "patch" => Some((&patch, true)),
            "delete" => Some((&options, false)),
            _ => None,
        };
        match self.form {
            Form::V2 => {
                let media: &[&str] = if action == "patch" { &PATCHES } else { &["application/json", "application/yaml"] };
                operation["consumes"] = json!(media);
                operation["produces"] = json!(["application/json", "application/yaml"]);
                operation["schemes"] = json!(["https"]);
                if let Some((name, required)) = request {
                    let shared = self.parameter(method, "body").filter(|_| matches!(action, "patch" | "delete"));
                    let own = || {
                        let mut own = json!({"in": "body", "name": "body", "schema": self.form.reference(name)});
                        if required {
                            own["required"] = json!(true);
                        }
                        own
                    };
                    parameters.insert(0, shared.unwrap_or_else(own));
                }
            }
            Form::V3 => {
                if let Some((name, required)) = request {
                    let media: &[&str] = if action == "patch" { &PATCHES } else { &["application/json", "application/yaml"] };
                    let mut request = json!({ "content": self.content(name, media) });
                    if required {
                        request["required"] = json!(true);
                    }
                    operation["requestBody"] = request;
                }
            }
        }
        if !parameters.is_empty() {
            operation["parameters"] = Value::Array(parameters);
        }
        operation
    }

    fn content(&self, name: &str, media: &[&str]) -> Value {
        let entries = media.iter().map(|media| ((*media).to_owned(), json!({"schema": self.form.reference(name)})));
        Value::Object(entries.collect())
    }

    fn description(&self, verb: &str, sub: &str) -> String {
        let kind = self.resource.kind;
        let of = if sub.is_empty() { String::new() } else { format!(" {sub} of") };
        match verb {
            "patch" => format!("partially update{of} the specified {kind}"),
            "deletecollection" => format!("delete collection of {kind}"),
            "list" => format!("list{of} objects of kind {kind}"),
            "read" | "replace" => format!("{verb}{of} the specified {kind}"),
            _ => format!("{verb}{of} {} {kind}", article(kind)),
        }
    }

    /// Adds the parameters that all operations of a path share.
    fn with_shared(&self, mut item: Value, names: &[&str]) -> Value {
        let mut shared = Vec::new();
        if names.contains(&"name") {
            let mut name = json!({"in": "path", "name": "name", "required": true,
                "description": format!("name of the {}", self.resource.kind)});
            match self.form {
                Form::V2 => {
                    name["type"] = json!("string");
                    name["uniqueItems"] = json!(true);
                }
                Form::V3 => name["schema"] = json!({"type": "string", "uniqueItems": true}),
            }
            shared.push(name);
        }
        if self.resource.namespaced && item.get("post").is_some() || names.contains(&"name") && self.resource.namespaced {
            shared.extend(self.parameter("parameters", "namespace"));
        }
        shared.extend(self.parameter("parameters", "pretty"));
        item["parameters"] = Value::Array(shared);
        item
    }

    /// The one operation of a path shares all of its parameters with itself.
    fn hoist(&self, item: &mut Value) {
        let names = ["pretty"].into_iter().chain(LIST_OPTIONS);
        let mut names: Vec<&str> = names.collect();
        names.sort_unstable();
        let all = self.parameters("get", &names);
        if let Some(operation) = item["get"].as_object_mut() {
            operation.remove("parameters");
        }
        item["parameters"] = Value::Array(all);
    }
}
