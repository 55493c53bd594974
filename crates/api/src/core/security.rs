//! Rules of the security contexts of pods and containers.

use std::collections::BTreeSet;

use serde_json::Value;
use skiff_meta::names;

use super::mounts::descending_path;
use super::windows;
use crate::errors::Errors;
use crate::node::{Node, at};

const ID_RANGE: &str = "must be between 0 and 2147483647, inclusive";
const PROFILE_TYPES: [&str; 3] = ["Localhost", "RuntimeDefault", "Unconfined"];

fn id(at: &Node, errors: &mut Errors) {
    if at.int().is_some_and(|n| !(0..=i64::from(i32::MAX)).contains(&n)) {
        errors.invalid(at, ID_RANGE);
    }
}

pub fn container(context: &Node, host_users: bool, errors: &mut Errors) {
    if !context.is_set() {
        return;
    }
    id(&context.field("runAsUser"), errors);
    id(&context.field("runAsGroup"), errors);
    let proc_mount = context.field("procMount");
    if proc_mount.is_set() {
        errors.one_of(&proc_mount, &["Default", "Unmasked"]);
        if host_users && proc_mount.str() == "Unmasked" {
            errors.invalid(&proc_mount, "`hostUsers` must be false to use `Unmasked`");
        }
    }
    seccomp(&context.field("seccompProfile"), errors);
    if context.field("allowPrivilegeEscalation").value.as_bool() == Some(false) {
        if context.field("privileged").bool() {
            errors.invalid(
                context,
                "cannot set `allowPrivilegeEscalation` to false and `privileged` to true",
            );
        }
        let added = context.field("capabilities.add");
        if added.items().any(|c| c.str() == "CAP_SYS_ADMIN") {
            errors.invalid(
                context,
                "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN",
            );
        }
    }
    windows::options(context, errors);
    app_armor(&context.field("appArmorProfile"), errors);
}

pub fn pod(spec: &Node, old: Option<&Value>, errors: &mut Errors) {
    let context = spec.field("securityContext");
    if !context.is_set() {
        return;
    }
    for name in ["fsGroup", "runAsUser", "runAsGroup"] {
        id(&context.field(name), errors);
    }
    let groups = context.field("supplementalGroups");
    for group in groups.items() {
        id(&group, errors);
    }
    // COMPAT: upstream keeps these two under the security context inside, and says so in the path.
    if spec.field("shareProcessNamespace").bool() && spec.field("hostPID").bool() {
        let at = context.field("shareProcessNamespace");
        errors.invalid_value(
            &at,
            true,
            "ShareProcessNamespace and HostPID cannot both be enabled",
        );
    }
    sysctls(spec, &context, errors);
    errors.one_of_if_set(
        &context.field("fsGroupChangePolicy"),
        &["Always", "OnRootMismatch"],
    );
    seccomp(&context.field("seccompProfile"), errors);
    windows::options(&context, errors);
    app_armor(&context.field("appArmorProfile"), errors);
    errors.one_of_if_set(&context.field("supplementalGroupsPolicy"), &["Merge", "Strict"]);
    // Mounting with the label is off by default; an object that has a policy keeps the choice.
    let policies = match old.map(|old| at(old, "securityContext.seLinuxChangePolicy")) {
        Some(policy) if !policy.is_null() => &["MountOption", "Recursive"][..],
        _ => &["Recursive"],
    };
    errors.one_of_if_set(&context.field("seLinuxChangePolicy"), policies);
}

