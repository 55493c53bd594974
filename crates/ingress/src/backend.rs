//! A backend: a port of a Service, and the endpoints that answer for it. Endpoints come and go under the requests that
//! are on their way: whoever chose one keeps it.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use crate::features::backend_tls::BackendTls;
use crate::http1::Http1Pool;
use crate::upstream::Http2Slot;

/// How long a new endpoint gets less than its share. Its first requests may have caches to fill.
const SLOW_START: Duration = Duration::from_secs(10);
/// What it gets at the beginning, of its share.
const FIRST_SHARE: f64 = 0.1;
/// Requests that may be on their way to one backend: one that does not answer leaves room for the others.
pub const MAX_REQUESTS: usize = 4096;

/// The namespace and name of a Service, and the name of its port; or its number, where that has no name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BackendKey {
    pub namespace: String,
    pub service: String,
    pub port: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    Http1,
    /// HTTP/2 from the first byte, for gRPC.
    Http2,
}

/// How endpoints are spoken to.
#[derive(Clone, Debug)]
pub struct Transport {
    pub protocol: Protocol,
    pub tls: Option<Arc<BackendTls>>,
}

impl From<Protocol> for Transport {
    fn from(protocol: Protocol) -> Transport {
        Transport { protocol, tls: None }
    }
}

#[derive(Debug)]
pub struct Endpoint {
    pub address: SocketAddr,
    pub tls: Option<Arc<BackendTls>>,
    /// Since when it is ready; `None` for those that were there at the start.
    since: Option<Instant>,
    pub http1: Http1Pool,
    pub http2: Http2Slot,
}

impl Endpoint {
    /// What it gets of its share, 0 to 1.
    fn share(&self, now: Instant) -> f64 {
        let Some(since) = self.since else { return 1.0 };
        let age = now.saturating_duration_since(since).as_secs_f64() / SLOW_START.as_secs_f64();
        age.clamp(FIRST_SHARE, 1.0)
    }
}

#[derive(Debug)]
pub struct Backend {
    pub key: BackendKey,
    pub protocol: Protocol,
    pub tls: Option<Arc<BackendTls>>,
    endpoints: ArcSwap<Vec<Arc<Endpoint>>>,
    turn: AtomicUsize,
    requests: AtomicUsize,
}

impl Backend {
    fn new(key: BackendKey, transport: Transport) -> Backend {
        Backend {
            key,
            protocol: transport.protocol,
            tls: transport.tls,
            endpoints: ArcSwap::default(),
            turn: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
        }
    }

    /// Makes the endpoints those. Who stays keeps its connections and its age.
    fn set(&self, addresses: &[SocketAddr], since: Option<Instant>) {
        let old = self.endpoints.load();
        let same = |endpoint: &Arc<Endpoint>, address: &SocketAddr| endpoint.address == *address;
        if old.len() == addresses.len() && old.iter().zip(addresses).all(|(a, b)| same(a, b)) {
            return;
        }
        let by_address: HashMap<SocketAddr, &Arc<Endpoint>> =
            old.iter().map(|endpoint| (endpoint.address, endpoint)).collect();
        let make = |address: &SocketAddr| match by_address.get(address) {
            Some(endpoint) => Arc::clone(endpoint),
            None => Arc::new(Endpoint {
                address: *address,
                tls: self.tls.clone(),
                since,
                http1: Http1Pool::default(),
                http2: Http2Slot::default(),
            }),
        };
        self.endpoints
            .store(Arc::new(addresses.iter().map(make).collect()));
    }

    /// The next endpoint, in turn, that is not among those that were tried. New ones are passed over now and then.
    pub fn pick(&self, tried: &[SocketAddr], chance: f64, now: Instant) -> Option<Arc<Endpoint>> {
        let endpoints = self.endpoints.load();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let count = endpoints.len();
        let in_turn = (0..count).filter_map(|n| endpoints.get(turn.wrapping_add(n) % count));
        let mut left = in_turn.filter(|endpoint| !tried.contains(&endpoint.address));
        let first = left.next()?;
        if first.share(now) > chance {
            return Some(first.clone());
        }
        let warm = left.find(|endpoint| endpoint.share(now) > chance);
        Some(warm.unwrap_or(first).clone())
    }

    /// The endpoint of this address, if it is still there.
    pub fn get(&self, address: SocketAddr) -> Option<Arc<Endpoint>> {
        let endpoints = self.endpoints.load();
        endpoints
            .iter()
            .find(|endpoint| endpoint.address == address)
            .cloned()
    }

    /// The first endpoint whose address is one that is looked for.
    pub fn find(&self, is_wanted: impl Fn(SocketAddr) -> bool) -> Option<SocketAddr> {
        let endpoints = self.endpoints.load();
        let mut addresses = endpoints.iter().map(|endpoint| endpoint.address);
        addresses.find(|address| is_wanted(*address))
    }

    pub fn transport(&self) -> Transport {
        Transport {
            protocol: self.protocol,
            tls: self.tls.clone(),
        }
    }

