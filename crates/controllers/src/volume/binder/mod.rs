//! The persistent volume binder: claims get volumes, volumes get phases, and volumes whose claim is gone are reclaimed.
//! A binding is written in four steps (volume, its phase, claim, its status); each can be repeated, so whatever ends
//! the controller in between, the next reconcile goes on from there. Two claims that want one volume are told apart by
//! the volume's resourceVersion.
//!
//! It makes and deletes no volume itself: that is the work of the provisioner that a class names.

mod claim;
mod matching;
mod steps;
#[cfg(test)]
mod tests;
mod volume;

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::PostParams;
use kube::{Api, Resource, ResourceExt};
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile, reference};

use super::{
    BIND_COMPLETED, PODS_BY_CLAIM, claim_phase, claim_ref, class_of_claim, class_of_volume, default_class,
    has_annotation, is_terminated, pods_by_claim, reference_key, requested_class, volume_name, volume_phase,
};
use crate::{Context, Error, error_message};

/// How many claims a new volume wakes.
const CLAIMS_PER_VOLUME: usize = 16;

/// An event.
#[derive(Debug, PartialEq)]
struct Note {
    type_: &'static str,
    reason: &'static str,
    message: String,
}

fn normal(reason: &'static str, message: impl Into<String>) -> Note {
    Note {
        type_: "Normal",
        reason,
        message: message.into(),
    }
}

fn warning(reason: &'static str, message: impl Into<String>) -> Note {
    Note {
        type_: "Warning",
        reason,
        message: message.into(),
    }
}

/// Volumes by the claim that they are reserved for.
const BY_CLAIM: &str = "binder/claim";
/// Volumes that are reserved for no claim, by class.
const FREE_BY_CLASS: &str = "binder/free";
/// Claims that are not bound, by class.
const UNBOUND_BY_CLASS: &str = "binder/unbound";
/// Where claims are that leave their class open. A class cannot have this name.
const ANY_CLASS: &str = "*";

fn by_claim(volume: &PersistentVolume) -> Vec<String> {
    claim_ref(volume).map(reference_key).into_iter().collect()
}

fn free_by_class(volume: &PersistentVolume) -> Vec<String> {
    match claim_ref(volume) {
        Some(_) => Vec::new(),
        None => vec![class_of_volume(volume).to_owned()],
    }
}

/// Volumes that have no phase yet, or that somebody has to delete.
const UNSETTLED: &str = "binder/unsettled";

fn unsettled(volume: &PersistentVolume) -> Vec<String> {
    let spec = volume.spec.as_ref();
    let policy = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    let due = match volume_phase(volume) {
        "" | "Pending" => true,
        "Released" => policy != Some("Retain"),
        _ => false,
    };
    if due {
        vec![UNSETTLED.to_owned()]
    } else {
        Vec::new()
    }
}

fn became_available(change: &Change<PersistentVolume>) -> bool {
    match change {
        Change::Applied { old, new } => {
            let before = old.as_ref().map(|old| volume_phase(old));
            volume_phase(new) == "Available" && before != Some("Available")
        }
        Change::Deleted { .. } => false,
    }
}

fn unbound_by_class(claim: &PersistentVolumeClaim) -> Vec<String> {
    if has_annotation(&claim.metadata, BIND_COMPLETED) {
        return Vec::new();
    }
    vec![requested_class(claim).unwrap_or(ANY_CLASS).to_owned()]
}

/// Keys with a namespace are claims, those without are volumes.
struct Binder {
    context: Context,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    pods: Informer<Pod>,
}

