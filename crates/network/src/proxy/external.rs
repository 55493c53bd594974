//! Addresses that services claim from outside the service network: `externalIPs`, which whoever may write a
//! service chooses freely, and those that a load balancer has given. Neither may take what belongs to others: the
//! cluster's own addresses, or an address and port that another service has already.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{ObjectReference, Service};
use skiff_client::reference;
use skiff_meta::net::Cidr;

use super::ProxyConfig;
use super::endpoints::Target;
use super::ruleset::Protocol;

/// Refusals that are told of; services can ask for any number of addresses.
const MAX_REFUSALS: usize = 1000;

/// An address that a service wants, with the sources that may use it where that is limited.
#[derive(Debug)]
pub struct ExternalIp {
    pub address: IpAddr,
    pub origin: Origin,
    pub ranges: Option<Vec<Cidr>>,
}

/// In order of trust: who may write a service's status can do more than who may write a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    LoadBalancer,
    Spec,
}

/// An address that a service does not get, and why.
#[derive(Debug)]
pub struct Refusal {
    pub service: ObjectReference,
    pub message: String,
}

/// Who has which address and port.
pub struct Claims<'a> {
    config: &'a ProxyConfig,
    /// Cluster IPs of all services, whoever serves them.
    cluster_ips: BTreeMap<IpAddr, &'a Service>,
    api_servers: Vec<Target>,
    taken: BTreeMap<(IpAddr, Protocol, u16), &'a Service>,
    pub refusals: Vec<Refusal>,
}

impl<'a> Claims<'a> {
    pub fn new(
        config: &'a ProxyConfig,
        services: impl Iterator<Item = &'a Service>,
        api_servers: Vec<Target>,
    ) -> Claims<'a> {
        let mut cluster_ips = BTreeMap::new();
        for service in services {
            for address in cluster_ips_of(service) {
                cluster_ips.entry(address).or_insert(service);
            }
        }
        Claims {
            config,
            cluster_ips,
            api_servers,
            taken: BTreeMap::new(),
            refusals: Vec::new(),
        }
    }

    /// Whether `service` gets the address and port; if not, the refusal is noted. Services ask in the order of
    /// their right.
    pub fn take(&mut self, service: &'a Service, wanted: &ExternalIp, protocol: Protocol, port: u16) -> bool {
        let key = (wanted.address, protocol, port);
        let why = match self.taken.get(&key) {
            // Named twice by one service.
            Some(other) if std::ptr::eq(*other, service) => return false,
            Some(other) => Some(format!("service {} has it already", full_name(other))),
            None => self.belongs_to(wanted.address, port),
        };
        let Some(why) = why else {
            self.taken.insert(key, service);
            return true;
        };
        let field = match wanted.origin {
            Origin::Spec => "spec.externalIPs",
            Origin::LoadBalancer => "status.loadBalancer.ingress",
        };
        if self.refusals.len() >= MAX_REFUSALS {
            return false;
        }
        self.refusals.push(Refusal {
            service: reference(service),
            message: format!(
                "{field}: {}:{port}/{} is not served: {why}",
                wanted.address,
                protocol.name()
            ),
        });
        false
    }

    /// Whose an address is, if it is not for services to choose.
    fn belongs_to(&self, address: IpAddr, port: u16) -> Option<String> {
        if let Some(owner) = self.cluster_ips.get(&address) {
            return Some(format!("it is the cluster IP of service {}", full_name(owner)));
        }
        let within = |networks: &[Cidr]| networks.iter().any(|network| network.contains(address));
        if within(&self.config.service_cidrs) {
            return Some("it is in the service network".to_string());
        }
        if within(&self.config.pod_cidrs) {
            return Some("it is in the pod network".to_string());
        }
        if self.api_servers.contains(&(address, port)) {
            return Some("it is the API server's".to_string());
        }
        let link_local = match address {
            IpAddr::V4(address) => address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        if address.is_loopback() || address.is_unspecified() || link_local {
            return Some("it is not an address that others reach".to_string());
        }
        None
    }
}

fn full_name(service: &Service) -> String {
    let meta = &service.metadata;
    format!(
        "{}/{}",
        meta.namespace.as_deref().unwrap_or_default(),
        meta.name.as_deref().unwrap_or_default()
    )
}

/// The IPv4 cluster IPs; a headless service's `None` is no address and falls out.
pub fn cluster_ips_of(service: &Service) -> impl Iterator<Item = IpAddr> {
    let spec = service.spec.iter();
    spec.flat_map(|spec| spec.cluster_ips.iter().flatten().chain(spec.cluster_ip.iter()))
        .filter_map(|ip| ip.parse().ok())
        .filter(IpAddr::is_ipv4)
}

/// What a service asks for.
pub fn external_ips(service: &Service) -> Vec<ExternalIp> {
    let Some(spec) = &service.spec else {
        return Vec::new();
    };
    let mut addresses: Vec<_> = spec
        .external_ips
        .iter()
        .flatten()
        .filter_map(|ip| {
            Some(ExternalIp {
                address: ip.parse().ok().filter(IpAddr::is_ipv4)?,
                origin: Origin::Spec,
                ranges: None,
            })
        })
        .collect();
    if spec.type_.as_deref() != Some("LoadBalancer") {
        return addresses;
    }
    let ranges: Vec<Cidr> = spec
        .load_balancer_source_ranges
        .iter()
        .flatten()
        .filter_map(|range| range.trim().parse().ok())
        .filter(|range: &Cidr| range.is_ipv4())
        .collect();
    let limited = spec
        .load_balancer_source_ranges
        .as_ref()
        .is_some_and(|ranges| !ranges.is_empty());
    let ingress = service
        .status
        .iter()
        .flat_map(|status| &status.load_balancer)
        .flat_map(|lb| lb.ingress.iter().flatten());
    for ingress in ingress {
        // With `Proxy` the load balancer answers by itself and traffic for its address must reach it.
        if ingress.ip_mode.as_deref() == Some("Proxy") {
            continue;
        }
        let address = ingress.ip.as_deref().and_then(|ip| ip.parse().ok());
        if let Some(address) = address.filter(IpAddr::is_ipv4) {
            addresses.push(ExternalIp {
                address,
                origin: Origin::LoadBalancer,
                ranges: limited.then(|| ranges.clone()),
            });
        }
    }
    addresses
}
