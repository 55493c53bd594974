//! Registries, mirrors and container engines that do as a test says, and remember what they were asked.

use crate::environment::{gzip, layer, oci_files, sha256};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// A request as it came.
#[derive(Clone, Default)]
pub struct Seen {
    pub method: String,
    pub path: String,
    /// By names in lower case.
    pub headers: HashMap<String, String>,
    pub body: String,
}

impl Seen {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

#[derive(Clone)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// The connection ends after so many bytes of the body.
    pub cut: Option<usize>,
    /// Say how long it is; else the connection's end is the body's.
    pub says_length: bool,
}

pub fn answer(status: u16, body: impl Into<Vec<u8>>) -> Answer {
    Answer {
        status,
        headers: Vec::new(),
        body: body.into(),
        cut: None,
        says_length: true,
    }
}

impl Answer {
    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Answer {
        self.headers.push((name, value.into()));
        self
    }
}

pub type Handler = Arc<dyn Fn(&Seen) -> Answer + Send + Sync>;

pub struct Fake {
    pub address: SocketAddr,
    pub seen: Arc<Mutex<Vec<Seen>>>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Fake {
    pub async fn start(handler: impl Fn(&Seen) -> Answer + Send + Sync + 'static) -> Fake {
        Fake::start_with(None, Arc::new(handler)).await
    }

    pub async fn start_with(tls: Option<tokio_rustls::TlsAcceptor>, handler: Handler) -> Fake {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let remembered = seen.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (handler, seen, tls) = (handler.clone(), remembered.clone(), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        None => serve(stream, &handler, &seen).await,
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => serve(stream, &handler, &seen).await,
                            Err(_) => None,
                        },
                    }
                });
            }
        });
        Fake {
            address,
            seen,
            accepting,
        }
    }

    /// Forgets what it was asked, and tells.
    pub fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock().expect("lock"))
    }

    /// `GET /v2/…` of each request.
    pub fn take_lines(&self) -> Vec<String> {
        let lines = self.take().into_iter();
        lines
            .map(|seen| format!("{} {}", seen.method, seen.path))
            .collect()
    }
}

/// An engine's socket that answers each request the same way.
pub fn engine(socket: &Path, handler: impl Fn(&Seen) -> Answer + Send + Sync + 'static) {
    let listener = tokio::net::UnixListener::bind(socket).expect("bind");
    let handler: Handler = Arc::new(handler);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let handler = handler.clone();
            tokio::spawn(async move { serve(stream, &handler, &Mutex::default()).await });
        }
    });
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    handler: &Handler,
    seen: &Mutex<Vec<Seen>>,
) -> Option<()> {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.ok()?);
            // Whoever speaks TLS here is answered as real servers do.
            if head == [0x16] {
                stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.ok()?;
                return None;
            }
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let mut words = head.split(' ');
        let mut request = Seen {
            method: words.next()?.to_owned(),
            path: words.next()?.to_owned(),
            ..Seen::default()
        };
        for line in head.lines().skip(1) {
            if let Some((name, value)) = line.split_once(':') {
                let name = name.to_ascii_lowercase();
                request.headers.insert(name, value.trim().to_owned());
            }
        }
        let mut body = vec![0; request.header("content-length").parse().unwrap_or(0)];
        stream.read_exact(&mut body).await.ok()?;
        request.body = String::from_utf8_lossy(&body).into_owned();
        seen.lock().expect("lock").push(request.clone());
        let answer = handler(&request);
        let mut head = format!("HTTP/1.1 {} Said\r\n", answer.status);
        for (name, value) in &answer.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if answer.says_length {
            head.push_str(&format!("Content-Length: {}\r\n\r\n", answer.body.len()));
        } else {
            head.push_str("Connection: close\r\n\r\n");
        }
        stream.write_all(head.as_bytes()).await.ok()?;
        if request.method == "HEAD" {
            continue;
        }
        let length = answer.cut.unwrap_or(answer.body.len()).min(answer.body.len());
        stream.write_all(&answer.body[..length]).await.ok()?;
        stream.flush().await.ok()?;
        if length < answer.body.len() || !answer.says_length {
            stream.shutdown().await.ok()?;
            return None;
        }
    }
}

/// An image of one layer, as registries have it.
#[derive(Clone)]
pub struct Content {
    pub manifest: Vec<u8>,
    pub layer: Vec<u8>,
    pub layer_digest: String,
    /// By digest, manifests too.
    pub blobs: HashMap<String, Vec<u8>>,
}

impl Content {
    pub fn new() -> Content {
        let plain = layer();
        let files = oci_files("unused", &plain, gzip(&plain));
        let blobs = files[2..]
            .iter()
            .map(|(_, body)| (format!("sha256:{}", sha256(body)), body.clone()))
            .collect();
        Content {
            manifest: files[4].1.clone(),
            layer: files[3].1.clone(),
            layer_digest: format!("sha256:{}", sha256(&files[3].1)),
            blobs,
        }
    }

    /// What an honest registry says, of whatever repository.
    pub fn serve(&self, seen: &Seen) -> Answer {
        let path = seen.path.split('?').next().unwrap_or_default();
        let name = path.rsplit('/').next().unwrap_or_default();
        let body = match self.blobs.get(name) {
            Some(body) => body,
            None if path.contains("/manifests/") && !name.starts_with("sha256:") => &self.manifest,
            None => return answer(404, r#"{"errors":[{"code":"UNKNOWN","message":"no"}]}"#),
        };
        let digest = format!("sha256:{}", sha256(body));
        match seen.header("range").strip_prefix("bytes=") {
            None => answer(200, body.as_slice()),
            Some(range) => {
                let from: usize = range.trim_end_matches('-').parse().expect("a range");
                let of = format!("bytes {from}-{}/{}", body.len() - 1, body.len());
                answer(206, &body[from..]).with("Content-Range", of)
            }
        }
        .with("Docker-Content-Digest", digest)
    }

    pub async fn registry(&self) -> Fake {
        let content = self.clone();
        Fake::start(move |seen| content.serve(seen)).await
    }
}
