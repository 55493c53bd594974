//! Resource claims: devices are allocated for the node that the pod goes to, and reserved for the pod before it is bound.

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, PreFilter, Rejection, Scope, Verdict, scale_to_max};
use crate::listers::Listers;
use crate::node::NodeInfo;
use crate::plugins::device_conditions::{BINDING_TIMEOUT, Readiness, has_conditions, readiness};
use crate::plugins::devices::{Search, Selectors, Taken, current_slices};
use crate::pod::PodInfo;
use async_trait::async_trait;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClass, ResourceClaim, ResourceClaimConsumerReference, ResourceClaimStatus,
    ResourceSlice,
};
use kube::api::{Api, PostParams};
use parking_lot::Mutex;
use skiff_client::ErrorExt;
use skiff_pods::affinity;
use std::collections::HashMap;
use std::sync::Arc;

const NAME: &str = "DynamicResources";
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// Upstream's limit of consumers of one claim.
const MAX_CONSUMERS: usize = 256;
const WRITE_TRIES: usize = 5;
const CONDITIONS_POLL: std::time::Duration = std::time::Duration::from_millis(100);

pub(crate) struct DynamicResources {
    client: kube::Client,
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
    /// For the node that was chosen, one for each of `waiting`.
    allocations: Vec<AllocationResult>,
}

fn allocation(claim: &ResourceClaim) -> Option<&AllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()
}

fn reservations(claim: &ResourceClaim) -> &[ResourceClaimConsumerReference] {
    let status = claim.status.as_ref();
    status
        .and_then(|status| status.reserved_for.as_deref())
        .unwrap_or_default()
}

fn is_reserved_for(claim: &ResourceClaim, pod: &PodInfo) -> bool {
    reservations(claim).iter().any(|one| *one.uid == *pod.uid)
}

fn uid(claim: &ResourceClaim) -> &str {
    claim.metadata.uid.as_deref().unwrap_or_default()
}

impl DynamicResources {
    pub(crate) fn new(client: kube::Client, listers: Arc<Listers>) -> Self {
        Self {
            client,
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

    fn allocate(&self, claims: &Claims, node: &NodeInfo) -> Result<Vec<AllocationResult>, Rejection> {
        if claims.waiting.is_empty() {
            return Ok(Vec::new());
        }
        let slices = current_slices(&claims.slices);
        let mut selectors = self.selectors.lock();
        let search = Search::new(&claims.waiting, &slices, &claims.taken, &mut selectors, node);
        match search.run(&claims.classes) {
            Ok(Some(found)) => Ok(found),
            Ok(None) => Err(Rejection::unresolvable("cannot allocate all claims")),
            Err(problem) => Err(Rejection::unresolvable(problem)),
        }
    }

    /// Waits until the drivers say that the devices are ready for the pod. A claim whose devices fail is given back, so that
    /// the next try may find others.
    async fn until_ready(&self, claims: &Claims, pod: &PodInfo) -> Verdict {
        let deadline = tokio::time::Instant::now() + BINDING_TIMEOUT;
        for claim in claims.allocated.iter().chain(claims.waiting.iter()) {
            let name = claim.metadata.name.as_deref().unwrap_or_default();
            loop {
                let Some(now) = self.listers.resource_claims.get(&pod.key.namespace, name) else {
                    return Err(Rejection::error(format!(
                        "resourceclaim.resource.k8s.io {name:?} not found"
                    )));
                };
                if !has_conditions(&now) {
                    break;
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
                self.deallocate(&now, pod).await;
                return Err(Rejection::error(why));
            }
        }
        Ok(())
    }

    /// Takes the allocation back, unless somebody else uses it.
    async fn deallocate(&self, claim: &ResourceClaim, pod: &PodInfo) {
        if reservations(claim).iter().any(|one| *one.uid != *pod.uid) {
            return;
        }
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &pod.key.namespace);
        let name = claim.metadata.name.clone().unwrap_or_default();
        let mut claim = claim.clone();
        let status = claim.status.get_or_insert_default();
        (status.allocation, status.reserved_for, status.devices) = (None, None, None);
        // A conflict means that the claim has changed: the next try looks at it anew.
        if let Err(error) = api.replace_status(&name, &PostParams::default(), &claim).await {
            tracing::debug!(claim = name, %error, "cannot deallocate the resource claim");
        }
    }

    /// Writes allocation and reservation of one claim.
    async fn write(
        &self,
        claim: &ResourceClaim,
        allocation: Option<&AllocationResult>,
        pod: &PodInfo,
    ) -> Result<(), String> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &pod.key.namespace);
        let name = claim.metadata.name.clone().unwrap_or_default();
        let mut claim = claim.clone();
        for attempt in 1..=WRITE_TRIES {
            match self.write_once(&api, claim, allocation, pod).await {
                Ok(()) => return Ok(()),
                Err(WriteError::Final(message)) => return Err(message),
                Err(WriteError::Api(error)) if error.is_conflict() && attempt < WRITE_TRIES => {
                    let read = api.get(&name).await;
                    claim =
                        read.map_err(|error| format!("get updated claim {name} after conflict: {error}"))?;
                }
                Err(WriteError::Api(error)) => {
                    return Err(format!("add allocation and reservation to claim {name}: {error}"));
                }
            }
        }
        Err(format!("claim {name} keeps changing"))
    }

