//! From security contexts to what the runtime is told. Pure.

use k8s_openapi::api::core::v1::{
    AppArmorProfile, Container, Pod, SELinuxOptions, SeccompProfile, SecurityContext,
};
use skiff_cri::v1;
use skiff_cri::v1::{
    Capability, Int64Value, LinuxContainerSecurityContext, LinuxSandboxSecurityContext, NamespaceMode,
    NamespaceOption, SeLinuxOption, SecurityProfile, SupplementalGroupsPolicy,
};

use crate::pods;

const MASKED: [&str; 11] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
];
const READ_ONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// The container's own context over the pod's.
fn effective(pod: &Pod, container: &Container) -> SecurityContext {
    let own = container.security_context.clone().unwrap_or_default();
    let Some(of_pod) = pod.spec.as_ref().and_then(|s| s.security_context.as_ref()) else {
        return own;
    };
    SecurityContext {
        run_as_user: own.run_as_user.or(of_pod.run_as_user),
        run_as_group: own.run_as_group.or(of_pod.run_as_group),
        run_as_non_root: own.run_as_non_root.or(of_pod.run_as_non_root),
        se_linux_options: own.se_linux_options.or_else(|| of_pod.se_linux_options.clone()),
        seccomp_profile: own.seccomp_profile.or_else(|| of_pod.seccomp_profile.clone()),
        app_armor_profile: own.app_armor_profile.or_else(|| of_pod.app_armor_profile.clone()),
        ..own
    }
}

/// Refuses a container that must not run as root but would. `image_uid` and `image_user` are the image's.
pub fn verify_run_as_non_root(
    pod: &Pod,
    container: &Container,
    image_uid: Option<i64>,
    image_user: &str,
) -> Result<(), String> {
    let context = effective(pod, container);
    if context.run_as_non_root != Some(true) {
        return Ok(());
    }
    let place = format!("(pod: {:?}, container: {})", pods::full_name(pod), container.name);
    match (context.run_as_user, image_uid) {
        (Some(0), _) => Err(format!("container's runAsUser breaks non-root policy {place}")),
        (Some(_), _) => Ok(()),
        (None, None) if !image_user.is_empty() => Err(format!(
            "container has runAsNonRoot and image has non-numeric user ({image_user}), cannot verify user is non-root {place}"
        )),
        (None, Some(0)) => Err(format!(
            "container has runAsNonRoot and image will run as root {place}"
        )),
        _ => Ok(()),
    }
}

fn namespaces(pod: &Pod) -> NamespaceOption {
    let spec = pod.spec.as_ref();
    let flag = |f: Option<bool>| f == Some(true);
    let host_pid = spec.is_some_and(|s| flag(s.host_pid));
    let shared = spec.is_some_and(|s| flag(s.share_process_namespace));
    let mode = |host: bool| if host { NamespaceMode::Node } else { NamespaceMode::Pod } as i32;
    NamespaceOption {
        network: mode(pods::is_host_network(pod)),
        ipc: mode(spec.is_some_and(|s| flag(s.host_ipc))),
        pid: match (host_pid, shared) {
            (true, _) => NamespaceMode::Node,
            (false, true) => NamespaceMode::Pod,
            (false, false) => NamespaceMode::Container,
        } as i32,
        ..Default::default()
    }
}

fn profile(kind: v1::security_profile::ProfileType, localhost_ref: String) -> SecurityProfile {
    SecurityProfile {
        profile_type: kind as i32,
        localhost_ref,
    }
}

/// What the node knows of seccomp profiles.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seccomp<'a> {
    /// Where local profiles are.
    pub root: &'a str,
    /// Without a word from the pod a container gets the runtime's profile. Upstream's default is none.
    pub is_default: bool,
}

fn seccomp(profile_of: Option<&SeccompProfile>, node: Seccomp<'_>) -> SecurityProfile {
    use v1::security_profile::ProfileType::{Localhost, RuntimeDefault, Unconfined};
    match profile_of.map(|p| p.type_.as_str()) {
        Some("RuntimeDefault") => profile(RuntimeDefault, String::new()),
        Some("Localhost") => {
            let name = profile_of
                .and_then(|p| p.localhost_profile.as_deref())
                .unwrap_or_default();
            profile(Localhost, format!("{}/{name}", node.root))
        }
        None if node.is_default => profile(RuntimeDefault, String::new()),
        _ => profile(Unconfined, String::new()),
    }
}

