//! Unpacks a layer's tar stream into a directory for overlayfs. The stream is untrusted: every path is
//! resolved inside the directory (`openat2(RESOLVE_IN_ROOT)`), so neither `..` nor a symlink of the
//! layer leads out of it.

use super::limits::Budget;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, XattrFlags};
use rustix::io::Errno;
use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

const WHITEOUT_PREFIX: &[u8] = b".wh.";
const OPAQUE_MARKER: &[u8] = b".wh..wh..opq";

/// Long names and attributes of one entry. They are kept in memory, and a few bytes of a compressed layer
/// can unpack to any amount of them.
pub(super) const MAX_HEADERS: u64 = 4 * 1024 * 1024;

/// Counts what is read between two entries, where there are only headers.
pub(super) struct Metered<'a> {
    pub(super) inner: &'a mut dyn Read,
    /// `None` while an entry's content is read.
    pub(super) left: Rc<Cell<Option<u64>>>,
}

impl Read for Metered<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        if let Some(left) = self.left.get() {
            let left = left
                .checked_sub(length as u64)
                .ok_or_else(|| io::Error::other("an entry's headers are too long"))?;
            self.left.set(Some(left));
        }
        Ok(length)
    }
}

/// Names of directories are kept until the end, so they have a limit of their own.
const MAX_DIRECTORY_NAMES: usize = 64 * 1024 * 1024;

/// Unpacks `stream` (uncompressed) into `directory`, paid from `budget`.
pub(super) fn unpack(stream: &mut dyn Read, directory: &Path, budget: &mut Budget) -> io::Result<()> {
    let root = rustix::fs::open(
        directory,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let headers_left = Rc::new(Cell::new(Some(MAX_HEADERS)));
    let mut archive = tar::Archive::new(Metered {
        inner: stream,
        left: headers_left.clone(),
    });
    // A directory's times and mode are set last: what is unpacked into it changes the former, and the
    // latter may forbid it.
    let mut directories: Vec<(PathBuf, Attributes)> = Vec::new();
    let mut directory_names = 0;
    for entry in archive.entries()? {
        let mut entry = entry?;
        headers_left.set(None);
        let path = clean(&entry.path_bytes())?;
        budget.take_file()?;
        let kept = directories.len();
        unpack_entry(root.as_fd(), &mut entry, &path, &mut directories, budget)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
        if let Some((_, attributes)) = directories.get(kept) {
            let attributes = attributes
                .xattrs
                .iter()
                .map(|(name, value)| name.len() + value.len());
            directory_names += path.as_os_str().len() + attributes.sum::<usize>();
            if directory_names > MAX_DIRECTORY_NAMES {
                return Err(io::Error::other("the layer has too many directories"));
            }
        }
        // Content of entries that have no use for any.
        io::copy(&mut entry, &mut io::sink())?;
        headers_left.set(Some(MAX_HEADERS));
    }
    for (path, attributes) in directories.iter().rev() {
        let open = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Gone again if a later entry replaced it.
        if let Ok(directory) = rustix::fs::openat2(&root, path, open, Mode::empty(), inside()) {
            attributes.apply(directory.as_fd())?;
        }
    }
    Ok(())
}

fn inside() -> ResolveFlags {
    ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS
}

/// A path of the archive relative to the root. `..` cannot leave the root when it is resolved, but no
/// honest layer has it.
fn clean(bytes: &[u8]) -> io::Result<PathBuf> {
    let mut clean = PathBuf::new();
    for component in Path::new(OsStr::from_bytes(bytes)).components() {
        match component {
            Component::Normal(part) => clean.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(io::Error::other(format!(
                    "layer holds the path {:?}",
                    String::from_utf8_lossy(bytes)
                )));
            }
        }
    }
    Ok(clean)
}

struct Attributes {
    mode: u32,
    uid: u32,
    gid: u32,
    mtime: i64,
    xattrs: Vec<(String, Vec<u8>)>,
}

