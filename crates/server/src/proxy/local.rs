//! An API server of this process that is not this server: reached like an aggregated one, over HTTP, but through a
//! pipe in memory. It sees what any aggregated server sees, and nothing of this one.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::io::DuplexStream;

/// What a pipe holds before its writer waits.
const PIPE_SIZE: usize = 64 * 1024;

type Answered = BoxFuture<'static, Response<Full<Bytes>>>;

/// The handler of such a server. Clones share it.
#[derive(Clone)]
pub struct LocalApi(Arc<dyn Fn(Request<Incoming>) -> Answered + Send + Sync>);

impl LocalApi {
    pub fn new<F, R>(answer: F) -> LocalApi
    where
        F: Fn(Request<Incoming>) -> R + Send + Sync + 'static,
        R: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        LocalApi(Arc::new(move |request| answer(request).boxed()))
    }

    /// Opens a connection; its server ends with it.
    pub(crate) fn connect(&self) -> DuplexStream {
        let (client, server) = tokio::io::duplex(PIPE_SIZE);
        let answer = self.0.clone();
        let service = hyper::service::service_fn(move |request| {
            let answered = answer(request);
            async move { Ok::<_, Infallible>(answered.await) }
        });
        tokio::spawn(async move {
            let connection = hyper::server::conn::http1::Builder::new();
            if let Err(error) = connection.serve_connection(TokioIo::new(server), service).await {
                tracing::debug!(%error, "a connection to a local API ended");
            }
        });
        client
    }
}