fn app_armor(profile_of: Option<&AppArmorProfile>) -> Option<SecurityProfile> {
    use v1::security_profile::ProfileType::{Localhost, RuntimeDefault, Unconfined};
    let given = profile_of?;
    Some(match given.type_.as_str() {
        "Localhost" => profile(Localhost, given.localhost_profile.clone().unwrap_or_default()),
        "Unconfined" => profile(Unconfined, String::new()),
        _ => profile(RuntimeDefault, String::new()),
    })
}

fn se_linux(options: Option<&SELinuxOptions>) -> Option<SeLinuxOption> {
    options.map(|o| SeLinuxOption {
        user: o.user.clone().unwrap_or_default(),
        role: o.role.clone().unwrap_or_default(),
        r#type: o.type_.clone().unwrap_or_default(),
        level: o.level.clone().unwrap_or_default(),
    })
}

/// `fsGroup` and `supplementalGroups` together, and how the image's own groups count.
fn groups(pod: &Pod) -> (Vec<i64>, i32) {
    let context = pod.spec.as_ref().and_then(|s| s.security_context.as_ref());
    let mut groups: Vec<i64> = context.and_then(|c| c.fs_group).into_iter().collect();
    groups.extend(
        context
            .and_then(|c| c.supplemental_groups.clone())
            .into_iter()
            .flatten(),
    );
    let policy = match context.and_then(|c| c.supplemental_groups_policy.as_deref()) {
        Some("Strict") => SupplementalGroupsPolicy::Strict,
        _ => SupplementalGroupsPolicy::Merge,
    };
    (groups, policy as i32)
}

pub struct ImageUser<'a> {
    pub uid: Option<i64>,
    pub name: &'a str,
}

pub fn container_context(
    pod: &Pod,
    container: &Container,
    image_user: &ImageUser<'_>,
    node: Seccomp<'_>,
) -> LinuxContainerSecurityContext {
    let context = effective(pod, container);
    let (supplemental_groups, supplemental_groups_policy) = groups(pod);
    let privileged = context.privileged == Some(true);
    let unmasked = context.proc_mount.as_deref() == Some("Unmasked");
    let list = |paths: &[&str]| {
        if unmasked {
            Vec::new()
        } else {
            paths.iter().map(|p| (*p).to_owned()).collect()
        }
    };
    let mut made = LinuxContainerSecurityContext {
        capabilities: context.capabilities.as_ref().map(|c| Capability {
            add_capabilities: c.add.clone().unwrap_or_default(),
            drop_capabilities: c.drop.clone().unwrap_or_default(),
            ..Default::default()
        }),
        privileged,
        namespace_options: Some(namespaces(pod)),
        selinux_options: se_linux(context.se_linux_options.as_ref()),
        run_as_user: context.run_as_user.map(|value| Int64Value { value }),
        run_as_group: context.run_as_group.map(|value| Int64Value { value }),
        readonly_rootfs: context.read_only_root_filesystem == Some(true),
        supplemental_groups,
        supplemental_groups_policy,
        no_new_privs: context.allow_privilege_escalation == Some(false),
        masked_paths: list(&MASKED),
        readonly_paths: list(&READ_ONLY),
        seccomp: Some(seccomp(context.seccomp_profile.as_ref(), node)),
        apparmor: app_armor(context.app_armor_profile.as_ref()),
        ..Default::default()
    };
    if made.run_as_user.is_none() {
        made.run_as_user = image_user.uid.map(|value| Int64Value { value });
        made.run_as_username = image_user.name.to_owned();
    }
    made
}

