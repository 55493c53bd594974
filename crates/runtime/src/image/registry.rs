//! The client's side of the OCI distribution protocol: manifests and blobs of one repository, of the hosts that serve it in
//! turn. Every answer is cut at its limit while it is read.

use super::credentials::Credentials;
use super::endpoint::{Endpoint, Request};
use super::hosts;
use super::is_digest;
use super::limits::Limits;
use super::reference::Reference;
use reqwest::header::CONTENT_RANGE;
use reqwest::{Method, Response, StatusCode};
use std::path::PathBuf;
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
    #[error("unexpected status from {method} request to {url}: {status}{message}")]
    Status {
        method: Method,
        url: String,
        status: StatusCode,
        message: String,
    },
    #[error("{what} is larger than {limit} bytes")]
    TooLarge { what: String, limit: u64 },
    #[error("{what} did not arrive within {} seconds", .limit.as_secs())]
    TooSlow { what: String, limit: Duration },
    #[error("{what} ended after {length} bytes")]
    TooShort { what: String, length: u64 },
    #[error("{0}")]
    Protocol(String),
    #[error("no host is configured that {0}")]
    NoHost(&'static str),
    #[error(transparent)]
    Hosts(#[from] hosts::Error),
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
            Error::TooShort { .. } => true,
            _ => false,
        }
    }

    /// COMPAT: of several hosts' errors, containerd tells the one that came furthest.
    fn rank(&self) -> u8 {
        match self {
            Error::Status { .. } | Error::Denied(_) => 3,
            Error::NotFound => 2,
            _ => 1,
        }
    }
}

/// The first of the worst errors of hosts that were asked in turn.
#[derive(Default)]
struct Failures(Option<Error>);

impl Failures {
    fn add(&mut self, endpoint: &Endpoint, error: Error) {
        tracing::info!(host = endpoint.name(), %error, "the registry's host does not serve the image");
        if self.0.as_ref().is_none_or(|worst| error.rank() > worst.rank()) {
            self.0 = Some(error);
        }
    }

    fn into_error(self, needed: &'static str) -> Error {
        self.0.unwrap_or(Error::NoHost(needed))
    }
}

pub(super) struct Registry {
    endpoints: Vec<Endpoint>,
    limits: Limits,
}

impl Registry {
    /// `config_paths` are folders with a folder for each registry ([`hosts`]).
    pub(super) fn new(
        reference: &Reference,
        credentials: &Credentials,
        limits: &Limits,
        config_paths: &[PathBuf],
    ) -> Result<Registry, Error> {
        let registry = reference.registry();
        let endpoints = hosts::hosts_of(registry, config_paths)?
            .into_iter()
            .map(|host| Endpoint::new(host, registry, reference.repository(), credentials, limits))
            .collect::<Result<_, _>>()?;
        Ok(Registry {
            endpoints,
            limits: limits.clone(),
        })
    }

    /// The tag's digest if there are hosts that may serve content and may not say what a tag is, or else the tag.
    pub(super) async fn resolve(&self, tag: &str) -> Result<String, Error> {
        if self
            .endpoints
            .iter()
            .all(|endpoint| endpoint.resolves() || !endpoint.pulls())
        {
            return Ok(tag.to_owned());
        }
        let path = format!("manifests/{tag}");
        let request = Request {
            method: Method::HEAD,
            path: &path,
            accept: ACCEPTED,
            offset: 0,
        };
        let mut failures = Failures::default();
        for endpoint in self.endpoints.iter().filter(|endpoint| endpoint.resolves()) {
            match self.in_time("the manifest", endpoint.get(&request)).await {
                Ok(answer) => {
                    let digest = answer.headers().get("docker-content-digest");
                    let digest = digest.and_then(|digest| digest.to_str().ok());
                    return Ok(digest
                        .filter(|digest| is_digest(digest))
                        .unwrap_or(tag)
                        .to_owned());
                }
                // COMPAT: registries that know no HEAD.
                Err(Error::Status {
                    status: StatusCode::METHOD_NOT_ALLOWED,
                    ..
                }) => return Ok(tag.to_owned()),
                Err(error) => failures.add(endpoint, error),
            }
        }
        Err(failures.into_error("may resolve tags"))
    }

