//! Extended resources that a DeviceClass backs: which containers of a pod ask for them, and the requests of the
//! ResourceClaim that the scheduler creates in their place. Pure.

use crate::node::NodeInfo;
use crate::pod::PodInfo;
use k8s_openapi::api::core::v1::{Container, ContainerExtendedResourceRequest, PodSpec};
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceRequest, ExactDeviceRequest, ResourceClaim, ResourceClaimSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use skiff_meta::quantity::Quantity;
use std::collections::BTreeMap;

/// A resource of this prefix and the name of a class is backed by that class, whatever it says.
pub(crate) const IMPLICIT_PREFIX: &str = "deviceclass.resource.kubernetes.io/";
/// Marks the claim that the scheduler creates for a pod.
pub(crate) const CLAIM_ANNOTATION: &str = "resource.kubernetes.io/extended-resource-claim";

/// What one container asks of resources that a DeviceClass may back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContainerDemand {
    /// Its place in the list of init containers and containers.
    index: usize,
    name: String,
    /// False of init containers that end before the containers start: they may use what these will have.
    long_lived: bool,
    resources: Vec<Demand>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Demand {
    resource: String,
    /// Its place among all requests of the container, by name.
    place: usize,
    amount: i64,
}

pub(crate) fn may_be_backed(resource: &str) -> bool {
    super::is_extended(resource) || resource.starts_with(IMPLICIT_PREFIX)
}

pub(crate) fn demands(spec: &PodSpec) -> Vec<ContainerDemand> {
    let inits = spec.init_containers.iter().flatten();
    let inits = inits.map(|one| (one, one.restart_policy.as_deref() == Some("Always")));
    let all = inits.chain(spec.containers.iter().map(|one| (one, true)));
    let read = all.enumerate().filter_map(|(index, (container, long_lived))| {
        let resources = of_container(container);
        (!resources.is_empty()).then(|| ContainerDemand {
            index,
            name: container.name.clone(),
            long_lived,
            resources,
        })
    });
    read.collect()
}

fn of_container(container: &Container) -> Vec<Demand> {
    let requests = container.resources.as_ref().and_then(|all| all.requests.as_ref());
    let numbered = requests.into_iter().flatten().enumerate();
    numbered
        .filter(|(_, (name, _))| may_be_backed(name))
        .filter_map(|(place, (name, amount))| {
            let amount = Quantity::parse(&amount.0).map_or(0, |amount| amount.value());
            (amount > 0).then(|| Demand {
                resource: name.clone(),
                place,
                amount,
            })
        })
        .collect()
}

/// The resources that some container of the pod asks for.
pub(crate) fn resources(pod: &PodInfo) -> impl Iterator<Item = &str> {
    let demands = pod.shape.extended.iter();
    demands.flat_map(|one| one.resources.iter().map(|demand| demand.resource.as_str()))
}

/// The resources that this node must provide by devices, with their classes. A node that offers a resource in its
/// status does so by a device plugin. `None` if the node has a resource in neither way.
pub(crate) fn needed<'a>(
    pod: &'a PodInfo,
    node: &NodeInfo,
    class_of: impl Fn(&str) -> Option<String>,
) -> Option<BTreeMap<&'a str, String>> {
    let mut needed = BTreeMap::new();
    for resource in resources(pod) {
        let others = &node.meta.allocatable.others;
        match class_of(resource) {
            Some(class) if others.get(resource).copied().unwrap_or(0) == 0 => {
                needed.insert(resource, class);
            }
            None if !others.contains_key(resource) => return None,
            _ => {}
        }
    }
    Some(needed)
}

