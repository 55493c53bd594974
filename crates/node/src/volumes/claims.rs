//! `persistentVolumeClaim` and generic `ephemeral` volumes: from the claim to its PersistentVolume, with the checks of
//! the kubelet, and the record of which pods have which volumes mounted. How a type of PersistentVolume is mounted is
//! in `persistent.rs` and the files of the types.

use std::collections::{HashMap, HashSet};

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::persistent::{self, Mount};
use super::{MountedVolume, SetUpError, Volumes, blocking, fs_group};
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

/// Which pods have which PersistentVolumes.
#[derive(Debug, Default)]
pub(super) struct Claimed {
    /// By the pod's uid and the name of its volume: the PersistentVolume and where it is.
    mounted: HashMap<(String, String), (String, MountedVolume)>,
    /// The uids of the pods that have or mount a PersistentVolume.
    users: HashMap<String, HashSet<String>>,
}

impl Claimed {
    fn mounted(&self, uid: &str, volume: &str) -> Option<MountedVolume> {
        let found = self.mounted.get(&(uid.to_owned(), volume.to_owned()))?;
        Some(found.1.clone())
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

    fn set_mounted(&mut self, uid: &str, volume: &str, name: &str, mounted: MountedVolume) {
        self.mounted
            .insert((uid.to_owned(), volume.to_owned()), (name.to_owned(), mounted));
    }

    /// The pod did not get to mount the volume.
    fn release(&mut self, name: &str, uid: &str) {
        let has = |((user, _), (mounted, _)): (&(String, String), &(String, MountedVolume))| {
            user == uid && mounted == name
        };
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
        if let Some(mounted) = self.claimed.lock().mounted(uid, &volume.name) {
            return Ok(mounted);
        }
        let pv = self.bound_volume(pod, &reference).await?;
        check_mode(pod, volume, &pv)?;
        let name = pv.metadata.name.clone().unwrap_or_default();
        let plugin = persistent::plugin_of(&pv)?;
        let step = |step, message| SetUpError::step(step, &name, message);
        check_node(&pv, facts).map_err(|message| step("MountVolume.NodeAffinity check", message))?;
        let mount_options = mount_options(&pv);
        if !mount_options.is_empty() && !plugin.supports_mount_options() {
            let message = "mount options are not supported for this volume type".to_owned();
            return Err(step("MountVolume.MountOptionSupport check", message));
        }
        let for_one_pod = is_for_one_pod(&pv);
        if !self.claimed.lock().reserve(&name, uid, for_one_pod) {
            return Err(SetUpError::set_up(&name, FOR_ONE_POD.to_owned()));
        }
        let (group, policy) = fs_group(pod);
        let mount = Mount {
            root: self.root.clone(),
            uid: uid.to_owned(),
            name: name.clone(),
            read_only: reference.read_only,
            options: mount_options,
            fs_group: group,
            fs_group_change_policy: policy,
            for_one_pod,
        };
        let result = blocking(move || plugin.set_up(&pv, &mount)).await;
        let mut claimed = self.claimed.lock();
        match result {
            Ok(set_up) => {
                let mounted = MountedVolume {
                    path: set_up.path,
                    read_only: reference.read_only,
                };
                claimed.set_mounted(uid, &volume.name, &name, mounted.clone());
                drop(claimed);
                if let Some(warning) = set_up.warning {
                    self.warn(pod, "AlreadyMountedVolume", warning);
                }
                Ok(mounted)
            }
            Err(error) => {
                claimed.release(&name, uid);
                Err(error)
            }
        }
    }

    async fn bound_volume(&self, pod: &Pod, reference: &Reference) -> Result<PersistentVolume, SetUpError> {
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
        Ok(pv)
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

fn check_mode(pod: &Pod, volume: &Volume, pv: &PersistentVolume) -> Result<(), SetUpError> {
    let mode = pv.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref());
    let mode = mode.unwrap_or("Filesystem");
    let unfit = |list: &str| {
        Err(SetUpError::Unprocessed(format!(
            "volume {} has volumeMode {mode}, but is specified in {list}",
            volume.name
        )))
    };
    match (pods::is_device(pod, &volume.name), mode) {
        (false, "Filesystem") => Ok(()),
        (false, _) => unfit("volumeMounts"),
        (true, "Block") => Err(SetUpError::step(
            "MapVolume.FindMapperPluginBySpec",
            pv.metadata.name.as_deref().unwrap_or_default(),
            "block volumes are not supported by this node".to_owned(),
        )),
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
