//! The shim's request loop and the containers it looks after.

use super::io::{AsyncPipe, resize};
use super::launch::{HelperBinary, Launched, Reaper, launch};
use super::logs::{LineCutter, LogFile};
use super::protocol::{
    ContainerState, Event, PAUSE, Request, Response, StartRequest, frame, read_frame, read_message,
    write_frame, write_message,
};
use crate::init::TARGET_FD;
use crate::init::spec::{PidNamespace, Task};
use bytes::Bytes;
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_local;

/// How long output is awaited after a process ended, in case a child of it holds the pipe.
pub(super) const DRAIN: Duration = Duration::from_secs(2);
pub(super) const CHUNK: usize = 16 * 1024;

pub(super) type Chunk = (u8, Bytes);

pub(super) struct Container {
    pub(super) state: RefCell<ContainerState>,
    pub(super) exited: watch::Receiver<bool>,
    log: Option<Rc<RefCell<LogFile>>>,
    pub(super) attached: RefCell<Vec<mpsc::Sender<Chunk>>>,
    pub(super) stdin: RefCell<Option<Rc<AsyncPipe>>>,
    pub(super) stdin_once: bool,
    pub(super) console: Option<Rc<AsyncPipe>>,
}

pub(super) struct Shim {
    pub(super) reaper: Rc<Reaper>,
    pub(super) binary: HelperBinary,
    pub(super) containers: RefCell<HashMap<String, Rc<Container>>>,
    /// Containers that are being started; the sender goes when that is over.
    starting: RefCell<HashMap<String, watch::Receiver<()>>>,
    subscribers: RefCell<Vec<mpsc::UnboundedSender<Event>>>,
    pause: std::cell::Cell<i32>,
    /// How the pause process ended, if it did.
    pause_ended: RefCell<Option<ContainerState>>,
    shutdown: tokio::sync::Notify,
}

pub async fn run(listener: UnixListener, binary: HelperBinary) {
    let shim = Rc::new(Shim {
        reaper: Rc::default(),
        binary,
        containers: RefCell::default(),
        starting: RefCell::default(),
        subscribers: RefCell::default(),
        pause: std::cell::Cell::default(),
        pause_ended: RefCell::default(),
        shutdown: tokio::sync::Notify::new(),
    });
    let reaper = shim.reaper.clone();
    spawn_local(async move {
        if let Err(error) = reaper.run().await {
            super::complain(format_args!("shim: reaper: {error}"));
        }
    });
    let accepting = shim.clone();
    let accept = async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let shim = accepting.clone();
                    spawn_local(async move {
                        // A client that goes away is not worth a word.
                        let _ = shim.handle(stream).await;
                    });
                }
                Err(error) => {
                    super::complain(format_args!("shim: accept: {error}"));
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    };
    tokio::select! {
        () = accept => {}
        () = shim.shutdown.notified() => {}
    }
    shim.kill(shim.pause.get(), libc::SIGKILL);
}

