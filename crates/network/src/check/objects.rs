//! What the walk reads of pods and services. Pure.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Pod, Service};

/// Of lists that are shown, and of endpoints that are looked at one by one.
pub(super) const MAX_ENDPOINTS: usize = 10;

pub(super) fn list(all: &[impl ToString]) -> String {
    let shown: Vec<String> = all.iter().take(MAX_ENDPOINTS).map(ToString::to_string).collect();
    match all.len() > shown.len() {
        true => format!("{} and {} more", shown.join(", "), all.len() - shown.len()),
        false => shown.join(", "),
    }
}

pub(super) fn cluster_ips(service: &Service) -> Vec<IpAddr> {
    let spec = service.spec.as_ref();
    let all = spec.and_then(|spec| spec.cluster_ips.as_ref());
    all.into_iter()
        .flatten()
        .filter_map(|address| address.parse().ok())
        .collect()
}

pub(super) fn addresses_of(pod: &Pod) -> Vec<IpAddr> {
    let all = pod.status.as_ref().and_then(|status| status.pod_ips.as_ref());
    all.into_iter()
        .flatten()
        .filter_map(|one| one.ip.parse().ok())
        .collect()
}

pub(super) fn phase_of(pod: &Pod) -> &str {
    let status = pod.status.as_ref();
    status
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Unknown")
}

pub(super) fn node_of(pod: &Pod) -> &str {
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.node_name.as_deref()).unwrap_or("-")
}

pub(super) fn is_host_network(pod: &Pod) -> bool {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.host_network)
        .unwrap_or(false)
}

pub(super) fn key_of(pod: &Pod) -> String {
    let meta = &pod.metadata;
    format!(
        "{}/{}",
        meta.namespace.as_deref().unwrap_or_default(),
        meta.name.as_deref().unwrap_or_default()
    )
}
