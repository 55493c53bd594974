//! Annotations over real sockets, in one process: Ingresses are compiled as in a cluster, and asked by clients.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::{Ingress, IngressClass};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use crate::backend::Protocol;
use crate::compile::{CertificateCache, Compiled, Compiler, Objects};
use crate::connections::ConnectionLimits;
use crate::endpoints::AddressPolicy;
use crate::features::resolve::{FeatureCache, MAX_NAMESPACE_REGEXES, MAX_REGEXES};
use crate::proxy_tests::{Echo, PATIENCE, Running, exchange, statuses};

/// Objects, and where the endpoints of Services really are: no Ingress may reach loopback, so that is put in later.
pub(crate) struct Cluster {
    pub(crate) running: Running,
    ingresses: Vec<Arc<Ingress>>,
    services: HashMap<String, Arc<Service>>,
    endpoints: HashMap<String, Vec<SocketAddr>>,
    secrets: HashMap<String, Arc<Secret>>,
    pub(crate) cache: FeatureCache,
}

struct Given<'a>(&'a Cluster);

impl Objects for Given<'_> {
    fn ingresses(&self) -> Vec<Arc<Ingress>> {
        self.0.ingresses.clone()
    }
    fn classes(&self) -> Vec<Arc<IngressClass>> {
        vec![object(
            json!({"metadata": {"name": "skiff"}, "spec": {"controller": "skiff.io/ingress"}}),
        )]
    }
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        self.0.services.get(&format!("{namespace}/{name}")).cloned()
    }
    fn slices(&self, _: &str, _: &str) -> Vec<Arc<EndpointSlice>> {
        Vec::new()
    }
    fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.0.secrets.get(&format!("{namespace}/{name}")).cloned()
    }
}

fn object<K: serde::de::DeserializeOwned>(value: Value) -> Arc<K> {
    Arc::new(serde_json::from_value(value).expect("an object"))
}

impl Cluster {
    pub(crate) async fn start() -> Cluster {
        Cluster {
            running: Running::start(ConnectionLimits::default()).await,
            ingresses: Vec::new(),
            services: HashMap::new(),
            endpoints: HashMap::new(),
            secrets: HashMap::new(),
            cache: FeatureCache::default(),
        }
    }

    pub(crate) fn service(&mut self, key: &str, annotations: Value, endpoints: &[SocketAddr]) {
        let (namespace, name) = key.split_once('/').expect("namespace/name");
        let service = json!({"metadata": {"name": name, "namespace": namespace, "annotations": annotations},
            "spec": {"ports": [{"port": 80}, {"name": "tls", "port": 443}]}});
        self.services.insert(key.to_owned(), object(service));
        self.endpoints.insert(key.to_owned(), endpoints.to_vec());
    }

    pub(crate) fn secret(&mut self, key: &str, data: &[(&str, &str)]) {
        let data = data
            .iter()
            .map(|(name, text)| ((*name).to_owned(), ByteString(text.as_bytes().to_vec())));
        let mut secret = Secret {
            data: Some(data.collect()),
            ..Secret::default()
        };
        secret.metadata.resource_version = Some(format!("{:x}", rand::random::<u64>()));
        self.secrets.insert(key.to_owned(), Arc::new(secret));
    }

    /// An Ingress of host `a` in namespace `d`, with paths as `path service`. Names without a `/` are ingress-nginx'.
    pub(crate) fn ingress(&mut self, name: &str, annotations: &[(&str, &str)], paths: &[&str]) {
        let paths: Vec<Value> = paths
            .iter()
            .map(|each| {
                let (path, service) = each.split_once(' ').expect("path service");
                json!({"path": path, "pathType": "ImplementationSpecific",
                    "backend": {"service": {"name": service, "port": {"number": 80}}}})
            })
            .collect();
        let annotations: serde_json::Map<String, Value> = annotations
            .iter()
            .map(|(name, value)| (format!("nginx.ingress.kubernetes.io/{name}"), (*value).into()))
            .collect();
        let created = format!("2026-01-01T00:00:{:02}Z", self.ingresses.len());
        self.ingresses.push(object(json!({
            "metadata": {"name": name, "namespace": "d", "uid": name, "annotations": annotations, "creationTimestamp": created},
            "spec": {"ingressClassName": "skiff", "rules": [{"host": "a", "http": {"paths": paths}}]},
        })));
    }

