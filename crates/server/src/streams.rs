//! The streams of one HTTP/2 connection, run by the task of the connection itself instead of by one task each.
//! A request that is alone on its connection is answered where it was read, and an event for fifty watches of a
//! connection wakes one task, not fifty. Requests that come while another is worked on, and those that may take
//! long, still get a task of their own, so that they neither wait for each other nor share one core.
//!
//! ```text
//! hyper ── execute(stream) ──► Streams ──► polled by `drive`, with the connection ──► Cork
//!                                 └─────► a task of its own
//! ```

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::stream::{FuturesUnordered, StreamExt};
use futures::task::AtomicWaker;
use http::{Method, Request, header};
use parking_lot::Mutex;
use tokio::time::Sleep;

use crate::connections::Deadline;

/// How often one turn goes around before others are let run.
const ROUNDS: usize = 16;

/// What is known of a request before it is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    /// Idle for most of its life.
    Watch,
    /// Worked on in a moment, or waiting for the store.
    Short,
    /// May keep a core busy for long, or many others waiting.
    Long,
}

impl Sort {
    /// A guess, and only for speed: whatever it is, the request is answered in the same way.
    fn of<B>(request: &Request<B>) -> Sort {
        let query = request.uri().query().unwrap_or("");
        if request.method() == Method::GET && query.contains("watch=") {
            return Sort::Watch;
        }
        let accept = request.headers().get(header::ACCEPT);
        let accept = accept.and_then(|accept| accept.to_str().ok()).unwrap_or("");
        // Other forms than the cached one are made of every object of a list.
        let as_cached = !accept.contains(';') && !accept.contains("protobuf") && !accept.contains("yaml");
        match *request.method() {
            Method::GET if as_cached => Sort::Short,
            Method::POST | Method::PUT | Method::PATCH => Sort::Short,
            _ => Sort::Long,
        }
    }
}

/// A stream that is reset when the client does not take its answer in time. There is a timer only where an answer
/// could not be sent at once.
struct Bounded {
    stream: Pin<Box<dyn Future<Output = ()> + Send>>,
    deadline: Option<Arc<Deadline>>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Bounded {
    fn new(stream: impl Future<Output = ()> + Send + 'static, deadline: Option<Arc<Deadline>>) -> Bounded {
        Bounded {
            stream: Box::pin(stream),
            deadline,
            timer: None,
        }
    }
}

impl Future for Bounded {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.stream.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        let Some(at) = this.deadline.as_ref().and_then(|deadline| deadline.at()) else {
            return Poll::Pending;
        };
        let timer = this
            .timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(at)));
        timer.as_mut().poll(context)
    }
}

/// The executor that a connection gives its streams to. Its clones are the same.
#[derive(Clone, Default)]
pub struct Streams(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// Given but not yet taken over by [`Streams::drive`]. Leaf lock.
    given: Mutex<Given>,
    /// Requests that the connection's task works on, watches not counted.
    busy: AtomicUsize,
    /// Whether a stream was polled since this was last asked.
    polled: AtomicBool,
}

#[derive(Default)]
struct Given {
    /// What the next stream is, and when its answer must have been taken.
    next: Option<(Sort, Arc<Deadline>)>,
    streams: Vec<Local>,
    /// Nobody takes over any more.
    closed: bool,
}

/// A stream that the connection's task runs.
struct Local {
    stream: Bounded,
    watch: bool,
    shared: Arc<Shared>,
}

