//! Pods that stay over the whole churn, of which nobody kills anything: a restart of skiff must not touch them, their
//! volumes must show what they should, and their data must be as it was written.

use crate::scene::{QUIET_PATIENCE, Scene, identity, insist, is_ready};
use crate::updates::{self, KEYS, SETTINGS};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use skiff_testkit::{BUSYBOX, Cluster, eventually, expect_eq};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tokio::runtime::Runtime;

pub(crate) const LABEL: &str = "resident";
const KEEPER: &str = "keeper";
const FILES: usize = 4;

/// Makes the files, once.
const SET_UP: &str = "set -e; cd /data; echo run >> runs; for n in 0 1 2 3; do \
    busybox dd if=/dev/urandom of=file-$n bs=64k count=4 2>/dev/null; done; busybox sha256sum file-* > sums";
/// Counts, so that a gap or a second start is seen.
const WRITE: &str = "n=0; while true; do echo $n >> /log/counted; n=$((n+1)); sleep 0.1; done";
/// Reads the files again and again, as a process that was there before.
const READ: &str =
    "cd /data; while true; do busybox sha256sum -c sums >/dev/null || echo broken >> broken; sleep 1; done";

/// A claim of the default class.
pub(crate) fn claim(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Mi"}}}})
}

/// Creates a claim, which gets its volume with its first pod.
pub(crate) async fn create_claim(scene: &Scene, name: &str) -> Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::default_namespaced(scene.client.clone());
    let claim = serde_json::from_value(claim(name))?;
    claims.create(&PostParams::default(), &claim).await?;
    Ok(())
}

/// The directory behind a claim.
pub(crate) async fn claimed(scene: &Scene, claim: &str) -> Result<PathBuf> {
    let claims: Api<PersistentVolumeClaim> = Api::default_namespaced(scene.client.clone());
    let claim = insist(claim, || claims.get(claim)).await?;
    let volume = claim
        .spec
        .and_then(|spec| spec.volume_name)
        .context("no volume")?;
    Ok(Cluster::data_dir(&scene.name).join("volumes").join(volume))
}

fn probe(script: &str) -> Value {
    json!({"exec": {"command": ["sh", "-c", script]}, "periodSeconds": 1, "timeoutSeconds": 20, "failureThreshold": 3})
}

fn container(name: &str, script: &str, mounts: &Value) -> Value {
    json!({"name": name, "image": BUSYBOX, "command": ["sh", "-c", script], "volumeMounts": mounts})
}

fn updated_volumes() -> [Value; 2] {
    [
        json!({"name": SETTINGS, "configMap": {"name": SETTINGS}}),
        json!({"name": KEYS, "secret": {"secretName": KEYS}}),
    ]
}

fn pod(name: &str, spec: Value) -> Value {
    let mut spec = spec;
    spec["terminationGracePeriodSeconds"] = json!(0);
    json!({"metadata": {"name": name, "labels": {LABEL: "yes"}}, "spec": spec})
}

/// A claim with data, subPaths of it and of a ConfigMap, volumes that change, an init container, a sidecar, all probes.
fn keeper() -> Value {
    let mounts = json!([{"name": "data", "mountPath": "/data"},
        {"name": "data", "mountPath": "/log", "subPath": "log"},
        {"name": SETTINGS, "mountPath": "/settings"}, {"name": KEYS, "mountPath": "/keys"},
        {"name": SETTINGS, "mountPath": "/fixed", "subPath": "a"}]);
    let mut reader = container("reader", READ, &mounts);
    reader["restartPolicy"] = json!("Always");
    reader["startupProbe"] = probe("test -e /data/sums");
    let mut writer = container("writer", WRITE, &mounts);
    writer["startupProbe"] = probe("test -e /log/counted");
    writer["livenessProbe"] = probe("test -e /data/sums && test ! -e /data/broken");
    writer["readinessProbe"] = probe("cat /settings/a /keys/a /fixed >/dev/null");
    let mut volumes = updated_volumes().to_vec();
    volumes.push(json!({"name": "data", "persistentVolumeClaim": {"claimName": KEEPER}}));
    pod(
        KEEPER,
        json!({"initContainers": [container("set-up", SET_UP, &mounts), reader], "containers": [writer], "volumes": volumes}),
    )
}

/// One that only sleeps, with a pid namespace of its own or a shared one.
fn sleeper(shared: bool) -> Value {
    let spec = json!({"shareProcessNamespace": shared, "containers": [
        {"name": "c", "image": BUSYBOX, "command": ["sleep", "100000"]}]});
    pod(&format!("sleeper-{shared}"), spec)
}

/// One with users of its own.
fn mapped() -> Value {
    let mounts = json!([{"name": SETTINGS, "mountPath": "/settings"}, {"name": KEYS, "mountPath": "/keys"},
        {"name": "own", "mountPath": "/own"}, {"name": "own", "mountPath": "/deep", "subPath": "deep"}]);
    let mut only = container(
        "c",
        "echo mine > /deep/file; while true; do sleep 1; done",
        &mounts,
    );
    only["livenessProbe"] = probe("test \"$(cat /own/deep/file)\" = mine && cat /settings/a /keys/a");
    let mut volumes = updated_volumes().to_vec();
    volumes.push(json!({"name": "own", "emptyDir": {}}));
    pod(
        "mapped",
        json!({"hostUsers": false, "containers": [only], "volumes": volumes}),
    )
}

