//! The call of a webhook by its `clientConfig`: a JSON document is posted over TLS, to a URL or to a service of the
//! cluster, and a JSON document comes back. What went wrong is told in upstream's words, because users look for them.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use serde_json::Value;
use skiff_registry::{Registry, object};

use crate::aggregation::resolve::resolve;

/// No answer is larger than a list of the largest objects that a client may send.
const ANSWER_LIMIT: usize = 64 * 1024 * 1024;
/// Connections that are kept for the next call.
const IDLE_LIMIT: usize = 8;

pub struct WebhookClient {
    registry: Arc<Registry>,
    tls: Result<Arc<rustls::ClientConfig>, String>,
    target: Target,
    /// Open connections by address. Leaf lock: never held over an await.
    idle: Mutex<Vec<(String, SendRequest<Full<Bytes>>)>>,
}

enum Target {
    Url(String),
    Service {
        namespace: String,
        name: String,
        path: String,
        port: u16,
    },
}

/// Where a call goes: the address to connect to, the name of the certificate, and the URL as it is shown.
struct Place {
    address: String,
    server_name: String,
    host: String,
    path: String,
    url: String,
}

impl WebhookClient {
    pub fn new(registry: Arc<Registry>, config: &Value) -> WebhookClient {
        let target = match object::at_str(config, &["url"]) {
            "" => {
                let text = |key: &str| object::at_str(config, &["service", key]).to_owned();
                let port = object::at(config, &["service", "port"])
                    .and_then(Value::as_u64)
                    .unwrap_or(443);
                Target::Service {
                    namespace: text("namespace"),
                    name: text("name"),
                    path: text("path"),
                    port: u16::try_from(port).unwrap_or(443),
                }
            }
            url => Target::Url(url.to_owned()),
        };
        WebhookClient {
            registry,
            tls: tls(object::at_str(config, &["caBundle"])),
            target,
            idle: Mutex::default(),
        }
    }

    /// Posts a document and reads the answer. The timeout is told to the webhook, too.
    pub async fn call(&self, document: &Value, timeout: Duration) -> Result<Value, String> {
        let place = self.place(timeout.as_secs()).await?;
        let posted = |why: String| format!("Post \"{}\": {why}", place.url);
        let body = Bytes::from(document.to_string());
        match tokio::time::timeout(timeout, self.post(&place, body)).await {
            Err(_) => Err(posted("context deadline exceeded".to_owned())),
            Ok(Err(why)) => Err(posted(why)),
            Ok(Ok(answer)) if answer.code / 100 == 2 => answer.document(),
            Ok(Ok(answer)) => Err(answer.refusal()),
        }
    }

    async fn place(&self, seconds: u64) -> Result<Place, String> {
        match &self.target {
            Target::Url(url) => {
                let uri: http::Uri = url.parse().map_err(|error| format!("{error}"))?;
                let host = uri.host().unwrap_or("").to_owned();
                let port = uri.port_u16().unwrap_or(443);
                let path = uri.path_and_query().map_or("/", |p| p.as_str());
                let joined = if path.contains('?') { '&' } else { '?' };
                Ok(Place {
                    address: format!("{host}:{port}"),
                    server_name: host.trim_matches(['[', ']']).to_owned(),
                    host: uri.authority().map(|a| a.to_string()).unwrap_or_default(),
                    path: format!("{path}{joined}timeout={seconds}s"),
                    url: format!("{url}{joined}timeout={seconds}s"),
                })
            }
            Target::Service {
                namespace,
                name,
                path,
                port,
            } => {
                let server_name = format!("{name}.{namespace}.svc");
                let path = if path.starts_with('/') {
                    path.clone()
                } else {
                    format!("/{path}")
                };
                let url = format!("https://{server_name}:{port}{path}?timeout={seconds}s");
                let found = resolve(&self.registry, namespace, name, *port).await;
                let (address, to) = found.map_err(|status| match status.code {
                    404 => format!("Post \"{url}\": service \"{name}\" not found"),
                    _ => format!("Post \"{url}\": {}", status.message),
                })?;
                let address = if address.contains(':') {
                    format!("[{address}]:{to}")
                } else {
                    format!("{address}:{to}")
                };
                Ok(Place {
                    address,
                    host: format!("{server_name}:{port}"),
                    server_name,
                    path: format!("{path}?timeout={seconds}s"),
                    url,
                })
            }
        }
    }

    async fn post(&self, place: &Place, body: Bytes) -> Result<Answer, String> {
        // A connection that was kept may be closed by now: then a new one is made, once.
        while let Some(sender) = self.kept(&place.address) {
            match exchange(sender, place, body.clone()).await {
                Ok((sender, answer)) => return Ok(self.keep(place, sender, answer)),
                Err(Failed::Unsent) => {}
                Err(Failed::Sent(why)) => return Err(why),
            }
        }
        let sender = self.connect(place).await?;
        match exchange(sender, place, body).await {
            Ok((sender, answer)) => Ok(self.keep(place, sender, answer)),
            Err(Failed::Unsent) => Err("EOF".to_owned()),
            Err(Failed::Sent(why)) => Err(why),
        }
    }

