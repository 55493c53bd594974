//! What policies say to one connection, tier by tier and rule by rule, and which of them say it: for `skiff net check`,
//! which names them, and for nodes whose kernel is not at hand. Pure, slow and plain; the kernel's tables come from
//! `compile`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;

use super::Direction;
use super::objects::{Labels, NamedPort, NamespaceTerm, NodeFacts, Peer, PodFacts, PodTerm, Policy, Rule};
use super::ports::PortSet;
use super::tiers::{Action, Tier, TierPeer, TierPolicy, TierRule};
use crate::proxy::Protocol;

/// One end of a connection.
#[derive(Debug, Clone)]
pub struct Party {
    address: IpAddr,
    /// Its namespace and what policies see of it, if it is a pod.
    pod: Option<(String, PodFacts)>,
}

impl Party {
    /// A pod, by one of its addresses.
    pub fn pod(pod: &Pod, address: IpAddr) -> Party {
        let facts = serde_json::to_value(pod).and_then(serde_json::from_value);
        let facts = facts.ok().and_then(|pod| PodFacts::of(&pod));
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        Party {
            address,
            pod: facts.map(|facts| (namespace, facts)),
        }
    }

    /// Cluster DNS, where policies find it.
    pub fn dns(address: IpAddr) -> Party {
        let port = crate::dns_endpoints::PORT;
        let facts = PodFacts {
            labels: Labels::from([("k8s-app".to_owned(), crate::dns_endpoints::SERVICE.to_owned())]),
            addresses: vec![address],
            ports: vec![
                ("dns".to_owned(), Protocol::Udp, port),
                ("dns-tcp".to_owned(), Protocol::Tcp, port),
            ],
            is_dns: true,
            ..PodFacts::default()
        };
        Party {
            address,
            pod: Some(("kube-system".to_owned(), facts)),
        }
    }

    /// Somebody outside of the cluster, or a node.
    pub fn stranger(address: IpAddr) -> Party {
        Party { address, pod: None }
    }
}

/// All that decides about connections.
#[derive(Debug, Default)]
pub struct Rulebook {
    pub policies: Vec<NetworkPolicy>,
    /// In whatever order.
    pub tiers: Vec<TierPolicy>,
    pub nodes: Vec<Node>,
    /// The labels of all.
    pub namespaces: BTreeMap<String, BTreeMap<String, String>>,
}

/// A rule of an administrator that decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierVerdict {
    pub tier: Tier,
    pub accepts: bool,
    /// Kind and name of the policy, and the rule.
    pub rule: String,
}

/// NetworkPolicies by `namespace/name`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Judgement {
    /// The rule of either tier that has the last word, if one has it.
    pub tier: Option<TierVerdict>,
    /// Those that select the pod in this direction. None: everything passes.
    pub selecting: Vec<String>,
    /// Those of them with a rule for the connection.
    pub allowing: Vec<String>,
    /// It is the pod itself, by way of a service: NetworkPolicies are not about that.
    pub is_itself: bool,
}

impl Judgement {
    pub fn passes(&self) -> bool {
        match &self.tier {
            Some(verdict) => verdict.accepts,
            None => self.selecting.is_empty() || !self.allowing.is_empty() || self.is_itself,
        }
    }
}

impl Rulebook {
    /// What becomes of a connection of `pod` in this direction; `port` is the destination's.
    pub fn judge(
        &self,
        direction: Direction,
        pod: &Party,
        peer: &Party,
        protocol: Protocol,
        port: u16,
    ) -> Judgement {
        let mut judgement = Judgement {
            is_itself: pod.address == peer.address,
            ..Judgement::default()
        };
        let Some((namespace, facts)) = &pod.pod else {
            return judgement;
        };
        judgement.tier = self.judge_tier(Tier::Admin, direction, pod, peer, protocol, port);
        if judgement.tier.is_some() {
            return judgement;
        }
        for policy in &self.policies {
            let meta = &policy.metadata;
            if meta.namespace.as_ref() != Some(namespace) {
                continue;
            }
            let read = Policy::of(policy);
            let selected = read.pods.matches(|key| facts.labels.get(key).map(String::as_str));
            let Some(rules) = read.rules(direction).filter(|_| selected) else {
                continue;
            };
            let name = format!("{namespace}/{}", meta.name.as_deref().unwrap_or_default());
            let listener = listener(direction, facts, peer);
            let lets_pass = |rule: &Rule| {
                has_port(&rule.ports, &rule.named, listener, protocol, port)
                    && rule
                        .peers
                        .as_ref()
                        .is_none_or(|peers| peers.iter().any(|term| self.is_peer(term, peer)))
            };
            if rules.iter().any(lets_pass) {
                judgement.allowing.push(name.clone());
            }
            judgement.selecting.push(name);
        }
        if judgement.selecting.is_empty() {
            judgement.tier = self.judge_tier(Tier::Baseline, direction, pod, peer, protocol, port);
        }
        judgement
    }

