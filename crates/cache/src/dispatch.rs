//! Who hears of a change. A watcher stands in exactly one bucket, the most selective that its filter
//! allows: an object's name, the value of an indexed field, a namespace, or everything. A change
//! visits the buckets of its object before and after, so a thousand nodes that each watch their own
//! pods cost nothing to the pods of the others.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::entry::{Head, WatchEvent};
use crate::fields::FieldSet;
use crate::filter::{Change, Filter, SharedEvents};
use crate::state::State;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Bucket {
    Name(Box<str>),
    /// The nth indexed field, and its value.
    Field(usize, Box<str>),
    Namespace(Box<str>),
    Everything,
}

impl Bucket {
    pub fn of(filter: &Filter, fields: &FieldSet) -> Bucket {
        if let Some(name) = filter.fields.required_value("metadata.name") {
            return Bucket::Name(name.into());
        }
        for (nth, &place) in fields.indexed.iter().enumerate() {
            if let Some(value) = filter.fields.required_value(&fields.fields[place].name) {
                return Bucket::Field(nth, value.into());
            }
        }
        match &filter.namespace {
            Some(namespace) => Bucket::Namespace(namespace.as_str().into()),
            None => Bucket::Everything,
        }
    }
}

type Members = HashMap<u64, Arc<Outbox>>;

#[derive(Default)]
pub struct Watchers {
    names: HashMap<Box<str>, Members>,
    fields: Vec<HashMap<Box<str>, Members>>,
    namespaces: HashMap<Box<str>, Members>,
    everything: Members,
    next_id: u64,
}

impl Watchers {
    pub fn new(fields: &FieldSet) -> Watchers {
        Watchers {
            fields: fields.indexed.iter().map(|_| HashMap::new()).collect(),
            ..Watchers::default()
        }
    }

    pub fn add(&mut self, bucket: &Bucket, outbox: Arc<Outbox>) -> u64 {
        self.next_id += 1;
        let members = match bucket {
            Bucket::Name(name) => self.names.entry(name.clone()).or_default(),
            Bucket::Field(nth, value) => self.fields[*nth].entry(value.clone()).or_default(),
            Bucket::Namespace(namespace) => self.namespaces.entry(namespace.clone()).or_default(),
            Bucket::Everything => &mut self.everything,
        };
        members.insert(self.next_id, outbox);
        self.next_id
    }

    pub fn remove(&mut self, bucket: &Bucket, id: u64) {
        let (map, key) = match bucket {
            Bucket::Name(name) => (&mut self.names, name),
            Bucket::Field(nth, value) => (&mut self.fields[*nth], value),
            Bucket::Namespace(namespace) => (&mut self.namespaces, namespace),
            Bucket::Everything => {
                self.everything.remove(&id);
                return;
            }
        };
        if let Some(members) = map.get_mut(key) {
            members.remove(&id);
            if members.is_empty() {
                map.remove(key);
            }
        }
    }

    pub fn len(&self) -> usize {
        let count = |map: &HashMap<Box<str>, Members>| map.values().map(HashMap::len).sum::<usize>();
        let fields: usize = self.fields.iter().map(count).sum();
        count(&self.names) + fields + count(&self.namespaces) + self.everything.len()
    }

    /// Ends every watcher; their clients come back.
    pub fn end_all(&self) {
        let maps = std::iter::once(&self.names)
            .chain(&self.fields)
            .chain(std::iter::once(&self.namespaces));
        for outbox in maps.flat_map(|map| map.values().flat_map(HashMap::values)) {
            outbox.end();
        }
        self.everything.values().for_each(|outbox| outbox.end());
    }

    pub fn dispatch(&self, change: &Change, floor: i64, fields: &FieldSet) {
        let mut shared = SharedEvents::default();
        let mut offer = |members: Option<&Members>| {
            for outbox in members.into_iter().flat_map(HashMap::values) {
                outbox.offer(change, floor, &mut shared);
            }
        };
        offer(Some(&self.everything));
        let before = change.before.as_ref().map(|entry| &*entry.head);
        let after = change.after.as_ref().map(|entry| &*entry.head);
        let Some(head) = after.or(before) else { return };
        // The name and the namespace of an object do not change.
        offer(self.names.get(&*head.name));
        offer(self.namespaces.get(&*head.namespace));
        for (map, &place) in self.fields.iter().zip(&fields.indexed) {
            let value = |head: Option<&Head>| head.map(|head| head.values[place].clone());
            let (old, new) = (value(before), value(after));
            if let Some(old) = old.as_deref().filter(|old| Some(*old) != new.as_deref()) {
                offer(map.get(old));
            }
            if let Some(new) = new.as_deref() {
                offer(map.get(new));
            }
        }
    }
}

