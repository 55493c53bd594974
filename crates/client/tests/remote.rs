//! Clients over the network, against real TLS servers on this machine: failover, renewed certificates, and informers that
//! go on after a broken connection.

#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::{Value, json};
use skiff_client::{ConnectError, InformerFactory, Remote, ServerAddress};
use skiff_pki::{LiveIdentity, Pki};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(60);

type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>;

/// What a server is asked: the path, and the common name of the client's certificate.
type Handler = Arc<dyn Fn(&str, &str) -> Body + Send + Sync>;

struct TestServer {
    address: ServerAddress,
    task: JoinHandle<()>,
}

/// Serves until it is aborted; its connections end with it.
async fn serve(pki: &Pki, name: &str, handler: Handler) -> TestServer {
    let identity = pki
        .serving(&name.replace(':', "-"), name, &["127.0.0.1".to_owned()])
        .unwrap();
    let tls = skiff_pki::asking_server_config(&identity, &[pki.ca_certificate()]).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().into();
    let task = tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, handler) = (acceptor.clone(), handler.clone());
            connections.spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else {
                    return;
                };
                let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
                let client = certificates
                    .first()
                    .map(|der| common_name(der))
                    .unwrap_or_default();
                let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                    let path = request.uri().path_and_query().map(|path| path.to_string());
                    let body = handler(&path.unwrap_or_default(), &client);
                    async move { Ok::<_, Infallible>(Response::new(body)) }
                });
                let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    TestServer { address, task }
}

fn common_name(der: &[u8]) -> String {
    // Good enough for names that are in no other field.
    let text = String::from_utf8_lossy(der).into_owned();
    let known = ["first-client", "second-client"];
    let found = known.iter().find(|name| text.contains(**name));
    found.map(|name| (*name).to_owned()).unwrap_or_default()
}

fn whole(value: &Value) -> Body {
    Full::new(Bytes::from(value.to_string())).boxed_unsync()
}

/// Answers who is asked, and by whom.
fn named(name: &'static str) -> Handler {
    Arc::new(move |_, client| whole(&json!({"server": name, "client": client})))
}

async fn ask(client: &kube::Client) -> Result<Value, kube::Error> {
    let request = Request::get("/x").body(Vec::new()).unwrap();
    client.request(request).await
}

#[tokio::test]
async fn another_server_takes_over() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::open(dir.path()).unwrap();
    let (first, second) = (
        serve(&pki, "a", named("first")).await,
        serve(&pki, "b", named("second")).await,
    );
    let tls = skiff_pki::client_config(pki.ca_certificate(), None).unwrap();
    let remote = Remote::new(vec![first.address.clone(), second.address.clone()], tls);
    let client = remote.client("test");
    assert_eq!(ask(&client).await.unwrap()["server"], "first");
    first.task.abort();
    // Requests on the connection that broke may fail; the next ones must not.
    let found = tokio::time::timeout(PATIENCE, async {
        loop {
            if let Ok(answer) = ask(&client).await {
                return answer;
            }
        }
    });
    assert_eq!(found.await.unwrap()["server"], "second");
    second.task.abort();
    let _ = second.task.await;
    let refused = remote.check().await.unwrap_err();
    assert!(matches!(refused, ConnectError::Tcp { .. }), "{refused:?}");
}

/// Passes connections on to a server until it is frozen: then nothing comes through, and nothing ends.
struct Relay {
    address: ServerAddress,
    frozen: tokio::sync::watch::Sender<bool>,
    _task: tokio_util::task::AbortOnDropHandle<()>,
}

impl Relay {
    async fn to(server: &ServerAddress) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().into();
        let (frozen, frozen_now) = tokio::sync::watch::channel(false);
        let server = server.authority();
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let (server, mut frozen) = (server.clone(), frozen_now.clone());
                connections.spawn(async move {
                    let mut far = tokio::net::TcpStream::connect(server).await.unwrap();
                    tokio::select! {
                        biased;
                        _ = frozen.wait_for(|frozen| *frozen) => {}
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => return,
                    }
                    std::future::pending::<()>().await;
                });
            }
        });
        Relay {
            address,
            frozen,
            _task: tokio_util::task::AbortOnDropHandle::new(task),
        }
    }
}

/// Answers `/wait` never.
fn patient(name: &'static str) -> Handler {
    Arc::new(move |path, client| match path {
        "/wait" => StreamBody::new(futures::stream::pending()).boxed_unsync(),
        _ => named(name)("", client),
    })
}

/// What is open at a server that falls silent fails with the reason, and what comes then goes to the other one.
#[tokio::test]
async fn a_silent_server_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::open(dir.path()).unwrap();
    let (first, second) = (
        serve(&pki, "a", patient("first")).await,
        serve(&pki, "b", patient("second")).await,
    );
    let relay = Relay::to(&first.address).await;
    let tls = skiff_pki::client_config(pki.ca_certificate(), None).unwrap();
    let remote = Remote::new(vec![relay.address.clone()], tls);
    let client = remote.client("test");
    assert_eq!(ask(&client).await.unwrap()["server"], "first");
    // From now on there is a choice.
    remote.set_servers(vec![relay.address.clone(), second.address.clone()]);
    assert_eq!(ask(&client).await.unwrap()["server"], "first");
    let request = Request::get("/wait").body(kube::client::Body::empty()).unwrap();
    let mut open = client.send(request).await.unwrap().into_body();
    // A server that answers pings is not silent, however long a request takes.
    let early = tokio::time::timeout(Duration::from_secs(2), open.frame()).await;
    assert!(early.is_err(), "it ended");
    relay.frozen.send(true).unwrap();
    let ended = tokio::time::timeout(PATIENCE, open.frame()).await.unwrap();
    let mut why = String::new();
    let failure = ended.unwrap().unwrap_err();
    let mut cause: Option<&dyn std::error::Error> = Some(&failure);
    while let Some(error) = cause {
        why += &format!("{error}; ");
        cause = error.source();
    }
    assert!(why.contains("the server was silent"), "{why}");
    assert_eq!(ask(&client).await.unwrap()["server"], "second");
}

