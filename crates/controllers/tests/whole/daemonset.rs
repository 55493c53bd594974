//! DaemonSets over the real server.

use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, DaemonSetStatus};
use k8s_openapi::api::core::v1::{Node, Pod, ResourceQuota};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cluster::{Cluster, check};

fn set(more: Value, pod: Value) -> Value {
    let mut spec = json!({"containers": [{"name": "c", "image": "i:1"}]});
    spec.as_object_mut()
        .unwrap()
        .extend(pod.as_object().unwrap().clone());
    let mut set = json!({"metadata": {"name": "agent"}, "spec": {
        "selector": {"matchLabels": {"app": "agent"}},
        "template": {"metadata": {"labels": {"app": "agent"}}, "spec": spec}}});
    set["spec"]
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    set
}

fn node_of(pod: &Pod) -> String {
    pod.spec.as_ref().unwrap().node_name.clone().unwrap_or_default()
}

fn image_of(pod: &Pod) -> String {
    pod.spec.as_ref().unwrap().containers[0].image.clone().unwrap()
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let mut conditions = conditions.filter(|condition| condition.type_ == "Ready");
    pod.metadata.deletion_timestamp.is_none() && conditions.any(|condition| condition.status == "True")
}

/// The nodes of the pods that are ready.
async fn nodes(cluster: &Cluster) -> Vec<String> {
    let mut nodes: Vec<String> = cluster
        .list::<Pod>()
        .await
        .iter()
        .filter(|pod| is_ready(pod))
        .map(node_of)
        .collect();
    nodes.sort();
    nodes
}

async fn status(cluster: &Cluster) -> DaemonSetStatus {
    let set = cluster.api::<DaemonSet>().get("agent").await.unwrap();
    let status = set.status.unwrap_or_default();
    if status.observed_generation == set.metadata.generation {
        status
    } else {
        DaemonSetStatus::default()
    }
}

async fn until_on(cluster: &Cluster, expected: &[&str]) {
    cluster
        .until("on the right nodes", async || {
            let seen = nodes(cluster).await;
            let pods = cluster.list::<Pod>().await.len();
            check(seen == expected && pods == expected.len(), seen)
        })
        .await;
}

/// Every node has a ready pod with the newest template, and nothing else is there.
async fn until_complete(cluster: &Cluster, count: i32) {
    cluster
        .until("complete", async || {
            let status = status(cluster).await;
            let pods = cluster.list::<Pod>().await.len();
            let updated = status.updated_number_scheduled.unwrap_or(0);
            let available = status.number_available.unwrap_or(0);
            let counts = (status.desired_number_scheduled, updated, available);
            check(
                counts == (count, count, count) && pods == count as usize,
                (status, pods),
            )
        })
        .await;
}

