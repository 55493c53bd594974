//! CRI's views of sandboxes, containers and images.

use super::Daemon;
use super::record::{Container, Sandbox, cri_state};
use crate::image::Image;
use skiff_cri::v1 as cri;

impl Daemon {
    pub(super) fn sandbox_status(&self, sandbox: &Sandbox) -> cri::PodSandboxStatus {
        let record = sandbox.get();
        let config = record.config.0;
        let mut ips = record.ips.into_iter();
        let options = config
            .linux
            .as_ref()
            .and_then(|linux| linux.security_context.as_ref())
            .and_then(|security| security.namespace_options.clone());
        cri::PodSandboxStatus {
            id: record.id,
            metadata: config.metadata,
            state: sandbox_state(record.ready) as i32,
            created_at: record.created_at,
            network: Some(cri::PodSandboxNetworkStatus {
                ip: ips.next().unwrap_or_default(),
                additional_ips: ips.map(|ip| cri::PodIp { ip }).collect(),
            }),
            linux: Some(cri::LinuxPodSandboxStatus {
                namespaces: Some(cri::Namespace { options }),
            }),
            labels: config.labels,
            annotations: config.annotations,
            runtime_handler: String::new(),
        }
    }

    pub(super) fn list_sandboxes(&self, filter: Option<cri::PodSandboxFilter>) -> Vec<cri::PodSandbox> {
        let filter = filter.unwrap_or_default();
        let mut list: Vec<cri::PodSandbox> = self
            .sandboxes
            .read()
            .values()
            .map(|sandbox| {
                let record = sandbox.get();
                cri::PodSandbox {
                    id: record.id,
                    metadata: record.config.0.metadata,
                    state: sandbox_state(record.ready) as i32,
                    created_at: record.created_at,
                    labels: record.config.0.labels,
                    annotations: record.config.0.annotations,
                    runtime_handler: String::new(),
                }
            })
            .filter(|item| {
                item.id.starts_with(&filter.id)
                    && filter
                        .state
                        .as_ref()
                        .is_none_or(|state| state.state == item.state)
                    && matches(&filter.label_selector, &item.labels)
            })
            .collect();
        list.sort_by(|left, right| {
            right
                .created_at
                .cmp(&left.created_at)
                .then(left.id.cmp(&right.id))
        });
        list
    }

    pub(super) fn list_containers(&self, filter: Option<cri::ContainerFilter>) -> Vec<cri::Container> {
        let filter = filter.unwrap_or_default();
        let mut list: Vec<cri::Container> = self
            .containers
            .read()
            .values()
            .map(|container| {
                let record = container.get();
                let config = record.config.0;
                cri::Container {
                    id: record.id,
                    pod_sandbox_id: record.sandbox_id,
                    metadata: config.metadata,
                    image: config.image,
                    image_ref: record.image_ref,
                    state: cri_state(&container.current()) as i32,
                    created_at: record.created_at,
                    labels: config.labels,
                    annotations: config.annotations,
                    image_id: record.image_id,
                }
            })
            .filter(|item| {
                item.id.starts_with(&filter.id)
                    && item.pod_sandbox_id.starts_with(&filter.pod_sandbox_id)
                    && filter
                        .state
                        .as_ref()
                        .is_none_or(|state| state.state == item.state)
                    && matches(&filter.label_selector, &item.labels)
            })
            .collect();
        list.sort_by(|left, right| {
            right
                .created_at
                .cmp(&left.created_at)
                .then(left.id.cmp(&right.id))
        });
        list
    }

    pub(super) fn container_status(&self, container: &Container) -> cri::ContainerStatus {
        let record = container.get();
        let state = container.current();
        let config = record.config.0;
        // COMPAT: the reasons are those the kubelet and users know from other runtimes.
        let (reason, message) = if state.finished_at == 0 {
            ("", String::new())
        } else if !state.start_error.is_empty() {
            (
                "StartError",
                format!("failed to start container {:?}: {}", record.id, state.start_error),
            )
        } else if state.oom_killed && state.exit_code != 0 {
            ("OOMKilled", String::new())
        } else if state.exit_code == 0 {
            ("Completed", String::new())
        } else {
            ("Error", String::new())
        };
        let user = (state.started_at != 0).then(|| cri::ContainerUser {
            linux: Some(cri::LinuxContainerUser {
                uid: i64::from(state.uid),
                gid: i64::from(state.gid),
                supplemental_groups: state.groups.iter().map(|gid| i64::from(*gid)).collect(),
            }),
        });
        let linux = config.linux.and_then(|linux| linux.resources);
        cri::ContainerStatus {
            id: record.id,
            metadata: config.metadata,
            state: cri_state(&state) as i32,
            created_at: record.created_at,
            // A container that never ran has no time of start.
            started_at: if state.start_error.is_empty() {
                state.started_at
            } else {
                0
            },
            finished_at: state.finished_at,
            exit_code: state.exit_code,
            image: config.image,
            image_ref: record.image_ref,
            reason: reason.into(),
            message,
            labels: config.labels,
            annotations: config.annotations,
            mounts: config.mounts,
            log_path: record.log_path,
            resources: linux.map(|linux| cri::ContainerResources {
                linux: Some(linux),
                windows: None,
            }),
            image_id: record.image_id,
            user,
            stop_signal: config.stop_signal,
        }
    }
}

fn sandbox_state(ready: bool) -> cri::PodSandboxState {
    if ready {
        cri::PodSandboxState::SandboxReady
    } else {
        cri::PodSandboxState::SandboxNotready
    }
}

pub(super) fn matches(
    selector: &std::collections::HashMap<String, String>,
    labels: &std::collections::HashMap<String, String>,
) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// The user is what the kubelet's runAsNonRoot check goes by.
pub(super) fn image_view(image: &Image) -> cri::Image {
    let user = image.config.user.split(':').next().unwrap_or_default();
    let uid = if user.is_empty() {
        None
    } else {
        user.parse::<i64>().ok()
    };
    let username = if uid.is_none() {
        user.to_owned()
    } else {
        String::new()
    };
    cri::Image {
        id: image.id.clone(),
        repo_tags: image.repo_tags.clone(),
        repo_digests: image.repo_digests.clone(),
        size: image.size,
        uid: uid.map(|value| cri::Int64Value { value }),
        username,
        spec: None,
        pinned: image.pinned,
    }
}
