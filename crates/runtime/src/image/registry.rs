//! The client's side of the OCI distribution protocol: manifests and blobs of one repository, with the
//! tokens that it takes. Every answer is cut at its limit while it is read.

use super::limits::Limits;
use super::pull::Credentials;
use super::reference::Reference;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use reqwest::{Response, StatusCode, Url};
use std::time::Duration;

const ACCEPTED: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json";
/// Of an answer that is an error, this much is read.
const MAX_ERROR: u64 = 64 << 10;
/// And this much is told.
const MAX_MESSAGE: usize = 300;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("not found")]
    NotFound,
    #[error("pull access denied, repository does not exist or may require authorization: {0}")]
    Denied(String),
    #[error("unexpected status from GET request to {url}: {status}{message}")]
    Status {
        url: String,
        status: StatusCode,
        message: String,
    },
    #[error("{what} is larger than {limit} bytes")]
    TooLarge { what: String, limit: u64 },
    #[error("{what} did not arrive within {} seconds", .limit.as_secs())]
    TooSlow { what: String, limit: Duration },
    #[error("{0}")]
    Protocol(String),
    #[error(transparent)]
    Request(#[from] reqwest::Error),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl Error {
    /// Whether a second try can help.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            // A refused connection is a wrong address more often than a restart; the kubelet tries again.
            Error::Request(error) => !error.is_connect() && !error.is_builder() && !error.is_redirect(),
            Error::Status { status, .. } => status.is_server_error() || status.as_u16() == 429,
            Error::Io(error) => error.kind() != std::io::ErrorKind::StorageFull,
            _ => false,
        }
    }
}

pub(super) struct Registry {
    http: reqwest::Client,
    /// `https://host/v2/repository`.
    base: String,
    repository: String,
    secure: bool,
    credentials: Credentials,
    limits: Limits,
    /// What the last request was let in with.
    authorization: tokio::sync::Mutex<Option<HeaderValue>>,
}

