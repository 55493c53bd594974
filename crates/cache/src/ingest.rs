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
            Ok(StoreError::Compacted { .. } | StoreError::Lagged) => continue,
            Ok(error) => tracing::warn!(%prefix, %error, "cannot follow the store"),
            Err(_) => tracing::error!(%prefix, "following the store panicked"),
        }
        shared.state.write().position = None;
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Lists, then follows until that is no longer possible.
async fn follow(
    shared: &Shared,
    store: &dyn Store,
    interner: &mut Interner,
    pause: &mut Duration,
) -> StoreError {
    let (revision, mut watch) = match list(shared, store, interner).await {
        Ok(listed) => listed,
        Err(error) => return error,
    };
    let mut reached = revision;
    loop {
        *pause = FIRST_PAUSE;
        let limits = &shared.config.limits;
        let error = loop {
            // What a burst left behind must go even if nothing happens after it.
            let Ok(next) = tokio::time::timeout(limits.age.max(OFTEN), watch.next()).await else {
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
            return error;
        }
        watch = match store.watch(&shared.config.prefix, reached + 1).await {
            Ok(watch) => watch,
            Err(error) => return error,
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
    let entries = range
        .items
        .into_iter()
        .filter_map(|kv| shared.entry(kv.key, kv.mod_revision, kv.value, EventKind::Added, interner))
        .collect();
    {
        let mut state = shared.state.write();
        state.replace(entries, range.revision);
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
            Some(value) => shared.entry(event.key.clone(), event.revision, value, kind, interner),
            None => None,
        };
        ready.push((event.key, event.revision, after));
    }
    let (changes, floor, revision) = {
        let mut state = shared.state.write();
        let changes: Vec<_> = ready
            .into_iter()
            .filter_map(|(key, revision, after)| state.apply(key, revision, after, now))
            .collect();
        state.revision = state.revision.max(batch.revision);
        state.trim(&shared.config.limits, now);
        (changes, state.floor, state.revision)
    };
    // Readers first: they wait for the state, not for the watchers.
    shared.moved();
    let mut wakers = Vec::new();
    {
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
