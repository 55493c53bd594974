//! Capability names and the sets a container gets.

use crate::init::spec::Capabilities;
use skiff_cri::v1 as cri;

/// By number.
const NAMES: &[&str] = &[
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// What containerd and Docker give every container.
const DEFAULTS: &[&str] = &[
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

pub const SYS_RESOURCE: u32 = 24;

fn bit(name: &str) -> Result<u64, String> {
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
    NAMES
        .iter()
        .position(|known| *known == short)
        .map(|number| 1 << number)
        .ok_or_else(|| format!("unknown capability {name:?}"))
}

/// What this process itself may hand on, from /proc/self/status.
pub fn own_bounding_set() -> u64 {
    std::fs::read_to_string("/proc/self/status")
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.strip_prefix("CapBnd:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0)
}

/// `available` is what the machine lets us give. A capability by default that is not available is left
/// out, one that was asked for by name is refused.
pub fn resolve(
    wanted: Option<&cri::Capability>,
    privileged: bool,
    available: u64,
) -> Result<Capabilities, String> {
    if privileged {
        return Ok(Capabilities {
            bounding: available,
            effective: available,
            permitted: available,
            inheritable: 0,
            ambient: 0,
        });
    }
    let mut set = 0;
    for name in DEFAULTS {
        set |= bit(name)? & available;
    }
    let mut ambient = 0;
    if let Some(wanted) = wanted {
        let is_all = |name: &String| name.eq_ignore_ascii_case("ALL");
        // COMPAT: ALL is taken first, so that "drop ALL, add X" and "add ALL, drop X" both mean it.
        if wanted.add_capabilities.iter().any(is_all) {
            set = available;
        }
        if wanted.drop_capabilities.iter().any(is_all) {
            set = 0;
        }
        for name in wanted.add_capabilities.iter().filter(|name| !is_all(name)) {
            let one = bit(name)?;
            if one & available == 0 {
                return Err(format!("capability {name:?} is not available on this machine"));
            }
            set |= one;
        }
        for name in wanted.drop_capabilities.iter().filter(|name| !is_all(name)) {
            set &= !bit(name)?;
        }
        for name in &wanted.add_ambient_capabilities {
            ambient |= if is_all(name) { set } else { bit(name)? };
        }
        set |= ambient & available;
    }
    let ambient = ambient & set;
    Ok(Capabilities {
        bounding: set,
        effective: set,
        permitted: set,
        inheritable: ambient,
        ambient,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets() {
        let all = (1 << NAMES.len()) - 1;
        let check = |add: &[&str], drop: &[&str], expected: Option<&[&str]>| {
            let strings = |names: &[&str]| names.iter().map(|name| name.to_string()).collect();
            let wanted = cri::Capability {
                add_capabilities: strings(add),
                drop_capabilities: strings(drop),
                add_ambient_capabilities: Vec::new(),
            };
            let got = resolve(Some(&wanted), false, all).ok().map(|sets| sets.bounding);
            let expected =
                expected.map(|names| names.iter().fold(0, |set, name| set | bit(name).expect("known")));
            assert_eq!(got, expected, "{add:?} {drop:?}");
        };
        check(&[], &[], Some(DEFAULTS));
        check(&["NET_ADMIN"], &["ALL"], Some(&["NET_ADMIN"]));
        check(&["CAP_net_admin"], &["ALL"], Some(&["NET_ADMIN"]));
        check(&["ALL"], &["ALL"], Some(&[]));
        check(&["NO_SUCH"], &[], None);
        assert!(resolve(None, false, 0).expect("sets").bounding == 0);
    }
}
