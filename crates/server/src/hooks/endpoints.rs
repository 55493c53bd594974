//! The endpoints of the `kubernetes` service: the API servers that are alive, as upstream's lease reconciler keeps them.
//!
//! Each server has a key in the store that ends by itself unless it is renewed. Every server writes the union of these
//! keys into the Endpoints and the EndpointSlice, so a server that dies is left out by the others, and one that stops
//! leaves at once. None of them ever removes another server's key.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_registry::{Expect, Op, store_error};
use tokio::sync::Mutex;

use crate::server::Inner;

/// COMPAT: upstream's place, time and form of the keys.
const PREFIX: &str = "/registry/masterleases/";
const LEASE_SECONDS: i64 = 15;
/// Three attempts before it ends.
const RENEW: Duration = Duration::from_secs(5);
/// How often the keys of all servers are read.
const POLL: Duration = Duration::from_secs(1);
/// As often as upstream writes the objects again if somebody else changed them.
const REPAIR: Duration = Duration::from_secs(10);

/// What this server knows of its own key.
#[derive(Default)]
pub struct OwnLease {
    /// Held over the write, so that nothing renews the key after it was withdrawn.
    withdrawn: Mutex<bool>,
}

pub fn start(inner: &Arc<Inner>) {
    if inner.advertise.address.is_loopback() {
        return;
    }
    let own = inner.clone();
    skiff_supervise::keep("kubernetes-endpoints", &inner.shutdown, move || run(own.clone()));
}

