//! The provisioner of the class `local`: a claim gets a directory of the node that the scheduler chose for its pod.
//!
//! It runs on every node and does the work of that node alone: the directory is made before the PersistentVolume that
//! names it, and removed before that goes. So a volume object always has a directory behind it, and a node that is down
//! keeps its volumes until it is back. Mounting is the kubelet's work and no business of this file.

mod plan;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use skiff_client::{
    Action, Change, Controller, ErrorExt, EventRecorder, Informer, InformerFactory, Key, Reconcile,
    WorkQueue, reference,
};
use tokio_util::sync::CancellationToken;

use crate::objects::error_message;
use plan::{ClaimPlan, FINALIZER, Place, VolumePlan};

/// The name under which classes ask for it.
pub const PROVISIONER: &str = "skiff.io/local";

/// How often directories without a volume are looked for.
const SWEEP: Duration = Duration::from_secs(600);
const STILL_MOUNTED: Duration = Duration::from_secs(1);
/// A claim that cannot be served is looked at again: the class may have changed.
const REFUSED: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
pub struct LocalVolumesConfig {
    pub node_name: String,
    /// The volumes' directories are made in here.
    pub root: PathBuf,
    /// The kubelet's directory of pods: a volume that is mounted below it is not removed.
    pub pods: PathBuf,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{0}")]
    Api(#[from] kube::Error),
    #[error("{path}: {source}")]
    Directory { path: String, source: io::Error },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Item {
    Claim(Key),
    Volume(String),
    Sweep,
}

struct LocalVolumes {
    config: LocalVolumesConfig,
    client: Client,
    recorder: EventRecorder,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    node: Informer<Node>,
}

/// Serves the claims and volumes of one node until `shutdown`.
pub async fn run_local_volumes(config: LocalVolumesConfig, client: Client, shutdown: CancellationToken) {
    let informers = InformerFactory::new(client.clone(), shutdown.clone());
    let node = format!("metadata.name={}", config.node_name);
    let local = Arc::new(LocalVolumes {
        recorder: EventRecorder::new(client.clone(), PROVISIONER, &config.node_name),
        claims: informers.informer(),
        volumes: informers.informer(),
        classes: informers.informer(),
        node: informers.filtered(None, Some(&node)),
        config,
        client,
    });
    local.claims.add_index(BY_CLASS, by_class);
    Controller::new("local-volumes", WorkQueue::new(), shutdown, local)
        .workers(4)
        .watches(
            |local| &local.claims,
            |_, change| plan::is_asked(change.object()).then(|| Item::Claim(Key::of(&**change.object()))),
        )
        .watches(|local| &local.volumes, LocalVolumes::woken_by_volume)
        .watches(|local| &local.classes, LocalVolumes::woken_by_class)
        .reads(|local| &local.node)
        .every(SWEEP, |_| vec![Item::Sweep])
        .run()
        .await;
}

/// Claims that wait for a volume of this provisioner, by class.
const BY_CLASS: &str = "local-volumes/class";

fn by_class(claim: &PersistentVolumeClaim) -> Vec<String> {
    let class = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.storage_class_name.clone());
    class.filter(|_| plan::is_asked(claim)).into_iter().collect()
}

impl LocalVolumes {
    fn woken_by_volume(&self, change: &Change<PersistentVolume>) -> Option<Item> {
        match change {
            Change::Applied { new, .. } if new.spec.as_ref().is_some_and(|spec| spec.local.is_some()) => {
                Some(Item::Volume(new.name_any()))
            }
            _ => None,
        }
    }

    fn woken_by_class(&self, change: &Change<StorageClass>) -> Vec<Item> {
        let claims = self.claims.by_index(BY_CLASS, &change.object().name_any());
        let keys = claims.iter().map(|claim| Key::of(&**claim));
        keys.map(Item::Claim).collect()
    }

