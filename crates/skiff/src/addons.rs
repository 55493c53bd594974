//! What a cluster needs beside its components: the `kube-dns` service in front of the embedded DNS, and the roles of DNS, of
//! the pod network, of the Metrics API, of the API server towards kubelets, of the provisioner of local volumes, of the ingress
//! proxy, of the load balancer, of who writes the status of administrators' network policies, and of the service proxy, which
//! reports to the trace. Made at every start, so that an upgrade brings them up to date. The StorageClass and the
//! IngressClass are made once: users may change or delete them.

use crate::cluster::Cluster;
use anyhow::{Context, Result};
use kube::Client;
use serde_json::{Value, json};
use skiff_network::policy::{TIER_GROUP, TIER_RESOURCES};
use std::net::IpAddr;

const CLUSTER_ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
const CLUSTER_ROLE_BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";

const ROLE_BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings";

/// Objects by the path of their collection.
fn objects() -> Vec<(&'static str, Value)> {
    let provisioner = "system:local-volume-provisioner";
    vec![
        (
            "/api/v1/namespaces/kube-system/serviceaccounts",
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "coredns", "namespace": "kube-system"}}),
        ),
        (
            CLUSTER_ROLES,
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "system:coredns"},
                "rules": [
                    {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": ["list", "watch"]},
                    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
                    // Its own Node says where it listens.
                    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]},
                ],
            }),
        ),
        (
            CLUSTER_ROLE_BINDINGS,
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "system:coredns"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"},
                "subjects": [{"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}],
            }),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/clusterroles",
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "skiff:trace-reporter"},
                "rules": [{"nonResourceURLs": ["/debug/skiff/trace"], "verbs": ["post"]}],
            }),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "skiff:trace-reporter"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "skiff:trace-reporter"},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:kube-proxy"}],
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
                    // Directories are made and removed by their nodes.
                    {"apiGroups": [""], "resources": ["nodes/proxy"], "verbs": ["get", "update", "delete"]},
                    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
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

/// The service in front of cluster DNS. Where another DNS server takes its place, name and address are free for that.
fn dns_service(cluster_ip: IpAddr) -> (&'static str, Value) {
    let ports = [("dns", "UDP"), ("dns-tcp", "TCP")]
        .map(|(name, protocol)| json!({"name": name, "port": 53, "protocol": protocol, "targetPort": 53}));
    let labels = json!({"k8s-app": "kube-dns", "kubernetes.io/cluster-service": "true", "kubernetes.io/name": "CoreDNS"});
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
        // Every node has an instance, and pods ask their own node's.
        "spec": {"clusterIP": cluster_ip.to_string(), "ports": ports, "trafficDistribution": "PreferSameNode"},
    });
    ("/api/v1/namespaces/kube-system/services", service)
}

/// The service account that keeps the endpoints of cluster DNS.
pub const DNS_ENDPOINTS: &str = "cluster-dns-controller";

/// Somebody writes where cluster DNS answers.
fn dns_endpoints_objects() -> Vec<(&'static str, Value)> {
    let role = |name: &str, rules: Value| json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules});
    let binding = |name: &str, subject: Value| {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [subject],
        })
    };
    let nodes = json!({"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]});
    let slices = json!({"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch", "create", "update", "patch", "delete"]});
    let dns = "skiff:cluster-dns-endpoints";
    let events = "skiff:corefile-events";
    let of_dns = |name: &str, role: &str| {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": name, "namespace": "kube-system"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}],
        })
    };
    vec![
        (
            ROLE_BINDINGS,
            of_dns("skiff:coredns", crate::joining::CLUSTER_DNS_ROLE),
        ),
        // It tells why it does not take a Corefile.
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles",
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": events, "namespace": "kube-system"},
                "rules": [{"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]}],
            }),
        ),
        (ROLE_BINDINGS, of_dns(events, events)),
        (CLUSTER_ROLES, role(dns, json!([nodes, slices]))),
        (
            CLUSTER_ROLE_BINDINGS,
            binding(
                dns,
                json!({"kind": "ServiceAccount", "name": DNS_ENDPOINTS, "namespace": "kube-system"}),
            ),
        ),
    ]
}

/// The service account of the ingress proxy.
pub const INGRESS: &str = "skiff-ingress";

