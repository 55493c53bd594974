//! Which pod is ended when the node is short of something, and what it is told. Pure.

use std::cmp::Reverse;

use k8s_openapi::api::core::v1::Pod;
use skiff_cri::v1;
use skiff_pods::requests::pod_requests;

use super::thresholds::{Bytes, Observation, Signal, Threshold};
use crate::resources::{self, ResourceList};
use crate::server::{PodUsage, number};

/// What a pod uses; `None` is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub memory: Option<i64>,
    /// Writable layers, logs and emptyDir volumes.
    pub disk: Option<i64>,
    pub inodes: Option<i64>,
    pub processes: Option<i64>,
    /// Of each container: its name, memory, and writable layer with logs.
    pub containers: Vec<(String, Option<i64>, Option<i64>)>,
}

impl From<&PodUsage> for Usage {
    fn from(pod: &PodUsage) -> Self {
        let bytes =
            |value: &Option<v1::UInt64Value>| number(value).and_then(|bytes| i64::try_from(bytes).ok());
        let working_set = |memory: &Option<v1::MemoryUsage>| bytes(&memory.as_ref()?.working_set_bytes);
        let layers = pod.containers.iter().map(|one| one.writable_layer.as_ref());
        let inodes = layers
            .filter_map(|layer| bytes(&layer?.inodes_used))
            .reduce(i64::saturating_add);
        Usage {
            memory: working_set(&pod.memory),
            disk: None,
            inodes,
            processes: pod.process_count.and_then(|count| i64::try_from(count).ok()),
            containers: pod
                .containers
                .iter()
                .map(|one| {
                    let layer = one.writable_layer.as_ref();
                    let written = layer.and_then(|layer| bytes(&layer.used_bytes));
                    (one.name.clone(), working_set(&one.memory), written)
                })
                .collect(),
        }
    }
}

impl Usage {
    fn of(&self, signal: Signal) -> Option<i64> {
        match signal {
            Signal::Memory | Signal::AllocatableMemory => self.memory,
            Signal::NodeFs | Signal::ImageFs => self.disk,
            Signal::NodeFsInodes | Signal::ImageFsInodes => self.inodes,
            Signal::Pids => self.processes,
        }
    }
}

fn request(signal: Signal, pod: &Pod) -> i64 {
    match signal {
        Signal::Memory | Signal::AllocatableMemory | Signal::NodeFs | Signal::ImageFs => {
            pod_requests(pod).get(signal.resource())
        }
        _ => 0,
    }
}

/// Sorts so that the pod to end is the first: those that use more than they asked for, then by priority, then by how
/// much more they use. Of processes nobody asks for an amount.
pub fn rank<T>(signal: Signal, pods: &mut [(T, Usage)], pod_of: impl Fn(&T) -> std::sync::Arc<Pod>) {
    pods.sort_by_cached_key(|(one, usage)| {
        let pod = pod_of(one);
        let priority = pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
        let request = request(signal, &pod);
        // One that nobody can tell anything of goes first.
        let beyond = usage
            .of(signal)
            .map_or(i64::MAX, |used| used.saturating_sub(request));
        let exceeds = signal != Signal::Pids && beyond > 0;
        (Reverse(exceeds), priority, Reverse(beyond))
    });
}