impl Shim {
    async fn handle(self: Rc<Self>, stream: UnixStream) -> io::Result<()> {
        let (mut reader, mut writer) = stream.into_split();
        let request: Request = read_message(&mut reader).await?;
        let response = match request {
            Request::Exec(request) => return self.exec(*request, reader, writer).await,
            Request::Attach { id } => return self.attach(&id, reader, writer).await,
            Request::Subscribe => return self.subscribe(reader, writer).await,
            Request::Ping => Response::Pid(rustix::process::getpid().as_raw_nonzero().get()),
            Request::Pause {
                cgroup_procs,
                namespace,
                user_namespace,
            } => match self
                .start_pause(cgroup_procs, namespace.as_deref(), user_namespace)
                .await
            {
                Ok(pid) => Response::Pid(pid),
                Err(message) => Response::Error(message),
            },
            Request::Start(request) => match self.start(*request).await {
                Ok(state) => Response::Started(state),
                Err(message) => Response::Error(message),
            },
            Request::Signal { id, signal } => self.with(&id, |container| {
                if *container.exited.borrow() {
                    return Ok(());
                }
                self.kill(container.state.borrow().pid, signal);
                Ok(())
            }),
            Request::Resize { id, width, height } => self.with(&id, |container| match &container.console {
                Some(console) => resize(console.as_fd(), width, height),
                None => Err(io::Error::other("the container has no terminal")),
            }),
            Request::ReopenLog { id } => self.with(&id, |container| match &container.log {
                Some(log) => log.borrow_mut().reopen(),
                None => Ok(()),
            }),
            Request::Forget { id } => {
                self.forget(&id).await;
                Response::Ok
            }
            Request::Shutdown => {
                let running = self
                    .containers
                    .borrow()
                    .values()
                    .any(|container| !*container.exited.borrow());
                if running || !self.starting.borrow().is_empty() {
                    Response::Error("a container is running".into())
                } else {
                    write_message(&mut writer, &Response::Ok).await?;
                    self.shutdown.notify_one();
                    return Ok(());
                }
            }
        };
        write_message(&mut writer, &response).await
    }

    fn with(&self, id: &str, action: impl FnOnce(&Container) -> io::Result<()>) -> Response {
        match self.containers.borrow().get(id) {
            None => Response::Error(format!("container {id} is not known to the shim")),
            Some(container) => match action(container) {
                Ok(()) => Response::Ok,
                Err(error) => Response::Error(error.to_string()),
            },
        }
    }

    async fn start_pause(
        self: &Rc<Self>,
        cgroup_procs: Vec<PathBuf>,
        namespace: Option<&Path>,
        user_namespace: Option<PathBuf>,
    ) -> Result<i32, String> {
        if self.pause.get() > 0 {
            return Err("the pause process was started before".into());
        }
        let task = Task::Pause {
            cgroup_procs,
            user_namespace,
        };
        let launched = launch(&self.reaper, &self.binary, &task, None, false, true).await?;
        let pid = launched.pid;
        self.pause.set(pid);
        if let Some(namespace) = namespace {
            self.bind_pid_namespace(pid, namespace)
                .map_err(|error| format!("bind the pid namespace: {error}"))?;
        }
        let shim = self.clone();
        spawn_local(async move {
            let state = ContainerState {
                pid,
                exit_code: launched.exit.await.unwrap_or(255),
                finished_at: now_nanos(),
                ..Default::default()
            };
            shim.pause_ended.replace(Some(state.clone()));
            shim.publish(PAUSE, &state);
        });
        Ok(pid)
    }

    /// The pid is the child's own until the next await.
    fn bind_pid_namespace(&self, pid: i32, path: &Path) -> io::Result<()> {
        if !self.reaper.holds(pid) {
            return Err(io::Error::other("the pause process has ended"));
        }
        std::fs::File::create(path)?;
        Ok(rustix::mount::mount_bind(format!("/proc/{pid}/ns/pid"), path)?)
    }

    async fn forget(&self, id: &str) {
        let starting = self.starting.borrow().get(id).cloned();
        if let Some(mut starting) = starting {
            // The channel carries nothing; it closes when the start is over.
            let _ = starting.changed().await;
        }
        let container = self.containers.borrow().get(id).cloned();
        if let Some(container) = container {
            let pid = container.state.borrow().pid;
            self.kill(pid, libc::SIGKILL);
            let mut exited = container.exited.clone();
            let _ = exited.wait_for(|exited| *exited).await;
            self.containers.borrow_mut().remove(id);
        }
    }

    async fn start(self: &Rc<Self>, request: StartRequest) -> Result<ContainerState, String> {
        let id = request.id.clone();
        if self.containers.borrow().contains_key(&id) || self.starting.borrow().contains_key(&id) {
            return Err(format!("container {id} was started before"));
        }
        let (_over, starting) = watch::channel(());
        self.starting.borrow_mut().insert(id.clone(), starting);
        let started = self.start_new(request).await;
        self.starting.borrow_mut().remove(&id);
        started
    }

