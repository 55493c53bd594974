//! Mounts as descriptors: detached trees, their flags, and attaching them to a directory that is open
//! already. No function here resolves a path of a container.

use super::{Context, InitError};
use rustix::fs::{AtFlags, CWD, FsWord, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

pub(super) const MOUNT_ATTR_RDONLY: u64 = 1;
pub(super) const MOUNT_ATTR_NOSUID: u64 = 2;
pub(super) const MOUNT_ATTR_NODEV: u64 = 4;
pub(super) const MOUNT_ATTR_NOEXEC: u64 = 8;

const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;

pub(super) const PROC_SUPER_MAGIC: FsWord = 0x9fa0;
pub(super) const DEVPTS_SUPER_MAGIC: FsWord = 0x1cd1;

const CLONE: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC);

/// A copy of the mounts at a path of the host, which may lead through links.
pub(super) fn clone_tree(source: &Path) -> Result<OwnedFd, InitError> {
    rustix::mount::open_tree(CWD, source, CLONE | OpenTreeFlags::AT_RECURSIVE)
        .context(|| format!("mount source {}", source.display()))
}

/// The same for a volume. Its path was resolved when the container was created; a link that has appeared
/// in it since is another container's doing.
pub(super) fn clone_volume(source: &Path) -> Result<OwnedFd, InitError> {
    let what = || format!("mount source {}", source.display());
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let fd =
        rustix::fs::openat2(CWD, source, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).context(what)?;
    clone_opened(fd.as_fd(), true).context(what)
}

/// A copy of the mount that a directory of the host is in, from that directory on, without the mounts below.
pub(crate) fn clone_directory(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::mount::open_tree(CWD, path, CLONE)
}

/// A copy of the mount that `fd` is open on, from that directory or file on.
pub(super) fn clone_opened(fd: BorrowedFd<'_>, recursive: bool) -> rustix::io::Result<OwnedFd> {
    let mut flags = CLONE | OpenTreeFlags::AT_EMPTY_PATH;
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    rustix::mount::open_tree(fd, "", flags)
}

pub(super) fn new_filesystem(
    fstype: &str,
    options: &[String],
    attributes: u64,
) -> rustix::io::Result<OwnedFd> {
    let context = rustix::mount::fsopen(fstype, FsOpenFlags::FSOPEN_CLOEXEC)?;
    // Programs read /proc/mounts and look for `proc /proc proc`.
    rustix::mount::fsconfig_set_string(&context, "source", fstype)?;
    for option in options {
        match option.split_once('=') {
            Some((key, value)) => rustix::mount::fsconfig_set_string(&context, key, value)?,
            None => rustix::mount::fsconfig_set_flag(&context, option.as_str())?,
        }
    }
    rustix::mount::fsconfig_create(&context)?;
    rustix::mount::fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::from_bits_retain(attributes as u32),
    )
}

/// Puts a detached tree on an opened directory or file; `name` is for the error.
pub(super) fn attach(tree: &OwnedFd, target: &OwnedFd, name: &str) -> Result<(), InitError> {
    rustix::mount::move_mount(
        tree,
        "",
        target,
        "",
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH,
    )
    .context(|| format!("mount on {name}"))
}

/// The kernel's number of the mount that `fd` is on: it tells two mounts of one file system apart.
pub(crate) fn mount_id(fd: BorrowedFd<'_>) -> rustix::io::Result<u64> {
    rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).map(|stat| stat.stx_mnt_id)
}

pub(super) fn is_procfs(fd: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    Ok(rustix::fs::fstatfs(fd)?.f_type == PROC_SUPER_MAGIC)
}

/// A detached mount that nobody can change its files through.
pub(crate) fn make_tree_readonly(tree: &OwnedFd) -> std::io::Result<()> {
    set_attributes(tree.as_fd(), MOUNT_ATTR_RDONLY, 0, false)
}

#[repr(C)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

pub(super) fn set_attributes(
    tree: BorrowedFd<'_>,
    set: u64,
    propagation: libc::c_ulong,
    recursive: bool,
) -> std::io::Result<()> {
    let attr = MountAttr {
        attr_set: set,
        attr_clr: 0,
        propagation,
        userns_fd: 0,
    };
    mount_setattr(tree, &attr, recursive)
}

/// Maps the ids of a detached mount's files as the user namespace maps its own. Mounts below it stay as they are.
pub(crate) fn map_ids(tree: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>) -> std::io::Result<()> {
    let attr = MountAttr {
        attr_set: MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: user_namespace.as_raw_fd() as u64,
    };
    mount_setattr(tree, &attr, false)
}

fn mount_setattr(tree: BorrowedFd<'_>, attr: &MountAttr, recursive: bool) -> std::io::Result<()> {
    let mut flags = libc::AT_EMPTY_PATH;
    if recursive {
        flags |= libc::AT_RECURSIVE;
    }
    // SAFETY: the descriptor is open, the path an empty C string, and the structure of the size given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            flags,
            std::ptr::from_ref(attr),
            std::mem::size_of::<MountAttr>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}
