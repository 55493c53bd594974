//! The compiler against a plain model of what policies mean, over random worlds that change step by step; and what a
//! change costs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde_json::{Value, json};
use skiff_client::Key;

use super::{ACCEPTS, ALL_PORTS, Compiler, DENIES, Delta, Element, OPEN, UNDECIDED};
use crate::policy::Direction;
use crate::policy::objects::{NodeFacts, PodFacts, Policy};
use crate::policy::ports::PortBox;
use crate::policy::tiers::{TierKind, TierPolicy};

#[path = "../../../tests/policy/model.rs"]
#[allow(dead_code, reason = "the test with real connections uses the rest")]
mod model;

use model::{ModelPod, NAMESPACE_KEYS, POD_KEYS, Random, Side, World};

const NODES: [&str; 2] = ["here", "there"];
const NAMESPACES: [&str; 3] = ["one", "two", "three"];
const BLOCKS: [(&str, &str); 5] = [
    ("10.0.0.0/24", "10.0.0.0/28"),
    ("10.0.0.0/16", "10.0.0.8/29"),
    ("0.0.0.0/0", "10.0.0.0/8"),
    ("192.0.2.0/24", "192.0.2.7/32"),
    ("fd00::/64", "fd00::/125"),
];
const OUTSIDE: [&str; 3] = ["192.0.2.7", "192.0.2.8", "fd00::ffff"];
const PROTOCOLS: [(&str, u8); 4] = [("TCP", 6), ("UDP", 17), ("SCTP", 132), ("ICMP", 1)];
const PORTS: [u16; 5] = [80, 8080, 8081, 8082, 53];

/// The kernel: it has what it was sent, and looks packets up as the table's rules do.
#[derive(Default)]
struct Kernel(BTreeMap<Element, u32>);

impl Kernel {
    fn apply(&mut self, delta: &Delta) {
        for element in &delta.removed {
            assert!(self.0.remove(element).is_some(), "{element:?} is not there");
        }
        for (element, value) in &delta.added {
            assert!(self.0.insert(*element, *value).is_none(), "{element:?} is there");
        }
    }

    fn allows(&self, direction: Direction, own: IpAddr, other: IpAddr, protocol: u8, port: u16) -> bool {
        let ask = |class: &u32| self.ask(direction, *class, other, protocol, port);
        let decided = self.0.get(&Element::Admin(direction, own)).and_then(ask);
        if let Some(accepts) = decided {
            return accepts;
        }
        if let Some(class) = self.0.get(&Element::Baseline(direction, own)) {
            assert!(!self.0.contains_key(&Element::Isolated(direction, own)));
            return ask(class).unwrap_or(true);
        }
        let Some(isolation) = self.0.get(&Element::Isolated(direction, own)) else {
            return false;
        };
        if *isolation == OPEN {
            return true;
        }
        if own == other && self.0.contains_key(&Element::Own(own)) {
            return true;
        }
        let matching = |ports: &PortBox| ports.contains(protocol, port);
        let by_pod = match self.0.get(&Element::Allowed(direction, *isolation, other)) {
            None => false,
            Some(&ALL_PORTS) => true,
            Some(id) => {
                assert!(self.0.contains_key(&Element::Ports(*id)));
                let in_set = Element::Port(*id, PortBox::LEAST)..=Element::Port(*id, PortBox::GREATEST);
                let mut ports = self.0.range(in_set);
                ports.any(|(element, _)| matches!(element, Element::Port(_, ports) if matching(ports)))
            }
        };
        assert!(self.0.contains_key(&Element::Isolation(direction, *isolation)));
        let found = self.0.keys().filter(|element| match element {
            Element::AllowedBlock(d, i, first, last, ports) => {
                (d, i) == (&direction, isolation)
                    && first.is_ipv4() == other.is_ipv4()
                    && (*first..=*last).contains(&other)
                    && matching(ports)
            }
            _ => false,
        });
        let count = found.count();
        // The kernel's sets take none that overlap.
        assert!(count <= 1, "{own} {other} {protocol} {port}: {count} elements");
        by_pod || count > 0
    }
}

