//! The node object: registration, status and conditions. Written when something changes, and every five
//! minutes to show that somebody still writes; the lease is the heartbeat.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeFeatures,
    NodeRuntimeHandler, NodeRuntimeHandlerFeatures, NodeSpec, NodeStatus, ObjectReference,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use skiff_client::ErrorExt;
use skiff_cri::v1;

use crate::kubelet::Kubelet;
use crate::machine;
use crate::node_shutdown;
use crate::objects::error_message;
use crate::pressure::Condition;
use crate::runtime_health::joined;
use crate::status::whole_seconds;

const IMAGE_PERIOD: Duration = Duration::from_secs(30);
const IMAGE_PATIENCE: Duration = Duration::from_secs(2);
const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(7);
/// What the API server asks for before it lets a pod use it.
const DECLARED_FEATURES: [&str; 3] = [
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    "RestartAllContainersOnContainerExits",
];
const MAX_IMAGES: usize = 50;
const MAX_NAMES_PER_IMAGE: usize = 5;

/// Upstream refers to the node by its name even in the uid, so that events of one boot find each other.
pub fn node_reference(name: &str) -> ObjectReference {
    ObjectReference {
        kind: Some("Node".to_owned()),
        name: Some(name.to_owned()),
        uid: Some(name.to_owned()),
        ..Default::default()
    }
}

/// Conditions in upstream's order; Ready is the last.
pub fn conditions(
    not_ready: Option<&str>,
    pressure: &[Condition],
    previous: &[NodeCondition],
    now: Timestamp,
) -> Vec<NodeCondition> {
    let (ready, reason, message) = match not_ready {
        None => ("True", "KubeletReady", "kubelet is posting ready status"),
        Some(why) => ("False", "KubeletNotReady", why),
    };
    let of = |condition: Condition| {
        let pressed = pressure.contains(&condition);
        let (reason, message) = match (condition, pressed) {
            (Condition::Memory, false) => (
                "KubeletHasSufficientMemory",
                "kubelet has sufficient memory available",
            ),
            (Condition::Memory, true) => (
                "KubeletHasInsufficientMemory",
                "kubelet has insufficient memory available",
            ),
            (Condition::Disk, false) => ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
            (Condition::Disk, true) => ("KubeletHasDiskPressure", "kubelet has disk pressure"),
            (Condition::Pid, false) => ("KubeletHasSufficientPID", "kubelet has sufficient PID available"),
            (Condition::Pid, true) => (
                "KubeletHasInsufficientPID",
                "kubelet has insufficient PID available",
            ),
        };
        let status = if pressed { "True" } else { "False" };
        (condition.name(), status, reason, message)
    };
    [
        of(Condition::Memory),
        of(Condition::Disk),
        of(Condition::Pid),
        ("Ready", ready, reason, message),
    ]
    .into_iter()
    .map(|(type_, status, reason, message)| {
        let before = previous.iter().find(|c| c.type_ == type_ && c.status == status);
        NodeCondition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            last_heartbeat_time: Some(whole_seconds(now)),
            last_transition_time: before
                .and_then(|c| c.last_transition_time.clone())
                .or_else(|| Some(whole_seconds(now))),
        }
    })
    .collect()
}

/// The largest images first, as the scheduler wants to know what is costly to fetch.
fn image_list(images: Vec<v1::Image>) -> Vec<ContainerImage> {
    let mut images = images;
    images.sort_by(|a, b| b.size.cmp(&a.size).then_with(|| a.id.cmp(&b.id)));
    images.truncate(MAX_IMAGES);
    images
        .into_iter()
        .map(|image| {
            let names: Vec<String> = image
                .repo_digests
                .into_iter()
                .chain(image.repo_tags)
                .take(MAX_NAMES_PER_IMAGE)
                .collect();
            ContainerImage {
                names: Some(names),
                size_bytes: i64::try_from(image.size).ok(),
            }
        })
        .collect()
}

/// The same but for heartbeats.
fn same(a: &NodeStatus, b: &NodeStatus) -> bool {
    let still = |status: &NodeStatus| {
        let mut status = status.clone();
        for condition in status.conditions.iter_mut().flatten() {
            condition.last_heartbeat_time = None;
        }
        status
    };
    still(a) == still(b)
}

/// When the node last said whether it is ready.
fn heard_at(status: &NodeStatus) -> Option<Time> {
    let mut conditions = status.conditions.iter().flatten();
    conditions
        .find(|one| one.type_ == "Ready")?
        .last_heartbeat_time
        .clone()
}

