//! Resource claims: devices are allocated for the node that the pod goes to, and reserved for the pod before it is bound.
//! Extended resources that a DeviceClass backs are allocated by one more claim, which exists in memory until PreBind.

use crate::cache::Cache;
use crate::cycle::Failed;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, PostFilter, PreFilter, Rejection, Scope, Verdict, scale_to_max};
use crate::listers::Listers;
use crate::node::NodeInfo;
use crate::plugins::claim_writer::{ClaimWriter, allocation, is_reserved_for, reservations};
use crate::plugins::device_conditions::{Readiness, has_conditions, readiness};
use crate::plugins::devices::{Search, Selectors, Taken, current_slices};
use crate::plugins::extended_resources as extended;
use crate::pod::PodInfo;
use crate::preempt::reference;
use async_trait::async_trait;
use k8s_openapi::api::core::v1::ContainerExtendedResourceRequest;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use parking_lot::Mutex;
use skiff_client::EventRecorder;
use skiff_pods::affinity;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

const NAME: &str = "DynamicResources";
/// Upstream's limit of consumers of one claim.
const MAX_CONSUMERS: usize = 256;
const CONDITIONS_POLL: std::time::Duration = std::time::Duration::from_millis(100);
/// How long PreBind waits for the informer to show what it wrote.
const INFORMER_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

pub(crate) struct DynamicResources {
    writer: ClaimWriter,
    /// How long PreBind waits for the conditions of devices.
    binding_timeout: std::time::Duration,
    /// Made when there is something to say.
    events: OnceLock<EventRecorder>,
    listers: Arc<Listers>,
    /// Leaf locks.
    selectors: Mutex<Selectors>,
    /// Allocations that the informer does not show yet, by the claim's uid.
    in_flight: Mutex<HashMap<String, AllocationResult>>,
}

/// What the cycle knows of the pod's claims.
#[derive(Clone)]
struct Claims {
    allocated: Vec<Arc<ResourceClaim>>,
    waiting: Arc<Vec<Arc<ResourceClaim>>>,
    slices: Arc<Vec<Arc<ResourceSlice>>>,
    classes: Arc<HashMap<String, Arc<DeviceClass>>>,
    taken: Arc<Taken>,
    /// Some extended resource of the pod is backed by a class.
    extended: bool,
    /// The claim for extended resources that an earlier attempt left.
    stale: Option<Arc<ResourceClaim>>,
    /// For the node that was chosen, one for each of `waiting`.
    allocations: Vec<AllocationResult>,
    /// For the node that was chosen, if that needs it.
    special: Option<Arc<Special>>,
}

/// The claim for extended resources on the node that was chosen.
struct Special {
    claim: ResourceClaim,
    allocation: AllocationResult,
    mappings: Vec<ContainerExtendedResourceRequest>,
    /// As the API server has it, from PreBind on. A leaf lock.
    created: Mutex<Option<ResourceClaim>>,
}

/// What can be allocated on a node.
struct Found {
    /// One for each of `waiting`.
    allocations: Vec<AllocationResult>,
    special: Option<Special>,
}

/// Stands among the allocations in flight for a claim that has no uid yet.
fn special_uid(pod: &PodInfo) -> String {
    format!("extended-resources/{}", pod.uid)
}

fn uid(claim: &ResourceClaim) -> &str {
    claim.metadata.uid.as_deref().unwrap_or_default()
}

impl DynamicResources {
    pub(crate) fn new(
        client: kube::Client,
        listers: Arc<Listers>,
        binding_timeout: std::time::Duration,
    ) -> Self {
        Self {
            writer: ClaimWriter { client },
            binding_timeout,
            events: OnceLock::new(),
            listers,
            selectors: Mutex::default(),
            in_flight: Mutex::default(),
        }
    }

