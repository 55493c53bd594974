//! The IPAddress objects of cluster IPs: creating one takes the address.

use std::net::IpAddr;

use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_store::{Expect, Merge, Merged, Op, Write};

use super::family_name;
use crate::hooks::Asked;
use crate::{Context, Registry, Resource, encode, object};

const GROUP: &str = "networking.k8s.io";
const FAMILY: &str = "ipaddress.kubernetes.io/ip-family";
const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";
const ALLOCATOR: &str = "ipallocator.k8s.io";

pub(super) fn resource(registry: &Registry) -> Result<&Resource, Status> {
    let found = registry.resources.get(GROUP, "v1", "ipaddresses");
    found
        .map(|found| &**found)
        .ok_or_else(|| Status::internal("no resource ipaddresses"))
}

pub(super) fn key(registry: &Registry, address: IpAddr) -> Result<String, Status> {
    Ok(resource(registry)?.key("", &address.to_string()))
}

/// The object that says that a service has the address.
pub fn ip_address(address: IpAddr, namespace: &str, name: &str) -> Value {
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "IPAddress",
        "metadata": {"name": address.to_string(),
            "labels": {FAMILY: family_name(address.is_ipv4()), MANAGED_BY: ALLOCATOR}},
        "spec": {"parentRef": {"group": "", "resource": "services", "namespace": namespace, "name": name}}})
}

/// Takes the address for the service. Nothing but the address differs between these objects, so that neither admission
/// nor validation is asked about them.
pub(super) fn creation(asked: &Asked<'_>, service: &Value, address: IpAddr) -> Result<Write, Status> {
    let registry = asked.registry;
    let resource = resource(registry)?;
    let mut object = ip_address(address, object::namespace(service), object::name(service));
    registry.track_fields(&Context::of_server(), resource, None, &mut object);
    object::set(&mut object, "uid", uuid::Uuid::new_v4().to_string());
    object::set(&mut object, "creationTimestamp", registry.now_text());
    resource.strategy.begin_create(&mut object);
    resource.strategy.normalise(&mut object);
    let key = key(registry, address)?;
    let bytes = resource.codec.encode(&object)?;
    Ok(Write::new(key, Expect::Absent, Op::Put(bytes)))
}

/// Gives the address back, if it is the service's.
pub(super) async fn removal(
    asked: &Asked<'_>,
    service: &Value,
    address: IpAddr,
) -> Result<Option<Write>, Status> {
    let registry = asked.registry;
    let resource = resource(registry)?;
    let key = key(registry, address)?;
    let mut found = None;
    if !asked.again
        && let Ok(Some(entry)) = registry.cached(resource, &key).await
    {
        found = Some((encode::decode(&entry.bytes)?, entry.revision));
    }
    if found.is_none() {
        // One that was made a moment ago may not be in the cache yet.
        let stored = registry.read_stored(&key).await?;
        let Some(stored) = stored else {
            // A repair may be about to make it anew: then the service does not go without it.
            let stays_away = Op::Merge(Merge::new(|_| Merged::Keep));
            return Ok(Some(Write::new(key, Expect::Absent, stays_away)));
        };
        // What cannot be read stays.
        let Ok(object) = resource.read(&stored) else {
            return Ok(None);
        };
        found = Some((object, stored.mod_revision));
    }
    let own = |object: &Value| {
        is_parent(object, object::namespace(service), object::name(service))
            && object::finalizers(object).is_empty()
    };
    let found = found.filter(|(object, _)| own(object));
    Ok(found.map(|(_, revision)| Write::new(key, Expect::Revision(revision), Op::Delete)))
}

/// Whether the labels are those of an address that an API server took for a service.
pub fn is_managed(ip_address: &Value) -> bool {
    label(ip_address, MANAGED_BY) == Some(ALLOCATOR)
}

/// Whether all labels are as they should be.
pub fn has_labels(ip_address: &Value, address: IpAddr) -> bool {
    is_managed(ip_address) && label(ip_address, FAMILY) == Some(family_name(address.is_ipv4()))
}

fn label<'a>(ip_address: &'a Value, name: &str) -> Option<&'a str> {
    object::metadata(ip_address, "labels")?.get(name)?.as_str()
}

/// Whether the IPAddress is of this service.
pub fn is_parent(ip_address: &Value, namespace: &str, name: &str) -> bool {
    let parent = |field: &str| object::at_str(ip_address, &["spec", "parentRef", field]);
    parent("group").is_empty()
        && parent("resource") == "services"
        && parent("namespace") == namespace
        && parent("name") == name
}