/// COMPAT: upstream's words; they end in a blank.
pub fn message(threshold: &Threshold, observed: Option<Observation>, pod: &Pod, usage: &Usage) -> String {
    let resource = threshold.signal.resource();
    let mut message = format!("The node was low on resource: {resource}. ");
    let in_bytes = matches!(
        threshold.signal,
        Signal::Memory | Signal::AllocatableMemory | Signal::NodeFs | Signal::ImageFs
    );
    let shown = |amount: i64| match in_bytes {
        true => Bytes(amount).to_string(),
        false => amount.to_string(),
    };
    if let Some(observed) = observed {
        let wanted = threshold.amount.of(observed.capacity);
        message.push_str(&format!(
            "Threshold quantity: {}, available: {}. ",
            shown(wanted),
            shown(observed.available)
        ));
    }
    for (name, memory, disk) in &usage.containers {
        let used = match threshold.signal {
            Signal::Memory | Signal::AllocatableMemory => *memory,
            Signal::NodeFs | Signal::ImageFs => *disk,
            _ => None,
        };
        let (Some(used), Some(requests)) = (used, requests_of(pod, name)) else {
            continue;
        };
        let asked = requests.get(resource);
        if used > asked.map_or(0, resources::value) {
            let asked = asked.map_or_else(|| "0".to_owned(), |asked| asked.0.clone());
            message.push_str(&format!(
                "Container {name} was using {}, request is {asked}, has larger consumption of {resource}. ",
                shown(used)
            ));
        }
    }
    message
}

/// What a container asks for; `None` if the pod has no such container.
fn requests_of(pod: &Pod, container: &str) -> Option<ResourceList> {
    let spec = pod.spec.as_ref()?;
    let mut containers = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten());
    let container = containers.find(|one| one.name == container)?;
    let resources = container.resources.as_ref();
    Some(resources.and_then(|all| all.requests.clone()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::super::thresholds::{Amount, Thresholds};
    use super::*;
    use serde_json::json;
    use std::sync::Arc;

    fn pod(name: &str, memory: &str, priority: i32) -> Arc<Pod> {
        let requests = if memory.is_empty() {
            json!({})
        } else {
            json!({"memory": memory})
        };
        let pod = json!({"metadata": {"name": name}, "spec": {"priority": priority,
            "containers": [{"name": "c", "resources": {"requests": requests}}]}});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn using(memory: i64) -> Usage {
        Usage {
            memory: Some(memory << 20),
            processes: Some(memory),
            containers: vec![("c".to_owned(), Some(memory << 20), None)],
            ..Usage::default()
        }
    }

    #[test]
    fn who_uses_more_than_asked_for_goes_first() {
        let order = |signal: Signal, pods: &[(Arc<Pod>, Usage)]| -> Vec<String> {
            let mut pods = pods.to_vec();
            rank(signal, &mut pods, Clone::clone);
            let names = pods.iter().map(|(pod, _)| pod.metadata.name.clone());
            names.map(Option::unwrap_or_default).collect()
        };
        let pods = [
            (pod("within", "100Mi", 0), using(90)),
            (pod("little", "", 0), using(10)),
            (pod("much", "50Mi", 0), using(100)),
            (pod("important", "", 1000), using(500)),
            (pod("unknown", "1Gi", 0), Usage::default()),
        ];
        assert_eq!(
            order(Signal::Memory, &pods),
            ["unknown", "much", "little", "important", "within"]
        );
        assert_eq!(
            order(Signal::Pids, &pods),
            ["unknown", "much", "within", "little", "important"]
        );
    }

    #[test]
    fn pods_are_told_why() {
        let threshold = Thresholds::default().list[0].clone();
        let observed = Observation {
            available: 50 << 20,
            capacity: 1 << 30,
        };
        assert_eq!(
            message(&threshold, Some(observed), &pod("p", "", 0), &using(10)),
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. \
             Container c was using 10Mi, request is 0, has larger consumption of memory. "
        );
        assert_eq!(
            message(&threshold, None, &pod("p", "20Mi", 0), &using(10)),
            "The node was low on resource: memory. "
        );
        let inodes = Threshold {
            signal: Signal::NodeFsInodes,
            amount: Amount::Share(0.5),
            ..threshold
        };
        let observed = Observation {
            available: 3,
            capacity: 10,
        };
        assert_eq!(
            message(&inodes, Some(observed), &pod("p", "", 0), &using(10)),
            "The node was low on resource: inodes. Threshold quantity: 5, available: 3. "
        );
    }
}
