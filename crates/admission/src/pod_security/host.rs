//! The host's namespaces and ports, and containers that are as good as a process of the host.

use serde_json::Value;
use skiff_api::node::{at, list, number, text};

use super::{Found, Pod, Violation, named, plural, quoted, setters};

pub fn namespaces(pod: Pod<'_>) -> Option<Violation> {
    let shared: Vec<String> = ["hostNetwork", "hostPID", "hostIPC"]
        .into_iter()
        .filter(|field| at(pod.spec, field) == true)
        .map(|field| format!("{field}=true"))
        .collect();
    (!shared.is_empty()).then(|| Violation {
        reason: "host namespaces",
        detail: shared.join(", "),
    })
}

pub fn ports(pod: Pod<'_>) -> Option<Violation> {
    let mut found = std::collections::BTreeSet::new();
    let bad = pod.containers_that(|container| {
        let mut any = false;
        for port in list(container, "ports")
            .iter()
            .map(|port| number(port, "hostPort"))
        {
            if port != 0 {
                found.insert(port.to_string());
                any = true;
            }
        }
        any
    });
    if bad.is_empty() {
        return None;
    }
    let all: Vec<&str> = found.iter().map(String::as_str).collect();
    Some(Violation {
        reason: "hostPort",
        detail: format!(
            "{} {} {} {}",
            named(&bad),
            plural("uses", "use", bad.len()),
            plural("hostPort", "hostPorts", all.len()),
            all.join(", ")
        ),
    })
}

/// Probes and hooks that go to another host than the pod.
pub fn probes(pod: Pod<'_>) -> Option<Violation> {
    const HANDLERS: [&str; 5] = [
        "livenessProbe",
        "readinessProbe",
        "startupProbe",
        "lifecycle.postStart",
        "lifecycle.preStop",
    ];
    let mut hosts = Found::new();
    let bad = pod.containers_that(|container| {
        let mut any = false;
        for handler in HANDLERS.map(|path| at(container, path)) {
            for host in ["httpGet.host", "tcpSocket.host"].map(|path| text(handler, path)) {
                if !host.is_empty() {
                    hosts.insert(host);
                    any = true;
                }
            }
        }
        any
    });
    if bad.is_empty() {
        return None;
    }
    let names: Found<'_> = bad.into_iter().collect();
    let names: Vec<&str> = names.into_iter().collect();
    Some(Violation {
        reason: "probe or lifecycle host",
        detail: format!(
            "{} {} {} {}",
            named(&names),
            plural("uses", "use", names.len()),
            plural("probe or lifecycle host", "probe or lifecycle hosts", hosts.len()),
            quoted(hosts)
        ),
    })
}

pub fn privileged(pod: Pod<'_>) -> Option<Violation> {
    let bad = pod.containers_that(|container| at(container, "securityContext.privileged") == true);
    (!bad.is_empty()).then(|| Violation {
        reason: "privileged",
        detail: format!("{} must not set securityContext.privileged=true", named(&bad)),
    })
}

pub fn windows_process(pod: Pod<'_>) -> Option<Violation> {
    let set = |value: &Value| at(value, "securityContext.windowsOptions.hostProcess") == true;
    let (whole, bad) = (set(pod.spec), pod.containers_that(set));
    (whole || !bad.is_empty()).then(|| Violation {
        reason: "hostProcess",
        detail: format!(
            "{} must not set securityContext.windowsOptions.hostProcess=true",
            setters(whole, &bad)
        ),
    })
}
