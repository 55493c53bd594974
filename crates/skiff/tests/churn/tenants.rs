//! One pod after another over the same claim. Each finds what the ones before it wrote, adds its own, and says farewell
//! when it is told to end: a kill of skiff must take neither data nor grace from it.

use crate::residents::{claimed, create_claim};
use crate::scene::{Activity, QUIET_PATIENCE, Scene, ensure_no_restart, insist, is_ready};
use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};
use skiff_testkit::{BUSYBOX, Random, eventually};
use std::path::Path;
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Bytes that each pod writes.
const CHUNK: usize = 200_000;
/// What an init container ends with when it finds the data changed.
const CHANGED: i32 = 7;
/// More than a farewell takes, by far.
const GRACE: i64 = 30;

/// Whoever rents a claim.
pub(crate) struct Tenant {
    claim: String,
    /// The number of the next pod.
    next: usize,
    /// The pods whose chunks were seen complete.
    written: Vec<usize>,
}

impl Tenant {
    pub async fn new(scene: &Scene, claim: String) -> Result<Self> {
        create_claim(scene, &claim).await?;
        let (next, written) = (0, Vec::new());
        Ok(Tenant { claim, next, written })
    }

    /// How many pods there have been.
    pub fn pods(&self) -> usize {
        self.next
    }

    /// Pods come and go until told to stop.
    pub async fn work(mut self, scene: Arc<Scene>, mut random: Random) -> Result<Self> {
        while !scene.is_over() {
            let name = format!("{}-{}", self.claim, self.next);
            self.one_pod(&scene, &name, &mut random)
                .await
                .with_context(|| format!("pod {name}"))?;
            self.next += 1;
        }
        Ok(self)
    }

    async fn one_pod(&mut self, scene: &Arc<Scene>, name: &str, random: &mut Random) -> Result<()> {
        let start = scene.during(Activity::PodStart);
        let uid = scene
            .create(pod(name, &self.claim, self.next, random.one_in(2)))
            .await?;
        if random.one_in(4) {
            // It ends somewhere on its way.
            tokio::time::sleep(random.millis(0, 2500)).await;
            drop(start);
            let _grace = scene.during(Activity::GracePeriod);
            let parameters = DeleteParams::default().grace_period(u32::try_from(random.below(3))?);
            scene.delete(name, &parameters).await?;
            return scene.wait_gone(name, &uid).await;
        }
        scene.wait(name, "ready", is_well).await?;
        drop(start);
        self.written.push(self.next);
        tokio::time::sleep(random.millis(0, 1500)).await;
        let grace = scene.during(Activity::GracePeriod);
        let pods = scene.pods();
        is_well(Some(&insist(name, || pods.get(name)).await?))?;
        if random.one_in(5) {
            // Nobody waits for its end, and the next one may meet it.
            let parameters = DeleteParams::default().grace_period(0);
            scene.delete(name, &parameters).await?;
            return scene.wait_gone(name, &uid).await;
        }
        scene.delete(name, &DeleteParams::default()).await?;
        scene.wait_gone(name, &uid).await?;
        drop(grace);
        let farewell = claimed(scene, &self.claim)
            .await?
            .join("inner")
            .join(format!("farewell-{}", self.next));
        ensure!(
            farewell.exists(),
            "it was killed before the end of its grace period"
        );
        Ok(())
    }

    /// All that was written is there as it was written.
    pub fn check(&self, runtime: &Runtime, scene: &Scene) -> Result<()> {
        let Some(last) = self.written.last() else {
            println!("no pod of the claim {} became ready", self.claim);
            return Ok(());
        };
        let directory = runtime.block_on(claimed(scene, &self.claim))?.join("inner");
        ensure!(*last < self.next);
        for number in &self.written {
            let path = directory.join(format!("chunk-{number}"));
            let found = std::fs::read(&path).with_context(|| path.display().to_string())?;
            let line = format!("{}-{number}\n", self.claim);
            let expected = line.bytes().cycle().take(CHUNK);
            ensure!(found.into_iter().eq(expected), "{} has changed", path.display());
        }
        Ok(())
    }
}

/// Ready, and never started again. A pod that found the data changed will not be.
fn is_well(pod: Option<&Pod>) -> Result<bool> {
    let pod = pod.context("it is gone, which nobody asked for")?;
    let status = pod.status.as_ref();
    let before = status.and_then(|status| status.init_container_statuses.as_ref());
    for one in before.into_iter().flatten() {
        let state = [one.state.as_ref(), one.last_state.as_ref()];
        let mut ended = state.into_iter().flatten().filter_map(|s| s.terminated.as_ref());
        if ended.any(|state| state.exit_code == CHANGED) {
            bail!("it found the data of its claim changed");
        }
    }
    ensure_no_restart(pod)?;
    Ok(is_ready(pod))
}

fn pod(name: &str, claim: &str, number: usize, has_sidecar: bool) -> Value {
    let check = format!(
        "cd /claim/inner 2>/dev/null || exit 0; for f in chunk-*; do [ -e $f ] || continue; n=${{f#chunk-}}; \
         busybox yes {claim}-$n | busybox head -c {CHUNK} | busybox cmp -s - $f || exit {CHANGED}; done"
    );
    let write = format!(
        "trap 'sleep 0.7; echo bye >/data/farewell-{number}; exit 0' TERM; \
         busybox yes {name} | busybox head -c {CHUNK} >/data/new && busybox mv /data/new /data/chunk-{number}; \
         while true; do sleep 0.1; done"
    );
    let wait = "trap 'exit 0' TERM; while true; do sleep 0.1; done";
    let container = |name: &str, script: &str, mount: Value| json!({"name": name, "image": BUSYBOX, "command": ["sh", "-c", script], "volumeMounts": [mount]});
    let whole = || json!({"name": "data", "mountPath": "/claim"});
    let part = json!({"name": "data", "mountPath": "/data", "subPath": "inner"});
    let mut before = vec![container("check", &check, whole())];
    if has_sidecar {
        let mut sidecar = container("side", wait, whole());
        sidecar["restartPolicy"] = json!("Always");
        before.push(sidecar);
    }
    let mut writer = container("writer", &write, part);
    writer["readinessProbe"] = json!({"periodSeconds": 1, "timeoutSeconds": 20,
        "exec": {"command": ["sh", "-c", format!("test -e /data/chunk-{number}")]}});
    json!({"metadata": {"name": name}, "spec": {
        "terminationGracePeriodSeconds": GRACE,
        "initContainers": before, "containers": [writer],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]}})
}

/// All claims go, and what was in them.
pub(crate) fn remove_claims(runtime: &Runtime, scene: &Scene, volumes: &Path) -> Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::default_namespaced(scene.client.clone());
    runtime.block_on(claims.delete_collection(&DeleteParams::default(), &ListParams::default()))?;
    eventually("the volumes are gone", QUIET_PATIENCE, || {
        let left = std::fs::read_dir(volumes)?.flatten().map(|entry| entry.path());
        let left: Vec<_> = left.collect();
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    })
}
