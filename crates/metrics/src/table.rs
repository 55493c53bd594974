//! The tables that `kubectl get nodes.metrics.k8s.io` prints, with metrics-server's columns.

use serde_json::{Value, json};
use skiff_meta::quantity::Quantity;

/// How much of each object goes with its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Include {
    None,
    Metadata,
    Object,
}

/// `version` is that of the table (`v1`, `v1beta1`).
pub(crate) fn table(items: &[Value], version: &str, include: Include) -> Value {
    // COMPAT: without objects metrics-server knows no columns, and has null for the rows.
    if items.is_empty() {
        return json!({"kind": "Table", "apiVersion": format!("meta.k8s.io/{version}"), "metadata": {},
            "columnDefinitions": null, "rows": null});
    }
    let rows: Vec<Value> = items.iter().map(|item| row(item, version, include)).collect();
    let columns = json!([
        {"name": "Name", "type": "string", "format": "name", "description": "Name of the resource", "priority": 0},
        {"name": "cpu", "type": "string", "format": "quantity", "description": "", "priority": 0},
        {"name": "memory", "type": "string", "format": "quantity", "description": "", "priority": 0},
        {"name": "Window", "type": "string", "format": "duration", "description": "", "priority": 0},
    ]);
    json!({
        "kind": "Table",
        "apiVersion": format!("meta.k8s.io/{version}"),
        "metadata": {},
        "columnDefinitions": columns,
        "rows": rows,
    })
}

fn row(item: &Value, version: &str, include: Include) -> Value {
    let cells = [
        item["metadata"]["name"].clone(),
        total(item, "cpu"),
        total(item, "memory"),
        item["window"].clone(),
    ];
    let mut row = json!({"cells": cells});
    match include {
        Include::None => {}
        Include::Metadata => {
            row["object"] = json!({
                "kind": "PartialObjectMetadata",
                "apiVersion": format!("meta.k8s.io/{version}"),
                "metadata": item["metadata"],
            });
        }
        Include::Object => row["object"] = item.clone(),
    }
    row
}

/// What a node uses, or the containers of a pod together.
fn total(item: &Value, resource: &str) -> Value {
    let of = |usage: &Value| Quantity::parse(usage[resource].as_str().unwrap_or("0")).ok();
    let sum = match item["containers"].as_array() {
        Some(containers) => containers
            .iter()
            .filter_map(|container| of(&container["usage"]))
            .reduce(|a, b| a.plus(&b)),
        None => of(&item["usage"]),
    };
    json!(sum.map(|sum| sum.to_string()).unwrap_or_else(|| "0".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows() {
        let pod = json!({"kind": "PodMetrics", "metadata": {"name": "p"}, "window": "15s", "containers": [
            {"name": "a", "usage": {"cpu": "1500u", "memory": "1Mi"}},
            {"name": "b", "usage": {"cpu": "500u", "memory": "512Ki"}}]});
        let node =
            json!({"metadata": {"name": "n"}, "window": "1m0s", "usage": {"cpu": "7n", "memory": "4Ki"}});
        let shown = table(&[pod.clone(), node], "v1", Include::Metadata);
        let cells = |at: usize| shown["rows"][at]["cells"].clone();
        assert_eq!(cells(0), json!(["p", "2m", "1536Ki", "15s"]));
        assert_eq!(cells(1), json!(["n", "7n", "4Ki", "1m0s"]));
        let object = &shown["rows"][0]["object"];
        assert_eq!(object["kind"], "PartialObjectMetadata");
        let whole = table(std::slice::from_ref(&pod), "v1beta1", Include::Object);
        assert_eq!(whole["rows"][0]["object"], pod);
        assert_eq!(whole["apiVersion"], "meta.k8s.io/v1beta1");
        assert_eq!(table(&[pod], "v1", Include::None)["rows"][0].get("object"), None);
        assert_eq!(table(&[], "v1", Include::None)["columnDefinitions"], Value::Null);
    }
}