/// What somebody else made of our conditions since our last write becomes what is reported, so that it is corrected: the
/// controllers mark the node of a kubelet that was not heard as Unknown.
fn take_over_conditions(reported: &mut NodeStatus, written: &Node, seen: &Node) {
    let version = |node: &Node| -> Option<u64> { node.metadata.resource_version.as_ref()?.parse().ok() };
    if version(seen) <= version(written) {
        return;
    }
    let seen = seen.status.as_ref().and_then(|status| status.conditions.as_ref());
    for ours in reported.conditions.iter_mut().flatten() {
        let theirs = seen.and_then(|seen| seen.iter().find(|one| one.type_ == ours.type_));
        if let Some(theirs) = theirs.filter(|theirs| theirs.status != ours.status) {
            ours.clone_from(theirs);
        }
    }
}

impl Kubelet {
    pub async fn run_node_status(self: Arc<Self>) {
        let began = whole_seconds(Timestamp::now());
        let api: Api<Node> = Api::all(self.client.clone());
        // They come with the first report, unless the runtime is slow.
        let mut images = self.node_images.subscribe();
        let _ = tokio::time::timeout(IMAGE_PATIENCE, images.wait_for(Option::is_some)).await;
        let mut last = self.node_status(None);
        let Some(mut known) = self.register(&api, &last).await else {
            return;
        };
        // The object that was there before may say something else; then it is corrected below.
        let mut reported = known.status.clone().unwrap_or_default();
        let mut reported_at = Instant::now();
        // What an earlier process left is said again: who waits for this one sees that it is there.
        let mut is_old = heard_at(&reported) < Some(began);
        let mut retry = FIRST_RETRY;
        let mut troubles = self.troubles.subscribe();
        let mut pressure = self.pressure.subscribe();
        let mut node_shutdown = self.node_shutdown.subscribe();
        let mut in_use_changes = self.csi.in_use_changes();
        loop {
            if let Some(node) = self.node.list().first() {
                take_over_conditions(&mut reported, &known, node);
            }
            let previous = reported.conditions.clone().unwrap_or_default();
            last = self.node_status(Some(&previous));
            last.volumes_attached = reported.volumes_attached.clone();
            let in_use = self.csi.volumes_in_use();
            last.volumes_in_use = (!in_use.is_empty()).then_some(in_use);
            let due = is_old || reported_at.elapsed() >= self.config.node_status_report_frequency;
            if due || !same(&last, &reported) {
                match self.patch_status(&api, &last).await {
                    Ok(node) => {
                        self.tell_changes(&previous, &last);
                        known = node;
                        reported = known.status.clone().unwrap_or_default();
                        // What the API adds or leaves out must not look like a change of ours.
                        reported = NodeStatus {
                            conditions: last.conditions.clone(),
                            ..merge_own(reported, &last)
                        };
                        reported_at = Instant::now();
                        is_old = false;
                        retry = FIRST_RETRY;
                    }
                    Err(error) if error.is_not_found() => match self.register(&api, &last).await {
                        Some(node) => {
                            reported = node.status.clone().unwrap_or_default();
                            continue;
                        }
                        None => return,
                    },
                    Err(error) => {
                        tracing::warn!(
                            error = error_message(&error),
                            "cannot write the node's status; trying again"
                        );
                        if !self.pause(retry).await {
                            return;
                        }
                        retry = (retry * 2).min(LAST_RETRY);
                        continue;
                    }
                }
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                _ = troubles.changed() => {}
                _ = pressure.changed() => {}
                _ = node_shutdown.changed() => {}
                () = self.device_plugins.changed.notified() => {}
                _ = in_use_changes.changed() => {}
                () = tokio::time::sleep(self.config.node_status_update_frequency) => {}
            }
        }
    }

