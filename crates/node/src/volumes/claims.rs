//! `persistentVolumeClaim` and generic `ephemeral` volumes: from the claim to its PersistentVolume, with the checks of
//! the kubelet, and the record of which pods have which volumes mounted. How a type of PersistentVolume is mounted is
//! in the files of the types.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::usage::Measure;
use super::volume_type::{self, Persistent, Wanted};
use super::{MountedVolume, SetUpError, Volumes};
use crate::field_ref::NodeFacts;
use crate::pods;

const CLAIM_PROTECTION: &str = "kubernetes.io/pvc-protection";
pub(super) const FOR_ONE_POD: &str =
    "volume uses the ReadWriteOncePod access mode and is already in use by another pod";

/// What a pod's volume says about its claim.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Reference {
    claim: String,
    read_only: bool,
    /// The claim is made for this pod and must belong to it.
    ephemeral: bool,
}

impl Reference {
    pub(super) fn claim(&self) -> &str {
        &self.claim
    }
}

/// The claim that a volume of the pod refers to; `None` for volumes of other types.
pub(super) fn reference(pod: &Pod, volume: &Volume) -> Option<Reference> {
    if let Some(source) = &volume.persistent_volume_claim {
        return Some(Reference {
            claim: source.claim_name.clone(),
            read_only: source.read_only == Some(true),
            ephemeral: false,
        });
    }
    volume.ephemeral.as_ref().map(|_| Reference {
        claim: format!("{}-{}", pods::name(pod), volume.name),
        read_only: false,
        ephemeral: true,
    })
}

#[derive(Clone, Debug)]
struct Held {
    /// The PersistentVolume's name.
    name: String,
    mounted: MountedVolume,
    /// Its type has something to do for it from time to time.
    updates: bool,
    /// Its file system tells how full it is.
    measured: bool,
}

/// Which pods have which PersistentVolumes.
#[derive(Debug, Default)]
pub(super) struct Claimed {
    /// By the pod's uid and the name of its volume.
    mounted: HashMap<(String, String), Held>,
    /// The uids of the pods that have or mount a PersistentVolume.
    users: HashMap<String, HashSet<String>>,
}

impl Claimed {
    fn mounted(&self, uid: &str, volume: &str) -> Option<Held> {
        self.mounted.get(&(uid.to_owned(), volume.to_owned())).cloned()
    }

    /// The PersistentVolume that the pod has mounted as this volume.
    pub(super) fn name_of(&self, uid: &str, volume: &str) -> Option<String> {
        Some(self.mounted(uid, volume)?.name)
    }

    /// Where the volume is, if its file system tells how full it is.
    pub(super) fn measured_path(&self, uid: &str, volume: &str) -> Option<PathBuf> {
        let held = self.mounted(uid, volume).filter(|held| held.measured)?;
        Some(held.mounted.path)
    }

    /// Notes that the pod is about to mount the volume. False if another pod has it and it is for one pod alone.
    fn reserve(&mut self, name: &str, uid: &str, for_one_pod: bool) -> bool {
        let users = self.users.entry(name.to_owned()).or_default();
        if for_one_pod && users.iter().any(|user| user != uid) {
            return false;
        }
        users.insert(uid.to_owned());
        true
    }

    fn set_mounted(&mut self, uid: &str, volume: &str, held: Held) {
        self.mounted.insert((uid.to_owned(), volume.to_owned()), held);
    }

    /// The pod did not get to mount the volume.
    fn release(&mut self, name: &str, uid: &str) {
        let has = |((user, _), held): (&(String, String), &Held)| user == uid && held.name == name;
        if self.mounted.iter().any(has) {
            return;
        }
        if let Some(users) = self.users.get_mut(name) {
            users.remove(uid);
            if users.is_empty() {
                self.users.remove(name);
            }
        }
    }

    pub(super) fn forget(&mut self, uid: &str) {
        self.mounted.retain(|(user, _), _| user != uid);
        self.users.retain(|_, users| {
            users.remove(uid);
            !users.is_empty()
        });
    }
}

