//! Removes a directory and everything below it, however deep, on one mount only. std's `remove_dir_all` does not
//! serve: it takes a stack frame and a descriptor per level, so that a container's deep directories end the
//! process, and it walks into whatever is mounted below, so that a forgotten bind mount costs the host its files.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags, openat, openat2, unlinkat};
use rustix::io::Errno;
use rustix::path::Arg;

const OPEN: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// How much of a deep path an error shows.
const SHOWN_LEVELS: usize = 16;

/// Removes `path`, a file, a link or a directory with all that it holds. What does not exist is fine. Links are
/// removed, never followed; a mount point, of a directory or of a file, is an error that names it, and it stays
/// as it is. Links in the path that leads to the parent of `path` are the caller's choice and are followed.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("cannot remove {}: not the name of an entry", path.display()),
        ));
    };
    let parent = if parent.as_os_str().is_empty() {
        Path::new(".")
    } else {
        parent
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat(CWD, parent, flags, Mode::empty()) {
        Ok(parent) => Walk::new(path).remove(&parent, name),
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(Walk::new(path).failed(None, error)),
    }
}

/// One removal under way: where it started, and the way from there to the directory at hand.
struct Walk<'a> {
    top: &'a Path,
    way: Vec<(CString, Identity)>,
}

/// Device and inode of a directory.
type Identity = (u64, u64);

impl<'a> Walk<'a> {
    fn new(top: &'a Path) -> Self {
        Walk { top, way: Vec::new() }
    }

    fn remove(&mut self, parent: &OwnedFd, name: &OsStr) -> io::Result<()> {
        let mut current = match open_below(parent, name) {
            Ok(directory) => directory,
            Err(Errno::NOENT) => return Ok(()),
            Err(Errno::NOTDIR | Errno::LOOP) => {
                return match unlinkat(parent, name, AtFlags::empty()) {
                    Ok(()) | Err(Errno::NOENT) => Ok(()),
                    Err(error) => Err(self.failed(None, error)),
                };
            }
            Err(error) => return Err(self.failed(None, error)),
        };
        loop {
            if let Some(name) = self.remove_entries(&current)? {
                let below = match open_below(&current, &name) {
                    Ok(below) => below,
                    // Replaced by something else since it was read.
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                    Err(error) => return Err(self.failed(Some(&name), error)),
                };
                let identity = identity(&current).map_err(|error| self.failed(None, error))?;
                self.way.push((name, identity));
                current = below;
                continue;
            }
            let Some((name, expected)) = self.way.pop() else {
                break;
            };
            // By "..": a descriptor per level would run out. The directory may have been moved meanwhile.
            let above = openat(&current, "..", OPEN, Mode::empty())
                .map_err(|error| self.failed(Some(&name), error))?;
            if identity(&above).map_err(|error| self.failed(None, error))? != expected {
                let moved = io::Error::other("the directory was moved while it was removed");
                return Err(self.failed(Some(&name), moved));
            }
            removed(unlinkat(&above, &name, AtFlags::REMOVEDIR))
                .map_err(|error| self.failed(Some(&name), error))?;
            current = above;
        }
        match unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(self.failed(None, error)),
        }
    }

    /// Removes entries up to the first directory, whose name is returned. Whether that one is empty is not tried:
    /// the kernel takes long to say no to a deep one.
    fn remove_entries(&self, directory: &OwnedFd) -> io::Result<Option<CString>> {
        for entry in Dir::read_from(directory).map_err(|error| self.failed(None, error))? {
            let entry = entry.map_err(|error| self.failed(None, error))?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let is_removed = !entry.file_type().is_dir()
                && removed(unlinkat(directory, name, AtFlags::empty()))
                    .map_err(|error| self.failed(Some(name), error))?;
            if !is_removed {
                return Ok(Some(name.to_owned()));
            }
        }
        Ok(None)
    }

    /// The error with the path at which it happened.
    fn failed(&self, name: Option<&std::ffi::CStr>, error: impl Into<io::Error>) -> io::Error {
        let error = error.into();
        let mut path = PathBuf::from(self.top);
        let names = self.way.iter().map(|(name, _)| name.as_c_str()).chain(name);
        for (level, name) in names.enumerate() {
            if level == SHOWN_LEVELS {
                path.push("…");
                break;
            }
            path.push(OsStr::from_bytes(name.to_bytes()));
        }
        let is_mount = matches!(
            error.kind(),
            io::ErrorKind::CrossesDevices | io::ErrorKind::ResourceBusy
        );
        let why = if is_mount {
            "a file system is mounted there".to_owned()
        } else {
            error.to_string()
        };
        io::Error::new(error.kind(), format!("cannot remove {}: {why}", path.display()))
    }
}

