//! What network policies mean, as plainly as it can be said: every policy, rule and peer is looked at for every packet.
//! It shares no code with what it is compared with. Besides, random worlds to compare them in.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::{Value, json};

pub(crate) type Labels = BTreeMap<String, String>;

#[derive(Debug, Clone)]
pub(crate) struct ModelPod {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) node: String,
    pub(crate) labels: Labels,
    pub(crate) addresses: Vec<IpAddr>,
    /// Name, protocol, number.
    pub(crate) ports: Vec<(String, String, u16)>,
}

impl ModelPod {
    /// As the API has it.
    pub(crate) fn object(&self) -> Value {
        let ports: Vec<Value> = self
            .ports
            .iter()
            .map(|(name, protocol, number)| json!({"name": name, "protocol": protocol, "containerPort": number}))
            .collect();
        let ips: Vec<Value> = self
            .addresses
            .iter()
            .map(|address| json!({"ip": address}))
            .collect();
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": self.namespace, "name": self.name, "uid": self.uid, "labels": self.labels},
            "spec": {"nodeName": self.node, "containers": [{"name": "c", "image": "i", "ports": ports}]},
            "status": {"phase": "Running", "podIPs": ips},
        })
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct World {
    pub(crate) namespaces: BTreeMap<String, Labels>,
    pub(crate) pods: Vec<ModelPod>,
    /// NetworkPolicies, as the API has them.
    pub(crate) policies: Vec<Value>,
    /// ClusterNetworkPolicies, AdminNetworkPolicies and BaselineAdminNetworkPolicies.
    pub(crate) tiers: Vec<Value>,
    /// Labels and addresses of nodes.
    pub(crate) nodes: Vec<(Labels, Vec<IpAddr>)>,
}

/// One side of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side<'a> {
    pub(crate) address: IpAddr,
    pub(crate) pod: Option<&'a ModelPod>,
}

impl World {
    /// Whether policies let `from` open a connection to `to`.
    pub(crate) fn allows(&self, from: Side<'_>, to: Side<'_>, protocol: &str, port: u16) -> bool {
        from.address == to.address
            || (self.allows_half(false, from, to, protocol, port)
                && self.allows_half(true, to, from, protocol, port))
    }

    /// Whether the policies of the pod `own` let the connection pass.
    pub(crate) fn allows_half(
        &self,
        ingress: bool,
        own: Side<'_>,
        other: Side<'_>,
        protocol: &str,
        port: u16,
    ) -> bool {
        let Some(pod) = own.pod else { return true };
        if let Some(accepts) = self.tier("Admin", ingress, own, other, protocol, port) {
            return accepts;
        }
        let (kind, rules, peers) = match ingress {
            true => ("Ingress", "ingress", "from"),
            false => ("Egress", "egress", "to"),
        };
        let mut isolated = false;
        for policy in &self.policies {
            let spec = &policy["spec"];
            let types = spec["policyTypes"].as_array().filter(|types| !types.is_empty());
            let has_egress = spec["egress"].as_array().is_some_and(|rules| !rules.is_empty());
            let about = match types {
                Some(types) => types.iter().any(|one| one == kind),
                None => ingress || has_egress,
            };
            let namespace = policy["metadata"]["namespace"].as_str().unwrap_or_default();
            if !about || namespace != pod.namespace || !selects(&spec["podSelector"], &pod.labels) {
                continue;
            }
            isolated = true;
            for rule in spec[rules].as_array().into_iter().flatten() {
                // The pod whose ports names stand for is the one that is connected to.
                let target = if ingress { Some(pod) } else { other.pod };
                if self.peer_matches(namespace, &rule[peers], other)
                    && port_matches(&rule["ports"], target, protocol, port)
                {
                    return true;
                }
            }
        }
        if isolated {
            // By way of a service a pod reaches itself.
            return own.address == other.address;
        }
        let baseline = self.tier("Baseline", ingress, own, other, protocol, port);
        baseline.unwrap_or(true)
    }

