//! The node's HTTPS server, which the API server calls for logs, exec, attach and port-forward. Streams are
//! passed on to the runtime; nothing here runs anything itself.

mod auth;
pub mod log_file;
mod logs;
mod stats;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::jiff::Timestamp;
use skiff_cri::v1;
use skiff_streaming::Body;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::config::NodeConfig;
use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::observed::ContainerState;
use crate::pod_state::PodState;
use crate::pods;
use auth::Identity;
use log_file::LogOptions;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on {address}: {source}")]
    Bind { address: SocketAddr, source: io::Error },
    #[error("cannot use the TLS certificate: {0}")]
    Tls(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

pub async fn bind(address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address)
        .await
        .map_err(|source| Error::Bind { address, source })
}

/// Clients are asked for a certificate, but may come without: they then get a 401 they can read.
pub fn tls_config(config: &NodeConfig) -> Result<Arc<rustls::ServerConfig>, Error> {
    let tls = |error: &dyn std::fmt::Display| Error::Tls(error.to_string());
    let certificates: Vec<_> = rustls_pemfile::certs(&mut config.tls_cert_pem.as_slice())
        .collect::<Result<_, _>>()
        .map_err(|e| tls(&e))?;
    let key = rustls_pemfile::private_key(&mut config.tls_key_pem.as_slice())
        .map_err(|e| tls(&e))?
        .ok_or_else(|| tls(&"no private key"))?;
    let mut roots = rustls::RootCertStore::empty();
    for certificate in rustls_pemfile::certs(&mut config.client_ca_pem.as_slice()) {
        roots
            .add(certificate.map_err(|e| tls(&e))?)
            .map_err(|e| tls(&e))?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier =
        rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
            .allow_unauthenticated()
            .build()
            .map_err(|e| tls(&e))?;
    // HTTP/1.1 only: streams are upgraded connections.
    let mut server = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| tls(&e))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates, key)
        .map_err(|e| tls(&e))?;
    server.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(server))
}

pub async fn serve(kubelet: Arc<Kubelet>, listener: TcpListener, tls: Arc<rustls::ServerConfig>) {
    let acceptor = tokio_rustls::TlsAcceptor::from(tls);
    loop {
        let stream = tokio::select! {
            () = kubelet.shutdown.cancelled() => return,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "the node's server cannot accept a connection");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        tokio::spawn(connection(kubelet.clone(), acceptor.clone(), stream));
    }
}

async fn connection(kubelet: Arc<Kubelet>, acceptor: tokio_rustls::TlsAcceptor, stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let Ok(stream) = acceptor.accept(stream).await else {
        return;
    };
    let identity = stream
        .get_ref()
        .1
        .peer_certificates()
        .and_then(|chain| auth::identity(chain.first()?));
    let shutdown = kubelet.shutdown.clone();
    let service = hyper::service::service_fn(move |request| {
        let (kubelet, identity) = (kubelet.clone(), identity.clone());
        async move { Ok::<_, Infallible>(handle(kubelet, identity, request).await) }
    });
    let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new()).http1_only();
    let served = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::select! {
        () = shutdown.cancelled() => {}
        _ = served => {}
    }
}

