//! Clients of API servers on other machines: HTTP/2 over TLS, with a client certificate or a token.
//!
//! There may be several servers. A connection goes to the one that served last; if that does not answer within
//! [`STAGGER`], the next one is tried beside it, and the first that answers is kept. Connections that die without a word
//! are found by pings, within a second where there is another server ([`silence`]). Watches and retries are their callers'
//! business: a broken connection is an error to them.

mod silence;

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, Uri, header};
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::client::legacy::{self};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use kube::Client;
use kube::client::Body;
use parking_lot::RwLock;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tower::{BoxError, Service};

use crate::marks;

/// How long one server may take to answer before the next one is tried beside it.
const STAGGER: Duration = Duration::from_millis(300);
/// How long a connection and its handshake may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The connection to an only server is pinged this often while it has something open. Any is given up if the answer takes
/// this long.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Why no server can be reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("{server}: {source}")]
    Tcp { server: String, source: io::Error },
    #[error("{server}: no answer within {} s", CONNECT_TIMEOUT.as_secs())]
    Timeout { server: String },
    #[error("{server}: {source}")]
    Tls { server: String, source: rustls::Error },
    #[error("there is no server to connect to")]
    NoServer,
}

/// One API server: `https://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAddress {
    host: String,
    port: u16,
}

#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not the address of an API server: write https://HOST:PORT")]
pub struct BadServerAddress(String);

impl std::str::FromStr for ServerAddress {
    type Err = BadServerAddress;

    fn from_str(text: &str) -> Result<Self, BadServerAddress> {
        let bad = || BadServerAddress(text.to_owned());
        let text = if text.contains("://") {
            text.to_owned()
        } else {
            format!("https://{text}")
        };
        let uri: Uri = text.parse().map_err(|_| bad())?;
        let bare = uri.path_and_query().is_none_or(|path| path == "/");
        if uri.scheme() != Some(&Scheme::HTTPS) || !bare {
            return Err(bad());
        }
        let authority = uri.authority().ok_or_else(bad)?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || authority.as_str().contains('@') || ServerName::try_from(host).is_err() {
            return Err(bad());
        }
        Ok(ServerAddress {
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(6443),
        })
    }
}

impl ServerAddress {
    pub fn host(&self) -> &str {
        &self.host
    }

    /// `HOST:PORT`.
    pub fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

impl std::fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "https://{}", self.authority())
    }
}

/// The way to a cluster's API servers. Clones share connections.
#[derive(Clone)]
pub struct Remote {
    inner: Arc<Inner>,
}

struct Inner {
    connector: Connector,
    token: Option<HeaderValue>,
    /// A leaf lock.
    pool: RwLock<Pool>,
}

type Pool = legacy::Client<Connector, Body>;

impl Remote {
    /// `tls` says which authority servers must be of, and which certificate this client shows.
    pub fn new(servers: Vec<ServerAddress>, tls: rustls::ClientConfig) -> Remote {
        Remote::build(servers, tls, None)
    }

    /// The same, for a client that shows a token.
    pub fn with_token(
        servers: Vec<ServerAddress>,
        tls: rustls::ClientConfig,
        token: &str,
    ) -> Result<Remote, http::header::InvalidHeaderValue> {
        let mut header = HeaderValue::from_str(&format!("Bearer {token}"))?;
        header.set_sensitive(true);
        Ok(Remote::build(servers, tls, Some(header)))
    }

    fn build(
        servers: Vec<ServerAddress>,
        mut tls: rustls::ClientConfig,
        token: Option<HeaderValue>,
    ) -> Remote {
        tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // A session that is resumed would bring the identity of the certificate that opened it.
        tls.resumption = rustls::client::Resumption::disabled();
        let connector = Connector(Arc::new(Servers {
            list: RwLock::new(servers),
            preferred: AtomicUsize::new(0),
            tls: TlsConnector::from(Arc::new(tls)),
            changes: silence::Changes::default(),
            open: RwLock::new(CancellationToken::new()),
        }));
        Remote {
            inner: Arc::new(Inner {
                pool: RwLock::new(pool(&connector)),
                connector,
                token,
            }),
        }
    }