/// What the ingress proxy reads and writes. It reads the TLS Secrets of all namespaces, as upstream's controllers do.
fn ingress_objects() -> Vec<(&'static str, Value)> {
    let role = "skiff:ingress";
    let rbac = "rbac.authorization.k8s.io/v1";
    let read = |group: &str, resources: &[&str]| json!({"apiGroups": [group], "resources": resources, "verbs": ["list", "watch"]});
    let subjects = json!([{"kind": "ServiceAccount", "name": INGRESS, "namespace": "kube-system"}]);
    let reference = |kind: &str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role});
    vec![
        (
            "/api/v1/namespaces/kube-system/serviceaccounts",
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": INGRESS, "namespace": "kube-system"}}),
        ),
        (
            CLUSTER_ROLES,
            json!({
                "apiVersion": rbac, "kind": "ClusterRole", "metadata": {"name": role},
                "rules": [
                    read("networking.k8s.io", &["ingresses", "ingressclasses"]),
                    read("", &["services", "secrets", "nodes"]),
                    read("discovery.k8s.io", &["endpointslices"]),
                    {"apiGroups": ["networking.k8s.io"], "resources": ["ingresses/status"], "verbs": ["patch"]},
                    read("apiextensions.k8s.io", &["customresourcedefinitions"]),
                    read("", &["namespaces"]),
                    read("gateway.networking.k8s.io", &["gatewayclasses", "gateways", "httproutes", "grpcroutes", "tlsroutes", "referencegrants"]),
                    {"apiGroups": ["gateway.networking.k8s.io"], "verbs": ["patch"],
                        "resources": ["gatewayclasses/status", "gateways/status", "httproutes/status", "grpcroutes/status", "tlsroutes/status"]},
                    {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch", "update"]},
                ],
            }),
        ),
        (
            CLUSTER_ROLE_BINDINGS,
            json!({"apiVersion": rbac, "kind": "ClusterRoleBinding", "metadata": {"name": role},
                "roleRef": reference("ClusterRole"), "subjects": subjects}),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles",
            json!({"apiVersion": rbac, "kind": "Role", "metadata": {"name": role, "namespace": "kube-system"}, "rules": [
                {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["list", "watch", "create", "patch", "delete"]},
            ]}),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings",
            json!({"apiVersion": rbac, "kind": "RoleBinding", "metadata": {"name": role, "namespace": "kube-system"},
                "roleRef": reference("Role"), "subjects": subjects}),
        ),
    ]
}

/// The service account of the load balancer.
pub const LOAD_BALANCER: &str = "skiff-load-balancer";

fn load_balancer_objects() -> Vec<(&'static str, Value)> {
    let role = "skiff:load-balancer";
    let rbac = "rbac.authorization.k8s.io/v1";
    let subjects = json!([{"kind": "ServiceAccount", "name": LOAD_BALANCER, "namespace": "kube-system"}]);
    vec![
        // Of several servers one gives out the addresses of a pool.
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles",
            json!({"apiVersion": rbac, "kind": "Role", "metadata": {"name": role, "namespace": "kube-system"}, "rules": [
                {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
            ]}),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings",
            json!({"apiVersion": rbac, "kind": "RoleBinding", "metadata": {"name": role, "namespace": "kube-system"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role}, "subjects": subjects}),
        ),
        (
            "/api/v1/namespaces/kube-system/serviceaccounts",
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": LOAD_BALANCER, "namespace": "kube-system"}}),
        ),
        (
            CLUSTER_ROLES,
            json!({
                "apiVersion": rbac, "kind": "ClusterRole", "metadata": {"name": role},
                "rules": [
                    {"apiGroups": [""], "resources": ["services", "nodes"], "verbs": ["list", "watch"]},
                    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
                    {"apiGroups": [""], "resources": ["services/status"], "verbs": ["patch"]},
                    {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch", "update"]},
                ],
            }),
        ),
        (
            CLUSTER_ROLE_BINDINGS,
            json!({
                "apiVersion": rbac, "kind": "ClusterRoleBinding", "metadata": {"name": role},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": subjects,
            }),
        ),
    ]
}

/// The service account that writes the status of administrators' policies.
pub const POLICY_STATUS: &str = "skiff-policy-status";

fn policy_status_objects() -> Vec<(&'static str, Value)> {
    let role = "skiff:policy-status";
    let rbac = "rbac.authorization.k8s.io/v1";
    let statuses = TIER_RESOURCES.map(|resource| format!("{resource}/status"));
    vec![
        (
            "/api/v1/namespaces/kube-system/serviceaccounts",
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": POLICY_STATUS, "namespace": "kube-system"}}),
        ),
        (
            CLUSTER_ROLES,
            json!({
                "apiVersion": rbac, "kind": "ClusterRole", "metadata": {"name": role},
                "rules": [
                    crate::joining::tier_definitions(),
                    {"apiGroups": [TIER_GROUP], "resources": TIER_RESOURCES, "verbs": ["list", "watch"]},
                    {"apiGroups": [TIER_GROUP], "resources": statuses, "verbs": ["patch"]},
                    {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch", "update"]},
                ],
            }),
        ),
        (
            CLUSTER_ROLE_BINDINGS,
            json!({
                "apiVersion": rbac, "kind": "ClusterRoleBinding", "metadata": {"name": role},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"kind": "ServiceAccount", "name": POLICY_STATUS, "namespace": "kube-system"}],
            }),
        ),
    ]
}

