//! The daemon's side of a shim: starting one, asking it, and following it.

use crate::shim::protocol::{
    ContainerState, Event, ExecRequest, Request, Response, StartRequest, frame, read_frame, read_message,
    write_message,
};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

/// A shim answers at once unless the machine is in deep trouble.
const ANSWER: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("shim: {0}")]
    Io(#[from] io::Error),
    /// The shim did what was asked and says why it did not work.
    #[error("{0}")]
    Refused(String),
    #[error("the shim did not answer in time")]
    Timeout,
    #[error("the shim gave an unexpected answer")]
    Unexpected,
}

#[derive(Debug, Clone)]
pub struct ShimClient {
    socket: PathBuf,
}

/// Every shim that runs, with the socket it was started for.
pub fn running() -> Vec<(i32, PathBuf)> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, socket_of(pid)?)))
        .collect()
}

/// Whether a folder of this process' mount namespace is the same in that of another. By what it is and not by its path:
/// machines made of namespaces see each other's processes, and each has its own folder of that path.
pub fn shares_folder(pid: i32, folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |path: &Path| {
        let metadata = std::fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    let Ok(inside) = folder.strip_prefix("/") else {
        return false;
    };
    let theirs = identity(&Path::new("/proc").join(pid.to_string()).join("root").join(inside));
    theirs.is_some() && theirs == identity(folder)
}

/// The socket of the shim with this pid; `None` for any other process.
fn socket_of(pid: i32) -> Option<PathBuf> {
    let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = cmdline.split(|byte| *byte == 0).skip(1);
    if words.next()? != crate::INTERNAL_SHIM.as_bytes() {
        return None;
    }
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(words.next()?)))
}

/// Kills the shim of a socket and waits until it is gone. `pid` is what it was when it started: by now it may be
/// another process's, so the handle is opened first and the command line, which names the socket, compared after.
/// 0: not known, all processes are looked at.
pub async fn kill(pid: i32, socket: &Path) -> io::Result<()> {
    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
    let pid = match pid {
        0 => running()
            .into_iter()
            .find(|(_, own)| own == socket)
            .map(|(pid, _)| pid),
        pid => Some(pid),
    };
    let Some(process) = pid.and_then(Pid::from_raw) else {
        return Ok(());
    };
    let Ok(handle) = pidfd_open(process, PidfdFlags::NONBLOCK) else {
        return Ok(());
    };
    if pid.and_then(socket_of).as_deref() != Some(socket) {
        return Ok(());
    }
    match pidfd_send_signal(&handle, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => return Err(error.into()),
    }
    // SAFETY: the descriptor is owned, and stays open for as long as the `AsyncFd` that owns it.
    let handle = unsafe { AsyncFd::register(handle) }.map_err(|error| error.into_parts().1)?;
    match tokio::time::timeout(ANSWER, handle.readable()).await {
        Ok(ended) => ended.map(drop),
        Err(_) => Err(io::Error::other("the shim does not end")),
    }
}

impl ShimClient {
    pub fn new(socket: PathBuf) -> ShimClient {
        ShimClient { socket }
    }

