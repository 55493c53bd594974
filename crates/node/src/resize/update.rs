//! What has to change so that running containers have what their pod was allocated. Pure.

use k8s_openapi::api::core::v1::{Container, Pod};

use super::record::{Amounts, Record};
use crate::observed::{ContainerState, ObservedContainer, ObservedPod};

/// One running container to be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerUpdate {
    pub name: String,
    pub id: String,
    pub wanted: Amounts,
    pub current: Amounts,
}

/// The containers to change, of each resource those first that shrink.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Updates {
    pub memory: Vec<ContainerUpdate>,
    pub cpu: Vec<ContainerUpdate>,
}

impl Updates {
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty() && self.cpu.is_empty()
    }
}

fn restarts(container: &Container, resource: &str) -> bool {
    let mut policies = container.resize_policy.iter().flatten();
    policies.any(|policy| policy.resource_name == resource && policy.restart_policy == "RestartContainer")
}

fn put(list: &mut Vec<ContainerUpdate>, update: ContainerUpdate, shrinks: bool) {
    if shrinks {
        list.insert(0, update);
    } else {
        list.push(update);
    }
}

/// Notes what has to be changed of a running container. Returns whether it has to be restarted instead.
pub fn container_update(
    pod: &Pod,
    container: &Container,
    observed: &ObservedContainer,
    record: &Record,
    updates: &mut Updates,
) -> bool {
    let wanted = Amounts::of_container(pod, container);
    let current = record.actuated.get(&container.name).copied().unwrap_or_default();
    if wanted == current {
        return false;
    }
    let cpu = (wanted.cpu_limit, wanted.cpu_request) != (current.cpu_limit, current.cpu_request);
    let memory =
        (wanted.memory_limit, wanted.memory_request) != (current.memory_limit, current.memory_request);
    // The API refuses that policy on an init container that runs once.
    if (cpu && restarts(container, "cpu")) || (memory && restarts(container, "memory")) {
        return true;
    }
    let update = ContainerUpdate {
        name: container.name.clone(),
        id: observed.id.clone(),
        wanted,
        current,
    };
    // A limit that is new shrinks what was unlimited.
    let bounds = |limit: i64| if limit > 0 { limit } else { i64::MAX };
    if memory {
        let shrinks = match bounds(wanted.memory_limit).cmp(&bounds(current.memory_limit)) {
            std::cmp::Ordering::Equal => wanted.memory_request < current.memory_request,
            order => order.is_lt(),
        };
        put(&mut updates.memory, update.clone(), shrinks);
    }
    if cpu {
        let shrinks = match bounds(wanted.cpu_limit).cmp(&bounds(current.cpu_limit)) {
            std::cmp::Ordering::Equal => wanted.cpu_request < current.cpu_request,
            order => order.is_lt(),
        };
        put(&mut updates.cpu, update, shrinks);
    }
    false
}

/// Whether a running container or the pod itself has something else than was allocated. `pod` is as allocated. What does
/// not run gets its size when it starts.
pub fn is_in_progress(pod: &Pod, observed: &ObservedPod, record: &Record) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let of_pod = Amounts::of(spec.resources.as_ref());
    let containers = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten());
    let is_running = |container: &Container| {
        let newest = observed.container(&container.name);
        newest.is_some_and(|newest| newest.state == ContainerState::Running)
    };
    of_pod != record.actuated_pod
        || containers
            .filter(|container| is_running(container))
            .any(|container| {
                let current = record.actuated.get(&container.name).copied();
                // Not known: it was started by a node that kept no record.
                current.is_some_and(|current| current != Amounts::of_container(pod, container))
            })
}
