//! Questions and answers of the cluster's zone, by data.

use super::*;
use crate::names::absolute;

pub(crate) struct Fixture;

fn port(name: &str, protocol: &str, port: u16) -> Port {
    Port {
        name: name.into(),
        protocol: protocol.into(),
        port,
    }
}

fn endpoint(address: &str, hostname: Option<&str>, ready: bool) -> Endpoint {
    Endpoint {
        address: address.parse().unwrap(),
        hostname: hostname.map(str::to_owned),
        pod: Some("some-pod".to_owned()),
        ready,
    }
}

impl Records for Fixture {
    fn namespace_exists(&self, namespace: &str) -> bool {
        matches!(namespace, "default" | "kube-system" | "other")
    }

    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let external = |target: &str| Service {
            external_name: Some(target.into()),
            ..Service::default()
        };
        let found = match (namespace, name) {
            ("default", "web") => Service {
                cluster_ips: ips(&["10.96.0.7", "fd00:96::7"]),
                ports: vec![port("http", "tcp", 80), port("dns", "udp", 53)],
                ..Service::default()
            },
            ("default", "six") => Service {
                cluster_ips: ips(&["fd00:96::6"]),
                ports: vec![port("", "tcp", 80)],
                ..Service::default()
            },
            ("default", "eager") => Service {
                publish_not_ready: true,
                ..Service::default()
            },
            ("default", "db" | "empty" | "portless") => Service::default(),
            ("kube-system", "kube-dns") => Service {
                cluster_ips: ips(&["10.96.0.10"]),
                ports: vec![port("dns", "udp", 53)],
                ..Service::default()
            },
            ("default", "out") => external("example.com"),
            ("default", "address") => external("192.0.2.1"),
            _ => return None,
        };
        Some(Arc::new(found))
    }

    fn slices(&self, _: &str, service: &str) -> Vec<Arc<Slice>> {
        let slice = |endpoints: Vec<Endpoint>, ports: Vec<Port>| {
            Arc::new(Slice {
                namespace: "default".into(),
                service: service.into(),
                ports,
                endpoints,
            })
        };
        let sql = || vec![port("sql", "tcp", 5432)];
        match service {
            "db" => vec![
                slice(
                    vec![
                        endpoint("10.244.0.5", Some("db-0"), true),
                        endpoint("10.244.0.6", None, true),
                        endpoint("10.244.0.7", Some("db-2"), false),
                    ],
                    sql(),
                ),
                slice(
                    vec![
                        endpoint("fd00:244::5", Some("db-0"), true),
                        endpoint("fd00:244::", None, true),
                    ],
                    sql(),
                ),
            ],
            "eager" => vec![slice(vec![endpoint("10.244.0.8", None, false)], sql())],
            "portless" => vec![slice(vec![endpoint("10.244.0.9", None, true)], vec![])],
            "web" => vec![slice(vec![endpoint("10.244.0.9", Some("web-0"), true)], sql())],
            _ => vec![],
        }
    }

    fn service_at(&self, address: IpAddr) -> Option<(String, String)> {
        (address.to_string() == "10.96.0.7").then(|| ("web".into(), "default".into()))
    }

    fn slices_at(&self, address: IpAddr) -> Vec<Arc<Slice>> {
        ["db", "eager", "portless", "web"]
            .iter()
            .flat_map(|service| self.slices("default", service))
            .filter(|slice| slice.endpoints.iter().any(|e| e.address == address))
            .collect()
    }
}

fn plugin() -> Kubernetes {
    let names = |texts: &[&str]| {
        texts
            .iter()
            .map(|text| absolute(text).unwrap())
            .collect::<Vec<_>>()
    };
    Kubernetes {
        zones: names(&["cluster.local"]),
        reverse: names(&["in-addr.arpa", "ip6.arpa"]),
        pods: true,
        ttl: 30,
        fall: Fall(names(&["in-addr.arpa", "ip6.arpa"])),
        namespaces: BTreeSet::new(),
        endpoint_pod_names: false,
        ignore_empty_service: false,
    }
}

fn ask(plugin: &Kubernetes, name: &str, kind: RecordType) -> Option<(ResponseCode, Vec<String>)> {
    let answer = plugin.answer(&Name::from_ascii(name).unwrap(), kind, &Fixture)?;
    let negative = answer.records.is_empty() && answer.code != ResponseCode::Refused;
    assert_eq!(
        negative,
        answer.authority.is_some(),
        "{name}: a SOA goes with a denial"
    );
    if let Some(RData::SOA(soa)) = answer.authority.as_ref().map(|soa| &soa.data) {
        assert_eq!(soa.minimum, 30);
    }
    let data = answer.records.iter().map(|r| r.data.to_string());
    Some((answer.code, data.collect()))
}

