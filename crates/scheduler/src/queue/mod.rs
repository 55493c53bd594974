//! The scheduling queue: pods that are ready to be tried, pods that back off, pods that wait for a change in the cluster,
//! and pods that PreEnqueue holds back.
//!
//! Waiting pods of one shape that the same plugins rejected stand in one group: an event is asked of a group, not of each
//! pod in it.

mod sets;
#[cfg(test)]
mod tests;

pub(crate) use self::sets::Queued;

use self::sets::{Entry, Inner, State};
use crate::events::{ClusterEvent, fits_differ};
use crate::framework::{EXTENDERS, Points, Profile};
use crate::pod::PodInfo;
use parking_lot::Mutex;
use skiff_client::Key;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

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
fn gated(gate: usize) -> State {
    State::Gated {
        gate,
        rejected_by: 0,
        woken: false,
    }
}

/// Up to a quarter more: what failed together for one reason is not tried again together.
fn jittered(time: Duration) -> Duration {
    time.mul_f64(rand::random_range(1.0..1.25))
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
        let (sort, cause) = (self.sort_key(&pod), pod.cause());
        let mut inner = self.inner.lock();
        // Under the lock: an event that ends what holds the pod back finds it here, or has come before.
        let gate = self.gate(&pod);
        inner.sequence += 1;
        let mut queued = Queued {
            pod,
            attempts: 0,
            unschedulable: 0,
            errors: 0,
            cause: Arc::new(cause),
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
        Self::start(inner, &first)
    }

    /// All pods of a PodGroup that nothing holds back, whatever they wait for: they are tried together.
    pub(crate) fn take_group(&self, group: &Key) -> Vec<Queued> {
        let mut inner = self.inner.lock();
        let members = inner.pod_groups.get(group);
        let members: Vec<Arc<str>> = members.into_iter().flatten().cloned().collect();
        let mut taken = Vec::new();
        for uid in members {
            let ready = inner.entries.get(&uid).is_some_and(|entry| match entry.state {
                State::InFlight { .. } => false,
                State::Gated { .. } => self.gate(&entry.queued.pod).is_none(),
                State::Active | State::Backoff { .. } | State::Waiting { .. } => true,
            });
            if ready {
                taken.extend(Self::start(&mut inner, &uid));
            }
        }
        taken
    }

    /// The pod is being tried.
    fn start(inner: &mut Inner, uid: &str) -> Option<Queued> {
        let mut entry = inner.take(uid)?;
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
            let until = Instant::now() + jittered(self.backoff.after(entry.queued.errors));
            inner.set_behind(entry, State::Backoff { until, error: true });
        }
        drop(inner);
        self.changed.notify_one();
    }

    /// What was to be written for a pod that waits could not be written: it is tried again after a while.
    pub(crate) fn retry(&self, uid: &str) {
        let waits = match self.inner.lock().entries.get(uid) {
            Some(entry) => match entry.state {
                State::Waiting { .. } => true,
                State::Gated { .. } => self.gate(&entry.queued.pod).is_none(),
                _ => false,
            },
            None => false,
        };
        if waits {
            self.back_off(uid);
        }
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

    fn concerns(&self, pod: &PodInfo, rejected_by: u64, event: &ClusterEvent) -> bool {
        let Some(profile) = self.profile(pod) else {
            return false;
        };
        rejected_by == 0
            || rejected_by & EXTENDERS != 0
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