impl Volumes {
    pub(super) async fn set_up_claim(
        &self,
        pod: &Pod,
        volume: &Volume,
        reference: Reference,
        facts: &NodeFacts,
    ) -> Result<MountedVolume, SetUpError> {
        let uid = pods::uid(pod);
        // A pod keeps what it has mounted, whatever becomes of the claim.
        let held = self.claimed.lock().mounted(uid, &volume.name);
        if let Some(Held { mounted, updates, .. }) = held {
            if updates && let Ok(persistent) = self.persistent(pod, volume, &reference).await {
                let wanted = Wanted {
                    pod,
                    volume,
                    facts,
                    claimed: Some(&persistent),
                };
                if let Some(plugin) = volume_type::of(&wanted)
                    && let Err(error) = plugin.update(self, &wanted).await
                {
                    self.warn(pod, "FailedMount", error.to_string());
                }
            }
            return Ok(mounted);
        }
        let persistent = self.persistent(pod, volume, &reference).await?;
        let wanted = Wanted {
            pod,
            volume,
            facts,
            claimed: Some(&persistent),
        };
        let name = persistent.name.clone();
        let Some(plugin) = volume_type::of(&wanted) else {
            return Err(SetUpError::Unprocessed(format!(
                "failed to get Plugin from volumeSpec for volume {name:?} err=no volume plugin matched"
            )));
        };
        let step = |step, message| SetUpError::step(step, &name, message);
        if persistent.block && !plugin.supports_block() {
            let message = "no volume plugin matched: block volumes are not supported for this volume type";
            return Err(step("MapVolume.FindMapperPluginBySpec", message.to_owned()));
        }
        check_node(&persistent.pv, facts)
            .map_err(|message| step("MountVolume.NodeAffinity check", message))?;
        if !persistent.options.is_empty() && !plugin.supports_mount_options() {
            let message = "mount options are not supported for this volume type".to_owned();
            return Err(step("MountVolume.MountOptionSupport check", message));
        }
        if !self.claimed.lock().reserve(&name, uid, persistent.for_one_pod) {
            return Err(SetUpError::set_up(&name, FOR_ONE_POD.to_owned()));
        }
        match self.set_up_by(plugin, &wanted).await {
            Ok(ready) => {
                let mounted = MountedVolume {
                    read_only: reference.read_only || ready.read_only,
                    ..self.mounted(pod, ready)
                };
                let held = Held {
                    name,
                    mounted: mounted.clone(),
                    updates: plugin.updates(),
                    measured: plugin.measure() == Some(Measure::FileSystem) && !persistent.block,
                };
                self.claimed.lock().set_mounted(uid, &volume.name, held);
                Ok(mounted)
            }
            Err(error) => {
                self.claimed.lock().release(&name, uid);
                Err(error)
            }
        }
    }

    /// What is behind the claim, if the pod may have it.
    async fn persistent(
        &self,
        pod: &Pod,
        volume: &Volume,
        reference: &Reference,
    ) -> Result<Persistent, SetUpError> {
        let (claim, pv) = self.bound_volume(pod, reference).await?;
        Ok(Persistent {
            block: check_mode(pod, volume, &pv)?,
            name: pv.metadata.name.clone().unwrap_or_default(),
            read_only: reference.read_only,
            options: mount_options(&pv),
            for_one_pod: is_for_one_pod(&pv),
            pv,
            claim,
        })
    }

    async fn bound_volume(
        &self,
        pod: &Pod,
        reference: &Reference,
    ) -> Result<(PersistentVolumeClaim, PersistentVolume), SetUpError> {
        let namespace = pods::namespace(pod);
        let failed = |message: String| {
            SetUpError::Unprocessed(format!(
                "error processing PVC {namespace}/{}: {message}",
                reference.claim
            ))
        };
        let claim = self
            .objects
            .claim(namespace, &reference.claim)
            .await
            .map_err(|error| failed(format!("failed to fetch PVC from API server: {error}")))?;
        let name = bound_to(&claim).map_err(|message| failed(message.to_owned()))?;
        if reference.ephemeral && !is_controlled_by(&claim, pod) {
            return Err(SetUpError::Unprocessed(format!(
                "PVC {namespace}/{0} was not created for pod {namespace}/{1} (pod is not owner)",
                reference.claim,
                pods::name(pod)
            )));
        }
        let pv = self
            .objects
            .persistent_volume(name)
            .await
            .map_err(|error| failed(format!("failed to fetch PV {name} from API server: {error}")))?;
        check_bound(&pv, &claim).map_err(failed)?;
        Ok((claim, pv))
    }
}

