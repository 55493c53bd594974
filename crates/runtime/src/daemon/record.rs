//! What the daemon knows of sandboxes and containers, in memory and on disk. The disk is what a daemon
//! that starts again goes by; how a container fares is in the shim's `state.json` beside the record.

use crate::shim::protocol::ContainerState;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use parking_lot::RwLock;
use prost::Message;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use skiff_cri::v1 as cri;
use std::io;
use std::path::{Path, PathBuf};
use tokio::sync::watch;

pub const RECORD: &str = "record.json";
pub const STATE: &str = "state.json";
pub const SPEC: &str = "spec.json";

/// A CRI message in a JSON record: its wire bytes, so that no field is lost.
#[derive(Debug, Clone, Default)]
pub struct Wire<T>(pub T);

impl<T: Message> Serialize for Wire<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64.encode(self.0.encode_to_vec()))
    }
}

impl<'de, T: Message + Default> Deserialize<'de> for Wire<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = BASE64.decode(text).map_err(serde::de::Error::custom)?;
        T::decode(bytes.as_slice())
            .map(Wire)
            .map_err(serde::de::Error::custom)
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SandboxRecord {
    pub id: String,
    pub config: Wire<cri::PodSandboxConfig>,
    pub created_at: i64,
    pub ready: bool,
    /// Nothing of it is left but this record and its files. A sandbox that is neither ready nor stopped still has
    /// to be torn down.
    #[serde(default)]
    pub stopped: bool,
    pub ips: Vec<String>,
    /// Where containers' cgroups are made.
    pub cgroup_parent: String,
    pub socket: PathBuf,
    #[serde(default)]
    pub shim_pid: i32,
    pub hostname: String,
    pub host_network: bool,
    pub host_ipc: bool,
}

impl SandboxRecord {
    fn namespace_options(&self) -> Option<&cri::NamespaceOption> {
        let linux = self.config.0.linux.as_ref()?;
        linux.security_context.as_ref()?.namespace_options.as_ref()
    }

    /// The ids of the pod's user namespace, if it has one of its own.
    pub fn user_namespace(&self) -> Option<super::user_namespaces::Mapping> {
        super::user_namespaces::requested(self.namespace_options()?).ok()?
    }

    /// Whether the pod's containers share a pid namespace, held by a pause process.
    pub fn shared_pid(&self) -> bool {
        // COMPAT: without options CRI's default is the pod's.
        self.namespace_options()
            .is_none_or(|options| options.pid() == cri::NamespaceMode::Pod)
    }
}

pub struct Sandbox {
    pub directory: PathBuf,
    pub record: RwLock<SandboxRecord>,
    /// Held for writing by what makes, stops or removes the sandbox, and for reading by what makes, starts or removes
    /// one of its containers: a stop finds no start half done, and none begins after it.
    pub life: tokio::sync::RwLock<()>,
}

impl Sandbox {
    pub fn new(directory: PathBuf, record: SandboxRecord) -> Sandbox {
        Sandbox {
            directory,
            record: RwLock::new(record),
            life: tokio::sync::RwLock::new(()),
        }
    }

    pub fn load(directory: &Path) -> io::Result<Option<Sandbox>> {
        let record: Option<SandboxRecord> = crate::disk::read_json(&directory.join(RECORD))?;
        Ok(record.map(|record| Sandbox::new(directory.to_owned(), record)))
    }

    pub fn save(&self) -> io::Result<()> {
        crate::disk::write_json(&self.directory.join(RECORD), &*self.record.read())
    }

    pub fn get(&self) -> SandboxRecord {
        self.record.read().clone()
    }

    pub fn shim(&self) -> super::shim_client::ShimClient {
        super::shim_client::ShimClient::new(self.record.read().socket.clone())
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ContainerRecord {
    pub id: String,
    pub sandbox_id: String,
    pub config: Wire<cri::ContainerConfig>,
    pub image_id: String,
    /// The reference by digest, which ends up in the pod's status.
    pub image_ref: String,
    pub created_at: i64,
    pub log_path: String,
    pub cgroup: String,
    pub stop_signal: i32,
}

pub struct Container {
    pub directory: PathBuf,
    pub record: RwLock<ContainerRecord>,
    pub state: watch::Sender<ContainerState>,
    /// Start, stop and remove of this container; after its sandbox's `life`.
    pub lock: tokio::sync::Mutex<()>,
    /// What the writable layer was last found to hold. Leaf lock.
    pub layer: parking_lot::Mutex<Option<LayerUsage>>,
}

/// The size of a writable layer at a time.
#[derive(Clone, Copy)]
pub struct LayerUsage {
    pub bytes: u64,
    pub inodes: u64,
    pub measured: std::time::Instant,
    /// How long it took to find out.
    pub cost: std::time::Duration,
}

impl Container {
    pub fn new(directory: PathBuf, record: ContainerRecord, state: ContainerState) -> Container {
        let (state, _) = watch::channel(state);
        Container {
            directory,
            record: RwLock::new(record),
            state,
            lock: tokio::sync::Mutex::new(()),
            layer: parking_lot::Mutex::default(),
        }
    }

    pub fn load(directory: &Path) -> io::Result<Option<Container>> {
        let record: Option<ContainerRecord> = crate::disk::read_json(&directory.join(RECORD))?;
        let state = crate::disk::read_json(&directory.join(STATE))?.unwrap_or_default();
        Ok(record.map(|record| Container::new(directory.to_owned(), record, state)))
    }

    pub fn save(&self) -> io::Result<()> {
        crate::disk::write_json(&self.directory.join(RECORD), &*self.record.read())
    }

    pub fn get(&self) -> ContainerRecord {
        self.record.read().clone()
    }

    pub fn current(&self) -> ContainerState {
        self.state.borrow().clone()
    }

    pub fn is_running(&self) -> bool {
        let state = self.state.borrow();
        state.started_at != 0 && state.finished_at == 0
    }

    /// Reads what the shim wrote last, which counts more than what was heard of it.
    pub fn reload(&self) {
        if let Ok(Some(state)) = crate::disk::read_json::<ContainerState>(&self.directory.join(STATE))
            && self.current().finished_at == 0
        {
            self.state.send_replace(state);
        }
    }

    /// The container ended without a word of the shim, or never started.
    pub fn set_exited(&self, code: i32, start_error: String) {
        let mut state = self.current();
        if state.finished_at != 0 {
            return;
        }
        state.finished_at = now_nanos();
        if state.started_at == 0 {
            state.started_at = state.finished_at;
        }
        state.exit_code = code;
        state.start_error = start_error;
        if let Err(error) = crate::disk::write_json(&self.directory.join(STATE), &state) {
            tracing::warn!(%error, container = %self.record.read().id, "cannot record a container's end");
        }
        self.state.send_replace(state);
    }
}

pub fn cri_state(state: &ContainerState) -> cri::ContainerState {
    if state.finished_at != 0 {
        cri::ContainerState::ContainerExited
    } else if state.started_at != 0 {
        cri::ContainerState::ContainerRunning
    } else {
        cri::ContainerState::ContainerCreated
    }
}

pub fn now_nanos() -> i64 {
    i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

/// 64 hexadecimal digits, as everybody's container ids are.
pub fn new_id() -> String {
    crate::image::hex(&rand::random::<[u8; 32]>())
}
