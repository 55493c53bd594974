//! HTTP/1.1 connections to an endpoint. A connection has no task of its own: whoever sent a request on it drives it, first
//! until the response begins, then as the response's body is read. In between it waits in the endpoint's pool, for a
//! request of the same thread.
//!
//! hyper's own account decides whether a connection can be used again: `SendRequest::is_ready` is true only when both
//! messages are over. What is dropped in the middle of a message is closed.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::FutureExt as _;
use http::{Request, Response, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::backend::Endpoint;
use crate::body::{BoxError, LentBody};
use crate::dial::{self, Stream};
use crate::upstream::SendError;
use crate::workers::{self, MAX_WORKERS};

/// Shorter than the keep-alive of common servers, so that few requests meet a connection that is just closing.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often idle connections are looked at.
const SWEEP: Duration = Duration::from_secs(5);
/// What is left of a request may take this long when nobody reads its response any more: an endpoint that takes nothing must not
/// hold a connection for ever.
const FINISH_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle connections of one endpoint that a thread keeps.
const MAX_IDLE: usize = 64;
/// Headers of a response.
const MAX_HEADERS: usize = 100;

/// A connection, and the end that requests are put in at.
struct Live {
    sender: SendRequest<LentBody>,
    connection: Connection<TokioIo<Stream>, LentBody>,
}

impl Live {
    async fn connect(endpoint: &Endpoint, timeout: Duration) -> Result<Box<Live>, BoxError> {
        let connecting = async {
            let stream = dial::connect(endpoint).await?;
            let mut builder = Builder::new();
            builder.max_headers(MAX_HEADERS);
            Ok::<_, BoxError>(builder.handshake(TokioIo::new(stream)).await?)
        };
        let (sender, connection) = tokio::time::timeout(timeout, connecting).await??;
        Ok(Box::new(Live { sender, connection }))
    }

    /// Ready when the connection is over; it must not be polled after that.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.connection).poll(context).map(drop)
    }

    /// Polls it until `news` has some. The task is woken for the connection's sake only: a wake-up between its parts,
    /// which are all polled here, would have the whole task run once more for nothing.
    fn poll_for<T>(
        live: &mut Option<Box<Live>>,
        context: &mut Context<'_>,
        mut news: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let asleep = &mut Context::from_waker(Waker::noop());
        for awake in [false, true] {
            let Some(driven) = live else { break };
            let context = if awake { &mut *context } else { &mut *asleep };
            if driven.poll(context).is_ready() {
                // What was not sent comes back, and what was not read fails, when the connection is dropped.
                *live = None;
                break;
            }
            if let Poll::Ready(found) = news(asleep) {
                return Poll::Ready(found);
            }
        }
        match live {
            Some(_) => Poll::Pending,
            None => news(context),
        }
    }

    /// Whether it takes another request. An endpoint that closed it, or said something unasked, is noticed here.
    fn is_free(&mut self) -> bool {
        let context = &mut Context::from_waker(Waker::noop());
        self.poll(context).is_pending() && self.sender.is_ready()
    }

    /// Goes on until both messages are over; `None` if the connection is.
    async fn finish(mut self: Box<Self>) -> Option<Box<Self>> {
        let free = std::future::poll_fn(|context| match self.poll(context) {
            Poll::Ready(()) => Poll::Ready(false),
            Poll::Pending if self.sender.is_ready() => Poll::Ready(true),
            Poll::Pending => Poll::Pending,
        });
        free.await.then_some(self)
    }
}

/// The idle connections of one endpoint, for each thread its own.
#[derive(Default)]
pub struct Http1Pool([Mutex<Idle>; MAX_WORKERS]);

#[derive(Default)]
struct Idle {
    /// The one that was used last is the last.
    connections: Vec<(Instant, Box<Live>)>,
    /// Somebody looks at them.
    swept: bool,
}

impl std::fmt::Debug for Http1Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Http1Pool")
    }
}

impl Http1Pool {
    fn take(&self) -> Option<Box<Live>> {
        let idle = &self.0[workers::number()];
        loop {
            let (since, mut live) = idle.lock().connections.pop()?;
            if since.elapsed() < IDLE_TIMEOUT && live.is_free() {
                return Some(live);
            }
        }
    }
}

/// Keeps a connection that is free for the next request.
fn put(endpoint: &Arc<Endpoint>, live: Box<Live>) {
    let number = workers::number();
    // There is none when the process ends.
    let Ok(runtime) = Handle::try_current() else {
        return;
    };
    let mut idle = endpoint.http1.0[number].lock();
    if idle.connections.len() >= MAX_IDLE {
        return;
    }
    idle.connections.push((Instant::now(), live));
    if !std::mem::replace(&mut idle.swept, true) {
        runtime.spawn(sweep(Arc::downgrade(endpoint), number));
    }
}

/// Closes what nobody used for long, and what the endpoint closed, until nothing is left.
async fn sweep(endpoint: Weak<Endpoint>, number: usize) {
    loop {
        tokio::time::sleep(SWEEP).await;
        let Some(endpoint) = endpoint.upgrade() else {
            return;
        };
        let mut idle = endpoint.http1.0[number].lock();
        let keep =
            |(since, live): &mut (Instant, Box<Live>)| since.elapsed() < IDLE_TIMEOUT && live.is_free();
        idle.connections.retain_mut(keep);
        if idle.connections.is_empty() {
            idle.swept = false;
            return;
        }
    }
}

