//! Which volumes are to be attached to a node, which to be detached, and what is said about it. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{AttachedVolume, Node, ObjectReference};
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttachmentSource, VolumeAttachmentSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;

use crate::seconds_until;

/// How long a node that is not healthy may keep a volume that no pod of it needs any more.
const MAX_WAIT_FOR_UNMOUNT: Duration = Duration::from_secs(360);
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
const MANAGED: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// A volume that pods of the node need.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    /// `kubernetes.io/csi/<driver>^<handle>`.
    pub(super) unique: String,
    /// The name of its VolumeAttachment.
    pub(super) attachment: String,
    pub(super) driver: String,
    /// The PersistentVolume.
    pub(super) volume: String,
    /// Its access modes allow several nodes.
    pub(super) shared: bool,
    pub(super) pods: Vec<ObjectReference>,
}

/// An attachment to this node that the controller made, now or before a restart.
#[derive(Clone, Debug)]
pub(super) struct Present {
    pub(super) attachment: Arc<VolumeAttachment>,
    /// Not known if the PersistentVolume is gone.
    pub(super) unique: Option<String>,
}

pub(super) struct Observed<'a> {
    pub(super) node_name: &'a str,
    pub(super) node: Option<&'a Node>,
    pub(super) wanted: Vec<Wanted>,
    pub(super) present: Vec<Present>,
    /// Volumes that are attached to other nodes, with the pods that use them there.
    pub(super) elsewhere: BTreeMap<String, Vec<ObjectReference>>,
    /// Since when attachments are not needed, by their names.
    pub(super) unneeded_since: &'a BTreeMap<String, Timestamp>,
}

#[derive(Debug, PartialEq)]
pub(super) struct Detach {
    pub(super) attachment: String,
    pub(super) unique: Option<String>,
    /// Whether the node itself says that it uses the volume does not matter.
    pub(super) forced: bool,
}

/// An event of a pod.
#[derive(Debug, PartialEq)]
pub(super) struct Note {
    pub(super) pod: ObjectReference,
    pub(super) type_: &'static str,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    pub(super) attach: Vec<VolumeAttachment>,
    /// What the node is to be told first; then what is detached.
    pub(super) attached: Option<Vec<AttachedVolume>>,
    pub(super) detach: Vec<Detach>,
    pub(super) notes: Vec<Note>,
    pub(super) unneeded_since: BTreeMap<String, Timestamp>,
    pub(super) again: Option<Duration>,
}

/// Whether attaching to this node is the controller's work, not the kubelet's.
pub(super) fn is_managed(node: &Node) -> bool {
    node.annotations().get(MANAGED).map(String::as_str) == Some("true")
}

pub(super) fn in_use(node: &Node) -> BTreeSet<&str> {
    let status = node.status.as_ref();
    let volumes = status.and_then(|status| status.volumes_in_use.as_ref());
    volumes.into_iter().flatten().map(String::as_str).collect()
}

