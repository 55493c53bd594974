//! Device nodes of containers: the harmless ones, the host's, those a pod asks for, and what CDI specs add.

use super::spec::{clean_path, filesystem, volume};
use crate::cgroup::DeviceRule;
use crate::init::spec::{Device, Mount, UserSpec};
use skiff_cri::v1 as cri;
use std::path::Path;

fn character(path: &str, major: u32, minor: u32) -> Device {
    Device {
        path: path.into(),
        block: false,
        major,
        minor,
        mode: 0o666,
        uid: 0,
        gid: 0,
    }
}

pub fn default_devices() -> Vec<Device> {
    vec![
        character("/dev/null", 1, 3),
        character("/dev/zero", 1, 5),
        character("/dev/full", 1, 7),
        character("/dev/random", 1, 8),
        character("/dev/urandom", 1, 9),
        character("/dev/tty", 5, 0),
    ]
}

/// Every device node of the host, for privileged containers.
pub fn host_devices() -> Vec<Device> {
    let mut devices = Vec::new();
    collect_devices(Path::new("/dev"), Path::new("/dev"), &mut devices);
    devices
}

fn collect_devices(host: &Path, container: &Path, devices: &mut Vec<Device>) {
    for entry in std::fs::read_dir(host).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let path = container.join(&name);
        match entry.file_type() {
            // These are mounts of the container's own.
            Ok(kind) if kind.is_dir() => {
                if !["pts", "shm", "fd", "mqueue"].iter().any(|own| name == *own) {
                    collect_devices(&entry.path(), &path, devices);
                }
            }
            Ok(_) if name == "console" || name == "ptmx" => {}
            Ok(_) => devices.extend(device_at(&entry.path(), &path)),
            Err(_) => {}
        }
    }
}

fn device_at(host: &Path, container: &Path) -> Option<Device> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let metadata = std::fs::symlink_metadata(host).ok()?;
    let block = metadata.file_type().is_block_device();
    if !block && !metadata.file_type().is_char_device() {
        return None;
    }
    Some(Device {
        path: container.to_string_lossy().into_owned(),
        block,
        major: rustix::fs::major(metadata.rdev()),
        minor: rustix::fs::minor(metadata.rdev()),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
    })
}

/// A device node that a CDI spec describes, or names on the host.
pub fn add_cdi_node(
    node: &super::cdi::DeviceNode,
    user: &UserSpec,
    devices: &mut Vec<Device>,
    rules: &mut Vec<DeviceRule>,
) -> Result<(), String> {
    let host = if node.host_path.is_empty() {
        &node.path
    } else {
        &node.host_path
    };
    let problem = |what: String| format!("CDI device injection failed: {what}");
    let (block, major, minor) = match node.kind.as_str() {
        kind @ ("b" | "c" | "u") if node.major != 0 => (kind == "b", node.major, node.minor),
        "" | "b" | "c" | "u" => {
            let found = Path::new(host)
                .canonicalize()
                .map_err(|error| problem(format!("failed to stat CDI host device {host:?}: {error}")))?;
            let found = device_at(&found, Path::new(&node.path))
                .ok_or_else(|| problem(format!("{host:?} is not a device node")))?;
            if node.kind == "b" && !found.block || matches!(node.kind.as_str(), "c" | "u") && found.block {
                return Err(problem(format!(
                    "CDI device ({:?}, {host:?}), host type mismatch",
                    node.path
                )));
            }
            (found.block, found.major, found.minor)
        }
        other => {
            return Err(problem(format!(
                "device {:?}: type {other:?} is not supported by this runtime",
                node.path
            )));
        }
    };
    // COMPAT: without an owner of its own it belongs to who runs in the container.
    let device = Device {
        path: node.path.clone(),
        block,
        major,
        minor,
        mode: node.file_mode.map_or(0o666, |mode| mode & 0o7777),
        uid: node.uid.unwrap_or_else(|| user.user.parse().unwrap_or(0)),
        gid: node.gid.unwrap_or_else(|| user.group.parse().unwrap_or(0)),
    };
    let access = if node.permissions.is_empty() {
        "rwm"
    } else {
        &node.permissions
    };
    rules.push(DeviceRule::node(block, major, minor, access));
    devices.retain(|existing| existing.path != device.path);
    devices.push(device);
    Ok(())
}

/// A mount of a CDI device. An option that is not known is refused: it might be one that protects something.
pub fn cdi_mount(mount: &super::cdi::Mount) -> Result<Mount, String> {
    let refuse = |what: &str| {
        let path = &mount.container_path;
        Err(format!(
            "CDI device injection failed: {what} of mount {path:?} is not supported by this runtime"
        ))
    };
    if mount.kind == "tmpfs" {
        let (flags, options): (Vec<&str>, Vec<&str>) = { mount.options.iter().map(String::as_str) }
            .partition(|option| matches!(*option, "ro" | "rw" | "nosuid" | "nodev" | "noexec"));
        let has = |flag: &str| flags.contains(&flag);
        let mut made = filesystem(
            &clean_path(&mount.container_path),
            "tmpfs",
            &options,
            has("ro"),
            has("noexec"),
            has("nodev"),
        );
        (made.volume, made.nosuid) = (true, has("nosuid"));
        return Ok(made);
    }
    if !matches!(mount.kind.as_str(), "" | "none" | "bind") {
        return refuse(&format!("type {:?}", mount.kind));
    }
    let mut wanted = cri::Mount {
        container_path: mount.container_path.clone(),
        host_path: mount.host_path.clone(),
        ..Default::default()
    };
    let (mut nosuid, mut nodev, mut noexec) = (false, false, false);
    for option in &mount.options {
        match option.as_str() {
            "bind" | "rbind" | "rw" | "private" | "rprivate" | "suid" | "dev" | "exec" => {}
            "ro" => wanted.readonly = true,
            "rro" => (wanted.readonly, wanted.recursive_read_only) = (true, true),
            "slave" | "rslave" => {
                wanted.propagation = cri::MountPropagation::PropagationHostToContainer as i32;
            }
            "shared" | "rshared" => {
                wanted.propagation = cri::MountPropagation::PropagationBidirectional as i32;
            }
            "nosuid" => nosuid = true,
            "nodev" => nodev = true,
            "noexec" => noexec = true,
            other => return refuse(&format!("option {other:?}")),
        }
    }
    // A device's files are there, or something is wrong with it: nothing is made in their place.
    if !Path::new(&mount.host_path).exists() {
        return Err(format!(
            "CDI device injection failed: mount source {:?} does not exist",
            mount.host_path
        ));
    }
    let mut made = volume(&wanted, None)?;
    (made.nosuid, made.nodev, made.noexec) = (nosuid, nodev, noexec);
    Ok(made)
}

pub fn add_device(
    device: &cri::Device,
    devices: &mut Vec<Device>,
    rules: &mut Vec<DeviceRule>,
) -> Result<(), String> {
    let host = Path::new(&device.host_path)
        .canonicalize()
        .map_err(|error| format!("failed to resolve device {:?}: {error}", device.host_path))?;
    let container = Path::new(&device.container_path);
    let mut found = Vec::new();
    if host.is_dir() {
        collect_devices(&host, container, &mut found);
    } else {
        found.extend(device_at(&host, container));
    }
    if found.is_empty() {
        return Err(format!("{:?} is not a device", device.host_path));
    }
    let access = if device.permissions.is_empty() {
        "rwm"
    } else {
        &device.permissions
    };
    for device in found {
        rules.push(DeviceRule::node(device.block, device.major, device.minor, access));
        devices.retain(|existing| existing.path != device.path);
        devices.push(device);
    }
    Ok(())
}
