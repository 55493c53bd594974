//! A body as WebSocket messages, for browsers that want to follow a log. Nothing that the client sends is looked at.

use std::future::poll_fn;
use std::pin::Pin;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_tungstenite::tungstenite::Message;

use crate::upgrade::{Agreed, negotiate};
use crate::{Body, BoxError, websocket};

const PROTOCOLS: &[&str] = &["binary.k8s.io", "base64.binary.k8s.io"];

/// Answers a request for an upgrade to WebSocket with messages that carry `body`, and a close at its end.
pub fn serve_reader<B>(mut request: Request<B>, body: Body) -> Response<Body> {
    let (agreed, response) = match negotiate(&request, &[], PROTOCOLS) {
        Ok(agreed) => agreed,
        Err(refusal) => return *refusal,
    };
    let base64 = matches!(&agreed, Agreed::WebSocket(protocol) if protocol == "base64.binary.k8s.io");
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        match upgrade.await {
            Ok(upgraded) => serve(TokioIo::new(upgraded), base64, body).await,
            Err(error) => tracing::debug!(%error, "a client did not stay for the upgrade"),
        }
    });
    response
}

async fn serve<IO>(io: IO, base64: bool, body: Body)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let format = websocket::Format { base64, close: false };
    let (session, _) = websocket::Session::start(io, format, &[]).await;
    let sending = async {
        let mut body = body;
        // COMPAT: an empty message comes first, so that clients see at once that the connection stands.
        let mut next = Some(Ok(Bytes::new()));
        while let Some(Ok(data)) = next {
            let message: Message = format.whole(data);
            if session.out.send(message).await.is_err() {
                return;
            }
            next = next_data(&mut body).await;
        }
    };
    tokio::select! {
        () = sending => {}
        () = session.gone.cancelled() => {}
    }
    session.close().await;
}

async fn next_data(body: &mut Body) -> Option<Result<Bytes, BoxError>> {
    loop {
        match poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await? {
            Ok(frame) => match frame.into_data() {
                Ok(data) if !data.is_empty() => return Some(Ok(data)),
                _ => {}
            },
            Err(error) => return Some(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body_of;
    use futures::StreamExt;
    use tokio_tungstenite::WebSocketStream;
    use tokio_tungstenite::tungstenite::protocol::Role;

    #[tokio::test]
    async fn a_body_in_messages() {
        for (base64, expected) in [
            (false, Message::binary("hello")),
            (true, Message::text("aGVsbG8=")),
        ] {
            let (client, server) = tokio::io::duplex(1024);
            let serving = tokio::spawn(serve(server, base64, body_of("hello")));
            let mut client = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
            let empty = client.next().await.unwrap().unwrap();
            assert!(empty.is_empty(), "{empty:?}");
            assert_eq!(client.next().await.unwrap().unwrap(), expected);
            assert!(client.next().await.unwrap().unwrap().is_close());
            assert!(client.next().await.is_none());
            serving.await.unwrap();
        }
    }
}
