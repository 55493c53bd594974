//! Which addresses are announced, and which nodes may do it. Pure: objects in, candidates out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{ObjectReference, Service};

use super::contest::weight;
use crate::load_balancer::{BalancerNode, pool_addresses};

/// An address of the pool that Services have.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Wanted {
    pub(super) service: ObjectReference,
    /// The nodes that may have it, in no order.
    pub(super) nodes: BTreeSet<String>,
}

/// `local` answers the nodes with a ready endpoint of a Service.
pub(super) fn wanted<'a>(
    services: impl IntoIterator<Item = &'a Service>,
    nodes: &[BalancerNode],
    local: impl Fn(&Service) -> BTreeSet<String>,
) -> BTreeMap<IpAddr, Wanted> {
    let mut found = BTreeMap::new();
    for service in services {
        let addresses = pool_addresses(service);
        if addresses.is_empty() {
            continue;
        }
        let spec = service.spec.as_ref();
        let policy = spec.and_then(|spec| spec.external_traffic_policy.as_deref());
        let mut names: BTreeSet<String> = nodes.iter().map(|node| node.name.clone()).collect();
        if policy == Some("Local") {
            // Other nodes would drop the packets.
            let with_endpoints = local(service);
            names.retain(|name| with_endpoints.contains(name));
        }
        for address in addresses {
            let entry = found.entry(address).or_insert_with(|| Wanted {
                service: skiff_client::reference(service),
                nodes: BTreeSet::new(),
            });
            entry.nodes.extend(names.iter().cloned());
        }
    }
    found
}

/// The place of `own` among the nodes for an address, if it is one of them.
pub(super) fn rank<'a>(
    address: IpAddr,
    nodes: impl IntoIterator<Item = &'a String>,
    own: &str,
) -> Option<usize> {
    let key = |name: &str| (weight(address, name.as_bytes()), name.to_owned());
    let own_key = key(own);
    let mut found = false;
    let mut before = 0;
    for name in nodes {
        found |= name == own;
        before += usize::from(key(name) < own_key);
    }
    found.then_some(before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn service(name: &str, policy: &str, address: &str, allocated: bool) -> Service {
        let condition = json!({"type": "skiff.io/PoolAddress", "status": if allocated { "True" } else { "False" },
            "reason": "x", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let object: Value = json!({"metadata": {"name": name, "namespace": "d"},
            "spec": {"type": "LoadBalancer", "externalTrafficPolicy": policy},
            "status": {"loadBalancer": {"ingress": [{"ip": address}]}, "conditions": [condition]}});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn nodes_with_endpoints_announce_local_services() {
        let nodes = ["a", "b"].map(|name| BalancerNode {
            name: name.into(),
            addresses: Vec::new(),
        });
        let services = [
            service("any", "Cluster", "192.0.2.1", true),
            service("local", "Local", "192.0.2.2", true),
            service("cloud", "Cluster", "192.0.2.3", false),
        ];
        let found = wanted(&services, &nodes, |_| BTreeSet::from(["b".into(), "gone".into()]));
        let names = |address: &str| -> Vec<String> {
            let address: IpAddr = address.parse().unwrap();
            let wanted = found.get(&address);
            wanted.map_or(Vec::new(), |wanted| wanted.nodes.iter().cloned().collect())
        };
        assert_eq!(names("192.0.2.1"), ["a", "b"]);
        assert_eq!(names("192.0.2.2"), ["b"]);
        assert_eq!(found.len(), 2, "what another load balancer gave is not announced");
    }

    #[test]
    fn ranks_are_an_order() {
        let names: BTreeSet<String> = (0..20).map(|number| format!("node-{number}")).collect();
        let address = "192.0.2.7".parse().unwrap();
        let ranks: BTreeSet<usize> = names
            .iter()
            .filter_map(|own| rank(address, &names, own))
            .collect();
        assert_eq!(ranks, (0..20).collect());
        assert_eq!(rank(address, &names, "other"), None);
    }
}
