//! Calls to a cluster of etcd members: which member, for how long, and what an error means. It knows
//! the calls but not what they are for.

use std::sync::Arc;
use std::time::Duration;

use http::uri::PathAndQuery;
use prost::Message;
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::client::Grpc;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use super::Options;
use super::members::{self, InUse, Members};
use super::proto::{WatchRequest, WatchResponse};
use crate::{Error, Result};

/// Longer than etcd's own limit for a request (5 s and two election timeouts).
const CALL: Duration = Duration::from_secs(10);
/// How long a call that must not be sent again waits for a member that was left: it may only be slow.
const LAST_WAIT: Duration = Duration::from_secs(2);
const CONNECT: Duration = Duration::from_secs(3);

pub const STATUS: &str = "/etcdserverpb.Maintenance/Status";

pub struct Client {
    members: Arc<Members>,
    pub place: String,
    /// Ends the task that looks after the members.
    _look_after: DropGuard,
}

/// Whether a call may be sent again when it is not known if it was carried out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Again {
    Yes,
    /// Only when it surely was not.
    Unsent,
}

/// An open watch, and the member that it is on.
pub struct OpenWatch {
    pub messages: tonic::Streaming<WatchResponse>,
    pub version: String,
    pub member: InUse,
}

impl Client {
    /// Prepares channels; they connect when used. Must be called within a tokio runtime.
    pub fn new(options: &Options) -> Result<Client> {
        if options.endpoints.is_empty() {
            return Err(Error::Invalid("--etcd-servers names no server".to_owned()));
        }
        let tls = tls(options)?;
        let mut channels = Vec::new();
        for endpoint in &options.endpoints {
            channels.push(channel(endpoint, tls.as_ref())?);
        }
        let members = Arc::new(Members::new(channels));
        let stop = CancellationToken::new();
        // A single member has nobody to be compared with.
        if members.len() > 1 {
            let looked_after = Arc::downgrade(&members);
            skiff_supervise::keep("etcd-members", &stop, move || {
                Members::look_after(looked_after.clone())
            });
        }
        Ok(Client {
            members,
            place: format!("etcd at {}", options.endpoints.join(",")),
            _look_after: stop.drop_guard(),
        })
    }

    /// One call, on the current member or on the next ones when it cannot be had.
    pub async fn call<Q, A>(&self, path: &'static str, request: Q, again: Again) -> Result<A, Status>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        self.call_and_tell(path, request, again, &Notify::new()).await
    }

    /// A call that etcd carries out at most once however often it is sent, because it compares a revision that it
    /// changes. It is sent to another member too when the first one falls silent. `is_done` tells that an answer
    /// is that of the call which was carried out. If neither is, the call was carried out by nobody only when both
    /// say so: otherwise the one without an answer may have been it.
    pub async fn call_fenced<Q, A>(
        &self,
        path: &'static str,
        request: Q,
        is_done: fn(&A) -> bool,
    ) -> Result<A, Status>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let lost = Notify::new();
        let first = self.call_and_tell(path, request.clone(), Again::Unsent, &lost);
        tokio::pin!(first);
        tokio::select! {
            biased;
            answer = &mut first => return answer,
            () = lost.notified() => {}
        }
        let second = self.call(path, request, Again::Unsent);
        tokio::pin!(second);
        let mut undone: Option<Result<A, Status>> = None;
        let (mut first_ended, mut second_ended) = (false, false);
        loop {
            let answer: Result<A, Status> = tokio::select! {
                answer = &mut first, if !first_ended => {
                    first_ended = true;
                    answer
                }
                answer = &mut second, if !second_ended => {
                    second_ended = true;
                    answer
                }
            };
            match (answer, undone.take()) {
                (Ok(answer), _) if is_done(&answer) => return Ok(answer),
                (answer, None) => undone = Some(answer),
                (Ok(answer), Some(Ok(_))) => return Ok(answer),
                (Err(status), Some(_)) | (Ok(_), Some(Err(status))) => return Err(status),
            }
        }
    }

    /// Tells `lost` when the call waits for a member that was left.
    async fn call_and_tell<Q, A>(
        &self,
        path: &'static str,
        request: Q,
        again: Again,
        lost: &Notify,
    ) -> Result<A, Status>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let mut last = Status::unavailable("no member");
        // A single member gets a second chance too: its connection may just have been lost.
        for _ in 0..self.members.len().max(2) {
            let mut member = self.members.enter();
            let call = call_member(member.grpc(), path, request.clone());
            tokio::pin!(call);
            let left = async {
                member.lost().await;
                if again == Again::Unsent {
                    lost.notify_one();
                    tokio::time::sleep(LAST_WAIT).await;
                }
            };
            let answer = tokio::select! {
                biased;
                answer = &mut call => answer,
                () = left => Err(Status::unavailable("the member does not answer")),
                () = tokio::time::sleep(CALL) => {
                    Err(Status::deadline_exceeded(format!("no answer in {CALL:?}")))
                }
            };
            let status = match answer {
                Ok(answer) => {
                    member.heard();
                    return Ok(answer);
                }
                Err(status) => status,
            };
            if !matches!(
                status.code(),
                Code::Unavailable | Code::DeadlineExceeded | Code::Unknown
            ) {
                member.heard();
                return Err(status);
            }
            self.members.turn_from(member.at);
            let unsent = was_not_sent(&status);
            last = status;
            if again == Again::Unsent && !unsent {
                break;
            }
        }
        Err(last)
    }

    /// Opens a watch stream on the current member. The stream ends when `requests` does.
    pub async fn watch(
        &self,
        requests: tokio::sync::mpsc::Receiver<WatchRequest>,
    ) -> Result<OpenWatch, Status> {
        let mut member = self.members.enter();
        let mut grpc = member.grpc();
        let mut request = Request::new(tokio_stream::wrappers::ReceiverStream::new(requests));
        // A member that lost its cluster must say so rather than be silent.
        request
            .metadata_mut()
            .insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let open = async {
            let status = members::status(grpc.clone()).await?;
            ready(&mut grpc).await?;
            let opened = grpc.streaming(request, path, ProstCodec::default()).await?;
            Ok((opened.into_inner(), status.version))
        };
        let opened = tokio::select! {
            biased;
            opened = open => opened,
            () = member.lost() => Err(Status::unavailable("the member does not answer")),
            () = tokio::time::sleep(CALL) => Err(Status::deadline_exceeded(format!("no answer in {CALL:?}"))),
        };
        match opened {
            Ok((messages, version)) => Ok(OpenWatch {
                messages,
                version,
                member,
            }),
            Err(status) => {
                self.turn_from(&member);
                Err(status)
            }
        }
    }

    /// Another member takes over from this one, unless that has happened already.
    pub fn turn_from(&self, member: &InUse) {
        self.members.turn_from(member.at);
    }
}

async fn call_member<Q, A>(mut grpc: Grpc<Channel>, path: &'static str, request: Q) -> Result<A, Status>
where
    Q: Message + Clone + 'static,
    A: Message + Default + 'static,
{
    ready(&mut grpc).await?;
    let path = PathAndQuery::from_static(path);
    Ok(grpc
        .unary(Request::new(request), path, ProstCodec::default())
        .await?
        .into_inner())
}

pub async fn ready(grpc: &mut Grpc<Channel>) -> Result<(), Status> {
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
