//! Annotations that decide who may, over real sockets: TLS to backends, source ranges and authentication. What cannot be
//! enforced must not be served.

use std::net::SocketAddr;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::backend::Protocol;
use crate::features_tests::{Cluster, header};
use crate::proxy_tests::{Echo, exchange, statuses};

/// A backend with TLS, whose certificate is for `name`. It notes the name that clients ask for.
async fn tls_echo(name: &str, protocol: Protocol) -> (SocketAddr, String, Arc<Mutex<Vec<Option<String>>>>) {
    let made = rcgen::generate_simple_self_signed(vec![name.to_owned()]).expect("a certificate");
    let pem = made.cert.pem();
    let identity = skiff_pki::Identity {
        certificate: pem.clone(),
        key: made.signing_key.serialize_pem(),
    };
    let mut config = skiff_pki::server_config(&identity, None).expect("TLS");
    config.alpn_protocols = match protocol {
        Protocol::Http1 => vec![],
        Protocol::Http2 => vec![b"h2".to_vec()],
    };
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let names: Arc<Mutex<Vec<Option<String>>>> = Arc::default();
    let noted = names.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, noted) = (acceptor.clone(), noted.clone());
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else {
                    return;
                };
                noted
                    .lock()
                    .push(stream.get_ref().1.server_name().map(str::to_owned));
                let service = service_fn(|request: Request<Incoming>| async move {
                    let text = format!("{:?} {}", request.version(), request.uri());
                    Ok::<_, std::convert::Infallible>(Response::new(Full::<Bytes>::from(text)))
                });
                let io = TokioIo::new(stream);
                let _ = match protocol {
                    Protocol::Http1 => {
                        hyper::server::conn::http1::Builder::new()
                            .serve_connection(io, service)
                            .await
                    }
                    Protocol::Http2 => {
                        let serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                        serving.serve_connection(io, service).await
                    }
                };
            });
        }
    });
    (address, pem, names)
}

#[tokio::test]
async fn backends_are_reached_in_tls_and_verified_where_that_is_asked_for() {
    let (address, pem, names) = tls_echo("inner.example", Protocol::Http1).await;
    let other = rcgen::generate_simple_self_signed(vec!["inner.example".to_owned()]).expect("a certificate");
    let check = async |annotations: &[(&str, &str)], expected: &str| {
        let mut all = vec![("backend-protocol", "HTTPS")];
        all.extend(annotations);
        let (mut cluster, _echo) = Cluster::with(&all).await;
        cluster.service("d/s", json!({}), &[address]);
        cluster.secret("d/ca", &[("ca.crt", &pem)]);
        cluster.secret("d/other", &[("ca.crt", &other.cert.pem())]);
        cluster.secret("d/empty", &[("x", "")]);
        cluster.serve();
        let answer = cluster.get("/p", "").await;
        assert_eq!(statuses(&answer), [expected], "{annotations:?}: {answer}");
        names.lock().drain(..).next().flatten()
    };
    assert_eq!(check(&[], "200").await, None);
    assert_eq!(
        check(&[("proxy-ssl-server-name", "on")], "200").await.as_deref(),
        Some("s.d.svc")
    );
    assert_eq!(
        check(&[("proxy-ssl-name", "inner.example")], "200")
            .await
            .as_deref(),
        Some("inner.example")
    );
    let (on, name) = (("proxy-ssl-verify", "on"), ("proxy-ssl-name", "inner.example"));
    let ca = ("proxy-ssl-secret", "d/ca");
    check(&[on, ca, name], "200").await;
    check(&[on, ca], "502").await;
    check(&[on, ("proxy-ssl-secret", "other"), name], "502").await;
    // What cannot be verified is not served.
    check(&[on, name], "503").await;
    check(&[on, ("proxy-ssl-secret", "missing"), name], "503").await;
    check(&[on, ("proxy-ssl-secret", "empty"), name], "503").await;
    check(&[on, ("proxy-ssl-secret", "elsewhere/ca"), name], "503").await;
    check(&[("proxy-ssl-verify", "yes"), ca, name], "503").await;
    check(&[on, ca, ("proxy-ssl-name", "a b")], "503").await;
}

#[tokio::test]
async fn grpc_backends_are_reached_in_tls() {
    let (address, _, _) = tls_echo("x", Protocol::Http2).await;
    let (mut cluster, _echo) = Cluster::with(&[("backend-protocol", "GRPCS")]).await;
    cluster.service("d/s", json!({}), &[address]);
    cluster.serve();
    let answer = cluster.get("/p.S/M", "").await;
    assert_eq!(statuses(&answer), ["200"], "{answer}");
    assert!(answer.ends_with("HTTP/2.0 https://a/p.S/M"), "{answer}");
}

