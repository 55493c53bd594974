//! Which mounts of a container are not its own: volumes, the pod's files, cgroups. CRIU only notes where they are; what is
//! in them is not part of a checkpoint.

use crate::init::spec::{InitSpec, MountKind};
use crate::init::{mount_id, open_inside};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

struct Mounted {
    id: u64,
    parent: u64,
    point: String,
    filesystem: String,
}

/// The mount points, as the container sees them.
pub(super) fn external(pid: i32, specification: &InitSpec) -> io::Result<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    let mounted: Vec<Mounted> = text.lines().filter_map(parse).collect();
    let root = root(pid)?;
    let mut outside = BTreeSet::new();
    for mount in &specification.mounts {
        if matches!(mount.kind, MountKind::Filesystem { .. } | MountKind::Cgroup) {
            continue;
        }
        // Where links of the image led it.
        if let Some(target) = open_inside(root.as_fd(), &mount.target).map_err(io::Error::other)? {
            outside.insert(mount_id(target.as_fd())?);
        }
    }
    Ok(select(&mounted, outside))
}

fn root(pid: i32) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(
        format!("/proc/{pid}/root"),
        flags,
        Mode::empty(),
    )?)
}

/// What is mounted below a volume came with it.
fn select(mounted: &[Mounted], mut outside: BTreeSet<u64>) -> Vec<String> {
    let cgroup = |mount: &&Mounted| matches!(mount.filesystem.as_str(), "cgroup" | "cgroup2");
    outside.extend(mounted.iter().filter(cgroup).map(|mount| mount.id));
    // The container's root is its own, also where a mount on it was taken off.
    outside.retain(|id| mounted.iter().all(|mount| mount.id != *id || mount.point != "/"));
    loop {
        let below: Vec<u64> = mounted
            .iter()
            .filter(|mount| outside.contains(&mount.parent) && !outside.contains(&mount.id))
            .map(|mount| mount.id)
            .collect();
        if below.is_empty() {
            break;
        }
        outside.extend(below);
    }
    mounted
        .iter()
        .filter(|mount| outside.contains(&mount.id))
        .map(|mount| mount.point.clone())
        .collect()
}

/// A line of mountinfo.
fn parse(line: &str) -> Option<Mounted> {
    let (head, tail) = line.split_once(" - ")?;
    let mut words = head.split(' ');
    let id = words.next()?.parse().ok()?;
    let parent = words.next()?.parse().ok()?;
    Some(Mounted {
        id,
        parent,
        point: unescape(words.nth(2)?),
        filesystem: tail.split(' ').next()?.to_owned(),
    })
}

/// Blanks and the like are octal numbers there.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part.get(..3).and_then(|octal| u8::from_str_radix(octal, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend_from_slice(&part.as_bytes()[3..]);
            }
            None => {
                bytes.push(b'\\');
                bytes.extend_from_slice(part.as_bytes());
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_and_what_is_below_them() {
        let text = "246 154 0:41 / / rw - overlay overlay rw\n\
                    234 246 254:0 /v /data/a\\040b rw,relatime master:1 - ext4 /dev/vda rw\n\
                    235 234 254:1 / /data/a\\040b/sub rw - xfs /dev/vdb rw\n\
                    248 246 0:52 / /dev rw - tmpfs tmpfs rw\n\
                    236 246 0:35 /c /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let mounted: Vec<Mounted> = text.lines().filter_map(parse).collect();
        assert_eq!(
            select(&mounted, BTreeSet::from([234, 246])),
            ["/data/a b", "/data/a b/sub", "/sys/fs/cgroup"]
        );
    }
}
