//! Which devices a group may use: v1 by files, v2 by a small BPF program on the group.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

/// Allows `access` (of "rwm") to devices; `None` is any number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRule {
    /// `None`: block and character devices.
    pub block: Option<bool>,
    pub major: Option<u32>,
    pub minor: Option<u32>,
    pub access: String,
}

impl DeviceRule {
    pub fn everything() -> DeviceRule {
        DeviceRule {
            block: None,
            major: None,
            minor: None,
            access: "rwm".into(),
        }
    }

    pub fn node(block: bool, major: u32, minor: u32, access: &str) -> DeviceRule {
        DeviceRule {
            block: Some(block),
            major: Some(major),
            minor: Some(minor),
            access: access.into(),
        }
    }
}

/// What every container may use: making nodes, and the harmless nodes of its /dev.
pub fn default_rules() -> Vec<DeviceRule> {
    let character = |major, minor| DeviceRule {
        block: Some(false),
        major: Some(major),
        minor,
        access: "rwm".into(),
    };
    vec![
        DeviceRule {
            block: Some(false),
            major: None,
            minor: None,
            access: "m".into(),
        },
        DeviceRule {
            block: Some(true),
            major: None,
            minor: None,
            access: "m".into(),
        },
        character(1, Some(3)),
        character(1, Some(5)),
        character(1, Some(7)),
        character(1, Some(8)),
        character(1, Some(9)),
        character(5, Some(0)),
        character(5, Some(1)),
        character(5, Some(2)),
        character(136, None),
    ]
}

pub(super) fn apply_v1(directory: &Path, rules: &[DeviceRule]) -> io::Result<()> {
    if rules.iter().any(|rule| *rule == DeviceRule::everything()) {
        return std::fs::write(directory.join("devices.allow"), "a");
    }
    std::fs::write(directory.join("devices.deny"), "a")?;
    for rule in rules {
        let number = |number: Option<u32>| number.map_or_else(|| "*".to_owned(), |number| number.to_string());
        let kinds: &[&str] = match rule.block {
            Some(true) => &["b"],
            Some(false) => &["c"],
            None => &["b", "c"],
        };
        for kind in kinds {
            let line = format!(
                "{kind} {}:{} {}",
                number(rule.major),
                number(rule.minor),
                rule.access
            );
            std::fs::write(directory.join("devices.allow"), line)?;
        }
    }
    Ok(())
}

