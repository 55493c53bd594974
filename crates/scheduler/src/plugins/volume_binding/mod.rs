//! Claims and volumes: a bound claim ties the pod to nodes that reach its volume; for a claim that waits for its first
//! consumer a volume is chosen or provisioned for the node, which PreBind writes and waits for.

mod find;
mod objects;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use self::objects::{class_of, volume_name, waits_for_consumer};

use self::objects::{limit, version};
use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, PreFilter, Rejection, Scope, Verdict};
use crate::listers::Listers;
use crate::metrics::{VolumeMetrics, VolumeStage};
use crate::node::NodeInfo;
use crate::pod::{PodInfo, VolumeUse};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use parking_lot::Mutex;
use skiff_client::Key;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    metrics: VolumeMetrics,
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

impl VolumeBinding {
    pub(crate) fn new(
        client: kube::Client,
        listers: Arc<Listers>,
        bind_timeout: Duration,
        metrics: VolumeMetrics,
    ) -> Self {
        Self {
            client,
            listers,
            bind_timeout,
            metrics,
            assumed: Mutex::default(),
        }
    }

    /// Takes the volumes of the node that was chosen.
    fn assume(&self, claims: &Claims, node: &NodeInfo) -> Result<Decision, Rejection> {
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
        Ok(decision)
    }

    /// Writes what was decided, and waits until the claims are bound.
    async fn write_and_wait(&self, decision: &Decision, node: &str) -> Verdict {
        let written = self.write(decision, node).await;
        written.map_err(|error| Rejection::error(error.to_string()))?;
        let deadline = tokio::time::Instant::now() + self.bind_timeout;
        loop {
            match self.check(decision, node) {
                Ok(true) => return Ok(()),
                Ok(false) if tokio::time::Instant::now() >= deadline => {
                    return Err(Rejection::error("binding volumes: context deadline exceeded"));
                }
                Ok(false) => tokio::time::sleep(POLL).await,
                Err(message) => return Err(Rejection::error(format!("binding volumes: {message}"))),
            }
        }
    }
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
            Some(claims) => {
                let began = Instant::now();
                let decision = self.decide(claims, node);
                self.metrics.stage(VolumeStage::Predicate, began, &decision);
                decision.map(|_| ())
            }
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
        let began = Instant::now();
        let decision = self.assume(claims, node);
        self.metrics.stage(VolumeStage::Assume, began, &decision);
        state.decision = decision?;
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
        let began = Instant::now();
        let bound = self.write_and_wait(decision, node).await;
        self.metrics.stage(VolumeStage::Bind, began, &bound);
        bound?;
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
