//! The status of a Deployment: counts, conditions, and when to look again. No I/O.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::{Deployment, DeploymentCondition, DeploymentStatus, ReplicaSet};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::scaling::{available, max_unavailable, total, wanted};

pub(super) const NEW_SET_AVAILABLE: &str = "NewReplicaSetAvailable";
pub(super) const TIMED_OUT: &str = "ProgressDeadlineExceeded";
pub(super) const PAUSED: &str = "DeploymentPaused";
pub(super) const RESUMED: &str = "DeploymentResumed";

pub(super) fn condition<'a>(status: &'a DeploymentStatus, type_: &str) -> Option<&'a DeploymentCondition> {
    status
        .conditions
        .as_ref()?
        .iter()
        .find(|condition| condition.type_ == type_)
}

pub(super) fn new_condition(
    type_: &str,
    status: &str,
    reason: &str,
    message: String,
    now: Timestamp,
) -> DeploymentCondition {
    DeploymentCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message),
        last_update_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    }
}

/// Sets the condition unless it says the same already; a status that stays keeps its transition time.
pub(super) fn set_condition(status: &mut DeploymentStatus, mut new: DeploymentCondition) {
    if let Some(present) = condition(status, &new.type_)
        && present.status == new.status
    {
        if present.reason == new.reason {
            return;
        }
        new.last_transition_time = present.last_transition_time.clone();
    }
    remove_condition(status, &new.type_.clone());
    status.conditions.get_or_insert_default().push(new);
}

pub(super) fn remove_condition(status: &mut DeploymentStatus, type_: &str) {
    if let Some(conditions) = &mut status.conditions {
        conditions.retain(|condition| condition.type_ != type_);
    }
}

/// `None` also if the deadline is the largest number, which means none.
pub(super) fn progress_deadline(deployment: &Deployment) -> Option<i32> {
    let spec = deployment.spec.as_ref()?;
    spec.progress_deadline_seconds
        .filter(|seconds| *seconds != i32::MAX)
}

pub(super) fn is_complete(deployment: &Deployment, status: &DeploymentStatus) -> bool {
    let wanted = wanted(deployment);
    status.updated_replicas.unwrap_or(0) == wanted
        && status.replicas.unwrap_or(0) == wanted
        && status.available_replicas.unwrap_or(0) == wanted
        && status.observed_generation.unwrap_or(0) >= deployment.metadata.generation.unwrap_or(0)
}

fn made_progress(old: &DeploymentStatus, new: &DeploymentStatus) -> bool {
    let count = |number: Option<i32>| number.unwrap_or(0);
    let outdated = |status: &DeploymentStatus| count(status.replicas) - count(status.updated_replicas);
    count(new.updated_replicas) > count(old.updated_replicas)
        || outdated(new) < outdated(old)
        || count(new.ready_replicas) > count(old.ready_replicas)
        || count(new.available_replicas) > count(old.available_replicas)
}

fn has_timed_out(deployment: &Deployment, status: &DeploymentStatus, now: Timestamp) -> bool {
    let (Some(deadline), Some(progressing)) =
        (progress_deadline(deployment), condition(status, "Progressing"))
    else {
        return false;
    };
    match progressing.reason.as_deref() {
        Some(NEW_SET_AVAILABLE) => false,
        Some(TIMED_OUT) => true,
        _ => progressing.last_update_time.as_ref().is_some_and(|time| {
            time.0
                .checked_add(SignedDuration::from_secs(deadline.into()))
                .is_ok_and(|limit| limit < now)
        }),
    }
}

/// The counts and the Available condition.
pub(super) fn counts(
    deployment: &Deployment,
    new_set: Option<&ReplicaSet>,
    all: &[&ReplicaSet],
    now: Timestamp,
) -> DeploymentStatus {
    let sum = |count: fn(&ReplicaSet) -> i32| -> i32 { all.iter().map(|set| count(set)).sum() };
    let in_status = |set: &ReplicaSet| set.status.as_ref().map_or(0, |status| status.replicas);
    let available_replicas = sum(available);
    let unavailable = (total(all.iter().copied()) - available_replicas).max(0);
    let nonzero = |count: i32| (count != 0).then_some(count);
    let present = deployment.status.clone().unwrap_or_default();
    let mut status = DeploymentStatus {
        observed_generation: deployment.metadata.generation,
        replicas: nonzero(sum(in_status)),
        updated_replicas: nonzero(new_set.map_or(0, in_status)),
        ready_replicas: nonzero(sum(|set| {
            set.status
                .as_ref()
                .and_then(|status| status.ready_replicas)
                .unwrap_or(0)
        })),
        available_replicas: nonzero(available_replicas),
        unavailable_replicas: nonzero(unavailable),
        // A set that was never looked at has none; one that does not tell them leaves the sum unknown.
        terminating_replicas: all
            .iter()
            .filter_map(|set| set.status.as_ref())
            .filter(|status| {
                status.observed_generation.unwrap_or(0) != 0 || status.terminating_replicas.is_some()
            })
            .map(|status| status.terminating_replicas)
            .sum(),
        collision_count: present.collision_count,
        conditions: present.conditions,
    };
    let enough = available_replicas >= wanted(deployment) - max_unavailable(deployment);
    let available = if enough {
        new_condition(
            "Available",
            "True",
            "MinimumReplicasAvailable",
            "Deployment has minimum availability.".into(),
            now,
        )
    } else {
        new_condition(
            "Available",
            "False",
            "MinimumReplicasUnavailable",
            "Deployment does not have minimum availability.".into(),
            now,
        )
    };
    set_condition(&mut status, available);
    status
}

