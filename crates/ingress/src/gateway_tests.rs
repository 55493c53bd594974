//! Gateway API over real sockets, in one process: what rules do to requests, and connections that are passed through.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderName, HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::backend::{Backend, BackendKey, Protocol};
use crate::connections::ConnectionLimits;
use crate::gateway::filters::{Filters, HeaderChange, Mirror, PathEdit, Redirect, Rewrite};
use crate::gateway::hosts::{Host, Hosts};
use crate::gateway::table::{
    Entry, GatewayTable, HttpRoutes, ListenAddress, Match, PathRule, Rule, SecureListener, WeightedBackend,
};
use crate::proxy_tests::{Echo, PATIENCE, Running, exchange, statuses};
use crate::table::Retry;
use crate::tls::Resolver;

const HTTP: ListenAddress = ListenAddress {
    address: None,
    port: 80,
};
const HTTPS: ListenAddress = ListenAddress {
    address: None,
    port: 443,
};

fn backend(
    running: &Running,
    name: &str,
    protocol: Protocol,
    endpoints: &[std::net::SocketAddr],
) -> Arc<Backend> {
    let key = BackendKey {
        namespace: "d".into(),
        service: name.into(),
        port: String::new(),
    };
    running
        .backends
        .lock()
        .put(key, protocol, endpoints, Instant::now())
}

fn to(backend: Option<Arc<Backend>>) -> Vec<WeightedBackend> {
    vec![WeightedBackend {
        weight: 1,
        backend,
        filters: Filters::default(),
    }]
}

/// Serves one rule for each path.
fn serve(running: &Running, rules: Vec<(&str, Rule)>) {
    let mut table = GatewayTable::default();
    for (at, (path, rule)) in rules.into_iter().enumerate() {
        let entry = Entry {
            matched: Match {
                path: PathRule::prefix(path),
                method: None,
                headers: Vec::new(),
                query: Vec::new(),
            },
            age: (None, String::new(), at, 0),
            rule: Arc::new(rule),
        };
        let port = table.port_mut(HTTP);
        port.plain
            .entry(Host::Any, HttpRoutes::default)
            .add(Host::Any, entry);
    }
    table.sort();
    running.proxy.gateways.store(Arc::new(table));
}

async fn get(running: &Running, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: x.example:80\r\nConnection: close\r\n\r\n");
    exchange(running.http, request.as_bytes()).await
}

fn header(name: &'static str, value: &'static str) -> (HeaderName, HeaderValue) {
    (HeaderName::from_static(name), HeaderValue::from_static(value))
}

#[tokio::test]
async fn filters_change_requests_and_responses() {
    let echo = Echo::start(Protocol::Http1).await;
    let running = Running::start(ConnectionLimits::default()).await;
    let found = backend(&running, "s", Protocol::Http1, &[echo.address]);
    let filters = Filters {
        request: HeaderChange {
            set: vec![header("x-set", "1")],
            ..HeaderChange::default()
        },
        response: HeaderChange {
            add: vec![header("x-answer", "2")],
            ..HeaderChange::default()
        },
        rewrite: Some(Rewrite {
            host: Some(HeaderValue::from_static("new.example")),
            path: Some(PathEdit::Prefix("/new".into())),
        }),
        ..Filters::default()
    };
    let mut of_backend = to(Some(found.clone()));
    of_backend[0].filters = filters.clone();
    let redirect = Redirect {
        scheme: Some("https"),
        status: StatusCode::MOVED_PERMANENTLY,
        ..Redirect::default()
    };
    serve(
        &running,
        vec![
            (
                "/rule",
                Rule {
                    filters,
                    backends: to(Some(found)),
                    ..Rule::default()
                },
            ),
            (
                "/backend",
                Rule {
                    backends: of_backend,
                    ..Rule::default()
                },
            ),
            (
                "/moved",
                Rule {
                    filters: Filters {
                        redirect: Some(redirect),
                        ..Filters::default()
                    },
                    ..Rule::default()
                },
            ),
            (
                "/invalid",
                Rule {
                    backends: to(None),
                    ..Rule::default()
                },
            ),
            ("/none", Rule::default()),
        ],
    );
    for path in ["/rule/a?q=1", "/backend/a?q=1"] {
        let answer = get(&running, path).await;
        assert_eq!(statuses(&answer), ["200"], "{path}");
        assert!(answer.contains("x-answer: 2\r\n"), "{answer}");
        let seen = echo.seen.lock().pop().expect("a request");
        assert_eq!(seen.line, "GET /new/a?q=1");
        assert_eq!(seen.headers["x-set"], "1");
        assert_eq!(seen.headers["host"], "new.example");
    }
    let moved = get(&running, "/moved/a?q=1").await;
    assert_eq!(statuses(&moved), ["301"]);
    assert!(
        moved.contains("location: https://x.example/moved/a?q=1\r\n"),
        "{moved}"
    );
    for (path, expected) in [("/invalid", "500"), ("/none", "500"), ("/else", "404")] {
        assert_eq!(statuses(&get(&running, path).await), [expected], "{path}");
    }
}

