//! Where a mount or a device goes in the container's root. The root comes from a stranger's image, and
//! volumes may be changed by other containers of the pod while they are mounted, so every path is resolved
//! by the kernel inside the root (`openat2`) and used as a descriptor from then on.

use super::tree;
use super::{Context, InitError};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

/// Links are followed, but an absolute one and `..` end at the root.
const IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);
const NO_LINKS: ResolveFlags = IN_ROOT.union(ResolveFlags::NO_SYMLINKS);
const OPEN: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);
const OPEN_DIRECTORY: OFlags = OPEN.union(OFlags::DIRECTORY);
/// As many links as the kernel follows in one path.
const MAX_LINKS: u32 = 40;

/// COMPAT: the files below /proc that runc lets a volume cover; lxcfs puts its own there.
const PROC_FILES: &[&str] = &[
    "/proc/cpuinfo",
    "/proc/diskstats",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/slabinfo",
    "/proc/stat",
    "/proc/swaps",
    "/proc/sys/crypto/fips_enabled",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/uptime",
];

/// Opens a path of the root without following any link. `None` if there is nothing.
pub(super) fn open_without_links(root: BorrowedFd<'_>, path: &str) -> Result<Option<OwnedFd>, InitError> {
    match rustix::fs::openat2(root, path, OPEN, Mode::empty(), NO_LINKS) {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(Errno::LOOP) => Err(link_in_the_way(path)),
        Err(error) => Err(error).context(|| format!("open {path}")),
    }
}

/// Opens a path of the root, following links inside of it. `None` if there is nothing.
pub(crate) fn open_inside(root: BorrowedFd<'_>, path: &str) -> Result<Option<OwnedFd>, InitError> {
    match rustix::fs::openat2(root, path, OPEN, Mode::empty(), IN_ROOT) {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(error) => Err(error).context(|| format!("open {path}")),
    }
}

fn link_in_the_way(path: &str) -> InitError {
    InitError::Message(format!(
        "mount point {path} must not be or lead through a symbolic link"
    ))
}

/// The directory that one of the runtime's own mounts goes on. The image must not choose another place
/// for it: what the container is kept from reading and writing is found by these paths.
pub(super) fn own_directory(root: BorrowedFd<'_>, path: &str) -> Result<OwnedFd, InitError> {
    let fd = make_directories_without_links(root, Path::new(path))?;
    let stat = rustix::fs::fstat(&fd).context(|| format!("stat {path}"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Err(InitError::Message(format!(
            "mount point {path} must be an ordinary directory"
        )));
    }
    Ok(fd)
}

/// The file that one of the runtime's own files goes on. Images ship /etc/resolv.conf as a link to where
/// systemd would write it: the link makes room for a file. Others have /etc itself elsewhere, which is fine as
/// long as it is in the image.
pub(super) fn own_file(root: BorrowedFd<'_>, path: &str) -> Result<OwnedFd, InitError> {
    let (parent, name) = split(path)?;
    let parent = make_directories(root, parent, MAX_LINKS)?;
    let what = || format!("make mount point {path}");
    if tree::mount_id(parent.as_fd()).context(what)? != tree::mount_id(root).context(what)? {
        return Err(InitError::Message(format!(
            "mount point {path} must not lead out of the image"
        )));
    }
    match rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink => {
            rustix::fs::unlinkat(&parent, name, AtFlags::empty()).context(what)?;
        }
        Ok(_) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error).context(what),
    }
    open_or_make_file(&parent, name).context(what)
}

fn open_or_make_file(parent: &OwnedFd, name: &std::ffi::OsStr) -> rustix::io::Result<OwnedFd> {
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let open = || rustix::fs::openat2(parent, name, OPEN, Mode::empty(), beneath);
    match open() {
        Err(Errno::NOENT) => {
            // Not O_TRUNC and not what is there already: it may be a pipe that nobody reads.
            let make = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
            match rustix::fs::openat(parent, name, make, Mode::from_raw_mode(0o644)) {
                Ok(_) | Err(Errno::EXIST) => open(),
                Err(error) => Err(error),
            }
        }
        result => result,
    }
}

