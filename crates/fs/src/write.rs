//! Replaces files in one step, so that a reader or a crash finds the old content or the new one, never a part.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Replaces `path` by a file with this content and mode. When it returns, the content survives a power cut.
pub fn write_durably(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    replace(path, content, mode, true)?;
    sync_folder(folder_of(path))
}

/// Replaces `path` like [`write_durably`], without waiting for the disk: for what need not survive a power cut.
pub fn write_atomically(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    replace(path, content, mode, false)
}

/// Makes the names in a folder survive a power cut: those that were made, renamed or removed before.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Makes a folder with its missing parents, all with this mode. When it returns, they survive a power cut.
pub fn create_folders_durably(path: &Path, mode: u32) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = folder_of(path);
    create_folders_durably(parent, mode)?;
    match DirBuilder::new().mode(mode).create(path) {
        Ok(()) => sync_folder(parent),
        // Made by somebody else in the meantime.
        Err(_) if path.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn replace(path: &Path, content: &[u8], mode: u32, sync: bool) -> io::Result<()> {
    let Some(name) = path.file_name() else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not the name of a file",
        ));
    };
    let mut temporary_name = name.to_owned();
    temporary_name.push(format!(".{:016x}.tmp", rand::random::<u64>()));
    let temporary: PathBuf = path.with_file_name(temporary_name);
    let result = (|| {
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temporary)?;
        // The umask took its share.
        file.set_permissions(std::fs::Permissions::from_mode(mode))?;
        file.write_all(content)?;
        if sync {
            file.sync_all()?;
        }
        std::fs::rename(&temporary, path)
    })();
    if result.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_and_mode_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        create_folders_durably(&folder, 0o700).unwrap();
        create_folders_durably(&folder, 0o700).unwrap();
        let path = folder.join("file");
        for (content, mode) in [("one", 0o600), ("two", 0o644)] {
            write_durably(&path, content.as_bytes(), mode).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, mode);
        }
        write_atomically(&path, b"three", 0o600).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn a_failure_leaves_the_old_content_and_no_debris() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("folder");
        std::fs::create_dir(&path).unwrap();
        assert!(write_durably(&path, b"x", 0o600).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
