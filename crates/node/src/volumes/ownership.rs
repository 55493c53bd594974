//! `fsGroup`: gives a volume to a group, so that processes of it may read and write.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, openat};
use rustix::io::Errno;

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
    change(CWD, root.as_os_str(), group, read_only, 0)
}

fn mask(directory: bool, read_only: bool) -> u32 {
    let access = if read_only { 0o440 } else { 0o660 };
    if directory {
        access | 0o110 | 0o2000
    } else {
        access
    }
}

/// Nobody's honest volume is deeper; a recursion must end somewhere.
const MAX_DEPTH: usize = 100;

/// Children first, so that the root changes last and tells that all is done. Every step goes by an open
/// descriptor: a container may work in the volume at the same time, and a link that it puts in the place of
/// a file must not lead to a file of the host.
fn change(parent: BorrowedFd<'_>, name: &OsStr, group: u32, read_only: bool, depth: usize) -> io::Result<()> {
    let item = match openat(
        parent,
        name,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    ) {
        Err(Errno::NOENT) if depth > 0 => return Ok(()),
        opened => opened?,
    };
    let stat = rustix::fs::fstat(&item)?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind.is_dir() {
        if depth >= MAX_DEPTH {
            return Err(io::Error::other("the volume's directories are nested too deep"));
        }
        let listing = openat(
            &item,
            ".",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        for entry in Dir::new(listing)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                change(item.as_fd(), OsStr::from_bytes(name), group, read_only, depth + 1)?;
            }
        }
    }
    rustix::fs::chownat(&item, "", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)?;
    if !kind.is_symlink() {
        let mode = (stat.st_mode & 0o7777) | mask(kind.is_dir(), read_only);
        // A descriptor of this sort cannot be changed itself; its name in /proc can, and is exact.
        let itself = format!("/proc/self/fd/{}", item.as_raw_fd());
        rustix::fs::chmodat(CWD, itself, Mode::from_raw_mode(mode), AtFlags::empty())?;
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

    #[test]
    fn links_are_not_followed() {
        let outside = tempfile::tempdir().unwrap();
        let secret = outside.path().join("secret");
        std::fs::write(&secret, "x").unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
        let volume = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(&secret, volume.path().join("file")).unwrap();
        std::os::unix::fs::symlink(outside.path(), volume.path().join("directory")).unwrap();
        let group = i64::from(std::fs::metadata(&secret).unwrap().gid());
        apply(volume.path(), Some(group), None, false).unwrap();
        assert_eq!(
            std::fs::metadata(&secret).unwrap().permissions().mode() & 0o7777,
            0o600
        );
        // Nested beyond reason: refused, not overflowed.
        let deep = volume.path().join("d/".repeat(MAX_DEPTH + 1));
        std::fs::create_dir_all(deep).unwrap();
        assert!(apply(volume.path(), Some(group), None, false).is_err());
    }
}
