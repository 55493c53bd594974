//! From policies, pods and namespaces to the elements of the kernel's sets, step by step: a change costs what depends
//! on it. No I/O.
//!
//! Pods of this node that the same policies select share an *isolation* of a direction: a chain, and a map of the pods
//! that it may talk with. Pods of the cluster that the same rules name share an *identity*, so that rules are compared
//! with the first of them only. Port sets are shared too. So a pod that comes or goes is one element in each map that
//! it belongs to, however many policies and ports there are. Policies of administrators make *classes*, which are to their
//! tiers what isolations are to NetworkPolicies.

mod classes;
mod identities;
mod isolations;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use skiff_client::Key;
use skiff_meta::selector::LabelSelector;

use super::Direction;
use super::decisions::Decisions;
use super::objects::{Labels, NodeFacts, PodFacts, Policy};
use super::ports::{PortBox, PortSet};
use super::tiers::{Tier, TierPolicy};
use classes::{Class, ClassKey};
use identities::{Identity, Signature, Term, TermId};
use isolations::{Isolation, IsolationKey};

/// The isolation of a pod that no NetworkPolicy selects, and the class of one that no policy of a tier has rules for.
pub(super) const OPEN: u32 = 0;

/// The port set of who may talk about everything.
pub(super) const ALL_PORTS: u32 = 0;

/// Values of verdicts, besides the numbers of decisions. Who is not decided about comes to the next tier.
pub(super) const UNDECIDED: u32 = 0;
pub(super) const ACCEPTS: u32 = u32::MAX;
pub(super) const DENIES: u32 = u32::MAX - 1;

/// Something in the kernel that comes and goes as a whole: a chain with its sets, or an element of a set or map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Element {
    /// The chain of a port set, and the set.
    Ports(u32),
    Port(u32, PortBox),
    /// The chain of decisions by protocol and port, and the map of their verdicts.
    Decisions(u32),
    Decision(u32, PortBox),
    /// The chain of an isolation, its maps and sets.
    Isolation(Direction, u32),
    /// The chain of a class, and its maps.
    Class(Direction, u32),
    /// A pod that pods of an isolation may talk with, mapped to a port set.
    Allowed(Direction, u32, IpAddr),
    /// What passes between pods of an isolation and a range of addresses.
    AllowedBlock(Direction, u32, IpAddr, IpAddr, PortBox),
    /// A pod that rules of a class name, mapped to a verdict or to decisions. It has all that the class says to the
    /// address: ranges are not asked any more.
    PeerVerdict(Direction, u32, IpAddr),
    /// A range of addresses, and its verdict.
    RangeVerdict(Direction, u32, IpAddr, IpAddr, PortBox),
    /// A pod of this node, mapped to its class of the Admin tier.
    Admin(Direction, IpAddr),
    /// A pod of this node, mapped to its isolation.
    Isolated(Direction, IpAddr),
    /// A pod of this node that no NetworkPolicy selects, mapped to its class of the Baseline tier; in the place of the
    /// former.
    Baseline(Direction, IpAddr),
    /// A pod of this node: it may talk with itself.
    Own(IpAddr),
}

/// What has to change in the kernel.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Delta {
    pub removed: Vec<Element>,
    /// With the number that a map has for it.
    pub added: Vec<(Element, u32)>,
}

impl Delta {
    pub fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.added.is_empty()
    }
}

struct Pod {
    facts: PodFacts,
    /// Those that it claims.
    addresses: Vec<IpAddr>,
    /// Of a pod of this node, by direction.
    isolations: Option<[u32; 2]>,
    /// Of a pod of this node, by tier and direction.
    classes: [[u32; 2]; 2],
    signature: Signature,
    identity: Option<u32>,
}

impl Pod {
    /// The isolations and classes that it has.
    fn users(&self) -> Vec<u32> {
        let isolations = self.isolations.into_iter().flatten();
        let classes = self.classes.into_iter().flatten();
        isolations.chain(classes).filter(|user| *user != OPEN).collect()
    }
}

