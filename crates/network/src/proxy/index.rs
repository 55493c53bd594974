//! All services and their endpoints, kept by events, and what the kernel must have of them. An event marks its
//! service; `compile` plans the marked ones again and answers with the elements that have changed. No I/O.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use skiff_client::Key;
use skiff_meta::net::Cidr;

use super::elements::{Element, Front, SLOTS, Value};
use super::endpoints::{Place, Target, targets};
use super::objects::{ExternalIp, PortFacts, Protocol, ProxySlice, ServiceFacts};
use super::plan::{Around, Claim, Plan, Right, plan, refusal};

/// Refusals that one service is told of; it can ask for any number of addresses.
const MAX_REFUSALS: usize = 100;

/// The cluster's networks, which no service may choose addresses from.
#[derive(Debug, Clone, Default)]
pub struct Networks {
    pub pods: Vec<Cidr>,
    pub services: Vec<Cidr>,
}

impl Networks {
    /// The families that pods and services have, by their networks; true for IPv4.
    pub fn families(&self) -> Vec<bool> {
        let all = || self.pods.iter().chain(&self.services);
        let has = |ipv4: &bool| all().any(|network| network.is_ipv4() == *ipv4);
        [true, false].into_iter().filter(has).collect()
    }
}

#[derive(Default)]
struct Entry {
    facts: Option<ServiceFacts>,
    slices: BTreeMap<String, Arc<ProxySlice>>,
    /// What is in `wanted` of it.
    planned: Plan,
}

/// Someone who wants a front.
struct Claimant {
    created: i64,
    service: Key,
    claim: Claim,
}

impl Claimant {
    fn order(&self) -> (Right, i64, &Key) {
        (self.claim.right, self.created, &self.service)
    }
}

/// What `wanted` has of a front beside its own element.
#[derive(Default)]
struct Placed {
    targets: [Vec<Target>; 2],
    sources: Vec<Cidr>,
}

pub struct Index {
    place: Place,
    networks: Networks,
    families: Vec<bool>,
    services: HashMap<Key, Entry>,
    /// The services to plan again.
    marked: HashSet<Key>,
    /// Who has a cluster IP, whoever serves it.
    owners: HashMap<IpAddr, Vec<Key>>,
    /// Who wants an external address.
    external: HashMap<IpAddr, BTreeSet<Key>>,
    api_servers: BTreeSet<Target>,
    claims: HashMap<Front, Vec<Claimant>>,
    placed: HashMap<Front, Placed>,
    /// How many services have an element together.
    shared: HashMap<Element, usize>,
    /// What each service was told that it does not get.
    told: HashMap<Key, HashSet<String>>,
    /// All that the kernel must have.
    wanted: HashMap<Element, Value>,
    /// What `wanted` had of each element that was touched since the last `compile`.
    touched: HashMap<Element, Option<Value>>,
    counts: Counts,
}

/// How much there is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub services: usize,
    pub endpoints: usize,
    /// Service ports that must stay on this node, which has no endpoint of them: internal and external, of IPv4 and
    /// of IPv6.
    pub no_local: [(usize, usize); 2],
}

/// What a `compile` changes.
#[derive(Debug, Default)]
pub struct Delta {
    pub removed: Vec<Element>,
    pub added: Vec<(Element, Value)>,
    /// UDP flows to look at: where they came to, and the endpoints that still answer there.
    pub flows: HashMap<Front, Vec<Target>>,
    /// Health-check ports that have changed; `None` if the service has none any more.
    pub health: Vec<(Key, Option<(u16, usize)>)>,
    /// What services are told that they do not get.
    pub refusals: Vec<(ObjectReference, String)>,
    /// How many services were planned.
    pub planned: usize,
}

