//! Volumes of storage drivers, by the Container Storage Interface: which drivers are there, which volumes are staged and whose,
//! and what the Node says of that. How a volume is mounted is in `mount.rs` and `block.rs`.

mod block;
mod client;
mod data;
mod expand;
mod mount;
mod node_info;
mod request;
mod stats;

pub(super) use block::let_go_of_all;
pub(super) use mount::CsiVolume;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSIDriver, CSIDriverSpec};
use kube::Client;
use parking_lot::Mutex;
use skiff_client::Informer;
use skiff_csi::Code;
use tokio::sync::{Notify, OwnedMutexGuard, watch};
use tokio_util::sync::CancellationToken;

use super::metrics::VolumeMetrics;
use super::volume_type::Wanted;
use super::{blocking, is_mount_point};
use crate::plugin_registry::{Plugin, PluginHandler};
use client::Driver;
use data::{Key, Layout, Stage};

/// How often volumes that nobody uses any more are looked for, and drivers asked how many they can have.
const SWEEP: Duration = Duration::from_secs(10);
const GLOBAL_MOUNT: &str = "globalmount";

type Version = (u32, u32, u32);

/// Which volumes this node has.
#[derive(Default)]
struct Held {
    /// On the disk as staged, or about to be.
    stages: HashMap<Key, Stage>,
    /// Those that this process has staged: the driver is not asked again.
    staged_now: HashSet<Key>,
    /// The uids of the pods that have or mount a volume.
    users: HashMap<Key, HashSet<String>>,
    /// By the pod's uid and the name of the volume.
    published: HashSet<(String, String)>,
    /// How large volumes are where they are mounted, in bytes.
    sizes: HashMap<Key, i64>,
    /// Those that the driver does not expand while they are in use here.
    expansion_refused: HashSet<Key>,
}

pub struct Csi {
    layout: Layout,
    node_name: String,
    client: Client,
    specs: Informer<CSIDriver>,
    /// This node alone.
    node: Informer<Node>,
    /// A leaf lock.
    drivers: Mutex<HashMap<String, (Version, Driver)>>,
    /// One change of the Node and the CSINode at a time.
    node_info: tokio::sync::Mutex<()>,
    /// One change of a volume at a time. A leaf lock.
    turns: Mutex<HashMap<Key, Arc<tokio::sync::Mutex<()>>>>,
    /// A leaf lock.
    held: Mutex<Held>,
    in_use: watch::Sender<u64>,
    registered: Notify,
    metrics: OnceLock<Arc<VolumeMetrics>>,
}

impl Csi {
    /// Reads from the disk what an earlier life of the node had. Blocking, for a moment.
    pub fn new(
        root: &Path,
        node_name: &str,
        client: Client,
        specs: Informer<CSIDriver>,
        node: Informer<Node>,
    ) -> Self {
        let layout = Layout {
            root: root.to_path_buf(),
        };
        let mut held = Held {
            stages: layout.staged().into_iter().collect(),
            ..Held::default()
        };
        for (uid, keys) in layout.of_pods() {
            for key in keys {
                held.users.entry(key).or_default().insert(uid.clone());
            }
        }
        Csi {
            layout,
            node_name: node_name.to_owned(),
            client,
            specs,
            node,
            drivers: Mutex::default(),
            node_info: tokio::sync::Mutex::default(),
            turns: Mutex::default(),
            held: Mutex::new(held),
            in_use: watch::Sender::new(0),
            registered: Notify::new(),
            metrics: OnceLock::new(),
        }
    }