fn split(path: &str) -> Result<(&Path, &std::ffi::OsStr), InitError> {
    let path = Path::new(path);
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => Ok((parent, name)),
        _ => Err(InitError::Message(format!(
            "{} is no place for a mount",
            path.display()
        ))),
    }
}

/// mkdir -p that follows no link.
pub(super) fn make_directories_without_links(
    root: BorrowedFd<'_>,
    path: &Path,
) -> Result<OwnedFd, InitError> {
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let open = |parent: BorrowedFd<'_>, name: &std::ffi::OsStr| {
        rustix::fs::openat2(parent, name, OPEN, Mode::empty(), beneath)
    };
    let mut current = open(root, ".".as_ref()).context(|| "open the root".into())?;
    for component in path.components() {
        let name = match component {
            Component::Normal(name) => name,
            Component::RootDir | Component::CurDir => continue,
            Component::ParentDir | Component::Prefix(_) => {
                return Err(InitError::Message(format!("{} holds `..`", path.display())));
            }
        };
        if let Err(error) = rustix::fs::mkdirat(&current, name, Mode::from_raw_mode(0o755))
            && error != Errno::EXIST
        {
            return Err(error).context(|| format!("make directory {}", path.display()));
        }
        current = match open(current.as_fd(), name) {
            Err(Errno::LOOP) => return Err(link_in_the_way(&path.to_string_lossy())),
            result => result.context(|| format!("open {}", path.display()))?,
        };
    }
    Ok(current)
}

/// The place of a volume: within the root whatever links lie on the way, made where it is missing.
pub(super) fn volume_target(
    root: BorrowedFd<'_>,
    path: &str,
    source: BorrowedFd<'_>,
    directory: bool,
) -> Result<OwnedFd, InitError> {
    let target = match open_inside(root, path)? {
        Some(target) => target,
        None if directory => make_directories(root, Path::new(path), MAX_LINKS)?,
        None => {
            let (parent, name) = split(path)?;
            let parent = make_directories(root, parent, MAX_LINKS)?;
            open_or_make_file(&parent, name).context(|| format!("make mount point {path}"))?
        }
    };
    if same_file(target.as_fd(), root).context(|| format!("stat {path}"))? {
        return Err(InitError::Message(format!("{path:?} is the container's root")));
    }
    if tree::is_procfs(target.as_fd()).context(|| format!("stat {path}"))? {
        check_over_proc(root, path, source)?;
    }
    Ok(target)
}

/// COMPAT: what runc allows there. A volume that hides files of /proc would let the image answer for the
/// kernel, to whatever reads them afterwards.
fn check_over_proc(root: BorrowedFd<'_>, path: &str, source: BorrowedFd<'_>) -> Result<(), InitError> {
    const PROC_ROOT_INO: u64 = 1;
    let allowed = if path == "/proc" {
        tree::is_procfs(source).context(|| format!("stat the source of {path}"))?
            && rustix::fs::fstat(source).is_ok_and(|stat| stat.st_ino == PROC_ROOT_INO)
    } else {
        PROC_FILES.contains(&path) && open_without_links(root, path)?.is_some()
    };
    if allowed {
        return Ok(());
    }
    Err(InitError::Message(if path == "/proc" {
        format!("{path:?} cannot be mounted because it is not of type proc")
    } else {
        format!("{path:?} cannot be mounted because it is inside /proc")
    }))
}

fn same_file(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    let identity = |fd: BorrowedFd<'_>| {
        let stat = rustix::fs::fstat(fd)?;
        Ok::<_, Errno>((stat.st_dev, stat.st_ino, tree::mount_id(fd)?))
    };
    Ok(identity(one)? == identity(other)?)
}

