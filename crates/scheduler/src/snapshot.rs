//! What the scheduler knows of nodes and the pods on them: what informers show, and the pods that were given a
//! node but are not shown there yet.

use crate::resources::{Resources, pod_requests, scoring_requests};
use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use skiff_client::Key;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What a pod takes of its node. Of the pods that have one, this is all that is kept here.
#[derive(Debug, Clone)]
pub struct Load {
    pub uid: Arc<str>,
    pub requests: Resources,
    /// CPU and memory as counted for scoring.
    pub scoring: (i64, i64),
    /// (protocol, host address, port)
    pub host_ports: Box<[(String, String, i32)]>,
}

impl Load {
    fn of(pod: &Pod) -> Self {
        let spec = pod.spec.as_ref();
        let host_ports = spec
            .into_iter()
            .flat_map(|s| &s.containers)
            .flat_map(|c| c.ports.iter().flatten());
        let host_ports = host_ports
            .filter_map(|p| {
                let port = p.host_port.filter(|p| *p > 0)?;
                let address = p
                    .host_ip
                    .clone()
                    .filter(|ip| !ip.is_empty())
                    .unwrap_or_else(|| "0.0.0.0".to_owned());
                Some((
                    p.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
                    address,
                    port,
                ))
            })
            .collect();
        Self {
            uid: pod.metadata.uid.as_deref().unwrap_or_default().into(),
            requests: spec.map(pod_requests).unwrap_or_default(),
            scoring: spec.map(scoring_requests).unwrap_or_default(),
            host_ports,
        }
    }
}

/// A pod that wants a node, with what the plugins keep asking about.
#[derive(Debug, Clone)]
pub struct PodInfo {
    pub key: Key,
    pub uid: String,
    pub pod: Arc<Pod>,
    pub load: Arc<Load>,
    pub priority: i32,
}

impl PodInfo {
    pub fn new(pod: Arc<Pod>) -> Self {
        Self {
            key: Key::of(&*pod),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            load: Arc::new(Load::of(&pod)),
            priority: pod.spec.as_ref().and_then(|s| s.priority).unwrap_or(0),
            pod,
        }
    }

    pub fn node_name(&self) -> Option<&str> {
        self.pod
            .spec
            .as_ref()
            .and_then(|s| s.node_name.as_deref())
            .filter(|n| !n.is_empty())
    }

    /// Ended pods hold no resources.
    pub fn has_ended(&self) -> bool {
        let phase = self.pod.status.as_ref().and_then(|s| s.phase.as_deref());
        matches!(phase, Some("Succeeded" | "Failed"))
    }
}

#[derive(Debug, Clone, Default)]
pub struct NodeInfo {
    pub name: Arc<str>,
    /// Absent while only pods of the node are known.
    pub node: Option<Arc<Node>>,
    pub allocatable: Resources,
    pub max_pods: i64,
    pub requested: Resources,
    pub scoring: (i64, i64),
    /// By uid.
    pub pods: HashMap<Arc<str>, Arc<Load>>,
}

impl NodeInfo {
    pub fn labels(&self) -> Option<&BTreeMap<String, String>> {
        self.node.as_ref().and_then(|n| n.metadata.labels.as_ref())
    }

    pub fn taints(&self) -> &[Taint] {
        self.node
            .as_ref()
            .and_then(|n| n.spec.as_ref())
            .and_then(|s| s.taints.as_deref())
            .unwrap_or_default()
    }

    pub fn unschedulable(&self) -> bool {
        self.node
            .as_ref()
            .and_then(|n| n.spec.as_ref())
            .and_then(|s| s.unschedulable)
            .unwrap_or(false)
    }

    fn set_node(&mut self, node: Arc<Node>) {
        let allocatable = node.status.as_ref().and_then(|s| s.allocatable.as_ref());
        self.allocatable = allocatable.map(Resources::read).unwrap_or_default();
        self.max_pods = self.allocatable.others.remove("pods").unwrap_or(0);
        self.node = Some(node);
    }