    /// What the first rule of a tier that matches says: whether to accept, or nothing.
    fn tier(
        &self,
        tier: &str,
        ingress: bool,
        own: Side<'_>,
        other: Side<'_>,
        protocol: &str,
        port: u16,
    ) -> Option<bool> {
        let pod = own.pod?;
        let mut policies: Vec<&Value> = self
            .tiers
            .iter()
            .filter(|policy| tier_of(policy) == tier)
            .collect();
        policies.sort_by_key(|policy| {
            let last = u64::from(u32::MAX);
            let kind = [
                "ClusterNetworkPolicy",
                "AdminNetworkPolicy",
                "BaselineAdminNetworkPolicy",
            ]
            .iter()
            .position(|kind| policy["kind"] == *kind);
            let priority = policy["spec"]["priority"].as_u64().unwrap_or(last);
            (
                priority,
                kind,
                policy["metadata"]["name"].as_str().unwrap_or_default(),
            )
        });
        let (rules, peers) = match ingress {
            true => ("ingress", "from"),
            false => ("egress", "to"),
        };
        for policy in policies {
            if !self.term_matches(&policy["spec"]["subject"], own) {
                continue;
            }
            for rule in policy["spec"][rules].as_array().into_iter().flatten() {
                let target = if ingress { Some(pod) } else { other.pod };
                let mut listed = rule[peers].as_array().into_iter().flatten();
                if !listed.any(|peer| self.term_matches(peer, other))
                    || !tier_port_matches(rule, target, protocol, port)
                {
                    continue;
                }
                return match rule["action"].as_str().unwrap_or_default() {
                    "Accept" | "Allow" => Some(true),
                    "Deny" => Some(false),
                    _ => None,
                };
            }
        }
        None
    }

    fn term_matches(&self, term: &Value, side: Side<'_>) -> bool {
        let in_namespace = |selector: &Value| {
            side.pod
                .is_some_and(|pod| selects(selector, &self.namespaces[&pod.namespace]))
        };
        if let Some(selector) = term.get("namespaces") {
            return in_namespace(selector);
        }
        if let Some(pods) = term.get("pods") {
            let selected = side
                .pod
                .is_some_and(|pod| selects(&pods["podSelector"], &pod.labels));
            return selected && in_namespace(&pods["namespaceSelector"]);
        }
        if let Some(selector) = term.get("nodes") {
            return self
                .nodes
                .iter()
                .any(|(labels, addresses)| selects(selector, labels) && addresses.contains(&side.address));
        }
        let mut networks = term["networks"].as_array().into_iter().flatten();
        networks.any(|cidr| contains(cidr.as_str().unwrap_or_default(), side.address))
    }

    fn peer_matches(&self, own_namespace: &str, peers: &Value, other: Side<'_>) -> bool {
        let Some(peers) = peers.as_array().filter(|peers| !peers.is_empty()) else {
            return true;
        };
        peers.iter().any(|peer| {
            if let Some(block) = peer.get("ipBlock") {
                let inside = |cidr: &Value| contains(cidr.as_str().unwrap_or_default(), other.address);
                let except = block["except"].as_array().into_iter().flatten();
                return inside(&block["cidr"]) && !except.into_iter().any(inside);
            }
            let Some(pod) = other.pod else { return false };
            let namespace = match peer.get("namespaceSelector") {
                None => pod.namespace == own_namespace,
                Some(selector) => selects(selector, &self.namespaces[&pod.namespace]),
            };
            namespace
                && peer
                    .get("podSelector")
                    .is_none_or(|selector| selects(selector, &pod.labels))
        })
    }
}

fn port_matches(ports: &Value, target: Option<&ModelPod>, protocol: &str, port: u16) -> bool {
    let Some(ports) = ports.as_array().filter(|ports| !ports.is_empty()) else {
        return true;
    };
    ports.iter().any(|wanted| {
        if wanted["protocol"].as_str().unwrap_or("TCP") != protocol {
            return false;
        }
        match &wanted["port"] {
            Value::Null => true,
            Value::String(name) => target.is_some_and(|pod| {
                let mut ports = pod.ports.iter();
                ports.any(|(own, own_protocol, number)| {
                    own == name && own_protocol == protocol && *number == port
                })
            }),
            number => {
                let first = number.as_u64().unwrap_or_default();
                let last = wanted["endPort"].as_u64().unwrap_or(first);
                (first..=last).contains(&u64::from(port))
            }
        }
    })
}