    /// The rule of a tier that accepts or denies; `None` where none matches, or one passes on.
    fn judge_tier(
        &self,
        tier: Tier,
        direction: Direction,
        pod: &Party,
        peer: &Party,
        protocol: Protocol,
        port: u16,
    ) -> Option<TierVerdict> {
        let (namespace, facts) = pod.pod.as_ref()?;
        let mut policies: Vec<&TierPolicy> = self.tiers.iter().filter(|policy| policy.tier == tier).collect();
        policies.sort_by_key(|policy| policy.order());
        let matching = |rule: &TierRule| {
            let listener = listener(direction, facts, peer);
            let is_about = has_port(&rule.ports, &rule.named, listener, protocol, port);
            is_about && rule.peers.iter().any(|term| self.is_tier_peer(term, peer))
        };
        let selecting = policies
            .into_iter()
            .filter(|policy| self.names(&policy.subject, namespace, facts));
        let (policy, rule) = selecting
            .flat_map(|policy| policy.rules(direction).iter().map(move |rule| (policy, rule)))
            .find(|(_, rule)| matching(rule))?;
        let accepts = match rule.action {
            Action::Accept => true,
            Action::Deny => false,
            Action::Pass => return None,
        };
        Some(TierVerdict {
            tier,
            accepts,
            rule: format!("{}, {}", policy.shown(), rule.name),
        })
    }

    fn is_tier_peer(&self, term: &TierPeer, peer: &Party) -> bool {
        match term {
            TierPeer::Network(cidr) => cidr.contains(peer.address),
            TierPeer::Nodes(selector) => self.nodes.iter().map(NodeFacts::of).any(|node| {
                node.addresses.contains(&peer.address)
                    && selector.matches(|key| node.labels.get(key).map(String::as_str))
            }),
            TierPeer::Pods(term) => peer
                .pod
                .as_ref()
                .is_some_and(|(namespace, facts)| self.names(term, namespace, facts)),
        }
    }

    fn is_peer(&self, term: &Peer, peer: &Party) -> bool {
        match term {
            Peer::Nobody => false,
            Peer::Block { cidr, except } => {
                cidr.contains(peer.address) && !except.iter().any(|cidr| cidr.contains(peer.address))
            }
            Peer::Pods(term) => peer
                .pod
                .as_ref()
                .is_some_and(|(namespace, facts)| self.names(term, namespace, facts)),
        }
    }

    fn names(&self, term: &PodTerm, namespace: &str, facts: &PodFacts) -> bool {
        let in_namespace = match &term.namespaces {
            NamespaceTerm::Own(own) => own == namespace,
            NamespaceTerm::Selected(selector) => self
                .namespaces
                .get(namespace)
                .is_some_and(|labels| selector.matches(|key| labels.get(key).map(String::as_str))),
        };
        in_namespace && term.pods.matches(|key| facts.labels.get(key).map(String::as_str))
    }
}

/// The pod that is connected to: names of ports are its own.
fn listener<'a>(direction: Direction, own: &'a PodFacts, peer: &'a Party) -> Option<&'a PodFacts> {
    match direction {
        Direction::Ingress => Some(own),
        Direction::Egress => peer.pod.as_ref().map(|(_, facts)| facts),
    }
}

fn has_port(
    ports: &PortSet,
    named: &[NamedPort],
    listener: Option<&PodFacts>,
    protocol: Protocol,
    port: u16,
) -> bool {
    let contains = |set: &PortSet| match set {
        PortSet::All => true,
        PortSet::Ranges(ranges) => ranges
            .iter()
            .any(|range| range.protocol == protocol && range.first <= port && port <= range.last),
    };
    contains(ports) || listener.is_some_and(|facts| contains(&facts.resolve(named)))
}

#[cfg(test)]
mod tests {
    use super::super::tiers::TierKind;
    use super::*;
    use serde_json::{Value, json};

