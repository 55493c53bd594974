//! What the scheduler knows of nodes and the pods on them: what informers show, the pods that were given a node but
//! are not shown there yet (assumed), and the pods that a preemption made room for (nominated).
//!
//! Each change of a node is noted in a log, so that whoever keeps something per node repairs it at that node alone.

use crate::node::{NodeId, NodeInfo, NodeMeta};
use crate::pod::{PodInfo, Shapes};
use k8s_openapi::api::core::v1::Pod;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// COMPAT: how long a bound pod may stay unconfirmed before its room is given away again. Upstream waits for ever by
/// default (`durationToExpireAssumedPod` 0); so does this, unless it is set.
const LOG_SLACK: usize = 4096;

#[derive(Debug)]
struct Placed {
    node: Arc<str>,
    assumed: bool,
    /// When an assumed pod stops counting, once its binding is written.
    expires: Option<Instant>,
}

#[derive(Debug, Default)]
pub(crate) struct Cache {
    /// By id. A slot is empty between two nodes that have its id.
    slots: Vec<Option<NodeInfo>>,
    free: Vec<NodeId>,
    index: HashMap<Arc<str>, NodeId>,
    /// Nodes that exist.
    count: usize,
    placed: HashMap<Arc<str>, Placed>,
    pub(crate) shapes: Shapes,
    /// Ids of changed nodes; the first is number `log_base`.
    log: VecDeque<NodeId>,
    log_base: u64,
    /// Goes up with each change of a node.
    pub(crate) version: u64,
    /// Goes up with whatever may make room: changed nodes, removed pods, and pods whose place can satisfy an affinity.
    pub(crate) releases: u64,
    /// Goes up with each pod that is placed, and with each nomination that is made or forgotten.
    pub(crate) placements: u64,
    /// Goes up when nodes come or go.
    pub(crate) membership: u64,
    /// On how many nodes an image is.
    pub(crate) image_nodes: HashMap<String, usize>,
    /// Nodes that have pods with terms of pod affinity.
    pub(crate) affinity_nodes: HashSet<NodeId>,
    /// Claims, by namespace and name, and how many placed pods use them.
    pub(crate) used_claims: HashMap<(String, String), usize>,
    /// Pods by priority.
    priorities: BTreeMap<i32, usize>,
    nominated: HashMap<Arc<str>, (Arc<str>, Arc<PodInfo>)>,
    nominated_on: HashMap<Arc<str>, Vec<Arc<PodInfo>>>,
    /// Where the next cycle begins with the nodes.
    pub(crate) next_start: usize,
    pub(crate) assume_ttl: Option<Duration>,
    /// PodGroups are served; otherwise pods that name one are scheduled by themselves.
    pub(crate) pod_groups: bool,
}

impl Cache {
    pub(crate) fn read(&mut self, pod: &Pod) -> Arc<PodInfo> {
        let mut info = PodInfo::new(pod, &mut self.shapes);
        info.pod_group = info.pod_group.filter(|_| self.pod_groups);
        Arc::new(info)
    }