/// Sends a request whose address is a path, with the host as a header.
pub async fn send(
    endpoint: &Arc<Endpoint>,
    mut request: Request<LentBody>,
    connect_timeout: Duration,
) -> Result<Response<BackendBody>, SendError> {
    let body = request.body().watch();
    loop {
        let idle = endpoint.http1.take();
        let is_new = idle.is_none();
        let live = match idle {
            Some(live) => live,
            // In a box, as all that is rare: the future of a request is copied more than once.
            None => Box::pin(Live::connect(endpoint, connect_timeout))
                .await
                .map_err(SendError::Connect)?,
        };
        let exchanged = match request.headers().contains_key(header::UPGRADE) {
            true => Box::pin(exchange_protocol(live, request)).await,
            false => exchange(live, request)
                .await
                .map(|(response, live)| (response, live, None)),
        };
        let (response, live, mut reading) = match exchanged {
            Ok(done) => done,
            Err(mut failed) => match failed.take_message() {
                // The connection was just closed, and nothing of the request was sent.
                Some(unsent) if !is_new => {
                    request = unsent;
                    continue;
                }
                _ => return Err(SendError::Broken(failed.into_error().into())),
            },
        };
        let live = match live {
            // The rest of the request does not wait for the response to be read.
            Some(live) if body.is_unsent() => {
                let endpoint = endpoint.clone();
                reading = Some(drive_while_read(async move {
                    if let Some(live) = live.finish().await {
                        put(&endpoint, live);
                    }
                }));
                None
            }
            live => live,
        };
        return Ok(response.map(|incoming| BackendBody {
            incoming: Some(incoming),
            endpoint: live.is_some().then(|| endpoint.clone()),
            live,
            _reading: reading,
        }));
    }
}

/// Drives a connection in a task of its own, until it is done or for a while after the guard is dropped.
fn drive_while_read(driving: impl Future<Output = ()> + Send + 'static) -> DropGuard {
    let over = CancellationToken::new();
    let reading = over.clone().drop_guard();
    tokio::spawn(async move {
        let late = async {
            over.cancelled().await;
            tokio::time::sleep(FINISH_TIMEOUT).await;
        };
        tokio::select! {
            () = driving => {}
            () = late => {}
        }
    });
    reading
}

type Unsent = hyper::client::conn::TrySendError<Request<LentBody>>;

/// The response of an endpoint, and the connection unless that is over.
async fn exchange(
    mut live: Box<Live>,
    request: Request<LentBody>,
) -> Result<(Response<Incoming>, Option<Box<Live>>), Unsent> {
    let mut response = std::pin::pin!(live.sender.try_send_request(request));
    let mut live = Some(live);
    let response = std::future::poll_fn(|context| {
        Live::poll_for(&mut live, context, |context| response.as_mut().poll(context))
    });
    Ok((response.await?, live))
}

/// As [`exchange`], for a request that asks for another protocol: hyper hands over only a connection that has a task.
async fn exchange_protocol(
    live: Box<Live>,
    request: Request<LentBody>,
) -> Result<(Response<Incoming>, Option<Box<Live>>, Option<DropGuard>), Unsent> {
    let Live {
        mut sender,
        connection,
    } = *live;
    let reading = drive_while_read(connection.with_upgrades().map(drop));
    let response = sender.try_send_request(request).await?;
    Ok((response, None, Some(reading)))
}

/// The body of an endpoint's response.
pub struct BackendBody {
    incoming: Option<Incoming>,
    /// What is driven here; others are by a task.
    live: Option<Box<Live>>,
    /// Where it goes then.
    endpoint: Option<Arc<Endpoint>>,
    /// Whoever drives it else hears when nobody reads any more.
    _reading: Option<DropGuard>,
}

impl BackendBody {
    /// A body that somebody else drives.
    pub fn driven(incoming: Incoming) -> BackendBody {
        BackendBody {
            incoming: Some(incoming),
            live: None,
            endpoint: None,
            _reading: None,
        }
    }
}

impl Body for BackendBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let Some(incoming) = &mut this.incoming else {
            return Poll::Ready(None);
        };
        if this.live.is_some() {
            // hyper reads on only for a body that was asked for more.
            let asleep = &mut Context::from_waker(Waker::noop());
            if let Poll::Ready(frame) = Pin::new(&mut *incoming).poll_frame(asleep) {
                return Poll::Ready(frame);
            }
        }
        Live::poll_for(&mut this.live, context, |context| {
            Pin::new(&mut *incoming).poll_frame(context)
        })
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let incoming = self.incoming.as_ref();
        incoming.map_or(SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for BackendBody {
    fn drop(&mut self) {
        let (Some(mut live), Some(endpoint)) = (self.live.take(), self.endpoint.take()) else {
            return;
        };
        // hyper then reads what is left of the response if it has come, and ends the connection else.
        self.incoming = None;
        if live.sender.is_ready() || live.is_free() {
            put(&endpoint, live);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_takes_nothing_is_left() {
        let (held, mut is_held) = tokio::sync::oneshot::channel::<()>();
        let reading = drive_while_read(async move {
            let _held = held;
            std::future::pending().await
        });
        tokio::time::sleep(2 * FINISH_TIMEOUT).await;
        assert!(
            is_held
                .try_recv()
                .is_err_and(|error| error == tokio::sync::oneshot::error::TryRecvError::Empty)
        );
        drop(reading);
        // It ends without an answer.
        assert!(is_held.await.is_err());
    }
}
