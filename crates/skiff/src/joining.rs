//! What a cluster offers to machines that want to join it, as kubeadm does: `cluster-info` for everybody, the cluster's
//! networks and the kubelet's configuration for who has a token, and the roles by which a token becomes a node's
//! certificate. Made at every start, so that `skiff join` and `kubeadm join` find it.

use crate::VERSION;
use crate::cli::{self, PodNetworkMode};
use crate::cluster::Cluster;
use anyhow::Result;
use serde_json::{Value, json};
use skiff_client::ServerAddress;
use skiff_network::policy::{TIER_GROUP, TIER_RESOURCES};
use std::net::IpAddr;

/// The group of those who come with a token for nodes.
pub const BOOTSTRAPPERS: &str = "system:bootstrappers:kubeadm:default-node-token";
pub const CLUSTER_INFO: &str = "cluster-info";
pub const CLUSTER_CONFIG: &str = "kubeadm-config";
pub const KUBELET_CONFIG: &str = "kubelet-config";
const PROXY_CONFIG: &str = "kube-proxy";
/// The group of all nodes.
const NODES: &str = "system:nodes";
/// How packets reach the pods of other nodes, in that ConfigMap: all nodes must do it in the same way.
pub const POD_NETWORK: &str = "skiff.io.pod-network";
/// Where the cluster's state is, in that ConfigMap: only an etcd can have several servers.
pub const STORE: &str = "skiff.io.store";
pub const SHARED_STORE: &str = "etcd";

const RBAC: &str = "rbac.authorization.k8s.io";
const CLUSTER_ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
const CLUSTER_ROLE_BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";

fn group(name: &str) -> Value {
    json!({"apiGroup": RBAC, "kind": "Group", "name": name})
}

fn bind(name: &str, role: &str, groups: &[&str]) -> (&'static str, Value) {
    let subjects: Vec<Value> = groups.iter().map(|name| group(name)).collect();
    let binding = json!({
        "apiVersion": format!("{RBAC}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": name},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}, "subjects": subjects,
    });
    (CLUSTER_ROLE_BINDINGS, binding)
}

/// Lets cluster DNS read its Corefile.
pub const CLUSTER_DNS_ROLE: &str = "skiff:corefile";

/// What nodes may do besides what upstream's kubelets may. An agent has one certificate: its proxy, its pod network and
/// its DNS are the node, and read what theirs read. Who may talk with whom depends on the labels of all pods and
/// namespaces. On a cluster whose API server is another's, an administrator makes them (`skiff node-roles`).
pub fn node_roles() -> Vec<(&'static str, Value)> {
    let role = |name: &str, rules: Value| {
        let metadata = json!({"name": name});
        let role = json!({"apiVersion": format!("{RBAC}/v1"), "kind": "ClusterRole", "metadata": metadata, "rules": rules});
        (CLUSTER_ROLES, role)
    };
    let read = |group: &str, resource: &str, verbs: &[&str]| json!({"apiGroups": [group], "resources": [resource], "verbs": verbs});
    let (network, dns) = ("skiff:pod-network", "skiff:node-dns");
    let all = ["get", "list", "watch"];
    let corefile = CLUSTER_DNS_ROLE;
    vec![
        // Its Corefile, and no other ConfigMap.
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles",
            json!({
                "apiVersion": format!("{RBAC}/v1"), "kind": "Role", "metadata": {"name": corefile, "namespace": "kube-system"},
                "rules": [{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["coredns"], "verbs": all}],
            }),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings",
            json!({
                "apiVersion": format!("{RBAC}/v1"), "kind": "RoleBinding",
                "metadata": {"name": "skiff:node-corefile", "namespace": "kube-system"},
                "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": corefile}, "subjects": [group(NODES)],
            }),
        ),
        bind("skiff:node-proxier", "system:node-proxier", &[NODES]),
        role(dns, json!([read("", "namespaces", &all[1..])])),
        bind(dns, dns, &[NODES]),
        role(
            network,
            json!([
                read("", "nodes", &all),
                read("", "pods", &all),
                read("", "namespaces", &all[1..]),
                read("networking.k8s.io", "networkpolicies", &all[1..]),
                // Where their definitions are installed.
                {"apiGroups": [TIER_GROUP], "resources": TIER_RESOURCES, "verbs": &all[1..]},
                tier_definitions(),
            ]),
        ),
        bind(network, network, &[NODES]),
    ]
}

