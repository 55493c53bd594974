//! Answers that are kept for a while: at most so many, at most so many bytes, and none longer than it was told.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

/// What is asked, as a digest: neither tokens nor long texts stay in memory.
pub type Key = [u8; 32];

pub fn key(parts: &[&[u8]]) -> Key {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// What all answers of one sort together may take.
const MAX_BYTES: usize = 16 << 20;
/// One that takes more is not kept: it would cost all others their place.
const MAX_ANSWER: usize = MAX_BYTES / 64;

/// What an answer takes in memory besides its own size.
pub trait Weight {
    fn weight(&self) -> usize;
}

pub struct Expiring<V> {
    most: usize,
    /// Leaf lock.
    kept: Mutex<Kept<V>>,
}

struct Kept<V> {
    answers: HashMap<Key, (Instant, V)>,
    bytes: usize,
}

impl<V> Default for Kept<V> {
    fn default() -> Self {
        Kept {
            answers: HashMap::new(),
            bytes: 0,
        }
    }
}

fn bytes_of<V: Weight>(value: &V) -> usize {
    size_of::<(Key, Instant, V)>() + value.weight()
}

impl<V: Clone + Weight> Expiring<V> {
    pub fn new(most: usize) -> Expiring<V> {
        Expiring {
            most,
            kept: Mutex::default(),
        }
    }

    pub fn get(&self, key: &Key, now: Instant) -> Option<V> {
        let kept = self.kept.lock();
        let (until, value) = kept.answers.get(key)?;
        (now < *until).then(|| value.clone())
    }

    pub fn keep(&self, key: Key, value: V, now: Instant, time: Duration) {
        let bytes = bytes_of(&value);
        if time.is_zero() || bytes > MAX_ANSWER {
            return;
        }
        let kept = &mut *self.kept.lock();
        let full = |kept: &Kept<V>| kept.answers.len() >= self.most || kept.bytes + bytes > MAX_BYTES;
        if full(kept) {
            kept.answers.retain(|_, (until, _)| now < *until);
            kept.bytes = kept.answers.values().map(|(_, value)| bytes_of(value)).sum();
        }
        // Who fills it with what is still good makes the others ask again, and no more.
        if full(kept) {
            *kept = Kept::default();
        }
        kept.bytes += bytes;
        if let Some((_, replaced)) = kept.answers.insert(key, (now + time, value)) {
            kept.bytes -= bytes_of(&replaced);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Weight for i32 {
        fn weight(&self) -> usize {
            0
        }
    }

    impl Weight for String {
        fn weight(&self) -> usize {
            self.len()
        }
    }

    #[test]
    fn answers_end_at_their_budget() {
        let now = Instant::now();
        let kept = Expiring::new(32 * 1024);
        let long = "x".repeat(100_000);
        for number in 0..10_000_u32 {
            let key = key(&[&number.to_be_bytes()]);
            kept.keep(key, long.clone(), now, Duration::from_secs(60));
            kept.keep(key, long.clone(), now, Duration::from_secs(60));
            assert!(kept.get(&key, now).is_some(), "the last is kept");
        }
        let held = kept.kept.lock();
        let bytes: usize = held.answers.values().map(|(_, value)| bytes_of(value)).sum();
        assert!(bytes <= MAX_BYTES, "{bytes}");
        assert_eq!(held.bytes, bytes);
        drop(held);
        let huge = key(&[b"huge"]);
        kept.keep(huge, "x".repeat(MAX_ANSWER), now, Duration::from_secs(60));
        assert_eq!(kept.get(&huge, now), None);
    }

    #[test]
    fn nothing_is_kept_for_longer_than_told() {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let kept = Expiring::new(2);
        let keys: Vec<Key> = ["a", "b", "c"]
            .iter()
            .map(|text| key(&[text.as_bytes()]))
            .collect();
        kept.keep(keys[0], 0, now, Duration::ZERO);
        assert_eq!(kept.get(&keys[0], now), None);
        kept.keep(keys[0], 0, now, second);
        assert_eq!(kept.get(&keys[0], now), Some(0));
        assert_eq!(kept.get(&keys[0], now + second), None);
        kept.keep(keys[1], 1, now, 5 * second);
        kept.keep(keys[2], 2, now + second, second);
        assert_eq!(kept.get(&keys[1], now + second), Some(1));
        assert_eq!(kept.get(&keys[2], now + second), Some(2));
        kept.keep(keys[0], 0, now + second, second);
        assert_eq!(kept.kept.lock().answers.len(), 1);
        assert_ne!(key(&[b"ab", b"c"]), key(&[b"a", b"bc"]));
    }
}