fn tier_of(policy: &Value) -> &str {
    match policy["kind"].as_str().unwrap_or_default() {
        "AdminNetworkPolicy" => "Admin",
        "BaselineAdminNetworkPolicy" => "Baseline",
        _ => policy["spec"]["tier"].as_str().unwrap_or_default(),
    }
}

fn tier_port_matches(rule: &Value, target: Option<&ModelPod>, protocol: &str, port: u16) -> bool {
    let is_named = |name: &Value| {
        target.is_some_and(|pod| {
            let mut ports = pod.ports.iter();
            ports
                .any(|(own, own_protocol, number)| name == own && own_protocol == protocol && *number == port)
        })
    };
    let within = |first: &Value, last: &Value| {
        let (first, last) = (first.as_u64().unwrap(), last.as_u64().unwrap());
        (first..=last).contains(&u64::from(port))
    };
    if let Some(ports) = rule["ports"].as_array() {
        return ports.iter().any(|wanted| {
            let (number, range) = (&wanted["portNumber"], &wanted["portRange"]);
            let is_protocol = |port: &Value| port["protocol"].as_str().unwrap_or("TCP") == protocol;
            match (number.is_null(), range.is_null()) {
                (false, _) => is_protocol(number) && within(&number["port"], &number["port"]),
                (_, false) => is_protocol(range) && within(&range["start"], &range["end"]),
                _ => is_named(&wanted["namedPort"]),
            }
        });
    }
    let Some(protocols) = rule["protocols"].as_array() else {
        return true;
    };
    protocols.iter().any(|wanted| {
        if let Some(name) = wanted.get("destinationNamedPort") {
            return is_named(name);
        }
        let Some(wanted) = wanted.get(protocol.to_lowercase()) else {
            return false;
        };
        let wanted = &wanted["destinationPort"];
        match (wanted.get("number"), wanted.get("range")) {
            (Some(number), _) => within(number, number),
            (_, Some(range)) => within(&range["start"], &range["end"]),
            _ => true,
        }
    })
}

fn selects(selector: &Value, labels: &Labels) -> bool {
    let value = |key: &Value| labels.get(key.as_str().unwrap_or_default());
    let listed = selector["matchLabels"].as_object().into_iter().flatten();
    let mut expressions = selector["matchExpressions"].as_array().into_iter().flatten();
    listed
        .into_iter()
        .all(|(key, wanted)| labels.get(key).map(String::as_str) == wanted.as_str())
        && expressions.all(|expression| {
            let value = value(&expression["key"]);
            let mut values = expression["values"].as_array().into_iter().flatten();
            let is_listed = value.is_some_and(|value| values.any(|one| one == value));
            match expression["operator"].as_str().unwrap_or_default() {
                "In" => is_listed,
                "NotIn" => !is_listed,
                "Exists" => value.is_some(),
                _ => value.is_none(),
            }
        })
}

/// Whether the first bits of two addresses are equal.
fn contains(cidr: &str, address: IpAddr) -> bool {
    let (network, prefix) = cidr.split_once('/').unwrap_or_default();
    let prefix: u32 = prefix.parse().unwrap_or_default();
    match (network.parse(), address) {
        (Ok(IpAddr::V4(network)), IpAddr::V4(address)) => {
            (0..prefix).all(|bit| (network.to_bits() ^ address.to_bits()) & (1 << (31 - bit)) == 0)
        }
        (Ok(IpAddr::V6(network)), IpAddr::V6(address)) => {
            (0..prefix).all(|bit| (network.to_bits() ^ address.to_bits()) & (1 << (127 - bit)) == 0)
        }
        _ => false,
    }
}

