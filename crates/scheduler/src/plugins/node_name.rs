//! A pod that names its node goes there.

use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, Rejection, Scope, Verdict};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

pub(crate) struct NodeName;

impl Plugin for NodeName {
    fn name(&self) -> &'static str {
        "NodeName"
    }

    fn hint(&self, _pod: &PodInfo, event: &ClusterEvent) -> bool {
        matches!(event, ClusterEvent::NodeAdded(_))
    }

    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        if pod.node_name.is_empty() || *pod.node_name == *node.name {
            return Ok(());
        }
        Err(Rejection::unresolvable(
            "node(s) didn't match the requested node name",
        ))
    }

    fn scope(&self, pod: &PodInfo) -> Scope {
        if pod.node_name.is_empty() {
            Scope::None
        } else {
            Scope::PerPod
        }
    }
}
