//! What the proxy counts. No label comes from a request: each has a closed set of values.

use std::sync::{Arc, OnceLock};

use http::{Method, StatusCode, Version};
use skiff_prometheus::{Counter, Family, Gauge, Histogram, Registry, exponential_buckets};

pub struct Metrics {
    requests: Arc<Family<Counter>>,
    durations: Arc<Family<Histogram>>,
    /// Those that were used, by the places of their labels' values: every request counts.
    requests_seen: [[[OnceLock<Arc<Counter>>; PROTOCOLS.len()]; METHODS.len()]; CLASSES.len()],
    durations_seen: [OnceLock<Arc<Histogram>>; CLASSES.len()],
    refused: Arc<Family<Counter>>,
    retries: Arc<Family<Counter>>,
    connections: Arc<Family<Gauge>>,
    objects: Arc<Family<Gauge>>,
}

const CLASSES: [&str; 6] = ["other", "1xx", "2xx", "3xx", "4xx", "5xx"];
const METHODS: [&str; 8] = [
    "other", "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS",
];
const PROTOCOLS: [&str; 3] = ["HTTP/1.1", "HTTP/1.0", "HTTP/2"];

/// Why a connection or a request went no further.
#[derive(Clone, Copy, Debug)]
pub enum Refusal {
    Connections,
    ClientConnections,
    Handshake,
    Malformed,
    NoRoute,
    NoEndpoint,
    BackendFull,
    /// By a limit of an Ingress.
    ClientRate,
    /// What an Ingress asks for cannot be enforced.
    Closed,
}

impl Refusal {
    fn name(self) -> &'static str {
        match self {
            Refusal::Connections => "connections",
            Refusal::ClientConnections => "client_connections",
            Refusal::Handshake => "handshake",
            Refusal::Malformed => "malformed",
            Refusal::NoRoute => "no_route",
            Refusal::NoEndpoint => "no_endpoint",
            Refusal::BackendFull => "backend_full",
            Refusal::ClientRate => "client_rate",
            Refusal::Closed => "closed",
        }
    }
}

impl Metrics {
    pub fn new(registry: &Registry) -> Metrics {
        let seconds = exponential_buckets(0.001, 2.0, 16);
        Metrics {
            requests: registry.counters(
                "skiff_ingress_requests_total",
                "Requests by method, protocol and class of the response's status.",
                &["code", "method", "protocol"],
                200,
            ),
            durations: registry.histograms(
                "skiff_ingress_request_duration_seconds",
                "Time from a request's head to the end of its response.",
                &["code"],
                10,
                &seconds,
            ),
            requests_seen: Default::default(),
            durations_seen: Default::default(),
            refused: registry.counters(
                "skiff_ingress_refused_total",
                "Connections and requests that went no further, by reason.",
                &["reason"],
                20,
            ),
            retries: registry.counters(
                "skiff_ingress_retries_total",
                "Requests that were sent to another endpoint.",
                &[],
                1,
            ),
            connections: registry.gauges(
                "skiff_ingress_connections",
                "Open connections of clients, by listener.",
                &["listener"],
                2,
            ),
            objects: registry.gauges(
                "skiff_ingress_objects",
                "Size of the route table: routes, hosts with a certificate, and Ingresses with a problem.",
                &["kind"],
                3,
            ),
        }
    }

    pub fn answered(&self, method: &Method, version: Version, status: StatusCode, seconds: f64) {
        let place = |all: &[&str], wanted: &str| all.iter().position(|each| *each == wanted).unwrap_or(0);
        let class = Some(usize::from(status.as_u16() / 100)).filter(|class| *class < CLASSES.len());
        let class = class.unwrap_or(0);
        let method = place(&METHODS, method.as_str());
        let protocol = match version {
            Version::HTTP_2 => 2,
            Version::HTTP_10 => 1,
            _ => 0,
        };
        let labels = [CLASSES[class], METHODS[method], PROTOCOLS[protocol]];
        let requests = &self.requests_seen[class][method][protocol];
        requests.get_or_init(|| self.requests.with(&labels)).inc();
        let durations = &self.durations_seen[class];
        durations
            .get_or_init(|| self.durations.with(&labels[..1]))
            .observe(seconds);
    }

    pub fn refused(&self, why: Refusal) {
        self.refused.with(&[why.name()]).inc();
    }

    pub fn retried(&self) {
        self.retries.with(&[]).inc();
    }

    /// A connection, until the answer is dropped.
    pub fn connected(&self, tls: bool) -> Connected {
        let gauge = self.connections.with(&[if tls { "https" } else { "http" }]);
        gauge.add(1.0);
        Connected(gauge)
    }

    pub fn set_objects(&self, routes: usize, certificates: usize, problems: usize) {
        for (kind, count) in [
            ("routes", routes),
            ("certificates", certificates),
            ("problems", problems),
        ] {
            self.objects.with(&[kind]).set(count as f64);
        }
    }
}

pub struct Connected(Arc<Gauge>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.add(-1.0);
    }
}
