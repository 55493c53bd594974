//! What single controllers count, by upstream's names, labels and buckets, besides their queues (`skiff_client`'s). A
//! controller makes its families when it starts, and counts what has happened: a write that succeeded, a sync that ended.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use skiff_prometheus::{Counter, Family, Histogram, Registry, exponential_buckets};

/// Label values are few, but for the names of zones and namespaces.
const MAX_SERIES: usize = 512;

/// Seconds from `start` to `end`; a clock that was set back gives none.
fn seconds(start: Timestamp, end: Timestamp) -> f64 {
    end.duration_since(start).as_secs_f64().max(0.0)
}

fn histogram(registry: &Registry, name: &'static str, help: &'static str, buckets: &[f64]) -> Arc<Histogram> {
    registry.histograms(name, help, &[], 1, buckets).with(&[])
}

fn counter(registry: &Registry, name: &'static str, help: &'static str) -> Arc<Counter> {
    registry.counters(name, help, &[], 1).with(&[])
}

/// Of the Job controller.
pub(crate) struct JobMetrics {
    durations: Arc<Family<Histogram>>,
    syncs: Arc<Family<Counter>>,
    finished: Arc<Family<Counter>>,
    pods_finished: Arc<Family<Counter>>,
    failures_handled: Arc<Family<Counter>>,
}

impl JobMetrics {
    pub(crate) fn new(registry: &Registry) -> JobMetrics {
        let of_syncs = &["action", "completion_mode", "result"];
        JobMetrics {
            durations: registry.histograms(
                "job_controller_job_sync_duration_seconds",
                "The time it took to sync a job",
                of_syncs,
                MAX_SERIES,
                &exponential_buckets(0.004, 2.0, 15),
            ),
            syncs: registry.counters(
                "job_controller_job_syncs_total",
                "The number of job syncs",
                of_syncs,
                MAX_SERIES,
            ),
            finished: registry.counters(
                "job_controller_jobs_finished_total",
                "The number of finished jobs",
                &["completion_mode", "reason", "result"],
                MAX_SERIES,
            ),
            pods_finished: registry.counters(
                "job_controller_job_pods_finished_total",
                "The number of finished pods that are counted in the status of their job",
                &["completion_mode", "result"],
                MAX_SERIES,
            ),
            failures_handled: registry.counters(
                "job_controller_pod_failures_handled_by_failure_policy_total",
                "The number of failed pods that a rule of the pod failure policy matched, by the rule's action",
                &["action"],
                MAX_SERIES,
            ),
        }
    }

    pub(crate) fn synced(&self, action: &str, mode: &str, succeeded: bool, took: Duration) {
        let result = if succeeded { "success" } else { "error" };
        let labels = [action, mode, result];
        self.durations.with(&labels).observe_duration(took);
        self.syncs.with(&labels).inc();
    }

    pub(crate) fn finished(&self, mode: &str, succeeded: bool, reason: &str) {
        let result = if succeeded { "succeeded" } else { "failed" };
        self.finished.with(&[mode, reason, result]).inc();
    }

    /// How many pods, or indexes, a written status counts more than the one before.
    pub(crate) fn pods_finished(&self, mode: &str, succeeded: i32, failed: i32) {
        for (result, count) in [("succeeded", succeeded), ("failed", failed)] {
            (0..count).for_each(|_| self.pods_finished.with(&[mode, result]).inc());
        }
    }

    pub(crate) fn failure_handled(&self, action: &str) {
        self.failures_handled.with(&[action]).inc();
    }
}

/// From the time of a schedule to the creation of its Job.
pub(crate) struct JobCreationSkew(Arc<Histogram>);

impl JobCreationSkew {
    pub(crate) fn new(registry: &Registry) -> JobCreationSkew {
        let name = "cronjob_controller_job_creation_skew_duration_seconds";
        let help = "Time between when a cronjob is scheduled to run and when its job is created";
        JobCreationSkew(histogram(
            registry,
            name,
            help,
            &exponential_buckets(1.0, 2.0, 10),
        ))
    }

    pub(crate) fn created(&self, scheduled: Timestamp, created: Timestamp) {
        self.0.observe(seconds(scheduled, created));
    }
}

/// From the end of a Job's TTL to its deletion.
pub(crate) struct JobDeletions(Arc<Histogram>);

impl JobDeletions {
    pub(crate) fn new(registry: &Registry) -> JobDeletions {
        let name = "ttl_after_finished_controller_job_deletion_duration_seconds";
        let help = "The time it took to delete the job since it became eligible for deletion";
        JobDeletions(histogram(
            registry,
            name,
            help,
            &exponential_buckets(0.1, 2.0, 14),
        ))
    }

