//! The runtime's long-lived part: knows all sandboxes and containers, asks their shims, and can be
//! killed and started again at any moment without a container noticing.

mod capabilities;
mod cdi;
mod checkpoint;
mod containers;
mod devices;
mod events;
mod image_service;
mod namespaces;
mod record;
mod runtime_service;
mod sandboxes;
mod shim_client;
mod signals;
mod spec;
mod stats;
mod status;
mod streaming;
mod teardown;
mod user_namespaces;

use crate::Config;
use crate::cgroup::Cgroup;
use crate::image::ImageStore;
use parking_lot::{Mutex, RwLock};
use record::{Container, Sandbox};
use skiff_cri::v1 as cri;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;
use tonic::Status;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    #[error(transparent)]
    Image(#[from] crate::image::Error),
    #[error("the socket path {0} is too long; choose a shorter run directory")]
    SocketPath(String),
    #[error("another runtime is using {0}")]
    Taken(String),
}

/// The state that every call works on.
///
/// Lock order: a sandbox's `life`, then a container's `lock`, then the maps; the maps' locks are never
/// held over an await.
pub(crate) struct Daemon {
    pub config: Config,
    pub images: Arc<ImageStore>,
    pub sandboxes: RwLock<HashMap<String, Arc<Sandbox>>>,
    pub containers: RwLock<HashMap<String, Arc<Container>>>,
    /// Names that are taken (`<kind>/<name>`) and by whom, also by those still being made.
    pub names: Mutex<HashMap<String, String>>,
    pub events: broadcast::Sender<cri::ContainerEventResponse>,
    pub streams: streaming::Streams,
    /// The lowest oom_score_adj that may be set; `None`: any.
    pub oom_floor: Option<i32>,
    pub capabilities: u64,
    /// Set when one was made.
    user_namespaces_work: tokio::sync::OnceCell<()>,
    /// Who may take a checkpoint.
    checkpoints: tokio::sync::Semaphore,
    pub shutdown: CancellationToken,
    /// For work that goes on after the call that asked for it.
    itself: std::sync::Weak<Daemon>,
}

/// A running embedded runtime. Dropping it stops serving; containers run on.
pub struct Runtime {
    daemon: Arc<Daemon>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    /// Locked while this runtime lives: two daemons over one state would fight.
    _lock: std::fs::File,
}