impl Kernel {
    /// What a class says, if it decides.
    fn ask(&self, direction: Direction, class: u32, other: IpAddr, protocol: u8, port: u16) -> Option<bool> {
        assert!(self.0.contains_key(&Element::Class(direction, class)));
        let one = |matching: Vec<u32>| {
            assert!(matching.len() <= 1, "{other} {protocol} {port}: {matching:?}");
            matching.first().copied()
        };
        let verdict = match self
            .0
            .get(&Element::PeerVerdict(direction, class, other))
            .copied()
        {
            Some(verdict @ (UNDECIDED | ACCEPTS | DENIES)) => Some(verdict),
            Some(decisions) => {
                assert!(self.0.contains_key(&Element::Decisions(decisions)));
                let matching = self.0.iter().filter_map(|(element, value)| match element {
                    Element::Decision(id, ports) if *id == decisions => {
                        ports.contains(protocol, port).then_some(*value)
                    }
                    _ => None,
                });
                one(matching.collect())
            }
            None => {
                let matching = self.0.iter().filter_map(|(element, value)| match element {
                    Element::RangeVerdict(way, id, first, last, ports)
                        if (*way, *id) == (direction, class) =>
                    {
                        let inside = first.is_ipv4() == other.is_ipv4() && *first <= other && other <= *last;
                        (inside && ports.contains(protocol, port)).then_some(*value)
                    }
                    _ => None,
                });
                one(matching.collect())
            }
        };
        match verdict {
            None | Some(UNDECIDED) => None,
            Some(verdict) => Some(verdict == ACCEPTS),
        }
    }
}

fn facts(pod: &ModelPod) -> Option<PodFacts> {
    PodFacts::of(&serde_json::from_value(pod.object()).unwrap())
}

fn key(object: &Value) -> Key {
    let meta = &object["metadata"];
    Key::new(
        meta["namespace"].as_str().unwrap(),
        meta["name"].as_str().unwrap(),
    )
}

fn policy(object: &Value) -> Policy {
    Policy::of(&serde_json::from_value(object.clone()).unwrap())
}

fn tier_policy(object: &Value) -> TierPolicy {
    let kind = match object["kind"].as_str().unwrap() {
        "ClusterNetworkPolicy" => TierKind::ClusterNetworkPolicy,
        "AdminNetworkPolicy" => TierKind::AdminNetworkPolicy,
        _ => TierKind::BaselineAdminNetworkPolicy,
    };
    let read = TierPolicy::of(
        kind,
        object["metadata"]["name"].as_str().unwrap(),
        &object["spec"],
    );
    assert!(read.problems.is_empty(), "{:?}\n{object:#}", read.problems);
    read
}

/// A world, and a compiler that is told of it.
struct Play {
    random: Random,
    world: World,
    compiler: Compiler,
    kernel: Kernel,
    made: u64,
}

impl Play {
    fn new(seed: u64) -> Play {
        let mut play = Play {
            random: Random::new(seed),
            world: World::default(),
            compiler: Compiler::new(NODES[0]),
            kernel: Kernel::default(),
            made: 0,
        };
        for namespace in NAMESPACES {
            play.label_namespace(namespace);
        }
        play.world.nodes = vec![Default::default(); OUTSIDE.len()];
        for node in 0..OUTSIDE.len() {
            play.label_node(node);
        }
        play
    }

    /// Nodes have addresses that are no pod's.
    fn label_node(&mut self, node: usize) {
        let labels = self.random.labels(&POD_KEYS);
        let addresses = vec![OUTSIDE[node].parse().unwrap()];
        self.world.nodes[node] = (labels.clone(), addresses.clone());
        let facts = NodeFacts { labels, addresses };
        self.compiler.set_node(&format!("node-{node}"), Some(facts));
    }

    fn tell_tiers(&mut self) {
        let policies = self.world.tiers.iter().map(tier_policy).collect();
        self.compiler.set_tier_policies(policies);
    }

    fn label_namespace(&mut self, namespace: &str) {
        let labels = self.random.labels(&NAMESPACE_KEYS);
        self.compiler.set_namespace(namespace, Some(labels.clone()));
        self.world.namespaces.insert(namespace.to_owned(), labels);
    }

