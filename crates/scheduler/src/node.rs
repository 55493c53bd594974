//! A node as the scheduler keeps it: what its object says, and the pods on it.

use crate::pod::{HostPort, Labels, PodInfo};
use k8s_openapi::api::core::v1::{Node, NodeSpec, Taint};
use skiff_pods::requests::Resources;
use std::collections::HashMap;
use std::sync::Arc;

/// What the node object says, as far as plugins read it. Heartbeats change nothing of it.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct NodeMeta {
    /// Name, labels, taints and `unschedulable` only.
    pub(crate) node: Node,
    pub(crate) allocatable: Resources,
    pub(crate) max_pods: i64,
    /// Name to size.
    pub(crate) images: HashMap<String, i64>,
    pub(crate) features: Vec<String>,
}

impl NodeMeta {
    pub(crate) fn new(node: &Node) -> Self {
        let status = node.status.as_ref();
        let allocatable = status.and_then(|s| s.allocatable.as_ref());
        let mut allocatable = allocatable.map(Resources::read).unwrap_or_default();
        let max_pods = allocatable.others.remove("pods").unwrap_or(0);
        let mut images = HashMap::new();
        for image in status.iter().flat_map(|s| s.images.iter().flatten()) {
            for name in image.names.iter().flatten() {
                images.insert(name.clone(), image.size_bytes.unwrap_or(0));
            }
        }
        let mut kept = Node::default();
        kept.metadata.name = node.metadata.name.clone();
        kept.metadata.labels = node.metadata.labels.clone();
        kept.spec = node.spec.as_ref().map(|spec| NodeSpec {
            taints: spec.taints.clone(),
            unschedulable: spec.unschedulable,
            ..NodeSpec::default()
        });
        Self {
            node: kept,
            allocatable,
            max_pods,
            images,
            features: status
                .and_then(|s| s.declared_features.clone())
                .unwrap_or_default(),
        }
    }

    pub(crate) fn label(&self, key: &str) -> Option<&str> {
        self.labels()?.get(key).map(String::as_str)
    }

    pub(crate) fn labels(&self) -> Option<&Labels> {
        self.node.metadata.labels.as_ref()
    }

    pub(crate) fn taints(&self) -> &[Taint] {
        let spec = self.node.spec.as_ref();
        spec.and_then(|s| s.taints.as_deref()).unwrap_or_default()
    }

    pub(crate) fn unschedulable(&self) -> bool {
        let spec = self.node.spec.as_ref();
        spec.and_then(|s| s.unschedulable).unwrap_or(false)
    }
}

/// The dense number of a node. Numbers of nodes that are gone are given again.
pub(crate) type NodeId = u32;

#[derive(Debug, Clone, Default)]
pub(crate) struct NodeInfo {
    pub(crate) id: NodeId,
    pub(crate) name: Arc<str>,
    pub(crate) meta: Arc<NodeMeta>,
    /// False while only pods of the node are known.
    pub(crate) exists: bool,
    pub(crate) requested: Resources,
    /// CPU and memory as counted for scoring.
    pub(crate) scoring: (i64, i64),
    pub(crate) pods: Vec<Arc<PodInfo>>,
    /// Those of `pods` that have terms of pod affinity or anti-affinity.
    pub(crate) affinity_pods: Vec<Arc<PodInfo>>,
    pub(crate) ports: Vec<HostPort>,
}

impl NodeInfo {
    pub(crate) fn label(&self, key: &str) -> Option<&str> {
        self.meta.label(key)
    }

    pub(crate) fn taints(&self) -> &[Taint] {
        self.meta.taints()
    }

    pub(crate) fn add_pod(&mut self, pod: Arc<PodInfo>) {
        self.requested.add(&pod.shape.requests);
        self.scoring.0 += pod.shape.scoring.0;
        self.scoring.1 += pod.shape.scoring.1;
        self.ports.extend(pod.shape.host_ports.iter().cloned());
        if !pod.shape.affinity.is_empty() {
            self.affinity_pods.push(Arc::clone(&pod));
        }
        self.pods.push(pod);
    }

    pub(crate) fn remove_pod(&mut self, uid: &str) -> Option<Arc<PodInfo>> {
        let place = self.pods.iter().position(|pod| &*pod.uid == uid)?;
        let pod = self.pods.swap_remove(place);
        self.requested.subtract(&pod.shape.requests);
        self.scoring.0 -= pod.shape.scoring.0;
        self.scoring.1 -= pod.shape.scoring.1;
        for port in &pod.shape.host_ports {
            if let Some(place) = self.ports.iter().position(|one| one == port) {
                self.ports.swap_remove(place);
            }
        }
        self.affinity_pods.retain(|one| &*one.uid != uid);
        Some(pod)
    }
}
