//! The ephemeral volume controller: makes the claims of pods' generic ephemeral volumes. They are owned by their pods,
//! so that the garbage collector deletes them.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use skiff_client::{Action, Change, Informer, Key, Reconcile, reference};

use super::{PODS_BY_CLAIM, pods_by_claim};
use crate::{Context, Error, error_message};

struct EphemeralVolumes {
    context: Context,
    pods: Informer<Pod>,
    claims: Informer<PersistentVolumeClaim>,
}

pub(crate) async fn run(context: Context) {
    let volumes = Arc::new(EphemeralVolumes {
        pods: context.informers.informer(),
        claims: context.informers.informer(),
        context: context.clone(),
    });
    volumes.pods.add_index(PODS_BY_CLAIM, pods_by_claim);
    context
        .controller("ephemeral_volume", volumes)
        .workers(context.workers())
        .watches(|volumes| &volumes.pods, EphemeralVolumes::woken_by_pod)
        .watches(|volumes| &volumes.claims, EphemeralVolumes::woken_by_claim)
        .run()
        .await;
}

fn has_ephemeral_volumes(pod: &Pod) -> bool {
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    pod.metadata.deletion_timestamp.is_none() && volumes.any(|volume| volume.ephemeral.is_some())
}

/// The claims that a pod lacks, or why one of its volumes cannot have its claim.
fn plan(
    pod: &Pod,
    present: impl Fn(&str) -> Option<Arc<PersistentVolumeClaim>>,
) -> Result<Vec<(String, PersistentVolumeClaim)>, (String, String)> {
    let mut missing = Vec::new();
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let Some(claim) = claim_for(pod, volume) else {
            continue;
        };
        let name = claim.name_any();
        match present(&name) {
            None => missing.push((volume.name.clone(), claim)),
            Some(present) if is_for(&present, pod) => {}
            Some(_) => {
                let namespace = pod.namespace().unwrap_or_default();
                let message = format!(
                    "PVC {namespace}/{name} was not created for pod {namespace}/{} (pod is not owner)",
                    pod.name_any()
                );
                return Err((volume.name.clone(), message));
            }
        }
    }
    Ok(missing)
}

fn is_for(claim: &PersistentVolumeClaim, pod: &Pod) -> bool {
    let mut owners = claim.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.controller == Some(true) && Some(&owner.uid) == pod.metadata.uid.as_ref())
}

fn claim_for(pod: &Pod, volume: &Volume) -> Option<PersistentVolumeClaim> {
    let template = volume.ephemeral.as_ref()?.volume_claim_template.as_ref()?;
    let metadata = template.metadata.clone().unwrap_or_default();
    Some(PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(format!("{}-{}", pod.name_any(), volume.name)),
            namespace: pod.namespace(),
            labels: metadata.labels,
            annotations: metadata.annotations,
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Pod".to_owned(),
                name: pod.name_any(),
                uid: pod.uid().unwrap_or_default(),
                controller: Some(true),
                block_owner_deletion: Some(true),
            }]),
            ..Default::default()
        },
        spec: Some(template.spec.clone()),
        status: None,
    })
}

impl EphemeralVolumes {
    fn woken_by_pod(&self, change: &Change<Pod>) -> Option<Key> {
        match change {
            // What a pod's volumes are does not change.
            Change::Applied { old: None, new } if has_ephemeral_volumes(new) => Some(Key::of(&**new)),
            _ => None,
        }
    }

    fn woken_by_claim(&self, change: &Change<PersistentVolumeClaim>) -> Vec<Key> {
        let Change::Deleted { last } = change else {
            return Vec::new();
        };
        let key = format!("{}/{}", last.namespace().unwrap_or_default(), last.name_any());
        let pods = self.pods.by_index(PODS_BY_CLAIM, &key);
        let pods = pods.iter().filter(|pod| has_ephemeral_volumes(pod));
        pods.map(|pod| Key::of(&**pod)).collect()
    }

    fn failed(&self, pod: &Pod, volume: &str, message: String) -> Error {
        let message = format!("ephemeral volume {volume}: {message}");
        let events = &self.context.events;
        events.event(&reference(pod), "Warning", "FailedBinding", message.clone());
        Error::Other(message)
    }
}

impl Reconcile for EphemeralVolumes {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(pod) = self.pods.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        if !has_ephemeral_volumes(&pod) {
            return Ok(Action::Done);
        }
        let missing = plan(&pod, |name| self.claims.get(&key.namespace, name))
            .map_err(|(volume, message)| self.failed(&pod, &volume, message))?;
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.context.client.clone(), &key.namespace);
        for (volume, claim) in missing {
            if let Err(error) = api.create(&PostParams::default(), &claim).await {
                let message = format!("create PVC {}: {}", claim.name_any(), error_message(&error));
                return Err(self.failed(&pod, &volume, message));
            }
        }
        Ok(Action::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn claims_are_made_once_and_belong_to_their_pod() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"containers": [], "volumes": [
                {"name": "a", "emptyDir": {}},
                {"name": "b", "ephemeral": {"volumeClaimTemplate": {
                    "metadata": {"labels": {"l": "1"}, "annotations": {"a": "2"}},
                    "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "fast"}}}},
            ]},
        }))
        .unwrap();
        let made = plan(&pod, |_| None).unwrap();
        assert_eq!(
            serde_json::to_value(&made[0].1).unwrap(),
            json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": {"name": "p-b", "namespace": "ns", "labels": {"l": "1"}, "annotations": {"a": "2"},
                    "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true, "blockOwnerDeletion": true}]},
                "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "fast"}})
        );
        assert_eq!(made.len(), 1);
        let ours = Arc::new(made[0].1.clone());
        assert_eq!(plan(&pod, |_| Some(ours.clone())), Ok(Vec::new()));
        let mut others = made[0].1.clone();
        others.metadata.owner_references = None;
        let others = Arc::new(others);
        let refused = plan(&pod, |_| Some(others.clone())).unwrap_err();
        assert_eq!(
            refused,
            (
                "b".to_owned(),
                "PVC ns/p-b was not created for pod ns/p (pod is not owner)".to_owned()
            )
        );
    }
}
