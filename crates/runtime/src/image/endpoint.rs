//! One host that a registry's images are asked of: how it is spoken to, and what it lets this client in for. Nothing of
//! what one host is told for its authorization goes to another.

use super::challenge::Challenge;
use super::credentials::Credentials;
use super::hosts::{self, Host};
use super::limits::Limits;
use super::registry::{Error, error_message, read};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RANGE, WWW_AUTHENTICATE};
use reqwest::{Client, Method, Response, StatusCode, Url};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How this client calls itself to token servers.
const CLIENT_ID: &str = "skiff";

pub(super) struct Endpoint {
    http: Client,
    host: Host,
    repository: String,
    /// Asks a proxy for images of this registry.
    namespace: Option<String>,
    /// COMPAT: a host of plain HTTP for which TLS is configured is tried by TLS first, as containerd does.
    tls_first: bool,
    /// It has turned out that such a host knows no TLS.
    is_plain: AtomicBool,
    credentials: Credentials,
    limits: Limits,
    /// What the last request was let in with.
    authorization: tokio::sync::Mutex<Option<HeaderValue>>,
}

/// What is asked of a host.
pub(super) struct Request<'a> {
    pub(super) method: Method,
    /// Below the repository: `blobs/sha256:…`.
    pub(super) path: &'a str,
    pub(super) accept: &'static str,
    /// Bytes that are here already.
    pub(super) offset: u64,
}

impl<'a> Request<'a> {
    pub(super) fn get(path: &'a str, accept: &'static str) -> Request<'a> {
        Request {
            method: Method::GET,
            path,
            accept,
            offset: 0,
        }
    }
}

impl Endpoint {
    pub(super) fn new(
        host: Host,
        registry: &str,
        repository: &str,
        credentials: &Credentials,
        limits: &Limits,
    ) -> Result<Endpoint, Error> {
        let is_http = host.address.scheme() == "http";
        let tls_first = is_http && host.configures_tls() && host.address.port_or_known_default() != Some(80);
        // No redirect to plain HTTP either.
        let builder = Client::builder()
            .connect_timeout(host.connect_timeout)
            .read_timeout(Duration::from_secs(60))
            .user_agent(concat!("skiff/", env!("CARGO_PKG_VERSION")))
            .https_only(!is_http);
        let credentials = if credentials.are_for(&authority(&host.address)) {
            credentials.clone()
        } else {
            Credentials::default()
        };
        Ok(Endpoint {
            http: with_tls(builder, &host)?.build()?,
            repository: repository.to_owned(),
            namespace: host.is_proxy_of(registry).then(|| registry.to_owned()),
            tls_first,
            is_plain: AtomicBool::new(false),
            credentials,
            limits: limits.clone(),
            authorization: tokio::sync::Mutex::default(),
            host,
        })
    }

    pub(super) fn pulls(&self) -> bool {
        self.host.pull
    }

    pub(super) fn resolves(&self) -> bool {
        self.host.pull && self.host.resolve
    }

    /// Where it is, for messages.
    pub(super) fn name(&self) -> String {
        authority(&self.host.address)
    }

    fn uses_tls(&self) -> bool {
        self.host.address.scheme() == "https" || (self.tls_first && !self.is_plain.load(Ordering::Relaxed))
    }

    fn url(&self, path: &str) -> String {
        let scheme = if self.uses_tls() { "https" } else { "http" };
        let (authority, prefix) = (authority(&self.host.address), &self.host.path);
        let mut url = format!("{scheme}://{authority}{prefix}/{}/{path}", self.repository);
        if let Some(registry) = &self.namespace {
            // Its only character that is not plain is the colon of a port.
            url = format!("{url}?ns={}", registry.replace(':', "%3A"));
        }
        url
    }