    /// Makes the CSINode, and looks after volumes that are left, until `shutdown`.
    pub async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let mut pause = Duration::from_millis(100);
        while let Err(error) = self.ensure_csi_node().await {
            tracing::debug!(error, "cannot make the CSINode yet");
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(SWEEP),
            }
        }
        let mut asked: HashMap<String, Instant> = HashMap::new();
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(SWEEP) => {}
            }
            let left: Vec<Key> = {
                let held = self.held.lock();
                let unused = held.stages.keys().filter(|key| !held.users.contains_key(key));
                unused.cloned().collect()
            };
            for key in left {
                self.unstage_if_unused(&key).await;
            }
            let drivers: Vec<String> = self.drivers.lock().keys().cloned().collect();
            asked.retain(|name, _| drivers.contains(name));
            for name in drivers {
                let period = self
                    .spec(&name)
                    .and_then(|spec| spec.node_allocatable_update_period_seconds);
                let period = period.and_then(|seconds| u64::try_from(seconds).ok());
                let at = asked.entry(name.clone()).or_insert_with(Instant::now);
                if period.is_some_and(|period| at.elapsed().as_secs() >= period) {
                    *at = Instant::now();
                    if let Err(error) = self.install(&name).await {
                        tracing::warn!(error, driver = name, "cannot update the CSINode");
                    }
                }
            }
        }
    }

    pub(super) fn count_calls(&self, metrics: &Arc<VolumeMetrics>) {
        // Once is enough.
        let _ = self.metrics.set(metrics.clone());
    }

    /// What the cluster says about a driver; `None` if there is no CSIDriver object, which is optional.
    fn spec(&self, driver: &str) -> Option<CSIDriverSpec> {
        Some(self.specs.get("", driver)?.spec.clone())
    }

    fn attach_required(&self, driver: &str) -> bool {
        self.spec(driver).and_then(|spec| spec.attach_required) != Some(false)
    }

    fn driver(&self, name: &str) -> Result<Driver, String> {
        let drivers = self.drivers.lock();
        let found = drivers.get(name).map(|(_, driver)| driver.clone());
        found.ok_or_else(|| format!("driver name {name} not found in the list of registered CSI drivers"))
    }

    async fn turn(&self, key: &Key) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.turns.lock();
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            turns.entry(key.clone()).or_default().clone()
        };
        turn.lock_owned().await
    }

    /// The volumes that must stay attached, by their unique names.
    pub fn volumes_in_use(&self) -> Vec<String> {
        let keys: BTreeSet<Key> = {
            let held = self.held.lock();
            held.stages.keys().chain(held.users.keys()).cloned().collect()
        };
        keys.iter()
            .filter(|key| self.attach_required(&key.driver))
            .map(Key::unique_name)
            .collect()
    }

    /// Waits until another driver is there: pods may be waiting for it.
    pub async fn driver_registered(&self) {
        self.registered.notified().await;
    }

    /// Changes with what [`Csi::volumes_in_use`] says.
    pub fn in_use_changes(&self) -> watch::Receiver<u64> {
        self.in_use.subscribe()
    }

    fn change(&self, change: impl FnOnce(&mut Held)) {
        change(&mut self.held.lock());
        self.in_use.send_modify(|version| *version += 1);
    }

    fn add_user(&self, key: &Key, uid: &str) {
        self.change(|held| {
            held.users.entry(key.clone()).or_default().insert(uid.to_owned());
        });
    }

    fn remove_user(&self, key: &Key, uid: &str) {
        self.change(|held| {
            if let Some(users) = held.users.get_mut(key) {
                users.remove(uid);
                if users.is_empty() {
                    held.users.remove(key);
                }
            }
        });
    }

    fn other_users(&self, key: &Key, uid: &str) -> bool {
        let held = self.held.lock();
        let mut users = held.users.get(key).into_iter().flatten();
        users.any(|user| user != uid)
    }

    /// Nothing of the pod is mounted any more.
    pub async fn pod_is_gone(&self, uid: &str) {
        let mut keys = Vec::new();
        self.change(|held| {
            held.published.retain(|(user, _)| user != uid);
            held.users.retain(|key, users| {
                if users.remove(uid) {
                    keys.push(key.clone());
                }
                !users.is_empty()
            });
            let users = &held.users;
            held.sizes.retain(|key, _| users.contains_key(key));
            held.expansion_refused.retain(|key| users.contains_key(key));
        });
        for key in keys {
            self.unstage_if_unused(&key).await;
        }
    }

    /// The directory with the files of the volume where it is staged, for the driver.
    fn staging_path(&self, key: &Key, stage: &Stage) -> PathBuf {
        match stage {
            Stage::Filesystem(_) => self.layout.global(key).join(GLOBAL_MOUNT),
            Stage::Block(name) => self.layout.device_staging(name),
        }
    }

    /// Has the driver let go of a volume that no pod uses. What fails is tried again by the sweep.
    async fn unstage_if_unused(&self, key: &Key) {
        let _turn = self.turn(key).await;
        let stage = {
            let held = self.held.lock();
            if held.users.contains_key(key) {
                return;
            }
            held.stages.get(key).cloned()
        };
        let Some(stage) = stage else {
            return;
        };
        if let Err(error) = self.unstage(key, &stage).await {
            tracing::warn!(
                error,
                driver = key.driver,
                volume = key.handle,
                "cannot unstage a volume; trying again"
            );
            return;
        }
        self.change(|held| {
            held.stages.remove(key);
            held.staged_now.remove(key);
        });
    }

    async fn unstage(&self, key: &Key, stage: &Stage) -> Result<(), String> {
        let driver = self.driver(&key.driver)?;
        let capabilities = driver.capabilities().await.map_err(|e| e.to_string())?;
        let staging = self.staging_path(key, stage);
        if capabilities.stage {
            match driver.unstage(&key.handle, &staging).await {
                // The volume is deleted. If something of it is still mounted, the removal below says so.
                Err(error) if error.code == Code::NotFound => {}
                unstaged => unstaged.map_err(|error| error.to_string())?,
            }
        }
        let (layout, stage) = (self.layout.clone(), stage.clone());
        blocking(move || match stage {
            Stage::Filesystem(directory) => remove_mount_dir(&staging, &directory),
            Stage::Block(name) => block::remove_global(&layout, &name),
        })
        .await
    }
}

