//! What the runtime says of a pod: its sandboxes and containers, newest first, in plain types. Pure; the
//! calls that fill it are in `runtime.rs`.

use skiff_cri::v1;

/// Labels and annotations by which containers are found again after a restart. Upstream's names, so that
/// other tools (crictl, log collectors) find them too.
pub mod labels {
    pub const POD_NAME: &str = "io.kubernetes.pod.name";
    pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
    pub const POD_UID: &str = "io.kubernetes.pod.uid";
    pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";
    pub const HASH: &str = "io.kubernetes.container.hash";
    pub const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
    pub const TERMINATION_MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
    pub const TERMINATION_MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
    /// Whose pod it is, where several clusters share a machine: the cgroup root of its node.
    pub const OWNER: &str = "skiff.dev/owner";
    pub const GRACE_PERIOD: &str = "io.kubernetes.pod.terminationGracePeriod";
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ContainerState {
    Created,
    Running,
    Exited,
    #[default]
    Unknown,
}

impl ContainerState {
    pub fn as_str(self) -> &'static str {
        match self {
            ContainerState::Created => "created",
            ContainerState::Running => "running",
            ContainerState::Exited => "exited",
            ContainerState::Unknown => "unknown",
        }
    }

    pub fn from_cri(state: i32) -> Self {
        match v1::ContainerState::try_from(state) {
            Ok(v1::ContainerState::ContainerCreated) => ContainerState::Created,
            Ok(v1::ContainerState::ContainerRunning) => ContainerState::Running,
            Ok(v1::ContainerState::ContainerExited) => ContainerState::Exited,
            _ => ContainerState::Unknown,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedContainer {
    pub id: String,
    pub name: String,
    pub sandbox_id: String,
    pub image: String,
    pub image_ref: String,
    pub hash: u64,
    pub restart_count: i32,
    pub state: ContainerState,
    /// Unix nanoseconds, as CRI counts.
    pub created_at: i64,
    pub started_at: i64,
    pub finished_at: i64,
    pub exit_code: i32,
    pub reason: String,
    pub message: String,
    pub log_path: String,
    pub user: Option<v1::LinuxContainerUser>,
    /// What the container may use, as far as the runtime tells.
    pub resources: Option<v1::LinuxContainerResources>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedSandbox {
    pub id: String,
    pub attempt: u32,
    pub ready: bool,
    pub created_at: i64,
    pub host_network: bool,
    pub ips: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedPod {
    pub sandboxes: Vec<ObservedSandbox>,
    pub containers: Vec<ObservedContainer>,
}

impl ObservedPod {
    /// The newest container of that name.
    pub fn container(&self, name: &str) -> Option<&ObservedContainer> {
        self.containers.iter().find(|c| c.name == name)
    }

    pub fn running(&self) -> impl Iterator<Item = &ObservedContainer> {
        self.containers
            .iter()
            .filter(|c| c.state == ContainerState::Running)
    }

    pub fn is_anything_running(&self) -> bool {
        self.running().next().is_some() || self.sandboxes.iter().any(|s| s.ready)
    }

    pub fn ips(&self) -> &[String] {
        match self.sandboxes.first() {
            Some(sandbox) if sandbox.ready => &sandbox.ips,
            _ => &[],
        }
    }

    pub fn sort(&mut self) {
        self.sandboxes
            .sort_by(|a, b| b.created_at.cmp(&a.created_at).then_with(|| a.id.cmp(&b.id)));
        self.containers
            .sort_by(|a, b| b.created_at.cmp(&a.created_at).then_with(|| a.id.cmp(&b.id)));
    }
}

pub fn sandbox_from_cri(status: v1::PodSandboxStatus) -> ObservedSandbox {
    let host_network = status
        .linux
        .and_then(|l| l.namespaces)
        .and_then(|n| n.options)
        .is_some_and(|o| o.network == v1::NamespaceMode::Node as i32);
    let mut ips = Vec::new();
    if let Some(network) = status.network {
        if !network.ip.is_empty() {
            ips.push(network.ip);
        }
        ips.extend(
            network
                .additional_ips
                .into_iter()
                .map(|ip| ip.ip)
                .filter(|ip| !ip.is_empty()),
        );
    }
    ObservedSandbox {
        id: status.id,
        attempt: status.metadata.map_or(0, |m| m.attempt),
        ready: status.state == v1::PodSandboxState::SandboxReady as i32,
        created_at: status.created_at,
        host_network,
        ips,
    }
}

/// `termination_message` reads what the container left behind; it is asked only for one that has ended.
pub fn container_from_cri(
    status: v1::ContainerStatus,
    termination_message: impl FnOnce(&v1::ContainerStatus) -> String,
) -> ObservedContainer {
    let state = ContainerState::from_cri(status.state);
    let annotation = |name: &str| status.annotations.get(name);
    let mut message = String::new();
    let exited = state == ContainerState::Exited;
    if exited {
        message = status.message.clone();
        let left = termination_message(&status);
        if !left.is_empty() {
            if !message.is_empty() {
                message.push_str(": ");
            }
            message.push_str(&left);
        }
    }
    ObservedContainer {
        name: status
            .labels
            .get(labels::CONTAINER_NAME)
            .cloned()
            .or_else(|| status.metadata.as_ref().map(|m| m.name.clone()))
            .unwrap_or_default(),
        hash: annotation(labels::HASH)
            .and_then(|h| u64::from_str_radix(h, 16).ok())
            .unwrap_or(0),
        restart_count: annotation(labels::RESTART_COUNT)
            .and_then(|c| c.parse().ok())
            .unwrap_or(0),
        state,
        created_at: status.created_at,
        started_at: if state == ContainerState::Created {
            0
        } else {
            status.started_at
        },
        finished_at: if exited { status.finished_at } else { 0 },
        exit_code: if exited { status.exit_code } else { 0 },
        reason: if exited { status.reason } else { String::new() },
        message,
        // A name where the runtime gives one; an id says nothing to a reader.
        image: status
            .image
            .map(|i| {
                let is_id = i.image.starts_with("sha256:") && !i.user_specified_image.is_empty();
                if is_id { i.user_specified_image } else { i.image }
            })
            .unwrap_or_default(),
        image_ref: status.image_ref,
        log_path: status.log_path,
        user: status.user.and_then(|u| u.linux),
        resources: status.resources.and_then(|r| r.linux).filter(|r| {
            r.cpu_shares > 0 || r.memory_limit_in_bytes > 0 || (r.cpu_quota > 0 && r.cpu_period > 0)
        }),
        id: status.id,
        sandbox_id: String::new(),
    }
}

/// The hash by which a changed container is noticed: of its name and image only, because nothing else of a
/// container may change in place.
pub fn container_hash(name: &str, image: &str) -> u64 {
    // FNV-1a, 32 bits: small, and stable over restarts and versions.
    let text = format!("{{\"image\":{image:?},\"name\":{name:?}}}");
    let hash = text.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    u64::from(hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn containers_are_read_by_label() {
        let status = v1::ContainerStatus {
            id: "c1".into(),
            state: v1::ContainerState::ContainerExited as i32,
            labels: HashMap::from([(labels::CONTAINER_NAME.to_owned(), "app".to_owned())]),
            annotations: HashMap::from([
                (labels::HASH.to_owned(), "ff".to_owned()),
                (labels::RESTART_COUNT.to_owned(), "3".to_owned()),
            ]),
            exit_code: 2,
            message: "runtime".into(),
            ..Default::default()
        };
        let container = container_from_cri(status, |_| "left".to_owned());
        assert_eq!(
            (container.name.as_str(), container.hash, container.restart_count),
            ("app", 255, 3)
        );
        assert_eq!(
            (container.message.as_str(), container.exit_code),
            ("runtime: left", 2)
        );
    }

    #[test]
    fn the_newest_is_first() {
        let container = |id: &str, created_at| ObservedContainer {
            id: id.into(),
            name: "a".into(),
            created_at,
            ..Default::default()
        };
        let mut pod = ObservedPod {
            containers: vec![container("old", 1), container("new", 2)],
            ..Default::default()
        };
        pod.sort();
        assert_eq!(pod.container("a").unwrap().id, "new");
    }

    #[test]
    fn hashes_follow_the_image() {
        assert_eq!(container_hash("a", "i:1"), container_hash("a", "i:1"));
        assert_ne!(container_hash("a", "i:1"), container_hash("a", "i:2"));
    }
}