    /// Lists the images of the runtime. The status does not wait for a runtime that hangs.
    pub async fn run_node_images(self: Arc<Self>) {
        loop {
            let listed = self.runtime.images().await;
            self.node_images.send_modify(|images| match listed {
                Ok(list) => *images = Some(image_list(list)),
                Err(_) => {
                    images.get_or_insert_default();
                }
            });
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = tokio::time::sleep(IMAGE_PERIOD) => {}
            }
        }
    }

    fn tell_changes(&self, before: &[NodeCondition], after: &NodeStatus) {
        let holds = |conditions: &[NodeCondition], type_: &str| {
            conditions
                .iter()
                .find(|c| c.type_ == type_)
                .map(|c| c.status == "True")
        };
        let words = [
            ("Ready", "NodeReady", "NodeNotReady"),
            (
                "MemoryPressure",
                "NodeHasInsufficientMemory",
                "NodeHasSufficientMemory",
            ),
            ("DiskPressure", "NodeHasDiskPressure", "NodeHasNoDiskPressure"),
            ("PIDPressure", "NodeHasInsufficientPID", "NodeHasSufficientPID"),
        ];
        for (type_, holding, not_holding) in words {
            let now = holds(after.conditions.as_deref().unwrap_or_default(), type_);
            if holds(before, type_) == now {
                continue;
            }
            let word = if now == Some(true) { holding } else { not_holding };
            let name = &self.config.node_name;
            self.recorder.event(
                &node_reference(name),
                "Normal",
                word,
                format!("Node {name} status is now: {word}"),
            );
        }
    }

    async fn pause(&self, time: Duration) -> bool {
        tokio::select! {
            () = self.shutdown.cancelled() => false,
            () = tokio::time::sleep(time) => true,
        }
    }

    fn node_status(&self, previous: Option<&[NodeCondition]>) -> NodeStatus {
        let config = &self.config;
        let images = self.node_images.borrow().clone().unwrap_or_default();
        let mut missing = self.trouble_messages();
        if *self.node_shutdown.borrow() {
            missing.push(node_shutdown::NOT_READY.to_owned());
        }
        let not_ready = joined(missing);
        let mut addresses: Vec<NodeAddress> = config
            .host_ips()
            .into_iter()
            .map(|address| NodeAddress {
                type_: "InternalIP".to_owned(),
                address,
            })
            .collect();
        addresses.push(NodeAddress {
            type_: "Hostname".to_owned(),
            address: config.node_name.clone(),
        });
        let (handlers, features) = self.runtime_features();
        let mut capacity = self.machine.capacity(config.max_pods);
        capacity.extend(self.device_plugins.capacity().0);
        NodeStatus {
            capacity: Some(capacity),
            allocatable: Some(self.allocatable()),
            conditions: Some(conditions(
                not_ready.as_deref(),
                &self.pressure.borrow(),
                previous.unwrap_or_default(),
                Timestamp::now(),
            )),
            addresses: Some(addresses),
            daemon_endpoints: Some(NodeDaemonEndpoints {
                kubelet_endpoint: Some(DaemonEndpoint {
                    port: i32::from(self.server_port),
                }),
            }),
            node_info: Some(machine::system_info(
                self.runtime_version.clone(),
                &config.kubelet_version,
                self.machine.swap,
            )),
            images: (!images.is_empty()).then_some(images),
            runtime_handlers: (!handlers.is_empty()).then_some(handlers),
            features,
            declared_features: Some(DECLARED_FEATURES.map(str::to_owned).to_vec()),
            ..Default::default()
        }
    }

    fn runtime_features(&self) -> (Vec<NodeRuntimeHandler>, Option<NodeFeatures>) {
        let Some(status) = self.runtime_status.lock().clone() else {
            return (Vec::new(), None);
        };
        let handlers = status
            .runtime_handlers
            .into_iter()
            .map(|handler| NodeRuntimeHandler {
                name: Some(handler.name),
                features: handler.features.map(|f| NodeRuntimeHandlerFeatures {
                    recursive_read_only_mounts: Some(f.recursive_read_only_mounts),
                    user_namespaces: Some(f.user_namespaces),
                }),
            })
            .collect();
        let features = status.features.map(|f| NodeFeatures {
            supplemental_groups_policy: Some(f.supplemental_groups_policy),
        });
        (handlers, features)
    }

    fn labels(&self) -> BTreeMap<String, String> {
        let architecture = machine::architecture();
        let mut labels: BTreeMap<String, String> = [
            ("beta.kubernetes.io/arch", architecture),
            ("beta.kubernetes.io/os", "linux"),
            ("kubernetes.io/arch", architecture),
            ("kubernetes.io/hostname", &self.config.node_name),
            ("kubernetes.io/os", "linux"),
        ]
        .into_iter()
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .collect();
        labels.extend(self.config.node_labels.iter().cloned());
        labels
    }

    /// Creates the node object or takes over the one that is there. `None` only at shutdown.
    async fn register(&self, api: &Api<Node>, status: &NodeStatus) -> Option<Node> {
        let taints = self.config.register_taints.clone();
        let node = Node {
            metadata: ObjectMeta {
                name: Some(self.config.node_name.clone()),
                labels: Some(self.labels()),
                annotations: Some(BTreeMap::from([(
                    "volumes.kubernetes.io/controller-managed-attach-detach".to_owned(),
                    "true".to_owned(),
                )])),
                ..Default::default()
            },
            spec: Some(NodeSpec {
                taints: (!taints.is_empty()).then_some(taints),
                pod_cidr: self.config.pod_cidrs.first().cloned(),
                pod_cidrs: (!self.config.pod_cidrs.is_empty()).then(|| self.config.pod_cidrs.clone()),
                provider_id: Some(self.config.provider_id.clone()).filter(|id| !id.is_empty()),
                ..Default::default()
            }),
            status: Some(status.clone()),
        };
        let mut retry = FIRST_RETRY;
        loop {
            let result = match api.create(&PostParams::default(), &node).await {
                Err(error) if error.is_already_exists() => {
                    // Labels this kubelet owns are brought up to date; the rest belongs to others.
                    let patch = json!({"metadata": {"labels": self.labels()}});
                    api.patch(
                        &self.config.node_name,
                        &PatchParams::default(),
                        &Patch::Strategic(patch),
                    )
                    .await
                }
                other => other,
            };
            match result {
                Ok(node) => return Some(node),
                Err(error) => {
                    tracing::warn!(
                        error = error_message(&error),
                        "cannot register the node; trying again"
                    );
                    if !self.pause(retry).await {
                        return None;
                    }
                    retry = (retry * 2).min(LAST_RETRY);
                }
            }
        }
    }

    async fn patch_status(&self, api: &Api<Node>, status: &NodeStatus) -> Result<Node, kube::Error> {
        let mut body = serde_json::to_value(status).map_err(kube::Error::SerdeError)?;
        // Attachments are the controller's to say. What is in use is a list without keys, which is replaced; none is null.
        if let Some(body) = body.as_object_mut() {
            body.remove("volumesAttached");
            body.entry("volumesInUse").or_insert(serde_json::Value::Null);
        }
        // Addresses merge by type, which would keep one of each kind only, and old ones for ever.
        if let Some(addresses) = body
            .get_mut("addresses")
            .and_then(serde_json::Value::as_array_mut)
        {
            addresses.push(json!({"$patch": "replace"}));
        }
        api.patch_status(
            &self.config.node_name,
            &PatchParams::default(),
            &Patch::Strategic(json!({"status": body})),
        )
        .await
    }
}

