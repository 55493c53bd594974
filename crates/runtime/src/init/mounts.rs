//! Builds the container's root: overlay, mounts, devices, masked paths, pivot. Targets are opened
//! inside the root with `openat2(RESOLVE_IN_ROOT)` and mounts attached to the opened descriptor, so a
//! symlink of the image never leads a mount out of the root.

use super::process::{Console, open_terminal};
use super::spec::{Device, InitSpec, Mount, MountKind, Propagation, Rootfs};
use super::{Context, InitError};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags,
};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A detached mount waiting for its place.
struct Prepared<'a> {
    mount: &'a Mount,
    tree: Option<OwnedFd>,
    source_is_dir: bool,
}

/// Returns the terminal if one is asked for; on return the process is in the new root.
pub fn build_root(spec: &InitSpec) -> Result<Option<Console>, InitError> {
    // Bind sources are cloned while they still are peers of the host's mounts: that is what lets a
    // bidirectional mount reach the host, and a slave hear from it.
    let mut prepared = Vec::with_capacity(spec.mounts.len());
    for mount in &spec.mounts {
        prepared.push(prepare(mount)?);
    }
    let mut cgroups = Vec::new();
    for (name, path) in &spec.cgroup_mounts {
        cgroups.push((name.clone(), clone_tree(path)?));
    }

    // From here on nothing done in this namespace reaches the host.
    rustix::mount::mount_change(
        "/",
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )
    .context(|| "make the mount namespace a slave".into())?;
    mount_overlay(&spec.rootfs)?;
    let root = rustix::fs::open(
        &spec.rootfs.mountpoint,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .context(|| "open the root".into())?;

    for item in prepared {
        place(root.as_fd(), item, &mut cgroups, spec.cgroup_readonly)?;
    }
    make_devices(root.as_fd(), &spec.devices)?;
    pivot(root.as_fd())?;

    let console = if spec.process.terminal {
        Some(open_terminal()?)
    } else {
        None
    };
    if let Some(console) = &console {
        let file = rustix::fs::open(
            "/dev/console",
            OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::NOCTTY,
            Mode::from_raw_mode(0o600),
        );
        if file.is_ok() {
            rustix::mount::mount_bind(console.slave_path.as_str(), "/dev/console")
                .context(|| "bind /dev/console".into())?;
        }
    }
    for path in &spec.readonly_paths {
        make_readonly(path)?;
    }
    for path in &spec.masked_paths {
        mask(path)?;
    }
    if spec.rootfs.readonly {
        let fd = open_path("/")?;
        set_attributes(fd.as_fd(), MOUNT_ATTR_RDONLY, 0, false)
            .context(|| "make the root read-only".into())?;
    }
    Ok(console)
}

fn prepare(mount: &Mount) -> Result<Prepared<'_>, InitError> {
    let MountKind::Bind {
        source,
        propagation,
        recursive_readonly,
    } = &mount.kind
    else {
        return Ok(Prepared {
            mount,
            tree: None,
            source_is_dir: true,
        });
    };
    let tree = clone_tree(source)?;
    let stat = rustix::fs::fstat(&tree).context(|| format!("stat {}", source.display()))?;
    let source_is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    let propagation = match propagation {
        Propagation::Private => libc::MS_PRIVATE,
        Propagation::HostToContainer => libc::MS_SLAVE,
        Propagation::Bidirectional => libc::MS_SHARED,
    };
    set_attributes(tree.as_fd(), 0, propagation, true)
        .context(|| format!("set the propagation of {}", source.display()))?;
    let attributes = attribute_bits(mount);
    if attributes != 0 {
        set_attributes(tree.as_fd(), attributes, 0, *recursive_readonly)
            .context(|| format!("set the flags of {}", source.display()))?;
    }
    Ok(Prepared {
        mount,
        tree: Some(tree),
        source_is_dir,
    })
}

fn clone_tree(source: &Path) -> Result<OwnedFd, InitError> {
    rustix::mount::open_tree(
        CWD,
        source,
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE,
    )
    .context(|| format!("mount source {}", source.display()))
}

/// mount(2) is used for the overlay because fsconfig takes values of 256 bytes only.
fn mount_overlay(rootfs: &Rootfs) -> Result<(), InitError> {
    std::env::set_current_dir(&rootfs.layers_dir).context(|| "enter the layers".into())?;
    let data = format!(
        "lowerdir={},upperdir={},workdir={}",
        rootfs.lower.join(":"),
        rootfs.upper.display(),
        rootfs.work.display()
    );
    if data.len() >= 4096 {
        return Err(InitError::Message(format!(
            "the image has too many layers ({})",
            rootfs.lower.len()
        )));
    }
    let data = CString::new(data).map_err(|_| InitError::Message("a path holds a zero byte".into()))?;
    rustix::mount::mount(
        "overlay",
        &rootfs.mountpoint,
        "overlay",
        MountFlags::empty(),
        data.as_c_str(),
    )
    .context(|| "mount the overlay".into())
}

