//! Starts the helper that becomes a container process, and reads its reports until the program runs.
//! Every child of the shim is reaped here and nowhere else.

use crate::init::CONTROL_FD;
use crate::init::control::MAX_MESSAGE;
use crate::init::spec::{Report, Task};
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

/// Starts `task`; returns when its program was executed. The error is the helper's sentence.
pub async fn launch(
    reaper: &Rc<Reaper>,
    task: &Task,
    stdin: bool,
    terminal: bool,
) -> Result<Launched, String> {
    reaper.starting.set(reaper.starting.get() + 1);
    let _starting = Starting(reaper.clone());
    let (ours, mut streams) =
        spawn_helper(stdin, terminal).map_err(|error| format!("start helper: {error}"))?;
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

fn spawn_helper(stdin: bool, terminal: bool) -> io::Result<(OwnedFd, Streams)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    let mut streams = Streams::default();
    // The helper of a shim is always of the shim's own version, also after the binary was replaced.
    let mut command = Command::new("/proc/self/exe");
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
    let control = theirs.as_raw_fd();
    // SAFETY: between fork and exec only dup2 and fcntl are called.
    unsafe {
        command.pre_exec(move || {
            if control == CONTROL_FD {
                if libc::fcntl(control, libc::F_SETFD, 0) < 0 {
                    return Err(io::Error::last_os_error());
                }
            } else if libc::dup2(control, CONTROL_FD) < 0 {
                return Err(io::Error::last_os_error());
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
