//! The cluster's records, read from informers. Of each object only what DNS answers from is kept, so that a question
//! decodes nothing.

use crate::zone::{Endpoint, Port, Records, Service, Slice};
use k8s_openapi::api::core::v1::{Namespace, Service as ServiceObject};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::Deserialize;
use skiff_client::{Informer, InformerFactory};
use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

const BY_SERVICE: &str = "service";
const BY_ADDRESS: &str = "address";
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// A Service as DNS sees it.
#[derive(Debug, Default, Deserialize)]
#[serde(from = "ServiceObject")]
struct DnsService {
    metadata: ObjectMeta,
    service: Arc<Service>,
}

/// An EndpointSlice as DNS sees it.
#[derive(Debug, Default, Deserialize)]
#[serde(from = "EndpointSlice")]
struct DnsSlice {
    metadata: ObjectMeta,
    slice: Arc<Slice>,
}

/// A Namespace's name.
#[derive(Debug, Default, Deserialize)]
struct DnsNamespace {
    #[serde(default)]
    metadata: ObjectMeta,
}

macro_rules! resource {
    ($part:ident, $of:ident, $scope:ident) => {
        impl Resource for $part {
            type DynamicType = ();
            type Scope = k8s_openapi::$scope;

            fn kind(_: &()) -> Cow<'_, str> {
                $of::kind(&())
            }
            fn group(_: &()) -> Cow<'_, str> {
                $of::group(&())
            }
            fn version(_: &()) -> Cow<'_, str> {
                $of::version(&())
            }
            fn plural(_: &()) -> Cow<'_, str> {
                $of::plural(&())
            }
            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }
            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(DnsService, ServiceObject, NamespaceResourceScope);
resource!(DnsSlice, EndpointSlice, NamespaceResourceScope);
resource!(DnsNamespace, Namespace, ClusterResourceScope);

fn port(name: Option<String>, protocol: Option<String>, port: Option<i32>) -> Port {
    Port {
        name: name.unwrap_or_default().to_lowercase(),
        protocol: protocol.as_deref().unwrap_or("TCP").to_lowercase(),
        port: port.and_then(|port| u16::try_from(port).ok()).unwrap_or(0),
    }
}

impl From<ServiceObject> for DnsService {
    fn from(object: ServiceObject) -> Self {
        let spec = object.spec.unwrap_or_default();
        let external = spec.type_.as_deref() == Some("ExternalName");
        let cluster_ips = spec.cluster_ips.or_else(|| Some(vec![spec.cluster_ip?]));
        let service = Service {
            // A headless service has the one "address" `None`, which parses as no address.
            cluster_ips: cluster_ips
                .iter()
                .flatten()
                .filter_map(|ip| ip.parse().ok())
                .collect(),
            external_name: spec.external_name.filter(|_| external),
            ports: spec
                .ports
                .unwrap_or_default()
                .into_iter()
                .map(|p| port(p.name, p.protocol, Some(p.port)))
                .collect(),
            publish_not_ready: spec.publish_not_ready_addresses.unwrap_or(false),
        };
        DnsService {
            metadata: object.metadata,
            service: Arc::new(service),
        }
    }
}

impl From<EndpointSlice> for DnsSlice {
    fn from(object: EndpointSlice) -> Self {
        let meta = &object.metadata;
        let service = meta.labels.as_ref().and_then(|labels| labels.get(SERVICE_NAME));
        let owner = (meta.namespace.clone().unwrap_or_default(), service.cloned());
        let endpoints = object.endpoints.unwrap_or_default().into_iter();
        let endpoints = endpoints.filter_map(|endpoint| {
            let pod = endpoint
                .target_ref
                .filter(|target| target.kind.as_deref() == Some("Pod"));
            Some(Endpoint {
                address: endpoint.addresses.first()?.parse().ok()?,
                hostname: endpoint.hostname.map(|name| name.to_lowercase()),
                pod: pod.and_then(|pod| pod.name),
                ready: endpoint.conditions.and_then(|c| c.ready).unwrap_or(true),
            })
        });
        let slice = Slice {
            namespace: owner.0,
            service: owner.1.unwrap_or_default(),
            ports: object
                .ports
                .unwrap_or_default()
                .into_iter()
                .map(|p| port(p.name, p.protocol, p.port))
                .collect(),
            endpoints: endpoints.collect(),
        };
        DnsSlice {
            metadata: object.metadata,
            slice: Arc::new(slice),
        }
    }
}