impl Drop for Local {
    fn drop(&mut self) {
        if !self.watch {
            self.shared.busy.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Future for Local {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.shared.polled.store(true, Ordering::Relaxed);
        // A panic ends this stream, not the connection.
        let polled = catch_unwind(AssertUnwindSafe(|| Pin::new(&mut self.stream).poll(context)));
        polled.unwrap_or_else(|_| {
            tracing::error!("the body of an answer panicked");
            Poll::Ready(())
        })
    }
}

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, stream: F) {
        let mut given = self.0.given.lock();
        let (sort, deadline) = match given.next.take() {
            Some((sort, deadline)) => (sort, Some(deadline)),
            None => (Sort::Long, None),
        };
        let here = match sort {
            Sort::Watch => true,
            Sort::Short => self.0.busy.load(Ordering::Relaxed) == 0,
            Sort::Long => false,
        };
        if given.closed || !here {
            drop(given);
            tokio::spawn(Bounded::new(stream, deadline));
            return;
        }
        let local = Local {
            stream: Bounded::new(stream, deadline),
            watch: sort == Sort::Watch,
            shared: self.0.clone(),
        };
        if !local.watch {
            self.0.busy.fetch_add(1, Ordering::Relaxed);
        }
        given.streams.push(local);
    }
}

impl Streams {
    /// Says what the stream is that is executed next.
    pub fn announce<B>(&self, request: &Request<B>, deadline: &Arc<Deadline>) {
        self.0.given.lock().next = Some((Sort::of(request), deadline.clone()));
    }

    /// Runs the connection and the streams that stay with it.
    pub fn drive<F: Future>(self, connection: F) -> impl Future<Output = F::Output> {
        let taken = Taken {
            streams: FuturesUnordered::new(),
            shared: self.0,
        };
        run(taken, connection)
    }
}

async fn run<F: Future>(mut taken: Taken, connection: F) -> F::Output {
    let mut connection = std::pin::pin!(connection);
    let bell = Arc::new(Bell::default());
    let waker = Waker::from(bell.clone());
    poll_fn(|outer| {
        bell.outer.register(outer.waker());
        bell.inside.store(true, Ordering::SeqCst);
        let context = &mut Context::from_waker(&waker);
        for _ in 0..ROUNDS {
            bell.rung.store(false, Ordering::SeqCst);
            if let Poll::Ready(output) = connection.as_mut().poll(context) {
                return Poll::Ready(output);
            }
            let worked = taken.poll(context);
            if !worked && !bell.rung.load(Ordering::SeqCst) {
                break;
            }
        }
        bell.inside.store(false, Ordering::SeqCst);
        // Rung after the last look, or there was no end to it.
        if bell.rung.load(Ordering::SeqCst) {
            outer.waker().wake_by_ref();
        }
        Poll::Pending
    })
    .await
}

/// The streams that the connection's task has taken over.
struct Taken {
    streams: FuturesUnordered<Local>,
    shared: Arc<Shared>,
}

impl Taken {
    /// Polls what is ready; false if nothing was.
    fn poll(&mut self, context: &mut Context<'_>) -> bool {
        self.streams.extend(self.shared.given.lock().streams.drain(..));
        while let Poll::Ready(Some(())) = self.streams.poll_next_unpin(context) {}
        self.shared.polled.swap(false, Ordering::Relaxed)
    }
}

impl Drop for Taken {
    /// Streams hold their executor: what is left here would keep itself alive.
    fn drop(&mut self) {
        let mut given = self.shared.given.lock();
        given.closed = true;
        let left = std::mem::take(&mut given.streams);
        drop(given);
        drop(left);
    }
}

