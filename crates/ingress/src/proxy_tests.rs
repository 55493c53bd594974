//! The proxy over real sockets, in one process: what it forwards, and the suite of requests that it must refuse.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backend::{BackendKey, Backends, Protocol};
use crate::connections::{ConnectionLimits, Connections};
use crate::forward::Proxy;
use crate::listen::{Door, Ending, Ingresses, Tasks};
use crate::metrics::Metrics;
use crate::table::{HostMatch, PathMatch, Route, RouteOptions, RouteTable};
use crate::tls::Resolver;
use crate::workers::Workers;

/// Only for what never comes: nothing is measured.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A request as a backend saw it.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) line: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// A backend that answers `ok`, and remembers what it was asked. An upgrade is answered with an echo.
pub(crate) struct Echo {
    pub(crate) address: SocketAddr,
    pub(crate) seen: Arc<Mutex<Vec<Seen>>>,
    stop: CancellationToken,
}

impl Echo {
    pub(crate) async fn start(protocol: Protocol) -> Echo {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let echo = Echo {
            address: listener.local_addr().expect("an address"),
            seen: Arc::default(),
            stop: CancellationToken::new(),
        };
        let (seen, stop) = (echo.seen.clone(), echo.stop.clone());
        tokio::spawn(async move {
            loop {
                let (stream, _) = tokio::select! {
                    accepted = listener.accept() => accepted.expect("a connection"),
                    () = stop.cancelled() => return,
                };
                let seen = seen.clone();
                let service = service_fn(move |request| answer(request, seen.clone()));
                let io = TokioIo::new(stream);
                tokio::spawn(async move {
                    let _ = match protocol {
                        Protocol::Http1 => {
                            let serving = hyper::server::conn::http1::Builder::new();
                            serving.serve_connection(io, service).with_upgrades().await
                        }
                        Protocol::Http2 => {
                            let serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                            serving.serve_connection(io, service).await
                        }
                    };
                });
            }
        });
        echo
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.seen.lock().iter().map(|seen| seen.line.clone()).collect()
    }
}

async fn answer(
    mut request: Request<Incoming>,
    seen: Arc<Mutex<Vec<Seen>>>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let upgrade = request.headers().get("upgrade").cloned();
    let on = hyper::upgrade::on(&mut request);
    let (parts, body) = request.into_parts();
    let line = format!("{} {}", parts.method, parts.uri);
    let mut noted = Seen {
        line,
        headers: parts.headers,
        body: Bytes::new(),
    };
    seen.lock().push(noted.clone());
    noted.body = body.collect().await?.to_bytes();
    if let Some(last) = seen.lock().iter_mut().rev().find(|seen| seen.line == noted.line) {
        last.body = noted.body;
    }
    let mut response = Response::new(Full::from("ok"));
    if let Some(protocol) = upgrade {
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        response.headers_mut().insert("upgrade", protocol);
        response
            .headers_mut()
            .insert("connection", http::HeaderValue::from_static("upgrade"));
        *response.body_mut() = Full::default();
        tokio::spawn(async move {
            let mut io = TokioIo::new(on.await.expect("an upgrade"));
            let mut buffer = [0; 64];
            while let Ok(read @ 1..) = io.read(&mut buffer).await {
                let _ = io.write_all(&buffer[..read]).await;
            }
        });
    }
    Ok(response)
}

/// A running proxy, with routes to whatever the test adds.
pub(crate) struct Running {
    pub(crate) proxy: Arc<Proxy>,
    pub(crate) http: SocketAddr,
    pub(crate) https: SocketAddr,
    ending: Ending,
    tasks: Tasks,
    pub(crate) backends: Mutex<Backends>,
    /// Connections outlive their doors.
    workers: Arc<Workers>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.ending.drain.cancel();
        self.ending.close.cancel();
    }
}

