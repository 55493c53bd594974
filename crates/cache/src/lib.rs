//! The watch cache: one [`Cache`] per stored resource, the store's only subscriber. Gets, lists and
//! watches are answered here, from encoded objects; it names no kind and decodes no object beyond the
//! small [`Head`] that selection needs. It never writes.
//!
//! ```text
//! store ─ events ─► ingest ─► state: entries, indexes, recent changes ─► get, list
//!                      │
//!                      └────► dispatch: by name, indexed field, namespace ─► watchers' bounded queues
//! ```
//!
//! Three promises:
//! - A read at [`ReadAt::Latest`] sees every write acknowledged before it, without a copy of the data
//!   from the store: it asks for the store's revision and waits until this cache has it.
//! - A watcher receives every change that its selectors match, once and in order; or it ends, and its
//!   client resumes from the last version it received.
//! - The frame of an event is encoded once, and it is the same memory as the cached object.

mod cache;
mod dispatch;
mod entry;
mod fields;
mod filter;
mod index;
mod ingest;
mod options;
mod scan;
mod snapshot;
mod state;
mod token;
mod unreadable;
mod wake;
mod watcher;

pub use cache::Cache;
pub use entry::{Entry, EventKind, Head, WatchEvent, bookmark_frame, splice_resource_version};
pub use fields::Field;
pub use options::{Config, Decode, Limits, ListOptions, ListResult, ReadAt, WatchFrom, WatchOptions};
pub use token::check as check_continue;
pub use unreadable::{NAMED_UNREADABLE, Unreadable};
pub use wake::postpone;
pub use watcher::Watcher;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Where a message is one that clients see, it is upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// 410 of a watch: `oldest` is the version from which on a watch can start.
    #[error("too old resource version: {requested} ({oldest})")]
    TooOld { requested: i64, oldest: i64 },
    /// 410 of a list at an exact version.
    #[error("The resourceVersion for the provided list is too old.")]
    Expired,
    /// 410 of a further page. `token` goes into `metadata.continue` of the `Status`: it continues at
    /// the same place in the newest state.
    #[error(
        "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter, or use the continue token in this response to retrieve the remainder of the results. Continuing with the provided token results in an inconsistent list - objects that were created, modified, or deleted between the time the first chunk was returned and now may show up in the list."
    )]
    ExpiredContinue { token: String },
    /// 504 with the cause `ResourceVersionTooLarge`.
    #[error("Too large resource version: {requested}, current: {current}")]
    TooLarge { requested: i64, current: i64 },
    /// 400.
    #[error("{0}")]
    InvalidContinue(String),
    /// 429, to be tried again after a second: the first list of the store is not here yet.
    #[error("storage is (re)initializing")]
    NotReady,
    #[error("stored object cannot be read: {0}")]
    Malformed(String),
    /// 500 of a get.
    #[error("{0}")]
    Unreadable(std::sync::Arc<Unreadable>),
    /// 500 of a list, or of a watch that starts with the state: these cannot be shown. One more than
    /// [`NAMED_UNREADABLE`]: there are others.
    #[error("{} stored objects cannot be read", .0.len())]
    UnreadableItems(Vec<std::sync::Arc<Unreadable>>),
    #[error(transparent)]
    Store(#[from] skiff_store::Error),
}
