//! The cache's reads: get, list and watch, each at the requested resourceVersion.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::RwLock;
use skiff_store::Store;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::dispatch::{Outbox, Watchers};
use crate::entry::{Entry, EventKind};
use crate::fields::{FieldSet, Interner};
use crate::filter::Filter;
use crate::snapshot::{self, Page, Scope};
use crate::state::State;
use crate::token::{self, Token};
use crate::unreadable::Unreadable;
use crate::{
    Config, Error, ListOptions, ListResult, ReadAt, Result, WatchFrom, WatchOptions, Watcher, ingest,
};

/// How long a read waits for the cache to be ready, or as new as the store.
const PATIENCE: Duration = Duration::from_secs(10);
/// Keys read at once from the store's own history.
const STORE_PAGE: usize = 500;

pub struct Cache {
    shared: Arc<Shared>,
    store: Arc<dyn Store>,
    ingest: AbortHandle,
}

/// Lock order: `state`, then `watchers`, then a watcher's queue.
pub(crate) struct Shared {
    pub config: Config,
    pub fields: Arc<FieldSet>,
    pub state: RwLock<State>,
    pub watchers: RwLock<Watchers>,
    /// Changes up to here have been offered to all watchers.
    pub dispatched: Arc<AtomicI64>,
    pub ready: watch::Sender<bool>,
    /// Notified on every change of the state.
    moves: watch::Sender<()>,
}

impl Shared {
    pub fn moved(&self) {
        self.moves.send_replace(());
    }

    /// Makes an entry of a stored value. One that cannot be read is logged; the caller must not take it for absent.
    pub fn entry(
        &self,
        key: Arc<str>,
        revision: i64,
        value: Bytes,
        kind: EventKind,
        interner: &mut Interner,
    ) -> Result<Entry, Unreadable> {
        self.read(&key, revision, value, kind, interner).map_err(|error| {
            tracing::error!(%key, revision, %error, "a stored object cannot be read");
            match error {
                Error::Malformed(reason) => Unreadable::new(key, revision, &reason),
                error => Unreadable::new(key, revision, &error),
            }
        })
    }

    pub fn read(
        &self,
        key: &Arc<str>,
        revision: i64,
        value: Bytes,
        kind: EventKind,
        interner: &mut Interner,
    ) -> Result<Entry> {
        if let Some(why) = skiff_store::unreadable(&value) {
            return Err(Error::Malformed(why));
        }
        let value = match &self.config.decode {
            // Not our code: if it panics over one value, that value alone is lost.
            Some(decode) => catch_unwind(AssertUnwindSafe(|| decode(key, revision, value)))
                .unwrap_or_else(|_| Err("decoding it panicked".to_owned()))
                .map_err(Error::Malformed)?,
            None => value,
        };
        Entry::new(key.clone(), revision, &value, kind, &self.fields, interner)
    }
}

fn refuse(unreadable: Vec<Arc<Unreadable>>) -> Result<()> {
    if unreadable.is_empty() {
        return Ok(());
    }
    Err(Error::UnreadableItems(unreadable))
}

impl Drop for Cache {
    /// Its watchers end; reads of it cannot happen any more.
    fn drop(&mut self) {
        self.ingest.abort();
        self.shared.watchers.read().end_all();
    }
}

impl Cache {
    /// Starts to follow the store below `config.prefix`. Must be called within a tokio runtime; ends
    /// when the cache is dropped.
    pub fn start(store: Arc<dyn Store>, config: Config) -> Arc<Cache> {
        let fields = Arc::new(FieldSet::new(config.fields.clone()));
        let shared = Arc::new(Shared {
            state: RwLock::new(State::new(fields.clone())),
            watchers: RwLock::new(Watchers::default()),
            dispatched: Arc::new(AtomicI64::new(0)),
            ready: watch::Sender::new(false),
            moves: watch::Sender::new(()),
            fields,
            config,
        });
        let ingest = tokio::spawn(ingest::run(shared.clone(), store.clone())).abort_handle();
        Arc::new(Cache {
            shared,
            store,
            ingest,
        })
    }

    /// Waits for the first list of the store.
    pub async fn ready(&self) {
        // The sender lives as long as `self`.
        let _ = self.shared.ready.subscribe().wait_for(|ready| *ready).await;
    }

