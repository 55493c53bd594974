//! The scheduler's writes of ResourceClaims: allocation and reservation, their return, and the claims of extended
//! resources, which it creates and deletes itself.

use crate::pod::PodInfo;
use k8s_openapi::api::core::v1::{ContainerExtendedResourceRequest, Pod};
use k8s_openapi::api::resource::v1::{
    AllocationResult, ResourceClaim, ResourceClaimConsumerReference, ResourceClaimStatus,
};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::json;
use skiff_client::ErrorExt;

const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
const WRITE_TRIES: usize = 5;

pub(super) fn allocation(claim: &ResourceClaim) -> Option<&AllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()
}

pub(super) fn reservations(claim: &ResourceClaim) -> &[ResourceClaimConsumerReference] {
    let status = claim.status.as_ref();
    status
        .and_then(|status| status.reserved_for.as_deref())
        .unwrap_or_default()
}

pub(super) fn is_reserved_for(claim: &ResourceClaim, pod: &PodInfo) -> bool {
    reservations(claim).iter().any(|one| *one.uid == *pod.uid)
}

#[derive(Clone)]
pub(super) struct ClaimWriter {
    pub(super) client: kube::Client,
}

enum WriteError {
    Api(kube::Error),
    Final(String),
}

impl From<kube::Error> for WriteError {
    fn from(error: kube::Error) -> Self {
        WriteError::Api(error)
    }
}

impl ClaimWriter {
    fn api(&self, namespace: &str) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Takes the allocation back, unless somebody else uses it.
    pub(super) async fn deallocate(&self, claim: &ResourceClaim, pod: &PodInfo) {
        if reservations(claim).iter().any(|one| *one.uid != *pod.uid) {
            return;
        }
        let name = claim.metadata.name.clone().unwrap_or_default();
        let mut claim = claim.clone();
        let status = claim.status.get_or_insert_default();
        (status.allocation, status.reserved_for, status.devices) = (None, None, None);
        let api = self.api(&pod.key.namespace);
        // A conflict means that the claim has changed: the next try looks at it anew.
        if let Err(error) = api.replace_status(&name, &PostParams::default(), &claim).await {
            tracing::debug!(claim = name, %error, "cannot deallocate the resource claim");
        }
    }

    /// Writes allocation and reservation of one claim.
    pub(super) async fn write(
        &self,
        claim: &ResourceClaim,
        allocation: Option<&AllocationResult>,
        pod: &PodInfo,
    ) -> Result<(), String> {
        let api = self.api(&pod.key.namespace);
        let name = claim.metadata.name.clone().unwrap_or_default();
        let mut claim = claim.clone();
        for attempt in 1..=WRITE_TRIES {
            match write_once(&api, claim, allocation, pod).await {
                Ok(()) => return Ok(()),
                Err(WriteError::Final(message)) => return Err(message),
                Err(WriteError::Api(error)) if error.is_conflict() && attempt < WRITE_TRIES => {
                    let read = api.get(&name).await;
                    claim =
                        read.map_err(|error| format!("get updated claim {name} after conflict: {error}"))?;
                }
                Err(WriteError::Api(error)) => {
                    return Err(format!("add allocation and reservation to claim {name}: {error}"));
                }
            }
        }
        Err(format!("claim {name} keeps changing"))
    }

    /// Creates the claim of a pod's extended resources.
    pub(super) async fn create(&self, claim: &ResourceClaim, pod: &PodInfo) -> Result<ResourceClaim, String> {
        let created = self
            .api(&pod.key.namespace)
            .create(&PostParams::default(), claim)
            .await;
        created.map_err(|error| format!("create claim for extended resources {}: {error}", pod.key))
    }

