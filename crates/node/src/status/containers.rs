//! The statuses of a pod's containers: state, last state, restart count, and what probes make of them.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{
    Container, ContainerState as ApiState, ContainerStateRunning, ContainerStateTerminated,
    ContainerStateWaiting, ContainerStatus, ContainerUser, LinuxContainerUser, PodSpec, PodStatus,
    VolumeMountStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::StatusInput;
use crate::observed::{ContainerState, ObservedContainer};
use crate::plan::{has_any_regular_container, should_be_restarted};
use crate::resize::container_resources;
use crate::resources::is_sidecar;
use crate::restart_all;

/// Termination messages of all containers of a pod together stay below this.
const MAX_MESSAGES: usize = 12 * 1024;

pub fn container_by_name<'a>(statuses: &'a [ContainerStatus], name: &str) -> Option<&'a ContainerStatus> {
    statuses.iter().find(|s| s.name == name)
}

pub fn fill(input: &StatusInput<'_>, spec: &PodSpec, status: &mut PodStatus) {
    let previous = input.previous;
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let or_empty = |list: &Option<Vec<ContainerStatus>>| list.clone().unwrap_or_default();
    let ephemeral: Vec<Container> = spec
        .ephemeral_containers
        .iter()
        .flatten()
        .map(crate::pods::ephemeral_as_container)
        .collect();
    let made = statuses(
        input,
        spec,
        &spec.containers,
        &or_empty(&previous.container_statuses),
        false,
    );
    let made_init = statuses(
        input,
        spec,
        init,
        &or_empty(&previous.init_container_statuses),
        true,
    );
    let made_ephemeral = statuses(
        input,
        spec,
        &ephemeral,
        &or_empty(&previous.ephemeral_container_statuses),
        false,
    );
    let some = |list: Vec<ContainerStatus>| (!list.is_empty()).then_some(list);
    status.container_statuses = some(made);
    status.init_container_statuses = some(made_init);
    status.ephemeral_container_statuses = some(made_ephemeral);
    shorten_messages(status);
}

fn statuses(
    input: &StatusInput<'_>,
    spec: &PodSpec,
    containers: &[Container],
    previous: &[ContainerStatus],
    init: bool,
) -> Vec<ContainerStatus> {
    let has_init = spec.init_containers.as_ref().is_some_and(|i| !i.is_empty());
    let default_reason = if has_init {
        "PodInitializing"
    } else {
        "ContainerCreating"
    };
    let mut by_name: HashMap<&str, ContainerStatus> = HashMap::new();
    for container in containers {
        let old = container_by_name(previous, &container.name);
        let observed = input
            .observed
            .containers
            .iter()
            .filter(|o| o.name == container.name)
            .take(2);
        let mut made = None;
        for (index, instance) in observed.enumerate() {
            let one = from_observed(input, container, instance, old);
            if index == 0 {
                made = Some(one);
            } else if let Some(newest) = &mut made {
                newest.last_state = one.state;
            }
        }
        let mut status = made.unwrap_or_else(|| without_instance(input, container, old, default_reason));
        if init
            && status
                .state
                .as_ref()
                .is_some_and(|s| s.terminated.as_ref().is_some_and(|t| t.exit_code == 0))
        {
            // Done, and never to be run again.
        } else if init
            && input.observed.container(&container.name).is_none()
            && !is_sidecar(container)
            && has_any_regular_container(spec, input.observed)
            && status.state.as_ref().is_some_and(|s| s.waiting.is_some())
        {
            status.state = Some(terminated(ContainerStateTerminated {
                exit_code: 0,
                reason: Some("Completed".to_owned()),
                message: Some("Unable to get init container status from container runtime and pod has been initialized, treat it as exited normally".to_owned()),
                ..Default::default()
            }));
        } else if let Some(reason) = input.reasons.get(&container.name)
            && should_be_restarted(container, input.pod, input.observed)
        {
            if status.state.as_ref().is_some_and(|s| s.terminated.is_some()) {
                status.last_state = status.state.take();
            }
            status.state = Some(waiting(
                &reason.reason,
                (!reason.message.is_empty()).then(|| reason.message.clone()),
            ));
        }
        by_name.insert(&container.name, status);
    }
    let mut list: Vec<ContainerStatus> = containers
        .iter()
        .filter_map(|c| by_name.remove(c.name.as_str()))
        .collect();
    if !init {
        list.sort_by(|a, b| a.name.cmp(&b.name));
    }
    list
}

fn waiting(reason: &str, message: Option<String>) -> ApiState {
    ApiState {
        waiting: Some(ContainerStateWaiting {
            reason: (!reason.is_empty()).then(|| reason.to_owned()),
            message,
        }),
        ..Default::default()
    }
}

