//! What `/metrics` shows of the API server, under upstream's names, with upstream's labels and buckets.
//!
//! Label values come from closed sets: verbs that exist, and resources that are served, once a request was routed
//! to one. What a client invents is counted without its name.

use std::sync::Arc;
use std::time::Duration;

use skiff_api::facts;
use skiff_auth::{Peer, TokenNote};
use skiff_prometheus::{Counter, Family, Gauge, Histogram, Registry, process};

use crate::audit::Auditor;
use crate::chain::Exchange;

/// Series of one family that counts requests. A cluster that is in use has some hundreds.
const MAX_REQUEST_SERIES: usize = 4096;
/// Series of one family that measures requests: each is 25 lines of text.
const MAX_DURATION_SERIES: usize = 1024;
/// Series of one family with one for each object of a kind.
const MAX_OBJECT_SERIES: usize = 1024;

const DURATION_BUCKETS: [f64; 23] = [
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0,
    20.0, 30.0, 45.0, 60.0,
];
const SLI_BUCKETS: [f64; 21] = [
    0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0,
    45.0, 60.0,
];
const EXPIRATION_BUCKETS: [f64; 14] = [
    0.0,
    1_800.0,
    3_600.0,
    7_200.0,
    21_600.0,
    43_200.0,
    86_400.0,
    172_800.0,
    345_600.0,
    604_800.0,
    2_592_000.0,
    7_776_000.0,
    15_552_000.0,
    31_104_000.0,
];

const COMPONENT: &str = "apiserver";

/// A resource that is served, and which of its subresources: names out of the tables, never out of a path.
#[derive(Clone, Copy)]
pub struct Served {
    resource: &'static facts::Resource,
    subresource: &'static str,
}

impl Served {
    /// None if the resource has no such subresource.
    pub fn of(resource: &'static facts::Resource, subresource: &str) -> Option<Served> {
        let subresource = match subresource {
            "" => "",
            name => resource.subresource(name)?.name,
        };
        Some(Served {
            resource,
            subresource,
        })
    }
}

/// What a request is counted under.
pub struct RequestLabels {
    verb: &'static str,
    scope: &'static str,
    dry_run: bool,
    served: Option<Served>,
}

impl RequestLabels {
    pub fn of(exchange: &Exchange) -> RequestLabels {
        let info = &exchange.info;
        let scope = if !info.is_resource {
            ""
        } else if info.parts.len() > 1 || info.verb == "create" {
            // By the path: a list that selects one name is still a list.
            "resource"
        } else if !info.namespace.is_empty() {
            "namespace"
        } else {
            "cluster"
        };
        let subresource = exchange.served.map_or("", |served| served.subresource);
        let verb = match info.verb.as_str() {
            _ if matches!(subresource, "exec" | "attach" | "portforward" | "proxy" | "log") => "CONNECT",
            "create" | "post" => "POST",
            "update" | "put" => "PUT",
            "list" => "LIST",
            "watch" => "WATCH",
            "get" => "GET",
            "patch" if is_apply(exchange) => "APPLY",
            "patch" => "PATCH",
            // COMPAT: the scope tells that many were deleted.
            "delete" | "deletecollection" => "DELETE",
            _ => "other",
        };
        RequestLabels {
            verb,
            scope,
            dry_run: exchange.context.dry_run,
            served: exchange.served,
        }
    }

    fn group(&self) -> &'static str {
        self.served.map_or("", |served| served.resource.group)
    }

    fn version(&self) -> &'static str {
        self.served.map_or("", |served| served.resource.version)
    }

    fn resource(&self) -> &'static str {
        self.served.map_or("", |served| served.resource.plural)
    }

    fn subresource(&self) -> &'static str {
        self.served.map_or("", |served| served.subresource)
    }

    fn dry_run(&self) -> &'static str {
        if self.dry_run { "All" } else { "" }
    }

    /// In the order of `component, group, resource, scope, subresource, verb, version`.
    fn plain(&self) -> [&'static str; 7] {
        [
            COMPONENT,
            self.group(),
            self.resource(),
            self.scope,
            self.subresource(),
            self.verb,
            self.version(),
        ]
    }
}