    async fn write_once(
        &self,
        api: &Api<ResourceClaim>,
        mut claim: ResourceClaim,
        wanted: Option<&AllocationResult>,
        pod: &PodInfo,
    ) -> Result<(), WriteError> {
        let name = claim.metadata.name.clone().unwrap_or_default();
        if claim.metadata.deletion_timestamp.is_some() {
            return Err(WriteError::Final(format!(
                "claim {name} got deleted in the meantime"
            )));
        }
        match (wanted, allocation(&claim).is_some()) {
            (Some(_), true) => {
                return Err(WriteError::Final(format!(
                    "claim {name} got allocated elsewhere in the meantime"
                )));
            }
            (None, false) => {
                return Err(WriteError::Final(format!(
                    "claim {name} got deallocated elsewhere in the meantime"
                )));
            }
            _ => {}
        }
        let finalizers = claim.metadata.finalizers.get_or_insert_default();
        if wanted.is_some() && !finalizers.iter().any(|one| one == FINALIZER) {
            finalizers.push(FINALIZER.to_owned());
            claim = api.replace(&name, &PostParams::default(), &claim).await?;
        }
        let reserved = is_reserved_for(&claim, pod);
        let status = claim.status.get_or_insert_with(ResourceClaimStatus::default);
        if let Some(allocation) = wanted {
            let mut allocation = allocation.clone();
            let now = k8s_openapi::jiff::Timestamp::now();
            allocation.allocation_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now));
            status.allocation = Some(allocation);
        }
        if !reserved {
            status
                .reserved_for
                .get_or_insert_default()
                .push(ResourceClaimConsumerReference {
                    api_group: None,
                    resource: "pods".to_owned(),
                    name: pod.key.name.clone(),
                    uid: pod.uid.to_string(),
                });
        }
        if wanted.is_some() || !reserved {
            api.replace_status(&name, &PostParams::default(), &claim).await?;
        }
        Ok(())
    }
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

enum WriteError {
    Api(kube::Error),
    Final(String),
}

