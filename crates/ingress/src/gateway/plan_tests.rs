//! The plan over objects as JSON: which are accepted, with which reasons, and what the table does with requests.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use http::{HeaderMap, Method};
use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::{Ingress, IngressClass};
use serde_json::{Value, json};

use super::CONTROLLER;
use super::certificates::ConfigCache;
use super::listeners::Ports;
use super::plan::{Planned, Planner, Snapshot};
use super::status::status;
use super::table::{Found, RequestHead};
use crate::backend::Backends;
use crate::compile::{CertificateCache, Objects};
use crate::endpoints::AddressPolicy;

/// Services `a` and `b` of namespace `d`, and `a` of `e`, each with port 80 and one endpoint.
struct Given {
    snapshot: Snapshot,
    ports: Ports,
    pool: Vec<IpAddr>,
}

impl Objects for Given {
    fn ingresses(&self) -> Vec<Arc<Ingress>> {
        Vec::new()
    }
    fn classes(&self) -> Vec<Arc<IngressClass>> {
        Vec::new()
    }
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        let known = [("d", "a"), ("d", "b"), ("e", "a")].contains(&(namespace, name));
        known.then(|| {
            object(json!({"metadata": {"name": name, "namespace": namespace}, "spec": {"ports": [{"port": 80}]}}))
        })
    }
    fn slices(&self, _: &str, _: &str) -> Vec<Arc<EndpointSlice>> {
        vec![object(json!({"metadata": {"name": "s"}, "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.0.0.1"]}], "ports": [{"port": 8080}]}))]
    }
    fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        if name != "tls" {
            return None;
        }
        let made = rcgen::generate_simple_self_signed(vec!["x".to_owned()]).expect("a certificate");
        let mut secret = Secret::default();
        secret.metadata.namespace = Some(namespace.to_owned());
        secret.string_data = None;
        let bytes = |text: String| k8s_openapi::ByteString(text.into_bytes());
        let data = [
            ("tls.crt".to_owned(), bytes(made.cert.pem())),
            ("tls.key".to_owned(), bytes(made.signing_key.serialize_pem())),
        ];
        secret.data = Some(BTreeMap::from(data));
        Some(Arc::new(secret))
    }
}

fn object<K: serde::de::DeserializeOwned>(value: Value) -> Arc<K> {
    Arc::new(serde_json::from_value(value).expect("an object"))
}

fn meta(name: &str) -> Value {
    json!({"name": name, "namespace": "d", "generation": 1})
}

impl Given {
    fn new() -> Given {
        let class = json!({"metadata": {"name": "skiff"}, "spec": {"controllerName": CONTROLLER}});
        let labels = |team: &str| BTreeMap::from([("team".to_owned(), team.to_owned())]);
        Given {
            snapshot: Snapshot {
                classes: vec![object(class)],
                namespaces: HashMap::from([("d".to_owned(), labels("d")), ("e".to_owned(), labels("e"))]),
                is_known_version: true,
                ..Snapshot::default()
            },
            ports: Ports {
                http: Some(80),
                https: Some(443),
                reserved: [6443].into(),
                ..Ports::default()
            },
            pool: Vec::new(),
        }
    }

    fn gateway(mut self, name: &str, listeners: Value) -> Given {
        let spec = json!({"gatewayClassName": "skiff", "listeners": listeners});
        self.snapshot
            .gateways
            .push(object(json!({"metadata": meta(name), "spec": spec})));
        self
    }

    fn http_route(mut self, name: &str, spec: Value) -> Given {
        self.snapshot
            .http
            .push(object(json!({"metadata": meta(name), "spec": spec})));
        self
    }

    fn plan(&self) -> Planned {
        let planner = Planner {
            objects: self,
            snapshot: &self.snapshot,
            policy: &AddressPolicy::default(),
            ports: &self.ports,
            pool: &self.pool,
            backends: &mut Backends::default(),
            certificates: &mut CertificateCache::default(),
            configs: &mut ConfigCache::default(),
            now: Instant::now(),
        };
        planner.run()
    }

    fn status(&self, resource: &str, name: &str) -> Value {
        let planned = self.plan();
        let mut reports = planned.reports.iter();
        let report = reports.find(|report| report.id.resource == resource && report.id.key.name == name);
        let report = report.expect("a report");
        let now = jiff::Timestamp::UNIX_EPOCH;
        status(&report.told, &Value::Null, Some(1), &[], now)
    }
}

/// `Type=Status/Reason`.
fn conditions(list: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = list.as_array().expect("conditions").iter();
    all.map(|each| {
        format!(
            "{}={}/{}",
            text(&each["type"]),
            text(&each["status"]),
            text(&each["reason"])
        )
    })
    .collect()
}

fn has(list: &Value, expected: &str) {
    let found = conditions(list);
    assert!(
        found.iter().any(|each| each == expected),
        "{expected} in {found:?}"
    );
}

