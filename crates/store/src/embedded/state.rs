//! What the embedded store knows, in memory: of every key the current version, and which older ones are not
//! yet compacted. Their values are on disk. No I/O, no waiting; who holds the writer changes it, everyone reads it.

use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;

use super::disk::Row;
use crate::{Error, Event, KeyValue, RangeResult, Result};

pub struct State {
    pub revision: i64,
    /// The newest revision whose history is gone; it can still be read itself, as in etcd.
    pub compacted: i64,
    keys: BTreeMap<Arc<str>, History>,
}

#[derive(Debug, Clone)]
pub struct Version {
    pub revision: i64,
    pub create_revision: i64,
    /// `None`: deleted.
    pub value: Option<Bytes>,
    pub expires: u64,
}

struct History {
    current: Version,
    /// Oldest first. Empty for most keys, and then it takes no memory.
    older: Vec<Older>,
}

/// A version that was replaced.
#[derive(Clone, Copy)]
struct Older {
    revision: i64,
    create_revision: i64,
    deleted: bool,
}

impl Older {
    fn of(version: &Version) -> Older {
        Older {
            revision: version.revision,
            create_revision: version.create_revision,
            deleted: version.value.is_none(),
        }
    }
}

impl History {
    fn at(&self, revision: i64) -> Option<Older> {
        if self.current.revision <= revision {
            return Some(Older::of(&self.current));
        }
        let after = self.older.partition_point(|version| version.revision <= revision);
        self.older.get(after.checked_sub(1)?).copied()
    }

    /// The state at a revision, and whether its value is on disk only.
    fn key_value(&self, key: &Arc<str>, version: Older) -> (KeyValue, bool) {
        let current = self.current.value.as_ref();
        let here = current.filter(|_| self.current.revision == version.revision);
        let found = KeyValue {
            key: key.clone(),
            value: here.cloned().unwrap_or_default(),
            create_revision: version.create_revision,
            mod_revision: version.revision,
        };
        (found, here.is_none())
    }
}

impl Version {
    pub fn key_value(&self, key: &Arc<str>) -> Option<KeyValue> {
        Some(KeyValue {
            key: key.clone(),
            value: self.value.clone()?,
            create_revision: self.create_revision,
            mod_revision: self.revision,
        })
    }
}

impl State {
    pub fn new(compacted: i64) -> State {
        State {
            revision: compacted,
            compacted,
            keys: BTreeMap::new(),
        }
    }

    pub fn get(&self, key: &str) -> Option<KeyValue> {
        let (key, history) = self.keys.get_key_value(key)?;
        history.current.key_value(key)
    }

    /// The current version of a key with the shared form of the key, deleted or not.
    pub fn version(&self, key: &str) -> Option<(&Arc<str>, &Version)> {
        self.keys
            .get_key_value(key)
            .map(|(key, history)| (key, &history.current))
    }

    /// With the places of the items whose values the caller has to get from disk, by their revisions.
    pub fn range(
        &self,
        prefix: &str,
        start_after: Option<&str>,
        limit: usize,
        at: Option<i64>,
    ) -> Result<(RangeResult, Vec<usize>)> {
        let revision = at.unwrap_or(self.revision);
        if revision > self.revision {
            return Err(Error::FutureRevision {
                requested: revision,
                current: self.revision,
            });
        }
        if revision < self.compacted {
            return Err(Error::Compacted {
                revision: self.compacted,
            });
        }
        let start = match start_after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        let mut found = self
            .keys
            .range::<str, _>((start, Bound::Unbounded))
            .take_while(|(key, _)| key.starts_with(prefix))
            .filter_map(|(key, history)| Some((key, history, history.at(revision).filter(|v| !v.deleted)?)));
        let limit = if limit == 0 { usize::MAX } else { limit };
        let mut on_disk = Vec::new();
        let mut items: Vec<KeyValue> = Vec::new();
        for (key, history, version) in found.by_ref().take(limit) {
            let (item, missing) = history.key_value(key, version);
            if missing {
                on_disk.push(items.len());
            }
            items.push(item);
        }
        let rest = found.count();
        let count = (items.len() + rest) as i64;
        let range = RangeResult {
            items,
            revision: self.revision,
            more: rest > 0,
            count,
        };
        Ok((range, on_disk))
    }

