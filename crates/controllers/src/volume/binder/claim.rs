//! What a claim needs next: a volume, a class, a provisioner, or an answer why it has to wait. Pure.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;

use super::matching::{check, find, is_bound_to};
use super::{Note, normal, warning};
use crate::volume::{
    BIND_COMPLETED, BOUND_BY_CONTROLLER, SELECTED_NODE, claim_ref, class_of_claim, has_annotation,
    is_terminated, reference_key, requested_class, volume_name,
};

/// What is known around a claim.
pub(super) struct Observed<'a> {
    pub(super) claim: &'a PersistentVolumeClaim,
    /// The volume that the claim names.
    pub(super) named: Option<Arc<PersistentVolume>>,
    /// The volumes that are free or reserved for the claim.
    pub(super) candidates: Vec<Arc<PersistentVolume>>,
    /// The claim's class, if there is one of that name.
    pub(super) class: Option<&'a StorageClass>,
    pub(super) default_class: Option<&'a StorageClass>,
    /// The pods that use the claim.
    pub(super) pods: Vec<Arc<Pod>>,
}

#[derive(Debug, PartialEq)]
pub(super) enum Plan {
    /// To write both sides of the binding, or what is missing of them.
    Bind(Arc<PersistentVolume>),
    /// It stays unbound.
    Wait(Option<Note>),
    AssignClass(String),
    /// Somebody else makes the volume.
    Provision {
        provisioner: String,
    },
    /// No class or no provisioner of that name. The phase stays as it is.
    CannotProvision(Note),
    Lost(Note),
    /// The claim is bound by the controller to a volume that belongs to another claim.
    Misbound(Note, String),
}

pub(super) fn plan(observed: Observed<'_>) -> Plan {
    if has_annotation(&observed.claim.metadata, BIND_COMPLETED) {
        return bound(observed);
    }
    if !volume_name(observed.claim).is_empty() {
        return named(observed);
    }
    let claim = observed.claim;
    let delayed = observed.class.is_some_and(is_delayed);
    if let Some(volume) = find(claim, &observed.candidates, delayed) {
        return Plan::Bind(volume);
    }
    if requested_class(claim).is_none()
        && let Some(class) = observed.default_class
    {
        return Plan::AssignClass(class.name_any());
    }
    if delayed && !has_annotation(&claim.metadata, SELECTED_NODE) {
        return Plan::Wait(Some(waiting_for_consumer(&observed.pods)));
    }
    let name = class_of_claim(claim);
    if name.is_empty() {
        let message = "no persistent volumes available for this claim and no storage class is set";
        return Plan::Wait(Some(normal("FailedBinding", message)));
    }
    let Some(class) = observed.class else {
        let message = format!("storageclass.storage.k8s.io {name:?} not found");
        return Plan::CannotProvision(warning("ProvisioningFailed", message));
    };
    match external_provisioner(&class.provisioner) {
        Some(provisioner) => Plan::Provision {
            provisioner: provisioner.to_owned(),
        },
        None => {
            let message = format!("no volume plugin matched name: {}", class.provisioner);
            Plan::CannotProvision(warning("ProvisioningFailed", message))
        }
    }
}

fn is_delayed(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
}

fn waiting_for_consumer(pods: &[Arc<Pod>]) -> Note {
    let unscheduled = |pod: &&Arc<Pod>| {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        !is_terminated(pod) && node.unwrap_or_default().is_empty()
    };
    let mut names: Vec<String> = pods
        .iter()
        .filter(unscheduled)
        .map(|pod| pod.name_any())
        .collect();
    names.sort();
    match names.as_slice() {
        [] => normal(
            "WaitForFirstConsumer",
            "waiting for first consumer to be created before binding",
        ),
        [one] => normal(
            "WaitForPodScheduled",
            format!("waiting for pod {one} to be scheduled"),
        ),
        many => normal(
            "WaitForPodScheduled",
            format!("waiting for pods {} to be scheduled", many.join(",")),
        ),
    }
}

/// In-tree provisioners whose work a CSI driver does now.
const MIGRATED: &[(&str, &str)] = &[
    ("kubernetes.io/aws-ebs", "ebs.csi.aws.com"),
    ("kubernetes.io/azure-disk", "disk.csi.azure.com"),
    ("kubernetes.io/azure-file", "file.csi.azure.com"),
    ("kubernetes.io/cinder", "cinder.csi.openstack.org"),
    ("kubernetes.io/gce-pd", "pd.csi.storage.gke.io"),
    ("kubernetes.io/portworx-volume", "pxd.portworx.com"),
    ("kubernetes.io/vsphere-volume", "csi.vsphere.vmware.com"),
];

/// The name under which a provisioner outside of the controllers works; `None` if there is none such.
fn external_provisioner(name: &str) -> Option<&str> {
    if let Some((_, driver)) = MIGRATED.iter().find(|(plugin, _)| *plugin == name) {
        return Some(driver);
    }
    (!name.starts_with("kubernetes.io/")).then_some(name)
}

/// A claim that asks for one volume by its name.
fn named(observed: Observed<'_>) -> Plan {
    let claim = observed.claim;
    let Some(volume) = observed.named else {
        return Plan::Wait(None);
    };
    let name = volume.name_any();
    let Some(holder) = claim_ref(&volume) else {
        return match check(&volume, claim) {
            Ok(()) => Plan::Bind(volume),
            Err(why) => {
                let message = format!("Cannot bind to requested volume {name:?}: {why}");
                Plan::Wait(Some(warning("VolumeMismatch", message)))
            }
        };
    };
    if is_bound_to(&volume, claim) {
        return Plan::Bind(volume);
    }
    let note = warning(
        "FailedBinding",
        format!("volume {name:?} already bound to a different claim."),
    );
    if !has_annotation(&claim.metadata, BOUND_BY_CONTROLLER) {
        return Plan::Wait(Some(note));
    }
    let error = format!(
        "invalid binding of claim {:?} to volume {name:?}: volume already claimed by {:?}",
        format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any()),
        reference_key(holder)
    );
    Plan::Misbound(note, error)
}

/// A claim whose binding was completed once.
fn bound(observed: Observed<'_>) -> Plan {
    let claim = observed.claim;
    if volume_name(claim).is_empty() {
        let message = "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!";
        return Plan::Lost(warning("ClaimLost", message));
    }
    let Some(volume) = observed.named else {
        let message = "Bound claim has lost its PersistentVolume. Data on the volume is lost!";
        return Plan::Lost(warning("ClaimLost", message));
    };
    match claim_ref(&volume) {
        None => Plan::Bind(volume),
        Some(holder) if holder.uid == claim.metadata.uid => Plan::Bind(volume),
        Some(_) => {
            let message = "Two claims are bound to the same volume, this one is bound incorrectly";
            Plan::Lost(warning("ClaimMisbound", message))
        }
    }
}
