//! The calls themselves, over HTTP/1.1. A call takes a connection that was kept, or makes one; no lock is held while it
//! is under way.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use thiserror::Error;
use tokio::sync::Semaphore;

use crate::Answer;

/// Connections that are kept for the next call.
const IDLE_LIMIT: usize = 8;
/// Calls at a time: what comes beyond waits for its turn, as long as it may take in all.
const CALLS: usize = 256;

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Failure {
    #[error("context deadline exceeded")]
    Timeout,
    /// The connection was closed under way: it may work the next time.
    #[error("{0}")]
    Reset(String),
    #[error("http: response body too large")]
    TooLarge,
    #[error("{0}")]
    Other(String),
}

/// Where a call goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallTarget {
    /// `host:port` to connect to.
    pub address: String,
    /// The name that the certificate must have; none: no TLS.
    pub server_name: Option<String>,
    /// As the header says it.
    pub host: String,
    pub path: String,
}

impl CallTarget {
    /// Of a URL of the scheme `https`, or `http`.
    pub fn of(url: &str) -> Result<CallTarget, String> {
        let uri: http::Uri = url.parse().map_err(|error| format!("{error}"))?;
        let host = uri.host().unwrap_or("").to_owned();
        if host.is_empty() {
            return Err("no host in the URL".to_owned());
        }
        if uri.authority().is_some_and(|of| of.as_str().contains('@')) {
            return Err("a URL with a name or a password is not taken".to_owned());
        }
        let tls = uri.scheme_str() != Some("http");
        let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
        Ok(CallTarget {
            address: format!("{host}:{port}"),
            server_name: tls.then(|| host.trim_matches(['[', ']']).to_owned()),
            host: uri.authority().map(|a| a.to_string()).unwrap_or_default(),
            path: match uri.path_and_query().map_or("", |path| path.as_str()) {
                path if path.starts_with('/') => path.to_owned(),
                query => format!("/{query}"),
            },
        })
    }
}

/// One call.
#[derive(Debug, Clone)]
pub struct Call<'a> {
    pub method: Method,
    pub place: &'a CallTarget,
    pub headers: &'a HeaderMap,
    pub body: Bytes,
    pub timeout: Duration,
    /// The largest answer that is read.
    pub limit: usize,
}

impl<'a> Call<'a> {
    /// Posts a document of JSON.
    pub fn post(place: &'a CallTarget, headers: &'a HeaderMap, body: Bytes, timeout: Duration) -> Call<'a> {
        Call {
            method: Method::POST,
            place,
            headers,
            body,
            timeout,
            limit: 64 << 20,
        }
    }
}

pub struct Client {
    tls: Result<Arc<rustls::ClientConfig>, String>,
    /// Open connections, and where they lead. Leaf lock: never held over an await.
    idle: Mutex<Vec<(CallTarget, SendRequest<Full<Bytes>>)>>,
    turns: Semaphore,
}

impl Client {
    /// What is wrong with the trust is told with every call.
    pub fn new(tls: Result<Arc<rustls::ClientConfig>, String>) -> Client {
        Client {
            tls,
            idle: Mutex::default(),
            turns: Semaphore::new(CALLS),
        }
    }

    pub async fn call(&self, call: Call<'_>) -> Result<Answer, Failure> {
        let timeout = call.timeout;
        let made = async {
            let _turn = self.turns.acquire().await;
            self.send(&call).await
        };
        match tokio::time::timeout(timeout, made).await {
            Ok(result) => result,
            Err(_) => Err(Failure::Timeout),
        }
    }

    async fn send(&self, call: &Call<'_>) -> Result<Answer, Failure> {
        // A connection that was kept may be closed by now: then a new one is made, once.
        while let Some(sender) = self.kept(call.place) {
            match exchange(sender, call).await {
                Ok((sender, answer)) => return Ok(self.keep(call.place, sender, answer)),
                Err(None) => {}
                Err(Some(failure)) => return Err(failure),
            }
        }
        let sender = self.connect(call.place).await?;
        match exchange(sender, call).await {
            Ok((sender, answer)) => Ok(self.keep(call.place, sender, answer)),
            Err(None) => Err(Failure::Reset("EOF".to_owned())),
            Err(Some(failure)) => Err(failure),
        }
    }

