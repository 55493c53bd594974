//! Node IPAM: each node gets a pod network of its own out of each cluster network.
//!
//! Which networks are taken is kept in memory, by the nodes' events and by what is handed out here: no node makes a
//! look at all others necessary.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use parking_lot::Mutex;
use serde_json::json;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile};
use skiff_meta::net::Cidr;

use super::node_reference;
use crate::{Context, Error};

const WORKERS: usize = 30;
/// COMPAT: upstream takes no IPv6 network that has more parts than this many bits can count.
const MAX_IPV6_BITS: u8 = 16;

/// A cluster network, and which parts of it nodes have.
struct Pool {
    network: Cidr,
    node_prefix: u8,
    /// How many nodes have a part, by its number. Two have the same only if somebody wrote it into them.
    used: HashMap<u64, u32>,
    /// Where the search for a free part starts: a part that was given back is not given out again at once.
    next: u64,
}

impl Pool {
    fn parse(text: &str, mask_ipv4: u8, mask_ipv6: u8) -> Option<Pool> {
        let network: Cidr = text.parse().ok()?;
        let node_prefix = if network.is_ipv4() { mask_ipv4 } else { mask_ipv6 };
        // A cluster network smaller than a node's would hold no node at all.
        let parts = node_prefix.checked_sub(network.prefix())?;
        let too_many = network.is_ipv6() && parts > MAX_IPV6_BITS;
        (node_prefix <= network.bits() && !too_many).then(|| Pool {
            network,
            node_prefix,
            used: HashMap::new(),
            next: 0,
        })
    }

    /// How many parts there are.
    fn len(&self) -> u64 {
        1 << (self.node_prefix - self.network.prefix())
    }

    fn part(&self, number: u64) -> Option<String> {
        let part = self.network.part(self.node_prefix, u128::from(number))?;
        Some(part.to_string())
    }

    /// The parts that a network touches: several if it is larger than a node's.
    fn parts_of(&self, cidr: &str) -> Option<RangeInclusive<u64>> {
        let other: Cidr = cidr.parse().ok()?;
        if !self.network.overlaps(other) {
            return None;
        }
        if other.prefix() <= self.network.prefix() {
            return Some(0..=self.len() - 1);
        }
        let step = u32::from(self.network.bits() - self.node_prefix);
        let first = self
            .network
            .index_of(other.address())?
            .checked_shr(step)
            .unwrap_or(0);
        let more = self.node_prefix.saturating_sub(other.prefix());
        let first = u64::try_from(first).ok()?;
        Some(first..=first + ((1 << more) - 1))
    }

    fn take(&mut self, cidr: &str) {
        for number in self.parts_of(cidr).into_iter().flatten() {
            *self.used.entry(number).or_default() += 1;
        }
    }

    fn release(&mut self, cidr: &str) {
        for number in self.parts_of(cidr).into_iter().flatten() {
            if let Some(count) = self.used.get_mut(&number) {
                *count -= 1;
                if *count == 0 {
                    self.used.remove(&number);
                }
            }
        }
    }

    /// Takes the next free part.
    fn take_next(&mut self) -> Option<String> {
        // No more than what is used can be in the way.
        let tries = self.len().min(self.used.len() as u64 + 1);
        let mut numbers = (self.next..self.next + tries).map(|number| number % self.len());
        let free = numbers.find(|number| !self.used.contains_key(number))?;
        self.next = (free + 1) % self.len();
        self.used.insert(free, 1);
        self.part(free)
    }
}

/// All pools, and what each node has of them.
struct Networks {
    pools: Vec<Pool>,
    /// What a node has, or will have as soon as the write of it has reached the server.
    held: HashMap<String, Vec<String>>,
}

impl Networks {
    fn hold(&mut self, node: &str, cidrs: Vec<String>) {
        if self.held.get(node) == Some(&cidrs) {
            return;
        }
        self.release(node);
        for pool in &mut self.pools {
            cidrs.iter().for_each(|cidr| pool.take(cidr));
        }
        self.held.insert(node.to_owned(), cidrs);
    }

    fn release(&mut self, node: &str) {
        let held = self.held.remove(node).unwrap_or_default();
        for pool in &mut self.pools {
            held.iter().for_each(|cidr| pool.release(cidr));
        }
    }

    /// One part of each pool for a node: the same ones again if they were handed out to it before. `None` if a pool has
    /// nothing left.
    fn assign(&mut self, node: &str) -> Option<Vec<String>> {
        if let Some(held) = self.held.get(node) {
            return Some(held.clone());
        }
        let mut cidrs = Vec::new();
        for pool in &mut self.pools {
            cidrs.extend(pool.take_next());
        }
        let complete = cidrs.len() == self.pools.len();
        self.held.insert(node.to_owned(), cidrs.clone());
        if !complete {
            self.release(node);
        }
        complete.then_some(cidrs)
    }
}

fn cidrs_of(node: &Node) -> Vec<String> {
    let Some(spec) = &node.spec else { return Vec::new() };
    match &spec.pod_cidrs {
        Some(cidrs) if !cidrs.is_empty() => cidrs.clone(),
        _ => spec
            .pod_cidr
            .clone()
            .filter(|cidr| !cidr.is_empty())
            .into_iter()
            .collect(),
    }
}

struct NodeNetworks {
    context: Context,
    nodes: Informer<Node>,
    networks: Mutex<Networks>,
}

