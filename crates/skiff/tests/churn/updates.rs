//! A ConfigMap and a Secret that change all the time. Volumes must show the newest version of them, a file that is mounted
//! by subPath the first one.

use crate::scene::{Activity, Scene, insist};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use skiff_testkit::Random;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const SETTINGS: &str = "settings";
pub(crate) const KEYS: &str = "keys";
/// Bytes that make a write of the volume take longer.
const PADDING: usize = 20_000;

/// Both have the same version in two files.
fn settings(version: u64) -> Value {
    let text = version.to_string();
    json!({"metadata": {"name": SETTINGS}, "data": {"a": text, "b": text, "padding": "x".repeat(PADDING)}})
}

fn keys(version: u64) -> Value {
    let text = version.to_string();
    json!({"metadata": {"name": KEYS}, "stringData": {"a": text, "b": text}})
}

pub(crate) async fn create(scene: &Scene) -> Result<()> {
    let maps: Api<ConfigMap> = Api::default_namespaced(scene.client.clone());
    let secrets: Api<Secret> = Api::default_namespaced(scene.client.clone());
    maps.create(&PostParams::default(), &serde_json::from_value(settings(0))?)
        .await?;
    secrets
        .create(&PostParams::default(), &serde_json::from_value(keys(0))?)
        .await?;
    Ok(())
}

/// Changes both until told to stop; how many versions were acknowledged, counted from `done`.
pub(crate) async fn work(scene: Arc<Scene>, done: u64, mut random: Random) -> Result<u64> {
    let mut version = done;
    while !scene.is_over() {
        write(&scene, version + 1).await?;
        version += 1;
        let _update = scene.during(Activity::VolumeUpdate);
        tokio::time::sleep(random.millis(50, 700)).await;
    }
    Ok(version)
}

async fn write(scene: &Scene, version: u64) -> Result<()> {
    let maps: Api<ConfigMap> = Api::default_namespaced(scene.client.clone());
    let secrets: Api<Secret> = Api::default_namespaced(scene.client.clone());
    let parameters = PatchParams::default();
    let (map, secret) = (Patch::Merge(settings(version)), Patch::Merge(keys(version)));
    insist(SETTINGS, || maps.patch(SETTINGS, &parameters, &map)).await?;
    insist(KEYS, || secrets.patch(KEYS, &parameters, &secret)).await?;
    Ok(())
}

/// The volume shows this version in all files.
pub(crate) fn shows(volume: &Path, version: u64) -> Result<()> {
    for file in ["a", "b"] {
        let path = volume.join(file);
        let found = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        ensure!(
            found == version.to_string(),
            "{} has version {found}, not {version}",
            path.display()
        );
    }
    Ok(())
}

/// The API has what it acknowledged.
pub(crate) async fn nothing_lost(scene: &Scene, version: u64) -> Result<()> {
    let maps: Api<ConfigMap> = Api::default_namespaced(scene.client.clone());
    let map = maps.get(SETTINGS).await?;
    let found = map.data.as_ref().and_then(|data| data.get("a"));
    ensure!(
        found == Some(&version.to_string()),
        "version {version} of the settings was acknowledged, there is {found:?}"
    );
    Ok(())
}

/// How long the watches of the node have to bring a version.
pub(crate) const DELAY: Duration = Duration::from_secs(90);
