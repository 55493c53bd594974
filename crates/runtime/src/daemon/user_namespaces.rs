//! The user namespaces of pods: what CRI asks for, whether the machine can do it, and making one.

use skiff_cri::v1 as cri;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// Which ids of the host a pod's are. From 0 on: the pod's root has the first of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    pub uid: Range,
    pub gid: Range,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub host: u32,
    pub length: u32,
}

impl Range {
    /// The host's id of one of the pod's, if the pod has that.
    pub fn to_host(self, id: u32) -> Option<u32> {
        (id < self.length).then(|| self.host.checked_add(id)).flatten()
    }
}

/// COMPAT: the words are containerd's.
pub fn requested(options: &cri::NamespaceOption) -> Result<Option<Mapping>, String> {
    let Some(user) = &options.userns_options else {
        return Ok(None);
    };
    let mode = cri::NamespaceMode::try_from(user.mode).map_or("unknown", |mode| mode.as_str_name());
    match user.mode() {
        cri::NamespaceMode::Node if user.uids.is_empty() && user.gids.is_empty() => Ok(None),
        cri::NamespaceMode::Node => Err(format!(
            "can't use user namespace mode {mode:?} with mappings. Got {} UID mappings and {} GID mappings",
            user.uids.len(),
            user.gids.len()
        )),
        cri::NamespaceMode::Pod if user.uids.is_empty() || user.gids.is_empty() => Err(format!(
            "can't use user namespace mode {mode:?} without UID and GID mappings"
        )),
        cri::NamespaceMode::Pod => {
            let host = cri::NamespaceMode::Node;
            if options.network() == host || options.pid() == host || options.ipc() == host {
                return Err(
                    "can't use a user namespace together with the host's network, pid or ipc namespace"
                        .into(),
                );
            }
            Ok(Some(Mapping {
                uid: range(&user.uids)?,
                gid: range(&user.gids)?,
            }))
        }
        _ => Err(format!("unsupported user namespace mode: {mode:?}")),
    }
}

fn range(mappings: &[cri::IdMapping]) -> Result<Range, String> {
    let [mapping] = mappings else {
        let count = mappings.len();
        return Err(format!("only one ID mapping is supported, got {count} mappings"));
    };
    if mapping.container_id != 0 {
        return Err("container ID 0 must be mapped".into());
    }
    if mapping.host_id == 0 {
        return Err("ID 0 of the host must not be mapped".into());
    }
    if mapping.length == 0 || mapping.host_id.checked_add(mapping.length).is_none() {
        return Err(format!(
            "invalid ID mapping of {} IDs from {}",
            mapping.length, mapping.host_id
        ));
    }
    Ok(Range {
        host: mapping.host_id,
        length: mapping.length,
    })
}

/// A process that is in new namespaces and waits. It ends when this is dropped.
pub struct Holder {
    pid: i32,
    /// The process ends at the end of this pipe.
    release: Option<OwnedFd>,
}

impl Holder {
    /// Makes a user namespace with the mapping, and the namespaces of `flags`, which belong to it.
    pub fn start(mapping: Mapping, flags: libc::c_int) -> io::Result<Holder> {
        let (hold, release) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let flags = (libc::CLONE_NEWUSER | flags | libc::SIGCHLD) as libc::c_ulong;
        let (hold_fd, release_fd) = (hold.as_raw_fd(), release.as_raw_fd());
        // SAFETY: a fork without shared memory. This process has many threads, so the child does nothing but system
        // calls: it closes its end of the pipe, waits for the end of the other, and ends.
        let pid = unsafe {
            let pid = libc::syscall(libc::SYS_clone, flags, 0usize, 0usize, 0usize, 0usize);
            if pid == 0 {
                libc::close(release_fd);
                let mut byte = 0u8;
                while libc::read(hold_fd, (&raw mut byte).cast(), 1) < 0
                    && *libc::__errno_location() == libc::EINTR
                {}
                libc::_exit(0);
            }
            pid
        };
        if pid < 0 {
            let error = io::Error::last_os_error();
            return Err(io::Error::new(
                error.kind(),
                format!("make a user namespace: {error}"),
            ));
        }
        let holder = Holder {
            pid: pid as i32,
            release: Some(release),
        };
        for (file, range) in [("uid_map", mapping.uid), ("gid_map", mapping.gid)] {
            let line = format!("0 {} {}\n", range.host, range.length);
            std::fs::write(format!("/proc/{pid}/{file}"), line)
                .map_err(|error| io::Error::new(error.kind(), format!("write {file}: {error}")))?;
        }
        Ok(holder)
    }

