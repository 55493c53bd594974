//! Claims and volumes: a bound claim ties the pod to nodes that reach its volume; for a claim that waits for its first
//! consumer a volume is chosen or provisioned for the node, which PreBind writes and waits for.

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{Code, CycleState, Plugin, PreFilter, Rejection, Scope, Verdict};
use crate::listers::Listers;
use crate::node::NodeInfo;
use crate::pod::{PodInfo, VolumeUse};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use kube::api::{Api, PostParams};
use parking_lot::Mutex;
use skiff_client::Key;
use skiff_meta::quantity::Quantity;
use skiff_pods::{affinity, labels};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

const NAME: &str = "VolumeBinding";
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";
const POLL: Duration = Duration::from_millis(100);

pub(crate) struct VolumeBinding {
    client: kube::Client,
    listers: Arc<Listers>,
    bind_timeout: Duration,
    /// A leaf lock.
    assumed: Mutex<Assumed>,
}

/// What was decided and the informers do not show yet. It counts while they show the version that it was decided on.
#[derive(Default)]
struct Assumed {
    /// By volume: the version, and the claim that gets it.
    volumes: HashMap<String, (String, Key)>,
    /// By claim: the version, and the node it is provisioned for.
    claims: HashMap<Key, (String, String)>,
}

type Claim = Arc<PersistentVolumeClaim>;
type Volume = Arc<PersistentVolume>;

/// The pod's claims, sorted by what is to be done.
#[derive(Clone)]
struct Claims {
    bound: Vec<Claim>,
    /// Not bound, and waiting for their first consumer, smallest first, with the volumes that may be free for them.
    delayed: Vec<(Claim, Vec<Volume>)>,
}

/// What binding to a node needs.
#[derive(Clone, Default)]
struct Decision {
    volumes: Vec<(Volume, Claim)>,
    provision: Vec<Claim>,
}

#[derive(Clone, Default)]
struct BindingState {
    claims: Option<Claims>,
    decision: Decision,
}

pub(crate) fn class_of(claim: &PersistentVolumeClaim) -> &str {
    let annotations = claim.metadata.annotations.as_ref();
    let old = annotations.and_then(|all| all.get("volume.beta.kubernetes.io/storage-class"));
    let spec = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.storage_class_name.as_deref());
    old.map(String::as_str).or(spec).unwrap_or_default()
}

fn class_of_volume(volume: &PersistentVolume) -> &str {
    let annotations = volume.metadata.annotations.as_ref();
    let old = annotations.and_then(|all| all.get("volume.beta.kubernetes.io/storage-class"));
    let spec = volume
        .spec
        .as_ref()
        .and_then(|spec| spec.storage_class_name.as_deref());
    old.map(String::as_str).or(spec).unwrap_or_default()
}

pub(crate) fn volume_name(claim: &PersistentVolumeClaim) -> &str {
    let spec = claim.spec.as_ref();
    spec.and_then(|spec| spec.volume_name.as_deref())
        .unwrap_or_default()
}

fn annotation<'a>(claim: &'a PersistentVolumeClaim, key: &str) -> Option<&'a str> {
    claim.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    !volume_name(claim).is_empty() && annotation(claim, BIND_COMPLETED).is_some()
}

pub(crate) fn waits_for_consumer(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
}

fn version<K: kube::Resource>(object: &K) -> &str {
    object.meta().resource_version.as_deref().unwrap_or_default()
}

fn requested(claim: &PersistentVolumeClaim) -> Option<Quantity> {
    let resources = claim.spec.as_ref()?.resources.as_ref()?;
    Quantity::parse(&resources.requests.as_ref()?.get("storage")?.0).ok()
}

fn capacity(volume: &PersistentVolume) -> Option<Quantity> {
    Quantity::parse(&volume.spec.as_ref()?.capacity.as_ref()?.get("storage")?.0).ok()
}

/// True if the volume can be reached from the node.
fn reaches(volume: &PersistentVolume, node: &NodeInfo) -> bool {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| affinity.required.as_ref());
    required.is_none_or(|selector| affinity::node_selector_matches(selector, &node.meta.node))
}

