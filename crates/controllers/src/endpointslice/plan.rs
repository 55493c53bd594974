//! From a Service and its pods to the EndpointSlices there should be. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};

use super::hints::{self, HintEvent, Slices, ZoneCounts, ZoneRatios};
use super::pod::{EndpointNode, EndpointPod};
use crate::ownership::{controller_of, controller_reference};
use crate::selector::Labels;

pub(crate) const SERVICE_NAME: &str = "kubernetes.io/service-name";
pub(crate) const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
pub(crate) const HEADLESS: &str = "service.kubernetes.io/headless";
pub(crate) const CONTROLLER: &str = "endpointslice-controller.k8s.io";
pub(super) const ZONE: &str = "topology.kubernetes.io/zone";
pub(crate) const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
pub(crate) const MAX_ENDPOINTS: usize = 100;

#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    pub create: Vec<EndpointSlice>,
    pub update: Vec<EndpointSlice>,
    pub delete: Vec<String>,
    /// Pods whose node is not known yet, with the node: they are left out until it is.
    pub skipped: Vec<(String, String)>,
    pub events: Vec<HintEvent>,
    /// By address family, how many endpoints are meant for each zone; empty if CPUs do not decide that.
    pub zone_counts: BTreeMap<&'static str, ZoneCounts>,
}

pub(crate) fn is_headless(service: &Service) -> bool {
    service.spec.as_ref().and_then(|spec| spec.cluster_ip.as_deref()) == Some("None")
}

/// IPv4 and IPv6, as far as the Service has them.
fn address_types(service: &Service) -> BTreeSet<&'static str> {
    let spec = service.spec.clone().unwrap_or_default();
    let families = spec.ip_families.unwrap_or_default();
    let named = |family: &str| if family == "IPv6" { "IPv6" } else { "IPv4" };
    if !families.is_empty() {
        return families.iter().map(|family| named(family)).collect();
    }
    match spec.cluster_ip.as_deref() {
        Some(ip) if ip.contains(':') => ["IPv6"].into(),
        _ => ["IPv4"].into(),
    }
}

fn ports_for(service: &Service, pod: &EndpointPod) -> Vec<EndpointPort> {
    let ports = service
        .spec
        .as_ref()
        .and_then(|spec| spec.ports.clone())
        .unwrap_or_default();
    let found = ports.iter().filter_map(|port| {
        Some(EndpointPort {
            name: Some(port.name.clone().unwrap_or_default()),
            port: Some(pod.find_port(port)?),
            protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".into())),
            app_protocol: port.app_protocol.clone(),
        })
    });
    found.collect()
}

/// Slices with the same ports in any order belong together.
fn port_key(ports: &[EndpointPort]) -> String {
    let mut texts: Vec<String> = ports
        .iter()
        .map(|port| {
            format!(
                "{:?}/{:?}/{:?}/{:?}",
                port.name, port.port, port.protocol, port.app_protocol
            )
        })
        .collect();
    texts.sort_unstable();
    texts.join(",")
}

fn endpoint(pod: &EndpointPod, node: Option<&EndpointNode>, service: &Service, ipv6: bool) -> Endpoint {
    let publish_all = service
        .spec
        .as_ref()
        .and_then(|spec| spec.publish_not_ready_addresses)
        .unwrap_or(false);
    let (serving, terminating) = (pod.is_ready, pod.is_terminating);
    Endpoint {
        addresses: pod.addresses(ipv6),
        conditions: Some(EndpointConditions {
            ready: Some(publish_all || (serving && !terminating)),
            serving: Some(serving),
            terminating: Some(terminating),
        }),
        hostname: pod.hostname(service),
        node_name: pod.node_name(),
        target_ref: Some(pod.target_reference()),
        zone: node.and_then(|node| node.zone.clone()),
        ..Default::default()
    }
}

/// The Service's labels plus ours; ours cannot be overridden.
fn labels_for(service: &Service) -> Labels {
    let mut labels = service.metadata.labels.clone().unwrap_or_default();
    labels.remove(HEADLESS);
    if is_headless(service) {
        labels.insert(HEADLESS.into(), String::new());
    }
    labels.insert(
        SERVICE_NAME.into(),
        service.metadata.name.clone().unwrap_or_default(),
    );
    labels.insert(MANAGED_BY.into(), CONTROLLER.into());
    labels
}

