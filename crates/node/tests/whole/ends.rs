//! Pods that are deleted, or whose kubelet is killed, while something is being made for them.

use super::{PATIENCE, World, is_ready};
use kube::api::DeleteParams;
use serde_json::json;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("never happened: {what}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_was_never_started_is_no_restart() {
    let world = World::new().await;
    let life = world.start();
    world.runtime.inner.lock().starts_hang = true;
    let spec = json!({"containers": [{"name": "c", "image": "app:1"}]});
    world.create("pod", spec).await;
    eventually("the container is created", || {
        !world.runtime.inner.lock().containers.is_empty()
    })
    .await;
    life.end().await;
    world.runtime.inner.lock().starts_hang = false;
    let life = world.start();
    let pod = world.until("pod", "ready", is_ready).await;
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    assert_eq!(world.runtime.inner.lock().containers.len(), 1);
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_ends_after_what_is_being_made_for_it() {
    let world = World::new().await;
    let life = world.start();
    world.runtime.sandboxes_open.send_replace(false);
    let spec = json!({"containers": [{"name": "c", "image": "app:1"}]});
    world.create("pod", spec).await;
    eventually("a sandbox is asked for", || {
        world.runtime.sandboxes_asked.load(Ordering::SeqCst) > 0
    })
    .await;
    let soon = DeleteParams::default().grace_period(1);
    world.pods().delete("pod", &soon).await.unwrap();
    // Long enough for a kubelet that does not wait.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(
        world.pods().get_opt("pod").await.unwrap().is_some(),
        "the pod is gone, and its sandbox comes"
    );
    world.runtime.sandboxes_open.send_replace(true);
    world.until_gone("pod").await;
    eventually("the sandbox is removed", || {
        world.runtime.inner.lock().sandboxes.is_empty()
    })
    .await;
    assert!(world.runtime.inner.lock().containers.is_empty());
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logs_of_pods_that_are_gone_are_removed() {
    let world = World::new().await;
    let logs = world.dir.path().join("node/logs");
    let left = logs.join("default_gone_4711");
    std::fs::create_dir_all(left.join("c")).unwrap();
    std::fs::write(left.join("c/0.log"), "").unwrap();
    let life = world.start();
    let spec = json!({"containers": [{"name": "c", "image": "app:1"}]});
    world.create("pod", spec).await;
    world.until("pod", "ready", is_ready).await;
    eventually("the logs are removed", || !left.exists()).await;
    assert_eq!(std::fs::read_dir(&logs).unwrap().count(), 1);
    life.end().await;
}
