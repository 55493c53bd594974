//! From services and endpoints to a table, as a pure function.
//!
//! The shape: a packet that opens a connection is looked up once by its destination in a map, whatever
//! the number of services, and goes to the chain of its service port; that chain picks an endpoint at
//! random; the endpoint's chain rewrites the destination. The kernel's connection tracking does the
//! rest of the connection.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Service, ServicePort};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use skiff_meta::net::Cidr;

use super::ProxyConfig;
use super::endpoints::{Index, Target};
use super::external::{Claims, ExternalIp, Refusal, cluster_ips_of, external_ips};
use super::ruleset::{
    Base, Chain, Hook, Key, KeyKind, Kind, Map, Protocol, Rule, Ruleset, Set, Statement, Verdict,
};

/// The packet mark that asks for masquerading; upstream's bit.
const MASQUERADE_BIT: u32 = 0x4000;

const HOST_PORTS: &str = "host-ports";
const SERVICE_IPS: &str = "service-ips";
const SERVICE_NODEPORTS: &str = "service-nodeports";
const NO_ENDPOINT_SERVICES: &str = "no-endpoint-services";
const NO_ENDPOINT_NODEPORTS: &str = "no-endpoint-nodeports";
const CLUSTER_IPS: &str = "cluster-ips";
const SERVICES: &str = "services";
const ENDPOINTS_CHECK: &str = "endpoints-check";
const CLUSTER_IPS_CHECK: &str = "cluster-ips-check";
const MASQUERADING: &str = "masquerading";
const REJECT: &str = "reject-chain";

/// A service with this label, whatever its value, is another proxy's.
const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

/// The whole table.
pub fn plan(config: &ProxyConfig, services: &[Arc<Service>], slices: &[Arc<EndpointSlice>]) -> Ruleset {
    plan_with_refusals(config, services, slices).0
}

/// The whole table, and what services ask for in vain.
pub fn plan_with_refusals(
    config: &ProxyConfig,
    services: &[Arc<Service>],
    slices: &[Arc<EndpointSlice>],
) -> (Ruleset, Vec<Refusal>) {
    let index = Index::new(slices, &config.node_name);
    // The older one keeps what two services claim.
    let mut by_age: Vec<&Service> = services.iter().map(Arc::as_ref).collect();
    by_age.sort_by_key(|service| {
        let meta = &service.metadata;
        let created = meta.creation_timestamp.as_ref().map(|time| time.0);
        (created, &meta.namespace, &meta.name)
    });
    let api_servers = index.targets("default", "kubernetes", "https", "TCP").cluster;
    let mut claims = Claims::new(config, by_age.iter().copied(), api_servers);
    let mut plan = Plan {
        config,
        ruleset: frame(config),
        external: Vec::new(),
    };
    for service in by_age {
        plan.service(service, &index);
    }
    let mut external = std::mem::take(&mut plan.external);
    external.sort_by_key(|external| external.wanted.origin);
    for external in external {
        plan.external(external, &mut claims);
    }
    (plan.ruleset, claims.refusals)
}

fn goto(chain: impl Into<String>) -> Statement {
    Statement::Verdict(Verdict::Goto(chain.into()))
}

fn jump(chain: impl Into<String>) -> Statement {
    Statement::Verdict(Verdict::Jump(chain.into()))
}