    /// The pod's claims, or why they are not there.
    fn claims_of(&self, pod: &PodInfo) -> Result<Vec<Arc<ResourceClaim>>, String> {
        let mut claims = Vec::new();
        for wanted in &pod.resource_claims {
            let Some(name) = &wanted.claim else {
                return Err(format!(
                    "pod {:?}: waiting for dynamic resource controller to create the resourceclaim for {:?}",
                    pod.key.to_string(),
                    wanted.name
                ));
            };
            let Some(claim) = self.listers.resource_claims.get(&pod.key.namespace, name) else {
                return Err(format!("resourceclaim.resource.k8s.io {name:?} not found"));
            };
            if claim.metadata.deletion_timestamp.is_some() {
                return Err(format!("resourceclaim {name:?} is being deleted"));
            }
            let mut owners = claim.metadata.owner_references.iter().flatten();
            if wanted.generated && !owners.any(|one| one.controller == Some(true) && *one.uid == *pod.uid) {
                return Err(format!(
                    "ResourceClaim {}/{name} was not created for pod {} (pod is not owner)",
                    pod.key.namespace, pod.key
                ));
            }
            claims.push(claim);
        }
        Ok(claims)
    }

    fn taken(&self) -> Taken {
        let mut taken = Taken::default();
        let mut add = |allocation: &AllocationResult| {
            let results = allocation
                .devices
                .iter()
                .flat_map(|devices| devices.results.iter().flatten());
            results.for_each(|result| taken.add(result));
        };
        self.listers.resource_claims.find(|(_, claim)| {
            if let Some(allocation) = allocation(claim) {
                add(allocation);
            }
            None::<()>
        });
        for allocation in self.in_flight.lock().values() {
            add(allocation);
        }
        taken
    }

    /// Whether a class backs an extended resource of the pod now.
    fn is_extended(&self, pod: &PodInfo) -> bool {
        extended::resources(pod).any(|resource| self.listers.class_backing(resource).is_some())
    }

    /// The claim that the pod's extended resources need on this node.
    fn special_for(
        &self,
        pod: &PodInfo,
        node: &NodeInfo,
    ) -> Result<Option<(ResourceClaim, Vec<ContainerExtendedResourceRequest>)>, Rejection> {
        let class_of = |resource: &str| self.listers.class_backing(resource)?.metadata.name.clone();
        let Some(needed) = extended::needed(pod, node, class_of) else {
            return Err(Rejection::unresolvable("cannot fit resource"));
        };
        if needed.is_empty() {
            return Ok(None);
        }
        let (requests, mappings) = extended::requests(&pod.shape.extended, &needed);
        Ok(Some((extended::claim(pod, requests), mappings)))
    }

    fn allocate(&self, claims: &Claims, pod: &PodInfo, node: &NodeInfo) -> Result<Found, Rejection> {
        let special = if claims.extended {
            self.special_for(pod, node)?
        } else {
            None
        };
        if claims.waiting.is_empty() && special.is_none() {
            return Ok(Found {
                allocations: Vec::new(),
                special: None,
            });
        }
        let mut waiting = claims.waiting.to_vec();
        waiting.extend(special.iter().map(|(claim, _)| Arc::new(claim.clone())));
        let slices = current_slices(&claims.slices);
        let mut selectors = self.selectors.lock();
        let search = Search::new(&waiting, &slices, &claims.taken, &mut selectors, node);
        let mut allocations = match search.run(&claims.classes) {
            Ok(Some(found)) => found,
            Ok(None) => return Err(Rejection::unresolvable("cannot allocate all claims")),
            Err(problem) => return Err(Rejection::unresolvable(problem)),
        };
        let special = special.and_then(|(claim, mappings)| {
            Some(Special {
                claim,
                mappings,
                allocation: allocations.pop()?,
                created: Mutex::new(None),
            })
        });
        Ok(Found { allocations, special })
    }

    /// Creates the claim for extended resources with its allocation, and names it in the pod's status.
    async fn bind_special(&self, special: &Special, pod: &PodInfo) -> Result<(), String> {
        let created = self.writer.create(&special.claim, pod).await?;
        *special.created.lock() = Some(created.clone());
        self.writer
            .write(&created, Some(&special.allocation), pod)
            .await?;
        let name = created.metadata.name.clone().unwrap_or_default();
        self.writer.note_in_pod(pod, &name, &special.mappings).await?;
        let shown = || {
            let now = self.listers.resource_claims.get(&pod.key.namespace, &name);
            now.is_some_and(|now| allocation(&now).is_some())
        };
        until(shown).await;
        self.in_flight.lock().remove(&special_uid(pod));
        Ok(())
    }

