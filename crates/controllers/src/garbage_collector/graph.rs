//! The graph of who owns whom, as far as informers have shown it. No I/O: each change of the graph answers
//! with the objects that have to be looked at.

use std::collections::{BTreeSet, HashMap};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

pub(super) const FOREGROUND: &str = "foregroundDeletion";
pub(super) const ORPHAN: &str = "orphan";

pub(super) type Uid = String;

/// An object as far as its ownership goes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Object {
    pub uid: Uid,
    pub api_version: String,
    pub kind: String,
    pub namespace: String,
    pub name: String,
    pub owners: Vec<OwnerReference>,
    pub deleting: bool,
    pub foreground: bool,
    pub orphan: bool,
}

impl Object {
    pub(super) fn new(meta: &ObjectMeta, api_version: &str, kind: &str) -> Self {
        let has = |finalizer: &str| meta.finalizers.iter().flatten().any(|one| one == finalizer);
        Object {
            uid: meta.uid.clone().unwrap_or_default(),
            api_version: api_version.to_owned(),
            kind: kind.to_owned(),
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            owners: meta.owner_references.clone().unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            foreground: has(FOREGROUND),
            orphan: has(ORPHAN),
        }
    }

    /// True if it waits for its dependents to go before it.
    pub(super) fn deletes_dependents(&self) -> bool {
        self.deleting && self.foreground
    }

    fn orphans_dependents(&self) -> bool {
        self.deleting && self.orphan
    }

