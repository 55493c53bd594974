//! How much a directory takes on disk. Containers fill it while it is counted, and may nest directories
//! deeper than a stack, or put a link in the place of one that was just looked at: it is walked by
//! descriptors and without recursion.

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, openat, statat};
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;

const OPEN: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// Directories that are open at the same time, and names that wait. What is beyond does not count.
const MAX_OPEN: usize = 256;
const MAX_WAITING: usize = 200_000;

/// Bytes and inodes below a directory. What cannot be read, or goes away meanwhile, does not count.
pub(crate) fn disk_usage(directory: &Path) -> (u64, u64) {
    let (mut bytes, mut inodes) = (0u64, 0u64);
    let Ok(top) = openat(CWD, directory, OPEN, Mode::empty()) else {
        return (0, 0);
    };
    // Directories that are not entered yet, below their parents, and how many parents these are.
    let mut waiting: Vec<(Rc<OwnedFd>, CString)> = Vec::new();
    let mut parents = 0;
    let mut current = Some(Rc::new(top));
    while let Some(directory) = current.take() {
        let before = waiting.len();
        for entry in Dir::read_from(&*directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let Ok(stat) = statat(&*directory, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            bytes = bytes.saturating_add(u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512));
            inodes += 1;
            let is_directory = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir();
            if is_directory && parents < MAX_OPEN && waiting.len() < MAX_WAITING {
                waiting.push((directory.clone(), name.to_owned()));
            }
        }
        parents += usize::from(waiting.len() > before);
        drop(directory);
        while current.is_none()
            && let Some((parent, name)) = waiting.pop()
        {
            current = openat(&*parent, &name, OPEN, Mode::empty()).ok().map(Rc::new);
            parents -= usize::from(Rc::strong_count(&parent) == 1);
        }
    }
    (bytes, inodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_however_deep_and_follows_no_link() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("works");
        let outside = tempfile::tempdir_in("/dev/shm").expect("works");
        std::fs::write(outside.path().join("large"), vec![1; 1 << 20]).expect("works");
        std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).expect("works");
        std::fs::create_dir_all(dir.path().join("a/b")).expect("works");
        std::fs::create_dir_all(dir.path().join("a/c")).expect("works");
        std::fs::write(dir.path().join("a/b/file"), vec![1; 8192]).expect("works");
        assert_eq!(disk_usage(dir.path()), (8192, 5));
        assert_eq!(disk_usage(&dir.path().join("nothing")), (0, 0));

        const DEPTH: u64 = 3000;
        let mut directory = openat(CWD, dir.path(), OPEN, Mode::empty()).expect("works");
        for _ in 0..DEPTH {
            rustix::fs::mkdirat(&directory, "d", Mode::from_raw_mode(0o700)).expect("works");
            directory = openat(&directory, "d", OPEN, Mode::empty()).expect("works");
        }
        // A second directory on each level keeps its parent open.
        let wide = dir.path().join("wide");
        std::fs::create_dir(&wide).expect("works");
        let mut directory = openat(CWD, &wide, OPEN, Mode::empty()).expect("works");
        for _ in 0..400 {
            for name in ["d", "e"] {
                rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o700)).expect("works");
            }
            directory = openat(&directory, "d", OPEN, Mode::empty()).expect("works");
        }
        drop(directory);
        let (bytes, inodes) = disk_usage(dir.path());
        assert_eq!(bytes, 8192);
        assert!(inodes > DEPTH + 5, "{inodes}");
        skiff_fs::remove_tree(&dir.path().join("d")).expect("works");
        skiff_fs::remove_tree(&wide).expect("works");
    }
}
