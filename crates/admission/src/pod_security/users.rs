//! Who the processes of a container are, and what they may become.

use serde_json::Value;
use skiff_api::node::{at, list};

use super::{Found, Pod, Violation, named, quoted, setters};

/// What runtimes give to a container anyway.
const DEFAULT_CAPABILITIES: [&str; 13] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

pub fn privilege_escalation(pod: Pod<'_>) -> Option<Violation> {
    let bad =
        pod.containers_that(|container| at(container, "securityContext.allowPrivilegeEscalation") != false);
    (!bad.is_empty()).then(|| Violation {
        reason: "allowPrivilegeEscalation != false",
        detail: format!(
            "{} must set securityContext.allowPrivilegeEscalation=false",
            named(&bad)
        ),
    })
}

/// The containers that add a capability which `allowed` does not name, and what they add.
fn adding<'a>(pod: Pod<'a>, allowed: &[&str]) -> (Vec<&'a str>, Found<'a>) {
    let mut found = Found::new();
    let bad = pod.containers_that(|container| {
        let mut any = false;
        let added = list(container, "securityContext.capabilities.add");
        for capability in added.iter().filter_map(Value::as_str) {
            if !allowed.contains(&capability) {
                found.insert(capability);
                any = true;
            }
        }
        any
    });
    (bad, found)
}

fn must_not_add(containers: &[&str], found: Found<'_>) -> String {
    format!(
        "{} must not include {} in securityContext.capabilities.add",
        named(containers),
        quoted(found)
    )
}

pub fn added_capabilities(pod: Pod<'_>) -> Option<Violation> {
    let (bad, found) = adding(pod, &DEFAULT_CAPABILITIES);
    (!bad.is_empty()).then(|| Violation {
        reason: "non-default capabilities",
        detail: must_not_add(&bad, found),
    })
}

pub fn capabilities(pod: Pod<'_>) -> Option<Violation> {
    let keeping = pod.containers_that(|container| {
        let dropped = list(container, "securityContext.capabilities.drop");
        !dropped.iter().any(|capability| capability == "ALL")
    });
    let (bad, found) = adding(pod, &["NET_BIND_SERVICE"]);
    let mut details = Vec::new();
    if !keeping.is_empty() {
        details.push(format!(
            "{} must set securityContext.capabilities.drop=[\"ALL\"]",
            named(&keeping)
        ));
    }
    if !bad.is_empty() {
        details.push(must_not_add(&bad, found));
    }
    (!details.is_empty()).then(|| Violation {
        reason: "unrestricted capabilities",
        detail: details.join("; "),
    })
}

pub fn non_root(pod: Pod<'_>) -> Option<Violation> {
    const REASON: &str = "runAsNonRoot != true";
    let said = |value: &Value| at(value, "securityContext.runAsNonRoot").as_bool();
    let of_pod = said(pod.spec);
    let bad = pod.containers_that(|container| said(container) == Some(false));
    if of_pod == Some(false) || !bad.is_empty() {
        return Some(Violation {
            reason: REASON,
            detail: format!(
                "{} must not set securityContext.runAsNonRoot=false",
                setters(of_pod == Some(false), &bad)
            ),
        });
    }
    let silent = pod.containers_that(|container| of_pod != Some(true) && said(container).is_none());
    (!silent.is_empty()).then(|| Violation {
        reason: REASON,
        detail: format!(
            "pod or {} must set securityContext.runAsNonRoot=true",
            named(&silent)
        ),
    })
}

pub fn root_user(pod: Pod<'_>) -> Option<Violation> {
    let root = |value: &Value| at(value, "securityContext.runAsUser").as_i64() == Some(0);
    let (whole, bad) = (root(pod.spec), pod.containers_that(root));
    (whole || !bad.is_empty()).then(|| Violation {
        reason: "runAsUser=0",
        detail: format!("{} must not set runAsUser=0", setters(whole, &bad)),
    })
}