#[tokio::test]
async fn source_ranges_are_enforced_or_nothing_is_served() {
    for (annotations, expected) in [
        (&[("whitelist-source-range", "127.0.0.0/8")][..], "200"),
        (&[("whitelist-source-range", "10.0.0.0/8, 127.0.0.1")], "200"),
        (&[("whitelist-source-range", "10.0.0.0/8")], "403"),
        (&[("allowlist-source-range", "10.0.0.0/8")], "403"),
        (&[("denylist-source-range", "127.0.0.1/32")], "403"),
        (&[("denylist-source-range", "10.0.0.0/8")], "200"),
        (
            &[
                ("whitelist-source-range", "127.0.0.0/8"),
                ("denylist-source-range", "127.0.0.1"),
            ],
            "403",
        ),
        (&[("whitelist-source-range", "127.0.0.0/33")], "503"),
        (&[("whitelist-source-range", "")], "503"),
        (&[("denylist-source-range", "evil")], "503"),
    ] {
        let (mut cluster, echo) = Cluster::with(annotations).await;
        cluster.serve();
        // What a client says of itself does not count.
        let forged = "X-Forwarded-For: 10.0.0.1\r\nX-Real-IP: 10.0.0.1\r\n";
        assert_eq!(cluster.status("/", forged).await, expected, "{annotations:?}");
        assert_eq!(echo.lines().len(), usize::from(expected == "200"));
    }
}

fn basic(user: &str, password: &str) -> String {
    format!(
        "Authorization: Basic {}\r\n",
        STANDARD.encode(format!("{user}:{password}"))
    )
}

#[tokio::test]
async fn basic_authentication_lets_nobody_else_pass() {
    let annotations = [
        ("auth-type", "basic"),
        ("auth-secret", "users"),
        ("auth-realm", "Log in"),
    ];
    let (mut cluster, echo) = Cluster::with(&annotations).await;
    // Without its Secret nothing is served.
    assert!(cluster.serve().iter().any(|problem| problem.contains("users")));
    assert_eq!(cluster.status("/", &basic("ann", "secret")).await, "503");
    let file = "# users\nann:$apr1$abcdefgh$h9FWgUz3n9YxylKLlR5SQ/\nbob:{SHA}5en6G6MezRroT3XKqkdPOmY/BfQ=\nold:$6$x$y\nnone:\n";
    cluster.secret("d/users", &[("auth", file)]);
    let problems = cluster.serve();
    assert!(
        problems.iter().any(|problem| problem.contains("SHA-crypt")),
        "{problems:?}"
    );
    let answer = cluster.get("/", "").await;
    assert_eq!(statuses(&answer), ["401"]);
    assert_eq!(
        header(&answer, "www-authenticate"),
        Some("Basic realm=\"Log in\"")
    );
    let two = format!("{}{}", basic("ann", "wrong"), basic("ann", "secret"));
    let long = basic("ann", &"x".repeat(20_000));
    for wrong in [
        basic("ann", "wrong"),
        basic("ann", ""),
        basic("ANN", "secret"),
        basic("old", "y"),
        basic("none", ""),
        basic("", ""),
        basic("nobody", "secret"),
        "Authorization: Basic\r\n".to_owned(),
        "Authorization: Basic !!!\r\n".to_owned(),
        format!("Authorization: Basic {}\r\n", STANDARD.encode("ann")),
        format!("Authorization: Bearer {}\r\n", STANDARD.encode("ann:secret")),
        two,
        long,
    ] {
        assert_eq!(
            cluster.status("/", &wrong).await,
            "401",
            "{}",
            &wrong[..wrong.len().min(60)]
        );
    }
    assert!(echo.lines().is_empty());
    for user in ["ann", "bob", "ann"] {
        assert_eq!(cluster.status("/", &basic(user, "secret")).await, "200", "{user}");
    }
    // Backends do not see passwords.
    assert!(
        echo.seen
            .lock()
            .iter()
            .all(|seen| !seen.headers.contains_key("authorization"))
    );
    // What was right is forgotten with the Secret's version.
    cluster.secret("d/users", &[("auth", "bob:{PLAIN}new")]);
    cluster.serve();
    assert_eq!(cluster.status("/", &basic("ann", "secret")).await, "401");
    assert_eq!(cluster.status("/", &basic("bob", "new")).await, "200");
}