async fn patch_node(cluster: &Cluster, name: &str, patch: Value) {
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let patch = Patch::Merge(patch);
    nodes.patch(name, &PatchParams::default(), &patch).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_follow_nodes_taints_and_labels() {
    let cluster = Cluster::start().await;
    cluster.create::<DaemonSet>(set(json!({}), json!({}))).await;
    until_complete(&cluster, 1).await;
    cluster.add_node("b").await;
    until_complete(&cluster, 2).await;
    let pods = cluster.list::<Pod>().await;
    let on_b = pods.iter().find(|pod| node_of(pod) == "b").unwrap();
    let tolerations = on_b.spec.as_ref().unwrap().tolerations.clone().unwrap();
    let tolerated = |key: &str| tolerations.iter().any(|one| one.key.as_deref() == Some(key));
    assert!(tolerated("node.kubernetes.io/unreachable") && tolerated("node.kubernetes.io/disk-pressure"));
    cluster
        .until_event("SuccessfulCreate", "Created pod: agent-")
        .await;

    // A taint keeps pods from being started; only NoExecute removes those that are there.
    let taint = |effect: &str| json!({"spec": {"taints": [{"key": "x", "effect": effect}]}});
    patch_node(&cluster, "b", taint("NoSchedule")).await;
    cluster
        .patch::<DaemonSet>("agent", json!({"metadata": {"annotations": {"look": "again"}}}))
        .await;
    cluster
        .until("misscheduled", async || {
            let status = status(&cluster).await;
            check(
                status.desired_number_scheduled == 1 && status.number_misscheduled == 1,
                status,
            )
        })
        .await;
    assert_eq!(nodes(&cluster).await, ["b", "n"]);
    patch_node(&cluster, "b", taint("NoExecute")).await;
    until_on(&cluster, &["n"]).await;
    patch_node(&cluster, "b", json!({"spec": {"taints": null}})).await;
    until_on(&cluster, &["b", "n"]).await;

    let selector = json!({"spec": {"template": {"spec": {"nodeSelector": {"disk": "ssd"}}}}});
    cluster.patch::<DaemonSet>("agent", selector).await;
    until_on(&cluster, &[]).await;
    patch_node(&cluster, "n", json!({"metadata": {"labels": {"disk": "ssd"}}})).await;
    until_on(&cluster, &["n"]).await;
    patch_node(&cluster, "n", json!({"metadata": {"labels": {"disk": "hdd"}}})).await;
    until_on(&cluster, &[]).await;

    // A node that goes is no longer wanted.
    patch_node(&cluster, "b", json!({"metadata": {"labels": {"disk": "ssd"}}})).await;
    until_complete(&cluster, 1).await;
    let all: Api<Node> = Api::all(cluster.client.clone());
    all.delete("b", &DeleteParams::default()).await.unwrap();
    cluster
        .until("none wanted", async || {
            let status = status(&cluster).await;
            check(status.desired_number_scheduled == 0, status)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_rolls_within_its_bounds_and_back() {
    let cluster = Cluster::start().await;
    cluster.add_node("b").await;
    cluster.add_node("c").await;
    cluster.create::<DaemonSet>(set(json!({}), json!({}))).await;
    until_complete(&cluster, 3).await;

    let image = |image: &str| json!({"spec": {"template": {"spec": {"containers": [{"name": "c", "image": image}]}}}});
    cluster.patch::<DaemonSet>("agent", image("i:2")).await;
    cluster
        .until("updated", async || {
            let pods = cluster.list::<Pod>().await;
            // One may be missing, another one at most being made.
            let ready = pods.iter().filter(|pod| is_ready(pod)).count();
            assert!(ready >= 2, "{ready} ready");
            let all_new = pods.iter().all(|pod| image_of(pod) == "i:2");
            check(
                all_new && ready == 3,
                pods.iter().map(image_of).collect::<Vec<_>>(),
            )
        })
        .await;
    until_complete(&cluster, 3).await;

    // As `kubectl rollout undo` does it.
    let history = cluster.list::<ControllerRevision>().await;
    assert_eq!(history.len(), 2);
    let one = history.iter().find(|one| one.revision == 1).unwrap();
    let patch = Patch::Strategic(one.data.as_ref().unwrap().0.clone());
    cluster
        .api::<DaemonSet>()
        .patch("agent", &PatchParams::default(), &patch)
        .await
        .unwrap();
    until_complete(&cluster, 3).await;
    let pods = cluster.list::<Pod>().await;
    assert!(pods.iter().all(|pod| image_of(pod) == "i:1"));
    let history = cluster.list::<ControllerRevision>().await;
    let again = history
        .iter()
        .find(|again| again.metadata.name == one.metadata.name)
        .unwrap();
    assert_eq!((history.len(), again.revision), (2, 3));
    let hash = &again.metadata.labels.as_ref().unwrap()["controller-revision-hash"];
    assert_eq!(
        again.metadata.name.as_deref(),
        Some(format!("agent-{hash}").as_str())
    );
    for pod in &pods {
        assert_eq!(
            &pod.metadata.labels.as_ref().unwrap()["controller-revision-hash"],
            hash
        );
    }
    cluster
        .patch::<DaemonSet>("agent", json!({"spec": {"revisionHistoryLimit": 0}}))
        .await;
    cluster
        .until("a short history", async || {
            let left = cluster.list::<ControllerRevision>().await.len();
            check(left == 1, left)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_surge_loses_no_pod() {
    let cluster = Cluster::start().await;
    cluster.add_node("b").await;
    let strategy = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}});
    cluster
        .create::<DaemonSet>(set(
            json!({"updateStrategy": strategy, "minReadySeconds": 1}),
            json!({}),
        ))
        .await;
    until_complete(&cluster, 2).await;
    let annotation = json!({"spec": {"template": {"metadata": {"annotations": {"v": "2"}}}}});
    cluster.patch::<DaemonSet>("agent", annotation).await;
    let is_new = |pod: &Pod| {
        pod.metadata
            .annotations
            .as_ref()
            .is_some_and(|all| all.contains_key("v"))
    };
    let most = std::sync::atomic::AtomicUsize::new(0);
    cluster
        .until("updated", async || {
            let pods = cluster.list::<Pod>().await;
            let ready = pods.iter().filter(|pod| is_ready(pod)).count();
            assert!(ready >= 2, "{ready} ready");
            let staying = pods
                .iter()
                .filter(|pod| pod.metadata.deletion_timestamp.is_none())
                .count();
            most.fetch_max(staying, std::sync::atomic::Ordering::Relaxed);
            check(pods.len() == 2 && pods.iter().all(is_new), pods.len())
        })
        .await;
    assert_eq!(most.into_inner(), 3, "one node at a time has two");
    until_complete(&cluster, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_delete_waits_and_failed_pods_are_replaced_with_back_off() {
    let cluster = Cluster::start().await;
    cluster
        .create::<DaemonSet>(set(json!({"updateStrategy": {"type": "OnDelete"}}), json!({})))
        .await;
    until_complete(&cluster, 1).await;
    let annotation = json!({"spec": {"template": {"metadata": {"annotations": {"v": "2"}}}}});
    cluster.patch::<DaemonSet>("agent", annotation).await;
    cluster
        .until("seen", async || {
            let status = status(&cluster).await;
            let waits = status.updated_number_scheduled.is_none() && status.number_available == Some(1);
            check(waits && status.observed_generation == Some(2), status)
        })
        .await;
    let fail = async || {
        let pods = cluster.list::<Pod>().await;
        let name = pods[0].metadata.name.clone().unwrap();
        cluster.set_pod_status(&name, json!({"phase": "Failed"})).await;
        let replaced = async || {
            let pods = cluster.list::<Pod>().await;
            let other = pods.iter().all(|pod| pod.metadata.name.as_ref() != Some(&name));
            check(
                other && pods.iter().filter(|pod| is_ready(pod)).count() == 1,
                pods,
            )
        };
        cluster.until("replaced", replaced).await;
        name
    };
    let name = fail().await;
    cluster
        .until_event(
            "FailedDaemonPod",
            &format!("Found failed daemon pod default/{name} on node n, will try to kill it"),
        )
        .await;
    until_complete(&cluster, 1).await;
    let start = Instant::now();
    fail().await;
    fail().await;
    // A second after the first one, and two after the next.
    assert!(
        start.elapsed() >= Duration::from_millis(1900),
        "{:?}",
        start.elapsed()
    );
}

/// A quota that is full, and pods of others that the selector takes in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_surroundings() {
    let cluster = Cluster::start().await;
    for node in ["b", "c", "d"] {
        cluster.add_node(node).await;
    }
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}});
    cluster.create::<ResourceQuota>(quota).await;
    cluster
        .until_idle("quota", async || {
            let quota = cluster.api::<ResourceQuota>().get("q").await.unwrap();
            check(quota.status.is_some_and(|status| status.used.is_some()), ())
        })
        .await;
    let stray = json!({"metadata": {"name": "stray", "labels": {"app": "agent"}},
        "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}]}});
    cluster.create::<Pod>(stray).await;
    cluster.create::<DaemonSet>(set(json!({}), json!({}))).await;
    cluster
        .until_event("FailedCreate", "Error creating: pods \"agent-")
        .await;
    // It matches and nobody controls it: it is the node's daemon now, of an unknown template.
    cluster
        .until("the stray is adopted", async || {
            let stray = cluster.api::<Pod>().get("stray").await.unwrap();
            let owners = stray.metadata.owner_references.unwrap_or_default();
            check(owners.iter().any(|owner| owner.kind == "DaemonSet"), ())
        })
        .await;
    // Nothing happens any more that would wake the set: only its retries find the room.
    cluster
        .until("one ready", async || {
            let status = status(&cluster).await;
            check(
                status.number_ready == 1 && status.desired_number_scheduled == 4,
                status,
            )
        })
        .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    cluster
        .api::<ResourceQuota>()
        .delete("q", &DeleteParams::default())
        .await
        .unwrap();
    cluster
        .until_idle("created", async || {
            let pods = cluster.list::<Pod>().await.len();
            check(pods == 4, pods)
        })
        .await;
    until_complete(&cluster, 4).await;
    assert!(cluster.api::<Pod>().get_opt("stray").await.unwrap().is_none());
}

/// What upstream's conformance test of ControllerRevisions does with a DaemonSet's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revisions_that_others_change() {
    let cluster = Cluster::start().await;
    cluster.create::<DaemonSet>(set(json!({}), json!({}))).await;
    until_complete(&cluster, 1).await;
    let pod = cluster.list::<Pod>().await.remove(0);
    let first = cluster.list::<ControllerRevision>().await.remove(0);
    let first_name = first.metadata.name.clone().unwrap();

    // A second one of the same template stays until one of them is deleted.
    let mut second = json!({"metadata": {"name": "agent-second", "labels": first.metadata.labels,
        "ownerReferences": first.metadata.owner_references}, "data": first.data, "revision": 2});
    second["metadata"]["labels"]["controller-revision-hash"] = json!("second");
    cluster.create::<ControllerRevision>(second).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(cluster.list::<ControllerRevision>().await.len(), 2);
    let revisions = cluster.api::<ControllerRevision>();
    revisions
        .delete(&first_name, &DeleteParams::default())
        .await
        .unwrap();
    until_complete(&cluster, 1).await;
    let left = cluster.list::<ControllerRevision>().await;
    assert_eq!((left.len(), left[0].revision), (1, 2));
    assert_eq!(
        cluster.list::<Pod>().await[0].metadata.uid,
        pod.metadata.uid,
        "not restarted"
    );

    // The next template gets the next number, and a deleted history does not come back.
    let grace = json!({"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}});
    cluster.patch::<DaemonSet>("agent", grace).await;
    cluster
        .until("two revisions", async || {
            let left = cluster.list::<ControllerRevision>().await.len();
            check(left == 2, left)
        })
        .await;
    until_complete(&cluster, 1).await;
    revisions
        .delete("agent-second", &DeleteParams::default())
        .await
        .unwrap();
    until_complete(&cluster, 1).await;
    let left = cluster.list::<ControllerRevision>().await;
    assert_eq!((left.len(), left[0].revision), (1, 3));

    // Two of one template are made one when the set is looked at again; its pod moves over and is not restarted.
    let present = &left[0];
    let pod = cluster.list::<Pod>().await.remove(0);
    let mut double = json!({"metadata": {"name": "agent-double", "labels": present.metadata.labels,
        "ownerReferences": present.metadata.owner_references}, "data": present.data, "revision": 4});
    double["metadata"]["labels"]["controller-revision-hash"] = json!("double");
    cluster.create::<ControllerRevision>(double).await;
    cluster
        .patch::<DaemonSet>("agent", json!({"metadata": {"annotations": {"look": "again"}}}))
        .await;
    cluster
        .until_idle("one revision", async || {
            let left = cluster.list::<ControllerRevision>().await;
            let names: Vec<_> = left.into_iter().map(|one| one.metadata.name.unwrap()).collect();
            let moved = cluster.list::<Pod>().await.remove(0);
            let hash = moved.metadata.labels.as_ref().unwrap()["controller-revision-hash"].clone();
            let same = moved.metadata.uid == pod.metadata.uid;
            check(
                names == ["agent-double"] && hash == "double" && same,
                (names, hash, same),
            )
        })
        .await;
}