    pub(crate) fn deleted(&self, expired: Timestamp) {
        self.0.observe(seconds(expired, Timestamp::now()));
    }
}

/// Of the EndpointSlice controller.
pub(crate) struct SliceMetrics {
    changes: Arc<Family<Counter>>,
    syncs: Arc<Family<Counter>>,
}

impl SliceMetrics {
    pub(crate) fn new(registry: &Registry) -> SliceMetrics {
        SliceMetrics {
            changes: registry.counters(
                "endpoint_slice_controller_changes",
                "Number of EndpointSlice changes",
                &["operation"],
                MAX_SERIES,
            ),
            syncs: registry.counters(
                "endpoint_slice_controller_syncs",
                "Number of EndpointSlice syncs",
                &["result"],
                MAX_SERIES,
            ),
        }
    }

    /// `create`, `update` or `delete`.
    pub(crate) fn changed(&self, operation: &str) {
        self.changes.with(&[operation]).inc();
    }

    pub(crate) fn synced(&self, succeeded: bool) {
        let result = if succeeded { "success" } else { "error" };
        self.syncs.with(&[result]).inc();
    }
}

/// Nodes that got the taint that evicts their pods, by zone.
pub(crate) fn node_evictions(registry: &Registry) -> Arc<Family<Counter>> {
    registry.counters(
        "node_collector_evictions_total",
        "Number of node evictions since this controller started",
        &["zone"],
        MAX_SERIES,
    )
}

/// Of the taint eviction controller.
pub(crate) struct TaintEvictions {
    total: Arc<Counter>,
    latency: Arc<Histogram>,
}

impl TaintEvictions {
    pub(crate) fn new(registry: &Registry) -> TaintEvictions {
        TaintEvictions {
            total: counter(
                registry,
                "taint_eviction_controller_pod_deletions_total",
                "Total number of pods that the taint eviction controller deleted since its start",
            ),
            latency: histogram(
                registry,
                "taint_eviction_controller_pod_deletion_duration_seconds",
                "Seconds from when a taint takes effect on a pod to the pod's deletion",
                &[
                    0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0, 120.0, 180.0, 240.0,
                ],
            ),
        }
    }

    pub(crate) fn deleted(&self, due: Timestamp) {
        self.total.inc();
        self.latency.observe(seconds(due, Timestamp::now()));
    }
}

/// Of the pod garbage collector.
pub(crate) struct PodRemovals {
    total: Arc<Family<Counter>>,
    errors: Arc<Family<Counter>>,
}

impl PodRemovals {
    pub(crate) fn new(registry: &Registry) -> PodRemovals {
        let labels = &["namespace", "reason"];
        PodRemovals {
            total: registry.counters(
                "pod_gc_collector_force_delete_pods_total",
                "Number of pods that are being forcefully deleted since the pod garbage collector started",
                labels,
                MAX_SERIES,
            ),
            errors: registry.counters(
                "pod_gc_collector_force_delete_pod_errors_total",
                "Number of errors when forcefully deleting pods since the pod garbage collector started",
                labels,
                MAX_SERIES,
            ),
        }
    }

    pub(crate) fn removed(&self, namespace: &str, reason: &str, succeeded: bool) {
        self.total.with(&[namespace, reason]).inc();
        if !succeeded {
            self.errors.with(&[namespace, reason]).inc();
        }
    }
}

/// Of the horizontal pod autoscaler.
pub(crate) struct AutoscalerMetrics {
    total: Arc<Family<Counter>>,
    durations: Arc<Family<Histogram>>,
}

impl AutoscalerMetrics {
    pub(crate) fn new(registry: &Registry) -> AutoscalerMetrics {
        let labels = &["action", "error"];
        AutoscalerMetrics {
            total: registry.counters(
                "horizontal_pod_autoscaler_controller_reconciliations_total",
                "Number of reconciliations. The action is scale_down, scale_up or none; the error is spec, internal or none",
                labels,
                MAX_SERIES,
            ),
            durations: registry.histograms(
                "horizontal_pod_autoscaler_controller_reconciliation_duration_seconds",
                "The time in seconds that one reconciliation takes. The action is scale_down, scale_up or none; the error is spec, internal or none",
                labels,
                MAX_SERIES,
                &exponential_buckets(0.001, 2.0, 15),
            ),
        }
    }

    pub(crate) fn reconciled(&self, action: &str, error: &str, took: Duration) {
        self.total.with(&[action, error]).inc();
        self.durations.with(&[action, error]).observe_duration(took);
    }
}

/// How often the garbage collector could not find out which resources there are.
pub(crate) fn resource_sync_errors(registry: &Registry) -> Arc<Counter> {
    counter(
        registry,
        "garbagecollector_controller_resources_sync_error_total",
        "Number of garbage collector resources sync errors",
    )
}
