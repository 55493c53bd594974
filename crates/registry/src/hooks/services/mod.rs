//! Services: cluster IPs and node ports are taken before validation, given back when the write fails,
//! and freed when the service no longer has them.

mod addresses;
mod ports;

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;

use serde_json::{Value, json};
use skiff_meta::{GroupKind, Status, field};

use super::ip_allocator::{Cidr, IpAllocator};
use super::port_allocator::PortAllocator;
use super::{Change, Hook};
use crate::{Context, object};
use addresses::normalise_cluster_ips;
use ports::{health_port, node_ports, port_number, wants_health_port, wants_node_ports};

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

    /// Takes what an existing service holds: at start, once for each stored service.
    pub fn adopt(&self, service: &Value) {
        for address in cluster_ips(service).iter().filter_map(|text| text.parse().ok()) {
            if let Some(range) = self.shared.range_of(address) {
                let _ = range.allocate(address);
            }
        }
        for port in node_ports(service) {
            let _ = self.shared.ports.allocate(port);
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

    fn release(&self, taken: &Taken) {
        for address in &taken.addresses {
            if let Some(range) = self.range_of(*address) {
                range.release(*address);
            }
        }
        for port in &taken.ports {
            self.ports.release(*port);
        }
    }
}

/// What one write took so far; goes back when the write fails.
#[derive(Default)]
struct Taken {
    addresses: Vec<IpAddr>,
    ports: Vec<u16>,
}

impl Hook for Services {
    fn begin_create(&self, service: &mut Value, context: &Context) -> Result<Change, Status> {
        self.begin(service, None, context)
    }

    fn begin_update(&self, new: &mut Value, old: &Value, context: &Context) -> Result<Change, Status> {
        keep_allocated(new, old);
        self.begin(new, Some(old), context)
    }

    fn after_delete(&self, service: &Value) {
        let addresses = cluster_ips(service)
            .iter()
            .filter_map(|text| text.parse().ok())
            .collect();
        self.shared.release(&Taken {
            addresses,
            ports: node_ports(service),
        });
    }
}

impl Services {
    fn begin(&self, service: &mut Value, old: Option<&Value>, context: &Context) -> Result<Change, Status> {
        let mut taken = Taken::default();
        let result = self.assign(service, old, &mut taken);
        if result.is_err() || context.dry_run {
            self.shared.release(&taken);
        }
        result?;
        if context.dry_run {
            return Ok(Change::none());
        }
        let freed = old.map(|old| self.freed(service, old)).unwrap_or_default();
        let (commit, revert) = (self.shared.clone(), self.shared.clone());
        Ok(Change::new(
            move || commit.release(&freed),
            move || revert.release(&taken),
        ))
    }

    fn assign(&self, service: &mut Value, old: Option<&Value>, taken: &mut Taken) -> Result<(), Status> {
        normalise_cluster_ips(service, old);
        if type_of(service) != "ExternalName" {
            self.families(service, old)?;
            self.addresses(service, old, taken)?;
        } else if let Some(spec) = service.get_mut("spec").and_then(Value::as_object_mut)
            && old.is_some_and(|old| type_of(old) != "ExternalName")
        {
            for field in ["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"] {
                spec.remove(field);
            }
        }
        self.assign_ports(service, old, taken)
    }

    /// What the old service held and the new one does not.
    fn freed(&self, new: &Value, old: &Value) -> Taken {
        let (now_addresses, now_ports) = (cluster_ips(new), node_ports(new));
        Taken {
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

fn cluster_ips(service: &Value) -> Vec<String> {
    strings(service, "clusterIPs")
}

/// A client that writes the whole service need not know what was allocated for it.
fn keep_allocated(new: &mut Value, old: &Value) {
    if type_of(new) != "ExternalName" && type_of(old) != "ExternalName" {
        if object::at_str(new, &["spec", "clusterIP"]).is_empty() {
            object::put(
                new,
                &["spec", "clusterIP"],
                json!(object::at_str(old, &["spec", "clusterIP"])),
            );
        }
        if cluster_ips(new).is_empty() {
            object::put(new, &["spec", "clusterIPs"], json!(cluster_ips(old)));
        }
        if strings(new, "ipFamilies").is_empty() && !strings(old, "ipFamilies").is_empty() {
            object::put(new, &["spec", "ipFamilies"], json!(strings(old, "ipFamilies")));
        }
    }
    if wants_node_ports(new) && wants_node_ports(old) {
        let old_ports = object::at(old, &["spec", "ports"])
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        let (held, named) = (node_ports(old), node_ports(new));
        let used: Vec<u16> = held.into_iter().filter(|port| named.contains(port)).collect();
        let Some(ports) = new
            .get_mut("spec")
            .and_then(|s| s.get_mut("ports"))
            .and_then(Value::as_array_mut)
        else {
            return;
        };
        for port in ports {
            if port_number(port.get("nodePort")).is_some() {
                continue;
            }
            let name = port.get("name").and_then(Value::as_str).unwrap_or("");
            let before = old_ports
                .iter()
                .rfind(|old| old.get("name").and_then(Value::as_str).unwrap_or("") == name);
            if let Some(number) = before
                .and_then(|old| port_number(old.get("nodePort")))
                .filter(|n| !used.contains(n))
            {
                port["nodePort"] = json!(number);
            }
        }
    }
    if wants_health_port(new)
        && wants_health_port(old)
        && health_port(new).is_none()
        && let Some(port) = health_port(old)
    {
        object::put(new, &["spec", "healthCheckNodePort"], json!(port));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        all.after_delete(&service);
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
        assert_eq!(plain["spec"]["ports"][0].get("nodePort"), None);
        create(
            &all,
            json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]}),
        )
        .expect("free again");
    }
}