    /// By tag or digest. The digest is for the caller to check.
    pub(super) async fn manifest(&self, reference: &str) -> Result<Vec<u8>, Error> {
        let by_digest = reference.contains(':');
        let path = format!("manifests/{reference}");
        let request = Request::get(&path, ACCEPTED);
        let mut failures = Failures::default();
        let usable = |endpoint: &&Endpoint| endpoint.resolves() || (by_digest && endpoint.pulls());
        for endpoint in self.endpoints.iter().filter(usable) {
            let reading = async {
                let response = endpoint.get(&request).await?;
                read(response, "the manifest", self.limits.document_bytes).await
            };
            match self.in_time("the manifest", reading).await {
                Ok(body) => return Ok(body),
                Err(error) => failures.add(endpoint, error),
            }
        }
        Err(failures.into_error(if by_digest {
            "serves content"
        } else {
            "may resolve tags"
        }))
    }

    /// A small blob, in memory. `size` is what its manifest says.
    pub(super) async fn small_blob(&self, digest: &str, size: u64) -> Result<Vec<u8>, Error> {
        let what = format!("blob {digest}");
        let path = format!("blobs/{digest}");
        let request = Request::get(&path, "*/*");
        let limit = self.limits.document_bytes.min(size);
        let mut failures = Failures::default();
        for endpoint in self.endpoints.iter().filter(|endpoint| endpoint.pulls()) {
            let reading = async {
                let response = endpoint.get(&request).await?;
                read(response, &what, limit).await
            };
            match self.in_time(&what, reading).await {
                Ok(body) => return Ok(body),
                Err(error) => failures.add(endpoint, error),
            }
        }
        Err(failures.into_error("serves content"))
    }

    /// The answer whose body is the blob, without a limit yet, and the place of its first byte: `offset`, or the
    /// beginning if the host knows no ranges.
    pub(super) async fn blob(&self, digest: &str, offset: u64) -> Result<(Response, u64), Error> {
        let (what, path) = (format!("blob {digest}"), format!("blobs/{digest}"));
        let mut failures = Failures::default();
        for endpoint in self.endpoints.iter().filter(|endpoint| endpoint.pulls()) {
            // Until the body begins, which has a limit of its own.
            let asked = self.in_time(&what, blob_of(endpoint, &path, offset)).await;
            match asked {
                Ok(found) => return Ok(found),
                Err(error) => failures.add(endpoint, error),
            }
        }
        Err(failures.into_error("serves content"))
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
}

async fn blob_of(endpoint: &Endpoint, path: &str, offset: u64) -> Result<(Response, u64), Error> {
    let whole = Request::get(path, "*/*");
    if offset == 0 {
        return Ok((endpoint.get(&whole).await?, 0));
    }
    let rest = Request { offset, ..whole };
    match endpoint.get(&rest).await {
        Ok(response) if response.status() != StatusCode::PARTIAL_CONTENT => Ok((response, 0)),
        Ok(response) => {
            let range = response.headers().get(CONTENT_RANGE);
            let starts = format!("bytes {offset}-");
            if range.is_some_and(|range| range.as_bytes().starts_with(starts.as_bytes())) {
                return Ok((response, offset));
            }
            Ok((endpoint.get(&Request::get(path, "*/*")).await?, 0))
        }
        Err(Error::Status {
            status: StatusCode::RANGE_NOT_SATISFIABLE,
            ..
        }) => Ok((endpoint.get(&Request::get(path, "*/*")).await?, 0)),
        Err(error) => Err(error),
    }
}

/// The whole body, or an error as soon as it is longer than `limit`.
pub(super) async fn read(mut response: Response, what: &str, limit: u64) -> Result<Vec<u8>, Error> {
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
pub(super) async fn error_message(mut response: Response) -> String {
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
