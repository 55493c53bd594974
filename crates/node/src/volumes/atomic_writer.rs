//! Writes a set of files into a volume so that a reader sees all of the old set or all of the new one: the
//! files live in a time-stamped directory, `..data` points to it, and a rename of that link is the switch.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

use k8s_openapi::jiff::Timestamp;

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    pub data: Vec<u8>,
    pub mode: u32,
    /// The user the file shall belong to, if not root.
    pub owner: Option<u32>,
}

pub type Payload = BTreeMap<String, File>;

/// Brings `target` to hold exactly `payload`; `set_permissions` runs on the whole volume before the switch.
/// Returns whether anything changed.
pub fn write(
    target: &Path,
    payload: &Payload,
    set_permissions: impl Fn() -> io::Result<()>,
) -> io::Result<bool> {
    for path in payload.keys() {
        check_path(path)?;
    }
    let old = match std::fs::read_link(target.join(DATA)) {
        // Only what this file makes: what a link of somebody else's leads to is neither read nor removed.
        Ok(link) => Some(link).filter(|link| is_own_name(link)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    let old_dir = old.as_ref().map(|name| target.join(name));
    if let Some(old_dir) = &old_dir
        && holds(old_dir, payload)?
    {
        link_visible(target, payload)?;
        return Ok(false);
    }
    let new_name = write_new_directory(target, payload)?;
    set_permissions()?;
    let temporary = target.join(NEW_DATA);
    let _ = std::fs::remove_file(&temporary);
    symlink(&new_name, &temporary)?;
    std::fs::rename(&temporary, target.join(DATA))?;
    link_visible(target, payload)?;
    remove_stale(target, payload)?;
    if let Some(old_dir) = old_dir {
        skiff_fs::remove_tree(&old_dir)?;
    }
    Ok(true)
}

/// The name of a directory as `write_new_directory` gives it.
fn is_own_name(link: &Path) -> bool {
    let name = link.to_str().unwrap_or_default();
    name.starts_with("..") && name.len() > 2 && !name.contains('/')
}

/// A path must stay inside the volume, and names beginning with `..` are ours.
fn check_path(path: &str) -> io::Result<()> {
    let invalid = |why: &str| {
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("invalid path: {why}: {path}"),
        ))
    };
    if path.is_empty() || path.starts_with('/') {
        return invalid("must be relative");
    }
    if path.starts_with("..") {
        return invalid("must not start with '..'");
    }
    if Path::new(path)
        .components()
        .any(|c| !matches!(c, Component::Normal(_) | Component::CurDir))
    {
        return invalid("must not contain '..'");
    }
    Ok(())
}

fn write_new_directory(target: &Path, payload: &Payload) -> io::Result<String> {
    let now = Timestamp::now();
    let stamp = now.strftime("..%Y_%m_%d_%H_%M_%S").to_string();
    let mut attempt = now.subsec_nanosecond();
    let name = loop {
        let name = format!("{stamp}.{attempt}");
        match std::fs::create_dir(target.join(&name)) {
            Ok(()) => break name,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => attempt += 1,
            Err(e) => return Err(e),
        }
    };
    let directory = target.join(&name);
    match fill(&directory, payload) {
        Ok(()) => Ok(name),
        Err(error) => {
            // A full disk must not be filled further by each attempt.
            let _ = skiff_fs::remove_tree(&directory);
            Err(error)
        }
    }
}

fn fill(directory: &Path, payload: &Payload) -> io::Result<()> {
    std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o755))?;
    for (path, file) in payload {
        let full = directory.join(path);
        if let Some(parent) = full.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(&full, &file.data)?;
        // The umask must not have a say in what the user asked for.
        std::fs::set_permissions(&full, std::fs::Permissions::from_mode(file.mode))?;
        if let Some(owner) = file.owner {
            std::os::unix::fs::chown(&full, Some(owner), None)?;
        }
    }
    Ok(())
}

/// The files of a volume directory, relative to it.
fn files_below(directory: &Path) -> io::Result<BTreeSet<PathBuf>> {
    let mut files = BTreeSet::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(relative) = pending.pop() {
        for entry in std::fs::read_dir(directory.join(&relative))? {
            let entry = entry?;
            let path = relative.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                pending.push(path);
            } else {
                files.insert(path);
            }
        }
    }
    Ok(files)
}