    /// The pid namespace of a running container, as a descriptor.
    fn pid_namespace_of(&self, id: &str) -> Result<OwnedFd, String> {
        let ended = || format!("target container {id:?} is not running in this pod");
        let container = self.containers.borrow().get(id).cloned().ok_or_else(ended)?;
        let pid = container.state.borrow().pid;
        if !self.reaper.holds(pid) {
            return Err(ended());
        }
        let file = std::fs::File::open(format!("/proc/{pid}/ns/pid")).map_err(|_| ended())?;
        Ok(file.into())
    }

    async fn start_new(self: &Rc<Self>, mut request: StartRequest) -> Result<ContainerState, String> {
        let log = match &request.log_path {
            Some(path) => {
                let log =
                    LogFile::open(path).map_err(|error| format!("open log {}: {error}", path.display()))?;
                Some(Rc::new(RefCell::new(log)))
            }
            None => None,
        };
        let terminal = request.spec.process.terminal;
        let mut target = None;
        if let Some(id) = &request.join_pid_of {
            target = Some(self.pid_namespace_of(id)?);
            let path = format!("/proc/self/fd/{TARGET_FD}");
            request.spec.namespaces.pid = PidNamespace::Join(path.into());
        }
        let task = Task::Init(Box::new(request.spec));
        let stdin = request.stdin;
        let launched = launch(&self.reaper, &self.binary, &task, target, stdin, terminal).await?;
        let Launched {
            pid,
            exit,
            streams,
            uid,
            gid,
            groups,
        } = launched;
        let state = ContainerState {
            pid,
            started_at: now_nanos(),
            uid,
            gid,
            groups,
            ..Default::default()
        };
        write_state(&request.state_path, &state);

        let to_pipe = |fd: Option<OwnedFd>| -> Option<Rc<AsyncPipe>> {
            fd.and_then(|fd| AsyncPipe::new(fd).ok()).map(Rc::new)
        };
        let console = to_pipe(streams.console);
        let stdin = match &console {
            Some(console) => request.stdin.then(|| console.clone()),
            None => to_pipe(streams.stdin),
        };
        let (exit_sender, exited) = watch::channel(false);
        let container = Rc::new(Container {
            state: RefCell::new(state.clone()),
            exited,
            log,
            attached: RefCell::new(Vec::new()),
            stdin: RefCell::new(stdin),
            stdin_once: request.stdin_once,
            console: console.clone(),
        });
        let mut copies = Vec::new();
        if let Some(console) = console {
            copies.push(spawn_local(copy_output(
                container.clone(),
                console,
                frame::STDOUT,
            )));
        }
        for (pipe, kind) in [
            (to_pipe(streams.stdout), frame::STDOUT),
            (to_pipe(streams.stderr), frame::STDERR),
        ] {
            if let Some(pipe) = pipe {
                copies.push(spawn_local(copy_output(container.clone(), pipe, kind)));
            }
        }
        self.containers
            .borrow_mut()
            .insert(request.id.clone(), container.clone());
        self.publish(&request.id, &state);

        let shim = self.clone();
        spawn_local(async move {
            let code = exit.await.unwrap_or(255);
            let finished_at = now_nanos();
            // Where the pid namespace is shared, the first process does not take the others along.
            if let Some(file) = &request.kill_file {
                kill_cgroup(file);
            }
            for copy in copies {
                let _ = tokio::time::timeout(DRAIN, copy).await;
            }
            let oom_killed = request.oom_file.as_deref().is_some_and(oom_happened);
            let state = {
                let mut state = container.state.borrow_mut();
                state.exit_code = code;
                state.finished_at = finished_at;
                state.oom_killed = oom_killed;
                state.clone()
            };
            write_state(&request.state_path, &state);
            container.stdin.borrow_mut().take();
            container.attached.borrow_mut().clear();
            let _ = exit_sender.send(true);
            shim.publish(&request.id, &state);
        });
        Ok(state)
    }

