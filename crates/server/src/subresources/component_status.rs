//! ComponentStatus, which upstream keeps for old clients: the health of what this process runs.

use std::sync::Arc;

use http::StatusCode;
use serde_json::{Value, json};
use skiff_meta::{GroupResource, Status};
use skiff_registry::Resource;

use crate::body::Answer;
use crate::chain::Exchange;
use crate::negotiate::Transform;
use crate::respond;
use crate::server::Inner;
use crate::table::{self, IncludeObject};

const NAMES: [&str; 3] = ["controller-manager", "scheduler", "etcd-0"];

pub async fn read(inner: &Arc<Inner>, exchange: &Exchange, resource: &Resource) -> Result<Answer, Status> {
    let output = exchange.output(false)?;
    exchange
        .context
        .warn("v1 ComponentStatus is deprecated in v1.19+".to_string());
    let store_ok = inner.registry.store().revision().await.is_ok();
    let component = |name: &str| {
        let healthy = store_ok || name != "etcd-0";
        json!({"kind": "ComponentStatus", "apiVersion": "v1", "metadata": {"name": name}, "conditions": [
            {"type": "Healthy", "status": if healthy { "True" } else { "False" }, "message": if healthy { "ok" } else { "unavailable" }}]})
    };
    let name = exchange.info.name.as_str();
    let items: Vec<Value> = if name.is_empty() {
        NAMES.iter().map(|name| component(name)).collect()
    } else if NAMES.contains(&name) {
        vec![component(name)]
    } else {
        // COMPAT: in the singular.
        return Err(Status::not_found(
            &GroupResource::new("", "componentstatus"),
            name,
        ));
    };
    if let Transform::Table(version) = &output.transform {
        let include = IncludeObject::read(&exchange.query)?;
        let rows = items
            .iter()
            .map(|item| table::row(resource, item, version, include, 0))
            .collect();
        let value = table::table(version, json!({}), resource.strategy.columns(), rows);
        return respond::raw(exchange, &output, StatusCode::OK, &value);
    }
    if !name.is_empty() {
        return respond::raw(exchange, &output, StatusCode::OK, &items[0]);
    }
    let items: Vec<Value> = items
        .into_iter()
        .map(|item| json!({"metadata": item["metadata"], "conditions": item["conditions"]}))
        .collect();
    let value = json!({"kind": "ComponentStatusList", "apiVersion": "v1", "metadata": {}, "items": items});
    respond::raw(exchange, &output, StatusCode::OK, &value)
}
