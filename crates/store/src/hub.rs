//! The hub of a store: the recent events, and the subscribers they go to. Both stores feed one; it
//! does no I/O and knows nothing of disks or networks.
//!
//! An event costs a hash lookup for every `/` in its key, however many subscribers there are: they
//! are found by the prefix they asked for.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use crate::{Batch, Error, Event, Position, Result, Watch};

/// Batches a subscriber may leave unread.
const QUEUE: usize = 1024;

/// How much history is kept. Whatever limit is reached first cuts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub age: Duration,
    pub events: usize,
    pub bytes: usize,
}

impl Default for Limits {
    /// Five minutes, as upstream's compaction interval.
    fn default() -> Limits {
        Limits {
            age: Duration::from_secs(300),
            events: 50_000,
            bytes: 32 << 20,
        }
    }
}

pub(crate) struct Hub {
    inner: Mutex<Inner>,
    revision: Arc<AtomicI64>,
    moved: Notify,
}

struct Inner {
    ring: VecDeque<Kept>,
    bytes: usize,
    /// Events above this revision are all in `ring`.
    floor: i64,
    by_prefix: HashMap<Box<str>, Vec<Subscriber>>,
    /// Subscribers whose prefix does not end at a `/`; each event is compared with each of them.
    odd: Vec<Subscriber>,
}

struct Kept {
    at: u64,
    event: Event,
}

struct Subscriber {
    prefix: Box<str>,
    from: i64,
    queue: mpsc::Sender<Result<Batch>>,
    position: Arc<Position>,
    /// Events of the batch now being published.
    pending: Vec<Event>,
}

impl Subscriber {
    /// Hands over what is pending; false when the subscriber is gone or too slow.
    fn flush(&mut self, revision: i64) -> bool {
        if self.pending.is_empty() {
            return !self.queue.is_closed();
        }
        let events = std::mem::take(&mut self.pending);
        self.position
            .raise(events.last().map_or(revision, |event| event.revision));
        match self.queue.try_send(Ok(Batch { events, revision })) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Closed(_)) => false,
            Err(mpsc::error::TrySendError::Full(_)) => {
                tracing::warn!(prefix = %self.prefix, revision, "dropping a store watcher that does not read");
                self.position.overflow();
                false
            }
        }
    }
}

fn weight(event: &Event) -> usize {
    event.key.len() + event.value.as_ref().map_or(0, |value| value.len()) + 96
}

impl Hub {
    /// A hub at `revision` whose history goes back to `floor`, made of `history`.
    pub fn new(revision: i64, floor: i64, history: Vec<Event>, now: u64) -> Hub {
        let bytes = history.iter().map(weight).sum();
        let ring = history.into_iter().map(|event| Kept { at: now, event }).collect();
        let inner = Inner {
            ring,
            bytes,
            floor,
            by_prefix: HashMap::new(),
            odd: Vec::new(),
        };
        Hub {
            inner: Mutex::new(inner),
            revision: Arc::new(AtomicI64::new(revision)),
            moved: Notify::new(),
        }
    }

    pub fn revision(&self) -> i64 {
        self.revision.load(Ordering::Acquire)
    }

    /// Waits until this revision has been published.
    pub async fn reached(&self, revision: i64) {
        loop {
            let mut moved = std::pin::pin!(self.moved.notified());
            // Listen before looking, so that a move in between is not missed.
            moved.as_mut().enable();
            if self.revision() >= revision {
                return;
            }
            moved.await;
        }
    }

