//! Takes images out of a docker or podman that runs on this machine, through its socket, into the store: what
//! `GET /images/NAME/get` answers is an archive, which goes through the import as it comes.

use super::{Error, ImageStore, ProgressFn};
use futures::TryStreamExt;
use http_body_util::{BodyExt, BodyStream, Empty, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio_util::io::{StreamReader, SyncIoBridge};

/// Where docker and podman listen when nobody says otherwise.
const USUAL_SOCKETS: [&str; 3] = [
    "/var/run/docker.sock",
    "/run/podman/podman.sock",
    "/var/run/podman/podman.sock",
];
/// Packing a large image takes a while before the first byte comes.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
/// And so may each of its layers.
const READ_TIMEOUT: Duration = Duration::from_secs(120);
/// Of an answer that is an error, this much is read.
const MAX_ERROR: usize = 64 << 10;
/// And this much is told.
const MAX_MESSAGE: usize = 300;

/// The socket of a docker or podman.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineSocket(PathBuf);

impl EngineSocket {
    /// `unix:///run/docker.sock`.
    pub fn parse(host: &str) -> Result<EngineSocket, Error> {
        match host.strip_prefix("unix://") {
            Some(path) if path.starts_with('/') => Ok(EngineSocket(path.into())),
            _ => Err(Error::Unsupported(format!(
                "{host:?} as the host of docker or podman: it is unix:// and the absolute path of a socket"
            ))),
        }
    }

    /// The first of the usual sockets on which somebody listens.
    pub async fn find() -> Result<EngineSocket, Error> {
        EngineSocket::find_among(&USUAL_SOCKETS.map(Path::new)).await
    }

    async fn find_among(paths: &[&Path]) -> Result<EngineSocket, Error> {
        let mut tried = Vec::new();
        for path in paths {
            match UnixStream::connect(path).await {
                Ok(_) => return Ok(EngineSocket((*path).to_owned())),
                Err(error) => tried.push(format!("{}: {error}", path.display())),
            }
        }
        Err(Error::NoEngine(tried.join("; ")))
    }

    async fn get(&self, path: &str) -> Result<Response<Incoming>, Error> {
        let stream = UnixStream::connect(&self.0)
            .await
            .map_err(|error| Error::NoEngine(format!("{}: {error}", self.0.display())))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream))
                .await
                .map_err(|error| self.failed(&error))?;
        // It ends with the body.
        tokio::spawn(connection);
        let request = Request::get(path)
            .header(hyper::header::HOST, "docker")
            .body(Empty::<Bytes>::new())
            .map_err(|error| self.failed(&error))?;
        tokio::time::timeout(ANSWER_TIMEOUT, sender.send_request(request))
            .await
            .map_err(|_| self.failed(&format!("no answer within {} seconds", ANSWER_TIMEOUT.as_secs())))?
            .map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &dyn std::fmt::Display) -> Error {
        Error::Engine(self.0.clone(), error.to_string())
    }
}

impl ImageStore {
    /// Brings in the images that a docker or podman has under this name or id, and returns their references.
    pub async fn load(
        self: &Arc<Self>,
        name: &str,
        engine: &EngineSocket,
        progress: &ProgressFn,
    ) -> Result<Vec<String>, Error> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:@".contains(&byte);
        if name.is_empty() || !name.bytes().all(is_plain) || name.split('/').any(|part| part.starts_with('.'))
        {
            return Err(Error::Reference(
                name.to_owned(),
                "invalid reference format".into(),
            ));
        }
        let response = engine.get(&format!("/images/{name}/get")).await?;
        let status = response.status();
        if !status.is_success() {
            let message = error_message(response.into_body()).await;
            return Err(match status {
                StatusCode::NOT_FOUND => Error::NotFound(name.to_owned()),
                _ => engine.failed(&format!("{status}: {message}")),
            });
        }
        let chunks = TryStreamExt::map_err(BodyStream::new(response.into_body()), io::Error::other)
            .try_filter_map(|frame| std::future::ready(Ok(frame.into_data().ok())));
        // An engine that stops in the middle must not hold the store for ever.
        let chunks = tokio_stream::StreamExt::timeout(chunks, READ_TIMEOUT);
        let chunks = futures::StreamExt::map(chunks, |chunk| {
            chunk.unwrap_or_else(|_| {
                Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the archive stopped coming",
                ))
            })
        });
        let (store, progress) = (Arc::clone(self), Arc::clone(progress));
        let archive = SyncIoBridge::new(StreamReader::new(Box::pin(chunks)));
        let importing = tokio::task::spawn_blocking(move || store.import_stream(archive, "image", &progress));
        importing
            .await
            .map_err(|error| Error::Archive(format!("the import ended early: {error}")))?
    }
}

/// What an engine says about an error, in one short line.
async fn error_message(body: Incoming) -> String {
    #[derive(serde::Deserialize)]
    struct Answer {
        message: String,
    }
    let reading = Limited::new(body, MAX_ERROR).collect();
    let body = match tokio::time::timeout(Duration::from_secs(10), reading).await {
        Ok(Ok(body)) => body.to_bytes(),
        _ => return String::new(),
    };
    let text = match serde_json::from_slice::<Answer>(&body) {
        Ok(answer) => answer.message,
        Err(_) => String::from_utf8_lossy(&body).into_owned(),
    };
    text.chars()
        .filter(|character| !character.is_control())
        .take(MAX_MESSAGE)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_unix_sockets() {
        let check = |host: &str, expected: Option<&str>| {
            let socket = EngineSocket::parse(host).ok();
            assert_eq!(socket, expected.map(|path| EngineSocket(path.into())), "{host}");
        };
        check("unix:///run/docker.sock", Some("/run/docker.sock"));
        check("unix://docker.sock", None);
        check("tcp://127.0.0.1:2375", None);
        check("/run/docker.sock", None);
    }

    #[tokio::test]
    async fn no_engine_is_told_with_what_was_tried() {
        let directory = tempfile::tempdir().expect("directory");
        let (missing, dead) = (directory.path().join("a.sock"), directory.path().join("b.sock"));
        drop(std::os::unix::net::UnixListener::bind(&dead).expect("bind"));
        let error = EngineSocket::find_among(&[&missing, &dead])
            .await
            .expect_err("nobody listens")
            .to_string();
        assert!(error.contains("no docker or podman answers"), "{error}");
        assert!(
            error.contains("a.sock: No such file") && error.contains("b.sock: Connection refused"),
            "{error}"
        );
        let alive = directory.path().join("c.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&alive).expect("bind");
        let found = EngineSocket::find_among(&[&missing, &dead, &alive]).await;
        assert_eq!(found.expect("found"), EngineSocket(alive));
    }
}
