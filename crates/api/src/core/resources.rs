//! Rules of resource names and amounts: what containers, pods, quotas and nodes may name.

use std::collections::BTreeSet;

use serde_json::Value;
use skiff_meta::names;
use skiff_meta::quantity::Quantity;

use super::pod_defaults::aggregate;
use crate::errors::Errors;
use crate::node::{Node, at, list};

const CONTAINER_RESOURCES: [&str; 3] = ["cpu", "ephemeral-storage", "memory"];
const STANDARD_RESOURCES: [&str; 23] = [
    "cpu",
    "memory",
    "ephemeral-storage",
    "requests.cpu",
    "requests.memory",
    "requests.ephemeral-storage",
    "limits.cpu",
    "limits.memory",
    "limits.ephemeral-storage",
    "pods",
    "resourcequotas",
    "services",
    "replicationcontrollers",
    "secrets",
    "configmaps",
    "persistentvolumeclaims",
    "storage",
    "requests.storage",
    "services.nodeports",
    "services.loadbalancers",
    "hugepages",
    "requests",
    "limits",
];

pub fn quantity(value: &Value) -> Option<Quantity> {
    match value {
        Value::String(text) => Quantity::parse(text).ok(),
        Value::Number(number) => Quantity::parse(&number.to_string()).ok(),
        _ => None,
    }
}

fn is_huge_page(name: &str) -> bool {
    name.starts_with("hugepages-")
}

/// Names without a prefix, or of Kubernetes itself.
pub fn is_native(name: &str) -> bool {
    !name.contains('/') || name.contains("kubernetes.io/")
}

/// Names of somebody else's making: with a domain.
pub fn is_extended(name: &str) -> bool {
    !is_native(name)
        && !name.starts_with("requests.")
        && names::qualified_name(&format!("requests.{name}")).is_empty()
}

/// Whole amounts only: pods, services, extended resources and the like.
fn is_integer_resource(name: &str) -> bool {
    const COUNTS: [&str; 9] = [
        "pods",
        "resourcequotas",
        "services",
        "replicationcontrollers",
        "secrets",
        "configmaps",
        "persistentvolumeclaims",
        "services.nodeports",
        "services.loadbalancers",
    ];
    COUNTS.contains(&name) || is_extended(name)
}

pub(super) fn overcommit_allowed(name: &str) -> bool {
    is_native(name) && !is_huge_page(name)
}

pub fn resource_name(at: &Node, name: &str, errors: &mut Errors) -> bool {
    let complaints = names::qualified_name(name);
    let bad = !complaints.is_empty();
    for complaint in complaints {
        errors.invalid_value(at, name, complaint);
    }
    if !bad
        && !name.contains('/')
        && !STANDARD_RESOURCES.contains(&name)
        && !is_huge_page(name)
        && !name.starts_with("requests.hugepages-")
    {
        errors.invalid_value(at, name, "must be a standard resource type or fully qualified");
        return false;
    }
    !bad
}

/// The name of a resource that containers ask for.
pub fn container_resource_name(at: &Node, name: &str, errors: &mut Errors) {
    resource_name(at, name, errors);
    if !name.contains('/') {
        if !CONTAINER_RESOURCES.contains(&name) && !is_huge_page(name) {
            errors.invalid_value(at, name, "must be a standard resource for containers");
        }
    } else if !is_native(name) && !is_extended(name) {
        errors.invalid_value(at, name, "doesn't follow extended resource name standard");
    }
}

fn pod_resource_name(at: &Node, name: &str, errors: &mut Errors) {
    if resource_name(at, name, errors) && !["cpu", "memory"].contains(&name) && !is_huge_page(name) {
        let shown = Value::from(name);
        errors.not_supported(&at.with(&shown), &["cpu", "hugepages-", "memory"]);
    }
}

/// An amount that only must not be negative; upstream shows its rounded number.
pub fn basic_quantity(at: &Node, errors: &mut Errors) -> bool {
    let negative = quantity(at.value).filter(|amount| amount.value() < 0);
    if let Some(amount) = &negative {
        errors.invalid_value(at, amount.value(), "must be a valid resource quantity");
    }
    negative.is_none()
}

