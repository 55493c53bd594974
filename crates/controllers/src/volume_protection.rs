//! What is in use is not deleted: claims that pods use, volumes that are bound, and classes of attributes that claims
//! or volumes name keep a finalizer until nobody uses them. Admission sets it; here old objects get it, and it is
//! taken away.

use std::fmt::Debug;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{ListParams, PostParams};
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, WorkQueue, cause_of, run_workers};

use crate::{Context, Error};

const CLAIM: &str = "kubernetes.io/pvc-protection";
const VOLUME: &str = "kubernetes.io/pv-protection";
const CLASS: &str = "kubernetes.io/vac-protection";

/// What an object's own state asks for.
#[derive(Debug, PartialEq, Eq)]
enum Due {
    Nothing,
    /// It is not being deleted and lacks the finalizer.
    Add,
    /// It is being deleted and waits for the finalizer to go.
    RemoveIfUnused,
}

fn due(metadata: &ObjectMeta, finalizer: &str) -> Due {
    let mut finalizers = metadata.finalizers.iter().flatten();
    match (
        &metadata.deletion_timestamp,
        finalizers.any(|found| found == finalizer),
    ) {
        (None, false) => Due::Add,
        (Some(_), true) => Due::RemoveIfUnused,
        _ => Due::Nothing,
    }
}

/// Writes the object with or without the finalizer.
async fn write<K>(api: &Api<K>, object: &K, finalizer: &str, with: bool) -> Result<Action, Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned,
{
    let mut wanted = object.clone();
    let finalizers = wanted.finalizers_mut();
    finalizers.retain(|found| found != finalizer);
    if with {
        finalizers.push(finalizer.to_owned());
    }
    match api
        .replace(&object.name_any(), &PostParams::default(), &wanted)
        .await
    {
        Ok(_) => Ok(Action::Done),
        Err(error) if error.is_not_found() => Ok(Action::Done),
        Err(error) => Err(error.into()),
    }
}

/// The names of the claims that a pod's volumes are.
fn claims_of(pod: &Pod) -> Vec<String> {
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

/// Whether a pod keeps a claim from being deleted. One that has no node yet does not: no node starts it on a claim
/// that is being deleted.
fn uses(pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    let Some(spec) = &pod.spec else { return false };
    if spec.node_name.as_deref().unwrap_or("").is_empty() {
        return false;
    }
    let name = claim.name_any();
    // The node is done with it, or it was deleted by force: a finalizer of the pod may wait for the claim.
    let shut_down =
        pod.metadata.deletion_timestamp.is_some() && pod.metadata.deletion_grace_period_seconds == Some(0);
    let owned = || {
        let owners = claim.metadata.owner_references.iter().flatten();
        let mut owners = owners.filter(|owner| owner.controller == Some(true));
        owners.any(|owner| Some(&owner.uid) == pod.metadata.uid.as_ref())
    };
    spec.volumes.iter().flatten().any(|volume| {
        let named = volume.persistent_volume_claim.as_ref();
        let ephemeral = volume.ephemeral.is_some() && format!("{}-{}", pod.name_any(), volume.name) == name;
        named.is_some_and(|named| named.claim_name == name) || (!shut_down && ephemeral && owned())
    })
}

/// Whether a pod may have stopped using its claims.
fn lets_go(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let shut_down =
        pod.metadata.deletion_timestamp.is_some() && pod.metadata.deletion_grace_period_seconds == Some(0);
    matches!(phase, Some("Succeeded" | "Failed")) || node.unwrap_or("").is_empty() || shut_down
}

const BY_CLAIM: &str = "volume-protection/claim";

fn by_claim(pod: &Pod) -> Vec<String> {
    let namespace = pod.namespace().unwrap_or_default();
    let claims = claims_of(pod).into_iter();
    claims.map(|claim| format!("{namespace}/{claim}")).collect()
}

pub(crate) async fn run_claims(context: Context) {
    let claims: Informer<PersistentVolumeClaim> = context.informers.informer();
    let pods: Informer<Pod> = context.informers.informer();
    pods.add_index(BY_CLAIM, by_claim);
    let queue: Arc<WorkQueue> = context.queue("pvcprotection");
    add_due(&claims, &queue, CLAIM);
    let adder = queue.clone();
    pods.subscribe(move |change: &Change<Pod>| {
        let add = |pod: &Pod| {
            for claim in claims_of(pod) {
                adder.add(
                    Key::new(pod.namespace().unwrap_or_default(), claim),
                    Some(cause_of(pod)),
                );
            }
        };
        match change {
            Change::Deleted { last } => add(last),
            Change::Applied { old, new } => {
                if lets_go(new) {
                    add(new);
                }
                // Another pod of the same name hides that the first is gone.
                if let Some(old) = old
                    && old.metadata.uid != new.metadata.uid
                {
                    add(old);
                }
            }
        }
    });
    claims.synced().await;
    pods.synced().await;
    let client = context.client.clone();
    run_workers(
        context.name,
        4,
        queue,
        context.shutdown.clone(),
        move |key: Key| {
            let claim = claims.get(&key.namespace, &key.name);
            let users = pods.by_index(BY_CLAIM, &format!("{}/{}", key.namespace, key.name));
            let client = client.clone();
            async move {
                let Some(claim) = claim else {
                    return Ok(Action::Done);
                };
                let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &key.namespace);
                match due(&claim.metadata, CLAIM) {
                    Due::Nothing => return Ok(Action::Done),
                    Due::Add => return write(&api, &*claim, CLAIM, true).await,
                    Due::RemoveIfUnused => {}
                }
                if users.iter().any(|pod| uses(pod, &claim)) {
                    return Ok(Action::Done);
                }
                // A pod may have come that the copy does not show yet.
                let live: Api<Pod> = Api::namespaced(client, &key.namespace);
                let live = live.list(&ListParams::default()).await?;
                if live.items.iter().any(|pod| uses(pod, &claim)) {
                    return Ok(Action::Done);
                }
                write(&api, &*claim, CLAIM, false).await
            }
        },
    )
    .await;
}