#[tokio::test]
async fn a_mirror_gets_a_copy_with_its_body() {
    let (echo, mirror) = (
        Echo::start(Protocol::Http1).await,
        Echo::start(Protocol::Http1).await,
    );
    let running = Running::start(ConnectionLimits::default()).await;
    let copied = Mirror {
        backend: Some(backend(&running, "m", Protocol::Http1, &[mirror.address])),
        share: 1.0,
    };
    let rule = Rule {
        filters: Filters {
            mirrors: vec![copied],
            ..Filters::default()
        },
        backends: to(Some(backend(&running, "s", Protocol::Http1, &[echo.address]))),
        ..Rule::default()
    };
    serve(&running, vec![("/", rule)]);
    let request = "POST /copy HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello";
    let answer = exchange(running.http, request.as_bytes()).await;
    assert_eq!(statuses(&answer), ["200"]);
    assert_eq!(echo.lines(), ["POST /copy"]);
    let copied = async {
        while !mirror.seen.lock().iter().any(|seen| seen.body == "hello") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, copied).await.expect("a copy");
}

/// Answers each connection with the next of the statuses.
async fn scripted(answers: &'static [&'static str]) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        for status in answers {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut buffer = [0; 1024];
            let _ = stream.read(&mut buffer).await;
            if status.is_empty() {
                // It never answers.
                tokio::spawn(async move {
                    let _ = stream.read(&mut buffer).await;
                });
                continue;
            }
            let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    address
}

#[tokio::test]
async fn requests_are_repeated_as_the_rule_says() {
    let running = Running::start(ConnectionLimits::default()).await;
    let retry = |attempts| {
        Some(Retry {
            attempts,
            backoff: Some(Duration::from_millis(1)),
            codes: vec![500],
        })
    };
    let rule = |name: &str, address, attempts| Rule {
        backends: to(Some(backend(&running, name, Protocol::Http1, &[address]))),
        retry: retry(attempts),
        ..Rule::default()
    };
    let late = Rule {
        backend_timeout: Some(Duration::from_millis(50)),
        ..rule("late", scripted(&["", "200"]).await, 1)
    };
    let over = Rule {
        request_timeout: Some(Duration::from_millis(50)),
        ..rule("over", scripted(&["", "200"]).await, 1)
    };
    serve(
        &running,
        vec![
            ("/twice", rule("twice", scripted(&["500", "500", "200"]).await, 2)),
            ("/once", rule("once", scripted(&["500", "500", "200"]).await, 1)),
            ("/other", rule("other", scripted(&["503", "200"]).await, 1)),
            ("/late", late),
            ("/over", over),
        ],
    );
    for (path, expected) in [
        ("/twice", "200"),
        ("/once", "500"),
        ("/other", "503"),
        ("/late", "200"),
        ("/over", "504"),
    ] {
        assert_eq!(statuses(&get(&running, path).await), [expected], "{path}");
    }
}

