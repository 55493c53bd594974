//! PodGroups outlive their pods.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use kube::api::DeleteParams;
use serde_json::json;
use skiff_testkit::ApiServer;

use crate::cluster::{Cluster, check};

const API: &str = "scheduling.k8s.io/v1alpha2=true";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_goes_after_its_pods() {
    let cluster = Cluster::of(ApiServer::serving(&[API]).await.unwrap());
    cluster.add_node("n").await;
    cluster.run_controllers(|config| {
        config.leader_elect = false;
        config.serves_api = Arc::new(|_, _, plural| plural == "podgroups");
    });
    cluster.furnished().await;
    for name in ["used", "unused"] {
        let policy = json!({"basic": {}});
        let group = json!({"metadata": {"name": name}, "spec": {"schedulingPolicy": policy}});
        cluster.create::<PodGroup>(group).await;
    }
    for name in ["first", "second"] {
        let spec = json!({"schedulingGroup": {"podGroupName": "used"}, "restartPolicy": "Never",
            "containers": [{"name": "c", "image": "i"}]});
        cluster
            .create::<Pod>(json!({"metadata": {"name": name}, "spec": spec}))
            .await;
    }
    let groups = cluster.api::<PodGroup>();
    let gone = async |name: &str| groups.get_opt(name).await.unwrap().is_none();
    for name in ["used", "unused"] {
        groups.delete(name, &DeleteParams::default()).await.unwrap();
    }
    cluster
        .until_idle("the unused group is gone", async || {
            check(gone("unused").await, ())
        })
        .await;
    let pods = cluster.api::<Pod>();
    let now = DeleteParams::default().grace_period(0);
    pods.delete("first", &now).await.unwrap();
    // The next one has its turn after what the deletion brought about.
    let group = json!({"metadata": {"name": "next"}, "spec": {"schedulingPolicy": {"basic": {}}}});
    cluster.create::<PodGroup>(group).await;
    groups.delete("next", &DeleteParams::default()).await.unwrap();
    cluster
        .until_idle("the next group is gone", async || check(gone("next").await, ()))
        .await;
    assert!(!gone("used").await, "a pod is left");
    cluster
        .set_pod_status("second", json!({"phase": "Succeeded"}))
        .await;
    cluster
        .until_idle("the group is gone", async || check(gone("used").await, ()))
        .await;
}
