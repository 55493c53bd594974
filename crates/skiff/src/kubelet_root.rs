//! The folder of the kubelet: `kubelet` in the data directory, or where `--root-dir` says. Drivers that are installed as
//! pods mount it from the host by its path, and their charts expect `/var/lib/kubelet`.

use crate::cluster::{Cluster, remove_if_there};
use anyhow::{Context, Result, bail};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Says whose the folder is, by the data directory of its cluster.
const OWNER: &str = ".skiff-owner";

/// What the kubelet, and its plugins on its behalf, make in there.
const OURS: &[&str] = &[
    "checkpoints",
    "device-plugins",
    "disks",
    "image_manager",
    "plugins",
    "plugins_registry",
    "pod-resources",
    "pods",
];

impl Cluster {
    fn root_note(&self) -> PathBuf {
        self.data_dir.join("kubelet-root")
    }

    fn remembered_root(&self) -> Option<PathBuf> {
        fs::read_to_string(self.root_note()).ok().map(PathBuf::from)
    }

    pub fn kubelet_root(&self) -> PathBuf {
        self.remembered_root()
            .unwrap_or_else(|| self.data_dir.join("kubelet"))
    }

    /// Makes the folder this cluster's, and notes it for its removal. It is for one kubelet: what it finds there and does not
    /// know is removed.
    pub fn take_kubelet_root(&self, root: Option<&Path>) -> Result<()> {
        let remembered = self.remembered_root();
        let Some(root) = root else {
            return match remembered {
                Some(before) => bail!(
                    "the kubelet of this cluster has its files in {0}: start it with --root-dir {0}",
                    before.display()
                ),
                None => Ok(()),
            };
        };
        if !root.is_absolute() {
            bail!("--root-dir {}: the path must be absolute", root.display());
        }
        if remembered.as_deref() == Some(root) {
            return Ok(());
        }
        if remembered.is_some() || self.data_dir.join("kubelet/pods").is_dir() {
            bail!(
                "--root-dir: the kubelet of this cluster has its files in {}, and they cannot be moved",
                self.kubelet_root().display()
            );
        }
        let owner = self.data_dir.to_string_lossy();
        match fs::read_to_string(root.join(OWNER)) {
            Ok(other) if other != owner => bail!(
                "--root-dir {}: it belongs to the cluster in {other}",
                root.display()
            ),
            Ok(_) => {}
            Err(_) if root.join("pods").exists() => bail!(
                "--root-dir {}: another kubelet has its pods there",
                root.display()
            ),
            Err(_) => {}
        }
        fs::create_dir_all(root).with_context(|| format!("--root-dir {}", root.display()))?;
        skiff_fs::write_durably(&root.join(OWNER), owner.as_bytes(), 0o644)?;
        skiff_fs::write_durably(&self.root_note(), root.to_string_lossy().as_bytes(), 0o644)?;
        Ok(())
    }

    /// Takes the mounts down, and removes a folder outside of the data directory.
    pub fn remove_kubelet_root(&self) -> Result<()> {
        let root = self.kubelet_root();
        skiff_fs::unmount_below(&root)?;
        let Some(root) = self.remembered_root() else {
            return Ok(());
        };
        // Somebody else's by now.
        let owner = fs::read_to_string(root.join(OWNER)).unwrap_or_default();
        if owner == self.data_dir.to_string_lossy() {
            for name in OURS {
                skiff_fs::remove_tree(&root.join(name))?;
            }
            remove_if_there(&root.join(OWNER))?;
            match fs::remove_dir(&root) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    say!("{} holds what is not skiff's; it stays.", root.display());
                }
                _ => {}
            }
        }
        Ok(())
    }
}