impl Attributes {
    /// Owner first: changing it clears setuid bits and file capabilities.
    fn apply(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let (uid, gid) = (
            rustix::fs::Uid::from_raw(self.uid),
            rustix::fs::Gid::from_raw(self.gid),
        );
        rustix::fs::fchown(fd, Some(uid), Some(gid))?;
        rustix::fs::fchmod(fd, Mode::from_raw_mode(self.mode))?;
        for (name, value) in &self.xattrs {
            match rustix::fs::fsetxattr(fd, name.as_str(), value, XattrFlags::empty()) {
                // A file system without this kind of attribute can hold the image all the same.
                Ok(()) | Err(Errno::NOTSUP | Errno::PERM) => {}
                Err(error) => return Err(error.into()),
            }
        }
        rustix::fs::futimens(fd, &self.times())?;
        Ok(())
    }

    fn times(&self) -> rustix::fs::Timestamps {
        let time = rustix::fs::Timespec {
            tv_sec: self.mtime,
            tv_nsec: 0,
        };
        rustix::fs::Timestamps {
            last_access: time,
            last_modification: time,
        }
    }

    fn apply_to_link(&self, parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
        let (uid, gid) = (
            rustix::fs::Uid::from_raw(self.uid),
            rustix::fs::Gid::from_raw(self.gid),
        );
        rustix::fs::chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        rustix::fs::utimensat(parent, name, &self.times(), AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    }
}

fn attributes<R: Read>(entry: &mut tar::Entry<'_, R>) -> io::Result<Attributes> {
    let mut xattrs = Vec::new();
    if let Some(extensions) = entry.pax_extensions()? {
        for extension in extensions {
            let extension = extension?;
            if let Some(name) = extension
                .key()
                .ok()
                .and_then(|key| key.strip_prefix("SCHILY.xattr."))
            {
                // The overlay's own marks must come from whiteouts, never from an image.
                if !name.starts_with("trusted.overlay.") && !name.starts_with("user.overlay.") {
                    xattrs.push((name.to_owned(), extension.value_bytes().to_vec()));
                }
            }
        }
    }
    let header = entry.header();
    let narrow = |value: u64| u32::try_from(value).map_err(io::Error::other);
    Ok(Attributes {
        mode: header.mode()? & 0o7777,
        uid: narrow(header.uid()?)?,
        gid: narrow(header.gid()?)?,
        mtime: i64::try_from(header.mtime()?).unwrap_or(0),
        xattrs,
    })
}

fn unpack_entry<R: Read>(
    root: BorrowedFd<'_>,
    entry: &mut tar::Entry<'_, R>,
    path: &Path,
    directories: &mut Vec<(PathBuf, Attributes)>,
    budget: &mut Budget,
) -> io::Result<()> {
    let attributes = attributes(entry)?;
    let Some(name) = path.file_name() else {
        // The root itself.
        directories.push((PathBuf::from("/"), attributes));
        return Ok(());
    };
    let parent_path = path.parent().unwrap_or(Path::new(""));
    let parent = make_parents(root, parent_path)?;
    let parent = parent.as_fd();

    if name.as_bytes() == OPAQUE_MARKER {
        let open = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat2(root, dot_if_empty(parent_path), open, Mode::empty(), inside())?;
        rustix::fs::fsetxattr(&directory, "trusted.overlay.opaque", b"y", XattrFlags::empty())?;
        return Ok(());
    }
    if let Some(hidden) = name.as_bytes().strip_prefix(WHITEOUT_PREFIX) {
        if hidden.is_empty() || hidden == b"." || hidden == b".." {
            return Err(io::Error::other("not a whiteout"));
        }
        if hidden.starts_with(WHITEOUT_PREFIX) {
            return Ok(()); // aufs' own bookkeeping
        }
        let hidden = OsStr::from_bytes(hidden);
        remove_existing(parent, hidden)?;
        rustix::fs::mknodat(parent, hidden, FileType::CharacterDevice, Mode::empty(), 0)?;
        return Ok(());
    }

    let kind = entry.header().entry_type();
    if kind.is_dir() {
        match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700)) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let existing = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
                if FileType::from_raw_mode(existing.st_mode) != FileType::Directory {
                    rustix::fs::unlinkat(parent, name, AtFlags::empty())?;
                    rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700))?;
                }
            }
            Err(error) => return Err(error.into()),
        }
        directories.push((path.to_owned(), attributes));
        return Ok(());
    }
    remove_existing(parent, name)?;
    if kind.is_symlink() {
        let target = link_target(entry)?;
        rustix::fs::symlinkat(OsStr::from_bytes(&target), parent, name)?;
        attributes.apply_to_link(parent, name)?;
        return Ok(());
    }
    if kind.is_hard_link() {
        let target = clean(&link_target(entry)?)?;
        let Some(target_name) = target.file_name() else {
            return Err(io::Error::other("hard link to the root"));
        };
        let target_parent = open_directory(root, target.parent().unwrap_or(Path::new("")))?;
        rustix::fs::linkat(&target_parent, target_name, parent, name, AtFlags::empty())?;
        return Ok(());
    }
    let mode = Mode::from_raw_mode(0o600);
    let special = match kind {
        tar::EntryType::Char => Some(FileType::CharacterDevice),
        tar::EntryType::Block => Some(FileType::BlockDevice),
        tar::EntryType::Fifo => Some(FileType::Fifo),
        _ => None,
    };
    if let Some(special) = special {
        let header = entry.header();
        // A pipe has no numbers, and some tools leave the fields empty.
        let device = if special == FileType::Fifo {
            0
        } else {
            let major = header.device_major()?.unwrap_or(0);
            let minor = header.device_minor()?.unwrap_or(0);
            rustix::fs::makedev(major, minor)
        };
        rustix::fs::mknodat(parent, name, special, mode, device)?;
        let (uid, gid) = (
            rustix::fs::Uid::from_raw(attributes.uid),
            rustix::fs::Gid::from_raw(attributes.gid),
        );
        rustix::fs::chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        rustix::fs::chmodat(
            parent,
            name,
            Mode::from_raw_mode(attributes.mode),
            AtFlags::empty(),
        )?;
        return Ok(());
    }
    if !kind.is_file() && !kind.is_contiguous() && !kind.is_gnu_sparse() {
        return Ok(()); // headers of other sorts carry no file
    }
    let open = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(parent, name, open, mode)?);
    super::limits::copy(entry, &mut file, budget)?;
    attributes.apply(file.as_fd())
}

