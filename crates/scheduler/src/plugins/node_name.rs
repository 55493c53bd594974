//! A pod that names its node goes there.

use crate::framework::{ClusterEvent, Plugin, Rejection};
use crate::snapshot::{NodeInfo, PodInfo};

pub struct NodeName;

impl Plugin for NodeName {
    fn name(&self) -> &'static str {
        "NodeName"
    }

    fn events(&self) -> &'static [ClusterEvent] {
        &[ClusterEvent::NodeAdded]
    }

    fn filter(&self, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        match pod.node_name() {
            Some(name) if name != &*node.name => {
                Err(Rejection::new("node(s) didn't match the requested node name"))
            }
            _ => Ok(()),
        }
    }
}
