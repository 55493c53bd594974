//! What every type of volume answers to. Adding one is a file and a row in [`TYPES`].

use std::path::{Path, PathBuf};

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec, Pod, Volume,
};

use super::usage::Measure;
use super::{
    SetUpError, Volumes, blocking, config_map, csi, disks, downward_api, empty_dir, host_path, image, local,
    nfs, projected, secret,
};
use crate::field_ref::NodeFacts;
use crate::pods;

/// The volume that one pod wants.
pub(super) struct Wanted<'a> {
    pub pod: &'a Pod,
    /// As the pod describes it.
    pub volume: &'a Volume,
    pub facts: &'a NodeFacts,
    /// What is behind the pod's claim, if that is what it describes.
    pub claimed: Option<&'a Persistent>,
}

/// A PersistentVolume by way of a claim.
pub(super) struct Persistent {
    pub pv: PersistentVolume,
    pub claim: PersistentVolumeClaim,
    pub name: String,
    pub read_only: bool,
    pub options: Vec<String>,
    /// No other pod may have it mounted at the same time.
    pub for_one_pod: bool,
    /// The pod gets the device, not a filesystem.
    pub block: bool,
}

impl Persistent {
    pub fn spec(&self) -> Option<&PersistentVolumeSpec> {
        self.pv.spec.as_ref()
    }
}

impl<'a> Wanted<'a> {
    pub fn uid(&self) -> &'a str {
        pods::uid(self.pod)
    }

    pub fn namespace(&self) -> &'a str {
        pods::namespace(self.pod)
    }

    /// The name of the volume on the disk and in messages.
    pub fn name(&self) -> &str {
        self.claimed.map_or(&self.volume.name, |claimed| &claimed.name)
    }

    pub fn set_up_error(&self, message: impl ToString) -> SetUpError {
        SetUpError::set_up(self.name(), message.to_string())
    }
}

/// A volume that is there.
#[derive(Debug)]
pub(super) struct Ready {
    /// The directory, or the device of a block volume.
    pub path: PathBuf,
    pub read_only: bool,
    /// Becomes an event of the pod.
    pub warning: Option<String>,
}

impl Ready {
    pub fn at(path: PathBuf) -> Self {
        Ready {
            path,
            read_only: false,
            warning: None,
        }
    }

    /// Files that the kubelet writes are not for containers to change.
    pub fn files(path: PathBuf) -> Self {
        Ready {
            read_only: true,
            ..Ready::at(path)
        }
    }
}

/// One type of volume: how it is made, kept up to date and taken away.
#[async_trait]
pub(super) trait VolumeType: Send + Sync {
    /// Its volumes are in `pods/<uid>/volumes/kubernetes.io~<name>`.
    fn name(&self) -> &'static str;

    fn handles(&self, wanted: &Wanted<'_>) -> bool;

    /// How full its volumes are; `None` where nobody can tell, or the storage driver does.
    fn measure(&self) -> Option<Measure> {
        None
    }

    fn supports_mount_options(&self) -> bool {
        false
    }

    fn supports_block(&self) -> bool {
        false
    }

    /// Makes the volume for the pod. Safe to repeat, also by a process that did not make it: that finds it by the
    /// disk and the kernel's mounts. Volumes that the pod describes itself are brought up to date by that.
    async fn set_up(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError>;

    /// Whether there is anything to be done for the volume of a claim that the pod has already.
    fn updates(&self) -> bool {
        false
    }

    /// Brings the volume of a claim up to date, which the pod has already.
    async fn update(&self, _host: &Volumes, _wanted: &Wanted<'_>) -> Result<(), SetUpError> {
        Ok(())
    }

    /// Takes away one volume of a pod, by what is on the disk: the pod object may be gone. A volume that is removed is
    /// empty or the pod's own; nothing is removed through a mount.
    async fn tear_down(&self, _host: &Volumes, _uid: &str, directory: &Path) -> Result<(), String> {
        unmount_and_remove(directory.to_path_buf()).await
    }

    /// The same for a block volume; `link` is its place in the pod's directory.
    async fn tear_down_device(&self, _host: &Volumes, _uid: &str, link: &Path) -> Result<(), String> {
        remove_link(link).map_err(|error| error.to_string())
    }
}

/// All types, in the order of upstream's API.
pub(super) static TYPES: &[&dyn VolumeType] = &[
    &host_path::HostPath,
    &empty_dir::EmptyDir,
    &config_map::ConfigMaps,
    &secret::Secrets,
    &downward_api::DownwardApi,
    &projected::Projected,
    &image::Image,
    &local::Local,
    &nfs::Nfs,
    &disks::IscsiVolume,
    &disks::FibreChannelVolume,
    &csi::CsiVolume,
];

pub(super) fn of(wanted: &Wanted<'_>) -> Option<&'static dyn VolumeType> {
    TYPES.iter().copied().find(|one| one.handles(wanted))
}

/// The type of the volumes in `kubernetes.io~<name>`.
pub(super) fn by_folder(folder: &str) -> Option<&'static dyn VolumeType> {
    let name = folder.strip_prefix("kubernetes.io~")?;
    TYPES.iter().copied().find(|one| one.name() == name)
}

/// What a volume without a type of its own needs, too.
pub(super) async fn unmount_and_remove(directory: PathBuf) -> Result<(), String> {
    blocking(move || {
        super::unmount_at(&directory)?;
        skiff_fs::remove_tree(&directory)
    })
    .await
    .map_err(|error: std::io::Error| error.to_string())
}

pub(super) fn remove_link(link: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(link) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
