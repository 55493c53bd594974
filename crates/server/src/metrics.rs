//! What `/metrics` shows, under upstream's names.

use std::collections::HashMap;
use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::request_info::RequestInfo;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TotalLabels {
    code: u16,
    component: &'static str,
    dry_run: &'static str,
    group: String,
    resource: String,
    scope: &'static str,
    subresource: String,
    verb: String,
    version: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DurationLabels {
    component: &'static str,
    group: String,
    resource: String,
    scope: &'static str,
    subresource: String,
    verb: String,
    version: String,
}

#[derive(Clone)]
struct Buckets;

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new([
            0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0,
        ])
    }
}

/// What one sort of request is counted in.
#[derive(Clone)]
struct Series {
    total: Counter,
    /// Long requests have none.
    duration: Option<Histogram>,
}

pub struct Metrics {
    registry: Registry,
    total: Family<TotalLabels, Counter>,
    duration: Family<DurationLabels, Histogram, Buckets>,
    /// The series by the hash of their labels: finding one makes no labels.
    found: RwLock<HashMap<u64, Series>>,
    hasher: RandomState,
    pub watchers: AtomicI64,
    started: f64,
}

impl Metrics {
    pub fn new(git_version: &str) -> Metrics {
        let mut registry = Registry::default();
        let total = Family::default();
        // The library adds `_total` to the name of a counter.
        registry.register(
            "apiserver_request",
            "Counter of apiserver requests broken out for each verb, dry run value, group, version, resource, scope, component, and HTTP response code.",
            total.clone(),
        );
        let duration = Family::new_with_constructor(Buckets);
        registry.register(
            "apiserver_request_duration_seconds",
            "Response latency distribution in seconds for each verb, dry run value, group, version, resource, subresource, scope and component.",
            duration.clone(),
        );
        let build: Family<Vec<(String, String)>, prometheus_client::metrics::gauge::Gauge> =
            Family::default();
        build
            .get_or_create(&vec![("git_version".to_string(), git_version.to_string())])
            .set(1);
        registry.register(
            "kubernetes_build_info",
            "A metric with a constant '1' value labeled by git version.",
            build,
        );
        let started = skiff_registry::now_us() as f64 / 1e6;
        Metrics {
            registry,
            total,
            duration,
            found: RwLock::default(),
            hasher: RandomState::new(),
            watchers: AtomicI64::new(0),
            started,
        }
    }

    pub fn request(&self, info: &RequestInfo, dry_run: bool, code: u16, elapsed: Duration) {
        // Paths that are no resource would let a client make new series at will.
        let known = info.is_resource && code != 404;
        let scope = match (info.is_resource, info.namespace.is_empty(), info.name.is_empty()) {
            (false, _, _) => "",
            (true, _, false) => "resource",
            (true, false, true) => "namespace",
            (true, true, true) => "cluster",
        };
        let part = |text: &String| if known { text.clone() } else { String::new() };
        let verb = match info.verb.as_str() {
            "create" => "POST",
            "update" => "PUT",
            "deletecollection" => "DELETECOLLECTION",
            "list" => "LIST",
            "watch" => "WATCH",
            "get" => "GET",
            "patch" => "PATCH",
            "delete" => "DELETE",
            _ => "other",
        };
        let long = info.long_running();
        let names = known.then_some((&info.group, &info.version, &info.resource, &info.subresource));
        let hash = self.hasher.hash_one((code, dry_run, scope, verb, long, names));
        let present = self.found.read().get(&hash).cloned();
        let series = present.unwrap_or_else(|| {
            let labels = DurationLabels {
                component: "apiserver",
                group: part(&info.group),
                resource: part(&info.resource),
                scope,
                subresource: part(&info.subresource),
                verb: verb.to_string(),
                version: part(&info.version),
            };
            let total = TotalLabels {
                code,
                component: "apiserver",
                dry_run: if dry_run { "All" } else { "" },
                group: labels.group.clone(),
                resource: labels.resource.clone(),
                scope,
                subresource: labels.subresource.clone(),
                verb: labels.verb.clone(),
                version: labels.version.clone(),
            };
            let series = Series {
                total: self.total.get_or_create(&total).clone(),
                duration: (!long).then(|| self.duration.get_or_create(&labels).clone()),
            };
            self.found.write().insert(hash, series.clone());
            series
        });
        series.total.inc();
        if let Some(duration) = &series.duration {
            duration.observe(elapsed.as_secs_f64());
        }
    }

    /// Begins to count anew.
    pub fn reset(&self) {
        self.found.write().clear();
        self.total.clear();
        self.duration.clear();
    }

    /// The Prometheus text form. prometheus-client ends with OpenMetrics' `# EOF`, which the older text
    /// form that upstream speaks does not have.
    pub fn text(&self, lost_audit_events: u64) -> String {
        let mut out = String::new();
        if encode(&mut out, &self.registry).is_err() {
            return String::new();
        }
        let mut out = out
            .trim_end_matches("# EOF\n")
            .replace(
                "# TYPE apiserver_request counter",
                "# TYPE apiserver_request_total counter",
            )
            .replace(
                "# HELP apiserver_request Counter",
                "# HELP apiserver_request_total Counter",
            );
        let mut gauge = |name: &str, help: &str, kind: &str, value: f64| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        };
        gauge(
            "apiserver_longrunning_requests",
            "Gauge of all active long-running apiserver requests.",
            "gauge",
            self.watchers.load(Ordering::Relaxed) as f64,
        );
        gauge(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            "gauge",
            self.started,
        );
        if let Some((resident, cpu)) = process_figures() {
            gauge(
                "process_resident_memory_bytes",
                "Resident memory size in bytes.",
                "gauge",
                resident,
            );
            gauge(
                "process_cpu_seconds_total",
                "Total user and system CPU time spent in seconds.",
                "counter",
                cpu,
            );
        }
        let name = "apiserver_audit_error_total";
        let help = "Counter of audit events that failed to be audited properly. Plugin identifies the plugin affected by the error.";
        let _ = writeln!(
            out,
            "# HELP {name} {help}\n# TYPE {name} counter\n{name}{{plugin=\"log\"}} {lost_audit_events}"
        );
        out
    }
}

/// Resident bytes and CPU seconds of this process, from procfs.
fn process_figures() -> Option<(f64, f64)> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The command name may hold spaces: fields are counted from its closing parenthesis.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<f64>().ok();
    // Linux reports ticks of 1/100 s and pages of 4 KiB to user space on x86-64.
    Some((number(21)? * 4096.0, (number(11)? + number(12)?) / 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_upstreams() {
        let metrics = Metrics::new("v1.36.4");
        let info = RequestInfo {
            is_resource: true,
            verb: "create".into(),
            resource: "pods".into(),
            version: "v1".into(),
            namespace: "default".into(),
            ..RequestInfo::default()
        };
        metrics.request(&info, false, 201, Duration::from_millis(3));
        let text = metrics.text(0);
        for line in [
            "# TYPE apiserver_request_total counter",
            "apiserver_request_total{code=\"201\",component=\"apiserver\",dry_run=\"\",group=\"\",resource=\"pods\",scope=\"namespace\",subresource=\"\",verb=\"POST\",version=\"v1\"} 1",
            "apiserver_request_duration_seconds_bucket{",
            "process_resident_memory_bytes ",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        assert!(!text.contains("# EOF"));
    }
}
