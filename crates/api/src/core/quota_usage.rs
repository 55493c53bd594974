//! What objects count for against a ResourceQuota, and which quotas concern them. Pure: admission charges with it
//! before a write, and the controller counts what is there with it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use skiff_meta::quantity::Quantity;

use super::pod_defaults::aggregate;
use super::qos;
use super::resources::quantity;
use crate::node::{at, list, text};

pub type Amounts = BTreeMap<String, Quantity>;

/// What a quota on cpu or memory makes every container say.
const EXPLICITLY_REQUIRED: [&str; 6] = [
    "cpu",
    "memory",
    "requests.cpu",
    "requests.memory",
    "limits.cpu",
    "limits.memory",
];

/// The core resources that may be counted by their bare name.
const BARE_COUNTS: [&str; 6] = [
    "configmaps",
    "persistentvolumeclaims",
    "replicationcontrollers",
    "resourcequotas",
    "secrets",
    "services",
];

const STORAGE_CLASS: &str = ".storageclass.storage.k8s.io/";
const DEVICE_CLASS: &str = ".deviceclass.resource.k8s.io/devices";
/// How many devices one claim may get at most: what a request for all counts as.
const MOST_DEVICES: i64 = 32;

pub fn amounts(value: &Value) -> Amounts {
    value
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(name, amount)| Some((name.clone(), quantity(amount)?)))
        .collect()
}

/// The generic name of an object count: `count/deployments.apps`.
pub fn count_name(group: &str, resource: &str) -> String {
    if group.is_empty() {
        format!("count/{resource}")
    } else {
        format!("count/{resource}.{group}")
    }
}

/// The group and resource whose objects an entry of a quota counts; `None` for names that nothing uses.
pub fn counted_by(entry: &str) -> Option<(&str, &str)> {
    if let Some(counted) = entry.strip_prefix("count/") {
        let (resource, group) = counted.split_once('.').unwrap_or((counted, ""));
        return Some((group, resource));
    }
    if entry == "requests.storage" || entry.contains(STORAGE_CLASS) {
        return Some(("", "persistentvolumeclaims"));
    }
    if entry.ends_with(DEVICE_CLASS) {
        return Some(("resource.k8s.io", "resourceclaims"));
    }
    if entry.starts_with("services.") {
        return Some(("", "services"));
    }
    if let Some(bare) = BARE_COUNTS.iter().find(|bare| **bare == entry) {
        return Some(("", bare));
    }
    let compute = EXPLICITLY_REQUIRED.contains(&entry)
        || matches!(
            entry,
            "pods" | "ephemeral-storage" | "requests.ephemeral-storage" | "limits.ephemeral-storage"
        )
        || entry.starts_with("hugepages-")
        || entry.starts_with("requests.");
    compute.then_some(("", "pods"))
}

/// What one object counts for. Objects of kinds without rules of their own count for one.
pub fn usage(group: &str, resource: &str, object: &Value) -> Amounts {
    let one = Quantity::from_units(1);
    let mut used = Amounts::from([(count_name(group, resource), one)]);
    if (group, resource) == ("resource.k8s.io", "resourceclaims") {
        devices(object, &mut used);
    }
    if !group.is_empty() {
        return used;
    }
    if BARE_COUNTS.contains(&resource) {
        used.insert(resource.to_owned(), one);
    }
    match resource {
        "pods" => pod(object, &mut used),
        "services" => service(object, &mut used),
        "persistentvolumeclaims" => claim(object, &mut used),
        _ => {}
    }
    used
}

/// The devices of each class that a claim may get. Of alternatives the one with most of a class counts.
fn devices(claim: &Value, used: &mut Amounts) {
    let count = |request: &Value| match text(request, "allocationMode") {
        "All" => MOST_DEVICES,
        "" | "ExactCount" => at(request, "count").as_i64().unwrap_or(1),
        _ => 0,
    };
    let mut totals: BTreeMap<&str, i64> = BTreeMap::new();
    for request in list(claim, "spec.devices.requests") {
        let mut most: BTreeMap<&str, i64> = BTreeMap::new();
        let exactly = [at(request, "exactly")]
            .into_iter()
            .filter(|exactly| !exactly.is_null());
        for option in exactly.chain(list(request, "firstAvailable")) {
            let known = most.entry(text(option, "deviceClassName")).or_default();
            *known = count(option).max(*known);
        }
        for (class, amount) in most {
            *totals.entry(class).or_default() += amount;
        }
    }
    for (class, amount) in totals {
        used.insert(format!("{class}{DEVICE_CLASS}"), Quantity::from_units(amount));
    }
}

