//! What the Metrics API says of itself: discovery, and OpenAPI of version 3. There is none of version 2: the API server
//! would keep its whole document a second time, with ours merged in, for clients that never create such objects.

use std::sync::OnceLock;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::{GROUP, VERSION};

const PREFIX: &str = "io.k8s.metrics.pkg.apis.metrics.v1beta1";
const MACHINERY: &str = "io.k8s.apimachinery.pkg";
/// A small group whose document has the common types.
const SOURCE: &str = "apis/coordination.k8s.io/v1";

pub(crate) struct Resource {
    pub(crate) plural: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) namespaced: bool,
}

pub(crate) const RESOURCES: [Resource; 2] = [
    Resource {
        plural: "nodes",
        kind: "NodeMetrics",
        namespaced: false,
    },
    Resource {
        plural: "pods",
        kind: "PodMetrics",
        namespaced: true,
    },
];

/// `/apis/metrics.k8s.io/v1beta1`.
pub(crate) fn resource_list() -> Value {
    let resources: Vec<Value> = RESOURCES
        .iter()
        .map(|resource| {
            json!({"name": resource.plural, "singularName": "", "namespaced": resource.namespaced,
                "kind": resource.kind, "verbs": ["get", "list"]})
        })
        .collect();
    json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": format!("{GROUP}/{VERSION}"),
        "resources": resources})
}

/// `/apis` in the aggregated form.
pub(crate) fn groups() -> Value {
    let resources: Vec<Value> = RESOURCES
        .iter()
        .map(|resource| {
            json!({"resource": resource.plural, "responseKind": {"group": "", "version": "", "kind": resource.kind},
                "scope": if resource.namespaced { "Namespaced" } else { "Cluster" },
                "singularResource": "", "verbs": ["get", "list"]})
        })
        .collect();
    json!({"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {},
        "items": [{"metadata": {"name": GROUP},
            "versions": [{"version": VERSION, "resources": resources, "freshness": "Current"}]}]})
}

/// The OpenAPI documents.
pub(crate) struct OpenApi {
    pub(crate) v3: String,
    pub(crate) v3_protobuf: Vec<u8>,
    pub(crate) v3_index: String,
}

pub(crate) fn openapi() -> &'static OpenApi {
    static DOCUMENTS: OnceLock<OpenApi> = OnceLock::new();
    DOCUMENTS.get_or_init(|| {
        let v3 = v3();
        let text = v3.to_string();
        let hash: String = Sha256::digest(&text)
            .iter()
            .map(|byte| format!("{byte:02X}"))
            .collect();
        let path = format!("apis/{GROUP}/{VERSION}");
        let url = format!("/openapi/v3/{path}?hash={hash}");
        OpenApi {
            v3_protobuf: skiff_schema::openapi::v3_protobuf(&v3),
            v3: text,
            v3_index: json!({"paths": {path: {"serverRelativeURL": url}}}).to_string(),
        }
    })
}

/// The types, with references made by `reference`.
fn types(reference: &dyn Fn(&str) -> Value) -> Map<String, Value> {
    let own = |name: &str| reference(&format!("{PREFIX}.{name}"));
    let machinery = |name: &str| reference(&format!("{MACHINERY}.{name}"));
    let gvk = |kind: &str| json!([{"group": GROUP, "version": VERSION, "kind": kind}]);
    let text = |description: &str| json!({"type": "string", "description": description});
    let mut usage = json!({"type": "object", "additionalProperties": machinery("api.resource.Quantity")});
    usage["description"] =
        json!("Usage by resource: cpu in cores, averaged over the window, and memory, the working set.");
    let mut head = Map::new();
    head.insert("apiVersion".into(), text("Version of the schema of this object."));
    head.insert("kind".into(), text("Kind of this object."));
    let object = |kind: &str, description: &str, more: Vec<(&str, Value)>| {
        let mut properties = head.clone();
        properties.insert("metadata".into(), machinery("apis.meta.v1.ObjectMeta"));
        properties.insert("timestamp".into(), machinery("apis.meta.v1.Time"));
        properties.insert("window".into(), machinery("apis.meta.v1.Duration"));
        let mut required = vec!["timestamp", "window"];
        for (name, schema) in more {
            required.push(name);
            properties.insert(name.to_owned(), schema);
        }
        json!({"type": "object", "description": description, "properties": properties, "required": required,
            "x-kubernetes-group-version-kind": gvk(kind)})
    };
    let list = |kind: &str| {
        let mut properties = head.clone();
        properties.insert("metadata".into(), machinery("apis.meta.v1.ListMeta"));
        properties.insert("items".into(), json!({"type": "array", "items": own(kind)}));
        json!({"type": "object", "description": format!("A list of {kind}."), "properties": properties,
            "required": ["items"], "x-kubernetes-group-version-kind": gvk(&format!("{kind}List"))})
    };
    let containers = json!({"type": "array", "items": own("ContainerMetrics"),
        "description": "The containers of the pod, all read within the same window."});
    let node = "What a node used between timestamp - window and timestamp.";
    let pod = "What the containers of a pod used between timestamp - window and timestamp.";
    let mut types = Map::new();
    let mut add = |name: &str, schema: Value| types.insert(format!("{PREFIX}.{name}"), schema);
    add(
        "ContainerMetrics",
        json!({"type": "object", "description": "What a container used.",
        "properties": {"name": text("Name of the container."), "usage": usage}, "required": ["name", "usage"]}),
    );
    add(
        "NodeMetrics",
        object("NodeMetrics", node, vec![("usage", usage.clone())]),
    );
    add("NodeMetricsList", list("NodeMetrics"));
    add(
        "PodMetrics",
        object("PodMetrics", pod, vec![("containers", containers)]),
    );
    add("PodMetricsList", list("PodMetrics"));
    types
}

