//! The status of a PodDisruptionBudget, without I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::pods;

/// An evicted pod that is not being deleted after this long will not be.
pub(super) const DELETION_TIMEOUT: SignedDuration = SignedDuration::from_mins(2);
/// After this long without a deletion a pod's DisruptionTarget condition is taken back.
const STALE_CONDITION_TIMEOUT: SignedDuration = SignedDuration::from_mins(2);

/// Whether the number of expected pods is what the pods' controllers are scaled to.
pub(super) fn needs_scale(budget: &PodDisruptionBudget) -> bool {
    budget.spec.as_ref().is_some_and(|spec| {
        spec.max_unavailable.is_some() || matches!(spec.min_available, Some(IntOrString::String(_)))
    })
}

fn scaled(value: &IntOrString, total: i32) -> Result<i32, String> {
    match value {
        IntOrString::Int(number) => Ok(*number),
        IntOrString::String(text) => {
            let invalid = |why: &str| format!("invalid value for IntOrString: {why}");
            let digits = text
                .strip_suffix('%')
                .ok_or_else(|| invalid("invalid type: string is not a percentage"))?;
            let percent: i32 = digits
                .parse()
                .map_err(|_| invalid(&format!("invalid value {text:?}: not a number")))?;
            let whole = (i64::from(percent) * i64::from(total) + 99).div_euclid(100);
            Ok(i32::try_from(whole).unwrap_or(i32::MAX))
        }
    }
}

/// The expected pods and how many of them must be healthy.
pub(super) fn expected(budget: &PodDisruptionBudget, pods: usize, scale: i32) -> Result<(i32, i32), String> {
    let Some(spec) = &budget.spec else {
        return Ok((0, 0));
    };
    if let Some(max) = &spec.max_unavailable {
        return Ok((scale, scale.saturating_sub(scaled(max, scale)?).max(0)));
    }
    match &spec.min_available {
        Some(IntOrString::Int(number)) => Ok((i32::try_from(pods).unwrap_or(i32::MAX), *number)),
        Some(percent) => Ok((scale, scaled(percent, scale)?)),
        None => Ok((0, 0)),
    }
}

/// What becomes of the pods whose eviction was granted.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Disrupted {
    pub(super) pods: BTreeMap<String, Time>,
    /// Pods that should be gone and are not.
    pub(super) not_deleted: Vec<String>,
    pub(super) recheck_at: Option<Timestamp>,
}

pub(super) fn disrupted(budget: &PodDisruptionBudget, pods: &[Arc<Pod>], now: Timestamp) -> Disrupted {
    let mut result = Disrupted::default();
    let told = budget
        .status
        .as_ref()
        .and_then(|status| status.disrupted_pods.as_ref());
    let Some(told) = told else {
        return result;
    };
    for pod in pods
        .iter()
        .filter(|pod| pod.metadata.deletion_timestamp.is_none())
    {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let Some(since) = told.get(name) else { continue };
        let until = since.0.saturating_add(DELETION_TIMEOUT).unwrap_or(Timestamp::MAX);
        if until < now {
            result.not_deleted.push(name.to_owned());
        } else {
            result.recheck_at = Some(result.recheck_at.map_or(until, |earlier| earlier.min(until)));
            result.pods.insert(name.to_owned(), since.clone());
        }
    }
    result
}

fn healthy(pods: &[Arc<Pod>], disrupted: &Disrupted, now: Timestamp) -> i32 {
    let is_leaving = |pod: &Pod| {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        disrupted
            .pods
            .get(name)
            .is_some_and(|since| since.0.saturating_add(DELETION_TIMEOUT).unwrap_or(Timestamp::MAX) > now)
    };
    let counted = pods
        .iter()
        .filter(|pod| pod.metadata.deletion_timestamp.is_none() && !is_leaving(pod) && pods::is_ready(pod));
    i32::try_from(counted.count()).unwrap_or(i32::MAX)
}

