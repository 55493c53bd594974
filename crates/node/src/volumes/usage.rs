//! How much of a disk a volume takes: which are measured by walking their files, and which by asking their file system. Blocking.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Pod, Volume};
use skiff_fs::DiskUsage;

use super::volume_type::{self, Wanted};
use super::{Volumes, claims};
use crate::field_ref::NodeFacts;
use crate::pods;

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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
