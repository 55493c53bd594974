//! Node IPAM: each node gets a pod network of its own out of each cluster network.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, WorkQueue, cause_of, run_workers};

use super::node_reference;
use crate::{Context, Error, Written};

/// A cluster network, and how large a part of it a node gets.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Network {
    base: u128,
    bits: u8,
    prefix: u8,
    node_prefix: u8,
}

impl Network {
    fn parse(text: &str, mask_ipv4: u8, mask_ipv6: u8) -> Option<Network> {
        let (address, prefix) = text.split_once('/')?;
        let prefix: u8 = prefix.parse().ok()?;
        let (base, bits, node_prefix) = match address.parse::<IpAddr>().ok()? {
            IpAddr::V4(ip) => (u128::from(u32::from(ip)), 32, mask_ipv4),
            IpAddr::V6(ip) => (u128::from(ip), 128, mask_ipv6),
        };
        // A cluster network smaller than a node's would hold no node at all.
        if prefix > bits || node_prefix > bits || node_prefix < prefix {
            return None;
        }
        let host_bits = u32::from(bits - prefix);
        let base = if host_bits >= 128 {
            0
        } else {
            base >> host_bits << host_bits
        };
        Some(Network {
            base,
            bits,
            prefix,
            node_prefix,
        })
    }

    fn subnets(&self) -> u128 {
        1u128
            .checked_shl(u32::from(self.node_prefix - self.prefix))
            .unwrap_or(u128::MAX)
    }

    fn subnet(&self, index: u128) -> String {
        let step = u32::from(self.bits - self.node_prefix);
        let address = self.base | index.checked_shl(step).unwrap_or(0);
        let ip = match self.bits {
            32 => IpAddr::V4(Ipv4Addr::from(address as u32)),
            _ => IpAddr::V6(Ipv6Addr::from(address)),
        };
        format!("{ip}/{}", self.node_prefix)
    }

    fn first_free(&self, taken: &HashSet<String>) -> Option<String> {
        // No more than `taken` can be in the way.
        let tries = self.subnets().min(taken.len() as u128 + 1);
        (0..tries)
            .map(|index| self.subnet(index))
            .find(|subnet| !taken.contains(subnet))
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

pub(crate) async fn run(context: Context) {
    let config = context.config.clone();
    let networks: Vec<Network> = config
        .cluster_cidrs
        .iter()
        .filter_map(|text| {
            let network = Network::parse(text, config.node_cidr_mask_ipv4, config.node_cidr_mask_ipv6);
            if network.is_none() {
                tracing::error!(
                    cidr = text,
                    "not a cluster network that nodes can share: left out"
                );
            }
            network
        })
        .collect();
    if networks.is_empty() {
        return context.shutdown.cancelled().await;
    }
    let nodes: Informer<Node> = context.informers.informer();
    let queue: Arc<WorkQueue> = context.queue("cidrallocator_node");
    let adder = queue.clone();
    nodes.subscribe(move |change: &Change<Node>| {
        if let Change::Applied { new, .. } = change
            && cidrs_of(new).is_empty()
        {
            adder.add(Key::of(&**new), Some(cause_of(&**new)));
        }
    });
    nodes.synced().await;
    let (written, networks) = (Arc::new(Written::default()), Arc::new(networks));
    let own = context.clone();
    // One worker: two would hand out the same network.
    run_workers(
        context.name,
        1,
        queue,
        context.shutdown.clone(),
        move |key: Key| {
            let (context, nodes) = (own.clone(), nodes.clone());
            let (written, networks) = (written.clone(), networks.clone());
            async move { reconcile(&context, &nodes, &networks, &written, &key).await }
        },
    )
    .await;
}

async fn reconcile(
    context: &Context,
    nodes: &Informer<Node>,
    networks: &[Network],
    written: &Written,
    key: &Key,
) -> Result<Action, Error> {
    let all = nodes.list();
    // All of our own assignments must be in the copy before the next one.
    for node in &all {
        if !written.is_seen(&Key::of(&**node), node.metadata.resource_version.as_deref()) {
            // Nodes that have a network wake nobody here, so look again soon.
            return Ok(Action::RequeueAfter(Duration::from_millis(20)));
        }
    }
    let Some(node) = nodes.get("", &key.name).filter(|node| cidrs_of(node).is_empty()) else {
        return Ok(Action::Done);
    };
    let taken: HashSet<String> = all.iter().flat_map(|node| cidrs_of(node)).collect();
    let free: Option<Vec<String>> = networks
        .iter()
        .map(|network| network.first_free(&taken))
        .collect();
    let Some(cidrs) = free else {
        let message = format!("Node {} status is now: CIDRNotAvailable", key.name);
        context
            .events
            .event(&node_reference(&key.name), "Normal", "CIDRNotAvailable", message);
        return Err(Error::Other(format!(
            "no pod network is left for node {}",
            key.name
        )));
    };
    let api: Api<Node> = Api::all(context.client.clone());
    let patch = json!({"metadata": {"uid": node.metadata.uid},
        "spec": {"podCIDR": cidrs.first(), "podCIDRs": cidrs}});
    match api
        .patch(&key.name, &PatchParams::default(), &Patch::Merge(patch))
        .await
    {
        Ok(patched) => {
            written.note(key, patched.metadata.resource_version.as_deref());
            Ok(Action::Done)
        }
        Err(error) if error.is_not_found() => Ok(Action::Done),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_cut_in_order() {
        let check = |cidr: &str, taken: &[&str], expected: Option<&str>| {
            let taken = taken.iter().map(|text| (*text).to_owned()).collect();
            let network = Network::parse(cidr, 24, 64).unwrap();
            assert_eq!(network.first_free(&taken).as_deref(), expected, "{cidr}");
        };
        check("10.244.0.0/16", &[], Some("10.244.0.0/24"));
        check(
            "10.244.3.9/16",
            &["10.244.0.0/24", "10.244.2.0/24"],
            Some("10.244.1.0/24"),
        );
        check("10.244.7.0/24", &["10.244.7.0/24"], None);
        check("fd00:10::/48", &["fd00:10::/64"], Some("fd00:10:0:1::/64"));
        assert_eq!(Network::parse("10.0.0.0/25", 24, 64), None);
        assert_eq!(Network::parse("10.0.0.0/33", 24, 64), None);
        assert_eq!(Network::parse("ten", 24, 64), None);
    }
}
