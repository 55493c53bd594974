//! The single writes of binding and unbinding: each function answers the object as it shall be, or `None` if it is
//! so already. Pure.

use k8s_openapi::api::core::v1::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimStatus, PersistentVolumeStatus,
};
use skiff_client::reference;
use skiff_meta::quantity::Quantity;

use super::matching::is_bound_to;
use crate::volume::{
    BETA_STORAGE_PROVISIONER, BIND_COMPLETED, BOUND_BY_CONTROLLER, STORAGE_PROVISIONER, annotation,
    claim_phase, claim_ref, has_annotation, storage, volume_name, volume_phase,
};

const PRE_RESIZE_CAPACITY: &str = "volume.alpha.kubernetes.io/pre-resize-capacity";

/// The volume, reserved for the claim.
pub(super) fn volume_to_claim(
    volume: &PersistentVolume,
    claim: &PersistentVolumeClaim,
) -> Option<PersistentVolume> {
    let mut wanted = volume.clone();
    let mut changed = false;
    let present = claim_ref(volume);
    let same = present.is_some_and(|present| {
        present.name == claim.metadata.name
            && present.namespace == claim.metadata.namespace
            && present.uid == claim.metadata.uid
    });
    if !same {
        wanted.spec.get_or_insert_default().claim_ref = Some(reference(claim));
        changed = true;
    }
    // A user's reservation is not undone when the claim goes away; the controller's is.
    if !is_bound_to(volume, claim) && !has_annotation(&volume.metadata, BOUND_BY_CONTROLLER) {
        let annotations = wanted.metadata.annotations.get_or_insert_default();
        annotations.insert(BOUND_BY_CONTROLLER.to_owned(), "yes".to_owned());
        changed = true;
    }
    changed.then_some(wanted)
}

/// The claim, bound to the volume.
pub(super) fn claim_to_volume(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
) -> Option<PersistentVolumeClaim> {
    let mut wanted = claim.clone();
    let mut annotate = |name: &str| {
        let missing = !has_annotation(&wanted.metadata, name);
        if missing {
            let annotations = wanted.metadata.annotations.get_or_insert_default();
            annotations.insert(name.to_owned(), "yes".to_owned());
        }
        missing
    };
    let named = Some(volume_name(claim)) == volume.metadata.name.as_deref();
    let mut changed = !named;
    if !named {
        annotate(BOUND_BY_CONTROLLER);
    }
    changed |= annotate(BIND_COMPLETED);
    if !named {
        wanted.spec.get_or_insert_default().volume_name = volume.metadata.name.clone();
    }
    changed.then_some(wanted)
}

/// The claim in its phase, with what it got of the volume.
pub(super) fn claim_status(
    claim: &PersistentVolumeClaim,
    phase: &str,
    volume: Option<&PersistentVolume>,
) -> Option<PersistentVolumeClaim> {
    let empty = PersistentVolumeClaimStatus::default();
    let old = claim.status.as_ref().unwrap_or(&empty);
    let mut new = old.clone();
    let new_phase = claim_phase(claim) != phase;
    new.phase = Some(phase.to_owned());
    match volume {
        None => {
            new.access_modes = None;
            new.capacity = None;
            new.current_volume_attributes_class_name = None;
        }
        Some(volume) => {
            let spec = volume.spec.as_ref();
            new.access_modes = spec.and_then(|spec| spec.access_modes.clone());
            if new_phase {
                let present = spec.and_then(|spec| spec.capacity.clone());
                // A resize that is under way: the claim has what the volume had before.
                let before = annotation(&volume.metadata, PRE_RESIZE_CAPACITY);
                if let Some(before) = before.filter(|before| Quantity::parse(before).is_ok()) {
                    let before = k8s_openapi::apimachinery::pkg::api::resource::Quantity(before.to_owned());
                    new.capacity
                        .get_or_insert_default()
                        .insert("storage".to_owned(), before);
                } else if storage(present.as_ref()) != storage(old.capacity.as_ref())
                    || old.capacity.is_none()
                {
                    new.capacity = present;
                }
                if phase == "Bound" && matches!(claim_phase(claim), "Pending" | "") {
                    new.current_volume_attributes_class_name =
                        spec.and_then(|spec| spec.volume_attributes_class_name.clone());
                }
            }
        }
    }
    if *old == new {
        return None;
    }
    let mut wanted = claim.clone();
    wanted.status = Some(new);
    Some(wanted)
}

pub(super) fn in_phase(volume: &PersistentVolume, phase: &str, message: &str) -> Option<PersistentVolume> {
    if volume_phase(volume) == phase {
        return None;
    }
    let mut wanted = volume.clone();
    wanted.status = Some(PersistentVolumeStatus {
        phase: Some(phase.to_owned()),
        message: (!message.is_empty()).then(|| message.to_owned()),
        ..volume.status.clone().unwrap_or_default()
    });
    Some(wanted)
}

/// The volume without its claim. What a user reserved stays reserved, for a claim of that name with any uid.
pub(super) fn unbound(volume: &PersistentVolume) -> PersistentVolume {
    let mut wanted = volume.clone();
    let spec = wanted.spec.get_or_insert_default();
    if has_annotation(&volume.metadata, BOUND_BY_CONTROLLER) {
        spec.claim_ref = None;
        if let Some(annotations) = &mut wanted.metadata.annotations {
            annotations.remove(BOUND_BY_CONTROLLER);
        }
    } else if let Some(claim) = &mut spec.claim_ref {
        claim.uid = None;
    }
    wanted
}

/// The claim with the name of the provisioner that shall make its volume.
pub(super) fn with_provisioner(
    claim: &PersistentVolumeClaim,
    provisioner: &str,
) -> Option<PersistentVolumeClaim> {
    if annotation(&claim.metadata, STORAGE_PROVISIONER) == Some(provisioner) {
        return None;
    }
    let mut wanted = claim.clone();
    let annotations = wanted.metadata.annotations.get_or_insert_default();
    for name in [BETA_STORAGE_PROVISIONER, STORAGE_PROVISIONER] {
        annotations.insert(name.to_owned(), provisioner.to_owned());
    }
    Some(wanted)
}