    fn announce_waiting(&self, pod: &PodInfo, node: &str) {
        let events = self
            .events
            .get_or_init(|| EventRecorder::new(self.writer.client.clone(), &pod.shape.scheduler_name, ""));
        let message = format!("waiting for binding conditions for device on node {node}");
        events.event(&reference(pod), "Normal", "BindingConditionsPending", message);
    }

    /// Waits until the drivers say that the devices are ready for the pod. A claim whose devices fail is given back, so that
    /// the next try may find others.
    async fn until_ready(&self, claims: &Claims, pod: &PodInfo, node: &str) -> Verdict {
        let deadline = tokio::time::Instant::now() + self.binding_timeout;
        let special = claims.special.as_ref();
        let special = special.and_then(|special| special.created.lock().as_ref()?.metadata.name.clone());
        let own = claims.allocated.iter().chain(claims.waiting.iter());
        let names = own.filter_map(|claim| claim.metadata.name.clone()).chain(special);
        let mut announced = false;
        for name in names {
            let name = name.as_str();
            loop {
                let Some(now) = self.listers.resource_claims.get(&pod.key.namespace, name) else {
                    return Err(Rejection::error(format!(
                        "resourceclaim.resource.k8s.io {name:?} not found"
                    )));
                };
                if !has_conditions(&now) {
                    break;
                }
                if !announced {
                    self.announce_waiting(pod, node);
                    announced = true;
                }
                let late = tokio::time::Instant::now() >= deadline;
                let why = match readiness(&now) {
                    Readiness::Ready => break,
                    Readiness::Failed(why) => why,
                    Readiness::Waiting if late => format!("device binding timeout: claim={name}"),
                    Readiness::Waiting => {
                        tokio::time::sleep(CONDITIONS_POLL).await;
                        continue;
                    }
                };
                self.writer.deallocate(&now, pod).await;
                return Err(Rejection::error(why));
            }
        }
        Ok(())
    }
}

