//! `subPath` and `subPathExpr`: a part of a volume, bound to a place of its own so that a link swapped in
//! by the container cannot lead out of the volume.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use k8s_openapi::api::core::v1::VolumeMount;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2};
use rustix::mount::mount_bind_recursive;

use crate::expansion::expand;

/// The sub-path a mount asks for, with variables replaced, checked to be relative and inside.
pub fn requested(mount: &VolumeMount, env: &[(String, String)]) -> Result<Option<String>, String> {
    let path = match mount.sub_path_expr.as_deref().filter(|e| !e.is_empty()) {
        Some(expression) => {
            let missing = std::cell::RefCell::new(None);
            let path = expand(expression, &|name| {
                let value = env.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
                if value.is_none() {
                    *missing.borrow_mut() = Some(name.to_owned());
                }
                value
            });
            if let Some(name) = missing.into_inner() {
                return Err(format!("missing value for {name:?}"));
            }
            if path.is_empty() {
                return Err(format!(
                    "SubPathExpr cannot be expanded to empty string: {expression}"
                ));
            }
            path
        }
        None => mount.sub_path.clone().unwrap_or_default(),
    };
    if path.is_empty() {
        return Ok(None);
    }
    if path.starts_with('/') {
        return Err(format!("error SubPath `{path}` must not be an absolute path"));
    }
    if Path::new(&path).components().any(|c| c == Component::ParentDir) {
        return Err(format!(
            "unable to provision SubPath `{path}`: must not contain '..'"
        ));
    }
    Ok(Some(path))
}

/// Opens the sub-path without leaving the volume, making missing directories with the volume's own mode.
fn open_inside(volume: &Path, sub_path: &str) -> io::Result<OwnedFd> {
    let root = openat(
        CWD,
        volume,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let open = |path: &Path| {
        openat2(
            &root,
            path,
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
            resolve,
        )
    };
    match open(Path::new(sub_path)) {
        Ok(fd) => return Ok(fd),
        Err(rustix::io::Errno::NOENT) => {}
        Err(e) => return Err(e.into()),
    }
    let mode = Mode::from_raw_mode(rustix::fs::fstat(&root)?.st_mode & 0o7777);
    let mut reached = PathBuf::new();
    for component in Path::new(sub_path).components() {
        let Component::Normal(name) = component else {
            continue;
        };
        let parent = if reached.as_os_str().is_empty() {
            root.try_clone()?
        } else {
            open(&reached)?
        };
        match mkdirat(parent.as_fd(), name, mode) {
            // The umask took its share. By a descriptor: a container that shares the volume may have put
            // a link in its place already.
            Ok(()) => {
                let made = openat(
                    parent.as_fd(),
                    name,
                    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
                    Mode::empty(),
                )?;
                rustix::fs::fchmod(&made, mode)?;
            }
            Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        reached.push(name);
    }
    Ok(open(&reached)?)
}

/// Binds the sub-path at `target` and returns where the container's mount shall come from.
pub fn bind(volume: &Path, sub_path: &str, target: &Path) -> io::Result<PathBuf> {
    let fd = open_inside(volume, sub_path)?;
    let is_directory = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode).is_dir();
    if target.exists() {
        // Made for an earlier instance of the container; what it leads to may have changed since.
        let _ = rustix::mount::unmount(target, rustix::mount::UnmountFlags::DETACH);
    }
    if is_directory {
        std::fs::create_dir_all(target)?;
    } else {
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(target)?;
    }
    mount_bind_recursive(format!("/proc/self/fd/{}", fd.as_raw_fd()), target)?;
    Ok(target.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn requests() {
        let env = vec![("POD".to_owned(), "web".to_owned())];
        let check = |mount: serde_json::Value, expected: Result<Option<&str>, &str>| {
            let mount: VolumeMount = serde_json::from_value(mount).unwrap();
            assert_eq!(
                requested(&mount, &env),
                expected.map(|p| p.map(str::to_owned)).map_err(str::to_owned)
            );
        };
        check(json!({"name": "v", "mountPath": "/x"}), Ok(None));
        check(
            json!({"name": "v", "mountPath": "/x", "subPath": "a/b"}),
            Ok(Some("a/b")),
        );
        check(
            json!({"name": "v", "mountPath": "/x", "subPathExpr": "$(POD)/log"}),
            Ok(Some("web/log")),
        );
        check(
            json!({"name": "v", "mountPath": "/x", "subPathExpr": "$(NO)"}),
            Err("missing value for \"NO\""),
        );
        check(
            json!({"name": "v", "mountPath": "/x", "subPath": "/a"}),
            Err("error SubPath `/a` must not be an absolute path"),
        );
        check(
            json!({"name": "v", "mountPath": "/x", "subPath": "a/../.."}),
            Err("unable to provision SubPath `a/../..`: must not contain '..'"),
        );
    }

    #[test]
    fn links_do_not_lead_out() {
        let outside = tempfile::tempdir().unwrap();
        let volume = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(outside.path(), volume.path().join("out")).unwrap();
        std::os::unix::fs::symlink("../../etc", volume.path().join("up")).unwrap();
        std::fs::create_dir(volume.path().join("real")).unwrap();
        std::os::unix::fs::symlink("real", volume.path().join("in")).unwrap();
        assert!(open_inside(volume.path(), "out").is_err());
        assert!(open_inside(volume.path(), "out/x").is_err());
        assert!(open_inside(volume.path(), "up").is_err());
        assert!(open_inside(volume.path(), "in").is_ok());
        open_inside(volume.path(), "new/deep").unwrap();
        assert!(volume.path().join("new/deep").is_dir());
        assert!(outside.path().read_dir().unwrap().next().is_none());
    }

    /// A container that shares the volume turns a directory into a link and back while it is opened.
    #[test]
    fn a_directory_that_becomes_a_link() {
        let outside = tempfile::tempdir().unwrap();
        let volume = tempfile::tempdir().unwrap();
        let (real, link) = (volume.path().join("a"), volume.path().join("link"));
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(outside.path(), &link).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let mut reached = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let exchange = rustix::fs::RenameFlags::EXCHANGE;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    rustix::fs::renameat_with(CWD, &real, CWD, &link, exchange).unwrap();
                }
            });
            for round in 0..2000 {
                if let Ok(fd) = open_inside(volume.path(), &format!("a/{}", round % 5)) {
                    reached.push(std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())));
                }
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert!(outside.path().read_dir().unwrap().next().is_none());
        for at in reached {
            let at = at.unwrap();
            assert!(at.starts_with(volume.path()), "{}", at.display());
        }
    }
}