    /// Asks, and asks again with what the registry wants to see. An answer that is no success is an error.
    pub(super) async fn get(&self, request: &Request<'_>) -> Result<Response, Error> {
        let known = self.authorization.lock().await.clone();
        let mut response = self.send(request, known).await?;
        if response.status() == StatusCode::UNAUTHORIZED
            // Whoever a redirect led to says nothing about who is to see the credentials.
            && authority(response.url()) == authority(&self.host.address)
            && let Some(authorization) = self.authorize(response.headers()).await?
        {
            *self.authorization.lock().await = Some(authorization.clone());
            response = self.send(request, Some(authorization)).await?;
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
                method: request.method.clone(),
                url: self.url(request.path),
                status,
                message: if message.is_empty() {
                    message
                } else {
                    format!(": {message}")
                },
            },
        })
    }

    async fn send(
        &self,
        request: &Request<'_>,
        authorization: Option<HeaderValue>,
    ) -> Result<Response, Error> {
        let mut headers = self.host.headers.clone();
        headers.append(ACCEPT, HeaderValue::from_static(request.accept));
        if let Some(authorization) = authorization {
            headers.insert(AUTHORIZATION, authorization);
        }
        if request.offset > 0 {
            headers.insert(RANGE, header(format!("bytes={}-", request.offset))?);
        }
        loop {
            let encrypted = self.uses_tls();
            let sending = self
                .http
                .request(request.method.clone(), self.url(request.path))
                .headers(headers.clone())
                .send();
            match sending.await {
                Err(error) if self.tls_first && encrypted && knows_no_tls(&error) => {
                    self.is_plain.store(true, Ordering::Relaxed);
                }
                sent => return Ok(sent?),
            }
        }
    }

    /// `None` if there is nothing that the registry would take.
    async fn authorize(&self, headers: &HeaderMap) -> Result<Option<HeaderValue>, Error> {
        let challenges: Vec<Challenge> = headers
            .get_all(WWW_AUTHENTICATE)
            .iter()
            .filter_map(|value| Challenge::parse(value.to_str().ok()?))
            .collect();
        if let Some(bearer) = challenges.iter().find(|challenge| challenge.scheme == "bearer") {
            let token = match self.credentials.bearer() {
                Some(token) => token.to_owned(),
                None => self.token(bearer).await?,
            };
            return secret(format!("Bearer {token}")).map(Some);
        }
        if let Some(basic) = self.credentials.basic()
            && challenges.iter().any(|challenge| challenge.scheme == "basic")
        {
            return secret(basic).map(Some);
        }
        Ok(None)
    }

    /// Asks the token server that the host names.
    async fn token(&self, challenge: &Challenge) -> Result<String, Error> {
        let realm = challenge.value("realm").unwrap_or_default();
        let url = Url::parse(realm)
            .ok()
            .filter(|url| matches!(url.scheme(), "https" | "http"))
            .ok_or_else(|| Error::Protocol(format!("the registry names {realm:?} as its token server")))?;
        if self.uses_tls() && url.scheme() != "https" {
            return Err(Error::Protocol(
                "the registry names a token server without TLS".into(),
            ));
        }
        let own = format!("repository:{}:pull", self.repository);
        let scope = challenge.value("scope").unwrap_or(&own);
        let service = challenge.value("service");
        let mut response = None;
        if let Some(refresh_token) = self.credentials.refresh_token() {
            let granted = self.refresh(url.clone(), scope, service, refresh_token).await?;
            // COMPAT: token servers that take no POST; they may take the token as a password.
            if !matches!(granted.status().as_u16(), 400 | 401 | 404) {
                response = Some(granted);
            }
        }
        let response = match response {
            Some(response) => response,
            None => self.fetch_token(url, scope, service).await?,
        };
        let status = response.status();
        if !status.is_success() {
            let message = error_message(response).await;
            return Err(if status.is_client_error() && status.as_u16() != 429 {
                Error::Denied(format!("failed to fetch a token: {status} {message}"))
            } else {
                Error::Status {
                    method: Method::GET,
                    url: realm.to_owned(),
                    status,
                    message: format!(": {message}"),
                }
            });
        }
        self.read_token(response).await
    }

    async fn fetch_token(&self, mut url: Url, scope: &str, service: Option<&str>) -> Result<Response, Error> {
        url.query_pairs_mut().append_pair("scope", scope);
        if let Some(service) = service {
            url.query_pairs_mut().append_pair("service", service);
        }
        let mut headers = self.host.headers.clone();
        if let Some(basic) = self.credentials.basic_for_token() {
            headers.insert(AUTHORIZATION, secret(basic)?);
        }
        Ok(self.http.get(url).headers(headers).send().await?)
    }

    /// OAuth2: an access token for an identity token.
    async fn refresh(
        &self,
        url: Url,
        scope: &str,
        service: Option<&str>,
        refresh_token: &str,
    ) -> Result<Response, Error> {
        let mut form =
            Url::parse("https://form.invalid/").map_err(|error| Error::Protocol(error.to_string()))?;
        form.query_pairs_mut()
            .append_pair("grant_type", "refresh_token")
            .append_pair("service", service.unwrap_or_default())
            .append_pair("client_id", CLIENT_ID)
            .append_pair("scope", scope)
            .append_pair("refresh_token", refresh_token);
        let mut headers = self.host.headers.clone();
        headers.remove(AUTHORIZATION);
        let kind = HeaderValue::from_static("application/x-www-form-urlencoded; charset=utf-8");
        headers.insert(CONTENT_TYPE, kind);
        let body = form.query().unwrap_or_default().to_owned();
        Ok(self.http.post(url).headers(headers).body(body).send().await?)
    }

    async fn read_token(&self, response: Response) -> Result<String, Error> {
        #[derive(serde::Deserialize)]
        struct Answer {
            #[serde(default)]
            token: String,
            #[serde(default)]
            access_token: String,
        }
        let what = "the answer of the token server";
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

fn with_tls(mut builder: reqwest::ClientBuilder, host: &Host) -> Result<reqwest::ClientBuilder, Error> {
    let read = |path: &std::path::Path| {
        hosts::read(path).map_err(|error| Error::Protocol(format!("cannot read {}: {error}", path.display())))
    };
    for path in &host.ca {
        let broken = |error: &dyn std::fmt::Display| {
            Error::Protocol(format!(
                "cannot load the CA certificate {}: {error}",
                path.display()
            ))
        };
        let found = reqwest::Certificate::from_pem_bundle(&read(path)?).map_err(|error| broken(&error))?;
        if found.is_empty() {
            return Err(broken(&"it holds no certificate in PEM"));
        }
        builder = builder.tls_certs_merge(found);
    }
    if let Some(client) = &host.client {
        let mut pem = read(&client.certificate)?;
        if let Some(key) = &client.key {
            pem.push(b'\n');
            pem.extend(read(key)?);
        }
        let identity = reqwest::Identity::from_pem(&pem).map_err(|error| {
            let path = client.certificate.display();
            Error::Protocol(format!("cannot load the client certificate {path}: {error}"))
        })?;
        builder = builder.identity(identity);
    }
    Ok(builder.tls_danger_accept_invalid_certs(host.skip_verify == Some(true)))
}

fn authority(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    }
}

/// The first bytes of the answer were not those of TLS. Whatever else is wrong with TLS must not lead to plain HTTP.
fn knows_no_tls(error: &reqwest::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut innermost = String::new();
    while let Some(inner) = cause {
        innermost = inner.to_string();
        cause = inner.source();
    }
    error.is_connect() && innermost.contains("InvalidContentType")
}

fn header(value: String) -> Result<HeaderValue, Error> {
    HeaderValue::try_from(value)
        .map_err(|_| Error::Protocol("a token or password that no header can hold".into()))
}

fn secret(value: String) -> Result<HeaderValue, Error> {
    let mut value = header(value)?;
    value.set_sensitive(true);
    Ok(value)
}
