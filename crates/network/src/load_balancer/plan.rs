//! Which addresses each Service of type LoadBalancer gets. Pure: objects in, addresses and refusals out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Service, ServiceSpec};

use super::pool::{POOL_CLASS, Range, allocate};

/// The `loadBalancerClass` of Services that are reached at the nodes' own addresses, as those without a class are where there
/// is no pool.
pub const NODE_CLASS: &str = "skiff.io/node";
const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

/// Ports of the nodes that no Service may take.
pub type Reserved = BTreeMap<(String, u16), &'static str>;

/// A node that takes traffic for Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalancerNode {
    pub name: String,
    pub addresses: Vec<IpAddr>,
}

impl BalancerNode {
    /// `None` for a node that is not ready, or that says that it takes none. Its external addresses, if it has some,
    /// else its internal ones.
    pub fn of(node: &Node) -> Option<BalancerNode> {
        if node
            .metadata
            .labels
            .iter()
            .flatten()
            .any(|(name, _)| name == EXCLUDED)
        {
            return None;
        }
        let status = node.status.as_ref()?;
        let mut conditions = status.conditions.iter().flatten();
        if !conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True") {
            return None;
        }
        let of_type = |wanted: &str| -> Vec<IpAddr> {
            let all = status.addresses.iter().flatten();
            all.filter(|address| address.type_ == wanted)
                .filter_map(|address| address.address.parse().ok())
                .collect()
        };
        let external = of_type("ExternalIP");
        Some(BalancerNode {
            name: node.metadata.name.clone()?,
            addresses: if external.is_empty() {
                of_type("InternalIP")
            } else {
                external
            },
        })
    }
}

/// What a Service gets.
#[derive(Clone, Debug)]
pub struct Planned {
    pub service: Arc<Service>,
    pub addresses: Vec<IpAddr>,
    /// Why it gets none.
    pub refusal: Option<String>,
    pub source: Source,
}

/// Where addresses come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Nodes,
    Pool,
}

/// Where the addresses of a Service come from, if it is one of ours.
fn source_of(service: &Service, has_pool: bool) -> Option<Source> {
    let spec = service.spec.as_ref()?;
    if spec.type_.as_deref() != Some("LoadBalancer") || service.metadata.deletion_timestamp.is_some() {
        return None;
    }
    match spec.load_balancer_class.as_deref() {
        None if has_pool => Some(Source::Pool),
        None | Some(NODE_CLASS) => Some(Source::Nodes),
        Some(POOL_CLASS) => Some(Source::Pool),
        Some(_) => None,
    }
}

/// What all Services get that are ours.
pub fn plan(
    mut services: Vec<Arc<Service>>,
    nodes: &[BalancerNode],
    all_nodes: &BTreeSet<IpAddr>,
    reserved: &Reserved,
    pool: &[Range],
    local: impl Fn(&Service) -> BTreeSet<String>,
) -> Vec<Planned> {
    services.sort_by_cached_key(|service| {
        let meta = &service.metadata;
        let created = meta.creation_timestamp.as_ref().map(|time| time.0);
        (created, meta.namespace.clone(), meta.name.clone())
    });
    let of = |wanted: Source| -> Vec<Arc<Service>> {
        let source = |service: &Service| source_of(service, !pool.is_empty());
        let ours = services.iter().filter(|service| source(service) == Some(wanted));
        ours.cloned().collect()
    };
    let mut planned = plan_nodes(of(Source::Nodes), nodes, reserved, local);
    let pooled = of(Source::Pool);
    if pool.is_empty() {
        planned.extend(pooled.into_iter().map(|service| Planned {
            service,
            addresses: Vec::new(),
            refusal: Some("there is no pool of addresses: see --load-balancer-pool".to_owned()),
            source: Source::Pool,
        }));
    } else {
        planned.extend(allocate(pooled, pool, all_nodes));
    }
    planned
}