#[tokio::test]
async fn http2_without_tls_is_served_at_listeners() {
    let echo = Echo::start(Protocol::Http2).await;
    let running = Running::start(ConnectionLimits::default()).await;
    let rule = Rule {
        backends: to(Some(backend(&running, "s", Protocol::Http2, &[echo.address]))),
        is_grpc: true,
        ..Rule::default()
    };
    let invalid = Rule {
        backends: to(None),
        is_grpc: true,
        ..Rule::default()
    };
    serve(&running, vec![("/svc", rule), ("/invalid", invalid)]);
    let stream = TcpStream::connect(running.http).await.expect("a connection");
    let (mut sender, connection) = hyper::client::conn::http2::handshake::<_, _, Empty<bytes::Bytes>>(
        TokioExecutor::new(),
        TokioIo::new(stream),
    )
    .await
    .expect("HTTP/2");
    tokio::spawn(connection);
    for (path, expected) in [("/svc/Method", 200), ("/invalid/Method", 503), ("/else", 404)] {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("http://x.example{path}"))
            .body(Empty::new())
            .expect("a request");
        let response = sender.send_request(request).await.expect("a response");
        assert_eq!(response.status().as_u16(), expected, "{path}");
        let _ = response.into_body().collect().await;
    }
    assert_eq!(echo.lines().len(), 1);
}

/// Accepts any certificate: only who answers matters here.
fn client() -> TlsConnector {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    config
        .dangerous()
        .set_certificate_verifier(Arc::new(AnyCertificate));
    TlsConnector::from(Arc::new(config))
}

#[derive(Debug)]
struct AnyCertificate;

impl rustls::client::danger::ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &rustls::pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        rustls::crypto::aws_lc_rs::default_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// Says its name to whoever connects, with TLS or without.
async fn named(name: &'static str, tls: Option<TlsAcceptor>) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let Some(tls) = &tls else {
                let _ = stream.write_all(name.as_bytes()).await;
                continue;
            };
            if let Ok(mut stream) = tls.accept(stream).await {
                let _ = stream.write_all(name.as_bytes()).await;
                let _ = stream.shutdown().await;
            }
        }
    });
    address
}

#[tokio::test]
async fn the_name_decides_who_ends_tls() {
    let running = Running::start(ConnectionLimits::default()).await;
    let config = Resolver::new()
        .and_then(|resolver| resolver.server_config())
        .expect("TLS");
    let passed = named("passed", Some(TlsAcceptor::from(config.clone()))).await;
    let ended = named("ended", None).await;
    let mut table = GatewayTable::default();
    for (host, own, name, address) in [
        ("passed.example", None, "p", passed),
        ("*.ended.example", Some(config), "e", ended),
    ] {
        let rule = Rule {
            backends: to(Some(backend(&running, name, Protocol::Http1, &[address]))),
            ..Rule::default()
        };
        let mut routes = Hosts::default();
        routes.entry(Host::parse(Some(host)), || Arc::new(rule));
        let port = table.port_mut(HTTPS);
        port.secure
            .entry(Host::parse(Some(host)), || SecureListener::Tcp {
                config: own,
                routes,
            });
    }
    running.proxy.gateways.store(Arc::new(table));
    for (name, expected) in [("passed.example", "passed"), ("a.b.ended.example", "ended")] {
        let stream = TcpStream::connect(running.https).await.expect("a connection");
        let server = rustls::pki_types::ServerName::try_from(name).expect("a name");
        let connecting = client().connect(server, stream);
        let mut stream = tokio::time::timeout(PATIENCE, connecting)
            .await
            .expect("in time")
            .expect("TLS");
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text).await;
        assert_eq!(text, expected);
    }
}