fn terminated(state: ContainerStateTerminated) -> ApiState {
    ApiState {
        terminated: Some(state),
        ..Default::default()
    }
}

/// The status of a container the runtime has nothing of.
fn without_instance(
    input: &StatusInput<'_>,
    container: &Container,
    old: Option<&ContainerStatus>,
    default_reason: &str,
) -> ContainerStatus {
    let fresh = ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        state: Some(waiting(default_reason, None)),
        volume_mounts: volume_mounts(container),
        ..Default::default()
    };
    let Some(old) = old else { return fresh };
    let old_state = old.state.as_ref();
    let is_restarting = |spec: &PodSpec| restart_all::is_due(spec, input.observed, input.previous);
    if old_state.is_some_and(|state| state.waiting.is_none())
        && input.pod.spec.as_ref().is_some_and(is_restarting)
    {
        return ContainerStatus {
            restart_count: old.restart_count + 1,
            state: Some(waiting(
                restart_all::REASON,
                Some(restart_all::MESSAGE.to_owned()),
            )),
            last_state: Some(terminated(ContainerStateTerminated {
                reason: Some(restart_all::REASON.to_owned()),
                message: Some(restart_all::MESSAGE.to_owned()),
                exit_code: 137,
                ..Default::default()
            })),
            ..fresh
        };
    }
    if old_state.is_some_and(|s| s.terminated.is_some()) {
        return old.clone();
    }
    let mut status = ContainerStatus {
        restart_count: old.restart_count,
        last_state: old.last_state.clone(),
        ..fresh
    };
    let was_running = old_state.is_some_and(|s| s.running.is_some());
    let has_ended_before = status.last_state.as_ref().is_some_and(|s| s.terminated.is_some());
    if was_running && !has_ended_before {
        // It ran and is gone; to call it merely waiting would throw the pod back to Pending.
        status.last_state = Some(terminated(ContainerStateTerminated {
            reason: Some("ContainerStatusUnknown".to_owned()),
            message: Some("The container could not be located when the pod was deleted.  The container used to be Running".to_owned()),
            exit_code: 137,
            ..Default::default()
        }));
        if input.pod.metadata.deletion_timestamp.is_none() {
            status.restart_count += 1;
        }
    }
    status
}

fn from_observed(
    input: &StatusInput<'_>,
    container: &Container,
    observed: &ObservedContainer,
    old: Option<&ContainerStatus>,
) -> ContainerStatus {
    let id = format!("{}://{}", input.runtime_name, observed.id);
    let record = input.resize.record.as_ref();
    let actuated = record.and_then(|record| record.actuated.get(&container.name).copied());
    let mut status = ContainerStatus {
        name: observed.name.clone(),
        restart_count: observed.restart_count,
        image: observed.image.clone(),
        image_id: observed.image_ref.clone(),
        container_id: Some(id.clone()),
        volume_mounts: old
            .and_then(|o| o.volume_mounts.clone())
            .or_else(|| volume_mounts(container)),
        resources: Some(container_resources(container, observed, actuated)),
        allocated_resources: container.resources.as_ref().and_then(|r| r.requests.clone()),
        user: observed.user.as_ref().map(|user| ContainerUser {
            linux: Some(LinuxContainerUser {
                uid: user.uid,
                gid: user.gid,
                supplemental_groups: (!user.supplemental_groups.is_empty())
                    .then(|| user.supplemental_groups.clone()),
            }),
        }),
        ..Default::default()
    };
    if let Some(old) = old {
        // Containers that were removed for all to restart are missing in the runtime's count.
        if input.pod.spec.as_ref().is_some_and(restart_all::is_possible) {
            status.restart_count = status.restart_count.max(old.restart_count);
        }
        let old_terminated = old.state.as_ref().filter(|s| s.terminated.is_some());
        status.last_state = match old_terminated {
            Some(state) if old.container_id.as_deref() != Some(&id) => Some(state.clone()),
            _ => old.last_state.clone(),
        };
    }
    let state = match observed.state {
        ContainerState::Running => ApiState {
            running: Some(ContainerStateRunning {
                started_at: time(observed.started_at),
            }),
            ..Default::default()
        },
        ContainerState::Exited => terminated(ContainerStateTerminated {
            exit_code: observed.exit_code,
            reason: some_text(&observed.reason),
            message: some_text(&observed.message),
            started_at: time(observed.started_at),
            finished_at: time(observed.finished_at),
            container_id: Some(id),
            signal: None,
        }),
        ContainerState::Unknown
            if old
                .and_then(|o| o.state.as_ref())
                .is_some_and(|s| s.running.is_some()) =>
        {
            status.restart_count = old.map_or(0, |o| o.restart_count) + 1;
            let spec = input.pod.spec.as_ref();
            let restarts = spec.is_some_and(|spec| restart_all::is_due(spec, input.observed, input.previous));
            let reason = if restarts {
                restart_all::REASON
            } else {
                "ContainerStatusUnknown"
            };
            terminated(ContainerStateTerminated {
                reason: Some(reason.to_owned()),
                message: Some("The container could not be located when the pod was terminated".to_owned()),
                exit_code: 137,
                ..Default::default()
            })
        }
        ContainerState::Created | ContainerState::Unknown => waiting("", None),
    };
    let counted = old.filter(|_| input.pod.spec.as_ref().is_some_and(restart_all::is_possible));
    let was_terminated =
        counted.filter(|old| old.state.as_ref().is_some_and(|state| state.terminated.is_some()));
    if let Some(old) = was_terminated
        && state.running.is_some()
        && old.restart_count >= observed.restart_count
    {
        status.restart_count = old.restart_count + 1;
    }
    status.state = Some(state);
    status
}

