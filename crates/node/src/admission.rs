//! Whether the node takes a pod: the operating system and the node it wants, enough room, and taints that it
//! must tolerate. The scheduler has looked at most of that; pods also come past it. Pure.

use std::borrow::Cow;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use skiff_pods::requests::{Resources, pod_requests, spec_requests};
use skiff_pods::{affinity, taints};

use crate::pods;
use crate::preemption::{Missing, is_critical};
use crate::resources::{ResourceList, milli_value, value};
use crate::static_pods::is_static;
use crate::sysctls::AllowedSysctls;

/// Why not; becomes the reason of a failed pod.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Cow<'static, str>,
    pub message: String,
    /// What the node has too little of, if that is all that is wrong.
    pub missing: Vec<Missing>,
}

impl Refusal {
    pub fn new(reason: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Refusal {
            reason: reason.into(),
            message: message.into(),
            missing: Vec::new(),
        }
    }
}

const APP_ARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// The reason of a pod that wants another node.
pub const NODE_AFFINITY: &str = "NodeAffinity";

/// What of the machine decides whether a pod can be confined as it asks.
pub struct Confinement<'a> {
    pub sysctls: &'a AllowedSysctls,
    pub app_armor: bool,
}

/// Without a node (it is not registered yet) what depends on it is not looked at.
pub fn admit(
    pod: &Pod,
    others: &[Arc<Pod>],
    allocatable: &ResourceList,
    node: Option<&Node>,
    confinement: &Confinement<'_>,
) -> Result<(), Refusal> {
    confinement.sysctls.admit(pod)?;
    if pod
        .spec
        .as_ref()
        .and_then(|s| s.os.as_ref())
        .is_some_and(|os| os.name != "linux")
    {
        return Err(Refusal::new(
            "PodOSNotSupported",
            "Failed to admit pod as the OS field doesn't match node OS".to_owned(),
        ));
    }
    app_armor(pod, confinement.app_armor)?;
    let Some(node) = node else {
        return enough_room(pod, others, allocatable);
    };
    strict_groups(pod, node)?;
    let room = enough_room(pod, others, &with_extended(allocatable, node));
    match (room, fits_node(pod, others, node)) {
        (Ok(()), rest) => rest,
        (Err(room), Ok(())) => Err(room),
        // Room would not help.
        (Err(_), Err(rest)) if is_critical(pod) => Err(rest),
        (Err(room), Err(_)) => Err(Refusal {
            missing: Vec::new(),
            ..room
        }),
    }
}

/// What the node has, with the resources that others have given it.
fn with_extended(allocatable: &ResourceList, node: &Node) -> ResourceList {
    let given = node.status.as_ref().and_then(|status| status.allocatable.clone());
    let mut all = given.unwrap_or_default();
    all.extend(allocatable.clone());
    all
}

fn fits_node(pod: &Pod, others: &[Arc<Pod>], node: &Node) -> Result<(), Refusal> {
    if !{ pod.spec.as_ref() }.is_none_or(|spec| affinity::required_affinity_matches(spec, node)) {
        return Err(Refusal::new(
            NODE_AFFINITY,
            "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector".to_owned(),
        ));
    }
    if !free_ports(pod, others) {
        return Err(Refusal::new(
            "NodePorts",
            "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports"
                .to_owned(),
        ));
    }
    // COMPAT: taints are for pods that a scheduler places.
    let own = node.spec.as_ref().and_then(|spec| spec.taints.as_deref());
    let taints = own.filter(|_| !is_static(pod));
    let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref());
    let untolerated = taints::find_untolerated(
        taints.unwrap_or_default(),
        tolerations.unwrap_or_default(),
        |taint| taint.effect == "NoExecute",
    );
    if untolerated.is_some() {
        return Err(Refusal::new(
            "TaintToleration",
            "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate".to_owned(),
        ));
    }
    Ok(())
}

/// A profile that cannot be enforced must not be taken for one that is.
fn app_armor(pod: &Pod, enabled: bool) -> Result<(), Refusal> {
    if enabled {
        return Ok(());
    }
    let Some(spec) = &pod.spec else { return Ok(()) };
    let of_containers = pods::all_security_contexts(spec).filter_map(|c| c.app_armor_profile.as_ref());
    let of_pod = spec.security_context.as_ref();
    let confined = of_pod
        .and_then(|c| c.app_armor_profile.as_ref())
        .into_iter()
        .chain(of_containers)
        .any(|profile| profile.type_ != "Unconfined");
    let annotated = pod
        .metadata
        .annotations
        .iter()
        .flatten()
        .any(|(key, value)| key.starts_with(APP_ARMOR_ANNOTATION) && value != "unconfined");
    if confined || annotated {
        return Err(Refusal::new(
            "AppArmor",
            "Cannot enforce AppArmor: AppArmor is not enabled on the host".to_owned(),
        ));
    }
    Ok(())
}

