//! gRPC health probes (`grpc.health.v1.Health/Check`).

use std::time::{Duration, Instant};

use super::Outcome;
use super::http::dial;
use crate::durations::go_duration;

#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

pub async fn probe(
    host: &str,
    port: u16,
    service: &str,
    timeout: Duration,
    patience: Option<Instant>,
) -> Outcome {
    let deadline = Instant::now() + timeout;
    let address = if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    };
    let stream = match dial(host, port, deadline, patience).await {
        Ok(stream) => stream,
        Err(error) if error.ends_with("i/o timeout") => {
            return Outcome::Failure(format!(
                "timeout: failed to connect service {address:?} within {}: context deadline exceeded",
                go_duration(timeout)
            ));
        }
        Err(error) => {
            return Outcome::Failure(format!(
                "error: failed to connect service at {address:?}: {error}"
            ));
        }
    };
    match tokio::time::timeout_at(deadline.into(), check(stream, service)).await {
        Err(_) => Outcome::Failure(format!(
            "timeout: health rpc did not complete within {}",
            go_duration(timeout)
        )),
        Ok(Err(status)) if status.code() == tonic::Code::Unimplemented => Outcome::Failure(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message()
        )),
        Ok(Err(status)) => Outcome::Failure(format!(
            "error: health rpc probe failed: {}",
            crate::images::describe(&status)
        )),
        Ok(Ok(1)) => Outcome::Success,
        Ok(Ok(other)) => {
            let name = match other {
                0 => "UNKNOWN".to_owned(),
                2 => "NOT_SERVING".to_owned(),
                3 => "SERVICE_UNKNOWN".to_owned(),
                n => n.to_string(),
            };
            Outcome::Failure(format!("service unhealthy (responded with {name:?})"))
        }
    }
}

async fn check(stream: tokio::net::TcpStream, service: &str) -> Result<i32, tonic::Status> {
    // The connection is made before, so the connector hands it over once.
    let mut stream = Some(stream);
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let stream = stream.take();
        async move {
            stream
                .map(hyper_util::rt::TokioIo::new)
                .ok_or_else(|| std::io::Error::other("the connection is used up"))
        }
    });
    let channel = tonic::transport::Endpoint::from_static("http://probe")
        .user_agent("kube-probe/1.36")
        .map_err(|e| tonic::Status::internal(e.to_string()))?
        .connect_with_connector(connector)
        .await
        .map_err(|e| tonic::Status::unavailable(e.to_string()))?;
    let mut client = tonic::client::Grpc::new(channel);
    client
        .ready()
        .await
        .map_err(|e| tonic::Status::unavailable(e.to_string()))?;
    let path = http::uri::PathAndQuery::from_static("/grpc.health.v1.Health/Check");
    let codec = tonic_prost::ProstCodec::<HealthCheckRequest, HealthCheckResponse>::default();
    let request = tonic::Request::new(HealthCheckRequest {
        service: service.to_owned(),
    });
    client
        .unary(request, path, codec)
        .await
        .map(|r| r.into_inner().status)
}
