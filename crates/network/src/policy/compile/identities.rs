//! Which rules name a pod: terms, and the identities of pods that the same terms name. What an isolation and an
//! identity may exchange follows from the two, which never change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use skiff_client::Key;

use super::{Compiler, Pod, matches};
use crate::dns_endpoints;
use crate::policy::Direction;
use crate::policy::objects::{NamedPort, NamespaceTerm, PodTerm};
use crate::policy::ports::{PortRange, PortSet};
use crate::proxy::Protocol;

/// Cluster DNS answers on addresses of the node: nothing but its own port is meant by a rule that names it.
pub(super) const DNS_PORTS: [PortRange; 2] = [
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

pub(super) type TermId = u32;

/// Pods that rules name, as long as an isolation or a class has such a rule.
pub(super) struct Term {
    term: PodTerm,
    /// Ports whose numbers depend on the pod.
    named: Vec<NamedPort>,
    text: String,
    /// Isolations and classes.
    users: BTreeSet<u32>,
    identities: BTreeSet<u32>,
}

/// The terms that name a pod, and what each one's named ports are there. All that rules can tell of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Signature {
    pub(super) terms: BTreeMap<TermId, PortSet>,
    pub(super) is_dns: bool,
}

pub(super) struct Identity {
    pub(super) signature: Signature,
    pods: BTreeSet<Key>,
    /// Those of its pods, as far as their elements are made.
    addresses: BTreeSet<IpAddr>,
}

impl Compiler {
    pub(super) fn hold_term(&mut self, term: &PodTerm, named: &[NamedPort], user: u32) -> TermId {
        let text = format!("{term:?} {named:?}");
        let id = match self.term_ids.get(&text) {
            Some(id) => *id,
            None => {
                let id = self.next_id();
                let one = Term {
                    term: term.clone(),
                    named: named.to_vec(),
                    text: text.clone(),
                    users: BTreeSet::new(),
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
            term.users.insert(user);
        }
        id
    }

    /// Returns the pods that nobody asks the term for any more.
    pub(super) fn release_term(&mut self, id: TermId, user: u32) -> Vec<Key> {
        let Some(term) = self.terms.get_mut(&id) else {
            return Vec::new();
        };
        term.users.remove(&user);
        if !term.users.is_empty() {
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
    pub(super) fn evaluate(&mut self, key: &Key, only: Option<&[TermId]>) -> bool {
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

    pub(super) fn names(&self, term: &PodTerm, key: &Key, pod: &Pod) -> bool {
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
    pub(super) fn identify(&mut self, key: &Key) {
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
                    addresses: BTreeSet::new(),
                };
                self.identities.insert(id, identity);
                self.identity_ids.insert(signature, id);
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

    pub(super) fn leave_identity(&mut self, key: &Key, identity: Option<u32>) {
        let Some(id) = identity else { return };
        let Some(identity) = self.identities.get_mut(&id) else {
            return;
        };
        identity.pods.remove(key);
        if !identity.pods.is_empty() {
            return;
        }
        for address in std::mem::take(&mut identity.addresses) {
            self.identified.remove(&address);
            self.disconnect(id, address);
        }
        let Some(identity) = self.identities.remove(&id) else {
            return;
        };
        self.identity_ids.remove(&identity.signature);
        for term in identity.signature.terms.keys() {
            if let Some(term) = self.terms.get_mut(term) {
                term.identities.remove(&id);
            }
        }
    }

    /// Makes the elements of an address those of an identity.
    pub(super) fn identify_address(&mut self, address: IpAddr, wanted: Option<u32>) {
        let former = self.identified.get(&address).copied();
        if former == wanted {
            return;
        }
        if let Some(former) = former {
            self.identified.remove(&address);
            if let Some(identity) = self.identities.get_mut(&former) {
                identity.addresses.remove(&address);
            }
            self.disconnect(former, address);
        }
        if let Some(wanted) = wanted {
            self.identified.insert(address, wanted);
            if let Some(identity) = self.identities.get_mut(&wanted) {
                identity.addresses.insert(address);
            }
            for user in self.users_of(wanted) {
                self.connect(user, wanted, address);
            }
        }
    }

    /// Removes the elements of an address that was an identity's.
    fn disconnect(&mut self, identity: u32, address: IpAddr) {
        for user in self.users_of(identity) {
            if let Some(class) = self.classes.get(&user) {
                self.set_peer_verdict(class.key.direction, user, address, None);
            } else if let Some(isolation) = self.isolations.get(&user) {
                self.set_allowed(isolation.key.direction, user, address, PortSet::default());
            }
        }
    }

    /// Makes the element of an address for an isolation or a class.
    fn connect(&mut self, user: u32, identity: u32, address: IpAddr) {
        if let Some(class) = self.classes.get(&user) {
            let direction = class.key.direction;
            let decisions = self.decide(user, identity, address);
            self.set_peer_verdict(direction, user, address, Some(decisions));
        } else if let Some(isolation) = self.isolations.get(&user) {
            let direction = isolation.key.direction;
            let ports = self.ports_between(user, identity);
            self.set_allowed(direction, user, address, ports);
        }
    }

    /// The isolations and classes with a rule that names the identity.
    fn users_of(&self, identity: u32) -> BTreeSet<u32> {
        let terms = self.identities.get(&identity).into_iter();
        terms
            .flat_map(|identity| identity.signature.terms.keys())
            .filter_map(|term| self.terms.get(term))
            .flat_map(|term| term.users.iter().copied())
            .collect()
    }

    /// Makes the elements of a new isolation or class.
    pub(super) fn connect_user(&mut self, user: u32) {
        let terms: Vec<TermId> = match (self.isolations.get(&user), self.classes.get(&user)) {
            (Some(isolation), _) => isolation.allowed.keys().copied().collect(),
            (None, Some(class)) => class.terms().collect(),
            (None, None) => return,
        };
        let identities: BTreeSet<u32> = terms
            .iter()
            .filter_map(|term| self.terms.get(term))
            .flat_map(|term| term.identities.iter().copied())
            .collect();
        for identity in identities {
            let addresses = self
                .identities
                .get(&identity)
                .map(|identity| identity.addresses.clone());
            for address in addresses.into_iter().flatten() {
                self.connect(user, identity, address);
            }
        }
    }

    /// What may pass between an isolation and an identity.
    fn ports_between(&self, isolation: u32, identity: u32) -> PortSet {
        let mut ports = PortSet::default();
        let (Some(isolation), Some(identity)) =
            (self.isolations.get(&isolation), self.identities.get(&identity))
        else {
            return ports;
        };
        let is_dns = identity.signature.is_dns;
        // It answers, and begins nothing.
        if is_dns && isolation.key.direction == Direction::Ingress {
            return ports;
        }
        for (term, named) in &identity.signature.terms {
            if let Some(allowed) = isolation.allowed.get(term) {
                ports.add(allowed);
                ports.add(named);
            }
        }
        match is_dns {
            true => ports.within(&DNS_PORTS),
            false => ports,
        }
    }
}
