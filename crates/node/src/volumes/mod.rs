//! A pod's volumes: made before its containers start, kept up to date while they run, taken away after.
//! One file a type. What is not built is refused with a sentence; nothing is silently left out.

pub mod atomic_writer;
mod claims;
mod config_map;
pub mod csi;
mod disks;
mod downward_api;
mod empty_dir;
mod host_path;
mod image;
mod keyed;
mod local;
mod metrics;
mod nfs;
mod ownership;
mod projected;
mod secret;
pub mod sub_path;
mod tokens;
mod usage;
mod volume_type;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::{Pod, Volume};
use parking_lot::Mutex;

use crate::field_ref::NodeFacts;
use crate::objects::Objects;
use crate::pod_certificates::PodCertificates;
use crate::pods;
use atomic_writer::Payload;
use csi::Csi;
use disks::Disks;
pub use disks::remove_disks;
use metrics::VolumeMetrics;
use skiff_client::EventRecorder;
use skiff_fs::{remove_tree, unmount_below};
use skiff_prometheus::Registry;
use tokens::Tokens;
pub use usage::{FileVolume, FsUsage};
use volume_type::{Ready, VolumeType, Wanted};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountedVolume {
    /// The directory, or the device of a block volume.
    pub path: PathBuf,
    /// Volumes of files the kubelet writes are not for containers to change.
    pub read_only: bool,
}

pub type MountedVolumes = HashMap<String, MountedVolume>;

/// One volume of a pod that could not be mounted. `volume` is its name in the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeError {
    pub volume: String,
    pub cause: SetUpError,
}

/// Why a volume could not be mounted, in the two forms in which upstream reports it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetUpError {
    /// A step of mounting failed. `name` is the name of the PersistentVolume if there is one.
    #[error("{step} failed for volume {name:?} : {message}")]
    Step {
        step: &'static str,
        name: String,
        message: String,
    },
    /// It is not known yet, or not allowed, what to mount: the claim is not bound, for example.
    #[error("{0}")]
    Unprocessed(String),
}

impl SetUpError {
    fn set_up(name: &str, message: String) -> Self {
        Self::step("MountVolume.SetUp", name, message)
    }

    fn step(step: &'static str, name: &str, message: String) -> Self {
        SetUpError::Step {
            step,
            name: name.to_owned(),
            message,
        }
    }
}

/// The messages of the FailedMount events: one for each volume whose mounting failed, and one for all those of which
/// it is not known what to mount.
pub fn event_messages(errors: &[VolumeError]) -> Vec<String> {
    let mut messages = Vec::new();
    let (mut unmounted, mut unprocessed, mut causes) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    for error in errors {
        unmounted.insert(error.volume.as_str());
        match &error.cause {
            SetUpError::Step { .. } => messages.push(error.cause.to_string()),
            SetUpError::Unprocessed(cause) => {
                unprocessed.insert(error.volume.as_str());
                causes.push(cause.as_str());
            }
        }
    }
    if !causes.is_empty() {
        let list = |names: BTreeSet<&str>| names.into_iter().collect::<Vec<_>>().join(" ");
        messages.push(format!(
            "Unable to attach or mount volumes: unmounted volumes=[{}], unattached volumes=[], failed to process volumes=[{}]: {}",
            list(unmounted),
            list(unprocessed),
            causes.join("; ")
        ));
    }
    messages
}

pub struct Volumes {
    /// `<data_dir>/pods`.
    root: PathBuf,
    objects: Arc<dyn Objects>,
    tokens: Tokens,
    recorder: Option<EventRecorder>,
    /// The PersistentVolumes that pods of this node have mounted.
    claimed: Mutex<claims::Claimed>,
    /// `None` where there is nobody to ask for them.
    certificates: Option<Arc<PodCertificates>>,
    /// The drivers of others; `None` where there is no API to tell of them.
    csi: Option<Arc<Csi>>,
    disks: Arc<Disks>,
    metrics: Option<Arc<VolumeMetrics>>,
    /// Off in unit tests, which must not mount.
    memory_backed: bool,
}

