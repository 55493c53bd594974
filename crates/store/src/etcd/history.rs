//! Whether etcd still is the one that it was. An etcd that was emptied, or restored from a snapshot, begins another
//! history under the same address: what was cached of the first is a ghost in the second.
//!
//! Within one history neither the revision nor the raft term of consistent answers ever goes back. Either going back,
//! or another cluster id, is the proof. What cannot be told apart is a restored etcd that others have written to until
//! its revision passed the last one that was seen here.

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::proto::ResponseHeader;

#[derive(Default)]
pub struct History {
    /// Leaf lock.
    state: Mutex<State>,
    /// The first history ended.
    broken: Notify,
}

#[derive(Default)]
struct State {
    seen: Seen,
    /// Why this is not the history that it was, until a new one is begun.
    broken: Option<String>,
}

/// The newest of what consistent answers said.
#[derive(Clone, Copy, Default)]
pub struct Seen {
    /// How many histories there were before this one.
    pub era: u64,
    header: ResponseHeader,
}

impl History {
    /// What has been seen so far: to be asked for before a call is sent.
    pub fn seen(&self) -> Seen {
        self.state.lock().seen
    }

    /// A watch has shown this revision.
    pub fn shown(&self, revision: i64) {
        let seen = &mut self.state.lock().seen.header;
        seen.revision = seen.revision.max(revision);
    }

    /// Takes in the header of a consistent answer to a call that was sent after `before` was seen.
    pub fn check(&self, before: &Seen, answer: &ResponseHeader) -> Result<(), String> {
        let mut state = self.state.lock();
        if let Some(why) = &state.broken {
            return Err(why.clone());
        }
        if before.era != state.seen.era {
            return Err("another history began meanwhile".to_owned());
        }
        let Some(why) = differs(&before.header, answer) else {
            let seen = &mut state.seen.header;
            seen.cluster_id = answer.cluster_id;
            seen.revision = seen.revision.max(answer.revision);
            seen.raft_term = seen.raft_term.max(answer.raft_term);
            return Ok(());
        };
        state.broken = Some(why.clone());
        drop(state);
        self.broken.notify_one();
        Err(why)
    }

    /// Why calls cannot be trusted now.
    pub fn broken(&self) -> Option<String> {
        self.state.lock().broken.clone()
    }

    /// Waits until the history is broken.
    pub async fn until_broken(&self) {
        while self.broken().is_none() {
            self.broken.notified().await;
        }
    }

    /// Another history begins with this answer.
    pub fn begin(&self, header: ResponseHeader) {
        let mut state = self.state.lock();
        let era = state.seen.era + 1;
        *state = State {
            seen: Seen { era, header },
            broken: None,
        };
    }
}

fn differs(before: &ResponseHeader, now: &ResponseHeader) -> Option<String> {
    if before.cluster_id != 0 && before.cluster_id != now.cluster_id {
        let (was, is) = (before.cluster_id, now.cluster_id);
        return Some(format!("its cluster id was {was:x} and is {is:x}"));
    }
    if now.revision < before.revision {
        let (was, is) = (before.revision, now.revision);
        return Some(format!("its revision went back from {was} to {is}"));
    }
    if now.raft_term < before.raft_term {
        let (was, is) = (before.raft_term, now.raft_term);
        return Some(format!("its raft term went back from {was} to {is}"));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(cluster_id: u64, revision: i64, raft_term: u64) -> ResponseHeader {
        ResponseHeader {
            cluster_id,
            revision,
            raft_term,
        }
    }

    #[test]
    fn a_history_that_goes_back_is_another_one() {
        let check = |now: ResponseHeader, expected: &str| {
            let history = History::default();
            history.begin(header(1, 10, 3));
            let found = history.check(&history.seen(), &now).err().unwrap_or_default();
            assert_eq!(found, expected);
            assert_eq!(history.broken().unwrap_or_default(), expected);
        };
        check(header(1, 10, 3), "");
        check(header(1, 11, 4), "");
        check(header(2, 11, 3), "its cluster id was 1 and is 2");
        check(header(1, 9, 3), "its revision went back from 10 to 9");
        check(header(1, 11, 2), "its raft term went back from 3 to 2");
        // Two calls at once may be answered in any order.
        let history = History::default();
        let before = history.seen();
        assert!(history.check(&before, &header(1, 12, 3)).is_ok());
        assert!(history.check(&before, &header(1, 11, 3)).is_ok());
        assert_eq!(history.seen().header.revision, 12);
        // Broken until another begins.
        assert!(history.check(&history.seen(), &header(1, 1, 3)).is_err());
        assert!(history.check(&history.seen(), &header(1, 13, 3)).is_err());
        history.begin(header(1, 1, 2));
        assert!(history.check(&history.seen(), &header(1, 2, 2)).is_ok());
    }
}