    /// Adds events in order, hands them to their subscribers, and only then lets `revision` be seen.
    pub fn publish(&self, events: Vec<Event>, revision: i64, now: u64) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let mut touched: Vec<Box<str>> = Vec::new();
        for event in events {
            for (slash, _) in event.key.match_indices('/') {
                let prefix = &event.key[..=slash];
                let Some(subscribers) = inner.by_prefix.get_mut(prefix) else {
                    continue;
                };
                for subscriber in subscribers {
                    if event.revision >= subscriber.from {
                        subscriber.pending.push(event.clone());
                    }
                }
                if !touched.iter().any(|known| &**known == prefix) {
                    touched.push(prefix.into());
                }
            }
            for subscriber in &mut inner.odd {
                if event.revision >= subscriber.from && event.key.starts_with(&*subscriber.prefix) {
                    subscriber.pending.push(event.clone());
                }
            }
            inner.bytes += weight(&event);
            inner.ring.push_back(Kept { at: now, event });
        }
        for prefix in touched {
            if let Some(subscribers) = inner.by_prefix.get_mut(&prefix) {
                subscribers.retain_mut(|subscriber| subscriber.flush(revision));
                if subscribers.is_empty() {
                    inner.by_prefix.remove(&prefix);
                }
            }
        }
        inner.odd.retain_mut(|subscriber| subscriber.flush(revision));
        self.revision.fetch_max(revision, Ordering::AcqRel);
        self.moved.notify_waiters();
    }

    pub fn watch(&self, prefix: &str, from: i64) -> Result<Watch> {
        let mut inner = self.inner.lock();
        let revision = self.revision();
        let from = if from <= 0 { revision + 1 } else { from };
        if from <= inner.floor {
            return Err(Error::Compacted {
                revision: inner.floor,
            });
        }
        let start = inner.ring.partition_point(|kept| kept.event.revision < from);
        let events: Vec<Event> = inner
            .ring
            .range(start..)
            .filter(|kept| kept.event.key.starts_with(prefix))
            .map(|kept| kept.event.clone())
            .collect();
        let queued = events.last().map_or(0, |event| event.revision);
        let replay = (!events.is_empty()).then_some(Batch { events, revision });
        let (queue, live) = mpsc::channel(QUEUE);
        let position = Position::new(queued, self.revision.clone());
        let subscriber = Subscriber {
            prefix: prefix.into(),
            from: from.max(revision + 1),
            queue,
            position: position.clone(),
            pending: Vec::new(),
        };
        if prefix.ends_with('/') {
            let same = inner.by_prefix.entry(prefix.into()).or_default();
            same.retain(|other| !other.queue.is_closed());
            same.push(subscriber);
        } else {
            inner.odd.retain(|other| !other.queue.is_closed());
            inner.odd.push(subscriber);
        }
        Ok(Watch::new(replay, live, position))
    }

    /// Whether the history has an event of exactly this revision.
    pub fn has_event(&self, revision: i64) -> bool {
        self.inner
            .lock()
            .ring
            .binary_search_by_key(&revision, |kept| kept.event.revision)
            .is_ok()
    }

    /// The revision up to which history must go for `limits` to hold, if any must.
    pub fn excess(&self, limits: &Limits, now: u64) -> Option<i64> {
        let inner = self.inner.lock();
        let (mut count, mut bytes, mut last) = (inner.ring.len(), inner.bytes, None);
        for kept in &inner.ring {
            let old = now.saturating_sub(kept.at) > limits.age.as_secs();
            if !old && count <= limits.events && bytes <= limits.bytes {
                break;
            }
            count -= 1;
            bytes -= weight(&kept.event);
            last = Some(kept.event.revision);
        }
        last
    }

    /// The events that [`Hub::forget`] would drop, oldest first.
    pub fn events_up_to(&self, revision: i64) -> Vec<Event> {
        let inner = self.inner.lock();
        let end = inner.ring.partition_point(|kept| kept.event.revision <= revision);
        inner.ring.range(..end).map(|kept| kept.event.clone()).collect()
    }

    /// Drops history up to and with `revision`.
    pub fn forget(&self, revision: i64) {
        let mut inner = self.inner.lock();
        let end = inner.ring.partition_point(|kept| kept.event.revision <= revision);
        let gone: usize = inner.ring.drain(..end).map(|kept| weight(&kept.event)).sum();
        inner.bytes -= gone;
        inner.floor = inner.floor.max(revision);
    }

    /// Starts over at `revision` because events before it were missed: every subscriber is told.
    pub fn reset(&self, revision: i64) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        inner.ring.clear();
        inner.bytes = 0;
        inner.floor = revision;
        for subscriber in inner
            .by_prefix
            .drain()
            .flat_map(|(_, list)| list)
            .chain(inner.odd.drain(..))
        {
            subscriber.position.raise(i64::MAX);
            // A full queue is fine too: its reader then finds it closed and starts over likewise.
            let _ = subscriber.queue.try_send(Err(Error::Compacted { revision }));
        }
        self.revision.fetch_max(revision, Ordering::AcqRel);
        self.moved.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn put(key: &str, revision: i64) -> Event {
        Event {
            key: key.into(),
            revision,
            create_revision: revision,
            value: Some(Bytes::from_static(b"v")),
        }
    }

    fn revisions(batch: &Batch) -> Vec<i64> {
        batch.events.iter().map(|event| event.revision).collect()
    }

    #[tokio::test]
    async fn replay_then_live_without_gap_or_repeat() {
        let hub = Hub::new(1, 1, Vec::new(), 0);
        hub.publish(vec![put("/r/a/1", 2), put("/r/b/1", 3), put("/r/a/2", 4)], 4, 0);
        let mut watch = hub.watch("/r/a/", 2).unwrap();
        hub.publish(vec![put("/r/a/3", 5), put("/r/ab/3", 6)], 6, 0);
        assert_eq!(revisions(&watch.next().await.unwrap()), [2, 4]);
        let live = watch.next().await.unwrap();
        assert_eq!((revisions(&live), live.revision), (vec![5], 6));
    }

    #[tokio::test]
    async fn foreign_writes_move_the_sync_point_without_a_message() {
        let hub = Hub::new(1, 1, Vec::new(), 0);
        let mut watch = hub.watch("/r/a/", 2).unwrap();
        hub.publish(vec![put("/r/b/1", 2)], 2, 0);
        assert_eq!(watch.position().sync_point(), (2, 0));
        hub.publish(vec![put("/r/a/1", 3), put("/r/b/1", 4)], 4, 0);
        assert_eq!(watch.position().sync_point(), (4, 3));
        assert_eq!(revisions(&watch.next().await.unwrap()), [3]);
    }

    #[tokio::test]
    async fn a_subscriber_that_does_not_read_is_dropped() {
        let hub = Hub::new(1, 1, Vec::new(), 0);
        let mut slow = hub.watch("/r/a/", 2).unwrap();
        for revision in 2..(QUEUE as i64 + 4) {
            hub.publish(vec![put("/r/a/1", revision)], revision, 0);
        }
        assert_eq!(slow.position().sync_point().1, i64::MAX);
        for revision in 2..(QUEUE as i64 + 2) {
            assert_eq!(revisions(&slow.next().await.unwrap()), [revision]);
        }
        assert_eq!(slow.next().await, Err(Error::Lagged));
        assert!(hub.inner.lock().by_prefix.is_empty());
    }

    #[tokio::test]
    async fn limits_and_forgetting() {
        let hub = Hub::new(1, 1, Vec::new(), 0);
        hub.publish(vec![put("/r/a/1", 2), put("/r/a/2", 3)], 3, 100);
        hub.publish(vec![put("/r/a/3", 4)], 4, 200);
        let limits = Limits {
            age: Duration::from_secs(60),
            events: 100,
            bytes: 1 << 20,
        };
        assert_eq!(hub.excess(&limits, 150), None);
        assert_eq!(hub.excess(&limits, 161), Some(3));
        assert_eq!(hub.excess(&Limits { events: 1, ..limits }, 150), Some(3));
        assert_eq!(hub.events_up_to(3).len(), 2);
        hub.forget(3);
        assert_eq!(
            hub.watch("/r/a/", 3).unwrap_err(),
            Error::Compacted { revision: 3 }
        );
        assert_eq!(
            revisions(&hub.watch("/r/a/", 4).unwrap().next().await.unwrap()),
            [4]
        );
    }

    #[tokio::test]
    async fn a_reset_tells_everyone() {
        let hub = Hub::new(1, 1, Vec::new(), 0);
        let mut watch = hub.watch("/r/a/", 2).unwrap();
        hub.reset(9);
        assert_eq!(watch.next().await, Err(Error::Compacted { revision: 9 }));
        assert_eq!(
            hub.watch("/r/a/", 9).unwrap_err(),
            Error::Compacted { revision: 9 }
        );
    }
}
