//! The work queue: an item is queued once however often it is added, is worked on by one worker at a
//! time, and comes back later with a growing delay when its work failed.
//!
//! It knows nothing of what an item means and drops none: what is added while it is being worked on is
//! queued again when that work ends.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use skiff_trace::Cause;

use crate::Key;
use crate::metrics::{ComponentMetrics, QueueMetrics, QueueState};

const BASE_DELAY: Duration = Duration::from_millis(5);
const MAX_DELAY: Duration = Duration::from_secs(1000);
/// By how much a delay may be longer, chosen by chance: what failed together must not come back together.
const JITTER: f64 = 0.2;
/// Users choose delays (deadlines, schedules), and a clock cannot hold every one of them.
const LONGEST_DELAY: Duration = Duration::from_secs(365 * 24 * 3600);

/// Why and when an item was queued.
#[derive(Clone, Debug)]
struct Wake {
    cause: Option<Cause>,
    added_at: Instant,
}

struct State<T> {
    ready: VecDeque<T>,
    /// Everything that waits to be worked on: in `ready`, or in `processing` and due again.
    dirty: HashMap<T, Wake>,
    /// What is in work, and since when.
    processing: HashMap<T, Instant>,
    /// Earliest first. An entry whose time is not the one in `delayed_until` is stale.
    delayed: BinaryHeap<Reverse<(Instant, u64)>>,
    delayed_items: HashMap<u64, T>,
    delayed_until: HashMap<T, (Instant, u64, Option<Cause>)>,
    sequence: u64,
    failures: HashMap<T, u32>,
    closed: bool,
}

impl<T: Clone + Eq + Hash> State<T> {
    /// False: it waits already, or the queue is closed.
    fn add(&mut self, item: T, cause: Option<Cause>) -> bool {
        if self.closed {
            return false;
        }
        if let Some(wake) = self.dirty.get_mut(&item) {
            if cause.is_some() {
                wake.cause = cause;
            }
            return false;
        }
        self.dirty.insert(
            item.clone(),
            Wake {
                cause,
                added_at: Instant::now(),
            },
        );
        if !self.processing.contains_key(&item) {
            self.ready.push_back(item);
        }
        true
    }

    /// Queues what is due, and says how much that was.
    fn move_due(&mut self, now: Instant) -> usize {
        let mut added = 0;
        while let Some(Reverse((at, sequence))) = self.delayed.peek().copied() {
            if at > now {
                break;
            }
            self.delayed.pop();
            let Some(item) = self.delayed_items.remove(&sequence) else {
                continue;
            };
            if self
                .delayed_until
                .get(&item)
                .is_some_and(|(_, latest, _)| *latest == sequence)
                && let Some((_, _, cause)) = self.delayed_until.remove(&item)
            {
                // What came meanwhile is newer than what asked for the delay.
                let newer = self.dirty.get(&item).is_some_and(|wake| wake.cause.is_some());
                added += usize::from(self.add(item, cause.filter(|_| !newer)));
            }
        }
        added
    }
}

pub struct WorkQueue<T = Key> {
    state: Mutex<State<T>>,
    changed: Notify,
    metrics: Option<QueueMetrics>,
}

impl<T: Clone + Eq + Hash> Default for WorkQueue<T> {
    fn default() -> Self {
        WorkQueue {
            state: Mutex::new(State {
                ready: VecDeque::new(),
                dirty: HashMap::new(),
                processing: HashMap::new(),
                delayed: BinaryHeap::new(),
                delayed_items: HashMap::new(),
                delayed_until: HashMap::new(),
                sequence: 0,
                failures: HashMap::new(),
                closed: false,
            }),
            changed: Notify::new(),
            metrics: None,
        }
    }
}

impl<T: Clone + Eq + Hash + Send + 'static> WorkQueue<T> {
    /// A queue that is measured under this name.
    pub fn measured(name: &'static str, metrics: &ComponentMetrics) -> Arc<Self> {
        let queue = Arc::new(WorkQueue {
            metrics: Some(metrics.queue(name)),
            ..Self::default()
        });
        let shown: Arc<dyn QueueState> = queue.clone();
        metrics.show(name, Arc::downgrade(&shown));
        queue
    }
}

impl<T: Clone + Eq + Hash + Send> QueueState for WorkQueue<T> {
    fn depth(&self) -> usize {
        self.state.lock().ready.len()
    }

    fn in_work(&self) -> (Duration, Duration) {
        let state = self.state.lock();
        let times = state.processing.values().map(Instant::elapsed);
        times.fold((Duration::ZERO, Duration::ZERO), |(sum, longest), time| {
            (sum + time, longest.max(time))
        })
    }
}

impl<T: Clone + Eq + Hash> WorkQueue<T> {
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    pub fn add(&self, item: T, cause: Option<Cause>) {
        let added = self.state.lock().add(item, cause);
        self.count_adds(usize::from(added));
        self.changed.notify_one();
    }

