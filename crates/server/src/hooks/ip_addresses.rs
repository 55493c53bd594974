//! Repairs the IPAddresses of cluster IPs. A service is written together with its IPAddresses, so there is nothing to do,
//! unless somebody else changed one of them, or another server ended between the two (upstream's writes them one after the
//! other). Several servers may do this at the same time. One rule keeps it from harm: an IPAddress whose service does not
//! have it (yet) is left alone for as long as a request that writes the service may take.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use skiff_meta::Status;
use skiff_registry::hooks::services::{
    addresses_of, family_name, has_labels, ip_address, is_managed, is_parent,
};
use skiff_registry::{Cidr, EventKind, ReadAt, Resource, encode, object};

use super::allocation_events::{About, report};
use super::follow::Follower;
use super::loopback::Loopback;
use crate::server::Inner;

const GROUP: &str = "networking.k8s.io";
const IP_ADDRESSES: &str = "/apis/networking.k8s.io/v1/ipaddresses";
/// As often as upstream compares everything.
const INTERVAL: Duration = Duration::from_secs(180);
/// How long after a failed pass everything is compared again.
const RETRY: Duration = Duration::from_secs(1);
/// How long a service may take to appear. COMPAT: upstream's number, the time limit of a request.
const GRACE: SignedDuration = SignedDuration::from_secs(60);

/// What is missing at the start is written before the first request.
pub async fn start(inner: &Arc<Inner>) -> Result<(), Status> {
    let Some(repair) = Repair::new(inner) else {
        return Ok(());
    };
    let mut next = Some(repair.pass_or_log().await);
    skiff_supervise::keep("ip-addresses", &inner.shutdown, move || {
        repair.clone().run(next.take().unwrap_or(RETRY))
    });
    Ok(())
}

/// Compares everything once.
pub async fn repair(inner: &Arc<Inner>, now: Timestamp) -> Result<(), Status> {
    match Repair::new(inner) {
        Some(repair) => repair.pass(now).await.map(drop),
        None => Ok(()),
    }
}

#[derive(Clone)]
struct Repair {
    inner: Arc<Inner>,
    services: Arc<Resource>,
    addresses: Arc<Resource>,
    cidrs: Arc<Resource>,
}

/// When something that is left alone for now is to be looked at again.
type Due = Option<Timestamp>;

