//! The pods of the queue, each in one state, and the ordered sets that follow from it: what is ready, what becomes ready by
//! the mere passing of time, and who is woken together. It decides nothing.

use crate::events::ClusterEvent;
use crate::pod::PodInfo;
use skiff_client::{Cause, Key};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// A pod that nothing woke for this long is tried again anyway.
const MAX_WAIT: Duration = Duration::from_secs(300);

/// A pod in the queue, and what is known of its earlier tries.
#[derive(Debug, Clone)]
pub(crate) struct Queued {
    pub(crate) pod: Arc<PodInfo>,
    pub(crate) attempts: u32,
    /// Tries that found no node since it was last on its way, and tries that broke.
    pub(super) unschedulable: u32,
    pub(super) errors: u32,
    /// The pod version that brought it here.
    pub(crate) cause: Arc<Cause>,
    pub(crate) entered_us: i64,
    /// When it was first tried; 0 until then.
    pub(crate) first_attempt_us: i64,
    /// When it came, or last failed, among all others.
    pub(super) sequence: u64,
    pub(super) sort: i64,
}

impl Queued {
    /// Its place among the pods of its PodGroup: by priority, and then by the time of the first try.
    pub(crate) fn group_order(&self) -> (Reverse<i32>, i64, u64) {
        (Reverse(self.pod.priority()), self.first_attempt_us, self.sequence)
    }
}

#[derive(Debug)]
pub(super) enum State {
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
    pub(super) fn due(&self) -> Option<Instant> {
        match self {
            State::Backoff { until, .. } => Some(*until),
            State::Waiting { since, .. } => Some(*since + MAX_WAIT),
            _ => None,
        }
    }
}

/// Pods that an event wakes together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct GroupKey {
    pub(super) shape: usize,
    pub(super) rejected_by: u64,
    /// Of a pod that has volumes or claims of its own.
    pub(super) alone: Option<Arc<str>>,
    /// In the namespace of the shape.
    pub(super) pod_group: Option<Arc<str>>,
}

#[derive(Debug)]
pub(super) struct Group {
    /// Holds the shape, so that its address stays its own.
    pub(super) example: Arc<PodInfo>,
    pub(super) uids: HashSet<Arc<str>>,
}

pub(super) fn group_key(pod: &PodInfo, rejected_by: u64) -> GroupKey {
    GroupKey {
        shape: Arc::as_ptr(&pod.shape) as usize,
        rejected_by,
        alone: pod.is_special().then(|| Arc::clone(&pod.uid)),
        pod_group: pod.pod_group.clone(),
    }
}

pub(super) struct Entry {
    pub(super) queued: Queued,
    pub(super) state: State,
}

/// Changed only by `set`, `insert` and `take`, which keep all of them in step.
#[derive(Default)]
pub(super) struct Inner {
    pub(super) entries: HashMap<Arc<str>, Entry>,
    /// The entries that are `Active`, by what QueueSort says and then by arrival.
    pub(super) active: BTreeMap<(i64, u64), Arc<str>>,
    /// The entries that have a `due` moment.
    pub(super) timers: BTreeSet<(Instant, Arc<str>)>,
    /// Of these the ones that may be tried early if nothing else is to do.
    pub(super) early: BTreeSet<(Instant, Arc<str>)>,
    pub(super) waiting: HashMap<GroupKey, Group>,
    pub(super) gated: HashSet<Arc<str>>,
    /// All pods that belong to a PodGroup, by it.
    pub(super) pod_groups: HashMap<Key, HashSet<Arc<str>>>,
    pub(super) in_flight: BTreeMap<u64, usize>,
    pub(super) events: VecDeque<Arc<ClusterEvent>>,
    pub(super) events_base: u64,
    pub(super) sequence: u64,
    pub(super) closed: bool,
}

impl Inner {
    pub(super) fn take(&mut self, uid: &str) -> Option<Entry> {
        let (uid, entry) = self.entries.remove_entry(uid)?;
        if let Some(group) = entry.queued.pod.group_key()
            && let Some(members) = self.pod_groups.get_mut(&group)
        {
            members.remove(&uid);
            if members.is_empty() {
                self.pod_groups.remove(&group);
            }
        }
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

    pub(super) fn insert(&mut self, entry: Entry) {
        let uid = Arc::clone(&entry.queued.pod.uid);
        if let Some(group) = entry.queued.pod.group_key() {
            self.pod_groups.entry(group).or_default().insert(Arc::clone(&uid));
        }
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

    pub(super) fn set(&mut self, uid: &str, state: State) {
        if let Some(entry) = self.take(uid) {
            self.insert(Entry { state, ..entry });
        }
    }

    /// After a failed try the pod stands behind those that came meanwhile.
    pub(super) fn set_behind(&mut self, mut entry: Entry, state: State) {
        self.sequence += 1;
        entry.queued.sequence = self.sequence;
        entry.state = state;
        self.insert(entry);
    }

    pub(super) fn activate_due(&mut self, now: Instant) {
        while let Some((at, uid)) = self.timers.first().cloned()
            && at <= now
        {
            self.set(&uid, State::Active);
        }
    }
}