/// mkdir -p inside the root. Links on the way are followed within it, also those that lead to nothing yet:
/// `/var/run` of many images is a link to a `/run` that they lack.
fn make_directories(root: BorrowedFd<'_>, path: &Path, links: u32) -> Result<OwnedFd, InitError> {
    let open = |path: &Path| rustix::fs::openat2(root, path, OPEN_DIRECTORY, Mode::empty(), IN_ROOT);
    let mut so_far = PathBuf::from("/");
    let mut current = open(&so_far).context(|| "open the root".into())?;
    for component in path.components() {
        let parent = so_far.clone();
        match component {
            Component::Normal(name) => so_far.push(name),
            Component::ParentDir => so_far.push(".."),
            _ => continue,
        }
        current = match (open(&so_far), component) {
            (Err(Errno::NOENT), Component::Normal(name)) => {
                match rustix::fs::mkdirat(&current, name, Mode::from_raw_mode(0o755)) {
                    Ok(()) => open(&so_far).context(|| format!("open {}", so_far.display()))?,
                    Err(Errno::EXIST) if links > 0 => {
                        let target = rustix::fs::readlinkat(&current, name, Vec::new())
                            .context(|| format!("read the link {}", so_far.display()))?;
                        use std::os::unix::ffi::OsStrExt;
                        let target = Path::new(std::ffi::OsStr::from_bytes(target.to_bytes()));
                        make_directories(root, &parent.join(target), links - 1)?
                    }
                    Err(error) => {
                        return Err(error).context(|| format!("make directory {}", so_far.display()));
                    }
                }
            }
            (result, _) => result.context(|| format!("open {}", so_far.display()))?,
        };
    }
    Ok(current)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn root() -> (tempfile::TempDir, OwnedFd) {
        let directory = tempfile::tempdir().expect("directory");
        let fd = rustix::fs::open(directory.path(), OPEN_DIRECTORY, Mode::empty()).expect("open");
        (directory, fd)
    }

    #[test]
    fn own_places_follow_no_link() {
        let (directory, root) = root();
        let path = |name: &str| directory.path().join(name);
        std::fs::create_dir_all(path("m/p")).expect("make");
        symlink("/m/p", path("proc")).expect("link");
        symlink("m", path("sys")).expect("link");
        std::fs::write(path("dev"), "a file").expect("write");
        for (target, expected) in [
            ("/proc", "symbolic link"),
            ("/sys/fs/cgroup", "symbolic link"),
            ("/dev", "ordinary directory"),
            ("/m/../m", ".."),
        ] {
            let error = own_directory(root.as_fd(), target).expect_err(target).to_string();
            assert!(error.contains(expected), "{target}: {error}");
        }
        own_directory(root.as_fd(), "/new/deep").expect("made");
        assert!(path("new/deep").is_dir());

        std::fs::create_dir(path("real")).expect("make");
        symlink("real", path("etc")).expect("link");
        std::fs::write(path("victim"), "kept").expect("write");
        symlink("/victim", path("etc/hosts")).expect("link");
        own_file(root.as_fd(), "/etc/hosts").expect("replaced");
        assert!(path("etc/hosts").symlink_metadata().expect("there").is_file());
        assert_eq!(std::fs::read_to_string(path("victim")).expect("read"), "kept");
    }

    #[test]
    fn volumes_stay_inside() {
        let (directory, root) = root();
        let (_source_directory, source) = super::tests::root();
        let outside = tempfile::tempdir().expect("directory");
        let path = |name: &str| directory.path().join(name);
        symlink(outside.path(), path("out")).expect("link");
        symlink("../../../../run/x", path("up")).expect("link");
        symlink("loop", path("loop")).expect("link");
        let target =
            |at: &str, directory| volume_target(root.as_fd(), at, source.as_fd(), directory).map(drop);
        target("/out/a", true).expect("made inside");
        target("/out/b", false).expect("made inside");
        target("/up/c", true).expect("made inside");
        assert!(path("run/x/c").is_dir());
        let inner = outside.path().strip_prefix("/").expect("absolute");
        assert!(directory.path().join(inner).join("b").is_file());
        assert!(outside.path().read_dir().expect("list").next().is_none());
        assert!(target("/loop/x", true).is_err());
        assert!(target("/", true).is_err());
        assert!(target("/run/..", true).is_err());
    }
}
