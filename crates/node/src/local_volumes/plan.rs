//! What the provisioner does about a claim or a volume. Pure.

use k8s_openapi::api::core::v1::{
    LocalVolumeSource, Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume,
    PersistentVolumeClaim, PersistentVolumeSpec, VolumeNodeAffinity,
};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use skiff_meta::quantity::Quantity;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::{Offer, PROVISIONER, is_name};

const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
const HOST_NAME: &str = "kubernetes.io/hostname";
/// Upstream's name for it: the volume object stays until its provisioner has removed the data.
pub(super) const FINALIZER: &str = "external-provisioner.volume.kubernetes.io/finalizer";

/// A node, as far as volumes are concerned.
pub(super) struct Place<'a> {
    node_name: &'a str,
    host_name: String,
    /// Where the directories of volumes are.
    root: &'a Path,
    /// The size of that filesystem in bytes.
    disk_size: u64,
}

impl<'a> Place<'a> {
    pub(super) fn new(node: &'a Node, offer: &'a Offer) -> Self {
        Place {
            node_name: node.metadata.name.as_deref().unwrap_or_default(),
            host_name: host_name(node),
            root: &offer.root,
            disk_size: offer.disk_size,
        }
    }
}

#[derive(Debug, PartialEq)]
pub(super) enum ClaimPlan {
    /// The class leaves the node open: it is written down before anything is made there.
    TakeNode(Box<PersistentVolumeClaim>),
    /// Make the directory, then the object.
    Provision(Box<PersistentVolume>),
    /// `reschedule` is the claim as the scheduler may choose another node for it.
    Refuse {
        message: String,
        reschedule: Option<Box<PersistentVolumeClaim>>,
    },
}

fn annotation<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

/// `pvc-<uid>`, as all provisioners name their volumes.
pub(super) fn volume_name(claim: &PersistentVolumeClaim) -> String {
    format!("pvc-{}", claim.metadata.uid.as_deref().unwrap_or_default())
}

pub(super) fn class_name(claim: &PersistentVolumeClaim) -> Option<String> {
    claim.spec.as_ref()?.storage_class_name.clone()
}

/// Whether the claim asks this provisioner for a volume.
pub(super) fn is_asked(claim: &PersistentVolumeClaim) -> bool {
    is_unbound(claim) && claim.metadata.deletion_timestamp.is_none()
}

/// Whether the claim is this provisioner's and has no volume.
pub(super) fn is_unbound(claim: &PersistentVolumeClaim) -> bool {
    let bound = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    bound.unwrap_or_default().is_empty()
        && annotation(&claim.metadata, STORAGE_PROVISIONER) == Some(PROVISIONER)
}

/// Whether the claim asks for a volume of this class, and the class is ours.
pub(super) fn serves(class: &StorageClass, claim: &PersistentVolumeClaim) -> bool {
    class.provisioner == PROVISIONER && is_asked(claim)
}

/// The node that a claim's volume is to be on: what the scheduler chose, or any that the class allows if it does not
/// wait for a pod. `None` while there is none.
pub(super) fn wanted_node(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    nodes: impl FnOnce() -> Vec<Arc<Node>>,
) -> Option<String> {
    if let Some(node) = annotation(&claim.metadata, SELECTED_NODE) {
        return Some(node.to_owned());
    }
    if class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer") {
        return None;
    }
    let mut names: Vec<String> = nodes()
        .iter()
        .filter(|node| is_ready(node) && has_volumes(node) && is_allowed(class, node))
        .filter_map(|node| node.metadata.name.clone())
        .collect();
    names.sort_unstable();
    // Claims are spread over the nodes, and each asks the same one every time.
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let sum: usize = uid.bytes().map(usize::from).sum();
    (!names.is_empty()).then(|| names.swap_remove(sum % names.len()))
}

/// Whether the node answers and takes pods.
pub(super) fn is_ready(node: &Node) -> bool {
    let closed = node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true);
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    !closed
        && conditions
            .into_iter()
            .flatten()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Another kubelet than skiff's makes no directories.
fn has_volumes(node: &Node) -> bool {
    let status = node.status.as_ref();
    let info = status.and_then(|status| status.node_info.as_ref());
    info.is_some_and(|info| info.kubelet_version.contains("+skiff"))
}

