//! The plugin `kubernetes` as a pure function: a question below its zones and the cluster's records give an answer, by
//! the Kubernetes DNS specification 1.1 and, where that is silent, as CoreDNS answers.

use crate::names::{Fall, longest, reverse_address};
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::rdata::{CNAME, NS, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use std::collections::{BTreeSet, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

const SPECIFICATION: &str = "1.1.0";
/// COMPAT: what CoreDNS sets for `dns-version`.
const VERSION_TTL: u32 = 28800;
/// COMPAT: the SOA itself is kept no longer than this.
const MAX_SOA_TTL: u32 = 300;
/// Labels below the zone that a name of the cluster has at most: `_port._protocol.service.namespace.svc`.
const MAX_DEPTH: usize = 5;

/// What the zone needs to know of the cluster.
pub trait Records {
    fn namespace_exists(&self, namespace: &str) -> bool;
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>>;
    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<Slice>>;
    /// Name and namespace of the service that has this cluster IP.
    fn service_at(&self, address: IpAddr) -> Option<(String, String)>;
    /// The slices with an endpoint of this address.
    fn slices_at(&self, address: IpAddr) -> Vec<Arc<Slice>>;
}

/// A cluster with nothing in it.
pub struct Nothing;

impl Records for Nothing {
    fn namespace_exists(&self, _: &str) -> bool {
        false
    }

    fn service(&self, _: &str, _: &str) -> Option<Arc<Service>> {
        None
    }

    fn slices(&self, _: &str, _: &str) -> Vec<Arc<Slice>> {
        Vec::new()
    }

    fn service_at(&self, _: IpAddr) -> Option<(String, String)> {
        None
    }

    fn slices_at(&self, _: IpAddr) -> Vec<Arc<Slice>> {
        Vec::new()
    }
}

#[derive(Debug, Clone, Default)]
pub struct Service {
    /// Empty for a headless service.
    pub cluster_ips: Vec<IpAddr>,
    pub external_name: Option<String>,
    pub ports: Vec<Port>,
    pub publish_not_ready: bool,
}

impl Service {
    fn is_headless(&self) -> bool {
        self.cluster_ips.is_empty()
    }
}

/// Name and protocol are in lower case.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Port {
    pub name: String,
    pub protocol: String,
    pub port: u16,
}

/// The endpoints of one EndpointSlice.
#[derive(Debug, Clone, Default)]
pub struct Slice {
    pub namespace: String,
    pub service: String,
    pub ports: Vec<Port>,
    pub endpoints: Vec<Endpoint>,
}

#[derive(Debug, Clone)]
pub struct Endpoint {
    pub address: IpAddr,
    /// In lower case.
    pub hostname: Option<String>,
    pub pod: Option<String>,
    pub ready: bool,
}

/// An answer to one question.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub code: ResponseCode,
    pub records: Vec<Record>,
    pub additionals: Vec<Record>,
    /// The SOA that says how long "no" may be remembered.
    pub authority: Option<Record>,
}

impl Answer {
    fn code(code: ResponseCode) -> Answer {
        Answer {
            code,
            records: Vec::new(),
            additionals: Vec::new(),
            authority: None,
        }
    }
}

/// The options of the plugin.
#[derive(Debug, Clone, PartialEq)]
pub struct Kubernetes {
    /// In lower case; the first is the domain of reverse answers.
    pub zones: Vec<Name>,
    /// Zones under `in-addr.arpa.` and `ip6.arpa.`
    pub reverse: Vec<Name>,
    /// `pods insecure`: any name with the form of an address is that address.
    pub pods: bool,
    pub ttl: u32,
    pub fall: Fall,
    /// Those that are answered for; empty for all.
    pub namespaces: BTreeSet<String>,
    pub endpoint_pod_names: bool,
    pub ignore_empty_service: bool,
}

/// What a name leads to.
enum Target {
    Address {
        address: IpAddr,
        port: u16,
        /// The label below the service's name, for endpoints.
        host: Option<String>,
    },
    Alias(Name),
}

/// What the labels below the zone ask for.
#[derive(Default)]
struct Wanted<'l> {
    port: &'l str,
    protocol: &'l str,
    endpoint: Option<&'l str>,
    service: &'l str,
    namespace: &'l str,
}

impl Wanted<'_> {
    fn matches(&self, port: &Port) -> bool {
        (self.port.is_empty() || self.port == port.name)
            && (self.protocol.is_empty() || self.protocol == port.protocol)
    }
}

