//! Calls to a cluster of etcd members: which member, for how long, and what an error means. It knows
//! the calls but not what they are for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::uri::PathAndQuery;
use prost::Message;
use tonic::client::Grpc;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use super::Options;
use super::proto::{StatusRequest, StatusResponse, WatchRequest, WatchResponse};
use crate::{Error, Result};

/// Longer than etcd's own limit for a request (5 s and two election timeouts).
const CALL: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(3);
/// The most an answer may be: a page of the largest objects.
const ANSWER: usize = 512 << 20;

pub const STATUS: &str = "/etcdserverpb.Maintenance/Status";

pub struct Client {
    members: Vec<Channel>,
    /// The member that answered last.
    current: AtomicUsize,
    pub place: String,
}

/// Whether a call may be sent again when it is not known if it was carried out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Again {
    Yes,
    /// Only when it surely was not.
    Unsent,
}

impl Client {
    /// Prepares channels; they connect when used. Must be called within a tokio runtime.
    pub fn new(options: &Options) -> Result<Client> {
        if options.endpoints.is_empty() {
            return Err(Error::Invalid("--etcd-servers names no server".to_owned()));
        }
        let tls = tls(options)?;
        let mut members = Vec::new();
        for endpoint in &options.endpoints {
            members.push(channel(endpoint, tls.as_ref())?);
        }
        let place = format!("etcd at {}", options.endpoints.join(","));
        Ok(Client {
            members,
            current: AtomicUsize::new(0),
            place,
        })
    }

    /// One call, on the current member or on the next ones when it cannot be had.
    pub async fn call<Q, A>(&self, path: &'static str, request: Q, again: Again) -> Result<A, Status>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let mut last = Status::unavailable("no member");
        // A single member gets a second chance too: its connection may just have been lost.
        for _ in 0..self.members.len().max(2) {
            let at = self.current.load(Ordering::Relaxed);
            let answer = tokio::time::timeout(CALL, self.call_member(at, path, request.clone())).await;
            let status = match answer {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded(format!("no answer in {CALL:?}")),
            };
            if !matches!(
                status.code(),
                Code::Unavailable | Code::DeadlineExceeded | Code::Unknown
            ) {
                return Err(status);
            }
            self.turn_from(at);
            let unsent = was_not_sent(&status);
            last = status;
            if again == Again::Unsent && !unsent {
                break;
            }
        }
        Err(last)
    }

    async fn call_member<Q, A>(&self, at: usize, path: &'static str, request: Q) -> Result<A, Status>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = self.grpc(at);
        ready(&mut grpc).await?;
        let path = PathAndQuery::from_static(path);
        Ok(grpc
            .unary(Request::new(request), path, ProstCodec::default())
            .await?
            .into_inner())
    }

    /// Opens a watch stream on the current member, whose version comes along. The stream ends when `requests` does.
    pub async fn watch(
        &self,
        requests: tokio::sync::mpsc::Receiver<WatchRequest>,
    ) -> Result<(tonic::Streaming<WatchResponse>, String), Status> {
        let at = self.current.load(Ordering::Relaxed);
        let mut grpc = self.grpc(at);
        let mut request = Request::new(tokio_stream::wrappers::ReceiverStream::new(requests));
        // A member that lost its cluster must say so rather than be silent.
        request
            .metadata_mut()
            .insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let open = async {
            ready(&mut grpc).await?;
            let status: StatusResponse = self.call_member(at, STATUS, StatusRequest {}).await?;
            let opened = grpc.streaming(request, path, ProstCodec::default()).await?;
            Ok((opened.into_inner(), status.version))
        };
        let opened = match tokio::time::timeout(CALL, open).await {
            Ok(opened) => opened,
            Err(_) => Err(Status::deadline_exceeded(format!("no answer in {CALL:?}"))),
        };
        opened.inspect_err(|_| self.turn_from(at))
    }

    /// The next member takes over, unless another call has seen to that already.
    pub fn turn(&self) {
        self.turn_from(self.current.load(Ordering::Relaxed));
    }

    fn turn_from(&self, at: usize) {
        let next = (at + 1) % self.members.len();
        let _ = self
            .current
            .compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn grpc(&self, at: usize) -> Grpc<Channel> {
        Grpc::new(self.members[at].clone()).max_decoding_message_size(ANSWER)
    }
}

async fn ready(grpc: &mut Grpc<Channel>) -> Result<(), Status> {
    grpc.ready()
        .await
        .map_err(|error| Status::from_error(Box::new(error)))
}

/// Whether etcd surely did not carry out the call: there was no connection, or it says so itself.
fn was_not_sent(status: &Status) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(status);
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    status.message() == "etcdserver: no leader"
}