#[tokio::test]
async fn a_protected_path_has_no_other_spelling() {
    let (mut cluster, echo) = Cluster::with(&[]).await;
    let users = [("auth-type", "basic"), ("auth-secret", "users")];
    cluster.ingress(
        "admin",
        &users,
        &["/admin s", "/v1/users:export s", "/caf%C3%A9 s"],
    );
    cluster.secret("d/users", &[("auth", "ann:{PLAIN}secret")]);
    cluster.serve();
    assert_eq!(cluster.status("/", "").await, "200");
    echo.seen.lock().clear();
    for (path, expected) in [
        ("/admin", "401"),
        ("/admin/x", "401"),
        ("/%61dmin", "401"),
        ("//admin", "401"),
        ("/admin//x", "401"),
        ("/%2Fadmin", "401"),
        ("/%2fadmin", "401"),
        ("/admin%2Fx", "401"),
        ("/v1/users:export", "401"),
        ("/v1/users%3Aexport", "401"),
        ("/v1/users%3aexport", "401"),
        ("/v1%2fusers%3aexport/x", "401"),
        ("/caf%C3%A9", "401"),
        ("/caf%c3%a9/x", "401"),
        ("/./admin", "400"),
        ("/x/../admin", "400"),
        ("/x/..%2Fadmin", "400"),
        ("/x%2f%2e%2e%2fadmin", "400"),
    ] {
        assert_eq!(cluster.status(path, "").await, expected, "{path}");
    }
    assert!(echo.lines().is_empty(), "{:?}", echo.lines());
    // What is sent on is what the client wrote, and no backend reads it as a protected path that resolves it once.
    for path in [
        "/x%2Fy",
        "/x%3ay%c3%A9",
        "/v1/users%253Aexport",
        "/x%252F..%252Fadmin",
    ] {
        echo.seen.lock().clear();
        assert_eq!(cluster.status(path, "").await, "200", "{path}");
        assert_eq!(echo.lines(), [format!("GET {path}")]);
    }
}

#[tokio::test]
async fn restricted_paths_that_cannot_be_compared_are_closed() {
    let users = [("auth-type", "basic"), ("auth-secret", "users")];
    let check = async |restriction: &[(&str, &str)], pattern: &str, paths: &[(&str, &str)]| {
        let (mut cluster, echo) = Cluster::with(&[]).await;
        cluster.secret("d/users", &[("auth", "ann:{PLAIN}secret")]);
        cluster.service("d/auth", json!({}), &[echo.address]);
        cluster.ingress("regex", &[("use-regex", "true")], &["/regex s"]);
        cluster.ingress("bad", restriction, &[&format!("{pattern} s")]);
        let problems = cluster.serve();
        assert!(
            problems.iter().any(|problem| problem.contains(pattern)),
            "{problems:?}"
        );
        for (path, expected) in paths {
            let status = cluster.status(path, &basic("ann", "secret")).await;
            assert_eq!(status, *expected, "{restriction:?} {pattern} {path}");
        }
    };
    let admin = "/admin/(?!login).*";
    for (pattern, paths) in [
        (
            admin,
            &[
                ("/admin/x", "503"),
                ("/ADMIN//x", "503"),
                ("/%61dmin%2Fx", "503"),
                ("/admin/login", "503"),
                ("/administer", "200"),
                ("/", "200"),
            ][..],
        ),
        ("/admin/?(?!login)", &[("/admin", "503"), ("/x", "200")]),
        ("/big(a{1000}){1000}", &[("/bigaaa", "503"), ("/bi", "200")]),
        // It is meant as it is written, but another Ingress has expressions.
        ("/a(b", &[("/a(b", "503"), ("/a%28b/c", "503"), ("/b", "200")]),
        (
            "/x(?!y)|/admin",
            &[("/x", "503"), ("/admin", "503"), ("/y", "200")],
        ),
    ] {
        check(&users, pattern, paths).await;
    }
    for (restriction, expected) in [
        (&[("auth-type", "basic"), ("auth-secret", "missing")][..], "503"),
        (&[("auth-url", "http://auth.d.svc/")], "503"),
        (&[("whitelist-source-range", "127.0.0.0/8")], "503"),
        (&[("denylist-source-range", "10.0.0.0/8")], "503"),
        (&[("backend-protocol", "FCGI")], "503"),
        // It keeps nobody out.
        (&[("proxy-body-size", "8m")], "200"),
    ] {
        check(restriction, admin, &[("/admin/x", expected), ("/", "200")]).await;
    }
}