fn pod(pod: &Value, used: &mut Amounts) {
    if matches!(text(pod, "status.phase"), "Failed" | "Succeeded") {
        return;
    }
    let spec = at(pod, "spec");
    let of = |which: &str| {
        let mut total = aggregate(spec, which);
        // Resources of the pod as a whole stand for those of its containers.
        total.extend(amounts(at(at(spec, "resources"), which)));
        for (name, extra) in amounts(at(spec, "overhead")) {
            // A limit that nobody set has no overhead to grow by.
            if which == "requests" || total.contains_key(&name) {
                let sum = total.get(&name).map_or(extra, |amount| amount.plus(&extra));
                total.insert(name, sum);
            }
        }
        total
    };
    used.insert("pods".to_owned(), Quantity::from_units(1));
    used.extend(compute(&of("requests"), &of("limits")));
}

/// Requests and limits under the names that quotas have for them.
fn compute(requests: &Amounts, limits: &Amounts) -> Amounts {
    let mut used = Amounts::new();
    for (name, amount) in requests {
        let plain =
            matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-");
        if plain {
            used.insert(name.clone(), *amount);
        }
        if plain || name.contains('/') {
            used.insert(format!("requests.{name}"), *amount);
        }
    }
    for (name, amount) in limits {
        if matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage") {
            used.insert(format!("limits.{name}"), *amount);
        }
    }
    used
}

fn service(service: &Value, used: &mut Amounts) {
    let ports = list(service, "spec.ports");
    let kind = text(service, "spec.type");
    let balanced = kind == "LoadBalancer";
    let node_ports = match kind {
        "NodePort" => ports.len(),
        // Without allocation only the ports that name a node port have one.
        "LoadBalancer" if at(service, "spec.allocateLoadBalancerNodePorts") == false => ports
            .iter()
            .filter(|port| port["nodePort"].as_i64().unwrap_or(0) != 0)
            .count(),
        "LoadBalancer" => ports.len(),
        _ => 0,
    };
    used.insert(
        "services.nodeports".to_owned(),
        Quantity::from_units(node_ports as i64),
    );
    used.insert(
        "services.loadbalancers".to_owned(),
        Quantity::from_units(balanced.into()),
    );
}

fn claim(claim: &Value, used: &mut Amounts) {
    let class = match at(claim, "metadata.annotations").get("volume.beta.kubernetes.io/storage-class") {
        Some(class) => class.as_str().unwrap_or_default(),
        None => text(claim, "spec.storageClassName"),
    };
    let asked = quantity(at(claim, "spec.resources.requests.storage"));
    let given = quantity(at(claim, "status.allocatedResources.storage"));
    let mut add = |name: &str, amount: Quantity| {
        if !class.is_empty() {
            used.insert(format!("{class}{STORAGE_CLASS}{name}"), amount);
        }
        used.insert(name.to_owned(), amount);
    };
    add("persistentvolumeclaims", Quantity::from_units(1));
    if let Some(asked) = asked {
        let most = given.map_or(asked, |given| given.max(asked));
        // Bytes are counted whole.
        add("requests.storage", most.rounded_up());
    }
}

/// The entries of `hard` that objects of this resource count for.
pub fn concerned(group: &str, resource: &str, hard: &Amounts) -> BTreeSet<String> {
    hard.keys()
        .filter(|entry| counted_by(entry) == Some((group, resource)))
        .cloned()
        .collect()
}

/// Whether the quota's scopes include the object. Only pods have scopes, and claims the one of their class.
pub fn in_scope(quota: &Value, resource: &str, object: &Value) -> bool {
    let bare = list(quota, "spec.scopes").iter().all(|scope| {
        scope_holds(
            scope.as_str().unwrap_or_default(),
            "Exists",
            &[],
            resource,
            object,
        )
    });
    bare && list(quota, "spec.scopeSelector.matchExpressions")
        .iter()
        .all(|rule| {
            scope_holds(
                text(rule, "scopeName"),
                text(rule, "operator"),
                list(rule, "values"),
                resource,
                object,
            )
        })
}