#[derive(Default)]
pub(super) struct Compiler {
    node: String,
    namespaces: BTreeMap<String, Labels>,
    /// By namespace and name, with the version that tells one reading of a policy from the next.
    policies: BTreeMap<String, BTreeMap<String, (u64, Arc<Policy>)>>,
    /// Those of administrators, in their order, with their versions.
    tiers: Vec<(u64, Arc<TierPolicy>)>,
    nodes: BTreeMap<String, NodeFacts>,
    nodes_version: u64,
    pods: BTreeMap<Key, Pod>,
    /// What the CNI plugin has said, by the pod's uid; it is ahead of the pod's status.
    attached: BTreeMap<String, (Key, Vec<IpAddr>)>,
    /// Who says to have an address; normally one pod.
    claims: BTreeMap<IpAddr, Vec<Key>>,
    terms: BTreeMap<TermId, Term>,
    term_ids: HashMap<String, TermId>,
    /// Terms of one namespace, and terms of many.
    terms_of_namespace: BTreeMap<String, BTreeSet<TermId>>,
    terms_of_many: BTreeSet<TermId>,
    isolations: BTreeMap<u32, Isolation>,
    isolation_ids: HashMap<IsolationKey, u32>,
    classes: BTreeMap<u32, Class>,
    class_ids: HashMap<ClassKey, u32>,
    /// Decisions by number, and how many elements refer to each.
    decisions: BTreeMap<u32, (Decisions, usize)>,
    decision_ids: HashMap<Decisions, u32>,
    identities: BTreeMap<u32, Identity>,
    identity_ids: HashMap<Signature, u32>,
    /// The identity that the elements of an address are made from.
    identified: BTreeMap<IpAddr, u32>,
    /// Port sets by number, and how many elements refer to each.
    port_sets: BTreeMap<u32, (PortSet, usize)>,
    port_set_ids: HashMap<PortSet, u32>,
    last_id: u32,
    last_version: u64,
    changed: Changed,
    elements: BTreeMap<Element, u32>,
    /// What elements were when they were last handed out, of those that were touched since.
    touched: BTreeMap<Element, Option<u32>>,
}

/// What the next compilation has to look at.
#[derive(Default)]
struct Changed {
    pods: BTreeSet<Key>,
    namespaces: BTreeSet<String>,
    /// Namespaces whose policies have changed.
    policies: BTreeSet<String>,
    /// Policies of administrators have changed, or nodes that they name.
    tiers: bool,
    addresses: BTreeSet<IpAddr>,
    new_terms: Vec<TermId>,
    /// Isolations and classes.
    new_users: Vec<u32>,
}

impl Compiler {
    pub(super) fn new(node: &str) -> Compiler {
        Compiler {
            node: node.to_owned(),
            ..Compiler::default()
        }
    }

    /// Each of these answers whether there is something to compile.
    pub(super) fn set_namespace(&mut self, name: &str, labels: Option<Labels>) -> bool {
        if self.namespaces.get(name) == labels.as_ref() {
            return false;
        }
        match labels {
            Some(labels) => self.namespaces.insert(name.to_owned(), labels),
            None => self.namespaces.remove(name),
        };
        self.changed.namespaces.insert(name.to_owned());
        true
    }

    pub(super) fn set_policy(&mut self, key: &Key, policy: Option<Policy>) -> bool {
        let of_namespace = self.policies.entry(key.namespace.clone()).or_default();
        let present = of_namespace.get(&key.name).map(|(_, policy)| &**policy);
        if present == policy.as_ref() {
            return false;
        }
        match policy {
            Some(policy) => {
                self.last_version += 1;
                of_namespace.insert(key.name.clone(), (self.last_version, Arc::new(policy)));
            }
            None => {
                of_namespace.remove(&key.name);
            }
        }
        if of_namespace.is_empty() {
            self.policies.remove(&key.namespace);
        }
        self.changed.policies.insert(key.namespace.clone());
        true
    }

    pub(super) fn set_pod(&mut self, key: &Key, facts: Option<PodFacts>) -> bool {
        let present = self.pods.get(key).map(|pod| &pod.facts);
        if present == facts.as_ref() {
            return false;
        }
        let uid = facts.as_ref().map(|facts| facts.uid.clone());
        if let Some(former) = present.map(|present| present.uid.clone())
            && Some(&former) != uid.as_ref()
        {
            self.attached.remove(&former);
        }
        match facts {
            Some(facts) => match self.pods.get_mut(key) {
                Some(pod) => pod.facts = facts,
                None => {
                    let pod = Pod {
                        facts,
                        addresses: Vec::new(),
                        isolations: None,
                        classes: [[OPEN; 2]; 2],
                        signature: Signature::default(),
                        identity: None,
                    };
                    self.pods.insert(key.clone(), pod);
                }
            },
            None => self.forget(key),
        }
        self.changed.pods.insert(key.clone());
        true
    }

    /// Whether a pod is known, by name and uid, and its namespace, by whose labels administrators select it.
    pub(super) fn knows(&self, key: &Key, uid: &str) -> bool {
        self.namespaces.contains_key(&key.namespace)
            && self.pods.get(key).is_some_and(|pod| pod.facts.uid == uid)
    }