    fn add_pod(&mut self) {
        self.made += 1;
        let free = |n: u8| {
            let address = IpAddr::from([10, 0, 0, n]);
            (!self.world.pods.iter().any(|pod| pod.addresses.contains(&address))).then_some(n)
        };
        let Some(n) = (2..30).find_map(free) else { return };
        let pod = ModelPod {
            namespace: self.random.pick(&NAMESPACES).to_owned(),
            name: format!("pod-{}", self.made),
            uid: format!("uid-{}", self.made),
            node: self.random.pick(&NODES).to_owned(),
            labels: self.random.labels(&POD_KEYS),
            addresses: vec![
                IpAddr::from([10, 0, 0, n]),
                format!("fd00::{n:x}").parse().unwrap(),
            ],
            ports: vec![
                ("web".into(), "TCP".into(), 8080 + self.random.below(2) as u16),
                ("alt".into(), "UDP".into(), 8080),
            ],
        };
        self.tell(&pod, true);
        self.world.pods.push(pod);
    }

    fn tell(&mut self, pod: &ModelPod, present: bool) {
        let key = Key::new(&pod.namespace, &pod.name);
        self.compiler.set_pod(&key, facts(pod).filter(|_| present));
    }

    fn change(&mut self) {
        match self.random.below(12) {
            8 if !self.world.tiers.is_empty() => {
                let gone = self.random.below(self.world.tiers.len());
                self.world.tiers.swap_remove(gone);
                self.tell_tiers();
            }
            9 | 10 => {
                let name = format!("tier-{}", self.random.below(5));
                let object = self.random.tier_policy(&name, &BLOCKS);
                let same = |other: &Value| {
                    ["kind", "metadata"]
                        .iter()
                        .all(|part| other[*part] == object[*part])
                };
                self.world.tiers.retain(|present| !same(present));
                self.world.tiers.push(object);
                self.tell_tiers();
            }
            11 => {
                let node = self.random.below(OUTSIDE.len());
                self.label_node(node);
            }
            0 | 1 => self.add_pod(),
            2 if !self.world.pods.is_empty() => {
                let gone = self.random.below(self.world.pods.len());
                let pod = self.world.pods.swap_remove(gone);
                self.tell(&pod, false);
            }
            3 if !self.world.pods.is_empty() => {
                let changed = self.random.below(self.world.pods.len());
                self.world.pods[changed].labels = self.random.labels(&POD_KEYS);
                let pod = self.world.pods[changed].clone();
                self.tell(&pod, true);
            }
            4 => {
                let namespace = self.random.pick(&NAMESPACES);
                self.label_namespace(namespace);
            }
            5 if !self.world.policies.is_empty() => {
                let gone = self.random.below(self.world.policies.len());
                let object = self.world.policies.swap_remove(gone);
                self.compiler.set_policy(&key(&object), None);
            }
            _ => {
                let name = format!("policy-{}", self.random.below(6));
                let namespace = self.random.pick(&NAMESPACES);
                let object = self.random.policy(namespace, &name, &BLOCKS);
                self.world.policies.retain(|present| key(present) != key(&object));
                self.compiler.set_policy(&key(&object), Some(policy(&object)));
                self.world.policies.push(object);
            }
        }
    }

    fn compile(&mut self) {
        let delta = self.compiler.compile();
        self.kernel.apply(&delta);
        let wanted: BTreeMap<Element, u32> = self.compiler.elements().collect();
        assert_eq!(self.kernel.0, wanted);
    }

