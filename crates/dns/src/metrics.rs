//! What cluster DNS counts, by CoreDNS' names and labels. Types, codes and plugins come from closed sets; zones and
//! addresses come from the Corefile and from resolv.conf, and families are bounded.

use crate::plugins::log::code_name;
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use skiff_prometheus::{Counter, Family, Gauge, Histogram, Registry, exponential_buckets};
use std::sync::Arc;
use std::time::Duration;

/// COMPAT: what the label `server` of a plain server block is; all are on one port.
const SERVER: &str = "dns://:53";
const VIEW: &str = "";
const SERIES: usize = 512;
const SIZES: [f64; 14] = [
    0.0, 100.0, 200.0, 300.0, 400.0, 511.0, 1023.0, 2047.0, 4095.0, 8291.0, 16e3, 32e3, 48e3, 64e3,
];

pub struct Metrics {
    requests: Arc<Family<Counter>>,
    durations: Arc<Family<Histogram>>,
    request_sizes: Arc<Family<Histogram>>,
    response_sizes: Arc<Family<Histogram>>,
    dnssec: Arc<Family<Counter>>,
    responses: Arc<Family<Counter>>,
    panics: Arc<Family<Counter>>,
    dropped: Arc<Family<Counter>>,
    cache_entries: Arc<Family<Gauge>>,
    cache_requests: Arc<Family<Counter>>,
    cache_hits: Arc<Family<Counter>>,
    cache_misses: Arc<Family<Counter>>,
    cache_evictions: Arc<Family<Counter>>,
    cache_drops: Arc<Family<Counter>>,
    proxy_durations: Arc<Family<Histogram>>,
    healthcheck_failures: Arc<Family<Counter>>,
    connection_hits: Arc<Family<Counter>>,
    connection_misses: Arc<Family<Counter>>,
    healthcheck_broken: Arc<Family<Counter>>,
    max_concurrent_rejects: Arc<Family<Counter>>,
    reloads: Arc<Family<Counter>>,
    reload_failures: Arc<Family<Counter>>,
}

/// A question that was answered.
pub struct Answered<'a> {
    pub zone: &'a str,
    pub kind: RecordType,
    pub over_tcp: bool,
    pub is_ipv6: bool,
    pub dnssec: bool,
    pub code: ResponseCode,
    pub plugin: &'static str,
    pub question_bytes: usize,
    pub answer_bytes: usize,
    pub took: Duration,
}

/// Why a question got no answer.
#[derive(Clone, Copy, Debug)]
pub enum Drop {
    Outside,
    ClientRate,
    ClientQuestions,
    Questions,
    ClientConnections,
}

impl Drop {
    fn name(self) -> &'static str {
        match self {
            Drop::Outside => "outside",
            Drop::ClientRate => "client_rate",
            Drop::ClientQuestions => "client_questions",
            Drop::Questions => "questions",
            Drop::ClientConnections => "client_connections",
        }
    }
}

/// COMPAT: types that CoreDNS does not name are `other`.
fn kind_name(kind: RecordType) -> &'static str {
    use RecordType as T;
    match kind {
        T::A
        | T::AAAA
        | T::ANY
        | T::AXFR
        | T::CNAME
        | T::DNSKEY
        | T::DS
        | T::HTTPS
        | T::IXFR
        | T::MX
        | T::NS
        | T::NSEC
        | T::NSEC3
        | T::PTR
        | T::RRSIG
        | T::SOA
        | T::SRV
        | T::SVCB
        | T::TXT => kind.into(),
        _ => "other",
    }
}

