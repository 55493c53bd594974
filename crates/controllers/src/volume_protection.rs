//! What is in use is not deleted: claims that pods use, volumes that are bound, and classes of attributes that claims
//! or volumes name keep a finalizer until nobody uses them. Admission sets it; here old objects get it, and it is
//! taken away.

use std::fmt::Debug;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile};

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

/// The object itself, if something is due for it.
fn woken_if_due<K: Resource>(change: &Change<K>, finalizer: &str) -> Option<Key> {
    let Change::Applied { new, .. } = change else {
        return None;
    };
    (due(new.meta(), finalizer) != Due::Nothing).then(|| Key::of(&**new))
}

struct Claims {
    client: Client,
    claims: Informer<PersistentVolumeClaim>,
    pods: Informer<Pod>,
}

pub(crate) async fn run_claims(context: Context) {
    let reconciler = Arc::new(Claims {
        client: context.client.clone(),
        claims: context.informers.informer(),
        pods: context.informers.informer(),
    });
    reconciler.pods.add_index(BY_CLAIM, by_claim);
    context
        .controller("pvcprotection", reconciler)
        .workers(4)
        .watches(|r| &r.claims, |_, change| woken_if_due(change, CLAIM))
        .watches(|r| &r.pods, |_, change| claims_let_go(change))
        .run()
        .await;
}

/// The claims that a pod may have stopped using.
fn claims_let_go(change: &Change<Pod>) -> Vec<Key> {
    let pod = change.object();
    if matches!(change, Change::Applied { .. }) && !lets_go(pod) {
        return Vec::new();
    }
    let namespace = pod.namespace().unwrap_or_default();
    let claims = claims_of(pod).into_iter();
    claims.map(|claim| Key::new(namespace.clone(), claim)).collect()
}

impl Reconcile for Claims {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(claim) = self.claims.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &key.namespace);
        match due(&claim.metadata, CLAIM) {
            Due::Nothing => return Ok(Action::Done),
            Due::Add => return write(&api, &*claim, CLAIM, true).await,
            Due::RemoveIfUnused => {}
        }
        let users = self.pods.by_index(BY_CLAIM, &key.to_string());
        if users.iter().any(|pod| uses(pod, &claim)) {
            return Ok(Action::Done);
        }
        // A pod may have come that the copy does not show yet.
        let live: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let live = live.list(&ListParams::default()).await?;
        if live.items.iter().any(|pod| uses(pod, &claim)) {
            return Ok(Action::Done);
        }
        write(&api, &*claim, CLAIM, false).await
    }
}

struct Volumes {
    client: Client,
    volumes: Informer<PersistentVolume>,
}

pub(crate) async fn run_volumes(context: Context) {
    let reconciler = Arc::new(Volumes {
        client: context.client.clone(),
        volumes: context.informers.informer(),
    });
    context
        .controller("pvprotection", reconciler)
        .watches(|r| &r.volumes, |_, change| woken_if_due(change, VOLUME))
        .run()
        .await;
}

impl Reconcile for Volumes {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(volume) = self.volumes.get("", &key.name) else {
            return Ok(Action::Done);
        };
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
        match due(&volume.metadata, VOLUME) {
            Due::Add => write(&api, &*volume, VOLUME, true).await,
            Due::RemoveIfUnused if phase != Some("Bound") => write(&api, &*volume, VOLUME, false).await,
            _ => Ok(Action::Done),
        }
    }
}

const BY_CLASS: &str = "volume-protection/class";

/// The classes that a claim names: the one it wants, the one it has and the one it is on its way to.
pub(crate) fn classes_of_claim(claim: &PersistentVolumeClaim) -> Vec<String> {
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

/// The classes that an object named before and names no longer.
fn classes_let_go<K: Resource>(change: &Change<K>, classes: fn(&K) -> Vec<String>) -> Vec<Key> {
    let (before, now) = match change {
        Change::Deleted { last } => (classes(last), Vec::new()),
        Change::Applied { old: Some(old), new } => (classes(old), classes(new)),
        Change::Applied { old: None, .. } => return Vec::new(),
    };
    let left = before.into_iter().filter(|class| !now.contains(class));
    left.map(|class| Key::new("", class)).collect()
}

struct Classes {
    client: Client,
    classes: Informer<VolumeAttributesClass>,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
}

pub(crate) async fn run_classes(context: Context) {
    let reconciler = Arc::new(Classes {
        client: context.client.clone(),
        classes: context.informers.informer(),
        claims: context.informers.informer(),
        volumes: context.informers.informer(),
    });
    reconciler.claims.add_index(BY_CLASS, classes_of_claim);
    reconciler.volumes.add_index(BY_CLASS, classes_of_volume);
    context
        .controller("vacprotection", reconciler)
        .watches(|r| &r.classes, |_, change| woken_if_due(change, CLASS))
        .watches(
            |r| &r.claims,
            |_, change| classes_let_go(change, classes_of_claim),
        )
        .watches(
            |r| &r.volumes,
            |_, change| classes_let_go(change, classes_of_volume),
        )
        .run()
        .await;
}

impl Reconcile for Classes {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(class) = self.classes.get("", &key.name) else {
            return Ok(Action::Done);
        };
        let used = !self.claims.by_index(BY_CLASS, &key.name).is_empty()
            || !self.volumes.by_index(BY_CLASS, &key.name).is_empty();
        let api: Api<VolumeAttributesClass> = Api::all(self.client.clone());
        match due(&class.metadata, CLASS) {
            Due::Add => write(&api, &*class, CLASS, true).await,
            Due::RemoveIfUnused if !used => write(&api, &*class, CLASS, false).await,
            _ => Ok(Action::Done),
        }
    }
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
