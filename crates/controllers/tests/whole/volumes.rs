//! Claims and volumes over the real server: binding both ways, release, delayed binding, classes, ephemeral claims,
//! attachments. Provisioner, attacher and kubelet are played by the test.

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::cluster::{Cluster, check};

async fn create_volume(cluster: &Cluster, name: &str, size: &str, extra: Value) {
    let mut spec =
        json!({"capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/x"}});
    for (key, value) in extra.as_object().unwrap() {
        spec[key] = value.clone();
    }
    if spec["csi"].is_object() {
        spec.as_object_mut().unwrap().remove("hostPath");
    }
    let volume = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
    let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
    volumes.create(&PostParams::default(), &volume).await.unwrap();
}

async fn create_claim(cluster: &Cluster, name: &str, spec: Value) {
    let mut whole = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
    for (key, value) in spec.as_object().unwrap() {
        whole[key] = value.clone();
    }
    let claim = json!({"metadata": {"name": name}, "spec": whole});
    cluster.create::<PersistentVolumeClaim>(claim).await;
}

async fn create_class(cluster: &Cluster, name: &str, extra: Value) {
    let mut class = json!({"metadata": {"name": name}, "provisioner": "example.com/p"});
    for (key, value) in extra.as_object().unwrap() {
        class[key] = value.clone();
    }
    let classes: Api<StorageClass> = Api::all(cluster.client.clone());
    let class = serde_json::from_value(class).unwrap();
    classes.create(&PostParams::default(), &class).await.unwrap();
}

async fn bound_to(cluster: &Cluster, claim: &str, volume: &str) {
    cluster
        .until(&format!("{claim} is bound to {volume}"), async || {
            let found = cluster.api::<PersistentVolumeClaim>().get(claim).await.unwrap();
            let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
            let other = volumes.get(volume).await.unwrap();
            let phase = found.status.as_ref().and_then(|status| status.phase.as_deref());
            let other_phase = other.status.as_ref().and_then(|status| status.phase.as_deref());
            let named = found.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
            let holder = other.spec.as_ref().and_then(|spec| spec.claim_ref.clone());
            let good = phase == Some("Bound")
                && other_phase == Some("Bound")
                && named == Some(volume)
                && holder.is_some_and(|holder| holder.uid == found.metadata.uid);
            check(good, (phase.map(str::to_owned), other_phase.map(str::to_owned)))
        })
        .await;
}

async fn phase_of(cluster: &Cluster, volume: &str, expected: &str) {
    let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
    cluster
        .until(&format!("{volume} is {expected}"), async || {
            let found = volumes.get(volume).await.unwrap();
            let phase = found.status.and_then(|status| status.phase);
            check(phase.as_deref() == Some(expected), phase)
        })
        .await;
}