    fn kept(&self, address: &str) -> Option<SendRequest<Full<Bytes>>> {
        let mut idle = self.idle.lock();
        idle.retain(|(_, sender)| !sender.is_closed());
        let at = idle.iter().position(|(to, _)| to == address)?;
        Some(idle.swap_remove(at).1)
    }

    fn keep(&self, place: &Place, sender: SendRequest<Full<Bytes>>, answer: Answer) -> Answer {
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_LIMIT && !sender.is_closed() {
            idle.push((place.address.clone(), sender));
        }
        answer
    }

    async fn connect(&self, place: &Place) -> Result<SendRequest<Full<Bytes>>, String> {
        let tls = self.tls.clone()?;
        let stream = tokio::net::TcpStream::connect(&place.address)
            .await
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::ConnectionRefused => {
                    format!("dial tcp {}: connect: connection refused", place.address)
                }
                _ => format!("dial tcp {}: {error}", place.address),
            })?;
        let _ = stream.set_nodelay(true);
        let name = ServerName::try_from(place.server_name.clone()).map_err(|error| error.to_string())?;
        let stream = tokio_rustls::TlsConnector::from(tls)
            .connect(name, stream)
            .await
            .map_err(|error| tls_problem(&error, &place.server_name))?;
        let (sender, connection) =
            hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream))
                .await
                .map_err(|error| error.to_string())?;
        // Ends with the connection, which ends when nobody holds its sender.
        tokio::spawn(connection);
        Ok(sender)
    }
}

enum Failed {
    /// The connection was closed before the request went out.
    Unsent,
    Sent(String),
}

async fn exchange(
    mut sender: SendRequest<Full<Bytes>>,
    place: &Place,
    body: Bytes,
) -> Result<(SendRequest<Full<Bytes>>, Answer), Failed> {
    if sender.ready().await.is_err() {
        return Err(Failed::Unsent);
    }
    let sent = |why: String| Failed::Sent(why);
    let request = http::Request::post(&place.path)
        .header("host", &place.host)
        .header("content-type", "application/json")
        .header("accept", "application/json, */*")
        .body(Full::new(body))
        .map_err(|error| sent(error.to_string()))?;
    let answer = sender.send_request(request).await.map_err(|error| {
        if error.is_canceled() {
            Failed::Unsent
        } else if error.is_incomplete_message() {
            sent("EOF".to_owned())
        } else {
            sent(error.to_string())
        }
    })?;
    let code = answer.status().as_u16();
    let content_type = answer.headers().get("content-type");
    let content_type = content_type.and_then(|value| value.to_str().ok());
    let content_type = content_type.unwrap_or("").to_owned();
    let body = Limited::new(answer.into_body(), ANSWER_LIMIT).collect().await;
    let body = body.map_err(|error| sent(error.to_string()))?;
    let answer = Answer {
        code,
        content_type,
        body: body.to_bytes(),
    };
    Ok((sender, answer))
}

struct Answer {
    code: u16,
    content_type: String,
    body: Bytes,
}

impl Answer {
    fn document(&self) -> Result<Value, String> {
        if self.body.is_empty() {
            return Err(format!(
                "0-length response with status code: {} and content type: {}",
                self.code, self.content_type
            ));
        }
        // COMPAT: upstream takes what is no JSON for the YAML of a string.
        serde_json::from_slice(&self.body).map_err(|_| {
            "couldn't get version/kind; json parse error: json: cannot unmarshal string into Go value of type struct { APIVersion string \"json:\\\"apiVersion,omitempty\\\"\"; Kind string \"json:\\\"kind,omitempty\\\"\" }".to_owned()
        })
    }

    /// What upstream's client makes of an answer that is no success.
    fn refusal(&self) -> String {
        let told: Option<Value> = serde_json::from_slice(&self.body).ok();
        let status = told.as_ref().filter(|told| told["kind"] == "Status");
        if let Some(message) = status.and_then(|status| status["message"].as_str()) {
            return message.to_owned();
        }
        match self.code {
            401 => "the server has asked for the client to provide credentials".to_owned(),
            404 => "the server could not find the requested resource".to_owned(),
            405 => "the server does not allow this method on the requested resource".to_owned(),
            500.. => {
                let is_text = self.content_type.is_empty() || self.content_type.starts_with("text/");
                let text = if is_text {
                    String::from_utf8_lossy(&self.body).trim().to_owned()
                } else {
                    "unknown".to_owned()
                };
                format!("an error on the server ({text:?}) has prevented the request from succeeding")
            }
            _ => "the server rejected our request for an unknown reason".to_owned(),
        }
    }
}

/// Where systems keep the certificates that they trust.
const SYSTEM_BUNDLES: [&str; 2] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
];

/// Trusts the bundle, or what the machine trusts if there is none.
fn tls(ca_bundle: &str) -> Result<Arc<rustls::ClientConfig>, String> {
    let pem = if ca_bundle.is_empty() {
        let found = SYSTEM_BUNDLES
            .iter()
            .find_map(|path| std::fs::read_to_string(path).ok());
        found.ok_or("tls: failed to verify certificate: x509: certificate signed by unknown authority")?
    } else {
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(ca_bundle)
            .map_err(|error| error.to_string())?;
        String::from_utf8(bytes).map_err(|error| error.to_string())?
    };
    let config = skiff_pki::pinning_client_config(&pem, None);
    config.map(Arc::new).map_err(|error| error.to_string())
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
