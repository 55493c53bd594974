//! The files that a container has made, changed or removed, as a layer of an image. The container may go on changing them, and may put
//! a link in the place of a directory: they are walked by descriptors, and no link is followed.

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, readlinkat, statat};
use std::ffi::{CString, OsStr};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use tar::{Builder, EntryType, Header};

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// The longest path of a file in the layer, and the bytes of the paths of directories that wait. A container with more has
/// no checkpoint.
const MAX_PATH: usize = 4096;
const MAX_WAITING: usize = 64 << 20;
/// What a directory that waits takes beside its path.
const WAITING_SIZE: usize = 128;

struct Waiting {
    parent: Rc<OwnedFd>,
    name: CString,
    path: PathBuf,
}

/// Writes what is in an overlay's upper directory.
pub(super) fn write_layer(upper: &Path, to: impl Write) -> io::Result<()> {
    let mut layer = Builder::new(to);
    let mut waiting: Vec<Waiting> = Vec::new();
    let mut waiting_size = 0;
    let mut current = Some((openat(CWD, upper, DIRECTORY, Mode::empty())?, PathBuf::new()));
    while let Some((directory, path)) = current.take() {
        if is_opaque(&directory) {
            let mut header = Header::new_gnu();
            header.set_mode(0o600);
            header.set_size(0);
            layer.append_data(&mut header, path.join(".wh..wh..opq"), io::empty())?;
        }
        let directory = Rc::new(directory);
        for entry in Dir::read_from(&*directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let path = path.join(OsStr::from_bytes(name.to_bytes()));
            if path.as_os_str().len() > MAX_PATH {
                return Err(io::Error::other(
                    "the path of a file in the container is too long",
                ));
            }
            if append(&mut layer, &directory, name, &path)? {
                waiting_size += path.as_os_str().len() + WAITING_SIZE;
                if waiting_size > MAX_WAITING {
                    return Err(io::Error::other("the container has made too many directories"));
                }
                waiting.push(Waiting {
                    parent: directory.clone(),
                    name: name.to_owned(),
                    path,
                });
            }
        }
        drop(directory);
        while current.is_none()
            && let Some(next) = waiting.pop()
        {
            waiting_size -= next.path.as_os_str().len() + WAITING_SIZE;
            // One that was removed or replaced meanwhile is left out.
            current = openat(&*next.parent, &next.name, DIRECTORY, Mode::empty())
                .ok()
                .map(|directory| (directory, next.path));
        }
    }
    layer.finish()
}

fn is_opaque(directory: &OwnedFd) -> bool {
    let mut value = [0u8; 1];
    rustix::fs::fgetxattr(directory, "trusted.overlay.opaque", &mut value[..]).is_ok() && value == *b"y"
}

/// Says whether the entry is a directory.
fn append(
    layer: &mut Builder<impl Write>,
    directory: &OwnedFd,
    name: &std::ffi::CStr,
    path: &Path,
) -> io::Result<bool> {
    // What goes away meanwhile is left out.
    let Ok(mut stat) = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) else {
        return Ok(false);
    };
    let kind = FileType::from_raw_mode(stat.st_mode);
    let mut header = Header::new_gnu();
    let mut file = None;
    if kind == FileType::RegularFile {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(opened) = openat(directory, name, flags, Mode::empty()) else {
            return Ok(false);
        };
        stat = rustix::fs::fstat(&opened)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(false);
        }
        file = Some(std::fs::File::from(opened));
    }
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(stat.st_uid.into());
    header.set_gid(stat.st_gid.into());
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    match kind {
        FileType::RegularFile => {
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            header.set_size(size);
            // A file that shrinks is filled up, one that grows is cut: the header has the size already.
            let content = file
                .into_iter()
                .fold(Box::new(io::repeat(0)) as Box<dyn Read>, |rest, file| {
                    Box::new(file.chain(rest))
                });
            layer.append_data(&mut header, path, content.take(size))?;
        }
        FileType::Directory => {
            header.set_entry_type(EntryType::Directory);
            layer.append_data(&mut header, path, io::empty())?;
            return Ok(true);
        }
        FileType::Symlink => {
            let Ok(target) = readlinkat(directory, name, Vec::new()) else {
                return Ok(false);
            };
            header.set_entry_type(EntryType::Symlink);
            layer.append_link(&mut header, path, OsStr::from_bytes(target.to_bytes()))?;
        }
        // The overlay's mark of a removed file.
        FileType::CharacterDevice if (major, minor) == (0, 0) => {
            let mut mark = b".wh.".to_vec();
            mark.extend_from_slice(name.to_bytes());
            header.set_mode(0o600);
            layer.append_data(
                &mut header,
                path.with_file_name(OsStr::from_bytes(&mark)),
                io::empty(),
            )?;
        }
        FileType::CharacterDevice | FileType::BlockDevice | FileType::Fifo => {
            header.set_entry_type(match kind {
                FileType::CharacterDevice => EntryType::Char,
                FileType::BlockDevice => EntryType::Block,
                _ => EntryType::Fifo,
            });
            if kind != FileType::Fifo {
                header.set_device_major(major)?;
                header.set_device_minor(minor)?;
            }
            layer.append_data(&mut header, path, io::empty())?;
        }
        // A socket belongs to its process.
        _ => {}
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_no_link_and_marks_what_is_removed() {
        let upper = tempfile::tempdir().expect("a directory");
        let outside = tempfile::tempdir().expect("a directory");
        std::fs::write(outside.path().join("secret"), "s").expect("works");
        std::os::unix::fs::symlink(outside.path(), upper.path().join("link")).expect("works");
        std::fs::create_dir_all(upper.path().join("a/b")).expect("works");
        std::fs::write(upper.path().join("a/b/file"), "content").expect("works");
        let whiteout = rustix::fs::mknodat(
            CWD,
            upper.path().join("a/gone"),
            FileType::CharacterDevice,
            Mode::empty(),
            0,
        );
        let mut layer = Vec::new();
        write_layer(upper.path(), &mut layer).expect("works");
        let mut found = Vec::new();
        for entry in tar::Archive::new(layer.as_slice()).entries().expect("entries") {
            let mut entry = entry.expect("entry");
            let mut content = String::new();
            entry.read_to_string(&mut content).expect("reads");
            found.push((entry.path().expect("path").display().to_string(), content));
        }
        found.sort();
        let mut expected = vec![
            ("a", ""),
            ("a/.wh.gone", ""),
            ("a/b", ""),
            ("a/b/file", "content"),
            ("link", ""),
        ];
        // Without root there are no device nodes, not even this one everywhere.
        expected.retain(|(path, _)| whiteout.is_ok() || *path != "a/.wh.gone");
        let found: Vec<(&str, &str)> = found
            .iter()
            .map(|(path, text)| (path.trim_end_matches('/'), text.as_str()))
            .collect();
        assert_eq!(found, expected);
    }
}
