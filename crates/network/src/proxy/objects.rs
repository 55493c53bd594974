//! What the proxy needs to know of the API's objects, and how it is read. No I/O.

use std::borrow::Cow;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{ObjectReference, Service, ServicePort};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use serde::{Deserialize, Deserializer};
use skiff_client::reference;
use skiff_meta::net::Cidr;

use crate::load_balancer::pool_addresses;

/// The service a slice belongs to.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// A slice with this label, whatever its value, is for DNS alone.
const HEADLESS: &str = "service.kubernetes.io/headless";
/// A service with this label, whatever its value, is another proxy's.
const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

const DEFAULT_AFFINITY_SECONDS: u32 = 10800;
const MAX_AFFINITY_SECONDS: u32 = 86400;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    pub fn parse(name: &str) -> Option<Protocol> {
        match name {
            "TCP" => Some(Protocol::Tcp),
            "UDP" => Some(Protocol::Udp),
            "SCTP" => Some(Protocol::Sctp),
            _ => None,
        }
    }

    pub fn number(self) -> u8 {
        match self {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
            Protocol::Sctp => 132,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
        }
    }
}

/// A service as the proxy sees it.
#[derive(Debug, Clone)]
pub struct ServiceFacts {
    pub reference: ObjectReference,
    /// Seconds since 1970; the older one keeps what two services claim.
    pub created: i64,
    /// False if this proxy has nothing to do with it. Its cluster IPs are its own all the same.
    pub served: bool,
    pub cluster_ips: Vec<IpAddr>,
    pub ports: Vec<PortFacts>,
    /// How long a client stays with its endpoint, in seconds.
    pub affinity: Option<u32>,
    pub internal_local: bool,
    pub external_local: bool,
    pub external_ips: Vec<ExternalIp>,
    /// Those of them that are nobody's but the load balancer's: a node has one while it announces it.
    pub pool_ips: Vec<IpAddr>,
    pub health_port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortFacts {
    pub name: String,
    pub protocol: Protocol,
    pub number: u16,
    pub node_port: Option<u16>,
}

/// An address that a service wants, with the sources that may use it where that is limited.
#[derive(Debug, Clone)]
pub struct ExternalIp {
    pub address: IpAddr,
    pub origin: Origin,
    pub sources: Option<Vec<Cidr>>,
}

/// In order of trust: who may write a service's status can do more than who may write a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    LoadBalancer,
    Spec,
}

impl ServiceFacts {
    pub fn of(service: &Service) -> ServiceFacts {
        let meta = &service.metadata;
        let spec = service.spec.clone().unwrap_or_default();
        let labels = meta.labels.as_ref();
        let elsewhere = labels.is_some_and(|labels| labels.contains_key(PROXY_NAME));
        let local = |policy: &Option<String>| policy.as_deref() == Some("Local");
        let affinity = (spec.session_affinity.as_deref() == Some("ClientIP")).then(|| {
            let config = spec.session_affinity_config.as_ref();
            let seconds = config.and_then(|config| config.client_ip.as_ref()?.timeout_seconds);
            let seconds = seconds.and_then(|seconds| u32::try_from(seconds).ok());
            let seconds = seconds.unwrap_or(DEFAULT_AFFINITY_SECONDS);
            seconds.clamp(1, MAX_AFFINITY_SECONDS)
        });
        let external_local = local(&spec.external_traffic_policy);
        let health_port = spec.health_check_node_port.and_then(port_number);
        ServiceFacts {
            reference: reference(service),
            created: meta
                .creation_timestamp
                .as_ref()
                .map_or(0, |time| time.0.as_second()),
            served: !elsewhere && spec.type_.as_deref() != Some("ExternalName"),
            cluster_ips: cluster_ips(service),
            ports: spec.ports.iter().flatten().filter_map(PortFacts::of).collect(),
            affinity,
            internal_local: local(&spec.internal_traffic_policy),
            external_local,
            external_ips: external_ips(service),
            pool_ips: pool_addresses(service),
            health_port: health_port
                .filter(|_| external_local && spec.type_.as_deref() == Some("LoadBalancer")),
        }
    }
}

impl PortFacts {
    fn of(port: &ServicePort) -> Option<PortFacts> {
        Some(PortFacts {
            name: port.name.clone().unwrap_or_default(),
            protocol: Protocol::parse(port.protocol.as_deref().unwrap_or("TCP"))?,
            number: port_number(port.port)?,
            node_port: port.node_port.and_then(port_number),
        })
    }
}

fn port_number(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|number| *number > 0)
}

