//! What a pod requests, and its limits: containers, init containers, sidecars, overhead, pod-level resources and what a
//! resize in place has allocated.

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as QuantityText;
use skiff_meta::quantity::Quantity;
use std::collections::BTreeMap;

/// COMPAT: what a container that requests nothing counts as where nodes are scored.
pub const DEFAULT_MILLI_CPU: i64 = 100;
pub const DEFAULT_MEMORY: i64 = 200 * 1024 * 1024;

/// Amounts of resources: CPU in thousandths, everything else in whole units. What is absent is zero.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Resources {
    pub milli_cpu: i64,
    pub memory: i64,
    pub ephemeral_storage: i64,
    pub others: BTreeMap<String, i64>,
}

type Amounts = BTreeMap<String, QuantityText>;

impl Resources {
    /// Quantities were checked by the API server; one that does not parse counts as nothing.
    pub fn read(amounts: &Amounts) -> Self {
        let mut read = Self::default();
        for (name, amount) in amounts {
            read.set(name, parse(name, amount));
        }
        read
    }

    pub fn get(&self, name: &str) -> i64 {
        match name {
            "cpu" => self.milli_cpu,
            "memory" => self.memory,
            "ephemeral-storage" => self.ephemeral_storage,
            _ => self.others.get(name).copied().unwrap_or(0),
        }
    }

    pub fn set(&mut self, name: &str, amount: i64) {
        match name {
            "cpu" => self.milli_cpu = amount,
            "memory" => self.memory = amount,
            "ephemeral-storage" => self.ephemeral_storage = amount,
            _ => {
                self.others.insert(name.to_owned(), amount);
            }
        }
    }

    pub fn add(&mut self, other: &Self) {
        self.combine(other, i64::saturating_add);
    }

    pub fn subtract(&mut self, other: &Self) {
        self.combine(other, i64::saturating_sub);
    }

    /// The larger of each.
    pub fn raise_to(&mut self, other: &Self) {
        self.combine(other, i64::max);
    }

    fn combine(&mut self, other: &Self, with: fn(i64, i64) -> i64) {
        self.milli_cpu = with(self.milli_cpu, other.milli_cpu);
        self.memory = with(self.memory, other.memory);
        self.ephemeral_storage = with(self.ephemeral_storage, other.ephemeral_storage);
        for (name, amount) in &other.others {
            match self.others.get_mut(name) {
                Some(entry) => *entry = with(*entry, *amount),
                None => {
                    self.others.insert(name.clone(), with(0, *amount));
                }
            }
        }
    }
}

fn parse(name: &str, amount: &QuantityText) -> i64 {
    let Ok(quantity) = Quantity::parse(&amount.0) else {
        return 0;
    };
    if name == "cpu" {
        quantity.milli_value()
    } else {
        quantity.value()
    }
}

/// Which of the two lists of a container.
#[derive(Clone, Copy, PartialEq, Eq)]
enum List {
    Requests,
    Limits,
}

impl List {
    fn of(self, resources: Option<&ResourceRequirements>) -> Option<&Amounts> {
        let resources = resources?;
        match self {
            List::Requests => resources.requests.as_ref(),
            List::Limits => resources.limits.as_ref(),
        }
    }
}

/// How [`total`] counts.
struct Count<'a> {
    list: List,
    pod: Option<&'a Pod>,
    /// For containers that do not name CPU or memory.
    defaults: Option<(i64, i64)>,
}

/// What the pod requests, overhead included: what its node must have free. Of a pod that is being resized in place it
/// is the most of what is asked, what is allocated and what is in effect.
pub fn pod_requests(pod: &Pod) -> Resources {
    let Some(spec) = &pod.spec else {
        return Resources::default();
    };
    total(
        spec,
        &Count {
            list: List::Requests,
            pod: Some(pod),
            defaults: None,
        },
    )
}

/// What the spec alone requests, overhead included.
pub fn spec_requests(spec: &PodSpec) -> Resources {
    total(
        spec,
        &Count {
            list: List::Requests,
            pod: None,
            defaults: None,
        },
    )
}

/// The limits of the spec alone. Overhead is added to limits that are set.
pub fn spec_limits(spec: &PodSpec) -> Resources {
    total(
        spec,
        &Count {
            list: List::Limits,
            pod: None,
            defaults: None,
        },
    )
}

/// The pod's limits. Overhead is added to limits that are set.
pub fn pod_limits(pod: &Pod) -> Resources {
    let Some(spec) = &pod.spec else {
        return Resources::default();
    };
    total(
        spec,
        &Count {
            list: List::Limits,
            pod: Some(pod),
            defaults: None,
        },
    )
}

