//! Which numbers of a range are taken, and by what right: by a write that is under way, by a stored object, or by a
//! write whose outcome is unknown. Shared by the allocators of addresses and of ports.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// How long after its unknown outcome a write may still turn up in the store. Longer than the store's own time limits.
pub(crate) const UNKNOWN_FOR: Duration = Duration::from_secs(60);

pub(crate) struct Ledger<N> {
    entries: HashMap<N, Entry>,
    /// Allocations so far.
    count: u64,
}

struct Entry {
    /// Tells this allocation from later ones of the same number.
    allocation: u64,
    state: State,
}

enum State {
    /// A write is under way.
    Pending,
    Held,
    UnknownSince(Instant),
}

impl<N> Default for Ledger<N> {
    fn default() -> Ledger<N> {
        Ledger {
            entries: HashMap::new(),
            count: 0,
        }
    }
}

impl<N: Copy + Eq + Hash> Ledger<N> {
    /// Takes a number for a write that is under way; false if it is taken.
    pub fn take(&mut self, number: N) -> bool {
        if self.entries.contains_key(&number) {
            return false;
        }
        self.count += 1;
        let entry = Entry {
            allocation: self.count,
            state: State::Pending,
        };
        self.entries.insert(number, entry);
        true
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn has(&self, number: N) -> bool {
        self.entries.contains_key(&number)
    }

    /// The write is in the store.
    pub fn hold(&mut self, number: N) {
        self.set(number, State::Held);
    }

    /// Nobody knows whether the write is in the store.
    pub fn doubt(&mut self, number: N, now: Instant) {
        self.set(number, State::UnknownSince(now));
    }

    fn set(&mut self, number: N, state: State) {
        if let Some(entry) = self.entries.get_mut(&number) {
            entry.state = state;
        }
    }

    pub fn release(&mut self, number: N) {
        self.entries.remove(&number);
    }

    /// Whether there are numbers in doubt of which it can be known by now.
    pub fn has_overdue(&self, now: Instant) -> bool {
        self.entries.values().any(|entry| match entry.state {
            State::UnknownSince(since) => now.duration_since(since) >= UNKNOWN_FOR,
            State::Pending | State::Held => false,
        })
    }

    /// The allocations that a stored object must show by now, if they are any object's.
    pub fn settled(&self, now: Instant) -> Vec<(N, u64)> {
        let settled = self.entries.iter().filter(|(_, entry)| match entry.state {
            State::Pending => false,
            State::Held => true,
            State::UnknownSince(since) => now.duration_since(since) >= UNKNOWN_FOR,
        });
        settled
            .map(|(number, entry)| (*number, entry.allocation))
            .collect()
    }

    /// `settled` was read before the stored objects were, which hold what `is_held` says. Frees what is held by none;
    /// how many.
    pub fn free_unheld(&mut self, settled: Vec<(N, u64)>, is_held: impl Fn(N) -> bool) -> usize {
        let before = self.entries.len();
        for (number, allocation) in settled {
            let same = self
                .entries
                .get(&number)
                .is_some_and(|entry| entry.allocation == allocation);
            if !same {
                continue;
            }
            if is_held(number) {
                self.hold(number);
            } else {
                self.release(number);
            }
        }
        before - self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_settled_and_unheld_is_freed() {
        let mut ledger = Ledger::default();
        let now = Instant::now();
        for number in 1..=5u16 {
            assert!(ledger.take(number));
        }
        assert!(!ledger.take(1));
        ledger.hold(1);
        ledger.hold(2);
        ledger.doubt(3, now);
        ledger.doubt(4, now);
        assert!(!ledger.has_overdue(now));
        let later = now + UNKNOWN_FOR;
        assert!(ledger.has_overdue(later));
        let early = ledger.settled(now);
        assert_eq!(early.len(), 2, "what is in doubt waits");
        let settled = ledger.settled(later);
        assert_eq!(settled.len(), 4, "5 is under way");
        // 2 is given back and taken again while the objects are read.
        ledger.release(2);
        assert!(ledger.take(2));
        assert_eq!(
            ledger.free_unheld(settled, |number| number == 1 || number == 3),
            1
        );
        let left: Vec<u16> = (1..=5).filter(|number| ledger.has(*number)).collect();
        assert_eq!(left, [1, 2, 3, 5]);
        assert!(!ledger.has_overdue(later), "3 turned out to be held");
    }
}