/// The rule for reading the definitions of administrators' policies, and no others.
pub fn tier_definitions() -> Value {
    let names = TIER_RESOURCES.map(|resource| format!("{resource}.{TIER_GROUP}"));
    json!({"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "resourceNames": names,
        "verbs": ["list", "watch"]})
}

/// `skiff node-roles`.
pub fn print_node_roles() -> Result<()> {
    for (_, object) in node_roles() {
        say_raw!("---\n{}", yaml(&object)?);
    }
    Ok(())
}

/// The identity of upstream's kube-proxy where it runs in place of ours, as kubeadm names it.
fn upstream_proxy() -> [(&'static str, Value); 2] {
    [
        (
            "/api/v1/namespaces/kube-system/serviceaccounts",
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "kube-proxy", "namespace": "kube-system"}}),
        ),
        (
            CLUSTER_ROLE_BINDINGS,
            json!({
                "apiVersion": format!("{RBAC}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "kubeadm:node-proxier"},
                "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": "system:node-proxier"},
                "subjects": [{"kind": "ServiceAccount", "name": "kube-proxy", "namespace": "kube-system"}],
            }),
        ),
    ]
}

/// The configurations of upstream's kubelet and kube-proxy, which `kubeadm join` reads. Made once: an administrator may
/// edit them.
pub fn configurations(
    cluster: &Cluster,
    domain: &str,
    cluster_dns: &[IpAddr],
    server: &ServerAddress,
) -> Result<Vec<(&'static str, Value)>> {
    let cluster_dns = match cluster_dns {
        [] => vec![cluster.service_ip(10)?],
        chosen => chosen.to_vec(),
    };
    let kubelet = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false}, "webhook": {"enabled": true},
            "x509": {"clientCAFile": "/etc/kubernetes/pki/ca.crt"}},
        "authorization": {"mode": "Webhook"},
        "clusterDNS": cluster_dns, "clusterDomain": domain,
        "healthzBindAddress": "127.0.0.1", "healthzPort": 10248,
        "rotateCertificates": true,
        // skiff's API server talks to kubelets whose certificate the cluster signed, and to no others.
        "serverTLSBootstrap": true,
        "staticPodPath": "/etc/kubernetes/manifests",
    });
    let proxy = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "clusterCIDR": cluster.pod_cidr, "mode": "nftables",
        "clientConnection": {"kubeconfig": "/var/lib/kube-proxy/kubeconfig.conf"},
    });
    let account = "/var/run/secrets/kubernetes.io/serviceaccount";
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "default",
        "clusters": [{"name": "default", "cluster": {
            "server": server.to_string(), "certificate-authority": format!("{account}/ca.crt")}}],
        "contexts": [{"name": "default", "context": {"cluster": "default", "namespace": "default", "user": "default"}}],
        "users": [{"name": "default", "user": {"tokenFile": format!("{account}/token")}}],
    });
    let path = "/api/v1/namespaces/kube-system/configmaps";
    let map = |name: &str, data: Value| {
        json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "kube-system"}, "data": data,
        })
    };
    Ok(vec![
        (path, map(KUBELET_CONFIG, json!({"kubelet": yaml(&kubelet)?}))),
        (
            path,
            map(
                PROXY_CONFIG,
                json!({"config.conf": yaml(&proxy)?, "kubeconfig.conf": yaml(&kubeconfig)?}),
            ),
        ),
    ])
}

/// Where other machines reach the API.
pub struct Reached {
    pub at: ServerAddress,
    /// It is the address of this one server.
    pub is_own: bool,
}

