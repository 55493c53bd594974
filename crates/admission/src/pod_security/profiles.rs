//! What the kernel keeps a container from: AppArmor, seccomp, SELinux, sysctls, the masks over /proc.

use std::collections::BTreeSet;

use serde_json::Value;
use skiff_api::node::{at, list, text};
use skiff_meta::field::quote;

use super::{Found, Pod, Violation, named, plural, quoted, setters};

const APP_ARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";
const SECCOMP_POD_ANNOTATION: &str = "seccomp.security.alpha.kubernetes.io/pod";
const SECCOMP_ANNOTATION: &str = "container.seccomp.security.alpha.kubernetes.io/";

fn is_allowed(profile: &str) -> bool {
    matches!(profile, "RuntimeDefault" | "Localhost")
}

/// The profile of a pod or a container, if it names one.
fn profile<'a>(of: &'a Value, path: &str) -> Option<&'a str> {
    at(of, path).is_object().then(|| text(at(of, path), "type"))
}

pub fn app_armor(pod: Pod<'_>) -> Option<Violation> {
    const PATH: &str = "securityContext.appArmorProfile";
    let mut found = Found::new();
    let mut bad = |value| match profile(value, PATH) {
        Some(profile) if !is_allowed(profile) => {
            found.insert(profile);
            true
        }
        _ => false,
    };
    let (whole, containers) = (bad(pod.spec), pod.containers_that(bad));
    let mut annotations: Vec<String> = pod
        .annotations()
        .filter(|(key, _)| key.starts_with(APP_ARMOR_ANNOTATION))
        .filter(|(_, value)| !matches!(*value, "" | "runtime/default") && !value.starts_with("localhost/"))
        .map(|(key, value)| format!("{key}={}", quote(value)))
        .collect();
    annotations.sort();
    let mut by = Vec::new();
    if whole || !containers.is_empty() {
        by.push(setters(whole, &containers));
    }
    if !annotations.is_empty() {
        by.push(plural("annotation", "annotations", annotations.len()).to_owned());
    }
    if by.is_empty() {
        return None;
    }
    let values: Vec<&str> = found
        .into_iter()
        .chain(annotations.iter().map(String::as_str))
        .collect();
    Some(Violation {
        reason: plural(
            "forbidden AppArmor profile",
            "forbidden AppArmor profiles",
            values.len(),
        ),
        detail: format!(
            "{} must not set AppArmor profile type to {}",
            by.join(" and "),
            quoted(values)
        ),
    })
}

/// Before the field there were annotations.
pub fn seccomp_annotations(pod: Pod<'_>) -> Option<Violation> {
    let annotations = at(pod.metadata, "annotations");
    let mut found = BTreeSet::new();
    let mut look = |key: String| {
        let Some(value) = annotations.get(&key).and_then(Value::as_str) else {
            return;
        };
        let allowed =
            matches!(value, "runtime/default" | "docker/default") || value.starts_with("localhost/");
        if !allowed {
            found.insert(format!("{key}={}", quote(value)));
        }
    };
    look(SECCOMP_POD_ANNOTATION.to_owned());
    for container in pod.containers() {
        look(format!("{SECCOMP_ANNOTATION}{}", text(container, "name")));
    }
    if found.is_empty() {
        return None;
    }
    let word = plural("annotation", "annotations", found.len());
    let all: Vec<String> = found.into_iter().collect();
    Some(Violation {
        reason: "seccompProfile",
        detail: format!("forbidden {word} {}", all.join(", ")),
    })
}

const SECCOMP: &str = "securityContext.seccompProfile";

pub fn seccomp(pod: Pod<'_>) -> Option<Violation> {
    let mut found = Found::new();
    let mut bad = |value| match profile(value, SECCOMP) {
        Some(profile) if !is_allowed(profile) => {
            found.insert(profile);
            true
        }
        _ => false,
    };
    let (whole, containers) = (bad(pod.spec), pod.containers_that(bad));
    (whole || !containers.is_empty()).then(|| Violation {
        reason: "seccompProfile",
        detail: format!(
            "{} must not set securityContext.seccompProfile.type to {}",
            setters(whole, &containers),
            quoted(found)
        ),
    })
}