fn link_target<R: Read>(entry: &tar::Entry<'_, R>) -> io::Result<Vec<u8>> {
    match entry.link_name_bytes() {
        Some(target) if !target.is_empty() => Ok(target.into_owned()),
        _ => Err(io::Error::other("link without a target")),
    }
}

fn dot_if_empty(path: &Path) -> &Path {
    if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    }
}

fn open_directory(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    let open = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(
        root,
        dot_if_empty(path),
        open,
        Mode::empty(),
        inside(),
    )?)
}

/// Layers made by tools often leave out parents that a lower layer has.
fn make_parents(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    match open_directory(root, path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        result => return result,
    }
    let above = match path.parent() {
        Some(above) => make_parents(root, above)?,
        None => return open_directory(root, Path::new("")),
    };
    if let Some(name) = path.file_name() {
        match rustix::fs::mkdirat(&above, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    open_directory(root, path)
}

/// A later entry of the same name replaces the earlier.
fn remove_existing(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::ISDIR) => {
            // The parent was opened inside the root, so this path stays there.
            use std::os::fd::AsRawFd;
            let path = PathBuf::from(format!("/proc/self/fd/{}", parent.as_raw_fd())).join(name);
            skiff_fs::remove_tree(&path)
        }
        Err(error) => Err(error.into()),
    }
}

