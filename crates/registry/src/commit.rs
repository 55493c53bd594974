//! Handing a write to the store. Once the store has it, nobody can take it back: the client may go away (a timeout, a
//! closed connection), but the write is still carried out. So the write and what goes with it (addresses, ports) are one
//! transaction, and one piece of work that always runs to its end, in a task of its own if nobody waits for it any more.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use futures::FutureExt;
use futures::future::BoxFuture;
use skiff_store::{Error, Expect, KeyValue, Op, Store, Transacted, Write};
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

/// A write that failed, with what was to be written beside it.
pub(crate) struct Failed {
    pub error: Error,
    pub change: Change,
}

/// What a write came to.
pub(crate) enum Committed {
    Done {
        revision: i64,
    },
    /// The object is another than expected.
    Conflict {
        current: Option<KeyValue>,
    },
    /// The object is as expected, but not what is written beside it: the hook of its kind must be asked again.
    Overtaken,
}

impl Commits {
    pub fn new(store: Arc<dyn Store>) -> Commits {
        Commits {
            store,
            room: Arc::new(Semaphore::new(IN_FLIGHT_BYTES / UNIT)),
        }
    }

    /// Writes, together with `change`, also if the returned future is dropped.
    pub async fn write(&self, write: Write, change: Change) -> Result<Committed, Failed> {
        let room = self.room_for(&write.op).await;
        let store = self.store.clone();
        let work = async move {
            let _room = room;
            let committed = commit(&*store, write, &change).await;
            committed.map_err(|error| Failed { error, change })
        };
        Finish::new(work).await
    }

    /// Writes `mark`, and, if that is done and the object is to go, deletes it as well.
    pub async fn mark_and_remove(
        &self,
        mark: Write,
        remove: Option<Change>,
    ) -> Result<(Committed, Option<Committed>), Error> {
        let room = self.room_for(&mark.op).await;
        let store = self.store.clone();
        let work = async move {
            let _room = room;
            let key = mark.key.clone();
            let marked = commit(&*store, mark, &Change::default()).await?;
            let (Some(change), Committed::Done { revision }) = (remove, &marked) else {
                return Ok((marked, None));
            };
            let removal = Write::new(key, Expect::Revision(*revision), Op::Delete);
            let removed = commit(&*store, removal, &change).await?;
            Ok((marked, Some(removed)))
        };
        Finish::new(work).await
    }

    /// Until here a request can be cancelled without a trace.
    async fn room_for(&self, op: &Op) -> Option<tokio::sync::OwnedSemaphorePermit> {
        let bytes = match op {
            Op::Put(value) => value.len(),
            Op::Delete | Op::Merge(_) => 0,
        };
        let units = (1 + bytes / UNIT).min(IN_FLIGHT_BYTES / UNIT);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        // Never closed.
        self.room.clone().acquire_many_owned(units).await.ok()
    }
}

async fn commit(store: &dyn Store, write: Write, change: &Change) -> Result<Committed, Error> {
    let mut undo = Vec::with_capacity(change.before.len());
    let mut committed = Ok(Committed::Overtaken);
    for first in &change.before {
        committed = transact(store, vec![first.clone()]).await;
        match committed {
            Ok(Committed::Done { revision }) => {
                let own = Expect::Revision(revision);
                undo.push(Write::new(first.key.clone(), own, Op::Delete));
            }
            _ => break,
        }
    }
    if undo.len() == change.before.len() {
        let mut writes = change.with.clone();
        writes.push(write);
        committed = transact(store, writes).await;
    } else if let Ok(Committed::Conflict { .. }) = committed {
        committed = Ok(Committed::Overtaken);
    }
    let rest = match &committed {
        Ok(Committed::Done { .. }) => change.after.clone(),
        // The object may be there.
        Err(error) if is_open(error) => Vec::new(),
        _ => undo,
    };
    for write in rest {
        let key = write.key.clone();
        if let Err(error) = transact(store, vec![write]).await {
            tracing::warn!(%key, %error, "cannot free what an object held; a repair loop will");
        }
    }
    committed
}

/// The last one of `writes` is the object's.
async fn transact(store: &dyn Store, writes: Vec<Write>) -> Result<Committed, Error> {
    let last = writes.len().saturating_sub(1);
    Ok(match store.transact(writes).await? {
        Transacted::Done(written) => Committed::Done {
            revision: written.last().map_or(0, |written| written.revision),
        },
        Transacted::Conflict { at, current, .. } if at == last => Committed::Conflict { current },
        Transacted::Conflict { .. } => Committed::Overtaken,
    })
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
