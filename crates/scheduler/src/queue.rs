//! The scheduling queue: pods that are ready to be tried, pods that back off, and pods that wait for a change.

use crate::framework::{ClusterEvent, Plugin};
use crate::snapshot::PodInfo;
use parking_lot::Mutex;
use skiff_client::Cause;
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

const INITIAL_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// A pod that nothing woke for this long is tried again anyway.
const MAX_WAIT: Duration = Duration::from_secs(300);

/// A pod in the queue, and what is known of its earlier tries.
#[derive(Debug, Clone)]
pub struct Queued {
    pub pod: Arc<PodInfo>,
    pub attempts: u32,
    /// The pod version that brought it here.
    pub cause: Option<Cause>,
    pub entered_us: i64,
    /// When it was first tried; 0 until then.
    pub first_attempt_us: i64,
    /// When it came, or last failed, among all others.
    sequence: u64,
}

#[derive(Debug)]
enum State {
    Active,
    /// Not before this moment.
    Backoff(Instant),
    /// Turned away by these plugins.
    Waiting {
        rejected_by: Vec<&'static str>,
        since: Instant,
    },
    /// Held back by PreEnqueue until the pod changes.
    Gated,
    /// Being scheduled or bound, with what happened meanwhile.
    InFlight(Vec<ClusterEvent>),
}

impl State {
    /// When it becomes active by the mere passing of time.
    fn due(&self) -> Option<Instant> {
        match self {
            State::Backoff(until) => Some(*until),
            State::Waiting { since, .. } => Some(*since + MAX_WAIT),
            _ => None,
        }
    }
}

/// The place of an active pod: as the QueueSort plugin says, then by order of arrival.
struct Rank {
    sort: Option<Arc<dyn Plugin>>,
    queued: Queued,
}

impl Ord for Rank {
    fn cmp(&self, other: &Self) -> Ordering {
        let sort = self.sort.as_ref();
        let sorted = sort.and_then(|sort| sort.queue_sort(&self.queued.pod, &other.queued.pod));
        sorted
            .unwrap_or(Ordering::Equal)
            .then(self.queued.sequence.cmp(&other.queued.sequence))
    }
}

impl PartialOrd for Rank {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Rank {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Rank {}

struct Entry {
    queued: Queued,
    state: State,
}

/// Changed only by `set`, `insert` and `take`, which keep the three in step.
#[derive(Default)]
struct Inner {
    entries: HashMap<String, Entry>,
    /// The entries that are `Active`.
    active: BTreeSet<Rank>,
    /// The entries that have a `due` moment, by uid.
    timers: BTreeSet<(Instant, String)>,
    sort: Option<Arc<dyn Plugin>>,
    sequence: u64,
    closed: bool,
}

impl Inner {
    fn rank(&self, queued: &Queued) -> Rank {
        Rank {
            sort: self.sort.clone(),
            queued: queued.clone(),
        }
    }

    fn take(&mut self, uid: &str) -> Option<Entry> {
        let entry = self.entries.remove(uid)?;
        if let Some(at) = entry.state.due() {
            self.timers.remove(&(at, uid.to_owned()));
        }
        if matches!(entry.state, State::Active) {
            let rank = self.rank(&entry.queued);
            self.active.remove(&rank);
        }
        Some(entry)
    }

    fn insert(&mut self, entry: Entry) {
        let uid = entry.queued.pod.uid.clone();
        if let Some(at) = entry.state.due() {
            self.timers.insert((at, uid.clone()));
        }
        if matches!(entry.state, State::Active) {
            let rank = self.rank(&entry.queued);
            self.active.insert(rank);
        }
        self.entries.insert(uid, entry);
    }

    fn set(&mut self, uid: &str, state: State) {
        if let Some(entry) = self.take(uid) {
            self.insert(Entry { state, ..entry });
        }
    }

    /// After a failed try the pod stands behind those that came meanwhile.
    fn set_behind(&mut self, uid: &str, state: State) {
        if let Some(mut entry) = self.take(uid) {
            self.sequence += 1;
            entry.queued.sequence = self.sequence;
            entry.state = state;
            self.insert(entry);
        }
    }

