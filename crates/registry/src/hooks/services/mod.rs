//! Services: cluster IPs and node ports are taken before validation, given back when the write fails,
//! and freed when the service no longer has them.

mod addresses;
mod ports;

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;
use skiff_api::core::service::{normalize_cluster_ips, patch_allocated_values};
use skiff_meta::{GroupKind, Status, field};

use super::ip_allocator::{Cidr, IpAllocator};
use super::port_allocator::PortAllocator;
use super::{Change, Hook, Settled};
use crate::{Context, object};
use ports::{health_port, listed_ports, node_ports, wants_health_port};

const NONE: &str = "None";

/// The allocators of a cluster: one range a family, the first is the default family.
pub struct Services {
    shared: Arc<Shared>,
}

struct Shared {
    ranges: Vec<IpAllocator>,
    ports: PortAllocator,
}

impl Services {
    pub fn new(cidrs: &[Cidr], ports: RangeInclusive<u16>) -> Services {
        let ranges = cidrs.iter().map(|cidr| IpAllocator::new(*cidr)).collect();
        Services {
            shared: Arc::new(Shared {
                ranges,
                ports: PortAllocator::new(ports),
            }),
        }
    }

    /// What is allocated and not under way. To be asked for before the stored services are read.
    pub fn settled(&self) -> SettledNumbers {
        self.settled_at(Instant::now())
    }

    fn settled_at(&self, now: Instant) -> SettledNumbers {
        let ranges = self.shared.ranges.iter();
        SettledNumbers {
            addresses: ranges.map(|range| range.settled(now)).collect(),
            ports: self.shared.ports.settled(now),
        }
    }

    /// Whether there are allocations of writes with an unknown outcome which [`Services::reconcile`] can decide by now.
    pub fn has_overdue(&self) -> bool {
        let now = Instant::now();
        self.shared.ports.has_overdue(now) || self.shared.ranges.iter().any(|range| range.has_overdue(now))
    }

    /// Takes what the stored services hold, and frees what was settled before they were read and is held by none.
    pub fn reconcile(&self, settled: SettledNumbers, services: &[Value]) {
        let addresses: HashSet<IpAddr> = services.iter().flat_map(addresses_of).collect();
        let ports: HashSet<u16> = services.iter().flat_map(node_ports).collect();
        let mut freed = self.shared.ports.free_unheld(settled.ports, &ports);
        for (range, settled) in self.shared.ranges.iter().zip(settled.addresses) {
            freed += range.free_unheld(settled, &addresses);
        }
        if freed > 0 {
            tracing::info!(freed, "freed cluster IPs and node ports that no service holds");
        }
        for address in addresses {
            if let Some(range) = self.shared.range_of(address)
                && range.allocate(address).is_ok()
            {
                range.hold(address);
            }
        }
        for port in ports {
            if self.shared.ports.allocate(port).is_ok() {
                self.shared.ports.hold(port);
            }
        }
    }

    /// The ranges, as they were given.
    pub fn cidrs(&self) -> Vec<String> {
        self.shared
            .ranges
            .iter()
            .map(|range| range.cidr().to_string())
            .collect()
    }

    /// The first address of the default range: the `kubernetes` service.
    pub fn api_server_ip(&self) -> Option<IpAddr> {
        self.shared.ranges.first().map(|range| range.cidr().address(1))
    }
}

impl Shared {
    fn range_of(&self, address: IpAddr) -> Option<&IpAllocator> {
        self.ranges.iter().find(|range| range.cidr().contains(address))
    }

    fn family(&self, name: &str) -> Option<&IpAllocator> {
        self.ranges
            .iter()
            .find(|range| family_name(range.cidr().is_ipv4()) == name)
    }

    fn hold(&self, taken: &Taken) {
        for address in &taken.addresses {
            if let Some(range) = self.range_of(*address) {
                range.hold(*address);
            }
        }
        for port in &taken.ports {
            self.ports.hold(*port);
        }
    }

    fn doubt(&self, taken: &Taken) {
        let now = Instant::now();
        for address in &taken.addresses {
            if let Some(range) = self.range_of(*address) {
                range.doubt(*address, now);
            }
        }
        for port in &taken.ports {
            self.ports.doubt(*port, now);
        }
    }

    fn release(&self, taken: &Taken) {
        for address in &taken.addresses {
            if let Some(range) = self.range_of(*address) {
                range.release(*address);
            }
        }
        if !taken.dry_run {
            for port in &taken.ports {
                self.ports.release(*port);
            }
        }
    }
}

/// Allocations with their numbers, by range; see [`Services::settled`].
#[derive(Default)]
pub struct SettledNumbers {
    addresses: Vec<Vec<(u128, u64)>>,
    ports: Vec<(u16, u64)>,
}

/// What one write took so far; goes back when the write fails.
#[derive(Default)]
struct Taken {
    addresses: Vec<IpAddr>,
    ports: BTreeSet<u16>,
    /// A dry run asks for ports without taking them.
    dry_run: bool,
}

impl Hook for Services {
    fn begin_create(&self, service: &mut Value, context: &Context) -> Result<Change, Status> {
        self.begin(service, None, context)
    }

    fn begin_update(&self, new: &mut Value, old: &Value, context: &Context) -> Result<Change, Status> {
        patch_allocated_values(new, old);
        self.begin(new, Some(old), context)
    }

    fn begin_delete(&self, service: &Value) -> Change {
        let freed = Taken {
            addresses: addresses_of(service),
            ports: node_ports(service).into_iter().collect(),
            dry_run: false,
        };
        let shared = self.shared.clone();
        Change::new(move |settled| match settled {
            Settled::Committed => shared.release(&freed),
            Settled::Reverted => {}
            // Still held, or gone: the next comparison with the stored services tells.
            Settled::Unknown => shared.doubt(&freed),
        })
    }
}