/// `local` answers the nodes with a ready endpoint of a Service. Of two Services that want the same port, the older one
/// has it.
fn plan_nodes(
    services: Vec<Arc<Service>>,
    nodes: &[BalancerNode],
    reserved: &Reserved,
    local: impl Fn(&Service) -> BTreeSet<String>,
) -> Vec<Planned> {
    let mut taken: BTreeMap<(String, u16), String> = BTreeMap::new();
    let mut planned = Vec::with_capacity(services.len());
    for service in services {
        let spec = service.spec.clone().unwrap_or_default();
        let ports = ports_of(&spec);
        let refusal = ports.iter().find_map(|key| {
            let (protocol, port) = key;
            let owner = match (reserved.get(key), taken.get(key)) {
                (Some(owner), _) => (*owner).to_owned(),
                (None, Some(other)) => format!("Service {other}"),
                (None, None) => return None,
            };
            Some(format!("port {port}/{protocol} of the nodes belongs to {owner}"))
        });
        let found = match refusal {
            Some(refusal) => Err(refusal),
            None => addresses(&service, &spec, nodes, &local),
        };
        if found.is_ok() {
            let meta = &service.metadata;
            let name = format!(
                "{}/{}",
                meta.namespace.as_deref().unwrap_or_default(),
                meta.name.as_deref().unwrap_or_default()
            );
            taken.extend(ports.into_iter().map(|key| (key, name.clone())));
        }
        let (addresses, refusal) = match found {
            Ok(addresses) => (addresses, None),
            Err(refusal) => (Vec::new(), Some(refusal)),
        };
        planned.push(Planned {
            service,
            addresses,
            refusal,
            source: Source::Nodes,
        });
    }
    planned
}

fn ports_of(spec: &ServiceSpec) -> Vec<(String, u16)> {
    let ports = spec.ports.iter().flatten();
    ports
        .filter_map(|port| {
            let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".to_owned());
            Some((protocol, u16::try_from(port.port).ok()?))
        })
        .collect()
}