/// The service account of the provisioner of local volumes.
pub const LOCAL_VOLUMES: &str = "local-volume-provisioner";

/// Remembers what was made once.
const MADE: &str = "/api/v1/namespaces/kube-system/configmaps/skiff-addons";

/// A class that a new cluster gets once: not again after a user deleted it, and as the default one only if there is no
/// other.
struct Class {
    /// In the ConfigMap of what was made.
    entry: &'static str,
    path: &'static str,
    is_default: &'static str,
    object: Value,
    /// Of no use beside another default.
    only_as_default: bool,
}

fn storage_class() -> Class {
    Class {
        entry: "storageclass-local",
        path: "/apis/storage.k8s.io/v1/storageclasses",
        is_default: "storageclass.kubernetes.io/is-default-class",
        object: json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "local"},
            "provisioner": skiff_node::LOCAL_PROVISIONER, "reclaimPolicy": "Delete", "volumeBindingMode": "WaitForFirstConsumer",
        }),
        only_as_default: true,
    }
}

fn ingress_class() -> Class {
    Class {
        entry: "ingressclass-skiff",
        path: "/apis/networking.k8s.io/v1/ingressclasses",
        is_default: "ingressclass.kubernetes.io/is-default-class",
        object: json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "IngressClass", "metadata": {"name": "skiff"},
            "spec": {"controller": skiff_ingress::CONTROLLER},
        }),
        only_as_default: false,
    }
}

/// Whether something that is made once was made.
pub async fn is_made(client: &Client, entry: &str) -> Result<bool> {
    match client
        .request::<Value>(http::Request::get(MADE).body(Vec::new())?)
        .await
    {
        Ok(made) => Ok(!made["data"][entry].is_null()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error.into()),
    }
}

pub async fn note_made(client: &Client, entry: &str) -> Result<()> {
    let made = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "skiff-addons", "namespace": "kube-system"},
        "data": {entry: "made once; delete this entry to get the class again at the next start"},
    });
    let path = "/api/v1/namespaces/kube-system/configmaps";
    put(client, path, "skiff-addons", &made, true).await
}

async fn install_class(client: &Client, class: Class) -> Result<()> {
    if is_made(client, class.entry).await? {
        return Ok(());
    }
    let present: Value = client
        .request(http::Request::get(class.path).body(Vec::new())?)
        .await?;
    let mut present = present["items"].as_array().into_iter().flatten();
    let has_default = present.any(|other| other["metadata"]["annotations"][class.is_default] == "true");
    let mut object = class.object;
    if !has_default {
        object["metadata"]["annotations"][class.is_default] = "true".into();
    }
    if !has_default || !class.only_as_default {
        let request = http::Request::post(class.path)
            .header("content-type", "application/json")
            .body(serde_json::to_vec(&object)?)?;
        match client.request::<Value>(request).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            other => {
                other?;
            }
        }
    }
    note_made(client, class.entry).await
}

/// The API server's identity towards kubelets, which ask what it may do like anybody's.
fn kubelet_access() -> (&'static str, Value) {
    (
        CLUSTER_ROLE_BINDINGS,
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:kube-apiserver-kubelet-client"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kubelet-api-admin"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "kube-apiserver-kubelet-client"}],
        }),
    )
}

/// The identity of the Metrics API, with the role of metrics-server, and who may read the metrics. The names are not
/// those of metrics-server's chart, which must find its own free.
fn metrics_objects() -> Vec<(&'static str, Value)> {
    let account = skiff_metrics::SERVICE_ACCOUNT;
    let role = format!("system:{account}");
    let aggregate = |to: &str| format!("rbac.authorization.k8s.io/aggregate-to-{to}");
    let subjects =
        json!([{"kind": "ServiceAccount", "name": account, "namespace": skiff_metrics::NAMESPACE}]);
    vec![
        (
            "/api/v1/namespaces/kube-system/serviceaccounts",
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, "namespace": "kube-system"}}),
        ),
        (
            CLUSTER_ROLES,
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": role},
                "rules": [
                    {"apiGroups": [""], "resources": ["nodes/metrics"], "verbs": ["get"]},
                    {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["get", "list", "watch"]},
                    {"apiGroups": ["apiregistration.k8s.io"], "resources": ["apiservices"], "verbs": ["create"]},
                    {"apiGroups": ["apiregistration.k8s.io"], "resources": ["apiservices"], "resourceNames": ["v1beta1.metrics.k8s.io"], "verbs": ["get", "patch"]},
                ],
            }),
        ),
        (
            CLUSTER_ROLE_BINDINGS,
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": role},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": subjects,
            }),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles",
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
                "metadata": {"name": role, "namespace": "kube-system"},
                "rules": [
                    {"apiGroups": [""], "resources": ["serviceaccounts/token"], "resourceNames": [account], "verbs": ["create"]},
                    {"apiGroups": [""], "resources": ["services"], "resourceNames": ["metrics-server"], "verbs": ["get"]},
                ],
            }),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings",
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
                "metadata": {"name": role, "namespace": "kube-system"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
                "subjects": subjects,
            }),
        ),
        (
            CLUSTER_ROLES,
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
                "metadata": {"name": "system:aggregated-metrics-reader", "labels": {
                    aggregate("view"): "true", aggregate("edit"): "true", aggregate("admin"): "true"}},
                "rules": [{"apiGroups": ["metrics.k8s.io"], "resources": ["pods", "nodes"], "verbs": ["get", "list", "watch"]}],
            }),
        ),
    ]
}

