//! The proxy's metrics, by upstream's names. All label values are from this code.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use skiff_prometheus::{Counter, Family, Gauge, Histogram, Registry, exponential_buckets};

use super::index::Counts;

/// Families, policies and codes are two each.
const MAX_SERIES: usize = 8;

pub struct Metrics {
    pub registry: Arc<Registry>,
    sync_seconds: Arc<Family<Histogram>>,
    full_sync_seconds: Arc<Family<Histogram>>,
    partial_sync_seconds: Arc<Family<Histogram>>,
    last_sync: Arc<Family<Gauge>>,
    last_queued: Arc<Family<Gauge>>,
    programming_seconds: Arc<Family<Histogram>>,
    endpoint_changes: Arc<Family<Counter>>,
    endpoint_changes_pending: Arc<Family<Gauge>>,
    service_changes: Arc<Family<Counter>>,
    service_changes_pending: Arc<Family<Gauge>>,
    sync_failures: Arc<Family<Counter>>,
    no_local_endpoints: Arc<Family<Gauge>>,
    healthz: Arc<Family<Counter>>,
    livez: Arc<Family<Counter>>,
    conntrack_seconds: Arc<Family<Histogram>>,
    /// Of IPv4 and of IPv6.
    conntrack_deleted: Arc<[AtomicU64; 2]>,
    services: Arc<Family<Gauge>>,
    endpoints: Arc<Family<Gauge>>,
    rules: Arc<Family<Gauge>>,
    revision: Arc<Family<Gauge>>,
    delay: Arc<Family<Gauge>>,
    summary: Mutex<Summary>,
}

/// What the kernel has, in short.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    pub services: usize,
    pub endpoints: usize,
    pub rules: usize,
    pub elements: usize,
    /// The newest version of an object that is in the kernel.
    pub programmed_revision: u64,
    /// From when the last change was noticed to the kernel, in milliseconds.
    pub last_delay_ms: f64,
    pub failures: u64,
}

/// How a family is called in labels.
pub(super) fn family_name(ipv4: bool) -> &'static str {
    if ipv4 { "IPv4" } else { "IPv6" }
}

/// Upstream's: to 0.5 s, then seconds to a minute, every 5 s to two, and to five.
fn programming_buckets() -> Vec<f64> {
    let seconds = (1..60).map(f64::from);
    let fives = (0..12).map(|step| 60.0 + 5.0 * f64::from(step));
    let halves = (0..7).map(|step| 120.0 + 30.0 * f64::from(step));
    [0.25, 0.5]
        .into_iter()
        .chain(seconds)
        .chain(fives)
        .chain(halves)
        .collect()
}

impl Metrics {
    /// The families, in a registry that may have others.
    pub fn new(registry: Arc<Registry>) -> Arc<Metrics> {
        let family = &["ip_family"][..];
        let buckets = exponential_buckets(0.001, 2.0, 15);
        let histogram = |name: &'static str, help: &'static str, buckets: &[f64]| {
            registry.histograms(name, help, &["ip_family"], MAX_SERIES, buckets)
        };
        let gauge = |name, help, labels| registry.gauges(name, help, labels, MAX_SERIES);
        let counter = |name, help, labels| registry.counters(name, help, labels, MAX_SERIES);
        let conntrack_deleted: Arc<[AtomicU64; 2]> = Arc::default();
        let deleted = conntrack_deleted.clone();
        registry.read_counters(
            "kubeproxy_conntrack_reconciler_deleted_entries_total",
            "Stale flows that were forgotten.",
            family,
            move || {
                let count = |ipv4: bool| deleted[usize::from(!ipv4)].load(Ordering::Relaxed) as f64;
                let of = |ipv4: bool| (vec![family_name(ipv4).to_owned()], count(ipv4));
                vec![of(true), of(false)]
            },
        );
        Arc::new(Metrics {
            sync_seconds: histogram(
                "kubeproxy_sync_proxy_rules_duration_seconds",
                "How long changes take to come into the kernel.",
                &buckets,
            ),
            full_sync_seconds: histogram(
                "kubeproxy_sync_full_proxy_rules_duration_seconds",
                "How long it takes to load all rules.",
                &buckets,
            ),
            partial_sync_seconds: histogram(
                "kubeproxy_sync_partial_proxy_rules_duration_seconds",
                "How long it takes to load what has changed.",
                &buckets,
            ),
            last_sync: gauge(
                "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
                "When changes last came into the kernel.",
                family,
            ),
            last_queued: gauge(
                "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
                "When a change was last noticed.",
                family,
            ),
            programming_seconds: histogram(
                "kubeproxy_network_programming_duration_seconds",
                "From the change of a service or pod, as its EndpointSlice tells, to the kernel.",
                &programming_buckets(),
            ),
            endpoint_changes: counter(
                "kubeproxy_sync_proxy_rules_endpoint_changes_total",
                "Changes of EndpointSlices.",
                &[],
            ),
            endpoint_changes_pending: gauge(
                "kubeproxy_sync_proxy_rules_endpoint_changes_pending",
                "Changes of EndpointSlices that are not in the kernel yet.",
                &[],
            ),
            service_changes: counter(
                "kubeproxy_sync_proxy_rules_service_changes_total",
                "Changes of Services.",
                &[],
            ),
            service_changes_pending: gauge(
                "kubeproxy_sync_proxy_rules_service_changes_pending",
                "Changes of Services that are not in the kernel yet.",
                &[],
            ),
            sync_failures: counter(
                "kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
                "Changes that the kernel did not take.",
                family,
            ),
            no_local_endpoints: gauge(
                "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
                "Service ports with a Local traffic policy and no endpoint on this node.",
                &["ip_family", "traffic_policy"],
            ),
            healthz: counter("kubeproxy_proxy_healthz_total", "Answers of /healthz.", &["code"]),
            livez: counter("kubeproxy_proxy_livez_total", "Answers of /livez.", &["code"]),
            conntrack_seconds: histogram(
                "kubeproxy_conntrack_reconciler_sync_duration_seconds",
                "How long it takes to forget stale flows.",
                &buckets,
            ),
            conntrack_deleted,
            services: gauge("skiff_proxy_services", "Services with rules.", &[]),
            endpoints: gauge("skiff_proxy_endpoints", "Endpoints that take traffic.", &[]),
            rules: gauge(
                "skiff_proxy_rules",
                "Rules and elements in the kernel.",
                &["kind"],
            ),
            revision: gauge(
                "skiff_proxy_programmed_revision",
                "The newest version of an object that is in the kernel.",
                &[],
            ),
            delay: gauge(
                "skiff_proxy_last_delay_seconds",
                "From when the last change was noticed to when it was in the kernel.",
                &[],
            ),
            summary: Mutex::default(),
            registry,
        })
    }

