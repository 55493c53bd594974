//! What pods ask of the managers. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};

use crate::resources::{QosClass, is_sidecar, milli_value, qos_class, request, value};

/// All containers in the order in which they start; with each, whether it ends before the next one starts.
pub fn containers(pod: &Pod) -> impl Iterator<Item = (&Container, bool)> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| {
        let init = spec.init_containers.iter().flatten();
        init.map(|container| (container, !is_sidecar(container)))
            .chain(spec.containers.iter().map(|container| (container, false)))
    })
}

/// Whether the managers look at the pod at all. COMPAT: pods with resources of their own are for the gate
/// PodLevelResourceManagers, which is off.
pub fn is_pinned(pod: &Pod) -> bool {
    let own = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let sets = |list: &Option<BTreeMap<_, _>>| list.as_ref().is_some_and(|list| !list.is_empty());
    let pod_level = own.is_some_and(|own| sets(&own.requests) || sets(&own.limits));
    qos_class(pod) == QosClass::Guaranteed && !pod_level
}

/// The CPUs that the container is to have for itself. A fraction of a CPU is had in the shared pool.
pub fn exclusive_cpus(pod: &Pod, container: &Container) -> usize {
    if !is_pinned(pod) {
        return 0;
    }
    let milli = request(container.resources.as_ref(), "cpu").map_or(0, milli_value);
    if milli % 1000 == 0 {
        usize::try_from(milli / 1000).unwrap_or(0)
    } else {
        0
    }
}

/// The most that the pod has at a time: what init containers had is used again.
pub fn at_once(pod: &Pod, of: impl Fn(&Container) -> u64) -> u64 {
    let (mut peak, mut lasting) = (0, 0_u64);
    for (container, ends_early) in containers(pod) {
        let amount = of(container);
        if ends_early {
            peak = peak.max(lasting.saturating_add(amount));
        } else {
            lasting = lasting.saturating_add(amount);
        }
    }
    peak.max(lasting)
}

pub fn pod_exclusive_cpus(pod: &Pod) -> usize {
    let cpus = at_once(pod, |container| exclusive_cpus(pod, container) as u64);
    usize::try_from(cpus).unwrap_or(usize::MAX)
}

/// Bytes of memory and huge pages, by resource.
pub fn memory(container: &Container) -> BTreeMap<String, u64> {
    let requests = container.resources.as_ref().and_then(|all| all.requests.as_ref());
    let memory = requests
        .into_iter()
        .flatten()
        .filter(|(name, _)| *name == "memory" || name.starts_with("hugepages-"));
    memory
        .map(|(name, amount)| (name.clone(), u64::try_from(value(amount)).unwrap_or(0)))
        .collect()
}

/// COMPAT: only of resources that a container asks for which is no init container.
pub fn pod_memory(pod: &Pod) -> BTreeMap<String, u64> {
    let spec = pod.spec.iter();
    let names = spec.flat_map(|spec| {
        spec.containers
            .iter()
            .flat_map(|container| memory(container).into_keys())
    });
    names
        .map(|name| {
            let amount = at_once(pod, |container| {
                memory(container).get(&name).copied().unwrap_or(0)
            });
            (name, amount)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_pods_ask_for() {
        let check = |cpu: &str, limit: &str, expected: usize| {
            let pod: Pod =
                serde_json::from_value(json!({"spec": {"containers": [{"name": "c", "resources": {
                "requests": {"cpu": cpu, "memory": "1Mi"}, "limits": {"cpu": limit, "memory": "1Mi"}}}]}}))
                .unwrap();
            let container = &pod.spec.as_ref().unwrap().containers[0];
            assert_eq!(exclusive_cpus(&pod, container), expected, "{cpu} {limit}");
        };
        check("1", "1", 1);
        check("2000m", "2", 2);
        check("1500m", "1500m", 0);
        check("1", "2", 0);
        check("500m", "500m", 0);
    }

    #[test]
    fn a_pod_at_once() {
        let container = |name: &str, cpu: &str, memory: &str| {
            let amounts = json!({"cpu": cpu, "memory": memory});
            json!({"name": name, "resources": {"requests": amounts, "limits": amounts}})
        };
        let mut sidecar = container("side", "1", "1Mi");
        sidecar["restartPolicy"] = json!("Always");
        let mut pod = json!({"spec": {
            "initContainers": [sidecar, container("init", "3", "9Mi")],
            "containers": [container("a", "1", "2Mi"), container("b", "500m", "3Mi")]}});
        let parsed: Pod = serde_json::from_value(pod.clone()).unwrap();
        assert_eq!(pod_exclusive_cpus(&parsed), 4);
        assert_eq!(pod_memory(&parsed), [("memory".to_owned(), 10 << 20)].into());
        pod["spec"]["resources"] =
            json!({"limits": {"cpu": "4", "memory": "20Mi"}, "requests": {"cpu": "4", "memory": "20Mi"}});
        let parsed: Pod = serde_json::from_value(pod).unwrap();
        assert_eq!(pod_exclusive_cpus(&parsed), 0);
    }
}