    /// A place among the requests of this backend; `None` if it has too many.
    pub fn enter(self: &Arc<Self>) -> Option<Entered> {
        let entered = Entered(self.clone());
        // Counted before it is checked, and given back by the drop.
        (self.requests.fetch_add(1, Ordering::Relaxed) < MAX_REQUESTS).then_some(entered)
    }
}

/// One request that is on its way to a backend.
pub struct Entered(Arc<Backend>);

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// All backends that some route names. They outlive the tables that name them.
#[derive(Default)]
pub struct Backends {
    /// Two Ingresses may want to speak differently to one port.
    by_key: BTreeMap<(BackendKey, Protocol, Option<String>), Arc<Backend>>,
    /// Set after the first table: endpoints that come later start slowly.
    warm: bool,
}

impl Backends {
    /// The backend of this key and transport, with these endpoints.
    pub fn put(
        &mut self,
        key: BackendKey,
        transport: impl Into<Transport>,
        addresses: &[SocketAddr],
        now: Instant,
    ) -> Arc<Backend> {
        let transport: Transport = transport.into();
        let tls = transport.tls.as_ref().map(|tls| tls.id.clone());
        let backend = self
            .by_key
            .entry((key.clone(), transport.protocol, tls))
            .or_insert_with(|| Arc::new(Backend::new(key, transport)))
            .clone();
        backend.set(addresses, self.warm.then_some(now));
        backend
    }

    pub fn of_service(&self, namespace: &str, service: &str) -> Vec<Arc<Backend>> {
        let first = BackendKey {
            namespace: namespace.to_owned(),
            service: service.to_owned(),
            port: String::new(),
        };
        let after = self.by_key.range((first, Protocol::Http1, None)..);
        after
            .take_while(|((key, ..), _)| key.namespace == namespace && key.service == service)
            .map(|(_, backend)| backend.clone())
            .collect()
    }

    /// Forgets those that no route names any more.
    pub fn keep_used(&mut self) {
        self.by_key.retain(|_, backend| Arc::strong_count(backend) > 1);
        self.warm = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(n: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, n], 80))
    }

    fn key() -> BackendKey {
        BackendKey {
            namespace: "d".into(),
            service: "s".into(),
            port: "http".into(),
        }
    }

    #[test]
    fn endpoints_take_turns_and_those_that_failed_are_passed_over() {
        let mut backends = Backends::default();
        let now = Instant::now();
        let all = [address(1), address(2), address(3)];
        let backend = backends.put(key(), Protocol::Http1, &all, now);
        let pick = |tried: &[SocketAddr]| backend.pick(tried, 0.99, now).map(|e| e.address);
        let mut seen: Vec<_> = (0..3).filter_map(|_| pick(&[])).collect();
        seen.sort();
        assert_eq!(seen, all);
        assert_eq!(pick(&all[..2]), Some(address(3)));
        assert_eq!(pick(&all), None);
    }

    #[test]
    fn a_new_endpoint_starts_slowly_unless_it_is_alone() {
        let mut backends = Backends::default();
        let now = Instant::now();
        backends.put(key(), Protocol::Http1, &[address(1)], now);
        backends.warm = true;
        let backend = backends.put(key(), Protocol::Http1, &[address(1), address(2)], now);
        let picked = |chance: f64, now: Instant| -> Vec<SocketAddr> {
            let mut all: Vec<_> = (0..2)
                .filter_map(|_| backend.pick(&[], chance, now).map(|e| e.address))
                .collect();
            all.sort();
            all
        };
        assert_eq!(picked(0.5, now), [address(1), address(1)]);
        assert_eq!(picked(0.05, now), [address(1), address(2)]);
        assert_eq!(picked(0.99, now + SLOW_START), [address(1), address(2)]);
        backends.put(key(), Protocol::Http1, &[address(2)], now);
        assert_eq!(picked(0.99, now), [address(2), address(2)]);
    }

    #[test]
    fn a_backend_takes_so_many_requests() {
        let backend = Backends::default().put(key(), Protocol::Http1, &[], Instant::now());
        let held: Vec<_> = (0..MAX_REQUESTS).filter_map(|_| backend.enter()).collect();
        assert_eq!(held.len(), MAX_REQUESTS);
        assert!(backend.enter().is_none());
        drop(held);
        assert!(backend.enter().is_some());
    }

    #[test]
    fn backends_outlive_tables_but_not_their_use() {
        let mut backends = Backends::default();
        let now = Instant::now();
        let kept = backends.put(key(), Protocol::Http1, &[address(1)], now);
        backends.keep_used();
        let other = backends.put(key(), Protocol::Http2, &[address(1)], now);
        assert_eq!(backends.of_service("d", "s").len(), 2);
        drop(other);
        assert!(backends.of_service("d", "").is_empty());
        let again = backends.put(key(), Protocol::Http1, &[address(1)], now);
        assert!(Arc::ptr_eq(&kept, &again));
        drop((kept, again));
        backends.keep_used();
        assert!(backends.of_service("d", "s").is_empty());
    }
}
