//! A server of somebody else, over HTTPS on loopback: what it answers is the test's business, and what it was sent is
//! written down. `kubeconfig` makes the file by which it is found.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use base64::Engine;
use bytes::Bytes;
use http::Response;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use skiff_pki::{Identity, Pki};
use tokio::net::TcpListener;

/// How a peer answers a path and a document: code and body; none: never.
pub type Answers = Arc<dyn Fn(&str, &Value) -> Option<(u16, String)> + Send + Sync>;

pub struct Peer {
    pub port: u16,
    pub ca: String,
    seen: Arc<Mutex<Vec<(String, Value)>>>,
}

impl Peer {
    /// Reserved, so that files can name it before the cluster of its keys is there.
    pub fn reserve() -> (std::net::TcpListener, u16) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        let port = listener.local_addr().expect("an address").port();
        (listener, port)
    }

    pub fn identity(pki: &Pki) -> Identity {
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        pki.serving("peer", "peer", &names).expect("a certificate")
    }

    pub fn start(listener: std::net::TcpListener, pki: &Pki, answers: Answers) -> Peer {
        let port = listener.local_addr().expect("an address").port();
        let listener = TcpListener::from_std(listener).expect("a socket");
        let tls = skiff_pki::server_config(&Peer::identity(pki), None).expect("TLS");
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        let seen: Arc<Mutex<Vec<(String, Value)>>> = Arc::default();
        let all = seen.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, all, answers) = (acceptor.clone(), all.clone(), answers.clone());
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else {
                        return;
                    };
                    let service =
                        hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
                            let (all, answers) = (all.clone(), answers.clone());
                            async move {
                                let path = request.uri().to_string();
                                let body = request.into_body().collect().await?.to_bytes();
                                let document = serde_json::from_slice(&body).unwrap_or(Value::Null);
                                all.lock().expect("whole").push((path.clone(), document.clone()));
                                let Some((code, body)) = answers(&path, &document) else {
                                    std::future::pending::<()>().await;
                                    unreachable!("pending for ever");
                                };
                                let answer = Response::builder()
                                    .status(code)
                                    .header("content-type", "application/json")
                                    .body(Full::new(Bytes::from(body)));
                                Ok::<_, hyper::Error>(answer.expect("an answer"))
                            }
                        });
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Peer {
            port,
            ca: pki.ca_certificate().to_owned(),
            seen,
        }
    }

    /// What it was sent: path and document.
    pub fn seen(&self) -> Vec<(String, Value)> {
        self.seen.lock().expect("whole").clone()
    }
}

/// A kubeconfig that names a peer.
pub fn kubeconfig(folder: &Path, name: &str, url: &str, pki: &Pki) -> PathBuf {
    let ca = base64::engine::general_purpose::STANDARD.encode(pki.ca_certificate());
    let config = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority-data": ca}}],
        "users": [{"name": "u", "user": {"token": "of-the-api-server"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    });
    let path = folder.join(name);
    std::fs::write(&path, config.to_string()).expect("a file");
    path
}
