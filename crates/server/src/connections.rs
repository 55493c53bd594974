//! What one client, slow or hostile, may take of the HTTPS door: how many connections there are, how long each may
//! do nothing, and how long an answer may wait to be read. It knows nothing of HTTP but that there are requests.
//!
//! One look at all connections every few seconds ends those that are over a limit; none has a timer of its own.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// A body is handed on in pieces of this size, so that a client that takes nothing makes one of them wait in memory,
/// not the whole body.
const PIECE: usize = 64 * 1024;

/// Connections at a time, if as many files may be open.
const CONNECTIONS: usize = 8192;

/// The limits of the HTTPS door. The defaults are upstream's where upstream has one.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at a time. A new one beyond that takes the place of one that does nothing.
    pub connections: usize,
    /// From the first byte to the end of the TLS handshake.
    pub handshake: Duration,
    /// From the last answer to the end of the next request's headers (HTTP/1.1).
    pub headers: Duration,
    /// A connection without a request ends after this.
    pub idle: Duration,
    /// From the start of an answer to its end, but for watches and other long requests.
    pub answer: Duration,
    /// A client that takes not one byte of what is sent to it is gone after this.
    pub stalled: Duration,
    /// What is under way when a connection is ended may take this long.
    pub drain: Duration,
}

/// A connection is a file; the rest of the process needs some, too.
fn most_connections() -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let files = files.current.and_then(|files| usize::try_from(files).ok());
    files.map_or(CONNECTIONS, |files| (files / 2).clamp(64, CONNECTIONS))
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: most_connections(),
            handshake: Duration::from_secs(10),
            headers: Duration::from_secs(32),
            idle: Duration::from_secs(90),
            answer: Duration::from_secs(60),
            stalled: Duration::from_secs(60),
            drain: Duration::from_secs(2),
        }
    }
}

/// The connections that are open.
pub struct Connections {
    limits: Limits,
    room: Arc<Semaphore>,
    /// Leaf lock.
    open: Mutex<HashMap<u64, Arc<Usage>>>,
    next: AtomicU64,
    began: Instant,
}

/// What one connection does.
pub struct Usage {
    /// Cancelled when the connection shall end.
    pub end: CancellationToken,
    /// Requests that are not yet answered to the end.
    requests: AtomicUsize,
    /// Whether it ever had a request.
    used: AtomicBool,
    /// The millisecond, of those of [`Connections`], since which it has no request.
    since: AtomicU64,
    /// The millisecond since which what was written could not be sent, plus one; 0: it can.
    stuck: AtomicU64,
    /// Of the one request that a connection of HTTP/1.1 has at a time. Leaf lock.
    deadline: Mutex<Option<Arc<Deadline>>>,
    began: Instant,
}

/// A slot of the connection limit, released on drop.
pub struct ConnectionSlot {
    pub usage: Arc<Usage>,
    key: u64,
    connections: Arc<Connections>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.connections.open.lock().remove(&self.key);
    }
}