    /// Takes over one version, which must be newer than all before.
    pub fn apply(&mut self, row: Row) -> Event {
        let Row {
            revision,
            key,
            create_revision,
            value,
            expires,
        } = row;
        let version = Version {
            revision,
            create_revision,
            value: value.clone(),
            expires,
        };
        self.revision = self.revision.max(revision);
        let key = match self.keys.get_key_value(&key) {
            Some((shared, _)) => shared.clone(),
            None => key,
        };
        match self.keys.get_mut(&key) {
            Some(history) => {
                let before = std::mem::replace(&mut history.current, version);
                history.older.push(Older::of(&before));
            }
            None => {
                self.keys.insert(
                    key.clone(),
                    History {
                        current: version,
                        older: Vec::new(),
                    },
                );
            }
        }
        Event {
            key,
            revision,
            create_revision,
            value,
        }
    }

    /// The revisions that nobody can read any more once history up to `events`, which are all between
    /// the last compaction and the new one, is gone.
    pub fn superseded(&self, events: &[Event]) -> Vec<i64> {
        let mut gone = Vec::with_capacity(events.len());
        for event in events {
            if let Some(before) = self.keys.get(&event.key).and_then(|h| h.at(event.revision - 1)) {
                gone.push(before.revision);
            }
            if event.value.is_none() {
                gone.push(event.revision);
            }
        }
        // A deletion is named twice when the key came back before the compaction.
        gone.sort_unstable();
        gone.dedup();
        gone
    }