impl Registry {
    pub(super) fn new(
        reference: &Reference,
        credentials: Credentials,
        limits: &Limits,
    ) -> Result<Registry, Error> {
        let host = reference.api_host();
        // COMPAT: like containerd, plain HTTP is spoken to registries on this machine, HTTPS to all others.
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let local = name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
        let http = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(30))
            .read_timeout(Duration::from_secs(60))
            .user_agent(concat!("skiff/", env!("CARGO_PKG_VERSION")))
            // No redirect to plain HTTP either.
            .https_only(!local)
            .build()?;
        let scheme = if local { "http" } else { "https" };
        Ok(Registry {
            http,
            base: format!("{scheme}://{host}/v2/{}", reference.repository()),
            repository: reference.repository().to_owned(),
            secure: !local,
            credentials,
            limits: limits.clone(),
            authorization: tokio::sync::Mutex::default(),
        })
    }

    /// By tag or digest. The digest is for the caller to check.
    pub(super) async fn manifest(&self, reference: &str) -> Result<Vec<u8>, Error> {
        let url = format!("{}/manifests/{reference}", self.base);
        self.in_time("the manifest", async {
            let response = self.get(&url, ACCEPTED).await?;
            read(response, "the manifest", self.limits.document_bytes).await
        })
        .await
    }

    /// A small blob, in memory. `size` is what its manifest says.
    pub(super) async fn small_blob(&self, digest: &str, size: u64) -> Result<Vec<u8>, Error> {
        let what = format!("blob {digest}");
        let limit = self.limits.document_bytes.min(size);
        self.in_time(&what, async {
            let response = self.blob(digest).await?;
            read(response, &what, limit).await
        })
        .await
    }

    /// The answer whose body is the blob, without a limit yet.
    pub(super) async fn blob(&self, digest: &str) -> Result<Response, Error> {
        self.get(&format!("{}/blobs/{digest}", self.base), "*/*").await
    }

    async fn in_time<T>(&self, what: &str, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let limit = self.limits.document_timeout;
        tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
            Err(Error::TooSlow {
                what: what.to_owned(),
                limit,
            })
        })
    }

    /// Asks, and asks again with what the registry wants to see.
    async fn get(&self, url: &str, accept: &'static str) -> Result<Response, Error> {
        let send = async |authorization: Option<HeaderValue>| {
            let mut request = self.http.get(url).header(ACCEPT, accept);
            if let Some(authorization) = authorization {
                request = request.header(AUTHORIZATION, authorization);
            }
            request.send().await
        };
        let mut response = send(self.authorization.lock().await.clone()).await?;
        if response.status() == StatusCode::UNAUTHORIZED
            && let Some(authorization) = self.authorize(response.headers()).await?
        {
            *self.authorization.lock().await = Some(authorization.clone());
            response = send(Some(authorization)).await?;
        }
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let message = error_message(response).await;
        Err(match status {
            StatusCode::NOT_FOUND => Error::NotFound,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Error::Denied(if message.is_empty() {
                format!("authorization failed ({status})")
            } else {
                format!("server message: {message}")
            }),
            status => Error::Status {
                url: url.to_owned(),
                status,
                message: if message.is_empty() {
                    message
                } else {
                    format!(": {message}")
                },
            },
        })
    }

    /// `None` if there is nothing that the registry would take.
    async fn authorize(&self, headers: &HeaderMap) -> Result<Option<HeaderValue>, Error> {
        let challenges: Vec<Challenge> = headers
            .get_all(WWW_AUTHENTICATE)
            .iter()
            .filter_map(|value| Challenge::parse(value.to_str().ok()?))
            .collect();
        let has_password = !self.credentials.username.is_empty();
        if let Some(bearer) = challenges.iter().find(|challenge| challenge.scheme == "bearer") {
            let token = if has_password || self.credentials.registry_token.is_empty() {
                self.token(bearer).await?
            } else {
                self.credentials.registry_token.clone()
            };
            return secret(format!("Bearer {token}")).map(Some);
        }
        if has_password && challenges.iter().any(|challenge| challenge.scheme == "basic") {
            return secret(self.basic()).map(Some);
        }
        Ok(None)
    }

    fn basic(&self) -> String {
        use base64::Engine;
        let Credentials {
            username, password, ..
        } = &self.credentials;
        let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{username}:{password}"));
        format!("Basic {encoded}")
    }

    async fn token(&self, challenge: &Challenge) -> Result<String, Error> {
        let realm = challenge.value("realm").unwrap_or_default();
        let mut url = Url::parse(realm)
            .ok()
            .filter(|url| matches!(url.scheme(), "https" | "http"))
            .ok_or_else(|| Error::Protocol(format!("the registry names {realm:?} as its token server")))?;
        if self.secure && url.scheme() != "https" {
            return Err(Error::Protocol(
                "the registry names a token server without TLS".into(),
            ));
        }
        let own = format!("repository:{}:pull", self.repository);
        url.query_pairs_mut()
            .append_pair("scope", challenge.value("scope").unwrap_or(&own));
        if let Some(service) = challenge.value("service") {
            url.query_pairs_mut().append_pair("service", service);
        }
        let what = "the answer of the token server";
        let mut request = self.http.get(url);
        if !self.credentials.username.is_empty() {
            request = request.header(AUTHORIZATION, secret(self.basic())?);
        }
        let response = request.send().await?;
        let status = response.status();
        if !status.is_success() {
            let message = error_message(response).await;
            return Err(if status.is_client_error() && status.as_u16() != 429 {
                Error::Denied(format!("failed to fetch a token: {status} {message}"))
            } else {
                Error::Status {
                    url: realm.to_owned(),
                    status,
                    message: format!(": {message}"),
                }
            });
        }
        #[derive(serde::Deserialize)]
        struct Answer {
            #[serde(default)]
            token: String,
            #[serde(default)]
            access_token: String,
        }
        let body = read(response, what, self.limits.token_bytes).await?;
        let answer: Answer =
            serde_json::from_slice(&body).map_err(|error| Error::Protocol(format!("{what}: {error}")))?;
        match (answer.token.is_empty(), answer.access_token.is_empty()) {
            (false, _) => Ok(answer.token),
            (true, false) => Ok(answer.access_token),
            (true, true) => Err(Error::Protocol(format!("{what} holds no token"))),
        }
    }
}