/// The driver of a volume, if it has one.
pub(super) fn driver_of(wanted: &Wanted<'_>) -> Option<String> {
    mount::source_of(wanted).map(|source| source.key(wanted).driver)
}

/// The driver of what is in a pod's directory, if it has one.
pub(super) fn driver_at(directory: &Path) -> Option<String> {
    data::Data::load(directory).ok()?.map(|data| data.driver_name)
}

/// Removes the place of a mount that is gone, and what we noted about it. Nothing in it: a driver that left files there has
/// not unmounted.
fn remove_mount_dir(mount: &Path, directory: &Path) -> Result<(), String> {
    if is_mount_point(mount).map_err(|error| error.to_string())? {
        return Err(format!("{} is still mounted", mount.display()));
    }
    let gone = |path: &Path, result: std::io::Result<()>| match result {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("failed to remove [{}]: {error}", path.display()))
        }
        _ => Ok(()),
    };
    gone(mount, std::fs::remove_dir(mount))?;
    gone(directory, std::fs::remove_file(directory.join(data::FILE)))?;
    gone(directory, std::fs::remove_dir(directory))
}

fn log(message: impl std::fmt::Display) -> String {
    format!("kubernetes.io/csi: {message}")
}

/// The highest of the versions that this kubelet speaks: those of CSI 1.
fn highest_version(versions: &[String]) -> Option<Version> {
    let parse = |text: &String| -> Option<Version> {
        let text = text.strip_prefix('v').unwrap_or(text);
        let mut parts = text.split('.').map(|part| part.parse::<u32>());
        let major = parts.next()?.ok()?;
        let mut rest = parts.map(|part| part.ok());
        let version = (
            major,
            rest.next().unwrap_or(Some(0))?,
            rest.next().unwrap_or(Some(0))?,
        );
        (major == 1).then_some(version)
    };
    versions.iter().filter_map(parse).max()
}

