//! What policies need to know of the API's objects, and how it is read. No I/O.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector as ApiSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::Resource;
use serde::Deserialize;
use skiff_meta::net::Cidr;
use skiff_meta::selector::LabelSelector;

use super::Direction;
use super::ports::{PortRange, PortSet};
use crate::dns_endpoints;
use crate::pods::DNS_ANNOTATION;
use crate::proxy::Protocol;

pub(super) type Labels = BTreeMap<String, String>;

/// The parts of a pod that are looked at: every node follows the pods of all nodes.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct PolicyPod {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: PolicyPodSpec,
    #[serde(default)]
    status: PolicyPodStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PolicyPodSpec {
    #[serde(default)]
    node_name: String,
    #[serde(default)]
    host_network: bool,
    #[serde(default)]
    containers: Vec<PolicyContainer>,
    #[serde(default)]
    init_containers: Vec<PolicyContainer>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PolicyContainer {
    #[serde(default)]
    restart_policy: Option<String>,
    #[serde(default)]
    ports: Vec<PolicyContainerPort>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PolicyContainerPort {
    #[serde(default)]
    name: String,
    #[serde(default)]
    protocol: Option<String>,
    container_port: i32,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PolicyPodStatus {
    #[serde(default)]
    phase: String,
    #[serde(default, rename = "podIPs")]
    pod_ips: Vec<PolicyPodIp>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct PolicyPodIp {
    #[serde(default)]
    ip: String,
}

impl Resource for PolicyPod {
    type DynamicType = ();
    type Scope = k8s_openapi::NamespaceResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        Pod::kind(&())
    }
    fn group(_: &()) -> Cow<'_, str> {
        Pod::group(&())
    }
    fn version(_: &()) -> Cow<'_, str> {
        Pod::version(&())
    }
    fn plural(_: &()) -> Cow<'_, str> {
        Pod::plural(&())
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// A pod as policies see it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PodFacts {
    pub(super) uid: String,
    pub(super) labels: Labels,
    pub(super) node: String,
    /// As its status has them.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) ports: Vec<(String, Protocol, u16)>,
    /// An instance of cluster DNS. It is no pod here, but policies find it where upstream has one.
    pub(super) is_dns: bool,
}

impl PodFacts {
    /// `None` for a pod that has no address of its own, or none any more: policies neither select it nor find it.
    pub(super) fn of(pod: &PolicyPod) -> Option<PodFacts> {
        let (spec, status) = (&pod.spec, &pod.status);
        if spec.host_network || matches!(status.phase.as_str(), "Succeeded" | "Failed") {
            return None;
        }
        let sidecars = spec
            .init_containers
            .iter()
            .filter(|container| container.restart_policy.as_deref() == Some("Always"));
        let named = spec
            .containers
            .iter()
            .chain(sidecars)
            .flat_map(|container| &container.ports)
            .filter(|port| !port.name.is_empty())
            .filter_map(|port| {
                let number = u16::try_from(port.container_port).ok()?;
                Some((port.name.clone(), protocol(port.protocol.as_deref())?, number))
            });
        Some(PodFacts {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            node: spec.node_name.clone(),
            addresses: status
                .pod_ips
                .iter()
                .filter_map(|ip| ip.ip.parse().ok())
                .collect(),
            ports: named.collect(),
            is_dns: false,
        })
    }

    /// Cluster DNS of a node, which answers on the gateways of its pods; `None` for a node that has none.
    pub(super) fn dns_of(node: &Node) -> Option<PodFacts> {
        node.metadata.annotations.as_ref()?.get(DNS_ANNOTATION)?;
        let cidrs = node.spec.as_ref()?.pod_cidrs.as_ref()?;
        let gateway = |cidr: &String| cidr.parse::<Cidr>().ok()?.nth(1);
        Some(PodFacts {
            labels: Labels::from([("k8s-app".to_owned(), dns_endpoints::SERVICE.to_owned())]),
            addresses: cidrs.iter().filter_map(gateway).collect(),
            ports: vec![
                ("dns".to_owned(), Protocol::Udp, dns_endpoints::PORT),
                ("dns-tcp".to_owned(), Protocol::Tcp, dns_endpoints::PORT),
            ],
            is_dns: true,
            ..PodFacts::default()
        })
    }

    /// The ports that the pod has under these names.
    pub(super) fn resolve(&self, named: &[NamedPort]) -> PortSet {
        let numbers = |wanted: &NamedPort| {
            let (wanted_protocol, wanted_name) = wanted.clone();
            self.ports
                .iter()
                .filter(move |(name, protocol, _)| *name == wanted_name && *protocol == wanted_protocol)
                .map(|(_, protocol, number)| PortRange::one(*protocol, *number))
        };
        named.iter().flat_map(numbers).collect()
    }
}

/// A node as policies of administrators see it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NodeFacts {
    pub(super) labels: Labels,
    /// As its status has them.
    pub(super) addresses: Vec<IpAddr>,
}

