//! The pace of writers: a key whose reconciles write again and again is slowed down.
//!
//! A controller comes to rest when what it wrote is what it wanted. Where somebody changes that each time (an admission
//! webhook, another controller that wants something else), every write would wake the next one, as fast as the server
//! answers. A key may write in [`BURST`] reconciles without a pause; after that in ten a second: more than what makes progress needs
//! (an ordered StatefulSet starts three pods a second with that), and little enough for a server. Errors are not counted
//! here: they have a back-off of their own.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// More than any change that ends takes of one key: a rollout, or a scaling by hundreds of pods.
const BURST: f64 = 100.0;
const PER_SECOND: f64 = 10.0;
/// Keys at rest are forgotten when this many are known.
const FIRST_SWEEP: usize = 1024;

struct Allowance {
    left: f64,
    at: Instant,
    /// The log says it once for each time that a key is slowed down.
    told: bool,
}

impl Allowance {
    fn refill(&mut self, now: Instant) {
        let gained = now.duration_since(self.at).as_secs_f64() * PER_SECOND;
        self.left = (self.left + gained).min(BURST);
        self.at = now;
    }

    fn is_full(&self, now: Instant) -> bool {
        self.left + now.duration_since(self.at).as_secs_f64() * PER_SECOND >= BURST
    }
}

struct State<T> {
    allowances: HashMap<T, Allowance>,
    sweep_at: usize,
}

/// What each key of a controller may still write at once.
pub(crate) struct Pace<T> {
    /// A leaf lock.
    state: Mutex<State<T>>,
}

impl<T> Default for Pace<T> {
    fn default() -> Self {
        Pace {
            state: Mutex::new(State {
                allowances: HashMap::new(),
                sweep_at: FIRST_SWEEP,
            }),
        }
    }
}

impl<T: Clone + Debug + Eq + Hash> Pace<T> {
    /// A reconcile of `item` wrote: how long the next one has to wait.
    pub(crate) fn wrote(&self, controller: &str, item: &T) -> Duration {
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.allowances.len() >= state.sweep_at {
            state.allowances.retain(|_, allowance| !allowance.is_full(now));
            state.allowances.shrink_to(FIRST_SWEEP);
            state.sweep_at = FIRST_SWEEP.max(state.allowances.len() * 2);
        }
        let allowance = state.allowances.entry(item.clone()).or_insert(Allowance {
            left: BURST,
            at: now,
            told: false,
        });
        allowance.refill(now);
        if allowance.left >= BURST {
            allowance.told = false;
        }
        allowance.left -= 1.0;
        if allowance.left >= 0.0 {
            return Duration::ZERO;
        }
        if !allowance.told {
            allowance.told = true;
            tracing::warn!(
                controller,
                ?item,
                "slowed down: it writes again and again; something may change what it writes"
            );
        }
        Duration::from_secs_f64(-allowance.left / PER_SECOND)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_key_that_writes_on_is_slowed_down_and_recovers() {
        let pace = Pace::default();
        for _ in 0..BURST as usize {
            assert_eq!(pace.wrote("test", &"a"), Duration::ZERO);
        }
        for _ in 0..3 {
            let wait = pace.wrote("test", &"a");
            assert_eq!(wait, Duration::from_millis(100));
            tokio::time::advance(wait).await;
        }
        assert_eq!(pace.wrote("test", &"b"), Duration::ZERO, "others are not held up");
        tokio::time::advance(Duration::from_secs(1)).await;
        for _ in 0..10 {
            assert_eq!(pace.wrote("test", &"a"), Duration::ZERO);
        }
        assert!(pace.wrote("test", &"a") > Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn keys_at_rest_are_forgotten() {
        let pace = Pace::default();
        for key in 0..FIRST_SWEEP {
            pace.wrote("test", &key);
        }
        tokio::time::advance(Duration::from_secs(5)).await;
        pace.wrote("test", &0);
        assert_eq!(pace.state.lock().allowances.len(), 1);
    }
}
