//! Filter: which volume each claim of a pod would get on a node, or that one can be provisioned there.

use super::objects::{
    allows_topology, annotation, capacity, class_of, is_bound, is_for, limit, matches, reaches, requested,
    version, volume_name, waits_for_consumer,
};
use super::{Claims, Decision, NO_PROVISIONER, SELECTED_NODE, Volume, VolumeBinding};
use crate::framework::{Code, Rejection};
use crate::node::NodeInfo;
use crate::pod::{PodInfo, VolumeUse};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use skiff_client::Key;
use skiff_pods::labels;
use std::borrow::Cow;
use std::sync::Arc;

impl VolumeBinding {
    pub(super) fn claims(&self, pod: &PodInfo) -> Result<Option<Claims>, Rejection> {
        let (mut bound, mut delayed, mut immediate) = (Vec::new(), Vec::new(), false);
        let namespace = &pod.key.namespace;
        let mut any = false;
        for volume in &pod.volumes {
            let VolumeUse::Claim { name, generated } = volume else {
                continue;
            };
            any = true;
            let Some(claim) = self.listers.claims.get(namespace, name) else {
                return Err(Rejection::unresolvable(if *generated {
                    format!(
                        "waiting for ephemeral volume controller to create the persistentvolumeclaim {name:?}"
                    )
                } else {
                    format!("persistentvolumeclaim {name:?} not found")
                }));
            };
            if claim.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Lost") {
                let lost = volume_name(&claim);
                return Err(Rejection::unresolvable(format!(
                    "persistentvolumeclaim {name:?} bound to non-existent persistentvolume {lost:?}"
                )));
            }
            if claim.metadata.deletion_timestamp.is_some() {
                return Err(Rejection::unresolvable(format!(
                    "persistentvolumeclaim {name:?} is being deleted"
                )));
            }
            if *generated {
                let mut owners = claim.metadata.owner_references.iter().flatten();
                if !owners.any(|owner| owner.controller == Some(true) && *owner.uid == *pod.uid) {
                    return Err(Rejection::unresolvable(format!(
                        "PVC {namespace}/{name} was not created for pod {} (pod is not owner)",
                        pod.key
                    )));
                }
            }
            if is_bound(&claim) {
                bound.push(claim);
                continue;
            }
            let class = self.listers.classes.get("", class_of(&claim));
            if class.is_some_and(|class| waits_for_consumer(&class)) && volume_name(&claim).is_empty() {
                let free = self.listers.volumes.find(|(_, volume)| {
                    let unclaimed = volume.spec.as_ref().is_none_or(|spec| spec.claim_ref.is_none());
                    let candidate = (unclaimed || is_for(volume, &claim)) && matches(volume, &claim);
                    candidate.then(|| Arc::clone(volume))
                });
                delayed.push((claim, free));
            } else {
                immediate = true;
            }
        }
        if immediate {
            return Err(Rejection::unresolvable(
                "pod has unbound immediate PersistentVolumeClaims",
            ));
        }
        delayed.sort_by_key(|(claim, _)| requested(claim));
        Ok(any.then_some(Claims { bound, delayed }))
    }

    /// The node that the claim is already to be provisioned for.
    fn selected_node(&self, claim: &PersistentVolumeClaim) -> Option<String> {
        let assumed = self.assumed.lock();
        let known = assumed.claims.get(&Key::of(claim));
        let known = known
            .filter(|(on, _)| on == version(claim))
            .map(|(_, node)| node.clone());
        known.or_else(|| annotation(claim, SELECTED_NODE).map(str::to_owned))
    }

    fn is_taken(&self, volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        let assumed = self.assumed.lock();
        let known = assumed.volumes.get(name);
        known.is_some_and(|(on, by)| on == version(volume) && *by != Key::of(claim))
    }

    pub(super) fn decide(&self, claims: &Claims, node: &NodeInfo) -> Result<Decision, Rejection> {
        let mut reasons: Vec<Cow<'static, str>> = Vec::new();
        let volumes = claims
            .bound
            .iter()
            .map(|claim| self.listers.volumes.get("", volume_name(claim)));
        let (mut conflict, mut missing) = (false, false);
        for volume in volumes {
            match volume {
                Some(volume) => conflict |= !reaches(&volume, node),
                None => missing = true,
            }
        }
        if conflict {
            reasons.push("node(s) didn't match PersistentVolume's node affinity".into());
        }
        let mut decision = Decision::default();
        let found = self.decide_delayed(claims, node, &mut decision)?;
        match found {
            Found::All => {}
            Found::NoVolume => {
                reasons.push("node(s) didn't find available persistent volumes to bind".into())
            }
            Found::NoSpace => reasons.push("node(s) did not have enough free storage".into()),
        }
        if missing {
            reasons.push("node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)".into());
        }
        if reasons.is_empty() {
            return Ok(decision);
        }
        Err(Rejection {
            code: Code::Unresolvable,
            reasons,
            plugin: "",
        })
    }

    fn decide_delayed(
        &self,
        claims: &Claims,
        node: &NodeInfo,
        decision: &mut Decision,
    ) -> Result<Found, Rejection> {
        for (claim, free) in &claims.delayed {
            if let Some(selected) = self.selected_node(claim) {
                if *selected != *node.name {
                    return Ok(Found::NoVolume);
                }
                decision.provision.push(Arc::clone(claim));
                continue;
            }
            let chosen = |volume: &&Volume| {
                let taken = decision
                    .volumes
                    .iter()
                    .any(|(one, _)| one.metadata.name == volume.metadata.name);
                !taken && !self.is_taken(volume, claim)
            };
            let own = free.iter().find(|volume| is_for(volume, claim));
            let volume = match own {
                // What is promised to the claim is its volume, here or nowhere.
                Some(own) => {
                    if !reaches(own, node) {
                        return Ok(Found::NoVolume);
                    }
                    Some(own)
                }
                None => {
                    let fitting = free.iter().filter(chosen).filter(|volume| reaches(volume, node));
                    fitting.min_by_key(|volume| capacity(volume))
                }
            };
            match volume {
                Some(volume) => decision.volumes.push((Arc::clone(volume), Arc::clone(claim))),
                None => decision.provision.push(Arc::clone(claim)),
            }
        }
        for claim in &decision.provision {
            let name = class_of(claim);
            let Some(class) = self.listers.classes.get("", name) else {
                return Err(Rejection::error(format!("failed to find storage class {name:?}")));
            };
            if matches!(class.provisioner.as_str(), "" | NO_PROVISIONER) || !allows_topology(&class, node) {
                return Ok(Found::NoVolume);
            }
            if !self.has_capacity(&class, claim, node) {
                return Ok(Found::NoSpace);
            }
        }
        Ok(Found::All)
    }

    /// Asked of drivers only that tell their capacity.
    fn has_capacity(&self, class: &StorageClass, claim: &PersistentVolumeClaim, node: &NodeInfo) -> bool {
        let driver = self.listers.csi_drivers.get("", &class.provisioner);
        let tells = driver.is_some_and(|driver| driver.spec.storage_capacity == Some(true));
        let Some(wanted) = requested(claim).filter(|_| tells) else {
            return true;
        };
        let sufficient = |one: &CSIStorageCapacity| {
            let selector = one.node_topology.as_ref();
            Some(&one.storage_class_name) == class.metadata.name.as_ref()
                && limit(one).is_some_and(|limit| limit >= wanted)
                && selector.is_some_and(|one| labels::matches(one, node.meta.labels()))
        };
        let found = self
            .listers
            .csi_capacities
            .find(|(_, one)| sufficient(one).then_some(()));
        !found.is_empty()
    }
}

enum Found {
    All,
    NoVolume,
    NoSpace,
}