async fn run(inner: Arc<Inner>) {
    let (mut renewed, mut written) = (None::<Instant>, None::<(Instant, BTreeSet<IpAddr>)>);
    let is_due = |since: Option<Instant>, period| since.is_none_or(|at| at.elapsed() >= period);
    loop {
        if is_due(renewed, RENEW) {
            match renew(&inner).await {
                Ok(()) => renewed = Some(Instant::now()),
                Err(status) => tracing::warn!(%status, "cannot renew the lease of this API server"),
            }
        }
        match living(&inner).await {
            Ok(servers) => {
                let due = is_due(written.as_ref().map(|(at, _)| *at), REPAIR);
                let known = written.as_ref().map(|(_, servers)| servers);
                if known.is_some_and(|known| *known != servers) {
                    tracing::info!(?servers, "the API servers of the cluster");
                }
                if due || known != Some(&servers) {
                    match write(&inner, &servers).await {
                        Ok(()) => written = Some((Instant::now(), servers)),
                        Err(status) => {
                            tracing::warn!(%status, "cannot write the endpoints of the service kubernetes");
                        }
                    }
                }
            }
            Err(status) => tracing::warn!(%status, "cannot read the leases of the API servers"),
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Renews the key of this server and brings the endpoints up to date.
pub async fn publish(inner: &Inner) -> Result<(), Status> {
    // Endpoints may not be loopback addresses: pods would reach themselves.
    if inner.advertise.address.is_loopback() {
        return Ok(());
    }
    renew(inner).await?;
    write(inner, &living(inner).await?).await
}

/// Takes this server out of the endpoints. The last one stays in them, as upstream does.
pub async fn withdraw(inner: &Inner) -> Result<(), Status> {
    if inner.advertise.address.is_loopback() {
        return Ok(());
    }
    {
        let mut withdrawn = inner.own_lease.withdrawn.lock().await;
        *withdrawn = true;
        let store = inner.registry.store();
        let removed = store.write(&own_key(inner), Expect::Any, Op::Delete, None).await;
        removed.map_err(store_error)?;
    }
    let others = living(inner).await?;
    if others.is_empty() {
        return Ok(());
    }
    write(inner, &others).await
}

fn own_key(inner: &Inner) -> String {
    format!("{PREFIX}{}", inner.advertise.address)
}

async fn renew(inner: &Inner) -> Result<(), Status> {
    let withdrawn = inner.own_lease.withdrawn.lock().await;
    if *withdrawn {
        return Ok(());
    }
    let value = json!({"kind": "Endpoints", "apiVersion": "v1", "metadata": {},
        "subsets": [{"addresses": [{"ip": inner.advertise.address.to_string()}]}]});
    let op = Op::Put(Bytes::from(value.to_string()));
    let store = inner.registry.store();
    let lease = Some(LEASE_SECONDS);
    let written = store.write(&own_key(inner), Expect::Any, op, lease).await;
    written.map(drop).map_err(store_error)
}

/// The addresses of the servers whose keys have not ended, of the family of this one.
async fn living(inner: &Inner) -> Result<BTreeSet<IpAddr>, Status> {
    let found = inner.registry.store().range(PREFIX, None, 0, None).await;
    let keys = found.map_err(store_error)?.items;
    let keys = keys.iter().map(|item| &*item.key);
    Ok(addresses(keys, inner.advertise.address.is_ipv4()))
}

fn addresses<'a>(keys: impl Iterator<Item = &'a str>, ipv4: bool) -> BTreeSet<IpAddr> {
    keys.filter_map(|key| key.strip_prefix(PREFIX)?.parse().ok())
        .filter(|address: &IpAddr| address.is_ipv4() == ipv4)
        .collect()
}

async fn write(inner: &Inner, servers: &BTreeSet<IpAddr>) -> Result<(), Status> {
    if servers.is_empty() {
        return Ok(());
    }
    let (endpoints, slice) = objects(servers, inner.advertise.port);
    futures::try_join!(
        inner
            .registry
            .ensure_merged(endpoints, |present, wanted| merged(present, wanted, &["subsets"])),
        inner.registry.ensure_merged(slice, |present, wanted| merged(
            present,
            wanted,
            &["endpoints", "ports"]
        )),
    )
    .map(drop)
}

fn objects(servers: &BTreeSet<IpAddr>, port: u16) -> (Value, Value) {
    let ports = json!([{"name": "https", "port": port, "protocol": "TCP"}]);
    let all: Vec<Value> = servers.iter().map(|ip| json!({"ip": ip.to_string()})).collect();
    let endpoints = json!({"kind": "Endpoints", "apiVersion": "v1",
        "metadata": {"name": "kubernetes", "namespace": "default", "labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}},
        "subsets": [{"addresses": all, "ports": ports}]});
    let ready: Vec<Value> = servers
        .iter()
        .map(|ip| json!({"addresses": [ip.to_string()], "conditions": {"ready": true}}))
        .collect();
    let family = match servers.first() {
        Some(IpAddr::V6(_)) => "IPv6",
        _ => "IPv4",
    };
    let slice = json!({"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": "kubernetes", "namespace": "default", "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": family, "endpoints": ready, "ports": ports});
    (endpoints, slice)
}

/// The present object with these fields of the wanted one; `None` if it has them.
fn merged(present: &Value, wanted: &Value, fields: &[&str]) -> Option<Value> {
    if fields.iter().all(|field| present[field] == wanted[field]) {
        return None;
    }
    let mut object = present.clone();
    for field in fields {
        object[field] = wanted[field].clone();
    }
    Some(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_endpoints_are_the_union_of_the_keys() {
        let keys = [
            "/registry/masterleases/192.0.2.2",
            "/registry/masterleases/192.0.2.1",
            "/registry/masterleases/2001:db8::1",
            "/registry/masterleases/nonsense",
        ];
        let found = addresses(keys.into_iter(), true);
        let (endpoints, slice) = objects(&found, 6443);
        let all = &endpoints["subsets"][0];
        assert_eq!(
            all["addresses"],
            json!([{"ip": "192.0.2.1"}, {"ip": "192.0.2.2"}])
        );
        assert_eq!(all["ports"][0]["port"], 6443);
        assert_eq!(slice["endpoints"].as_array().map(Vec::len), Some(2));
        assert_eq!(slice["addressType"], "IPv4");
        assert_eq!(addresses(keys.into_iter(), false).len(), 1);
        assert_eq!(merged(&slice, &slice, &["endpoints", "ports"]), None);
        let other = json!({"metadata": {"uid": "u"}, "endpoints": []});
        let brought = merged(&other, &slice, &["endpoints", "ports"]).unwrap();
        assert_eq!(brought["metadata"]["uid"], "u");
        assert_eq!(brought["endpoints"], slice["endpoints"]);
    }
}