impl NodeFacts {
    pub(super) fn of(node: &Node) -> NodeFacts {
        let status = node.status.iter();
        let addresses = status.flat_map(|status| status.addresses.iter().flatten());
        NodeFacts {
            labels: node.metadata.labels.clone().unwrap_or_default(),
            addresses: addresses.filter_map(|entry| entry.address.parse().ok()).collect(),
        }
    }
}

pub(super) type NamedPort = (Protocol, String);

/// A NetworkPolicy. A direction without rules (`None`) is not its business; one with an empty list is closed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Policy {
    pub(super) pods: LabelSelector,
    pub(super) ingress: Option<Vec<Rule>>,
    pub(super) egress: Option<Vec<Rule>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    /// `None`: everybody.
    pub(super) peers: Option<Vec<Peer>>,
    pub(super) ports: PortSet,
    pub(super) named: Vec<NamedPort>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Peer {
    Pods(PodTerm),
    Block {
        cidr: Cidr,
        except: Vec<Cidr>,
    },
    /// What cannot be read lets nobody in.
    Nobody,
}

/// Pods that a rule names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodTerm {
    pub(super) namespaces: NamespaceTerm,
    pub(super) pods: LabelSelector,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NamespaceTerm {
    /// The policy's own.
    Own(String),
    Selected(LabelSelector),
}

impl Policy {
    pub(super) fn of(policy: &NetworkPolicy) -> Policy {
        let namespace = policy.metadata.namespace.clone().unwrap_or_default();
        let spec = policy.spec.clone().unwrap_or_default();
        let types = spec.policy_types.unwrap_or_default();
        // Without types a policy is about ingress, and about egress if it has such rules.
        let is_about = |direction: &str, by_default: bool| match types.is_empty() {
            true => by_default,
            false => types.iter().any(|kind| kind == direction),
        };
        let egress_by_default = spec.egress.as_ref().is_some_and(|rules| !rules.is_empty());
        let ingress = is_about("Ingress", true).then(|| {
            let rules = spec.ingress.unwrap_or_default().into_iter();
            rules
                .map(|rule| Rule::of(&namespace, rule.from, rule.ports))
                .collect()
        });
        let egress = is_about("Egress", egress_by_default).then(|| {
            let rules = spec.egress.unwrap_or_default().into_iter();
            rules
                .map(|rule| Rule::of(&namespace, rule.to, rule.ports))
                .collect()
        });
        Policy {
            // One that cannot be read selects all pods: it must not open anything.
            pods: spec
                .pod_selector
                .as_ref()
                .map_or_else(LabelSelector::everything, |pods| {
                    selector(pods).unwrap_or_else(LabelSelector::everything)
                }),
            ingress,
            egress,
        }
    }

    pub(super) fn rules(&self, direction: Direction) -> Option<&Vec<Rule>> {
        match direction {
            Direction::Ingress => self.ingress.as_ref(),
            Direction::Egress => self.egress.as_ref(),
        }
    }
}

impl Rule {
    fn of(
        namespace: &str,
        peers: Option<Vec<NetworkPolicyPeer>>,
        ports: Option<Vec<NetworkPolicyPort>>,
    ) -> Rule {
        let peers = peers.filter(|peers| !peers.is_empty());
        let peers = peers.map(|peers| peers.iter().map(|peer| Peer::of(namespace, peer)).collect());
        let Some(ports) = ports.filter(|ports| !ports.is_empty()) else {
            return Rule {
                peers,
                ports: PortSet::All,
                named: Vec::new(),
            };
        };
        let mut numbers = Vec::new();
        let mut named: Vec<NamedPort> = Vec::new();
        for port in ports {
            let Some(protocol) = protocol(port.protocol.as_deref()) else {
                continue;
            };
            match port.port {
                None => numbers.push(PortRange {
                    protocol,
                    first: 0,
                    last: u16::MAX,
                }),
                Some(IntOrString::Int(first)) => {
                    let last = port.end_port.unwrap_or(first);
                    if let (Ok(first), Ok(last)) = (u16::try_from(first), u16::try_from(last))
                        && first <= last
                    {
                        numbers.push(PortRange {
                            protocol,
                            first,
                            last,
                        });
                    }
                }
                Some(IntOrString::String(name)) => named.push((protocol, name)),
            }
        }
        named.sort();
        named.dedup();
        Rule {
            peers,
            ports: numbers.into_iter().collect(),
            named,
        }
    }
}

