//! In-place resize: allocation, actuation, and what a node that starts again knows of both.

use super::{World, condition, is_ready};
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

fn resources(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}})
}

fn spec(resources: Value) -> Value {
    json!({"terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "app:1", "resources": resources}]})
}

async fn resize(world: &World, pod: &str, resources: Value) {
    let patch = Patch::Strategic(json!({"spec": {"containers": [{"name": "c", "resources": resources}]}}));
    let pods = world.pods();
    pods.patch_subresource("resize", pod, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// The resize of the last version is through, and shown.
fn has(pod: &Value, resources: &Value) -> bool {
    let status = &pod["status"]["containerStatuses"][0];
    pod["status"]["observedGeneration"] == pod["metadata"]["generation"]
        && condition(pod, "PodResizePending") == "none"
        && condition(pod, "PodResizeInProgress") == "none"
        && status["allocatedResources"] == resources["requests"]
        && status["resources"] == *resources
}

fn detail<'a>(pod: &'a Value, type_: &str) -> &'a Value {
    let list = pod["status"]["conditions"].as_array().unwrap();
    list.iter().find(|c| c["type"] == type_).unwrap_or(&Value::Null)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_resized_while_it_runs() {
    let world = World::new().await;
    let life = world.start();
    world.create("web", spec(resources("100m", "64Mi"))).await;
    let pod = world.until("web", "ready", is_ready).await;
    assert!(has(&pod, &resources("100m", "64Mi")), "{:#}", pod["status"]);
    assert_eq!(
        pod["status"]["allocatedResources"],
        json!({"cpu": "100m", "memory": "64Mi"})
    );
    let id = pod["status"]["containerStatuses"][0]["containerID"].clone();

    let wanted = resources("250m", "128Mi");
    resize(&world, "web", wanted.clone()).await;
    let pod = world.until("web", "resized", |pod| has(pod, &wanted)).await;
    assert_eq!(pod["status"]["containerStatuses"][0]["containerID"], id);
    world
        .until_event("ResizeStarted", "Pod resize started: {\"containers\":")
        .await;
    world.until_event("ResizeCompleted", "\"generation\":2}").await;
    let told = {
        let inner = world.runtime.inner.lock();
        let (_, _, status) = inner.containers.values().next().unwrap();
        status.resources.clone().unwrap().linux.unwrap()
    };
    assert_eq!(
        (told.cpu_shares, told.cpu_quota, told.memory_limit_in_bytes),
        (256, 25_000, 128 << 20)
    );
    // Where the kernel counts swap, the runtime is told that there is none, when a container is made and when it grows.
    let counts = std::path::Path::new("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes").exists();
    let v2 = told.unified.get("memory.swap.max").map(String::as_str);
    assert!(matches!(v2, None | Some("0")), "{v2:?}");
    assert_eq!(
        told.memory_swap_limit_in_bytes,
        if counts { 128 << 20 } else { 0 }
    );

    // No limit goes below what is in use.
    world.runtime.inner.lock().memory_used = 100 << 20;
    resize(&world, "web", resources("250m", "32Mi")).await;
    let pod = world
        .until("web", "refused to shrink", |pod| {
            detail(pod, "PodResizeInProgress")["reason"] == "Error"
        })
        .await;
    let told = detail(&pod, "PodResizeInProgress");
    let expected = "cannot decrease memory limits: attempting to set container \"c\" memory limit (33554432) below current usage (104857600)";
    assert_eq!(
        (
            told["message"].as_str().unwrap(),
            told["observedGeneration"].as_i64()
        ),
        (expected, Some(3))
    );
    let status = &pod["status"]["containerStatuses"][0];
    assert_eq!(status["allocatedResources"]["memory"], "32Mi");
    assert_eq!(
        status["resources"]["limits"]["memory"], "128Mi",
        "what is in effect is shown"
    );
    world.until_event("ResizeError", "below current usage").await;
    resize(&world, "web", resources("250m", "256Mi")).await;
    world
        .until("web", "resized again", |pod| {
            has(pod, &resources("250m", "256Mi"))
        })
        .await;
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resize_waits_for_room_and_a_restart_keeps_it() {
    let world = World::new().await;
    let life = world.start();
    let nodes: kube::Api<k8s_openapi::api::core::v1::Node> = kube::Api::all(world.client.clone());
    world.create("small", spec(resources("100m", "64Mi"))).await;
    world.until("small", "ready", is_ready).await;
    let node = serde_json::to_value(nodes.get(super::NODE).await.unwrap()).unwrap();
    let cpus: i64 = node["status"]["allocatable"]["cpu"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    let most = |less: i64| format!("{}m", cpus * 1000 - less);
    world.create("large", spec(resources(&most(200), "64Mi"))).await;
    world.until("large", "ready", is_ready).await;

    let wanted = resources("500m", "64Mi");
    resize(&world, "small", wanted.clone()).await;
    let is_deferred = |pod: &Value| detail(pod, "PodResizePending")["reason"] == "Deferred";
    let pod = world.until("small", "deferred", is_deferred).await;
    let message = detail(&pod, "PodResizePending")["message"].as_str().unwrap();
    let start = "Node didn't have enough resource: cpu, requested: 500, used: ";
    assert!(message.starts_with(start), "{message}");
    assert_eq!(
        pod["status"]["containerStatuses"][0]["allocatedResources"]["cpu"],
        "100m"
    );
    world
        .until_event("ResizeDeferred", "Pod resize OutOfcpu: {")
        .await;

    // The allocation is not what the pod asks for, also to a node that starts again.
    life.end().await;
    let life = world.start();
    // Only a node that counts the promised 100m takes a pod of 50m, and one that counts 500m for `small` does not.
    world.create("tiny", spec(resources("50m", "64Mi"))).await;
    world.until("tiny", "ready", is_ready).await;
    let pod = world.until("small", "still deferred", is_deferred).await;
    assert_eq!(
        pod["status"]["containerStatuses"][0]["allocatedResources"]["cpu"],
        "100m"
    );
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);

    world
        .pods()
        .delete("large", &DeleteParams::default())
        .await
        .unwrap();
    let pod = world.until("small", "resized", |pod| has(pod, &wanted)).await;
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);

    // What is taken back is no resize any more.
    resize(&world, "small", resources(&most(10), "64Mi")).await;
    world.until("small", "deferred again", is_deferred).await;
    resize(&world, "small", wanted.clone()).await;
    world.until("small", "as before", |pod| has(pod, &wanted)).await;
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_restarts_the_container() {
    let world = World::new().await;
    let life = world.start();
    let mut spec = spec(resources("100m", "64Mi"));
    spec["containers"][0]["resizePolicy"] =
        json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    world.create("web", spec).await;
    world.until("web", "ready", is_ready).await;
    let wanted = resources("200m", "64Mi");
    resize(&world, "web", wanted.clone()).await;
    let pod = world.until("web", "resized", |pod| has(pod, &wanted)).await;
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    let wanted = resources("200m", "128Mi");
    resize(&world, "web", wanted.clone()).await;
    let pod = world
        .until("web", "resized", |pod| {
            has(pod, &wanted) && pod["status"]["containerStatuses"][0]["restartCount"] == 1
        })
        .await;
    assert!(is_ready(&pod) || pod["status"]["phase"] == "Running");
    world
        .until_event("Killing", "Container c resize requires restart")
        .await;
    life.end().await;
}
