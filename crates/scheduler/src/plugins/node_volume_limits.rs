//! A node takes only as many volumes of a CSI driver as its CSINode says.

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, PreFilter, Rejection, Scope, Verdict};
use crate::listers::Listers;
use crate::node::NodeInfo;
use crate::plugins::volume_binding::{class_of, uses_claim, volume_name};
use crate::pod::{PodInfo, VolumeUse};
use k8s_openapi::api::storage::v1::CSINode;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

pub(crate) struct NodeVolumeLimits {
    pub(crate) listers: Arc<Listers>,
}

/// Driver and handle of a volume.
type Attached = (String, String);

fn limits(node: &CSINode) -> HashMap<&str, i64> {
    let drivers = node.spec.drivers.iter();
    let limits = drivers.filter_map(|driver| {
        let count = driver.allocatable.as_ref()?.count?;
        Some((driver.name.as_str(), i64::from(count)))
    });
    limits.collect()
}

impl NodeVolumeLimits {
    /// What the pod's claims attach. Of a claim without a volume the provisioner of its class is the driver, and the
    /// claim itself stands for the volume to come.
    fn attached(&self, pod: &PodInfo) -> impl Iterator<Item = Attached> {
        pod.volumes.iter().filter_map(|volume| {
            let VolumeUse::Claim { name, .. } = volume else {
                return None;
            };
            let claim = self.listers.claims.get(&pod.key.namespace, name)?;
            let volume = self.listers.volumes.get("", volume_name(&claim));
            match volume {
                Some(volume) => {
                    let csi = volume.spec.as_ref()?.csi.as_ref()?;
                    Some((csi.driver.clone(), csi.volume_handle.clone()))
                }
                None => {
                    let class = self.listers.classes.get("", class_of(&claim))?;
                    let handle = format!("claim/{}/{name}", pod.key.namespace);
                    Some((class.provisioner.clone(), handle))
                }
            }
        })
    }
}

impl Plugin for NodeVolumeLimits {
    fn name(&self) -> &'static str {
        "NodeVolumeLimits"
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::CsiNodeChanged { old, new } => {
                let before = old.as_ref().map(|old| limits(old)).unwrap_or_default();
                let mut now = limits(new).into_iter();
                now.any(|(driver, limit)| limit > before.get(driver).copied().unwrap_or(0))
            }
            ClusterEvent::PodRemoved(other) => other
                .volumes
                .iter()
                .any(|volume| matches!(volume, VolumeUse::Claim { .. })),
            ClusterEvent::ClaimChanged { old: None, new } => uses_claim(pod, new),
            ClusterEvent::VolumeAttachmentDeleted => true,
            _ => false,
        }
    }

    fn pre_filter(
        &self,
        _state: &mut CycleState,
        pod: &PodInfo,
        _cache: &Cache,
    ) -> Result<PreFilter, Rejection> {
        let claims = pod
            .volumes
            .iter()
            .any(|volume| matches!(volume, VolumeUse::Claim { .. }));
        Ok(if claims {
            PreFilter::AllNodes
        } else {
            PreFilter::Skip
        })
    }

    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let Some(csi_node) = self.listers.csi_nodes.get("", &node.name) else {
            return Ok(());
        };
        let limits = limits(&csi_node);
        if limits.is_empty() {
            return Ok(());
        }
        let mut wanted: HashSet<Attached> = self.attached(pod).collect();
        wanted.retain(|(driver, _)| limits.contains_key(driver.as_str()));
        if wanted.is_empty() {
            return Ok(());
        }
        let mut there: HashSet<Attached> = HashSet::new();
        for other in node.pods.iter().filter(|other| !other.volumes.is_empty()) {
            there.extend(self.attached(other));
        }
        there.extend(self.listers.attachments.find(|(_, attachment)| {
            if *attachment.spec.node_name != *node.name {
                return None;
            }
            let volume = attachment.spec.source.persistent_volume_name.as_deref()?;
            let volume = self.listers.volumes.get("", volume)?;
            let handle = volume.spec.as_ref()?.csi.as_ref()?.volume_handle.clone();
            Some((attachment.spec.attacher.clone(), handle))
        }));
        wanted.retain(|one| !there.contains(one));
        for (driver, limit) in limits {
            let count = |set: &HashSet<Attached>| set.iter().filter(|(one, _)| one == driver).count();
            let new = count(&wanted);
            let total = i64::try_from(new + count(&there)).unwrap_or(i64::MAX);
            if new > 0 && total > limit {
                return Err(Rejection::unschedulable("node(s) exceed max volume count"));
            }
        }
        Ok(())
    }

    fn scope(&self, pod: &PodInfo) -> Scope {
        if pod.volumes.is_empty() {
            Scope::None
        } else {
            Scope::PerPod
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{plain_node, pod};
    use serde_json::json;
    use skiff_client::Key;

    #[test]
    fn volumes_are_counted_once_each() {
        let listers = Arc::new(Listers::default());
        for (claim, handle) in [("a", "1"), ("b", "2"), ("c", "1")] {
            let object =
                json!({"metadata": {"name": claim, "namespace": "default"}, "spec": {"volumeName": claim}});
            let object = Arc::new(serde_json::from_value(object).unwrap());
            listers.claims.set(Key::new("default", claim), object);
            let volume = json!({"metadata": {"name": claim}, "spec": {"csi": {"driver": "d", "volumeHandle": handle}}});
            let volume = Arc::new(serde_json::from_value(volume).unwrap());
            listers.volumes.set(Key::new("", claim), volume);
        }
        let limit = |count: i32| -> Arc<CSINode> {
            let driver = json!({"name": "d", "nodeID": "n", "allocatable": {"count": count}});
            Arc::new(
                serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": {"drivers": [driver]}}))
                    .unwrap(),
            )
        };
        listers.csi_nodes.set(Key::new("", "n"), limit(1));
        let plugin = NodeVolumeLimits {
            listers: Arc::clone(&listers),
        };
        let with = |name: &str| {
            let volume = json!({"name": "v", "persistentVolumeClaim": {"claimName": name}});
            pod(name, json!({"volumes": [volume]}))
        };
        let mut node = plain_node("n");
        node.add_pod(with("a"));
        let fits = |name: &str| plugin.filter(&CycleState::default(), &with(name), &node).is_ok();
        assert!(!fits("b"));
        assert!(fits("c"), "the same volume");
        listers.csi_nodes.set(Key::new("", "n"), limit(2));
        assert!(fits("b"));
        let grown = |old, new| ClusterEvent::CsiNodeChanged {
            old: Some(limit(old)),
            new: limit(new),
        };
        assert!(plugin.hint(&with("b"), &grown(1, 2)) && !plugin.hint(&with("b"), &grown(2, 1)));
    }
}
