//! What services become, as elements.

use super::*;
use crate::proxy::elements::Slot;
use k8s_openapi::api::core::v1::Service;
use serde_json::{Value as Json, json};

fn index() -> Index {
    let networks = Networks {
        pods: vec![cidr("10.244.0.0/16"), cidr("fd00:10:244::/48")],
        services: vec![cidr("10.96.0.0/12"), cidr("fd00:10:96::/112")],
    };
    Index::new("here", networks)
}

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}

fn facts(name: &str, spec: Json) -> (Key, Option<ServiceFacts>) {
    facts_with(name, spec, Json::Null, "2026-01-01T00:00:00Z")
}

fn facts_with(name: &str, spec: Json, status: Json, created: &str) -> (Key, Option<ServiceFacts>) {
    let meta = json!({"namespace": "ns", "name": name, "creationTimestamp": created});
    let service: Service =
        serde_json::from_value(json!({"metadata": meta, "spec": spec, "status": status})).unwrap();
    (Key::new("ns", name), Some(ServiceFacts::of(&service)))
}

/// Endpoints of the port `http`; a family for each.
fn slice(endpoints: &[(&str, &str)]) -> Option<Arc<ProxySlice>> {
    let ipv6 = endpoints
        .first()
        .is_some_and(|(address, _)| address.contains(':'));
    let endpoints: Vec<Json> = endpoints
        .iter()
        .map(|(address, node)| json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true}}))
        .collect();
    let family = if ipv6 { "IPv6" } else { "IPv4" };
    let ports = json!([{"name": "http", "port": 8080, "protocol": "TCP"}, {"name": "dns", "port": 5353, "protocol": "UDP"}]);
    let slice = json!({"metadata": {"namespace": "ns", "name": "web-1"}, "addressType": family,
        "endpoints": endpoints, "ports": ports});
    Some(Arc::new(serde_json::from_value(slice).unwrap()))
}

fn ports(node_port: Option<u16>) -> Json {
    let mut port = json!({"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080});
    if let Some(node_port) = node_port {
        port["nodePort"] = node_port.into();
    }
    json!([port])
}

/// One service `web` with these endpoints.
fn with_service(spec: Json, endpoints: &[(&str, &str)]) -> Index {
    let mut index = index();
    let (key, facts) = facts("web", spec);
    index.set_service(&key, facts);
    index.set_slice(&key, "web-1", slice(endpoints));
    let delta = index.compile();
    assert!(delta.removed.is_empty());
    index
}

fn text(elements: impl Iterator<Item = (Element, Value)>) -> Vec<String> {
    let mut lines: Vec<String> = elements
        .map(|(element, value)| format!("{element}{value}"))
        .collect();
    lines.sort();
    lines
}

fn all(index: &Index) -> Vec<String> {
    text(index.wanted().iter().map(|(element, value)| (*element, *value)))
}

fn check(spec: Json, endpoints: &[(&str, &str)], expected: &[&str]) {
    let index = with_service(spec.clone(), endpoints);
    assert_eq!(all(&index), expected, "{spec}");
}

#[test]
fn a_cluster_ip_with_two_endpoints() {
    check(
        json!({"clusterIP": "10.96.0.10", "ports": ports(None)}),
        &[("10.244.0.5", "here"), ("10.244.1.6", "there")],
        &[
            "cluster-ip 10.96.0.10",
            "endpoint 10.96.0.10 . tcp . 80 . 0 : 10.244.0.5 . 8080",
            "endpoint 10.96.0.10 . tcp . 80 . 1 : 10.244.1.6 . 8080",
            "front 10.96.0.10 . tcp . 80 : Inside 2",
            "own 10.244.0.5",
        ],
    );
}

#[test]
fn no_endpoints_are_refused() {
    check(
        json!({"clusterIP": "10.96.0.10", "type": "NodePort", "ports": ports(Some(30080))}),
        &[],
        &[
            "cluster-ip 10.96.0.10",
            "front 10.96.0.10 . tcp . 80 : Reject",
            "front ip . tcp . 30080 : Reject",
        ],
    );
}

#[test]
fn both_families() {
    let spec = json!({"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10", "fd00:10:96::a"],
        "type": "NodePort", "ports": ports(Some(30080))});
    let mut index = with_service(spec, &[("10.244.0.5", "there")]);
    let key = Key::new("ns", "web");
    index.set_slice(&key, "web-2", slice(&[("fd00:10:244::5", "here")]));
    let delta = index.compile();
    assert_eq!(
        text(delta.added.into_iter()),
        [
            "endpoint fd00:10:96::a . tcp . 80 . 0 : fd00:10:244::5 . 8080",
            "endpoint ip6 . tcp . 30080 . 0 : fd00:10:244::5 . 8080",
            "front fd00:10:96::a . tcp . 80 : Inside 1",
            "front ip6 . tcp . 30080 : Outside 1",
            "own fd00:10:244::5",
        ]
    );
    assert_eq!(
        delta.removed.len(),
        2,
        "the two were refused: {:?}",
        delta.removed
    );
    assert!(all(&index).contains(&"front 10.96.0.10 . tcp . 80 : Inside 1".to_string()));
}

#[test]
fn local_policies() {
    let spec = json!({"clusterIP": "10.96.0.10", "type": "NodePort", "ports": ports(Some(30080)),
        "internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local"});
    // One endpoint here, two there: internal traffic stays, external traffic stays, but for who is inside.
    check(
        spec.clone(),
        &[
            ("10.244.0.5", "here"),
            ("10.244.1.6", "there"),
            ("10.244.1.7", "there"),
        ],
        &[
            "cluster-ip 10.96.0.10",
            "endpoint 10.96.0.10 . tcp . 80 . 0 : 10.244.0.5 . 8080",
            "endpoint for inside ip . tcp . 30080 . 0 : 10.244.0.5 . 8080",
            "endpoint for inside ip . tcp . 30080 . 1 : 10.244.1.6 . 8080",
            "endpoint for inside ip . tcp . 30080 . 2 : 10.244.1.7 . 8080",
            "endpoint ip . tcp . 30080 . 0 : 10.244.0.5 . 8080",
            "front 10.96.0.10 . tcp . 80 : Inside 1",
            "front ip . tcp . 30080 : Local 1 3",
            "own 10.244.0.5",
        ],
    );
    // None here: dropped, not refused.
    let index = with_service(spec, &[("10.244.1.6", "there")]);
    let lines = all(&index);
    for line in [
        "front 10.96.0.10 . tcp . 80 : Drop",
        "front ip . tcp . 30080 : Local 1",
    ] {
        assert!(lines.contains(&line.to_string()), "{line} not in {lines:?}");
    }
    assert_eq!(index.counts().no_local, [(1, 1), (0, 0)]);
}

#[test]
fn session_affinity() {
    check(
        json!({"clusterIP": "10.96.0.10", "sessionAffinity": "ClientIP", "ports": ports(None),
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}}),
        &[("10.244.1.6", "there")],
        &[
            "cluster-ip 10.96.0.10",
            "endpoint 10.96.0.10 . tcp . 80 . 0 : 10.244.1.6 . 8080",
            "front 10.96.0.10 . tcp . 80 : Inside 1 for 60s",
        ],
    );
}

