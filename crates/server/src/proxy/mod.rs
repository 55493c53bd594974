//! A proxy for requests that are served elsewhere: by a pod, a service, a node, or an extension API server. It
//! sends the request on over a connection of its own, lets upgrades through, and rewrites what the answer says
//! of its own address. It decides neither where to go nor whether the user may.

pub mod address;
mod local;
mod rewrite;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, header};
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::body::{self, Answer, Body, BoxError};
use crate::chain::Exchange;
pub use local::LocalApi;
use rewrite::Rewriter;

const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// Connection headers mean this hop, not the next one.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// The address of the client, in the extensions of a request that came over a socket.
#[derive(Clone, Copy, Debug)]
pub struct ClientAddress(pub SocketAddr);

/// Why a request did not get through, in the words that clients see.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    #[error("error trying to reach service: {0}")]
    Reach(String),
    #[error("error dialing backend: {0}")]
    Dial(String),
    #[error("invalid upgrade response: status code {0}")]
    NotUpgraded(u16),
    #[error("{0}")]
    BadPath(String),
}

/// How to speak TLS with a target, and the name that its certificate must have.
#[derive(Clone)]
pub struct Tls {
    pub config: Arc<rustls::ClientConfig>,
    pub server_name: String,
}

/// Where a request goes.
#[derive(Clone)]
pub struct Target {
    /// A name or an address, without brackets.
    pub host: String,
    /// The addresses that the host was found to have and that were checked; the name is not looked up again. With
    /// none, it is looked up when it is connected to.
    pub addresses: Vec<IpAddr>,
    pub port: u16,
    pub tls: Option<Tls>,
    /// A server in this process, which is reached over no network.
    pub local: Option<LocalApi>,
}

pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl Target {
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Opens a connection. The error is worded as Go words it, because clients get to see it.
    pub async fn connect(&self) -> Result<Box<dyn Stream>, String> {
        if let Some(local) = &self.local {
            return Ok(Box::new(local.connect()));
        }
        let dial = async {
            let dialled = if self.addresses.is_empty() {
                TcpStream::connect((self.host.as_str(), self.port)).await
            } else {
                let addresses = self.addresses.iter().map(|ip| SocketAddr::new(*ip, self.port));
                TcpStream::connect(addresses.collect::<Vec<_>>().as_slice()).await
            };
            let stream =
                dialled.map_err(|error| format!("dial tcp {}: {}", self.authority(), dial_error(&error)))?;
            let _ = stream.set_nodelay(true);
            let Some(tls) = &self.tls else {
                return Ok(Box::new(stream) as Box<dyn Stream>);
            };
            let name = ServerName::try_from(tls.server_name.clone()).map_err(|error| error.to_string())?;
            let stream = TlsConnector::from(tls.config.clone())
                .connect(name, stream)
                .await
                .map_err(|error| tls_error(&error))?;
            Ok(Box::new(stream) as Box<dyn Stream>)
        };
        match tokio::time::timeout(CONNECT_LIMIT, dial).await {
            Ok(result) => result,
            Err(_) => Err(format!("dial tcp {}: i/o timeout", self.authority())),
        }
    }
}

/// A request on its way out.
pub struct Forwarded<'a> {
    pub target: &'a Target,
    /// Path and query at the target, percent-encoded.
    pub path: &'a str,
    /// What the client's path has before the target's: links in answers get it back.
    pub prefix: &'a str,
    /// The `Host` that the target sees: its own, unless it shall be the client's.
    pub keep_host: bool,
    /// Headers beyond the client's own.
    pub headers: HeaderMap,
}

/// Sends the request of an exchange to a target and passes back what it answers.
pub async fn forward(
    exchange: &Exchange,
    request_body: Body,
    forwarded: Forwarded<'_>,
) -> Result<Answer, ProxyError> {
    let upgrade = is_upgrade(&exchange.parts.headers);
    let mut request = outgoing(exchange, request_body, &forwarded, upgrade)?;
    let failed = |why: String| {
        if upgrade {
            ProxyError::Dial(why)
        } else {
            ProxyError::Reach(why)
        }
    };
    let connection = forwarded.target.connect().await.map_err(failed)?;
    let client_upgrade = upgrade.then(|| hyper::upgrade::on(&mut request));
    request.extensions_mut().clear();
    let (mut sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(connection))
        .await
        .map_err(|error| failed(error.to_string()))?;
    tokio::spawn(async move {
        if let Err(error) = driver.with_upgrades().await {
            tracing::debug!(%error, "a proxied connection ended");
        }
    });
    let mut response = sender
        .send_request(request)
        .await
        .map_err(|error| failed(send_error(&error)))?;
    if let Some(client_upgrade) = client_upgrade {
        let code = response.status();
        if code == StatusCode::SWITCHING_PROTOCOLS {
            join(client_upgrade, hyper::upgrade::on(&mut response));
            let (parts, _) = response.into_parts();
            return Ok(Response::from_parts(parts, body::full("")));
        }
        if code.as_u16() < 400 {
            return Err(ProxyError::NotUpgraded(code.as_u16()));
        }
    }
    let (mut parts, incoming) = response.into_parts();
    remove_hop_by_hop(&mut parts.headers);
    for name in [
        header::ACCESS_CONTROL_ALLOW_CREDENTIALS,
        header::ACCESS_CONTROL_ALLOW_HEADERS,
        header::ACCESS_CONTROL_ALLOW_METHODS,
        header::ACCESS_CONTROL_ALLOW_ORIGIN,
    ] {
        parts.headers.remove(name);
    }
    // The connection lives as long as its sender, which must see the whole answer.
    let answer_body = incoming
        .map_err(|error| -> BoxError { Box::new(error) })
        .map_frame(move |frame| {
            let _connection = &sender;
            frame
        })
        .boxed_unsync();
    let rewriter = Rewriter {
        prefix: forwarded.prefix,
        target_host: forwarded.target.authority(),
        client_host: exchange.header(header::HOST).to_string(),
    };
    rewriter.answer(parts, answer_body).await
}

