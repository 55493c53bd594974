//! Which volume fits a claim best. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

use crate::selector;
use crate::volume::{capacity, claim_ref, class_of_claim, class_of_volume, requested_storage, volume_phase};

/// Whether the volume is reserved for this claim, by a user or by the controller.
pub(super) fn is_bound_to(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let Some(bound) = claim_ref(volume) else {
        return false;
    };
    let any_uid = bound.uid.as_deref().unwrap_or_default().is_empty();
    bound.name == claim.metadata.name
        && bound.namespace == claim.metadata.namespace
        && (any_uid || bound.uid == claim.metadata.uid)
}

pub(super) fn modes_match(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> bool {
    let mode = |mode: Option<&String>| mode.map_or("Filesystem", String::as_str).to_owned();
    mode(claim.spec.as_ref().and_then(|spec| spec.volume_mode.as_ref()))
        == mode(volume.spec.as_ref().and_then(|spec| spec.volume_mode.as_ref()))
}

fn access_modes(modes: Option<&Vec<String>>) -> BTreeSet<&str> {
    modes.into_iter().flatten().map(String::as_str).collect()
}

fn offers_access(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let wanted = access_modes(claim.spec.as_ref().and_then(|spec| spec.access_modes.as_ref()));
    wanted.is_subset(&offered(volume))
}

fn offered(volume: &PersistentVolume) -> BTreeSet<&str> {
    access_modes(volume.spec.as_ref().and_then(|spec| spec.access_modes.as_ref()))
}

fn attributes_class(name: Option<&String>) -> &str {
    name.map(String::as_str).unwrap_or_default()
}

fn attributes_match(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> bool {
    let claim = claim.spec.as_ref();
    let volume = volume.spec.as_ref();
    attributes_class(claim.and_then(|spec| spec.volume_attributes_class_name.as_ref()))
        == attributes_class(volume.and_then(|spec| spec.volume_attributes_class_name.as_ref()))
}

/// Why a volume that a claim names cannot be bound to it.
pub(super) fn check(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Result<(), String> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    if volume.metadata.deletion_timestamp.is_some() {
        return Err(format!("the volume is marked for deletion {name:?}"));
    }
    let fits = capacity(volume).value() >= requested_storage(claim).value();
    let checks = [
        (fits, "requested PV is too small"),
        (
            class_of_volume(volume) == class_of_claim(claim),
            "storageClassName does not match",
        ),
        (
            attributes_match(claim, volume),
            "volumeAttributesClassName does not match",
        ),
        (modes_match(claim, volume), "incompatible volumeMode"),
        (offers_access(volume, claim), "incompatible accessMode"),
    ];
    match checks.iter().find(|(passed, _)| !passed) {
        Some((_, why)) => Err((*why).to_owned()),
        None => Ok(()),
    }
}

/// The best of `volumes` for the claim: one that is reserved for it, or the smallest that is large enough, of those
/// that offer the fewest access modes. With `delayed`, only one that is reserved: the scheduler chooses.
pub(super) fn find(
    claim: &PersistentVolumeClaim,
    volumes: &[Arc<PersistentVolume>],
    delayed: bool,
) -> Option<Arc<PersistentVolume>> {
    let fitting = volumes.iter().filter(|volume| offers_access(volume, claim));
    let mut by_modes: Vec<(BTreeSet<&str>, Vec<&Arc<PersistentVolume>>)> = Vec::new();
    for volume in fitting {
        let modes = offered(volume);
        match by_modes.iter_mut().find(|(known, _)| *known == modes) {
            Some((_, group)) => group.push(volume),
            None => by_modes.push((modes, vec![volume])),
        }
    }
    by_modes.sort_by(|(a, _), (b, _)| (a.len(), a).cmp(&(b.len(), b)));
    by_modes
        .iter()
        .find_map(|(_, group)| find_in(claim, group, delayed))
}

fn find_in(
    claim: &PersistentVolumeClaim,
    volumes: &[&Arc<PersistentVolume>],
    delayed: bool,
) -> Option<Arc<PersistentVolume>> {
    let wanted = requested_storage(claim);
    let selected = |volume: &PersistentVolume| {
        let selector = claim.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        selector.is_none_or(|selector| selector::matches(selector, volume.metadata.labels.as_ref()))
    };
    let mut smallest: Option<&Arc<PersistentVolume>> = None;
    for volume in volumes {
        let reserved = is_bound_to(volume, claim);
        if (claim_ref(volume).is_some() && !reserved)
            || capacity(volume) < wanted
            || !modes_match(claim, volume)
            || !attributes_match(claim, volume)
            || volume.metadata.deletion_timestamp.is_some()
        {
            continue;
        }
        if reserved {
            return Some((*volume).clone());
        }
        if delayed
            || volume_phase(volume) != "Available"
            || !selected(volume)
            || class_of_volume(volume) != class_of_claim(claim)
        {
            continue;
        }
        if smallest.is_none_or(|smallest| capacity(volume) < capacity(smallest)) {
            smallest = Some(*volume);
        }
    }
    smallest.cloned()
}