#[async_trait]
impl PluginHandler for Csi {
    fn validate(&self, plugin: &Plugin) -> Result<(), String> {
        let (name, endpoint) = (&plugin.name, plugin.endpoint.display());
        let refuse = |why: String| {
            Err(format!(
                "validation failed for CSI Driver {name} at endpoint {endpoint}: {}",
                log(why)
            ))
        };
        // The name becomes a folder.
        if name.is_empty() || name.len() > 63 || name.contains('/') || name.starts_with('.') {
            return refuse(format!("{name:?} is no name of a CSI driver"));
        }
        if plugin.versions.is_empty() {
            return refuse(format!(
                "ValidatePlugin for CSI driver {name:?} failed. Plugin returned an empty list for supported versions"
            ));
        }
        let Some(version) = highest_version(&plugin.versions) else {
            return refuse(format!(
                "ValidatePlugin for CSI driver {name:?} failed. None of the versions specified {:?} are supported",
                plugin.versions
            ));
        };
        match self.drivers.lock().get(name) {
            Some((present, _)) if *present >= version => refuse(format!(
                "ValidatePlugin for CSI driver {name:?} failed. Another driver with the same name is already registered with a higher supported version: \"{}.{}.{}\"",
                present.0, present.1, present.2
            )),
            _ => Ok(()),
        }
    }

    async fn register(&self, plugin: &Plugin) -> Result<(), String> {
        let version = highest_version(&plugin.versions).unwrap_or_default();
        let driver = Driver::new(&plugin.endpoint, &plugin.name, self.metrics.get().cloned());
        self.drivers.lock().insert(plugin.name.clone(), (version, driver));
        let installed = self.install(&plugin.name).await;
        match &installed {
            Ok(()) => self.registered.notify_one(),
            Err(_) => self.deregister(plugin).await,
        }
        installed
    }

    async fn deregister(&self, plugin: &Plugin) {
        {
            let mut drivers = self.drivers.lock();
            // Another one may have taken its place.
            match drivers.get(&plugin.name) {
                Some((_, driver)) if driver.endpoint == plugin.endpoint => drivers.remove(&plugin.name),
                _ => return,
            };
        }
        if let Err(error) = self.uninstall(&plugin.name).await {
            tracing::warn!(
                error,
                driver = plugin.name,
                "cannot take a driver out of the CSINode"
            );
        }
    }
}

impl Csi {
    /// Asks the driver for its node, and tells the API.
    async fn install(&self, name: &str) -> Result<(), String> {
        let info = self
            .driver(name)?
            .info()
            .await
            .map_err(|error| error.to_string())?;
        self.install_driver(name, &info).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        let check = |versions: &[&str], expected: Option<Version>| {
            let versions: Vec<String> = versions.iter().map(|v| (*v).to_owned()).collect();
            assert_eq!(highest_version(&versions), expected);
        };
        check(&["1.0.0"], Some((1, 0, 0)));
        check(&["v1.2", "1.10.1", "2.0.0"], Some((1, 10, 1)));
        check(&["0.3.0", "2.0.0", "x"], None);
    }

    #[test]
    fn what_a_driver_left_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("volume");
        let mount = volume.join("mount");
        std::fs::create_dir_all(&mount).unwrap();
        std::fs::write(volume.join(data::FILE), "{}").unwrap();
        std::fs::write(mount.join("precious"), "x").unwrap();
        assert!(remove_mount_dir(&mount, &volume).is_err());
        assert!(mount.join("precious").exists());
        std::fs::remove_file(mount.join("precious")).unwrap();
        remove_mount_dir(&mount, &volume).unwrap();
        remove_mount_dir(&mount, &volume).unwrap();
        assert!(!volume.exists());
    }
}
