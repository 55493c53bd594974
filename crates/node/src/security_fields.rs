//! Every field that a check of the Pod Security Standards looks at, and what the node does with it: it reaches the
//! runtime, or the pod is refused. A check that trusted a field which nobody acts on would promise what is not kept.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};
use skiff_cri::v1;
use skiff_cri::v1::security_profile::ProfileType;

use crate::admission::{Confinement, admit};
use crate::config::NodeConfig;
use crate::sandbox_config::{NO_USER_NAMESPACES, sandbox_config};
use crate::security::{ImageUser, Seccomp, container_context, verify_run_as_non_root};
use crate::sysctls::AllowedSysctls;

/// What becomes of a pod.
enum Fate {
    /// It runs, and the container's context shows the field.
    Container(fn(&v1::LinuxContainerSecurityContext) -> bool),
    /// It runs, and the sandbox's configuration shows the field.
    Sandbox(fn(&v1::PodSandboxConfig) -> bool),
    /// It is rejected with this reason and message.
    Rejected(&'static str, &'static str),
    /// Its sandbox is never made, with this message in a FailedCreatePodSandBox event.
    NoSandbox(&'static str),
    /// Its container is never made, with this beginning of the message in a Failed event.
    NoContainer(&'static str),
    /// Nothing to see here: other code acts on the field, and its tests show that.
    Elsewhere(&'static str),
}

use Fate::{Container, Elsewhere, NoContainer, NoSandbox, Rejected, Sandbox};

const NO_APP_ARMOR: &str = "Cannot enforce AppArmor: AppArmor is not enabled on the host";

/// The names of the checks, the fields of `spec` and of its container, and what the node does.
fn table() -> Vec<(&'static [&'static str], Value, Value, Fate)> {
    let none = || json!({});
    let context = |fields: Value| json!({ "securityContext": fields });
    vec![
        (
            &["appArmorProfile"],
            none(),
            context(json!({"appArmorProfile": {"type": "RuntimeDefault"}})),
            Rejected("AppArmor", NO_APP_ARMOR),
        ),
        (
            &["appArmorProfile"],
            context(json!({"appArmorProfile": {"type": "Localhost", "localhostProfile": "p"}})),
            none(),
            Rejected("AppArmor", NO_APP_ARMOR),
        ),
        (
            &["appArmorProfile"],
            json!({"ephemeralContainers": [{"name": "e", "securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}}}]}),
            none(),
            Rejected("AppArmor", NO_APP_ARMOR),
        ),
        (
            &["appArmorProfile"],
            none(),
            context(json!({"appArmorProfile": {"type": "Unconfined"}})),
            Container(|c| {
                c.apparmor
                    .as_ref()
                    .is_some_and(|p| p.profile_type == ProfileType::Unconfined as i32)
            }),
        ),
        (
            &["capabilities_baseline", "capabilities_restricted"],
            none(),
            context(json!({"capabilities": {"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]}})),
            Container(|c| {
                c.capabilities.as_ref().is_some_and(|c| {
                    c.add_capabilities == ["NET_BIND_SERVICE"] && c.drop_capabilities == ["ALL"]
                })
            }),
        ),
        (
            &["hostNamespaces"],
            json!({"hostNetwork": true, "hostPID": true, "hostIPC": true}),
            none(),
            Container(|c| {
                c.namespace_options
                    .as_ref()
                    .is_some_and(|n| [n.network, n.pid, n.ipc] == [v1::NamespaceMode::Node as i32; 3])
            }),
        ),
        (
            &["hostPathVolumes", "restrictedVolumes"],
            none(),
            none(),
            Elsewhere("volumes: each type is mounted, or ends in a FailedMount event that names it"),
        ),
        (
            &["hostPorts"],
            none(),
            json!({"ports": [{"containerPort": 80, "hostPort": 8080}]}),
            Sandbox(|s| s.port_mappings[0].host_port == 8080),
        ),
        (
            &["hostProbesAndHostLifecycle"],
            none(),
            none(),
            Elsewhere("probes::http and hooks connect to the host that the handler names"),
        ),
        (
            &["privileged"],
            none(),
            context(json!({"privileged": true})),
            Container(|c| c.privileged),
        ),
        (
            &["procMount", "procMount_restricted"],
            none(),
            context(json!({"procMount": "Default"})),
            Container(|c| !c.masked_paths.is_empty() && !c.readonly_paths.is_empty()),
        ),
        // The API refuses it without hostUsers: false, and with that it runs in a user namespace or not at all.
        (
            &["procMount", "procMount_restricted", "runAsNonRoot", "runAsUser"],
            json!({"hostUsers": false}),
            context(json!({"procMount": "Unmasked", "runAsUser": 0})),
            NoSandbox(NO_USER_NAMESPACES),
        ),
        (
            &[],
            none(),
            context(json!({"procMount": "Unmasked", "runAsUser": 0})),
            Container(|c| c.masked_paths.is_empty() && c.readonly_paths.is_empty()),
        ),
        // Passed on; a runtime ignores it where the kernel has no SELinux, and ours refuses it where it has.
        (
            &["seLinuxOptions"],
            context(json!({"seLinuxOptions": {"type": "container_t"}})),
            none(),
            Container(|c| {
                c.selinux_options
                    .as_ref()
                    .is_some_and(|o| o.r#type == "container_t")
            }),
        ),
        (
            &["seccompProfile_baseline", "seccompProfile_restricted"],
            context(json!({"seccompProfile": {"type": "RuntimeDefault"}})),
            none(),
            Container(|c| {
                c.seccomp
                    .as_ref()
                    .is_some_and(|p| p.profile_type == ProfileType::RuntimeDefault as i32)
            }),
        ),
        (
            &["seccompProfile_baseline", "seccompProfile_restricted"],
            context(json!({"seccompProfile": {"type": "RuntimeDefault"}})),
            context(json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "a/b.json"}})),
            Container(|c| {
                c.seccomp.as_ref().is_some_and(|p| {
                    p.profile_type == ProfileType::Localhost as i32 && p.localhost_ref == "/seccomp/a/b.json"
                })
            }),
        ),
        (
            &["sysctls"],
            context(json!({"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}]})),
            none(),
            Sandbox(|s| {
                let linux = s.linux.as_ref();
                linux.is_some_and(|l| l.sysctls["kernel.shm_rmid_forced"] == "1")
            }),
        ),
        (
            &["sysctls"],
            context(json!({"sysctls": [{"name": "kernel.msgmax", "value": "1"}]})),
            none(),
            Rejected(
                "SysctlForbidden",
                "forbidden sysctl: \"kernel.msgmax\" not allowlisted",
            ),
        ),
        // As upstream's kubelet on Linux. The field gives a pod nothing here, and the standards only forbid it.
        (
            &["windowsHostProcess"],
            context(json!({"windowsOptions": {"hostProcess": true}})),
            none(),
            Container(|c| !c.privileged && !c.masked_paths.is_empty()),
        ),
        // Three checks of the restricted level do not look at pods of Windows.
        (
            &[
                "allowPrivilegeEscalation",
                "capabilities_restricted",
                "seccompProfile_restricted",
            ],
            json!({"os": {"name": "windows"}}),
            none(),
            Rejected(
                "PodOSNotSupported",
                "Failed to admit pod as the OS field doesn't match node OS",
            ),
        ),
        (
            &["allowPrivilegeEscalation"],
            none(),
            context(json!({"allowPrivilegeEscalation": false})),
            Container(|c| c.no_new_privs),
        ),
        (
            &["runAsNonRoot"],
            context(json!({"runAsNonRoot": true})),
            none(),
            NoContainer("container has runAsNonRoot and image will run as root"),
        ),
        (
            &["runAsNonRoot"],
            context(json!({"runAsNonRoot": false})),
            context(json!({"runAsNonRoot": true, "runAsUser": 0})),
            NoContainer("container's runAsUser breaks non-root policy"),
        ),
        (
            &["runAsUser"],
            context(json!({"runAsUser": 7})),
            none(),
            Container(|c| c.run_as_user.as_ref().is_some_and(|u| u.value == 7)),
        ),
        // Not of the standards, but as good as: what it asks for is kept or refused.
        (
            &[],
            context(json!({"supplementalGroupsPolicy": "Strict"})),
            none(),
            Rejected(
                "SupplementalGroupsPolicyNotSupported",
                "SupplementalGroupsPolicy=Strict is not supported in this node",
            ),
        ),
    ]
}

#[test]
fn each_field_is_acted_on_or_refused() {
    let mut covered = BTreeSet::new();
    let config = NodeConfig::new("n", "/data", "unix:///x");
    let node = Node::default();
    let allocatable = serde_json::from_value(json!({"pods": "9"})).unwrap();
    let confinement = Confinement {
        sysctls: &AllowedSysctls::default(),
        app_armor: false,
    };
    for (checks, spec, container, fate) in table() {
        covered.extend(checks);
        let (mut spec, mut container) = (spec, container);
        container["name"] = json!("c");
        spec["containers"] = json!([container]);
        let shown = spec.to_string();
        let pod: Pod = serde_json::from_value(
            json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": spec}),
        )
        .unwrap();
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let rejected = admit(&pod, &[], &allocatable, Some(&node), &confinement).err();
        if let Rejected(reason, message) = fate {
            let found = rejected.map(|r| (r.reason.into_owned(), r.message));
            assert_eq!(found, Some((reason.to_owned(), message.to_owned())), "{shown}");
            continue;
        }
        assert_eq!(rejected, None, "{shown}");
        let sandbox = sandbox_config(
            &pod,
            0,
            &config,
            &v1::DnsConfig::default(),
            "/parent".into(),
            crate::user_namespaces::of_host(),
        );
        let image = ImageUser {
            uid: Some(0),
            name: "",
        };
        match fate {
            NoSandbox(message) => assert_eq!(sandbox.err().as_deref(), Some(message), "{shown}"),
            Sandbox(shows) => assert!(shows(&sandbox.unwrap().0), "{shown}"),
            Container(shows) => {
                assert!(sandbox.is_ok(), "{shown}");
                let made = container_context(
                    &pod,
                    container,
                    &image,
                    Seccomp {
                        root: "/seccomp",
                        is_default: false,
                    },
                );
                assert!(shows(&made), "{shown}: {made:?}");
            }
            NoContainer(beginning) => {
                let error = verify_run_as_non_root(&pod, container, image.uid, image.name).unwrap_err();
                assert!(error.starts_with(beginning), "{shown}: {error}");
            }
            Elsewhere(shown) => assert!(!shown.is_empty()),
            Rejected(..) => {}
        }
    }
    let checks: BTreeSet<&str> = skiff_admission::pod_security_checks().collect();
    assert_eq!(
        covered, checks,
        "a check looks at a field that this table does not name"
    );
}
