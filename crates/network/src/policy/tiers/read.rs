//! Reads policies of both tiers. Whatever is not known fails closed, as the API asks: an Accept rule with such a part
//! matches nothing, and a Deny or Pass rule denies everything. Each is noted as a problem. No I/O.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde_json::Value;
use skiff_meta::net::Cidr;
use skiff_meta::selector::LabelSelector;

use super::{Action, Tier, TierKind, TierPeer, TierPolicy, TierRule};
use crate::policy::Direction;
use crate::policy::objects::{NamedPort, NamespaceTerm, PodTerm};
use crate::policy::ports::{PortRange, PortSet};
use crate::proxy::Protocol;

const PROTOCOLS: [(&str, Protocol); 3] = [
    ("tcp", Protocol::Tcp),
    ("udp", Protocol::Udp),
    ("sctp", Protocol::Sctp),
];
/// The one BaselineAdminNetworkPolicy has no priority: it comes after all that have one.
const LAST_PRIORITY: u32 = u32::MAX;
/// More problems than these are not listed.
const MAX_PROBLEMS: usize = 10;

/// What becomes of a policy of which a part is not known.
const OPENS_NOTHING: &str = "Accept rules match nothing, and Pass rules deny";

/// Why a part cannot be enforced, for people.
type Problem = String;

impl TierPolicy {
    pub(in crate::policy) fn of(kind: TierKind, name: &str, spec: &Value) -> TierPolicy {
        let mut problems = Vec::new();
        let (tier, priority) = match kind {
            TierKind::ClusterNetworkPolicy if spec["tier"] == "Baseline" => (Tier::Baseline, priority(spec)),
            TierKind::ClusterNetworkPolicy => {
                if spec["tier"] != "Admin" {
                    problems.push(format!(
                        "tier {} is not known: it is taken for Admin",
                        spec["tier"]
                    ));
                }
                (Tier::Admin, priority(spec))
            }
            TierKind::AdminNetworkPolicy => (Tier::Admin, priority(spec)),
            TierKind::BaselineAdminNetworkPolicy => (Tier::Baseline, LAST_PRIORITY),
        };
        let subject = match one_field(&spec["subject"]) {
            Some(("namespaces", selected)) => namespaces(selected),
            Some(("pods", selected)) => pods(selected),
            _ => Err("it has no field that is known".to_owned()),
        };
        let unknown = unknown_field(spec, &["tier", "priority", "subject", "ingress", "egress"]);
        if let Err(why) = &subject {
            problems.push(format!(
                "subject: {why}; all pods are selected, and {OPENS_NOTHING}"
            ));
        }
        if let Some(field) = unknown {
            problems.push(format!("{field} is not supported; {OPENS_NOTHING}"));
        }
        let is_whole = subject.is_ok() && unknown.is_none();
        let mut rules = |direction: Direction| -> Vec<TierRule> {
            let rules = spec[direction.name()].as_array().into_iter().flatten();
            let read = rules.enumerate().filter_map(|(index, rule)| {
                let mut rule = read_rule(kind, direction, index, rule, &mut problems)?;
                match rule.action {
                    Action::Accept if !is_whole => return None,
                    Action::Pass if !is_whole => rule.action = Action::Deny,
                    _ => {}
                }
                Some(rule)
            });
            read.collect()
        };
        let (ingress, egress) = (rules(Direction::Ingress), rules(Direction::Egress));
        if problems.len() > MAX_PROBLEMS {
            let more = problems.len() - MAX_PROBLEMS;
            problems.truncate(MAX_PROBLEMS);
            problems.push(format!("and {more} more"));
        }
        TierPolicy {
            tier,
            priority,
            kind,
            name: name.to_owned(),
            subject: subject.unwrap_or_else(|_| everybody()),
            ingress,
            egress,
            problems,
        }
    }
}

fn priority(spec: &Value) -> u32 {
    let number = spec["priority"].as_u64();
    number
        .and_then(|number| u32::try_from(number).ok())
        .unwrap_or(LAST_PRIORITY)
}

fn everybody() -> PodTerm {
    PodTerm {
        namespaces: NamespaceTerm::Selected(LabelSelector::everything()),
        pods: LabelSelector::everything(),
    }
}

