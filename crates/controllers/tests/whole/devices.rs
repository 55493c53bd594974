//! Resource claims and tainted devices over the real server. Scheduler and driver are played by the test.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::cluster::{Cluster, check};

const REQUESTS: &str = r#"{"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}}"#;

/// A pod with a claim by template that is allocated and reserved for it; the claim's name.
async fn pod_with_device(cluster: &Cluster, name: &str) -> String {
    let requests: Value = serde_json::from_str(REQUESTS).unwrap();
    if cluster
        .api::<ResourceClaimTemplate>()
        .get_opt("t")
        .await
        .unwrap()
        .is_none()
    {
        let template = json!({"metadata": {"name": "t"}, "spec": {"metadata": {"labels": {"l": "1"}}, "spec": requests}});
        cluster.create::<ResourceClaimTemplate>(template).await;
    }
    let pod = json!({"metadata": {"name": name}, "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]}});
    let pod: Pod = cluster.create(pod).await;
    let claim_of = async || -> Option<String> {
        let pod = cluster.api::<Pod>().get(name).await.unwrap();
        let statuses = pod.status?.resource_claim_statuses?;
        statuses.first()?.resource_claim_name.clone()
    };
    cluster
        .until("the claim is made", async || {
            check(claim_of().await.is_some(), ())
        })
        .await;
    let claim = claim_of().await.unwrap();
    let claims = cluster.api::<ResourceClaim>();
    let made = claims.get(&claim).await.unwrap();
    assert!(claim.starts_with(&format!("{name}-gpu-")), "{claim}");
    assert_eq!(made.labels().get("l").map(String::as_str), Some("1"));
    assert_eq!(made.owner_references()[0].uid, pod.uid().unwrap());
    let finalizer = json!({"metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]}});
    let params = PatchParams::default();
    claims
        .patch(&claim, &params, &Patch::Merge(finalizer))
        .await
        .unwrap();
    let allocated = json!({"status": {
        "allocation": {"devices": {"results": [{"request": "r", "driver": "d.example.com", "pool": "p", "device": "gpu0"}]}},
        "reservedFor": [{"resource": "pods", "name": name, "uid": pod.uid()}]}});
    claims
        .patch_status(&claim, &params, &Patch::Merge(allocated))
        .await
        .unwrap();
    claim
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_made_for_its_pod_and_freed_by_it() {
    let cluster = Cluster::start().await;
    let claim = pod_with_device(&cluster, "p").await;
    cluster.set_pod_status("p", json!({"phase": "Succeeded"})).await;
    // The pod is still there; its claim is not needed any more.
    let claims = cluster.api::<ResourceClaim>();
    cluster
        .until_idle("the claim is gone", async || {
            let left = claims.get_opt(&claim).await.unwrap();
            check(left.is_none(), left.map(|claim| claim.status))
        })
        .await;
    assert!(cluster.api::<Pod>().get_opt("p").await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_on_a_tainted_device_is_evicted() {
    let cluster = Cluster::start().await;
    let slice = json!({"metadata": {"name": "s"}, "spec": {"driver": "d.example.com", "nodeName": "n",
        "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}, "devices": [{"name": "gpu0"}]}});
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    let slice = serde_json::from_value(slice).unwrap();
    slices.create(&PostParams::default(), &slice).await.unwrap();
    pod_with_device(&cluster, "p").await;
    let tainted = json!({"spec": {"devices": [{"name": "gpu0", "taints": [{"key": "broken", "effect": "NoExecute"}]}]}});
    slices
        .patch("s", &PatchParams::default(), &Patch::Merge(tainted))
        .await
        .unwrap();
    cluster
        .until_event("DeviceTaintManagerEviction", "Marking for deletion")
        .await;
    cluster
        .until("the pod is gone", async || {
            check(cluster.api::<Pod>().get_opt("p").await.unwrap().is_none(), ())
        })
        .await;
}
