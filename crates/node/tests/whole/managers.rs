//! The static policy of the CPU manager: which CPUs the runtime is told, when the shared pool changes, over a restart.

use std::collections::BTreeSet;

use super::ends::eventually;
use super::{World, condition, is_ready};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use skiff_node::{ManagerFlags, NodeConfig};

/// The CPUs of a list in the kernel's notation.
fn cpus(list: &str) -> BTreeSet<u32> {
    let ranges = list.trim().split(',').filter(|range| !range.is_empty());
    ranges
        .flat_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            first.parse::<u32>().unwrap()..=last.parse().unwrap()
        })
        .collect()
}

/// The CPUs and the quota that the runtime was last told of a pod's container.
fn told(world: &World, pod: &str) -> (BTreeSet<u32>, i64) {
    let inner = world.runtime.inner.lock();
    let of_pod = |sandbox: &str| inner.sandboxes[sandbox].0.metadata.clone().unwrap().name == pod;
    let found = inner.containers.values().find(|(sandbox, ..)| of_pod(sandbox));
    let resources = found.and_then(|(_, _, status)| status.resources.clone()?.linux);
    let resources = resources.unwrap_or_default();
    (cpus(&resources.cpuset_cpus), resources.cpu_quota)
}

fn spec(resources: Value) -> Value {
    json!({"terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "app:1", "resources": resources}]})
}

fn guaranteed(cpu: &str) -> Value {
    let amounts = json!({"cpu": cpu, "memory": "1Mi"});
    json!({"requests": amounts, "limits": amounts})
}

fn pinned(config: &mut NodeConfig) {
    let flags = ManagerFlags {
        cpu_policy: Some("static".to_owned()),
        reserved_cpus: Some("0".to_owned()),
        topology_policy: Some("single-numa-node".to_owned()),
        ..ManagerFlags::default()
    };
    flags.apply(&mut config.managers).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exclusive_cpus_and_the_shared_pool() {
    let all = cpus(&std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap());
    if all.len() < 2 || !all.contains(&0) {
        println!("skipped: there is one CPU, which is the system's");
        return;
    }
    let world = World::new().await;
    let life = world.start_with(pinned);
    world
        .create("shared", spec(json!({"requests": {"memory": "1Mi"}})))
        .await;
    world.until("shared", "ready", is_ready).await;
    assert_eq!(told(&world, "shared"), (all.clone(), 0));
    world.create("own", spec(guaranteed("1"))).await;
    world.until("own", "ready", is_ready).await;
    // CPUs of its own, and no quota on them.
    let (own, quota) = told(&world, "own");
    assert_eq!((own.len(), quota), (1, -1));
    assert!(own.is_subset(&all) && !own.contains(&0), "{own:?}");
    let rest = &all - &own;
    eventually("the others leave it", || told(&world, "shared").0 == rest).await;

    // A kubelet that starts again knows, and a resize is refused.
    life.end().await;
    let file = world.dir.path().join("node/cpu_manager_state");
    let state: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let entries = state["entries"].as_object().unwrap();
    assert_eq!(entries.len(), 1, "{state}");
    assert_eq!(cpus(entries.values().next().unwrap()["c"].as_str().unwrap()), own);
    for (_, _, status) in world.runtime.inner.lock().containers.values_mut() {
        status
            .resources
            .as_mut()
            .unwrap()
            .linux
            .as_mut()
            .unwrap()
            .cpuset_cpus = "0".to_owned();
    }
    let life = world.start_with(pinned);
    eventually("both are where they were", || {
        told(&world, "shared").0 == rest && told(&world, "own").0 == own
    })
    .await;
    let patch =
        Patch::Strategic(json!({"spec": {"containers": [{"name": "c", "resources": guaranteed("500m")}]}}));
    let parameters = PatchParams::default();
    let patched: Result<Pod, _> = world
        .pods()
        .patch_subresource("resize", "own", &parameters, &patch)
        .await;
    patched.unwrap();
    let pod = world
        .until("own", "not resized", |pod| {
            condition(pod, "PodResizePending") == "True"
        })
        .await;
    let conditions = pod["status"]["conditions"].as_array().unwrap();
    let pending = conditions
        .iter()
        .find(|one| one["type"] == "PodResizePending")
        .unwrap();
    assert_eq!(pending["reason"], "Infeasible");
    let why = "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\"";
    assert_eq!(pending["message"], why);
    world
        .until_event("ResizeInfeasible", "Pod resize Infeasible")
        .await;

    // Its end gives the CPU back to the others.
    world
        .pods()
        .delete("own", &DeleteParams::default())
        .await
        .unwrap();
    world.until_gone("own").await;
    eventually("the others have it again", || told(&world, "shared").0 == all).await;
    life.end().await;

    // Another policy needs a drain first.
    let refused = world.start().task.await.unwrap().unwrap_err().to_string();
    assert!(
        refused.contains("configured policy \"none\" differs from state checkpoint policy \"static\", please drain this node and delete the CPU manager checkpoint file"),
        "{refused}"
    );
}