fn holds(directory: &Path, payload: &Payload) -> io::Result<bool> {
    let present = match files_below(directory) {
        Ok(present) => present,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e),
    };
    if present.len() != payload.len() {
        return Ok(false);
    }
    for (path, file) in payload {
        let full = directory.join(path);
        match std::fs::read(&full) {
            Ok(data) if data == file.data => {}
            Ok(_) => return Ok(false),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

fn visible_names(payload: &Payload) -> BTreeSet<&str> {
    payload
        .keys()
        .filter_map(|path| path.split('/').find(|part| !part.is_empty() && *part != "."))
        .collect()
}

fn link_visible(target: &Path, payload: &Payload) -> io::Result<()> {
    for name in visible_names(payload) {
        let link = target.join(name);
        if link.symlink_metadata().is_err() {
            symlink(Path::new(DATA).join(name), link)?;
        }
    }
    Ok(())
}

fn remove_stale(target: &Path, payload: &Payload) -> io::Result<()> {
    let wanted = visible_names(payload);
    for entry in std::fs::read_dir(target)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !name.starts_with("..") && !wanted.contains(name.as_ref()) && entry.file_type()?.is_symlink() {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(files: &[(&str, &str)]) -> Payload {
        files
            .iter()
            .map(|(p, d)| {
                (
                    (*p).to_owned(),
                    File {
                        data: d.as_bytes().to_vec(),
                        mode: 0o640,
                        owner: None,
                    },
                )
            })
            .collect()
    }

    fn write_to(dir: &Path, files: &[(&str, &str)]) -> bool {
        write(dir, &payload(files), || Ok(())).unwrap()
    }

    #[test]
    fn layout_and_updates() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        assert!(write_to(dir, &[("a", "1"), ("sub/b", "2")]));
        assert_eq!(std::fs::read_to_string(dir.join("a")).unwrap(), "1");
        assert_eq!(std::fs::read_link(dir.join("a")).unwrap(), Path::new("..data/a"));
        assert_eq!(
            std::fs::read_link(dir.join("sub")).unwrap(),
            Path::new("..data/sub")
        );
        assert_eq!(
            std::fs::metadata(dir.join("a")).unwrap().permissions().mode() & 0o777,
            0o640
        );
        let first = std::fs::read_link(dir.join(DATA)).unwrap();

        assert!(!write_to(dir, &[("a", "1"), ("sub/b", "2")]), "nothing changed");
        assert_eq!(std::fs::read_link(dir.join(DATA)).unwrap(), first);

        assert!(write_to(dir, &[("a", "9"), ("c", "3")]));
        assert_eq!(std::fs::read_to_string(dir.join("a")).unwrap(), "9");
        assert!(dir.join("sub").symlink_metadata().is_err());
        assert!(!dir.join(first).exists());
        assert!(write_to(dir, &[]));
        assert!(dir.join("a").symlink_metadata().is_err());
    }

    #[test]
    fn paths_stay_inside() {
        let dir = tempfile::tempdir().unwrap();
        for bad in ["", "/etc/passwd", "../x", "a/../../x", "..data", "..x"] {
            assert!(
                write(dir.path(), &payload(&[(bad, "x")]), || Ok(())).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_link_of_somebody_else_is_replaced_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (volume, host) = (dir.path().join("volume"), dir.path().join("host"));
        std::fs::create_dir_all(&volume).unwrap();
        std::fs::create_dir_all(&host).unwrap();
        std::fs::write(host.join("precious"), "x").unwrap();
        let file = File {
            data: b"v".to_vec(),
            mode: 0o644,
            owner: None,
        };
        let payload = Payload::from([("key".to_owned(), file)]);
        for link in [host.clone(), PathBuf::from("../host"), PathBuf::from("..")] {
            let _ = std::fs::remove_file(volume.join(DATA));
            symlink(&link, volume.join(DATA)).unwrap();
            assert!(write(&volume, &payload, || Ok(())).unwrap());
            assert!(host.join("precious").exists(), "{}", link.display());
            assert_eq!(std::fs::read(volume.join("key")).unwrap(), b"v");
        }
    }
}