/// The name of the volume that a claim is bound to.
fn bound_to(claim: &PersistentVolumeClaim) -> Result<&str, &'static str> {
    let mut finalizers = claim.metadata.finalizers.iter().flatten();
    if claim.metadata.deletion_timestamp.is_some() && !finalizers.any(|f| f == CLAIM_PROTECTION) {
        return Err("PVC is being deleted");
    }
    if claim.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Bound") {
        return Err("PVC is not bound");
    }
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    name.filter(|name| !name.is_empty())
        .ok_or("PVC has empty pvc.Spec.VolumeName")
}

fn check_bound(pv: &PersistentVolume, claim: &PersistentVolumeClaim) -> Result<(), String> {
    let name = pv.metadata.name.as_deref().unwrap_or_default();
    let Some(bound) = pv.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()) else {
        return Err(format!(
            "found PV object {name} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"
        ));
    };
    if bound.uid != claim.metadata.uid {
        return Err(format!(
            "found PV object {name} but its pv.Spec.ClaimRef.UID {} does not point to claim.UID {}",
            bound.uid.as_deref().unwrap_or_default(),
            claim.metadata.uid.as_deref().unwrap_or_default()
        ));
    }
    Ok(())
}

fn is_controlled_by(claim: &PersistentVolumeClaim, pod: &Pod) -> bool {
    let mut owners = claim.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.controller == Some(true) && Some(&owner.uid) == pod.metadata.uid.as_ref())
}

/// Whether the pod gets the device. It must ask for what the volume is.
fn check_mode(pod: &Pod, volume: &Volume, pv: &PersistentVolume) -> Result<bool, SetUpError> {
    let mode = pv.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref());
    let mode = mode.unwrap_or("Filesystem");
    let unfit = |list: &str| {
        Err(SetUpError::Unprocessed(format!(
            "volume {} has volumeMode {mode}, but is specified in {list}",
            volume.name
        )))
    };
    match (pods::is_device(pod, &volume.name), mode) {
        (false, "Filesystem") => Ok(false),
        (false, _) => unfit("volumeMounts"),
        (true, "Block") => Ok(true),
        (true, _) => unfit("volumeDevices"),
    }
}

/// Whether the volume is for this node.
fn check_node(pv: &PersistentVolume, facts: &NodeFacts) -> Result<(), String> {
    let affinity = pv.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let Some(required) = affinity.and_then(|affinity| affinity.required.as_ref()) else {
        return Ok(());
    };
    let Some(labels) = &facts.labels else {
        return Err("the labels of the node are not known yet".to_owned());
    };
    // COMPAT: only the labels count, not the name, as in upstream's kubelet.
    let node = Node {
        metadata: ObjectMeta {
            labels: Some(labels.clone()),
            ..Default::default()
        },
        ..Default::default()
    };
    if skiff_pods::affinity::node_selector_matches(required, &node) {
        return Ok(());
    }
    Err("no matching NodeSelectorTerms".to_owned())
}

/// The options of the volume; the annotation is the older way to give them, and wins.
fn mount_options(pv: &PersistentVolume) -> Vec<String> {
    let annotations = pv.metadata.annotations.as_ref();
    if let Some(options) = annotations.and_then(|a| a.get("volume.beta.kubernetes.io/mount-options")) {
        let options = options.split(',').map(str::trim);
        return options
            .filter(|option| !option.is_empty())
            .map(str::to_owned)
            .collect();
    }
    let options = pv.spec.as_ref().and_then(|spec| spec.mount_options.clone());
    options.unwrap_or_default()
}

/// With more modes than this one it is not known which of them the pod counts on.
fn is_for_one_pod(pv: &PersistentVolume) -> bool {
    let modes = pv.spec.as_ref().and_then(|spec| spec.access_modes.as_deref());
    matches!(modes, Some([mode]) if mode == "ReadWriteOncePod")
}

#[cfg(test)]
mod tests;