/// What is there whatever services exist.
fn frame(config: &ProxyConfig) -> Ruleset {
    let mut ruleset = Ruleset::default();
    for (name, kind) in [
        (HOST_PORTS, KeyKind::Port),
        (SERVICE_IPS, KeyKind::Service),
        (NO_ENDPOINT_SERVICES, KeyKind::Service),
        (SERVICE_NODEPORTS, KeyKind::Port),
        (NO_ENDPOINT_NODEPORTS, KeyKind::Port),
    ] {
        ruleset.maps.insert(
            name.into(),
            Map {
                kind,
                elements: BTreeMap::new(),
            },
        );
    }
    if let Some(map) = ruleset.maps.get_mut(HOST_PORTS) {
        let ports = config.host_ports.iter();
        map.elements
            .extend(ports.map(|port| (Key::Port(Protocol::Tcp, *port), Verdict::Return)));
    }
    ruleset
        .sets
        .insert(CLUSTER_IPS.into(), Set::Listed(BTreeSet::new()));

    let mut chain = |name: &str, rules: Vec<Rule>| {
        ruleset.chains.insert(name.into(), Chain { base: None, rules });
    };
    let mut services: Vec<Rule> = Vec::new();
    if let Some(pods) = config.pods() {
        // Who is not a pod may come from an address that endpoints have no way back to.
        let set = CLUSTER_IPS.into();
        services.push(vec![
            Statement::SourceNot(pods),
            Statement::DestinationIn(set),
            Statement::Mark(MASQUERADE_BIT),
        ]);
    }
    // On this machine's addresses its own ports come first, then node ports: a service that names such an address
    // as its external one must not take them away.
    let host_ports = || vec![Statement::DestinationLocal, Statement::PortMap(HOST_PORTS.into())];
    services.push(host_ports());
    services.push(vec![
        Statement::DestinationLocal,
        Statement::PortMap(SERVICE_NODEPORTS.into()),
    ]);
    services.push(vec![Statement::ServiceMap(SERVICE_IPS.into())]);
    chain(SERVICES, services);
    chain(
        ENDPOINTS_CHECK,
        vec![
            host_ports(),
            vec![
                Statement::DestinationLocal,
                Statement::PortMap(NO_ENDPOINT_NODEPORTS.into()),
            ],
            vec![Statement::ServiceMap(NO_ENDPOINT_SERVICES.into())],
        ],
    );
    // What still goes to a service's address after translation goes to a port that it has not; the service network
    // is nowhere else, so what goes to no service's address must not leave the machine.
    let mut unknown = vec![vec![
        Statement::DestinationIn(CLUSTER_IPS.into()),
        Statement::Verdict(Verdict::Reject),
    ]];
    if let Some(services) = config.services() {
        unknown.push(vec![
            Statement::Destination(services),
            Statement::Verdict(Verdict::Drop),
        ]);
    }
    chain(CLUSTER_IPS_CHECK, unknown);
    chain(REJECT, vec![vec![Statement::Verdict(Verdict::Reject)]]);
    let masquerading = vec![vec![
        Statement::Marked(MASQUERADE_BIT),
        Statement::Unmark(MASQUERADE_BIT),
        Statement::Masquerade,
    ]];
    chain(MASQUERADING, masquerading);

    let check = || vec![Statement::NewConnection, jump(ENDPOINTS_CHECK)];
    let unknown = || vec![Statement::NewConnection, jump(CLUSTER_IPS_CHECK)];
    // -100 and 100 are the kernel's places for destination and source translation.
    for (name, kind, hook, priority, rules) in [
        (
            "nat-prerouting",
            Kind::Nat,
            Hook::Prerouting,
            -100,
            vec![vec![jump(SERVICES)]],
        ),
        (
            "nat-output",
            Kind::Nat,
            Hook::Output,
            -100,
            vec![vec![jump(SERVICES)]],
        ),
        (
            "nat-postrouting",
            Kind::Nat,
            Hook::Postrouting,
            100,
            vec![vec![jump(MASQUERADING)]],
        ),
        ("filter-input", Kind::Filter, Hook::Input, -110, vec![check()]),
        (
            "filter-forward",
            Kind::Filter,
            Hook::Forward,
            -110,
            vec![check(), unknown()],
        ),
        ("filter-output", Kind::Filter, Hook::Output, -110, vec![check()]),
        (
            "filter-output-post-dnat",
            Kind::Filter,
            Hook::Output,
            -90,
            vec![unknown()],
        ),
    ] {
        ruleset.chains.insert(
            name.into(),
            Chain {
                base: Some(Base { kind, hook, priority }),
                rules,
            },
        );
    }
    if let Some(bridge) = &config.bridge {
        // Node ports on 127.0.0.1 need `route_localnet` on the bridge, which would also open the
        // node's own loopback services to pods. Before translation, nothing from a pod may go there.
        let loopback = Cidr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8);
        let away = loopback.map(|loopback| {
            vec![
                Statement::InputInterface(bridge.clone()),
                Statement::Destination(loopback),
                Statement::Verdict(Verdict::Drop),
            ]
        });
        let rules = away.into_iter().collect();
        let base = Base {
            kind: Kind::Filter,
            hook: Hook::Prerouting,
            priority: -300,
        };
        ruleset.chains.insert(
            "guard-loopback".into(),
            Chain {
                base: Some(base),
                rules,
            },
        );
    }
    ruleset
}

