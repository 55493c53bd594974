//! The row of a pod in a table: readiness, the one word that says how it is, restarts.

use serde_json::{Value, json};
use skiff_meta::time;

use crate::node::{at, list, number, text};
use crate::row::{age, name, or_none, since};

struct Restarts {
    count: i64,
    last: Option<i64>,
    last_text: String,
}

impl Restarts {
    fn new() -> Self {
        Restarts {
            count: 0,
            last: None,
            last_text: String::new(),
        }
    }

    fn add(&mut self, status: &Value) {
        self.count += number(status, "restartCount");
        let finished = text(status, "lastState.terminated.finishedAt");
        if let Some(at) = time::parse(finished).map(|t| t.as_second())
            && self.last.is_none_or(|last| last < at)
        {
            self.last = Some(at);
            self.last_text = finished.to_owned();
        }
    }

    fn show(&self, now: i64) -> String {
        if self.count != 0 && self.last.is_some() {
            format!("{} ({} ago)", self.count, since(&self.last_text, now))
        } else {
            self.count.to_string()
        }
    }
}

/// Why a container ended, as one word.
fn ended(terminated: &Value) -> String {
    match (text(terminated, "reason"), number(terminated, "signal")) {
        ("", 0) => format!("ExitCode:{}", number(terminated, "exitCode")),
        ("", signal) => format!("Signal:{signal}"),
        (reason, _) => reason.to_owned(),
    }
}

fn condition_is_true(pod: &Value, kind: &str) -> bool {
    list(pod, "status.conditions")
        .iter()
        .any(|c| text(c, "type") == kind && text(c, "status") == "True")
}

pub fn row(pod: &Value, now: i64) -> Vec<Value> {
    let init_specs = list(pod, "spec.initContainers");
    let is_sidecar = |status: &Value| {
        init_specs
            .iter()
            .any(|c| text(c, "name") == text(status, "name") && text(c, "restartPolicy") == "Always")
    };
    let sidecars = init_specs
        .iter()
        .filter(|c| text(c, "restartPolicy") == "Always")
        .count();
    let total = list(pod, "spec.containers").len() + sidecars;
    let phase = text(pod, "status.phase");
    let mut reason = match text(pod, "status.reason") {
        "" => phase.to_owned(),
        reason => reason.to_owned(),
    };
    let gated = |c: &Value| text(c, "type") == "PodScheduled" && text(c, "reason") == "SchedulingGated";
    if list(pod, "status.conditions").iter().any(gated) {
        "SchedulingGated".clone_into(&mut reason);
    }

    let (mut restarts, mut sidecar_restarts) = (Restarts::new(), Restarts::new());
    let (mut ready, mut initializing) = (0, false);
    for (i, status) in list(pod, "status.initContainerStatuses").iter().enumerate() {
        restarts.add(status);
        let sidecar = is_sidecar(status);
        if sidecar {
            sidecar_restarts.add(status);
        }
        let terminated = at(status, "state.terminated");
        if !terminated.is_null() && number(terminated, "exitCode") == 0 {
            continue;
        }
        if sidecar && at(status, "started").as_bool() == Some(true) {
            ready += usize::from(at(status, "ready").as_bool() == Some(true));
            continue;
        }
        let waiting = text(status, "state.waiting.reason");
        reason = if !terminated.is_null() {
            format!("Init:{}", ended(terminated))
        } else if !waiting.is_empty() && waiting != "PodInitializing" {
            format!("Init:{waiting}")
        } else {
            format!("Init:{i}/{}", init_specs.len())
        };
        initializing = true;
        break;
    }

    if !initializing || condition_is_true(pod, "Initialized") {
        restarts = sidecar_restarts;
        let (mut running, mut failed) = (false, None);
        for status in list(pod, "status.containerStatuses").iter().rev() {
            restarts.add(status);
            let (waiting, terminated) = (
                text(status, "state.waiting.reason"),
                at(status, "state.terminated"),
            );
            if !waiting.is_empty() {
                waiting.clone_into(&mut reason);
            } else if !terminated.is_null() {
                reason = ended(terminated);
                if number(terminated, "exitCode") != 0 {
                    failed = Some(reason.clone());
                }
            } else if at(status, "ready").as_bool() == Some(true) && !at(status, "state.running").is_null() {
                running = true;
                ready += 1;
            }
        }
        // One container that still runs makes the whole pod running again.
        if reason == "Completed" {
            if running && condition_is_true(pod, "Ready") {
                "Running".clone_into(&mut reason);
            } else if let Some(failed) = failed {
                reason = failed;
            } else if running {
                "NotReady".clone_into(&mut reason);
            }
        }
    }

    if !at(pod, "metadata.deletionTimestamp").is_null() {
        if text(pod, "status.reason") == "NodeLost" {
            "Unknown".clone_into(&mut reason);
        } else if !["Failed", "Succeeded"].contains(&phase) {
            "Terminating".clone_into(&mut reason);
        }
    }

    let gates = list(pod, "spec.readinessGates");
    let gates = if gates.is_empty() {
        json!("<none>")
    } else {
        let open = gates
            .iter()
            .filter(|g| condition_is_true(pod, text(g, "conditionType")))
            .count();
        json!(format!("{open}/{}", gates.len()))
    };
    vec![
        name(pod),
        json!(format!("{ready}/{total}")),
        json!(reason),
        json!(restarts.show(now)),
        age(pod, now),
        or_none(list(pod, "status.podIPs").first().map_or("", |ip| text(ip, "ip"))),
        or_none(text(pod, "spec.nodeName")),
        or_none(text(pod, "status.nominatedNodeName")),
        gates,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pod: Value, ready: &str, status: &str, restarts: &str) {
        let row = row(&pod, 1_700_000_060);
        assert_eq!(
            (&row[1], &row[2], &row[3]),
            (&json!(ready), &json!(status), &json!(restarts))
        );
    }

    #[test]
    fn words() {
        let spec = json!({"containers": [{"name": "c"}]});
        check(
            json!({"spec": spec, "status": {"phase": "Pending"}}),
            "0/1",
            "Pending",
            "0",
        );
        check(
            json!({"spec": spec, "status": {"phase": "Running", "containerStatuses": [
                {"name": "c", "ready": true, "restartCount": 0, "state": {"running": {}}}]}}),
            "1/1",
            "Running",
            "0",
        );
        check(
            json!({"spec": spec, "status": {"phase": "Running", "containerStatuses": [
                {"name": "c", "restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                 "lastState": {"terminated": {"finishedAt": "2023-11-14T22:13:20Z"}}}]}}),
            "0/1",
            "CrashLoopBackOff",
            "3 (60s ago)",
        );
        check(
            json!({"metadata": {"deletionTimestamp": "2023-11-14T22:13:20Z"}, "spec": spec, "status": {"phase": "Running"}}),
            "0/1",
            "Terminating",
            "0",
        );
        check(
            json!({"spec": {"containers": [{"name": "c"}], "initContainers": [{"name": "i"}]},
                "status": {"phase": "Pending", "initContainerStatuses": [{"name": "i", "state": {"running": {}}}]}}),
            "0/1",
            "Init:0/1",
            "0",
        );
    }
}