fn http(port: u16) -> Value {
    json!({"name": "http", "port": port, "protocol": "HTTP"})
}

#[test]
fn listeners_are_told_why_they_are_not_served() {
    let tls = |reference: Value| json!({"certificateRefs": [reference]});
    for (listener, expected) in [
        (http(80), "Accepted=True/Accepted"),
        (http(80), "Programmed=True/Programmed"),
        (http(6443), "Accepted=False/PortUnavailable"),
        (
            json!({"name": "l", "port": 80, "protocol": "UDP"}),
            "Accepted=False/UnsupportedProtocol",
        ),
        (
            json!({"name": "l", "port": 443, "protocol": "HTTPS", "tls": tls(json!({"name": "tls"}))}),
            "Programmed=True/Programmed",
        ),
        (
            json!({"name": "l", "port": 443, "protocol": "HTTPS", "tls": tls(json!({"name": "none"}))}),
            "ResolvedRefs=False/InvalidCertificateRef",
        ),
        (
            json!({"name": "l", "port": 443, "protocol": "HTTPS", "tls": tls(json!({"name": "none"}))}),
            "Programmed=False/Invalid",
        ),
        (
            json!({"name": "l", "port": 443, "protocol": "HTTPS", "tls": tls(json!({"name": "tls", "namespace": "e"}))}),
            "ResolvedRefs=False/RefNotPermitted",
        ),
        (
            json!({"name": "l", "port": 80, "protocol": "HTTP", "allowedRoutes": {"kinds": [{"kind": "TLSRoute"}]}}),
            "ResolvedRefs=False/InvalidRouteKinds",
        ),
        (
            json!({"name": "l", "port": 443, "protocol": "HTTPS", "tls": {"certificateRefs": [{"name": "tls"}], "options": {"a": "b"}}}),
            "Accepted=False/UnsupportedValue",
        ),
    ] {
        let given = Given::new().gateway("g", json!([listener]));
        has(
            &given.status("gateways", "g")["listeners"][0]["conditions"],
            expected,
        );
    }
}

#[test]
fn listeners_of_one_gateway_may_conflict() {
    let given = Given::new().gateway(
        "g",
        json!([http(80), {"name": "tls", "port": 80, "protocol": "TLS", "tls": {"mode": "Passthrough"}}, http(8080)]),
    );
    let status = given.status("gateways", "g");
    has(&status["conditions"], "Accepted=True/ListenersNotValid");
    for (at, expected) in [
        "Conflicted=True/ProtocolConflict",
        "Conflicted=True/ProtocolConflict",
        "Conflicted=False/NoConflicts",
    ]
    .into_iter()
    .enumerate()
    {
        has(&status["listeners"][at]["conditions"], expected);
    }
    assert_eq!(given.plan().ports, [8080].into());
}

#[test]
fn a_port_that_another_program_has_is_told_and_still_wanted() {
    let mut given = Given::new().gateway("g", json!([http(8080)]));
    given.ports.failed.insert(8080, "in use".to_owned());
    let status = given.status("gateways", "g");
    has(
        &status["listeners"][0]["conditions"],
        "Accepted=False/PortUnavailable",
    );
    has(&status["conditions"], "Programmed=False/Invalid");
    assert_eq!(given.plan().ports, [8080].into());
}

#[test]
fn routes_are_told_why_they_are_not_attached() {
    let backend = json!([{"backendRefs": [{"name": "a", "port": 80}]}]);
    let listener = json!({"name": "http", "port": 80, "protocol": "HTTP", "hostname": "*.example"});
    for (spec, expected) in [
        (
            json!({"parentRefs": [{"name": "g"}], "rules": backend}),
            "Accepted=True/Accepted",
        ),
        (
            json!({"parentRefs": [{"name": "g"}], "rules": backend}),
            "ResolvedRefs=True/ResolvedRefs",
        ),
        (
            json!({"parentRefs": [{"name": "g", "sectionName": "x"}], "rules": backend}),
            "Accepted=False/NoMatchingParent",
        ),
        (
            json!({"parentRefs": [{"name": "g", "port": 81}], "rules": backend}),
            "Accepted=False/NoMatchingParent",
        ),
        (
            json!({"parentRefs": [{"name": "g"}], "hostnames": ["a.other"], "rules": backend}),
            "Accepted=False/NoMatchingListenerHostname",
        ),
        (
            json!({"parentRefs": [{"name": "g"}], "rules": [{"backendRefs": [{"name": "none", "port": 80}]}]}),
            "ResolvedRefs=False/BackendNotFound",
        ),
        (
            json!({"parentRefs": [{"name": "g"}], "rules": [{"backendRefs": [{"name": "a", "port": 81}]}]}),
            "ResolvedRefs=False/BackendNotFound",
        ),
        (
            json!({"parentRefs": [{"name": "g"}], "rules": [{"backendRefs": [{"kind": "Pod", "name": "a", "port": 80}]}]}),
            "ResolvedRefs=False/InvalidKind",
        ),
        (
            json!({"parentRefs": [{"name": "g"}], "rules": [{"backendRefs": [{"name": "a", "namespace": "e", "port": 80}]}]}),
            "ResolvedRefs=False/RefNotPermitted",
        ),
        (
            json!({"parentRefs": [{"name": "g"}], "rules": [{"filters": [{"type": "ExtensionRef"}]}]}),
            "Accepted=False/UnsupportedValue",
        ),
        (
            json!({"parentRefs": [{"name": "g"}], "rules": [{"filters": [{"type": "ExtensionRef"}]}, {}]}),
            "PartiallyInvalid=True/UnsupportedValue",
        ),
    ] {
        let given = Given::new()
            .gateway("g", json!([listener]))
            .http_route("r", spec.clone());
        let status = given.status("httproutes", "r");
        let found = conditions(&status["parents"][0]["conditions"]);
        assert!(
            found.iter().any(|each| each == expected),
            "{spec}: {expected} in {found:?}"
        );
        let attached = i64::from(!found[0].starts_with("Accepted=False"));
        let gateway = given.status("gateways", "g");
        assert_eq!(gateway["listeners"][0]["attachedRoutes"], attached, "{spec}");
    }
}