    /// The nodes that exist.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &NodeInfo> {
        self.slots.iter().flatten().filter(|node| node.exists)
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// One more than the largest id.
    pub(crate) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// By id, if the node exists.
    pub(crate) fn get(&self, id: NodeId) -> Option<&NodeInfo> {
        self.slots.get(id as usize)?.as_ref().filter(|node| node.exists)
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<&NodeInfo> {
        self.get(*self.index.get(name)?)
    }

    fn entry(&mut self, name: &str) -> &mut NodeInfo {
        let id = match self.index.get(name) {
            Some(id) => *id,
            None => {
                let name: Arc<str> = name.into();
                let id = self.free.pop().unwrap_or_else(|| {
                    self.slots.push(None);
                    (self.slots.len() - 1) as NodeId
                });
                self.index.insert(Arc::clone(&name), id);
                self.slots[id as usize] = Some(NodeInfo {
                    id,
                    name,
                    ..NodeInfo::default()
                });
                id
            }
        };
        self.slots[id as usize].get_or_insert_default()
    }

    fn changed(&mut self, id: NodeId) {
        self.version += 1;
        if self.log.back() != Some(&id) {
            self.log.push_back(id);
        }
        if self.log.len() > 2 * self.slots.len() + LOG_SLACK {
            let surplus = self.log.len() / 2;
            self.log.drain(..surplus);
            self.log_base += surplus as u64;
        }
    }

    /// The place after the last change.
    pub(crate) fn log_end(&self) -> u64 {
        self.log_base + self.log.len() as u64
    }

    /// The nodes that changed since `seen`; `None` if that is longer ago than the log reaches.
    pub(crate) fn changes_since(&self, seen: u64) -> Option<impl Iterator<Item = NodeId>> {
        let skip = usize::try_from(seen.checked_sub(self.log_base)?).ok()?;
        Some(self.log.iter().skip(skip.saturating_sub(1)).copied())
    }

    pub(crate) fn set_node(&mut self, name: &str, meta: NodeMeta) {
        let entry = self.entry(name);
        let (id, existed) = (entry.id, entry.exists);
        let before = std::mem::replace(&mut entry.meta, Arc::new(meta));
        entry.exists = true;
        let now = Arc::clone(&entry.meta);
        self.count_images(existed.then_some(&*before), Some(&now));
        if !existed {
            self.count += 1;
            self.membership += 1;
        }
        self.releases += 1;
        self.changed(id);
    }

    fn count_images(&mut self, before: Option<&NodeMeta>, now: Option<&NodeMeta>) {
        for name in before.iter().flat_map(|meta| meta.images.keys()) {
            if let Some(count) = self.image_nodes.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    self.image_nodes.remove(name);
                }
            }
        }
        for name in now.iter().flat_map(|meta| meta.images.keys()) {
            *self.image_nodes.entry(name.clone()).or_default() += 1;
        }
    }

    /// Its pods are kept until they go themselves.
    pub(crate) fn remove_node(&mut self, name: &str) {
        let Some(id) = self.index.get(name).copied() else {
            return;
        };
        let Some(node) = self.slots[id as usize].as_mut().filter(|node| node.exists) else {
            return;
        };
        node.exists = false;
        let meta = std::mem::take(&mut node.meta);
        self.count_images(Some(&meta), None);
        self.count -= 1;
        self.membership += 1;
        self.releases += 1;
        self.changed(id);
        self.drop_if_empty(id);
    }

    fn drop_if_empty(&mut self, id: NodeId) {
        let empty = self.slots[id as usize]
            .as_ref()
            .is_some_and(|node| !node.exists && node.pods.is_empty());
        if empty && let Some(node) = self.slots[id as usize].take() {
            self.index.remove(&node.name);
            self.free.push(id);
        }
    }

    /// A pod that the API shows on a node.
    pub(crate) fn place(&mut self, pod: Arc<PodInfo>, node: &str) {
        self.put(pod, node, false);
    }

    /// A pod that is about to be bound to a node.
    pub(crate) fn assume(&mut self, pod: Arc<PodInfo>, node: &str) {
        self.put(pod, node, true);
    }

    /// The binding is written: from now on the assumption may expire.
    pub(crate) fn binding_written(&mut self, uid: &str, now: Instant) {
        let ttl = self.assume_ttl;
        if let Some(placed) = self.placed.get_mut(uid).filter(|placed| placed.assumed) {
            placed.expires = ttl.map(|ttl| now + ttl);
        }
    }

    /// Forgets assumed pods whose binding the API has not shown in time.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Arc<PodInfo>> {
        if self.assume_ttl.is_none() {
            return Vec::new();
        }
        let due = self
            .placed
            .iter()
            .filter(|(_, placed)| placed.expires.is_some_and(|at| at <= now));
        let due: Vec<Arc<str>> = due.map(|(uid, _)| Arc::clone(uid)).collect();
        due.iter().filter_map(|uid| self.remove_pod(uid)).collect()
    }

    fn put(&mut self, pod: Arc<PodInfo>, node: &str, assumed: bool) {
        let known = self.placed.get(&pod.uid);
        // Confirming what was assumed changes nothing, unless the pod itself has changed.
        if let Some(known) = known
            && &*known.node == node
            && let Some(id) = self.index.get(node)
            && let Some(there) = self.slots[*id as usize].as_mut()
            && let Some(place) = there.pods.iter().position(|one| one.uid == pod.uid)
            && Arc::ptr_eq(&there.pods[place].shape, &pod.shape)
            && there.pods[place].volumes == pod.volumes
            && there.pods[place].deleting == pod.deleting
        {
            for one in there.affinity_pods.iter_mut().filter(|one| one.uid == pod.uid) {
                *one = Arc::clone(&pod);
            }
            there.pods[place] = Arc::clone(&pod);
            if let Some(known) = self.placed.get_mut(&pod.uid) {
                known.assumed &= assumed;
                known.expires = None;
            }
            return;
        }
        self.remove_pod(&pod.uid);
        self.forget_nomination(&pod.uid);
        for claim in claims(&pod) {
            *self.used_claims.entry(claim).or_default() += 1;
        }
        *self.priorities.entry(pod.priority()).or_default() += 1;
        let entry = self.entry(node);
        let (id, name) = (entry.id, Arc::clone(&entry.name));
        let (uid, has_affinity) = (Arc::clone(&pod.uid), !pod.shape.affinity.is_empty());
        entry.add_pod(pod);
        if has_affinity {
            self.affinity_nodes.insert(id);
        }
        self.placed.insert(
            uid,
            Placed {
                node: name,
                assumed,
                expires: None,
            },
        );
        self.placements += 1;
        self.changed(id);
    }

    /// The binding failed. What the API shows by now stays: an answer can be lost though the pod was bound.
    pub(crate) fn forget_assumed(&mut self, uid: &str) -> Option<Arc<PodInfo>> {
        if !self.is_assumed(uid) {
            return None;
        }
        self.remove_pod(uid)
    }

    pub(crate) fn remove_pod(&mut self, uid: &str) -> Option<Arc<PodInfo>> {
        let Placed { node, .. } = self.placed.remove(uid)?;
        let entry = self.entry(&node);
        let id = entry.id;
        let removed = entry.remove_pod(uid);
        if entry.affinity_pods.is_empty() {
            self.affinity_nodes.remove(&id);
        }
        self.releases += 1;
        self.changed(id);
        self.drop_if_empty(id);
        let removed = removed?;
        for claim in claims(&removed) {
            if let Some(count) = self.used_claims.get_mut(&claim) {
                *count -= 1;
                if *count == 0 {
                    self.used_claims.remove(&claim);
                }
            }
        }
        if let Some(count) = self.priorities.get_mut(&removed.priority()) {
            *count -= 1;
            if *count == 0 {
                self.priorities.remove(&removed.priority());
            }
        }
        // What many pods needed is given back when they are gone.
        if self.placed.capacity() > 1024 && self.placed.len() * 4 < self.placed.capacity() {
            self.placed.shrink_to(self.placed.len() * 2);
        }
        Some(removed)
    }

    pub(crate) fn is_placed(&self, uid: &str) -> bool {
        self.placed.contains_key(uid)
    }

    pub(crate) fn is_assumed(&self, uid: &str) -> bool {
        self.placed.get(uid).is_some_and(|placed| placed.assumed)
    }

    /// The pod as it stands on its node.
    pub(crate) fn placed_pod(&self, uid: &str) -> Option<&Arc<PodInfo>> {
        let node = self.index.get(&self.placed.get(uid)?.node)?;
        let node = self.slots[*node as usize].as_ref()?;
        node.pods.iter().find(|pod| &*pod.uid == uid)
    }

    /// True if some placed pod has a lower priority.
    pub(crate) fn any_below(&self, priority: i32) -> bool {
        self.priorities
            .first_key_value()
            .is_some_and(|(lowest, _)| *lowest < priority)
    }

    /// The pod waits for room on the node; an empty name takes the nomination back.
    pub(crate) fn nominate(&mut self, pod: &Arc<PodInfo>, node: &str) {
        self.forget_nomination(&pod.uid);
        if node.is_empty() || self.is_placed(&pod.uid) {
            return;
        }
        let name: Arc<str> = node.into();
        self.nominated
            .insert(Arc::clone(&pod.uid), (Arc::clone(&name), Arc::clone(pod)));
        self.nominated_on.entry(name).or_default().push(Arc::clone(pod));
        if let Some(id) = self.index.get(node).copied() {
            self.placements += 1;
            self.changed(id);
        }
    }

    pub(crate) fn forget_nomination(&mut self, uid: &str) {
        let Some((node, _)) = self.nominated.remove(uid) else {
            return;
        };
        if let Some(pods) = self.nominated_on.get_mut(&node) {
            pods.retain(|pod| &*pod.uid != uid);
            if pods.is_empty() {
                self.nominated_on.remove(&node);
            }
        }
        if let Some(id) = self.index.get(&node).copied() {
            self.placements += 1;
            self.changed(id);
        }
    }

    pub(crate) fn nominated_on(&self, node: &str) -> &[Arc<PodInfo>] {
        if self.nominated_on.is_empty() {
            return &[];
        }
        self.nominated_on.get(node).map(Vec::as_slice).unwrap_or_default()
    }

    pub(crate) fn nomination(&self, uid: &str) -> Option<&str> {
        self.nominated.get(uid).map(|(node, _)| &**node)
    }

    pub(crate) fn has_nominations(&self) -> bool {
        !self.nominated.is_empty()
    }
}

