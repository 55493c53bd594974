//! A container in the runtime's terms: command, environment, mounts, resources, security. Pure; the files
//! that mounts need are made by `mounts.rs`.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use skiff_cri::v1;

use crate::expansion::expand;
use crate::images::ImageInfo;
use crate::machine::{huge_page_file_name, huge_page_name};
use crate::observed::{container_hash, labels};
use crate::resources::{
    QUOTA_PERIOD, cpu_request_milli, limit, limit_milli, limit_value, milli_cpu_to_quota,
    milli_cpu_to_shares, oom_score_adj, value,
};
use crate::runtime::log_path;
use crate::sandbox_config::identity_labels;
use crate::security::{ImageUser, Seccomp, container_context};
use crate::swap::SwapControl;

pub struct ContainerInputs<'a> {
    pub pod: &'a Pod,
    pub container: &'a Container,
    pub restart_count: i32,
    pub image: &'a ImageInfo,
    pub env: &'a [(String, String)],
    pub mounts: Vec<v1::Mount>,
    pub memory_capacity: i64,
    pub swap: &'a SwapControl,
    /// Whether limits of CPU are enforced.
    pub cpu_cfs_quota: bool,
    /// In KiB.
    pub page_sizes: &'a [u64],
    pub seccomp: Seccomp<'a>,
    /// The container whose processes an ephemeral container shall see.
    pub target_container_id: Option<String>,
    /// The sandbox's.
    pub user_namespace: Option<v1::UserNamespace>,
}

/// What the sandbox was asked for.
pub fn user_namespace_of(sandbox: &v1::PodSandboxConfig) -> Option<v1::UserNamespace> {
    let security = sandbox.linux.as_ref()?.security_context.as_ref()?;
    security.namespace_options.as_ref()?.userns_options.clone()
}

pub fn container_config(inputs: ContainerInputs<'_>) -> v1::ContainerConfig {
    let ContainerInputs {
        pod,
        container,
        restart_count,
        image,
        env,
        mut mounts,
        memory_capacity,
        swap,
        cpu_cfs_quota,
        page_sizes,
        seccomp,
        target_container_id,
        user_namespace,
    } = inputs;
    let lookup = |name: &str| env.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let expanded = |list: &Option<Vec<String>>| -> Vec<String> {
        list.iter().flatten().map(|word| expand(word, &lookup)).collect()
    };
    let mut security = container_context(
        pod,
        container,
        &ImageUser {
            uid: image.uid,
            name: &image.username,
        },
        seccomp,
    );
    if let (Some(target), Some(options)) = (target_container_id, security.namespace_options.as_mut())
        && options.pid == v1::NamespaceMode::Container as i32
    {
        options.pid = v1::NamespaceMode::Target as i32;
        options.target_id = target;
    }
    if let Some(user) = &user_namespace {
        for mount in &mut mounts {
            mount.uid_mappings.clone_from(&user.uids);
            mount.gid_mappings.clone_from(&user.gids);
        }
    }
    if let Some(options) = security.namespace_options.as_mut() {
        options.userns_options = user_namespace;
    }
    let stop_signal = container
        .lifecycle
        .as_ref()
        .and_then(|l| l.stop_signal.as_deref())
        .and_then(v1::Signal::from_str_name)
        .map_or(0, |signal| signal as i32);
    let mut resources = linux_resources(pod, container, memory_capacity, page_sizes);
    swap.apply(pod, container, &mut resources);
    if !cpu_cfs_quota {
        (resources.cpu_period, resources.cpu_quota) = (0, 0);
    }
    v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata {
            name: container.name.clone(),
            attempt: u32::try_from(restart_count).unwrap_or(0),
        }),
        image: Some(v1::ImageSpec {
            image: image.id.clone(),
            user_specified_image: container.image.clone().unwrap_or_default(),
            ..Default::default()
        }),
        command: expanded(&container.command),
        args: expanded(&container.args),
        working_dir: container.working_dir.clone().unwrap_or_default(),
        envs: env
            .iter()
            .map(|(key, value)| v1::KeyValue {
                key: key.clone(),
                value: value.clone().into(),
            })
            .collect(),
        mounts,
        labels: container_labels(pod, container),
        annotations: container_annotations(pod, container, restart_count),
        log_path: log_path(&container.name, restart_count),
        stdin: container.stdin == Some(true),
        stdin_once: container.stdin_once == Some(true),
        tty: container.tty == Some(true),
        linux: Some(v1::LinuxContainerConfig {
            resources: Some(resources),
            security_context: Some(security),
        }),
        stop_signal,
        ..Default::default()
    }
}

/// Of every size that the machine has: what is not asked for is not to be had.
fn huge_page_limits(
    of_pod: Option<&ResourceRequirements>,
    own: Option<&ResourceRequirements>,
    page_sizes: &[u64],
) -> Vec<v1::HugepageLimit> {
    let one = |kib: &u64| {
        let name = format!("hugepages-{}", huge_page_name(*kib));
        let asked = limit(own, &name).or_else(|| limit(of_pod, &name));
        v1::HugepageLimit {
            page_size: huge_page_file_name(*kib),
            limit: asked.map_or(0, |amount| u64::try_from(value(amount)).unwrap_or(0)),
        }
    };
    page_sizes.iter().map(one).collect()
}

