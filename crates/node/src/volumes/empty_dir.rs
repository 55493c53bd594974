//! `emptyDir`: a directory of the pod's own, on disk or in memory. Also the base of the volumes made of
//! files the kubelet writes.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use async_trait::async_trait;
use rustix::mount::{MountFlags, mount};

use super::usage::Measure;
use super::volume_type::{Ready, VolumeType, Wanted};
use super::{SetUpError, Volumes, blocking, fs_group, ownership};
use crate::resources::value;

pub(super) struct EmptyDir;

#[async_trait]
impl VolumeType for EmptyDir {
    fn name(&self) -> &'static str {
        "empty-dir"
    }

    fn measure(&self) -> Option<Measure> {
        Some(Measure::Files)
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        wanted.volume.empty_dir.is_some()
    }

    async fn set_up(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let source = wanted.volume.empty_dir.clone().unwrap_or_default();
        let medium = source.medium.unwrap_or_default();
        if !matches!(medium.as_str(), "" | "Memory") {
            let message = format!("emptyDir medium {medium:?} is not supported by this node");
            return Err(wanted.set_up_error(message));
        }
        let memory = medium == "Memory" && host.memory_backed;
        let limits = wanted.pod.spec.as_ref().map(skiff_pods::requests::spec_limits);
        let pod_limit = limits.map(|limits| limits.memory).filter(|l| *l > 0);
        let asked = source.size_limit.as_ref().map(value).filter(|s| *s > 0);
        let size = match (asked, pod_limit) {
            (Some(asked), Some(limit)) => Some(asked.min(limit)),
            (one, other) => one.or(other),
        };
        let (group, policy) = fs_group(wanted.pod);
        let path = host.volume_dir(wanted.uid(), self.name(), wanted.name());
        let ready = host.ready_file(wanted.uid(), self.name(), wanted.name());
        let target = path.clone();
        // COMPAT: the root of a tmpfs is sticky, and upstream leaves it so.
        let mode = if memory { 0o1777 } else { 0o777 };
        blocking(move || {
            set_up(&target, memory, size, mode)?;
            // Once: after that the files are the containers' own, and so are their modes.
            if !ready.exists() {
                ownership::apply(&target, group, policy.as_deref(), false)?;
                ready.parent().map_or(Ok(()), std::fs::create_dir_all)?;
                std::fs::write(&ready, b"")?;
            }
            Ok(())
        })
        .await
        .map_err(|error: io::Error| wanted.set_up_error(error))?;
        Ok(Ready::at(path))
    }
}

/// Makes the directory, with a tmpfs on it if it shall live in memory. Doing it twice is no harm.
pub fn set_up(path: &Path, memory: bool, size_limit: Option<i64>, mode: u32) -> io::Result<()> {
    let existed = path.is_dir();
    std::fs::create_dir_all(path)?;
    if memory && !is_mount_point(path)? {
        let size = size_limit
            .filter(|s| *s > 0)
            .map(|s| format!(",size={s}"))
            .unwrap_or_default();
        // Secrets must not reach the disk by way of swap, where the kernel can promise that.
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        let attempt = |options: String| -> io::Result<()> {
            let options = std::ffi::CString::new(options)?;
            mount("tmpfs", path, "tmpfs", flags, Some(options.as_c_str())).map_err(io::Error::from)
        };
        attempt(format!("mode=0777,noswap{size}")).or_else(|_| attempt(format!("mode=0777{size}")))?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    } else if !existed {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

/// Whether something is mounted exactly there.
pub fn is_mount_point(path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let Some(parent) = path.parent() else {
        return Ok(true);
    };
    Ok(std::fs::metadata(path)?.dev() != std::fs::metadata(parent)?.dev())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_open_to_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        set_up(&path, false, None, 0o777).unwrap();
        std::fs::write(path.join("kept"), "x").unwrap();
        set_up(&path, false, None, 0o777).unwrap();
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o777
        );
        assert!(path.join("kept").exists());
        assert!(!is_mount_point(&path).unwrap());
    }
}
