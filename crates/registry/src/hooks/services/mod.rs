//! Services: which cluster IPs and node ports a write takes and frees. They are chosen before validation, and taken in the
//! store, in the transaction that writes the service: a cluster IP is taken by creating its IPAddress, a node port by its
//! bit in the record that all API servers share ([`node_ports`]). So several servers never give out the same one, and
//! however a write ends, nothing is left behind.

mod addresses;
mod ip_addresses;
mod node_ports;
mod pending;
mod ports;
mod repair;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use skiff_api::core::service::{normalize_cluster_ips, patch_allocated_values};
use skiff_meta::{GroupKind, Status, field};
use skiff_store::{Expect, Op, Write};

use super::cidr::Cidr;
use super::{Asked, Change, Hook};
use crate::object;
use node_ports::PortRange;
use pending::{Hold, Pending};
use ports::{FoundRecord, health_port, listed_ports, node_ports, wants_health_port};

pub use ip_addresses::{has_labels, ip_address, is_managed, is_parent};
pub use repair::{Finding, PortRepair};

const NONE: &str = "None";

/// How services get addresses and ports, by the flags of this server.
pub struct Services {
    /// One range a family; the first is the default family.
    cidrs: Vec<Cidr>,
    ports: PortRange,
    pending: Arc<Pending>,
}

impl Services {
    pub fn new(cidrs: &[Cidr], ports: RangeInclusive<u16>) -> Services {
        Services {
            cidrs: cidrs.to_vec(),
            ports: PortRange::new(ports),
            pending: Arc::default(),
        }
    }

    /// The ranges, as they were given.
    pub fn cidrs(&self) -> Vec<String> {
        self.cidrs.iter().map(Cidr::to_string).collect()
    }

    /// The first address of the default range: the `kubernetes` service.
    pub fn api_server_ip(&self) -> Option<IpAddr> {
        self.cidrs.first().map(|cidr| cidr.address(1))
    }

    fn has_family(&self, name: &str) -> bool {
        self.cidrs.iter().any(|cidr| family_name(cidr.is_ipv4()) == name)
    }
}

/// What one write is to take.
struct Taken {
    addresses: Vec<IpAddr>,
    ports: BTreeSet<u16>,
    /// A dry run asks for ports without taking them.
    dry_run: bool,
    /// The node ports that are taken, if this write asks for any.
    record: FoundRecord,
    /// Keeps other writes of this process from choosing the same.
    hold: Hold,
}

/// What the old service held and the new one does not.
struct Freed {
    addresses: Vec<IpAddr>,
    ports: Vec<u16>,
}

#[async_trait]
impl Hook for Services {
    fn allocates(&self) -> bool {
        true
    }

    async fn begin_create(&self, service: &mut Value, asked: &Asked<'_>) -> Result<Change, Status> {
        self.begin(service, None, asked).await
    }

    async fn begin_update(&self, new: &mut Value, old: &Value, asked: &Asked<'_>) -> Result<Change, Status> {
        patch_allocated_values(new, old);
        self.begin(new, Some(old), asked).await
    }

    async fn begin_delete(&self, service: &Value, asked: &Asked<'_>) -> Result<Change, Status> {
        let freed = Freed {
            addresses: addresses_of(service),
            ports: node_ports(service),
        };
        let mut change = Change::default();
        self.free(service, freed, &[], asked, &mut change).await?;
        Ok(change)
    }
}

impl Services {
    async fn begin(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        asked: &Asked<'_>,
    ) -> Result<Change, Status> {
        let mut taken = Taken {
            addresses: Vec::new(),
            ports: BTreeSet::new(),
            dry_run: asked.context.dry_run,
            record: None,
            hold: Hold::new(&self.pending),
        };
        normalize_cluster_ips(service, old);
        self.families(service, old)?;
        self.addresses(service, old, asked, &mut taken).await?;
        self.assign_ports(service, old, asked, &mut taken).await?;
        if asked.context.dry_run {
            return Ok(Change::default());
        }
        let mut change = Change::default();
        for address in &taken.addresses {
            change.take(ip_addresses::creation(asked, service, *address)?);
        }
        let freed = match old {
            Some(old) => self.freed(service, old),
            None => Freed {
                addresses: Vec::new(),
                ports: Vec::new(),
            },
        };
        let ports: Vec<u16> = taken.ports.iter().copied().collect();
        self.free(service, freed, &ports, asked, &mut change).await?;
        change.held = Some(Box::new(taken.hold));
        Ok(change)
    }

    /// Adds to the change what is freed, and the node ports that are taken.
    async fn free(
        &self,
        service: &Value,
        freed: Freed,
        taken_ports: &[u16],
        asked: &Asked<'_>,
        change: &mut Change,
    ) -> Result<(), Status> {
        for address in freed.addresses {
            if let Some(removal) = ip_addresses::removal(asked, service, address).await? {
                change.free(removal);
            }
        }
        if !taken_ports.is_empty() || !freed.ports.is_empty() {
            let merge = self.ports.merge(taken_ports.to_vec(), freed.ports);
            change
                .with
                .push(Write::new(node_ports::KEY, Expect::Any, Op::Merge(merge)));
        }
        Ok(())
    }

    fn freed(&self, new: &Value, old: &Value) -> Freed {
        // What a change of type leaves behind is still in the object here; its strategy drops it later.
        let now_addresses = if type_of(new) == "ExternalName" {
            Vec::new()
        } else {
            cluster_ips(new)
        };
        let mut now_ports = Vec::new();
        if matches!(type_of(new), "NodePort" | "LoadBalancer") {
            now_ports = listed_ports(new);
        }
        if wants_health_port(new) {
            now_ports.extend(health_port(new));
        }
        Freed {
            addresses: cluster_ips(old)
                .iter()
                .filter(|text| !now_addresses.contains(text))
                .filter_map(|text| text.parse().ok())
                .collect(),
            ports: node_ports(old)
                .into_iter()
                .filter(|port| !now_ports.contains(port))
                .collect(),
        }
    }
}

fn invalid(service: &Value, found: Vec<field::Error>) -> Result<(), Status> {
    if found.is_empty() {
        return Ok(());
    }
    Err(Status::invalid(
        &GroupKind::new("", "Service"),
        object::name(service),
        &found,
    ))
}

pub fn family_name(v4: bool) -> &'static str {
    if v4 { "IPv4" } else { "IPv6" }
}

fn type_of(service: &Value) -> &str {
    match object::at_str(service, &["spec", "type"]) {
        "" => "ClusterIP",
        other => other,
    }
}

fn strings(service: &Value, field: &str) -> Vec<String> {
    object::at(service, &["spec", field])
        .and_then(Value::as_array)
        .map(|list| {
            list.iter()
                .filter_map(|value| value.as_str().map(str::to_string))
                .collect()
        })
        .unwrap_or_default()
}

/// The cluster IPs of a service.
pub fn addresses_of(service: &Value) -> Vec<IpAddr> {
    let texts = cluster_ips(service);
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

fn cluster_ips(service: &Value) -> Vec<String> {
    strings(service, "clusterIPs")
}

#[cfg(test)]
mod tests;