impl From<kube::Error> for WriteError {
    fn from(error: kube::Error) -> Self {
        WriteError::Api(error)
    }
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
        if pod.resource_claims.is_empty() {
            return Ok(PreFilter::Skip);
        }
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
        let taken = if waiting.is_empty() {
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
                allocations: Vec::new(),
            },
        );
        Ok(PreFilter::AllNodes)
    }

    fn filter(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let Some(claims) = state.read::<Claims>(NAME) else {
            return Ok(());
        };
        let reaches = |claim: &Arc<ResourceClaim>| {
            let selector = allocation(claim).and_then(|allocation| allocation.node_selector.as_ref());
            selector.is_none_or(|selector| affinity::node_selector_matches(selector, &node.meta.node))
        };
        if !claims.allocated.iter().all(reaches) {
            return Err(Rejection::unresolvable("resourceclaim not available on the node"));
        }
        self.allocate(claims, node).map(|_| ())
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

    fn score(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> i64 {
        let Some(claims) = state.read::<Claims>(NAME) else {
            return 0;
        };
        let allocated = claims.allocated.iter();
        let before: i64 = allocated
            .filter_map(|claim| Some(score_of(claim, allocation(claim)?)))
            .sum();
        let found = self.allocate(claims, node).unwrap_or_default();
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

    fn reserve(&self, state: &mut CycleState, _pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let Some(claims) = state.read_mut::<Claims>(NAME) else {
            return Ok(());
        };
        let found = self.allocate(claims, node)?;
        let mut in_flight = self.in_flight.lock();
        for (claim, allocation) in claims.waiting.iter().zip(&found) {
            in_flight.insert(uid(claim).to_owned(), allocation.clone());
        }
        drop(in_flight);
        claims.allocations = found;
        Ok(())
    }

    fn unreserve(&self, state: &CycleState, _pod: &PodInfo, _node: &str) {
        if let Some(claims) = state.read::<Claims>(NAME) {
            let mut in_flight = self.in_flight.lock();
            for (claim, _) in claims.waiting.iter().zip(&claims.allocations) {
                in_flight.remove(uid(claim));
            }
        }
    }

    fn pre_bind_waits(&self, state: &CycleState, pod: &PodInfo, _node: &str) -> bool {
        state.read::<Claims>(NAME).is_some_and(|claims| {
            !claims.waiting.is_empty() || claims.allocated.iter().any(|claim| !is_reserved_for(claim, pod))
        })
    }

    async fn pre_bind(&self, state: &CycleState, pod: &PodInfo, _node: &str) -> Verdict {
        let Some(claims) = state.read::<Claims>(NAME) else {
            return Ok(());
        };
        for claim in claims
            .allocated
            .iter()
            .filter(|claim| !is_reserved_for(claim, pod))
        {
            self.write(claim, None, pod).await.map_err(Rejection::error)?;
        }
        for (claim, allocation) in claims.waiting.iter().zip(&claims.allocations) {
            self.write(claim, Some(allocation), pod)
                .await
                .map_err(Rejection::error)?;
        }
        // Until the informer shows them, the devices must not be given away again.
        let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(10);
        for claim in claims.waiting.iter() {
            let name = claim.metadata.name.as_deref().unwrap_or_default();
            let shown = || {
                let now = self.listers.resource_claims.get(&pod.key.namespace, name);
                now.is_none_or(|now| uid(&now) != uid(claim) || allocation(&now).is_some())
            };
            while !shown() && tokio::time::Instant::now() < deadline {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            self.in_flight.lock().remove(uid(claim));
        }
        self.until_ready(claims, pod).await
    }

    /// Scores of pods whose claims list alternatives differ from pod to pod: the class cache cannot keep them.
    fn scope(&self, pod: &PodInfo) -> Scope {
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
mod tests {
    use super::*;
    use crate::fixtures::{node, pod};
    use crate::plugins::testing::unreachable_client;
    use serde_json::{Value, json};
    use skiff_client::Key;

    /// Two GPUs on node a (one tainted), one on node b, and a class for them.
    fn plugin() -> DynamicResources {
        let listers = Arc::new(Listers::default());
        let class = json!({"metadata": {"name": "gpu"}, "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpu.example.com'"}}]}});
        listers.device_classes.set(
            Key::new("", "gpu"),
            Arc::new(serde_json::from_value(class).unwrap()),
        );
        let device = |name: &str, model: &str, taints: Value| json!({"name": name, "attributes": {"model": {"string": model}}, "taints": taints});
        let taint = json!([{"key": "broken", "effect": "NoSchedule"}]);
        for (node, devices) in [
            (
                "a",
                vec![
                    device("g0", "big", json!([])),
                    device("g1", "big", taint),
                    device("g2", "small", json!([])),
                ],
            ),
            ("b", vec![device("g0", "small", json!([]))]),
        ] {
            let slice = json!({"metadata": {"name": node}, "spec": {"driver": "gpu.example.com", "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}, "devices": devices}});
            listers.slices.set(
                Key::new("", node),
                Arc::new(serde_json::from_value(slice).unwrap()),
            );
        }
        DynamicResources::new(unreachable_client(), listers)
    }

    fn add_claim(plugin: &DynamicResources, name: &str, devices: Value, status: Value) {
        let claim = json!({"metadata": {"name": name, "namespace": "default", "uid": name}, "spec": {"devices": devices}, "status": status});
        plugin.listers.resource_claims.set(
            Key::new("default", name),
            Arc::new(serde_json::from_value(claim).unwrap()),
        );
    }

    fn using(names: &[&str]) -> Arc<PodInfo> {
        let claims: Vec<Value> = names
            .iter()
            .map(|name| json!({"name": name, "resourceClaimName": name}))
            .collect();
        pod(&names.join("-"), json!({"resourceClaims": claims}))
    }

    fn exactly(more: Value) -> Value {
        let mut exact = json!({"deviceClassName": "gpu"});
        exact
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        json!({"requests": [{"name": "r", "exactly": exact}]})
    }

    /// On which of the nodes the pod fits, and the state.
    fn feasible(plugin: &DynamicResources, pod: &PodInfo) -> (Vec<&'static str>, CycleState) {
        let mut state = CycleState::default();
        plugin.pre_filter(&mut state, pod, &Cache::default()).unwrap();
        let fits = |name: &&str| {
            plugin
                .filter(&state, pod, &node(name, json!({}), json!({}), json!({})))
                .is_ok()
        };
        (["a", "b", "c"].into_iter().filter(fits).collect(), state)
    }

    #[tokio::test]
    async fn requests_are_matched_with_devices() {
        let check = |devices: Value, expected: &[&str]| {
            let plugin = plugin();
            add_claim(&plugin, "c", devices.clone(), json!({}));
            assert_eq!(feasible(&plugin, &using(&["c"])).0, expected, "{devices}");
        };
        check(exactly(json!({})), &["a", "b"]);
        check(exactly(json!({"count": 2})), &["a"]);
        check(exactly(json!({"count": 3})), &[]);
        check(
            exactly(json!({"count": 3, "tolerations": [{"key": "broken", "operator": "Exists"}]})),
            &["a"],
        );
        check(exactly(json!({"allocationMode": "All"})), &["b"]);
        let model = |model: &str| json!([{"cel": {"expression": format!("device.attributes['gpu.example.com'].model == '{model}'")}}]);
        check(exactly(json!({"selectors": model("big")})), &["a"]);
        check(exactly(json!({"selectors": model("none")})), &[]);
        let sub = |name: &str, model_name: &str| json!({"name": name, "deviceClassName": "gpu", "selectors": model(model_name)});
        check(
            json!({"requests": [{"name": "r", "firstAvailable": [sub("x", "big"), sub("y", "small")]}]}),
            &["a", "b"],
        );
        let mut same = exactly(json!({"count": 2}));
        same["constraints"] = json!([{"matchAttribute": "gpu.example.com/model"}]);
        check(same, &[]);
    }

    #[tokio::test]
    async fn what_is_taken_is_not_given_again() {
        let plugin = plugin();
        for name in ["c", "d"] {
            add_claim(&plugin, name, exactly(json!({})), json!({}));
        }
        let pod = using(&["c"]);
        let (nodes, mut state) = feasible(&plugin, &pod);
        assert_eq!(nodes, ["a", "b"]);
        let b = node("b", json!({}), json!({}), json!({}));
        plugin.reserve(&mut state, &pod, &b).unwrap();
        let claims = state.read::<Claims>(NAME).unwrap();
        let allocation = &claims.allocations[0];
        let result = &allocation.devices.as_ref().unwrap().results.as_ref().unwrap()[0];
        assert_eq!(
            (
                result.pool.as_str(),
                result.device.as_str(),
                result.request.as_str()
            ),
            ("b", "g0", "r")
        );
        let fields = &allocation.node_selector.as_ref().unwrap().node_selector_terms[0].match_fields;
        assert_eq!(fields.as_ref().unwrap()[0].values, Some(vec!["b".to_owned()]));
        assert_eq!(feasible(&plugin, &using(&["d"])).0, ["a"], "in flight");
        let mut again = CycleState::default();
        let busy = plugin
            .pre_filter(&mut again, &using(&["c"]), &Cache::default())
            .unwrap_err();
        assert_eq!(
            busy.message(),
            "resource claim default/c is in the process of being allocated"
        );
        plugin.unreserve(&state, &pod, "b");
        assert_eq!(feasible(&plugin, &using(&["d"])).0, ["a", "b"]);
        // Once it is written, it is where its devices are.
        add_claim(
            &plugin,
            "c",
            exactly(json!({})),
            json!({"allocation": serde_json::to_value(allocation).unwrap()}),
        );
        assert_eq!(feasible(&plugin, &using(&["c"])).0, ["b"]);
        assert_eq!(feasible(&plugin, &using(&["d"])).0, ["a"]);
    }

    #[tokio::test]
    async fn a_device_is_shared_until_its_capacity_is_used_up() {
        let plugin = plugin();
        let device = json!({"name": "g9", "allowMultipleAllocations": true, "attributes": {"model": {"string": "shared"}},
            "capacity": {"memory": {"value": "10Gi", "requestPolicy": {"default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi"}}}}});
        let slice = json!({"metadata": {"name": "z"}, "spec": {"driver": "gpu.example.com", "nodeName": "c",
            "pool": {"name": "z", "generation": 1, "resourceSliceCount": 1}, "devices": [device]}});
        let slice = Arc::new(serde_json::from_value(slice).unwrap());
        plugin.listers.slices.set(Key::new("", "z"), slice);
        let memory = |amount: &str, count: i64| {
            exactly(json!({"capacity": {"requests": {"memory": amount}}, "count": count}))
        };
        let c = node("c", json!({}), json!({}), json!({}));
        let results = |devices: Value| {
            add_claim(&plugin, "c", devices, json!({}));
            let pod = using(&["c"]);
            let (nodes, mut state) = feasible(&plugin, &pod);
            if nodes != ["c"] {
                return None;
            }
            plugin.reserve(&mut state, &pod, &c).unwrap();
            plugin.unreserve(&state, &pod, "c");
            let allocation = &state.read::<Claims>(NAME).unwrap().allocations[0];
            Some(serde_json::to_value(allocation).unwrap()["devices"]["results"].clone())
        };
        assert_eq!(results(memory("11Gi", 1)), None);
        assert_eq!(results(memory("6Gi", 2)), None);
        let two = results(memory("2500Mi", 2)).unwrap();
        for share in [&two[0], &two[1]] {
            assert_eq!(
                (&share["device"], &share["consumedCapacity"]),
                (&json!("g9"), &json!({"memory": "3Gi"}))
            );
        }
        assert!(two[0]["shareID"].is_string() && two[0]["shareID"] != two[1]["shareID"]);

        // Once they are written, the rest is left.
        add_claim(
            &plugin,
            "other",
            memory("2500Mi", 2),
            json!({"allocation": {"devices": {"results": two}}}),
        );
        assert_eq!(results(memory("5Gi", 1)), None);
        let rest = results(memory("4Gi", 1)).unwrap();
        assert_eq!(rest[0]["consumedCapacity"], json!({"memory": "4Gi"}));
        // A capacity that no device has, and one that a device of its own does not have enough of.
        assert_eq!(
            results(exactly(json!({"capacity": {"requests": {"cores": "1"}}}))),
            None
        );
        // Different devices are asked for, and there is one.
        let mut distinct = memory("1Gi", 2);
        distinct["constraints"] = json!([{"distinctAttribute": "gpu.example.com/model"}]);
        assert_eq!(results(distinct), None);
    }

    #[tokio::test]
    async fn a_better_alternative_scores_higher() {
        let plugin = plugin();
        let model = |model: &str| json!([{"cel": {"expression": format!("device.attributes['gpu.example.com'].model == '{model}'")}}]);
        let sub = |name: &str, model_name: &str| json!({"name": name, "deviceClassName": "gpu", "selectors": model(model_name)});
        let listed =
            json!({"requests": [{"name": "r", "firstAvailable": [sub("x", "big"), sub("y", "small")]}]});
        add_claim(&plugin, "c", listed, json!({}));
        add_claim(&plugin, "d", exactly(json!({})), json!({}));
        let pod = using(&["c"]);
        let (nodes, mut state) = feasible(&plugin, &pod);
        assert_eq!(nodes, ["a", "b"]);
        assert!(plugin.pre_score(&mut state, &pod, &[], &Cache::default()));
        let score = |name: &str| plugin.score(&state, &pod, &node(name, json!({}), json!({}), json!({})));
        assert_eq!((score("a"), score("b")), (8, 7));
        assert_eq!(plugin.scope(&pod), Scope::Opaque);
        let plain = using(&["d"]);
        let (_, mut state) = feasible(&plugin, &plain);
        assert!(!plugin.pre_score(&mut state, &plain, &[], &Cache::default()));
        assert_eq!(plugin.scope(&plain), Scope::PerPod);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_waits_for_the_binding_conditions_of_its_devices() {
        let plugin = plugin();
        let device = json!({"name": "g9", "bindsToNode": true, "bindingConditions": ["Attached"],
            "bindingFailureConditions": ["Broken"]});
        let slice = json!({"metadata": {"name": "z"}, "spec": {"driver": "gpu.example.com", "allNodes": true,
            "pool": {"name": "z", "generation": 1, "resourceSliceCount": 1}, "devices": [device]}});
        let slice = Arc::new(serde_json::from_value(slice).unwrap());
        plugin.listers.slices.set(Key::new("", "z"), slice);
        add_claim(&plugin, "c", exactly(json!({})), json!({}));
        let pod = using(&["c"]);
        let (nodes, mut state) = feasible(&plugin, &pod);
        assert_eq!(nodes, ["a", "b", "c"], "the device reaches every node");
        plugin
            .reserve(&mut state, &pod, &node("c", json!({}), json!({}), json!({})))
            .unwrap();
        let claims = state.read::<Claims>(NAME).unwrap().clone();
        let allocation = serde_json::to_value(&claims.allocations[0]).unwrap();
        assert_eq!(
            allocation["devices"]["results"][0]["bindingConditions"],
            json!(["Attached"])
        );
        let field = &allocation["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"][0];
        assert_eq!(field["values"], json!(["c"]), "it binds to the node");
        let told = |name: &str| {
            let condition = json!({"type": name, "status": "True", "reason": "R", "message": "m",
                "lastTransitionTime": "2026-01-01T00:00:00Z"});
            json!({"allocation": allocation, "devices": [
                {"driver": "gpu.example.com", "pool": "z", "device": "g9", "conditions": [condition]}]})
        };
        add_claim(&plugin, "c", exactly(json!({})), told("Other"));
        let waits = tokio::time::timeout(BINDING_TIMEOUT / 2, plugin.until_ready(&claims, &pod)).await;
        assert!(waits.is_err(), "it is not attached yet");
        let late = plugin.until_ready(&claims, &pod).await.unwrap_err();
        assert_eq!(late.message(), "device binding timeout: claim=c");
        add_claim(&plugin, "c", exactly(json!({})), told("Broken"));
        let failed = plugin.until_ready(&claims, &pod).await.unwrap_err();
        assert!(
            failed.message().starts_with("device binding failed: claim=c"),
            "{}",
            failed.message()
        );
        add_claim(&plugin, "c", exactly(json!({})), told("Attached"));
        assert_eq!(plugin.until_ready(&claims, &pod).await, Ok(()));
    }

    #[tokio::test]
    async fn pods_wait_for_their_claims() {
        let plugin = plugin();
        let check = |pod: &PodInfo, expected: &str| {
            let rejection = plugin.pre_enqueue(pod).unwrap_err();
            assert!(rejection.message().contains(expected), "{}", rejection.message());
        };
        check(
            &using(&["none"]),
            "resourceclaim.resource.k8s.io \"none\" not found",
        );
        let template = pod(
            "t",
            json!({"resourceClaims": [{"name": "x", "resourceClaimTemplateName": "y"}]}),
        );
        check(
            &template,
            "waiting for dynamic resource controller to create the resourceclaim",
        );
        add_claim(
            &plugin,
            "c",
            exactly(json!({"deviceClassName": "none"})),
            json!({}),
        );
        assert_eq!(plugin.pre_enqueue(&using(&["c"])), Ok(()));
        let (nodes, state) = feasible(&plugin, &using(&["c"]));
        assert!(nodes.is_empty());
        let rejection = plugin.filter(
            &state,
            &using(&["c"]),
            &node("a", json!({}), json!({}), json!({})),
        );
        assert_eq!(
            rejection.unwrap_err().message(),
            "request r: device class none does not exist"
        );
    }
}
