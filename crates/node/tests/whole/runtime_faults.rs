//! A runtime that hangs, and one that answers what cannot be: the node says so, touches nothing, and goes on when it is well.

use std::time::Duration;

use super::runtime::Nonsense;
use super::{Life, NODE, PATIENCE, World, is_ready};
use k8s_openapi::api::core::v1::{Event, Node};
use kube::Api;
use kube::api::ListParams;
use serde_json::json;
use skiff_node::RuntimePatience;

/// Short enough for a test: the status may be missing for a second, the list for two.
const BRIEF: RuntimePatience = RuntimePatience {
    status: Duration::from_secs(1),
    relist: Duration::from_secs(2),
};

fn start(world: &World) -> Life {
    world.start_with(|config| {
        config.runtime_patience = BRIEF;
        config.runtime_request_timeout = Duration::from_secs(3);
        config.node_status_update_frequency = Duration::from_millis(500);
    })
}

/// A pod that runs, with a probe that the runtime answers.
async fn run_pod(world: &World, name: &str) {
    let probe = json!({"exec": {"command": ["x"]}, "periodSeconds": 1, "failureThreshold": 1});
    let container = json!({"name": "app", "image": "app:1", "livenessProbe": probe});
    world
        .create(
            name,
            json!({"terminationGracePeriodSeconds": 0, "containers": [container]}),
        )
        .await;
    world.until(name, "ready", is_ready).await;
}

/// Waits until the node is ready, or is not for a reason that has all of these words.
async fn until_node(world: &World, ready: bool, words: &[&str]) {
    let nodes: Api<Node> = Api::all(world.client.clone());
    let mut last = String::new();
    let found = tokio::time::timeout(PATIENCE, async {
        loop {
            let node = nodes.get(NODE).await.unwrap();
            let conditions = node
                .status
                .and_then(|status| status.conditions)
                .unwrap_or_default();
            let found = conditions.into_iter().find(|one| one.type_ == "Ready").unwrap();
            last = found.message.unwrap_or_default();
            let is_so = (found.status == "True") == ready;
            if is_so && words.iter().all(|word| last.contains(word)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    found
        .await
        .unwrap_or_else(|_| panic!("the node was never ready: {ready} with {words:?}, but {last:?}"));
}

/// What was made, and what was ended.
fn deeds(world: &World) -> (usize, Vec<String>) {
    let inner = world.runtime.inner.lock();
    (inner.made, inner.ended.clone())
}

/// Waits until the pod's status could not be determined.
async fn until_failed_sync(world: &World, pod: &str) {
    let events: Api<Event> = Api::namespaced(world.client.clone(), "default");
    let found = tokio::time::timeout(PATIENCE, async {
        loop {
            let all = events.list(&ListParams::default()).await.unwrap();
            let is_it = |event: &Event| {
                event.involved_object.name.as_deref() == Some(pod)
                    && event.reason.as_deref() == Some("FailedSync")
                    && event
                        .message
                        .as_ref()
                        .is_some_and(|text| text.starts_with("error determining status: rpc error: "))
            };
            if all.items.iter().any(is_it) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    found
        .await
        .unwrap_or_else(|_| panic!("no event of {pod} says that its status is unknown"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_hangs() {
    let world = World::new().await;
    let life = start(&world);
    run_pod(&world, "web").await;
    let (before, running) = (deeds(&world), world.runtime.running());
    world.runtime.answers.send_replace(false);
    until_node(&world, false, &["container runtime is down"]).await;
    let both = [
        "[container runtime is down, PLEG is not healthy: pleg was last seen active ",
        " ago; threshold is 2s]",
    ];
    until_node(&world, false, &both).await;
    world
        .until_event("NodeNotReady", "Node node-a status is now: NodeNotReady")
        .await;
    // Longer than its calls may take: they fail, and so do probes.
    tokio::time::sleep(Duration::from_secs(6)).await;
    world
        .create("later", json!({"containers": [{"name": "c", "image": "app:1"}]}))
        .await;
    assert_eq!(
        (deeds(&world), world.runtime.running()),
        (before, running.clone())
    );

    world.runtime.answers.send_replace(true);
    until_node(&world, true, &[]).await;
    world
        .until_event("NodeReady", "Node node-a status is now: NodeReady")
        .await;
    world.until("later", "ready", is_ready).await;
    world.until("web", "ready", is_ready).await;
    let after = world.runtime.running();
    assert!(
        running.iter().all(|one| after.contains(one)) && after.len() == 2,
        "{after:?}"
    );
    assert_eq!(deeds(&world).1, Vec::<String>::new());
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_talks_nonsense() {
    let world = World::new().await;
    let life = start(&world);
    for (number, nonsense) in Nonsense::ALL.into_iter().enumerate() {
        let name = format!("web-{number}");
        run_pod(&world, &name).await;
        let (before, running) = (deeds(&world), world.runtime.running());
        world.runtime.inner.lock().nonsense = Some(nonsense);
        world.runtime.poke();
        until_failed_sync(&world, &name).await;
        match nonsense {
            // In a list they look right.
            Nonsense::NoStatus | Nonsense::EmptyLists => {}
            // The pod that is listed instead is nobody's, and such pods are ended every ten seconds.
            Nonsense::WrongUids => tokio::time::sleep(Duration::from_secs(11)).await,
            _ => {
                until_node(
                    &world,
                    false,
                    &["PLEG is not healthy: pleg was last seen active "],
                )
                .await
            }
        }
        assert_eq!(
            (deeds(&world), world.runtime.running()),
            (before, running),
            "{nonsense:?}"
        );
        world.runtime.inner.lock().nonsense = None;
        until_node(&world, true, &[]).await;
    }
    // All of them go on as before, and the node does its work.
    run_pod(&world, "later").await;
    for number in 0..Nonsense::ALL.len() {
        let pod = world.until(&format!("web-{number}"), "ready", is_ready).await;
        assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    }
    assert_eq!(world.runtime.running().len(), Nonsense::ALL.len() + 1);
    assert_eq!(deeds(&world).1, Vec::<String>::new());
    life.end().await;
}
