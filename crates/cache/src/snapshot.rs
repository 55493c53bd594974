//! Reading the state as it is or as it was: pages of it, in key order. The past is the present with
//! the changes since then undone, so it costs memory only for what changed.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use skiff_meta::selector::{Operator, Requirement};

use crate::entry::Entry;
use crate::filter::Filter;
use crate::index::{Index, Keys};
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
    pub fn bounds(&self) -> (Bound<&str>, Bound<&str>) {
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
/// matches, in order.
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
            Some(state.indexed(nth, value).into_iter().collect())
        });
    let labels = filter.labels.requirements.iter();
    let labels = labels.filter_map(|requirement| known(state, requirement));
    // The shortest way: of a value that nobody has there is nothing at all.
    let sets: Vec<&Keys> = fields
        .chain(labels)
        .min_by_key(|sets: &Vec<&Keys>| sets.iter().map(|keys| keys.len()).sum::<usize>())?;
    if let [keys] = sets[..] {
        let found = keys.range(scope.bounds());
        return Some(Box::new(found.filter_map(|key| state.entries.get(key))));
    }
    let mut keys: Vec<&Arc<str>> = sets.iter().flat_map(|keys| keys.range(scope.bounds())).collect();
    keys.sort_unstable();
    Some(Box::new(
        keys.into_iter().filter_map(|key| state.entries.get(key)),
    ))
}

/// The keys of the objects that may fulfil a requirement, by value. `None` if the index cannot tell, or if they are
/// so many that going through all objects in order is no more work.
fn known<'a>(state: &'a State, requirement: &Requirement) -> Option<Vec<&'a Keys>> {
    let (label, few) = (requirement.key.as_str(), state.entries.len() / 4);
    let sets: Vec<&Keys> = match requirement.operator {
        Operator::In => {
            let values = requirement.values.iter();
            values.filter_map(|value| state.labelled(label, value)).collect()
        }
        Operator::Exists | Operator::GreaterThan | Operator::LessThan => match state.values(label) {
            Some(values) if values.len() > few => return None,
            values => values.into_iter().flat_map(Index::all).collect(),
        },
        Operator::NotIn | Operator::DoesNotExist => return None,
    };
    // One value's keys are in order as they are.
    let many = sets.len() > 1 && sets.iter().map(|keys| keys.len()).sum::<usize>() > few;
    (!many).then_some(sets)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::EventKind;
    use crate::fields::{FieldSet, Interner};
    use skiff_meta::selector::{FieldSelector, LabelSelector};
    use tokio::time::Instant;

    fn state(count: usize) -> State {
        let fields = Arc::new(FieldSet::new(Vec::new()));
        let mut state = State::new(fields.clone());
        let mut interner = Interner::default();
        for n in 0..count {
            let name = format!("{:03}", n * 37 % count);
            let mut labels = serde_json::json!({"shard": format!("s{}", n % 10), "each": name});
            if n % 20 == 0 {
                labels["rare"] = serde_json::json!(n.to_string());
            }
            let object = serde_json::json!({"metadata": {"namespace": "ns", "name": name, "labels": labels}});
            let key: Arc<str> = format!("/pods/ns/{name}").into();
            let revision = n as i64 + 1;
            let entry = Entry::new(
                key.clone(),
                revision,
                object.to_string().as_bytes(),
                EventKind::Added,
                &fields,
                &mut interner,
            );
            state.apply(key, revision, Some(entry.unwrap()), Instant::now());
        }
        state
    }

    #[test]
    fn a_narrowed_list_is_the_list() {
        let state = state(200);
        let check = |selector: &str, start_after: Option<&str>, narrowed: bool| {
            let filter = Filter {
                namespace: Some("ns".to_owned()),
                labels: LabelSelector::parse(selector).unwrap(),
                fields: FieldSelector::everything(),
            };
            let mut scope = Scope::new("/pods/", Some("ns"), 0);
            scope.start_after = start_after.map(str::to_owned);
            assert_eq!(narrow(&state, &scope, &filter).is_some(), narrowed, "{selector}");
            let found = page(&state, &scope, &filter, 200).items;
            let found: Vec<&str> = found.iter().map(|entry| &*entry.key).collect();
            let every = range(&state, &scope).filter(|entry| filter.matches(&entry.head));
            let every: Vec<&str> = every.map(|entry| &*entry.key).collect();
            assert_eq!(found, every, "{selector}");
        };
        for after in [None, Some("/pods/ns/100")] {
            check("shard=s3", after, true);
            check("shard in (s3,s7)", after, true);
            check("shard in (s1,s2,s3,s4,s5)", after, false);
            check("shard in (s1,none)", after, true);
            check("rare", after, true);
            check("rare>50", after, true);
            check("rare<100,shard in (s0,s1)", after, true);
            check("each", after, false);
            check("missing", after, true);
            check("!rare", after, false);
            check("shard notin (s1)", after, false);
        }
    }
}