/// The paths; `responses` describes a success that has a body of a type.
fn paths(responses: &dyn Fn(&str) -> Value, parameter: &dyn Fn(&str, &str) -> Value) -> Map<String, Value> {
    let root = format!("/apis/{GROUP}/{VERSION}");
    let mut paths = Map::new();
    let mut add = |path: String, resource: &Resource, action: &str, operation: String, in_path: &[&str]| {
        let kind = resource.kind;
        let body = if action == "list" {
            format!("{kind}List")
        } else {
            kind.to_owned()
        };
        let mut parameters: Vec<Value> = in_path.iter().map(|name| parameter(name, "path")).collect();
        if action == "list" {
            parameters.extend(["fieldSelector", "labelSelector"].map(|name| parameter(name, "query")));
        }
        paths.insert(
            path,
            json!({"get": {
                "description": format!("{} {kind}", if action == "list" { "list objects of kind" } else { "read the specified" }),
                "operationId": operation,
                "parameters": parameters,
                "responses": responses(&format!("{PREFIX}.{body}")),
                "tags": ["metrics_v1beta1"],
                "x-kubernetes-action": action,
                "x-kubernetes-group-version-kind": {"group": GROUP, "version": VERSION, "kind": kind},
            }}),
        );
    };
    for resource in &RESOURCES {
        let (plural, kind) = (resource.plural, resource.kind);
        if resource.namespaced {
            let inside = format!("{root}/namespaces/{{namespace}}/{plural}");
            let all = format!("listMetricsV1beta1{kind}ForAllNamespaces");
            add(format!("{root}/{plural}"), resource, "list", all, &[]);
            let list = format!("listMetricsV1beta1Namespaced{kind}");
            add(inside.clone(), resource, "list", list, &["namespace"]);
            let read = format!("readMetricsV1beta1Namespaced{kind}");
            add(
                format!("{inside}/{{name}}"),
                resource,
                "get",
                read,
                &["name", "namespace"],
            );
        } else {
            let list = format!("listMetricsV1beta1{kind}");
            add(format!("{root}/{plural}"), resource, "list", list, &[]);
            let read = format!("readMetricsV1beta1{kind}");
            add(
                format!("{root}/{plural}/{{name}}"),
                resource,
                "get",
                read,
                &["name"],
            );
        }
    }
    paths
}

fn v3() -> Value {
    // A reference beside which anything else stands is wrapped, as upstream does.
    let reference =
        |name: &str| json!({"allOf": [{"$ref": format!("#/components/schemas/{name}")}], "default": {}});
    let responses = |name: &str| {
        let schema = json!({"schema": {"$ref": format!("#/components/schemas/{name}")}});
        json!({"200": {"description": "OK", "content": {"application/json": schema}}})
    };
    let parameter = |name: &str, place: &str| json!({"name": name, "in": place, "required": place == "path", "schema": {"type": "string", "uniqueItems": true}});
    let mut schemas = types(&reference);
    let source = skiff_api::facts::openapi().v3_group_version(SOURCE);
    let source: Value = source
        .and_then(|document| serde_json::from_slice(&document.bytes).ok())
        .unwrap_or_default();
    let common = source["components"]["schemas"]
        .as_object()
        .cloned()
        .unwrap_or_default();
    schemas.extend(common.into_iter().filter(|(name, _)| name.starts_with(MACHINERY)));
    for (name, format) in [("api.resource.Quantity", ""), ("apis.meta.v1.Duration", "")] {
        let schema = json!({"type": "string", "format": format});
        schemas.entry(format!("{MACHINERY}.{name}")).or_insert(schema);
    }
    json!({"openapi": "3.0.0", "info": {"title": "metrics", "version": VERSION},
        "paths": paths(&responses, &parameter), "components": {"schemas": schemas}})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                if let Some(Value::String(name)) = map.get("$ref") {
                    found.push(name.clone());
                }
                map.values().for_each(|value| references(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_of_the_v3_document_leads_somewhere() {
        let document = v3();
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 10);
        for reference in found {
            let pointer = reference.trim_start_matches('#');
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
        assert!(!openapi().v3_protobuf.is_empty());
        assert!(openapi().v3_index.contains("?hash="));
    }

    #[test]
    fn discovery() {
        let list = resource_list();
        assert_eq!(list["resources"][1]["kind"], "PodMetrics");
        assert_eq!(list["resources"][0]["namespaced"], false);
        assert_eq!(
            groups()["items"][0]["versions"][0]["resources"][1]["scope"],
            "Namespaced"
        );
    }
}
