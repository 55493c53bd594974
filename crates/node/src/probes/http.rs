//! HTTP probes and hooks: one GET on a fresh connection. Messages read as Go's client writes them, because
//! users look them up.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Container, HTTPGetAction};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::net::TcpStream;

use super::Outcome;

const MAX_BODY: usize = 10 * 1024;
const MAX_REDIRECTS: usize = 10;

#[derive(Clone, Debug)]
pub struct HttpTarget {
    pub tls: bool,
    pub host: String,
    pub port: u16,
    /// With its query.
    pub path: String,
    pub headers: Vec<(String, String)>,
}

impl HttpTarget {
    pub fn new(
        action: &HTTPGetAction,
        container: &Container,
        pod_ip: &str,
        user_agent: &str,
    ) -> Result<Self, String> {
        let host = action.host.as_deref().filter(|h| !h.is_empty()).unwrap_or(pod_ip);
        let path = action.path.as_deref().unwrap_or_default();
        let mut headers = Vec::new();
        let mut has = (false, false);
        for header in action.http_headers.iter().flatten() {
            has.0 |= header.name.eq_ignore_ascii_case("user-agent");
            has.1 |= header.name.eq_ignore_ascii_case("accept");
            headers.push((header.name.clone(), header.value.clone()));
        }
        if !has.0 {
            headers.push(("User-Agent".to_owned(), format!("{user_agent}/1.36")));
        }
        if !has.1 {
            headers.push(("Accept".to_owned(), "*/*".to_owned()));
        }
        // An empty value is the way to send no such header.
        headers.retain(|(name, value)| {
            !(value.is_empty()
                && (name.eq_ignore_ascii_case("accept") || name.eq_ignore_ascii_case("user-agent")))
        });
        Ok(HttpTarget {
            tls: action
                .scheme
                .as_deref()
                .is_some_and(|s| s.eq_ignore_ascii_case("https")),
            host: host.to_owned(),
            port: container_port(&action.port, container)?,
            path: if path.starts_with('/') {
                path.to_owned()
            } else {
                format!("/{path}")
            },
            headers,
        })
    }

    fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    fn url(&self) -> String {
        format!(
            "{}://{}{}",
            if self.tls { "https" } else { "http" },
            self.authority(),
            self.path
        )
    }
}

/// A port by number or by the name a container gives it.
pub fn container_port(port: &IntOrString, container: &Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => *number,
        IntOrString::String(name) => match container
            .ports
            .iter()
            .flatten()
            .find(|p| p.name.as_deref() == Some(name))
        {
            Some(port) => port.container_port,
            None => name
                .parse()
                .map_err(|_| format!("couldn't find port: {name:?} in container {}", container.name))?,
        },
    };
    u16::try_from(number)
        .ok()
        .filter(|n| *n > 0)
        .ok_or_else(|| format!("invalid port number: {number}"))
}

pub struct Answer {
    pub code: u16,
    pub body: String,
    location: Option<String>,
}

/// One GET. The error is Go's sentence for it.
pub async fn get(target: &HttpTarget, timeout: Duration) -> Result<Answer, String> {
    let deadline = Instant::now() + timeout;
    get_before(target, deadline, None).await
}

async fn get_before(
    target: &HttpTarget,
    deadline: Instant,
    patience: Option<Instant>,
) -> Result<Answer, String> {
    let named = |error: String| format!("Get {:?}: {error}", target.url());
    match tokio::time::timeout_at(deadline.into(), exchange(target, deadline, patience)).await {
        Ok(result) => result.map_err(named),
        Err(_) => Err(named(
            "context deadline exceeded (Client.Timeout exceeded while awaiting headers)".to_owned(),
        )),
    }
}

