//! Follows a resource through the cache for as long as the server runs: every object that is there, then every
//! change. What falls out of the cache's history is read again from the present state.

use std::sync::Arc;
use std::time::Duration;

use skiff_registry::{Entry, EventKind, ReadAt, Registry, Resource, WatchFrom, WatchOptions, Watcher};
use tokio_util::sync::CancellationToken;

use crate::server::Inner;

/// One change, or one object of the state at the start.
pub struct Event {
    pub kind: EventKind,
    pub entry: Arc<Entry>,
}

pub struct Follower {
    registry: Arc<Registry>,
    resource: Arc<Resource>,
    shutdown: CancellationToken,
    watcher: Option<Watcher>,
    /// The last version that was seen; none: start with the state. Seeing an object twice does no harm.
    seen: Option<i64>,
}

impl Follower {
    pub fn new(inner: &Inner, resource: Arc<Resource>) -> Follower {
        Follower {
            registry: inner.registry.clone(),
            resource,
            shutdown: inner.shutdown.clone(),
            watcher: None,
            seen: None,
        }
    }

    /// The next event; `None` when the server ends.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            let Some(watcher) = &mut self.watcher else {
                self.open().await?;
                continue;
            };
            let event = tokio::select! {
                event = watcher.next() => event,
                () = self.shutdown.cancelled() => return None,
            };
            let Some(event) = event else {
                self.watcher = None;
                continue;
            };
            self.seen = Some(event.revision);
            if let Some(entry) = &event.entry {
                return Some(Event {
                    kind: event.kind,
                    entry: entry.clone(),
                });
            }
        }
    }

    async fn open(&mut self) -> Option<()> {
        let from = match self.seen.take() {
            Some(revision) => WatchFrom::After(revision),
            None => WatchFrom::State(ReadAt::Latest),
        };
        let options = WatchOptions {
            from,
            ..WatchOptions::default()
        };
        match self.registry.watch(&self.resource, options).await {
            Ok(watcher) => self.watcher = Some(watcher),
            Err(status) => {
                tracing::warn!(%status, resource = self.resource.plural, "cannot follow a resource");
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_millis(100)) => {}
                    () = self.shutdown.cancelled() => return None,
                }
            }
        }
        Some(())
    }
}
