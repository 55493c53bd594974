//! `local` PersistentVolumes: a directory of the node, bound into the pod's directory. It must exist: an empty directory
//! in its place would look like lost data. A device is mounted first, and formatted if there is nothing on it (`disks/`).

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use rustix::mount::{MountFlags, mount_bind, mount_remount};

use super::claims::FOR_ONE_POD;
use super::disks::{Request, Source};
use super::ownership;
use super::usage::Measure;
use super::volume_type::{Ready, VolumeType, Wanted};
use super::{SetUpError, Volumes, blocking, fs_group, is_mount_point};

pub(super) struct Local;

/// What is wanted of the volume for one pod.
struct Mount {
    /// The directory of all pods.
    root: PathBuf,
    uid: String,
    /// The PersistentVolume's name.
    name: String,
    fs_group: Option<i64>,
    fs_group_change_policy: Option<String>,
}

impl Mount {
    fn directory_of(&self, uid: &str) -> PathBuf {
        let plugin = format!("kubernetes.io~{}", Local.name());
        self.root.join(uid).join("volumes").join(plugin).join(&self.name)
    }
}

#[async_trait]
impl VolumeType for Local {
    fn name(&self) -> &'static str {
        "local-volume"
    }

    fn measure(&self) -> Option<Measure> {
        Some(Measure::FileSystem)
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        let spec = wanted.claimed.and_then(|claimed| claimed.spec());
        spec.is_some_and(|spec| spec.local.is_some())
    }

    fn supports_mount_options(&self) -> bool {
        true
    }

    fn supports_block(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let Some(claimed) = wanted.claimed else {
            return Err(wanted.set_up_error("no PersistentVolume"));
        };
        let name = claimed.name.clone();
        let local = claimed.spec().and_then(|spec| spec.local.clone());
        let path = local.map(|local| local.path).unwrap_or_default();
        let (group, policy) = fs_group(wanted.pod);
        let mount = Mount {
            root: host.root.clone(),
            uid: wanted.uid().to_owned(),
            name,
            fs_group: group,
            fs_group_change_policy: policy,
        };
        let (options, read_only) = (claimed.options.clone(), claimed.read_only);
        let for_one_pod = claimed.for_one_pod;
        let checked = path.clone();
        if claimed.block {
            let device = blocking(move || check_device(&checked)).await;
            let device =
                device.map_err(|message| SetUpError::step("MapVolume.SetUpDevice", &mount.name, message))?;
            return set_up_device(host, wanted, device).await;
        }
        match blocking(move || check_device(&checked)).await {
            Ok(device) => mount_device(host, wanted, device, mount).await,
            Err(_) => {
                blocking(move || mount_directory(&path, &mount, &options, read_only, for_one_pod)).await
            }
        }
    }
}

/// Gives the pod the device, or what is on it.
async fn set_up_device(host: &Volumes, wanted: &Wanted<'_>, device: PathBuf) -> Result<Ready, SetUpError> {
    let request = request_for(host, wanted, device)?;
    host.disks.set_up(request).await
}

fn request_for(host: &Volumes, wanted: &Wanted<'_>, device: PathBuf) -> Result<Request, SetUpError> {
    let local = wanted.claimed.and_then(|claimed| claimed.spec()?.local.clone());
    let fs_type = local.and_then(|local| local.fs_type);
    let volume = wanted.name().to_owned();
    Request::new(host, wanted, Source::Local { volume, device }, fs_type, false)
}

async fn mount_device(
    host: &Volumes,
    wanted: &Wanted<'_>,
    device: PathBuf,
    mount: Mount,
) -> Result<Ready, SetUpError> {
    let mut request = request_for(host, wanted, device)?;
    let shared = blocking(move || {
        let elsewhere = mounted_elsewhere(&mount)?;
        let warning = match &elsewhere {
            Some(other) => other_group(other, &mount)?,
            None => None,
        };
        io::Result::Ok((elsewhere.is_some(), warning))
    });
    let (is_shared, warning) = shared.await.map_err(|error| wanted.set_up_error(error))?;
    if is_shared {
        // It has been given to a group already.
        request.group = None;
    }
    let ready = host.disks.set_up(request).await?;
    Ok(Ready { warning, ..ready })
}

/// The device itself, if the path leads to one.
fn check_device(path: &str) -> Result<PathBuf, String> {
    check_path(path)?;
    let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!("path {path:?} does not exist"),
        _ => error.to_string(),
    })?;
    if !metadata.file_type().is_block_device() {
        return Err(format!("{path} is not a block device"));
    }
    Path::new(path).canonicalize().map_err(|error| error.to_string())
}

fn check_path(path: &str) -> Result<(), String> {
    let mut parts = Path::new(path).components();
    match parts.any(|part| part == std::path::Component::ParentDir) {
        true => Err(format!("invalid path: {path} must not contain '..'")),
        false => Ok(()),
    }
}

fn mount_directory(
    source: &str,
    mount: &Mount,
    options: &[String],
    read_only: bool,
    for_one_pod: bool,
) -> Result<Ready, SetUpError> {
    let step = |step, message: String| SetUpError::step(step, &mount.name, message);
    let source =
        check_source(source).map_err(|message| step("MountVolume.NewMounter initialization", message))?;
    let flags = flags_of(options, read_only)
        .map_err(|message| step("MountVolume.MountOptionSupport check", message))?;
    let set_up = |message: String| step("MountVolume.SetUp", message);
    // What other pods have is read from the disk: this process may not have mounted it.
    let elsewhere = mounted_elsewhere(mount).map_err(|error| set_up(error.to_string()))?;
    let elsewhere = elsewhere.is_some();
    if elsewhere && for_one_pod {
        return Err(set_up(FOR_ONE_POD.to_owned()));
    }
    let target = mount.directory_of(&mount.uid);
    let warning = bind(&source, &target, mount, flags, elsewhere).map_err(|e| set_up(e.to_string()))?;
    Ok(Ready {
        warning,
        ..Ready::at(target)
    })
}