impl Volumes {
    pub fn new(data_dir: &Path, objects: Arc<dyn Objects>) -> Self {
        Volumes {
            root: data_dir.join("pods"),
            objects,
            tokens: Tokens::default(),
            recorder: None,
            claimed: Mutex::default(),
            certificates: None,
            csi: None,
            disks: Disks::new(data_dir, disks::Host::default()),
            metrics: None,
            memory_backed: true,
        }
    }

    /// Where warnings about volumes that are mounted all the same go.
    pub fn with_recorder(self, recorder: EventRecorder) -> Self {
        Volumes {
            recorder: Some(recorder),
            ..self
        }
    }

    pub fn with_certificates(self, certificates: Arc<PodCertificates>) -> Self {
        Volumes {
            certificates: Some(certificates),
            ..self
        }
    }

    pub fn with_csi(self, csi: Arc<Csi>) -> Self {
        Volumes {
            csi: Some(csi),
            ..self
        }
    }

    /// Where it is counted how long volumes take, and calls of storage drivers.
    pub fn with_metrics(self, registry: &Registry) -> Self {
        let metrics = VolumeMetrics::new(registry);
        if let Some(csi) = &self.csi {
            csi.count_calls(&metrics);
        }
        Volumes {
            metrics: Some(metrics),
            ..self
        }
    }

    fn count(&self, plugin: &str, driver: Option<&str>, operation: &str, succeeded: bool, began: Instant) {
        if let Some(metrics) = &self.metrics {
            metrics.operation(plugin, driver, operation, succeeded, began.elapsed());
        }
    }

    /// Has the type of the volume make it.
    async fn set_up_by(&self, plugin: &dyn VolumeType, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let began = Instant::now();
        let ready = plugin.set_up(self, wanted).await;
        let operation = match wanted.claimed.is_some_and(|claimed| claimed.block) {
            true => "map_volume",
            false => "volume_mount",
        };
        let driver = csi::driver_of(wanted);
        self.count(plugin.name(), driver.as_deref(), operation, ready.is_ok(), began);
        ready
    }

    fn warn(&self, pod: &Pod, reason: &str, message: String) {
        if let Some(recorder) = &self.recorder {
            recorder.event(&pods::reference(pod), "Warning", reason, message);
        }
    }

    pub fn pod_dir(&self, uid: &str) -> PathBuf {
        self.root.join(uid)
    }

    fn volume_dir(&self, uid: &str, plugin: &str, name: &str) -> PathBuf {
        self.pod_dir(uid)
            .join("volumes")
            .join(format!("kubernetes.io~{plugin}"))
            .join(name)
    }

    /// Tells that a volume was made to the end.
    fn ready_file(&self, uid: &str, plugin: &str, name: &str) -> PathBuf {
        self.pod_dir(uid)
            .join("plugins")
            .join(format!("kubernetes.io~{plugin}"))
            .join(name)
            .join("ready")
    }

    /// Makes or refreshes all volumes of the pod that a container mounts. Safe to repeat.
    pub async fn set_up(&self, pod: &Pod, facts: &NodeFacts) -> Result<MountedVolumes, Vec<VolumeError>> {
        self.objects.follow(pod);
        let used = pods::used_volumes(pod);
        let volumes: Vec<&Volume> = pod
            .spec
            .iter()
            .flat_map(|spec| spec.volumes.iter().flatten())
            .filter(|volume| used.contains(volume.name.as_str()))
            .collect();
        let results =
            futures::future::join_all(volumes.iter().map(|volume| self.set_up_one(pod, volume, facts))).await;
        let mut mounted = MountedVolumes::new();
        let mut errors = Vec::new();
        for (volume, result) in volumes.into_iter().zip(results) {
            match result {
                Ok(one) => {
                    mounted.insert(volume.name.clone(), one);
                }
                Err(cause) => errors.push(VolumeError {
                    volume: volume.name.clone(),
                    cause,
                }),
            }
        }
        if errors.is_empty() {
            Ok(mounted)
        } else {
            Err(errors)
        }
    }