/// Which parts of the cluster run here, as far as they have objects of their own.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// Cluster DNS of skiff's own, here or on other machines.
    pub dns: bool,
    pub metrics: bool,
    pub ingress: bool,
    /// The definitions of Gateway API.
    pub gateway_api: bool,
    pub load_balancer: bool,
}

/// Makes the objects, and those for machines that join, of which `once` stay as they are if they exist.
pub async fn install(
    client: &Client,
    cluster: &Cluster,
    parts: Parts,
    joining: Vec<(&'static str, Value)>,
    once: Vec<(&'static str, Value)>,
) -> Result<()> {
    let mut objects = objects();
    if parts.dns {
        objects.push(dns_service(cluster.service_ip(10)?));
    }
    objects.extend(joining);
    objects.push(kubelet_access());
    objects.extend(dns_endpoints_objects());
    objects.extend(policy_status_objects());
    if parts.ingress {
        objects.extend(ingress_objects());
    }
    if parts.load_balancer {
        objects.extend(load_balancer_objects());
    }
    if parts.metrics {
        objects.extend(metrics_objects());
    } else {
        remove_metrics_api(client)
            .await
            .context("the APIService of metrics.k8s.io")?;
    }
    // All at once: the store commits them together.
    let put_one = |(path, object, update): (&'static str, Value, bool)| async move {
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        put(client, path, &name, &object, update)
            .await
            .with_context(|| format!("{path}/{name}"))
    };
    let objects = objects.into_iter().map(|(path, object)| (path, object, true));
    let once = once.into_iter().map(|(path, object)| (path, object, false));
    futures::future::try_join_all(objects.chain(once).map(put_one)).await?;
    remove_former_dns_endpoints(client)
        .await
        .context("the former EndpointSlice of cluster DNS")?;
    install_class(client, storage_class())
        .await
        .context("the default StorageClass")?;
    if parts.ingress {
        install_class(client, ingress_class())
            .await
            .context("the IngressClass")?;
    }
    if parts.gateway_api {
        crate::gateway_api::install(client).await.context("Gateway API")?;
    }
    Ok(())
}

/// An earlier version had one slice for the only node; today every node has its own.
async fn remove_former_dns_endpoints(client: &Client) -> Result<()> {
    let path = "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices/kube-dns";
    let found: Value = match client.request(http::Request::get(path).body(Vec::new())?).await {
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
        found => found?,
    };
    if found["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] == "skiff" {
        client
            .request::<Value>(http::Request::delete(path).body(Vec::new())?)
            .await?;
    }
    Ok(())
}

/// Removes the APIService that an earlier start with the Metrics API left: nothing serves it now. One that names a
/// service is somebody else's.
async fn remove_metrics_api(client: &Client) -> Result<()> {
    let (group, version) = (skiff_metrics::GROUP, skiff_metrics::VERSION);
    let path = format!("/apis/apiregistration.k8s.io/v1/apiservices/{version}.{group}");
    let found = match client
        .request::<Value>(http::Request::get(&path).body(Vec::new())?)
        .await
    {
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
        found => found?,
    };
    if found["metadata"]["labels"][skiff_metrics::COMPONENT_LABEL].is_string()
        && found["spec"]["service"].is_null()
    {
        client
            .request::<Value>(http::Request::delete(&path).body(Vec::new())?)
            .await?;
    }
    Ok(())
}

/// Creates the object, or, with `update`, brings the one that is there up to date.
async fn put(client: &Client, path: &str, name: &str, object: &Value, update: bool) -> Result<()> {
    let body = serde_json::to_vec(object)?;
    let request = http::Request::post(path)
        .header("content-type", "application/json")
        .body(body.clone())?;
    match client.request::<Value>(request).await {
        Err(kube::Error::Api(status)) if status.code == 409 && !update => {}
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