async fn event(cluster: &Cluster, name: &str, reason: &str, part: &str) {
    cluster
        .until(&format!("event {reason} of {name}"), async || {
            let events = cluster.list::<k8s_openapi::api::core::v1::Event>().await;
            let told = |event: &k8s_openapi::api::core::v1::Event| {
                let message = event.message.as_deref().unwrap_or_default();
                event.involved_object.name.as_deref() == Some(name)
                    && event.reason.as_deref() == Some(reason)
                    && message.contains(part)
            };
            check(events.iter().any(told), events.len())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_and_volumes_find_each_other() {
    let cluster = Cluster::start().await;
    create_volume(&cluster, "large", "9Gi", json!({})).await;
    create_volume(&cluster, "fits", "2Gi", json!({})).await;
    create_volume(
        &cluster,
        "reserved",
        "3Gi",
        json!({"claimRef": {"namespace": "default", "name": "owner"}}),
    )
    .await;
    phase_of(&cluster, "fits", "Available").await;
    phase_of(&cluster, "reserved", "Available").await;
    create_claim(&cluster, "first", json!({"storageClassName": ""})).await;
    bound_to(&cluster, "first", "fits").await;
    create_claim(&cluster, "owner", json!({"storageClassName": ""})).await;
    bound_to(&cluster, "owner", "reserved").await;
    create_claim(
        &cluster,
        "named",
        json!({"storageClassName": "", "volumeName": "large"}),
    )
    .await;
    bound_to(&cluster, "named", "large").await;

    // A claim that comes before its volume.
    create_claim(&cluster, "early", json!({"storageClassName": ""})).await;
    event(
        &cluster,
        "early",
        "FailedBinding",
        "no persistent volumes available",
    )
    .await;
    create_volume(&cluster, "late", "1Gi", json!({})).await;
    bound_to(&cluster, "early", "late").await;

    // Retained volumes are released; a claim that loses its volume is lost.
    let claims = cluster.api::<PersistentVolumeClaim>();
    claims.delete("first", &DeleteParams::default()).await.unwrap();
    phase_of(&cluster, "fits", "Released").await;
    let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
    let none = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    volumes.delete("late", &DeleteParams::default()).await.unwrap();
    volumes
        .patch("late", &PatchParams::default(), &none)
        .await
        .unwrap();
    event(&cluster, "early", "ClaimLost", "has lost its PersistentVolume").await;
    // Nobody deletes a volume that no provisioner made.
    volumes
        .patch(
            "reserved",
            &PatchParams::default(),
            &Patch::Merge(json!({"spec": {"persistentVolumeReclaimPolicy": "Delete"}})),
        )
        .await
        .unwrap();
    claims.delete("owner", &DeleteParams::default()).await.unwrap();
    phase_of(&cluster, "reserved", "Failed").await;
    event(
        &cluster,
        "reserved",
        "VolumeFailedDelete",
        "no deletable volume plugin matched",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_volume_is_bound_to_one_claim() {
    let cluster = Cluster::start().await;
    for n in 0..10 {
        create_claim(&cluster, &format!("c{n}"), json!({"storageClassName": ""})).await;
    }
    for n in 0..5 {
        create_volume(&cluster, &format!("v{n}"), "1Gi", json!({})).await;
    }
    cluster
        .until("five are bound", async || {
            let claims = cluster.list::<PersistentVolumeClaim>().await;
            let mut names: Vec<String> = claims
                .iter()
                .filter(|claim| claim.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Bound"))
                .filter_map(|claim| claim.spec.as_ref()?.volume_name.clone())
                .collect();
            names.sort();
            check(names == ["v0", "v1", "v2", "v3", "v4"], names)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn classes_decide_who_makes_the_volume_and_when() {
    let cluster = Cluster::start().await;
    create_claim(&cluster, "any", json!({})).await;
    event(&cluster, "any", "FailedBinding", "no storage class is set").await;
    create_claim(&cluster, "unknown", json!({"storageClassName": "nope"})).await;
    event(
        &cluster,
        "unknown",
        "ProvisioningFailed",
        "storageclass.storage.k8s.io \"nope\" not found",
    )
    .await;
    create_class(
        &cluster,
        "slow",
        json!({"volumeBindingMode": "WaitForFirstConsumer"}),
    )
    .await;
    create_claim(&cluster, "later", json!({"storageClassName": "slow"})).await;
    event(
        &cluster,
        "later",
        "WaitForFirstConsumer",
        "waiting for first consumer",
    )
    .await;
    let provisioner = async |name: &str| {
        cluster
            .until("the provisioner is asked", async || {
                let claim = cluster.api::<PersistentVolumeClaim>().get(name).await.unwrap();
                let annotations = claim.metadata.annotations.unwrap_or_default();
                let asked = annotations
                    .get("volume.kubernetes.io/storage-provisioner")
                    .cloned();
                check(asked.as_deref() == Some("example.com/p"), annotations)
            })
            .await;
    };
    let selected = json!({"metadata": {"annotations": {"volume.kubernetes.io/selected-node": "n"}}});
    cluster.patch::<PersistentVolumeClaim>("later", selected).await;
    provisioner("later").await;
    event(
        &cluster,
        "later",
        "ExternalProvisioning",
        "by the external provisioner 'example.com/p'",
    )
    .await;
    // A default class that comes later is given to claims that left it open.
    let default = json!({"metadata": {"name": "std", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}});
    create_class(&cluster, "std", default).await;
    provisioner("any").await;
    let any = cluster.api::<PersistentVolumeClaim>().get("any").await.unwrap();
    assert_eq!(any.spec.unwrap().storage_class_name.as_deref(), Some("std"));
    // The provisioner makes a volume that names the claim.
    let uid = any.metadata.uid.clone().unwrap();
    create_volume(
        &cluster,
        "made",
        "1Gi",
        json!({"storageClassName": "std", "claimRef": {"namespace": "default", "name": "any", "uid": uid}}),
    )
    .await;
    bound_to(&cluster, "any", "made").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ephemeral_claims_belong_to_their_pods() {
    let cluster = Cluster::start().await;
    create_claim(&cluster, "taken-v", json!({"storageClassName": ""})).await;
    let pod = |name: &str| {
        json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}], "volumes": [
            {"name": "v", "ephemeral": {"volumeClaimTemplate": {"metadata": {"labels": {"a": "b"}},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}}}]}})
    };
    let made: Pod = cluster.create(pod("fresh")).await;
    let claims = cluster.api::<PersistentVolumeClaim>();
    cluster
        .until("the claim is made", async || {
            let claim = claims.get_opt("fresh-v").await.unwrap();
            let owners = claim
                .and_then(|claim| claim.metadata.owner_references)
                .unwrap_or_default();
            check(
                owners
                    .iter()
                    .any(|owner| Some(&owner.uid) == made.metadata.uid.as_ref()),
                owners,
            )
        })
        .await;
    cluster.create::<Pod>(pod("taken")).await;
    event(
        &cluster,
        "taken",
        "FailedBinding",
        "ephemeral volume v: PVC default/taken-v was not created for pod default/taken (pod is not owner)",
    )
    .await;
    // The claim goes with its pod.
    let now = DeleteParams::default().grace_period(0);
    cluster.api::<Pod>().delete("fresh", &now).await.unwrap();
    cluster
        .until("the claim is gone", async || {
            check(claims.get_opt("fresh-v").await.unwrap().is_none(), ())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn csi_volumes_are_attached_and_detached() {
    let cluster = Cluster::start().await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let managed = json!({"metadata": {"annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true"}}});
    nodes
        .patch("n", &PatchParams::default(), &Patch::Merge(managed))
        .await
        .unwrap();
    let csi = json!({"csi": {"driver": "d.example.com", "volumeHandle": "h"}});
    create_volume(&cluster, "disk", "1Gi", csi).await;
    create_claim(&cluster, "c", json!({"storageClassName": ""})).await;
    bound_to(&cluster, "c", "disk").await;
    let pod = json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}],
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}});
    cluster.create::<Pod>(pod).await;
    let attachments: Api<VolumeAttachment> = Api::all(cluster.client.clone());
    let one = async || {
        let list = attachments.list(&Default::default()).await.unwrap().items;
        list.into_iter().next()
    };
    cluster
        .until("an attachment is made", async || check(one().await.is_some(), ()))
        .await;
    let attachment = one().await.unwrap();
    assert_eq!(attachment.spec.attacher, "d.example.com");
    assert_eq!(
        attachment.spec.source.persistent_volume_name.as_deref(),
        Some("disk")
    );
    let name = attachment.metadata.name.unwrap();
    let attached = Patch::Merge(json!({"status": {"attached": true}}));
    attachments
        .patch_status(&name, &PatchParams::default(), &attached)
        .await
        .unwrap();
    let unique = "kubernetes.io/csi/d.example.com^h";
    let reported = async |expected: bool| {
        cluster
            .until(&format!("reported: {expected}"), async || {
                let status = nodes.get("n").await.unwrap().status.unwrap_or_default();
                let volumes = status.volumes_attached.unwrap_or_default();
                check(volumes.iter().any(|v| v.name == unique) == expected, volumes)
            })
            .await;
    };
    reported(true).await;
    event(
        &cluster,
        "p",
        "SuccessfulAttachVolume",
        "AttachVolume.Attach succeeded for volume \"disk\"",
    )
    .await;
    // While the node uses it, it stays, though the pod is gone.
    let in_use = |volumes: Value| Patch::Merge(json!({"status": {"volumesInUse": volumes}}));
    nodes
        .patch_status("n", &PatchParams::default(), &in_use(json!([unique])))
        .await
        .unwrap();
    let now = DeleteParams::default().grace_period(0);
    cluster.api::<Pod>().delete("p", &now).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert!(one().await.is_some(), "detached while in use");
    nodes
        .patch_status("n", &PatchParams::default(), &in_use(json!([])))
        .await
        .unwrap();
    cluster
        .until("the attachment is gone", async || {
            check(one().await.is_none(), ())
        })
        .await;
    reported(false).await;
}