impl Running {
    pub(crate) async fn start(limits: ConnectionLimits) -> Running {
        let listen = || async { TcpListener::bind("127.0.0.1:0").await.expect("a port") };
        let (http, https) = (listen().await, listen().await);
        let address = |listener: &TcpListener| listener.local_addr().expect("an address");
        let proxy = Arc::new(Proxy {
            table: Default::default(),
            gateways: Default::default(),
            metrics: Metrics::new(&skiff_prometheus::Registry::new()),
            https_port: Some(address(&https).port()),
            access_log: true,
            tunnels: TaskTracker::new(),
            abort: CancellationToken::new(),
        });
        let running = Running {
            proxy: proxy.clone(),
            http: address(&http),
            https: address(&https),
            ending: Ending::default(),
            tasks: Tasks::default(),
            backends: Mutex::default(),
            workers: Arc::new(Workers::start(Arc::new(|| {})).expect("threads")),
        };
        let config = Resolver::new().and_then(|resolver| resolver.server_config());
        let acceptor = TlsAcceptor::from(config.expect("TLS"));
        let connections = Connections::new(limits);
        for (listener, port, ingress) in [
            (http, 80, Ingresses::Http),
            (https, 443, Ingresses::Https(acceptor)),
        ] {
            let door = Door {
                proxy: proxy.clone(),
                connections: connections.clone(),
                workers: running.workers.clone(),
                listener,
                port,
                ingress,
                tasks: running.tasks.clone(),
            };
            tokio::spawn(door.serve(running.ending.clone()));
        }
        running
    }

    /// Routes host `a` to the endpoints.
    pub(crate) fn route(&self, protocol: Protocol, endpoints: &[SocketAddr], options: RouteOptions) {
        let key = BackendKey {
            namespace: "d".into(),
            service: "s".into(),
            port: String::new(),
        };
        let backend = self.backends.lock().put(key, protocol, endpoints, Instant::now());
        let mut table = RouteTable::default();
        let route = Route {
            path: PathMatch::prefix("/"),
            backend: Some(backend),
            options,
        };
        table.add(HostMatch::parse("a"), route);
        self.proxy.table.store(Arc::new(table));
    }
}

async fn started(protocol: Protocol) -> (Running, Echo) {
    let echo = Echo::start(protocol).await;
    let running = Running::start(ConnectionLimits::default()).await;
    running.route(protocol, &[echo.address], RouteOptions::default());
    (running, echo)
}

/// Sends the bytes and reads until the proxy closes.
pub(crate) async fn exchange(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    // The proxy may close before all is sent.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    let _ = read.expect("the proxy closes the connection");
    String::from_utf8_lossy(&answer).into_owned()
}

pub(crate) fn statuses(answer: &str) -> Vec<&str> {
    let parts = answer.split("HTTP/1.1 ").skip(1);
    parts.filter_map(|part| part.get(..3)).collect()
}

