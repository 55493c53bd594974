//! Requests to endpoints, over HTTP/1.1 (`http1`) or over a few HTTP/2 connections of each endpoint that speaks it. Addresses are dialled as they are: no name is resolved, no proxy is asked.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, Response, Uri};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};

use crate::backend::{Endpoint, Protocol};
use crate::body::{BoxError, LentBody};
use crate::dial;
use crate::http1::{self, BackendBody};

pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Headers of a response.
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
    pub response: Response<BackendBody>,
    pub stream: Option<StreamPermit>,
}

/// Sends a request with the host as a header. `host` is what HTTP/2 calls the authority.
pub async fn send(
    endpoint: &Arc<Endpoint>,
    protocol: Protocol,
    mut request: Request<LentBody>,
    host: &HeaderValue,
    connect_timeout: Duration,
) -> Result<Sent, SendError> {
    let path = request.uri().path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    match protocol {
        Protocol::Http1 => {
            *request.uri_mut() = path.into();
            let response = http1::send(endpoint, request, connect_timeout).await?;
            Ok(Sent {
                response,
                stream: None,
            })
        }
        Protocol::Http2 => {
            let scheme = if endpoint.tls.is_some() {
                Scheme::HTTPS
            } else {
                Scheme::HTTP
            };
            let broken = |error: BoxError| SendError::Broken(error);
            *request.uri_mut() = uri(scheme, authority(host), path).map_err(broken)?;
            *request.version_mut() = http::Version::HTTP_2;
            request.headers_mut().remove(http::header::HOST);
            let (mut sender, stream) = Box::pin(endpoint.http2.connection(endpoint, connect_timeout)).await?;
            let sent = Box::pin(sender.send_request(request)).await;
            let response = sent.map_err(|error| broken(error.into()))?;
            Ok(Sent {
                response: response.map(BackendBody::driven),
                stream: Some(stream),
            })
        }
    }
}

/// What HTTP/2 calls the host.
fn authority(host: &HeaderValue) -> Authority {
    let authority = Authority::try_from(host.as_bytes());
    authority.unwrap_or_else(|_| Authority::from_static("localhost"))
}

fn uri(scheme: Scheme, authority: Authority, path: PathAndQuery) -> Result<Uri, BoxError> {
    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(scheme);
    parts.authority = Some(authority);
    parts.path_and_query = Some(path);
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
        endpoint: &Endpoint,
        timeout: Duration,
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
        let connection = connect_http2(endpoint, timeout)
            .await
            .map_err(SendError::Connect)?;
        let found = (connection.sender.clone(), StreamPermit::new(&connection.used));
        connections.push(connection);
        Ok(found)
    }
}

async fn connect_http2(endpoint: &Endpoint, timeout: Duration) -> Result<Http2Connection, BoxError> {
    let address = endpoint.address;
    let connecting = async {
        let stream = dial::connect(endpoint).await?;
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
    let (sender, connection) = tokio::time::timeout(timeout, connecting).await??;
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
