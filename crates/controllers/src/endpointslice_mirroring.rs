//! The EndpointSlice mirroring controller: Endpoints that someone writes by hand, for a Service without a
//! selector, become EndpointSlices, because that is what proxies read.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{EndpointAddress, Endpoints, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use skiff_client::{Action, ErrorExt, Informer, Key, Reconcile};

use crate::endpointslice::plan::{MANAGED_BY, SERVICE_NAME};
use crate::ownership::controller_reference;
use crate::{Context, Error, is_namespace_terminating};

const CONTROLLER: &str = "endpointslicemirroring-controller.k8s.io";
const SKIP: &str = "endpointslice.kubernetes.io/skip-mirror";
const LEADER: &str = "control-plane.alpha.kubernetes.io/leader";
const MAX_PER_SUBSET: usize = 1000;
const BY_SERVICE: &str = "mirrored service";

#[derive(Debug, Default, PartialEq)]
struct Plan {
    create: Vec<EndpointSlice>,
    update: Vec<EndpointSlice>,
    delete: Vec<String>,
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

fn mirror(address: &EndpointAddress, ready: bool) -> Endpoint {
    Endpoint {
        addresses: vec![address.ip.clone()],
        conditions: Some(EndpointConditions {
            ready: Some(ready),
            ..Default::default()
        }),
        hostname: address.hostname.clone(),
        node_name: address.node_name.clone(),
        target_ref: address.target_ref.clone(),
        ..Default::default()
    }
}

/// One slice for each address family and set of ports.
fn wanted_slices(endpoints: &Endpoints) -> Vec<EndpointSlice> {
    let mut groups: BTreeMap<(String, String), (Vec<EndpointPort>, Vec<Endpoint>)> = BTreeMap::new();
    for subset in endpoints.subsets.iter().flatten() {
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
        let not_ready = subset
            .not_ready_addresses
            .iter()
            .flatten()
            .map(|address| (address, false));
        for (address, ready) in ready.chain(not_ready).take(MAX_PER_SUBSET) {
            let family = if address.ip.contains(':') { "IPv6" } else { "IPv4" };
            let group = groups
                .entry((family.to_owned(), format!("{ports:?}")))
                .or_insert_with(|| (ports.clone(), Vec::new()));
            group.1.push(mirror(address, ready));
        }
    }
    let name = endpoints.metadata.name.clone().unwrap_or_default();
    let mut labels = endpoints.metadata.labels.clone().unwrap_or_default();
    labels.insert(SERVICE_NAME.into(), name.clone());
    labels.insert(MANAGED_BY.into(), CONTROLLER.into());
    let slice = |((family, _), (ports, mirrored)): (_, (Vec<EndpointPort>, Vec<Endpoint>))| {
        let mut slice = EndpointSlice {
            address_type: family,
            ports: Some(ports),
            endpoints: Some(mirrored),
            ..Default::default()
        };
        slice.metadata.generate_name = Some(format!("{name}-"));
        slice.metadata.namespace = endpoints.metadata.namespace.clone();
        slice.metadata.labels = Some(labels.clone());
        slice.metadata.owner_references = Some(vec![controller_reference(endpoints)]);
        slice
    };
    groups.into_iter().map(slice).collect()
}

fn plan(endpoints: Option<&Endpoints>, existing: &[Arc<EndpointSlice>]) -> Plan {
    let mut plan = Plan::default();
    let mut present: Vec<&Arc<EndpointSlice>> = existing.iter().collect();
    for wanted in endpoints.map(wanted_slices).unwrap_or_default() {
        let owners = &wanted.metadata.owner_references;
        let reusable = present.iter().position(|slice| {
            slice.address_type == wanted.address_type
                && slice.ports == wanted.ports
                && slice.metadata.owner_references == *owners
        });
        let Some(index) = reusable else {
            plan.create.push(wanted);
            continue;
        };
        let mut slice = (**present.remove(index)).clone();
        if slice.endpoints != wanted.endpoints || slice.metadata.labels != wanted.metadata.labels {
            slice.endpoints = wanted.endpoints;
            slice.metadata.labels = wanted.metadata.labels;
            plan.update.push(slice);
        }
    }
    plan.delete = present
        .into_iter()
        .filter_map(|slice| slice.metadata.name.clone())
        .collect();
    plan
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
        .workers(5)
        .owns(|r| &r.services)
        .owns(|r| &r.endpoints)
        .watches(|r| &r.slices, |_, change| service_of(change.object()))
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
