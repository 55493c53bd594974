//! The Endpoints controller: the older core/v1 view of a Service's pods, for clients that still read it.

pub(crate) mod subsets;

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{EndpointAddress, EndpointPort, EndpointSubset, Endpoints, Pod, Service};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use skiff_client::{Action, ErrorExt, Informer, Key, Parts, Reconcile, reference};

use crate::endpointslice::plan::{HEADLESS, TRIGGER_TIME, is_headless};
use crate::endpointslice::pod::EndpointPod;
use crate::endpointslice::selectors::{Selectors, selects_pods};
use crate::endpointslice::trigger::TriggerTimes;
use crate::selector::matches_map;
use crate::{Context, Error, error_message, is_namespace_terminating};

const MANAGED_BY: &str = "endpoints.kubernetes.io/managed-by";
const OVER_CAPACITY: &str = "endpoints.kubernetes.io/over-capacity";

struct EndpointsOfServices {
    context: Context,
    services: Informer<Service>,
    pods: Informer<Pod>,
    endpoint_pods: Parts<Pod, EndpointPod>,
    endpoints: Informer<Endpoints>,
    selectors: Selectors,
    triggers: TriggerTimes,
}

pub(crate) async fn run(context: Context) {
    let pods: Informer<Pod> = context.informers.informer();
    let reconciler = Arc::new(EndpointsOfServices {
        services: context.informers.informer(),
        endpoint_pods: pods.parts(EndpointPod::of),
        pods,
        endpoints: context.informers.informer(),
        selectors: Selectors::default(),
        triggers: TriggerTimes::default(),
        context: context.clone(),
    });
    context
        .controller("endpoint", reconciler)
        .workers(context.workers())
        .watches(|r| &r.services, |r, change| r.selectors.follow(change))
        .watches(|r| &r.pods, |r, change| r.selectors.woken_by_pod(change))
        // Endpoints that were there before are looked at too: their Service may be gone.
        .owns(|r| &r.endpoints)
        .run()
        .await;
}

/// What the Endpoints of a Service should be; `None` if they are. `present` keeps annotations that others set, and
/// `trigger` is when the change happened that this follows.
fn plan(
    service: &Service,
    selected: &[Arc<EndpointPod>],
    present: Option<&Endpoints>,
    trigger: Option<Timestamp>,
) -> Option<Endpoints> {
    let mut endpoints = present.cloned().unwrap_or_default();
    endpoints.metadata.name = service.metadata.name.clone();
    endpoints.metadata.namespace = service.metadata.namespace.clone();
    let mut labels = service.metadata.labels.clone().unwrap_or_default();
    labels.remove(HEADLESS);
    if is_headless(service) {
        labels.insert(HEADLESS.into(), String::new());
    }
    labels.insert(MANAGED_BY.into(), "endpoint-controller".into());
    endpoints.metadata.labels = Some(labels);
    let mut all = subsets::repack(&subsets_of(service, selected));
    let truncated = subsets::truncate(&mut all);
    endpoints.subsets = (!all.is_empty()).then_some(all);
    let annotations = endpoints.metadata.annotations.get_or_insert_default();
    if truncated {
        annotations.insert(OVER_CAPACITY.into(), "truncated".into());
    } else {
        annotations.remove(OVER_CAPACITY);
    }
    if annotations.is_empty() {
        endpoints.metadata.annotations = None;
    }
    if present == Some(&endpoints) {
        return None;
    }
    let annotations = endpoints.metadata.annotations.get_or_insert_default();
    match trigger {
        Some(trigger) => annotations.insert(TRIGGER_TIME.into(), trigger.to_string()),
        None => annotations.remove(TRIGGER_TIME),
    };
    if annotations.is_empty() {
        endpoints.metadata.annotations = None;
    }
    Some(endpoints)
}

/// One subset for each pod.
fn subsets_of(service: &Service, selected: &[Arc<EndpointPod>]) -> Vec<EndpointSubset> {
    let spec = service.spec.clone().unwrap_or_default();
    let publish_all = spec.publish_not_ready_addresses.unwrap_or(false);
    let families = spec.ip_families.unwrap_or_default();
    let ipv6 = match families.first() {
        Some(family) => family == "IPv6",
        None => spec.cluster_ip.as_deref().is_some_and(|ip| ip.contains(':')),
    };
    let ports = spec.ports.unwrap_or_default();
    let mut subsets = Vec::new();
    for pod in selected.iter().filter(|pod| pod.should_be_in_endpoints()) {
        // This view has no way to say that an endpoint is going.
        if pod.is_terminating && !publish_all {
            continue;
        }
        let Some(ip) = pod.addresses(ipv6).into_iter().next() else {
            continue;
        };
        let found: Vec<EndpointPort> = ports
            .iter()
            .filter_map(|port| {
                Some(EndpointPort {
                    name: port.name.clone(),
                    port: pod.find_port(port)?,
                    protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".into())),
                    app_protocol: port.app_protocol.clone(),
                })
            })
            .collect();
        // A Service without ports is fine if it is headless; ports that no pod has are not.
        if found.is_empty() && !(ports.is_empty() && is_headless(service)) {
            continue;
        }
        let address = Some(vec![EndpointAddress {
            ip,
            hostname: pod.hostname(service),
            node_name: pod.node_name(),
            target_ref: Some(pod.target_reference()),
        }]);
        let is_ready = publish_all || pod.is_ready;
        subsets.push(EndpointSubset {
            addresses: address.clone().filter(|_| is_ready),
            not_ready_addresses: address.filter(|_| !is_ready),
            ports: (!found.is_empty()).then_some(found),
        });
    }
    subsets
}

