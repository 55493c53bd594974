//! StatefulSets over the real server.

use std::time::Duration;

use k8s_openapi::api::apps::v1::{ControllerRevision, StatefulSet, StatefulSetStatus};
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim, Pod, ResourceQuota};
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cluster::{Cluster, check};

fn set(more: Value) -> Value {
    let mut set = json!({"metadata": {"name": "web"}, "spec": {"replicas": 3, "serviceName": "svc",
        "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}}});
    let spec = set["spec"].as_object_mut().unwrap();
    spec.extend(more.as_object().unwrap().clone());
    set
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap()
}

fn revision(pod: &Pod) -> &str {
    &pod.metadata.labels.as_ref().unwrap()["controller-revision-hash"]
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let mut conditions = conditions.filter(|condition| condition.type_ == "Ready");
    conditions.any(|condition| condition.status == "True")
}

/// The names of the pods, with a `-` in front of those being deleted.
async fn pods(cluster: &Cluster) -> Vec<String> {
    let pods = cluster.list::<Pod>().await;
    pods.iter()
        .map(|pod| match pod.metadata.deletion_timestamp {
            Some(_) => format!("-{}", name(pod)),
            None => name(pod).to_owned(),
        })
        .collect()
}

async fn status(cluster: &Cluster) -> StatefulSetStatus {
    let set = cluster.api::<StatefulSet>().get("web").await.unwrap();
    let status = set.status.unwrap_or_default();
    // Only what is about the present spec counts.
    if status.observed_generation == set.metadata.generation {
        status
    } else {
        StatefulSetStatus::default()
    }
}

async fn until_pods(cluster: &Cluster, expected: &[&str]) {
    cluster
        .until_idle("pods", async || {
            let seen = pods(cluster).await;
            check(seen == expected, seen)
        })
        .await;
}

async fn until_replicas(cluster: &Cluster, replicas: i32) {
    cluster
        .until_idle("replicas", async || {
            let status = status(cluster).await;
            check(status.replicas == replicas, status)
        })
        .await;
}

/// All pods are there, ready and of the newest template.
async fn until_complete(cluster: &Cluster, replicas: i32) {
    cluster
        .until("complete", async || {
            let status = status(cluster).await;
            let ready = status.ready_replicas.unwrap_or(0) == replicas && status.replicas == replicas;
            let updated = status.current_revision == status.update_revision;
            check(
                ready && updated && pods(cluster).await.len() == replicas as usize,
                status,
            )
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_come_and_go_in_order() {
    let cluster = Cluster::start().await;
    cluster.create::<StatefulSet>(set(json!({}))).await;
    // The status counts what a reconcile saw: by then a second pod would have been made.
    for (count, expected) in [
        (1, &["web-0"][..]),
        (2, &["web-0", "web-1"]),
        (3, &["web-0", "web-1", "web-2"]),
    ] {
        until_replicas(&cluster, count).await;
        assert_eq!(pods(&cluster).await, expected);
        cluster.run_pods().await;
    }
    until_complete(&cluster, 3).await;
    let pod = cluster.api::<Pod>().get("web-1").await.unwrap();
    let spec = pod.spec.as_ref().unwrap();
    assert_eq!(
        (spec.hostname.as_deref(), spec.subdomain.as_deref()),
        (Some("web-1"), Some("svc"))
    );
    let labels = pod.metadata.labels.as_ref().unwrap();
    assert_eq!(labels["statefulset.kubernetes.io/pod-name"], "web-1");
    assert_eq!(labels["apps.kubernetes.io/pod-index"], "1");
    assert_eq!(
        Some(revision(&pod)),
        status(&cluster).await.current_revision.as_deref()
    );
    cluster
        .until_event(
            "SuccessfulCreate",
            "Create Pod web-2 in StatefulSet web successful",
        )
        .await;

    cluster
        .patch::<StatefulSet>("web", json!({"spec": {"replicas": 0}}))
        .await;
    for expected in [
        &["web-0", "web-1", "-web-2"][..],
        &["web-0", "-web-1"],
        &["-web-0"],
        &[],
    ] {
        until_pods(&cluster, expected).await;
        cluster.run_pods().await;
    }
    cluster
        .until_event(
            "SuccessfulDelete",
            "Delete Pod web-0 in StatefulSet web successful",
        )
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_pods_wait_for_nobody_and_start_where_they_should() {
    let cluster = Cluster::start().await;
    let more = json!({"podManagementPolicy": "Parallel", "ordinals": {"start": 5}, "minReadySeconds": 1});
    cluster.create::<StatefulSet>(set(more)).await;
    until_pods(&cluster, &["web-5", "web-6", "web-7"]).await;
    cluster
        .until("available", async || {
            let status = status(&cluster).await;
            check(status.available_replicas == Some(3), status)
        })
        .await;
    // An evicted pod is replaced whatever its phase.
    for phase in ["Failed", "Succeeded"] {
        let before = cluster.api::<Pod>().get("web-6").await.unwrap();
        cluster
            .set_pod_status("web-6", json!({"phase": phase, "reason": "Evicted"}))
            .await;
        cluster
            .until("replaced", async || {
                let pod = cluster.api::<Pod>().get_opt("web-6").await.unwrap();
                let replaced = pod
                    .as_ref()
                    .is_some_and(|pod| pod.metadata.uid != before.metadata.uid);
                check(replaced && pod.as_ref().is_some_and(is_ready), pod)
            })
            .await;
    }
    cluster
        .patch::<StatefulSet>("web", json!({"spec": {"replicas": 0}}))
        .await;
    until_pods(&cluster, &["-web-5", "-web-6", "-web-7"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn updates_stop_at_the_partition_and_roll_back() {
    let cluster = Cluster::start().await;
    let partition = |number: i32| json!({"type": "RollingUpdate", "rollingUpdate": {"partition": number}});
    cluster
        .create::<StatefulSet>(set(json!({"updateStrategy": partition(2)})))
        .await;
    until_complete(&cluster, 3).await;
    let first = status(&cluster).await.update_revision.unwrap();

    let image = |image: &str| json!({"spec": {"template": {"spec": {"containers": [{"name": "c", "image": image}]}}}});
    cluster.patch::<StatefulSet>("web", image("i:2")).await;
    let revisions = async || {
        let pods = cluster.list::<Pod>().await;
        let live = pods.iter().filter(|pod| is_ready(pod));
        live.map(|pod| (name(pod).to_owned(), revision(pod) == first))
            .collect::<Vec<_>>()
    };
    let all = |old: [bool; 3]| -> Vec<(String, bool)> {
        ["web-0", "web-1", "web-2"]
            .iter()
            .map(|name| (*name).to_owned())
            .zip(old)
            .collect()
    };
    let partly = async || {
        let seen = revisions().await;
        let status = status(&cluster).await;
        let counts = (status.current_replicas, status.updated_replicas) == (Some(2), Some(1));
        check(seen == all([true, true, false]) && counts, (seen, status))
    };
    cluster.until("the last pod is updated", partly).await;
    let now = status(&cluster).await;
    assert_eq!(now.current_revision.as_deref(), Some(first.as_str()));
    assert_ne!(now.update_revision, now.current_revision);

    // A pod below the partition comes back with the template it had.
    cluster
        .api::<Pod>()
        .delete("web-0", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    cluster.until("as it was", partly).await;
    let image_of = async |pod: &str| {
        let pod = cluster.api::<Pod>().get(pod).await.unwrap();
        pod.spec.unwrap().containers[0].image.clone().unwrap()
    };
    assert_eq!(
        (image_of("web-0").await.as_str(), image_of("web-2").await.as_str()),
        ("i:1", "i:2")
    );

    cluster
        .patch::<StatefulSet>("web", json!({"spec": {"updateStrategy": partition(0)}}))
        .await;
    until_complete(&cluster, 3).await;
    assert_eq!(revisions().await, all([false, false, false]));

    // As `kubectl rollout undo` does it.
    let history = cluster.list::<ControllerRevision>().await;
    let numbers: Vec<i64> = history.iter().map(|one| one.revision).collect();
    assert_eq!(numbers.iter().sum::<i64>(), 3, "{numbers:?}");
    let one = history.iter().find(|one| one.revision == 1).unwrap();
    assert_eq!(one.metadata.name.as_deref(), Some(first.as_str()));
    let patch = Patch::Strategic(one.data.as_ref().unwrap().0.clone());
    cluster
        .api::<StatefulSet>()
        .patch("web", &PatchParams::default(), &patch)
        .await
        .unwrap();
    until_complete(&cluster, 3).await;
    assert_eq!(revisions().await, all([true, true, true]));
    assert_eq!(image_of("web-1").await, "i:1");
    let history = cluster.list::<ControllerRevision>().await;
    let again = history
        .iter()
        .find(|one| one.metadata.name.as_deref() == Some(first.as_str()))
        .unwrap();
    assert_eq!((history.len(), again.revision), (2, 3));

    cluster
        .patch::<StatefulSet>("web", json!({"spec": {"revisionHistoryLimit": 0}}))
        .await;
    cluster
        .until("a short history", async || {
            let left = cluster.list::<ControllerRevision>().await.len();
            check(left == 1, left)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_updated_before_it_is_deleted() {
    let cluster = Cluster::start().await;
    cluster
        .create::<StatefulSet>(set(
            json!({"replicas": 2, "updateStrategy": {"type": "OnDelete"}}),
        ))
        .await;
    cluster
        .until("ready", async || {
            let status = status(&cluster).await;
            check(status.ready_replicas == Some(2), status)
        })
        .await;
    let template = json!({"spec": {"template": {"metadata": {"annotations": {"v": "2"}}}}});
    cluster.patch::<StatefulSet>("web", template).await;
    cluster
        .until("seen", async || {
            let status = status(&cluster).await;
            let waits = status.updated_replicas.is_none() && status.update_revision.is_some();
            check(waits && status.current_replicas == Some(2), status)
        })
        .await;
    cluster
        .api::<Pod>()
        .delete("web-0", &DeleteParams::default())
        .await
        .unwrap();
    cluster
        .until("one updated", async || {
            let status = status(&cluster).await;
            check(
                status.updated_replicas == Some(1) && status.ready_replicas == Some(2),
                status,
            )
        })
        .await;
    let pod = cluster.api::<Pod>().get("web-0").await.unwrap();
    assert_eq!(pod.metadata.annotations.unwrap()["v"], "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_go_when_the_policy_says_so() {
    let cluster = Cluster::start().await;
    let claim = json!([{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}}}]);
    let policy = |deleted: &str, scaled: &str| json!({"whenDeleted": deleted, "whenScaled": scaled});
    let more = json!({"replicas": 2, "volumeClaimTemplates": claim,
        "persistentVolumeClaimRetentionPolicy": policy("Retain", "Delete")});
    cluster.create::<StatefulSet>(set(more)).await;
    until_complete(&cluster, 2).await;
    let claims = async || {
        let claims = cluster.list::<PersistentVolumeClaim>().await;
        claims
            .into_iter()
            .map(|claim| claim.metadata.name.unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(claims().await, ["data-web-0", "data-web-1"]);
    let claim = cluster
        .api::<PersistentVolumeClaim>()
        .get("data-web-0")
        .await
        .unwrap();
    assert_eq!(claim.metadata.labels.unwrap()["app"], "web");
    assert_eq!(claim.metadata.owner_references, None);
    let pod = cluster.api::<Pod>().get("web-0").await.unwrap();
    let volumes = pod.spec.unwrap().volumes.unwrap();
    let source = volumes.iter().find(|volume| volume.name == "data").unwrap();
    assert_eq!(
        source.persistent_volume_claim.as_ref().unwrap().claim_name,
        "data-web-0"
    );
    cluster
        .until_event(
            "SuccessfulCreate",
            "Create Claim data-web-0 Pod web-0 in StatefulSet web success",
        )
        .await;

    // A pod that is scaled away takes its claim with it; when it comes back it has a new one.
    let before = cluster
        .api::<PersistentVolumeClaim>()
        .get("data-web-1")
        .await
        .unwrap();
    cluster
        .patch::<StatefulSet>("web", json!({"spec": {"replicas": 1}}))
        .await;
    cluster
        .until("claim gone", async || {
            check(claims().await == ["data-web-0"], claims().await)
        })
        .await;
    cluster
        .patch::<StatefulSet>("web", json!({"spec": {"replicas": 2}}))
        .await;
    until_complete(&cluster, 2).await;
    let after = cluster
        .api::<PersistentVolumeClaim>()
        .get("data-web-1")
        .await
        .unwrap();
    assert_ne!(before.metadata.uid, after.metadata.uid);

    // With the set, too, once the policy says so.
    let change = json!({"spec": {"persistentVolumeClaimRetentionPolicy": policy("Delete", "Retain")}});
    cluster.patch::<StatefulSet>("web", change).await;
    cluster
        .until("owners", async || {
            let claims = cluster.list::<PersistentVolumeClaim>().await;
            let owners: Vec<_> = claims
                .iter()
                .map(|claim| {
                    claim
                        .metadata
                        .owner_references
                        .as_ref()
                        .map(|all| all[0].kind.clone())
                })
                .collect();
            check(
                owners.iter().all(|owner| owner.as_deref() == Some("StatefulSet")),
                owners,
            )
        })
        .await;
    cluster
        .api::<StatefulSet>()
        .delete("web", &DeleteParams::background())
        .await
        .unwrap();
    cluster
        .until("all gone", async || {
            let left = (claims().await, pods(&cluster).await);
            check(left.0.is_empty() && left.1.is_empty(), left)
        })
        .await;
}

/// Others' pods are left alone, orphans of the right name are adopted, and a name that is taken is waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_pods_are_not_touched() {
    let cluster = Cluster::start().await;
    let pod = |name: &str, labels: Value| {
        json!({"metadata": {"name": name, "labels": labels},
            "spec": {"containers": [{"name": "c", "image": "i"}]}})
    };
    let matching = || json!({"app": "web"});
    cluster.create::<Pod>(pod("web-0", json!({"app": "else"}))).await;
    cluster.create::<Pod>(pod("web-1", matching())).await;
    cluster.create::<Pod>(pod("stray", matching())).await;
    cluster.create::<StatefulSet>(set(json!({"replicas": 2}))).await;
    cluster
        .until_idle("adopted", async || {
            let pod = cluster.api::<Pod>().get("web-1").await.unwrap();
            check(pod.metadata.owner_references.is_some(), pod)
        })
        .await;
    let owners = async |name: &str| {
        cluster
            .api::<Pod>()
            .get(name)
            .await
            .unwrap()
            .metadata
            .owner_references
    };
    assert_eq!((owners("web-0").await, owners("stray").await), (None, None));
    // The name becomes free.
    cluster
        .api::<Pod>()
        .delete("web-0", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    cluster
        .until("complete", async || {
            let status = status(&cluster).await;
            check(status.ready_replicas == Some(2), status)
        })
        .await;
    assert!(owners("web-0").await.is_some());
    assert_eq!(owners("stray").await, None);
}

/// A quota that is full ends in one kind of event, and in attempts that become rare.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_quota_is_told_and_does_not_make_a_hot_loop() {
    let cluster = Cluster::start().await;
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}});
    cluster.create::<ResourceQuota>(quota).await;
    cluster
        .until_idle("quota", async || {
            let quota = cluster.api::<ResourceQuota>().get("q").await.unwrap();
            check(quota.status.is_some_and(|status| status.used.is_some()), ())
        })
        .await;
    cluster
        .create::<StatefulSet>(set(json!({"replicas": 4, "podManagementPolicy": "Parallel"})))
        .await;
    cluster
        .until_event(
            "FailedCreate",
            "failed error: pods \"web-1\" is forbidden: exceeded quota: q",
        )
        .await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let events = cluster.list::<Event>().await;
    let failures = events
        .iter()
        .filter(|event| event.reason.as_deref() == Some("FailedCreate"));
    let attempts: i32 = failures.map(|event| event.count.unwrap_or(1)).sum();
    // 5 ms doubled: in two seconds about nine, of at most two pods each.
    assert!((1..=40).contains(&attempts), "{attempts} attempts");
    // Nothing happens any more that would wake the set: only its retries find the room.
    cluster
        .until("one ready", async || {
            let status = status(&cluster).await;
            check(status.ready_replicas == Some(1), status)
        })
        .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    cluster
        .api::<ResourceQuota>()
        .delete("q", &DeleteParams::default())
        .await
        .unwrap();
    until_pods(&cluster, &["web-0", "web-1", "web-2", "web-3"]).await;
    until_complete(&cluster, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_identity_that_was_removed_comes_back() {
    let cluster = Cluster::start().await;
    cluster.create::<StatefulSet>(set(json!({"replicas": 1}))).await;
    until_complete(&cluster, 1).await;
    let label = json!({"metadata": {"labels": {"statefulset.kubernetes.io/pod-name": null}}});
    let before = cluster.patch::<Pod>("web-0", label).await;
    cluster
        .until_idle("label", async || {
            let pod = cluster.api::<Pod>().get("web-0").await.unwrap();
            let labels = pod.metadata.labels.clone().unwrap();
            let same = pod.metadata.uid == before.metadata.uid;
            check(
                same && labels.contains_key("statefulset.kubernetes.io/pod-name"),
                pod,
            )
        })
        .await;
    cluster
        .until_event(
            "SuccessfulUpdate",
            "Update Pod web-0 in StatefulSet web successful",
        )
        .await;
}
