//! Small requests that this server makes itself to an extension API server: discovery and OpenAPI documents.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use skiff_auth::UserInfo;

use super::{Remote, resolve};
use crate::proxy::Target;
use crate::server::Inner;

/// OpenAPI documents of large servers have some megabytes.
const DOCUMENT_LIMIT: usize = 32 * 1024 * 1024;
pub const LIMIT: Duration = Duration::from_secs(5);

pub struct Fetched {
    pub code: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Fetched {
    pub fn header(&self, name: HeaderName) -> &str {
        let value = self.headers.get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or("")
    }
}

/// Where an extension API server is now.
pub async fn target(inner: &Arc<Inner>, remote: &Remote) -> Result<Target, String> {
    if let Some(local) = &remote.local {
        return Ok(Target {
            host: remote.name.clone(),
            addresses: Vec::new(),
            port: remote.port,
            tls: None,
            local: Some(local.clone()),
        });
    }
    let tls = remote.tls.clone()?;
    let (host, port) = resolve::resolve(&inner.registry, &remote.namespace, &remote.service, remote.port)
        .await
        .map_err(|status| status.message)?;
    Ok(Target {
        host,
        addresses: Vec::new(),
        port,
        tls: Some(tls),
        local: None,
    })
}

/// Asks as the aggregator, which may read everything there.
pub async fn get(target: &Target, path: &str, headers: &[(HeaderName, &str)]) -> Result<Fetched, String> {
    let connection = target.connect().await?;
    let (mut sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(connection))
        .await
        .map_err(|error| error.to_string())?;
    let driver = tokio::spawn(driver);
    let mut request = Request::get(path)
        .header(header::HOST, target.authority())
        .header(header::USER_AGENT, "skiff-aggregator")
        .body(Full::new(Bytes::new()))
        .map_err(|error| error.to_string())?;
    let mut user = UserInfo::new("system:kube-aggregator", ["system:masters"]);
    user.groups
        .retain(|group| group != skiff_auth::AUTHENTICATED_GROUP);
    skiff_auth::request_header::identify(request.headers_mut(), &user);
    for (name, value) in headers {
        if let Ok(value) = HeaderValue::from_str(value) {
            request.headers_mut().insert(name.clone(), value);
        }
    }
    let fetched = async {
        let response = sender.send_request(request).await.map_err(|error| {
            if error.is_incomplete_message() || error.is_closed() {
                "EOF".to_string()
            } else {
                error.to_string()
            }
        })?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, DOCUMENT_LIMIT)
            .collect()
            .await
            .map_err(|error| error.to_string())?
            .to_bytes();
        Ok(Fetched {
            code: parts.status,
            headers: parts.headers,
            body,
        })
    };
    let fetched = fetched.await;
    driver.abort();
    fetched
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// An extension API server whose document has no end is read up to the limit, and no further.
    #[tokio::test]
    async fn documents_are_cut_while_they_are_read() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = [0; 4096];
            let _ = stream.read(&mut head).await;
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
                .await;
            let mut sent = 0usize;
            while stream.write_all(&[b' '; 64 << 10]).await.is_ok() {
                sent += 64 << 10;
            }
            sent
        });
        let target = Target {
            host: "127.0.0.1".to_owned(),
            addresses: Vec::new(),
            port,
            tls: None,
            local: None,
        };
        let refused = get(&target, "/apis", &[]).await.err();
        assert_eq!(refused.as_deref(), Some("length limit exceeded"));
        // What the sockets hold comes on top.
        let sent = server.await.unwrap();
        assert!(sent < DOCUMENT_LIMIT + (32 << 20), "{sent}");
    }
}