fn strict_groups(pod: &Pod, node: &Node) -> Result<(), Refusal> {
    let context = pod.spec.as_ref().and_then(|s| s.security_context.as_ref());
    let features = node.status.as_ref().and_then(|s| s.features.as_ref());
    if context.and_then(|c| c.supplemental_groups_policy.as_deref()) == Some("Strict")
        && features.and_then(|f| f.supplemental_groups_policy) != Some(true)
    {
        return Err(Refusal::new(
            "SupplementalGroupsPolicyNotSupported",
            "SupplementalGroupsPolicy=Strict is not supported in this node".to_owned(),
        ));
    }
    Ok(())
}

/// Whether no other pod has one of the pod's host ports.
fn free_ports(pod: &Pod, others: &[Arc<Pod>]) -> bool {
    let wanted = host_ports(pod);
    let any = |ip: &str| matches!(ip, "" | "0.0.0.0" | "::");
    let clash = |a: &HostPort<'_>, b: &HostPort<'_>| {
        a.port == b.port && a.protocol == b.protocol && (a.ip == b.ip || any(a.ip) || any(b.ip))
    };
    wanted.is_empty()
        || !others.iter().any(|other| {
            host_ports(other)
                .iter()
                .any(|b| wanted.iter().any(|a| clash(a, b)))
        })
}

struct HostPort<'a> {
    ip: &'a str,
    protocol: &'a str,
    port: i32,
}

fn host_ports(pod: &Pod) -> Vec<HostPort<'_>> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let sidecars = spec
        .init_containers
        .iter()
        .flatten()
        .filter(|c| c.restart_policy.as_deref() == Some("Always"));
    spec.containers
        .iter()
        .chain(sidecars)
        .flat_map(|container| container.ports.iter().flatten())
        .filter_map(|port| {
            Some(HostPort {
                ip: port.host_ip.as_deref().unwrap_or_default(),
                protocol: port.protocol.as_deref().unwrap_or("TCP"),
                port: port.host_port.filter(|port| *port > 0)?,
            })
        })
        .collect()
}

/// What a claim has allocated is no matter of the node's amounts.
fn is_backed_by_class(pod: &Pod, resource: &str) -> bool {
    let status = pod.status.as_ref();
    let extended = status.and_then(|status| status.extended_resource_claim_status.as_ref());
    let mut mappings = extended
        .into_iter()
        .flat_map(|extended| &extended.request_mappings);
    mappings.any(|mapping| mapping.resource_name == resource)
}