impl Kubernetes {
    /// The answer, or `None` if the name is none of the cluster's business and the next plugin should be asked.
    pub fn answer(&self, name: &Name, kind: RecordType, records: &impl Records) -> Option<Answer> {
        let lower = name.to_lowercase();
        let found = match longest(&self.zones, &lower) {
            Some(zone) => self.forward(zone, name, &lower, kind, records),
            None => self.reverse(longest(&self.reverse, &lower)?, name, &lower, kind, records),
        };
        let unknown = found.code == ResponseCode::NXDomain;
        (!unknown || !self.fall.through(&lower)).then_some(found)
    }

    fn forward(
        &self,
        zone: &Name,
        name: &Name,
        lower: &Name,
        kind: RecordType,
        records: &impl Records,
    ) -> Answer {
        if matches!(kind, RecordType::AXFR | RecordType::IXFR) {
            return Answer::code(ResponseCode::Refused);
        }
        let depth = usize::from(lower.num_labels() - zone.num_labels());
        if depth > MAX_DEPTH {
            return self.negative(zone, ResponseCode::NXDomain);
        }
        let labels: Result<Vec<&str>, _> = lower.iter().take(depth).map(std::str::from_utf8).collect();
        let Ok(labels) = labels else {
            return self.negative(zone, ResponseCode::NXDomain);
        };
        let (wanted, found) = match labels[..] {
            [] if kind == RecordType::SOA => {
                return self.positive(zone, vec![self.soa(zone)]);
            }
            [] if kind == RecordType::NS => return self.name_servers(zone, name, records),
            [] | ["svc"] | ["pod"] => (Wanted::default(), Some(Vec::new())),
            ["dns-version"] if kind == RecordType::TXT => {
                let text = RData::TXT(TXT::new(vec![SPECIFICATION.to_owned()]));
                return self.positive(zone, vec![Record::from_rdata(name.clone(), VERSION_TTL, text)]);
            }
            ["dns-version"] => (Wanted::default(), Some(Vec::new())),
            ["ns", "dns"] => (Wanted::default(), Some(name_server_addresses(records))),
            [namespace, "svc" | "pod"] => {
                let exists = self.shows(namespace, records);
                (Wanted::default(), exists.then(Vec::new))
            }
            [dashed, namespace, "pod"] => {
                let found = self.pod(dashed, namespace, records);
                (Wanted::default(), found)
            }
            [ref rest @ .., service, namespace, "svc"] => {
                let wanted = Wanted {
                    service,
                    namespace,
                    ..match rest[..] {
                        [port, protocol] => Wanted {
                            // COMPAT: the underscores may be missing.
                            port: port.strip_prefix('_').unwrap_or(port),
                            protocol: protocol.strip_prefix('_').unwrap_or(protocol),
                            ..Wanted::default()
                        },
                        [endpoint] => Wanted {
                            endpoint: Some(endpoint),
                            ..Wanted::default()
                        },
                        _ => Wanted::default(),
                    }
                };
                let found = self.service(&wanted, records);
                (wanted, found)
            }
            _ => (Wanted::default(), None),
        };
        match found {
            None => self.negative(zone, ResponseCode::NXDomain),
            Some(targets) if kind == RecordType::SRV => self.srv(zone, name, &wanted, &targets),
            Some(targets) => {
                let records = self.records(name, kind, targets);
                self.positive(zone, records)
            }
        }
    }

    fn shows(&self, namespace: &str, records: &impl Records) -> bool {
        (self.namespaces.is_empty() || self.namespaces.contains(namespace))
            && records.namespace_exists(namespace)
    }

    /// COMPAT: any label with the form of an address answers with that address in an existing namespace.
    fn pod(&self, dashed: &str, namespace: &str, records: &impl Records) -> Option<Vec<Target>> {
        if !self.pods || !self.shows(namespace, records) {
            return None;
        }
        let v4 = dashed.replace('-', ".").parse::<Ipv4Addr>().map(IpAddr::V4);
        let address = v4
            .or_else(|_| dashed.replace('-', ":").parse::<Ipv6Addr>().map(IpAddr::V6))
            .ok()?;
        Some(vec![Target::Address {
            address,
            port: 0,
            host: None,
        }])
    }

