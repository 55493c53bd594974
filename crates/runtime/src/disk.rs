//! Small records on disk: written whole or not at all, and safe to read at any moment. They hold the
//! environment of containers, so nobody but root may read them.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::Path;

/// Replaces `path` in one step. Not synced: records of pods and containers describe processes, which a
/// power cut ends anyway.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let body = serde_json::to_vec(value).map_err(io::Error::other)?;
    write_bytes(path, &body, false)
}

/// `sync` where the content must survive a power cut: images.
pub fn write_bytes(path: &Path, body: &[u8], sync: bool) -> io::Result<()> {
    if sync {
        skiff_fs::write_durably(path, body, 0o600)
    } else {
        skiff_fs::write_atomically(path, body, 0o600)
    }
}

/// `None` where there is no such file.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match std::fs::read(path) {
        Ok(body) => serde_json::from_slice(&body).map(Some).map_err(io::Error::other),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
