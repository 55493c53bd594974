//! How much of a disk a directory takes. Its owner may be a container that fills it meanwhile, nests directories deeper than
//! a stack or a path, or puts a link in the place of a directory that was just looked at: it is walked by descriptors, one
//! name at a time, and what the walk remembers does not grow with the number of files. Reads only, follows no link and
//! crosses no mount. Blocking.

use std::collections::HashSet;
use std::io;
use std::ops::AddAssign;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, lstat, openat, statat};

const OPEN: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// Directories that are open at the same time: the deepest ones. Those above them are found again by `..`.
const OPEN_LEVELS: usize = 64;
/// A level that is not open takes 32 bytes.
const MAX_LEVELS: usize = 1 << 17;
/// Files with several names that are remembered; beyond, each name counts.
const MAX_LINKED: usize = 1 << 20;
/// So often a walk is tried whose way back was cut off, because a directory deep down was moved elsewhere.
const ATTEMPTS: u32 = 3;

/// What files take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    pub bytes: u64,
    pub inodes: u64,
}

impl DiskUsage {
    /// Of what somebody keeps from being measured: more than any limit.
    const UNMEASURABLE: DiskUsage = DiskUsage {
        bytes: u64::MAX >> 1,
        inodes: u64::MAX >> 1,
    };
}

impl AddAssign for DiskUsage {
    fn add_assign(&mut self, other: Self) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.inodes = self.inodes.saturating_add(other.inodes);
    }
}

/// What a directory and all below it take, or a single file. What cannot be read, or goes away meanwhile, does not count.
/// What is nested deeper than 131,072 levels, or is moved about so that no walk comes to an end, takes more than any limit.
pub fn disk_usage(path: &Path) -> DiskUsage {
    for _ in 0..ATTEMPTS {
        match walk(path, MAX_LEVELS) {
            Ok(Some(usage)) => return usage,
            Ok(None) => {}
            Err(_) => {
                let alone = lstat(path).ok();
                return alone.map_or(DiskUsage::default(), |stat| of(&stat));
            }
        }
    }
    DiskUsage::UNMEASURABLE
}

struct Level {
    /// Device and inode.
    id: (u64, u64),
    /// Where reading goes on when it is opened again.
    offset: i64,
    open: Option<Dir>,
}

impl Level {
    fn new(directory: OwnedFd) -> io::Result<Level> {
        let stat = fstat(&directory)?;
        Ok(Level {
            id: (stat.st_dev, stat.st_ino),
            offset: 0,
            open: Some(Dir::new(directory)?),
        })
    }
}

/// `None`: the way back was cut off, or there are too many levels.
fn walk(path: &Path, max_levels: usize) -> io::Result<Option<DiskUsage>> {
    let top = openat(CWD, path, OPEN, Mode::empty())?;
    let mut total = of(&fstat(&top)?);
    let mut linked = HashSet::new();
    let mut levels = vec![Level::new(top)?];
    let device = levels[0].id.0;
    while let Some(level) = levels.last_mut() {
        let Some(directory) = level.open.as_mut() else {
            return Ok(None);
        };
        match directory.read() {
            Some(Ok(entry)) => {
                level.offset = entry.offset();
                let name = entry.file_name();
                if matches!(name.to_bytes(), b"." | b"..") {
                    continue;
                }
                let below = directory.fd()?;
                let Ok(stat) = statat(below, name, AtFlags::SYMLINK_NOFOLLOW) else {
                    continue;
                };
                // What is mounted there is measured elsewhere, if it is.
                if stat.st_dev != device {
                    continue;
                }
                let is_directory = FileType::from_raw_mode(stat.st_mode).is_dir();
                let is_known = !is_directory
                    && stat.st_nlink > 1
                    && linked.len() < MAX_LINKED
                    && !linked.insert(stat.st_ino);
                if is_known {
                    continue;
                }
                total += of(&stat);
                if !is_directory {
                    continue;
                }
                let entered = openat(below, name, OPEN, Mode::empty());
                let Ok(entered) = entered.map_err(io::Error::from).and_then(Level::new) else {
                    continue;
                };
                if entered.id.0 != device {
                    continue;
                }
                if levels.len() == max_levels {
                    return Ok(None);
                }
                levels.push(entered);
                if let Some(above) = levels.len().checked_sub(OPEN_LEVELS + 1) {
                    levels[above].open = None;
                }
            }
            // A directory that cannot be read to its end counts as far as it can.
            Some(Err(_)) | None => {
                let left = levels.pop().and_then(|level| level.open);
                if let (Some(level), Some(left)) = (levels.last_mut(), left)
                    && level.open.is_none()
                {
                    let Some(found) = reopen(&left, level) else {
                        return Ok(None);
                    };
                    level.open = Some(found);
                }
            }
        }
    }
    Ok(Some(total))
}

