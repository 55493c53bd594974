//! What claims, volumes and storage classes say, as far as binding reads it. Nothing here decides or remembers.

use super::BIND_COMPLETED;
use crate::node::NodeInfo;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use skiff_meta::quantity::Quantity;
use skiff_pods::{affinity, labels};

pub(crate) fn class_of(claim: &PersistentVolumeClaim) -> &str {
    let annotations = claim.metadata.annotations.as_ref();
    let old = annotations.and_then(|all| all.get("volume.beta.kubernetes.io/storage-class"));
    let spec = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.storage_class_name.as_deref());
    old.map(String::as_str).or(spec).unwrap_or_default()
}

pub(super) fn class_of_volume(volume: &PersistentVolume) -> &str {
    let annotations = volume.metadata.annotations.as_ref();
    let old = annotations.and_then(|all| all.get("volume.beta.kubernetes.io/storage-class"));
    let spec = volume
        .spec
        .as_ref()
        .and_then(|spec| spec.storage_class_name.as_deref());
    old.map(String::as_str).or(spec).unwrap_or_default()
}

pub(crate) fn volume_name(claim: &PersistentVolumeClaim) -> &str {
    let spec = claim.spec.as_ref();
    spec.and_then(|spec| spec.volume_name.as_deref())
        .unwrap_or_default()
}

pub(super) fn annotation<'a>(claim: &'a PersistentVolumeClaim, key: &str) -> Option<&'a str> {
    claim.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

pub(super) fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    !volume_name(claim).is_empty() && annotation(claim, BIND_COMPLETED).is_some()
}

pub(crate) fn waits_for_consumer(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
}

pub(super) fn version<K: kube::Resource>(object: &K) -> &str {
    object.meta().resource_version.as_deref().unwrap_or_default()
}

pub(super) fn requested(claim: &PersistentVolumeClaim) -> Option<Quantity> {
    let resources = claim.spec.as_ref()?.resources.as_ref()?;
    Quantity::parse(&resources.requests.as_ref()?.get("storage")?.0).ok()
}

pub(super) fn capacity(volume: &PersistentVolume) -> Option<Quantity> {
    Quantity::parse(&volume.spec.as_ref()?.capacity.as_ref()?.get("storage")?.0).ok()
}

/// True if the volume can be reached from the node.
pub(super) fn reaches(volume: &PersistentVolume, node: &NodeInfo) -> bool {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| affinity.required.as_ref());
    required.is_none_or(|selector| affinity::node_selector_matches(selector, &node.meta.node))
}

/// True if the volume is promised to the claim. A reference without a uid was written by a user in advance.
pub(super) fn is_for(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let Some(reference) = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()) else {
        return false;
    };
    reference.name == claim.metadata.name
        && reference.namespace == claim.metadata.namespace
        && (reference.uid.as_deref().unwrap_or_default().is_empty() || reference.uid == claim.metadata.uid)
}

pub(super) fn matches(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let (Some(volume_spec), Some(claim_spec)) = (&volume.spec, &claim.spec) else {
        return false;
    };
    let mode = |mode: &Option<String>| mode.clone().unwrap_or_else(|| "Filesystem".to_owned());
    let attributes = |name: &Option<String>| name.clone().unwrap_or_default();
    let modes = claim_spec.access_modes.iter().flatten();
    let mut modes = modes.map(|wanted| volume_spec.access_modes.iter().flatten().any(|one| one == wanted));
    let large_enough = match (capacity(volume), requested(claim)) {
        (Some(has), Some(wanted)) => has >= wanted,
        (_, None) => true,
        (None, Some(_)) => false,
    };
    large_enough
        && volume.metadata.deletion_timestamp.is_none()
        && mode(&volume_spec.volume_mode) == mode(&claim_spec.volume_mode)
        && attributes(&volume_spec.volume_attributes_class_name)
            == attributes(&claim_spec.volume_attributes_class_name)
        && (is_for(volume, claim)
            || (volume.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Available")
                && class_of_volume(volume) == class_of(claim)
                && modes.all(|has| has)
                && claim_spec
                    .selector
                    .as_ref()
                    .is_none_or(|one| labels::matches(one, volume.metadata.labels.as_ref()))))
}

pub(super) fn allows_topology(class: &StorageClass, node: &NodeInfo) -> bool {
    let Some(terms) = class
        .allowed_topologies
        .as_deref()
        .filter(|terms| !terms.is_empty())
    else {
        return true;
    };
    terms.iter().any(|term| {
        let mut expressions = term.match_label_expressions.iter().flatten();
        expressions.all(|one| {
            node.label(&one.key)
                .is_some_and(|value| one.values.iter().any(|v| v == value))
        })
    })
}

pub(super) fn limit(capacity: &CSIStorageCapacity) -> Option<Quantity> {
    let limit = capacity
        .maximum_volume_size
        .as_ref()
        .or(capacity.capacity.as_ref())?;
    Quantity::parse(&limit.0).ok()
}
