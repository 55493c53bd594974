//! What a cluster offers to machines that want to join it, as kubeadm does: `cluster-info` for everybody, the cluster's
//! networks for who has a token, and the roles by which a token becomes a node's certificate. Made at every start.

use crate::VERSION;
use crate::cli::{self, PodNetworkMode};
use crate::cluster::Cluster;
use anyhow::Result;
use serde_json::{Value, json};
use skiff_client::ServerAddress;

/// The group of those who come with a token for nodes.
pub const BOOTSTRAPPERS: &str = "system:bootstrappers:kubeadm:default-node-token";
pub const CLUSTER_INFO: &str = "cluster-info";
pub const CLUSTER_CONFIG: &str = "kubeadm-config";
/// How packets reach the pods of other nodes, in that ConfigMap: all nodes must do it in the same way.
pub const POD_NETWORK: &str = "skiff.io.pod-network";
/// Where the cluster's state is, in that ConfigMap: only an etcd can have several servers.
pub const STORE: &str = "skiff.io.store";
pub const SHARED_STORE: &str = "etcd";

const RBAC: &str = "rbac.authorization.k8s.io";
const CLUSTER_ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
const CLUSTER_ROLE_BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";

/// Objects by the path of their collection. `server` is where other machines reach the API, `ca` the PEM of its authority;
/// `shared_store`: other servers can reach the store.
pub fn objects(
    cluster: &Cluster,
    domain: &str,
    pod_network: PodNetworkMode,
    server: &ServerAddress,
    shared_store: bool,
    ca: &str,
) -> Result<Vec<(&'static str, Value)>> {
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
    let mut objects = vec![
        (
            "/api/v1/namespaces/kube-public/configmaps",
            // One entry a line: people read it, and so does the approver of serving certificates.
            map("kube-public", CLUSTER_INFO, "kubeconfig", yaml(&kubeconfig)?),
        ),
        ("/api/v1/namespaces/kube-system/configmaps", config_map),
    ];
    let group = |name: &str| json!({"apiGroup": RBAC, "kind": "Group", "name": name});
    let bind = |name: &str, role: &str, groups: &[&str]| {
        let subjects: Vec<Value> = groups.iter().map(|name| group(name)).collect();
        let binding = json!({
            "apiVersion": format!("{RBAC}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}, "subjects": subjects,
        });
        (CLUSTER_ROLE_BINDINGS, binding)
    };
    let approve = "system:certificates.k8s.io:certificatesigningrequests";
    objects.extend([
        bind("kubeadm:kubelet-bootstrap", "system:node-bootstrapper", &[BOOTSTRAPPERS]),
        bind("kubeadm:node-autoapprove-bootstrap", &format!("{approve}:nodeclient"), &[BOOTSTRAPPERS]),
        bind(
            "kubeadm:node-autoapprove-certificate-rotation",
            &format!("{approve}:selfnodeclient"),
            &["system:nodes"],
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
        // An agent has one certificate: its proxy, its pod network and its DNS are the node, and read what theirs read.
        bind("skiff:node-proxier", "system:node-proxier", &["system:nodes"]),
        (
            CLUSTER_ROLES,
            json!({
                "apiVersion": format!("{RBAC}/v1"), "kind": "ClusterRole", "metadata": {"name": "skiff:node-dns"},
                "rules": [{"apiGroups": [""], "resources": ["namespaces"], "verbs": ["list", "watch"]}],
            }),
        ),
        bind("skiff:node-dns", "skiff:node-dns", &["system:nodes"]),
        bind("skiff:node-trace-reporter", "skiff:trace-reporter", &["system:nodes"]),
    ]);
    let read_map = |namespace: &str, role: &str, name: &str| {
        json!({
            "apiVersion": format!("{RBAC}/v1"), "kind": "Role", "metadata": {"name": role, "namespace": namespace},
            "rules": [{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["get"]}],
        })
    };
    let bind_map = |namespace: &str, role: &str, subjects: Vec<Value>| {
        json!({
            "apiVersion": format!("{RBAC}/v1"), "kind": "RoleBinding", "metadata": {"name": role, "namespace": namespace},
            "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": role}, "subjects": subjects,
        })
    };
    let info = "kubeadm:bootstrap-signer-clusterinfo";
    let anonymous = json!({"apiGroup": RBAC, "kind": "User", "name": "system:anonymous"});
    let networks = "kubeadm:nodes-kubeadm-config";
    objects.extend([
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-public/roles",
            read_map("kube-public", info, CLUSTER_INFO),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-public/rolebindings",
            bind_map("kube-public", info, vec![anonymous]),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles",
            read_map("kube-system", networks, CLUSTER_CONFIG),
        ),
        (
            "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings",
            bind_map(
                "kube-system",
                networks,
                vec![group(BOOTSTRAPPERS), group("system:nodes")],
            ),
        ),
    ]);
    objects.extend(serving_approver());
    Ok(objects)
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
            &"192.0.2.1:6443".parse().unwrap(),
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
            &"192.0.2.1:6443".parse().unwrap(),
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
                ];
                assert!(known.contains(&name), "{object}");
                if name == "system:anonymous" {
                    assert_eq!(object["roleRef"]["name"], "kubeadm:bootstrap-signer-clusterinfo");
                }
            }
        }
    }
}