#[tokio::test]
async fn malformed_requests_are_refused_and_never_forwarded() {
    let (running, echo) = started(Protocol::Http1).await;
    // Whoever cuts the bytes at another place than the proxy sees this as a request of its own.
    let hidden = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";
    let with_length = |headers: &str| format!("POST / HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n{hidden}");
    let length = hidden.len();
    let suite: Vec<(&str, String)> = vec![
        (
            "both lengths",
            with_length("Content-Length: 4\r\nTransfer-Encoding: chunked"),
        ),
        (
            "both, the other way",
            with_length("Transfer-Encoding: chunked\r\nContent-Length: 4"),
        ),
        (
            "equal lengths",
            with_length("Content-Length: 0\r\nContent-Length: 0"),
        ),
        (
            "two lengths",
            with_length(&format!("Content-Length: 0\r\nContent-Length: {length}")),
        ),
        ("a list of lengths", with_length("Content-Length: 0, 0")),
        ("a signed length", with_length("Content-Length: +0")),
        ("a negative length", with_length("Content-Length: -1")),
        ("a hexadecimal length", with_length("Content-Length: 0x5")),
        ("an empty length", with_length("Content-Length:")),
        (
            "a huge length",
            with_length("Content-Length: 99999999999999999999"),
        ),
        ("a space before the colon", with_length("Content-Length : 0")),
        ("a space before the name", with_length(" Content-Length: 0")),
        ("a folded header", with_length("X: a\r\n Content-Length: 0")),
        ("a folded header by a tab", with_length("X: a\r\n\tb")),
        ("no name", with_length(": a")),
        ("no colon", with_length("Content-Length 0")),
        ("a name with a space", with_length("Content Length: 0")),
        ("a bare LF", with_length("X: a\nContent-Length: 0")),
        (
            "a bare LF at the end",
            format!("GET / HTTP/1.1\r\nHost: a\n\n{hidden}"),
        ),
        ("a bare CR", with_length("X: a\rContent-Length: 0")),
        ("a NUL", with_length("X: a\0b")),
        ("a control character", with_length("X: a\u{8}b")),
        (
            "a vertical tab in the encoding",
            with_length("Transfer-Encoding: \u{b}chunked"),
        ),
        ("an unknown encoding", with_length("Transfer-Encoding: xchunked")),
        ("identity", with_length("Transfer-Encoding: identity")),
        ("two encodings", with_length("Transfer-Encoding: gzip, chunked")),
        (
            "chunked twice",
            with_length("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"),
        ),
        (
            "chunked and another",
            with_length("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity"),
        ),
        ("a quoted encoding", with_length("Transfer-Encoding: \"chunked\"")),
        (
            "an encoding in HTTP/1.0",
            format!("POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"),
        ),
        ("no host", format!("GET / HTTP/1.1\r\n\r\n{hidden}")),
        (
            "two hosts",
            format!("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n{hidden}"),
        ),
        (
            "a bad host",
            "GET / HTTP/1.1\r\nHost: a b\r\nConnection: close\r\n\r\n".to_owned(),
        ),
        (
            "a host with a path",
            "GET / HTTP/1.1\r\nHost: a/b\r\nConnection: close\r\n\r\n".to_owned(),
        ),
        (
            "a host with a user",
            "GET / HTTP/1.1\r\nHost: u@a\r\nConnection: close\r\n\r\n".to_owned(),
        ),
        (
            "another host in the line",
            "GET http://b/ HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".to_owned(),
        ),
        (
            "CONNECT",
            format!("CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n{hidden}"),
        ),
        ("no path", format!("GET a HTTP/1.1\r\nHost: a\r\n\r\n{hidden}")),
        (
            "a fragment",
            format!("GET /#x HTTP/1.1\r\nHost: a\r\n\r\n{hidden}"),
        ),
        (
            "dot segments",
            "GET /x/../y HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".to_owned(),
        ),
        (
            "escaped dot segments",
            "GET /x/%2e%2e/y HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".to_owned(),
        ),
        (
            "a bad escape",
            "GET /%zz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".to_owned(),
        ),
        (
            "two spaces",
            format!("GET  / HTTP/1.1\r\nHost: a\r\n\r\n{hidden}"),
        ),
        ("a tab", format!("GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n{hidden}")),
        (
            "words behind the version",
            format!("GET / HTTP/1.1 x\r\nHost: a\r\n\r\n{hidden}"),
        ),
        ("no version", format!("GET /\r\nHost: a\r\n\r\n{hidden}")),
        (
            "another version",
            format!("GET / HTTP/1.2\r\nHost: a\r\n\r\n{hidden}"),
        ),
        (
            "HTTP/2 without TLS",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
        ),
        (
            "a version in lower case",
            format!("GET / http/1.1\r\nHost: a\r\n\r\n{hidden}"),
        ),
        (
            "two empty lines first",
            format!("\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n{hidden}"),
        ),
        ("binary", "\u{16}\u{3}\u{1}\0\0\r\n\r\n".to_owned()),
    ];
    for (name, bytes) in &suite {
        let answer = exchange(running.http, bytes.as_bytes()).await;
        assert_eq!(statuses(&answer), ["400"], "{name}: {answer:?}");
        assert!(echo.lines().is_empty(), "{name}: {:?}", echo.lines());
    }
}

#[tokio::test]
async fn malformed_bodies_end_their_connection() {
    let (running, echo) = started(Protocol::Http1).await;
    let hidden = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";
    let head = "POST /chunked HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (name, body) in [
        ("no size", "\r\n\r\n"),
        ("a word for a size", "zz\r\n\r\n"),
        ("a signed size", "+1\r\na\r\n0\r\n\r\n"),
        ("a prefixed size", "0x1\r\na\r\n0\r\n\r\n"),
        ("a space before the size", " 1\r\na\r\n0\r\n\r\n"),
        ("a space behind the size", "1 \r\na\r\n0\r\n\r\n"),
        ("a huge size", "ffffffffffffffff1\r\na\r\n0\r\n\r\n"),
        ("a bare LF behind the size", "1\na\r\n0\r\n\r\n"),
        ("a bare LF in an extension", "1;x\na\r\n0\r\n\r\n"),
        ("a chunk that is longer than its size", "1\r\nab\r\n0\r\n\r\n"),
        ("a chunk without an end", "1\r\na0\r\n\r\n"),
        ("a bare LF behind a chunk", "1\r\na\n0\r\n\r\n"),
        ("a length in the trailers", "0\r\nContent-Length: 5\r\n\r\n"),
        ("a folded trailer", "0\r\nX: a\r\n b\r\n\r\n"),
        ("a bare LF in the trailers", "0\r\nX: a\n\r\n"),
    ] {
        let answer = exchange(running.http, format!("{head}{body}{hidden}").as_bytes()).await;
        let statuses = statuses(&answer);
        assert!(statuses.len() <= 1 && statuses != ["200"], "{name}: {answer:?}");
        let lines = echo.lines();
        assert!(
            !lines.iter().any(|line| line.contains("smuggled")),
            "{name}: {lines:?}"
        );
    }
}