#[tokio::test]
async fn the_share_of_a_canary_that_is_closed_is_not_served() {
    for bad in [
        ("backend-protocol", "HTTPSS"),
        ("proxy-ssl-verify", "yes"),
        ("auth-type", "digest"),
        ("auth-tls-secret", "d/ca"),
        ("whitelist-source-range", "10.0.0.0/33"),
    ] {
        let (mut cluster, main) = Cluster::with(&[]).await;
        let trial = Echo::start(Protocol::Http1).await;
        cluster.service("d/trial", json!({}), &[trial.address]);
        let canary = [("canary", "true"), ("canary-by-header", "X-Trial")];
        cluster.ingress("canary", &[canary[0], canary[1], bad], &["/ trial"]);
        assert!(!cluster.serve().is_empty());
        assert_eq!(cluster.status("/", "").await, "200", "{bad:?}");
        assert_eq!(cluster.status("/", "X-Trial: always\r\n").await, "503", "{bad:?}");
        assert_eq!((main.lines().len(), trial.lines().len()), (1, 0), "{bad:?}");
    }
}

#[tokio::test]
async fn users_may_be_keys_of_a_secret_and_half_an_authentication_is_none() {
    let map = [
        ("auth-type", "basic"),
        ("auth-secret", "d/users"),
        ("auth-secret-type", "auth-map"),
    ];
    let (mut cluster, _echo) = Cluster::with(&map).await;
    cluster.secret("d/users", &[("ann", "{PLAIN}secret")]);
    cluster.serve();
    assert_eq!(cluster.status("/", &basic("ann", "secret")).await, "200");
    assert_eq!(cluster.status("/", "").await, "401");
    for bad in [
        &[("auth-type", "basic")][..],
        &[("auth-secret", "users")],
        &[("auth-type", "digest"), ("auth-secret", "users")],
        &[("auth-type", "basic"), ("auth-secret", "e/users")],
        &[
            ("auth-type", "basic"),
            ("auth-secret", "users"),
            ("auth-realm", "a\r\nX: y"),
        ],
        &[("auth-tls-secret", "d/ca")],
        &[("auth-url", "http://169.254.169.254/")],
        &[("rewrite-target", "https://evil/")],
        &[("backend-protocol", "FCGI")],
    ] {
        let (mut cluster, echo) = Cluster::with(bad).await;
        cluster.secret("d/users", &[("auth", "ann:{PLAIN}secret")]);
        assert!(!cluster.serve().is_empty());
        assert_eq!(
            cluster.status("/", &basic("ann", "secret")).await,
            "503",
            "{bad:?}"
        );
        assert!(echo.lines().is_empty());
    }
}

/// A Service that authenticates: by the header `x-key`.
async fn authenticator() -> (SocketAddr, Arc<Mutex<Vec<(String, HeaderMap)>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let seen: Arc<Mutex<Vec<(String, HeaderMap)>>> = Arc::default();
    let noted = seen.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let noted = noted.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let line = format!("{} {}", request.method(), request.uri());
                noted.lock().push((line, request.headers().clone()));
                let key = request.headers().get("x-key").map(|key| key.as_bytes().to_vec());
                let mut response = Response::new(Full::<Bytes>::from("body of the authenticator"));
                let headers = response.headers_mut();
                headers.insert("www-authenticate", http::HeaderValue::from_static("Bearer"));
                headers.insert("set-cookie", http::HeaderValue::from_static("session=1"));
                *response.status_mut() = match key.as_deref() {
                    Some(b"good") => {
                        response
                            .headers_mut()
                            .insert("x-user", http::HeaderValue::from_static("ann"));
                        StatusCode::ACCEPTED
                    }
                    Some(b"bad") => StatusCode::FORBIDDEN,
                    Some(b"moved") => StatusCode::FOUND,
                    Some(b"broken") => StatusCode::BAD_GATEWAY,
                    _ => StatusCode::UNAUTHORIZED,
                };
                async move { Ok::<_, std::convert::Infallible>(response) }
            });
            let serving =
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            tokio::spawn(serving);
        }
    });
    (address, seen)
}

