//! The node is short of disk: what is left of pods that have ended goes before pods do, and the API still knows how
//! they ended.

use super::ends::eventually;
use super::{World, condition, is_ready};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use serde_json::{Value, json};
use skiff_node::{ThresholdFlags, Thresholds};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ended_containers_go_first() {
    let world = World::new().await;
    let life = world.start();
    let once = |image: &str| json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": image}]});
    world.create("done", once("exit-0:1")).await;
    let done = world
        .until("done", "done", |pod| pod["status"]["phase"] == "Succeeded")
        .await;
    let critical =
        json!({"priorityClassName": "system-node-critical", "containers": [{"name": "c", "image": "app:1"}]});
    world.create("stays", critical).await;
    world.until("stays", "ready", is_ready).await;
    let containers = || world.runtime.inner.lock().containers.len();
    assert_eq!(containers(), 2);
    life.end().await;

    // No disk here has so much room, so the node is short of it for good.
    let flags = ThresholdFlags {
        hard: Some("nodefs.available<1000Ti".to_owned()),
        ..Default::default()
    };
    let thresholds = Thresholds::parse(&flags).unwrap();
    let life = world.start_with(|config| config.thresholds = thresholds.clone());
    eventually("the container that has ended is removed", || containers() == 1).await;
    eventually("its sandbox is removed", || {
        world.runtime.inner.lock().sandboxes.len() == 1
    })
    .await;
    world
        .until_event("EvictionThresholdMet", "Attempting to reclaim ephemeral-storage")
        .await;
    let nodes: Api<Node> = Api::all(world.client.clone());
    let node = serde_json::to_value(nodes.get(super::NODE).await.unwrap()).unwrap();
    assert_eq!(condition(&node, "DiskPressure"), "True");
    // What the API says is the same, and what is critical runs on.
    world.create("late", once("app:1")).await;
    let late = world
        .until("late", "refused", |pod| pod["status"]["phase"] == "Failed")
        .await;
    assert_eq!(late["status"]["reason"], "Evicted");
    let kept = world.until("done", "known", |_| true).await;
    assert_eq!(
        kept["status"]["containerStatuses"],
        done["status"]["containerStatuses"]
    );
    assert_eq!(kept["status"]["phase"], "Succeeded");
    let stays: Value = world.until("stays", "ready", is_ready).await;
    assert_eq!(stays["status"]["containerStatuses"][0]["restartCount"], 0);
    life.end().await;
}
