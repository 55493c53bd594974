//! The zone as a pure function: a question below the cluster domain and the cluster's records give an answer.

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::rdata::{CNAME, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// COMPAT: what kubeadm's CoreDNS sets.
const TTL: u32 = 30;
const NEGATIVE_TTL: u32 = 5;
const SPECIFICATION: &str = "1.1.0";

/// What the zone needs to know of the cluster.
pub trait Records {
    fn namespace_exists(&self, namespace: &str) -> bool;
    fn service(&self, namespace: &str, name: &str) -> Option<Service>;
    fn endpoints(&self, namespace: &str, service: &str) -> Vec<Endpoint>;
    /// (service, namespace, endpoint's host part if it is one) for an address.
    fn names_of(&self, address: IpAddr) -> Vec<(String, String, Option<String>)>;
}

#[derive(Debug, Clone, Default)]
pub struct Service {
    /// Empty for a headless service.
    pub cluster_ips: Vec<IpAddr>,
    pub external_name: Option<String>,
    pub ports: Vec<Port>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Port {
    pub name: String,
    /// Lower case.
    pub protocol: String,
    pub port: u16,
}

#[derive(Debug, Clone)]
pub struct Endpoint {
    pub address: IpAddr,
    pub hostname: Option<String>,
    pub ports: Vec<Port>,
}

impl Endpoint {
    /// The label below the service's name: the pod's hostname, or its address with dashes.
    pub fn host(&self) -> String {
        self.hostname
            .clone()
            .unwrap_or_else(|| self.address.to_string().replace(['.', ':'], "-"))
    }
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

pub struct Zone {
    /// The cluster domain in lower case, such as `cluster.local.`
    domain: Name,
}

impl Zone {
    pub fn new(domain: &str) -> Option<Self> {
        let mut domain = Name::from_ascii(domain.to_lowercase()).ok()?;
        domain.set_fqdn(true);
        Some(Self { domain })
    }

    /// The answer, or `None` if the name is none of the cluster's business and should be forwarded.
    pub fn answer(&self, name: &Name, kind: RecordType, records: &impl Records) -> Option<Answer> {
        let lower = name.to_lowercase();
        if let Some(address) = reverse_address(&lower) {
            let names = records.names_of(address);
            return (!names.is_empty()).then(|| self.reverse(name, kind, names));
        }
        if !self.domain.zone_of(&lower) {
            return None;
        }
        let depth = usize::from(lower.num_labels() - self.domain.num_labels());
        let labels: Vec<String> = lower
            .iter()
            .take(depth)
            .map(|l| String::from_utf8_lossy(l).into_owned())
            .collect();
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        let found = match labels[..] {
            [] | ["svc"] | ["pod"] => Some(Vec::new()),
            ["dns-version"] => Some(vec![RData::TXT(TXT::new(vec![SPECIFICATION.to_owned()]))]),
            [dashed, namespace, "pod"] => pod(dashed, namespace, records),
            [namespace, "svc" | "pod"] => records.namespace_exists(namespace).then(Vec::new),
            [service, namespace, "svc"] => self.service(service, namespace, records),
            [port, protocol, service, namespace, "svc"]
                if port.starts_with('_') && protocol.starts_with('_') =>
            {
                return Some(self.srv(
                    name,
                    kind,
                    (&port[1..], &protocol[1..]),
                    (service, namespace),
                    records,
                ));
            }
            [host, service, namespace, "svc"] => host_records(host, service, namespace, records),
            _ => None,
        };
        // COMPAT: a service without a port name in the question is asked for SRV too.
        if kind == RecordType::SRV
            && let [service, namespace, "svc"] = labels[..]
            && found.is_some()
        {
            return Some(self.srv(name, kind, ("", ""), (service, namespace), records));
        }
        Some(match found {
            None => self.negative(ResponseCode::NXDomain),
            Some(data) => self.positive(name, kind, data),
        })
    }

    fn positive(&self, name: &Name, kind: RecordType, data: Vec<RData>) -> Answer {
        let wanted =
            |d: &RData| d.record_type() == kind || kind == RecordType::ANY || matches!(d, RData::CNAME(_));
        let records: Vec<Record> = data
            .into_iter()
            .filter(wanted)
            .map(|d| Record::from_rdata(name.clone(), TTL, d))
            .collect();
        if records.is_empty() {
            return self.negative(ResponseCode::NoError);
        }
        Answer {
            code: ResponseCode::NoError,
            records,
            additionals: vec![],
            authority: None,
        }
    }

    fn negative(&self, code: ResponseCode) -> Answer {
        let below = |label: &str| Name::from_ascii(label).and_then(|n| n.append_domain(&self.domain));
        let authority = below("ns.dns")
            .and_then(|mname| Ok((mname, below("hostmaster")?)))
            .ok()
            .map(|(mname, rname)| {
                let soa = SOA::new(mname, rname, 1, 7200, 1800, 86_400, NEGATIVE_TTL);
                Record::from_rdata(self.domain.clone(), NEGATIVE_TTL, RData::SOA(soa))
            });
        Answer {
            code,
            records: vec![],
            additionals: vec![],
            authority,
        }
    }

    fn service(&self, name: &str, namespace: &str, records: &impl Records) -> Option<Vec<RData>> {
        let service = records.service(namespace, name)?;
        if let Some(target) = service.external_name {
            let mut target = Name::from_ascii(target).ok()?;
            target.set_fqdn(true);
            return Some(vec![RData::CNAME(CNAME(target))]);
        }
        if !service.cluster_ips.is_empty() {
            return Some(service.cluster_ips.into_iter().map(address_data).collect());
        }
        let mut addresses: Vec<IpAddr> = records
            .endpoints(namespace, name)
            .iter()
            .map(|e| e.address)
            .collect();
        addresses.sort();
        addresses.dedup();
        // COMPAT: a headless service without endpoints has no name.
        (!addresses.is_empty()).then(|| addresses.into_iter().map(address_data).collect())
    }

    /// SRV records for one port of a service, or all ports when `port` is empty.
    fn srv(
        &self,
        name: &Name,
        kind: RecordType,
        (port, protocol): (&str, &str),
        (service, namespace): (&str, &str),
        records: &impl Records,
    ) -> Answer {
        let Some(found) = records.service(namespace, service) else {
            return self.negative(ResponseCode::NXDomain);
        };
        let matches = |p: &Port| port.is_empty() || (p.name == port && p.protocol == protocol);
        let base = format!("{service}.{namespace}.svc");
        let mut targets: Vec<(String, u16, IpAddr)> = Vec::new();
        if found.cluster_ips.is_empty() {
            for endpoint in records.endpoints(namespace, service) {
                for p in endpoint.ports.iter().filter(|p| matches(p)) {
                    targets.push((format!("{}.{base}", endpoint.host()), p.port, endpoint.address));
                }
            }
        } else {
            for p in found.ports.iter().filter(|p| matches(p)) {
                targets.extend(found.cluster_ips.iter().map(|ip| (base.clone(), p.port, *ip)));
            }
        }
        if targets.is_empty() {
            return self.negative(ResponseCode::NXDomain);
        }
        if kind != RecordType::SRV && kind != RecordType::ANY {
            return self.negative(ResponseCode::NoError);
        }
        let weight = u16::try_from(100 / targets.len()).unwrap_or(1).max(1);
        let mut answer = Answer {
            code: ResponseCode::NoError,
            records: vec![],
            additionals: vec![],
            authority: None,
        };
        for (host, port, address) in targets {
            let Ok(target) = Name::from_ascii(&host).and_then(|n| n.append_domain(&self.domain)) else {
                continue;
            };
            answer
                .additionals
                .push(Record::from_rdata(target.clone(), TTL, address_data(address)));
            let data = RData::SRV(SRV::new(0, weight, port, target));
            answer.records.push(Record::from_rdata(name.clone(), TTL, data));
        }
        answer.additionals.dedup();
        answer
    }

    fn reverse(&self, name: &Name, kind: RecordType, names: Vec<(String, String, Option<String>)>) -> Answer {
        let data = names.into_iter().filter_map(|(service, namespace, host)| {
            let host = host.map(|h| format!("{h}.")).unwrap_or_default();
            let target = Name::from_ascii(format!("{host}{service}.{namespace}.svc")).ok()?;
            Some(RData::PTR(PTR(target.append_domain(&self.domain).ok()?)))
        });
        self.positive(name, kind, data.collect())
    }
}

fn address_data(address: IpAddr) -> RData {
    match address {
        IpAddr::V4(v4) => RData::A(v4.into()),
        IpAddr::V6(v6) => RData::AAAA(v6.into()),
    }
}

/// COMPAT: any address-shaped label answers with that address in an existing namespace (`pods insecure`).
fn pod(dashed: &str, namespace: &str, records: &impl Records) -> Option<Vec<RData>> {
    if !records.namespace_exists(namespace) {
        return None;
    }
    let v4 = dashed.replace('-', ".").parse::<Ipv4Addr>().map(IpAddr::V4);
    let address = v4
        .or_else(|_| dashed.replace('-', ":").parse::<Ipv6Addr>().map(IpAddr::V6))
        .ok()?;
    Some(vec![address_data(address)])
}

fn host_records(host: &str, service: &str, namespace: &str, records: &impl Records) -> Option<Vec<RData>> {
    records.service(namespace, service)?;
    let endpoints = records.endpoints(namespace, service);
    let found: Vec<RData> = endpoints
        .iter()
        .filter(|e| e.host() == host)
        .map(|e| address_data(e.address))
        .collect();
    (!found.is_empty()).then_some(found)
}

/// The address that a name under `in-addr.arpa.` or `ip6.arpa.` stands for.
fn reverse_address(name: &Name) -> Option<IpAddr> {
    let text = name.to_ascii();
    let text = text.trim_end_matches('.');
    if let Some(v4) = text.strip_suffix(".in-addr.arpa") {
        let parts: Vec<&str> = v4.rsplit('.').collect();
        return parts.join(".").parse::<Ipv4Addr>().ok().map(IpAddr::V4);
    }
    let v6 = text.strip_suffix(".ip6.arpa")?;
    let nibbles: String = v6.rsplit('.').collect();
    (nibbles.len() == 32)
        .then(|| u128::from_str_radix(&nibbles, 16).ok())
        .flatten()
        .map(|n| IpAddr::V6(n.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixture;

    impl Records for Fixture {
        fn namespace_exists(&self, namespace: &str) -> bool {
            namespace == "default"
        }

        fn service(&self, namespace: &str, name: &str) -> Option<Service> {
            let http = Port {
                name: "http".into(),
                protocol: "tcp".into(),
                port: 80,
            };
            match (namespace, name) {
                ("default", "web") => Some(Service {
                    cluster_ips: vec!["10.96.0.7".parse().unwrap()],
                    external_name: None,
                    ports: vec![http],
                }),
                ("default", "db") => Some(Service::default()),
                ("default", "empty") => Some(Service::default()),
                ("default", "out") => Some(Service {
                    external_name: Some("example.com".into()),
                    ..Service::default()
                }),
                _ => None,
            }
        }

        fn endpoints(&self, _namespace: &str, service: &str) -> Vec<Endpoint> {
            let endpoint = |address: &str, hostname: Option<&str>| Endpoint {
                address: address.parse().unwrap(),
                hostname: hostname.map(str::to_owned),
                ports: vec![Port {
                    name: "sql".into(),
                    protocol: "tcp".into(),
                    port: 5432,
                }],
            };
            if service == "db" {
                vec![endpoint("10.244.0.5", Some("db-0")), endpoint("10.244.0.6", None)]
            } else {
                vec![]
            }
        }

        fn names_of(&self, address: IpAddr) -> Vec<(String, String, Option<String>)> {
            if address.to_string() == "10.96.0.7" {
                vec![("web".into(), "default".into(), None)]
            } else {
                vec![]
            }
        }
    }

    fn ask(name: &str, kind: RecordType) -> Option<(ResponseCode, Vec<String>)> {
        let zone = Zone::new("cluster.local").unwrap();
        let answer = zone.answer(&Name::from_ascii(name).unwrap(), kind, &Fixture)?;
        assert_eq!(answer.records.is_empty(), answer.authority.is_some());
        Some((
            answer.code,
            answer.records.iter().map(|r| r.data.to_string()).collect(),
        ))
    }

    #[test]
    fn names_resolve_by_the_specification() {
        use RecordType::{A, AAAA, PTR, SRV, TXT};
        let ok = ResponseCode::NoError;
        let none: &[&str] = &[];
        for (name, kind, code, expected) in [
            ("web.default.svc.cluster.local.", A, ok, &["10.96.0.7"][..]),
            ("WEB.default.svc.Cluster.Local.", A, ok, &["10.96.0.7"]),
            ("web.default.svc.cluster.local.", AAAA, ok, none),
            (
                "db.default.svc.cluster.local.",
                A,
                ok,
                &["10.244.0.5", "10.244.0.6"],
            ),
            ("db-0.db.default.svc.cluster.local.", A, ok, &["10.244.0.5"]),
            ("10-244-0-6.db.default.svc.cluster.local.", A, ok, &["10.244.0.6"]),
            (
                "empty.default.svc.cluster.local.",
                A,
                ResponseCode::NXDomain,
                none,
            ),
            ("nope.default.svc.cluster.local.", A, ResponseCode::NXDomain, none),
            ("default.svc.cluster.local.", A, ok, none),
            ("nope.svc.cluster.local.", A, ResponseCode::NXDomain, none),
            ("out.default.svc.cluster.local.", A, ok, &["example.com."]),
            ("10-1-2-3.default.pod.cluster.local.", A, ok, &["10.1.2.3"]),
            ("x.default.pod.cluster.local.", A, ResponseCode::NXDomain, none),
            ("dns-version.cluster.local.", TXT, ok, &["1.1.0"]),
            (
                "7.0.96.10.in-addr.arpa.",
                PTR,
                ok,
                &["web.default.svc.cluster.local."],
            ),
            (
                "_http._tcp.web.default.svc.cluster.local.",
                SRV,
                ok,
                &["0 100 80 web.default.svc.cluster.local."],
            ),
            (
                "_nope._tcp.web.default.svc.cluster.local.",
                SRV,
                ResponseCode::NXDomain,
                none,
            ),
            (
                "_sql._tcp.db.default.svc.cluster.local.",
                SRV,
                ok,
                &[
                    "0 50 5432 db-0.db.default.svc.cluster.local.",
                    "0 50 5432 10-244-0-6.db.default.svc.cluster.local.",
                ],
            ),
        ] {
            let (found_code, found) = ask(name, kind).unwrap_or_else(|| panic!("{name} was not answered"));
            assert_eq!(
                (found_code, found.iter().map(String::as_str).collect::<Vec<_>>()),
                (code, expected.to_vec()),
                "{name} {kind}"
            );
        }
    }

    #[test]
    fn foreign_names_are_forwarded() {
        for name in ["example.com.", "4.3.2.1.in-addr.arpa.", "cluster.local.example."] {
            assert_eq!(ask(name, RecordType::A), None, "{name}");
        }
    }
}