/// With nowhere to go, a connection is given as long as before.
#[tokio::test]
async fn an_only_server_may_be_silent() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::open(dir.path()).unwrap();
    let server = serve(&pki, "a", patient("a")).await;
    let relay = Relay::to(&server.address).await;
    let tls = skiff_pki::client_config(pki.ca_certificate(), None).unwrap();
    let remote = Remote::new(vec![relay.address.clone()], tls);
    let request = Request::get("/wait").body(kube::client::Body::empty()).unwrap();
    let mut open = remote.client("test").send(request).await.unwrap().into_body();
    relay.frozen.send(true).unwrap();
    let early = tokio::time::timeout(Duration::from_secs(2), open.frame()).await;
    assert!(early.is_err(), "it ended");
}

#[tokio::test]
async fn new_connections_show_the_renewed_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::open(dir.path()).unwrap();
    let server = serve(&pki, "a", named("a")).await;
    let live = LiveIdentity::new("c", pki.client("c1", "first-client", None).unwrap()).unwrap();
    let mut tls = skiff_pki::client_config(pki.ca_certificate(), Some(&live.identity())).unwrap();
    tls.client_auth_cert_resolver = live.clone();
    let remote = Remote::new(vec![server.address.clone()], tls);
    let client = remote.client("test");
    assert_eq!(ask(&client).await.unwrap()["client"], "first-client");
    live.replace(pki.client("c2", "second-client", None).unwrap())
        .unwrap();
    assert_eq!(
        ask(&client).await.unwrap()["client"],
        "first-client",
        "it is open"
    );
    remote.reconnect();
    assert_eq!(ask(&client).await.unwrap()["client"], "second-client");
}

#[tokio::test]
async fn a_server_of_another_authority_is_not_spoken_to() {
    let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (ours, theirs) = (Pki::open(ours.path()).unwrap(), Pki::open(theirs.path()).unwrap());
    let server = serve(&theirs, "a", named("a")).await;
    let tls = skiff_pki::client_config(ours.ca_certificate(), None).unwrap();
    let remote = Remote::new(vec![server.address.clone()], tls);
    let refused = remote.check().await.unwrap_err();
    assert!(matches!(refused, ConnectError::Tls { .. }), "{refused:?}");
    assert!(ask(&remote.client("test")).await.is_err());
}

/// The same authority signs kubelets' serving certificates: who shows one is no API server.
#[tokio::test]
async fn a_kubelet_does_not_pass_for_an_api_server() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::open(dir.path()).unwrap();
    let (api, kubelet) = (
        serve(&pki, "kube-apiserver", named("api")).await,
        serve(&pki, "system:node:evil", named("kubelet")).await,
    );
    let tls = skiff_pki::api_client_config(pki.ca_certificate(), None).unwrap();
    let remote = Remote::new(vec![kubelet.address.clone()], tls.clone());
    let refused = remote.check().await.unwrap_err();
    assert!(matches!(refused, ConnectError::Tls { .. }), "{refused:?}");
    // With an API server in the list the client finds its way.
    let remote = Remote::new(vec![kubelet.address.clone(), api.address.clone()], tls);
    assert_eq!(ask(&remote.client("test")).await.unwrap()["server"], "api");
}

/// A list, then a watch that breaks after each event, at another version each time.
#[tokio::test]
async fn an_informer_goes_on_after_its_connection_broke() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::open(dir.path()).unwrap();
    let handler: Handler = Arc::new(|path, _| {
        let object = |version: u64| {
            json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": format!("m{version}"), "namespace": "d", "resourceVersion": version.to_string()}})
        };
        if !path.contains("watch=true") {
            return whole(&json!({"apiVersion": "v1", "kind": "ConfigMapList",
                "metadata": {"resourceVersion": "1"}, "items": [object(1)]}));
        }
        let version = path
            .split(['?', '&'])
            .find_map(|part| part.strip_prefix("resourceVersion="));
        let next = version
            .and_then(|version| version.parse::<u64>().ok())
            .unwrap_or(0)
            + 1;
        let event = match next {
            2..=4 => json!({"type": "ADDED", "object": object(next)}),
            _ => json!({"type": "BOOKMARK", "object": object(next)}),
        };
        let line = Bytes::from(format!("{event}\n"));
        StreamBody::new(futures::stream::iter([Ok(Frame::data(line))])).boxed_unsync()
    });
    let server = serve(&pki, "a", handler).await;
    let tls = skiff_pki::client_config(pki.ca_certificate(), None).unwrap();
    let remote = Remote::new(vec![server.address.clone()], tls);
    let factory = InformerFactory::new(remote.client("test"), CancellationToken::new());
    let maps = factory.informer::<ConfigMap>();
    let all = tokio::time::timeout(PATIENCE, async {
        while maps.list().len() < 4 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    all.await.unwrap();
}