fn is_apply(exchange: &Exchange) -> bool {
    let kind = exchange.header(http::header::CONTENT_TYPE);
    let kind = kind.split(';').next().unwrap_or_default().trim();
    matches!(
        kind,
        "application/apply-patch+yaml" | "application/apply-patch+cbor"
    )
}

/// How long a request took.
pub struct Took {
    all: Duration,
    /// Without what the server waited for its turn and for the webhooks of users.
    own: Duration,
}

impl Took {
    pub fn new(all: Duration, exchange: &Exchange) -> Took {
        let stages = exchange.context.stages();
        let waited: u64 = stages
            .iter()
            .filter(|stage| stage.name == "flow")
            .map(|stage| stage.dur_us)
            .sum();
        let waited = Duration::from_micros(waited) + exchange.context.webhooks_took();
        Took {
            all,
            own: all.saturating_sub(waited),
        }
    }
}

pub struct Metrics {
    pub registry: Arc<Registry>,
    requests: Arc<Family<Counter>>,
    durations: Arc<Family<Histogram>>,
    sli_durations: Arc<Family<Histogram>>,
    terminations: Arc<Family<Counter>>,
    long_running: Arc<Family<Gauge>>,
    in_flight: Arc<Family<Gauge>>,
    client_certificates: Arc<Family<Histogram>>,
    /// By the names of the counters.
    token_notes: Vec<(&'static str, Arc<Family<Counter>>)>,
    unavailable: Arc<Family<Gauge>>,
    unavailable_total: Arc<Family<Counter>>,
}

impl Metrics {
    pub fn new(git_version: &str, audit: Option<Arc<Auditor>>) -> Metrics {
        let registry = Registry::new();
        process::register(&registry);
        skiff_prometheus::build_info(&registry, git_version);
        registry.read_counters(
            "apiserver_audit_error_total",
            "Counter of audit events that failed to be audited properly. Plugin identifies the plugin affected by the error.",
            &["plugin"],
            move || {
                let failed = audit.as_ref().map_or(0, |audit| audit.failed());
                vec![(vec!["log".to_owned()], failed as f64)]
            },
        );
        Metrics {
            requests: registry.counters(
                "apiserver_request_total",
                "Counter of apiserver requests broken out for each verb, dry run value, group, version, resource, scope, component, and HTTP response code.",
                &["code", "component", "dry_run", "group", "resource", "scope", "subresource", "verb", "version"],
                MAX_REQUEST_SERIES,
            ),
            durations: registry.histograms(
                "apiserver_request_duration_seconds",
                "Response latency distribution in seconds for each verb, dry run value, group, version, resource, subresource, scope and component.",
                &["component", "dry_run", "group", "resource", "scope", "subresource", "verb", "version"],
                MAX_DURATION_SERIES,
                &DURATION_BUCKETS,
            ),
            sli_durations: registry.histograms(
                "apiserver_request_sli_duration_seconds",
                "Response latency distribution (not counting webhook duration and priority & fairness queue wait times) in seconds for each verb, group, version, resource, subresource, scope and component.",
                &["component", "group", "resource", "scope", "subresource", "verb", "version"],
                MAX_DURATION_SERIES,
                &SLI_BUCKETS,
            ),
            terminations: registry.counters(
                "apiserver_request_terminations_total",
                "Number of requests which apiserver terminated in self-defense.",
                &["code", "component", "group", "resource", "scope", "subresource", "verb", "version"],
                MAX_REQUEST_SERIES,
            ),
            long_running: registry.gauges(
                "apiserver_longrunning_requests",
                "Gauge of all active long-running apiserver requests broken out by verb, group, version, resource, scope and component. Not all requests are tracked this way.",
                &["component", "group", "resource", "scope", "subresource", "verb", "version"],
                MAX_REQUEST_SERIES,
            ),
            in_flight: registry.gauges(
                "apiserver_current_inflight_requests",
                "Number of requests that are being answered or wait for their turn, per request kind.",
                &["request_kind"],
                2,
            ),
            client_certificates: registry.histograms(
                "apiserver_client_certificate_expiration_seconds",
                "Distribution of the remaining lifetime on the certificate used to authenticate a request.",
                &[],
                1,
                &EXPIRATION_BUCKETS,
            ),
            token_notes: TokenNote::COUNTERS
                .iter()
                .map(|(name, help)| {
                    let counter = registry.counters(name, help, &[], 1);
                    counter.with(&[]); // shown before the first one
                    (*name, counter)
                })
                .collect(),
            unavailable: registry.gauges(
                "aggregator_unavailable_apiservice",
                "Gauge of APIServices which are marked as unavailable broken down by APIService name.",
                &["name"],
                MAX_OBJECT_SERIES,
            ),
            unavailable_total: registry.counters(
                "aggregator_unavailable_apiservice_total",
                "Counter of APIServices which are marked as unavailable broken down by APIService name and reason.",
                &["name", "reason"],
                MAX_OBJECT_SERIES,
            ),
            registry,
        }
    }