fn outgoing(
    exchange: &Exchange,
    request_body: Body,
    forwarded: &Forwarded<'_>,
    upgrade: bool,
) -> Result<Request<Body>, ProxyError> {
    let mut request = Request::new(request_body);
    *request.method_mut() = exchange.parts.method.clone();
    *request.uri_mut() = forwarded
        .path
        .parse::<Uri>()
        .map_err(|error| ProxyError::BadPath(format!("invalid path: {error}")))?;
    let mut headers = exchange.parts.headers.clone();
    // Who the user is has been decided here; nobody behind us gets the credential.
    headers.remove(header::AUTHORIZATION);
    skiff_auth::request_header::remove(&mut headers);
    let impersonation: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with("impersonate-"))
        .cloned()
        .collect();
    for name in impersonation {
        headers.remove(name);
    }
    if !upgrade {
        remove_hop_by_hop(&mut headers);
    }
    let client_host = headers.remove(header::HOST).or_else(|| {
        let authority = exchange.parts.uri.authority()?.as_str();
        HeaderValue::from_str(authority).ok()
    });
    let host = match client_host {
        Some(host) if forwarded.keep_host => Some(host),
        _ => HeaderValue::from_str(&forwarded.target.authority()).ok(),
    };
    if let Some(host) = host {
        headers.insert(header::HOST, host);
    }
    if let Some(ClientAddress(address)) = exchange.parts.extensions.get() {
        let mut chain: Vec<String> = headers
            .get_all("x-forwarded-for")
            .iter()
            .filter_map(|value| value.to_str().ok().map(str::to_string))
            .collect();
        chain.push(address.ip().to_string());
        if let Ok(value) = HeaderValue::from_str(&chain.join(", ")) {
            headers.insert("x-forwarded-for", value);
        }
    }
    if !upgrade {
        let path = forwarded.path.split('?').next().unwrap_or("");
        if let Ok(value) = HeaderValue::from_str(&format!("{}{path}", forwarded.prefix)) {
            headers.insert("x-forwarded-uri", value);
        }
    }
    for (name, value) in &forwarded.headers {
        headers.append(name.clone(), value.clone());
    }
    *request.headers_mut() = headers;
    *request.extensions_mut() = exchange.parts.extensions.clone();
    Ok(request)
}

/// Connects the two sides of an upgraded connection and looks no further.
fn join(client: hyper::upgrade::OnUpgrade, backend: hyper::upgrade::OnUpgrade) {
    tokio::spawn(async move {
        let (client, backend) = match tokio::try_join!(client, backend) {
            Ok(both) => both,
            Err(error) => return tracing::debug!(%error, "an upgrade was not completed"),
        };
        let (mut client, mut backend) = (TokioIo::new(client), TokioIo::new(backend));
        if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut backend).await {
            tracing::debug!(%error, "a proxied stream ended");
        }
    });
}

/// Whether a client wants to leave HTTP.
pub fn is_upgrade(headers: &HeaderMap) -> bool {
    headers.get_all(header::CONNECTION).iter().any(|value| {
        value
            .to_str()
            .unwrap_or("")
            .to_ascii_lowercase()
            .contains("upgrade")
    })
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    for name in named {
        headers.remove(name.as_str());
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

/// What Go says of a connection that cannot be made.
fn dial_error(error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::ConnectionRefused => "connect: connection refused".to_string(),
        ErrorKind::HostUnreachable => "connect: no route to host".to_string(),
        ErrorKind::NetworkUnreachable => "connect: network is unreachable".to_string(),
        ErrorKind::TimedOut => "connect: connection timed out".to_string(),
        _ => error.to_string(),
    }
}

/// What Go says of the commonest failures of a handshake.
fn tls_error(error: &std::io::Error) -> String {
    use rustls::{CertificateError, Error};
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    match inner {
        Some(Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            "tls: failed to verify certificate: x509: certificate signed by unknown authority".to_string()
        }
        Some(Error::InvalidCertificate(CertificateError::Expired)) => {
            "tls: failed to verify certificate: x509: certificate has expired or is not yet valid".to_string()
        }
        Some(Error::InvalidMessage(_)) => "tls: first record does not look like a TLS handshake".to_string(),
        Some(other) => format!("tls: failed to verify certificate: x509: {other}"),
        None => error.to_string(),
    }
}

fn send_error(error: &hyper::Error) -> String {
    if error.is_incomplete_message() || error.is_closed() || error.is_canceled() {
        "EOF".to_string()
    } else {
        error.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_checked_address_is_the_one_that_is_connected_to() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = Target {
            host: "name.invalid".to_string(),
            addresses: vec![IpAddr::from([127, 0, 0, 1])],
            port: listener.local_addr().unwrap().port(),
            tls: None,
            local: None,
        };
        target.connect().await.map(drop).unwrap();
    }
}
