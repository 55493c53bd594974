//! Small questions about a pod object that many files ask. Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    Container, EnvVar, EphemeralContainer, ObjectReference, Pod, PodSpec, SecurityContext,
};

pub fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

pub fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

pub fn namespace(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or_default()
}

/// `name_namespace(uid)`, as messages to users name a pod.
pub fn full_name(pod: &Pod) -> String {
    format!("{}_{}({})", name(pod), namespace(pod), uid(pod))
}

pub fn is_host_network(pod: &Pod) -> bool {
    pod.spec.as_ref().and_then(|s| s.host_network) == Some(true)
}

/// An ephemeral container is a container with fewer promises; the fields are the same.
pub fn ephemeral_as_container(ephemeral: &EphemeralContainer) -> Container {
    let e = ephemeral.clone();
    Container {
        args: e.args,
        command: e.command,
        env: e.env,
        env_from: e.env_from,
        image: e.image,
        image_pull_policy: e.image_pull_policy,
        lifecycle: e.lifecycle,
        liveness_probe: e.liveness_probe,
        name: e.name,
        ports: e.ports,
        readiness_probe: e.readiness_probe,
        resize_policy: e.resize_policy,
        resources: e.resources,
        restart_policy: e.restart_policy,
        restart_policy_rules: e.restart_policy_rules,
        security_context: e.security_context,
        startup_probe: e.startup_probe,
        stdin: e.stdin,
        stdin_once: e.stdin_once,
        termination_message_path: e.termination_message_path,
        termination_message_policy: e.termination_message_policy,
        tty: e.tty,
        volume_devices: e.volume_devices,
        volume_mounts: e.volume_mounts,
        working_dir: e.working_dir,
    }
}

/// The security contexts of all containers, of whichever sort.
pub fn all_container_names(pod: &Pod) -> impl Iterator<Item = &str> {
    pod.spec.iter().flat_map(|spec| {
        let init = spec.init_containers.iter().flatten().map(|one| one.name.as_str());
        let main = spec.containers.iter().map(|one| one.name.as_str());
        let ephemeral = spec.ephemeral_containers.iter().flatten();
        init.chain(main).chain(ephemeral.map(|one| one.name.as_str()))
    })
}

pub fn all_security_contexts(spec: &PodSpec) -> impl Iterator<Item = &SecurityContext> {
    let containers = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten());
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    containers
        .filter_map(|c| c.security_context.as_ref())
        .chain(ephemeral.filter_map(|c| c.security_context.as_ref()))
}

/// The names of the volumes that a container mounts or takes as a device. Others are not mounted on the node.
pub fn used_volumes(pod: &Pod) -> BTreeSet<&str> {
    let mut used = BTreeSet::new();
    let Some(spec) = &pod.spec else { return used };
    for container in spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
    {
        used.extend(container.volume_mounts.iter().flatten().map(|m| m.name.as_str()));
        used.extend(container.volume_devices.iter().flatten().map(|d| d.name.as_str()));
        used.extend(volumes_read(container.env.as_deref()));
    }
    for container in spec.ephemeral_containers.iter().flatten() {
        used.extend(container.volume_mounts.iter().flatten().map(|m| m.name.as_str()));
        used.extend(container.volume_devices.iter().flatten().map(|d| d.name.as_str()));
    }
    used
}

/// The volumes that variables are read from.
fn volumes_read(env: Option<&[EnvVar]>) -> impl Iterator<Item = &str> {
    let sources = env
        .unwrap_or_default()
        .iter()
        .filter_map(|v| v.value_from.as_ref());
    sources.filter_map(|from| Some(from.file_key_ref.as_ref()?.volume_name.as_str()))
}

/// Whether a container takes the volume as a block device.
pub fn is_device(pod: &Pod, volume: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let mut devices = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .flat_map(|container| container.volume_devices.iter().flatten())
        .chain(
            spec.ephemeral_containers
                .iter()
                .flatten()
                .flat_map(|container| container.volume_devices.iter().flatten()),
        );
    devices.any(|device| device.name == volume)
}

/// The container of that name, of whichever sort.
pub fn container(pod: &Pod, name: &str) -> Option<Container> {
    let spec = pod.spec.as_ref()?;
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .find(|c| c.name == name)
        .cloned()
        .or_else(|| {
            spec.ephemeral_containers
                .iter()
                .flatten()
                .find(|c| c.name == name)
                .map(ephemeral_as_container)
        })
}

pub fn reference(pod: &Pod) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: pod.metadata.name.clone(),
        namespace: pod.metadata.namespace.clone(),
        uid: pod.metadata.uid.clone(),
        resource_version: pod.metadata.resource_version.clone(),
        field_path: None,
    }
}

/// Which list of the pod a container stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerType {
    Container,
    Init,
    Ephemeral,
}

impl ContainerType {
    pub fn of(pod: &Pod, container: &str) -> ContainerType {
        let spec = pod.spec.as_ref();
        let in_list = |list: Option<&Vec<Container>>| list.into_iter().flatten().any(|c| c.name == container);
        if in_list(spec.map(|s| &s.containers)) {
            ContainerType::Container
        } else if in_list(spec.and_then(|s| s.init_containers.as_ref())) {
            ContainerType::Init
        } else {
            ContainerType::Ephemeral
        }
    }

    /// The field of the pod's spec.
    fn field(self) -> &'static str {
        match self {
            ContainerType::Container => "containers",
            ContainerType::Init => "initContainers",
            ContainerType::Ephemeral => "ephemeralContainers",
        }
    }

    /// As the kubelet's metrics call it.
    pub fn as_str(self) -> &'static str {
        match self {
            ContainerType::Container => "container",
            ContainerType::Init => "init_container",
            ContainerType::Ephemeral => "ephemeral_container",
        }
    }
}

/// The reference of an event about one container: `spec.containers{name}`.
pub fn container_reference(pod: &Pod, container: &str) -> ObjectReference {
    let list = ContainerType::of(pod, container).field();
    ObjectReference {
        field_path: Some(format!("spec.{list}{{{container}}}")),
        ..reference(pod)
    }
}

/// How long the pod may take to end.
pub fn grace_period(pod: &Pod) -> i64 {
    pod.metadata
        .deletion_grace_period_seconds
        .or_else(|| pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds))
        .unwrap_or(30)
}
