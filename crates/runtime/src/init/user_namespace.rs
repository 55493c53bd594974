//! The first process of a container in a user namespace.
//!
//! The root is built with the host's privileges, which a process in the user namespace has lost for good, and proc
//! must be mounted by a process of the container's pid namespace. So there are two: the program's process, in the
//! user namespace from the start, waits while the builder, in the same mount and pid namespaces but with the host's
//! privileges, makes the root. The pivot of one moves the other along. Then the program's process makes a mount
//! namespace that belongs to the user namespace: the kernel locks what it copies into that, so that not even a
//! process with all capabilities of the container can take a mask off or make a read-only mount writable.

use super::control;
use super::spec::{InitSpec, PidNamespace, Report, UserNamespace};
use super::{Context, Fork, InitError, fork_as_sibling, fork_child, join_namespace, mounts, process};
use super::{open_cgroups, same_namespace, set_oom_score, start_session, unshare, wait_joined};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
};
use rustix::thread::{LinkNameSpaceType, ThreadNameSpaceType, UnshareFlags};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

pub(super) fn open(path: &Path) -> Result<OwnedFd, InitError> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .context(|| format!("open namespace {}", path.display()))
}

/// Enters the user namespace as its root, with all capabilities in it and none outside.
pub(super) fn enter(namespace: BorrowedFd<'_>) -> Result<(), InitError> {
    rustix::thread::move_into_link_name_space(namespace, Some(LinkNameSpaceType::User))
        .context(|| "join the user namespace".into())?;
    become_root()
}

/// The host's root has no id in the namespace; files that it made there would be nobody's.
pub(super) fn become_root() -> Result<(), InitError> {
    let what = || "become root of the user namespace".into();
    rustix::thread::set_thread_groups(&[]).context(what)?;
    rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT).context(what)?;
    rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).context(what)
}

/// Gives the standard streams to the namespace's root, who passes them on to the program's user.
pub(super) fn own_standard_streams(user: &UserNamespace) {
    process::own_standard_streams(user.root_uid, Some(user.root_gid));
}

/// Makes files in the name of the namespace's root, without giving up any privilege.
pub(super) fn make_files_as(user: &UserNamespace) -> Result<(), InitError> {
    /// Capabilities stay as they are when ids change.
    const NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;
    // SAFETY: none of these calls takes a pointer, and they change this single-threaded process only.
    let set = unsafe {
        let kept = libc::prctl(libc::PR_SET_SECUREBITS, NO_SETUID_FIXUP, 0, 0, 0) == 0;
        libc::syscall(libc::SYS_setfsgid, user.root_gid);
        libc::syscall(libc::SYS_setfsuid, user.root_uid);
        // They return the id before, and an invalid one changes nothing.
        kept && libc::syscall(libc::SYS_setfsgid, u32::MAX) == libc::c_long::from(user.root_gid)
            && libc::syscall(libc::SYS_setfsuid, u32::MAX) == libc::c_long::from(user.root_uid)
    };
    if set {
        Ok(())
    } else {
        Err(InitError::Message(
            "cannot make files as the root of the user namespace".into(),
        ))
    }
}

