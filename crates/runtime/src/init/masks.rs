//! Masked and read-only paths, and the proof that they hold: after the last mount every one of them is
//! looked up again, as the container will look it up.

use super::targets::{open_inside, open_without_links};
use super::tree::{self, MOUNT_ATTR_RDONLY, attach, clone_opened, mount_id, new_filesystem, set_attributes};
use super::{Context, InitError};
use rustix::fs::{FileType, Mode, OFlags};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// What files are masked with: the null device that this runtime has made, opened before a volume could
/// cover it.
pub(super) struct NullDevice(OwnedFd);

impl NullDevice {
    /// `dev` is the container's new /dev.
    pub(super) fn open(dev: BorrowedFd<'_>) -> Result<NullDevice, InitError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let null =
            rustix::fs::openat(dev, "null", flags, Mode::empty()).context(|| "open /dev/null".into())?;
        let stat = rustix::fs::fstat(&null).context(|| "stat /dev/null".into())?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice
            || stat.st_rdev != rustix::fs::makedev(1, 3)
        {
            return Err(InitError::Message("/dev/null is not the null device".into()));
        }
        Ok(NullDevice(null))
    }

    /// Where the standard input is the host's null device, puts this one in its place: a checkpoint can only be taken
    /// of a process whose files are on the container's own mounts.
    pub(super) fn replace_standard_input(&self, dev: BorrowedFd<'_>) -> Result<(), InitError> {
        let what = || "replace the standard input".into();
        let stat = rustix::fs::fstat(rustix::stdio::stdin()).context(what)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice
            || stat.st_rdev != rustix::fs::makedev(1, 3)
        {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let null = rustix::fs::openat(dev, "null", flags, Mode::empty()).context(what)?;
        rustix::stdio::dup2_stdin(null).context(what)
    }
}

/// A path and the mount that must be seen there.
pub(super) struct Protected<'a> {
    path: &'a str,
    mount_id: u64,
    readonly: bool,
}

/// Protects every path that is there; one that the kernel does not have needs no protection.
pub(super) fn protect<'a>(
    root: BorrowedFd<'_>,
    readonly_paths: &'a [String],
    masked_paths: &'a [String],
    null: &NullDevice,
) -> Result<Vec<Protected<'a>>, InitError> {
    let mut protected = Vec::with_capacity(readonly_paths.len() + masked_paths.len());
    for path in readonly_paths {
        let Some(target) = open_protected(root, path)? else {
            continue;
        };
        let tree = clone_opened(target.as_fd(), true).context(|| format!("protect {path}"))?;
        set_attributes(tree.as_fd(), MOUNT_ATTR_RDONLY, 0, true).context(|| format!("protect {path}"))?;
        protected.push(put(&tree, &target, path, true)?);
    }
    for path in masked_paths {
        let Some(target) = open_protected(root, path)? else {
            continue;
        };
        let stat = rustix::fs::fstat(&target).context(|| format!("stat {path}"))?;
        let tree = if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            new_filesystem("tmpfs", &["size=0k".into()], MOUNT_ATTR_RDONLY)
        } else {
            clone_opened(null.0.as_fd(), false)
        };
        let tree = tree.context(|| format!("mask {path}"))?;
        protected.push(put(&tree, &target, path, false)?);
    }
    Ok(protected)
}

fn put<'a>(
    tree: &OwnedFd,
    target: &OwnedFd,
    path: &'a str,
    readonly: bool,
) -> Result<Protected<'a>, InitError> {
    attach(tree, target, path)?;
    let mount_id = mount_id(tree.as_fd()).context(|| format!("stat {path}"))?;
    Ok(Protected {
        path,
        mount_id,
        readonly,
    })
}

/// The kernel's own file systems have no link on these paths, so one that is met is a volume's.
fn open_protected(root: BorrowedFd<'_>, path: &str) -> Result<Option<OwnedFd>, InitError> {
    if ["/proc", "/sys"]
        .iter()
        .any(|own| Path::new(path).starts_with(own))
    {
        open_without_links(root, path)
    } else {
        open_inside(root, path)
    }
}

/// Looks everything up again.
pub(super) fn verify(root: BorrowedFd<'_>, protected: &[Protected<'_>]) -> Result<(), InitError> {
    for (at, item) in protected.iter().enumerate() {
        // What was put on the same path or above it later covers this one, and is checked itself.
        let mut later = protected.iter().skip(at + 1);
        if later.any(|later| Path::new(item.path).starts_with(later.path)) {
            continue;
        }
        let holds = open_protected(root, item.path)?.is_some_and(|seen| {
            mount_id(seen.as_fd()) == Ok(item.mount_id)
                && (!item.readonly || rustix::fs::fstatvfs(&seen).is_ok_and(|stat| is_readonly(&stat)))
        });
        if !holds {
            return Err(InitError::Message(format!(
                "{} is not protected after all mounts were made",
                item.path
            )));
        }
    }
    verify_proc(root)
}

fn is_readonly(stat: &rustix::fs::StatVfs) -> bool {
    stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY)
}

/// /proc must be the whole proc file system of this container's own pid namespace: all else was decided by
/// paths that begin with it.
fn verify_proc(root: BorrowedFd<'_>) -> Result<(), InitError> {
    let refuse = |why: &str| Err(InitError::Message(format!("/proc {why}")));
    let Some(proc) = open_without_links(root, "/proc")? else {
        return refuse("is missing");
    };
    if !tree::is_procfs(proc.as_fd()).context(|| "stat /proc".into())? {
        return refuse("is not of type proc");
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let mut status = String::new();
    rustix::fs::openat(&proc, "self/status", flags, Mode::empty())
        .map(std::fs::File::from)
        .map_err(std::io::Error::from)
        .and_then(|file| file.take(64 * 1024).read_to_string(&mut status))
        .context(|| "read /proc/self/status".into())?;
    // One number for each pid namespace, from that of the file system down to the reader's own.
    let namespaces = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))
        .map(|numbers| numbers.split_whitespace().count());
    if namespaces == Some(1) {
        Ok(())
    } else {
        refuse("belongs to another pid namespace")
    }
}
