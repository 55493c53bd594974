//! A proxy for requests that may leave HTTP: it sends the request on, and if the other side switches
//! protocols, it connects the two and looks no further. Anything else is passed back as it came.

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::{Body, BoxError, body_of, refuse};

/// Sends `request` over the connection that `connect` opens. The caller sets the request's URI and its
/// `Host` and credentials to what the other side expects; headers that belong to the upgrade pass.
pub async fn proxy_upgrade<B, C, Fut, IO, E>(mut request: Request<B>, connect: C) -> Response<Body>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    C: FnOnce() -> Fut,
    Fut: Future<Output = Result<IO, E>>,
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    E: std::fmt::Display,
{
    let unavailable = |why: String| refuse(StatusCode::BAD_GATEWAY, format!("error dialing backend: {why}"));
    let connection = match connect().await {
        Ok(connection) => connection,
        Err(error) => return unavailable(error.to_string()),
    };
    let client_upgrade = hyper::upgrade::on(&mut request);
    let (mut sender, driver) = match hyper::client::conn::http1::handshake(TokioIo::new(connection)).await {
        Ok(pair) => pair,
        Err(error) => return unavailable(error.to_string()),
    };
    tokio::spawn(async move {
        if let Err(error) = driver.with_upgrades().await {
            tracing::debug!(%error, "a proxied connection ended");
        }
    });
    let (mut parts, body) = request.into_parts();
    parts.version = http::Version::HTTP_11;
    parts.extensions.clear();
    let request = Request::from_parts(parts, body.map_err(Into::into).boxed_unsync());
    let mut response = match sender.send_request(request).await {
        Ok(response) => response,
        Err(error) => return unavailable(error.to_string()),
    };
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        // The sender must live as long as the body is read.
        let (parts, body) = response.into_parts();
        let body = body.map_err(BoxError::from).map_frame(move |frame| {
            let _connection = &sender;
            frame
        });
        return Response::from_parts(parts, body.boxed_unsync());
    }
    let backend_upgrade = hyper::upgrade::on(&mut response);
    tokio::spawn(async move {
        let (client, backend) = match tokio::try_join!(client_upgrade, backend_upgrade) {
            Ok(both) => both,
            Err(error) => return tracing::debug!(%error, "an upgrade was not completed"),
        };
        let (mut client, mut backend) = (TokioIo::new(client), TokioIo::new(backend));
        if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut backend).await {
            tracing::debug!(%error, "a proxied stream ended");
        }
    });
    let (parts, _) = response.into_parts();
    Response::from_parts(parts, body_of(""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spdy_client::Client;
    use crate::{ExitOutcome, Options, serve_remote_command};
    use hyper::body::Incoming;
    use hyper::service::service_fn;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    /// A backend that runs commands, with a proxy in front of it: the whole way of `kubectl exec`.
    fn proxied() -> DuplexStream {
        let (client, front) = tokio::io::duplex(1 << 16);
        let service = service_fn(|request: Request<Incoming>| async {
            Ok::<_, BoxError>(
                proxy_upgrade(request, || async {
                    let (near, far) = tokio::io::duplex(1 << 16);
                    tokio::spawn(serve_http(far, service_fn(backend)));
                    Ok::<_, BoxError>(near)
                })
                .await,
            )
        });
        tokio::spawn(serve_http(front, service));
        client
    }

    async fn backend(request: Request<Incoming>) -> Result<Response<Body>, BoxError> {
        if request.uri().path() == "/teapot" {
            let body = request.into_body().collect().await?.to_bytes();
            return Ok(refuse(StatusCode::IM_A_TEAPOT, format!("got {}", body.len())));
        }
        let options = Options::from_query(request.uri().query().unwrap_or(""))?;
        Ok(serve_remote_command(request, options, |streams| async move {
            streams.stdout.unwrap().write_all(b"from the pod").await.unwrap();
            ExitOutcome::Exited(0)
        })
        .await)
    }

    async fn serve_http<S>(io: DuplexStream, service: S)
    where
        S: hyper::service::Service<Request<Incoming>, Response = Response<Body>, Error = BoxError>,
        S::Future: Send + 'static,
    {
        let _ = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(io), service)
            .with_upgrades()
            .await;
    }

    async fn read_head(client: &mut DuplexStream) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(client.read_u8().await.unwrap());
        }
        String::from_utf8(head).unwrap()
    }

    #[tokio::test]
    async fn an_upgraded_connection_passes_through() {
        let mut client = proxied();
        client
            .write_all(
                b"POST /exec?stdout=true HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
                  X-Stream-Protocol-Version: v5.channel.k8s.io\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\
                  Content-Length: 0\r\n\r\n",
            )
            .await
            .unwrap();
        let head = read_head(&mut client).await.to_lowercase();
        assert!(head.starts_with("http/1.1 101"), "{head}");
        assert!(
            head.contains("x-stream-protocol-version: v4.channel.k8s.io"),
            "{head}"
        );
        let mut client = Client::new(client);
        let error = client.open(&[("streamtype", "error")]).await;
        let stdout = client.open(&[("streamtype", "stdout")]).await;
        let streams = client.collect().await;
        assert_eq!(streams[&stdout], (b"from the pod".to_vec(), true));
        assert_eq!(streams[&error].0, br#"{"metadata":{},"status":"Success"}"#);
    }

    #[tokio::test]
    async fn other_answers_pass_back() {
        let mut client = proxied();
        client
            .write_all(b"POST /teapot HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
            .await
            .unwrap();
        assert!(read_head(&mut client).await.starts_with("HTTP/1.1 418"));
        let mut body = [0; 6];
        client.read_exact(&mut body).await.unwrap();
        assert_eq!(&body, b"got 5\n");
        // A plain request to an upgrade endpoint, on the same connection.
        client
            .write_all(b"GET /exec?stdout=true HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        assert!(read_head(&mut client).await.starts_with("HTTP/1.1 400"));
    }

    #[tokio::test]
    async fn a_dead_backend_is_said() {
        let request = Request::new(body_of(""));
        let response =
            proxy_upgrade(request, || async { Err::<DuplexStream, _>("connection refused") }).await;
        assert_eq!(response.status(), 502);
        let text = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(text, "error dialing backend: connection refused\n");
    }
}