    /// The CNI plugin gives these addresses to a pod of this node, whoever had them before. Answers whether there is
    /// such a pod.
    pub(super) fn attach(&mut self, key: &Key, uid: &str, addresses: Vec<IpAddr>) -> bool {
        if !self.knows(key, uid) {
            return false;
        }
        for (holder, held) in self.attached.values_mut() {
            let before = held.len();
            held.retain(|address| !addresses.contains(address));
            if held.len() != before {
                self.changed.pods.insert(holder.clone());
            }
        }
        self.attached.insert(uid.to_owned(), (key.clone(), addresses));
        self.changed.pods.insert(key.clone());
        true
    }

    /// All elements that there should be.
    pub(super) fn elements(&self) -> impl Iterator<Item = (Element, u32)> + '_ {
        self.elements.iter().map(|(element, value)| (*element, *value))
    }

    /// How many numbers are in use: isolations and classes, and identities.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.isolations.len() + self.classes.len(), self.identities.len())
    }

    /// What has changed in the sets since the last call.
    pub(super) fn compile(&mut self) -> Delta {
        let changed = std::mem::take(&mut self.changed);
        self.changed.addresses = changed.addresses;
        let mut evaluate = changed.pods;
        for namespace in &changed.namespaces {
            evaluate.extend(self.pods_of(namespace));
        }
        for key in &evaluate {
            self.claim_addresses(key);
        }
        let mut select: BTreeSet<Key> = evaluate.iter().cloned().collect();
        for namespace in &changed.policies {
            select.extend(self.pods_of(namespace));
        }
        if changed.tiers {
            let local = self.pods.iter().filter(|(_, pod)| self.is_local(pod));
            select.extend(local.map(|(key, _)| key.clone()));
        }
        // What is no longer used is let go at the end: it may be wanted again meanwhile.
        let mut released = Vec::new();
        for key in &select {
            released.extend(self.select(key));
        }
        let mut renamed = BTreeSet::new();
        for key in &evaluate {
            self.evaluate(key, None);
            renamed.insert(key.clone());
        }
        let new_terms = std::mem::take(&mut self.changed.new_terms);
        if !new_terms.is_empty() {
            let all: Vec<Key> = self.pods.keys().cloned().collect();
            for key in all {
                if !evaluate.contains(&key) && self.evaluate(&key, Some(&new_terms)) {
                    renamed.insert(key);
                }
            }
        }
        for user in std::mem::take(&mut self.changed.new_users) {
            self.connect_user(user);
        }
        for user in released {
            renamed.extend(self.release(user));
        }
        for key in &renamed {
            self.identify(key);
        }
        for address in std::mem::take(&mut self.changed.addresses) {
            self.map_address(address);
        }
        self.hand_out()
    }

    fn hand_out(&mut self) -> Delta {
        let mut delta = Delta::default();
        for (element, before) in std::mem::take(&mut self.touched) {
            let now = self.elements.get(&element).copied();
            if before == now {
                continue;
            }
            if before.is_some() {
                delta.removed.push(element);
            }
            if let Some(now) = now {
                delta.added.push((element, now));
            }
        }
        delta
    }

    fn set(&mut self, element: Element, value: Option<u32>) {
        let before = match value {
            Some(value) => self.elements.insert(element, value),
            None => self.elements.remove(&element),
        };
        self.touched.entry(element).or_insert(before);
    }

    fn next_id(&mut self) -> u32 {
        self.last_id += 1;
        self.last_id
    }

    fn pods_of(&self, namespace: &str) -> Vec<Key> {
        let from = Key::new(namespace, "");
        let pods = self.pods.range(from..);
        pods.map(|(key, _)| key)
            .take_while(|key| key.namespace == namespace)
            .cloned()
            .collect()
    }

    fn forget(&mut self, key: &Key) {
        self.set_claims(key, Vec::new());
        let Some(pod) = self.pods.remove(key) else { return };
        self.leave_identity(key, pod.identity);
        for user in pod.users() {
            for key in self.release(user) {
                self.changed.pods.insert(key);
            }
        }
    }

    /// One pod less has an isolation or a class. Returns the pods that rules no longer name when it ends.
    fn release(&mut self, user: u32) -> Vec<Key> {
        match self.classes.contains_key(&user) {
            true => self.release_class(user),
            false => self.release_isolation(user),
        }
    }

    fn is_local(&self, pod: &Pod) -> bool {
        pod.facts.node == self.node && !pod.facts.is_dns
    }

    fn claim_addresses(&mut self, key: &Key) {
        let Some(pod) = self.pods.get(key) else { return };
        let attached = self.attached.get(&pod.facts.uid).filter(|_| self.is_local(pod));
        let wanted = attached.map_or(&pod.facts.addresses, |(_, held)| held).clone();
        self.set_claims(key, wanted);
    }

    fn set_claims(&mut self, key: &Key, addresses: Vec<IpAddr>) {
        let Some(pod) = self.pods.get_mut(key) else { return };
        let former = std::mem::replace(&mut pod.addresses, addresses.clone());
        for address in former.iter().filter(|address| !addresses.contains(address)) {
            if let Some(claims) = self.claims.get_mut(address) {
                claims.retain(|claimant| claimant != key);
                if claims.is_empty() {
                    self.claims.remove(address);
                }
            }
        }
        for address in addresses.iter().filter(|address| !former.contains(address)) {
            self.claims.entry(*address).or_default().push(key.clone());
        }
        self.changed.addresses.extend(former.into_iter().chain(addresses));
    }

    /// Who has an address. A status may be older than the truth: what the plugin said counts most, then what pods of
    /// this node say, then who said so last.
    fn owner(&self, address: IpAddr) -> Option<&Pod> {
        let claims = self.claims.get(&address)?;
        let rank = |pod: &&Pod| {
            let local = self.is_local(pod);
            (local && self.attached.contains_key(&pod.facts.uid), local)
        };
        // Of equals, the last.
        claims
            .iter()
            .filter_map(|key| self.pods.get(key))
            .max_by_key(rank)
    }

    fn map_address(&mut self, address: IpAddr) {
        let owner = self.owner(address);
        let isolations = owner.and_then(|pod| pod.isolations);
        let classes = owner.map_or([[OPEN; 2]; 2], |pod| pod.classes);
        let identity = owner.and_then(|pod| pod.identity);
        for direction in Direction::BOTH {
            let isolation = isolations.map(|isolations| isolations[direction as usize]);
            let class = |tier: Tier| {
                let class = classes[tier as usize][direction as usize];
                (class != OPEN).then_some(class)
            };
            let baseline = class(Tier::Baseline);
            self.set(Element::Admin(direction, address), class(Tier::Admin));
            self.set(Element::Baseline(direction, address), baseline);
            let isolation = isolation.filter(|_| baseline.is_none());
            self.set(Element::Isolated(direction, address), isolation);
        }
        self.set(Element::Own(address), isolations.map(|_| 0));
        self.identify_address(address, identity);
    }

    /// Says which ports a pod under this address may be reached by from an isolation, or may reach there.
    fn set_allowed(&mut self, direction: Direction, isolation: u32, address: IpAddr, ports: PortSet) {
        let element = Element::Allowed(direction, isolation, address);
        let wanted = (!ports.is_empty()).then(|| self.hold_ports(ports));
        let former = self.elements.get(&element).copied();
        self.set(element, wanted);
        if let Some(former) = former {
            self.release_ports(former);
        }
    }

    fn hold_ports(&mut self, ports: PortSet) -> u32 {
        if ports == PortSet::All {
            return ALL_PORTS;
        }
        if let Some(id) = self.port_set_ids.get(&ports).copied() {
            if let Some((_, uses)) = self.port_sets.get_mut(&id) {
                *uses += 1;
            }
            return id;
        }
        let id = self.next_id();
        self.set(Element::Ports(id), Some(0));
        for ports in ports.boxes() {
            self.set(Element::Port(id, ports), Some(0));
        }
        self.port_sets.insert(id, (ports.clone(), 1));
        self.port_set_ids.insert(ports, id);
        id
    }

    fn release_ports(&mut self, id: u32) {
        let Some((_, uses)) = self.port_sets.get_mut(&id) else {
            return;
        };
        *uses -= 1;
        if *uses > 0 {
            return;
        }
        if let Some((ports, _)) = self.port_sets.remove(&id) {
            self.port_set_ids.remove(&ports);
        }
        self.remove_range(
            Element::Port(id, PortBox::LEAST),
            Element::Port(id, PortBox::GREATEST),
        );
        self.set(Element::Ports(id), None);
    }

    fn remove_range(&mut self, first: Element, last: Element) {
        let elements: Vec<Element> = self
            .elements
            .range(first..=last)
            .map(|(element, _)| *element)
            .collect();
        for element in elements {
            self.set(element, None);
        }
    }
}

fn matches(selector: &LabelSelector, labels: &Labels) -> bool {
    selector.matches(|key| labels.get(key).map(String::as_str))
}
