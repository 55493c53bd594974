//! `/healthz` without TLS, for whoever watches over the kubelet on this machine: systemd, kubeadm, monitoring.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use skiff_streaming::Body;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::{HEADER_TIMEOUT, text};

const MAX_CONNECTIONS: usize = 64;
/// What is left open is closed.
const CONNECTION_TIME: Duration = Duration::from_secs(60);
/// Upstream's.
const RETRY: Duration = Duration::from_secs(5);

/// An address that is taken is tried again: the node runs without.
pub async fn serve_healthz(address: SocketAddr, shutdown: CancellationToken) {
    let mut is_told = false;
    let serve = async {
        loop {
            match TcpListener::bind(address).await {
                Ok(listener) => accept(&listener).await,
                Err(error) if !std::mem::replace(&mut is_told, true) => {
                    tracing::warn!(%error, %address, "cannot start the healthz server; trying again");
                }
                Err(_) => {}
            }
            tokio::time::sleep(RETRY).await;
        }
    };
    shutdown.run_until_cancelled(serve).await;
}

async fn accept(listener: &TcpListener) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(slot) = slots.clone().acquire_owned().await {
        let Ok((stream, _)) = listener.accept().await else {
            return;
        };
        tokio::spawn(async move {
            let _ = tokio::time::timeout(CONNECTION_TIME, connection(stream)).await;
            drop(slot);
        });
    }
}

async fn connection(stream: TcpStream) {
    let service = hyper::service::service_fn(async |request| Ok::<_, Infallible>(answer(&request)));
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT);
    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
}

fn answer(request: &Request<Incoming>) -> Response<Body> {
    match request.uri().path() {
        "/healthz" | "/healthz/" | "/healthz/ping" => text(StatusCode::OK, "ok"),
        _ => text(StatusCode::NOT_FOUND, "404 page not found\n"),
    }
}
