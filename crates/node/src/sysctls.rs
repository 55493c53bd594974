//! Which sysctls a pod may set: those that the kernel keeps apart per pod and that affect nobody else, and those
//! that the administrator adds with `--allowed-unsafe-sysctls`. Pure.

use k8s_openapi::api::core::v1::Pod;

use crate::admission::Refusal;
use crate::pods;

/// Upstream's safe sysctls. All of them are namespaced in every kernel that skiff runs on.
const SAFE: [&str; 14] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_slow_start_after_idle",
    "net.ipv4.tcp_notsent_lowat",
];

const MAX_LENGTH: usize = 253;

/// The kernel namespace that a sysctl belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Namespace {
    Ipc,
    Net,
    Uts,
    User,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "sysctl {0:?} must have at most {MAX_LENGTH} characters and be a name with an optional * at its end"
    )]
    Pattern(String),
    #[error("the sysctls {0:?} are not known to be namespaced")]
    NotNamespaced(String),
}

#[derive(Clone, Debug)]
struct Pattern {
    name: String,
    /// `name` is only the beginning.
    is_prefix: bool,
    namespace: Namespace,
}

/// The sysctls that pods of this node may set.
#[derive(Clone, Debug)]
pub struct AllowedSysctls {
    patterns: Vec<Pattern>,
}

impl Default for AllowedSysctls {
    fn default() -> Self {
        let safe = SAFE.iter().filter_map(|name| Pattern::parse(name).ok());
        AllowedSysctls {
            patterns: safe.collect(),
        }
    }
}

impl AllowedSysctls {
    /// The safe ones, and these names or patterns (`net.core.*`).
    pub fn with_unsafe(patterns: &[String]) -> Result<Self, Error> {
        let mut allowed = Self::default();
        for pattern in patterns {
            allowed.patterns.push(Pattern::parse(pattern)?);
        }
        Ok(allowed)
    }

    pub(crate) fn admit(&self, pod: &Pod) -> Result<(), Refusal> {
        let Some(spec) = &pod.spec else { return Ok(()) };
        let sysctls = spec.security_context.as_ref().and_then(|c| c.sysctls.as_ref());
        for sysctl in sysctls.into_iter().flatten() {
            self.check(pod, &normalized(&sysctl.name))
                .map_err(|why| Refusal::new("SysctlForbidden", format!("forbidden sysctl: {why}")))?;
        }
        Ok(())
    }

    fn check(&self, pod: &Pod, name: &str) -> Result<(), String> {
        let Some(pattern) = self.patterns.iter().find(|pattern| pattern.matches(name)) else {
            return Err(format!("{name:?} not allowlisted"));
        };
        let spec = pod.spec.as_ref();
        let shared = match pattern.namespace {
            Namespace::Ipc => spec.and_then(|s| s.host_ipc) == Some(true),
            Namespace::Net => pods::is_host_network(pod),
            Namespace::User => spec.and_then(|s| s.host_users) != Some(false),
            Namespace::Uts => false,
        };
        if shared {
            let namespace = match pattern.namespace {
                Namespace::Ipc => "IPC",
                Namespace::Net => "Net",
                Namespace::Uts => "UTS",
                Namespace::User => "User",
            };
            return Err(format!("{name:?} not allowed with host {namespace} enabled"));
        }
        Ok(())
    }
}

impl Pattern {
    fn parse(pattern: &str) -> Result<Pattern, Error> {
        let name = normalized(pattern);
        let (name, is_prefix) = match name.strip_suffix('*') {
            Some(prefix) => (prefix.to_owned(), true),
            None => (name, false),
        };
        let is_valid = pattern.len() <= MAX_LENGTH
            && name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_./".contains(&b));
        if !is_valid {
            return Err(Error::Pattern(pattern.to_owned()));
        }
        match namespace_of(&name) {
            Some(namespace) => Ok(Pattern {
                name,
                is_prefix,
                namespace,
            }),
            None => Err(Error::NotNamespaced(name)),
        }
    }

