//! What NetworkPolicies say to one connection, rule by rule, and which of them say it: for `skiff net check`, which names
//! them, and for nodes whose kernel is not at hand. Pure, slow and plain; the kernel's tables come from `compile`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;

use super::Direction;
use super::objects::{Labels, NamespaceTerm, Peer, PodFacts, Policy, Rule};
use super::ports::PortSet;
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

/// Policies by `namespace/name`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Judgement {
    /// Those that select the pod in this direction. None: everything passes.
    pub selecting: Vec<String>,
    /// Those of them with a rule for the connection.
    pub allowing: Vec<String>,
}

impl Judgement {
    pub fn passes(&self) -> bool {
        self.selecting.is_empty() || !self.allowing.is_empty()
    }
}

/// `namespaces` are the labels of all; `port` is the destination's.
pub fn judge(
    policies: &[NetworkPolicy],
    namespaces: &BTreeMap<String, BTreeMap<String, String>>,
    direction: Direction,
    pod: &Party,
    peer: &Party,
    protocol: Protocol,
    port: u16,
) -> Judgement {
    let mut judgement = Judgement::default();
    let Some((namespace, facts)) = &pod.pod else {
        return judgement;
    };
    for policy in policies {
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
        let listener = match direction {
            Direction::Ingress => Some(facts),
            Direction::Egress => peer.pod.as_ref().map(|(_, facts)| facts),
        };
        let lets_pass = |rule: &Rule| {
            has_port(rule, listener, protocol, port)
                && rule
                    .peers
                    .as_ref()
                    .is_none_or(|peers| peers.iter().any(|term| is_peer(term, peer, namespaces)))
        };
        if rules.iter().any(lets_pass) {
            judgement.allowing.push(name.clone());
        }
        judgement.selecting.push(name);
    }
    judgement
}

fn has_port(rule: &Rule, listener: Option<&PodFacts>, protocol: Protocol, port: u16) -> bool {
    let contains = |set: &PortSet| match set {
        PortSet::All => true,
        PortSet::Ranges(ranges) => ranges
            .iter()
            .any(|range| range.protocol == protocol && range.first <= port && port <= range.last),
    };
    contains(&rule.ports) || listener.is_some_and(|facts| contains(&facts.resolve(&rule.named)))
}

fn is_peer(term: &Peer, peer: &Party, namespaces: &BTreeMap<String, BTreeMap<String, String>>) -> bool {
    match term {
        Peer::Nobody => false,
        Peer::Block { cidr, except } => {
            cidr.contains(peer.address) && !except.iter().any(|cidr| cidr.contains(peer.address))
        }
        Peer::Pods(term) => {
            let Some((namespace, facts)) = &peer.pod else {
                return false;
            };
            let in_namespace = match &term.namespaces {
                NamespaceTerm::Own(own) => own == namespace,
                NamespaceTerm::Selected(selector) => namespaces
                    .get(namespace)
                    .is_some_and(|labels| selector.matches(|key| labels.get(key).map(String::as_str))),
            };
            in_namespace && term.pods.matches(|key| facts.labels.get(key).map(String::as_str))
        }
    }
}

#[cfg(test)]
mod tests {
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
        let check = |direction, peer: &Party, port, selecting: &[&str], allowing: &[&str]| {
            let found = judge(&policies, &namespaces, direction, &web, peer, Protocol::Tcp, port);
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
        let open = judge(&policies, &namespaces, Ingress, &other, &web, Protocol::Tcp, 1);
        assert!(open.passes() && open.selecting.is_empty());
    }
}
