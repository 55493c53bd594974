//! How much of a disk a volume takes: by walking its files, or by asking its file system. Reads only, never follows a link
//! and never crosses a mount. Blocking.

use std::collections::HashSet;
use std::ops::AddAssign;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Pod, Volume};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2, statat};

use super::volume_type::{self, Wanted};
use super::{Volumes, claims};
use crate::field_ref::NodeFacts;
use crate::pods;

/// What files take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    pub bytes: u64,
    pub inodes: u64,
}

impl AddAssign for DiskUsage {
    fn add_assign(&mut self, other: Self) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.inodes = self.inodes.saturating_add(other.inodes);
    }
}

/// What a file system has, and how much of it is used by what is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FsUsage {
    /// Unix nanoseconds.
    pub time: i64,
    pub available: Option<u64>,
    pub capacity: Option<u64>,
    pub used: Option<u64>,
    pub inodes_free: Option<u64>,
    pub inodes: Option<u64>,
    pub inodes_used: Option<u64>,
}

impl FsUsage {
    /// The file system that the path is on, all of which counts as used. `None` where it does not answer.
    pub fn of(path: &Path) -> Option<Self> {
        let stat = rustix::fs::statvfs(path).ok()?;
        let bytes = |blocks: u64| Some(blocks.saturating_mul(stat.f_frsize));
        Some(FsUsage {
            time: crate::server::now_nanos(),
            available: bytes(stat.f_bavail),
            capacity: bytes(stat.f_blocks),
            used: bytes(stat.f_blocks.saturating_sub(stat.f_bfree)),
            inodes_free: Some(stat.f_ffree),
            inodes: Some(stat.f_files),
            inodes_used: Some(stat.f_files.saturating_sub(stat.f_ffree)),
        })
    }

    /// The same file system, of which `usage` is used.
    pub fn using(self, usage: DiskUsage) -> Self {
        FsUsage {
            used: Some(usage.bytes),
            inodes_used: Some(usage.inodes),
            ..self
        }
    }
}

/// How the usage of a type of volume is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Measure {
    /// By walking its files: it shares a file system with others.
    Files,
    /// By asking its file system.
    FileSystem,
}

/// A volume whose files are walked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileVolume {
    pub name: String,
    pub path: PathBuf,
    /// It counts as ephemeral storage of the pod.
    pub is_ephemeral: bool,
}

/// A volume whose file system is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystemVolume {
    pub name: String,
    pub path: PathBuf,
    pub claim: Option<String>,
}

/// Whether the volume is on the node's disk and goes with the pod. COMPAT: upstream's list.
fn is_local_ephemeral(volume: &Volume) -> bool {
    let on_disk = |medium: &Option<String>| medium.as_deref().unwrap_or_default() != "Memory";
    let empty_dir = volume.empty_dir.as_ref();
    empty_dir.is_some_and(|source| on_disk(&source.medium))
        || volume.config_map.is_some()
        || volume.downward_api.is_some()
}

fn volumes_of(pod: &Pod) -> impl Iterator<Item = &Volume> {
    pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten())
}

impl Volumes {
    /// The volumes of the pod whose files tell how large they are.
    pub fn file_volumes(&self, pod: &Pod) -> Vec<FileVolume> {
        let facts = NodeFacts::default();
        let found = volumes_of(pod).filter_map(|volume| {
            let wanted = Wanted {
                pod,
                volume,
                facts: &facts,
                claimed: None,
            };
            let plugin = volume_type::of(&wanted)?;
            (plugin.measure()? == Measure::Files).then(|| FileVolume {
                name: volume.name.clone(),
                path: self.volume_dir(pods::uid(pod), plugin.name(), &volume.name),
                is_ephemeral: is_local_ephemeral(volume),
            })
        });
        found.collect()
    }