/// Objects by the path of their collection. `ca` is the PEM of the API's authority; `shared_store`: other servers can reach
/// the store.
pub fn objects(
    cluster: &Cluster,
    domain: &str,
    pod_network: PodNetworkMode,
    reached: &Reached,
    shared_store: bool,
    ca: &str,
) -> Result<Vec<(&'static str, Value)>> {
    let server = &reached.at;
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "contexts": null, "current-context": "", "users": null,
        "clusters": [{"name": "", "cluster": {
            "server": server.to_string(), "certificate-authority-data": base64(ca.as_bytes())}}],
    });
    let config = json!({
        "apiVersion": "kubeadm.k8s.io/v1beta4", "kind": "ClusterConfiguration",
        "clusterName": cluster.name, "controlPlaneEndpoint": server.authority(), "kubernetesVersion": VERSION.split('+').next(),
        "networking": {"dnsDomain": domain, "podSubnet": cluster.pod_cidr, "serviceSubnet": cluster.service_cidr},
    });
    let map = |namespace: &str, name: &str, key: &str, value: String| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}, "data": {key: value}});
    let mut config_map = map(
        "kube-system",
        CLUSTER_CONFIG,
        "ClusterConfiguration",
        yaml(&config)?,
    );
    // kubeadm has no word for it.
    config_map["data"][POD_NETWORK] = cli::pod_network_name(pod_network).into();
    config_map["data"][STORE] = if shared_store { SHARED_STORE } else { "embedded" }.into();
    // One entry a line: people read it, and so do controllers.
    let mut info = map("kube-public", CLUSTER_INFO, "kubeconfig", yaml(&kubeconfig)?);
    if reached.is_own {
        info["metadata"]["annotations"] = json!({skiff_controllers::SERVER_ADDRESS: server.to_string()});
    }
    let mut objects = vec![
        ("/api/v1/namespaces/kube-public/configmaps", info),
        ("/api/v1/namespaces/kube-system/configmaps", config_map),
    ];
    let approve = "system:certificates.k8s.io:certificatesigningrequests";
    objects.extend([
        bind("kubeadm:kubelet-bootstrap", "system:node-bootstrapper", &[BOOTSTRAPPERS]),
        bind("kubeadm:node-autoapprove-bootstrap", &format!("{approve}:nodeclient"), &[BOOTSTRAPPERS]),
        bind(
            "kubeadm:node-autoapprove-certificate-rotation",
            &format!("{approve}:selfnodeclient"),
            &[NODES],
        ),
        // A token's holder sees whether a name is taken.
        (
            CLUSTER_ROLES,
            json!({
                "apiVersion": format!("{RBAC}/v1"), "kind": "ClusterRole", "metadata": {"name": "kubeadm:get-nodes"},
                "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}],
            }),
        ),
        bind("kubeadm:get-nodes", "kubeadm:get-nodes", &[BOOTSTRAPPERS]),
        bind("skiff:node-trace-reporter", "skiff:trace-reporter", &[NODES]),
    ]);
    objects.extend(node_roles());
    let info = "kubeadm:bootstrap-signer-clusterinfo";
    let anonymous = json!({"apiGroup": RBAC, "kind": "User", "name": "system:anonymous"});
    let reader = |namespace: &str, role: &str, name: &str, subjects: &[Value]| {
        let (roles, bindings) = match namespace {
            "kube-public" => (
                "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-public/roles",
                "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-public/rolebindings",
            ),
            _ => (
                "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles",
                "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings",
            ),
        };
        let metadata = json!({"name": role, "namespace": namespace});
        [
            (
                roles,
                json!({
                    "apiVersion": format!("{RBAC}/v1"), "kind": "Role", "metadata": metadata,
                    "rules": [{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["get"]}],
                }),
            ),
            (
                bindings,
                json!({
                    "apiVersion": format!("{RBAC}/v1"), "kind": "RoleBinding", "metadata": metadata,
                    "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": role}, "subjects": subjects,
                }),
            ),
        ]
    };
    let (token, node) = (group(BOOTSTRAPPERS), group(NODES));
    let joiners = [token.clone(), node];
    objects.extend(reader("kube-public", info, CLUSTER_INFO, &[anonymous]));
    objects.extend(reader(
        "kube-system",
        "kubeadm:nodes-kubeadm-config",
        CLUSTER_CONFIG,
        &joiners,
    ));
    objects.extend(reader(
        "kube-system",
        "kubeadm:kubelet-config",
        KUBELET_CONFIG,
        &joiners,
    ));
    objects.extend(reader("kube-system", "kube-proxy", PROXY_CONFIG, &[token]));
    objects.extend(upstream_proxy());
    objects.extend(serving_approver());
    objects.extend(cluster_info_controller());
    Ok(objects)
}