    /// True if `owner` may not go before this object.
    pub(super) fn blocks(&self, owner: &str) -> bool {
        self.owners
            .iter()
            .any(|reference| reference.uid == owner && reference.block_owner_deletion == Some(true))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Work {
    /// See whether the object should go, or may go on going.
    Delete(Uid),
    /// Take the owner out of its dependents.
    Orphan(Uid),
}

#[derive(Default)]
struct Node {
    /// `None`: only heard of, as someone's owner.
    object: Option<Object>,
    dependents: BTreeSet<Uid>,
    /// Those of `dependents` that the object waits for when it is deleted in the foreground. There may be thousands, and
    /// each that goes asks whether it was the last.
    blocking: BTreeSet<Uid>,
}

#[derive(Default)]
pub(super) struct Graph {
    nodes: HashMap<Uid, Node>,
}

impl Graph {
    pub(super) fn get(&self, uid: &str) -> Option<&Object> {
        self.nodes.get(uid)?.object.as_ref()
    }

    /// Those whose reference counts: from another namespace than the owner's it names nobody, and must not
    /// keep the owner from going.
    pub(super) fn dependents(&self, uid: &str) -> impl Iterator<Item = &Object> {
        let node = self.nodes.get(uid);
        let namespace = node
            .and_then(|node| node.object.as_ref())
            .map_or("", |owner| owner.namespace.as_str());
        let dependents = node.into_iter().flat_map(|node| &node.dependents);
        dependents
            .filter_map(|uid| self.get(uid))
            .filter(move |dependent| namespace.is_empty() || dependent.namespace == namespace)
    }

    /// Those without which the owner may not go.
    pub(super) fn blocking(&self, uid: &str) -> impl Iterator<Item = &Object> {
        let node = self.nodes.get(uid);
        let namespace = node
            .and_then(|node| node.object.as_ref())
            .map_or("", |owner| owner.namespace.as_str());
        let blocking = node.into_iter().flat_map(|node| &node.blocking);
        blocking
            .filter_map(|uid| self.get(uid))
            .filter(move |dependent| namespace.is_empty() || dependent.namespace == namespace)
    }

    /// Takes in the newest state of an object.
    pub(super) fn apply(&mut self, new: Object) -> Vec<Work> {
        let (mut work, mut unblocked) = (BTreeSet::new(), Vec::new());
        let uid = new.uid.clone();
        let node = self.nodes.entry(uid.clone()).or_default();
        let old = node.object.replace(new.clone());
        let was_owner = |owner: &str| {
            old.as_ref()
                .and_then(|old| old.owners.iter().find(|one| one.uid == owner))
        };
        for reference in &new.owners {
            let owner = self.nodes.entry(reference.uid.clone()).or_default();
            let added = owner.dependents.insert(uid.clone()) && was_owner(&reference.uid).is_none();
            if new.blocks(&reference.uid) {
                owner.blocking.insert(uid.clone());
            } else {
                owner.blocking.remove(&uid);
            }
            match &owner.object {
                // Nobody has seen the owner: it may be gone, or not be in yet. The live look will tell.
                None if added => {
                    work.insert(Work::Delete(uid.clone()));
                }
                Some(owner) if added => {
                    let elsewhere = !owner.namespace.is_empty() && owner.namespace != new.namespace;
                    if elsewhere || owner.deletes_dependents() {
                        work.insert(Work::Delete(uid.clone()));
                    }
                }
                Some(owner) if owner.deletes_dependents() => {
                    let blocked = old.as_ref().is_some_and(|old| old.blocks(&owner.uid));
                    if blocked && !new.blocks(&owner.uid) {
                        unblocked.push(owner.uid.clone());
                    }
                }
                _ => {}
            }
        }
        for owner in unblocked {
            self.look_if_unblocked(&owner, &mut work);
        }
        for reference in old.iter().flat_map(|old| &old.owners) {
            if !new.owners.iter().any(|one| one.uid == reference.uid) {
                self.leave(&uid, &reference.uid, &mut work);
            }
        }
        // Not at each change of an owner: it may have thousands of dependents.
        let starts_foreground =
            new.deletes_dependents() && !old.as_ref().is_some_and(Object::deletes_dependents);
        let is_new = old.is_none() && !new.namespace.is_empty();
        if let Some(node) = self.nodes.get(&uid).filter(|_| is_new || starts_foreground) {
            for dependent in &node.dependents {
                // Now that its namespace is known, references from other namespaces are known to be wrong.
                let elsewhere = || {
                    let dependent = self.get(dependent);
                    dependent.is_some_and(|dependent| dependent.namespace != new.namespace)
                };
                if starts_foreground || elsewhere() {
                    work.insert(Work::Delete(dependent.clone()));
                }
            }
        }
        if starts_foreground {
            work.insert(Work::Delete(uid.clone()));
        }
        if new.orphans_dependents() && !old.as_ref().is_some_and(Object::orphans_dependents) {
            work.insert(Work::Orphan(uid));
        }
        work.into_iter().collect()
    }

    /// Takes in that an object is gone.
    pub(super) fn remove(&mut self, uid: &str) -> Vec<Work> {
        let mut work = BTreeSet::new();
        let Some(node) = self.nodes.get_mut(uid) else {
            return Vec::new();
        };
        let old = node.object.take();
        work.extend(node.dependents.iter().cloned().map(Work::Delete));
        // While dependents name it, the absent owner stays known, so that they can be forgotten together.
        if node.dependents.is_empty() {
            self.nodes.remove(uid);
        }
        for reference in old.iter().flat_map(|old| &old.owners) {
            self.leave(uid, &reference.uid, &mut work);
        }
        // What many objects needed is given back when they are gone.
        if self.nodes.capacity() > 1024 && self.nodes.len() * 4 < self.nodes.capacity() {
            self.nodes.shrink_to(self.nodes.len() * 2);
        }
        work.into_iter().collect()
    }

    /// `uid` is no longer a dependent of `owner`.
    fn leave(&mut self, uid: &str, owner: &str, work: &mut BTreeSet<Work>) {
        let Some(node) = self.nodes.get_mut(owner) else {
            return;
        };
        node.dependents.remove(uid);
        node.blocking.remove(uid);
        match &node.object {
            Some(object) if object.deletes_dependents() => self.look_if_unblocked(owner, work),
            None if node.dependents.is_empty() => {
                self.nodes.remove(owner);
            }
            _ => {}
        }
    }

    /// An owner that waits for its dependents is looked at when the last one is gone, not at each.
    fn look_if_unblocked(&self, owner: &str, work: &mut BTreeSet<Work>) {
        if self.blocking(owner).next().is_none() {
            work.insert(Work::Delete(owner.to_owned()));
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.nodes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(uid: &str, owners: &[(&str, bool)], finalizer: Option<&str>) -> Object {
        let owners: Vec<_> = owners
            .iter()
            .map(|(uid, block)| json!({"apiVersion": "v1", "kind": "K", "name": uid, "uid": uid, "blockOwnerDeletion": block}))
            .collect();
        let meta = serde_json::from_value(json!({
            "uid": uid, "name": uid, "namespace": "default", "ownerReferences": owners,
            "finalizers": finalizer.into_iter().collect::<Vec<_>>(),
            "deletionTimestamp": finalizer.map(|_| "2026-01-01T00:00:00Z")}))
        .unwrap();
        Object::new(&meta, "v1", "K")
    }

    fn text(work: Vec<Work>) -> String {
        let all: Vec<String> = work
            .into_iter()
            .map(|work| match work {
                Work::Delete(uid) => format!("delete {uid}"),
                Work::Orphan(uid) => format!("orphan {uid}"),
            })
            .collect();
        all.join(", ")
    }

    #[test]
    fn dependents_are_looked_at_when_their_owner_goes() {
        let mut graph = Graph::default();
        assert_eq!(text(graph.apply(object("owner", &[], None))), "");
        assert_eq!(text(graph.apply(object("child", &[("owner", true)], None))), "");
        assert_eq!(text(graph.apply(object("child", &[("owner", true)], None))), "");
        assert_eq!(text(graph.remove("owner")), "delete child");
        assert_eq!(text(graph.remove("child")), "");
        assert_eq!(graph.len(), 0);
    }

    #[test]
    fn an_owner_nobody_saw_is_verified() {
        let mut graph = Graph::default();
        assert_eq!(
            text(graph.apply(object("child", &[("owner", false)], None))),
            "delete child"
        );
        // The owner comes in late; from then on its end is noticed.
        assert_eq!(text(graph.apply(object("owner", &[], None))), "");
        assert_eq!(text(graph.remove("owner")), "delete child");
        // The child lets go of it.
        assert_eq!(text(graph.apply(object("child", &[], None))), "");
        assert_eq!(graph.len(), 1);
    }

    #[test]
    fn foreground_deletion_goes_down_and_comes_back_up() {
        let mut graph = Graph::default();
        graph.apply(object("owner", &[], None));
        graph.apply(object("a", &[("owner", true)], None));
        graph.apply(object("b", &[("owner", true)], None));
        let started = text(graph.apply(object("owner", &[], Some(FOREGROUND))));
        assert_eq!(started, "delete a, delete b, delete owner");
        assert_eq!(graph.blocking("owner").count(), 2);
        assert_eq!(
            text(graph.apply(object("late", &[("owner", true)], None))),
            "delete late"
        );
        // It is looked at when nothing keeps it any more, and not before.
        assert_eq!(text(graph.apply(object("a", &[("owner", false)], None))), "");
        assert_eq!(text(graph.remove("b")), "");
        assert_eq!(
            text(graph.apply(object("late", &[("owner", false)], None))),
            "delete owner"
        );
        graph.apply(object("last", &[("owner", true)], None));
        assert_eq!(text(graph.remove("last")), "delete owner");
    }

    #[test]
    fn a_crowd_of_dependents_is_looked_at_once() {
        let mut graph = Graph::default();
        graph.apply(object("owner", &[], None));
        let names: Vec<String> = (0..10_000).map(|n| format!("c{n}")).collect();
        for name in &names {
            graph.apply(object(name, &[("owner", true)], None));
        }
        // Whatever else changes of the owner concerns nobody.
        assert_eq!(graph.apply(object("owner", &[], None)).len(), 0);
        assert_eq!(graph.apply(object("owner", &[], Some(FOREGROUND))).len(), 10_001);
        let mut looks = 0;
        for name in &names {
            looks += graph.remove(name).len();
        }
        assert_eq!(looks, 1, "the owner is looked at when the last one is gone");
        assert_eq!(graph.dependents("owner").count(), 0);
    }

    #[test]
    fn orphaning_is_asked_for_once() {
        let mut graph = Graph::default();
        graph.apply(object("child", &[("owner", true)], None));
        assert_eq!(
            text(graph.apply(object("owner", &[], Some(ORPHAN)))),
            "orphan owner"
        );
        assert_eq!(text(graph.apply(object("owner", &[], Some(ORPHAN)))), "");
    }

    #[test]
    fn an_owner_in_another_namespace_is_no_owner() {
        let mut graph = Graph::default();
        let mut foreign = object("owner", &[], None);
        foreign.namespace = "other".into();
        graph.apply(object("early", &[("owner", true)], None));
        assert_eq!(text(graph.apply(foreign)), "delete early");
        assert_eq!(
            text(graph.apply(object("late", &[("owner", true)], None))),
            "delete late"
        );
        assert_eq!(graph.dependents("owner").count(), 0, "nor do they block it");
    }
}
