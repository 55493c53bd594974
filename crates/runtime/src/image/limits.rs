//! What an image may cost. Images, their registries and archives are strangers': nothing of theirs is read
//! further than these limits, whatever it says about its own size.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// One set for a store; tests choose smaller ones.
#[derive(Debug, Clone)]
pub struct Limits {
    /// A manifest, an index or a configuration: all are held in memory.
    pub document_bytes: u64,
    /// The answer of a token server.
    pub token_bytes: u64,
    /// How long one of these may take from the request to its last byte.
    pub document_timeout: Duration,
    /// A layer that brings less than `slow_bytes` within `slow_window` is given up.
    pub slow_bytes: u64,
    pub slow_window: Duration,
    /// All layers of an image, or all files of an archive, as they come.
    pub packed_bytes: u64,
    /// The same unpacked.
    pub unpacked_bytes: u64,
    /// Files, directories and links of an image.
    pub files: u64,
    /// overlayfs takes no more.
    pub layers: usize,
    /// Room that stays free on the disk: it is also that of the cluster's state.
    pub free_bytes: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        const MIB: u64 = 1 << 20;
        const GIB: u64 = 1 << 30;
        Limits {
            document_bytes: 4 * MIB,
            token_bytes: MIB,
            document_timeout: Duration::from_secs(120),
            slow_bytes: 256 << 10,
            slow_window: Duration::from_secs(120),
            packed_bytes: 64 * GIB,
            unpacked_bytes: 128 * GIB,
            files: 4_000_000,
            layers: 500,
            free_bytes: 256 * MIB,
        }
    }
}

/// What is left of the limits while an image is unpacked.
pub(super) struct Budget {
    bytes: u64,
    files: u64,
    limits: Limits,
    disk: OwnedFd,
    unchecked_bytes: u64,
    unchecked_files: u64,
}

/// How much is written between two looks at the disk.
const CHECK_BYTES: u64 = 16 << 20;
const CHECK_FILES: u64 = 4096;

impl Budget {
    /// `directory` is on the disk that is written to.
    pub(super) fn new(limits: &Limits, directory: &Path) -> io::Result<Budget> {
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
        let mut budget = Budget {
            bytes: limits.unpacked_bytes,
            files: limits.files,
            limits: limits.clone(),
            disk: rustix::fs::open(directory, flags, rustix::fs::Mode::empty())?,
            unchecked_bytes: 0,
            unchecked_files: 0,
        };
        budget.check_disk()?;
        Ok(budget)
    }

    pub(super) fn take_file(&mut self) -> io::Result<()> {
        self.files = self.files.checked_sub(1).ok_or_else(|| {
            io::Error::other(format!("the image has more than {} files", self.limits.files))
        })?;
        self.unchecked_files += 1;
        self.check_disk_sometimes()
    }

    pub(super) fn take_bytes(&mut self, bytes: u64) -> io::Result<()> {
        self.bytes = self.bytes.checked_sub(bytes).ok_or_else(|| {
            io::Error::other(format!(
                "the image is larger than {} bytes when it is unpacked",
                self.limits.unpacked_bytes
            ))
        })?;
        self.unchecked_bytes += bytes;
        self.check_disk_sometimes()
    }

    fn check_disk_sometimes(&mut self) -> io::Result<()> {
        if self.unchecked_bytes >= CHECK_BYTES || self.unchecked_files >= CHECK_FILES {
            self.check_disk()?;
        }
        Ok(())
    }

    fn check_disk(&mut self) -> io::Result<()> {
        (self.unchecked_bytes, self.unchecked_files) = (0, 0);
        let stat = rustix::fs::fstatvfs(self.disk.as_fd())?;
        // A file system that counts no inodes says zero of zero.
        let full = stat.f_bavail.saturating_mul(stat.f_frsize) < self.limits.free_bytes
            || (stat.f_files > 0 && stat.f_favail < CHECK_FILES.min(stat.f_files / 100));
        if full {
            return Err(io::Error::new(
                io::ErrorKind::StorageFull,
                "the disk has too little room for the image",
            ));
        }
        Ok(())
    }
}

/// Reads at most so many bytes; more is an error and not an end.
pub(super) struct Limited<R> {
    pub(super) inner: R,
    pub(super) left: u64,
    pub(super) error: &'static str,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.left = self
            .left
            .checked_sub(length as u64)
            .ok_or_else(|| io::Error::other(self.error))?;
        Ok(length)
    }
}

/// Copies content to a file, paid from the budget as it comes.
pub(super) fn copy(from: &mut dyn Read, to: &mut dyn io::Write, budget: &mut Budget) -> io::Result<u64> {
    let mut buffer = vec![0u8; 128 << 10];
    let mut total = 0u64;
    loop {
        let length = match from.read(&mut buffer) {
            Ok(0) => return Ok(total),
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        budget.take_bytes(length as u64)?;
        to.write_all(&buffer[..length])?;
        total += length as u64;
    }
}
