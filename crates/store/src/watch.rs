//! What a subscriber holds: the stream of batches, and the position that tells how far it must have
//! read to be as new as the store.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::{Error, KeyValue, Result};

/// One change of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub key: Arc<str>,
    /// The revision of the change.
    pub revision: i64,
    /// Equal to `revision` when this put created the key; 0 in a delete.
    pub create_revision: i64,
    /// `None`: the key was deleted.
    pub value: Option<Bytes>,
}

impl Event {
    pub fn is_create(&self) -> bool {
        self.value.is_some() && self.create_revision == self.revision
    }

    /// The state after the event, if the key still exists.
    pub fn key_value(&self) -> Option<KeyValue> {
        Some(KeyValue {
            key: self.key.clone(),
            value: self.value.clone()?,
            create_revision: self.create_revision,
            mod_revision: self.revision,
        })
    }
}

/// Events in order. After a batch the subscriber has seen everything up to `revision`; a batch without
/// events is progress alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    pub events: Vec<Event>,
    pub revision: i64,
}

/// How far a watch has been fed, to be read while someone else drains the watch.
#[derive(Debug)]
pub struct Position {
    queued: AtomicI64,
    overflowed: AtomicBool,
    store_revision: Arc<AtomicI64>,
}

impl Position {
    pub(crate) fn new(queued: i64, store_revision: Arc<AtomicI64>) -> Arc<Position> {
        Arc::new(Position {
            queued: AtomicI64::new(queued),
            overflowed: AtomicBool::new(false),
            store_revision,
        })
    }

    /// `(revision, queued)`: a subscriber that has handled its events up to `queued` knows everything
    /// about its prefix up to `revision`. This is how a quiet prefix keeps up with a busy store
    /// without a message for every foreign write.
    ///
    /// `queued` is `i64::MAX` once the watch was dropped for being slow, because nothing vouches for
    /// its subscriber any more.
    pub fn sync_point(&self) -> (i64, i64) {
        // The order matters: a feeder raises `queued` before the store's revision.
        let revision = self.store_revision.load(Ordering::Acquire);
        (revision, self.queued.load(Ordering::Acquire))
    }

    pub(crate) fn raise(&self, revision: i64) {
        self.queued.fetch_max(revision, Ordering::AcqRel);
    }

    pub(crate) fn overflow(&self) {
        self.overflowed.store(true, Ordering::Release);
        self.raise(i64::MAX);
    }
}

/// A value as its reader wants it.
pub enum Opened<'a> {
    Ready(Bytes),
    /// Somebody else must be asked first.
    Later(Pin<Box<dyn Future<Output = Bytes> + Send + 'a>>),
}

/// Makes stored values what their reader wants, such as decrypted.
pub trait OpenValues: Send + Sync {
    fn open_value<'a>(&'a self, key: &'a str, stored: Bytes) -> Opened<'a>;
}

/// A batch whose first events are opened.
struct Opening {
    batch: Batch,
    opened: usize,
}

/// A subscription. Its queue is bounded; a subscriber that lets it overflow gets [`Error::Lagged`]
/// after what was queued, and starts again from the revision it reached.
pub struct Watch {
    replay: VecDeque<Batch>,
    live: mpsc::Receiver<Result<Batch>>,
    position: Arc<Position>,
    opener: Option<Arc<dyn OpenValues>>,
    /// Kept here, and not in the future of `next`, so that dropping that future loses no event.
    opening: Option<Opening>,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Watch")
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

impl Watch {
    pub(crate) fn new(
        replay: Option<Batch>,
        live: mpsc::Receiver<Result<Batch>>,
        position: Arc<Position>,
    ) -> Watch {
        Watch {
            replay: replay.into_iter().collect(),
            live,
            position,
            opener: None,
            opening: None,
        }
    }

    /// The same watch, with every value opened before it is handed out.
    pub fn opened_by(self, opener: Arc<dyn OpenValues>) -> Watch {
        Watch {
            opener: Some(opener),
            ..self
        }
    }

    pub fn position(&self) -> Arc<Position> {
        self.position.clone()
    }

    /// The next batch; after an error the watch is over. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<Batch> {
        if self.opening.is_none() {
            let batch = self.next_stored().await?;
            if self.opener.is_none() {
                return Ok(batch);
            }
            self.opening = Some(Opening { batch, opened: 0 });
        }
        if let (Some(opener), Some(Opening { batch, opened })) = (&self.opener, &mut self.opening) {
            while let Some(event) = batch.events.get_mut(*opened) {
                if let Some(stored) = event.value.clone() {
                    event.value = Some(match opener.open_value(&event.key, stored) {
                        Opened::Ready(value) => value,
                        Opened::Later(value) => value.await,
                    });
                }
                *opened += 1;
            }
        }
        match self.opening.take() {
            Some(opening) => Ok(opening.batch),
            None => Err(Error::Unavailable("the store was closed".to_owned())),
        }
    }

    async fn next_stored(&mut self) -> Result<Batch> {
        if let Some(batch) = self.replay.pop_front() {
            return Ok(batch);
        }
        match self.live.recv().await {
            Some(result) => result,
            None if self.position.overflowed.load(Ordering::Acquire) => Err(Error::Lagged),
            None => Err(Error::Unavailable("the store was closed".to_owned())),
        }
    }
}