/// As above, and one must be there.
pub fn seccomp_required(pod: Pod<'_>) -> Option<Violation> {
    if let Some(violation) = seccomp(pod) {
        return Some(violation);
    }
    if profile(pod.spec, SECCOMP).is_some() {
        return None;
    }
    let silent = pod.containers_that(|container| profile(container, SECCOMP).is_none());
    (!silent.is_empty()).then(|| Violation {
        reason: "seccompProfile",
        detail: format!(
            "pod or {} must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\"",
            named(&silent)
        ),
    })
}

pub fn proc_mount(pod: Pod<'_>) -> Option<Violation> {
    let mut found = Found::new();
    let bad = pod.containers_that(
        |container| match at(container, "securityContext.procMount").as_str() {
            None | Some("Default") => false,
            Some(other) => {
                found.insert(other);
                true
            }
        },
    );
    (!bad.is_empty()).then(|| Violation {
        reason: "procMount",
        detail: format!(
            "{} must not set securityContext.procMount to {}",
            named(&bad),
            quoted(found)
        ),
    })
}

pub fn se_linux_1_0(pod: Pod<'_>) -> Option<Violation> {
    se_linux(pod, &["", "container_t", "container_init_t", "container_kvm_t"])
}

pub fn se_linux_1_31(pod: Pod<'_>) -> Option<Violation> {
    se_linux(
        pod,
        &[
            "",
            "container_t",
            "container_init_t",
            "container_kvm_t",
            "container_engine_t",
        ],
    )
}

fn se_linux(pod: Pod<'_>, types: &[&str]) -> Option<Violation> {
    let (mut found, mut user, mut role) = (Found::new(), false, false);
    let mut bad = |value| {
        let options = at(value, "securityContext.seLinuxOptions");
        let (named, has_user, has_role) = (
            text(options, "type"),
            !text(options, "user").is_empty(),
            !text(options, "role").is_empty(),
        );
        user |= has_user;
        role |= has_role;
        let wrong = !types.contains(&named);
        if wrong {
            found.insert(named);
        }
        wrong || has_user || has_role
    };
    let (whole, containers) = (bad(pod.spec), pod.containers_that(bad));
    if !whole && containers.is_empty() {
        return None;
    }
    let mut what = Vec::new();
    if !found.is_empty() {
        what.push(format!(
            "{} {}",
            plural("type", "types", found.len()),
            quoted(found)
        ));
    }
    if user {
        what.push("user may not be set".to_owned());
    }
    if role {
        what.push("role may not be set".to_owned());
    }
    Some(Violation {
        reason: "seLinuxOptions",
        detail: format!(
            "{} set forbidden securityContext.seLinuxOptions: {}",
            setters(whole, &containers),
            what.join("; ")
        ),
    })
}

/// Sysctls that reach no further than the pod, and the minor version that has allowed each.
const SAFE_SYSCTLS: [(&str, u64); 12] = [
    ("kernel.shm_rmid_forced", 0),
    ("net.ipv4.ip_local_port_range", 0),
    ("net.ipv4.tcp_syncookies", 0),
    ("net.ipv4.ping_group_range", 0),
    ("net.ipv4.ip_unprivileged_port_start", 0),
    ("net.ipv4.ip_local_reserved_ports", 27),
    ("net.ipv4.tcp_keepalive_time", 29),
    ("net.ipv4.tcp_fin_timeout", 29),
    ("net.ipv4.tcp_keepalive_intvl", 29),
    ("net.ipv4.tcp_keepalive_probes", 29),
    ("net.ipv4.tcp_rmem", 32),
    ("net.ipv4.tcp_wmem", 32),
];

pub fn sysctls(pod: Pod<'_>, minor: u64) -> Option<Violation> {
    let safe = |name: &str| {
        SAFE_SYSCTLS
            .iter()
            .any(|(known, since)| *known == name && *since <= minor)
    };
    let bad: Vec<&str> = list(pod.spec, "securityContext.sysctls")
        .iter()
        .map(|sysctl| text(sysctl, "name"))
        .filter(|name| !safe(name))
        .collect();
    (!bad.is_empty()).then(|| Violation {
        reason: "forbidden sysctls",
        detail: bad.join(", "),
    })
}
