//! From what a pod shall be and what the runtime has to what is to be done. Pure: it neither waits nor
//! calls; `sync.rs` carries the actions out.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use crate::observed::{ContainerState, ObservedPod, container_hash};
use crate::resize::{Record, Updates, container_update};
use crate::resources::is_sidecar;
use crate::restart_all::{Reset, matching_rule, to_reset};

/// Why a container is killed; a probe may bring its own grace period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KillReason {
    Other,
    StartupProbe,
    LivenessProbe,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kill {
    pub id: String,
    pub name: String,
    pub message: String,
    pub reason: KillReason,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PodActions {
    /// Stop all containers and the sandbox.
    pub kill_pod: bool,
    pub create_sandbox: bool,
    pub sandbox_id: String,
    pub attempt: u32,
    /// Indexes into the spec's lists.
    pub init_containers_to_start: Vec<usize>,
    pub containers_to_start: Vec<usize>,
    pub ephemeral_containers_to_start: Vec<usize>,
    pub containers_to_kill: Vec<Kill>,
    /// Removed, for all to start again.
    pub containers_to_reset: Vec<Reset>,
    /// Running containers that get other resources.
    pub updates: Updates,
}

/// What probes say of a running container, by its id. `None`: not known yet.
pub trait ProbeVerdicts {
    fn startup(&self, container_id: &str) -> Option<bool>;
    fn liveness(&self, container_id: &str) -> Option<bool>;
}

/// Whether a new sandbox is needed, with its attempt number and the id of the present one.
pub fn sandbox_changed(pod: &Pod, observed: &ObservedPod) -> (bool, u32, String) {
    let Some(latest) = observed.sandboxes.first() else {
        return (true, 0, String::new());
    };
    let ready = observed.sandboxes.iter().filter(|s| s.ready).count();
    let host_network = pod.spec.as_ref().and_then(|s| s.host_network) == Some(true);
    if ready > 1 || !latest.ready {
        return (true, latest.attempt + 1, latest.id.clone());
    }
    if latest.host_network != host_network {
        return (true, latest.attempt + 1, String::new());
    }
    if !host_network && latest.ips.is_empty() {
        return (true, latest.attempt + 1, latest.id.clone());
    }
    (false, latest.attempt, latest.id.clone())
}

/// Whether a container that ended with `exit_code` is started again, by its own rules, its own policy, or
/// the pod's.
pub fn restarts_after(container: &Container, spec: &PodSpec, exit_code: i32) -> bool {
    if let Some(policy) = &container.restart_policy {
        let rule = matching_rule(container, exit_code);
        if rule.is_some_and(|rule| matches!(rule.action.as_str(), "Restart" | "RestartAllContainers")) {
            return true;
        }
        match policy.as_str() {
            "Always" => return true,
            "OnFailure" => return exit_code != 0,
            "Never" => return false,
            _ => {}
        }
    }
    match spec.restart_policy.as_deref() {
        Some("OnFailure") => exit_code != 0,
        Some("Never") => false,
        _ => true,
    }
}

/// Whether the container is to be started, given its newest instance.
pub fn should_be_restarted(container: &Container, pod: &Pod, observed: &ObservedPod) -> bool {
    if pod.metadata.deletion_timestamp.is_some() {
        return false;
    }
    let Some(spec) = &pod.spec else { return false };
    match observed.container(&container.name) {
        None => true,
        Some(status) => match status.state {
            ContainerState::Running => false,
            ContainerState::Created | ContainerState::Unknown => true,
            ContainerState::Exited => restarts_after(container, spec, status.exit_code),
        },
    }
}

/// Whether any ordinary container exists in the runtime: then initialization has been gone through.
pub fn has_any_regular_container(spec: &PodSpec, observed: &ObservedPod) -> bool {
    spec.containers
        .iter()
        .any(|c| observed.container(&c.name).is_some())
}

/// `pod` is as allocated; `record` says what is in effect, if that is known. `restart_all`: see `restart_all.rs`.
pub fn plan(
    pod: &Pod,
    observed: &ObservedPod,
    probes: &dyn ProbeVerdicts,
    record: Option<&Record>,
    restart_all: bool,
) -> PodActions {
    let Some(spec) = &pod.spec else {
        return PodActions::default();
    };
    let (create_sandbox, attempt, sandbox_id) = sandbox_changed(pod, observed);
    let mut actions = PodActions {
        kill_pod: create_sandbox,
        create_sandbox,
        sandbox_id,
        attempt,
        ..Default::default()
    };
    if restart_all {
        actions.containers_to_reset = to_reset(pod, observed);
        return actions;
    }
    if create_sandbox {
        plan_new_sandbox(spec, observed, &mut actions);
        return actions;
    }
    for (index, container) in spec.ephemeral_containers.iter().flatten().enumerate() {
        // Never restarted, and startable even while the pod initializes.
        if observed.container(&container.name).is_none() {
            actions.ephemeral_containers_to_start.push(index);
        }
    }
    let initialized = plan_init_containers(pod, spec, observed, probes, record, &mut actions);
    if actions.kill_pod || !initialized {
        return actions;
    }
    plan_containers(pod, spec, observed, probes, record, &mut actions);
    actions
}

fn plan_new_sandbox(spec: &PodSpec, observed: &ObservedPod, actions: &mut PodActions) {
    let never = spec.restart_policy.as_deref() == Some("Never");
    if never && actions.attempt != 0 && !observed.containers.is_empty() {
        // The pod has had its run; it only needs to be cleaned up.
        actions.create_sandbox = false;
        return;
    }
    let to_start: Vec<usize> = spec
        .containers
        .iter()
        .enumerate()
        .filter(|(_, container)| {
            let policy = container
                .restart_policy
                .as_deref()
                .or(spec.restart_policy.as_deref());
            let succeeded = observed
                .container(&container.name)
                .is_some_and(|c| c.state == ContainerState::Exited && c.exit_code == 0);
            !(policy == Some("OnFailure") && succeeded)
        })
        .map(|(index, _)| index)
        .collect();
    if to_start.is_empty() && has_any_regular_container(spec, observed) {
        actions.create_sandbox = false;
        return;
    }
    if spec.init_containers.as_ref().is_some_and(|i| !i.is_empty()) {
        actions.init_containers_to_start = vec![0];
        return;
    }
    actions.containers_to_start = to_start;
}

/// Returns whether initialization is complete.
///
/// The list is walked from its end: the runtime may have dropped earlier init containers already, so the
/// last one found says how far the pod has come.
fn plan_init_containers(
    pod: &Pod,
    spec: &PodSpec,
    observed: &ObservedPod,
    probes: &dyn ProbeVerdicts,
    record: Option<&Record>,
    actions: &mut PodActions,
) -> bool {
    let init = spec.init_containers.as_deref().unwrap_or_default();
    if init.is_empty() {
        return true;
    }
    let mut initialized = spec
        .containers
        .iter()
        .filter_map(|c| observed.container(&c.name))
        .any(|status| {
            // An ended container may belong to an earlier sandbox, so it proves nothing.
            matches!(status.state, ContainerState::Created | ContainerState::Running)
        });
    let mut previously_initialized = initialized;
    let last = init.len() - 1;
    let kill = |id: &str, container: &Container, message: String, reason| Kill {
        id: id.to_owned(),
        name: container.name.clone(),
        message,
        reason,
    };
    for (index, container) in init.iter().enumerate().rev() {
        let sidecar = is_sidecar(container);
        let Some(status) = observed.container(&container.name) else {
            if previously_initialized && sidecar {
                actions.init_containers_to_start.push(index);
            }
            continue;
        };
        if previously_initialized && !sidecar {
            continue;
        }
        match status.state {
            ContainerState::Created => actions.init_containers_to_start.push(index),
            ContainerState::Running if !sidecar => {
                if let Some(record) = record {
                    container_update(pod, container, status, record, &mut actions.updates);
                }
            }
            ContainerState::Running => 'sidecar: {
                if container.startup_probe.is_some() {
                    match probes.startup(&status.id) {
                        None => break 'sidecar,
                        Some(true) => {}
                        Some(false) => {
                            let message = format!("Init container {} failed startup probe", container.name);
                            actions.containers_to_kill.push(kill(
                                &status.id,
                                container,
                                message,
                                KillReason::StartupProbe,
                            ));
                            actions.init_containers_to_start.push(index);
                            break 'sidecar;
                        }
                    }
                }
                if index == last {
                    initialized = true;
                } else if !previously_initialized {
                    actions.init_containers_to_start.push(index + 1);
                }
                if status.hash
                    != container_hash(&container.name, container.image.as_deref().unwrap_or_default())
                {
                    let message = format!("Init container {} definition changed", container.name);
                    actions
                        .containers_to_kill
                        .push(kill(&status.id, container, message, KillReason::Other));
                    actions.init_containers_to_start.push(index);
                } else if container.liveness_probe.is_some() && probes.liveness(&status.id) == Some(false) {
                    let message = format!("Init container {} failed liveness probe", container.name);
                    actions.containers_to_kill.push(kill(
                        &status.id,
                        container,
                        message,
                        KillReason::LivenessProbe,
                    ));
                    actions.init_containers_to_start.push(index);
                } else if record.is_some_and(|record| {
                    container_update(pod, container, status, record, &mut actions.updates)
                }) {
                    let message = format!("Container {} resize requires restart", container.name);
                    actions
                        .containers_to_kill
                        .push(kill(&status.id, container, message, KillReason::Other));
                    actions.init_containers_to_start.push(index);
                }
            }
            ContainerState::Exited if sidecar => actions.init_containers_to_start.push(index),
            ContainerState::Exited if status.exit_code != 0 => {
                if !should_be_restarted(container, pod, observed) {
                    actions.kill_pod = true;
                    actions.init_containers_to_start.clear();
                    return false;
                }
                actions.init_containers_to_start.push(index);
            }
            ContainerState::Exited => {
                if index == last {
                    initialized = true;
                } else {
                    actions.init_containers_to_start.push(index + 1);
                }
            }
            ContainerState::Unknown => {
                let policy = container
                    .restart_policy
                    .as_deref()
                    .or(spec.restart_policy.as_deref());
                if !sidecar && policy == Some("Never") {
                    actions.kill_pod = true;
                    actions.init_containers_to_start.clear();
                    return false;
                }
                let message = format!(
                    "Init container is in {:?} state, try killing it before restart",
                    status.state.as_str()
                );
                actions
                    .containers_to_kill
                    .push(kill(&status.id, container, message, KillReason::Other));
                actions.init_containers_to_start.push(index);
            }
        }
        previously_initialized = true;
    }
    if !previously_initialized {
        actions.init_containers_to_start.push(0);
    }
    actions.init_containers_to_start.reverse();
    initialized
}

