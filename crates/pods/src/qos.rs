//! The QoS class of a pod.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as QuantityText;
use skiff_meta::quantity::Quantity;
use std::collections::BTreeMap;

pub const GUARANTEED: &str = "Guaranteed";
pub const BURSTABLE: &str = "Burstable";
pub const BEST_EFFORT: &str = "BestEffort";

/// CPU and memory, the resources that the class is made of; `None` is not set or not above zero.
#[derive(Default)]
struct Sums([Option<Quantity>; 2]);

impl Sums {
    /// Adds what is above zero; true if both CPU and memory were.
    fn add(&mut self, amounts: Option<&BTreeMap<String, QuantityText>>) -> bool {
        let mut both = true;
        for (sum, name) in self.0.iter_mut().zip(["cpu", "memory"]) {
            let amount = amounts
                .and_then(|amounts| amounts.get(name))
                .and_then(|text| Quantity::parse(&text.0).ok())
                .filter(|amount| !amount.is_zero() && !amount.is_negative());
            match amount {
                Some(amount) => *sum = Some(sum.map_or(amount, |sum| sum.plus(&amount))),
                None => both = false,
            }
        }
        both
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }
}

/// The class that the API server recorded, or what the spec says.
pub fn of(pod: &Pod) -> &str {
    let recorded = pod
        .status
        .as_ref()
        .and_then(|status| status.qos_class.as_deref())
        .unwrap_or_default();
    if recorded.is_empty() {
        pod.spec.as_ref().map_or(BEST_EFFORT, compute)
    } else {
        recorded
    }
}

/// Guaranteed if every container has limits for CPU and memory that equal its requests, BestEffort if no container has
/// any, Burstable otherwise. With pod-level resources these decide instead of the containers'.
pub fn compute(spec: &PodSpec) -> &'static str {
    let (mut requests, mut limits) = (Sums::default(), Sums::default());
    let mut guaranteed = true;
    if let Some(ResourceRequirements {
        requests: pod_requests,
        limits: pod_limits,
        ..
    }) = &spec.resources
    {
        requests.add(pod_requests.as_ref());
        if pod_limits.as_ref().is_some_and(|limits| !limits.is_empty()) {
            guaranteed &= limits.add(pod_limits.as_ref());
        }
    } else {
        let containers = spec
            .containers
            .iter()
            .chain(spec.init_containers.iter().flatten());
        for Container { resources, .. } in containers {
            let resources = resources.as_ref();
            requests.add(resources.and_then(|r| r.requests.as_ref()));
            guaranteed &= limits.add(resources.and_then(|r| r.limits.as_ref()));
        }
    }
    if requests.is_empty() && limits.is_empty() {
        return BEST_EFFORT;
    }
    if guaranteed && requests.0 == limits.0 {
        GUARANTEED
    } else {
        BURSTABLE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn classes() {
        let check = |spec: Value, expected: &str| {
            let parsed: PodSpec = serde_json::from_value(spec.clone()).unwrap();
            assert_eq!(compute(&parsed), expected, "{spec}");
        };
        let container = |requests: Value, limits: Value| json!({"name": "c", "resources": {"requests": requests, "limits": limits}});
        let (full, half) = (
            json!({"cpu": "1", "memory": "1Gi"}),
            json!({"cpu": "500m", "memory": "1Gi"}),
        );
        check(json!({"containers": [{"name": "c"}]}), BEST_EFFORT);
        check(
            json!({"containers": [container(json!({"cpu": "0"}), json!({}))]}),
            BEST_EFFORT,
        );
        check(
            json!({"containers": [container(full.clone(), full.clone())]}),
            GUARANTEED,
        );
        check(
            json!({"containers": [container(json!({"cpu": "1000m", "memory": "1Gi"}), full.clone())]}),
            GUARANTEED,
        );
        check(
            json!({"containers": [container(half.clone(), full.clone())]}),
            BURSTABLE,
        );
        check(
            json!({"containers": [container(full.clone(), full.clone())], "initContainers": [{"name": "i"}]}),
            BURSTABLE,
        );
        check(
            json!({"containers": [container(json!({}), json!({"cpu": "1"}))]}),
            BURSTABLE,
        );
        // At pod level.
        check(
            json!({"containers": [{"name": "c"}], "resources": {"requests": full, "limits": full}}),
            GUARANTEED,
        );
        check(
            json!({"containers": [container(full.clone(), full.clone())], "resources": {"requests": half}}),
            BURSTABLE,
        );
    }
}
