//! The re-executed, single-threaded helper that becomes a container's process: it joins cgroups and
//! namespaces, builds the root, drops privileges and executes. It must start no thread and allocate
//! nothing it does not need, and every failure goes back on the control socket as one sentence.
//!
//! COMPAT: youki's libcontainer was weighed for this. Its exec path rebuilds the spec without the
//! seccomp section, so `kubectl exec` would run unfiltered in a filtered container; here both paths end
//! in the same `process::become_program`.

pub mod control;
mod image_volume;
mod masks;
mod mounts;
mod process;
pub mod spec;
mod targets;
mod tree;
mod user_namespace;
mod users;

use rustix::fs::{Mode, OFlags};
use rustix::thread::{
    LinkNameSpaceType, ThreadNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe,
};
use spec::{InitSpec, PidNamespace, ProcessSpec, Report, Task};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

/// The descriptor of the control socket in the helper.
pub const CONTROL_FD: i32 = 3;
/// The descriptor of the process whose namespaces an exec joins. A handle and not a number: the process
/// may end at any moment, and a number would then be somebody else's, a process of the host perhaps.
pub const TARGET_FD: i32 = 4;

pub(crate) use targets::open_inside;
pub(crate) use tree::{clone_directory, make_tree_readonly, map_ids, mount_id};

#[derive(Debug, thiserror::Error)]
pub(crate) enum InitError {
    #[error("{what}: {source}")]
    Os { what: String, source: std::io::Error },
    #[error("{0}")]
    Message(String),
}

pub(crate) trait Context<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T, InitError>;
}

impl<T, E: Into<std::io::Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T, InitError> {
        self.map_err(|error| InitError::Os {
            what: what(),
            source: error.into(),
        })
    }
}

/// The entry of `internal-init`. Returns only on failure or in the parent of a fork.
pub fn main() -> i32 {
    // The shim executes it by a descriptor's number, which is no name to find in a list of processes.
    let _ = rustix::thread::set_name(c"skiff-init");
    // SAFETY: the shim starts the helper with the control socket at this number, and nothing else in
    // this process owns it.
    let mut socket = unsafe { File::from_raw_fd(CONTROL_FD) };
    if rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC).is_err() {
        return 125;
    }
    let task: Task = match control::receive(&mut socket) {
        Ok(task) => task,
        Err(_) => return 125,
    };
    match run(task, &mut socket) {
        Ok(()) => 0,
        Err(error) => {
            let _ = control::send(&mut socket, &Report::Failed(error.to_string()));
            125
        }
    }
}

fn run(task: Task, socket: &mut File) -> Result<(), InitError> {
    // Processes of the container must not reach this one (its descriptors, the host's binary) through
    // /proc while it already is in their namespaces but not yet their program.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
        .context(|| "set not dumpable".into())?;
    match task {
        Task::Init(spec) => match &spec.process.user_namespace {
            Some(user) => user_namespace::run_init(&spec, user, socket),
            None => run_init(&spec, socket),
        },
        Task::Exec { process } => run_exec(&process, socket),
        Task::Pause {
            cgroup_procs,
            user_namespace,
        } => run_pause(&cgroup_procs, user_namespace.as_deref(), socket),
    }
}

fn run_init(spec: &InitSpec, socket: &mut File) -> Result<(), InitError> {
    set_oom_score(&spec.process)?;
    let cgroups = open_cgroups(&spec.process.cgroup_procs)?;
    for (path, kind) in [
        (&spec.namespaces.net, LinkNameSpaceType::Network),
        (&spec.namespaces.ipc, LinkNameSpaceType::InterProcessCommunication),
        (&spec.namespaces.uts, LinkNameSpaceType::HostNameAndNISDomainName),
    ] {
        if let Some(path) = path {
            join_namespace(path, kind)?;
        }
    }
    let mut new = UnshareFlags::NEWNS;
    match &spec.namespaces.pid {
        PidNamespace::New => new |= UnshareFlags::NEWPID,
        PidNamespace::Join(path) => {
            // The path names a process by its number. If that one is gone, it may be any process' by now,
            // and the host's processes must not come into the container's sight.
            if same_namespace(path, "/proc/self/ns/pid".as_ref())? {
                return Err(InitError::Message(
                    "the process that holds the pid namespace is gone".into(),
                ));
            }
            join_namespace(path, LinkNameSpaceType::ProcessID)?
        }
        PidNamespace::Host => {}
    }
    unshare(new)?;
    let joined = if spec.namespaces.pid == PidNamespace::Host {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        send(socket, &Report::Pid(own))?;
        write_cgroups(&cgroups, own)?;
        None
    } else {
        match fork_as_sibling(socket, &cgroups)? {
            Fork::Parent => return Ok(()),
            Fork::Child(joined) => Some(joined),
        }
    };
    drop(cgroups);
    let console = mounts::build_root(spec, None)?;
    wait_joined(joined)?;
    // Only now is the group that the namespace takes for its root the right one.
    unshare(UnshareFlags::NEWCGROUP)?;
    start_session(console, socket)?;
    process::become_program(&spec.process, socket)
}