fn linux_resources(
    pod: &Pod,
    container: &Container,
    memory_capacity: i64,
    page_sizes: &[u64],
) -> v1::LinuxContainerResources {
    let own = container.resources.as_ref();
    let of_pod = pod.spec.as_ref().and_then(|s| s.resources.as_ref());
    // A limit that only the pod has still bounds each container.
    let cpu_limit = Some(limit_milli(own, "cpu"))
        .filter(|l| *l > 0)
        .unwrap_or_else(|| limit_milli(of_pod, "cpu"));
    let memory_limit = Some(limit_value(own, "memory"))
        .filter(|l| *l > 0)
        .unwrap_or_else(|| limit_value(of_pod, "memory"));
    v1::LinuxContainerResources {
        cpu_period: QUOTA_PERIOD,
        cpu_quota: milli_cpu_to_quota(cpu_limit),
        cpu_shares: milli_cpu_to_shares(cpu_request_milli(own, "cpu")),
        memory_limit_in_bytes: memory_limit,
        oom_score_adj: oom_score_adj(pod, container, memory_capacity),
        hugepage_limits: huge_page_limits(of_pod, own, page_sizes),
        ..Default::default()
    }
}

fn container_labels(pod: &Pod, container: &Container) -> HashMap<String, String> {
    let mut all = HashMap::from(identity_labels(pod));
    all.insert(labels::CONTAINER_NAME.to_owned(), container.name.clone());
    all
}

/// What must be known of the container even when the pod object is gone.
fn container_annotations(pod: &Pod, container: &Container, restart_count: i32) -> HashMap<String, String> {
    let hash = container_hash(&container.name, container.image.as_deref().unwrap_or_default());
    let mut all = HashMap::from([
        (labels::HASH.to_owned(), format!("{hash:x}")),
        (labels::RESTART_COUNT.to_owned(), restart_count.to_string()),
        (
            labels::TERMINATION_MESSAGE_PATH.to_owned(),
            container.termination_message_path.clone().unwrap_or_default(),
        ),
        (
            labels::TERMINATION_MESSAGE_POLICY.to_owned(),
            container.termination_message_policy.clone().unwrap_or_default(),
        ),
    ]);
    if let Some(grace) = pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds) {
        all.insert(labels::GRACE_PERIOD.to_owned(), grace.to_string());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_container() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"terminationGracePeriodSeconds": 5, "containers": [{"name": "c", "image": "i:1", "command": ["$(A)"], "args": ["$$(A)", "$(NO)"],
                "tty": true, "resources": {"requests": {"cpu": "250m"}, "limits": {"cpu": "500m", "memory": "32Mi", "hugepages-2Mi": "4Mi"}}}]}})).unwrap();
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let user = v1::UserNamespace {
            mode: v1::NamespaceMode::Pod as i32,
            uids: vec![v1::IdMapping {
                host_id: 65536,
                container_id: 0,
                length: 65536,
            }],
            gids: vec![v1::IdMapping {
                host_id: 65536,
                container_id: 0,
                length: 65536,
            }],
        };
        let image = &ImageInfo {
            id: "sha256:1".into(),
            uid: Some(7),
            username: String::new(),
        };
        let make = |cpu_cfs_quota| {
            container_config(ContainerInputs {
                pod: &pod,
                container,
                restart_count: 3,
                image,
                env: &[("A".into(), "b".into())],
                mounts: vec![v1::Mount::default()],
                memory_capacity: 1 << 30,
                swap: &SwapControl {
                    accounting: crate::swap::SwapAccounting::V1,
                    behavior: crate::swap::SwapBehavior::NoSwap,
                    memory: 1 << 30,
                    capacity: 1 << 30,
                },
                page_sizes: &[2048, 1 << 20],
                cpu_cfs_quota,
                seccomp: Seccomp::default(),
                target_container_id: None,
                user_namespace: Some(user.clone()),
            })
        };
        let free = make(false).linux.unwrap().resources.unwrap();
        assert_eq!((free.cpu_period, free.cpu_quota, free.cpu_shares), (0, 0, 256));
        let made = make(true);
        assert_eq!(
            (&made.mounts[0].uid_mappings, &made.mounts[0].gid_mappings),
            (&user.uids, &user.gids)
        );
        assert_eq!(
            (made.command, made.args),
            (vec!["b".to_owned()], vec!["$(A)".to_owned(), "$(NO)".to_owned()])
        );
        assert_eq!((made.log_path.as_str(), made.tty), ("c/3.log", true));
        assert_eq!(made.annotations[labels::RESTART_COUNT], "3");
        assert_eq!(made.annotations[labels::GRACE_PERIOD], "5");
        let linux = made.linux.unwrap();
        let resources = linux.resources.unwrap();
        assert_eq!(
            (
                resources.cpu_shares,
                resources.cpu_quota,
                resources.memory_limit_in_bytes
            ),
            (256, 50_000, 32 << 20)
        );
        assert_eq!(resources.memory_swap_limit_in_bytes, 32 << 20);
        let huge: Vec<(&str, u64)> = resources
            .hugepage_limits
            .iter()
            .map(|limit| (limit.page_size.as_str(), limit.limit))
            .collect();
        assert_eq!(huge, [("2MB", 4 << 20), ("1GB", 0)]);
        let security = linux.security_context.unwrap();
        assert_eq!(security.run_as_user.unwrap().value, 7);
        assert_eq!(security.namespace_options.unwrap().userns_options, Some(user));
    }
}