fn new_slice(
    service: &Service,
    address_type: &str,
    ports: &[EndpointPort],
    endpoints: Vec<Endpoint>,
) -> EndpointSlice {
    let mut slice = EndpointSlice {
        address_type: address_type.to_owned(),
        endpoints: Some(endpoints),
        ports: Some(ports.to_vec()),
        ..Default::default()
    };
    slice.metadata.generate_name = Some(format!(
        "{}-",
        service.metadata.name.as_deref().unwrap_or_default()
    ));
    slice.metadata.namespace = service.metadata.namespace.clone();
    slice.metadata.labels = Some(labels_for(service));
    slice.metadata.owner_references = Some(vec![controller_reference(service)]);
    slice
}

struct Group {
    ports: Vec<EndpointPort>,
    /// By the pod's uid, so that the same pod is found again in a slice.
    endpoints: BTreeMap<String, Endpoint>,
}

fn uid_of(endpoint: &Endpoint) -> &str {
    endpoint
        .target_ref
        .as_ref()
        .and_then(|target| target.uid.as_deref())
        .unwrap_or_default()
}

/// What is known of a Service.
pub(super) struct Observed<'a> {
    pub service: &'a Service,
    pub pods: &'a [Arc<EndpointPod>],
    pub node: &'a dyn Fn(&str) -> Option<Arc<EndpointNode>>,
    /// Without those that are being deleted.
    pub existing: &'a [Arc<EndpointSlice>],
    /// The part of the cluster's CPUs that each zone has.
    pub ratios: Option<&'a ZoneRatios>,
    /// Whether its endpoints were shared out among zones before.
    pub had_hints: bool,
    /// When the oldest change happened that this plan follows.
    pub trigger: Option<Timestamp>,
}

pub(super) fn plan(observed: &Observed) -> Plan {
    let mut plan = Plan::default();
    let types = address_types(observed.service);
    for slice in observed.existing {
        if !types.contains(slice.address_type.as_str()) {
            plan.delete.push(slice.metadata.name.clone().unwrap_or_default());
        }
    }
    for address_type in types {
        plan_type(observed, address_type, &mut plan);
    }
    for slice in plan.create.iter_mut().chain(&mut plan.update) {
        let annotations = slice.metadata.annotations.get_or_insert_default();
        match observed.trigger {
            Some(trigger) => annotations.insert(TRIGGER_TIME.into(), trigger.to_string()),
            None => annotations.remove(TRIGGER_TIME),
        };
        if annotations.is_empty() {
            slice.metadata.annotations = None;
        }
    }
    plan
}

fn is_owned(slice: &EndpointSlice, service: &Service) -> bool {
    let owner = controller_of(&slice.metadata);
    owner.is_some_and(|owner| Some(&owner.uid) == service.metadata.uid.as_ref())
}

fn plan_type(observed: &Observed, address_type: &'static str, plan: &mut Plan) {
    let service = observed.service;
    let existing: Vec<&Arc<EndpointSlice>> = observed
        .existing
        .iter()
        .filter(|slice| slice.address_type == address_type)
        .collect();
    let mut desired = desired_groups(observed, address_type, &mut plan.skipped);
    let mut slices = Slices::default();
    let mut deleted: Vec<&EndpointSlice> = Vec::new();
    let mut by_ports: BTreeMap<String, Vec<&EndpointSlice>> = BTreeMap::new();
    for slice in &existing {
        let key = port_key(slice.ports.as_deref().unwrap_or_default());
        if is_owned(slice, service) && desired.contains_key(&key) {
            by_ports.entry(key).or_default().push(slice);
        } else {
            deleted.push(slice);
        }
    }
    for (key, group) in &mut desired {
        let present = by_ports.remove(key).unwrap_or_default();
        plan_group(service, address_type, group, present, &mut slices, &mut deleted);
    }
    // A Service without endpoints still has one slice, so that clients can tell it from one not seen yet.
    if deleted.len() == existing.len() && slices.create.is_empty() {
        let placeholder = new_slice(service, address_type, &[], Vec::new());
        let kept = deleted.iter().position(|slice| {
            slice.endpoints.as_ref().is_none_or(Vec::is_empty)
                && slice.ports.as_ref().is_none_or(Vec::is_empty)
                && slice.metadata.labels == placeholder.metadata.labels
                && slice.metadata.owner_references == placeholder.metadata.owner_references
        });
        match kept {
            Some(kept) => {
                deleted.swap_remove(kept);
            }
            None => slices.create.push(placeholder),
        }
    }
    let (had_hints, events) = (observed.had_hints, &mut plan.events);
    let counts = hints::set(
        hints::mode(service),
        &mut slices,
        observed.ratios,
        address_type,
        had_hints,
        events,
    );
    plan.zone_counts
        .extend(counts.map(|counts| (address_type, counts)));
    // What would be deleted is filled anew instead.
    for slice in deleted {
        let name = slice.metadata.name.clone();
        match slices.create.pop_if(|_| is_owned(slice, service)) {
            Some(mut reused) => {
                reused.metadata.name = name;
                reused.metadata.generate_name = None;
                slices.update.push(reused);
            }
            None => plan.delete.extend(name),
        }
    }
    // One that is being deleted gets nothing new: the garbage collector may be at its slices.
    if service.metadata.deletion_timestamp.is_none() {
        plan.create.extend(slices.create);
    }
    plan.update.extend(slices.update);
}

