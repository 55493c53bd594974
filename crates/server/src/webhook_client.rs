//! The call of a webhook by its `clientConfig`: a JSON document is posted over TLS, to a URL or to a service of the
//! cluster, and a JSON document comes back. What went wrong is told in upstream's words, because users look for them.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method};
use serde_json::Value;
use skiff_https::{Answer, Call, CallTarget, Client};
use skiff_registry::{Registry, object};

use crate::aggregation::resolve::resolve;
use crate::webhook_target::{clean, of_url, redirected};

/// As whom the API server calls webhooks, those of conversions too.
const USER_AGENT: HeaderValue = HeaderValue::from_static("kube-apiserver-admission");
/// Upstream's client gives up then.
const REDIRECTS: usize = 10;

pub struct WebhookClient {
    registry: Arc<Registry>,
    client: Client,
    target: Target,
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
            client: Client::new(tls(object::at_str(config, &["caBundle"]))),
            target,
        }
    }

    /// Posts a document and reads the answer. The timeout is told to the webhook, too.
    pub async fn call(&self, document: &Value, timeout: Duration) -> Result<Value, String> {
        let (place, mut url) = self.place(timeout.as_secs()).await?;
        let body = Bytes::from(document.to_string());
        let answer = self.follow(place, body, timeout, &mut url).await;
        answer.map_err(|why| format!("Post \"{url}\": {why}"))?.document()
    }

    /// Sends the document, and sends it again where an answer says so, within the time of one call. As with every
    /// client, a redirect of the old kind turns a POST into a GET. `url` is where it went last.
    async fn follow(
        &self,
        mut place: CallTarget,
        mut body: Bytes,
        timeout: Duration,
        url: &mut String,
    ) -> Result<Answer, String> {
        let until = tokio::time::Instant::now() + timeout;
        let mut method = Method::POST;
        let mut headers = HeaderMap::new();
        headers.insert(http::header::USER_AGENT, USER_AGENT);
        for _ in 0..REDIRECTS {
            let left = until.saturating_duration_since(tokio::time::Instant::now());
            let call = Call {
                method: method.clone(),
                ..Call::post(&place, &headers, body.clone(), left)
            };
            let answer = self.client.call(call).await;
            let answer = answer.map_err(|failure| failure.to_string())?;
            let location = match (answer.code, &answer.location) {
                (301..=303 | 307 | 308, Some(location)) => location,
                _ => return Ok(answer),
            };
            if answer.code <= 303 {
                method = Method::GET;
                body = Bytes::new();
            }
            url.clone_from(location);
            place = redirected(&place, location)?;
        }
        Err(format!("stopped after {REDIRECTS} redirects"))
    }

    /// Where a call goes, and the URL as it is shown.
    async fn place(&self, seconds: u64) -> Result<(CallTarget, String), String> {
        match &self.target {
            Target::Url(url) => of_url(url, seconds),
            Target::Service {
                namespace,
                name,
                path,
                port,
            } => {
                let server_name = format!("{name}.{namespace}.svc");
                let path = clean(path);
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
                let place = CallTarget {
                    address,
                    host: format!("{server_name}:{port}"),
                    server_name: Some(server_name),
                    path: format!("{path}?timeout={seconds}s"),
                };
                Ok((place, url))
            }
        }
    }
}

/// Trusts the bundle, or what the machine trusts if there is none.
fn tls(ca_bundle: &str) -> Result<Arc<rustls::ClientConfig>, String> {
    if ca_bundle.is_empty() {
        return skiff_https::trusting(None);
    }
    let bytes = base64::engine::general_purpose::STANDARD
        .decode(ca_bundle)
        .map_err(|error| error.to_string())?;
    let pem = String::from_utf8(bytes).map_err(|error| error.to_string())?;
    skiff_https::trusting(Some(&pem))
}
