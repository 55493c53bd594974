//! How much one client may ask of an Ingress: requests at a time, and requests in a time (a leaky bucket, as nginx has
//! it). What is remembered is bounded: the clients that were seen last.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use skiff_meta::net::Cidr;

use super::ranges::{any_contains, networks};
use super::values::{Values, positive};

/// Clients that one Ingress remembers are at most twice as many.
const GENERATION: usize = 32 * 1024;
const BURST: u32 = 5;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct LimitSpec {
    /// At a time.
    connections: Option<u32>,
    /// A second, and how many more may come at once.
    rates: Vec<(f64, f64)>,
    /// Who is not limited.
    exempt: Vec<Cidr>,
}

impl LimitSpec {
    pub fn read(values: &mut Values<'_>) -> Option<LimitSpec> {
        // 0 is no limit.
        let mut limit = |name: &str| {
            let limit = values.read(name, |text| {
                text.parse::<u32>()
                    .map_err(|_| "its value must be a whole number")
            });
            limit.filter(|limit| *limit > 0)
        };
        let (connections, minute, second) =
            (limit("limit-connections"), limit("limit-rpm"), limit("limit-rps"));
        let multiplier = values.read("limit-burst-multiplier", positive).unwrap_or(BURST);
        let exempt = values.read("limit-whitelist", networks).unwrap_or_default();
        let rate = |limit: u32, seconds: f64| {
            let limit = f64::from(limit);
            (limit / seconds, limit * f64::from(multiplier))
        };
        let minute = minute.map(|limit| rate(limit, 60.0));
        let second = second.map(|limit| rate(limit, 1.0));
        let spec = LimitSpec {
            connections,
            rates: minute.into_iter().chain(second).collect(),
            exempt,
        };
        (spec.connections.is_some() || !spec.rates.is_empty()).then_some(spec)
    }
}

/// What is remembered of a client: by how many requests each rate is exceeded, at a time.
#[derive(Clone, Copy)]
struct Bucket {
    excess: [f64; 2],
    at: Instant,
}

#[derive(Default)]
struct State {
    active: HashMap<IpAddr, u32>,
    buckets: HashMap<IpAddr, Bucket>,
    /// Those that were not seen since `buckets` was emptied.
    old: HashMap<IpAddr, Bucket>,
}

pub struct Limits {
    pub spec: LimitSpec,
    state: Mutex<State>,
}

impl std::fmt::Debug for Limits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.spec.fmt(f)
    }
}

/// A request that counts among those of its client until it is dropped.
pub struct Active {
    limits: Arc<Limits>,
    client: IpAddr,
}

impl Drop for Active {
    fn drop(&mut self) {
        let mut state = self.limits.state.lock();
        if let Some(count) = state.active.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                state.active.remove(&self.client);
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct Exceeded;

impl Limits {
    pub fn new(spec: LimitSpec) -> Limits {
        Limits {
            spec,
            state: Mutex::default(),
        }
    }

    /// A request of this client, now.
    pub fn enter(self: &Arc<Self>, address: IpAddr, now: Instant) -> Result<Option<Active>, Exceeded> {
        if any_contains(&self.spec.exempt, address) {
            return Ok(None);
        }
        let client = client(address);
        let mut state = self.state.lock();
        if let Some(limit) = self.spec.connections
            && state.active.get(&client).is_some_and(|count| *count >= limit)
        {
            return Err(Exceeded);
        }
        if !self.spec.rates.is_empty() {
            state.take(client, &self.spec.rates, now)?;
        }
        if self.spec.connections.is_none() {
            return Ok(None);
        }
        *state.active.entry(client).or_default() += 1;
        Ok(Some(Active {
            limits: self.clone(),
            client,
        }))
    }
}

impl State {
    fn take(&mut self, client: IpAddr, rates: &[(f64, f64)], now: Instant) -> Result<(), Exceeded> {
        let known = self.buckets.get(&client).or_else(|| self.old.get(&client));
        let mut bucket = Bucket {
            excess: [0.0; 2],
            at: now,
        };
        if let Some(known) = known {
            let elapsed = now.saturating_duration_since(known.at).as_secs_f64();
            for (place, (rate, burst)) in rates.iter().enumerate().take(bucket.excess.len()) {
                let excess = (known.excess[place] - elapsed * rate + 1.0).max(0.0);
                if excess > *burst {
                    return Err(Exceeded);
                }
                bucket.excess[place] = excess;
            }
        }
        if self.buckets.len() >= GENERATION && !self.buckets.contains_key(&client) {
            self.old = std::mem::take(&mut self.buckets);
        }
        self.buckets.insert(client, bucket);
        Ok(())
    }
}

/// One IPv4 address, or the network of an IPv6 address that one client has whole.
fn client(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn limits(connections: Option<u32>, rates: &[(f64, f64)]) -> Arc<Limits> {
        Arc::new(Limits::new(LimitSpec {
            connections,
            rates: rates.to_vec(),
            exempt: vec!["192.0.2.0/24".parse().expect("a network")],
        }))
    }

    #[test]
    fn a_burst_passes_and_then_the_rate() {
        let limits = limits(None, &[(1.0, 5.0)]);
        let (start, one) = (Instant::now(), IpAddr::from([10, 0, 0, 1]));
        let passed = |address: IpAddr, at: Instant, count: usize| {
            (0..count).filter(|_| limits.enter(address, at).is_ok()).count()
        };
        assert_eq!(passed(one, start, 20), 6);
        assert_eq!(passed([10, 0, 0, 2].into(), start, 20), 6);
        assert_eq!(passed([192, 0, 2, 1].into(), start, 20), 20);
        assert_eq!(passed(one, start + Duration::from_secs(2), 20), 2);
        assert_eq!(passed(one, start + Duration::from_secs(60), 20), 6);
    }

    #[test]
    fn so_many_requests_at_a_time() {
        let limits = limits(Some(2), &[]);
        let (now, one) = (Instant::now(), "fd00::1".parse().expect("an address"));
        let held: Vec<_> = (0..5).filter_map(|_| limits.enter(one, now).ok()).collect();
        assert_eq!(held.len(), 2);
        // Of the same network.
        assert_eq!(
            limits.enter("fd00::2".parse().expect("an address"), now).err(),
            Some(Exceeded)
        );
        drop(held);
        assert!(limits.enter(one, now).is_ok_and(|active| active.is_some()));
        assert!(limits.state.lock().active.is_empty());
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let limits = limits(None, &[(1.0, 1.0)]);
        let now = Instant::now();
        for number in 0..200_000u32 {
            let _ = limits.enter(IpAddr::from(number.to_be_bytes()), now);
        }
        let state = limits.state.lock();
        assert!(state.buckets.len() + state.old.len() <= 2 * GENERATION);
    }
}
