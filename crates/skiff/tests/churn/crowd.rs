//! Pods that are made and deleted faster than they can start, and whose processes anybody may kill. What the API
//! acknowledged must be so in the end, and nothing of a pod that is gone may be left.

use crate::scene::{Activity, Scene};
use crate::updates::{KEYS, SETTINGS};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::Api;
use kube::api::{DeleteParams, EvictParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use skiff_client::ErrorExt;
use skiff_testkit::{BUSYBOX, PAUSE, Random};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Pods that each worker leaves until the end of a round; more would not fit on the node.
const MAX_KEPT: usize = 5;
pub(crate) const LABEL: &str = "crowd";

/// What the API acknowledged.
#[derive(Default)]
pub(crate) struct Acknowledged {
    config_maps: Vec<String>,
    /// Pods that were made and that nobody asked to delete.
    kept: Vec<String>,
    /// Pods whose deletion was accepted.
    deleted: Vec<String>,
    pub created: usize,
    pub patched: usize,
    pub evicted: usize,
}

impl Acknowledged {
    pub fn deleted(&self) -> usize {
        self.deleted.len()
    }

    pub fn extend(&mut self, other: Acknowledged) {
        self.config_maps.extend(other.config_maps);
        self.kept.extend(other.kept);
        self.deleted.extend(other.deleted);
        self.created += other.created;
        self.patched += other.patched;
        self.evicted += other.evicted;
    }
}

/// Makes and deletes pods until told to stop. A request that fails may or may not have been done.
pub(crate) async fn work(scene: Arc<Scene>, name: String, mut random: Random) -> Acknowledged {
    let pods = scene.pods();
    let maps: Api<ConfigMap> = Api::default_namespaced(scene.client.clone());
    let mut acknowledged = Acknowledged::default();
    for number in 0.. {
        if scene.is_over() {
            break;
        }
        let name = format!("{name}-{number}");
        let map: ConfigMap =
            serde_json::from_value(json!({"metadata": {"name": name}})).expect("a config map");
        if maps.create(&PostParams::default(), &map).await.is_ok() {
            acknowledged.config_maps.push(name.clone());
        }
        let pod = random_pod(&name, scene.has_user_namespaces, &mut random);
        let uid = match pods.create(&PostParams::default(), &pod).await {
            Ok(pod) => pod.metadata.uid.expect("a pod has a uid"),
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                // It may have been made all the same; then it must be possible to delete it.
                let _ = pods.delete(&name, &DeleteParams::default().grace_period(0)).await;
                continue;
            }
        };
        scene.allow_kills(uid);
        acknowledged.created += 1;
        let pause = match random.below(4) {
            0 | 1 => random.millis(10, 30),
            2 => random.millis(30, 500),
            _ => random.millis(500, 3000),
        };
        tokio::time::sleep(pause).await;
        if random.one_in(3) {
            let image = json!({"spec": {"containers": [{"name": "c", "image": PAUSE}]}});
            let patch = Patch::Strategic(image);
            let patched = pods.patch(&name, &PatchParams::default(), &patch).await;
            acknowledged.patched += usize::from(patched.is_ok());
            tokio::time::sleep(random.millis(10, 40)).await;
        }
        if random.one_in(12) && acknowledged.kept.len() < MAX_KEPT {
            acknowledged.kept.push(name);
            continue;
        }
        let graceful = scene.during(Activity::GracePeriod);
        let is_accepted = if random.one_in(5) {
            let evicted = pods.evict(&name, &EvictParams::default()).await.is_ok();
            acknowledged.evicted += usize::from(evicted);
            evicted
        } else {
            let parameters = match random.below(3) {
                0 => DeleteParams::default(),
                1 => DeleteParams::default().grace_period(0),
                _ => DeleteParams::default().grace_period(1),
            };
            pods.delete(&name, &parameters).await.is_ok()
        };
        drop(graceful);
        match is_accepted {
            true => acknowledged.deleted.push(name),
            false => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    acknowledged
}

fn random_pod(name: &str, has_user_namespaces: bool, random: &mut Random) -> Pod {
    let script = match random.below(4) {
        0 => "sleep 100000",
        1 => "trap 'exit 0' TERM; while true; do echo tick; sleep 0.1; done",
        2 => "sleep 1",
        _ => "sleep 0.05; exit 3",
    };
    let mut volumes = vec![random_volume(name, random)];
    let mut mounts = vec![json!({"name": "v", "mountPath": "/v"})];
    if random.one_in(3) {
        volumes.push(json!({"name": "s", "configMap": {"name": SETTINGS}}));
        mounts.push(json!({"name": "s", "mountPath": "/s"}));
        mounts.push(json!({"name": "s", "mountPath": "/one", "subPath": "a"}));
    }
    if random.one_in(3) {
        volumes.push(json!({"name": "k", "secret": {"secretName": KEYS}}));
        mounts.push(json!({"name": "k", "mountPath": "/k"}));
    }
    if random.one_in(3) {
        mounts.push(json!({"name": "v", "mountPath": "/w", "subPath": "deep/er"}));
    }
    let container = |name: &str, script: &str| json!({"name": name, "image": BUSYBOX, "command": ["sh", "-c", script], "volumeMounts": mounts});
    let probe = |command: &str| json!({"exec": {"command": ["sh", "-c", command]}, "periodSeconds": 1});
    let mut containers = vec![container("c", script)];
    if random.one_in(3) {
        containers.push(container("d", "sleep 100000"));
    }
    if random.one_in(3) {
        containers[0]["readinessProbe"] = probe("test -d /v");
        containers[0]["livenessProbe"] = probe(if random.one_in(2) { "true" } else { "false" });
    }
    let mut before = Vec::new();
    if random.one_in(4) {
        before.push(container("i", "true"));
    }
    if random.one_in(4) {
        let mut sidecar = container("side", "trap 'exit 0' TERM; while true; do sleep 0.1; done");
        sidecar["restartPolicy"] = json!("Always");
        if random.one_in(2) {
            sidecar["startupProbe"] = probe("true");
        }
        before.push(sidecar);
    }
    let spec = json!({
        "shareProcessNamespace": random.one_in(2),
        "hostUsers": !(has_user_namespaces && random.one_in(6)),
        "terminationGracePeriodSeconds": random.below(3),
        "restartPolicy": if random.one_in(4) { "Never" } else { "Always" },
        "volumes": volumes,
        "containers": containers,
        "initContainers": before,
    });
    let labels = json!({LABEL: "yes"});
    serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}, "spec": spec}))
        .expect("a pod")
}

