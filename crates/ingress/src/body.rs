//! Bodies on their way through: streamed, never collected, with limits for their size and for how long either side may
//! keep the other waiting.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

use crate::http1::BackendBody;

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A client that sends a body sends some of it within this time.
const CLIENT_PAUSE: Duration = Duration::from_secs(60);
/// As long may a backend be silent in the middle of its response.
const BACKEND_PAUSE: Duration = Duration::from_secs(600);
/// A client takes some of its response within this time.
const STALLED: Duration = Duration::from_secs(60);

/// Frames that a copy of a body may be behind.
const COPY_FRAMES: usize = 64;

#[derive(Debug, thiserror::Error)]
enum BodyError {
    #[error("the body is larger than {0} bytes")]
    TooLarge(u64),
    #[error("the client does not go on with its body")]
    ClientPaused,
    #[error("the backend does not go on with its response")]
    BackendPaused,
    #[error("the time for the request is over")]
    TimeOver,
    #[error("a copy of the body broke off")]
    CopyBroken,
}

/// Starts anew at every frame.
#[derive(Default)]
struct Pause(Option<Pin<Box<Sleep>>>);

impl Pause {
    /// Ready when `limit` has passed since the last `clear`.
    fn poll(&mut self, limit: Duration, context: &mut Context<'_>) -> Poll<()> {
        let sleep = self.0.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        sleep.as_mut().poll(context)
    }

    fn clear(&mut self) {
        self.0 = None;
    }
}

/// The body of a client's request. It stays here until an endpoint reads of it, so that a request can be sent to
/// another endpoint if the first one was not reached.
#[derive(Clone)]
pub struct RequestBody(Arc<Mutex<Shared>>);

struct Shared {
    incoming: Option<Incoming>,
    /// Somebody began to read.
    touched: bool,
    last_read: Option<Instant>,
    left: Option<u64>,
    limit: u64,
    /// The endpoint has some of it and has not asked for more.
    sending: bool,
    /// What the client is told when its body cannot be passed on.
    failed: Option<StatusCode>,
    /// Who gets a copy of what is read.
    copies: Vec<mpsc::Sender<Option<Bytes>>>,
}

impl RequestBody {
    pub fn new(incoming: Incoming, limit: Option<u64>) -> RequestBody {
        RequestBody(Arc::new(Mutex::new(Shared {
            incoming: Some(incoming),
            touched: false,
            last_read: None,
            left: limit,
            limit: limit.unwrap_or_default(),
            sending: false,
            failed: None,
            copies: Vec::new(),
        })))
    }

    pub fn lend(&self) -> LentBody {
        LentBody::new(Source::Client {
            shared: self.clone(),
            incoming: None,
            pause: Pause::default(),
        })
    }

    /// A body that gets a copy of what an endpoint reads of this one. It breaks off where its own reader is too slow:
    /// nobody waits for it.
    pub fn copy(&self) -> LentBody {
        let (sender, receiver) = mpsc::channel(COPY_FRAMES);
        let mut shared = self.0.lock();
        let is_empty = shared.incoming.as_ref().is_none_or(Body::is_end_stream);
        if !is_empty {
            shared.copies.push(sender);
        }
        LentBody::new(Source::Copy { receiver, is_empty })
    }

    /// Whether it can be sent once more.
    pub fn is_untouched(&self) -> bool {
        !self.0.lock().touched
    }

    /// When the client last sent some of it.
    pub fn last_read(&self) -> Option<Instant> {
        self.0.lock().last_read
    }

    /// Whether the endpoint is what keeps the rest waiting.
    pub fn is_sending(&self) -> bool {
        self.0.lock().sending
    }

    pub fn failed(&self) -> Option<StatusCode> {
        self.0.lock().failed
    }

    fn fail(&self, status: StatusCode, error: impl Into<BoxError>) -> BoxError {
        self.0.lock().failed = Some(status);
        error.into()
    }
}

