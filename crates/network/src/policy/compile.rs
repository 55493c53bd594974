//! From policies, pods and namespaces to the elements of the kernel's sets, step by step: a change costs what depends
//! on it. No I/O.
//!
//! Two kinds of numbers keep the sets small. Pods of this node that the same policies select have the same *isolation*
//! of a direction; pods of the cluster that the same rules name have the same *identity*. Which identities may talk
//! with which isolations is in one set, and which address has which number is in maps. So a pod that comes or goes is
//! one element in each map, as long as another one like it is there.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use skiff_client::Key;
use skiff_meta::net::Cidr;
use skiff_meta::selector::LabelSelector;

use super::Direction;
use super::blocks::{Block, flatten};
use super::objects::{Labels, NamedPort, NamespaceTerm, Peer, PodFacts, PodTerm, Policy};
use super::ports::{PortBox, PortRange, PortSet};
use crate::dns_endpoints;
use crate::proxy::Protocol;

/// The isolation of a pod that no policy selects.
pub(super) const OPEN: u32 = 0;

/// Cluster DNS answers on addresses of the node: nothing but its own port is meant by a rule that names it.
const DNS_PORTS: [PortRange; 2] = [
    PortRange {
        protocol: Protocol::Tcp,
        first: dns_endpoints::PORT,
        last: dns_endpoints::PORT,
    },
    PortRange {
        protocol: Protocol::Udp,
        first: dns_endpoints::PORT,
        last: dns_endpoints::PORT,
    },
];

/// An element of one of the kernel's sets or maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Element {
    /// A pod of this node, mapped to its isolation.
    Isolated(Direction, IpAddr),
    /// A pod of any node that rules name, mapped to its identity.
    Identified(IpAddr),
    /// A pod of this node: it may talk with itself.
    Own(IpAddr),
    /// What passes between pods of an isolation and pods of an identity.
    Allowed(Direction, u32, u32, PortBox),
    /// What passes between pods of an isolation and a range of addresses.
    AllowedBlock(Direction, u32, IpAddr, IpAddr, PortBox),
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

type TermId = u32;

/// Pods that rules name, as long as an isolation has such a rule.
struct Term {
    term: PodTerm,
    /// Ports whose numbers depend on the pod.
    named: Vec<NamedPort>,
    text: String,
    isolations: BTreeSet<u32>,
    identities: BTreeSet<u32>,
}

/// The terms that name a pod, and what each one's named ports are there. All that rules can tell of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Signature {
    terms: BTreeMap<TermId, PortSet>,
    is_dns: bool,
}

struct Identity {
    signature: Signature,
    pods: BTreeSet<Key>,
}

/// What pods must have in common to share an isolation: the policies, in the version that was read, and what their
/// named ports are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct IsolationKey {
    direction: Direction,
    namespace: String,
    policies: Vec<(String, u64)>,
    named: Vec<(NamedPort, PortSet)>,
}

struct Isolation {
    key: IsolationKey,
    pods: usize,
    /// By the pods on the other side.
    allowed: BTreeMap<TermId, PortSet>,
}

struct Pod {
    facts: PodFacts,
    /// Those that it claims.
    addresses: Vec<IpAddr>,
    /// Of a pod of this node, by direction.
    isolations: Option<[u32; 2]>,
    signature: Signature,
    identity: Option<u32>,
}

#[derive(Default)]
pub(super) struct Compiler {
    node: String,
    namespaces: BTreeMap<String, Labels>,
    /// By namespace and name, with the version that tells one reading of a policy from the next.
    policies: BTreeMap<String, BTreeMap<String, (u64, Arc<Policy>)>>,
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
    identities: BTreeMap<u32, Identity>,
    identity_ids: HashMap<Signature, u32>,
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
    addresses: BTreeSet<IpAddr>,
    new_terms: Vec<TermId>,
    new_isolations: Vec<u32>,
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
        self.changed.policies.insert(key.namespace.clone())
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