    /// A process that was reaped is left out: its number may be another's by now.
    pub(super) fn kill(&self, pid: i32, signal: i32) {
        if self.reaper.holds(pid) {
            kill(pid, signal);
        }
    }

    fn publish(&self, id: &str, state: &ContainerState) {
        let event = Event {
            id: id.to_owned(),
            state: state.clone(),
        };
        self.subscribers
            .borrow_mut()
            .retain(|subscriber| subscriber.send(event.clone()).is_ok());
    }

    async fn subscribe(&self, mut reader: OwnedReadHalf, mut writer: OwnedWriteHalf) -> io::Result<()> {
        // Unbounded, but a pod has few containers and each sends two events.
        let (sender, mut events) = mpsc::unbounded_channel();
        if let Some(state) = &*self.pause_ended.borrow() {
            let _ = sender.send(Event {
                id: PAUSE.to_owned(),
                state: state.clone(),
            });
        }
        for (id, container) in self.containers.borrow().iter() {
            let _ = sender.send(Event {
                id: id.clone(),
                state: container.state.borrow().clone(),
            });
        }
        self.subscribers.borrow_mut().push(sender);
        write_message(&mut writer, &Response::Ok).await?;
        loop {
            tokio::select! {
                event = events.recv() => {
                    let Some(event) = event else { return Ok(()) };
                    let body = serde_json::to_vec(&event).map_err(io::Error::other)?;
                    write_frame(&mut writer, frame::EVENT, &body).await?;
                }
                // The daemon says nothing more; this ends when it goes away.
                frame = read_frame(&mut reader) => {
                    frame?;
                }
            }
        }
    }
}

async fn copy_output(container: Rc<Container>, pipe: Rc<AsyncPipe>, kind: u8) {
    let stream = if kind == frame::STDERR { "stderr" } else { "stdout" };
    let mut cutter = LineCutter::new(stream);
    let mut buffer = vec![0; CHUNK];
    loop {
        match pipe.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(length) => {
                let chunk = &buffer[..length];
                if let Some(log) = &container.log {
                    let entries = cutter.push(chunk, &timestamp());
                    log.borrow_mut().write(&entries);
                }
                if !container.attached.borrow().is_empty() {
                    let data = Bytes::copy_from_slice(chunk);
                    container
                        .attached
                        .borrow_mut()
                        .retain(|client| client.try_send((kind, data.clone())).is_ok());
                }
            }
        }
    }
    if let Some(log) = &container.log {
        let entries = cutter.finish(&timestamp());
        log.borrow_mut().write(&entries);
    }
}

fn kill(pid: i32, signal: i32) {
    // SAFETY: kill takes any number.
    unsafe { libc::kill(pid, signal) };
}

fn kill_cgroup(procs: &Path) {
    for line in std::fs::read_to_string(procs).unwrap_or_default().lines() {
        if let Ok(pid) = line.parse::<i32>()
            && pid > 1
        {
            kill(pid, libc::SIGKILL);
        }
    }
}

/// `oom_kill N` is in v1's memory.oom_control and in v2's memory.events.
fn oom_happened(file: &Path) -> bool {
    std::fs::read_to_string(file)
        .unwrap_or_default()
        .lines()
        .filter_map(|line| line.strip_prefix("oom_kill "))
        .any(|count| count.trim() != "0")
}

fn write_state(path: &Path, state: &ContainerState) {
    if let Err(error) = crate::disk::write_json(path, state) {
        super::complain(format_args!("shim: record {}: {error}", path.display()));
    }
}

pub fn now_nanos() -> i64 {
    i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

/// RFC 3339 with nanoseconds, as the kubelet parses it.
fn timestamp() -> String {
    jiff::Timestamp::now()
        .strftime("%Y-%m-%dT%H:%M:%S.%9fZ")
        .to_string()
}