    fn matches(&self, name: &str) -> bool {
        if self.is_prefix {
            name.starts_with(&self.name)
        } else {
            name == self.name
        }
    }
}

/// Either `.` or `/` may separate the parts: the first one that appears is the separator, and the other one is then
/// part of a name (`net/ipv4/conf/eth0.100/forwarding`).
pub fn normalized(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(at) if name.as_bytes()[at] == b'/' => name
            .chars()
            .map(|c| match c {
                '/' => '.',
                '.' => '/',
                other => other,
            })
            .collect(),
        _ => name.to_owned(),
    }
}

/// `None`: the kernel has one value for the whole machine, as far as is known.
fn namespace_of(name: &str) -> Option<Namespace> {
    match name {
        "kernel.domainname" => Some(Namespace::Uts),
        "kernel.sem"
        | "kernel.shmall"
        | "kernel.shmmax"
        | "kernel.shmmni"
        | "kernel.shm_rmid_forced"
        | "kernel.shm"
        | "kernel.msgmax"
        | "kernel.msgmnb"
        | "kernel.msgmni"
        | "kernel.msg" => Some(Namespace::Ipc),
        _ if name.starts_with("net.") => Some(Namespace::Net),
        _ if name.starts_with("fs.mqueue.") => Some(Namespace::Ipc),
        _ if name.starts_with("user.") => Some(Namespace::User),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(allowed: &[&str], name: &str, spec: serde_json::Value, expected: Option<&str>) {
        let allowed: Vec<String> = allowed.iter().map(|s| (*s).to_owned()).collect();
        let allowed = AllowedSysctls::with_unsafe(&allowed).unwrap();
        let mut spec = spec;
        spec["containers"] = json!([]);
        spec["securityContext"] = json!({"sysctls": [{"name": name, "value": "1"}]});
        let pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
        let found = allowed.admit(&pod).err().map(|refusal| refusal.message);
        assert_eq!(found.as_deref(), expected, "{name}");
    }

    #[test]
    fn pods() {
        check(&[], "kernel.shm_rmid_forced", json!({}), None);
        check(&[], "net/ipv4/tcp_syncookies", json!({}), None);
        check(
            &[],
            "kernel.msgmax",
            json!({}),
            Some("forbidden sysctl: \"kernel.msgmax\" not allowlisted"),
        );
        check(&["kernel.msg*"], "kernel.msgmax", json!({}), None);
        check(
            &["kernel.msg*"],
            "kernel.msgmax",
            json!({"hostIPC": true}),
            Some("forbidden sysctl: \"kernel.msgmax\" not allowed with host IPC enabled"),
        );
        check(
            &[],
            "net.ipv4.tcp_syncookies",
            json!({"hostNetwork": true}),
            Some("forbidden sysctl: \"net.ipv4.tcp_syncookies\" not allowed with host Net enabled"),
        );
        check(&["net.core.somaxconn"], "net.core.somaxconn", json!({}), None);
        check(
            &["net.core.somaxconn"],
            "net.core.somaxconn2",
            json!({}),
            Some("forbidden sysctl: \"net.core.somaxconn2\" not allowlisted"),
        );
        check(&["net.*"], "net/ipv4/conf/eth0.1/forwarding", json!({}), None);
    }

    #[test]
    fn patterns() {
        assert_eq!(AllowedSysctls::default().patterns.len(), SAFE.len());
        let parse = |pattern: &str| AllowedSysctls::with_unsafe(&[pattern.to_owned()]).map(|_| ());
        assert_eq!(parse("fs.mqueue.*"), Ok(()));
        assert_eq!(
            parse("kernel.core_pattern"),
            Err(Error::NotNamespaced("kernel.core_pattern".into()))
        );
        assert_eq!(parse("*"), Err(Error::Pattern("*".into())));
        assert_eq!(parse("net.*.x"), Err(Error::Pattern("net.*.x".into())));
    }
}