/// What the node itself says, over what the API has for the fields of others.
fn merge_own(theirs: NodeStatus, own: &NodeStatus) -> NodeStatus {
    NodeStatus {
        volumes_attached: theirs.volumes_attached,
        ..own.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_keep_their_transition_times() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let first = conditions(Some("container runtime network not ready"), &[], &[], at(100));
        let ready = first.last().unwrap();
        assert_eq!(
            (
                ready.type_.as_str(),
                ready.status.as_str(),
                ready.reason.as_deref()
            ),
            ("Ready", "False", Some("KubeletNotReady"))
        );
        let second = conditions(None, &[Condition::Pid], &first, at(200));
        let transition = |list: &[NodeCondition], type_: &str| {
            list.iter()
                .find(|c| c.type_ == type_)
                .unwrap()
                .last_transition_time
                .as_ref()
                .unwrap()
                .0
                .as_second()
        };
        assert_eq!(transition(&second, "Ready"), 200);
        assert_eq!(transition(&second, "PIDPressure"), 200);
        assert_eq!(transition(&second, "DiskPressure"), 100);
        assert_eq!(
            second.last().unwrap().message.as_deref(),
            Some("kubelet is posting ready status")
        );
    }

    #[test]
    fn a_node_that_was_given_up_reports_again() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let written = conditions(None, &[], &[], at(100));
        let node = |version: &str, conditions: &[NodeCondition]| {
            let mut node = Node::default();
            node.metadata.resource_version = Some(version.to_owned());
            node.status.get_or_insert_default().conditions = Some(conditions.to_vec());
            node
        };
        let mut given_up = written.clone();
        for condition in &mut given_up {
            condition.status = "Unknown".to_owned();
        }
        let check = |seen: &Node, expected: &[NodeCondition]| {
            let mut reported = node("9", &written).status.unwrap();
            take_over_conditions(&mut reported, &node("9", &written), seen);
            assert_eq!(reported.conditions.unwrap(), expected);
        };
        check(&node("10", &given_up), &given_up);
        // Older than our own write.
        check(&node("8", &given_up), &written);
        check(&node("9", &given_up), &written);
        // Conditions of others are theirs.
        let mut more = written.clone();
        more.push(NodeCondition {
            type_: "NetworkUnavailable".to_owned(),
            status: "False".to_owned(),
            ..Default::default()
        });
        check(&node("11", &more), &written);
    }

    #[test]
    fn images_are_bounded() {
        let images = (0..60)
            .map(|n| v1::Image {
                id: n.to_string(),
                size: n,
                repo_tags: vec![format!("i:{n}")],
                ..Default::default()
            })
            .collect();
        let list = image_list(images);
        assert_eq!((list.len(), list[0].size_bytes), (50, Some(59)));
    }
}