impl Peer {
    fn of(namespace: &str, peer: &NetworkPolicyPeer) -> Peer {
        if let Some(block) = &peer.ip_block {
            let cidr = block.cidr.parse();
            let except: Result<Vec<Cidr>, _> =
                block.except.iter().flatten().map(|cidr| cidr.parse()).collect();
            return match (cidr, except) {
                (Ok(cidr), Ok(except)) => Peer::Block { cidr, except },
                _ => Peer::Nobody,
            };
        }
        let pods = match &peer.pod_selector {
            Some(pods) => selector(pods),
            None => Some(LabelSelector::everything()),
        };
        let namespaces = match &peer.namespace_selector {
            Some(namespaces) => selector(namespaces).map(NamespaceTerm::Selected),
            None => Some(NamespaceTerm::Own(namespace.to_owned())),
        };
        match (namespaces, pods) {
            (Some(namespaces), Some(pods)) => Peer::Pods(PodTerm { namespaces, pods }),
            _ => Peer::Nobody,
        }
    }
}

fn selector(selector: &ApiSelector) -> Option<LabelSelector> {
    let value = serde_json::to_value(selector).ok()?;
    LabelSelector::from_value(&value).ok()
}

/// TCP, where nothing else is said.
fn protocol(name: Option<&str>) -> Option<Protocol> {
    name.map_or(Some(Protocol::Tcp), Protocol::parse)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn policy(spec: Value) -> Policy {
        let object = json!({"metadata": {"namespace": "ns", "name": "p"}, "spec": spec});
        Policy::of(&serde_json::from_value(object).unwrap())
    }

    #[test]
    fn which_directions_a_policy_is_about() {
        let directions = |spec: Value| {
            let policy = policy(spec);
            (
                policy.ingress.map(|rules| rules.len()),
                policy.egress.map(|rules| rules.len()),
            )
        };
        assert_eq!(directions(json!({"podSelector": {}})), (Some(0), None));
        assert_eq!(
            directions(json!({"podSelector": {}, "egress": []})),
            (Some(0), None)
        );
        assert_eq!(
            directions(json!({"podSelector": {}, "egress": [{}]})),
            (Some(0), Some(1))
        );
        assert_eq!(
            directions(json!({"podSelector": {}, "policyTypes": ["Egress"], "ingress": [{}]})),
            (None, Some(0))
        );
        assert_eq!(
            directions(json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]})),
            (Some(0), Some(0))
        );
    }

    #[test]
    fn rules_are_read() {
        let policy = policy(json!({"podSelector": {}, "ingress": [
            {"from": [], "ports": []},
            {"from": [{"podSelector": {"matchLabels": {"a": "b"}}}, {"namespaceSelector": {}},
                {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}, {"ipBlock": {"cidr": "nonsense"}}],
             "ports": [{"port": 80}, {"port": 1000, "endPort": 2000, "protocol": "UDP"}, {"protocol": "SCTP"}, {"port": "web"}]},
        ]}));
        let rules = policy.ingress.unwrap();
        assert_eq!((&rules[0].peers, &rules[0].ports), (&None, &PortSet::All));
        assert_eq!(rules[1].named, [(Protocol::Tcp, "web".to_owned())]);
        assert_eq!(rules[1].ports.boxes().len(), 3);
        let peers = rules[1].peers.as_ref().unwrap();
        assert!(matches!(&peers[0], Peer::Pods(term) if term.namespaces == NamespaceTerm::Own("ns".into())));
        assert!(matches!(&peers[1], Peer::Pods(term) if term.pods.is_empty()));
        assert!(matches!(&peers[2], Peer::Block { .. }));
        assert_eq!(peers[3], Peer::Nobody);
    }

    #[test]
    fn pods_without_an_address_of_their_own_are_left_out() {
        let facts = |spec: Value, phase: &str| {
            let pod = json!({"metadata": {"name": "p"}, "spec": spec, "status": {"phase": phase, "podIPs": [{"ip": "10.0.0.1"}]}});
            PodFacts::of(&serde_json::from_value(pod).unwrap())
        };
        assert!(facts(json!({}), "Running").is_some());
        assert!(facts(json!({"hostNetwork": true}), "Running").is_none());
        assert!(facts(json!({}), "Succeeded").is_none());
        let spec = json!({"containers": [{"ports": [{"name": "web", "containerPort": 80}, {"containerPort": 81}]}],
            "initContainers": [{"ports": [{"name": "once", "containerPort": 1}]},
                {"restartPolicy": "Always", "ports": [{"name": "side", "containerPort": 82, "protocol": "UDP"}]}]});
        let facts = facts(spec, "Pending").unwrap();
        assert_eq!(
            facts.ports,
            [
                ("web".to_owned(), Protocol::Tcp, 80),
                ("side".to_owned(), Protocol::Udp, 82)
            ]
        );
        assert_eq!(
            facts.resolve(&[(Protocol::Udp, "web".into())]),
            PortSet::default()
        );
    }
}