/// Opens a directory that is an entry of `parent` and on the same mount.
fn open_below(parent: &OwnedFd, name: impl Arg) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    loop {
        // EAGAIN: a rename elsewhere on the machine raced with the lookup.
        match openat2(
            parent,
            name.as_cow_c_str()?.as_ref(),
            OPEN,
            Mode::empty(),
            resolve,
        ) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            result => return result,
        }
    }
}

fn identity(directory: &OwnedFd) -> rustix::io::Result<Identity> {
    let stat = rustix::fs::fstat(directory)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// `false`: it is a directory, or one that was filled again.
fn removed(result: rustix::io::Result<()>) -> rustix::io::Result<bool> {
    match result {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR | Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmount_below;

    #[test]
    fn however_deep() {
        // In memory: a disk takes its time for this many directories.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir_all(top.join("wide/a")).unwrap();
        std::fs::create_dir_all(top.join("wide/b/c")).unwrap();
        std::fs::write(top.join("wide/b/c/f"), "x").unwrap();
        std::fs::write(dir.path().join("kept"), "x").unwrap();
        std::os::unix::fs::symlink(dir.path(), top.join("wide/link")).unwrap();
        let mut directory = openat(CWD, &top, OPEN, Mode::empty()).unwrap();
        for _ in 0..20_000 {
            rustix::fs::mkdirat(&directory, "d", Mode::from_raw_mode(0o700)).unwrap();
            directory = openat(&directory, "d", OPEN, Mode::empty()).unwrap();
        }
        drop(directory);
        remove_tree(&top).unwrap();
        assert!(!top.exists() && dir.path().join("kept").exists());
    }

    #[test]
    fn files_links_and_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("entry");
        remove_tree(&path).unwrap();
        remove_tree(&path.join("below/nothing")).unwrap();
        std::fs::write(&path, "x").unwrap();
        remove_tree(&path).unwrap();
        let target = dir.path().join("target");
        std::fs::create_dir(&target).unwrap();
        std::fs::write(target.join("kept"), "x").unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        remove_tree(&path).unwrap();
        assert!(path.symlink_metadata().is_err() && target.join("kept").exists());
        assert!(remove_tree(Path::new("/")).is_err());
        assert!(remove_tree(&dir.path().join("..")).is_err());
    }

    /// A bind mount has the device number of its surroundings: only its mount tells it apart.
    #[test]
    fn never_through_a_mount() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path().join("host");
        std::fs::create_dir(&host).unwrap();
        std::fs::write(host.join("precious"), "x").unwrap();
        let real = dir.path().join("real");
        let folder = real.join("tree/bound");
        let file = real.join("tree/file");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&real, dir.path().join("link")).unwrap();
        let through_link = dir.path().join("link/tree");
        let _unmount = UnmountOnDrop(&real);

        rustix::mount::mount_bind(&host, &folder).unwrap();
        for top in [&real.join("tree"), &through_link, &folder] {
            let error = remove_tree(top).unwrap_err().to_string();
            assert!(error.contains("bound: a file system is mounted there"), "{error}");
            assert!(host.join("precious").exists());
        }
        // The mount is found although the path that is asked for leads through a link.
        unmount_below(&through_link).unwrap();

        std::fs::write(&file, "").unwrap();
        rustix::mount::mount_bind(host.join("precious"), &file).unwrap();
        for top in [&through_link, &file] {
            let error = remove_tree(top).unwrap_err().to_string();
            assert!(error.contains("file: a file system is mounted there"), "{error}");
        }
        unmount_below(&through_link).unwrap();
        remove_tree(&through_link).unwrap();
        assert!(!real.join("tree").exists() && host.join("precious").exists());
    }

    struct UnmountOnDrop<'a>(&'a Path);

    impl Drop for UnmountOnDrop<'_> {
        fn drop(&mut self) {
            let _ = unmount_below(self.0);
        }
    }
}