    /// Compiles and serves; answers with the problems.
    pub(crate) fn serve(&mut self) -> Vec<String> {
        let mut cache = std::mem::take(&mut self.cache);
        let mut backends = self.running.backends.lock();
        let compiler = Compiler {
            objects: &Given(self),
            policy: &AddressPolicy::default(),
            backends: &mut backends,
            cache: &mut CertificateCache::default(),
            features: &mut cache,
            now: Instant::now(),
        };
        let Compiled { table, ingresses, .. } = compiler.run();
        for (key, endpoints) in &self.endpoints {
            let (namespace, name) = key.split_once('/').expect("namespace/name");
            for backend in backends.of_service(namespace, name) {
                backends.put(
                    backend.key.clone(),
                    backend.transport(),
                    endpoints,
                    Instant::now(),
                );
            }
        }
        drop(backends);
        self.running.proxy.table.store(Arc::new(table));
        self.cache = cache;
        let problems = ingresses.into_iter().flat_map(|(_, problems)| problems);
        problems.map(|problem| problem.message).collect()
    }

    /// One Service `s`, and an Ingress for `/` of it.
    pub(crate) async fn with(annotations: &[(&str, &str)]) -> (Cluster, Echo) {
        let echo = Echo::start(Protocol::Http1).await;
        let mut cluster = Cluster::start().await;
        cluster.service("d/s", json!({}), &[echo.address]);
        cluster.ingress("i", annotations, &["/ s"]);
        (cluster, echo)
    }

    pub(crate) async fn ask(&self, method: &str, path: &str, headers: &str) -> String {
        let request = format!("{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}\r\n");
        exchange(self.running.http, request.as_bytes()).await
    }

    pub(crate) async fn get(&self, path: &str, headers: &str) -> String {
        self.ask("GET", path, headers).await
    }

    pub(crate) async fn status(&self, path: &str, headers: &str) -> String {
        let answer = self.get(path, headers).await;
        statuses(&answer).first().copied().unwrap_or_default().to_owned()
    }
}

pub(crate) fn header<'a>(answer: &'a str, name: &str) -> Option<&'a str> {
    let head = answer.split("\r\n\r\n").next().unwrap_or_default();
    let mut lines = head.lines().filter_map(|line| line.split_once(": "));
    lines.find_map(|(key, value)| key.eq_ignore_ascii_case(name).then_some(value))
}

#[tokio::test]
async fn paths_are_rewritten_and_never_climb() {
    let (mut cluster, echo) = Cluster::with(&[]).await;
    cluster.ingresses.clear();
    cluster.ingress(
        "i",
        &[("rewrite-target", "/new/$2"), ("x-forwarded-prefix", "/old")],
        &["/old(/|$)(.*) s"],
    );
    cluster.ingress("plain", &[], &["/plain s"]);
    assert_eq!(cluster.serve(), Vec::<String>::new());
    for (path, expected) in [
        ("/old/x/y?q=1", "/new/x/y?q=1"),
        ("/old", "/new/"),
        ("/OLD/X", "/new/X"),
        ("/old/a%2Fb", "/new/a%2Fb"),
        ("/old/%61", "/new/a"),
        ("//old//x", "/new/x"),
        // All paths of the host are expressions without regard to case.
        ("/PLAINLY", "/PLAINLY"),
    ] {
        echo.seen.lock().clear();
        assert_eq!(cluster.status(path, "").await, "200", "{path}");
        assert_eq!(echo.lines(), [format!("GET {expected}")], "{path}");
    }
    let seen = echo.seen.lock().clone();
    assert!(!seen[0].headers.contains_key("x-forwarded-prefix"));
    cluster.status("/old/x", "X-Forwarded-Prefix: /evil\r\n").await;
    let seen = echo.seen.lock().clone();
    assert_eq!(
        seen[1]
            .headers
            .get_all("x-forwarded-prefix")
            .iter()
            .collect::<Vec<_>>(),
        ["/old"]
    );
    echo.seen.lock().clear();
    for path in [
        "/old/../etc",
        "/old/%2e%2e/etc",
        "/old/..%2Fetc",
        "/old/%2E%2e%2f..%2fetc",
        "/old/..%5cetc",
        "/old/.%2fx",
    ] {
        assert_eq!(cluster.status(path, "").await, "400", "{path}");
    }
    assert_eq!(cluster.status("/older", "").await, "404");
    assert_eq!(cluster.status("/x/old/", "").await, "404");
    assert!(echo.lines().is_empty(), "{:?}", echo.lines());
}

