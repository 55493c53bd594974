//! What the kubelet speaks with those who bring devices: device plugins (v1beta1), drivers of dynamic resources (v1, which
//! v1beta1 shares all messages with), and the PodResources API (v1) for who watches them. Messages, clients and server
//! traits; it must not know Kubernetes' objects.

mod authority;

pub use authority::Connection;

/// The generated messages and services of device plugins, `v1beta1`.
// Generated code is not held to the house's lints.
#[allow(clippy::all, deprecated, rustdoc::all)]
#[rustfmt::skip]
pub mod deviceplugin;

/// The generated messages and services of DRA drivers, `k8s.io.kubelet.pkg.apis.dra.v1`.
#[allow(clippy::all, deprecated, rustdoc::all)]
#[rustfmt::skip]
pub mod dra;

/// The generated messages and services of the health of DRA devices, `v1alpha1`.
#[allow(clippy::all, deprecated, rustdoc::all)]
#[rustfmt::skip]
pub mod dra_health;

/// The generated messages and services of the PodResources API, `v1`.
#[allow(clippy::all, deprecated, rustdoc::all)]
#[rustfmt::skip]
pub mod podresources;

pub use tonic::transport::Channel;
pub use tonic::{Code, Request, Response, Status};

use std::path::PathBuf;

/// A plugin's answer is read up to this size: gRPC's own default, which upstream's kubelet has for plugins.
pub const MAX_MESSAGE_SIZE: usize = 4 * 1024 * 1024;

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

/// The gRPC service of a version of the DRA API: `v1.DRAPlugin`, as drivers name it at their registration.
pub const DRA_V1: &str = "v1.DRAPlugin";
pub const DRA_V1BETA1: &str = "v1beta1.DRAPlugin";

/// Calls a DRA driver by the version that it offers.
#[derive(Clone)]
pub struct DraClient {
    channel: Channel,
    service: &'static str,
}

impl DraClient {
    /// `service` is [`DRA_V1`] or [`DRA_V1BETA1`].
    pub fn new(channel: Channel, service: &str) -> Self {
        let service = if service == DRA_V1BETA1 {
            "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"
        } else {
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
        };
        DraClient { channel, service }
    }

    async fn call<Req, Res>(&self, name: &str, request: Req) -> Result<Res, Status>
    where
        Req: prost::Message + 'static,
        Res: prost::Message + Default + 'static,
    {
        let path = format!("{}/{name}", self.service)
            .parse()
            .map_err(|_| Status::internal("invalid name of a call"))?;
        let mut grpc =
            tonic::client::Grpc::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE_SIZE);
        grpc.ready()
            .await
            .map_err(|error| Status::unavailable(error.to_string()))?;
        let codec = tonic_prost::ProstCodec::default();
        grpc.unary(Request::new(request), path, codec)
            .await
            .map(Response::into_inner)
    }

    pub async fn prepare(
        &self,
        claims: Vec<dra::Claim>,
    ) -> Result<dra::NodePrepareResourcesResponse, Status> {
        let request = dra::NodePrepareResourcesRequest { claims };
        self.call("NodePrepareResources", request).await
    }

    pub async fn unprepare(
        &self,
        claims: Vec<dra::Claim>,
    ) -> Result<dra::NodeUnprepareResourcesResponse, Status> {
        let request = dra::NodeUnprepareResourcesRequest { claims };
        self.call("NodeUnprepareResources", request).await
    }
}
