//! What the pod network reads of Nodes: their pod networks, addresses and annotations. No I/O.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Node;
use skiff_meta::net::Cidr;

use super::{DNS_ANNOTATION, WIREGUARD_ANNOTATION};

/// One node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) name: String,
    /// When it registered, to the second: of two that claim a network, the older one has it.
    pub(super) created: i64,
    pub(super) cidrs: Vec<Cidr>,
    /// Its InternalIPs, the primary one first.
    pub(super) addresses: Vec<IpAddr>,
    /// Those that the pod network writes.
    pub(super) annotations: BTreeMap<String, String>,
}

impl Peer {
    pub(super) fn of(node: &Node) -> Peer {
        let spec = node.spec.as_ref();
        let cidrs = spec.and_then(|spec| spec.pod_cidrs.clone()).unwrap_or_default();
        let single = spec.and_then(|spec| spec.pod_cidr.clone());
        let cidrs = if cidrs.is_empty() {
            single.into_iter().collect()
        } else {
            cidrs
        };
        let addresses = node
            .status
            .iter()
            .flat_map(|status| status.addresses.iter().flatten());
        let annotations = node.metadata.annotations.iter().flatten();
        Peer {
            name: node.metadata.name.clone().unwrap_or_default(),
            created: node
                .metadata
                .creation_timestamp
                .as_ref()
                .map_or(i64::MAX, |time| time.0.as_second()),
            cidrs: cidrs.iter().filter_map(|cidr| cidr.parse().ok()).collect(),
            addresses: addresses
                .filter(|address| address.type_ == "InternalIP")
                .filter_map(|address| address.address.parse().ok())
                .collect(),
            annotations: annotations
                .filter(|(name, _)| [DNS_ANNOTATION, WIREGUARD_ANNOTATION].contains(&name.as_str()))
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
        }
    }

    /// The primary address of a family.
    pub(super) fn address(&self, ipv4: bool) -> Option<IpAddr> {
        self.addresses
            .iter()
            .copied()
            .find(|address| address.is_ipv4() == ipv4)
    }
}

/// All nodes by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Peers(BTreeMap<String, Peer>);

impl Peers {
    /// Notes a Node as it is now; whether that changes anything for the pod network.
    pub(super) fn note(&mut self, node: &Node, gone: bool) -> bool {
        let peer = Peer::of(node);
        if gone {
            return self.0.remove(&peer.name).is_some();
        }
        if self.0.get(&peer.name) == Some(&peer) {
            return false;
        }
        self.0.insert(peer.name.clone(), peer);
        true
    }

    pub(super) fn get(&self, name: &str) -> Option<&Peer> {
        self.0.get(name)
    }

    /// All others, the oldest first.
    pub(super) fn others(&self, own: &str) -> Vec<&Peer> {
        let mut others: Vec<&Peer> = self.0.values().filter(|peer| peer.name != own).collect();
        others.sort_by_key(|peer| (peer.created, &peer.name));
        others
    }
}

#[cfg(test)]
impl FromIterator<Peer> for Peers {
    fn from_iter<T: IntoIterator<Item = Peer>>(peers: T) -> Peers {
        Peers(peers.into_iter().map(|peer| (peer.name.clone(), peer)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_what_matters_is_news() {
        let node = |ready: &str, cidrs: &[&str]| -> Node {
            serde_json::from_value(json!({
                "metadata": {"name": "n", "creationTimestamp": "2026-01-01T00:00:00Z",
                    "annotations": {"skiff.io/cluster-dns": "10.244.1.1", "else": "x"}},
                "spec": {"podCIDR": cidrs[0], "podCIDRs": cidrs},
                "status": {"conditions": [{"type": "Ready", "status": ready}], "addresses": [
                    {"type": "Hostname", "address": "n"}, {"type": "InternalIP", "address": "192.0.2.1"},
                    {"type": "InternalIP", "address": "2001:db8::1"}]},
            }))
            .unwrap()
        };
        let mut peers = Peers::default();
        assert!(peers.note(&node("True", &["10.244.1.0/24", "fd00:1::/64"]), false));
        assert!(!peers.note(&node("False", &["10.244.1.0/24", "fd00:1::/64"]), false));
        let peer = peers.get("n").unwrap();
        assert_eq!(peer.cidrs.len(), 2);
        assert_eq!(peer.address(true), Some("192.0.2.1".parse().unwrap()));
        assert_eq!(peer.address(false), Some("2001:db8::1".parse().unwrap()));
        assert_eq!(peer.annotations.len(), 1);
        assert!(peers.note(&node("True", &["10.244.2.0/24"]), false));
        assert!(peers.note(&node("True", &["10.244.2.0/24"]), true));
        assert!(!peers.note(&node("True", &["10.244.2.0/24"]), true));
    }
}
