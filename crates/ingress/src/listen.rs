//! The doors, one for each port. Accepts connections, does the TLS handshake, and serves HTTP/1.1 and HTTP/2, or passes
//! the bytes on.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::body::{BoxError, Stall};
use crate::connections::{Connections, IDLE, Refused, Slot};
use crate::forward::{Connection, Proxy};
use crate::gateway::hosts::Host;
use crate::gateway::table::{GatewayTable, ListenAddress, SecureListener};
use crate::guard::{Guard, MAX_HEAD};
use crate::headers::Client;
use crate::hello::{self, Prefixed};
use crate::metrics::Refusal;
use crate::stall::{Impatient, Streams};
use crate::tcp;
use crate::workers::Workers;

const BACKLOG: i32 = 4096;
const HANDSHAKE: Duration = Duration::from_secs(10);
/// From the last response to the end of the next request's head (HTTP/1.1).
const HEAD: Duration = Duration::from_secs(60);
const MAX_HEADERS: usize = 100;
const MAX_STREAMS: u32 = 128;
/// What a stream may have waiting before its body is asked for more.
const SEND_BUFFER: usize = 64 * 1024;
const KEEP_ALIVE: Duration = Duration::from_secs(60);
/// A connection that is asked to end and has no request is closed after this.
const LINGER: Duration = Duration::from_secs(2);
/// How HTTP/2 begins where it was not agreed on in TLS.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How TLS begins.
const TLS_HANDSHAKE: u8 = 0x16;

/// A listener on all addresses of both families, or of IPv4 alone where there is no IPv6.
pub fn bind(port: u16) -> io::Result<std::net::TcpListener> {
    let listen = |domain: Domain, address: SocketAddr| -> io::Result<std::net::TcpListener> {
        let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
        if domain == Domain::IPV6 {
            socket.set_only_v6(false)?;
        }
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
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
    pub workers: Arc<Workers>,
    pub connections: Arc<Connections>,
    pub listener: TcpListener,
    /// What listeners of Gateways call the port.
    pub port: u16,
    /// What Ingresses have here.
    pub ingress: Ingresses,
    pub tasks: Tasks,
}

/// The connections of all doors.
#[derive(Clone, Default)]
pub struct Tasks {
    pub early: TaskTracker,
    /// Those that came when others were asked to end already.
    pub late: TaskTracker,
}

/// How a door ends.
#[derive(Clone, Default)]
pub struct Ending {
    /// Connections are asked to end, after the request that they have or get next.
    pub drain: CancellationToken,
    /// No more are accepted.
    pub close: CancellationToken,
}

/// What Ingresses have at a door.
#[derive(Clone)]
pub enum Ingresses {
    None,
    Http,
    Https(TlsAcceptor),
}

impl Door {
    /// Accepts until it is closed.
    pub async fn serve(self, Ending { drain, close }: Ending) {
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = close.cancelled() => return,
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
            let arrived = Arrived {
                proxy: self.proxy.clone(),
                ingress: self.ingress.clone(),
                port: self.port,
                client: address.ip(),
                slot,
                drain: drain.clone(),
            };
            let tasks = match drain.is_cancelled() {
                false => &self.tasks.early,
                true => &self.tasks.late,
            };
            // The thread's own runtime has to wait for what comes.
            let (Ok(stream), Some((runtime, place))) = (stream.into_std(), self.workers.next()) else {
                continue;
            };
            let serving = async move {
                let _place = place;
                if let Err(error) = arrived.serve(TcpStream::from_std(stream)?).await {
                    tracing::debug!(%error, %address, "a connection ended");
                }
                Ok::<_, io::Error>(())
            };
            tasks.spawn_on(serving, runtime);
        }
    }
}

/// A connection of which nothing was read yet.
struct Arrived {
    proxy: Arc<Proxy>,
    ingress: Ingresses,
    port: u16,
    client: IpAddr,
    slot: Slot,
    drain: CancellationToken,
}

/// How it goes on.
enum Start {
    Plain,
    /// By Ingresses alone.
    Ingress(TlsAcceptor),
    /// By the name that the client asks for.
    Secure(Option<TlsAcceptor>),
}