impl Runtime {
    /// Finds what was running, and serves CRI on `<run_dir>/cri.sock`.
    pub async fn start(config: Config) -> Result<Runtime, Error> {
        let io = |what: String| move |source| Error::Io { what, source };
        for directory in [
            config.sandboxes(),
            config.containers(),
            config.run_dir.join("shim"),
            config.run_dir.join("ns"),
        ] {
            std::fs::create_dir_all(&directory).map_err(io(format!("make {}", directory.display())))?;
        }
        let lock = std::fs::File::create(config.run_dir.join("lock"))
            .map_err(io("lock the run directory".into()))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| Error::Taken(config.run_dir.display().to_string()))?;
        use std::os::unix::fs::PermissionsExt;
        for directory in [&config.root, &config.run_dir] {
            // The root holds setuid programs of images and the files of containers, the run directory
            // control sockets: users of the machine must not even pass through. Containers need no way
            // in, their mounts are made from inside.
            std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o700))
                .map_err(io(format!("protect {}", directory.display())))?;
        }
        let socket = config.socket();
        if config
            .run_dir
            .join("shim")
            .join("0123456789abc.sock")
            .as_os_str()
            .len()
            > 107
        {
            return Err(Error::SocketPath(config.run_dir.display().to_string()));
        }
        let shims = Cgroup::new(&config.cgroup_parent)
            .map(|group| group.child("shims"))
            .and_then(|group| group.create())
            .map_err(io(format!("make cgroup {}", config.cgroup_parent)));
        shims?;
        let images = ImageStore::open(&config.images())?;
        let images = Arc::new(images.with_registry_configs(config.registry_config_paths.clone()));
        let (streams, stream_server) = streaming::Streams::bind(config.stream_bind)
            .await
            .map_err(io("bind the streaming server".into()))?;
        let capabilities = capabilities::own_bounding_set();
        let oom_floor = oom_floor(&config, capabilities);
        let daemon = Arc::new_cyclic(|itself| Daemon {
            config,
            images,
            sandboxes: RwLock::default(),
            containers: RwLock::default(),
            names: Mutex::default(),
            events: broadcast::channel(1024).0,
            streams,
            oom_floor,
            capabilities,
            user_namespaces_work: tokio::sync::OnceCell::new(),
            checkpoints: tokio::sync::Semaphore::new(1),
            shutdown: CancellationToken::new(),
            itself: itself.clone(),
        });
        daemon.recover().await;
        let sweep = tokio::spawn(daemon.clone().run_sweep());

        let _ = std::fs::remove_file(&socket);
        let listener =
            tokio::net::UnixListener::bind(&socket).map_err(io(format!("listen on {}", socket.display())))?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600))
            .map_err(io(format!("protect {}", socket.display())))?;
        let runtime_service = skiff_cri::RuntimeServiceServer::from_arc(daemon.clone())
            .max_decoding_message_size(skiff_cri::MAX_MESSAGE_SIZE)
            .max_encoding_message_size(skiff_cri::MAX_MESSAGE_SIZE);
        let image_service = skiff_cri::ImageServiceServer::from_arc(daemon.clone())
            .max_decoding_message_size(skiff_cri::MAX_MESSAGE_SIZE);
        let shutdown = daemon.shutdown.clone();
        let serve = tokio::spawn(async move {
            let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
            let result = tonic::transport::Server::builder()
                .add_service(runtime_service)
                .add_service(image_service)
                .serve_with_incoming_shutdown(incoming, shutdown.cancelled())
                .await;
            if let Err(error) = result {
                tracing::error!(%error, "the CRI server ended");
            }
        });
        let streaming = tokio::spawn(streaming::serve(daemon.clone(), stream_server));
        Ok(Runtime {
            daemon,
            tasks: vec![serve, streaming, sweep],
            _lock: lock,
        })
    }

    /// `unix:///…`, for the kubelet.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.daemon.config.socket().display())
    }

    pub fn images(&self) -> Arc<ImageStore> {
        self.daemon.images.clone()
    }

    /// Waits until one of its servers ends, which none does by itself; why it did.
    pub async fn ended(&mut self) -> String {
        let (ended, nth, _) = futures::future::select_all(&mut self.tasks).await;
        drop(self.tasks.swap_remove(nth));
        ended.map_or_else(
            |error| error.to_string(),
            |()| "a server of the runtime ended".to_owned(),
        )
    }

    /// Stops serving. Containers and their shims run on.
    pub async fn stop(mut self) {
        self.daemon.shutdown.cancel();
        for task in self.tasks.drain(..) {
            // A watcher that does not go away must not keep the process.
            let abort = task.abort_handle();
            if tokio::time::timeout(std::time::Duration::from_secs(3), task)
                .await
                .is_err()
            {
                abort.abort();
            }
        }
        let _ = std::fs::remove_file(self.daemon.config.socket());
    }

    /// Stops and removes every sandbox and container.
    pub async fn remove_everything(&self) {
        let ids: Vec<String> = self.daemon.sandboxes.read().keys().cloned().collect();
        futures::future::join_all(ids.iter().map(|id| async move {
            if let Err(error) = self.daemon.remove_sandbox(id).await {
                tracing::warn!(sandbox = %id, error = error.message(), "cannot remove a sandbox");
            }
        }))
        .await;
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.daemon.shutdown.cancel();
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Removes everything a runtime of this configuration left, running or not: for `down --delete`. The
/// directories themselves go too.
pub async fn cleanup(config: Config) -> Result<(), Error> {
    let parent = config.cgroup_parent.clone();
    let (root, run_dir) = (config.root.clone(), config.run_dir.clone());
    // The only folders in which the runtime mounts anything; other mounts are not ours to take down.
    let with_mounts = [config.sandboxes(), run_dir.join("ns")];
    if config.sandboxes().exists() {
        let runtime = Runtime::start(Config {
            stream_bind: ([127, 0, 0, 1], 0).into(),
            ..config
        })
        .await?;
        runtime.remove_everything().await;
        runtime.stop().await;
    }
    if let Ok(group) = Cgroup::new(&parent) {
        // Whatever is left in our own cgroups (a shim that hangs) is ours to end.
        if let Err(error) = end_group(&group).await {
            tracing::warn!(%error, "cannot remove the cgroup");
        }
    }
    for directory in with_mounts {
        skiff_fs::unmount_below(&directory).map_err(|source| Error::Io {
            what: format!("unmount what is below {}", directory.display()),
            source,
        })?;
    }
    for directory in [run_dir, root] {
        skiff_fs::remove_tree(&directory).map_err(|source| Error::Io {
            what: format!("remove {}", directory.display()),
            source,
        })?;
    }
    Ok(())
}

/// Kills what is in a group and removes it, for at most ten seconds. On v1 a process that is just joining is in some
/// hierarchies before it is in the one that is listed, so both are tried again together.
pub(crate) async fn end_group(group: &Cgroup) -> std::io::Result<()> {
    let mut pause = std::time::Duration::from_millis(1);
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(10);
    loop {
        let result = match group.kill() {
            true => group.remove(),
            false => Err(std::io::Error::other("its processes do not end")),
        };
        if result.is_ok() || tokio::time::Instant::now() > deadline {
            return result;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(std::time::Duration::from_millis(100));
    }
}

/// Without CAP_SYS_RESOURCE a score cannot be lowered below what this process has.
fn oom_floor(config: &Config, capabilities: u64) -> Option<i32> {
    let restricted = config
        .restrict_oom_score_adj
        .unwrap_or(capabilities & (1 << capabilities::SYS_RESOURCE) == 0);
    if !restricted {
        return None;
    }
    let own = std::fs::read_to_string("/proc/self/oom_score_adj")
        .ok()
        .and_then(|text| text.trim().parse().ok());
    let own = own.unwrap_or(0);
    tracing::warn!(
        floor = own,
        "CAP_SYS_RESOURCE is missing: oom_score_adj of containers is not set below the floor"
    );
    Some(own)
}

impl Daemon {
    pub(crate) fn sandbox(&self, id: &str) -> Result<Arc<Sandbox>, Status> {
        let sandboxes = self.sandboxes.read();
        if let Some(sandbox) = sandboxes.get(id) {
            return Ok(sandbox.clone());
        }
        let mut matches = sandboxes
            .iter()
            .filter(|(full, _)| !id.is_empty() && full.starts_with(id));
        match (matches.next(), matches.next()) {
            (Some((_, sandbox)), None) => Ok(sandbox.clone()),
            _ => Err(Status::not_found(format!(
                "an error occurred when try to find sandbox {id:?}: not found"
            ))),
        }
    }

    pub(crate) fn container(&self, id: &str) -> Result<Arc<Container>, Status> {
        let containers = self.containers.read();
        if let Some(container) = containers.get(id) {
            return Ok(container.clone());
        }
        let mut matches = containers
            .iter()
            .filter(|(full, _)| !id.is_empty() && full.starts_with(id));
        match (matches.next(), matches.next()) {
            (Some((_, container)), None) => Ok(container.clone()),
            _ => Err(Status::not_found(format!(
                "an error occurred when try to find container {id:?}: not found"
            ))),
        }
    }

    pub(crate) fn containers_of(&self, sandbox_id: &str) -> Vec<Arc<Container>> {
        let containers = self.containers.read();
        containers
            .values()
            .filter(|container| container.record.read().sandbox_id == sandbox_id)
            .cloned()
            .collect()
    }

    /// COMPAT: a name is a pod's or container's identity and attempt; making it twice is an error the
    /// kubelet knows.
    pub(crate) fn reserve(&self, name: &str, id: &str) -> Result<(), Status> {
        let mut names = self.names.lock();
        if let Some(owner) = names.get(name) {
            return Err(Status::unknown(format!(
                "failed to reserve name {name:?}: name {name:?} is reserved for {owner:?}"
            )));
        }
        names.insert(name.to_owned(), id.to_owned());
        Ok(())
    }

    pub(crate) fn release(&self, id: &str) {
        self.names.lock().retain(|_, owner| owner != id);
    }

    /// Reads the records, meets the shims again, and cleans up after what did not survive.
    async fn recover(self: &Arc<Self>) {
        // Of checkpoints that were under way when a daemon before this one ended: the memory of containers.
        if let Err(error) = skiff_fs::remove_tree(&self.config.checkpoints()) {
            tracing::warn!(%error, "cannot remove the files of an unfinished checkpoint");
        }
        for directory in list(&self.config.containers()) {
            match Container::load(&directory) {
                Ok(Some(container)) => {
                    let id = container.get().id;
                    self.names
                        .lock()
                        .insert(containers::name_of(&container.get()), id.clone());
                    self.containers.write().insert(id, Arc::new(container));
                }
                // Interrupted while it was made.
                _ => {
                    if let Err(error) = skiff_fs::remove_tree(&directory) {
                        tracing::warn!(%error, directory = %directory.display(), "cannot remove half a container");
                    }
                }
            }
        }
        for directory in list(&self.config.sandboxes()) {
            match Sandbox::load(&directory) {
                Ok(Some(sandbox)) => {
                    let record = sandbox.get();
                    self.names
                        .lock()
                        .insert(sandboxes::name_of(&record.config.0), record.id.clone());
                    self.sandboxes
                        .write()
                        .insert(record.id.clone(), Arc::new(sandbox));
                }
                _ => self.discard_sandbox_directory(&directory),
            }
        }
        let sandboxes: Vec<_> = self.sandboxes.read().values().cloned().collect();
        futures::future::join_all(sandboxes.iter().map(|sandbox| self.meet_shim(sandbox))).await;
        self.discard_strangers().await;
        self.images
            .retain_leases(|holder| self.containers.read().contains_key(holder));
        // Containers whose sandbox is gone.
        let orphans: Vec<_> = self
            .containers
            .read()
            .values()
            .filter(|container| {
                !self
                    .sandboxes
                    .read()
                    .contains_key(&container.record.read().sandbox_id)
            })
            .cloned()
            .collect();
        for container in orphans {
            let id = container.get().id;
            if let Err(error) = self.remove_container(&id).await {
                tracing::warn!(container = %id, error = error.message(), "cannot remove a container without a sandbox");
            }
        }
    }
}

fn list(directory: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect()
}

/// An internal failure, as gRPC carries it.
pub(crate) fn internal(what: &str) -> impl FnOnce(std::io::Error) -> Status {
    let what = what.to_owned();
    move |error| Status::internal(format!("{what}: {error}"))
}
