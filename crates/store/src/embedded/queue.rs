//! Who writes: the writer thread, to which requests wait in line, or a caller by itself, if it is alone.
//!
//! Two hand-overs between sleeping threads take longer than a quick disk. So a caller that finds nobody writing and
//! nobody waiting commits on its own thread. That thread may be one that also serves others, and a disk may stall; so
//! there is never more than one such caller, only where the runtime has another thread, only as long as commits are
//! quick, and the writer thread watches: when a commit takes long, it has the runtime wake another of its threads,
//! which then sees to the input and output that the first one was to look at next.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::{Error, Result, Transacted, Write};

/// Requests taken at once. More writes in one transaction do not make a commit much cheaper per write, only later.
pub const BATCH: usize = 512;
/// A caller's own commit that takes longer has stalled.
pub const STALL: Duration = Duration::from_millis(5);
/// After two writes met, callers hand theirs over for this long: those who come together are committed together.
const CROWDED: Duration = Duration::from_millis(20);
/// The writer thread watches for this long after a caller's own commit: to wake it for each would cost the caller, to
/// keep it awake would cost an idle cluster.
const WATCH: Duration = Duration::from_millis(100);

pub fn stopped() -> Error {
    Error::Unavailable("the store was closed".to_owned())
}

/// Whoever made the write panicked over it.
pub fn unfinished() -> Error {
    Error::Unavailable("the write was not finished".to_owned())
}

/// Writes that happen together, waiting in line.
pub struct Waiting {
    pub writes: Vec<Write>,
    pub reply: Reply,
}

/// Who waits for a transaction, and the place in line that it takes.
pub struct Reply {
    to: oneshot::Sender<Result<Transacted>>,
    _place: OwnedSemaphorePermit,
}

impl Reply {
    pub fn new(place: OwnedSemaphorePermit) -> (Reply, oneshot::Receiver<Result<Transacted>>) {
        let (to, answer) = oneshot::channel();
        (Reply { to, _place: place }, answer)
    }

    pub fn send(self, outcome: Result<Transacted>) {
        // Who has gone away does not want to know.
        let _ = self.to.send(outcome);
    }
}

pub enum Request {
    Write(Waiting),
    Compact {
        revision: i64,
        reply: oneshot::Sender<Result<()>>,
    },
    Tick {
        reply: oneshot::Sender<Result<()>>,
    },
    /// The values of old revisions.
    Read {
        revisions: Vec<i64>,
        reply: oneshot::Sender<Result<Vec<Option<Bytes>>>>,
    },
}

#[derive(Default)]
pub struct Queue {
    /// Leaf lock.
    inner: Mutex<Inner>,
    arrived: Condvar,
}

#[derive(Default)]
struct Inner {
    requests: VecDeque<Request>,
    closed: bool,
    /// The caller that commits by itself: since when, and where.
    here: Option<(Instant, Handle)>,
    last_here: Option<Instant>,
    /// Whether the writer thread looks every now and then at how `here` gets on.
    watched: bool,
    last_met: Option<Instant>,
}

/// A runtime that goes on when one of its threads does not; none for writes that are to be committed in groups.
pub fn spare_runtime() -> Option<Handle> {
    if crate::together::are_together() {
        return None;
    }
    let handle = Handle::try_current().ok()?;
    let spare = handle.runtime_flavor() == RuntimeFlavor::MultiThread && handle.metrics().num_workers() > 1;
    spare.then_some(handle)
}

impl Queue {
    pub fn push(&self, request: Request) -> Result<()> {
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err(stopped());
        }
        inner.requests.push_back(request);
        self.arrived.notify_one();
        Ok(())
    }

    pub fn close(&self) {
        self.inner.lock().closed = true;
        self.arrived.notify_one();
    }

    /// Two writes have met.
    pub fn met(&self) {
        self.inner.lock().last_met = Some(Instant::now());
    }

    /// Whether the caller, who holds the writer, may use it. If so, [`Queue::leave`] must follow.
    pub fn enter(&self, runtime: Handle) -> bool {
        let now = Instant::now();
        let mut inner = self.inner.lock();
        let crowded = inner
            .last_met
            .is_some_and(|met| now.duration_since(met) < CROWDED);
        if inner.closed || crowded || !inner.requests.is_empty() {
            return false;
        }
        inner.here = Some((now, runtime));
        if !inner.watched {
            inner.watched = true;
            self.arrived.notify_one();
        }
        true
    }

    pub fn leave(&self) {
        let mut inner = self.inner.lock();
        inner.here = None;
        inner.last_here = Some(Instant::now());
    }

    /// All that waits, up to a batch; nothing when `patience` ran out, or while callers commit by themselves. `None`:
    /// closed and drained.
    pub fn take(&self, patience: Duration) -> Option<Vec<Request>> {
        let mut inner = self.inner.lock();
        if inner.requests.is_empty() && !inner.closed {
            let patience = if inner.watched { STALL } else { patience };
            self.arrived.wait_for(&mut inner, patience);
            let quiet = inner.last_here.is_none_or(|last| last.elapsed() > WATCH);
            if inner.here.is_none() && quiet {
                inner.watched = false;
            }
        }
        if inner.requests.is_empty() && inner.closed {
            return None;
        }
        let count = inner.requests.len().min(BATCH);
        Some(inner.requests.drain(..count).collect())
    }

    /// Sees to it that a runtime goes on although a commit holds up one of its threads: a thread that commits may be
    /// the one that was to wait for input and output, and the others sleep until there is work. A new task wakes one.
    pub fn relieve(&self) {
        let stalled = match &self.inner.lock().here {
            Some((since, runtime)) if since.elapsed() >= STALL => Some(runtime.clone()),
            _ => None,
        };
        if let Some(runtime) = stalled {
            runtime.spawn(std::future::ready(()));
        }
    }
}