#[tokio::test]
async fn what_is_too_large_is_refused() {
    let (running, echo) = started(Protocol::Http1).await;
    let long = "x".repeat(64 * 1024);
    let many = "X: y\r\n".repeat(200);
    for (name, bytes, expected) in [
        (
            "a long header",
            format!("GET / HTTP/1.1\r\nHost: a\r\nX: {long}\r\n\r\n"),
            "431",
        ),
        (
            "many headers",
            format!("GET / HTTP/1.1\r\nHost: a\r\n{many}\r\n"),
            "431",
        ),
    ] {
        let answer = exchange(running.http, bytes.as_bytes()).await;
        assert_eq!(statuses(&answer), [expected], "{name}");
    }
    let options = RouteOptions {
        max_body: Some(4),
        ..RouteOptions::default()
    };
    running.route(Protocol::Http1, &[echo.address], options);
    let post = |rest: &str| format!("POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{rest}");
    let answer = exchange(running.http, post("Content-Length: 5\r\n\r\n12345").as_bytes()).await;
    assert_eq!(statuses(&answer), ["413"]);
    let chunks = post("Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n");
    assert_eq!(
        statuses(&exchange(running.http, chunks.as_bytes()).await),
        ["413"]
    );
    let answer = exchange(running.http, post("Content-Length: 4\r\n\r\n1234").as_bytes()).await;
    assert_eq!(statuses(&answer), ["200"]);
}

#[tokio::test]
async fn requests_are_forwarded_with_headers_of_ours() {
    let (running, echo) = started(Protocol::Http1).await;
    let request = "POST /p?q=1 HTTP/1.1\r\nHost: A:80\r\nX-Forwarded-For: 6.6.6.6\r\nX_Real_IP: 6.6.6.6\r\n\
        Connection: close, X-Hop\r\nX-Hop: 1\r\nTE: trailers\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    let answer = exchange(running.http, request.as_bytes()).await;
    assert_eq!(statuses(&answer), ["200"], "{answer}");
    assert!(answer.ends_with("\r\n\r\nok"), "{answer}");
    let seen = echo.seen.lock().first().cloned().expect("a request");
    assert_eq!((seen.line.as_str(), &seen.body[..]), ("POST /p?q=1", &b"abc"[..]));
    let header = |name: &str| seen.headers.get(name).and_then(|value| value.to_str().ok());
    assert_eq!(header("host"), Some("A:80"));
    assert_eq!(header("x-forwarded-for"), Some("127.0.0.1"));
    assert_eq!(header("x-real-ip"), Some("127.0.0.1"));
    assert_eq!(header("x-forwarded-proto"), Some("http"));
    for gone in ["x_real_ip", "x-hop", "te", "connection"] {
        assert_eq!(header(gone), None, "{gone}");
    }
    let answer = exchange(
        running.http,
        b"GET / HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\r\n",
    )
    .await;
    assert_eq!(statuses(&answer), ["404"]);
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_turn_before_a_bad_one() {
    let (running, echo) = started(Protocol::Http1).await;
    let good = "GET /1 HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n";
    let answer = exchange(
        running.http,
        format!("{good}GET /3 HTTP/1.1\nHost: a\r\n\r\n").as_bytes(),
    )
    .await;
    assert_eq!(statuses(&answer), ["200", "200", "400"], "{answer}");
    assert_eq!(echo.lines(), ["GET /1", "GET /2"]);
}

#[tokio::test]
async fn another_protocol_passes_through_once_both_agree() {
    let (running, echo) = started(Protocol::Http1).await;
    let mut stream = TcpStream::connect(running.http).await.expect("a connection");
    let ask = b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nGET \0";
    stream.write_all(ask).await.expect("sent");
    let mut answer = Vec::new();
    let expected = b"GET \0";
    let echoed = async {
        while !answer.ends_with(expected) {
            let read = stream.read_buf(&mut answer).await.expect("an answer");
            assert!(read > 0, "{:?}", String::from_utf8_lossy(&answer));
        }
    };
    tokio::time::timeout(PATIENCE, echoed).await.expect("an echo");
    assert!(answer.starts_with(b"HTTP/1.1 101"), "{answer:?}");
    assert_eq!(echo.lines(), ["GET /ws"]);
    // HTTP/2 is not entered this way: the request is an ordinary one, and what follows it is one too.
    let h2c = "GET /h2c HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n\r\n\
        GET /next HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    assert_eq!(
        statuses(&exchange(running.http, h2c.as_bytes()).await),
        ["200", "200"]
    );
    assert_eq!(echo.lines(), ["GET /ws", "GET /h2c", "GET /next"]);
}