    /// A client that says it is `agent`.
    pub fn client(&self, agent: &'static str) -> Client {
        let remote = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let remote = remote.clone();
            async move { remote.send(request).await }
        });
        marks::in_process_as(service, "default", agent)
    }

    async fn send(
        &self,
        mut request: Request<Body>,
    ) -> Result<http::Response<hyper::body::Incoming>, BoxError> {
        let mut uri = std::mem::take(request.uri_mut()).into_parts();
        let authority = self.inner.connector.0.authority().ok_or(ConnectError::NoServer)?;
        uri.scheme = Some(Scheme::HTTPS);
        uri.authority = Some(authority);
        uri.path_and_query
            .get_or_insert_with(|| PathAndQuery::from_static("/"));
        *request.uri_mut() = Uri::from_parts(uri)?;
        if let Some(token) = &self.inner.token {
            request.headers_mut().insert(header::AUTHORIZATION, token.clone());
        }
        let pool = self.inner.pool.read().clone();
        Ok(pool.request(request).await?)
    }

    /// New requests go over new connections, which show the newest certificate. What is open stays open until it ends.
    pub fn reconnect(&self) {
        *self.inner.pool.write() = pool(&self.inner.connector);
    }

    /// Replaces the list of servers. Connections that are open stay, except when the only server gets company: they
    /// would not notice its silence.
    pub fn set_servers(&self, servers: Vec<ServerAddress>) {
        let shared = &self.inner.connector.0;
        let had_choice = shared.has_choice();
        let mut list = shared.list.write();
        if *list == servers {
            return;
        }
        shared.preferred.store(0, Ordering::Relaxed);
        *list = servers;
        drop(list);
        if shared.has_choice() != had_choice {
            self.reconnect();
            std::mem::take(&mut *shared.open.write()).cancel();
        }
    }

    /// Connects to a server and hangs up, to learn why it is not possible.
    pub async fn check(&self) -> Result<(), ConnectError> {
        self.inner.connector.0.connect().await.map(drop)
    }
}

fn pool(connector: &Connector) -> Pool {
    let (interval, is_watched) = match connector.0.has_choice() {
        true => (silence::PING_INTERVAL, true),
        false => (PING_INTERVAL, false),
    };
    legacy::Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .http2_keep_alive_interval(interval)
        .http2_keep_alive_timeout(PING_TIMEOUT)
        .http2_keep_alive_while_idle(is_watched)
        .build(connector.clone())
}

struct Servers {
    /// A leaf lock.
    list: RwLock<Vec<ServerAddress>>,
    /// The place in the list of the server that answered last.
    preferred: AtomicUsize,
    tls: TlsConnector,
    changes: silence::Changes,
    /// Cancelled to close all connections. A leaf lock.
    open: RwLock<CancellationToken>,
}

impl Servers {
    fn has_choice(&self) -> bool {
        self.list.read().len() > 1
    }

    /// New connections go to the server at this place first, which is named.
    fn prefer(&self, place: usize) -> String {
        self.preferred.store(place, Ordering::Relaxed);
        self.list
            .read()
            .get(place)
            .map(ToString::to_string)
            .unwrap_or_default()
    }

    /// What requests name as their host. One name for all servers: the pool keeps connections by it.
    fn authority(&self) -> Option<Authority> {
        let list = self.list.read();
        Authority::try_from(list.first()?.authority()).ok()
    }

    async fn connect(&self) -> Result<(ServerAddress, TlsStream<TcpStream>), ConnectError> {
        let list = self.list.read().clone();
        let first = self.preferred.load(Ordering::Relaxed);
        let (mut attempts, mut next) = (FuturesUnordered::new(), 0);
        let mut failure = ConnectError::NoServer;
        loop {
            if next < list.len() {
                let place = (first + next) % list.len();
                let server = list[place].clone();
                next += 1;
                attempts.push(async move { (place, self.connect_to(&server).await) });
            } else if attempts.is_empty() {
                return Err(failure);
            }
            // Until the next one is due; an attempt that failed makes it due at once.
            let due = tokio::time::sleep(STAGGER);
            tokio::pin!(due);
            tokio::select! {
                Some((place, attempt)) = attempts.next() => match attempt {
                    Ok(stream) => {
                        self.preferred.store(place, Ordering::Relaxed);
                        return Ok((list[place].clone(), stream));
                    }
                    Err(error) => failure = error,
                },
                () = &mut due, if next < list.len() => {}
            }
        }
    }

