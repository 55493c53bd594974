//! Protection of storage in use, over the real server.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::cluster::{Cluster, check};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storage_in_use_is_not_deleted() {
    let cluster = Cluster::start().await;
    let classes: Api<VolumeAttributesClass> = Api::all(cluster.client.clone());
    let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
    let claims = cluster.api::<PersistentVolumeClaim>();
    let (post, delete) = (PostParams::default(), DeleteParams::default());
    let class = json!({"metadata": {"name": "class"}, "driverName": "d.example", "parameters": {"a": "b"}});
    let class: VolumeAttributesClass = serde_json::from_value(class).unwrap();
    classes.create(&post, &class).await.unwrap();
    let claim = json!({"metadata": {"name": "claim"}, "spec": {"volumeAttributesClassName": "class",
        "storageClassName": "", "volumeName": "volume", "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}}});
    let claim = cluster.create::<PersistentVolumeClaim>(claim).await;
    let volume = json!({"metadata": {"name": "volume"}, "spec": {"capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/nowhere"}, "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"kind": "PersistentVolumeClaim", "namespace": "default", "name": "claim", "uid": claim.metadata.uid}}});
    let volume: PersistentVolume = serde_json::from_value(volume).unwrap();
    volumes.create(&post, &volume).await.unwrap();
    let phase = async |phase: &str| {
        let patch = Patch::Merge(json!({"status": {"phase": phase}}));
        volumes
            .patch_status("volume", &PatchParams::default(), &patch)
            .await
    };
    phase("Bound").await.unwrap();
    let pod = json!({"metadata": {"name": "user"}, "spec": {"nodeName": "n",
        "containers": [{"name": "c", "image": "i"}], "volumes": [
            {"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}]}});
    cluster.create::<Pod>(pod).await;

    // Each gets its finalizer, and waits with it.
    let finalizers = async || {
        let of = |finalizers: Option<Vec<String>>| finalizers.unwrap_or_default().join("+");
        [
            of(classes.get("class").await.unwrap().metadata.finalizers),
            of(volumes.get("volume").await.unwrap().metadata.finalizers),
            of(claims.get("claim").await.unwrap().metadata.finalizers),
        ]
    };
    let all = ["vac", "pv", "pvc"].map(|name| format!("kubernetes.io/{name}-protection"));
    cluster
        .until("finalizers", async || {
            check(finalizers().await == all, finalizers().await)
        })
        .await;
    classes.delete("class", &delete).await.unwrap();
    volumes.delete("volume", &delete).await.unwrap();
    claims.delete("claim", &delete).await.unwrap();
    // A class that nobody uses goes at once; by then the others were looked at, too, or will be.
    let mut unused = class.clone();
    unused.metadata.name = Some("unused".into());
    classes.create(&post, &unused).await.unwrap();
    cluster
        .until("protected", async || {
            let seen = classes.get("unused").await.unwrap().metadata.finalizers;
            check(seen.is_some(), seen)
        })
        .await;
    classes.delete("unused", &delete).await.unwrap();
    cluster
        .until("unused gone", async || {
            check(classes.get_opt("unused").await.unwrap().is_none(), "unused")
        })
        .await;
    assert_eq!(finalizers().await, all);

    // The pod goes, then the claim, then the class; the volume when it is no longer bound.
    cluster.api::<Pod>().delete("user", &delete).await.unwrap();
    cluster
        .until("claim gone", async || {
            check(claims.get_opt("claim").await.unwrap().is_none(), "claim")
        })
        .await;
    cluster
        .until("class gone", async || {
            check(classes.get_opt("class").await.unwrap().is_none(), "class")
        })
        .await;
    // Whoever binds volumes may have released it, and then it is gone.
    let _ = phase("Released").await;
    cluster
        .until("volume gone", async || {
            check(volumes.get_opt("volume").await.unwrap().is_none(), "volume")
        })
        .await;
}
