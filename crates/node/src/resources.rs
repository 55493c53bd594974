//! The arithmetic of resources: quantities, QoS classes, and what they become in a cgroup (shares, quota,
//! limits, OOM score). Pure; it must not touch a cgroup or the runtime.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use skiff_pods::requests::{spec_limits, spec_requests};

/// The kernel's bounds of `cpu.shares`.
pub const MIN_SHARES: i64 = 2;
const MAX_SHARES: i64 = 262_144;
/// The CFS period in microseconds.
pub const QUOTA_PERIOD: i64 = 100_000;
const MIN_QUOTA: i64 = 1_000;

const GUARANTEED_OOM_SCORE_ADJ: i64 = -997;
const BEST_EFFORT_OOM_SCORE_ADJ: i64 = 1000;

pub type ResourceList = BTreeMap<String, Quantity>;

/// What cannot be read counts as nothing: the API server has validated it before.
pub fn parse(quantity: &Quantity) -> skiff_meta::quantity::Quantity {
    skiff_meta::quantity::Quantity::parse(&quantity.0)
        .unwrap_or_else(|_| skiff_meta::quantity::Quantity::from_units(0))
}

/// The quantity in thousandths, rounded up, as CPU is counted.
pub fn milli_value(quantity: &Quantity) -> i64 {
    parse(quantity).milli_value()
}

/// The quantity in whole units, rounded up, as memory is counted.
pub fn value(quantity: &Quantity) -> i64 {
    parse(quantity).value()
}

fn of<'a>(list: Option<&'a ResourceList>, name: &str) -> Option<&'a Quantity> {
    list.and_then(|list| list.get(name))
}

pub fn request<'a>(resources: Option<&'a ResourceRequirements>, name: &str) -> Option<&'a Quantity> {
    of(resources.and_then(|r| r.requests.as_ref()), name)
}

pub fn limit<'a>(resources: Option<&'a ResourceRequirements>, name: &str) -> Option<&'a Quantity> {
    of(resources.and_then(|r| r.limits.as_ref()), name)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QosClass {
    Guaranteed,
    Burstable,
    BestEffort,
}

impl QosClass {
    pub fn as_str(self) -> &'static str {
        match self {
            QosClass::Guaranteed => "Guaranteed",
            QosClass::Burstable => "Burstable",
            QosClass::BestEffort => "BestEffort",
        }
    }
}

/// The pod's QoS class: as the API server recorded it, else computed the same way.
pub fn qos_class(pod: &Pod) -> QosClass {
    match skiff_pods::qos::of(pod) {
        skiff_pods::qos::GUARANTEED => QosClass::Guaranteed,
        skiff_pods::qos::BURSTABLE => QosClass::Burstable,
        _ => QosClass::BestEffort,
    }
}

pub fn milli_cpu_to_shares(milli: i64) -> i64 {
    if milli == 0 {
        return MIN_SHARES;
    }
    milli
        .saturating_mul(1024)
        .div_euclid(1000)
        .clamp(MIN_SHARES, MAX_SHARES)
}

pub fn milli_cpu_to_quota(milli: i64) -> i64 {
    if milli == 0 {
        return 0;
    }
    (milli.saturating_mul(QUOTA_PERIOD) / 1000).max(MIN_QUOTA)
}

/// The request that shares were made of, as far as they tell.
pub fn shares_to_milli_cpu(shares: i64) -> i64 {
    // Rounded up: making shares rounded down.
    shares.saturating_mul(1000).saturating_add(1023) / 1024
}

pub fn quota_to_milli_cpu(quota: i64, period: i64) -> i64 {
    quota.saturating_mul(1000) / period.max(1)
}

pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

pub fn cpu_request_milli(resources: Option<&ResourceRequirements>, name: &str) -> i64 {
    request(resources, name)
        .or_else(|| limit(resources, name))
        .map_or(0, milli_value)
}

pub fn limit_milli(resources: Option<&ResourceRequirements>, name: &str) -> i64 {
    limit(resources, name).map_or(0, milli_value)
}

pub fn limit_value(resources: Option<&ResourceRequirements>, name: &str) -> i64 {
    limit(resources, name).map_or(0, value)
}

/// What is written into a pod's own cgroup. `None` leaves the kernel's default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupResources {
    pub cpu_shares: i64,
    pub cpu_quota: Option<i64>,
    pub memory_limit: Option<i64>,
}

pub fn pod_cgroup_resources(pod: &Pod) -> CgroupResources {
    let (requests, limits) = match &pod.spec {
        Some(spec) => (spec_requests(spec), spec_limits(spec)),
        None => Default::default(),
    };
    let shares = milli_cpu_to_shares(requests.milli_cpu);
    let quota = milli_cpu_to_quota(limits.milli_cpu);
    let memory = limits.memory;
    match qos_class(pod) {
        QosClass::Guaranteed => CgroupResources {
            cpu_shares: shares,
            cpu_quota: (quota > 0).then_some(quota),
            memory_limit: (memory > 0).then_some(memory),
        },
        // A burstable pod is bounded only if each container is: one without a limit may use all.
        QosClass::Burstable => CgroupResources {
            cpu_shares: shares,
            cpu_quota: (every_container_limits(pod, "cpu") && quota > 0).then_some(quota),
            memory_limit: (every_container_limits(pod, "memory") && memory > 0).then_some(memory),
        },
        QosClass::BestEffort => CgroupResources {
            cpu_shares: MIN_SHARES,
            cpu_quota: None,
            memory_limit: None,
        },
    }
}

