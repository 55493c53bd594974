//! What a cache knows: the entries, the indexes over them, and the recent changes. Only ingest writes
//! it. No waiting in here; the lock around it is held for moments.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use skiff_store::Position;
use tokio::time::Instant;

use crate::Limits;
use crate::entry::Entry;
use crate::fields::FieldSet;
use crate::filter::Change;
use crate::index::{Index, Keys};
use crate::unreadable::Unreadable;

/// What all caches of the process together remember. Beyond that each keeps its [`SHARE`] only, so that a client who
/// writes to many resources cannot make each of them remember the most that one may.
const ALL_HISTORY: usize = 128 << 20;
const SHARE: usize = 256 << 10;
static HISTORY: AtomicUsize = AtomicUsize::new(0);

pub struct State {
    pub entries: BTreeMap<Arc<str>, Arc<Entry>>,
    /// Keys whose newest value cannot be read. `entries` may hold an older one.
    pub unreadable: BTreeMap<Arc<str>, Arc<Unreadable>>,
    /// For each indexed field: the keys by value.
    index: Vec<Index>,
    /// The same for every label.
    labels: HashMap<Arc<str>, Index>,
    /// Changes in order; all of those above `floor`.
    pub ring: VecDeque<Arc<Change>>,
    ring_bytes: usize,
    pub floor: i64,
    /// Everything up to here has been taken in.
    pub revision: i64,
    /// The position of the store's watch; `None` before the first list and while starting over.
    pub position: Option<Arc<Position>>,
    pub fields: Arc<FieldSet>,
}

impl State {
    pub fn new(fields: Arc<FieldSet>) -> State {
        State {
            entries: BTreeMap::new(),
            unreadable: BTreeMap::new(),
            index: fields.indexed.iter().map(|_| Index::default()).collect(),
            labels: HashMap::new(),
            ring: VecDeque::new(),
            ring_bytes: 0,
            floor: 0,
            revision: 0,
            position: None,
            fields,
        }
    }

    /// The newest revision of which this state is the truth. A quiet resource keeps up with a busy
    /// store here: what happened elsewhere did not change it.
    pub fn known(&self) -> i64 {
        match &self.position {
            Some(position) => {
                let (store, queued) = position.sync_point();
                if self.revision >= queued {
                    self.revision.max(store)
                } else {
                    self.revision
                }
            }
            None => self.revision,
        }
    }

    /// Whether everything up to `revision` is in here.
    pub fn has(&self, revision: i64) -> bool {
        // A watch that was dropped vouches for nothing: the store may even be another one, with lower revisions.
        let vouched = self
            .position
            .as_ref()
            .is_some_and(|position| position.sync_point().1 != i64::MAX);
        vouched && self.known() >= revision
    }

    /// Takes the whole state anew, as of `revision`; there are no changes before it.
    pub fn replace(&mut self, entries: Vec<Entry>, unreadable: Vec<Unreadable>, revision: i64) {
        let mut new = State::new(self.fields.clone());
        for value in unreadable {
            new.mark_unreadable(value);
        }
        for entry in entries {
            new.put(Arc::new(entry));
        }
        new.floor = revision;
        new.revision = revision;
        *self = new;
    }

    fn put(&mut self, entry: Arc<Entry>) -> Option<Arc<Entry>> {
        let key = entry.key.clone();
        let before = self.entries.insert(key.clone(), entry.clone());
        self.reindex(&key, before.as_ref(), Some(&entry));
        before
    }

    fn reindex(&mut self, key: &Arc<str>, before: Option<&Arc<Entry>>, after: Option<&Arc<Entry>>) {
        for (index, &place) in self.index.iter_mut().zip(&self.fields.indexed) {
            let old = before.map(|entry| &entry.head.values[place]);
            let new = after.map(|entry| &entry.head.values[place]);
            if old == new {
                continue;
            }
            if let Some(old) = old {
                index.remove(old, key);
            }
            if let Some(new) = new {
                index.insert(new, key);
            }
        }
        let old = before.map_or(&[][..], |entry| &entry.head.labels);
        let new = after.map_or(&[][..], |entry| &entry.head.labels);
        if old == new {
            return;
        }
        for (label, value) in old.iter().filter(|pair| !new.contains(pair)) {
            if let Some(index) = self.labels.get_mut(label) {
                index.remove(value, key);
                if index.is_empty() {
                    self.labels.remove(label);
                }
            }
        }
        for (label, value) in new.iter().filter(|pair| !old.contains(pair)) {
            match self.labels.get_mut(label) {
                Some(index) => index.insert(value, key),
                None => self.labels.entry(label.clone()).or_default().insert(value, key),
            }
        }
    }