fn channel(endpoint: &str, tls: Option<&ClientTlsConfig>) -> Result<Channel> {
    let invalid =
        |error: &dyn std::fmt::Display| Error::Invalid(format!("etcd server {endpoint:?}: {error}"));
    let uri = if endpoint.contains("://") {
        endpoint.to_owned()
    } else {
        format!("http://{endpoint}")
    };
    let https = uri.starts_with("https://");
    let mut prepared = Endpoint::from_shared(uri)
        .map_err(|error| invalid(&error))?
        .connect_timeout(CONNECT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true);
    if https {
        let Some(tls) = tls else {
            return Err(invalid(&"https needs --etcd-cafile"));
        };
        prepared = prepared
            .tls_config(tls.clone())
            .map_err(|error| invalid(&error))?;
    }
    Ok(prepared.connect_lazy())
}

fn tls(options: &Options) -> Result<Option<ClientTlsConfig>> {
    let read = |path: &std::path::Path| {
        std::fs::read(path).map_err(|error| Error::Invalid(format!("{}: {error}", path.display())))
    };
    let Some(ca) = &options.ca_file else {
        return match (&options.cert_file, &options.key_file) {
            (None, None) => Ok(None),
            _ => Err(Error::Invalid(
                "--etcd-certfile and --etcd-keyfile need --etcd-cafile".to_owned(),
            )),
        };
    };
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(ca)?));
    match (&options.cert_file, &options.key_file) {
        (Some(cert), Some(key)) => tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?)),
        (None, None) => {}
        _ => {
            return Err(Error::Invalid(
                "--etcd-certfile and --etcd-keyfile go together".to_owned(),
            ));
        }
    }
    Ok(Some(tls))
}

/// What a failed call means. `requested` is the revision the call was about, `current` the newest known.
pub fn translate(status: Status, requested: i64, current: i64) -> Error {
    let message = status.message();
    match status.code() {
        Code::OutOfRange if message.contains("compacted") => Error::Compacted { revision: requested },
        Code::OutOfRange if message.contains("future revision") => {
            Error::FutureRevision { requested, current }
        }
        Code::OutOfRange => Error::TooLarge(message.to_owned()),
        Code::ResourceExhausted if message.contains("space exceeded") => Error::DiskFull(message.to_owned()),
        // COMPAT: upstream's client counts before it sends, and says it so.
        Code::ResourceExhausted if message.contains("larger than max") => {
            let told = message.replace("grpc: received message", "trying to send message");
            Error::TooLarge(format!("rpc error: code = ResourceExhausted desc = {told}"))
        }
        Code::InvalidArgument if message.contains("too large") => Error::TooLarge(message.to_owned()),
        Code::InvalidArgument | Code::Unauthenticated | Code::PermissionDenied | Code::Unimplemented => {
            Error::Invalid(format!("etcd: {message}"))
        }
        Code::DataLoss => Error::Corrupt(message.to_owned()),
        _ => Error::Unavailable(describe(&status)),
    }
}

/// The message with its causes: tonic's own says little ("transport error").
fn describe(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let part = error.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etcds_errors() {
        let check = |code: Code, message: &str, expected: Error| {
            assert_eq!(translate(Status::new(code, message), 5, 9), expected, "{message}");
        };
        let compacted = "etcdserver: mvcc: required revision has been compacted";
        check(Code::OutOfRange, compacted, Error::Compacted { revision: 5 });
        let future = "etcdserver: mvcc: required revision is a future revision";
        check(
            Code::OutOfRange,
            future,
            Error::FutureRevision {
                requested: 5,
                current: 9,
            },
        );
        let space = "etcdserver: mvcc: database space exceeded";
        check(Code::ResourceExhausted, space, Error::DiskFull(space.to_owned()));
        let large = "etcdserver: request is too large";
        check(Code::InvalidArgument, large, Error::TooLarge(large.to_owned()));
        let huge = "grpc: received message larger than max (9 vs. 5)";
        let told =
            "rpc error: code = ResourceExhausted desc = trying to send message larger than max (9 vs. 5)";
        check(Code::ResourceExhausted, huge, Error::TooLarge(told.to_owned()));
        for message in ["etcdserver: no leader", "etcdserver: request timed out"] {
            check(Code::Unavailable, message, Error::Unavailable(message.to_owned()));
        }
    }
}