/// The endpoints there should be, by their ports.
fn desired_groups(
    observed: &Observed,
    address_type: &str,
    skipped: &mut Vec<(String, String)>,
) -> BTreeMap<String, Group> {
    let service = observed.service;
    let publish_all = service
        .spec
        .as_ref()
        .and_then(|spec| spec.publish_not_ready_addresses)
        .unwrap_or(false);
    let mut desired: BTreeMap<String, Group> = BTreeMap::new();
    for pod in observed.pods.iter().filter(|pod| pod.should_be_in_endpoints()) {
        let found = (observed.node)(&pod.node);
        let ports = ports_for(service, pod);
        let group = desired.entry(port_key(&ports)).or_insert_with(|| Group {
            ports,
            endpoints: BTreeMap::new(),
        });
        if found.is_none() && !publish_all {
            skipped.push((pod.name.clone(), pod.node.clone()));
            continue;
        }
        let endpoint = endpoint(pod, found.as_deref(), service, address_type == "IPv6");
        if !endpoint.addresses.is_empty() {
            group.endpoints.insert(uid_of(&endpoint).to_owned(), endpoint);
        }
    }
    desired
}

/// Distributes the endpoints of one set of ports over slices, touching as few slices as possible.
fn plan_group<'a>(
    service: &Service,
    address_type: &str,
    group: &mut Group,
    existing: Vec<&'a EndpointSlice>,
    slices: &mut Slices,
    deleted: &mut Vec<&'a EndpointSlice>,
) {
    let labels = labels_for(service);
    let mut changed: Vec<EndpointSlice> = Vec::new();
    let mut unchanged: Vec<EndpointSlice> = Vec::new();
    for present in existing {
        let before = present.endpoints.as_deref().unwrap_or_default();
        let kept: Vec<Endpoint> = before
            .iter()
            .filter_map(|endpoint| group.endpoints.remove(uid_of(endpoint)))
            .collect();
        if kept.is_empty() && !before.is_empty() {
            deleted.push(present);
            continue;
        }
        let same = |(before, now): (&Endpoint, &Endpoint)| {
            let hints = before.hints.clone();
            *before == Endpoint { hints, ..now.clone() }
        };
        let all_same = before.len() == kept.len() && before.iter().zip(&kept).all(same);
        let mut slice = present.clone();
        if all_same && slice.metadata.labels.as_ref() == Some(&labels) {
            unchanged.push(slice);
            continue;
        }
        slice.endpoints = Some(kept);
        slice.metadata.labels = Some(labels.clone());
        changed.push(slice);
    }
    let mut rest: Vec<Endpoint> = std::mem::take(&mut group.endpoints).into_values().collect();
    let room =
        |slice: &EndpointSlice| MAX_ENDPOINTS.saturating_sub(slice.endpoints.as_ref().map_or(0, Vec::len));
    let fill = |slice: &mut EndpointSlice, rest: &mut Vec<Endpoint>| {
        let count = room(slice).min(rest.len());
        slice
            .endpoints
            .get_or_insert_default()
            .extend(rest.drain(..count));
    };
    // Slices that are written anyway take what they can, the fullest first.
    changed.sort_by_key(&room);
    for slice in &mut changed {
        fill(slice, &mut rest);
    }
    // One more slice is touched if all that is left fits into it: that is cheaper than a new one.
    let tail = rest.len() % MAX_ENDPOINTS;
    if tail > 0 {
        unchanged.sort_by_key(&room);
        if let Some(index) = unchanged.iter().position(|slice| room(slice) >= tail) {
            let mut slice = unchanged.remove(index);
            let mut part: Vec<Endpoint> = rest.drain(rest.len() - tail..).collect();
            fill(&mut slice, &mut part);
            changed.push(slice);
        }
    }
    while !rest.is_empty() {
        let part: Vec<Endpoint> = rest.drain(..rest.len().min(MAX_ENDPOINTS)).collect();
        let new = new_slice(service, address_type, &group.ports, part);
        slices.create.push(new);
    }
    slices.update.extend(changed);
    slices.unchanged.extend(unchanged);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn service(patch: Value) -> Service {
        let mut value = json!({"metadata": {"name": "web", "namespace": "default", "uid": "svc", "labels": {"a": "b"}},
            "spec": {"clusterIP": "10.0.0.1", "ipFamilies": ["IPv4"], "selector": {"app": "web"},
                "ports": [{"name": "http", "port": 80, "targetPort": "serve"}]}});
        json_merge(&mut value["spec"], &patch);
        serde_json::from_value(value).unwrap()
    }

    fn json_merge(target: &mut Value, patch: &Value) {
        for (key, value) in patch.as_object().unwrap() {
            target[key] = value.clone();
        }
    }

    fn pod(number: usize, ready: bool, deleting: bool) -> Arc<EndpointPod> {
        let deleted = if deleting {
            json!("2026-01-01T00:00:00Z")
        } else {
            json!(null)
        };
        let ip = format!("10.1.{}.{}", number / 250, number % 250 + 1);
        Arc::new(EndpointPod::of(
            &serde_json::from_value(json!({
                "metadata": {"name": format!("p{number:03}"), "namespace": "default", "uid": format!("u{number:03}"), "deletionTimestamp": deleted},
                "spec": {"nodeName": "n", "hostname": "h", "subdomain": "web",
                    "containers": [{"name": "c", "ports": [{"name": "serve", "containerPort": 8080}]}]},
                "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}, {"ip": format!("fd00::{number:x}")}],
                    "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]}}))
            .unwrap(),
        ))
    }

    fn node(name: &str) -> Option<Arc<EndpointNode>> {
        (name == "n").then(|| {
            let node = json!({"metadata": {"name": "n", "labels": {ZONE: "z"}}});
            Arc::new(EndpointNode::of(&serde_json::from_value(node).unwrap()))
        })
    }

    fn plan(
        service: &Service,
        pods: &[Arc<EndpointPod>],
        node: &dyn Fn(&str) -> Option<Arc<EndpointNode>>,
        existing: &[Arc<EndpointSlice>],
    ) -> Plan {
        super::plan(&Observed {
            service,
            pods,
            node,
            existing,
            ratios: None,
            had_hints: false,
            trigger: None,
        })
    }

    /// Gives created slices names, as the server would.
    fn stored(plan: &Plan) -> Vec<Arc<EndpointSlice>> {
        let name = |(index, slice): (usize, &EndpointSlice)| {
            let mut slice = slice.clone();
            slice.metadata.name = Some(format!("web-{index}"));
            Arc::new(slice)
        };
        plan.create.iter().enumerate().map(name).collect()
    }

    fn summary(plan: &Plan) -> String {
        let sizes = |slices: &[EndpointSlice]| {
            let all: Vec<String> = slices
                .iter()
                .map(|slice| slice.endpoints.as_ref().map_or(0, Vec::len).to_string())
                .collect();
            all.join(",")
        };
        format!(
            "create[{}] update[{}] delete[{}]",
            sizes(&plan.create),
            sizes(&plan.update),
            plan.delete.join(",")
        )
    }

    #[test]
    fn conditions_follow_the_pod() {
        let check = |service: &Service, ready: bool, deleting: bool, expected: (bool, bool, bool)| {
            let plan = plan(service, &[pod(1, ready, deleting)], &node, &[]);
            let conditions = plan.create[0].endpoints.as_ref().unwrap()[0]
                .conditions
                .clone()
                .unwrap();
            let got = (
                conditions.ready.unwrap(),
                conditions.serving.unwrap(),
                conditions.terminating.unwrap(),
            );
            assert_eq!(got, expected, "{ready} {deleting}");
        };
        let plain = service(json!({}));
        check(&plain, true, false, (true, true, false));
        check(&plain, false, false, (false, false, false));
        check(&plain, true, true, (false, true, true));
        let all = service(json!({"publishNotReadyAddresses": true}));
        check(&all, false, false, (true, false, false));
        check(&all, true, true, (true, true, true));
    }

    #[test]
    fn a_slice_says_where_and_whose() {
        let plan = plan(
            &service(json!({"clusterIP": "None"})),
            &[pod(7, true, false)],
            &node,
            &[],
        );
        let slice = &plan.create[0];
        let labels = slice.metadata.labels.clone().unwrap();
        let expected = [
            ("a", "b"),
            (HEADLESS, ""),
            (MANAGED_BY, CONTROLLER),
            (SERVICE_NAME, "web"),
        ];
        assert_eq!(labels, expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
        assert_eq!(slice.metadata.generate_name.as_deref(), Some("web-"));
        let port = &slice.ports.as_ref().unwrap()[0];
        assert_eq!(
            (port.name.as_deref(), port.port, port.protocol.as_deref()),
            (Some("http"), Some(8080), Some("TCP"))
        );
        let endpoint = &slice.endpoints.as_ref().unwrap()[0];
        assert_eq!(endpoint.addresses, vec!["10.1.0.8"]);
        assert_eq!(
            (endpoint.zone.as_deref(), endpoint.node_name.as_deref()),
            (Some("z"), Some("n"))
        );
        assert_eq!(endpoint.hostname.as_deref(), Some("h"));
    }

    #[test]
    fn few_slices_are_touched() {
        let service = service(json!({}));
        let pods: Vec<Arc<EndpointPod>> = (0..250).map(|number| pod(number, true, false)).collect();
        let first = plan(&service, &pods, &node, &[]);
        assert_eq!(summary(&first), "create[100,100,50] update[] delete[]");
        let slices = stored(&first);
        assert_eq!(
            plan(&service, &pods, &node, &slices),
            Plan::default(),
            "nothing to do the second time"
        );
        let fewer = &pods[1..];
        assert_eq!(
            summary(&plan(&service, fewer, &node, &slices)),
            "create[] update[99] delete[]"
        );
        let mut more = pods.clone();
        more.extend((250..260).map(|number| pod(number, true, false)));
        assert_eq!(
            summary(&plan(&service, &more, &node, &slices)),
            "create[] update[60] delete[]"
        );
        more.extend((260..320).map(|number| pod(number, true, false)));
        assert_eq!(
            summary(&plan(&service, &more, &node, &slices)),
            "create[70] update[] delete[]"
        );
        let few = &pods[200..];
        assert_eq!(
            summary(&plan(&service, few, &node, &slices)),
            "create[] update[] delete[web-0,web-1]"
        );
    }

    #[test]
    fn a_service_without_pods_has_an_empty_slice() {
        let service = service(json!({}));
        let first = plan(&service, &[], &node, &[]);
        assert_eq!(summary(&first), "create[0] update[] delete[]");
        let slices = stored(&first);
        assert_eq!(plan(&service, &[], &node, &slices), Plan::default());
        assert_eq!(
            summary(&plan(&service, &[pod(1, true, false)], &node, &slices)),
            "create[] update[1] delete[]",
            "what was empty is filled"
        );
    }

    #[test]
    fn writes_tell_what_they_follow_and_where_endpoints_are_for() {
        let service = service(json!({"trafficDistribution": "PreferSameZone"}));
        let trigger: Timestamp = "2026-01-01T00:00:07Z".parse().unwrap();
        let pods = [pod(1, true, false)];
        let mut observed = Observed {
            service: &service,
            pods: &pods,
            node: &node,
            existing: &[],
            ratios: None,
            had_hints: false,
            trigger: Some(trigger),
        };
        let first = super::plan(&observed);
        let told = first.create[0].metadata.annotations.clone().unwrap();
        assert_eq!(told[TRIGGER_TIME], "2026-01-01T00:00:07Z");
        let hints = first.create[0].endpoints.as_ref().unwrap()[0]
            .hints
            .clone()
            .unwrap();
        assert_eq!(hints.for_zones.unwrap()[0].name, "z");
        // Hints alone are no difference.
        let slices = stored(&first);
        observed.existing = &slices;
        assert_eq!(super::plan(&observed), Plan::default());
    }

    #[test]
    fn a_service_that_is_being_deleted_gets_nothing_new() {
        let mut service = service(json!({}));
        service.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        assert_eq!(
            plan(&service, &[pod(1, true, false)], &node, &[]),
            Plan::default()
        );
    }

    #[test]
    fn families_and_unknown_nodes() {
        let dual = service(json!({"ipFamilies": ["IPv4", "IPv6"]}));
        let plan_dual = plan(&dual, &[pod(1, true, false)], &node, &[]);
        let types: Vec<&str> = plan_dual
            .create
            .iter()
            .map(|slice| slice.address_type.as_str())
            .collect();
        assert_eq!(types, vec!["IPv4", "IPv6"]);
        let slices = stored(&plan_dual);
        let single = plan(&service(json!({})), &[pod(1, true, false)], &node, &slices);
        assert_eq!(summary(&single), "create[] update[] delete[web-1]");
        let lost = plan(&service(json!({})), &[pod(1, true, false)], &|_| None, &[]);
        assert_eq!(
            (lost.skipped.len(), summary(&lost).as_str()),
            (1, "create[0] update[] delete[]")
        );
    }
}