impl Arrived {
    async fn serve(self, stream: TcpStream) -> Result<(), BoxError> {
        stream.set_nodelay(true)?;
        SockRef::from(&stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEP_ALIVE))?;
        let local = stream.local_addr()?;
        let gateways = self.proxy.gateways.load_full();
        let socket = gateways.socket(local.ip(), self.port);
        let port = gateways.port(socket);
        // An address of one Gateway's own is nobody else's.
        let ingress = match socket.address {
            None => self.ingress.clone(),
            Some(_) => Ingresses::None,
        };
        // HTTP/2 without TLS is for gRPC at listeners of Gateways; Ingresses never had it.
        let may_be_http2 = port.is_some_and(|port| !port.plain.is_empty());
        let has_plain = may_be_http2 || matches!(ingress, Ingresses::Http);
        let has_secure = port.is_some_and(|port| !port.secure.is_empty());
        let start = match (has_plain, has_secure, ingress) {
            (false, false, Ingresses::Https(acceptor)) => Start::Ingress(acceptor),
            (false, false, _) => return Ok(()),
            (true, false, Ingresses::None | Ingresses::Http) => Start::Plain,
            (false, true, Ingresses::Https(acceptor)) => Start::Secure(Some(acceptor)),
            (false, true, _) => Start::Secure(None),
            // Both: the first byte tells.
            (true, has_secure, ingress) => {
                let first = tokio::select! {
                    first = first_bytes(&stream, 1) => first?,
                    () = self.ended() => return Ok(()),
                };
                match (first.first() == Some(&TLS_HANDSHAKE), ingress) {
                    (false, _) => Start::Plain,
                    (true, Ingresses::Https(acceptor)) if !has_secure => Start::Ingress(acceptor),
                    (true, Ingresses::Https(acceptor)) => Start::Secure(Some(acceptor)),
                    (true, _) => Start::Secure(None),
                }
            }
        };
        let is_ingress = socket.address.is_none();
        match start {
            Start::Plain => {
                let is_ingress = is_ingress && matches!(self.ingress, Ingresses::Http);
                let is_http2 = may_be_http2
                    && tokio::select! {
                        first = first_bytes(&stream, HTTP2_PREFACE.len()) => first? == HTTP2_PREFACE,
                        () = self.ended() => return Ok(()),
                    };
                self.http(stream, local.port(), false, is_http2, socket, None, is_ingress)
                    .await
            }
            Start::Ingress(acceptor) => {
                self.https(stream, local.port(), acceptor, socket, None, true)
                    .await
            }
            Start::Secure(fallback) => {
                self.secure(stream, local.port(), socket, &gateways, fallback)
                    .await
            }
        }
    }

    /// Until a connection that has said nothing yet is closed.
    async fn ended(&self) {
        let drained = async {
            self.drain.cancelled().await;
            tokio::time::sleep(LINGER).await;
        };
        tokio::select! {
            () = drained => {}
            () = self.slot.usage.end.cancelled() => {}
        }
    }

    /// Reads the name that the client asks for, and does what the listener of that name is for.
    async fn secure(
        self,
        mut stream: TcpStream,
        local: u16,
        socket: ListenAddress,
        gateways: &GatewayTable,
        fallback: Option<TlsAcceptor>,
    ) -> Result<(), BoxError> {
        let hello = match tokio::time::timeout(HANDSHAKE, hello::read(&mut stream)).await {
            Ok(Ok(hello)) => hello,
            Ok(Err(error)) => {
                self.proxy.metrics.refused(Refusal::Handshake);
                return Err(error.into());
            }
            Err(late) => {
                self.proxy.metrics.refused(Refusal::Handshake);
                return Err(late.into());
            }
        };
        let name = hello.name.as_deref().unwrap_or_default();
        let stream = Prefixed::new(hello.bytes, stream);
        let found = gateways.port(socket).and_then(|port| port.secure.get(name));
        match (found, fallback) {
            (Some((host, SecureListener::Http { config, .. })), _) => {
                let acceptor = TlsAcceptor::from(config.clone());
                self.https(stream, local, acceptor, socket, Some(host), false)
                    .await
            }
            (Some((_, SecureListener::Tcp { config, routes })), _) => {
                let rule = routes.get(name).map(|(_, rule)| rule);
                let chosen = rule.and_then(|rule| rule.choose(rand::random()));
                let backend = chosen.and_then(|chosen| chosen.backend.clone());
                let _counted = self.proxy.metrics.connected(true);
                let _in_use = self.slot.usage.request();
                match config {
                    None => tcp::pass(&self.proxy, stream, backend).await,
                    Some(config) => {
                        let acceptor = TlsAcceptor::from(config.clone());
                        let stream = handshake(&self.proxy, acceptor, stream).await?;
                        tcp::pass(&self.proxy, stream, backend).await
                    }
                }
            }
            (None, Some(acceptor)) => self.https(stream, local, acceptor, socket, None, true).await,
            (None, None) => {
                self.proxy.metrics.refused(Refusal::Handshake);
                Err("no listener has the name".into())
            }
        }
    }

    async fn https<T>(
        self,
        stream: T,
        local: u16,
        acceptor: TlsAcceptor,
        socket: ListenAddress,
        listener: Option<Host>,
        is_ingress: bool,
    ) -> Result<(), BoxError>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let stream = handshake(&self.proxy, acceptor, stream).await?;
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        // Ingresses know no listeners, so that nothing of a Gateway is found.
        let socket = match is_ingress {
            true => ListenAddress { port: 0, ..socket },
            false => socket,
        };
        self.http(stream, local, true, is_http2, socket, listener, is_ingress)
            .await
    }

    #[allow(clippy::too_many_arguments)]
    async fn http<T>(
        self,
        stream: T,
        local: u16,
        tls: bool,
        is_http2: bool,
        socket: ListenAddress,
        listener: Option<Host>,
        is_ingress: bool,
    ) -> Result<(), BoxError>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let counted = self.proxy.metrics.connected(tls);
        let client = Client {
            address: self.client,
            tls,
            port: local,
        };
        let connection = |upgrade| {
            Arc::new(Connection {
                proxy: self.proxy,
                client,
                socket,
                listener,
                is_ingress,
                slot: self.slot,
                upgrade,
                closing: AtomicBool::new(false),
                _counted: counted,
            })
        };
        if is_http2 {
            return http2(Impatient::new(stream), connection(None), self.drain).await;
        }
        let (io, upgrade) = Guard::new(Impatient::new(stream));
        http1(io, connection(Some(upgrade)), self.drain).await
    }
}