/// The same numbers in every run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 20) % limit as u64) as usize
    }

    pub(crate) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub(crate) fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }

    pub(crate) fn labels(&mut self, keys: &[&str]) -> Labels {
        let mut labels = Labels::new();
        for key in keys {
            if !self.one_in(3) {
                labels.insert((*key).to_owned(), self.pick(&["a", "b"]).to_owned());
            }
        }
        labels
    }

    fn selector(&mut self, keys: &[&str]) -> Value {
        match self.below(5) {
            0 => json!({}),
            1 | 2 => json!({"matchLabels": {self.pick(keys): self.pick(&["a", "b"])}}),
            3 => {
                json!({"matchExpressions": [{"key": self.pick(keys), "operator": self.pick(&["In", "NotIn"]),
                    "values": [self.pick(&["a", "b"]), "c"]}]})
            }
            _ => {
                json!({"matchExpressions": [{"key": self.pick(keys), "operator": self.pick(&["Exists", "DoesNotExist"])}]})
            }
        }
    }

    fn peer(&mut self, blocks: &[(&str, &str)]) -> Value {
        match self.below(4) {
            0 => json!({"podSelector": self.selector(&POD_KEYS)}),
            1 => json!({"namespaceSelector": self.selector(&NAMESPACE_KEYS)}),
            2 => {
                json!({"namespaceSelector": self.selector(&NAMESPACE_KEYS), "podSelector": self.selector(&POD_KEYS)})
            }
            _ => {
                let (cidr, except) = blocks[self.below(blocks.len())];
                match self.one_in(2) {
                    true => json!({"ipBlock": {"cidr": cidr}}),
                    false => json!({"ipBlock": {"cidr": cidr, "except": [except]}}),
                }
            }
        }
    }

    fn port(&mut self) -> Value {
        let protocol = self.pick(&["TCP", "TCP", "UDP", "SCTP"]);
        match self.below(5) {
            0 => json!({"protocol": protocol}),
            1 => json!({"protocol": protocol, "port": self.pick(&["web", "alt"])}),
            2 => json!({"protocol": protocol, "port": 8080, "endPort": 8080 + self.below(3)}),
            3 => json!({"port": 8081}),
            _ => json!({"protocol": protocol, "port": 8080}),
        }
    }

    fn list(&mut self, most: usize, mut one: impl FnMut(&mut Random) -> Value) -> Vec<Value> {
        let count = self.below(most + 1);
        (0..count).map(|_| one(self)).collect()
    }

    /// A policy whose peers may be these blocks, each with an exception.
    pub(crate) fn policy(&mut self, namespace: &str, name: &str, blocks: &[(&str, &str)]) -> Value {
        let mut spec = json!({"podSelector": self.selector(&POD_KEYS)});
        match self.below(4) {
            0 => {}
            1 => spec["policyTypes"] = json!(["Ingress"]),
            2 => spec["policyTypes"] = json!(["Egress"]),
            _ => spec["policyTypes"] = json!(["Ingress", "Egress"]),
        }
        for (rules, peers) in [("ingress", "from"), ("egress", "to")] {
            if self.one_in(4) {
                continue;
            }
            let listed = self.list(2, |random| {
                let mut rule = json!({});
                if !random.one_in(4) {
                    rule[peers] = random.list(2, |random| random.peer(blocks)).into();
                }
                if !random.one_in(3) {
                    rule["ports"] = random.list(2, Random::port).into();
                }
                rule
            });
            spec[rules] = listed.into();
        }
        json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"namespace": namespace, "name": name}, "spec": spec})
    }
}

/// Policies of administrators.
impl Random {
    fn pods_term(&mut self) -> Value {
        match self.one_in(2) {
            true => json!({"namespaces": self.selector(&NAMESPACE_KEYS)}),
            false => {
                json!({"pods": {"namespaceSelector": self.selector(&NAMESPACE_KEYS), "podSelector": self.selector(&POD_KEYS)}})
            }
        }
    }

