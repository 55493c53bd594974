//! What one client may have of what is limited: questions a second, questions that wait, connections. Pods are not trusted
//! to be moderate.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// How much each peer has of something that is limited.
#[derive(Clone)]
pub(crate) struct Peers {
    limit: usize,
    /// A leaf lock.
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

impl Peers {
    pub(crate) fn new(limit: usize) -> Peers {
        Peers {
            limit,
            counts: Arc::default(),
        }
    }

    /// One more for a peer, if it may have it.
    pub(crate) fn take(&self, peer: IpAddr) -> Option<Turn> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(peer).or_default();
        if *count >= self.limit {
            return None;
        }
        *count += 1;
        Some(Turn {
            peers: self.clone(),
            peer,
        })
    }
}

/// One of what a peer may have, until it is dropped.
pub(crate) struct Turn {
    peers: Peers,
    peer: IpAddr,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut counts = self.peers.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.peer);
            }
        }
    }
}

/// How many questions each peer sent in a short while. All come through one buffer of the kernel: those of a peer that
/// floods must be thrown away faster than they come, or others' are lost there.
pub(crate) struct Rate {
    limit: u32,
    interval: Duration,
    began: Instant,
    counts: HashMap<IpAddr, u32>,
}

impl Rate {
    pub(crate) fn new(limit: u32, interval: Duration) -> Rate {
        Rate {
            limit,
            interval,
            began: Instant::now(),
            counts: HashMap::new(),
        }
    }

    /// Counts a question; whether it may be worked on.
    pub(crate) fn allows(&mut self, peer: IpAddr) -> bool {
        if self.began.elapsed() >= self.interval {
            self.began = Instant::now();
            self.counts.clear();
        }
        let count = self.counts.entry(peer).or_default();
        *count += 1;
        *count <= self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_does_not_take_the_room_of_others() {
        let (peers, one, other) = (
            Peers::new(2),
            IpAddr::from([10, 0, 0, 1]),
            IpAddr::from([10, 0, 0, 2]),
        );
        let turns = [peers.take(one), peers.take(one)];
        assert!(turns.iter().all(Option::is_some));
        assert!(peers.take(one).is_none() && peers.take(other).is_some());
        drop(turns);
        assert!(peers.take(one).is_some());
        assert!(peers.counts.lock().unwrap().is_empty(), "peers are forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_is_cut_off_until_the_next_interval() {
        let mut rate = Rate::new(3, Duration::from_millis(100));
        let (one, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let allowed = (0..10).filter(|_| rate.allows(one)).count();
        assert_eq!((allowed, rate.allows(other)), (3, true));
        tokio::time::advance(Duration::from_millis(100)).await;
        assert!(rate.allows(one));
        assert_eq!(rate.counts.len(), 1, "peers are forgotten");
    }
}
