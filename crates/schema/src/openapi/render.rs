//! Operations as the JSON of OpenAPI 2 and 3. Parameters that all operations of a path share stand at the
//! path, as upstream has them.

use serde_json::{Map, Value, json};

use super::operations::{Media, Operation, Parameter, Path};

const OBJECT: &[&str] = &[
    "application/json",
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
    "application/cbor",
];
const WATCHABLE: &[&str] = &[
    "application/json",
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
    "application/cbor",
    "application/json;stream=watch",
    "application/vnd.kubernetes.protobuf;stream=watch",
    "application/cbor-seq",
];
const LOG: &[&str] = &[
    "text/plain",
    "application/json",
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
    "application/cbor",
];
const PATCHES: &[&str] = &[
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
    "application/apply-patch+cbor",
];
const DISCOVERY: &[&str] = &[
    "application/json",
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
];

fn produces(media: Media) -> &'static [&'static str] {
    match media {
        Media::Object => OBJECT,
        Media::Watchable => WATCHABLE,
        Media::Connect => &["*/*"],
        Media::Log => LOG,
        Media::Discovery => DISCOVERY,
        Media::JsonOnly => &["application/json"],
    }
}

fn consumes(operation: &Operation) -> &'static [&'static str] {
    match operation.action {
        "patch" => PATCHES,
        "" => produces(operation.media),
        _ => &["*/*"],
    }
}

fn code_words(code: u16) -> &'static str {
    match code {
        200 => "OK",
        201 => "Created",
        202 => "Accepted",
        _ => "Unauthorized",
    }
}

/// The parameters that every operation of the path has.
fn shared(path: &Path) -> Vec<Parameter> {
    let Some((first, rest)) = path.operations.split_first() else {
        return Vec::new();
    };
    let in_all = |parameter: &&Parameter| {
        rest.iter()
            .all(|operation| operation.parameters.contains(parameter))
    };
    first.parameters.iter().filter(in_all).cloned().collect()
}

fn extensions(operation: &Operation, out: &mut Map<String, Value>) {
    if !operation.action.is_empty() {
        out.insert("x-kubernetes-action".into(), operation.action.into());
    }
    if let Some((group, version, kind)) = &operation.gvk {
        let gvk = json!({"group": group, "version": version, "kind": kind});
        out.insert("x-kubernetes-group-version-kind".into(), gvk);
    }
}

pub(super) fn v2(paths: &[Path], definitions: Map<String, Value>, version: &str) -> Value {
    let parameter = |p: &Parameter| {
        let mut out = json!({"in": p.location, "name": p.name, "type": p.type_name, "uniqueItems": true});
        if p.location == "path" {
            out["required"] = true.into();
        }
        out
    };
    let reference = |name: &str| json!({"$ref": format!("#/definitions/{name}")});
    let mut out = Map::new();
    for path in paths {
        let shared = shared(path);
        let mut item = Map::new();
        for operation in &path.operations {
            let mut parameters: Vec<Value> = operation
                .parameters
                .iter()
                .filter(|p| !shared.contains(p))
                .map(parameter)
                .collect();
            if let Some(body) = &operation.body {
                let mut value = json!({"in": "body", "name": "body", "schema": reference(&body.type_name)});
                if body.required {
                    value["required"] = true.into();
                }
                parameters.insert(0, value);
            }
            let schema = operation
                .answer
                .as_deref()
                .map_or_else(|| json!({"type": "string"}), reference);
            let mut responses = Map::new();
            for code in operation.codes {
                responses.insert(
                    code.to_string(),
                    json!({"description": code_words(*code), "schema": schema}),
                );
            }
            responses.insert("401".into(), json!({"description": code_words(401)}));
            let mut value = Map::new();
            value.insert("operationId".into(), operation.id.clone().into());
            value.insert("tags".into(), json!([operation.tag]));
            value.insert("schemes".into(), json!(["https"]));
            value.insert("consumes".into(), json!(consumes(operation)));
            value.insert("produces".into(), json!(produces(operation.media)));
            value.insert("responses".into(), Value::Object(responses));
            if !parameters.is_empty() {
                value.insert("parameters".into(), Value::Array(parameters));
            }
            extensions(operation, &mut value);
            item.insert(operation.method.into(), Value::Object(value));
        }
        if !shared.is_empty() {
            item.insert("parameters".into(), shared.iter().map(parameter).collect());
        }
        out.insert(path.path.clone(), Value::Object(item));
    }
    json!({
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": version},
        "paths": out,
        "definitions": definitions,
        "security": [{"BearerToken": []}],
        "securityDefinitions": {
            "BearerToken": {"description": "Bearer Token authentication", "type": "apiKey", "name": "authorization", "in": "header"}
        },
    })
}

pub(super) fn v3(paths: &[Path], schemas: Map<String, Value>, version: &str) -> Value {
    let parameter = |p: &Parameter| {
        let mut out =
            json!({"in": p.location, "name": p.name, "schema": {"type": p.type_name, "uniqueItems": true}});
        if p.location == "path" {
            out["required"] = true.into();
        }
        out
    };
    let reference = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let content = |media: &[&str], schema: &Value| {
        media
            .iter()
            .map(|media| (media.to_string(), json!({"schema": schema})))
            .collect::<Map<_, _>>()
    };
    let mut out = Map::new();
    for path in paths {
        let shared = shared(path);
        let mut item = Map::new();
        for operation in &path.operations {
            let schema = operation
                .answer
                .as_deref()
                .map_or_else(|| json!({"type": "string"}), reference);
            let mut responses = Map::new();
            for code in operation.codes {
                let content = content(produces(operation.media), &schema);
                responses.insert(
                    code.to_string(),
                    json!({"description": code_words(*code), "content": content}),
                );
            }
            responses.insert("401".into(), json!({"description": code_words(401)}));
            let mut value = Map::new();
            value.insert("operationId".into(), operation.id.clone().into());
            value.insert("tags".into(), json!([operation.tag]));
            value.insert("responses".into(), Value::Object(responses));
            if let Some(body) = &operation.body {
                let mut request =
                    json!({"content": content(consumes(operation), &reference(&body.type_name))});
                if body.required {
                    request["required"] = true.into();
                }
                value.insert("requestBody".into(), request);
            }
            let parameters: Vec<Value> = operation
                .parameters
                .iter()
                .filter(|p| !shared.contains(p))
                .map(parameter)
                .collect();
            if !parameters.is_empty() {
                value.insert("parameters".into(), Value::Array(parameters));
            }
            extensions(operation, &mut value);
            item.insert(operation.method.into(), Value::Object(value));
        }
        if !shared.is_empty() {
            item.insert("parameters".into(), shared.iter().map(parameter).collect());
        }
        out.insert(path.path.clone(), Value::Object(item));
    }
    let mut components = Map::new();
    if !schemas.is_empty() {
        components.insert("schemas".into(), Value::Object(schemas));
    }
    let bearer = json!({"description": "Bearer Token authentication", "type": "apiKey", "name": "authorization", "in": "header"});
    components.insert("securitySchemes".into(), json!({ "BearerToken": bearer }));
    json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": version},
        "paths": out,
        "components": components,
    })
}