    pub(crate) fn add_pod(&mut self, load: Arc<Load>) {
        self.remove_pod(&load.uid);
        self.requested.add(&load.requests);
        self.scoring.0 += load.scoring.0;
        self.scoring.1 += load.scoring.1;
        self.pods.insert(load.uid.clone(), load);
    }

    fn remove_pod(&mut self, uid: &str) {
        if let Some(pod) = self.pods.remove(uid) {
            self.requested.subtract(&pod.requests);
            self.scoring.0 -= pod.scoring.0;
            self.scoring.1 -= pod.scoring.1;
        }
    }
}

/// Nodes and where pods are, confirmed or assumed.
#[derive(Debug, Default)]
pub struct Cache {
    /// In no order. Kept as a list because every cycle goes through all of them.
    nodes: Vec<Arc<NodeInfo>>,
    /// Name to place in `nodes`.
    index: HashMap<Arc<str>, usize>,
    /// Nodes known only by their pods: a node's pods may outlive the news of it, or come before.
    absent: HashMap<Arc<str>, NodeInfo>,
    /// By pod uid.
    placed: HashMap<Arc<str>, Placed>,
    /// The place in `nodes` where the next cycle begins.
    pub next_start: usize,
}

#[derive(Debug)]
struct Placed {
    node: Arc<str>,
    /// By our own decision only; the API has not shown it yet.
    assumed: bool,
}

impl Cache {
    /// The nodes as they are now.
    pub fn nodes(&self) -> &[Arc<NodeInfo>] {
        &self.nodes
    }

    fn entry(&mut self, name: &str) -> &mut NodeInfo {
        match self.index.get(name) {
            Some(place) => Arc::make_mut(&mut self.nodes[*place]),
            None => {
                let name: Arc<str> = name.into();
                self.absent.entry(name.clone()).or_insert_with(|| NodeInfo {
                    name,
                    ..NodeInfo::default()
                })
            }
        }
    }

    pub fn set_node(&mut self, node: Arc<Node>) {
        let name = node.metadata.name.clone().unwrap_or_default();
        self.entry(&name).set_node(node);
        if let Some(known) = self.absent.remove(name.as_str()) {
            self.index.insert(known.name.clone(), self.nodes.len());
            self.nodes.push(Arc::new(known));
        }
    }

    /// Its pods are kept until they go themselves.
    pub fn remove_node(&mut self, name: &str) {
        let Some(place) = self.index.remove(name) else {
            return;
        };
        let mut removed = Arc::unwrap_or_clone(self.nodes.swap_remove(place));
        if let Some(moved) = self.nodes.get(place) {
            self.index.insert(moved.name.clone(), place);
        }
        if !removed.pods.is_empty() {
            removed.node = None;
            self.absent.insert(removed.name.clone(), removed);
        }
    }

    /// A pod that the API shows on a node.
    pub fn place(&mut self, pod: &PodInfo, node: &str) {
        self.put(pod.load.clone(), node, false);
    }

    /// A pod that is about to be bound to a node.
    pub fn assume(&mut self, pod: &PodInfo, node: &str) {
        self.put(pod.load.clone(), node, true);
    }

    fn put(&mut self, load: Arc<Load>, node: &str, assumed: bool) {
        self.remove_pod(&load.uid);
        let entry = self.entry(node);
        let placed = Placed {
            node: entry.name.clone(),
            assumed,
        };
        let uid = load.uid.clone();
        entry.add_pod(load);
        self.placed.insert(uid, placed);
    }

    /// The binding failed. What the API shows by now stays: an answer can be lost though the pod was bound.
    pub fn forget_assumed(&mut self, uid: &str) -> bool {
        let assumed = self.placed.get(uid).is_some_and(|placed| placed.assumed);
        if assumed {
            self.remove_pod(uid);
        }
        assumed
    }

