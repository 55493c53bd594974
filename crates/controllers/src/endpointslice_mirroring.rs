//! The EndpointSlice mirroring controller: Endpoints that someone writes by hand, for a Service without a
//! selector, become EndpointSlices, because that is what proxies read.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{EndpointAddress, Endpoints, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use skiff_client::{Action, ErrorExt, Informer, Key, Reconcile, reference};

use crate::endpoints::subsets;
use crate::endpointslice::plan::{MANAGED_BY, SERVICE_NAME, TRIGGER_TIME};
use crate::ownership::controller_reference;
use crate::{Context, Error, is_namespace_terminating};

const CONTROLLER: &str = "endpointslicemirroring-controller.k8s.io";
const SKIP: &str = "endpointslice.kubernetes.io/skip-mirror";
const LEADER: &str = "control-plane.alpha.kubernetes.io/leader";
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
const MAX_PER_SUBSET: usize = 1000;
const BY_SERVICE: &str = "mirrored service";

#[derive(Debug, Default, PartialEq)]
struct Plan {
    create: Vec<EndpointSlice>,
    update: Vec<EndpointSlice>,
    delete: Vec<String>,
    /// Reasons and messages of warnings about the Endpoints.
    events: Vec<(&'static str, String)>,
}

fn is_mirrored(endpoints: &Endpoints, service: Option<&Service>) -> bool {
    let labels = endpoints.metadata.labels.as_ref();
    let annotations = endpoints.metadata.annotations.as_ref();
    let skipped = labels
        .and_then(|labels| labels.get(SKIP))
        .is_some_and(|value| value == "true")
        || annotations.is_some_and(|annotations| annotations.contains_key(LEADER));
    let by_hand = service.is_some_and(|service| {
        let selector = service.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        selector.is_none_or(BTreeMap::is_empty)
    });
    by_hand && !skipped
}

/// `None` if the address is none.
fn mirror(address: &EndpointAddress, ready: bool) -> Option<(&'static str, Endpoint)> {
    // Written anew: it may be in an irregular form.
    let ip: IpAddr = address.ip.parse().ok()?;
    let ip = ip.to_canonical();
    let endpoint = Endpoint {
        addresses: vec![ip.to_string()],
        conditions: Some(EndpointConditions {
            ready: Some(ready),
            ..Default::default()
        }),
        hostname: address.hostname.clone().filter(|hostname| !hostname.is_empty()),
        node_name: address.node_name.clone(),
        target_ref: address.target_ref.clone(),
        ..Default::default()
    };
    Some((if ip.is_ipv6() { "IPv6" } else { "IPv4" }, endpoint))
}

/// The slices there should be, and what was left out.
#[derive(Default)]
struct Mirrored {
    slices: Vec<EndpointSlice>,
    invalid: usize,
    too_many: usize,
}

/// One slice for each address family and set of ports.
fn mirrored(endpoints: &Endpoints) -> Mirrored {
    let mut mirrored = Mirrored::default();
    let subsets = subsets::repack(endpoints.subsets.as_deref().unwrap_or_default());
    for subset in &subsets {
        let ports: Vec<EndpointPort> = subset
            .ports
            .iter()
            .flatten()
            .map(|port| EndpointPort {
                name: Some(port.name.clone().unwrap_or_default()),
                port: Some(port.port),
                protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".into())),
                app_protocol: port.app_protocol.clone(),
            })
            .collect();
        let ready = subset.addresses.iter().flatten().map(|address| (address, true));
        let not_ready = subset.not_ready_addresses.iter().flatten();
        let not_ready = not_ready.map(|address| (address, false));
        let mut by_family: BTreeMap<&str, Vec<Endpoint>> = BTreeMap::new();
        let mut count = 0;
        for (address, ready) in ready.chain(not_ready) {
            if count == MAX_PER_SUBSET {
                mirrored.too_many += 1;
                continue;
            }
            match mirror(address, ready) {
                Some((family, endpoint)) => {
                    by_family.entry(family).or_default().push(endpoint);
                    count += 1;
                }
                None => mirrored.invalid += 1,
            }
        }
        for (family, endpoint) in by_family {
            mirrored
                .slices
                .push(new_slice(endpoints, family, &ports, endpoint));
        }
    }
    mirrored
}

fn new_slice(
    endpoints: &Endpoints,
    family: &str,
    ports: &[EndpointPort],
    mirrored: Vec<Endpoint>,
) -> EndpointSlice {
    let name = endpoints.metadata.name.clone().unwrap_or_default();
    let mut labels = endpoints.metadata.labels.clone().unwrap_or_default();
    labels.insert(SERVICE_NAME.into(), name.clone());
    labels.insert(MANAGED_BY.into(), CONTROLLER.into());
    let mut annotations = endpoints.metadata.annotations.clone().unwrap_or_default();
    annotations.retain(|annotation, _| annotation != TRIGGER_TIME && annotation != LAST_APPLIED);
    let mut slice = EndpointSlice {
        address_type: family.to_owned(),
        ports: Some(ports.to_vec()),
        endpoints: Some(mirrored),
        ..Default::default()
    };
    slice.metadata.generate_name = Some(format!("{name}-"));
    slice.metadata.namespace = endpoints.metadata.namespace.clone();
    slice.metadata.labels = Some(labels);
    slice.metadata.annotations = (!annotations.is_empty()).then_some(annotations);
    slice.metadata.owner_references = Some(vec![controller_reference(endpoints)]);
    slice
}

/// True if the slice shows the same endpoints for the same Endpoints, in whatever order.
fn shows(present: &EndpointSlice, wanted: &EndpointSlice) -> bool {
    let sorted = |slice: &EndpointSlice| {
        let mut endpoints = slice.endpoints.clone().unwrap_or_default();
        endpoints.sort_by(|left, right| left.addresses.cmp(&right.addresses));
        endpoints
    };
    present.metadata.labels == wanted.metadata.labels
        && present.metadata.annotations == wanted.metadata.annotations
        && present.metadata.owner_references == wanted.metadata.owner_references
        && sorted(present) == sorted(wanted)
}

fn plan(endpoints: Option<&Endpoints>, existing: &[Arc<EndpointSlice>]) -> Plan {
    let mut plan = Plan::default();
    let mirrored = endpoints.map(mirrored).unwrap_or_default();
    let mut present: Vec<&Arc<EndpointSlice>> = existing.iter().collect();
    let mut missing = Vec::new();
    for wanted in mirrored.slices {
        let same = |slice: &&Arc<EndpointSlice>| {
            slice.address_type == wanted.address_type && slice.ports == wanted.ports
        };
        match present.iter().position(same) {
            Some(index) => {
                let slice = present.remove(index);
                if !shows(slice, &wanted) {
                    plan.update.push(replaced(slice, wanted));
                }
            }
            None => missing.push(wanted),
        }
    }
    // What would be deleted is filled anew instead.
    for wanted in missing {
        let family = |slice: &&Arc<EndpointSlice>| slice.address_type == wanted.address_type;
        match present.iter().position(family) {
            Some(index) => plan.update.push(replaced(present.remove(index), wanted)),
            None => plan.create.push(wanted),
        }
    }
    plan.delete = present
        .into_iter()
        .filter_map(|slice| slice.metadata.name.clone())
        .collect();
    if endpoints.is_some_and(|endpoints| endpoints.metadata.deletion_timestamp.is_some()) {
        plan.create.clear();
    }
    if mirrored.invalid > 0 {
        let message = format!(
            "Skipped {} invalid IP addresses when mirroring to EndpointSlices",
            mirrored.invalid
        );
        plan.events.push(("InvalidIPAddress", message));
    }
    if mirrored.too_many > 0 {
        let skipped = mirrored.too_many + mirrored.invalid;
        let message = format!(
            "A max of {MAX_PER_SUBSET} addresses can be mirrored to EndpointSlices per Endpoints subset. {skipped} addresses were skipped"
        );
        plan.events.push(("TooManyAddressesToMirror", message));
    }
    plan
}

/// `wanted` under the name and version of a slice that is there.
fn replaced(present: &EndpointSlice, mut wanted: EndpointSlice) -> EndpointSlice {
    wanted.metadata.name = present.metadata.name.clone();
    wanted.metadata.resource_version = present.metadata.resource_version.clone();
    wanted.metadata.generate_name = None;
    wanted
}

fn service_of(slice: &EndpointSlice) -> Option<Key> {
    let labels = slice.metadata.labels.as_ref()?;
    let ours = labels.get(MANAGED_BY).map(String::as_str) == Some(CONTROLLER);
    let name = labels.get(SERVICE_NAME).filter(|_| ours)?;
    Some(Key::new(
        slice.metadata.namespace.clone().unwrap_or_default(),
        name.clone(),
    ))
}

fn by_service(slice: &EndpointSlice) -> Vec<String> {
    service_of(slice).map(|key| key.to_string()).into_iter().collect()
}

struct MirroredSlices {
    context: Context,
    services: Informer<Service>,
    endpoints: Informer<Endpoints>,
    slices: Informer<EndpointSlice>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(MirroredSlices {
        services: context.informers.informer(),
        endpoints: context.informers.informer(),
        slices: context.informers.informer(),
        context: context.clone(),
    });
    reconciler.slices.add_index(BY_SERVICE, by_service);
    context
        .controller("endpoint_slice_mirroring", reconciler)
        .workers(context.workers())
        .owns(|r| &r.services)
        .owns(|r| &r.endpoints)
        .watches_own(|r| &r.slices, |_, change| service_of(change.object()))
        .run()
        .await;
}

impl Reconcile for MirroredSlices {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let service = self.services.get(&key.namespace, &key.name);
        let endpoints = self.endpoints.get(&key.namespace, &key.name);
        let existing = self.slices.by_index(BY_SERVICE, &key.to_string());
        let mirrored = endpoints.filter(|endpoints| is_mirrored(endpoints, service.as_deref()));
        if mirrored.is_none() && existing.is_empty() {
            return Ok(Action::Done);
        }
        let plan = plan(mirrored.as_deref(), &existing);
        if let Some(endpoints) = &mirrored {
            let about = reference(&**endpoints);
            for (reason, message) in &plan.events {
                self.context
                    .events
                    .event(&about, "Warning", reason, message.clone());
            }
        }
        let api: Api<EndpointSlice> = Api::namespaced(self.context.client.clone(), &key.namespace);
        for slice in &plan.create {
            match api.create(&PostParams::default(), slice).await {
                Ok(_) => {}
                Err(error) if is_namespace_terminating(&error) => return Ok(Action::Done),
                Err(error) => return Err(error.into()),
            }
        }
        for slice in &plan.update {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            api.replace(name, &PostParams::default(), slice).await?;
        }
        for name in &plan.delete {
            match api.delete(name, &DeleteParams::default()).await {
                Ok(_) => {}
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Action::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn endpoints(ips: &[&str]) -> Endpoints {
        let addresses: Vec<_> = ips.iter().map(|ip| json!({"ip": ip})).collect();
        serde_json::from_value(
            json!({"metadata": {"name": "db", "namespace": "default", "uid": "e"},
            "subsets": [{"addresses": addresses, "ports": [{"port": 5432}]}]}),
        )
        .unwrap()
    }

    #[test]
    fn slices_follow_the_endpoints() {
        let first = plan(Some(&endpoints(&["192.0.2.1", "2001:db8::1"])), &[]);
        let families: Vec<&str> = first
            .create
            .iter()
            .map(|slice| slice.address_type.as_str())
            .collect();
        assert_eq!(families, vec!["IPv4", "IPv6"]);
        let stored: Vec<Arc<EndpointSlice>> = first
            .create
            .iter()
            .map(|slice| {
                let mut slice = slice.clone();
                slice.metadata.name = Some(slice.address_type.clone());
                Arc::new(slice)
            })
            .collect();
        assert_eq!(
            plan(Some(&endpoints(&["192.0.2.1", "2001:db8::1"])), &stored),
            Plan::default()
        );
        let changed = plan(Some(&endpoints(&["192.0.2.2"])), &stored);
        assert_eq!(
            (changed.update.len(), changed.delete),
            (1, vec!["IPv6".to_owned()])
        );
        assert_eq!(plan(None, &stored).delete.len(), 2);
    }

    #[test]
    fn annotations_follow_and_slices_are_reused() {
        let mut annotated = endpoints(&["192.0.2.1"]);
        let annotations = json!({"a": "b", TRIGGER_TIME: "t", LAST_APPLIED: "{}"});
        annotated.metadata.annotations = serde_json::from_value(annotations).unwrap();
        let mut slice = plan(Some(&annotated), &[]).create.remove(0);
        assert_eq!(
            slice.metadata.annotations,
            Some([("a".to_owned(), "b".to_owned())].into())
        );
        slice.metadata.name = Some("s".into());
        let stored = [Arc::new(slice)];
        // Another port: the slice is filled anew. The same addresses in another order: nothing.
        let mut moved = annotated.clone();
        moved.subsets.as_mut().unwrap()[0].ports.as_mut().unwrap()[0].port = 1;
        let changed = plan(Some(&moved), &stored);
        assert!(changed.create.is_empty() && changed.delete.is_empty());
        assert_eq!(changed.update[0].metadata.name.as_deref(), Some("s"));
        annotated.metadata.annotations = None;
        assert_eq!(plan(Some(&annotated), &stored).update.len(), 1);
        // An address in two subsets is mirrored once for all its ports.
        let mut twice = endpoints(&["192.0.2.1"]);
        let mut second = twice.subsets.clone().unwrap()[0].clone();
        second.ports.as_mut().unwrap()[0].port = 1;
        twice.subsets.as_mut().unwrap().push(second);
        let packed = plan(Some(&twice), &[]).create;
        assert_eq!((packed.len(), packed[0].ports.as_ref().unwrap().len()), (1, 2));
    }

    #[test]
    fn what_is_left_out_is_told() {
        let many: Vec<String> = (0..1002)
            .map(|number| format!("10.0.{}.{}", number / 250, number % 250))
            .collect();
        let mut ips: Vec<&str> = many.iter().map(String::as_str).collect();
        ips.insert(0, "0.bad");
        let plan = plan(Some(&endpoints(&ips)), &[]);
        assert_eq!(plan.create[0].endpoints.as_ref().map(Vec::len), Some(1000));
        let reasons: Vec<&str> = plan.events.iter().map(|(reason, _)| *reason).collect();
        assert_eq!(reasons, ["InvalidIPAddress", "TooManyAddressesToMirror"]);
        assert!(
            plan.events[1].1.ends_with("3 addresses were skipped"),
            "{:?}",
            plan.events
        );
    }

    #[test]
    fn only_what_was_written_by_hand() {
        let check = |labels: serde_json::Value, selector: Option<serde_json::Value>, expected: bool| {
            let mut endpoints = endpoints(&[]);
            endpoints.metadata.labels = serde_json::from_value(labels).unwrap();
            let service = selector.map(|selector| {
                serde_json::from_value::<Service>(json!({"spec": {"selector": selector}})).unwrap()
            });
            assert_eq!(is_mirrored(&endpoints, service.as_ref()), expected);
        };
        check(json!({}), Some(json!(null)), true);
        check(json!({}), Some(json!({"app": "x"})), false);
        check(json!({SKIP: "true"}), Some(json!(null)), false);
        check(json!({}), None, false);
    }
}
