//! The store: keys, bytes and one global revision. It knows no kind, parses no value and has no idea
//! what a namespace is. Two implementations, held to one suite (`tests/suite`): [`embedded`] for one
//! machine and [`etcd`] for many.
//!
//! The model is etcd's. Every write that changes something takes the next revision; a key remembers
//! the revision that created it and the one that last changed it; a write may ask for a certain last
//! revision and is refused when it finds another (compare and swap). A write is acknowledged only
//! when it is on disk. Old revisions can be read and watched until they are compacted:
//!
//! ```text
//! revision   2          3          4          5            compact(4) forgets a@2, keeps b@3 and a@4
//!            put a=1    put b=1    put a=2    delete b     range at 4: a=2, b=1   range at 3: Compacted
//! ```

pub mod embedded;
mod error;
pub mod etcd;
mod hub;
mod kine;
mod together;
mod transaction;
mod watch;

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

pub use embedded::Embedded;
pub use error::{Error, Result};
pub use etcd::Etcd;
pub use kine::Kine;
pub use together::together;
pub use transaction::{Merge, Merged, Transacted, Write, Written};
pub use watch::{Batch, Event, OpenValues, Opened, Position, Watch};

/// A key with its value, as of some revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyValue {
    /// Shared: the store, the watch cache and every event about the key point at one string.
    pub key: Arc<str>,
    pub value: Bytes,
    /// The revision at which the key came into being (a delete in between starts it anew).
    pub create_revision: i64,
    /// The revision of the last write; this is what clients see as `resourceVersion`.
    pub mod_revision: i64,
}

/// What a write asks of the key's present state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    Absent,
    Revision(i64),
    Any,
}

impl Expect {
    /// Whether a key whose last revision is `current` (`None`: absent) is what the writer expects.
    pub fn holds(self, current: Option<i64>) -> bool {
        match self {
            Expect::Any => true,
            Expect::Absent => current.is_none(),
            Expect::Revision(revision) => current == Some(revision),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    Put(Bytes),
    Delete,
    /// Puts what a function makes of the present value.
    Merge(Merge),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The write is on disk as `revision`. Deleting an absent key changes nothing: then `revision` is
    /// the store's present one and `previous` is `None`.
    Done {
        revision: i64,
        previous: Option<KeyValue>,
    },
    /// The expectation did not hold; nothing changed. `revision` is the store's.
    Conflict {
        current: Option<KeyValue>,
        revision: i64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeResult {
    /// In key order.
    pub items: Vec<KeyValue>,
    /// The store's revision at the time of the read (also for reads at an older revision, as in etcd).
    pub revision: i64,
    /// Whether the limit cut the result short.
    pub more: bool,
    /// How many keys there are after `start_after`, whatever the limit.
    pub count: i64,
}

/// No method has a default: one that a wrapper forgot to pass on would answer for the store within.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// The newest state of one key, and the store's revision.
    async fn get(&self, key: &str) -> Result<(Option<KeyValue>, i64)>;

    /// The keys that start with `prefix`, in order, after `start_after`, at most `limit` (0: all), as
    /// they were at revision `at` (`None`: now).
    async fn range(
        &self,
        prefix: &str,
        start_after: Option<&str>,
        limit: usize,
        at: Option<i64>,
    ) -> Result<RangeResult>;

    /// One write. When this returns `Done`, it is on disk. A key written with `lease_seconds` is
    /// deleted by the store, in an ordinary delete, about that long after its last write.
    async fn write(&self, key: &str, expect: Expect, op: Op, lease_seconds: Option<i64>) -> Result<Outcome>;

    /// Several writes, of a key each, that happen together or not at all: none happens when the expectation of one does
    /// not hold. In etcd all of them have one revision. Whoever watches a prefix is told one event a revision, so no two
    /// keys of one transaction may be below the same watched prefix.
    async fn transact(&self, writes: Vec<Write>) -> Result<Transacted>;

    /// Everything that happens below `prefix` from revision `from` on (0: from now on), in order.
    async fn watch(&self, prefix: &str, from: i64) -> Result<Watch>;

    /// Forgets what was only true before `revision`.
    async fn compact(&self, revision: i64) -> Result<()>;

    /// How far history is gone, as far as this process knows: reads below are refused.
    fn compacted(&self) -> i64;

    /// The newest revision, read consistently: no write acknowledged before this call is above it.
    /// By the time this returns, the [`Position`] of every [`Watch`] of this store counts its events up to it; the events
    /// themselves may still be on their way.
    async fn revision(&self) -> Result<i64>;

    /// Whether the store works: it can be asked, and the last write reached the disk (or could again).
    async fn health(&self) -> Result<()>;

    /// Bytes on disk.
    async fn size(&self) -> Result<u64>;

    /// Whether the value of a key is stored in a form that should be written again, such as encrypted by an old key,
    /// even if nothing else in it changes.
    async fn is_stale(&self, key: &str) -> Result<bool>;
}

/// What an unreadable value begins with; no encoding of an object does.
const UNREADABLE: &[u8] = b"\0skiff-unreadable:";

/// What stands for a value that is there and cannot be read: one that does not match its checksum, or whose
/// encryption key is not at hand. Whoever decodes it fails, and [`unreadable`] says why.
pub fn unreadable_value(why: &str) -> Bytes {
    Bytes::from([UNREADABLE, why.as_bytes()].concat())
}

/// Why a value cannot be read, if it cannot.
pub fn unreadable(value: &[u8]) -> Option<String> {
    let why = value.strip_prefix(UNREADABLE)?;
    Some(String::from_utf8_lossy(why).into_owned())
}