/// An eBPF instruction: opcode, destination, source, offset, immediate.
fn instruction(opcode: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> u64 {
    u64::from(opcode)
        | u64::from(destination | source << 4) << 8
        | u64::from(offset as u16) << 16
        | u64::from(immediate as u32) << 32
}

/// The context is three u32: access << 16 | kind, major, minor; the answer 1 lets the access pass.
fn program(rules: &[DeviceRule]) -> Vec<u64> {
    const LOAD_WORD: u8 = 0x61;
    const MOVE: u8 = 0xbf;
    const MOVE_IMMEDIATE: u8 = 0xb7;
    const AND_IMMEDIATE: u8 = 0x57;
    const SHIFT_RIGHT: u8 = 0x77;
    const JUMP_NOT_EQUAL: u8 = 0x55;
    const EXIT: u8 = 0x95;
    const KIND: u8 = 2;
    const ACCESS: u8 = 3;
    const MAJOR: u8 = 4;
    const MINOR: u8 = 5;
    const SCRATCH: u8 = 1;
    let mut code = vec![
        instruction(LOAD_WORD, KIND, 1, 0, 0),
        instruction(MOVE, ACCESS, KIND, 0, 0),
        instruction(AND_IMMEDIATE, KIND, 0, 0, 0xffff),
        instruction(SHIFT_RIGHT, ACCESS, 0, 0, 16),
        instruction(LOAD_WORD, MAJOR, 1, 4, 0),
        instruction(LOAD_WORD, MINOR, 1, 8, 0),
    ];
    for rule in rules {
        // The tests jump over the rest of the rule, whose length is known once it is built.
        let mut tests: Vec<(u8, i32)> = Vec::new();
        if let Some(block) = rule.block {
            tests.push((KIND, if block { 1 } else { 2 }));
        }
        if let Some(major) = rule.major {
            tests.push((MAJOR, major as i32));
        }
        if let Some(minor) = rule.minor {
            tests.push((MINOR, minor as i32));
        }
        let mut allowed = 0;
        for (letter, bit) in [('m', 1), ('r', 2), ('w', 4)] {
            if rule.access.contains(letter) {
                allowed |= bit;
            }
        }
        // Refused bits that are asked for must be none: scratch = access & !allowed; scratch != 0 -> next.
        let tail = [
            instruction(MOVE, SCRATCH, ACCESS, 0, 0),
            instruction(AND_IMMEDIATE, SCRATCH, 0, 0, 7 & !allowed),
            instruction(JUMP_NOT_EQUAL, SCRATCH, 0, 2, 0),
            instruction(MOVE_IMMEDIATE, 0, 0, 0, 1),
            instruction(EXIT, 0, 0, 0, 0),
        ];
        let count = tests.len();
        for (at, (register, value)) in tests.into_iter().enumerate() {
            let skip = (count - at - 1 + tail.len()) as i16;
            code.push(instruction(JUMP_NOT_EQUAL, register, 0, skip, value));
        }
        code.extend(tail);
    }
    code.push(instruction(MOVE_IMMEDIATE, 0, 0, 0, 0));
    code.push(instruction(EXIT, 0, 0, 0, 0));
    code
}

#[repr(C)]
struct LoadAttributes {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buffer: u64,
    kernel_version: u32,
    flags: u32,
}

#[repr(C)]
struct AttachAttributes {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
}

/// Loads the program and attaches it; the kernel keeps it as long as the group.
pub(super) fn attach_v2(directory: &Path, rules: &[DeviceRule]) -> io::Result<()> {
    const PROG_LOAD: i32 = 5;
    const PROG_ATTACH: i32 = 8;
    const CGROUP_DEVICE_PROGRAM: u32 = 15;
    const CGROUP_DEVICE: u32 = 6;
    const ALLOW_MULTI: u32 = 2;
    let code = program(rules);
    let load = LoadAttributes {
        kind: CGROUP_DEVICE_PROGRAM,
        count: code.len() as u32,
        instructions: code.as_ptr() as u64,
        license: c"Apache".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log_buffer: 0,
        kernel_version: 0,
        flags: 0,
    };
    // SAFETY: the attributes are the leading fields of the kernel's union, of the size given, and point
    // to memory that outlives the call.
    let program = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            PROG_LOAD,
            &raw const load,
            std::mem::size_of::<LoadAttributes>(),
        )
    };
    if program < 0 {
        let error = io::Error::last_os_error();
        return Err(io::Error::new(
            error.kind(),
            format!("load the device filter: {error}"),
        ));
    }
    // SAFETY: the kernel just returned this descriptor.
    let program = unsafe { OwnedFd::from_raw_fd(program as i32) };
    let group = std::fs::File::open(directory)?;
    let attach = AttachAttributes {
        target: group.as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        kind: CGROUP_DEVICE,
        flags: ALLOW_MULTI,
    };
    // SAFETY: as above; both descriptors are open.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            PROG_ATTACH,
            &raw const attach,
            std::mem::size_of::<AttachAttributes>(),
        )
    };
    if result < 0 {
        let error = io::Error::last_os_error();
        return Err(io::Error::new(
            error.kind(),
            format!("attach the device filter: {error}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The verifier of the running kernel judges the program, and the group obeys it.
    #[test]
    fn v2_filter_is_accepted_and_obeyed() {
        // A machine with v1 controllers often has an empty v2 beside them; device filters need no more.
        let Some(root) = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]
            .iter()
            .find(|path| Path::new(path).join("cgroup.controllers").exists())
        else {
            return;
        };
        let group = Path::new(root).join(format!("skiff-devices-test-{}", std::process::id()));
        if std::fs::create_dir(&group).is_err() {
            return; // not root
        }
        let result = attach_v2(&group, &[DeviceRule::node(false, 1, 3, "rw")]);
        let script = "cat /dev/null && ! head -c1 /dev/zero >/dev/null 2>/dev/null";
        let status = std::process::Command::new("sh")
            .arg("-c")
            .arg(format!("echo 0 > {}/cgroup.procs && {script}", group.display()))
            .status();
        let removed = std::fs::remove_dir(&group);
        result.expect("the kernel takes the filter");
        assert!(
            status.expect("sh runs").success(),
            "null is allowed and zero is not"
        );
        removed.expect("the group is removed");
    }
}
