//! What belongs to which node: a pod is bound to one, and what the pod names belongs to the same one. The server feeds
//! pods, volumes, attachments and slices in as they change.

use std::collections::{HashMap, HashSet};

use parking_lot::RwLock;
use serde_json::Value;
use skiff_api::core::references;
use skiff_api::node::{at, text};

/// The sorts of objects that a node may read because of its pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sort {
    ConfigMap,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    PodCertificateRequest,
    ResourceClaim,
    ResourceSlice,
    Secret,
    ServiceAccount,
    VolumeAttachment,
}

/// Sort, namespace, name.
type Key = (Sort, Box<str>, Box<str>);

fn key(sort: Sort, namespace: &str, name: &str) -> Key {
    (sort, namespace.into(), name.into())
}

/// A pod on a node, and what it names.
#[derive(Debug)]
struct Bound {
    uid: Box<str>,
    node: Box<str>,
    named: Vec<Key>,
}

/// A volume: its claim, and the secrets that it takes to mount it.
#[derive(Debug)]
struct Volume {
    claim: Key,
    secrets: Vec<Key>,
}

#[derive(Debug, Default)]
struct Edges {
    pods: HashMap<Key, Bound>,
    /// On which nodes an object is named, and by how many pods.
    named: HashMap<Key, HashMap<Box<str>, usize>>,
    volumes: HashMap<Box<str>, Volume>,
    /// The volumes that need a secret.
    needed: HashMap<Key, HashSet<Box<str>>>,
    /// Attachments, slices and requests for certificates say themselves which node they are of.
    own: HashMap<Key, Box<str>>,
}

/// Leaf lock: held for a few look-ups in maps, never over an await.
#[derive(Debug, Default)]
pub struct Graph(RwLock<Edges>);

impl Graph {
    /// Whether a pod with this identity is on this node already, so that it need not be read again. What a pod names
    /// does not change, except by ephemeral containers and by claims that are made for it.
    pub fn has_pod(&self, namespace: &str, name: &str, uid: &str, node: &str) -> bool {
        let edges = self.0.read();
        let known = edges.pods.get(&key(Sort::Pod, namespace, name));
        known.is_some_and(|bound| *bound.uid == *uid && *bound.node == *node)
    }

    /// Takes a pod in as it is now. One without a node belongs to none.
    pub fn add_pod(&self, pod: &Value) {
        let (namespace, name) = (text(pod, "metadata.namespace"), text(pod, "metadata.name"));
        let node = text(pod, "spec.nodeName");
        let mut named = Vec::new();
        // A node makes its mirror pods itself: they must not open anything.
        let mirror = at(pod, "metadata.annotations").get("kubernetes.io/config.mirror");
        if mirror.is_none() {
            let here = |sort| move |name: &str| key(sort, namespace, name);
            let account = text(pod, "spec.serviceAccountName");
            if !account.is_empty() {
                named.push(here(Sort::ServiceAccount)(account));
            }
            named.extend(references::secrets(pod).into_iter().map(here(Sort::Secret)));
            named.extend(
                references::config_maps(pod)
                    .into_iter()
                    .map(here(Sort::ConfigMap)),
            );
            let claims = references::claims(pod);
            named.extend(claims.iter().map(|name| here(Sort::PersistentVolumeClaim)(name)));
            let claims = references::resource_claims(pod);
            named.extend(claims.into_iter().map(here(Sort::ResourceClaim)));
        }
        let mut edges = self.0.write();
        edges.forget_pod(namespace, name);
        if node.is_empty() {
            return;
        }
        for key in &named {
            let nodes = edges.named.entry(key.clone()).or_default();
            *nodes.entry(node.into()).or_default() += 1;
        }
        let bound = Bound {
            uid: text(pod, "metadata.uid").into(),
            node: node.into(),
            named,
        };
        edges.pods.insert(key(Sort::Pod, namespace, name), bound);
    }