    /// The file of one of its namespaces.
    pub fn namespace(&self, name: &str) -> String {
        format!("/proc/{}/ns/{name}", self.pid)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.release.take());
        let mut status = 0;
        // SAFETY: the child is this process' own and is waited for once; nothing else waits for children by any pid.
        unsafe {
            // The end of the pipe may have been inherited by a process that is just being started.
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, &raw mut status, 0);
        }
    }
}

/// Why pods cannot have user namespaces whose files lie below `directory`. Looks by making one.
pub fn unsupported(directory: &Path) -> Option<String> {
    const SAMPLE: Range = Range {
        host: 65536,
        length: 65536,
    };
    let try_it = || -> io::Result<()> {
        let holder = Holder::start(
            Mapping {
                uid: SAMPLE,
                gid: SAMPLE,
            },
            0,
        )?;
        let namespace = std::fs::File::open(holder.namespace("user"))?;
        let tree = crate::init::clone_directory(directory)?;
        crate::init::map_ids(tree.as_fd(), namespace.as_fd()).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("id-mapped mounts of {}: {error}", directory.display()),
            )
        })
    };
    try_it().err().map(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(mode: cri::NamespaceMode, mappings: &[(u32, u32, u32)]) -> cri::NamespaceOption {
        let mappings: Vec<_> = mappings
            .iter()
            .map(|&(container_id, host_id, length)| cri::IdMapping {
                host_id,
                container_id,
                length,
            })
            .collect();
        cri::NamespaceOption {
            pid: cri::NamespaceMode::Container as i32,
            userns_options: Some(cri::UserNamespace {
                mode: mode as i32,
                uids: mappings.clone(),
                gids: mappings,
            }),
            ..Default::default()
        }
    }

    #[test]
    fn only_whole_mappings_are_taken() {
        use cri::NamespaceMode::{Container, Node, Pod, Target};
        let taken = requested(&options(Pod, &[(0, 65536, 65536)])).expect("valid");
        let mapping = taken.expect("a mapping");
        assert_eq!((mapping.uid.host, mapping.gid.length), (65536, 65536));
        assert_eq!(mapping.uid.to_host(5), Some(65541));
        assert_eq!(mapping.uid.to_host(65536), None);
        assert_eq!(requested(&options(Node, &[])), Ok(None));
        assert_eq!(requested(&cri::NamespaceOption::default()), Ok(None));
        for (refused, why) in [
            (options(Node, &[(0, 1, 1)]), "with mappings"),
            (options(Pod, &[]), "without UID and GID mappings"),
            (options(Pod, &[(0, 1000, 10), (10, 2000, 10)]), "only one"),
            (options(Pod, &[(1, 1000, 10)]), "container ID 0"),
            (options(Pod, &[(0, 0, 10)]), "ID 0 of the host"),
            (options(Pod, &[(0, 5, 0)]), "invalid"),
            (options(Pod, &[(0, u32::MAX, 2)]), "invalid"),
            (options(Container, &[]), "unsupported"),
            (options(Target, &[]), "unsupported"),
            (
                cri::NamespaceOption {
                    network: Node as i32,
                    ..options(Pod, &[(0, 65536, 65536)])
                },
                "host's network",
            ),
        ] {
            let error = requested(&refused).expect_err(why);
            assert!(error.contains(why), "{error}");
        }
    }
}