#[test]
fn load_balancers_with_source_ranges() {
    let spec = json!({"clusterIP": "10.96.0.10", "type": "LoadBalancer", "ports": ports(None),
        "externalIPs": ["192.0.2.9"], "loadBalancerSourceRanges": ["198.51.100.0/25", "198.51.100.0/24", "198.51.100.7/32", "2001:db8::/32"]});
    let status =
        json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}, {"ip": "192.0.2.2", "ipMode": "Proxy"}]}});
    let mut index = index();
    let (key, facts) = facts_with("web", spec, status, "2026-01-01T00:00:00Z");
    index.set_service(&key, facts);
    index.set_slice(&key, "web-1", slice(&[("10.244.0.5", "there")]));
    index.compile();
    assert_eq!(
        all(&index),
        [
            "cluster-ip 10.96.0.10",
            "endpoint 10.96.0.10 . tcp . 80 . 0 : 10.244.0.5 . 8080",
            "endpoint 192.0.2.1 . tcp . 80 . 0 : 10.244.0.5 . 8080",
            "endpoint 192.0.2.9 . tcp . 80 . 0 : 10.244.0.5 . 8080",
            "front 10.96.0.10 . tcp . 80 : Inside 1",
            "front 192.0.2.1 . tcp . 80 : LimitedOutside 1",
            "front 192.0.2.9 . tcp . 80 : Outside 1",
            "source 192.0.2.1 . tcp . 80 . 198.51.100.0/24",
        ]
    );
    index.set_service(&key, None);
    index.set_slice(&key, "web-1", None);
    assert_eq!(index.compile().removed.len(), 8);
    assert!(index.wanted().is_empty() && index.services.is_empty() && index.claims.is_empty());
    assert!(index.placed.is_empty() && index.owners.is_empty() && index.external.is_empty());
    assert_eq!(index.counts(), Counts::default());
}