async fn exchange(
    target: &HttpTarget,
    deadline: Instant,
    patience: Option<Instant>,
) -> Result<Answer, String> {
    let stream = dial(&target.host, target.port, deadline, patience).await?;
    let mut request = http::Request::get(&target.path);
    let mut host = target.authority();
    for (name, value) in &target.headers {
        if name.eq_ignore_ascii_case("host") {
            host.clone_from(value);
        } else {
            request = request.header(name, value);
        }
    }
    let request = request
        .header("Host", host)
        .header("Connection", "close")
        .body(Empty::<Bytes>::new())
        .map_err(|e| e.to_string())?;
    let response = if target.tls {
        let name = match target.host.parse::<IpAddr>() {
            Ok(ip) => rustls::pki_types::ServerName::from(ip),
            Err(_) => {
                rustls::pki_types::ServerName::try_from(target.host.clone()).map_err(|e| e.to_string())?
            }
        };
        let stream = tokio_rustls::TlsConnector::from(trusting_config())
            .connect(name, stream)
            .await
            .map_err(|e| e.to_string())?;
        send(TokioIo::new(stream), request).await?
    } else {
        send(TokioIo::new(stream), request).await?
    };
    let code = response.status().as_u16();
    let location = response
        .headers()
        .get("location")
        .and_then(|l| l.to_str().ok())
        .map(str::to_owned);
    // A body that is too long is cut, not an error: only the code counts.
    let body = match Limited::new(response.into_body(), MAX_BODY).collect().await {
        Ok(collected) => String::from_utf8_lossy(&collected.to_bytes()).into_owned(),
        Err(_) => String::new(),
    };
    Ok(Answer { code, body, location })
}

async fn send<S>(
    io: TokioIo<S>,
    request: http::Request<Empty<Bytes>>,
) -> Result<http::Response<hyper::body::Incoming>, String>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io)
        .await
        .map_err(|e| e.to_string())?;
    // The connection ends with the response; it must be driven meanwhile.
    tokio::spawn(async move {
        let _ = connection.await;
    });
    sender.send_request(request).await.map_err(|e| {
        if e.is_incomplete_message() {
            "EOF".to_owned()
        } else {
            e.to_string()
        }
    })
}

/// Connects. Until `patience` a refused connection is tried again: a server that was just started may not
/// listen yet, and a probe that fails for that reason costs the pod a whole period.
pub async fn dial(
    host: &str,
    port: u16,
    deadline: Instant,
    patience: Option<Instant>,
) -> Result<TcpStream, String> {
    let shown = if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    };
    let mut pause = Duration::from_millis(2);
    loop {
        let attempt = async {
            match host.parse::<IpAddr>() {
                Ok(ip) => TcpStream::connect(SocketAddr::new(ip, port)).await,
                Err(_) => TcpStream::connect((host, port)).await,
            }
        };
        match tokio::time::timeout_at(deadline.into(), attempt).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => {
                let refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
                if refused && patience.is_some_and(|until| Instant::now() + pause < until.min(deadline)) {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(40));
                    continue;
                }
                let why = match error.kind() {
                    std::io::ErrorKind::ConnectionRefused => "connect: connection refused".to_owned(),
                    std::io::ErrorKind::HostUnreachable => "connect: no route to host".to_owned(),
                    std::io::ErrorKind::NetworkUnreachable => "connect: network is unreachable".to_owned(),
                    _ => error.to_string(),
                };
                return Err(format!("dial tcp {shown}: {why}"));
            }
            Err(_) => return Err(format!("dial tcp {shown}: i/o timeout")),
        }
    }
}

/// Follows redirects to the same host; one to another host is as good as success, with a warning.
pub async fn probe(target: &HttpTarget, timeout: Duration, patience: Option<Instant>) -> Outcome {
    let deadline = Instant::now() + timeout;
    let mut target = target.clone();
    let host = target.host.clone();
    for _ in 0..=MAX_REDIRECTS {
        let answer = match get_before(&target, deadline, patience).await {
            Ok(answer) => answer,
            Err(error) => return Outcome::Failure(error),
        };
        match answer.code {
            200..=299 => return Outcome::Success,
            300..=399 => match answer
                .location
                .as_deref()
                .and_then(|location| redirected(&target, location))
            {
                Some(next) if next.host == host => target = next,
                _ => {
                    return Outcome::Warning(format!(
                        "Probe terminated redirects, Response body: {}",
                        answer.body
                    ));
                }
            },
            code => return Outcome::Failure(format!("HTTP probe failed with statuscode: {code}")),
        }
    }
    Outcome::Failure(format!("Get {:?}: stopped after 10 redirects", target.url()))
}

fn redirected(from: &HttpTarget, location: &str) -> Option<HttpTarget> {
    let uri: http::Uri = location.parse().ok()?;
    let mut next = from.clone();
    next.path = match (
        uri.path_and_query().map(|p| p.as_str().to_owned()),
        location.starts_with('/') || uri.scheme().is_some(),
    ) {
        (Some(path), true) => path,
        // Relative to the directory of what was asked.
        _ => format!(
            "{}/{location}",
            from.path.rsplit_once('/').map_or("", |(directory, _)| directory)
        ),
    };
    if let Some(scheme) = uri.scheme_str() {
        next.tls = scheme == "https";
        next.host = uri.host()?.trim_matches(['[', ']']).to_owned();
        next.port = uri.port_u16().unwrap_or(if next.tls { 443 } else { 80 });
    }
    Some(next)
}

