//! The attach/detach controller: a VolumeAttachment for every CSI volume that pods of a node need, and none for those
//! that they do not need any more. The driver's attacher does the work; the node learns from
//! `status.volumesAttached` what is attached, and says in `status.volumesInUse` what must not be detached yet.
//!
//! Its keys are nodes.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile, reference};

use super::{
    PODS_BY_CLAIM, claim_phase, claim_ref, claims_of_pod, is_terminated, pods_by_claim, reference_key,
    volume_name,
};
use crate::{Context, Error};
use plan::{Observed, Present, Wanted};

/// Pods with claims, by their node.
const BY_NODE: &str = "attach/node";
const ATTACHMENTS_BY_NODE: &str = "attach/of-node";
const ATTACHMENTS_BY_VOLUME: &str = "attach/of-volume";

fn node_name(pod: &Pod) -> &str {
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.node_name.as_deref())
        .unwrap_or_default()
}

fn by_node(pod: &Pod) -> Vec<String> {
    let node = node_name(pod);
    if node.is_empty() || claims_of_pod(pod).is_empty() {
        return Vec::new();
    }
    vec![node.to_owned()]
}

fn attachments_by_node(attachment: &VolumeAttachment) -> Vec<String> {
    vec![attachment.spec.node_name.clone()]
}

fn attachments_by_volume(attachment: &VolumeAttachment) -> Vec<String> {
    let source = &attachment.spec.source;
    source.persistent_volume_name.iter().cloned().collect()
}

struct AttachDetach {
    context: Context,
    pods: Informer<Pod>,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    nodes: Informer<Node>,
    attachments: Informer<VolumeAttachment>,
    drivers: Informer<CSIDriver>,
    /// By node and attachment: since when it is not needed. A leaf lock.
    unneeded_since: Mutex<BTreeMap<String, BTreeMap<String, Timestamp>>>,
}

pub(crate) async fn run(context: Context) {
    let controller = Arc::new(AttachDetach {
        pods: context.informers.informer(),
        claims: context.informers.informer(),
        volumes: context.informers.informer(),
        nodes: context.informers.informer(),
        attachments: context.informers.informer(),
        drivers: context.informers.informer(),
        unneeded_since: Mutex::default(),
        context: context.clone(),
    });
    controller.pods.add_index(BY_NODE, by_node);
    controller.pods.add_index(PODS_BY_CLAIM, pods_by_claim);
    controller
        .attachments
        .add_index(ATTACHMENTS_BY_NODE, attachments_by_node);
    controller
        .attachments
        .add_index(ATTACHMENTS_BY_VOLUME, attachments_by_volume);
    context
        .controller("attach_detach", controller)
        .workers(10)
        .watches(|c| &c.pods, |_, change| woken_by_pod(change))
        .watches(|c| &c.claims, |c, change| c.users(&Key::of(&**change.object())))
        .watches(|c| &c.volumes, AttachDetach::woken_by_volume)
        .watches(|c| &c.nodes, AttachDetach::woken_by_node)
        .watches(|c| &c.attachments, AttachDetach::woken_by_attachment)
        .reads(|c| &c.drivers)
        .run()
        .await;
}

fn node_key(name: &str) -> Key {
    Key::new("", name)
}

fn woken_by_pod(change: &Change<Pod>) -> Vec<Key> {
    let mut nodes = by_node(change.object());
    if let Change::Applied { old: Some(old), new } = change {
        // A pod's status changes often; only its end matters.
        if node_name(old) == node_name(new) && is_terminated(old) == is_terminated(new) {
            nodes.clear();
        }
    }
    nodes.iter().map(|node| node_key(node)).collect()
}

/// The name that the driver's attacher and the kubelet know an attachment by.
fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    let digest = Sha256::digest(format!("{handle}{driver}{node}"));
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("csi-{digits}")
}

/// The driver and the handle of a CSI volume.
fn csi(volume: &PersistentVolume) -> Option<(&str, &str)> {
    let source = volume.spec.as_ref()?.csi.as_ref()?;
    Some((&source.driver, &source.volume_handle))
}

fn unique_name(driver: &str, handle: &str) -> String {
    format!("kubernetes.io/csi/{driver}^{handle}")
}