/// `None` for a rule that matches nothing.
fn read_rule(
    kind: TierKind,
    direction: Direction,
    index: usize,
    rule: &Value,
    problems: &mut Vec<Problem>,
) -> Option<TierRule> {
    let place = format!("{}[{index}]", direction.name());
    let name = match rule["name"].as_str().filter(|name| !name.is_empty()) {
        Some(name) => format!("{place} {name:?}"),
        None => place,
    };
    let action = match (rule["action"].as_str().unwrap_or_default(), kind) {
        ("Accept", TierKind::ClusterNetworkPolicy) => Some(Action::Accept),
        ("Allow", TierKind::AdminNetworkPolicy | TierKind::BaselineAdminNetworkPolicy) => {
            Some(Action::Accept)
        }
        ("Deny", _) => Some(Action::Deny),
        ("Pass", TierKind::ClusterNetworkPolicy | TierKind::AdminNetworkPolicy) => Some(Action::Pass),
        _ => None,
    };
    let read = match action {
        None => Err(format!("action {} is not known", rule["action"])),
        Some(_) => read_peers(direction, rule).and_then(|peers| {
            let (ports, named) = read_ports(kind, rule)?;
            let peers_field = peers_field(direction);
            if let Some(field) = unknown_field(rule, &["name", "action", peers_field, ports_field(kind)]) {
                return Err(format!("{field} is not supported"));
            }
            let is_pods = |peer: &TierPeer| matches!(peer, TierPeer::Pods(_));
            match named.is_empty() || peers.iter().all(is_pods) {
                true => Ok((peers, ports, named)),
                false => Err("only pods have named ports".to_owned()),
            }
        }),
    };
    match (read, action) {
        (Ok((peers, ports, named)), Some(action)) => Some(TierRule {
            name,
            action,
            peers,
            ports,
            named,
        }),
        (Err(why), Some(Action::Accept)) => {
            problems.push(format!("{name}: {why}; the rule matches nothing"));
            None
        }
        (read, _) => {
            let why = read.err().unwrap_or_default();
            problems.push(format!("{name}: {why}; the rule denies everything"));
            Some(TierRule {
                name,
                action: Action::Deny,
                peers: everywhere(),
                ports: PortSet::All,
                named: Vec::new(),
            })
        }
    }
}

fn everywhere() -> Vec<TierPeer> {
    let any = [
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    ];
    let all = any.into_iter().filter_map(|any| Cidr::new(any, 0));
    all.map(TierPeer::Network).collect()
}

fn peers_field(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "from",
        Direction::Egress => "to",
    }
}

fn ports_field(kind: TierKind) -> &'static str {
    match kind {
        TierKind::ClusterNetworkPolicy => "protocols",
        TierKind::AdminNetworkPolicy | TierKind::BaselineAdminNetworkPolicy => "ports",
    }
}

fn read_peers(direction: Direction, rule: &Value) -> Result<Vec<TierPeer>, Problem> {
    let field = peers_field(direction);
    let listed = rule[field].as_array().filter(|peers| !peers.is_empty());
    let listed = listed.ok_or_else(|| format!("{field} is empty"))?;
    let mut peers = Vec::new();
    for (index, peer) in listed.iter().enumerate() {
        let of_peer = |why| format!("{field}[{index}]: {why}");
        match (one_field(peer), direction) {
            (Some(("namespaces", selected)), _) => {
                peers.push(TierPeer::Pods(namespaces(selected).map_err(of_peer)?));
            }
            (Some(("pods", selected)), _) => {
                peers.push(TierPeer::Pods(pods(selected).map_err(of_peer)?));
            }
            (Some(("nodes", selected)), Direction::Egress) => {
                peers.push(TierPeer::Nodes(selector(selected).map_err(of_peer)?));
            }
            (Some(("networks", networks)), Direction::Egress) => {
                let networks = networks.as_array().filter(|networks| !networks.is_empty());
                for network in networks.ok_or_else(|| of_peer("networks is empty".to_owned()))? {
                    let cidr = network.as_str().and_then(|text| text.parse().ok());
                    let cidr = cidr.ok_or_else(|| of_peer(format!("{network} is not a network")))?;
                    peers.push(TierPeer::Network(cidr));
                }
            }
            (Some((field, _)), _) => return Err(of_peer(format!("{field} is not supported"))),
            (None, _) => return Err(of_peer("it must have one field that is known".to_owned())),
        }
    }
    Ok(peers)
}

/// Numbers and names of ports.
fn read_ports(kind: TierKind, rule: &Value) -> Result<(PortSet, Vec<NamedPort>), Problem> {
    let field = ports_field(kind);
    let listed = match &rule[field] {
        Value::Null => return Ok((PortSet::All, Vec::new())),
        listed => listed.as_array().filter(|ports| !ports.is_empty()),
    };
    let listed = listed.ok_or_else(|| format!("{field} is empty"))?;
    let (mut numbers, mut named) = (Vec::new(), Vec::new());
    for (index, port) in listed.iter().enumerate() {
        let of_port = |why: &str| format!("{field}[{index}]: {why}");
        let (name, value) = one_field(port).ok_or_else(|| of_port("it must have one field"))?;
        if matches!(name, "destinationNamedPort" | "namedPort") {
            let name = value
                .as_str()
                .ok_or_else(|| of_port("the name is not a string"))?;
            // A pod may have a name once for each protocol.
            named.extend(PROTOCOLS.map(|(_, protocol)| (protocol, name.to_owned())));
            continue;
        }
        let range = match name {
            "portNumber" => {
                let number = &value["port"];
                range_of(protocol_of(value), number, number)
            }
            "portRange" => range_of(protocol_of(value), &value["start"], &value["end"]),
            _ => match PROTOCOLS.into_iter().find(|(known, _)| *known == name) {
                None => return Err(of_port(&format!("{name} is not supported"))),
                Some((_, protocol)) => read_protocol(protocol, value),
            },
        };
        numbers.push(range.ok_or_else(|| of_port("it has no port that is known"))?);
    }
    named.sort();
    named.dedup();
    Ok((numbers.into_iter().collect(), named))
}