    fn tier_rule(&mut self, ingress: bool, actions: &[&str], is_new: bool, blocks: &[(&str, &str)]) -> Value {
        let mut only_pods = true;
        let count = 1 + self.below(2);
        let peers: Vec<Value> = (0..count)
            .map(|_| match self.below(5) {
                0 | 1 if !ingress => {
                    only_pods = false;
                    let (cidr, other) = blocks[self.below(blocks.len())];
                    match self.one_in(2) {
                        true => json!({"networks": [cidr]}),
                        false => json!({"networks": [other]}),
                    }
                }
                2 if !ingress => {
                    only_pods = false;
                    json!({"nodes": self.selector(&POD_KEYS)})
                }
                _ => self.pods_term(),
            })
            .collect();
        let mut rule = json!({"action": self.pick(actions), if ingress { "from" } else { "to" }: peers});
        if self.one_in(3) {
            return rule;
        }
        let count = 1 + self.below(2);
        let ports: Vec<Value> = (0..count)
            .map(|_| {
                let protocol = self.pick(&["TCP", "TCP", "UDP", "SCTP"]);
                let (first, last) = (8080, 8081 + self.below(2));
                let named = only_pods && self.one_in(3);
                let name = self.pick(&["web", "alt"]);
                let port = json!({"number": 8080 + self.below(2)});
                match (is_new, self.below(3)) {
                    (true, _) if named => json!({"destinationNamedPort": name}),
                    (false, _) if named => json!({"namedPort": name}),
                    (true, 0) => json!({protocol.to_lowercase(): {"destinationPort": {"range": {"start": first, "end": last}}}}),
                    (true, 1) => json!({protocol.to_lowercase(): {}}),
                    (true, _) => json!({protocol.to_lowercase(): {"destinationPort": port}}),
                    (false, 0) => json!({"portRange": {"protocol": protocol, "start": first, "end": last}}),
                    (false, _) => json!({"portNumber": {"protocol": protocol, "port": port["number"]}}),
                }
            })
            .collect();
        rule[if is_new { "protocols" } else { "ports" }] = ports.into();
        rule
    }

    /// A policy of one of the three kinds.
    pub(crate) fn tier_policy(&mut self, name: &str, blocks: &[(&str, &str)]) -> Value {
        let kinds = [
            "ClusterNetworkPolicy",
            "ClusterNetworkPolicy",
            "AdminNetworkPolicy",
            "BaselineAdminNetworkPolicy",
        ];
        let kind = self.pick(&kinds);
        let mut subject = self.pods_term();
        // Not the pods that show how far the components have read.
        let selector = match subject.get("namespaces").is_some() {
            true => &mut subject["namespaces"],
            false => &mut subject["pods"]["namespaceSelector"],
        };
        let mut expressions = selector["matchExpressions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        expressions.push(json!({"key": "mark", "operator": "DoesNotExist"}));
        selector["matchExpressions"] = expressions.into();
        let mut spec = json!({"subject": subject});
        let is_new = kind == "ClusterNetworkPolicy";
        let (version, actions, name) = match kind {
            "ClusterNetworkPolicy" => ("v1alpha2", &["Accept", "Deny", "Pass"][..], name),
            "AdminNetworkPolicy" => ("v1alpha1", &["Allow", "Deny", "Pass"][..], name),
            // There is one at most.
            _ => ("v1alpha1", &["Allow", "Deny"][..], "default"),
        };
        if is_new {
            spec["tier"] = json!(self.pick(&["Admin", "Baseline"]));
        }
        if kind != "BaselineAdminNetworkPolicy" {
            spec["priority"] = json!(self.below(4));
        }
        for (field, ingress) in [("ingress", true), ("egress", false)] {
            spec[field] = self
                .list(3, |random| random.tier_rule(ingress, actions, is_new, blocks))
                .into();
        }
        json!({"apiVersion": format!("policy.networking.k8s.io/{version}"), "kind": kind,
            "metadata": {"name": name}, "spec": spec})
    }
}

pub(crate) const POD_KEYS: [&str; 2] = ["app", "tier"];
pub(crate) const NAMESPACE_KEYS: [&str; 2] = ["team", "env"];
