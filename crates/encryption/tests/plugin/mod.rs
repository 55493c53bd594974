//! A KMS v2 plugin on a unix socket: it "encrypts" by flipping each byte with 0x5a.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use prost::Message;
use tonic::body::Body;
use tonic::server::{Grpc, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

#[derive(Clone, PartialEq, Message)]
pub struct Empty {}

#[derive(Clone, PartialEq, Message)]
pub struct StatusAnswer {
    #[prost(string, tag = "1")]
    pub version: String,
    #[prost(string, tag = "2")]
    pub healthz: String,
    #[prost(string, tag = "3")]
    pub key_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Encrypt {
    #[prost(bytes = "vec", tag = "1")]
    pub bytes: Vec<u8>,
    #[prost(string, tag = "2")]
    pub uid: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct EncryptAnswer {
    #[prost(bytes = "vec", tag = "1")]
    pub bytes: Vec<u8>,
    #[prost(string, tag = "2")]
    pub key_id: String,
    #[prost(btree_map = "string, bytes", tag = "3")]
    pub annotations: BTreeMap<String, Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Decrypt {
    #[prost(bytes = "vec", tag = "1")]
    pub bytes: Vec<u8>,
    #[prost(string, tag = "3")]
    pub key_id: String,
    #[prost(btree_map = "string, bytes", tag = "4")]
    pub annotations: BTreeMap<String, Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub struct DecryptAnswer {
    #[prost(bytes = "vec", tag = "1")]
    pub bytes: Vec<u8>,
}

/// What a test sees of the plugin and sets in it.
#[derive(Default)]
pub struct Plugin {
    pub key_id: parking_lot::Mutex<String>,
    pub unhealthy: std::sync::atomic::AtomicBool,
    pub encrypts: AtomicUsize,
    pub decrypts: AtomicUsize,
}

#[derive(Clone)]
struct Service(Arc<Plugin>);

fn flip(bytes: Vec<u8>) -> Vec<u8> {
    bytes.into_iter().map(|byte| byte ^ 0x5a).collect()
}

impl UnaryService<Empty> for Service {
    type Response = StatusAnswer;
    type Future = std::future::Ready<Result<Response<StatusAnswer>, Status>>;

    fn call(&mut self, _: Request<Empty>) -> Self::Future {
        let well = !self.0.unhealthy.load(Ordering::SeqCst);
        std::future::ready(Ok(Response::new(StatusAnswer {
            version: "v2".to_owned(),
            healthz: if well { "ok" } else { "not well" }.to_owned(),
            key_id: self.0.key_id.lock().clone(),
        })))
    }
}

impl UnaryService<Encrypt> for Service {
    type Response = EncryptAnswer;
    type Future = std::future::Ready<Result<Response<EncryptAnswer>, Status>>;

    fn call(&mut self, request: Request<Encrypt>) -> Self::Future {
        self.0.encrypts.fetch_add(1, Ordering::SeqCst);
        let annotation = ("flip.example.com".to_owned(), b"90".to_vec());
        std::future::ready(Ok(Response::new(EncryptAnswer {
            bytes: flip(request.into_inner().bytes),
            key_id: self.0.key_id.lock().clone(),
            annotations: [annotation].into(),
        })))
    }
}

impl UnaryService<Decrypt> for Service {
    type Response = DecryptAnswer;
    type Future = std::future::Ready<Result<Response<DecryptAnswer>, Status>>;

    fn call(&mut self, request: Request<Decrypt>) -> Self::Future {
        self.0.decrypts.fetch_add(1, Ordering::SeqCst);
        let request = request.into_inner();
        let known = request.annotations.get("flip.example.com").map(Vec::as_slice) == Some(b"90");
        std::future::ready(if known && !self.0.unhealthy.load(Ordering::SeqCst) {
            Ok(Response::new(DecryptAnswer {
                bytes: flip(request.bytes),
            }))
        } else {
            Err(Status::internal("cannot decrypt"))
        })
    }
}

impl tonic::server::NamedService for Service {
    const NAME: &'static str = "v2.KeyManagementService";
}

impl tower::Service<http::Request<Body>> for Service {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/v2.KeyManagementService/Status" => {
                    let mut grpc = Grpc::new(ProstCodec::<StatusAnswer, Empty>::default());
                    grpc.unary(service, request).await
                }
                "/v2.KeyManagementService/Encrypt" => {
                    let mut grpc = Grpc::new(ProstCodec::<EncryptAnswer, Encrypt>::default());
                    grpc.unary(service, request).await
                }
                _ => {
                    let mut grpc = Grpc::new(ProstCodec::<DecryptAnswer, Decrypt>::default());
                    grpc.unary(service, request).await
                }
            })
        })
    }
}

/// Serves until the test ends.
pub fn serve(socket: &Path, key_id: &str) -> Arc<Plugin> {
    let plugin = Arc::new(Plugin {
        key_id: parking_lot::Mutex::new(key_id.to_owned()),
        ..Plugin::default()
    });
    let listener = tokio::net::UnixListener::bind(socket).expect("a socket");
    let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
    let server = tonic::transport::Server::builder().add_service(Service(plugin.clone()));
    tokio::spawn(server.serve_with_incoming(incoming));
    plugin
}
