//! Volumes that say their zone or region in a label keep the pod there.

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, PreFilter, Rejection, Scope, Verdict};
use crate::listers::Listers;
use crate::node::NodeInfo;
use crate::plugins::volume_binding::{class_of, uses_claim, volume_name, waits_for_consumer};
use crate::pod::{PodInfo, VolumeUse};
use k8s_openapi::api::core::v1::PersistentVolume;
use std::sync::Arc;

const NAME: &str = "VolumeZone";
const LABELS: [&str; 4] = [
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
];

pub(crate) struct VolumeZone {
    pub(crate) listers: Arc<Listers>,
}

/// Label and the values that a node may have for it.
type Topologies = Vec<(&'static str, Vec<String>)>;

fn topologies(volume: &PersistentVolume) -> Topologies {
    let labels = volume.metadata.labels.as_ref();
    let found = LABELS.into_iter().filter_map(|key| {
        let value = labels?.get(key)?;
        let zones: Vec<String> = value.split("__").map(|zone| zone.trim().to_owned()).collect();
        zones.iter().all(|zone| !zone.is_empty()).then_some((key, zones))
    });
    found.collect()
}

/// The label that has taken an old one's place.
fn stable(key: &str) -> &str {
    match key {
        "failure-domain.beta.kubernetes.io/zone" => LABELS[2],
        "failure-domain.beta.kubernetes.io/region" => LABELS[3],
        key => key,
    }
}

impl Plugin for VolumeZone {
    fn name(&self) -> &'static str {
        NAME
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(_) => true,
            ClusterEvent::NodeUpdated { old, new } => old.labels() != new.labels(),
            ClusterEvent::ClaimChanged { new, .. } => uses_claim(pod, new),
            ClusterEvent::ClassChanged { old: None, new } => waits_for_consumer(new),
            ClusterEvent::VolumeChanged { old, new } => {
                old.as_ref().is_none_or(|old| topologies(old) != topologies(new))
            }
            _ => false,
        }
    }

    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        _cache: &Cache,
    ) -> Result<PreFilter, Rejection> {
        let mut wanted: Topologies = Vec::new();
        for volume in &pod.volumes {
            let VolumeUse::Claim {
                name,
                generated: false,
            } = volume
            else {
                continue;
            };
            let Some(claim) = self.listers.claims.get(&pod.key.namespace, name) else {
                return Err(Rejection::unresolvable(format!(
                    "persistentvolumeclaim {name:?} not found"
                )));
            };
            let volume = volume_name(&claim);
            if volume.is_empty() {
                let class = class_of(&claim);
                if class.is_empty() {
                    return Err(Rejection::unresolvable(
                        "PersistentVolumeClaim had no pv name and storageClass name",
                    ));
                }
                let Some(known) = self.listers.classes.get("", class) else {
                    return Err(Rejection::unresolvable(format!(
                        "storageclass.storage.k8s.io {class:?} not found"
                    )));
                };
                if waits_for_consumer(&known) {
                    continue;
                }
                return Err(Rejection::unresolvable("PersistentVolume had no name"));
            }
            let Some(volume) = self.listers.volumes.get("", volume) else {
                return Err(Rejection::unresolvable(format!(
                    "persistentvolume {volume:?} not found"
                )));
            };
            wanted.extend(topologies(&volume));
        }
        if wanted.is_empty() {
            return Ok(PreFilter::Skip);
        }
        state.write(NAME, wanted);
        Ok(PreFilter::AllNodes)
    }

    fn filter(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> Verdict {
        // COMPAT: a node that says nothing of its zone is taken for one in every zone.
        if LABELS.iter().all(|key| node.label(key).is_none()) {
            return Ok(());
        }
        for (key, values) in state.read::<Topologies>(NAME).into_iter().flatten() {
            let value = node.label(key).or_else(|| node.label(stable(key)));
            if !value.is_some_and(|value| values.iter().any(|one| one == value)) {
                return Err(Rejection::unresolvable("node(s) had no available volume zone"));
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
    use crate::fixtures::{node, pod};
    use serde_json::json;

    #[test]
    fn the_node_is_in_a_zone_of_the_volume() {
        let listers = Arc::new(Listers::default());
        let claim = json!({"metadata": {"name": "c", "namespace": "default"}, "spec": {"volumeName": "v"}});
        let volume =
            json!({"metadata": {"name": "v", "labels": {"failure-domain.beta.kubernetes.io/zone": "a__b"}}});
        listers.claims.set(
            skiff_client::Key::new("default", "c"),
            Arc::new(serde_json::from_value(claim).unwrap()),
        );
        let plugin = VolumeZone { listers };
        let pod = pod(
            "p",
            json!({"volumes": [{"name": "x", "persistentVolumeClaim": {"claimName": "c"}}]}),
        );
        let mut state = CycleState::default();
        let missing = plugin
            .pre_filter(&mut state, &pod, &Cache::default())
            .unwrap_err();
        assert_eq!(missing.message(), "persistentvolume \"v\" not found");
        plugin.listers.volumes.set(
            skiff_client::Key::new("", "v"),
            Arc::new(serde_json::from_value(volume).unwrap()),
        );
        assert_eq!(
            plugin.pre_filter(&mut state, &pod, &Cache::default()),
            Ok(PreFilter::AllNodes)
        );
        let check = |zone: Option<&str>, expected: bool| {
            let labels = zone.map_or(json!({}), |zone| json!({"topology.kubernetes.io/zone": zone}));
            let node = node("n", json!({}), labels, json!({}));
            assert_eq!(plugin.filter(&state, &pod, &node).is_ok(), expected, "{zone:?}");
        };
        check(Some("b"), true);
        check(Some("c"), false);
        check(None, true);
    }
}
