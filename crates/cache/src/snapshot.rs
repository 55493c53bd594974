//! Reading the state as it is or as it was: pages of it, in key order. The past is the present with
//! the changes since then undone, so it costs memory only for what changed.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use crate::entry::Entry;
use crate::filter::Filter;
use crate::state::State;

/// What part of the keys a list looks at.
pub struct Scope {
    /// The prefix of the listed part: all of the cache, or a namespace of it.
    pub keys: String,
    pub start_after: Option<String>,
    pub limit: usize,
}

impl Scope {
    pub fn new(prefix: &str, namespace: Option<&str>, limit: usize) -> Scope {
        let keys = match namespace {
            Some(namespace) => format!("{prefix}{namespace}/"),
            None => prefix.to_owned(),
        };
        Scope {
            keys,
            start_after: None,
            limit,
        }
    }

    fn bounds(&self) -> (Bound<&str>, Bound<&str>) {
        match &self.start_after {
            Some(after) if after.as_str() >= self.keys.as_str() => {
                (Bound::Excluded(after.as_str()), Bound::Unbounded)
            }
            _ => (Bound::Included(self.keys.as_str()), Bound::Unbounded),
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
    if since.is_empty() {
        return match narrow(state, scope, filter) {
            Some(few) => take(few, scope, filter),
            None => take(range(state, scope), scope, filter),
        };
    }
    let before = since
        .range::<str, _>(scope.bounds())
        .filter_map(|(_, entry)| *entry);
    let same = range(state, scope).filter(|entry| !since.contains_key(&*entry.key));
    take(merge(same, before), scope, filter)
}

fn range<'a>(state: &'a State, scope: &'a Scope) -> impl Iterator<Item = &'a Arc<Entry>> {
    let in_scope = |(key, _): &(&Arc<str>, &Arc<Entry>)| key.starts_with(&scope.keys);
    state
        .entries
        .range::<str, _>(scope.bounds())
        .take_while(in_scope)
        .map(|(_, entry)| entry)
}

/// The few candidates when the selector pins a name or an indexed field; a superset of what matches.
fn narrow<'a>(
    state: &'a State,
    scope: &'a Scope,
    filter: &Filter,
) -> Option<Box<dyn Iterator<Item = &'a Arc<Entry>> + 'a>> {
    let after = |key: &str| scope.start_after.as_deref().is_none_or(|after| key > after);
    if let Some(name) = filter.fields.required_value("metadata.name")
        && filter.namespace.is_some()
    {
        let found = state.entries.get(format!("{}{name}", scope.keys).as_str());
        return Some(Box::new(found.filter(|entry| after(&entry.key)).into_iter()));
    }
    for (nth, &place) in state.fields.indexed.iter().enumerate() {
        let Some(value) = filter.fields.required_value(&state.fields.fields[place].name) else {
            continue;
        };
        let Some(keys) = state.indexed(nth, value) else {
            return Some(Box::new(std::iter::empty()));
        };
        let found = keys
            .range::<str, _>(scope.bounds())
            .take_while(|key| key.starts_with(&scope.keys))
            .filter_map(|key| state.entries.get(key));
        return Some(Box::new(found));
    }
    None
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
