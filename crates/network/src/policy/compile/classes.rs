//! Which rules of administrators hold for a pod of this node: classes, which pods share that the same policies of a tier
//! select. The rules of a class are an order, and the first one that matches a connection decides. That is settled here and
//! not in the kernel: for the address of every pod that a rule names, and for every range of other addresses, the rules are
//! merged into decisions by protocol and port. So a packet costs two look-ups in a tier, however many rules there are.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use skiff_client::Key;
use skiff_meta::net::Cidr;

use super::identities::{DNS_PORTS, TermId};
use super::{ACCEPTS, Compiler, DENIES, Element, NodeFacts, OPEN, UNDECIDED, matches};
use crate::policy::Direction;
use crate::policy::blocks::flatten_with;
use crate::policy::decisions::Decisions;
use crate::policy::objects::NamedPort;
use crate::policy::ports::{PortBox, PortSet};
use crate::policy::tiers::{Action, Tier, TierPeer, TierPolicy};

/// What pods must have in common to share a class: the policies, in the version that was read, what their named ports are,
/// and which nodes there are, if that matters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct ClassKey {
    pub(super) direction: Direction,
    tier: Tier,
    /// Their versions, in their order.
    policies: Vec<u64>,
    named: Vec<(NamedPort, PortSet)>,
    nodes: Option<u64>,
}

pub(super) struct Class {
    pub(super) key: ClassKey,
    pods: usize,
    /// In the order in which they are looked at.
    rules: Vec<ClassRule>,
}

struct ClassRule {
    action: Action,
    terms: Vec<TermId>,
    networks: Vec<Cidr>,
    ports: PortSet,
}

impl Class {
    pub(super) fn terms(&self) -> impl Iterator<Item = TermId> + '_ {
        self.rules.iter().flat_map(|rule| rule.terms.iter().copied())
    }
}

impl Compiler {
    /// Replaces the policies of both tiers. Answers whether there is something to compile.
    pub(in crate::policy) fn set_tier_policies(&mut self, mut policies: Vec<TierPolicy>) -> bool {
        policies.sort_by(|a, b| a.order().cmp(&b.order()));
        let is_same = policies.len() == self.tiers.len()
            && policies
                .iter()
                .zip(&self.tiers)
                .all(|(new, (_, old))| new == &**old);
        if is_same {
            return false;
        }
        let former = std::mem::take(&mut self.tiers);
        for policy in policies {
            let kept = former.iter().find(|(_, old)| **old == policy);
            let one = match kept {
                Some(kept) => kept.clone(),
                None => {
                    self.last_version += 1;
                    (self.last_version, Arc::new(policy))
                }
            };
            self.tiers.push(one);
        }
        self.changed.tiers = true;
        true
    }

    pub(in crate::policy) fn set_node(&mut self, name: &str, facts: Option<NodeFacts>) -> bool {
        if self.nodes.get(name) == facts.as_ref() {
            return false;
        }
        match facts {
            Some(facts) => self.nodes.insert(name.to_owned(), facts),
            None => self.nodes.remove(name),
        };
        self.nodes_version += 1;
        let matters = self.tiers.iter().any(|(_, policy)| policy.names_nodes());
        self.changed.tiers |= matters;
        matters
    }

    /// The class of a pod; `OPEN` if no policy of the tier has rules for it.
    pub(super) fn classify(&mut self, key: &Key, tier: Tier, direction: Direction) -> u32 {
        match self.class_key(key, tier, direction) {
            Some(wanted) => self.hold_class(wanted),
            None => OPEN,
        }
    }