fn scope_holds(scope: &str, operator: &str, values: &[Value], resource: &str, object: &Value) -> bool {
    if resource == "persistentvolumeclaims" {
        let class = text(object, "spec.volumeAttributesClassName");
        return scope == "VolumeAttributesClass" && named(class, operator, values);
    }
    if resource != "pods" {
        return false;
    }
    let terminating = at(object, "spec.activeDeadlineSeconds")
        .as_i64()
        .is_some_and(|seconds| seconds >= 0);
    let best_effort = || qos::class(object) == "BestEffort";
    match scope {
        "Terminating" => terminating,
        "NotTerminating" => !terminating,
        "BestEffort" => best_effort(),
        "NotBestEffort" => !best_effort(),
        "PriorityClass" => named(text(object, "spec.priorityClassName"), operator, values),
        "CrossNamespacePodAffinity" => crosses_namespaces(object),
        _ => false,
    }
}

/// A selector over one name that may be missing.
fn named(name: &str, operator: &str, values: &[Value]) -> bool {
    let listed = values.iter().any(|value| value == name);
    match operator {
        "Exists" => !name.is_empty(),
        "DoesNotExist" => name.is_empty(),
        "In" => !name.is_empty() && listed,
        "NotIn" => name.is_empty() || !listed,
        _ => false,
    }
}

fn crosses_namespaces(pod: &Value) -> bool {
    ["podAffinity", "podAntiAffinity"].iter().any(|sort| {
        let affinity = at(at(pod, "spec.affinity"), sort);
        let required = list(affinity, "requiredDuringSchedulingIgnoredDuringExecution").iter();
        let preferred = list(affinity, "preferredDuringSchedulingIgnoredDuringExecution")
            .iter()
            .map(|term| at(term, "podAffinityTerm"));
        required
            .chain(preferred)
            .any(|term| !list(term, "namespaces").is_empty() || !at(term, "namespaceSelector").is_null())
    })
}