impl Connections {
    pub fn new(limits: Limits) -> Arc<Connections> {
        Arc::new(Connections {
            room: Arc::new(Semaphore::new(limits.connections)),
            limits,
            open: Mutex::default(),
            next: AtomicU64::new(0),
            began: Instant::now(),
        })
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// A place for a new connection. If there is none, the connection that has done nothing for longest makes room:
    /// first among those that never had a request.
    pub async fn place(self: &Arc<Self>) -> ConnectionSlot {
        let permit = loop {
            if let Ok(permit) = Arc::clone(&self.room).try_acquire_owned() {
                break permit;
            }
            self.make_room();
            let freed = Arc::clone(&self.room).acquire_owned();
            // All may be at work, and one of them idle in a moment.
            if let Ok(Ok(permit)) = tokio::time::timeout(Duration::from_millis(100), freed).await {
                break permit;
            }
        };
        let usage = Arc::new(Usage {
            end: CancellationToken::new(),
            requests: AtomicUsize::new(0),
            used: AtomicBool::new(false),
            since: AtomicU64::new(milliseconds(self.began)),
            stuck: AtomicU64::new(0),
            deadline: Mutex::default(),
            began: self.began,
        });
        let key = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.lock().insert(key, usage.clone());
        ConnectionSlot {
            usage,
            key,
            connections: self.clone(),
            _permit: permit,
        }
    }

    fn make_room(&self) {
        let open = self.open.lock();
        let idle = open
            .values()
            .filter(|usage| usage.requests.load(Ordering::Relaxed) == 0 && !usage.end.is_cancelled());
        let order = |usage: &&Arc<Usage>| {
            let used = usage.used.load(Ordering::Relaxed);
            (used, usage.since.load(Ordering::Relaxed))
        };
        if let Some(usage) = idle.min_by_key(order) {
            usage.end.cancel();
        }
    }

    /// Ends connections that are over a limit, for as long as it is polled.
    pub async fn sweep(&self) {
        let shortest = self.limits.idle.min(self.limits.stalled).min(self.limits.answer);
        let mut turns = tokio::time::interval((shortest / 8).max(Duration::from_millis(10)));
        turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            turns.tick().await;
            let now = milliseconds(self.began);
            for usage in self.open.lock().values() {
                if usage.over(&self.limits, now) {
                    usage.end.cancel();
                }
            }
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.open.lock().len()
    }
}

fn milliseconds(began: Instant) -> u64 {
    began.elapsed().as_millis() as u64
}

impl Usage {
    fn over(&self, limits: &Limits, now: u64) -> bool {
        let past = |since: u64, limit: Duration| u128::from(now.saturating_sub(since)) >= limit.as_millis();
        let stuck = self.stuck.load(Ordering::Relaxed);
        if stuck > 0 && past(stuck - 1, limits.stalled) {
            return true;
        }
        if self.requests.load(Ordering::Relaxed) == 0 {
            return past(self.since.load(Ordering::Relaxed), limits.idle);
        }
        let deadline = self.deadline.lock().clone();
        deadline
            .and_then(|deadline| deadline.at())
            .is_some_and(|at| at <= tokio::time::Instant::now())
    }

    /// A request begins. `alone`: the connection has one at a time.
    pub fn request(self: &Arc<Self>, deadline: &Arc<Deadline>, alone: bool) -> Busy {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.used.store(true, Ordering::Relaxed);
        if alone {
            *self.deadline.lock() = Some(deadline.clone());
        }
        Busy(self.clone())
    }

