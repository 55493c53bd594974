//! A whole API server on a store in a temporary folder, driven through the in-process door.
#![allow(dead_code)]

pub mod peer;

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use rustls::pki_types::ServerName;
use serde_json::Value;
use skiff_admission::Chain;
use skiff_auth::UserInfo;
use skiff_server::{
    Answer, AuditConfig, AuditMode, AuditPolicy, Body, ClientCertificates, InProcess, KubeletClient,
    LogOptions, Server, ServerConfig, ServiceAccountKey, Version,
};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

pub struct Cluster {
    pub server: Server,
    pub store: Arc<dyn skiff_store::Store>,
    pub shutdown: CancellationToken,
    pub pki: skiff_pki::Pki,
    dir: tempfile::TempDir,
}

/// A log of what these rules of a policy choose.
pub fn audit_config(path: &std::path::Path, rules: &str, mode: AuditMode) -> AuditConfig {
    let policy = format!("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules:\n{rules}");
    AuditConfig {
        policy: AuditPolicy::parse(&policy).expect("a policy"),
        webhook: None,
        log: Some(LogOptions {
            path: path.to_owned(),
            max_size_megabytes: 0,
            max_backups: 0,
            max_age_days: 0,
            compress: false,
            mode,
        }),
    }
}

/// A cluster that records what the rules choose, and its log.
pub struct Audited {
    pub cluster: Cluster,
    path: std::path::PathBuf,
    _folder: tempfile::TempDir,
}

impl Audited {
    pub async fn start(rules: &str) -> Audited {
        // However slow the machine is, what was answered is in the log.
        Audited::in_mode(rules, AuditMode::BlockingStrict).await
    }

    pub async fn in_mode(rules: &str, mode: AuditMode) -> Audited {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.log");
        let cluster = Cluster::audited(audit_config(&path, rules, mode)).await;
        Audited {
            cluster,
            path,
            _folder: folder,
        }
    }

    /// The events of what users do.
    pub fn events(&self) -> Vec<Value> {
        let mut events = self.all_events();
        events.retain(|event| event["user"]["username"] != "system:apiserver");
        events
    }

