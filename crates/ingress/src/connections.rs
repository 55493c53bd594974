//! How many connections there may be, in all and of one client. At the limit the connection that has been idle for
//! longest makes room.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// Connections at a time, if as many files may be open: each may need another one to a backend.
const MAX_CONNECTIONS: usize = 8192;

/// An HTTP/2 connection without a request ends after this.
pub const IDLE: Duration = Duration::from_secs(180);

#[derive(Clone, Debug)]
pub struct ConnectionLimits {
    pub total: usize,
    /// Of one IPv4 address or one IPv6 network of 64 bits.
    pub per_client: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let files = files.current.and_then(|files| usize::try_from(files).ok());
        let total = files.map_or(MAX_CONNECTIONS, |files| (files / 4).clamp(64, MAX_CONNECTIONS));
        ConnectionLimits {
            total,
            per_client: (total / 8).max(64),
        }
    }
}

pub struct Connections {
    limits: ConnectionLimits,
    /// Leaf lock.
    open: Mutex<Open>,
    began: Instant,
}

#[derive(Default)]
struct Open {
    next: u64,
    by_key: HashMap<u64, Arc<Usage>>,
    per_client: HashMap<IpAddr, usize>,
}

/// What one connection does.
pub struct Usage {
    /// Cancelled when the connection shall end.
    pub end: CancellationToken,
    requests: AtomicUsize,
    /// The millisecond, of those of [`Connections`], since which it has no request.
    idle_since: AtomicU64,
    began: Instant,
}

impl Usage {
    /// A request on the connection, until it is dropped.
    pub fn request(self: &Arc<Self>) -> RequestInUse {
        self.requests.fetch_add(1, Ordering::Relaxed);
        RequestInUse(self.clone())
    }

    pub fn is_idle_for(&self, limit: Duration) -> bool {
        let since = Duration::from_millis(self.idle_since.load(Ordering::Relaxed));
        self.requests.load(Ordering::Relaxed) == 0 && self.began.elapsed().saturating_sub(since) >= limit
    }
}

pub struct RequestInUse(Arc<Usage>);

impl Drop for RequestInUse {
    fn drop(&mut self) {
        let usage = &self.0;
        usage
            .idle_since
            .store(milliseconds(usage.began), Ordering::Relaxed);
        usage.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An open connection, until it is dropped.
pub struct Slot {
    pub usage: Arc<Usage>,
    key: u64,
    client: IpAddr,
    connections: Arc<Connections>,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Slot").field(&self.client).finish()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut open = self.connections.open.lock();
        open.by_key.remove(&self.key);
        if let Some(count) = open.per_client.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                open.per_client.remove(&self.client);
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    TooMany,
    TooManyOfClient,
}

impl Connections {
    pub fn new(limits: ConnectionLimits) -> Arc<Connections> {
        Arc::new(Connections {
            limits,
            open: Mutex::default(),
            began: Instant::now(),
        })
    }

    pub fn len(&self) -> usize {
        self.open.lock().by_key.len()
    }

    /// A place for a new connection. One that is told to end counts until it has.
    pub fn admit(self: &Arc<Self>, address: IpAddr) -> Result<Slot, Refused> {
        let client = client_of(address);
        let mut open = self.open.lock();
        if open.per_client.get(&client).copied().unwrap_or(0) >= self.limits.per_client {
            return Err(Refused::TooManyOfClient);
        }
        if open.by_key.len() >= self.limits.total {
            let idle = open
                .by_key
                .values()
                .filter(|usage| usage.requests.load(Ordering::Relaxed) == 0 && !usage.end.is_cancelled())
                .min_by_key(|usage| usage.idle_since.load(Ordering::Relaxed));
            // The next one finds its place; a few more than the limit may be open meanwhile.
            match idle {
                Some(usage) if open.by_key.len() < self.limits.total + self.limits.total / 8 => {
                    usage.end.cancel();
                }
                _ => return Err(Refused::TooMany),
            }
        }
        let usage = Arc::new(Usage {
            end: CancellationToken::new(),
            requests: AtomicUsize::new(0),
            idle_since: AtomicU64::new(milliseconds(self.began)),
            began: self.began,
        });
        open.next += 1;
        let key = open.next;
        open.by_key.insert(key, usage.clone());
        *open.per_client.entry(client).or_default() += 1;
        Ok(Slot {
            usage,
            key,
            client,
            connections: self.clone(),
        })
    }
}

fn milliseconds(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Whoever has one IPv6 address has its whole network.
fn client_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(total: usize, per_client: usize) -> Arc<Connections> {
        Connections::new(ConnectionLimits { total, per_client })
    }

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn one_client_has_so_many() {
        let connections = connections(100, 2);
        let held: Vec<_> = ["fd00::1", "fd00::2"]
            .map(|text| connections.admit(address(text)).expect("room"))
            .into();
        assert_eq!(
            connections.admit(address("fd00::3")).err(),
            Some(Refused::TooManyOfClient)
        );
        assert!(connections.admit(address("fd00:0:0:1::1")).is_ok());
        drop(held);
        assert!(connections.admit(address("fd00::3")).is_ok());
        assert_eq!(connections.len(), 0);
    }

    #[test]
    fn the_idlest_connection_makes_room() {
        let connections = connections(2, 100);
        let first = connections.admit(address("10.0.0.1")).expect("room");
        let second = connections.admit(address("10.0.0.1")).expect("room");
        let busy = first.usage.request();
        assert_eq!(
            connections.admit(address("10.0.0.1")).err(),
            Some(Refused::TooMany),
            "no room is made beyond the limit's eighth"
        );
        assert!(!first.usage.end.is_cancelled());
        drop((busy, second));
        let larger = self::connections(16, 100);
        let all: Vec<_> = (0..16)
            .filter_map(|_| larger.admit(address("10.0.0.1")).ok())
            .collect();
        let _busy = all[0].usage.request();
        assert!(larger.admit(address("10.0.0.1")).is_ok());
        let ended = all.iter().filter(|slot| slot.usage.end.is_cancelled()).count();
        assert_eq!((ended, all[0].usage.end.is_cancelled()), (1, false));
    }
}
