//! Whether the node takes a pod: enough room, and the operating system it wants. Pure.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use crate::resources::{
    ResourceList, cpu_request_milli, milli_value, pod_total, request_or_limit_value, value,
};

/// Why not; becomes the reason of a failed pod.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: &'static str,
    pub message: String,
}

pub fn admit(pod: &Pod, others: &[Arc<Pod>], allocatable: &ResourceList) -> Result<(), Refusal> {
    if pod
        .spec
        .as_ref()
        .and_then(|s| s.os.as_ref())
        .is_some_and(|os| os.name != "linux")
    {
        return Err(Refusal {
            reason: "PodOSNotSupported",
            message: "Failed to admit pod as the OS field doesn't match node OS".to_owned(),
        });
    }
    let sum = |measure: &dyn Fn(&Pod) -> i64| -> i64 { others.iter().map(|other| measure(other)).sum() };
    let cpu = |pod: &Pod| pod_total(pod, "cpu", cpu_request_milli);
    let memory = |pod: &Pod| pod_total(pod, "memory", request_or_limit_value);
    let storage = |pod: &Pod| pod_total(pod, "ephemeral-storage", request_or_limit_value);
    let capacity =
        |name: &str, measure: fn(&k8s_openapi::apimachinery::pkg::api::resource::Quantity) -> i64| {
            allocatable.get(name).map_or(0, measure)
        };
    let checks = [
        (
            "OutOfpods",
            "pods",
            1,
            i64::try_from(others.len()).unwrap_or(i64::MAX),
            capacity("pods", value),
        ),
        (
            "OutOfcpu",
            "cpu",
            cpu(pod),
            sum(&cpu),
            capacity("cpu", milli_value),
        ),
        (
            "OutOfmemory",
            "memory",
            memory(pod),
            sum(&memory),
            capacity("memory", value),
        ),
        (
            "OutOfephemeral-storage",
            "ephemeral-storage",
            storage(pod),
            sum(&storage),
            capacity("ephemeral-storage", value),
        ),
    ];
    for (reason, resource, requested, used, capacity) in checks {
        // Asking for nothing always fits, even on a node that is over-full.
        if requested > 0 && requested > capacity - used {
            let message = format!(
                "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
            );
            return Err(Refusal { reason, message });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(cpu: &str, memory: &str) -> Pod {
        serde_json::from_value(json!({"spec": {"containers": [
            {"name": "c", "resources": {"requests": {"cpu": cpu, "memory": memory}}}]}}))
        .unwrap()
    }

    #[test]
    fn room() {
        let allocatable: ResourceList = serde_json::from_value(
            json!({"cpu": "2", "memory": "1Gi", "pods": "2", "ephemeral-storage": "1Gi"}),
        )
        .unwrap();
        let check = |new: Pod, others: Vec<Pod>, expected: Option<(&str, &str)>| {
            let others: Vec<Arc<Pod>> = others.into_iter().map(Arc::new).collect();
            let found = admit(&new, &others, &allocatable).err();
            assert_eq!(found.as_ref().map(|r| (r.reason, r.message.as_str())), expected);
        };
        check(pod("2", "1Gi"), vec![], None);
        check(
            pod("600m", "1Mi"),
            vec![pod("1500m", "1Mi")],
            Some((
                "OutOfcpu",
                "Node didn't have enough resource: cpu, requested: 600, used: 1500, capacity: 2000",
            )),
        );
        check(
            pod("1m", "1Gi"),
            vec![pod("1m", "1Mi")],
            Some((
                "OutOfmemory",
                "Node didn't have enough resource: memory, requested: 1073741824, used: 1048576, capacity: 1073741824",
            )),
        );
        check(
            pod("1m", "1Mi"),
            vec![pod("1m", "1Mi"), pod("1m", "1Mi")],
            Some((
                "OutOfpods",
                "Node didn't have enough resource: pods, requested: 1, used: 2, capacity: 2",
            )),
        );
        check(pod("0", "0"), vec![pod("9", "1Gi")], None);
        let windows =
            serde_json::from_value(json!({"spec": {"containers": [], "os": {"name": "windows"}}})).unwrap();
        check(
            windows,
            vec![],
            Some((
                "PodOSNotSupported",
                "Failed to admit pod as the OS field doesn't match node OS",
            )),
        );
    }
}