#[tokio::test]
async fn the_longest_expression_wins() {
    let (mut cluster, _echo) = Cluster::with(&[]).await;
    let mut echoes = Vec::new();
    for name in ["one", "two", "three"] {
        let echo = Echo::start(Protocol::Http1).await;
        cluster.service(&format!("d/{name}"), json!({}), &[echo.address]);
        echoes.push(echo);
    }
    cluster.ingresses.clear();
    cluster.ingress(
        "i",
        &[("use-regex", "true")],
        &[
            "/foo/.* one",
            "/foo/bar/.+ two",
            "/foo/bar/[a-z]{3} three",
            "/(?=x) one",
        ],
    );
    let problems = cluster.serve();
    assert!(
        problems.len() == 1 && problems[0].contains("/(?=x)"),
        "{problems:?}"
    );
    for (path, expected) in [
        ("/foo/x", 0),
        ("/foo/bar/1", 1),
        ("/foo/bar/abc", 2),
        ("/foo/bar/abcd", 2),
    ] {
        cluster.get(path, "").await;
        let lines: Vec<usize> = echoes
            .iter()
            .map(|echo| std::mem::take(&mut *echo.seen.lock()).len())
            .collect();
        assert_eq!(
            lines.iter().position(|count| *count == 1),
            Some(expected),
            "{path}: {lines:?}"
        );
    }
    assert_eq!(cluster.status("/x", "").await, "404");
}

#[test]
fn all_namespaces_have_so_many_expressions() {
    let mut cache = FeatureCache::default();
    // What cannot be used takes no place.
    assert!(cache.regex("last", "/(").is_err());
    for number in 0..MAX_REGEXES {
        let namespace = format!("n{}", number / MAX_NAMESPACE_REGEXES);
        assert!(cache.regex(&namespace, &format!("/{number}")).is_ok(), "{number}");
    }
    // What others have may be shared.
    assert!(cache.regex("last", "/0").is_ok());
    assert!(cache.regex("last", "/last").is_err());
    // Only what is used counts.
    cache.forget_unused();
    assert!(cache.regex("n0", "/0").is_ok());
    assert!(cache.regex("last", "/last").is_ok());
}

#[test]
fn expressions_of_a_namespace_are_limited_together() {
    let mut cache = FeatureCache::default();
    let large = |number: usize| format!("/{number}[01]*1[01]{{100}}x");
    let taken = (0..MAX_NAMESPACE_REGEXES)
        .take_while(|number| cache.regex("n", &large(*number)).is_ok())
        .count();
    assert!((16..=64).contains(&taken), "{taken}");
    // What is there is not counted twice, and another namespace has its own share.
    assert!(cache.regex("n", &large(0)).is_ok());
    assert!(cache.regex("other", &large(MAX_NAMESPACE_REGEXES)).is_ok());
}

#[tokio::test]
async fn paths_have_a_limit() {
    let (mut cluster, echo) = Cluster::with(&[("use-regex", "true")]).await;
    cluster.serve();
    assert_eq!(cluster.status(&format!("/{}", "x".repeat(4095)), "").await, "200");
    assert_eq!(cluster.status(&format!("/{}", "x".repeat(4096)), "").await, "414");
    assert_eq!(
        cluster.status(&format!("/?{}", "x".repeat(4096)), "").await,
        "200"
    );
    assert_eq!(echo.lines().len(), 2);
}

