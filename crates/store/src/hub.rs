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

/// Bytes of values that are kept for subscribers who start in the past. They do so a moment after a list, or when
/// they were too slow for a moment; what is older is of use to readers of the past only, and those have the store.
const REPLAY: usize = 8 << 20;

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
    /// So many at the front of `ring` have lost their values; up to this revision.
    bare: (usize, i64),
    /// Bytes of the values that are left.
    held: usize,
    by_prefix: HashMap<Box<str>, Vec<Subscriber>>,
    /// Subscribers whose prefix does not end at a `/`; each event is compared with each of them.
    odd: Vec<Subscriber>,
}

struct Kept {
    at: u64,
    /// With its value, also when that is no longer here.
    weight: usize,
    event: Event,
}

fn held(event: &Event) -> usize {
    event.value.as_ref().map_or(0, |value| value.len())
}

impl Inner {
    fn keep(&mut self, event: Event, at: u64) {
        let weight = weight(&event);
        self.bytes += weight;
        self.held += held(&event);
        self.ring.push_back(Kept { at, weight, event });
        while self.held > REPLAY
            && let Some(kept) = self.ring.get_mut(self.bare.0)
        {
            self.held -= held(&kept.event);
            self.bare = (self.bare.0 + 1, kept.event.revision);
            if let Some(value) = &mut kept.event.value {
                *value = bytes::Bytes::new();
            }
        }
    }
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
    /// Takes an event that it asked for. From now on nobody vouches for this subscriber until it has handled the event.
    fn expect(&mut self, event: &Event) {
        if event.revision >= self.from {
            self.position.raise(event.revision);
            self.pending.push(event.clone());
        }
    }

