//! Plugins that make themselves known by a socket in `<root>/plugins_registry`: the folder is looked through, each socket is
//! asked who it is, and handed to whoever handles its type. It knows no type itself.

use std::collections::HashMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use skiff_csi::registration::registration_client::RegistrationClient;
use skiff_csi::registration::{InfoRequest, RegistrationStatus};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The type that storage drivers register with.
pub const CSI_PLUGIN: &str = "CSIPlugin";

/// How often the folder is looked through. As often as upstream brings the sockets it was told of to their plugins.
const PERIOD: Duration = Duration::from_secs(1);
const INFO_TIMEOUT: Duration = Duration::from_secs(5);
/// A handler asks the plugin and the API; it must come to an end.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(150);
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LAST_RETRY: Duration = Duration::from_secs(122);
/// Plugins may make folders of their own; links and loops of mounts must not lead on for ever.
const MAX_DEPTH: usize = 3;
const MAX_SOCKETS: usize = 256;
const MAX_ENTRIES: usize = 4096;

/// A plugin as it describes itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plugin {
    /// [`CSI_PLUGIN`] or another type.
    pub kind: String,
    pub name: String,
    /// The socket of its service: the registration socket itself if it names no other.
    pub endpoint: PathBuf,
    pub versions: Vec<String>,
}

/// Takes the plugins of one type. Errors are sentences: the plugin is told them.
#[async_trait]
pub trait PluginHandler: Send + Sync {
    /// Whether the plugin can be had at all.
    fn validate(&self, plugin: &Plugin) -> Result<(), String>;
    /// Called again for a plugin whose socket was made anew, after `deregister`.
    async fn register(&self, plugin: &Plugin) -> Result<(), String>;
    /// Its socket is gone.
    async fn deregister(&self, plugin: &Plugin);
}

/// Which socket it is: one that was made anew has the same path.
type Identity = (u64, i64, i64);

enum State {
    /// A task is at it.
    Asked,
    Registered(Plugin),
    /// To be asked at this time.
    Failed(Instant),
}

struct Socket {
    identity: Identity,
    state: State,
    /// The last pause after a failure.
    pause: Duration,
}

pub struct PluginRegistry {
    directory: PathBuf,
    handlers: HashMap<&'static str, Arc<dyn PluginHandler>>,
    sockets: HashMap<PathBuf, Socket>,
}

impl PluginRegistry {
    pub fn new(directory: PathBuf) -> Self {
        PluginRegistry {
            directory,
            handlers: HashMap::new(),
            sockets: HashMap::new(),
        }
    }

    /// Has the plugins of a type handled.
    pub fn handle(mut self, kind: &'static str, handler: Arc<dyn PluginHandler>) -> Self {
        self.handlers.insert(kind, handler);
        self
    }

