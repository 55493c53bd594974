//! The controllers of volumes: binding claims to volumes, expansion, attachment, and the claims of ephemeral volumes.
//! What they share of claims, volumes and classes is here, and pure. Protection of what is in use is in
//! `volume_protection`.

pub(crate) mod attach_detach;
pub(crate) mod binder;
pub(crate) mod ephemeral;
pub(crate) mod expander;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    ContainerStatus, ObjectReference, PersistentVolume, PersistentVolumeClaim, Pod,
};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use skiff_meta::quantity::Quantity;

pub(crate) const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
pub(crate) const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
pub(crate) const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
pub(crate) const MIGRATED_TO: &str = "pv.kubernetes.io/migrated-to";
pub(crate) const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
pub(crate) const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
pub(crate) const BETA_STORAGE_PROVISIONER: &str = "volume.beta.kubernetes.io/storage-provisioner";
const BETA_STORAGE_CLASS: &str = "volume.beta.kubernetes.io/storage-class";
const DEFAULT_CLASS: [&str; 2] = [
    "storageclass.kubernetes.io/is-default-class",
    "storageclass.beta.kubernetes.io/is-default-class",
];

pub(crate) fn annotation<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

pub(crate) fn has_annotation(metadata: &ObjectMeta, name: &str) -> bool {
    annotation(metadata, name).is_some()
}

/// The class that a claim asks for: `None` if it leaves that open, an empty one if it wants none.
pub(crate) fn requested_class(claim: &PersistentVolumeClaim) -> Option<&str> {
    annotation(&claim.metadata, BETA_STORAGE_CLASS).or_else(|| {
        let spec = claim.spec.as_ref()?;
        spec.storage_class_name.as_deref()
    })
}

pub(crate) fn class_of_claim(claim: &PersistentVolumeClaim) -> &str {
    requested_class(claim).unwrap_or_default()
}

pub(crate) fn class_of_volume(volume: &PersistentVolume) -> &str {
    annotation(&volume.metadata, BETA_STORAGE_CLASS)
        .or_else(|| volume.spec.as_ref()?.storage_class_name.as_deref())
        .unwrap_or_default()
}

/// The newest of the default classes; of several as new the first by name.
pub(crate) fn default_class<'a>(
    classes: impl IntoIterator<Item = &'a StorageClass>,
) -> Option<&'a StorageClass> {
    let is_default = |class: &&StorageClass| {
        DEFAULT_CLASS
            .iter()
            .any(|name| annotation(&class.metadata, name) == Some("true"))
    };
    classes.into_iter().filter(is_default).min_by_key(|class| {
        let created = class.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (std::cmp::Reverse(created), class.name_any())
    })
}

/// What cannot be read counts as nothing: the API server has validated it before.
pub(crate) fn storage(
    list: Option<&BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>>,
) -> Quantity {
    list.and_then(|list| list.get("storage"))
        .and_then(|quantity| Quantity::parse(&quantity.0).ok())
        .unwrap_or_else(|| Quantity::from_units(0))
}

pub(crate) fn requested_storage(claim: &PersistentVolumeClaim) -> Quantity {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    storage(resources.and_then(|resources| resources.requests.as_ref()))
}

pub(crate) fn capacity(volume: &PersistentVolume) -> Quantity {
    storage(volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref()))
}

pub(crate) fn claim_phase(claim: &PersistentVolumeClaim) -> &str {
    let status = claim.status.as_ref();
    status
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

pub(crate) fn volume_phase(volume: &PersistentVolume) -> &str {
    let status = volume.status.as_ref();
    status
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

/// The volume that a claim names; empty if it names none.
pub(crate) fn volume_name(claim: &PersistentVolumeClaim) -> &str {
    let spec = claim.spec.as_ref();
    spec.and_then(|spec| spec.volume_name.as_deref())
        .unwrap_or_default()
}

pub(crate) fn claim_ref(volume: &PersistentVolume) -> Option<&ObjectReference> {
    volume.spec.as_ref()?.claim_ref.as_ref()
}

/// `namespace/name`, as messages and indexes name a claim.
pub(crate) fn reference_key(reference: &ObjectReference) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}", part(&reference.namespace), part(&reference.name))
}

/// The names of the claims that a pod's volumes are.
pub(crate) fn claims_of_pod(pod: &Pod) -> Vec<String> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes
        .filter_map(
            |volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
                (Some(claim), _) => Some(claim.claim_name.clone()),
                (None, Some(_)) => Some(format!("{}-{}", pod.name_any(), volume.name)),
                (None, None) => None,
            },
        )
        .collect()
}

pub(crate) const PODS_BY_CLAIM: &str = "volume/claim";

/// Index of pods by `namespace/name` of their claims.
pub(crate) fn pods_by_claim(pod: &Pod) -> Vec<String> {
    let namespace = pod.namespace().unwrap_or_default();
    let claims = claims_of_pod(pod).into_iter();
    claims.map(|claim| format!("{namespace}/{claim}")).collect()
}

/// Whether a pod has ended for its volumes: it is over, or it is being deleted and none of its containers runs.
pub(crate) fn is_terminated(pod: &Pod) -> bool {
    let Some(status) = &pod.status else {
        return pod.metadata.deletion_timestamp.is_some();
    };
    let mut containers = status
        .init_container_statuses
        .iter()
        .chain(&status.container_statuses)
        .chain(&status.ephemeral_container_statuses)
        .flatten();
    let stopped = |container: &ContainerStatus| {
        let state = container.state.as_ref();
        state.is_some_and(|state| state.terminated.is_some() || state.waiting.is_some())
    };
    matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"))
        || (pod.metadata.deletion_timestamp.is_some() && containers.all(stopped))
}
