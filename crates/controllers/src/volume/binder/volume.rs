//! What a volume needs next: its phase, or to be reclaimed after its claim is gone. Pure.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;

use super::matching::modes_match;
use super::{Note, warning};
use crate::volume::{
    MIGRATED_TO, PROVISIONED_BY, annotation, claim_ref, has_annotation, volume_name, volume_phase,
};

#[derive(Debug, PartialEq)]
pub(super) enum Plan {
    Phase(&'static str),
    /// The claim is the one to act: it is woken by the same change.
    Nothing,
    /// Volume and claim cannot be bound: the events of the volume and of the claim.
    Mismatch(Note, Note),
    /// Its claim is gone. `released` if the phase does not say so yet.
    Reclaim {
        released: bool,
    },
    /// Its claim is bound to another volume.
    Unbind,
}

/// `claim` is the one with the uid of the volume's reference; `None` if that is gone.
pub(super) fn plan(volume: &PersistentVolume, claim: Option<&PersistentVolumeClaim>) -> Plan {
    let uid = claim_ref(volume).and_then(|holder| holder.uid.as_deref());
    if uid.unwrap_or_default().is_empty() {
        return Plan::Phase("Available");
    }
    let reclaim = || Plan::Reclaim {
        released: !matches!(volume_phase(volume), "Released" | "Failed"),
    };
    let Some(claim) = claim else {
        return reclaim();
    };
    let named = volume_name(claim);
    if named.is_empty() {
        if modes_match(claim, volume) {
            return Plan::Nothing;
        }
        let of_volume = format!(
            "Cannot bind PersistentVolume to requested PersistentVolumeClaim {:?} due to incompatible volumeMode.",
            claim.name_any()
        );
        let of_claim = format!(
            "Cannot bind PersistentVolume {:?} to requested PersistentVolumeClaim due to incompatible volumeMode.",
            volume.name_any()
        );
        return Plan::Mismatch(
            warning("VolumeMismatch", of_volume),
            warning("VolumeMismatch", of_claim),
        );
    }
    if Some(named) == volume.metadata.name.as_deref() {
        return Plan::Phase("Bound");
    }
    // One that was provisioned for this claim, which took another: nobody else can have it.
    let provisioned = has_annotation(&volume.metadata, PROVISIONED_BY);
    if provisioned && policy(volume) == "Delete" {
        return reclaim();
    }
    Plan::Unbind
}

fn policy(volume: &PersistentVolume) -> &str {
    let spec = volume.spec.as_ref();
    spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref())
        .unwrap_or_default()
}

#[derive(Debug, PartialEq)]
pub(super) enum Reclaim {
    /// It is kept, or whoever provisioned it deletes it.
    Leave,
    Fail(Note),
    /// To be looked at again when no pod uses it.
    InUse(Note),
}

/// What becomes of a volume that is released. `users` are the pods that still use it, as `namespace/name`.
pub(super) fn reclaim(volume: &PersistentVolume, users: &[String]) -> Reclaim {
    if annotation(&volume.metadata, MIGRATED_TO).is_some_and(|driver| !driver.is_empty()) {
        return Reclaim::Leave;
    }
    match policy(volume) {
        "Retain" => Reclaim::Leave,
        "Delete" => match deleter_missing(volume) {
            Some(message) => Reclaim::Fail(warning("VolumeFailedDelete", message)),
            None => Reclaim::Leave,
        },
        "Recycle" if !users.is_empty() => {
            let message = format!("Volume is used by pods: {}", users.join(","));
            Reclaim::InUse(super::normal("VolumeFailedRecycle", message))
        }
        "Recycle" => Reclaim::Fail(warning(
            "VolumeFailedRecycle",
            "No recycler plugin found for the volume!",
        )),
        _ => Reclaim::Fail(warning(
            "VolumeUnknownReclaimPolicy",
            "Volume has unrecognized PersistentVolumeReclaimPolicy",
        )),
    }
}

/// Why nobody will delete the volume; `None` if somebody outside of the controllers does.
fn deleter_missing(volume: &PersistentVolume) -> Option<String> {
    let provisioner = annotation(&volume.metadata, PROVISIONED_BY).filter(|name| !name.is_empty());
    if let Some(provisioner) = provisioner {
        let in_tree = provisioner.starts_with("kubernetes.io/");
        return in_tree.then(|| format!("no volume plugin matched name: {provisioner}"));
    }
    if volume.spec.as_ref().is_some_and(|spec| spec.csi.is_some()) {
        return None;
    }
    Some(format!(
        "error getting deleter volume plugin for volume {:?}: no deletable volume plugin matched",
        volume.name_any()
    ))
}
