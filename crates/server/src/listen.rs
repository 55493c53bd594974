//! The HTTPS door: accepts connections, does the TLS handshake, and serves HTTP/1.1 and HTTP/2 on them.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::body::BoxError;
use crate::chain::Identity;
use crate::server::Inner;

/// Connections beyond this wait in the kernel's queue.
const CONNECTIONS: usize = 4096;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
const HEADER_LIMIT: Duration = Duration::from_secs(32);
/// Upstream's `--http2-max-streams-per-connection`.
const STREAMS: u32 = 1000;
/// How long open requests may take after the end was called.
const DRAIN: Duration = Duration::from_secs(2);

pub async fn serve(
    inner: Arc<Inner>,
    tls: Arc<rustls::ServerConfig>,
    listener: TcpListener,
    shutdown: CancellationToken,
) {
    let acceptor = TlsAcceptor::from(tls);
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let connections = TaskTracker::new();
    loop {
        let permit = tokio::select! {
            permit = Arc::clone(&room).acquire_owned() => permit,
            () = shutdown.cancelled() => break,
        };
        let Ok(permit) = permit else { break };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.cancelled() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, mostly: waiting is all that helps.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let (inner, acceptor, shutdown) = (inner.clone(), acceptor.clone(), shutdown.clone());
        connections.spawn(async move {
            let _permit = permit;
            if let Err(error) = connection(inner, acceptor, stream, shutdown).await {
                tracing::debug!(%error, "a connection ended");
            }
        });
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(DRAIN, connections.wait()).await.is_err() {
        tracing::debug!("some connections did not end in time");
    }
}

async fn connection(
    inner: Arc<Inner>,
    acceptor: TlsAcceptor,
    stream: TcpStream,
    shutdown: CancellationToken,
) -> Result<(), BoxError> {
    stream.set_nodelay(true)?;
    let stream = tokio::time::timeout(HANDSHAKE_LIMIT, acceptor.accept(stream)).await??;
    let certificates = stream.get_ref().1.peer_certificates().map(|list| {
        Arc::new(
            list.iter()
                .map(|certificate| certificate.clone().into_owned())
                .collect::<Vec<_>>(),
        )
    });
    let service = service_fn(move |request: Request<Incoming>| {
        let (inner, certificates) = (inner.clone(), certificates.clone());
        async move {
            let request = request.map(|body| body.map_err(BoxError::from).boxed_unsync());
            Ok::<_, Infallible>(inner.handle(request, Identity::Peer(certificates)).await)
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_LIMIT)
        .half_close(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .keep_alive_interval(Some(Duration::from_secs(30)));
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        result = connection.as_mut() => return result,
        () = shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}