    /// Registers plugins until `shutdown`. They stay registered when it ends: their volumes and devices are still in use.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let handlers = Arc::new(std::mem::take(&mut self.handlers));
        let mut asked = JoinSet::new();
        loop {
            let directory = self.directory.clone();
            let found = tokio::task::spawn_blocking(move || sockets_below(&directory)).await;
            for plugin in self.reconcile(found.unwrap_or_default(), Instant::now()) {
                if let Some(handler) = handlers.get(plugin.kind.as_str()) {
                    tracing::info!(plugin = plugin.name, kind = plugin.kind, "a plugin is gone");
                    handler.deregister(&plugin).await;
                }
            }
            for (path, socket) in &mut self.sockets {
                let due = matches!(socket.state, State::Failed(at) if at <= Instant::now());
                if due {
                    socket.state = State::Asked;
                    let (path, identity, handlers) = (path.clone(), socket.identity, handlers.clone());
                    asked.spawn(async move {
                        let registered = register(&path, &handlers).await;
                        (path, identity, registered)
                    });
                }
            }
            let next = tokio::time::sleep(PERIOD);
            tokio::pin!(next);
            loop {
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    () = &mut next => break,
                    Some(done) = asked.join_next() => match done {
                        Ok((path, identity, result)) => {
                            if let Some(plugin) = self.note(&path, identity, result)
                                && let Some(handler) = handlers.get(plugin.kind.as_str())
                            {
                                handler.deregister(&plugin).await;
                            }
                        }
                        Err(error) => tracing::error!(%error, "registering a plugin panicked"),
                    },
                }
            }
        }
    }

    /// Compares what is there with what is known. Returns the plugins that are gone; those to be asked have a
    /// state that is due.
    fn reconcile(&mut self, found: HashMap<PathBuf, Identity>, now: Instant) -> Vec<Plugin> {
        let mut gone = Vec::new();
        self.sockets.retain(|path, socket| {
            let stays = found.get(path) == Some(&socket.identity);
            if !stays && let State::Registered(plugin) = &socket.state {
                gone.push(plugin.clone());
            }
            stays
        });
        for (path, identity) in found {
            self.sockets.entry(path).or_insert(Socket {
                identity,
                state: State::Failed(now),
                pause: Duration::ZERO,
            });
        }
        gone
    }

    /// Notes how asking went. Returns the plugin if its socket has gone meanwhile.
    fn note(&mut self, path: &Path, identity: Identity, result: Result<Plugin, String>) -> Option<Plugin> {
        let socket = self
            .sockets
            .get_mut(path)
            .filter(|socket| socket.identity == identity);
        let Some(socket) = socket else {
            return result.ok();
        };
        match result {
            Ok(plugin) => {
                tracing::info!(plugin = plugin.name, kind = plugin.kind, "a plugin is registered");
                socket.state = State::Registered(plugin);
            }
            Err(error) => {
                tracing::warn!(error, socket = %path.display(), "cannot register a plugin; trying again");
                let pause = (socket.pause * 2).clamp(FIRST_RETRY, LAST_RETRY);
                socket.pause = pause;
                socket.state = State::Failed(Instant::now() + pause);
            }
        }
        None
    }
}

/// The sockets in the folder and its folders. Names that begin with a dot are not for us.
fn sockets_below(directory: &Path) -> HashMap<PathBuf, Identity> {
    let mut found = HashMap::new();
    let mut pending = vec![(directory.to_path_buf(), 0)];
    let mut entries = 0;
    while let Some((directory, depth)) = pending.pop() {
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            entries += 1;
            if entries > MAX_ENTRIES || found.len() >= MAX_SOCKETS {
                return found;
            }
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            if metadata.is_dir() && depth < MAX_DEPTH {
                pending.push((entry.path(), depth + 1));
            } else if metadata.file_type().is_socket() {
                let identity = (metadata.ino(), metadata.ctime(), metadata.ctime_nsec());
                found.insert(entry.path(), identity);
            }
        }
    }
    found
}

