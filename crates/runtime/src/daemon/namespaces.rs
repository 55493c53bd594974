//! Makes a pod's namespaces and keeps them alive as files: no process is needed to hold them.

use super::user_namespaces::{Holder, Mapping};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

pub struct Wanted {
    pub net: bool,
    pub ipc: bool,
    pub uts: bool,
    pub hostname: String,
    pub sysctls: HashMap<String, String>,
    /// The namespaces belong to a new user namespace.
    pub user: Option<Mapping>,
}

/// Makes the namespaces in a thread of its own (only that thread enters them) and binds them to
/// `net`, `ipc`, `uts` and `user` in `directory`. Blocking.
pub fn create(directory: &Path, wanted: Wanted) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let directory = directory.to_owned();
    std::thread::Builder::new()
        .name("namespaces".into())
        .spawn(move || create_here(&directory, &wanted))?
        .join()
        .map_err(|_| io::Error::other("the thread that makes namespaces ended early"))?
}

fn create_here(directory: &Path, wanted: &Wanted) -> io::Result<()> {
    let mut flags = UnshareFlags::empty();
    let mut names = Vec::new();
    for (on, flag, name) in [
        (wanted.net, UnshareFlags::NEWNET, "net"),
        (wanted.ipc, UnshareFlags::NEWIPC, "ipc"),
        (wanted.uts, UnshareFlags::NEWUTS, "uts"),
    ] {
        if on {
            flags |= flag;
            names.push(name);
        }
    }
    // A process with threads cannot enter a user namespace: another makes the namespaces, and this thread joins them.
    let holder = match wanted.user {
        Some(mapping) => {
            let flags = flags.bits().cast_signed();
            let holder = Holder::start(mapping, flags)?;
            for name in &names {
                join(&holder.namespace(name))?;
            }
            Some(holder)
        }
        None => {
            // SAFETY: only namespaces are unshared and only for this thread, which ends with this function; no
            // descriptor table changes.
            unsafe { unshare_unsafe(flags) }.map_err(what("make namespaces"))?;
            None
        }
    };
    if wanted.net {
        loopback_up().map_err(|error| io::Error::new(error.kind(), format!("bring up loopback: {error}")))?;
    }
    if wanted.uts && !wanted.hostname.is_empty() {
        rustix::system::sethostname(wanted.hostname.as_bytes()).map_err(what("set the host name"))?;
    }
    let keep = |source: String, name: &str| {
        let target = directory.join(name);
        std::fs::File::create(&target)?;
        mount_bind(source, &target).map_err(what("keep a namespace"))
    };
    if let Some(holder) = &holder {
        keep(holder.namespace("user"), "user")?;
    }
    for name in names {
        keep(format!("/proc/thread-self/ns/{name}"), name)?;
    }
    check_sysctls(wanted)?;
    // Those of the network are for whoever has CAP_NET_ADMIN over it, those of ipc for the root of its user namespace.
    apply_network_sysctls(wanted)?;
    if let Some(mapping) = wanted.user {
        let (uid, gid) = (Uid::from_raw(mapping.uid.host), Gid::from_raw(mapping.gid.host));
        rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(what("become the pod's root"))?;
        rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(what("become the pod's root"))?;
    }
    wanted
        .sysctls
        .iter()
        .filter(|(name, _)| !is_of_network(name))
        .try_for_each(|(name, value)| set_sysctl(name, value))
}

fn join(path: &str) -> io::Result<()> {
    let namespace = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), None)
        .map_err(what("join a namespace"))
}

fn what(text: &'static str) -> impl Fn(rustix::io::Errno) -> io::Error {
    move |error| {
        let error = io::Error::from(error);
        io::Error::new(error.kind(), format!("{text}: {error}"))
    }
}

fn apply_network_sysctls(wanted: &Wanted) -> io::Result<()> {
    // COMPAT: containerd lets a pod's programs use low ports and ping without privileges.
    if wanted.net {
        for (name, value) in [
            ("net.ipv4.ip_unprivileged_port_start", "0"),
            ("net.ipv4.ping_group_range", "0 2147483647"),
        ] {
            if !wanted.sysctls.contains_key(name) {
                let _ = std::fs::write(sysctl_path(name)?, value);
            }
        }
    }
    wanted
        .sysctls
        .iter()
        .filter(|(name, _)| is_of_network(name))
        .try_for_each(|(name, value)| set_sysctl(name, value))
}

fn is_of_network(name: &str) -> bool {
    name.starts_with("net.")
}

fn set_sysctl(name: &str, value: &str) -> io::Result<()> {
    std::fs::write(sysctl_path(name)?, value)
        .map_err(|error| io::Error::new(error.kind(), format!("set sysctl {name}={value}: {error}")))
}

/// Before any is set: what is not the pod's own is refused.
fn check_sysctls(wanted: &Wanted) -> io::Result<()> {
    for name in wanted.sysctls.keys() {
        let own = (is_of_network(name) && wanted.net)
            || (["kernel.shm", "kernel.msg", "kernel.sem", "fs.mqueue."]
                .iter()
                .any(|prefix| name.starts_with(prefix))
                && wanted.ipc);
        if !own {
            return Err(io::Error::other(format!(
                "sysctl {name:?} is not in a separate kernel namespace"
            )));
        }
        sysctl_path(name)?;
    }
    Ok(())
}

fn sysctl_path(name: &str) -> io::Result<PathBuf> {
    let path = name.replace('.', "/");
    if path.split('/').any(|part| part.is_empty()) {
        return Err(io::Error::other(format!("{name:?} is not a sysctl")));
    }
    Ok(Path::new("/proc/sys").join(path))
}

fn loopback_up() -> io::Result<()> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    use std::os::fd::AsRawFd;
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: the structure is the ioctl's own, zeroed but for the name and the flag that is a valid
    // member of the union.
    let result = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request)
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Undoes `create`; what is not there is fine.
pub fn remove(directory: &Path) -> io::Result<()> {
    for name in ["net", "ipc", "uts", "pid", "user"] {
        unmount_all(&directory.join(name))?;
    }
    skiff_fs::remove_tree(directory)
}

/// Takes every mount off a path.
pub fn unmount_all(path: &Path) -> io::Result<()> {
    loop {
        match unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether a file still is a bound namespace (it is a plain file after a reboot).
pub fn is_alive(path: &Path) -> bool {
    const NSFS_MAGIC: i64 = 0x6e73_6673;
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type == NSFS_MAGIC)
}