pub(crate) async fn run(context: Context) {
    let config = context.config.clone();
    let mut pools: Vec<Pool> = config
        .cluster_cidrs
        .iter()
        .filter_map(|text| {
            let pool = Pool::parse(text, config.node_cidr_mask_ipv4, config.node_cidr_mask_ipv6);
            if pool.is_none() {
                tracing::error!(
                    cidr = text,
                    "the cluster network cannot be divided among nodes: left out"
                );
            }
            pool
        })
        .collect();
    if pools.is_empty() {
        return context.shutdown.cancelled().await;
    }
    for pool in &mut pools {
        config.service_cidrs.iter().for_each(|cidr| pool.take(cidr));
    }
    let reconciler = Arc::new(NodeNetworks {
        nodes: context.informers.informer(),
        networks: Mutex::new(Networks {
            pools,
            held: HashMap::new(),
        }),
        context: context.clone(),
    });
    // What is taken must be known before anything is handed out: work starts when all nodes have been seen.
    context
        .controller("cidrallocator_node", reconciler)
        .workers(WORKERS)
        .watches(|r| &r.nodes, NodeNetworks::woken_by_node)
        .run()
        .await;
}

impl NodeNetworks {
    fn woken_by_node(&self, change: &Change<Node>) -> Option<Key> {
        let node = change.object();
        let name = node.metadata.name.as_deref().unwrap_or_default();
        if matches!(change, Change::Deleted { .. }) {
            self.networks.lock().release(name);
            return None;
        }
        let cidrs = cidrs_of(node);
        if cidrs.is_empty() {
            // What was handed out to it may be on its way: it stays its own.
            return node
                .metadata
                .deletion_timestamp
                .is_none()
                .then(|| Key::of(&**node));
        }
        self.networks.lock().hold(name, cidrs);
        None
    }
}

impl Reconcile for NodeNetworks {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let node = self.nodes.get("", &key.name);
        let Some(node) = node.filter(|node| cidrs_of(node).is_empty()) else {
            return Ok(Action::Done);
        };
        let assigned = self.networks.lock().assign(&key.name);
        let Some(cidrs) = assigned else {
            let message = format!("Node {} status is now: CIDRNotAvailable", key.name);
            self.context
                .events
                .event(&node_reference(&node), "Normal", "CIDRNotAvailable", message);
            return Err(Error::Other(format!(
                "no pod network is left for node {}",
                key.name
            )));
        };
        let api: Api<Node> = Api::all(self.context.client.clone());
        let patch = json!({"metadata": {"uid": node.metadata.uid},
            "spec": {"podCIDR": cidrs.first(), "podCIDRs": cidrs}});
        match api
            .patch(&key.name, &PatchParams::default(), &Patch::Merge(patch))
            .await
        {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_not_found() => Ok(Action::Done),
            Err(error) => {
                let message = format!("Node {} status is now: CIDRAssignmentFailed", key.name);
                self.context
                    .events
                    .event(&node_reference(&node), "Normal", "CIDRAssignmentFailed", message);
                Err(error.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks(cidrs: &[&str]) -> Networks {
        Networks {
            pools: cidrs
                .iter()
                .map(|text| Pool::parse(text, 24, 64).unwrap())
                .collect(),
            held: HashMap::new(),
        }
    }

    #[test]
    fn networks_are_cut_in_order() {
        let check = |cidr: &str, taken: &[&str], expected: Option<&str>| {
            let mut pool = Pool::parse(cidr, 24, 64).unwrap();
            taken.iter().for_each(|cidr| pool.take(cidr));
            assert_eq!(pool.take_next().as_deref(), expected, "{cidr} {taken:?}");
        };
        check("10.244.0.0/16", &[], Some("10.244.0.0/24"));
        check(
            "10.244.3.9/16",
            &["10.244.0.0/24", "10.244.2.0/24"],
            Some("10.244.1.0/24"),
        );
        // Larger, smaller and foreign networks.
        check("10.244.0.0/16", &["10.244.0.0/22"], Some("10.244.4.0/24"));
        check("10.244.0.0/16", &["10.244.0.128/26"], Some("10.244.1.0/24"));
        check(
            "10.244.0.0/16",
            &["10.245.0.0/24", "fd00::/64"],
            Some("10.244.0.0/24"),
        );
        check("10.244.0.0/16", &["10.0.0.0/8"], None);
        check("10.244.7.0/24", &["10.244.7.0/24"], None);
        check("fd00:10::/48", &["fd00:10::/64"], Some("fd00:10:0:1::/64"));
        for bad in ["10.0.0.0/25", "10.0.0.0/33", "fd00::/40", "ten"] {
            assert!(Pool::parse(bad, 24, 64).is_none(), "{bad}");
        }
    }

    #[test]
    fn a_network_is_handed_out_once() {
        let mut both = networks(&["10.0.0.0/23", "fd00::/63"]);
        let first = vec!["10.0.0.0/24".to_owned(), "fd00::/64".to_owned()];
        let second = vec!["10.0.1.0/24".to_owned(), "fd00:0:0:1::/64".to_owned()];
        assert_eq!(both.assign("a").as_ref(), Some(&first));
        assert_eq!(both.assign("a").as_ref(), Some(&first), "the write was lost");
        assert_eq!(both.assign("b").as_ref(), Some(&second));
        assert_eq!(both.assign("c"), None);
        // The node's event confirms what it has, or tells what somebody else gave it.
        both.hold("a", first.clone());
        both.hold("b", vec!["10.0.1.0/24".to_owned()]);
        assert_eq!(
            both.assign("c"),
            None,
            "nothing is kept of a part of an assignment"
        );
        assert_eq!(both.pools[1].used.len(), 1);
        both.release("a");
        both.release("b");
        assert!(both.pools.iter().all(|pool| pool.used.is_empty()));
        assert_eq!(both.assign("c").as_ref(), Some(&first));
    }
}