    fn activate_due(&mut self, now: Instant) {
        while let Some((at, uid)) = self.timers.first().cloned()
            && at <= now
        {
            self.set(&uid, State::Active);
        }
    }
}

/// How many pods wait, and for what.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Pending {
    pub(crate) active: usize,
    pub(crate) backoff: usize,
    pub(crate) unschedulable: usize,
    pub(crate) gated: usize,
}

pub struct SchedulingQueue {
    plugins: Vec<Arc<dyn Plugin>>,
    /// A leaf lock.
    inner: Mutex<Inner>,
    changed: Notify,
}

/// What of a pod can change whether it fits. Its status changes too, by the condition that we write, and must
/// not wake it.
fn fits_differ(old: &PodInfo, new: &PodInfo) -> bool {
    old.pod.spec != new.pod.spec || old.pod.metadata.labels != new.pod.metadata.labels
}

impl SchedulingQueue {
    pub fn new(plugins: Vec<Arc<dyn Plugin>>) -> Self {
        let sort = plugins.iter().find(|p| p.sorts_queue()).cloned();
        let inner = Inner {
            sort,
            ..Inner::default()
        };
        Self {
            plugins,
            inner: Mutex::new(inner),
            changed: Notify::new(),
        }
    }

    /// A pod without a node appeared or changed.
    pub fn add(&self, pod: Arc<PodInfo>, cause: Option<Cause>) {
        let gated = self.plugins.iter().any(|p| p.pre_enqueue(&pod).is_err());
        let mut inner = self.inner.lock();
        inner.sequence += 1;
        let mut queued = Queued {
            pod,
            attempts: 0,
            cause,
            entered_us: skiff_trace::now_us(),
            first_attempt_us: 0,
            sequence: inner.sequence,
        };
        let Some(known) = inner.take(&queued.pod.uid) else {
            let state = if gated { State::Gated } else { State::Active };
            inner.insert(Entry { queued, state });
            drop(inner);
            self.changed.notify_one();
            return;
        };
        let differs = fits_differ(&known.queued.pod, &queued.pod);
        queued.attempts = known.queued.attempts;
        queued.first_attempt_us = known.queued.first_attempt_us;
        queued.sequence = known.queued.sequence;
        let woken = match known.state {
            State::InFlight(mut missed) => {
                if differs && !missed.contains(&ClusterEvent::PodChanged) {
                    missed.push(ClusterEvent::PodChanged);
                }
                State::InFlight(missed)
            }
            _ if gated => State::Gated,
            State::Gated => State::Active,
            State::Waiting { rejected_by, since }
                if differs && self.concerns(&rejected_by, ClusterEvent::PodChanged) =>
            {
                after_backoff(since, queued.attempts)
            }
            // Nothing new: what brought it here stays its cause.
            state => {
                queued.cause = known.queued.cause;
                queued.entered_us = known.queued.entered_us;
                state
            }
        };
        inner.insert(Entry { queued, state: woken });
        drop(inner);
        self.changed.notify_one();
    }

    pub(crate) fn pending(&self) -> Pending {
        let mut pending = Pending::default();
        for entry in self.inner.lock().entries.values() {
            match entry.state {
                State::Active => pending.active += 1,
                State::Backoff(_) => pending.backoff += 1,
                State::Waiting { .. } => pending.unschedulable += 1,
                State::Gated => pending.gated += 1,
                State::InFlight(_) => {}
            }
        }
        pending
    }

    pub fn remove(&self, uid: &str) {
        self.inner.lock().take(uid);
    }

    pub fn close(&self) {
        self.inner.lock().closed = true;
        self.changed.notify_one();
    }

