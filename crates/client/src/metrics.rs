//! The metrics of a component that is a client of the API: its work queues, its requests and its lease, by upstream's
//! names. All label values are names in this code, methods and codes.

use std::sync::{Arc, Weak};
use std::time::Duration;

use http::Method;
use parking_lot::Mutex;
use skiff_prometheus::{Counter, Family, Gauge, Histogram, Registry, exponential_buckets, process};

/// Queues, leases and methods of a component are few; codes are.
const MAX_SERIES: usize = 256;
const REQUEST_BUCKETS: [f64; 12] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];
/// Clients in the process reach the API server without a connection.
const HOST: &str = "in-process";

/// What a queue says of itself when it is asked.
pub(crate) trait QueueState: Send + Sync {
    /// Items that wait for a worker.
    fn depth(&self) -> usize;
    /// For how long items have been in work: all together, and the one that is longest.
    fn in_work(&self) -> (Duration, Duration);
}

/// A queue that lives, and the name that it is measured under.
type Measured = (&'static str, Weak<dyn QueueState>);

/// What one queue is measured in.
pub(crate) struct QueueMetrics {
    pub(crate) adds: Arc<Counter>,
    pub(crate) retries: Arc<Counter>,
    pub(crate) waited: Arc<Histogram>,
    pub(crate) worked: Arc<Histogram>,
}

/// The metrics of one component.
pub struct ComponentMetrics {
    pub registry: Arc<Registry>,
    /// A leaf lock.
    queues: Arc<Mutex<Vec<Measured>>>,
    adds: Arc<Family<Counter>>,
    retries: Arc<Family<Counter>>,
    waited: Arc<Family<Histogram>>,
    worked: Arc<Family<Histogram>>,
    requests: Arc<Family<Counter>>,
    request_durations: Arc<Family<Histogram>>,
    leading: Arc<Family<Gauge>>,
    decodes: Arc<Family<Counter>>,
}

impl Default for ComponentMetrics {
    fn default() -> Self {
        let registry = Registry::new();
        process::register(&registry);
        let queues: Arc<Mutex<Vec<Measured>>> = Arc::default();
        let of_queues = |read: fn(&dyn QueueState) -> f64| {
            let queues = queues.clone();
            move || {
                let queues = queues.lock();
                let alive = queues
                    .iter()
                    .filter_map(|(name, queue)| Some((name, queue.upgrade()?)));
                alive
                    .map(|(name, queue)| (vec![(*name).to_owned()], read(&*queue)))
                    .collect()
            }
        };
        registry.read_gauges(
            "workqueue_depth",
            "Current depth of workqueue",
            &["name"],
            of_queues(|queue| queue.depth() as f64),
        );
        registry.read_gauges(
            "workqueue_unfinished_work_seconds",
            "How many seconds of work has done that is in progress and hasn't been observed by work_duration. Large values indicate stuck threads. One can deduce the number of stuck threads by observing the rate at which this increases.",
            &["name"],
            of_queues(|queue| queue.in_work().0.as_secs_f64()),
        );
        registry.read_gauges(
            "workqueue_longest_running_processor_seconds",
            "How many seconds has the longest running processor for workqueue been running.",
            &["name"],
            of_queues(|queue| queue.in_work().1.as_secs_f64()),
        );
        let of_work = exponential_buckets(1e-8, 10.0, 10);
        ComponentMetrics {
            adds: registry.counters(
                "workqueue_adds_total",
                "Total number of adds handled by workqueue",
                &["name"],
                MAX_SERIES,
            ),
            retries: registry.counters(
                "workqueue_retries_total",
                "Total number of retries handled by workqueue",
                &["name"],
                MAX_SERIES,
            ),
            waited: registry.histograms(
                "workqueue_queue_duration_seconds",
                "How long in seconds an item stays in workqueue before being requested.",
                &["name"],
                MAX_SERIES,
                &of_work,
            ),
            worked: registry.histograms(
                "workqueue_work_duration_seconds",
                "How long in seconds processing an item from workqueue takes.",
                &["name"],
                MAX_SERIES,
                &of_work,
            ),
            requests: registry.counters(
                "rest_client_requests_total",
                "Number of HTTP requests, partitioned by status code, method, and host.",
                &["code", "host", "method"],
                MAX_SERIES,
            ),
            request_durations: registry.histograms(
                "rest_client_request_duration_seconds",
                "Request latency in seconds. Broken down by verb, and host.",
                &["host", "verb"],
                MAX_SERIES,
                &REQUEST_BUCKETS,
            ),
            leading: registry.gauges(
                "leader_election_master_status",
                "Gauge of if the reporting system is master of the relevant lease, 0 indicates backup, 1 indicates master. 'name' is the string used to identify the lease. Please make sure to group by name.",
                &["name"],
                MAX_SERIES,
            ),
            decodes: registry.counters(
                "skiff_informer_decodes_total",
                "How often an informer decoded an object, by resource.",
                &["resource"],
                MAX_SERIES,
            ),
            queues,
            registry,
        }
    }
}

impl ComponentMetrics {
    /// Metrics of a component of this version.
    pub fn new(git_version: &str) -> Arc<ComponentMetrics> {
        let metrics = ComponentMetrics::default();
        skiff_prometheus::build_info(&metrics.registry, git_version);
        Arc::new(metrics)
    }

    pub(crate) fn queue(&self, name: &'static str) -> QueueMetrics {
        QueueMetrics {
            adds: self.adds.with(&[name]),
            retries: self.retries.with(&[name]),
            waited: self.waited.with(&[name]),
            worked: self.worked.with(&[name]),
        }
    }

    /// Shows a queue for as long as it lives, in place of an earlier one of that name.
    pub(crate) fn show(&self, name: &'static str, queue: Weak<dyn QueueState>) {
        let mut queues = self.queues.lock();
        queues.retain(|(other, _)| *other != name);
        queues.push((name, queue));
    }

    /// Counts a request of this component. A watch has no duration.
    pub(crate) fn request(&self, method: &Method, code: Option<u16>, took: Option<Duration>) {
        let method = match *method {
            Method::GET => "GET",
            Method::POST => "POST",
            Method::PUT => "PUT",
            Method::PATCH => "PATCH",
            Method::DELETE => "DELETE",
            _ => "other",
        };
        let code = code.map_or_else(|| "<error>".to_owned(), |code| code.to_string());
        self.requests.with(&[&code, HOST, method]).inc();
        if let Some(took) = took {
            self.request_durations
                .with(&[HOST, method])
                .observe_duration(took);
        }
    }

    /// What counts the decoded objects of a resource.
    pub(crate) fn decodes(&self, resource: &str) -> Arc<Counter> {
        self.decodes.with(&[resource])
    }

    /// Notes whether this component holds a lease.
    pub(crate) fn leads(&self, lease: &str, leads: bool) {
        self.leading.with(&[lease]).set(f64::from(u8::from(leads)));
    }
}
