//! The plugins, one file each. Their order here is the order in which they run.

mod default_binder;
mod node_affinity;
mod node_name;
mod node_ports;
mod node_resources;
mod node_unschedulable;
mod priority_sort;
mod scheduling_gates;
mod taint_toleration;

use crate::framework::Plugin;
use std::sync::Arc;

/// All plugins of the default profile. Adding one is its file and one line here.
pub fn default_profile(client: kube::Client) -> Vec<Arc<dyn Plugin>> {
    vec![
        Arc::new(scheduling_gates::SchedulingGates),
        Arc::new(priority_sort::PrioritySort),
        Arc::new(node_unschedulable::NodeUnschedulable),
        Arc::new(node_name::NodeName),
        Arc::new(taint_toleration::TaintToleration),
        Arc::new(node_affinity::NodeAffinity),
        Arc::new(node_ports::NodePorts),
        Arc::new(node_resources::Fit),
        Arc::new(node_resources::BalancedAllocation),
        Arc::new(default_binder::DefaultBinder { client }),
    ]
}
