//! Amounts of resources: what pods ask for and nodes have.

use k8s_openapi::api::core::v1::{Container, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as QuantityText;
use skiff_meta::quantity::Quantity;
use std::collections::BTreeMap;

/// COMPAT: what a container without requests counts as when nodes are scored.
const DEFAULT_MILLI_CPU: i64 = 100;
const DEFAULT_MEMORY: i64 = 200 * 1024 * 1024;

/// CPU in thousandths, everything else in whole units.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Resources {
    pub milli_cpu: i64,
    pub memory: i64,
    pub ephemeral_storage: i64,
    pub others: BTreeMap<String, i64>,
}

type Amounts = BTreeMap<String, QuantityText>;

impl Resources {
    pub fn read(amounts: &Amounts) -> Self {
        let mut read = Self::default();
        for (name, amount) in amounts {
            // The API server has checked quantities; one that does not parse counts as nothing.
            let Ok(quantity) = Quantity::parse(&amount.0) else {
                continue;
            };
            match name.as_str() {
                "cpu" => read.milli_cpu = quantity.milli_value(),
                "memory" => read.memory = quantity.value(),
                "ephemeral-storage" => read.ephemeral_storage = quantity.value(),
                _ => {
                    read.others.insert(name.clone(), quantity.value());
                }
            }
        }
        read
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
            let entry = self.others.entry(name.clone()).or_default();
            *entry = with(*entry, *amount);
        }
    }
}

fn requests(resources: Option<&ResourceRequirements>) -> Resources {
    resources
        .and_then(|r| r.requests.as_ref())
        .map(Resources::read)
        .unwrap_or_default()
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// What a pod asks for: its containers and sidecars together, or the hungriest moment of its init containers
/// (sidecars started so far included), whichever is more; pod-level requests override; then the overhead.
pub fn pod_requests(spec: &PodSpec) -> Resources {
    let mut total = Resources::default();
    for container in &spec.containers {
        total.add(&requests(container.resources.as_ref()));
    }
    let mut sidecars = Resources::default();
    let mut starting = Resources::default();
    for container in spec.init_containers.iter().flatten() {
        let own = requests(container.resources.as_ref());
        if is_sidecar(container) {
            sidecars.add(&own);
            starting.raise_to(&sidecars);
        } else {
            let mut moment = sidecars.clone();
            moment.add(&own);
            starting.raise_to(&moment);
        }
    }
    total.add(&sidecars);
    total.raise_to(&starting);
    if let Some(pod_level) = spec.resources.as_ref().and_then(|r| r.requests.as_ref()) {
        let read = Resources::read(pod_level);
        if pod_level.contains_key("cpu") {
            total.milli_cpu = read.milli_cpu;
        }
        if pod_level.contains_key("memory") {
            total.memory = read.memory;
        }
    }
    if let Some(overhead) = &spec.overhead {
        total.add(&Resources::read(overhead));
    }
    total
}

/// CPU and memory for scoring: containers that ask for nothing count as a little.
pub fn scoring_requests(spec: &PodSpec) -> (i64, i64) {
    let (mut cpu, mut memory) = (0, 0);
    for container in &spec.containers {
        let own = requests(container.resources.as_ref());
        cpu += if own.milli_cpu == 0 {
            DEFAULT_MILLI_CPU
        } else {
            own.milli_cpu
        };
        memory += if own.memory == 0 {
            DEFAULT_MEMORY
        } else {
            own.memory
        };
    }
    (cpu, memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn init_containers_count_by_their_hungriest_moment() {
        let container = |cpu: &str, restart: Option<&str>| json!({"name": "c", "restartPolicy": restart, "resources": {"requests": {"cpu": cpu, "memory": "1Mi"}}});
        let check = |containers: Vec<_>, inits: Vec<_>, milli_cpu: i64| {
            let spec: PodSpec =
                serde_json::from_value(json!({"containers": containers, "initContainers": inits})).unwrap();
            assert_eq!(pod_requests(&spec).milli_cpu, milli_cpu);
        };
        check(vec![container("100m", None), container("1", None)], vec![], 1100);
        check(vec![container("100m", None)], vec![container("2", None)], 2000);
        check(
            vec![container("100m", None)],
            vec![container("1", Some("Always"))],
            1100,
        );
        check(
            vec![container("100m", None)],
            vec![container("1", Some("Always")), container("3", None)],
            4000,
        );
    }
}
