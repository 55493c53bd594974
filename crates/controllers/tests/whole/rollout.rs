//! A Deployment from its apply to endpoints and away again, and controllers that panic meanwhile.

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::{Endpoints, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::DeleteParams;
use serde_json::{Value, json};

use crate::cluster::{Cluster, check};

pub fn deployment(image: &str, replicas: i32) -> Value {
    json!({"metadata": {"name": "web"}, "spec": {"replicas": replicas, "progressDeadlineSeconds": 600,
        "revisionHistoryLimit": 10, "selector": {"matchLabels": {"app": "web"}},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [
            {"name": "c", "image": image, "ports": [{"name": "http", "containerPort": 8080}]}]}}}})
}

pub async fn rolled_out(cluster: &Cluster, replicas: i32, image: &str) -> Result<(), String> {
    let deployment = cluster.api::<Deployment>().get("web").await.unwrap();
    let status = deployment.status.clone().unwrap_or_default();
    let pods = cluster.list::<Pod>().await;
    let right = pods
        .iter()
        .all(|pod| pod.spec.as_ref().unwrap().containers[0].image.as_deref() == Some(image));
    let counts = [
        status.replicas,
        status.updated_replicas,
        status.available_replicas,
    ];
    let observed = status.observed_generation == deployment.metadata.generation;
    check(
        observed && right && counts == [Some(replicas); 3] && pods.len() == replicas as usize,
        status,
    )
}

async fn ready_endpoints(cluster: &Cluster) -> usize {
    let slices = cluster.list::<EndpointSlice>().await;
    let endpoints = slices
        .iter()
        .filter(|slice| {
            slice
                .metadata
                .name
                .as_deref()
                .is_some_and(|name| name.starts_with("web-"))
        })
        .flat_map(|slice| slice.endpoints.iter().flatten());
    endpoints
        .filter(|one| one.conditions.as_ref().is_some_and(|c| c.ready == Some(true)))
        .count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn from_apply_to_endpoints_and_away_again() {
    let cluster = Cluster::start().await;
    let service = json!({"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"},
        "ports": [{"port": 80, "targetPort": "http"}]}});
    cluster.create::<Service>(service).await;
    cluster.create::<Deployment>(deployment("v1", 3)).await;
    cluster
        .until("rolled out", async || rolled_out(&cluster, 3, "v1").await)
        .await;
    cluster
        .until("endpoints", async || {
            let ready = ready_endpoints(&cluster).await;
            check(ready == 3, ready)
        })
        .await;
    let endpoints = cluster.api::<Endpoints>();
    cluster
        .until("old endpoints", async || {
            let subsets = endpoints
                .get_opt("web")
                .await
                .unwrap()
                .and_then(|one| one.subsets)
                .unwrap_or_default();
            let count = subsets
                .iter()
                .flat_map(|subset| subset.addresses.iter().flatten())
                .count();
            check(count == 3, subsets)
        })
        .await;

    // A pod that is deleted comes back.
    let victim = cluster.list::<Pod>().await[0].metadata.name.clone().unwrap();
    cluster
        .api::<Pod>()
        .delete(&victim, &DeleteParams::default())
        .await
        .unwrap();
    cluster
        .until("replaced", async || {
            rolled_out(&cluster, 3, "v1").await?;
            check(
                cluster.api::<Pod>().get_opt(&victim).await.unwrap().is_none(),
                "victim",
            )
        })
        .await;

    // A new image rolls, a changed number scales.
    cluster
        .patch::<Deployment>("web", json!({"spec": deployment("v2", 5)["spec"]}))
        .await;
    cluster
        .until("new image", async || rolled_out(&cluster, 5, "v2").await)
        .await;
    cluster
        .until("endpoints", async || {
            check(ready_endpoints(&cluster).await == 5, "endpoints")
        })
        .await;
    let mut revisions: Vec<String> = cluster
        .list::<ReplicaSet>()
        .await
        .iter()
        .map(|set| set.metadata.annotations.as_ref().unwrap()["deployment.kubernetes.io/revision"].clone())
        .collect();
    revisions.sort();
    assert_eq!(revisions, vec!["1", "2"]);
    let live = cluster.api::<Deployment>().get("web").await.unwrap();
    assert_eq!(
        live.metadata.annotations.unwrap()["deployment.kubernetes.io/revision"],
        "2"
    );

    // The events tell the story.
    cluster.until_event("ScalingReplicaSet", "from 0 to 3").await;
    cluster.until_event("SuccessfulCreate", "Created pod: web-").await;

    // Deleting the Deployment takes its sets and pods along.
    cluster
        .api::<Deployment>()
        .delete("web", &DeleteParams::background())
        .await
        .unwrap();
    cluster
        .until("deleted", async || {
            let left = (
                cluster.list::<ReplicaSet>().await.len(),
                cluster.list::<Pod>().await.len(),
            );
            check(left == (0, 0), left)
        })
        .await;
    cluster
        .until("no endpoints", async || {
            check(ready_endpoints(&cluster).await == 0, "endpoints")
        })
        .await;
}

/// Every controller, and what feeds it, panics once: all come back and nothing is missed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn controllers_that_panic_come_back() {
    let cluster = Cluster::start().await;
    cluster.create::<Deployment>(deployment("v1", 1)).await;
    cluster
        .until("rolled out", async || rolled_out(&cluster, 1, "v1").await)
        .await;
    let mut before = skiff_supervise::tasks();
    before.retain(|name, _| name.ends_with("-controller") || ["informer", "events"].contains(name));
    for name in ["deployment-controller", "informer", "events"] {
        assert!(before.contains_key(name), "{:?}", before.keys());
    }
    for name in before.keys() {
        skiff_supervise::panic_in(name);
    }
    cluster
        .until("all back", async || {
            let now = skiff_supervise::tasks();
            let down: Vec<_> = before
                .iter()
                .filter(|(name, before)| {
                    before.running > 0 && (now[*name].failures == before.failures || now[*name].waiting > 0)
                })
                .collect();
            check(down.is_empty(), down)
        })
        .await;
    cluster
        .patch::<Deployment>("web", json!({"spec": {"replicas": 3}}))
        .await;
    cluster
        .until("scaled", async || rolled_out(&cluster, 3, "v1").await)
        .await;
}