/// Complains of a pod whose containers leave out an amount that a quota limits.
pub fn unsaid(pod: &Value, entries: &BTreeSet<String>) -> Option<String> {
    let spec = at(pod, "spec");
    let whole = at(spec, "resources");
    if ["requests", "limits"]
        .iter()
        .any(|which| !amounts(at(whole, which)).is_empty())
    {
        return None;
    }
    let mut missing: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for container in list(spec, "containers")
        .iter()
        .chain(list(spec, "initContainers"))
    {
        let said = compute(
            &amounts(at(container, "resources.requests")),
            &amounts(at(container, "resources.limits")),
        );
        for entry in EXPLICITLY_REQUIRED {
            if entries.contains(entry) && !said.contains_key(entry) {
                missing.entry(entry).or_default().insert(text(container, "name"));
            }
        }
    }
    if missing.is_empty() {
        return None;
    }
    let each: Vec<String> = missing
        .into_iter()
        .map(|(entry, names)| format!("{entry} for: {}", names.into_iter().collect::<Vec<_>>().join(",")))
        .collect();
    Some(format!("must specify {}", each.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shown(amounts: &Amounts) -> String {
        let each: Vec<String> = amounts
            .iter()
            .map(|(name, amount)| format!("{name}={amount}"))
            .collect();
        each.join(" ")
    }

    #[test]
    fn what_objects_count_for() {
        fn check(resource: &str, object: Value, expected: &str) {
            assert_eq!(shown(&usage("", resource, &object)), expected, "{object}");
        }
        check("configmaps", json!({}), "configmaps=1 count/configmaps=1");
        let pod = json!({"spec": {"containers": [
            {"name": "a", "resources": {"requests": {"cpu": "100m", "x.io/y": "2"}, "limits": {"memory": "1Gi"}}},
            {"name": "b", "resources": {"requests": {"cpu": "150m"}}}]}});
        check(
            "pods",
            pod.clone(),
            "count/pods=1 cpu=250m limits.memory=1Gi pods=1 requests.cpu=250m requests.x.io/y=2",
        );
        let mut done = pod;
        done["status"] = json!({"phase": "Succeeded"});
        check("pods", done, "count/pods=1");
        let ports = json!([{"port": 1}, {"port": 2, "nodePort": 30000}]);
        check(
            "services",
            json!({"spec": {"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "ports": ports}}),
            "count/services=1 services=1 services.loadbalancers=1 services.nodeports=1",
        );
        check(
            "persistentvolumeclaims",
            json!({"spec": {"storageClassName": "gold", "resources": {"requests": {"storage": "1Gi"}}}}),
            "count/persistentvolumeclaims=1 gold.storageclass.storage.k8s.io/persistentvolumeclaims=1 \
             gold.storageclass.storage.k8s.io/requests.storage=1Gi persistentvolumeclaims=1 requests.storage=1Gi",
        );
        check(
            "persistentvolumeclaims",
            json!({"spec": {"resources": {"requests": {"storage": "1500m"}}}}),
            "count/persistentvolumeclaims=1 persistentvolumeclaims=1 requests.storage=2",
        );
    }

    #[test]
    fn devices_are_counted_by_class() {
        let request = |class: &str, more: Value| {
            let mut request = json!({"deviceClassName": class});
            request
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            request
        };
        let claim = json!({"spec": {"devices": {"requests": [
            {"name": "a", "exactly": request("gpu", json!({"allocationMode": "ExactCount", "count": 2}))},
            {"name": "b", "exactly": request("nic", json!({"allocationMode": "All"}))},
            {"name": "c", "firstAvailable": [request("gpu", json!({"count": 1})), request("gpu", json!({"count": 3})),
                request("tpu", json!({"count": 1}))]}]}}});
        let used = usage("resource.k8s.io", "resourceclaims", &claim);
        let shown: Vec<String> = used
            .iter()
            .map(|(name, amount)| format!("{name}={amount}"))
            .collect();
        let class =
            |class: &str, amount: i64| format!("{class}.deviceclass.resource.k8s.io/devices={amount}");
        let count = "count/resourceclaims.resource.k8s.io=1".to_owned();
        assert_eq!(shown, [count, class("gpu", 5), class("nic", 32), class("tpu", 1)]);
    }

    #[test]
    fn who_counts_for_an_entry() {
        for (entry, expected) in [
            ("count/deployments.apps", Some(("apps", "deployments"))),
            ("count/pods", Some(("", "pods"))),
            ("pods", Some(("", "pods"))),
            ("requests.nvidia.com/gpu", Some(("", "pods"))),
            ("requests.storage", Some(("", "persistentvolumeclaims"))),
            (
                "gold.storageclass.storage.k8s.io/requests.storage",
                Some(("", "persistentvolumeclaims")),
            ),
            (
                "gpu.deviceclass.resource.k8s.io/devices",
                Some(("resource.k8s.io", "resourceclaims")),
            ),
            ("services.nodeports", Some(("", "services"))),
            ("secrets", Some(("", "secrets"))),
            ("something", None),
        ] {
            assert_eq!(counted_by(entry), expected, "{entry}");
        }
    }

    #[test]
    fn scopes() {
        let best_effort = json!({"spec": {"containers": [{"name": "a"}], "priorityClassName": "high"}});
        let terminating = json!({"spec": {"activeDeadlineSeconds": 5,
            "containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}]}});
        let of = |scope: &str| json!({"spec": {"scopes": [scope]}});
        for (scope, first, second) in [
            ("BestEffort", true, false),
            ("NotBestEffort", false, true),
            ("Terminating", false, true),
            ("NotTerminating", true, false),
        ] {
            assert_eq!(in_scope(&of(scope), "pods", &best_effort), first, "{scope}");
            assert_eq!(in_scope(&of(scope), "pods", &terminating), second, "{scope}");
            assert!(!in_scope(&of(scope), "services", &json!({})), "{scope}");
        }
        let class = json!({"spec": {"scopeSelector": {"matchExpressions": [
            {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]}}});
        assert!(in_scope(&class, "pods", &best_effort));
        assert!(!in_scope(&class, "pods", &terminating));
    }

    #[test]
    fn containers_must_say_what_is_limited() {
        let pod = json!({"spec": {"containers": [{"name": "b"}, {"name": "a",
            "resources": {"requests": {"cpu": "1"}}}]}});
        let entries = ["cpu", "limits.cpu", "pods"].map(str::to_owned).into();
        assert_eq!(
            unsaid(&pod, &entries).as_deref(),
            Some("must specify cpu for: b; limits.cpu for: a,b")
        );
        assert_eq!(unsaid(&pod, &["pods".to_owned()].into()), None);
    }
}