    fn count_adds(&self, count: usize) {
        if let Some(metrics) = &self.metrics {
            (0..count).for_each(|_| metrics.adds.inc());
        }
    }

    /// Adds `item` once `delay` has passed; an earlier time that is already set stands.
    pub fn add_after(&self, item: T, delay: Duration, cause: Option<Cause>) {
        if delay.is_zero() {
            return self.add(item, cause);
        }
        if let Some(metrics) = &self.metrics {
            metrics.retries.inc();
        }
        {
            let state = &mut *self.state.lock();
            if state.closed {
                return;
            }
            let at = Instant::now() + delay.min(LONGEST_DELAY);
            if let Some((present, _, present_cause)) = state.delayed_until.get_mut(&item)
                && *present <= at
            {
                if cause.is_some() {
                    *present_cause = cause;
                }
                return;
            }
            state.sequence += 1;
            let sequence = state.sequence;
            if let Some((_, stale, _)) = state.delayed_until.insert(item.clone(), (at, sequence, cause)) {
                state.delayed_items.remove(&stale);
            }
            state.delayed_items.insert(sequence, item);
            state.delayed.push(Reverse((at, sequence)));
        }
        self.changed.notify_one();
    }

    /// Adds `item` after a delay that doubles with each failure since the last [`forget`](Self::forget), and a little
    /// more by chance. Answers the delay.
    pub fn add_rate_limited(&self, item: T, cause: Option<Cause>) -> Duration {
        let delay = {
            let mut state = self.state.lock();
            let failures = state.failures.entry(item.clone()).or_insert(0);
            let delay = BASE_DELAY
                .saturating_mul(1u32.checked_shl(*failures).unwrap_or(u32::MAX))
                .min(MAX_DELAY);
            *failures = failures.saturating_add(1);
            delay.mul_f64(rand::random_range(1.0..1.0 + JITTER))
        };
        self.add_after(item, delay, cause);
        delay
    }

    pub fn forget(&self, item: &T) {
        self.state.lock().failures.remove(item);
    }

    /// How often `item` has failed in a row.
    pub fn requeues(&self, item: &T) -> u32 {
        self.state.lock().failures.get(item).copied().unwrap_or(0)
    }

    /// Items that wait now; not those that are delayed.
    pub fn len(&self) -> usize {
        self.state.lock().dirty.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes no more items; [`next`](Self::next) answers `None` at once.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_waiters();
        self.changed.notify_one();
    }

    /// Waits for an item. Dropping the [`Taken`] says that its work has ended.
    pub async fn next(self: &Arc<Self>) -> Option<Taken<T>> {
        loop {
            let notified = self.changed.notified();
            let wait_until = {
                let mut state = self.state.lock();
                if state.closed {
                    // Pass the news on to the next waiter.
                    self.changed.notify_one();
                    return None;
                }
                let now = Instant::now();
                self.count_adds(state.move_due(now));
                if let Some(item) = state.ready.pop_front() {
                    let wake = state.dirty.remove(&item);
                    state.processing.insert(item.clone(), now);
                    if !state.ready.is_empty() {
                        self.changed.notify_one();
                    }
                    let (cause, added_at) =
                        wake.map_or_else(|| (None, now), |wake| (wake.cause, wake.added_at));
                    if let Some(metrics) = &self.metrics {
                        metrics.waited.observe_duration(now.duration_since(added_at));
                    }
                    return Some(Taken {
                        item,
                        cause,
                        added_at,
                        queue: self.clone(),
                    });
                }
                state.delayed.peek().map(|Reverse((at, _))| *at)
            };
            match wait_until {
                Some(at) => {
                    tokio::select! {
                        _ = notified => {}
                        _ = tokio::time::sleep_until(at) => {}
                    }
                }
                None => notified.await,
            }
        }
    }

    fn done(&self, item: &T) {
        let mut state = self.state.lock();
        if let (Some(since), Some(metrics)) = (state.processing.remove(item), &self.metrics) {
            metrics.worked.observe_duration(since.elapsed());
        }
        if state.dirty.contains_key(item) {
            state.ready.push_back(item.clone());
            drop(state);
            self.changed.notify_one();
        }
    }
}

/// An item in work.
pub struct Taken<T: Clone + Eq + Hash = Key> {
    pub item: T,
    /// The latest cause that was given while the item waited.
    pub cause: Option<Cause>,
    /// When the item was first added.
    pub added_at: Instant,
    queue: Arc<WorkQueue<T>>,
}

