//! What the node tells of disks: the sizes of volumes and logs are near what was written.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use super::{NODE, PATIENCE, World, get, is_ready};

pub(super) async fn until_summary(
    world: &World,
    port: u16,
    who: &skiff_pki::Identity,
    wanted: impl Fn(&Value) -> bool,
) -> Value {
    let mut last = Value::Null;
    let found = tokio::time::timeout(PATIENCE, async {
        loop {
            let (_, page) = get(world, port, Some(who), "/stats/summary").await;
            last = serde_json::from_str(&page).unwrap();
            if wanted(&last) {
                return last.clone();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let found = found.await.ok();
    found.unwrap_or_else(|| panic!("the summary never had it: {last:#}"))
}

fn volume<'a>(pod: &'a Value, name: &str) -> &'a Value {
    let all = pod["volume"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().find(|one| one["name"] == name).unwrap_or(&Value::Null)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disks_of_a_pod() {
    const MIB: u64 = 1 << 20;
    let world = World::new().await;
    let life = world.start_with(|config| config.volume_stats_agg_period = Duration::from_millis(100));
    let map: ConfigMap =
        serde_json::from_value(json!({"metadata": {"name": "settings"}, "data": {"a": "x".repeat(5000)}}))
            .unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(world.client.clone(), "default");
    maps.create(&PostParams::default(), &map).await.unwrap();
    let secret: Secret =
        serde_json::from_value(json!({"metadata": {"name": "hidden"}, "stringData": {"a": "b"}})).unwrap();
    let secrets: Api<Secret> = Api::namespaced(world.client.clone(), "default");
    secrets.create(&PostParams::default(), &secret).await.unwrap();
    let names = ["scratch", "settings", "hidden", "both", "facts", "host"];
    let mounts: Vec<Value> = names
        .iter()
        .map(|name| json!({"name": name, "mountPath": format!("/{name}")}))
        .collect();
    let fields = json!([{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]);
    world
        .create(
            "writer",
            json!({
                "containers": [{"name": "c", "image": "app:1", "volumeMounts": mounts}],
                "volumes": [
                    {"name": "scratch", "emptyDir": {}},
                    {"name": "settings", "configMap": {"name": "settings"}},
                    {"name": "hidden", "secret": {"secretName": "hidden"}},
                    {"name": "both", "projected": {"sources": [{"configMap": {"name": "settings"}}]}},
                    {"name": "facts", "downwardAPI": {"items": fields}},
                    {"name": "host", "hostPath": {"path": "/"}}]}),
        )
        .await;
    let pod = world.until("writer", "ready", is_ready).await;
    let uid = pod["metadata"]["uid"].as_str().unwrap();
    let node = world.dir.path().join("node");
    let scratch = node.join(format!("pods/{uid}/volumes/kubernetes.io~empty-dir/scratch"));
    std::fs::write(scratch.join("five"), vec![7u8; 5 << 20]).unwrap();
    // What a link leads to is not the pod's.
    std::os::unix::fs::symlink("/usr", scratch.join("link")).unwrap();
    let logs = node.join(format!("logs/default_writer_{uid}/c"));
    std::fs::create_dir_all(&logs).unwrap();
    std::fs::write(logs.join("0.log"), vec![b'l'; 2 << 20]).unwrap();

    let port = world.kubelet_port().await;
    let admin = world
        .pki
        .client("admin", "somebody", Some("system:masters"))
        .unwrap();
    let written = |summary: &Value| {
        let used = volume(&summary["pods"][0], "scratch")["usedBytes"].as_u64();
        used.is_some_and(|used| used >= 5 * MIB)
            && summary["pods"][0]["containers"][0]["logs"]["usedBytes"].as_u64() >= Some(2 * MIB)
    };
    let summary = until_summary(&world, port, &admin, written).await;
    let near = |value: &Value, wanted: u64| {
        let value = value.as_u64().unwrap_or_else(|| panic!("{value}: {summary:#}"));
        assert!(
            (wanted..wanted + 128 * 1024).contains(&value),
            "{value} is not near {wanted}: {summary:#}"
        );
    };
    assert_eq!(summary["node"]["nodeName"], NODE);
    let pod = &summary["pods"][0];
    near(&volume(pod, "scratch")["usedBytes"], 5 * MIB);
    assert_eq!(
        volume(pod, "scratch")["inodesUsed"],
        3,
        "the directory, a file and a link"
    );
    near(&volume(pod, "settings")["usedBytes"], 5000);
    near(&volume(pod, "both")["usedBytes"], 5000);
    for name in ["scratch", "settings", "hidden", "both", "facts"] {
        let shown = volume(pod, name);
        for field in [
            "availableBytes",
            "capacityBytes",
            "usedBytes",
            "inodesUsed",
            "inodes",
            "inodesFree",
        ] {
            assert!(shown[field].is_u64(), "{name} {field}: {summary:#}");
        }
        assert!(shown["time"].is_string(), "{shown}");
    }
    assert_eq!(volume(pod, "host"), &Value::Null, "upstream measures none either");
    let container = &pod["containers"][0];
    near(&container["logs"]["usedBytes"], 2 * MIB);
    assert_eq!(container["logs"]["inodesUsed"], 1);
    assert_eq!(container["rootfs"]["usedBytes"], 12_288);
    assert!(
        container["rootfs"]["capacityBytes"].as_u64() > Some(0),
        "{container}"
    );
    near(&pod["ephemeral-storage"]["usedBytes"], 7 * MIB + 12_288);
    let kubelet = summary["node"]["systemContainers"].as_array().unwrap();
    let kubelet = kubelet.iter().find(|one| one["name"] == "kubelet").unwrap();
    assert!(
        kubelet["memory"]["workingSetBytes"].as_u64() > Some(MIB),
        "{kubelet}"
    );
    if std::path::Path::new("/proc/pressure/memory").exists() {
        for what in ["cpu", "memory", "io"] {
            assert!(
                summary["node"][what]["psi"]["some"]["total"].is_u64(),
                "{what}: {summary:#}"
            );
        }
    }
    let (_, page) = get(
        &world,
        port,
        Some(&admin),
        "/stats/summary?only_cpu_and_memory=true",
    )
    .await;
    let small: Value = serde_json::from_str(&page).unwrap();
    assert_eq!(small["pods"][0].get("volume"), None);
    assert_eq!(small["node"].get("io"), None);

    // What is gone is forgotten.
    std::fs::remove_file(scratch.join("five")).unwrap();
    until_summary(&world, port, &admin, |summary| {
        volume(&summary["pods"][0], "scratch")["usedBytes"].as_u64() < Some(MIB)
    })
    .await;
    // Secrets are in memory: the node takes their mounts down before the pod is gone.
    world
        .pods()
        .delete("writer", &DeleteParams::default().grace_period(1))
        .await
        .unwrap();
    world.until_gone("writer").await;
    life.end().await;
}