    /// What a name of a service leads to; `None` if there is no such name.
    fn service(&self, wanted: &Wanted<'_>, records: &impl Records) -> Option<Vec<Target>> {
        if !self.shows(wanted.namespace, records) {
            return None;
        }
        let service = records.service(wanted.namespace, wanted.service)?;
        if let Some(target) = &service.external_name {
            let plain = wanted.endpoint.is_none() && wanted.port.is_empty() && wanted.protocol.is_empty();
            // COMPAT: an address is no name that an alias could lead to.
            let is_address = target.parse::<IpAddr>().is_ok();
            let mut alias = Name::from_ascii(target).ok().filter(|_| plain && !is_address)?;
            alias.set_fqdn(true);
            return Some(vec![Target::Alias(alias)]);
        }
        let mut found = Vec::new();
        let from_endpoints = service.is_headless() || wanted.endpoint.is_some();
        if from_endpoints || self.ignore_empty_service {
            let slices = records.slices(wanted.namespace, wanted.service);
            let published = |endpoint: &&Endpoint| endpoint.ready || service.publish_not_ready;
            if !from_endpoints && !slices.iter().any(|s| s.endpoints.iter().any(|e| published(&e))) {
                return None;
            }
            for slice in slices.iter().filter(|_| from_endpoints) {
                for endpoint in slice.endpoints.iter().filter(published) {
                    let host = self.host(endpoint);
                    if wanted.endpoint.is_some_and(|wanted| wanted != host) {
                        continue;
                    }
                    let at = |port: u16| Target::Address {
                        address: endpoint.address,
                        port,
                        host: Some(host.clone()),
                    };
                    let ports = slice.ports.iter().filter(|port| wanted.matches(port));
                    found.extend(ports.map(|port| at(port.port)));
                    // A headless service may have no ports; its endpoints have addresses all the same.
                    if slice.ports.is_empty() && wanted.port.is_empty() && wanted.protocol.is_empty() {
                        found.push(at(0));
                    }
                }
            }
        }
        if !from_endpoints {
            for port in service.ports.iter().filter(|port| wanted.matches(port)) {
                found.extend(service.cluster_ips.iter().map(|address| Target::Address {
                    address: *address,
                    port: port.port,
                    host: None,
                }));
            }
        }
        // COMPAT: a headless service without endpoints has no name.
        (!found.is_empty()).then_some(found)
    }

    /// The label of an endpoint below its service's name: the pod's hostname, or its address with dashes.
    fn host(&self, endpoint: &Endpoint) -> String {
        let pod = endpoint.pod.as_ref().filter(|_| self.endpoint_pod_names);
        if let Some(name) = endpoint.hostname.as_ref().or(pod) {
            return name.clone();
        }
        let mut dashed = endpoint.address.to_string().replace(['.', ':'], "-");
        if dashed.ends_with('-') {
            dashed.push('0');
        }
        dashed
    }

    fn records(&self, name: &Name, kind: RecordType, targets: Vec<Target>) -> Vec<Record> {
        let mut seen = HashSet::new();
        let data = targets.into_iter().filter_map(|target| match (target, kind) {
            (Target::Address { address, .. }, RecordType::A) if address.is_ipv4() => {
                seen.insert(address).then(|| address_data(address))
            }
            (Target::Address { address, .. }, RecordType::AAAA) if address.is_ipv6() => {
                seen.insert(address).then(|| address_data(address))
            }
            (
                Target::Alias(alias),
                RecordType::A | RecordType::AAAA | RecordType::CNAME | RecordType::TXT,
            ) => Some(RData::CNAME(CNAME(alias))),
            _ => None,
        });
        data.map(|data| Record::from_rdata(name.clone(), self.ttl, data))
            .collect()
    }

    fn srv(&self, zone: &Name, name: &Name, wanted: &Wanted<'_>, targets: &[Target]) -> Answer {
        let mut answer = Answer::code(ResponseCode::NoError);
        let addresses = targets
            .iter()
            .filter(|target| matches!(target, Target::Address { port, .. } if *port != 0))
            .count();
        // COMPAT: CoreDNS divides among all addresses, also where two families share a record.
        let weight = u16::try_from(100 / addresses.max(1)).unwrap_or(1).max(1);
        let (mut of_ports, mut of_addresses) = (HashSet::new(), HashSet::new());
        let base = format!("{}.{}.svc", wanted.service, wanted.namespace);
        for target in targets {
            let Target::Address { address, port, host } = target else {
                continue;
            };
            let label = host.iter().map(|host| format!("{host}.")).collect::<String>();
            let full = Name::from_ascii(format!("{label}{base}")).and_then(|n| n.append_domain(zone));
            let (Ok(full), 1..) = (full, *port) else { continue };
            if of_ports.insert((host, *port)) {
                let data = RData::SRV(SRV::new(0, weight, *port, full.clone()));
                answer
                    .records
                    .push(Record::from_rdata(name.clone(), self.ttl, data));
            }
            if of_addresses.insert((host, *address)) {
                let data = address_data(*address);
                answer.additionals.push(Record::from_rdata(full, self.ttl, data));
            }
        }
        if answer.records.is_empty() {
            return self.negative(zone, ResponseCode::NoError);
        }
        answer
    }