impl<T: Clone + Eq + Hash> Drop for Taken<T> {
    fn drop(&mut self) {
        self.queue.done(&self.item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause(version: &str) -> Option<Cause> {
        Some(Cause {
            resource: "pods".into(),
            namespace: "a".into(),
            name: "b".into(),
            version: version.into(),
        })
    }

    #[tokio::test(start_paused = true)]
    async fn an_item_is_queued_once_and_keeps_its_latest_cause() {
        let queue = WorkQueue::<&str>::new();
        queue.add("a", cause("1"));
        queue.add("a", cause("2"));
        queue.add("b", None);
        let first = queue.next().await.unwrap();
        assert_eq!((first.item, first.cause.clone()), ("a", cause("2")));
        // Added while in work: not handed to a second worker, but queued again after.
        queue.add("a", cause("3"));
        assert_eq!(queue.next().await.unwrap().item, "b");
        assert_eq!(queue.len(), 1);
        drop(first);
        assert_eq!(queue.next().await.unwrap().cause, cause("3"));
        assert!(queue.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_measured_queue_shows_what_waits_and_what_works() {
        let metrics = ComponentMetrics::default();
        let queue = WorkQueue::<&str>::measured("test", &metrics);
        let shows = |line: &str| {
            let text = metrics.registry.text();
            assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
        };
        queue.add("a", None);
        queue.add("a", None);
        queue.add("b", None);
        shows("workqueue_adds_total{name=\"test\"} 2");
        shows("workqueue_depth{name=\"test\"} 2");
        tokio::time::advance(Duration::from_secs(3)).await;
        let taken = queue.next().await.unwrap();
        tokio::time::advance(Duration::from_secs(5)).await;
        shows("workqueue_depth{name=\"test\"} 1");
        shows("workqueue_queue_duration_seconds_sum{name=\"test\"} 3");
        shows("workqueue_unfinished_work_seconds{name=\"test\"} 5");
        shows("workqueue_longest_running_processor_seconds{name=\"test\"} 5");
        queue.add_rate_limited("a", None);
        drop(taken);
        shows("workqueue_retries_total{name=\"test\"} 1");
        shows("workqueue_work_duration_seconds_sum{name=\"test\"} 5");
        shows("workqueue_work_duration_seconds_bucket{name=\"test\",le=\"1e-08\"} 0");
        assert_eq!(queue.next().await.unwrap().item, "b");
        assert_eq!(queue.next().await.unwrap().item, "a");
        shows("workqueue_adds_total{name=\"test\"} 3");
        drop(queue);
        assert!(
            !metrics.registry.text().contains("workqueue_depth"),
            "a queue that is gone is not shown"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn failures_double_the_delay_until_forgotten() {
        let queue = WorkQueue::<&str>::new();
        let mut waits = Vec::new();
        for _ in 0..4 {
            let before = Instant::now();
            queue.add_rate_limited("a", None);
            drop(queue.next().await.unwrap());
            waits.push(before.elapsed());
        }
        // The clock of tests has steps of a millisecond.
        let near = |wait: Duration, base: Duration| {
            wait >= base && wait <= base.mul_f64(1.0 + JITTER) + Duration::from_millis(2)
        };
        for (nth, wait) in waits.iter().enumerate() {
            assert!(near(*wait, Duration::from_millis(5 << nth)), "{waits:?}");
        }
        assert_eq!(queue.requeues(&"a"), 4);
        queue.forget(&"a");
        assert_eq!(queue.requeues(&"a"), 0);
        for _ in 0..40 {
            queue.add_rate_limited("b", None);
            drop(queue.next().await);
        }
        let before = Instant::now();
        queue.add_rate_limited("b", None);
        drop(queue.next().await);
        assert!(near(before.elapsed(), MAX_DELAY), "{:?}", before.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn the_earliest_delay_wins() {
        let queue = WorkQueue::<&str>::new();
        let before = Instant::now();
        queue.add_after("a", Duration::from_secs(10), None);
        queue.add_after("a", Duration::from_secs(2), None);
        queue.add_after("a", Duration::from_secs(20), None);
        drop(queue.next().await);
        assert_eq!(before.elapsed(), Duration::from_secs(2));
        let more = tokio::time::timeout(Duration::from_secs(60), queue.next()).await;
        assert!(more.is_err(), "the replaced delays must not fire");
    }

    #[tokio::test(start_paused = true)]
    async fn a_delayed_cause_does_not_replace_a_newer_one() {
        let queue = WorkQueue::<&str>::new();
        let delay = Duration::from_secs(1);
        queue.add_after("a", delay, cause("1"));
        queue.add_after("b", delay, cause("1"));
        queue.add("a", cause("2"));
        queue.add("b", None);
        tokio::time::advance(delay).await;
        let (a, b) = (queue.next().await.unwrap(), queue.next().await.unwrap());
        assert_eq!((a.item, a.cause.clone()), ("a", cause("2")));
        assert_eq!((b.item, b.cause.clone()), ("b", cause("1")));
    }

    #[tokio::test]
    async fn closing_ends_every_waiter() {
        let queue = WorkQueue::<&str>::new();
        let waiters: Vec<_> = (0..3)
            .map(|_| {
                let queue = queue.clone();
                tokio::spawn(async move { queue.next().await.is_none() })
            })
            .collect();
        tokio::task::yield_now().await;
        queue.close();
        for waiter in waiters {
            assert!(waiter.await.unwrap());
        }
    }
}
