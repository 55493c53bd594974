//! The compiler with objects of every sort, good and bad.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::{Ingress, IngressClass};
use serde_json::{Value, json};

use crate::backend::{Backends, Protocol};
use crate::compile::{CertificateCache, Compiled, Compiler, Objects};
use crate::compile_backends::refresh;
use crate::endpoints::AddressPolicy;
use crate::features::resolve::{FeatureCache, MAX_NAMESPACE_REGEXES};
use crate::table::HostMatch;

#[derive(Default)]
struct Given {
    ingresses: Vec<Arc<Ingress>>,
    classes: Vec<Arc<IngressClass>>,
    services: HashMap<String, Arc<Service>>,
    slices: HashMap<String, Vec<Arc<EndpointSlice>>>,
    secrets: HashMap<String, Arc<Secret>>,
}

impl Objects for Given {
    fn ingresses(&self) -> Vec<Arc<Ingress>> {
        self.ingresses.clone()
    }
    fn classes(&self) -> Vec<Arc<IngressClass>> {
        self.classes.clone()
    }
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        self.services.get(&format!("{namespace}/{name}")).cloned()
    }
    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<EndpointSlice>> {
        let found = self.slices.get(&format!("{namespace}/{service}"));
        found.cloned().unwrap_or_default()
    }
    fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.secrets.get(&format!("{namespace}/{name}")).cloned()
    }
}

fn object<K: serde::de::DeserializeOwned>(value: Value) -> Arc<K> {
    Arc::new(serde_json::from_value(value).expect("an object"))
}

impl Given {
    /// The class, and Services `a`, `b` and `c` with a port `http` (80) and one endpoint each.
    fn new() -> Given {
        let class = json!({"metadata": {"name": "skiff"}, "spec": {"controller": "skiff.io/ingress"}});
        let mut given = Given {
            classes: vec![object(class)],
            ..Given::default()
        };
        for (place, name) in ["a", "b", "c"].into_iter().enumerate() {
            given.put_service(
                name,
                json!({"ports": [{"name": "http", "port": 80, "targetPort": 8080}]}),
            );
            given.put_slice(name, &format!("10.0.0.{}", place + 1));
        }
        given
    }

    fn put_service(&mut self, name: &str, spec: Value) {
        let service = object(json!({"metadata": {"name": name, "namespace": "d"}, "spec": spec}));
        self.services.insert(format!("d/{name}"), service);
    }

    fn put_slice(&mut self, service: &str, address: &str) {
        let slice = json!({"metadata": {"name": service}, "addressType": "IPv4",
            "endpoints": [{"addresses": [address]}], "ports": [{"name": "http", "port": 8080}]});
        self.slices.insert(format!("d/{service}"), vec![object(slice)]);
    }

    /// `age`: a larger one is older.
    fn ingress(&mut self, name: &str, age: u8, spec: Value) {
        self.annotated(name, age, json!({}), spec);
    }

    fn annotated(&mut self, name: &str, age: u8, annotations: Value, mut spec: Value) {
        if spec.get("ingressClassName").is_none() {
            spec["ingressClassName"] = "skiff".into();
        }
        let created = format!("2026-01-01T00:00:{:02}Z", 59 - age);
        let ingress = json!({"metadata": {"name": name, "namespace": "d", "creationTimestamp": created,
            "annotations": annotations}, "spec": spec});
        self.ingresses.push(object(ingress));
    }

    /// Of the last Ingress.
    fn set_namespace(&mut self, namespace: &str) {
        let ingress = self.ingresses.last_mut().expect("an Ingress");
        Arc::make_mut(ingress).metadata.namespace = Some(namespace.to_owned());
    }

    fn compile(&self) -> Compiled {
        self.compile_with(&mut Backends::default())
    }

    fn compile_with(&self, backends: &mut Backends) -> Compiled {
        let policy = AddressPolicy::default();
        let compiler = Compiler {
            objects: self,
            policy: &policy,
            backends,
            cache: &mut CertificateCache::default(),
            features: &mut FeatureCache::default(),
            now: Instant::now(),
        };
        compiler.run()
    }
}

fn path(path: &str, service: &str) -> Value {
    json!({"path": path, "pathType": "Prefix", "backend": backend(service)})
}

fn backend(service: &str) -> Value {
    json!({"service": {"name": service, "port": {"number": 80}}})
}

fn rule(host: &str, paths: &[Value]) -> Value {
    json!({"host": host, "http": {"paths": paths}})
}