pub(super) fn is_ready(node: &Node) -> bool {
    let status = node.status.as_ref();
    let mut conditions = status.and_then(|s| s.conditions.as_ref()).into_iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn is_out_of_service(node: &Node) -> bool {
    let mut taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    taints.any(|taint| taint.key == OUT_OF_SERVICE)
}

fn is_attached(attachment: &VolumeAttachment) -> bool {
    attachment.status.as_ref().is_some_and(|status| status.attached)
}

pub(super) fn plan(observed: Observed<'_>, now: Timestamp) -> Plan {
    let mut plan = Plan::default();
    let mut reported = BTreeSet::new();
    let before = observed.node.and_then(|node| node.status.as_ref());
    let before: Vec<AttachedVolume> = before
        .and_then(|status| status.volumes_attached.clone())
        .unwrap_or_default();
    for wanted in &observed.wanted {
        let present = observed
            .present
            .iter()
            .find(|present| present.attachment.name_any() == wanted.attachment);
        match present {
            None => attach(wanted, &observed, &mut plan),
            // It is on its way out and is made anew when it is gone.
            Some(present) if present.attachment.metadata.deletion_timestamp.is_some() => {}
            Some(present) if is_attached(&present.attachment) => {
                if !before.iter().any(|volume| volume.name == wanted.unique) {
                    let message = format!("AttachVolume.Attach succeeded for volume {:?} ", wanted.volume);
                    plan.note(wanted, "Normal", "SuccessfulAttachVolume", &message);
                }
                reported.insert(wanted.unique.clone());
            }
            Some(present) => {
                let status = present.attachment.status.as_ref();
                let error = status.and_then(|status| status.attach_error.as_ref());
                if let Some(error) = error.and_then(|error| error.message.as_ref()) {
                    let message = format!(
                        "AttachVolume.Attach failed for volume {:?} : {error}",
                        wanted.volume
                    );
                    plan.note(wanted, "Warning", "FailedAttachVolume", &message);
                }
            }
        }
    }
    for present in &observed.present {
        let name = present.attachment.name_any();
        let needed = observed.wanted.iter().any(|wanted| wanted.attachment == name);
        if needed || present.attachment.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let since = *observed.unneeded_since.get(&name).unwrap_or(&now);
        match detach(present, observed.node, since, now) {
            Ok(forced) => plan.detach.push(Detach {
                attachment: name,
                unique: present.unique.clone(),
                forced,
            }),
            Err(again) => {
                plan.unneeded_since.insert(name, since);
                plan.again = plan.again.into_iter().chain(again).min();
                if is_attached(&present.attachment) {
                    reported.extend(present.unique.clone());
                }
            }
        }
    }
    let names: BTreeSet<String> = before.iter().map(|volume| volume.name.clone()).collect();
    if observed.node.is_some() && names != reported {
        let attached = reported.into_iter().map(|name| AttachedVolume {
            name,
            device_path: String::new(),
        });
        plan.attached = Some(attached.collect());
    }
    plan
}

impl Plan {
    fn note(&mut self, wanted: &Wanted, type_: &'static str, reason: &'static str, message: &str) {
        self.notes.extend(wanted.pods.iter().map(|pod| Note {
            pod: pod.clone(),
            type_,
            reason,
            message: message.to_owned(),
        }));
    }
}

fn attach(wanted: &Wanted, observed: &Observed<'_>, plan: &mut Plan) {
    match observed.elsewhere.get(&wanted.unique).filter(|_| !wanted.shared) {
        None => plan.attach.push(VolumeAttachment {
            metadata: ObjectMeta {
                name: Some(wanted.attachment.clone()),
                ..Default::default()
            },
            spec: VolumeAttachmentSpec {
                attacher: wanted.driver.clone(),
                node_name: observed.node_name.to_owned(),
                source: VolumeAttachmentSource {
                    persistent_volume_name: Some(wanted.volume.clone()),
                    ..Default::default()
                },
            },
            status: None,
        }),
        Some(users) => {
            for pod in &wanted.pods {
                plan.notes.push(Note {
                    pod: pod.clone(),
                    type_: "Warning",
                    reason: "FailedAttachVolume",
                    message: multi_attach(&wanted.volume, pod, users),
                });
            }
        }
    }
}

/// Only pods of the reader's own namespace are named.
fn multi_attach(volume: &str, pod: &ObjectReference, users: &[ObjectReference]) -> String {
    if users.is_empty() {
        return format!(
            "Waiting for detach for volume {volume:?} Volume is already exclusively attached to one node, waiting on detach before it can be attached to another node"
        );
    }
    let (near, far): (Vec<_>, Vec<_>) = users.iter().partition(|user| user.namespace == pod.namespace);
    let names: Vec<&str> = near.iter().filter_map(|user| user.name.as_deref()).collect();
    let why = match (names.as_slice(), far.len()) {
        ([], far) => format!("Volume is already used by {far} pod(s) in different namespaces"),
        (near, 0) => format!("Volume is already used by pod(s) {}", near.join(", ")),
        (near, far) => format!(
            "Volume is already used by pod(s) {} and {far} pod(s) in different namespaces",
            near.join(", ")
        ),
    };
    format!("Multi-Attach error for volume {volume:?} {why}")
}

/// Whether to detach now and if that is by force; else when to look again, if no change of the node will say so.
fn detach(
    present: &Present,
    node: Option<&Node>,
    since: Timestamp,
    now: Timestamp,
) -> Result<bool, Option<Duration>> {
    let Some(node) = node else { return Ok(true) };
    if is_out_of_service(node) {
        return Ok(true);
    }
    let used = present
        .unique
        .as_ref()
        .is_some_and(|unique| in_use(node).contains(unique.as_str()));
    if !used {
        return Ok(false);
    }
    if is_ready(node) {
        return Err(None);
    }
    let left = seconds_until(since + MAX_WAIT_FOR_UNMOUNT, now);
    if left.is_zero() { Ok(true) } else { Err(Some(left)) }
}
