//! Which watchers receive a change. A watcher is in exactly one bucket, the most selective that its filter
//! allows: an object's name, the value of an indexed field, a label, or everything; each within one
//! namespace or over all. A change visits the buckets of its object before and after, so a thousand
//! nodes that each watch their own pods cost nothing to the pods of the others.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use crate::entry::{Head, WatchEvent};
use crate::fields::FieldSet;
use crate::filter::{Change, Filter, SharedEvents};
use crate::state::State;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// `None`: over all namespaces.
    namespace: Option<Box<str>>,
    what: What,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum What {
    Name(Box<str>),
    /// The nth indexed field, and its value.
    Field(usize, Box<str>),
    Label(Box<str>, Box<str>),
    Everything,
}

impl Bucket {
    pub fn of(filter: &Filter, fields: &FieldSet) -> Bucket {
        let indexed = || {
            fields.indexed.iter().enumerate().find_map(|(nth, &place)| {
                let value = filter.fields.required_value(&fields.fields[place].name)?;
                Some(What::Field(nth, value.into()))
            })
        };
        let label = || {
            let (key, value) = filter.labels.required().next()?;
            Some(What::Label(key.into(), value.into()))
        };
        let what = match filter.fields.required_value("metadata.name") {
            Some(name) => What::Name(name.into()),
            None => indexed().or_else(label).unwrap_or(What::Everything),
        };
        Bucket {
            namespace: filter.namespace.as_deref().map(Into::into),
            what,
        }
    }
}

/// By who reads for them, and a number of their own.
type Members = BTreeMap<(u64, u64), Arc<Outbox>>;
type ByValue = HashMap<Box<str>, Members>;

/// The watchers of one namespace, or of all.
#[derive(Default)]
struct Group {
    names: ByValue,
    fields: HashMap<usize, ByValue>,
    labels: HashMap<Box<str>, ByValue>,
    everything: Members,
}

impl Group {
    /// Removes a member and whatever is empty without it.
    fn remove(&mut self, what: &What, id: (u64, u64)) {
        fn from(map: &mut ByValue, value: &str, id: (u64, u64)) {
            if let Some(members) = map.get_mut(value) {
                members.remove(&id);
                if members.is_empty() {
                    map.remove(value);
                }
            }
        }
        match what {
            What::Name(name) => from(&mut self.names, name, id),
            What::Field(nth, value) => {
                if let Some(map) = self.fields.get_mut(nth) {
                    from(map, value, id);
                    if map.is_empty() {
                        self.fields.remove(nth);
                    }
                }
            }
            What::Label(key, value) => {
                if let Some(map) = self.labels.get_mut(key) {
                    from(map, value, id);
                    if map.is_empty() {
                        self.labels.remove(key);
                    }
                }
            }
            What::Everything => {
                self.everything.remove(&id);
            }
        }
    }

    fn bucket(&mut self, what: &What) -> &mut Members {
        match what {
            What::Name(name) => self.names.entry(name.clone()).or_default(),
            What::Field(nth, value) => self
                .fields
                .entry(*nth)
                .or_default()
                .entry(value.clone())
                .or_default(),
            What::Label(key, value) => self
                .labels
                .entry(key.clone())
                .or_default()
                .entry(value.clone())
                .or_default(),
            What::Everything => &mut self.everything,
        }
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Outbox>> {
        let maps = std::iter::once(&self.names)
            .chain(self.fields.values())
            .chain(self.labels.values());
        maps.flat_map(HashMap::values)
            .chain(std::iter::once(&self.everything))
            .flat_map(BTreeMap::values)
    }

    fn is_empty(&self) -> bool {
        self.all().next().is_none()
    }

    /// Every member that a change from `before` to `after` may concern, once.
    fn visit<'a>(
        &'a self,
        before: Option<&Head>,
        after: Option<&Head>,
        fields: &FieldSet,
        concerned: &mut Vec<(u64, &'a Outbox)>,
    ) {
        let mut each = |members: Option<&'a Members>| {
            let members = members.into_iter().flatten();
            concerned.extend(members.map(|((reader, _), outbox)| (*reader, &**outbox)));
        };
        each(Some(&self.everything));
        // The name of an object does not change.
        if let Some(head) = after.or(before)
            && !self.names.is_empty()
        {
            each(self.names.get(&*head.name));
        }
        for (nth, map) in &self.fields {
            let place = fields.indexed[*nth];
            let old = before.map(|head| &*head.values[place]);
            let new = after.map(|head| &*head.values[place]);
            if let Some(old) = old.filter(|old| Some(*old) != new) {
                each(map.get(old));
            }
            if let Some(new) = new {
                each(map.get(new));
            }
        }
        for (key, map) in &self.labels {
            let old = before.and_then(|head| head.label(key));
            let new = after.and_then(|head| head.label(key));
            if let Some(old) = old.filter(|old| Some(*old) != new) {
                each(map.get(old));
            }
            if let Some(new) = new {
                each(map.get(new));
            }
        }
    }
}

