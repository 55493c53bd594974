//! Deployments and ReplicaSets over the real server.

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::cluster::{Cluster, check};

/// Creations and deletions are never made twice, however late the watch events are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_is_scaled_without_a_pod_too_many() {
    let cluster = Cluster::start().await;
    let deployment = json!({"metadata": {"name": "web"}, "spec": {"replicas": 20,
        "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    cluster.create::<Deployment>(deployment).await;
    let ready = async |wanted: i32| {
        let status = cluster.api::<Deployment>().get("web").await.unwrap().status;
        let ready = status.as_ref().and_then(|status| status.ready_replicas);
        let pods = cluster.list::<Pod>().await.len();
        assert!(pods <= 20, "{pods} pods");
        check(
            ready.unwrap_or(0) == wanted && pods == wanted as usize,
            (status, pods),
        )
    };
    cluster.until("20 ready", async || ready(20).await).await;
    for replicas in [3, 17, 5] {
        cluster
            .patch::<Deployment>("web", json!({"spec": {"replicas": replicas}}))
            .await;
        cluster.until("scaled", async || ready(replicas).await).await;
    }
    assert_eq!(cluster.list::<ReplicaSet>().await.len(), 1);
}
