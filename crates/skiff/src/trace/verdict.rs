//! Whether the object of a trace has arrived, in one sentence: how long it took and what took longest, or why it is
//! not ready and what comes next.

use anyhow::Result;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use kube::Client;
use kube::api::{Api, DynamicObject, ListParams};
use serde_json::Value;
use skiff_trace::{Mark, NEXT_TRY, Waterfall, human};

/// A step that took at least this much of the whole is named in the sentence.
const NAMED_PERCENT: i64 = 30;

/// What became of the object.
#[derive(Debug, PartialEq, Eq)]
pub enum State {
    Ready,
    /// A pod that ran to its end.
    Completed,
    /// It does not exist any more.
    Deleted,
    /// It has nothing to become ready.
    Stored,
    NotReady(String),
}

pub fn sentence(found: &Waterfall, state: &State) -> String {
    let total = human(found.total_us);
    let longest = found
        .longest()
        .filter(|(_, percent)| *percent >= NAMED_PERCENT)
        .map(|(what, percent)| format!(": {percent} % {what}"))
        .unwrap_or_default();
    match state {
        State::Ready if found.complete => format!("Ready in {total}{longest}"),
        State::Ready => format!("Ready; the path that is still remembered took {total}{longest}"),
        State::Completed => format!("Completed; started in {total}{longest}"),
        State::Stored => format!("Done in {total}{longest}"),
        State::Deleted => format!("DELETED; before that {total}{longest}"),
        State::NotReady(why) if found.complete => format!("NOT READY: {why} (was ready in {total}{longest})"),
        State::NotReady(why) => format!("NOT READY: {why}"),
    }
}

pub async fn state(
    client: &Client,
    kind: &str,
    object: Option<&DynamicObject>,
    marks: &[Mark],
) -> Result<State> {
    let Some(object) = object else {
        return Ok(State::Deleted);
    };
    if kind == "Pod" {
        let pod: Pod = serde_json::from_value(serde_json::to_value(object)?)?;
        return Ok(pod_state(&pod, marks, Timestamp::now()));
    }
    let Some(why) = unready_replicas(&object.data) else {
        return Ok(condition_state(&object.data));
    };
    if why.is_empty() {
        return Ok(State::Ready);
    }
    // The reason lies with a pod.
    let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let selector = selector(&object.data);
    let mut detail = String::new();
    if !selector.is_empty() {
        for pod in pods.list(&ListParams::default().labels(&selector)).await? {
            if let State::NotReady(reason) = pod_state(&pod, marks, Timestamp::now()) {
                detail = format!("; pod {}: {reason}", pod.metadata.name.unwrap_or_default());
                break;
            }
        }
    }
    Ok(State::NotReady(format!("{why}{detail}")))
}

/// `None`: the object is none that has replicas. Empty: all are ready.
fn unready_replicas(object: &Value) -> Option<String> {
    let wanted = object["spec"]["replicas"]
        .as_i64()
        .or_else(|| object["status"]["desiredNumberScheduled"].as_i64())?;
    let ready = object["status"]["readyReplicas"]
        .as_i64()
        .or_else(|| object["status"]["numberReady"].as_i64())
        .unwrap_or(0);
    let updated = object["status"]["updatedReplicas"].as_i64();
    if ready < wanted {
        return Some(format!("{ready} of {wanted} replicas are ready"));
    }
    match updated.filter(|updated| *updated < wanted) {
        Some(updated) => Some(format!("{updated} of {wanted} replicas are up to date")),
        None => Some(String::new()),
    }
}

fn selector(object: &Value) -> String {
    let labels = &object["spec"]["selector"]["matchLabels"];
    let pairs = labels.as_object().into_iter().flatten();
    let pairs: Vec<String> = pairs
        .filter_map(|(key, value)| Some(format!("{key}={}", value.as_str()?)))
        .collect();
    pairs.join(",")
}

/// Custom resources tell by a condition `Ready` or `Available`, where they have one.
fn condition_state(object: &Value) -> State {
    let conditions = object["status"]["conditions"].as_array();
    let found = conditions
        .into_iter()
        .flatten()
        .find(|condition| matches!(condition["type"].as_str(), Some("Ready" | "Available")));
    let Some(condition) = found else {
        return State::Stored;
    };
    if condition["status"] == "True" {
        return State::Ready;
    }
    let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
    State::NotReady(join(&text("reason"), &text("message")))
}

