//! What a list or a watch lets through, and what a change is to a watcher with such a filter.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use skiff_meta::selector::{FieldSelector, LabelSelector};
use tokio::time::Instant;

use crate::entry::{Entry, EventKind, Head, WatchEvent};

#[derive(Debug, Clone)]
pub struct Filter {
    pub namespace: Option<String>,
    pub labels: LabelSelector,
    pub fields: FieldSelector,
}

impl Filter {
    pub fn matches(&self, head: &Head) -> bool {
        self.namespace
            .as_ref()
            .is_none_or(|namespace| **namespace == *head.namespace)
            && (self.labels.is_empty() || self.labels.matches(|key| head.label(key)))
            && (self.fields.is_empty() || self.fields.matches(|name| head.field(name)))
    }

    pub fn has_selector(&self) -> bool {
        !self.labels.is_empty() || !self.fields.is_empty()
    }

    /// The event that `change` is here. Entering the selection is ADDED and leaving it is DELETED,
    /// whatever happened to the object itself.
    pub fn event(&self, change: &Change, shared: &mut SharedEvents) -> Option<Arc<WatchEvent>> {
        let matches =
            |entry: &Option<Arc<Entry>>| entry.as_ref().is_some_and(|entry| self.matches(&entry.head));
        shared.of(change, matches(&change.before), matches(&change.after))
    }
}

/// The events made of one change so far; at most one of each kind, however many watchers.
#[derive(Default)]
pub struct SharedEvents {
    added: Option<Arc<WatchEvent>>,
    modified: Option<Arc<WatchEvent>>,
    deleted: Option<Arc<WatchEvent>>,
}

impl SharedEvents {
    /// The event that `change` is to a watcher that had the object in its selection `before`, and has it `after`.
    pub fn of(&mut self, change: &Change, before: bool, after: bool) -> Option<Arc<WatchEvent>> {
        let (kind, slot) = match (before, after) {
            (false, false) => return None,
            (false, true) => (EventKind::Added, &mut self.added),
            (true, true) => (EventKind::Modified, &mut self.modified),
            (true, false) => (EventKind::Deleted, &mut self.deleted),
        };
        if slot.is_none() {
            let entry = if kind == EventKind::Deleted {
                change.gone()
            } else {
                change.after.clone()
            };
            let before = change.before.clone().filter(|_| kind == EventKind::Modified);
            *slot = entry.map(|entry| {
                let mut event = WatchEvent::new(kind, entry);
                event.before = before;
                Arc::new(event)
            });
        }
        slot.clone()
    }
}

/// One change of one object.
#[derive(Debug)]
pub struct Change {
    pub key: Arc<str>,
    pub revision: i64,
    pub at: Instant,
    pub before: Option<Arc<Entry>>,
    /// `None`: deleted.
    pub after: Option<Arc<Entry>>,
    /// What DELETED shows, while somebody has it: it is easily made again. Leaf lock.
    gone: Mutex<Weak<Entry>>,
}

impl Change {
    pub fn new(
        key: Arc<str>,
        revision: i64,
        at: Instant,
        before: Option<Arc<Entry>>,
        after: Option<Arc<Entry>>,
    ) -> Change {
        Change {
            key,
            revision,
            at,
            before,
            after,
            gone: Mutex::default(),
        }
    }

    /// The last state before the change with the version of the change: what DELETED shows.
    fn gone(&self) -> Option<Arc<Entry>> {
        let before = self.before.as_ref()?;
        let mut gone = self.gone.lock();
        if let Some(made) = gone.upgrade() {
            return Some(made);
        }
        let made = Arc::new(before.restamp(self.revision, EventKind::Deleted));
        *gone = Arc::downgrade(&made);
        Some(made)
    }

    /// Memory that only this remembered change holds, roughly.
    pub fn weight(&self) -> usize {
        128 + self.before.as_ref().map_or(0, |before| before.weight())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::{FieldSet, Interner};

    #[test]
    fn what_a_deletion_shows_is_shared_and_not_kept() {
        let fields = Arc::new(FieldSet::new(Vec::new()));
        let json = br#"{"metadata":{"name":"a"}}"#;
        let entry = Entry::new(
            "k".into(),
            7,
            json,
            EventKind::Added,
            &fields,
            &mut Interner::default(),
        );
        let change = Change::new("k".into(), 9, Instant::now(), entry.ok().map(Arc::new), None);
        let (one, other) = (change.gone().unwrap(), change.gone().unwrap());
        assert!(Arc::ptr_eq(&one, &other) && one.revision == 9);
        drop((one, other));
        assert_eq!(
            change.gone.lock().strong_count(),
            0,
            "remembered changes hold no second copy"
        );
        assert_eq!(
            &change.gone().unwrap().bytes[..],
            br#"{"metadata":{"resourceVersion":"9","name":"a"}}"#
        );
    }
}
