//! The restart rule `RestartAllContainers`, in a sandbox that stays.

use super::{World, condition, is_ready};
use serde_json::{Value, json};

fn restarts(pod: &Value) -> Vec<(String, i64)> {
    let lists = ["initContainerStatuses", "containerStatuses"];
    let statuses = lists
        .iter()
        .flat_map(|list| pod["status"][list].as_array().unwrap());
    statuses
        .map(|one| {
            (
                one["name"].as_str().unwrap().to_owned(),
                one["restartCount"].as_i64().unwrap(),
            )
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_container_restarts_all() {
    let world = World::new().await;
    let life = world.start();
    let rules = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let spec = json!({"restartPolicy": "Never", "initContainers": [{"name": "init", "image": "exit-0:1"}],
        "containers": [{"name": "main", "image": "app:1"},
            {"name": "watch", "image": "app:1", "restartPolicy": "Never", "restartPolicyRules": rules}]});
    world.create("pod", spec).await;
    let before = world.until("pod", "ready", is_ready).await;
    assert_eq!(condition(&before, "AllContainersRestarting"), "False");
    let first = world.runtime.running();
    let id = |name: &str| first.iter().find(|(one, _)| one == name).unwrap().1.clone();
    world.runtime.exit(&id("watch"), 42);
    let is_restarted = |pod: &Value| {
        is_ready(pod)
            && restarts(pod).iter().all(|(_, count)| *count == 1)
            && condition(pod, "AllContainersRestarting") == "False"
    };
    let after = world.until("pod", "restarted", is_restarted).await;
    assert_eq!(restarts(&after).len(), 3);
    assert_eq!(condition(&after, "Initialized"), "True");
    assert_eq!(after["status"]["podIP"], before["status"]["podIP"]);
    let main = &after["status"]["containerStatuses"][0];
    assert_eq!(
        main["lastState"]["terminated"]["reason"],
        "RestartingAllContainers"
    );
    assert_eq!(main["lastState"]["terminated"]["exitCode"], 137);
    {
        let inner = world.runtime.inner.lock();
        assert_eq!(inner.sandboxes.len(), 1, "the sandbox stays");
        assert_eq!(inner.containers.len(), 3, "the first containers are removed");
        assert!(first.iter().all(|(_, id)| !inner.containers.contains_key(id)));
    }
    // Another exit code ends the container for good, and the pod with the other.
    for (_, id) in world.runtime.running() {
        world.runtime.exit(&id, 1);
    }
    world
        .until("pod", "failed", |pod| pod["status"]["phase"] == "Failed")
        .await;
    life.end().await;
}