    pub fn remove_pod(&self, namespace: &str, name: &str) {
        self.0.write().forget_pod(namespace, name);
    }

    pub fn add_volume(&self, volume: &Value) {
        let name = text(volume, "metadata.name");
        let claim = at(volume, "spec.claimRef");
        let mut edges = self.0.write();
        edges.forget_volume(name);
        if !claim.is_object() {
            return;
        }
        let secrets: Vec<Key> = references::volume_secrets(volume)
            .iter()
            .map(|secret| key(Sort::Secret, secret.namespace, secret.name))
            .collect();
        for secret in &secrets {
            edges
                .needed
                .entry(secret.clone())
                .or_default()
                .insert(name.into());
        }
        let claim = key(
            Sort::PersistentVolumeClaim,
            text(claim, "namespace"),
            text(claim, "name"),
        );
        edges.volumes.insert(name.into(), Volume { claim, secrets });
    }

    pub fn remove_volume(&self, name: &str) {
        self.0.write().forget_volume(name);
    }

    /// An attachment, a slice or a request for a certificate that is of a node, or of none.
    pub fn set_node(&self, sort: Sort, namespace: &str, name: &str, node: &str) {
        let mut edges = self.0.write();
        if node.is_empty() {
            edges.own.remove(&key(sort, namespace, name));
        } else {
            edges.own.insert(key(sort, namespace, name), node.into());
        }
    }

    /// Whether an object belongs to a node.
    pub fn belongs(&self, sort: Sort, namespace: &str, name: &str, node: &str) -> bool {
        let edges = self.0.read();
        let wanted = key(sort, namespace, name);
        match sort {
            Sort::Pod => edges.pods.get(&wanted).is_some_and(|bound| *bound.node == *node),
            Sort::PodCertificateRequest | Sort::ResourceSlice | Sort::VolumeAttachment => {
                edges.own.get(&wanted).is_some_and(|own| **own == *node)
            }
            Sort::PersistentVolume => edges.mounts(name, node),
            Sort::Secret => {
                edges.names(&wanted, node)
                    || edges
                        .needed
                        .get(&wanted)
                        .is_some_and(|volumes| volumes.iter().any(|volume| edges.mounts(volume, node)))
            }
            _ => edges.names(&wanted, node),
        }
    }
}

impl Edges {
    /// Whether a pod of the node names an object.
    fn names(&self, wanted: &Key, node: &str) -> bool {
        self.named
            .get(wanted)
            .is_some_and(|nodes| nodes.contains_key(node))
    }

    /// Whether a pod of the node names the claim of a volume.
    fn mounts(&self, volume: &str, node: &str) -> bool {
        self.volumes
            .get(volume)
            .is_some_and(|volume| self.names(&volume.claim, node))
    }

    fn forget_pod(&mut self, namespace: &str, name: &str) {
        let Some(bound) = self.pods.remove(&key(Sort::Pod, namespace, name)) else {
            return;
        };
        for key in &bound.named {
            let Some(nodes) = self.named.get_mut(key) else {
                continue;
            };
            if let Some(count) = nodes.get_mut(&bound.node) {
                *count -= 1;
                if *count == 0 {
                    nodes.remove(&bound.node);
                }
            }
            if nodes.is_empty() {
                self.named.remove(key);
            }
        }
    }

