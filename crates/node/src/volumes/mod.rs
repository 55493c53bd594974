//! A pod's volumes: made before its containers start, kept up to date while they run, taken away after.
//! One file a type. What is not built is refused with a sentence; nothing is silently left out.

pub mod atomic_writer;
mod claims;
mod downward_api;
mod empty_dir;
mod host_path;
mod keyed;
mod local;
mod ownership;
mod persistent;
pub mod sub_path;
mod tokens;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, ProjectedVolumeSource, Volume};
use parking_lot::Mutex;

use crate::field_ref::NodeFacts;
use crate::objects::Objects;
use crate::pods;
use crate::resources::value;
use atomic_writer::{File, Payload};
use skiff_client::EventRecorder;
use skiff_fs::{remove_tree, unmount_below};
use tokens::Tokens;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountedVolume {
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

/// What the files below a directory take on the disk.
pub fn disk_usage(path: &Path) -> u64 {
    empty_dir::usage(path)
}

pub struct Volumes {
    /// `<data_dir>/pods`.
    root: PathBuf,
    objects: Arc<dyn Objects>,
    tokens: Tokens,
    recorder: Option<EventRecorder>,
    /// The PersistentVolumes that pods of this node have mounted.
    claimed: Mutex<claims::Claimed>,
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

    /// The disk space an emptyDir takes. Blocking.
    pub fn empty_dir_usage(&self, uid: &str, name: &str) -> u64 {
        empty_dir::usage(&self.volume_dir(uid, "empty-dir", name))
    }

    /// Makes or refreshes all volumes of the pod that a container mounts. Safe to repeat.
    pub async fn set_up(&self, pod: &Pod, facts: &NodeFacts) -> Result<MountedVolumes, Vec<VolumeError>> {
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
        self.set_up_own(pod, volume, facts)
            .await
            .map_err(|message| SetUpError::set_up(&volume.name, message))
    }

    /// A volume that the pod describes itself.
    async fn set_up_own(
        &self,
        pod: &Pod,
        volume: &Volume,
        facts: &NodeFacts,
    ) -> Result<MountedVolume, String> {
        let uid = pods::uid(pod);
        let namespace = pods::namespace(pod);
        if let Some(source) = &volume.host_path {
            let source = source.clone();
            let path = blocking(move || host_path::set_up(&source)).await?;
            return Ok(MountedVolume {
                path,
                read_only: false,
            });
        }
        if volume.image.is_some() {
            // The runtime mounts it; there is nothing of it on the node.
            return Ok(MountedVolume {
                path: PathBuf::new(),
                read_only: true,
            });
        }
        if let Some(source) = &volume.empty_dir {
            let path = self.volume_dir(uid, "empty-dir", &volume.name);
            let medium = source.medium.clone().unwrap_or_default();
            if !matches!(medium.as_str(), "" | "Memory") {
                return Err(format!(
                    "emptyDir medium {medium:?} is not supported by this node"
                ));
            }
            let memory = medium == "Memory" && self.memory_backed;
            let limits = pod.spec.as_ref().map(skiff_pods::requests::spec_limits);
            let pod_limit = limits.map(|limits| limits.memory).filter(|l| *l > 0);
            let asked = source.size_limit.as_ref().map(value).filter(|s| *s > 0);
            let size = match (asked, pod_limit) {
                (Some(asked), Some(limit)) => Some(asked.min(limit)),
                (one, other) => one.or(other),
            };
            let (group, policy) = fs_group(pod);
            let target = path.clone();
            let ready = self.ready_file(uid, "empty-dir", &volume.name);
            blocking(move || {
                empty_dir::set_up(&target, memory, size, 0o777)?;
                // Once: after that the files are the containers' own, and so are their modes.
                if !ready.exists() {
                    ownership::apply(&target, group, policy.as_deref(), false)?;
                    ready.parent().map_or(Ok(()), std::fs::create_dir_all)?;
                    std::fs::write(&ready, b"")?;
                }
                Ok(())
            })
            .await
            .map_err(|e: io::Error| e.to_string())?;
            return Ok(MountedVolume {
                path,
                read_only: false,
            });
        }
        if let Some(source) = &volume.config_map {
            let optional = source.optional == Some(true);
            let map = self.objects.config_map(namespace, &source.name).await?;
            if map.is_none() && !optional {
                return Err(format!("configmap {:?} not found", source.name));
            }
            let payload = keyed::config_map_payload(
                map.as_deref(),
                source.items.as_ref(),
                source.default_mode.unwrap_or(0o644),
                optional,
            )?;
            return self
                .write_files(pod, "configmap", &volume.name, payload, false)
                .await;
        }
        if let Some(source) = &volume.secret {
            let name = source.secret_name.as_deref().unwrap_or_default();
            let optional = source.optional == Some(true);
            let secret = self.objects.secret(namespace, name).await?;
            if secret.is_none() && !optional {
                return Err(format!("secret {name:?} not found"));
            }
            let payload = keyed::secret_payload(
                secret.as_deref(),
                source.items.as_ref(),
                source.default_mode.unwrap_or(0o644),
                optional,
            )?;
            return self.write_files(pod, "secret", &volume.name, payload, true).await;
        }
        if let Some(source) = &volume.downward_api {
            let items = source.items.as_deref().unwrap_or_default();
            let payload = downward_api::payload(pod, items, source.default_mode.unwrap_or(0o644), facts)?;
            return self
                .write_files(pod, "downward-api", &volume.name, payload, true)
                .await;
        }
        if let Some(source) = &volume.projected {
            let payload = self.projected(pod, source, facts).await?;
            return self
                .write_files(pod, "projected", &volume.name, payload, true)
                .await;
        }
        let kind = type_name(volume);
        Err(format!("{kind} volumes are not supported by this node yet"))
    }

    async fn projected(
        &self,
        pod: &Pod,
        source: &ProjectedVolumeSource,
        facts: &NodeFacts,
    ) -> Result<Payload, String> {
        let namespace = pods::namespace(pod);
        let default_mode = source.default_mode.unwrap_or(0o644);
        let one =
            async |projection: &k8s_openapi::api::core::v1::VolumeProjection| -> Result<Payload, String> {
                if let Some(map) = &projection.config_map {
                    let optional = map.optional == Some(true);
                    let object = self.objects.config_map(namespace, &map.name).await?;
                    if object.is_none() && !optional {
                        return Err(format!("configmap {:?} not found", map.name));
                    }
                    keyed::config_map_payload(object.as_deref(), map.items.as_ref(), default_mode, optional)
                } else if let Some(secret) = &projection.secret {
                    let optional = secret.optional == Some(true);
                    let object = self.objects.secret(namespace, &secret.name).await?;
                    if object.is_none() && !optional {
                        return Err(format!("secret {:?} not found", secret.name));
                    }
                    keyed::secret_payload(object.as_deref(), secret.items.as_ref(), default_mode, optional)
                } else if let Some(downward) = &projection.downward_api {
                    downward_api::payload(
                        pod,
                        downward.items.as_deref().unwrap_or_default(),
                        default_mode,
                        facts,
                    )
                } else if let Some(token) = &projection.service_account_token {
                    let (group, _) = fs_group(pod);
                    let owner = token_owner(pod);
                    // A group makes it 0640 by the ownership rule; an owner needs no more than 0600.
                    let mode = if group.is_some() || owner.is_some() {
                        0o600
                    } else {
                        u32::try_from(default_mode).unwrap_or(0o644)
                    };
                    let data = self
                        .tokens
                        .get(self.objects.as_ref(), pod, token)
                        .await?
                        .into_bytes();
                    Ok(Payload::from([(token.path.clone(), File { data, mode, owner })]))
                } else if projection.cluster_trust_bundle.is_some() {
                    Err("clusterTrustBundle projections are not supported by this node yet".to_owned())
                } else {
                    Err("podCertificate projections are not supported by this node yet".to_owned())
                }
            };
        let sources = source.sources.as_deref().unwrap_or_default();
        let results = futures::future::join_all(sources.iter().map(one)).await;
        let mut payload = Payload::new();
        let mut errors = Vec::new();
        for result in results {
            match result {
                Ok(files) => payload.extend(files),
                Err(error) => errors.push(error),
            }
        }
        match errors.as_slice() {
            [] => Ok(payload),
            [one] => Err(one.clone()),
            many => Err(format!("[{}]", many.join(", "))),
        }
    }

    async fn write_files(
        &self,
        pod: &Pod,
        plugin: &str,
        name: &str,
        payload: Payload,
        memory: bool,
    ) -> Result<MountedVolume, String> {
        let path = self.volume_dir(pods::uid(pod), plugin, name);
        let memory = memory && self.memory_backed;
        let (group, _) = fs_group(pod);
        let target = path.clone();
        blocking(move || {
            empty_dir::set_up(&target, memory, None, 0o777)?;
            atomic_writer::write(&target, &payload, || ownership::apply(&target, group, None, true))
                .map(|_| ())
        })
        .await
        .map_err(|e: io::Error| e.to_string())?;
        Ok(MountedVolume {
            path,
            read_only: true,
        })
    }

    /// The place where a container's sub-path mount is bound.
    pub fn sub_path_dir(&self, uid: &str, volume: &str, container: &str, index: usize) -> PathBuf {
        self.pod_dir(uid)
            .join("volume-subpaths")
            .join(volume)
            .join(container)
            .join(index.to_string())
    }

    /// Unmounts and removes all volumes of a pod, by what is on the disk: the pod object may be gone.
    pub async fn tear_down(&self, uid: &str) -> io::Result<()> {
        self.tokens.forget(uid);
        let pod_dir = self.pod_dir(uid);
        blocking(move || {
            unmount_below(&pod_dir)?;
            for part in ["volume-subpaths", "volumes", "plugins"] {
                remove_tree(&pod_dir.join(part))?;
            }
            io::Result::Ok(())
        })
        .await?;
        // Only now: until here another pod must not take a volume that is for one pod alone.
        self.claimed.lock().forget(uid);
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

/// The one user all containers run as, if there is one: then the token can be theirs alone.
fn token_owner(pod: &Pod) -> Option<u32> {
    let spec = pod.spec.as_ref()?;
    let pod_user = spec.security_context.as_ref().and_then(|c| c.run_as_user);
    let mut users = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .map(|c| {
            c.security_context
                .as_ref()
                .and_then(|s| s.run_as_user)
                .or(pod_user)
        });
    let first = users.next()??;
    if users.all(|user| user == Some(first)) {
        u32::try_from(first).ok()
    } else {
        None
    }
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