#[derive(Default)]
pub struct Watchers {
    namespaces: HashMap<Box<str>, Group>,
    cluster: Group,
    next_id: u64,
}

impl Watchers {
    /// Watchers of one `reader` are served together.
    pub fn add(&mut self, bucket: &Bucket, reader: u64, outbox: Arc<Outbox>) -> (u64, u64) {
        self.next_id += 1;
        let id = (reader, self.next_id);
        let group = match &bucket.namespace {
            Some(namespace) => self.namespaces.entry(namespace.clone()).or_default(),
            None => &mut self.cluster,
        };
        group.bucket(&bucket.what).insert(id, outbox);
        id
    }

    pub fn remove(&mut self, bucket: &Bucket, id: (u64, u64)) {
        let Some(namespace) = &bucket.namespace else {
            return self.cluster.remove(&bucket.what, id);
        };
        if let Some(group) = self.namespaces.get_mut(namespace) {
            group.remove(&bucket.what, id);
            if group.is_empty() {
                self.namespaces.remove(namespace);
            }
        }
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Outbox>> {
        self.namespaces
            .values()
            .chain(std::iter::once(&self.cluster))
            .flat_map(Group::all)
    }

    pub fn len(&self) -> usize {
        self.all().count()
    }

    /// Ends every watcher; their clients start over.
    pub fn end_all(&self) {
        self.all().for_each(|outbox| outbox.end());
    }

    /// Puts a change into the queues that it concerns. Who waits for them goes to `wakers`; `served` is called each time
    /// all queues of one reader are filled.
    pub fn dispatch(
        &self,
        change: &Change,
        floor: i64,
        fields: &FieldSet,
        wakers: &mut Vec<Waker>,
        mut served: impl FnMut(&mut Vec<Waker>),
    ) {
        let before = change.before.as_ref().map(|entry| &*entry.head);
        let after = change.after.as_ref().map(|entry| &*entry.head);
        let Some(head) = after.or(before) else { return };
        let mut concerned = Vec::new();
        self.cluster.visit(before, after, fields, &mut concerned);
        // The namespace of an object does not change.
        if let Some(group) = self.namespaces.get(&*head.namespace) {
            group.visit(before, after, fields, &mut concerned);
        }
        // Several sorted runs, one a bucket.
        concerned.sort_by_key(|(reader, _)| *reader);
        let mut shared = SharedEvents::default();
        for outboxes in concerned.chunk_by(|(one, _), (other, _)| one == other) {
            let waiting = outboxes
                .iter()
                .filter_map(|(_, outbox)| outbox.offer(change, floor, &mut shared));
            wakers.extend(waiting);
            served(wakers);
        }
    }
}

/// The queue between dispatch and one watcher. It is bounded: when it is full the watcher falls back
/// to reading the remembered changes itself, from where it stopped; when those are gone too, it ends.
pub struct Outbox {
    pub filter: Filter,
    /// Whether the filter lets everything through that the watcher's bucket does.
    plain: bool,
    capacity: usize,
    inner: Mutex<Inner>,
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
    /// Who waits for the queue.
    reader: Option<Waker>,
}

impl Inner {
    /// Nothing more will come, and nobody needs what is left.
    fn end(&mut self) -> Option<Waker> {
        self.ended = true;
        self.queue = VecDeque::new();
        self.reader.take()
    }
}

pub enum Taken {
    Event(Arc<WatchEvent>),
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
            reader: None,
        };
        Outbox {
            plain: !filter.has_selector(),
            filter,
            capacity,
            inner: Mutex::new(inner),
            dispatched,
        }
    }

    /// Who is to be woken.
    fn offer(&self, change: &Change, floor: i64, shared: &mut SharedEvents) -> Option<Waker> {
        let mut inner = self.inner.lock();
        if inner.ended || change.revision <= inner.position {
            return None;
        }
        let mut reader = None;
        if !inner.live {
            if inner.position < floor {
                // It can no longer catch up; free its queue.
                reader = inner.end();
            }
        } else {
            let event = if self.plain {
                shared.of(change, change.before.is_some(), change.after.is_some())
            } else {
                self.filter.event(change, shared)
            };
            if let Some(event) = event {
                if inner.queue.len() >= self.capacity {
                    inner.live = false;
                    return None;
                }
                inner.queue.push_back(event);
                reader = inner.reader.take();
            }
            inner.position = change.revision;
        }
        reader
    }

    pub fn end(&self) {
        let reader = self.inner.lock().end();
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// The next event; pending while the queue is empty and dispatch feeds it.
    pub fn poll_take(&self, context: &mut Context<'_>) -> Poll<Taken> {
        let mut inner = self.inner.lock();
        match inner.queue.pop_front() {
            Some(event) => Poll::Ready(Taken::Event(event)),
            None if inner.ended => Poll::Ready(Taken::End),
            None if !inner.live => Poll::Ready(Taken::CatchUp),
            None => {
                match &mut inner.reader {
                    Some(known) => known.clone_from(context.waker()),
                    none => *none = Some(context.waker().clone()),
                }
                Poll::Pending
            }
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

    /// The version up to which the watcher was given everything, if it is idle: what a bookmark says.
    pub fn bookmark(&self, state: &State) -> Option<i64> {
        let inner = self.inner.lock();
        // A change that is in the state but not yet dispatched may still be on its way to this queue.
        let settled = self.dispatched.load(Ordering::Acquire) >= state.revision;
        let idle = inner.live && !inner.ended && inner.queue.is_empty();
        (idle && settled).then(|| state.known().max(inner.position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{Entry, EventKind};
    use crate::fields::Interner;
    use skiff_meta::selector::{FieldSelector, LabelSelector};
    use tokio::time::Instant;

    #[test]
    fn a_reader_is_served_when_all_of_its_queues_are_filled() {
        let fields = Arc::new(FieldSet::new(Vec::new()));
        let state = State::new(fields.clone());
        let mut watchers = Watchers::default();
        let mut waiting = Vec::new();
        let mut add = |reader: u64, namespace: Option<&str>, labels: &str| {
            let filter = Filter {
                namespace: namespace.map(Into::into),
                labels: LabelSelector::parse(labels).unwrap(),
                fields: FieldSelector::default(),
            };
            let bucket = Bucket::of(&filter, &fields);
            let outbox = Arc::new(Outbox::new(filter, 0, 10, Arc::default()));
            outbox.catch_up(&state);
            let asleep = &mut Context::from_waker(Waker::noop());
            assert!(outbox.poll_take(asleep).is_pending());
            watchers.add(&bucket, reader, outbox.clone());
            waiting.push((reader, outbox));
        };
        // Two readers, each in several buckets, in no order.
        add(2, Some("n"), "");
        add(1, Some("n"), "");
        add(2, Some("n"), "a=b");
        add(1, None, "");
        add(1, Some("n"), "a=b");
        add(2, Some("n"), "a=c");
        add(1, Some("other"), "");
        let json = br#"{"metadata":{"name":"x","namespace":"n","labels":{"a":"b"}}}"#;
        let interner = &mut Interner::default();
        let entry = Entry::new("k".into(), 7, json, EventKind::Added, &fields, interner).unwrap();
        let change = Change::new("k".into(), 7, Instant::now(), None, Some(Arc::new(entry)));
        let filled = |of: u64| {
            let of = waiting.iter().filter(|(reader, _)| *reader == of);
            of.filter(|(_, outbox)| !outbox.inner.lock().queue.is_empty())
                .count()
        };
        let mut seen = Vec::new();
        watchers.dispatch(&change, 0, &fields, &mut Vec::new(), |wakers| {
            seen.push((filled(1), filled(2), std::mem::take(wakers).len()));
        });
        assert_eq!(seen, [(3, 0, 3), (3, 2, 2)]);
    }
}