fn run_exec(process: &ProcessSpec, socket: &mut File) -> Result<(), InitError> {
    set_oom_score(process)?;
    let cgroups = open_cgroups(&process.cgroup_procs)?;
    // SAFETY: the shim starts an exec's helper with this descriptor, and nothing else in this process
    // owns it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(TARGET_FD) };
    let mut namespaces = ThreadNameSpaceType::MOUNT
        | ThreadNameSpaceType::NETWORK
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::PROCESS_ID
        | ThreadNameSpaceType::CONTROL_GROUP;
    if let Some(user) = &process.user_namespace {
        user_namespace::own_standard_streams(user);
        namespaces |= ThreadNameSpaceType::USER;
    }
    // One call joins all of them or none.
    rustix::thread::move_into_thread_name_spaces(pidfd.as_fd(), namespaces)
        .context(|| "join the container's namespaces".into())?;
    drop(pidfd);
    if process.user_namespace.is_some() {
        user_namespace::become_root()?;
    }
    let joined = match fork_as_sibling(socket, &cgroups)? {
        Fork::Parent => return Ok(()),
        Fork::Child(joined) => joined,
    };
    drop(cgroups);
    wait_joined(Some(joined))?;
    let console = if process.terminal {
        Some(process::open_terminal()?)
    } else {
        None
    };
    start_session(console, socket)?;
    process::become_program(process, socket)
}

fn start_session(console: Option<process::Console>, socket: &mut File) -> Result<(), InitError> {
    let Some(console) = console else {
        return rustix::process::setsid()
            .map(drop)
            .context(|| "start a session".into());
    };
    control::send_with_fd(socket, &Report::Console, console.master.as_fd())
        .context(|| "send the terminal".into())?;
    process::take_terminal(console.slave)
}

/// Holds a shared pid namespace: the first process in it reaps the orphans of all containers.
fn run_pause(
    cgroup_procs: &[std::path::PathBuf],
    user_namespace: Option<&Path>,
    socket: &mut File,
) -> Result<(), InitError> {
    let cgroups = open_cgroups(cgroup_procs)?;
    if let Some(path) = user_namespace {
        user_namespace::enter(user_namespace::open(path)?.as_fd())?;
    }
    unshare(UnshareFlags::NEWPID)?;
    match fork_as_sibling(socket, &cgroups)? {
        Fork::Parent => return Ok(()),
        Fork::Child(joined) => wait_joined(Some(joined))?,
    }
    rustix::process::setsid().context(|| "start a session".into())?;
    send(
        socket,
        &Report::Ready {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
        },
    )?;
    // SAFETY: the descriptor is closed once and the process never returns to its owner; its end of
    // file tells the shim that the namespace is held. Ignoring SIGCHLD makes the kernel reap every
    // orphan of the namespace, and as pid 1 of it only SIGKILL from outside ends this process.
    unsafe {
        libc::close(CONTROL_FD);
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        loop {
            libc::pause();
        }
    }
}

fn set_oom_score(process: &ProcessSpec) -> Result<(), InitError> {
    let Some(score) = process.oom_score_adj else {
        return Ok(());
    };
    std::fs::write("/proc/self/oom_score_adj", score.to_string())
        .context(|| format!("set oom_score_adj to {score}"))
}

