//! The one task that feeds a cache: list the store, then follow its watch; start over when the watch
//! cannot go on. It alone changes the state.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::FutureExt;
use skiff_store::{Batch, Error as StoreError, Store, Watch};
use tokio::time::Instant;

use crate::cache::Shared;
use crate::entry::EventKind;
use crate::fields::Interner;
use crate::wake;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A quiet cache is not looked at more often than this.
const OFTEN: Duration = Duration::from_millis(100);

pub async fn run(shared: Arc<Shared>, store: Arc<dyn Store>) {
    let mut interner = Interner::default();
    let mut pause = FIRST_PAUSE;
    loop {
        let prefix = &shared.config.prefix;
        // A panic must not leave a cache that never moves again; the next list makes the state anew.
        let followed = AssertUnwindSafe(follow(&shared, &*store, &mut interner, &mut pause)).catch_unwind();
        match followed.await {
            // History went away before the watch stood: list again, there is nothing to wait for.
            Ok(Stopped::Readable | Stopped::Store(StoreError::Compacted { .. } | StoreError::Lagged)) => {
                continue;
            }
            Ok(Stopped::Store(error)) => tracing::warn!(%prefix, %error, "cannot follow the store"),
            Err(_) => tracing::error!(%prefix, "following the store panicked"),
        }
        shared.state.write().position = None;
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Why the store is no longer followed from where it was.
enum Stopped {
    Store(StoreError),
    /// A value that could not be read can be read now.
    Readable,
}

/// Lists, then follows until that is no longer possible.
async fn follow(
    shared: &Shared,
    store: &dyn Store,
    interner: &mut Interner,
    pause: &mut Duration,
) -> Stopped {
    let (revision, mut watch) = match list(shared, store, interner).await {
        Ok(listed) => listed,
        Err(error) => return Stopped::Store(error),
    };
    let mut reached = revision;
    let mut retry = Retry::new(shared);
    loop {
        *pause = FIRST_PAUSE;
        let limits = &shared.config.limits;
        let error = loop {
            // What a burst left behind must go even if nothing happens after it.
            let wait = retry.due_in(shared).min(limits.age.max(OFTEN));
            let next = tokio::time::timeout(wait, watch.next()).await;
            if retry.is_due(shared) && retry.any_readable(shared, store, interner).await {
                return Stopped::Readable;
            }
            let Ok(next) = next else {
                shared.state.write().trim(limits, Instant::now());
                continue;
            };
            match next {
                Ok(batch) => {
                    reached = reached.max(batch.revision);
                    take_in(shared, interner, batch);
                }
                Err(error) => break error,
            }
        };
        // A watch that was too slow goes on where it stopped, if the store still knows.
        shared.state.write().position = None;
        if error != StoreError::Lagged {
            return Stopped::Store(error);
        }
        watch = match store.watch(&shared.config.prefix, reached + 1).await {
            Ok(watch) => watch,
            Err(error) => return Stopped::Store(error),
        };
        shared.state.write().position = Some(watch.position());
        shared.moved();
    }
}

async fn list(
    shared: &Shared,
    store: &dyn Store,
    interner: &mut Interner,
) -> Result<(i64, Watch), StoreError> {
    let prefix = &shared.config.prefix;
    let range = store.range(prefix, None, 0, None).await?;
    let watch = store.watch(prefix, range.revision + 1).await?;
    let (mut entries, mut unreadable) = (Vec::with_capacity(range.items.len()), Vec::new());
    for kv in range.items {
        match shared.entry(kv.key, kv.mod_revision, kv.value, EventKind::Added, interner) {
            Ok(entry) => entries.push(entry),
            Err(value) => unreadable.push(value),
        }
    }
    {
        let mut state = shared.state.write();
        state.replace(entries, unreadable, range.revision);
        state.position = Some(watch.position());
        shared.dispatched.store(range.revision, Ordering::Release);
    }
    // Those of before cannot tell what they missed.
    shared.watchers.read().end_all();
    shared.ready.send_replace(true);
    shared.moved();
    Ok((range.revision, watch))
}

fn take_in(shared: &Shared, interner: &mut Interner, batch: Batch) {
    let now = Instant::now();
    let mut ready = Vec::with_capacity(batch.events.len());
    for event in batch.events {
        let kind = if event.is_create() {
            EventKind::Added
        } else {
            EventKind::Modified
        };
        let after = match event.value {
            Some(value) => shared
                .entry(event.key.clone(), event.revision, value, kind, interner)
                .map(Some),
            None => Ok(None),
        };
        ready.push((event.key, event.revision, after));
    }
    let (changes, floor, revision, lost) = {
        let mut state = shared.state.write();
        let mut changes = Vec::with_capacity(ready.len());
        let mut lost = false;
        for (key, revision, after) in ready {
            let after = match after {
                Ok(after) => after,
                // The object is still there: no event, until it can be read again or is deleted.
                Err(value) => {
                    state.mark_unreadable(value);
                    continue;
                }
            };
            let deleted = after.is_none();
            let unreadable = state.unreadable.remove(&key).is_some();
            match state.apply(key, revision, after, now) {
                Some(change) => changes.push(change),
                // COMPAT: a deletion whose object nobody could ever show ends all watches, as upstream: their clients
                // have to list anew to learn of it.
                None => lost |= unreadable && deleted,
            }
        }
        state.revision = state.revision.max(batch.revision);
        if lost {
            state.forget_changes();
        }
        state.trim(&shared.config.limits, now);
        (changes, state.floor, state.revision, lost)
    };
    // Readers first: they wait for the state, not for the watchers.
    shared.moved();
    let mut wakers = Vec::new();
    if lost {
        shared.watchers.read().end_all();
    } else {
        let watchers = shared.watchers.read();
        // A reader of several changes is woken when it has them all, one of a single change at once: it is served while
        // the queues of the others are filled.
        let single = changes.len() == 1;
        for change in &changes {
            watchers.dispatch(change, floor, &shared.fields, &mut wakers, |wakers| {
                if single {
                    wake::wake_all(wakers);
                }
            });
        }
    }
    shared.dispatched.store(revision, Ordering::Release);
    wake::wake_all(&mut wakers);
}

/// When to try unreadable values again, and which.
struct Retry {
    at: Instant,
    /// The last key that was tried.
    after: String,
}

/// Values tried at a time.
const RETRIED: usize = 16;

impl Retry {
    fn new(shared: &Shared) -> Retry {
        Retry {
            at: Instant::now() + shared.config.retry_unreadable,
            after: String::new(),
        }
    }

    fn due_in(&self, shared: &Shared) -> Duration {
        if shared.state.read().unreadable.is_empty() {
            return Duration::MAX;
        }
        self.at.saturating_duration_since(Instant::now())
    }

    fn is_due(&self, shared: &Shared) -> bool {
        Instant::now() >= self.at && !shared.state.read().unreadable.is_empty()
    }

    /// Tries the next few.
    async fn any_readable(&mut self, shared: &Shared, store: &dyn Store, interner: &mut Interner) -> bool {
        self.at = Instant::now() + shared.config.retry_unreadable;
        let keys: Vec<Arc<str>> = {
            let state = shared.state.read();
            let keys = state.unreadable.keys();
            keys.filter(|key| ***key > *self.after)
                .take(RETRIED)
                .cloned()
                .collect()
        };
        self.after = match keys.len() {
            RETRIED => keys.last().map_or(String::new(), |key| key.to_string()),
            _ => String::new(),
        };
        for key in keys {
            if let Ok((Some(kv), _)) = store.get(&key).await
                && shared
                    .read(&key, kv.mod_revision, kv.value, EventKind::Added, interner)
                    .is_ok()
            {
                return true;
            }
        }
        false
    }
}
