//! Which policies hold for a pod of this node: isolations, which pods share that the same policies select.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use skiff_client::Key;
use skiff_meta::net::Cidr;
use skiff_meta::selector::LabelSelector;

use super::identities::TermId;
use super::{Compiler, Element, OPEN, matches};
use crate::policy::Direction;
use crate::policy::blocks::{Block, flatten};
use crate::policy::objects::{NamedPort, NamespaceTerm, Peer, PodTerm, Policy};
use crate::policy::ports::{PortBox, PortSet};
use crate::policy::tiers::Tier;

/// What pods must have in common to share an isolation: the policies, in the version that was read, and what their
/// named ports are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct IsolationKey {
    pub(super) direction: Direction,
    namespace: String,
    policies: Vec<(String, u64)>,
    named: Vec<(NamedPort, PortSet)>,
}

pub(super) struct Isolation {
    pub(super) key: IsolationKey,
    pods: usize,
    /// By the pods on the other side.
    pub(super) allowed: BTreeMap<TermId, PortSet>,
}

impl Compiler {
    /// Finds the policies that select a pod. Returns the isolations and classes that it had before.
    pub(super) fn select(&mut self, key: &Key) -> Vec<u32> {
        let Some(pod) = self.pods.get(key) else {
            return Vec::new();
        };
        let isolations = self.is_local(pod).then(|| {
            Direction::BOTH.map(|direction| match self.isolation_key(key, direction) {
                Some(wanted) => self.hold_isolation(wanted),
                None => OPEN,
            })
        });
        let classes = Tier::BOTH.map(|tier| {
            Direction::BOTH.map(|direction| match isolations {
                None => OPEN,
                // NetworkPolicies have the last word on who they select.
                Some(isolations) if tier == Tier::Baseline && isolations[direction as usize] != OPEN => OPEN,
                Some(_) => self.classify(key, tier, direction),
            })
        });
        let Some(pod) = self.pods.get_mut(key) else {
            return Vec::new();
        };
        self.changed.addresses.extend(&pod.addresses);
        let former = pod.users();
        pod.isolations = isolations;
        pod.classes = classes;
        former
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
        self.set(Element::Isolation(direction, id), Some(0));
        for range in flatten(&blocks) {
            for ports in range.held.boxes() {
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
        self.changed.new_users.push(id);
        id
    }

    /// One pod less has the isolation. Returns the pods that rules no longer name when it ends.
    pub(super) fn release_isolation(&mut self, id: u32) -> Vec<Key> {
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
        let (least, greatest) = (
            IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(Ipv6Addr::from_bits(u128::MAX)),
        );
        let all = Element::Allowed(direction, id, least)..=Element::Allowed(direction, id, greatest);
        let allowed: Vec<Element> = self.elements.range(all).map(|(element, _)| *element).collect();
        for element in allowed {
            if let Element::Allowed(_, _, address) = element {
                self.set_allowed(direction, id, address, PortSet::default());
            }
        }
        self.remove_range(
            Element::AllowedBlock(direction, id, least, least, PortBox::LEAST),
            Element::AllowedBlock(direction, id, greatest, greatest, PortBox::GREATEST),
        );
        self.set(Element::Isolation(direction, id), None);
        let mut unnamed = Vec::new();
        for term in isolation.allowed.keys() {
            unnamed.extend(self.release_term(*term, id));
        }
        unnamed
    }
}