#[tokio::test]
async fn an_endpoint_that_is_gone_is_passed_over() {
    let echo = Echo::start(Protocol::Http1).await;
    let running = Running::start(ConnectionLimits::default()).await;
    let closed = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let gone = closed.local_addr().expect("an address");
    drop(closed);
    running.route(Protocol::Http1, &[gone, echo.address], RouteOptions::default());
    for number in 0..10 {
        let post =
            format!("POST /{number} HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx");
        let answer = exchange(running.http, post.as_bytes()).await;
        assert_eq!(statuses(&answer), ["200"], "{answer}");
    }
    assert_eq!(echo.lines().len(), 10);
    assert!(echo.seen.lock().iter().all(|seen| &seen.body[..] == b"x"));
    running.route(Protocol::Http1, &[gone], RouteOptions::default());
    let answer = exchange(
        running.http,
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    )
    .await;
    assert_eq!(statuses(&answer), ["502"]);
    running.route(Protocol::Http1, &[], RouteOptions::default());
    let answer = exchange(
        running.http,
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    )
    .await;
    assert_eq!(statuses(&answer), ["503"]);
}

#[tokio::test]
async fn a_backend_must_begin_its_response_in_time() {
    let running = Running::start(ConnectionLimits::default()).await;
    // It accepts, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let options = RouteOptions {
        response_timeout: Some(Duration::from_millis(100)),
        ..RouteOptions::default()
    };
    let address = silent.local_addr().expect("an address");
    running.route(Protocol::Http1, &[address], options);
    let answer = exchange(
        running.http,
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    )
    .await;
    assert_eq!(statuses(&answer), ["504"]);
}

#[tokio::test]
async fn one_client_gets_so_many_connections() {
    let running = Running::start(ConnectionLimits {
        total: 64,
        per_client: 2,
    })
    .await;
    let connect = || async { TcpStream::connect(running.http).await.expect("a connection") };
    let mut held = vec![connect().await, connect().await];
    // Both are known when they are answered.
    for stream in &mut held {
        stream
            .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .expect("sent");
        let mut buffer = [0; 8];
        stream.read_exact(&mut buffer).await.expect("an answer");
    }
    assert_eq!(exchange(running.http, b"").await, "");
    drop(held);
}

/// Takes any certificate: the default one is self-signed.
fn tls_client(protocols: &[&[u8]]) -> TlsConnector {
    let mut config = skiff_pki::insecure_client_config(None).expect("TLS");
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    TlsConnector::from(Arc::new(config))
}

async fn tls(address: SocketAddr, protocols: &[&[u8]]) -> tokio_rustls::client::TlsStream<TcpStream> {
    let stream = TcpStream::connect(address).await.expect("a connection");
    let name = rustls::pki_types::ServerName::try_from("a").expect("a name");
    tls_client(protocols)
        .connect(name, stream)
        .await
        .expect("a handshake")
}

#[tokio::test]
async fn http2_reaches_backends_of_both_protocols_and_survives_a_shutdown() {
    for protocol in [Protocol::Http1, Protocol::Http2] {
        let (running, echo) = started(protocol).await;
        let stream = tls(running.https, &[b"h2"]).await;
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .expect("HTTP/2");
        let connection = tokio::spawn(connection);
        let request = |path: &str| {
            let request = Request::post(format!("https://a{path}")).header("te", "trailers");
            request
                .body(Full::new(Bytes::from_static(b"body")))
                .expect("a request")
        };
        let response = sender.send_request(request("/x")).await.expect("a response");
        assert_eq!(response.status(), 200, "{protocol:?}");
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        assert_eq!(&body[..], b"ok");
        let seen = echo.seen.lock().first().cloned().expect("a request");
        assert_eq!(&seen.body[..], b"body");
        let expected = match protocol {
            Protocol::Http1 => ("POST /x", Some("a"), None),
            // The authority is the client's, not the endpoint's.
            Protocol::Http2 => ("POST http://a/x", None, Some("trailers")),
        };
        let header = |name: &str| seen.headers.get(name).and_then(|value| value.to_str().ok());
        assert_eq!((seen.line.as_str(), header("host"), header("te")), expected);
        assert_eq!(header("x-forwarded-proto"), Some("https"));
        // What is under way is answered, then the connection ends by itself.
        let last = tokio::spawn(sender.send_request(request("/y")));
        while echo.lines().len() < 2 {
            tokio::task::yield_now().await;
        }
        running.ending.drain.cancel();
        running.ending.close.cancel();
        let last = last.await.expect("it does not panic");
        assert!(
            last.is_ok_and(|response| response.status() == 200),
            "{protocol:?}"
        );
        drop(sender);
        let ended = tokio::time::timeout(PATIENCE, connection).await;
        assert!(ended.is_ok_and(|ended| ended.is_ok()));
        running.tasks.early.close();
        let all = tokio::time::timeout(PATIENCE, running.tasks.early.wait()).await;
        assert!(all.is_ok());
    }
}