    /// The mounted volumes of the pod that are file systems of their own, other than those of storage drivers.
    pub fn file_system_volumes(&self, pod: &Pod) -> Vec<FileSystemVolume> {
        let facts = NodeFacts::default();
        let uid = pods::uid(pod);
        let found = volumes_of(pod).filter_map(|volume| {
            if let Some(reference) = claims::reference(pod, volume) {
                let path = self.claimed.lock().measured_path(uid, &volume.name)?;
                return Some(FileSystemVolume {
                    name: volume.name.clone(),
                    path,
                    claim: Some(reference.claim().to_owned()),
                });
            }
            let wanted = Wanted {
                pod,
                volume,
                facts: &facts,
                claimed: None,
            };
            let plugin = volume_type::of(&wanted)?;
            (plugin.measure()? == Measure::FileSystem).then(|| FileSystemVolume {
                name: volume.name.clone(),
                path: self.volume_dir(uid, plugin.name(), &volume.name),
                claim: None,
            })
        });
        found.collect()
    }
}

/// What a directory and all below it take, or a single file. What goes away meanwhile does not count. The container may put a
/// link in the place of a directory at any moment, so each is opened inside the one that is measured.
pub fn disk_usage(path: &Path) -> DiskUsage {
    use std::os::unix::ffi::OsStrExt;
    let mut total = DiskUsage::default();
    let mut add = |blocks: i64| {
        total += DiskUsage {
            bytes: u64::try_from(blocks).unwrap_or(0).saturating_mul(512),
            inodes: 1,
        };
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(root) = open(path, flags, Mode::empty()) else {
        if let Ok(stat) = rustix::fs::lstat(path) {
            add(stat.st_blocks);
        }
        return total;
    };
    let Ok(root_stat) = fstat(&root) else {
        return total;
    };
    add(root_stat.st_blocks);
    let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let mut pending = vec![PathBuf::from(".")];
    // A file with many names is one file.
    let mut seen = HashSet::new();
    while let Some(relative) = pending.pop() {
        let Ok(directory) = openat2(&root, &relative, flags, Mode::empty(), inside) else {
            continue;
        };
        for entry in Dir::read_from(&directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let Ok(stat) = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            // What is mounted there is measured elsewhere, if it is.
            if stat.st_dev != root_stat.st_dev {
                continue;
            }
            if FileType::from_raw_mode(stat.st_mode).is_dir() {
                pending.push(relative.join(std::ffi::OsStr::from_bytes(name.to_bytes())));
            } else if stat.st_nlink > 1 && !seen.insert(stat.st_ino) {
                continue;
            }
            add(stat.st_blocks);
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn files_are_counted_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        let before = disk_usage(path);
        assert_eq!(before.inodes, 1, "the directory itself");
        std::fs::create_dir(path.join("d")).unwrap();
        std::fs::write(path.join("d/big"), vec![1; 1 << 20]).unwrap();
        std::fs::hard_link(path.join("d/big"), path.join("again")).unwrap();
        std::os::unix::fs::symlink("/usr", path.join("link")).unwrap();
        let after = disk_usage(path);
        let grown = after.bytes - before.bytes;
        assert!((1 << 20..2 << 20).contains(&grown), "{grown}");
        assert_eq!(after.inodes, 4);
        assert_eq!(disk_usage(&path.join("d/big")).inodes, 1);
        assert_eq!(disk_usage(&path.join("none")), DiskUsage::default());
    }

    #[test]
    fn which_volumes_are_ephemeral() {
        let check = |volume: serde_json::Value, expected: bool| {
            let parsed = serde_json::from_value(volume.clone()).unwrap();
            assert_eq!(is_local_ephemeral(&parsed), expected, "{volume}");
        };
        check(json!({"name": "v", "emptyDir": {}}), true);
        check(json!({"name": "v", "emptyDir": {"medium": "Memory"}}), false);
        check(json!({"name": "v", "configMap": {"name": "c"}}), true);
        check(json!({"name": "v", "downwardAPI": {}}), true);
        check(json!({"name": "v", "secret": {"secretName": "s"}}), false);
        check(json!({"name": "v", "projected": {}}), false);
        check(json!({"name": "v", "hostPath": {"path": "/"}}), false);
    }
}
