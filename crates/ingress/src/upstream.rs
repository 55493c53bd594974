//! Connections to endpoints: a pool of HTTP/1.1 connections, and a few HTTP/2 connections of each endpoint that speaks
//! it. Addresses are dialled as they are: no name is resolved, no proxy is asked.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;

use crate::backend::{Endpoint, Protocol};
use crate::body::{BoxError, LentBody};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Shorter than the keep-alive of common servers, so that few requests meet a connection that is just closing.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle connections that are kept of one endpoint.
const MAX_IDLE: usize = 64;
/// Headers of a response.
const MAX_HEADERS: usize = 100;
const MAX_HEADER_BYTES: u32 = 64 * 1024;
/// HTTP/2 connections to one endpoint; another is opened when the streams of all are in use.
const MAX_HTTP2: usize = 16;
/// Streams on one of them. Where an endpoint allows fewer, requests wait for their turn.
const MAX_STREAMS: usize = 100;
const HTTP2_KEEP_ALIVE: Duration = Duration::from_secs(30);
const HTTP2_WINDOW: u32 = 256 * 1024;

/// Why an endpoint gave no response.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// Nothing was sent.
    #[error("cannot connect: {0}")]
    Connect(BoxError),
    #[error("{0}")]
    Broken(BoxError),
}

/// A response, and what is held as long as its body is read.
pub struct Sent {
    pub response: Response<Incoming>,
    pub stream: Option<StreamPermit>,
}

#[derive(Clone)]
pub struct Upstream {
    http1: Client<HttpConnector, LentBody>,
}

impl Default for Upstream {
    fn default() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_keepalive(Some(Duration::from_secs(60)));
        let http1 = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(MAX_IDLE)
            .http1_max_headers(MAX_HEADERS)
            .set_host(false)
            .build(connector);
        Upstream { http1 }
    }
}

impl Upstream {
    /// Sends a request whose address is a path, with the host as a header. `host` is what HTTP/2 calls the authority.
    pub async fn send(
        &self,
        endpoint: &Endpoint,
        protocol: Protocol,
        mut request: Request<LentBody>,
        host: &Authority,
    ) -> Result<Sent, SendError> {
        let path = request.uri().path_and_query().cloned();
        let broken = |error: BoxError| SendError::Broken(error);
        match protocol {
            Protocol::Http1 => {
                let address = endpoint.address.to_string().parse::<Authority>();
                let address = address.map_err(|error| broken(error.into()))?;
                *request.uri_mut() = uri(address, path).map_err(broken)?;
                let sent = self.http1.request(request).await;
                let response = sent.map_err(|error| match error.is_connect() {
                    true => SendError::Connect(error.into()),
                    false => SendError::Broken(error.into()),
                })?;
                Ok(Sent {
                    response,
                    stream: None,
                })
            }
            Protocol::Http2 => {
                *request.uri_mut() = uri(host.clone(), path).map_err(broken)?;
                *request.version_mut() = http::Version::HTTP_2;
                request.headers_mut().remove(http::header::HOST);
                let (mut sender, stream) = endpoint.http2.connection(endpoint.address).await?;
                let sent = sender.send_request(request).await;
                let response = sent.map_err(|error| broken(error.into()))?;
                Ok(Sent {
                    response,
                    stream: Some(stream),
                })
            }
        }
    }
}

fn uri(authority: Authority, path: Option<PathAndQuery>) -> Result<Uri, BoxError> {
    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(Scheme::HTTP);
    parts.authority = Some(authority);
    parts.path_and_query = Some(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    Ok(Uri::from_parts(parts)?)
}

struct Http2Connection {
    sender: http2::SendRequest<LentBody>,
    used: Arc<AtomicUsize>,
}

/// A stream of an HTTP/2 connection, until it is dropped.
pub struct StreamPermit(Arc<AtomicUsize>);

impl StreamPermit {
    fn new(used: &Arc<AtomicUsize>) -> StreamPermit {
        used.fetch_add(1, Ordering::Relaxed);
        StreamPermit(used.clone())
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The HTTP/2 connections of one endpoint.
#[derive(Default)]
pub struct Http2Slot(tokio::sync::Mutex<Vec<Http2Connection>>);

impl std::fmt::Debug for Http2Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Http2Slot")
    }
}

impl Http2Slot {
    async fn connection(
        &self,
        address: SocketAddr,
    ) -> Result<(http2::SendRequest<LentBody>, StreamPermit), SendError> {
        // Whoever comes while one connects waits for that connection.
        let mut connections = self.0.lock().await;
        connections.retain(|connection| !connection.sender.is_closed());
        let used = |connection: &Http2Connection| connection.used.load(Ordering::Relaxed);
        let chosen = match connections.iter().find(|each| used(each) < MAX_STREAMS) {
            Some(found) => Some(found),
            None if connections.len() >= MAX_HTTP2 => connections.iter().min_by_key(|each| used(each)),
            None => None,
        };
        if let Some(connection) = chosen {
            return Ok((connection.sender.clone(), StreamPermit::new(&connection.used)));
        }
        let connection = connect_http2(address).await.map_err(SendError::Connect)?;
        let found = (connection.sender.clone(), StreamPermit::new(&connection.used));
        connections.push(connection);
        Ok(found)
    }
}

async fn connect_http2(address: SocketAddr) -> Result<Http2Connection, BoxError> {
    let connecting = async {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let shaken = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(HTTP2_WINDOW)
            .initial_connection_window_size(4 * HTTP2_WINDOW)
            .max_header_list_size(MAX_HEADER_BYTES)
            .keep_alive_interval(HTTP2_KEEP_ALIVE)
            .handshake(TokioIo::new(stream))
            .await?;
        Ok::<_, BoxError>(shaken)
    };
    let (sender, connection) = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await??;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, %address, "an HTTP/2 connection to an endpoint ended");
        }
    });
    Ok(Http2Connection {
        sender,
        used: Arc::default(),
    })
}