    fn class_key(&self, key: &Key, tier: Tier, direction: Direction) -> Option<ClassKey> {
        let pod = self.pods.get(key)?;
        let mut policies = Vec::new();
        let mut names: BTreeSet<&NamedPort> = BTreeSet::new();
        let mut names_nodes = false;
        for (version, policy) in self.tiers.iter().filter(|(_, policy)| policy.tier == tier) {
            let rules = policy.rules(direction);
            if rules.is_empty() || !self.names(&policy.subject, key, pod) {
                continue;
            }
            policies.push(*version);
            names_nodes |= direction == Direction::Egress && policy.names_nodes();
            // On the way in, a named port is the selected pod's.
            if direction == Direction::Ingress {
                names.extend(rules.iter().flat_map(|rule| &rule.named));
            }
        }
        if policies.is_empty() {
            return None;
        }
        let resolve = |name: &NamedPort| (name.clone(), pod.facts.resolve(std::slice::from_ref(name)));
        Some(ClassKey {
            direction,
            tier,
            policies,
            named: names.into_iter().map(resolve).collect(),
            nodes: names_nodes.then_some(self.nodes_version),
        })
    }

    fn hold_class(&mut self, key: ClassKey) -> u32 {
        if let Some(id) = self.class_ids.get(&key).copied() {
            if let Some(class) = self.classes.get_mut(&id) {
                class.pods += 1;
            }
            return id;
        }
        let id = self.next_id();
        let direction = key.direction;
        let mut rules = Vec::new();
        for version in &key.policies {
            let found = self.tiers.iter().find(|(known, _)| known == version);
            let Some((_, policy)) = found.cloned() else {
                continue;
            };
            for rule in policy.rules(direction) {
                let mut ports = rule.ports.clone();
                let mut named = rule.named.as_slice();
                if direction == Direction::Ingress {
                    for (_, numbers) in key.named.iter().filter(|(name, _)| named.contains(name)) {
                        ports.add(numbers);
                    }
                    named = &[];
                }
                let mut made = ClassRule {
                    action: rule.action,
                    terms: Vec::new(),
                    networks: Vec::new(),
                    ports,
                };
                for peer in &rule.peers {
                    match peer {
                        TierPeer::Pods(term) => made.terms.push(self.hold_term(term, named, id)),
                        TierPeer::Network(cidr) => made.networks.push(*cidr),
                        TierPeer::Nodes(selector) => {
                            let selected = self.nodes.values();
                            let selected = selected.filter(|node| matches(selector, &node.labels));
                            let addresses = selected.flat_map(|node| &node.addresses);
                            made.networks
                                .extend(addresses.map(|address| Cidr::host(*address)));
                        }
                    }
                }
                rules.push(made);
            }
        }
        self.set(Element::Class(direction, id), Some(0));
        let networks: Vec<(usize, Cidr)> = rules
            .iter()
            .enumerate()
            .flat_map(|(rule, of_rule)| of_rule.networks.iter().map(move |cidr| (rule, *cidr)))
            .collect();
        let shapes: Vec<(Cidr, &[Cidr])> = networks.iter().map(|(_, cidr)| (*cidr, &[][..])).collect();
        let ranges = flatten_with(&shapes, |active| {
            let mut decisions = Decisions::default();
            for (rule, _) in active.map(|index| networks[*index]) {
                decisions.add(&rules[rule].ports, rules[rule].action);
            }
            (decisions.whole() != Some(None)).then_some(decisions)
        });
        for range in ranges {
            for (ports, action) in range.held.boxes() {
                let element = Element::RangeVerdict(direction, id, range.first, range.last, ports);
                self.set(element, Some(value_of(action)));
            }
        }
        let class = Class {
            key: key.clone(),
            pods: 1,
            rules,
        };
        self.classes.insert(id, class);
        self.class_ids.insert(key, id);
        self.changed.new_users.push(id);
        id
    }

