//! Answers that are kept for a while: at most so many, and none longer than it was told.

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

pub struct Expiring<V> {
    most: usize,
    kept: Mutex<HashMap<Key, (Instant, V)>>,
}

impl<V: Clone> Expiring<V> {
    pub fn new(most: usize) -> Expiring<V> {
        Expiring {
            most,
            kept: Mutex::default(),
        }
    }

    pub fn get(&self, key: &Key, now: Instant) -> Option<V> {
        let kept = self.kept.lock();
        let (until, value) = kept.get(key)?;
        (now < *until).then(|| value.clone())
    }

    pub fn keep(&self, key: Key, value: V, now: Instant, time: Duration) {
        if time.is_zero() {
            return;
        }
        let mut kept = self.kept.lock();
        if kept.len() >= self.most {
            kept.retain(|_, (until, _)| now < *until);
        }
        // Who fills it with what is still good makes the others ask again, and no more.
        if kept.len() >= self.most {
            kept.clear();
        }
        kept.insert(key, (now + time, value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(kept.kept.lock().len(), 1);
        assert_ne!(key(&[b"ab", b"c"]), key(&[b"a", b"bc"]));
    }
}