/// The identity of the controller that keeps `cluster-info` at a living server.
fn cluster_info_controller() -> Vec<(&'static str, Value)> {
    let (account, role) = ("cluster-info-controller", "skiff:cluster-info-controller");
    let metadata = json!({"name": role, "namespace": "kube-public"});
    vec![
        (
            "/api/v1/namespaces/kube-system/serviceaccounts",
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, "namespace": "kube-system"}}),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-public/roles",
            json!({
                "apiVersion": format!("{RBAC}/v1"), "kind": "Role", "metadata": metadata,
                "rules": [{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [CLUSTER_INFO], "verbs": ["update"]}],
            }),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-public/rolebindings",
            json!({
                "apiVersion": format!("{RBAC}/v1"), "kind": "RoleBinding", "metadata": metadata,
                "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": role},
                "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "kube-system"}],
            }),
        ),
    ]
}

/// The identity of the controller that approves kubelets' serving certificates.
fn serving_approver() -> Vec<(&'static str, Value)> {
    let (account, role) = ("kubelet-serving-approver", "skiff:kubelet-serving-approver");
    let group = "certificates.k8s.io";
    vec![
        (
            "/api/v1/namespaces/kube-system/serviceaccounts",
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, "namespace": "kube-system"}}),
        ),
        (
            CLUSTER_ROLES,
            json!({
                "apiVersion": format!("{RBAC}/v1"), "kind": "ClusterRole", "metadata": {"name": role},
                "rules": [
                    {"apiGroups": [group], "resources": ["certificatesigningrequests/approval"], "verbs": ["update"]},
                    {"apiGroups": [group], "resources": ["signers"], "resourceNames": ["kubernetes.io/kubelet-serving"], "verbs": ["approve"]},
                ],
            }),
        ),
        (
            CLUSTER_ROLE_BINDINGS,
            json!({
                "apiVersion": format!("{RBAC}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": role},
                "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
                "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "kube-system"}],
            }),
        ),
    ]
}

pub fn base64(bytes: &[u8]) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

fn yaml(value: &Value) -> Result<String> {
    Ok(serde_saphyr::to_string(value)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Wishes;

    #[test]
    fn the_documents_are_what_clients_read() {
        let root = tempfile::tempdir().unwrap();
        let cluster = Cluster::find_or_make_in(root.path(), "skiff", &Wishes::default()).unwrap();
        let objects = objects(
            &cluster,
            "cluster.local",
            Some(Default::default()),
            &Reached {
                at: "192.0.2.1:6443".parse().unwrap(),
                is_own: true,
            },
            false,
            "PEM",
        )
        .unwrap();
        let text = |name: &str, key: &str| {
            let found = objects
                .iter()
                .find(|(_, object)| object["metadata"]["name"] == name);
            found.unwrap().1["data"][key].as_str().unwrap().to_owned()
        };
        let info = kube::config::Kubeconfig::from_yaml(&text(CLUSTER_INFO, "kubeconfig")).unwrap();
        let known = info.clusters[0].cluster.clone().unwrap();
        assert_eq!(known.server.as_deref(), Some("https://192.0.2.1:6443"));
        assert_eq!(known.certificate_authority_data.as_deref(), Some("UEVN"));
        assert!(
            text(CLUSTER_INFO, "kubeconfig")
                .lines()
                .any(|line| line.trim() == "server: https://192.0.2.1:6443"),
            "{}",
            text(CLUSTER_INFO, "kubeconfig")
        );
        let config: Value = serde_saphyr::from_str(&text(CLUSTER_CONFIG, "ClusterConfiguration")).unwrap();
        assert_eq!(config["networking"]["podSubnet"], "10.244.0.0/16");
    }

    /// Nobody but the groups that are meant gets anything.
    #[test]
    fn who_may_what() {
        let root = tempfile::tempdir().unwrap();
        let cluster = Cluster::find_or_make_in(root.path(), "skiff", &Wishes::default()).unwrap();
        let objects = objects(
            &cluster,
            "cluster.local",
            Some(Default::default()),
            &Reached {
                at: "192.0.2.1:6443".parse().unwrap(),
                is_own: true,
            },
            false,
            "PEM",
        )
        .unwrap();
        for (_, object) in &objects {
            for subject in object["subjects"].as_array().into_iter().flatten() {
                let name = subject["name"].as_str().unwrap();
                let known = [
                    BOOTSTRAPPERS,
                    "system:nodes",
                    "system:anonymous",
                    "kubelet-serving-approver",
                    "cluster-info-controller",
                    "kube-proxy",
                ];
                assert!(known.contains(&name), "{object}");
                if name == "system:anonymous" {
                    assert_eq!(object["roleRef"]["name"], "kubeadm:bootstrap-signer-clusterinfo");
                }
            }
        }
    }
}