/// The body as one endpoint gets it.
pub struct LentBody {
    source: Source,
    /// Bodies without content have none.
    unsent: Option<Arc<()>>,
}

/// Tells whether a body is still being sent.
pub struct BodyWatch(Weak<()>);

impl BodyWatch {
    pub fn is_unsent(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl LentBody {
    fn new(source: Source) -> LentBody {
        let mut body = LentBody { source, unsent: None };
        body.unsent = (!body.is_end_stream()).then(Arc::default);
        body
    }

    /// Of a request that has none.
    pub fn empty() -> LentBody {
        let (_, receiver) = mpsc::channel(1);
        LentBody::new(Source::Copy {
            receiver,
            is_empty: true,
        })
    }

    pub fn watch(&self) -> BodyWatch {
        BodyWatch(self.unsent.as_ref().map_or_else(Weak::new, Arc::downgrade))
    }
}

enum Source {
    Client {
        shared: RequestBody,
        incoming: Option<Incoming>,
        pause: Pause,
    },
    Copy {
        /// `None` is the end; a sender that is gone without it broke off.
        receiver: mpsc::Receiver<Option<Bytes>>,
        is_empty: bool,
    },
}

impl Shared {
    /// Hands a frame, or the end, to those that get a copy.
    fn copied(&mut self, data: Option<&Bytes>) {
        self.copies.retain(|copy| copy.try_send(data.cloned()).is_ok());
    }
}

impl Body for LentBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let (owner, incoming, pause) = match &mut self.get_mut().source {
            Source::Client {
                shared,
                incoming,
                pause,
            } => (shared, incoming, pause),
            Source::Copy { is_empty: true, .. } => return Poll::Ready(None),
            Source::Copy { receiver, .. } => {
                return Poll::Ready(match ready!(receiver.poll_recv(context)) {
                    Some(Some(data)) => Some(Ok(Frame::data(data))),
                    Some(None) => None,
                    None => Some(Err(BodyError::CopyBroken.into())),
                });
            }
        };
        if incoming.is_none() {
            let mut shared = owner.0.lock();
            shared.touched = true;
            *incoming = shared.incoming.take();
        }
        let Some(incoming) = incoming else {
            return Poll::Ready(None);
        };
        let Poll::Ready(frame) = Pin::new(&mut *incoming).poll_frame(context) else {
            owner.0.lock().sending = false;
            ready!(pause.poll(CLIENT_PAUSE, context));
            let error = owner.fail(StatusCode::REQUEST_TIMEOUT, BodyError::ClientPaused);
            return Poll::Ready(Some(Err(error)));
        };
        pause.clear();
        Poll::Ready(match frame {
            None => {
                let mut shared = owner.0.lock();
                shared.sending = false;
                shared.copied(None);
                None
            }
            // What cannot be read of the client is its fault.
            Some(Err(error)) => Some(Err(owner.fail(StatusCode::BAD_REQUEST, error))),
            Some(Ok(frame)) => {
                let size = frame.data_ref().map_or(0, |data| data.len() as u64);
                let mut shared = owner.0.lock();
                shared.last_read = Some(Instant::now());
                match shared.left {
                    Some(left) if size > left => {
                        let limit = shared.limit;
                        drop(shared);
                        let error = BodyError::TooLarge(limit);
                        Some(Err(owner.fail(StatusCode::PAYLOAD_TOO_LARGE, error)))
                    }
                    left => {
                        shared.left = left.map(|left| left - size);
                        if let Some(data) = frame.data_ref() {
                            shared.copied(Some(data));
                        }
                        // Whoever knows the length does not ask for the end.
                        shared.sending = !incoming.is_end_stream();
                        if !shared.sending {
                            shared.copied(None);
                        }
                        Some(Ok(frame))
                    }
                }
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Client {
                incoming: Some(incoming),
                ..
            } => incoming.is_end_stream(),
            Source::Client { shared, .. } => {
                let shared = shared.0.lock();
                shared.incoming.as_ref().is_none_or(Body::is_end_stream)
            }
            Source::Copy { is_empty, .. } => *is_empty,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Client { shared, incoming, .. } => {
                let shared = shared.0.lock();
                let incoming = incoming.as_ref().or(shared.incoming.as_ref());
                incoming.map_or(SizeHint::with_exact(0), Body::size_hint)
            }
            Source::Copy { is_empty: true, .. } => SizeHint::with_exact(0),
            Source::Copy { .. } => SizeHint::default(),
        }
    }
}

/// Since when a client could have taken more of its response.
#[derive(Clone, Default)]
pub struct Stall(Arc<Mutex<Option<Instant>>>);

impl Stall {
    pub fn deadline(&self) -> Option<Instant> {
        self.0.lock().map(|since| since + STALLED)
    }
}

/// What is to do when a response is over, however it ends: the number of bytes that were handed on.
pub type AtEnd = Box<dyn FnOnce(u64) + Send>;

/// The body of a response.
pub struct ResponseBody {
    kind: Kind,
    /// Of a stream of HTTP/2.
    stall: Option<Stall>,
    pause: Pause,
    /// How long a backend may be silent.
    silence: Duration,
    deadline: Option<Pin<Box<Sleep>>>,
    sent: u64,
    at_end: Option<AtEnd>,
}

enum Kind {
    Text(Option<Bytes>),
    Backend(BackendBody),
}

impl ResponseBody {
    pub fn text(text: impl Into<Bytes>) -> ResponseBody {
        ResponseBody::new(Kind::Text(Some(text.into()).filter(|text| !text.is_empty())))
    }

    pub fn backend(body: BackendBody) -> ResponseBody {
        ResponseBody::new(Kind::Backend(body))
    }

    fn new(kind: Kind) -> ResponseBody {
        ResponseBody {
            kind,
            stall: None,
            pause: Pause::default(),
            silence: BACKEND_PAUSE,
            deadline: None,
            sent: 0,
            at_end: None,
        }
    }

    /// Breaks off when the backend is silent for so long.
    pub fn silent_for(mut self, silence: Option<Duration>) -> ResponseBody {
        self.silence = silence.unwrap_or(BACKEND_PAUSE);
        self
    }

    /// Breaks off at this time.
    pub fn until(mut self, deadline: Option<Instant>) -> ResponseBody {
        self.deadline = deadline.map(|at| Box::pin(tokio::time::sleep_until(at)));
        self
    }

    pub fn watched(mut self, stall: Option<Stall>, at_end: AtEnd) -> ResponseBody {
        self.stall = stall;
        self.at_end = Some(at_end);
        self
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        if let Some(at_end) = self.at_end.take() {
            at_end(self.sent);
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if let Some(stall) = &this.stall {
            *stall.0.lock() = None;
        }
        let incoming = match &mut this.kind {
            Kind::Text(text) => {
                let text = text.take();
                this.sent += text.as_ref().map_or(0, |text| text.len() as u64);
                return Poll::Ready(text.map(|text| Ok(Frame::data(text))));
            }
            Kind::Backend(incoming) => incoming,
        };
        let Poll::Ready(frame) = Pin::new(incoming).poll_frame(context) else {
            let deadline = this.deadline.as_mut();
            if deadline.is_some_and(|deadline| deadline.as_mut().poll(context).is_ready()) {
                return Poll::Ready(Some(Err(BodyError::TimeOver.into())));
            }
            ready!(this.pause.poll(this.silence, context));
            return Poll::Ready(Some(Err(BodyError::BackendPaused.into())));
        };
        this.pause.clear();
        if let Some(Ok(frame)) = &frame {
            this.sent += frame.data_ref().map_or(0, |data| data.len() as u64);
            if let Some(stall) = &this.stall {
                *stall.0.lock() = Some(Instant::now());
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Text(text) => text.is_none(),
            Kind::Backend(incoming) => incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Text(text) => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
            Kind::Backend(incoming) => incoming.size_hint(),
        }
    }
}