/// Asks the plugin who it is, has it handled, and tells it how that went.
async fn register(
    socket: &Path,
    handlers: &HashMap<&'static str, Arc<dyn PluginHandler>>,
) -> Result<Plugin, String> {
    let mut client = RegistrationClient::new(skiff_csi::channel(socket));
    let asked = tokio::time::timeout(INFO_TIMEOUT, client.get_info(InfoRequest {})).await;
    let info = match asked {
        Ok(Ok(answer)) => answer.into_inner(),
        Ok(Err(status)) => {
            return Err(format!("failed to get plugin info using RPC GetInfo: {status}"));
        }
        Err(_) => return Err("failed to get plugin info using RPC GetInfo: no answer in time".to_owned()),
    };
    let endpoint = if info.endpoint.is_empty() {
        socket.to_path_buf()
    } else {
        // As a path or as `unix:///path`.
        let path = info.endpoint.strip_prefix("unix://").unwrap_or(&info.endpoint);
        PathBuf::from(path)
    };
    let plugin = Plugin {
        kind: info.r#type,
        name: info.name,
        endpoint,
        versions: info.supported_versions,
    };
    let handled = match handlers.get(plugin.kind.as_str()) {
        None => Err(format!(
            "no handler registered for plugin type: {} at socket {}",
            plugin.kind,
            socket.display()
        )),
        Some(handler) => match handler.validate(&plugin) {
            Err(error) => Err(format!("plugin validation failed with err: {error}")),
            Ok(()) => match tokio::time::timeout(REGISTER_TIMEOUT, handler.register(&plugin)).await {
                Ok(Err(error)) => Err(format!("plugin registration failed with err: {error}")),
                Err(_) => {
                    handler.deregister(&plugin).await;
                    Err("plugin registration failed with err: no answer in time".to_owned())
                }
                Ok(Ok(())) => Ok(()),
            },
        },
    };
    let status = RegistrationStatus {
        plugin_registered: handled.is_ok(),
        error: handled.clone().err().unwrap_or_default(),
    };
    let told = tokio::time::timeout(INFO_TIMEOUT, client.notify_registration_status(status)).await;
    if !matches!(told, Ok(Ok(_))) {
        tracing::debug!(
            plugin = plugin.name,
            "the plugin did not want to know whether it is registered"
        );
    }
    handled.map(|()| plugin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use skiff_csi::registration::registration_server::{Registration, RegistrationServer};
    use skiff_csi::registration::{PluginInfo, RegistrationStatusResponse};
    use skiff_csi::{Request, Response, Status};

    struct Asked {
        kind: &'static str,
        told: Arc<Mutex<Vec<RegistrationStatus>>>,
    }

    #[async_trait]
    impl Registration for Asked {
        async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
            Ok(Response::new(PluginInfo {
                r#type: self.kind.to_owned(),
                name: "driver".to_owned(),
                endpoint: "/other.sock".to_owned(),
                supported_versions: vec!["1.0.0".to_owned()],
            }))
        }
        async fn notify_registration_status(
            &self,
            request: Request<RegistrationStatus>,
        ) -> Result<Response<RegistrationStatusResponse>, Status> {
            self.told.lock().push(request.into_inner());
            Ok(Response::new(RegistrationStatusResponse {}))
        }
    }

    #[derive(Default)]
    struct Noted(Mutex<Vec<String>>);

    #[async_trait]
    impl PluginHandler for Noted {
        fn validate(&self, plugin: &Plugin) -> Result<(), String> {
            assert_eq!(plugin.versions, ["1.0.0"]);
            Ok(())
        }
        async fn register(&self, plugin: &Plugin) -> Result<(), String> {
            let place = plugin.endpoint.display();
            self.0.lock().push(format!("+{} {place}", plugin.name));
            Ok(())
        }
        async fn deregister(&self, plugin: &Plugin) {
            self.0.lock().push(format!("-{}", plugin.name));
        }
    }

    fn serve(
        path: &Path,
        kind: &'static str,
    ) -> (tokio::task::JoinHandle<()>, Arc<Mutex<Vec<RegistrationStatus>>>) {
        let told = Arc::new(Mutex::default());
        let service = RegistrationServer::new(Asked {
            kind,
            told: told.clone(),
        });
        let listener = tokio::net::UnixListener::bind(path).unwrap();
        let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
        let serving = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(incoming);
        (tokio::spawn(async move { serving.await.unwrap() }), told)
    }

    async fn until(what: impl Fn() -> bool) {
        let waited = tokio::time::timeout(Duration::from_secs(60), async {
            while !what() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        waited.await.unwrap();
    }

    #[tokio::test]
    async fn plugins_come_and_go() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        let handler = Arc::new(Noted::default());
        let shutdown = CancellationToken::new();
        let registry = PluginRegistry::new(dir.path().to_path_buf()).handle(CSI_PLUGIN, handler.clone());
        let running = tokio::spawn(registry.run(shutdown.clone()));
        let socket = dir.path().join("sub/driver-reg.sock");
        let (server, told) = serve(&socket, CSI_PLUGIN);
        let (other, refused) = serve(&dir.path().join("other.sock"), "NoSuchPlugin");
        std::fs::write(dir.path().join("file"), "x").unwrap();
        until(|| told.lock().iter().any(|status| status.plugin_registered)).await;
        assert_eq!(*handler.0.lock(), ["+driver /other.sock"]);
        until(|| !refused.lock().is_empty()).await;
        let error = refused.lock()[0].error.clone();
        assert!(
            error.starts_with("no handler registered for plugin type: NoSuchPlugin"),
            "{error}"
        );
        // The plugin is restarted: its socket is made anew.
        server.abort();
        let _ = server.await;
        std::fs::remove_file(&socket).unwrap();
        let (server, told) = serve(&socket, CSI_PLUGIN);
        until(|| told.lock().iter().any(|status| status.plugin_registered)).await;
        std::fs::remove_file(&socket).unwrap();
        until(|| handler.0.lock().len() == 4).await;
        assert_eq!(
            *handler.0.lock(),
            ["+driver /other.sock", "-driver", "+driver /other.sock", "-driver"]
        );
        shutdown.cancel();
        running.await.unwrap();
        server.abort();
        other.abort();
    }
}