/// What is done about a claim at the node that it wants.
pub(super) fn plan_claim(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    place: &Place<'_>,
) -> ClaimPlan {
    if annotation(&claim.metadata, SELECTED_NODE).is_none() {
        let mut wanted = claim.clone();
        let annotations = wanted.metadata.annotations.get_or_insert_default();
        annotations.insert(SELECTED_NODE.to_owned(), place.node_name.to_owned());
        return ClaimPlan::TakeNode(Box::new(wanted));
    }
    if let Err(why) = check(claim, class) {
        return ClaimPlan::Refuse {
            message: failed(class, &why),
            reschedule: None,
        };
    }
    let requested = requested(claim);
    if u64::try_from(requested.value()).unwrap_or(0) > place.disk_size {
        let why = format!(
            "{} bytes are requested, but the disk of node {} has {}",
            requested.value(),
            place.node_name,
            place.disk_size
        );
        return elsewhere(claim, class, &why);
    }
    ClaimPlan::Provision(Box::new(volume(claim, class, place)))
}

/// The claim cannot have a volume on the node that was chosen.
pub(super) fn elsewhere(claim: &PersistentVolumeClaim, class: &StorageClass, why: &str) -> ClaimPlan {
    let mut wanted = claim.clone();
    if let Some(annotations) = &mut wanted.metadata.annotations {
        annotations.remove(SELECTED_NODE);
    }
    ClaimPlan::Refuse {
        message: failed(class, why),
        reschedule: Some(Box::new(wanted)),
    }
}

pub(super) fn failed(class: &StorageClass, why: &str) -> String {
    let name = class.metadata.name.as_deref().unwrap_or_default();
    format!("failed to provision volume with StorageClass {name:?}: {why}")
}

fn requested(claim: &PersistentVolumeClaim) -> Quantity {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let requests = resources.and_then(|resources| resources.requests.as_ref());
    requests
        .and_then(|requests| requests.get("storage"))
        .and_then(|quantity| Quantity::parse(&quantity.0).ok())
        .unwrap_or_else(|| Quantity::from_units(0))
}

/// Whether the class allows volumes on this node.
fn is_allowed(class: &StorageClass, node: &Node) -> bool {
    let Some(terms) = class
        .allowed_topologies
        .as_ref()
        .filter(|terms| !terms.is_empty())
    else {
        return true;
    };
    let labels = node.metadata.labels.as_ref();
    terms.iter().any(|term| {
        term.match_label_expressions.iter().flatten().all(|wanted| {
            let value = labels.and_then(|labels| labels.get(&wanted.key));
            value.is_some_and(|value| wanted.values.contains(value))
        })
    })
}

/// What a directory cannot give.
fn check(claim: &PersistentVolumeClaim, class: &StorageClass) -> Result<(), String> {
    let spec = claim.spec.clone().unwrap_or_default();
    if spec.volume_mode.as_deref() == Some("Block") {
        return Err(format!(
            "{PROVISIONER} does not support block volume provisioning"
        ));
    }
    if let Some(mode) = spec
        .access_modes
        .iter()
        .flatten()
        .find(|mode| !matches!(mode.as_str(), "ReadWriteOnce" | "ReadWriteOncePod"))
    {
        return Err(format!(
            "the access mode {mode} is not supported: a volume of this class is on one node; use ReadWriteOnce or ReadWriteOncePod"
        ));
    }
    if spec.selector.is_some() {
        return Err("claim.spec.selector is not supported".to_owned());
    }
    if spec.data_source.is_some() || spec.data_source_ref.is_some() {
        return Err("a volume cannot be filled from a data source".to_owned());
    }
    if let Some(name) = spec.volume_attributes_class_name.filter(|name| !name.is_empty()) {
        return Err(format!("the VolumeAttributesClass {name:?} is not supported"));
    }
    if let Some(parameter) = class.parameters.iter().flatten().next() {
        return Err(format!("the parameter {:?} is not known", parameter.0));
    }
    Ok(())
}