fn place(
    root: BorrowedFd<'_>,
    item: Prepared<'_>,
    cgroups: &mut Vec<(String, OwnedFd)>,
    cgroup_readonly: bool,
) -> Result<(), InitError> {
    let target = open_target(root, &item.mount.target, item.source_is_dir)?;
    match (&item.mount.kind, item.tree) {
        (MountKind::Filesystem { fstype, options }, _) => {
            let tree = new_filesystem(fstype, options, attribute_bits(item.mount))
                .context(|| format!("mount {fstype} on {}", item.mount.target))?;
            attach(&tree, &target, &item.mount.target)
        }
        (MountKind::Bind { .. }, Some(tree)) => attach(&tree, &target, &item.mount.target),
        (MountKind::Bind { .. }, None) => Ok(()),
        (MountKind::Cgroup, _) => {
            let readonly = if cgroup_readonly { MOUNT_ATTR_RDONLY } else { 0 };
            let flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
            if let [(name, tree)] = cgroups.as_slice()
                && name.is_empty()
            {
                set_attributes(tree.as_fd(), flags | readonly, 0, true).context(|| "cgroup mount".into())?;
                attach(tree, &target, &item.mount.target)?;
                cgroups.clear();
                return Ok(());
            }
            let tmpfs =
                new_filesystem("tmpfs", &["mode=755".into()], flags).context(|| "mount tmpfs".into())?;
            attach(&tmpfs, &target, &item.mount.target)?;
            for (name, tree) in cgroups.drain(..) {
                set_attributes(tree.as_fd(), flags | readonly, 0, true).context(|| "cgroup mount".into())?;
                let path = format!("{}/{name}", item.mount.target);
                let target = open_target(root, &path, true)?;
                attach(&tree, &target, &path)?;
            }
            set_attributes(tmpfs.as_fd(), readonly, 0, false).context(|| "cgroup mount".into())
        }
    }
}

fn new_filesystem(fstype: &str, options: &[String], attributes: u64) -> rustix::io::Result<OwnedFd> {
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

fn attach(tree: &OwnedFd, target: &OwnedFd, name: &str) -> Result<(), InitError> {
    rustix::mount::move_mount(
        tree,
        "",
        target,
        "",
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH,
    )
    .context(|| format!("mount on {name}"))
}

const IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);

/// Opens a mount point in the root, making it and its parents when they are missing.
fn open_target(root: BorrowedFd<'_>, path: &str, directory: bool) -> Result<OwnedFd, InitError> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    match rustix::fs::openat2(root, path, flags, Mode::empty(), IN_ROOT) {
        Ok(fd) => return Ok(fd),
        Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error).context(|| format!("open mount point {path}")),
    }
    let path = Path::new(path);
    let parent = make_directories(root, path.parent().unwrap_or(Path::new("/")))?;
    let Some(name) = path.file_name() else {
        return Ok(parent);
    };
    if directory {
        match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error).context(|| format!("make mount point {}", path.display())),
        }
    } else {
        rustix::fs::openat(
            &parent,
            name,
            OFlags::CREATE | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o644),
        )
        .context(|| format!("make mount point {}", path.display()))?;
    }
    rustix::fs::openat2(
        &parent,
        name,
        flags | OFlags::NOFOLLOW,
        Mode::empty(),
        ResolveFlags::BENEATH,
    )
    .context(|| format!("open mount point {}", path.display()))
}

/// mkdir -p inside the root; symlinks on the way are followed within it.
pub(super) fn make_directories(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, InitError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut so_far = PathBuf::from("/");
    let open = |path: &Path| rustix::fs::openat2(root, path, flags, Mode::empty(), IN_ROOT);
    let mut current = open(&so_far).context(|| "open the root".into())?;
    for component in path.components() {
        let std::path::Component::Normal(name) = component else {
            continue;
        };
        so_far.push(name);
        current = match open(&so_far) {
            Ok(fd) => fd,
            Err(rustix::io::Errno::NOENT) => {
                rustix::fs::mkdirat(&current, name, Mode::from_raw_mode(0o755))
                    .context(|| format!("make directory {}", so_far.display()))?;
                open(&so_far).context(|| format!("open {}", so_far.display()))?
            }
            Err(error) => return Err(error).context(|| format!("open {}", so_far.display())),
        };
    }
    Ok(current)
}