impl Index {
    pub fn new(node: &str, networks: Networks) -> Index {
        Index {
            place: Place {
                node: node.to_owned(),
                zone: String::new(),
            },
            families: networks.families(),
            networks,
            services: HashMap::new(),
            marked: HashSet::new(),
            owners: HashMap::new(),
            external: HashMap::new(),
            api_servers: BTreeSet::new(),
            claims: HashMap::new(),
            placed: HashMap::new(),
            shared: HashMap::new(),
            told: HashMap::new(),
            wanted: HashMap::new(),
            touched: HashMap::new(),
            counts: Counts::default(),
        }
    }

    pub fn set_service(&mut self, key: &Key, facts: Option<ServiceFacts>) {
        let entry = self.services.entry(key.clone()).or_default();
        let old = std::mem::replace(&mut entry.facts, facts);
        let new = entry.facts.as_ref();
        let ips =
            |facts: Option<&ServiceFacts>| facts.map(|facts| facts.cluster_ips.clone()).unwrap_or_default();
        let wants = |facts: Option<&ServiceFacts>| -> Vec<IpAddr> {
            let external = facts.into_iter().flat_map(|facts| &facts.external_ips);
            external.map(|external| external.address).collect()
        };
        let (old_ips, new_ips) = (ips(old.as_ref()), ips(new));
        let (old_wants, new_wants) = (wants(old.as_ref()), wants(new));
        for address in old_wants {
            if let Some(users) = self.external.get_mut(&address) {
                users.remove(key);
                if users.is_empty() {
                    self.external.remove(&address);
                }
            }
        }
        for address in new_wants {
            self.external.entry(address).or_default().insert(key.clone());
        }
        if old_ips != new_ips {
            for address in &old_ips {
                if let Some(owners) = self.owners.get_mut(address) {
                    owners.retain(|owner| owner != key);
                    if owners.is_empty() {
                        self.owners.remove(address);
                    }
                }
            }
            for address in &new_ips {
                self.owners.entry(*address).or_default().push(key.clone());
            }
            for address in old_ips.iter().chain(&new_ips) {
                self.marked
                    .extend(self.external.get(address).into_iter().flatten().cloned());
            }
        }
        self.told.remove(key);
        self.marked.insert(key.clone());
    }

    /// `service` is the one that the slice belongs to.
    pub fn set_slice(&mut self, service: &Key, name: &str, slice: Option<Arc<ProxySlice>>) {
        let entry = self.services.entry(service.clone()).or_default();
        match slice {
            Some(slice) => entry.slices.insert(name.to_owned(), slice),
            None => entry.slices.remove(name),
        };
        self.marked.insert(service.clone());
        if service.namespace == "default" && service.name == "kubernetes" {
            self.find_api_servers(service);
        }
    }

    fn find_api_servers(&mut self, service: &Key) {
        let Some(entry) = self.services.get(service) else {
            return;
        };
        let of = |ipv4| targets(entry.slices.values(), ipv4, "https", Protocol::Tcp, &self.place).cluster;
        let found: BTreeSet<Target> = of(true).into_iter().chain(of(false)).collect();
        if found != self.api_servers {
            self.api_servers = found;
            self.marked.extend(self.external.values().flatten().cloned());
        }
    }

    /// The zone of this node, which endpoints may be meant for.
    pub fn set_zone(&mut self, zone: &str) {
        if self.place.zone != zone {
            zone.clone_into(&mut self.place.zone);
            self.marked.extend(self.services.keys().cloned());
        }
    }