fn enough_room(pod: &Pod, others: &[Arc<Pod>], allocatable: &ResourceList) -> Result<(), Refusal> {
    // What a pod asks for, not what it has: it may be one that is resized.
    let wanted = pod.spec.as_ref().map(spec_requests).unwrap_or_default();
    let mut taken = Resources::default();
    others.iter().for_each(|other| taken.add(&pod_requests(other)));
    let capacity = |name: &str| {
        allocatable
            .get(name)
            .map(if name == "cpu" { milli_value } else { value })
    };
    // COMPAT: what the node does not have at all is the cluster's business, and counts for nothing here.
    let others_wanted =
        { wanted.others.keys() }.filter(|name| capacity(name).is_some() && !is_backed_by_class(pod, name));
    let names = ["pods", "cpu", "memory", "ephemeral-storage"].into_iter();
    let mut refusal: Option<Refusal> = None;
    for name in names.chain(others_wanted.map(String::as_str)) {
        let (requested, used) = match name {
            "pods" => (1, i64::try_from(others.len()).unwrap_or(i64::MAX)),
            name => (wanted.get(name), taken.get(name)),
        };
        let capacity = capacity(name).unwrap_or(0);
        // Asking for nothing always fits, even on a node that is over-full.
        if requested <= 0 || requested <= capacity - used {
            continue;
        }
        let missing = (name.to_owned(), requested - (capacity - used));
        let refusal = refusal.get_or_insert_with(|| {
            Refusal::new(
                format!("OutOf{name}"),
                format!(
                    "Node didn't have enough resource: {name}, requested: {requested}, used: {used}, capacity: {capacity}"
                ),
            )
        });
        refusal.missing.push(missing);
    }
    refusal.map_or(Ok(()), Err)
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
            let found = admit(
                &new,
                &others,
                &allocatable,
                None,
                &Confinement {
                    sysctls: &AllowedSysctls::default(),
                    app_armor: false,
                },
            )
            .err();
            assert_eq!(
                found.as_ref().map(|r| (r.reason.as_ref(), r.message.as_str())),
                expected
            );
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

    #[test]
    fn extended_resources() {
        let check = |spec: serde_json::Value,
                     others: &[Arc<Pod>],
                     expected: Option<&str>,
                     missing: &[(&str, i64)]| {
            let node: Node = serde_json::from_value(json!({"metadata": {"name": "n1"},
                "status": {"allocatable": {"example.com/dongle": "3", "hugepages-2Mi": "4Mi", "cpu": "99"}}}))
            .unwrap();
            let pod: Pod = serde_json::from_value(json!({ "spec": spec })).unwrap();
            let allocatable: ResourceList =
                serde_json::from_value(json!({"pods": "10", "cpu": "1", "hugepages-2Mi": "2Mi"})).unwrap();
            let confinement = Confinement {
                sysctls: &AllowedSysctls::default(),
                app_armor: false,
            };
            let found = admit(&pod, others, &allocatable, Some(&node), &confinement).err();
            assert_eq!(
                found.as_ref().map(|refusal| refusal.reason.as_ref()),
                expected,
                "{pod:?}"
            );
            let short = found.map(|refusal| refusal.missing).unwrap_or_default();
            let short: Vec<(&str, i64)> = short.iter().map(|(n, q)| (n.as_str(), *q)).collect();
            assert_eq!(short, missing, "{pod:?}");
        };
        let asks = |amounts: serde_json::Value| json!({"containers": [{"name": "c", "resources": {"requests": amounts}}]});
        let other: Arc<Pod> = Arc::new(
            serde_json::from_value(json!({"spec": asks(json!({"example.com/dongle": "2"}))})).unwrap(),
        );
        let others = [other];
        check(asks(json!({"example.com/dongle": "1"})), &others, None, &[]);
        check(
            asks(json!({"example.com/dongle": "3", "cpu": "2"})),
            &others,
            Some("OutOfcpu"),
            &[("cpu", 1000), ("example.com/dongle", 2)],
        );
        check(
            asks(json!({"hugepages-2Mi": "4Mi"})),
            &[],
            Some("OutOfhugepages-2Mi"),
            &[("hugepages-2Mi", 2 << 20)],
        );
        // Nobody on the node knows it.
        check(asks(json!({"example.com/other": "1"})), &[], None, &[]);
        // Room alone would not help.
        let mut elsewhere = asks(json!({"cpu": "2"}));
        elsewhere["nodeSelector"] = json!({"disk": "ssd"});
        check(elsewhere.clone(), &[], Some("OutOfcpu"), &[]);
        elsewhere["priority"] = json!(2_000_000_000);
        check(elsewhere, &[], Some(NODE_AFFINITY), &[]);
    }

    #[test]
    fn nodes_and_taints() {
        let check = |spec: serde_json::Value, expected: Option<&str>| {
            let node: Node = serde_json::from_value(json!({
                "metadata": {"name": "n1", "labels": {"disk": "ssd", "size": "4"}},
                "spec": {"taints": [
                    {"key": "maintenance", "value": "now", "effect": "NoExecute"},
                    {"key": "other", "effect": "NoSchedule"}]}}))
            .unwrap();
            let mut spec = spec;
            spec["containers"] = json!([]);
            if spec.get("tolerations").is_none() {
                spec["tolerations"] = json!([{"operator": "Exists"}]);
            }
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
            let allocatable: ResourceList = serde_json::from_value(json!({"pods": "10"})).unwrap();
            let found = admit(
                &pod,
                &[],
                &allocatable,
                Some(&node),
                &Confinement {
                    sysctls: &AllowedSysctls::default(),
                    app_armor: false,
                },
            )
            .err();
            assert_eq!(
                found.as_ref().map(|refusal| refusal.reason.as_ref()),
                expected,
                "{pod:?}"
            );
        };
        let term = |term: serde_json::Value| {
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
                {"nodeSelectorTerms": [term]}}}})
        };
        check(json!({}), None);
        check(json!({"nodeSelector": {"disk": "ssd"}}), None);
        check(json!({"nodeSelector": {"disk": "hdd"}}), Some(NODE_AFFINITY));
        let expression = |key: &str, operator: &str, values: &[&str]| {
            term(json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]}))
        };
        check(expression("size", "Gt", &["3"]), None);
        check(expression("size", "Gt", &["4"]), Some(NODE_AFFINITY));
        check(expression("disk", "NotIn", &["ssd"]), Some(NODE_AFFINITY));
        check(
            term(json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]})),
            None,
        );
        check(
            term(json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]})),
            Some(NODE_AFFINITY),
        );
        check(term(json!({})), Some(NODE_AFFINITY));
        check(json!({"tolerations": []}), Some("TaintToleration"));
        check(
            json!({"tolerations": [{"key": "maintenance", "value": "now"}]}),
            None,
        );
        check(
            json!({"tolerations": [{"key": "maintenance", "value": "later"}]}),
            Some("TaintToleration"),
        );
        check(
            json!({"tolerations": [{"key": "maintenance", "operator": "Exists", "effect": "NoSchedule"}]}),
            Some("TaintToleration"),
        );
    }
}
