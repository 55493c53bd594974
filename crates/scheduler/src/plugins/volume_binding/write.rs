//! PreBind: writes what was decided, and looks whether it has come to pass.

use super::objects::{annotation, is_bound, is_for, version, volume_name};
use super::{BOUND_BY_CONTROLLER, Claim, Decision, SELECTED_NODE, VolumeBinding};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, PostParams};
use skiff_client::Key;

impl VolumeBinding {
    /// Whether what was written has come to pass.
    pub(super) fn check(&self, decision: &Decision, node: &str) -> Result<bool, String> {
        for (volume, claim) in &decision.volumes {
            let name = volume.metadata.name.as_deref().unwrap_or_default();
            let Some(volume) = self.listers.volumes.get("", name) else {
                return Err(format!(
                    "failed to check binding: persistentvolume {name:?} not found"
                ));
            };
            let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
            let uid = reference
                .and_then(|reference| reference.uid.as_deref())
                .unwrap_or_default();
            if uid.is_empty() {
                let old = self
                    .assumed
                    .lock()
                    .volumes
                    .get(name)
                    .is_some_and(|(on, _)| on == version(&*volume));
                if old {
                    return Ok(false);
                }
                return Err(format!("ClaimRef got reset for pv {name:?}"));
            }
            if !self.current(claim)?.is_some_and(|claim| is_bound(&claim)) {
                return Ok(false);
            }
        }
        for claim in &decision.provision {
            let Some(now) = self.current(claim)? else {
                return Ok(false);
            };
            let name = now.metadata.name.as_deref().unwrap_or_default();
            if annotation(&now, SELECTED_NODE) != Some(node) {
                return Err(format!("provisioning failed for PVC {name:?}"));
            }
            if !is_bound(&now) || self.listers.volumes.get("", volume_name(&now)).is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The claim as it is now; `None` while the informer still shows what the decision was made on.
    fn current(&self, claim: &Claim) -> Result<Option<Claim>, String> {
        let key = Key::of(&**claim);
        let Some(now) = self.listers.claims.get(&key.namespace, &key.name) else {
            return Err(format!(
                "failed to check binding: persistentvolumeclaim {key} not found"
            ));
        };
        let old = self
            .assumed
            .lock()
            .claims
            .get(&key)
            .is_some_and(|(on, _)| on == version(&*now));
        Ok((!old).then_some(now))
    }

    pub(super) async fn write(&self, decision: &Decision, node: &str) -> Result<(), kube::Error> {
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        for (volume, claim) in &decision.volumes {
            let mut volume = (**volume).clone();
            if !is_for(&volume, claim) {
                let annotations = volume.metadata.annotations.get_or_insert_default();
                annotations.insert(BOUND_BY_CONTROLLER.to_owned(), "yes".to_owned());
            }
            volume.spec.get_or_insert_default().claim_ref = Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("PersistentVolumeClaim".to_owned()),
                name: claim.metadata.name.clone(),
                namespace: claim.metadata.namespace.clone(),
                uid: claim.metadata.uid.clone(),
                resource_version: claim.metadata.resource_version.clone(),
                field_path: None,
            });
            let name = volume.metadata.name.clone().unwrap_or_default();
            volumes.replace(&name, &PostParams::default(), &volume).await?;
        }
        for claim in &decision.provision {
            if annotation(claim, SELECTED_NODE) == Some(node) {
                continue;
            }
            let mut claim = (**claim).clone();
            let annotations = claim.metadata.annotations.get_or_insert_default();
            annotations.insert(SELECTED_NODE.to_owned(), node.to_owned());
            let namespace = claim.metadata.namespace.clone().unwrap_or_default();
            let name = claim.metadata.name.clone().unwrap_or_default();
            let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &namespace);
            claims.replace(&name, &PostParams::default(), &claim).await?;
        }
        Ok(())
    }

    pub(super) fn forget(&self, decision: &Decision) {
        let mut assumed = self.assumed.lock();
        for (volume, _) in &decision.volumes {
            assumed
                .volumes
                .remove(volume.metadata.name.as_deref().unwrap_or_default());
        }
        for claim in &decision.provision {
            assumed.claims.remove(&Key::of(&**claim));
        }
    }
}
