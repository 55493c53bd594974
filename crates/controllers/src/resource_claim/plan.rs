//! Which claims a pod lacks, who still uses a claim, and what is to be written about it. Pure.

use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference, ResourceClaimTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt;

pub(super) const POD_CLAIM: &str = "resource.kubernetes.io/pod-claim-name";
pub(super) const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// The claim of an entry of a pod's `resourceClaims`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Named<'a> {
    /// A user made it.
    ByUser(&'a str),
    /// Made for the pod, to which it must belong.
    Made(&'a str),
    /// The pod's status says that none is needed.
    NotNeeded,
    NotMadeYet,
}

pub(super) fn name<'a>(pod: &'a Pod, entry: &'a PodResourceClaim) -> Named<'a> {
    if let Some(name) = &entry.resource_claim_name {
        return Named::ByUser(name);
    }
    let statuses = pod
        .status
        .iter()
        .flat_map(|s| s.resource_claim_statuses.iter().flatten());
    match { statuses }.find(|status| status.name == entry.name) {
        None => Named::NotMadeYet,
        Some(status) => match status.resource_claim_name.as_deref() {
            Some(name) => Named::Made(name),
            None => Named::NotNeeded,
        },
    }
}

pub(super) fn entries(pod: &Pod) -> impl Iterator<Item = &PodResourceClaim> {
    pod.spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten())
}

/// All names of claims that the pod uses, as far as they are known.
pub(super) fn claim_names(pod: &Pod) -> Vec<String> {
    let named = entries(pod).filter_map(|entry| match name(pod, entry) {
        Named::ByUser(name) | Named::Made(name) => Some(name.to_owned()),
        Named::NotNeeded | Named::NotMadeYet => None,
    });
    let extended = pod
        .status
        .as_ref()
        .and_then(|s| s.extended_resource_claim_status.as_ref());
    named
        .chain(extended.map(|extended| extended.resource_claim_name.clone()))
        .collect()
}

pub(super) fn is_owned_by(claim: &ResourceClaim, pod: &Pod) -> bool {
    let mut owners = claim.owner_references().iter();
    owners.any(|owner| owner.controller == Some(true) && Some(&owner.uid) == pod.metadata.uid.as_ref())
}

/// Whether the pod will not use its claims any more.
pub(super) fn is_done(pod: &Pod) -> bool {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    skiff_pods::state::is_terminal(pod)
        || (pod.metadata.deletion_timestamp.is_some() && node.unwrap_or_default().is_empty())
}

/// The claim for an entry, from its template.
pub(super) fn claim_from(
    pod: &Pod,
    entry: &PodResourceClaim,
    template: &ResourceClaimTemplate,
) -> ResourceClaim {
    let metadata = template.spec.metadata.clone().unwrap_or_default();
    let mut annotations = metadata.annotations.unwrap_or_default();
    annotations.insert(POD_CLAIM.to_owned(), entry.name.clone());
    ResourceClaim {
        metadata: ObjectMeta {
            generate_name: Some(generate_name(&pod.name_any(), &entry.name)),
            namespace: pod.namespace(),
            labels: metadata.labels,
            annotations: Some(annotations),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Pod".to_owned(),
                name: pod.name_any(),
                uid: pod.uid().unwrap_or_default(),
                controller: Some(true),
                block_owner_deletion: None,
            }]),
            ..Default::default()
        },
        spec: template.spec.spec.clone(),
        status: None,
    }
}

/// Five random characters come behind it, and the whole must be a label of 63.
fn generate_name(pod: &str, entry: &str) -> String {
    const LONGEST: usize = 57;
    let whole = format!("{pod}-{entry}-");
    if whole.len() <= LONGEST {
        return whole;
    }
    let part = |text: &str, of: usize| text[..text.floor_char_boundary(text.len() * LONGEST / of)].to_owned();
    let pod = part(pod, whole.len());
    // COMPAT: upstream has no hyphen at the end here, and measures against the whole name twice.
    format!("{pod}-{}", part(entry, whole.len()))
}

/// What is left of a claim's consumers. `gone` says of a pod by name and uid that it does not use the claim any more.
pub(super) fn remaining(
    claim: &ResourceClaim,
    gone: impl Fn(&ResourceClaimConsumerReference) -> bool,
) -> Vec<ResourceClaimConsumerReference> {
    reserved(claim)
        .iter()
        .filter(|consumer| !is_pod(consumer) || !gone(consumer))
        .cloned()
        .collect()
}

pub(super) fn reserved(claim: &ResourceClaim) -> &[ResourceClaimConsumerReference] {
    let status = claim.status.as_ref();
    status
        .and_then(|status| status.reserved_for.as_deref())
        .unwrap_or_default()
}

pub(super) fn is_pod(consumer: &ResourceClaimConsumerReference) -> bool {
    consumer.api_group.as_deref().unwrap_or_default().is_empty() && consumer.resource == "pods"
}

fn is_allocated(claim: &ResourceClaim) -> bool {
    claim
        .status
        .as_ref()
        .is_some_and(|status| status.allocation.is_some())
}

/// Writes about a claim whose consumers are known, in this order.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Release {
    pub(super) status: Option<ResourceClaim>,
    /// Then, if the claim is not allocated any more.
    pub(super) remove_finalizer: bool,
}

pub(super) fn release(claim: &ResourceClaim, remaining: Vec<ResourceClaimConsumerReference>) -> Release {
    let protected = claim.finalizers().iter().any(|finalizer| finalizer == FINALIZER);
    let unused = remaining.is_empty();
    if remaining.len() < reserved(claim).len() {
        let mut wanted = claim.clone();
        let status = wanted.status.get_or_insert_default();
        status.reserved_for = Some(remaining);
        // What the last consumer leaves is free for the next one to be allocated elsewhere.
        if unused && protected {
            status.allocation = None;
        }
        let remove_finalizer = protected && !is_allocated(&wanted);
        return Release {
            status: Some(wanted),
            remove_finalizer,
        };
    }
    if !(protected && unused && claim.metadata.deletion_timestamp.is_some()) {
        return Release::default();
    }
    let status = is_allocated(claim).then(|| {
        let mut wanted = claim.clone();
        wanted.status.get_or_insert_default().allocation = None;
        wanted
    });
    Release {
        status,
        remove_finalizer: true,
    }
}

/// The claim, reserved for a pod that was bound without the scheduler; `None` if there is nothing to do.
pub(super) fn reserve(claim: &ResourceClaim, pod: &Pod) -> Option<ResourceClaim> {
    let uid = pod.uid().unwrap_or_default();
    if !is_allocated(claim) || reserved(claim).iter().any(|consumer| consumer.uid == uid) {
        return None;
    }
    let mut wanted = claim.clone();
    let status = wanted.status.get_or_insert_default();
    status
        .reserved_for
        .get_or_insert_default()
        .push(ResourceClaimConsumerReference {
            api_group: None,
            name: pod.name_any(),
            resource: "pods".to_owned(),
            uid,
        });
    Some(wanted)
}

/// The pod that a claim was made for: name and uid.
pub(super) fn owning_pod(claim: &ResourceClaim) -> Option<(&str, &str)> {
    let mut owners = claim.owner_references().iter();
    let owner = owners
        .find(|owner| owner.controller == Some(true) && owner.api_version == "v1" && owner.kind == "Pod")?;
    Some((&owner.name, &owner.uid))
}