/// A headless service's `None` is no address and falls out.
fn cluster_ips(service: &Service) -> Vec<IpAddr> {
    let Some(spec) = &service.spec else {
        return Vec::new();
    };
    let all = spec.cluster_ips.iter().flatten().chain(spec.cluster_ip.iter());
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in all.filter_map(|ip| ip.parse().ok()) {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses
}

fn external_ips(service: &Service) -> Vec<ExternalIp> {
    let Some(spec) = &service.spec else {
        return Vec::new();
    };
    let of_spec = spec.external_ips.iter().flatten().filter_map(|ip| {
        Some(ExternalIp {
            address: ip.parse().ok()?,
            origin: Origin::Spec,
            sources: None,
        })
    });
    let mut addresses: Vec<ExternalIp> = of_spec.collect();
    if spec.type_.as_deref() != Some("LoadBalancer") {
        return addresses;
    }
    let ranges = spec.load_balancer_source_ranges.iter().flatten();
    let sources: Vec<Cidr> = ranges.filter_map(|range| range.trim().parse().ok()).collect();
    let limited = spec
        .load_balancer_source_ranges
        .as_ref()
        .is_some_and(|ranges| !ranges.is_empty());
    let status = service.status.iter().flat_map(|status| &status.load_balancer);
    for ingress in status.flat_map(|balancer| balancer.ingress.iter().flatten()) {
        // With `Proxy` the load balancer answers by itself and traffic for its address must reach it.
        if ingress.ip_mode.as_deref() == Some("Proxy") {
            continue;
        }
        if let Some(address) = ingress.ip.as_deref().and_then(|ip| ip.parse::<IpAddr>().ok()) {
            let of_family = |range: &&Cidr| range.is_ipv4() == address.is_ipv4();
            addresses.push(ExternalIp {
                address,
                origin: Origin::LoadBalancer,
                sources: limited.then(|| sources.iter().filter(of_family).copied().collect()),
            });
        }
    }
    addresses
}

/// The parts of an EndpointSlice that are looked at: every node follows those of all services.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(from = "WireSlice")]
pub struct ProxySlice {
    pub metadata: ObjectMeta,
    address_type: String,
    pub endpoints: Vec<SliceEndpoint>,
    pub ports: Vec<SlicePort>,
    /// When the change happened that made this version, in seconds since 1970.
    pub changed_at: Option<f64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireSlice {
    metadata: ObjectMeta,
    #[serde(default)]
    address_type: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    endpoints: Vec<SliceEndpoint>,
    #[serde(default, deserialize_with = "null_is_empty")]
    ports: Vec<SlicePort>,
}

impl From<WireSlice> for ProxySlice {
    fn from(slice: WireSlice) -> Self {
        let annotations = slice.metadata.annotations.as_ref();
        let changed_at = annotations
            .and_then(|annotations| annotations.get(TRIGGER_TIME))
            .and_then(|time| time.parse::<Timestamp>().ok())
            .map(|time| time.as_millisecond() as f64 / 1000.0);
        ProxySlice {
            metadata: slice.metadata,
            address_type: slice.address_type,
            endpoints: slice.endpoints,
            ports: slice.ports,
            changed_at,
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceEndpoint {
    #[serde(default, rename = "addresses", deserialize_with = "first_address")]
    pub address: Option<IpAddr>,
    #[serde(default)]
    conditions: Conditions,
    #[serde(default)]
    pub node_name: Option<String>,
    #[serde(default)]
    hints: Option<Hints>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Conditions {
    #[serde(default)]
    ready: Option<bool>,
    #[serde(default)]
    serving: Option<bool>,
    #[serde(default)]
    terminating: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Hints {
    #[serde(default, deserialize_with = "null_is_empty")]
    for_nodes: Vec<Hint>,
    #[serde(default, deserialize_with = "null_is_empty")]
    for_zones: Vec<Hint>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Hint {
    #[serde(default)]
    name: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct SlicePort {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    port: Option<i32>,
    #[serde(default)]
    protocol: Option<String>,
}

fn null_is_empty<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// The first address is the endpoint; the others are aliases nobody uses.
fn first_address<'de, D: Deserializer<'de>>(from: D) -> Result<Option<IpAddr>, D::Error> {
    let addresses: Option<Vec<Cow<'de, str>>> = Option::deserialize(from)?;
    let first = addresses.and_then(|addresses| addresses.into_iter().next());
    // The API refuses these; here they would lead into the node itself.
    let usable = |address: &IpAddr| !address.is_loopback() && !address.is_unspecified();
    Ok(first.and_then(|text| text.parse().ok()).filter(usable))
}

impl ProxySlice {
    /// The service whose traffic the slice's endpoints take, if any.
    pub fn service(&self) -> Option<&str> {
        let labels = self.metadata.labels.as_ref()?;
        let served = matches!(self.address_type.as_str(), "IPv4" | "IPv6") && !labels.contains_key(HEADLESS);
        labels.get(SERVICE_NAME).filter(|_| served).map(String::as_str)
    }

    pub fn is_ipv4(&self) -> bool {
        self.address_type == "IPv4"
    }
}

impl SlicePort {
    /// The number, if it is the port of this name and protocol.
    pub fn number(&self, name: &str, protocol: Protocol) -> Option<u16> {
        let same = self.name.as_deref().unwrap_or_default() == name
            && Protocol::parse(self.protocol.as_deref().unwrap_or("TCP")) == Some(protocol);
        self.port.filter(|_| same).and_then(port_number)
    }
}

impl SliceEndpoint {
    pub fn ready(&self) -> bool {
        self.conditions.ready.unwrap_or(true)
    }

    pub fn serving(&self) -> bool {
        self.conditions.serving.unwrap_or_else(|| self.ready())
    }

    pub fn terminating(&self) -> bool {
        self.conditions.terminating.unwrap_or(false)
    }

    /// Whether it is meant for certain nodes, and whether for this one.
    pub fn for_node(&self, node: &str) -> (bool, bool) {
        meant_for(self.hints.as_ref().map(|hints| &hints.for_nodes), node)
    }

    pub fn for_zone(&self, zone: &str) -> (bool, bool) {
        meant_for(self.hints.as_ref().map(|hints| &hints.for_zones), zone)
    }
}

fn meant_for(hints: Option<&Vec<Hint>>, name: &str) -> (bool, bool) {
    hints.map_or((false, false), |hints| {
        (!hints.is_empty(), hints.iter().any(|hint| hint.name == name))
    })
}

impl Resource for ProxySlice {
    type DynamicType = ();
    type Scope = k8s_openapi::NamespaceResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        EndpointSlice::kind(&())
    }
    fn group(_: &()) -> Cow<'_, str> {
        EndpointSlice::group(&())
    }
    fn version(_: &()) -> Cow<'_, str> {
        EndpointSlice::version(&())
    }
    fn plural(_: &()) -> Cow<'_, str> {
        EndpointSlice::plural(&())
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