#[tokio::test]
async fn redirects_keep_to_their_header() {
    let check = async |annotations: &[(&str, &str)], path: &str, expected: (&str, Option<&str>)| {
        let (mut cluster, echo) = Cluster::with(annotations).await;
        cluster.serve();
        let answer = cluster.get(path, "").await;
        assert_eq!(
            (statuses(&answer), header(&answer, "location")),
            (vec![expected.0], expected.1),
            "{annotations:?}"
        );
        assert_eq!(echo.lines().is_empty(), expected.0 != "200");
    };
    let to = ("permanent-redirect", "https://b.example$request_uri");
    check(&[to], "/p?q=1", ("301", Some("https://b.example/p?q=1"))).await;
    check(
        &[to, ("permanent-redirect-code", "308")],
        "/",
        ("308", Some("https://b.example/")),
    )
    .await;
    check(
        &[to, ("permanent-redirect-code", "200")],
        "/",
        ("301", Some("https://b.example/")),
    )
    .await;
    check(
        &[("temporal-redirect", "http://c.example/x")],
        "/p",
        ("302", Some("http://c.example/x")),
    )
    .await;
    check(
        &[
            ("temporal-redirect", "http://c"),
            ("temporal-redirect-code", "307"),
        ],
        "/",
        ("307", Some("http://c")),
    )
    .await;
    check(&[("app-root", "/app")], "/", ("302", Some("http://a/app"))).await;
    check(&[("app-root", "/app")], "/x", ("200", None)).await;
    // Escapes of line ends stay escapes.
    check(
        &[to],
        "/%0d%0aSet-Cookie:x",
        ("301", Some("https://b.example/%0d%0aSet-Cookie:x")),
    )
    .await;
    for bad in [
        "https://b\r\nSet-Cookie: x",
        "javascript:alert(1)",
        "https://$http_cookie",
        "b c",
    ] {
        check(&[("permanent-redirect", bad)], "/", ("200", None)).await;
    }
    check(&[("app-root", "//evil$host")], "/", ("200", None)).await;
}