/// True if the volume is promised to the claim. A reference without a uid was written by a user in advance.
fn is_for(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let Some(reference) = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()) else {
        return false;
    };
    reference.name == claim.metadata.name
        && reference.namespace == claim.metadata.namespace
        && (reference.uid.as_deref().unwrap_or_default().is_empty() || reference.uid == claim.metadata.uid)
}

fn matches(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let (Some(volume_spec), Some(claim_spec)) = (&volume.spec, &claim.spec) else {
        return false;
    };
    let mode = |mode: &Option<String>| mode.clone().unwrap_or_else(|| "Filesystem".to_owned());
    let attributes = |name: &Option<String>| name.clone().unwrap_or_default();
    let modes = claim_spec.access_modes.iter().flatten();
    let mut modes = modes.map(|wanted| volume_spec.access_modes.iter().flatten().any(|one| one == wanted));
    let large_enough = match (capacity(volume), requested(claim)) {
        (Some(has), Some(wanted)) => has >= wanted,
        (_, None) => true,
        (None, Some(_)) => false,
    };
    large_enough
        && volume.metadata.deletion_timestamp.is_none()
        && mode(&volume_spec.volume_mode) == mode(&claim_spec.volume_mode)
        && attributes(&volume_spec.volume_attributes_class_name)
            == attributes(&claim_spec.volume_attributes_class_name)
        && (is_for(volume, claim)
            || (volume.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Available")
                && class_of_volume(volume) == class_of(claim)
                && modes.all(|has| has)
                && claim_spec
                    .selector
                    .as_ref()
                    .is_none_or(|one| labels::matches(one, volume.metadata.labels.as_ref()))))
}

fn allows_topology(class: &StorageClass, node: &NodeInfo) -> bool {
    let Some(terms) = class
        .allowed_topologies
        .as_deref()
        .filter(|terms| !terms.is_empty())
    else {
        return true;
    };
    terms.iter().any(|term| {
        let mut expressions = term.match_label_expressions.iter().flatten();
        expressions.all(|one| {
            node.label(&one.key)
                .is_some_and(|value| one.values.iter().any(|v| v == value))
        })
    })
}

impl VolumeBinding {
    pub(crate) fn new(client: kube::Client, listers: Arc<Listers>, bind_timeout: Duration) -> Self {
        Self {
            client,
            listers,
            bind_timeout,
            assumed: Mutex::default(),
        }
    }

