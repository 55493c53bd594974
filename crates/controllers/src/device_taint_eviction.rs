//! The device taint eviction controller: a pod that uses a device with a `NoExecute` taint which its claim does not
//! tolerate is deleted, at once or after the toleration's time. DeviceTaintRules are alpha and not looked at.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{Device, DeviceTaint, DeviceToleration, ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, ResourceExt};
use parking_lot::Mutex;
use serde_json::json;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile, reference};

use crate::{Context, Error, seconds_until};

const NO_EXECUTE: &str = "NoExecute";
const SLICES_BY_POOL: &str = "device-taint/pool";
/// Allocated claims by the pools that their devices are of.
const CLAIMS_BY_POOL: &str = "device-taint/claims";
const PODS_BY_CLAIM: &str = "device-taint/pods";

fn pool(driver: &str, pool: &str) -> String {
    format!("{driver}/{pool}")
}

fn slices_by_pool(slice: &ResourceSlice) -> Vec<String> {
    vec![pool(&slice.spec.driver, &slice.spec.pool.name)]
}

fn results(
    claim: &ResourceClaim,
) -> impl Iterator<Item = &k8s_openapi::api::resource::v1::DeviceRequestAllocationResult> {
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    devices
        .into_iter()
        .flat_map(|devices| devices.results.iter().flatten())
}

fn claims_by_pool(claim: &ResourceClaim) -> Vec<String> {
    let pools: HashSet<String> = results(claim)
        .map(|result| pool(&result.driver, &result.pool))
        .collect();
    pools.into_iter().collect()
}

/// The claims that a pod uses: the name, and whether it must belong to the pod.
fn claims_of(pod: &Pod) -> Vec<(String, bool)> {
    let statuses = pod
        .status
        .iter()
        .flat_map(|s| s.resource_claim_statuses.iter().flatten());
    let made = |entry: &str| {
        statuses
            .clone()
            .find(|status| status.name == entry)?
            .resource_claim_name
            .clone()
    };
    let entries = pod
        .spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten());
    entries
        .filter_map(|entry| match &entry.resource_claim_name {
            Some(name) => Some((name.clone(), false)),
            None => made(&entry.name).map(|name| (name, true)),
        })
        .collect()
}

fn pods_by_claim(pod: &Pod) -> Vec<String> {
    let namespace = pod.namespace().unwrap_or_default();
    let claims = claims_of(pod).into_iter();
    claims.map(|(name, _)| format!("{namespace}/{name}")).collect()
}

fn tolerates(toleration: &DeviceToleration, taint: &DeviceTaint) -> bool {
    let key = toleration.key.as_deref().unwrap_or_default();
    let value = |value: &Option<String>| value.clone().unwrap_or_default();
    if toleration.effect.as_deref() != Some(NO_EXECUTE) || !(key.is_empty() || key == taint.key) {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => value(&toleration.value) == value(&taint.value),
        "Exists" => true,
        _ => false,
    }
}

/// When a taint ends the use of a device; `None` if it is tolerated for good.
fn taint_time(taint: &DeviceTaint, tolerations: &[DeviceToleration], now: Timestamp) -> Option<Timestamp> {
    let added = taint.time_added.as_ref().map_or(now, |time| time.0);
    let tolerated: Vec<Option<i64>> = tolerations
        .iter()
        .filter(|toleration| tolerates(toleration, taint))
        .map(|toleration| toleration.toleration_seconds)
        .collect();
    if tolerated.contains(&None) {
        return None;
    }
    let seconds = tolerated
        .into_iter()
        .flatten()
        .map(|seconds| seconds.max(0))
        .min();
    let wait = Duration::from_secs(u64::try_from(seconds.unwrap_or(0)).unwrap_or(0));
    Some(added.checked_add(wait).unwrap_or(Timestamp::MAX))
}

/// When the claim's devices must not be used any more.
fn claim_time<'a>(
    claim: &ResourceClaim,
    device: impl Fn(&str, &str, &str) -> Option<&'a Device>,
    now: Timestamp,
) -> Option<Timestamp> {
    results(claim)
        .filter_map(|result| {
            let device = device(&result.driver, &result.pool, &result.device)?;
            let tolerations = result.tolerations.as_deref().unwrap_or_default();
            let taints = device.taints.iter().flatten();
            let taints = taints.filter(|taint| taint.effect == NO_EXECUTE);
            taints
                .filter_map(|taint| taint_time(taint, tolerations, now))
                .min()
        })
        .min()
}