    fn claim_api(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn volume_api(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    /// Calls `work` with what is known of this node now.
    fn here<T>(&self, work: impl FnOnce(&Place<'_>) -> T) -> T {
        let node = self.node.list().into_iter().next();
        // The directory may not be there before the first volume; its parent is.
        let disk = std::iter::successors(Some(self.config.root.as_path()), |path| path.parent())
            .find_map(|path| rustix::fs::statvfs(path).ok());
        work(&Place {
            node_name: &self.config.node_name,
            node: node.as_deref(),
            root: &self.config.root,
            disk_size: disk.map_or(0, |disk| disk.f_blocks.saturating_mul(disk.f_frsize)),
        })
    }

    async fn sync_claim(&self, key: &Key) -> Result<Action, Error> {
        let Some(claim) = self.claims.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let class = claim
            .spec
            .as_ref()
            .and_then(|spec| spec.storage_class_name.clone());
        let class = self.classes.get("", &class.unwrap_or_default());
        let exists = self.volumes.get("", &plan::volume_name(&claim)).is_some();
        let event = |type_: &str, reason: &str, message: String| {
            self.recorder.event(&reference(&*claim), type_, reason, message);
        };
        match self.here(|place| plan::plan_claim(&claim, class.as_deref(), exists, place)) {
            ClaimPlan::Nothing => Ok(Action::Done),
            ClaimPlan::TakeNode(wanted) => {
                let api = self.claim_api(&key.namespace);
                match api.replace(&key.name, &PostParams::default(), &wanted).await {
                    Ok(_) => Ok(Action::Done),
                    // Another node was faster, or the claim changed: its event brings it back.
                    Err(error) if error.is_conflict() || error.is_not_found() => Ok(Action::Done),
                    Err(error) => Err(error.into()),
                }
            }
            ClaimPlan::Refuse { message, reschedule } => {
                event("Warning", "ProvisioningFailed", message);
                if let Some(wanted) = reschedule {
                    let api = self.claim_api(&key.namespace);
                    api.replace(&key.name, &PostParams::default(), &wanted).await?;
                }
                Ok(Action::RequeueAfter(REFUSED))
            }
            ClaimPlan::Provision(volume) => {
                let message = format!(
                    "External provisioner is provisioning volume for claim {:?}",
                    key.to_string()
                );
                event("Normal", "Provisioning", message);
                let name = volume.name_any();
                let made = self.provision(&volume).await;
                if let Err(error) = made {
                    let why = match &error {
                        Error::Api(error) => error_message(error),
                        other => other.to_string(),
                    };
                    let class = class.map(|class| class.name_any()).unwrap_or_default();
                    let message = format!("failed to provision volume with StorageClass {class:?}: {why}");
                    event("Warning", "ProvisioningFailed", message);
                    return Err(error);
                }
                event(
                    "Normal",
                    "ProvisioningSucceeded",
                    format!("Successfully provisioned volume {name}"),
                );
                Ok(Action::Done)
            }
        }
    }

    async fn provision(&self, volume: &PersistentVolume) -> Result<(), Error> {
        let directory = self.config.root.join(volume.name_any());
        let root = self.config.root.clone();
        disk(&directory, move |directory| make_directory(&root, directory)).await?;
        match self.volume_api().create(&PostParams::default(), volume).await {
            Err(error) if !error.is_already_exists() => Err(error.into()),
            _ => Ok(()),
        }
    }

    async fn sync_volume(&self, name: &str) -> Result<Action, Error> {
        let Some(volume) = self.volumes.get("", name) else {
            return Ok(Action::Done);
        };
        match self.here(|place| plan::plan_volume(&volume, place)) {
            VolumePlan::Nothing => Ok(Action::Done),
            VolumePlan::SetFinalizer(wanted) => {
                self.volume_api()
                    .replace(name, &PostParams::default(), &wanted)
                    .await?;
                Ok(Action::Done)
            }
            VolumePlan::Remove(directory) => {
                if self.is_mounted(name).await? {
                    return Ok(Action::RequeueAfter(STILL_MOUNTED));
                }
                if let Err(error) = disk(&directory, skiff_fs::remove_tree).await {
                    let event = (reference(&*volume), error.to_string());
                    self.recorder
                        .event(&event.0, "Warning", "VolumeFailedDelete", event.1);
                    return Err(error);
                }
                self.forget(&volume).await?;
                Ok(Action::Done)
            }
        }
    }

    /// Whether a pod of this node still has the volume: it may be on its way out.
    async fn is_mounted(&self, name: &str) -> Result<bool, Error> {
        let mounts = disk(&self.config.pods, skiff_fs::mounts_below).await?;
        let at = Path::new("kubernetes.io~local-volume").join(name);
        Ok(mounts.iter().any(|mount| mount.ends_with(&at)))
    }

    /// Deletes the object of a volume whose directory is gone.
    async fn forget(&self, volume: &PersistentVolume) -> Result<(), Error> {
        let api = self.volume_api();
        let name = volume.name_any();
        let mut volume = volume.clone();
        if volume.metadata.deletion_timestamp.is_none() {
            let parameters = DeleteParams {
                preconditions: Some(Preconditions {
                    uid: volume.uid(),
                    resource_version: None,
                }),
                ..Default::default()
            };
            match api.delete(&name, &parameters).await {
                // What is answered is the object as finalizers keep it, or that it is gone.
                Ok(answer) => match answer.left() {
                    Some(left) => volume = left,
                    None => return Ok(()),
                },
                Err(error) if error.is_not_found() => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        let finalizers = volume.metadata.finalizers.get_or_insert_default();
        finalizers.retain(|finalizer| finalizer != FINALIZER);
        match api.replace(&name, &PostParams::default(), &volume).await {
            Err(error) if !error.is_not_found() => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// A directory whose volume was never made, because this process ended before, is empty and goes. One with
    /// files in it stays, whatever the API says.
    async fn sweep(&self) -> Result<Action, Error> {
        let awaited: std::collections::HashSet<String> = self
            .claims
            .list()
            .iter()
            .map(|claim| plan::volume_name(claim))
            .collect();
        let known = move |name: &str, volumes: &Informer<PersistentVolume>| {
            awaited.contains(name) || volumes.get("", name).is_some()
        };
        let volumes = self.volumes.clone();
        disk(&self.config.root, move |root| {
            let entries = match std::fs::read_dir(root) {
                Ok(entries) => entries,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) => return Err(error),
            };
            for entry in entries {
                let entry = entry?;
                if !known(&entry.file_name().to_string_lossy(), &volumes) {
                    let _ = std::fs::remove_dir(entry.path());
                }
            }
            Ok(())
        })
        .await?;
        Ok(Action::Done)
    }
}

/// Makes a volume's directory, for all users: which of them a pod runs as is not known. The directory around it is for
/// root alone, so only what is mounted from there is open.
fn make_directory(root: &Path, directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    skiff_fs::create_folders_durably(root, 0o700)?;
    match std::fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o777))?;
    skiff_fs::sync_folder(root)
}

/// Disk work, off the runtime's threads.
async fn disk<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T, Error> {
    let failed = |source| Error::Directory {
        path: path.display().to_string(),
        source,
    };
    let owned = path.to_path_buf();
    match tokio::task::spawn_blocking(move || work(&owned)).await {
        Ok(result) => result.map_err(failed),
        Err(error) => Err(failed(io::Error::other(error))),
    }
}

impl Reconcile for LocalVolumes {
    type Key = Item;
    type Error = Error;

    async fn reconcile(&self, item: Item) -> Result<Action, Error> {
        match item {
            Item::Claim(key) => self.sync_claim(&key).await,
            Item::Volume(name) => self.sync_volume(&name).await,
            Item::Sweep => self.sweep().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn directories_are_open_inside_of_a_closed_one() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("volumes");
        let volume = root.join("pvc-1");
        make_directory(&root, &volume).unwrap();
        std::fs::write(volume.join("kept"), "x").unwrap();
        make_directory(&root, &volume).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&root), mode(&volume)), (0o700, 0o777));
        assert!(volume.join("kept").exists());
    }
}