/// CPU (in thousandths) and memory of the pod where nodes are scored: containers without a request count as a little.
pub fn scoring_requests(pod: &Pod) -> (i64, i64) {
    let Some(spec) = &pod.spec else { return (0, 0) };
    // With pod-level requests only what these leave open falls back to the defaults.
    let defaults = if pod_level(spec, List::Requests).is_some() {
        let known = pod_requests(pod);
        (
            if known.milli_cpu == 0 {
                DEFAULT_MILLI_CPU
            } else {
                0
            },
            if known.memory == 0 { DEFAULT_MEMORY } else { 0 },
        )
    } else {
        (DEFAULT_MILLI_CPU, DEFAULT_MEMORY)
    };
    let counted = total(
        spec,
        &Count {
            list: List::Requests,
            pod: Some(pod),
            defaults: Some(defaults),
        },
    );
    (counted.milli_cpu, counted.memory)
}

fn is_pod_level(name: &str) -> bool {
    matches!(name, "cpu" | "memory") || name.starts_with("hugepages-")
}

fn pod_level(spec: &PodSpec, list: List) -> Option<&Amounts> {
    let amounts = list.of(spec.resources.as_ref())?;
    amounts.keys().any(|name| is_pod_level(name)).then_some(amounts)
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

fn total(spec: &PodSpec, count: &Count) -> Resources {
    let mut total = Resources::default();
    for container in &spec.containers {
        total.add(&of_container(container, count, true));
    }
    // The hungriest moment of the start: an init container beside the sidecars that were started before it.
    let mut sidecars = Resources::default();
    let mut starting = Resources::default();
    for container in spec.init_containers.iter().flatten() {
        let mut own = of_container(container, count, is_sidecar(container));
        if is_sidecar(container) {
            total.add(&own);
            sidecars.add(&own);
            starting.raise_to(&sidecars);
        } else {
            own.add(&sidecars);
            starting.raise_to(&own);
        }
    }
    total.raise_to(&starting);
    if let Some(level) = pod_level(spec, count.list) {
        let status = count.pod.and_then(|pod| pod.status.as_ref());
        let actuated = status.and_then(|status| status.resources.as_ref());
        let allocated = status.and_then(|status| status.allocated_resources.as_ref());
        for (name, amount) in level.iter().filter(|(name, _)| is_pod_level(name)) {
            let amount = match (actuated, count.pod) {
                (Some(actuated), Some(pod)) => {
                    effective(pod, name, Some(amount), count.list, actuated, allocated)
                }
                _ => parse(name, amount),
            };
            total.set(name, amount);
        }
    }
    for (name, amount) in spec.overhead.iter().flatten() {
        let have = total.get(name);
        if count.list == List::Requests || have != 0 {
            total.set(name, have.saturating_add(parse(name, amount)));
        }
    }
    total
}

fn of_container(container: &Container, count: &Count, resizable: bool) -> Resources {
    let spec = count.list.of(container.resources.as_ref());
    let status = count
        .pod
        .filter(|_| resizable)
        .and_then(|pod| Some((pod, status_of(pod, &container.name)?)));
    let mut read = match status.and_then(|(pod, status)| Some((pod, status, status.resources.as_ref()?))) {
        Some((pod, status, actuated)) => {
            let allocated = status.allocated_resources.as_ref();
            let mut read = Resources::default();
            let names = spec.into_iter().flatten().map(|(name, _)| name);
            let names = names
                .chain(
                    count
                        .list
                        .of(Some(actuated))
                        .into_iter()
                        .flatten()
                        .map(|(n, _)| n),
                )
                .chain(allocated.into_iter().flatten().map(|(name, _)| name));
            for name in names {
                let text = spec.and_then(|spec| spec.get(name));
                read.set(name, effective(pod, name, text, count.list, actuated, allocated));
            }
            read
        }
        None => spec.map(Resources::read).unwrap_or_default(),
    };
    if let Some((cpu, memory)) = count.defaults {
        let has = |name: &str| spec.is_some_and(|spec| spec.contains_key(name));
        if !has("cpu") && read.milli_cpu == 0 {
            read.milli_cpu = cpu;
        }
        if !has("memory") && read.memory == 0 {
            read.memory = memory;
        }
    }
    read
}

fn status_of<'a>(pod: &'a Pod, name: &str) -> Option<&'a ContainerStatus> {
    let status = pod.status.as_ref()?;
    let all = status.container_statuses.iter().flatten();
    all.chain(status.init_container_statuses.iter().flatten())
        .find(|status| status.name == name)
}