struct Plan<'a> {
    config: &'a ProxyConfig,
    ruleset: Ruleset,
    /// External addresses wait until all services have what is theirs without asking.
    external: Vec<External<'a>>,
}

/// An external address of a service port, and where its traffic would go.
struct External<'a> {
    service: &'a Service,
    wanted: ExternalIp,
    /// The service port, as in the names of its chains.
    key: String,
    protocol: Protocol,
    port: u16,
    to: Destination,
}

/// Where the traffic for one service port is sent: to its endpoints, or away.
#[derive(Clone)]
enum Destination {
    Chain(String),
    None(Verdict),
}

impl<'a> Plan<'a> {
    fn service(&mut self, service: &'a Service, index: &Index<'a>) {
        let (Some(namespace), Some(name), Some(spec)) = (
            service.metadata.namespace.as_deref(),
            service.metadata.name.as_deref(),
            service.spec.as_ref(),
        ) else {
            return;
        };
        let elsewhere = service
            .metadata
            .labels
            .as_ref()
            .is_some_and(|labels| labels.contains_key(PROXY_NAME));
        if elsewhere || spec.type_.as_deref() == Some("ExternalName") {
            return;
        }
        let Some(cluster_ip) = cluster_ips_of(service).next() else {
            return;
        };
        if let Some(Set::Listed(addresses)) = self.ruleset.sets.get_mut(CLUSTER_IPS) {
            addresses.insert(cluster_ip);
        }
        let affinity = (spec.session_affinity.as_deref() == Some("ClientIP")).then(|| {
            let seconds = spec
                .session_affinity_config
                .as_ref()
                .and_then(|config| config.client_ip.as_ref()?.timeout_seconds)
                .unwrap_or(10800);
            Duration::from_secs(u64::try_from(seconds).unwrap_or(10800).max(1))
        });
        let internal_local = spec.internal_traffic_policy.as_deref() == Some("Local");
        let external_local = spec.external_traffic_policy.as_deref() == Some("Local");
        for port in spec.ports.iter().flatten() {
            let Some((protocol, number)) = port_of(port) else {
                continue;
            };
            let port_name = port.name.as_deref().unwrap_or("");
            let targets = index.targets(
                namespace,
                name,
                port_name,
                port.protocol.as_deref().unwrap_or("TCP"),
            );
            let key = format!("{namespace}/{name}/{}/{port_name}", protocol.name());

            let cluster = self.pick_chain("service", &key, protocol, &targets.cluster, affinity);
            let local = if internal_local || external_local {
                Some(self.pick_chain("local", &key, protocol, &targets.local, affinity))
            } else {
                None
            };
            // No endpoint at all is refused; none on this node, when it must be on this node, is
            // dropped, because another node might still answer.
            let local_or_drop = |local: &Option<Option<String>>| match (local, &cluster) {
                (Some(Some(chain)), _) => Destination::Chain(chain.clone()),
                (_, Some(_)) => Destination::None(Verdict::Drop),
                (_, None) => Destination::None(Verdict::Goto(REJECT.into())),
            };
            let internal = if internal_local {
                local_or_drop(&local)
            } else {
                match &cluster {
                    Some(chain) => Destination::Chain(chain.clone()),
                    None => Destination::None(Verdict::Goto(REJECT.into())),
                }
            };
            let map = match internal {
                Destination::Chain(_) => SERVICE_IPS,
                Destination::None(_) => NO_ENDPOINT_SERVICES,
            };
            self.add_element(map, Key::Service(cluster_ip, protocol, number), &internal);

            let external_ips = external_ips(service);
            let node_port = port
                .node_port
                .and_then(|n| u16::try_from(n).ok())
                .filter(|n| *n > 0);
            if external_ips.is_empty() && node_port.is_none() {
                continue;
            }
            let external = if external_local {
                match local_or_drop(&local) {
                    Destination::Chain(chain) => {
                        Destination::Chain(self.external_local(&key, &cluster, Some(&chain)))
                    }
                    Destination::None(Verdict::Drop) => {
                        // The node and its pods may still use the whole cluster.
                        Destination::Chain(self.external_local(&key, &cluster, None))
                    }
                    none => none,
                }
            } else {
                match &cluster {
                    Some(chain) => {
                        let name = chain_name("external", &key);
                        self.add_chain(
                            &name,
                            vec![vec![Statement::Mark(MASQUERADE_BIT)], vec![goto(chain)]],
                        );
                        Destination::Chain(name)
                    }
                    None => Destination::None(Verdict::Goto(REJECT.into())),
                }
            };
            if let Some(node_port) = node_port {
                // In both maps, whether it has endpoints or not: it never goes to a service that has this port on
                // an external address.
                let node_port = Key::Port(protocol, node_port);
                let ended = Destination::None(Verdict::Return);
                let (served, checked) = match &external {
                    Destination::Chain(_) => (&external, &ended),
                    Destination::None(_) => (&ended, &external),
                };
                self.add_element(SERVICE_NODEPORTS, node_port, served);
                self.add_element(NO_ENDPOINT_NODEPORTS, node_port, checked);
            }
            for wanted in external_ips {
                self.external.push(External {
                    service,
                    wanted,
                    key: key.clone(),
                    protocol,
                    port: number,
                    to: external.clone(),
                });
            }
        }
    }