fn pod_state(pod: &Pod, marks: &[Mark], now: Timestamp) -> State {
    let default = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&default);
    let conditions = status.conditions.as_deref().unwrap_or_default();
    if status.phase.as_deref() == Some("Succeeded") {
        return State::Completed;
    }
    if conditions
        .iter()
        .any(|c| c.type_ == "Ready" && c.status == "True")
    {
        return State::Ready;
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return State::NotReady("it is being deleted".to_owned());
    }
    if let Some(condition) = conditions
        .iter()
        .find(|c| c.type_ == "PodScheduled" && c.status != "True")
    {
        return State::NotReady(join(
            condition.reason.as_deref().unwrap_or("not scheduled"),
            condition.message.as_deref().unwrap_or_default(),
        ));
    }
    let containers = [&status.init_container_statuses, &status.container_statuses];
    let waiting = containers.into_iter().flatten().flatten().find_map(|container| {
        let next_pull = next_try(pod, &container.name, marks, now);
        let reason = waiting_reason(container, next_pull, now)?;
        Some(format!("container {} {reason}", container.name))
    });
    let last_word = || {
        let reason = status.reason.as_deref().or(status.phase.as_deref());
        join(
            reason.unwrap_or("Pending"),
            status.message.as_deref().unwrap_or_default(),
        )
    };
    State::NotReady(waiting.unwrap_or_else(last_word))
}

/// In how many seconds the node tries again to pull the container's image, as it said with its last status write.
fn next_try(pod: &Pod, container: &str, marks: &[Mark], now: Timestamp) -> Option<i64> {
    let name = format!("{NEXT_TRY}{container}");
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let writes = marks
        .iter()
        .filter(|mark| mark.resource == "pods" && mark.subresource == "status" && mark.uid == uid);
    let announced = writes.flat_map(|mark| &mark.client_stages);
    let latest = announced
        .filter(|stage| stage.name == name)
        .max_by_key(|stage| stage.start_us)?;
    let left_us = latest.start_us.saturating_add(latest.dur_us) - now.as_microsecond();
    Some((left_us.max(0) + 999_999) / 1_000_000)
}

/// Why a container is not ready; `None`: it is. `next_pull` counts for a container that waits for its image.
fn waiting_reason(container: &ContainerStatus, next_pull: Option<i64>, now: Timestamp) -> Option<String> {
    let state = container.state.as_ref()?;
    if let Some(waiting) = &state.waiting {
        let reason = waiting.reason.as_deref().unwrap_or("waiting");
        let message = waiting.message.as_deref().unwrap_or_default();
        if reason == "CrashLoopBackOff" {
            let ended = container
                .last_state
                .as_ref()
                .and_then(|last| last.terminated.as_ref());
            let code = ended.map_or(String::new(), |ended| {
                format!(" after exit code {}", ended.exit_code)
            });
            let next = ended
                .and_then(|ended| ended.finished_at.as_ref())
                .zip(back_off_seconds(message))
                .map(|(finished, seconds)| finished.0.as_second() + seconds - now.as_second())
                .map_or(String::new(), |left| format!(", next try in {} s", left.max(0)));
            return Some(format!("{reason}{code}{next}"));
        }
        return Some(match next_pull {
            Some(seconds) if matches!(reason, "ImagePullBackOff" | "ErrImagePull") => {
                join(&format!("{reason}, next try in {seconds} s"), message)
            }
            _ => join(reason, message),
        });
    }
    if let Some(ended) = &state.terminated {
        // An init container that has done its work is no obstacle.
        return (ended.exit_code != 0).then(|| {
            let reason = ended.reason.as_deref().unwrap_or("terminated");
            format!("{reason}, exit code {}", ended.exit_code)
        });
    }
    (!container.ready).then(|| "is running, its readiness probe has not succeeded".to_owned())
}

/// Of the node's `back-off 1m20s restarting …`, the delay.
fn back_off_seconds(message: &str) -> Option<i64> {
    let delay = message.strip_prefix("back-off ")?.split_whitespace().next()?;
    let mut seconds = 0;
    let mut number = 0;
    for character in delay.chars() {
        match character {
            '0'..='9' => number = number * 10 + i64::from(character.to_digit(10)?),
            'h' => seconds += std::mem::take(&mut number) * 3600,
            'm' => seconds += std::mem::take(&mut number) * 60,
            's' => seconds += std::mem::take(&mut number),
            _ => return None,
        }
    }
    Some(seconds)
}

