//! The machine shuts down: a real bus with a stand-in for logind tells the node, which lets its pods end by priority
//! before it gives its lock back.

use super::ends::eventually;
use super::{NODE, World, condition, is_ready};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use serde_json::{Value, json};
use skiff_node::ShutdownPeriod;
use skiff_testkit::Logind;
use std::time::Duration;

const LOCK: &str = "shutdown / kubelet / Kubelet needs time to handle node shutdown / delay";

fn period(priority: i32, seconds: i64) -> ShutdownPeriod {
    ShutdownPeriod {
        priority,
        shutdown_grace_period_seconds: seconds,
    }
}

/// Waits until the node's Ready condition has this status, and returns it. A node that starts is not ready for other
/// reasons first.
async fn until_ready(world: &World, status: &str) -> Value {
    let nodes: Api<Node> = Api::all(world.client.clone());
    let found = tokio::time::timeout(super::PATIENCE, async {
        loop {
            if let Some(node) = nodes.get_opt(NODE).await.unwrap() {
                let node = serde_json::to_value(node).unwrap();
                if condition(&node, "Ready") == status {
                    let list = node["status"]["conditions"].as_array().unwrap();
                    let ready = list.iter().find(|one| one["type"] == "Ready").unwrap();
                    if status == "True" || ready["message"] == "node is shutting down" {
                        return ready.clone();
                    }
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    found.await.unwrap_or_else(|_| panic!("Ready was never {status}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_waits_for_pods() {
    let world = World::new().await;
    let logind = Logind::start(Duration::from_secs(5)).unwrap();
    let start = || {
        world.start_with(|config| {
            config.node_shutdown.periods = vec![period(0, 20), period(1000, 10)];
            config.node_shutdown.system_bus = logind.address();
            config.node_shutdown.logind_conf_dir = logind.conf_dir();
        })
    };
    let life = start();
    eventually("the node has a lock", || logind.locks() == [LOCK]).await;
    let drop_in = std::fs::read_to_string(logind.conf_dir().join("99-kubelet.conf")).unwrap();
    assert!(drop_in.ends_with("InhibitDelayMaxSec=30\n"), "{drop_in}");

    let container = json!([{"name": "c", "image": "app:1"}]);
    for (name, spec) in [
        ("low", json!({"containers": container})),
        (
            "high",
            json!({"containers": container, "priorityClassName": "system-node-critical"}),
        ),
    ] {
        world.create(name, spec).await;
        world.until(name, "ready", is_ready).await;
    }
    world
        .create(
            "done",
            json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "exit-0:1"}]}),
        )
        .await;
    let succeeded = |pod: &Value| pod["status"]["phase"] == "Succeeded";
    world.until("done", "done", succeeded).await;

    // A signal of somebody else is no shutdown.
    logind.pretend().await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(until_ready(&world, "True").await["reason"], "KubeletReady");
    assert_eq!(logind.locks().len(), 1);

    logind.shut_down(true).unwrap();
    let message = "Pod was terminated in response to imminent node shutdown.";
    for name in ["low", "high"] {
        let pod = world
            .until(name, "failed", |pod| pod["status"]["phase"] == "Failed")
            .await;
        assert_eq!(pod["status"]["reason"], "Terminated");
        assert_eq!(pod["status"]["message"], message);
        let conditions = pod["status"]["conditions"].as_array().unwrap();
        let disrupted = conditions
            .iter()
            .find(|one| one["type"] == "DisruptionTarget")
            .unwrap();
        assert_eq!(disrupted["reason"], "TerminationByKubelet");
        assert_eq!(disrupted["message"], message);
        assert_eq!(condition(&pod, "Ready"), "False");
    }
    let not_ready = until_ready(&world, "False").await;
    assert_eq!(not_ready["reason"], "KubeletNotReady");
    eventually("the lock is given back", || logind.locks().is_empty()).await;
    world
        .until_event("NodeShutdown", "Shutdown manager detected shutdown event")
        .await;
    let done = world.until("done", "still there", |_| true).await;
    assert_eq!(done["status"]["phase"], "Succeeded");
    assert_eq!(done["status"]["reason"], Value::Null);
    let ended = |name: &str| {
        let inner = world.runtime.inner.lock();
        let mut all = inner.containers.values();
        let of = all.find(|(_, config, _)| config.labels["io.kubernetes.pod.name"] == name);
        of.unwrap().2.finished_at
    };
    assert!(ended("low") < ended("high"), "the important pod ends last");

    let state = std::fs::read_to_string(world.dir.path().join("node/graceful_node_shutdown_state")).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    assert_ne!(state["endTime"], "0001-01-01T00:00:00Z", "{state}");

    world.create("late", json!({"containers": container})).await;
    let late = world
        .until("late", "refused", |pod| pod["status"]["phase"] == "Failed")
        .await;
    assert_eq!(late["status"]["reason"], "NodeShutdown");
    assert_eq!(
        late["status"]["message"],
        "Pod was rejected: Pod was rejected as the node is shutting down."
    );

    // It was cancelled after all.
    logind.shut_down(false).unwrap();
    until_ready(&world, "True").await;
    eventually("the node has a lock again", || logind.locks().len() == 1).await;
    world.create("next", json!({"containers": container})).await;
    world.until("next", "ready", is_ready).await;

    // The lock goes with the kubelet, and comes with the next one.
    life.end().await;
    eventually("the lock is gone", || logind.locks().is_empty()).await;
    let life = start();
    eventually("the node has a lock", || logind.locks().len() == 1).await;
    let pod = world.until("next", "ready", is_ready).await;
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    life.end().await;
}

/// News that came while nobody listened are not lost: the node asks when it is back on the bus.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_that_was_not_heard_of() {
    let world = World::new().await;
    let logind = Logind::start(Duration::from_secs(60)).unwrap();
    logind.shut_down(true).unwrap();
    let life = world.start_with(|config| {
        config.node_shutdown.periods = vec![period(0, 20)];
        config.node_shutdown.system_bus = logind.address();
        config.node_shutdown.logind_conf_dir = logind.conf_dir();
    });
    until_ready(&world, "False").await;
    assert!(logind.locks().is_empty(), "it is too late to hold it up");
    logind.shut_down(false).unwrap();
    until_ready(&world, "True").await;
    eventually("the node has a lock", || logind.locks() == [LOCK]).await;

    // Somebody sends too much: the connection ends, the lock stays, and the node is back soon.
    let container = json!([{"name": "c", "image": "app:1"}]);
    world.create("pod", json!({"containers": container})).await;
    world.until("pod", "ready", is_ready).await;
    logind.disturb().await.unwrap();
    logind.shut_down(true).unwrap();
    let pod = world
        .until("pod", "failed", |pod| pod["status"]["phase"] == "Failed")
        .await;
    assert_eq!(pod["status"]["reason"], "Terminated");
    eventually("the lock is given back", || logind.locks().is_empty()).await;
    assert!(
        !logind.conf_dir().exists(),
        "logind gave time enough without being told"
    );
    life.end().await;
}

/// Without logind the node works as ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_without_logind() {
    let world = World::new().await;
    let life = world.start_with(|config| {
        config.node_shutdown.periods = vec![period(0, 20)];
        config.node_shutdown.system_bus = "unix:path=/nonexistent/bus".to_owned();
        config.node_shutdown.logind_conf_dir = "/nonexistent".into();
    });
    until_ready(&world, "True").await;
    life.end().await;
}