fn set_condition(conditions: &mut Vec<Condition>, mut wanted: Condition) {
    match conditions.iter_mut().find(|one| one.type_ == wanted.type_) {
        Some(existing) => {
            if existing.status == wanted.status {
                wanted.last_transition_time = existing.last_transition_time.clone();
            }
            *existing = wanted;
        }
        None => conditions.push(wanted),
    }
}

fn allowed_condition(status: &PodDisruptionBudgetStatus, now: Timestamp) -> Condition {
    let (state, reason) = if status.disruptions_allowed > Some(0) {
        ("True", "SufficientPods")
    } else {
        ("False", "InsufficientPods")
    };
    Condition {
        type_: "DisruptionAllowed".into(),
        status: state.into(),
        reason: reason.into(),
        message: String::new(),
        observed_generation: status.observed_generation,
        last_transition_time: Time(now),
    }
}

/// The status that the budget should have; `None` if it has it.
pub(super) fn status(
    budget: &PodDisruptionBudget,
    pods: &[Arc<Pod>],
    (expected, desired): (i32, i32),
    disrupted: &Disrupted,
    now: Timestamp,
) -> Option<PodDisruptionBudgetStatus> {
    let present = budget.status.clone().unwrap_or_default();
    let current = healthy(pods, disrupted, now);
    // With no expected pods nothing is allowed: the first ones may come before the next look.
    let allowed = if expected <= 0 {
        0
    } else {
        current.saturating_sub(desired).max(0)
    };
    let mut wanted = PodDisruptionBudgetStatus {
        current_healthy: Some(current),
        desired_healthy: Some(desired),
        expected_pods: Some(expected),
        disruptions_allowed: Some(allowed),
        disrupted_pods: (!disrupted.pods.is_empty()).then(|| disrupted.pods.clone()),
        observed_generation: budget.metadata.generation,
        conditions: present.conditions.clone(),
    };
    let condition = allowed_condition(&wanted, now);
    let found = present.conditions.iter().flatten();
    let told = found
        .filter(|one| one.type_ == condition.type_)
        .any(|one| one.status == condition.status && one.reason == condition.reason);
    let empty_as_none = |pods: &Option<BTreeMap<String, Time>>| pods.clone().filter(|pods| !pods.is_empty());
    let same = told
        && present.current_healthy.unwrap_or(0) == wanted.current_healthy.unwrap_or(0)
        && present.desired_healthy.unwrap_or(0) == wanted.desired_healthy.unwrap_or(0)
        && present.expected_pods.unwrap_or(0) == wanted.expected_pods.unwrap_or(0)
        && present.disruptions_allowed.unwrap_or(0) == wanted.disruptions_allowed.unwrap_or(0)
        && empty_as_none(&present.disrupted_pods) == wanted.disrupted_pods
        && present.observed_generation == wanted.observed_generation;
    if same {
        return None;
    }
    set_condition(wanted.conditions.get_or_insert_default(), condition);
    Some(wanted)
}

/// The status of a budget that cannot be calculated: no eviction is safe. `None` if it says so already.
pub(super) fn failed(
    budget: &PodDisruptionBudget,
    why: &str,
    now: Timestamp,
) -> Option<PodDisruptionBudgetStatus> {
    let present = budget.status.clone().unwrap_or_default();
    let mut wanted = present.clone();
    wanted.disruptions_allowed = Some(0);
    let condition = Condition {
        type_: "DisruptionAllowed".into(),
        status: "False".into(),
        reason: "SyncFailed".into(),
        message: why.into(),
        observed_generation: present.observed_generation,
        last_transition_time: Time(now),
    };
    set_condition(wanted.conditions.get_or_insert_default(), condition);
    (wanted != present).then_some(wanted)
}

