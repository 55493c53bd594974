//! The scheduling queue: pods that are ready to be tried, pods that back off, pods that wait for a change in the cluster,
//! and pods that PreEnqueue holds back.
//!
//! Waiting pods of one shape that the same plugins rejected stand in one group: an event is asked of a group, not of each
//! pod in it.

use crate::events::{ClusterEvent, fits_differ};
use crate::framework::{Points, Profile};
use crate::pod::PodInfo;
use parking_lot::Mutex;
use skiff_client::Cause;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A pod that nothing woke for this long is tried again anyway.
const MAX_WAIT: Duration = Duration::from_secs(300);
/// Events that are remembered for pods that are being tried. What is older counts as "anything may have happened".
const MAX_EVENTS: usize = 4096;

/// Upstream's `podInitialBackoffSeconds` and `podMaxBackoffSeconds`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Backoff {
    pub(crate) initial: Duration,
    pub(crate) max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            initial: Duration::from_secs(1),
            max: Duration::from_secs(10),
        }
    }
}

impl Backoff {
    fn after(self, failures: u32) -> Duration {
        let factor = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.initial.saturating_mul(factor).min(self.max)
    }
}

/// A pod in the queue, and what is known of its earlier tries.
#[derive(Debug, Clone)]
pub(crate) struct Queued {
    pub(crate) pod: Arc<PodInfo>,
    pub(crate) attempts: u32,
    /// Tries that found no node since it was last on its way, and tries that broke.
    unschedulable: u32,
    errors: u32,
    /// The pod version that brought it here.
    pub(crate) cause: Option<Cause>,
    pub(crate) entered_us: i64,
    /// When it was first tried; 0 until then.
    pub(crate) first_attempt_us: i64,
    /// When it came, or last failed, among all others.
    sequence: u64,
    sort: i64,
}

#[derive(Debug)]
enum State {
    Active,
    /// Not before this moment; `error`: the try broke, so not earlier either when nothing else is to do.
    Backoff {
        until: Instant,
        error: bool,
    },
    /// Rejected by these plugins, by their numbers in the profile.
    Waiting {
        rejected_by: u64,
        since: Instant,
    },
    /// Held back by this PreEnqueue plugin; before that it was rejected by others, and one of them has seen a chance since.
    Gated {
        gate: usize,
        rejected_by: u64,
        woken: bool,
    },
    /// Being scheduled or bound, since this place in the log of events, with its own changes meanwhile.
    InFlight {
        seen: u64,
        changes: Vec<ClusterEvent>,
    },
}

impl State {
    /// When it becomes active by the mere passing of time.
    fn due(&self) -> Option<Instant> {
        match self {
            State::Backoff { until, .. } => Some(*until),
            State::Waiting { since, .. } => Some(*since + MAX_WAIT),
            _ => None,
        }
    }
}

/// Pods that an event wakes together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct GroupKey {
    shape: usize,
    rejected_by: u64,
    /// Of a pod that has volumes or claims of its own.
    alone: Option<Arc<str>>,
}

#[derive(Debug)]
struct Group {
    /// Holds the shape, so that its address stays its own.
    example: Arc<PodInfo>,
    uids: HashSet<Arc<str>>,
}

fn group_key(pod: &PodInfo, rejected_by: u64) -> GroupKey {
    GroupKey {
        shape: Arc::as_ptr(&pod.shape) as usize,
        rejected_by,
        alone: pod.is_special().then(|| Arc::clone(&pod.uid)),
    }
}

fn gated(gate: usize) -> State {
    State::Gated {
        gate,
        rejected_by: 0,
        woken: false,
    }
}

struct Entry {
    queued: Queued,
    state: State,
}

/// Changed only by `set`, `insert` and `take`, which keep all of them in step.
#[derive(Default)]
struct Inner {
    entries: HashMap<Arc<str>, Entry>,
    /// The entries that are `Active`, by what QueueSort says and then by arrival.
    active: BTreeMap<(i64, u64), Arc<str>>,
    /// The entries that have a `due` moment.
    timers: BTreeSet<(Instant, Arc<str>)>,
    /// Of these the ones that may be tried early if nothing else is to do.
    early: BTreeSet<(Instant, Arc<str>)>,
    waiting: HashMap<GroupKey, Group>,
    gated: HashSet<Arc<str>>,
    in_flight: BTreeMap<u64, usize>,
    events: VecDeque<Arc<ClusterEvent>>,
    events_base: u64,
    sequence: u64,
    closed: bool,
}