/// The service that answers, `503` for a route without one, `404` for no route.
fn answers(compiled: &Compiled, host: &str, path: &str) -> String {
    match compiled.table.find(host, path) {
        None => "404".to_owned(),
        Some(route) => match &route.backend {
            None => "503".to_owned(),
            Some(backend) => backend.key.service.clone(),
        },
    }
}

fn reasons(compiled: &Compiled, name: &str) -> Vec<&'static str> {
    let of_name = compiled
        .ingresses
        .iter()
        .filter(|(ingress, _)| ingress.metadata.name.as_deref() == Some(name));
    of_name
        .flat_map(|(_, problems)| problems.iter().map(|problem| problem.reason))
        .collect()
}

#[test]
fn ingresses_of_one_host_are_merged_and_the_older_one_wins() {
    let mut given = Given::new();
    given.ingress(
        "young",
        1,
        json!({"rules": [rule("x.example", &[path("/", "b"), path("/b", "b")])]}),
    );
    given.ingress("old", 2, json!({"rules": [rule("x.example", &[path("/", "a")])]}));
    let compiled = given.compile();
    assert_eq!(answers(&compiled, "x.example", "/"), "a");
    assert_eq!(answers(&compiled, "x.example", "/b/c"), "b");
    assert_eq!(reasons(&compiled, "young"), ["RouteTaken"]);
    assert!(reasons(&compiled, "old").is_empty());
}

#[test]
fn default_backends_take_what_is_left() {
    let mut given = Given::new();
    let spec = json!({"defaultBackend": backend("b"), "rules": [rule("x.example", &[path("/a", "a")]), {"host": "y.example"}]});
    given.ingress("rules", 3, spec);
    given.ingress("all", 2, json!({"defaultBackend": backend("c")}));
    given.ingress("late", 1, json!({"defaultBackend": backend("a")}));
    let compiled = given.compile();
    assert_eq!(answers(&compiled, "x.example", "/a"), "a");
    assert_eq!(answers(&compiled, "x.example", "/other"), "b");
    assert_eq!(answers(&compiled, "y.example", "/"), "b");
    assert_eq!(answers(&compiled, "z.example", "/"), "c");
    assert_eq!(reasons(&compiled, "late"), ["RouteTaken"]);
}

#[test]
fn only_ingresses_of_our_classes_are_served() {
    let mut given = Given::new();
    let other = json!({"metadata": {"name": "other"}, "spec": {"controller": "example.com/other"}});
    given.classes.push(object(other));
    let rules = |host: &str| json!([rule(host, &[path("/", "a")])]);
    given.ingress(
        "theirs",
        1,
        json!({"ingressClassName": "other", "rules": rules("theirs")}),
    );
    given.ingress(
        "nobodys",
        1,
        json!({"ingressClassName": null, "rules": rules("nobodys")}),
    );
    let annotation = json!({"kubernetes.io/ingress.class": "skiff"});
    given.annotated(
        "old-style",
        1,
        annotation,
        json!({"ingressClassName": null, "rules": rules("old-style")}),
    );
    given.ingress("ours", 1, json!({"rules": rules("ours")}));
    let compiled = given.compile();
    for (host, expected) in [
        ("theirs", "404"),
        ("nobodys", "404"),
        ("old-style", "a"),
        ("ours", "a"),
    ] {
        assert_eq!(answers(&compiled, host, "/"), expected, "{host}");
    }
    assert_eq!(compiled.ingresses.len(), 2);
}