#[tokio::test]
async fn the_guard_is_behind_tls_too() {
    let (running, echo) = started(Protocol::Http1).await;
    let mut stream = tls(running.https, &[b"http/1.1"]).await;
    stream
        .write_all(b"GET / HTTP/1.1\nHost: a\n\n")
        .await
        .expect("sent");
    let mut answer = String::new();
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await;
    assert_eq!(statuses(&answer), ["400"]);
    assert!(echo.lines().is_empty());
}

#[tokio::test]
async fn requests_without_tls_are_redirected_where_the_route_says_so() {
    let (running, echo) = started(Protocol::Http1).await;
    let options = RouteOptions {
        redirect_to_https: true,
        ..RouteOptions::default()
    };
    running.route(Protocol::Http1, &[echo.address], options);
    let answer = exchange(
        running.http,
        b"GET /p?q HTTP/1.1\r\nHost: a:80\r\nConnection: close\r\n\r\n",
    )
    .await;
    assert_eq!(statuses(&answer), ["308"]);
    let location = format!("location: https://a:{}/p?q\r\n", running.https.port());
    assert!(answer.contains(&location), "{answer}");
    assert!(echo.lines().is_empty());
}

/// While the proxy drains, whoever is connected or comes gets one more answer, which says that it is the last.
#[tokio::test]
async fn a_drained_connection_is_told_that_it_ends() {
    let (running, _echo) = started(Protocol::Http1).await;
    let open = || async { TcpStream::connect(running.http).await.expect("a connection") };
    let (mut used, mut fresh) = (open().await, open().await);
    let ask = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    used.write_all(ask).await.expect("sent");
    let mut first = Vec::new();
    while !first.ends_with(b"ok") {
        used.read_buf(&mut first).await.expect("an answer");
    }
    let first = String::from_utf8_lossy(&first).into_owned();
    assert!(!first.contains("connection: close"), "{first}");
    running.ending.drain.cancel();
    let mut late = open().await;
    for (what, stream) in [("used", &mut used), ("fresh", &mut fresh), ("late", &mut late)] {
        stream.write_all(ask).await.expect("sent");
        let mut answer = String::new();
        let read = tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await;
        assert!(read.is_ok_and(|read| read.is_ok()), "{what}: it is not closed");
        assert_eq!(statuses(&answer), ["200"], "{what}: {answer}");
        assert!(answer.contains("connection: close\r\n"), "{what}: {answer}");
    }
    let Tasks { early, late } = &running.tasks;
    early.close();
    late.close();
    let all = async { tokio::join!(early.wait(), late.wait()) };
    assert!(tokio::time::timeout(PATIENCE, all).await.is_ok());
}

/// An idle connection does not keep the proxy from ending.
#[tokio::test]
async fn a_drained_connection_without_a_request_is_closed() {
    let (running, _echo) = started(Protocol::Http1).await;
    let mut idle = TcpStream::connect(running.http).await.expect("a connection");
    idle.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        .await
        .expect("sent");
    running.ending.drain.cancel();
    let mut answer = String::new();
    let read = tokio::time::timeout(PATIENCE, idle.read_to_string(&mut answer)).await;
    assert!(read.is_ok_and(|read| read.is_ok()));
    assert_eq!(statuses(&answer), ["200"]);
    let mut silent = TcpStream::connect(running.http).await.expect("a connection");
    let read = tokio::time::timeout(PATIENCE, silent.read(&mut [0; 1])).await;
    assert!(matches!(read, Ok(Ok(0))), "{read:?}");
}