fn sooner(one: Due, other: Due) -> Due {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

impl Repair {
    fn new(inner: &Arc<Inner>) -> Option<Repair> {
        let resources = &inner.registry.resources;
        Some(Repair {
            services: resources.get("", "v1", "services")?.clone(),
            addresses: resources.get(GROUP, "v1", "ipaddresses")?.clone(),
            cidrs: resources.get(GROUP, "v1", "servicecidrs")?.clone(),
            inner: inner.clone(),
        })
    }

    async fn run(self, mut wait: Duration) {
        let mut follower = Follower::new(&self.inner, self.addresses.clone());
        loop {
            let next = tokio::time::sleep(wait);
            tokio::pin!(next);
            loop {
                let event = tokio::select! {
                    event = follower.next() => event,
                    () = &mut next => break,
                };
                let Some(event) = event else { return };
                // A new one is its maker's; the next pass looks at it.
                if event.kind == EventKind::Added {
                    continue;
                }
                let changed = match encode::decode(&event.entry.bytes) {
                    Ok(address) => self.sync_parent(&address, Timestamp::now()).await,
                    Err(status) => Err(status),
                };
                if let Err(status) = changed {
                    tracing::warn!(%status, "cannot repair an IPAddress");
                    next.as_mut().reset(tokio::time::Instant::now() + RETRY);
                }
            }
            wait = self.pass_or_log().await;
        }
    }

    /// When to make the next pass.
    async fn pass_or_log(&self) -> Duration {
        let now = Timestamp::now();
        match self.pass(now).await {
            Ok(due) => due.map_or(INTERVAL, |due| {
                let wait = Duration::try_from(due.duration_since(now)).unwrap_or_default();
                wait.clamp(RETRY, INTERVAL)
            }),
            Err(status) => {
                tracing::warn!(%status, "cannot compare the IPAddresses with the services");
                RETRY
            }
        }
    }

    /// Looks at everything. What seems to be wrong is read again before anything is done about it.
    async fn pass(&self, now: Timestamp) -> Result<Due, Status> {
        let registry = &self.inner.registry;
        let services = registry.list_readable(&self.services).await?;
        let addresses = registry.list_readable(&self.addresses).await?;
        let mut parents: HashMap<String, (String, String)> = HashMap::new();
        let mut sound = HashSet::new();
        for entry in &addresses.items {
            let address = encode::decode(&entry.bytes)?;
            let name = object::name(&address).to_owned();
            if name.parse().is_ok_and(|ip: IpAddr| has_labels(&address, ip)) {
                sound.insert(name.clone());
            }
            parents.insert(name, parent_of(&address));
        }
        let ranges = self.ranges().await?;
        let mut due = None;
        for entry in &services.items {
            let service = encode::decode(&entry.bytes)?;
            let own = (
                object::namespace(&service).to_owned(),
                object::name(&service).to_owned(),
            );
            let mut is_sound = true;
            for address in addresses_of(&service) {
                let name = address.to_string();
                let held = parents.get(&name) == Some(&own) && sound.contains(&name);
                is_sound &= held && ranges.iter().any(|range| range.hands_out(address));
                if held {
                    parents.remove(&name);
                }
            }
            if !is_sound {
                due = sooner(due, self.sync_service(&own.0, &own.1, now).await?);
            }
        }
        // What is left is no service's that was seen.
        for name in parents.keys() {
            due = sooner(due, self.sync_address(name, now).await?);
        }
        Ok(due)
    }

    /// The ranges of all ServiceCIDRs, ready or not.
    async fn ranges(&self) -> Result<Vec<Cidr>, Status> {
        let listed = self.inner.registry.list_readable(&self.cidrs).await?;
        let mut ranges = Vec::new();
        for entry in &listed.items {
            let cidr = encode::decode(&entry.bytes)?;
            let texts = object::at(&cidr, &["spec", "cidrs"]).and_then(Value::as_array);
            let texts = texts.into_iter().flatten().filter_map(Value::as_str);
            ranges.extend(texts.filter_map(|text| Cidr::parse(text).ok()));
        }
        Ok(ranges)
    }

    /// The newest state of an object; `Err(())` inside: it is there, and cannot be read.
    async fn newest(
        &self,
        resource: &Resource,
        namespace: &str,
        name: &str,
    ) -> Result<Result<Option<Value>, ()>, Status> {
        let registry = &self.inner.registry;
        match registry.get(resource, namespace, name, ReadAt::Latest).await {
            Ok(found) => Ok(Ok(found)),
            Err(_) if registry.is_unreadable(resource, &resource.key(namespace, name)) => Ok(Err(())),
            Err(status) => Err(status),
        }
    }

    /// An IPAddress was changed or deleted: its service may lack it now.
    async fn sync_parent(&self, address: &Value, now: Timestamp) -> Result<(), Status> {
        let (namespace, name) = parent_of(address);
        let registry = &self.inner.registry;
        // A service that is gone takes its addresses along.
        let seen = registry.get_entry(&self.services, &namespace, &name, ReadAt::Any);
        if name.is_empty() || seen.await.is_ok_and(|seen| seen.is_none()) {
            return Ok(());
        }
        self.sync_service(&namespace, &name, now).await.map(drop)
    }

    /// Sees to it that the addresses of a service are its own.
    async fn sync_service(&self, namespace: &str, name: &str, now: Timestamp) -> Result<Due, Status> {
        let Ok(Some(service)) = self.newest(&self.services, namespace, name).await? else {
            return Ok(None);
        };
        let tell = |reason, message: String| {
            let about = About::service(namespace, name, object::uid(&service));
            let inner = &self.inner;
            async move { report(inner, about, reason, "ClusterIPAllocation", &message).await }
        };
        let ranges = self.ranges().await?;
        let mut due = None;
        for address in addresses_of(&service) {
            let family = family_name(address.is_ipv4());
            if !ranges.iter().any(|range| range.hands_out(address)) {
                let message = format!(
                    "Cluster IP [{family}]: {address} is not within any configured Service CIDR; please recreate service"
                );
                tell("ClusterIPOutOfRange", message).await;
                continue;
            }
            let text = address.to_string();
            let Ok(found) = self.newest(&self.addresses, "", &text).await? else {
                continue;
            };
            let Some(found) = found else {
                // A service goes together with its address: one that is still there really lacks it.
                let again = self.newest(&self.services, namespace, name).await?;
                let same = |now: &Value| object::uid(now) == object::uid(&service);
                if !again.is_ok_and(|now| now.as_ref().is_some_and(same)) {
                    return Ok(due);
                }
                let message = format!("Cluster IP [{family}]: {address} is not allocated; repairing");
                tell("ClusterIPNotAllocated", message).await;
                self.create(address, namespace, name).await?;
                continue;
            };
            if is_parent(&found, namespace, name) {
                if !has_labels(&found, address) {
                    self.recreate(&found, address, namespace, name).await?;
                }
                continue;
            }
            let (other_namespace, other_name) = parent_of(&found);
            if !other_name.is_empty() {
                match self.newest(&self.services, &other_namespace, &other_name).await? {
                    Err(()) => continue,
                    Ok(Some(other)) if addresses_of(&other).contains(&address) => {
                        let message = format!(
                            "Cluster IP [{family}]:{address} was assigned to multiple services; please recreate service"
                        );
                        tell("ClusterIPAlreadyAllocated", message).await;
                        continue;
                    }
                    Ok(_) => {}
                }
                if let Some(at) = left_alone_until(&found, now) {
                    due = sooner(due, Some(at));
                    continue;
                }
            }
            let message = format!(
                "the ClusterIP [{family}]: {address} for Service {namespace}/{name} has a wrong reference; repairing"
            );
            tell("ClusterIPNotAllocated", message).await;
            self.recreate(&found, address, namespace, name).await?;
        }
        Ok(due)
    }

    /// Removes an IPAddress that no service has.
    async fn sync_address(&self, name: &str, now: Timestamp) -> Result<Due, Status> {
        let Ok(Some(found)) = self.newest(&self.addresses, "", name).await? else {
            return Ok(None);
        };
        if !is_managed(&found) {
            return Ok(None);
        }
        let (namespace, service) = parent_of(&found);
        let (reason, message);
        if service.is_empty() {
            reason = "IPAddressNotAllocated";
            message = format!(
                "IPAddress {name} appears to have been modified, not referencing a Service: cleaning up"
            );
        } else {
            let Ok(parent) = self.newest(&self.services, &namespace, &service).await? else {
                return Ok(None);
            };
            let holds = |parent: &Value| {
                let name: Option<IpAddr> = name.parse().ok();
                name.is_some_and(|name| addresses_of(parent).contains(&name))
            };
            if parent.as_ref().is_some_and(holds) {
                return Ok(None);
            }
            if let Some(at) = left_alone_until(&found, now) {
                return Ok(Some(at));
            }
            (reason, message) = match parent {
                None => (
                    "IPAddressNotAllocated",
                    format!(
                        "IPAddress: {name} for Service {namespace}/{service} appears to have leaked: cleaning up"
                    ),
                ),
                Some(_) => (
                    "IPAddressWrongReference",
                    format!(
                        "IPAddress: {name} for Service {namespace}/{service} has a wrong reference; cleaning up"
                    ),
                ),
            };
        }
        let about = About::ip_address(name, object::uid(&found));
        report(&self.inner, about, reason, "IPAddressAllocation", &message).await;
        self.delete(&found).await?;
        Ok(None)
    }

    async fn create(&self, address: IpAddr, namespace: &str, name: &str) -> Result<(), Status> {
        let wanted = ip_address(address, namespace, name);
        Loopback::new(&self.inner).ensure(IP_ADDRESSES, &wanted).await
    }

    /// This very object: one that was made anew since is another's.
    async fn delete(&self, found: &Value) -> Result<(), Status> {
        let path = format!("{IP_ADDRESSES}/{}", object::name(found));
        Loopback::new(&self.inner).delete(&path, object::uid(found)).await
    }

    async fn recreate(
        &self,
        found: &Value,
        address: IpAddr,
        namespace: &str,
        name: &str,
    ) -> Result<(), Status> {
        self.delete(found).await?;
        self.create(address, namespace, name).await
    }
}

/// Until when an IPAddress may be that of a service that is being written.
fn left_alone_until(address: &Value, now: Timestamp) -> Option<Timestamp> {
    let created = object::at_str(address, &["metadata", "creationTimestamp"]);
    // One of which nobody knows how old it is, is old.
    let until = skiff_meta::time::parse(created)?.saturating_add(GRACE).ok()?;
    (now <= until).then_some(until)
}

/// Namespace and name of the service that an IPAddress is of; empty if it is of none.
fn parent_of(address: &Value) -> (String, String) {
    let parent = |field: &str| object::at_str(address, &["spec", "parentRef", field]).to_owned();
    if !parent("group").is_empty() || parent("resource") != "services" {
        return Default::default();
    }
    (parent("namespace"), parent("name"))
}