async fn handshake<T>(proxy: &Proxy, acceptor: TlsAcceptor, stream: T) -> Result<TlsStream<T>, BoxError>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let accepted = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await;
    let accepted = accepted
        .map_err(BoxError::from)
        .and_then(|done| done.map_err(Into::into));
    accepted.inspect_err(|_| proxy.metrics.refused(Refusal::Handshake))
}

/// Looks at the first bytes and leaves them where they are: as many as are asked for, or fewer if they are no longer
/// the beginning of HTTP/2.
async fn first_bytes(stream: &TcpStream, count: usize) -> io::Result<Vec<u8>> {
    let looking = async {
        let mut buffer = vec![0; count];
        loop {
            let seen = stream.peek(&mut buffer).await?;
            if seen == count || seen == 0 || !HTTP2_PREFACE.starts_with(&buffer[..seen]) {
                buffer.truncate(seen);
                return Ok(buffer);
            }
            // The rest is on its way.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    match tokio::time::timeout(HEAD, looking).await {
        Ok(seen) => seen,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

async fn http1<T>(io: T, connection: Arc<Connection>, drain: CancellationToken) -> Result<(), BoxError>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let end = connection.slot.usage.end.clone();
    let asked = connection.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let connection = connection.clone();
        async move { Ok::<_, Infallible>(connection.answer(request, None).await) }
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
    // A connection that is closed at once may lose a request that is on its way. The next response says that it is the
    // last; who sends nothing for a while is not about to.
    let drained = async {
        drain.cancelled().await;
        asked.closing.store(true, Ordering::Relaxed);
        tokio::time::sleep(LINGER).await;
    };
    let ended = async {
        tokio::select! {
            () = drained => {}
            () = end.cancelled() => {}
        }
    };
    // It is asked only when it has news, not whenever the connection has.
    let mut ended: FuturesUnordered<_> = std::iter::once(ended).collect();
    tokio::select! {
        biased;
        served = serving.as_mut() => return served.map_err(Into::into),
        _ = ended.next() => {}
    }
    serving.as_mut().graceful_shutdown();
    serving.await.map_err(Into::into)
}

async fn http2<T>(io: T, connection: Arc<Connection>, drain: CancellationToken) -> Result<(), BoxError>
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
        async move { Ok::<_, Infallible>(connection.answer(request, Some(stall)).await) }
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
    // GOAWAY lets pass what is on its way, but a client that was just accepted would never get to ask.
    let drained = async {
        let pause = if drain.is_cancelled() {
            LINGER
        } else {
            Duration::ZERO
        };
        drain.cancelled().await;
        tokio::time::sleep(pause).await;
    };
    let ended = async {
        tokio::select! {
            () = drained => {}
            () = usage.end.cancelled() => {}
            () = idle => {}
        }
    };
    let mut ended: FuturesUnordered<_> = std::iter::once(ended).collect();
    tokio::select! {
        biased;
        served = serving.as_mut() => return served.map_err(Into::into),
        _ = ended.next() => {}
    }
    serving.as_mut().graceful_shutdown();
    serving.await.map_err(Into::into)
}