fn random_volume(name: &str, random: &mut Random) -> Value {
    match random.below(5) {
        0 | 1 => json!({"name": "v", "emptyDir": {}}),
        2 | 3 => json!({"name": "v", "emptyDir": {"medium": "Memory"}}),
        _ => {
            let claim = json!({"metadata": {"labels": {"of": name}}, "spec": {
                "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}});
            json!({"name": "v", "ephemeral": {"volumeClaimTemplate": claim}})
        }
    }
}

/// What was acknowledged is so.
pub(crate) async fn nothing_lost(scene: &Scene, acknowledged: &Acknowledged) -> Result<()> {
    let pods = scene.pods();
    let maps: Api<ConfigMap> = Api::default_namespaced(scene.client.clone());
    let maps = maps.list(&ListParams::default()).await?.items;
    let maps: BTreeSet<String> = maps.into_iter().filter_map(|map| map.metadata.name).collect();
    for name in &acknowledged.config_maps {
        ensure!(
            maps.contains(name),
            "config map {name} was acknowledged and is gone"
        );
    }
    for name in &acknowledged.kept {
        let pod = pods.get(name).await.with_context(|| format!("pod {name}"))?;
        ensure!(
            pod.metadata.deletion_timestamp.is_none(),
            "pod {name} is being deleted, which nobody asked for"
        );
    }
    for name in &acknowledged.deleted {
        match pods.get(name).await {
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
            Ok(pod) => ensure!(
                pod.metadata.deletion_timestamp.is_some(),
                "pod {name} lives on, but its deletion was acknowledged"
            ),
        }
    }
    Ok(())
}
