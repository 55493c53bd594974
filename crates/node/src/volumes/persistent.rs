//! The types of PersistentVolumes that this node mounts. Adding one is a file and a line in [`plugin_of`].

use std::path::PathBuf;

use k8s_openapi::api::core::v1::PersistentVolume;

use super::{SetUpError, host_path, local};

/// What is wanted of a PersistentVolume for one pod.
pub(super) struct Mount {
    /// The directory of all pods.
    pub root: PathBuf,
    pub uid: String,
    /// The PersistentVolume's name.
    pub name: String,
    pub read_only: bool,
    pub options: Vec<String>,
    pub fs_group: Option<i64>,
    pub fs_group_change_policy: Option<String>,
    /// No other pod may have it mounted at the same time.
    pub for_one_pod: bool,
}

impl Mount {
    /// Where a plugin mounts the volume for a pod.
    pub(super) fn directory_of(&self, uid: &str, plugin: &str) -> PathBuf {
        let plugin = format!("kubernetes.io~{plugin}");
        self.root.join(uid).join("volumes").join(plugin).join(&self.name)
    }
}

/// A volume that is there.
#[derive(Debug)]
pub(super) struct Ready {
    pub path: PathBuf,
    /// Becomes an event of the pod.
    pub warning: Option<String>,
}

/// One type of PersistentVolume. Unmounting needs no plugin: everything below the pod's directory is unmounted.
pub(super) trait PersistentPlugin: Send + Sync {
    fn supports_mount_options(&self) -> bool;
    /// Blocking, and safe to repeat.
    fn set_up(&self, pv: &PersistentVolume, mount: &Mount) -> Result<Ready, SetUpError>;
}

pub(super) fn plugin_of(pv: &PersistentVolume) -> Result<&'static dyn PersistentPlugin, SetUpError> {
    match &pv.spec {
        Some(spec) if spec.host_path.is_some() => Ok(&HostPath),
        Some(spec) if spec.local.is_some() => Ok(&local::Local),
        _ => Err(SetUpError::Unprocessed(format!(
            "failed to get Plugin from volumeSpec for volume {:?} err=no volume plugin matched",
            pv.metadata.name.as_deref().unwrap_or_default()
        ))),
    }
}

/// A path of the node as it is: its owner and modes are not the pod's to change.
struct HostPath;

impl PersistentPlugin for HostPath {
    fn supports_mount_options(&self) -> bool {
        false
    }

    fn set_up(&self, pv: &PersistentVolume, mount: &Mount) -> Result<Ready, SetUpError> {
        let source = pv.spec.as_ref().and_then(|spec| spec.host_path.clone());
        let path = host_path::set_up(&source.unwrap_or_default())
            .map_err(|message| SetUpError::set_up(&mount.name, message))?;
        Ok(Ready { path, warning: None })
    }
}
