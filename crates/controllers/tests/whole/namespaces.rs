//! Namespaces over the real server: what they get when they are made, how their quotas are counted, and how they are emptied.

use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, ResourceQuota, ServiceAccount};
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::cluster::{Cluster, check};
use crate::rollout::deployment;

/// A namespace with its service account.
async fn furnished(cluster: &Cluster, name: &str) -> Api<Namespace> {
    let namespaces: Api<Namespace> = Api::all(cluster.client.clone());
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
    namespaces
        .create(&PostParams::default(), &namespace)
        .await
        .unwrap();
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client.clone(), name);
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), name);
    cluster
        .until("furnished", async || {
            let account = accounts.get_opt("default").await.unwrap().is_some();
            let map = maps.get_opt("kube-root-ca.crt").await.unwrap();
            let pem = map
                .and_then(|map| map.data)
                .and_then(|data| data.get("ca.crt").cloned());
            check(account && pem.as_deref() == Some("PEM"), (account, pem))
        })
        .await;
    namespaces
}

async fn fill(cluster: &Cluster, name: &str) {
    let deployments: Api<Deployment> = Api::namespaced(cluster.client.clone(), name);
    let web: Deployment = serde_json::from_value(deployment("v1", 2)).unwrap();
    deployments.create(&PostParams::default(), &web).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), name);
    cluster
        .until("pods", async || {
            let count = pods.list(&ListParams::default()).await.unwrap().items.len();
            check(count == 2, count)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_is_furnished_and_emptied() {
    let cluster = Cluster::start().await;
    let namespaces = furnished(&cluster, "team").await;
    fill(&cluster, "team").await;
    namespaces.delete("team", &DeleteParams::default()).await.unwrap();
    cluster
        .until("gone", async || {
            let left = namespaces.get_opt("team").await.unwrap();
            check(left.is_none(), left)
        })
        .await;
}

/// One group cannot be discovered: all others are emptied, but the namespace stays until it can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_group_holds_the_namespace_but_not_its_content() {
    let cluster = Cluster::start().await;
    let namespaces = furnished(&cluster, "team").await;
    fill(&cluster, "team").await;
    let dead = json!({"metadata": {"name": "v1.dead.example"}, "spec": {"group": "dead.example", "version": "v1",
        "groupPriorityMinimum": 1000, "versionPriority": 15, "insecureSkipTLSVerify": true,
        "service": {"namespace": "default", "name": "nowhere", "port": 443}}});
    let dead: APIService = serde_json::from_value(dead).unwrap();
    let services: Api<APIService> = Api::all(cluster.client.clone());
    services.create(&PostParams::default(), &dead).await.unwrap();
    cluster
        .until("unavailable", async || {
            let status = services.get("v1.dead.example").await.unwrap().status;
            let conditions = status.and_then(|status| status.conditions).unwrap_or_default();
            check(conditions.iter().any(|one| one.status == "False"), conditions)
        })
        .await;
    namespaces.delete("team", &DeleteParams::default()).await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), "team");
    let deployments: Api<Deployment> = Api::namespaced(cluster.client.clone(), "team");
    cluster
        .until("emptied", async || {
            let namespace = namespaces.get("team").await.unwrap();
            let conditions = namespace.status.unwrap_or_default().conditions.unwrap_or_default();
            let told = |type_: &str| {
                let found = conditions.iter().find(|condition| condition.type_ == type_);
                found.map(|found| (found.status.clone(), found.message.clone().unwrap_or_default()))
            };
            let expected = "Discovery failed for some groups, 1 failing: unable to retrieve the complete list of server APIs: dead.example/v1: ";
            let discovery = told("NamespaceDeletionDiscoveryFailure");
            let discovered = discovery
                .is_some_and(|(status, message)| status == "True" && message.starts_with(expected));
            let content = told("NamespaceContentRemaining").map(|(status, _)| status);
            let left = maps.list(&ListParams::default()).await.unwrap().items.len()
                + deployments.list(&ListParams::default()).await.unwrap().items.len();
            check(
                left == 0 && discovered && content.as_deref() == Some("False"),
                (left, conditions.clone()),
            )
        })
        .await;
    let held = namespaces.get("team").await.unwrap().spec.unwrap().finalizers;
    assert_eq!(held, Some(vec!["kubernetes".to_owned()]));
    services
        .delete("v1.dead.example", &DeleteParams::default())
        .await
        .unwrap();
    cluster
        .until("gone", async || {
            let left = namespaces.get_opt("team").await.unwrap();
            check(left.is_none(), left)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_are_counted_again_after_their_period() {
    let cluster = Cluster::start_idle().await;
    cluster.run_controllers(|config| config.resource_quota_sync_period = Duration::from_millis(300));
    cluster
        .create::<ResourceQuota>(json!({"metadata": {"name": "q"}, "spec": {"hard": {"pods": "5"}}}))
        .await;
    let quotas = cluster.api::<ResourceQuota>();
    let counted = async || {
        let used = async || {
            let status = quotas.get("q").await.unwrap().status.unwrap_or_default();
            status
                .used
                .and_then(|used| used.get("pods").map(|pods| pods.0.clone()))
        };
        cluster
            .until_idle("the pods are counted", async || {
                let used = used().await;
                check(used.as_deref() == Some("0"), used)
            })
            .await;
    };
    counted().await;
    // Nothing but the period brings the quota to the queue again.
    let wrong = Patch::Merge(json!({"status": {"used": {"pods": "3"}}}));
    let params = PatchParams::default();
    let patched = quotas.patch_status("q", &params, &wrong).await.unwrap();
    assert_eq!(patched.status.unwrap().used.unwrap()["pods"].0, "3");
    counted().await;
}