/// Waits a while for what the informer will show.
async fn until(shown: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + INFORMER_TIMEOUT;
    while !shown() && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// Whether the devices that the claim has can be used from the node.
fn reaches(claim: &ResourceClaim, node: &NodeInfo) -> bool {
    let selector = allocation(claim).and_then(|allocation| allocation.node_selector.as_ref());
    selector.is_none_or(|selector| affinity::node_selector_matches(selector, &node.meta.node))
}

/// Requests that list alternatives, best first.
fn has_alternatives(claim: &ResourceClaim) -> bool {
    let devices = claim.spec.devices.iter();
    let mut requests = devices.flat_map(|devices| devices.requests.iter().flatten());
    requests.any(|request| {
        request
            .first_available
            .as_ref()
            .is_some_and(|all| !all.is_empty())
    })
}

/// COMPAT: the earlier an alternative stands in its list of at most eight, the more it counts.
fn score_of(claim: &ResourceClaim, allocation: &AllocationResult) -> i64 {
    const MOST_ALTERNATIVES: usize = 8;
    let devices = claim.spec.devices.iter();
    let requests = devices.flat_map(|devices| devices.requests.iter().flatten());
    let results = allocation
        .devices
        .iter()
        .flat_map(|devices| devices.results.iter().flatten());
    let chosen: Vec<&str> = results.map(|result| result.request.as_str()).collect();
    let mut score = 0;
    for request in requests {
        for (place, option) in request.first_available.iter().flatten().enumerate() {
            let name = format!("{}/{}", request.name, option.name);
            if chosen.contains(&name.as_str()) {
                score += MOST_ALTERNATIVES.saturating_sub(place);
            }
        }
    }
    i64::try_from(score).unwrap_or(i64::MAX)
}

#[async_trait]
impl Plugin for DynamicResources {
    fn name(&self) -> &'static str {
        NAME
    }

    fn pre_enqueue(&self, pod: &PodInfo) -> Verdict {
        self.claims_of(pod).map(|_| ()).map_err(Rejection::unresolvable)
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::OwnPodUpdated { old, new } => old.resource_claims != new.resource_claims,
            ClusterEvent::ResourceClaimChanged { old, new } => {
                let released = old.as_ref().is_some_and(|old| allocation(old).is_some())
                    && new.as_ref().is_none_or(|new| allocation(new).is_none());
                let claim = new.as_ref().or(old.as_ref());
                let own = claim.is_some_and(|claim| {
                    claim.metadata.namespace.as_deref() == Some(&pod.key.namespace)
                        && pod
                            .resource_claims
                            .iter()
                            .any(|one| one.claim == claim.metadata.name)
                        || extended::is_claim_of(claim, pod)
                });
                released || own
            }
            ClusterEvent::DevicesChanged | ClusterEvent::NodeAdded(_) => true,
            ClusterEvent::NodeUpdated { old, new } => old.labels() != new.labels(),
            _ => false,
        }
    }

    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        _cache: &Cache,
    ) -> Result<PreFilter, Rejection> {
        let extended = self.is_extended(pod);
        if pod.resource_claims.is_empty() && !extended {
            return Ok(PreFilter::Skip);
        }
        let stale = extended.then(|| {
            let left = self
                .listers
                .resource_claims
                .find(|(_, claim)| extended::is_claim_of(claim, pod).then(|| Arc::clone(claim)));
            left.into_iter().next()
        });
        let (mut allocated, mut waiting) = (Vec::new(), Vec::new());
        for claim in self.claims_of(pod).map_err(Rejection::unresolvable)? {
            if allocation(&claim).is_some() {
                if !is_reserved_for(&claim, pod) && reservations(&claim).len() >= MAX_CONSUMERS {
                    return Err(Rejection::unresolvable("resourceclaim in use"));
                }
                allocated.push(claim);
            } else if self.in_flight.lock().contains_key(uid(&claim)) {
                let name = skiff_client::Key::of(&*claim);
                return Err(Rejection::unresolvable(format!(
                    "resource claim {name} is in the process of being allocated"
                )));
            } else {
                waiting.push(claim);
            }
        }
        let classes = self
            .listers
            .device_classes
            .find(|(key, class)| Some((key.name.clone(), Arc::clone(class))));
        let taken = if waiting.is_empty() && !extended {
            Taken::default()
        } else {
            self.taken()
        };
        state.write(
            NAME,
            Claims {
                allocated,
                waiting: Arc::new(waiting),
                slices: Arc::new(self.listers.slices.find(|(_, slice)| Some(Arc::clone(slice)))),
                classes: Arc::new(classes.into_iter().collect()),
                taken: Arc::new(taken),
                extended,
                stale: stale.flatten(),
                allocations: Vec::new(),
                special: None,
            },
        );
        Ok(PreFilter::AllNodes)
    }

    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let Some(claims) = state.read::<Claims>(NAME) else {
            return Ok(());
        };
        if claims.stale.is_some() {
            return Err(Rejection::unresolvable("cannot schedule extended resource claim"));
        }
        if !claims.allocated.iter().all(|claim| reaches(claim, node)) {
            return Err(Rejection::unresolvable("resourceclaim not available on the node"));
        }
        self.allocate(claims, pod, node).map(|_| ())
    }

    /// What an earlier attempt left is in the way of this one: it is taken back, which brings the pod here again.
    fn post_filter(&self, run: &Failed) -> Option<PostFilter> {
        let claims = run.state.read::<Claims>(NAME)?;
        if let Some(stale) = &claims.stale {
            self.writer.delete_later(ResourceClaim::clone(stale));
            return None;
        }
        let own =
            |claim: &&Arc<ResourceClaim>| reservations(claim).iter().all(|one| *one.uid == *run.pod.uid);
        let unavailable = |claim: &&Arc<ResourceClaim>| run.cache.nodes().any(|node| !reaches(claim, node));
        let mut allocated = claims.allocated.iter();
        if let Some(claim) = allocated.find(|claim| own(claim) && unavailable(claim)) {
            self.writer.deallocate_later(ResourceClaim::clone(claim), run.pod);
        }
        None
    }

    fn scores(&self) -> bool {
        true
    }

    fn pre_score(
        &self,
        state: &mut CycleState,
        _pod: &PodInfo,
        _nodes: &[&NodeInfo],
        _cache: &Cache,
    ) -> bool {
        let claims = state.read::<Claims>(NAME);
        claims.is_some_and(|claims| {
            let mut all = claims.allocated.iter().chain(claims.waiting.iter());
            all.any(|claim| has_alternatives(claim))
        })
    }

    fn score(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let Some(claims) = state.read::<Claims>(NAME) else {
            return 0;
        };
        let allocated = claims.allocated.iter();
        let before: i64 = allocated
            .filter_map(|claim| Some(score_of(claim, allocation(claim)?)))
            .sum();
        let found = self.allocate(claims, pod, node);
        let found = found.map(|found| found.allocations).unwrap_or_default();
        let now = claims.waiting.iter().zip(&found);
        before
            + now
                .map(|(claim, allocation)| score_of(claim, allocation))
                .sum::<i64>()
    }

    fn normalizes(&self) -> bool {
        true
    }

    fn normalize(&self, _state: &CycleState, _nodes: &[&NodeInfo], scores: &mut [i64]) {
        scale_to_max(scores, false);
    }

    fn reserve(&self, state: &mut CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let Some(claims) = state.read_mut::<Claims>(NAME) else {
            return Ok(());
        };
        let found = self.allocate(claims, pod, node)?;
        let mut in_flight = self.in_flight.lock();
        for (claim, allocation) in claims.waiting.iter().zip(&found.allocations) {
            in_flight.insert(uid(claim).to_owned(), allocation.clone());
        }
        if let Some(special) = &found.special {
            in_flight.insert(special_uid(pod), special.allocation.clone());
        }
        drop(in_flight);
        claims.allocations = found.allocations;
        claims.special = found.special.map(Arc::new);
        Ok(())
    }

    fn unreserve(&self, state: &CycleState, pod: &PodInfo, _node: &str) {
        let Some(claims) = state.read::<Claims>(NAME) else {
            return;
        };
        let mut in_flight = self.in_flight.lock();
        for (claim, _) in claims.waiting.iter().zip(&claims.allocations) {
            in_flight.remove(uid(claim));
        }
        if let Some(special) = &claims.special {
            in_flight.remove(&special_uid(pod));
            if let Some(created) = special.created.lock().take() {
                self.writer.delete_later(created);
            }
        }
    }

    fn pre_bind_waits(&self, state: &CycleState, pod: &PodInfo, _node: &str) -> bool {
        state.read::<Claims>(NAME).is_some_and(|claims| {
            !claims.waiting.is_empty()
                || claims.special.is_some()
                || claims.allocated.iter().any(|claim| !is_reserved_for(claim, pod))
        })
    }

    async fn pre_bind(&self, state: &CycleState, pod: &PodInfo, node: &str) -> Verdict {
        let Some(claims) = state.read::<Claims>(NAME) else {
            return Ok(());
        };
        for claim in claims
            .allocated
            .iter()
            .filter(|claim| !is_reserved_for(claim, pod))
        {
            self.writer
                .write(claim, None, pod)
                .await
                .map_err(Rejection::error)?;
        }
        for (claim, allocation) in claims.waiting.iter().zip(&claims.allocations) {
            self.writer
                .write(claim, Some(allocation), pod)
                .await
                .map_err(Rejection::error)?;
        }
        if let Some(special) = &claims.special {
            self.bind_special(special, pod).await.map_err(Rejection::error)?;
        }
        // Until the informer shows them, the devices must not be given away again.
        for claim in claims.waiting.iter() {
            let name = claim.metadata.name.as_deref().unwrap_or_default();
            let shown = || {
                let now = self.listers.resource_claims.get(&pod.key.namespace, name);
                now.is_none_or(|now| uid(&now) != uid(claim) || allocation(&now).is_some())
            };
            until(shown).await;
            self.in_flight.lock().remove(uid(claim));
        }
        self.until_ready(claims, pod, node).await
    }

    /// Scores of pods whose claims list alternatives differ from pod to pod: the class cache cannot keep them.
    fn scope(&self, pod: &PodInfo) -> Scope {
        if self.is_extended(pod) {
            return Scope::Opaque;
        }
        if pod.resource_claims.is_empty() {
            return Scope::None;
        }
        let mut wanted = pod.resource_claims.iter().filter_map(|one| one.claim.as_ref());
        let listed = wanted.any(|name| {
            let claim = self.listers.resource_claims.get(&pod.key.namespace, name);
            claim.is_some_and(|claim| has_alternatives(&claim))
        });
        if listed { Scope::Opaque } else { Scope::PerPod }
    }
}

#[cfg(test)]
#[path = "dynamic_resources_tests.rs"]
mod tests;