/// The requests of one container for one resource: what it may use of others, and what it needs beyond that.
fn of_one(
    container: &ContainerDemand,
    resource: &str,
    class: &str,
    reusable: &[Option<DeviceRequest>],
) -> (Option<DeviceRequest>, Vec<ContainerExtendedResourceRequest>) {
    let mut mappings = Vec::new();
    let Some(demand) = container.resources.iter().find(|one| one.resource == resource) else {
        return (None, mappings);
    };
    let mapping = |request: &str| ContainerExtendedResourceRequest {
        container_name: container.name.clone(),
        resource_name: resource.to_owned(),
        request_name: request.to_owned(),
    };
    let mut covered = 0;
    for request in reusable.iter().flatten() {
        covered += count(request);
        mappings.push(mapping(&request.name));
        if covered >= demand.amount {
            return (None, mappings);
        }
    }
    let name = format!("container-{}-request-{}", container.index, demand.place);
    mappings.push(mapping(&name));
    let request = DeviceRequest {
        name,
        exactly: Some(ExactDeviceRequest {
            device_class_name: class.to_owned(),
            allocation_mode: Some("ExactCount".to_owned()),
            count: Some(demand.amount - covered),
            ..ExactDeviceRequest::default()
        }),
        first_available: None,
    };
    (Some(request), mappings)
}

fn count(request: &DeviceRequest) -> i64 {
    let exact = request.exactly.as_ref();
    exact.and_then(|exact| exact.count).unwrap_or(0)
}

/// The requests of the claim, and which container uses which of them for which resource.
pub(crate) fn requests(
    demands: &[ContainerDemand],
    needed: &BTreeMap<&str, String>,
) -> (Vec<DeviceRequest>, Vec<ContainerExtendedResourceRequest>) {
    let (mut requests, mut mappings) = (Vec::new(), Vec::new());
    for (resource, class) in needed {
        let mut lasting: Vec<Option<DeviceRequest>> = vec![None; demands.len()];
        let mut short_mappings = Vec::new();
        for (at, container) in demands.iter().enumerate().filter(|(_, one)| one.long_lived) {
            let (request, used) = of_one(container, resource, class, &[]);
            lasting[at] = request;
            mappings.extend(used);
        }
        // Init containers run one after the other: the largest of their requests serves them all.
        let mut short: Vec<DeviceRequest> = Vec::new();
        for (at, container) in demands.iter().enumerate().filter(|(_, one)| !one.long_lived) {
            let (request, used) = of_one(container, resource, class, &lasting[at..]);
            short.extend(request);
            short_mappings.extend(used);
        }
        let largest = short.iter().rev().max_by_key(|request| count(request)).cloned();
        if let Some(largest) = largest {
            for mapping in &mut short_mappings {
                if short.iter().any(|request| request.name == mapping.request_name) {
                    mapping.request_name.clone_from(&largest.name);
                }
            }
            requests.push(largest);
        }
        requests.extend(lasting.into_iter().flatten());
        mappings.extend(short_mappings);
    }
    requests.sort_by(|a, b| a.name.cmp(&b.name));
    (requests, mappings)
}

/// The claim for a pod as it is to be created.
pub(crate) fn claim(pod: &PodInfo, requests: Vec<DeviceRequest>) -> ResourceClaim {
    ResourceClaim {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-extended-resources-", pod.key.name)),
            namespace: Some(pod.key.namespace.clone()),
            annotations: Some([(CLAIM_ANNOTATION.to_owned(), "true".to_owned())].into()),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Pod".to_owned(),
                name: pod.key.name.clone(),
                uid: pod.uid.to_string(),
                controller: Some(true),
                block_owner_deletion: None,
            }]),
            ..ObjectMeta::default()
        },
        spec: ResourceClaimSpec {
            devices: Some(DeviceClaim {
                requests: Some(requests),
                ..DeviceClaim::default()
            }),
        },
        status: None,
    }
}