pub(crate) struct Residents {
    /// By pod.
    identities: BTreeMap<String, Vec<String>>,
    pub uids: BTreeMap<String, String>,
    /// What the keeper's claim holds.
    directory: PathBuf,
    files: Vec<Vec<u8>>,
    /// How far the keeper had counted.
    counted: u64,
}

impl Residents {
    /// Starts them, and `others` that are residents too.
    pub async fn start(scene: &Scene, others: Vec<Value>) -> Result<Self> {
        create_claim(scene, KEEPER).await?;
        let mut pods = vec![keeper(), sleeper(false), sleeper(true)];
        if scene.has_user_namespaces {
            pods.push(mapped());
        }
        pods.extend(others);
        let mut uids = BTreeMap::new();
        for pod in pods {
            let name = pod["metadata"]["name"].as_str().context("a name")?.to_owned();
            uids.insert(name, scene.create(pod).await?);
        }
        for name in uids.keys() {
            let is_up = |pod: Option<&_>| Ok(pod.is_some_and(is_ready));
            scene.wait(name, "ready", is_up).await?;
        }
        let directory = claimed(scene, KEEPER).await?;
        let files = (0..FILES).map(|number| hash(&directory.join(format!("file-{number}"))));
        Ok(Residents {
            identities: identities(scene).await?,
            uids,
            files: files.collect::<Result<_>>()?,
            directory,
            counted: 0,
        })
    }

    /// Whether a line about belongings is about a process of one of these: those come and go.
    pub fn is_process(&self, line: &str) -> bool {
        line.starts_with("process ") && self.uids.values().any(|uid| line.contains(uid.as_str()))
    }

    /// Nothing of them has changed but what should, which is `version` in the volumes.
    pub fn check(&mut self, runtime: &Runtime, scene: &Scene, cluster: &Cluster, version: u64) -> Result<()> {
        expect_eq(&runtime.block_on(identities(scene))?, &self.identities)?;
        for name in self.uids.keys() {
            let is_up = |pod: Option<&_>| Ok(pod.is_some_and(is_ready));
            runtime.block_on(scene.wait(name, "ready", is_up))?;
        }
        eventually("volumes show the last version", updates::DELAY, || {
            for name in [KEEPER, "mapped"] {
                let Some(uid) = self.uids.get(name) else { continue };
                updates::shows(&scene.volume(uid, "kubernetes.io~configmap", SETTINGS), version)?;
                updates::shows(&scene.volume(uid, "kubernetes.io~secret", KEYS), version)?;
            }
            Ok(())
        })?;
        // As the processes in the pods see it.
        let read = "cat /settings/a; echo; cat /keys/a; echo; cat /fixed; echo; cd /data && busybox sha256sum -c sums >/dev/null";
        let command = ["exec", KEEPER, "-c", "writer", "--", "sh", "-c", read];
        let found = cluster.kubectl().run(&command)?;
        expect_eq(found, format!("{version}\n{version}\n0\n"))?;
        if self.uids.contains_key("mapped") {
            let read = "cat /settings/a; echo; cat /keys/a /own/deep/file";
            let found = cluster
                .kubectl()
                .run(&["exec", "mapped", "--", "sh", "-c", read])?;
            expect_eq(found, format!("{version}\n{version}mine\n"))?;
        }
        self.check_data()?;
        // Once more: what was asked for above could have shaken something.
        expect_eq(&runtime.block_on(identities(scene))?, &self.identities)
    }

    fn check_data(&mut self) -> Result<()> {
        for (number, expected) in self.files.iter().enumerate() {
            let path = self.directory.join(format!("file-{number}"));
            ensure!(hash(&path)? == *expected, "{} has changed", path.display());
        }
        expect_eq(
            std::fs::read_to_string(self.directory.join("runs"))?,
            "run\n".into(),
        )?;
        ensure!(
            !self.directory.join("broken").exists(),
            "the reader saw broken data"
        );
        let log = self.directory.join("log/counted");
        let before = self.counted;
        self.counted = eventually("the keeper counts on", QUIET_PATIENCE, || {
            let counted = count(&std::fs::read_to_string(&log)?)?;
            ensure!(counted > before, "still at {counted}");
            Ok(counted)
        })?;
        Ok(())
    }
}

/// The numbers from 0 on, one a line, without a gap; how many.
fn count(text: &str) -> Result<u64> {
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    for (expected, line) in whole.lines().enumerate() {
        ensure!(
            line == expected.to_string(),
            "line {expected} of the log is {line:?}"
        );
    }
    Ok(whole.lines().count() as u64)
}

fn hash(path: &Path) -> Result<Vec<u8>> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    Ok(Sha256::digest(bytes).to_vec())
}

async fn identities(scene: &Scene) -> Result<BTreeMap<String, Vec<String>>> {
    let list = scene.pods().list(&ListParams::default().labels(LABEL)).await?;
    let one = |pod| {
        let lines = identity(&pod);
        Some((pod.metadata.name?, lines))
    };
    Ok(list.items.into_iter().filter_map(one).collect())
}