#[test]
fn health_check_ports() {
    let spec = json!({"clusterIP": "10.96.0.10", "type": "LoadBalancer", "externalTrafficPolicy": "Local",
        "healthCheckNodePort": 31000, "ports": ports(Some(30080))});
    let mut index = index();
    let (key, facts) = facts("web", spec);
    index.set_service(&key, facts);
    index.set_slice(
        &key,
        "web-1",
        slice(&[("10.244.0.5", "here"), ("10.244.1.6", "there")]),
    );
    assert_eq!(index.compile().health, [(key.clone(), Some((31000, 1)))]);
    index.set_slice(&key, "web-1", slice(&[("10.244.1.6", "there")]));
    assert_eq!(index.compile().health, [(key.clone(), Some((31000, 0)))]);
    index.set_service(&key, None);
    assert_eq!(index.compile().health, [(key, None)]);
}

#[test]
fn services_that_have_no_rules() {
    for spec in [
        json!({"clusterIP": "None", "ports": ports(None)}),
        json!({"type": "ExternalName", "externalName": "example.com"}),
        json!({"ports": ports(None)}),
    ] {
        check(spec, &[("10.244.0.5", "here")], &[]);
    }
    check(
        json!({"clusterIP": "10.96.0.10"}),
        &[],
        &["cluster-ip 10.96.0.10"],
    );
    let mut index = index();
    let (key, facts) = facts("web", json!({"clusterIP": "10.96.0.10", "ports": ports(None)}));
    let mut elsewhere = facts.unwrap();
    elsewhere.served = false;
    index.set_service(&key, Some(elsewhere));
    index.compile();
    assert!(index.wanted().is_empty());
}

/// A change costs what has changed, in whatever order it comes.
#[test]
fn a_change_is_a_few_elements() {
    let endpoints: Vec<String> = (1..=100).map(|n| format!("10.244.1.{n}")).collect();
    let of = |wanted: &[&String]| {
        let endpoints: Vec<(&str, &str)> = wanted.iter().map(|ip| (ip.as_str(), "there")).collect();
        slice(&endpoints)
    };
    let mut index = index();
    let key = Key::new("ns", "web");
    for number in 0..50 {
        let (key, facts) = facts(
            &format!("web-{number}"),
            json!({"clusterIP": format!("10.96.1.{number}"), "ports": ports(None)}),
        );
        index.set_service(&key, facts);
    }
    let (_, facts) = facts("web", json!({"clusterIP": "10.96.0.10", "ports": ports(None)}));
    index.set_service(&key, facts);
    index.set_slice(&key, "web-1", of(&endpoints.iter().collect::<Vec<_>>()));
    index.compile();
    // The first one of a hundred goes: the last one takes its number.
    index.set_slice(&key, "web-1", of(&endpoints[1..].iter().collect::<Vec<_>>()));
    let delta = index.compile();
    assert_eq!(delta.planned, 1);
    assert_eq!(
        text(delta.added.into_iter()),
        [
            "endpoint 10.96.0.10 . tcp . 80 . 0 : 10.244.1.100 . 8080",
            "front 10.96.0.10 . tcp . 80 : Inside 99",
        ]
    );
    assert_eq!(delta.removed.len(), 3);
    // Nothing has changed.
    index.set_slice(
        &key,
        "web-1",
        of(&endpoints[1..].iter().rev().collect::<Vec<_>>()),
    );
    let delta = index.compile();
    assert!(delta.added.is_empty() && delta.removed.is_empty());
    // Step by step or all at once: the same endpoints, and numbers without gaps.
    index.set_slice(&key, "web-1", of(&[&endpoints[3], &endpoints[50]]));
    index.compile();
    let at = Front::Service("10.96.0.10".parse().unwrap(), Protocol::Tcp, 80);
    let endpoint = |number: u32| Element::Endpoint(at, Slot::First, number);
    let mut left: Vec<_> = (0..2)
        .map(|number| index.wanted()[&endpoint(number)].to_string())
        .collect();
    left.sort();
    assert_eq!(left, [" : 10.244.1.4 . 8080", " : 10.244.1.51 . 8080"]);
    assert!(!index.wanted().contains_key(&endpoint(2)));
}

#[test]
fn flows_that_must_be_looked_at() {
    let dns = json!([{"name": "dns", "port": 53, "protocol": "UDP"}]);
    let mut index = index();
    let (key, facts) = facts("web", json!({"clusterIP": "10.96.0.10", "ports": dns}));
    let at = Front::Service("10.96.0.10".parse().unwrap(), Protocol::Udp, 53);
    let target = |ip: &str| (ip.parse::<IpAddr>().unwrap(), 5353);
    index.set_service(&key, facts);
    index.set_slice(&key, "web-1", slice(&[("10.244.0.5", "here")]));
    // There may be flows that are older than the service.
    assert_eq!(index.compile().flows, [(at, vec![target("10.244.0.5")])].into());
    // One more endpoint takes nobody's flow away.
    index.set_slice(
        &key,
        "web-1",
        slice(&[("10.244.0.5", "here"), ("10.244.0.6", "here")]),
    );
    assert!(index.compile().flows.is_empty());
    index.set_slice(&key, "web-1", slice(&[("10.244.0.6", "here")]));
    assert_eq!(index.compile().flows, [(at, vec![target("10.244.0.6")])].into());
    index.set_service(&key, None);
    assert_eq!(index.compile().flows, [(at, vec![])].into());
}