fn sysctls(spec: &Node, context: &Node, errors: &mut Errors) {
    const PATTERN: &str = r"^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$";
    let letter_or_digit = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let segment = |s: &str| {
        s.starts_with(letter_or_digit)
            && s.ends_with(letter_or_digit)
            && s.chars().all(|c| letter_or_digit(c) || c == '-' || c == '_')
    };
    let sysctls = context.field("sysctls");
    let mut seen = BTreeSet::new();
    for sysctl in sysctls.items() {
        let name = sysctl.field("name");
        if name.str().is_empty() {
            errors.required(&name, "");
        } else if name.len() > 253 || !name.str().split(['.', '/']).all(segment) {
            errors.invalid(
                &name,
                format!("must have at most 253 characters and match regex {PATTERN}"),
            );
        } else if seen.contains(name.str()) {
            errors.duplicate(&name);
        }
        seen.insert(name.str());
        let dotted = name.str().replace('/', ".");
        if spec.field("hostNetwork").bool() && dotted.starts_with("net.") {
            errors.invalid(&name, "may not be specified when 'hostNetwork' is true");
        }
        let ipc = ["kernel.shm", "kernel.msg", "kernel.sem", "fs.mqueue."]
            .iter()
            .any(|p| dotted.starts_with(p));
        if spec.field("hostIPC").bool() && ipc {
            errors.invalid(&name, "may not be specified when 'hostIPC' is true");
        }
    }
}

fn seccomp(profile: &Node, errors: &mut Errors) {
    if !profile.is_set() {
        return;
    }
    let kind = profile.field("type");
    if kind.str().is_empty() {
        errors.required(&kind, "type is required when seccompProfile is set");
    } else {
        errors.one_of(&kind, &PROFILE_TYPES);
    }
    let local = profile.field("localhostProfile");
    if kind.str() == "Localhost" {
        if local.is_set() {
            descending_path(&local, errors);
        } else {
            errors.required(&local, "must be set when seccomp type is Localhost");
        }
    } else if local.is_set() {
        errors.invalid_value(
            &local,
            profile.value.clone(),
            "can only be set when seccomp type is Localhost",
        );
    }
}

fn app_armor(profile: &Node, errors: &mut Errors) {
    if !profile.is_set() {
        return;
    }
    let (kind, local) = (profile.field("type"), profile.field("localhostProfile"));
    match kind.str() {
        "Localhost" => {
            if local.str().trim().is_empty() && local.str().is_empty() {
                errors.required(&local, "must be set when AppArmor type is Localhost");
            } else if local.str().trim() != local.str() {
                errors.invalid(&local, "must not be padded with whitespace");
            }
            if local.len() > 4095 {
                errors.too_long(&local, 4095);
            }
        }
        "RuntimeDefault" | "Unconfined" => {
            if local.is_set() {
                errors.invalid(&local, "can only be set when AppArmor type is Localhost");
            }
        }
        "" => errors.required(&kind, "type is required when appArmorProfile is set"),
        _ => errors.not_supported(&kind, &PROFILE_TYPES),
    }
}

/// Pods of their own user namespace share no other namespace with the host.
pub fn host_users(spec: &Node, errors: &mut Errors) {
    if spec.field("hostUsers").value.as_bool() != Some(false) {
        return;
    }
    const REFUSED: &str = "when `hostUsers` is false";
    for (field, shown) in [
        ("hostNetwork", "hostNetwork"),
        ("hostPID", "HostPID"),
        ("hostIPC", "HostIPC"),
    ] {
        if spec.field(field).bool() {
            errors.forbidden(&spec.field(shown), REFUSED);
        }
    }
    for name in ["initContainers", "containers", "ephemeralContainers"] {
        let containers = spec.field(name);
        for container in containers.items() {
            let devices = container.field("volumeDevices");
            if !devices.is_empty() {
                errors.forbidden(&devices, REFUSED);
            }
        }
    }
}

pub fn host_name(spec: &Node, errors: &mut Errors) {
    let name = spec.field("hostnameOverride");
    if !name.is_set() {
        return;
    }
    if spec.field("setHostnameAsFQDN").bool() {
        errors.forbidden(&name, "may not be specified when setHostnameAsFQDN is true");
    }
    if spec.field("hostNetwork").bool() {
        errors.forbidden(&name, "may not be specified when hostNetwork is true");
    }
    if name.len() > 64 {
        errors.too_long(&name, 64);
    }
    errors.rule(&name, names::dns1123_subdomain(name.str()));
}