/// An amount must not be negative, and whole where the resource is counted.
pub fn resource_quantity(at: &Node, name: &str, errors: &mut Errors) {
    let Some(amount) = quantity(at.value) else { return };
    if amount.is_negative() {
        errors.invalid_value(at, amount.to_string(), crate::errors::NOT_NEGATIVE);
    }
    if is_integer_resource(name) && amount.milli_value() % 1000 != 0 {
        errors.invalid_value(at, amount.to_string(), "must be an integer");
    }
}

/// `resources` of a container.
pub fn container_resources(resources: &Node, claims: &BTreeSet<&str>, errors: &mut Errors) {
    requirements(resources, container_resource_name, claims, errors);
}

/// `resources` of a pod.
pub fn pod_resources(resources: &Node, pod_claims: &BTreeSet<&str>, errors: &mut Errors) {
    let claims = resources.field("claims");
    if claims.is_set() {
        errors.forbidden(&claims, "claims may not be set for Resources at pod-level");
    }
    requirements(resources, pod_resource_name, pod_claims, errors);
}

/// What the containers of a spec need fits into what their pod gets.
pub fn pod_resources_suffice(spec: &Node, errors: &mut Errors) {
    let resources = spec.field("resources");
    let given =
        |which: &str, name: &str| quantity(at(resources.value, which).get(name).unwrap_or(&Value::Null));
    let sums = |which: &'static str, of: &dyn Fn(&str) -> bool, errors: &mut Errors| {
        let amounts = resources.field(which);
        for (name, sum) in aggregate(spec.value, which) {
            let Some(given) = given(which, &name).filter(|given| of(&name) && sum > *given) else {
                continue;
            };
            errors.invalid_value(
                &amounts.key(&name),
                given.to_string(),
                format!("must be greater than or equal to aggregate container {which} of {sum}"),
            );
        }
    };
    sums("requests", &|_| true, errors);
    sums("limits", &|name| name.starts_with("hugepages-"), errors);
    // COMPAT: the containers are looked for below the resources, and the key before the limits.
    let containers = resources.field("containers");
    for (i, container) in list(spec.value, "containers").iter().enumerate() {
        let place = containers.index(i);
        for (name, limit) in at(container, "resources.limits")
            .as_object()
            .into_iter()
            .flatten()
        {
            let (Some(limit), Some(given)) = (quantity(limit), given("limits", name)) else {
                continue;
            };
            if limit > given {
                let place = place.key(name);
                errors.invalid_value(
                    &place.field("limits"),
                    limit.to_string(),
                    format!("must be less than or equal to pod limits of {given}"),
                );
            }
        }
    }
}

/// `overhead` of a pod.
pub fn overhead(overhead: &Node, amounts: &Value, errors: &mut Errors) {
    // COMPAT: upstream takes it for the limits of a container, and says so in the path.
    let limits = overhead.field("limits");
    let limits = limits.with(amounts);
    let (mut pages, mut computes) = (false, false);
    for (name, amount) in limits.entries() {
        container_resource_name(&amount, name, errors);
        resource_quantity(&amount, name, errors);
        whole_pages(&amount, name, errors);
        pages |= name.starts_with("hugepages-");
        computes |= ["cpu", "memory"].contains(&name);
    }
    if pages && !computes {
        errors.forbidden(overhead, "HugePages require cpu or memory");
    }
}

/// A claim may be named once, or once for each of its requests.
fn claim_request(claim: &Node, seen: &mut BTreeSet<String>, errors: &mut Errors) {
    let (name, request) = (claim.field("name").str(), claim.field("request"));
    if seen.contains(name) {
        errors.duplicate_value(claim, name);
        return;
    }
    let mut key = name.to_owned();
    if !request.is_empty() {
        errors.rule(&request, names::dns1123_label(request.str()));
        key = format!("{name}/{}", request.str());
    }
    if seen.contains(&key) {
        errors.duplicate_value(claim, key.as_str());
    } else if request.is_empty() {
        let prefix = format!("{name}/");
        let with_request = seen.range(prefix.clone()..);
        for _ in with_request.take_while(|other| other.starts_with(&prefix)) {
            errors.duplicate_value(claim, name);
        }
    }
    seen.insert(key);
}

