//! What becomes of nodes, and of the pods on them, over the real server.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Node, Pod, Taint};
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cluster::{Cluster, check};

fn nodes(cluster: &Cluster) -> Api<Node> {
    Api::all(cluster.client.clone())
}

async fn taints(cluster: &Cluster, node: &str) -> Vec<Taint> {
    let spec = nodes(cluster).get(node).await.unwrap().spec;
    spec.and_then(|spec| spec.taints).unwrap_or_default()
}

fn keys(taints: &[Taint], effect: &str) -> Vec<String> {
    let of_effect = taints.iter().filter(|taint| taint.effect == effect);
    of_effect
        .map(|taint| taint.key.trim_start_matches("node.kubernetes.io/").to_owned())
        .collect()
}

async fn patch_node(cluster: &Cluster, name: &str, patch: Value) {
    let patch = Patch::Merge(patch);
    nodes(cluster)
        .patch(name, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_node_gets_its_own_network() {
    let cluster = Cluster::start().await;
    let names: Vec<String> = (0..12).map(|number| format!("node-{number}")).collect();
    futures::future::join_all(names.iter().map(|name| cluster.add_node(name))).await;
    cluster
        .until_idle("networks", async || {
            let all = nodes(&cluster).list(&ListParams::default()).await.unwrap().items;
            let cidrs = all.iter().filter_map(|node| node.spec.as_ref()?.pod_cidr.clone());
            let mut cidrs: Vec<String> = cidrs.collect();
            cidrs.sort();
            cidrs.dedup();
            check(cidrs.len() == 13, cidrs)
        })
        .await;
}

/// Two nodes fall silent: one is known to be so at once and evicts its pods, the other has to wait for its turn. Then
/// all are silent, and nothing is evicted any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_nodes_are_tainted_one_after_the_other() {
    let cluster = Cluster::without_controllers().await;
    cluster.run_controllers(|config| {
        config.node_monitor_grace_period = Duration::from_secs(2);
        config.node_monitor_period = Duration::from_millis(200);
    });
    for name in ["n", "silent-1", "silent-2"] {
        cluster.add_node(name).await;
    }
    let alive = async |name: &str| {
        let leases: Api<k8s_openapi::api::coordination::v1::Lease> =
            Api::namespaced(cluster.client.clone(), "kube-node-lease");
        let now = k8s_openapi::jiff::Timestamp::now();
        let renew = Patch::Merge(json!({"spec": {"renewTime": format!("{now:.6}")}}));
        leases.patch(name, &PatchParams::default(), &renew).await.unwrap();
    };
    cluster
        .until_idle("one of two is evicted", async || {
            alive("n").await;
            let all = [
                taints(&cluster, "silent-1").await,
                taints(&cluster, "silent-2").await,
            ];
            let evicted = all
                .iter()
                .filter(|taints| keys(taints, "NoExecute") == ["unreachable"])
                .count();
            let kept_out = all
                .iter()
                .filter(|taints| keys(taints, "NoSchedule") == ["unreachable"])
                .count();
            let dated = all.iter().flatten().all(|taint| taint.time_added.is_some());
            assert!(evicted <= 1, "both at once: {all:?}");
            check(evicted == 1 && kept_out == 2 && dated, all)
        })
        .await;
    for line in [
        r#"node_collector_evictions_total{zone=""} 1"#,
        r#"node_collector_zone_size{zone=""} 3"#,
    ] {
        cluster.until_measured(line).await;
    }
    assert_eq!(taints(&cluster, "n").await, []);
    cluster
        .until_idle("no eviction while all are silent", async || {
            let mut evicted = Vec::new();
            for name in ["n", "silent-1", "silent-2"] {
                evicted.extend(keys(&taints(&cluster, name).await, "NoExecute"));
            }
            let kept_out = keys(&taints(&cluster, "n").await, "NoSchedule");
            check(
                evicted.is_empty() && kept_out == ["unreachable"],
                (evicted, kept_out),
            )
        })
        .await;
    for line in [
        r#"node_collector_unhealthy_nodes_in_zone{zone=""} 3"#,
        r#"node_collector_zone_health{zone=""} 0"#,
    ] {
        cluster.until_measured(line).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_leave_a_tainted_node_in_their_own_time() {
    let cluster = Cluster::start().await;
    let pod = |name: &str, tolerations: Value| {
        json!({"metadata": {"name": name}, "spec": {"nodeName": "n", "tolerations": tolerations,
            "containers": [{"name": "c", "image": "i"}]}})
    };
    let tolerates = |seconds: Value| json!([{"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}]);
    for (name, tolerations) in [
        ("leaves", json!([])),
        ("waits", tolerates(json!(600))),
        ("stays", tolerates(json!(null))),
    ] {
        cluster.create::<Pod>(pod(name, tolerations)).await;
    }
    // Added long ago: the time of the toleration begins when the controller sees it.
    let taint = json!([{"key": "k", "effect": "NoExecute", "timeAdded": "2020-01-01T00:00:00Z"}]);
    patch_node(&cluster, "n", json!({"spec": {"taints": taint}})).await;
    cluster
        .until("one leaves", async || {
            let left = cluster.list::<Pod>().await;
            let mut names: Vec<String> = left.iter().filter_map(|pod| pod.metadata.name.clone()).collect();
            names.sort();
            check(names == ["stays", "waits"], names)
        })
        .await;
    cluster
        .until_event("TaintManagerEviction", "Marking for deletion Pod default/leaves")
        .await;
    cluster
        .until_measured("taint_eviction_controller_pod_deletions_total 1")
        .await;
    patch_node(&cluster, "n", json!({"spec": {"taints": null}})).await;
    cluster
        .until_event("TaintManagerEviction", "Cancelling deletion of Pod default/waits")
        .await;
    assert_eq!(cluster.list::<Pod>().await.len(), 2);
    let events = cluster.list::<Event>().await;
    let about = |name: &str| {
        events
            .iter()
            .filter(|event| event.message.as_deref().is_some_and(|m| m.ends_with(name)))
            .count()
    };
    assert_eq!((about("default/waits"), about("default/stays")), (1, 0));
}
