//! Connections whose bytes are passed on as they are: those of TLSRoutes.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::backend::Backend;
use crate::body::BoxError;
use crate::forward::Proxy;
use crate::metrics::Refusal;
use crate::tunnel;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Endpoints that are tried.
const ATTEMPTS: usize = 3;

/// Passes bytes both ways until both sides have ended, or the proxy ends.
pub async fn pass<T>(proxy: &Proxy, near: T, backend: Option<Arc<Backend>>) -> Result<(), BoxError>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let Some(backend) = backend else {
        proxy.metrics.refused(Refusal::NoRoute);
        return Err("no route has a backend for the name".into());
    };
    let Some(_entered) = backend.enter() else {
        proxy.metrics.refused(Refusal::BackendFull);
        return Err("the backend has too many connections".into());
    };
    let far = match connect(&backend).await {
        Ok(far) => far,
        Err(error) => {
            proxy.metrics.refused(Refusal::NoEndpoint);
            return Err(error.into());
        }
    };
    tokio::select! {
        ended = tunnel::copy(near, far) => ended.map_err(Into::into),
        () = proxy.abort.cancelled() => Ok(()),
    }
}

async fn connect(backend: &Arc<Backend>) -> io::Result<TcpStream> {
    let mut tried: Vec<SocketAddr> = Vec::new();
    let mut failed = io::Error::other("no endpoint of the service is ready");
    while tried.len() < ATTEMPTS {
        let Some(endpoint) = backend.pick(&tried, rand::random(), Instant::now()) else {
            break;
        };
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(endpoint.address)).await {
            Ok(Ok(stream)) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Ok(Err(error)) => failed = error,
            Err(_) => failed = io::ErrorKind::TimedOut.into(),
        }
        tried.push(endpoint.address);
    }
    Err(failed)
}