/// Opened while the host's paths are still seen.
fn open_cgroups(cgroup_procs: &[std::path::PathBuf]) -> Result<Vec<File>, InitError> {
    cgroup_procs
        .iter()
        .map(|path| {
            File::options()
                .write(true)
                .open(path)
                .context(|| format!("join cgroup {}", path.display()))
        })
        .collect()
}

fn write_cgroups(cgroups: &[File], pid: i32) -> Result<(), InitError> {
    for mut file in cgroups {
        file.write_all(pid.to_string().as_bytes())
            .context(|| "join the container's cgroup".into())?;
    }
    Ok(())
}

fn wait_joined(joined: Option<OwnedFd>) -> Result<(), InitError> {
    let Some(joined) = joined else { return Ok(()) };
    let mut byte = [0; 1];
    match rustix::io::read(&joined, &mut byte) {
        Ok(1) => Ok(()),
        // The parent has said why on the control socket.
        _ => Err(InitError::Message("the process could not join its cgroup".into())),
    }
}

fn same_namespace(one: &Path, other: &Path) -> Result<bool, InitError> {
    use std::os::unix::fs::MetadataExt;
    let identity = |path: &Path| {
        std::fs::metadata(path)
            .map(|metadata| (metadata.dev(), metadata.ino()))
            .context(|| format!("open namespace {}", path.display()))
    };
    Ok(identity(one)? == identity(other)?)
}

fn join_namespace(path: &Path, kind: LinkNameSpaceType) -> Result<(), InitError> {
    let namespace = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .context(|| format!("open namespace {}", path.display()))?;
    move_into_link_name_space(namespace.as_fd(), Some(kind))
        .context(|| format!("join namespace {}", path.display()))
}

fn unshare(flags: UnshareFlags) -> Result<(), InitError> {
    // SAFETY: only namespaces are unshared, not the descriptor table, so no descriptor of another
    // owner changes its meaning; the process has one thread.
    unsafe { unshare_unsafe(flags) }.context(|| "make namespaces".into())
}

enum Fork {
    Parent,
    /// A byte arrives here when the child is in its cgroups.
    Child(OwnedFd),
}

/// Forks a child whose parent is the shim, so that the shim gets its exit status without this process
/// having to live on; tells the shim the child's pid and puts the child into its cgroups.
///
/// The kernel makes whoever moves a process wait for all processors, ten milliseconds and more. The
/// parent waits that out while the child builds its root.
fn fork_as_sibling(socket: &mut File, cgroups: &[File]) -> Result<Fork, InitError> {
    fork_sibling_and_tell(socket, cgroups, None)
}

/// The same; the child's pid is also written to `tell`.
fn fork_sibling_and_tell(
    socket: &mut File,
    cgroups: &[File],
    tell: Option<BorrowedFd<'_>>,
) -> Result<Fork, InitError> {
    let (joined, join) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).context(|| "make a pipe".into())?;
    match fork(libc::CLONE_PARENT)? {
        0 => Ok(Fork::Child(joined)),
        pid => {
            send(socket, &Report::Pid(pid))?;
            if let Some(tell) = tell {
                rustix::io::write(tell, &pid.to_ne_bytes()).context(|| "tell the pid".into())?;
            }
            write_cgroups(cgroups, pid)?;
            rustix::io::write(&join, b"1").context(|| "tell the child".into())?;
            Ok(Fork::Parent)
        }
    }
}

/// A child of this process; 0 in the child.
fn fork_child() -> Result<i32, InitError> {
    fork(0)
}

fn fork(flags: libc::c_int) -> Result<i32, InitError> {
    let flags = (flags | libc::SIGCHLD) as libc::c_ulong;
    // SAFETY: a fork without shared memory; this process has a single thread, so the child may go on
    // allocating. The arguments are the same in the order of x86_64 and aarch64 as all but the flags
    // are zero.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0usize, 0usize, 0usize, 0usize) };
    if pid < 0 {
        return Err(InitError::Os {
            what: "fork".into(),
            source: std::io::Error::last_os_error(),
        });
    }
    Ok(pid as i32)
}

fn send(socket: &mut File, report: &Report) -> Result<(), InitError> {
    control::send(socket, report).context(|| "report to the shim".into())
}
