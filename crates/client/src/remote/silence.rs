//! Notices a server that is silent, not dead: its machine lost power or its cable, or its process hangs. TCP would not
//! tell for minutes.
//!
//! Where there are several servers, connections are pinged so often that a living server is never silent for
//! [`PATIENCE`]. One that is gets probed, beside all others, with a new connection. If any of them answers before the silent
//! connection does, that connection is closed: whatever was open on it fails, and its callers go on at the server that
//! answered. If none answers, the trouble is most likely ours, and nothing is changed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{ServerAddress, Servers};

/// Connections are pinged this often where there is another server to go to.
pub(super) const PING_INTERVAL: Duration = Duration::from_millis(400);
/// A connection on which nothing came for so long is silent. Each change of servers doubles it, up to
/// [`LONGEST_PATIENCE`], so that a network that loses packets does not send clients to and fro; a calm minute restores it.
const PATIENCE: Duration = Duration::from_millis(650);
const LONGEST_PATIENCE: Duration = Duration::from_secs(5);
const CALM: Duration = Duration::from_secs(60);

/// When a connection was last heard, and whether it is to be closed.
pub(super) struct Pulse {
    opened: Instant,
    /// Milliseconds since `opened`.
    heard: AtomicU64,
    pub(super) closed: CancellationToken,
}

impl Pulse {
    pub(super) fn new(closed: CancellationToken) -> Arc<Pulse> {
        Arc::new(Pulse {
            opened: Instant::now(),
            heard: AtomicU64::new(0),
            closed,
        })
    }

    pub(super) fn hear(&self) {
        let now = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard.store(now, Ordering::Relaxed);
    }

    fn silent_for(&self) -> Duration {
        let heard = Duration::from_millis(self.heard.load(Ordering::Relaxed));
        self.opened.elapsed().saturating_sub(heard)
    }
}

/// How often servers were changed lately. A leaf lock.
#[derive(Default)]
pub(super) struct Changes(Mutex<Option<(Instant, Duration)>>);

impl Changes {
    fn patience(&self) -> Duration {
        match *self.0.lock() {
            Some((changed, patience)) if changed.elapsed() < CALM => patience,
            _ => PATIENCE,
        }
    }

    fn count(&self) {
        let patience = self.patience() * 2;
        *self.0.lock() = Some((Instant::now(), patience.min(LONGEST_PATIENCE)));
    }
}

/// Watches one connection until it is gone.
pub(super) async fn watch(servers: Weak<Servers>, server: ServerAddress, pulse: Weak<Pulse>) {
    loop {
        let (Some(all), Some(one)) = (servers.upgrade(), pulse.upgrade()) else {
            return;
        };
        let patience = all.changes.patience();
        let mut wait = patience.saturating_sub(one.silent_for());
        if wait.is_zero() {
            let answered = tokio::time::timeout(LONGEST_PATIENCE, probe(&all)).await;
            // It may have spoken meanwhile, or we may not have listened.
            if let Ok(Some(place)) = answered
                && one.silent_for() >= patience
            {
                let next = all.prefer(place);
                tracing::warn!(%server, next, silent_for = ?one.silent_for(), "the API server is silent");
                all.changes.count();
                one.closed.cancel();
                return;
            }
            wait = PING_INTERVAL;
        }
        drop((all, one));
        tokio::time::sleep(wait).await;
    }
}

/// Connects to all servers at once; the place of the first that answers.
async fn probe(servers: &Servers) -> Option<usize> {
    let list = servers.list.read().clone();
    let mut attempts: FuturesUnordered<_> = list
        .iter()
        .enumerate()
        .map(|(place, server)| async move { (place, servers.connect_to(server).await) })
        .collect();
    while let Some((place, attempt)) = attempts.next().await {
        if attempt.is_ok() {
            return Some(place);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn patience_grows_with_each_change_and_returns() {
        let changes = Changes::default();
        assert_eq!(changes.patience(), PATIENCE);
        changes.count();
        assert_eq!(changes.patience(), PATIENCE * 2);
        changes.count();
        changes.count();
        changes.count();
        assert_eq!(changes.patience(), LONGEST_PATIENCE);
        tokio::time::advance(CALM).await;
        assert_eq!(changes.patience(), PATIENCE);
    }
}