/// The queue between dispatch and one watcher. It is bounded: when it is full the watcher falls back
/// to reading the remembered changes itself, from where it stopped; when those are gone too, it ends.
pub struct Outbox {
    pub filter: Filter,
    capacity: usize,
    inner: Mutex<Inner>,
    arrived: Notify,
    /// The cache's mark of what has been dispatched to all.
    dispatched: Arc<AtomicI64>,
}

struct Inner {
    queue: VecDeque<Arc<WatchEvent>>,
    /// Changes up to here are in the queue, were taken from it, or do not concern the watcher.
    position: i64,
    /// Whether dispatch feeds the queue; otherwise the watcher catches up.
    live: bool,
    ended: bool,
}

pub enum Taken {
    Event(Arc<WatchEvent>),
    /// The queue is empty and dispatch feeds it.
    Wait,
    /// The queue is empty and there may be changes to catch up with.
    CatchUp,
    End,
}

impl Outbox {
    /// A watcher that wants what changed after `position`. It starts by catching up.
    pub fn new(filter: Filter, position: i64, capacity: usize, dispatched: Arc<AtomicI64>) -> Outbox {
        let inner = Inner {
            queue: VecDeque::new(),
            position,
            live: false,
            ended: false,
        };
        Outbox {
            filter,
            capacity,
            inner: Mutex::new(inner),
            arrived: Notify::new(),
            dispatched,
        }
    }

    fn offer(&self, change: &Change, floor: i64, shared: &mut SharedEvents) {
        let mut inner = self.inner.lock();
        if inner.ended || change.revision <= inner.position {
            return;
        }
        if !inner.live {
            if inner.position < floor {
                // It can no longer catch up; do not keep its queue for nobody.
                inner.ended = true;
                inner.queue = VecDeque::new();
                self.arrived.notify_one();
            }
            return;
        }
        if let Some(event) = self.filter.event(change, shared) {
            if inner.queue.len() >= self.capacity {
                inner.live = false;
                return;
            }
            inner.queue.push_back(event);
            self.arrived.notify_one();
        }
        inner.position = change.revision;
    }

    pub fn end(&self) {
        let mut inner = self.inner.lock();
        inner.ended = true;
        inner.queue = VecDeque::new();
        self.arrived.notify_one();
    }

    pub fn take(&self) -> Taken {
        let mut inner = self.inner.lock();
        match inner.queue.pop_front() {
            Some(event) => Taken::Event(event),
            None if inner.ended => Taken::End,
            None if inner.live => Taken::Wait,
            None => Taken::CatchUp,
        }
    }

    /// Fills the queue from the remembered changes; at their end dispatch takes over. The caller holds
    /// the state, so no change is added meanwhile; one that is being dispatched is not above the
    /// position reached here, and will be skipped.
    pub fn catch_up(&self, state: &State) {
        let mut inner = self.inner.lock();
        if inner.position < state.floor {
            inner.ended = true;
            return;
        }
        for change in state.changes_after(inner.position) {
            if inner.queue.len() >= self.capacity {
                return;
            }
            if let Some(event) = self.filter.event(change, &mut SharedEvents::default()) {
                inner.queue.push_back(event);
            }
            inner.position = change.revision;
        }
        inner.position = inner.position.max(state.revision);
        inner.live = true;
    }

    pub async fn arrived(&self) {
        self.arrived.notified().await;
    }

    /// The version up to which the watcher was given everything, if it is idle: what a bookmark says.
    pub fn bookmark(&self, state: &State) -> Option<i64> {
        let inner = self.inner.lock();
        // A change that is in the state but not yet dispatched may still be on its way to this queue.
        let settled = self.dispatched.load(Ordering::Acquire) >= state.revision;
        let idle = inner.live && !inner.ended && inner.queue.is_empty();
        (idle && settled).then(|| state.known().max(inner.position))
    }
}
