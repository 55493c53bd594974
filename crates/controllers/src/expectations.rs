//! Expectations: how many creations and deletions an owner has asked for that its informer has not shown
//! yet. While some are open, the local copy is known to be behind, and acting on it would act twice.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use parking_lot::Mutex;
use skiff_client::Key;
use tokio::time::Instant;

/// A watch event can be lost with its object (created and deleted between two lists); after this long the
/// copy is trusted again.
const EXPIRES: Duration = Duration::from_secs(300);

struct Open {
    creations: usize,
    /// By uid: the same deletion is seen several times.
    deletions: HashSet<String>,
    since: Instant,
}

#[derive(Default)]
pub(crate) struct Expectations {
    open: Mutex<HashMap<Key, Open>>,
}

impl Expectations {
    /// True if everything that was asked for has been seen.
    pub(crate) fn satisfied(&self, owner: &Key) -> bool {
        self.open.lock().get(owner).is_none_or(|open| {
            (open.creations == 0 && open.deletions.is_empty()) || open.since.elapsed() > EXPIRES
        })
    }

    pub(crate) fn expect_creations(&self, owner: &Key, count: usize) {
        let open = Open {
            creations: count,
            deletions: HashSet::new(),
            since: Instant::now(),
        };
        self.open.lock().insert(owner.clone(), open);
    }

    pub(crate) fn expect_deletions(&self, owner: &Key, uids: impl IntoIterator<Item = String>) {
        let open = Open {
            creations: 0,
            deletions: uids.into_iter().collect(),
            since: Instant::now(),
        };
        self.open.lock().insert(owner.clone(), open);
    }

    /// Seen, or known not to come because the request failed.
    pub(crate) fn creation_observed(&self, owner: &Key) {
        if let Some(open) = self.open.lock().get_mut(owner) {
            open.creations = open.creations.saturating_sub(1);
        }
    }

    pub(crate) fn deletion_observed(&self, owner: &Key, uid: &str) {
        if let Some(open) = self.open.lock().get_mut(owner) {
            open.deletions.remove(uid);
        }
    }

    pub(crate) fn forget(&self, owner: &Key) {
        self.open.lock().remove(owner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lagging_copy_is_not_acted_on() {
        let expectations = Expectations::default();
        let key = Key::new("a", "b");
        assert!(expectations.satisfied(&key));
        expectations.expect_creations(&key, 2);
        expectations.creation_observed(&key);
        assert!(!expectations.satisfied(&key));
        expectations.creation_observed(&key);
        expectations.creation_observed(&key);
        assert!(expectations.satisfied(&key));
        expectations.expect_deletions(&key, ["x".to_owned(), "y".to_owned()]);
        expectations.deletion_observed(&key, "x");
        expectations.deletion_observed(&key, "x");
        assert!(!expectations.satisfied(&key));
        expectations.deletion_observed(&key, "y");
        assert!(expectations.satisfied(&key));
    }
}