    async fn set_up_one(
        &self,
        pod: &Pod,
        volume: &Volume,
        facts: &NodeFacts,
    ) -> Result<MountedVolume, SetUpError> {
        if let Some(reference) = claims::reference(pod, volume) {
            return self.set_up_claim(pod, volume, reference, facts).await;
        }
        let wanted = Wanted {
            pod,
            volume,
            facts,
            claimed: None,
        };
        let Some(plugin) = volume_type::of(&wanted) else {
            let kind = type_name(volume);
            let message = format!("{kind} volumes are not supported by this node");
            return Err(wanted.set_up_error(message));
        };
        let ready = self.set_up_by(plugin, &wanted).await?;
        Ok(self.mounted(pod, ready))
    }

    fn mounted(&self, pod: &Pod, ready: Ready) -> MountedVolume {
        if let Some(warning) = ready.warning {
            self.warn(pod, "AlreadyMountedVolume", warning);
        }
        MountedVolume {
            path: ready.path,
            read_only: ready.read_only,
        }
    }

    async fn write_files(
        &self,
        wanted: &Wanted<'_>,
        plugin: &str,
        payload: Payload,
        memory: bool,
    ) -> Result<Ready, SetUpError> {
        let path = self.volume_dir(wanted.uid(), plugin, wanted.name());
        let memory = memory && self.memory_backed;
        let (group, _) = fs_group(wanted.pod);
        let target = path.clone();
        blocking(move || {
            empty_dir::set_up(&target, memory, None, 0o777)?;
            atomic_writer::write(&target, &payload, || ownership::apply(&target, group, None, true))
                .map(|_| ())
        })
        .await
        .map_err(|error: io::Error| wanted.set_up_error(error))?;
        Ok(Ready::files(path))
    }

    /// Where the device of a pod's block volume is noted, as a link.
    fn device_link(&self, uid: &str, plugin: &str, name: &str) -> PathBuf {
        self.pod_dir(uid)
            .join("volumeDevices")
            .join(format!("kubernetes.io~{plugin}"))
            .join(name)
    }

    /// The place where a container's sub-path mount is bound.
    pub fn sub_path_dir(&self, uid: &str, volume: &str, container: &str, index: usize) -> PathBuf {
        self.pod_dir(uid)
            .join("volume-subpaths")
            .join(volume)
            .join(container)
            .join(index.to_string())
    }

    /// Unmounts and removes all volumes of a pod, by what is on the disk: the pod object may be gone. All are tried.
    pub async fn tear_down(&self, uid: &str) -> io::Result<()> {
        self.tokens.forget(uid);
        self.objects.forget(uid);
        if let Some(certificates) = &self.certificates {
            certificates.forget(uid);
        }
        self.disks.settle(uid).await;
        let pod_dir = self.pod_dir(uid);
        let sub_paths = pod_dir.join("volume-subpaths");
        // They stand on the volumes.
        blocking(move || {
            unmount_below(&sub_paths)?;
            remove_tree(&sub_paths)
        })
        .await?;
        let mut errors = Vec::new();
        for (folder, path) in volumes_in(&pod_dir.join("volumes")) {
            let torn_down = match volume_type::by_folder(&folder) {
                Some(plugin) => {
                    let (place, began) = (path.clone(), Instant::now());
                    // In volumes of other types the files are the pod's: a pipe, or a link, or of a server that hangs.
                    let driver = match plugin.name() {
                        "csi" => blocking(move || csi::driver_at(&place)).await,
                        _ => None,
                    };
                    let torn_down = plugin.tear_down(self, uid, &path).await;
                    let succeeded = torn_down.is_ok();
                    self.count(
                        plugin.name(),
                        driver.as_deref(),
                        "volume_unmount",
                        succeeded,
                        began,
                    );
                    torn_down
                }
                None => volume_type::unmount_and_remove(path).await,
            };
            errors.extend(torn_down.err());
        }
        for (folder, link) in volumes_in(&pod_dir.join("volumeDevices")) {
            let torn_down = match volume_type::by_folder(&folder) {
                Some(plugin) => {
                    let began = Instant::now();
                    let torn_down = plugin.tear_down_device(self, uid, &link).await;
                    self.count(plugin.name(), None, "unmap_volume", torn_down.is_ok(), began);
                    torn_down
                }
                None => volume_type::remove_link(&link).map_err(|error| error.to_string()),
            };
            errors.extend(torn_down.err());
        }
        if !errors.is_empty() {
            return Err(io::Error::other(errors.join("; ")));
        }
        blocking(move || {
            for part in ["volumes", "volumeDevices", "plugins"] {
                unmount_below(&pod_dir.join(part))?;
                remove_tree(&pod_dir.join(part))?;
            }
            io::Result::Ok(())
        })
        .await?;
        // Only now: until here another pod must not take a volume that is for one pod alone.
        self.claimed.lock().forget(uid);
        if let Some(csi) = &self.csi {
            csi.pod_is_gone(uid).await;
        }
        self.disks.pod_is_gone(uid).await;
        Ok(())
    }