/// Brings objects that something is due for to the queue.
fn add_due<K>(informer: &Informer<K>, queue: &Arc<WorkQueue>, finalizer: &'static str)
where
    K: Resource<DynamicType = (), Scope: Send> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let adder = queue.clone();
    informer.subscribe(move |change: &Change<K>| {
        if let Change::Applied { new, .. } = change
            && due(new.meta(), finalizer) != Due::Nothing
        {
            adder.add(Key::of(&**new), Some(cause_of(&**new)));
        }
    });
}

pub(crate) async fn run_volumes(context: Context) {
    let volumes: Informer<PersistentVolume> = context.informers.informer();
    let queue: Arc<WorkQueue> = context.queue("pvprotection");
    add_due(&volumes, &queue, VOLUME);
    volumes.synced().await;
    let api: Api<PersistentVolume> = Api::all(context.client.clone());
    run_workers(
        context.name,
        1,
        queue,
        context.shutdown.clone(),
        move |key: Key| {
            let (volume, api) = (volumes.get("", &key.name), api.clone());
            async move {
                let Some(volume) = volume else {
                    return Ok(Action::Done);
                };
                let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
                match due(&volume.metadata, VOLUME) {
                    Due::Add => write(&api, &*volume, VOLUME, true).await,
                    Due::RemoveIfUnused if phase != Some("Bound") => {
                        write(&api, &*volume, VOLUME, false).await
                    }
                    _ => Ok(Action::Done),
                }
            }
        },
    )
    .await;
}

const BY_CLASS: &str = "volume-protection/class";

/// The classes that a claim names: the one it wants, the one it has and the one it is on its way to.
fn classes_of_claim(claim: &PersistentVolumeClaim) -> Vec<String> {
    let status = claim.status.as_ref();
    let wanted = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.volume_attributes_class_name.clone());
    let has = status.and_then(|status| status.current_volume_attributes_class_name.clone());
    let next = status.and_then(|status| status.modify_volume_status.as_ref());
    let next = next.and_then(|next| next.target_volume_attributes_class_name.clone());
    let mut names: Vec<String> = [wanted, has, next].into_iter().flatten().collect();
    names.retain(|name| !name.is_empty());
    names.sort();
    names.dedup();
    names
}

fn classes_of_volume(volume: &PersistentVolume) -> Vec<String> {
    let spec = volume.spec.as_ref();
    let name = spec.and_then(|spec| spec.volume_attributes_class_name.clone());
    name.into_iter().filter(|name| !name.is_empty()).collect()
}