/// A fresh directory for a layer, readable as an image's root must be.
pub fn make_layer_directory(path: &Path) -> io::Result<()> {
    rustix::fs::mkdirat(CWD, path, Mode::from_raw_mode(0o755))?;
    Ok(rustix::fs::chmod(path, Mode::from_raw_mode(0o755))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(entries: &[(&str, tar::EntryType, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, kind, content) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(1);
            // Set raw: the library itself refuses paths that must be tested.
            header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
            let body: &[u8] = if kind.is_file() { content.as_bytes() } else { b"" };
            if !kind.is_file() && !content.is_empty() {
                header.as_old_mut().linkname[..content.len()].copy_from_slice(content.as_bytes());
            }
            header.set_size(body.len() as u64);
            header.set_cksum();
            builder.append(&header, body).expect("append");
        }
        builder.into_inner().expect("tar")
    }

    use tar::EntryType::{Directory, Link, Regular, Symlink};

    fn unpack_all(stream: &mut dyn Read, directory: &Path) -> io::Result<()> {
        let limits = super::super::limits::Limits::default();
        unpack(stream, directory, &mut Budget::new(&limits, directory)?)
    }

    #[test]
    fn stays_inside() {
        let outside = tempfile::tempdir().expect("dir");
        let secret = outside.path().join("secret");
        std::fs::write(&secret, "secret").expect("write");
        let absolute = outside.path().to_str().expect("utf-8").to_owned();
        let check = |entries: &[(&str, tar::EntryType, &str)]| {
            let layer = tempfile::tempdir().expect("dir");
            let _ = unpack_all(&mut archive(entries).as_slice(), layer.path());
            assert_eq!(
                std::fs::read_to_string(&secret).expect("read"),
                "secret",
                "{entries:?}"
            );
            assert_eq!(
                std::fs::read_dir(outside.path()).expect("list").count(),
                1,
                "{entries:?}"
            );
        };
        check(&[("../escape", Regular, "x")]);
        check(&[
            ("up", Symlink, &absolute),
            ("up/escape", Regular, "x"),
            ("up/secret", Regular, "x"),
        ]);
        check(&[("a", Symlink, &absolute), ("a/.wh.secret", Regular, "")]);
        check(&[
            ("a", Symlink, &absolute),
            ("b", Link, "a/secret"),
            ("b", Regular, "x"),
        ]);
        check(&[
            ("a", Symlink, "../../../../../../../.."),
            ("a/tmp/escape", Regular, "x"),
        ]);
    }

    #[test]
    fn long_headers_are_refused() {
        let check = |length: usize, expected: bool| {
            let mut builder = tar::Builder::new(Vec::new());
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::GNULongName);
            header.set_size(length as u64);
            header.set_cksum();
            builder
                .append(&header, vec![b'n'; length].as_slice())
                .expect("append");
            let mut bytes = builder.into_inner().expect("tar");
            bytes.truncate(bytes.len() - 1024);
            bytes.extend(archive(&[("f", Regular, "x")]));
            let layer = tempfile::tempdir().expect("dir");
            let result = unpack_all(&mut bytes.as_slice(), layer.path());
            assert_eq!(result.is_ok(), expected, "{length}: {result:?}");
        };
        check(200, true);
        check(5 * 1024 * 1024, false);
    }

    /// Any bytes at all end in an answer.
    #[test]
    fn garbage() {
        let good = archive(&[
            ("d", Directory, ""),
            ("d/f", Regular, "hello"),
            ("l", Symlink, "d/f"),
        ]);
        for round in 0..300 {
            let mut bytes = if round % 2 == 0 {
                good.clone()
            } else {
                vec![0; 2048]
            };
            for _ in 0..1 + round % 8 {
                let at = rand::random::<u32>() as usize % bytes.len();
                bytes[at] = rand::random();
            }
            bytes.truncate(1 + rand::random::<u32>() as usize % bytes.len());
            let layer = tempfile::tempdir().expect("dir");
            let _ = unpack_all(&mut bytes.as_slice(), layer.path());
        }
    }

    #[test]
    fn whiteouts_and_links() {
        let layer = tempfile::tempdir().expect("dir");
        let bytes = archive(&[
            ("d", Directory, ""),
            ("d/f", Regular, "hello"),
            ("d/h", Link, "d/f"),
            ("d/.wh.gone", Regular, ""),
            ("d/f", Regular, "again"),
        ]);
        let result = unpack_all(&mut bytes.as_slice(), layer.path());
        if !rustix::process::geteuid().is_root() {
            return;
        }
        result.expect("unpacks");
        assert_eq!(
            std::fs::read_to_string(layer.path().join("d/f")).expect("read"),
            "again"
        );
        assert_eq!(
            std::fs::read_to_string(layer.path().join("d/h")).expect("read"),
            "hello"
        );
        use std::os::unix::fs::{FileTypeExt, MetadataExt};
        let gone = std::fs::symlink_metadata(layer.path().join("d/gone")).expect("whiteout");
        assert!(gone.file_type().is_char_device());
        assert_eq!(gone.rdev(), 0);
    }
}