/// What v1alpha2 says of one protocol: a port, a range of them, or all. A field that is not known might say that less is
/// meant.
fn read_protocol(protocol: Protocol, value: &Value) -> Option<PortRange> {
    if value.as_object()?.is_empty() {
        return Some(PortRange {
            protocol,
            first: 0,
            last: u16::MAX,
        });
    }
    let ("destinationPort", port) = one_field(value)? else {
        return None;
    };
    match one_field(port)? {
        ("number", number) => range_of(Some(protocol), number, number),
        ("range", range) => range_of(Some(protocol), &range["start"], &range["end"]),
        _ => None,
    }
}

/// TCP, where nothing else is said.
fn protocol_of(port: &Value) -> Option<Protocol> {
    Protocol::parse(port["protocol"].as_str().unwrap_or("TCP"))
}

/// There is no port 0: the table has what has no ports there (see `policy::table`).
fn range_of(protocol: Option<Protocol>, first: &Value, last: &Value) -> Option<PortRange> {
    let number = |value: &Value| u16::try_from(value.as_u64()?).ok().filter(|port| *port > 0);
    let (first, last) = (number(first)?, number(last)?);
    let range = PortRange {
        protocol: protocol?,
        first,
        last,
    };
    (first <= last).then_some(range)
}

/// A field that is not among the known ones.
fn unknown_field<'a>(object: &'a Value, known: &[&str]) -> Option<&'a str> {
    let mut fields = object.as_object()?.keys();
    fields
        .find(|field| !known.contains(&field.as_str()))
        .map(String::as_str)
}

/// The one field of an object; `None` for none and for several.
fn one_field(object: &Value) -> Option<(&str, &Value)> {
    let mut fields = object.as_object()?.iter();
    let (name, value) = fields.next()?;
    fields.next().is_none().then_some((name, value))
}

fn namespaces(selected: &Value) -> Result<PodTerm, Problem> {
    Ok(PodTerm {
        namespaces: NamespaceTerm::Selected(selector(selected)?),
        pods: LabelSelector::everything(),
    })
}

fn pods(selected: &Value) -> Result<PodTerm, Problem> {
    let part = |field: &str| {
        selected
            .get(field)
            .map_or(Ok(LabelSelector::everything()), selector)
    };
    let known = ["namespaceSelector", "podSelector"];
    if let Some(field) = unknown_field(selected, &known) {
        return Err(format!("{field} is not supported"));
    }
    Ok(PodTerm {
        namespaces: NamespaceTerm::Selected(part("namespaceSelector")?),
        pods: part("podSelector")?,
    })
}

