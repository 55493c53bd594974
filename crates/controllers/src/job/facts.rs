//! What is asked of a Job and of its pods in several places. No I/O.

use std::cmp::Ordering;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobCondition, JobSpec, JobStatus};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::pods;

pub(crate) const TRACKING: &str = "batch.kubernetes.io/job-tracking";
pub(crate) const INDEX: &str = "batch.kubernetes.io/job-completion-index";
pub(crate) const INDEX_FAILURES: &str = "batch.kubernetes.io/job-index-failure-count";
pub(crate) const INDEX_IGNORED_FAILURES: &str = "batch.kubernetes.io/job-index-ignored-failure-count";
/// The value of `spec.managedBy` that names this controller.
const OURSELVES: &str = "kubernetes.io/job-controller";

/// The condition by which a Job is over, Complete or Failed.
pub(crate) fn finished(job: &Job) -> Option<&JobCondition> {
    let conditions = job.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| {
        matches!(condition.type_.as_str(), "Complete" | "Failed") && condition.status == "True"
    })
}

/// True if another controller than this one takes care of the Job.
pub(crate) fn is_managed_elsewhere(job: &Job) -> bool {
    let manager = job.spec.as_ref().and_then(|spec| spec.managed_by.as_deref());
    manager.is_some_and(|manager| manager != OURSELVES)
}

pub(crate) fn is_suspended(spec: &JobSpec) -> bool {
    spec.suspend == Some(true)
}

/// As metrics name it.
pub(crate) fn completion_mode(spec: &JobSpec) -> &'static str {
    if is_indexed(spec) { "Indexed" } else { "NonIndexed" }
}

pub(crate) fn is_indexed(spec: &JobSpec) -> bool {
    spec.completion_mode.as_deref() == Some("Indexed")
}

/// True if a pod that is being deleted is replaced only when it has ended.
pub(crate) fn replaces_only_failed(spec: &JobSpec) -> bool {
    spec.pod_replacement_policy.as_deref() == Some("Failed") || spec.pod_failure_policy.is_some()
}

pub(crate) fn is_tracked(pod: &Pod) -> bool {
    pod.metadata
        .finalizers
        .iter()
        .flatten()
        .any(|finalizer| finalizer == TRACKING)
}

pub(crate) fn succeeded(pod: &Pod) -> bool {
    pods::phase(pod) == "Succeeded"
}

/// A pod that is being deleted counts as failed unless the Job wants to see how it ends: an orphan may never get there.
pub(crate) fn failed(pod: &Pod, spec: &JobSpec) -> bool {
    match pods::phase(pod) {
        "Failed" => true,
        "Succeeded" => false,
        _ => pod.metadata.deletion_timestamp.is_some() && !replaces_only_failed(spec),
    }
}

pub(crate) fn index_of(pod: &Pod) -> Option<i32> {
    let text = pod.metadata.annotations.as_ref()?.get(INDEX)?;
    text.parse().ok().filter(|index| *index >= 0)
}

/// A count that a user may have changed: what cannot be read is zero.
pub(crate) fn failures(pod: &Pod, annotation: &str) -> i32 {
    let text = pod
        .metadata
        .annotations
        .as_ref()
        .and_then(|all| all.get(annotation));
    text.and_then(|text| text.parse().ok())
        .filter(|count| *count >= 0)
        .unwrap_or(0)
}

/// How often the pod's index had failed before, ignored failures included.
pub(crate) fn absolute_failures(pod: &Pod) -> i32 {
    failures(pod, INDEX_FAILURES).saturating_add(failures(pod, INDEX_IGNORED_FAILURES))
}

pub(crate) fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

pub(crate) fn condition<'a>(status: &'a JobStatus, type_: &str) -> Option<&'a JobCondition> {
    let mut conditions = status.conditions.iter().flatten();
    conditions.find(|condition| condition.type_ == type_)
}

pub(crate) fn is_true(status: &JobStatus, type_: &str) -> bool {
    condition(status, type_).is_some_and(|condition| condition.status == "True")
}

pub(crate) fn new_condition(
    type_: &str,
    status: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> JobCondition {
    JobCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_probe_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    }
}

/// Adds or replaces a condition and says whether that changed anything. One that is false is not added.
pub(crate) fn set_condition(status: &mut JobStatus, wanted: JobCondition) -> bool {
    let conditions = status.conditions.get_or_insert_default();
    match conditions
        .iter_mut()
        .find(|present| present.type_ == wanted.type_)
    {
        Some(present) => {
            let same = present.status == wanted.status
                && present.reason == wanted.reason
                && present.message == wanted.message;
            if !same {
                *present = wanted;
            }
            !same
        }
        None if wanted.status == "False" => false,
        None => {
            conditions.push(wanted);
            true
        }
    }
}

/// Orders active pods by how little has been invested in them, first to go first.
pub(crate) fn removal_order(left: &Pod, right: &Pod) -> Ordering {
    let phase = |pod: &Pod| match pods::phase(pod) {
        "Unknown" => 1,
        "Running" => 2,
        _ => 0,
    };
    let ready_since = |pod: &Pod| {
        let ready = pods::condition(pod, "Ready").filter(|condition| condition.status == "True")?;
        ready.last_transition_time.as_ref().map(|time| time.0)
    };
    let restarts = |pod: &Pod| {
        let statuses = pod.status.iter().flat_map(|status| &status.container_statuses);
        statuses
            .flatten()
            .map(|status| status.restart_count)
            .max()
            .unwrap_or(0)
    };
    let created = |pod: &Pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    // The younger goes first, and one without a time before all.
    let younger = |left: Option<Timestamp>, right: Option<Timestamp>| match (left, right) {
        (Some(left), Some(right)) => right.cmp(&left),
        (left, right) => left.cmp(&right),
    };
    let both_ready = pods::is_ready(left) && pods::is_ready(right);
    (!pods::node_name(left).is_empty())
        .cmp(&!pods::node_name(right).is_empty())
        .then_with(|| phase(left).cmp(&phase(right)))
        .then_with(|| pods::is_ready(left).cmp(&pods::is_ready(right)))
        .then_with(|| match both_ready {
            true => younger(ready_since(left), ready_since(right)),
            false => Ordering::Equal,
        })
        .then_with(|| restarts(right).cmp(&restarts(left)))
        .then_with(|| younger(created(left), created(right)))
        .then_with(|| uid(left).cmp(uid(right)))
}