fn every_container_limits(pod: &Pod, name: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    if limit_milli(spec.resources.as_ref(), name) > 0 {
        return true;
    }
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .all(|c| limit_milli(c.resources.as_ref(), name) > 0)
}

/// How willing the kernel shall be to kill the container when memory runs out.
pub fn oom_score_adj(pod: &Pod, container: &Container, memory_capacity: i64) -> i64 {
    let spec = pod.spec.as_ref();
    if spec.and_then(|s| s.priority).is_some_and(|p| p >= 2_000_001_000) {
        return GUARANTEED_OOM_SCORE_ADJ;
    }
    match qos_class(pod) {
        QosClass::Guaranteed => return GUARANTEED_OOM_SCORE_ADJ,
        QosClass::BestEffort => return BEST_EFFORT_OOM_SCORE_ADJ,
        QosClass::Burstable => {}
    }
    let capacity = memory_capacity.max(1);
    let score = |requested: i64| 1000 - 1000i64.saturating_mul(requested) / capacity;
    let requested = request(container.resources.as_ref(), "memory").map_or(0, value);
    let mut adjusted = score(requested);
    if is_sidecar(container) {
        let smallest = spec
            .into_iter()
            .flat_map(|s| &s.containers)
            .map(|c| request(c.resources.as_ref(), "memory").map_or(0, value))
            .min()
            .unwrap_or(0);
        adjusted = adjusted.min(score(smallest));
    }
    adjusted.clamp(1000 + GUARANTEED_OOM_SCORE_ADJ, BEST_EFFORT_OOM_SCORE_ADJ - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(value: serde_json::Value) -> Pod {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn quantities() {
        let check = |text: &str, milli: i64, whole: i64| {
            let quantity = Quantity(text.to_owned());
            assert_eq!(
                (milli_value(&quantity), value(&quantity)),
                (milli, whole),
                "{text}"
            );
        };
        check("1", 1000, 1);
        check("100m", 100, 1);
        check("1.5Gi", 1_610_612_736_000, 1_610_612_736);
        check("5n", 1, 1);
        check("1e3", 1_000_000, 1000);
        check("9E", i64::MAX, 9_000_000_000_000_000_000);
        check("nonsense", 0, 0);
    }

    #[test]
    fn cpu_conversions() {
        assert_eq!(milli_cpu_to_shares(0), 2);
        assert_eq!(milli_cpu_to_shares(100), 102);
        assert_eq!(milli_cpu_to_shares(1), 2);
        assert_eq!(milli_cpu_to_quota(200), 20_000);
        assert_eq!(milli_cpu_to_quota(1), 1_000);
        assert_eq!(milli_cpu_to_quota(0), 0);
        for milli in (2..3000).chain([10_000, 64_000, 255_000]) {
            assert_eq!(shares_to_milli_cpu(milli_cpu_to_shares(milli)), milli, "{milli}");
            let quota = milli_cpu_to_quota(milli);
            assert_eq!(quota_to_milli_cpu(quota, QUOTA_PERIOD), milli.max(10), "{milli}");
        }
    }

    #[test]
    fn qos_and_pod_cgroups() {
        let guaranteed = pod(json!({"spec": {"containers": [{"name": "a", "resources":
            {"limits": {"cpu": "1", "memory": "64Mi"}, "requests": {"cpu": "1", "memory": "64Mi"}}}]}}));
        assert_eq!(qos_class(&guaranteed), QosClass::Guaranteed);
        assert_eq!(
            pod_cgroup_resources(&guaranteed),
            CgroupResources {
                cpu_shares: 1024,
                cpu_quota: Some(100_000),
                memory_limit: Some(64 << 20)
            }
        );
        let burstable = pod(json!({"spec": {"containers": [
            {"name": "a", "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "32Mi"}}}, {"name": "b"}]}}));
        assert_eq!(qos_class(&burstable), QosClass::Burstable);
        assert_eq!(
            pod_cgroup_resources(&burstable),
            CgroupResources {
                cpu_shares: 102,
                cpu_quota: None,
                memory_limit: None
            }
        );
        let best_effort = pod(json!({"spec": {"containers": [{"name": "a"}]}}));
        assert_eq!(qos_class(&best_effort), QosClass::BestEffort);
        assert_eq!(pod_cgroup_resources(&best_effort).cpu_shares, 2);
    }

    #[test]
    fn init_containers_count_by_their_peak() {
        let pod = pod(json!({"spec": {
            "initContainers": [
                {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "100m"}}},
                {"name": "i", "resources": {"requests": {"cpu": "500m"}}}],
            "containers": [{"name": "a", "resources": {"requests": {"cpu": "200m"}}}]}}));
        assert_eq!(pod_cgroup_resources(&pod).cpu_shares, milli_cpu_to_shares(600));
    }

    #[test]
    fn oom_scores() {
        let pod = pod(json!({"spec": {"containers": [
            {"name": "a", "resources": {"requests": {"memory": "100Mi"}}}, {"name": "b"}]}}));
        let containers = &pod.spec.as_ref().unwrap().containers;
        assert_eq!(oom_score_adj(&pod, &containers[0], 1000 << 20), 900);
        assert_eq!(oom_score_adj(&pod, &containers[1], 1000 << 20), 999);
    }
}