    pub fn is_ready(&self) -> bool {
        *self.shared.ready.borrow()
    }

    pub fn prefix(&self) -> &str {
        &self.shared.config.prefix
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.shared.state.read().entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the key's newest value cannot be read: the object is there, but cannot be shown.
    pub fn is_unreadable(&self, key: &str) -> bool {
        self.shared.state.read().unreadable.contains_key(key)
    }

    /// How many objects cannot be read.
    pub fn unreadable(&self) -> usize {
        self.shared.state.read().unreadable.len()
    }

    /// How many watchers there are.
    pub fn watchers(&self) -> usize {
        self.shared.watchers.read().len()
    }

    /// The version of which the cached state is the truth.
    pub fn revision(&self) -> i64 {
        self.shared.state.read().known()
    }

    /// Whether the kind can be selected by this field.
    pub fn has_field(&self, name: &str) -> bool {
        matches!(name, "metadata.name" | "metadata.namespace") || self.shared.fields.place(name).is_some()
    }

    pub async fn get(&self, key: &str, at: ReadAt) -> Result<Option<Arc<Entry>>> {
        self.fresh(at).await?;
        let state = self.shared.state.read();
        match state.unreadable.get(key) {
            Some(value) => Err(Error::Unreadable(value.clone())),
            None => Ok(state.entries.get(key).cloned()),
        }
    }

    pub async fn list(&self, options: ListOptions) -> Result<ListResult> {
        let ListOptions {
            namespace,
            labels,
            fields,
            at,
            limit,
            continue_token,
            skip_unreadable,
        } = options;
        let prefix = &self.shared.config.prefix;
        let mut scope = Scope::new(prefix, namespace.as_deref(), limit);
        let continued = continue_token.is_some();
        let (at, fresh) = match continue_token {
            Some(token) => {
                let Token {
                    revision,
                    start_after,
                } = token::decode(&token, &scope.keys)?;
                scope.start_after = Some(start_after);
                (revision, revision.map_or(ReadAt::Latest, ReadAt::NotOlderThan))
            }
            None => match at {
                ReadAt::Exact(revision) => (Some(revision), ReadAt::NotOlderThan(revision)),
                at => (None, at),
            },
        };
        self.fresh(fresh).await?;
        let filter = Filter {
            namespace,
            labels,
            fields,
        };
        // A quiet resource could be read at any old revision from here; it expires with the store's history all the
        // same, so that how long a token lives does not depend on who writes.
        let compacted = if at.is_some() { self.store.compacted() } else { 0 };
        let (revision, page) = {
            let state = self.shared.state.read();
            let revision = at.unwrap_or_else(|| state.known());
            if !skip_unreadable {
                refuse(state.unreadable_in(&scope, &filter, revision))?;
            }
            let page = (revision >= state.floor.max(compacted))
                .then(|| snapshot::page(&state, &scope, &filter, revision));
            (revision, page)
        };
        let page = match page {
            Some(page) => page,
            // Older than what is remembered here; the store's history may go further back.
            None => match self
                .page_from_store(&scope, &filter, revision, skip_unreadable)
                .await
            {
                Err(Error::Store(skiff_store::Error::Compacted { .. })) if continued => {
                    let start_after = scope.start_after.as_deref().unwrap_or_default();
                    let token = token::encode(start_after, &scope.keys, None);
                    return Err(Error::ExpiredContinue { token });
                }
                Err(Error::Store(skiff_store::Error::Compacted { .. })) => return Err(Error::Expired),
                page => page?,
            },
        };
        let last = page.items.last().filter(|_| page.more);
        let continue_token = last.map(|last| token::encode(&last.key, &scope.keys, Some(revision)));
        Ok(ListResult {
            items: page.items,
            revision,
            continue_token,
            remaining: page.remaining,
        })
    }

    /// A page as of an old revision, read from the store.
    async fn page_from_store(
        &self,
        scope: &Scope,
        filter: &Filter,
        at: i64,
        skip_unreadable: bool,
    ) -> Result<Page> {
        let limit = if scope.limit == 0 { usize::MAX } else { scope.limit };
        let mut after = scope.start_after.clone();
        let mut items: Vec<Arc<Entry>> = Vec::new();
        let mut interner = Interner::default();
        loop {
            let range = self
                .store
                .range(&scope.keys, after.as_deref(), STORE_PAGE, Some(at))
                .await?;
            after = range.items.last().map(|kv| kv.key.to_string());
            for (nth, kv) in range.items.into_iter().enumerate() {
                let read =
                    self.shared
                        .entry(kv.key, kv.mod_revision, kv.value, EventKind::Added, &mut interner);
                let entry = match read {
                    Ok(entry) => entry,
                    Err(_) if skip_unreadable => continue,
                    Err(value) => return Err(Error::UnreadableItems(vec![Arc::new(value)])),
                };
                if !filter.matches(&entry.head) {
                    continue;
                }
                if items.len() == limit {
                    let remaining = (!filter.has_selector()).then_some(range.count - nth as i64);
                    return Ok(Page {
                        items,
                        more: true,
                        remaining,
                    });
                }
                items.push(Arc::new(entry));
            }
            if !range.more {
                return Ok(Page {
                    items,
                    more: false,
                    remaining: None,
                });
            }
        }
    }

    pub async fn watch(&self, options: WatchOptions) -> Result<Watcher> {
        let WatchOptions {
            namespace,
            labels,
            fields,
            from,
            bookmarks,
            deadline,
            initial_events_end,
            reader,
            skip_unreadable,
        } = options;
        match from {
            WatchFrom::State(at) => self.fresh(at).await?,
            WatchFrom::Now => self.fresh(ReadAt::Latest).await?,
            WatchFrom::After(revision) => {
                self.fresh(ReadAt::Any).await?;
                if revision > self.revision() {
                    // No client was given a version above the store's: it comes from a store that was replaced.
                    let current = self.store.revision().await?;
                    if revision > current {
                        return Err(Error::TooOld {
                            requested: revision,
                            oldest: current,
                        });
                    }
                }
            }
        }
        let scope = Scope::new(&self.shared.config.prefix, namespace.as_deref(), 0);
        let filter = Filter {
            namespace: namespace.clone(),
            labels,
            fields,
        };
        let (initial, revision) = {
            let state = self.shared.state.read();
            match from {
                WatchFrom::State(_) => {
                    let revision = state.known();
                    if !skip_unreadable {
                        refuse(state.unreadable_in(&scope, &filter, revision))?;
                    }
                    (snapshot::page(&state, &scope, &filter, revision).items, revision)
                }
                WatchFrom::Now => (Vec::new(), state.known()),
                WatchFrom::After(revision) if revision < state.floor => {
                    return Err(Error::TooOld {
                        requested: revision,
                        oldest: state.floor,
                    });
                }
                WatchFrom::After(revision) => (Vec::new(), revision),
            }
        };
        let queue = self.shared.config.limits.queue;
        let outbox = Outbox::new(filter, revision, queue, self.shared.dispatched.clone());
        let end = initial_events_end && matches!(from, WatchFrom::State(_));
        Ok(Watcher::new(
            self.shared.clone(),
            outbox,
            initial,
            revision,
            end,
            bookmarks.then_some(deadline),
            reader,
        ))
    }

    /// Waits until the state is as new as `at` says.
    async fn fresh(&self, at: ReadAt) -> Result<()> {
        if !self.is_ready() && tokio::time::timeout(PATIENCE, self.ready()).await.is_err() {
            return Err(Error::NotReady);
        }
        let wanted = match at {
            ReadAt::Any => return Ok(()),
            ReadAt::Latest => self.store.revision().await?,
            ReadAt::NotOlderThan(revision) | ReadAt::Exact(revision) => {
                if self.shared.state.read().has(revision) {
                    return Ok(());
                }
                // Either the cache is behind the store, or this version was never issued.
                let current = self.store.revision().await?;
                if revision > current {
                    return Err(Error::TooLarge {
                        requested: revision,
                        current,
                    });
                }
                revision
            }
        };
        if self.shared.state.read().has(wanted) {
            return Ok(());
        }
        let mut moves = self.shared.moves.subscribe();
        let caught_up = async {
            while !self.shared.state.read().has(wanted) {
                // The sender lives as long as `self`.
                let _ = moves.changed().await;
            }
        };
        if tokio::time::timeout(PATIENCE, caught_up).await.is_err() {
            let why = format!("the watch cache did not reach version {wanted} in time");
            return Err(skiff_store::Error::Unavailable(why).into());
        }
        Ok(())
    }
}