#[test]
fn backends_that_cannot_be_reached_are_reported() {
    let mut given = Given::new();
    given.put_service(
        "external",
        json!({"type": "ExternalName", "externalName": "example.com", "ports": [{"port": 80}]}),
    );
    given.put_service("udp", json!({"ports": [{"port": 80, "protocol": "UDP"}]}));
    given.put_service("tls", json!({"ports": [{"port": 80, "appProtocol": "https"}]}));
    let paths = [
        path("/missing", "missing"),
        path("/external", "external"),
        path("/udp", "udp"),
        path("/tls", "tls"),
        json!({"path": "/resource", "pathType": "Prefix", "backend": {"resource": {"kind": "Bucket", "name": "b"}}}),
        json!({"path": "/port", "pathType": "Prefix", "backend": {"service": {"name": "a", "port": {"name": "web"}}}}),
    ];
    given.ingress("bad", 1, json!({"rules": [rule("x", &paths)]}));
    given.put_slice("a", "169.254.169.254");
    given.ingress("metadata", 1, json!({"rules": [rule("y", &[path("/", "a")])]}));
    let compiled = given.compile();
    assert_eq!(answers(&compiled, "x", "/tls"), "tls");
    let route = compiled.table.find("x", "/tls").expect("a route");
    assert!(
        route
            .backend
            .as_ref()
            .is_some_and(|backend| backend.tls.is_some())
    );
    for name in ["missing", "external", "udp", "resource", "port"] {
        assert_eq!(answers(&compiled, "x", &format!("/{name}")), "503", "{name}");
    }
    let mut expected = [
        "ServiceNotFound",
        "ServicePortNotFound",
        "ServicePortNotFound",
        "UnsupportedBackend",
        "UnsupportedBackend",
    ];
    expected.sort_unstable();
    assert_eq!(reasons(&compiled, "bad"), expected);
    assert_eq!(reasons(&compiled, "metadata"), ["EndpointRefused"]);
    let backend = compiled
        .table
        .find("y", "/")
        .and_then(|route| route.backend.clone());
    let picked = backend.expect("a backend").pick(&[], 0.0, Instant::now());
    assert!(picked.is_none(), "{picked:?}");
}

#[test]
fn ports_are_found_by_name_and_number_and_say_their_protocol() {
    let mut given = Given::new();
    let ports = json!([{"name": "grpc", "port": 90, "appProtocol": "kubernetes.io/h2c"}, {"name": "http", "port": 80}]);
    given.put_service("a", json!({ "ports": ports }));
    let named = |name: &str| json!({"service": {"name": "a", "port": {"name": name}}});
    let paths = json!([
        {"path": "/grpc", "pathType": "Prefix", "backend": named("grpc")},
        {"path": "/http", "pathType": "ImplementationSpecific", "backend": named("http")},
        {"path": "/number", "pathType": "Exact", "backend": backend("a")},
    ]);
    given.ingress(
        "i",
        1,
        json!({"rules": [{"host": "x", "http": {"paths": paths}}]}),
    );
    let compiled = given.compile();
    let protocol = |path: &str| {
        let route = compiled.table.find("x", path).expect("a route");
        route.backend.as_ref().map(|backend| backend.protocol)
    };
    assert_eq!(protocol("/grpc"), Some(Protocol::Http2));
    assert_eq!(protocol("/http/x"), Some(Protocol::Http1));
    assert_eq!(protocol("/number"), Some(Protocol::Http1));
    assert!(compiled.table.find("x", "/number/x").is_none());
}

fn tls_secret(host: &str) -> Arc<Secret> {
    let made = rcgen::generate_simple_self_signed(vec![host.to_owned()]).expect("a certificate");
    let text = |text: String| k8s_openapi::ByteString(text.into_bytes());
    let data = [
        ("tls.crt".to_owned(), text(made.cert.pem())),
        ("tls.key".to_owned(), text(made.signing_key.serialize_pem())),
    ];
    Arc::new(Secret {
        data: Some(data.into()),
        type_: Some("kubernetes.io/tls".to_owned()),
        ..Secret::default()
    })
}