const OK: ResponseCode = ResponseCode::NoError;
const NONE: ResponseCode = ResponseCode::NXDomain;

#[track_caller]
fn check(name: &str, kind: RecordType, code: ResponseCode, expected: &[&str]) {
    let name = match name.ends_with('.') {
        true => name.to_owned(),
        false => format!("{name}.cluster.local."),
    };
    let found = ask(&plugin(), &name, kind).unwrap_or_else(|| panic!("{name} was not answered"));
    let data: Vec<&str> = found.1.iter().map(String::as_str).collect();
    assert_eq!((found.0, data), (code, expected.to_vec()), "{name} {kind}");
}

#[test]
fn services_of_both_families() {
    use RecordType::{A, AAAA, ANY, MX, SRV};
    check("web.default.svc", A, OK, &["10.96.0.7"]);
    check("WEB.default.svc.Cluster.Local.", A, OK, &["10.96.0.7"]);
    check("web.default.svc", AAAA, OK, &["fd00:96::7"]);
    check("six.default.svc", A, OK, &[]);
    check("six.default.svc", AAAA, OK, &["fd00:96::6"]);
    check("web.default.svc", MX, OK, &[]);
    check("web.default.svc", ANY, OK, &[]);
    check("nope.default.svc", A, NONE, &[]);
    check("web.nope.svc", A, NONE, &[]);
    check("_http._tcp.web.default.svc", A, OK, &["10.96.0.7"]);
    check(
        "_http._tcp.web.default.svc",
        SRV,
        OK,
        &["0 50 80 web.default.svc.cluster.local."],
    );
    check("_http._tcp.web.default.svc", MX, OK, &[]);
    check("_http._udp.web.default.svc", SRV, NONE, &[]);
    check("_nope._tcp.web.default.svc", SRV, NONE, &[]);
    check(
        "web.default.svc",
        SRV,
        OK,
        &[
            "0 25 80 web.default.svc.cluster.local.",
            "0 25 53 web.default.svc.cluster.local.",
        ],
    );
    check("web-0.web.default.svc", A, OK, &["10.244.0.9"]);
}

#[test]
fn headless_services() {
    use RecordType::{A, AAAA, SRV};
    check("db.default.svc", A, OK, &["10.244.0.5", "10.244.0.6"]);
    check("db.default.svc", AAAA, OK, &["fd00:244::5", "fd00:244::"]);
    check("db-0.db.default.svc", A, OK, &["10.244.0.5"]);
    check("DB-0.db.default.svc", AAAA, OK, &["fd00:244::5"]);
    check("10-244-0-6.db.default.svc", A, OK, &["10.244.0.6"]);
    check("fd00-244--0.db.default.svc", AAAA, OK, &["fd00:244::"]);
    check("db-2.db.default.svc", A, NONE, &[]);
    check("db-9.db.default.svc", A, NONE, &[]);
    check("empty.default.svc", A, NONE, &[]);
    check("eager.default.svc", A, OK, &["10.244.0.8"]);
    check("portless.default.svc", A, OK, &["10.244.0.9"]);
    check("portless.default.svc", SRV, OK, &[]);
    check(
        "_sql._tcp.db.default.svc",
        SRV,
        OK,
        &[
            "0 25 5432 db-0.db.default.svc.cluster.local.",
            "0 25 5432 10-244-0-6.db.default.svc.cluster.local.",
            "0 25 5432 fd00-244--0.db.default.svc.cluster.local.",
        ],
    );
    check(
        "db-0.db.default.svc",
        SRV,
        OK,
        &["0 50 5432 db-0.db.default.svc.cluster.local."],
    );
}

#[test]
fn an_srv_answer_brings_the_addresses() {
    let name = Name::from_ascii("_sql._tcp.db.default.svc.cluster.local.").unwrap();
    let answer = plugin().answer(&name, RecordType::SRV, &Fixture).unwrap();
    let found: Vec<String> = answer
        .additionals
        .iter()
        .map(|r| format!("{} {} {}", r.name, r.record_type(), r.data))
        .collect();
    assert_eq!(
        found,
        [
            "db-0.db.default.svc.cluster.local. A 10.244.0.5",
            "10-244-0-6.db.default.svc.cluster.local. A 10.244.0.6",
            "db-0.db.default.svc.cluster.local. AAAA fd00:244::5",
            "fd00-244--0.db.default.svc.cluster.local. AAAA fd00:244::",
        ]
    );
    assert!(answer.records.iter().all(|r| r.ttl == 30));
}