fn join(reason: &str, message: &str) -> String {
    match (reason, message) {
        (reason, "") => reason.to_owned(),
        ("", message) => message.to_owned(),
        (reason, message) => format!("{reason}: {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(status: Value) -> State {
        pod_with_marks(status, &[])
    }

    fn pod_with_marks(status: Value, marks: &[Mark]) -> State {
        let pod = json!({"metadata": {"name": "p", "uid": "u"}, "status": status});
        let now = "2026-01-01T00:00:10Z".parse().unwrap();
        pod_state(&serde_json::from_value(pod).unwrap(), marks, now)
    }

    #[test]
    fn an_image_pull_tells_when_it_is_tried_again() {
        let began: Timestamp = "2026-01-01T00:00:08Z".parse().unwrap();
        let mark = |uid: &str, container: &str, start_us: i64| Mark {
            resource: "pods".to_owned(),
            subresource: "status".to_owned(),
            uid: uid.to_owned(),
            client_stages: vec![skiff_trace::Stage {
                name: format!("{NEXT_TRY}{container}"),
                start_us,
                dur_us: 10_000_000,
            }],
            ..Mark::default()
        };
        let began = began.as_microsecond();
        let marks = [
            mark("u", "c", began - 60_000_000),
            mark("u", "c", began),
            mark("u", "other", began + 1_000_000),
            mark("another pod", "c", began + 1_000_000),
        ];
        let check = |reason: &str, marks: &[Mark], expected: &str| {
            let container = json!({"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"waiting": {"reason": reason, "message": "no"}}});
            assert_eq!(
                pod_with_marks(json!({"containerStatuses": [container]}), marks),
                State::NotReady(expected.to_owned())
            );
        };
        check(
            "ImagePullBackOff",
            &marks,
            "container c ImagePullBackOff, next try in 8 s: no",
        );
        check(
            "ErrImagePull",
            &marks[..1],
            "container c ErrImagePull, next try in 0 s: no",
        );
        check("ImagePullBackOff", &[], "container c ImagePullBackOff: no");
        check("InvalidImageName", &marks, "container c InvalidImageName: no");
    }

    #[test]
    fn pods_tell_why_they_wait() {
        let check = |status: Value, expected: &str| {
            assert_eq!(pod(status), State::NotReady(expected.to_owned()));
        };
        check(
            json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
                "reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient cpu."}]}),
            "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu.",
        );
        let container = |state: Value| {
            json!({"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 1, "state": state,
            "lastState": {"terminated": {"exitCode": 3, "finishedAt": "2026-01-01T00:00:00Z"}}})
        };
        check(
            json!({"containerStatuses": [container(json!({"waiting": {"reason": "CrashLoopBackOff",
                "message": "back-off 20s restarting failed container=c"}}))]}),
            "container c CrashLoopBackOff after exit code 3, next try in 10 s",
        );
        check(
            json!({"containerStatuses": [container(json!({"waiting": {"reason": "ImagePullBackOff", "message": "no"}}))]}),
            "container c ImagePullBackOff: no",
        );
        check(
            json!({"containerStatuses": [container(json!({"running": {}}))]}),
            "container c is running, its readiness probe has not succeeded",
        );
        check(
            json!({"phase": "Failed", "reason": "SysctlForbidden"}),
            "SysctlForbidden",
        );
        assert_eq!(pod(json!({"phase": "Succeeded"})), State::Completed);
        assert_eq!(
            pod(json!({"conditions": [{"type": "Ready", "status": "True"}]})),
            State::Ready
        );
        assert_eq!(back_off_seconds("back-off 1m20s restarting"), Some(80));
    }

    #[test]
    fn replicas_are_counted() {
        let check = |object: Value, expected: Option<&str>| {
            assert_eq!(unready_replicas(&object).as_deref(), expected);
        };
        check(json!({"spec": {}}), None);
        check(
            json!({"spec": {"replicas": 3}, "status": {"readyReplicas": 2}}),
            Some("2 of 3 replicas are ready"),
        );
        check(
            json!({"spec": {"replicas": 1}, "status": {"readyReplicas": 1, "updatedReplicas": 0}}),
            Some("0 of 1 replicas are up to date"),
        );
        check(
            json!({"spec": {}, "status": {"desiredNumberScheduled": 2, "numberReady": 2}}),
            Some(""),
        );
    }

    #[test]
    fn conditions_of_other_kinds_count() {
        let with = |status: &str| json!({"status": {"conditions": [{"type": "Ready", "status": status, "reason": "R", "message": "m"}]}});
        assert_eq!(condition_state(&with("True")), State::Ready);
        assert_eq!(condition_state(&with("False")), State::NotReady("R: m".into()));
        assert_eq!(condition_state(&json!({"data": {}})), State::Stored);
    }
}