/// The device in the newest generation of its pool.
fn find_device<'a>(slices: &'a [Arc<ResourceSlice>], name: &str) -> Option<&'a Device> {
    let newest = slices.iter().map(|slice| slice.spec.pool.generation).max()?;
    let newest = slices.iter().filter(|slice| slice.spec.pool.generation == newest);
    newest
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .find(|device| device.name == name)
}

struct DeviceTaints {
    context: Context,
    pods: Informer<Pod>,
    claims: Informer<ResourceClaim>,
    slices: Informer<ResourceSlice>,
    /// The uids of pods whose deletion is planned. A leaf lock.
    planned: Mutex<HashSet<String>>,
}

pub(crate) async fn run(context: Context) {
    let controller = Arc::new(DeviceTaints {
        pods: context.informers.informer(),
        claims: context.informers.informer(),
        slices: context.informers.informer(),
        planned: Mutex::default(),
        context: context.clone(),
    });
    controller.pods.add_index(PODS_BY_CLAIM, pods_by_claim);
    controller.claims.add_index(CLAIMS_BY_POOL, claims_by_pool);
    controller.slices.add_index(SLICES_BY_POOL, slices_by_pool);
    context
        .controller("device-taint-eviction-controller", controller)
        .workers(context.workers())
        .watches(|c| &c.pods, DeviceTaints::woken_by_pod)
        .watches(|c| &c.claims, |c, change| c.pods_of(change.object()))
        .watches(|c| &c.slices, DeviceTaints::woken_by_slice)
        .run()
        .await;
}

impl DeviceTaints {
    fn woken_by_pod(&self, change: &Change<Pod>) -> Option<Key> {
        match change {
            Change::Deleted { last } => {
                self.planned.lock().remove(&last.uid().unwrap_or_default());
                None
            }
            Change::Applied { old, new } => {
                let told = |pod: &Pod| (skiff_pods::state::node_name(pod).to_owned(), claims_of(pod));
                let changed = old.as_ref().is_none_or(|old| told(old) != told(new));
                (changed && !claims_of(new).is_empty()).then(|| Key::of(&**new))
            }
        }
    }

    fn pods_of(&self, claim: &ResourceClaim) -> Vec<Key> {
        let key = format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any());
        let pods = self.pods.by_index(PODS_BY_CLAIM, &key);
        pods.iter().map(|pod| Key::of(&**pod)).collect()
    }

    fn woken_by_slice(&self, change: &Change<ResourceSlice>) -> Vec<Key> {
        let slice = change.object();
        let claims = self
            .claims
            .by_index(CLAIMS_BY_POOL, &pool(&slice.spec.driver, &slice.spec.pool.name));
        claims.iter().flat_map(|claim| self.pods_of(claim)).collect()
    }

    /// When the pod is to be deleted.
    fn due(&self, pod: &Pod, now: Timestamp) -> Option<Timestamp> {
        let uid = pod.uid()?;
        if skiff_pods::state::node_name(pod).is_empty() {
            return None;
        }
        let namespace = pod.namespace().unwrap_or_default();
        let times = claims_of(pod).into_iter().filter_map(|(name, must_own)| {
            let claim = self.claims.get(&namespace, &name)?;
            let mut owners = claim.owner_references().iter();
            let owned = owners.any(|owner| owner.controller == Some(true) && owner.uid == uid);
            let status = claim.status.as_ref()?;
            let reserved = status.reserved_for.iter().flatten().any(|user| user.uid == uid);
            if (must_own && !owned) || !reserved {
                return None;
            }
            let pools: Vec<(String, Vec<Arc<ResourceSlice>>)> = claims_by_pool(&claim)
                .into_iter()
                .map(|pool| {
                    let slices = self.slices.by_index(SLICES_BY_POOL, &pool);
                    (pool, slices)
                })
                .collect();
            let device = |driver: &str, of: &str, name: &str| {
                let wanted = pool(driver, of);
                let (_, slices) = pools.iter().find(|(pool, _)| *pool == wanted)?;
                find_device(slices, name)
            };
            claim_time(&claim, device, now)
        });
        times.min()
    }

    async fn evict(&self, pod: &Pod, key: &Key) -> Result<(), Error> {
        let pods: Api<Pod> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let events = &self.context.events;
        events.event(
            &reference(pod),
            "Normal",
            "DeviceTaintManagerEviction",
            "Marking for deletion".to_owned(),
        );
        let condition = json!({"type": "DisruptionTarget", "status": "True", "reason": "DeletionByDeviceTaintManager",
            "message": "Device Taint manager: deleting due to NoExecute taint", "lastTransitionTime": Timestamp::now().to_string()});
        let patch = json!({"metadata": {"uid": pod.uid()}, "status": {"conditions": [condition]}});
        pods.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(&patch))
            .await?;
        let parameters = DeleteParams {
            preconditions: Some(Preconditions {
                uid: pod.uid(),
                resource_version: None,
            }),
            ..Default::default()
        };
        pods.delete(&key.name, &parameters).await?;
        Ok(())
    }
}