    /// Whether what was written waits for the client.
    pub fn stuck(&self, is: bool) {
        if is {
            let now = milliseconds(self.began) + 1;
            let _ = self
                .stuck
                .compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        } else if self.stuck.load(Ordering::Relaxed) != 0 {
            self.stuck.store(0, Ordering::Relaxed);
        }
    }
}

/// A request that is worked on or being answered.
pub struct Busy(Arc<Usage>);

impl Drop for Busy {
    fn drop(&mut self) {
        let usage = &self.0;
        usage.since.store(milliseconds(usage.began), Ordering::Relaxed);
        *usage.deadline.lock() = None;
        usage.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// When the answer to a request must have been taken by the client. It comes with the request, among its extensions,
/// and is set when the answer begins.
pub struct Deadline {
    limit: Duration,
    at: OnceLock<tokio::time::Instant>,
}

impl Deadline {
    pub fn new(limit: Duration) -> Deadline {
        Deadline {
            limit,
            at: OnceLock::new(),
        }
    }

    pub fn at(&self) -> Option<tokio::time::Instant> {
        self.at.get().copied()
    }

    /// The answer begins now, and ends after the limit.
    pub fn start(&self) {
        let _ = self.at.set(tokio::time::Instant::now() + self.limit);
    }

    /// The answer begins now, but is meant to last until `end`.
    pub fn start_long(&self, end: tokio::time::Instant) {
        let _ = self.at.set(end + self.limit);
    }
}

/// The body of an answer on its way to a client.
pub struct Answering<B> {
    body: B,
    /// What is left of a frame that was too large.
    rest: Bytes,
    _busy: Busy,
}

impl<B> Answering<B> {
    pub fn new(body: B, busy: Busy) -> Answering<B> {
        Answering {
            body,
            rest: Bytes::new(),
            _busy: busy,
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Answering<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.get_mut();
        if this.rest.is_empty() {
            let frame = match ready!(Pin::new(&mut this.body).poll_frame(context)) {
                Some(Ok(frame)) => frame,
                other => return Poll::Ready(other),
            };
            match frame.into_data() {
                Ok(data) if data.len() > PIECE => this.rest = data,
                Ok(data) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
        let piece = this.rest.split_to(PIECE.min(this.rest.len()));
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (hint, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut whole = SizeHint::new();
        if let Some(upper) = hint.upper() {
            whole.set_upper(upper + rest);
        }
        whole.set_lower(hint.lower() + rest);
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::{BodyExt, Full};

    fn limits(connections: usize) -> Limits {
        Limits {
            connections,
            ..Limits::default()
        }
    }

    fn deadline() -> Arc<Deadline> {
        Arc::new(Deadline::new(Duration::from_secs(1)))
    }

    #[tokio::test]
    async fn the_longest_unused_makes_room() {
        let connections = Connections::new(limits(3));
        let used = connections.place().await;
        drop(used.usage.request(&deadline(), false));
        let busy = connections.place().await;
        let _busy = busy.usage.request(&deadline(), false);
        let unused = connections.place().await;
        let (evicted, waiting) = (unused.usage.end.clone(), connections.clone());
        let fourth = tokio::spawn(async move { waiting.place().await });
        evicted.cancelled().await;
        drop(unused);
        let fourth = fourth.await.expect("a place");
        assert!(!used.usage.end.is_cancelled() && !busy.usage.end.is_cancelled());
        // Now there is no unused one older than the fourth, which is itself unused: it goes before the used one.
        let waiting = connections.clone();
        let fifth = tokio::spawn(async move { waiting.place().await });
        fourth.usage.end.cancelled().await;
        drop(fourth);
        let fifth = fifth.await.expect("a place");
        drop(fifth.usage.request(&deadline(), false));
        let waiting = connections.clone();
        let sixth = tokio::spawn(async move { waiting.place().await });
        used.usage.end.cancelled().await;
        drop(used);
        let _sixth = sixth.await.expect("a place");
        assert!(!busy.usage.end.is_cancelled(), "who is at work stays");
        assert_eq!(connections.len(), 3);
    }

    #[tokio::test]
    async fn limits_are_told_apart() {
        let connections = Connections::new(limits(1));
        let place = connections.place().await;
        let usage = &place.usage;
        let limits = Limits::default();
        let (idle, stalled) = (limits.idle.as_millis() as u64, limits.stalled.as_millis() as u64);
        assert!(!usage.over(&limits, idle - 1000));
        assert!(usage.over(&limits, idle + 1000), "nothing was asked");
        let answered = deadline();
        let busy = usage.request(&answered, true);
        assert!(!usage.over(&limits, idle + 1000), "a request is worked on");
        usage.stuck(true);
        assert!(!usage.over(&limits, stalled - 1000));
        assert!(usage.over(&limits, stalled + 1000), "nothing was taken");
        usage.stuck(false);
        assert!(!usage.over(&limits, stalled + 1000));
        answered.at.set(tokio::time::Instant::now()).expect("is not set");
        assert!(usage.over(&limits, 0), "the answer was not taken in time");
        drop(busy);
        assert!(!usage.over(&limits, 0));
    }

    #[tokio::test]
    async fn a_body_goes_in_pieces() {
        let connections = Connections::new(limits(1));
        let place = connections.place().await;
        for (length, pieces) in [(0, 0), (1, 1), (PIECE, 1), (PIECE + 1, 2), (5 * PIECE, 5)] {
            let bytes = Bytes::from(vec![7; length]);
            let busy = place.usage.request(&deadline(), false);
            let mut body = Answering::new(Full::new(bytes.clone()), busy);
            assert_eq!(body.size_hint().exact(), Some(length as u64));
            let (mut seen, mut count) = (Vec::new(), 0);
            while let Some(frame) = body.frame().await {
                let frame = frame.expect("a frame");
                seen.extend_from_slice(frame.data_ref().expect("data"));
                count += 1;
                assert_eq!(body.size_hint().exact(), Some((length - seen.len()) as u64));
                assert_eq!(body.is_end_stream(), seen.len() == length);
            }
            assert_eq!((seen, count), (bytes.to_vec(), pieces), "{length} bytes");
        }
    }
}
