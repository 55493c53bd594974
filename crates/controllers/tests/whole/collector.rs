//! The garbage collector over the real server.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::DeleteParams;
use kube::client::Body;
use serde_json::{Value, json};
use tower::{BoxError, ServiceExt};

use crate::cluster::{Cluster, check, user_of};
use crate::rollout::{deployment, rolled_out};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreground_waits_and_orphans_stay() {
    let cluster = Cluster::start().await;
    cluster.create::<Deployment>(deployment("v1", 2)).await;
    cluster
        .until("rolled out", async || rolled_out(&cluster, 2, "v1").await)
        .await;
    cluster
        .api::<Deployment>()
        .delete("web", &DeleteParams::orphan())
        .await
        .unwrap();
    cluster
        .until("orphaned", async || {
            let gone = cluster
                .api::<Deployment>()
                .get_opt("web")
                .await
                .unwrap()
                .is_none();
            let sets = cluster.list::<ReplicaSet>().await;
            let free = sets
                .iter()
                .all(|set| set.metadata.owner_references.as_ref().is_none_or(Vec::is_empty));
            check(gone && free && sets.len() == 1, sets)
        })
        .await;
    assert_eq!(cluster.list::<Pod>().await.len(), 2);
    // A new Deployment of the same template adopts what was left.
    cluster.create::<Deployment>(deployment("v1", 2)).await;
    cluster
        .until("adopted", async || rolled_out(&cluster, 2, "v1").await)
        .await;
    assert_eq!(cluster.list::<ReplicaSet>().await.len(), 1);
    cluster
        .api::<Deployment>()
        .delete("web", &DeleteParams::foreground())
        .await
        .unwrap();
    cluster
        .until("gone", async || {
            let gone = cluster
                .api::<Deployment>()
                .get_opt("web")
                .await
                .unwrap()
                .is_none();
            let left = (
                gone,
                cluster.list::<ReplicaSet>().await.len(),
                cluster.list::<Pod>().await.len(),
            );
            check(left == (true, 0, 0), left)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forged_reference_costs_nobody_else() {
    let cluster = Cluster::start().await;
    cluster.create::<Deployment>(deployment("v1", 1)).await;
    cluster
        .until("rolled out", async || rolled_out(&cluster, 1, "v1").await)
        .await;
    let owner = cluster.api::<Deployment>().get("web").await.unwrap();
    let uid = owner.metadata.uid.unwrap();
    let map = |name: &str, references: &[(&str, &str, &str, &str)]| {
        let references: Vec<Value> = references
            .iter()
            .map(|(api_version, kind, name, uid)| {
                json!({"apiVersion": api_version, "kind": kind, "name": name, "uid": uid})
            })
            .collect();
        json!({"metadata": {"name": name, "ownerReferences": references}})
    };
    // The uid of a living object under a name that nobody has. The second reference makes it looked at.
    let forged = [
        ("v1", "Pod", "nobody", uid.as_str()),
        ("v1", "Pod", "x", "gone-1"),
    ];
    cluster.create::<ConfigMap>(map("forged", &forged)).await;
    cluster
        .until("forged", async || {
            let left = cluster.api::<ConfigMap>().get_opt("forged").await.unwrap();
            check(left.is_none(), left)
        })
        .await;
    let honest = [
        ("apps/v1", "Deployment", "web", uid.as_str()),
        ("v1", "Pod", "x", "gone-2"),
    ];
    cluster.create::<ConfigMap>(map("honest", &honest)).await;
    cluster
        .until("honest", async || {
            let left = cluster.api::<ConfigMap>().get_opt("honest").await.unwrap();
            let owners = left
                .as_ref()
                .and_then(|left| left.metadata.owner_references.clone())
                .unwrap_or_default();
            assert!(left.is_some(), "it was deleted though its owner lives");
            check(owners.len() == 1 && owners[0].uid == uid, owners)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_cannot_be_read_is_not_gone() {
    let cluster = Cluster::without_controllers().await;
    let server = cluster.server.server.clone();
    cluster.run_controllers(|config| {
        config.client_for = Arc::new(move |name: &str| {
            let inner = server.service(user_of(name));
            // Nobody can read the pod `unreadable`.
            let service = tower::service_fn(move |request: http::Request<Body>| {
                let inner = inner.clone();
                async move {
                    if request.uri().path().ends_with("/pods/unreadable") {
                        return Err(BoxError::from("the pod cannot be read"));
                    }
                    inner.oneshot(request).await.map_err(BoxError::from)
                }
            });
            skiff_client::in_process(service, "default")
        });
    });
    let map = |name: &str, owner: &str| {
        json!({"metadata": {"name": name, "ownerReferences": [
            {"apiVersion": "v1", "kind": "Pod", "name": owner, "uid": format!("uid-of-{owner}")}]}})
    };
    cluster.create::<ConfigMap>(map("kept", "unreadable")).await;
    // The collector looks at both, and is done with what came later.
    for name in ["orphan-1", "orphan-2"] {
        cluster.create::<ConfigMap>(map(name, "gone")).await;
        cluster
            .until("orphan", async || {
                let left = cluster.api::<ConfigMap>().get_opt(name).await.unwrap();
                check(left.is_none(), left)
            })
            .await;
    }
    let left = cluster.api::<ConfigMap>().get_opt("kept").await.unwrap();
    assert!(left.is_some(), "it was deleted though its owner may live");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_of_owners_can_be_deleted_in_the_foreground() {
    let cluster = Cluster::start().await;
    let map = |name: &str| json!({"metadata": {"name": name}});
    cluster.create::<ConfigMap>(map("a")).await;
    cluster.create::<ConfigMap>(map("b")).await;
    let maps = cluster.api::<ConfigMap>();
    for (name, owner) in [("a", "b"), ("b", "a")] {
        let uid = maps.get(owner).await.unwrap().metadata.uid;
        let patch = json!({"metadata": {"ownerReferences": [
            {"apiVersion": "v1", "kind": "ConfigMap", "name": owner, "uid": uid, "blockOwnerDeletion": true}]}});
        cluster.patch::<ConfigMap>(name, patch).await;
    }
    maps.delete("a", &DeleteParams::foreground()).await.unwrap();
    cluster
        .until("both gone", async || {
            let left = (maps.get_opt("a").await.unwrap(), maps.get_opt("b").await.unwrap());
            check(left == (None, None), left)
        })
        .await;
}
