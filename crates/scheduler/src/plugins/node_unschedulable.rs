//! Cordoned nodes take only pods that tolerate it.

use crate::framework::{ClusterEvent, Plugin, Rejection};
use crate::plugins::taint_toleration::tolerates;
use crate::snapshot::{NodeInfo, PodInfo};
use k8s_openapi::api::core::v1::Taint;

pub struct NodeUnschedulable;

impl Plugin for NodeUnschedulable {
    fn name(&self) -> &'static str {
        "NodeUnschedulable"
    }

    fn events(&self) -> &'static [ClusterEvent] {
        &[
            ClusterEvent::NodeAdded,
            ClusterEvent::NodeChanged,
            ClusterEvent::PodChanged,
        ]
    }

    fn filter(&self, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if !node.unschedulable() {
            return Ok(());
        }
        let taint = Taint {
            key: "node.kubernetes.io/unschedulable".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        };
        if tolerates(pod, &taint) {
            Ok(())
        } else {
            Err(Rejection::new("node(s) were unschedulable"))
        }
    }
}