/// Whether several nodes may have the volume at once. With no modes at all that is the driver's to say.
fn is_shared(volume: &PersistentVolume) -> bool {
    let modes = volume.spec.as_ref().and_then(|spec| spec.access_modes.as_deref());
    let modes = modes.unwrap_or_default();
    modes.is_empty()
        || modes
            .iter()
            .any(|mode| matches!(mode.as_str(), "ReadWriteMany" | "ReadOnlyMany"))
}

impl AttachDetach {
    /// The nodes of the pods that use a claim.
    fn users(&self, claim: &Key) -> Vec<Key> {
        let pods = self.pods.by_index(PODS_BY_CLAIM, &claim.to_string());
        let nodes = pods.iter().map(|pod| node_name(pod));
        nodes.filter(|node| !node.is_empty()).map(node_key).collect()
    }

    fn woken_by_volume(&self, change: &Change<PersistentVolume>) -> Vec<Key> {
        let volume = change.object();
        if csi(volume).is_none() {
            return Vec::new();
        }
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        let claim = claim_ref(volume).map(|claim| Key::new(part(&claim.namespace), part(&claim.name)));
        claim.map(|claim| self.users(&claim)).unwrap_or_default()
    }

    fn woken_by_node(&self, change: &Change<Node>) -> Option<Key> {
        let key = Key::of(&**change.object());
        // Statuses are large and come often: nothing of them is copied.
        fn told(node: &Node) -> impl PartialEq + '_ {
            let status = node.status.as_ref();
            (
                status.and_then(|status| status.volumes_in_use.as_ref()),
                status.and_then(|status| status.volumes_attached.as_ref()),
                node.spec.as_ref().and_then(|spec| spec.taints.as_ref()),
                plan::is_ready(node),
                plan::is_managed(node),
            )
        }
        match change {
            Change::Applied { old: Some(old), new } if told(old) == told(new) => None,
            _ => Some(key),
        }
    }

    /// Its own node, and those that wait until it is gone.
    fn woken_by_attachment(&self, change: &Change<VolumeAttachment>) -> Vec<Key> {
        let attachment = change.object();
        let mut keys = vec![node_key(&attachment.spec.node_name)];
        if let Change::Deleted { .. } = change {
            for volume in attachments_by_volume(attachment) {
                if let Some(volume) = self.volumes.get("", &volume)
                    && let Some(claim) = claim_ref(&volume)
                {
                    let part = |part: &Option<String>| part.clone().unwrap_or_default();
                    keys.extend(self.users(&Key::new(part(&claim.namespace), part(&claim.name))));
                }
            }
        }
        keys
    }

    /// The volumes that pods of the node need attached.
    fn wanted(&self, node: &str) -> Vec<Wanted> {
        let mut wanted: BTreeMap<String, Wanted> = BTreeMap::new();
        for pod in self.pods.by_index(BY_NODE, node) {
            if is_terminated(&pod) {
                continue;
            }
            let namespace = pod.namespace().unwrap_or_default();
            for name in claims_of_pod(&pod) {
                let Some(volume) = self.bound_volume(&namespace, &name) else {
                    continue;
                };
                let Some((driver, handle)) = csi(&volume).filter(|(driver, _)| self.needs_attachment(driver))
                else {
                    continue;
                };
                let entry = wanted
                    .entry(unique_name(driver, handle))
                    .or_insert_with_key(|unique| Wanted {
                        unique: unique.clone(),
                        attachment: attachment_name(handle, driver, node),
                        driver: driver.to_owned(),
                        volume: volume.name_any(),
                        shared: is_shared(&volume),
                        pods: Vec::new(),
                    });
                entry.pods.push(reference(&*pod));
            }
        }
        wanted.into_values().collect()
    }

    fn bound_volume(&self, namespace: &str, claim: &str) -> Option<Arc<PersistentVolume>> {
        let claim = self.claims.get(namespace, claim)?;
        let volume = self.volumes.get("", volume_name(&claim))?;
        let holder = claim_ref(&volume)?;
        (claim_phase(&claim) == "Bound" && holder.uid == claim.metadata.uid).then_some(volume)
    }

    /// Drivers say if they need it; one that says nothing does.
    fn needs_attachment(&self, driver: &str) -> bool {
        let driver = self.drivers.get("", driver);
        driver.is_none_or(|driver| driver.spec.attach_required != Some(false))
    }

    /// The attachments to the node that this controller would have made.
    fn present(&self, node: &str) -> Vec<Present> {
        let attachments = self.attachments.by_index(ATTACHMENTS_BY_NODE, node).into_iter();
        attachments
            .filter_map(|attachment| {
                let source = attachment.spec.source.persistent_volume_name.as_deref()?;
                let name = attachment.name_any();
                let Some(volume) = self.volumes.get("", source) else {
                    let ours = name.len() == 68 && name.starts_with("csi-");
                    return ours.then_some(Present {
                        attachment,
                        unique: None,
                    });
                };
                let (driver, handle) = csi(&volume)?;
                (name == attachment_name(handle, driver, node)).then(|| Present {
                    unique: Some(unique_name(driver, handle)),
                    attachment,
                })
            })
            .collect()
    }

    /// Of the wanted volumes those that other nodes have, with the pods that use them there.
    fn elsewhere(
        &self,
        node: &str,
        wanted: &[Wanted],
    ) -> BTreeMap<String, Vec<k8s_openapi::api::core::v1::ObjectReference>> {
        let mut elsewhere = BTreeMap::new();
        for wanted in wanted.iter().filter(|wanted| !wanted.shared) {
            let attachments = self.attachments.by_index(ATTACHMENTS_BY_VOLUME, &wanted.volume);
            let nodes: Vec<&str> = attachments
                .iter()
                .map(|attachment| attachment.spec.node_name.as_str())
                .filter(|other| *other != node)
                .collect();
            if nodes.is_empty() {
                continue;
            }
            let volume = self.volumes.get("", &wanted.volume);
            let claim = volume.as_deref().and_then(claim_ref).map(reference_key);
            let pods = self.pods.by_index(PODS_BY_CLAIM, &claim.unwrap_or_default());
            let users = pods
                .iter()
                .filter(|pod| nodes.contains(&node_name(pod)) && !is_terminated(pod));
            elsewhere.insert(
                wanted.unique.clone(),
                users.map(|pod| reference(&**pod)).collect(),
            );
        }
        elsewhere
    }

    async fn carry_out(&self, node: &str, plan: plan::Plan) -> Result<Action, Error> {
        let client = &self.context.client;
        let attachments: Api<VolumeAttachment> = Api::all(client.clone());
        let nodes: Api<Node> = Api::all(client.clone());
        for attachment in &plan.attach {
            match attachments.create(&PostParams::default(), attachment).await {
                Err(error) if !error.is_already_exists() => return Err(error.into()),
                _ => {}
            }
        }
        if let Some(attached) = &plan.attached {
            let patch = serde_json::json!({"status": {"volumesAttached": attached}});
            nodes
                .patch_status(node, &PatchParams::default(), &Patch::Merge(&patch))
                .await?;
        }
        for note in plan.notes {
            let events = &self.context.events;
            events.event(&note.pod, note.type_, note.reason, note.message);
        }
        for detach in &plan.detach {
            // The node may have begun to use it since.
            if !detach.forced
                && let Some(live) = nodes.get_opt(node).await?
                && let Some(unique) = &detach.unique
                && plan::in_use(&live).contains(unique.as_str())
            {
                continue;
            }
            match attachments
                .delete(&detach.attachment, &DeleteParams::default())
                .await
            {
                Err(error) if !error.is_not_found() => return Err(error.into()),
                _ => {}
            }
        }
        Ok(plan.again.map_or(Action::Done, Action::RequeueAfter))
    }
}

impl Reconcile for AttachDetach {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let node = self.nodes.get("", &key.name);
        if node.as_ref().is_some_and(|node| !plan::is_managed(node)) {
            return Ok(Action::Done);
        }
        let wanted = match node {
            Some(_) => self.wanted(&key.name),
            None => Vec::new(),
        };
        let since = self.unneeded_since.lock().remove(&key.name).unwrap_or_default();
        let mut plan = plan::plan(
            Observed {
                node_name: &key.name,
                node: node.as_deref(),
                elsewhere: self.elsewhere(&key.name, &wanted),
                wanted,
                present: self.present(&key.name),
                unneeded_since: &since,
            },
            Timestamp::now(),
        );
        let since = std::mem::take(&mut plan.unneeded_since);
        if !since.is_empty() {
            self.unneeded_since.lock().insert(key.name.clone(), since);
        }
        self.carry_out(&key.name, plan).await
    }
}