impl Services {
    fn begin(&self, service: &mut Value, old: Option<&Value>, context: &Context) -> Result<Change, Status> {
        let mut taken = Taken {
            dry_run: context.dry_run,
            ..Taken::default()
        };
        let result = self.assign(service, old, &mut taken);
        if result.is_err() || context.dry_run {
            self.shared.release(&taken);
        }
        result?;
        if context.dry_run {
            return Ok(Change::none());
        }
        let freed = old.map(|old| self.freed(service, old)).unwrap_or_default();
        let shared = self.shared.clone();
        Ok(Change::new(move |settled| match settled {
            Settled::Committed => {
                shared.hold(&taken);
                shared.release(&freed);
            }
            Settled::Reverted => shared.release(&taken),
            Settled::Unknown => {
                shared.doubt(&taken);
                shared.doubt(&freed);
            }
        }))
    }

    fn assign(&self, service: &mut Value, old: Option<&Value>, taken: &mut Taken) -> Result<(), Status> {
        normalize_cluster_ips(service, old);
        self.families(service, old)?;
        self.addresses(service, old, taken)?;
        self.assign_ports(service, old, taken)
    }

    /// What the old service held and the new one does not.
    fn freed(&self, new: &Value, old: &Value) -> Taken {
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
        Taken {
            dry_run: false,
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

fn family_name(v4: bool) -> &'static str {
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

fn addresses_of(service: &Value) -> Vec<IpAddr> {
    let texts = cluster_ips(service);
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

fn cluster_ips(service: &Value) -> Vec<String> {
    strings(service, "clusterIPs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn services(cidrs: &[&str]) -> Services {
        let cidrs: Vec<Cidr> = cidrs
            .iter()
            .map(|text| Cidr::parse(text).expect("a CIDR"))
            .collect();
        Services::new(&cidrs, 30000..=30100)
    }

    fn create(services: &Services, spec: Value) -> Result<Value, String> {
        let mut service = json!({"metadata": {"name": "s"}, "spec": spec});
        match services.begin_create(&mut service, &Context::default()) {
            Ok(change) => {
                change.commit();
                Ok(service["spec"].clone())
            }
            Err(status) => Err(status.message),
        }
    }

    #[test]
    fn cluster_ips() {
        let one = services(&["10.0.0.0/24"]);
        let spec = create(&one, json!({})).expect("allocates");
        assert_eq!(spec["clusterIPs"][0], spec["clusterIP"]);
        assert_eq!(spec["ipFamilies"], json!(["IPv4"]));
        assert_eq!(spec["ipFamilyPolicy"], "SingleStack");
        let spec = create(&one, json!({"clusterIP": "None", "selector": {"a": "b"}})).expect("headless");
        assert_eq!(spec["clusterIPs"], json!(["None"]));
        create(&one, json!({"clusterIP": "10.0.0.10"})).expect("free");
        assert_eq!(
            create(&one, json!({"clusterIP": "10.0.0.10"})),
            Err("Service \"s\" is invalid: spec.clusterIPs: Invalid value: [\"10.0.0.10\"]: failed to allocate IP 10.0.0.10: provided IP is already allocated".into())
        );
        assert!(
            create(&one, json!({"ipFamilyPolicy": "RequireDualStack"}))
                .expect_err("single")
                .contains("not configured for dual-stack")
        );
        let two = services(&["10.0.0.0/24", "fd00::/112"]);
        let spec = create(&two, json!({"ipFamilyPolicy": "PreferDualStack"})).expect("dual");
        assert_eq!(spec["ipFamilies"], json!(["IPv4", "IPv6"]));
        assert_eq!(spec["clusterIPs"].as_array().map(Vec::len), Some(2));
    }

    #[test]
    fn a_failed_write_gives_back() {
        let all = services(&["10.0.0.0/24"]);
        let mut service = json!({"metadata": {"name": "s"}, "spec": {"clusterIP": "10.0.0.7", "type": "NodePort", "ports": [{"port": 80, "nodePort": 30005}]}});
        drop(
            all.begin_create(&mut service, &Context::default())
                .expect("allocates"),
        );
        let change = all
            .begin_create(&mut service, &Context::default())
            .expect("allocates again");
        change.commit();
        assert!(
            all.begin_create(&mut service.clone(), &Context::default())
                .is_err()
        );
        all.begin_delete(&service).commit();
        assert!(all.begin_create(&mut service, &Context::default()).is_ok());
    }

    #[test]
    fn node_ports_follow_updates() {
        let all = services(&["10.0.0.0/24"]);
        let spec = create(&all, json!({"type": "NodePort", "ports": [{"port": 80}]})).expect("allocates");
        let old = json!({"metadata": {"name": "s"}, "spec": spec});
        let port = old["spec"]["ports"][0]["nodePort"].clone();
        let mut new =
            json!({"metadata": {"name": "s"}, "spec": {"type": "NodePort", "ports": [{"port": 81}]}});
        all.begin_update(&mut new, &old, &Context::default())
            .expect("keeps")
            .commit();
        assert_eq!(new["spec"]["ports"][0]["nodePort"], port);
        assert_eq!(new["spec"]["clusterIP"], old["spec"]["clusterIP"]);
        let mut plain = new.clone();
        plain["spec"]["type"] = json!("ClusterIP");
        all.begin_update(&mut plain, &new, &Context::default())
            .expect("frees")
            .commit();
        create(
            &all,
            json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]}),
        )
        .expect("free again");
    }
}