#[derive(Clone)]
pub struct Cluster {
    namespaces: Informer<DnsNamespace>,
    services: Informer<DnsService>,
    slices: Informer<DnsSlice>,
}

impl Cluster {
    pub fn new(factory: &InformerFactory) -> Self {
        let services = factory.partial::<DnsService>(None, None);
        services.add_index(BY_ADDRESS, |service| {
            service
                .service
                .cluster_ips
                .iter()
                .map(IpAddr::to_string)
                .collect()
        });
        let slices = factory.partial::<DnsSlice>(None, None);
        slices.add_index(BY_SERVICE, |slice| {
            vec![format!("{}/{}", slice.slice.namespace, slice.slice.service)]
        });
        slices.add_index(BY_ADDRESS, |slice| {
            let addresses = slice.slice.endpoints.iter();
            addresses.map(|endpoint| endpoint.address.to_string()).collect()
        });
        Self {
            namespaces: factory.partial(None, None),
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

impl Records for Cluster {
    fn namespace_exists(&self, namespace: &str) -> bool {
        self.namespaces.contains("", namespace)
    }

    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        Some(self.services.get(namespace, name)?.service.clone())
    }

    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<Slice>> {
        let key = format!("{namespace}/{service}");
        let found = self.slices.by_index(BY_SERVICE, &key);
        found.iter().map(|slice| slice.slice.clone()).collect()
    }

    fn service_at(&self, address: IpAddr) -> Option<(String, String)> {
        let found = self.services.by_index(BY_ADDRESS, &address.to_string());
        let meta = &found.first()?.metadata;
        Some((meta.name.clone()?, meta.namespace.clone()?))
    }

    fn slices_at(&self, address: IpAddr) -> Vec<Arc<Slice>> {
        let found = self.slices.by_index(BY_ADDRESS, &address.to_string());
        found.iter().map(|slice| slice.slice.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn service(spec: Value) -> Service {
        let object = json!({"metadata": {"name": "s", "namespace": "n"}, "spec": spec});
        let read: DnsService = serde_json::from_value(object).unwrap();
        Arc::into_inner(read.service).unwrap()
    }

    #[test]
    fn services_are_read() {
        let both = service(
            json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1", "fd00::1"],
            "ports": [{"name": "Http", "port": 80}], "type": "ClusterIP"}),
        );
        assert_eq!(both.cluster_ips.len(), 2);
        assert_eq!(
            (both.ports[0].name.as_str(), both.ports[0].protocol.as_str()),
            ("http", "tcp")
        );
        let headless =
            service(json!({"clusterIP": "None", "clusterIPs": ["None"], "publishNotReadyAddresses": true}));
        assert!(headless.cluster_ips.is_empty() && headless.publish_not_ready);
        let external = service(json!({"type": "ExternalName", "externalName": "example.com"}));
        assert_eq!(external.external_name.as_deref(), Some("example.com"));
        let left_over =
            service(json!({"type": "ClusterIP", "externalName": "example.com", "clusterIP": "10.0.0.1"}));
        assert_eq!((left_over.external_name, left_over.cluster_ips.len()), (None, 1));
    }

    #[test]
    fn slices_are_read() {
        let object = json!({"metadata": {"name": "x", "namespace": "n", "labels": {SERVICE_NAME: "s"}},
            "addressType": "IPv6", "ports": [{"name": "sql", "port": 5432, "protocol": "UDP"}],
            "endpoints": [
                {"addresses": ["fd00::2"], "hostname": "DB-0", "targetRef": {"kind": "Pod", "name": "db-0"}},
                {"addresses": ["fd00::3"], "conditions": {"ready": false}},
                {"addresses": ["not an address"]}]});
        let read: DnsSlice = serde_json::from_value(object).unwrap();
        let slice = &read.slice;
        assert_eq!(
            (
                slice.namespace.as_str(),
                slice.service.as_str(),
                slice.endpoints.len()
            ),
            ("n", "s", 2)
        );
        assert_eq!(slice.endpoints[0].hostname.as_deref(), Some("db-0"));
        assert_eq!(slice.endpoints[0].pod.as_deref(), Some("db-0"));
        assert!(slice.endpoints[0].ready && !slice.endpoints[1].ready);
        assert_eq!(slice.ports[0].protocol, "udp");
    }
}
