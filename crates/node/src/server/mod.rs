//! The node's HTTPS server, which the API server calls for logs, exec, attach and port-forward, and which collectors
//! read metrics from. Streams are passed on to the runtime; nothing here runs anything itself. Anybody on the network
//! can connect, so what comes before a client is known is bounded.

mod auth;
mod cadvisor;
mod cadvisor_cgroups;
mod debug;
mod healthz;
mod idle;
pub mod log_file;
mod logs;
mod node_stats;
mod page;
mod query;
mod resource_metrics;
mod stats;
mod streams;
mod summary;
mod system;
mod system_containers;
mod volume_metrics;
mod volumes;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use k8s_openapi::jiff::Timestamp;
use skiff_streaming::Body;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::config::NodeConfig;
use crate::configuration::effective;
use crate::kubelet::Kubelet;
use crate::marks;
use crate::pod_state::PodState;
use crate::pods;
pub use healthz::serve_healthz;

use auth::{ApiReviewer, Auth, Identity, Refused};
use log_file::LogOptions;
use query::{decode, parse_query};
use stats::Rates;
pub use stats::{PodUsage, now_nanos, number};
use streams::{attach, exec, port_forward};

/// How long a client may take to say who it is.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the head of a request may take, and the pause before it.
const HEADER_TIMEOUT: Duration = Duration::from_secs(90);
/// Connections whose client is not known yet; more wait in the kernel's queue.
const MAX_HANDSHAKES: usize = 256;

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
    let builder = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| tls(&e))?
        .with_client_cert_verifier(verifier);
    let mut server = match &config.tls_resolver {
        Some(resolver) => builder.with_cert_resolver(resolver.clone()),
        None => {
            let certificates: Vec<_> = rustls_pemfile::certs(&mut config.tls_cert_pem.as_slice())
                .collect::<Result<_, _>>()
                .map_err(|e| tls(&e))?;
            let key = rustls_pemfile::private_key(&mut config.tls_key_pem.as_slice())
                .map_err(|e| tls(&e))?
                .ok_or_else(|| tls(&"no private key"))?;
            builder.with_single_cert(certificates, key).map_err(|e| tls(&e))?
        }
    };
    server.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(server))
}

/// What the connections share.
struct Shared {
    kubelet: Arc<Kubelet>,
    auth: Auth,
    rates: Rates,
}

pub async fn serve(kubelet: Arc<Kubelet>, listener: TcpListener, tls: Arc<rustls::ServerConfig>) {
    let acceptor = tokio_rustls::TlsAcceptor::from(tls);
    let reviewer = ApiReviewer {
        client: kubelet.client.clone(),
        node_name: kubelet.config.node_name.clone(),
    };
    let shared = Arc::new(Shared {
        kubelet: kubelet.clone(),
        auth: Auth::new(reviewer),
        rates: Rates::default(),
    });
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        let Ok(turn) = handshakes.clone().acquire_owned().await else {
            return;
        };
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
        tokio::spawn(connection(shared.clone(), acceptor.clone(), stream, turn));
    }
}

async fn connection(
    shared: Arc<Shared>,
    acceptor: tokio_rustls::TlsAcceptor,
    stream: TcpStream,
    turn: OwnedSemaphorePermit,
) {
    let _ = stream.set_nodelay(true);
    let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await else {
        return;
    };
    drop(turn);
    let identity = stream
        .get_ref()
        .1
        .peer_certificates()
        .and_then(|chain| auth::identity(chain.first()?));
    let shutdown = shared.kubelet.shutdown.clone();
    let service = hyper::service::service_fn(move |request| {
        let (shared, identity) = (shared.clone(), identity.clone());
        async move { Ok::<_, Infallible>(handle(shared, identity, request).await) }
    });
    let mut builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new()).http1_only();
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT);
    let served = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::select! {
        () = shutdown.cancelled() => {}
        _ = served => {}
    }
}

fn text(status: StatusCode, message: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Full::new(message.into()).map_err(|e| match e {}).boxed_unsync());
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
    shared: Arc<Shared>,
    certificate: Option<Identity>,
    request: Request<Incoming>,
) -> Response<Body> {
    let kubelet = &shared.kubelet;
    let path = request.uri().path().to_owned();
    let parts: Vec<String> = path.split('/').filter(|p| !p.is_empty()).map(decode).collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let checked = shared
        .auth
        .check(certificate.as_ref(), request.method(), request.headers(), &parts)
        .await;
    if let Err(Refused(code, message)) = checked {
        return text(code, message);
    }
    let query = parse_query(request.uri().query().unwrap_or_default());
    match parts.as_slice() {
        ["healthz"] => text(StatusCode::OK, "ok"),
        ["pods"] => pod_list(kubelet),
        ["statusz"] => debug::statusz(kubelet),
        ["flagz"] => debug::flagz(kubelet),
        ["run", namespace, pod, container] if request.method() == Method::POST => {
            debug::run(kubelet, (namespace, pod, None), container, &query).await
        }
        ["run", namespace, pod, uid, container] if request.method() == Method::POST => {
            debug::run(kubelet, (namespace, pod, Some(uid)), container, &query).await
        }
        ["checkpoint", namespace, pod, container] if request.method() == Method::POST => {
            debug::checkpoint(kubelet, (namespace, pod), container, &query).await
        }
        ["configz"] => json(&serde_json::json!({
            "kubeletconfig": effective(&kubelet.config, kubelet.server_port)
        })),
        ["runningpods"] => system::running_pods(kubelet).await,
        ["logs", rest @ ..] if request.method() == Method::GET => {
            system::machine_logs(&rest.join("/"), &path).await
        }
        // For `skiff trace`, which puts what it is told by several machines on one clock.
        ["skiff", "clock"] => text(StatusCode::OK, marks::now_us().to_string()),
        ["skiff", "volumes", name @ ..] => {
            volumes::serve(kubelet.config.volume_folder(), request.method(), name, &query).await
        }
        ["stats", "summary"] => summary::serve(kubelet, &shared.rates, &query).await,
        ["metrics"] => {
            let volumes = volume_metrics::text(kubelet);
            page::answer(kubelet.metrics.registry.text() + &volumes)
        }
        ["metrics", "cadvisor"] => cadvisor::serve(kubelet).await,
        ["metrics", "probes"] => page::answer(kubelet.metrics.probes.text()),
        ["metrics", "resource"] => resource_metrics::serve(kubelet).await,
        ["containerLogs", namespace, pod, container] => {
            container_logs(kubelet, namespace, pod, container, &query)
        }
        ["exec", namespace, pod, container] => {
            exec(kubelet, request, namespace, pod, None, container, &query).await
        }
        ["exec", namespace, pod, uid, container] => {
            exec(kubelet, request, namespace, pod, Some(uid), container, &query).await
        }
        ["attach", namespace, pod, container] => {
            attach(kubelet, request, namespace, pod, None, container, &query).await
        }
        ["attach", namespace, pod, uid, container] => {
            attach(kubelet, request, namespace, pod, Some(uid), container, &query).await
        }
        ["portForward", namespace, pod] => port_forward(kubelet, request, namespace, pod, None, &query).await,
        ["portForward", namespace, pod, uid] => {
            port_forward(kubelet, request, namespace, pod, Some(uid), &query).await
        }
        _ => text(StatusCode::NOT_FOUND, "404 page not found\n"),
    }
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
