//! The HTTPS door: accepts connections, does the TLS handshake, and serves HTTP/1.1 and HTTP/2 on them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Version};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::pki_types::{CertificateDer, UnixTime};
use skiff_auth::Peer;
use skiff_pki::ClientAuthority;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::body::BoxError;
use crate::chain::Identity;
use crate::connections::{Answering, ConnectionSlot, Connections, Deadline, Limits};
use crate::cork::{AT_ONCE, Cork};
use crate::http1;
use crate::proxy::ClientAddress;
use crate::server::{ClientCertificates, Inner};
use crate::streams::Streams;

/// What the headers of one request may take. Upstream takes a mebibyte, but our HTTP library takes no address of more
/// than 64 KiB, and nothing else in a request is large.
const HEADERS: u32 = 256 * 1024;
/// Upstream's `--http2-max-streams-per-connection`.
const STREAMS: u32 = 100;
/// What a stream may have waiting in the HTTP/2 layer before its body is asked for more.
const SEND_BUFFER: usize = 64 * 1024;
/// How often the kernel asks whether the other side is still there.
const KEEP_ALIVE: Duration = Duration::from_secs(180);

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
    limits: Limits,
    shutdown: CancellationToken,
) {
    let acceptor = TlsAcceptor::from(tls);
    let drain = limits.drain;
    let connections = Connections::new(limits);
    let tasks = TaskTracker::new();
    let accepting = async {
        loop {
            let (stream, address) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors, mostly: waiting is all that helps.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let place = connections.place().await;
            let (inner, acceptor, shutdown) = (inner.clone(), acceptor.clone(), shutdown.clone());
            let limits = connections.limits().clone();
            tasks.spawn(async move {
                let served = connection(inner, acceptor, stream, address, &place, &limits, shutdown);
                if let Err(error) = served.await {
                    tracing::debug!(%error, "a connection ended");
                }
            });
        }
    };
    tokio::select! {
        () = accepting => {}
        () = connections.sweep() => {}
        () = shutdown.cancelled() => {}
    }
    drop(listener);
    tasks.close();
    if tokio::time::timeout(drain, tasks.wait()).await.is_err() {
        tracing::debug!("some connections did not end in time");
    }
}

async fn connection(
    inner: Arc<Inner>,
    acceptor: TlsAcceptor,
    stream: TcpStream,
    address: SocketAddr,
    place: &ConnectionSlot,
    limits: &Limits,
    shutdown: CancellationToken,
) -> Result<(), BoxError> {
    stream.set_nodelay(true)?;
    let keep_alive = socket2::TcpKeepalive::new().with_time(KEEP_ALIVE);
    socket2::SockRef::from(&stream).set_tcp_keepalive(&keep_alive)?;
    let usage = place.usage.clone();
    let end = usage.end.clone();
    let mut stream = tokio::select! {
        accepted = tokio::time::timeout(limits.handshake, acceptor.accept(stream)) => accepted??,
        () = end.cancelled() => return Ok(()),
    };
    stream.get_mut().1.set_buffer_limit(Some(AT_ONCE));
    let peer = inner.authorities.peer(stream.get_ref().1.peer_certificates());
    let sending = usage.clone();
    let stream = Cork::new(stream).telling(move |stuck| sending.stuck(stuck));
    let streams = Streams::default();
    let announced = streams.clone();
    let answer = limits.answer;
    let service = service_fn(move |request: Request<Incoming>| {
        let deadline = Arc::new(Deadline::new(answer));
        let busy = usage.request(&deadline, request.version() < Version::HTTP_2);
        announced.announce(&request, &deadline);
        let inner = inner.clone();
        let peer = peer.as_ref().and_then(|peer| inner.authorities.still(peer));
        // In a box of its own, so that it does not take room for as long as the answer is being sent.
        Box::pin(async move {
            let (method, uri, headers) = (request.method(), request.uri(), request.headers());
            if let Some(answer) = http1::refused(method, uri, request.version(), headers) {
                return Ok(answer.map(|body| Answering::new(body, busy)));
            }
            let mut request = request.map(|body| body.map_err(BoxError::from).boxed_unsync());
            request.extensions_mut().insert(ClientAddress(address));
            request.extensions_mut().insert(deadline);
            let answer = inner.handle(request, Identity::Peer(peer)).await;
            Ok::<_, Infallible>(answer.map(|body| Answering::new(body, busy)))
        })
    });
    let mut builder = auto::Builder::new(streams.clone());
    builder
        .http1()
        .timer(TokioTimer::new())
        // COMPAT: Go's spelling, for who compares the names of headers letter by letter.
        .title_case_headers(true)
        .header_read_timeout(limits.headers)
        .half_close(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .max_send_buf_size(SEND_BUFFER)
        .max_header_list_size(HEADERS)
        .keep_alive_interval(Some(Duration::from_secs(30)));
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream.clone()), service);
    let drain = limits.drain;
    let served = async move {
        let mut connection = std::pin::pin!(connection);
        let over = tokio::select! {
            result = connection.as_mut() => return result,
            () = shutdown.cancelled() => false,
            () = end.cancelled() => true,
        };
        connection.as_mut().graceful_shutdown();
        if !over {
            return connection.await;
        }
        tokio::time::timeout(drain, connection)
            .await
            .unwrap_or_else(|_| Err("the client did not take what was sent to it".into()))
    };
    stream.run(streams.drive(served)).await
}
