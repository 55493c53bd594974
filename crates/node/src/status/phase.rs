//! The phase of a pod, by upstream's counting.

use k8s_openapi::api::core::v1::{
    Container, ContainerStateTerminated, ContainerStatus, Pod, PodSpec, PodStatus,
};

use super::{container_by_name, sidecars_of};
use crate::plan::restarts_after;
use crate::resources::is_sidecar;
use crate::restart_all;

/// How a container ended, now or, while it waits, the last time.
fn ended(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    let state = status.state.as_ref()?;
    state.terminated.as_ref().or_else(|| {
        state.waiting.as_ref()?;
        status.last_state.as_ref()?.terminated.as_ref()
    })
}

/// The exit code of that.
fn ended_with(status: &ContainerStatus) -> Option<i32> {
    ended(status).map(|ended| ended.exit_code)
}

/// Whether the container that ended with `code` is started again: by a rule or policy, or with all of its pod.
fn restarts(container: &Container, spec: &PodSpec, status: &ContainerStatus, code: i32) -> bool {
    let with_all = ended(status).is_some_and(|ended| ended.reason.as_deref() == Some(restart_all::REASON));
    with_all || restarts_after(container, spec, code)
}

fn is_running(status: &ContainerStatus) -> bool {
    status.state.as_ref().is_some_and(|s| s.running.is_some())
}

fn is_waiting(status: &ContainerStatus) -> bool {
    status.state.as_ref().is_some_and(|s| s.waiting.is_some())
}

pub fn phase(pod: &Pod, status: &PodStatus, terminal: bool, has_started: bool) -> &'static str {
    let Some(spec) = &pod.spec else { return "Pending" };
    let init_statuses = status.init_container_statuses.as_deref().unwrap_or_default();
    let statuses = status.container_statuses.as_deref().unwrap_or_default();

    let mut pending_init = 0;
    for container in spec.init_containers.iter().flatten().filter(|c| !is_sidecar(c)) {
        match container_by_name(init_statuses, &container.name) {
            Some(status) if is_running(status) => pending_init += 1,
            Some(status) => match ended_with(status) {
                Some(0) => {}
                Some(code) if !restarts(container, spec, status, code) => return "Failed",
                // It failed and will be tried again.
                Some(_) => {}
                None => pending_init += 1,
            },
            None => pending_init += 1,
        }
    }
    let (mut unknown, mut running, mut waiting, mut stopped, mut stopped_for_good, mut succeeded) =
        (0, 0, 0, 0, 0, 0);
    let mut pending_sidecars = 0;
    for container in sidecars_of(spec) {
        match container_by_name(init_statuses, &container.name) {
            Some(status) if is_running(status) => {
                pending_sidecars += i32::from(status.started != Some(true));
                running += 1;
            }
            Some(status) if ended_with(status).is_some() => {}
            Some(status) if is_waiting(status) => {
                pending_sidecars += 1;
                waiting += 1;
            }
            Some(_) => {
                pending_sidecars += 1;
                unknown += 1;
            }
            None => unknown += 1,
        }
    }
    for container in &spec.containers {
        match container_by_name(statuses, &container.name) {
            Some(status) if is_running(status) => running += 1,
            Some(status) => match ended_with(status) {
                Some(code) => {
                    stopped += 1;
                    stopped_for_good += i32::from(!restarts(container, spec, status, code));
                    succeeded +=
                        i32::from(code == 0 && status.state.as_ref().is_some_and(|s| s.terminated.is_some()));
                }
                None if is_waiting(status) => waiting += 1,
                None => unknown += 1,
            },
            None => unknown += 1,
        }
    }
    if pending_init > 0 || (pending_sidecars > 0 && !has_started) || waiting > 0 {
        return "Pending";
    }
    if running > 0 && unknown == 0 {
        return "Running";
    }
    if running == 0 && stopped > 0 && unknown == 0 {
        if !terminal && stopped != stopped_for_good {
            // At least one is about to be started again.
            return "Running";
        }
        return if stopped == succeeded {
            "Succeeded"
        } else {
            "Failed"
        };
    }
    "Pending"
}