fn text(status: StatusCode, message: impl Into<String>) -> Response<Body> {
    let mut response = Response::new(
        Full::new(Bytes::from(message.into()))
            .map_err(|e| match e {})
            .boxed_unsync(),
    );
    *response.status_mut() = status;
    response.headers_mut().insert(
        "content-type",
        http::HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

fn json(value: &impl serde::Serialize) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(bytes) => {
            let mut response = Response::new(
                Full::new(Bytes::from(bytes))
                    .map_err(|e| match e {})
                    .boxed_unsync(),
            );
            response
                .headers_mut()
                .insert("content-type", http::HeaderValue::from_static("application/json"));
            response
        }
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

async fn handle(
    kubelet: Arc<Kubelet>,
    identity: Option<Identity>,
    request: Request<Incoming>,
) -> Response<Body> {
    let path = request.uri().path().to_owned();
    if path == "/healthz" && identity.is_none() {
        return text(StatusCode::UNAUTHORIZED, "Unauthorized");
    }
    let Some(identity) = identity else {
        return text(StatusCode::UNAUTHORIZED, "Unauthorized");
    };
    if !auth::is_allowed(&identity, &kubelet.config.allowed_clients) {
        let verb = if request.method() == Method::GET {
            "get"
        } else {
            "create"
        };
        return text(
            StatusCode::FORBIDDEN,
            format!(
                "Forbidden (user={}, verb={verb}, resource=nodes, subresource(s)=[proxy])\n",
                identity.name
            ),
        );
    }
    let parts: Vec<String> = path.split('/').filter(|p| !p.is_empty()).map(decode).collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let query = parse_query(request.uri().query().unwrap_or_default());
    match parts.as_slice() {
        ["healthz"] => text(StatusCode::OK, "ok"),
        ["pods"] => pod_list(&kubelet),
        ["stats", "summary"] => match kubelet.stats_summary().await {
            Ok(summary) => json(&summary),
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error),
        },
        ["metrics", "resource"] => match kubelet.resource_metrics().await {
            Ok(metrics) => text(StatusCode::OK, metrics),
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error),
        },
        ["containerLogs", namespace, pod, container] => {
            container_logs(&kubelet, namespace, pod, container, &query)
        }
        ["exec", namespace, pod, container] => {
            exec(&kubelet, request, namespace, pod, None, container, &query).await
        }
        ["exec", namespace, pod, uid, container] => {
            exec(&kubelet, request, namespace, pod, Some(uid), container, &query).await
        }
        ["attach", namespace, pod, container] => {
            attach(&kubelet, request, namespace, pod, None, container, &query).await
        }
        ["attach", namespace, pod, uid, container] => {
            attach(&kubelet, request, namespace, pod, Some(uid), container, &query).await
        }
        ["portForward", namespace, pod] => {
            port_forward(&kubelet, request, namespace, pod, None, &query).await
        }
        ["portForward", namespace, pod, uid] => {
            port_forward(&kubelet, request, namespace, pod, Some(uid), &query).await
        }
        _ => text(StatusCode::NOT_FOUND, "404 page not found\n"),
    }
}

