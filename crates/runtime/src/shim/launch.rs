//! Starts the helper that becomes a container process, and reads its reports until the program runs.
//! Every child of the shim is reaped here and nowhere else.

use crate::init::control::MAX_MESSAGE;
use crate::init::spec::{Report, Task};
use crate::init::{CONTROL_FD, TARGET_FD};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::rc::Rc;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

/// Helpers' descriptors are moved up here, out of the way of those they are given at fixed numbers.
const SPARE_FD: i32 = 10;

/// This binary on a read-only mount of its own, to be executed as helper. A container can make its helper
/// execute `/proc/self/exe`; what it then finds under /proc/<pid>/exe must not be the host's file with
/// the host's permissions to change it.
pub struct HelperBinary(OwnedFd);

impl HelperBinary {
    /// Also of the version that the shim is, after the file was replaced.
    pub fn open() -> io::Result<HelperBinary> {
        use rustix::mount::OpenTreeFlags;
        let tree = rustix::mount::open_tree(
            rustix::fs::CWD,
            "/proc/self/exe",
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
        )?;
        crate::init::make_tree_readonly(&tree)?;
        Ok(HelperBinary(rustix::io::fcntl_dupfd_cloexec(&tree, SPARE_FD)?))
    }
}

/// Who waits for which child.
#[derive(Default)]
pub struct Reaper {
    waiters: RefCell<HashMap<i32, oneshot::Sender<i32>>>,
    /// Exits nobody had asked for yet while a start was under way.
    unclaimed: RefCell<HashMap<i32, i32>>,
    starting: Cell<usize>,
}

impl Reaper {
    /// Runs for the life of the shim.
    pub async fn run(self: Rc<Self>) -> io::Result<()> {
        let mut children = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::child())?;
        loop {
            self.reap();
            if children.recv().await.is_none() {
                return Ok(());
            }
        }
    }

    fn reap(&self) {
        use rustix::process::{WaitOptions, wait};
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let code = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => code,
                // COMPAT: what a shell says of a process ended by a signal.
                (None, Some(signal)) => 128 + signal,
                (None, None) => continue,
            };
            let pid = pid.as_raw_nonzero().get();
            if let Some(waiter) = self.waiters.borrow_mut().remove(&pid) {
                let _ = waiter.send(code);
            } else if self.starting.get() > 0 {
                self.unclaimed.borrow_mut().insert(pid, code);
            }
        }
    }

    /// Whether the process is still a child of ours, dead or alive: only then the number is its own, and
    /// stays so until the next await.
    pub fn holds(&self, pid: i32) -> bool {
        self.waiters.borrow().contains_key(&pid)
    }

    /// A handle on a child, to be used after the next await.
    pub fn handle(&self, pid: i32) -> io::Result<OwnedFd> {
        let pid = rustix::process::Pid::from_raw(pid).filter(|_| self.holds(pid));
        let pid = pid.ok_or(rustix::io::Errno::SRCH)?;
        Ok(rustix::process::pidfd_open(
            pid,
            rustix::process::PidfdFlags::empty(),
        )?)
    }

    fn watch(&self, pid: i32) -> oneshot::Receiver<i32> {
        let (sender, receiver) = oneshot::channel();
        if let Some(code) = self.unclaimed.borrow_mut().remove(&pid) {
            let _ = sender.send(code);
        } else {
            self.waiters.borrow_mut().insert(pid, sender);
        }
        receiver
    }
}

/// The standard streams of a new process, shim's side.
#[derive(Default)]
pub struct Streams {
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    /// Instead of the three.
    pub console: Option<OwnedFd>,
}

