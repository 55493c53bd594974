//! Leases for keys that expire. A lease for each key would be a burden to etcd (every Event has one),
//! so keys written within a short time share one, which lives that much longer.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::client::{Again, Client};
use super::proto::{LeaseGrantRequest, LeaseGrantResponse};

/// The longest time in which keys share a lease.
const SHARED: i64 = 60;
/// The most keys of a lease; they all go in one moment.
const KEYS: usize = 1000;

#[derive(Default)]
pub struct Leases {
    by_ttl: Mutex<HashMap<i64, Lease>>,
}

struct Lease {
    id: i64,
    granted: Instant,
    keys: usize,
}

/// For how long a lease of `ttl` seconds is handed out: not more than a twentieth of it.
fn window(ttl: i64) -> i64 {
    (ttl / 20).min(SHARED)
}

impl Leases {
    /// A lease that lives at least `ttl` seconds from now.
    pub async fn get(&self, client: &Client, ttl: i64) -> Result<i64, tonic::Status> {
        let ttl = ttl.max(1);
        let window = window(ttl);
        let fresh = Duration::from_secs(window.unsigned_abs());
        if let Some(lease) = self.by_ttl.lock().get_mut(&ttl)
            && lease.keys < KEYS
            && lease.granted.elapsed() < fresh
        {
            lease.keys += 1;
            return Ok(lease.id);
        }
        let granted = Instant::now();
        let request = LeaseGrantRequest { ttl: ttl + window };
        let answer: LeaseGrantResponse = client
            .call("/etcdserverpb.Lease/LeaseGrant", request, Again::Yes)
            .await?;
        self.by_ttl.lock().insert(
            ttl,
            Lease {
                id: answer.id,
                granted,
                keys: 1,
            },
        );
        Ok(answer.id)
    }

    /// Etcd does not know this lease any more.
    pub fn forget(&self, id: i64) {
        self.by_ttl.lock().retain(|_, lease| lease.id != id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sharing_does_not_stretch_a_lease_much() {
        let check = |ttl, expected| assert_eq!(window(ttl), expected, "{ttl}");
        check(1, 0);
        check(19, 0);
        check(100, 5);
        check(3600, 60);
    }
}