    /// All that the kernel must have, as of the last `compile`.
    pub fn wanted(&self) -> &HashMap<Element, Value> {
        &self.wanted
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    pub fn compile(&mut self) -> Delta {
        let mut delta = Delta::default();
        let mut contested = HashSet::new();
        for key in std::mem::take(&mut self.marked) {
            delta.planned += 1;
            self.plan_service(&key, &mut delta, &mut contested);
        }
        for at in contested {
            self.resolve(at, &mut delta);
        }
        for (element, before) in std::mem::take(&mut self.touched) {
            let now = self.wanted.get(&element).copied();
            if before == now {
                continue;
            }
            if before.is_some() {
                delta.removed.push(element);
            }
            delta.added.extend(now.map(|value| (element, value)));
        }
        delta
    }

    fn plan_service(&mut self, key: &Key, delta: &mut Delta, contested: &mut HashSet<Front>) {
        let Some(entry) = self.services.get_mut(key) else {
            return;
        };
        let old = std::mem::take(&mut entry.planned);
        let entry = &self.services[key];
        let place = &self.place;
        let targets = |port: &PortFacts, ipv4: bool| {
            targets(entry.slices.values(), ipv4, &port.name, port.protocol, place)
        };
        let refused = |wanted: &ExternalIp, port: u16| self.belongs_to(wanted.address, port);
        let around = Around {
            before: &old.claims,
            targets: &targets,
            refused: &refused,
            families: &self.families,
        };
        let facts = entry.facts.as_ref();
        let new = facts.map(|facts| plan(facts, &around)).unwrap_or_default();
        let created = facts.map_or(0, |facts| facts.created);
        let gone = facts.is_none() && entry.slices.is_empty();
        self.count(&old, &new);
        self.replace_shared(&old.shared, &new.shared);
        self.replace_claims(key, created, &old.claims, &new.claims, delta, contested);
        if old.health != new.health {
            delta.health.push((key.clone(), new.health));
        }
        for message in &new.refusals {
            self.tell(key, message.clone(), delta);
        }
        if gone {
            self.services.remove(key);
            self.told.remove(key);
        } else if let Some(entry) = self.services.get_mut(key) {
            entry.planned = new;
        }
    }

    fn count(&mut self, old: &Plan, new: &Plan) {
        let counts = &mut self.counts;
        let step = |count: &mut usize, old: usize, new: usize| *count = (*count + new).saturating_sub(old);
        step(
            &mut counts.services,
            usize::from(!old.claims.is_empty()),
            usize::from(!new.claims.is_empty()),
        );
        step(&mut counts.endpoints, old.endpoints, new.endpoints);
        for family in 0..2 {
            let (old, new) = (old.no_local_endpoints[family], new.no_local_endpoints[family]);
            step(&mut counts.no_local[family].0, old.0, new.0);
            step(&mut counts.no_local[family].1, old.1, new.1);
        }
    }

    fn put(&mut self, element: Element, value: Option<Value>) {
        let before = match value {
            Some(value) => self.wanted.insert(element, value),
            None => self.wanted.remove(&element),
        };
        self.touched.entry(element).or_insert(before);
    }

    fn replace_shared(&mut self, old: &[Element], new: &[Element]) {
        for element in new.iter().filter(|element| !old.contains(element)) {
            let users = self.shared.entry(*element).or_default();
            *users += 1;
            if *users == 1 {
                self.put(*element, Some(Value::Member));
            }
        }
        for element in old.iter().filter(|element| !new.contains(element)) {
            let Some(users) = self.shared.get_mut(element) else {
                continue;
            };
            *users -= 1;
            if *users == 0 {
                self.shared.remove(element);
                self.put(*element, None);
            }
        }
    }

    fn replace_claims(
        &mut self,
        key: &Key,
        created: i64,
        old: &[Claim],
        new: &[Claim],
        delta: &mut Delta,
        contested: &mut HashSet<Front>,
    ) {
        for claim in old.iter().filter(|claim| !new.contains(claim)) {
            if let Some(claims) = self.claims.get_mut(&claim.at) {
                claims.retain(|claimant| claimant.service != *key);
                if claims.is_empty() {
                    self.claims.remove(&claim.at);
                }
            }
            contested.insert(claim.at);
            if claim.serving.is_some() && !new.iter().any(|new| new.at == claim.at) {
                delta.flows.entry(claim.at).or_default();
            }
        }
        for claim in new.iter().filter(|claim| !old.contains(claim)) {
            let claims = self.claims.entry(claim.at).or_default();
            claims.push(Claimant {
                created,
                service: key.clone(),
                claim: claim.clone(),
            });
            claims.sort_by(|a, b| a.order().cmp(&b.order()));
            contested.insert(claim.at);
            if let Some(serving) = &claim.serving {
                let was = old.iter().find(|old| old.at == claim.at);
                let was = was.and_then(|old| old.serving.as_ref());
                // Flows that are older than the service, and those to endpoints that are gone.
                if was.is_none_or(|was| was.iter().any(|target| serving.binary_search(target).is_err())) {
                    delta.flows.insert(claim.at, serving.clone());
                }
            }
        }
    }

    /// Gives a front to who has the best right to it.
    fn resolve(&mut self, at: Front, delta: &mut Delta) {
        let claims = self.claims.get(&at).map_or(&[][..], Vec::as_slice);
        let steer = claims.first().map(|winner| winner.claim.steer);
        let placed = claims.first().map_or_else(Placed::default, |winner| Placed {
            targets: winner.claim.targets.clone(),
            sources: winner.claim.sources.clone(),
        });
        let losers: Vec<(Key, Right, Key)> = match claims {
            [winner, losers @ ..] => losers
                .iter()
                .map(|loser| (loser.service.clone(), loser.claim.right, winner.service.clone()))
                .collect(),
            [] => Vec::new(),
        };
        self.put(Element::Front(at), steer.map(Value::Steer));
        self.place(at, placed, steer.is_some());
        for (loser, right, winner) in losers {
            let Right::External(origin) = right else { continue };
            let why = format!("service {winner} has it already");
            if let Some(message) = refusal(origin, at, &why) {
                self.tell(&loser, message, delta);
            }
        }
    }

    /// Brings the endpoints and sources of a front to what they should be.
    fn place(&mut self, at: Front, new: Placed, stays: bool) {
        let old = self.placed.remove(&at).unwrap_or_default();
        for slot in SLOTS {
            let (old, new) = (&old.targets[slot as usize], &new.targets[slot as usize]);
            for number in 0..old.len().max(new.len()) {
                let value = new.get(number);
                if old.get(number) != value {
                    let element = Element::Endpoint(at, slot, number as u32);
                    self.put(element, value.map(|target| Value::Target(*target)));
                }
            }
        }
        if let Front::Service(address, protocol, port) = at {
            let source = |range: &Cidr| Element::Source(address, protocol, port, *range);
            for range in old.sources.iter().filter(|range| !new.sources.contains(range)) {
                self.put(source(range), None);
            }
            for range in &new.sources {
                self.put(source(range), Some(Value::Member));
            }
        }
        if stays {
            self.placed.insert(at, new);
        }
    }

    fn tell(&mut self, service: &Key, message: String, delta: &mut Delta) {
        let told = self.told.entry(service.clone()).or_default();
        if told.len() >= MAX_REFUSALS || told.contains(&message) {
            return;
        }
        told.insert(message.clone());
        let facts = self.services.get(service).and_then(|entry| entry.facts.as_ref());
        delta
            .refusals
            .extend(facts.map(|facts| (facts.reference.clone(), message)));
    }

    /// Whose an address is, if it is not for services to choose.
    fn belongs_to(&self, address: IpAddr, port: u16) -> Option<String> {
        if let Some(owner) = self.owners.get(&address).and_then(|owners| owners.first()) {
            return Some(format!("it is the cluster IP of service {owner}"));
        }
        let within = |networks: &[Cidr]| networks.iter().any(|network| network.contains(address));
        if within(&self.networks.services) {
            return Some("it is in the service network".to_string());
        }
        if within(&self.networks.pods) {
            return Some("it is in the pod network".to_string());
        }
        if self.api_servers.contains(&(address, port)) {
            return Some("it is the API server's".to_string());
        }
        let link_local = match address {
            IpAddr::V4(address) => address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        if address.is_loopback() || address.is_unspecified() || link_local || address.is_multicast() {
            return Some("it is not an address that others reach".to_string());
        }
        None
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
