//! Removes a directory and all below it, however deep. A container can nest directories by the ten
//! thousands, and std's `remove_dir_all` takes a stack frame and a descriptor for each: it would end the
//! process, and again after its restart. The node has the same for volumes: no crate below both deals with
//! files.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, openat, unlinkat};
use rustix::io::Errno;

const OPEN: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// What is not there is fine. Links are removed, not followed.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let mut current = match openat(CWD, path, OPEN, Mode::empty()) {
        Ok(top) => top,
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTDIR | Errno::LOOP) => return Ok(unlinkat(CWD, path, AtFlags::empty())?),
        Err(error) => return Err(error.into()),
    };
    // The way back up: names of directories and who their parents are.
    let mut way: Vec<(CString, (u64, u64))> = Vec::new();
    loop {
        if let Some(name) = empty_out(&current)? {
            let below = openat(&current, &name, OPEN, Mode::empty())?;
            way.push((name, identity(&current)?));
            current = below;
            continue;
        }
        let Some((name, parent)) = way.pop() else { break };
        let above = openat(&current, "..", OPEN, Mode::empty())?;
        if identity(&above)? != parent {
            return Err(io::Error::other("a directory was moved while it was removed"));
        }
        is_removed(unlinkat(&above, &name, AtFlags::REMOVEDIR))?;
        current = above;
    }
    match unlinkat(CWD, path, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes entries up to the first directory, whose name is returned. Whether it is empty is not tried: the
/// kernel takes long to say no to a deep one.
fn empty_out(directory: &OwnedFd) -> io::Result<Option<CString>> {
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if !matches!(name.to_bytes(), b"." | b"..")
            && (entry.file_type().is_dir() || !is_removed(unlinkat(directory, name, AtFlags::empty()))?)
        {
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}

fn identity(directory: &OwnedFd) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(directory)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// `false`: it is a directory, or one that was filled again.
fn is_removed(result: rustix::io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR | Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_deep() {
        // In memory: a disk takes its time for this many directories.
        let dir = tempfile::tempdir_in("/dev/shm").expect("works");
        let top = dir.path().join("top");
        std::fs::create_dir_all(top.join("wide/a")).expect("works");
        std::fs::create_dir_all(top.join("wide/b/c")).expect("works");
        std::fs::write(top.join("wide/b/c/f"), "x").expect("works");
        std::fs::write(dir.path().join("kept"), "x").expect("works");
        std::os::unix::fs::symlink(dir.path(), top.join("wide/link")).expect("works");
        let mut directory = openat(CWD, &top, OPEN, Mode::empty()).expect("works");
        for _ in 0..20_000 {
            rustix::fs::mkdirat(&directory, "d", Mode::from_raw_mode(0o700)).expect("works");
            directory = openat(&directory, "d", OPEN, Mode::empty()).expect("works");
        }
        drop(directory);
        remove_tree(&top).expect("works");
        assert!(!top.exists() && dir.path().join("kept").exists());
        remove_tree(&top).expect("works");
        std::os::unix::fs::symlink(dir.path(), &top).expect("works");
        remove_tree(&top).expect("works");
        assert!(top.symlink_metadata().is_err() && dir.path().exists());
    }
}