impl Inner {
    fn take(&mut self, uid: &str) -> Option<Entry> {
        let (uid, entry) = self.entries.remove_entry(uid)?;
        if let Some(at) = entry.state.due() {
            self.timers.remove(&(at, Arc::clone(&uid)));
        }
        match &entry.state {
            State::Active => {
                self.active.remove(&(entry.queued.sort, entry.queued.sequence));
            }
            State::Backoff { until, error: false } => {
                self.early.remove(&(*until, uid));
            }
            State::Backoff { .. } => {}
            State::Waiting { rejected_by, .. } => {
                let key = group_key(&entry.queued.pod, *rejected_by);
                if let Some(group) = self.waiting.get_mut(&key) {
                    group.uids.remove(&uid);
                    if group.uids.is_empty() {
                        self.waiting.remove(&key);
                    }
                }
            }
            State::Gated { .. } => {
                self.gated.remove(&uid);
            }
            State::InFlight { seen, .. } => {
                if let Some(count) = self.in_flight.get_mut(seen) {
                    *count -= 1;
                    if *count == 0 {
                        self.in_flight.remove(seen);
                    }
                }
                self.forget_events();
            }
        }
        Some(entry)
    }

    /// Drops the events that nobody in flight has to look at.
    fn forget_events(&mut self) {
        let oldest = self.in_flight.keys().next().copied();
        let keep_from = oldest.unwrap_or(self.events_base + self.events.len() as u64);
        while self.events_base < keep_from && self.events.pop_front().is_some() {
            self.events_base += 1;
        }
    }

    fn insert(&mut self, entry: Entry) {
        let uid = Arc::clone(&entry.queued.pod.uid);
        if let Some(at) = entry.state.due() {
            self.timers.insert((at, Arc::clone(&uid)));
        }
        match &entry.state {
            State::Active => {
                let place = (entry.queued.sort, entry.queued.sequence);
                self.active.insert(place, Arc::clone(&uid));
            }
            State::Backoff { until, error: false } => {
                self.early.insert((*until, Arc::clone(&uid)));
            }
            State::Backoff { .. } => {}
            State::Waiting { rejected_by, .. } => {
                let key = group_key(&entry.queued.pod, *rejected_by);
                let group = self.waiting.entry(key).or_insert_with(|| Group {
                    example: Arc::clone(&entry.queued.pod),
                    uids: HashSet::new(),
                });
                group.uids.insert(Arc::clone(&uid));
            }
            State::Gated { .. } => {
                self.gated.insert(Arc::clone(&uid));
            }
            State::InFlight { seen, .. } => *self.in_flight.entry(*seen).or_default() += 1,
        }
        self.entries.insert(uid, entry);
    }

    fn set(&mut self, uid: &str, state: State) {
        if let Some(entry) = self.take(uid) {
            self.insert(Entry { state, ..entry });
        }
    }

