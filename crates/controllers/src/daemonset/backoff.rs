//! How long to wait before a failed daemon pod is deleted again: a node that refuses its pods must not make the
//! controller create and delete them without end.

use std::collections::HashMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use parking_lot::Mutex;

const FIRST: Duration = Duration::from_secs(1);
const MAX: Duration = Duration::from_secs(15 * 60);

struct Entry {
    delay: Duration,
    since: Timestamp,
}

impl Entry {
    fn ends(&self) -> Timestamp {
        self.after(self.delay)
    }

    /// An entry that was quiet for this long is forgotten.
    fn expires(&self) -> Timestamp {
        self.after(MAX * 2)
    }

    fn after(&self, duration: Duration) -> Timestamp {
        let duration = SignedDuration::try_from(duration).unwrap_or(SignedDuration::ZERO);
        self.since.checked_add(duration).unwrap_or(Timestamp::MAX)
    }
}

/// By DaemonSet, its generation and the node.
#[derive(Default)]
pub(super) struct FailedPods {
    entries: Mutex<HashMap<String, Entry>>,
}

impl FailedPods {
    /// How long the next deletion must still wait.
    pub(super) fn remaining(&self, key: &str, now: Timestamp) -> Option<Duration> {
        let entries = self.entries.lock();
        let entry = entries.get(key).filter(|entry| entry.expires() >= now)?;
        let remaining = Duration::try_from(entry.ends().duration_since(now)).ok()?;
        (!remaining.is_zero()).then_some(remaining)
    }

    /// A failed pod is deleted now: the next one waits twice as long.
    pub(super) fn deleted(&self, key: &str, now: Timestamp) {
        let mut entries = self.entries.lock();
        let before = entries.get(key).filter(|entry| entry.expires() >= now);
        let delay = before.map_or(FIRST, |entry| (entry.delay * 2).min(MAX));
        entries.insert(key.to_owned(), Entry { delay, since: now });
    }

    /// Drops what was quiet for long.
    pub(super) fn forget(&self, now: Timestamp) {
        self.entries.lock().retain(|_, entry| entry.expires() >= now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_until_it_is_forgotten() {
        let failed = FailedPods::default();
        let start: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let at = |seconds: i64| start + SignedDuration::from_secs(seconds);
        let check = |seconds: i64, expected: Option<u64>| {
            let remaining = failed.remaining("k", at(seconds)).map(|wait| wait.as_secs());
            assert_eq!(remaining, expected, "{seconds}");
        };
        check(0, None);
        failed.deleted("k", at(0));
        check(0, Some(1));
        check(1, None);
        failed.deleted("k", at(1));
        check(1, Some(2));
        for _ in 0..20 {
            failed.deleted("k", at(2));
        }
        check(2, Some(15 * 60));
        check(2 + 15 * 60, None);
        failed.deleted("k", at(2 + 31 * 60));
        check(2 + 31 * 60, Some(1));
        failed.forget(at(62 * 60));
        assert!(failed.entries.lock().is_empty());
    }
}