fn make_devices(root: BorrowedFd<'_>, devices: &[Device]) -> Result<(), InitError> {
    // The umask would take bits off the nodes.
    let umask = rustix::process::umask(Mode::empty());
    for device in devices {
        let path = Path::new(&device.path);
        let parent = make_directories(root, path.parent().unwrap_or(Path::new("/")))?;
        let Some(name) = path.file_name() else { continue };
        let kind = if device.block {
            FileType::BlockDevice
        } else {
            FileType::CharacterDevice
        };
        let number = rustix::fs::makedev(device.major, device.minor);
        match rustix::fs::mknodat(&parent, name, kind, Mode::from_raw_mode(device.mode), number) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error).context(|| format!("make device {}", device.path)),
        }
        if device.uid != 0 || device.gid != 0 {
            rustix::fs::chownat(
                &parent,
                name,
                Some(rustix::fs::Uid::from_raw(device.uid)),
                Some(rustix::fs::Gid::from_raw(device.gid)),
                AtFlags::SYMLINK_NOFOLLOW,
            )
            .context(|| format!("own device {}", device.path))?;
        }
    }
    let dev = make_directories(root, Path::new("/dev"))?;
    for (target, link) in [
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
        ("pts/ptmx", "ptmx"),
    ] {
        match rustix::fs::symlinkat(target, &dev, link) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error).context(|| format!("link /dev/{link}")),
        }
    }
    rustix::process::umask(umask);
    Ok(())
}

fn pivot(root: BorrowedFd<'_>) -> Result<(), InitError> {
    rustix::process::fchdir(root).context(|| "enter the root".into())?;
    // The old root is put over the new one and taken off again: no directory for it is needed.
    rustix::process::pivot_root(".", ".").context(|| "pivot the root".into())?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).context(|| "leave the old root".into())?;
    std::env::set_current_dir("/").context(|| "enter the root".into())
}

fn open_path(path: &str) -> Result<OwnedFd, InitError> {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).context(|| format!("open {path}"))
}

/// A detached mount that nobody can change its files through.
pub(crate) fn make_tree_readonly(tree: &OwnedFd) -> std::io::Result<()> {
    set_attributes(tree.as_fd(), MOUNT_ATTR_RDONLY, 0, false)
}

fn make_readonly(path: &str) -> Result<(), InitError> {
    let Ok(tree) = rustix::mount::open_tree(
        CWD,
        path,
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE,
    ) else {
        // A path the kernel does not have needs no protection.
        return Ok(());
    };
    set_attributes(tree.as_fd(), MOUNT_ATTR_RDONLY, 0, false).context(|| format!("protect {path}"))?;
    attach(&tree, &open_path(path)?, path)
}

fn mask(path: &str) -> Result<(), InitError> {
    let Ok(target) = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else {
        return Ok(());
    };
    let stat = rustix::fs::fstat(&target).context(|| format!("stat {path}"))?;
    let tree = if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        new_filesystem("tmpfs", &["size=0k".into()], MOUNT_ATTR_RDONLY).context(|| format!("mask {path}"))?
    } else {
        null_device()?
    };
    attach(&tree, &target, path)
}

/// What files are masked with. A volume on /dev may hold anything under this name, a link to the very file
/// that is to be masked for one, so it must be the device itself.
fn null_device() -> Result<OwnedFd, InitError> {
    let tree = rustix::mount::open_tree(
        CWD,
        "/dev/null",
        OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_SYMLINK_NOFOLLOW,
    )
    .context(|| "open /dev/null".into())?;
    let stat = rustix::fs::fstat(&tree).context(|| "stat /dev/null".into())?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice
        || stat.st_rdev != rustix::fs::makedev(1, 3)
    {
        return Err(InitError::Message("/dev/null is not the null device".into()));
    }
    Ok(tree)
}

pub const MOUNT_ATTR_RDONLY: u64 = 1;
pub const MOUNT_ATTR_NOSUID: u64 = 2;
pub const MOUNT_ATTR_NODEV: u64 = 4;
pub const MOUNT_ATTR_NOEXEC: u64 = 8;

fn attribute_bits(mount: &Mount) -> u64 {
    let mut bits = 0;
    for (on, bit) in [
        (mount.readonly, MOUNT_ATTR_RDONLY),
        (mount.nosuid, MOUNT_ATTR_NOSUID),
        (mount.nodev, MOUNT_ATTR_NODEV),
        (mount.noexec, MOUNT_ATTR_NOEXEC),
    ] {
        if on {
            bits |= bit;
        }
    }
    bits
}

#[repr(C)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

fn set_attributes(
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
            &raw const attr,
            std::mem::size_of::<MountAttr>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}