fn plan_containers(
    pod: &Pod,
    spec: &PodSpec,
    observed: &ObservedPod,
    probes: &dyn ProbeVerdicts,
    record: Option<&Record>,
    actions: &mut PodActions,
) {
    let mut kept = 0;
    for (index, container) in spec.containers.iter().enumerate() {
        let status = observed.container(&container.name);
        let Some(status) = status.filter(|s| s.state == ContainerState::Running) else {
            if should_be_restarted(container, pod, observed) {
                actions.containers_to_start.push(index);
                if let Some(unknown) = status.filter(|s| s.state == ContainerState::Unknown) {
                    // It may still run: two instances at once must not be.
                    actions.containers_to_kill.push(Kill {
                        id: unknown.id.clone(),
                        name: container.name.clone(),
                        message: format!(
                            "Container is in {:?} state, try killing it before restart",
                            unknown.state.as_str()
                        ),
                        reason: KillReason::Other,
                    });
                }
            }
            continue;
        };
        let policy = container
            .restart_policy
            .as_deref()
            .or(spec.restart_policy.as_deref());
        let mut restart = policy != Some("Never");
        let expected_hash = container_hash(&container.name, container.image.as_deref().unwrap_or_default());
        let (mut message, reason) = if status.hash != expected_hash {
            restart = true;
            (
                format!("Container {} definition changed", container.name),
                KillReason::Other,
            )
        } else if probes.liveness(&status.id) == Some(false) {
            (
                format!("Container {} failed liveness probe", container.name),
                KillReason::LivenessProbe,
            )
        } else if probes.startup(&status.id) == Some(false) {
            (
                format!("Container {} failed startup probe", container.name),
                KillReason::StartupProbe,
            )
        } else if record
            .is_some_and(|record| container_update(pod, container, status, record, &mut actions.updates))
        {
            actions.containers_to_start.push(index);
            actions.containers_to_kill.push(Kill {
                id: status.id.clone(),
                name: container.name.clone(),
                message: format!("Container {} resize requires restart", container.name),
                reason: KillReason::Other,
            });
            continue;
        } else {
            kept += 1;
            continue;
        };
        if restart {
            message.push_str(", will be restarted");
            actions.containers_to_start.push(index);
        }
        actions.containers_to_kill.push(Kill {
            id: status.id.clone(),
            name: container.name.clone(),
            message,
            reason,
        });
    }
    if kept == 0 && actions.containers_to_start.is_empty() {
        actions.kill_pod = true;
        // Sidecars must not keep a finished pod alive.
        actions.init_containers_to_start.clear();
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
