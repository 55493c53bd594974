//! The HTTPS door: accepts connections, does the TLS handshake, and serves HTTP/1.1 and HTTP/2 on them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::pki_types::{CertificateDer, UnixTime};
use skiff_auth::Peer;
use skiff_pki::ClientAuthority;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::body::BoxError;
use crate::chain::Identity;
use crate::cork::Cork;
use crate::proxy::ClientAddress;
use crate::server::{ClientCertificates, Inner};
use crate::streams::Streams;

/// Connections beyond this wait in the kernel's queue.
const CONNECTIONS: usize = 4096;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
const HEADER_LIMIT: Duration = Duration::from_secs(32);
/// What the headers of one request may take. Upstream takes a mebibyte, but our HTTP library takes no address of more
/// than 64 KiB, and nothing else in a request is large.
const HEADERS: u32 = 256 * 1024;
/// Upstream's `--http2-max-streams-per-connection`.
const STREAMS: u32 = 1000;
/// What a stream may have waiting in the HTTP/2 layer before its body is asked for more.
const SEND_BUFFER: usize = 64 * 1024;
/// How long open requests may take after the end was called.
const DRAIN: Duration = Duration::from_secs(2);

/// Who may have signed a client's certificate.
#[derive(Default)]
pub struct Authorities {
    client: Option<ClientAuthority>,
    front_proxy: Option<ClientAuthority>,
}

impl Authorities {
    pub fn new(certificates: Option<&ClientCertificates>) -> Result<Authorities, skiff_pki::Error> {
        let Some(certificates) = certificates else {
            return Ok(Authorities::default());
        };
        let proxy = certificates.front_proxy.as_ref();
        Ok(Authorities {
            client: Some(ClientAuthority::new(&certificates.client_ca)?),
            front_proxy: proxy.map(|proxy| ClientAuthority::new(&proxy.ca)).transpose()?,
        })
    }

    /// Whose the certificates of a connection are. Without authorities they mean nothing.
    fn peer(&self, shown: Option<&[CertificateDer<'_>]>) -> Option<Arc<Peer>> {
        let shown = shown.filter(|list| !list.is_empty())?;
        let client = self.client.as_ref()?;
        let now = UnixTime::now();
        let of_client_ca = client.verify(shown, now).map_err(|error| error.to_string());
        let proxies = self.front_proxy.as_ref();
        let of_front_proxy_ca = proxies.is_some_and(|authority| authority.verify(shown, now).is_ok());
        let certificates = shown.iter().map(|shown| shown.clone().into_owned()).collect();
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        Some(Arc::new(Peer::new(
            certificates,
            of_client_ca,
            of_front_proxy_ca,
            now,
        )))
    }

    /// The peer as it is now: certificates expire while a connection is open.
    fn still(&self, peer: &Arc<Peer>) -> Option<Arc<Peer>> {
        if (UnixTime::now().as_secs() as i64) < peer.until {
            return Some(peer.clone());
        }
        self.peer(Some(&peer.certificates))
    }
}

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
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
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
            if let Err(error) = connection(inner, acceptor, stream, address, shutdown).await {
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
    address: SocketAddr,
    shutdown: CancellationToken,
) -> Result<(), BoxError> {
    stream.set_nodelay(true)?;
    let stream = tokio::time::timeout(HANDSHAKE_LIMIT, acceptor.accept(stream)).await??;
    let peer = inner.authorities.peer(stream.get_ref().1.peer_certificates());
    let stream = Cork::new(stream);
    let streams = Streams::default();
    let announced = streams.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        announced.announce(&request);
        let inner = inner.clone();
        let peer = peer.as_ref().and_then(|peer| inner.authorities.still(peer));
        // In a box of its own, so that it does not take room for as long as the answer is being sent.
        Box::pin(async move {
            let mut request = request.map(|body| body.map_err(BoxError::from).boxed_unsync());
            request.extensions_mut().insert(ClientAddress(address));
            Ok::<_, Infallible>(inner.handle(request, Identity::Peer(peer)).await)
        })
    });
    let mut builder = auto::Builder::new(streams.clone());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_LIMIT)
        .half_close(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .max_send_buf_size(SEND_BUFFER)
        .max_header_list_size(HEADERS)
        .keep_alive_interval(Some(Duration::from_secs(30)));
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream.clone()), service);
    let served = async move {
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            result = connection.as_mut() => return result,
            () = shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        connection.await
    };
    stream.run(streams.drive(served)).await
}