    async fn connect_to(&self, server: &ServerAddress) -> Result<TlsStream<TcpStream>, ConnectError> {
        let tcp = |source| ConnectError::Tcp {
            server: server.to_string(),
            source,
        };
        let connecting = async {
            let stream = TcpStream::connect((server.host.as_str(), server.port))
                .await
                .map_err(tcp)?;
            stream.set_nodelay(true).map_err(tcp)?;
            let name = ServerName::try_from(server.host.clone())
                .map_err(|error| tcp(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
            self.tls.connect(name, stream).await.map_err(|error| {
                let broken = error.get_ref().and_then(|inner| inner.downcast_ref());
                match broken.cloned() {
                    Some(source) => ConnectError::Tls {
                        server: server.to_string(),
                        source,
                    },
                    None => tcp(error),
                }
            })
        };
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
        connected.unwrap_or_else(|_| {
            Err(ConnectError::Timeout {
                server: server.to_string(),
            })
        })
    }
}

#[derive(Clone)]
struct Connector(Arc<Servers>);

impl Service<Uri> for Connector {
    type Response = Io;
    type Error = ConnectError;
    type Future = BoxFuture<'static, Result<Io, ConnectError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let servers = self.0.clone();
        Box::pin(async move {
            let is_watched = servers.has_choice();
            let closed = servers.open.read().child_token();
            let (server, stream) = servers.connect().await?;
            let pulse = silence::Pulse::new(closed.clone());
            if is_watched && is_http2(&stream) {
                let watching = silence::watch(Arc::downgrade(&servers), server, Arc::downgrade(&pulse));
                tokio::spawn(watching);
            }
            Ok(Io {
                stream: TokioIo::new(stream),
                pulse,
                closed: Box::pin(closed.cancelled_owned()),
            })
        })
    }
}

fn is_http2(stream: &TlsStream<TcpStream>) -> bool {
    stream.get_ref().1.alpn_protocol() == Some(b"h2")
}

/// A connection as hyper wants it.
struct Io {
    stream: TokioIo<TlsStream<TcpStream>>,
    pulse: Arc<silence::Pulse>,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connection for Io {
    fn connected(&self) -> Connected {
        match is_http2(self.stream.inner()) {
            true => Connected::new().negotiated_h2(),
            false => Connected::new(),
        }
    }
}

impl hyper::rt::Read for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if self.closed.as_mut().poll(context).is_ready() {
            let why = "the server was silent, or others are to be used";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, why)));
        }
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if read.is_ready() {
            self.pulse.hear();
        }
        read
    }
}

impl hyper::rt::Write for Io {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Where a server of this machine is reached, for tests and for addresses that the system chose.
impl From<SocketAddr> for ServerAddress {
    fn from(address: SocketAddr) -> Self {
        ServerAddress {
            host: address.ip().to_string(),
            port: address.port(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_servers() {
        let check = |text: &str, expected: Option<&str>| {
            let parsed = text.parse::<ServerAddress>().ok().map(|one| one.to_string());
            assert_eq!(parsed.as_deref(), expected, "{text}");
        };
        check("https://192.0.2.1:6443", Some("https://192.0.2.1:6443"));
        check("https://192.0.2.1:6443/", Some("https://192.0.2.1:6443"));
        check("192.0.2.1", Some("https://192.0.2.1:6443"));
        check("https://api.example:443", Some("https://api.example:443"));
        check("https://[fd00::1]:7000", Some("https://[fd00::1]:7000"));
        check("http://192.0.2.1:6443", None);
        check("https://192.0.2.1:6443/api", None);
        check("https://user@192.0.2.1:6443", None);
        check("https://", None);
        check("", None);
        check("https://a b", None);
    }
}