    fn claims(&self, pod: &PodInfo) -> Result<Option<Claims>, Rejection> {
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

    fn decide(&self, claims: &Claims, node: &NodeInfo) -> Result<Decision, Rejection> {
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

    /// Whether what was written has come to pass.
    fn check(&self, decision: &Decision, node: &str) -> Result<bool, String> {
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

    async fn write(&self, decision: &Decision, node: &str) -> Result<(), kube::Error> {
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

    fn forget(&self, decision: &Decision) {
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

enum Found {
    All,
    NoVolume,
    NoSpace,
}

fn limit(capacity: &CSIStorageCapacity) -> Option<Quantity> {
    let limit = capacity
        .maximum_volume_size
        .as_ref()
        .or(capacity.capacity.as_ref())?;
    Quantity::parse(&limit.0).ok()
}

#[async_trait]
impl Plugin for VolumeBinding {
    fn name(&self) -> &'static str {
        NAME
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::ClaimChanged { new, .. } => uses_claim(pod, new),
            ClusterEvent::VolumeChanged { .. } | ClusterEvent::NodeAdded(_) => true,
            ClusterEvent::NodeUpdated { old, new } => {
                old.labels() != new.labels() || old.taints() != new.taints()
            }
            ClusterEvent::ClassChanged { old, new } => old
                .as_ref()
                .is_none_or(|old| old.allowed_topologies != new.allowed_topologies),
            ClusterEvent::CsiNodeChanged { old, .. } => old.is_none(),
            ClusterEvent::CsiCapacityChanged { old, new } => {
                let more = |old: &Arc<CSIStorageCapacity>| limit(new) > limit(old);
                old.as_ref().is_none_or(more)
            }
            ClusterEvent::CsiDriverChanged { old, new } => {
                let told = old
                    .as_ref()
                    .is_some_and(|old| old.spec.storage_capacity == Some(true));
                told && new.spec.storage_capacity != Some(true)
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
        if pod.volumes.is_empty() {
            return Ok(PreFilter::Skip);
        }
        let claims = self.claims(pod)?;
        let any = claims.is_some();
        state.write(
            NAME,
            BindingState {
                claims,
                decision: Decision::default(),
            },
        );
        Ok(if any { PreFilter::AllNodes } else { PreFilter::Skip })
    }

    fn filter(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let state = state.read::<BindingState>(NAME);
        match state.and_then(|state| state.claims.as_ref()) {
            Some(claims) => self.decide(claims, node).map(|_| ()),
            None => Ok(()),
        }
    }

    fn reserve(&self, state: &mut CycleState, _pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let Some(state) = state.read_mut::<BindingState>(NAME) else {
            return Ok(());
        };
        let Some(claims) = &state.claims else {
            return Ok(());
        };
        let decision = self.decide(claims, node)?;
        let mut assumed = self.assumed.lock();
        for (volume, claim) in &decision.volumes {
            let name = volume.metadata.name.clone().unwrap_or_default();
            let by = (version(&**volume).to_owned(), Key::of(&**claim));
            assumed.volumes.insert(name, by);
        }
        for claim in &decision.provision {
            let on = (version(&**claim).to_owned(), node.name.to_string());
            assumed.claims.insert(Key::of(&**claim), on);
        }
        drop(assumed);
        state.decision = decision;
        Ok(())
    }

    fn unreserve(&self, state: &CycleState, _pod: &PodInfo, _node: &str) {
        if let Some(state) = state.read::<BindingState>(NAME) {
            self.forget(&state.decision);
        }
    }

    fn pre_bind_waits(&self, state: &CycleState, _pod: &PodInfo, _node: &str) -> bool {
        let state = state.read::<BindingState>(NAME);
        state.is_some_and(|state| !state.decision.volumes.is_empty() || !state.decision.provision.is_empty())
    }

    async fn pre_bind(&self, state: &CycleState, pod: &PodInfo, node: &str) -> Verdict {
        if !self.pre_bind_waits(state, pod, node) {
            return Ok(());
        }
        let Some(BindingState { decision, .. }) = state.read::<BindingState>(NAME) else {
            return Ok(());
        };
        let written = self.write(decision, node).await;
        written.map_err(|error| Rejection::error(error.to_string()))?;
        let deadline = tokio::time::Instant::now() + self.bind_timeout;
        loop {
            match self.check(decision, node) {
                Ok(true) => break,
                Ok(false) if tokio::time::Instant::now() >= deadline => {
                    return Err(Rejection::error("binding volumes: context deadline exceeded"));
                }
                Ok(false) => tokio::time::sleep(POLL).await,
                Err(message) => return Err(Rejection::error(format!("binding volumes: {message}"))),
            }
        }
        self.forget(decision);
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

/// True if the pod names the claim.
pub(crate) fn uses_claim(pod: &PodInfo, claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.namespace.as_deref() == Some(&pod.key.namespace)
        && pod.volumes.iter().any(|volume| {
            matches!(volume, VolumeUse::Claim { name, .. } if claim.metadata.name.as_ref() == Some(name))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node, pod};
    use crate::plugins::testing::unreachable_client;
    use serde_json::{Value, json};

    fn plugin() -> VolumeBinding {
        let plugin = VolumeBinding::new(unreachable_client(), Arc::default(), Duration::from_secs(1));
        for (name, mode, provisioner) in [
            ("late", "WaitForFirstConsumer", "csi.example.com"),
            ("local", "WaitForFirstConsumer", NO_PROVISIONER),
            ("now", "Immediate", "csi.example.com"),
        ] {
            let class = json!({"metadata": {"name": name}, "provisioner": provisioner, "volumeBindingMode": mode,
                "allowedTopologies": [{"matchLabelExpressions": [{"key": "zone", "values": ["a", "b"]}]}]});
            let class = Arc::new(serde_json::from_value(class).unwrap());
            plugin.listers.classes.set(Key::new("", name), class);
        }
        plugin
    }

    fn add_claim(plugin: &VolumeBinding, name: &str, class: &str, more: Value) {
        let mut claim = json!({"metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": "1"},
            "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
        for (pointer, value) in more.as_object().unwrap() {
            let (parent, field) = pointer.rsplit_once('/').unwrap();
            claim.pointer_mut(parent).unwrap()[field] = value.clone();
        }
        let claim = Arc::new(serde_json::from_value(claim).unwrap());
        plugin.listers.claims.set(Key::new("default", name), claim);
    }

    fn add_volume(plugin: &VolumeBinding, name: &str, size: &str, zone: &str) {
        let terms = json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}]);
        let volume = json!({"metadata": {"name": name, "resourceVersion": "1"}, "status": {"phase": "Available"},
            "spec": {"storageClassName": "local", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": size},
                "nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}});
        let volume = Arc::new(serde_json::from_value(volume).unwrap());
        plugin.listers.volumes.set(Key::new("", name), volume);
    }

    fn in_zone(zone: &str) -> NodeInfo {
        node(zone, json!({}), json!({"zone": zone}), json!({}))
    }

    fn using(claims: &[&str]) -> Arc<PodInfo> {
        let volumes: Vec<Value> = claims
            .iter()
            .map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}))
            .collect();
        pod(&claims.join("-"), json!({"volumes": volumes}))
    }

    /// The state after PreFilter, or why there is none.
    fn prepare(plugin: &VolumeBinding, pod: &PodInfo) -> Result<CycleState, String> {
        let mut state = CycleState::default();
        let prepared = plugin.pre_filter(&mut state, pod, &Cache::default());
        prepared.map(|_| state).map_err(|rejection| rejection.message())
    }

    fn verdict(plugin: &VolumeBinding, claims: &[&str], zone: &str) -> String {
        let pod = using(claims);
        match prepare(plugin, &pod) {
            Err(message) => message,
            Ok(state) => match plugin.filter(&state, &pod, &in_zone(zone)) {
                Ok(()) => String::new(),
                Err(rejection) => rejection.message(),
            },
        }
    }

    #[tokio::test]
    async fn claims_that_cannot_be_waited_for() {
        let plugin = plugin();
        add_claim(&plugin, "unbound", "now", json!({}));
        add_claim(
            &plugin,
            "lost",
            "now",
            json!({"/status": {"phase": "Lost"}, "/spec/volumeName": "v"}),
        );
        add_claim(
            &plugin,
            "going",
            "now",
            json!({"/metadata/deletionTimestamp": "2026-01-01T00:00:00Z"}),
        );
        let check = |claim: &str, expected: &str| assert_eq!(verdict(&plugin, &[claim], "a"), expected);
        check("none", "persistentvolumeclaim \"none\" not found");
        check("unbound", "pod has unbound immediate PersistentVolumeClaims");
        check(
            "lost",
            "persistentvolumeclaim \"lost\" bound to non-existent persistentvolume \"v\"",
        );
        check("going", "persistentvolumeclaim \"going\" is being deleted");
    }

    #[tokio::test]
    async fn a_bound_claim_ties_to_its_volume() {
        let plugin = plugin();
        let bound = json!({"/spec/volumeName": "v", "/metadata/annotations": {BIND_COMPLETED: "yes"}});
        add_claim(&plugin, "c", "local", bound);
        assert_eq!(
            verdict(&plugin, &["c"], "a"),
            "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"
        );
        add_volume(&plugin, "v", "1Gi", "a");
        assert_eq!(verdict(&plugin, &["c"], "a"), "");
        assert_eq!(
            verdict(&plugin, &["c"], "b"),
            "node(s) didn't match PersistentVolume's node affinity"
        );
    }

    #[tokio::test]
    async fn the_smallest_volume_is_taken_and_no_volume_twice() {
        let plugin = plugin();
        add_claim(&plugin, "c", "local", json!({}));
        add_claim(&plugin, "d", "local", json!({}));
        add_volume(&plugin, "large", "9Gi", "a");
        add_volume(&plugin, "small", "2Gi", "a");
        add_volume(&plugin, "tiny", "1Mi", "b");
        let none = "node(s) didn't find available persistent volumes to bind";
        assert_eq!(
            (
                verdict(&plugin, &["c"], "a").as_str(),
                verdict(&plugin, &["c"], "b").as_str()
            ),
            ("", none)
        );
        assert_eq!(verdict(&plugin, &["c", "d"], "a"), "", "one each");
        let pod = using(&["c"]);
        let mut state = prepare(&plugin, &pod).unwrap();
        plugin.reserve(&mut state, &pod, &in_zone("a")).unwrap();
        let chosen = &state.read::<BindingState>(NAME).unwrap().decision.volumes[0].0;
        assert_eq!(chosen.metadata.name.as_deref(), Some("small"));
        assert!(plugin.pre_bind_waits(&state, &pod, "a"));
        // What is promised is not there for others, until the promise is taken back.
        let other = using(&["d"]);
        let mut theirs = prepare(&plugin, &other).unwrap();
        plugin.reserve(&mut theirs, &other, &in_zone("a")).unwrap();
        let chosen = &theirs.read::<BindingState>(NAME).unwrap().decision.volumes[0].0;
        assert_eq!(chosen.metadata.name.as_deref(), Some("large"));
        plugin.unreserve(&state, &pod, "a");
        plugin.unreserve(&theirs, &other, "a");
        assert!(plugin.assumed.lock().volumes.is_empty());
    }

    #[tokio::test]
    async fn provisioning_looks_at_topology_and_capacity() {
        let plugin = plugin();
        add_claim(&plugin, "c", "late", json!({}));
        let none = "node(s) didn't find available persistent volumes to bind";
        assert_eq!(
            (
                verdict(&plugin, &["c"], "a").as_str(),
                verdict(&plugin, &["c"], "z").as_str()
            ),
            ("", none)
        );
        let driver = json!({"metadata": {"name": "csi.example.com"}, "spec": {"storageCapacity": true}});
        let driver = Arc::new(serde_json::from_value(driver).unwrap());
        plugin
            .listers
            .csi_drivers
            .set(Key::new("", "csi.example.com"), driver);
        assert_eq!(
            verdict(&plugin, &["c"], "a"),
            "node(s) did not have enough free storage"
        );
        let capacity = json!({"metadata": {"name": "x"}, "storageClassName": "late", "capacity": "5Gi",
            "nodeTopology": {"matchLabels": {"zone": "b"}}});
        let capacity = Arc::new(serde_json::from_value(capacity).unwrap());
        plugin.listers.csi_capacities.set(Key::new("", "x"), capacity);
        assert_eq!(verdict(&plugin, &["c"], "b"), "");
        // Once a node is chosen, it is that one.
        let pod = using(&["c"]);
        let mut state = prepare(&plugin, &pod).unwrap();
        plugin.reserve(&mut state, &pod, &in_zone("b")).unwrap();
        assert_eq!(verdict(&plugin, &["c"], "a"), none);
        assert_eq!(verdict(&plugin, &["c"], "b"), "");
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_written_must_come_to_pass() {
        let plugin = plugin();
        add_claim(&plugin, "c", "late", json!({}));
        let claim = plugin.listers.claims.get("default", "c").unwrap();
        let decision = Decision {
            volumes: Vec::new(),
            provision: vec![claim],
        };
        plugin
            .assumed
            .lock()
            .claims
            .insert(Key::new("default", "c"), ("1".into(), "n".into()));
        assert_eq!(plugin.check(&decision, "n"), Ok(false), "the informer is behind");
        let selected = |node: &str| json!({"/metadata/resourceVersion": "2", "/metadata/annotations": {SELECTED_NODE: node}});
        add_claim(&plugin, "c", "late", selected("n"));
        assert_eq!(plugin.check(&decision, "n"), Ok(false), "not provisioned yet");
        add_claim(&plugin, "c", "late", selected(""));
        assert_eq!(
            plugin.check(&decision, "n"),
            Err("provisioning failed for PVC \"c\"".to_owned())
        );
        let mut bound = selected("n");
        bound["/spec/volumeName"] = json!("v");
        bound["/metadata/annotations"][BIND_COMPLETED] = json!("yes");
        add_claim(&plugin, "c", "late", bound);
        assert_eq!(
            plugin.check(&decision, "n"),
            Ok(false),
            "the volume is not shown yet"
        );
        add_volume(&plugin, "v", "1Gi", "a");
        assert_eq!(plugin.check(&decision, "n"), Ok(true));
    }
}
