//! Handing a write to the store. Once the store has it, nobody can take it back: the client may go away (a timeout, a
//! closed connection), but the write is still carried out. So the write and what depends on its outcome (addresses,
//! ports) are one piece of work that always runs to its end, in a task of its own if nobody waits for it any more.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use futures::FutureExt;
use futures::future::BoxFuture;
use skiff_store::{Error, Expect, Op, Outcome, Store};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::hooks::Change;

/// The most bytes of writes that the store holds at once, waited for or not. Further ones wait, and can be cancelled.
const IN_FLIGHT_BYTES: usize = 64 << 20;
/// The unit in which they are counted; also what a write takes beside its value.
const UNIT: usize = 1024;

/// The writes that were handed to the store and have no outcome yet.
pub(crate) struct Commits {
    store: Arc<dyn Store>,
    room: Arc<Semaphore>,
}

/// A write that did not happen, with what it took; or one of which that is not known, then `change` is empty.
pub(crate) struct Failed {
    pub error: Error,
    pub change: Change,
}

/// One write of one key.
pub(crate) struct Write {
    pub key: String,
    pub expect: Expect,
    pub op: Op,
    pub lease_seconds: Option<i64>,
}

impl Commits {
    pub fn new(store: Arc<dyn Store>) -> Commits {
        Commits {
            store,
            room: Arc::new(Semaphore::new(IN_FLIGHT_BYTES / UNIT)),
        }
    }

    /// Writes, and commits or reverts `change` by the outcome, also if the returned future is dropped.
    pub async fn write(&self, write: Write, change: Change) -> Result<Outcome, Failed> {
        let room = self.room_for(&write.op).await;
        let store = self.store.clone();
        let work = async move {
            let _room = room;
            settle(&*store, write, change).await
        };
        Finish::new(work).await
    }

    /// Writes `mark`, and, if that is done and the object is to go, deletes it as well.
    pub async fn mark_and_remove(
        &self,
        mark: Write,
        remove: Option<Change>,
    ) -> Result<(Outcome, Option<Outcome>), Failed> {
        let room = self.room_for(&mark.op).await;
        let store = self.store.clone();
        let work = async move {
            let _room = room;
            let key = mark.key.clone();
            let marked = settle(&*store, mark, Change::none()).await?;
            let (Some(change), Outcome::Done { revision, .. }) = (remove, &marked) else {
                return Ok((marked, None));
            };
            let removal = Write {
                key,
                expect: Expect::Revision(*revision),
                op: Op::Delete,
                lease_seconds: None,
            };
            let removed = settle(&*store, removal, change).await?;
            Ok((marked, Some(removed)))
        };
        Finish::new(work).await
    }

    /// Until here a request can be cancelled without a trace.
    async fn room_for(&self, op: &Op) -> Option<tokio::sync::OwnedSemaphorePermit> {
        let bytes = match op {
            Op::Put(value) => value.len(),
            Op::Delete => 0,
        };
        let units = (1 + bytes / UNIT).min(IN_FLIGHT_BYTES / UNIT);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        // Never closed.
        self.room.clone().acquire_many_owned(units).await.ok()
    }
}

async fn settle(store: &dyn Store, write: Write, mut change: Change) -> Result<Outcome, Failed> {
    // A panic in the store leaves the outcome open.
    change.handed_over();
    let Write {
        key,
        expect,
        op,
        lease_seconds,
    } = write;
    match store.write(&key, expect, op, lease_seconds).await {
        Ok(outcome) => {
            match outcome {
                Outcome::Done { .. } => change.commit(),
                Outcome::Conflict { .. } => change.revert(),
            }
            Ok(outcome)
        }
        Err(error) if is_open(&error) => {
            change.doubt();
            Err(Failed {
                error,
                change: Change::none(),
            })
        }
        Err(error) => {
            change.taken_back();
            Err(Failed { error, change })
        }
    }
}

/// Whether the write may have happened in spite of the error.
fn is_open(error: &Error) -> bool {
    match error {
        Error::Unavailable(_) | Error::Io(_) | Error::Corrupt(_) | Error::Lagged => true,
        Error::Compacted { .. }
        | Error::FutureRevision { .. }
        | Error::DiskFull(_)
        | Error::Encryption(_)
        | Error::TooLarge(_)
        | Error::NewerVersion { .. }
        | Error::InUse(_)
        | Error::Invalid(_) => false,
    }
}

/// Work that is polled by whoever waits for it, and goes on in a task of its own when that one goes away. To spawn it
/// at once would cost every write a hand-over between threads.
struct Finish<T: Send + 'static> {
    work: Option<BoxFuture<'static, T>>,
    runtime: Option<Handle>,
}

impl<T: Send + 'static> Finish<T> {
    fn new(work: impl Future<Output = T> + Send + 'static) -> Finish<T> {
        Finish {
            work: Some(work.boxed()),
            runtime: Handle::try_current().ok(),
        }
    }
}

impl<T: Send + 'static> Future for Finish<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<T> {
        // Taken out: work that panics is not polled again.
        let Some(mut work) = self.work.take() else {
            return Poll::Pending;
        };
        let polled = work.as_mut().poll(task);
        if polled.is_pending() {
            self.work = Some(work);
        }
        polled
    }
}

impl<T: Send + 'static> Drop for Finish<T> {
    fn drop(&mut self) {
        if let (Some(work), Some(runtime)) = (self.work.take(), &self.runtime) {
            runtime.spawn(work.map(drop));
        }
    }
}
