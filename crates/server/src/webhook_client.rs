//! The call of a webhook by its `clientConfig`: a JSON document is posted over TLS, to a URL or to a service of the
//! cluster, and a JSON document comes back. What went wrong is told in upstream's words, because users look for them.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use bytes::Bytes;
use http::HeaderMap;
use serde_json::Value;
use skiff_https::{Call, Client, Place};
use skiff_registry::{Registry, object};

use crate::aggregation::resolve::resolve;

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
        let (place, url) = self.place(timeout.as_secs()).await?;
        let body = Bytes::from(document.to_string());
        let headers = HeaderMap::new();
        let answer = self
            .client
            .call(Call::post(&place, &headers, body, timeout))
            .await;
        answer
            .map_err(|failure| format!("Post \"{url}\": {failure}"))?
            .document()
    }

    /// Where a call goes, and the URL as it is shown.
    async fn place(&self, seconds: u64) -> Result<(Place, String), String> {
        match &self.target {
            Target::Url(url) => {
                let joined = if url.contains('?') { '&' } else { '?' };
                let url = format!("{url}{joined}timeout={seconds}s");
                Ok((Place::of(&url)?, url))
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
                let place = Place {
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
