//! Builds the container's root: overlay, mounts, devices, masked paths, pivot. The order keeps the image
//! and the volumes from having a say in it: first the runtime's own mounts and devices, on the bare image
//! and following none of its links; then the volumes, which stay inside the root; then masked and
//! read-only paths; and last a look whether all of that is what the container will see.

use super::image_volume::image_tree;
use super::masks::{self, NullDevice};
use super::process::{Console, open_terminal_in};
use super::spec::{Device, InitSpec, Mount, MountKind, Propagation, Rootfs, UserNamespace};
use super::targets::{make_directories_without_links, own_directory, own_file, volume_target};
use super::tree::{
    MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY, attach, clone_directory,
    clone_opened, clone_tree, clone_volume, map_ids, new_filesystem, set_attributes,
};
use super::{Context, InitError, user_namespace};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// A mount waiting for its place.
struct Prepared<'a> {
    mount: &'a Mount,
    /// Of a bind mount: the detached copy of its source, and whether that is a directory.
    bind: Option<(OwnedFd, bool)>,
}

/// Mounts of the runtime that are used by descriptor afterwards.
#[derive(Default)]
struct OwnMounts {
    dev: Option<OwnedFd>,
    pts: Option<OwnedFd>,
}

/// Returns the terminal if one is asked for; on return the process is in the new root. `user` is the user namespace that
/// the container will be in; this process is in the host's.
pub fn build_root(
    spec: &InitSpec,
    user: Option<(&UserNamespace, BorrowedFd<'_>)>,
) -> Result<Option<Console>, InitError> {
    let user_namespace = user.map(|(_, namespace)| namespace);
    // Bind sources are cloned while they still are peers of the host's mounts: that is what lets a
    // bidirectional mount reach the host, and a slave hear from it.
    let mut prepared = Vec::with_capacity(spec.mounts.len());
    for mount in &spec.mounts {
        prepared.push(prepare(mount, user_namespace)?);
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
    if let Some(namespace) = user_namespace {
        map_layers(&spec.rootfs, namespace)?;
    }
    mount_overlay(&spec.rootfs)?;
    if let Some((user, _)) = user {
        user_namespace::make_files_as(user)?;
    }
    let root = rustix::fs::open(
        &spec.rootfs.mountpoint,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .context(|| "open the root".into())?;
    let root = root.as_fd();

    let (volumes, own): (Vec<_>, Vec<_>) = prepared.into_iter().partition(|item| item.mount.volume);
    let mut made = OwnMounts::default();
    for item in own {
        place_own(root, item, &mut cgroups, spec.cgroup_readonly, &mut made)?;
    }
    let dev = made
        .dev
        .ok_or_else(|| InitError::Message("the container has no /dev".into()))?;
    make_devices(root, dev.as_fd(), &spec.devices, user.is_some())?;
    let null = NullDevice::open(dev.as_fd())?;
    null.replace_standard_input(dev.as_fd())?;
    let console = match (&made.pts, spec.process.terminal) {
        (Some(pts), true) => Some(make_console(dev.as_fd(), pts)?),
        (None, true) => return Err(InitError::Message("the container has no /dev/pts".into())),
        (_, false) => None,
    };

    for item in volumes {
        let (tree, directory) = match (item.bind, &item.mount.kind) {
            (Some(bind), _) => bind,
            (None, MountKind::Image(image)) => {
                let (tree, directory) = image_tree(image)?;
                set_attributes(tree.as_fd(), attribute_bits(item.mount), libc::MS_PRIVATE, false)
                    .context(|| format!("set the flags of {}", item.mount.target))?;
                (tree, directory)
            }
            (None, _) => continue,
        };
        let target = volume_target(root, &item.mount.target, tree.as_fd(), directory)?;
        attach(&tree, &target, &item.mount.target)?;
    }
    pivot(root)?;

    let protected = masks::protect(root, &spec.readonly_paths, &spec.masked_paths, &null)?;
    // A privileged container has nothing that could be uncovered.
    if !protected.is_empty() {
        masks::verify(root, &protected)?;
    }
    if spec.rootfs.readonly {
        set_attributes(root, MOUNT_ATTR_RDONLY, 0, false).context(|| "make the root read-only".into())?;
    }
    Ok(console)
}

fn prepare<'a>(mount: &'a Mount, user_namespace: Option<BorrowedFd<'_>>) -> Result<Prepared<'a>, InitError> {
    let MountKind::Bind {
        source,
        propagation,
        recursive_readonly,
        idmapped,
    } = &mount.kind
    else {
        return Ok(Prepared { mount, bind: None });
    };
    let tree = if mount.volume {
        clone_volume(source)?
    } else {
        clone_tree(source)?
    };
    let stat = rustix::fs::fstat(&tree).context(|| format!("stat {}", source.display()))?;
    let directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
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
    if let Some(namespace) = user_namespace.filter(|_| *idmapped) {
        map_ids(tree.as_fd(), namespace).map_err(|error| cannot_map(source, &error))?;
    }
    Ok(Prepared {
        mount,
        bind: Some((tree, directory)),
    })
}

/// COMPAT: runc's words, which users search for.
fn cannot_map(source: &Path, error: &std::io::Error) -> InitError {
    let hint = match error.raw_os_error() {
        Some(libc::EINVAL) => " (maybe the filesystem used doesn't support idmap mounts on this kernel?)",
        _ => "",
    };
    InitError::Message(format!(
        "failed to set MOUNT_ATTR_IDMAP on {}: {error}{hint}",
        source.display()
    ))
}

/// Covers the folder of all layers with a copy of it, in this mount namespace only, whose files belong to the container's
/// ids. The layers on disk are shared with containers of other ids.
fn map_layers(rootfs: &Rootfs, user_namespace: BorrowedFd<'_>) -> Result<(), InitError> {
    let layers = &rootfs.layers_dir;
    let what = || format!("map the ids of {}", layers.display());
    let tree = clone_directory(layers).context(what)?;
    map_ids(tree.as_fd(), user_namespace).map_err(|error| cannot_map(layers, &error))?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let target = rustix::fs::open(layers, flags, Mode::empty()).context(what)?;
    attach(&tree, &target, &layers.to_string_lossy())
}

/// mount(2) is used for the overlay because fsconfig takes values of 256 bytes only. Its options fit a page,
/// which names of many layers do not, so they are given as numbers of descriptors.
fn mount_overlay(rootfs: &Rootfs) -> Result<(), InitError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut layers = Vec::with_capacity(rootfs.lower.len());
    for name in &rootfs.lower {
        let path = rootfs.layers_dir.join(name);
        layers.push(
            rustix::fs::open(&path, flags, Mode::empty())
                .context(|| format!("open layer {}", path.display()))?,
        );
    }
    let numbers: Vec<String> = layers.iter().map(|layer| layer.as_raw_fd().to_string()).collect();
    std::env::set_current_dir("/proc/self/fd").context(|| "enter /proc/self/fd".into())?;
    let data = format!(
        "lowerdir={},upperdir={},workdir={}",
        numbers.join(":"),
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

fn place_own(
    root: BorrowedFd<'_>,
    item: Prepared<'_>,
    cgroups: &mut Vec<(String, OwnedFd)>,
    cgroup_readonly: bool,
    made: &mut OwnMounts,
) -> Result<(), InitError> {
    let path = item.mount.target.as_str();
    match (&item.mount.kind, item.bind) {
        (MountKind::Filesystem { fstype, options }, _) => {
            let target = own_directory(root, path)?;
            let tree = new_filesystem(fstype, options, attribute_bits(item.mount))
                .context(|| format!("mount {fstype} on {path}"))?;
            attach(&tree, &target, path)?;
            match path {
                "/dev" => made.dev = Some(tree),
                "/dev/pts" => made.pts = Some(tree),
                _ => {}
            }
            Ok(())
        }
        (MountKind::Bind { .. }, Some((tree, true))) => attach(&tree, &own_directory(root, path)?, path),
        (MountKind::Bind { .. }, Some((tree, false))) => attach(&tree, &own_file(root, path)?, path),
        (MountKind::Bind { .. } | MountKind::Image(_), _) => Ok(()),
        (MountKind::Cgroup, _) => place_cgroups(root, path, cgroups, cgroup_readonly),
    }
}

fn place_cgroups(
    root: BorrowedFd<'_>,
    path: &str,
    cgroups: &mut Vec<(String, OwnedFd)>,
    readonly: bool,
) -> Result<(), InitError> {
    let target = own_directory(root, path)?;
    let readonly = if readonly { MOUNT_ATTR_RDONLY } else { 0 };
    let flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
    if let [(name, tree)] = cgroups.as_slice()
        && name.is_empty()
    {
        set_attributes(tree.as_fd(), flags | readonly, libc::MS_PRIVATE, true)
            .context(|| "cgroup mount".into())?;
        attach(tree, &target, path)?;
        cgroups.clear();
        return Ok(());
    }
    let tmpfs = new_filesystem("tmpfs", &["mode=755".into()], flags).context(|| "mount tmpfs".into())?;
    attach(&tmpfs, &target, path)?;
    for (name, tree) in cgroups.drain(..) {
        // A copy of a shared mount of the host would pass on what a container mounts in it.
        set_attributes(tree.as_fd(), flags | readonly, libc::MS_PRIVATE, true)
            .context(|| "cgroup mount".into())?;
        let path = format!("{path}/{name}");
        attach(&tree, &own_directory(root, &path)?, &path)?;
    }
    set_attributes(tmpfs.as_fd(), readonly, 0, false).context(|| "cgroup mount".into())
}

/// In the runtime's own /dev, and before any volume: a volume on /dev is somebody's directory.
///
/// In a user namespace the nodes are the host's users', as they are on the host: its root must not become their owner.
fn make_devices(
    root: BorrowedFd<'_>,
    dev: BorrowedFd<'_>,
    devices: &[Device],
    own: bool,
) -> Result<(), InitError> {
    // The umask would take bits off the nodes.
    let umask = rustix::process::umask(Mode::empty());
    for device in devices {
        let path = Path::new(&device.path);
        let parent = make_directories_without_links(root, path.parent().unwrap_or(Path::new("/")))?;
        let Some(name) = path.file_name() else { continue };
        let kind = if device.block {
            FileType::BlockDevice
        } else {
            FileType::CharacterDevice
        };
        let number = rustix::fs::makedev(device.major, device.minor);
        match rustix::fs::mknodat(&parent, name, kind, Mode::from_raw_mode(device.mode), number) {
            Ok(()) => {}
            Err(rustix::io::Errno::EXIST) => {
                let stat = rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)
                    .context(|| format!("stat {}", device.path))?;
                if FileType::from_raw_mode(stat.st_mode) != kind || stat.st_rdev != number {
                    return Err(InitError::Message(format!(
                        "{} of the image is in the way of a device",
                        device.path
                    )));
                }
            }
            Err(error) => return Err(error).context(|| format!("make device {}", device.path)),
        }
        if own || device.uid != 0 || device.gid != 0 {
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
    for (target, link) in [
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
        ("pts/ptmx", "ptmx"),
    ] {
        match rustix::fs::symlinkat(target, dev, link) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error).context(|| format!("link /dev/{link}")),
        }
    }
    rustix::process::umask(umask);
    Ok(())
}

/// A terminal of the container's own devpts, which is also its /dev/console.
fn make_console(dev: BorrowedFd<'_>, pts: &OwnedFd) -> Result<Console, InitError> {
    let console = open_terminal_in(pts.as_fd())?;
    let what = || "bind /dev/console".into();
    let make = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
    rustix::fs::openat(dev, "console", make, Mode::from_raw_mode(0o600)).context(what)?;
    let open = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let target = rustix::fs::openat(dev, "console", open, Mode::empty()).context(what)?;
    let slave = rustix::fs::openat(pts, console.name.as_c_str(), open, Mode::empty()).context(what)?;
    let tree = clone_opened(slave.as_fd(), false).context(what)?;
    attach(&tree, &target, "/dev/console")?;
    Ok(console)
}

fn pivot(root: BorrowedFd<'_>) -> Result<(), InitError> {
    rustix::process::fchdir(root).context(|| "enter the root".into())?;
    // The old root is put over the new one and taken off again: no directory for it is needed.
    rustix::process::pivot_root(".", ".").context(|| "pivot the root".into())?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).context(|| "leave the old root".into())?;
    std::env::set_current_dir("/").context(|| "enter the root".into())
}

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
