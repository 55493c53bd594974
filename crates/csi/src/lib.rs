//! What the kubelet speaks with storage drivers and other plugins: the Node service of the Container Storage Interface v1, and
//! the registration by which a plugin makes itself known. Messages, clients and server traits; it must not know Kubernetes.

/// The generated messages and services of `csi.v1`.
// Generated code is not held to the house's lints.
#[allow(clippy::all, deprecated, rustdoc::all)]
#[rustfmt::skip]
pub mod v1;

/// The generated messages and services of `pluginregistration`.
#[allow(clippy::all, deprecated, rustdoc::all)]
#[rustfmt::skip]
pub mod registration;

pub use tonic::transport::Channel;
pub use tonic::{Code, Request, Response, Status};
pub use v1::node_client::NodeClient;

use std::path::PathBuf;

/// A channel to the plugin behind a unix socket. It connects with the first call, and again when the plugin was restarted.
pub fn channel(socket: impl Into<PathBuf>) -> Channel {
    let socket = socket.into();
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let socket = socket.clone();
        async move {
            let stream = tokio::net::UnixStream::connect(socket).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    // The authority is not used on a unix socket, but gRPC demands one.
    tonic::transport::Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector)
}
