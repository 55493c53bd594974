//! The Pod Security Standards: which checks a level has in which version of the policy, and what a pod violates. Pure:
//! the plugin of the same name asks, and says so to the client.
//!
//! ```text
//! configuration  defaults and exemptions from a file
//! policy      levels, versions, and what the labels of a namespace ask for
//! host        the host's namespaces, ports, paths, and containers that are as good as the host
//! profiles    AppArmor, seccomp, SELinux, sysctls, the mount of /proc
//! users       who a container runs as, and what it may become
//! volumes     the sorts of volumes
//! ```

mod configuration;
mod host;
mod policy;
mod profiles;
mod users;
mod volumes;

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde_json::Value;
use skiff_api::node::{at, list, text};

pub use configuration::{Configuration, Defaults, Exemptions};
pub use policy::{LABEL_PREFIX, Level, LevelVersion, Policy, Version};

/// A pod, or the template of one.
#[derive(Clone, Copy)]
pub struct Pod<'a> {
    pub metadata: &'a Value,
    pub spec: &'a Value,
}

impl<'a> Pod<'a> {
    /// A pod as it is stored, or the template in its controller: anything with `metadata` and `spec`.
    pub fn of(object: &'a Value) -> Pod<'a> {
        Pod {
            metadata: at(object, "metadata"),
            spec: at(object, "spec"),
        }
    }

    /// All containers in the order in which they are reported.
    fn containers(self) -> impl Iterator<Item = &'a Value> {
        ["initContainers", "containers", "ephemeralContainers"]
            .into_iter()
            .flat_map(move |field| list(self.spec, field))
    }