#[test]
fn nobody_takes_an_address_that_is_anothers() {
    let (old, new) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
    let external =
        |ips: &[&str]| json!({"clusterIP": "10.96.0.99", "externalIPs": ips, "ports": ports(None)});
    let own = |ip: &str| json!({"clusterIP": ip, "ports": ports(None)});
    let owner = |index: &Index, ip: &str| {
        let at = Front::Service(ip.parse().unwrap(), Protocol::Tcp, 80);
        index.claims.get(&at).map(|claims| claims[0].service.name.clone())
    };
    let told =
        |delta: Delta| -> Vec<String> { delta.refusals.into_iter().map(|refusal| refusal.1).collect() };
    // A cluster IP, whoever is older and whoever comes first.
    let mut index = index();
    let (thief, wants) = facts_with("thief", external(&["10.96.0.10", "192.0.2.9"]), Json::Null, old);
    index.set_service(&thief, wants);
    assert_eq!(
        told(index.compile()),
        ["spec.externalIPs: 10.96.0.10:80/tcp is not served: it is in the service network"]
    );
    let (dns, has) = facts_with("dns", own("10.96.0.10"), Json::Null, new);
    index.set_service(&dns, has);
    assert_eq!(
        told(index.compile()),
        ["spec.externalIPs: 10.96.0.10:80/tcp is not served: it is the cluster IP of service ns/dns"]
    );
    assert_eq!(owner(&index, "10.96.0.10").as_deref(), Some("dns"));
    assert_eq!(owner(&index, "192.0.2.9").as_deref(), Some("thief"));
    // Nobody is told the same twice, and another endpoint is no reason to.
    index.set_slice(&thief, "t-1", slice(&[("10.244.0.5", "here")]));
    assert!(told(index.compile()).is_empty());

    // Of two that want the same, the older one; a load balancer's comes first. Who goes leaves it to the next.
    let (second, wants) = facts_with("second", external(&["192.0.2.9", "192.0.2.9"]), Json::Null, new);
    index.set_service(&second, wants);
    assert_eq!(
        told(index.compile()),
        ["spec.externalIPs: 192.0.2.9:80/tcp is not served: service ns/thief has it already"]
    );
    let balanced = json!({"clusterIP": "10.96.0.98", "type": "LoadBalancer", "ports": ports(None)});
    let status = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.9"}]}});
    let (balanced, wants) = facts_with("balanced", balanced, status, new);
    index.set_service(&balanced, wants);
    let mut messages = told(index.compile());
    messages.dedup();
    assert_eq!(
        messages,
        ["spec.externalIPs: 192.0.2.9:80/tcp is not served: service ns/balanced has it already"]
    );
    for (goes, next) in [
        (&balanced, Some("thief")),
        (&thief, Some("second")),
        (&second, None),
    ] {
        index.set_service(goes, None);
        index.compile();
        assert_eq!(owner(&index, "192.0.2.9").as_deref(), next);
    }

    // Addresses that are nobody's to choose.
    for (address, why) in [
        ("10.244.0.1", "it is in the pod network"),
        ("fd00:10:244::1", "it is in the pod network"),
        ("127.0.0.1", "it is not an address that others reach"),
        ("192.0.2.7", "it is the API server's"),
    ] {
        let api = Key::new("default", "kubernetes");
        let mut servers = (*slice(&[("192.0.2.7", "")]).unwrap()).clone();
        servers.ports =
            serde_json::from_value(json!([{"name": "https", "port": 80, "protocol": "TCP"}])).unwrap();
        index.set_slice(&api, "kubernetes", Some(Arc::new(servers)));
        let both = json!({"clusterIP": "10.96.0.99", "clusterIPs": ["10.96.0.99", "fd00:10:96::99"],
            "externalIPs": [address], "ports": ports(None)});
        let (thief, wants) = facts_with("thief", both, Json::Null, old);
        index.set_service(&thief, wants);
        let messages = told(index.compile());
        assert!(messages.len() == 1 && messages[0].ends_with(why), "{messages:?}");
        assert_eq!(owner(&index, address), None);
    }
}