#[tokio::test]
async fn bodies_and_backends_have_limits() {
    let (mut cluster, _echo) =
        Cluster::with(&[("proxy-body-size", "4"), ("upstream-vhost", "inner.example")]).await;
    cluster.serve();
    let post = |body: &str| {
        let length = body.len();
        format!("POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}")
    };
    let http = cluster.running.http;
    assert_eq!(statuses(&exchange(http, post("12345").as_bytes()).await), ["413"]);
    assert_eq!(statuses(&exchange(http, post("1234").as_bytes()).await), ["200"]);
    let seen = _echo.seen.lock().clone();
    assert_eq!(seen[0].headers["host"], "inner.example");
    assert_eq!(seen[0].headers["x-forwarded-host"], "a");
    // It accepts, and neither reads nor answers.
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = silent.local_addr().expect("an address");
    for annotations in [
        &[("proxy-read-timeout", "1")][..],
        &[("proxy-send-timeout", "1"), ("proxy-read-timeout", "3600")],
    ] {
        let (mut cluster, _echo) = Cluster::with(annotations).await;
        cluster.service("d/s", json!({}), &[address]);
        cluster.serve();
        let request = match annotations.len() {
            1 => "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".to_owned(),
            _ => post(&"x".repeat(32 << 20)),
        };
        let began = Instant::now();
        let mut stream = TcpStream::connect(cluster.running.http)
            .await
            .expect("a connection");
        let (mut read, mut write) = stream.split();
        let sent = async {
            let _ = write.write_all(request.as_bytes()).await;
            std::future::pending::<()>().await;
        };
        let mut answer = Vec::new();
        let got = async {
            use tokio::io::AsyncReadExt;
            while !answer.starts_with(b"HTTP/1.1 504") {
                let count = read.read_buf(&mut answer).await.expect("an answer");
                assert!(count > 0, "{:?}", String::from_utf8_lossy(&answer));
            }
        };
        tokio::select! {
            () = sent => {}
            done = tokio::time::timeout(PATIENCE, got) => done.expect("504"),
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{annotations:?}");
    }
}

#[tokio::test]
async fn clients_stay_with_their_endpoint() {
    let (mut cluster, first) =
        Cluster::with(&[("affinity", "cookie"), ("session-cookie-name", "route")]).await;
    let others = [
        Echo::start(Protocol::Http1).await,
        Echo::start(Protocol::Http1).await,
    ];
    let all = [first.address, others[0].address, others[1].address];
    cluster.service("d/s", json!({}), &all);
    cluster.serve();
    let answer = cluster.get("/", "").await;
    let cookie = header(&answer, "set-cookie").expect("a cookie").to_owned();
    assert!(
        cookie.starts_with("route=") && cookie.ends_with("; Path=/; HttpOnly"),
        "{cookie}"
    );
    assert!(!cookie.contains("127.0.0.1"));
    let shown = format!("Cookie: x=y; {}\r\n", cookie.split(';').next().expect("a value"));
    let echoes = [&first, &others[0], &others[1]];
    let home = echoes
        .iter()
        .position(|echo| !echo.lines().is_empty())
        .expect("an endpoint");
    for _ in 0..6 {
        let answer = cluster.get("/", &shown).await;
        assert_eq!(
            (statuses(&answer), header(&answer, "set-cookie")),
            (vec!["200"], None)
        );
    }
    assert_eq!(echoes[home].lines().len(), 7);
    // The others change: nothing changes for the client, nor in another process.
    cluster.service("d/s", json!({}), &[all[home], all[(home + 1) % 3]]);
    cluster.cache = FeatureCache::default();
    cluster.serve();
    cluster.get("/", &shown).await;
    assert_eq!(echoes[home].lines().len(), 8);
    // Its own goes: it gets another, and a cookie for that.
    cluster.service("d/s", json!({}), &[all[(home + 1) % 3]]);
    cluster.serve();
    let answer = cluster.get("/", &shown).await;
    let new = header(&answer, "set-cookie").expect("a cookie");
    assert_ne!(new, cookie);
    for forged in [
        "route=",
        "route=zz",
        "route=127.0.0.1:80",
        "route=00000000000000000000000000000000",
    ] {
        let answer = cluster.get("/", &format!("Cookie: {forged}\r\n")).await;
        assert_eq!(
            (statuses(&answer), header(&answer, "set-cookie")),
            (vec!["200"], Some(new)),
            "{forged}"
        );
    }
}

#[tokio::test]
async fn one_client_gets_so_many_requests() {
    let (mut cluster, echo) = Cluster::with(&[("limit-rpm", "1"), ("limit-burst-multiplier", "3")]).await;
    cluster.serve();
    let mut statuses = Vec::new();
    for number in 0..6 {
        // A new table does not begin to count anew.
        cluster.serve();
        statuses.push(
            cluster
                .status("/", &format!("X-Forwarded-For: 10.0.0.{number}\r\n"))
                .await,
        );
    }
    assert_eq!(statuses, ["200", "200", "200", "200", "503", "503"]);
    assert_eq!(echo.lines().len(), 4);
    let (mut cluster, _echo) = Cluster::with(&[("limit-rps", "1"), ("limit-whitelist", "127.0.0.0/8")]).await;
    cluster.serve();
    for _ in 0..12 {
        assert_eq!(cluster.status("/", "").await, "200");
    }
    // At a time: a backend that does not answer holds the place.
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let (mut cluster, _echo) = Cluster::with(&[("limit-connections", "1")]).await;
    cluster.service("d/s", json!({}), &[silent.local_addr().expect("an address")]);
    cluster.serve();
    let mut held = TcpStream::connect(cluster.running.http)
        .await
        .expect("a connection");
    held.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        .await
        .expect("sent");
    let accepted = tokio::time::timeout(PATIENCE, silent.accept()).await;
    let accepted = accepted.expect("the request").expect("a connection");
    assert_eq!(cluster.status("/", "").await, "503");
    drop((held, accepted));
    let freed = async {
        cluster.service("d/s", json!({}), &[_echo.address]);
        cluster.serve();
        while cluster.status("/", "").await != "200" {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, freed)
        .await
        .expect("the place is free again");
}

#[tokio::test]
async fn canaries_take_their_share() {
    let (mut cluster, main) = Cluster::with(&[]).await;
    let trial = Echo::start(Protocol::Http1).await;
    cluster.service("d/trial", json!({}), &[trial.address]);
    let canary = [
        ("canary", "true"),
        ("canary-by-header", "X-Trial"),
        ("canary-by-cookie", "trial"),
    ];
    cluster.ingress("canary", &canary, &["/ trial", "/none trial"]);
    let problems = cluster.serve();
    assert!(
        problems.len() == 1 && problems[0].contains("/none"),
        "{problems:?}"
    );
    for (headers, expected) in [
        ("", 0),
        ("X-Trial: always\r\n", 1),
        ("X-Trial: never\r\nCookie: trial=always\r\n", 0),
        ("Cookie: trial=always\r\n", 1),
        ("X-Trial: other\r\n", 0),
    ] {
        main.seen.lock().clear();
        trial.seen.lock().clear();
        assert_eq!(cluster.status("/none", headers).await, "200");
        assert_eq!(
            (main.lines().len(), trial.lines().len()),
            (1 - expected, expected),
            "{headers}"
        );
    }
    cluster.ingresses.pop();
    cluster.ingress(
        "canary",
        &[("canary", "true"), ("canary-weight", "100")],
        &["/ trial"],
    );
    cluster.serve();
    trial.seen.lock().clear();
    assert_eq!(cluster.status("/", "").await, "200");
    assert_eq!(trial.lines().len(), 1);
    // One of another namespace takes nothing either.
    cluster.ingresses.pop();
    cluster.ingress(
        "canary",
        &[("canary", "true"), ("canary-weight", "100")],
        &["/ trial"],
    );
    if let Some(canary) = cluster.ingresses.last_mut() {
        Arc::make_mut(canary).metadata.namespace = Some("e".to_owned());
    }
    cluster.service("e/trial", json!({}), &[trial.address]);
    assert_eq!(cluster.serve().len(), 1);
    assert_eq!(cluster.status("/", "").await, "200");
    assert_eq!(trial.lines().len(), 1);
    // A canary that cannot be read takes nothing, and is no Ingress of its own.
    cluster.ingresses.pop();
    cluster.ingress("canary", &[("canary", "maybe")], &["/trial trial"]);
    cluster.serve();
    assert_eq!(cluster.status("/trial", "").await, "503");
    assert_eq!(trial.lines().len(), 1);
}

#[tokio::test]
async fn hosts_have_aliases() {
    let (mut cluster, _echo) = Cluster::with(&[("server-alias", "b, *.c.example, a")]).await;
    let problems = cluster.serve();
    assert_eq!(problems.len(), 1, "{problems:?}");
    for (host, expected) in [
        ("b", "200"),
        ("x.c.example", "200"),
        ("c.example", "404"),
        ("d", "404"),
    ] {
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        let answer = exchange(cluster.running.http, request.as_bytes()).await;
        assert_eq!(statuses(&answer), [expected], "{host}");
    }
}

#[tokio::test]
async fn cross_origin_requests_are_answered() {
    let (mut cluster, echo) = Cluster::with(&[("enable-cors", "true")]).await;
    cluster.serve();
    let answer = cluster
        .ask(
            "OPTIONS",
            "/",
            "Origin: https://x\r\nAccess-Control-Request-Method: PUT\r\n",
        )
        .await;
    assert_eq!(statuses(&answer), ["204"]);
    assert!(echo.lines().is_empty());
    for (name, value) in [
        ("access-control-allow-origin", "*"),
        ("access-control-allow-credentials", "true"),
        (
            "access-control-allow-methods",
            "GET, PUT, POST, DELETE, PATCH, OPTIONS",
        ),
        ("access-control-max-age", "1728000"),
    ] {
        assert_eq!(header(&answer, name), Some(value), "{name}");
    }
    let annotations = [
        ("enable-cors", "true"),
        ("cors-allow-origin", "https://*.good.example, https://one.example"),
        ("cors-allow-credentials", "false"),
        ("cors-allow-methods", "GET"),
        ("cors-allow-headers", "X-A\r\nX-Evil: 1"),
        ("cors-expose-headers", "*, X-B"),
        ("cors-max-age", "600"),
        ("whitelist-source-range", "10.0.0.0/8"),
    ];
    let (mut cluster, _echo) = Cluster::with(&annotations[..7]).await;
    let problems = cluster.serve();
    assert!(
        problems.len() == 1 && problems[0].contains("cors-allow-headers"),
        "{problems:?}"
    );
    let answer = cluster.get("/", "Origin: https://a.good.example\r\n").await;
    assert_eq!(
        header(&answer, "access-control-allow-origin"),
        Some("https://a.good.example")
    );
    assert_eq!(header(&answer, "access-control-allow-credentials"), None);
    assert_eq!(header(&answer, "access-control-expose-headers"), Some("*, X-B"));
    assert_eq!(header(&answer, "vary"), Some("Origin"));
    assert!(!answer.contains("x-evil"));
    for origin in [
        "https://a.b.good.example",
        "https://good.example",
        "https://one.example.evil",
        "null",
    ] {
        let answer = cluster.get("/", &format!("Origin: {origin}\r\n")).await;
        assert_eq!(
            (statuses(&answer), header(&answer, "access-control-allow-origin")),
            (vec!["200"], None),
            "{origin}"
        );
    }
    // A preflight says nothing of who the client is; a refusal can be read by pages of the origin.
    let (mut cluster, _echo) = Cluster::with(&annotations).await;
    cluster.serve();
    let origin = "Origin: https://one.example\r\n";
    assert_eq!(statuses(&cluster.ask("OPTIONS", "/", origin).await), ["204"]);
    let answer = cluster.get("/", origin).await;
    assert_eq!(
        (statuses(&answer), header(&answer, "access-control-allow-origin")),
        (vec!["403"], Some("https://one.example"))
    );
}