/// Returns only on failure, or in a process that is not the program's.
pub(super) fn run_init(spec: &InitSpec, user: &UserNamespace, socket: &mut File) -> Result<(), InitError> {
    set_oom_score(&spec.process)?;
    let cgroups = open_cgroups(&spec.process.cgroup_procs)?;
    let namespace = open(&user.path)?;
    own_standard_streams(user);
    for (path, kind) in [
        (&spec.namespaces.net, LinkNameSpaceType::Network),
        (&spec.namespaces.ipc, LinkNameSpaceType::InterProcessCommunication),
        (&spec.namespaces.uts, LinkNameSpaceType::HostNameAndNISDomainName),
    ] {
        let Some(path) = path else {
            return Err(InitError::Message(
                "a user namespace cannot be combined with the host's other namespaces".into(),
            ));
        };
        join_namespace(path, kind)?;
    }
    unshare(UnshareFlags::NEWNS)?;
    let (program_end, builder_end) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .context(|| "make a socket".into())?;

    match &spec.namespaces.pid {
        PidNamespace::Host => {
            return Err(InitError::Message(
                "a user namespace cannot be combined with the host's pid namespace".into(),
            ));
        }
        PidNamespace::Join(path) => {
            if same_namespace(path, "/proc/self/ns/pid".as_ref())? {
                return Err(InitError::Message(
                    "the process that holds the pid namespace is gone".into(),
                ));
            }
            join_namespace(path, LinkNameSpaceType::ProcessID)?;
            if let Fork::Child(joined) = fork_as_sibling(socket, &cgroups)? {
                drop((builder_end, cgroups));
                enter(namespace.as_fd())?;
                return run_program(spec, joined, &program_end, socket);
            }
        }
        PidNamespace::New => {
            let (pid_read, pid_write) =
                rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).context(|| "make a pipe".into())?;
            // A pid namespace belongs to the user namespace of who makes it, and its first process is the program's.
            if fork_child()? == 0 {
                drop((builder_end, pid_read));
                enter(namespace.as_fd())?;
                unshare(UnshareFlags::NEWPID)?;
                return match super::fork_sibling_and_tell(socket, &cgroups, Some(pid_write.as_fd()))? {
                    Fork::Parent => Ok(()),
                    Fork::Child(joined) => {
                        drop((cgroups, pid_write));
                        run_program(spec, joined, &program_end, socket)
                    }
                };
            }
            drop(pid_write);
            let mut pid = [0; 4];
            if rustix::io::read(&pid_read, &mut pid) != Ok(4) {
                // Who should have made the process has said why it has not.
                return Ok(());
            }
            // It is a child of this process, so the number is its own.
            let pid = rustix::process::Pid::from_raw(i32::from_ne_bytes(pid));
            let pid = pid.ok_or_else(|| InitError::Message("the program's process has no pid".into()))?;
            let what = || "join the new pid namespace".into();
            let handle =
                rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).context(what)?;
            rustix::thread::move_into_thread_name_spaces(handle.as_fd(), ThreadNameSpaceType::PROCESS_ID)
                .context(what)?;
        }
    }
    drop(program_end);
    if fork_child()? == 0 {
        drop(cgroups);
        let console = mounts::build_root(spec, Some((user, namespace.as_fd())))?;
        if let Some(console) = &console {
            control::send_with_fd(socket, &Report::Console, console.master.as_fd())
                .context(|| "send the terminal".into())?;
        }
        return control::send_byte(
            &builder_end,
            console.as_ref().map(|console| console.slave.as_fd()),
        )
        .context(|| "tell the program's process".into());
    }
    Ok(())
}

/// What the process does that becomes the program.
fn run_program(
    spec: &InitSpec,
    joined: OwnedFd,
    builder: &OwnedFd,
    socket: &mut File,
) -> Result<(), InitError> {
    let Some(slave) = receive_byte(builder) else {
        // The builder has said why on the control socket.
        return Err(InitError::Message(
            "the container's root could not be built".into(),
        ));
    };
    unshare(UnshareFlags::NEWNS)?;
    std::env::set_current_dir("/").context(|| "enter the root".into())?;
    wait_joined(Some(joined))?;
    unshare(UnshareFlags::NEWCGROUP)?;
    match slave {
        Some(slave) => process::take_terminal(slave)?,
        None => start_session(None, socket)?,
    }
    process::become_program(&spec.process, socket)
}

/// The builder's byte, and the terminal that may come with it. `None`: it ended before.
fn receive_byte(builder: &OwnedFd) -> Option<Option<OwnedFd>> {
    let mut byte = [0; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut buffers = [std::io::IoSliceMut::new(&mut byte)];
    let received =
        rustix::net::recvmsg(builder, &mut buffers, &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?;
    if received.bytes != 1 {
        return None;
    }
    let mut fds = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    Some(fds.next().and_then(|mut fds| fds.next()))
}