#[test]
fn hosts_with_a_certificate_redirect() {
    let mut given = Given::new();
    given.secrets.insert("d/good".into(), tls_secret("x.example"));
    let other = tls_secret("other");
    let mut mixed = (*tls_secret("x.example")).clone();
    if let (Some(data), Some(others)) = (&mut mixed.data, &other.data) {
        data.insert("tls.key".into(), others["tls.key"].clone());
    }
    given.secrets.insert("d/mixed".into(), Arc::new(mixed));
    let rules = |host: &str| json!([rule(host, &[path("/", "a")])]);
    let tls = |hosts: &[&str], secret: &str| json!([{"hosts": hosts, "secretName": secret}]);
    given.ingress(
        "good",
        1,
        json!({"rules": rules("x.example"), "tls": tls(&["x.example"], "good")}),
    );
    given.ingress(
        "wild",
        1,
        json!({"rules": rules("y.wild.example"), "tls": tls(&["*.wild.example"], "good")}),
    );
    given.ingress(
        "mixed",
        1,
        json!({"rules": rules("mixed.example"), "tls": tls(&["mixed.example"], "mixed")}),
    );
    given.ingress(
        "none",
        1,
        json!({"rules": rules("none.example"), "tls": tls(&[], "missing")}),
    );
    given.ingress(
        "rules",
        1,
        json!({"rules": rules("rules.example"), "tls": tls(&[], "good")}),
    );
    let plain = json!({"ingress.skiff.io/ssl-redirect": "false"});
    given.annotated(
        "plain",
        1,
        plain,
        json!({"rules": [rule("x.example", &[path("/plain", "b")])]}),
    );
    let forced = json!({"ingress.skiff.io/force-ssl-redirect": "true"});
    given.annotated("forced", 1, forced, json!({"rules": rules("forced.example")}));
    let compiled = given.compile();
    for (host, path, expected) in [
        ("x.example", "/", true),
        ("x.example", "/plain", false),
        ("y.wild.example", "/", true),
        ("mixed.example", "/", false),
        ("none.example", "/", false),
        ("rules.example", "/", true),
        ("forced.example", "/", true),
    ] {
        let route = compiled.table.find(host, path).expect("a route");
        assert_eq!(route.options.redirect_to_https, expected, "{host}{path}");
    }
    assert_eq!(reasons(&compiled, "mixed"), ["BadCertificate"]);
    assert_eq!(reasons(&compiled, "none"), ["CertificateNotFound"]);
    assert!(compiled.certificates.cover(&HostMatch::parse("rules.example")));
    assert!(compiled.certificates.find(Some("mixed.example")).is_none());
}

#[test]
fn endpoints_change_under_a_table() {
    let mut given = Given::new();
    given.ingress("i", 1, json!({"rules": [rule("x", &[path("/", "a")])]}));
    let mut backends = Backends::default();
    let compiled = given.compile_with(&mut backends);
    let backend = compiled
        .table
        .find("x", "/")
        .and_then(|route| route.backend.clone());
    let backend = backend.expect("a backend");
    let address = || {
        backend
            .pick(&[], 0.0, Instant::now())
            .map(|endpoint| endpoint.address.to_string())
    };
    assert_eq!(address().as_deref(), Some("10.0.0.1:8080"));
    given.put_slice("a", "10.0.0.9");
    let slices = given.slices("d", "a");
    refresh(
        &mut backends,
        "d",
        "a",
        &slices,
        &AddressPolicy::default(),
        Instant::now(),
    );
    assert_eq!(address().as_deref(), Some("10.0.0.9:8080"));
    refresh(
        &mut backends,
        "d",
        "a",
        &[],
        &AddressPolicy::default(),
        Instant::now(),
    );
    assert_eq!(address(), None);
}

/// Where the canary of a route leads to.
fn canary(compiled: &Compiled, host: &str, path: &str) -> Option<String> {
    let features = compiled.table.find(host, path)?.options.features.as_ref()?;
    let backend = features.canary.as_ref()?.backend.as_ref()?;
    Some(format!("{}/{}", backend.key.namespace, backend.key.service))
}

#[test]
fn canaries_are_of_the_namespace_that_has_the_very_route() {
    let typed = |text: &str, kind: &str, service: &str| {
        let mut path = path(text, service);
        path["pathType"] = kind.into();
        path
    };
    let annotations = json!({
        "nginx.ingress.kubernetes.io/canary": "true",
        "nginx.ingress.kubernetes.io/canary-weight": "100",
    });
    let mut given = Given::new();
    for name in ["b", "c"] {
        let service = given.services[&format!("d/{name}")].clone();
        given.services.insert(format!("e/{name}"), service);
    }
    given.ingress(
        "main",
        4,
        json!({"rules": [rule("x", &[path("/", "a"), path("/app", "a"), path("/caf%C3%A9", "a")])]}),
    );
    // They are routes of their own, and make nobody the owner of others.
    let exact = ["/", "/app/", "/app", "/caf%C3%A9"].map(|text| typed(text, "Exact", "b"));
    given.ingress("exact", 3, json!({"rules": [rule("x", &exact)]}));
    given.set_namespace("e");
    let prefixes = ["/", "/app/", "/app", "/caf%C3%A9", "/café"].map(|text| path(text, "c"));
    given.annotated(
        "theirs",
        2,
        annotations.clone(),
        json!({"rules": [rule("x", &prefixes)]}),
    );
    given.set_namespace("e");
    let compiled = given.compile();
    for path in ["/x", "/app/x", "/café/x"] {
        assert_eq!(answers(&compiled, "x", path), "a", "{path}");
        assert_eq!(canary(&compiled, "x", path), None, "{path}");
    }
    assert!(reasons(&compiled, "exact").is_empty());
    assert_eq!(reasons(&compiled, "theirs"), ["CanaryNotServed"; 5]);
    // Whoever has the route has its canaries, however the path is written.
    given.annotated(
        "own",
        1,
        annotations.clone(),
        json!({"rules": [rule("x", &[path("/", "c"), path("/app/", "c"), path("/café", "c")])]}),
    );
    let own = typed("/", "Exact", "c");
    given.annotated("own exact", 0, annotations, json!({"rules": [rule("x", &[own])]}));
    given.set_namespace("e");
    let compiled = given.compile();
    for path in ["/x", "/app/x", "/café/x"] {
        assert_eq!(canary(&compiled, "x", path).as_deref(), Some("d/c"), "{path}");
    }
    assert_eq!(canary(&compiled, "x", "/").as_deref(), Some("e/c"));
    assert!(reasons(&compiled, "own").is_empty());
    assert!(reasons(&compiled, "own exact").is_empty());
}

