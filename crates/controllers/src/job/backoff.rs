//! How long a Job waits before it replaces failed pods: ten seconds, doubled with each failure, counted from the time
//! at which the last pod failed. No I/O.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use super::facts::absolute_failures;
use crate::pods;

const BASE: i64 = 10;
const MAX: i64 = 600;

/// The failures since the last success, and when the last of them was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backoff {
    pub(crate) failures: i32,
    pub(crate) last_failure: Option<Timestamp>,
}

impl Backoff {
    /// The state after these pods have finished as well.
    pub(crate) fn after(self, succeeded: &[Arc<Pod>], failed: &[Arc<Pod>]) -> Backoff {
        let mut failures: Vec<Timestamp> = failed.iter().map(|pod| finished_at(pod)).collect();
        let last_success = succeeded.iter().map(|pod| finished_at(pod)).max();
        if let Some(last_success) = last_success {
            failures.retain(|at| *at > last_success);
        }
        let before = if last_success.is_some() {
            Backoff::default()
        } else {
            self
        };
        Backoff {
            failures: before
                .failures
                .saturating_add(i32::try_from(failures.len()).unwrap_or(i32::MAX)),
            last_failure: failures.into_iter().max().or(before.last_failure),
        }
    }

    pub(crate) fn remaining(self, now: Timestamp) -> Duration {
        self.last_failure
            .map_or(Duration::ZERO, |last| remaining(self.failures, last, now))
    }
}

/// How long the index of this failed pod waits for its replacement.
pub(crate) fn remaining_of_index(failed: &Pod, now: Timestamp) -> Duration {
    remaining(
        absolute_failures(failed).saturating_add(1),
        finished_at(failed),
        now,
    )
}

fn remaining(failures: i32, last: Timestamp, now: Timestamp) -> Duration {
    if failures <= 0 {
        return Duration::ZERO;
    }
    let doublings = u32::try_from(failures - 1).unwrap_or(0).min(10);
    let wait = SignedDuration::from_secs((BASE << doublings).min(MAX));
    Duration::try_from(wait - now.duration_since(last)).unwrap_or(Duration::ZERO)
}

/// When a pod finished, by the best that is known: its containers, its readiness, its deletion, its creation.
pub(crate) fn finished_at(pod: &Pod) -> Timestamp {
    let readiness = || {
        let ready = pods::condition(pod, "Ready").filter(|condition| condition.status == "False")?;
        Some(ready.last_transition_time.as_ref()?.0)
    };
    let deletion = || {
        let at = pod.metadata.deletion_timestamp.as_ref()?.0;
        let grace = SignedDuration::from_secs(pod.metadata.deletion_grace_period_seconds.unwrap_or(0));
        at.checked_sub(grace).ok()
    };
    let creation = || pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    containers_finished_at(pod)
        .or_else(readiness)
        .or_else(deletion)
        .or_else(creation)
        .unwrap_or(Timestamp::UNIX_EPOCH)
}

/// The end of the last container, sidecars included; `None` if one has not ended.
fn containers_finished_at(pod: &Pod) -> Option<Timestamp> {
    let status = pod.status.as_ref()?;
    let init = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_ref());
    let is_sidecar = |status: &&ContainerStatus| {
        init.into_iter().flatten().any(|container| {
            container.name == status.name && container.restart_policy.as_deref() == Some("Always")
        })
    };
    let sidecars = status.init_container_statuses.iter().flatten().filter(is_sidecar);
    let mut last = None;
    for container in status.container_statuses.iter().flatten().chain(sidecars) {
        let ended = container
            .state
            .as_ref()?
            .terminated
            .as_ref()?
            .finished_at
            .as_ref()?
            .0;
        last = last.max(Some(ended));
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn time(text: &str) -> Timestamp {
        format!("2026-01-01T{text}Z").parse().unwrap()
    }

    fn ended(at: &str) -> Arc<Pod> {
        let status = json!({"containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": false,
            "restartCount": 0, "state": {"terminated": {"exitCode": 1, "finishedAt": time(at).to_string()}}}]});
        Arc::new(serde_json::from_value(json!({"status": status})).unwrap())
    }

    #[test]
    fn waits_double() {
        let check = |failures: i32, now: &str, seconds: u64| {
            let backoff = Backoff {
                failures,
                last_failure: Some(time("00:00:00")),
            };
            assert_eq!(
                backoff.remaining(time(now)).as_secs(),
                seconds,
                "{failures} {now}"
            );
        };
        check(0, "00:00:00", 0);
        check(1, "00:00:00", 10);
        check(1, "00:00:04", 6);
        check(1, "00:00:10", 0);
        check(3, "00:00:00", 40);
        check(7, "00:00:00", 600);
        check(i32::MAX, "00:00:00", 600);
        assert_eq!(Backoff::default().remaining(time("00:00:00")), Duration::ZERO);
    }

    #[test]
    fn a_success_starts_over() {
        let before = Backoff {
            failures: 2,
            last_failure: Some(time("00:00:00")),
        };
        let check = |succeeded: &[&str], failed: &[&str], failures: i32, last: Option<&str>| {
            let pods = |times: &[&str]| times.iter().map(|at| ended(at)).collect::<Vec<_>>();
            let got = before.after(&pods(succeeded), &pods(failed));
            assert_eq!(
                (got.failures, got.last_failure),
                (failures, last.map(time)),
                "{succeeded:?} {failed:?}"
            );
        };
        check(&[], &[], 2, Some("00:00:00"));
        check(&[], &["00:01:00", "00:00:30"], 4, Some("00:01:00"));
        check(&["00:00:30"], &[], 0, None);
        check(&["00:00:30"], &["00:01:00", "00:00:20"], 1, Some("00:01:00"));
        check(&["00:02:00"], &["00:01:00"], 0, None);
    }

    #[test]
    fn the_end_of_a_pod() {
        let check = |pod: Value, expected: &str| {
            let parsed: Pod = serde_json::from_value(pod.clone()).unwrap();
            assert_eq!(finished_at(&parsed), time(expected), "{pod}");
        };
        let container = |name: &str, at: Option<&str>| {
            let state =
                at.map(|at| json!({"terminated": {"exitCode": 0, "finishedAt": time(at).to_string()}}));
            json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state})
        };
        let metadata = json!({"creationTimestamp": time("00:00:01").to_string(),
            "deletionTimestamp": time("00:01:00").to_string(), "deletionGracePeriodSeconds": 30});
        let not_ready =
            json!([{"type": "Ready", "status": "False", "lastTransitionTime": time("00:00:10").to_string()}]);
        let both = json!([container("a", Some("00:00:05")), container("b", Some("00:00:07"))]);
        let running = json!([container("a", Some("00:00:05")), container("b", None)]);
        check(
            json!({"metadata": metadata, "status": {"containerStatuses": both, "conditions": not_ready}}),
            "00:00:07",
        );
        check(
            json!({"metadata": metadata, "status": {"containerStatuses": running, "conditions": not_ready}}),
            "00:00:10",
        );
        check(json!({"metadata": metadata, "status": {}}), "00:00:30");
        check(
            json!({"metadata": {"creationTimestamp": time("00:00:01").to_string()}}),
            "00:00:01",
        );
        // A sidecar ends after the containers; another init container does not count.
        check(
            json!({"spec": {"containers": [], "initContainers": [{"name": "s", "restartPolicy": "Always"}, {"name": "i"}]},
                "status": {"containerStatuses": both,
                    "initContainerStatuses": [container("s", Some("00:00:09")), container("i", Some("00:00:20"))]}}),
            "00:00:09",
        );
    }
}