impl Reconcile for DeviceTaints {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(pod) = self.pods.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let uid = pod.uid().unwrap_or_default();
        if pod.metadata.deletion_timestamp.is_some() {
            self.planned.lock().remove(&uid);
            return Ok(Action::Done);
        }
        let now = Timestamp::now();
        let Some(due) = self.due(&pod, now) else {
            if self.planned.lock().remove(&uid) {
                let message = "Cancelling deletion".to_owned();
                let events = &self.context.events;
                events.event(&reference(&*pod), "Normal", "DeviceTaintManagerEviction", message);
            }
            return Ok(Action::Done);
        };
        let left = seconds_until(due, now);
        if !left.is_zero() {
            self.planned.lock().insert(uid);
            return Ok(Action::RequeueAfter(left));
        }
        match self.evict(&pod, &key).await {
            // Gone, or another pod of the name by now.
            Err(Error::Api(error)) if error.is_not_found() || error.is_conflict() => {}
            other => other?,
        }
        self.planned.lock().remove(&uid);
        Ok(Action::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn taints_and_tolerations() {
        let check = |effect: &str, tolerations: Value, expected: Option<i64>| {
            let device: Device = serde_json::from_value(json!({"name": "d", "taints": [
                {"key": "broken", "value": "yes", "effect": effect, "timeAdded": at(100).to_string()}]}))
            .unwrap();
            let claim: ResourceClaim = serde_json::from_value(
                json!({"metadata": {}, "spec": {}, "status": {"allocation": {"devices": {"results": [
                {"request": "r", "driver": "x", "pool": "p", "device": "d", "tolerations": tolerations}]}}}}),
            )
            .unwrap();
            let found = claim_time(&claim, |_, _, name| (name == "d").then_some(&device), at(900));
            assert_eq!(found, expected.map(at), "{tolerations}");
        };
        let toleration = |operator: &str, value: &str, effect: &str, seconds: Value| json!({"key": "broken", "operator": operator, "value": value, "effect": effect, "tolerationSeconds": seconds});
        check("NoExecute", json!([]), Some(100));
        check("NoSchedule", json!([]), None);
        check(
            "NoExecute",
            json!([toleration("Equal", "yes", "NoExecute", Value::Null)]),
            None,
        );
        check(
            "NoExecute",
            json!([toleration("Equal", "no", "NoExecute", Value::Null)]),
            Some(100),
        );
        check(
            "NoExecute",
            json!([toleration("Exists", "", "NoSchedule", Value::Null)]),
            Some(100),
        );
        check(
            "NoExecute",
            json!([toleration("Exists", "", "NoExecute", json!(60))]),
            Some(160),
        );
        check(
            "NoExecute",
            json!([toleration("Exists", "", "NoExecute", json!(-5))]),
            Some(100),
        );
        check(
            "NoExecute",
            json!([
                toleration("Exists", "", "NoExecute", json!(60)),
                toleration("Equal", "yes", "NoExecute", json!(30))
            ]),
            Some(130),
        );
    }

    #[test]
    fn only_the_newest_generation_of_a_pool_counts() {
        let slice = |generation: i64, device: &str| -> Arc<ResourceSlice> {
            let slice = json!({"metadata": {}, "spec": {"driver": "x", "pool": {"name": "p", "generation": generation, "resourceSliceCount": 1},
                "devices": [{"name": device}]}});
            Arc::new(serde_json::from_value(slice).unwrap())
        };
        let slices = [slice(1, "old"), slice(2, "new")];
        assert!(find_device(&slices, "old").is_none());
        assert!(find_device(&slices, "new").is_some());
    }
}