    fn reverse(
        &self,
        zone: &Name,
        name: &Name,
        lower: &Name,
        kind: RecordType,
        records: &impl Records,
    ) -> Answer {
        let address = reverse_address(lower).filter(|_| kind == RecordType::PTR);
        let names = address.map(|address| self.names_of(address, records));
        let found: Vec<Record> = names
            .into_iter()
            .flatten()
            .map(|target| Record::from_rdata(name.clone(), self.ttl, RData::PTR(PTR(target))))
            .collect();
        match found.is_empty() {
            true => self.negative(zone, ResponseCode::NXDomain),
            false => self.positive(zone, found),
        }
    }

    fn names_of(&self, address: IpAddr, records: &impl Records) -> Vec<Name> {
        let Some(domain) = self.zones.first() else {
            return Vec::new();
        };
        let full = |text: String| Name::from_ascii(text).and_then(|n| n.append_domain(domain)).ok();
        let allowed = |namespace: &String| self.namespaces.is_empty() || self.namespaces.contains(namespace);
        if let Some((service, namespace)) = records.service_at(address).filter(|(_, ns)| allowed(ns)) {
            return full(format!("{service}.{namespace}.svc")).into_iter().collect();
        }
        let mut names = Vec::new();
        for slice in records
            .slices_at(address)
            .iter()
            .filter(|s| allowed(&s.namespace))
        {
            let service = records.service(&slice.namespace, &slice.service);
            let publish = service.is_some_and(|service| service.publish_not_ready);
            for endpoint in slice.endpoints.iter().filter(|e| e.ready || publish) {
                if endpoint.address == address {
                    let host = self.host(endpoint);
                    names.extend(full(format!("{host}.{}.{}.svc", slice.service, slice.namespace)));
                }
            }
        }
        let mut seen = HashSet::new();
        names.retain(|name| seen.insert(name.clone()));
        names
    }

    /// COMPAT: the name server of the zone is the service in front of cluster DNS.
    fn name_servers(&self, zone: &Name, name: &Name, records: &impl Records) -> Answer {
        let server = Name::from_ascii("kube-dns.kube-system.svc").and_then(|n| n.append_domain(zone));
        let (Ok(server), addresses) = (server, name_server_addresses(records)) else {
            return self.negative(zone, ResponseCode::NoError);
        };
        if addresses.is_empty() {
            return self.negative(zone, ResponseCode::NoError);
        }
        let mut answer = Answer::code(ResponseCode::NoError);
        let data = RData::NS(NS(server.clone()));
        answer.records = vec![Record::from_rdata(name.clone(), self.ttl, data)];
        for target in addresses {
            if let Target::Address { address, .. } = target {
                let record = Record::from_rdata(server.clone(), self.ttl, address_data(address));
                answer.additionals.push(record);
            }
        }
        answer
    }

    fn positive(&self, zone: &Name, records: Vec<Record>) -> Answer {
        if records.is_empty() {
            return self.negative(zone, ResponseCode::NoError);
        }
        Answer {
            records,
            ..Answer::code(ResponseCode::NoError)
        }
    }

    fn negative(&self, zone: &Name, code: ResponseCode) -> Answer {
        Answer {
            authority: Some(self.soa(zone)),
            ..Answer::code(code)
        }
    }

    fn soa(&self, zone: &Name) -> Record {
        let below = |label: &str| {
            let name = Name::from_ascii(label).and_then(|name| name.append_domain(zone));
            name.unwrap_or_else(|_| zone.clone())
        };
        let soa = SOA::new(
            below("ns.dns"),
            below("hostmaster"),
            1,
            7200,
            1800,
            86_400,
            self.ttl,
        );
        Record::from_rdata(zone.clone(), self.ttl.min(MAX_SOA_TTL), RData::SOA(soa))
    }
}

fn name_server_addresses(records: &impl Records) -> Vec<Target> {
    let service = records.service("kube-system", "kube-dns");
    let addresses = service
        .map(|service| service.cluster_ips.clone())
        .unwrap_or_default();
    let target = |address| Target::Address {
        address,
        port: 0,
        host: None,
    };
    addresses.into_iter().map(target).collect()
}

pub fn address_data(address: IpAddr) -> RData {
    match address {
        IpAddr::V4(v4) => RData::A(v4.into()),
        IpAddr::V6(v6) => RData::AAAA(v6.into()),
    }
}

#[cfg(test)]
#[path = "zone_tests.rs"]
pub(crate) mod tests;