    /// A connection to the same peer: the same address is not enough, another name must be proven by another handshake.
    fn kept(&self, place: &CallTarget) -> Option<SendRequest<Full<Bytes>>> {
        let mut idle = self.idle.lock();
        idle.retain(|(_, sender)| !sender.is_closed());
        let at = idle
            .iter()
            .position(|(to, _)| to.address == place.address && to.server_name == place.server_name)?;
        Some(idle.swap_remove(at).1)
    }

    fn keep(&self, place: &CallTarget, sender: SendRequest<Full<Bytes>>, answer: Answer) -> Answer {
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_LIMIT && !sender.is_closed() {
            idle.push((place.clone(), sender));
        }
        answer
    }

    async fn connect(&self, place: &CallTarget) -> Result<SendRequest<Full<Bytes>>, Failure> {
        let stream = tokio::net::TcpStream::connect(&place.address).await;
        let stream = stream.map_err(|error| {
            Failure::Other(match error.kind() {
                std::io::ErrorKind::ConnectionRefused => {
                    format!("dial tcp {}: connect: connection refused", place.address)
                }
                _ => format!("dial tcp {}: {error}", place.address),
            })
        })?;
        let _ = stream.set_nodelay(true);
        let Some(server_name) = &place.server_name else {
            return handshake(stream).await;
        };
        let tls = self.tls.clone().map_err(Failure::Other)?;
        let name =
            ServerName::try_from(server_name.clone()).map_err(|error| Failure::Other(error.to_string()))?;
        let stream = tokio_rustls::TlsConnector::from(tls)
            .connect(name, stream)
            .await
            .map_err(|error| Failure::Other(tls_problem(&error, server_name)))?;
        handshake(stream).await
    }
}

async fn handshake<S>(stream: S) -> Result<SendRequest<Full<Bytes>>, Failure>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream))
        .await
        .map_err(|error| Failure::Other(error.to_string()))?;
    // Ends with the connection, which ends when nobody holds its sender.
    tokio::spawn(connection);
    Ok(sender)
}

/// `Err(None)`: the connection was closed before the request went out.
async fn exchange(
    mut sender: SendRequest<Full<Bytes>>,
    call: &Call<'_>,
) -> Result<(SendRequest<Full<Bytes>>, Answer), Option<Failure>> {
    if sender.ready().await.is_err() {
        return Err(None);
    }
    let mut request = http::Request::new(Full::new(call.body.clone()));
    *request.method_mut() = call.method.clone();
    let other = |why: String| Some(Failure::Other(why));
    *request.uri_mut() = call.place.path.parse().map_err(|e| other(format!("{e}")))?;
    let headers = request.headers_mut();
    headers.insert("accept", HeaderValue::from_static("application/json, */*"));
    if call.method == Method::POST {
        headers.insert("content-type", HeaderValue::from_static("application/json"));
    }
    for (name, value) in call.headers {
        headers.insert(name, value.clone());
    }
    let host = HeaderValue::from_str(&call.place.host).map_err(|error| other(error.to_string()))?;
    headers.insert("host", host);
    let answer = sender.send_request(request).await.map_err(|error| {
        if error.is_canceled() {
            None
        } else if error.is_incomplete_message() {
            Some(Failure::Reset("EOF".to_owned()))
        } else {
            Some(Failure::Other(error.to_string()))
        }
    })?;
    let code = answer.status().as_u16();
    let header = |name| answer.headers().get(name).and_then(|value| value.to_str().ok());
    let content_type = header("content-type").unwrap_or("").to_owned();
    let location = header("location").filter(|to| !to.is_empty()).map(str::to_owned);
    let retry_after = answer.headers().contains_key("retry-after");
    let body = Limited::new(answer.into_body(), call.limit).collect().await;
    let body = body.map_err(|error| {
        if error.is::<LengthLimitError>() {
            Some(Failure::TooLarge)
        } else {
            other(error.to_string())
        }
    })?;
    let answer = Answer {
        code,
        content_type,
        location,
        retry_after,
        body: body.to_bytes(),
    };
    Ok((sender, answer))
}