fn some_text(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn time(nanoseconds: i64) -> Option<Time> {
    if nanoseconds <= 0 {
        return None;
    }
    Timestamp::from_second(nanoseconds.div_euclid(1_000_000_000))
        .ok()
        .map(Time)
}

fn volume_mounts(container: &Container) -> Option<Vec<VolumeMountStatus>> {
    let mounts = container.volume_mounts.as_ref()?;
    let list = mounts
        .iter()
        .map(|mount| VolumeMountStatus {
            name: mount.name.clone(),
            mount_path: mount.mount_path.clone(),
            read_only: mount.read_only.filter(|r| *r),
            recursive_read_only: (mount.read_only == Some(true)).then(|| {
                match mount.recursive_read_only.as_deref() {
                    Some("Enabled") => "Enabled".to_owned(),
                    _ => "Disabled".to_owned(),
                }
            }),
            volume_status: None,
        })
        .collect();
    Some(list)
}

/// `started` and `ready`, by the probes.
pub fn apply_probes(input: &StatusInput<'_>, spec: &PodSpec, status: &mut PodStatus) {
    for one in status.container_statuses.iter_mut().flatten() {
        let container = spec.containers.iter().find(|c| c.name == one.name);
        judge(input, container, one);
    }
    for one in status.init_container_statuses.iter_mut().flatten() {
        let container = spec.init_containers.iter().flatten().find(|c| c.name == one.name);
        if container.is_some_and(is_sidecar) {
            judge(input, container, one);
        } else {
            one.started = Some(one.state.as_ref().is_some_and(|s| s.running.is_some()));
            one.ready = one
                .state
                .as_ref()
                .and_then(|s| s.terminated.as_ref())
                .is_some_and(|t| t.exit_code == 0);
        }
    }
}

fn judge(input: &StatusInput<'_>, container: Option<&Container>, status: &mut ContainerStatus) {
    let running = status.state.as_ref().is_some_and(|s| s.running.is_some());
    let id = status
        .container_id
        .as_deref()
        .map_or("", |id| id.split_once("://").map_or(id, |(_, id)| id));
    // A container that was up before this kubelet started keeps what was said of it until its probe speaks.
    let previous = container_by_name(
        input.previous.container_statuses.as_deref().unwrap_or_default(),
        &status.name,
    )
    .or_else(|| {
        container_by_name(
            input
                .previous
                .init_container_statuses
                .as_deref()
                .unwrap_or_default(),
            &status.name,
        )
    })
    .filter(|p| p.container_id == status.container_id);
    let started = running
        && match container.and_then(|c| c.startup_probe.as_ref()) {
            None => true,
            Some(_) => match input.readiness.startup(id) {
                Some(result) => result,
                None => previous.is_some_and(|p| p.started == Some(true)),
            },
        };
    status.started = Some(started);
    status.ready = started
        && match container.and_then(|c| c.readiness_probe.as_ref()) {
            None => true,
            Some(_) => match input.readiness.readiness(id) {
                Some(result) => result,
                None => previous.is_some_and(|p| p.ready),
            },
        };
}

/// Long termination messages of many containers must not make the pod too large to store.
fn shorten_messages(status: &mut PodStatus) {
    let lists = [
        &mut status.init_container_statuses,
        &mut status.container_statuses,
        &mut status.ephemeral_container_statuses,
    ];
    let mut all: Vec<&mut ContainerStatus> = lists.into_iter().flatten().flatten().collect();
    let budget = MAX_MESSAGES / all.len().max(1);
    for status in &mut all {
        for state in [&mut status.state, &mut status.last_state] {
            if let Some(message) = state
                .as_mut()
                .and_then(|s| s.terminated.as_mut())
                .and_then(|t| t.message.as_mut())
                && message.len() > budget
            {
                let cut = (0..=budget)
                    .rev()
                    .find(|at| message.is_char_boundary(*at))
                    .unwrap_or(0);
                message.truncate(cut);
            }
        }
    }
}
