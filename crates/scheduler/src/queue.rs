//! The scheduling queue: pods that are ready to be tried, pods that back off, and pods that wait for a change.

use crate::framework::{ClusterEvent, Plugin};
use crate::snapshot::PodInfo;
use parking_lot::Mutex;
use skiff_client::Cause;
use std::cmp::Ordering;
use std::collections::HashMap;
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
    /// Being scheduled or bound. `true`: an event came meanwhile that may concern it.
    InFlight(bool),
}

#[derive(Default)]
struct Inner {
    entries: HashMap<String, (Queued, State)>,
    sequence: u64,
    closed: bool,
}

pub struct SchedulingQueue {
    plugins: Vec<Arc<dyn Plugin>>,
    /// A leaf lock.
    inner: Mutex<Inner>,
    changed: Notify,
}

impl SchedulingQueue {
    pub fn new(plugins: Vec<Arc<dyn Plugin>>) -> Self {
        Self {
            plugins,
            inner: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// A pod without a node appeared or changed.
    pub fn add(&self, pod: Arc<PodInfo>, cause: Option<Cause>) {
        let gated = self.plugins.iter().any(|p| p.pre_enqueue(&pod).is_err());
        let mut inner = self.inner.lock();
        inner.sequence += 1;
        let fresh = Queued {
            pod,
            attempts: 0,
            cause,
            entered_us: skiff_trace::now_us(),
            sequence: inner.sequence,
        };
        let uid = fresh.pod.uid.clone();
        match inner.entries.get_mut(&uid) {
            Some((queued, state)) => {
                queued.pod = fresh.pod;
                match state {
                    _ if gated => *state = State::Gated,
                    State::Waiting { rejected_by, .. } => {
                        // Its own status changes too, by the condition that we write: only rejections that a
                        // change of the pod can lift are worth another look.
                        if self.concerns(rejected_by, ClusterEvent::PodChanged) {
                            *state = State::Backoff(Instant::now() + backoff(queued.attempts));
                        }
                    }
                    State::Gated => {
                        queued.cause = fresh.cause;
                        queued.entered_us = fresh.entered_us;
                        *state = State::Active;
                    }
                    State::Active | State::Backoff(_) | State::InFlight(_) => {}
                }
            }
            None => {
                inner
                    .entries
                    .insert(uid, (fresh, if gated { State::Gated } else { State::Active }));
            }
        }
        drop(inner);
        self.changed.notify_one();
    }

    pub fn remove(&self, uid: &str) {
        self.inner.lock().entries.remove(uid);
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
                let now = Instant::now();
                for (_, state) in inner.entries.values_mut() {
                    let due = match state {
                        State::Backoff(until) => *until <= now,
                        State::Waiting { since, .. } => *since + MAX_WAIT <= now,
                        _ => false,
                    };
                    if due {
                        *state = State::Active;
                    }
                }
                let active = inner
                    .entries
                    .values()
                    .filter(|(_, s)| matches!(s, State::Active))
                    .map(|(q, _)| q);
                if let Some(uid) = active.min_by(|a, b| self.order(a, b)).map(|q| q.pod.uid.clone())
                    && let Some((queued, state)) = inner.entries.get_mut(&uid)
                {
                    *state = State::InFlight(false);
                    queued.attempts += 1;
                    return Some(queued.clone());
                }
                let due = inner.entries.values().filter_map(|(_, state)| match state {
                    State::Backoff(until) => Some(*until),
                    State::Waiting { since, .. } => Some(*since + MAX_WAIT),
                    _ => None,
                });
                due.min()
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

    fn order(&self, a: &Queued, b: &Queued) -> Ordering {
        let sorted = self
            .plugins
            .iter()
            .find_map(|p| p.queue_sort(&a.pod, &b.pod))
            .unwrap_or(Ordering::Equal);
        sorted.then(a.sequence.cmp(&b.sequence))
    }

    /// The pod fits nowhere: it waits until one of these plugins' events.
    pub fn park(&self, uid: &str, rejected_by: Vec<&'static str>) {
        let mut inner = self.inner.lock();
        if let Some((queued, state)) = inner.entries.get_mut(uid) {
            // An event during the try may have made room; it would be lost if the pod went to sleep now.
            *state = match state {
                State::InFlight(true) => State::Backoff(Instant::now() + backoff(queued.attempts)),
                _ => State::Waiting {
                    rejected_by,
                    since: Instant::now(),
                },
            };
        }
        drop(inner);
        self.changed.notify_one();
    }

    /// The try failed for no fault of the pod: again after a while.
    pub fn back_off(&self, uid: &str) {
        let mut inner = self.inner.lock();
        if let Some((queued, state)) = inner.entries.get_mut(uid) {
            *state = State::Backoff(Instant::now() + backoff(queued.attempts));
        }
        drop(inner);
        self.changed.notify_one();
    }

    /// Something changed: pods that one of the interested plugins turned away are tried again.
    pub fn on_event(&self, event: ClusterEvent) {
        let mut inner = self.inner.lock();
        let now = Instant::now();
        for (queued, state) in inner.entries.values_mut() {
            match state {
                State::Waiting { rejected_by, since } if self.concerns(rejected_by, event) => {
                    // Time spent waiting counts against the back-off.
                    let until = *since + backoff(queued.attempts);
                    *state = if until <= now {
                        State::Active
                    } else {
                        State::Backoff(until)
                    };
                }
                State::InFlight(missed) => *missed = true,
                _ => {}
            }
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
        fn events(&self) -> &'static [ClusterEvent] {
            &[ClusterEvent::NodeAdded]
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
}