    fn external(&mut self, external: External<'a>, claims: &mut Claims<'a>) {
        let (protocol, port) = (external.protocol, external.port);
        if !claims.take(external.service, &external.wanted, protocol, port) {
            return;
        }
        let ExternalIp { address, ranges, .. } = external.wanted;
        let (map, to) = match (external.to, ranges) {
            (Destination::Chain(chain), Some(ranges)) => {
                let firewall = self.source_ranges(&external.key, &chain, ranges);
                (SERVICE_IPS, Destination::Chain(firewall))
            }
            (to @ Destination::Chain(_), None) => (SERVICE_IPS, to),
            (to @ Destination::None(_), _) => (NO_ENDPOINT_SERVICES, to),
        };
        self.add_element(map, Key::Service(address, protocol, port), &to);
    }

    /// The chain that picks one of `targets`, if there are any.
    fn pick_chain(
        &mut self,
        prefix: &str,
        key: &str,
        protocol: Protocol,
        targets: &[Target],
        affinity: Option<Duration>,
    ) -> Option<String> {
        if targets.is_empty() {
            return None;
        }
        let endpoints: Vec<String> = targets
            .iter()
            .map(|target| self.endpoint_chain(key, protocol, *target, affinity))
            .collect();
        let mut rules: Vec<Rule> = Vec::new();
        if let Some(timeout) = affinity {
            for (target, endpoint) in targets.iter().zip(&endpoints) {
                rules.push(vec![
                    Statement::SourceIn(affinity_set(key, *target, timeout)),
                    goto(endpoint),
                ]);
            }
        }
        match endpoints.as_slice() {
            [only] => rules.push(vec![goto(only)]),
            many => {
                let map = chain_name(&format!("{prefix}-pick"), key);
                let elements = (0..)
                    .zip(many)
                    .map(|(index, chain)| (Key::Index(index), Verdict::Goto(chain.clone())))
                    .collect();
                self.ruleset.maps.insert(
                    map.clone(),
                    Map {
                        kind: KeyKind::Index,
                        elements,
                    },
                );
                rules.push(vec![Statement::RandomMap {
                    map,
                    count: many.len() as u32,
                }]);
            }
        }
        let name = chain_name(prefix, key);
        self.add_chain(&name, rules);
        Some(name)
    }