    /// Removes what is left of a pod's directory; its volumes are gone by now.
    pub async fn remove_pod_dir(&self, uid: &str) -> io::Result<()> {
        let pod_dir = self.pod_dir(uid);
        blocking(move || {
            unmount_below(&pod_dir)?;
            remove_tree(&pod_dir)
        })
        .await
    }

    /// The pods that have a directory here.
    pub fn pods_on_disk(&self) -> Vec<String> {
        std::fs::read_dir(&self.root)
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect()
    }
}

/// File work may wait for a disk; it must not hold up the runtime's threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(output) => output,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

fn fs_group(pod: &Pod) -> (Option<i64>, Option<String>) {
    let context = pod.spec.as_ref().and_then(|s| s.security_context.as_ref());
    (
        context.and_then(|c| c.fs_group),
        context.and_then(|c| c.fs_group_change_policy.clone()),
    )
}

/// Whether something is mounted there. A bind within one filesystem shows in the kernel's table only.
fn is_mount_point(path: &Path) -> io::Result<bool> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(true);
    };
    // Not the mount itself: what it leads to may not answer.
    let resolved = match parent.canonicalize() {
        Ok(parent) => parent.join(name),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    Ok(skiff_fs::mounts_below(parent)?.contains(&resolved))
}

/// Takes down what is mounted below the directory, and on it.
fn unmount_at(directory: &Path) -> io::Result<()> {
    unmount_below(directory)?;
    if is_mount_point(directory)? {
        let flags = rustix::mount::UnmountFlags::NOFOLLOW;
        rustix::mount::unmount(directory, flags)
            .or_else(|_| rustix::mount::unmount(directory, flags | rustix::mount::UnmountFlags::DETACH))?;
    }
    Ok(())
}

/// The volumes in a pod's directory: the folder of their type, and their own path.
fn volumes_in(directory: &Path) -> Vec<(String, PathBuf)> {
    let entries = |directory: &Path| std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries(directory)
        .filter_map(|folder| Some((folder.file_name().into_string().ok()?, folder.path())))
        .flat_map(|(name, path)| entries(&path).map(move |entry| (name.clone(), entry.path())))
        .collect()
}

/// Makes the link that notes a device, in the place of one that says something else.
fn link_device(device: &Path, link: &Path) -> io::Result<()> {
    if std::fs::read_link(link).is_ok_and(|present| present == device) {
        return Ok(());
    }
    link.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    volume_type::remove_link(link)?;
    std::os::unix::fs::symlink(device, link)
}

/// The type of a volume by its name in the API.
fn type_name(volume: &Volume) -> String {
    let fields = serde_json::to_value(volume).unwrap_or_default();
    let named = fields.as_object().into_iter().flatten();
    let mut named = named.map(|(field, _)| field).filter(|field| *field != "name");
    named.next().cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests;