impl Metrics {
    pub fn new(registry: &Registry) -> Metrics {
        let seconds = exponential_buckets(0.000_25, 2.0, 16);
        let count = |name, help, labels| registry.counters(name, help, labels, SERIES);
        let per_zone: &[&str] = &["server", "view", "zone"];
        let per_cache: &[&str] = &["server", "view", "zones"];
        let per_shelf: &[&str] = &["server", "type", "view", "zones"];
        let sizes = |name, help| {
            let labels = &["proto", "server", "view", "zone"];
            registry.histograms(name, help, labels, SERIES, &SIZES)
        };
        Metrics {
            requests: count(
                "coredns_dns_requests_total",
                "Counter of DNS requests made per zone, protocol and family.",
                &["family", "proto", "server", "type", "view", "zone"],
            ),
            durations: registry.histograms(
                "coredns_dns_request_duration_seconds",
                "Histogram of the time (in seconds) each request took per zone.",
                per_zone,
                SERIES,
                &seconds,
            ),
            request_sizes: sizes(
                "coredns_dns_request_size_bytes",
                "Size of the EDNS0 UDP buffer in bytes (64K for TCP) per zone and protocol.",
            ),
            response_sizes: sizes(
                "coredns_dns_response_size_bytes",
                "Size of the returned response in bytes.",
            ),
            dnssec: count(
                "coredns_dns_do_requests_total",
                "Counter of DNS requests with DO bit set per zone.",
                per_zone,
            ),
            responses: count(
                "coredns_dns_responses_total",
                "Counter of response status codes.",
                &["plugin", "rcode", "server", "view", "zone"],
            ),
            panics: count(
                "coredns_panics_total",
                "A metrics that counts the number of panics.",
                &[],
            ),
            dropped: count(
                "skiff_dns_dropped_total",
                "Questions and connections that got no answer, by reason.",
                &["reason"],
            ),
            cache_entries: registry.gauges(
                "coredns_cache_entries",
                "The number of elements in the cache.",
                per_shelf,
                SERIES,
            ),
            cache_requests: count(
                "coredns_cache_requests_total",
                "The count of cache requests.",
                per_cache,
            ),
            cache_hits: count("coredns_cache_hits_total", "The count of cache hits.", per_shelf),
            cache_misses: count(
                "coredns_cache_misses_total",
                "The count of cache misses. Deprecated, derive misses from cache hits/requests counters.",
                per_cache,
            ),
            cache_evictions: count(
                "coredns_cache_evictions_total",
                "The count of cache evictions.",
                per_shelf,
            ),
            cache_drops: count(
                "coredns_cache_drops_total",
                "The number responses that are not cached, because the reply is malformed.",
                per_cache,
            ),
            proxy_durations: registry.histograms(
                "coredns_proxy_request_duration_seconds",
                "Histogram of the time each request took.",
                &["proxy_name", "rcode", "to"],
                SERIES,
                &seconds,
            ),
            healthcheck_failures: count(
                "coredns_proxy_healthcheck_failures_total",
                "Counter of the number of failed healthchecks.",
                &["proxy_name", "to"],
            ),
            connection_hits: count(
                "coredns_proxy_conn_cache_hits_total",
                "Counter of connection cache hits per upstream and protocol.",
                &["proto", "proxy_name", "to"],
            ),
            connection_misses: count(
                "coredns_proxy_conn_cache_misses_total",
                "Counter of connection cache misses per upstream and protocol.",
                &["proto", "proxy_name", "to"],
            ),
            healthcheck_broken: count(
                "coredns_forward_healthcheck_broken_total",
                "Counter of the number of complete failures of the healthchecks.",
                &[],
            ),
            max_concurrent_rejects: count(
                "coredns_forward_max_concurrent_rejects_total",
                "Counter of the number of queries rejected because the concurrent queries were at maximum.",
                &[],
            ),
            reloads: count(
                "skiff_dns_corefile_loads_total",
                "Corefiles that were put into use.",
                &[],
            ),
            reload_failures: count(
                "coredns_reload_failed_total",
                "Counter of the number of failed reload attempts.",
                &[],
            ),
        }
    }

    pub fn answered(&self, told: &Answered<'_>) {
        let proto = if told.over_tcp { "tcp" } else { "udp" };
        let family = if told.is_ipv6 { "2" } else { "1" };
        let zone = told.zone;
        self.requests
            .with(&[family, proto, SERVER, kind_name(told.kind), VIEW, zone])
            .inc();
        self.durations
            .with(&[SERVER, VIEW, zone])
            .observe(told.took.as_secs_f64());
        let by_proto = [proto, SERVER, VIEW, zone];
        self.request_sizes
            .with(&by_proto)
            .observe(told.question_bytes as f64);
        self.response_sizes
            .with(&by_proto)
            .observe(told.answer_bytes as f64);
        if told.dnssec {
            self.dnssec.with(&[SERVER, VIEW, zone]).inc();
        }
        self.responses
            .with(&[told.plugin, code_name(told.code), SERVER, VIEW, zone])
            .inc();
    }

    pub fn dropped(&self, why: Drop) {
        self.dropped.with(&[why.name()]).inc();
    }

    pub fn panicked(&self) {
        self.panics.with(&[]).inc();
    }

    /// A look into the cache; a hit says whether it is a denial.
    pub fn cache_asked(&self, zone: &str, hit: Option<bool>) {
        self.cache_requests.with(&[SERVER, VIEW, zone]).inc();
        match hit {
            Some(denies) => self.cache_hits.with(&[SERVER, sort(denies), VIEW, zone]).inc(),
            None => self.cache_misses.with(&[SERVER, VIEW, zone]).inc(),
        }
    }

    pub fn cache_stored(&self, zone: &str, denies: bool, evicted: usize, entries: [usize; 2]) {
        for (denies, count) in [(false, entries[0]), (true, entries[1])] {
            let gauge = self.cache_entries.with(&[SERVER, sort(denies), VIEW, zone]);
            gauge.set(count as f64);
        }
        for _ in 0..evicted {
            self.cache_evictions
                .with(&[SERVER, sort(denies), VIEW, zone])
                .inc();
        }
    }

    pub fn malformed(&self, zone: &str) {
        self.cache_drops.with(&[SERVER, VIEW, zone]).inc();
    }

    pub fn forwarded(&self, to: &str, code: ResponseCode, took: Duration) {
        self.proxy_durations
            .with(&["forward", code_name(code), to])
            .observe(took.as_secs_f64());
    }

    pub fn connection(&self, to: &str, proto: &'static str, reused: bool) {
        let family = if reused {
            &self.connection_hits
        } else {
            &self.connection_misses
        };
        family.with(&[proto, "forward", to]).inc();
    }

    pub fn healthcheck_failed(&self, to: &str) {
        self.healthcheck_failures.with(&["forward", to]).inc();
    }

    pub fn healthcheck_broken(&self) {
        self.healthcheck_broken.with(&[]).inc();
    }

    pub fn rejected(&self) {
        self.max_concurrent_rejects.with(&[]).inc();
    }

    pub fn loaded(&self, good: bool) {
        let family = if good {
            &self.reloads
        } else {
            &self.reload_failures
        };
        family.with(&[]).inc();
    }
}

fn sort(denies: bool) -> &'static str {
    if denies { "denial" } else { "success" }
}