fn check_source(path: &str) -> Result<PathBuf, String> {
    check_path(path)?;
    let source = Path::new(path);
    match std::fs::metadata(source) {
        Ok(metadata) if metadata.is_dir() => Ok(source.to_path_buf()),
        Ok(_) => Err("only directory and block device are supported".to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(format!("path {path:?} does not exist")),
        Err(error) => Err(error.to_string()),
    }
}

/// What a bind mount can be given; filesystem options are not among it, and are refused.
fn flags_of(options: &[String], read_only: bool) -> Result<MountFlags, String> {
    let mut flags = MountFlags::empty();
    for option in options {
        let (set, flag) = match option.as_str() {
            "ro" => (true, MountFlags::RDONLY),
            "rw" => (false, MountFlags::RDONLY),
            "nosuid" => (true, MountFlags::NOSUID),
            "suid" => (false, MountFlags::NOSUID),
            "nodev" => (true, MountFlags::NODEV),
            "dev" => (false, MountFlags::NODEV),
            "noexec" => (true, MountFlags::NOEXEC),
            "exec" => (false, MountFlags::NOEXEC),
            "noatime" => (true, MountFlags::NOATIME),
            "atime" => (false, MountFlags::NOATIME),
            "nodiratime" => (true, MountFlags::NODIRATIME),
            "diratime" => (false, MountFlags::NODIRATIME),
            "relatime" => (true, MountFlags::RELATIME),
            "defaults" | "bind" => continue,
            other => {
                return Err(format!(
                    "mount option {other:?} is not supported for local volumes"
                ));
            }
        };
        flags.set(flag, set);
    }
    flags.set(
        MountFlags::RDONLY,
        flags.contains(MountFlags::RDONLY) || read_only,
    );
    Ok(flags)
}

/// Where another pod of this node has the volume.
fn mounted_elsewhere(mount: &Mount) -> io::Result<Option<PathBuf>> {
    for entry in std::fs::read_dir(&mount.root)? {
        let uid = entry?.file_name();
        let Some(uid) = uid.to_str().filter(|uid| *uid != mount.uid) else {
            continue;
        };
        let directory = mount.directory_of(uid);
        if is_mount_point(&directory)? {
            return Ok(Some(directory));
        }
    }
    Ok(None)
}

/// A warning for the user if the volume, which another pod has, is of another group than the pod wants.
fn other_group(directory: &Path, mount: &Mount) -> io::Result<Option<String>> {
    let Some(group) = mount.fs_group else {
        return Ok(None);
    };
    let present = i64::from(std::fs::metadata(directory)?.gid());
    Ok((present != group).then(|| {
        format!(
            "The requested fsGroup is {group}, but the volume {} has GID {present}. The volume may not be shareable.",
            mount.name
        )
    }))
}

/// Binds the directory, once. Returns a warning for the user if a pod that shares the volume has another group.
fn bind(
    source: &Path,
    target: &Path,
    mount: &Mount,
    flags: MountFlags,
    elsewhere: bool,
) -> io::Result<Option<String>> {
    if is_mount_point(target)? {
        return Ok(None);
    }
    std::fs::create_dir_all(target)?;
    mount_bind(source, target)?;
    let finished = finish(target, mount, flags, elsewhere);
    if finished.is_err() {
        // The next attempt begins anew.
        let _ = rustix::mount::unmount(target, rustix::mount::UnmountFlags::DETACH);
    }
    finished
}

fn finish(target: &Path, mount: &Mount, flags: MountFlags, elsewhere: bool) -> io::Result<Option<String>> {
    let read_only = flags.contains(MountFlags::RDONLY);
    let mut warning = None;
    if mount.fs_group.is_some() && elsewhere {
        warning = other_group(target, mount)?;
    } else if !read_only {
        ownership::apply(
            target,
            mount.fs_group,
            mount.fs_group_change_policy.as_deref(),
            false,
        )?;
    }
    if !flags.is_empty() {
        mount_remount(target, MountFlags::BIND | flags, c"")?;
    }
    Ok(warning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options() {
        let check = |options: &[&str], read_only: bool, expected: Result<MountFlags, &str>| {
            let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
            assert_eq!(flags_of(&options, read_only), expected.map_err(str::to_owned));
        };
        check(&[], false, Ok(MountFlags::empty()));
        check(&[], true, Ok(MountFlags::RDONLY));
        check(&["rw"], true, Ok(MountFlags::RDONLY));
        check(&["ro", "rw"], false, Ok(MountFlags::empty()));
        check(
            &["nosuid", "noatime"],
            false,
            Ok(MountFlags::NOSUID | MountFlags::NOATIME),
        );
        check(
            &["discard"],
            false,
            Err("mount option \"discard\" is not supported for local volumes"),
        );
    }

    #[test]
    fn sources() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, "x").unwrap();
        let check = |path: &Path, expected: Result<(), String>| {
            assert_eq!(check_source(&path.to_string_lossy()).map(|_| ()), expected);
        };
        check(dir.path(), Ok(()));
        check(
            &file,
            Err("only directory and block device are supported".to_owned()),
        );
        let missing = dir.path().join("none");
        check(&missing, Err(format!("path {missing:?} does not exist")));
        check(
            Path::new("/a/../b"),
            Err("invalid path: /a/../b must not contain '..'".to_owned()),
        );
    }
}