pub struct Launched {
    pub pid: i32,
    pub exit: oneshot::Receiver<i32>,
    pub streams: Streams,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

struct Starting(Rc<Reaper>);

impl Drop for Starting {
    fn drop(&mut self) {
        self.0.starting.set(self.0.starting.get() - 1);
        if self.0.starting.get() == 0 {
            self.0.unclaimed.borrow_mut().clear();
        }
    }
}

/// Starts `task`; returns when its program was executed. The error is the helper's sentence. `target` is
/// the process whose namespaces an exec joins.
pub async fn launch(
    reaper: &Rc<Reaper>,
    binary: &HelperBinary,
    task: &Task,
    target: Option<OwnedFd>,
    stdin: bool,
    terminal: bool,
) -> Result<Launched, String> {
    reaper.starting.set(reaper.starting.get() + 1);
    let _starting = Starting(reaper.clone());
    let (ours, mut streams) =
        spawn_helper(binary, target, stdin, terminal).map_err(|error| format!("start helper: {error}"))?;
    // SAFETY: the descriptor is owned, and stays open for as long as the `AsyncFd` that owns it.
    let control = unsafe { AsyncFd::register(ours) }.map_err(|error| error.to_string())?;
    let message = crate::init::control::encode(task).map_err(|error| error.to_string())?;
    send_all(&control, &message)
        .await
        .map_err(|error| format!("send to helper: {error}"))?;

    let mut reader = ReportReader {
        control: &control,
        buffer: Vec::new(),
        fds: Vec::new(),
    };
    let mut launched: Option<(i32, oneshot::Receiver<i32>)> = None;
    let mut identity = None;
    loop {
        let report = reader
            .next()
            .await
            .map_err(|error| format!("read from helper: {error}"))?;
        match report {
            Some(Report::Pid(pid)) => launched = Some((pid, reaper.watch(pid))),
            Some(Report::Console) => streams.console = reader.fds.pop(),
            Some(Report::Ready { uid, gid, groups }) => identity = Some((uid, gid, groups)),
            Some(Report::Failed(message)) => {
                // The process ends by itself after this; its exit must not stay a zombie's.
                if let Some((_, exit)) = launched {
                    let _ = exit.await;
                }
                return Err(message);
            }
            None => break,
        }
    }
    match (launched, identity) {
        (Some((pid, exit)), Some((uid, gid, groups))) => Ok(Launched {
            pid,
            exit,
            streams,
            uid,
            gid,
            groups,
        }),
        (Some((_, exit)), None) => {
            let code = exit.await.unwrap_or(-1);
            Err(format!(
                "the process ended before it could start its program (exit code {code})"
            ))
        }
        (None, _) => Err("the helper ended without a word".into()),
    }
}

fn spawn_helper(
    binary: &HelperBinary,
    target: Option<OwnedFd>,
    stdin: bool,
    terminal: bool,
) -> io::Result<(OwnedFd, Streams)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    let mut streams = Streams::default();
    let mut command = Command::new(format!("/proc/self/fd/{}", binary.0.as_raw_fd()));
    command.arg0("skiff").arg(crate::INTERNAL_INIT).env_clear();
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    if !terminal {
        if stdin {
            let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
            command.stdin(read);
            streams.stdin = Some(write);
        }
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        command.stdout(write);
        streams.stdout = Some(read);
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        command.stderr(write);
        streams.stderr = Some(read);
    }
    let up = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, SPARE_FD);
    let theirs = up(&theirs)?;
    let target = target.as_ref().map(up).transpose()?;
    let mut given = vec![(theirs.as_raw_fd(), CONTROL_FD)];
    given.extend(target.as_ref().map(|target| (target.as_raw_fd(), TARGET_FD)));
    // SAFETY: between fork and exec only dup2 is called; the descriptors are open until after the spawn.
    unsafe {
        command.pre_exec(move || {
            for (from, to) in &given {
                if libc::dup2(*from, *to) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    // The handle is let go: the reaper waits for every child.
    command.spawn()?;
    Ok((ours, streams))
}

async fn send_all(control: &AsyncFd<OwnedFd>, mut data: &[u8]) -> io::Result<()> {
    while !data.is_empty() {
        let mut guard = control.writable().await?;
        match guard.try_io(|fd| {
            rustix::net::send(fd.get_ref(), data, rustix::net::SendFlags::NOSIGNAL).map_err(io::Error::from)
        }) {
            Ok(sent) => data = &data[sent?..],
            Err(_would_block) => {}
        }
    }
    Ok(())
}

struct ReportReader<'a> {
    control: &'a AsyncFd<OwnedFd>,
    buffer: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl ReportReader<'_> {
    async fn next(&mut self) -> io::Result<Option<Report>> {
        loop {
            if let Some(head) = self.buffer.first_chunk::<4>() {
                let length = u32::from_be_bytes(*head) as usize;
                if length > MAX_MESSAGE {
                    return Err(io::Error::other("message too large"));
                }
                if self.buffer.len() >= 4 + length {
                    let report =
                        serde_json::from_slice(&self.buffer[4..4 + length]).map_err(io::Error::other)?;
                    self.buffer.drain(..4 + length);
                    return Ok(Some(report));
                }
            }
            if !self.fill().await? {
                return Ok(None);
            }
        }
    }

    async fn fill(&mut self) -> io::Result<bool> {
        loop {
            let mut guard = self.control.readable().await?;
            let mut bytes = [0u8; 4096];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let result = guard.try_io(|fd| {
                rustix::net::recvmsg(
                    fd.get_ref(),
                    &mut [io::IoSliceMut::new(&mut bytes)],
                    &mut ancillary,
                    RecvFlags::CMSG_CLOEXEC,
                )
                .map_err(io::Error::from)
            });
            let Ok(received) = result else { continue };
            let received = match received {
                Ok(received) => received.bytes,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
                Err(error) => return Err(error),
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    self.fds.extend(fds);
                }
            }
            self.buffer.extend_from_slice(&bytes[..received]);
            return Ok(received > 0);
        }
    }
}
