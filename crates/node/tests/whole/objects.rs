//! ConfigMaps in the volumes of running pods are watched: a change, a deletion and a return are seen without the minute's resync.

use std::path::Path;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

use super::{PATIENCE, World, is_ready};

async fn until_file(path: &Path, expected: Option<&str>) {
    let seen = tokio::time::timeout(PATIENCE, async {
        while std::fs::read_to_string(path).ok().as_deref() != expected {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    });
    assert!(seen.await.is_ok(), "{} never held {expected:?}", path.display());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_pod_sees_changes() {
    let world = World::new().await;
    let life = world.start();
    let maps: Api<ConfigMap> = Api::namespaced(world.client.clone(), "default");
    let make = async |name: &str, value: &str| {
        let map = json!({"metadata": {"name": name}, "data": {"key": value}});
        let map = serde_json::from_value(map).unwrap();
        maps.create(&PostParams::default(), &map).await.unwrap();
    };
    make("settings", "one").await;
    let spec = json!({"terminationGracePeriodSeconds": 0,
        "containers": [{"name": "app", "image": "app:1", "volumeMounts": [{"name": "a", "mountPath": "/a"}, {"name": "b", "mountPath": "/b"}]}],
        "volumes": [{"name": "a", "configMap": {"name": "settings"}}, {"name": "b", "configMap": {"name": "later", "optional": true}}]});
    world.create("app", spec).await;
    let pod = world.until("app", "ready", is_ready).await;
    let uid = pod["metadata"]["uid"].as_str().unwrap();
    let volumes = world
        .dir
        .path()
        .join(format!("node/pods/{uid}/volumes/kubernetes.io~configmap"));
    until_file(&volumes.join("a/key"), Some("one")).await;
    let change = |value: &str| Patch::Merge(json!({"data": {"key": value}}));
    for value in ["two", "three"] {
        maps.patch("settings", &PatchParams::default(), &change(value))
            .await
            .unwrap();
        until_file(&volumes.join("a/key"), Some(value)).await;
    }
    // One that comes later, and goes again.
    until_file(&volumes.join("b/key"), None).await;
    make("later", "here").await;
    until_file(&volumes.join("b/key"), Some("here")).await;
    maps.delete("later", &DeleteParams::default()).await.unwrap();
    until_file(&volumes.join("b/key"), None).await;
    // A node that was restarted watches again.
    life.end().await;
    let life = world.start();
    maps.patch("settings", &PatchParams::default(), &change("four"))
        .await
        .unwrap();
    until_file(&volumes.join("a/key"), Some("four")).await;
    maps.patch("settings", &PatchParams::default(), &change("five"))
        .await
        .unwrap();
    until_file(&volumes.join("a/key"), Some("five")).await;
    life.end().await;
}