#[test]
fn listeners_choose_namespaces() {
    for (namespaces, expected) in [
        (json!({}), "Accepted=False/NotAllowedByListeners"),
        (json!({"from": "Same"}), "Accepted=False/NotAllowedByListeners"),
        (json!({"from": "All"}), "Accepted=True/Accepted"),
        (
            json!({"from": "Selector", "selector": {"matchLabels": {"team": "e"}}}),
            "Accepted=True/Accepted",
        ),
        (
            json!({"from": "Selector", "selector": {"matchLabels": {"team": "d"}}}),
            "Accepted=False/NotAllowedByListeners",
        ),
        (
            json!({"from": "Selector"}),
            "Accepted=False/NotAllowedByListeners",
        ),
    ] {
        let listener = json!({"name": "http", "port": 80, "protocol": "HTTP", "allowedRoutes": {"namespaces": namespaces}});
        let mut given = Given::new().gateway("g", json!([listener]));
        let route = json!({"metadata": {"name": "r", "namespace": "e"}, "spec": {"parentRefs": [{"name": "g", "namespace": "d"}]}});
        given.snapshot.http.push(object(route));
        has(
            &given.status("httproutes", "r")["parents"][0]["conditions"],
            expected,
        );
    }
}

#[test]
fn a_grant_permits_a_backend_of_another_namespace() {
    let spec = json!({"parentRefs": [{"name": "g"}], "rules": [{"backendRefs": [{"name": "a", "namespace": "e", "port": 80}]}]});
    let mut given = Given::new().gateway("g", json!([http(80)])).http_route("r", spec);
    let grant = json!({"metadata": {"name": "x", "namespace": "e"}, "spec": {
        "from": [{"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "namespace": "d"}],
        "to": [{"group": "", "kind": "Service"}]}});
    given.snapshot.grants.push(object(grant));
    let status = given.status("httproutes", "r");
    has(
        &status["parents"][0]["conditions"],
        "ResolvedRefs=True/ResolvedRefs",
    );
}

#[test]
fn parents_of_others_are_not_told() {
    let given = Given::new()
        .http_route("r", json!({"parentRefs": [{"name": "nobody"}]}))
        .gateway("g", json!([http(80)]));
    assert!(
        given
            .plan()
            .reports
            .iter()
            .all(|report| report.id.resource != "httproutes")
    );
}

#[test]
fn gateways_have_addresses_of_their_own_while_there_are_some() {
    let route = |gateway: &str, service: &str| json!({"parentRefs": [{"name": gateway}], "rules": [{"backendRefs": [{"name": service, "port": 80}]}]});
    let mut given = Given::new()
        .gateway("g1", json!([http(80)]))
        .gateway("g2", json!([http(80)]))
        .http_route("r1", route("g1", "a"))
        .http_route("r2", route("g2", "b"));
    let own: IpAddr = "192.0.2.1".parse().expect("an address");
    given.pool = vec![own];
    assert_eq!(
        given.status("gateways", "g1")["addresses"][0]["value"],
        "192.0.2.1"
    );
    let planned = given.plan();
    let shared: IpAddr = "192.0.2.9".parse().expect("an address");
    for (address, expected) in [(own, "a"), (shared, "b")] {
        let headers = HeaderMap::new();
        let head = RequestHead {
            host: "x",
            path: "/",
            query: "",
            method: &Method::GET,
            headers: &headers,
        };
        let at = planned.table.socket(address, 80);
        let Found::Route(entry) = planned.table.find(at, None, &head) else {
            panic!("no route at {address}");
        };
        let chosen = entry.rule.choose(0.0).and_then(|each| each.backend.clone());
        assert_eq!(chosen.expect("a backend").key.service, expected);
    }
}