    pub fn remove_pod(&mut self, uid: &str) {
        let Some(Placed { node, .. }) = self.placed.remove(uid) else {
            return;
        };
        let entry = self.entry(&node);
        entry.remove_pod(uid);
        if entry.pods.is_empty() {
            self.absent.remove(&node);
        }
        // What many pods needed is given back when they are gone.
        if self.placed.capacity() > 1024 && self.placed.len() * 4 < self.placed.capacity() {
            self.placed.shrink_to(self.placed.len() * 2);
        }
    }

    pub fn is_placed(&self, uid: &str) -> bool {
        self.placed.contains_key(uid)
    }
}

#[cfg(test)]
pub(crate) mod fixtures {
    use super::*;
    use serde_json::{Value, json};

    pub fn pod(name: &str, spec: Value) -> PodInfo {
        let mut spec = spec;
        if spec["containers"].is_null() {
            spec["containers"] = json!([{"name": "c"}]);
        }
        let object = json!({"metadata": {"name": name, "namespace": "default", "uid": name}, "spec": spec});
        PodInfo::new(Arc::new(serde_json::from_value(object).unwrap()))
    }

    pub fn node(name: &str, spec: Value, labels: Value, allocatable: Value) -> NodeInfo {
        let object = json!({
            "metadata": {"name": name, "labels": labels}, "spec": spec, "status": {"allocatable": allocatable}
        });
        let mut info = NodeInfo {
            name: name.into(),
            ..NodeInfo::default()
        };
        info.set_node(Arc::new(serde_json::from_value(object).unwrap()));
        info
    }

    pub fn plain_node(name: &str) -> NodeInfo {
        node(
            name,
            json!({}),
            json!({}),
            json!({"cpu": "2", "memory": "4Gi", "pods": "110"}),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::fixtures::*;
    use super::*;
    use serde_json::json;

    #[test]
    fn pods_come_and_go() {
        let mut cache = Cache::default();
        cache.set_node(plain_node("a").node.unwrap());
        let spec = json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "500m"}}}]});
        let pod = pod("p", spec);
        cache.assume(&pod, "a");
        cache.place(&pod, "a");
        assert_eq!(cache.nodes()[0].requested.milli_cpu, 500);
        assert!(
            !cache.forget_assumed("p") && cache.is_placed("p"),
            "a lost answer does not undo what the API shows"
        );
        cache.remove_pod("p");
        assert_eq!(cache.nodes()[0].requested.milli_cpu, 0);
        cache.assume(&pod, "a");
        assert!(cache.forget_assumed("p") && !cache.is_placed("p"));
        cache.place(&pod, "gone");
        assert_eq!(
            cache.nodes().len(),
            1,
            "a node known only by its pods takes no new ones"
        );
        assert_eq!(Arc::strong_count(&pod.pod), 1, "placed pods are not kept whole");
        cache.remove_pod("p");
        assert!(cache.absent.is_empty());
    }

    #[test]
    fn nodes_come_and_go_with_their_pods_on_them() {
        let mut cache = Cache::default();
        let spec = json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "500m"}}}]});
        cache.place(&pod("early", spec.clone()), "a");
        for name in ["a", "b", "c"] {
            cache.set_node(plain_node(name).node.unwrap());
        }
        cache.place(&pod("late", spec), "c");
        cache.remove_node("a");
        cache.remove_node("a");
        let of = |cache: &Cache, name: &str| {
            let found = cache.nodes().iter().find(|n| &*n.name == name);
            found.map(|n| n.requested.milli_cpu)
        };
        assert_eq!(
            (of(&cache, "a"), of(&cache, "b"), of(&cache, "c")),
            (None, Some(0), Some(500))
        );
        cache.remove_pod("late");
        assert_eq!(of(&cache, "c"), Some(0), "found where it was moved to");
        cache.set_node(plain_node("a").node.unwrap());
        assert_eq!(of(&cache, "a"), Some(500), "with the pods it had");
    }
}