pub(crate) async fn run(context: Context) {
    let binder = Arc::new(Binder {
        claims: context.informers.informer(),
        volumes: context.informers.informer(),
        classes: context.informers.informer(),
        pods: context.informers.informer(),
        context: context.clone(),
    });
    binder.volumes.add_index(BY_CLAIM, by_claim);
    binder.volumes.add_index(FREE_BY_CLASS, free_by_class);
    binder.volumes.add_index(UNSETTLED, unsettled);
    binder.claims.add_index(UNBOUND_BY_CLASS, unbound_by_class);
    binder.pods.add_index(PODS_BY_CLAIM, pods_by_claim);
    context
        .controller("claims", binder)
        .workers(2)
        .watches(|binder| &binder.claims, Binder::woken_by_claim)
        .watches(|binder| &binder.volumes, Binder::woken_by_volume)
        .watches(|binder| &binder.classes, Binder::woken_by_class)
        .reads(|binder| &binder.pods)
        .every(context.config.volume_binder_sync_period, Binder::unsettled)
        .run()
        .await;
}

fn volume_key(name: &str) -> Key {
    Key::new("", name)
}

impl Binder {
    fn woken_by_claim(&self, change: &Change<PersistentVolumeClaim>) -> Vec<Key> {
        let claim = change.object();
        let mut keys = vec![Key::of(&**claim)];
        let name = volume_name(claim);
        if !name.is_empty() {
            keys.push(volume_key(name));
        }
        // A volume may be reserved for a claim that does not name it.
        let key = format!("{}/{}", keys[0].namespace, keys[0].name);
        let reserved = self.volumes.by_index(BY_CLAIM, &key);
        keys.extend(reserved.iter().map(|volume| Key::of(&**volume)));
        keys
    }

    fn woken_by_volume(&self, change: &Change<PersistentVolume>) -> Vec<Key> {
        let volume = change.object();
        let mut keys = vec![Key::of(&**volume)];
        if let Some(claim) = claim_ref(volume) {
            let part = |part: &Option<String>| part.clone().unwrap_or_default();
            keys.push(Key::new(part(&claim.namespace), part(&claim.name)));
        } else if became_available(change) {
            // Upstream's claims find a new volume when they are looked at the next time. One of them will have it, so
            // a few are enough.
            let class = class_of_volume(volume);
            let mut claims = self.claims.by_index(UNBOUND_BY_CLASS, class);
            if class.is_empty() {
                claims.extend(self.claims.by_index(UNBOUND_BY_CLASS, ANY_CLASS));
            }
            let fitting = claims
                .iter()
                .filter(|claim| matching::check(volume, claim).is_ok());
            keys.extend(fitting.take(CLAIMS_PER_VOLUME).map(|claim| Key::of(&**claim)));
        }
        keys
    }

    fn woken_by_class(&self, change: &Change<StorageClass>) -> Vec<Key> {
        let mut keys = self.unbound(&change.object().name_any());
        keys.extend(self.unbound(ANY_CLASS));
        keys
    }

    fn unbound(&self, class: &str) -> Vec<Key> {
        let claims = self.claims.by_index(UNBOUND_BY_CLASS, class);
        claims.iter().map(|claim| Key::of(&**claim)).collect()
    }

    fn unsettled(&self) -> Vec<Key> {
        let classes = self.claims.index_values(UNBOUND_BY_CLASS);
        let mut keys: Vec<Key> = classes.iter().flat_map(|class| self.unbound(class)).collect();
        let volumes = self.volumes.by_index(UNSETTLED, UNSETTLED);
        keys.extend(volumes.iter().map(|volume| Key::of(&**volume)));
        keys
    }

    fn note<K: Resource<DynamicType = ()>>(&self, object: &K, note: Note) {
        let events = &self.context.events;
        events.event(&reference(object), note.type_, note.reason, note.message);
    }

