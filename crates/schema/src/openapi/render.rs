//! Operations as the JSON of OpenAPI 2 and 3. Parameters that all operations of a path share stand at the
//! path, as upstream has them.

use serde_json::{Map, Value, json};

use super::operations::{Media, Operation, Parameter, Path};
use super::{Describe, words};

const OBJECT: &[&str] = &[
    "application/json",
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
];
const WATCHABLE: &[&str] = &[
    "application/json",
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
    "application/json;stream=watch",
    "application/vnd.kubernetes.protobuf;stream=watch",
];
const LOG: &[&str] = &[
    "text/plain",
    "application/json",
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
];
const PATCHES: &[&str] = &[
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
];
/// Name, place where it matters, kind or action where it matters, and the hash that ends the name.
const HASHES: &[(&str, &str, &str, &str)] = &[
    ("allowWatchBookmarks", "", "", "HC2hJt-J"),
    ("body", "", "patch", "78PwaGsr"),
    ("body", "", "", "2Y1dVQaQ"),
    ("command", "", "", "Py3eQybp"),
    ("container", "", "Pod", "1GeXxFDC"),
    ("container", "", "PodAttachOptions", "_Q-EJ3nR"),
    ("container", "", "PodExecOptions", "i5dOmRiM"),
    ("continue", "", "", "QfD61s0i"),
    ("fieldManager", "", "patch", "7c6nTn1T"),
    ("fieldManager", "", "", "Qy4HdaTW"),
    ("fieldSelector", "", "", "xIcQKXFG"),
    ("follow", "", "", "9OIXh_2R"),
    ("force", "", "", "tOGGb0Yi"),
    ("gracePeriodSeconds", "", "", "-K5HaBOS"),
    (
        "ignoreStoreReadErrorWithClusterBreakingPotential",
        "",
        "",
        "QbNkfIqj",
    ),
    ("insecureSkipTLSVerifyBackend", "", "", "gM00jVbe"),
    ("labelSelector", "", "", "5Zw57w4C"),
    ("limit", "", "", "1NfNmdNH"),
    ("limitBytes", "", "", "zwd1RXuc"),
    ("namespace", "", "", "vgWSWtn3"),
    ("orphanDependents", "", "", "uRB25kX5"),
    ("path", "query", "NodeProxyOptions", "rFDtV0x9"),
    ("path", "query", "PodProxyOptions", "oPbzgLUj"),
    ("path", "query", "ServiceProxyOptions", "QCf0eosM"),
    ("path", "path", "", "z6Ciiujn"),
    ("ports", "", "", "91KROJmm"),
    ("pretty", "", "", "tJGM1-ng"),
    ("previous", "", "", "1jxDPu3y"),
    ("propagationPolicy", "", "", "6jk3prlO"),
    ("resourceVersion", "", "", "5WAnf1kx"),
    ("resourceVersionMatch", "", "", "t8XhRHeC"),
    ("sendInitialEvents", "", "", "rLXlEK_k"),
    ("shardSelector", "", "", "Kgyki_3_"),
    ("sinceSeconds", "", "", "vE2NLdnP"),
    ("stderr", "", "PodAttachOptions", "26jJhFUR"),
    ("stderr", "", "PodExecOptions", "W_1TNlWc"),
    ("stdin", "", "PodAttachOptions", "sEFnN3IS"),
    ("stdin", "", "PodExecOptions", "PSzNhyUC"),
    ("stdout", "", "PodAttachOptions", "005YMKE6"),
    ("stdout", "", "PodExecOptions", "-EZLRwV1"),
    ("stream", "", "", "l-48cgXv"),
    ("tailLines", "", "", "9xQLWHMV"),
    ("timeoutSeconds", "", "", "yvYezaOC"),
    ("timestamps", "", "", "c17fW1w_"),
    ("tty", "", "PodAttachOptions", "g7MlET_l"),
    ("tty", "", "PodExecOptions", "s0flW37O"),
    ("watch", "", "", "XNNPZGbK"),
];

fn produces(media: Media) -> &'static [&'static str] {
    match media {
        Media::Object | Media::Discovery => OBJECT,
        Media::Watchable => WATCHABLE,
        Media::Connect => &["*/*"],
        Media::Log => LOG,
        Media::JsonOnly | Media::OpenIdConfiguration => &["application/json"],
        Media::OpenIdKeys => &["application/jwk-set+json"],
    }
}

