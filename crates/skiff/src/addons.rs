//! What a cluster needs beside its components: the `kube-dns` service in front of the embedded DNS, and the
//! roles that let DNS read and the API server use kubelets. Made at every start, so that an upgrade brings them up to date.

use crate::cluster::Cluster;
use anyhow::{Context, Result};
use kube::Client;
use serde_json::{Value, json};
use std::net::IpAddr;

/// Objects by the path of their collection.
fn objects(cluster_ip: IpAddr, dns: IpAddr) -> Vec<(&'static str, Value)> {
    let ports = |target: bool| -> Vec<Value> {
        [("dns", "UDP"), ("dns-tcp", "TCP")]
            .iter()
            .map(|(name, protocol)| {
                let mut port = json!({"name": name, "port": 53, "protocol": protocol});
                if target {
                    port["targetPort"] = 53.into();
                }
                port
            })
            .collect()
    };
    let labels = json!({"k8s-app": "kube-dns", "kubernetes.io/cluster-service": "true", "kubernetes.io/name": "CoreDNS"});
    vec![
        (
            "/api/v1/namespaces/kube-system/serviceaccounts",
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "coredns", "namespace": "kube-system"}}),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/clusterroles",
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "system:coredns"},
                "rules": [
                    {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": ["list", "watch"]},
                    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
                ],
            }),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "system:coredns"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"},
                "subjects": [{"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}],
            }),
        ),
        (
            "/api/v1/namespaces/kube-system/services",
            json!({
                "apiVersion": "v1", "kind": "Service",
                "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
                "spec": {"clusterIP": cluster_ip.to_string(), "ports": ports(true)},
            }),
        ),
        (
            "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices",
            json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {
                    "kubernetes.io/service-name": "kube-dns", "endpointslice.kubernetes.io/managed-by": "skiff"}},
                "addressType": if dns.is_ipv4() { "IPv4" } else { "IPv6" },
                "endpoints": [{"addresses": [dns.to_string()], "conditions": {"ready": true}}],
                "ports": ports(false),
            }),
        ),
    ]
}

/// The API server's identity towards kubelets, which ask what it may do like anybody's.
fn kubelet_access() -> (&'static str, Value) {
    (
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:kube-apiserver-kubelet-client"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kubelet-api-admin"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "kube-apiserver-kubelet-client"}],
        }),
    )
}

pub async fn install(client: &Client, cluster: &Cluster, dns: IpAddr) -> Result<()> {
    let mut objects = objects(cluster.service_ip(10)?, dns);
    objects.push(kubelet_access());
    for (path, object) in objects {
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        put(client, path, &name, &object)
            .await
            .with_context(|| format!("{path}/{name}"))?;
    }
    Ok(())
}

/// Creates the object, or brings the one that is there up to date.
async fn put(client: &Client, path: &str, name: &str, object: &Value) -> Result<()> {
    let body = serde_json::to_vec(object)?;
    let request = http::Request::post(path)
        .header("content-type", "application/json")
        .body(body.clone())?;
    match client.request::<Value>(request).await {
        Err(kube::Error::Api(status))
            if status.code == 409 || (status.code == 422 && status.message.contains("already allocated")) =>
        {
            let request = http::Request::patch(format!("{path}/{name}"))
                .header("content-type", "application/merge-patch+json")
                .body(body)?;
            client.request::<Value>(request).await?;
        }
        other => {
            other?;
        }
    }
    Ok(())
}
