//! What callers say to a cache: how it is set up, how fresh a read must be, what a list or a watch
//! selects. Plain data.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use skiff_meta::selector::{FieldSelector, LabelSelector};
use tokio::time::Instant;

use crate::{Entry, Field};

/// Turns what the store holds into the object's JSON, given the key and the revision of its last write; for values
/// stored in another form (encrypted, protobuf) or by someone else.
pub type Decode = Arc<dyn Fn(&str, i64, Bytes) -> Result<Bytes, String> + Send + Sync>;

#[derive(Clone)]
pub struct Config {
    /// Ends in `/`. Keys are `<prefix><namespace>/<name>`, or `<prefix><name>` for cluster-scoped kinds.
    pub prefix: String,
    /// Of the storage version; used for bookmarks.
    pub api_version: String,
    pub kind: String,
    /// Selectable fields besides `metadata.name` and `metadata.namespace`, which every kind has.
    pub fields: Vec<Field>,
    /// `None`: values are JSON.
    pub decode: Option<Decode>,
    pub limits: Limits,
    /// How often values that could not be read are tried again: the key that decrypts them may have come back.
    pub retry_unreadable: Duration,
    /// How often a watcher that allows bookmarks gets one.
    pub bookmark_every: Duration,
}

impl Config {
    pub fn new(prefix: impl Into<String>, api_version: impl Into<String>, kind: impl Into<String>) -> Config {
        Config {
            prefix: prefix.into(),
            api_version: api_version.into(),
            kind: kind.into(),
            fields: Vec::new(),
            decode: None,
            limits: Limits::default(),
            retry_unreadable: Duration::from_secs(5),
            bookmark_every: Duration::from_secs(60),
        }
    }

    pub fn fields(mut self, fields: impl IntoIterator<Item = Field>) -> Config {
        self.fields = fields.into_iter().collect();
        self
    }
}

/// How much of the past a cache remembers, for watches that resume and lists that continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub changes: usize,
    pub bytes: usize,
    pub age: Duration,
    /// Kept whatever their age, so that a quiet resource can be resumed for long.
    pub at_least: usize,
    /// Events a watcher may leave unread before it must catch up from the remembered changes.
    pub queue: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            changes: 20_000,
            bytes: 16 << 20,
            age: Duration::from_secs(300),
            at_least: 100,
            queue: 256,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReadAt {
    /// Whatever is here: `resourceVersion=0`.
    Any,
    /// `resourceVersion=N` (`resourceVersionMatch=NotOlderThan`).
    NotOlderThan(i64),
    /// `resourceVersionMatch=Exact`; lists only (a get takes it as `NotOlderThan`).
    Exact(i64),
    /// No `resourceVersion`: everything acknowledged before the call is seen.
    #[default]
    Latest,
}

#[derive(Debug, Clone, Default)]
pub struct ListOptions {
    /// `None`: all namespaces.
    pub namespace: Option<String>,
    pub labels: LabelSelector,
    pub fields: FieldSelector,
    pub at: ReadAt,
    /// 0: no limit.
    pub limit: usize,
    /// From [`ListResult::continue_token`]; with it `at` is not looked at.
    pub continue_token: Option<String>,
    /// Leaves out what cannot be read instead of failing. Not for clients: they would take it for absent.
    pub skip_unreadable: bool,
}

#[derive(Debug, Clone)]
pub struct ListResult {
    /// In key order.
    pub items: Vec<Arc<Entry>>,
    /// The list's `resourceVersion`.
    pub revision: i64,
    /// Set when the limit cut the list short.
    pub continue_token: Option<String>,
    /// With a token and no selectors: how many items are left.
    pub remaining: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WatchFrom {
    /// The state as ADDED events first (fresh as `ReadAt` says), then what changes.
    State(ReadAt),
    /// What changes after this version.
    After(i64),
    /// What changes after the newest version.
    #[default]
    Now,
}

#[derive(Debug, Clone, Default)]
pub struct WatchOptions {
    pub namespace: Option<String>,
    pub labels: LabelSelector,
    pub fields: FieldSelector,
    pub from: WatchFrom,
    /// `allowWatchBookmarks`.
    pub bookmarks: bool,
    /// When the watch will be ended; the last bookmark comes shortly before.
    pub deadline: Option<Instant>,
    /// `sendInitialEvents`: a bookmark with `k8s.io/initial-events-end` follows the state. Goes with
    /// [`WatchFrom::State`].
    pub initial_events_end: bool,
    /// Watches with the same number are read by one task, such as that of a connection: it is woken when all of them
    /// have their events.
    pub reader: u64,
    /// As in [`ListOptions`]; goes with [`WatchFrom::State`].
    pub skip_unreadable: bool,
}
