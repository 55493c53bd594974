//! The cluster's records, read from informers.

use crate::zone::{Endpoint, Port, Records, Service};
use k8s_openapi::api::core::v1::{Namespace, Service as ServiceObject};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use skiff_client::{Informer, InformerFactory};
use std::net::IpAddr;

const BY_SERVICE: &str = "service";
const BY_ADDRESS: &str = "address";
const SERVICE_NAME: &str = "kubernetes.io/service-name";

#[derive(Clone)]
pub struct Cluster {
    namespaces: Informer<Namespace>,
    services: Informer<ServiceObject>,
    slices: Informer<EndpointSlice>,
}

impl Cluster {
    pub fn new(factory: &InformerFactory) -> Self {
        let services = factory.informer::<ServiceObject>();
        services.add_index(BY_ADDRESS, |service| {
            service
                .spec
                .as_ref()
                .and_then(|s| s.cluster_ips.clone())
                .unwrap_or_default()
        });
        let slices = factory.informer::<EndpointSlice>();
        slices.add_index(BY_SERVICE, |slice| service_of(slice).into_iter().collect());
        slices.add_index(BY_ADDRESS, |slice| {
            slice
                .endpoints
                .iter()
                .flatten()
                .flat_map(|e| e.addresses.clone())
                .collect()
        });
        Self {
            namespaces: factory.informer(),
            services,
            slices,
        }
    }

    pub async fn synced(&self) {
        self.namespaces.synced().await;
        self.services.synced().await;
        self.slices.synced().await;
    }
}

fn service_of(slice: &EndpointSlice) -> Option<String> {
    let name = slice.metadata.labels.as_ref()?.get(SERVICE_NAME)?;
    Some(format!("{}/{name}", slice.metadata.namespace.as_deref()?))
}

fn endpoints_of(slice: &EndpointSlice, publish_not_ready: bool) -> Vec<Endpoint> {
    let ports: Vec<Port> = slice
        .ports
        .iter()
        .flatten()
        .map(|p| Port {
            name: p.name.clone().unwrap_or_default(),
            protocol: p.protocol.as_deref().unwrap_or("TCP").to_lowercase(),
            port: p.port.and_then(|p| u16::try_from(p).ok()).unwrap_or(0),
        })
        .collect();
    let ready = |e: &&k8s_openapi::api::discovery::v1::Endpoint| {
        publish_not_ready || e.conditions.as_ref().and_then(|c| c.ready).unwrap_or(true)
    };
    let addressed = slice.endpoints.iter().flatten().filter(ready).filter_map(|e| {
        let address = e.addresses.first()?.parse().ok()?;
        Some(Endpoint {
            address,
            hostname: e.hostname.clone(),
            ports: ports.clone(),
        })
    });
    addressed.collect()
}

impl Records for Cluster {
    fn namespace_exists(&self, namespace: &str) -> bool {
        self.namespaces.get("", namespace).is_some()
    }

    fn service(&self, namespace: &str, name: &str) -> Option<Service> {
        let object = self.services.get(namespace, name)?;
        let spec = object.spec.as_ref()?;
        let external_name = (spec.type_.as_deref() == Some("ExternalName"))
            .then(|| spec.external_name.clone())
            .flatten();
        // A headless service has the one "address" `None`, which parses as no address.
        let cluster_ips = spec
            .cluster_ips
            .iter()
            .flatten()
            .filter_map(|ip| ip.parse().ok())
            .collect();
        let ports = spec.ports.iter().flatten().map(|p| Port {
            name: p.name.clone().unwrap_or_default(),
            protocol: p.protocol.as_deref().unwrap_or("TCP").to_lowercase(),
            port: u16::try_from(p.port).unwrap_or(0),
        });
        Some(Service {
            cluster_ips,
            external_name,
            ports: ports.collect(),
        })
    }

    fn endpoints(&self, namespace: &str, service: &str) -> Vec<Endpoint> {
        let object = self.services.get(namespace, service);
        let publish = object
            .and_then(|s| s.spec.as_ref().and_then(|s| s.publish_not_ready_addresses))
            .unwrap_or(false);
        let slices = self
            .slices
            .by_index(BY_SERVICE, &format!("{namespace}/{service}"));
        slices
            .iter()
            .flat_map(|slice| endpoints_of(slice, publish))
            .collect()
    }

    fn names_of(&self, address: IpAddr) -> Vec<(String, String, Option<String>)> {
        let text = address.to_string();
        let mut names = Vec::new();
        for service in self.services.by_index(BY_ADDRESS, &text) {
            let meta = &service.metadata;
            names.push((
                meta.name.clone().unwrap_or_default(),
                meta.namespace.clone().unwrap_or_default(),
                None,
            ));
        }
        for slice in self.slices.by_index(BY_ADDRESS, &text) {
            let Some(owner) = service_of(&slice) else { continue };
            let Some((namespace, service)) = owner.split_once('/') else {
                continue;
            };
            for endpoint in endpoints_of(&slice, true)
                .into_iter()
                .filter(|e| e.address == address)
            {
                // COMPAT: only endpoints of headless services have names of their own.
                if self
                    .service(namespace, service)
                    .is_some_and(|s| s.cluster_ips.is_empty())
                {
                    names.push((service.to_owned(), namespace.to_owned(), Some(endpoint.host())));
                }
            }
        }
        names
    }
}