    /// Counts an answer. Long requests have no duration: they are counted when they begin. Nor have those that came to
    /// nobody: they would make the server look fast.
    pub fn request(&self, labels: &RequestLabels, code: u16, took: Option<Took>) {
        let refused = labels.served.is_none() && matches!(code, 401 | 403 | 404 | 429);
        let plain = labels.plain();
        let [component, group, resource, scope, subresource, verb, version] = plain;
        let code = code_text(code);
        let dry_run = labels.dry_run();
        self.requests
            .with(&[
                &code,
                component,
                dry_run,
                group,
                resource,
                scope,
                subresource,
                verb,
                version,
            ])
            .inc();
        if let Some(took) = took.filter(|_| !refused) {
            let dry = [
                component,
                dry_run,
                group,
                resource,
                scope,
                subresource,
                verb,
                version,
            ];
            self.durations.with(&dry).observe_duration(took.all);
            self.sli_durations.with(&plain).observe_duration(took.own);
        }
    }

    /// Counts a request that the server ended before its answer was ready.
    pub fn terminated(&self, labels: &RequestLabels, code: u16) {
        let [component, group, resource, scope, subresource, verb, version] = labels.plain();
        let code = code_text(code);
        let values = [
            &code,
            component,
            group,
            resource,
            scope,
            subresource,
            verb,
            version,
        ];
        self.terminations.with(&values).inc();
    }

    /// Counts a long request until the guard is dropped.
    pub fn long_running(&self, labels: &RequestLabels) -> Counted {
        Counted::new(self.long_running.with(&labels.plain()))
    }

    /// Counts a request until the guard is dropped.
    pub fn in_flight(&self, mutating: bool) -> Counted {
        let kind = if mutating { "mutating" } else { "readOnly" };
        Counted::new(self.in_flight.with(&[kind]))
    }

    /// Notes how long the certificate that a request came with is still valid.
    pub fn client_certificate(&self, peer: Option<&Peer>) {
        if let Some(ends) = peer.and_then(|peer| peer.leaf_ends) {
            let now = (skiff_registry::now_us() / 1_000_000) as f64;
            self.client_certificates.with(&[]).observe(ends as f64 - now);
        }
    }

    /// Counts what is told of a service account's token.
    pub fn token(&self, note: &TokenNote) {
        let counter = self.token_notes.iter().find(|(name, _)| *name == note.counter());
        if let Some((_, counter)) = counter {
            counter.with(&[]).inc();
        }
    }

    /// Notes what the check of an APIService found; `lost` is why it is no longer available.
    pub fn api_service(&self, name: &str, available: bool, lost: Option<&str>) {
        self.unavailable
            .with(&[name])
            .set(f64::from(u8::from(!available)));
        if let Some(reason) = lost {
            self.unavailable_total.with(&[name, reason]).inc();
        }
    }

    /// Forgets an APIService that is gone.
    pub fn forget_api_service(&self, name: &str) {
        self.unavailable.remove(&[name]);
    }

    /// Begins to count requests anew.
    pub fn reset(&self) {
        self.requests.clear();
        self.durations.clear();
        self.sli_durations.clear();
        self.terminations.clear();
    }
}

/// A code of an answer. An extension API server may answer with any number.
fn code_text(code: u16) -> String {
    match code {
        100..600 => code.to_string(),
        _ => "other".to_owned(),
    }
}

/// One more in a gauge, until it is dropped.
pub struct Counted(Arc<Gauge>);

impl Counted {
    fn new(gauge: Arc<Gauge>) -> Counted {
        gauge.add(1.0);
        Counted(gauge)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.add(-1.0);
    }
}