/// Brings classes to the queue that an object no longer names.
fn add_left<K>(informer: &Informer<K>, queue: &Arc<WorkQueue>, classes: fn(&K) -> Vec<String>)
where
    K: Resource<DynamicType = (), Scope: Send> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let adder = queue.clone();
    informer.subscribe(move |change: &Change<K>| {
        let (before, now) = match change {
            Change::Deleted { last } => (classes(last), Vec::new()),
            Change::Applied { old: Some(old), new } => (classes(old), classes(new)),
            Change::Applied { old: None, .. } => return,
        };
        for class in before.into_iter().filter(|class| !now.contains(class)) {
            adder.add(Key::new("", class), Some(cause_of(&**change.object())));
        }
    });
}

pub(crate) async fn run_classes(context: Context) {
    let classes: Informer<VolumeAttributesClass> = context.informers.informer();
    let claims: Informer<PersistentVolumeClaim> = context.informers.informer();
    let volumes: Informer<PersistentVolume> = context.informers.informer();
    claims.add_index(BY_CLASS, classes_of_claim);
    volumes.add_index(BY_CLASS, classes_of_volume);
    let queue: Arc<WorkQueue> = context.queue("vacprotection");
    add_due(&classes, &queue, CLASS);
    add_left(&claims, &queue, classes_of_claim);
    add_left(&volumes, &queue, classes_of_volume);
    classes.synced().await;
    claims.synced().await;
    volumes.synced().await;
    let api: Api<VolumeAttributesClass> = Api::all(context.client.clone());
    run_workers(
        context.name,
        1,
        queue,
        context.shutdown.clone(),
        move |key: Key| {
            let (class, api) = (classes.get("", &key.name), api.clone());
            let used = !claims.by_index(BY_CLASS, &key.name).is_empty()
                || !volumes.by_index(BY_CLASS, &key.name).is_empty();
            async move {
                let Some(class) = class else {
                    return Ok(Action::Done);
                };
                match due(&class.metadata, CLASS) {
                    Due::Add => write(&api, &*class, CLASS, true).await,
                    Due::RemoveIfUnused if !used => write(&api, &*class, CLASS, false).await,
                    _ => Ok(Action::Done),
                }
            }
        },
    )
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn what_is_due() {
        let check = |metadata: Value, expected: Due| {
            let metadata: ObjectMeta = serde_json::from_value(metadata).unwrap();
            assert_eq!(due(&metadata, CLAIM), expected, "{metadata:?}");
        };
        let deleted = "2026-01-01T00:00:00Z";
        check(json!({}), Due::Add);
        check(json!({"finalizers": ["other"]}), Due::Add);
        check(json!({"finalizers": ["other", CLAIM]}), Due::Nothing);
        check(
            json!({"finalizers": ["other"], "deletionTimestamp": deleted}),
            Due::Nothing,
        );
        check(
            json!({"finalizers": [CLAIM], "deletionTimestamp": deleted}),
            Due::RemoveIfUnused,
        );
    }

    #[test]
    fn who_uses_a_claim() {
        let claim: PersistentVolumeClaim =
            serde_json::from_value(json!({"metadata": {"name": "p-data", "ownerReferences": [
            {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true}]}}))
            .unwrap();
        let check = |metadata: Value, node: &str, volume: Value, expected: bool| {
            let mut pod = json!({"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": node, "containers": [], "volumes": [volume]}});
            for (key, value) in metadata.as_object().unwrap() {
                pod["metadata"][key] = value.clone();
            }
            let pod: Pod = serde_json::from_value(pod).unwrap();
            assert_eq!(uses(&pod, &claim), expected, "{pod:?}");
        };
        let named = |name: &str| json!({"name": "v", "persistentVolumeClaim": {"claimName": name}});
        let ephemeral = json!({"name": "data", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}});
        check(json!({}), "n", named("p-data"), true);
        check(json!({}), "", named("p-data"), false);
        check(json!({}), "n", named("other"), false);
        check(json!({}), "n", ephemeral.clone(), true);
        check(json!({"uid": "another"}), "n", ephemeral.clone(), false);
        let gone = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0});
        check(gone.clone(), "n", ephemeral, false);
        check(gone, "n", named("p-data"), true);
    }

    #[test]
    fn what_a_claim_names() {
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({"spec": {"volumeAttributesClassName": "b"}, "status": {
            "currentVolumeAttributesClassName": "a", "modifyVolumeStatus": {"status": "Pending", "targetVolumeAttributesClassName": "b"}}}))
        .unwrap();
        assert_eq!(classes_of_claim(&claim), ["a", "b"]);
        assert!(classes_of_claim(&PersistentVolumeClaim::default()).is_empty());
    }
}