    /// Whether a pod is known, by name and uid.
    pub(super) fn knows(&self, key: &Key, uid: &str) -> bool {
        self.pods.get(key).is_some_and(|pod| pod.facts.uid == uid)
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

    /// How many numbers are in use: isolations and identities.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.isolations.len(), self.identities.len())
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
        for isolation in std::mem::take(&mut self.changed.new_isolations) {
            self.connect_isolation(isolation);
        }
        for isolation in released {
            renamed.extend(self.release_isolation(isolation));
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
        for isolation in pod.isolations.into_iter().flatten() {
            for key in self.release_isolation(isolation) {
                self.changed.pods.insert(key);
            }
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
        let identity = owner.and_then(|pod| pod.identity);
        for direction in Direction::BOTH {
            let isolation = isolations.map(|isolations| isolations[direction as usize]);
            self.set(Element::Isolated(direction, address), isolation);
        }
        self.set(Element::Own(address), isolations.map(|_| 0));
        self.set(Element::Identified(address), identity);
    }

    /// Finds the policies that select a pod. Returns the isolations that it had before.
    fn select(&mut self, key: &Key) -> Vec<u32> {
        let Some(pod) = self.pods.get(key) else {
            return Vec::new();
        };
        let isolations = self.is_local(pod).then(|| {
            Direction::BOTH.map(|direction| match self.isolation_key(key, direction) {
                Some(wanted) => self.hold_isolation(wanted),
                None => OPEN,
            })
        });
        let Some(pod) = self.pods.get_mut(key) else {
            return Vec::new();
        };
        self.changed.addresses.extend(&pod.addresses);
        let former = std::mem::replace(&mut pod.isolations, isolations);
        former.into_iter().flatten().collect()
    }

    /// `None` if no policy isolates the pod in this direction.
    fn isolation_key(&self, key: &Key, direction: Direction) -> Option<IsolationKey> {
        let pod = self.pods.get(key)?;
        let mut policies = Vec::new();
        let mut names: BTreeSet<&NamedPort> = BTreeSet::new();
        for (name, (version, policy)) in self.policies.get(&key.namespace)? {
            let Some(rules) = policy.rules(direction) else {
                continue;
            };
            if !matches(&policy.pods, &pod.facts.labels) {
                continue;
            }
            policies.push((name.clone(), *version));
            // On the way in, a named port is the selected pod's.
            if direction == Direction::Ingress {
                names.extend(rules.iter().flat_map(|rule| &rule.named));
            }
        }
        if policies.is_empty() {
            return None;
        }
        let resolve = |name: &NamedPort| (name.clone(), pod.facts.resolve(std::slice::from_ref(name)));
        Some(IsolationKey {
            direction,
            namespace: key.namespace.clone(),
            policies,
            named: names.into_iter().map(resolve).collect(),
        })
    }

    fn hold_isolation(&mut self, key: IsolationKey) -> u32 {
        if let Some(id) = self.isolation_ids.get(&key).copied() {
            if let Some(isolation) = self.isolations.get_mut(&id) {
                isolation.pods += 1;
            }
            return id;
        }
        let id = self.next_id();
        let direction = key.direction;
        let policies: Vec<Arc<Policy>> = {
            let of_namespace = self.policies.get(&key.namespace);
            let named = key.policies.iter();
            named
                .filter_map(|(name, _)| Some(of_namespace?.get(name)?.1.clone()))
                .collect()
        };
        let mut blocks = Vec::new();
        let mut allowed: BTreeMap<TermId, PortSet> = BTreeMap::new();
        let rules = policies
            .iter()
            .filter_map(|policy| policy.rules(direction))
            .flatten();
        for rule in rules {
            let mut ports = rule.ports.clone();
            let mut named = rule.named.as_slice();
            if direction == Direction::Ingress {
                for (_, numbers) in key.named.iter().filter(|(name, _)| rule.named.contains(name)) {
                    ports.add(numbers);
                }
                named = &[];
            }
            let mut allow_term = |compiler: &mut Compiler, term: &PodTerm, ports: &PortSet| {
                let term = compiler.hold_term(term, named, id);
                allowed.entry(term).or_default().add(ports);
            };
            let Some(peers) = &rule.peers else {
                let everywhere = [
                    IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                    IpAddr::V6(Ipv6Addr::UNSPECIFIED),
                ];
                blocks.extend(everywhere.into_iter().filter_map(|any| {
                    Some(Block {
                        cidr: Cidr::new(any, 0)?,
                        except: Vec::new(),
                        ports: ports.clone(),
                    })
                }));
                if !named.is_empty() {
                    // Of all that can be reached, only pods have named ports.
                    let everybody = PodTerm {
                        namespaces: NamespaceTerm::Selected(LabelSelector::everything()),
                        pods: LabelSelector::everything(),
                    };
                    allow_term(self, &everybody, &PortSet::default());
                }
                continue;
            };
            for peer in peers {
                match peer {
                    Peer::Pods(term) => allow_term(self, term, &ports),
                    Peer::Block { cidr, except } => blocks.push(Block {
                        cidr: *cidr,
                        except: except.clone(),
                        ports: ports.clone(),
                    }),
                    Peer::Nobody => {}
                }
            }
        }
        for range in flatten(&blocks) {
            for ports in range.ports.boxes() {
                let element = Element::AllowedBlock(direction, id, range.first, range.last, ports);
                self.set(element, Some(0));
            }
        }
        let isolation = Isolation {
            key: key.clone(),
            pods: 1,
            allowed,
        };
        self.isolations.insert(id, isolation);
        self.isolation_ids.insert(key, id);
        self.changed.new_isolations.push(id);
        id
    }

    /// One pod less has the isolation. Returns the pods that rules no longer name when it ends.
    fn release_isolation(&mut self, id: u32) -> Vec<Key> {
        let Some(isolation) = self.isolations.get_mut(&id) else {
            return Vec::new();
        };
        isolation.pods -= 1;
        if isolation.pods > 0 {
            return Vec::new();
        }
        let Some(isolation) = self.isolations.remove(&id) else {
            return Vec::new();
        };
        self.isolation_ids.remove(&isolation.key);
        let direction = isolation.key.direction;
        self.remove_range(
            Element::Allowed(direction, id, 0, PortBox::LEAST),
            Element::Allowed(direction, id, u32::MAX, PortBox::GREATEST),
        );
        let (least, greatest) = (
            IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(Ipv6Addr::from_bits(u128::MAX)),
        );
        self.remove_range(
            Element::AllowedBlock(direction, id, least, least, PortBox::LEAST),
            Element::AllowedBlock(direction, id, greatest, greatest, PortBox::GREATEST),
        );
        let mut unnamed = Vec::new();
        for term in isolation.allowed.keys() {
            unnamed.extend(self.release_term(*term, id));
        }
        unnamed
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

    fn hold_term(&mut self, term: &PodTerm, named: &[NamedPort], isolation: u32) -> TermId {
        let text = format!("{term:?} {named:?}");
        let id = match self.term_ids.get(&text) {
            Some(id) => *id,
            None => {
                let id = self.next_id();
                let one = Term {
                    term: term.clone(),
                    named: named.to_vec(),
                    text: text.clone(),
                    isolations: BTreeSet::new(),
                    identities: BTreeSet::new(),
                };
                self.terms.insert(id, one);
                self.term_ids.insert(text, id);
                match &term.namespaces {
                    NamespaceTerm::Own(namespace) => {
                        let of_namespace = self.terms_of_namespace.entry(namespace.clone()).or_default();
                        of_namespace.insert(id);
                    }
                    NamespaceTerm::Selected(_) => {
                        self.terms_of_many.insert(id);
                    }
                }
                self.changed.new_terms.push(id);
                id
            }
        };
        if let Some(term) = self.terms.get_mut(&id) {
            term.isolations.insert(isolation);
        }
        id
    }

    /// Returns the pods that nobody asks the term for any more.
    fn release_term(&mut self, id: TermId, isolation: u32) -> Vec<Key> {
        let Some(term) = self.terms.get_mut(&id) else {
            return Vec::new();
        };
        term.isolations.remove(&isolation);
        if !term.isolations.is_empty() {
            return Vec::new();
        }
        let Some(term) = self.terms.remove(&id) else {
            return Vec::new();
        };
        self.term_ids.remove(&term.text);
        self.terms_of_many.remove(&id);
        if let NamespaceTerm::Own(namespace) = &term.term.namespaces
            && let Some(of_namespace) = self.terms_of_namespace.get_mut(namespace)
        {
            of_namespace.remove(&id);
            if of_namespace.is_empty() {
                self.terms_of_namespace.remove(namespace);
            }
        }
        let mut unnamed = Vec::new();
        for pod in self.pods.iter_mut() {
            if pod.1.signature.terms.remove(&id).is_some() {
                unnamed.push(pod.0.clone());
            }
        }
        unnamed
    }

    /// Notes which terms name a pod: all of them, or of `only` these. Returns whether that changed.
    fn evaluate(&mut self, key: &Key, only: Option<&[TermId]>) -> bool {
        let Some(pod) = self.pods.get(key) else {
            return false;
        };
        let mut signature = match only {
            Some(_) => pod.signature.clone(),
            None => Signature {
                is_dns: pod.facts.is_dns,
                ..Signature::default()
            },
        };
        let mut consider = |id: TermId| {
            if let Some(term) = self.terms.get(&id)
                && self.names(&term.term, key, pod)
            {
                signature.terms.insert(id, pod.facts.resolve(&term.named));
            }
        };
        // A pod without an address cannot be met.
        match only {
            _ if pod.addresses.is_empty() => {}
            Some(terms) => terms.iter().copied().for_each(&mut consider),
            None => {
                let of_namespace = self.terms_of_namespace.get(&key.namespace);
                of_namespace
                    .into_iter()
                    .flatten()
                    .copied()
                    .for_each(&mut consider);
                self.terms_of_many.iter().copied().for_each(&mut consider);
            }
        }
        match self.pods.get_mut(key) {
            Some(pod) if pod.signature != signature => {
                pod.signature = signature;
                true
            }
            _ => false,
        }
    }

    fn names(&self, term: &PodTerm, key: &Key, pod: &Pod) -> bool {
        let namespace = match &term.namespaces {
            NamespaceTerm::Own(namespace) => *namespace == key.namespace,
            // Without its labels a namespace is in no selection, not even in that of all.
            NamespaceTerm::Selected(selector) => self
                .namespaces
                .get(&key.namespace)
                .is_some_and(|labels| matches(selector, labels)),
        };
        namespace && matches(&term.pods, &pod.facts.labels)
    }

    /// Gives a pod the identity that its signature stands for.
    fn identify(&mut self, key: &Key) {
        let Some(pod) = self.pods.get(key) else { return };
        let former = pod.identity;
        if let Some(id) = former
            && self
                .identities
                .get(&id)
                .is_some_and(|identity| identity.signature == pod.signature)
        {
            return;
        }
        let signature = pod.signature.clone();
        let identity = match self.identity_ids.get(&signature) {
            _ if signature.terms.is_empty() => None,
            Some(id) => Some(*id),
            None => {
                let id = self.next_id();
                for term in signature.terms.keys() {
                    if let Some(term) = self.terms.get_mut(term) {
                        term.identities.insert(id);
                    }
                }
                let identity = Identity {
                    signature: signature.clone(),
                    pods: BTreeSet::new(),
                };
                self.identities.insert(id, identity);
                self.identity_ids.insert(signature, id);
                self.connect_identity(id);
                Some(id)
            }
        };
        if let Some(identity) = identity.and_then(|id| self.identities.get_mut(&id)) {
            identity.pods.insert(key.clone());
        }
        if let Some(pod) = self.pods.get_mut(key) {
            pod.identity = identity;
            self.changed.addresses.extend(&pod.addresses);
        }
        self.leave_identity(key, former);
    }

    fn leave_identity(&mut self, key: &Key, identity: Option<u32>) {
        let Some(id) = identity else { return };
        let Some(identity) = self.identities.get_mut(&id) else {
            return;
        };
        identity.pods.remove(key);
        if !identity.pods.is_empty() {
            return;
        }
        let connected = self.isolations_of(id);
        let Some(identity) = self.identities.remove(&id) else {
            return;
        };
        self.identity_ids.remove(&identity.signature);
        for term in identity.signature.terms.keys() {
            if let Some(term) = self.terms.get_mut(term) {
                term.identities.remove(&id);
            }
        }
        for (isolation, direction) in connected {
            self.remove_range(
                Element::Allowed(direction, isolation, id, PortBox::LEAST),
                Element::Allowed(direction, isolation, id, PortBox::GREATEST),
            );
        }
    }

    fn isolations_of(&self, identity: u32) -> BTreeSet<(u32, Direction)> {
        let terms = self.identities.get(&identity).into_iter();
        terms
            .flat_map(|identity| identity.signature.terms.keys())
            .filter_map(|term| self.terms.get(term))
            .flat_map(|term| &term.isolations)
            .filter_map(|id| Some((*id, self.isolations.get(id)?.key.direction)))
            .collect()
    }

    fn connect_identity(&mut self, identity: u32) {
        for (isolation, _) in self.isolations_of(identity) {
            self.connect(isolation, identity);
        }
    }

    fn connect_isolation(&mut self, isolation: u32) {
        let Some(terms) = self
            .isolations
            .get(&isolation)
            .map(|isolation| &isolation.allowed)
        else {
            return;
        };
        let identities: BTreeSet<u32> = terms
            .keys()
            .filter_map(|term| self.terms.get(term))
            .flat_map(|term| term.identities.iter().copied())
            .collect();
        for identity in identities {
            self.connect(isolation, identity);
        }
    }

    /// Enters what may pass between an isolation and an identity, neither of which ever changes.
    fn connect(&mut self, isolation_id: u32, identity_id: u32) {
        let (Some(isolation), Some(identity)) = (
            self.isolations.get(&isolation_id),
            self.identities.get(&identity_id),
        ) else {
            return;
        };
        let direction = isolation.key.direction;
        let is_dns = identity.signature.is_dns;
        // It answers, and begins nothing.
        if is_dns && direction == Direction::Ingress {
            return;
        }
        let mut ports = PortSet::default();
        for (term, named) in &identity.signature.terms {
            if let Some(allowed) = isolation.allowed.get(term) {
                ports.add(allowed);
                ports.add(named);
            }
        }
        if is_dns {
            ports = ports.within(&DNS_PORTS);
        }
        for ports in ports.boxes() {
            self.set(
                Element::Allowed(direction, isolation_id, identity_id, ports),
                Some(0),
            );
        }
    }
}

fn matches(selector: &LabelSelector, labels: &Labels) -> bool {
    selector.matches(|key| labels.get(key).map(String::as_str))
}
