//! One IPAddress object for each cluster IP of a service. The allocation itself is the registry's; these objects
//! show it, as clients of the API expect.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_registry::{Context, DeleteOptions, EventKind, Open, ReadAt, encode, is_not_found, object};

use super::follow::Follower;
use crate::server::Inner;

const GROUP: &str = "networking.k8s.io";
const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";
const ALLOCATOR: &str = "ipallocator.k8s.io";

/// Namespace and name.
type Key = (String, String);

pub async fn start(inner: &Arc<Inner>) -> Result<(), Status> {
    let Some(resource) = inner.registry.resources.get("", "v1", "services").cloned() else {
        return Ok(());
    };
    // What is there at the start is written before the first request; addresses whose service went away while
    // nobody looked are given back.
    let listed = inner.registry.list_readable(&resource).await?;
    let mut held: HashMap<Key, Vec<String>> = HashMap::new();
    for entry in &listed.items {
        let service = encode::decode(&entry.bytes)?;
        let key = key_of(&service);
        let addresses = addresses(&service);
        for address in &addresses {
            ensure(inner, &key, address).await?;
        }
        held.insert(key, addresses);
    }
    drop_unheld(inner, &held).await?;
    let inner = inner.clone();
    tokio::spawn(async move {
        let mut follower = Follower::after(&inner, resource, &listed);
        while let Some(event) = follower.next().await {
            let head = &event.entry.head;
            let key = (head.namespace.to_string(), head.name.to_string());
            let now = match event.kind {
                EventKind::Deleted => Vec::new(),
                _ => encode::decode(&event.entry.bytes).map_or(Vec::new(), |service| addresses(&service)),
            };
            let before = held.remove(&key).unwrap_or_default();
            if let Err(status) = bring(&inner, &key, &before, &now).await {
                tracing::warn!(%status, service = key.1, "an IPAddress cannot be written");
            }
            if !now.is_empty() {
                held.insert(key, now);
            }
        }
    });
    Ok(())
}

fn key_of(service: &Value) -> Key {
    (
        object::namespace(service).to_string(),
        object::name(service).to_string(),
    )
}

fn addresses(service: &Value) -> Vec<String> {
    object::at(service, &["spec", "clusterIPs"])
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .filter(|address| address.parse::<std::net::IpAddr>().is_ok())
        .map(str::to_string)
        .collect()
}

async fn bring(inner: &Arc<Inner>, key: &Key, before: &[String], now: &[String]) -> Result<(), Status> {
    for address in now.iter().filter(|address| !before.contains(address)) {
        ensure(inner, key, address).await?;
    }
    for address in before.iter().filter(|address| !now.contains(address)) {
        remove(inner, key, address).await?;
    }
    Ok(())
}

async fn ensure(inner: &Arc<Inner>, (namespace, name): &Key, address: &str) -> Result<(), Status> {
    let family = if address.contains(':') { "IPv6" } else { "IPv4" };
    let parent = json!({"group": "", "resource": "services", "namespace": namespace, "name": name});
    let wanted = json!({"apiVersion": "networking.k8s.io/v1", "kind": "IPAddress",
        "metadata": {"name": address, "labels": {
            "ipaddress.kubernetes.io/ip-family": family, MANAGED_BY: ALLOCATOR}},
        "spec": {"parentRef": parent}});
    inner.registry.ensure(wanted).await
}

/// Removes the object of an address, if it is still this service's.
async fn remove(inner: &Arc<Inner>, (namespace, name): &Key, address: &str) -> Result<(), Status> {
    let registry = &inner.registry;
    let Some(resource) = registry.resources.get(GROUP, "v1", "ipaddresses").cloned() else {
        return Ok(());
    };
    let Some(present) = registry.get(&resource, "", address, ReadAt::Latest).await? else {
        return Ok(());
    };
    let parent = &present["spec"]["parentRef"];
    let ours = parent["namespace"] == namespace.as_str() && parent["name"] == name.as_str();
    if !ours || present["metadata"]["labels"][MANAGED_BY] != ALLOCATOR {
        return Ok(());
    }
    let options = DeleteOptions {
        uid: Some(object::uid(&present).to_string()),
        ..DeleteOptions::default()
    };
    match registry
        .delete(&Context::default(), &resource, "", address, &options, &Open)
        .await
    {
        Err(status) if is_not_found(&status) => Ok(()),
        result => result.map(drop),
    }
}

async fn drop_unheld(inner: &Arc<Inner>, held: &HashMap<Key, Vec<String>>) -> Result<(), Status> {
    let Some(resource) = inner.registry.resources.get(GROUP, "v1", "ipaddresses").cloned() else {
        return Ok(());
    };
    let Some(services) = inner.registry.resources.get("", "v1", "services") else {
        return Ok(());
    };
    let listed = inner.registry.list_readable(&resource).await?;
    for entry in &listed.items {
        let present = encode::decode(&entry.bytes)?;
        let parent = &present["spec"]["parentRef"];
        let text = |field: &str| parent[field].as_str().unwrap_or("").to_string();
        let key = (text("namespace"), text("name"));
        let address = object::name(&present);
        // A service that cannot be read keeps its addresses.
        if inner
            .registry
            .is_unreadable(services, &services.key(&key.0, &key.1))
        {
            continue;
        }
        let is_held = held
            .get(&key)
            .is_some_and(|list| list.iter().any(|known| known == address));
        if !is_held && text("resource") == "services" {
            remove(inner, &key, address).await?;
        }
    }
    Ok(())
}