    /// Those of the server's own loops too.
    #[allow(dead_code, reason = "not every test looks at the server's own")]
    pub fn all_events(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.path).expect("a log");
        text.lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect()
    }

    /// The last event of a request, by its answer.
    pub fn event_of(&self, reply: &Reply) -> Value {
        let id = reply.headers["audit-id"].to_str().expect("text");
        let events = self.events();
        let of_it = events.into_iter().rfind(|event| event["auditID"] == id);
        of_it.expect("an event")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// An answer that was read to its end.
#[derive(Debug)]
pub struct Reply {
    pub code: u16,
    pub headers: HeaderMap,
    pub bytes: Bytes,
    pub text: String,
    pub json: Value,
}

impl Cluster {
    pub async fn start() -> Cluster {
        Cluster::over([]).await
    }

    /// Over a store that holds these values already.
    pub async fn over(values: impl IntoIterator<Item = (&'static str, Bytes)>) -> Cluster {
        use skiff_store::{Expect, Op, Store};
        let dir = tempfile::tempdir().expect("a folder");
        let store = skiff_store::Embedded::open(dir.path().join("store")).expect("a store");
        for (key, value) in values {
            let written = store.write(key, Expect::Absent, Op::Put(value), None).await;
            written.expect("a write");
        }
        Cluster::open(dir, Arc::new(store), None, Chain::recommended()).await
    }

    /// One that records its requests.
    pub async fn audited(audit: AuditConfig) -> Cluster {
        Cluster::audited_with(audit, Chain::recommended()).await
    }

    pub async fn audited_with(audit: AuditConfig, chain: Chain) -> Cluster {
        let dir = tempfile::tempdir().expect("a folder");
        let store = skiff_store::Embedded::open(dir.path().join("store")).expect("a store");
        Cluster::open(dir, Arc::new(store), Some(audit), chain).await
    }

    /// Over a store of the test's own.
    pub async fn on(store: Arc<dyn skiff_store::Store>) -> Cluster {
        let dir = tempfile::tempdir().expect("a folder");
        Cluster::open(dir, store, None, Chain::recommended()).await
    }

    /// One whose configuration the test changes, with a folder for files and the cluster's keys.
    pub async fn adjusted(
        adjust: impl FnOnce(&mut ServerConfig, &std::path::Path, &skiff_pki::Pki),
    ) -> Cluster {
        let dir = tempfile::tempdir().expect("a folder");
        let store = skiff_store::Embedded::open(dir.path().join("store")).expect("a store");
        Cluster::opened(dir, Arc::new(store), None, Chain::recommended(), adjust).await
    }

    /// Both.
    pub async fn adjusted_on(
        store: Arc<dyn skiff_store::Store>,
        adjust: impl FnOnce(&mut ServerConfig, &std::path::Path, &skiff_pki::Pki),
    ) -> Cluster {
        let dir = tempfile::tempdir().expect("a folder");
        Cluster::opened(dir, store, None, Chain::recommended(), adjust).await
    }

    async fn open(
        dir: tempfile::TempDir,
        store: Arc<dyn skiff_store::Store>,
        audit: Option<AuditConfig>,
        admission: Chain,
    ) -> Cluster {
        Cluster::opened(dir, store, audit, admission, |_, _, _| {}).await
    }

    async fn opened(
        dir: tempfile::TempDir,
        store: Arc<dyn skiff_store::Store>,
        audit: Option<AuditConfig>,
        admission: Chain,
        adjust: impl FnOnce(&mut ServerConfig, &std::path::Path, &skiff_pki::Pki),
    ) -> Cluster {
        let pki = skiff_pki::Pki::open(&dir.path().join("pki")).expect("keys");
        let (private_key, public_key) = pki.service_account_keys().expect("a key");
        let issuer = "https://kubernetes.default.svc.cluster.local".to_string();
        let names = ["localhost".to_string(), "127.0.0.1".to_string()];
        let identity = pki
            .serving("apiserver", "kube-apiserver", &names)
            .expect("a certificate");
        let front_proxy = pki.front_proxy().expect("a front proxy");
        let authorities = [pki.ca_certificate(), &front_proxy.ca];
        let tls = Arc::new(skiff_pki::asking_server_config(&identity, &authorities).expect("TLS"));
        let client = pki
            .client(
                "apiserver-kubelet-client",
                "kube-apiserver",
                Some("system:masters"),
            )
            .expect("a certificate");
        let kubelet = Arc::new(skiff_pki::client_config(pki.ca_certificate(), Some(&client)).expect("TLS"));
        let shutdown = CancellationToken::new();
        let mut config = ServerConfig {
            store: store.clone(),
            service_cidr: "10.96.0.0/16".to_string(),
            node_ports: 30000..=32767,
            runtime_config: Default::default(),
            advertise_address: "192.0.2.1".parse().expect("an address"),
            advertise_port: 6443,
            tls,
            client_certificates: Some(ClientCertificates {
                client_ca: pki.ca_certificate().to_string(),
                front_proxy: Some(front_proxy),
            }),
            service_account: Some(ServiceAccountKey {
                private_key,
                public_key,
                issuer,
                audiences: Vec::new(),
            }),
            authentication: Default::default(),
            authorization: vec![skiff_auth::Mode::Node, skiff_auth::Mode::Rbac],
            admission,
            kubelet: Some(KubeletClient { tls: kubelet }),
            recorder: Arc::default(),
            audit,
            instance: String::new(),
            kms_health: None,
            version: Version::default(),
            shutdown: shutdown.clone(),
        };
        adjust(&mut config, dir.path(), &pki);
        let server = Server::start(config).await.expect("starts");
        Cluster {
            server,
            store,
            shutdown,
            pki,
            dir,
        }
    }

    pub fn admin(&self) -> InProcess {
        self.server.service(UserInfo::new("admin", ["system:masters"]))
    }

    pub async fn send(&self, method: &str, uri: &str, content_type: &str, body: impl Into<Bytes>) -> Reply {
        self.send_as(self.admin(), method, uri, &[("content-type", content_type)], body)
            .await
    }

    pub async fn send_as(
        &self,
        service: InProcess,
        method: &str,
        uri: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Reply {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).expect("a request");
        read(service.oneshot(request).await.expect("answers")).await
    }

    pub async fn get(&self, uri: &str) -> Reply {
        self.send("GET", uri, "application/json", "").await
    }

    /// The aggregated form of discovery.
    pub async fn discovery(&self, uri: &str) -> Value {
        let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
        let reply = self
            .send_as(self.admin(), "GET", uri, &[("accept", accept)], "")
            .await;
        reply.json
    }

    pub async fn post(&self, uri: &str, value: Value) -> Reply {
        self.send("POST", uri, "application/json", value.to_string())
            .await
    }

    pub async fn put(&self, uri: &str, value: Value) -> Reply {
        self.send("PUT", uri, "application/json", value.to_string()).await
    }

    pub async fn patch(&self, uri: &str, kind: &str, value: Value) -> Reply {
        self.send(
            "PATCH",
            uri,
            &format!("application/{kind}+json"),
            value.to_string(),
        )
        .await
    }

    pub async fn delete(&self, uri: &str, options: Value) -> Reply {
        self.send("DELETE", uri, "application/json", options.to_string())
            .await
    }

    pub async fn watch(&self, uri: &str) -> Frames {
        let request = Request::builder()
            .uri(uri)
            .body(Full::<Bytes>::default())
            .expect("a request");
        let answer = self.admin().oneshot(request).await.expect("answers");
        assert_eq!(answer.status(), 200);
        Frames {
            body: answer.into_body(),
            rest: Vec::new(),
        }
    }
}

/// The other door: HTTPS on a port of its own.
pub struct Https {
    pub address: std::net::SocketAddr,
    shutdown: CancellationToken,
    serving: tokio::task::JoinHandle<()>,
}

impl Https {
    pub async fn open(cluster: &Cluster) -> Https {
        Https::within(cluster, skiff_server::Limits::default()).await
    }

    pub async fn within(cluster: &Cluster, limits: skiff_server::Limits) -> Https {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (server, shutdown) = (cluster.server.clone(), CancellationToken::new());
        let token = shutdown.clone();
        let serving = tokio::spawn(async move { server.serve_within(listener, limits, token).await });
        Https {
            address,
            shutdown,
            serving,
        }
    }

    /// A connection of a client that speaks this protocol (`h2`, `http/1.1`).
    pub async fn connect(
        &self,
        cluster: &Cluster,
        identity: Option<&skiff_pki::Identity>,
        protocol: &str,
    ) -> TlsStream<TcpStream> {
        let mut tls = skiff_pki::client_config(cluster.pki.ca_certificate(), identity).expect("TLS");
        tls.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let stream = TcpStream::connect(self.address).await.expect("connects");
        let name = ServerName::try_from("localhost").expect("a name");
        let connector = TlsConnector::from(Arc::new(tls));
        connector.connect(name, stream).await.expect("TLS")
    }

    /// One request on a connection of its own, with a bearer token if there is one.
    pub async fn ask(
        &self,
        cluster: &Cluster,
        token: &str,
        method: &str,
        uri: &str,
        body: impl Into<Bytes>,
    ) -> Reply {
        let stream = self.connect(cluster, None, "http/1.1").await;
        let stream = hyper_util::rt::TokioIo::new(stream);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.expect("HTTP");
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(uri)
            .header("host", "localhost");
        if !token.is_empty() {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.header("content-type", "application/json");
        let request = request.body(Full::new(body.into())).expect("a request");
        let answer = sender.send_request(request).await.expect("answers");
        let (parts, body) = answer.into_parts();
        let bytes = body.collect().await.expect("a body").to_bytes();
        reply(parts, bytes)
    }

    /// Who a token is of, by the word of the server.
    pub async fn who(&self, cluster: &Cluster, token: &str) -> Reply {
        let review = r#"{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}"#;
        let uri = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
        self.ask(cluster, token, "POST", uri, review).await
    }

    pub async fn end(self) {
        self.shutdown.cancel();
        self.serving.await.expect("ends");
    }
}

async fn read(answer: Answer) -> Reply {
    let (parts, body) = answer.into_parts();
    let bytes = body.collect().await.expect("a body").to_bytes();
    reply(parts, bytes)
}

fn reply(parts: http::response::Parts, bytes: Bytes) -> Reply {
    Reply {
        code: parts.status.as_u16(),
        headers: parts.headers,
        json: serde_json::from_slice(&bytes).unwrap_or(Value::Null),
        text: String::from_utf8_lossy(&bytes).into_owned(),
        bytes,
    }
}

/// The events of a watch.
pub struct Frames {
    body: Body,
    rest: Vec<u8>,
}

impl Frames {
    /// The next event; `None` when the watch ended.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).expect("JSON"));
            }
            match self.body.frame().await? {
                Ok(frame) => self.rest.extend_from_slice(frame.data_ref().expect("data")),
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// The next event in short: `ADDED name`.
    pub async fn brief(&mut self) -> String {
        let event = self.next().await.expect("an event");
        format!(
            "{} {}",
            event["type"].as_str().expect("a type"),
            event["object"]["metadata"]["name"].as_str().unwrap_or("-")
        )
    }
}