/// Whether the scheduler created the claim for this pod.
pub(crate) fn is_claim_of(claim: &ResourceClaim, pod: &PodInfo) -> bool {
    let annotations = claim.metadata.annotations.as_ref();
    let marked = annotations.and_then(|all| all.get(CLAIM_ANNOTATION));
    let mut owners = claim.metadata.owner_references.iter().flatten();
    marked.is_some_and(|value| value == "true")
        && owners.any(|one| one.controller == Some(true) && *one.uid == *pod.uid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::pod;
    use serde_json::{Value, json};

    fn asking(name: &str, amounts: Value) -> Value {
        json!({"name": name, "resources": {"requests": amounts}})
    }

    /// `name=count` of the requests, and `container:resource>request` of the mappings.
    fn check(spec: Value, expected_requests: &[&str], expected_mappings: &[&str]) {
        let pod = pod("p", spec);
        let needed: BTreeMap<&str, String> = resources(&pod).map(|one| (one, "gpu".to_owned())).collect();
        let (requests, mappings) = requests(&pod.shape.extended, &needed);
        let requests: Vec<String> = requests
            .iter()
            .map(|one| format!("{}={}", one.name, count(one)))
            .collect();
        let mappings: Vec<String> = mappings
            .iter()
            .map(|one| {
                format!(
                    "{}:{}>{}",
                    one.container_name, one.resource_name, one.request_name
                )
            })
            .collect();
        assert_eq!(requests, expected_requests);
        assert_eq!(mappings, expected_mappings);
    }

    #[test]
    fn each_container_has_a_request_of_its_own() {
        check(
            json!({"containers": [asking("a", json!({"cpu": "1", "example.com/gpu": "2"})), asking("b", json!({"memory": "1Gi"})),
                asking("c", json!({"deviceclass.resource.kubernetes.io/gpu": "1"}))]}),
            &["container-0-request-1=2", "container-2-request-0=1"],
            &[
                "c:deviceclass.resource.kubernetes.io/gpu>container-2-request-0",
                "a:example.com/gpu>container-0-request-1",
            ],
        );
    }

    #[test]
    fn init_containers_use_what_the_containers_will_have() {
        let restarts = |mut container: Value| {
            container["restartPolicy"] = json!("Always");
            container
        };
        check(
            json!({"initContainers": [asking("i", json!({"example.com/gpu": "1"}))],
                "containers": [asking("a", json!({"example.com/gpu": "2"}))]}),
            &["container-1-request-0=2"],
            &[
                "a:example.com/gpu>container-1-request-0",
                "i:example.com/gpu>container-1-request-0",
            ],
        );
        // More than the container has: the rest is requested, once for all.
        check(
            json!({"initContainers": [asking("i", json!({"example.com/gpu": "3"})), asking("j", json!({"example.com/gpu": "4"}))],
                "containers": [asking("a", json!({"example.com/gpu": "2"}))]}),
            &["container-1-request-0=2", "container-2-request-0=2"],
            &[
                "a:example.com/gpu>container-2-request-0",
                "i:example.com/gpu>container-2-request-0",
                "i:example.com/gpu>container-1-request-0",
                "j:example.com/gpu>container-2-request-0",
                "j:example.com/gpu>container-1-request-0",
            ],
        );
        // A sidecar that started earlier keeps its own.
        check(
            json!({"initContainers": [restarts(asking("s", json!({"example.com/gpu": "1"}))), asking("i", json!({"example.com/gpu": "1"}))],
                "containers": [asking("a", json!({"cpu": "1"}))]}),
            &["container-0-request-0=1", "container-1-request-0=1"],
            &[
                "s:example.com/gpu>container-0-request-0",
                "i:example.com/gpu>container-1-request-0",
            ],
        );
    }

    #[test]
    fn a_device_plugin_comes_first() {
        let pod = pod(
            "p",
            json!({"containers": [asking("a", json!({"example.com/gpu": "1", "example.com/nic": "1"}))]}),
        );
        let class = |name: &str| (name == "example.com/gpu").then(|| "gpu".to_owned());
        let on = |allocatable: Value| crate::fixtures::node("n", json!({}), json!({}), allocatable);
        let with_nic = on(json!({"example.com/nic": "1"}));
        let needed = |node: &NodeInfo| {
            super::needed(&pod, node, class).map(|all| all.into_keys().collect::<Vec<&str>>())
        };
        assert_eq!(needed(&with_nic), Some(vec!["example.com/gpu"]));
        let with_both = on(json!({"example.com/nic": "1", "example.com/gpu": "1"}));
        assert_eq!(needed(&with_both), Some(vec![]));
        assert_eq!(needed(&on(json!({}))), None);
    }
}