#[tokio::test]
async fn another_service_decides_who_may() {
    let annotations = [
        (
            "auth-url",
            "http://auth.d.svc.cluster.local/check?u=$escaped_request_uri",
        ),
        ("auth-response-headers", "X-User, X-Groups"),
        ("auth-signin", "https://$host/login"),
    ];
    let (mut cluster, echo) = Cluster::with(&annotations[..2]).await;
    let (address, seen) = authenticator().await;
    cluster.service("d/auth", json!({}), &[address]);
    assert_eq!(cluster.serve(), Vec::<String>::new());
    let forged = "X-Key: good\r\nX-User: root\r\nX_User: root\r\nX_Groups: root\r\nX-Groups: admins\r\nX-Original-URL: http://evil/\r\nX_Original_URL: http://evil/\r\nX-Original-URI: /evil\r\nX-Original-Method: GET\r\n";
    let post = format!(
        "POST /p?q=1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{forged}Content-Length: 4\r\n\r\nbody"
    );
    let answer = exchange(cluster.running.http, post.as_bytes()).await;
    assert_eq!(statuses(&answer), ["200"], "{answer}");
    assert_eq!(header(&answer, "set-cookie"), Some("session=1"));
    let asked = seen.lock().pop().expect("a question");
    assert_eq!(asked.0, "GET /check?u=%2Fp%3Fq%3D1");
    for (name, value) in [
        ("host", "auth.d.svc.cluster.local"),
        ("x-original-url", "http://a/p?q=1"),
        ("x-original-uri", "/p?q=1"),
        ("x-original-method", "POST"),
        ("x-auth-request-redirect", "/p?q=1"),
        ("x-real-ip", "127.0.0.1"),
    ] {
        assert_eq!(
            asked.1.get(name).and_then(|value| value.to_str().ok()),
            Some(value),
            "{name}"
        );
    }
    for gone in ["content-length", "x_original_url"] {
        assert!(!asked.1.contains_key(gone), "{gone}");
    }
    let sent = echo.seen.lock().pop().expect("a request");
    assert_eq!(sent.body, "body");
    assert_eq!(sent.headers["x-user"], "ann");
    for forged in ["x-groups", "x_groups", "x_user"] {
        assert!(!sent.headers.contains_key(forged), "{forged}");
    }
    for (key, expected) in [
        ("", "401"),
        ("X-Key: bad\r\n", "403"),
        ("X-Key: moved\r\n", "500"),
        ("X-Key: broken\r\n", "500"),
    ] {
        let answer = cluster.get("/", key).await;
        assert_eq!(statuses(&answer), [expected], "{key}");
        assert!(!answer.contains("body of the authenticator"));
        assert_eq!(
            header(&answer, "www-authenticate"),
            (expected == "401").then_some("Bearer")
        );
    }
    assert!(echo.lines().is_empty());
    // Where nobody answers, nobody passes.
    let closed = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let gone = closed.local_addr().expect("an address");
    drop(closed);
    cluster.service("d/auth", json!({}), &[gone]);
    cluster.serve();
    assert_eq!(cluster.status("/", "X-Key: good\r\n").await, "500");
    cluster.service("d/auth", json!({}), &[]);
    cluster.serve();
    assert_eq!(cluster.status("/", "X-Key: good\r\n").await, "500");
    let (mut cluster, echo) = Cluster::with(&annotations).await;
    cluster.service("d/auth", json!({}), &[address]);
    cluster.serve();
    let answer = cluster.get("/p?q=1", "").await;
    let expected = "https://a/login?rd=http://a%2Fp%3Fq%3D1";
    assert_eq!(
        (statuses(&answer), header(&answer, "location")),
        (vec!["302"], Some(expected))
    );
    assert_eq!(cluster.status("/", "X-Key: bad\r\n").await, "403");
    assert!(echo.lines().is_empty());
}

#[tokio::test]
async fn services_of_other_namespaces_must_allow_to_be_asked() {
    let (address, seen) = authenticator().await;
    for (allowed, expected) in [
        (json!({}), "503"),
        (json!("x"), "503"),
        (json!("x, d"), "200"),
        (json!("*"), "200"),
    ] {
        let (mut cluster, _echo) = Cluster::with(&[("auth-url", "http://auth.other.svc/")]).await;
        let annotations = match allowed.is_string() {
            true => json!({"ingress.skiff.io/allow-auth-from": allowed}),
            false => json!({}),
        };
        cluster.service("other/auth", annotations, &[address]);
        cluster.serve();
        seen.lock().clear();
        assert_eq!(
            cluster.status("/", "X-Key: good\r\n").await,
            expected,
            "{allowed}"
        );
        assert_eq!(seen.lock().len(), usize::from(expected == "200"));
    }
}