    pub fn summary(&self) -> Summary {
        self.summary.lock().clone()
    }

    /// How long the last change waited and took.
    pub(super) fn delay(&self, delay: Duration) {
        self.delay.with(&[]).set(delay.as_secs_f64());
        self.summary.lock().last_delay_ms = delay.as_secs_f64() * 1000.0;
    }

    /// A change was noticed.
    pub(super) fn queued(&self, families: &[bool], of_endpoints: bool) {
        let (changes, pending) = match of_endpoints {
            true => (&self.endpoint_changes, &self.endpoint_changes_pending),
            false => (&self.service_changes, &self.service_changes_pending),
        };
        changes.with(&[]).inc();
        pending.with(&[]).add(1.0);
        for ipv4 in families {
            self.last_queued.with(&[family_name(*ipv4)]).set(now());
        }
    }

    /// What was noticed so far is on its way.
    pub(super) fn begin(&self) {
        self.endpoint_changes_pending.with(&[]).set(0.0);
        self.service_changes_pending.with(&[]).set(0.0);
    }

    pub(super) fn synced(&self, families: &[bool], full: bool, took: Duration) {
        for ipv4 in families {
            let family = [family_name(*ipv4)];
            self.sync_seconds.with(&family).observe_duration(took);
            let kind = if full {
                &self.full_sync_seconds
            } else {
                &self.partial_sync_seconds
            };
            kind.with(&family).observe_duration(took);
            self.last_sync.with(&family).set(now());
        }
    }

    /// How long each change took from where it happened.
    pub(super) fn programmed(&self, ipv4: bool, changed_at: f64) {
        let family = self.programming_seconds.with(&[family_name(ipv4)]);
        family.observe((now() - changed_at).max(0.0));
    }

    pub(super) fn failed(&self, families: &[bool]) {
        self.summary.lock().failures += 1;
        for ipv4 in families {
            self.sync_failures.with(&[family_name(*ipv4)]).inc();
        }
    }

    pub(super) fn counts(&self, counts: Counts, rules: usize, elements: usize) {
        {
            let mut summary = self.summary.lock();
            summary.services = counts.services;
            summary.endpoints = counts.endpoints;
            summary.rules = rules;
            summary.elements = elements;
        }
        self.services.with(&[]).set(counts.services as f64);
        self.endpoints.with(&[]).set(counts.endpoints as f64);
        self.rules.with(&["rule"]).set(rules as f64);
        self.rules.with(&["element"]).set(elements as f64);
        for (ipv4, (internal, external)) in [(true, counts.no_local[0]), (false, counts.no_local[1])] {
            for (policy, count) in [("internal", internal), ("external", external)] {
                let labels = [family_name(ipv4), policy];
                self.no_local_endpoints.with(&labels).set(count as f64);
            }
        }
    }

    pub(super) fn revision(&self, revision: u64) {
        self.summary.lock().programmed_revision = revision;
        self.revision.with(&[]).set(revision as f64);
    }

    pub(super) fn forgot(&self, ipv4: bool, count: usize, took: Duration) {
        let family = [family_name(ipv4)];
        self.conntrack_seconds.with(&family).observe_duration(took);
        self.conntrack_deleted[usize::from(!ipv4)].fetch_add(count as u64, Ordering::Relaxed);
    }

    pub(super) fn answered(&self, live: bool, code: u16) {
        let answers = if live { &self.livez } else { &self.healthz };
        answers.with(&[code.to_string().as_str()]).inc();
    }
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}
