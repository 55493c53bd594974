//! What a cluster needs beside its components: the `kube-dns` service in front of the embedded DNS, the roles of DNS and
//! of the provisioner of local volumes. Made at every start, so that an upgrade brings them up to date. The StorageClass
//! is made once: users may change or delete it.

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
    let provisioner = "system:local-volume-provisioner";
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
        (
            "/api/v1/namespaces/kube-system/serviceaccounts",
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": LOCAL_VOLUMES, "namespace": "kube-system"}}),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/clusterroles",
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": provisioner},
                "rules": [
                    {"apiGroups": [""], "resources": ["persistentvolumes"], "verbs": ["get", "list", "watch", "create", "update", "delete"]},
                    {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get", "list", "watch", "update"]},
                    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
                    {"apiGroups": ["storage.k8s.io"], "resources": ["storageclasses"], "verbs": ["get", "list", "watch"]},
                    {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch", "update"]},
                ],
            }),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": provisioner},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": provisioner},
                "subjects": [{"kind": "ServiceAccount", "name": LOCAL_VOLUMES, "namespace": "kube-system"}],
            }),
        ),
    ]
}

/// The service account of the provisioner of local volumes.
pub const LOCAL_VOLUMES: &str = "local-volume-provisioner";

const CLASSES: &str = "/apis/storage.k8s.io/v1/storageclasses";
/// Remembers what was made once.
const MADE: &str = "/api/v1/namespaces/kube-system/configmaps/skiff-addons";
const MADE_CLASS: &str = "storageclass-local";

fn storage_class() -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
        "metadata": {"name": "local", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": skiff_node::LOCAL_PROVISIONER, "reclaimPolicy": "Delete", "volumeBindingMode": "WaitForFirstConsumer",
    })
}

/// Makes the default StorageClass of a new cluster. Not again after a user deleted it, and not beside another default.
async fn install_storage_class(client: &Client) -> Result<()> {
    let get =
        |path: &str| -> Result<http::Request<Vec<u8>>> { Ok(http::Request::get(path).body(Vec::new())?) };
    let made = match client.request::<Value>(get(MADE)?).await {
        Ok(made) => made,
        Err(kube::Error::Api(status)) if status.code == 404 => Value::Null,
        Err(error) => return Err(error.into()),
    };
    if !made["data"][MADE_CLASS].is_null() {
        return Ok(());
    }
    let classes: Value = client.request(get(CLASSES)?).await?;
    let mut classes = classes["items"].as_array().into_iter().flatten();
    let is_default = |class: &Value| {
        let annotations = &class["metadata"]["annotations"];
        annotations["storageclass.kubernetes.io/is-default-class"] == "true"
    };
    if !classes.any(is_default) {
        let request = http::Request::post(CLASSES)
            .header("content-type", "application/json")
            .body(serde_json::to_vec(&storage_class())?)?;
        match client.request::<Value>(request).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            other => {
                other?;
            }
        }
    }
    let made = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "skiff-addons", "namespace": "kube-system"},
        "data": {MADE_CLASS: "made once; delete this entry to get the class again at the next start"},
    });
    put(
        client,
        "/api/v1/namespaces/kube-system/configmaps",
        "skiff-addons",
        &made,
    )
    .await
}

pub async fn install(client: &Client, cluster: &Cluster, dns: IpAddr) -> Result<()> {
    for (path, object) in objects(cluster.service_ip(10)?, dns) {
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        put(client, path, &name, &object)
            .await
            .with_context(|| format!("{path}/{name}"))?;
    }
    install_storage_class(client)
        .await
        .context("the default StorageClass")
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