    fn endpoint_chain(
        &mut self,
        key: &str,
        protocol: Protocol,
        target: Target,
        affinity: Option<Duration>,
    ) -> String {
        let (address, port) = target;
        let name = chain_name("endpoint", &format!("{key}/{address}/{port}"));
        // A pod that reaches itself through a service would see its own address as the source.
        let mut rules = vec![vec![
            Statement::Source(Cidr::host(address)),
            Statement::Mark(MASQUERADE_BIT),
        ]];
        if let Some(timeout) = affinity {
            let set = affinity_set(key, target, timeout);
            rules.push(vec![Statement::Remember(set.clone())]);
            self.ruleset.sets.insert(set, Set::Remembered(timeout));
        }
        rules.push(vec![
            Statement::Protocol(protocol),
            Statement::Dnat(address, port),
        ]);
        self.add_chain(&name, rules);
        name
    }

    /// External traffic that must stay on this node and keep its source. Pods and the node itself count
    /// as inside and may go anywhere.
    fn external_local(&mut self, key: &str, cluster: &Option<String>, local: Option<&str>) -> String {
        let name = chain_name("external", key);
        let mut rules = Vec::new();
        if let Some(cluster) = cluster {
            if let Some(pods) = self.config.pods() {
                rules.push(vec![Statement::Source(pods), goto(cluster)]);
            }
            rules.push(vec![Statement::SourceLocal, Statement::Mark(MASQUERADE_BIT)]);
            rules.push(vec![Statement::SourceLocal, goto(cluster)]);
        }
        rules.push(vec![match local {
            Some(local) => goto(local),
            None => Statement::Verdict(Verdict::Drop),
        }]);
        self.add_chain(&name, rules);
        name
    }

    fn source_ranges(&mut self, key: &str, behind: &str, ranges: Vec<Cidr>) -> String {
        let name = chain_name("firewall", key);
        let mut rules: Vec<Rule> = ranges
            .into_iter()
            .map(|range| vec![Statement::Source(range), goto(behind)])
            .collect();
        rules.push(vec![Statement::Verdict(Verdict::Drop)]);
        self.add_chain(&name, rules);
        name
    }

    fn add_chain(&mut self, name: &str, rules: Vec<Rule>) {
        self.ruleset
            .chains
            .insert(name.to_string(), Chain { base: None, rules });
    }

    /// The first service keeps an address and port that two services claim.
    fn add_element(&mut self, map: &str, key: Key, to: &Destination) {
        let verdict = match to {
            Destination::Chain(chain) => Verdict::Goto(chain.clone()),
            Destination::None(verdict) => verdict.clone(),
        };
        if let Some(map) = self.ruleset.maps.get_mut(map) {
            map.elements.entry(key).or_insert(verdict);
        }
    }
}

fn port_of(port: &ServicePort) -> Option<(Protocol, u16)> {
    let protocol = Protocol::parse(port.protocol.as_deref().unwrap_or("TCP"))?;
    Some((
        protocol,
        u16::try_from(port.port).ok().filter(|number| *number > 0)?,
    ))
}

/// A name within the kernel's limits that tells a reader whose it is.
fn chain_name(prefix: &str, key: &str) -> String {
    // FNV-1a over the whole key keeps names apart that are cut off to be equal.
    let hash = key.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut name = format!("{prefix}-{:08x}-{key}", (hash >> 32) ^ (hash & 0xffff_ffff));
    name.truncate(120);
    name
}

/// The timeout is part of the name, because a set's cannot be changed.
fn affinity_set(key: &str, (address, port): Target, timeout: Duration) -> String {
    chain_name(
        "affinity",
        &format!("{key}/{address}/{port}/{}s", timeout.as_secs()),
    )
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