    /// The next pod to try, in the order of the QueueSort plugin. `None` once closed.
    pub async fn next(&self) -> Option<Queued> {
        loop {
            let wake_at = {
                let mut inner = self.inner.lock();
                if inner.closed {
                    return None;
                }
                inner.activate_due(Instant::now());
                let first = inner.active.first().map(|rank| rank.queued.pod.uid.clone());
                if let Some(mut entry) = first.and_then(|uid| inner.take(&uid)) {
                    if entry.queued.attempts == 0 {
                        entry.queued.first_attempt_us = skiff_trace::now_us();
                    }
                    entry.queued.attempts += 1;
                    entry.state = State::InFlight(Vec::new());
                    let queued = entry.queued.clone();
                    inner.insert(entry);
                    return Some(queued);
                }
                inner.timers.first().map(|(at, _)| *at)
            };
            match wake_at {
                Some(at) => tokio::select! {
                    () = self.changed.notified() => {}
                    () = tokio::time::sleep_until(at) => {}
                },
                None => self.changed.notified().await,
            }
        }
    }

    /// The pod fits nowhere: it waits until one of these plugins' events.
    pub fn park(&self, uid: &str, rejected_by: Vec<&'static str>) {
        let mut inner = self.inner.lock();
        let Some(Entry {
            queued,
            state: State::InFlight(missed),
        }) = inner.entries.get(uid)
        else {
            return;
        };
        let now = Instant::now();
        // An event during the try may have made room; it would be lost if the pod went to sleep now.
        let state = if missed.iter().any(|event| self.concerns(&rejected_by, *event)) {
            State::Backoff(now + backoff(queued.attempts))
        } else {
            State::Waiting {
                rejected_by,
                since: now,
            }
        };
        inner.set_behind(uid, state);
        drop(inner);
        self.changed.notify_one();
    }

    /// The try failed for no fault of the pod: again after a while.
    pub fn back_off(&self, uid: &str) {
        let mut inner = self.inner.lock();
        if let Some(entry) = inner.entries.get(uid) {
            let state = State::Backoff(Instant::now() + backoff(entry.queued.attempts));
            inner.set_behind(uid, state);
        }
        drop(inner);
        self.changed.notify_one();
    }

    /// Something changed: pods that one of the interested plugins turned away are tried again.
    pub fn on_event(&self, event: ClusterEvent) {
        let mut inner = self.inner.lock();
        let mut woken = Vec::new();
        for (uid, entry) in &mut inner.entries {
            match &mut entry.state {
                State::Waiting { rejected_by, since } if self.concerns(rejected_by, event) => {
                    woken.push((uid.clone(), after_backoff(*since, entry.queued.attempts)));
                }
                State::InFlight(missed) if !missed.contains(&event) => missed.push(event),
                _ => {}
            }
        }
        for (uid, state) in woken {
            inner.set(&uid, state);
        }
        drop(inner);
        self.changed.notify_one();
    }

    fn concerns(&self, rejected_by: &[&'static str], event: ClusterEvent) -> bool {
        rejected_by.is_empty()
            || self
                .plugins
                .iter()
                .any(|p| rejected_by.contains(&p.name()) && p.events().contains(&event))
    }
}

/// Time spent waiting counts against the back-off.
fn after_backoff(since: Instant, attempts: u32) -> State {
    let until = since + backoff(attempts);
    if until <= Instant::now() {
        State::Active
    } else {
        State::Backoff(until)
    }
}

fn backoff(attempts: u32) -> Duration {
    INITIAL_BACKOFF
        .saturating_mul(1 << attempts.saturating_sub(1).min(8))
        .min(MAX_BACKOFF)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framework::Rejection;
    use crate::snapshot::NodeInfo;
    use crate::snapshot::fixtures::pod;
    use serde_json::json;

    struct Sort;
    impl Plugin for Sort {
        fn name(&self) -> &'static str {
            "Sort"
        }
        fn queue_sort(&self, a: &PodInfo, b: &PodInfo) -> Option<Ordering> {
            Some(b.priority.cmp(&a.priority))
        }
        fn sorts_queue(&self) -> bool {
            true
        }
        fn events(&self) -> &'static [ClusterEvent] {
            &[ClusterEvent::NodeAdded, ClusterEvent::PodChanged]
        }
        fn filter(&self, _pod: &PodInfo, _node: &NodeInfo) -> Result<(), Rejection> {
            Ok(())
        }
    }

    fn queue() -> SchedulingQueue {
        SchedulingQueue::new(vec![Arc::new(Sort)])
    }

