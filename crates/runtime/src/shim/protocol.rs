//! What the daemon and a shim say to each other on the shim's socket. One connection carries one
//! request and its answer; exec, attach and subscribe go on with frames after the answer. A newer
//! daemon meets older shims, so fields are only ever added, with defaults.

use crate::init::spec::{InitSpec, ProcessSpec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

pub const MAX_MESSAGE: usize = 16 * 1024 * 1024;
pub const MAX_FRAME: usize = 1024 * 1024;

/// The id of the process that holds the pod's shared pid namespace, in events. No container is called that.
pub const PAUSE: &str = "pause";

#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    Ping,
    /// Start the process that holds the pod's shared pid namespace.
    Pause {
        cgroup_procs: Vec<PathBuf>,
        /// A file that the namespace is bound to: a name that can never mean another process's namespace.
        #[serde(default)]
        namespace: Option<PathBuf>,
        /// The pod's user namespace, by path.
        #[serde(default)]
        user_namespace: Option<PathBuf>,
    },
    Start(Box<StartRequest>),
    Signal {
        id: String,
        signal: i32,
    },
    /// Frames follow.
    Exec(Box<ExecRequest>),
    /// Frames follow.
    Attach {
        id: String,
    },
    Resize {
        id: String,
        width: u16,
        height: u16,
    },
    ReopenLog {
        id: String,
    },
    /// Frames of `Event` follow: first every container known, then each change. The end of the pause process
    /// is an event of the id [`PAUSE`].
    Subscribe,
    /// The container's record goes away: end the container, also one that is just being started, and forget it.
    Forget {
        id: String,
    },
    /// End the shim; refused while a container runs or is being started.
    Shutdown,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct StartRequest {
    pub id: String,
    /// Where the shim records what became of the container.
    pub state_path: PathBuf,
    pub log_path: Option<PathBuf>,
    pub stdin: bool,
    pub stdin_once: bool,
    pub spec: InitSpec,
    /// `memory.oom_control` or `memory.events` of the container.
    pub oom_file: Option<PathBuf>,
    /// A `cgroup.procs` whose processes are killed once the first process ended.
    pub kill_file: Option<PathBuf>,
    /// The container whose pid namespace is joined, instead of what the spec says. By name: only the shim can
    /// tell whether the process of that container still is the one with its pid.
    #[serde(default)]
    pub join_pid_of: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ExecRequest {
    pub id: String,
    pub process: ProcessSpec,
    pub stdin: bool,
    /// Kill the process when the connection ends first.
    #[serde(default)]
    pub kill_on_close: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Response {
    Ok,
    Pid(i32),
    Started(ContainerState),
    Error(String),
}

/// What the shim knows of a container; also the content of its `state.json`. Times are nanoseconds
/// since 1970, 0 where it has not happened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerState {
    pub pid: i32,
    pub started_at: i64,
    #[serde(default)]
    pub finished_at: i64,
    #[serde(default)]
    pub exit_code: i32,
    #[serde(default)]
    pub oom_killed: bool,
    #[serde(default)]
    pub uid: u32,
    #[serde(default)]
    pub gid: u32,
    #[serde(default)]
    pub groups: Vec<u32>,
    /// Why the container could not be started.
    #[serde(default)]
    pub start_error: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    pub id: String,
    pub state: ContainerState,
}

/// The kinds of frames.
pub mod frame {
    pub const STDIN: u8 = 0;
    pub const STDOUT: u8 = 1;
    pub const STDERR: u8 = 2;
    /// Two big-endian u16: width, height.
    pub const RESIZE: u8 = 3;
    pub const STDIN_CLOSED: u8 = 4;
    /// A big-endian i32; the last frame.
    pub const EXIT: u8 = 5;
    /// One byte: the signal.
    pub const SIGNAL: u8 = 6;
    /// JSON of an `Event`.
    pub const EVENT: u8 = 7;
}

pub async fn write_message<W: AsyncWrite + Unpin, T: Serialize>(
    writer: &mut W,
    message: &T,
) -> io::Result<()> {
    let framed = crate::init::control::encode(message)?;
    writer.write_all(&framed).await
}

pub async fn read_message<R: AsyncRead + Unpin, T: DeserializeOwned>(reader: &mut R) -> io::Result<T> {
    let length = reader.read_u32().await? as usize;
    if length > MAX_MESSAGE {
        return Err(io::Error::other("message too large"));
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).await?;
    serde_json::from_slice(&body).map_err(io::Error::other)
}

pub async fn write_frame<W: AsyncWrite + Unpin>(writer: &mut W, kind: u8, data: &[u8]) -> io::Result<()> {
    let length = u32::try_from(data.len()).map_err(io::Error::other)?;
    let mut head = [0; 5];
    head[0] = kind;
    head[1..].copy_from_slice(&length.to_be_bytes());
    writer.write_all(&head).await?;
    writer.write_all(data).await
}

pub async fn read_frame<R: AsyncRead + Unpin>(reader: &mut R) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    reader.read_exact(&mut head).await?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
    if length > MAX_FRAME {
        return Err(io::Error::other("frame too large"));
    }
    let mut data = vec![0; length];
    reader.read_exact(&mut data).await?;
    Ok((head[0], data))
}