    /// Deletes a claim that [`create`](Self::create) made, whatever is in it.
    pub(super) async fn delete(&self, claim: &ResourceClaim) -> Result<(), kube::Error> {
        let api = self.api(claim.metadata.namespace.as_deref().unwrap_or_default());
        let name = claim.metadata.name.clone().unwrap_or_default();
        let uid = claim.metadata.uid.clone();
        // The finalizer would keep it.
        for attempt in 1..=WRITE_TRIES {
            let Some(mut latest) = api.get_opt(&name).await? else {
                return Ok(());
            };
            let finalizers = latest.metadata.finalizers.get_or_insert_default();
            if latest.metadata.uid != uid || !finalizers.iter().any(|one| one == FINALIZER) {
                break;
            }
            finalizers.retain(|one| one != FINALIZER);
            match api.replace(&name, &PostParams::default(), &latest).await {
                Err(error) if error.is_conflict() && attempt < WRITE_TRIES => {}
                Err(error) => return Err(error),
                Ok(_) => break,
            }
        }
        let parameters = DeleteParams {
            preconditions: Some(Preconditions {
                uid,
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match api.delete(&name, &parameters).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    /// [`delete`](Self::delete) in a task of its own, for the steps of a cycle that must not wait.
    pub(super) fn delete_later(&self, claim: ResourceClaim) {
        let writer = self.clone();
        spawn(async move {
            if let Err(error) = writer.delete(&claim).await {
                let name = claim.metadata.name.as_deref().unwrap_or_default();
                tracing::warn!(claim = name, %error, "cannot delete the resource claim for extended resources");
            }
        });
    }

    /// [`deallocate`](Self::deallocate) in a task of its own.
    pub(super) fn deallocate_later(&self, claim: ResourceClaim, pod: &PodInfo) {
        let (writer, pod) = (self.clone(), pod.clone());
        spawn(async move { writer.deallocate(&claim, &pod).await });
    }

    /// Tells the kubelet which claim holds the devices, and which container gets which of them.
    pub(super) async fn note_in_pod(
        &self,
        pod: &PodInfo,
        claim: &str,
        mappings: &[ContainerExtendedResourceRequest],
    ) -> Result<(), String> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.key.namespace);
        let status = json!({"metadata": {"uid": &*pod.uid}, "status": {"extendedResourceClaimStatus": {
            "resourceClaimName": claim, "requestMappings": mappings}}});
        let written = api
            .patch_status(&pod.key.name, &PatchParams::default(), &Patch::Merge(&status))
            .await;
        written
            .map(|_| ())
            .map_err(|error| format!("update pod {} ExtendedResourceClaimStatus: {error}", pod.key))
    }
}

/// Cycles also run where there is no runtime: in benchmarks, whose server nobody can reach anyway.
fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(work);
    }
}

async fn write_once(
    api: &Api<ResourceClaim>,
    mut claim: ResourceClaim,
    wanted: Option<&AllocationResult>,
    pod: &PodInfo,
) -> Result<(), WriteError> {
    let name = claim.metadata.name.clone().unwrap_or_default();
    if claim.metadata.deletion_timestamp.is_some() {
        return Err(WriteError::Final(format!(
            "claim {name} got deleted in the meantime"
        )));
    }
    match (wanted, allocation(&claim).is_some()) {
        (Some(_), true) => {
            return Err(WriteError::Final(format!(
                "claim {name} got allocated elsewhere in the meantime"
            )));
        }
        (None, false) => {
            return Err(WriteError::Final(format!(
                "claim {name} got deallocated elsewhere in the meantime"
            )));
        }
        _ => {}
    }
    let finalizers = claim.metadata.finalizers.get_or_insert_default();
    if wanted.is_some() && !finalizers.iter().any(|one| one == FINALIZER) {
        finalizers.push(FINALIZER.to_owned());
        claim = api.replace(&name, &PostParams::default(), &claim).await?;
    }
    let reserved = is_reserved_for(&claim, pod);
    let status = claim.status.get_or_insert_with(ResourceClaimStatus::default);
    if let Some(allocation) = wanted {
        let mut allocation = allocation.clone();
        let now = k8s_openapi::jiff::Timestamp::now();
        allocation.allocation_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now));
        status.allocation = Some(allocation);
    }
    if !reserved {
        status
            .reserved_for
            .get_or_insert_default()
            .push(ResourceClaimConsumerReference {
                api_group: None,
                resource: "pods".to_owned(),
                name: pod.key.name.clone(),
                uid: pod.uid.to_string(),
            });
    }
    if wanted.is_some() || !reserved {
        api.replace_status(&name, &PostParams::default(), &claim).await?;
    }
    Ok(())
}
