//! Two pods cannot have the same port of one host.

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, PreFilter, Rejection, Scope, Verdict};
use crate::node::NodeInfo;
use crate::pod::{HostPort, PodInfo};

pub(crate) struct NodePorts;

const ANY: &str = "0.0.0.0";

fn clash(a: &HostPort, b: &HostPort) -> bool {
    a.protocol == b.protocol
        && a.port == b.port
        && (a.address == b.address || a.address == ANY || b.address == ANY)
}

impl Plugin for NodePorts {
    fn name(&self) -> &'static str {
        "NodePorts"
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(_) => true,
            ClusterEvent::PodRemoved(old) => {
                let freed = |port| old.shape.host_ports.iter().any(|one| clash(one, port));
                pod.shape.host_ports.iter().any(freed)
            }
            _ => false,
        }
    }

    fn pre_filter(
        &self,
        _state: &mut CycleState,
        pod: &PodInfo,
        _cache: &Cache,
    ) -> Result<PreFilter, Rejection> {
        if pod.shape.host_ports.is_empty() {
            return Ok(PreFilter::Skip);
        }
        Ok(PreFilter::AllNodes)
    }

    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let taken = |wanted: &HostPort| node.ports.iter().any(|used| clash(used, wanted));
        if pod.shape.host_ports.iter().any(taken) {
            return Err(Rejection::unschedulable(
                "node(s) didn't have free ports for the requested pod ports",
            ));
        }
        Ok(())
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::Local
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{plain_node, pod};
    use serde_json::json;
    use std::sync::Arc;

    #[test]
    fn ports_clash_by_address() {
        let with_port = |name: &str, address: &str| {
            pod(
                name,
                json!({"containers": [{"name": "c", "ports": [{"containerPort": 1, "hostPort": 80, "hostIP": address}]}]}),
            )
        };
        let mut node = plain_node("a");
        let first = with_port("first", "127.0.0.1");
        node.add_pod(Arc::clone(&first));
        let state = CycleState::default();
        let fits = |address: &str, node: &NodeInfo| {
            NodePorts
                .filter(&state, &with_port("second", address), node)
                .is_ok()
        };
        assert!(fits("127.0.0.2", &node) && !fits("127.0.0.1", &node) && !fits("", &node));
        let removed = ClusterEvent::PodRemoved(first);
        assert!(NodePorts.hint(&with_port("second", ""), &removed));
        assert!(!NodePorts.hint(&with_port("second", "127.0.0.2"), &removed));
        node.remove_pod("first");
        assert!(fits("", &node));
    }
}
