//! One IPAddress object for each cluster IP of a service. The allocation itself is the registry's; these objects
//! show it, as clients of the API expect.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_registry::{EventKind, ListResult, Resource, encode, object};

use super::follow::Follower;
use super::loopback::Loopback;
use crate::server::Inner;

const GROUP: &str = "networking.k8s.io";
const IP_ADDRESSES: &str = "/apis/networking.k8s.io/v1/ipaddresses";
const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";
const ALLOCATOR: &str = "ipallocator.k8s.io";

/// Namespace and name.
type Key = (String, String);

/// How long after a failed write everything is compared again.
const RETRY: Duration = Duration::from_secs(1);

/// What is there at the start is written before the first request.
pub async fn start(inner: &Arc<Inner>) -> Result<(), Status> {
    let Some(resource) = inner.registry.resources.get("", "v1", "services").cloned() else {
        return Ok(());
    };
    let mut compared = match compare(inner, &resource).await {
        Ok(compared) => Some(compared),
        // Perhaps the audit log is full and must not be: the loop below tries again.
        Err(status) => {
            tracing::warn!(%status, "an IPAddress cannot be written");
            None
        }
    };
    let own = inner.clone();
    skiff_supervise::keep("ip-addresses", &inner.shutdown, move || {
        run(own.clone(), resource.clone(), compared.take())
    });
    Ok(())
}

/// The addresses by service.
type Held = HashMap<Key, Vec<String>>;

/// Writes the objects that are missing, and removes those whose service went away while nobody looked.
async fn compare(inner: &Arc<Inner>, resource: &Arc<Resource>) -> Result<(ListResult, Held), Status> {
    let listed = inner.registry.list_readable(resource).await?;
    let mut held = Held::new();
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
    Ok((listed, held))
}

/// Follows the services. A write that fails is made up for by comparing everything again.
async fn run(inner: Arc<Inner>, resource: Arc<Resource>, mut compared: Option<(ListResult, Held)>) {
    while !inner.shutdown.is_cancelled() {
        let begun = match compared.take() {
            Some(begun) => Ok(begun),
            None => compare(&inner, &resource).await,
        };
        let failed = match begun {
            Ok((listed, held)) => {
                let follower = Follower::after(&inner, resource.clone(), &listed);
                follow(&inner, follower, held).await
            }
            Err(status) => Err(status),
        };
        if let Err(status) = failed {
            tracing::warn!(%status, "an IPAddress cannot be written");
            tokio::time::sleep(RETRY).await;
        }
    }
}

async fn follow(inner: &Arc<Inner>, mut follower: Follower, mut held: Held) -> Result<(), Status> {
    while let Some(event) = follower.next().await {
        let head = &event.entry.head;
        let key = (head.namespace.to_string(), head.name.to_string());
        let now = match event.kind {
            EventKind::Deleted => Vec::new(),
            _ => addresses(&encode::decode(&event.entry.bytes)?),
        };
        let before = held.remove(&key).unwrap_or_default();
        write_difference(inner, &key, &before, &now).await?;
        if !now.is_empty() {
            held.insert(key, now);
        }
    }
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

async fn write_difference(
    inner: &Arc<Inner>,
    key: &Key,
    before: &[String],
    now: &[String],
) -> Result<(), Status> {
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
    Loopback::new(inner).ensure(IP_ADDRESSES, &wanted).await
}

/// Removes the object of an address, if it is still this service's.
async fn remove(inner: &Arc<Inner>, (namespace, name): &Key, address: &str) -> Result<(), Status> {
    let loopback = Loopback::new(inner);
    let path = format!("{IP_ADDRESSES}/{address}");
    let Some(present) = loopback.get(&path).await? else {
        return Ok(());
    };
    let parent = &present["spec"]["parentRef"];
    let ours = parent["namespace"] == namespace.as_str() && parent["name"] == name.as_str();
    if !ours || present["metadata"]["labels"][MANAGED_BY] != ALLOCATOR {
        return Ok(());
    }
    loopback.delete(&path, object::uid(&present)).await
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