/// Wakes the connection's task, unless that is at work here and will look again by itself: the streams and the
/// connection wake each other all the time.
#[derive(Default)]
struct Bell {
    inside: AtomicBool,
    rung: AtomicBool,
    outer: AtomicWaker,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::SeqCst);
        if !self.inside.load(Ordering::SeqCst)
            && let Some(task) = self.outer.take()
        {
            skiff_registry::postpone(task);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::rt::Executor;
    use std::time::Duration;
    use tokio::sync::{mpsc, oneshot};

    fn next(streams: &Streams, sort: Sort) -> Arc<Deadline> {
        let deadline = Arc::new(Deadline::new(Duration::ZERO));
        streams.0.given.lock().next = Some((sort, deadline.clone()));
        deadline
    }

    fn request(method: &str, uri: &str, accept: &str) -> Request<()> {
        let request = Request::builder().method(method).uri(uri);
        request.header("accept", accept).body(()).expect("a request")
    }

    #[test]
    fn requests_are_sorted() {
        let check = |method: &str, uri: &str, accept: &str, expected: Sort| {
            assert_eq!(
                Sort::of(&request(method, uri, accept)),
                expected,
                "{method} {uri} {accept}"
            );
        };
        check("GET", "/api/v1/pods?watch=true", "application/json", Sort::Watch);
        check("GET", "/api/v1/pods", "application/json", Sort::Short);
        check(
            "GET",
            "/api/v1/pods",
            "application/vnd.kubernetes.protobuf",
            Sort::Long,
        );
        check(
            "GET",
            "/api/v1/pods",
            "application/json;as=Table;v=v1",
            Sort::Long,
        );
        check(
            "PUT",
            "/api/v1/pods/a?watch=true",
            "application/json",
            Sort::Short,
        );
        check("DELETE", "/api/v1/pods", "application/json", Sort::Long);
    }

    #[tokio::test]
    async fn one_short_request_at_a_time_stays_with_the_connection() {
        let streams = Streams::default();
        let (ends, mut ended) = mpsc::unbounded_channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let start = |name: &'static str, sort: Sort| {
            let (go, gone) = oneshot::channel::<()>();
            next(&streams, sort);
            let ends = ends.clone();
            streams.execute(async move {
                let _ = gone.await;
                let _ = ends.send((name, tokio::task::id()));
            });
            go
        };
        let first = start("first", Sort::Short);
        let second = start("second", Sort::Short);
        let watch = start("watch", Sort::Watch);
        let long = start("long", Sort::Long);
        let state = streams.clone();
        let run = tokio::spawn(streams.drive(stopped));
        let task = run.id();
        let mut check = async |go: oneshot::Sender<()>, name: &str, here: bool| {
            let _ = go.send(());
            let (seen, by) = ended.recv().await.expect("ends");
            assert_eq!((seen, by == task), (name, here));
        };
        check(second, "second", false).await;
        check(watch, "watch", true).await;
        check(first, "first", true).await;
        check(long, "long", false).await;
        let _ = stop.send(());
        let _ = run.await.expect("no panic");
        assert_eq!(state.0.busy.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn streams_and_connection_wake_each_other() {
        // The stream feeds the connection, as a body does; both must come to the end without anybody else.
        let streams = Streams::default();
        let (sender, mut receiver) = mpsc::channel(1);
        next(&streams, Sort::Watch);
        streams.execute(async move {
            for number in 0..1000 {
                let _ = sender.send(number).await;
            }
        });
        let connection = async move {
            let mut sum = 0;
            while let Some(number) = receiver.recv().await {
                sum += number;
            }
            sum
        };
        assert_eq!(streams.drive(connection).await, 499_500);
    }

    #[tokio::test]
    async fn a_panic_ends_its_stream_only() {
        let streams = Streams::default();
        let (ends, ended) = oneshot::channel();
        next(&streams, Sort::Watch);
        streams.execute(async { panic!("a stream") });
        next(&streams, Sort::Watch);
        streams.execute(async move {
            tokio::task::yield_now().await;
            let _ = ends.send(7);
        });
        assert_eq!(streams.drive(ended).await, Ok(7));
    }

    #[tokio::test]
    async fn an_answer_that_nobody_takes_ends_its_stream_only() {
        for sort in [Sort::Watch, Sort::Short, Sort::Long] {
            let streams = Streams::default();
            let (holds, held) = oneshot::channel::<()>();
            let deadline = next(&streams, sort);
            streams.execute(async move {
                let _holds = holds;
                deadline.start();
                std::future::pending::<()>().await;
            });
            assert!(streams.drive(held).await.is_err(), "{sort:?}");
        }
    }

    #[tokio::test]
    async fn what_is_left_at_the_end_is_dropped() {
        let streams = Streams::default();
        let (sender, receiver) = oneshot::channel::<()>();
        let copy = streams.clone();
        next(&streams, Sort::Watch);
        streams.execute(async move {
            let _executor = copy;
            let _sender = sender;
            std::future::pending::<()>().await;
        });
        drop(streams.drive(std::future::pending::<()>()));
        assert!(receiver.await.is_err());
    }
}
