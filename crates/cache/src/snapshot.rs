//! Reading the state as it is or as it was: pages of it, in key order. The past is the present with
//! the changes since then undone, so it costs memory only for what changed.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use crate::entry::Entry;
use crate::filter::Filter;
use crate::index::Keys;
use crate::state::State;

/// What part of the keys a list looks at.
pub struct Scope {
    /// The prefix of the listed part: all of the cache, or a namespace of it.
    pub keys: String,
    /// The first key behind it.
    end: String,
    pub start_after: Option<String>,
    pub limit: usize,
}

impl Scope {
    pub fn new(prefix: &str, namespace: Option<&str>, limit: usize) -> Scope {
        let keys = match namespace {
            Some(namespace) => format!("{prefix}{namespace}/"),
            None => prefix.to_owned(),
        };
        // The prefix ends in `/`, and `0` follows that.
        let end = format!("{}0", keys.trim_end_matches('/'));
        Scope {
            keys,
            end,
            start_after: None,
            limit,
        }
    }

    /// Where the keys of this scope begin and end.
    fn bounds(&self) -> (Bound<&str>, Bound<&str>) {
        let start = match &self.start_after {
            Some(after) if after.as_str() >= self.keys.as_str() => Bound::Excluded(after.as_str()),
            _ => Bound::Included(self.keys.as_str()),
        };
        // A key to start after may lie behind the end; a range must not be upside down.
        match &self.start_after {
            Some(after) if *after >= self.end => (start, Bound::Included(after)),
            _ => (start, Bound::Excluded(&self.end)),
        }
    }
}

pub struct Page {
    pub items: Vec<Arc<Entry>>,
    pub more: bool,
    /// Items after this page; counted only when nothing is selected.
    pub remaining: Option<i64>,
}

/// A page of the state at revision `at`, which must not be below the floor.
pub fn page(state: &State, scope: &Scope, filter: &Filter, at: i64) -> Page {
    let mut since: BTreeMap<&str, Option<&Arc<Entry>>> = BTreeMap::new();
    for change in state.changes_after(at).rev() {
        // Newest first, so that the change next after `at` has the last word.
        if change.key.starts_with(&scope.keys) {
            since.insert(&change.key, change.before.as_ref());
        }
    }
    let same: Box<dyn Iterator<Item = &Arc<Entry>>> = match narrow(state, scope, filter) {
        Some(few) => few,
        None => Box::new(range(state, scope)),
    };
    if since.is_empty() {
        if !filter.has_selector() {
            return whole(state, scope);
        }
        return take(same, scope, filter);
    }
    let before = since
        .range::<str, _>(scope.bounds())
        .filter_map(|(_, entry)| *entry);
    let same = same.filter(|entry| !since.contains_key(&*entry.key));
    take(merge(same, before), scope, filter)
}

fn range<'a>(state: &'a State, scope: &Scope) -> impl Iterator<Item = &'a Arc<Entry>> {
    state
        .entries
        .range::<str, _>(scope.bounds())
        .map(|(_, entry)| entry)
}

/// The few candidates when the selector pins a name, an indexed field or a label; a superset of what
/// matches.
fn narrow<'a>(
    state: &'a State,
    scope: &'a Scope,
    filter: &Filter,
) -> Option<Box<dyn Iterator<Item = &'a Arc<Entry>> + 'a>> {
    if let Some(name) = filter.fields.required_value("metadata.name")
        && filter.namespace.is_some()
    {
        let after = |key: &str| scope.start_after.as_deref().is_none_or(|after| key > after);
        let found = state.entries.get(format!("{}{name}", scope.keys).as_str());
        return Some(Box::new(found.filter(|entry| after(&entry.key)).into_iter()));
    }
    let fields = state
        .fields
        .indexed
        .iter()
        .enumerate()
        .filter_map(|(nth, &place)| {
            let value = filter.fields.required_value(&state.fields.fields[place].name)?;
            Some(state.indexed(nth, value))
        });
    let labels = filter
        .labels
        .required()
        .map(|(label, value)| state.labelled(label, value));
    // The shortest way: of a value that nobody has there is nothing at all.
    let keys = fields
        .chain(labels)
        .min_by_key(|keys| keys.map_or(0, Keys::len))?;
    let Some(keys) = keys else {
        return Some(Box::new(std::iter::empty()));
    };
    let found = keys
        .range(scope.bounds())
        .filter_map(|key| state.entries.get(key));
    Some(Box::new(found))
}

/// A page of everything in the scope: no object is looked at but those of the page.
fn whole(state: &State, scope: &Scope) -> Page {
    let limit = if scope.limit == 0 { usize::MAX } else { scope.limit };
    let mut all = state.entries.range::<str, _>(scope.bounds());
    let items: Vec<Arc<Entry>> = all.by_ref().take(limit).map(|(_, entry)| entry.clone()).collect();
    let remaining = all.count() as i64;
    Page {
        items,
        more: remaining > 0,
        remaining: (remaining > 0).then_some(remaining),
    }
}

/// Two ordered sequences as one.
fn merge<'a>(
    left: impl Iterator<Item = &'a Arc<Entry>>,
    right: impl Iterator<Item = &'a Arc<Entry>>,
) -> impl Iterator<Item = &'a Arc<Entry>> {
    let (mut left, mut right) = (left.peekable(), right.peekable());
    std::iter::from_fn(move || match (left.peek(), right.peek()) {
        (Some(l), Some(r)) if r.key < l.key => right.next(),
        (Some(_), _) => left.next(),
        (None, _) => right.next(),
    })
}

fn take<'a>(candidates: impl Iterator<Item = &'a Arc<Entry>>, scope: &Scope, filter: &Filter) -> Page {
    let limit = if scope.limit == 0 { usize::MAX } else { scope.limit };
    let mut matching = candidates.filter(|entry| filter.matches(&entry.head));
    let items: Vec<Arc<Entry>> = matching.by_ref().take(limit).cloned().collect();
    if filter.has_selector() {
        return Page {
            items,
            more: matching.next().is_some(),
            remaining: None,
        };
    }
    let remaining = matching.count() as i64;
    Page {
        items,
        more: remaining > 0,
        remaining: (remaining > 0).then_some(remaining),
    }
}
