//! Room on the disk that is kept for the store. Images, logs and volumes fill the same disk; when it is full the room
//! is given back bit by bit, to writes that make the store smaller or barely larger. Everything else is refused until
//! the reserve could be made whole again.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;

/// Bytes that are kept; less on a small disk. Half of it is more than the write-ahead log, which has to be copied into
/// the database, and grows it, before its room can be used again.
const RESERVE: u64 = 32 << 20;
/// A small disk gives this part of itself.
const SHARE: u64 = 4;
/// What is given back at a time.
const STEP: u64 = 1 << 20;
const PAGE: u64 = 4096;
const FILE: &str = "reserve";

pub struct Reserve {
    file: PathBuf,
    wanted: u64,
    held: u64,
}

impl Reserve {
    /// Takes what the disk has to give.
    pub fn open(dir: &Path) -> Reserve {
        let wanted = RESERVE.min(total(dir) / SHARE / PAGE * PAGE);
        let file = dir.join(FILE);
        let held = fs::metadata(&file).map_or(0, |found| found.len().min(wanted));
        let mut reserve = Reserve { file, wanted, held };
        if !reserve.refill() {
            tracing::warn!(dir = %dir.display(), held = reserve.held, wanted, "the disk has no room for the store's reserve");
        }
        reserve
    }

    fn resize(&self, size: u64) -> std::io::Result<()> {
        let file: File = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&self.file)?;
        if file.metadata()?.len() > size {
            file.set_len(size)?;
        } else if size > 0 {
            fallocate(&file, FallocateFlags::empty(), 0, size)?;
        }
        Ok(())
    }

    pub fn is_whole(&self) -> bool {
        self.held >= self.wanted
    }

    /// Makes the reserve whole, if the disk has room.
    pub fn refill(&mut self) -> bool {
        match self.resize(self.wanted) {
            Ok(()) => self.held = self.wanted,
            // An allocation that failed may have left a part.
            Err(error) if is_full(&error) => {
                let _ = self.resize(self.held);
            }
            // Not for want of room: there are file systems that cannot allocate. The store works without a reserve.
            Err(error) => {
                tracing::warn!(file = %self.file.display(), %error, "the store has no reserve on this disk");
                (self.wanted, self.held) = (0, 0);
                let _ = fs::remove_file(&self.file);
            }
        }
        self.is_whole()
    }

    /// Gives some room back to the disk, as long as more than this part of the reserve is left.
    pub fn release(&mut self, keep: Keep) -> bool {
        let floor = match keep {
            Keep::Nothing => 0,
            Keep::Half => self.wanted / 2,
        };
        let left = self.held.saturating_sub(STEP).max(floor);
        if left >= self.held || self.resize(left).is_err() {
            return false;
        }
        self.held = left;
        tracing::warn!(left, "the disk is full: the store uses its reserve");
        true
    }
}

/// Bytes that are free on the disk of a folder.
pub fn free(dir: &Path) -> u64 {
    statvfs(dir).map_or(0, |found| found.f_bavail.saturating_mul(found.f_frsize))
}

/// Bytes that the disk of a folder has.
pub fn total(dir: &Path) -> u64 {
    statvfs(dir).map_or(0, |found| found.f_blocks.saturating_mul(found.f_frsize))
}

fn is_full(error: &std::io::Error) -> bool {
    [Errno::NOSPC, Errno::DQUOT]
        .iter()
        .any(|full| error.raw_os_error() == Some(full.raw_os_error()))
}

/// What a write leaves of the reserve.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// A deletion may use all of it.
    Nothing,
    /// A change that barely grows, such as marking an object as being deleted.
    Half,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_back_in_steps_and_taken_again() {
        let dir = tempfile::tempdir().unwrap();
        let size = || fs::metadata(dir.path().join(FILE)).unwrap().len();
        let mut reserve = Reserve::open(dir.path());
        assert!(reserve.is_whole());
        assert_eq!(size(), RESERVE);
        while reserve.release(Keep::Half) {}
        assert_eq!(size(), RESERVE / 2);
        while reserve.release(Keep::Nothing) {}
        assert_eq!(size(), 0);
        assert!(!reserve.is_whole());
        assert!(reserve.refill());
        assert_eq!(size(), RESERVE);
    }
}
