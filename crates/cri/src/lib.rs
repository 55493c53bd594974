//! The Container Runtime Interface, v1, with all calls of Kubernetes 1.36: the messages, a client and
//! the server traits. It knows the wire and how to reach an endpoint; it must not know a runtime.

/// The generated messages and services of `runtime.v1`.
// Generated code is not held to the house's lints.
#[allow(clippy::all, deprecated, rustdoc::all)]
#[rustfmt::skip]
pub mod v1;

pub use v1::image_service_client::ImageServiceClient;
pub use v1::image_service_server::{ImageService, ImageServiceServer};
pub use v1::runtime_service_client::RuntimeServiceClient;
pub use v1::runtime_service_server::{RuntimeService, RuntimeServiceServer};

pub use tonic::transport::Channel;
pub use tonic::{Code, Request, Response, Status};

use std::path::PathBuf;

/// gRPC's default of 4 MiB is too small for a list of many containers; this is the kubelet's limit.
pub const MAX_MESSAGE_SIZE: usize = 16 * 1024 * 1024;

/// Why an endpoint could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("endpoint {0:?} is not a unix socket: use unix:///path/to/socket")]
    NotUnix(String),
    #[error("cannot connect to the container runtime at {endpoint}: {source}")]
    Transport {
        endpoint: String,
        source: tonic::transport::Error,
    },
}

/// The path of a `unix:///path` endpoint. A bare absolute path is accepted too, as the kubelet does.
pub fn socket_path(endpoint: &str) -> Result<PathBuf, ConnectError> {
    let path = match endpoint.split_once("://") {
        Some(("unix", path)) => path,
        None => endpoint.strip_prefix("unix:").unwrap_or(endpoint),
        Some(_) => return Err(ConnectError::NotUnix(endpoint.to_owned())),
    };
    if !path.starts_with('/') {
        return Err(ConnectError::NotUnix(endpoint.to_owned()));
    }
    Ok(PathBuf::from(path))
}

/// Connects to a CRI endpoint (`unix:///path`). The channel reconnects by itself after this.
pub async fn connect(endpoint: &str) -> Result<Channel, ConnectError> {
    channel(endpoint, false).await
}

/// Like [`connect`], but does not ask that the runtime already listens: the first call connects.
pub async fn connect_lazy(endpoint: &str) -> Result<Channel, ConnectError> {
    channel(endpoint, true).await
}

async fn channel(endpoint: &str, lazy: bool) -> Result<Channel, ConnectError> {
    let path = socket_path(endpoint)?;
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let path = path.clone();
        async move {
            let stream = tokio::net::UnixStream::connect(path).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    // The authority is not used on a unix socket, but gRPC demands one.
    let builder = tonic::transport::Endpoint::from_static("http://localhost");
    if lazy {
        return Ok(builder.connect_with_connector_lazy(connector));
    }
    builder
        .connect_with_connector(connector)
        .await
        .map_err(|source| ConnectError::Transport {
            endpoint: endpoint.to_owned(),
            source,
        })
}

/// A client of the runtime service with the kubelet's message limit.
pub fn runtime_client(channel: Channel) -> RuntimeServiceClient<Channel> {
    RuntimeServiceClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_SIZE)
        .max_encoding_message_size(MAX_MESSAGE_SIZE)
}

/// A client of the image service with the kubelet's message limit.
pub fn image_client(channel: Channel) -> ImageServiceClient<Channel> {
    ImageServiceClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_SIZE)
        .max_encoding_message_size(MAX_MESSAGE_SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints() {
        let check = |endpoint: &str, expected: Option<&str>| {
            assert_eq!(
                socket_path(endpoint).ok(),
                expected.map(PathBuf::from),
                "{endpoint}"
            );
        };
        check("unix:///run/cri.sock", Some("/run/cri.sock"));
        check("/run/cri.sock", Some("/run/cri.sock"));
        check("unix:/run/cri.sock", Some("/run/cri.sock"));
        check("tcp://127.0.0.1:1", None);
        check("run/cri.sock", None);
    }

    #[test]
    fn wire_numbers_are_upstreams() {
        use prost::Message;
        // The tag bytes are what another implementation sees, so two are pinned here.
        let config = v1::ContainerConfig {
            working_dir: "/x".into(),
            ..Default::default()
        };
        assert_eq!(config.encode_to_vec(), b"\x2a\x02/x");
        let sandbox = v1::PodSandboxConfig {
            hostname: "h".into(),
            ..Default::default()
        };
        assert_eq!(sandbox.encode_to_vec(), b"\x12\x01h");
    }
}
