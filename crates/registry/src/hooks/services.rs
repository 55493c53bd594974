//! Services: cluster IPs and node ports are taken before validation, given back when the write fails,
//! and freed when the service no longer has them.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;

use serde_json::{Value, json};
use skiff_meta::{GroupKind, Status, field};

use super::ip_allocator::{Cidr, IpAllocator};
use super::port_allocator::PortAllocator;
use super::{Change, Hook};
use crate::{Context, object};

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

    /// Fills in ipFamilyPolicy and ipFamilies from what the cluster and the service have.
    fn families(&self, service: &mut Value, old: Option<&Value>) -> Result<(), Status> {
        let headless = cluster_ips(service).first().is_some_and(|ip| ip == NONE);
        let selectorless = object::at(service, &["spec", "selector"])
            .and_then(Value::as_object)
            .is_none_or(|s| s.is_empty());
        let mut policy = object::at_str(service, &["spec", "ipFamilyPolicy"]).to_string();
        if policy.is_empty() {
            policy = match old
                .map(|old| object::at_str(old, &["spec", "ipFamilyPolicy"]))
                .filter(|policy| !policy.is_empty())
            {
                Some(policy) => policy.to_string(),
                None if headless && selectorless => "RequireDualStack".to_string(),
                None => "SingleStack".to_string(),
            };
        }
        object::put(service, &["spec", "ipFamilyPolicy"], json!(policy));
        let mut families = strings(service, "ipFamilies");
        let mut addresses = cluster_ips(service);
        if let Some(old) = old
            && policy == "SingleStack"
        {
            if addresses.len() > 1 && addresses == cluster_ips(old) {
                addresses.truncate(1);
                object::put(service, &["spec", "clusterIPs"], json!(addresses));
            }
            if families.len() > 1 && families == strings(old, "ipFamilies") {
                families.truncate(1);
            }
        }
        let policy_path = field::Path::new("spec.ipFamilyPolicy");
        let mut found = Vec::new();
        if policy == "SingleStack" {
            for (many, what) in [
                (addresses.len() == 2, "cluster IPs"),
                (families.len() == 2, "IP families"),
            ] {
                if many {
                    let detail = format!(
                        "must be 'RequireDualStack' or 'PreferDualStack' when multiple {what} are specified"
                    );
                    found.push(field::Error::invalid(&policy_path, policy.as_str(), detail));
                }
            }
        }
        for (index, text) in addresses.iter().enumerate() {
            let Ok(address) = text.parse::<IpAddr>() else {
                break;
            };
            let family = family_name(address.is_ipv4());
            if index >= families.len() {
                if self.shared.family(family).is_some() {
                    families.push(family.to_string());
                } else {
                    let path = field::Path::new("spec.clusterIPs").index(index);
                    found.push(field::Error::invalid(
                        &path,
                        json!(addresses),
                        format!("{family} is not configured on this cluster"),
                    ));
                }
            }
        }
        invalid(service, found)?;
        let default = self
            .shared
            .ranges
            .first()
            .map(|range| family_name(range.cidr().is_ipv4()))
            .unwrap_or("IPv4");
        if families.is_empty() {
            families.push(default.to_string());
        }
        let other = |family: &str| if family == "IPv4" { "IPv6" } else { "IPv4" };
        if headless && selectorless {
            if families.len() < 2 && policy != "SingleStack" {
                families.push(other(&families[0]).to_string());
            }
            object::put(service, &["spec", "ipFamilies"], json!(families));
            return Ok(());
        }
        let mut found = Vec::new();
        if policy == "RequireDualStack" && self.shared.ranges.len() < 2 {
            found.push(field::Error::invalid(
                &policy_path,
                policy.as_str(),
                "this cluster is not configured for dual-stack services",
            ));
        }
        for (index, family) in families.iter().enumerate() {
            if self.shared.family(family).is_none() {
                let path = field::Path::new("spec.ipFamilies").index(index);
                found.push(field::Error::invalid(
                    &path,
                    family.as_str(),
                    "not configured on this cluster",
                ));
            }
        }
        invalid(service, found)?;
        if policy != "SingleStack" && families.len() == 1 && self.shared.ranges.len() == 2 {
            families.push(other(&families[0]).to_string());
        }
        object::put(service, &["spec", "ipFamilies"], json!(families));
        Ok(())
    }

    /// Takes the addresses asked for, and draws those that are missing.
    fn addresses(&self, service: &mut Value, old: Option<&Value>, taken: &mut Taken) -> Result<(), Status> {
        let mut addresses = cluster_ips(service);
        if addresses.first().is_some_and(|ip| ip == NONE) {
            object::put(service, &["spec", "clusterIP"], json!(NONE));
            object::put(service, &["spec", "clusterIPs"], json!([NONE]));
            return Ok(());
        }
        let held = old.map(cluster_ips).unwrap_or_default();
        let asked = json!(addresses);
        for (index, family) in strings(service, "ipFamilies").iter().enumerate() {
            let Some(range) = self.shared.family(family) else {
                continue;
            };
            match addresses.get(index).cloned().filter(|text| !text.is_empty()) {
                Some(text) if held.contains(&text) => {}
                Some(text) => {
                    // An address that cannot be read is validation's to refuse.
                    let Ok(address) = text.parse::<IpAddr>() else {
                        continue;
                    };
                    if let Err(error) = range.allocate(address) {
                        let detail = format!("failed to allocate IP {address}: {error}");
                        return invalid(
                            service,
                            vec![field::Error::invalid(
                                &field::Path::new("spec.clusterIPs"),
                                asked,
                                detail,
                            )],
                        );
                    }
                    taken.addresses.push(address);
                }
                None => {
                    let address = range.allocate_next().map_err(|error| {
                        Status::internal(format_args!(
                            "failed to allocate a serviceIP for Service \"{}\": {error}",
                            object::name(service)
                        ))
                    })?;
                    taken.addresses.push(address);
                    if index < addresses.len() {
                        addresses[index] = address.to_string();
                    } else {
                        addresses.push(address.to_string());
                    }
                }
            }
        }
        object::put(
            service,
            &["spec", "clusterIP"],
            json!(addresses.first().cloned().unwrap_or_default()),
        );
        object::put(service, &["spec", "clusterIPs"], json!(addresses));
        Ok(())
    }

    fn assign_ports(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        taken: &mut Taken,
    ) -> Result<(), Status> {
        let held = old.map(node_ports).unwrap_or_default();
        let wants = wants_node_ports(service);
        let may_have = matches!(type_of(service), "NodePort" | "LoadBalancer");
        let ports = object::at(service, &["spec", "ports"])
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        let mut ports_now = ports.clone();
        // The same node port may serve one port number over several protocols.
        let mut used: Vec<(u16, String)> = Vec::new();
        for (index, port) in ports.iter().enumerate() {
            let protocol = port
                .get("protocol")
                .and_then(Value::as_str)
                .unwrap_or("TCP")
                .to_string();
            let asked = port
                .get("nodePort")
                .and_then(Value::as_u64)
                .and_then(|port| u16::try_from(port).ok())
                .unwrap_or(0);
            if !may_have {
                if old.is_some_and(|old| matches!(type_of(old), "NodePort" | "LoadBalancer"))
                    && held.contains(&asked)
                {
                    remove(&mut ports_now[index], "nodePort");
                }
                continue;
            }
            if asked != 0 {
                let shared = used
                    .iter()
                    .any(|(port, other)| *port == asked && *other != protocol);
                if !held.contains(&asked) && !shared {
                    if let Err(error) = self.shared.ports.allocate(asked) {
                        let path = field::Path::new("spec.ports").index(index).child("nodePort");
                        return invalid(
                            service,
                            vec![field::Error::invalid(&path, asked, error.to_string())],
                        );
                    }
                    taken.ports.push(asked);
                }
                used.push((asked, protocol));
            } else if wants {
                let number = port.get("port").and_then(Value::as_u64);
                let twin = ports_now[..index].iter().find_map(|other| {
                    let same = other.get("port").and_then(Value::as_u64) == number
                        && other.get("protocol").and_then(Value::as_str).unwrap_or("TCP") != protocol;
                    same.then(|| other.get("nodePort").and_then(Value::as_u64))
                        .flatten()
                });
                let given = match twin.and_then(|port| u16::try_from(port).ok()) {
                    Some(port) => port,
                    None => {
                        let port = self.shared.ports.allocate_next().map_err(|error| {
                            Status::internal(format_args!("failed to allocate a nodePort: {error}"))
                        })?;
                        taken.ports.push(port);
                        port
                    }
                };
                ports_now[index]["nodePort"] = json!(given);
                used.push((given, protocol));
            }
        }
        if ports_now != ports {
            object::put(service, &["spec", "ports"], Value::Array(ports_now));
        }
        self.health_check_port(service, old, taken)
    }

    fn health_check_port(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        taken: &mut Taken,
    ) -> Result<(), Status> {
        let asked = health_port(service);
        if !wants_health_port(service) {
            if old.is_some_and(|old| asked.is_some() && health_port(old) == asked)
                && let Some(spec) = service.get_mut("spec")
            {
                remove(spec, "healthCheckNodePort");
            }
            return Ok(());
        }
        let port = match asked {
            Some(port) if old.and_then(health_port) == Some(port) => return Ok(()),
            Some(port) => {
                self.shared.ports.allocate(port).map_err(|error| {
                    Status::internal(format_args!(
                        "failed to allocate requested HealthCheck NodePort {port}: {error}"
                    ))
                })?;
                port
            }
            None => self.shared.ports.allocate_next().map_err(|error| {
                Status::internal(format_args!(
                    "failed to allocate a HealthCheck NodePort 0: {error}"
                ))
            })?,
        };
        taken.ports.push(port);
        object::put(service, &["spec", "healthCheckNodePort"], json!(port));
        Ok(())
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

fn port_number(value: Option<&Value>) -> Option<u16> {
    value
        .and_then(Value::as_u64)
        .and_then(|port| u16::try_from(port).ok())
        .filter(|port| *port != 0)
}

fn health_port(service: &Value) -> Option<u16> {
    port_number(object::at(service, &["spec", "healthCheckNodePort"]))
}

fn node_ports(service: &Value) -> Vec<u16> {
    let ports = object::at(service, &["spec", "ports"]).and_then(Value::as_array);
    let mut found: Vec<u16> = ports
        .into_iter()
        .flatten()
        .filter_map(|port| port_number(port.get("nodePort")))
        .collect();
    found.extend(health_port(service));
    found.sort_unstable();
    found.dedup();
    found
}

fn wants_node_ports(service: &Value) -> bool {
    let off = object::at(service, &["spec", "allocateLoadBalancerNodePorts"]) == Some(&Value::Bool(false));
    match type_of(service) {
        "NodePort" => true,
        "LoadBalancer" => !off,
        _ => false,
    }
}

fn wants_health_port(service: &Value) -> bool {
    type_of(service) == "LoadBalancer"
        && object::at_str(service, &["spec", "externalTrafficPolicy"]) == "Local"
}

fn remove(value: &mut Value, field: &str) {
    if let Some(map) = value.as_object_mut() {
        map.remove(field);
    }
}

/// clusterIP is the older name of clusterIPs[0]: whichever the client changed leads.
fn normalise_cluster_ips(service: &mut Value, old: Option<&Value>) {
    let one = object::at_str(service, &["spec", "clusterIP"]).to_string();
    let many = cluster_ips(service);
    match old {
        None => {
            if !one.is_empty() && many.is_empty() {
                object::put(service, &["spec", "clusterIPs"], json!([one]));
            } else if one.is_empty()
                && let Some(first) = many.first()
            {
                object::put(service, &["spec", "clusterIP"], json!(first));
            }
        }
        Some(old) => {
            let (old_one, old_many) = (object::at_str(old, &["spec", "clusterIP"]), cluster_ips(old));
            if one != old_one && many == old_many {
                let list = if one.is_empty() { json!([]) } else { json!([one]) };
                object::put(service, &["spec", "clusterIPs"], list);
            } else if one == old_one
                && many != old_many
                && let Some(first) = many.first()
            {
                object::put(service, &["spec", "clusterIP"], json!(first));
            } else if many.is_empty() && !one.is_empty() {
                object::put(service, &["spec", "clusterIPs"], json!([one]));
            }
        }
    }
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
