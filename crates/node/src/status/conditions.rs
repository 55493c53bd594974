//! The conditions the kubelet owns, with upstream's reasons and messages. Conditions of others pass through.

use k8s_openapi::api::core::v1::{ContainerStatus, PodCondition, PodSpec, PodStatus};

use super::{StatusInput, condition, container_by_name, sidecars_of, whole_seconds};
use crate::plan::sandbox_changed;
use crate::resources::is_sidecar;
use crate::restart_all;

const OWNED: [&str; 8] = [
    "PodScheduled",
    "Ready",
    "ContainersReady",
    "Initialized",
    "PodReadyToStartContainers",
    "PodResizePending",
    "PodResizeInProgress",
    restart_all::CONDITION,
];

/// One verdict before it is dated.
struct Verdict {
    status: bool,
    reason: Option<&'static str>,
    message: Option<String>,
}

impl Verdict {
    const TRUE: Verdict = Verdict {
        status: true,
        reason: None,
        message: None,
    };

    fn no(reason: &'static str, message: Option<String>) -> Self {
        Verdict {
            status: false,
            reason: Some(reason),
            message,
        }
    }
}

pub fn conditions(
    input: &StatusInput<'_>,
    spec: &PodSpec,
    status: &PodStatus,
    phase: &str,
) -> Vec<PodCondition> {
    let api_conditions = input
        .pod
        .status
        .as_ref()
        .and_then(|s| s.conditions.as_deref())
        .unwrap_or_default();
    let mut all: Vec<PodCondition> = api_conditions
        .iter()
        .filter(|c| !OWNED.contains(&c.type_.as_str()))
        .cloned()
        .collect();
    // An eviction marks its pod once, before the API knows.
    if let Some(target) = condition(input.previous, "DisruptionTarget") {
        match all.iter_mut().find(|c| c.type_ == "DisruptionTarget") {
            Some(existing) => *existing = target.clone(),
            None => all.push(target.clone()),
        }
    }
    let (needs_sandbox, _, _) = sandbox_changed(input.pod, input.observed);
    let ready_to_start = Verdict {
        status: !needs_sandbox,
        reason: None,
        message: None,
    };
    let containers_ready = containers_ready(spec, status, phase);
    let ready = if containers_ready.status {
        readiness_gates(spec, &all)
    } else {
        Verdict {
            status: false,
            reason: containers_ready.reason,
            message: containers_ready.message.clone(),
        }
    };
    let mut initialized = initialized(spec, status, phase);
    // COMPAT: a pod that was initialized stays so while its containers restart.
    let earlier = condition(input.previous, "Initialized");
    if !initialized.status && earlier.is_some_and(|earlier| earlier.status == "True") {
        initialized = Verdict::TRUE;
    }
    for (type_, verdict) in [
        ("PodReadyToStartContainers", ready_to_start),
        ("Initialized", initialized),
        ("Ready", ready),
        ("ContainersReady", containers_ready),
        ("PodScheduled", Verdict::TRUE),
    ] {
        all.push(dated(input, type_, verdict));
    }
    if restart_all::is_possible(spec) {
        let mut restarting = dated(input, restart_all::CONDITION, restarting(input, spec, phase));
        restarting.observed_generation = None;
        all.push(restarting);
    }
    if !matches!(phase, "Failed" | "Succeeded") {
        all.extend(input.resize.conditions());
    }
    all
}

fn restarting(input: &StatusInput<'_>, spec: &PodSpec, phase: &str) -> Verdict {
    if phase == "Failed" {
        return Verdict::no("PodFailed", None);
    }
    let due = restart_all::is_due(spec, input.observed, input.previous);
    if !due || restart_all::is_cleaned_up(spec, input.observed) {
        return Verdict {
            status: false,
            reason: None,
            message: None,
        };
    }
    Verdict {
        status: true,
        reason: Some("RestartAllContainersStarted"),
        message: Some("container exited with restart policy rule".to_owned()),
    }
}

