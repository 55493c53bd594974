//! Whole requests through the chain of a server: request line, headers and body as HTTP/1.1 writes them. Writes are
//! dry runs, so that every input meets the same objects.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use skiff_auth::UserInfo;
use skiff_server::{InProcess, Server, ServerConfig, Version};
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

struct Fixture {
    runtime: Runtime,
    admin: InProcess,
    _server: Server,
    _folder: tempfile::TempDir,
}

/// What is there before the first input.
const OBJECTS: &[(&str, &str)] = &[
    (
        "/api/v1/namespaces/default/configmaps",
        r#"{"metadata":{"name":"c","labels":{"app":"web"}},"data":{"a":"1","b":"2"}}"#,
    ),
    (
        "/apis/apps/v1/namespaces/default/deployments",
        r#"{"metadata":{"name":"d"},"spec":{"selector":{"matchLabels":{"app":"web"}},"template":{"metadata":{"labels":
        {"app":"web"}},"spec":{"containers":[{"name":"c","image":"i","ports":[{"containerPort":80}]}]}}}}"#,
    ),
    (
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        r#"{"metadata":{"name":"things.example.com"},"spec":{"group":"example.com","scope":"Namespaced","names":{"plural":
        "things","kind":"Thing"},"versions":[{"name":"v1","served":true,"storage":true,"subresources":{"status":{}},
        "schema":{"openAPIV3Schema":{"type":"object","properties":{"spec":{"type":"object","properties":{"size":{"type":
        "integer","default":1,"minimum":0}},"x-kubernetes-validations":[{"rule":"self.size < 10"}]},"status":{"type":
        "object","x-kubernetes-preserve-unknown-fields":true}}}}}]}}"#,
    ),
];

async fn start() -> (Server, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let store = skiff_store::Embedded::open(folder.path().join("store")).expect("a store");
    let pki = skiff_pki::Pki::open(&folder.path().join("pki")).expect("keys");
    let identity = pki
        .serving("apiserver", "kube-apiserver", &["localhost".to_owned()])
        .expect("a certificate");
    let server = Server::start(ServerConfig {
        store: Arc::new(store),
        service_cidr: "10.96.0.0/16".to_owned(),
        node_ports: 30000..=32767,
        runtime_config: Default::default(),
        advertise_address: "192.0.2.1".parse().expect("an address"),
        advertise_port: 6443,
        tls: Arc::new(skiff_pki::asking_server_config(&identity, &[]).expect("TLS")),
        client_certificates: None,
        service_account: None,
        authentication: Default::default(),
        authorization: vec![skiff_auth::Mode::Node, skiff_auth::Mode::Rbac],
        admission: skiff_admission::Chain::recommended(),
        kubelet: None,
        recorder: Arc::default(),
        audit: None,
        instance: String::new(),
        kms_health: None,
        version: Version::default(),
        shutdown: CancellationToken::new(),
    });
    (server.await.expect("a server"), folder)
}

static FIXTURE: LazyLock<Fixture> = LazyLock::new(|| {
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let (server, folder) = runtime.block_on(start());
    let admin = server.service(UserInfo::new("admin", ["system:masters"]));
    for (path, body) in OBJECTS {
        let request = Request::post(*path).header("content-type", "application/json");
        let request = request
            .body(Full::new(Bytes::from_static(body.as_bytes())))
            .expect("a request");
        let code = runtime.block_on(answer(admin.clone(), request)).0;
        assert_eq!(code, 201, "{path}");
    }
    Fixture {
        runtime,
        admin,
        _server: server,
        _folder: folder,
    }
});

/// The code, and what there is of the body when it ends or nothing comes any more.
async fn answer(service: InProcess, request: Request<Full<Bytes>>) -> (u16, Vec<u8>) {
    const MOST: usize = 1 << 20;
    let answer = service.oneshot(request).await.expect("a chain always answers");
    let code = answer.status().as_u16();
    let (mut body, mut read) = (answer.into_body(), Vec::new());
    while read.len() < MOST
        && let Ok(Some(Ok(frame))) = tokio::time::timeout(Duration::from_millis(20), body.frame()).await
    {
        read.extend(frame.into_data().unwrap_or_default());
    }
    (code, read)
}

pub fn request(data: &[u8]) {
    let Some(request) = parse(data) else {
        return;
    };
    let fixture = &*FIXTURE;
    let shown = format!("{} {}", request.method(), request.uri());
    let (code, body) = fixture.runtime.block_on(answer(fixture.admin.clone(), request));
    assert!((200..600).contains(&code), "{shown}: {code}");
    // A panic is caught, and told so. Under a fuzzer it ends the process before.
    let text = String::from_utf8_lossy(&body);
    assert!(
        code != 500 || !text.contains("caused apiserver to panic"),
        "{shown}: {text}"
    );
}

/// A request as HTTP/1.1 writes it; what is no header ends the headers.
fn parse(data: &[u8]) -> Option<Request<Full<Bytes>>> {
    let (head, body) = match data.windows(2).position(|window| window == b"\n\n") {
        Some(at) => (&data[..at], &data[at + 2..]),
        None => (data, &[][..]),
    };
    let mut lines = head.split(|byte| *byte == b'\n');
    let first = std::str::from_utf8(lines.next()?).ok()?;
    let (method, target) = first.split_once(' ')?;
    let target = match method {
        "GET" | "HEAD" => target.to_owned(),
        _ if target.contains('?') => format!("{target}&dryRun=All"),
        _ => format!("{target}?dryRun=All"),
    };
    let mut request = Request::builder().method(method).uri(target);
    for line in lines {
        let at = line.iter().position(|byte| *byte == b':')?;
        request = request.header(&line[..at], line[at + 1..].trim_ascii());
    }
    request.body(Full::new(Bytes::copy_from_slice(body))).ok()
}