fn consumes(operation: &Operation) -> &'static [&'static str] {
    match operation.action {
        "patch" => PATCHES,
        "" if matches!(operation.media, Media::OpenIdConfiguration | Media::OpenIdKeys) => &[],
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
    in_order(first.parameters.iter().filter(in_all))
}

/// The parameters of an operation beside the shared ones.
fn own(operation: &Operation, shared: &[Parameter]) -> Vec<Parameter> {
    in_order(operation.parameters.iter().filter(|p| !shared.contains(p)))
}

fn in_order<'a>(parameters: impl Iterator<Item = &'a Parameter>) -> Vec<Parameter> {
    let mut list: Vec<Parameter> = parameters.cloned().collect();
    list.sort_by(|a, b| (&a.name, a.location).cmp(&(&b.name, b.location)));
    list
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

/// Puts a parameter that upstream names into the document's list and returns a reference to it. The names
/// end in a hash over upstream's descriptions, so they can only be known, not computed.
fn name_parameter(
    named: &mut Map<String, Value>,
    name: &str,
    location: &str,
    operation: &Operation,
    value: Value,
) -> Value {
    let kind = operation.gvk.as_ref().map_or("", |(_, _, kind)| kind);
    let Some((_, _, _, hash)) = HASHES.iter().find(|(n, l, k, _)| {
        *n == name
            && (l.is_empty() || *l == location)
            && (k.is_empty() || *k == kind || *k == operation.action)
    }) else {
        return value;
    };
    if name == "body"
        && !value["schema"]["$ref"]
            .as_str()
            .is_some_and(|r| r.contains(".meta.v1."))
    {
        return value;
    }
    let key = format!("{name}-{hash}");
    let reference = json!({"$ref": format!("#/parameters/{key}")});
    named.insert(key, value);
    reference
}

pub(super) fn v2(
    paths: &[Path],
    definitions: Map<String, Value>,
    version: &str,
    describe: &dyn Describe,
) -> Value {
    let (mut named, mut body_names) = (Map::new(), Map::new());
    let mut parameter = |p: &Parameter, operation: &Operation| {
        let mut out = json!({"in": p.location, "name": p.name, "type": p.type_name, "uniqueItems": true});
        if let Some(text) = words::parameter(p, operation, describe) {
            out["description"] = text.into();
        }
        if p.location == "path" {
            out["required"] = true.into();
        }
        name_parameter(&mut named, &p.name, p.location, operation, out)
    };
    let reference = |name: &str| json!({"$ref": format!("#/definitions/{name}")});
    let mut out = Map::new();
    for path in paths {
        let shared = shared(path);
        let mut item = Map::new();
        for operation in &path.operations {
            let mut parameters: Vec<Value> = own(operation, &shared)
                .iter()
                .map(|p| parameter(p, operation))
                .collect();
            if let Some(body) = &operation.body {
                let mut value = json!({"in": "body", "name": "body", "schema": reference(&body.type_name)});
                if body.required {
                    value["required"] = true.into();
                }
                let value = name_parameter(&mut body_names, "body", "body", operation, value);
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
            value.insert(
                "description".into(),
                words::operation(operation, &path.path).into(),
            );
            value.insert("operationId".into(), operation.id.clone().into());
            value.insert("tags".into(), json!([operation.tag]));
            value.insert("schemes".into(), json!(["https"]));
            if !consumes(operation).is_empty() {
                value.insert("consumes".into(), json!(consumes(operation)));
            }
            value.insert("produces".into(), json!(produces(operation.media)));
            value.insert("responses".into(), Value::Object(responses));
            if !parameters.is_empty() {
                value.insert("parameters".into(), Value::Array(parameters));
            }
            extensions(operation, &mut value);
            item.insert(operation.method.into(), Value::Object(value));
        }
        if let Some(first) = path.operations.first().filter(|_| !shared.is_empty()) {
            let shared = shared.iter().map(|p| parameter(p, first)).collect();
            item.insert("parameters".into(), shared);
        }
        out.insert(path.path.clone(), Value::Object(item));
    }
    named.extend(body_names);
    json!({
        "swagger": "2.0",
        "parameters": named,
        "info": {"title": "Kubernetes", "version": version},
        "paths": out,
        "definitions": definitions,
        "security": [{"BearerToken": []}],
        "securityDefinitions": {
            "BearerToken": {"description": "Bearer Token authentication", "type": "apiKey", "name": "authorization", "in": "header"}
        },
    })
}

pub(super) fn v3(
    paths: &[Path],
    schemas: Map<String, Value>,
    version: &str,
    describe: &dyn Describe,
) -> Value {
    let parameter = |p: &Parameter, operation: &Operation| {
        let mut out =
            json!({"in": p.location, "name": p.name, "schema": {"type": p.type_name, "uniqueItems": true}});
        if let Some(text) = words::parameter(p, operation, describe) {
            out["description"] = text.into();
        }
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
            value.insert(
                "description".into(),
                words::operation(operation, &path.path).into(),
            );
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
            let parameters: Vec<Value> = own(operation, &shared)
                .iter()
                .map(|p| parameter(p, operation))
                .collect();
            if !parameters.is_empty() {
                value.insert("parameters".into(), Value::Array(parameters));
            }
            extensions(operation, &mut value);
            item.insert(operation.method.into(), Value::Object(value));
        }
        if let Some(first) = path.operations.first().filter(|_| !shared.is_empty()) {
            let shared = shared.iter().map(|p| parameter(p, first)).collect();
            item.insert("parameters".into(), shared);
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