#[test]
fn paths_of_other_namespaces_stay_as_they_are() {
    let annotation =
        |name: &str, value: &str| json!({(format!("nginx.ingress.kubernetes.io/{name}")): value});
    let mut exact = path("/health", "a");
    exact["pathType"] = "Exact".into();
    let mut given = Given::new();
    given.ingress(
        "theirs",
        3,
        json!({"rules": [rule("x", &[path("/", "b"), exact])]}),
    );
    for (name, annotations) in [
        ("regex", annotation("use-regex", "true")),
        ("root", annotation("app-root", "/own")),
    ] {
        given.annotated(
            name,
            2,
            annotations,
            json!({"rules": [rule("x", &[path(&format!("/{name}"), "c")])]}),
        );
        given.set_namespace("e");
    }
    given.services.insert("e/c".into(), given.services["d/c"].clone());
    let compiled = given.compile();
    for (path, expected) in [
        ("/health", "a"),
        ("/health/secret", "b"),
        ("/HEALTH", "b"),
        ("/regexes", "c"),
        ("/", "b"),
    ] {
        assert_eq!(answers(&compiled, "x", path), expected, "{path}");
    }
    assert!(reasons(&compiled, "regex").is_empty());
    assert_eq!(reasons(&compiled, "root"), ["RouteTaken"]);
}

#[test]
fn a_namespace_has_so_many_expressions() {
    let regex = json!({"nginx.ingress.kubernetes.io/use-regex": "true"});
    let restricted = json!({"nginx.ingress.kubernetes.io/whitelist-source-range": "10.0.0.0/8"});
    let mut given = Given::new();
    let mut paths = vec![path("/", "a")];
    paths.extend((1..MAX_NAMESPACE_REGEXES).map(|number| path(&format!("/{number}$"), "a")));
    let both = [rule("x", &paths), rule("y", &[path("/1$", "a")])];
    given.annotated("all", 3, regex, json!({"rules": both}));
    // One that there is already is not counted twice.
    given.ingress(
        "more",
        2,
        json!({"rules": [rule("x", &[path("/more", "b")]), rule("y", &[path("/", "b")])]}),
    );
    given.annotated(
        "restricted",
        1,
        restricted,
        json!({"rules": [rule("x", &[path("/secret", "c")])]}),
    );
    given.annotated(
        "others",
        0,
        json!({"nginx.ingress.kubernetes.io/use-regex": "true"}),
        json!({"rules": [rule("z", &[path("/theirs", "b")])]}),
    );
    given.services.insert("e/b".into(), given.services["d/b"].clone());
    given.set_namespace("e");
    let compiled = given.compile();
    assert!(reasons(&compiled, "all").is_empty());
    assert_eq!(reasons(&compiled, "more"), ["BadPath"]);
    assert_eq!(reasons(&compiled, "restricted"), ["BadPath"]);
    assert!(reasons(&compiled, "others").is_empty());
    assert_eq!(answers(&compiled, "x", "/255"), "a");
    assert_eq!(answers(&compiled, "x", "/more"), "a");
    assert_eq!(answers(&compiled, "y", "/more"), "b");
    assert_eq!(answers(&compiled, "z", "/theirs"), "b");
    let route = compiled.table.find("x", "/secret/x").expect("a route");
    assert!(
        route
            .options
            .features
            .as_ref()
            .is_some_and(|features| features.closed)
    );
}