fn dated(input: &StatusInput<'_>, type_: &str, verdict: Verdict) -> PodCondition {
    let value = if verdict.status { "True" } else { "False" };
    let api_status = input.pod.status.as_ref();
    let earlier = condition(input.previous, type_).or_else(|| api_status.and_then(|s| condition(s, type_)));
    PodCondition {
        type_: type_.to_owned(),
        status: value.to_owned(),
        reason: verdict.reason.map(str::to_owned),
        message: verdict.message,
        last_probe_time: None,
        last_transition_time: match earlier {
            Some(earlier) if earlier.status == value => earlier.last_transition_time.clone(),
            _ => Some(whole_seconds(input.now)),
        },
        observed_generation: input.observed_generation(),
    }
}

fn all_statuses(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    status
        .init_container_statuses
        .iter()
        .flatten()
        .chain(status.container_statuses.iter().flatten())
}

fn containers_ready(spec: &PodSpec, status: &PodStatus, phase: &str) -> Verdict {
    let statuses: Vec<&ContainerStatus> = all_statuses(status).collect();
    let (mut unknown, mut unready) = (Vec::new(), Vec::new());
    for container in sidecars_of(spec).chain(&spec.containers) {
        match statuses.iter().find(|s| s.name == container.name) {
            Some(status) if status.ready => {}
            Some(_) => unready.push(container.name.as_str()),
            None => unknown.push(container.name.as_str()),
        }
    }
    if phase == "Succeeded" && unknown.is_empty() {
        return Verdict::no("PodCompleted", None);
    }
    if phase == "Failed" {
        return Verdict::no("PodFailed", None);
    }
    match complaint(&unknown, &unready, "unready") {
        Some(message) => Verdict::no("ContainersNotReady", Some(message)),
        None => Verdict::TRUE,
    }
}

fn initialized(spec: &PodSpec, status: &PodStatus, phase: &str) -> Verdict {
    let statuses = status.init_container_statuses.as_deref().unwrap_or_default();
    let (mut unknown, mut incomplete) = (Vec::new(), Vec::new());
    for container in spec.init_containers.iter().flatten() {
        match container_by_name(statuses, &container.name) {
            None => unknown.push(container.name.as_str()),
            Some(status) => {
                let done = if is_sidecar(container) {
                    status.started == Some(true)
                } else {
                    status.ready
                };
                if !done {
                    incomplete.push(container.name.as_str());
                }
            }
        }
    }
    if phase == "Succeeded" && unknown.is_empty() {
        return Verdict {
            status: true,
            reason: Some("PodCompleted"),
            message: None,
        };
    }
    let started = status.container_statuses.iter().flatten().any(|status| {
        let happened =
            |s: &k8s_openapi::api::core::v1::ContainerState| s.running.is_some() || s.terminated.is_some();
        status.started == Some(true)
            || status.state.as_ref().is_some_and(happened)
            || status.last_state.as_ref().is_some_and(|s| s.terminated.is_some())
    });
    if started {
        return Verdict::TRUE;
    }
    match complaint(&unknown, &incomplete, "incomplete") {
        Some(message) => Verdict::no("ContainersNotInitialized", Some(message)),
        None => Verdict::TRUE,
    }
}

fn readiness_gates(spec: &PodSpec, conditions: &[PodCondition]) -> Verdict {
    let messages: Vec<String> = spec
        .readiness_gates
        .iter()
        .flatten()
        .filter_map(
            |gate| match conditions.iter().find(|c| c.type_ == gate.condition_type) {
                None => Some(format!(
                    "corresponding condition of pod readiness gate {:?} does not exist.",
                    gate.condition_type
                )),
                Some(c) if c.status != "True" => Some(format!(
                    "the status of pod readiness gate {:?} is not \"True\", but {}",
                    gate.condition_type, c.status
                )),
                Some(_) => None,
            },
        )
        .collect();
    if messages.is_empty() {
        Verdict::TRUE
    } else {
        Verdict::no("ReadinessGatesNotReady", Some(messages.join(", ")))
    }
}

fn complaint(unknown: &[&str], bad: &[&str], word: &str) -> Option<String> {
    let mut parts = Vec::new();
    if !unknown.is_empty() {
        parts.push(format!("containers with unknown status: [{}]", unknown.join(" ")));
    }
    if !bad.is_empty() {
        parts.push(format!("containers with {word} status: [{}]", bad.join(" ")));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}