    fn forget_volume(&mut self, name: &str) {
        let Some(volume) = self.volumes.remove(name) else {
            return;
        };
        for secret in &volume.secrets {
            if let Some(volumes) = self.needed.get_mut(secret) {
                volumes.remove(name);
                if volumes.is_empty() {
                    self.needed.remove(secret);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, node: &str) -> Value {
        json!({"metadata": {"namespace": "ns", "name": name, "uid": name}, "spec": {"nodeName": node, "serviceAccountName": "sa",
            "volumes": [{"name": "s", "secret": {"secretName": "secret"}}, {"name": "c", "persistentVolumeClaim": {"claimName": "claim"}}]}})
    }

    #[test]
    fn what_a_pod_names_belongs_to_its_node_as_long_as_it_is_there() {
        let graph = Graph::default();
        let secret = |node| graph.belongs(Sort::Secret, "ns", "secret", node);
        graph.add_pod(&pod("a", "n1"));
        graph.add_pod(&pod("b", "n1"));
        graph.add_pod(&pod("waiting", ""));
        assert!(secret("n1") && !secret("n2") && !secret(""));
        assert!(graph.belongs(Sort::ServiceAccount, "ns", "sa", "n1"));
        assert!(graph.belongs(Sort::Pod, "ns", "a", "n1"));
        assert!(graph.has_pod("ns", "a", "a", "n1") && !graph.has_pod("ns", "a", "other", "n1"));
        assert!(!graph.belongs(Sort::Secret, "other", "secret", "n1"));
        // Seen twice, it counts once.
        graph.add_pod(&pod("a", "n1"));
        graph.remove_pod("ns", "a");
        assert!(secret("n1"));
        graph.remove_pod("ns", "b");
        assert!(!secret("n1"));
        let edges = graph.0.read();
        assert!(edges.pods.is_empty() && edges.named.is_empty());
    }

    #[test]
    fn a_mirror_pod_opens_nothing() {
        let graph = Graph::default();
        let mut mirror = pod("m", "n1");
        mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
        graph.add_pod(&mirror);
        assert!(graph.belongs(Sort::Pod, "ns", "m", "n1"));
        assert!(!graph.belongs(Sort::Secret, "ns", "secret", "n1"));
    }

    #[test]
    fn a_volume_is_reached_by_its_claim() {
        let graph = Graph::default();
        let volume = json!({"metadata": {"name": "v"}, "spec": {"claimRef": {"namespace": "ns", "name": "claim"},
            "csi": {"nodeStageSecretRef": {"namespace": "far", "name": "key"}}}});
        graph.add_volume(&volume);
        let reached = || {
            (
                graph.belongs(Sort::PersistentVolume, "", "v", "n1"),
                graph.belongs(Sort::Secret, "far", "key", "n1"),
            )
        };
        assert_eq!(reached(), (false, false));
        graph.add_pod(&pod("a", "n1"));
        assert_eq!(reached(), (true, true));
        graph.remove_volume("v");
        assert_eq!(reached(), (false, false));
        assert!(graph.0.read().needed.is_empty());
        graph.set_node(Sort::VolumeAttachment, "", "va", "n1");
        assert!(graph.belongs(Sort::VolumeAttachment, "", "va", "n1"));
        graph.set_node(Sort::VolumeAttachment, "", "va", "");
        assert!(!graph.belongs(Sort::VolumeAttachment, "", "va", "n1"));
    }

    #[test]
    fn a_volume_opens_what_it_names_now() {
        let graph = Graph::default();
        graph.add_pod(
            &json!({"metadata": {"namespace": "ns", "name": "p"}, "spec": {"nodeName": "n",
            "volumes": [{"persistentVolumeClaim": {"claimName": "c"}}]}}),
        );
        let volume = |spec: Value| json!({"metadata": {"name": "v"}, "spec": spec});
        let claim = json!({"namespace": "ns", "name": "c"});
        let secret = || graph.belongs(Sort::Secret, "x", "s", "n");
        let mounted = || graph.belongs(Sort::PersistentVolume, "", "v", "n");
        let reference = json!({"nodePublishSecretRef": {"namespace": "x", "name": "s"}});
        graph.add_volume(&volume(json!({"claimRef": claim, "csi": reference})));
        assert!(secret() && mounted());
        graph.add_volume(&volume(json!({"claimRef": claim})));
        assert!(!secret() && mounted());
        graph.add_volume(&volume(json!({"csi": reference})));
        assert!(!secret() && !mounted());
    }
}
