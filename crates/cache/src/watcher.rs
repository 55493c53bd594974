//! A watcher as its reader sees it: the initial events, what changes, and bookmarks in between.

use std::sync::Arc;

use tokio::time::{Duration, Instant};

use crate::cache::Shared;
use crate::dispatch::{Bucket, Outbox, Taken};
use crate::entry::{Entry, EventKind, WatchEvent};

pub struct Watcher {
    shared: Arc<Shared>,
    outbox: Arc<Outbox>,
    bucket: Bucket,
    id: u64,
    initial: std::vec::IntoIter<Arc<Entry>>,
    /// The version of the bookmark that ends the initial events.
    initial_end: Option<i64>,
    bookmark_at: Option<Instant>,
    revision: i64,
}

impl Watcher {
    pub(crate) fn new(
        shared: Arc<Shared>,
        outbox: Outbox,
        initial: Vec<Arc<Entry>>,
        revision: i64,
        initial_end: bool,
        bookmarks: bool,
    ) -> Watcher {
        let bucket = Bucket::of(&outbox.filter, &shared.fields);
        let outbox = Arc::new(outbox);
        let id = shared.watchers.write().add(&bucket, outbox.clone());
        let bookmark_at = bookmarks.then(|| Instant::now() + shared.config.bookmark_every);
        Watcher {
            shared,
            outbox,
            bucket,
            id,
            initial: initial.into_iter(),
            initial_end: initial_end.then_some(revision),
            bookmark_at,
            revision,
        }
    }

    /// The version this watcher has come to.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// The next event. `None`: the watch is over (its reader was too slow, or the cache started over),
    /// and the client should watch again from the last version it saw. May be dropped and called again
    /// without losing an event.
    pub async fn next(&mut self) -> Option<Arc<WatchEvent>> {
        if let Some(entry) = self.initial.next() {
            return Some(Arc::new(WatchEvent::new(EventKind::Added, entry)));
        }
        if let Some(revision) = self.initial_end.take() {
            return Some(self.bookmark(revision, true));
        }
        loop {
            match self.outbox.take() {
                Taken::Event(event) => {
                    self.revision = event.revision;
                    return Some(event);
                }
                Taken::End => return None,
                Taken::CatchUp => self.outbox.catch_up(&self.shared.state.read()),
                Taken::Wait => {
                    let Some(at) = self.bookmark_at else {
                        self.outbox.arrived().await;
                        continue;
                    };
                    tokio::select! {
                        _ = self.outbox.arrived() => {}
                        _ = tokio::time::sleep_until(at) => {
                            if let Some(event) = self.due_bookmark() {
                                return Some(event);
                            }
                        }
                    }
                }
            }
        }
    }

    fn due_bookmark(&mut self) -> Option<Arc<WatchEvent>> {
        let state = self.shared.state.read();
        let Some(revision) = self.outbox.bookmark(&state) else {
            // Something is on its way; look again soon.
            self.bookmark_at = Some(Instant::now() + Duration::from_millis(100));
            return None;
        };
        drop(state);
        self.bookmark_at = Some(Instant::now() + self.shared.config.bookmark_every);
        self.revision = revision;
        Some(self.bookmark(revision, false))
    }

    /// The bookmark to end the watch with, when its time is up and it is idle; upstream sends one
    /// shortly before a watch times out.
    pub fn final_bookmark(&mut self) -> Option<Arc<WatchEvent>> {
        self.bookmark_at?;
        if self.initial_end.is_some() || self.initial.len() > 0 {
            return None;
        }
        let revision = self.outbox.bookmark(&self.shared.state.read())?;
        Some(self.bookmark(revision, false))
    }

    fn bookmark(&self, revision: i64, end: bool) -> Arc<WatchEvent> {
        let config = &self.shared.config;
        Arc::new(WatchEvent::bookmark(
            &config.api_version,
            &config.kind,
            revision,
            end,
        ))
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.watchers.write().remove(&self.bucket, self.id);
    }
}
