//! What endpoints show of a pod and of its node. A Service may have thousands of pods, and each change of one looks at
//! all of them: the controllers keep this part instead of decoding the pods.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod, Service, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::plan::ZONE;
use crate::pods;

#[derive(Debug)]
struct NamedPort {
    name: String,
    protocol: String,
    port: i32,
}

/// A pod as far as endpoints go.
#[derive(Debug)]
pub(crate) struct EndpointPod {
    pub(crate) name: String,
    namespace: Option<String>,
    uid: Option<String>,
    pub(crate) node: String,
    addresses: Vec<String>,
    has_ended: bool,
    pub(crate) is_ready: bool,
    /// When it became ready or stopped to be.
    pub(crate) ready_changed: Option<Timestamp>,
    pub(crate) is_terminating: bool,
    hostname: Option<String>,
    subdomain: Option<String>,
    ports: Vec<NamedPort>,
}

impl EndpointPod {
    pub(crate) fn of(pod: &Pod) -> Self {
        let (meta, spec, status) = (&pod.metadata, pod.spec.as_ref(), pod.status.as_ref());
        let ready = pods::condition(pod, "Ready");
        EndpointPod {
            name: meta.name.clone().unwrap_or_default(),
            namespace: meta.namespace.clone(),
            uid: meta.uid.clone(),
            node: pods::node_name(pod).to_owned(),
            addresses: status.map(addresses).unwrap_or_default(),
            has_ended: pods::is_terminal(pod),
            is_ready: pods::is_ready(pod),
            ready_changed: ready.and_then(|ready| Some(ready.last_transition_time.as_ref()?.0)),
            is_terminating: meta.deletion_timestamp.is_some(),
            hostname: spec.and_then(|spec| spec.hostname.clone()),
            subdomain: spec.and_then(|spec| spec.subdomain.clone()),
            ports: named_ports(pod),
        }
    }

    /// The port that a service port means; `None` if the pod has no port of that name.
    pub(crate) fn find_port(&self, port: &ServicePort) -> Option<i32> {
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        match &port.target_port {
            None => Some(port.port),
            Some(IntOrString::Int(0)) => Some(port.port),
            Some(IntOrString::Int(number)) => Some(*number),
            Some(IntOrString::String(name)) => {
                let mut named = self.ports.iter();
                let found = named.find(|one| one.name == *name && one.protocol == protocol);
                found.map(|one| one.port)
            }
        }
    }

    pub(crate) fn should_be_in_endpoints(&self) -> bool {
        !self.addresses.is_empty() && !self.has_ended
    }

    /// The name under which a headless Service's DNS finds the pod.
    pub(crate) fn hostname(&self, service: &Service) -> Option<String> {
        let wanted = self.hostname.as_ref().filter(|hostname| !hostname.is_empty())?;
        let ours = self.subdomain.is_some()
            && self.subdomain == service.metadata.name
            && self.namespace == service.metadata.namespace;
        ours.then(|| wanted.clone())
    }

    pub(crate) fn target_reference(&self) -> ObjectReference {
        ObjectReference {
            kind: Some("Pod".into()),
            namespace: self.namespace.clone(),
            name: Some(self.name.clone()),
            uid: self.uid.clone(),
            ..Default::default()
        }
    }

    pub(crate) fn node_name(&self) -> Option<String> {
        Some(self.node.clone()).filter(|name| !name.is_empty())
    }

    pub(crate) fn addresses(&self, ipv6: bool) -> Vec<String> {
        let all = self.addresses.iter();
        all.filter(|ip| ip.contains(':') == ipv6).cloned().collect()
    }
}

fn addresses(status: &k8s_openapi::api::core::v1::PodStatus) -> Vec<String> {
    let mut all: Vec<&String> = status.pod_ips.iter().flatten().map(|ip| &ip.ip).collect();
    if all.is_empty() {
        all.extend(&status.pod_ip);
    }
    all.into_iter().filter(|ip| !ip.is_empty()).cloned().collect()
}

fn named_ports(pod: &Pod) -> Vec<NamedPort> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    // Sidecars serve too; other init containers have ended.
    let sidecars = spec
        .init_containers
        .iter()
        .flatten()
        .filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let containers = spec.containers.iter().chain(sidecars);
    let ports = containers.flat_map(|container| container.ports.iter().flatten());
    ports
        .filter_map(|port| {
            Some(NamedPort {
                name: port.name.clone()?,
                protocol: port.protocol.clone().unwrap_or_else(|| "TCP".into()),
                port: port.container_port,
            })
        })
        .collect()
}

/// A node as far as endpoints go.
#[derive(Debug)]
pub(super) struct EndpointNode {
    pub(super) zone: Option<String>,
}

impl EndpointNode {
    pub(super) fn of(node: &Node) -> Self {
        let labels = node.metadata.labels.as_ref();
        EndpointNode {
            zone: labels.and_then(|labels| labels.get(ZONE)).cloned(),
        }
    }
}