    fn policy(name: &str, spec: Value) -> NetworkPolicy {
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "a"}, "spec": spec})).unwrap()
    }

    fn party(namespace: &str, app: &str, address: &str) -> Party {
        let pod = json!({"metadata": {"name": app, "namespace": namespace, "labels": {"app": app}},
            "spec": {"containers": [{"name": "c", "ports": [{"name": "web", "containerPort": 8080}]}]},
            "status": {"phase": "Running", "podIPs": [{"ip": address}]}});
        Party::pod(&serde_json::from_value(pod).unwrap(), address.parse().unwrap())
    }

    #[test]
    fn who_stops_a_connection_is_named() {
        let policies = [
            policy("deny", json!({"podSelector": {}})),
            policy(
                "web",
                json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{
                "from": [{"namespaceSelector": {"matchLabels": {"team": "x"}}}], "ports": [{"port": "web"}]}]}),
            ),
            policy(
                "out",
                json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Egress"],
                "egress": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.9/32"]}}]}]}),
            ),
        ];
        let namespaces = BTreeMap::from([
            (
                "b".to_owned(),
                BTreeMap::from([("team".to_owned(), "x".to_owned())]),
            ),
            ("c".to_owned(), BTreeMap::new()),
        ]);
        let web = party("a", "web", "10.0.0.1");
        let rules = Rulebook {
            policies: policies.to_vec(),
            namespaces,
            ..Rulebook::default()
        };
        let check = |direction, peer: &Party, port, selecting: &[&str], allowing: &[&str]| {
            let found = rules.judge(direction, &web, peer, Protocol::Tcp, port);
            assert_eq!(found.selecting, selecting);
            assert_eq!(found.allowing, allowing);
        };
        use Direction::{Egress, Ingress};
        let both = &["a/deny", "a/web"][..];
        check(Ingress, &party("b", "x", "10.0.0.2"), 8080, both, &["a/web"]);
        check(Ingress, &party("b", "x", "10.0.0.2"), 8081, both, &[]);
        check(Ingress, &party("c", "x", "10.0.0.3"), 8080, both, &[]);
        let stranger = |address: &str| Party::stranger(address.parse().unwrap());
        check(Egress, &stranger("192.0.2.1"), 443, &["a/out"], &["a/out"]);
        check(Egress, &stranger("192.0.2.9"), 443, &["a/out"], &[]);
        let other = party("b", "x", "10.0.0.2");
        let open = rules.judge(Ingress, &other, &web, Protocol::Tcp, 1);
        assert!(open.passes() && open.selecting.is_empty());
        let itself = rules.judge(Ingress, &web, &web, Protocol::Tcp, 1);
        assert!(itself.passes() && !itself.selecting.is_empty());
    }

    #[test]
    fn who_decides_before_and_after_network_policies_is_named() {
        let tier = |name: &str, tier: &str, priority: u32, egress: Value| {
            let spec =
                json!({"tier": tier, "priority": priority, "subject": {"namespaces": {}}, "egress": egress});
            TierPolicy::of(TierKind::ClusterNetworkPolicy, name, &spec)
        };
        let to = |action: &str, network: &str| json!([{"name": "r", "action": action, "to": [{"networks": [network]}]}]);
        let node = json!({"metadata": {"name": "n", "labels": {"a": "b"}},
            "status": {"addresses": [{"type": "Hostname", "address": "n"}, {"type": "InternalIP", "address": "198.51.100.1"}]}});
        let mut rules = Rulebook {
            tiers: vec![
                tier("floor", "Baseline", 1, to("Deny", "192.0.2.0/24")),
                tier("late", "Admin", 9, to("Deny", "0.0.0.0/0")),
                tier("pass", "Admin", 8, to("Pass", "192.0.2.0/24")),
                tier(
                    "nodes",
                    "Admin",
                    7,
                    json!([{"action": "Accept", "to": [{"nodes": {"matchLabels": {"a": "b"}}}]}]),
                ),
            ],
            nodes: vec![serde_json::from_value(node).unwrap()],
            namespaces: BTreeMap::from([("a".to_owned(), BTreeMap::new())]),
            ..Rulebook::default()
        };
        let check = |rules: &Rulebook, to: &str, expected: Option<(bool, &str)>| {
            let (web, peer) = (
                party("a", "web", "10.0.0.1"),
                Party::stranger(to.parse().unwrap()),
            );
            let found = rules.judge(Direction::Egress, &web, &peer, Protocol::Tcp, 80);
            let got = found
                .tier
                .as_ref()
                .map(|verdict| (verdict.accepts, verdict.rule.as_str()));
            assert_eq!(got, expected, "{to}");
            assert_eq!(
                found.passes(),
                expected.is_none_or(|(accepts, _)| accepts),
                "{to}"
            );
        };
        check(
            &rules,
            "203.0.113.1",
            Some((false, "ClusterNetworkPolicy late, egress[0] \"r\"")),
        );
        check(
            &rules,
            "192.0.2.1",
            Some((false, "ClusterNetworkPolicy floor, egress[0] \"r\"")),
        );
        check(
            &rules,
            "198.51.100.1",
            Some((true, "ClusterNetworkPolicy nodes, egress[0]")),
        );
        check(&rules, "2001:db8::1", None);
        rules.policies = vec![policy(
            "all",
            json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]}),
        )];
        check(&rules, "192.0.2.1", None);
    }
}