/// A label selector and nothing else: releases before v0.1.3 had other fields in its place.
fn selector(value: &Value) -> Result<LabelSelector, Problem> {
    if !value.is_object() {
        return Err("a selector is missing".to_owned());
    }
    match unknown_field(value, &["matchLabels", "matchExpressions"]) {
        Some(field) => Err(format!("{field} is not supported")),
        None => LabelSelector::from_value(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn policy(spec: Value) -> TierPolicy {
        TierPolicy::of(TierKind::ClusterNetworkPolicy, "p", &spec)
    }

    /// An egress rule, and how often something was wrong with it.
    fn egress(rule: Value) -> (Option<TierRule>, usize) {
        let mut read =
            policy(json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "egress": [rule]}));
        (read.egress.pop(), read.problems.len())
    }

    #[test]
    fn all_three_kinds_are_read() {
        let spec = json!({"tier": "Baseline", "priority": 7, "subject": {"pods": {"podSelector": {"matchLabels": {"a": "b"}}}},
            "ingress": [{"action": "Accept", "from": [{"namespaces": {}}], "protocols": [
                {"tcp": {"destinationPort": {"number": 80}}}, {"udp": {"destinationPort": {"range": {"start": 1, "end": 9}}}},
                {"sctp": {}}, {"destinationNamedPort": "web"}]}],
            "egress": [{"name": "all", "action": "Pass", "to": [{"networks": ["10.0.0.0/8", "fd00::/8"]}, {"nodes": {}}]}]});
        let read = policy(spec);
        assert!(read.problems.is_empty(), "{:?}", read.problems);
        assert_eq!((read.tier, read.priority), (Tier::Baseline, 7));
        assert_eq!(read.ingress[0].ports.boxes().len(), 3);
        assert_eq!(read.ingress[0].named.len(), 3);
        assert_eq!(
            (read.egress[0].action, read.egress[0].peers.len()),
            (Action::Pass, 3)
        );
        assert!(read.names_nodes());
        let spec = json!({"priority": 3, "subject": {"namespaces": {}}, "ingress": [{"action": "Allow",
            "from": [{"pods": {"namespaceSelector": {}, "podSelector": {}}}],
            "ports": [{"portNumber": {"port": 80}}, {"portRange": {"protocol": "UDP", "start": 1, "end": 2}}, {"namedPort": "web"}]}]});
        let read = TierPolicy::of(TierKind::AdminNetworkPolicy, "p", &spec);
        assert!(read.problems.is_empty(), "{:?}", read.problems);
        assert_eq!((read.tier, read.ingress[0].ports.boxes().len()), (Tier::Admin, 2));
        let read = TierPolicy::of(TierKind::BaselineAdminNetworkPolicy, "default", &spec);
        assert_eq!((read.tier, read.priority), (Tier::Baseline, LAST_PRIORITY));
    }

    #[test]
    fn what_is_not_known_fails_closed() {
        for peers in [
            json!([{"domainNames": ["example.com"]}]),
            json!([{"namespaces": {}}, {}]),
            json!([{"namespaces": {}, "pods": {}}]),
            json!([{"namespaces": {"namespaceSelector": {}}}]),
            json!([{"pods": {"podSelector": {}, "other": {}}}]),
            json!([{"networks": ["nonsense"]}]),
            json!([{"networks": []}]),
            json!([]),
        ] {
            let (accept, problems) = egress(json!({"action": "Accept", "to": peers}));
            assert_eq!((accept, problems), (None, 1), "{peers}");
            for action in ["Deny", "Pass"] {
                let (deny, problems) = egress(json!({"action": action, "to": peers}));
                let deny = deny.unwrap();
                assert_eq!(
                    (deny.action, &deny.ports, problems),
                    (Action::Deny, &PortSet::All, 1)
                );
                assert_eq!(deny.peers, everywhere());
            }
        }
        let network = json!([{"networks": ["10.0.0.0/8"]}]);
        for protocol in [
            json!({"icmp": {}}),
            json!({"tcp": {"flags": ["syn"]}}),
            json!({"tcp": {"destinationPort": {}}}),
            json!({"tcp": {"destinationPort": {"number": 0}}}),
            json!({"tcp": {"destinationPort": {"range": {"start": 9, "end": 1}}}}),
            json!({"destinationNamedPort": "web"}),
        ] {
            let rule = json!({"action": "Accept", "to": network, "protocols": [protocol]});
            assert_eq!(egress(rule), (None, 1), "{protocol}");
        }
        for rule in [
            json!({"action": "Accept", "to": network, "protocols": []}),
            json!({"action": "Accept", "to": network, "ports": [{"portNumber": {"port": 80}}]}),
            json!({"action": "Accept", "to": network, "schedule": "night"}),
        ] {
            assert_eq!(egress(rule.clone()), (None, 1), "{rule}");
        }
        let (unknown, _) = egress(json!({"action": "Log", "to": network}));
        assert_eq!(unknown.unwrap().action, Action::Deny);
        // Networks are no sources.
        let spec = json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": {}},
            "ingress": [{"action": "Deny", "from": network}]});
        assert_eq!(policy(spec).problems.len(), 1);
    }

    #[test]
    fn a_policy_of_which_a_part_is_not_known_opens_nothing() {
        let rules =
            ["Accept", "Deny", "Pass"].map(|action| json!({"action": action, "from": [{"namespaces": {}}]}));
        let subject = json!({"pods": {"podSelector": {"matchLabels": {"a": "b"}}}});
        let check = |subject: &Value, field: &str, actions: &[Action], problems: usize| {
            let read = policy(
                json!({"tier": "Admin", "priority": 1, "subject": subject, "ingress": rules, field: rules}),
            );
            let read_actions: Vec<Action> = read.ingress.iter().map(|rule| rule.action).collect();
            assert_eq!(
                (read_actions.as_slice(), read.problems.len()),
                (actions, problems)
            );
            read
        };
        use Action::{Accept, Deny, Pass};
        check(&subject, "ingress", &[Accept, Deny, Pass], 0);
        let read = check(&subject, "routed", &[Deny, Deny], 1);
        assert_ne!(read.subject, everybody());
        let read = check(&json!({}), "ingress", &[Deny, Deny], 1);
        assert_eq!(read.subject, everybody());
    }
}
