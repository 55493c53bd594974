//! What a pod's status says of it: phase, readiness, whether it is active, ended or on its way out.

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

pub fn condition<'a>(pod: &'a Pod, type_: &str) -> Option<&'a PodCondition> {
    pod.status
        .as_ref()?
        .conditions
        .as_ref()?
        .iter()
        .find(|condition| condition.type_ == type_)
}

/// The phase, or `""` if there is none.
pub fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

/// The node that the pod is bound to, or `""`.
pub fn node_name(pod: &Pod) -> &str {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.node_name.as_deref())
        .unwrap_or_default()
}

/// A pod without a priority has the priority 0.
pub fn priority(pod: &Pod) -> i32 {
    pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)
}

/// It ended, and takes no resources of its node any more.
pub fn is_terminal(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

/// It neither ended nor is being deleted.
pub fn is_active(pod: &Pod) -> bool {
    !is_terminal(pod) && pod.metadata.deletion_timestamp.is_none()
}

/// It is being deleted and has not ended yet.
pub fn is_terminating(pod: &Pod) -> bool {
    !is_terminal(pod) && pod.metadata.deletion_timestamp.is_some()
}

pub fn is_ready(pod: &Pod) -> bool {
    condition(pod, "Ready").is_some_and(|condition| condition.status == "True")
}

/// Since when the pod is ready; `None` if it is not, or does not say.
pub fn ready_since(pod: &Pod) -> Option<Timestamp> {
    let ready = condition(pod, "Ready").filter(|condition| condition.status == "True")?;
    ready.last_transition_time.as_ref().map(|time| time.0)
}

/// When the pod will have been ready for `min_ready_seconds`; `None` if it is not ready.
pub fn available_at(pod: &Pod, min_ready_seconds: i32) -> Option<Timestamp> {
    if !is_ready(pod) {
        return None;
    }
    if min_ready_seconds <= 0 {
        return Some(Timestamp::MIN);
    }
    ready_since(pod)?
        .checked_add(SignedDuration::from_secs(min_ready_seconds.into()))
        .ok()
}

/// Ready for at least `min_ready_seconds`.
pub fn is_available(pod: &Pod, min_ready_seconds: i32, now: Timestamp) -> bool {
    available_at(pod, min_ready_seconds).is_some_and(|at| at <= now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(meta: Value, status: Value) -> Pod {
        serde_json::from_value(json!({"metadata": meta, "spec": {"containers": []}, "status": status}))
            .unwrap()
    }

    #[test]
    fn active_terminal_and_terminating_exclude_each_other() {
        let deleted = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        let check = |meta: &Value, phase: &str, active: bool, terminal: bool, terminating: bool| {
            let pod = pod(meta.clone(), json!({"phase": phase}));
            assert_eq!(
                (is_active(&pod), is_terminal(&pod), is_terminating(&pod)),
                (active, terminal, terminating)
            );
        };
        check(&json!({}), "Running", true, false, false);
        check(&json!({}), "", true, false, false);
        check(&json!({}), "Failed", false, true, false);
        check(&deleted, "Running", false, false, true);
        check(&deleted, "Succeeded", false, true, false);
    }

    #[test]
    fn availability_waits_for_min_ready_seconds() {
        let check = |status: &str, min: i32, now: &str, expected: bool| {
            let pod = pod(
                json!({}),
                json!({"conditions": [
                {"type": "Ready", "status": status, "lastTransitionTime": "2026-01-01T00:00:10Z"}]}),
            );
            assert_eq!(
                is_available(&pod, min, now.parse().unwrap()),
                expected,
                "{status} {min} {now}"
            );
        };
        check("True", 0, "2026-01-01T00:00:10Z", true);
        check("True", 5, "2026-01-01T00:00:14Z", false);
        check("True", 5, "2026-01-01T00:00:15Z", true);
        check("False", 0, "2026-01-01T00:00:15Z", false);
    }
}