pub fn sandbox_context(pod: &Pod, user_namespace: v1::UserNamespace) -> LinuxSandboxSecurityContext {
    let spec = pod.spec.as_ref();
    let context = spec.and_then(|s| s.security_context.as_ref());
    let (supplemental_groups, supplemental_groups_policy) = groups(pod);
    let privileged = |c: &Container| c.security_context.as_ref().and_then(|s| s.privileged) == Some(true);
    LinuxSandboxSecurityContext {
        namespace_options: Some(NamespaceOption {
            userns_options: Some(user_namespace),
            ..namespaces(pod)
        }),
        selinux_options: se_linux(context.and_then(|c| c.se_linux_options.as_ref())),
        run_as_user: context
            .and_then(|c| c.run_as_user)
            .map(|value| Int64Value { value }),
        run_as_group: context
            .and_then(|c| c.run_as_group)
            .map(|value| Int64Value { value }),
        supplemental_groups,
        supplemental_groups_policy,
        privileged: spec.is_some_and(|s| {
            s.containers
                .iter()
                .chain(s.init_containers.iter().flatten())
                .any(privileged)
        }),
        // The sandbox itself runs nothing of the user's, so it can always be confined.
        seccomp: Some(profile(
            v1::security_profile::ProfileType::RuntimeDefault,
            String::new(),
        )),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(security: serde_json::Value, container: serde_json::Value) -> (Pod, Container) {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"securityContext": security, "containers": [{"name": "c", "securityContext": container}]}}))
        .unwrap();
        let container = pod.spec.as_ref().unwrap().containers[0].clone();
        (pod, container)
    }

    #[test]
    fn non_root() {
        let check =
            |security: serde_json::Value, uid: Option<i64>, user: &str, expected: Result<(), &str>| {
                let (pod, container) = pod(security, json!({}));
                assert_eq!(
                    verify_run_as_non_root(&pod, &container, uid, user),
                    expected.map_err(str::to_owned)
                );
            };
        let non_root = json!({"runAsNonRoot": true});
        check(json!({}), Some(0), "", Ok(()));
        check(non_root.clone(), Some(1000), "", Ok(()));
        check(
            non_root.clone(),
            Some(0),
            "",
            Err("container has runAsNonRoot and image will run as root (pod: \"p_ns(u)\", container: c)"),
        );
        check(
            non_root,
            None,
            "www",
            Err(
                "container has runAsNonRoot and image has non-numeric user (www), cannot verify user is non-root (pod: \"p_ns(u)\", container: c)",
            ),
        );
        check(
            json!({"runAsNonRoot": true, "runAsUser": 0}),
            None,
            "",
            Err("container's runAsUser breaks non-root policy (pod: \"p_ns(u)\", container: c)"),
        );
        check(json!({"runAsNonRoot": true, "runAsUser": 7}), Some(0), "", Ok(()));
    }

    #[test]
    fn contexts() {
        let (pod, container) = pod(
            json!({"runAsUser": 1, "runAsGroup": 2, "fsGroup": 3, "supplementalGroups": [4], "seccompProfile": {"type": "RuntimeDefault"}}),
            json!({"runAsUser": 9, "readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false, "capabilities": {"add": ["NET_ADMIN"], "drop": ["ALL"]}}),
        );
        let image = ImageUser {
            uid: Some(0),
            name: "",
        };
        let made = container_context(
            &pod,
            &container,
            &image,
            Seccomp {
                root: "/seccomp",
                is_default: false,
            },
        );
        assert_eq!(made.run_as_user.unwrap().value, 9);
        assert_eq!(made.run_as_group.unwrap().value, 2);
        assert_eq!(made.supplemental_groups, [3, 4]);
        assert!(made.readonly_rootfs && made.no_new_privs && !made.privileged);
        assert_eq!(
            made.seccomp.unwrap().profile_type,
            v1::security_profile::ProfileType::RuntimeDefault as i32
        );
        assert_eq!(made.capabilities.unwrap().drop_capabilities, ["ALL"]);
        assert_eq!(
            made.namespace_options.unwrap().pid,
            NamespaceMode::Container as i32
        );
        assert!(made.masked_paths.contains(&"/proc/kcore".to_owned()));
    }

    #[test]
    fn the_image_decides_where_nobody_else_does() {
        let (pod, container) = pod(json!({}), json!({}));
        let made = container_context(
            &pod,
            &container,
            &ImageUser {
                uid: None,
                name: "www",
            },
            Seccomp::default(),
        );
        assert_eq!((made.run_as_user, made.run_as_username.as_str()), (None, "www"));
        assert_eq!(
            made.seccomp.unwrap().profile_type,
            v1::security_profile::ProfileType::Unconfined as i32
        );
    }

    #[test]
    fn seccomp_profiles_without_a_word() {
        use v1::security_profile::ProfileType::{RuntimeDefault, Unconfined};
        let check = |is_default: bool, container: serde_json::Value, expected| {
            let (pod, container) = pod(json!({}), container);
            let image = ImageUser { uid: None, name: "" };
            let node = Seccomp {
                root: "/seccomp",
                is_default,
            };
            let made = container_context(&pod, &container, &image, node);
            assert_eq!(made.seccomp.unwrap().profile_type, expected as i32);
        };
        check(false, json!({}), Unconfined);
        check(true, json!({}), RuntimeDefault);
        check(
            true,
            json!({"seccompProfile": {"type": "Unconfined"}}),
            Unconfined,
        );
    }
}