    /// Starts a shim that lives on its own; returns it and its pid when it listens.
    /// `cgroup_procs` are the files by which it joins its cgroup.
    pub async fn spawn(
        executable: &Path,
        socket: &Path,
        log: &Path,
        cgroup_procs: &[PathBuf],
    ) -> Result<(ShimClient, i32), Error> {
        let log = std::fs::File::options().create(true).append(true).open(log)?;
        let mut child = tokio::process::Command::new(executable)
            .arg(crate::INTERNAL_SHIM)
            .arg(socket)
            .args(cgroup_procs)
            .env_clear()
            .envs(crate::open_files::before())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()?;
        let mut ready = [0; 1];
        let mut stdout = child.stdout.take().ok_or_else(|| io::Error::other("no pipe"))?;
        let read = tokio::time::timeout(ANSWER, stdout.read_exact(&mut ready)).await;
        match read {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => {
                let status = child.wait().await?;
                return Err(Error::Refused(format!("the shim ended at once ({status})")));
            }
            Err(_) => {
                let _ = child.start_kill();
                return Err(Error::Timeout);
            }
        }
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).unwrap_or(0);
        // Only to reap it: the shim's life is its own.
        tokio::spawn(async move {
            let _ = child.wait().await;
        });
        Ok((ShimClient::new(socket.to_owned()), pid))
    }

    async fn open(&self, request: &Request) -> Result<(UnixStream, Response), Error> {
        let exchange = async {
            let mut stream = UnixStream::connect(&self.socket).await?;
            write_message(&mut stream, request).await?;
            let response = read_message(&mut stream).await?;
            Ok::<_, io::Error>((stream, response))
        };
        match tokio::time::timeout(ANSWER, exchange).await {
            Err(_) => Err(Error::Timeout),
            Ok(Err(error)) => Err(error.into()),
            Ok(Ok((_, Response::Error(message)))) => Err(Error::Refused(message)),
            Ok(Ok(answer)) => Ok(answer),
        }
    }

    async fn ask(&self, request: &Request) -> Result<Response, Error> {
        Ok(self.open(request).await?.1)
    }

    async fn tell(&self, request: &Request) -> Result<(), Error> {
        self.ask(request).await.map(|_| ())
    }

    pub async fn ping(&self) -> Result<i32, Error> {
        match self.ask(&Request::Ping).await? {
            Response::Pid(pid) => Ok(pid),
            _ => Err(Error::Unexpected),
        }
    }

    /// Starts the process that holds the pod's shared pid namespace, which is bound to the file `namespace`.
    pub async fn start_pause(
        &self,
        cgroup_procs: Vec<PathBuf>,
        namespace: PathBuf,
        user_namespace: Option<PathBuf>,
    ) -> Result<(), Error> {
        self.tell(&Request::Pause {
            cgroup_procs,
            namespace: Some(namespace),
            user_namespace,
        })
        .await
    }

    pub async fn start(&self, request: StartRequest) -> Result<ContainerState, Error> {
        match self.ask(&Request::Start(Box::new(request))).await? {
            Response::Started(state) => Ok(state),
            _ => Err(Error::Unexpected),
        }
    }

    pub async fn signal(&self, id: &str, signal: i32) -> Result<(), Error> {
        self.tell(&Request::Signal {
            id: id.into(),
            signal,
        })
        .await
    }

    pub async fn reopen_log(&self, id: &str) -> Result<(), Error> {
        self.tell(&Request::ReopenLog { id: id.into() }).await
    }

    pub async fn forget(&self, id: &str) -> Result<(), Error> {
        self.tell(&Request::Forget { id: id.into() }).await
    }

    pub async fn shutdown(&self) -> Result<(), Error> {
        self.tell(&Request::Shutdown).await
    }

    /// The stream carries frames from here on.
    pub async fn exec(&self, request: ExecRequest) -> Result<UnixStream, Error> {
        Ok(self.open(&Request::Exec(Box::new(request))).await?.0)
    }

    /// The stream carries frames from here on.
    pub async fn attach(&self, id: &str) -> Result<UnixStream, Error> {
        Ok(self.open(&Request::Attach { id: id.into() }).await?.0)
    }

    pub async fn subscribe(&self) -> Result<Subscription, Error> {
        Ok(Subscription {
            stream: self.open(&Request::Subscribe).await?.0,
        })
    }
}

pub struct Subscription {
    stream: UnixStream,
}

impl Subscription {
    /// `None` when the shim is gone.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            let (kind, body) = read_frame(&mut self.stream).await.ok()?;
            if kind == frame::EVENT
                && let Ok(event) = serde_json::from_slice(&body)
            {
                return Some(event);
            }
        }
    }
}
