//! `fsGroup`: gives a volume to a group, so that processes of it may read and write.

use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::Path;

/// Hands `root` and everything below to the group. With `OnRootMismatch` nothing is done if the root of the
/// volume already looks right.
pub fn apply(
    root: &Path,
    fs_group: Option<i64>,
    change_policy: Option<&str>,
    read_only: bool,
) -> io::Result<()> {
    let Some(group) = fs_group.and_then(|g| u32::try_from(g).ok()) else {
        return Ok(());
    };
    if change_policy == Some("OnRootMismatch") {
        let metadata = std::fs::metadata(root)?;
        let wanted = mask(true, read_only);
        if metadata.gid() == group && metadata.permissions().mode() & wanted == wanted {
            return Ok(());
        }
    }
    change(root, group, read_only)
}

fn mask(directory: bool, read_only: bool) -> u32 {
    let access = if read_only { 0o440 } else { 0o660 };
    if directory {
        access | 0o110 | 0o2000
    } else {
        access
    }
}

/// Children first, so that the root changes last and tells that all is done.
fn change(path: &Path, group: u32, read_only: bool) -> io::Result<()> {
    let metadata = std::fs::symlink_metadata(path)?;
    if metadata.is_dir() {
        for entry in std::fs::read_dir(path)? {
            change(&entry?.path(), group, read_only)?;
        }
    }
    lchown(path, None, Some(group))?;
    if !metadata.is_symlink() {
        let mode = metadata.permissions().mode() | mask(metadata.is_dir(), read_only);
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_may_read_and_write() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, "x").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        // A group of our own, which needs no privilege.
        let group = i64::from(std::fs::metadata(&file).unwrap().gid());
        apply(dir.path(), Some(group), None, false).unwrap();
        assert_eq!(
            std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777,
            0o660
        );
        assert_eq!(
            std::fs::metadata(dir.path()).unwrap().permissions().mode() & 0o2070,
            0o2070
        );
    }
}