#[test]
fn aliases_pods_and_the_apex() {
    use RecordType::{A, AAAA, AXFR, CNAME, NS, SOA, SRV, TXT};
    check("out.default.svc", A, OK, &["example.com."]);
    check("out.default.svc", CNAME, OK, &["example.com."]);
    check("out.default.svc", SRV, OK, &[]);
    check("x.out.default.svc", A, NONE, &[]);
    check("address.default.svc", A, NONE, &[]);
    check("10-1-2-3.default.pod", A, OK, &["10.1.2.3"]);
    check("fd00--1.default.pod", AAAA, OK, &["fd00::1"]);
    check("10-1-2-3.default.pod", AAAA, OK, &[]);
    check("10-1-2-3.nope.pod", A, NONE, &[]);
    check("x.default.pod", A, NONE, &[]);
    check("default.pod", A, OK, &[]);
    check("default.svc", A, OK, &[]);
    check("nope.svc", A, NONE, &[]);
    check("svc", A, OK, &[]);
    check("cluster.local.", A, OK, &[]);
    check("nope", A, NONE, &[]);
    check("a.b.c.web.default.svc", A, NONE, &[]);
    check("dns-version", TXT, OK, &["1.1.0"]);
    check("dns-version", A, OK, &[]);
    check("web.default.svc", TXT, OK, &[]);
    check("ns.dns", A, OK, &["10.96.0.10"]);
    check(
        "cluster.local.",
        NS,
        OK,
        &["kube-dns.kube-system.svc.cluster.local."],
    );
    check(
        "cluster.local.",
        SOA,
        OK,
        &["ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 30"],
    );
    check("cluster.local.", AXFR, ResponseCode::Refused, &[]);
}

#[test]
fn addresses_have_names() {
    use RecordType::PTR;
    let zeros = |count: usize| "0.".repeat(count);
    check(
        "7.0.96.10.in-addr.arpa.",
        PTR,
        OK,
        &["web.default.svc.cluster.local."],
    );
    check(
        "5.0.244.10.in-addr.arpa.",
        PTR,
        OK,
        &["db-0.db.default.svc.cluster.local."],
    );
    check(
        "8.0.244.10.in-addr.arpa.",
        PTR,
        OK,
        &["10-244-0-8.eager.default.svc.cluster.local."],
    );
    check(
        &format!("5.{}4.4.2.0.0.0.d.f.ip6.arpa.", zeros(23)),
        PTR,
        OK,
        &["db-0.db.default.svc.cluster.local."],
    );
}

#[test]
fn what_is_not_the_clusters_goes_on() {
    let plugin = plugin();
    for (name, kind) in [
        ("example.com.", RecordType::A),
        ("4.3.2.1.in-addr.arpa.", RecordType::PTR),
        // Not ready, and not published.
        ("7.0.244.10.in-addr.arpa.", RecordType::PTR),
        ("7.0.96.10.in-addr.arpa.", RecordType::A),
        ("cluster.local.example.", RecordType::A),
    ] {
        assert_eq!(ask(&plugin, name, kind), None, "{name}");
    }
}

#[test]
fn options_of_the_plugin() {
    let names = |texts: &[&str]| {
        texts
            .iter()
            .map(|text| absolute(text).unwrap())
            .collect::<Vec<_>>()
    };
    let a = |plugin: &Kubernetes, name: &str| {
        ask(plugin, &format!("{name}.cluster.local."), RecordType::A)
            .map(|(code, data)| (code, data.join(" ")))
    };
    let some = |data: &str| Some((OK, data.to_owned()));
    let mut changed = plugin();
    changed.pods = false;
    assert_eq!(a(&changed, "10-1-2-3.default.pod"), Some((NONE, String::new())));
    changed.namespaces = BTreeSet::from(["other".to_owned()]);
    assert_eq!(a(&changed, "web.default.svc"), Some((NONE, String::new())));
    assert_eq!(ask(&changed, "7.0.96.10.in-addr.arpa.", RecordType::PTR), None);
    changed = plugin();
    changed.endpoint_pod_names = true;
    assert_eq!(a(&changed, "some-pod.db.default.svc"), some("10.244.0.6"));
    changed = plugin();
    changed.ignore_empty_service = true;
    assert_eq!(a(&changed, "web.default.svc"), some("10.96.0.7"));
    assert_eq!(
        ask(&changed, "six.default.svc.cluster.local.", RecordType::AAAA),
        Some((NONE, vec![]))
    );
    changed = plugin();
    changed.fall = Fall(names(&["."]));
    assert_eq!(a(&changed, "nope.default.svc"), None);
    assert_eq!(a(&changed, "web.default.svc"), some("10.96.0.7"));
    changed = plugin();
    changed.fall = Fall::default();
    assert_eq!(
        ask(&changed, "4.3.2.1.in-addr.arpa.", RecordType::PTR),
        Some((NONE, vec![]))
    );
}