/// The most of what is asked, in effect and (of requests) allocated. What a node has declared infeasible is not asked.
fn effective(
    pod: &Pod,
    name: &str,
    spec: Option<&QuantityText>,
    list: List,
    actuated: &ResourceRequirements,
    allocated: Option<&Amounts>,
) -> i64 {
    let amount = |text: Option<&QuantityText>| text.map_or(0, |text| parse(name, text));
    let mut most = amount(list.of(Some(actuated)).and_then(|amounts| amounts.get(name)));
    if list == List::Requests {
        most = most.max(amount(allocated.and_then(|amounts| amounts.get(name))));
    }
    if resize_is_infeasible(pod) {
        most
    } else {
        most.max(amount(spec))
    }
}

/// The node said that it can never give what a resize asks for.
pub fn resize_is_infeasible(pod: &Pod) -> bool {
    crate::state::condition(pod, "PodResizePending")
        .is_some_and(|condition| condition.reason.as_deref() == Some("Infeasible"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(spec: Value, status: Value) -> Pod {
        serde_json::from_value(json!({"spec": spec, "status": status})).unwrap()
    }

    fn container(name: &str, cpu: &str, restart: Option<&str>) -> Value {
        json!({"name": name, "restartPolicy": restart, "resources": {
            "requests": {"cpu": cpu, "memory": "1Mi"}, "limits": {"cpu": cpu}}})
    }

    #[test]
    fn init_containers_count_by_their_hungriest_moment() {
        let check = |containers: Vec<Value>, inits: Vec<Value>, milli_cpu: i64| {
            let pod = pod(
                json!({"containers": containers, "initContainers": inits}),
                json!({}),
            );
            assert_eq!(pod_requests(&pod).milli_cpu, milli_cpu);
            assert_eq!(pod_limits(&pod).milli_cpu, milli_cpu);
        };
        let always = Some("Always");
        check(
            vec![container("a", "100m", None), container("b", "1", None)],
            vec![],
            1100,
        );
        check(
            vec![container("a", "100m", None)],
            vec![container("i", "2", None)],
            2000,
        );
        check(
            vec![container("a", "100m", None)],
            vec![container("i", "1", always)],
            1100,
        );
        check(
            vec![container("a", "100m", None)],
            vec![container("i", "1", always), container("j", "3", None)],
            4000,
        );
        check(
            vec![container("a", "100m", None)],
            vec![container("i", "3", None), container("j", "1", always)],
            3000,
        );
    }

    #[test]
    fn pod_level_and_overhead() {
        let spec = json!({"containers": [container("a", "1", None)], "overhead": {"cpu": "50m", "memory": "1Mi"},
            "resources": {"requests": {"cpu": "3"}, "limits": {"cpu": "4"}}});
        let pod = pod(spec, json!({}));
        let mib = 1024 * 1024;
        let requests = pod_requests(&pod);
        assert_eq!((requests.milli_cpu, requests.memory), (3050, 2 * mib));
        let limits = pod_limits(&pod);
        assert_eq!(
            (limits.milli_cpu, limits.memory),
            (4050, 0),
            "no overhead where there is no limit"
        );
    }

    #[test]
    fn a_resize_counts_by_the_most_of_all() {
        let check = |asked: &str, allocated: &str, actuated: &str, condition: Value, milli_cpu: i64| {
            let status = json!({"conditions": condition, "containerStatuses": [{
                "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "allocatedResources": {"cpu": allocated}, "resources": {"requests": {"cpu": actuated}}}]});
            let pod = pod(json!({"containers": [container("a", asked, None)]}), status);
            assert_eq!(pod_requests(&pod).milli_cpu, milli_cpu);
        };
        let infeasible = json!([{"type": "PodResizePending", "status": "True", "reason": "Infeasible"}]);
        check("1", "1", "1", json!([]), 1000);
        check("2", "1", "1", json!([]), 2000);
        check("1", "3", "2", json!([]), 3000);
        check("9", "1", "2", infeasible, 2000);
    }

    #[test]
    fn containers_without_requests_count_when_scoring() {
        let check = |spec: Value, expected: (i64, i64)| {
            assert_eq!(
                scoring_requests(&pod(spec.clone(), json!({}))),
                expected,
                "{spec}"
            );
        };
        let mib = 1024 * 1024;
        check(json!({"containers": [{"name": "a"}]}), (100, 200 * mib));
        check(
            json!({"containers": [{"name": "a"}, container("b", "1", None)]}),
            (1100, 201 * mib),
        );
        check(
            json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "0"}}}]}),
            (0, 200 * mib),
        );
        check(
            json!({"containers": [{"name": "a"}, {"name": "b"}], "resources": {"requests": {"cpu": "1"}}}),
            (1000, 400 * mib),
        );
    }
}