    /// After a failed try the pod stands behind those that came meanwhile.
    fn set_behind(&mut self, mut entry: Entry, state: State) {
        self.sequence += 1;
        entry.queued.sequence = self.sequence;
        entry.state = state;
        self.insert(entry);
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

pub(crate) struct SchedulingQueue {
    profiles: Arc<HashMap<String, Arc<Profile>>>,
    backoff: Backoff,
    /// A leaf lock. Plugins are asked for hints under it: they must not come back here.
    inner: Mutex<Inner>,
    changed: Notify,
}

impl SchedulingQueue {
    pub(crate) fn new(profiles: Arc<HashMap<String, Arc<Profile>>>, backoff: Backoff) -> Self {
        Self {
            profiles,
            backoff,
            inner: Mutex::default(),
            changed: Notify::new(),
        }
    }

    pub(crate) fn profile(&self, pod: &PodInfo) -> Option<&Arc<Profile>> {
        self.profiles.get(&pod.shape.scheduler_name)
    }

    /// The number of the PreEnqueue plugin that holds the pod back.
    fn gate(&self, pod: &PodInfo) -> Option<usize> {
        let profile = self.profile(pod)?;
        let mut plugins = profile.at(Points::PRE_ENQUEUE);
        plugins
            .find(|(_, enabled)| enabled.plugin.pre_enqueue(pod).is_err())
            .map(|(number, _)| number)
    }

    fn sort_key(&self, pod: &PodInfo) -> i64 {
        let profile = self.profile(pod);
        let sorts = profile.and_then(|profile| {
            let mut plugins = profile.at(Points::QUEUE_SORT);
            plugins.find_map(|(_, enabled)| enabled.plugin.queue_sort(pod))
        });
        sorts.unwrap_or(0)
    }

    /// A pod without a node appeared or changed.
    pub(crate) fn add(&self, pod: Arc<PodInfo>) {
        let (gate, sort, cause) = (self.gate(&pod), self.sort_key(&pod), pod.cause());
        let mut inner = self.inner.lock();
        inner.sequence += 1;
        let mut queued = Queued {
            pod,
            attempts: 0,
            unschedulable: 0,
            errors: 0,
            cause: Some(cause),
            entered_us: skiff_trace::now_us(),
            first_attempt_us: 0,
            sequence: inner.sequence,
            sort,
        };
        let Some(known) = inner.take(&queued.pod.uid.clone()) else {
            let state = gate.map_or(State::Active, gated);
            inner.insert(Entry { queued, state });
            drop(inner);
            self.changed.notify_one();
            return;
        };
        let differs = fits_differ(&known.queued.pod, &queued.pod);
        let old = Arc::clone(&known.queued.pod);
        queued.attempts = known.queued.attempts;
        queued.unschedulable = known.queued.unschedulable;
        queued.errors = known.queued.errors;
        queued.first_attempt_us = known.queued.first_attempt_us;
        queued.sequence = known.queued.sequence;
        let change = || ClusterEvent::OwnPodUpdated {
            old: Arc::clone(&old),
            new: Arc::clone(&queued.pod),
        };
        let woken = match known.state {
            State::InFlight { seen, mut changes } => {
                if differs {
                    changes.push(change());
                }
                State::InFlight { seen, changes }
            }
            State::Gated {
                gate: before,
                rejected_by,
                woken,
            } if gate == Some(before) => State::Gated {
                gate: before,
                rejected_by,
                woken: woken || differs,
            },
            _ if gate.is_some() => gate.map_or(State::Active, gated),
            State::Gated { .. } => State::Active,
            State::Waiting { rejected_by, since }
                if differs && self.concerns(&queued.pod, rejected_by, &change()) =>
            {
                self.after_backoff(since, &queued)
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
        let inner = self.inner.lock();
        let unschedulable = inner.waiting.values().map(|group| group.uids.len()).sum();
        Pending {
            active: inner.active.len(),
            backoff: inner.timers.len() - unschedulable,
            unschedulable,
            gated: inner.gated.len(),
        }
    }

    pub(crate) fn remove(&self, uid: &str) {
        self.inner.lock().take(uid);
    }

    pub(crate) fn close(&self) {
        self.inner.lock().closed = true;
        self.changed.notify_one();
    }

    /// The next pod to try, in the order of the QueueSort plugin. `None` once closed.
    pub(crate) async fn next(&self) -> Option<Queued> {
        loop {
            let wake_at = {
                let mut inner = self.inner.lock();
                if inner.closed {
                    return None;
                }
                if let Some(queued) = self.pop(&mut inner) {
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

    /// The next pod, if one is there now.
    #[cfg(feature = "bench")]
    pub(crate) fn try_next(&self) -> Option<Queued> {
        self.pop(&mut self.inner.lock())
    }

    fn pop(&self, inner: &mut Inner) -> Option<Queued> {
        inner.activate_due(Instant::now());
        let first = inner.active.first_key_value().map(|(_, uid)| Arc::clone(uid));
        // COMPAT: SchedulerPopFromBackoffQ: with nothing else to do there is no reason to wait.
        let first = first.or_else(|| inner.early.first().map(|(_, uid)| Arc::clone(uid)))?;
        let mut entry = inner.take(&first)?;
        if entry.queued.attempts == 0 {
            entry.queued.first_attempt_us = skiff_trace::now_us();
        }
        entry.queued.attempts += 1;
        entry.state = State::InFlight {
            seen: inner.events_base + inner.events.len() as u64,
            changes: Vec::new(),
        };
        let queued = entry.queued.clone();
        inner.insert(entry);
        Some(queued)
    }

    /// The pod fits nowhere: it waits until one of these plugins sees a chance.
    pub(crate) fn park(&self, uid: &str, rejected_by: u64) {
        let mut inner = self.inner.lock();
        let Some(Entry {
            queued,
            state: State::InFlight { seen, changes },
        }) = inner.entries.get(uid)
        else {
            return;
        };
        let now = Instant::now();
        // An event during the try may have made room; it would be lost if the pod went to sleep now.
        let missed = match seen.checked_sub(inner.events_base) {
            None => true,
            Some(skip) => {
                let events = inner
                    .events
                    .iter()
                    .skip(usize::try_from(skip).unwrap_or(usize::MAX));
                // What its own failed binding gave back is no news for it.
                let own = |event: &&ClusterEvent| matches!(event, ClusterEvent::PodRemoved(pod) if pod.uid == queued.pod.uid);
                let events = events.map(|event| &**event).chain(changes);
                let mut events = events.filter(|event| !own(event));
                events.any(|event| self.concerns(&queued.pod, rejected_by, event))
            }
        };
        let gate = self.gate(&queued.pod);
        let Some(mut entry) = inner.take(uid) else { return };
        entry.queued.unschedulable += 1;
        entry.queued.errors = 0;
        let state = if let Some(gate) = gate {
            State::Gated {
                gate,
                rejected_by,
                woken: missed,
            }
        } else if missed {
            State::Backoff {
                until: now + self.backoff.after(entry.queued.unschedulable),
                error: false,
            }
        } else {
            State::Waiting {
                rejected_by,
                since: now,
            }
        };
        inner.set_behind(entry, state);
        drop(inner);
        self.changed.notify_one();
    }

    /// The try failed for no fault of the pod: again after a while.
    pub(crate) fn back_off(&self, uid: &str) {
        let mut inner = self.inner.lock();
        if let Some(mut entry) = inner.take(uid) {
            entry.queued.errors += 1;
            let until = Instant::now() + self.backoff.after(entry.queued.errors);
            inner.set_behind(entry, State::Backoff { until, error: true });
        }
        drop(inner);
        self.changed.notify_one();
    }

    /// Something changed: pods that one of the interested plugins turned away are tried again.
    pub(crate) fn on_event(&self, event: ClusterEvent) {
        let mut inner = self.inner.lock();
        let mut woken: Vec<Arc<str>> = Vec::new();
        for (key, group) in &inner.waiting {
            if self.concerns(&group.example, key.rejected_by, &event) {
                woken.extend(group.uids.iter().cloned());
            }
        }
        let any = !woken.is_empty();
        for uid in woken {
            if let Some(entry) = inner.entries.get(&uid)
                && let State::Waiting { since, .. } = entry.state
            {
                let state = self.after_backoff(since, &entry.queued);
                inner.set(&uid, state);
            }
        }
        let gated: Vec<Arc<str>> = inner.gated.iter().cloned().collect();
        for uid in gated {
            if let Some(entry) = inner.entries.get_mut(&uid)
                && let State::Gated {
                    gate,
                    rejected_by,
                    woken,
                } = &mut entry.state
            {
                let helps = self.concerns(&entry.queued.pod, *rejected_by | 1 << *gate, &event);
                *woken |= helps;
                if helps {
                    self.try_gate(&mut inner, &uid);
                }
            }
        }
        if !inner.in_flight.is_empty() {
            inner.events.push_back(Arc::new(event));
            if inner.events.len() > MAX_EVENTS {
                inner.events.pop_front();
                inner.events_base += 1;
            }
        }
        let any = any || !inner.active.is_empty();
        drop(inner);
        if any {
            self.changed.notify_one();
        }
    }

    /// If nothing holds the pod back any more, it is tried, or waits like others that were rejected.
    fn try_gate(&self, inner: &mut Inner, uid: &str) {
        let Some(entry) = inner.entries.get(uid) else {
            return;
        };
        let State::Gated {
            rejected_by, woken, ..
        } = entry.state
        else {
            return;
        };
        if self.gate(&entry.queued.pod).is_some() {
            return;
        }
        let state = if woken || rejected_by == 0 {
            State::Active
        } else {
            State::Waiting {
                rejected_by,
                since: Instant::now(),
            }
        };
        inner.set(uid, state);
    }

    /// What held the pod back is over.
    pub(crate) fn release(&self, uid: &str) {
        self.try_gate(&mut self.inner.lock(), uid);
        self.changed.notify_one();
    }

    /// The pod is tried now, wherever it waits.
    pub(crate) fn activate(&self, uid: &str) {
        let mut inner = self.inner.lock();
        let waits = inner.entries.get(uid).is_some_and(|entry| {
            matches!(
                entry.state,
                State::Waiting { .. } | State::Backoff { .. } | State::Gated { .. }
            )
        });
        if waits {
            inner.set(uid, State::Active);
        }
        drop(inner);
        self.changed.notify_one();
    }

    fn concerns(&self, pod: &PodInfo, rejected_by: u64, event: &ClusterEvent) -> bool {
        let Some(profile) = self.profile(pod) else {
            return false;
        };
        rejected_by == 0
            || profile
                .plugins
                .iter()
                .enumerate()
                .any(|(number, enabled)| rejected_by & (1 << number) != 0 && enabled.plugin.hint(pod, event))
    }

    /// Time spent waiting counts against the back-off.
    fn after_backoff(&self, since: Instant, queued: &Queued) -> State {
        let until = since + self.backoff.after(queued.unschedulable);
        if until <= Instant::now() {
            State::Active
        } else {
            State::Backoff { until, error: false }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{info, object, pod};
    use crate::framework::{Enabled, Plugin, Rejection, Scope, Verdict};
    use serde_json::json;
    use tokio::time::timeout;

    /// Sorts, cares for removed pods of the name "hope" and for its own changes, and holds back what is called "gated".
    struct Fake;

    impl Plugin for Fake {
        fn name(&self) -> &'static str {
            "Fake"
        }
        fn queue_sort(&self, pod: &PodInfo) -> Option<i64> {
            Some(-i64::from(pod.priority()))
        }
        fn hint(&self, _pod: &PodInfo, event: &ClusterEvent) -> bool {
            match event {
                ClusterEvent::PodRemoved(pod) => &*pod.uid == "hope",
                event => event.own().is_some(),
            }
        }
        fn pre_enqueue(&self, pod: &PodInfo) -> Verdict {
            if pod.shape.gates.is_empty() {
                return Ok(());
            }
            Err(Rejection::unresolvable("gated"))
        }
        fn scope(&self, _pod: &PodInfo) -> Scope {
            Scope::None
        }
    }

    fn queue() -> SchedulingQueue {
        let profile = Profile {
            scheduler_name: crate::config::DEFAULT_SCHEDULER.to_owned(),
            plugins: vec![Enabled {
                plugin: Arc::new(Fake),
                weight: 1,
                points: Points::ALL,
            }],
            percentage_of_nodes_to_score: 0,
        };
        let profiles = HashMap::from([(profile.scheduler_name.clone(), Arc::new(profile))]);
        SchedulingQueue::new(Arc::new(profiles), Backoff::default())
    }

    fn add(queue: &SchedulingQueue, name: &str, priority: i32) {
        queue.add(pod(name, json!({"priority": priority})));
    }

    async fn next(queue: &SchedulingQueue) -> String {
        queue.next().await.unwrap().pod.uid.to_string()
    }

    async fn quiet(queue: &SchedulingQueue) -> bool {
        timeout(Duration::from_secs(60), queue.next()).await.is_err()
    }

    fn removed(name: &str) -> ClusterEvent {
        ClusterEvent::PodRemoved(pod(name, json!({})))
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
        for name in ["p", "q"] {
            add(&queue, name, 0);
            next(&queue).await;
            queue.park(name, 1);
        }
        assert_eq!(queue.inner.lock().waiting.len(), 1, "equal pods wait together");
        queue.on_event(removed("other"));
        assert!(quiet(&queue).await, "an event nobody cares about wakes nobody");
        queue.on_event(removed("hope"));
        let woken = HashSet::from([next(&queue).await, next(&queue).await]);
        assert_eq!(woken, HashSet::from(["p".to_owned(), "q".to_owned()]));
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_during_the_try_is_not_lost_and_one_that_does_not_matter_is() {
        let queue = queue();
        for (event, woken) in [("hope", true), ("other", false)] {
            add(&queue, "p", 0);
            next(&queue).await;
            queue.on_event(removed(event));
            queue.park("p", 1);
            assert_eq!(!quiet(&queue).await, woken, "{event}");
            queue.remove("p");
        }
        let inner = queue.inner.lock();
        assert!(inner.events.is_empty() && inner.in_flight.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_whose_victims_go_waits_for_them_and_its_own_room_does_not_wake_it() {
        let queue = queue();
        add(&queue, "hope", 0);
        next(&queue).await;
        queue.on_event(removed("hope"));
        queue.park("hope", 1);
        assert!(quiet(&queue).await, "its own binding failed");
        queue.activate("hope");
        assert_eq!(next(&queue).await, "hope");
        // Held back meanwhile: an event that helps is remembered until it is let go.
        let gated = |gate: bool| {
            let gates = if gate { json!([{"name": "g"}]) } else { json!([]) };
            pod("hope", json!({"schedulingGates": gates}))
        };
        queue.add(gated(true));
        queue.park("hope", 1);
        assert_eq!(queue.pending().gated, 1);
        queue.release("hope");
        assert_eq!(queue.pending().gated, 1, "still held back");
        queue.add(gated(false));
        assert_eq!(next(&queue).await, "hope");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_nothing_wakes_is_tried_again_after_five_minutes() {
        let queue = queue();
        add(&queue, "p", 0);
        next(&queue).await;
        queue.park("p", 1);
        assert!(timeout(Duration::from_secs(299), queue.next()).await.is_err());
        assert!(timeout(Duration::from_secs(2), queue.next()).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_removed_pod_does_not_come_back() {
        let queue = queue();
        add(&queue, "p", 0);
        next(&queue).await;
        queue.remove("p");
        queue.back_off("p");
        assert!(quiet(&queue).await);
    }

    #[tokio::test(start_paused = true)]
    async fn back_off_grows_and_an_idle_scheduler_does_not_wait_for_it() {
        let queue = queue();
        add(&queue, "p", 0);
        for seconds in [1, 2, 4, 8, 10, 10] {
            next(&queue).await;
            let began = Instant::now();
            queue.back_off("p");
            let inner = queue.inner.lock();
            let State::Backoff { until, error: true } = inner.entries["p"].state else {
                panic!()
            };
            assert_eq!((until - began).as_secs(), seconds);
        }
        next(&queue).await;
        queue.on_event(removed("hope"));
        queue.park("p", 1);
        assert_eq!(queue.pending().backoff, 1);
        assert!(
            timeout(Duration::from_millis(1), queue.next()).await.is_ok(),
            "nothing else to do"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn its_own_condition_does_not_wake_a_pod_but_a_new_spec_does() {
        let queue = queue();
        let with = |spec: serde_json::Value, status: &str| {
            let mut pod = object("p", json!({}), spec);
            pod.status = serde_json::from_value(json!({"message": status})).unwrap();
            info(&pod)
        };
        queue.add(with(json!({}), ""));
        next(&queue).await;
        // While it is being tried, and while it waits.
        queue.add(with(json!({}), "tried"));
        queue.park("p", 1);
        queue.add(with(json!({}), "waiting"));
        assert!(quiet(&queue).await, "a changed status wakes nobody");
        queue.add(with(json!({"tolerations": [{"operator": "Exists"}]}), ""));
        assert_eq!(next(&queue).await, "p");
        queue.add(with(json!({"priority": 3}), ""));
        queue.park("p", 1);
        let again = timeout(Duration::from_secs(5), queue.next()).await;
        assert_eq!(
            again.unwrap().unwrap().attempts,
            3,
            "a spec that changed during the try"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn gates_hold_a_pod_back() {
        let queue = queue();
        queue.add(pod("p", json!({"schedulingGates": [{"name": "g"}]})));
        assert!(quiet(&queue).await);
        assert_eq!(queue.pending().gated, 1);
        queue.add(pod("p", json!({})));
        assert_eq!(next(&queue).await, "p");
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
