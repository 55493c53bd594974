//! Two pods cannot have the same port of one host.

use crate::framework::{ClusterEvent, Plugin, Rejection};
use crate::snapshot::{NodeInfo, PodInfo};

pub struct NodePorts;

const ANY: &str = "0.0.0.0";

impl Plugin for NodePorts {
    fn name(&self) -> &'static str {
        "NodePorts"
    }

    fn events(&self) -> &'static [ClusterEvent] {
        &[ClusterEvent::NodeAdded, ClusterEvent::PodRemoved]
    }

    fn filter(&self, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let taken = |wanted: &(String, String, i32)| {
            node.pods.values().flat_map(|p| &p.host_ports).any(|used| {
                used.0 == wanted.0
                    && used.2 == wanted.2
                    && (used.1 == wanted.1 || used.1 == ANY || wanted.1 == ANY)
            })
        };
        if pod.load.host_ports.iter().any(taken) {
            return Err(Rejection::new(
                "node(s) didn't have free ports for the requested pod ports",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::fixtures::{plain_node, pod};
    use serde_json::json;

    #[test]
    fn ports_clash_by_address() {
        let with_port = |name: &str, address: &str| {
            pod(
                name,
                json!({"containers": [{"name": "c", "ports": [{"containerPort": 1, "hostPort": 80, "hostIP": address}]}]}),
            )
        };
        let mut node = plain_node("a");
        node.add_pod(with_port("first", "127.0.0.1").load);
        assert!(NodePorts.filter(&with_port("second", "127.0.0.2"), &node).is_ok());
        assert!(
            NodePorts
                .filter(&with_port("second", "127.0.0.1"), &node)
                .is_err()
        );
        assert!(NodePorts.filter(&with_port("second", ""), &node).is_err());
    }
}
