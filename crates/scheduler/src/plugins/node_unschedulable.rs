//! Cordoned nodes take only pods that tolerate it.

use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, Rejection, Scope, Verdict};
use crate::node::{NodeInfo, NodeMeta};
use crate::pod::PodInfo;
use k8s_openapi::api::core::v1::Taint;
use skiff_pods::taints;

pub(crate) struct NodeUnschedulable;

fn allows(pod: &PodInfo, node: &NodeMeta) -> bool {
    if !node.unschedulable() {
        return true;
    }
    let taint = Taint {
        key: "node.kubernetes.io/unschedulable".to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    };
    taints::any_tolerates(&pod.shape.tolerations, &taint)
}

impl Plugin for NodeUnschedulable {
    fn name(&self) -> &'static str {
        "NodeUnschedulable"
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        event.own().is_some() || event.node().is_some_and(|node| allows(pod, node))
    }

    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        if allows(pod, &node.meta) {
            Ok(())
        } else {
            Err(Rejection::unresolvable("node(s) were unschedulable"))
        }
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::Local
    }
}