    /// Hands over what is pending; false when the subscriber is gone or too slow.
    fn flush(&mut self, revision: i64) -> bool {
        if self.pending.is_empty() {
            return !self.queue.is_closed();
        }
        let events = std::mem::take(&mut self.pending);
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
        let mut inner = Inner {
            ring: VecDeque::new(),
            bytes: 0,
            floor,
            bare: (0, floor),
            held: 0,
            by_prefix: HashMap::new(),
            odd: Vec::new(),
        };
        for event in history {
            inner.keep(event, now);
        }
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

    /// Adds events in order, lets `revision` be seen, and only then hands them to their subscribers: who has an event and
    /// asks for the newest state of something else gets one that is not older than the event.
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
                    subscriber.expect(&event);
                }
                if !touched.iter().any(|known| &**known == prefix) {
                    touched.push(prefix.into());
                }
            }
            for subscriber in &mut inner.odd {
                if event.key.starts_with(&*subscriber.prefix) {
                    subscriber.expect(&event);
                }
            }
            inner.keep(event, now);
        }
        self.revision.fetch_max(revision, Ordering::AcqRel);
        for prefix in touched {
            if let Some(subscribers) = inner.by_prefix.get_mut(&prefix) {
                subscribers.retain_mut(|subscriber| subscriber.flush(revision));
                if subscribers.is_empty() {
                    inner.by_prefix.remove(&prefix);
                }
            }
        }
        inner.odd.retain_mut(|subscriber| subscriber.flush(revision));
        self.moved.notify_waiters();
    }

    pub fn watch(&self, prefix: &str, from: i64) -> Result<Watch> {
        let mut inner = self.inner.lock();
        let revision = self.revision();
        let from = if from <= 0 { revision + 1 } else { from };
        let oldest = inner.floor.max(inner.bare.1);
        if from <= oldest {
            return Err(Error::Compacted { revision: oldest });
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
            bytes -= kept.weight;
            last = Some(kept.event.revision);
        }
        last
    }

    /// The events that [`Hub::forget`] would drop, oldest first; not all have their values.
    pub fn events_up_to(&self, revision: i64) -> Vec<Event> {
        let inner = self.inner.lock();
        let end = inner.ring.partition_point(|kept| kept.event.revision <= revision);
        inner.ring.range(..end).map(|kept| kept.event.clone()).collect()
    }

    /// Drops history up to and with `revision`.
    pub fn forget(&self, revision: i64) {
        let mut inner = self.inner.lock();
        let end = inner.ring.partition_point(|kept| kept.event.revision <= revision);
        inner.bare.0 = inner.bare.0.saturating_sub(end);
        let (mut weights, mut values) = (0, 0);
        for kept in inner.ring.drain(..end) {
            weights += kept.weight;
            values += held(&kept.event);
        }
        inner.bytes -= weights;
        inner.held -= values;
        if inner.ring.capacity() > 1024 && inner.ring.len() * 4 < inner.ring.capacity() {
            let room = inner.ring.len() * 2;
            inner.ring.shrink_to(room);
        }
        inner.floor = inner.floor.max(revision);
    }

    /// Starts over at `revision` because events before it were missed: every subscriber is told.
    pub fn reset(&self, revision: i64) {
        self.start_over(revision, false);
    }

    /// The same where the store is another one than before, whose revisions are lower.
    pub fn restart(&self, revision: i64) {
        self.start_over(revision, true);
    }

    fn start_over(&self, revision: i64, may_go_back: bool) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        inner.ring.clear();
        inner.bytes = 0;
        inner.held = 0;
        inner.bare = (0, revision);
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
        if may_go_back {
            self.revision.store(revision, Ordering::Release);
        } else {
            self.revision.fetch_max(revision, Ordering::AcqRel);
        }
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

    /// Who has received an event finds the hub at its revision, although another thread is still publishing.
    #[tokio::test]
    async fn the_revision_is_seen_before_the_event() {
        let hub = Arc::new(Hub::new(1, 1, Vec::new(), 0));
        let mut watch = hub.watch("/r/a/", 2).unwrap();
        // Further subscribers, after the first, keep the publisher busy.
        let _others: Vec<Watch> = (0..500).map(|_| hub.watch("/r/b/", 2).unwrap()).collect();
        let publisher = hub.clone();
        let publishing = std::thread::spawn(move || {
            for revision in (2..400).step_by(2) {
                let events = vec![put("/r/a/1", revision), put("/r/b/1", revision + 1)];
                publisher.publish(events, revision + 1, 0);
            }
        });
        let mut seen = 0;
        while seen < 398 {
            let batch = watch.next().await.unwrap();
            assert!(
                hub.revision() >= batch.revision,
                "{} < {}",
                hub.revision(),
                batch.revision
            );
            seen = batch.events.last().map_or(seen, |event| event.revision);
        }
        publishing.join().unwrap();
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
    async fn old_values_go_before_their_events() {
        let hub = Hub::new(1, 1, Vec::new(), 0);
        let value = Bytes::from(vec![0; REPLAY / 4]);
        let big = |revision| Event {
            value: Some(value.clone()),
            ..put("/r/a/1", revision)
        };
        hub.publish((2..=6).map(big).collect(), 6, 0);
        assert_eq!(
            hub.watch("/r/a/", 2).unwrap_err(),
            Error::Compacted { revision: 2 }
        );
        assert_eq!(
            revisions(&hub.watch("/r/a/", 3).unwrap().next().await.unwrap()),
            [3, 4, 5, 6]
        );
        let known = hub.events_up_to(6);
        assert_eq!(known.len(), 5);
        assert!(
            known.iter().all(|event| event.value.is_some()),
            "none looks deleted"
        );
        hub.forget(4);
        hub.publish((7..=8).map(big).collect(), 8, 0);
        assert_eq!(
            revisions(&hub.watch("/r/a/", 5).unwrap().next().await.unwrap()),
            [5, 6, 7, 8]
        );
        hub.publish(vec![big(9)], 9, 0);
        assert_eq!(
            hub.watch("/r/a/", 5).unwrap_err(),
            Error::Compacted { revision: 5 }
        );
        hub.forget(9);
        let inner = hub.inner.lock();
        assert_eq!((inner.held, inner.bytes, inner.bare.0), (0, 0, 0));
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
