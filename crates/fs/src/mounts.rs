//! The mounts below a directory: found in the kernel's table by the resolved path, and taken down.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

/// Unmounts everything below `directory`, the deepest first. A mount at `directory` itself is not ours to take
/// down and stays. A mount that is still in use is detached: it is out of reach afterwards, and goes with its
/// last user.
pub fn unmount_below(directory: &Path) -> io::Result<()> {
    let mut mounts = mounts_below(directory)?;
    // In the order of mounting, so that the reverse takes down a mount before the one it stands on.
    mounts.reverse();
    for mount in mounts {
        let result = unmount(&mount, UnmountFlags::NOFOLLOW)
            .or_else(|_| unmount(&mount, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW));
        match result {
            // Gone in the meantime, with a mount above it.
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(error) => {
                let error = io::Error::from(error);
                return Err(io::Error::new(
                    error.kind(),
                    format!("cannot unmount {}: {error}", mount.display()),
                ));
            }
        }
    }
    Ok(())
}

/// The mount points below `directory`, in the order of mounting. The kernel's table holds resolved paths, so the
/// given one is resolved first. A directory that does not exist has none.
pub fn mounts_below(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let directory = match directory.canonicalize() {
        Ok(directory) => directory,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    Ok(parse(&std::fs::read("/proc/self/mountinfo")?, &directory))
}

fn parse(mountinfo: &[u8], directory: &Path) -> Vec<PathBuf> {
    mountinfo
        .split(|byte| *byte == b'\n')
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(|field| PathBuf::from(OsString::from_vec(unescape(field))))
        .filter(|mount| mount != directory && mount.starts_with(directory))
        .collect()
}

/// mountinfo writes blanks, tabs, newlines and backslashes as three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let escaped = match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        out.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &rest[4..] } else { tail };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_read_in_order() {
        let text = b"22 1 0:21 / / rw - ext4 /dev/x rw\n\
            30 22 0:30 / /d/pods rw - tmpfs tmpfs rw\n\
            31 30 0:31 / /d/pods/a\\040b rw - tmpfs tmpfs rw\n\
            32 31 0:32 / /d/pods/a\\040b/\\134c rw - tmpfs tmpfs rw\n\
            33 22 0:33 / /d/pods-of-others rw - tmpfs tmpfs rw\n";
        assert_eq!(
            parse(text, Path::new("/d/pods")),
            [PathBuf::from("/d/pods/a b"), PathBuf::from("/d/pods/a b/\\c")]
        );
        assert!(mounts_below(Path::new("/nowhere/at/all")).unwrap().is_empty());
    }
}