    /// The keys of the objects with this label.
    pub fn labelled(&self, label: &str, value: &str) -> Option<&Keys> {
        self.labels.get(label)?.get(value)
    }

    /// What values a label has.
    pub fn values(&self, label: &str) -> Option<&Index> {
        self.labels.get(label)
    }

    /// The keys whose indexed field `nth` has this value.
    pub fn indexed(&self, nth: usize, value: &str) -> Option<&Keys> {
        self.index.get(nth)?.get(value)
    }

    /// Takes in one change; `None` when it changes nothing (the deletion of what was never here).
    pub fn apply(
        &mut self,
        key: Arc<str>,
        revision: i64,
        after: Option<Entry>,
        now: Instant,
    ) -> Option<Arc<Change>> {
        self.revision = self.revision.max(revision);
        let after = after.map(Arc::new);
        let before = match &after {
            Some(entry) => self.put(entry.clone()),
            None => {
                let before = self.entries.remove(&key)?;
                self.reindex(&key, Some(&before), None);
                Some(before)
            }
        };
        let change = Arc::new(Change::new(key, revision, now, before, after));
        self.ring_bytes += change.weight();
        HISTORY.fetch_add(change.weight(), Ordering::Relaxed);
        self.ring.push_back(change.clone());
        Some(change)
    }

    /// Forgets all changes: watchers of before cannot be told what happened and must read the state anew.
    pub fn forget_changes(&mut self) {
        self.ring.clear();
        self.ring_bytes = 0;
        self.floor = self.revision;
    }

    /// Forgets the changes that `limits` do not keep.
    pub fn trim(&mut self, limits: &Limits, now: Instant) {
        while let Some(oldest) = self.ring.front() {
            let old = self.ring.len() > limits.at_least && now.duration_since(oldest.at) > limits.age;
            let crowded = self.ring_bytes > SHARE && HISTORY.load(Ordering::Relaxed) > ALL_HISTORY;
            if !old && !crowded && self.ring.len() <= limits.changes && self.ring_bytes <= limits.bytes {
                break;
            }
            self.ring_bytes -= oldest.weight();
            HISTORY.fetch_sub(oldest.weight(), Ordering::Relaxed);
            self.floor = oldest.revision;
            self.ring.pop_front();
        }
        if self.ring.capacity() > 256 && self.ring.len() * 4 < self.ring.capacity() {
            self.ring.shrink_to(self.ring.len() * 2);
        }
    }

    /// The changes after `revision`, oldest first.
    pub fn changes_after(&self, revision: i64) -> impl DoubleEndedIterator<Item = &Arc<Change>> {
        let start = self.ring.partition_point(|change| change.revision <= revision);
        self.ring.range(start..)
    }
}

impl Drop for State {
    fn drop(&mut self) {
        HISTORY.fetch_sub(self.ring_bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::EventKind;
    use crate::fields::Interner;

    #[test]
    fn caches_share_what_they_remember() {
        let fields = Arc::new(FieldSet::new(Vec::new()));
        let value = format!(
            "{{\"metadata\":{{\"name\":\"b\"}},\"data\":\"{}\"}}",
            "x".repeat(1 << 20)
        );
        let (limits, mut interner) = (Limits::default(), Interner::default());
        let mut states: Vec<State> = (0..10).map(|_| State::new(fields.clone())).collect();
        for revision in 1..19 {
            for state in &mut states {
                let key: Arc<str> = "/a/b".into();
                let entry = Entry::new(
                    key.clone(),
                    revision,
                    value.as_bytes(),
                    EventKind::Modified,
                    &fields,
                    &mut interner,
                );
                state.apply(key, revision, entry.ok(), Instant::now());
                state.trim(&limits, Instant::now());
            }
        }
        let all: usize = states.iter().map(|state| state.ring_bytes).sum();
        assert!(all <= ALL_HISTORY + 10 * (SHARE + (1 << 20)), "{all}");
        assert!(states[0].ring.len() > 1, "each remembers something");
        drop(states);
        assert!(HISTORY.load(Ordering::Relaxed) < ALL_HISTORY);
    }
}