    /// One pod less has the class. Returns the pods that rules no longer name when it ends.
    pub(super) fn release_class(&mut self, id: u32) -> Vec<Key> {
        let Some(class) = self.classes.get_mut(&id) else {
            return Vec::new();
        };
        class.pods -= 1;
        if class.pods > 0 {
            return Vec::new();
        }
        let Some(class) = self.classes.remove(&id) else {
            return Vec::new();
        };
        self.class_ids.remove(&class.key);
        let direction = class.key.direction;
        let (least, greatest) = (
            IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(Ipv6Addr::from_bits(u128::MAX)),
        );
        let all = Element::PeerVerdict(direction, id, least)..=Element::PeerVerdict(direction, id, greatest);
        let peers: Vec<Element> = self.elements.range(all).map(|(element, _)| *element).collect();
        for element in peers {
            if let Element::PeerVerdict(_, _, address) = element {
                self.set_peer_verdict(direction, id, address, None);
            }
        }
        self.remove_range(
            Element::RangeVerdict(direction, id, least, least, PortBox::LEAST),
            Element::RangeVerdict(direction, id, greatest, greatest, PortBox::GREATEST),
        );
        self.set(Element::Class(direction, id), None);
        let terms: BTreeSet<TermId> = class.terms().collect();
        let mut unnamed = Vec::new();
        for term in terms {
            unnamed.extend(self.release_term(term, id));
        }
        unnamed
    }

    /// What the rules of a class say to a pod of an identity, under one of its addresses.
    pub(super) fn decide(&self, class: u32, identity: u32, address: IpAddr) -> Decisions {
        let mut decisions = Decisions::default();
        let (Some(class), Some(identity)) = (self.classes.get(&class), self.identities.get(&identity)) else {
            return decisions;
        };
        let signature = &identity.signature;
        for rule in &class.rules {
            let mut ports = PortSet::default();
            for named in rule.terms.iter().filter_map(|term| signature.terms.get(term)) {
                ports.add(&rule.ports);
                ports.add(named);
            }
            if signature.is_dns {
                // It answers, and begins nothing.
                ports = match class.key.direction {
                    Direction::Ingress => PortSet::default(),
                    Direction::Egress => ports.within(&DNS_PORTS),
                };
            }
            if rule.networks.iter().any(|cidr| cidr.contains(address)) {
                ports.add(&rule.ports);
            }
            decisions.add(&ports, rule.action);
        }
        decisions
    }

    /// Says what becomes of connections between a class and a pod under this address, if rules name the pod.
    pub(super) fn set_peer_verdict(
        &mut self,
        direction: Direction,
        class: u32,
        address: IpAddr,
        decisions: Option<Decisions>,
    ) {
        let element = Element::PeerVerdict(direction, class, address);
        let wanted = decisions.map(|decisions| self.hold_decisions(decisions));
        let former = self.elements.get(&element).copied();
        self.set(element, wanted);
        if let Some(former) = former {
            self.release_decisions(former);
        }
    }

    fn hold_decisions(&mut self, decisions: Decisions) -> u32 {
        if let Some(whole) = decisions.whole() {
            return whole.map_or(UNDECIDED, value_of);
        }
        if let Some(id) = self.decision_ids.get(&decisions).copied() {
            if let Some((_, uses)) = self.decisions.get_mut(&id) {
                *uses += 1;
            }
            return id;
        }
        let id = self.next_id();
        self.set(Element::Decisions(id), Some(0));
        for (ports, action) in decisions.boxes() {
            self.set(Element::Decision(id, ports), Some(value_of(action)));
        }
        self.decisions.insert(id, (decisions.clone(), 1));
        self.decision_ids.insert(decisions, id);
        id
    }

    fn release_decisions(&mut self, id: u32) {
        let Some((_, uses)) = self.decisions.get_mut(&id) else {
            return;
        };
        *uses -= 1;
        if *uses > 0 {
            return;
        }
        if let Some((decisions, _)) = self.decisions.remove(&id) {
            self.decision_ids.remove(&decisions);
        }
        self.remove_range(
            Element::Decision(id, PortBox::LEAST),
            Element::Decision(id, PortBox::GREATEST),
        );
        self.set(Element::Decisions(id), None);
    }
}

/// An action as the value of an element. Who is passed on is looked at by the next tier, like who is not decided about.
fn value_of(action: Action) -> u32 {
    match action {
        Action::Accept => ACCEPTS,
        Action::Deny => DENIES,
        Action::Pass => UNDECIDED,
    }
}