    fn claim_api(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.context.client.clone(), namespace)
    }

    fn volume_api(&self) -> Api<PersistentVolume> {
        Api::all(self.context.client.clone())
    }

    async fn sync_claim(&self, claim: &PersistentVolumeClaim) -> Result<Action, Error> {
        let namespace = claim.namespace().unwrap_or_default();
        let key = format!("{namespace}/{}", claim.name_any());
        let class = self.classes.get("", class_of_claim(claim));
        let classes = match requested_class(claim) {
            None => self.classes.list(),
            Some(_) => Vec::new(),
        };
        let mut candidates = self.volumes.by_index(FREE_BY_CLASS, class_of_claim(claim));
        candidates.extend(self.volumes.by_index(BY_CLAIM, &key));
        let plan = claim::plan(claim::Observed {
            claim,
            named: self.volumes.get("", volume_name(claim)),
            candidates,
            class: class.as_deref(),
            default_class: default_class(classes.iter().map(|class| &**class)),
            pods: self.pods.by_index(PODS_BY_CLAIM, &key),
        });
        match plan {
            claim::Plan::Bind(volume) => self.bind(claim, &volume).await?,
            claim::Plan::Wait(note) => {
                if let Some(note) = note {
                    self.note(claim, note);
                }
                self.set_claim_status(claim, "Pending", None).await?;
            }
            claim::Plan::AssignClass(class) => {
                let mut wanted = claim.clone();
                wanted.spec.get_or_insert_default().storage_class_name = Some(class);
                let api = self.claim_api(&namespace);
                api.replace(&claim.name_any(), &PostParams::default(), &wanted)
                    .await?;
            }
            claim::Plan::Provision { provisioner } => self.provision(claim, &provisioner).await?,
            claim::Plan::CannotProvision(note) => self.note(claim, note),
            claim::Plan::Lost(note) => {
                if claim_phase(claim) != "Lost" {
                    self.set_claim_status(claim, "Lost", None).await?;
                    self.note(claim, note);
                }
            }
            claim::Plan::Misbound(note, error) => {
                self.note(claim, note);
                return Err(Error::Other(error));
            }
        }
        Ok(Action::Done)
    }

    /// Names the provisioner on the claim; that is the sign for it to begin.
    async fn provision(&self, claim: &PersistentVolumeClaim, provisioner: &str) -> Result<(), Error> {
        if let Some(wanted) = steps::with_provisioner(claim, provisioner) {
            let api = self.claim_api(&claim.namespace().unwrap_or_default());
            let written = api
                .replace(&claim.name_any(), &PostParams::default(), &wanted)
                .await;
            if let Err(error) = written {
                let message = format!("Error saving claim: {}", error_message(&error));
                self.note(claim, warning("ProvisioningFailed", message));
                return Err(error.into());
            }
        }
        let message = format!(
            "Waiting for a volume to be created either by the external provisioner '{provisioner}' or manually by the system administrator. If volume creation is delayed, please verify that the provisioner is running and correctly registered."
        );
        self.note(claim, normal("ExternalProvisioning", message));
        Ok(())
    }

    async fn bind(&self, claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Result<(), Error> {
        let volume = match steps::volume_to_claim(volume, claim) {
            Some(wanted) => {
                let api = self.volume_api();
                api.replace(&volume.name_any(), &PostParams::default(), &wanted)
                    .await?
            }
            None => volume.clone(),
        };
        let volume = self.set_phase(volume, "Bound", "").await?;
        let api = self.claim_api(&claim.namespace().unwrap_or_default());
        let claim = match steps::claim_to_volume(claim, &volume) {
            Some(wanted) => {
                api.replace(&claim.name_any(), &PostParams::default(), &wanted)
                    .await?
            }
            None => claim.clone(),
        };
        self.set_claim_status(&claim, "Bound", Some(&volume)).await
    }

    async fn set_claim_status(
        &self,
        claim: &PersistentVolumeClaim,
        phase: &str,
        volume: Option<&PersistentVolume>,
    ) -> Result<(), Error> {
        if let Some(wanted) = steps::claim_status(claim, phase, volume) {
            let api = self.claim_api(&claim.namespace().unwrap_or_default());
            api.replace_status(&claim.name_any(), &PostParams::default(), &wanted)
                .await?;
        }
        Ok(())
    }

    async fn set_phase(
        &self,
        volume: PersistentVolume,
        phase: &str,
        message: &str,
    ) -> Result<PersistentVolume, Error> {
        let Some(wanted) = steps::in_phase(&volume, phase, message) else {
            return Ok(volume);
        };
        let api = self.volume_api();
        let written = api
            .replace_status(&volume.name_any(), &PostParams::default(), &wanted)
            .await?;
        Ok(written)
    }

    async fn sync_volume(&self, volume: &PersistentVolume) -> Result<Action, Error> {
        let claim = self.claim_of(volume).await?;
        match volume::plan(volume, claim.as_deref()) {
            volume::Plan::Nothing => {}
            volume::Plan::Phase(phase) => {
                self.set_phase(volume.clone(), phase, "").await?;
            }
            volume::Plan::Mismatch(of_volume, of_claim) => {
                self.note(volume, of_volume);
                if let Some(claim) = claim {
                    self.note(&*claim, of_claim);
                }
            }
            volume::Plan::Unbind => {
                let api = self.volume_api();
                let free = steps::unbound(volume);
                let free = api
                    .replace(&volume.name_any(), &PostParams::default(), &free)
                    .await?;
                self.set_phase(free, "Available", "").await?;
            }
            volume::Plan::Reclaim { released } => {
                let volume = if released {
                    self.set_phase(volume.clone(), "Released", "").await?
                } else {
                    volume.clone()
                };
                self.reclaim(volume).await?;
            }
        }
        Ok(Action::Done)
    }

    /// The claim that the volume is bound to; asked of the server before it is taken for gone.
    async fn claim_of(&self, volume: &PersistentVolume) -> Result<Option<Arc<PersistentVolumeClaim>>, Error> {
        let Some(holder) = claim_ref(volume) else {
            return Ok(None);
        };
        let uid = holder.uid.as_deref().unwrap_or_default();
        if uid.is_empty() {
            return Ok(None);
        }
        let namespace = holder.namespace.clone().unwrap_or_default();
        let name = holder.name.clone().unwrap_or_default();
        let is_holder = |claim: &PersistentVolumeClaim| claim.metadata.uid.as_deref() == Some(uid);
        match self.claims.get(&namespace, &name) {
            Some(claim) if is_holder(&claim) => return Ok(Some(claim)),
            // Nothing was there when it was released: no need to ask again and again.
            None if matches!(volume_phase(volume), "Released" | "Failed") => return Ok(None),
            _ => {}
        }
        let live = self.claim_api(&namespace).get_opt(&name).await?;
        Ok(live.filter(is_holder).map(Arc::new))
    }

    async fn reclaim(&self, volume: PersistentVolume) -> Result<(), Error> {
        let key = claim_ref(&volume).map(reference_key).unwrap_or_default();
        let pods = self.pods.by_index(PODS_BY_CLAIM, &key);
        let pods = pods.iter().filter(|pod| !is_terminated(pod));
        let mut users: Vec<String> = pods
            .map(|pod| format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()))
            .collect();
        users.sort();
        match volume::reclaim(&volume, &users) {
            volume::Reclaim::Leave => {}
            volume::Reclaim::InUse(note) => self.note(&volume, note),
            volume::Reclaim::Fail(note) => {
                if volume_phase(&volume) != "Failed" {
                    let failed = self.set_phase(volume, "Failed", &note.message).await?;
                    self.note(&failed, note);
                }
            }
        }
        Ok(())
    }
}

impl Reconcile for Binder {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let done = if key.namespace.is_empty() {
            match self.volumes.get("", &key.name) {
                Some(volume) => self.sync_volume(&volume).await,
                None => Ok(Action::Done),
            }
        } else {
            match self.claims.get(&key.namespace, &key.name) {
                Some(claim) => self.sync_claim(&claim).await,
                None => Ok(Action::Done),
            }
        };
        match done {
            // It went away meanwhile.
            Err(Error::Api(error)) if error.is_not_found() => Ok(Action::Done),
            other => other,
        }
    }
}
