//! Exponential back-off per key, as upstream's `flowcontrol.Backoff`: a value doubles with each failure and
//! is forgotten after twice the maximum without one. Time is passed in.

use std::collections::HashMap;
use std::time::{Duration, Instant};

#[derive(Debug)]
struct Entry {
    delay: Duration,
    last_update: Instant,
}

/// Bounded by `collect`, which the owner calls when it adds.
#[derive(Debug)]
pub struct Backoff {
    initial: Duration,
    maximum: Duration,
    entries: HashMap<String, Entry>,
}

impl Backoff {
    pub fn new(initial: Duration, maximum: Duration) -> Self {
        Backoff {
            initial,
            maximum,
            entries: HashMap::new(),
        }
    }

    pub fn get(&self, key: &str) -> Duration {
        self.entries.get(key).map_or(Duration::ZERO, |e| e.delay)
    }

    /// Doubles the delay of the key for trouble that happened at `event`, or starts it anew if it was quiet
    /// for long before that.
    pub fn next(&mut self, key: &str, event: Instant, now: Instant) {
        let (initial, maximum) = (self.initial, self.maximum);
        match self.entries.get_mut(key) {
            Some(entry) if event.saturating_duration_since(entry.last_update) <= maximum * 2 => {
                entry.delay = (entry.delay * 2).min(maximum);
                entry.last_update = now;
            }
            _ => {
                self.entries.insert(
                    key.to_owned(),
                    Entry {
                        delay: initial,
                        last_update: now,
                    },
                );
            }
        }
    }

    /// How much longer the key must wait when its trouble happened at `event`; `None` when it may go.
    pub fn remaining_since_event(&self, key: &str, event: Instant, now: Instant) -> Option<Duration> {
        let entry = self.entries.get(key)?;
        // A container that ran well for long enough starts anew.
        if event.saturating_duration_since(entry.last_update) > self.maximum * 2 {
            return None;
        }
        entry
            .delay
            .checked_sub(now.saturating_duration_since(event))
            .filter(|d| !d.is_zero())
    }

    /// How much longer the key must wait since its last failure was recorded.
    pub fn remaining_since_update(&self, key: &str, now: Instant) -> Option<Duration> {
        let entry = self.entries.get(key)?;
        let passed = now.saturating_duration_since(entry.last_update);
        if passed > self.maximum * 2 {
            return None;
        }
        entry.delay.checked_sub(passed).filter(|d| !d.is_zero())
    }

    /// How long the key has waited since its last failure was recorded; `None`: it has none.
    pub fn waited_since_update(&self, key: &str, now: Instant) -> Option<Duration> {
        let entry = self.entries.get(key)?;
        Some(now.saturating_duration_since(entry.last_update))
    }

    pub fn forget(&mut self, key_prefix: &str) {
        self.entries.retain(|key, _| !key.starts_with(key_prefix));
    }

    pub fn collect(&mut self, now: Instant) {
        let horizon = self.maximum * 2;
        self.entries
            .retain(|_, e| now.saturating_duration_since(e.last_update) <= horizon);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_and_forgets() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(300));
        assert_eq!(backoff.remaining_since_event("a", at(0), at(0)), None);
        for expected in [10, 20, 40, 80, 160, 300, 300] {
            backoff.next("a", at(0), at(0));
            assert_eq!(backoff.get("a"), Duration::from_secs(expected));
        }
        assert_eq!(
            backoff.remaining_since_event("a", at(1), at(101)),
            Some(Duration::from_secs(200))
        );
        assert_eq!(backoff.remaining_since_event("a", at(1), at(301)), None);
        // Ten quiet minutes: as new.
        assert_eq!(backoff.remaining_since_event("a", at(601), at(602)), None);
        backoff.next("a", at(700), at(700));
        assert_eq!(backoff.get("a"), Duration::from_secs(10));
        backoff.collect(at(1400));
        assert_eq!(backoff.get("a"), Duration::ZERO);
    }
}