    fn add(queue: &SchedulingQueue, name: &str, priority: i32) {
        queue.add(Arc::new(pod(name, json!({"priority": priority}))), None);
    }

    async fn next(queue: &SchedulingQueue) -> String {
        queue.next().await.unwrap().pod.uid.clone()
    }

    #[tokio::test(start_paused = true)]
    async fn priority_then_order_of_arrival() {
        let queue = queue();
        add(&queue, "first", 0);
        add(&queue, "second", 0);
        add(&queue, "urgent", 5);
        assert_eq!(
            [next(&queue).await, next(&queue).await, next(&queue).await],
            ["urgent", "first", "second"]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_parked_pod_waits_for_an_event_that_matters() {
        let queue = queue();
        add(&queue, "p", 0);
        next(&queue).await;
        queue.park("p", vec!["Sort"]);
        queue.on_event(ClusterEvent::PodRemoved);
        let quiet = tokio::time::timeout(Duration::from_secs(60), queue.next()).await;
        assert!(quiet.is_err(), "an event nobody cares about wakes nobody");
        queue.on_event(ClusterEvent::NodeAdded);
        assert_eq!(next(&queue).await, "p");
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_during_the_try_is_not_lost() {
        let queue = queue();
        add(&queue, "p", 0);
        next(&queue).await;
        queue.on_event(ClusterEvent::NodeAdded);
        queue.park("p", vec!["Sort"]);
        let again = tokio::time::timeout(Duration::from_secs(5), queue.next()).await;
        assert_eq!(again.unwrap().unwrap().attempts, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_removed_pod_does_not_come_back() {
        let queue = queue();
        add(&queue, "p", 0);
        next(&queue).await;
        queue.remove("p");
        queue.back_off("p");
        assert!(
            tokio::time::timeout(Duration::from_secs(60), queue.next())
                .await
                .is_err()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_that_does_not_concern_the_try_is_no_reason_for_another() {
        let queue = queue();
        add(&queue, "p", 0);
        next(&queue).await;
        queue.on_event(ClusterEvent::PodRemoved);
        queue.park("p", vec!["Sort"]);
        let quiet = tokio::time::timeout(Duration::from_secs(60), queue.next()).await;
        assert!(quiet.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn its_own_condition_does_not_wake_a_pod_but_a_new_spec_does() {
        let queue = queue();
        let with = |spec: serde_json::Value, status: &str| {
            let mut pod = pod("p", spec);
            let mut object = (*pod.pod).clone();
            object.status = serde_json::from_value(json!({"message": status})).unwrap();
            pod.pod = Arc::new(object);
            Arc::new(pod)
        };
        queue.add(with(json!({}), ""), None);
        next(&queue).await;
        // While it is being tried, and while it waits.
        queue.add(with(json!({}), "tried"), None);
        queue.park("p", vec!["Sort"]);
        queue.add(with(json!({}), "waiting"), None);
        let quiet = tokio::time::timeout(Duration::from_secs(60), queue.next()).await;
        assert!(quiet.is_err(), "a changed status wakes nobody");
        let tolerant = json!({"tolerations": [{"operator": "Exists"}]});
        queue.add(with(tolerant.clone(), ""), None);
        assert_eq!(next(&queue).await, "p");
        queue.add(with(json!({"tolerations": []}), ""), None);
        queue.park("p", vec!["Sort"]);
        let again = tokio::time::timeout(Duration::from_secs(5), queue.next()).await;
        assert_eq!(
            again.unwrap().unwrap().attempts,
            3,
            "a spec that changed during the try"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_failed_stands_behind_those_that_came_meanwhile() {
        let queue = queue();
        add(&queue, "old", 0);
        next(&queue).await;
        add(&queue, "new", 0);
        queue.back_off("old");
        tokio::time::advance(Duration::from_secs(2)).await;
        add(&queue, "newer", 0);
        assert_eq!(
            [next(&queue).await, next(&queue).await, next(&queue).await],
            ["new", "old", "newer"]
        );
        let inner = queue.inner.lock();
        assert_eq!(
            (inner.active.len(), inner.timers.len(), inner.entries.len()),
            (0, 0, 3)
        );
    }
}
