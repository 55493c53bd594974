//! Volumes of the class `local`: a claim gets a directory of the node that the scheduler chose for its pod.
//!
//! The provisioner ([`provisioner`]) runs beside the API server, where it may write PersistentVolumes. The directories
//! ([`folder`]) are each node's own, which makes and removes them when it is asked by its HTTPS server. A directory is made
//! before the PersistentVolume that names it, and removed before that goes: so a volume object always has a directory
//! behind it, and a node that is down keeps its volumes until it is back. Mounting is the kubelet's work and no business
//! of this module.

mod folder;
mod plan;
mod provisioner;

pub(crate) use folder::{Folder, Removal};
pub use provisioner::{LocalVolumesConfig, run_local_volumes};

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The name under which classes ask for it.
pub const PROVISIONER: &str = "skiff.io/local";

/// What a node says of its volumes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Offer {
    /// Where the directories are.
    pub root: PathBuf,
    /// The size of that filesystem in bytes.
    pub disk_size: u64,
    /// The directories that there are.
    pub names: Vec<String>,
}

/// Whether a volume may have this name: it becomes the name of a directory.
pub(crate) fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= 253 && !name.contains(['/', '\0']) && !name.starts_with('.')
}