/// Probes do not check certificates: the pod is who its address says.
fn trusting_config() -> Arc<rustls::ClientConfig> {
    static CONFIG: OnceLock<Arc<rustls::ClientConfig>> = OnceLock::new();
    CONFIG
        .get_or_init(|| {
            let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
            let verifier = Arc::new(Trusting(provider.clone()));
            let config = rustls::ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .expect("the provider supports the default protocol versions")
                .dangerous()
                .with_custom_certificate_verifier(verifier)
                .with_no_client_auth();
            Arc::new(config)
        })
        .clone()
}

#[derive(Debug)]
struct Trusting(Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &rustls::pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &rustls::pki_types::CertificateDer<'_>,
        dss: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &rustls::pki_types::CertificateDer<'_>,
        dss: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn target(port: u16, path: &str) -> HttpTarget {
        HttpTarget {
            tls: false,
            host: "127.0.0.1".into(),
            port,
            path: path.into(),
            headers: vec![],
        }
    }

    /// Answers each connection with the next of `answers`.
    async fn server(answers: Vec<String>) -> u16 {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            for answer in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut buffer = [0; 1024];
                let _ = stream.read(&mut buffer).await;
                let _ = stream
                    .write_all(answer.replace("PORT", &port.to_string()).as_bytes())
                    .await;
            }
        });
        port
    }

    fn answer(head: &str) -> String {
        format!("HTTP/1.1 {head}\r\nContent-Length: 2\r\n\r\nok")
    }

    #[tokio::test]
    async fn codes() {
        let check = async |answers: Vec<String>, expected: Outcome| {
            let port = server(answers).await;
            assert_eq!(
                probe(&target(port, "/x"), Duration::from_secs(5), None).await,
                expected
            );
        };
        check(vec![answer("200 OK")], Outcome::Success).await;
        check(
            vec![answer("503 No")],
            Outcome::Failure("HTTP probe failed with statuscode: 503".into()),
        )
        .await;
        check(
            vec![answer("302 F\r\nLocation: /y"), answer("200 OK")],
            Outcome::Success,
        )
        .await;
        check(
            vec![
                answer("302 F\r\nLocation: http://127.0.0.1:PORT/y"),
                answer("404 N"),
            ],
            Outcome::Failure("HTTP probe failed with statuscode: 404".into()),
        )
        .await;
        check(
            vec![answer("302 F\r\nLocation: http://elsewhere/y")],
            Outcome::Warning("Probe terminated redirects, Response body: ok".into()),
        )
        .await;
    }

    #[tokio::test]
    async fn refusals_read_as_in_go() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let expected = format!(
            "Get \"http://127.0.0.1:{port}/x\": dial tcp 127.0.0.1:{port}: connect: connection refused"
        );
        assert_eq!(
            probe(&target(port, "/x"), Duration::from_secs(5), None).await,
            Outcome::Failure(expected)
        );
    }

    #[tokio::test]
    async fn patience_waits_for_the_listener() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let late = tokio::spawn(async move {
            tokio::task::yield_now().await;
            let listener = tokio::net::TcpListener::bind(address).await.unwrap();
            listener.accept().await.unwrap()
        });
        let until = Instant::now() + Duration::from_secs(20);
        assert!(
            dial("127.0.0.1", address.port(), until, Some(until))
                .await
                .is_ok()
        );
        late.await.unwrap();
    }

    #[test]
    fn targets() {
        let container: Container =
            serde_json::from_value(json!({"name": "c", "ports": [{"name": "web", "containerPort": 8080}]}))
                .unwrap();
        let action: HTTPGetAction =
            serde_json::from_value(json!({"port": "web", "path": "healthz", "scheme": "HTTPS",
            "httpHeaders": [{"name": "Accept", "value": ""}, {"name": "X", "value": "1"}]}))
            .unwrap();
        let target = HttpTarget::new(&action, &container, "fd00::1", "kube-probe").unwrap();
        assert_eq!(target.url(), "https://[fd00::1]:8080/healthz");
        assert_eq!(
            target.headers,
            [
                ("X".to_owned(), "1".to_owned()),
                ("User-Agent".to_owned(), "kube-probe/1.36".to_owned())
            ]
        );
        assert!(container_port(&IntOrString::String("no".into()), &container).is_err());
        assert!(container_port(&IntOrString::Int(70000), &container).is_err());
    }
}
