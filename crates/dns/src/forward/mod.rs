//! The plugin `forward`: questions about the rest of the world go to resolvers. It chooses one that is well, asks another
//! if that fails, and asks the same question once however many clients have it.

mod upstream;

pub(crate) use upstream::{Asked, OWN_PAYLOAD};

use crate::cache::{Cache, Key, Storing};
use crate::corefile::{ForwardConfig, Policy, Upstreams};
use crate::metrics::Metrics;
use crate::names::longest;
use crate::wire::Forwarded;
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::{DNSClass, Name, RecordType};
use rustls::pki_types::ServerName;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use thiserror::Error;
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsConnector;
use upstream::Upstream;

/// Questions that wait for resolvers at once, where a Corefile allows more or says nothing.
const MAX_CONCURRENT: usize = 1000;
/// How often all resolvers are gone through.
const ROUNDS: usize = 2;
/// Questions of our own under way that look for a loop.
const MAX_LOOP_PROBES: usize = 256;

/// The resolvers of a `resolv.conf`.
pub fn nameservers(resolv_conf: &str) -> Vec<SocketAddr> {
    resolv_conf
        .lines()
        .filter_map(|line| line.trim().strip_prefix("nameserver"))
        .filter_map(|rest| rest.trim().split('%').next()?.parse::<IpAddr>().ok())
        .map(|ip| SocketAddr::new(ip, 53))
        .collect()
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum ForwardError {
    #[error("concurrent queries exceeded maximum {0}")]
    Busy(usize),
    #[error("no healthy proxies")]
    NoUpstream,
    #[error("{0}")]
    Failed(String),
}

type Outcome = Result<Arc<Forwarded>, ForwardError>;
type Pending = HashMap<Key, watch::Receiver<Option<Outcome>>>;

pub(crate) struct Forward {
    pub(crate) config: Arc<ForwardConfig>,
    tls: Option<TlsConnector>,
    /// Those in use. A leaf lock.
    upstreams: RwLock<Arc<Vec<Arc<Upstream>>>>,
    /// Our own addresses, which are never asked.
    own: Vec<IpAddr>,
    turn: AtomicUsize,
    limit: usize,
    slots: Arc<Semaphore>,
    /// A leaf lock.
    pending: Mutex<Pending>,
    metrics: Arc<Metrics>,
}

impl Forward {
    pub(crate) fn new(
        config: ForwardConfig,
        resolv_conf: &str,
        own: Vec<IpAddr>,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Forward>, String> {
        let secure = config
            .to
            .iter()
            .any(|to| matches!(to, Upstreams::Address { tls: true, .. }));
        let tls = match secure {
            true => Some(TlsConnector::from(skiff_https::trusting(
                config.tls_ca.as_deref(),
            )?)),
            false => None,
        };
        let limit = config
            .max_concurrent
            .unwrap_or(MAX_CONCURRENT)
            .min(MAX_CONCURRENT);
        let forward = Forward {
            config: Arc::new(config),
            tls,
            upstreams: RwLock::default(),
            own,
            turn: AtomicUsize::new(0),
            limit,
            slots: Arc::new(Semaphore::new(limit)),
            pending: Mutex::default(),
            metrics,
        };
        forward.refresh(resolv_conf)?;
        Ok(Arc::new(forward))
    }

    /// Whether it is asked about this name, which is in lower case.
    pub(crate) fn covers(&self, lower: &Name) -> bool {
        let config = &self.config;
        config.from.zone_of_case(lower) && (config.from == *lower || longest(&config.except, lower).is_none())
    }

    fn current(&self) -> Arc<Vec<Arc<Upstream>>> {
        self.upstreams
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        self.current().iter().map(|upstream| upstream.address).collect()
    }

    /// Reads the list of resolvers again; whether it has changed. Those that stay keep their state.
    pub(crate) fn refresh(&self, resolv_conf: &str) -> Result<bool, String> {
        let mut wanted: Vec<(SocketAddr, Option<ServerName<'static>>)> = Vec::new();
        for to in &self.config.to {
            match to {
                Upstreams::ResolvConf => {
                    wanted.extend(
                        nameservers(resolv_conf)
                            .into_iter()
                            .map(|address| (address, None)),
                    );
                }
                Upstreams::Address {
                    address, tls: false, ..
                } => wanted.push((*address, None)),
                Upstreams::Address {
                    address, server_name, ..
                } => {
                    let name = server_name.as_ref().or(self.config.tls_servername.as_ref());
                    let name = match name {
                        Some(name) => ServerName::try_from(name.clone())
                            .map_err(|_| format!("{name:?} is not a TLS server name"))?,
                        None => ServerName::from(address.ip()),
                    };
                    wanted.push((*address, Some(name)));
                }
            }
        }
        wanted.retain(|(address, _)| {
            let own = self.own.contains(&address.ip());
            if own {
                tracing::warn!(%address, "cluster DNS itself is named as a resolver: it is left out");
            }
            !own
        });
        let before = self.current();
        let same = before.len() == wanted.len()
            && before
                .iter()
                .zip(&wanted)
                .all(|(upstream, (address, _))| upstream.address == *address);
        if same {
            return Ok(false);
        }
        let made = wanted.into_iter().map(|(address, name)| {
            let known = before.iter().find(|upstream| upstream.address == address);
            let tls = self.tls.clone().zip(name);
            known
                .cloned()
                .unwrap_or_else(|| Upstream::new(address, tls, self.config.clone(), self.metrics.clone()))
        });
        let made = Arc::new(made.collect());
        *self.upstreams.write().unwrap_or_else(PoisonError::into_inner) = made;
        Ok(true)
    }

    /// The answer of a resolver. Who asks what is being asked already waits for that answer. It is put into the cache
    /// also if nobody waits any more.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        asked: Asked,
        cache: Option<(Arc<Cache>, Arc<str>)>,
    ) -> Outcome {
        let key = Key {
            name: asked.name.to_lowercase(),
            kind: asked.kind.into(),
            class: asked.class.into(),
            dnssec: asked.dnssec,
            checking_disabled: asked.checking_disabled,
        };
        let mut answer = {
            let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            match pending.get(&key) {
                Some(answer) => answer.clone(),
                None => {
                    let Ok(slot) = self.slots.clone().try_acquire_owned() else {
                        self.metrics.rejected();
                        return Err(ForwardError::Busy(self.limit));
                    };
                    let (tell, answer) = watch::channel(None);
                    pending.insert(key.clone(), answer.clone());
                    let done = Done {
                        forward: self.clone(),
                        key: key.clone(),
                    };
                    tokio::spawn(async move {
                        let outcome = done.forward.exchange(&asked).await;
                        if let (Ok(answer), Some((cache, zone))) = (&outcome, cache) {
                            done.forward.store(&cache, &zone, key, answer);
                        }
                        // What is in the cache is found there from now on.
                        drop((done, slot));
                        tell.send_replace(Some(outcome));
                    });
                    answer
                }
            }
        };
        let told = answer.wait_for(Option::is_some).await;
        // A sender that is gone has panicked.
        let told = told.map(|outcome| outcome.clone()).unwrap_or_default();
        told.unwrap_or(Err(ForwardError::NoUpstream))
    }

    fn store(&self, cache: &Cache, zone: &str, key: Key, answer: &Arc<Forwarded>) {
        if let Storing::Kept { evicted, denies, .. } = cache.insert(key, answer) {
            self.metrics.cache_stored(zone, denies, evicted, cache.len());
        }
    }

    async fn exchange(&self, asked: &Asked) -> Outcome {
        let mut list: Vec<Arc<Upstream>> = self.current().iter().filter(|u| !u.loops()).cloned().collect();
        if list.is_empty() {
            return Err(ForwardError::NoUpstream);
        }
        let count = list.len();
        match self.config.policy {
            Policy::Sequential => {}
            Policy::RoundRobin => list.rotate_left(self.turn.fetch_add(1, Ordering::Relaxed) % count),
            Policy::Random => list.rotate_left(rand::random::<u16>() as usize % count),
        }
        if list.iter().all(|upstream| upstream.is_down()) {
            self.metrics.healthcheck_broken();
            if self.config.fail_fast {
                return Err(ForwardError::NoUpstream);
            }
            // The health checks may be what is broken: one is tried all the same.
            list.truncate(1);
        } else {
            list.retain(|upstream| !upstream.is_down());
        }
        let mut why = ForwardError::NoUpstream;
        let mut refused: Option<Arc<Forwarded>> = None;
        for upstream in list.iter().cycle().take(list.len() * ROUNDS) {
            match upstream.exchange(asked).await {
                Ok(answer) => {
                    let code = ResponseCode::from_low(answer.code);
                    let answer = Arc::new(answer);
                    if !self.config.failover.contains(&code) {
                        return Ok(answer);
                    }
                    refused = Some(answer);
                }
                Err(error) => {
                    tracing::debug!(resolver = %upstream.address, %error, "resolver failed");
                    why = ForwardError::Failed(format!("{}: {error}", upstream.address));
                }
            }
        }
        refused.ok_or(why)
    }
}

/// Removes a question from those under way, also if its task panics.
struct Done {
    forward: Arc<Forward>,
    key: Key,
}

impl Drop for Done {
    fn drop(&mut self) {
        let mut pending = self
            .forward
            .pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        pending.remove(&self.key);
    }
}

/// Finds resolvers that send our questions back to us: each is asked for a name that nobody else knows.
#[derive(Default)]
pub(crate) struct Loops {
    /// A leaf lock.
    sent: Mutex<HashMap<Name, Arc<Upstream>>>,
}

impl Loops {
    /// Asks all resolvers of `forward`, and forgets what was found before.
    pub(crate) async fn look(self: &Arc<Self>, forward: &Forward, zone: &Name) {
        let upstreams = forward.current();
        let asking = upstreams.iter().cloned().map(|upstream| {
            let loops = self.clone();
            async move {
                let (a, b): (u64, u64) = (rand::random(), rand::random());
                let name = Name::from_ascii(format!("{a:016x}.{b:016x}")).and_then(|n| n.append_domain(zone));
                let Ok(name) = name else { return };
                {
                    let mut sent = loops.sent.lock().unwrap_or_else(PoisonError::into_inner);
                    if sent.len() >= MAX_LOOP_PROBES {
                        return;
                    }
                    sent.insert(name.clone(), upstream.clone());
                }
                let before = upstream.loops.swap(false, Ordering::Relaxed);
                let asked = Asked {
                    name: name.clone(),
                    kind: RecordType::HINFO,
                    class: DNSClass::IN,
                    dnssec: false,
                    checking_disabled: false,
                    recursion: true,
                };
                let _ = upstream.exchange(&asked).await;
                loops
                    .sent
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .remove(&name);
                if upstream.loops() && !before {
                    tracing::error!(resolver = %upstream.address, %zone,
                        "loop detected: the resolver sends questions back to cluster DNS, and is left out");
                }
            }
        });
        futures::future::join_all(asking).await;
    }

    /// Whether a question is one of ours, come back.
    pub(crate) fn is_ours(&self, name: &Name, kind: RecordType) -> bool {
        if kind != RecordType::HINFO {
            return false;
        }
        let sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let found = sent.get(&name.to_lowercase());
        if let Some(upstream) = found {
            upstream.loops.store(true, Ordering::Relaxed);
        }
        found.is_some()
    }
}

impl Forward {
    pub(crate) fn has_loops(&self) -> bool {
        self.current().iter().any(|upstream| upstream.loops())
    }

    #[cfg(test)]
    pub(crate) fn down(&self) -> Vec<SocketAddr> {
        let all = self.current();
        let down = all.iter().filter(|upstream| upstream.is_down());
        down.map(|upstream| upstream.address).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolvers_are_read() {
        let text = "# x\nsearch a.b\nnameserver 192.0.2.1\nnameserver fe80::1%eth0\n nameserver 10.96.0.10\nnameserver bad\n";
        let found = nameservers(text);
        let expected = ["192.0.2.1:53", "[fe80::1]:53", "10.96.0.10:53"];
        assert_eq!(found, expected.map(|text| text.parse().unwrap()));
    }

    #[test]
    fn a_changed_resolv_conf_is_followed_without_ourselves() {
        let corefile = ". {\n forward . /etc/resolv.conf\n}";
        let config = crate::corefile::parse(corefile, &Default::default()).unwrap();
        let metrics = Arc::new(Metrics::new(&skiff_prometheus::Registry::new()));
        let own = vec![IpAddr::from([10, 96, 0, 10])];
        let text = "nameserver 192.0.2.1\nnameserver 10.96.0.10\n";
        let forward = Forward::new(config.blocks[0].forwards[0].clone(), text, own, metrics).unwrap();
        let first = forward.current()[0].clone();
        assert_eq!(forward.addresses(), ["192.0.2.1:53".parse().unwrap()]);
        assert_eq!(forward.refresh(text), Ok(false));
        assert_eq!(
            forward.refresh("nameserver 192.0.2.2\nnameserver 192.0.2.1\n"),
            Ok(true)
        );
        assert_eq!(forward.addresses().len(), 2);
        assert!(Arc::ptr_eq(&forward.current()[1], &first), "its state is kept");
        assert_eq!(forward.refresh(""), Ok(true));
        assert!(forward.addresses().is_empty());
    }
}
