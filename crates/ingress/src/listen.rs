//! The doors: one for HTTP, one for HTTPS. Accepts connections, does the TLS handshake, and serves HTTP/1.1 and HTTP/2.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::body::{BoxError, Stall};
use crate::connections::{Connections, IDLE, Refused, Slot};
use crate::forward::{Connection, Proxy};
use crate::guard::{Guard, MAX_HEAD};
use crate::headers::Client;
use crate::metrics::Refusal;
use crate::stall::{Impatient, Streams};

const BACKLOG: i32 = 4096;
const HANDSHAKE: Duration = Duration::from_secs(10);
/// From the last response to the end of the next request's head (HTTP/1.1).
const HEAD: Duration = Duration::from_secs(60);
const MAX_HEADERS: usize = 100;
const MAX_STREAMS: u32 = 128;
/// What a stream may have waiting before its body is asked for more.
const SEND_BUFFER: usize = 64 * 1024;
const KEEP_ALIVE: Duration = Duration::from_secs(60);

/// A listener on all addresses of both families, or of IPv4 alone where there is no IPv6.
pub fn bind(port: u16) -> io::Result<TcpListener> {
    let listen = |domain: Domain, address: SocketAddr| {
        let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
        if domain == Domain::IPV6 {
            socket.set_only_v6(false)?;
        }
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    match listen(Domain::IPV6, (Ipv6Addr::UNSPECIFIED, port).into()) {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
            listen(Domain::IPV4, (Ipv4Addr::UNSPECIFIED, port).into())
        }
        listening => listening,
    }
}

/// One listener.
pub struct Door {
    pub proxy: Arc<Proxy>,
    pub connections: Arc<Connections>,
    pub listener: TcpListener,
    pub tls: Option<TlsAcceptor>,
    /// What runs when the door is closed.
    pub tasks: TaskTracker,
}

impl Door {
    /// Accepts until `stop`; connections are asked to end then, and their requests are finished.
    pub async fn serve(self, stop: CancellationToken) {
        let port = self.listener.local_addr().map_or(0, |address| address.port());
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = stop.cancelled() => return,
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
            let slot = match self.connections.admit(address.ip()) {
                Ok(slot) => slot,
                Err(why) => {
                    self.proxy.metrics.refused(match why {
                        Refused::TooMany => Refusal::Connections,
                        Refused::TooManyOfClient => Refusal::ClientConnections,
                    });
                    continue;
                }
            };
            let client = Client {
                address: address.ip(),
                tls: self.tls.is_some(),
                port,
            };
            let (proxy, tls, stop) = (self.proxy.clone(), self.tls.clone(), stop.clone());
            self.tasks.spawn(async move {
                if let Err(error) = serve(proxy, stream, tls, client, slot, stop).await {
                    tracing::debug!(%error, %address, "a connection ended");
                }
            });
        }
    }
}

async fn serve(
    proxy: Arc<Proxy>,
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    client: Client,
    slot: Slot,
    stop: CancellationToken,
) -> Result<(), BoxError> {
    let counted = proxy.metrics.connected(client.tls);
    stream.set_nodelay(true)?;
    SockRef::from(&stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEP_ALIVE))?;
    let connection = |upgrade| {
        Arc::new(Connection {
            proxy: proxy.clone(),
            client,
            slot,
            upgrade,
            _counted: counted,
        })
    };
    let Some(acceptor) = tls else {
        let (io, upgrade) = Guard::new(Impatient::new(stream));
        return http1(io, connection(Some(upgrade)), stop).await;
    };
    let accepted = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await;
    let stream = match accepted {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            proxy.metrics.refused(Refusal::Handshake);
            return Err(error.into());
        }
        Err(late) => {
            proxy.metrics.refused(Refusal::Handshake);
            return Err(late.into());
        }
    };
    match stream.get_ref().1.alpn_protocol() {
        Some(b"h2") => http2(Impatient::new(stream), connection(None), stop).await,
        _ => {
            let (io, upgrade) = Guard::new(Impatient::new(stream));
            http1(io, connection(Some(upgrade)), stop).await
        }
    }
}

async fn http1<T>(io: T, connection: Arc<Connection>, stop: CancellationToken) -> Result<(), BoxError>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let end = connection.slot.usage.end.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let connection = connection.clone();
        async move { Ok::<_, Infallible>(connection.answer(request, Stall::default()).await) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_headers(MAX_HEADERS)
        .max_header_size(MAX_HEAD)
        .max_buf_size(2 * MAX_HEAD);
    let serving = builder
        .serve_connection(TokioIo::new(io), service)
        .with_upgrades();
    let mut serving = std::pin::pin!(serving);
    tokio::select! {
        served = serving.as_mut() => return served.map_err(Into::into),
        () = stop.cancelled() => {}
        () = end.cancelled() => {}
    }
    serving.as_mut().graceful_shutdown();
    serving.await.map_err(Into::into)
}

async fn http2<T>(io: T, connection: Arc<Connection>, stop: CancellationToken) -> Result<(), BoxError>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let usage = connection.slot.usage.clone();
    let streams = Streams::default();
    let announced = streams.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let stall = Stall::default();
        announced.announce(stall.clone());
        let connection = connection.clone();
        async move { Ok::<_, Infallible>(connection.answer(request, stall).await) }
    });
    let mut builder = http2::Builder::new(streams);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_send_buf_size(SEND_BUFFER)
        .max_header_list_size(MAX_HEAD as u32)
        .keep_alive_interval(Some(Duration::from_secs(30)));
    let serving = builder.serve_connection(TokioIo::new(io), service);
    let mut serving = std::pin::pin!(serving);
    let idle = async {
        loop {
            tokio::time::sleep(IDLE / 4).await;
            if usage.is_idle_for(IDLE) {
                return;
            }
        }
    };
    tokio::select! {
        served = serving.as_mut() => return served.map_err(Into::into),
        () = stop.cancelled() => {}
        () = usage.end.cancelled() => {}
        () = idle => {}
    }
    serving.as_mut().graceful_shutdown();
    serving.await.map_err(Into::into)
}