fn claims(pod: &PodInfo) -> impl Iterator<Item = (String, String)> {
    pod.volumes.iter().filter_map(|volume| match volume {
        crate::pod::VolumeUse::Claim { name, .. } => Some((pod.key.namespace.clone(), name.clone())),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node_meta, plain_meta, pod};
    use serde_json::json;

    fn asking(cpu: &str) -> serde_json::Value {
        json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]})
    }

    #[test]
    fn groups_count_where_they_are_served() {
        let mut cache = Cache::default();
        let grouped = json!({"schedulingGroup": {"podGroupName": "g"}});
        let grouped = crate::fixtures::object("p", json!({}), grouped);
        assert_eq!(cache.read(&grouped).group_key(), None);
        cache.pod_groups = true;
        let key = cache.read(&grouped).group_key().unwrap();
        assert_eq!(key.to_string(), "default/g");
    }

    #[test]
    fn pods_come_and_go() {
        let mut cache = Cache::default();
        cache.set_node("a", plain_meta("a"));
        let pod = pod("p", asking("500m"));
        cache.assume(Arc::clone(&pod), "a");
        cache.place(Arc::clone(&pod), "a");
        let used = |cache: &Cache| cache.by_name("a").unwrap().requested.milli_cpu;
        assert_eq!(used(&cache), 500);
        assert!(
            cache.forget_assumed("p").is_none() && cache.is_placed("p"),
            "a lost answer does not undo what the API shows"
        );
        cache.remove_pod("p");
        assert_eq!((used(&cache), cache.any_below(1)), (0, false));
        cache.assume(Arc::clone(&pod), "a");
        assert!(cache.any_below(1) && !cache.any_below(0));
        assert!(cache.forget_assumed("p").is_some() && !cache.is_placed("p"));
        cache.place(Arc::clone(&pod), "gone");
        assert_eq!(
            (cache.len(), cache.nodes().count()),
            (1, 1),
            "a node known only by its pods takes no new ones"
        );
        cache.remove_pod("p");
        assert!(!cache.index.contains_key("gone"));
    }

    #[test]
    fn nodes_come_and_go_with_their_pods_on_them() {
        let mut cache = Cache::default();
        cache.place(pod("early", asking("500m")), "a");
        for name in ["a", "b", "c"] {
            cache.set_node(name, plain_meta(name));
        }
        cache.place(pod("late", asking("500m")), "c");
        cache.remove_node("a");
        cache.remove_node("a");
        let of = |cache: &Cache, name: &str| cache.by_name(name).map(|n| n.requested.milli_cpu);
        assert_eq!(
            (of(&cache, "a"), of(&cache, "b"), of(&cache, "c")),
            (None, Some(0), Some(500))
        );
        cache.set_node("a", plain_meta("a"));
        assert_eq!(of(&cache, "a"), Some(500), "with the pods it had");
        cache.remove_node("b");
        cache.set_node("d", plain_meta("d"));
        assert_eq!(
            (cache.slots(), cache.len()),
            (3, 3),
            "the id of a gone node is used again"
        );
    }

    #[test]
    fn the_log_tells_which_nodes_changed() {
        let mut cache = Cache::default();
        cache.set_node("a", plain_meta("a"));
        cache.set_node("b", plain_meta("b"));
        let seen = cache.log_end();
        let b = cache.by_name("b").unwrap().id;
        cache.assume(pod("p", asking("1")), "b");
        let changed: HashSet<NodeId> = cache.changes_since(seen).unwrap().collect();
        assert!(changed.contains(&b));
        let seen = cache.log_end();
        cache.place(pod("p", asking("1")), "b");
        assert_eq!(cache.log_end(), seen, "a confirmed assumption changes nothing");
        for _ in 0..10_000 {
            cache.set_node("a", plain_meta("a"));
            cache.set_node("b", plain_meta("b"));
        }
        assert!(cache.changes_since(seen).is_none(), "too long ago");
    }

    #[test]
    fn nominations_and_images_and_expiry() {
        let mut cache = Cache::default();
        let images = json!({"images": [{"names": ["web:1"], "sizeBytes": 5}], "allocatable": {}});
        cache.set_node("a", node_meta("a", json!({}), json!({}), images));
        assert_eq!(cache.image_nodes.get("web:1"), Some(&1));
        let p = pod("p", json!({}));
        cache.nominate(&p, "a");
        assert_eq!(
            (cache.nominated_on("a").len(), cache.nomination("p")),
            (1, Some("a"))
        );
        cache.assume_ttl = Some(Duration::from_secs(30));
        cache.assume(Arc::clone(&p), "a");
        assert!(cache.nominated_on("a").is_empty(), "it has its place");
        let now = Instant::now();
        assert!(
            cache.expire(now + Duration::from_secs(99)).is_empty(),
            "not bound yet"
        );
        cache.binding_written("p", now);
        assert!(cache.expire(now + Duration::from_secs(29)).is_empty());
        assert_eq!(cache.expire(now + Duration::from_secs(30)).len(), 1);
        cache.remove_node("a");
        assert!(cache.image_nodes.is_empty());
    }
}
