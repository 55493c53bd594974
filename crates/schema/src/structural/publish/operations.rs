//! The operations on a custom resource. Parameters are those that built-in operations have.

use serde_json::{Map, Value, json};

use super::{Form, META, Published};

const SCALE: &str = "io.k8s.api.autoscaling.v1.Scale";
/// Where the parameters of built-in operations are looked up.
const MODEL: &str = "/apis/apps/v1/namespaces/{namespace}/deployments";

const LIST_OPTIONS: [&str; 11] = [
    "allowWatchBookmarks",
    "continue",
    "fieldSelector",
    "labelSelector",
    "limit",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "shardSelector",
    "timeoutSeconds",
    "watch",
];
const WRITE_OPTIONS: [&str; 3] = ["dryRun", "fieldManager", "fieldValidation"];
const PATCH_OPTIONS: [&str; 4] = ["dryRun", "fieldManager", "fieldValidation", "force"];
const DELETE_OPTIONS: [&str; 5] = [
    "dryRun",
    "gracePeriodSeconds",
    "ignoreStoreReadErrorWithClusterBreakingPotential",
    "orphanDependents",
    "propagationPolicy",
];
const PATCHES: [&str; 3] = [
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/apply-patch+yaml",
];

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

/// `pub.example.com` as `PubExampleCom`.
fn camel(text: &str) -> String {
    text.split(|c: char| !c.is_ascii_alphanumeric())
        .map(capital)
        .collect()
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map_or_else(String::new, |first| first.to_lowercase().chain(chars).collect())
}

/// `a` or `an`, as upstream chooses; what looks like a plural has none.
fn article(kind: &str) -> &'static str {
    if kind.ends_with('s') && !kind.ends_with("ss") {
        return " ";
    }
    let vowel = kind
        .chars()
        .next()
        .is_some_and(|first| "aeiou".contains(first.to_ascii_lowercase()));
    if vowel { " an " } else { " a " }
}

pub(super) struct Operations<'a> {
    pub resource: &'a Published<'a>,
    pub form: Form,
    pub model: &'a Value,
}

impl Operations<'_> {
    pub fn id(&self, verb: &str, sub: &str, suffix: &str, namespaced: bool) -> String {
        let (verb, collection) = match verb {
            "deletecollection" => ("delete", "Collection"),
            verb => (verb, ""),
        };
        let resource = self.resource;
        let group = camel(resource.group.trim_end_matches(".k8s.io"));
        let scope = if namespaced && resource.namespaced {
            "Namespaced"
        } else {
            ""
        };
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
            let shared = parameter["$ref"]
                .as_str()
                .and_then(|text| text.strip_prefix("#/parameters/"));
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
            let operations = items
                .iter()
                .flat_map(|item| item.as_object().into_iter().flatten());
            operations
                .filter(|(key, _)| wanted.is_none_or(|wanted| *key == wanted))
                .map(|(key, value)| {
                    if key == "parameters" {
                        value
                    } else {
                        &value["parameters"]
                    }
                })
                .collect()
        };
        let find = |lists: Vec<&Value>| {
            let all = lists
                .into_iter()
                .flat_map(|list| list.as_array().into_iter().flatten());
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
        names
            .iter()
            .filter_map(|name| self.parameter(method, name))
            .collect()
    }

    pub fn one(&self, method: &str, action: &str, verb: &str, sub: &str) -> Value {
        let resource = self.resource;
        let (own, list) = (
            resource.model_name(resource.kind),
            resource.model_name(resource.list_kind),
        );
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
                Form::V3 => {
                    response["content"] = self.content(answer, &["application/json", "application/yaml"])
                }
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
                let media: &[&str] = if action == "patch" {
                    &PATCHES
                } else {
                    &["application/json", "application/yaml"]
                };
                operation["consumes"] = json!(media);
                operation["produces"] = json!(["application/json", "application/yaml"]);
                operation["schemes"] = json!(["https"]);
                if let Some((name, required)) = request {
                    let shared = self
                        .parameter(method, "body")
                        .filter(|_| matches!(action, "patch" | "delete"));
                    let own = || {
                        let mut own =
                            json!({"in": "body", "name": "body", "schema": self.form.reference(name)});
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
                    let media: &[&str] = if action == "patch" {
                        &PATCHES
                    } else {
                        &["application/json", "application/yaml"]
                    };
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
        let entries = media
            .iter()
            .map(|media| ((*media).to_owned(), json!({"schema": self.form.reference(name)})));
        Value::Object(entries.collect())
    }

    fn description(&self, verb: &str, sub: &str) -> String {
        let kind = self.resource.kind;
        let of = if sub.is_empty() {
            String::new()
        } else {
            format!(" {sub} of")
        };
        match verb {
            "patch" => format!("partially update{of} the specified {kind}"),
            "deletecollection" => format!("delete collection of {kind}"),
            "list" => format!("list{of} objects of kind {kind}"),
            "read" | "replace" => format!("{verb}{of} the specified {kind}"),
            _ => format!("{verb}{of}{}{kind}", article(kind)),
        }
    }

    /// Adds the parameters that all operations of a path share.
    pub fn with_shared(&self, mut item: Value, named: bool) -> Value {
        let mut shared = Vec::new();
        if named {
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
        if self.resource.namespaced {
            shared.extend(self.parameter("parameters", "namespace"));
        }
        shared.extend(self.parameter("parameters", "pretty"));
        item["parameters"] = Value::Array(shared);
        item
    }

    /// The one operation of a path shares all of its parameters with itself.
    pub fn hoist(&self, item: &mut Value) {
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