    /// Drops in memory what [`State::superseded`] named.
    pub fn compact(&mut self, events: &[Event], revision: i64) {
        // The last event of a key decides; a key that is written all the time has thousands of them.
        let mut seen: HashSet<&str> = HashSet::new();
        for event in events.iter().rev().filter(|event| seen.insert(&event.key)) {
            let Some(history) = self.keys.get_mut(&event.key) else {
                continue;
            };
            let gone = history.older.partition_point(|version| {
                version.revision < event.revision
                    || (version.revision == event.revision && event.value.is_none())
            });
            history.older.drain(..gone);
            if history.older.len() * 4 < history.older.capacity() {
                history.older.shrink_to_fit();
            }
            if event.value.is_none() && history.current.revision == event.revision {
                self.keys.remove(&event.key);
            }
        }
        self.compacted = self.compacted.max(revision);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(revision: i64, key: &str, create_revision: i64, value: Option<&'static str>) -> Row {
        Row {
            revision,
            key: key.into(),
            create_revision,
            value: value.map(Bytes::from),
            expires: 0,
        }
    }

    /// The example of the crate's page: a=1, b=1, a=2, b deleted; then c comes, goes and comes back.
    fn example() -> (State, Vec<Event>) {
        let mut state = State::new(1);
        let rows = [
            row(2, "a", 2, Some("1")),
            row(3, "b", 3, Some("1")),
            row(4, "a", 2, Some("2")),
            row(5, "b", 0, None),
            row(6, "c", 6, Some("1")),
            row(7, "c", 0, None),
            row(8, "c", 8, Some("2")),
        ];
        let events = rows.into_iter().map(|row| state.apply(row)).collect();
        (state, events)
    }

    fn check(state: &State, at: i64, expected: &str) {
        let found = match state.range("", None, 0, Some(at)) {
            Ok((range, on_disk)) => range
                .items
                .iter()
                .enumerate()
                .map(|(nth, kv)| {
                    let value = match on_disk.contains(&nth) {
                        true => "disk".into(),
                        false => String::from_utf8_lossy(&kv.value),
                    };
                    format!("{}={value}@{}", kv.key, kv.mod_revision)
                })
                .collect::<Vec<_>>()
                .join(" "),
            Err(error) => format!("{error:?}"),
        };
        assert_eq!(found, expected, "at {at}");
    }

    #[test]
    fn reads_at_a_revision() {
        let (state, _) = example();
        check(&state, 1, "");
        check(&state, 2, "a=disk@2");
        check(&state, 3, "a=disk@2 b=disk@3");
        check(&state, 4, "a=2@4 b=disk@3");
        check(&state, 5, "a=2@4");
        check(&state, 7, "a=2@4");
        check(&state, 8, "a=2@4 c=2@8");
        check(&state, 9, "FutureRevision { requested: 9, current: 8 }");
    }

    #[test]
    fn compaction_forgets_the_past_and_nothing_else() {
        for to in 2..=8 {
            let (mut state, events) = example();
            let (untouched, _) = example();
            let gone: Vec<Event> = events
                .iter()
                .filter(|event| event.revision <= to)
                .cloned()
                .collect();
            let superseded = state.superseded(&gone);
            state.compact(&gone, to);
            check(&state, to - 1, &format!("Compacted {{ revision: {to} }}"));
            for at in to..=8 {
                let (was, is) = (
                    untouched.range("", None, 0, Some(at)),
                    state.range("", None, 0, Some(at)),
                );
                assert_eq!(
                    was.unwrap().0.items,
                    is.unwrap().0.items,
                    "compacted to {to}, read at {at}"
                );
            }
            // What stays on disk gives the same state again.
            let mut again = State::new(to);
            for event in &events {
                if !superseded.contains(&event.revision) {
                    again.apply(Row {
                        revision: event.revision,
                        key: event.key.clone(),
                        create_revision: event.create_revision,
                        value: event.value.clone(),
                        expires: 0,
                    });
                }
            }
            assert_eq!(again.revision, 8);
            for at in to..=8 {
                let (was, is) = (
                    state.range("", None, 0, Some(at)),
                    again.range("", None, 0, Some(at)),
                );
                assert_eq!(
                    was.unwrap().0.items,
                    is.unwrap().0.items,
                    "reloaded, compacted to {to}, at {at}"
                );
            }
            let versions: usize = state.keys.values().map(|history| 1 + history.older.len()).sum();
            assert_eq!(
                versions,
                events.len() - superseded.len(),
                "memory and disk agree at {to}"
            );
        }
    }

    #[test]
    fn a_key_that_is_written_all_the_time() {
        let mut state = State::new(1);
        let mut events: Vec<Event> = (2..20_002)
            .map(|revision| state.apply(row(revision, "hot", 2, Some("v"))))
            .collect();
        events.push(state.apply(row(20_002, "hot", 0, None)));
        events.push(state.apply(row(20_003, "hot", 20_003, Some("w"))));
        for to in [5_000, 20_001, 20_002] {
            let gone: Vec<Event> = events
                .iter()
                .filter(|event| event.revision > state.compacted && event.revision <= to)
                .cloned()
                .collect();
            let (before, dropped) = (state.keys["hot"].older.len(), state.superseded(&gone).len());
            state.compact(&gone, to);
            assert_eq!(
                state.keys["hot"].older.len(),
                before - dropped,
                "compacted to {to}"
            );
            let expected = if to == 20_002 {
                String::new()
            } else {
                format!("hot=disk@{to}")
            };
            check(&state, to, &expected);
        }
        check(&state, 20_003, "hot=w@20003");
        assert_eq!(state.keys["hot"].older.capacity(), 0);
    }

    #[test]
    fn limit_and_start() {
        let (state, _) = example();
        let (page, _) = state.range("", None, 1, None).unwrap();
        assert_eq!(
            (page.items.len(), page.more, page.count, page.revision),
            (1, true, 2, 8)
        );
        let (page, _) = state.range("", Some("a"), 1, None).unwrap();
        assert_eq!((&*page.items[0].key, page.more, page.count), ("c", false, 1));
    }
}