/// The directory above, where it still is the one that was come from.
fn reopen(below: &Dir, level: &Level) -> Option<Dir> {
    let above = openat(below.fd().ok()?, c"..", OPEN, Mode::empty()).ok()?;
    let stat = fstat(&above).ok()?;
    if (stat.st_dev, stat.st_ino) != level.id {
        return None;
    }
    let mut directory = Dir::new(above).ok()?;
    directory.seek(level.offset).ok()?;
    Some(directory)
}

fn of(stat: &Stat) -> DiskUsage {
    DiskUsage {
        bytes: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
        inodes: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::mkdirat;

    #[test]
    fn files_are_counted_once_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        let before = disk_usage(path);
        assert_eq!(before.inodes, 1, "the directory itself");
        std::fs::create_dir(path.join("d")).unwrap();
        std::fs::write(path.join("d/big"), vec![1; 1 << 20]).unwrap();
        std::fs::hard_link(path.join("d/big"), path.join("again")).unwrap();
        std::os::unix::fs::symlink("/usr", path.join("link")).unwrap();
        let after = disk_usage(path);
        let grown = after.bytes - before.bytes;
        assert!((1 << 20..2 << 20).contains(&grown), "{grown}");
        assert_eq!(after.inodes, 4);
        assert_eq!(disk_usage(&path.join("d/big")).inodes, 1);
        assert_eq!(disk_usage(&path.join("link")).inodes, 1);
        assert_eq!(disk_usage(&path.join("none")), DiskUsage::default());
    }

    fn descend(top: &Path, name: &std::ffi::CStr, levels: usize, also: &[&std::ffi::CStr]) -> OwnedFd {
        let mut directory = openat(CWD, top, OPEN, Mode::empty()).unwrap();
        for _ in 0..levels {
            for name in also.iter().copied().chain([name]) {
                mkdirat(&directory, name, Mode::from_raw_mode(0o700)).unwrap();
            }
            directory = openat(&directory, name, OPEN, Mode::empty()).unwrap();
        }
        directory
    }

    /// Deeper than a path may be long, with more to read on each level after the way back.
    #[test]
    fn nothing_hides_deep_down() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let long = std::ffi::CString::new("d".repeat(200)).unwrap();
        let deepest = descend(dir.path(), &long, 300, &[c"a", c"z"]);
        let flags = OFlags::WRONLY | OFlags::CREATE;
        let file = openat(&deepest, c"hidden", flags, Mode::from_raw_mode(0o600)).unwrap();
        rustix::io::write(&file, &[1; 8192]).unwrap();
        assert_eq!(
            disk_usage(dir.path()),
            DiskUsage {
                bytes: 8192,
                inodes: 1 + 3 * 300 + 1
            }
        );
        assert_eq!(walk(dir.path(), 200).unwrap(), None, "too deep");
        crate::remove_tree(&dir.path().join(long.to_str().unwrap())).unwrap();
    }

    #[test]
    fn a_way_back_that_leads_elsewhere_is_noticed() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        std::fs::create_dir_all(one.join("child")).unwrap();
        std::fs::create_dir(&two).unwrap();
        let open = |path: &Path| Level::new(openat(CWD, path, OPEN, Mode::empty()).unwrap()).unwrap();
        let child = open(&one.join("child")).open.unwrap();
        assert!(reopen(&child, &open(&one)).is_some());
        std::fs::rename(one.join("child"), two.join("child")).unwrap();
        assert!(reopen(&child, &open(&one)).is_none());
    }
}