fn volume(claim: &PersistentVolumeClaim, class: &StorageClass, place: &Place<'_>) -> PersistentVolume {
    let name = volume_name(claim);
    let spec = claim.spec.clone().unwrap_or_default();
    let policy = class
        .reclaim_policy
        .clone()
        .unwrap_or_else(|| "Delete".to_owned());
    let requests = spec.resources.and_then(|resources| resources.requests);
    let capacity = requests.unwrap_or_default().remove_entry("storage");
    let affinity = NodeSelectorRequirement {
        key: HOST_NAME.to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![place.host_name.clone()]),
    };
    PersistentVolume {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            annotations: Some(BTreeMap::from([(
                PROVISIONED_BY.to_owned(),
                PROVISIONER.to_owned(),
            )])),
            finalizers: (policy == "Delete").then(|| vec![FINALIZER.to_owned()]),
            ..Default::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: spec
                .access_modes
                .filter(|modes| !modes.is_empty())
                .or_else(|| Some(vec!["ReadWriteOnce".to_owned()])),
            capacity: Some(capacity.into_iter().collect()),
            claim_ref: Some(skiff_client::reference(claim)),
            local: Some(LocalVolumeSource {
                path: place.root.join(&name).to_string_lossy().into_owned(),
                fs_type: None,
            }),
            mount_options: class.mount_options.clone(),
            node_affinity: Some(VolumeNodeAffinity {
                required: Some(NodeSelector {
                    node_selector_terms: vec![NodeSelectorTerm {
                        match_expressions: Some(vec![affinity]),
                        match_fields: None,
                    }],
                }),
            }),
            persistent_volume_reclaim_policy: Some(policy),
            storage_class_name: class.metadata.name.clone(),
            volume_mode: Some("Filesystem".to_owned()),
            ..Default::default()
        }),
        status: None,
    }
}

/// The name that volumes know a node by.
pub(super) fn host_name(node: &Node) -> String {
    let labels = node.metadata.labels.as_ref();
    labels
        .and_then(|labels| labels.get(HOST_NAME))
        .or(node.metadata.name.as_ref())
        .cloned()
        .unwrap_or_default()
}

#[derive(Debug, PartialEq)]
pub(super) enum VolumePlan {
    Nothing,
    /// Remove the directory from that host, then the object.
    Remove {
        host: String,
    },
    /// The finalizer does not fit the reclaim policy, which may have changed.
    SetFinalizer(Box<PersistentVolume>),
}

/// The host of a volume that this provisioner made.
fn made_on(volume: &PersistentVolume) -> Option<&str> {
    let spec = volume.spec.as_ref()?;
    spec.local.as_ref()?;
    if annotation(&volume.metadata, PROVISIONED_BY) != Some(PROVISIONER) {
        return None;
    }
    let required = spec.node_affinity.as_ref()?.required.as_ref()?;
    let [term] = required.node_selector_terms.as_slice() else {
        return None;
    };
    match (term.match_fields.as_ref(), term.match_expressions.as_deref()) {
        (None, Some([only])) if only.key == HOST_NAME && only.operator == "In" => {
            match only.values.as_deref() {
                Some([host]) => Some(host),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Whether the node made the directory of this volume. Nothing else is ever removed: the path must be the very one that
/// the provisioner gives to a volume of that name.
pub(super) fn is_own(volume: &PersistentVolume, place: &Place<'_>) -> bool {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let local = volume.spec.as_ref().and_then(|spec| spec.local.as_ref());
    is_name(name)
        && made_on(volume) == Some(&place.host_name)
        && local.is_some_and(|local| Path::new(&local.path) == place.root.join(name))
}

pub(super) fn plan_volume(volume: &PersistentVolume) -> VolumePlan {
    let Some(host) = made_on(volume) else {
        return VolumePlan::Nothing;
    };
    let spec = volume.spec.as_ref();
    let policy = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
    let delete = policy == Some("Delete");
    if delete && matches!(phase, Some("Released" | "Failed")) {
        return VolumePlan::Remove {
            host: host.to_owned(),
        };
    }
    let present = volume
        .metadata
        .finalizers
        .iter()
        .flatten()
        .any(|f| f == FINALIZER);
    if present == delete || (delete && volume.metadata.deletion_timestamp.is_some()) {
        return VolumePlan::Nothing;
    }
    let mut wanted = volume.clone();
    let finalizers = wanted.metadata.finalizers.get_or_insert_default();
    if delete {
        finalizers.push(FINALIZER.to_owned());
    } else {
        finalizers.retain(|finalizer| finalizer != FINALIZER);
    }
    VolumePlan::SetFinalizer(Box::new(wanted))
}

#[cfg(test)]
mod tests;