impl Reconcile for EndpointsOfServices {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let api: Api<Endpoints> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let present = self.endpoints.get(&key.namespace, &key.name);
        let Some(service) = self.services.get(&key.namespace, &key.name) else {
            let ours = present.is_some_and(|present| {
                present
                    .metadata
                    .labels
                    .as_ref()
                    .is_some_and(|labels| labels.contains_key(MANAGED_BY))
            });
            if ours {
                match api.delete(&key.name, &DeleteParams::default()).await {
                    Ok(_) => {}
                    Err(error) if error.is_not_found() => {}
                    Err(error) => return Err(error.into()),
                }
            }
            self.triggers.forget(&key);
            return Ok(Action::Done);
        };
        if !selects_pods(&service) {
            return Ok(Action::Done);
        }
        let selector = service
            .spec
            .as_ref()
            .and_then(|spec| spec.selector.clone())
            .unwrap_or_default();
        let selected = self
            .endpoint_pods
            .list_labelled(&key.namespace, |labels| matches_map(&selector, labels));
        let trigger = self.triggers.observe(&key, &service, &selected);
        let Some(wanted) = plan(&service, &selected, present.as_deref(), trigger) else {
            return Ok(Action::Done);
        };
        let write = match &present {
            Some(_) => api.replace(&key.name, &PostParams::default(), &wanted).await,
            None => api.create(&PostParams::default(), &wanted).await,
        };
        match write {
            Ok(_) => Ok(Action::Done),
            Err(error) if is_namespace_terminating(&error) => Ok(Action::Done),
            Err(error) => {
                let (reason, verb) = match present {
                    Some(_) => ("FailedToUpdateEndpoint", "update endpoint"),
                    None => ("FailedToCreateEndpoint", "create endpoint for service"),
                };
                if !error.is_conflict() && !error.is_already_exists() {
                    let message = format!("Failed to {verb} {key}: {}", error_message(&error));
                    self.context
                        .events
                        .event(&reference(&wanted), "Warning", reason, message);
                }
                Err(error.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn subsets_group_by_ports_and_readiness() {
        let service: Service = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "default", "labels": {"a": "b"}},
            "spec": {"clusterIP": "10.0.0.1", "selector": {"app": "web"},
                "ports": [{"name": "http", "port": 80, "targetPort": "serve"}]}}))
        .unwrap();
        let pod = |name: &str, ip: &str, port: i32, ready: &str, deleted: bool| -> Arc<EndpointPod> {
            let deleted = if deleted {
                json!("2026-01-01T00:00:00Z")
            } else {
                json!(null)
            };
            Arc::new(EndpointPod::of(
                &serde_json::from_value(json!({
                    "metadata": {"name": name, "namespace": "default", "uid": name, "deletionTimestamp": deleted},
                    "spec": {"nodeName": "n", "containers": [{"name": "c", "ports": [{"name": "serve", "containerPort": port}]}]},
                    "status": {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": ready}]}}))
                .unwrap(),
            ))
        };
        let pods = [
            pod("c", "10.1.0.3", 8080, "True", false),
            pod("a", "10.1.0.1", 8080, "True", false),
            pod("b", "10.1.0.2", 8080, "False", false),
            pod("d", "10.1.0.4", 9090, "True", false),
            pod("e", "10.1.0.5", 8080, "True", true),
        ];
        let at = Timestamp::from_second(7).ok();
        let endpoints = plan(&service, &pods, None, at).unwrap();
        let told = endpoints.metadata.annotations.clone().unwrap();
        assert_eq!(told[TRIGGER_TIME], "1970-01-01T00:00:07Z");
        let ips = |list: &Option<Vec<EndpointAddress>>| -> Vec<String> {
            list.iter().flatten().map(|address| address.ip.clone()).collect()
        };
        let summary: Vec<_> = endpoints
            .subsets
            .iter()
            .flatten()
            .map(|subset| {
                (
                    ips(&subset.addresses),
                    ips(&subset.not_ready_addresses),
                    subset.ports.as_ref().unwrap()[0].port,
                )
            })
            .collect();
        let own = |list: &[&str]| list.iter().map(|ip| (*ip).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            summary,
            vec![
                (own(&["10.1.0.1", "10.1.0.3"]), own(&["10.1.0.2"]), 8080),
                (own(&["10.1.0.4"]), own(&[]), 9090)
            ]
        );
        assert_eq!(plan(&service, &pods, Some(&endpoints), None), None);
        assert_eq!(plan(&service, &[], Some(&endpoints), None).unwrap().subsets, None);
        let crowd: Vec<Arc<EndpointPod>> = (0..1001)
            .map(|number| {
                pod(
                    &format!("p{number}"),
                    &format!("10.2.{}.{}", number / 250, number % 250),
                    80,
                    "True",
                    false,
                )
            })
            .collect();
        let truncated = plan(&service, &crowd, None, None).unwrap();
        assert_eq!(
            truncated.metadata.annotations.clone().unwrap()[OVER_CAPACITY],
            "truncated"
        );
        assert_eq!(plan(&service, &crowd, Some(&truncated), None), None);
        let fewer = plan(&service, &crowd[..1000], Some(&truncated), None).unwrap();
        assert_eq!(fewer.metadata.annotations, None);
    }
}
