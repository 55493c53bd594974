//! The sandbox a pod asks for, in the runtime's terms. Pure.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use skiff_cri::v1;

use crate::config::NodeConfig;
use crate::dns::{ClusterDns, pod_dns};
use crate::hosts::kernel_hostname;
use crate::observed::labels;
use crate::pods;
use crate::resources::{
    QUOTA_PERIOD, is_sidecar, milli_cpu_to_quota, milli_cpu_to_shares, pod_cgroup_resources,
};
use crate::runtime::pod_log_dir;
use crate::security::sandbox_context;
use crate::sysctls::normalized;

/// The kubelet's words for a runtime that has none.
pub const NO_USER_NAMESPACES: &str =
    "can't set `spec.hostUsers: false`, runtime does not support user namespaces";

/// The reason and the message of an event.
pub type Warning = (&'static str, String);

/// The configuration, and warnings about it.
pub fn sandbox_config(
    pod: &Pod,
    attempt: u32,
    config: &NodeConfig,
    host_dns: &v1::DnsConfig,
    cgroup_parent: String,
    user_namespace: v1::UserNamespace,
) -> Result<(v1::PodSandboxConfig, Vec<Warning>), String> {
    let spec = pod.spec.as_ref();
    // Pod Security allows such a pod more because of this field: without the namespace it must not run.
    if spec.and_then(|s| s.host_users) == Some(false) && user_namespace.mode() != v1::NamespaceMode::Pod {
        return Err(NO_USER_NAMESPACES.to_owned());
    }
    let cluster = ClusterDns {
        servers: config.cluster_dns.clone(),
        domain: config.cluster_domain.clone(),
    };
    let (dns_config, dns_warnings) = pod_dns(pod, &cluster, host_dns);
    let warnings: Vec<_> = dns_warnings
        .into_iter()
        .map(|w| ("DNSConfigForming", w))
        .collect();
    // A pod on the host's network has the host's name.
    let hostname = if pods::is_host_network(pod) {
        String::new()
    } else {
        kernel_hostname(pod, &config.cluster_domain)?
    };
    let log_directory = pod_log_dir(
        &config.log_dir,
        pods::namespace(pod),
        pods::name(pod),
        pods::uid(pod),
    );
    let port_mappings: Vec<v1::PortMapping> = spec
        .into_iter()
        .flat_map(|s| s.containers.iter().chain(sidecars(s)))
        .flat_map(|c| c.ports.iter().flatten())
        .map(|port| v1::PortMapping {
            protocol: match port.protocol.as_deref() {
                Some("UDP") => v1::Protocol::Udp,
                Some("SCTP") => v1::Protocol::Sctp,
                _ => v1::Protocol::Tcp,
            } as i32,
            container_port: port.container_port,
            host_port: port.host_port.unwrap_or(0),
            host_ip: port.host_ip.clone().unwrap_or_default(),
        })
        .collect();
    let sysctls = spec
        .and_then(|s| s.security_context.as_ref())
        .and_then(|c| c.sysctls.as_ref())
        .into_iter()
        .flatten()
        .map(|s| (normalized(&s.name), s.value.clone()))
        .collect();
    let resources = pod_cgroup_resources(pod);
    let made = v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: pods::name(pod).to_owned(),
            uid: pods::uid(pod).to_owned(),
            namespace: pods::namespace(pod).to_owned(),
            attempt,
        }),
        hostname,
        log_directory: log_directory.to_string_lossy().into_owned(),
        dns_config: Some(dns_config),
        port_mappings,
        labels: pod_labels(pod, config),
        annotations: pod
            .metadata
            .annotations
            .clone()
            .unwrap_or_default()
            .into_iter()
            .collect(),
        linux: Some(v1::LinuxPodSandboxConfig {
            cgroup_parent,
            security_context: Some(sandbox_context(pod, user_namespace)),
            sysctls,
            overhead: spec.and_then(overhead),
            resources: Some(v1::LinuxContainerResources {
                cpu_period: QUOTA_PERIOD,
                cpu_quota: resources.cpu_quota.filter(|_| config.cpu_cfs_quota).unwrap_or(0),
                cpu_shares: resources.cpu_shares,
                memory_limit_in_bytes: resources.memory_limit.unwrap_or(0),
                ..Default::default()
            }),
        }),
        windows: None,
    };
    Ok((made, warnings))
}

/// What the sandbox itself takes, which runtimes that run virtual machines want to know.
fn overhead(spec: &PodSpec) -> Option<v1::LinuxContainerResources> {
    let amounts = skiff_pods::requests::Resources::read(spec.overhead.as_ref()?);
    Some(v1::LinuxContainerResources {
        cpu_period: QUOTA_PERIOD,
        cpu_quota: milli_cpu_to_quota(amounts.milli_cpu),
        cpu_shares: milli_cpu_to_shares(amounts.milli_cpu),
        memory_limit_in_bytes: amounts.memory,
        ..Default::default()
    })
}

/// Their ports are open as long as those of containers.
fn sidecars(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten().filter(|c| is_sidecar(c))
}

fn pod_labels(pod: &Pod, config: &NodeConfig) -> HashMap<String, String> {
    let mut all: HashMap<String, String> = pod
        .metadata
        .labels
        .clone()
        .unwrap_or_default()
        .into_iter()
        .collect();
    all.extend(identity_labels(pod));
    all.insert(labels::OWNER.to_owned(), config.cgroup_root.clone());
    all
}

/// By which the runtime's things are matched to the pod again.
pub fn identity_labels(pod: &Pod) -> [(String, String); 3] {
    [
        (labels::POD_NAME.to_owned(), pods::name(pod).to_owned()),
        (labels::POD_NAMESPACE.to_owned(), pods::namespace(pod).to_owned()),
        (labels::POD_UID.to_owned(), pods::uid(pod).to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::user_namespaces::of_host;
    use serde_json::json;

    #[test]
    fn a_sandbox() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u", "labels": {"app": "x"}},
            "spec": {"dnsPolicy": "None", "containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": 8080, "protocol": "UDP"}]}],
                "securityContext": {"sysctls": [{"name": "net/ipv4/x", "value": "1"}]}}})).unwrap();
        let config = NodeConfig::new("n", "/data", "unix:///x");
        let (made, warnings) = sandbox_config(
            &pod,
            2,
            &config,
            &v1::DnsConfig::default(),
            "/parent".into(),
            of_host(),
        )
        .unwrap();
        assert!(warnings.is_empty());
        assert_eq!(made.metadata.as_ref().unwrap().attempt, 2);
        assert_eq!(made.hostname, "p");
        assert_eq!(made.log_directory, "/data/logs/ns_p_u");
        assert_eq!(
            (made.port_mappings[0].host_port, made.port_mappings[0].protocol),
            (8080, v1::Protocol::Udp as i32)
        );
        assert_eq!(
            (made.labels["app"].as_str(), made.labels[labels::POD_UID].as_str()),
            ("x", "u")
        );
        let linux = made.linux.unwrap();
        assert_eq!(
            (linux.cgroup_parent.as_str(), linux.sysctls["net.ipv4.x"].as_str()),
            ("/parent", "1")
        );
    }
}
