//! The controllers that look after nodes and what runs on them: health and taints, eviction by taints, pod
//! networks, and pods that nobody else will remove.

pub(crate) mod departure;
pub(crate) mod ipam;
pub(crate) mod lifecycle;
pub(crate) mod pod_gc;
pub(crate) mod taint_eviction;
pub(crate) mod ttl;

use k8s_openapi::api::core::v1::{Node, NodeCondition, ObjectReference, Pod};

/// Index of pods by the node they are bound to; those without one are under the empty name.
pub(crate) const BY_NODE: &str = "node";

pub(crate) fn by_node(pod: &Pod) -> Vec<String> {
    vec![crate::pods::node_name(pod).to_owned()]
}

pub(crate) fn condition<'a>(node: &'a Node, type_: &str) -> Option<&'a NodeCondition> {
    node.status
        .as_ref()?
        .conditions
        .as_ref()?
        .iter()
        .find(|condition| condition.type_ == type_)
}

pub(crate) fn node_reference(node: &Node) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Node".into()),
        name: node.metadata.name.clone(),
        uid: node.metadata.uid.clone(),
        ..Default::default()
    }
}