    fn check(&self) {
        let outside = OUTSIDE.map(|address| Side {
            address: address.parse().unwrap(),
            pod: None,
        });
        let sides: Vec<Side<'_>> = self
            .world
            .pods
            .iter()
            .flat_map(|pod| {
                pod.addresses.iter().map(move |address| Side {
                    address: *address,
                    pod: Some(pod),
                })
            })
            .chain(outside)
            .collect();
        for own in sides
            .iter()
            .filter(|side| side.pod.is_some_and(|pod| pod.node == NODES[0]))
        {
            for other in sides
                .iter()
                .filter(|side| side.address.is_ipv4() == own.address.is_ipv4())
            {
                for ((protocol, number), port) in PROTOCOLS.iter().flat_map(|p| PORTS.map(|port| (p, port))) {
                    for direction in Direction::BOTH {
                        let ingress = direction == Direction::Ingress;
                        let expected = self.world.allows_half(ingress, *own, *other, protocol, port);
                        let got = self
                            .kernel
                            .allows(direction, own.address, other.address, *number, port);
                        assert_eq!(
                            got, expected,
                            "{direction:?} of {own:?} with {other:?}: {protocol} {port}\n{:#?}",
                            self.world
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn verdicts_are_those_of_the_model_whatever_changes() {
    for seed in 0..12 {
        let mut play = Play::new(seed);
        for _ in 0..6 {
            play.add_pod();
        }
        for round in 0..25 {
            for _ in 0..=play.random.below(3) {
                play.change();
            }
            play.compile();
            if round % 3 == 0 || round == 24 {
                play.check();
            }
        }
        // The end of everything leaves nothing behind.
        for pod in std::mem::take(&mut play.world.pods) {
            play.tell(&pod, false);
        }
        play.compile();
        assert_eq!(play.kernel.0, BTreeMap::new());
        assert_eq!(play.compiler.counts(), (0, 0));
    }
}

fn pod(namespace: &str, number: usize, node: &str, labels: &[(&str, &str)]) -> ModelPod {
    let address = IpAddr::from([10, 1, (number / 250) as u8, (number % 250 + 1) as u8]);
    ModelPod {
        namespace: namespace.to_owned(),
        name: format!("pod-{number}"),
        uid: format!("uid-{number}"),
        node: node.to_owned(),
        labels: labels
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
        addresses: vec![address],
        ports: Vec::new(),
    }
}

fn tell(compiler: &mut Compiler, pod: &ModelPod) {
    compiler.set_pod(&Key::new(&pod.namespace, &pod.name), facts(pod));
}

fn allow_from(name: &str, label: &str, port: u16) -> Value {
    json!({"metadata": {"namespace": "one", "name": name}, "spec": {
        "podSelector": {"matchLabels": {"app": label}},
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": label}}}], "ports": [{"port": port}]}]}})
}

/// A thousand policies over a thousand pods: a pod like others is one element a map, and nothing grows with both.
#[test]
fn a_pod_costs_what_it_changes() {
    let mut compiler = Compiler::new("here");
    compiler.set_namespace("one", Some(Default::default()));
    for number in 0..1000 {
        let object = allow_from(
            &format!("p{number}"),
            &format!("app-{}", number % 100),
            1000 + number as u16,
        );
        compiler.set_policy(&key(&object), Some(policy(&object)));
    }
    for number in 0..1000 {
        let app = format!("app-{}", number % 100);
        let node = if number < 200 { "here" } else { "there" };
        tell(&mut compiler, &pod("one", number, node, &[("app", &app)]));
    }
    compiler.compile();
    assert_eq!(compiler.counts(), (100, 100));
    // Of 200 local pods two maps and a set; of all pods one entry with their kind; a chain for each kind, and a port
    // set with ten ports.
    assert_eq!(compiler.elements().count(), 200 * 3 + 1000 + 100 + 100 * 11);
    let there = pod("one", 1000, "there", &[("app", "app-7")]);
    tell(&mut compiler, &there);
    assert_eq!(compiler.compile().added.len(), 1);
    tell(&mut compiler, &pod("one", 1001, "here", &[("app", "app-7")]));
    assert_eq!(compiler.compile().added.len(), 4);
    compiler.set_pod(&Key::new("one", "pod-1000"), None);
    let gone = compiler.compile();
    assert_eq!((gone.removed.len(), gone.added.len()), (1, 0));
    // What nobody selects costs nothing.
    tell(&mut compiler, &pod("one", 1002, "there", &[("app", "stranger")]));
    assert!(compiler.compile().is_empty());
    // One policy that changes: the pods that it selects, and what it says.
    let object = allow_from("p7", "app-7", 9999);
    compiler.set_policy(&key(&object), Some(policy(&object)));
    let changed = compiler.compile();
    assert!(changed.added.len() < 40, "{:#?}", changed.added);
}

#[test]
fn an_address_goes_with_who_has_it_now() {
    let mut compiler = Compiler::new("here");
    compiler.set_namespace("one", Some(Default::default()));
    let closed = json!({"metadata": {"namespace": "one", "name": "closed"},
        "spec": {"podSelector": {"matchLabels": {"app": "closed"}}}});
    compiler.set_policy(&key(&closed), Some(policy(&closed)));
    let mut one = pod("one", 1, "here", &[("app", "closed")]);
    let address = one.addresses[0];
    one.addresses.clear();
    tell(&mut compiler, &one);
    let isolation = |compiler: &Compiler| {
        let found = compiler
            .elements()
            .find(|(e, _)| *e == Element::Isolated(Direction::Ingress, address));
        found.map(|(_, value)| value == OPEN)
    };
    compiler.compile();
    assert_eq!(isolation(&compiler), None, "an address that nobody has");
    // The plugin is ahead of the status.
    let key = Key::new("one", &one.name);
    assert!(compiler.knows(&key, "uid-1") && !compiler.knows(&key, "uid-2"));
    // Administrators select by the namespace's labels: without them nobody can say what is in force.
    compiler.set_namespace("one", None);
    assert!(!compiler.knows(&key, "uid-1"));
    compiler.set_namespace("one", Some(Default::default()));
    compiler.attach(&key, "uid-1", vec![address]);
    compiler.compile();
    assert_eq!(isolation(&compiler), Some(false));
    // Another pod gets the address, while the status of the first still shows it.
    one.addresses = vec![address];
    tell(&mut compiler, &one);
    let mut two = pod("one", 2, "here", &[]);
    two.addresses.clear();
    tell(&mut compiler, &two);
    compiler.attach(&Key::new("one", &two.name), "uid-2", vec![address]);
    compiler.compile();
    assert_eq!(isolation(&compiler), Some(true));
    // Nobody elsewhere can claim it.
    let mut thief = pod("one", 3, "there", &[("app", "closed")]);
    thief.addresses = vec![address];
    tell(&mut compiler, &thief);
    compiler.compile();
    assert_eq!(isolation(&compiler), Some(true));
    // A new pod of the same name is another one.
    two.uid = "uid-4".into();
    tell(&mut compiler, &two);
    compiler.set_pod(&Key::new("one", &thief.name), None);
    compiler.compile();
    assert_eq!(isolation(&compiler), None);
}

#[test]
fn cluster_dns_is_found_where_upstream_has_its_pods() {
    let node = json!({"metadata": {"name": "here", "annotations": {"skiff.io/cluster-dns": "x"}}, "spec": {"podCIDRs": ["10.1.0.0/24"]}});
    let dns = PodFacts::dns_of(&serde_json::from_value(node).unwrap());
    let gateway: IpAddr = "10.1.0.1".parse().unwrap();
    let ports_of = |rule: Value| -> BTreeSet<PortBox> {
        let mut compiler = Compiler::new("here");
        let labels = [("kubernetes.io/metadata.name".to_owned(), "kube-system".to_owned())];
        compiler.set_namespace("kube-system", Some(labels.into()));
        compiler.set_pod(&Key::new("kube-system", "node/here"), dns.clone());
        tell(&mut compiler, &pod("one", 1, "here", &[]));
        let object = json!({"metadata": {"namespace": "one", "name": "p"}, "spec": {
            "podSelector": {}, "policyTypes": ["Ingress", "Egress"], "egress": [rule], "ingress": [{"from": rule["to"]}]}});
        compiler.set_policy(&key(&object), Some(policy(&object)));
        compiler.compile();
        assert!(compiler.elements().all(|(e, _)| e != Element::Own(gateway)));
        let allowed = compiler.elements().find_map(|(element, ports)| match element {
            Element::Allowed(direction, _, address) if address == gateway => {
                assert_eq!(direction, Direction::Egress, "it opens no connections");
                Some(ports)
            }
            _ => None,
        });
        let ports = compiler.elements().filter_map(|(element, _)| match element {
            Element::Port(id, ports) if Some(id) == allowed => Some(ports),
            _ => None,
        });
        ports.collect()
    };
    let to = json!([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}]);
    let port_53 = |protocol| PortBox {
        protocols: (protocol, protocol),
        ports: (53, 53),
    };
    assert_eq!(
        ports_of(json!({"to": to})),
        BTreeSet::from([port_53(6), port_53(17)])
    );
    assert_eq!(
        ports_of(json!({"to": to, "ports": [{"protocol": "UDP", "port": "dns"}]})),
        BTreeSet::from([port_53(17)])
    );
    assert_eq!(
        ports_of(json!({"to": to, "ports": [{"port": 10250}]})),
        BTreeSet::new()
    );
    assert_eq!(ports_of(json!({"to": [{"podSelector": {}}]})), BTreeSet::new());
}
