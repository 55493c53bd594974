//! A watcher as its reader sees it: the initial events, what changes, and bookmarks in between.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::time::{Duration, Instant, Sleep};

use crate::cache::Shared;
use crate::dispatch::{Bucket, Outbox, Taken};
use crate::entry::{Entry, EventKind, WatchEvent};

pub struct Watcher {
    shared: Arc<Shared>,
    outbox: Arc<Outbox>,
    bucket: Bucket,
    id: (u64, u64),
    initial: std::vec::IntoIter<Arc<Entry>>,
    /// The version of the bookmark that ends the initial events.
    initial_end: Option<i64>,
    /// Goes off when a bookmark is due.
    bookmark: Option<Pin<Box<Sleep>>>,
    deadline: Option<Instant>,
    revision: i64,
}

/// As upstream: the last bookmark comes this long before the watch is ended.
const BEFORE_THE_END: Duration = Duration::from_secs(2);

impl Watcher {
    pub(crate) fn new(
        shared: Arc<Shared>,
        outbox: Outbox,
        initial: Vec<Arc<Entry>>,
        revision: i64,
        initial_end: bool,
        bookmarks: Option<Option<Instant>>,
        reader: u64,
    ) -> Watcher {
        let bucket = Bucket::of(&outbox.filter, &shared.fields);
        let outbox = Arc::new(outbox);
        let id = shared.watchers.write().add(&bucket, reader, outbox.clone());
        let deadline = bookmarks.flatten();
        let first = bookmarks
            .and_then(|deadline| bookmark_after(Instant::now(), shared.config.bookmark_every, deadline));
        let bookmark = first.map(|at| Box::pin(tokio::time::sleep_until(at)));
        Watcher {
            shared,
            outbox,
            bucket,
            id,
            initial: initial.into_iter(),
            initial_end: initial_end.then_some(revision),
            bookmark,
            deadline,
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
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// [`Watcher::next`] for those who poll.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Arc<WatchEvent>>> {
        if let Some(entry) = self.initial.next() {
            return Poll::Ready(Some(Arc::new(WatchEvent::new(EventKind::Added, entry))));
        }
        if let Some(revision) = self.initial_end.take() {
            return Poll::Ready(Some(self.bookmark(revision, true)));
        }
        loop {
            match self.outbox.poll_take(context) {
                Poll::Ready(Taken::Event(event)) => {
                    self.revision = event.revision;
                    return Poll::Ready(Some(event));
                }
                Poll::Ready(Taken::End) => return Poll::Ready(None),
                Poll::Ready(Taken::CatchUp) => self.outbox.catch_up(&self.shared.state.read()),
                Poll::Pending => break,
            }
        }
        while let Some(due) = &mut self.bookmark
            && due.as_mut().poll(context).is_ready()
        {
            if let Some(event) = self.due_bookmark() {
                return Poll::Ready(Some(event));
            }
        }
        Poll::Pending
    }

    fn due_bookmark(&mut self) -> Option<Arc<WatchEvent>> {
        let revision = self.outbox.bookmark(&self.shared.state.read());
        let again = match revision {
            Some(_) => bookmark_after(Instant::now(), self.shared.config.bookmark_every, self.deadline),
            // Something is on its way: look again soon.
            None => Some(Instant::now() + Duration::from_millis(100)),
        };
        match (&mut self.bookmark, again) {
            (Some(due), Some(again)) => due.as_mut().reset(again),
            _ => self.bookmark = None,
        }
        self.revision = revision?;
        Some(self.bookmark(self.revision, false))
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

/// When the next bookmark is due; none follows the one before the end.
fn bookmark_after(now: Instant, every: Duration, deadline: Option<Instant>) -> Option<Instant> {
    let next = now + every;
    match deadline {
        Some(deadline) => deadline
            .checked_sub(BEFORE_THE_END)
            .map(|last| last.min(next))
            .filter(|next| *next > now),
        None => Some(next),
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.watchers.write().remove(&self.bucket, self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_bookmark_comes_before_the_end() {
        let began = Instant::now();
        let seconds = Duration::from_secs;
        let check = |watch: Option<u64>, expected: &[u64]| {
            let deadline = watch.map(|watch| began + seconds(watch));
            let (mut now, mut seen) = (began, Vec::new());
            while let Some(next) = bookmark_after(now, seconds(60), deadline)
                && seen.len() < 3
            {
                seen.push((next - began).as_secs());
                now = next;
            }
            assert_eq!(seen, expected, "{watch:?}");
        };
        check(Some(1), &[]);
        check(Some(2), &[]);
        check(Some(10), &[8]);
        check(Some(130), &[60, 120, 128]);
        check(None, &[60, 120, 180]);
    }
}