/// Huge pages are asked for in whole pages.
fn whole_pages(amount: &Node, name: &str, errors: &mut Errors) {
    let (Some(page), Some(wanted)) = (
        name.strip_prefix("hugepages-")
            .and_then(|size| Quantity::parse(size).ok()),
        quantity(amount.value),
    ) else {
        return;
    };
    let (page, bytes) = (page.value(), wanted.value());
    if page > 0 && (bytes % page != 0 || bytes < 0) {
        errors.invalid_value(
            amount,
            wanted.to_string(),
            format!("{wanted} is not positive integer multiple of {name}"),
        );
    }
}

fn requirements(
    resources: &Node,
    name_rule: fn(&Node, &str, &mut Errors),
    pod_claims: &BTreeSet<&str>,
    errors: &mut Errors,
) {
    let (limits, requests) = (resources.field("limits"), resources.field("requests"));
    let (mut compute, mut huge) = (false, false);
    for (name, amount) in limits.entries() {
        name_rule(&amount, name, errors);
        resource_quantity(&amount, name, errors);
        whole_pages(&amount, name, errors);
        huge |= is_huge_page(name);
        compute |= ["cpu", "memory"].contains(&name);
    }
    for (name, amount) in requests.entries() {
        name_rule(&amount, name, errors);
        resource_quantity(&amount, name, errors);
        huge |= is_huge_page(name);
        compute |= ["cpu", "memory"].contains(&name);
        let (Some(requested), limit) = (quantity(amount.value), limits.key(name)) else {
            continue;
        };
        match quantity(limit.value) {
            Some(limit) if requested != limit && !overcommit_allowed(name) => {
                errors.invalid_value(
                    &requests,
                    requested.to_string(),
                    format!("must be equal to {name} limit of {limit}"),
                );
            }
            Some(limit) if requested > limit => errors.invalid_value(
                &requests,
                requested.to_string(),
                format!("must be less than or equal to {name} limit of {limit}"),
            ),
            None if !overcommit_allowed(name) => {
                errors.required(&limits, "Limit must be set for non overcommitable resources");
            }
            _ => {}
        }
        whole_pages(&amount, name, errors);
    }
    if huge && !compute {
        errors.forbidden(resources, "HugePages require cpu or memory");
    }
    let claims = resources.field("claims");
    let mut seen = BTreeSet::new();
    for claim in claims.items() {
        let name = claim.field("name");
        if !name.str().is_empty() {
            claim_request(&claim, &mut seen, errors);
        }
        if name.str().is_empty() {
            errors.required(&claim, "");
        } else if !pod_claims.contains(name.str()) {
            let mut detail = "must be one of the names in pod.spec.resourceClaims".to_owned();
            if pod_claims.is_empty() {
                detail.push_str(" which is empty");
            } else {
                let sorted: Vec<&str> = pod_claims.iter().copied().collect();
                detail.push_str(&format!(": {}", sorted.join(", ")));
            }
            errors.push(
                skiff_meta::field::ErrorType::NotFound,
                &claim,
                Some(name.value.clone()),
                detail,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_gets_what_its_containers_need() {
        let check = |pod: Value, containers: Value, sidecar: Value, expected: &[&str]| {
            let object = json!({"spec": {"resources": pod, "containers": containers,
                "initContainers": [{"restartPolicy": "Always", "resources": sidecar}]}});
            let mut errors = Errors::new();
            pod_resources_suffice(&Node::root(&object).field("spec"), &mut errors);
            let found: Vec<String> = errors.into_vec().iter().map(ToString::to_string).collect();
            assert_eq!(found, expected);
        };
        let container = json!([{"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "3"}}}]);
        check(
            json!({"requests": {"cpu": "1"}}),
            container.clone(),
            json!({}),
            &[],
        );
        check(
            json!({"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}),
            container,
            json!({"requests": {"cpu": "1"}}),
            &[
                "spec.resources.requests[cpu]: Invalid value: \"1\": must be greater than or equal to aggregate container requests of 1500m",
                "spec.resources.containers[0][cpu].limits: Invalid value: \"3\": must be less than or equal to pod limits of 2",
            ],
        );
    }
}