/// When the pod's DisruptionTarget condition becomes stale; `None` if it cannot: the pod is being deleted or has
/// ended, or the kubelet set it, which may take any time to end the pod.
pub(super) fn stale_at(pod: &Pod) -> Option<Timestamp> {
    if pod.metadata.deletion_timestamp.is_some() || pods::is_terminal(pod) {
        return None;
    }
    let found = pods::condition(pod, "DisruptionTarget")?;
    if found.status != "True" || found.reason.as_deref() == Some("TerminationByKubelet") {
        return None;
    }
    let since = found
        .last_transition_time
        .as_ref()
        .map_or(Timestamp::MIN, |time| time.0);
    Some(
        since
            .saturating_add(STALE_CONDITION_TIMEOUT)
            .unwrap_or(Timestamp::MAX),
    )
}

/// The pod with a DisruptionTarget condition that is false.
pub(super) fn without_target(pod: &Pod, now: Timestamp) -> Pod {
    let mut pod = pod.clone();
    let wanted = PodCondition {
        type_: "DisruptionTarget".into(),
        status: "False".into(),
        observed_generation: pod.metadata.generation,
        last_transition_time: Some(Time(now)),
        ..Default::default()
    };
    let conditions = pod
        .status
        .get_or_insert_default()
        .conditions
        .get_or_insert_default();
    for condition in conditions
        .iter_mut()
        .filter(|one| one.type_ == "DisruptionTarget")
    {
        *condition = wanted.clone();
    }
    pod
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn now() -> Timestamp {
        "2026-01-01T00:10:00Z".parse().unwrap()
    }

    fn budget(spec: Value, status: Value) -> PodDisruptionBudget {
        let value = json!({"metadata": {"name": "b", "namespace": "ns", "generation": 2}, "spec": spec, "status": status});
        serde_json::from_value(value).unwrap()
    }

    fn pod(name: &str, ready: bool, deleting: bool) -> Arc<Pod> {
        let ready = if ready { "True" } else { "False" };
        let deleted = deleting.then_some("2026-01-01T00:00:00Z");
        let value = json!({"metadata": {"name": name, "deletionTimestamp": deleted},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}});
        Arc::new(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn expected_and_desired() {
        let check = |spec: Value, pods: usize, scale: i32, expected_: Result<(i32, i32), &str>| {
            let made = expected(&budget(spec.clone(), json!(null)), pods, scale);
            assert_eq!(
                made.as_ref().map_err(String::as_str),
                expected_.as_ref().map_err(|e| *e),
                "{spec}"
            );
        };
        check(json!({"minAvailable": 3}), 5, 0, Ok((5, 3)));
        check(json!({"minAvailable": "28%"}), 5, 5, Ok((5, 2)));
        check(json!({"minAvailable": "100%"}), 3, 10, Ok((10, 10)));
        check(json!({"maxUnavailable": 1}), 5, 7, Ok((7, 6)));
        check(json!({"maxUnavailable": "30%"}), 5, 7, Ok((7, 4)));
        check(json!({"maxUnavailable": 9}), 5, 7, Ok((7, 0)));
        check(json!({}), 5, 7, Ok((0, 0)));
        check(
            json!({"maxUnavailable": "x"}),
            1,
            1,
            Err("invalid value for IntOrString: invalid type: string is not a percentage"),
        );
        assert!(needs_scale(&budget(json!({"maxUnavailable": 1}), json!(null))));
        assert!(!needs_scale(&budget(json!({"minAvailable": 1}), json!(null))));
    }

    #[test]
    fn the_status_says_what_may_go() {
        let check = |pods: &[Arc<Pod>], expected: (i32, i32), told: Value, result: (i32, i32, &str)| {
            let budget = budget(
                json!({"minAvailable": 1}),
                json!({"currentHealthy": 0, "desiredHealthy": 0,
                "disruptionsAllowed": 0, "expectedPods": 0, "disruptedPods": told}),
            );
            let disrupted = disrupted(&budget, pods, now());
            let status = status(&budget, pods, expected, &disrupted, now()).unwrap();
            let reason = status.conditions.as_ref().unwrap()[0].reason.clone();
            let seen = (
                status.current_healthy.unwrap(),
                status.disruptions_allowed.unwrap(),
                reason.as_str(),
            );
            assert_eq!(seen, result);
            // The same again is no write.
            let mut budget = budget.clone();
            budget.status = Some(status);
            assert_eq!(super::status(&budget, pods, expected, &disrupted, now()), None);
        };
        let three = [
            pod("a", true, false),
            pod("b", true, false),
            pod("c", false, false),
        ];
        check(&three, (3, 1), json!(null), (2, 1, "SufficientPods"));
        check(&three, (3, 2), json!(null), (2, 0, "InsufficientPods"));
        check(&three, (0, 0), json!(null), (2, 0, "InsufficientPods"));
        check(
            &[pod("a", true, true)],
            (1, 0),
            json!(null),
            (0, 0, "InsufficientPods"),
        );
        // One was granted an eviction a minute ago.
        check(
            &three,
            (3, 1),
            json!({"a": "2026-01-01T00:09:00Z"}),
            (1, 0, "InsufficientPods"),
        );
        check(
            &three,
            (3, 1),
            json!({"a": "2026-01-01T00:01:00Z"}),
            (2, 1, "SufficientPods"),
        );
    }

    #[test]
    fn evictions_that_come_to_nothing_are_forgotten() {
        let told = json!({"currentHealthy": 0, "desiredHealthy": 0, "disruptionsAllowed": 0, "expectedPods": 0,
            "disruptedPods": {"a": "2026-01-01T00:09:00Z", "b": "2026-01-01T00:07:59Z",
                "gone": "2026-01-01T00:09:00Z", "ending": "2026-01-01T00:09:00Z"}});
        let pods = [
            pod("a", true, false),
            pod("b", true, false),
            pod("ending", true, true),
        ];
        let result = disrupted(&budget(json!({}), told), &pods, now());
        assert_eq!(result.pods.keys().collect::<Vec<_>>(), vec!["a"]);
        assert_eq!(result.not_deleted, vec!["b"]);
        assert_eq!(result.recheck_at, Some("2026-01-01T00:11:00Z".parse().unwrap()));
    }

    #[test]
    fn what_cannot_be_calculated_allows_nothing() {
        let present =
            json!({"currentHealthy": 3, "desiredHealthy": 1, "disruptionsAllowed": 2, "expectedPods": 3});
        let mut budget = budget(json!({}), present);
        let status = failed(&budget, "why", now()).unwrap();
        assert_eq!(status.disruptions_allowed, Some(0));
        let condition = &status.conditions.as_ref().unwrap()[0];
        assert_eq!(
            (condition.reason.as_str(), condition.message.as_str()),
            ("SyncFailed", "why")
        );
        budget.status = Some(status);
        assert_eq!(failed(&budget, "why", now()), None);
    }

    #[test]
    fn stale_conditions() {
        let check = |patch: Value, expected: Option<&str>| {
            let mut value = json!({"metadata": {"name": "p", "generation": 4}, "status": {"phase": "Running", "conditions": [
                {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
            for (pointer, change) in patch.as_object().unwrap() {
                let (parent, last) = pointer.rsplit_once('/').unwrap();
                value.pointer_mut(parent).unwrap()[last] = change.clone();
            }
            let pod: Pod = serde_json::from_value(value).unwrap();
            assert_eq!(stale_at(&pod), expected.map(|at| at.parse().unwrap()), "{patch}");
            let condition = without_target(&pod, now())
                .status
                .unwrap()
                .conditions
                .unwrap()
                .remove(0);
            assert_eq!(condition.observed_generation, Some(4));
            assert_eq!((condition.status.as_str(), condition.reason), ("False", None));
        };
        check(json!({}), Some("2026-01-01T00:02:00Z"));
        check(json!({"/status/phase": "Failed"}), None);
        check(
            json!({"/metadata/deletionTimestamp": "2026-01-01T00:00:00Z"}),
            None,
        );
        check(
            json!({"/status/conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]}),
            None,
        );
    }
}