fn tls_problem(error: &std::io::Error, name: &str) -> String {
    use rustls::CertificateError as Bad;
    let inner = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let why = match inner {
        Some(rustls::Error::InvalidCertificate(bad)) => match bad {
            Bad::UnknownIssuer => "certificate signed by unknown authority".to_owned(),
            Bad::Expired | Bad::ExpiredContext { .. } => {
                "certificate has expired or is not yet valid".to_owned()
            }
            Bad::NotValidForName | Bad::NotValidForNameContext { .. } => {
                format!("certificate is not valid for {name}")
            }
            other => other.to_string(),
        },
        _ => return format!("tls: {error}"),
    };
    format!("tls: failed to verify certificate: x509: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn places_of_urls() {
        let check = |url: &str, address: &str, name: Option<&str>, path: &str| {
            let place = CallTarget::of(url).unwrap();
            let found = (
                place.address.as_str(),
                place.server_name.as_deref(),
                place.path.as_str(),
            );
            assert_eq!(found, (address, name, path));
        };
        check(
            "https://a.example/x?y=1",
            "a.example:443",
            Some("a.example"),
            "/x?y=1",
        );
        check("https://[::1]:8443", "[::1]:8443", Some("::1"), "/");
        check("https://a?x=1", "a:443", Some("a"), "/?x=1");
        check("http://127.0.0.1:80/x", "127.0.0.1:80", None, "/x");
        assert!(CallTarget::of("/x").is_err());
        assert!(CallTarget::of("https://a:b@c").is_err());
    }

    #[tokio::test]
    async fn a_connection_is_for_one_name() {
        let (near, _far) = tokio::io::duplex(1024);
        let client = Client::new(Err("none".to_owned()));
        let place = |name: Option<&str>| CallTarget {
            address: "192.0.2.1:443".to_owned(),
            server_name: name.map(str::to_owned),
            host: String::new(),
            path: String::new(),
        };
        let answer = Answer {
            code: 200,
            content_type: String::new(),
            location: None,
            retry_after: false,
            body: Bytes::new(),
        };
        client.keep(&place(Some("a")), handshake(near).await.unwrap(), answer);
        assert!(client.kept(&place(Some("b"))).is_none());
        assert!(client.kept(&place(None)).is_none());
        assert!(client.kept(&place(Some("a"))).is_some());
    }

    /// A server that answers each connection once with these bytes, and then keeps it open.
    async fn answering(bytes: &'static [u8]) -> CallTarget {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut buffer = [0; 4096];
                    let _ = stream.read(&mut buffer).await;
                    let _ = stream.write_all(bytes).await;
                    let _ = stream.read(&mut buffer).await;
                    std::future::pending::<()>().await;
                });
            }
        });
        CallTarget::of(&format!("http://127.0.0.1:{port}/")).unwrap()
    }

    #[tokio::test]
    async fn calls_are_bounded_in_time_and_size() {
        let client = Client::new(Err("none".to_owned()));
        let headers = HeaderMap::new();
        let call = |place, timeout| Call {
            limit: 5,
            ..Call::post(place, &headers, Bytes::new(), timeout)
        };
        let long = Duration::from_secs(600);
        let place = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello").await;
        assert_eq!(client.call(call(&place, long)).await.unwrap().body, "hello");
        let place = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello!").await;
        assert_eq!(
            client.call(call(&place, long)).await.unwrap_err(),
            Failure::TooLarge
        );
        // One that does not say how long it is, and never ends.
        let place = answering(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nhello!\r\n").await;
        assert_eq!(
            client.call(call(&place, long)).await.unwrap_err(),
            Failure::TooLarge
        );
        let place = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel").await;
        let short = Duration::from_millis(50);
        assert_eq!(
            client.call(call(&place, short)).await.unwrap_err(),
            Failure::Timeout
        );
    }
}