fn secret(value: String) -> Result<HeaderValue, Error> {
    let mut value = HeaderValue::try_from(value)
        .map_err(|_| Error::Protocol("a token or password that no header can hold".into()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// The whole body, or an error as soon as it is longer than `limit`.
async fn read(mut response: Response, what: &str, limit: u64) -> Result<Vec<u8>, Error> {
    let too_large = || Error::TooLarge {
        what: what.to_owned(),
        limit,
    };
    if response.content_length().is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() as u64 + chunk.len() as u64 > limit {
            return Err(too_large());
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// What a registry says about an error, in one short line. An error of reading it says nothing.
async fn error_message(mut response: Response) -> String {
    let mut body = Vec::new();
    while (body.len() as u64) < MAX_ERROR
        && let Ok(Ok(Some(chunk))) = tokio::time::timeout(Duration::from_secs(10), response.chunk()).await
    {
        body.extend_from_slice(&chunk);
    }
    #[derive(serde::Deserialize)]
    struct Envelope {
        errors: Vec<Entry>,
    }
    #[derive(serde::Deserialize)]
    struct Entry {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let text = match serde_json::from_slice::<Envelope>(&body) {
        Ok(Envelope { errors }) => errors
            .iter()
            .map(|entry| format!("{}: {}", entry.code, entry.message))
            .collect::<Vec<_>>()
            .join(", "),
        Err(_) => String::from_utf8_lossy(&body).into_owned(),
    };
    text.chars()
        .map(|character| if character.is_control() { ' ' } else { character })
        .take(MAX_MESSAGE)
        .collect::<String>()
        .trim()
        .to_owned()
}

/// `Bearer realm="https://…",service="…"` of a WWW-Authenticate header.
#[derive(Debug, PartialEq)]
struct Challenge {
    /// In lower case.
    scheme: String,
    values: Vec<(String, String)>,
}

impl Challenge {
    fn parse(header: &str) -> Option<Challenge> {
        let header = header.trim();
        let (scheme, mut rest) = header.split_once(' ').unwrap_or((header, ""));
        if scheme.is_empty() {
            return None;
        }
        let mut values = Vec::new();
        loop {
            rest = rest.trim_start_matches([' ', ',', '\t']);
            let Some((key, after)) = rest.split_once('=') else {
                break;
            };
            let value;
            (value, rest) = match after.trim_start().strip_prefix('"') {
                Some(quoted) => unquote(quoted),
                None => {
                    let end = after.find([',', ' ']).unwrap_or(after.len());
                    (after[..end].to_owned(), &after[end..])
                }
            };
            values.push((key.trim().to_ascii_lowercase(), value));
        }
        Some(Challenge {
            scheme: scheme.to_ascii_lowercase(),
            values,
        })
    }

    fn value(&self, key: &str) -> Option<&str> {
        let found = self.values.iter().find(|(have, _)| have == key);
        found.map(|(_, value)| value.as_str())
    }
}

/// Up to the closing quote, and what follows it.
fn unquote(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            other => value.push(other),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges() {
        let check = |header: &str, scheme: &str, expected: &[(&str, &str)]| {
            let values = expected
                .iter()
                .map(|(key, value)| (key.to_string(), value.to_string()))
                .collect();
            let scheme = scheme.to_owned();
            assert_eq!(
                Challenge::parse(header),
                Some(Challenge { scheme, values }),
                "{header}"
            );
        };
        check("Basic", "basic", &[]);
        check("Basic realm=\"a b\"", "basic", &[("realm", "a b")]);
        check(
            "Bearer realm=\"https://auth.docker.io/token\",service=\"registry.docker.io\", scope=\"repository:a/b:pull,push\"",
            "bearer",
            &[
                ("realm", "https://auth.docker.io/token"),
                ("service", "registry.docker.io"),
                ("scope", "repository:a/b:pull,push"),
            ],
        );
        check(
            "bearer Realm=x,service=y",
            "bearer",
            &[("realm", "x"), ("service", "y")],
        );
        check("Bearer realm=\"a\\\"b", "bearer", &[("realm", "a\"b")]);
        check("Bearer realm", "bearer", &[]);
        check("Bearer =,=,", "bearer", &[("", ""), ("", "")]);
        assert_eq!(Challenge::parse("  "), None);
    }
}
