//! A scripted API server for unit tests: a closure answers each request, with a body or with a stream
//! that the test feeds.

use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody};
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use tokio::sync::mpsc;

#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub method: String,
    pub path: String,
    pub query: String,
    pub body: serde_json::Value,
}

pub(crate) enum Reply {
    Json(u16, serde_json::Value),
    Stream(mpsc::UnboundedReceiver<String>),
}

pub(crate) fn status(code: u16, reason: &str) -> Reply {
    Reply::Json(
        code,
        serde_json::json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason}),
    )
}

/// A client whose requests are answered by `answer`, and the requests that were made.
pub(crate) fn client(
    answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
) -> (Client, Arc<Mutex<Vec<Seen>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (log, answer) = (seen.clone(), Arc::new(answer));
    let service = tower::service_fn(move |request: Request<Body>| {
        let (log, answer) = (log.clone(), answer.clone());
        async move {
            let (parts, body) = request.into_parts();
            let bytes = body.collect().await?.to_bytes();
            let request = Seen {
                method: parts.method.to_string(),
                path: parts.uri.path().to_owned(),
                query: parts.uri.query().unwrap_or_default().to_owned(),
                body: serde_json::from_slice(&bytes).unwrap_or_default(),
            };
            log.lock().push(request.clone());
            let response = match answer(&request) {
                Reply::Json(code, value) => {
                    let body = Full::new(Bytes::from(value.to_string()));
                    Response::builder().status(code).body(body.boxed_unsync())
                }
                Reply::Stream(lines) => {
                    let frames = stream_of(lines).map(|line| {
                        Ok::<_, std::convert::Infallible>(http_body::Frame::data(Bytes::from(line)))
                    });
                    Response::builder().body(StreamBody::new(frames).boxed_unsync())
                }
            };
            response.map_err(|error| Box::new(error) as tower::BoxError)
        }
    });
    (crate::in_process(service, "default"), seen)
}

fn stream_of(receiver: mpsc::UnboundedReceiver<String>) -> impl futures::Stream<Item = String> {
    futures::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|line| (line, receiver))
    })
}
