//! Volumes that only one pod, or only readers, may have: disks named in the pod, and claims of the access mode
//! ReadWriteOncePod.

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, PreFilter, Rejection, Scope, Verdict};
use crate::listers::Listers;
use crate::node::NodeInfo;
use crate::plugins::volume_binding::uses_claim;
use crate::pod::{DiskKind, PodInfo, VolumeUse};
use std::sync::Arc;

const NAME: &str = "VolumeRestrictions";

pub(crate) struct VolumeRestrictions {
    pub(crate) listers: Arc<Listers>,
}

/// The pod's ReadWriteOncePod claims, and how many pods use one of them.
#[derive(Clone)]
struct Exclusive {
    claims: Vec<String>,
    users: i64,
}

fn conflict(a: &VolumeUse, b: &VolumeUse) -> bool {
    let (
        VolumeUse::Disk { kind, ids, read_only },
        VolumeUse::Disk {
            kind: other_kind,
            ids: other_ids,
            read_only: other_reads,
        },
    ) = (a, b)
    else {
        return false;
    };
    let same = match kind {
        // Pool and image, then monitors, of which one in common is enough.
        DiskKind::Rbd => {
            ids[..2] == other_ids[..2.min(other_ids.len())]
                && ids[2..].iter().any(|one| other_ids[2..].contains(one))
        }
        _ => ids == other_ids,
    };
    kind == other_kind && same && !(*read_only && *other_reads)
}

fn conflicts(pod: &PodInfo, other: &PodInfo) -> bool {
    pod.volumes
        .iter()
        .any(|volume| other.volumes.iter().any(|one| conflict(volume, one)))
}

fn claim_names(pod: &PodInfo) -> impl Iterator<Item = &str> {
    pod.volumes.iter().filter_map(|volume| match volume {
        VolumeUse::Claim {
            name,
            generated: false,
        } => Some(name.as_str()),
        _ => None,
    })
}

fn users_of(exclusive: &Exclusive, pod: &PodInfo) -> i64 {
    let used = claim_names(pod).filter(|name| exclusive.claims.iter().any(|one| one == name));
    i64::try_from(used.count()).unwrap_or(i64::MAX)
}

impl Plugin for VolumeRestrictions {
    fn name(&self) -> &'static str {
        NAME
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(_) => true,
            ClusterEvent::ClaimChanged { old: None, new } => uses_claim(pod, new),
            ClusterEvent::PodRemoved(other) => {
                let shared = |name: &str| claim_names(other).any(|one| one == name);
                other.key.namespace == pod.key.namespace
                    && (conflicts(pod, other) || claim_names(pod).any(shared))
            }
            _ => false,
        }
    }

    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cache: &Cache,
    ) -> Result<PreFilter, Rejection> {
        if pod.volumes.is_empty() {
            return Ok(PreFilter::Skip);
        }
        let mut exclusive = Exclusive {
            claims: Vec::new(),
            users: 0,
        };
        for name in claim_names(pod) {
            let Some(claim) = self.listers.claims.get(&pod.key.namespace, name) else {
                return Err(Rejection::unresolvable(format!(
                    "persistentvolumeclaim {name:?} not found"
                )));
            };
            let mut modes = claim
                .spec
                .iter()
                .flat_map(|spec| spec.access_modes.iter().flatten());
            if modes.any(|mode| mode == "ReadWriteOncePod") {
                let key = (pod.key.namespace.clone(), name.to_owned());
                exclusive.users += i64::from(cache.used_claims.contains_key(&key));
                exclusive.claims.push(name.to_owned());
            }
        }
        let disks = pod
            .volumes
            .iter()
            .any(|volume| matches!(volume, VolumeUse::Disk { .. }));
        let skip = !disks && exclusive.users == 0;
        state.write(NAME, exclusive);
        Ok(if skip {
            PreFilter::Skip
        } else {
            PreFilter::AllNodes
        })
    }

    fn add_pod(&self, state: &mut CycleState, _pod: &PodInfo, added: &PodInfo, _node: &NodeInfo) {
        if let Some(exclusive) = state.read_mut::<Exclusive>(NAME) {
            exclusive.users += users_of(exclusive, added);
        }
    }

    fn remove_pod(&self, state: &mut CycleState, _pod: &PodInfo, removed: &PodInfo, _node: &NodeInfo) {
        if let Some(exclusive) = state.read_mut::<Exclusive>(NAME) {
            exclusive.users -= users_of(exclusive, removed);
        }
    }

    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        if node.pods.iter().any(|other| conflicts(pod, other)) {
            return Err(Rejection::unschedulable("node(s) had no available disk"));
        }
        if state
            .read::<Exclusive>(NAME)
            .is_some_and(|exclusive| exclusive.users > 0)
        {
            return Err(Rejection::unschedulable(
                "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by another pod",
            ));
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
    use crate::fixtures::{plain_meta, pod};
    use serde_json::{Value, json};

    #[test]
    fn disks_are_shared_by_readers_only() {
        let check = |a: Value, b: Value, expected: bool| {
            let with = |name: &str, mut volume: Value| {
                volume["name"] = json!("v");
                pod(name, json!({"volumes": [volume]}))
            };
            assert_eq!(
                conflicts(&with("p", a.clone()), &with("q", b.clone())),
                expected,
                "{a} {b}"
            );
        };
        let gce = |name: &str, read: bool| json!({"gcePersistentDisk": {"pdName": name, "readOnly": read}});
        check(gce("a", false), gce("a", true), true);
        check(gce("a", true), gce("a", true), false);
        check(gce("a", false), gce("b", false), false);
        let ebs = json!({"awsElasticBlockStore": {"volumeID": "x", "readOnly": true}});
        check(ebs.clone(), ebs, true);
        let rbd = |monitors: &[&str]| json!({"rbd": {"monitors": monitors, "image": "i"}});
        check(rbd(&["a", "b"]), rbd(&["b", "c"]), true);
        check(rbd(&["a"]), rbd(&["c"]), false);
    }

    #[test]
    fn a_claim_for_one_pod_has_one_user() {
        let plugin = VolumeRestrictions {
            listers: Arc::default(),
        };
        let claim: k8s_openapi::api::core::v1::PersistentVolumeClaim = serde_json::from_value(
            json!({"metadata": {"name": "c", "namespace": "default"}, "spec": {"accessModes": ["ReadWriteOncePod"]}}),
        )
        .unwrap();
        plugin
            .listers
            .claims
            .set(skiff_client::Key::of(&claim), Arc::new(claim));
        let with = |name: &str| {
            let volume = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
            pod(name, json!({"volumes": [volume]}))
        };
        let mut cache = Cache::default();
        cache.set_node("a", plain_meta("a"));
        let mut state = CycleState::default();
        assert_eq!(
            plugin.pre_filter(&mut state, &with("p"), &cache),
            Ok(PreFilter::Skip)
        );
        cache.place(with("q"), "a");
        assert_eq!(
            plugin.pre_filter(&mut state, &with("p"), &cache),
            Ok(PreFilter::AllNodes)
        );
        let node = cache.by_name("a").unwrap();
        assert!(plugin.filter(&state, &with("p"), node).is_err());
        plugin.remove_pod(&mut state, &with("p"), &with("q"), node);
        assert!(
            plugin.filter(&state, &with("p"), node).is_ok(),
            "preempting the user helps"
        );
        let missing = pod(
            "r",
            json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "none"}}]}),
        );
        assert_eq!(
            plugin
                .pre_filter(&mut state, &missing, &cache)
                .unwrap_err()
                .message(),
            "persistentvolumeclaim \"none\" not found"
        );
    }
}
