//! Extended resources that a DeviceClass backs, over the real server: the claim is created, allocated, reserved and named in
//! the pod's status before the pod is bound.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::{Value, json};

use crate::cluster::{Cluster, check, condition, configuration, node_of, pod};
use crate::restarts::create_global;

fn asking(resource: &str, amount: &str) -> Value {
    let amounts = json!({resource: amount});
    json!({"containers": [{"name": "c", "image": "i", "resources": {"requests": amounts, "limits": amounts}}]})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_class_backs_an_extended_resource() {
    let cluster = Cluster::start().await;
    cluster.add_node("n0").await;
    cluster.add_node("n1").await;
    let slice = json!({"metadata": {"name": "n1"}, "spec": {"driver": "d.example.com", "nodeName": "n1",
        "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "gpu0"}, {"name": "gpu1"}]}});
    create_global::<ResourceSlice>(&cluster, slice).await;
    let config = configuration("podMaxBackoffSeconds: 2\n");
    let mut scheduler = cluster.start_scheduler("s", true, &config);

    // Nobody has it yet.
    cluster
        .create::<Pod>(pod("explicit", asking("example.com/gpu", "1")))
        .await;
    let message = async |name: &str| condition(&cluster.api::<Pod>().get(name).await.unwrap());
    cluster
        .until("the pod fits nowhere", async || {
            let message = message("explicit").await;
            check(message.contains("2 Insufficient example.com/gpu"), message)
        })
        .await;
    // The class brings it to its node.
    let class = json!({"metadata": {"name": "gpu"}, "spec": {"extendedResourceName": "example.com/gpu"}});
    create_global::<DeviceClass>(&cluster, class).await;
    cluster
        .until_bound("the pod with a device", |name| name == "explicit")
        .await;
    let implicit = asking("deviceclass.resource.kubernetes.io/gpu", "1");
    cluster.create::<Pod>(pod("implicit", implicit)).await;
    cluster
        .until_bound("the pod with the other device", |name| name == "implicit")
        .await;

    let mut devices = Vec::new();
    for name in ["explicit", "implicit"] {
        let pod = cluster.api::<Pod>().get(name).await.unwrap();
        assert_eq!(node_of(&pod).as_deref(), Some("n1"));
        let status = pod
            .status
            .clone()
            .unwrap()
            .extended_resource_claim_status
            .unwrap();
        let mapping = &status.request_mappings[0];
        assert_eq!(mapping.container_name, "c");
        assert_eq!(mapping.request_name, "container-0-request-0");
        let claim = cluster
            .api::<ResourceClaim>()
            .get(&status.resource_claim_name)
            .await
            .unwrap();
        assert!(
            claim
                .name_any()
                .starts_with(&format!("{name}-extended-resources-"))
        );
        assert_eq!(claim.owner_references()[0].uid, pod.uid().unwrap());
        let given = claim.status.unwrap();
        assert_eq!(given.reserved_for.unwrap()[0].uid, pod.uid().unwrap());
        let results = given.allocation.unwrap().devices.unwrap().results.unwrap();
        devices.extend(results.into_iter().map(|result| result.device));
    }
    devices.sort();
    assert_eq!(devices, ["gpu0", "gpu1"]);

    // Both are in use; one that is given back goes to the next.
    cluster
        .create::<Pod>(pod("third", asking("example.com/gpu", "1")))
        .await;
    cluster
        .until("the third pod waits", async || {
            let message = message("third").await;
            check(message.contains("2 cannot allocate all claims"), message)
        })
        .await;
    let status = cluster
        .api::<Pod>()
        .get("explicit")
        .await
        .unwrap()
        .status
        .unwrap();
    let claim = status.extended_resource_claim_status.unwrap().resource_claim_name;
    cluster.delete_pod("explicit").await;
    // The controller's part.
    let claims = cluster.api::<ResourceClaim>();
    let free = json!({"metadata": {"finalizers": []}});
    claims
        .patch(
            &claim,
            &kube::api::PatchParams::default(),
            &kube::api::Patch::Merge(free),
        )
        .await
        .unwrap();
    claims.delete(&claim, &DeleteParams::default()).await.unwrap();
    cluster.until_bound("the third pod", |name| name == "third").await;
    scheduler.kill().await;
}