    /// The names of the containers that `bad` holds for.
    fn containers_that(self, mut bad: impl FnMut(&'a Value) -> bool) -> Vec<&'a str> {
        self.containers()
            .filter(|container| bad(container))
            .map(|container| text(container, "name"))
            .collect()
    }

    fn runs_windows(self) -> bool {
        text(self.spec, "os.name") == "windows"
    }

    /// In a namespace of users, root is nobody outside.
    fn has_own_users(self) -> bool {
        at(self.spec, "hostUsers").as_bool() == Some(false)
    }

    fn annotations(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let annotations = at(self.metadata, "annotations").as_object();
        let entries = annotations.into_iter().flatten();
        entries.map(|(key, value)| (key.as_str(), value.as_str().unwrap_or("")))
    }
}

/// What one check found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub reason: &'static str,
    pub detail: String,
}

type Run = fn(Pod<'_>) -> Option<Violation>;

struct Check {
    id: &'static str,
    level: Level,
    /// From which minor version on which form of it counts, oldest first.
    since: &'static [(u64, Run)],
    /// The weaker check that this one stands in for.
    instead_of: &'static str,
}

const fn baseline(id: &'static str, since: &'static [(u64, Run)]) -> Check {
    Check {
        id,
        level: Level::Baseline,
        since,
        instead_of: "",
    }
}

const fn restricted(id: &'static str, since: &'static [(u64, Run)], instead_of: &'static str) -> Check {
    Check {
        id,
        level: Level::Restricted,
        since,
        instead_of,
    }
}

/// All checks in the order in which violations are listed.
static CHECKS: [Check; 19] = [
    baseline("appArmorProfile", &[(0, profiles::app_armor)]),
    baseline("capabilities_baseline", &[(0, users::added_capabilities)]),
    baseline("hostNamespaces", &[(0, host::namespaces)]),
    baseline("hostPathVolumes", &[(0, volumes::host_path)]),
    baseline("hostPorts", &[(0, host::ports)]),
    baseline("hostProbesAndHostLifecycle", &[(34, host::probes)]),
    baseline("privileged", &[(0, host::privileged)]),
    baseline(
        "procMount",
        &[
            (0, profiles::proc_mount),
            (35, |pod| {
                if pod.has_own_users() {
                    return None;
                }
                profiles::proc_mount(pod)
            }),
        ],
    ),
    baseline(
        "seLinuxOptions",
        &[(0, profiles::se_linux_1_0), (31, profiles::se_linux_1_31)],
    ),
    baseline(
        "seccompProfile_baseline",
        &[(0, profiles::seccomp_annotations), (19, profiles::seccomp)],
    ),
    baseline(
        "sysctls",
        &[
            (0, |pod| profiles::sysctls(pod, 0)),
            (27, |pod| profiles::sysctls(pod, 27)),
            (29, |pod| profiles::sysctls(pod, 29)),
            (32, |pod| profiles::sysctls(pod, 32)),
        ],
    ),
    baseline("windowsHostProcess", &[(0, host::windows_process)]),
    restricted(
        "allowPrivilegeEscalation",
        &[
            (8, users::privilege_escalation),
            (25, |pod| unless_windows(pod, users::privilege_escalation)),
        ],
        "",
    ),
    restricted(
        "capabilities_restricted",
        &[
            (22, users::capabilities),
            (25, |pod| unless_windows(pod, users::capabilities)),
        ],
        "capabilities_baseline",
    ),
    restricted("procMount_restricted", &[(35, profiles::proc_mount)], "procMount"),
    restricted("restrictedVolumes", &[(0, volumes::sorts)], "hostPathVolumes"),
    restricted(
        "runAsNonRoot",
        &[
            (0, users::non_root),
            (35, |pod| unless_own_users(pod, users::non_root)),
        ],
        "",
    ),
    restricted(
        "runAsUser",
        &[
            (23, users::root_user),
            (35, |pod| unless_own_users(pod, users::root_user)),
        ],
        "",
    ),
    restricted(
        "seccompProfile_restricted",
        &[
            (19, profiles::seccomp_required),
            (25, |pod| unless_windows(pod, profiles::seccomp_required)),
        ],
        "seccompProfile_baseline",
    ),
];

/// The names of all checks, for a test of the node that none trusts a field which nobody acts on.
pub fn check_names() -> impl Iterator<Item = &'static str> {
    CHECKS.iter().map(|check| check.id)
}

/// Validation keeps such pods from setting what the check asks for.
fn unless_windows(pod: Pod<'_>, check: Run) -> Option<Violation> {
    if pod.runs_windows() { None } else { check(pod) }
}

fn unless_own_users(pod: Pod<'_>, check: Run) -> Option<Violation> {
    if pod.has_own_users() { None } else { check(pod) }
}

/// The form of a check in a version; older versions may lack the check.
fn form(check: &Check, version: policy::Version) -> Option<Run> {
    let counts = check
        .since
        .iter()
        .rev()
        .find(|(since, _)| version.has_reached(*since));
    counts.map(|(_, run)| *run)
}

/// What `pod` violates of a policy, in the order of the checks.
pub fn violations(wanted: LevelVersion, pod: Pod<'_>) -> Vec<Violation> {
    if wanted.level == Level::Privileged {
        return Vec::new();
    }
    let active = |check: &&Check| check.level <= wanted.level;
    let replaced = |id: &str| {
        CHECKS
            .iter()
            .filter(active)
            .any(|other| other.instead_of == id && form(other, wanted.version).is_some())
    };
    CHECKS
        .iter()
        .filter(active)
        .filter(|check| check.level == Level::Restricted || !replaced(check.id))
        .filter_map(|check| form(check, wanted.version).and_then(|run| run(pod)))
        .collect()
}

/// `host ports, privileged`: for many pods at once.
pub fn reasons(violations: &[Violation]) -> String {
    let reasons: Vec<&str> = violations.iter().map(|violation| violation.reason).collect();
    reasons.join(", ")
}

/// `hostPort (container "a" uses hostPort 80), privileged (…)`: for one pod.
pub fn details(violations: &[Violation]) -> String {
    let details: Vec<Cow<'_, str>> = violations
        .iter()
        .map(|violation| match violation.detail.as_str() {
            "" => Cow::Borrowed(violation.reason),
            detail => Cow::Owned(format!("{} ({detail})", violation.reason)),
        })
        .collect();
    details.join(", ")
}

/// `"a", "b"`
fn quoted<'a>(items: impl IntoIterator<Item = &'a str>) -> String {
    let items: Vec<&str> = items.into_iter().collect();
    if items.is_empty() {
        return String::new();
    }
    format!("\"{}\"", items.join("\", \""))
}

fn plural<'a>(one: &'a str, many: &'a str, count: usize) -> &'a str {
    if count == 1 { one } else { many }
}

/// `container "a"`, `containers "a", "b"`
fn named(containers: &[&str]) -> String {
    let word = plural("container", "containers", containers.len());
    format!("{word} {}", quoted(containers.iter().copied()))
}

/// `pod and container "a"`: who has set a value that it must not have.
fn setters(pod: bool, containers: &[&str]) -> String {
    match (pod, containers.is_empty()) {
        (true, true) => "pod".to_owned(),
        (true, false) => format!("pod and {}", named(containers)),
        (false, _) => named(containers),
    }
}

type Found<'a> = BTreeSet<&'a str>;

#[cfg(test)]
mod tests;