/// The status in the course of a rollout: counts plus what can be said of its progress.
pub(super) fn of_rollout(
    deployment: &Deployment,
    new_set: Option<&ReplicaSet>,
    all: &[&ReplicaSet],
    now: Timestamp,
) -> DeploymentStatus {
    let old = deployment.status.clone().unwrap_or_default();
    let mut status = counts(deployment, new_set, all, now);
    let deadline = progress_deadline(deployment);
    if deadline.is_none() {
        remove_condition(&mut status, "Progressing");
    }
    let current = condition(&old, "Progressing").cloned();
    let done_before = status.replicas == status.updated_replicas
        && current
            .as_ref()
            .is_some_and(|current| current.reason.as_deref() == Some(NEW_SET_AVAILABLE));
    if deadline.is_some() && !done_before {
        let subject = match new_set.and_then(|set| set.metadata.name.as_ref()) {
            Some(name) => format!("ReplicaSet \"{name}\""),
            None => format!(
                "Deployment \"{}\"",
                deployment.metadata.name.as_deref().unwrap_or_default()
            ),
        };
        if is_complete(deployment, &status) {
            let message = format!("{subject} has successfully progressed.");
            set_condition(
                &mut status,
                new_condition("Progressing", "True", NEW_SET_AVAILABLE, message, now),
            );
        } else if made_progress(&old, &status) {
            let message = format!("{subject} is progressing.");
            let mut progressing = new_condition("Progressing", "True", "ReplicaSetUpdated", message, now);
            // Here the same reason with a new update time is news: it moves the deadline.
            if let Some(current) = &current {
                if current.status == "True" {
                    progressing.last_transition_time = current.last_transition_time.clone();
                }
                remove_condition(&mut status, "Progressing");
            }
            set_condition(&mut status, progressing);
        } else if has_timed_out(deployment, &status, now) {
            let message = format!("{subject} has timed out progressing.");
            set_condition(
                &mut status,
                new_condition("Progressing", "False", TIMED_OUT, message, now),
            );
        }
    }
    match replica_failure(new_set, all) {
        Some(failure) => set_condition(&mut status, failure),
        None => remove_condition(&mut status, "ReplicaFailure"),
    }
    status
}

/// The failure of the new set comes before those of old ones.
fn replica_failure(new_set: Option<&ReplicaSet>, all: &[&ReplicaSet]) -> Option<DeploymentCondition> {
    let failure = new_set.into_iter().chain(all.iter().copied()).find_map(|set| {
        let conditions = set.status.as_ref()?.conditions.as_ref()?;
        conditions
            .iter()
            .find(|condition| condition.type_ == "ReplicaFailure")
            .cloned()
    })?;
    Some(DeploymentCondition {
        type_: failure.type_,
        status: failure.status,
        reason: failure.reason,
        message: failure.message,
        last_update_time: failure.last_transition_time.clone(),
        last_transition_time: failure.last_transition_time,
    })
}

/// When a rollout that does not move must be looked at again to notice that its time is up.
pub(super) fn deadline_check(deployment: &Deployment, status: &DeploymentStatus) -> Option<Timestamp> {
    let deadline = progress_deadline(deployment)?;
    let progressing = condition(status, "Progressing")?;
    let over = is_complete(deployment, status)
        || matches!(
            progressing.reason.as_deref(),
            Some(TIMED_OUT | NEW_SET_AVAILABLE | PAUSED)
        );
    if over {
        return None;
    }
    let updated = progressing.last_update_time.as_ref()?.0;
    // A second more, so that the clock has surely passed the deadline, which has whole seconds.
    updated
        .checked_add(SignedDuration::from_secs(i64::from(deadline) + 1))
        .ok()
}
