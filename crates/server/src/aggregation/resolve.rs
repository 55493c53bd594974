//! From a service to an address that serves it, by the cluster's own Services and EndpointSlices: the API server
//! need not be a client of the service network.

use serde_json::Value;
use skiff_meta::selector::LabelSelector;
use skiff_meta::{GroupResource, Status};
use skiff_registry::{ListOptions, ReadAt, Registry, encode, object};

/// A service as it is stored, `None` if there is none.
pub async fn service(registry: &Registry, namespace: &str, name: &str) -> Result<Option<Value>, Status> {
    let Some(resource) = registry.resources.get("", "v1", "services") else {
        return Ok(None);
    };
    registry.get(resource, namespace, name, ReadAt::Any).await
}

/// The EndpointSlices of a service.
pub async fn endpoint_slices(registry: &Registry, namespace: &str, name: &str) -> Result<Vec<Value>, Status> {
    let Some(resource) = registry.resources.get("discovery.k8s.io", "v1", "endpointslices") else {
        return Ok(Vec::new());
    };
    let labels =
        LabelSelector::parse(&format!("{}={name}", super::SERVICE_NAME)).map_err(Status::internal)?;
    let options = ListOptions {
        namespace: Some(namespace.to_string()),
        labels,
        at: ReadAt::Any,
        ..ListOptions::default()
    };
    let listed = registry.list(resource, options).await?;
    listed
        .items
        .iter()
        .map(|entry| encode::decode(&entry.bytes))
        .collect()
}

/// The port of a service by its number.
pub fn port_name(service: &Value, port: u16) -> Option<&str> {
    let ports = object::at(service, &["spec", "ports"])?.as_array()?;
    let found = ports.iter().find(|entry| entry["port"] == port)?;
    Some(found["name"].as_str().unwrap_or(""))
}

/// All ready addresses behind a port of a service, in the order of the slices.
pub fn ready_addresses(slices: &[Value], port_name: &str) -> Vec<(String, u16)> {
    let mut found = Vec::new();
    for slice in slices {
        let ports = slice["ports"].as_array().into_iter().flatten();
        let Some(port) = ports
            .filter(|port| port["name"].as_str() == Some(port_name))
            .find_map(|port| u16::try_from(port["port"].as_u64()?).ok())
        else {
            continue;
        };
        for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
            if endpoint["conditions"]["ready"].as_bool() == Some(false) {
                continue;
            }
            if let Some(address) = endpoint["addresses"][0].as_str() {
                found.push((address.to_string(), port));
            }
        }
    }
    found
}

/// One address that serves the port of a service.
pub async fn resolve(
    registry: &Registry,
    namespace: &str,
    name: &str,
    port: u16,
) -> Result<(String, u16), Status> {
    let found = service(registry, namespace, name).await?;
    let service = found.ok_or_else(|| Status::not_found(&GroupResource::new("", "services"), name))?;
    match object::at_str(&service, &["spec", "type"]) {
        "" | "ClusterIP" | "NodePort" | "LoadBalancer" => {}
        "ExternalName" => {
            return Ok((
                object::at_str(&service, &["spec", "externalName"]).to_string(),
                port,
            ));
        }
        other => {
            return Err(Status::internal(format_args!(
                "unsupported service type {other:?}"
            )));
        }
    }
    let port_name = port_name(&service, port).ok_or_else(|| {
        Status::service_unavailable(format!("no service port {port} found for service {name:?}"))
    })?;
    let slices = endpoint_slices(registry, namespace, name).await?;
    let mut ready = ready_addresses(&slices, port_name);
    if ready.is_empty() {
        return Err(Status::service_unavailable(format!(
            "no endpoints available for service {name:?}"
        )));
    }
    // One of them, so that several servers share the load.
    Ok(ready.swap_remove(rand::random_range(0..ready.len())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ready_ones_with_the_port() {
        let slices = [
            json!({"ports": [{"name": "other", "port": 1}], "endpoints": [{"addresses": ["10.0.0.9"]}]}),
            json!({"ports": [{"name": "", "port": 443}], "endpoints": [
                {"addresses": ["10.0.0.1"]},
                {"addresses": ["10.0.0.2"], "conditions": {"ready": false}},
                {"addresses": ["10.0.0.3"], "conditions": {"ready": true}}]}),
        ];
        let found = ready_addresses(&slices, "");
        assert_eq!(
            found,
            [("10.0.0.1".to_string(), 443), ("10.0.0.3".to_string(), 443)]
        );
        let service = json!({"spec": {"ports": [{"port": 7443}]}});
        assert_eq!(port_name(&service, 7443), Some(""));
        assert_eq!(port_name(&service, 1), None);
    }
}