/// Percent-decoding, with `+` left alone as in a path.
fn decode(part: &str) -> String {
    let bytes = part.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while index < bytes.len() {
        let code = (bytes[index] == b'%')
            .then(|| part.get(index + 1..index + 3))
            .flatten()
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match code {
            Some(byte) => {
                out.push(byte);
                index += 3;
            }
            None => {
                out.push(bytes[index]);
                index += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn parse_query(query: &str) -> Vec<(String, String)> {
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(&name.replace('+', " ")), decode(&value.replace('+', " ")))
        })
        .collect()
}

fn pod_list(kubelet: &Kubelet) -> Response<Body> {
    let items: Vec<_> = kubelet
        .states()
        .into_iter()
        .map(|state| {
            let mut pod = (*state.pod()).clone();
            pod.status = Some((*state.status()).clone());
            pod
        })
        .collect();
    json(&serde_json::json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
}

fn find(kubelet: &Kubelet, namespace: &str, pod: &str, uid: Option<&str>) -> Option<Arc<PodState>> {
    kubelet
        .state_by_name(namespace, pod)
        .filter(|state| uid.is_none_or(|uid| state.uid == uid))
}

fn container_logs(
    kubelet: &Kubelet,
    namespace: &str,
    pod: &str,
    container: &str,
    query: &[(String, String)],
) -> Response<Body> {
    let options = match LogOptions::from_query(query, Timestamp::now()) {
        Ok(options) => options,
        Err(error) => return text(StatusCode::BAD_REQUEST, error),
    };
    let Some(state) = find(kubelet, namespace, pod, None) else {
        return text(StatusCode::NOT_FOUND, format!("pod {pod:?} does not exist\n"));
    };
    if pods::container(&state.pod(), container).is_none() {
        return text(
            StatusCode::NOT_FOUND,
            format!("container {container:?} not found in pod {pod:?}\n"),
        );
    }
    let id = match logs::container_id(pod, &state.status(), container, options.previous) {
        Ok(id) => id,
        Err(error) => return text(StatusCode::BAD_REQUEST, error),
    };
    let path = state
        .observed()
        .containers
        .iter()
        .find(|c| c.id == id)
        .map(|c| PathBuf::from(&c.log_path));
    let Some(path) = path.filter(|p| !p.as_os_str().is_empty()) else {
        return text(
            StatusCode::BAD_REQUEST,
            format!(
                "unable to retrieve container logs for {}://{id}",
                kubelet.runtime_name
            ),
        );
    };
    let (sender, receiver) = mpsc::channel(4);
    tokio::spawn(logs::stream(
        state,
        container.to_owned(),
        id,
        path,
        options,
        sender,
    ));
    let frames = futures::stream::unfold(receiver, |mut receiver| async move {
        let piece = receiver.recv().await?;
        Some((Ok(http_body::Frame::data(piece)), receiver))
    });
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    response.headers_mut().insert(
        "content-type",
        http::HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

/// The running instance of the container.
fn running(state: &PodState, container: &str) -> Option<String> {
    state
        .observed()
        .container(container)
        .filter(|c| c.state == ContainerState::Running)
        .map(|c| c.id.clone())
}

/// The streams a client wants, by the kubelet's names or the API's.
struct Streams {
    stdin: bool,
    stdout: bool,
    stderr: bool,
    tty: bool,
}

impl Streams {
    fn from_query(query: &[(String, String)]) -> Result<Self, String> {
        let on = |names: [&str; 2]| {
            query
                .iter()
                .any(|(n, v)| names.contains(&n.as_str()) && matches!(v.as_str(), "1" | "true"))
        };
        let tty = on(["tty", "tty"]);
        let streams = Streams {
            stdin: on(["input", "stdin"]),
            stdout: on(["output", "stdout"]),
            // A terminal has one output.
            stderr: on(["error", "stderr"]) && !tty,
            tty,
        };
        if !(streams.stdin || streams.stdout || streams.stderr) {
            return Err("you must specify at least 1 of stdin, stdout, stderr".to_owned());
        }
        Ok(streams)
    }
}

async fn exec(
    kubelet: &Kubelet,
    request: Request<Incoming>,
    namespace: &str,
    pod: &str,
    uid: Option<&str>,
    container: &str,
    query: &[(String, String)],
) -> Response<Body> {
    let streams = match Streams::from_query(query) {
        Ok(streams) => streams,
        Err(error) => return text(StatusCode::BAD_REQUEST, error),
    };
    let Some(state) = find(kubelet, namespace, pod, uid) else {
        return text(StatusCode::NOT_FOUND, "pod does not exist\n");
    };
    let Some(id) = running(&state, container) else {
        return text(
            StatusCode::NOT_FOUND,
            format!("container not found ({container:?})\n"),
        );
    };
    let cmd: Vec<String> = query
        .iter()
        .filter(|(n, _)| n == "command")
        .map(|(_, v)| v.clone())
        .collect();
    let Streams {
        stdin,
        stdout,
        stderr,
        tty,
    } = streams;
    match kubelet
        .runtime
        .exec_url(v1::ExecRequest {
            container_id: id,
            cmd,
            tty,
            stdin,
            stdout,
            stderr,
        })
        .await
    {
        Ok(url) => proxy(request, &url).await,
        Err(status) => text(StatusCode::INTERNAL_SERVER_ERROR, describe(&status)),
    }
}

async fn attach(
    kubelet: &Kubelet,
    request: Request<Incoming>,
    namespace: &str,
    pod: &str,
    uid: Option<&str>,
    container: &str,
    query: &[(String, String)],
) -> Response<Body> {
    let streams = match Streams::from_query(query) {
        Ok(streams) => streams,
        Err(error) => return text(StatusCode::BAD_REQUEST, error),
    };
    let Some(state) = find(kubelet, namespace, pod, uid) else {
        return text(StatusCode::NOT_FOUND, "pod does not exist\n");
    };
    let Some(id) = running(&state, container) else {
        return text(
            StatusCode::NOT_FOUND,
            format!("container {container} not found in pod {pod}_{namespace}\n"),
        );
    };
    // The container decides whether it has a terminal.
    let tty = pods::container(&state.pod(), container).and_then(|c| c.tty) == Some(true);
    let Streams {
        stdin,
        stdout,
        stderr,
        ..
    } = streams;
    match kubelet
        .runtime
        .attach_url(v1::AttachRequest {
            container_id: id,
            stdin,
            tty,
            stdout,
            stderr: stderr && !tty,
        })
        .await
    {
        Ok(url) => proxy(request, &url).await,
        Err(status) => text(StatusCode::INTERNAL_SERVER_ERROR, describe(&status)),
    }
}

async fn port_forward(
    kubelet: &Kubelet,
    request: Request<Incoming>,
    namespace: &str,
    pod: &str,
    uid: Option<&str>,
    query: &[(String, String)],
) -> Response<Body> {
    let mut ports = Vec::new();
    for (_, value) in query.iter().filter(|(n, _)| n == "port") {
        for port in value.split(',') {
            match port.parse::<u16>() {
                Ok(port) if port > 0 => ports.push(i32::from(port)),
                _ => {
                    return text(
                        StatusCode::BAD_REQUEST,
                        format!("unable to parse {port:?} as a port"),
                    );
                }
            }
        }
    }
    let Some(state) = find(kubelet, namespace, pod, uid) else {
        return text(StatusCode::NOT_FOUND, "pod does not exist\n");
    };
    let Some(sandbox) = state
        .observed()
        .sandboxes
        .iter()
        .find(|s| s.ready)
        .map(|s| s.id.clone())
    else {
        return text(StatusCode::NOT_FOUND, "pod not found\n");
    };
    match kubelet.runtime.port_forward_url(&sandbox, ports).await {
        Ok(url) => proxy(request, &url).await,
        Err(status) => text(StatusCode::INTERNAL_SERVER_ERROR, describe(&status)),
    }
}

/// Hands the connection to the runtime's streaming server at `url`.
async fn proxy(mut request: Request<Incoming>, url: &str) -> Response<Body> {
    let Ok(target) = url.parse::<http::Uri>() else {
        return text(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the runtime answered with a broken URL",
        );
    };
    let (Some(host), port) = (target.host(), target.port_u16().unwrap_or(80)) else {
        return text(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the runtime answered with a URL without a host",
        );
    };
    let address = (host.trim_matches(['[', ']']).to_owned(), port);
    let authority = target
        .authority()
        .map(|a| a.as_str().to_owned())
        .unwrap_or_default();
    let path = target.path_and_query().map_or("/", |p| p.as_str());
    match path.parse() {
        Ok(uri) => *request.uri_mut() = uri,
        Err(_) => {
            return text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "the runtime answered with a broken URL",
            );
        }
    }
    if let Ok(value) = http::HeaderValue::from_str(&authority) {
        request.headers_mut().insert("host", value);
    }
    skiff_streaming::proxy_upgrade(request, || async move { TcpStream::connect(address).await }).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_and_paths() {
        assert_eq!(decode("a%2Fb%20c+d%zz"), "a/b c+d%zz");
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(
            parse_query("command=sh&command=-c&command=echo+%24x&tty"),
            [
                pair("command", "sh"),
                pair("command", "-c"),
                pair("command", "echo $x"),
                pair("tty", "")
            ]
        );
    }

    #[test]
    fn streams() {
        let check = |query: &str, expected: Option<(bool, bool, bool, bool)>| {
            let found = Streams::from_query(&parse_query(query))
                .ok()
                .map(|s| (s.stdin, s.stdout, s.stderr, s.tty));
            assert_eq!(found, expected, "{query}");
        };
        check("input=1&output=1&error=1", Some((true, true, true, false)));
        check(
            "stdin=true&stdout=true&stderr=true&tty=true",
            Some((true, true, false, true)),
        );
        check("tty=1", None);
    }
}