fn addresses(
    service: &Service,
    spec: &ServiceSpec,
    nodes: &[BalancerNode],
    local: impl Fn(&Service) -> BTreeSet<String>,
) -> Result<Vec<IpAddr>, String> {
    let families = spec.ip_families.as_deref().unwrap_or_default();
    let wants = |address: &IpAddr| {
        let family = if address.is_ipv4() { "IPv4" } else { "IPv6" };
        families.is_empty() || families.iter().any(|wanted| wanted == family)
    };
    // Other nodes would drop the packets.
    let with_endpoints = (spec.external_traffic_policy.as_deref() == Some("Local")).then(|| local(service));
    let all: BTreeSet<IpAddr> = nodes
        .iter()
        .flat_map(|node| node.addresses.iter().copied())
        .filter(wants)
        .collect();
    let chosen: BTreeSet<IpAddr> = nodes
        .iter()
        .filter(|node| {
            with_endpoints
                .as_ref()
                .is_none_or(|names| names.contains(&node.name))
        })
        .flat_map(|node| node.addresses.iter().copied())
        .filter(wants)
        .collect();
    match spec.load_balancer_ip.as_deref().filter(|text| !text.is_empty()) {
        None => Ok(chosen.into_iter().collect()),
        Some(text) => match text.parse::<IpAddr>().ok().filter(|wanted| all.contains(wanted)) {
            Some(wanted) => Ok(chosen.into_iter().filter(|address| *address == wanted).collect()),
            None => Err(format!(
                "spec.loadBalancerIP {text} is not an address of a ready node in a family of the Service"
            )),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn node(name: &str, addresses: &[(&str, &str)], ready: &str) -> Node {
        let addresses: Vec<Value> = addresses
            .iter()
            .map(|(kind, address)| json!({"type": kind, "address": address}))
            .collect();
        let object = json!({"metadata": {"name": name}, "status": {"addresses": addresses,
            "conditions": [{"type": "Ready", "status": ready}]}});
        serde_json::from_value(object).unwrap()
    }

    fn nodes() -> Vec<BalancerNode> {
        let internal = |address| ("InternalIP", address);
        [
            node("a", &[internal("192.0.2.1"), internal("fd00::1")], "True"),
            node("b", &[internal("10.0.0.2"), ("ExternalIP", "192.0.2.2")], "True"),
            node("c", &[internal("192.0.2.3")], "Unknown"),
        ]
        .iter()
        .filter_map(BalancerNode::of)
        .collect()
    }

    /// `age`: a larger one is older.
    fn service(name: &str, age: u8, port: u16, more: Value) -> Arc<Service> {
        let mut spec = json!({"type": "LoadBalancer", "ports": [{"port": port, "protocol": "TCP"}]});
        if let (Some(spec), Some(more)) = (spec.as_object_mut(), more.as_object()) {
            spec.extend(more.clone());
        }
        let created = format!("2026-01-01T00:00:{:02}Z", 59 - age);
        let object =
            json!({"metadata": {"name": name, "namespace": "d", "creationTimestamp": created}, "spec": spec});
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn check(services: &[Arc<Service>], name: &str, expected: Result<&[&str], &str>) {
        let reserved = Reserved::from([(("TCP".to_owned(), 22), "the machine's own service (SSH)")]);
        let local = |_: &Service| BTreeSet::from(["b".to_owned()]);
        let planned = plan(
            services.to_vec(),
            &nodes(),
            &BTreeSet::new(),
            &reserved,
            &[],
            local,
        );
        let found = planned
            .iter()
            .find(|planned| planned.service.metadata.name.as_deref() == Some(name));
        let found = found.unwrap_or_else(|| panic!("{name} is not planned"));
        match expected {
            Ok(expected) => {
                let addresses: Vec<String> = found.addresses.iter().map(ToString::to_string).collect();
                assert_eq!(
                    (addresses, &found.refusal),
                    (expected.iter().map(|s| (*s).to_owned()).collect(), &None),
                    "{name}"
                );
            }
            Err(expected) => {
                let refusal = found.refusal.clone().unwrap_or_default();
                assert!(
                    refusal.contains(expected) && found.addresses.is_empty(),
                    "{name}: {found:?}"
                );
            }
        }
    }

    #[test]
    fn services_get_the_addresses_of_ready_nodes() {
        let plain = [service("s", 1, 80, json!({}))];
        check(&plain, "s", Ok(&["192.0.2.1", "192.0.2.2", "fd00::1"]));
        let four = [service("s", 1, 80, json!({"ipFamilies": ["IPv4"]}))];
        check(&four, "s", Ok(&["192.0.2.1", "192.0.2.2"]));
        let local = [service("s", 1, 80, json!({"externalTrafficPolicy": "Local"}))];
        check(&local, "s", Ok(&["192.0.2.2"]));
        let asked = |address: &str| [service("s", 1, 80, json!({"loadBalancerIP": address}))];
        check(&asked("192.0.2.1"), "s", Ok(&["192.0.2.1"]));
        check(&asked("192.0.2.3"), "s", Err("spec.loadBalancerIP 192.0.2.3"));
    }

    #[test]
    fn of_two_services_on_one_port_the_older_one_has_it() {
        let udp = json!({"ports": [{"port": 80, "protocol": "UDP"}, {"port": 81, "protocol": "TCP"}]});
        let services = [
            service("young", 1, 80, json!({})),
            service("old", 2, 80, json!({})),
            service("udp", 1, 0, udp),
            service("ssh", 1, 22, json!({})),
        ];
        let all: &[&str] = &["192.0.2.1", "192.0.2.2", "fd00::1"];
        check(&services, "old", Ok(all));
        check(
            &services,
            "young",
            Err("port 80/TCP of the nodes belongs to Service d/old"),
        );
        check(&services, "udp", Ok(all));
        check(&services, "ssh", Err("SSH"));
    }

    #[test]
    fn services_of_other_balancers_are_left_alone() {
        use Source::{Nodes, Pool};
        for (more, has_pool, expected) in [
            (json!({}), false, Some(Nodes)),
            (json!({}), true, Some(Pool)),
            (json!({"loadBalancerClass": NODE_CLASS}), true, Some(Nodes)),
            (json!({"loadBalancerClass": POOL_CLASS}), false, Some(Pool)),
            (json!({"loadBalancerClass": "example.com/other"}), true, None),
            (json!({"type": "NodePort"}), true, None),
        ] {
            let found = source_of(&service("s", 1, 80, more.clone()), has_pool);
            assert_eq!(found, expected, "{more}");
        }
        let service = service("s", 1, 80, json!({"loadBalancerClass": POOL_CLASS}));
        check(&[service], "s", Err("there is no pool of addresses"));
    }

    #[test]
    fn a_node_may_be_left_out() {
        let mut excluded = node("x", &[("InternalIP", "192.0.2.9")], "True");
        assert!(BalancerNode::of(&excluded).is_some());
        excluded.metadata.labels = Some([(EXCLUDED.to_owned(), String::new())].into());
        assert_eq!(BalancerNode::of(&excluded), None);
    }
}
